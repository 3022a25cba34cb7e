# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every rule of the verdict, as an observation and what must be said about it; then what must hold for all observations."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.rankzero.inference.plugins.module_utils import evidence

GPU = ["GPU-aaaaaaaa-0000-0000-0000-000000000000", "GPU-bbbbbbbb-1111-1111-1111-111111111111", "GPU-cccccccc-2222-2222-2222-222222222222"]
URL = "http://10.0.0.5:8000"
NOW = 1000.0


def process(pid: int, used_mib: int | None, ours: bool = True, **more: Any) -> dict[str, Any]:
    return {"pid": pid, "used_mib": used_mib, "ours": ours, "name": None if ours else "python", "user": None if ours else "bob", "shard": None, **more}


def gpu(number: int, *processes: dict[str, Any], used_mib: int | None = 0, **more: Any) -> dict[str, Any]:
    return {"uuid": GPU[number], "index": number, "pci_bdf": f"0000:{number}b:00.0", "used_mib": used_mib, "processes": list(processes), **more}


def answer(status: int | None = 200, error: str | None = None, json: Any = None, **more: Any) -> dict[str, Any]:
    return {"status": status, "error": error, "message": error, "json": json, "text": "", "server": None, "seconds": 0.1, **more}


def models(*names: str) -> dict[str, Any]:
    return answer(json={"object": "list", "data": [{"id": name} for name in names]})


def observed(gpus: int = 2, leader: bool = True, expected_mib: int = 20000, **more: Any) -> dict[str, Any]:
    """A shard of two ranks that has everything it needs to be ready, on this many GPUs."""
    ready = {
        "engine": "vllm",
        "serves_http": leader,
        "url": URL if leader else None,
        "health_path": "/health",
        "models_path": "/v1/models",
        "expect_models": ["glm", "sql"] if leader else [],
        "probe_path": "/v1/chat/completions",
        "probe_model": "glm",
        "key_secret": "api_key",
        "key_protects": "/v1/models",
        "gpu_evidence": gpus > 0,
        "falls_back_to_cpu": True,
        "devices_command": None,
        "accepts_on_port": None,
        "warmup_503": True,
        "budget_seconds": 900,
    }
    launch = {
        "schema": 1,
        "replica": "glm",
        "rank": 0 if leader else 1,
        "nodes": 2,
        "fingerprint": "f1",
        "ready": ready,
        "launches": [{"name": "engine", "path": "/bin/engine", "args": []}],
        "gpus": [{"uuid": GPU[number], "index": number, "pci_bdf": f"0000:{number}b:00.0", "expected_mib": expected_mib} for number in range(gpus)],
    }
    state = {
        "schema": 1,
        "replica": "glm",
        "rank": launch["rank"],
        "fingerprint": "f1",
        "run_id": "r1",
        "stage": "running",
        "detail": "engine runs as process 10",
        "stage_since": 900.0,
        "started_at": 900.0,
        "supervisor_pid": 9,
        "restarts": 0,
        "last_end": None,
        "launches": [{"name": "engine", "pid": 10, "started_at": 900.0, "exit": None}],
    }
    http = {
        "health": answer(),
        "models": models("glm", "sql"),
        "unauthenticated": answer(401),
        "generation": answer(json={"choices": [{}]}),
        "key": "used",
        "listener": {"pid": 10, "name": "vllm", "user": "rankzero", "ours": True},
    }
    whole = {
        "launch": launch,
        "launch_problem": None,
        "state": state,
        "service": {"active": True, "restarting": False, "failed": False, "restarts": 0, "result": "success", "manager": "systemd"},
        "patience": False,
        "wanted": {"fingerprint": "f1", "rank": launch["rank"], "run_id": "r1"},
        "driver": {"state": "ok", "message": None},
        "gpus": [gpu(number, process(10 + number, 70000), used_mib=70500) for number in range(gpus)] if gpus else None,
        "http": http if leader else None,
        "connected": None,
        "devices": None,
        "leader_serving": None if leader else True,
        "serving_since": NOW - 60,
        "log": [],
        "now": NOW,
    }
    return {**whole, **more}


def judge(observation: dict[str, Any]) -> dict[str, Any]:
    before = copy.deepcopy(observation)
    verdict = evidence.judge(observation)
    assert observation == before, "judging changed what it judges"
    assert verdict["ready"] == (verdict["stage"] == "ready")
    assert verdict["failed"] == (verdict["stage"] == "failed")
    assert verdict["reason"]
    return verdict


# ------------------------------------------------------------------------------------------------------------------ ready


