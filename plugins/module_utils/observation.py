# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Collect what `evidence.judge` weighs, on the host of one shard, and watch it until something changes.

Everything that is read may be missing, half there or another user's: each such condition becomes null or a sentence in the
observation, never an exception. Commands go through the `run_command` that is handed in (AnsibleModule's signature).
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ansible_collections.rankzero.inference.plugins.module_utils import (
    evidence,
    http_probe,
    log_signatures,
    masking,
    nvidia,
    processes,
    shard_log,
    small_files,
)
from ansible_collections.rankzero.inference.plugins.module_utils.revisions import Revisions
from ansible_collections.rankzero.inference.plugins.module_utils.shard_places import Places, places

RunCommand = Callable[..., "tuple[int, str, str]"]

PERIOD_SECONDS = 0.5
PATIENCE_SECONDS = 2.0
"""A service that was just started may need this long until its state.json is there."""

LOG_SECONDS = 5.0
"""How long the end of a log is waited for; one that cannot be read, or was turned over, never has it."""

HEALTH_SECONDS = 10.0
LEADER_SECONDS = 1.0
GENERATION_SECONDS = 60.0
DEVICES_SECONDS = 20
LOG_READ_LINES = 2000

_HOMES = ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME")

_ENVIRONMENT_LINE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)='((?:[^']|'\\'')*)'")


class Watch(NamedTuple):
    """What the caller of a watch knows and wants; `since_stage` null returns after one look. What an earlier call returned as
    `serving_since` is handed in again, so that a grace ends however short the calls are."""

    since_stage: str | None = None
    hold_seconds: float = 15.0
    leader_serving: bool | None = None
    fingerprint: str | None = None
    rank: int | None = None
    run_id: str | None = None
    known_run: str | None = None
    serving_since: float | None = None


