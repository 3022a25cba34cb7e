# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a host knows of the shards that were deployed on it: rendered files, service, state of the run, readiness, processes.

The files are the collection's own (docs/architecture.md). One that is damaged leaves its part unknown, with a sentence in the record's
`errors`; it never hides the shard.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ansible_collections.rankzero.inference.plugins.module_utils import processes, secret_check, small_files
from ansible_collections.rankzero.inference.plugins.module_utils.replica_directories import PROVEN, SECRETS

Facts = dict[str, Any]
RunCommand = Callable[[list[str]], tuple[int, str, str]]

UNIT_DIRECTORY = "/etc/systemd/system"
NO_REPLICA = ("engines.d", "facts.d")
LABELS = ("profile", "pool", "fabric", "engine")
RUNNING_STATES = ("active", "activating", "reloading", "refreshing")
MOST_FILES = 500
ANSWER_SECONDS = 10.0  # a file system that takes longer to say what a path is would hold up a run, and an engine no less
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ELOOP, errno.ENOTCONN)  # the last: a FUSE file system whose program has ended
CLOCK_TOLERANCE = 5.0  # seconds between the start of a process by /proc and by its own record; /proc counts from a coarse boot time


def read(
    replica_root: str, proc_root: str, run_command: RunCommand, unit_directory: str = UNIT_DIRECTORY, table: processes.ProcessTable | None = None
) -> dict[str, Facts]:
    """`{replica: shard}` in the shape of `shards` in docs/architecture.md, with `errors: {file: sentence}` beside, and what keeps a replica
    in its place when it is planned again: `gpus` (UUIDs), `leader_port`, `http_port`,
    `tie_port`, `run_ports`; `tie_id`, by which keys of the tie can be told apart; `has_api_key`, true on the rank that serves with a key; and
    `secret_problems`, sentences about secret files that are not as a deploy wrote them.

    `run_command` is asked only when a replica has a systemd unit on this host: one `systemctl show` for all of them.
    """
    base = os.path.join(replica_root, "etc", "rankzero")
    replicas = [name for name in small_files.names(base) if is_replica(base, name)]
    units = systemd_units([name for name in replicas if os.path.lexists(unit_path(unit_directory, name))], run_command)
    return {name: read_shard(replica_root, name, proc_root, units.get(name), unit_directory, table) for name in replicas}


def is_replica(base: str, name: str) -> bool:
    return name not in NO_REPLICA and not name.startswith(".") and os.path.isdir(os.path.join(base, name))


LONGEST_REASON = 1000


def cordoned(replica_root: str) -> Facts | None:
    """`{by, reason, at}` of a host that an operator has taken out of service, else None. A damaged marker still takes it out; each is one line of text."""
    path = os.path.join(replica_root, "etc", "rankzero", "cordoned.json")
    if not os.path.lexists(path):
        return None
    content, problem = small_files.read_json(path)
    if content is None:
        return {"by": None, "reason": "the marker is there but damaged: %s" % problem, "at": None}
    return {key: one_line(content.get(key)) for key in ("by", "reason", "at")}


def one_line(value: Any) -> str | None:
    """What a person has written, as facts carry it."""
    return None if value is None else small_files.clean(str(value))[:LONGEST_REASON]


# ---- one shard


