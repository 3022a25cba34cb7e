# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the host allows a shard: locked memory, open files, shared memory, ports, and what configuration files add behind its back."""

from __future__ import annotations

import os
import re
from typing import Any, Union

from ansible_collections.rankzero.inference.plugins.module_utils import small_files

Facts = dict[str, Any]
Limit = Union[int, str, None]

CAP_SYS_RESOURCE = 24
MIB = 1024 * 1024
# dma-buf export needs the open kernel modules and a kernel that can hand dma-buf memory to RDMA (since 5.12).
DMABUF_KERNEL = (5, 12)
SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)


def read(proc_root: str, sysfs_root: str, dev_root: str, replica_root: str, service_manager: str | None, nccl_conf: str = "/etc/nccl.conf") -> Facts:
    """`limits` of docs/architecture.md without `imex`; sizes in bytes or MiB as the names say, reasons for nulls in `errors`.

    `memlock_bytes` and `nofile` are what a service of this host can have, which is not what a login shell has: under systemd whatever the
    unit asks for as far as pid 1 may raise limits, under supervisor the hard limit that the reader inherits and would hand on.
    """
    errors: dict[str, str] = {}
    limits = service_limits(proc_root, service_manager, errors)
    limits["shm"] = shared_memory(os.path.join(dev_root, "shm"), errors)
    limits["ephemeral_ports"] = ephemeral_ports(proc_root, errors)
    limits["nccl_conf"] = nccl_configuration([nccl_conf] + service_home_files(replica_root))
    limits["kho_cma_suspect"] = kho_cma_suspect(meminfo(proc_root))
    if limits["kho_cma_suspect"] is None:
        errors["kho_cma_suspect"] = "%s does not hold CmaTotal and CmaFree" % os.path.join(proc_root, "meminfo")
    limits["gpudirect"] = gpudirect(proc_root, sysfs_root)
    if limits["gpudirect"]["dmabuf"] is None:
        errors["gpudirect.dmabuf"] = "the NVIDIA kernel module is not loaded, or the kernel version is not known"
    limits["errors"] = errors
    return limits


# ---- process limits


def service_limits(proc_root: str, service_manager: str | None, errors: dict[str, str]) -> Facts:
    """Memlock and nofile of the context that a shard would run in."""
    under_systemd = service_manager == "systemd"
    path = os.path.join(proc_root, "1" if under_systemd else "self", "limits")
    content, problem = small_files.read_bytes(path)
    table = parse_limits((content or b"").decode("utf-8", "replace"))
    found: Facts = {}
    for name, row in (("memlock_bytes", "Max locked memory"), ("nofile", "Max open files")):
        found[name] = table.get(row, (None, None))[1]
    if under_systemd and may_raise_limits(os.path.join(proc_root, "1", "status")):
        found["memlock_bytes"] = "unlimited"
        found["nofile"] = small_files.read_int(os.path.join(proc_root, "sys", "fs", "nr_open"))[0] or found["nofile"]
    errors.update({name: problem or "%s has no such row" % path for name, value in found.items() if value is None})
    return found


def parse_limits(text: str) -> dict[str, tuple[Limit, Limit]]:
    """`/proc/PID/limits` as `{row name: (soft, hard)}`; numbers in the row's own unit, or "unlimited"."""
    table = {}
    for line in text.splitlines():
        match = re.match(r"^(\S.*?)\s{2,}(unlimited|[0-9]{1,20})\s+(unlimited|[0-9]{1,20})(\s|$)", line)
        if match:
            table[match.group(1)] = (limit(match.group(2)), limit(match.group(3)))
    return table


def limit(word: str) -> Limit:
    return word if word == "unlimited" else int(word)


def may_raise_limits(status_path: str) -> bool:
    """Whether a process holds CAP_SYS_RESOURCE. Without it systemd silently gives a service with LimitMEMLOCK=infinity its own hard limit."""
    content = (small_files.read_bytes(status_path)[0] or b"").decode("utf-8", "replace")
    match = re.search(r"^CapEff:\s*([0-9a-fA-F]{1,16})\s*$", content, re.MULTILINE)
    return bool(match) and bool(int(match.group(1), 16) >> CAP_SYS_RESOURCE & 1) if match else False


# ---- memory and ports


