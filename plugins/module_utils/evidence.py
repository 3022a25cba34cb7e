# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Judge from what was observed on one host whether its shard is ready. Pure: facts in, verdict out.

An engine that answers over HTTP proves little: llama-server serves from the CPU when it finds no GPU, `/health` of vLLM stays
200 while a rank is gone, and a port may belong to another program. So the proof is the driver's own list of processes: each
GPU that was assigned must hold at least the expected memory, held by processes of this run of this shard. Memory that others
hold never counts, and what is not known (`null`) is never taken for 0 or for enough.

## Observation

    launch      launch.json as a mapping, or null (launch_problem says why)
    wanted      {fingerprint, rank, run_id}, each null when the caller does not care
    state       state.json as a mapping, or null            service    {active, restarting, failed, restarts, result, manager} or null
    patience    true while a service that was just started may not have written its state yet
    driver      {state, message} of the GPU driver          gpus       [{uuid, index, pci_bdf, used_mib, processes: [{pid, used_mib, ours,
                                                                        name, user, shard}] or null}] of all GPUs of the host, or null
    http        {health, models, unauthenticated, generation}: answers of http_probe or null; key: used|unreadable|null;
                listener: {pid, name, user, ours} of the process that has the port, or null when nothing listens; pid null: one that cannot be seen
    connected   whether the leader is connected to `accepts_on_port`; null: not asked or not known
    devices     {lines, error}: the device list of the engine's build, or null when it was not asked
    leader_serving  true|false, null when nobody watches the leader
    serving_since   epoch seconds since when the server (or, on other ranks, the leader) is seen serving in this watch, or null
    log         last lines, cleaned                         now        epoch seconds

## Verdict

    stage       starting|sidecars|waiting|joining|loading|holding|serving|ready|failed
    ready, failed, serving (the HTTP server of this shard answers with its own models), reason, cause, hint, detail,
    evidence: {gpus: [{uuid, index, held_mib, expected_mib, pids, foreign: [{pid, name, user, used_mib, shard}], by, enough}],
               wrong_gpus: [{uuid, index, held_mib, pids}], http: {...}|null, connected, judged_without_gpu, restarts}, log_lines
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ansible_collections.rankzero.inference.plugins.module_utils import log_signatures

Map = Mapping[str, Any]

GRACE_SECONDS = 5.0
"""How long after the start of serving a missing proof may still appear: the driver's list and a connection come a moment late."""

BARE_CONTEXT_MIB = 1024
"""A CUDA context alone takes several hundred MiB on every GPU that a process touches (NVML, general; facts of H100 and A100)."""

RESTART_SECONDS = 10
"""A run that starts so soon after the one before failed was started by a service manager, not by a person."""

LOG_LINES = 8
DOES_NOT_STAY_UP = "the shard does not stay up"

_BEFORE_ENGINE = {
    "starting": "the service is starting",
    "waiting": "waiting",
    "sidecars": "starting the sidecars",
    "tying": "waiting for the other ranks",
    "restarting": "starting again",
}
_GATE_STAGES = {"tying": "joining", "restarting": "starting"}
_HEALS = frozenset({"tie", "stop"})
"""Kinds of ends that are no fault of what runs: a rank was lost, or asked to stop. The ranks start again together when it is back."""

_RESULTS = {
    "oom-kill": "The kernel ended the service because the host or its memory limit ran out of memory.",
    "start-limit-hit": "systemd gave up: the service ended too often in too short a time.",
    "timeout": "systemd ended the service because it did not start or stop in time.",
    "watchdog": "systemd ended the service because its watchdog was not answered.",
    "resources": "systemd could not set up the service (user, directory, credential or limit).",
    "exec-condition": "A condition of the unit was not met.",
    "protocol": "The service did not follow the protocol that its unit names.",
}


class Finding(NamedTuple):
    """What one rule found. `log` says what the log can tell about it: "all" when the program has ended, "gpu" when its GPUs are empty."""

    stage: str
    reason: str
    detail: str | None = None
    cause: str | None = None
    hint: str | None = None
    log: str | None = None


class Problem(NamedTuple):
    """What a server has not proven. `final`: waiting does not heal it."""

    text: str
    final: bool = True


