# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every recorded machine through the real node_facts (one play over all of them, with the C library under pynvml), and what the plan makes of the facts."""

from __future__ import annotations

import fcntl
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import machine_expectations
import pytest
import recorded_hosts
from machine_expectations import plan, sentences

from ansible_collections.rankzero.inference.plugins.plugin_utils import nccl

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
MIB = 1 << 20
PLAY = """
- hosts: all
  gather_facts: false
  tasks:
    - rankzero.inference.node_facts:
        sysfs_root: "{{ tree }}/sys"
        proc_root: "{{ tree }}/proc"
        dev_root: "{{ tree }}/dev"
        replica_root: "{{ tree }}"
        network_state: "{{ tree }}/network.json"
        model_paths: ["{{ model }}"]
      environment: "{{ driver }}"
    - ansible.builtin.copy:
        content: "{{ dict(ansible_play_hosts | zip(ansible_play_hosts | map('extract', hostvars, 'inference_node'))) | to_json }}"
        dest: "{{ results }}"
        mode: "0600"
      run_once: true
"""
Facts = dict[str, Any]
MACHINES = [name for name in recorded_hosts.names() if recorded_hosts.load(name)["kind"] == "machine"]
FactsOf = Callable[[str], dict[str, Facts]]


@pytest.fixture(scope="session")
def gathered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Facts]]:
    """`{fixture: {host: facts}}`, gathered once for all workers of this run."""
    shared = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        shared = shared.parent
    root = shared / "recorded_hosts"
    root.mkdir(exist_ok=True)
    results = root / "facts.json"
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not results.exists():
            gather(root, results)
    facts: dict[str, dict[str, Facts]] = {}
    for name, found in json.loads(results.read_text(encoding="utf-8")).items():
        fixture, _slash, host = name.partition("/")
        facts.setdefault(fixture, {})[host] = json.loads(json.dumps(found).replace(f"{root / fixture / host}/", "/"))  # as if its root were /
    return facts


