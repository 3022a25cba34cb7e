# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a host's limits and kernel do to a shard. Whether it fails depends on the engine, so these are warnings; the words are those of its later failure."""

from __future__ import annotations

import typing as t

Facts = t.Mapping[str, t.Any]
MIB = 1 << 20
MEMLOCK = 1 << 30  # bytes; NCCL registers its buffers of every channel and peer
SHM_MIB = 1024  # for each rank (NCCL user guide, troubleshooting)


class Trouble(t.NamedTuple):
    """Field, what was seen, what is wanted, what to do."""

    field: str
    seen: str
    wanted: str
    hint: str

    def text(self) -> str:
        return "%s: %s" % (self.seen, self.hint)


def of_verbs(facts: Facts) -> t.Iterator[Trouble]:
    """What keeps memory from being registered with an HCA. Both end in ENOMEM of ibv_reg_mr, and have different cures (nccl-tests#206, NV-Kernels#591)."""
    limits = facts["limits"]
    memlock = limits["memlock_bytes"]
    if memlock is not None and memlock < MEMLOCK:
        yield Trouble(
            "limits.memlock_bytes",
            "a service can lock %d KiB of memory" % (memlock // 1024),
            "unlimited",
            "RDMA registration fails with 'Cannot allocate memory'. limits.conf is not read for services: systemd needs CAP_SYS_RESOURCE to raise "
            "the limit, a container's own is raised where it is started (--ulimit memlock=-1)",
        )
    if limits["kho_cma_suspect"]:
        yield Trouble(
            "limits.kho_cma_suspect",
            "CmaFree exceeds CmaTotal",
            "a kernel without this fault",
            "RDMA registration fails on this kernel whatever memlock says (NV-Kernels#591); boot with kho=off",
        )


def of_memory(facts: Facts) -> t.Iterator[Trouble]:
    """Shared memory that the GPUs of one host exchange through."""
    size = (facts["limits"]["shm"] or {}).get("size_mib")
    if size is not None and size < SHM_MIB:
        yield Trouble("limits.shm", "/dev/shm has %d MiB" % size, "%d MiB for each rank" % SHM_MIB, "NCCL wants 1 GiB for each rank (docker: --shm-size)")
