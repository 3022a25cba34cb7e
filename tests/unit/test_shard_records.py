# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a host knows of its shards: real files, and real processes as the service."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.rankzero.inference.plugins.module_utils import secret_check, shard_records

RUN = "20260131T120000-1"
LAUNCH = {
    "schema": 1,
    "replica": "glm",
    "rank": 1,
    "nodes": 2,
    "fingerprint": "f2",
    "labels": {"replica": "glm", "profile": "glm-h100", "pool": "H100", "fabric": "compute", "engine": "vllm"},
    "gpus": [{"uuid": "GPU-1", "index": 0}, {"uuid": "GPU-2", "index": 1}],
    "leader_port": 29500,
    "http_port": 8000,
    "ready": {"url": "http://10.0.0.1:8000"},
    "launches": [],
}
SHOWN = "Id=inference-glm.service\nActiveState=%s\nUnitFileState=enabled\nNRestarts=2\n"


def no_command(arguments: list[str]) -> tuple[int, str, str]:
    raise AssertionError("no command is needed: %s" % arguments)


def deploy(root: pathlib.Path, launch: object = None, replica: str = "glm") -> pathlib.Path:
    """Two revisions, the newer one current."""
    launch = LAUNCH if launch is None else launch
    base = root / "etc/rankzero" / replica
    for fingerprint in ("f1", "f2"):
        folder = base / "revisions" / fingerprint
        (folder / "secrets").mkdir(mode=0o700, parents=True)
        (folder / "launch.json").write_text(launch if isinstance(launch, str) else json.dumps(launch), encoding="utf-8")
        (folder / "shard.env").write_text("A='1'\n", encoding="utf-8")
        for name, text in (("api_key", "sk-secret"), (".check", secret_check.content({"api_key": "sk-secret"}))):
            (folder / "secrets" / name).write_text(text, encoding="utf-8")
            (folder / "secrets" / name).chmod(0o600)
    (base / "current").symlink_to("revisions/f2")
    (base / "previous").symlink_to("revisions/f1")
    (base / "supervisord.conf").write_text("[supervisord]\n", encoding="utf-8")
    return base


def state(root: pathlib.Path, **values: object) -> pathlib.Path:
    folder = root / "run/rankzero/glm"
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "schema": 1,
        "replica": "glm",
        "rank": 1,
        "fingerprint": "f2",
        "run_id": RUN,
        "stage": "running",
        "detail": "",
        "started_at": time.time(),
        "supervisor_pid": 999999999,
        "launches": [],
        "restarts": 3,
        "last_end": None,
    }
    (folder / "state.json").write_text(json.dumps(dict(content, **values)), encoding="utf-8")
    return folder


def ready(root: pathlib.Path, **values: object) -> None:
    proof = dict({"schema": 1, "replica": "glm", "rank": 1, "fingerprint": "f2", "run_id": RUN, "evidence": {"gpus": []}}, **values)
    (root / "run/rankzero/glm/ready.json").write_text(json.dumps(proof), encoding="utf-8")


def read(root: pathlib.Path, run_command=no_command, **options: str) -> dict:
    return shard_records.read(str(root), "/proc", run_command, **dict({"unit_directory": str(root / "units")}, **options))


@pytest.fixture
def service(tmp_path):
    """A process that is a run_shard.py to the reader, with a child that carries the shard's marker. Only these two are ended."""
    program = tmp_path / "run_shard.py"
    program.write_text(
        "import os, subprocess, sys, time\nenv = dict(os.environ, RANKZERO_SHARD='glm/1/%s')\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(30)'], env=env, start_new_session=True)\n"
        "print('up', flush=True)\ntime.sleep(30)\n" % RUN,
        encoding="utf-8",
    )
    process = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE)
    process.stdout.readline()
    children = [int(pid) for pid in pathlib.Path("/proc/%d/task/%d/children" % (process.pid, process.pid)).read_text(encoding="ascii").split()]
    yield process.pid, children
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    process.kill()
    process.communicate()


def test_running_and_ready(tmp_path, service):
    pid, children = service
    base = deploy(tmp_path)
    state(tmp_path, supervisor_pid=pid, launches=[{"name": "engine", "pid": children[0], "exit": None}])
    ready(tmp_path)
    (shard,) = read(tmp_path).values()
    launch = (base / "current" / "launch.json").read_bytes()
    assert [(one["revision"], one["problem"] is None) for one in shard.pop("revisions")] == [("f1", False), ("f2", False)], "files are missing there"
    assert shard == {
        "rank": 1,
        "nodes": 2,
        "revision": "f2",
        "previous": "f1",
        "run_id": RUN,
        "stage": "running",
        "detail": "",
        "ready": True,
        "evidence": {"gpus": []},
        "restarts": 3,
        "pids": sorted([pid, *children]),
        "profile": "glm-h100",
        "pool": "H100",
        "fabric": "compute",
        "engine": "vllm",
        "errors": {},
        "gpus": ["GPU-1", "GPU-2"],
        "leader_port": 29500,
        "http_port": 8000,
        "url": "http://10.0.0.1:8000",
        "tie_port": None,
        "run_ports": [],
        "tie_id": None,
        "has_api_key": None,
        "secret_problems": [],
        "files_sha256": {"launch.json": hashlib.sha256(launch).hexdigest(), "shard.env": hashlib.sha256(b"A='1'\n").hexdigest()},
        "unit": {
            "name": "supervisord.conf",
            "manager": "supervisor",
            "active": True,
            "state": "unmanaged",
            "enabled": None,
            "sha256": hashlib.sha256(b"[supervisord]\n").hexdigest(),
        },
    }


