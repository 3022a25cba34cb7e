# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A deploy that is run again repairs what somebody has done to a host meanwhile; requests that name nothing are failures, however they are limited."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import time
from collections.abc import Callable

import fleet
import pytest
from test_lifecycle import NAME, current, extra_for, no_locks, ok, proven, refused, url_of
from test_simulated_replica import recap, request

MakeFleet = Callable[..., fleet.Fleet]
KEY = "repair-key-0123456789"


@pytest.mark.slow
def test_a_shard_without_its_supervisord_is_taken_back(make_fleet: MakeFleet, model: pathlib.Path) -> None:
    """supervisord killed, and its pid file lost: the next deploy, or a restart, has the shard managed again."""
    hosts = make_fleet(["gpu-a", "gpu-b"], gpus=1, replica=NAME)
    extra = extra_for(hosts, model)
    ok(hosts.run("deploy_replica", extra=extra))
    revision = current(hosts)

    for path in hosts.directory.glob("hosts/*/run/rankzero/*/supervisord.pid"):
        path.unlink()
    before = hosts.marked()
    done = hosts.run("deploy_replica", extra=extra)
    assert recap(done.stdout, "gpu-a")["changed"] == 0 and set(before) == set(hosts.marked()), ok(done)
    ok(hosts.run("restart_replica", extra=extra))
    assert len(hosts.supervisors()) == 2 and not set(before) & set(hosts.marked()) and proven(hosts)

    for playbook in ("deploy_replica", "restart_replica"):
        before = hosts.marked()
        for pid in hosts.supervisors():
            os.kill(pid, signal.SIGKILL)
        while hosts.supervisors():
            time.sleep(0.05)
        assert set(hosts.marked()) & set(before), "the shard runs on without it"
        done = hosts.run(playbook, extra=extra)
        ok(done)
        assert playbook == "restart_replica" or recap(done.stdout, "gpu-a")["changed"] > 0
        assert len(hosts.supervisors()) == 2 and not set(before) & set(hosts.marked()) and proven(hosts) and no_locks(hosts)
        assert current(hosts) == revision and request(url_of(hosts), "/v1/models")[0] == 200
    assert recap(hosts.run("deploy_replica", extra=extra).stdout, "gpu-a")["changed"] == 0


@pytest.mark.slow
def test_a_run_that_begins_behind_the_plan_changes_nothing(make_fleet: MakeFleet, model: pathlib.Path) -> None:
    """Without a plan no host has a shard in it: it must not read as one that has to stop."""
    hosts = make_fleet(["gpu-a"], gpus=1, replica=NAME)
    extra = extra_for(hosts, model, nodes=1)
    ok(hosts.run("deploy_replica", extra=extra))
    before = hosts.marked()
    told = refused(hosts.run("deploy_replica", "--start-at-task", "Write and start every rank", extra=extra))
    assert "'__replica_plan' is undefined" in told and hosts.marked() == before and proven(hosts) and no_locks(hosts), told


@pytest.mark.slow
def test_what_lacks_its_model_is_kept_when_a_deploy_fails(make_fleet: MakeFleet, model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """It serves from memory, its file system is gone, and the next deploy fails: the model may come back, and the revision is still there then."""
    hosts = make_fleet(["gpu-a"], gpus=1, replica=NAME)
    mounted, away = pathlib.Path(shutil.copy(model, tmp_path / "mounted.gguf")), tmp_path / "away.gguf"
    ok(hosts.run("deploy_replica", extra=extra_for(hosts, mounted, nodes=1)))
    before = current(hosts)
    mounted.rename(away)
    told = refused(hosts.run("deploy_replica", extra=extra_for(hosts, model, "--sim-fail", "torch.OutOfMemoryError: CUDA out of memory.", nodes=1)))
    assert f"seen revision {before[0]}: it cannot start without {mounted}, where nothing is, wanted a revision that can start, to go back to" in told, told
    assert f"Revision {before[0]}, which was there before, is back, but does not prove itself." in told and current(hosts) == before, told
    away.rename(mounted)
    ok(hosts.run("restart_replica", extra=extra_for(hosts, mounted, nodes=1)))
    assert current(hosts) == before and proven(hosts) and no_locks(hosts)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["content", "mode", "tie"])
