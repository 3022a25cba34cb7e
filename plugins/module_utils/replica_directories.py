# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where the files of a replica are on a host. What writes them is in revisions.py, which readers of facts need not load."""

from __future__ import annotations

import os
import typing as t

SECRETS = "secrets"
PROVEN = "proven.json"
"""Beside a revision's files from the moment that the gate has passed on this host: C({at: epoch seconds}). Proven is a revision that all ranks have so."""


class ReplicaDirectories:
    """The four directories of a replica below a root."""

    def __init__(self, root: str, replica: str) -> None:
        base = root.rstrip("/")
        self.replica = replica
        self.config_root = base + "/etc/rankzero"
        self.directory = "%s/%s" % (self.config_root, replica)
        self.state_dir = "%s/run/rankzero/%s" % (base, replica)
        self.work_dir = "%s/var/lib/rankzero/%s" % (base, replica)
        self.log_dir = "%s/var/log/rankzero/%s" % (base, replica)

    def present(self) -> t.List[str]:
        """Those that are there."""
        return [path for path in (self.directory, self.state_dir, self.work_dir, self.log_dir) if os.path.lexists(path)]
