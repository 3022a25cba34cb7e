# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The variables of a shard, held against a model of what NCCL makes of them."""

from __future__ import annotations

import ipaddress
from typing import Any

import facts as build
import nccl_model
import pytest
import recorded_hosts
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ansible_collections.rankzero.inference.plugins.plugin_utils import addressing, environment, fabric, gids
from ansible_collections.rankzero.inference.plugins.plugin_utils.addressing import Endpoint
from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Findings


def entry(index: int, address: str, version: int = 2, network: str | None = None, vlan: int | None = None) -> dict[str, Any]:
    return {
        "index": index,
        "gid": str(ipaddress.IPv6Address(nccl_model.gid_of(address))),
        "type": "RoCE v2" if version == 2 else "IB/RoCE v1",
        "netdev": "eth0",
        "address": address,
        "network": network,
        "vlan": vlan,
    }


def port(name: str, *entries: dict[str, Any], number: int = 1, **more: Any) -> dict[str, Any]:
    keys = [
        "roce:%s%s" % (item["network"], "@%d" % item["vlan"] if item["vlan"] is not None else "")
        for item in entries
        if item["network"] and item["type"] == "RoCE v2"
    ]
    return {
        "name": name,
        "port": number,
        "link_layer": "ethernet",
        "transport": "roce",
        "gids": list(entries),
        "fabrics": list(dict.fromkeys(keys)),
        "usable": True,
        **more,
    }


def plain(name: str, address: str, index: int = 3) -> dict[str, Any]:
    return port(name, entry(index - 1, address, 1, "10.11.0.0/16"), entry(index, address, 2, "10.11.0.0/16"))


def choice(ports: list[dict[str, Any]], *keys: str, link: str = "ethernet", **more: Any) -> fabric.Choice:
    return fabric.Choice("compute", link, keys or ("roce:10.11.0.0/16",), {"a": tuple(ports)}, **more)


def variables(ports: list[dict[str, Any]], *keys: str, nccl: str | None = "2.30.7", findings: Findings | None = None, **more: Any) -> dict[str, str]:
    found = Findings() if findings is None else findings
    env = environment.Environment()
    environment.fabric_variables(env, choice(ports, *keys, **more), ports, nccl=nccl, host="a", rank=0, findings=found)
    assert findings is not None or not found.faults, found.faults
    assert set(env.values) == set(env.why) and all(env.why.values()), "every variable has its reason"
    return env.values


# ---- the fabric's variables, whole


def test_roce():
    assert variables([plain("mlx5_0", "10.11.0.1"), plain("mlx5_1", "10.11.0.2")]) == {
        "NCCL_IB_DISABLE": "0",
        "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1",
        "NCCL_IB_GID_INDEX": "3",
        "NCCL_NET": "IB",
        "NCCL_IGNORE_NET_MISMATCH": "0",
    }


def test_infiniband_has_neither_index_nor_range():
    ib = [{"name": "mlx5_0", "port": 2, "link_layer": "infiniband", "transport": "ib", "gids": [], "fabrics": ["ib:fe80000000000000"]}]
    assert variables(ib, "ib:fe80000000000000", link="infiniband") == {
        "NCCL_IB_DISABLE": "0",
        "NCCL_IB_HCA": "=mlx5_0:2",
        "NCCL_NET": "IB",
        "NCCL_IGNORE_NET_MISMATCH": "0",
    }


def test_no_ports():
    env = environment.Environment()
    environment.fabric_variables(env, fabric.none("no HCA"), (), nccl="2.30.7", host="a", rank=0, findings=Findings())
    assert env.values == {"NCCL_IB_DISABLE": "1"}


def test_efa_has_no_verbs_variable():
    values = variables([{"name": "rdmap85s0", "port": 1, "link_layer": "unknown", "transport": "efa"}], link="efa")
    assert values == {"FI_PROVIDER": "efa", "NCCL_NET": "AWS Libfabric"}, "and none for verbs"


