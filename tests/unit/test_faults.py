# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Faults and reasons of many hosts: every one is told, and what is the same is told once."""

from __future__ import annotations

from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Fault, alike, names, report


def fault(host: str | None, seen: str = "no driver", rank: int | None = None) -> Fault:
    return Fault(host, rank, "drivers.nvidia", seen, "a loaded driver", "Install it.")


def test_hosts_are_named_up_to_eight_and_counted_after_that() -> None:
    assert names(["n10", "n9", "n1"]) == "n1, n9, n10"
    assert names(f"n{number}" for number in range(200)) == "n0, n1, n2, n3, n4, n5, n6, n7 and 192 more"


def test_hosts_with_the_same_text_share_a_line() -> None:
    assert alike({"n10": "not needed", "n2": "cordoned", "n1": "not needed"}) == ["n1, n10: not needed", "n2: cordoned"]


def test_the_same_fault_of_three_hosts_is_one_line_that_names_them() -> None:
    text = report([fault(f"n{number}", rank=number) for number in range(3)] + [fault("n3", "a broken driver")], "Faults")
    assert text.splitlines() == [
        "Faults (4):",
        "  1. 3 hosts (n0, n1, n2): drivers.nvidia: seen no driver, wanted a loaded driver. Install it.",
        "  2. n3: drivers.nvidia: seen a broken driver, wanted a loaded driver. Install it.",
    ]


def test_faults_of_two_hosts_and_of_no_host_keep_their_own_lines() -> None:
    assert len(report([fault(None), fault("n0", rank=0), fault("n1", rank=1)], "Faults").splitlines()) == 4
