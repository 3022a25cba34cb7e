# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The service's user may write what it likes into its own directories: none of it may lead root, or a stop, astray."""

from __future__ import annotations

import base64
import json
import os
import pathlib
import subprocess
import sys
from typing import Any
from urllib.parse import quote

import pytest

from ansible_collections.rankzero.inference.plugins.module_utils import evidence, observation
from ansible_collections.rankzero.inference.plugins.module_utils.revisions import Revisions
from ansible_collections.rankzero.inference.plugins.module_utils.service_managers import Supervisor
from ansible_collections.rankzero.inference.plugins.plugin_utils import failures


def run(arguments: list[str], environ_update: dict[str, str] | None = None, cwd: str | None = None, **_ignored: Any) -> tuple[int, str, str]:
    done = subprocess.run(arguments, env={**os.environ, **(environ_update or {})}, cwd=cwd, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def observer(tmp_path: pathlib.Path) -> observation.Observer:
    return observation.Observer("glm", str(tmp_path), "/proc", run)


SHOW = "import os, json; print(json.dumps([os.geteuid(), os.environ['HOME'], os.environ['XDG_CACHE_HOME']]))"


def test_devices_are_asked_without_the_service_s_home(tmp_path: pathlib.Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    owner = os.geteuid()
    if owner == 0:
        for folder in (tmp_path, *list(tmp_path.parents)[:2]):
            folder.chmod(0o755)
        owner = 65534
        os.chown(work, owner, owner)
    launch = {
        "paths": {"work_dir": str(work)},
        "launches": [{"env": {"HOME": str(work)}}],
        "ready": {"devices_command": {"path": "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable, "args": ["-c", SHOW]}},
    }
    answer = observer(tmp_path)._devices(launch)
    assert answer == {"lines": [f'[{owner}, "/nonexistent", "/nonexistent"]'], "error": None}


def test_nothing_of_the_service_s_runs_as_root(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    command, problem = observation._as_owner(str(tmp_path / "missing"))
    assert not command and "missing cannot be read" in str(problem)
    monkeypatch.setattr(observation.shutil, "which", lambda *_args, **_options: None)
    monkeypatch.setattr(os, "stat", lambda _path: os.stat_result((0o40755, 0, 0, 1, 1234, 1234, 0, 0, 0, 0)))
    command, problem = observation._as_owner("/srv")
    assert not command and "setpriv was not found" in str(problem)


def test_a_listener_that_cannot_be_seen_is_not_told_the_key(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"port": 8000, "address": "127.0.0.1", "pid": None, "listening": True}]
    monkeypatch.setattr(observation.processes, "listening_sockets", lambda _root: rows)
    listener = observer(tmp_path)._listener("http://127.0.0.1:8000", {1})
    assert listener is not None and not listener["ours"]
    problem = evidence._stranger({"url": "http://127.0.0.1:8000"}, {"listener": listener})
    assert problem is not None and "cannot be seen" in str(problem)
    rows.clear()
    assert observer(tmp_path)._listener("http://127.0.0.1:8000", {1}) is None


def store_of(tmp_path: pathlib.Path) -> Revisions:
    store = Revisions(str(tmp_path), "glm")
    pathlib.Path(store.state_dir).mkdir(parents=True)
    return store


def test_a_state_that_is_no_file_is_no_state(tmp_path: pathlib.Path) -> None:
    store = store_of(tmp_path)
    path = pathlib.Path(store.state_dir, "state.json")
    os.mkfifo(path)
    assert store.state() == {}
    path.unlink()
    path.write_text("[" * 100_000)
    assert store.state() == {}
    path.unlink()
    (path / "full").mkdir(parents=True)
    assert store.state() == {}
    pathlib.Path(store.state_dir, "ready.json").mkdir()
    store.forget_run()
    assert os.listdir(store.state_dir) == []


def test_a_link_in_place_of_the_state_keeps_its_target(tmp_path: pathlib.Path) -> None:
    store = store_of(tmp_path)
    kept = tmp_path / "kept"
    (kept / "inside").mkdir(parents=True)
    pathlib.Path(store.state_dir, "state.json").symlink_to(kept)
    store.forget_run()
    assert (kept / "inside").is_dir() and os.listdir(store.state_dir) == []


def test_a_pid_file_that_names_another_program_stops_nothing(tmp_path: pathlib.Path) -> None:
    manager = Supervisor(str(tmp_path), str(tmp_path), "supervisord", run)
    other = subprocess.Popen([sys.executable, "-c", "input()", manager.path], stdin=subprocess.PIPE)
    try:
        (tmp_path / "supervisord.pid").write_text(str(other.pid))
        assert not manager.active()
        manager.stop(1)
        assert other.poll() is None
    finally:
        other.communicate(b"\n")


def test_a_mark_is_not_written_through_what_the_service_put_there(tmp_path: pathlib.Path) -> None:
    seen = {"launch": {"replica": "glm", "rank": 0, "fingerprint": "f"}, "state": {"run_id": "r"}, "now": 1.0}
    victim = tmp_path / "victim"
    victim.write_text("kept")
    path = tmp_path / "ready.json"
    path.symlink_to(victim)
    (tmp_path / f"ready.json.{os.getpid()}").symlink_to(victim)
    assert observation._write_mark(str(path), seen, {"evidence": {}})
    assert victim.read_text() == "kept" and not path.is_symlink()


def test_a_revision_that_was_deployed_once_more_is_not_said_to_be_back() -> None:
    text = failures.summary("glm", {"a": {"msg": "x"}}, {"a": 0}, "abc", moved=False)
    assert text.splitlines()[0] == "Replica glm was not deployed. Revision abc was there before and stays; it is not proven to serve."


def test_no_spelling_of_a_secret_reaches_the_gate_s_log_lines(tmp_path: pathlib.Path) -> None:
    """Keys of any kept revision, and values under telling names, as engines print their arguments and environment."""
    old, new, token = "old-key-'quoted'-0123456789", 'new-"key"-\\-9876543210', "hf_abcdefghijklmnop"
    base, log = tmp_path / "etc/rankzero/glm", tmp_path / "var/log/rankzero/glm/shard.log"
    for name, key in (("f1", old), ("f2", new)):
        folder = base / "revisions" / name
        (folder / "secrets").mkdir(parents=True)
        (folder / "secrets/api_key").write_text(key)
        (folder / "launch.json").write_text(json.dumps({"rank": 0, "launches": [{"name": "engine", "env": {"HF_TOKEN": token}}], "ready": {}}))
    (base / "current").symlink_to("revisions/f2")
    log.parent.mkdir(parents=True)
    written = [text for key in (old, new, token) for text in (key, repr([key]), json.dumps({"m": json.dumps([key])}), quote(key), key.encode().hex())]
    encoded = [base64.b64encode(f"Bearer {key}".encode()).decode() for key in (old, new, token)]
    log.write_text("\n".join(["run_shard: glm rank 0 of 1, fingerprint f2, run 1", *(f"args: {text}." for text in [*written, *encoded])]))
    one = observer(tmp_path)
    one.look()
    lines = one._log(1)
    assert len(lines) == 1 + len(written) + len(encoded) and all("********" in line for line in lines[1:]), lines
    assert not [text for text in written if any(text in line for line in lines)]
