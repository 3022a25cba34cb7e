# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Prove that a removed shard is gone: its memory on GPUs, its ports, its processes, its files.

A process that has ended may hold its GPU memory for seconds (the driver frees it page by page) and its port while the kernel still talks to
peers. So a removal looks before it begins, and afterwards again and again until all is gone or its time is over. What it cannot ask
(no driver) is `null` with a reason, never taken for gone.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ansible_collections.rankzero.inference.plugins.module_utils import nvidia, ports, processes, traces
from ansible_collections.rankzero.inference.plugins.module_utils.revisions import Revisions

GONE_SECONDS = 60.0
PERIOD_SECONDS = 0.5
NO_DRIVER = ("no_gpu", "library_missing")


class Before(NamedTuple):
    """What the shard had. `processes`: pid -> start time in ticks; `endpoints`: (address, port); `held`: those of them that it held itself."""

    processes: Mapping[int, int]
    endpoints: Sequence[tuple[str, int]]
    held: frozenset[tuple[str, int]]


class Finding(NamedTuple):
    """Whether something is gone: true, false, or null when that cannot be asked; `text` names what is left, or says why it cannot be asked."""

    gone: bool | None
    text: str = ""


def look(store: Revisions, proc_root: str = "/proc") -> Before:
    """What to watch while the shard is removed. Damaged or missing records make it less, never an error."""
    table = processes.ProcessTable(proc_root)
    found = {pid: getattr(table.stat(pid), "started", 0) for pid in traces.pids(store, table)}
    endpoints = endpoints_of(launch_of(store))
    rows = processes.listening_sockets(proc_root) if endpoints else []
    held = frozenset(end for end in endpoints if any(row["pid"] in found for row in rows if covers(row, end)))
    return Before(found, endpoints, held)


def launch_of(store: Revisions) -> Mapping[str, Any]:
    """launch.json of the current revision, or of the newest that has one; {} where there is none that can be read."""
    for fingerprint in [store.linked("current"), *reversed(store.known())]:
        text = store.read(fingerprint, "launch.json")
        try:
            launch = json.loads(text) if text else None
        except (ValueError, RecursionError):
            continue
        if isinstance(launch, dict):
            return launch
    return {}


