# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a run costs on real hosts: sessions counted in sshd's log of two lab hosts, and how long operators wait. Needs root (tests/lab/README.md).

    .venv/bin/python tests/bench/on_hosts.py

The other side is tests/bench/stock: a plain play of stock modules that starts the same engine with the arguments and the environment of the same plan.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Any

import figures
from figures import BIN, ROOT, Figure
from lab.lab_hosts import LAB_SH, Lab
from lab.profiles import SIMULATED

NAMES = ("n1", "n2")
STARTED = """import json, os, sys, time
pid = int(sys.argv[1])
ticks = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[19])
began = time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
print(json.load(open(sys.argv[2]))["at"] - began)"""
UNTIL_HEALTHY = """import subprocess, sys, time, urllib.request
began = time.monotonic()
engine = subprocess.Popen(sys.argv[2:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
while time.monotonic() - began < 60:
    try:
        if urllib.request.urlopen(sys.argv[1], timeout=1).status == 200:
            break
    except OSError:
        time.sleep(0.02)
print(time.monotonic() - began)
engine.kill()"""


class Hosts:
    """Two lab hosts with 8 GPUs and 10 HCAs each, and plays over them."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab

    def command(self, playbook: str, *options: str, inventory: str | None = None, **variables: Any) -> list[str]:
        return [str(BIN / "ansible-playbook"), "-i", inventory or str(self.lab.inventory), playbook, "-e", json.dumps(variables), *options]

    def settings(self) -> dict[str, str]:
        return {
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections"),
            "ANSIBLE_LOCAL_TEMP": str(self.lab.directory / "ansible"),
            "ANSIBLE_CALLBACK_RESULT_FORMAT": "json",
            "ANSIBLE_NOCOLOR": "1",
        }

    def ours(self, playbook: str, *options: str, **variables: Any) -> list[str]:
        request = {"replica_name": "lab", "replica_hosts": "n1:n2", "replica_management": "10.77.0.0/24", "replica_fabric": "none", **variables}
        request.setdefault("diagnosis_dir", str(self.lab.directory / "diagnosis"))
        return self.command(str(ROOT / "playbooks" / f"{playbook}.yml"), *options, **request)

    def run(self, command: list[str], code: int = 0) -> str:
        done = self.lab.run(*command, check=False, settings=self.settings())
        if done.returncode != code:
            raise SystemExit(f"ended with {done.returncode} instead of {code}:\n{done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    def sessions(self, work: Callable[[], str]) -> tuple[dict[str, int], str]:
        """Sessions that sshd of each host saw meanwhile, and what was said."""
        since = {name: self.lab.journal_cursor(name) for name in NAMES}
        said = work()
        return {name: len(self.lab.ssh_activity(name, since[name]).sessions) for name in NAMES}, said


def measure() -> list[Figure]:
    lab = Lab(f"b{os.getpid()}", owner=os.getpid())
    reason = lab.why_not()
    if reason:
        return [Figure("real hosts", f"not measured: {reason}")]
    try:
        lab.up(*NAMES, gpus="8:H100", hcas="10:ib")
        hosts = Hosts(lab)
        with tempfile.TemporaryDirectory() as folder:
            plan_file = f"{folder}/plan.json"
            hosts.run(hosts.ours("plan_replica", replica_profile=SIMULATED, plan_file=plan_file))
            with open(plan_file, encoding="utf-8") as stream:
                plan = json.load(stream)
        return [*_ours(hosts), *_refused(hosts), *_by_hand(hosts, plan), *_killed(hosts), *_stock(hosts, plan)]
    finally:
        lab.down()


def _ours(hosts: Hosts) -> list[Figure]:
    deploy = hosts.ours("deploy_replica", "-v", replica_profile=SIMULATED)
    began = time.monotonic()
    first, said = hosts.sessions(lambda: hosts.run(deploy))
    seconds = time.monotonic() - began
    calls = [int(number) for number in re.findall(r'"calls": (\d+)', said)]
    polls = sum(calls) - len(calls)
    pid = hosts.lab.console("n1", "systemctl show -P MainPID inference-lab").stdout.strip()
    hosts.ready_seconds = float(  # type: ignore[attr-defined]
        hosts.lab.console("n1", f"python3 -c {shlex.quote(STARTED)} {pid} /run/rankzero/lab/ready.json").stdout
    )
    second, _said = hosts.sessions(lambda: hosts.run(deploy))
    hosts.run(hosts.ours("remove_replica"))
    return [
        figures.exactly("SSH sessions of a first deploy on each host, without polls", (sum(first.values()) - polls) // len(NAMES), 3),
        Figure("polls of it on each host (changes of stage)", f"{polls / len(NAMES):g}"),
        figures.exactly("SSH sessions of a converged deploy on each host", max(second.values()), 1),
        Figure("first deploy, the whole play", f"{seconds:.1f} s"),
    ]


def _refused(hosts: Hosts) -> list[Figure]:
    bad = {**SIMULATED, "gpu_class": "B200", "tp": 3}
    sessions, said = hosts.sessions(lambda: hosts.run(hosts.ours("deploy_replica", replica_profile=bad), code=2))
    if "nothing was changed" not in said:
        raise SystemExit(said)
    return [figures.exactly("SSH sessions on each host until a bad profile is refused", max(sessions.values()), 1)]


def _by_hand(hosts: Hosts, plan: dict[str, Any]) -> list[Figure]:
    """The same program with the same arguments and environment on both hosts, started by nobody but a shell, until the health path answers 200."""
    argv = {}
    for name, shard in plan["shards"].items():
        launch = shard["launches"][-1]
        hosts.lab.console(
            name, "mkdir -p /opt/stock-engine && cat > /opt/stock-engine/engine.py", stdin=(ROOT / "roles/replica/files/sim_engine.py").read_text()
        )
        argv[name] = ["env", "-i", *(f"{key}={value}" for key, value in launch["env"].items()), "python3", "/opt/stock-engine/engine.py", *launch["args"][1:]]
    follower = subprocess.Popen([str(LAB_SH), "console", "n2", *argv["n2"]], env=hosts.lab.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = plan["leader"]["url"] + "/health"
        seconds = float(hosts.lab.console("n1", f"python3 -c {shlex.quote(UNTIL_HEALTHY)} {url} {shlex.join(argv['n1'])}").stdout)
    finally:
        hosts.lab.console("n2", "pkill -9 -f '[s]tock-engine/engine.py'", check=False)
        follower.wait()
    more = hosts.ready_seconds - seconds  # type: ignore[attr-defined]
    return [figures.at_most("start of the service until it is proven, less the engine's own start by hand", more, 3, " s", 1)]


def _killed(hosts: Hosts) -> list[Figure]:
    """The follower's engine is killed while it loads. Both the verdict and the end of the play, with everything undone, are timed from there."""
    slow = {**SIMULATED, "args": ["--sim-load-seconds", "120", "--sim-gpu-mib", "48000"], "ready_timeout": 180}
    environment = {**hosts.lab.environment, **hosts.settings(), "PYTHONUNBUFFERED": "1"}
    play = subprocess.Popen(
        [str(LAB_SH), "run", *hosts.ours("deploy_replica", replica_profile=slow)], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert play.stdout is not None
    killed: float | None = None
    verdict: float | None = None
    try:
        for line in play.stdout:
            if killed is None and re.search(r"rank 1 \(n2\): (joining|loading)", line):
                hosts.lab.console("n2", "while ! pkill -9 -f '[c]urrent/sim_engine.py'; do sleep 0.05; done")
                killed = time.monotonic()
            if killed is not None and verdict is None and re.search(r"rank \d \(n\d\): failed", line):
                verdict = time.monotonic()
        play.wait()
    finally:
        play.kill()
    if killed is None or verdict is None or play.returncode != 2:
        raise SystemExit(f"the deploy with a killed rank ended with {play.returncode}, and not as it should")
    return [
        figures.at_most("a rank is killed while it loads, until the play says so", verdict - killed, 5, " s", 1),
        Figure("the same, until all is undone and the play has ended", f"{time.monotonic() - killed:.1f} s"),
    ]


def _stock(hosts: Hosts, plan: dict[str, Any]) -> list[Figure]:
    inventory = hosts.lab.directory / "stock.json"
    entries = {
        name: {"stock_rank": shard["rank"], "stock_args": shard["launches"][-1]["args"][1:], "stock_env": shard["launches"][-1]["env"]}
        for name, shard in plan["shards"].items()
    }
    variables = {"stock_program": str(ROOT / "roles/replica/files/sim_engine.py"), "stock_leader": plan["leader"]["address"]}
    inventory.write_text(json.dumps({"all": {"hosts": entries, "vars": variables}}), encoding="utf-8")
    command = hosts.command(str(ROOT / "tests/bench/stock/deploy.yml"), "-i", str(inventory))
    hosts.lab.console("n1", "chmod 1777 /run/fake_nvml/processes", check=False)
    began = time.monotonic()
    first, _said = hosts.sessions(lambda: hosts.run(command))
    seconds = time.monotonic() - began
    second, _said = hosts.sessions(lambda: hosts.run(command))
    return [
        Figure("stock modules: SSH sessions of a first deploy on each host, at most", str(max(first.values()))),
        Figure("stock modules: SSH sessions of a second one on each host, at most", str(max(second.values()))),
        Figure("stock modules: first deploy, the whole play", f"{seconds:.1f} s"),
    ]


def main() -> None:
    figures.show("Two real hosts", measure())


if __name__ == "__main__":
    main()
