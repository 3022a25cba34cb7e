# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What operators read: host reports, a shard's environment for a shell, the last lines of a failed deploy, a replica's status."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from ansible_collections.rankzero.inference.plugins.filter import failures as failures_filter
from ansible_collections.rankzero.inference.plugins.plugin_utils import environment_text, failures, node_report, status


def facts(**more: Any) -> dict[str, Any]:
    return {"schema": 1, "host": {"service_manager": "systemd", "os": {"id": "debian", "version": "12"}}, "gpus": [], "hcas": [], "interfaces": [], **more}


def test_a_report_says_every_condition_that_would_stop_a_replica() -> None:
    text = node_report.report(
        "gpu-a",
        facts(
            drivers={"nvidia": {"state": "version_mismatch", "message": "library 580.95 does not fit kernel module 570.172", "hint": "reboot the host"}},
            gpus=[
                {
                    "index": 3,
                    "uuid": "GPU-3",
                    "model": "NVIDIA H100",
                    "memory": {"model": "discrete", "total_mib": 81559, "unattributed_mib": 9000},
                    "health": {"state": "lost", "reasons": ["it fell off the bus"]},
                    "compute_mode": "prohibited",
                    "partition": {"mode_current": True},
                    "processes": [{"pid": 7, "name": "python", "used_mib": None}],
                }
            ],
            hcas=[{"name": "mlx5_0", "usable": False, "reasons": ["port state is down"], "link_layer": "InfiniBand"}],
            cordoned={"by": "ops", "reason": "fan", "at": "today"},
            limits={"memlock_bytes": 65536, "shm": {"size_mib": 64}, "nccl_conf": {"/etc/nccl.conf": {"NCCL_DEBUG": "INFO"}}, "kho_cma_suspect": True},
        ),
    )
    for word in (
        "reboot the host",
        "GPU 3: it fell off the bus",
        "MIG",
        "prohibited",
        "pid 7 python (? MiB)",
        "GPU 3 is held by pid 7 python of unknown user (unknown memory): no replica gets it",
        "GPU 3: 9000 MiB are in use and no process that is listed here holds them",
        "can lock 64 KiB",
        "port state is down",
        "cordoned by ops",
        "64 MiB",
        "NCCL_DEBUG=INFO",
        "kho=off",
    ):
        assert word in text, f"{word!r} is missing in:\n{text}"


def test_a_host_without_facts_or_problems_is_reported_too() -> None:
    assert node_report.report("gpu-b", None) == "gpu-b: no node facts"
    assert "nothing stands in the way" in node_report.report("gpu-c", facts())


def test_the_environment_text_sets_exactly_the_launch_environment_in_a_shell() -> None:
    env = {"A": 'it\'s $HOME `id` "x" %h', "B": "", "C": "ü # no comment"}
    plan = {"shards": {"gpu-a": {"rank": 0, "launches": [{"name": "engine", "env": env, "why": {"A": "one\nreason", "B": "#"}, "secret_env": ["KEY"]}]}}}
    text = environment_text.text(plan)
    shown = subprocess.run(["env", "-i", "sh", "-c", text + "\nexec env -0"], capture_output=True, check=True).stdout
    seen = dict(item.split("=", 1) for item in shown.decode().split("\0") if "=" in item)
    assert {name: seen[name] for name in env} == env and "KEY" not in seen
    assert "# KEY" in text


def test_a_failed_deploy_names_the_culprit_with_its_cause_first() -> None:
    text = failures.summary(
        "glm",
        {
            "gpu-a": {"msg": "long\nreport", "verdict": {"reason": "the engine ended with exit code 1", "cause": None}},
            "gpu-b": {
                "msg": "x",
                "log_command": "journalctl -u inference-glm",
                "verdict": {
                    "reason": "the engine ended with exit code 1",
                    "cause": "A GPU ran out of memory.",
                    "hint": "Lower the context length.",
                    "log_lines": ["torch.OutOfMemoryError: CUDA out of memory.", "two", "three", "four"],
                },
            },
            "gpu-c": {"msg": "gave up", "gave_up": {"rank": 1}},
            "gpu-d": None,
            "gpu-e": {"msg": "disk full\nmore"},
        },
        {"gpu-a": 0, "gpu-b": 1, "gpu-c": 2},
        "abc",
    )
    assert text.splitlines() == [
        "Replica glm was not deployed. Revision abc, which was there before, is back.",
        "  rank 1 (gpu-b): the engine ended with exit code 1. A GPU ran out of memory.",
        "  rank 0 (gpu-a): the engine ended with exit code 1",
        "  gpu-e: disk full",
        "  do: Lower the context length.",
        "    | torch.OutOfMemoryError: CUDA out of memory.",
        "    | two",
        "    | three",
        "  next: on gpu-b: journalctl -u inference-glm",
    ]
    assert "Nothing of it was left behind." in failures.summary("glm", {}, {}, None)


