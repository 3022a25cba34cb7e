# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Make `ansible_collections.rankzero.inference` importable from a checkout at any path."""

from __future__ import annotations

import pathlib
import sys

import pytest
from hypothesis import settings

ROOT = pathlib.Path(__file__).resolve().parent.parent
UNDER_ANSIBLE_TEST = not (ROOT / ".collections").exists()  # run_ansible_test.py leaves it out
if UNDER_ANSIBLE_TEST:
    # It has a collection loader of its own, reads no pyproject.toml, and does not let tests import what lies beside them.
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/unit")]
elif str(ROOT / ".collections") not in sys.path:
    sys.path.insert(0, str(ROOT / ".collections"))

# The same examples in every run, so that a check that fails tells of the change at hand. `make explore` draws new ones.
settings.register_profile("same", derandomize=True, database=None)
settings.register_profile("explore", deadline=None)
settings.load_profile("same")


def pytest_configure(config: pytest.Config) -> None:
    if UNDER_ANSIBLE_TEST:
        config.addinivalue_line("markers", "slow: takes long for what it adds on top of its neighbours")


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """Tests of the programs that run beside an engine (roles/replica/files) import nothing of the collection; make test runs them."""
    if UNDER_ANSIBLE_TEST and collection_path.name.startswith("test_") and "ansible_collections" not in collection_path.read_text(encoding="utf-8"):
        return True
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """ansible-test cannot be told which marks to leave out: those that `make test` leaves out."""
    if UNDER_ANSIBLE_TEST:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("slow")])
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
