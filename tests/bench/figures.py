# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the benches measure, and how it is told. Figures are counts, ratios within one run, and differences of two times in one run."""

from __future__ import annotations

import os
import pathlib
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
BIN = pathlib.Path(sys.executable).parent
for _folder in (ROOT / "tests", ROOT / ".collections", ROOT / "tests/bench"):
    sys.path.insert(0, str(_folder))

from ansible_collections.rankzero.inference.plugins.plugin_utils.tables import table


class Figure(NamedTuple):
    """One line of the table. `met` is None for a figure without a goal: it is there to compare with."""

    what: str
    measured: str
    goal: str = ""
    met: bool | None = None


class Cost(NamedTuple):
    """What a command cost: seconds by the clock, CPU seconds of the user's with all children, exit code, output."""

    wall: float
    user: float
    code: int
    output: str


def cost(command: Sequence[str], environment: dict[str, str] | None = None, **more: Any) -> Cost:
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run([*command], cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, **more)
    user = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before.ru_utime
    return Cost(time.monotonic() - began, user, done.returncode, done.stdout)


def at_most(what: str, value: float, goal: float, unit: str = "", digits: int = 2) -> Figure:
    return Figure(what, f"{value:.{digits}f}{unit}", f"at most {goal:g}{unit}", value <= goal)


def exactly(what: str, value: int, goal: int) -> Figure:
    return Figure(what, str(value), str(goal), value == goal)


def show(heading: str, figures: Sequence[Figure]) -> None:
    verdict = {None: "", True: "met", False: "MISSED"}
    print(f"\n{heading} (load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)\n")
    print(table(["figure", "measured", "goal", ""], [[one.what, one.measured, one.goal, verdict[one.met] or " "] for one in figures]), flush=True)
