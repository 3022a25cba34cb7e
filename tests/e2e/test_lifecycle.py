# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What operators do with a replica that is there: roll it back, restart it, drain a host, rotate a key; and two runs at once, and runs that are killed."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import fleet
import pytest
from conftest import free_port, sim_profile
from test_simulated_replica import recap, request

MakeFleet = Callable[..., fleet.Fleet]
NAME = "life"


def extra_for(hosts: fleet.Fleet, model: pathlib.Path, *args: str, nodes: int = 2, **more: Any) -> dict[str, Any]:
    return {"replica_name": NAME, "replica_profile": {"name": "tiny-sim", **sim_profile(hosts, model, *args, nodes=nodes, gpus=1)}, **more}


def current(hosts: fleet.Fleet, replica: str = NAME) -> list[str | None]:
    """The revision that each host has, and proof that it is whole."""
    found: list[str | None] = []
    for name in hosts.hosts:
        link = hosts.root(name) / "etc/rankzero" / replica / "current"
        found.append(pathlib.Path(os.readlink(link)).name if link.is_symlink() else None)
        if found[-1]:
            assert json.loads((link / "launch.json").read_text())["fingerprint"] == found[-1] and (link / "run_shard.py").exists()
    return found


def url_of(hosts: fleet.Fleet, replica: str = NAME) -> str:
    name = next(iter(hosts.hosts))
    return str(json.loads((hosts.root(name) / "etc/rankzero" / replica / "current/launch.json").read_text())["ready"]["url"])


def lock_file(hosts: fleet.Fleet, name: str, replica: str = NAME) -> pathlib.Path:
    return hosts.root(name) / "run/rankzero" / f"{replica}.lock"


def no_locks(hosts: fleet.Fleet) -> bool:
    """Whether no run holds anybody up: what a run leaves behind says that it is done."""
    return all(json.loads(path.read_text())["done"] for path in hosts.directory.glob("hosts/*/run/rankzero/*.lock"))


def proven(hosts: fleet.Fleet, replica: str = NAME) -> bool:
    return all((hosts.root(name) / "run/rankzero" / replica / "ready.json").exists() for name in hosts.hosts)


