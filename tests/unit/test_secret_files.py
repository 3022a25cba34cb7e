# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A key that an engine reads from a file: from the plan over the revision on disk to the argument of the process."""

from __future__ import annotations

import json
import os
import pathlib
import stat
import subprocess
import sys
from typing import Any

import engine_requests as made
import pytest
import yaml

from ansible_collections.rankzero.inference.plugins.module_utils.revisions import Owner, Revisions
from ansible_collections.rankzero.inference.plugins.plugin_utils import render, secrets

FILES = pathlib.Path(__file__).resolve().parent.parent.parent / "roles" / "replica"
KEY = 'a-"key"\\with: quotes'


def run(directory: pathlib.Path, *options: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", str(FILES / "files" / "run_shard.py"), str(directory), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, env={"PATH": os.environ["PATH"], **environ}, check=False)


@pytest.fixture
def revision(tmp_path: pathlib.Path) -> pathlib.Path:
    """The leader's revision of an SGLang replica, written as a deploy does."""
    shard = made.good(made.profile("sglang", 2))[0]
    templates = {path.name: path.read_text(encoding="utf-8") for path in (FILES / "templates").iterdir()}
    rendered = render.render(shard, templates, {})
    revisions = Revisions(str(tmp_path), "glm")
    revisions.write(shard["fingerprint"], rendered.files, secrets.files(KEY, shard["secret_files"]), Owner(os.geteuid(), os.getegid(), True))
    return pathlib.Path(revisions.path(shard["fingerprint"]))


def test_the_key_is_in_private_files_and_nowhere_else(revision: pathlib.Path) -> None:
    assert yaml.safe_load((revision / "secrets" / "sglang.yaml").read_text()) == {"api-key": KEY} and (revision / "secrets" / "api_key").read_text() == KEY
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in (revision / "secrets").iterdir())
    elsewhere = "".join(path.read_text() for path in revision.iterdir() if path.is_file())
    assert elsewhere and KEY not in elsewhere and json.dumps(KEY)[1:-1] not in elsewhere


def test_systemd_hands_over_both_secrets(revision: pathlib.Path) -> None:
    unit = (revision / "inference-glm.service").read_text()
    assert [line.partition(":")[0] for line in unit.splitlines() if line.startswith("LoadCredential=")] == [
        "LoadCredential=api_key",
        "LoadCredential=sglang.yaml",
        "LoadCredential=tie_key",
    ]


def test_show_prints_where_the_file_is_and_not_what_is_in_it(revision: pathlib.Path) -> None:
    shown = run(revision, "--show")
    assert shown.returncode == 0 and f"--config {revision}/secrets/sglang.yaml" in shown.stdout and KEY not in shown.stdout


def handmade(tmp_path: pathlib.Path, **launch: Any) -> pathlib.Path:
    """A revision whose engine copies the file that its first argument names, and ends."""
    directory = tmp_path / "revision"
    (directory / "secrets").mkdir(parents=True)
    entry = {
        "name": "copy",
        "path": "/bin/cp",
        "args": ["secrets/x.yaml", str(tmp_path / "out")],
        "env": {},
        "secret_env": {},
        "secret_args": [{"position": 0, "secret": "x.yaml"}],
        **launch,
    }
    document = {
        "schema": 1,
        "replica": "r",
        "rank": 0,
        "nodes": 1,
        "fingerprint": "f",
        "paths": {"state_dir": str(tmp_path / "state"), "work_dir": str(tmp_path / "work")},
        "launches": [entry],
    }
    (directory / "launch.json").write_text(json.dumps(document))
    (directory / "shard.env").write_text("PATH='/usr/bin:/bin'\n")
    return directory


def test_the_process_is_given_the_path_of_the_credential_before_that_of_the_revision(tmp_path: pathlib.Path) -> None:
    directory, credentials = handmade(tmp_path), tmp_path / "credentials"
    (directory / "secrets" / "x.yaml").write_text("of the revision")
    run(directory)
    assert (tmp_path / "out").read_text() == "of the revision"
    credentials.mkdir()
    (credentials / "x.yaml").write_text("of systemd")
    run(directory, CREDENTIALS_DIRECTORY=str(credentials))
    assert (tmp_path / "out").read_text() == "of systemd"


def test_a_secret_file_that_is_not_there_stops_the_start(tmp_path: pathlib.Path) -> None:
    checked = run(handmade(tmp_path), "--check")
    assert checked.returncode != 0 and "x.yaml" in checked.stdout + checked.stderr


@pytest.mark.parametrize(
    "entry",
    [
        {"position": 2, "secret": "x.yaml"},
        {"position": -1, "secret": "x.yaml"},
        {"position": 0, "secret": "../shard.env"},
        {"position": "0", "secret": "x.yaml"},
        {"position": 0},
    ],
)
def test_a_damaged_place_is_refused(tmp_path: pathlib.Path, entry: dict[str, Any]) -> None:
    shown = run(handmade(tmp_path, secret_args=[entry]), "--show")
    assert shown.returncode == 78 and "secret_args[0]" in shown.stdout + shown.stderr
