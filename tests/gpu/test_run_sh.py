# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""run.sh says plainly that there is no GPU, and does nothing else then."""

from __future__ import annotations

import pathlib
import subprocess

import pytest

SCRIPT = pathlib.Path(__file__).resolve().parent / "run.sh"


@pytest.mark.parametrize(
    ("nvidia_smi", "told"),
    [
        pytest.param(None, "there is no nvidia-smi on PATH", id="no driver"),
        pytest.param(
            "echo 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.'; exit 9",
            "NVIDIA-SMI has failed because",
            id="driver not loaded",
        ),
        pytest.param("echo 'No devices found.'", "nvidia-smi lists none: No devices found.", id="no devices"),
    ],
)
def test_no_gpu_is_said_and_nothing_is_made(tmp_path: pathlib.Path, nvidia_smi: str | None, told: str) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "dirname", "head", "grep", "python3"):
        (programs / name).symlink_to(pathlib.Path("/usr/bin") / name if (pathlib.Path("/usr/bin") / name).exists() else pathlib.Path("/bin") / name)
    if nvidia_smi is not None:
        (programs / "nvidia-smi").write_text(f"#!/bin/sh\n{nvidia_smi}\n", encoding="utf-8")
        (programs / "nvidia-smi").chmod(0o755)
    done = subprocess.run([str(SCRIPT)], env={"PATH": str(programs), "GPU_TEST_VENV": str(tmp_path / "venv")}, capture_output=True, text=True, check=False)
    assert done.returncode == 77, done.stdout + done.stderr
    assert done.stdout.startswith("no GPU here: ") and told in done.stdout, done.stdout
    assert not (tmp_path / "venv").exists()
