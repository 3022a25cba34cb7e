# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every command line of the matrix, parsed by the installed engines themselves; and the recorded parsers are those of the installed engines."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

import cpu_engines
import pytest

CONTRACT = pathlib.Path(__file__).resolve().parent.parent / "contract"
if str(CONTRACT) not in sys.path:
    sys.path.insert(0, str(CONTRACT))

import snapshot_parsers
import test_command_lines as contract

pytestmark = pytest.mark.real
HOLDS = {"vllm": "vllm", "ray": "vllm", "sglang": "sglang"}  # program -> the environment that it is in


def asked(program: str, lines: list[list[str]], folder: pathlib.Path) -> list[dict[str, Any]]:
    """All lines in one process: each start of such a parser takes seconds."""
    python = cpu_engines.install(HOLDS[program]) / "bin" / "python"
    done = subprocess.run(
        [python, str(CONTRACT / "real_parsers.py"), program], input=json.dumps(lines), capture_output=True, text=True, cwd=folder, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    assert len(answers) == len(lines)
    return answers


def line(launch: dict[str, Any], shard: dict[str, Any], folder: pathlib.Path) -> list[str]:
    """What follows the first word, with the secrets' files where they can be read."""
    words = list(launch["args"])
    for name, text in contract.secret_files(shard).items():
        (folder / name).write_text(text)
    for item in launch["secret_args"]:
        words[item["position"]] = str(folder / item["secret"])
    return words[1:]


@pytest.mark.parametrize("program", sorted(HOLDS))
@pytest.mark.parametrize("key", [False, True], ids=["open", "key"])
def test_every_command_line_is_accepted_and_says_the_same_thing_back(program: str, key: bool, tmp_path: pathlib.Path) -> None:
    cases = [case for case in contract.launches(key) if contract.program_of(case[2]) == program]
    lines = [line(launch, shard, tmp_path) for _wanted, shard, launch in cases]
    for (wanted, shard, launch), words, answer in zip(cases, lines, asked(program, lines, tmp_path), strict=True):
        assert "rejected" not in answer, f"{answer['rejected']}: {program} {' '.join(words)}"
        contract.check(wanted, shard, launch, answer["said"], key)
    assert len(cases) >= {"ray": 6}.get(program, 40)


@pytest.mark.parametrize("program", sorted(HOLDS))
def test_what_the_recorded_parsers_reject_is_rejected(program: str, tmp_path: pathlib.Path) -> None:
    lines = [argv for name, argv in contract.REJECTED if name == program]
    answers = asked(program, lines, tmp_path)
    assert [words for words, answer in zip(lines, answers, strict=True) if "rejected" not in answer] == []


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_recorded_parser_is_that_of_the_installed_engine(engine: str, tmp_path: pathlib.Path) -> None:
    python = cpu_engines.install(engine) / "bin" / "python"
    code = f"import sys; sys.path.insert(0, {str(CONTRACT)!r}); import snapshot_parsers as s; open('dump', 'w').write(s.dumped(s.of_{engine}()))"
    subprocess.run([python, "-c", code], cwd=tmp_path, capture_output=True, timeout=300, check=True)
    assert (tmp_path / "dump").read_text() == (snapshot_parsers.PARSERS / f"{engine}.json").read_text()
