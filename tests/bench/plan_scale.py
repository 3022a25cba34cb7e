# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the plan costs with many hosts: the rules alone, and plan_replica.yml from recorded facts, which contacts no host. And what a deploy of as many
ranks costs: deploy_replica.yml --check, whose one call for each rank (module shard) runs on this machine.

    .venv/bin/python tests/bench/plan_scale.py [--hosts 200,400,1000] [--playbook 200,1000] [--deploy 200,1000] [--profile N]

Each host has 8 GPUs and 10 HCAs (8 of one fabric, 2 of storage), as an HGX node has. Times are CPU seconds of the user's, so that a busy machine
changes them little; what to compare between machines is the ratio time(2n)/time(n): 2 is linear. `--profile N` shows where the time of the
plan for N hosts goes. See docs/performance.md.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import math
import multiprocessing
import os
import pathlib
import pstats
import resource
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import figures
from figures import ROOT, Figure

from ansible_collections.rankzero.inference.plugins.plugin_utils.plan import HostInput, Request, build_plan

GPUS, HCAS, COMPUTE = 8, 10, 8


def host_facts(number: int) -> dict[str, Any]:
    """Whole facts of one host; every host has other addresses, UUIDs and GUIDs."""
    high, low = divmod(number, 250)
    address = f"10.0.{high}.{low + 1}"
    gpus = [
        {
            "index": index,
            "uuid": f"GPU-{number:08x}-0000-4000-8000-{index:012d}",
            "pci_bdf": f"0000:{0x10 + 10 * index:02x}:00.0",
            "vendor": "nvidia",
            "model": "NVIDIA H100 80GB HBM3",
            "arch": "hopper",
            "compute_capability": "9.0",
            "numa_node": index // 4,
            "memory": {"model": "discrete", "total_mib": 81559, "used_mib": 0, "reserved_mib": 551, "unattributed_mib": 0},
            "partition": {"kind": None, "parent_uuid": None, "profile": None, "mode_current": False, "mode_pending": False},
            "interconnect_domain": None,
            "processes": [],
            "compute_mode": "default",
            "health": {"state": "ok", "reasons": []},
            "vendor_data": {},
            "errors": {},
        }
        for index in range(GPUS)
    ]
    hcas = [_hca(number, index, high, low + 1) for index in range(HCAS)]
    interfaces = [
        {"name": "lo", "kind": "loopback", "up": True, "addresses": ["127.0.0.1/8"]},
        {"name": "mgmt0", "kind": "physical", "up": True, "carrier": True, "addresses": [f"{address}/16"], "master": None},
    ]
    interfaces += [
        {"name": hca["netdevs"][0], "kind": "physical", "up": True, "carrier": True, "addresses": [f"{hca['gids'][3]['address']}/16"], "master": None}
        for hca in hcas
    ]
    topology = {
        "gpu_gpu": {gpu["uuid"]: {other["uuid"]: "NV" for other in gpus if other is not gpu} for gpu in gpus},
        "gpu_hca": {gpu["uuid"]: {hca["name"]: "PIX" if hca["name"] == f"mlx5_{gpu['index']}" else "NODE" for hca in hcas} for gpu in gpus},
    }
    return {
        "schema": 1,
        "gathered_at": "2026-01-31T12:00:00Z",
        "gpus": gpus,
        "hcas": hcas,
        "interfaces": interfaces,
        "topology": topology,
        "host": {
            "hostname": f"n{number}",
            "user": "root",
            "privileged": True,
            "service_manager": "systemd",
            "supervisord": None,
            "python": {"executable": "/usr/bin/python3", "version": "3.11.2"},
        },
        "routes": [{"destination": "0.0.0.0/0", "gateway": "10.0.255.254", "interface": "mgmt0", "metric": 100}],
        "default_route": {"interface": "mgmt0", "gateway": "10.0.255.254"},
        "hostname_resolves_to": [address],
        "limits": {"memlock_bytes": "unlimited", "ephemeral_ports": [32768, 60999], "imex": {"service": None, "channels": [], "domain": None}},
        "drivers": {"nvidia": {"state": "ok", "message": None, "hint": None, "driver": "580.95.05"}},
        "engines": {},
        "shards": {},
        "cordoned": None,
        "models": {
            "/models/glm": {"exists": True, "readable": True, "kind": "directory", "bytes": 10**12, "weight_bytes": 10**12, "files": 90, "config": None}
        },
        "ports_in_use": [
            {"port": port, "address": "0.0.0.0", "pid": port, "process": "daemon", "shard": None, "listening": True} for port in (22, 111, 9100, 9400)
        ],
    }


