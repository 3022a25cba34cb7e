# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tests on real engines, which tests/cpu_engines.py installs; marked C(real), run by C(make real-test)."""

from __future__ import annotations

import pathlib
import sys

for _folder in (pathlib.Path(__file__).resolve().parent.parent,):
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))
