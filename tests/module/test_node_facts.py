# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""node_facts run by the real ansible-core: against generated hosts, with a simulated driver under the real pynvml, and on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys

import hardware_trees
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
ANSIBLE = pathlib.Path(sys.executable).parent / "ansible"
KEYS = {
    "schema",
    "gathered_at",
    "host",
    "gpus",
    "topology",
    "hcas",
    "interfaces",
    "routes",
    "default_route",
    "hostname_resolves_to",
    "limits",
    "drivers",
    "engines",
    "models",
    "ports_in_use",
    "shards",
    "cordoned",
    "locks",
    "traces",
}
H100 = """driver 580.95.05
gpu 0-1 name="NVIDIA H100 80GB HBM3" uuid=GPU-%d total=81559 reserved=551 cc=9.0
gpu 0 pci=00000000:18:00.0
gpu 1 pci=00000000:38:00.0
"""


def run(options: dict, *arguments: str, **environment: str) -> dict:
    """The result of one `ansible -m rankzero.inference.node_facts localhost`."""
    command = [
        str(ANSIBLE),
        "localhost",
        "-i",
        "localhost,",
        "-c",
        "local",
        "-e",
        "ansible_python_interpreter=" + sys.executable,
        "-m",
        "rankzero.inference.node_facts",
        "-a",
        json.dumps(options),
        *arguments,
    ]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
    values = dict(
        kept,
        ANSIBLE_COLLECTIONS_PATH=str(ROOT / ".collections"),
        ANSIBLE_HOME=str(ROOT / ".ansible"),
        ANSIBLE_CALLBACK_RESULT_FORMAT="json",
        ANSIBLE_NOCOLOR="1",
        ANSIBLE_DEPRECATION_WARNINGS="0",
        **environment,
    )
    done = subprocess.run(command, env=values, capture_output=True, text=True, check=False, timeout=120)
    assert "=> {" in done.stdout, done.stdout + done.stderr
    result = json.JSONDecoder().raw_decode(done.stdout, done.stdout.index("=> {") + 3)[0]
    assert "Traceback" not in done.stdout + done.stderr
    assert ("SUCCESS" in done.stdout) is (done.returncode == 0), done.stdout + done.stderr
    return result


def roots(tree: hardware_trees.HardwareTree, **options: object) -> dict:
    return dict(
        {
            "sysfs_root": str(tree.sysfs),
            "proc_root": str(tree.proc),
            "dev_root": str(tree.dev),
            "replica_root": str(tree.root),
            "network_state": str(tree.network_state),
        },
        **options,
    )


def generated_host(root: pathlib.Path) -> hardware_trees.HardwareTree:
    """Two GPUs with an HCA each below a switch, on two rails, and a management interface."""
    tree = hardware_trees.HardwareTree(root)
    for number, (port, bus) in enumerate(((0x15, 0x18), (0x35, 0x38))):
        bridges = ["0000:%02x:01.0" % port, "0000:%02x:00.0" % (port + 1)]
        gpu, nic = "0000:%02x:00.0" % bus, "0000:%02x:00.0" % (bus + 1)
        path = tree.pci(gpu, bridges=[*bridges, "0000:%02x:00.0" % (port + 2)], numa_node=number, vendor="0x10de", driver="nvidia")
        hardware_trees.write(path / "class", "0x030200")
        tree.pci(nic, bridges=[*bridges, "0000:%02x:01.0" % (port + 2)], numa_node=number, driver="mlx5_core")
        netdev, gid = "ens%dnp0" % number, "0000:0000:0000:0000:0000:ffff:0a%02x:0005" % (11 + number)
        tree.hca("mlx5_%d" % number, pci=nic, netdevs=[netdev], gids=[[3, gid, "RoCE v2", netdev]])
        tree.interface(netdev, ["10.%d.0.5/24" % (11 + number)], pci=nic, speed=400000)
    tree.interface("eno1", ["10.0.0.5/24"], mtu=1500)
    tree.route("default", "eno1", gateway="10.0.0.1")
    tree.route("10.0.0.0/24", "eno1")
    tree.meminfo(MemTotal=2097152, MemAvailable=1048576, CmaTotal=0, CmaFree=0)
    tree.process_limits("unlimited")
    tree.process_limits("unlimited", pid="1")
    tree.proc_file("sys/net/ipv4/ip_local_port_range", "32768\t60999")
    tree.proc_file("sys/kernel/osrelease", "6.8.0-45-generic")
    tree.proc_file("sys/kernel/random/boot_id", "2f1d8f5a-0000-4000-8000-000000000001")
    tree.proc_file("1/comm", "tini")
    tree.write_network_state(["10.0.0.5"])
    return tree