def _hca(number: int, index: int, high: int, low: int) -> dict[str, Any]:
    """A RoCE port; the last two are of the storage network. Its GID table has the four usual entries."""
    network = 20 if index < COMPUTE else 30
    address = f"10.{network + index % COMPUTE}.{high}.{low}"
    guid = f"b8ce:f603:{number:04x}:{index:04x}"
    gids = [
        {
            "index": slot,
            "gid": f"fe80::{guid}" if slot < 2 else f"::ffff:{address}",
            "type": "IB/RoCE v1" if slot % 2 == 0 else "RoCE v2",
            "netdev": f"eth{index}",
            "address": address if slot > 1 else None,
            "network": f"10.{network + index % COMPUTE}.0.0/16" if slot > 1 else None,
            "vlan": None,
        }
        for slot in range(4)
    ]
    return {
        "name": f"mlx5_{index}",
        "port": 1,
        "pci_bdf": f"0000:{0x11 + 10 * index:02x}:00.0",
        "numa_node": index // 5,
        "driver": "mlx5_core",
        "link_layer": "ethernet",
        "node_type": "ca",
        "transport": "roce",
        "state": "active",
        "phys_state": "linkup",
        "rate_gbps": 400 if index < COMPUTE else 100,
        "netdevs": [f"eth{index}"],
        "mtu": 4096,
        "is_vf": False,
        "uverbs": f"uverbs{index}",
        "lid": None,
        "sm_lid": None,
        "node_guid": guid,
        "sys_image_guid": guid,
        "gids": gids,
        "fabrics": [f"roce:10.{network + index % COMPUTE}.0.0/16"],
        "usable": True,
        "reasons": [],
        "errors": {},
    }


FABRICS = {"compute": {"keys": [f"roce:10.{20 + index}.0.0/16" for index in range(COMPUTE)]}}
OPTIONS = {"replica_fabric": "compute", "replica_fabrics": FABRICS}


def profile(nodes: int) -> dict[str, Any]:
    return {"name": "big", "engine": "sim", "model_path": "/models/glm", "tp": GPUS, "pp": nodes, "nodes": nodes, "gpus_per_node": GPUS}


def user_seconds(work: Callable[..., Any], *arguments: Any) -> float:
    """User CPU seconds of one call in a process of its own, so that nothing that an earlier call has parsed is there already."""
    here, there = multiprocessing.Pipe(duplex=False)

    def measured() -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
        work(*arguments)
        there.send(resource.getrusage(resource.RUSAGE_SELF).ru_utime - before)

    child = multiprocessing.get_context("fork").Process(target=measured)
    child.start()
    child.join()
    if child.exitcode:
        raise SystemExit("the plan was refused")
    return float(here.recv())


def measure() -> list[Figure]:
    """A plan of 1,000 hosts with 8 GPUs and 10 HCAs each, all of them ranks, and how it grows from 500."""
    seconds = {}
    for count in (500, 1000):
        facts = {f"n{number}": host_facts(number) for number in range(1, count + 1)}
        seconds[count] = min(user_seconds(planned, facts, count) for _turn in range(3))
    return [
        figures.at_most("plan of 1,000 ranks x 8 GPUs, user CPU", seconds[1000], 2, " s"),
        figures.at_most("time(1,000 ranks) / time(500 ranks)", seconds[1000] / seconds[500], 2.2),
    ]


def request(facts: dict[str, dict[str, Any]], nodes: int) -> Request:
    return Request(replica="glm", profile=profile(nodes), hosts=tuple(HostInput(name, found) for name, found in facts.items()), options=OPTIONS)


def planned(facts: dict[str, dict[str, Any]], nodes: int) -> dict[str, Any]:
    plan = build_plan(request(facts, nodes))
    if plan["faults"]:
        raise SystemExit(f"the plan was refused: {plan['faults'][:3]}")
    return plan


def measure_rules(counts: list[int]) -> None:
    print(f"{'build_plan':<34}{'hosts':>7}{'user s':>9}{'ratio':>8}{'ms/host':>9}{'peak MiB':>10}")
    for title, nodes_of in (("2 ranks from a pool of n", lambda _count: 2), ("n ranks", lambda count: count)):
        last: tuple[int, float] | None = None
        for count in counts:
            facts, nodes = {f"n{number}": host_facts(number) for number in range(1, count + 1)}, nodes_of(count)
            seconds = min(user_seconds(planned, facts, nodes) for _turn in range(3))
            tracemalloc.start()
            planned(facts, nodes)
            peak = tracemalloc.get_traced_memory()[1] / 2**20
            tracemalloc.stop()
            # The growth for twice the hosts, from the growth for as many times as these are: 2 is linear.
            ratio = f"{2 ** (math.log2(seconds / last[1]) / math.log2(count / last[0])):.2f}" if last and seconds and last[1] else "-"
            print(f"{title:<34}{count:>7}{seconds:>9.2f}{ratio:>8}{1000 * seconds / count:>9.2f}{peak:>10.1f}", flush=True)
            last = (count, seconds)