def test_leader_with_all_proof_is_ready() -> None:
    verdict = judge(observed())
    assert verdict["stage"] == "ready"
    assert verdict["serving"] is True
    assert verdict["reason"] == "it serves glm, sql, 2 of 2 GPUs hold their share"
    assert [(row["held_mib"], row["by"], row["pids"], row["enough"]) for row in verdict["evidence"]["gpus"]] == [
        (70000, "processes", [10], True),
        (70000, "processes", [11], True),
    ]
    assert verdict["evidence"]["judged_without_gpu"] is False


def test_follower_is_ready_when_the_leader_serves() -> None:
    assert judge(observed(leader=False))["stage"] == "ready"
    assert judge(observed(leader=False))["evidence"]["http"] is None
    assert judge(observed(leader=False))["serving"] is False


def test_follower_waits_for_the_leader() -> None:
    verdict = judge(observed(leader=False, leader_serving=False, serving_since=None))
    assert (verdict["stage"], verdict["reason"]) == ("holding", "the leader does not serve yet")


def test_follower_is_judged_alone_when_nobody_asks_the_leader() -> None:
    verdict = judge(observed(leader=False, leader_serving=None, serving_since=None))
    assert verdict["stage"] == "ready"
    assert "the leader was not asked here" in verdict["reason"]


def test_cpu_profile_is_judged_without_gpus_and_says_so() -> None:
    verdict = judge(observed(gpus=0))
    assert verdict["stage"] == "ready"
    assert verdict["evidence"]["judged_without_gpu"] is True
    assert "judged without GPU evidence (CPU profile)" in verdict["reason"]


def test_cpu_follower_waits_for_the_leader() -> None:
    assert judge(observed(gpus=0, leader=False, leader_serving=False, serving_since=None))["stage"] == "loading"
    assert judge(observed(gpus=0, leader=False))["stage"] == "ready"


def test_gpu_profile_without_gpus_proves_nothing() -> None:
    observation = observed(gpus=1)
    observation["launch"]["gpus"] = []
    verdict = judge(observation | {"gpus": [gpu(0)]})
    assert verdict["failed"]
    assert "assigns no GPU" in verdict["reason"]


# ------------------------------------------------------------------------------------------------------------------ stages


@pytest.mark.parametrize(
    ("stage", "detail", "text"),
    [
        ("starting", "", "the service is starting"),
        ("waiting", "launch engine waits for the leader at 10.0.0.5:29501", "waiting: launch engine waits"),
        ("sidecars", "ray runs as process 9", "starting the sidecars: ray runs"),
    ],
)
def test_stages_before_the_engine(stage: str, detail: str, text: str) -> None:
    observation = observed(http=None)
    observation["state"].update(stage=stage, detail=detail, launches=[])
    verdict = judge(observation)
    assert verdict["stage"] == stage
    assert verdict["reason"].startswith(text)


def refused(**more: Any) -> dict[str, Any]:
    return observed(
        http={"health": answer(None, "refused"), "models": None, "unauthenticated": None, "generation": None, "key": None, "listener": None},
        serving_since=None,
        **more,
    )


def test_nothing_held_on_several_nodes_is_joining() -> None:
    verdict = judge(refused() | {"gpus": [gpu(0), gpu(1)]})
    assert (verdict["stage"], verdict["detail"]) == ("joining", "0 of 2 GPUs hold their share")


def test_bare_contexts_on_several_nodes_are_joining() -> None:
    assert judge(refused() | {"gpus": [gpu(0, process(10, 480)), gpu(1, process(11, 480))]})["stage"] == "joining"


def test_on_one_node_there_is_nobody_to_join() -> None:
    observation = refused() | {"gpus": [gpu(0), gpu(1)]}
    observation["launch"]["nodes"] = 1
    assert judge(observation)["stage"] == "loading"


def test_some_memory_is_loading_and_enough_is_holding() -> None:
    assert judge(refused() | {"gpus": [gpu(0, process(10, 70000)), gpu(1, process(11, 9000))]})["stage"] == "loading"
    verdict = judge(refused())
    assert (verdict["stage"], verdict["reason"]) == ("holding", f"nothing listens at {URL} yet")


def test_503_while_loading() -> None:
    observation = refused()
    observation["http"]["health"] = answer(503, "loading")
    assert "still loading" in judge(observation)["reason"]
    observation["launch"]["ready"]["warmup_503"] = False
    verdict = judge(observation)
    assert verdict["stage"] == "holding"
    assert "answers 503 instead of 200" in verdict["reason"]


@pytest.mark.parametrize("error", ["timeout", "other"])
def test_health_that_does_not_answer_is_not_serving(error: str) -> None:
    observation = observed()
    observation["http"]["health"] = answer(None, error)
    assert judge(observation)["stage"] == "holding"