def test_index_that_differs_becomes_a_range():
    values = variables([plain("mlx5_0", "10.11.0.1", 3), plain("mlx5_1", "10.11.0.2", 5)])
    assert values["NCCL_IB_ADDR_RANGE"] == "10.11.0.0/16" and "NCCL_IB_GID_INDEX" not in values


def test_rails_with_different_indexes_become_a_range_over_all():
    ports = [port("mlx5_0", entry(3, "10.64.0.1", 2, "10.64.0.0/16")), port("mlx5_1", entry(5, "10.65.0.1", 2, "10.65.0.0/16"))]
    assert variables(ports, "roce:10.64.0.0/16", "roce:10.65.0.0/16")["NCCL_IB_ADDR_RANGE"] == "10.64.0.0/15"


def test_range_that_would_take_another_address_is_a_fault():
    other = entry(1, "10.65.0.9", 2, "10.65.0.0/16")
    ports = [port("mlx5_0", other, entry(3, "10.64.0.1", 2, "10.64.0.0/16")), port("mlx5_1", entry(5, "10.66.0.1", 2, "10.66.0.0/16"))]
    findings = Findings()
    values = variables(ports, "roce:10.64.0.0/16", "roce:10.66.0.0/16", findings=findings)
    assert "mlx5_0:1: index 3 10.64.0.1; mlx5_1:1: index 5 10.66.0.1" in findings.faults[0].seen and not {"NCCL_IB_GID_INDEX", "NCCL_IB_ADDR_RANGE"} & set(
        values
    )


def test_range_is_not_chosen_by_the_luck_of_the_order():
    """The other address comes later in the table, so NCCL would be right today; entries move when a link flaps."""
    later = entry(7, "10.65.0.9", 2, "10.65.0.0/16")
    ports = [port("mlx5_0", entry(3, "10.64.0.1", 2, "10.64.0.0/16"), later), port("mlx5_1", entry(5, "10.66.0.1", 2, "10.66.0.0/16"))]
    findings = Findings()
    variables(ports, "roce:10.64.0.0/16", "roce:10.66.0.0/16", findings=findings)
    assert findings.faults


def test_entry_zero_that_no_range_can_replace_is_a_fault():
    """NCCL holds only candidates against the range: a RoCE v2 IPv4 entry in slot 0 stays though it is outside of it."""
    stubborn = port("mlx5_0", entry(0, "192.0.2.1", 2, "192.0.2.0/24"), entry(1, "10.11.0.1", 2, "10.11.0.0/16"))
    findings = Findings()
    variables([stubborn, plain("mlx5_1", "10.11.0.2", 3)], findings=findings)
    assert findings.faults
    table = [nccl_model.Slot(nccl_model.gid_of("192.0.2.1"), 2), nccl_model.Slot(nccl_model.gid_of("10.11.0.1"), 2)]
    assert nccl_model.gid_index(table, {"NCCL_IB_ADDR_RANGE": "10.11.0.0/16"}) == 0
    assert variables([stubborn])["NCCL_IB_GID_INDEX"] == "1", "an index says it"


@pytest.mark.parametrize(
    "entries",
    [
        [entry(3, "169.254.1.1", 2, "169.254.0.0/16")],
        [entry(3, "fe80::1", 2, "fe80::/64")],
        [entry(3, "10.11.0.1", 1, "10.11.0.0/16")],
        [],
        [entry(3, "10.12.0.1", 2, "10.12.0.0/16")],
        [entry(3, "10.11.0.1", 2, "10.11.0.0/16", 160)],
    ],
)
def test_no_routable_entry_is_a_fault(entries):
    findings = Findings()
    values = variables(
        [plain("mlx5_1", "10.11.0.2"), port("mlx5_0", *entries)], "roce:10.11.0.0/16", "roce:169.254.0.0/16", "roce:fe80::/64", findings=findings
    )
    assert "no routable RoCE v2 entry on mlx5_0:1" in findings.faults[0].seen and "NCCL_IB_GID_INDEX" not in values