def endpoints_of(launch: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Every (address, port) that the rank listens on in any run, the tie's with them."""
    found = []
    for entry in launch.get("listen_ports") or []:
        if isinstance(entry, dict):
            found += [(entry.get("address"), port) for port in [entry.get("port"), *(entry.get("ports") or [])]]
    tie = launch.get("tie")
    if isinstance(tie, dict) and launch.get("rank") == 0:
        found.append((tie.get("address"), tie.get("port")))
    valid = [(str(address), port) for address, port in found if isinstance(port, int) and 0 < port < 65536]
    return sorted(set(valid))


# ---- afterwards


def wait(store: Revisions, before: Before, unit: Callable[[], str | None], seconds: float = GONE_SECONDS, proc_root: str = "/proc") -> dict[str, Finding]:
    """`{gpu_memory, ports, processes, files}` as soon as nothing is left, or what is left when the time is over. `unit`: a service file that is still there."""
    deadline = time.monotonic() + seconds
    findings: dict[str, Finding] = {}
    questions: dict[str, Callable[[], Finding]] = {
        "processes": lambda: _processes(store),
        "ports": lambda: _ports(before, proc_root),
        "gpu_memory": lambda: _memory(before, proc_root),
        "files": lambda: _files(store, unit()),
    }
    while True:
        findings.update({name: ask() for name, ask in questions.items() if name not in findings or findings[name].gone is False})
        if all(finding.gone is not False for finding in findings.values()) or time.monotonic() >= deadline:
            return findings
        time.sleep(PERIOD_SECONDS)


def _processes(store: Revisions) -> Finding:
    left = [processes.describe(pid) for pid in traces.pids(store)]
    return Finding(not left, ", ".join("process %d (%s) carries the marker of replica %s" % (seen["pid"], seen["name"], store.replica) for seen in left))


def _files(store: Revisions, unit: str | None) -> Finding:
    left = [*store.present(), *([unit] if unit else [])]
    return Finding(not left, ", ".join("%s is still there" % path for path in left))


def _memory(before: Before, proc_root: str) -> Finding:
    """By the driver's own list of processes. Memory of anybody else is none of ours to judge."""
    if not before.processes and not os.path.exists(os.path.join(proc_root, "driver/nvidia")):
        return Finding(None, "nothing of the shard ran here and no driver is loaded")
    answer = nvidia.read_processes(proc_root)
    if answer["state"] not in ("ok", "gpus_missing"):
        return Finding(None, "no NVIDIA driver is here" if answer["state"] in NO_DRIVER else "the driver cannot be asked: %s" % answer["message"])
    table = processes.ProcessTable(proc_root)
    left, unknown = [], []
    for gpu in answer["gpus"]:
        if gpu["processes"] is None:
            unknown.append("GPU %s" % gpu["index"])
        left += [
            "pid %d still holds %s on GPU %s (%s)"
            % (row["pid"], "memory" if row["used_mib"] is None else "%d MiB" % row["used_mib"], gpu["index"], gpu["uuid"])
            for row in gpu["processes"] or []
            if _was_ours(before, table, row["pid"])
        ]
    if unknown and not left:
        return Finding(None, "the driver does not list the processes of %s" % ", ".join(unknown))
    return Finding(not left, ", ".join(left))


def _was_ours(before: Before, table: processes.ProcessTable, pid: int) -> bool:
    """A pid of the shard's, unless the number belongs to a later process by now."""
    if pid not in before.processes:
        return False
    now = table.stat(pid)
    return now is None or now.started == before.processes[pid]


def _ports(before: Before, proc_root: str) -> Finding:
    """Every port can be bound, but for those that somebody else has: a stranger's port is no part of this shard, and is only told."""
    taken = [end for end in before.endpoints if is_taken(end, proc_root)]
    if not taken:
        return Finding(True)
    rows = processes.listening_sockets(proc_root)
    left: list[str] = []
    foreign: list[str] = []
    for end in taken:
        row = next((row for row in rows if covers(row, end)), None)
        text = "port %d at %s is held by %s" % (end[1], end[0], _holder(row))
        stranger = row is not None and row["pid"] is not None and row["pid"] not in before.processes and end not in before.held
        (foreign if stranger else left).append(text)
    return Finding(False, ", ".join(left)) if left else Finding(True, "%s, which is not of this replica" % ", ".join(foreign))


def _holder(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "a connection that the kernel has not ended yet, or a process that cannot be seen"
    if row["pid"] is None:
        return "a process that cannot be seen"
    return "pid %d (%s)" % (row["pid"], processes.describe(row["pid"])["name"])


def is_taken(endpoint: tuple[str, int], proc_root: str = "/proc") -> bool:
    """Whether the port cannot be bound at its own address without SO_REUSEADDR. Remnants in TIME_WAIT, which no process holds, do not count.

    An address that the host does not have any more holds nothing.
    """
    address, port = endpoint
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    except ValueError:
        return False
    net = os.path.join(proc_root, "net")
    if ports.try_bind(family, address, port, False) != errno.EADDRINUSE:
        return False
    return not (ports.in_time_wait(port, net) and ports.try_bind(family, address, port, True) == 0)


def covers(row: Mapping[str, Any], endpoint: tuple[str, int]) -> bool:
    """Whether a socket keeps others from the endpoint: the same port at the same or at every address."""
    wildcard = ("0.0.0.0", "::")
    return row["port"] == endpoint[1] and (row["address"] == endpoint[0] or row["address"] in wildcard or endpoint[0] in wildcard)