def read_shard(
    replica_root: str,
    replica: str,
    proc_root: str,
    unit: Facts | None,
    unit_directory: str = UNIT_DIRECTORY,
    table: processes.ProcessTable | None = None,
) -> Facts:
    """The record of one replica's shard. `unit` is what systemd says of it, None when there is no such unit."""
    errors: dict[str, str] = {}
    base = os.path.join(replica_root, "etc", "rankzero", replica)
    run = os.path.join(replica_root, "run", "rankzero", replica)
    current = os.path.join(base, "current")
    launch = load(os.path.join(current, "launch.json"), errors) if os.path.lexists(current) else {}
    state = load(os.path.join(run, "state.json"), errors)
    supervisor = running_supervisor(state, proc_root)
    service = systemd_service(unit, replica, unit_directory) if unit else supervisor_service(base, supervisor, proc_root)
    shard: Facts = {
        "rank": whole(launch.get("rank")),
        "nodes": whole(launch.get("nodes")),
        "revision": revision(current),
        "previous": revision(os.path.join(base, "previous")),
        "files_sha256": file_hashes(current, errors),
        "unit": service,
        "run_id": text(state.get("run_id")),
        "stage": text(state.get("stage")),
        "detail": text(state.get("detail")),
        "restarts": restarts(state, unit),
        "pids": [],
        "errors": errors,
    }
    if unit and unit.get("problem"):
        errors["unit"] = "systemctl show failed: %s" % unit["problem"]
    labels = launch["labels"] if isinstance(launch.get("labels"), dict) else {}
    shard.update({name: text(labels.get(name)) for name in LABELS})
    shard.update({name: whole(launch.get(name)) for name in ("leader_port", "http_port", "tie_port")})
    shard["url"] = text(launch["ready"].get("url")) if isinstance(launch.get("ready"), dict) else None
    tie = launch["tie"] if isinstance(launch.get("tie"), dict) else {}
    shard["run_ports"] = [port for port in tie.get("run_ports") or [] if whole(port)] if isinstance(tie.get("run_ports"), list) else []
    shard["tie_id"] = tie_id(os.path.join(current, "secrets", "tie_key")) if tie else None
    shard["has_api_key"] = "api_key" in launch["secrets"] if isinstance(launch.get("secrets"), list) else None
    shard["secret_problems"] = secret_check.problems(os.path.join(current, SECRETS))
    shard["revisions"] = kept_revisions(base)
    shard["gpus"] = [gpu["uuid"] for gpu in entries(launch.get("gpus")) if isinstance(gpu.get("uuid"), str)]
    # What a run wrote before it was killed says nothing about now.
    if state and service["active"] is False and shard["stage"] not in ("stopped", "failed"):
        shard["detail"] = "the service is not running; its last run was in stage %s" % shard["stage"]
        shard["stage"] = "stopped"
    shard.update(readiness(os.path.join(run, "ready.json"), shard, errors))
    for kept in shard["revisions"]:
        kept["proven"] = kept["proven"] or (shard["ready"] and kept["revision"] == shard["revision"])
    if shard["rank"] is not None:
        shard["pids"] = pids(replica, shard["rank"], state, supervisor, proc_root, table)
    return shard


def readiness(path: str, shard: Facts, errors: dict[str, str]) -> Facts:
    """`{ready, evidence}`: ready is a proof of this very run of this very revision, and only while the service runs."""
    if not os.path.lexists(path):
        return {"ready": False, "evidence": None}
    proof = load(path, errors)
    same_run = proof.get("run_id") is not None and proof.get("run_id") == shard["run_id"]
    same_revision = proof.get("fingerprint", shard["revision"]) == shard["revision"]
    evidence = proof.get("evidence")
    return {"ready": bool(same_run and same_revision and shard["unit"]["active"]), "evidence": evidence if isinstance(evidence, dict) else None}


def pids(replica: str, rank: int, state: Facts, supervisor: int | None, proc_root: str, table: processes.ProcessTable | None = None) -> list[int]:
    """All processes of the shard, with the run_shard.py above them."""
    # A launch's pid names its session, also when the launch itself was killed; after a reboot it may be anybody's.
    sessions = [entry["pid"] for entry in entries(state.get("launches")) if whole(entry.get("pid"))] if supervisor else []
    found = set(processes.shard_pids(replica, rank, proc_root, sessions, table))
    return sorted(found | ({supervisor} if supervisor else set()))


def running_supervisor(state: Facts, proc_root: str) -> int | None:
    """The pid of the run_shard.py that wrote state.json, if it still runs. A later process with the same number is not taken for it."""
    pid, started = whole(state.get("supervisor_pid")), state.get("started_at")
    if pid is None or pid <= 1:
        return None
    words = (small_files.read_bytes(os.path.join(proc_root, str(pid), "cmdline"))[0] or b"").split(b"\0")
    if not any(os.path.basename(word) == b"run_shard.py" for word in words):
        return None
    began = processes.describe(pid, proc_root)["started_at"]
    late = isinstance(began, (int, float)) and isinstance(started, (int, float)) and began > started + CLOCK_TOLERANCE
    return None if late else pid


def restarts(state: Facts, unit: Facts | None) -> int | None:
    """Starts of this revision before the present one; systemd's own count where the run has left none."""
    count = whole(state.get("restarts"))
    return count if count is not None else unit.get("restarts") if unit else None


# ---- files