def test_ipv6_only():
    ports = [port(name, entry(1, "fe80::1", 2), entry(2 + at, f"2001:db8::{at + 1}", 2, "2001:db8::/64")) for at, name in enumerate(("bnxt_re0", "bnxt_re1"))]
    values = variables(ports, "roce:2001:db8::/64")
    assert values["NCCL_IB_ADDR_FAMILY"] == "AF_INET6" and values["NCCL_IB_ADDR_RANGE"] == "2001:db8::/64"
    assert variables(ports[:1], "roce:2001:db8::/64")["NCCL_IB_GID_INDEX"] == "2"


def test_ipv4_and_ipv6_ports_do_not_mix():
    findings = Findings()
    variables([plain("a", "10.11.0.1"), port("b", entry(3, "2001:db8::1", 2, "2001:db8::/64"))], "roce:10.11.0.0/16", "roce:2001:db8::/64", findings=findings)
    assert "IPv4 on some ports and IPv6 on others" in findings.faults[0].seen


def test_facts_that_somebody_wrote():
    """Without networks, under a name of the writer's own: the only fabric of the port is meant."""
    written = {
        "name": "mlx5_0",
        "port": 1,
        "link_layer": "ethernet",
        "usable": True,
        "fabrics": ["compute"],
        "gids": [{"index": 3, "type": "RoCE v2", "address": "10.11.0.1"}],
    }
    assert variables([written], "compute")["NCCL_IB_GID_INDEX"] == "3"
    stray = {**written, "fabrics": ["roce:10.11.0.0/16"], "gids": [{"index": 1, "type": "RoCE v2", "address": "10.99.0.1"}, *written["gids"]]}
    assert variables([stray])["NCCL_IB_GID_INDEX"] == "3", "an address outside of the key's network is not on it"


@pytest.mark.parametrize(
    ("nccl", "net", "mismatch"),
    [
        (None, False, False),
        ("2.20.5", False, False),
        ("2.21.5", True, False),
        ("2.29.7", True, False),
        ("2.30.3", True, True),
        ("2.30.7+cuda13.0", True, True),
        ("3.0", True, True),
    ],
)
def test_versions_of_nccl(nccl, net, mismatch):
    values = variables([plain("mlx5_0", "10.11.0.1")], nccl=nccl)
    assert (values.get("NCCL_NET"), values.get("NCCL_IGNORE_NET_MISMATCH")) == ("IB" if net else None, "0" if mismatch else None)


def test_range_needs_an_nccl_that_knows_it():
    ports = [plain("mlx5_0", "10.11.0.1", 3), plain("mlx5_1", "10.11.0.2", 5)]
    for nccl, faulty in ((None, False), ("2.21.5", False), ("2.20.5", True)):
        findings = Findings()
        variables(ports, nccl=nccl, findings=findings)
        assert bool(findings.faults) is faulty
    hidden = [{**ports[0], "gids": [*ports[0]["gids"], {"index": 0, "gid": "fe80::9", "type": None, "address": "fe80::9"}]}, ports[1]]
    for nccl, faulty in (("2.25.1", True), ("2.26.2", False)):
        findings = Findings()
        variables(hidden, nccl=nccl, findings=findings)
        assert bool(findings.faults) is faulty, "slots of another namespace break 2.21 to 2.25"


def test_direct_cables():
    ports = [port(f"p{at}", entry(3, f"10.77.{at}.1", 2, f"10.77.{at}.0/24")) for at in range(2)]
    keys = ("roce:10.77.0.0/24", "roce:10.77.1.0/24")
    values = variables(ports, *keys, prefix_length=24)
    assert {name: values[name] for name in ("NCCL_IB_SUBNET_AWARE_ROUTING", "NCCL_IB_MERGE_NICS", "NCCL_NET_PLUGIN", "NCCL_NET")} == {
        "NCCL_IB_SUBNET_AWARE_ROUTING": "1",
        "NCCL_IB_MERGE_NICS": "0",
        "NCCL_NET_PLUGIN": "none",
        "NCCL_NET": "IB",
    }
    assert "NCCL_IB_SUBNET_PREFIX_LEN" not in values
    assert variables(ports, *keys, prefix_length=30)["NCCL_IB_SUBNET_PREFIX_LEN"] == "30"
    for nccl in (None, "2.30.6", "2.29.9"):
        findings = Findings()
        variables(ports, *keys, nccl=nccl, findings=findings, prefix_length=24)
        assert findings.faults[0].wanted == "NCCL 2.30.7 or newer"