def start(hosts: fleet.Fleet, playbook: str, extra: dict[str, Any], *arguments: str) -> subprocess.Popen[str]:
    """A run in a process group of its own, as Fleet.run makes one, to be killed or raced."""
    command = [
        str(pathlib.Path(sys.executable).parent / "ansible-playbook"),
        "-i",
        str(hosts.inventory),
        str(fleet.PLAYBOOKS / f"{playbook}.yml"),
        "-e",
        json.dumps({"replica_become": False, **extra}),
        *arguments,
    ]
    return subprocess.Popen(
        command, cwd=fleet.ROOT, env=fleet.ansible_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def kill_controller(hosts: fleet.Fleet, run: subprocess.Popen[str]) -> None:
    """Ansible with its workers, which have process groups of their own: as when the controller loses power. What they started on hosts goes on."""
    run.kill()
    run.wait()
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if str(hosts.inventory).encode() in words and any(word.endswith(b"/ansible-playbook") for word in words):
            os.kill(int(path.parent.name), signal.SIGKILL)


def until(condition: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def ok(done: subprocess.CompletedProcess[str]) -> str:
    """What it said, in one line: Ansible folds long messages."""
    assert done.returncode == 0, done.stdout + done.stderr
    return " ".join(done.stdout.split())


def refused(done: subprocess.CompletedProcess[str]) -> str:
    output = done.stdout + done.stderr
    assert done.returncode == 2, output
    return " ".join(output.split())


def record_facts(hosts: fleet.Fleet, model: pathlib.Path) -> None:
    """Put the node facts of all hosts into the inventory, where a run with replica_gather=false takes them from."""
    play = [
        {
            "hosts": "all",
            "gather_facts": False,
            "environment": "{{ replica_module_environment }}",
            "tasks": [
                {"rankzero.inference.node_facts": {"replica_root": "{{ replica_root }}", "model_paths": ["{{ model }}"]}},
                {
                    "ansible.builtin.copy": {
                        "content": "{{ ansible_facts.inference_node | to_json }}",
                        "dest": f"{hosts.directory}/{{{{ inventory_hostname }}}}.facts",
                        "mode": "0600",
                    }
                },
            ],
        }
    ]
    playbook = hosts.directory / "gather.json"
    playbook.write_text(json.dumps(play))
    ok(
        subprocess.run(
            [str(pathlib.Path(sys.executable).parent / "ansible-playbook"), "-i", str(hosts.inventory), str(playbook), "-e", f"model={model}"],
            cwd=fleet.ROOT,
            env=fleet.ansible_environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    )
    inventory = json.loads(hosts.inventory.read_text())
    for name, entry in inventory["all"]["children"][hosts.group]["hosts"].items():
        entry["inference_node"] = json.loads((hosts.directory / f"{name}.facts").read_text())
    hosts.inventory.write_text(json.dumps(inventory))


def runner(hosts: fleet.Fleet, model: pathlib.Path, outputs: list[str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(playbook: str, *args: str, **more: Any) -> subprocess.CompletedProcess[str]:
        done = hosts.run(playbook, extra=extra_for(hosts, model, *args, **more))
        outputs.append(done.stdout + done.stderr)
        return done

    return run


@pytest.mark.slow
def test_rollback_and_restart(make_fleet: MakeFleet, model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Back and forth between two revisions, and a restart of all ranks; neither stops anything while the model is not there. No run leaves a lock."""
    hosts = make_fleet(["gpu-a", "gpu-b"], gpus=1, replica=NAME)
    mounted = pathlib.Path(shutil.copy(model, tmp_path / "mounted.gguf"))
    run = runner(hosts, mounted, [])
    ok(run("deploy_replica"))
    first = current(hosts)
    ok(run("deploy_replica", "--max-model-len", "2048"))
    second = current(hosts)
    assert first[0] == first[1] != second[0] == second[1] and no_locks(hosts)

    back = ok(run("rollback_replica"))
    assert current(hosts) == first and proven(hosts) and f"It ran {second[0]}" in back and no_locks(hosts)
    assert request(url_of(hosts), "/v1/models")[0] == 200
    ok(run("rollback_replica"))
    assert current(hosts) == second and proven(hosts)

    before = hosts.marked()
    ok(run("restart_replica"))
    assert current(hosts) == second and proven(hosts) and not set(before) & set(hosts.marked()) and no_locks(hosts)

    before = hosts.marked()
    mounted.rename(tmp_path / "unmounted.gguf")
    for playbook in ("restart_replica", "rollback_replica"):
        said = refused(run(playbook))
        assert f"it cannot start without {mounted}, where nothing is" in said and "1. gpu-a: " in said and "2. gpu-b: " in said, said
    assert hosts.marked() == before and proven(hosts) and request(url_of(hosts), "/v1/models")[0] == 200 and no_locks(hosts), "it serves as before"


@pytest.mark.slow
def test_rollbacks_that_cannot_be_and_a_new_key(make_fleet: MakeFleet, model: pathlib.Path) -> None:
    """What cannot be rolled back to is listed or, when it does not get ready, undone. Then a new key: said first, proven, and nowhere to be seen."""
    hosts = make_fleet(["gpu-a", "gpu-b"], gpus=1, replica=NAME)
    old_key, new_key = "old-key-0123456789", "new-key-9876543210"
    outputs: list[str] = []
    run = runner(hosts, model, outputs)
    assert "Deploy it first" in refused(run("rollback_replica"))
    ok(run("deploy_replica", replica_api_key=old_key))
    first = current(hosts)
    only = refused(run("rollback_replica"))
    assert "current %s, previous none, kept: %s" % (first[0], first[0]) in only and "there is nothing to go back to" in only and "FINGERPRINT" not in only
    same = ok(run("rollback_replica", revision=first[0]))
    assert "That is the one which was there before" in same and "second rollback" not in same and current(hosts) == first, same
    ok(run("deploy_replica", "--max-model-len", "2048", replica_api_key=old_key))
    second = current(hosts)
    named = refused(run("rollback_replica", revision="0123456789abcdef"))
    assert (
        "1. gpu-a: " in named
        and "2. gpu-b: " in named
        and "revision 0123456789abcdef, whole, on every rank: it is not there" in named
        and f"kept: {first[0]}, {second[0]}" in named
    )

    for name in hosts.hosts:
        (hosts.root(name) / "etc/rankzero" / NAME / "previous/run_shard.py").write_text("raise SystemExit('broken')\n")
    failed = refused(run("rollback_replica"))
    assert f"was not rolled back. Revision {second[0]}, which was there before, is back." in failed, failed
    assert current(hosts) == second and proven(hosts) and no_locks(hosts)

    rotated = ok(run("rotate_api_key", "--max-model-len", "2048", replica_api_key=new_key))
    said, changed = rotated.index("all 2 rank(s) of replica life restart together"), rotated.index("Write and start every rank")
    assert said < changed and "New key: 200. Old key: 401." in rotated, rotated
    assert request(url_of(hosts), "/v1/models", old_key)[0] == 401 and request(url_of(hosts), "/v1/models", new_key)[0] == 200
    assert not (hosts.root("gpu-b") / "etc/rankzero" / NAME / "current/secrets/api_key").exists(), "the key is the leader's only"
    again = run("rotate_api_key", "--max-model-len", "2048", replica_api_key=new_key)
    assert "New key" not in again.stdout and "The key, which is not new: 200. Old key: 401." in ok(again)
    assert "Nothing to do" in ok(again) and recap(again.stdout, "gpu-a")["changed"] == 0
    assert "the replica that is deployed has a key (gpu-a)" in refused(run("rotate_api_key", "--max-model-len", "2048", replica_api_key=""))
    told = refused(run("rotate_api_key", "--max-model-len", "2048", replica_api_key="", replica_without_api_key=True))
    assert "There is no new key" in told and request(url_of(hosts), "/v1/models")[0] == 401
    assert all(key not in output for output in outputs for key in (old_key, new_key))
    assert all(len(list((hosts.root(name) / "etc/rankzero" / NAME / "revisions").iterdir())) == 3 for name in hosts.hosts)


@pytest.mark.slow
def test_the_second_of_two_deploys_is_refused(make_fleet: MakeFleet, model: pathlib.Path) -> None:
    """A real second deploy beside the first, while that changes hosts and while it waits for the proof; then the same by another controller's run."""
    hosts = make_fleet(["gpu-a", "gpu-b"], gpus=1, replica=NAME)
    first = start(hosts, "deploy_replica", extra_for(hosts, model, "--sim-load-seconds", "6"))
    try:
        until(lambda: lock_file(hosts, "gpu-a").exists())
        second = refused(hosts.run("deploy_replica", extra=extra_for(hosts, model, "--max-model-len", "4096")))
        assert re.search(r"gpu-[ab].*held by \S+@\S+ since \S+Z, until", second) and "nothing was changed" in second, second
        output = first.communicate(timeout=90)[0]
        assert first.returncode == 0, output
    finally:
        first.kill()
    assert proven(hosts) and no_locks(hosts)
    revision = current(hosts)

    # A run of another controller, of which only its lock is known.
    lock = {
        "schema": 1,
        "owner": "somebody",
        "who": "eve@elsewhere",
        "controller": None,
        "target": None,
        "since": time.time(),
        "boot_id": pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "expires": time.clock_gettime(time.CLOCK_BOOTTIME) + 90,
    }
    lock_file(hosts, "gpu-b").write_text(json.dumps(lock).ljust(2048))
    told = refused(hosts.run("deploy_replica", extra=extra_for(hosts, model, "--max-model-len", "4096")))
    assert "gpu-b: locks.life: seen held by eve@elsewhere" in told and "gpu-a: locks" not in told and current(hosts) == revision

    # It came after the facts were gathered: refused on the host itself, and what was changed elsewhere is undone.
    record_facts(hosts, model)
    told = refused(hosts.run("deploy_replica", extra=extra_for(hosts, model, "--max-model-len", "4096", replica_gather=False)))
    assert "rank 1 (gpu-b): replica life is being changed by eve@elsewhere" in told and "what this run had changed is undone" in told, told
    assert current(hosts) == revision and not lock_file(hosts, "gpu-a").exists() and "eve@elsewhere" in lock_file(hosts, "gpu-b").read_text()

    lock_file(hosts, "gpu-b").write_text(json.dumps({**lock, "expires": time.clock_gettime(time.CLOCK_BOOTTIME) - 1}).ljust(2048))
    ok(hosts.run("deploy_replica", extra=extra_for(hosts, model, "--max-model-len", "4096")))
    assert current(hosts) != revision and no_locks(hosts)


@pytest.mark.slow
def test_of_two_first_deploys_that_begin_together_exactly_one_is_deployed(make_fleet: MakeFleet, model: pathlib.Path) -> None:
    """Both plan before either has a lock, and reach the hosts in opposite order: the facts are recorded, and one fork goes through the hosts."""
    hosts = make_fleet(["gpu-a", "gpu-b"], gpus=1, replica=NAME)
    record_facts(hosts, model)
    forward, backward = hosts.inventory, hosts.directory / "backward.json"
    inventory = json.loads(forward.read_text())
    group = inventory["all"]["children"][hosts.group]
    group["hosts"] = dict(reversed(group["hosts"].items()))
    backward.write_text(json.dumps(inventory))
    runs = []
    for number, hosts.inventory in enumerate((forward, backward)):
        extra = extra_for(hosts, model, "--max-model-len", str(2000 + number), "--sim-load-seconds", "1", replica_gather=False)
        runs.append(start(hosts, "deploy_replica", extra, "--forks", "1"))
    hosts.inventory = forward
    try:
        outputs = [run.communicate(timeout=240)[0] for run in runs]
    finally:
        for run in runs:
            run.kill()
    codes = sorted(run.returncode for run in runs)
    assert codes == [0, 2], outputs
    won = next(number for number, run in enumerate(runs) if run.returncode == 0)
    assert "is being changed by" in outputs[1 - won] and "what this run had changed is undone" in " ".join(outputs[1 - won].split()), outputs[1 - won]
    launch = json.loads((hosts.root("gpu-b") / "etc/rankzero" / NAME / "current/launch.json").read_text())
    assert str(2000 + won) in launch["launches"][-1]["args"] and proven(hosts) and len(set(current(hosts))) == 1
    assert request(url_of(hosts), "/v1/models")[0] == 200


@pytest.mark.slow
def test_a_controller_that_is_killed_anywhere(make_fleet: MakeFleet, model: pathlib.Path) -> None:
    """Hosts are in one of two states, and the next deploy finishes what was begun, without waiting for the lock of the dead run."""
    hosts = make_fleet(["gpu-a", "gpu-b"], gpus=1, replica=NAME)
    ok(hosts.run("deploy_replica", extra=extra_for(hosts, model)))

    def planned(words: list[str]) -> bool:
        return any("Plan all ranks" in word for word in words)

    def switched(words: list[str]) -> bool:
        return current(hosts)[0] != before[0]

    def gated(words: list[str]) -> bool:
        return any("RUNNING HANDLER" in word for word in words)

    for number, reached in enumerate([planned, switched, gated]):
        before = current(hosts)
        extra = extra_for(hosts, model, "--max-model-len", str(3000 + number), "--sim-load-seconds", "2")
        run = start(hosts, "deploy_replica", extra, "--forks", "1")
        words: list[str] = []
        reader = threading.Thread(target=lambda run=run, words=words: [words.append(line) for line in run.stdout])
        reader.start()
        until(lambda reached=reached, words=words: reached(words))
        kill_controller(hosts, run)
        reader.join()
        between = current(hosts)
        if reached is planned:
            assert between == before and proven(hosts) and no_locks(hosts)
        elif reached is gated:
            assert between[0] == between[1] != before[0] and not proven(hosts)
        else:
            assert between[1] == before[1] and between[0] != before[0] and lock_file(hosts, "gpu-a").exists()
            status = hosts.run("replica_status", extra=extra)
            assert "NOT ready" in status.stdout, status.stdout
        ok(hosts.run("deploy_replica", extra=extra))
        after = current(hosts)
        assert after[0] == after[1] != before[0] and proven(hosts) and no_locks(hosts)


@pytest.mark.slow
def test_a_host_is_drained_and_comes_back(make_fleet: MakeFleet, model: pathlib.Path) -> None:
    """Requests in flight are waited for; then the replica stops on all of its hosts, and nothing is planned on the cordoned one until it is undrained."""
    hosts = make_fleet(["gpu-a", "gpu-b"], gpus=1, replica=NAME, replica_api_key="drain-key-0123456789")
    extra = {**extra_for(hosts, model, "--sim-itl", "0.2"), "drain_host": "gpu-b", "drain_reason": "fan 3 is broken"}
    ok(hosts.run("deploy_replica", extra=extra))
    assert "Give -e drain_reason" in refused(hosts.run("drain_node", extra={**extra, "drain_reason": ""}))
    answers: list[int] = []
    body = {"model": "tiny", "max_tokens": 100, "messages": [{"role": "user", "content": "hello"}]}
    asking = threading.Thread(target=lambda: answers.append(slow_request(url_of(hosts), "drain-key-0123456789", body)))
    asking.start()
    busy = refused(hosts.run("drain_node", extra={**extra, "drain_timeout": 1}))
    assert "still has 1 request(s) in flight after 1 s" in busy and proven(hosts) and no_locks(hosts), busy
    checked = ok(hosts.run("drain_node", "--check", extra={**extra, "drain_force": True}))
    assert "Would stop: life. Back with" in checked and "Stopped" not in checked and proven(hosts), checked
    drained = ok(hosts.run("drain_node", extra=extra))
    asking.join()
    assert answers == [200], "the request came to its end"
    assert hosts.marked() == [] and "life: rank 0 (gpu-a), rank 1 (gpu-b)" in drained and "Stopped: life." in drained and no_locks(hosts)
    cordon = hosts.root("gpu-b") / "etc/rankzero/cordoned.json"
    written = json.loads(cordon.read_text())
    assert written["reason"] == "fan 3 is broken" and "@" in written["by"] and written["at"] and cordon.stat().st_mode & 0o777 == 0o644
    assert not (hosts.root("gpu-a") / "etc/rankzero/cordoned.json").exists()

    stopped = ok(hosts.run("replica_status", extra=extra))
    assert "Replica life: stopped" in stopped and "fan 3 is broken" in stopped and "failed  " not in stopped, stopped

    again = hosts.run("drain_node", extra=extra)
    assert "Stopped: life." in ok(again) and recap(again.stdout, "gpu-a")["changed"] == recap(again.stdout, "gpu-b")["changed"] == 0
    assert "cordoned by" in refused(hosts.run("deploy_replica", extra=extra)) and "Undrain the host first" in refused(hosts.run("restart_replica", extra=extra))
    back = ok(hosts.run("undrain_node", extra=extra))
    assert "Stopped, and not started by this: life. Start one with: ansible-playbook rankzero.inference.restart_replica -e replica_name=life" in back, back
    assert "gpu-b is in service again." in back and not cordon.exists() and hosts.marked() == []
    ok(hosts.run("restart_replica", extra=extra))
    assert proven(hosts)


@pytest.mark.slow
def test_what_is_said_of_a_host_without_replicas(make_fleet: MakeFleet) -> None:
    """Nothing is waited for there, and still all faults come at once; nothing is said to have been done that was not."""
    hosts = make_fleet(["gpu-a"])
    extra = {"drain_host": "gpu-a", "drain_reason": "fan 3"}
    told = refused(hosts.run("drain_node", extra={"drain_host": "gpu-x", "drain_timeout": "abc"}))
    assert "drain_timeout: seen abc, wanted a number of seconds above 0" in told and "Give -e drain_reason" in told and "seen gpu-x" in told, told
    assert "drain_timeout: seen 0" in refused(hosts.run("drain_node", extra={**extra, "drain_timeout": 0}))
    drained = hosts.run("drain_node", "--check", extra=extra)
    ok(drained)
    assert "gpu-a would be drained and cordoned. Back with" in drained.stdout, drained.stdout
    back = ok(hosts.run("undrain_node", extra=extra))
    assert "gpu-a was not cordoned: nothing to do." in back and "in service again" not in back, back
    assert "drain_host is not set" in " ".join(hosts.run("undrain_node").stderr.split())
    module = ["-m", "rankzero.inference.shard_idle", "-a", "replica=life timeout=5m"]
    command = [str(pathlib.Path(sys.executable).parent / "ansible"), "-i", str(hosts.inventory), "gpu-a", *module]
    idle = subprocess.run(command, cwd=fleet.ROOT, env=fleet.ansible_environment(), capture_output=True, text=True, timeout=60, check=False)
    assert idle.returncode == 2 and "timeout: seen 5m, wanted a number of seconds above 0" in idle.stdout and "_AnsibleTagged" not in idle.stdout, idle


def slow_request(url: str, key: str, body: Any) -> int:
    """The status of an answer that takes long."""
    asked = urllib.request.Request(
        url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    )
    with urllib.request.urlopen(asked, timeout=120) as answer:
        answer.read()
        return int(answer.status)


@pytest.mark.slow
def test_several_replicas_are_rolled_one_at_a_time_and_stop_at_the_first_that_fails(make_fleet: MakeFleet, model: pathlib.Path) -> None:
    """Three replicas over two hosts, one host with two of them. The second fails: the first serves, of the second nothing is left, the third never began."""
    hosts = make_fleet(["gpu-a", "gpu-b"], gpus=2, replica="unused")
    names = ["life-a", "life-b", "life-c"]
    profiles = {name: {"name": name, **sim_profile(hosts, model, nodes=1, gpus=1)} for name in names}
    inventory = json.loads(hosts.inventory.read_text())
    groups = inventory["all"]["children"]
    groups["replica_unused"]["vars"].pop("replica_name")
    groups["replica_unused"]["vars"].update(
        replica_profile="{{ replica_name }}", replica_http_port="{{ http_ports[replica_name] }}", http_ports={name: free_port() for name in names}
    )
    groups.update(replica_life_a={"hosts": {"gpu-a": {}}}, replica_life_b={"hosts": {"gpu-b": {}}}, replica_life_c={"hosts": {"gpu-a": {}}})
    hosts.inventory.write_text(json.dumps(inventory))

    def roll(replicas: Any, **more: Any) -> subprocess.CompletedProcess[str]:
        return hosts.run(
            "deploy_replica", extra={"replica_names": replicas, "replica_profiles": {**profiles, **more}, "diagnosis_dir": str(hosts.directory / "diagnosis")}
        )

    broken = {**profiles["life-b"], "args": [*profiles["life-b"]["args"], "--sim-fail", "CUDA out of memory."]}
    told = refused(roll(names, **{"life-b": broken}))
    assert "Replica life-b was not deployed. Nothing of it was left behind." in told, told
    assert (
        [current(hosts, name) for name in names] == [[current(hosts, "life-a")[0], None], [None, None], [None, None]]
        and current(hosts, "life-a")[0]
        and no_locks(hosts)
    )
    assert request(str(json.loads((hosts.root("gpu-a") / "etc/rankzero/life-a/current/launch.json").read_text())["ready"]["url"]), "/health")[0] == 200
    before = current(hosts, "life-a")
    ok(roll(names))
    assert current(hosts, "life-a") == before and all(any(current(hosts, name)) for name in names) and no_locks(hosts)
    for names, told in ((["life-a", "life-x"], "Without hosts: replica_life_x"), (["life-a", "life-a"], "different names"), ("life-a", "must be a list")):
        done = roll(names)
        assert done.returncode == 4 and told in done.stdout + done.stderr and "TASK [" not in done.stdout, done.stdout + done.stderr
