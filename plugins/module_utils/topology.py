# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How far a GPU is from an HCA, read from the PCI paths in sysfs, in the words of `nvidia-smi topo -m`.

PIX  at most one PCIe switch between them          PXB  several switches, below one root port
PHB  they meet in a PCIe host bridge               NODE another host bridge of the same NUMA node          SYS  farther

In a virtual machine the paths are the hypervisor's and may all look alike; on Grace systems GPU and HCA are in different PCI domains and
look far apart though the data path between them is short: there the NUMA node is what to go by.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from ansible_collections.rankzero.inference.plugins.module_utils import sysfs

Facts = dict[str, Any]


def gpu_hca(gpus: Iterable[Facts], hcas: Iterable[Facts], sysfs_root: str) -> dict[str, dict[str, str | None]]:
    """`{GPU uuid: {HCA name: PIX|PXB|PHB|NODE|SYS|null}}`; null where one of the two has no PCI path here."""
    nics = {str(hca["name"]): locate(hca.get("pci_bdf"), hca.get("numa_node"), sysfs_root) for hca in hcas}
    table: dict[str, dict[str, str | None]] = {}
    for gpu in gpus:
        if gpu.get("uuid"):
            place = locate(gpu.get("pci_bdf"), gpu.get("numa_node"), sysfs_root)
            table[str(gpu["uuid"])] = {name: distance(place[0], nic[0], place[1], nic[1]) for name, nic in nics.items()}
    return table


def locate(pci_bdf: str | None, numa_node: int | None, sysfs_root: str) -> tuple[str | None, int | None]:
    """The real path of a PCI function and its NUMA node; the node that is already known wins."""
    path = os.path.join(sysfs_root, "bus", "pci", "devices", pci_bdf.lower()) if pci_bdf else None
    real = sysfs.pci_directory(path) if path else None
    return real, numa_node if numa_node is not None else sysfs.numa_node(real)[0]


def distance(one: str | None, other: str | None, numa_one: int | None = None, numa_other: int | None = None) -> str | None:
    """Distance of two real sysfs paths such as `/sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0`.

    An unknown NUMA node equals nothing, not even another unknown one. None when a path is missing or is no PCI path.
    """
    bridge_one, chain_one = split_path(one)
    bridge_other, chain_other = split_path(other)
    if bridge_one is None or bridge_other is None:
        return None
    if bridge_one != bridge_other:
        known = numa_one is not None and numa_one >= 0
        return "NODE" if known and numa_one == numa_other else "SYS"
    common = common_length(chain_one, chain_other)
    if common == 0:
        return "PHB"
    # What remains of each way below the last common bridge: nothing when both hang at one bridge, one downstream port when they hang at
    # two ports of one switch, more when further switches lie between.
    return "PIX" if max(len(chain_one), len(chain_other)) - common <= 1 else "PXB"


def split_path(path: str | None) -> tuple[str | None, list[str]]:
    """The host bridge (`pci0000:15`, with all that is before it) and the bridges between it and the function, without the function."""
    parts = (path or "").split("/")
    functions = [index for index, part in enumerate(parts) if sysfs.PCI_BDF.match(part)]
    if not functions:
        return None, []
    first = functions[0]
    return "/".join(parts[:first]), [part.lower() for part in parts[first : functions[-1]]]


def common_length(one: list[str], other: list[str]) -> int:
    """How many leading entries two lists share."""
    shared = 0
    for left, right in zip(one, other):
        if left != right:
            break
        shared += 1
    return shared
