# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The waiting side of shard_ready: polls the host, shows progress, and lets the hosts of one task learn from each other.

A module cannot print, and a host that waits for its deadline while another rank has long failed wastes minutes. The forks of one
task share `C.DEFAULT_LOCAL_TMP` on the controller, so they leave each other notices there: `failed` with the culprit, `leader` when
rank 0 is being asked, `serving` when it serves.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from typing import Any

from ansible import constants as C
from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.rankzero.inference.plugins.plugin_utils import run_identity

MODULE = "rankzero.inference.shard_ready"
HEARTBEAT_SECONDS = 29.0
DEFAULT_BUDGET_SECONDS = 900
LEADER_POLL_SECONDS = 5.0
"""How long a rank that only waits for the leader holds one call: what the leader does is learnt between two calls."""
LOST_CONNECTIONS = 3
TEXT_LIMIT = 160

ARGUMENTS: dict[str, dict[str, Any]] = {
    "replica": {"type": "str", "required": True},
    "rank": {"type": "int"},
    "leader": {"type": "str"},
    "replica_root": {"type": "path", "default": "/"},
    "fingerprint": {"type": "str"},
    "known_run": {"type": "str"},
    "wait": {"type": "bool", "default": True},
    "deadline": {"type": "float"},
    "timeout": {"type": "int"},
    "mark": {"type": "bool", "default": True},
    "hold_seconds": {"type": "float", "default": 15},
    "proc_root": {"type": "path", "default": "/proc"},
    "log_file": {"type": "str"},
}
_REPORT = (("reason:", "reason"), ("cause:", "cause"), ("detail:", "detail"), ("do:", "hint"))
TO_MODULE = ("replica", "rank", "replica_root", "fingerprint", "known_run", "mark", "proc_root")

display = Display()


class Board:
    """Notices between the hosts of one task, in a directory of the controller's own temporary one.

    The same task may be run again by the same hosts (a handler that is flushed twice). Each pass has a board of its own: a host takes
    the first one on which it has not signed yet.
    """

    def __init__(self, folder: str, topic: str, host: str) -> None:
        base = os.path.join(folder, f"rankzero-{_digest(topic)}")
        number = 0
        while not self._sign(f"{base}-{number}", f"host-{_digest(host)}"):
            number += 1

    def _sign(self, folder: str, name: str) -> bool:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        self._folder = folder
        return self.post(name)

    def post(self, name: str, content: Any = None) -> bool:
        """Leave a notice; False when it is there already: the first one counts."""
        path = os.path.join(self._folder, name)
        draft = f"{path}.{os.getpid()}"
        with open(draft, "w", encoding="utf-8") as stream:
            json.dump(content, stream)
        try:
            os.link(draft, path)
        except FileExistsError:
            return False
        finally:
            os.unlink(draft)
        return True

    def has(self, name: str) -> bool:
        return os.path.exists(os.path.join(self._folder, name))

    def read(self, name: str) -> Any:
        try:
            with open(os.path.join(self._folder, name), encoding="utf-8") as stream:
                return json.load(stream)
        except FileNotFoundError:
            return None


class Progress:
    """One line for each change of stage and, when nothing changes, about every 30 seconds."""

    def __init__(self, replica: str, rank: int, host: str, hosts: list[str], silent: bool) -> None:
        width = max(len(name) for name in [*hosts, host]) + len(f"rank {len(hosts) - 1} ():")
        self._head = f"[{replica}] " + f"rank {rank} ({host}):".ljust(width)
        self._silent = silent
        self._started = self._shown = time.monotonic()
        self._stage_since = self._started
        self._stage: str | None = None
        self.stages: dict[str, float] = {}

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self._started, 1)

    def update(self, stage: str, text: str | None, budget: float) -> None:
        now = time.monotonic()
        changed = stage != self._stage
        # The time until the first look is that of the stage which it finds: the shard has been there, or before it, all the while.
        spent = self._stage or stage
        self.stages[spent] = round(self.stages.get(spent, 0.0) + now - self._stage_since, 1)
        self._stage, self._stage_since = stage, now
        if changed or now - self._shown >= HEARTBEAT_SECONDS:
            self.line(stage, text, budget)

    def line(self, stage: str, text: str | None, budget: float) -> None:
        self._shown = time.monotonic()
        if not self._silent:
            parts = [f"{self._head} {stage.ljust(8)}", f"{self.seconds:.0f} s", _shorten(text), f"budget {budget:.0f} s" if budget else ""]
            display.display(" · ".join(part for part in parts if part))