def test_no_secret_is_told(tmp_path):
    deploy(tmp_path)
    told = json.dumps(read(tmp_path))
    assert "sk-secret" not in told and hashlib.sha256(b"sk-secret").hexdigest() not in told


@pytest.mark.parametrize("change", [{"run_id": "another"}, {"fingerprint": "f1"}, {"run_id": None}])
def test_the_proof_of_another_run_is_none(tmp_path, service, change):
    deploy(tmp_path)
    state(tmp_path, supervisor_pid=service[0])
    ready(tmp_path, **change)
    shard = read(tmp_path)["glm"]
    assert shard["unit"]["active"] is True and shard["ready"] is False


def test_a_run_that_was_killed_is_stopped_and_not_ready(tmp_path):
    deploy(tmp_path)
    state(tmp_path, supervisor_pid=999999999)
    ready(tmp_path)
    shard = read(tmp_path)["glm"]
    assert (shard["ready"], shard["stage"], shard["unit"]["active"], shard["pids"]) == (False, "stopped", False, [])
    assert "last run was in stage running" in shard["detail"]


def test_another_process_with_the_number_is_not_the_service(tmp_path, service):
    deploy(tmp_path)
    state(tmp_path, supervisor_pid=os.getpid())
    assert read(tmp_path)["glm"]["unit"]["active"] is False, "no run_shard.py"
    state(tmp_path, supervisor_pid=service[0], started_at=time.time() - 3600)
    assert read(tmp_path)["glm"]["unit"]["active"] is False, "a run_shard.py that began an hour after this run"
    state(tmp_path, supervisor_pid=service[0])
    assert read(tmp_path)["glm"]["unit"]["active"] is True


@pytest.mark.parametrize(
    ("active_state", "active"), [("active", True), ("activating", True), ("reloading", True), ("failed", False), ("inactive", False), ("deactivating", False)]
)
def test_systemd(tmp_path, active_state, active):
    deploy(tmp_path)
    deploy(tmp_path, replica="other")
    units = tmp_path / "units"
    units.mkdir()
    (units / "inference-glm.service").write_text("[Unit]\n", encoding="utf-8")
    asked = []

    def systemctl(arguments: list[str]) -> tuple[int, str, str]:
        asked.append(arguments)
        return 0, SHOWN % active_state, ""

    shards = read(tmp_path, systemctl)
    command = ["systemctl", "show", "--property=Id,ActiveState,UnitFileState,NRestarts", "--", "inference-glm.service"]
    assert asked == [command], "once, and only for units that exist"
    assert shards["glm"]["unit"] == {
        "name": "inference-glm.service",
        "manager": "systemd",
        "active": active,
        "state": active_state,
        "enabled": True,
        "sha256": hashlib.sha256(b"[Unit]\n").hexdigest(),
    }
    assert shards["glm"]["restarts"] == 2, "systemd's count where no run has written its own"
    assert shards["other"]["unit"]["manager"] == "supervisor"


def test_two_units_are_asked_in_one_call(tmp_path):
    for replica in ("glm", "other"):
        deploy(tmp_path, replica=replica)
        (tmp_path / "units").mkdir(exist_ok=True)
        (tmp_path / "units" / ("inference-%s.service" % replica)).write_text("", encoding="utf-8")
    answer = "Id=inference-other.service\nActiveState=failed\nUnitFileState=disabled\nNRestarts=0\n\n" + SHOWN % "active"
    shards = read(tmp_path, lambda arguments: (0, answer, ""))
    assert [(shards[name]["unit"]["active"], shards[name]["unit"]["enabled"]) for name in ("glm", "other")] == [(True, True), (False, False)]


def test_systemctl_that_fails_leaves_the_service_unknown(tmp_path):
    deploy(tmp_path)
    state(tmp_path)
    (tmp_path / "units").mkdir()
    (tmp_path / "units/inference-glm.service").write_text("", encoding="utf-8")
    shard = read(tmp_path, lambda arguments: (1, "", "Failed to connect to bus"))["glm"]
    assert (shard["unit"]["active"], shard["ready"], shard["stage"]) == (None, False, "running")
    assert shard["errors"]["unit"] == "systemctl show failed: Failed to connect to bus"