def judge(observation: Map) -> dict[str, Any]:
    """The verdict about one shard at one moment; shapes are in the module's docstring."""
    evidence = weigh(observation)
    found = _mismatch(observation) or _end(observation) or _wrong_gpu(evidence) or _progress(observation, evidence)
    if found.stage != "ready" and found.stage != "failed":
        found = _restarted(observation) or found
    return _verdict(observation, evidence, found)


def _verdict(observation: Map, evidence: dict[str, Any], found: Finding) -> dict[str, Any]:
    failed = found.stage == "failed"
    telling = _telling(observation.get("log") or [], found.log) if failed else None
    named = telling if telling is not None and telling["cause"] else {"cause": found.cause, "hint": found.hint}
    return {
        "stage": found.stage,
        "ready": found.stage == "ready",
        "failed": failed,
        "serving": bool((evidence["http"] or {}).get("serving")),
        "reason": found.reason,
        "cause": named["cause"],
        "hint": named["hint"] or found.hint,
        "detail": found.detail,
        "evidence": evidence,
        "log_lines": _log_lines(observation.get("log") or [], telling) if failed and (telling or found.log == "all") else [],
    }


def _telling(lines: Sequence[str], about: str | None) -> dict[str, Any] | None:
    """The telling line for a failure. A program that goes on logs warnings that are no cause of anything: only lines about GPUs count then."""
    if about == "all":
        return log_signatures.first_telling(lines)
    return log_signatures.first_telling(lines, log_signatures.GPU_SIGNATURES, own_errors=False) if about == "gpu" else None


def _log_lines(lines: Sequence[str], telling: Map | None) -> list[str]:
    """The telling line first, then the last lines: what a person would copy from the log."""
    last = [log_signatures.clean(line) for line in lines[-LOG_LINES:]]
    if telling is None:
        return last
    return [telling["line"]] + [line for line in last[1 - LOG_LINES :] if line != telling["line"]]


# ---------------------------------------------------------------------------------------------------------------- evidence


def weigh(observation: Map) -> dict[str, Any]:
    """All evidence of the observation, without a judgement about stages."""
    launch = observation.get("launch") or {}
    ready = launch.get("ready") or {}
    seen = observation.get("gpus")
    assigned = launch.get("gpus") or []
    without_gpu = bool(launch) and not ready.get("gpu_evidence", True)
    return {
        "gpus": [] if without_gpu else [weigh_gpu(gpu, _find(seen, gpu["uuid"])) for gpu in assigned],
        "wrong_gpus": [] if without_gpu else wrong_gpus(assigned, seen or []),
        "http": weigh_http(ready, observation.get("http")) if ready.get("serves_http") else None,
        "connected": observation.get("connected"),
        "judged_without_gpu": without_gpu,
        "restarts": (observation.get("service") or {}).get("restarts"),
    }


def weigh_gpu(assigned: Map, seen: Map | None) -> dict[str, Any]:
    """What one assigned GPU holds. `held_mib` is null when it is not known; `by` says how it was found.

    A process whose memory the driver does not tell (MIG, vGPU, WSL) is judged by the difference: what the device uses less what
    others are known to hold. With an unknown stranger beside it no difference is ours, so it stays unknown.
    """
    processes = _by_pid((seen or {}).get("processes") or [])
    ours = [process for process in processes if process["ours"]]
    foreign = [process for process in processes if not process["ours"]]
    held, by = _held(ours, foreign, seen)
    expected = assigned.get("expected_mib") or 1
    return {
        "uuid": assigned["uuid"],
        "index": assigned.get("index"),
        "held_mib": held,
        "expected_mib": expected,
        "pids": [process["pid"] for process in ours],
        "foreign": [{key: process.get(key) for key in ("pid", "name", "user", "used_mib", "shard")} for process in foreign],
        "by": by,
        "enough": held is not None and held >= expected,
    }