class ActionModule(ActionBase):  # type: ignore[misc]
    """Skip, one look, or wait."""

    TRANSFERS_FILES = False
    _supports_check_mode = True
    _supports_async = False
    _requires_connection = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        task_vars = task_vars or {}
        # An answer to a survey that was left empty arrives as "".
        self._task.args = {name: value for name, value in self._task.args.items() if value is not None and value != ""}
        _checked, options = self.validate_argument_spec(argument_spec=ARGUMENTS)
        if options["rank"] is None:
            result.update(changed=False, ready=None, msg=f"this host has no shard of replica {options['replica']}")
        elif not options["wait"] or self._task.check_mode:
            result.update(self._ask(options, task_vars, {"wait": False}))
        else:
            result.update(self._wait(options, task_vars))
        return result

    def _wait(self, options: dict[str, Any], task_vars: dict[str, Any]) -> dict[str, Any]:
        host = str(task_vars.get("inventory_hostname", "localhost"))
        topic = f"{options['replica']} {self._task._uuid} {options['fingerprint']} {options['deadline']}"  # pylint: disable=protected-access
        board = Board(C.DEFAULT_LOCAL_TMP, topic, host)
        if options["rank"] == 0:
            board.post("leader")
        try:
            answer = self._poll(options, task_vars, host, board)
        except Exception as error:
            board.post("failed", {"rank": options["rank"], "host": host, "reason": _shorten(str(error) or type(error).__name__)})
            raise
        if answer.get("failed") or answer.get("unreachable"):
            told = (answer.get("verdict") or {}).get("reason") or answer.get("msg") or "the host could not be asked"
            board.post("failed", {"rank": options["rank"], "host": host, "reason": _shorten(told)})
        return answer

    def _poll(self, options: dict[str, Any], task_vars: dict[str, Any], host: str, board: Board) -> dict[str, Any]:
        hosts = [str(name) for name in task_vars.get("ansible_play_batch") or [host]]
        progress = Progress(options["replica"], options["rank"], host, hosts, bool(self._task.no_log))
        started = time.time()
        budget = options["deadline"] - started if options["deadline"] is not None else options["timeout"]
        known: dict[str, Any] = {"since_stage": None, "run_id": None, "serving_since": None}
        changed, lost, calls = False, 0, 0
        while True:
            culprit = board.read("failed")
            if culprit is not None:
                return _gave_up(options, host, culprit, known["since_stage"], progress)
            left = (budget if budget is not None else DEFAULT_BUDGET_SECONDS) - (time.time() - started)
            calls += 1
            try:
                answer = self._ask(
                    options,
                    task_vars,
                    {
                        **known,
                        "hold_seconds": self._hold(options, known, board, left, progress.seconds),
                        "leader_serving": self._leader_serving(options, task_vars, hosts, board),
                    },
                )
                lost = 0
            except AnsibleConnectionFailure:
                lost += 1
                if lost >= LOST_CONNECTIONS or left <= 0:
                    raise
                time.sleep(lost)
                continue
            if answer.get("failed") or answer.get("unreachable"):
                return answer
            budget = budget if budget is not None else answer["budget_seconds"] or DEFAULT_BUDGET_SECONDS
            changed = changed or answer["changed"]
            verdict = answer["verdict"]
            progress.update(verdict["stage"], _told(verdict), budget)
            if verdict["serving"]:
                board.post("serving")
            answer.update(changed=changed, seconds=progress.seconds, stages=progress.stages, calls=calls)
            if verdict["ready"]:
                return answer
            if verdict["failed"] or time.time() - started >= budget:
                return _failed(options, host, answer, known["since_stage"], budget)
            known = {"since_stage": verdict["stage"], "run_id": known["run_id"] or answer["run_id"], "serving_since": answer["serving_since"]}

    def _ask(self, options: dict[str, Any], task_vars: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
        arguments = {name: options[name] for name in TO_MODULE}
        if options["wait"]:
            arguments["lock_owner"] = run_identity.this_run(task_vars)["owner"]
        answer: dict[str, Any] = self._execute_module(module_name=MODULE, module_args={**arguments, **more}, task_vars=task_vars)
        return answer

    @staticmethod
    def _hold(options: dict[str, Any], known: dict[str, Any], board: Board, left: float, waited: float) -> float:
        """Short at first and longer with time: another rank's failure is learnt between two calls, and each call costs a session."""
        waits_for_leader = known["since_stage"] == "holding" and options["rank"] != 0 and not board.has("serving")
        longest: float = min(options["hold_seconds"], LEADER_POLL_SECONDS) if waits_for_leader else options["hold_seconds"]
        return max(0.0, min(longest, left, max(3.0, waited / 4)))

    def _leader_serving(self, options: dict[str, Any], task_vars: dict[str, Any], hosts: list[str], board: Board) -> bool | None:
        """Null when nobody asks the leader while this host waits: with fewer forks than hosts it may only be asked when this one is done."""
        if board.has("serving"):
            return True
        together = min(int(task_vars.get("ansible_forks") or C.DEFAULT_FORKS), int(self._task.throttle or len(hosts))) >= len(hosts)
        return False if board.has("leader") or (together and options["leader"] in hosts) else None


def _told(verdict: dict[str, Any]) -> str:
    """What a progress line says: how far it is while it goes well, the reason where it is decided or hangs."""
    detail: str | None = verdict["detail"]
    return verdict["reason"] if verdict["stage"] in ("ready", "failed", "serving") or not detail else detail


def _failed(options: dict[str, Any], host: str, answer: dict[str, Any], stage: str | None, budget: float) -> dict[str, Any]:
    """A report for somebody who was not there: who, when, why, what the log says, what to do next."""
    verdict = answer["verdict"]
    name = f"[{options['replica']}] rank {options['rank']} on {host}"
    if verdict["failed"]:
        lines = [f"{name} failed after {answer['seconds']:.0f} s" + (f", while {stage}" if stage else "")]
    else:
        lines = [f"{name} is not ready after {answer['seconds']:.0f} s (budget {budget:.0f} s), still {verdict['stage']}"]
    lines += [f"  {word.ljust(7)} {verdict[key]}" for word, key in _REPORT if verdict[key]]
    lines += ["  log:"] + [f"    {line}" for line in verdict["log_lines"]] if verdict["log_lines"] else []
    if options["log_file"]:
        answer.pop("log_command", None)
        kept = os.path.abspath(os.path.expanduser(options["log_file"]))
        lines.append(f"  next:   read {kept} on the controller: the last lines of its log, which goes as the first deploy is undone")
    else:
        lines.append(f"  next:   on {host}: {answer['log_command']}")
        lines.append(f"          ansible-playbook rankzero.inference.diagnose -e replica_name={options['replica']}")
    # Ansible prints every key of a failed result below the report: what it says in words is left out.
    kept_keys = {"changed", "ready", "stage", "rank", "seconds", "stages", "calls", "log_command"}
    verdict = {name: verdict[name] for name in ("stage", "ready", "failed", "reason", "detail", "cause", "hint", "log_lines")}
    return {**{name: value for name, value in answer.items() if name in kept_keys}, "verdict": verdict, "failed": True, "msg": "\n".join(lines)}


def _gave_up(options: dict[str, Any], host: str, culprit: dict[str, Any], stage: str | None, progress: Progress) -> dict[str, Any]:
    told = f"gave up: rank {culprit['rank']} ({culprit['host']}) failed: {culprit['reason']}"
    progress.update("gave up", f"rank {culprit['rank']} ({culprit['host']}) failed", 0)
    return {
        "changed": False,
        "failed": True,
        "ready": False,
        "stage": stage,
        "gave_up": culprit,
        "seconds": progress.seconds,
        "stages": progress.stages,
        "msg": f"[{options['replica']}] rank {options['rank']} on {host} {told}",
    }


def _shorten(text: str | None) -> str:
    flat = " ".join((text or "").split())
    return flat if len(flat) <= TEXT_LIMIT else flat[: TEXT_LIMIT - 1] + "…"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]
