# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a host still has of a replica, also where its records are gone: service file, processes, directories, users.

A removal that was interrupted, a directory that somebody deleted by hand, or a supervisor that was killed leaves only parts. Each is found
here by itself, and only what belongs to this replica_root: another root on the same machine (a demonstration, a test) may run a replica of
the same name.
"""

from __future__ import annotations

import json
import os
from typing import Any

from ansible_collections.rankzero.inference.plugins.module_utils import processes, small_files
from ansible_collections.rankzero.inference.plugins.module_utils.replica_directories import ReplicaDirectories

UNIT_DIRECTORY = "/etc/systemd/system"
NO_REPLICA = ("engines.d", "facts.d")
_UNIT_PREFIX, _UNIT_SUFFIX = "inference-", ".service"


def read(replica_root: str, proc_root: str = "/proc", unit_directory: str = UNIT_DIRECTORY, table: processes.ProcessTable | None = None) -> dict[str, Any]:
    """`{replicas: {name: {unit: path|null, pids: [], paths: []}}, made_users: []}`: everything on this host that a removal would take."""
    table = table or processes.ProcessTable(proc_root)
    found: dict[str, dict[str, Any]] = {}
    for name in _names(replica_root, unit_directory) | _marked_names(table):
        store = ReplicaDirectories(replica_root, name)
        entry = {"unit": unit_of(store, unit_directory), "pids": pids(store, table), "paths": store.present()}
        if any(entry.values()):
            found[name] = entry
    return {"replicas": found, "made_users": made_users(ReplicaDirectories(replica_root, "").config_root)}


def _names(replica_root: str, unit_directory: str) -> set[str]:
    """Replicas that have a directory or a service file. A name that is none of ours (`..`, a file) is not taken for one."""
    found: set[str] = set()
    one = ReplicaDirectories(replica_root, "x")
    for folder in {os.path.dirname(path) for path in (one.directory, one.state_dir, one.work_dir, one.log_dir)}:
        found.update(name for name in small_files.names(folder) if name not in NO_REPLICA and os.path.isdir(os.path.join(folder, name)))
    for folder in (unit_directory, os.path.dirname(wanted_link(unit_directory, "x"))):
        for name in small_files.names(folder):
            if name.startswith(_UNIT_PREFIX) and name.endswith(_UNIT_SUFFIX):
                found.add(name[len(_UNIT_PREFIX) : -len(_UNIT_SUFFIX)])
    return {name for name in found if is_name(name)}


def _marked_names(table: processes.ProcessTable) -> set[str]:
    shards = (table.shard_of(pid) for pid in table.programs())
    return {shard.replica for shard in shards if shard is not None and is_name(shard.replica)}


def is_name(text: str) -> bool:
    """What a replica may be called: 1 to 40 lower-case letters, digits and `-`. Anything else must never become a part of a path that is removed."""
    allowed = set("abcdefghijklmnopqrstuvwxyz0123456789-")
    return 0 < len(text) <= 40 and not set(text) - allowed and not text.startswith("-") and not text.endswith("-")


# ---- the service


def wanted_link(unit_directory: str, replica: str) -> str:
    """The link by which systemd starts the unit at boot."""
    return os.path.join(unit_directory, "multi-user.target.wants", "inference-%s.service" % replica)


def unit_of(store: ReplicaDirectories, unit_directory: str = UNIT_DIRECTORY) -> str | None:
    """The unit file of the replica, if it is of this root; or the link to one that is gone (of / alone: a link does not tell its root)."""
    path = os.path.join(unit_directory, "inference-%s.service" % store.replica)
    content, _problem = small_files.read_bytes(path)
    if content is not None:
        return path if (store.directory + "/").encode() in content else None
    link = wanted_link(unit_directory, store.replica)
    return link if is_system(store) and os.path.islink(link) and not os.path.exists(link) else None


def is_system(store: ReplicaDirectories) -> bool:
    """Whether the root is / itself."""
    return store.config_root == "/etc/rankzero"


# ---- processes


def pids(store: ReplicaDirectories, table: processes.ProcessTable | None = None) -> list[int]:
    """The replica's processes: those with its marker or in its unit, its run_shard.py, and its supervisord. Never this one or those above it."""
    table = table or processes.ProcessTable()
    own = set(table.line_of(os.getpid())) | {os.getpid()}
    return [pid for pid in table.programs() if pid not in own and _is_ours(store, table, pid)]


def _is_ours(store: ReplicaDirectories, table: processes.ProcessTable, pid: int) -> bool:
    shard = table.shard_of(pid)
    if shard is not None:
        return shard.replica == store.replica and _is_here(store, table, pid)
    words = _words(table, pid)
    return _runs_shard(store, words) or _is_supervisord(store, words)


def _is_here(store: ReplicaDirectories, table: processes.ProcessTable, pid: int) -> bool:
    """The run_shard.py above a process tells its root by its path; of an orphan its HOME does. A program that wiped its environment tells nothing,
    and counts as this root's only where the root is /."""
    for above in table.line_of(pid):
        script = next((word for word in _words(table, above) if os.path.basename(word) == b"run_shard.py"), None)
        if script is not None:
            return script.startswith(store.directory.encode() + b"/")
    environment, _problem = small_files.read_bytes(os.path.join(table.proc_root, str(pid), "environ"), 4 * 1024 * 1024)
    home = next((item[len(b"HOME=") :] for item in (environment or b"").split(b"\0") if item.startswith(b"HOME=")), None)
    return home == store.work_dir.encode() if home else is_system(store)


def _runs_shard(store: ReplicaDirectories, words: list[bytes]) -> bool:
    """An interpreter that runs our run_shard.py; not an editor that has it open, and not one that only shows or checks."""
    place = next((index for index, word in enumerate(words) if index and not word.startswith(b"-")), 0)
    if not place or not os.path.basename(words[0]).startswith(b"python"):
        return False
    return words[place].startswith(store.directory.encode() + b"/") and words[place].endswith(b"/run_shard.py") and not {b"--show", b"--check"} & set(words)


def _is_supervisord(store: ReplicaDirectories, words: list[bytes]) -> bool:
    return (store.directory + "/supervisord.conf").encode() in words and any(os.path.basename(word) == b"supervisord" for word in words[:2])


def _words(table: processes.ProcessTable, pid: int) -> list[bytes]:
    content, _problem = small_files.read_bytes(os.path.join(table.proc_root, str(pid), "cmdline"), 1024 * 1024)
    return (content or b"").split(b"\0")


# ---- users


def users_file(config_root: str) -> str:
    return config_root + "/made_users.json"


def made_users(config_root: str) -> list[str]:
    """Users that this collection made on the host, as it wrote down."""
    try:
        names = json.loads((small_files.read_bytes(users_file(config_root))[0] or b"").decode("utf-8"))
    except (ValueError, RecursionError):
        return []
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
