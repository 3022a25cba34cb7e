# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""diagnose.yml at every stage of a replica's life: whatever is gone or silent, it ends well, names the rank that it is about, and tells no secret."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from typing import Any

import fleet
import pytest
from conftest import sim_profile

MakeFleet = Callable[..., fleet.Fleet]
REPLICA = "ill"
KEY = "k3y-'quoted'-and-\"more\""


class Patient:
    """Two hosts with a replica, and what diagnose.yml says of it."""

    def __init__(self, hosts: fleet.Fleet, model: pathlib.Path) -> None:
        self.hosts, self.model = hosts, model
        self.directory = hosts.directory / "diagnosis"

    def variables(self, *args: str, **more: Any) -> dict[str, Any]:
        profile = {"name": "tiny-sim", **sim_profile(self.hosts, self.model, *args, nodes=2)}
        profile["env"]["PROXY_PASSPHRASE"] = "hf_s3cr3t-t0ken"
        return {"replica_name": REPLICA, "replica_profile": profile, "replica_api_key": KEY, "diagnosis_dir": str(self.directory), **more}

    def deploy(self, *args: str) -> subprocess.CompletedProcess[str]:
        return self.hosts.run("deploy_replica", extra=self.variables(*args))

    def diagnose(self, **more: Any) -> tuple[str, dict[str, str]]:
        """(what was shown, the archive's files); it never fails, and neither holds a secret."""
        shutil.rmtree(self.directory, ignore_errors=True)
        done = self.hosts.run("diagnose", extra=self.variables(**more))
        output = done.stdout + done.stderr
        assert done.returncode == 0, output
        assert not re.search(r"changed=[1-9]", output), output
        path = pathlib.Path(re.search(r"^Archive: (\S+)$", output, re.MULTILINE).group(1))  # type: ignore[union-attr]
        assert path.stat().st_mode & 0o777 == 0o600 and re.fullmatch(r"ill-\d{8}T\d{6}Z\.tar\.gz", path.name)
        with tarfile.open(path) as archive:
            files = {member.name.split("/", 1)[1]: archive.extractfile(member).read().decode() for member in archive.getmembers()}  # type: ignore[union-attr]
        everything = output + "".join(files.values())
        tie = [key.read_text() for key in self.hosts.directory.rglob("secrets/tie_key")]
        for secret in (KEY, json.dumps(KEY)[1:-1], repr(KEY)[1:-1], "hf_s3cr3t-t0ken", *tie):
            assert secret not in everything, f"{secret} is shown"
        return output, files

    def state(self, host: str) -> dict[str, Any]:
        return json.loads((self.hosts.root(host) / "run/rankzero/ill/state.json").read_text())  # type: ignore[no-any-return]

    def engine(self, host: str) -> int:
        return int(self.state(host)["launches"][-1]["pid"])

    def until(self, host: str, stage: str, seconds: float = 40) -> None:
        deadline = time.monotonic() + seconds
        while self.state(host)["stage"] != stage:
            assert time.monotonic() < deadline, self.state(host)
            time.sleep(0.2)


@pytest.fixture
def patient(make_fleet: MakeFleet, model: pathlib.Path) -> Patient:
    return Patient(make_fleet(["gpu-a", "gpu-b"], gpus=2, replica=REPLICA), model)


def row(output: str, host: str) -> str:
    return " ".join(next(line for line in output.splitlines() if re.match(rf"\s+\S+\s+{host}\s", line)).split())


