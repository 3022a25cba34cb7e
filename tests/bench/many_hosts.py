# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the controller spends with many hosts: a converged run of deploy_replica.yml beside `ansible -m ping`, and a gather beside a play of ping.

    .venv/bin/python tests/bench/many_hosts.py [--hosts 200] [--forks 10] [--turns 2]

All hosts are on this machine (connection local), each with 8 (simulated) GPUs and 10 HCAs; a replica of two ranks runs on two of them, so the others are
a pool. Modules run on the same CPUs as the controller, so a ratio holds both sides' work. The commands take turns, and the least of each counts.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import figures
import fleet
from figures import BIN, ROOT, Cost, Figure

GPUS = 8


def hosts(directory: pathlib.Path, count: int) -> fleet.Fleet:
    tree = directory / "hardware"
    drawn = [sys.executable, str(ROOT / "tests/lab/hardware.py"), "--host", "bench", "--number", "1", "--gpus", "8:H100", "--hcas", "10:ib", "--out", str(tree)]
    subprocess.run(drawn, check=True)
    built = subprocess.run([sys.executable, str(ROOT / "tests/fake_nvml/build.py")], capture_output=True, text=True, check=True).stdout
    sysfs = (("replica_sysfs_root", str(tree / "opt/fakesys")),)
    named = [fleet.Host(f"n{number}", f"127.{80 + number // 250}.1.{number % 250 + 1}", gpus=GPUS, variables=sysfs) for number in range(count)]
    profile = {
        "name": "bench",
        "engine": "sim",
        "model_path": str(ROOT / "README.md"),
        "served_model_name": "bench",
        "tp": 4,
        "nodes": 2,
        "gpus_per_node": 2,
        "ready_timeout": 120,
        "args": ["--sim-load-seconds", "0.2", "--sim-gpu-mib", "48000"],
        "env": {"SIM_PROCESS_DIRECTORY": str(directory / "fleet/gpu-processes")},
    }
    library = pathlib.Path(built.strip().splitlines()[-1])
    return fleet.Fleet(directory / "fleet", named, library, group="replica_bench", replica_http_port=8765, replica_fabric="none", replica_profile=profile)


def play(directory: pathlib.Path, module: str, arguments: str = "{}") -> str:
    """A play of one task, as plain as a play can be."""
    path = directory / f"{module}.yml"
    task = f"- {{name: Run it, {module}: {arguments}}}"
    path.write_text(
        f"- {{name: Play, hosts: replica_bench, gather_facts: false, environment: '{{{{ replica_module_environment }}}}', tasks: [{task[2:]}]}}\n",
        encoding="utf-8",
    )
    return str(path)


def measure(count: int, forks: int, turns: int) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="rankzero-bench-") as folder:
        directory = pathlib.Path(folder)
        many = hosts(directory, count)
        try:
            return _measure(many, directory, count, forks, turns)
        finally:
            many.stop()


def _measure(many: fleet.Fleet, directory: pathlib.Path, count: int, forks: int, turns: int) -> list[Figure]:
    common = ["-i", str(many.inventory), "-f", str(forks)]
    deploy = [str(BIN / "ansible-playbook"), *common, str(fleet.PLAYBOOKS / "deploy_replica.yml"), "-e", json.dumps({"replica_name": "bench"})]
    commands = {
        "ping": [str(BIN / "ansible"), *common, "all", "-m", "ansible.builtin.ping"],
        "ping play": [str(BIN / "ansible-playbook"), *common, play(directory, "ansible.builtin.ping")],
        "facts play": [
            str(BIN / "ansible-playbook"),
            *common,
            play(directory, "rankzero.inference.node_facts", "{sysfs_root: '{{ replica_sysfs_root }}', replica_root: '{{ replica_root }}'}"),
        ],
        "converged": deploy,
    }
    environment = fleet.ansible_environment()
    first = figures.cost(deploy, environment)
    if first.code:
        raise SystemExit(first.output)
    runs: dict[str, list[Cost]] = {name: [] for name in commands}
    for _turn in range(turns):
        for name, command in commands.items():
            done = figures.cost(command, environment)
            if done.code or (name == "converged" and "changed=0" not in done.output):
                raise SystemExit(done.output)
            runs[name].append(done)
    wall = {name: min(one.wall for one in costs) for name, costs in runs.items()}
    user = {name: min(one.user for one in costs) for name, costs in runs.items()}
    told = f"{count} local hosts, {forks} forks"
    return [
        figures.at_most(f"converged run / ansible -m ping, time ({told})", wall["converged"] / wall["ping"], 1.5),
        figures.at_most("converged run / ansible -m ping, user CPU", user["converged"] / user["ping"], 1.5),
        figures.at_most("play of node_facts / play of ping, user CPU (8 GPUs, 10 HCAs)", user["facts play"] / user["ping play"], 1.5),
        figures.at_most("converged run / play of node_facts alone, user CPU", user["converged"] / user["facts play"], 1.15),
        Figure(
            "user CPU for each host: ping, play of node_facts, converged",
            ", ".join(f"{1000 * user[n] / count:.0f}" for n in ("ping", "facts play", "converged")) + " ms",
        ),
        Figure("first deploy of two ranks from the pool / ansible -m ping, user CPU", f"{first.user / user['ping']:.2f}"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="What the controller spends with many hosts.")
    parser.add_argument("--hosts", type=int, default=200)
    parser.add_argument("--forks", type=int, default=10)
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    figures.show("Many local hosts", measure(options.hosts, options.forks, options.turns))


if __name__ == "__main__":
    main()
