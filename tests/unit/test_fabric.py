# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which HCA ports a replica gets: every recorded host through the reader of node facts, every rule, and random fleets."""

from __future__ import annotations

import dataclasses
import ipaddress
import pathlib
from typing import Any

import hardware_trees
import nccl_model
import pytest
import recorded_hosts
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.rankzero.inference.plugins.module_utils import hcas, network, topology
from ansible_collections.rankzero.inference.plugins.plugin_utils import fabric, fabric_names, gids, host_facts, placement, plan
from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Findings

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"


def read(tree: hardware_trees.HardwareTree, gpus: list[dict[str, Any]] | None = None, **more: Any) -> dict[str, Any]:
    """The facts of a generated host, by the readers that node_facts uses, as the plan gets them."""
    tree.write_network_state([])
    state = network.read(str(tree.sysfs), str(tree.network_state))
    ports = hcas.read(str(tree.sysfs), str(tree.dev), state["interfaces"])
    return host_facts.normalise(
        {
            "schema": 1,
            "hcas": ports,
            "interfaces": state["interfaces"],
            "gpus": gpus or [],
            "topology": {"gpu_hca": topology.gpu_hca(gpus or [], ports, str(tree.sysfs))},
            **more,
        }
    )


def recorded(name: str, root: pathlib.Path) -> dict[str, Any]:
    """The facts of every host of a fixture, with its GPUs where it has some."""
    return {host: read(one.tree, recorded_hosts.gpus_of(one)) for host, one in recorded_hosts.write(name, root).items()}


def port(name: str, *addresses: str, number: int = 1, **more: Any) -> dict[str, Any]:
    """One usable RoCE port in the shape of node facts; addresses are CIDRs, `@160` behind one is its VLAN; v2 entries from index 3 on."""
    gid_list, keys = [], []
    for index, text in enumerate(addresses, 3):
        cidr, _at, vlan = text.partition("@")
        interface = ipaddress.ip_interface(cidr)
        gid_list.append(
            {
                "index": index,
                "gid": recorded_hosts.gid_text(str(interface.ip)),
                "type": "RoCE v2",
                "netdev": "e" + name,
                "address": str(interface.ip),
                "network": str(interface.network),
                "vlan": int(vlan) if vlan else None,
            }
        )
        keys.append(f"roce:{interface.network}" + (f"@{vlan}" if vlan else ""))
    return {
        "name": name,
        "port": number,
        "pci_bdf": None,
        "driver": "mlx5_core",
        "link_layer": "ethernet",
        "transport": "roce",
        "state": "active",
        "rate_gbps": 400,
        "netdevs": ["e" + name],
        "mtu": 9000,
        "is_vf": False,
        "lid": 0,
        "sm_lid": 0,
        "gids": gid_list,
        "fabrics": keys,
        "usable": True,
        "reasons": [],
        **more,
    }


def ib(name: str, prefix: str = "fe80000000000000", lid: int = 1, **more: Any) -> dict[str, Any]:
    return port(name, link_layer="infiniband", transport="ib", lid=lid, sm_lid=more.pop("sm_lid", 1), mtu=None, fabrics=[f"ib:{prefix}"], netdevs=[], **more)


def facts(*ports: dict[str, Any], **more: Any) -> dict[str, Any]:
    numbered = [{**item, "pci_bdf": item["pci_bdf"] or f"0000:{number + 16:02x}:00.0"} for number, item in enumerate(ports)]
    return {"hcas": numbered, "interfaces": [], "topology": {"gpu_hca": {}}, **more}


@dataclasses.dataclass
class Outcome:
    choice: fabric.Choice
    findings: Findings

    @property
    def ports(self) -> dict[str, list[str]]:
        return {host: [fabric.port_name(item) for item in chosen] for host, chosen in self.choice.ports.items()}

    @property
    def faults(self) -> list[str]:
        return [fault.text() for fault in self.findings.faults]

    @property
    def warnings(self) -> list[str]:
        return [warning.text() for warning in self.findings.warnings]


def choose(hosts: dict[str, Any], wanted: str = "", named: Any = None, gpus: Any = None, management: Any = None) -> Outcome:
    findings = Findings()
    parts = tuple(part for part in wanted.split(",") if part)
    return Outcome(fabric.choose(parts, named or {}, hosts, gpus or {}, management or {}, findings), findings)


def chosen(*arguments: Any, **more: Any) -> dict[str, list[str]]:
    outcome = choose(*arguments, **more)
    assert outcome.faults == []
    return outcome.ports


def refused(*arguments: Any, **more: Any) -> str:
    outcome = choose(*arguments, **more)
    assert outcome.faults
    return "\n".join(outcome.faults)


# ---- recorded hosts


def model_table(entries: list[Any]) -> list[nccl_model.Slot]:
    found = {entry[0]: nccl_model.Slot(int(ipaddress.IPv6Address(entry[1])), {"RoCE v2": 2, "IB/RoCE v1": 1}[entry[2]]) for entry in entries}
    return [found.get(index, nccl_model.Slot()) for index in range(max(found) + 1)]


@pytest.mark.parametrize("name", recorded_hosts.GID_TABLES)
def test_recorded_gid_tables(tmp_path, name):
    """The right index on every host, by our rule; and the model gives what NCCL was recorded to give."""
    case, hosts = recorded_hosts.load(name), recorded(name, tmp_path)
    cidr = case.get("fabric_cidr")
    named = {"compute": {"networks": cidr}} if cidr else {"compute": {"link_layer": "Ethernet"}}
    for host in case["hosts"]:
        outcome = choose({host["name"]: hosts[host["name"]]}, "compute", named)
        assert outcome.faults == []
        findings = Findings()
        rule = gids.rule(outcome.choice.ports[host["name"]], outcome.choice.keys, host=host["name"], rank=0, findings=findings)
        assert not findings.faults and rule is not None
        expect = case["expect"]
        assert {hca["dev"]: rule.index for hca in host["hcas"]} == expect["right_gid_index"][host["name"]]
        for hca in host["hcas"]:
            table, model = model_table(hca["gids"]), nccl_model.gid_index
            if "nccl_2_30_auto" in expect:
                assert model(table, {}) == expect["nccl_2_30_auto"][host["name"]][hca["dev"]]
            if cidr:
                assert model(table, {"NCCL_IB_ADDR_RANGE": cidr}) == expect["right_gid_index"][host["name"]][hca["dev"]]