def test_a_rank_whose_own_engine_ended_comes_before_one_that_was_met_after_its_run() -> None:
    met = {"verdict": {"reason": "the shard does not stay up: the run before this one ended: rank 1 left"}}
    own = {"verdict": {"reason": "the engine ended with exit code 1"}}
    lines = failures.summary("glm", {"gpu-a": met, "gpu-b": own}, {"gpu-a": 0, "gpu-b": 1}, None).splitlines()
    assert [line[:8] for line in lines[1:3]] == ["  rank 1", "  rank 0"]
    assert lines[-1] == "  next: ansible-playbook rankzero.inference.diagnose -e replica_name=glm"


@pytest.mark.parametrize(
    ("log", "shown"),
    [
        (
            ["run_shard: the leader listens", "loading", "half", "bad flag --x", "run_shard: stopping", "run_shard: is over"],
            ["loading", "half", "bad flag --x"],
        ),
        (["ValueError: x", "one", "two", "three", "run_shard: stopping"], ["ValueError: x", "two", "three"]),
        (["boom", "bang"], ["boom", "bang"]),
        (["run_shard: one", "run_shard: two"], ["run_shard: one", "run_shard: two"]),
        ([], []),
    ],
)
def test_a_failure_without_a_known_cause_shows_the_engine_s_last_words(log: list[str], shown: list[str]) -> None:
    text = failures.summary("glm", {"gpu-a": {"verdict": {"reason": "it ended", "cause": None, "log_lines": log}}}, {"gpu-a": 0}, "abc")
    assert [line[6:] for line in text.splitlines() if line.startswith("    | ")] == shown


def test_a_replica_is_ready_only_as_a_whole() -> None:
    def host(rank: int, ready: bool = True, revision: str = "r1") -> tuple[Any, Any]:
        return {
            "shards": {"glm": {"rank": rank, "nodes": 2, "stage": "running", "ready": ready, "revision": revision, "restarts": 0, "unit": {"active": True}}}
        }, None

    assert status.whole(status.ranks("glm", {"a": host(0), "b": host(1)}))
    assert not status.whole(status.ranks("glm", {"a": host(0)})), "a rank is missing"
    assert not status.whole(status.ranks("glm", {"a": host(0), "b": host(1, ready=False)}))
    assert not status.whole(status.ranks("glm", {"a": host(0), "b": host(1, revision="r2")})), "two revisions"
    assert not status.whole(status.ranks("glm", {"a": host(0), "b": host(0)})), "two leaders"
    assert "no shard on any of 1 host" in status.text("glm", [], ["a"])


def test_a_live_look_decides_what_a_status_says() -> None:
    """After a restart by itself nothing has marked the ranks yet; what they prove now counts. A mark from before does not outlive a failed look."""

    def host(marked: bool, ready: bool) -> tuple[Any, Any]:
        record = {"rank": 0, "nodes": 1, "stage": "running", "ready": marked, "revision": "r1", "unit": {"active": True}}
        return {"shards": {"glm": record}}, {
            "verdict": {"ready": ready, "failed": not ready, "stage": "ready" if ready else "failed", "evidence": {"gpus": []}, "reason": "x"}
        }

    assert status.whole(status.ranks("glm", {"a": host(False, True)}))
    assert not status.whole(status.ranks("glm", {"a": host(True, False)}))


def test_the_summary_of_a_deploy_says_where_the_time_went_and_what_each_gpu_holds() -> None:
    """Equal GPUs are told in one word; a rank that was not waited for has no seconds, and without any there is no column."""

    def seen(rank: int, held: list[int | None], **look: Any) -> tuple[Any, Any]:
        record = {"rank": rank, "nodes": 2, "stage": "running", "ready": True, "revision": "r1", "unit": {"active": True}}
        gpus = [{"held_mib": mib, "expected_mib": 47683} for mib in held]
        return {"shards": {"glm": record}}, {"verdict": {"ready": True, "stage": "ready", "evidence": {"gpus": gpus}}, **look}

    ranks = status.ranks("glm", {"a": seen(0, [72010] * 8, seconds=142.6, stages={"starting": 1.2, "loading": 141.4}), "b": seen(1, [72010, None])})
    text = status.text("glm", ranks, ["a", "b"], "http://a:8000")
    lines = text.splitlines()
    assert lines[0] == "Replica glm: ready at http://a:8000" and lines[1].endswith("seconds until ready, by stage")
    assert "8 x 72010/47683" in lines[2] and lines[2].endswith("142.6: starting 1.2, loading 141.4")
    assert "72010/47683, ?/47683" in lines[3] and lines[3].endswith("-")
    assert "seconds until ready" not in status.text("glm", status.ranks("glm", {"a": seen(0, [1]), "b": seen(1, [1])}), ["a", "b"])


