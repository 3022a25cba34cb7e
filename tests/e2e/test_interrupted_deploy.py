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
from test_lifecycle import NAME, current, extra_for, no_locks, ok, proven, refused, url_of
from test_simulated_replica import request

MakeFleet = Callable[..., fleet.Fleet]
CALLBACKS = pathlib.Path(__file__).resolve().parent / "callbacks"
FAILS = ("--sim-fail", "CUDA out of memory.", "--sim-fail-rank", "1")
AFTER_THE_PROOF = 2
"""Steps that are looked at once all hosts are proven: from then on nothing is written."""


def run_until(hosts: fleet.Fleet, step: int, extra: dict[str, Any]) -> list[str]:
    """Deploy with a controller that dies at this step (0: it does not); the steps that it came to."""
    log = hosts.directory / f"step-{step}"
    log.unlink(missing_ok=True)
    done = hosts.run(
        "deploy_replica",
        "--forks",
        "1",
        extra=extra,
        env={"ANSIBLE_CALLBACK_PLUGINS": str(CALLBACKS), "ANSIBLE_CALLBACKS_ENABLED": "die_at", "DIE_AT": str(step), "DIE_AT_LOG": str(log)},
    )
    assert done.returncode == (-9 if step else 0), done.stdout + done.stderr
    return log.read_text().splitlines()


def steps_of(log: list[str]) -> list[int]:
    """The last step of those that only read, and all from the first that writes to the first ones after the proof."""
    first = next(number for number, line in enumerate(log) if "start: Write and start every rank" in line)
    proven_at = max(number for number, line in enumerate(log) if "ok: Confirm shards hold their GPUs" in line)
    return [int(line.split()[0]) for line in log[first - 1 : proven_at + 1 + AFTER_THE_PROOF]]


def left(hosts: fleet.Fleet) -> list[str]:
    return [str(path) for path in (hosts.directory / "hosts").rglob("*") if "rankzero" in path.parts]


def deploy(hosts: fleet.Fleet, model: pathlib.Path, number: int, *args: str) -> subprocess.CompletedProcess[str]:
    return hosts.run("deploy_replica", extra=extra_for(hosts, model, "--max-model-len", str(number), *args))


@pytest.mark.slow
@pytest.mark.parametrize("again", ["fails", "succeeds"])
def test_a_deploy_that_is_killed_at_any_step_over_a_revision(make_fleet: MakeFleet, model: pathlib.Path, again: str) -> None:
    hosts = make_fleet(["gpu-a", "gpu-b"], gpus=1, replica=NAME)
    steps = steps_of(run_until(hosts, 0, extra_for(hosts, model, "--max-model-len", "2999")))
    apart = []
    for step in steps:
        before = current(hosts)
        told = run_until(hosts, step, extra_for(hosts, model, "--max-model-len", str(3000 + step)))[-1]
        between = current(hosts)
        assert len({*before, *between}) <= 2, f"{told}: {before} {between}"
        apart += [told] if between[0] != between[1] else []
        if step == steps[0]:
            assert between == before and proven(hosts) and no_locks(hosts), f"{told}: so far it has only read"
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
    assert any("start: Write and start every rank on gpu-b" in told for told in apart), f"killed between two hosts: {apart}"


@pytest.mark.slow
def test_a_first_deploy_that_is_killed_at_any_step_and_then_fails_leaves_nothing(make_fleet: MakeFleet, model: pathlib.Path) -> None:
    hosts = make_fleet(["gpu-a", "gpu-b"], gpus=1, replica=NAME)
    steps = steps_of(run_until(hosts, 0, extra_for(hosts, model)))
    ok(hosts.run("remove_replica", extra=extra_for(hosts, model)))
    halves = 0
    for step in steps:
        told = run_until(hosts, step, extra_for(hosts, model))[-1]
        if proven(hosts):
            break  # from here on it has a revision to go back to
        halves += bool(current(hosts)[0]) and not current(hosts)[1]
        output = refused(deploy(hosts, model, 3000 + step, *FAILS))
        assert "Nothing of it was left behind." in output, f"{told}: {output}"
        assert left(hosts) == [] and hosts.marked() == [] and hosts.supervisors() == [], told
    assert halves