def fake_nvml(directory: pathlib.Path, state: str) -> dict[str, str]:
    """The environment that makes pynvml load the C library of tests/fake_nvml."""
    done = subprocess.run([sys.executable, str(ROOT / "tests/fake_nvml/build.py")], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("the driver's stand-in cannot be built: " + done.stderr[-200:])
    (directory / "nvml.state").write_text(state, encoding="utf-8")
    return {"LD_LIBRARY_PATH": done.stdout.strip(), "FAKE_NVML_STATE": str(directory / "nvml.state")}


def test_generated_host_with_gpus(tmp_path):
    tree = generated_host(tmp_path / "host")
    result = run(roots(tree), **fake_nvml(tmp_path, H100))
    assert result["changed"] is False and set(result["ansible_facts"]) == {"inference_node"}
    facts = result["ansible_facts"]["inference_node"]
    assert set(facts) == KEYS and facts["schema"] == 1
    assert [gpu["pci_bdf"] for gpu in facts["gpus"]] == ["0000:18:00.0", "0000:38:00.0"]
    assert facts["drivers"]["nvidia"]["driver"] == "580.95.05"
    first, second = (gpu["uuid"] for gpu in facts["gpus"])
    assert facts["topology"]["gpu_hca"] == {first: {"mlx5_0": "PIX", "mlx5_1": "SYS"}, second: {"mlx5_0": "SYS", "mlx5_1": "PIX"}}
    assert [(port["name"], port["fabrics"], port["usable"], port["reasons"]) for port in facts["hcas"]] == [
        ("mlx5_0", ["roce:10.11.0.0/24"], True, []),
        ("mlx5_1", ["roce:10.12.0.0/24"], True, []),
    ]
    assert facts["default_route"] == {"interface": "eno1", "gateway": "10.0.0.1"}
    assert facts["hostname_resolves_to"] == ["10.0.0.5"]
    assert [(interface["name"], interface["kind"], interface["speed_mbps"]) for interface in facts["interfaces"][:2]] == [
        ("ens0np0", "physical", 400000),
        ("ens1np0", "physical", 400000),
    ]
    assert (facts["limits"]["memlock_bytes"], facts["limits"]["ephemeral_ports"], facts["limits"]["kho_cma_suspect"]) == ("unlimited", [32768, 60999], False)
    host = facts["host"]
    assert (host["memory_mib"], host["memory_available_mib"], host["kernel"]) == (2048, 1024, "6.8.0-45-generic")
    assert host["boot_id"] == "2f1d8f5a-0000-4000-8000-000000000001"
    assert (facts["engines"], facts["shards"], facts["cordoned"], facts["models"]) == ({}, {}, None, {})


def test_everything_that_was_deployed_is_seen(tmp_path):
    tree = generated_host(tmp_path / "host")
    base = tree.root / "etc/rankzero"
    revision = base / "glm/revisions/f1"
    revision.mkdir(parents=True)
    (revision / "launch.json").write_text(json.dumps({"rank": 0, "nodes": 1, "labels": {"profile": "p", "engine": "sim"}}), encoding="utf-8")
    (base / "glm/current").symlink_to("revisions/f1")
    (base / "engines.d").mkdir()
    (base / "engines.d/sim-local.json").write_text(json.dumps({"engine": "sim", "name": "local", "path": sys.executable}), encoding="utf-8")
    (base / "cordoned.json").write_text(json.dumps({"by": "ann", "reason": "fan", "at": "2026-01-31"}), encoding="utf-8")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"num_attention_heads": 32}', encoding="utf-8")
    (model / "model.safetensors").write_bytes(b"x" * 100)
    facts = run(roots(tree, model_paths=[str(model), "/nonexistent"], checksum_paths=[str(model)]), "--check")["ansible_facts"]["inference_node"]
    assert {replica: (shard["rank"], shard["revision"], shard["profile"], shard["ready"]) for replica, shard in facts["shards"].items()} == {
        "glm": (0, "f1", "p", False)
    }
    assert facts["engines"]["sim"][0]["problems"] == []
    assert facts["cordoned"]["by"] == "ann"
    assert facts["models"][str(model)]["weight_bytes"] == 100
    assert facts["models"][str(model)]["config"] == {"num_attention_heads": 32}
    assert set(facts["models"][str(model)]["sha256"]) == {"config.json", "model.safetensors"}
    assert facts["models"]["/nonexistent"]["exists"] is False