def test_rails_that_cannot_cross():
    assert variables([plain("mlx5_0", "10.11.0.1")], cross_rail=False)["NCCL_CROSS_NIC"] == "0"


def test_interfaces():
    env = environment.Environment()
    environment.bootstrap_interface(env, Endpoint("bond0.2093", "10.0.0.1", "the way to the leader"))
    assert env.values == {"NCCL_SOCKET_IFNAME": "=bond0.2093", "GLOO_SOCKET_IFNAME": "bond0.2093", "TP_SOCKET_IFNAME": "bond0.2093"}
    environment.bootstrap_interface(env, Endpoint("eth0", "2001:db8::1", "x"))
    assert env.values["NCCL_SOCKET_FAMILY"] == "AF_INET6"


def test_nvlink():
    def values(*arguments: Any) -> dict[str, str]:
        env = environment.Environment()
        environment.nvlink_variables(env, *arguments)
        return env.values

    assert values(2, True, True, "nvl:x/2") == {"NCCL_MNNVL_ENABLE": "1", "NCCL_CUMEM_ENABLE": "1"}
    assert values(2, False, False, "nvl:x/2") == {"NCCL_MNNVL_ENABLE": "0"}
    assert values(2, False, True, "nvl:x/2") == values(2, False, False, None) == values(1, True, True, "nvl:x/2") == {}


# ---- in a plan


def test_override_wins_and_is_said():
    plan = build.good(build.hosts(hcas=2), build.profile(env={"NCCL_IB_HCA": "=mlx5_0:1"}))
    for shard in plan["shards"].values():
        assert shard["launches"][-1]["env"]["NCCL_IB_HCA"] == "=mlx5_0:1"
    warnings = [warning for warning in plan["warnings"] if warning["field"] == "env.NCCL_IB_HCA"]
    assert {warning["host"] for warning in warnings} == {"n1", "n2"}
    assert any(warning["wanted"] == "=mlx5_0:1,mlx5_1:1" for warning in warnings) and any("which selects mlx5_0:1" in warning["seen"] for warning in warnings)


def domain(clique: int = 2, **more: Any) -> dict[str, Any]:
    return {"kind": "nvlink", "id": "11111111-2222-4333-8444-555555555555", "clique": clique, "state": "completed", "health": "healthy", **more}


def trays(*cliques: int | None, hcas: int = 0) -> dict[str, Any]:
    found = {}
    for number, clique in enumerate(cliques, 1):
        node = build.node(number, hcas=hcas)
        for gpu in node["gpus"]:
            gpu["interconnect_domain"] = domain(clique) if clique is not None else None
        node["limits"]["imex"] = {"service": "running", "channels": [0], "domain": {"status": "up", "ready": True, "nodes": [], "versions": []}}
        found[f"n{number}"] = node
    return found


def launched(plan: dict[str, Any], name: str) -> list[str | None]:
    return [shard["launches"][-1]["env"].get(name) for _host, shard in sorted(plan["shards"].items())]


