# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Make `ansible_collections.rankzero.inference` importable from a checkout at any path."""

from __future__ import annotations

import pathlib
import sys

from hypothesis import settings

ROOT = pathlib.Path(__file__).resolve().parent.parent
COLLECTIONS = ROOT / ".collections"
if str(COLLECTIONS) not in sys.path:
    sys.path.insert(0, str(COLLECTIONS))

# The same examples in every run, so that a check that fails tells of the change at hand. `make explore` draws new ones.
settings.register_profile("same", derandomize=True, database=None)
settings.register_profile("explore", deadline=None)
settings.load_profile("same")
