# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Removal that sees for itself that all is gone: memory, ports, processes, files; also of half a replica, and of nobody else's things."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import fleet
import pytest
from conftest import sim_profile

MakeFleet = Callable[..., fleet.Fleet]
REPLICA = "gone"
WAIT = """import json, pathlib, sys
from ansible_collections.rankzero.inference.plugins.module_utils import teardown
from ansible_collections.rankzero.inference.plugins.module_utils.revisions import Revisions
store = Revisions(sys.argv[1], "gone")
before = teardown.look(store)
pathlib.Path(sys.argv[2]).write_text(json.dumps(sorted(before.processes)))
sys.stdin.readline()
print(json.dumps(teardown.wait(store, before, lambda: None, float(sys.argv[3]))))
"""


def deploy(hosts: fleet.Fleet, model: pathlib.Path, *args: str, **more: Any) -> subprocess.CompletedProcess[str]:
    profile = {"name": "tiny-sim", **sim_profile(hosts, model, *args, **more)}
    return hosts.run("deploy_replica", extra={"replica_name": REPLICA, "replica_profile": profile, "diagnosis_dir": str(hosts.directory / "diagnosis")})


def remove(hosts: fleet.Fleet, name: str = REPLICA) -> subprocess.CompletedProcess[str]:
    return hosts.run("remove_replica", "-v", extra={"replica_name": name, "replica_hosts": "gpu-a"})


def remains(hosts: fleet.Fleet) -> list[str]:
    return [str(path) for path in (hosts.directory / "hosts").rglob("*") if "rankzero" in path.parts]


def changed(output: str, host: str) -> int:
    return int(re.search(rf"^{re.escape(host)}\s+: ok=\d+\s+changed=(\d+)", output, re.MULTILINE).group(1))  # type: ignore[union-attr]


def removed(hosts: fleet.Fleet, host: str = "gpu-a") -> dict[str, Any]:
    """Remove, and what the module said (callback json would hide the rest)."""
    done = remove(hosts)
    assert done.returncode == 0, done.stdout + done.stderr
    assert changed(done.stdout, host) == 1 and hosts.marked() == hosts.supervisors() == [] and remains(hosts) == [], done.stdout
    again = remove(hosts)
    assert again.returncode == 0 and changed(again.stdout, host) == 0 and "remote_calls: 0" in again.stdout, again.stdout
    return dict(re.findall(r"^\s+(gpu_memory|ports|processes|files): (\w+)$", done.stdout, re.MULTILINE))


