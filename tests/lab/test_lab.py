# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab's hosts are what tests take them for: real, reachable only where they should be, faulty on demand, and gone afterwards."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from lab.lab_hosts import LAB_SH, Lab, LabFailed

pytestmark = pytest.mark.lab

ANSIBLE = str(pathlib.Path(sys.executable).parent / "ansible")
LIST_GPUS = """import json, pynvml
pynvml.nvmlInit()
handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
print(json.dumps([[pynvml.nvmlDeviceGetName(h), pynvml.nvmlDeviceGetUUID(h),
                   [p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(h)]] for h in handles]))"""
UNIT = """[Service]
User=svc
EnvironmentFile=/etc/demo.env
LoadCredential=token:/etc/demo.secret
StateDirectory=demo
ProtectSystem=strict
LimitMEMLOCK=infinity
ExecStart=/bin/sh -c 'echo "$GREETING $(cat $CREDENTIALS_DIRECTORY/token) $(id -un)" >> /var/lib/demo/log; exec sleep inf'
[Install]
WantedBy=multi-user.target
"""


@pytest.fixture(scope="module")
def three(lab: Lab) -> Lab:
    lab.up("n1", "n2", "n3", gpus="2:H200", hcas="1:roce")
    return lab


@pytest.fixture
def another(lab: Lab) -> Iterator[Callable[[str], Lab]]:
    """Makes further labs; each is taken down again and must leave nothing."""
    made: list[Lab] = []

    def make(suffix: str) -> Lab:
        made.append(Lab(f"{lab.name}{suffix}", owner=os.getpid()))
        return made[-1]

    yield make
    for one in made:
        one.down()
    assert [left for one in made for left in leftovers(one)] == []


def eventually(true: Callable[[], object], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.05)


def namespaces() -> list[str]:
    folder = pathlib.Path("/run/netns")
    return sorted(place.name for place in folder.iterdir()) if folder.exists() else []


def leftovers(one: Lab) -> list[str]:
    """Whatever of a lab still is on this machine."""
    tag = f"lab-{one.name}"
    found = [name for name in namespaces() if name == f"{tag}.hub" or name.startswith(f"{tag}-")]
    found += [
        str(path) for tree in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/systemd") for path in [pathlib.Path(tree, tag)] if path.exists()
    ]
    found += [
        str(path) for path in (one.directory, pathlib.Path("/run/rankzero-lab", one.name), pathlib.Path(f"/run/rankzero-lab/{one.name}.lock")) if path.exists()
    ]
    found += [str(path) for path in pathlib.Path("/run/systemd/nspawn").glob(f"*/{tag}-*")]
    found += [line for line in pathlib.Path("/proc/mounts").read_text(encoding="utf-8").splitlines() if f"/{tag}/" in line]
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
            environment = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if process.name != str(os.getpid()) and (f"{tag}-" in words or f"/{tag}/" in words or f"LAB_NAME={one.name}".encode() in environment):
            found.append(f"{process.name} {words}")
    return found


def ansible(one: Lab, *argv: str, **settings: str) -> str:
    return one.run(
        ANSIBLE,
        "-i",
        str(one.inventory),
        *argv,
        settings={"ANSIBLE_CALLBACK_RESULT_FORMAT": "json", "ANSIBLE_LOCAL_TEMP": str(one.directory / "ansible"), **settings},
    ).stdout


def hub_reaches(one: Lab, address: str) -> bool:
    """Whether sshd at that address takes a connection from where the controller is."""
    return one.run(sys.executable, "-c", f"import socket; socket.create_connection(('{address}', 22), 1)", check=False).returncode == 0


def gpus(one: Lab, host: str) -> list[tuple[str, str, list[int]]]:
    return [tuple(gpu) for gpu in json.loads(one.ssh(f"ansible@{host}", f"/usr/bin/python3 -c '{LIST_GPUS}'").stdout)]