def test_no_state_yet_is_starting() -> None:
    assert judge(observed(state=None))["stage"] == "starting"
    assert judge(observed(state=None, service=None, patience=True))["stage"] == "starting"


def test_state_of_another_revision_is_not_this_run() -> None:
    observation = observed()
    observation["state"].update(fingerprint="f0", stage="failed")
    observation["state"].update(launches=[{"name": "engine", "pid": 10, "started_at": 1, "exit": {"code": 1, "signal": None}}])
    assert judge(observation)["stage"] == "starting"


# ------------------------------------------------------------------------------------------------------------------ ends


def ended(code: int | None, signal: str | None = None, **more: Any) -> dict[str, Any]:
    observation = observed(**more)
    observation["state"].update(stage="stopping", detail="engine engine ended")
    observation["state"]["launches"][0]["exit"] = {"code": code, "signal": signal, "at": NOW}
    return observation


@pytest.mark.parametrize("code", [0, 1, 3])
@pytest.mark.parametrize("leader", [True, False])
@pytest.mark.parametrize("patience", [True, False])
def test_engine_that_ends_has_failed_at_once_whatever_its_code(code: int, leader: bool, patience: bool) -> None:
    verdict = judge(ended(code, leader=leader, patience=patience))
    assert verdict["failed"]
    assert verdict["reason"] == f"the engine ended with exit code {code}"


def test_end_is_explained_by_the_earliest_line() -> None:
    log = [
        "INFO starting",
        "ValueError: Free memory on device (0.49/79.32 GiB) on startup is less than desired GPU memory utilization (0.6, 47.59 GiB).",
        "Traceback (most recent call last):",
        "RuntimeError: Engine core initialization failed. See root cause above.",
    ]
    verdict = judge(ended(1, log=log))
    assert "already holds memory" in verdict["cause"]
    assert verdict["log_lines"][0] == log[1]
    assert verdict["log_lines"][-1] == log[-1]
    assert verdict["hint"]


def test_end_without_telling_line_is_explained_by_its_signal() -> None:
    verdict = judge(ended(None, "SIGILL", log=["AMX is not ready to be used!"]))
    assert verdict["reason"] == "the engine was ended by SIGILL"
    assert "another CPU" in verdict["cause"]


def test_sidecar_that_ends_is_named() -> None:
    observation = observed()
    observation["state"]["launches"].insert(0, {"name": "ray", "pid": 8, "started_at": 1, "exit": {"code": 1, "signal": None, "at": NOW}})
    assert judge(observation)["reason"] == "the sidecar ray ended with exit code 1"


def test_sidecar_that_ends_before_the_engine_started_is_named() -> None:
    observation = observed()
    observation["state"].update(stage="sidecars", launches=[{"name": "ray", "pid": 8, "started_at": 1, "exit": {"code": 1, "signal": None, "at": NOW}}])
    assert judge(observation)["reason"] == "the sidecar ray ended with exit code 1"


def test_refused_start_says_why() -> None:
    observation = observed()
    observation["state"].update(stage="failed", launches=[], detail="port 10.0.0.5:8000 (HTTP) cannot be bound: Address already in use, by process 7 (nginx)")
    observation["service"] = {"active": False, "restarting": False, "failed": False, "restarts": None, "result": None, "manager": "supervisor"}
    verdict = judge(observation)
    assert verdict["failed"]
    assert "by process 7 (nginx)" in verdict["reason"]


@pytest.mark.parametrize(("result", "part"), [("oom-kill", "ran out of memory"), ("start-limit-hit", "too often")])
def test_failed_service(result: str, part: str) -> None:
    observation = observed()
    observation["service"].update(active=False, failed=True, result=result)
    verdict = judge(observation)
    assert verdict["failed"]
    assert part in verdict["cause"]


def test_stopped_on_request_is_not_blamed_on_the_engine() -> None:
    observation = ended(0)
    observation["state"].update(stage="stopped", detail="SIGTERM received")
    observation["service"]["active"] = False
    verdict = judge(observation)
    assert verdict["reason"] == "the shard was stopped: SIGTERM received"


def test_old_run_that_is_being_stopped_for_the_new_one_is_waited_for() -> None:
    observation = ended(0)
    observation["state"].update(stage="stopping", detail="SIGTERM received")
    observation["service"]["active"] = None
    assert judge(observation)["stage"] == "starting"


def test_nothing_there() -> None:
    assert judge(observed(state=None, service=None))["failed"]
    verdict = judge(observed(launch=None, launch_problem="/etc/x cannot be read: Permission denied"))
    assert verdict["failed"]
    assert "Permission denied" in verdict["detail"]