def test_an_empty_host_is_all_stated(tmp_path):
    """Nothing can be read at all: every unknown is null with a reason, and nothing fails."""
    empty = str(tmp_path / "nothing")
    facts = run({"sysfs_root": empty, "proc_root": empty, "dev_root": empty, "replica_root": empty, "network_state": empty})["ansible_facts"]["inference_node"]
    assert set(facts) == KEYS
    assert (facts["hcas"], facts["interfaces"], facts["routes"], facts["default_route"]) == ([], [], [], None)
    assert {"network", "boot_id", "kernel", "memory_mib"} <= set(facts["host"]["errors"])
    assert facts["host"]["memory_mib"] is None
    assert facts["limits"]["memlock_bytes"] is None and facts["limits"]["errors"]["memlock_bytes"]
    assert facts["drivers"]["nvidia"]["state"] != "ok"


def test_this_machine():
    """The host that runs the tests, as it is."""
    with listener("127.0.0.9") as listening, bound("127.0.0.9") as waiting:
        facts = run({"probe_ports": [waiting, listening]})["ansible_facts"]["inference_node"]
    assert set(facts) == KEYS
    assert facts["host"]["hostname"] == socket.gethostname()
    assert facts["host"]["cpus"] == len(os.sched_getaffinity(0))
    assert facts["host"]["python"]["executable"] == sys.executable
    assert "lo" in [interface["name"] for interface in facts["interfaces"]]
    assert facts["drivers"]["nvidia"]["message"] or facts["gpus"]
    if facts["host"]["service_manager"] is None:
        assert facts["host"]["errors"]["service_manager"]
    rows = {row["port"]: row for row in facts["ports_in_use"]}
    assert (rows[listening]["address"], rows[listening]["listening"], rows[listening]["pid"]) == ("127.0.0.9", True, os.getpid())
    assert rows[listening]["shard"] is None and rows[listening]["process"]
    assert rows[waiting] == {"port": waiting, "address": None, "pid": None, "process": None, "shard": None, "listening": False}
    assert len(json.dumps(facts)) < 64 * 1024, "facts are kept in the fact cache for each host"


@contextlib.contextmanager
def bound(address: str):
    """The port of a socket that is bound and does not listen."""
    with socket.socket() as held:
        held.bind((address, 0))
        yield held.getsockname()[1]


@contextlib.contextmanager
def listener(address: str):
    with socket.socket() as held:
        held.bind((address, 0))
        held.listen()
        yield held.getsockname()[1]


@pytest.mark.parametrize("port", [0, 65536])
def test_ports_that_are_none_are_refused(port):
    result = run({"probe_ports": [port]})
    assert result["msg"] == "probe_ports: %d is no TCP port (1 to 65535)" % port


def test_documentation_names_what_is_returned():
    done = subprocess.run(
        [str(ANSIBLE.parent / "ansible-doc"), "-t", "module", "rankzero.inference.node_facts", "--json"],
        capture_output=True,
        text=True,
        check=True,
        env=dict(os.environ, ANSIBLE_COLLECTIONS_PATH=str(ROOT / ".collections")),
    )
    documented = json.loads(done.stdout)["rankzero.inference.node_facts"]
    assert set(documented["return"]["ansible_facts"]["contains"]["inference_node"]["contains"]) == KEYS