def kept_revisions(base: str) -> list[Facts]:
    """`[{revision, rank, nodes, tie_id, serves_http, budget_seconds, proven, problem, lacks}]` of a replica, the oldest first.

    `proven`: the gate has passed with it on this host. `problem` says what is wrong with its files, `lacks` what else it cannot start without, each null
    where all is well: a revision is kept, and gone back to, whatever it lacks, for a model may come back with its file system.
    """
    parent = os.path.join(base, "revisions")
    try:
        with os.scandir(parent) as there:
            found = sorted(
                (entry.stat(follow_symlinks=False).st_mtime, entry.name)
                for entry in there
                if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
            )
    except OSError:
        return []
    silent: set[str] = set()
    return [kept_revision(os.path.join(parent, name), name, silent) for _written, name in found]


def kept_revision(folder: str, name: str, silent: set[str]) -> Facts:
    """One entry of `kept_revisions`. `silent`: paths that have not answered; more are put there, and none is asked twice."""
    launch, problem = small_files.read_json(os.path.join(folder, "launch.json"), 16 * 1024 * 1024)
    launch = launch or {}
    ready: Facts = launch["ready"] if isinstance(launch.get("ready"), dict) else {}
    secrets = [secret for secret in launch["secrets"] if isinstance(secret, str)] if isinstance(launch.get("secrets"), list) else []
    needed = ["shard.env", "run_shard.py", *(os.path.join("secrets", secret) for secret in secrets)]
    missing = [wanted for wanted in needed if not os.path.isfile(os.path.join(folder, wanted))]
    if problem is None and launch.get("fingerprint") != name:
        problem = "its launch.json is of another revision"
    elif problem is None and missing:
        problem = "without %s" % ", ".join(missing)
    return {
        "revision": name,
        "rank": whole(launch.get("rank")),
        "nodes": whole(launch.get("nodes")),
        "tie_id": tie_id(os.path.join(folder, "secrets", "tie_key")) if "tie_key" in secrets else None,
        "serves_http": ready.get("serves_http") is True,
        "budget_seconds": whole(ready.get("budget_seconds")),
        "proven": os.path.isfile(os.path.join(folder, PROVEN)),
        "problem": one_line(problem),
        "lacks": one_line(what_is_gone(start_needs(launch), silent)) if problem is None else None,
    }


def start_needs(launch: Facts) -> list[str]:
    """Paths outside of a revision without which its engine cannot start: its programs, its model and its adapters."""
    programs = [entry.get("path") for entry in entries(launch.get("launches"))]
    reads = launch["reads"] if isinstance(launch.get("reads"), list) else []
    return sorted({path for path in [*programs, *reads] if isinstance(path, str) and os.path.isabs(path)})


def what_is_gone(paths: Sequence[str], silent: set[str], seconds: float = ANSWER_SECONDS) -> str | None:
    """Why an engine that needs these paths cannot start, or None.

    Who looks at a path of a dead NFS server may never come back: a thread looks, and the path that it cannot leave behind is `silent` from then on. What
    comes after that path is not looked at.
    """
    gone: dict[str, bool] = {}
    asked = [path for path in paths if path not in silent]

    def look() -> None:
        for path in asked:
            gone[path] = is_gone(path)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(seconds)
    seen = dict(gone)
    missing = [path for path, is_missing in seen.items() if is_missing]
    sentences = ["without %s, where nothing is" % " and ".join(missing)] if missing else []
    silent.update(asked[len(seen) : len(seen) + 1])
    unanswered = [path for path in paths if path in silent]
    if unanswered:
        sentences.append("before %s answers; it has not within %d seconds" % (" and ".join(unanswered), seconds))
    return "it cannot start %s" % ", nor ".join(sentences) if sentences else None


def is_gone(path: str) -> bool:
    """Whether nothing is there, or an empty directory, as a mount point is without its file system. What this user may not look at is not gone."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode) and not os.listdir(path)
    except OSError as error:
        return error.errno in _NOT_THERE
    except ValueError:  # a null byte, or half of a surrogate pair
        return True


def revision(link: str) -> str | None:
    """The fingerprint that `current` or `previous` points to."""
    try:
        return os.path.basename(os.readlink(link).rstrip("/")) or None
    except OSError:
        return None


def file_hashes(folder: str, errors: dict[str, str]) -> dict[str, str]:
    """`{relative name: sha256}` of a revision's files. Secrets are left out: even their hashes tell whether a guess is right. So is its proof."""
    found: dict[str, str] = {}
    for directory, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if (directory, name) != (folder, SECRETS))
        for name in sorted(names):
            if (directory, name) == (folder, PROVEN):
                continue
            path = os.path.join(directory, name)
            digest, problem = sha256(path)
            if digest is None:
                errors[os.path.relpath(path, folder)] = str(problem)
            elif len(found) < MOST_FILES:
                found[os.path.relpath(path, folder)] = digest
    return found