class Observer:
    """Looks at one shard again and again. Remembers a generated token for the run it came from: one is proof enough."""

    def __init__(self, replica: str, root: str, proc_root: str, run_command: RunCommand) -> None:
        self.places = places(replica, root)
        self._replica = replica
        self._proc_root = proc_root
        self._run_command = run_command
        self._generation: tuple[str, dict[str, Any]] | None = None
        self.secrets: list[str] = []

    def look(self, patience: bool = False) -> dict[str, Any]:
        """One observation without its log and device list, which cost time and are only needed to explain a failure."""
        launch, problem = small_files.read_json(os.path.join(self.places.revision, "launch.json"))
        service, state = self._service(small_files.read_json(os.path.join(self.places.state_dir, "state.json"))[0], patience)
        self.secrets = [*masking.of_replica(self.places.config), *masking.all_spellings(masking.given_by_name(launch))]
        pids = self._own_pids(launch, state)
        driver, gpus = self._gpus(launch, set(pids))
        return {
            "launch": launch,
            "launch_problem": problem,
            "state": state,
            "service": service,
            "patience": patience,
            "driver": driver,
            "gpus": gpus,
            "http": self._http(launch, state, set(pids)),
            "connected": self._connected(launch, state, pids),
            "devices": None,
            "log": [],
            "now": time.time(),
        }

    def explain(self, observation: dict[str, Any], verdict: Mapping[str, Any]) -> dict[str, Any]:
        """The observation with the log and, when the GPUs are empty, with the devices that the engine's build sees."""
        restarted = bool(verdict["evidence"]["restarts"]) or "stay up" in verdict["reason"]
        held = [gpu["held_mib"] for gpu in verdict["evidence"]["gpus"]]
        devices = self._devices(observation["launch"]) if held and not any(held) else None
        return {**observation, "log": self._whole_log(2 if restarted else 1, observation["state"] or {}), "devices": devices}

    # -- the service

    def _service(self, state: dict[str, Any] | None, patience: bool) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """The service, and the state if it is of the service's present process: a restart leaves an older one for a moment."""
        unit = self._systemd() if os.path.lexists(self.places.unit_file) else None
        if unit is not None:
            stale = state is not None and unit["active"] and unit["pid"] not in (0, state.get("supervisor_pid"))
            return unit, None if stale else state
        if state is None:
            return None, None
        alive = self._is_supervisor(state.get("supervisor_pid"))
        service = {"manager": "supervisor", "active": alive, "restarting": False, "failed": False, "restarts": None, "result": None}
        return service, None if patience and not alive else state

    def _systemd(self) -> dict[str, Any] | None:
        code, text, _errors = self._run_command(
            ["systemctl", "show", self.places.unit, "-p", "LoadState,ActiveState,SubState,NRestarts,Result,ExecMainStatus,MainPID"],
            environ_update={"LC_ALL": "C"},
        )
        shown = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
        if code != 0 or shown.get("LoadState") != "loaded":
            return None
        active, sub = shown.get("ActiveState"), shown.get("SubState", "")
        return {
            "manager": "systemd",
            "restarting": sub.startswith("auto-restart"),
            "failed": active == "failed",
            # A unit that is just being stopped may be on its way to a new start: not known yet.
            "active": None if active == "deactivating" else active in ("active", "activating", "reloading", "refreshing"),
            "restarts": _number(shown.get("NRestarts")),
            "result": shown.get("Result") or None,
            "pid": _number(shown.get("MainPID")) or 0,
            "exit_status": _number(shown.get("ExecMainStatus")),
        }

    def _is_supervisor(self, pid: object) -> bool:
        """Whether this process is a run_shard.py: a number alone may have been given to another process meanwhile."""
        words = _read_bytes(os.path.join(self._proc_root, str(pid), "cmdline")).split(b"\0")
        return any(os.path.basename(word) == b"run_shard.py" for word in words)

    # -- processes, connections, GPUs

    def _own_pids(self, launch: Mapping[str, Any] | None, state: Mapping[str, Any] | None) -> list[int]:
        """Processes of this run. What an earlier run has left counts as a stranger: its memory proves nothing about this one."""
        if launch is None or state is None:
            return []
        sessions = [entry["pid"] for entry in state.get("launches") or []]
        table = processes.ProcessTable(self._proc_root)
        members = processes.shard_pids(self._replica, launch["rank"], self._proc_root, sessions)
        return [pid for pid in members if _run_of(table, pid) in (None, state.get("run_id"))]

    def _connected(self, launch: Mapping[str, Any] | None, state: Mapping[str, Any] | None, pids: list[int]) -> bool | None:
        port = _ready(launch).get("accepts_on_port")
        if port is None or not _runs(state):
            return None
        if port == (launch or {}).get("leader_port"):
            port = (state or {}).get("run_port") or port  # the ranks' rendezvous moves with the run
        return bool(processes.established(self._proc_root, port, pids))

    def _gpus(self, launch: Mapping[str, Any] | None, pids: set[int]) -> tuple[dict[str, Any] | None, list[dict[str, Any]] | None]:
        """A CPU profile does not need the driver, and a host of it need not have one."""
        if launch is None or not _ready(launch).get("gpu_evidence", True):
            return None, None
        answer = nvidia.read_processes(self._proc_root)
        driver = {"state": answer["state"], "message": answer["message"]}
        if answer["state"] not in ("ok", "gpus_missing"):
            return driver, None
        table = processes.ProcessTable(self._proc_root)
        return driver, [self._gpu(gpu, pids, table) for gpu in answer["gpus"]]

    def _gpu(self, gpu: Mapping[str, Any], pids: set[int], table: processes.ProcessTable) -> dict[str, Any]:
        rows = gpu["processes"]
        return {
            "uuid": gpu["uuid"],
            "index": gpu["index"],
            "pci_bdf": gpu["pci_bdf"],
            "used_mib": (gpu["memory"] or {}).get("used_mib"),
            "processes": None if rows is None else [self._process(row, pids, table) for row in rows],
        }

    def _process(self, row: Mapping[str, Any], pids: set[int], table: processes.ProcessTable) -> dict[str, Any]:
        shown = {"pid": row["pid"], "used_mib": row["used_mib"], "ours": row["pid"] in pids, "name": None, "user": None, "shard": None}
        if not shown["ours"]:
            seen, shard = processes.describe(row["pid"], self._proc_root, table), table.shard_of(row["pid"])
            name = processes.shard_name(shard)
            shown.update(name=seen["name"], user=seen["user"], shard=f"{name} of run {shard.run_id}" if shard is not None and shard.run_id else name)
        return shown

    # -- HTTP

    def _http(self, launch: Mapping[str, Any] | None, state: Mapping[str, Any] | None, pids: set[int]) -> dict[str, Any] | None:
        ready = _ready(launch)
        if not ready.get("serves_http") or not _runs(state):
            return None
        answers: dict[str, Any] = {
            "health": http_probe.request(ready["url"], ready["health_path"], timeout=HEALTH_SECONDS),
            "models": None,
            "adapters": None,
            "unauthenticated": None,
            "generation": None,
            "key": None,
            "listener": None,
        }
        if answers["health"]["status"] != 200:
            return answers
        answers["listener"] = self._listener(ready["url"], pids)
        if answers["listener"] is not None and not answers["listener"]["ours"]:
            return answers  # a stranger is not told the key
        headers, answers["key"] = self._key(ready.get("key_secret"))
        answers["models"] = http_probe.request(ready["url"], ready["models_path"], headers=headers)
        if ready.get("adapters_path"):
            answers["adapters"] = http_probe.request(ready["url"], ready["adapters_path"], headers=headers)
        if ready.get("key_protects"):
            answers["unauthenticated"] = http_probe.request(ready["url"], ready["key_protects"])
        if evidence.weigh_http({**ready, "probe_path": None}, answers)["ok"]:
            answers["generation"] = self._generate(ready, headers, str((state or {}).get("run_id")))
        return answers

    def leader_serves(self, launch: Mapping[str, Any] | None) -> bool | None:
        """Ask the leader's health path over the network, so that a follower learns of it within a look. Null says nothing: a firewall may be in the way."""
        leader = _ready(launch).get("leader_health")
        if not leader:
            return None
        return True if http_probe.request(leader["url"], leader["path"], timeout=LEADER_SECONDS)["status"] == 200 else None

    def own_server(self) -> tuple[str | None, str | None]:
        """The URL of this shard's server, or None and why it may not be asked: it does not run, or a stranger listens there, who is not told the key."""
        launch, problem = small_files.read_json(os.path.join(self.places.revision, "launch.json"))
        state = small_files.read_json(os.path.join(self.places.state_dir, "state.json"))[0]
        url = _ready(launch).get("url")
        if problem or not url:
            return None, problem or "this rank does not serve HTTP"
        if not _runs(state) or not self._is_supervisor((state or {}).get("supervisor_pid")):
            return None, "it does not run"
        listener = self._listener(url, set(self._own_pids(launch, state)))
        if listener is not None and not listener["ours"]:
            return None, "process %s (%s) listens at %s" % (listener["pid"], listener["name"], url)
        return str(url), None

    def headers(self) -> dict[str, str]:
        """What a request to the shard's own server needs: its key, if it has one."""
        launch = small_files.read_json(os.path.join(self.places.revision, "launch.json"))[0]
        return self._key(_ready(launch).get("key_secret"))[0]

    def _generate(self, ready: Mapping[str, Any], headers: Mapping[str, str], run_id: str) -> dict[str, Any] | None:
        if not ready.get("probe_path"):
            return None
        if self._generation is None or self._generation[0] != run_id:
            body: dict[str, Any] = {"model": ready.get("probe_model"), "max_tokens": 1, "temperature": 0}
            body.update({"messages": [{"role": "user", "content": "1"}]} if "chat" in ready["probe_path"] else {"prompt": "1"})
            answer = http_probe.request(ready["url"], ready["probe_path"], body, headers, timeout=GENERATION_SECONDS)
            if answer["status"] != 200:
                return answer
            self._generation = (run_id, answer)
        return self._generation[1]

    def _key(self, name: str | None) -> tuple[dict[str, str], str | None]:
        if not name:
            return {}, None
        value = _read_bytes(os.path.join(self.places.revision, "secrets", name)).decode("utf-8", "replace").strip()
        return ({"Authorization": f"Bearer {value}"}, "used") if value else ({}, "unreadable")

    def _listener(self, url: str, pids: set[int]) -> dict[str, Any] | None:
        """The process that listens at the server's address, or None where nothing does. One that cannot be seen is another user's: not ours."""
        parts = urlsplit(url)
        found = [
            row
            for row in processes.listening_sockets(self._proc_root)
            if row["listening"] and row["port"] == parts.port and row["address"] in (parts.hostname, "0.0.0.0", "::")
        ]
        if not found:
            return None
        unseen = next((row for row in found if row["pid"] is None), None)
        if unseen is not None:
            return {"pid": None, "name": None, "user": None, "ours": False}
        pid = next((row["pid"] for row in found if row["pid"] in pids), found[0]["pid"])
        shown = processes.describe(pid, self._proc_root)
        return {"pid": pid, "name": shown["name"], "user": shown["user"], "ours": pid in pids}

    # -- what explains a failure

    def _whole_log(self, runs: int, state: Mapping[str, Any]) -> list[str]:
        """The log with the last words of what has ended, as far as they come in time: they tell the cause."""
        launches = state.get("launches")
        ended = any(isinstance(entry, Mapping) and entry.get("exit") for entry in (launches if isinstance(launches, list) else ()))
        deadline = time.monotonic() + LOG_SECONDS
        while True:
            lines = self._log(runs)
            if not state.get("run_id") or shard_log.is_complete(lines, str(state["run_id"]), ended) or time.monotonic() > deadline:
                return lines
            time.sleep(0.1)

    def _log(self, runs: int) -> list[str]:
        """The log of the last `runs` runs: an earlier deployment's lines must not be taken for the cause of this one's failure."""
        return shard_log.last_runs(shard_log.read(self.places, self._run_command, LOG_READ_LINES, self.secrets), runs)

    def _devices(self, launch: Mapping[str, Any]) -> dict[str, Any] | None:
        """Ask the engine's build for its devices with exactly the environment of the shard, less its secrets.

        Done as the service's user, since its directories may hold anything that a program loads (a home's site-packages), and in the revision's
        directory, which belongs to root: ggml loads libraries from the current one.
        """
        command = _ready(launch).get("devices_command")
        if not command:
            return None
        own = launch["launches"][-1].get("env") or {}
        wanted = {**read_environment(os.path.join(self.places.revision, "shard.env")), **own, **dict.fromkeys(_HOMES, "/nonexistent")}
        as_user, problem = _as_owner((launch.get("paths") or {}).get("work_dir"))
        if problem:
            return {"lines": [], "error": problem}
        dropped = [word for name in sorted(set(os.environ) - set(wanted)) if "=" not in name for word in ("-u", name)]
        try:
            code, text, errors = self._run_command(
                [*as_user, "env", *dropped, "timeout", "-k", "2", str(DEVICES_SECONDS), command["path"], *command["args"]],
                environ_update=wanted,
                cwd=_existing(self.places.revision),
                handle_exceptions=False,
            )
        except (OSError, ValueError) as error:
            return {"lines": [], "error": str(error)}
        if code != 0:
            told = log_signatures.clean_lines(errors, self.secrets)
            return {"lines": [], "error": "exit code %d%s" % (code, ": " + told[-1] if told else "")}
        return {"lines": log_signatures.clean_lines(text, self.secrets), "error": None}


