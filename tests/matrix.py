# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run the tests on every Python and ansible-core that can be had here, and say which could not.

    tests/matrix.py                     all cells
    tests/matrix.py 3.13:2.22 3.9       some
    tests/matrix.py --life 3.12:2.21    without the unit tests: enough to see that another ansible-core runs all of it, in few minutes
    tests/matrix.py --smoke 3.12:2.21   a replica's life and a refused plan, in a minute: for continuous integration

A cell PYTHON:CORE is a controller: unit tests, and a replica's whole life end to end. A cell PYTHON alone is a host: the same life with the modules and
the service under that Python, and the oldest controller's Ansible. Environments are kept in .venv-matrix/.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
ENVIRONMENTS = ROOT / ".venv-matrix"
CORES = {"2.19": "ansible-core>=2.19,<2.20", "2.21": "ansible-core>=2.21,<2.22", "2.22": "ansible-core>=2.22.0rc1,<2.23"}
CONTROLLERS = ["3.11:2.19", "3.12:2.19", "3.13:2.19", "3.12:2.21", "3.13:2.21", "3.14:2.21", "3.13:2.22", "3.14:2.22"]
HOSTS = ["3.9", "3.10", "3.12", "3.13", "3.14"]
UNITS = ["tests/unit", "-m", "not slow and not lab"]
LIFE = ["tests/e2e/test_simulated_replica.py", "tests/e2e/test_recorded_facts.py", "tests/e2e/test_awx_runner.py", "-m", "not slow and not lab"]
SMOKE = ["tests/e2e/test_simulated_replica.py", "-k", "test_life_of_a_replica or test_every_fault_at_once_and_nothing_changed"]


class Skipped(Exception):
    """Why a cell cannot be run here."""


def interpreter(version: str) -> str:
    """A Python of this version on PATH or under pyenv that really starts."""
    under_pyenv = sorted(pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv")).glob(f"versions/{version}.*/bin/python"))
    for candidate in [*map(str, reversed(under_pyenv)), shutil.which(f"python{version}") or ""]:
        asked = [candidate, "-c", "import sys, venv, ssl; print('%d.%d' % sys.version_info[:2])"]
        if candidate and subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() == version:
            return candidate
    raise Skipped(f"no Python {version}")


def environment(name: str, version: str, *requirements: str) -> str:
    """The Python of an environment with these requirements, made if it is not there."""
    folder = ENVIRONMENTS / name
    python = str(folder / "bin/python")
    if not (folder / "ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([interpreter(version), "-m", "venv", str(folder)], check=True)
        done = subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements], capture_output=True, text=True, check=False
        )
        if done.returncode:
            told = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            raise Skipped(f"cannot be installed: {told[-1] if told else done.stderr[-300:]}")
        (folder / "ready").touch()
    return python


def run_cell(cell: str, parts: list[list[str]]) -> None:
    version, _colon, core = cell.partition(":")
    if core:
        python = environment(cell.replace(":", "-"), version, CORES[core], "-r", "requirements/demo.txt", "-r", "requirements/test.txt")
        for part in parts:
            pytest(python, part)
        return
    host = environment(f"host-{version}", version, "nvidia-ml-py>=12.535", "supervisor>=4.2.5", "setuptools<81")
    controller = environment("3.11-2.19", "3.11", CORES["2.19"], "-r", "requirements/demo.txt", "-r", "requirements/test.txt")
    pytest(controller, parts[-1], RANKZERO_HOST_PYTHON=host)


def pytest(python: str, arguments: list[str], **variables: str) -> None:
    subprocess.run([python, "-m", "pytest", "-q", "-n", "2", *arguments], cwd=ROOT, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **variables}, check=True)


def main() -> int:
    os.chdir(ROOT)
    results = {}
    cells = [word for word in sys.argv[1:] if not word.startswith("--")]
    parts = [SMOKE] if "--smoke" in sys.argv else [LIFE] if "--life" in sys.argv else [UNITS, LIFE]
    for cell in cells or CONTROLLERS + HOSTS:
        started = time.monotonic()
        print(f"\n=== {cell} ===", flush=True)
        try:
            run_cell(cell, parts)
            results[cell] = "passed"
        except Skipped as reason:
            results[cell] = f"skipped: {reason}"
        except subprocess.CalledProcessError:
            results[cell] = "FAILED"
        results[cell] = f"{results[cell]} ({time.monotonic() - started:.0f} s)"
    print("\nPython:ansible-core of the controller, or Python of the hosts")
    for cell, result in results.items():
        print(f"  {cell.ljust(10)} {result}")
    return int(any(result.startswith("FAILED") for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