def test_recorded_gid_drift(tmp_path):
    case = recorded_hosts.load("gid_drift_over_time")
    indexes = []
    for found in recorded("gid_drift_over_time", tmp_path).values():
        outcome = choose({"a": found})
        rule = gids.rule(outcome.choice.ports["a"], outcome.choice.keys, host="a", rank=0, findings=Findings())
        indexes.append(rule and rule.index)
    assert indexes == case["expect"]["right_gid_index"], "facts are read at every deploy, and the index follows the address"


def test_recorded_ring_of_three(tmp_path):
    case, hosts = recorded_hosts.load("spark_three_node_ring"), recorded("spark_three_node_ring", tmp_path)
    management = dict.fromkeys(hosts, case["expect"]["socket_ifname"])
    text = refused(hosts, management=management)
    assert "no fabric that all hosts share" in text and "subnet_aware: true" in text, "derived never: the hint says how to name it"
    ring = {"ring": {"hcas": list(case["hcas"]), "subnet_aware": True}}
    outcome = choose(hosts, "ring", ring, management=management)
    assert outcome.faults == []
    order = ["rocep1s0f0:1", "rocep1s0f1:1", "roceP2p1s0f0:1", "roceP2p1s0f1:1"]
    assert outcome.ports == dict.fromkeys(hosts, order)
    assert outcome.choice.prefix_length == 24
    assert "subnet_aware" in refused(hosts, "ring", {"ring": {"hcas": list(case["hcas"])}}), "without the word it is a mistake"
    two = {host: hosts[host] for host in ("spark-1", "spark-2")}
    assert "on no other" not in refused(two, "ring", {"ring": {"hcas": list(case["hcas"])}})
    four = {**hosts, "spark-4": facts(*(port(name, f"10.99.{at}.1/24") for at, name in enumerate(case["hcas"])))}
    assert "no subnet that spark-1 and spark-4 share" in refused(four, "ring", ring)


def test_recorded_mixed_link_layers(tmp_path):
    case, every = recorded_hosts.load("fabric_mixed_ib_and_ethernet"), recorded("fabric_mixed_ib_and_ethernet", tmp_path)
    hosts = {name: every[name] for name in "ab"}
    right = [name + ":1" for name in case["expect"]["right_hcas"]]
    assert chosen(hosts) == {"a": right, "b": right}
    hosts = {name: every[name] for name in "cd"}
    assert "ib:fe80000000000000 (c, d: mlx5_0:1+mlx5_1:1" in refused(hosts), "with an address the Ethernet port is a candidate: refused and listed"
    assert chosen(hosts, management={"c": "ens4f0", "d": "ens4f0"}) == {"c": right, "d": right}
    assert chosen(hosts, "compute", {"compute": {"link_layer": "InfiniBand"}}) == {"c": right, "d": right}
    assert "link layers" in refused(hosts, "compute", {"compute": {"hcas": ["mlx5_*"]}})


def test_recorded_unequal_count(tmp_path):
    case, hosts = recorded_hosts.load("fabric_unequal_hca_count"), recorded("fabric_unequal_hca_count", tmp_path)
    outcome = choose(hosts)
    assert outcome.ports == {} and outcome.faults == [], "eRDMA is not chosen by default"
    assert any("TCP" in text and "erdma_0:1" in text for text in outcome.warnings)
    text = refused(hosts, "roce:10.11.0.0/24")
    assert "gpu-a: 2 usable (erdma_0:1, erdma_1:1); gpu-b: 1 usable (erdma_0:1)" in text
    text = refused(hosts, "x", {"x": {"hcas": ["erdma_0", "erdma_1"]}})
    assert "gpu-b" in text and "erdma_1" in text and "uverbs1 cannot be opened" in text, "a port that is named must be usable"
    assert chosen(hosts, "x", {"x": {"hcas": case["expect"]["common"]}}) == {"gpu-a": ["erdma_0:1"], "gpu-b": ["erdma_0:1"]}