@pytest.mark.parametrize("change", [{"restarts": 2}, {"restarting": True}])
def test_service_that_restarts_is_not_waited_for(change: dict[str, Any]) -> None:
    observation = refused()
    observation["service"].update(change)
    observation["state"]["last_end"] = {"launch": "engine", "code": None, "signal": "SIGILL", "at": 890.0, "reason": "engine engine was ended by SIGILL"}
    verdict = judge(observation)
    assert verdict["failed"]
    assert "does not stay up" in verdict["reason"]
    assert "another CPU" in verdict["cause"]


def test_service_that_was_restarted_long_ago_and_has_all_proof_is_ready() -> None:
    observation = observed()
    observation["service"]["restarts"] = 1
    assert judge(observation)["ready"]


def test_another_run_than_at_the_beginning_was_a_restart() -> None:
    observation = refused()
    observation["wanted"]["run_id"] = "r0"
    assert judge(observation)["failed"]


@pytest.mark.parametrize(
    ("at", "reason", "failed"),
    [
        (895.0, "engine engine ended with exit code 1", True),
        (None, "run_shard.py of run r0 was killed (SIGKILL) or crashed in stage running", True),
        (500.0, "engine engine ended with exit code 1", False),
        (895.0, "SIGTERM received", False),
    ],
)
def test_restart_without_a_manager_that_counts(at: float | None, reason: str, failed: bool) -> None:
    observation = refused()
    observation["service"].update(manager="supervisor", restarts=None)
    observation["state"].update(restarts=1, last_end={"launch": None, "code": 1, "signal": None, "at": at, "reason": reason})
    assert judge(observation)["failed"] is failed


@pytest.mark.parametrize(("key", "value", "word"), [("fingerprint", "f2", "revision"), ("rank", 5, "rank")])
def test_another_revision_or_rank_than_planned(key: str, value: Any, word: str) -> None:
    observation = observed()
    observation["wanted"][key] = value
    verdict = judge(observation)
    assert verdict["failed"]
    assert word in verdict["reason"]
    assert str(value) in verdict["reason"]


# ------------------------------------------------------------------------------------------------------------------ GPUs


def test_missing_on_one_of_two_gpus_names_it_and_who_holds_it() -> None:
    foreign = process(77, 75000, ours=False, name="trainer", user="alice")
    verdict = judge(observed() | {"gpus": [gpu(0, process(10, 70000)), gpu(1, foreign)]})
    assert verdict["failed"]
    assert "GPU 1 (GPU-bbbbbbbb) holds nothing of this shard" in verdict["reason"]
    assert "process 77 (trainer, user alice, 75000 MiB)" in verdict["reason"]
    assert "GPU 0" not in verdict["reason"]
    assert verdict["detail"] == "1 of 2 GPUs hold their share"
    assert verdict["evidence"]["gpus"][1]["foreign"] == [{"pid": 77, "name": "trainer", "user": "alice", "used_mib": 75000, "shard": None}]


def test_bare_context_says_so_with_numbers_and_the_override() -> None:
    verdict = judge(observed() | {"gpus": [gpu(0, process(10, 70000)), gpu(1, process(11, 480))]})
    assert verdict["failed"]
    assert "holds 480 MiB of this shard, expected at least 20000 MiB: a bare context" in verdict["reason"]
    assert "gpu_memory_min_mib" in verdict["hint"]


def test_too_little_but_more_than_a_context() -> None:
    verdict = judge(observed() | {"gpus": [gpu(0, process(10, 70000)), gpu(1, process(11, 9000))]})
    assert "holds 9000 MiB of this shard, expected at least 20000 MiB: too little" in verdict["reason"]


def test_memory_on_a_gpu_that_was_not_assigned_is_the_wrong_gpu() -> None:
    seen = [gpu(0, process(10, 70000)), gpu(1), gpu(2, process(11, 70000))]
    for observation in (observed() | {"gpus": seen}, refused() | {"gpus": seen}):
        verdict = judge(observation)
        assert verdict["failed"]
        assert "wrong GPU: GPU 2 (GPU-cccccccc) (70000 MiB)" in verdict["reason"]


def test_foreign_memory_on_other_gpus_is_none_of_our_business() -> None:
    assert judge(observed() | {"gpus": [*observed()["gpus"], gpu(2, process(99, 70000, ours=False))]})["ready"]


def test_foreign_process_beside_a_full_share_does_not_matter_but_is_told() -> None:
    seen = [gpu(0, process(10, 70000), process(5, 30, ours=False, name="Xorg")), gpu(1, process(11, 70000))]
    verdict = judge(observed() | {"gpus": seen})
    assert verdict["ready"]
    assert verdict["evidence"]["gpus"][0]["foreign"][0]["name"] == "Xorg"


