# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is left of a replica is found by each part alone, and nothing of anybody else: real processes, real files, real sockets."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from ansible_collections.rankzero.inference.plugins.module_utils import mounts, teardown, traces
from ansible_collections.rankzero.inference.plugins.module_utils.revisions import Owner, Revisions

ME = Owner(os.geteuid(), os.getegid(), True)
SLEEP = "import time; time.sleep(60)"


@pytest.fixture
def store(tmp_path: pathlib.Path) -> Revisions:
    return Revisions(str(tmp_path / "root"), "left")


@pytest.fixture
def units(tmp_path: pathlib.Path) -> pathlib.Path:
    folder = tmp_path / "units/multi-user.target.wants"
    folder.mkdir(parents=True)
    return folder.parent


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    found: list[subprocess.Popen[bytes]] = []
    yield found
    for one in found:
        one.kill()
        one.wait()


def read(store: Revisions, units: pathlib.Path) -> dict[str, object]:
    return traces.read(store.config_root[: -len("/etc/rankzero")], "/proc", str(units))["replicas"]  # type: ignore[no-any-return]


def test_a_clean_host_has_none(store: Revisions, units: pathlib.Path) -> None:
    os.makedirs(store.config_root + "/engines.d")
    pathlib.Path(store.config_root, "..").mkdir(exist_ok=True)
    pathlib.Path(store.config_root, "made_users.json").write_text('["rz", 7]')
    assert read(store, units) == {}
    assert traces.read(str(pathlib.Path(store.config_root).parent.parent), "/proc", str(units))["made_users"] == ["rz"]


@pytest.mark.parametrize("part", ["directory", "state_dir", "work_dir", "log_dir"])
def test_any_directory_alone_is_a_trace(store: Revisions, units: pathlib.Path, part: str) -> None:
    os.makedirs(getattr(store, part))
    assert read(store, units) == {"left": {"unit": None, "pids": [], "paths": [getattr(store, part)]}}


def test_a_unit_is_one_only_of_this_root(store: Revisions, units: pathlib.Path) -> None:
    path = units / "inference-left.service"
    path.write_text("ExecStart=/usr/bin/python3 -I %s/current/run_shard.py\n" % store.directory)
    assert read(store, units) == {"left": {"unit": str(path), "pids": [], "paths": []}}
    path.write_text("ExecStart=/usr/bin/python3 -I /elsewhere/etc/rankzero/left/current/run_shard.py\n")
    (units / "multi-user.target.wants/inference-left.service").symlink_to("../gone.service")
    assert read(store, units) == {}, "a link does not tell its root, so it counts for / alone"
    system = Revisions("/", "left")
    path.unlink()
    assert traces.unit_of(system, str(units)) == str(units / "multi-user.target.wants/inference-left.service")


def test_processes_are_found_by_marker_program_and_configuration(
    store: Revisions, units: pathlib.Path, started: list[subprocess.Popen[bytes]], tmp_path: pathlib.Path
) -> None:
    script = pathlib.Path(store.directory, "current/run_shard.py")
    script.parent.mkdir(parents=True)
    script.write_text(SLEEP)
    supervisord, editor = tmp_path / "supervisord", tmp_path / "editor"
    for program in (supervisord, editor):
        program.write_text("#!%s\n%s\n" % (sys.executable, SLEEP))
        program.chmod(0o755)
    home = {**os.environ, "RANKZERO_SHARD": "left/0/run", "HOME": store.work_dir}
    commands = [
        ([sys.executable, "-c", SLEEP], home, True),
        ([sys.executable, "-I", str(script)], None, True),
        ([str(supervisord), "-c", store.directory + "/supervisord.conf"], None, True),
        ([sys.executable, "-c", SLEEP], {**home, "HOME": "/elsewhere/var/lib/rankzero/left"}, False),
        ([sys.executable, "-c", SLEEP], {**home, "RANKZERO_SHARD": "left-2/0/run"}, False),
        ([str(editor), str(script)], None, False),
        ([sys.executable, str(script), "--show"], None, False),
    ]
    for words, environment, _ours in commands:
        started.append(subprocess.Popen(words, env=environment))
    wanted = sorted(one.pid for one, (_words, _environment, ours) in zip(started, commands) if ours)
    deadline = time.monotonic() + 10
    while traces.pids(store) != wanted and time.monotonic() < deadline:
        time.sleep(0.05)
    assert traces.pids(store) == wanted
    assert read(store, units)["left"]["pids"] == wanted  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "good"),
    [
        ("glm", True),
        ("a", True),
        ("a-1", True),
        ("", False),
        ("..", False),
        ("a/b", False),
        ("-a", False),
        ("a-", False),
        ("A", False),
        ("a" * 41, False),
        ("ä", False),
    ],
)
def test_names(name: str, good: bool) -> None:
    assert traces.is_name(name) is good


# ---- ports


def test_every_port_of_every_run_is_watched() -> None:
    launch = {
        "rank": 0,
        "tie": {"address": "127.0.0.9", "port": 29400},
        "listen_ports": [
            {"address": "127.0.0.9", "port": 8000},
            {"address": "127.0.0.9", "port": 29500, "ports": [29500, 29501]},
            {"address": "x", "port": None},
            7,
        ],
    }
    assert teardown.endpoints_of(launch) == [("127.0.0.9", 8000), ("127.0.0.9", 29400), ("127.0.0.9", 29500), ("127.0.0.9", 29501)]
    assert ("127.0.0.9", 29400) not in teardown.endpoints_of({**launch, "rank": 1})
    assert teardown.endpoints_of({}) == teardown.endpoints_of({"listen_ports": None, "tie": 3}) == []


def test_remnants_of_closed_connections_are_no_taken_port() -> None:
    """The server closes first, so its port stays in TIME_WAIT, which no process holds."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.8", 0))
        server.listen()
        end = ("127.0.0.8", int(server.getsockname()[1]))
        assert teardown.is_taken(end)
        with socket.create_connection(end) as client:
            server.accept()[0].close()
            client.recv(1)
    assert not teardown.is_taken(end) and not teardown.is_taken(("192.0.2.1", 80)) and not teardown.is_taken(("nonsense", 80))


def test_the_newest_readable_launch_is_used(store: Revisions) -> None:
    assert teardown.launch_of(store) == {}
    store.write("aaaa", {"launch.json": json.dumps({"rank": 1})}, {}, ME)
    store.write("bbbb", {"launch.json": "{"}, {}, ME)
    store.activate("bbbb")
    assert teardown.launch_of(store) == {"rank": 1}


def test_mounts_below(tmp_path: pathlib.Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/mountinfo").write_text("1 0 0:1 / /a/b\\040c rw - ext4 x rw\n2 0 0:1 / /a/bc rw - ext4 x rw\nbroken\n")
    assert mounts.below(["/a/b c"], str(tmp_path)) == ["/a/b c"] and mounts.below(["/a"], str(tmp_path)) == ["/a/b c", "/a/bc"]
    assert mounts.below(["/a/b"], str(tmp_path)) == []