def _held(ours: Sequence[Map], foreign: Sequence[Map], seen: Map | None) -> tuple[int | None, str]:
    if seen is None or seen.get("processes") is None:
        return None, "none"
    if not ours:
        return 0, "none"
    known = sum(process["used_mib"] for process in ours if process["used_mib"] is not None)
    if all(process["used_mib"] is not None for process in ours):
        return known, "processes"
    if seen.get("used_mib") is None or any(process["used_mib"] is None for process in foreign):
        return None, "none"
    rest = seen["used_mib"] - sum(process["used_mib"] for process in foreign)
    return max(known, rest, 0), "difference"


def _by_pid(processes: Sequence[Map]) -> list[Map]:
    """One entry per process, sorted: a client of MPS may stand in two lists of the driver, and the larger number is the true one."""
    merged: dict[int, Map] = {}
    for process in processes:
        other = merged.get(process["pid"])
        if other is None or (other["used_mib"] or -1) < (process["used_mib"] if process["used_mib"] is not None else -1):
            merged[process["pid"]] = process
    return [merged[pid] for pid in sorted(merged)]


def wrong_gpus(assigned: Sequence[Map], seen: Sequence[Map]) -> list[dict[str, Any]]:
    """GPUs that were not assigned and yet hold memory of this shard. The whole GPU around an assigned MIG instance is none."""
    uuids = {gpu["uuid"] for gpu in assigned}
    around = {gpu.get("pci_bdf") for gpu in assigned if _is_instance(gpu)}
    wrong = []
    for gpu in sorted(seen, key=lambda gpu: str(gpu["uuid"])):
        ours = [process for process in _by_pid(gpu["processes"] or []) if process["ours"] and process["used_mib"] != 0]
        is_parent = gpu.get("pci_bdf") in around and not _is_instance(gpu)
        if ours and gpu["uuid"] not in uuids and not is_parent:
            known = [process["used_mib"] for process in ours if process["used_mib"] is not None]
            wrong.append(
                {
                    "uuid": gpu["uuid"],
                    "index": gpu.get("index"),
                    "held_mib": sum(known) if len(known) == len(ours) else None,
                    "pids": [process["pid"] for process in ours],
                }
            )
    return wrong


def _is_instance(gpu: Map) -> bool:
    return str(gpu["uuid"]).startswith("MIG-")


def _find(seen: Sequence[Map] | None, uuid: str) -> Map | None:
    return next((gpu for gpu in seen or [] if gpu["uuid"] == uuid), None)


def weigh_http(ready: Map, http: Map | None) -> dict[str, Any]:
    """What the server of this rank has proven: `{url, health, models, key, generation, serving, ok, problem, final, loading}`.

    `problem` is the first thing that is missing, as a sentence; `final` says that waiting does not heal it.
    """
    http = http or {}
    health = http.get("health") or {}
    names = model_names((http.get("models") or {}).get("json"))
    told: dict[str, Any] = {
        "url": ready.get("url"),
        "health": health.get("status"),
        "models": names,
        "key": (http.get("unauthenticated") or {}).get("status"),
        "generation": (http.get("generation") or {}).get("status"),
        "serving": False,
        "ok": False,
        "final": False,
        "loading": health.get("error") == "loading" and ready.get("warmup_503", True),
    }
    problem = _health_problem(ready, health)
    if problem is None:
        stranger = _stranger(ready, http)
        told["serving"] = stranger is None and names is not None and (not ready.get("expect_models") or _missing(ready, names) != list(ready["expect_models"]))
        problem = (
            stranger or _models_problem(ready, http, names) or _adapters_problem(ready, http) or _key_problem(ready, http) or _generation_problem(ready, http)
        )
    told.update(problem=problem and problem.text, final=bool(problem and problem.final), ok=problem is None)
    return told


def _health_problem(ready: Map, health: Map) -> Problem | None:
    where = "%s%s" % (ready.get("url"), ready.get("health_path"))
    if not health:
        return Problem(f"{where} was not asked", False)
    if health.get("error") == "refused":
        return Problem("nothing listens at %s yet" % (ready.get("url")), False)
    if health.get("error") == "loading" and ready.get("warmup_503", True):
        return Problem(f"{where} answers 503: the engine is still loading", False)
    if health.get("error") in ("timeout", "other"):
        return Problem("%s: %s" % (where, log_signatures.clean(health.get("message"))), False)
    if health.get("status") != 200:
        return Problem("%s answers %s instead of 200" % (where, health.get("status")), False)
    return None