def test_earlier_run_is_a_stranger() -> None:
    left = process(8, 70000, ours=False, name="VLLM::EngineCore", user="rankzero", shard="glm/0 of run r0")
    verdict = judge(observed() | {"gpus": [gpu(0, left), gpu(1, left)]})
    assert verdict["failed"]
    assert "shard glm/0 of run r0" in verdict["reason"]


def on_the_cpu(**more: Any) -> dict[str, Any]:
    return observed(**more) | {"gpus": [gpu(0), gpu(1)]}


def test_nothing_on_any_gpu_is_the_cpu_with_devices_and_line() -> None:
    log = [
        "run_shard: launch engine started",
        "PermissionError: [Errno 13] Permission denied: '/root/.cache'",
        "warning: no usable GPU found, --gpu-layers option will be ignored",
        "main: server is listening",
    ]
    verdict = judge(on_the_cpu(devices={"lines": ["Available devices:", "  (none)"], "error": None}, log=log))
    assert verdict["failed"]
    assert "no process of this shard holds memory on any of its 2 GPUs: it runs on the CPU" in verdict["reason"]
    assert verdict["detail"] == "devices that the engine's build sees: Available devices: | (none)"
    assert verdict["log_lines"][0] == log[2]
    assert "found no GPU" in verdict["cause"]


def test_device_list_that_cannot_be_had_is_said() -> None:
    assert "exit code 127" in judge(on_the_cpu(devices={"lines": [], "error": "exit code 127"}))["detail"]


def test_cpu_is_not_decided_while_it_loads() -> None:
    assert not judge(refused() | {"gpus": [gpu(0), gpu(1)]})["failed"]


@pytest.mark.parametrize("leader", [True, False])
def test_cpu_is_decided_after_a_grace(leader: bool) -> None:
    early = judge(on_the_cpu(leader=leader, serving_since=NOW - evidence.GRACE_SECONDS + 0.1))
    assert early["stage"] == "serving"
    assert "runs on the CPU" in early["reason"]
    assert judge(on_the_cpu(leader=leader, serving_since=NOW - evidence.GRACE_SECONDS))["failed"]


def test_follower_without_memory_waits_while_the_leader_does_not_serve() -> None:
    for serving in (False, None):
        assert judge(on_the_cpu(leader=False, leader_serving=serving, serving_since=None))["stage"] == "joining"


def test_unknown_memory_is_judged_by_the_difference_and_says_so() -> None:
    seen = [gpu(0, process(10, None), process(5, 1000, ours=False), used_mib=70000), gpu(1, process(11, 70000))]
    verdict = judge(observed() | {"gpus": seen})
    assert verdict["ready"]
    assert (verdict["evidence"]["gpus"][0]["held_mib"], verdict["evidence"]["gpus"][0]["by"]) == (69000, "difference")
    assert verdict["detail"].endswith("GPU 0 (GPU-aaaaaaaa)")


def test_difference_that_strangers_explain_proves_nothing() -> None:
    seen = [gpu(0, process(10, None), process(5, 69000, ours=False), used_mib=70000), gpu(1, process(11, 70000))]
    assert judge(observed() | {"gpus": seen})["failed"]


@pytest.mark.parametrize(
    "seen",
    [
        gpu(0, process(10, None), process(5, None, ours=False), used_mib=70000),
        gpu(0, process(10, None), used_mib=None),
        gpu(0) | {"processes": None},
        gpu(2),
    ],
)
def test_what_is_not_known_is_null_and_not_proof(seen: dict[str, Any]) -> None:
    verdict = judge(observed() | {"gpus": [seen, gpu(1, process(11, 70000))]})
    assert verdict["failed"]
    assert verdict["evidence"]["gpus"][0]["held_mib"] is None
    assert "so nothing is proven" in verdict["reason"]
    assert "CPU" not in verdict["reason"]


def test_driver_that_does_not_answer() -> None:
    verdict = judge(observed() | {"gpus": None, "driver": {"state": "binding_missing", "message": "Python package nvidia-ml-py is missing"}})
    assert verdict["failed"]
    assert "binding_missing" in verdict["reason"]
    assert "nvidia-ml-py" in verdict["detail"]
    assert judge(refused() | {"gpus": None, "driver": {"state": "not_permitted", "message": None}})["stage"] == "joining"


def test_lost_gpu_without_uuid_is_survived() -> None:
    verdict = judge(observed() | {"gpus": [gpu(0, process(10, 70000)), gpu(1, process(11, 7)) | {"uuid": None}]})
    assert verdict["failed"]


def test_process_in_two_lists_counts_once() -> None:
    seen = [gpu(0, process(10, 12000), process(10, None), process(10, 12000)), gpu(1, process(11, 70000))]
    verdict = judge(observed() | {"gpus": seen})
    assert verdict["evidence"]["gpus"][0]["held_mib"] == 12000


