# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The C library seen through the real pynvml: each batch of checks runs in a process of its own.

pynvml keeps the loaded library in a module global and the dynamic linker reads LD_LIBRARY_PATH once, so a new state of the world
that starts before nvmlInit needs a new process.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import batches
import build


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return build.build(build.HERE / "build")


def environment(library: pathlib.Path, directory: pathlib.Path) -> dict[str, str]:
    return dict(
        os.environ, LD_LIBRARY_PATH=str(library), FAKE_NVML_STATE=str(directory / "state"), FAKE_NVML_STRICT="1", FAKE_NVML_TRACE=str(directory / "trace")
    )


@pytest.mark.parametrize("name", sorted(batches.BATCHES))
def test_batch(name: str, library: pathlib.Path, tmp_path: pathlib.Path) -> None:
    env = environment(library, tmp_path)
    done = subprocess.run([sys.executable, batches.__file__, name, str(tmp_path)], env=env, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    checks = int(done.stdout)
    assert checks >= batches.BATCHES[name].least, f"only {checks} checks ran"


def test_a_typo_in_a_state_file_is_told(library: pathlib.Path, tmp_path: pathlib.Path) -> None:
    state = tmp_path / "state"
    state.write_text('gpu 0 name="NVIDIA X" utid=GPU-1\nprocs gpu=0 pid=1\nproc gpu=0 pid=1 mb=5\n', encoding="ascii")
    env = environment(library, tmp_path)
    done = subprocess.run([sys.executable, "-c", "import pynvml; pynvml.nvmlInit()"], env=env, check=False, capture_output=True, text=True, timeout=60)
    assert "unknown key utid" in done.stderr and "not understood: procs" in done.stderr and "unknown key mb" in done.stderr


def test_a_second_build_compiles_nothing(library: pathlib.Path) -> None:
    before = (library / build.LIBRARY).stat().st_mtime_ns
    assert build.build(library) == library
    assert (library / build.LIBRARY).stat().st_mtime_ns == before


def test_every_call_of_the_binding_is_exported(library: pathlib.Path) -> None:
    text = (library / build.LIBRARY).read_bytes()
    missing = [name for name in build.stubs("") if name.encode() + b"\0" not in text]
    assert not missing
