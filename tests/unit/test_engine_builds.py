# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Registered engine builds: whole, gone, damaged."""

from __future__ import annotations

import json
import os
import pathlib
import sys

import pytest

from ansible_collections.rankzero.inference.plugins.module_utils import engine_builds


def register(root: pathlib.Path, name: str, content: object) -> pathlib.Path:
    path = root / "etc/rankzero/engines.d" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def test_whole(tmp_path):
    record = {
        "engine": "vllm",
        "name": "nightly",
        "path": sys.executable,
        "version": "0.33.0",
        "fingerprint": "abc",
        "nccl": "2.30.7",
        "devices": ["CUDA0"],
        "env": {"PATH": "/usr/bin"},
        "installed_at": "2026-01-31T12:00:00Z",
        "paths": {"python": sys.executable},
        "python": {"path": sys.executable, "version": "3.12.4"},
        "versions": {"torch": "2.13.0"},
        "programs_sha256": {"vllm": "ab"},
        "container": {"image": "sha256:1", "mounts": ["/models"]},
        "schema": 1,
    }
    register(tmp_path, "vllm-nightly.json", record)
    build = {key: value for key, value in record.items() if key not in ("engine", "schema")}
    assert engine_builds.read(str(tmp_path)) == {"vllm": [dict(build, problems=[])]}


def test_engines_of_other_collections_and_order(tmp_path):
    for name in ("vllm-10.json", "vllm-2.json", "their.collection.name-x.json"):
        register(tmp_path, name, {"path": sys.executable})
    register(tmp_path, ".vllm-draft.json", {})
    register(tmp_path, "readme.txt", b"")
    found = engine_builds.read(str(tmp_path))
    assert {engine: [build["name"] for build in builds] for engine, builds in found.items()} == {"their.collection.name": ["x"], "vllm": ["2", "10"]}


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b"[" * 100000, b"null"])
def test_damaged_is_listed_under_its_file_name(tmp_path, content):
    path = register(tmp_path, "sglang-main.json", content)
    (build,) = engine_builds.read(str(tmp_path))["sglang"]
    assert (build["name"], build["path"], build["version"]) == ("main", None, None)
    assert len(build["problems"]) == 1 and str(path) in build["problems"][0]


def test_programs_that_cannot_run(tmp_path):
    plain = tmp_path / "plain"
    plain.write_text("x", encoding="utf-8")
    programs = {"gone": "/nonexistent/llama-server", "plain": str(plain), "folder": str(tmp_path), "relative": "llama-server", "none": None, "odd": 7}
    for name, program in programs.items():
        register(tmp_path, "llamacpp-%s.json" % name, {"path": program})
    problems = {build["name"]: build["problems"] for build in engine_builds.read(str(tmp_path))["llamacpp"]}
    assert set(problems) == set(programs)
    words = {
        "gone": "is gone",
        "plain": "cannot be executed",
        "folder": "cannot be executed",
        "relative": "no absolute path",
        "none": "names no path",
        "odd": "names no path",
    }
    for name, word in words.items():
        assert len(problems[name]) == 1 and word in problems[name][0]
    os.chmod(plain, 0o755)
    assert next(build for build in engine_builds.read(str(tmp_path))["llamacpp"] if build["name"] == "plain")["problems"] == []


def test_nothing_registered(tmp_path):
    assert engine_builds.read(str(tmp_path)) == {}
