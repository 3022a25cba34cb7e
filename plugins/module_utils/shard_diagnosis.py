# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Everything that one host can tell about one shard, at whatever stage it is: one look, nothing written, no secret returned."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from ansible_collections.rankzero.inference.plugins.module_utils import (
    log_signatures,
    masking,
    observation,
    processes,
    shard_log,
    small_files,
    teardown,
    traces,
)
from ansible_collections.rankzero.inference.plugins.module_utils.revisions import Revisions

RunCommand = Callable[..., "tuple[int, str, str]"]
LOG_LINES = 1000
KERNEL_LINES = 20
KERNEL_SECONDS = 3600.0
"""Lines of the kernel older than this before the start of the shard have nothing to do with it."""

_KERNEL = re.compile(
    r"NVRM: Xid|fallen off the bus|Out of memory: Killed process|Memory cgroup out of memory|oom-kill|nvidia-nvswitch.*error|mlx5_core.*(?:error|link down)",
    re.IGNORECASE,
)
_STAMP = re.compile(r"^(?:<\d+>)?\[ *(\d+\.\d+)\] ?")


def read(replica: str, root: str, proc_root: str, run_command: RunCommand, lines: int = LOG_LINES, key: str | None = None) -> dict[str, Any]:
    """`key`: the API key, which only rank 0 has among its secrets. Shapes: see the module shard_diagnosis.

    Whatever is missing or damaged is null, with a reason in `problems`.
    """
    store = Revisions(root, replica)
    observer = observation.Observer(replica, root, proc_root, run_command)
    seen, verdict, problem = look(observer)
    launch, state = seen["launch"], seen["state"] or small_files.read_json(store.state_dir + "/state.json")[0]
    secrets = [*masking.of_replica(store.directory), *masking.all_spellings([*masking.given_by_name(launch), *([key] if key else [])])]
    log = shard_log.read(observer.places, run_command, lines, secrets)
    kernel, kernel_problem = kernel_lines(run_command, proc_root, (state or {}).get("started_at"))
    pids = traces.pids(store, processes.ProcessTable(proc_root))
    left = {"unit": traces.unit_of(store), "pids": pids, "paths": store.present()}
    answer = {
        "present": any(left.values()),
        "traces": left,
        "launch": launch,
        "state": state,
        "service": seen["service"],
        "verdict": verdict,
        "telling": log_signatures.telling(recent(log, state)),
        "log": log,
        "log_command": shard_log.command(observer.places),
        "driver": seen["driver"],
        "gpus": seen["gpus"],
        "ports": ports(store, pids, proc_root),
        "kernel": kernel,
        "problems": {
            name: text
            for name, text in (("launch.json", seen["launch_problem"] if left["paths"] else None), ("look", problem), ("kernel", kernel_problem))
            if text
        },
    }
    masked: dict[str, Any] = masking.masked(answer, secrets)
    return masked


def look(observer: observation.Observer) -> tuple[dict[str, Any], dict[str, Any] | None, str | None]:
    """What the gate would see and say now. Records that are so damaged that it cannot judge are a sentence here, since that is what is looked for."""
    try:
        return (*observation.watch(observer, observation.Watch(hold_seconds=0)), None)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        launch, problem = small_files.read_json(observer.places.revision + "/launch.json")
        empty = {"launch": launch, "launch_problem": problem, "state": None, "service": None, "driver": None, "gpus": None}
        return empty, None, "the records of the shard are damaged: %s: %s" % (type(error).__name__, error)


def recent(log: list[str], state: Mapping[str, Any] | None) -> list[str]:
    """The lines of the present run and of those that ended before it: what an earlier deployment wrote is no cause of this one's trouble."""
    ended = [count for count in ((state or {}).get("failures"), (state or {}).get("restarts")) if isinstance(count, int)]
    runs = 1 + min(2, max([*ended, 1 if (state or {}).get("last_end") else 0]))
    return shard_log.last_runs(log, runs)


def ports(store: Revisions, own: list[int], proc_root: str) -> list[dict[str, Any]]:
    """Who has each port that the shard listens on: `[{address, port, listening, pid, process, ours}]`."""
    rows, found = processes.listening_sockets(proc_root), []
    for address, port in teardown.endpoints_of(teardown.launch_of(store)):
        row = next((row for row in rows if teardown.covers(row, (address, port))), None)
        pid = row["pid"] if row else None
        found.append(
            {
                "address": address,
                "port": port,
                "listening": bool(row and row["listening"]),
                "pid": pid,
                "process": processes.describe(pid, proc_root)["name"] if pid else None,
                "ours": pid in own if pid else None,
            }
        )
    return found


def kernel_lines(run_command: RunCommand, proc_root: str, started_at: Any) -> tuple[list[str] | None, str | None]:
    """Lines of the kernel's log about GPUs, HCAs and killed processes around the life of the shard; or None and why it cannot be read."""
    try:
        code, text, errors = run_command(["dmesg"], environ_update={"LC_ALL": "C"}, handle_exceptions=False)
    except (OSError, ValueError) as error:
        return None, "dmesg cannot be run: %s" % error
    if code != 0:
        return None, "dmesg ended with %d: %s" % (code, log_signatures.clean(errors) or "no reason given")
    boot, since = boot_time(proc_root), (started_at if isinstance(started_at, (int, float)) else time.time() - 23 * 3600) - KERNEL_SECONDS
    found = []
    for line in text.splitlines():
        stamp = _STAMP.match(line)
        if _KERNEL.search(line) and not (stamp and boot and boot + float(stamp.group(1)) < since):
            at = time.strftime("%Y-%m-%dT%H:%M:%SZ ", time.gmtime(boot + float(stamp.group(1)))) if stamp and boot else ""
            found.append(at + log_signatures.clean(line[stamp.end() :] if stamp else line))
    return found[-KERNEL_LINES:], None


def boot_time(proc_root: str) -> int | None:
    content, _problem = small_files.read_bytes(os.path.join(proc_root, "stat"), 4 * 1024 * 1024)
    match = re.search(rb"^btime (\d+)", content or b"", re.MULTILINE)
    return int(match.group(1)) if match else None