def test_nvlink_domain_in_a_plan():
    key = "nvl:11111111-2222-4333-8444-555555555555/2"
    plan = build.good(trays(2, 2), options={"replica_fabric": key})
    assert (
        launched(plan, "NCCL_MNNVL_ENABLE") == ["1", "1"]
        and launched(plan, "NCCL_CUMEM_ENABLE") == ["1", "1"]
        and launched(plan, "NCCL_IB_DISABLE") == ["1", "1"]
    )
    assert launched(build.good(trays(2, 2)), "NCCL_MNNVL_ENABLE") == [None, None], "proven and not asked for: NCCL decides"
    assert launched(build.good(trays(2, 3)), "NCCL_MNNVL_ENABLE") == ["0", "0"]
    assert launched(build.good(trays(2, None)), "NCCL_MNNVL_ENABLE") == ["0", "0"], "all ranks must be told the same"
    assert launched(build.good(trays(None, None)), "NCCL_MNNVL_ENABLE") == [None, None]
    assert (None, "replica_fabric") in build.faults(trays(2, 3), options={"replica_fabric": key})
    both = build.good(trays(2, 2, hcas=2), options={"replica_fabric": key + ",roce:10.21.0.0/16"})
    assert launched(both, "NCCL_MNNVL_ENABLE") == ["1", "1"] and launched(both, "NCCL_IB_HCA") == ["=mlx5_0:1,mlx5_1:1"] * 2


@pytest.mark.parametrize("env", [{"NCCL_CUMEM_ENABLE": 0}, {"NCCL_P2P_DISABLE": 1}, {"NCCL_P2P_LEVEL": "LOC"}, {"NCCL_MNNVL_ENABLE": 0}])
def test_what_takes_nvlink_away_is_refused(env):
    wanted = {"replica_fabric": "nvl:11111111-2222-4333-8444-555555555555/2"}
    assert build.faults(trays(2, 2), build.profile(env=env), wanted) == [("n1", "env." + next(iter(env))), ("n2", "env." + next(iter(env)))]
    assert not build.plan(trays(None, None), build.profile(env=env))["faults"]


def test_nccl_conf_in_a_plan():
    hosts = build.hosts(hcas=2)
    hosts["n2"]["limits"]["nccl_conf"] = {"/etc/nccl.conf": {"NCCL_IB_HCA": "mlx5_1", "NCCL_IB_TIMEOUT": "23"}, "/home/x/.nccl.conf": {"NCCL_ALGO": "Ring"}}
    said = [(warning["host"], warning["seen"]) for warning in build.good(hosts)["warnings"] if warning["field"] == "limits.nccl_conf"]
    assert said == [("n2", "NCCL_IB_HCA=mlx5_1 in /etc/nccl.conf"), ("n2", "NCCL_IB_TIMEOUT=23 in /etc/nccl.conf")]


# ---- properties

NETWORKS = ["10.1.0.0/16", "10.2.0.0/16", "10.2.8.0/24", "10.9.0.0/30", "192.0.2.0/24", "169.254.0.0/16", "2001:db8:1::/64", "2001:db8:2::/64", "fe80::/64"]


@st.composite
def tables(draw: st.DrawFn, counter: list[int]) -> list[dict[str, Any]]:
    """A GID table as readers of sysfs give it: pairs and single entries of any network in any slot, slots that are hidden, gaps, and slot 0 in use or not."""
    found, index = [], draw(st.sampled_from([0, 0, 1, 4]))
    for text in draw(st.lists(st.sampled_from(NETWORKS), min_size=1, max_size=5)):
        network = ipaddress.ip_network(text)
        counter[0] += 1
        address = str(network.network_address + 1 + counter[0] % (network.num_addresses - 2))
        vlan = draw(st.sampled_from([None, None, None, 160]))
        for version in draw(st.sampled_from([(1, 2), (1, 2), (2, 1), (2,), (1,), (None,)])):
            item = entry(index, address, version or 1, text if network.network_address.is_link_local is False else None, vlan)
            found.append(item if version else {**item, "type": None, "network": None})
            index += draw(st.sampled_from([1, 1, 1, 2]))
    return found