def _stranger(ready: Map, http: Map) -> Problem | None:
    """A server of the same model names may be another one all the same: what counts is whose process has the port."""
    listener = http.get("listener")
    if not listener or listener["ours"]:
        return None
    if listener["pid"] is None:
        return Problem("a process that cannot be seen from here has the port of %s: run the gate as root or as the service's user" % ready.get("url"), False)
    return Problem(
        "a different server answers at %s: process %d (%s, user %s) has the port, not this shard"
        % (
            ready.get("url"),
            listener["pid"],
            log_signatures.clean(listener.get("name") or "unknown", limit=60),
            log_signatures.clean(listener.get("user") or "unknown", limit=40),
        )
    )


def _models_problem(ready: Map, http: Map, names: Sequence[str] | None) -> Problem | None:
    answer = http.get("models")
    where = "%s%s" % (ready.get("url"), ready.get("models_path"))
    if not answer or answer.get("error"):
        return Problem(f"{where} has not answered yet{_because((answer or {}).get('message'))}", False)
    if answer.get("status") in (401, 403):
        return Problem(_refused_key(where, answer["status"], http.get("key")))
    if answer.get("status") != 200 or names is None:
        return Problem("%s answers %s without a list of models: a different server is on this port%s" % (where, answer.get("status"), _server(answer)))
    missing = _missing(ready, names)
    if missing and len(missing) == len(ready.get("expect_models") or []):
        return Problem("a different server answers at %s%s: it serves %s, not %s" % (ready.get("url"), _server(answer), _listed(names), _listed(missing)))
    return Problem(f"{where} does not list {_listed(missing)}, only {_listed(names)}") if missing else None


def _adapters_problem(ready: Map, http: Map) -> Problem | None:
    """llama-server numbers adapters by their order, and requests choose by number: each file in its place."""
    if not ready.get("adapters_path"):
        return None
    answer = http.get("adapters")
    where = "%s%s" % (ready.get("url"), ready["adapters_path"])
    if not answer or answer.get("error"):
        return Problem(f"{where} has not answered yet{_because((answer or {}).get('message'))}", False)
    body = answer.get("json")
    seen = [str(entry.get("path")) for entry in body if isinstance(entry, dict)] if isinstance(body, list) else None
    wanted = list(ready.get("expect_adapters") or [])
    if answer.get("status") != 200 or seen is None:
        return Problem("%s answers %s without a list of adapters" % (where, answer.get("status")))
    if seen != wanted:
        return Problem("%s lists %s, not %s" % (where, _listed([log_signatures.clean(path) for path in seen]), _listed(wanted)))
    return None


def _refused_key(where: str, status: int, key: str | None) -> str:
    if key == "unreadable":
        return f"{where} wants the API key, and this user may not read the key file: run the gate with become"
    if key == "used":
        return f"{where} answers {status} to this revision's API key: another server, or one that was started with another key"
    return f"{where} answers {status}, but this replica has no API key: a different server is on this port"


def _key_problem(ready: Map, http: Map) -> Problem | None:
    if not ready.get("key_protects"):
        return None
    answer = http.get("unauthenticated")
    where = "%s%s" % (ready.get("url"), ready["key_protects"])
    if not answer or answer.get("status") in (None, 503):
        return Problem(f"{where} has not answered without the key yet", False)
    if answer["status"] not in (401, 403):
        return Problem("%s answers %s without the API key instead of 401: the key does not protect it" % (where, answer["status"]))
    return None


def _generation_problem(ready: Map, http: Map) -> Problem | None:
    """No answer in time is no refusal: the first token of a cold engine may take long."""
    if not ready.get("probe_path"):
        return None
    answer = http.get("generation")
    where = "%s%s" % (ready.get("url"), ready["probe_path"])
    if not answer or answer.get("error"):
        return Problem(f"{where} has not generated a token yet{_because((answer or {}).get('message'))}", False)
    if answer.get("status") != 200:
        said = log_signatures.clean(answer.get("text") or "", limit=200)
        return Problem("%s answers %s to a request for one token%s" % (where, answer.get("status"), ": " + said if said else ""))
    body = answer.get("json")
    if not isinstance(body, dict) or not body.get("choices"):
        return Problem(f"{where} answers 200, but without a generated choice")
    return None