def shared_memory(path: str, errors: dict[str, str]) -> Facts | None:
    """Size and free space of /dev/shm in MiB. Docker gives 64 MiB; NCCL wants about 1024 per rank (NCCL user guide, troubleshooting)."""
    try:
        status = os.statvfs(path)
    except (OSError, ValueError) as error:
        errors["shm"] = small_files.reason(path, error)
        return None
    return {"size_mib": status.f_blocks * status.f_frsize // MIB, "free_mib": status.f_bavail * status.f_frsize // MIB}


def ephemeral_ports(proc_root: str, errors: dict[str, str]) -> list[int] | None:
    """First and last port that the kernel hands to outgoing connections: a fixed port inside this range may be taken at any moment."""
    path = os.path.join(proc_root, "sys", "net", "ipv4", "ip_local_port_range")
    text, problem = small_files.read_text(path)
    match = re.match(r"^([0-9]{1,5})\s+([0-9]{1,5})$", text or "")
    if not match:
        errors["ephemeral_ports"] = problem or "%s holds %r, not two ports" % (path, (text or "")[:40])
        return None
    return [int(match.group(1)), int(match.group(2))]


def meminfo(proc_root: str) -> dict[str, int]:
    """`/proc/meminfo` in KiB by name; empty when it cannot be read."""
    content = small_files.read_bytes(os.path.join(proc_root, "meminfo"))[0] or b""
    return {name: int(value) for name, value in re.findall(r"^([A-Za-z0-9_()]+):\s+([0-9]{1,18}) ?(?:kB)?$", content.decode("utf-8", "replace"), re.MULTILINE)}


def kho_cma_suspect(memory: dict[str, int]) -> bool | None:
    """Whether the kernel has the fault that makes memory registration fail with ENOMEM though memlock is unlimited.

    Pages of kexec handover were released as CMA: more CMA is free than exists (NVIDIA/NV-Kernels#591). The cure is the kernel parameter
    kho=off. A kernel without CMA has neither row and not the fault; None when meminfo could not be read.
    """
    if not memory:
        return None
    return memory.get("CmaFree", 0) > memory.get("CmaTotal", 0)


# ---- nccl.conf


def nccl_configuration(paths: list[str]) -> dict[str, dict[str, str]]:
    """`{path: {VARIABLE: value}}` of those files that exist; values of names that look secret and are not NCCL's own are hidden."""
    found = {}
    for path in paths:
        content = small_files.read_bytes(path)[0]
        if content is not None:
            values = parse_nccl_conf(content.decode("utf-8", "replace"))
            found[path] = {name: "(hidden)" if SECRET_NAME.search(name) and not name.startswith("NCCL_") else value for name, value in values.items()}
    return found


def parse_nccl_conf(text: str) -> dict[str, str]:
    """As NCCL reads it (src/misc/param.cc): `NAME=VALUE` cut at the first `=`, nothing trimmed, no quotes; the first setting of a name wins.

    The files can set any variable, not only NCCL's: they are read into the environment of the process, without overwriting.
    """
    found: dict[str, str] = {}
    for line in text.split("\n"):
        line = line[:-1] if line.endswith("\r") else line
        name, equals, value = line.partition("=")
        if equals and name and not line.startswith("#"):
            found.setdefault(small_files.clean(name) if not name.isprintable() else name, value if value.isprintable() else small_files.clean(value))
    return found


def service_home_files(replica_root: str) -> list[str]:
    """`.nccl.conf` in the home of a shard, which is its working directory: NCCL takes HOME from the environment, not from the user database."""
    homes = os.path.join(replica_root, "var", "lib", "rankzero")
    found = [os.path.join(homes, name, ".nccl.conf") for name in small_files.names(homes) if not name.startswith(".")]
    return [path for path in found if os.path.lexists(path)]


# ---- GPUDirect RDMA


def gpudirect(proc_root: str, sysfs_root: str) -> Facts:
    """Whether an HCA can reach GPU memory: by the module nvidia_peermem (or its older form), or by dma-buf (NCCL src/transport/net_ib/gdr.cc).

    `dmabuf` is null without a loaded NVIDIA module. It needs the open kernel modules.
    """
    older = os.path.join(sysfs_root, "kernel", "mm", "memory_peers")
    peers = [name for name in small_files.names(older) if name.startswith("nv") and os.path.lexists(os.path.join(older, name, "version"))]
    peermem = bool(peers) or os.path.exists(os.path.join(sysfs_root, "module", "nvidia_peermem", "version"))
    driver = small_files.read_text(os.path.join(proc_root, "driver", "nvidia", "version"))[0]
    kernel = re.match(r"^([0-9]{1,4})\.([0-9]{1,4})", small_files.read_text(os.path.join(proc_root, "sys", "kernel", "osrelease"))[0] or "")
    dmabuf = None
    if driver and kernel:
        dmabuf = "Open Kernel Module" in driver and (int(kernel.group(1)), int(kernel.group(2))) >= DMABUF_KERNEL
    return {"peermem": peermem, "dmabuf": dmabuf}
