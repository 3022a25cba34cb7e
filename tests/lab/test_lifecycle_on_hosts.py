# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What goes wrong while Ansible changes a replica on real hosts, and what operators do with one that is there, under systemd."""

from __future__ import annotations

import json
import os
import pathlib
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from lab.deployed import until
from lab.lab_hosts import Lab
from lab.profiles import SIMULATED
from lab.test_replica_on_hosts import changes, ours, play, refused, succeeded

pytestmark = pytest.mark.lab

HOSTS = ["l1", "l2"]
PATTERN = ":".join(HOSTS)
CALLBACKS = pathlib.Path(__file__).resolve().parent.parent / "e2e" / "callbacks"
OLD_KEY, NEW_KEY = "old-lab-key-0123456789", "new-lab-key-9876543210"
STATUS = """import sys, urllib.error, urllib.request
request = urllib.request.Request(sys.argv[1] + "/v1/models", headers={"Authorization": "Bearer " + sys.stdin.read()})
try: print(urllib.request.urlopen(request, timeout=10).status)
except urllib.error.HTTPError as error: print(error.code)"""
SQUATTER = """import os, socket, time
open("/run/squatter", "w").close()
while not os.path.exists("/run/rankzero/lab.lock"): time.sleep(0.002)
one = socket.socket()
one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier test may be in TIME_WAIT
while one.fileno() >= 0:
    try: one.bind(("0.0.0.0", 8000)); one.listen(); break
    except OSError: time.sleep(0.001)  # somebody is just trying whether it is free
time.sleep(900)"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    one = Lab(f"y{os.getpid()}", settings={"LAB_FABRIC": "10.78.0"}, owner=os.getpid())
    reason = one.why_not()
    if reason:
        pytest.skip(reason)
    try:
        one.up(*HOSTS, gpus="2:H100")
        yield one
    finally:
        one.down()


def deploy(lab: Lab, number: int, *args: str, settings: dict[str, str] | None = None, **variables: Any) -> Any:
    profile = {**SIMULATED, "args": [*SIMULATED["args"], "--max-model-len", str(number), *args]}  # type: ignore[misc]
    return play(lab, "deploy_replica", PATTERN, settings=settings, replica_profile=profile, **variables)


def flat(text: str) -> str:
    return " ".join(text.split())


def current(lab: Lab) -> list[str]:
    return [lab.console(host, "basename $(readlink /etc/rankzero/lab/current)", check=False).stdout.strip() for host in HOSTS]


def proven(lab: Lab) -> bool:
    """On both hosts, by the gate, for the run that is on now."""
    seen = {lab.console(host, f"cat /run/rankzero/lab/{name}.json", check=False).stdout or "{}" for host in HOSTS for name in ("ready", "state")}
    runs = {json.loads(text).get("run_id") for text in seen}
    return len(runs) == 1 and None not in runs


def answer(lab: Lab, key: str = "") -> int:
    url = json.loads(lab.console("l1", "cat /etc/rankzero/lab/current/launch.json").stdout)["ready"]["url"]
    return int(lab.console("l1", f"python3 -c '{STATUS}' {url}", stdin=key).stdout)


@pytest.fixture
def deployed(lab: Lab) -> Iterator[Lab]:
    """Revision 1000, and afterwards nothing."""
    succeeded(deploy(lab, 1000))
    yield lab
    succeeded(play(lab, "remove_replica", PATTERN))
    assert [ours(lab, host) for host in HOSTS] == [[], []]


def test_a_controller_that_dies_between_two_hosts(deployed: Lab, tmp_path: pathlib.Path) -> None:
    """The hosts are on two revisions and nothing serves. A deploy that fails then takes both back to the one that served; one that succeeds goes on."""
    before = current(deployed)
    dies = {
        "ANSIBLE_CALLBACK_PLUGINS": str(CALLBACKS),
        "ANSIBLE_CALLBACKS_ENABLED": "die_at",
        "ANSIBLE_FORKS": "1",
        "DIE_AT": "start: Write and start every rank on l2",
        "DIE_AT_LOG": str(tmp_path / "steps"),
    }
    for number, fails in ((1001, True), (1002, False)):
        assert deploy(deployed, number, settings=dies).returncode not in (0, 2)
        between = current(deployed)
        assert between[0] != before[0] and between[1] == before[1]
        if fails:
            output = flat(refused(deploy(deployed, number, "--sim-fail", "CUDA out of memory.")))
            assert f"Revision {before[0]}, which was there before, is back." in output and "out of memory" in output, output
            assert current(deployed) == before
        else:
            succeeded(deploy(deployed, number))
            assert len({*current(deployed), *before}) == 2
        assert proven(deployed) and answer(deployed) == 200


def test_a_host_that_is_lost_in_the_middle_of_a_deploy(deployed: Lab) -> None:
    before = current(deployed)
    impatient = {"ANSIBLE_SSH_ARGS": "-o ControlMaster=no -o ServerAliveInterval=2 -o ServerAliveCountMax=2", "ANSIBLE_TIMEOUT": "5"}
    outcome: list[Any] = []
    running = threading.Thread(target=lambda: outcome.append(deploy(deployed, 1003, "--sim-load-seconds", "8", settings=impatient)))
    running.start()
    try:
        until(lambda: current(deployed)[1] != before[1], 60, lambda: "it did not begin")
        deployed.cut("l2")
        running.join()
    finally:
        deployed.heal("l2")
    done = outcome[0]
    assert done.returncode not in (0, None) and "rank 1 (l2)" in done.stdout, done.stdout
    assert current(deployed)[0] == before[0], "what could be undone is"
    succeeded(deploy(deployed, 1003, "--sim-load-seconds", "8"))
    after = current(deployed)
    assert after[0] == after[1] != before[0] and proven(deployed) and answer(deployed) == 200


def test_a_full_disk_on_one_host_leaves_the_revision_before(lab: Lab) -> None:
    lab.console("l2", "mkdir -p /etc/rankzero && mount -t tmpfs -o size=1500k none /etc/rankzero")
    try:
        succeeded(deploy(lab, 1000))
        before = current(lab)
        lab.console("l2", "dd if=/dev/zero of=/etc/rankzero/full bs=1k 2>/dev/null", check=False)
        output = flat(refused(deploy(lab, 1004)))
        assert "rank 1 (l2): /etc/rankzero/lab/revisions/" in output and "No space left on device" in output, output
        assert f"Revision {before[0]}, which was there before, is back." in output, output
        assert current(lab) == before and proven(lab) and answer(lab) == 200
        lab.console("l2", "rm /etc/rankzero/full")
        succeeded(deploy(lab, 1004))
        assert len({*current(lab), *before}) == 2 and proven(lab)
        succeeded(play(lab, "remove_replica", PATTERN))
    finally:
        lab.console("l2", "umount -l /etc/rankzero; rmdir /etc/rankzero", check=False)
    assert [ours(lab, host) for host in HOSTS] == [[], []]


def test_a_port_that_is_taken_between_plan_and_start(lab: Lab) -> None:
    """The plan saw it free. The shard refuses to start and says what it could not have; whoever has it is left alone."""
    lab.console("l1", f"cat > /root/squatter.py <<'END'\n{SQUATTER}\nEND\nsystemd-run -q --unit squatter python3 /root/squatter.py")
    until(lambda: lab.console("l1", "test -e /run/squatter", check=False).returncode == 0, 30, lambda: "it does not run")
    done = deploy(lab, 1000)
    assert done.returncode == 2, (
        done.stdout + lab.console("l1", "systemctl status squatter; ss -ltnp; ls -l --time-style=full-iso /run/rankzero", check=False).stdout
    )
    output = flat(done.stdout + done.stderr)
    assert (
        re.search(r"rank 0 \(l1\): .*port 10\.77\.0\.11:8000 \(HTTP\) cannot be bound: Address already in use", output)
        and "Nothing of it was left behind." in output
    ), output
    assert lab.console("l1", "systemctl is-active squatter").stdout.strip() == "active"
    lab.console("l1", "systemctl stop squatter; rm /root/squatter.py /run/squatter")
    assert [ours(lab, host) for host in HOSTS] == [[], []]


def test_a_key_is_rotated_and_rolled_back_and_a_host_is_drained(lab: Lab) -> None:
    succeeded(deploy(lab, 1000, replica_api_key=OLD_KEY))
    first = current(lab)
    profile = {**SIMULATED, "args": [*SIMULATED["args"], "--max-model-len", "1000"]}  # type: ignore[misc]
    rotated = flat(succeeded(play(lab, "rotate_api_key", PATTERN, replica_profile=profile, replica_api_key=NEW_KEY)))
    assert "New key: 200. Old key: 401." in rotated and OLD_KEY not in rotated and NEW_KEY not in rotated
    assert (answer(lab, NEW_KEY), answer(lab, OLD_KEY)) == (200, 401)
    assert lab.console("l2", "ls -A /etc/rankzero/lab/current/secrets").stdout.split() == [".check", "tie_key"], "the key is the leader's only"
    succeeded(play(lab, "rollback_replica", PATTERN))
    assert current(lab) == first and proven(lab) and (answer(lab, NEW_KEY), answer(lab, OLD_KEY)) == (401, 200)

    succeeded(play(lab, "drain_node", PATTERN, drain_host="l2", drain_hosts=PATTERN, drain_reason="fan 3 is broken"))
    for host in HOSTS:
        assert lab.console(host, "systemctl show -P ActiveState -P UnitFileState inference-lab").stdout.split() == ["inactive", "disabled"]
        assert lab.console(host, "grep -lsz ^RANKZERO_SHARD= /proc/[0-9]*/environ", check=False).stdout == ""
    assert "fan 3 is broken" in lab.console("l2", "cat /etc/rankzero/cordoned.json").stdout
    lab.reboot("l2")
    until(lambda: lab.ssh("l2", "true", check=False).returncode == 0, 30, lambda: "it is not back")
    assert lab.console("l2", "systemctl is-active inference-lab", check=False).stdout.strip() == "inactive", "a drained host stays so over a reboot"
    assert "cordoned by" in flat(refused(deploy(lab, 1000, replica_api_key=OLD_KEY)))
    assert "restart_replica -e replica_name=lab" in flat(succeeded(play(lab, "undrain_node", PATTERN, drain_host="l2")))
    succeeded(play(lab, "restart_replica", PATTERN))
    assert proven(lab) and answer(lab, OLD_KEY) == 200
    assert lab.console("l2", "systemctl show -P UnitFileState inference-lab").stdout.strip() == "enabled"
    assert changes(succeeded(deploy(lab, 1000, replica_api_key=OLD_KEY))) == {"l1": 0, "l2": 0}
    succeeded(play(lab, "remove_replica", PATTERN))
    assert [ours(lab, host) for host in HOSTS] == [[], []]