def measure_playbook(counts: list[int]) -> None:
    """plan_replica.yml over an inventory whose hosts carry their facts; a host that was contacted would fail: its ssh is /bin/false."""
    _measure(
        "plan_replica.yml, recorded facts",
        ["plan_replica.yml"],
        counts,
        {"2 ranks from a pool of n": lambda _count: 2, "n ranks": lambda count: count},
        lambda _number: {"ansible_ssh_executable": "/bin/false"},
    )


def measure_deploy(counts: list[int]) -> None:
    """deploy_replica.yml in check mode: plan, rendering, comparison, and one call for each rank, all but the gate of a real one. Hosts are this machine."""
    local = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable, "replica_become": False}
    _measure(
        "deploy_replica.yml --check",
        ["deploy_replica.yml", "--check", "-f", "10"],
        counts,
        {"n ranks": lambda count: count},
        lambda number: {**local, "replica_root": f"/nonexistent/n{number}"},
    )


def _measure(
    heading: str,
    words: list[str],
    counts: list[int],
    shapes: dict[str, Callable[[int], int]],
    variables: Callable[[int], dict[str, Any]],
) -> None:
    print(f"\n{heading:<34}{'hosts':>7}{'user s':>9}{'ratio':>8}{'ms/host':>9}{'s':>8}{'peak MiB':>10}{'inventory MiB':>15}")
    for title, nodes_of in shapes.items():
        last: tuple[int, float] | None = None
        for count in counts:
            with tempfile.TemporaryDirectory() as folder:
                inventory = pathlib.Path(folder) / "inventory.json"
                hosts = {f"n{number}": {"inference_node": host_facts(number), **variables(number)} for number in range(1, count + 1)}
                group = {"hosts": hosts, "vars": {"replica_profile": profile(nodes_of(count)), **OPTIONS}}
                inventory.write_text(json.dumps({"all": {"children": {"replica_glm": group}}}), encoding="utf-8")
                program, playbook = str(pathlib.Path(sys.executable).parent / "ansible-playbook"), str(ROOT / "playbooks" / words[0])
                command = [program, "-i", str(inventory), playbook, "-e", "replica_name=glm", "-e", "replica_gather=false", *words[1:]]
                began = time.monotonic()
                seconds, peak, code = _child(command)
                if code:
                    raise SystemExit("the playbook failed")
                ratio = f"{2 ** (math.log2(seconds / last[1]) / math.log2(count / last[0])):.2f}" if last else "-"
                print(
                    f"{title:<34}{count:>7}{seconds:>9.2f}{ratio:>8}{1000 * seconds / count:>9.2f}{time.monotonic() - began:>8.1f}{peak:>10.1f}"
                    f"{inventory.stat().st_size / 2**20:>15.1f}",
                    flush=True,
                )
                last = (count, seconds)


def _child(command: list[str]) -> tuple[float, float, int]:
    """User CPU seconds of a command with its own children, peak MiB of the largest process, exit code."""
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")},
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_LOCALHOST_WARNING": "False",
    }
    child = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    _pid, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_utime, usage.ru_maxrss / 1024, child.returncode


def show_profile(count: int) -> None:
    facts = {f"n{number}": host_facts(number) for number in range(1, count + 1)}
    recorder = cProfile.Profile()
    recorder.runcall(planned, facts, count)
    pstats.Stats(recorder).sort_stats("cumulative").print_stats(35)


def main() -> None:
    parser = argparse.ArgumentParser(description="What the plan costs with many hosts.")
    parser.add_argument("--hosts", default="200,400,1000", help="numbers of hosts for build_plan")
    parser.add_argument("--playbook", default="200,1000", help="numbers of hosts for plan_replica.yml; empty: none")
    parser.add_argument("--deploy", default="", help="numbers of ranks for deploy_replica.yml --check; empty: none")
    parser.add_argument("--profile", type=int, help="only show where the time of build_plan goes for that many ranks")
    options = parser.parse_args()
    if options.profile:
        show_profile(options.profile)
        return
    for measure_them, counts in ((measure_rules, options.hosts), (measure_playbook, options.playbook), (measure_deploy, options.deploy)):
        if counts:
            measure_them([int(count) for count in counts.split(",")])


if __name__ == "__main__":
    main()
