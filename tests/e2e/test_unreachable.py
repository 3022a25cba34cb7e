# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Hosts that stop answering while a failed run is undone: whoever is left tells the report, and lets other runs go on."""

from __future__ import annotations

import pathlib
import subprocess
from collections.abc import Callable

import fleet
import pytest
from conftest import sim_profile
from test_simulated_replica import with_profile

MakeFleet = Callable[..., fleet.Fleet]
HERE = pathlib.Path(__file__).resolve().parent


def breaking(hosts: fleet.Fleet, directory: pathlib.Path, task: str, host: str) -> dict[str, str]:
    """The environment of a run that loses the host when the task begins."""
    hosts.inventory.write_text(hosts.inventory.read_text().replace('"ansible_connection": "local"', '"ansible_connection": "breaking"'))
    broken = directory / "broken"
    broken.mkdir()
    return {
        "ANSIBLE_CALLBACK_PLUGINS": str(HERE / "callbacks"),
        "ANSIBLE_CALLBACKS_ENABLED": "break_at",
        "ANSIBLE_CONNECTION_PLUGINS": str(HERE / "connections"),
        "BREAK_AT": "%s on %s" % (task, host),
        "BROKEN_HOSTS": str(broken),
        "DIE_AT": "0",  # the other callback is loaded too
        "DIE_AT_LOG": str(directory / "steps"),
    }


def whole_report(done: subprocess.CompletedProcess[str], head: str, host: str) -> str:
    """The failed task of the host that tells everything."""
    told = done.stdout + done.stderr
    assert done.returncode != 0 and "the cable was pulled" in told, told
    return next(text for text in told.split("fatal: ") if text.startswith("[%s]: FAILED" % host) and head in text).split("PLAY RECAP")[0]


@pytest.mark.parametrize(("task", "host"), [("Restore what was there before", "node-b"), ("Let other runs change the replica", "node-a")])
def test_the_report_is_told_whoever_is_lost(make_fleet: MakeFleet, model: pathlib.Path, tmp_path: pathlib.Path, task: str, host: str) -> None:
    hosts = make_fleet(["node-a", "node-b"], gpus=2)
    environment = breaking(hosts, tmp_path, task, host)
    profile = sim_profile(hosts, model, "--sim-fail", "CUDA out of memory.", "--sim-fail-rank", "1", nodes=2)
    done = hosts.run("deploy_replica", extra=with_profile(hosts, profile), env=environment)
    report = whole_report(done, "Replica e2e was not deployed. ", "node-b" if host == "node-a" else "node-a")
    assert "  log of rank" in report, report
    if task.startswith("Restore"):
        assert "Not all of it could be removed" in report and "rank 1 (node-b): it cannot be reached" in report, report


def test_a_restart_says_which_host_it_lost(make_fleet: MakeFleet, model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    hosts = make_fleet(["node-a", "node-b"], gpus=2)
    extra = with_profile(hosts, sim_profile(hosts, model, nodes=2))
    assert hosts.run("deploy_replica", extra=extra).returncode == 0
    done = hosts.run("restart_replica", extra=extra, env=breaking(hosts, tmp_path, "Start every rank", "node-a"))
    report = whole_report(done, "Replica e2e was not restarted. It does not serve.", "node-b")
    assert "rank 0 (node-a): it cannot be reached" in report, report