@st.composite
def hosts_ports(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Ports of one host. Often the tables are alike, as on real hosts; now and then one has an address more in front."""
    counter = [0]
    first = draw(tables(counter))
    ports = []
    for number in range(draw(st.integers(1, 4))):
        how = draw(st.sampled_from(["same", "same", "shifted", "other"]))
        shift = 1 if how == "shifted" else 0
        table = draw(tables(counter)) if how == "other" else [{**item, "index": item["index"] + shift} for item in first]
        ports.append(port(f"mlx5_{number}", *table))
    return ports


def slots(item: dict[str, Any]) -> list[nccl_model.Slot]:
    filled = {gid["index"]: nccl_model.Slot(nccl_model.gid_of(gid["address"]), {"RoCE v2": 2, "IB/RoCE v1": 1}.get(gid["type"])) for gid in item["gids"]}
    return [filled.get(index, nccl_model.Slot()) for index in range(max(filled, default=0) + 3)]


@settings(max_examples=400, deadline=None)
@given(ports=hosts_ports(), data=st.data())
def test_whatever_we_write_nccl_finds_an_entry_of_the_fabric(ports, data):
    """No fault, then under our variables NCCL takes on every port an entry that is RoCE v2, routable, in the fabric's network and VLAN."""
    keys = tuple(dict.fromkeys(key for item in ports for key in item["fabrics"]))
    assume(keys)
    keys = tuple(data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=3, unique=True)))
    findings = Findings()
    values = variables(ports, *keys, findings=findings)
    right = [
        {gid["index"] for gid in item["gids"] if gid["type"] == "RoCE v2" and gid["network"] and on_network(gid) in keys and routable(gid["address"])}
        for item in ports
    ]
    v4 = [{index for index in found if ":" not in next(gid["address"] for gid in item["gids"] if gid["index"] == index)} for found, item in zip(right, ports)]
    if findings.faults:
        assert not (all(v4) and set.intersection(*v4)), "an index that is right for all ports is found"
        return
    for item, good in zip(ports, right):
        index = nccl_model.gid_index(slots(item), values)
        assert index in good, (item["name"], index, values)
        slot = slots(item)[index]
        assert slot.version == 2 and routable(str(nccl_model.address_of(slot.gid)))
        assert nccl_model.is_ipv4(slot.gid) == (values.get("NCCL_IB_ADDR_FAMILY") != "AF_INET6")
    assert len({"NCCL_IB_GID_INDEX", "NCCL_IB_ADDR_RANGE"} & set(values)) == 1


def on_network(gid: dict[str, Any]) -> str:
    return "roce:" + gid["network"] + ("" if gid["vlan"] is None else f"@{gid['vlan']}")


def routable(address: str) -> bool:
    value = ipaddress.ip_address(address)
    return not (value.is_link_local or value.is_loopback or value.is_unspecified or value.is_multicast)


DEVICES = st.lists(
    st.tuples(st.sampled_from(["mlx5_1", "mlx5_10", "mlx5_11", "mlx5_1_dma", "rocep1s0f0", "rocep1s0f0v1", "mlx5_bond_0", "m"]), st.integers(1, 2)),
    min_size=1,
    max_size=10,
    unique=True,
)


@settings(max_examples=200, deadline=None)
@given(devices=DEVICES, data=st.data())
def test_the_list_selects_exactly_the_planned_ports(devices, data):
    planned = data.draw(st.lists(st.sampled_from(devices), min_size=1, unique=True))
    ports = [plain(name, f"10.11.0.{at + 1}") for at, (name, _number) in enumerate(planned)]
    values = variables([{**item, "port": number} for item, (_name, number) in zip(ports, planned)])
    taken = nccl_model.hcas(values["NCCL_IB_HCA"], [nccl_model.Device(name, number) for name, number in devices])
    assert sorted((device.name, device.port) for device in taken) == sorted(planned)


INTERFACES = ["bond0", "bond0.2093", "bond0.2093.1", "eth0", "eth01", "e", "ib0", "docker0", "enp1s0f0np0"]