def model_names(body: Any) -> list[str] | None:
    """Names in an OpenAI model list, aliases of llama-server included; null when it is no such list."""
    data = body.get("data") if isinstance(body, dict) else None
    if not isinstance(data, list):
        return None
    names: list[str] = []
    for entry in data:
        if isinstance(entry, dict):
            aliases = entry.get("aliases")
            listed = [entry.get("id"), *(aliases if isinstance(aliases, list) else [])]
            names += [log_signatures.clean(name) for name in listed if isinstance(name, str)]
    return list(dict.fromkeys(names))


def _missing(ready: Map, names: Sequence[str]) -> list[str]:
    return [name for name in ready.get("expect_models") or [] if name not in names]


def _listed(names: Sequence[str]) -> str:
    return (", ".join(names[:6]) + (" and %d more" % (len(names) - 6) if len(names) > 6 else "")) or "nothing"


def _server(answer: Map) -> str:
    return " (it calls itself %s)" % (log_signatures.clean(answer["server"], limit=60)) if answer.get("server") else ""


# ------------------------------------------------------------------------------------------------------------------- rules


def _mismatch(observation: Map) -> Finding | None:
    launch, wanted = observation.get("launch"), observation.get("wanted") or {}
    if not launch:
        return Finding(
            "failed",
            "no revision of this replica is deployed on this host",
            detail=observation.get("launch_problem"),
            hint="Deploy the replica first; without become, files of another user cannot be read.",
        )
    for key, word in (("fingerprint", "revision"), ("rank", "rank")):
        if wanted.get(key) is not None and launch.get(key) != wanted[key]:
            return Finding(
                "failed",
                f"the {word} on this host is {launch.get(key)}, the plan wants {wanted[key]}",
                hint="Another run has changed this host meanwhile: run the deployment again.",
            )
    return None


def _end(observation: Map) -> Finding | None:
    """The shard has ended, or its service has. An exit code of 0 is an end, too (vllm#48966); a stop that was asked for is not a failure."""
    state, service = _current_state(observation), observation.get("service")
    ended = next((launch for launch in (state or {}).get("launches") or [] if launch.get("exit")), None)
    if state and ended and not _on_request(state.get("detail")) and not _began_elsewhere(state):
        return _ended_launch(state, ended)
    if state and state.get("stage") == "failed" and _began_elsewhere(state):
        return _not_running(state)
    if service is not None and service.get("failed"):
        result = service.get("result") or "no result"
        return Finding("failed", f"the service has failed ({result})", log="all", cause=_RESULTS.get(result) or _last_cause(state))
    if observation.get("patience"):
        return None
    if service is not None and service.get("active") is False:
        return _not_running(state)
    if state and state.get("stage") in ("stopped", "failed"):
        return _not_running(state)
    if state is None and service is None:
        return Finding("failed", "neither a service nor a run of this shard was found on this host", hint="Deploy the replica first.")
    return None


def _began_elsewhere(state: Map) -> bool:
    """Whether the last run ended for another rank's sake, or heals: then our launches were ended by us, and the rank it began with tells why."""
    last = state.get("last_end") or {}
    if state.get("own_end"):
        return False  # an engine here ended by itself, too
    return last.get("rank") not in (None, state.get("rank")) or last.get("kind") in _HEALS


def _not_running(state: Map | None) -> Finding:
    detail = (state or {}).get("detail")
    if _on_request(detail):
        return Finding("failed", f"the shard was stopped{_because(detail)}", hint="Start it again, or look who stopped it.")
    if state and state.get("stage") == "failed":
        return Finding("failed", f"the shard did not start or did not stay up{_because(detail)}", log="all", cause=None)
    return Finding("failed", "the service is not running", log="all", cause=_last_cause(state), hint="It was stopped from outside, or it was never started.")


