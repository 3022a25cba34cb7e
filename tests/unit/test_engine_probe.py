# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Engine builds are asked with real programs: what they answer, how they fail, and what their files are."""

from __future__ import annotations

import os
import pathlib
import subprocess
from typing import Any

import pytest

from ansible_collections.rankzero.inference.plugins.module_utils import engine_probe
from ansible_collections.rankzero.inference.plugins.module_utils.engine_probe import ProbeError

LISTING = """Available devices:
  CUDA0: NVIDIA H100 80GB HBM3 (81008 MiB, 80559 MiB free)
  Vulkan1: llvmpipe (LLVM 15.0.7, 256 bits)
  RPC0: 10.0.0.2:50052 (1024 MiB, 1024 MiB free)
  (none)
load_backend: x
"""


def run(words: list[str], cwd: str | None = None, **_more: Any) -> tuple[int, str, str]:
    """AnsibleModule.run_command, with what of it matters here: a list is executed as it is, the caller's environment is inherited."""
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=20, check=False, env={**os.environ, "LEAK": "1"})
    return done.returncode, done.stdout, done.stderr


def program(directory: pathlib.Path, script: str, name: str = "llama-server") -> str:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    path.write_text("#!/bin/sh\n%s\n" % script)
    path.chmod(0o755)
    return str(path)


def test_programs_are_found_in_a_directory_or_beside_one(tmp_path: pathlib.Path) -> None:
    first, second = program(tmp_path / "a b", "", "llama-server"), program(tmp_path / "a b", "", "ggml-rpc-server")
    for path in (str(tmp_path / "a b"), first):
        assert engine_probe.find_programs(path, ["llama-server"], ["ggml-rpc-server", "no-such"]) == {"llama-server": first, "ggml-rpc-server": second}
    for path, text in (
        ("llama-server", "no absolute path"),
        ("llama-server", r"path \(engine_path in the playbooks\) llama-server is no absolute path: give the directory of the build's programs"),
        (str(tmp_path), "no executable llama-server in %s: give the directory" % tmp_path),
        (str(tmp_path / "x/llama-server"), "no executable llama-server in %s/x, which is not there: give the directory" % tmp_path),
        ("/opt/a=b/llama-server", "env\\(1\\)"),
    ):
        with pytest.raises(ProbeError, match=text):
            engine_probe.find_programs(path, ["llama-server"], [])


def test_a_program_is_asked_in_a_clean_environment_and_directory(tmp_path: pathlib.Path) -> None:
    path = program(tmp_path / "$HOME 'x'", 'pwd; env; mkdir -p $HOME/.cache; echo "arg:$1"; echo "version: 0.6.0-dev (x)" >&2')
    out, _err = engine_probe.ask(run, path, ["a $b"], {"LD_LIBRARY_PATH": "/l i b"})
    lines = out.splitlines()
    assert lines[0] == "/" and "LD_LIBRARY_PATH=/l i b" in lines and "arg:a $b" in lines and not any(line.startswith("LEAK=") for line in lines)
    home = next(line for line in lines if line.startswith("HOME="))[len("HOME=") :]
    assert "rankzero-probe-" in home and not pathlib.Path(home).exists(), "what a program leaves in its home goes with it"
    assert engine_probe.version(run, path, [], {}) == "0.6.0-dev"


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("echo first >&2; echo 'no such backend' >&2; exit 3", "ended with 3: no such backend"),
        ("exit 1", "ended with 1: no output"),
        ("kill -ILL $$", "SIGILL: it was built for a processor"),
        ("kill -SEGV $$", "ended with"),
        ("echo nothing useful", "names no version: nothing useful; wanted is 'version 1.2' somewhere"),
    ],
)
def test_programs_that_fail_say_how(tmp_path: pathlib.Path, script: str, text: str) -> None:
    with pytest.raises(ProbeError, match=text):
        engine_probe.version(run, program(tmp_path, script), ["--version"], {})


def test_a_program_that_serves_instead_of_answering_is_ended(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_probe, "ANSWER_SECONDS", 0.2)
    with pytest.raises(ProbeError, match="did not answer within"):
        engine_probe.ask(run, program(tmp_path, "exec sleep 30"), [], {})


def test_device_listings() -> None:
    assert engine_probe.parse_devices(LISTING) == [
        {"name": "CUDA0", "description": "NVIDIA H100 80GB HBM3", "total_mib": 81008},
        {"name": "Vulkan1", "description": "llvmpipe (LLVM 15.0.7, 256 bits)", "total_mib": None},
        {"name": "RPC0", "description": "10.0.0.2:50052", "total_mib": 1024},
    ]
    assert engine_probe.parse_devices("Available devices:\n  (none)\n") == [] and engine_probe.parse_devices("") == []


def test_the_fingerprint_is_of_contents_and_not_of_places(tmp_path: pathlib.Path) -> None:
    def build(directory: str, code: str = "1", library: str = "lib") -> dict[str, str]:
        path = program(tmp_path / directory, code)
        (tmp_path / directory / "libggml.so.1").write_text(library)
        (tmp_path / directory / "notes.txt").write_text(directory)
        return {"llama-server": path}

    first = engine_probe.fingerprint(build("a"))
    assert len(first) == 16 and first == engine_probe.fingerprint(build("b"))
    assert len({first, engine_probe.fingerprint(build("c", code="2")), engine_probe.fingerprint(build("d", library="x"))}) == 3
    os.link(tmp_path / "a/libggml.so.1", tmp_path / "a/libggml.so")
    assert engine_probe.fingerprint({"llama-server": str(tmp_path / "a/llama-server")}) != first
    one, other = (
        {"x": program(tmp_path / "p1", "1", "x"), "y": program(tmp_path / "p2", "2", "x")},
        {"x": program(tmp_path / "q2", "1", "x"), "y": program(tmp_path / "q1", "2", "x")},
    )
    assert engine_probe.fingerprint(one) == engine_probe.fingerprint(other)  # two of one name, in directories of another order
