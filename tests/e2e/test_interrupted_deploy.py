# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ansible is killed at every step of a deploy, and then the deploy is run again: one that gets ready, and one that does not.

Hosts have the old revision or the new one until then. Afterwards all have the same one, and it serves; or nothing, where there was nothing proven before.
"""

from __future__ import annotations

import pathlib
import subprocess
from collections.abc import Callable
from typing import Any

import fleet
import pytest
from conftest import free_port
from test_lifecycle import NAME, current, extra_for, no_locks, ok, proven, refused, url_of
from test_simulated_replica import request

MakeFleet = Callable[..., fleet.Fleet]
CALLBACKS = pathlib.Path(__file__).resolve().parent / "callbacks"
FAILS = ("--sim-fail", "CUDA out of memory.", "--sim-fail-rank", "1")
MOST_STEPS = 60


def kill_at(hosts: fleet.Fleet, step: int, extra: dict[str, Any]) -> str | None:
    """Deploy with a controller that dies at this step: what it had come to. None: the deploy was over before."""
    log = hosts.directory / f"step-{step}"
    done = hosts.run(
        "deploy_replica",
        "--forks",
        "1",
        extra=extra,
        env={"ANSIBLE_CALLBACK_PLUGINS": str(CALLBACKS), "ANSIBLE_CALLBACKS_ENABLED": "die_at", "DIE_AT": str(step), "DIE_AT_LOG": str(log)},
    )
    assert done.returncode in (0, -9), done.stdout + done.stderr
    return log.read_text().splitlines()[-1] if done.returncode else None


def left(hosts: fleet.Fleet) -> list[str]:
    return [str(path) for path in (hosts.directory / "hosts").rglob("*") if "rankzero" in path.parts]


def deploy(hosts: fleet.Fleet, model: pathlib.Path, number: int, *args: str) -> subprocess.CompletedProcess[str]:
    return hosts.run("deploy_replica", extra=extra_for(hosts, model, "--max-model-len", str(number), *args))


@pytest.mark.slow
@pytest.mark.parametrize("again", ["fails", "succeeds"])
def test_a_deploy_that_is_killed_at_any_step_over_a_revision(make_fleet: MakeFleet, model: pathlib.Path, again: str) -> None:
    hosts = make_fleet(["gpu-a", "gpu-b"], gpus=1, replica=NAME, replica_leader_port=free_port())
    ok(deploy(hosts, model, 2999))
    seen = []
    for step in range(1, MOST_STEPS):
        before = current(hosts)
        told = kill_at(hosts, step, extra_for(hosts, model, "--max-model-len", str(3000 + step)))
        if told is None:
            break
        between = current(hosts)
        seen.append((told, between))
        assert len({*before, *between}) <= 2, f"{told}: {before} {between}"
        if not any("Write and start" in line for line in (hosts.directory / f"step-{step}").read_text().splitlines()):
            assert between == before and proven(hosts) and no_locks(hosts), f"{told}: it only reads"
            continue
        if again == "succeeds":
            ok(deploy(hosts, model, 3000 + step))
            assert current(hosts)[0] not in before
        else:
            output = refused(deploy(hosts, model, 3000 + step, *FAILS))
            after = current(hosts)
            assert after[0] in (before[0], between[0]), f"{told}: {before} {between} {after}"
            assert f"Revision {after[0]}, which was there before, is back." in output, f"{told}: {output}"
        after = current(hosts)
        assert after[0] == after[1] and proven(hosts) and no_locks(hosts), f"{told}: {after}"
        assert request(url_of(hosts), "/v1/models")[0] == 200, told
    else:
        raise AssertionError("the deploy has more steps than this test looks at")
    assert any(between[0] != between[1] for _told, between in seen), f"no step left the hosts apart: {seen}"
    assert any("ok: Confirm shards hold their GPUs on gpu-b" in told.replace("rankzero.inference.replica : ", "") for told, _between in seen), seen


@pytest.mark.slow
def test_a_first_deploy_that_is_killed_at_any_step_and_then_fails_leaves_nothing(make_fleet: MakeFleet, model: pathlib.Path) -> None:
    hosts = make_fleet(["gpu-a", "gpu-b"], gpus=1, replica=NAME, replica_leader_port=free_port())
    reached = 0
    for step in range(1, MOST_STEPS):
        told = kill_at(hosts, step, extra_for(hosts, model))
        if told is None or proven(hosts):
            break  # from here on it has a revision to go back to
        output = refused(deploy(hosts, model, 3000 + step, *FAILS))
        assert "Nothing of it was left behind." in output, f"{told}: {output}"
        assert left(hosts) == [] and hosts.marked() == [] and hosts.supervisors() == [], told
        reached = step
    assert reached >= 8