def test_hosts_are_whole_systems(three: Lab) -> None:
    assert three.hosts() == {"n1": True, "n2": True, "n3": True}
    assert ansible(three, "all", "-m", "ping").count('"ping": "pong"') == 3
    for host in three.hosts():
        seen = three.ssh(host, "uname -n; cat /proc/1/comm; systemctl is-system-running; systemctl --failed --no-legend").stdout.split()
        assert seen == [host, "systemd", "running"]
    assert three.ssh("ansible@n1", "sudo -n id -u").stdout.strip() == "0"
    assert len({three.ssh(host, "cat /etc/machine-id /proc/sys/kernel/random/boot_id").stdout for host in three.hosts()}) == 3


def test_the_journal_tells_how_many_sessions_ansible_needed(three: Lab) -> None:
    three.console("n1", "true")
    start = three.journal_cursor("n1")
    ansible(three, "n1", "-m", "ping")
    piped = three.ssh_activity("n1", start)
    assert piped.connections <= 1 and set(piped.sessions) == {"command"} and len(piped.sessions) <= 2
    start = three.journal_cursor("n1")
    ansible(three, "n1", "-m", "ping", "-e", "ansible_pipelining=false")
    copied = three.ssh_activity("n1", start)
    assert "subsystem 'sftp'" in copied.sessions and len(copied.sessions) > len(piped.sessions)


def test_hosts_are_reached_from_the_lab_only(three: Lab) -> None:
    """Neither has this machine's own namespace a way to the hosts, nor have they and the hub one to anywhere else."""
    address = three.address("n1")
    prefix = address.rpartition(".")[0]
    here = subprocess.run(["ip", "-o", "addr"], text=True, capture_output=True, check=True).stdout
    assert f" {prefix}." not in here
    assert hub_reaches(three, address)
    assert three.run("ip", "route").stdout.split()[0] == f"{prefix}.0/24"
    assert "default" not in three.run("ip", "route").stdout + three.ssh("n1", "ip route").stdout
    assert not three.console("n1", "ip route get 10.79.0.1", check=False).stdout


def test_a_service_survives_a_reboot(three: Lab) -> None:
    three.ssh(
        "n1",
        "useradd -r svc; echo GREETING=hello > /etc/demo.env; echo secret > /etc/demo.secret; chmod 600 /etc/demo.secret; "
        "cat > /etc/systemd/system/demo.service",
        stdin=UNIT,
    )
    ansible(three, "n1", "-m", "systemd_service", "-a", "name=demo state=started enabled=true daemon_reload=true")
    before = three.ssh("n1", "cat /proc/sys/kernel/random/boot_id; systemctl show -P LimitMEMLOCK demo").stdout.split()
    assert before[1] == "infinity"
    three.reboot("n1")
    assert three.ssh("n1", "cat /proc/sys/kernel/random/boot_id").stdout.strip() != before[0]
    assert three.ssh("n1", "systemctl is-active demo; systemctl is-enabled demo").stdout.split() == ["active", "enabled"]
    eventually(lambda: three.ssh("n1", "cat /var/lib/demo/log").stdout.splitlines() == ["hello secret svc"] * 2)
    assert len(three.ssh("n1", "journalctl --list-boots --no-pager -q").stdout.splitlines()) == 2


def test_gpus_are_each_hosts_own_and_idle_after_a_boot(three: Lab) -> None:
    seen = {host: gpus(three, host) for host in three.hosts()}
    assert all([gpu[0] for gpu in there] == ["NVIDIA H200"] * 2 for there in seen.values())
    assert len({gpu[1] for there in seen.values() for gpu in there}) == 6
    pid = three.ssh("ansible@n2", "setsid sleep inf > /dev/null 2>&1 & echo $!; echo '1 70000' > /run/fake_nvml/processes/$!").stdout.strip()
    assert [gpu[2] for gpu in gpus(three, "n2")] == [[], [int(pid)]]
    three.ssh("n2", f"kill {pid}")
    eventually(lambda: [gpu[2] for gpu in gpus(three, "n2")] == [[], []])
    three.ssh("n2", "cd /run/fake_nvml && (cat state; echo 'proc gpu=0 pid=1 mib=9') > new && mv new state && echo '0 9' > processes/1")
    assert gpus(three, "n2")[0][2] == [1, 1]
    three.reboot("n2")
    assert gpus(three, "n2") == seen["n2"] and [gpu[2] for gpu in seen["n2"]] == [[], []]
    assert "libnvidia-ml.so.1" in three.ssh("n2", "/sbin/ldconfig -p").stdout