def tie_id(path: str) -> str | None:
    """16 hex digits that are equal exactly when tie keys are. A key is 32 random bytes, so the digest helps nobody to find it. None where it cannot be read."""
    content, _problem = small_files.read_bytes(path, 4096)
    return hashlib.sha256(b"rankzero tie id " + content).hexdigest()[:16] if content else None


def sha256(path: str) -> tuple[str | None, str | None]:
    """The hash of a small file, or None and the reason."""
    content, problem = small_files.read_bytes(path, 64 * 1024 * 1024)
    return (None, problem) if content is None else (hashlib.sha256(content).hexdigest(), None)


def load(path: str, errors: dict[str, str]) -> Facts:
    """A JSON mapping; empty when it is absent, and with a sentence in `errors` when it is damaged."""
    if not os.path.lexists(path):
        return {}
    content, problem = small_files.read_json(path, 16 * 1024 * 1024)
    if content is None:
        errors[os.path.basename(path)] = str(problem)
    return content or {}


# ---- the service


def unit_path(unit_directory: str, replica: str) -> str:
    return os.path.join(unit_directory, "inference-%s.service" % replica)


def systemd_units(replicas: list[str], run_command: RunCommand) -> dict[str, Facts]:
    """`{replica: {active_state, enabled, restarts}}` by one call of systemctl; unknown values when it fails."""
    if not replicas:
        return {}
    names = ["inference-%s.service" % replica for replica in replicas]
    status, out, err = run_command(["systemctl", "show", "--property=Id,ActiveState,UnitFileState,NRestarts", "--"] + names)
    if status != 0:
        return {
            replica: {"active_state": None, "enabled": None, "restarts": None, "problem": small_files.clean(err) or "status %d" % status}
            for replica in replicas
        }
    blocks = [parse_properties(block) for block in out.strip().split("\n\n")]
    by_id = {block.get("Id", ""): block for block in blocks}
    return {replica: unit_facts(by_id.get(name, {})) for replica, name in zip(replicas, names)}


def parse_properties(block: str) -> dict[str, str]:
    """`NAME=VALUE` lines of `systemctl show`."""
    pairs = (line.partition("=") for line in block.splitlines())
    return {name: value for name, equals, value in pairs if equals}


def unit_facts(properties: dict[str, str]) -> Facts:
    count = properties.get("NRestarts", "")
    enabled = properties.get("UnitFileState")
    return {
        "active_state": properties.get("ActiveState") or None,
        "enabled": enabled in ("enabled", "enabled-runtime") if enabled else None,
        "restarts": int(count) if count.isdecimal() else None,
    }


def systemd_service(unit: Facts, replica: str, unit_directory: str) -> Facts:
    """`unit` of the record. `active` is true from the moment systemd runs it, also while it is still starting; null when systemd gave no answer."""
    state = unit["active_state"]
    return {
        "name": "inference-%s.service" % replica,
        "manager": "systemd",
        "active": state in RUNNING_STATES if state else None,
        "state": state,
        "enabled": unit["enabled"],
        "sha256": sha256(unit_path(unit_directory, replica))[0],
    }


def supervisor_service(base: str, supervisor: int | None, proc_root: str) -> Facts:
    """`unit` of a shard without a systemd unit: its run_shard.py is the proof of life. `enabled` is null: nothing starts it at boot.

    `state` is `unmanaged` where that runs without a supervisord above it, which somebody has killed: nothing would start it again.
    """
    configuration = os.path.join(base, "supervisord.conf")
    known = os.path.lexists(configuration)
    alone = known and supervisor is not None and not _below_supervisord(supervisor, proc_root)
    return {
        "name": "supervisord.conf" if known else None,
        "manager": "supervisor" if known else None,
        "active": supervisor is not None,
        "state": "stopped" if supervisor is None else "unmanaged" if alone else "running",
        "enabled": None,
        "sha256": sha256(configuration)[0] if known else None,
    }


def _below_supervisord(pid: int, proc_root: str) -> bool:
    for above in processes.ProcessTable(proc_root).line_of(pid):
        words = (small_files.read_bytes(os.path.join(proc_root, str(above), "cmdline"))[0] or b"").split(b"\0")
        if any(word.endswith(b"/supervisord.conf") for word in words) and any(os.path.basename(word) == b"supervisord" for word in words):
            return True
    return False


def entries(value: Any) -> list[Facts]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def text(value: Any) -> str | None:
    return small_files.clean(value) if isinstance(value, str) else None