@settings(max_examples=100, deadline=None)
@given(names=st.lists(st.sampled_from(INTERFACES), min_size=1, unique=True), data=st.data())
def test_the_interface_is_selected_exactly(names, data):
    name = data.draw(st.sampled_from(names))
    env = environment.Environment()
    environment.bootstrap_interface(env, Endpoint(name, "10.0.0.1", "x"))
    present = [nccl_model.Interface(other, ("10.0.0.1/24", "fe80::1/64")) for other in names]
    assert nccl_model.interfaces(env.values["NCCL_SOCKET_IFNAME"], present) == [name]
    assert env.values["GLOO_SOCKET_IFNAME"] == env.values["TP_SOCKET_IFNAME"] == name


@pytest.mark.parametrize("name", ["hca_prefix_collision", "iface_vlan_prefix"])
def test_recorded_matches(name):
    """The model selects what NCCL was recorded to select, so that it may judge our lists; and our exact form selects each device alone."""
    case = recorded_hosts.load(name)
    is_hca = case["kind"] == "hca_match"

    def select(spec: str) -> list[str]:
        if is_hca:
            return [device.name for device in nccl_model.hcas(spec, [nccl_model.Device(device, 1) for device in case["devices"]])]
        return nccl_model.interfaces(spec, [nccl_model.Interface(device, ("10.0.0.1/24",)) for device in case["devices"]])

    for match in case["cases"]:
        assert select(match["spec"]) == match["selects"], match["spec"]
    for device in case["devices"]:
        assert select(f"={device}:1" if is_hca else f"={device}") == [device]


@pytest.mark.parametrize("name", ["iface_hostname_loopback", "iface_linklocal_and_ipoib", "iface_sriov_vfs_without_address"])
def test_recorded_interfaces(name):
    """The interface of recorded hosts, by the rule of the plan, and the variables that name it: on a worker the way to the leader, else the default route."""
    case = recorded_hosts.load(name)
    interfaces = [
        {"name": item["name"], "kind": "physical", "up": item.get("up", True), "carrier": True, "master": None, "addresses": item["ipv4"]}
        for item in case["interfaces"]
    ]
    default = next((item["name"] for item in case["interfaces"] if item.get("default_route")), None)
    routes = [{"destination": f"{target}/32", "gateway": None, "interface": device, "metric": 0} for target, device in (case.get("route_get") or {}).items()]
    findings = Findings()
    endpoint = addressing.choose(
        {"interfaces": interfaces, "routes": routes, "default_route": {"interface": default}},
        host="a",
        rank=1,
        explicit=None,
        management=None,
        leader_address=case.get("leader_ip") if routes else None,
        single_node=False,
        findings=findings,
    )
    assert endpoint is not None, findings.faults
    env = environment.Environment()
    environment.bootstrap_interface(env, endpoint)
    wanted = case["expect"].get("management") or case["expect"]["gloo"]
    expect = case["expect"].get("env") or {
        "NCCL_SOCKET_IFNAME": case["expect"].get("nccl", "=" + wanted),
        "GLOO_SOCKET_IFNAME": wanted,
        "TP_SOCKET_IFNAME": wanted,
    }
    assert expect.items() <= env.values.items()
    assert endpoint.address == case["expect"].get("host_ip", endpoint.address)
    present = [nccl_model.Interface(item["name"], tuple(item["addresses"]), bool(item["up"])) for item in interfaces]
    assert nccl_model.interfaces(env.values["NCCL_SOCKET_IFNAME"], present) == [wanted]


def test_right_gids_are_those_of_the_rule():
    ports = [plain("mlx5_0", "10.11.0.1"), plain("mlx5_1", "10.11.0.2", 5)]
    assert gids.right(ports, ("roce:10.11.0.0/16",)) == {"mlx5_0:1": frozenset({3}), "mlx5_1:1": frozenset({5})}


@pytest.mark.parametrize(
    ("text", "parts"), [(None, ()), ("", ()), ("2.30.7", (2, 30, 7)), ("2.27.5+cuda12.9", (2, 27, 5)), ("v2.21", (2, 21)), ("unknown", ())]
)
def test_version(text, parts):
    assert environment.version(text) == parts
