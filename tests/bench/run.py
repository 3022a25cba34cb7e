# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""`make bench`: every figure of docs/performance.md beside its goal. Nothing here is a test: a busy machine misses goals that a quiet one meets.

.venv/bin/python tests/bench/run.py [--hosts 200] [--only plan,many,real]
"""

from __future__ import annotations

import argparse

import figures
import many_hosts
import on_hosts
import plan_scale


def main() -> None:
    parser = argparse.ArgumentParser(description="Every figure of docs/performance.md beside its goal.")
    parser.add_argument("--hosts", type=int, default=200, help="local hosts of the converged run")
    parser.add_argument("--forks", type=int, default=10)
    parser.add_argument("--only", default="plan,many,real", help="plan (the rules alone), many (local hosts), real (two hosts of the lab, root)")
    options = parser.parse_args()
    wanted = options.only.split(",")
    if "plan" in wanted:
        figures.show("The plan", plan_scale.measure())
    if "many" in wanted:
        figures.show("Many local hosts", many_hosts.measure(options.hosts, options.forks, turns=2))
    if "real" in wanted:
        figures.show("Two real hosts", on_hosts.measure())


if __name__ == "__main__":
    main()
