# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Planning from recorded facts without contacting a host, and the collection as it is installed."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import fleet
import recorded_hosts

BIN = pathlib.Path(sys.executable).parent


def recorded(address: str, gpus: int = 8) -> dict[str, Any]:
    """Facts as a person would write them down: only what the plan needs."""
    return {
        "schema": 1,
        "host": {"service_manager": "systemd", "python": {"executable": "/usr/bin/python3"}},
        "gpus": [
            {
                "index": index,
                "uuid": f"GPU-{address}-{index}",
                "pci_bdf": f"0000:{16 + index:02x}:00.0",
                "model": "NVIDIA H100 80GB HBM3",
                "compute_capability": "9.0",
                "memory": {"model": "discrete", "total_mib": 81559},
                "health": {"state": "ok"},
            }
            for index in range(gpus)
        ],
        "hcas": [
            {
                "name": f"mlx5_{index}",
                "port": 1,
                "pci_bdf": f"0000:{64 + index:02x}:00.0",
                "link_layer": "Ethernet",
                "usable": True,
                "fabric": "roce:10.1.0.0/16",
                "gids": [{"index": 3, "gid": f"0000:0000:0000:0000:0000:ffff:0a01:0{index}0{address[-1]}", "type": "RoCE v2", "netdev": f"eth{index}"}],
            }
            for index in range(4)
        ],
        "interfaces": [{"name": "mgmt0", "up": True, "addresses": [f"{address}/24"]}],
        "default_route": {"interface": "mgmt0", "gateway": "192.0.2.254"},
        "ports_in_use": [22],
        "models": {"/models/glm": {"exists": True, "readable": True, "bytes": 10, "weight_bytes": 10, "files": 1}},
    }


def inventory(tmp_path: pathlib.Path) -> pathlib.Path:
    """Hosts whose ssh is a program that leaves a note when it is called."""
    ssh = tmp_path / "ssh"
    ssh.write_text(f"#!/bin/sh\ntouch {tmp_path}/contacted\nexit 255\n")
    ssh.chmod(0o755)
    hosts = {
        f"gpu-{index}": {
            "ansible_connection": "ssh",
            "ansible_host": "127.0.0.1",
            "ansible_ssh_executable": str(ssh),
            "inference_node": recorded(f"192.0.2.{index}"),
        }
        for index in (1, 2)
    }
    path = tmp_path / "inventory.json"
    profile = {"engine": "sim", "model_path": "/models/glm", "tp": 8, "pp": 2, "nodes": 2, "gpus_per_node": 8}
    path.write_text(json.dumps({"all": {"children": {"replica_glm": {"hosts": hosts, "vars": {"replica_profile": profile}}}}}))
    return path


def plan(tmp_path: pathlib.Path, playbook: str, cwd: pathlib.Path, environment: dict[str, str]) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    target = tmp_path / "plan.json"
    command = [
        str(BIN / "ansible-playbook"),
        "-i",
        str(inventory(tmp_path)),
        playbook,
        "-e",
        "replica_name=glm",
        "-e",
        "replica_gather=false",
        "-e",
        f"plan_file={target}",
        "-e",
        "replica_fabrik=none",
    ]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert not (tmp_path / "contacted").exists(), "a host was contacted"
    return done, json.loads(target.read_text()) if target.exists() else {}


def test_a_plan_from_inventory_variables_contacts_no_host(tmp_path: pathlib.Path) -> None:
    done, found = plan(tmp_path, str(fleet.PLAYBOOKS / "plan_replica.yml"), fleet.ROOT, fleet.ansible_environment())
    assert done.returncode == 0, done.stdout + done.stderr
    assert found["fabric"] == "roce:10.1.0.0/16" and found["leader"]["host"] == "gpu-1"
    env = found["shards"]["gpu-2"]["launches"][-1]["env"]
    assert env["NCCL_IB_HCA"] == "=mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_3:1" and env["NCCL_IB_GID_INDEX"] == "3" and env["NCCL_IB_DISABLE"] == "0"
    assert env["NCCL_SOCKET_IFNAME"] == "=mgmt0" and env["GLOO_SOCKET_IFNAME"] == "mgmt0"
    assert set(found["shards"]["gpu-2"]["launches"][-1]["why"]) >= set(env)
    told = [(one["field"], one["wanted"]) for one in found["warnings"] if one["field"].startswith("replica_")]
    assert told == [("replica_fabrik", "replica_fabric")], "and no warning of a variable that is one"