def watch(observer: Observer, wanted: Watch) -> tuple[dict[str, Any], dict[str, Any]]:
    """Look until the stage is another one than `since_stage`, the shard is ready or has failed, or the time to hold is over.

    Returns the last observation and its verdict, in which secrets are masked. A failure is explained with the log.
    """
    began = time.monotonic()
    serving_since = wanted.serving_since
    while True:
        elapsed = time.monotonic() - began
        observation = observer.look(patience=wanted.hold_seconds > 0 and elapsed < PATIENCE_SECONDS)
        if _serving(observation, wanted.leader_serving):
            serving_since = serving_since or observation["now"]
        else:
            serving_since = None
        observation.update(
            leader_serving=wanted.leader_serving,
            serving_since=serving_since,
            wanted={"fingerprint": wanted.fingerprint, "rank": wanted.rank, "run_id": wanted.run_id, "known_run": wanted.known_run},
        )
        verdict = _with_leader(observer, observation, evidence.judge(observation))
        if verdict["failed"]:
            observation = observer.explain(observation, verdict)
            return observation, log_signatures.mask(evidence.judge(observation), observer.secrets)
        if verdict["ready"] or verdict["stage"] != wanted.since_stage or time.monotonic() - began >= wanted.hold_seconds:
            return observation, log_signatures.mask(verdict, observer.secrets)
        time.sleep(max(PERIOD_SECONDS, time.monotonic() - began - elapsed))


