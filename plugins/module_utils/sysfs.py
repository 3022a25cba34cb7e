# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where a device is attached: the PCI function, the NUMA node and the driver behind a `device` link in sysfs."""

from __future__ import annotations

import os
import re

from ansible_collections.rankzero.inference.plugins.module_utils import small_files

PCI_BDF = re.compile(r"^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$", re.IGNORECASE)


def link_name(path: str) -> str | None:
    """Last component of what a symbolic link points to (`device/driver` gives `mlx5_core`), None when it is none."""
    try:
        return small_files.clean(os.path.basename(os.readlink(path))) or None
    except (OSError, ValueError):
        return None


def pci_directory(path: str) -> str | None:
    """The real directory of the PCI function behind a `device` link; sub-functions and auxiliary devices lie below it.

    None for devices without PCI (Soft-RoCE, virtual interfaces) and for links that lead nowhere.
    """
    real = os.path.realpath(path)
    if not os.path.isdir(real):
        return None
    while real not in ("", os.path.sep):
        if PCI_BDF.match(os.path.basename(real)):
            return real
        real = os.path.dirname(real)
    return None


def numa_node(pci_path: str | None) -> tuple[int | None, str | None]:
    """NUMA node of a PCI function. The kernel's -1 means that the firmware does not tell: unknown, and not equal to another -1."""
    if pci_path is None:
        return None, "no PCI function is behind it"
    node, problem = small_files.read_int(os.path.join(pci_path, "numa_node"))
    if node is not None and node < 0:
        return None, "the firmware does not tell a NUMA node (numa_node is %d)" % node
    return node, problem