def _on_request(reason: object) -> bool:
    """run_shard.py writes `SIGTERM received` for a stop that it was asked for."""
    return bool(reason) and str(reason).endswith(" received")


def _current_state(observation: Map) -> Map | None:
    """state.json, unless it was left by a run of another revision."""
    state: Map | None = observation.get("state")
    return state if state and state.get("fingerprint") == (observation.get("launch") or {}).get("fingerprint") else None


def _ended_launch(state: Map, launch: Map) -> Finding:
    end = launch["exit"]
    how = f"was ended by {end['signal']}" if end.get("signal") else f"ended with exit code {end.get('code')}"
    last = (state.get("launches") or [{}])[-1]
    started_all = state.get("stage") not in ("starting", "waiting", "sidecars")
    what = "the engine" if started_all and launch.get("name") == last.get("name") else f"the sidecar {launch.get('name')}"
    known = log_signatures.cause_of_end(end.get("code"), end.get("signal")) or {}
    return Finding("failed", f"{what} {how}", log="all", cause=known.get("cause"), hint=known.get("hint"))


def _because(detail: object) -> str:
    return f": {log_signatures.clean(detail, limit=300)}" if detail else ""


def _last_cause(state: Map | None) -> str | None:
    last = (state or {}).get("last_end")
    if not last or _on_request(last.get("reason")):
        return None
    known = log_signatures.cause_of_end(last.get("code"), last.get("signal")) or {}
    return known.get("cause") or (log_signatures.clean(last["reason"]) if last.get("reason") else None)


def _restarted(observation: Map) -> Finding | None:
    """The service ended by itself and was started again: it would end again, and waiting for that only costs time."""
    service, state = observation.get("service") or {}, observation.get("state") or {}
    wanted_run = (observation.get("wanted") or {}).get("run_id")
    other_run = wanted_run is not None and state.get("run_id") not in (None, wanted_run)
    if _began_elsewhere(state) or _was_there_before(observation):
        return None
    if not (service.get("restarting") or service.get("restarts") or other_run or state.get("failures") or _came_back(observation)):
        return None
    last = state.get("last_end") or {}
    known = log_signatures.cause_of_end(last.get("code"), last.get("signal")) or {}
    return Finding(
        "failed",
        f"{DOES_NOT_STAY_UP}: the run before this one ended{_because(last.get('reason'))}",
        log="all",
        cause=_last_cause(state),
        hint=known.get("hint"),
    )


def _was_there_before(observation: Map) -> bool:
    """Whether this run is older than the deploy that waits now: how the runs before it ended is history, not a failure of this deploy."""
    known = (observation.get("wanted") or {}).get("known_run")
    return known is not None and (observation.get("state") or {}).get("run_id") == known


def _came_back(observation: Map) -> bool:
    """Whether the run before failed just before this one started: the sign of a restart where the service manager counts none."""
    service, state = observation.get("service") or {}, observation.get("state") or {}
    last = state.get("last_end")
    if not last or not state.get("restarts") or service.get("restarts") is not None or _on_request(last.get("reason")):
        return False
    return last.get("at") is None or bool(state["started_at"] - last["at"] < RESTART_SECONDS)


def _wrong_gpu(evidence: Map) -> Finding | None:
    if not evidence["wrong_gpus"]:
        return None
    named = " and ".join("%s (%s)" % (_name(gpu), _mib(gpu["held_mib"])) for gpu in evidence["wrong_gpus"])
    return Finding(
        "failed",
        f"the shard holds memory on the wrong GPU: {named} was not assigned to it",
        detail=_assigned_in_words(evidence),
        hint="Check that nothing overrides CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, in the profile's env or in the engine build.",
    )


def _progress(observation: Map, evidence: Map) -> Finding:
    state = _current_state(observation)
    stage = (state or {}).get("stage")
    if state is None or stage in ("stopped", "failed"):
        return Finding("starting", "the service has not reported yet")
    if stage == "stopping":
        return Finding("starting", f"the run before is being stopped{_because(state.get('detail'))}")
    if stage != "running":
        word = _BEFORE_ENGINE.get(str(stage), str(stage))
        return Finding(
            _GATE_STAGES.get(str(stage), str(stage)) if stage in _BEFORE_ENGINE else "starting",
            word + _because(state.get("detail")),
            detail=state.get("detail"),
        )
    http = evidence["http"]
    if http is not None:
        return _leader(observation, evidence, http)
    return _follower(observation, evidence)