def test_hcas_stand_in_sysfs_beside_what_is_real(three: Lab) -> None:
    seen = three.ssh(
        "n3",
        "cd /sys/class/infiniband/mlx5_0; cat ports/1/state ports/1/gids/3 ports/1/gid_attrs/ndevs/3; ls device/net; readlink -f device; "
        "readlink -f /sys/bus/pci/devices/0000:13:00.0; test -e /dev/infiniband/uverbs0; cat /sys/class/net/eth1/operstate",
    ).stdout.splitlines()
    switch = "/sys/devices/pci0000:10/0000:10:01.0/0000:11:00.0"
    assert seen == [
        "4: ACTIVE",
        "0000:0000:0000:0000:0000:ffff:0a4e:000d",
        "eth1",
        "eth1",
        f"{switch}/0000:12:01.0/0000:14:00.0",
        f"{switch}/0000:12:00.0/0000:13:00.0",
        "up",
    ]
    assert "10.78.0.13/24" in three.ssh("n3", "ip -o -4 addr show eth1").stdout


def test_orderly_power_off_and_on(three: Lab) -> None:
    three.stop("n2")
    assert three.hosts() == {"n1": True, "n2": False, "n3": True}
    assert not three.reaches("n1", "n2", 0.5) and three.reaches("n3", "n1")
    three.start("n2")
    assert three.reaches("n1", "n2") and three.ssh("n2", "true").returncode == 0
    three.ssh("n3", "systemctl poweroff", check=False)
    eventually(lambda: not three.hosts()["n3"])
    with pytest.raises(LabFailed, match="n3 is off"):
        three.console("n3", "true")
    three.start("n3")


def test_a_power_cut_says_no_farewell(three: Lab) -> None:
    three.ssh("n2", "systemd-run -q python3 -c 'import socket, time; s = socket.create_server((\"\", 9000)); c = s.accept(); time.sleep(99)'")
    eventually(lambda: ":9000" in three.ssh("n2", "ss -tln").stdout)
    three.ssh("n1", "systemd-run -q python3 -c 'import socket, time; s = socket.create_connection((\"n2\", 9000)); time.sleep(99)'")
    eventually(lambda: ":9000" in three.ssh("n1", "ss -tn state established").stdout)
    three.kill("n2")
    assert not three.hosts()["n2"]
    assert ":9000" in three.ssh("n1", "ss -tn state established").stdout
    assert not three.reaches("n1", "n2", 0.5)
    ansible(three, "n1,n3", "-m", "ping")
    three.start("n2")
    assert ansible(three, "n2", "-m", "ping").count("pong") == 1


def test_a_stale_connection_does_not_hang_the_next_host(three: Lab) -> None:
    ansible(three, "n2", "-m", "ping")
    three.kill("n2")
    three.start("n2")
    begun = time.monotonic()
    ansible(three, "n2", "-m", "ping")
    assert time.monotonic() - begun < 10


def test_cables(three: Lab) -> None:
    three.cut("n3:eth1")
    assert not three.reaches("n1", "n3-eth1", 0.5) and three.reaches("n1", "n3")
    assert three.console("n3", "cat /sys/class/net/eth1/carrier").stdout.strip() == "0"
    three.heal("n3:eth1")
    assert three.reaches("n1", "n3-eth1")
    three.cut("n3")
    assert not three.reaches("n1", "n3", 0.5) and not three.reaches("n1", "n3-eth1", 0.5)
    assert three.console("n3", "pwd; cat etc/hostname").stdout.split() == ["/", "n3"]
    three.reboot("n3")
    assert not three.reaches("n1", "n3", 0.5)
    three.heal("n3")
    assert three.reaches("n1", "n3") and three.reaches("n1", "n3-eth1")