def test_recorded_bond_over_two_cards(tmp_path):
    hosts = recorded("fabric_bond_over_two_cards", tmp_path)
    outcome = choose(hosts)
    assert outcome.ports == {} and any("not separate rails" in text for text in outcome.warnings)
    assert "not separate rails" in refused(hosts, "rails", {"rails": {"hcas": ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"]}})


def test_bond_in_facts_that_somebody_wrote():
    """Facts without the reader's verdict: one address on two ports is told all the same."""
    same = [port("mlx5_0", "10.80.0.1/24"), port("mlx5_1", "10.80.0.1/24")]
    other = [port("mlx5_0", "10.80.0.2/24"), port("mlx5_1", "10.80.0.3/24")]
    assert "10.80.0.1 on a mlx5_0:1 and a mlx5_1:1" in refused({"a": facts(*same), "b": facts(*other)})
    assert "10.80.0.2 on a mlx5_0:1 and b mlx5_0:1" in refused({"a": facts(other[0]), "b": facts(other[0])}), "an address twice in the fleet"


@pytest.mark.parametrize("subnets", [(0, 0), (1, 2)])
def test_recorded_two_functions_of_one_card_are_two_rails(tmp_path, subnets):
    case = recorded_hosts.load("topo_gb300_two_pfs_same_guid")
    machines = recorded_hosts.topo_gb300_two_pfs_same_guid(case, tmp_path, subnets)
    rails, gpus = case["expect"]["rails"], {name: recorded_hosts.gpus_of(one) for name, one in machines.items()}
    hosts = {name: read(one.tree, gpus[name]) for name, one in machines.items()}
    found = chosen(hosts, gpus={name: [gpu["uuid"] for gpu in held] for name, held in gpus.items()})
    assert found == dict.fromkeys(hosts, [f"{rails[0]}:1", f"{rails[1]}:1"])


def test_recorded_ten_nics(tmp_path):
    """Eight NICs are each beside a GPU; the two of storage are not, and stay out though they are in the same fabric."""
    case, hosts = recorded_hosts.load("topo_h100_ten_nics"), recorded("topo_h100_ten_nics", tmp_path)
    every = {name: [f"GPU-{at}-{number}" for number in range(case["gpus"])] for at, name in enumerate(hosts)}
    right = [f"mlx5_{nic[3:]}:1" for nic in case["expect"]["right_nics"]]
    assert chosen(hosts, gpus=every) == dict.fromkeys(hosts, right)
    assert chosen(hosts, "ib:fe80000000000000", gpus=every) == dict.fromkeys(hosts, right), "also where the fabric is named by its key"
    two = {name: gpus[:2] for name, gpus in every.items()}
    assert chosen(hosts, gpus=two) == dict.fromkeys(hosts, right[:2]), "a shard of two GPUs has the two beside them"
    storage = [f"mlx5_{nic[3:]}" for nic in case["expect"]["excluded"]]
    assert chosen(hosts, "s", {"s": {"hcas": storage}}, gpus=every) == dict.fromkeys(hosts, [name + ":1" for name in storage])


def test_recorded_switches_that_two_gpus_share():
    case = recorded_hosts.load("topo_dgx2_shared_switch")
    names = list(case["rows"]["GPU0"])
    hosts = {
        host: facts(*(ib(name, lid=at * 20 + number + 1) for number, name in enumerate(names)), topology={"gpu_hca": case["rows"]})
        for at, host in enumerate("ab")
    }
    for gpu, nearest in case["expect"]["nearest"].items():
        found = chosen(hosts, gpus=dict.fromkeys(hosts, [gpu]))["a"]
        near = [name + ":1" for name, distance in case["rows"][gpu].items() if distance in ("PIX", "PXB")]
        assert nearest + ":1" in found and found == near
    found = chosen(hosts, gpus=dict.fromkeys(hosts, list(case["rows"])))["a"]
    assert found == ["mlx5_0:1", "mlx5_1:1", "mlx5_2:1", "mlx5_3:1"], "five GPUs, four HCAs: there is no one NIC for each GPU"


# ---- the fabric that is derived


def test_two_hosts_on_one_network_whatever_the_names():
    hosts = {"a": facts(port("mlx5_0", "10.11.0.1/16")), "b": facts(port("rocep7s0", "10.11.0.2/16"))}
    outcome = choose(hosts)
    assert (outcome.ports, outcome.choice.name, outcome.choice.link) == ({"a": ["mlx5_0:1"], "b": ["rocep7s0:1"]}, "roce:10.11.0.0/16", "ethernet")


def test_equal_names_prove_nothing():
    hosts = {"a": facts(port("mlx5_0", "10.11.0.1/16")), "b": facts(port("mlx5_0", "10.12.0.2/16"))}
    text = refused(hosts)
    assert "a: mlx5_0:1 roce:10.11.0.0/16; b: mlx5_0:1 roce:10.12.0.0/16" in text


@pytest.mark.parametrize("address", ["169.254.10.1/16", "fe80::1/64"])
def test_link_local_networks_are_no_fabric(address):
    hosts = {name: facts(port("mlx5_0", address)) for name in "ab"}
    assert "no fabric that all hosts share" in refused(hosts)
    assert refused(hosts, f"roce:{ipaddress.ip_interface(address).network}")


def test_ambiguity_lists_every_candidate_with_its_ports():
    hosts = {name: facts(port("mlx5_0", f"10.11.0.{at}/16"), port("mlx5_1", f"10.12.0.{at}/16", rate_gbps=100)) for at, name in enumerate("ab", 1)}
    text = refused(hosts)
    assert "roce:10.11.0.0/16 (a, b: mlx5_0:1); roce:10.12.0.0/16 (a, b: mlx5_1:1)" in text
    assert chosen(hosts, "roce:10.12.0.0/16") == {"a": ["mlx5_1:1"], "b": ["mlx5_1:1"]}
    hosts["c"] = facts(port("mlx5_4", "10.11.0.9/16"), port("mlx5_5", "10.12.0.9/16", rate_gbps=100))
    assert "roce:10.11.0.0/16 (a, b: mlx5_0:1; c: mlx5_4:1);" in refused(hosts), "a comma stands between hosts that have the same"


def rails(count: int, hosts: str = "ab", order: Any = None) -> dict[str, Any]:
    return {
        name: facts(*(port(f"mlx5_{rail}", f"10.{100 + subnet}.0.{at}/16") for rail, subnet in enumerate((order or {}).get(name) or range(count))))
        for at, name in enumerate(hosts, 1)
    }


def test_rails_each_in_a_subnet_of_its_own():
    hosts = rails(8)
    outcome = choose(hosts)
    assert outcome.faults == [] and len(outcome.choice.keys) == 8
    assert outcome.ports["a"] == [f"mlx5_{number}:1" for number in range(8)]
    assert outcome.choice.cross_rail is None, "whether routers connect the rails is not known"


def test_two_rails_may_be_compute_and_storage():
    hosts = rails(2)
    assert "several that can be meant" in refused(hosts)
    assert len(chosen(hosts, "roce:10.100.0.0/16,roce:10.101.0.0/16")["a"]) == 2
    near = {name: {**found, "topology": {"gpu_hca": {"G": {"mlx5_0": "PIX", "mlx5_1": "PXB"}}}} for name, found in hosts.items()}
    assert len(chosen(near, gpus={"a": ["G"], "b": ["G"]})["a"]) == 2, "both beside a GPU: rails"


def test_rails_in_another_order_are_refused():
    """NCCL pairs by PCI order, and the order in NCCL_IB_HCA changes nothing about it."""
    hosts = rails(3, order={"b": [1, 0, 2]})
    text = refused(hosts)
    assert "a: mlx5_0:1 roce:10.100.0.0/16" in text and "b: mlx5_0:1 roce:10.101.0.0/16" in text
    definition = {"hcas": ["mlx5_*"], "routed": True}
    assert len(chosen(hosts, "rails", {"rails": definition})["a"]) == 3


def test_unrouted_rails_stay_on_their_rail():
    assert choose(rails(3), "rails", {"rails": {"hcas": ["mlx5_*"], "routed": False}}).choice.cross_rail is False
    apart = {name: facts(*(ib(f"mlx5_{rail}", f"fec000000000000{rail}", lid=at + 1) for rail in range(3))) for at, name in enumerate("ab")}
    assert choose(apart).choice.cross_rail is False, "InfiniBand subnets reach each other through a router only"


def test_two_networks_on_one_port():
    """A port of two VLANs: NCCL's pick between them would be luck."""
    hosts = {name: facts(port("mlx5_0", f"10.10.0.{at}/16", f"10.60.0.{at}/16@160")) for at, name in enumerate("ab", 1)}
    assert "several that can be meant" in refused(hosts)
    assert "is on roce:10.10.0.0/16 and roce:10.60.0.0/16@160" in refused(hosts, "x", {"x": {"hcas": ["mlx5_0"]}})
    for named in ({"hcas": ["mlx5_0"], "vlan": 160}, {"vlan": "160"}, {"networks": "10.60.0.0/16"}, {"keys": "roce:10.60.0.0/16@160"}):
        outcome = choose(hosts, "x", {"x": named})
        assert outcome.faults == [] and outcome.choice.keys == ("roce:10.60.0.0/16@160",)


def test_a_network_that_only_one_host_has_is_never_used():
    """mlx5_0 of `a` has two networks, `b` shares one of them: the entry of the other must not be found right."""
    hosts = {"a": facts(port("mlx5_0", "10.10.0.1/16", "10.60.0.1/16@160")), "b": facts(port("mlx5_0", "10.60.0.2/16@160"))}
    outcome = choose(hosts, "x", {"x": {"hcas": ["mlx5_0"]}})
    assert outcome.faults == [] and outcome.choice.keys == ("roce:10.60.0.0/16@160",)
    assert gids.right(outcome.choice.ports["a"], outcome.choice.keys) == {"mlx5_0:1": frozenset({4})}


def test_both_families_on_the_same_ports_are_one_fabric():
    hosts = {name: facts(port("mlx5_0", f"2001:db8::{at}/64", f"10.11.0.{at}/16")) for at, name in enumerate("ab", 1)}
    outcome = choose(hosts)
    assert outcome.faults == [] and outcome.choice.keys == ("roce:10.11.0.0/16",)
    assert choose(hosts, "x", {"x": {"hcas": ["mlx5_0"]}}).faults == []


def test_unequal_counts_name_both():
    hosts = {"a": facts(port("mlx5_0", "10.11.0.1/16"), port("mlx5_1", "10.11.0.2/16")), "b": facts(port("mlx5_0", "10.11.0.3/16"))}
    assert "a: 2 usable (mlx5_0:1, mlx5_1:1); b: 1 usable (mlx5_0:1)" in refused(hosts)


def test_more_ports_than_nccl_takes():
    hosts = {name: facts(*(port(f"mlx5_{number}", f"10.11.{at}.{number + 1}/16") for number in range(33))) for at, name in enumerate("ab")}
    assert "33 ports" in refused(hosts)


def test_no_hcas_and_none():
    bare = {"a": facts(), "b": facts()}
    outcome = choose(bare)
    assert (outcome.ports, outcome.faults, outcome.warnings, outcome.choice.link) == ({}, [], [], None)
    outcome = choose({"a": facts(port("mlx5_0", "10.11.0.1/16")), "b": facts()}, "none")
    assert (outcome.ports, outcome.faults, outcome.warnings) == ({}, [], [])
    assert "no fabric that all hosts share" in refused({"a": facts(port("mlx5_0", "10.11.0.1/16")), "b": facts()})


def test_hcas_that_are_all_down_are_said():
    down = port("mlx5_0", "10.11.0.1/16", usable=False, state="down", reasons=["the port is down: check the cable"])
    outcome = choose({"a": facts(down), "b": facts(down)})
    assert outcome.ports == {} and len(outcome.warnings) == 2 and "check the cable" in outcome.warnings[0]


def test_storage_is_not_taken_where_the_ports_beside_the_gpus_are_down():
    """Without the compute ports of `a` all hosts share the storage network only: no silent step down."""
    near = {"gpu_hca": {"G": {"mlx5_0": "PIX", "mlx5_9": "SYS"}}}
    down = port("mlx5_0", "10.11.0.1/16", usable=False, reasons=["the port is down"])
    hosts = {
        "a": facts(down, port("mlx5_9", "10.90.0.1/16"), topology=near),
        "b": facts(port("mlx5_0", "10.11.0.2/16"), port("mlx5_9", "10.90.0.2/16"), topology=near),
    }
    text = refused(hosts, gpus={"a": ["G"], "b": ["G"]})
    assert "the port is down" in text and "near the shard's GPUs" in text
    assert chosen(hosts, "roce:10.90.0.0/16", gpus={"a": ["G"], "b": ["G"]}) == {"a": ["mlx5_9:1"], "b": ["mlx5_9:1"]}, "named, it is taken"


# ---- management, EFA, Soft-RoCE and others

MANAGED = {
    "the interface itself": ("emlx5_1", []),
    "a VLAN over it": ("emlx5_1.20", [{"name": "emlx5_1.20", "kind": "vlan", "vlan": 20, "mac": "m1"}]),
    "a VLAN of another name": ("storage", [{"name": "storage", "kind": "vlan", "vlan": 20, "mac": "m1"}]),
    "a bond over it": ("bond0", [{"name": "bond0", "kind": "bond", "mac": "m1"}]),
    "a VLAN over a bond over it": ("bond0.20", [{"name": "bond0.20", "kind": "vlan", "vlan": 20, "mac": "m1"}, {"name": "bond0", "kind": "bond", "mac": "m1"}]),
    "a bridge over it": ("br0", [{"name": "br0", "kind": "bridge", "mac": "m1"}]),
}


@pytest.mark.parametrize("what", MANAGED)
def test_the_port_of_the_management_interface_stays_out(what):
    interface, more = MANAGED[what]
    master = {"a bond over it": "bond0", "a VLAN over a bond over it": "bond0", "a bridge over it": "br0"}.get(what)
    interfaces = [{"name": "emlx5_0", "kind": "physical", "mac": "m0"}, {"name": "emlx5_1", "kind": "physical", "mac": "m1", "master": master}, *more]
    hosts = {name: facts(port("mlx5_0", f"10.11.0.{at}/16"), port("mlx5_1", f"10.12.0.{at}/16"), interfaces=interfaces) for at, name in enumerate("ab", 1)}
    management = {"a": interface, "b": interface}
    assert "several" in refused(hosts)
    assert chosen(hosts, management=management) == {"a": ["mlx5_0:1"], "b": ["mlx5_0:1"]}
    assert chosen(hosts, "x", {"x": {"hcas": ["mlx5_1"]}}, management=management) == {"a": ["mlx5_1:1"], "b": ["mlx5_1:1"]}, "unless it is asked for by name"
    assert chosen(hosts, "roce:10.12.0.0/16", management=management) == {"a": ["mlx5_1:1"], "b": ["mlx5_1:1"]}


def test_bond_that_the_hardware_carries_and_a_vlan_of_it_from_the_reader(tmp_path):
    hosts = {}
    for number, name in enumerate(("a", "b"), 1):
        tree = hardware_trees.HardwareTree(tmp_path / name)
        tree.pci("0000:03:00.0", driver="mlx5_core")
        tree.pci("0000:1b:00.0", driver="mlx5_core")
        tree.hca("mlx5_bond_0", pci="0000:03:00.0", netdevs=["enp3s0f0"], gids=[recorded_hosts.v2(f"10.20.0.{number}", "bond0.20")])
        tree.hca("mlx5_2", pci="0000:1b:00.0", netdevs=["ens2"], gids=[recorded_hosts.v2(f"10.11.0.{number}", "ens2")])
        tree.interface("enp3s0f0", pci="0000:03:00.0", master="bond0")
        tree.interface("bond0", kind="bond")
        tree.interface("bond0.20", [f"10.20.0.{number}/24"], kind="vlan", vlan=20)
        tree.interface("ens2", [f"10.11.0.{number}/24"], pci="0000:1b:00.0")
        hosts[name] = read(tree)
    assert chosen(hosts, management={"a": "bond0.20", "b": "bond0.20"}) == {"a": ["mlx5_2:1"], "b": ["mlx5_2:1"]}


def test_the_only_port_carries_management():
    hosts = {name: facts(port("mlx5_0", f"10.11.0.{at}/16")) for at, name in enumerate("ab", 1)}
    outcome = choose(hosts, management={"a": "emlx5_0", "b": "emlx5_0"})
    assert outcome.ports == {} and outcome.faults == [] and "carries its host's management interface" in outcome.warnings[0]
    assert len(chosen(hosts, "roce:10.11.0.0/16", management={"a": "emlx5_0", "b": "emlx5_0"})) == 2


def efa_hosts(root: pathlib.Path, count: int = 2) -> dict[str, Any]:
    case = recorded_hosts.load("hca_efa")
    machines = recorded_hosts.hca_efa({**case, "hcas": case["hcas"][:count]}, root)
    return {name: read(one.tree) for name, one in machines.items()}


def test_efa(tmp_path):
    hosts = efa_hosts(tmp_path / "two")
    for wanted in ("", "efa"):
        outcome = choose(hosts, wanted)
        assert outcome.faults == [] and (outcome.choice.name, outcome.choice.link) == ("efa", "efa")
        assert outcome.ports == dict.fromkeys(hosts, ["rdmap85s0:1", "rdmap86s0:1"])
    assert "a: 2 usable" in refused({"a": hosts["a"], "b": efa_hosts(tmp_path / "one", 1)["b"]})
    assert "efa" in refused({"a": hosts["a"], "b": facts()}, "efa")


def test_soft_roce_only_by_name(tmp_path):
    hosts = {}
    for number, name in enumerate(("a", "b"), 1):
        tree = hardware_trees.HardwareTree(tmp_path / name)
        tree.hca("rxe0", parent="eth0", gids=[recorded_hosts.v2(f"10.11.0.{number}", "eth0", 1)])
        tree.interface("eth0", [f"10.11.0.{number}/16"])
        hosts[name] = read(tree)
    outcome = choose(hosts)
    assert outcome.ports == {} and "Soft-RoCE" in outcome.warnings[0]
    assert chosen(hosts, "x", {"x": {"hcas": ["rxe0"]}}) == {"a": ["rxe0:1"], "b": ["rxe0:1"]}
    assert "Soft-RoCE" in refused(hosts, "roce:10.11.0.0/16"), "a key is not a name"


def test_iwarp_not_even_by_name():
    iwarp = port("iw0", "10.11.0.1/16", transport="iwarp", usable=False, reasons=["iWARP cannot carry NCCL's verbs transport"])
    assert "iWARP" in refused({"a": facts(iwarp), "b": facts(iwarp)}, "x", {"x": {"hcas": ["iw0"]}})


# ---- InfiniBand


def test_one_prefix_and_two_subnet_managers_are_two_fabrics():
    hosts = {"a": facts(ib("mlx5_0", lid=5, sm_lid=1)), "b": facts(ib("mlx5_0", lid=6, sm_lid=9))}
    assert "a mlx5_0:1 sees the subnet manager at LID 1; b mlx5_0:1 sees the subnet manager at LID 9" in refused(hosts)


def test_a_lid_twice_is_said():
    hosts = {"a": facts(ib("mlx5_0", lid=5)), "b": facts(ib("mlx5_0", lid=5))}
    outcome = choose(hosts)
    assert outcome.faults == [] and "LID 5 on a mlx5_0:1 and b mlx5_0:1" in outcome.warnings[0]
    virtual = {name: facts(ib("mlx5_0", lid=5, is_vf=True)) for name in "ab"}
    assert choose(virtual).warnings == [], "virtual functions share the LID of their port"


def test_different_prefixes_are_different_fabrics():
    hosts = {"a": facts(ib("mlx5_0", "fec0000000000001", 5)), "b": facts(ib("mlx5_0", "fec0000000000002", 6))}
    assert "no fabric that all hosts share" in refused(hosts)


def test_mtu_that_differs_is_said():
    hosts = {"a": facts(port("mlx5_0", "10.11.0.1/16")), "b": facts(port("mlx5_0", "10.11.0.2/16", mtu=1500))}
    assert "1500 on b mlx5_0:1; 9000 on a mlx5_0:1" in choose(hosts).warnings[0]


# ---- replica_fabrics

PAIR = {
    "spark-1": facts(port("rocep1s0f0", "10.11.0.1/24"), port("rocep1s0f1", "10.12.0.1/24")),
    "gb-1": facts(port("mlx5_0", "10.11.0.2/24"), port("mlx5_1", "10.12.0.2/24")),
}


@pytest.mark.parametrize(
    ("definition", "field"),
    [
        ("mlx5_0", "replica_fabrics.x"),
        ([], "replica_fabrics.x"),
        ({}, "replica_fabrics.x"),
        ({"hca": ["mlx5_0"]}, "replica_fabrics.x.hca"),
        ({"hcas": {"a": 1}}, "replica_fabrics.x.hcas"),
        ({"hcas": "mlx5_0,mlx5_1"}, "replica_fabrics.x.hcas"),
        ({"hcas": [True]}, "replica_fabrics.x.hcas[0]"),
        ({"networks": ["10.11.0.7/24"]}, "replica_fabrics.x.networks[0]"),
        ({"networks": ["compute"]}, "replica_fabrics.x.networks[0]"),
        ({"vlan": "blue"}, "replica_fabrics.x.vlan"),
        ({"vlan": 4095}, "replica_fabrics.x.vlan"),
        ({"vlan": 0}, "replica_fabrics.x.vlan"),
        ({"link_layer": "token ring"}, "replica_fabrics.x.link_layer"),
        ({"keys": ["compute"]}, "replica_fabrics.x.keys[0]"),
        ({"hcas": ["mlx5_0"], "subnet_aware": "maybe"}, "replica_fabrics.x.subnet_aware"),
        ({"hcas": ["mlx5_0"], "routed": "maybe"}, "replica_fabrics.x.routed"),
        ({"hosts": ["gb-1"]}, "replica_fabrics.x.hosts"),
        ({"hosts": {"gb-*": ["mlx5_0"]}}, "replica_fabrics.x.hosts.gb-*"),
        ({"hosts": {"gb-*": {"hca": "mlx5_0"}}}, "replica_fabrics.x.hosts.gb-*.hca"),
        ({"hosts": {"gb-*": {"subnet_aware": True}}}, "replica_fabrics.x.hosts.gb-*.subnet_aware"),
        ({"hosts": {"gb-*": {"hcas": ["mlx5_0"]}}}, "replica_fabrics.x.hosts"),
        ({"hosts": {"gb-*": {"vlan": 1}, "gb-1*": {"vlan": 2}, "s*": {"vlan": 3}}}, "replica_fabrics.x.hosts"),
    ],
)
def test_definitions_are_read_field_by_field(definition, field):
    outcome = choose(PAIR, "x", {"x": definition})
    assert field in [fault.field for fault in outcome.findings.faults]
    assert all(fault.wanted for fault in outcome.findings.faults)


def test_the_examples_of_the_documentation_are_read():
    text = (DOCS / "fabrics.md").read_text(encoding="utf-8")
    example = text[text.index("    replica_fabrics:\n") :].partition("\n\n")[0]
    definitions = yaml.safe_load("\n".join(line[4:] for line in example.splitlines()))["replica_fabrics"]
    assert len(definitions) >= 8
    for name, definition in definitions.items():
        findings = Findings()
        assert fabric_names.parse(name, definition, findings) is not None, [fault.text() for fault in findings.faults]
    assert {field.name for field in dataclasses.fields(fabric_names.Selector)} | {"hosts", "routed", "subnet_aware"} == {
        line.split("`")[1] for line in text[text.index("| field |") :].partition("\n\n")[0].splitlines()[2:]
    }


def test_unknown_field_offers_the_nearest():
    assert "Did you mean networks?" in refused(PAIR, "x", {"x": {"network": "10.11.0.0/24"}})


def test_selectors_for_hosts_add_to_the_fabric():
    named = {"x": {"networks": "10.0.0.0/8", "hosts": {"spark-*": {"hcas": "rocep1s0f0"}, "gb-1": {"hcas": ["mlx5_0:1"]}, "gb-*": {"hcas": ["mlx5_9"]}}}}
    assert chosen(PAIR, "x", named) == {"spark-1": ["rocep1s0f0:1"], "gb-1": ["mlx5_0:1"]}, "the exact name before patterns"
    named["x"]["hosts"]["gb-1"] = {"networks": ["10.11.0.0/24"]}
    assert chosen(PAIR, "x", named) == {"spark-1": ["rocep1s0f0:1"], "gb-1": ["mlx5_0:1"]}, "a field of the host replaces the fabric's"


def test_unknown_fabric_lists_what_there_is():
    text = refused(PAIR, "compte", {"compute": {"vlan": 1}})
    assert "Did you mean compute?" in text and "gb-1: mlx5_0:1 roce:10.11.0.0/24" in text


def test_a_port_that_is_named_must_be_there():
    assert "names mlx5_7" in refused(PAIR, "x", {"x": {"hosts": {"gb-1": {"hcas": ["mlx5_0", "mlx5_7"]}, "spark-1": {"hcas": ["rocep1s0f0"]}}}})


def test_a_pattern_whose_ports_are_all_down_is_refused():
    """Such a fabric is not had: TCP in its place would be in silence."""
    down = port("mlx5_0", "10.1.0.1/16", usable=False, reasons=["the port is down"])
    text = refused({"a": facts(down), "b": facts(down)}, "y", {"y": {"hcas": ["mlx5_*"]}})
    assert text.count("the port is down") == 2 and "a" in text


def test_several_names_together():
    named = {"r0": {"networks": "10.11.0.0/24"}, "r1": {"networks": "10.12.0.0/24"}}
    outcome = choose(PAIR, "r0,r1", named)
    assert outcome.faults == [] and len(outcome.choice.keys) == 2 and outcome.choice.name == "r0,r1"
    assert chosen(PAIR, "r0,roce:10.12.0.0/24", named) == outcome.ports


def test_keys_that_hosts_do_not_share():
    hosts = {"a": facts(port("mlx5_0", "10.11.0.1/24")), "b": facts(port("mlx5_0", "10.12.0.2/24"))}
    assert "a network that every host of the replica has" in refused(hosts, "roce:10.11.0.0/24,roce:10.12.0.0/24")
    assert "b: replica_fabric" in refused(hosts, "roce:10.11.0.0/24")


def test_direct_cables_of_other_sizes():
    def ring(length: int, **more: Any) -> dict[str, Any]:
        link = {"ab": 0, "bc": 1, "ca": 2}
        step = 1 << 32 - length
        base = int(ipaddress.IPv4Address("10.77.0.0"))
        return {
            host: facts(
                *(
                    port(f"p{at}", f"{ipaddress.IPv4Address(base + link[pair] * step + pair.index(host) + (length < 31))}/{length}", **more)
                    for at, pair in enumerate(sorted(name for name in link if host in name))
                )
            )
            for host in "abc"
        }

    named = {"ring": {"hcas": ["p*"], "subnet_aware": True}}
    for length, expected in ((24, 24), (30, 30), (31, 31), (16, 24)):
        outcome = choose(ring(length), "ring", named)
        assert outcome.faults == [] and outcome.choice.prefix_length == expected, "24, which is NCCL's default, wherever it tells the cables apart"
    wide = {"a": ("10.1.1.1/16", "10.3.9.1/16"), "b": ("10.1.2.2/16", "10.2.1.1/16"), "c": ("10.2.7.2/16", "10.3.1.2/16")}
    assert (
        choose({host: facts(*(port(f"p{at}", text) for at, text in enumerate(texts))) for host, texts in wide.items()}, "ring", named).choice.prefix_length
        == 16
    )
    mixed = {host: facts(*found["hcas"]) for host, found in ring(24).items()}
    mixed["a"]["hcas"][0] = port("p0", "10.77.0.1/25", pci_bdf="0000:10:00.0")
    assert "no subnet that a and b share" in refused(mixed, "ring", named)
    assert "InfiniBand has no addresses" in refused({name: facts(ib("p0", lid=at + 1)) for at, name in enumerate("abc")}, "ring", named)
    shared = {name: facts(port("p0", f"10.77.0.{at}/24"), port("p1", f"10.77.0.1{at}/24")) for at, name in enumerate("abc", 1)}
    assert "a subnet of its own for every port" in refused(shared, "ring", named)


# ---- NVLink domains


def nvlink_ranks(hosts: list[dict[str, Any]], imex: Any = "up") -> list[plan.Rank]:
    """Ranks over trays of the recording, in the shape that the NVML reader gives."""
    states, health = {2: "in_progress", 3: "completed"}, {0: "unknown", 1: "healthy", 2: "unhealthy"}
    ranks = []
    for number, host in enumerate(hosts):
        real = host["state"] == 3 and set(host["cluster_uuid"]) - set("0-")
        domain = {
            "kind": "nvlink",
            "id": host["cluster_uuid"] if real else None,
            "clique": host["clique_id"] if real else None,
            "state": states[host["state"]],
            "health": health[host["health_summary"]],
        }
        found = host_facts.normalise(
            {
                "schema": 1,
                "gpus": [{"uuid": f"GPU-{number}-{index}", "index": index, "interconnect_domain": domain} for index in range(host["gpus"])],
                "limits": {"imex": {"service": "running", "channels": [0], "domain": {"status": imex, "ready": imex == "up", "nodes": [], "versions": []}}},
            }
        )
        ranks.append(plan.Rank(number, plan.HostInput(host["name"], found), found, tuple(found["gpus"])))
    return ranks


def test_recorded_nvlink_domains():
    case = recorded_hosts.load("nvml_gb200_nvl_clique")
    by_name = {host["name"]: host for host in case["hosts"]}
    for members in case["expect"]["domains"]:
        assert plan.nvlink_problem(nvlink_ranks([by_name[name] for name in members]), None) is None
    key = "nvl:%s/%s" % (by_name["tray-a"]["cluster_uuid"], by_name["tray-a"]["clique_id"])
    assert placement.nvlink_key(nvlink_ranks([by_name["tray-a"]])[0].gpus[0]) == key
    assert plan.nvlink_problem(nvlink_ranks([by_name["tray-a"], by_name["tray-b"]]), key) is None
    assert "several NVLink domains" in (plan.nvlink_problem(nvlink_ranks([by_name["tray-a"], by_name["tray-c"]]), None) or "")
    assert "in_progress" in (plan.nvlink_problem(nvlink_ranks([by_name["tray-a"], by_name[case["expect"]["not_ready"][0]]]), None) or "")
    assert "GPUs of nvl:" in (plan.nvlink_problem(nvlink_ranks([by_name["tray-c"]]), key) or "")


def test_hgx_boxes_are_in_no_domain():
    """Completed with a zero UUID and clique 0, on every such host in the world."""
    box = {"gpus": 8, "state": 3, "cluster_uuid": "00000000-0000-0000-0000-000000000000", "clique_id": 0, "health_summary": 1}
    problem = plan.nvlink_problem(nvlink_ranks([{**box, "name": "a"}, {**box, "name": "b"}]), None)
    assert problem and "in no NVLink domain" in problem


@pytest.mark.parametrize(
    "change",
    [
        {"imex": None},
        {"imex": {"service": "running", "channels": [0], "domain": None}},
        {"imex": {"service": "running", "channels": [], "domain": {"status": "up", "ready": True}}},
        {"imex": {"service": "running", "channels": [0], "domain": {"status": "degraded", "ready": False}}},
        {"imex": {"service": "running", "channels": [0], "domain": {"status": "up", "ready": False, "nodes": [{"host": "10.0.0.2", "status": "unavailable"}]}}},
    ],
)
def test_what_is_not_known_is_not_proven(change):
    trays = recorded_hosts.load("nvml_gb200_nvl_clique")["hosts"][:2]
    ranks = nvlink_ranks(trays)
    ranks[1].facts["limits"]["imex"] = host_facts.normalise({"schema": 1, "limits": change})["limits"]["imex"]
    problem = plan.nvlink_problem(ranks, None)
    assert problem and "tray-b" in problem
    ranks = nvlink_ranks(trays)
    ranks[0].gpus[0]["interconnect_domain"] = {**ranks[0].gpus[0]["interconnect_domain"], "state": None}
    assert "unknown state" in (plan.nvlink_problem(ranks, None) or "")
    ranks = nvlink_ranks([{**trays[0], "health_summary": 2}, trays[1]])
    assert "unhealthy" in (plan.nvlink_problem(ranks, None) or "")


# ---- random fleets

NETWORKS = ["10.1.0.0/16", "10.2.0.0/16", "10.3.0.0/24", "10.3.1.0/24", "169.254.0.0/16", "2001:db8:1::/64"]


NAMES = ["mlx5_0", "mlx5_1", "mlx5_10", "rocep1s0f0", "roceP2p1s0f0", "bnxt_re0"]
KINDS = st.one_of(st.lists(st.sampled_from(NETWORKS), min_size=1, max_size=2, unique=True), st.sampled_from(["fe80000000000000", "fec0000000000001"]))


@st.composite
def fleets(draw: st.DrawFn) -> dict[str, dict[str, Any]]:
    """Two to four hosts of one layout, with a mistake here and there: a network, a VLAN, a link layer, a cable, an order."""
    layout = draw(
        st.one_of(
            st.lists(KINDS, min_size=1, max_size=4),
            st.integers(1, 4).map(lambda count: [["10.1.0.0/16"]] * count),
            st.integers(2, 5).map(lambda count: [[network] for network in NETWORKS[:4][:count]]),
        )
    )
    odd = draw(st.sampled_from([0, 0, 1, 2]))
    distance = draw(st.sampled_from([None, "PIX", "SYS"]))
    fleet = {}
    counter = 1
    for host in "abcd"[: draw(st.integers(2, 4))]:
        ports = []
        for at, (name, kind) in enumerate(zip(draw(st.permutations(NAMES)), layout)):
            mistake = draw(st.integers(0, 9)) if odd else 9
            kind = draw(KINDS) if mistake == 0 else kind
            addresses = []
            for text in kind if isinstance(kind, list) else ():
                block = ipaddress.ip_network(text)
                addresses.append(f"{block.network_address + counter}/{block.prefixlen}" + ("@160" if mistake == 1 else ""))
                counter += 1
            item = port(name, *addresses) if addresses else ib(name, str(kind), lid=counter)
            counter += 1
            if mistake == 2:
                item.update(usable=False, reasons=["the port is down"])
            ports.append({**item, "pci_bdf": f"0000:{250 - at if mistake == 3 else 16 + at:02x}:00.0"})
        near = {"G": {item["name"]: draw(st.sampled_from(["PIX", "PXB", "SYS"])) if odd > 1 else distance for item in ports}} if distance else {}
        fleet[host] = {"hcas": ports, "interfaces": [], "topology": {"gpu_hca": near}}
    return fleet


@settings(max_examples=400, deadline=None)
@given(fleet=fleets(), managed=st.sampled_from(["emlx5_0", "emlx5_1", "eno1"]), wanted=st.sampled_from(["", "", "roce:10.1.0.0/16", "x", "y"]))
def test_a_choice_without_faults_holds(fleet, managed, wanted):
    """Whatever the fleet: no fault means one link layer, equal counts, and that the n-th ports of any two hosts share a network of the fabric."""
    named = {"x": {"networks": ["10.0.0.0/8"]}, "y": {"hcas": ["mlx5_*"]}}
    outcome = choose(fleet, wanted, named, dict.fromkeys(fleet, ["G"]), dict.fromkeys(fleet, managed))
    if outcome.faults or not any(outcome.choice.ports.values()):
        assert outcome.faults or not wanted, "a fabric that is named is had or refused"
        return
    ports = outcome.choice.ports
    assert set(ports) == set(fleet) and len({len(found) for found in ports.values()}) == 1
    assert {item["link_layer"] for found in ports.values() for item in found} == {outcome.choice.link}
    for host, found in ports.items():
        assert all(item["usable"] for item in found)
        assert [item["pci_bdf"] for item in found] == sorted(item["pci_bdf"] for item in found)
        assert wanted or not any(managed in item["netdevs"] for item in found)
        for other, others in ports.items():
            for one, two in zip(found, others):
                shared = set(one["fabrics"]) & set(two["fabrics"]) & set(outcome.choice.keys)
                assert shared and not any("169.254" in key or "fe80::" in key for key in shared), (host, other)
    text = " ".join(outcome.choice.keys)
    assert "169.254" not in text


def test_keys_of_a_port_leave_out_link_local():
    assert fabric_names.keys_of({"fabrics": ["roce:169.254.0.0/16", "roce:fe80::/64", "roce:10.0.0.0/8", "ib:fe80000000000000", "compute"]}) == [
        "roce:10.0.0.0/8",
        "ib:fe80000000000000",
        "compute",
    ]
