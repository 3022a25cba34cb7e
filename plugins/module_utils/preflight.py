# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Start the preflight program of one rank, collect what it found, and leave nothing of it behind.

Its processes carry RANKZERO_PREFLIGHT=<replica>/<rank>/<directory>, a marker of their own: neither a removal nor a start takes them for the shard's.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from ansible_collections.rankzero.inference.plugins.module_utils import engine_probe, log_signatures, processes, small_files
from ansible_collections.rankzero.inference.plugins.module_utils.revisions import write_file

RunCommand = Callable[..., "tuple[int, str, str]"]
MARKER = "RANKZERO_PREFLIGHT"
PERIOD_SECONDS = 0.2
GRACE_SECONDS = 15.0
LOG_LINES = 40


class PreflightError(Exception):
    """The program could not be started."""


def directory(root: str, replica: str) -> str:
    return "%s/run/rankzero-preflight/%s" % (root.rstrip("/"), replica)


def start(root: str, replica: str, request: Mapping[str, Any], program: str, run_command: RunCommand) -> dict[str, Any]:
    """Sweep what an earlier preflight left, write the request, and start: `{python, collective}`. The program detaches, so this returns at once."""
    sweep(root, replica)
    place = directory(root, replica)
    os.makedirs(place, mode=0o700)
    python = interpreter(str(request.get("path") or "")) if request.get("backend") else None
    environment = {**request["env"], MARKER: "%s/%d/%s" % (replica, request["rank"], place)}
    content = {**request, "env": environment, "python": python or sys.executable, "backend": request.get("backend") if python else None}
    write_file(place + "/request.json", json.dumps(content), 0o600)
    write_file(place + "/preflight.py", program, 0o600)
    code, out, errors = run_command([sys.executable, "-I", place + "/preflight.py", "start", place], cwd=place)
    if code != 0:
        raise PreflightError("preflight.py ended with %d: %s" % (code, log_signatures.clean(errors or out)))
    return {"python": content["python"], "collective": content["backend"]}


def interpreter(path: str) -> str | None:
    """The Python that runs a program: itself, or what its first line names. None for a program that is no Python's."""
    if os.path.basename(path).startswith("python"):
        return path if os.access(path, os.X_OK) else None
    named = engine_probe.python_of(path)
    return named if named and os.access(named, os.X_OK) else None


def collect(root: str, replica: str, seconds: float) -> dict[str, Any]:
    """`{found, result, log}`: what the program wrote within the time. Afterwards none of its processes and files are left."""
    place = directory(root, replica)
    deadline = time.monotonic() + seconds + GRACE_SECONDS
    found = os.path.isdir(place)
    result = None
    while found and result is None and time.monotonic() < deadline:
        result = small_files.read_json(place + "/result.json", 16 * 1024 * 1024)[0]
        if result is None:
            if not marked(replica, place) and not os.path.exists(place + "/result.json"):
                break  # it ended without a word: its log tells
            time.sleep(PERIOD_SECONDS)
    text, _problem = small_files.read_bytes(place + "/log", 1024 * 1024)
    log = log_signatures.clean_lines((text or b"").decode("utf-8", "replace"))[-LOG_LINES:]
    sweep(root, replica)
    return {"found": found, "result": result, "log": log}


def sweep(root: str, replica: str) -> bool:
    """End what carries the marker and remove the directory; whether there was anything."""
    place = directory(root, replica)
    left = marked(replica, place)
    deadline = time.monotonic() + 10
    while marked(replica, place) and time.monotonic() < deadline:
        for pid in marked(replica, place):
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        time.sleep(0.05)
    there = os.path.lexists(place)
    shutil.rmtree(place, ignore_errors=True)
    parent = os.path.dirname(place)
    if os.path.isdir(parent) and not os.listdir(parent):
        os.rmdir(parent)
    return bool(left or there)


def marked(replica: str, place: str) -> list[int]:
    """Processes of this replica's preflight below this root."""
    found = []
    table = processes.ProcessTable()
    for pid in table.pids():
        content, _problem = small_files.read_bytes("/proc/%d/environ" % pid, 4 * 1024 * 1024)
        value = next((entry for entry in (content or b"").split(b"\0") if entry.startswith(MARKER.encode() + b"=")), b"")
        text = value.decode("utf-8", "replace").partition("=")[2]
        if text.startswith(replica + "/") and text.endswith("/" + place) and pid != os.getpid() and table.stat(pid) is not None:
            found.append(pid)
    return found
