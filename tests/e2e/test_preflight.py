# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The preflight by itself, before a deploy, and beside a running replica: real Ansible, real sockets on loopback, and nothing left behind."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable
from typing import Any

import fleet
import pytest
from conftest import sim_profile

MakeFleet = Callable[..., fleet.Fleet]
REPLICA = "flight"


def left(hosts: fleet.Fleet) -> list[str]:
    """Files and processes of a preflight."""
    found = [str(path) for path in hosts.directory.rglob("*rankzero-preflight*")]
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        try:
            environment = path.read_bytes()
        except OSError:
            continue
        if b"RANKZERO_PREFLIGHT=flight/" in environment and str(hosts.directory).encode() in environment:
            found.append(path.parent.name)
    return found


def variables(hosts: fleet.Fleet, model: pathlib.Path, nodes: int, **more: Any) -> dict[str, Any]:
    return {"replica_name": REPLICA, "replica_profile": {"name": "tiny-sim", **sim_profile(hosts, model, nodes=nodes, gpus=1), "tp": 1, "pp": nodes}, **more}


def test_alone_and_before_a_deploy(make_fleet: MakeFleet, model: pathlib.Path) -> None:
    """Three ranks reach each other; then the same in a deploy; then beside the running replica, whose GPUs and ports are left alone."""
    hosts = make_fleet(["gpu-a", "gpu-b", "gpu-c"], gpus=1, replica=REPLICA)
    alone = hosts.run("preflight", extra=variables(hosts, model, 3))
    output = alone.stdout + alone.stderr
    assert alone.returncode == 0 and "Preflight of replica flight: passed" in output, output
    rows = [line.split() for line in output.splitlines() if re.match(r"\s+\d\s+gpu-[abc]\s+lo\s+\d+ of \d+", line)]
    # gpu-a tries the one port of each follower; they try rank 0's for the ranks, the tie and the rendezvous.
    assert [row[3:6] for row in rows] == [["2", "of", "2"], ["4", "of", "4"], ["4", "of", "4"]], output
    assert "No all-reduce was tried" in output and "torch" in output and not re.search("changed=[1-9]", output)
    assert left(hosts) == [] and not list(hosts.directory.rglob("etc/rankzero"))

    deployed = hosts.run("deploy_replica", extra=variables(hosts, model, 3, replica_preflight=True))
    assert deployed.returncode == 0 and "Preflight of replica flight: passed" in deployed.stdout, deployed.stdout + deployed.stderr
    running = hosts.marked()
    beside = hosts.run("preflight", extra=variables(hosts, model, 3))
    assert beside.returncode == 0, beside.stdout + beside.stderr
    assert "GPU 0 of gpu-a is in use by the running replica" in beside.stdout and "2 of 2" in beside.stdout
    assert hosts.marked() == running and left(hosts) == []


@pytest.mark.slow
def test_a_single_node_and_check_mode(make_fleet: MakeFleet, model: pathlib.Path) -> None:
    hosts = make_fleet(["gpu-a"], gpus=1, replica=REPLICA)
    single = hosts.run("preflight", extra=variables(hosts, model, 1))
    assert single.returncode == 0 and "A single node has no network between ranks" in single.stdout, single.stdout + single.stderr
    checked = hosts.run("deploy_replica", "--check", extra=variables(hosts, model, 1, replica_preflight=True))
    assert checked.returncode == 0 and "Preflight of" not in checked.stdout and left(hosts) == [], checked.stdout + checked.stderr
