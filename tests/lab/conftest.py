# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab as a fixture. Other folders take it with `from lab.conftest import lab` in their conftest.py."""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Iterator

import pytest

TESTS = str(pathlib.Path(__file__).resolve().parent.parent)
if TESTS not in sys.path:
    sys.path.insert(0, TESTS)

from lab.lab_hosts import Lab


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "lab: needs root and real hosts made by tests/lab/lab.sh")


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """A lab of this session's own, not up yet; it goes with the session, also when that is killed. eth1 of each host is a second network."""
    one = Lab(f"t{os.getpid()}", settings={"LAB_FABRIC": "10.78.0"}, owner=os.getpid())
    reason = one.why_not()
    if reason:
        pytest.skip(reason)
    try:
        yield one
    finally:
        one.down()