def test_mig_instance_and_the_gpu_around_it() -> None:
    observation = observed(gpus=1)
    mig = {"uuid": "MIG-1", "index": 0, "pci_bdf": "0000:0b:00.0", "expected_mib": 5000}
    observation["launch"]["gpus"] = [mig]
    parent, instance = gpu(0, process(10, 8000)), gpu(0, process(10, 8000)) | {"uuid": "MIG-1"}
    assert judge(observation | {"gpus": [parent, instance]})["ready"]
    sibling = gpu(0, process(11, 8000)) | {"uuid": "MIG-2"}
    assert "wrong GPU" in judge(observation | {"gpus": [parent, instance, sibling]})["reason"]


# ------------------------------------------------------------------------------------------------------------------ HTTP, connection


def http(**more: Any) -> dict[str, Any]:
    observation = observed()
    observation["http"].update(more)
    return observation


@pytest.mark.parametrize(
    ("change", "part", "serving"),
    [
        ({"models": models("llama")}, f"a different server answers at {URL}: it serves llama, not glm, sql", False),
        ({"models": models()}, "it serves nothing, not glm, sql", False),
        ({"models": models("glm")}, "does not list sql, only glm", True),
        ({"models": answer(404, server="nginx/1.2")}, "different server is on this port (it calls itself nginx/1.2)", False),
        ({"models": answer(200, json={"data": "x"})}, "without a list of models", False),
        ({"models": answer(401)}, "to this revision's API key", False),
        ({"models": answer(401), "key": "unreadable"}, "may not read the key file", False),
        ({"models": answer(401), "key": None}, "has no API key: a different server", False),
        ({"listener": {"pid": 7, "name": "nginx", "user": "www", "ours": False}, "models": None}, "process 7 (nginx, user www) has the port", False),
        ({"unauthenticated": answer(200)}, "answers 200 without the API key instead of 401", True),
        ({"generation": answer(500, text="EngineDead\x1b[31m")}, "answers 500 to a request for one token: EngineDead", True),
        ({"generation": answer(200, json={})}, "without a generated choice", True),
    ],
)
def test_server_that_does_not_prove_itself(change: dict[str, Any], part: str, serving: bool) -> None:
    verdict = judge(http(**change))
    assert verdict["failed"]
    assert part in verdict["reason"]
    assert verdict["serving"] is serving
    early = judge(http(**change) | {"serving_since": NOW})
    assert early["stage"] == "serving"
    assert part in early["reason"]


@pytest.mark.parametrize(
    "change",
    [
        {"models": answer(None, "timeout")},
        {"unauthenticated": answer(None, "timeout")},
        {"generation": answer(None, "timeout")},
        {"generation": None},
        {"generation": answer(503, "loading")},
        {"models": answer(None, "other")},
        {"generation": answer(None, "other")},
    ],
)
def test_answer_that_is_late_is_waited_for(change: dict[str, Any]) -> None:
    assert judge(http(**change))["stage"] == "serving"


def test_without_a_key_nothing_is_asked_without_it() -> None:
    observation = http(unauthenticated=None)
    observation["launch"]["ready"]["key_protects"] = None
    assert judge(observation)["ready"]


def test_alias_of_llama_server_counts() -> None:
    observation = http(models=answer(json={"data": [{"id": "glm", "aliases": ["sql"]}, "odd", {"id": 3}]}))
    assert judge(observation)["ready"]


@pytest.mark.parametrize(
    ("seen", "ready", "part"),
    [
        (answer(json=[{"id": 0, "path": "/a/sql.gguf"}, {"id": 1, "path": "/a/fix.gguf"}]), True, ""),
        (
            answer(json=[{"id": 0, "path": "/a/fix.gguf"}, {"id": 1, "path": "/a/sql.gguf"}]),
            False,
            "lists /a/fix.gguf, /a/sql.gguf, not /a/sql.gguf, /a/fix.gguf",
        ),
        (answer(json=[]), False, "lists nothing, not /a/sql.gguf"),
        (answer(json={"data": []}), False, "without a list of adapters"),
        (answer(404), False, "answers 404 without a list of adapters"),
        (answer(None, "timeout"), False, "has not answered yet"),
        (None, False, "has not answered yet"),
    ],
)
def test_adapters_that_are_no_models_are_listed_in_their_order(seen: Any, ready: bool, part: str) -> None:
    observation = http(adapters=seen)
    observation["launch"]["ready"].update(adapters_path="/lora-adapters", expect_adapters=["/a/sql.gguf", "/a/fix.gguf"])
    verdict = judge(observation)
    assert verdict["ready"] is ready and (ready or part in verdict["reason"])