def test_a_secret_that_somebody_changed_is_written_again(make_fleet: MakeFleet, model: pathlib.Path, damage: str) -> None:
    hosts = make_fleet(["gpu-a"], gpus=1, replica=NAME, replica_api_key=KEY)
    extra = extra_for(hosts, model, nodes=1)
    ok(hosts.run("deploy_replica", extra=extra))
    secret = hosts.root("gpu-a") / "etc/rankzero" / NAME / "current/secrets" / "api_key"
    other = "other-key-9876543210"
    if damage == "content":
        secret.write_text(other)
    elif damage == "mode":
        secret.chmod(0o644)
    else:
        secret.with_name("stray").write_text(other)
    done = hosts.run("deploy_replica", "--diff", "-vvv", extra=extra)
    output = ok(done)
    assert recap(done.stdout, "gpu-a")["changed"] > 0 and KEY not in output and other not in output
    assert secret.read_text() == KEY and secret.stat().st_mode & 0o777 == 0o600 and not secret.with_name("stray").exists()
    assert request(url_of(hosts), "/v1/models", KEY)[0] == 200 and request(url_of(hosts), "/v1/models", other)[0] == 401
    assert recap(hosts.run("deploy_replica", extra=extra).stdout, "gpu-a")["changed"] == 0


@pytest.mark.slow
def test_requests_that_name_nothing_are_failures(make_fleet: MakeFleet, model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    hosts = make_fleet(["gpu-a", "gpu-b"], gpus=1, replica=NAME)
    extra = extra_for(hosts, model, nodes=1)
    for playbook in ("deploy_replica", "remove_replica", "rollback_replica", "replica_status"):
        typo = hosts.run(playbook, "--limit", "gpu-a", extra={**extra, "replica_name": "lief"})
        told = " ".join((typo.stdout + typo.stderr).split())
        assert typo.returncode != 0 and "there is no group or host 'replica_lief' in the inventory" in told and "PLAY [" not in told, told
    outside = hosts.run("deploy_replica", "--limit", "gpu-b", extra={**extra, "replica_hosts": "gpu-a"})
    assert outside.returncode != 0 and "leaves none of the hosts of 'gpu-a' (gpu-a)" in " ".join(outside.stderr.split()), outside.stderr
    unnamed = hosts.run("undrain_node", "--limit", "gpu-a", extra={"drain_host": "gpu-x"})
    assert unnamed.returncode != 0 and "No host 'gpu-x' in the inventory" in unnamed.stderr
    assert hosts.run("deploy_replica", "--syntax-check").returncode == 0

    empty = tmp_path / "empty"
    empty.write_text("\n")
    unreadable = tmp_path / "directory"
    unreadable.mkdir()
    for path, problem in ((tmp_path / "none", "replica_api_key_file: seen"), (empty, "which is empty"), (unreadable, "replica_api_key_file: seen")):
        told = refused(hosts.run("deploy_replica", extra={**extra, "replica_api_key_file": str(path)}))
        assert problem in told and str(path) in told and "a file on the controller that holds the key" in told and "lookup" not in told.lower(), told
    assert not list((hosts.directory / "hosts").rglob("rankzero"))


@pytest.mark.slow
def test_a_host_that_leaves_the_replica_is_a_part_of_the_way_back_until_the_others_are_proven(make_fleet: MakeFleet, model: pathlib.Path) -> None:
    hosts = make_fleet(["gpu-a", "gpu-b"], gpus=1, replica=NAME)
    ok(hosts.run("deploy_replica", extra=extra_for(hosts, model)))
    before = current(hosts)
    told = refused(hosts.run("deploy_replica", extra=extra_for(hosts, model, "--sim-fail", "CUDA out of memory.", nodes=1)))
    assert f"Revision {before[0]}, which was there before, is back." in told, told
    assert current(hosts) == before and proven(hosts) and no_locks(hosts) and request(url_of(hosts), "/v1/models")[0] == 200
    done = hosts.run("deploy_replica", extra=extra_for(hosts, model, nodes=1))
    ok(done)
    stays, leaves = sorted(hosts.hosts, key=lambda name: not (hosts.root(name) / "etc/rankzero" / NAME).exists())
    assert recap(done.stdout, leaves)["changed"] == 2 and not list(hosts.root(leaves).rglob("rankzero")) and no_locks(hosts)
    assert (hosts.root(stays) / "run/rankzero" / NAME / "ready.json").exists() and len(hosts.supervisors()) == 1
    again = hosts.run("deploy_replica", extra=extra_for(hosts, model, nodes=1))
    assert recap(again.stdout, stays)["changed"] == recap(again.stdout, leaves)["changed"] == 0, again.stdout