def test_partition_of_two_hosts_is_silent(three: Lab) -> None:
    three.part("n1", "n2")
    assert not three.reaches("n1", "n2", 0.5) and not three.reaches("n2", "n1", 0.5) and not three.reaches("n1", "n2-eth1", 0.5)
    assert three.reaches("n3", "n1") and three.reaches("n3", "n2")
    late = three.console("n1", "timeout 2 python3 -c 'import socket; socket.create_connection((\"n2\", 22))'", check=False)
    assert late.returncode == 124
    three.join("n1", "n2")
    assert three.reaches("n1", "n2") and three.reaches("n2", "n1") and three.reaches("n1", "n2-eth1")
    three.part("n1", "n2", "eth1")
    assert three.reaches("n1", "n2") and not three.reaches("n1", "n2-eth1", 0.5)
    three.join("n1", "n2", "eth1")
    assert three.reaches("n1", "n2-eth1")


def test_networks_do_not_reach_each_other(three: Lab) -> None:
    assert not hub_reaches(three, "10.78.0.11")
    three.ssh("n1", "ip route del 10.78.0.0/24; ip route add 10.78.0.0/24 via 10.77.0.1")
    assert not three.reaches("n1", "n2-eth1", 0.5)
    three.ssh("n1", "ip route del 10.78.0.0/24; ip route add 10.78.0.0/24 dev eth1 src 10.78.0.11")
    assert three.reaches("n1", "n2-eth1")


def test_a_new_host_joins_with_seeds_of_its_own(three: Lab, tmp_path: pathlib.Path) -> None:
    """pytest's folders are 0700: that must not become the mode of the host's root directory."""
    for name, text in (("all", "for all"), ("own", "for n-4")):
        (tmp_path / name / "etc").mkdir(parents=True)
        (tmp_path / name / "etc" / name).write_text(text, encoding="utf-8")
        (tmp_path / name).chmod(0o700)
    three.up(
        "n-4",
        gpus="8:H100",
        hcas="8:ib",
        settings={"LAB_SEED": str(tmp_path / "all"), "LAB_SEED_n_4": str(tmp_path / "own"), "LAB_BIND_RO": f"{tmp_path}:/opt/shared"},
    )
    assert three.ssh("ansible@n-4", "cat /etc/all /etc/own").stdout == "for allfor n-4"
    assert [gpu[0] for gpu in gpus(three, "n-4")] == ["NVIDIA H100 80GB HBM3"] * 8
    assert three.ssh("n-4", "cat /sys/class/infiniband/mlx5_*/device/numa_node").stdout.split() == ["0"] * 4 + ["1"] * 4
    assert three.reaches("n1", "n-4")
    three.kill("n-4")
    three.up("n-4")
    assert not three.hosts()["n-4"]
    three.start("n-4")
    assert three.ssh("n-4", "cat /opt/shared/own/etc/own; ! touch /opt/shared/x 2>/dev/null").stdout == "for n-4"


def test_two_labs_do_not_know_of_each_other(three: Lab, another: Callable[[str], Lab]) -> None:
    """Same host names, same network, a name that begins with the other's."""
    other = another("b")
    other.up("n1", "n9")
    assert other.address("n1") == three.address("n1")
    other.ssh("n1", "echo other > /etc/which")
    assert three.ssh("n1", "cat /etc/which", check=False).returncode == 1
    other.ssh("n1", "ip addr add 10.77.0.99/24 dev eth0")
    assert other.reaches("n9", "10.77.0.99") and not three.reaches("n1", "10.77.0.99", 0.5)
    other.kill("n1")
    assert three.hosts()["n1"] and three.ssh("n1", "true").returncode == 0
    other.down()
    other.down()
    assert leftovers(other) == []
    assert three.ssh("n1", "hostname").stdout.strip() == "n1"


def test_a_lab_made_inside_the_run_of_another_outlives_it(three: Lab, another: Callable[[str], Lab]) -> None:
    outer, inner = another("g"), another("h")
    script = f"LAB_NAME={inner.name} LAB_DIR={inner.directory} {LAB_SH} up n1"
    outer.run("env", "-u", "LAB_FABRIC", "sh", "-ec", script)
    assert leftovers(outer) == []
    assert inner.ssh("n1", "uname -n").stdout == "n1\n"