def _leader(observation: Map, evidence: Map, http: Map) -> Finding:
    if http["health"] != 200:
        return _before_serving(observation, evidence, http["problem"])
    over = _grace_is_over(observation)
    missing = _missing_proof(observation, evidence)
    if missing is not None and (http["serving"] or http["ok"]):
        return _decided(missing, over)
    if http["problem"]:
        failed = Finding("failed", http["problem"], detail=_holding_in_words(evidence))
        return _decided(failed, over and http["final"])
    return _ready(evidence, "it serves %s" % (_listed(http["models"] or [])))


def _follower(observation: Map, evidence: Map) -> Finding:
    serving = observation.get("leader_serving")
    missing = _missing_proof(observation, evidence)
    if missing is None and serving is not False:
        return _ready(evidence, "the leader serves" if serving else "the leader was not asked here")
    if missing is not None and serving:
        return _decided(missing, _grace_is_over(observation))
    return _before_serving(observation, evidence, "the leader does not serve yet")


def _decided(missing: Finding, over: bool) -> Finding:
    return missing if over else Finding("serving", missing.reason, detail=missing.detail)


def _grace_is_over(observation: Map) -> bool:
    since = observation.get("serving_since")
    return since is not None and observation["now"] - since >= observation.get("grace_seconds", GRACE_SECONDS)


def _ready(evidence: Map, who: str) -> Finding:
    return Finding("ready", f"{who}, {_holding_in_words(evidence)}", detail=_by_difference(evidence))


def _before_serving(observation: Map, evidence: Map, problem: str) -> Finding:
    """Running, not serving: how far it is can be seen from what the GPUs hold."""
    detail = _holding_in_words(evidence)
    if evidence["connected"] is False:
        return Finding("joining", "the leader has not connected to this rank yet", detail=detail)
    gpus = evidence["gpus"]
    several = ((observation.get("launch") or {}).get("nodes") or 1) > 1
    if evidence["judged_without_gpu"] or not gpus:
        return Finding("loading", problem, detail=detail)
    if all(gpu["enough"] for gpu in gpus):
        return Finding("holding", problem, detail=detail)
    if several and all((gpu["held_mib"] or 0) < min(BARE_CONTEXT_MIB, gpu["expected_mib"]) for gpu in gpus):
        return Finding("joining", problem, detail=detail)
    return Finding("loading", problem, detail=detail)


# ----------------------------------------------------------------------------------------------------- what proof is missing


def _missing_proof(observation: Map, evidence: Map) -> Finding | None:
    """The first proof that is missing on a rank that should hold its shard by now, as the failure that it will be."""
    if evidence["connected"] is False:
        port = observation["launch"]["ready"].get("accepts_on_port")
        return Finding(
            "failed",
            f"the leader serves without this rank: it has no connection to port {port} here",
            detail=_holding_in_words(evidence),
            hint="The leader could not reach this rank, or its build has another version (llama.cpp#26392): see the leader's first log lines.",
        )
    if evidence["judged_without_gpu"]:
        return None
    gpus = evidence["gpus"]
    if not gpus:
        return Finding("failed", "the profile asks for GPU evidence, but launch.json assigns no GPU to this shard")
    short = [gpu for gpu in gpus if not gpu["enough"]]
    if not short:
        return None
    if observation.get("gpus") is None:
        return _no_driver(observation)
    if all(gpu["held_mib"] == 0 for gpu in gpus):
        return _on_the_cpu(observation, evidence)
    return Finding("failed", "; ".join(_short_in_words(gpu) for gpu in short), detail=_holding_in_words(evidence), hint=_hint_for(short), log="gpu")


def _no_driver(observation: Map) -> Finding:
    driver = observation.get("driver") or {}
    return Finding(
        "failed",
        "the GPUs cannot be asked what they hold (%s)" % (driver.get("state") or "unknown"),
        detail=log_signatures.clean(driver.get("message") or "", limit=200) or None,
        hint="Without the driver's answer nothing is proven; run nvidia-smi on the host.",
    )