@pytest.mark.slow
def test_removal_is_seen_and_needs_neither_engine_nor_model(make_fleet: MakeFleet, model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    own = tmp_path / "model.gguf"
    shutil.copy(model, own)
    hosts = make_fleet(["gpu-a"], gpus=2, replica=REPLICA)
    done = deploy(hosts, own)
    assert done.returncode == 0, done.stdout + done.stderr
    own.unlink()
    for program in hosts.root("gpu-a").glob("etc/rankzero/*/revisions/*/sim_engine.py"):
        program.unlink()
    assert removed(hosts) == {"gpu_memory": "true", "ports": "true", "processes": "true", "files": "true"}


@pytest.mark.slow
@pytest.mark.parametrize("gone", ["etc", "run", "supervisord"])
def test_half_a_replica_is_found_and_removed(make_fleet: MakeFleet, model: pathlib.Path, gone: str) -> None:
    """Without its configuration only processes and directories tell of it; without run/ no pid file leads to supervisord; killed, that leaves run_shard.py."""
    hosts = make_fleet(["gpu-a"], gpus=2, replica=REPLICA)
    done = deploy(hosts, model)
    assert done.returncode == 0, done.stdout + done.stderr
    if gone == "supervisord":
        os.kill(hosts.supervisors()[0], signal.SIGKILL)
    else:
        shutil.rmtree(hosts.root("gpu-a") / gone / "rankzero")
    assert removed(hosts)["processes"] == "true"


def wait_in(hosts: fleet.Fleet, tmp_path: pathlib.Path, seconds: float) -> tuple[subprocess.Popen[str], list[int]]:
    """A look at gpu-a before the removal, by a process that waits for a line before it looks again."""
    environment = {**os.environ, **hosts.environment("gpu-a"), "PYTHONPATH": str(fleet.ROOT / ".collections")}
    told = tmp_path / "before"
    one = subprocess.Popen(
        [sys.executable, "-c", WAIT, str(hosts.root("gpu-a")), str(told), str(seconds)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 30
    while not (told.exists() and told.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return one, json.loads(told.read_text())


@pytest.mark.slow
def test_what_stays_is_named(make_fleet: MakeFleet, model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The driver still lists memory of a process that has ended, and a port of the shard's is not free: both are failures that name them."""
    hosts = make_fleet(["gpu-a"], gpus=2, replica=REPLICA)
    done = deploy(hosts, model)
    assert done.returncode == 0, done.stdout + done.stderr
    launch = json.loads((hosts.root("gpu-a") / "etc/rankzero/gone/current/launch.json").read_text())
    endpoint = launch["listen_ports"][0]
    looking, before = wait_in(hosts, tmp_path, 1)
    assert set(hosts.marked()) <= set(before)
    engine = max(hosts.marked())
    assert remove(hosts).returncode == 0
    hosts.write_state("gpu-a", f"proc gpu=1 pid={engine} mib=7000", "proc gpu=0 pid=4000001 mib=900")
    with socket.socket() as squatter:
        squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        squatter.bind((endpoint["address"], endpoint["port"]))
        squatter.listen()
        answer = json.loads(looking.communicate("\n", timeout=30)[0])
    assert answer["gpu_memory"] == [False, f"pid {engine} still holds 7000 MiB on GPU 1 ({hosts.hosts['gpu-a'].uuid(1)})"]
    assert answer["ports"] == [
        False,
        f"port {endpoint['port']} at {endpoint['address']} is held by pid {os.getpid()} ({pathlib.Path('/proc/self/comm').read_text().strip()})",
    ]
    assert answer["processes"][0] is True and answer["files"][0] is True


@pytest.mark.slow
def test_a_port_that_was_always_a_strangers_is_only_told(make_fleet: MakeFleet, model: pathlib.Path) -> None:
    """Its port taken by somebody else is why a first deploy fails; undoing it does not fail as well, and nobody is ended."""
    hosts = make_fleet(["gpu-a"], gpus=2, replica=REPLICA)
    address, port = hosts.hosts["gpu-a"].address, json.loads(hosts.inventory.read_text())["all"]["children"]["replica_gone"]["vars"]["replica_http_port"]
    done = deploy(hosts, model)
    assert done.returncode == 0, done.stdout + done.stderr
    for pid in hosts.supervisors():
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 20
    while (hosts.supervisors() or hosts.marked()) and time.monotonic() < deadline:
        time.sleep(0.1)
    with socket.socket() as squatter:
        squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        squatter.bind((address, port))
        squatter.listen()
        gone = remove(hosts)
        assert gone.returncode == 0, gone.stdout + gone.stderr
        told = " ".join(gone.stdout.split())
        assert f"port {port} at {address} is held by pid {os.getpid()}" in told and "which is not of this replica" in told


@pytest.mark.slow
def test_the_log_of_a_first_deploy_that_failed_is_kept(make_fleet: MakeFleet, model: pathlib.Path) -> None:
    """Everything is removed from the hosts, and the failure names a file with the last lines, in which the key is masked."""
    key = "k3y-'quoted'-and-\"more\""
    hosts = make_fleet(["gpu-a"], gpus=2, replica=REPLICA, replica_api_key=key)
    done = deploy(hosts, model, "--sim-fail", f"torch.OutOfMemoryError: CUDA out of memory. key={key} repr={key!r}")
    output = done.stdout + done.stderr
    assert done.returncode == 2 and remains(hosts) == [], output
    path = pathlib.Path(re.search(r"log of rank 0 \(gpu-a\): (\S+)", output).group(1))  # type: ignore[union-attr]
    assert f"next: read {path} on the controller" in " ".join(output.split()) and "tail -n 200" not in output
    text = path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600 and "CUDA out of memory" in text and "********" in text
    assert key not in text and repr(key)[1:-1] not in text and key not in output


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_what_is_mounted_below_its_directories_is_never_removed(make_fleet: MakeFleet, model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Somebody mounted models into the service's home: nothing is stopped or removed until that is undone."""
    hosts = make_fleet(["gpu-a"], gpus=0, replica=REPLICA)
    home = hosts.root("gpu-a") / "var/lib/rankzero/gone/models"
    home.mkdir(parents=True)
    models = tmp_path / "models"
    models.mkdir()
    (models / "weights").write_text("precious")
    if subprocess.run(["mount", "--bind", str(models), str(home)], capture_output=True, check=False).returncode:
        pytest.skip("mount is not permitted here")
    try:
        done = remove(hosts)
        assert done.returncode == 2 and f"{home} is a mount point" in done.stdout + done.stderr, done.stdout + done.stderr
        assert (models / "weights").read_text() == "precious"
    finally:
        subprocess.run(["umount", str(home)], check=True)
    assert remove(hosts).returncode == 0 and remains(hosts) == []
    assert (models / "weights").read_text() == "precious"


@pytest.mark.slow
def test_a_name_that_is_none_removes_nothing(make_fleet: MakeFleet) -> None:
    hosts = make_fleet(["gpu-a"], replica=REPLICA)
    (hosts.root("gpu-a") / "etc/rankzero").mkdir(parents=True)
    done = remove(hosts, "..")
    assert done.returncode == 2 and "no name of a replica" in done.stdout + done.stderr
    assert (hosts.root("gpu-a") / "etc/rankzero").is_dir()