def gather(root: pathlib.Path, results: pathlib.Path, names: Sequence[str] = recorded_hosts.names()) -> None:
    library = subprocess.run([sys.executable, str(ROOT / "tests/fake_nvml/build.py")], capture_output=True, text=True, check=True).stdout.strip()
    inventory = {}
    for fixture in names:
        for host, one in recorded_hosts.write(fixture, root / fixture).items():
            inventory[f"{fixture}/{host}"] = variables(one, library)
    (root / "model").mkdir()
    (root / "model/config.json").write_text('{"num_attention_heads": 32}', encoding="utf-8")
    (root / "inventory.json").write_text(json.dumps({"all": {"hosts": inventory}}), encoding="utf-8")
    (root / "play.yml").write_text(PLAY, encoding="utf-8")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
    settings = {
        "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections"),
        "ANSIBLE_HOME": str(root / "ansible"),
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_FORKS": "4",
    }
    words = ["-i", str(root / "inventory.json"), "-e", json.dumps({"results": str(results) + ".part", "model": str(root / "model")}), str(root / "play.yml")]
    program = pathlib.Path(sys.executable).parent / "ansible-playbook"
    done = subprocess.run([str(program), *words], env={**kept, **settings}, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0 and "Traceback" not in done.stdout + done.stderr, done.stdout[-4000:] + done.stderr[-4000:]
    pathlib.Path(str(results) + ".part").rename(results)


def variables(one: recorded_hosts.Recorded, library: str) -> Facts:
    one.tree.write_network_state(list(one.resolves_to))
    state = one.tree.root / "nvml.state"
    if one.nvml is not None:
        state.write_text(one.nvml, encoding="ascii")
    if one.library_version:
        library = versioned(library, one.tree.root / "driver", one.library_version)
    driver = {"FAKE_NVML_STATE": str(state), **({"LD_LIBRARY_PATH": library} if one.library else {})}
    return {"ansible_connection": "local", "ansible_python_interpreter": sys.executable, "tree": str(one.tree.root), "driver": driver}


def versioned(library: str, folder: pathlib.Path, version: str) -> str:
    """A copy of the library under the name that a driver package gives it, and the link that the loader looks for."""
    folder.mkdir()
    shutil.copy(os.path.join(library, "libnvidia-ml.so.1"), folder / f"libnvidia-ml.so.{version}")
    (folder / "libnvidia-ml.so.1").symlink_to(f"libnvidia-ml.so.{version}")
    return str(folder)


@pytest.fixture
def facts_of(gathered: dict[str, dict[str, Facts]]) -> FactsOf:
    return lambda name: gathered[name]


def environments(hosts: dict[str, Facts], *arguments: Any, **more: Any) -> dict[str, dict[str, str]]:
    """The environment of each rank's engine, by host, of a plan that must have no faults."""
    found = plan(hosts, *arguments, **more)
    assert found["faults"] == []
    return {name: shard["launches"][-1]["env"] for name, shard in found["shards"].items()}


def faults(hosts: dict[str, Facts], *arguments: Any, **more: Any) -> str:
    found = plan(hosts, *arguments, **more)
    assert found["faults"] and not found["shards"]
    return "\n".join(sentences(found["faults"]))


def ports(facts: Facts) -> dict[str, Facts]:
    return {port["name"]: port for port in facts["hcas"]}


def test_every_fixture_has_a_test() -> None:
    """Those of kind `machine` say themselves what must come of them."""
    known = set(recorded_hosts.GID_TABLES) | {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    others = set(recorded_hosts.names()) - set(MACHINES)
    assert others <= known and set(recorded_hosts.WRITERS) == others and MACHINES


@pytest.mark.parametrize("name", MACHINES)
def test_machines(facts_of: FactsOf, name: str) -> None:
    machine_expectations.check(recorded_hosts.load(name)["expect"], facts_of(name))


def fabric_env(host: Facts, peer: Facts, **fabric: Any) -> dict[str, dict[str, str]]:
    options = {"replica_fabrics": {"compute": fabric}, "replica_fabric": "compute"} if fabric else {}
    return environments({"one": host, "peer": peer}, options=options)


# ---- GID tables


@pytest.mark.parametrize("name", recorded_hosts.GID_TABLES)
def test_gid_tables(facts_of: FactsOf, name: str) -> None:
    """NCCL, given what the plan writes, ends at the right index on every host: by an index, an address range, or its own choice."""
    case, hosts = recorded_hosts.load(name), facts_of(name)
    fabric = {"networks": [case["fabric_cidr"]]} if "fabric_cidr" in case else {"link_layer": "Ethernet"}
    for host, right in case["expect"]["right_gid_index"].items():
        envs = fabric_env(hosts[host], hosts[host + "-peer"], **fabric)
        for hca, index in right.items():
            assert nccl.gid_index(ports(hosts[host])[hca], envs["one"]) == index
            assert nccl.gid_index(ports(hosts[host + "-peer"])[hca], envs["peer"]) == 3, "each host has its own answer"
        wanted = case["expect"].get("env") or {"NCCL_IB_HCA": "=" + ",".join(hca + ":1" for hca in right)}
        assert envs["one"]["NCCL_IB_HCA"] == wanted["NCCL_IB_HCA"] and envs["one"]["NCCL_IB_DISABLE"] == "0"
        addresses = {name: next(gid["address"] for gid in port["gids"] if gid["index"] == right[name]) for name, port in ports(hosts[host]).items()}
        assert addresses == case["expect"].get("ipv4", {}).get(host, addresses)


def test_gid_drift_over_time(facts_of: FactsOf) -> None:
    """The address is what stays: the fabric's key is the same at both reads, and the index is the one of the moment."""
    case, hosts = recorded_hosts.load("gid_drift_over_time"), facts_of("gid_drift_over_time")
    found = [next(iter(ports(facts).values())) for facts in hosts.values()]
    assert [port["fabrics"] for port in found] == [["roce:10.70.0.0/24"]] * 2
    right = [[gid["index"] for gid in port["gids"] if gid["type"] == "RoCE v2" and gid["network"]] for port in found]
    assert right == [[index] for index in case["expect"]["right_gid_index"]]


# ---- HCAs and fabrics


def test_fabric_bond_over_two_cards(facts_of: FactsOf) -> None:
    case, hosts = recorded_hosts.load("fabric_bond_over_two_cards"), facts_of("fabric_bond_over_two_cards")
    for facts in hosts.values():
        assert not any(port["usable"] for port in facts["hcas"]) and len(facts["hcas"]) == len(case["hcas"])
        assert len({gid["address"] for port in facts["hcas"] for gid in port["gids"]}) == case["expect"]["distinct_addresses"]
    named = {"rails": {"hcas": [hca["dev"] for hca in case["hcas"]]}}
    assert "bond0 is a bond over HCAs of two or more cards" in faults(hosts, options={"replica_fabrics": named, "replica_fabric": "rails"})


def test_fabric_mixed_ib_and_ethernet(facts_of: FactsOf) -> None:
    case, hosts = recorded_hosts.load("fabric_mixed_ib_and_ethernet"), facts_of("fabric_mixed_ib_and_ethernet")
    right = "=" + ",".join(name + ":1" for name in case["expect"]["right_hcas"])
    for env in environments({name: hosts[name] for name in "ab"}).values():
        assert env["NCCL_IB_HCA"] == right and "NCCL_IB_GID_INDEX" not in env
    two = {name: hosts[name] for name in "cd"}
    assert "roce:10.0.0.0/24" in faults(two) and "ib:fe80000000000000" in faults(two), "both candidates are listed"
    compute = {"replica_fabrics": {"compute": {"link_layer": "InfiniBand"}}, "replica_fabric": "compute"}
    assert {env["NCCL_IB_HCA"] for env in environments(two, options=compute).values()} == {right}
    both = {"replica_fabrics": {"both": {"hcas": ["mlx5_*"]}}, "replica_fabric": "both"}
    assert "link layer" in faults(two, options=both)


def test_fabric_unequal_hca_count(facts_of: FactsOf) -> None:
    case, hosts = recorded_hosts.load("fabric_unequal_hca_count"), facts_of("fabric_unequal_hca_count")
    usable = {name: [port["name"] for port in facts["hcas"] if port["usable"]] for name, facts in hosts.items()}
    assert usable == {host["name"]: host["openable"] for host in case["hosts"]}
    text = faults(hosts, options={"replica_fabric": "roce:10.11.0.0/24"})
    assert "gpu-a: 2 usable (erdma_0:1, erdma_1:1); gpu-b: 1 usable (erdma_0:1)" in text
    common = {"x": {"hcas": case["expect"]["common"]}}
    envs = environments(hosts, options={"replica_fabrics": common, "replica_fabric": "x"})
    assert {env["NCCL_IB_HCA"] for env in envs.values()} == {"=erdma_0:1"}


def test_hca_efa(facts_of: FactsOf) -> None:
    case, hosts = recorded_hosts.load("hca_efa"), facts_of("hca_efa")
    for facts in hosts.values():
        assert {port["transport"] for port in facts["hcas"]} == {case["expect"]["transport"]}
    for env in environments(hosts, options={"replica_fabric": "efa"}).values():
        assert case["expect"]["nccl_ib_hca"] is None and not [name for name in env if name.startswith("NCCL_IB_")]
        assert (env["FI_PROVIDER"], env["NCCL_NET"]) == ("efa", "AWS Libfabric"), "the name of the ofi plugin, so that TCP never stands in for it"


def test_hca_prefix_collision(facts_of: FactsOf) -> None:
    """What the plan writes for one, two and all of the twelve selects those and no other."""
    case, hosts = recorded_hosts.load("hca_prefix_collision"), facts_of("hca_prefix_collision")
    for facts in hosts.values():
        assert list(ports(facts)) == case["devices"]
    for rule in case["cases"]:
        assert [port["name"] for port in nccl.selected_ports(rule["spec"], facts["hcas"])] == rule["selects"]
    for devices in (["mlx5_1"], ["mlx5_1", "mlx5_4"], case["devices"]):
        options = {"replica_fabrics": {"x": {"hcas": devices}}, "replica_fabric": "x"}
        for env in environments(hosts, options=options).values():
            assert [port["name"] for port in nccl.selected_ports(env["NCCL_IB_HCA"], facts["hcas"])] == devices


def test_hca_sysfs_strings(facts_of: FactsOf) -> None:
    case, hosts = recorded_hosts.load("hca_sysfs_strings"), facts_of("hca_sysfs_strings")
    assert [port["rate_gbps"] for port in hosts["rates"]["hcas"]] == [rate for _text, rate in case["rate"]]
    assert [text for text, port in zip(case["state"], hosts["states"]["hcas"]) if "the port is" not in " ".join(port["reasons"])] == ["4: ACTIVE"]
    words = [port["phys_state"] for port in hosts["phys"]["hcas"]]
    assert words == ["polling", "disabled", "link_up"]
    assert [port["transport"] for port in hosts["kinds"]["hcas"]] == ["ib", "roce", "iwarp", "efa"]


def test_spark_three_node_ring(facts_of: FactsOf) -> None:
    case, hosts = recorded_hosts.load("spark_three_node_ring"), facts_of("spark_three_node_ring")
    keys = {name: {key for port in facts["hcas"] for key in port["fabrics"]} for name, facts in hosts.items()}
    for one, other, networks in case["expect"]["links"]:
        assert keys[one] & keys[other] == {"roce:" + cidr for cidr in networks}
    assert sorted(set.intersection(*keys.values())) == case["expect"]["subnet_common_to_all"]
    assert "subnet_aware: true" in faults(hosts), "never derived: the hint says how to name it"
    ring = {"replica_fabrics": {"ring": {"hcas": list(case["hcas"]), "subnet_aware": True}}, "replica_fabric": "ring"}
    assert "NCCL 2.30.7 or newer" in faults(hosts, options=ring, tp=1, pp=3), "no build says which NCCL it has"
    build = {"name": "default", "path": "/opt/vllm/bin/vllm", "version": "0.33.0", "fingerprint": "5d0c", "nccl": "2.30.7", "problems": []}
    able = {name: {**facts, "engines": {"vllm": [build]}} for name, facts in hosts.items()}
    for env in environments(able, options=ring, tp=1, pp=3, engine="vllm").values():
        assert env["NCCL_SOCKET_IFNAME"] == "=" + case["expect"]["socket_ifname"]
        assert (env["NCCL_IB_SUBNET_AWARE_ROUTING"], env["NCCL_IB_MERGE_NICS"], env["NCCL_NET_PLUGIN"]) == ("1", "0", "none")
        assert [port["name"] for port in nccl.selected_ports(env["NCCL_IB_HCA"], hosts["spark-1"]["hcas"])] == list(ports(hosts["spark-1"]))


def test_topo_gb300_two_pfs_same_guid(facts_of: FactsOf) -> None:
    case, hosts = recorded_hosts.load("topo_gb300_two_pfs_same_guid"), facts_of("topo_gb300_two_pfs_same_guid")
    for facts in hosts.values():
        assert dict(enumerate(ports(facts))) == case["expect"]["rails"] and len({port["sys_image_guid"] for port in facts["hcas"]}) == 1
    wanted = "=" + ",".join(name + ":1" for name in case["expect"]["rails"].values())
    assert {env["NCCL_IB_HCA"] for env in environments(hosts).values()} == {wanted}


# ---- topology


def test_topo_h100_ten_nics(facts_of: FactsOf) -> None:
    case, hosts = recorded_hosts.load("topo_h100_ten_nics"), facts_of("topo_h100_ten_nics")
    for at, facts in enumerate(hosts.values()):
        table = facts["topology"]["gpu_hca"]
        near = {uuid: [name for name, distance in row.items() if distance == "PIX"] for uuid, row in table.items()}
        assert near == {f"GPU-{at}-{gpu[3:]}": ["mlx5_" + nic[3:]] for gpu, nic in case["pix"].items()}
        assert {distance for row in facts["topology"]["gpu_gpu"].values() for distance in row.values()} == {"NV"}
    right = "=" + ",".join(f"mlx5_{nic[3:]}:1" for nic in case["expect"]["right_nics"])
    assert {env["NCCL_IB_HCA"] for env in environments(hosts, gpus=8).values()} == {right}


def test_topo_dgx2_shared_switch(facts_of: FactsOf) -> None:
    case, facts = recorded_hosts.load("topo_dgx2_shared_switch"), facts_of("topo_dgx2_shared_switch")["dgx2"]
    table = facts["topology"]["gpu_hca"]
    assert {gpu: table[gpu] for gpu in sorted(table)} == case["rows"]
    order = ["PIX", "PXB", "PHB", "NODE", "SYS"]
    assert {gpu: min(row, key=lambda name: order.index(row[name])) for gpu, row in table.items()} == case["expect"]["nearest"]


# ---- interfaces


def with_gpu(facts: Facts, uuid: str) -> Facts:
    """The same host with a GPU, where the report tells of none: the plan has something to place."""
    gpu = {"uuid": uuid, "index": 0, "model": "NVIDIA H100 80GB HBM3", "compute_capability": "9.0", "memory": {"total_mib": 81559}}
    return {**facts, "gpus": [gpu], "drivers": {}}


def test_iface_hostname_loopback(facts_of: FactsOf) -> None:
    case, hosts = recorded_hosts.load("iface_hostname_loopback"), facts_of("iface_hostname_loopback")
    facts = with_gpu(hosts["node-a"], "GPU-a")
    leader = json.loads(json.dumps(with_gpu(hosts["node-a"], "GPU-b")).replace(case["expect"]["host_ip"], case["leader_ip"]))
    found = plan({"leader": leader, "node-a": facts})
    assert found["faults"] == []
    env = found["shards"]["node-a"]["launches"][-1]["env"]
    expect = case["expect"]
    assert (env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"], env["TP_SOCKET_IFNAME"]) == (expect["gloo"], expect["nccl"], expect["tp"])
    assert env["VLLM_HOST_IP"] == expect["host_ip"]
    assert any("127.0.0.1" in str(warning["seen"]) for warning in found["warnings"]), "a name that resolves to loopback is said"


def test_iface_linklocal_and_ipoib(facts_of: FactsOf) -> None:
    expect, hosts = recorded_hosts.load("iface_linklocal_and_ipoib")["expect"], facts_of("iface_linklocal_and_ipoib")
    env = environments({"host": with_gpu(hosts["host"], "GPU-a")})["host"]
    assert (env["NCCL_SOCKET_IFNAME"], env["GLOO_SOCKET_IFNAME"]) == ("=" + expect["management"], expect["management"])
    kinds = {interface["name"]: interface["kind"] for interface in hosts["host"]["interfaces"]}
    assert kinds[expect["nccl_default_choice"]] == "ipoib"


def test_iface_sriov_vfs_without_address(facts_of: FactsOf) -> None:
    expect, hosts = recorded_hosts.load("iface_sriov_vfs_without_address")["expect"], facts_of("iface_sriov_vfs_without_address")
    assert hosts["host"]["default_route"]["interface"] == expect["management"]
    env = environments({"host": with_gpu(hosts["host"], "GPU-a")})["host"]
    assert {name: env[name] for name in expect["env"]} == expect["env"]


def test_iface_vlan_prefix(facts_of: FactsOf) -> None:
    case, hosts = recorded_hosts.load("iface_vlan_prefix"), facts_of("iface_vlan_prefix")
    interfaces = [{**interface, "addresses": ["10.30.0.7/24"]} for interface in hosts["host"]["interfaces"]]
    for rule in case["cases"]:
        assert sorted(nccl.selected_interfaces(rule["spec"], interfaces)) == sorted(rule["selects"])
    env = environments({"host": with_gpu(hosts["host"], "GPU-a")})["host"]
    assert nccl.selected_interfaces(env["NCCL_SOCKET_IFNAME"], interfaces) == ["bond0.2093"] and env["GLOO_SOCKET_IFNAME"] == "bond0.2093"


# ---- limits and the driver


def test_limits_kho_cma(facts_of: FactsOf) -> None:
    case, hosts = recorded_hosts.load("limits_kho_cma"), facts_of("limits_kho_cma")
    for one in case["cases"]:
        limits = hosts[one["name"]]["limits"]
        assert limits["memlock_bytes"] == one["memlock"] and limits["kho_cma_suspect"] is one["expect"]["kho_cma_suspect"]
        assert (limits["memlock_bytes"] == "unlimited" or limits["memlock_bytes"] >= 1 << 30) is one["expect"]["memlock_ok"]


def test_nvml_gb10_unified(facts_of: FactsOf) -> None:
    case, hosts = recorded_hosts.load("nvml_gb10_unified"), facts_of("nvml_gb10_unified")
    idle, serving = hosts["idle"]["gpus"][0], hosts["serving"]["gpus"][0]
    for gpu in (idle, serving):
        assert (gpu["memory"]["model"], gpu["memory"]["total_mib"], gpu["memory"]["used_mib"]) == ("unified", case["expect"]["memory_total_bytes"] // MIB, None)
    held = case["serving"]["compute_list"][serving["uuid"]][0]
    assert idle["processes"] == [] and idle["pci_bdf"] == "000f:01:00.0"
    assert [(row["pid"], row["used_mib"]) for row in serving["processes"]] == [(held["pid"], held["used"] // MIB)]


def test_nvml_gb200_nvl_clique(facts_of: FactsOf) -> None:
    case, hosts = recorded_hosts.load("nvml_gb200_nvl_clique"), facts_of("nvml_gb200_nvl_clique")
    domains: dict[tuple[str, int], list[str]] = {}
    waiting = []
    for name, facts in hosts.items():
        (domain,) = {json.dumps(gpu["interconnect_domain"]) for gpu in facts["gpus"]}
        found = json.loads(domain)
        if found["state"] == "completed":
            domains.setdefault((found["id"], found["clique"]), []).append(name)
        else:
            waiting.append(name)
    assert list(domains.values()) == case["expect"]["domains"] and waiting == case["expect"]["not_ready"]
    for pair in (["tray-a", "tray-c"], ["tray-a", "tray-d"]):
        assert "domain" in faults({name: hosts[name] for name in pair}, gpus=4, options={"replica_fabric": "nvl:11111111-2222-4333-8444-555555555555.2"})


def test_nvml_gb300_bus_ids(facts_of: FactsOf) -> None:
    case, facts = recorded_hosts.load("nvml_gb300_bus_ids"), facts_of("nvml_gb300_bus_ids")["host"]
    assert [(gpu["index"], gpu["pci_bdf"], gpu["numa_node"]) for gpu in facts["gpus"]] == [(gpu["index"], gpu["sysfs"], 1) for gpu in case["gpus"]]
    assert [gpu["vendor_data"]["module_id"] for gpu in facts["gpus"]] == [gpu["module_id"] for gpu in case["gpus"]]


def test_nvml_hgx_zero_cluster_uuid(facts_of: FactsOf) -> None:
    case, hosts = recorded_hosts.load("nvml_hgx_zero_cluster_uuid"), facts_of("nvml_hgx_zero_cluster_uuid")
    for name, facts in hosts.items():
        for gpu in facts["gpus"]:
            assert gpu["interconnect_domain"]["id"] is None
            assert gpu["memory"]["used_mib"] == case["expect"]["v1_used_mib_idle" if name == "old" else "v2_used_mib_idle"]
    for env in environments({name: hosts[name] for name in ("new", "other")}, gpus=2).values():
        assert env.get("NCCL_MNNVL_ENABLE") != "1"


def test_nvml_init_failures(facts_of: FactsOf) -> None:
    case, hosts = recorded_hosts.load("nvml_init_failures"), facts_of("nvml_init_failures")
    ours = {"driver_missing": "library_missing", "gpus_bound_elsewhere_or_fallen": "gpus_missing"}
    for one in case["cases"]:
        facts = hosts[one["verdict"]]
        driver = facts["drivers"]["nvidia"]
        assert driver["state"] == ours.get(one["verdict"], one["verdict"]) and driver["message"]
        assert [gpu["pci_bdf"] for gpu in facts["gpus"]] == one["pci_nvidia"], "GPUs on the bus are listed all the same"
        assert bool(driver["hint"]) is (one["verdict"] != "no_gpu")
        assert all(gpu["uuid"] is None and gpu["health"]["reasons"] for gpu in facts["gpus"])


def test_nvml_lost_gpu(facts_of: FactsOf) -> None:
    case, hosts = recorded_hosts.load("nvml_lost_gpu"), facts_of("nvml_lost_gpu")
    for variant in case["variants"]:
        gpus = hosts[variant["name"]]["gpus"]
        healthy = [gpu for gpu in gpus if gpu["health"]["state"] == "ok"]
        assert len(healthy) == case["expect"]["healthy"]
        assert [gpu["index"] for gpu in healthy] == [index for index, value in variant["handles"].items() if isinstance(value, str)], "never renumbered"
        assert [gpu["pci_bdf"] for gpu in gpus if gpu not in healthy] == case["expect"]["missing"]
        assert all(bdf in hosts[variant["name"]]["drivers"]["nvidia"]["message"] for bdf in case["expect"]["missing"])


def test_nvml_mig_pending(facts_of: FactsOf) -> None:
    case, gpus = recorded_hosts.load("nvml_mig_pending"), facts_of("nvml_mig_pending")["host"]["gpus"]
    assert [gpu["index"] for gpu in gpus if not gpu["partition"]["mode_current"]] == case["expect"]["whole_now"]
    assert [gpu["index"] for gpu in gpus if gpu["health"]["state"] == "warning"] == case["expect"]["warn"]


def test_nvml_no_permission_index(facts_of: FactsOf) -> None:
    case, gpus = recorded_hosts.load("nvml_no_permission_index"), facts_of("nvml_no_permission_index")["host"]["gpus"]
    assert [gpu["index"] for gpu in gpus if gpu["health"]["state"] == "ok"] == case["expect"]["usable_indices"]
    assert [gpu["health"]["state"] for gpu in gpus if gpu["index"] not in case["expect"]["usable_indices"]] == ["not_permitted"] * 2


# ---- processes


def test_proc_orphans_after_kill(facts_of: FactsOf) -> None:
    """The port is free and the unit inactive; the GPUs are not, and the plan says who holds them."""
    case, hosts = recorded_hosts.load("proc_orphans_after_kill"), facts_of("proc_orphans_after_kill")
    rows = [row for gpu in hosts["host"]["gpus"] for row in gpu["processes"]]
    assert [row["pid"] for row in rows if row["shard"] is None] == case["expect"]["orphans"]
    text = faults(hosts, gpus=2)
    for rows in case["host_view"].values():
        for row in rows:
            assert str(row["pid"]) in text and row["comm"] in text


def test_proc_partial_shard(facts_of: FactsOf) -> None:
    case, gpus = recorded_hosts.load("proc_partial_shard"), facts_of("proc_partial_shard")["host"]["gpus"]
    rows = {gpu["uuid"]: {row["pid"]: row for row in gpu["processes"]} for gpu in gpus}
    held = {uuid for uuid, by_pid in rows.items() if any(row["shard"] == "glm/0" for row in by_pid.values())}
    assert [uuid for uuid in case["assigned"] if uuid not in held] == case["expect"]["missing"]
    assert rows["GPU-3"][9999]["shard"] is None and (rows["GPU-2"][7001]["used_mib"], rows["GPU-2"][7003]["used_mib"]) == (500, 57344)


def test_proc_pid_namespaces(facts_of: FactsOf) -> None:
    case, gpus = recorded_hosts.load("proc_pid_namespaces"), facts_of("proc_pid_namespaces")["host"]["gpus"]
    assert [gpu["uuid"] for gpu in gpus if any(row["shard"] == "replica-a/?" for row in gpu["processes"])] == case["expect"]["replica_a_holds"]
    foreign = {gpu["uuid"]: [row["pid"] for row in gpu["processes"] if row["shard"] is None] for gpu in gpus}
    assert {uuid: pids for uuid, pids in foreign.items() if pids} == case["expect"]["foreign"]