@pytest.mark.slow
def test_a_refused_start_and_silent_hosts(patient: Patient) -> None:
    """Somebody takes a GPU of rank 1 while the replica runs, and its engine dies: every start is refused, and the other rank only waits."""
    hosts = patient.hosts
    done = patient.deploy()
    assert done.returncode == 0, done.stdout + done.stderr
    output, files = patient.diagnose()
    assert "Nothing is wrong now: all 2 ranks are ready." in output
    assert row(output, "gpu-a").startswith("0 gpu-a ready active 0 48000/1024, 48000/1024 2 of 2") and "tied" in row(output, "gpu-b")
    assert set(files) >= {"diagnosis.txt", "diagnosis.json", "plan.json"} | {
        f"hosts/{host}/{name}" for host in hosts.hosts for name in ("facts.json", "launch.json", "state.json", "look.json", "shard.log")
    }
    assert json.loads(files["plan.json"])["shards"].keys() == {"gpu-a", "gpu-b"} and json.loads(files["hosts/gpu-a/launch.json"])["rank"] == 0

    foreign = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    try:
        hosts.write_state("gpu-b", f"proc gpu=1 pid={foreign.pid} mib=7000")
        os.kill(patient.engine("gpu-b"), signal.SIGKILL)
        patient.until("gpu-b", "failed")
        output, _files = patient.diagnose()
        assert re.search(rf"Likely cause: rank 1 \(gpu-b\): it refused to start: .*{foreign.pid}", output), output
        assert "7000 MiB" in output and row(output, "gpu-b").startswith("1 gpu-b failed inactive")
    finally:
        foreign.kill()
        foreign.wait()

    shutil.rmtree(hosts.root("gpu-a") / "etc/rankzero")
    inventory = json.loads(hosts.inventory.read_text())
    inventory["all"]["children"]["replica_ill"]["hosts"]["gpu-b"].update(ansible_connection="ssh", ansible_host="127.0.0.1", ansible_port=1)
    hosts.inventory.write_text(json.dumps(inventory))
    output, files = patient.diagnose()
    assert row(output, "gpu-b").split()[2] == "unreachable" and "rank 0" not in output.split("Likely cause:")[1].split(":")[0], output
    assert "hosts/gpu-b/problem.txt" in files and "hosts/gpu-a/state.json" in files


@pytest.mark.slow
def test_the_rank_with_a_cause_of_its_own_is_named_before_the_others(patient: Patient) -> None:
    """Rank 1 runs out of memory again and again; rank 0 only says that the other is lost. It is seen while it loads, restarts, and has given up."""
    done = patient.deploy()
    assert done.returncode == 0, done.stdout + done.stderr
    current = patient.hosts.root("gpu-b") / "etc/rankzero/ill/current/launch.json"
    launch = json.loads(current.read_text())
    launch["launches"][-1]["args"] += ["--sim-fail", f"torch.OutOfMemoryError: CUDA out of memory. {KEY}"]
    current.write_text(json.dumps(launch))
    for pid in patient.hosts.supervisors():
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 30
    while patient.hosts.supervisors() and time.monotonic() < deadline:
        time.sleep(0.1)
    output, _files = patient.diagnose()
    assert "Likely cause: rank 0 (gpu-a)" in output or "Likely cause: rank 1 (gpu-b)" in output, output
    supervisord = pathlib.Path(sys.executable).parent / "supervisord"
    for host in ("gpu-a", "gpu-b"):
        environment = {**os.environ, **patient.hosts.environment(host)}
        subprocess.run(
            [str(supervisord), "-c", str(patient.hosts.root(host) / "etc/rankzero/ill/supervisord.conf")], env=environment, check=True, capture_output=True
        )
    patient.until("gpu-b", "failed", 90)
    output, files = patient.diagnose()
    assert re.search(r"Likely cause: rank 1 \(gpu-b\): A GPU ran out of memory. Its log: .*OutOfMemoryError: CUDA out of memory. \*{8}", output), output
    assert "Next: Check with nvidia-smi" in output and "out of memory" in files["hosts/gpu-b/shard.log"]


@pytest.mark.slow
def test_a_replica_that_never_was(patient: Patient) -> None:
    output, files = patient.diagnose()
    assert "Replica ill is on none of these hosts" in output and "Next: ansible-playbook rankzero.inference.deploy_replica -e replica_name=ill" in output
    assert "hosts/gpu-a/facts.json" in files
    output, files = patient.diagnose(replica_profile={"engine": "no-such"}, replica_api_key_file="/no/such/file")
    assert "no-such" in files["plan.json"], "a plan that is refused is a part of the archive"