def test_a_drained_replica_is_stopped_and_one_that_broke_is_not() -> None:
    def seen(rank: int, recorded: str, **facts_too: Any) -> tuple[Any, Any]:
        record = {"rank": rank, "nodes": 2, "stage": recorded, "ready": False, "revision": "r1", "unit": {"active": False}}
        return {"shards": {"glm": record}, **facts_too}, {"verdict": {"ready": False, "stage": "failed", "evidence": {}, "reason": "the shard was stopped"}}

    cordoned = {"by": "ann@control", "reason": "fan 3 is broken", "at": "today"}
    text = status.text("glm", status.ranks("glm", {"a": seen(0, "stopped"), "b": seen(1, "stopped", cordoned=cordoned)}), ["a", "b"])
    assert text.startswith("Replica glm: stopped\n") and "failed" not in text
    assert "rank 1 (b): the shard was stopped; the host is cordoned by ann@control: fan 3 is broken" in text
    assert status.text("glm", status.ranks("glm", {"a": seen(0, "stopped"), "b": seen(1, "failed")}), ["a", "b"]).startswith("Replica glm: NOT ready\n")


@pytest.mark.parametrize(
    "record",
    [
        {"stage": "x\x1b[2J", "revision": "r\nq", "detail": "d\x1b[2J\n", "unit": 5, "restarts": "\x1b"},
        {"rank": "z", "evidence": "none"},
        {"evidence": {"gpus": [3, None]}},
        {"evidence": {"gpus": 5}},
    ],
)
@pytest.mark.parametrize("look", [None, 5, {"verdict": "ready"}])
def test_a_status_of_damaged_facts_writes_no_control_characters(record: dict[str, Any], look: Any) -> None:
    facts = {"shards": {"glm": record}, "cordoned": {"by": ["x"], "reason": "a\nb\x1b[2J"}}
    lines = status.text("glm", status.ranks("glm", {"h": (facts, look)}), ["h"]).splitlines()
    assert len(lines) == 4 and all(line.isprintable() for line in lines)


def test_one_host_tells_the_report_and_the_others_where_it_is() -> None:
    failed = {"verdict": {"reason": "it ended", "cause": "A GPU ran out of memory."}, "failed": True}
    unlocked = {"__replica_unlocked": {"changed": True}}
    variables = {"a": {}, "b": {"ansible_failed_result": failed, **unlocked}, "c": unlocked}
    plan = {"replica": "glm", "shards": {host: {"rank": rank} for rank, host in enumerate("abc")}, "way_back": {"revision": None, "hosts": {}}}
    told = {host: failures_filter.failure_summary(["a", "b", "c"], variables, plan, "deployed", host) for host in "bc"}
    assert told["b"] == failures_filter.failure_summary(["a", "b", "c"], variables, plan) and len(told["b"].splitlines()) > 1
    assert told["c"] == told["b"].splitlines()[0] + " The report is at b.", "host a could not be reached"
    lost = {"unreachable": True, "msg": "timeout"}
    variables["b"]["__replica_unlocked"] = lost
    assert len(failures_filter.failure_summary(["a", "b", "c"], variables, plan, "deployed", "c").splitlines()) > 1, "b was lost before it could tell"
    variables["c"] = {"__replica_restored": lost, "__replica_unlocked": {"changed": True}}
    assert "c): it cannot be reached" in failures_filter.failure_summary(["a", "b", "c"], variables, plan, "deployed")
    assert not failures_filter.are_back(["c"], variables, {"hosts": {"c": 0}}), "it was lost when it was to be restored"


def test_a_status_says_what_it_could_not_see() -> None:
    record = {"rank": 1, "nodes": 2, "stage": "serving", "ready": True, "revision": "r1", "unit": {"active": True}}
    text = status.text("glm", status.ranks("glm", {"a": (None, None), "b": ({"shards": {"glm": record}}, None)}), ["a", "b"], silent=["a"])
    assert text.startswith("Replica glm: NOT ready\n") and "rank 0 is on none of the hosts that answered" in text
    assert text.endswith("a does not answer: whether it has a rank, and how that is, is not known")


def test_hosts_of_a_pool_without_a_part_say_nothing_and_do_not_take_the_report() -> None:
    failed = {"verdict": {"reason": "it ended"}, "failed": True}
    unlocked = {"__replica_unlocked": {"changed": False, "ok": True}}
    variables = {"free": unlocked, "a": {"ansible_failed_result": failed, **unlocked}, "b": unlocked, "old": unlocked, "full": unlocked}
    plan = {"replica": "glm", "shards": {"a": {"rank": 0}, "b": {"rank": 1}}, "way_back": {"revision": "r1", "hosts": {"a": 0, "old": 1}}}
    told = {host: failures_filter.failure_summary(list(variables), variables, plan, "deployed", host) for host in variables}
    assert told["free"] == told["full"] == "" and len(told["a"].splitlines()) > 1
    assert told["b"] == told["old"] == told["a"].splitlines()[0] + " The report is at a."
    variables["full"] = {"ansible_failed_result": {"msg": "no space"}, **unlocked}
    assert failures_filter.failure_summary(list(variables), variables, plan, "deployed", "full").endswith("The report is at a.")
