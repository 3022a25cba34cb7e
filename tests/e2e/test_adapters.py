# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Adapters that a deploy fetches to every rank: from the controller and from a server that breaks; and what is refused."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable

import fleet
import loopback
import pytest
from conftest import sim_profile
from test_simulated_replica import recap, request, with_profile

MakeFleet = Callable[..., fleet.Fleet]
TOKEN = "t0ken-of-the-server"
WEIGHTS = os.urandom(400_000)


def adapter(folder: pathlib.Path, rank: int = 16) -> pathlib.Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank}))
    (folder / "adapter_model.safetensors").write_bytes(WEIGHTS)
    return folder


def archived(folder: pathlib.Path) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        archive.add(folder, "x")
    return stream.getvalue()


def removed(hosts: fleet.Fleet, place: pathlib.Path, *words: str) -> subprocess.CompletedProcess[str]:
    arguments = {"path": str(place), "state": "absent", "replica_root": str(hosts.root("node-a"))}
    program = str(pathlib.Path(sys.executable).parent / "ansible")
    command = [program, "-i", str(hosts.inventory), "node-a", "-m", "rankzero.inference.model_files", "-a", json.dumps(arguments), *words]
    return subprocess.run(command, cwd=fleet.ROOT, env=fleet.ansible_environment(), capture_output=True, text=True, timeout=60, check=False)


