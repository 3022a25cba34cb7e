# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The likely cause over all ranks, from lines that engines and NCCL really write: what a rank says of itself counts before what it says of its peers."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from ansible_collections.rankzero.inference.plugins.module_utils import log_signatures, shard_diagnosis
from ansible_collections.rankzero.inference.plugins.plugin_utils import diagnosis
from ansible_collections.rankzero.inference.plugins.plugin_utils.diagnosis import Seen
from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Fault

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB"
PEER = "misc/socket.cc:88 NCCL WARN socketProgress: Connection closed by remote peer gpu-b<40912>"
WAITS = "DistStoreError: Timed out after 41 seconds waiting for clients. 1/2 clients joined."
RETRY = "TCP client failed to connect/validate to host 10.77.6.9:29501 - retrying (try=3, timeout=1800000ms"
OWN = "ValueError: The model's config has no field that anybody here knows"
XID = "NVRM: Xid (PCI:0000:1b:00): 79, pid=4711, GPU has fallen off the bus."


def answer(
    rank: int,
    *log: str,
    stage: str = "failed",
    nodes: int = 2,
    kernel: list[str] | None = None,
    active: bool = False,
    state: dict[str, Any] | None = None,
    ready: bool = False,
    **more: Any,
) -> dict[str, Any]:
    return {
        "present": True,
        "launch": {"rank": rank, "nodes": nodes, "tie": {"port": 1}},
        "state": {"stage": stage, "restarts": 3, **(state or {})},
        "service": {"active": active},
        "verdict": {
            "stage": stage,
            "ready": ready,
            "failed": stage == "failed",
            "reason": "the engine ended with exit code 1",
            "evidence": {"gpus": [{"held_mib": None, "expected_mib": 1024}]},
        },
        "telling": log_signatures.telling(list(log)),
        "kernel": kernel,
        "log_command": "journalctl -u inference-glm.service -n 200",
        "problems": {},
        **more,
    }


def concluded(hosts: dict[str, Seen]) -> tuple[str, str]:
    found = diagnosis.rows("glm", hosts)
    causes = diagnosis.candidates("glm", hosts, found)
    assert diagnosis.text("glm", found, causes)
    return diagnosis.conclusion("glm", found, causes)


def of(*answers: dict[str, Any]) -> dict[str, Seen]:
    return {"gpu-%s" % "abcd"[number]: Seen({}, one) for number, one in enumerate(answers)}


@pytest.mark.parametrize(
    ("logs", "rank", "text"),
    [
        pytest.param(([PEER], [OOM]), 1, "A GPU ran out of memory", id="lost peer on rank 0, memory on rank 1"),
        pytest.param(([PEER, WAITS], [OWN]), 1, "an error of its own", id="an unknown error counts before a known consequence"),
        pytest.param(([OWN], [OOM]), 1, "A GPU ran out of memory", id="a known cause counts before an unknown error"),
        pytest.param(([RETRY], [PEER]), 1, "Another rank ended first", id="a consequence counts before a retry"),
        pytest.param(([OOM], [OOM]), 0, "A GPU ran out of memory", id="alike: by rank"),
        pytest.param(([WAITS], []), 0, "not every rank joined in time", id="the only line there is"),
        pytest.param(
            (["Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7", "ncclRemoteError: A call failed"], []),
            0,
            "A collective operation did not finish",
            id="hang",
        ),
    ],
)
def test_cause_counts_before_consequence(logs: tuple[list[str], list[str]], rank: int, text: str) -> None:
    cause, step = concluded(of(*(answer(number, *log) for number, log in enumerate(logs))))
    assert cause.startswith("Likely cause: rank %d (gpu-%s): " % (rank, "ab"[rank])) and text in cause and step, cause


def test_the_kernel_explains_what_the_engine_cannot() -> None:
    cause, step = concluded(of(answer(0, PEER), answer(1, "RuntimeError: CUDA error: unspecified launch failure", kernel=[XID])))
    assert "rank 1 (gpu-b): A GPU of this host has a hardware fault" in cause and "Xid" in step


def test_the_rank_that_ended_first_counts_where_all_say_the_same() -> None:
    ended = {"last_end": {"rank": 1, "kind": "launch"}}
    assert "rank 1 (gpu-b)" in concluded(of(answer(0, OWN, state=ended), answer(1, OWN, state=ended)))[0]
    killed = {**ended, "own_end": {"rank": 1, "kind": "launch", "code": None, "signal": "SIGKILL", "reason": "sim-engine was ended by SIGKILL"}}
    cause, step = concluded(of(answer(0, PEER, state=ended), answer(1, state=killed)))
    assert (
        "rank 1 (gpu-b): sim-engine was ended by SIGKILL. It was killed by SIGKILL: by the kernel for lack of memory, or by hand" in cause and "dmesg" in step
    )
    stopped = answer(1, stage="stopped", verdict={"stage": "failed", "failed": True, "reason": "run_shard.py does not run"})
    assert "rank 1 (gpu-b): run_shard.py does not run" in concluded(of(answer(0, PEER, stage="tying", active=True), stopped))[0]
    on_cpu = answer(1, active=True, verdict={"stage": "failed", "failed": True, "reason": "it runs on the CPU"})
    assert "rank 1 (gpu-b): it runs on the CPU" in concluded(of(answer(0, WAITS, stage="joining", active=True), on_cpu))[0]
    refused = {**ended, "own_end": {"rank": 1, "kind": "check", "reason": "GPU 1 is held by pid 77"}}
    assert "rank 1 (gpu-b): it refused to start: GPU 1 is held by pid 77" in concluded(of(answer(0, PEER, state=ended), answer(1, state=refused)))[0]