def _on_the_cpu(observation: Map, evidence: Map) -> Finding:
    count = len(evidence["gpus"])
    where = "any of its %d GPUs" % count if count > 1 else "its GPU"
    holders = _foreign_in_words(evidence["gpus"])
    return Finding(
        "failed",
        f"the engine serves, but no process of this shard holds memory on {where}: it runs on the CPU{holders}",
        detail=_devices_in_words(observation.get("devices")),
        cause="The engine goes on with the CPU when it finds no GPU." if observation["launch"]["ready"].get("falls_back_to_cpu") else None,
        log="gpu",
        hint="Use an engine build for this GPU; its device list is in the detail.",
    )


def _short_in_words(gpu: Map) -> str:
    holders = _foreign_in_words([gpu])
    if gpu["held_mib"] is None:
        why = "the driver does not tell how much each process holds" if gpu["pids"] else "the driver does not list it or its processes"
        return f"{_name(gpu)}: {why}, so nothing is proven{holders}"
    if gpu["held_mib"] == 0:
        return f"{_name(gpu)} holds nothing of this shard{holders}"
    kind = "a bare context, no model" if gpu["held_mib"] < min(BARE_CONTEXT_MIB, gpu["expected_mib"]) else "too little for its share"
    return "%s holds %d MiB of this shard, expected at least %d MiB: %s%s" % (_name(gpu), gpu["held_mib"], gpu["expected_mib"], kind, holders)


def _hint_for(short: Sequence[Map]) -> str:
    if any(gpu["held_mib"] for gpu in short):
        return "If this model really needs less, set gpu_memory_min_mib in the profile."
    if any(gpu["foreign"] for gpu in short):
        return "End the process that holds the GPU, or give the replica other GPUs."
    return "Check the engine's parallel sizes against the assigned GPUs."


def _foreign_in_words(gpus: Sequence[Map]) -> str:
    holders = [
        "%s by process %d (%s, user %s%s, %s)"
        % (
            _name(gpu),
            other["pid"],
            log_signatures.clean(other["name"] or "unknown", limit=60),
            log_signatures.clean(other["user"] or "unknown", limit=40),
            ", shard %s" % (log_signatures.clean(other["shard"], limit=80)) if other.get("shard") else "",
            _mib(other["used_mib"]),
        )
        for gpu in gpus
        for other in gpu["foreign"]
    ]
    return "; held: %s" % (", ".join(holders[:6])) if holders else ""


def _devices_in_words(devices: Map | None) -> str | None:
    if devices is None:
        return None
    if devices.get("error"):
        return "the engine's build could not be asked for its devices: %s" % (log_signatures.clean(devices["error"], limit=200))
    lines = [log_signatures.clean(line, limit=120) for line in devices.get("lines") or []]
    return "devices that the engine's build sees: %s" % (" | ".join(line for line in lines[:8] if line) or "none")


def _holding_in_words(evidence: Map) -> str:
    if evidence["judged_without_gpu"]:
        return "judged without GPU evidence (CPU profile)"
    gpus = evidence["gpus"]
    return "%d of %d GPUs hold their share" % (sum(1 for gpu in gpus if gpu["enough"]), len(gpus))


def _by_difference(evidence: Map) -> str | None:
    names = [_name(gpu) for gpu in evidence["gpus"] if gpu["by"] == "difference"]
    if evidence["judged_without_gpu"] or not names:
        return None
    return "judged by the device's use less that of others, as the driver does not tell per process: %s" % (", ".join(names))


def _assigned_in_words(evidence: Map) -> str:
    return "assigned: %s" % (", ".join("%s holds %s" % (_name(gpu), _mib(gpu["held_mib"])) for gpu in evidence["gpus"]))


def _name(gpu: Map) -> str:
    return "GPU %s (%s)" % ("?" if gpu.get("index") is None else gpu["index"], str(gpu["uuid"])[:12])


def _mib(value: int | None) -> str:
    return "unknown memory" if value is None else "%d MiB" % value
