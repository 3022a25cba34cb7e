# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The host itself: operating system, memory, the user who asks, and which service manager can run a shard."""

from __future__ import annotations

import os
import platform
import pwd
import re
import shutil
import socket
import sys
from typing import Any

from ansible_collections.rankzero.inference.plugins.module_utils import limits, small_files

Facts = dict[str, Any]

OS_RELEASE = "/etc/os-release"
CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv", "/run/systemd/container")


def read(proc_root: str) -> Facts:
    """`host` of docs/architecture.md; memory in MiB, reasons for nulls in `errors`."""
    errors: dict[str, str] = {}
    memory = limits.meminfo(proc_root)
    supervisord = find_supervisord(sys.executable)
    manager, why_none = service_manager(os.path.isdir("/run/systemd/system"), first_process(proc_root), os.geteuid() == 0, supervisord)
    if why_none:
        errors["service_manager"] = why_none
    return {
        "hostname": socket.gethostname(),
        "boot_id": attribute(proc_root, "sys/kernel/random/boot_id", errors, "boot_id"),
        "kernel": attribute(proc_root, "sys/kernel/osrelease", errors, "kernel"),
        "arch": platform.machine(),
        "os": operating_system(small_files.read_bytes(OS_RELEASE)[0] or b""),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_mib": mib(memory, "MemTotal", errors, "memory_mib"),
        "memory_available_mib": mib(memory, "MemAvailable", errors, "memory_available_mib"),
        "user": user_name(os.geteuid()),
        "privileged": os.geteuid() == 0,
        "python": {"executable": sys.executable, "version": platform.python_version()},
        "service_manager": manager,
        "supervisord": supervisord,
        "container": in_container(proc_root),
        "errors": errors,
    }


def service_manager(booted_by_systemd: bool, first: str | None, privileged: bool, supervisord: str | None) -> tuple[str | None, str | None]:
    """systemd, supervisor or None with the reason. systemd counts only where it is process 1 and the user may install units (sd_booted(3))."""
    if booted_by_systemd and first == "systemd" and privileged:
        return "systemd", None
    if supervisord:
        return "supervisor", None
    if booted_by_systemd and first == "systemd":
        return None, "systemd runs this host, but only root can install a unit: become root, or install the package supervisor for this Python"
    return None, "process 1 is %s, not systemd, and there is no supervisord beside %s or on the PATH: install the package supervisor" % (
        first or "not visible",
        sys.executable,
    )


def first_process(proc_root: str) -> str | None:
    """The name of process 1; init systems that are systemd call themselves so."""
    return small_files.read_text(os.path.join(proc_root, "1", "comm"))[0]


def find_supervisord(executable: str) -> str | None:
    """The supervisord of the Python that runs this, else that of the PATH."""
    beside = os.path.join(os.path.dirname(executable), "supervisord") if executable else ""
    if beside and os.access(beside, os.X_OK):
        return beside
    return shutil.which("supervisord")


def operating_system(content: bytes) -> dict[str, str | None]:
    """`{id, version}` of os-release(5)."""
    values = dict(re.findall(r"""^(ID|VERSION_ID)=["']?([^"'\n]*)""", content.decode("utf-8", "replace"), re.MULTILINE))
    return {"id": small_files.clean(values.get("ID", "")) or None, "version": small_files.clean(values.get("VERSION_ID", "")) or None}


def in_container(proc_root: str) -> bool:
    """Whether this is a container: its manager leaves a file, or a word in the environment of process 1 (systemd: Container Interface)."""
    environment = small_files.read_bytes(os.path.join(proc_root, "1", "environ"))[0] or b""
    return any(os.path.exists(path) for path in CONTAINER_MARKS) or any(entry.startswith(b"container=") for entry in environment.split(b"\0"))


def user_name(uid: int) -> str:
    """The name of a user, or the number of one without a name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def attribute(proc_root: str, name: str, errors: dict[str, str], key: str) -> str | None:
    value, problem = small_files.read_text(os.path.join(proc_root, name))
    if not value:
        errors[key] = problem or "%s is empty" % os.path.join(proc_root, name)
    return value or None


def mib(memory: dict[str, int], name: str, errors: dict[str, str], key: str) -> int | None:
    if name not in memory:
        errors[key] = "meminfo does not tell %s" % name
        return None
    return memory[name] // 1024