def test_what_a_shard_would_see_can_be_pasted_into_a_shell(tmp_path: pathlib.Path) -> None:
    """show_environment.yml: every variable with its reason; sh makes of it exactly the plan's environment. The fabric is given for an inventory group."""
    fabrics = {"replica_fabric": "x", "replica_fabrics": {"x": {"hosts": {"replica_glm": {"hcas": ["mlx5_0", "mlx5_2"]}}}}}
    command = [str(BIN / "ansible-playbook"), "-i", str(inventory(tmp_path)), str(fleet.PLAYBOOKS / "show_environment.yml")]
    words = ["-e", "replica_name=glm", "-e", "replica_gather=false", "-e", json.dumps(fabrics)]
    done = subprocess.run([*command, *words], cwd=fleet.ROOT, env=fleet.ansible_environment(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and not (tmp_path / "contacted").exists(), done.stdout + done.stderr
    block = done.stdout[done.stdout.index("# rank 1 on gpu-2, launch ") :]
    lines = list(itertools.takewhile(lambda line: line.startswith(("# ", "export ")), block.splitlines()))
    assert all("    # " in line for line in lines if line.startswith("export ")), "a reason for each"
    seen = subprocess.run(["env", "-i", "sh", "-euc", "\n".join(lines) + "\n/usr/bin/env"], capture_output=True, text=True, check=True).stdout
    found = dict(line.split("=", 1) for line in seen.splitlines())
    assert (found["NCCL_IB_HCA"], found["NCCL_SOCKET_IFNAME"], found["GLOO_SOCKET_IFNAME"]) == ("=mlx5_0:1,mlx5_2:1", "=mgmt0", "mgmt0")
    assert found["NCCL_IB_GID_INDEX"] == "3" and found["CUDA_VISIBLE_DEVICES"].startswith("GPU-192.0.2.2-0,")


def test_a_report_says_what_would_stop_a_replica(tmp_path: pathlib.Path) -> None:
    """node_report.yml on a recorded host: HCAs by fabric with the reasons against them, the driver, limits, and interfaces in one subnet."""
    one = recorded_hosts.write("iface_same_subnet", tmp_path / "host")["two"]
    one.tree.hca("mlx5_0", netdevs=["ens1"], gids=[recorded_hosts.v2("10.1.0.1", "ens1")])
    one.tree.hca("mlx5_1", netdevs=["ens2"], state="1: DOWN")
    one.tree.interface("ens1", ["10.1.0.1/24"])
    for pid in ("self", "1"):
        one.tree.process_limits(65536, pid=pid)
    one.tree.write_network_state(["127.0.1.1"])
    places = {"sysfs": one.tree.sysfs, "proc": one.tree.proc, "dev": one.tree.dev}
    variables = {f"replica_{name}_root": str(path) for name, path in places.items()}
    variables.update(replica_network_state=str(one.tree.network_state), replica_root=str(one.tree.root), replica_become=False)
    command = [str(BIN / "ansible-playbook"), "-i", "gpu-a,", "-c", "local", str(fleet.PLAYBOOKS / "node_report.yml")]
    words = ["-e", json.dumps({**variables, "ansible_python_interpreter": sys.executable})]
    done = subprocess.run([*command, *words], cwd=fleet.ROOT, env=fleet.ansible_environment(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for text in (
        "roce:10.1.0.0/24",
        "the port is down",
        "no libnvidia-ml.so.1 is found",
        "a service can lock 64 KiB of memory",
        "eno9 10.0.9.1/24 and eno10 10.0.9.101/24 are in one subnet",
        "resolves to 127.0.1.1",
    ):
        assert text in done.stdout, (text, done.stdout)


def test_the_installed_collection_works_without_the_checkout(tmp_path: pathlib.Path) -> None:
    """Built, installed without network, and run from another directory by its full names."""
    environment = {key: value for key, value in fleet.ansible_environment().items() if key != "ANSIBLE_CONFIG"}
    environment.update({"ANSIBLE_HOME": str(tmp_path / "home"), "HOME": str(tmp_path)})
    built = subprocess.run(
        [str(BIN / "ansible-galaxy"), "collection", "build", str(fleet.ROOT), "--output-path", str(tmp_path)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    tarball = next(tmp_path.glob("rankzero-inference-*.tar.gz"))
    installed = subprocess.run(
        [str(BIN / "ansible-galaxy"), "collection", "install", str(tarball), "-p", str(tmp_path / "collections"), "--offline"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert installed.returncode == 0, installed.stdout + installed.stderr
    environment["ANSIBLE_COLLECTIONS_PATH"] = str(tmp_path / "collections")
    done, found = plan(tmp_path, "rankzero.inference.plan_replica", tmp_path, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(found["shards"]) == 2
    top = os.listdir(tmp_path / "collections/ansible_collections/rankzero/inference")
    assert not {".venv", ".demo", ".collections", ".ci"} & set(top)
