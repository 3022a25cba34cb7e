# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where the files of one shard are on its host (docs/architecture.md)."""

from __future__ import annotations

import os
from typing import NamedTuple

SYSTEMD_UNITS = "/etc/systemd/system"


class Places(NamedTuple):
    root: str
    replica: str
    config: str
    revision: str
    state_dir: str
    log: str
    unit: str
    unit_file: str


def places(replica: str, root: str) -> Places:
    config = os.path.join(root, "etc/rankzero", replica)
    return Places(
        root=root,
        replica=replica,
        config=config,
        revision=os.path.join(config, "current"),
        state_dir=os.path.join(root, "run/rankzero", replica),
        log=os.path.join(root, "var/log/rankzero", replica, "shard.log"),
        unit=f"inference-{replica}.service",
        unit_file=os.path.join(SYSTEMD_UNITS, f"inference-{replica}.service"),
    )