def test_down_removes_only_what_is_the_labs(three: Lab, another: Callable[[str], Lab], tmp_path: pathlib.Path) -> None:
    one = another("c")
    foreign = f"lab-{one.name}-n1"
    subprocess.run(["ip", "netns", "add", foreign], check=True)
    try:
        with pytest.raises(LabFailed, match=f"{foreign} is there and not this lab's"):
            one.up("n1")
        one.down()
        assert foreign in namespaces()
    finally:
        subprocess.run(["ip", "netns", "del", foreign], check=True)
    (tmp_path / "precious").write_text("mine", encoding="utf-8")
    one.environment["LAB_DIR"] = str(tmp_path)
    with pytest.raises(LabFailed, match="is not empty and not a lab's"):
        one.up("n1")
    one.down()
    assert (tmp_path / "precious").exists()


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_lab_goes_with_the_command_that_made_it(lab: Lab, another: Callable[[str], Lab], ending: signal.Signals) -> None:
    one = another("d")
    # A shell lets its background commands ignore SIGINT, and what they start does, too.
    with subprocess.Popen(
        ["env", "--default-signal=INT", str(LAB_SH), "run", "sh", "-c", f"{LAB_SH} up n1; (sleep 99 &); echo up; exec sleep 98"],
        env=one.environment,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as runner:
        assert runner.stdout is not None
        assert runner.stdout.readline() == b"up\n"
        runner.send_signal(ending)
        assert runner.wait(timeout=10) != 0
    if ending != signal.SIGKILL:
        assert leftovers(one) == []
    eventually(lambda: leftovers(one) == [], 20)


def test_a_lab_goes_with_its_owner(lab: Lab, another: Callable[[str], Lab]) -> None:
    one = another("e")
    with subprocess.Popen(["sleep", "97"]) as owner:
        one.owner = owner.pid
        one.up("n1")
        owner.kill()
        owner.wait()
    eventually(lambda: leftovers(one) == [], 20)


def test_run_gives_back_the_commands_own_ending(lab: Lab, another: Callable[[str], Lab]) -> None:
    one = another("f")
    done = one.call("run", "sh", "-c", "cat; exit 7", stdin="typed", check=False)
    assert (done.returncode, done.stdout) == (7, "typed")
    assert leftovers(one) == []
    done = one.run("sh", "-ec", f"{LAB_SH} up n1; {LAB_SH} down; {LAB_SH} down; {LAB_SH} up n2; {LAB_SH} list; {LAB_SH} down")
    assert done.stdout.startswith("n2 10.77.0.11 on ")
    assert leftovers(one) == []


def test_commands_refuse_what_makes_no_sense(three: Lab) -> None:
    for argv, text in (
        (["ssh"], ""),
        (["stop", "n7"], "no host n7"),
        (["cut", "n1:eth5"], "no network eth5"),
        (["start", "n1"], "n1 is on"),
        (["up", "Bad_Name"], "not a host name"),
        (["up", "--gpus", "9:NOPE", "n5"], "unknown GPU model"),
        (["up", "--hcas", "2:roce", "n5"], "need 2 fabric networks"),
        (["up", "--what", "1", "n5"], "unknown option"),
    ):
        done = three.call(*argv, check=False)
        assert done.returncode != 0 and text in done.stderr
    assert "n5" not in three.hosts()
    three.up("n5")
    assert three.reaches("n1", "n5")
    assert Lab("Not-a-name").call("list", check=False).stderr.startswith("lab: LAB_NAME must be")


def test_check_says_why_not_in_one_line(lab: Lab) -> None:
    assert lab.call("check").stdout.startswith("the lab can run here")
    no_root = ["setpriv", "--reuid=65534", "--clear-groups", str(LAB_SH), "check"]
    done = subprocess.run(no_root, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (1, "the lab cannot run here: needs root\n")
    script = """for d in /sys/fs/cgroup/unified /sys/fs/cgroup; do [ ! -e $d/cgroup.procs ] || mount -o remount,ro,bind $d; done; exec "$0" check"""
    read_only = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, str(LAB_SH)]
    done = subprocess.run(read_only, text=True, capture_output=True, check=False)
    assert done.returncode == 1 and done.stdout.endswith("is not writable\n") and done.stdout.count("\n") == 1