def test_different_server_is_named_before_empty_gpus() -> None:
    observation = http(models=models("llama")) | {"gpus": [gpu(0), gpu(1)]}
    assert "different server" in judge(observation)["reason"]


def test_rank_that_the_leader_did_not_connect_to() -> None:
    observation = observed(leader=False, connected=False)
    observation["launch"]["ready"]["accepts_on_port"] = 50052
    verdict = judge(observation)
    assert verdict["failed"]
    assert "port 50052" in verdict["reason"]
    waiting = judge(observation | {"leader_serving": False, "serving_since": None})
    assert (waiting["stage"], waiting["failed"]) == ("joining", False)
    assert judge(observation | {"connected": True})["ready"]


def test_untrusted_text_is_shown_clean() -> None:
    evil = process(7, 100, ours=False, name="a\x1b[2Jb\n", user="c\u202ed", shard="x\x00y")
    verdict = judge(observed() | {"gpus": [gpu(0, evil), gpu(1, evil)]})
    assert not any(ord(character) < 32 or character == "\u202e" for character in verdict["reason"])


# ------------------------------------------------------------------------------------------------------------------ invariants

MIB = st.one_of(st.none(), st.integers(0, 90000))
PROCESS = st.builds(process, st.integers(1, 30), MIB, st.booleans())
PROCESSES = st.lists(PROCESS, max_size=5, unique_by=lambda row: row["pid"])
SEEN = st.tuples(PROCESSES, st.one_of(st.none(), st.integers(0, 180000)))


def seen_gpus(rows: list[tuple[list[dict[str, Any]], int | None]]) -> list[dict[str, Any]]:
    return [gpu(number, *processes, used_mib=used) for number, (processes, used) in enumerate(rows)]


@given(st.lists(SEEN, min_size=2, max_size=2), st.booleans(), st.sampled_from([True, False, None]))
@settings(max_examples=200)
def test_never_ready_without_enough_of_our_own_on_every_gpu(rows: list[Any], leader: bool, serving: bool | None) -> None:
    observation = observed(leader=leader, leader_serving=serving) | {"gpus": seen_gpus(rows)}
    verdict = judge(observation)
    if any(proven_mib(processes, used) < 20000 for processes, used in rows):
        assert not verdict["ready"]


def proven_mib(processes: list[dict[str, Any]], used: int | None) -> int:
    """The rule again, in other words: known numbers add up; with an unknown one only the rest of a fully known device can be ours."""
    own = [row["used_mib"] for row in processes if row["ours"]]
    strangers = [row["used_mib"] for row in processes if not row["ours"]]
    if None not in own:
        return sum(own)
    if used is None or None in strangers:
        return 0
    return max(used - sum(strangers), sum(number for number in own if number is not None))


@given(st.lists(SEEN, min_size=2, max_size=2), st.integers(0, 1), st.integers(40, 60), MIB, st.booleans())
@settings(max_examples=200)
def test_foreign_memory_never_helps(rows: list[Any], where: int, pid: int, used_mib: int | None, grow: bool) -> None:
    before = judge(observed() | {"gpus": seen_gpus(rows)})
    processes, used = rows[where]
    more = used + (used_mib or 0) if grow and used is not None else used
    rows[where] = ([*processes, process(pid, used_mib, ours=False)], more)
    after = judge(observed() | {"gpus": seen_gpus(rows)})
    assert before["ready"] or not after["ready"]
    held = [[row["held_mib"] for row in verdict["evidence"]["gpus"]] for verdict in (before, after)]
    assert all(late is None or (early is not None and late <= early) for early, late in zip(*held))


@given(st.lists(SEEN, min_size=2, max_size=3), st.randoms(use_true_random=False))
def test_order_does_not_matter(rows: list[Any], dice: random.Random) -> None:
    gpus = seen_gpus(rows)
    before = judge(observed() | {"gpus": gpus})
    shuffled = [{**row, "processes": dice.sample(row["processes"], len(row["processes"]))} for row in dice.sample(gpus, len(gpus))]
    after = judge(observed() | {"gpus": shuffled})
    assert after == before


@given(st.sampled_from([0, 1, 2, 139]), st.booleans(), st.booleans(), st.booleans())
def test_an_ended_engine_is_never_ready(code: int, leader: bool, patience: bool, active: bool) -> None:
    observation = ended(code, leader=leader, patience=patience)
    observation["service"]["active"] = active
    assert judge(observation)["failed"]


# ------------------------------------------------------------------------------------------------- one replica, one fate