def _with_leader(observer: Observer, observation: Mapping[str, Any], verdict: dict[str, Any]) -> dict[str, Any]:
    """The verdict if the leader is seen to serve, where that makes a follower ready. It never makes one fail: an old leader may still be ending."""
    if verdict["ready"] or verdict["failed"] or observation["leader_serving"] or not observer.leader_serves(observation["launch"]):
        return verdict
    better = evidence.judge({**observation, "leader_serving": True, "serving_since": observation["now"]})
    return better if better["ready"] else verdict


def report(where: Places, seen: Mapping[str, Any], verdict: Mapping[str, Any]) -> dict[str, Any]:
    """What a caller on the controller needs: the verdict and what it belongs to."""
    launch, state = seen["launch"] or {}, seen["state"] or {}
    return {
        "ready": verdict["ready"],
        "stage": verdict["stage"],
        "verdict": dict(verdict),
        "rank": launch.get("rank"),
        "nodes": launch.get("nodes"),
        "serves_http": bool(_ready(launch).get("serves_http")),
        "run_id": state.get("run_id"),
        "serving_since": seen["serving_since"],
        "budget_seconds": _ready(launch).get("budget_seconds"),
        "log_command": shard_log.command(where),
    }


def mark(where: Places, seen: Mapping[str, Any], verdict: dict[str, Any]) -> tuple[bool, dict[str, Any]]:
    """Write ready.json for a shard that is ready, remove it for one that has failed: (whether something changed, the verdict).

    A mark of the same run stays as it is: it says since when the run is proven. A shard whose mark cannot be written is not ready,
    as nobody else would know of it. The revision keeps that it was proven once: later runs may go back to it.
    """
    path = os.path.join(where.state_dir, "ready.json")
    try:
        if verdict["ready"]:
            Revisions(where.root, seen["launch"]["replica"]).mark_proven(seen["launch"]["fingerprint"], seen["now"])
            return _write_mark(path, seen, verdict), verdict
        if verdict["failed"]:
            os.unlink(path)
            return True, verdict
    except OSError as error:
        if verdict["ready"]:
            return False, {
                **verdict,
                "stage": "failed",
                "ready": False,
                "failed": True,
                "reason": f"{error.filename or path} cannot be written: {error.strerror}",
                "hint": "Run the gate as the user that owns the state directory, or with become.",
            }
    return False, verdict