def test_unfinished_deployment(tmp_path):
    base = deploy(tmp_path)
    (base / "current").unlink()
    shard = read(tmp_path)["glm"]
    assert (shard["revision"], shard["previous"], shard["rank"], shard["files_sha256"], shard["stage"]) == (None, "f1", None, {}, None)


def test_a_current_that_leads_nowhere(tmp_path):
    base = deploy(tmp_path)
    shutil.rmtree(base / "revisions" / "f2")
    shard = read(tmp_path)["glm"]
    assert shard["revision"] == "f2" and shard["files_sha256"] == {} and "launch.json" not in shard["files_sha256"]


def test_no_replicas(tmp_path):
    assert read(tmp_path) == {}
    (tmp_path / "etc/rankzero/engines.d").mkdir(parents=True)
    (tmp_path / "etc/rankzero/cordoned.json").write_text("{}", encoding="utf-8")
    assert read(tmp_path) == {}


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        ('{"by": "ann", "reason": "fan", "at": "2026-01-31", "x": 1}', {"by": "ann", "reason": "fan", "at": "2026-01-31"}),
        ("{}", {"by": None, "reason": None, "at": None}),
        ('{"by": ["ann"], "reason": "fan\\n3 \\u001b[2J", "at": 7}', {"by": "['ann']", "reason": "fan 3  [2J", "at": "7"}),
    ],
)
def test_cordoned(tmp_path, content, answer):
    assert shard_records.cordoned(str(tmp_path)) is None
    (tmp_path / "etc/rankzero").mkdir(parents=True)
    (tmp_path / "etc/rankzero/cordoned.json").write_text(content, encoding="utf-8")
    assert shard_records.cordoned(str(tmp_path)) == answer


def test_a_damaged_cordon_still_holds(tmp_path):
    (tmp_path / "etc/rankzero").mkdir(parents=True)
    (tmp_path / "etc/rankzero/cordoned.json").write_text("{", encoding="utf-8")
    assert "damaged" in shard_records.cordoned(str(tmp_path))["reason"]


# ---- damage

SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=8))
NAMES = st.sampled_from(["pid", "uuid", "profile", "x"])
JSON = st.recursive(SCALARS, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3)), max_leaves=8)
RUN_NAMES = st.sampled_from(["run_id", "stage", "detail", "supervisor_pid", "launches", "restarts", "started_at"])
PROOF_NAMES = st.sampled_from(["run_id", "fingerprint", "evidence"])


@settings(max_examples=60, deadline=None)
@given(launch=st.dictionaries(st.sampled_from(list(LAUNCH)), JSON), run=st.dictionaries(RUN_NAMES, JSON), proof=st.dictionaries(PROOF_NAMES, JSON))
def test_any_json(tmp_path_factory, launch, run, proof):
    root = tmp_path_factory.mktemp("shard")
    try:
        deploy(root, launch)
        state(root, **run)
        ready(root, **proof)
        json.dumps(read(root))
    finally:
        shutil.rmtree(root)


@pytest.mark.parametrize("content", ["", "{", "[]", "\x00"])
@pytest.mark.parametrize("name", ["launch.json", "state.json", "ready.json"])
def test_damaged_files_are_named(tmp_path, name, content):
    base = deploy(tmp_path)
    run = state(tmp_path)
    ready(tmp_path)
    path = (base / "current" if name == "launch.json" else run) / name
    path.write_text(content, encoding="utf-8")
    shard = read(tmp_path)["glm"]
    assert str(path) in shard["errors"][name]
    assert shard["revision"] == "f2" and not shard["ready"]


def test_keys_of_the_tie_can_be_told_apart_and_are_not_told(tmp_path):
    base = deploy(tmp_path)
    path = base / "current" / "launch.json"
    launch = json.loads(path.read_text())
    path.write_text(json.dumps({**launch, "tie_port": 29400, "tie": {"port": 29400, "secret": "tie_key", "run_ports": [29500, 29501]}}))
    found = []
    (base / "current" / "secrets").mkdir(exist_ok=True)
    for key in ("a" * 64, "a" * 64, "b" * 64):
        (base / "current" / "secrets" / "tie_key").write_text(key)
        (shard,) = read(tmp_path).values()
        assert (shard["tie_port"], shard["run_ports"]) == (29400, [29500, 29501])
        assert (
            key not in json.dumps(shard) and re.fullmatch("[0-9a-f]{16}", shard["tie_id"]) and shard["tie_id"] not in hashlib.sha256(key.encode()).hexdigest()
        )
        found.append(shard["tie_id"])
    assert found[0] == found[1] != found[2]
    (base / "current" / "secrets" / "tie_key").unlink()
    assert next(iter(read(tmp_path).values()))["tie_id"] is None