def after_an_end(stage: str, rank: int = 1, kind: str = "launch", *, own: bool = False, **more: Any) -> dict[str, Any]:
    """Rank 0's observation after the run ended for the sake of `rank`; its own engine was ended by run_shard.py then."""
    observation = refused()
    reason = "engine engine ended with exit code 1" if own else f"rank {rank}: engine engine ended with exit code 1"
    observation["state"].update(
        stage=stage,
        detail=reason,
        failures=1,
        last_end={"launch": "engine", "code": 1, "signal": None, "at": 990.0, "reason": reason, "rank": rank, "kind": kind},
    )
    observation["state"]["launches"][-1]["exit"] = {"code": None, "signal": "SIGTERM", "at": 990.0} if not own else {"code": 1, "signal": None, "at": 990.0}
    observation["state"].update(more)
    return observation


@pytest.mark.parametrize(
    ("stage", "shown", "text"),
    [
        ("tying", "joining", "waiting for the other ranks: waits for rank 1 since"),
        ("restarting", "starting", "starting again: waits for rank 1 since"),
    ],
)
def test_stages_of_the_tie(stage: str, shown: str, text: str) -> None:
    observation = observed(http=None)
    observation["state"].update(stage=stage, detail="waits for rank 1 since 2026-01-31T12:00:00Z (not seen yet)", launches=[])
    verdict = judge(observation)
    assert verdict["stage"] == shown and verdict["reason"].startswith(text) and not verdict["failed"]


@pytest.mark.parametrize(("stage", "shown"), [("stopping", "starting"), ("restarting", "starting"), ("tying", "joining")])
def test_another_ranks_end_is_left_to_that_rank_to_tell(stage: str, shown: str) -> None:
    verdict = judge(after_an_end(stage))
    assert (verdict["stage"], verdict["failed"]) == (shown, False)
    again = after_an_end("running", run_id="r2")
    again["state"]["launches"][-1]["exit"] = None
    assert not judge(again)["failed"], "the next run may do better"


def test_a_rank_whose_engine_ended_too_tells_its_own_end() -> None:
    """Engines of several ranks may end within milliseconds; the log of any of them may hold the cause."""
    observation = after_an_end(
        "tying",
        own_end={"launch": "engine", "code": 1, "signal": None, "at": 990.0, "reason": "engine engine ended with exit code 1", "rank": 0, "kind": "launch"},
    )
    observation["state"]["launches"][-1]["exit"] = {"code": 1, "signal": None, "at": 990.0}
    assert judge(observation)["failed"] and judge(observation)["reason"] == "the engine ended with exit code 1"


def test_another_ranks_end_is_told_when_the_shard_is_given_up() -> None:
    verdict = judge(after_an_end("failed", detail="rank 1: engine engine ended with exit code 1; given up after 3 failed runs"))
    assert verdict["failed"] and "rank 1: engine engine ended with exit code 1; given up" in verdict["reason"]


@pytest.mark.parametrize("stage", ["stopping", "restarting", "tying", "failed"])
def test_the_rank_with_which_it_began_has_failed_at_once(stage: str) -> None:
    verdict = judge(after_an_end(stage, rank=0, own=True))
    assert verdict["failed"] and verdict["reason"] == "the engine ended with exit code 1"
    again = after_an_end("running", rank=0, own=True, run_id="r2")
    again["state"]["launches"][-1]["exit"] = None
    again["wanted"]["run_id"] = None
    verdict = judge(again)
    assert verdict["failed"] and "does not stay up" in verdict["reason"]


@pytest.mark.parametrize("kind", ["tie", "stop"])
def test_lost_and_stopped_ranks_are_no_failure_of_anybody(kind: str) -> None:
    assert not judge(after_an_end("tying", rank=0, kind=kind, failures=0))["failed"]
    again = after_an_end("running", kind=kind, failures=0, run_id="r2")
    again["state"]["launches"][-1]["exit"] = None
    assert not judge(again)["failed"]


@pytest.mark.parametrize(("known_run", "fails"), [(None, True), ("another", True), ("run", False)])
def test_how_a_run_ended_before_this_deploy_is_history(known_run: str | None, fails: bool) -> None:
    """A replica that has healed itself is proven by the next deploy, which does not start it again: only what ends from then on is a failure."""
    state = {
        "run_id": "run",
        "stage": "running",
        "restarts": 1,
        "started_at": 100.0,
        "failures": 1,
        "supervisor_pid": 1,
        "fingerprint": "f",
        "launches": [],
        "last_end": {"code": 1, "signal": None, "at": 99.0, "reason": "engine ended with exit code 1"},
        "own_end": {"reason": "engine ended with exit code 1"},
    }
    found = evidence._restarted({"state": state, "service": {"active": True, "restarts": None}, "wanted": {"known_run": known_run}})
    assert (found is not None) is fails