def _write_mark(path: str, seen: Mapping[str, Any], verdict: Mapping[str, Any]) -> bool:
    launch, state = seen["launch"], seen["state"]
    content = {
        "schema": 1,
        "replica": launch["replica"],
        "rank": launch["rank"],
        "fingerprint": launch["fingerprint"],
        "run_id": state["run_id"],
        "at": round(seen["now"], 3),
        "evidence": verdict["evidence"],
    }
    before = small_files.read_json(path)[0] or {}
    if all(before.get(key) == content[key] for key in ("schema", "replica", "rank", "fingerprint", "run_id")):
        return False
    draft = f"{path}.{secrets.token_hex(8)}"  # the directory is the service's: a name that it could foresee, it could prepare
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644), "w", encoding="utf-8") as stream:
        os.fchmod(stream.fileno(), 0o644)
        json.dump(content, stream)
    os.rename(draft, path)
    return True


def _serving(observation: Mapping[str, Any], leader_serving: bool | None) -> bool:
    if _ready(observation["launch"]).get("serves_http"):
        return ((observation["http"] or {}).get("health") or {}).get("status") == 200
    return bool(leader_serving)


def _as_owner(directory: object) -> tuple[list[str], str | None]:
    """What a command of root's starts with to run as the owner of `directory`, or why it cannot be run so."""
    if os.geteuid() != 0:
        return [], None
    try:
        owner = os.stat(str(directory))
    except OSError as error:
        return [], small_files.reason(str(directory), error)
    if owner.st_uid == 0:
        return [], None
    setpriv = shutil.which("setpriv", path="/usr/sbin:/usr/bin:/sbin:/bin")
    if setpriv is None:
        return [], "setpriv was not found (util-linux), and nothing of the service's is run as root"
    return [setpriv, f"--reuid={owner.st_uid}", f"--regid={owner.st_gid}", "--clear-groups", "--no-new-privs"], None


def _ready(launch: Mapping[str, Any] | None) -> Mapping[str, Any]:
    return (launch or {}).get("ready") or {}


def _runs(state: Mapping[str, Any] | None) -> bool:
    return state is not None and state.get("stage") == "running"


def _run_of(table: processes.ProcessTable, pid: int) -> str | None:
    shard = table.shard_of(pid)
    return shard.run_id if shard is not None else None


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None


def _existing(path: str) -> str:
    return path if os.path.isdir(path) else "/"


def _read_bytes(path: str, limit: int = 1024 * 1024) -> bytes:
    """The last `limit` bytes of a file; empty when it cannot be read."""
    try:
        with open(path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > limit:
                stream.seek(size - limit)
            return stream.read(limit)
    except OSError:
        return b""


def read_environment(path: str) -> dict[str, str]:
    """shard.env: lines `NAME='value'`; run_shard.py has refused any other before an engine was started from it."""
    found = (_ENVIRONMENT_LINE.fullmatch(line) for line in _read_bytes(path).decode("utf-8", "surrogateescape").split("\n"))
    return {match.group(1): match.group(2).replace("'\\''", "'") for match in found if match is not None}