def test_a_silent_host_explains_what_its_peers_say_of_it() -> None:
    hosts = {"gpu-a": Seen({}, answer(0, PEER, WAITS)), "gpu-b": Seen(None, None, "the host cannot be reached: Connection timed out", True)}
    found = diagnosis.rows("glm", hosts, {"shards": {"gpu-b": {"rank": 1}}})
    assert [(row["rank"], row["stage"]) for row in found] == [(0, "failed"), (1, "unreachable")]
    cause, step = concluded(hosts)
    assert cause == "Likely cause: a rank (gpu-b): the host cannot be reached: Connection timed out." and "sshd" in step
    hosts["gpu-a"] = Seen({}, answer(0, OOM))
    assert "A GPU ran out of memory" in concluded(hosts)[0], "a line that tells the cause counts before a host that is silent to the controller"


def test_half_gone_never_there_loading_and_well() -> None:
    absent = {"present": False, "problems": {}, "telling": []}
    assert "was never deployed here" in concluded({"gpu-a": Seen({}, absent), "gpu-b": Seen({}, absent)})[0]
    cause, step = concluded({"gpu-a": Seen({}, answer(0, active=True, stage="tying")), "gpu-b": Seen({}, absent)})
    assert "rank 1" in cause and "its shard is not there" in cause and "Deploy again" in step
    loading = answer(0, active=True, stage="loading", nodes=1)
    assert concluded(of(loading))[0] == "No rank has failed. Rank 0 (gpu-a) is in stage loading: the engine ended with exit code 1."
    cause, _step = concluded(of(answer(0, PEER, stage="ready", ready=True, active=True), answer(1, stage="ready", ready=True, active=True)))
    assert cause == "Nothing is wrong now: all 2 ranks are ready, after 3 restart(s) of this revision."


def test_what_runs_and_could_not_start_again_is_said() -> None:
    """A model is moved away while the replica serves: the deploy, the restart and the next boot would fail."""
    hosts = of(*(answer(rank, stage="ready", ready=True, active=True) for rank in (0, 1)))
    found = diagnosis.rows("glm", hosts)
    faults = [Fault(host, None, "model_path", "no /models/glm", "a file or directory on the host", "Copy it there.") for host in hosts]
    text = diagnosis.text("glm", found, [], faults)
    assert "all 2 ranks are ready" in text and "A plan made now is refused. Faults (2):" in text and "1. gpu-a: model_path: seen no /models/glm" in text
    assert "Nothing has to be done" not in text and "Next: Mend what the plan is refused for" in text
    assert "A plan made now" not in diagnosis.text("glm", found, []) and diagnosis.conclusion("glm", found, [])[1] == "Nothing has to be done."


def test_damaged_records_are_no_traceback() -> None:
    odd = {
        "present": True,
        "launch": None,
        "state": [],
        "service": None,
        "verdict": None,
        "telling": [],
        "kernel": None,
        "problems": {"look": "the records of the shard are damaged: KeyError: 'pid'"},
    }
    cause, _step = concluded({"gpu-a": Seen("x", odd), "gpu-b": Seen({"shards": 7}, {**odd, "launch": {"rank": "1", "nodes": None}})})
    assert "gpu-a" in cause


# ---- what the host reads


def test_each_cause_is_told_once_and_in_the_order_of_the_log() -> None:
    found = log_signatures.telling([RETRY, PEER, OOM, OOM + " again", OWN, "nothing"])
    assert [entry["kind"] for entry in found] == ["weak", "consequence", "cause", "error"]
    assert found[2]["line"] == OOM and len(log_signatures.telling([OOM, PEER, OWN], most=2)) == 2


def test_only_runs_that_matter_are_searched() -> None:
    log = [f"run_shard: glm rank 0 of 1, fingerprint f, run {number}" if half == 0 else f"line {number}" for number in range(5) for half in (0, 1)]
    assert shard_diagnosis.recent(log, {"stage": "running"})[-1] == "line 4" and len(shard_diagnosis.recent(log, {})) == 2
    assert len(shard_diagnosis.recent(log, {"last_end": {"rank": 0}})) == 4 and len(shard_diagnosis.recent(log, {"failures": 9})) == 6
    assert shard_diagnosis.recent(["x"], None) == ["x"]


def test_old_lines_of_the_kernel_are_left_out(tmp_path: pathlib.Path) -> None:
    (tmp_path / "stat").write_text("cpu 1\nbtime 1000000\n")
    text = "[   10.5] %s\n[90000.25] %s\n[90001.0] eth0: link up\nno stamp: Out of memory: Killed process 7 (vllm)\n" % (XID, XID)

    def run(*_words: Any, **_more: Any) -> tuple[int, str, str]:
        return 0, text, ""

    lines, problem = shard_diagnosis.kernel_lines(run, str(tmp_path), 1090000)
    assert problem is None and lines == ["1970-01-13T14:46:40Z " + XID, "no stamp: Out of memory: Killed process 7 (vllm)"]
    assert shard_diagnosis.kernel_lines(lambda *_w, **_m: (1, "", "Operation not permitted"), str(tmp_path), None) == (
        None,
        "dmesg ended with 1: Operation not permitted",
    )


def test_a_replica_that_a_drain_has_stopped_waits_for_the_undrain() -> None:
    stopped = [answer(rank, stage="stopped", state={"detail": "SIGTERM received"}) for rank in (0, 1)]
    cordoned = {"cordoned": {"by": "ann@control", "reason": "fan 3 is broken", "at": "today"}}
    _cause, next_step = concluded({"gpu-a": Seen({}, stopped[0]), "gpu-b": Seen(cordoned, stopped[1])})
    for part in ("gpu-b is cordoned by ann@control: fan 3 is broken", "undrain_node -e drain_host=gpu-b", "restart_replica -e replica_name=glm"):
        assert part in next_step, next_step