def test_adapters_are_fetched_to_every_rank_and_listed_in_order(make_fleet: MakeFleet, model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    hosts = make_fleet(["node-a", "node-b"], gpus=2, replica_model_token=TOKEN)
    source, content = adapter(tmp_path / "fix"), archived(adapter(tmp_path / "sql"))
    digest = hashlib.sha256(content).hexdigest()
    answer = loopback.Request.send_part
    # The hosts of a fleet share the machine's file system, as hosts with shared storage do: one fetches, and the other finds it there.
    places = {name: tmp_path / "adapters" / name for name in ("sql-3", "fix-1")}
    with loopback.serving(lambda asked: answer(asked, content, most=150_000)) as server:
        adapters = [
            {"name": "sql", "path": str(places["sql-3"]), "source": server.url("/sql.tar.gz"), "sha256": digest},
            {"name": "fix", "path": str(places["fix-1"]), "source": str(source)},
        ]
        extra = with_profile(hosts, sim_profile(hosts, model, nodes=2, adapters=adapters))
        checked = hosts.run("deploy_replica", "--check", extra=extra)
        assert checked.returncode == 0 and "The deploy fetches it, and plans again with it" in checked.stdout and not places["sql-3"].exists(), checked.stdout
        first = hosts.run("deploy_replica", "-vvv", extra=extra)
        assert first.returncode == 0, first.stdout + first.stderr
        assert all(headers["Authorization"] == f"Bearer {TOKEN}" for _path, headers in server.seen) and len(server.seen) >= 3
        assert TOKEN not in first.stdout + first.stderr
    for place in places.values():
        assert (place / "adapter_model.safetensors").read_bytes() == WEIGHTS
    assert sorted(os.listdir(tmp_path / "adapters")) == ["fix-1", "sql-3"]
    launch = json.loads((hosts.root("node-a") / "etc/rankzero/e2e/current/launch.json").read_text())
    assert [one["id"] for one in request(launch["ready"]["url"], "/v1/models")[1]["data"]] == ["tiny", "sql", "fix"]

    second = hosts.run("deploy_replica", extra=extra)  # the server is gone: nothing is asked of it
    assert second.returncode == 0 and recap(second.stdout, "node-a")["changed"] == recap(second.stdout, "node-b")["changed"] == 0, second.stdout

    (places["fix-1"] / "adapter_model.safetensors").write_bytes(WEIGHTS[:-1] + b"x")
    changed = hosts.run("deploy_replica", extra=extra)
    told = " ".join((changed.stdout + changed.stderr).split())
    assert changed.returncode != 0 and "files that were changed after they were fetched" in told and request(launch["ready"]["url"], "/health")[0] == 200


def test_a_rotation_fetches_what_is_gone_before_it_restarts_ranks(make_fleet: MakeFleet, model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    hosts = make_fleet(["node-a"], gpus=2)
    source, place = adapter(tmp_path / "fix"), tmp_path / "adapters/fix-1"
    profile = sim_profile(hosts, model, adapters=[{"name": "fix", "path": str(place), "source": str(source)}])
    first = hosts.run("deploy_replica", extra=with_profile(hosts, profile, replica_api_key="old-key-0123456789"))
    assert first.returncode == 0, first.stdout + first.stderr
    shutil.rmtree(place)
    rotated = hosts.run("rotate_api_key", extra=with_profile(hosts, profile, replica_api_key="new-key-0123456789"))
    assert rotated.returncode == 0 and (place / "adapter_config.json").exists(), rotated.stdout + rotated.stderr


def test_adapters_go_to_the_chosen_ranks_only_and_not_for_a_refused_plan(make_fleet: MakeFleet, model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    hosts = make_fleet(["node-a", "node-b", "node-c"], gpus=2)
    source, place = adapter(tmp_path / "fix"), tmp_path / "adapters/fix-1"
    adapters = [{"name": "fix", "path": str(place), "source": str(source)}]
    refused = hosts.run("deploy_replica", extra=with_profile(hosts, sim_profile(hosts, model, nodes=4, adapters=adapters)))
    assert refused.returncode != 0 and "nothing was changed" in refused.stdout and not place.parent.exists(), refused.stdout
    extra = with_profile(hosts, sim_profile(hosts, model, nodes=2, adapters=adapters))
    checked = hosts.run("deploy_replica", "--check", extra=extra)
    assert [recap(checked.stdout, name)["changed"] > 0 for name in ("node-a", "node-b", "node-c")] == [True, True, False], checked.stdout
    deployed = hosts.run("deploy_replica", extra=extra)
    assert deployed.returncode == 0 and recap(deployed.stdout, "node-c")["changed"] == 0, deployed.stdout + deployed.stderr
    again = hosts.run("deploy_replica", extra=extra)
    assert again.returncode == 0 and "fetch" not in again.stdout.lower(), again.stdout

    used = removed(hosts, place)
    assert used.returncode != 0 and "in use by e2e" in used.stdout and place.is_dir(), used.stdout
    assert hosts.run("remove_replica", extra=extra).returncode == 0
    would, gone, nothing = removed(hosts, place, "--check"), removed(hosts, place), removed(hosts, place)
    assert "CHANGED" in would.stdout and "CHANGED" in gone.stdout and "CHANGED" not in nothing.stdout and nothing.returncode == 0, nothing.stdout
    assert os.listdir(place.parent) == []


@pytest.mark.slow
def test_what_cannot_be_fetched_stops_the_deploy_before_anything_is_started(make_fleet: MakeFleet, model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    hosts = make_fleet(["node-a"], gpus=2)
    with loopback.serving(lambda asked: asked.send(b"another file")) as server:
        adapters = [{"name": "sql", "path": str(tmp_path / "adapters/sql"), "source": server.url("/sql.gguf"), "sha256": "0" * 64}]
        done = hosts.run("deploy_replica", extra=with_profile(hosts, sim_profile(hosts, model, nodes=1, adapters=adapters)))
    told = " ".join((done.stdout + done.stderr).split())
    assert done.returncode != 0 and "and %s is wanted: correct sha256" % ("0" * 64) in told
    assert not (hosts.root("node-a") / "etc").exists() and os.listdir(tmp_path / "adapters") == []


def test_a_source_that_was_changed_on_the_controller_is_not_called_converged(make_fleet: MakeFleet, model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    hosts = make_fleet(["node-a"], gpus=2)
    source, place = adapter(tmp_path / "fix"), tmp_path / "adapters/fix-1"
    extra = with_profile(hosts, sim_profile(hosts, model, adapters=[{"name": "fix", "path": str(place), "source": str(source)}]))
    os.mkfifo(source / "fifo")
    (source / "circle").symlink_to(".")
    first = hosts.run("deploy_replica", extra=extra)
    assert first.returncode == 0, first.stdout + first.stderr
    assert sorted(path.name for path in place.iterdir() if not path.name.startswith(".")) == ["adapter_config.json", "adapter_model.safetensors"]
    (source / "adapter_model.safetensors").write_bytes(WEIGHTS[::-1])
    stale = hosts.run("deploy_replica", extra=extra)
    assert stale.returncode != 0 and "Name another path, with the version in it" in stale.stdout, stale.stdout + stale.stderr
    for path in source.iterdir():
        path.unlink()
    source.rmdir()
    gone = hosts.run("deploy_replica", extra=extra)
    assert gone.returncode == 0 and recap(gone.stdout, "node-a")["changed"] == 0, "another controller need not have the source" + gone.stdout


@pytest.mark.parametrize("kind", ["fifo", "nothing", "empty"])
def test_a_source_that_cannot_be_sent(make_fleet: MakeFleet, model: pathlib.Path, tmp_path: pathlib.Path, kind: str) -> None:
    source = tmp_path / kind
    {"fifo": os.mkfifo, "empty": os.mkdir}.get(kind, str)(source)
    hosts = make_fleet(["node-a"], gpus=2)
    adapters = [{"name": "fix", "path": str(tmp_path / "adapters/fix-1"), "source": str(source)}]
    done = hosts.run("deploy_replica", extra=with_profile(hosts, sim_profile(hosts, model, adapters=adapters)), timeout=60)
    told = " ".join((done.stdout + done.stderr).split())
    assert done.returncode != 0 and "nothing was changed" in told and "adapters: seen " in told and f"for {adapters[0]['path']}." in told, told
    assert "Traceback" not in told and not (tmp_path / "adapters").exists()


def test_a_relative_source_counts_from_where_ansible_was_started(make_fleet: MakeFleet, model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    source = adapter(tmp_path / "fix")
    hosts = make_fleet(["node-a"], gpus=2)
    adapters = [{"name": "fix", "path": str(tmp_path / "adapters/fix-1"), "source": os.path.relpath(source, fleet.ROOT)}]
    done = hosts.run("deploy_replica", extra=with_profile(hosts, sim_profile(hosts, model, adapters=adapters)))
    assert done.returncode == 0 and (tmp_path / "adapters/fix-1/adapter_model.safetensors").read_bytes() == WEIGHTS, done.stdout
    wrong = [{**adapters[0], "path": str(tmp_path / "adapters/fix-2"), "sha256": "0" * 64}]
    refused = hosts.run("deploy_replica", extra=with_profile(hosts, sim_profile(hosts, model, adapters=wrong)))
    told = " ".join(refused.stdout.split())
    assert refused.returncode != 0 and "adapters: seen sha256 " in told and f"wanted sha256 {'0' * 64}" in told and "nothing was changed" in told, told
