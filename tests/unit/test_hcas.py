# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""HCAs read from generated sysfs trees: every recorded case, every format, and damage."""

from __future__ import annotations

import ipaddress
import os
import pathlib
import shutil
import stat

import hardware_trees
import pytest
import recorded_hosts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ansible_collections.rankzero.inference.plugins.module_utils import hcas, network

V4_10_11_0_72 = "0000:0000:0000:0000:0000:ffff:0a0b:0048"
LINK_LOCAL = "fe80:0000:0000:0000:0a00:27ff:fe00:0001"
PLAIN_GIDS = [
    [0, LINK_LOCAL, "IB/RoCE v1", "ens1np0"],
    [1, LINK_LOCAL, "RoCE v2", "ens1np0"],
    [2, V4_10_11_0_72, "IB/RoCE v1", "ens1np0"],
    [3, V4_10_11_0_72, "RoCE v2", "ens1np0"],
]


def read(tree: hardware_trees.HardwareTree) -> dict[str, dict]:
    """Ports by device name, read as node_facts reads them."""
    tree.write_network_state([])
    state = network.read(str(tree.sysfs), str(tree.network_state))
    assert state["errors"] == {}
    return {port["name"]: port for port in hcas.read(str(tree.sysfs), str(tree.dev), state["interfaces"])}


def roce_tree(root: pathlib.Path, **values: object) -> hardware_trees.HardwareTree:
    """One healthy RoCE port; keywords change it."""
    tree = hardware_trees.HardwareTree(root)
    tree.pci("0000:1b:00.0", bridges=["0000:15:01.0"], numa_node=0, driver="mlx5_core")
    tree.hca("mlx5_0", **{"pci": "0000:1b:00.0", "gids": PLAIN_GIDS, "netdevs": ["ens1np0"], **values})
    tree.interface("ens1np0", ["10.11.0.72/16"], pci="0000:1b:00.0")
    return tree


# ---- a healthy port, whole


def test_roce_port_whole(tmp_path):
    port = read(roce_tree(tmp_path))["mlx5_0"]
    assert port.pop("gids")[3] == {
        "index": 3,
        "gid": V4_10_11_0_72,
        "type": "RoCE v2",
        "netdev": "ens1np0",
        "address": "10.11.0.72",
        "network": "10.11.0.0/16",
        "vlan": None,
    }
    guid = port.pop("node_guid")
    assert port == {
        "name": "mlx5_0",
        "port": 1,
        "pci_bdf": "0000:1b:00.0",
        "numa_node": 0,
        "driver": "mlx5_core",
        "link_layer": "ethernet",
        "node_type": "ca",
        "transport": "roce",
        "state": "active",
        "phys_state": "link_up",
        "rate_gbps": 400,
        "netdevs": ["ens1np0"],
        "mtu": 9000,
        "is_vf": False,
        "uverbs": "uverbs0",
        "lid": 0,
        "sm_lid": 0,
        "sys_image_guid": guid,
        "fabrics": ["roce:10.11.0.0/16"],
        "usable": True,
        "reasons": [],
        "errors": {},
    }


def test_infiniband_port(tmp_path):
    tree = hardware_trees.HardwareTree(tmp_path)
    tree.pci("0000:1c:00.0", driver="mlx5_core")
    tree.hca(
        "mlx5_0",
        pci="0000:1c:00.0",
        link_layer="InfiniBand",
        lid="0x12",
        sm_lid="0x1",
        gids=[[0, "fec0:0000:0000:0007:0c42:a103:0000:0001", "IB/RoCE v1", None]],
    )
    port = read(tree)["mlx5_0"]
    assert (port["transport"], port["lid"], port["sm_lid"]) == ("ib", 18, 1)
    assert port["fabrics"] == ["ib:fec0000000000007"]
    assert port["usable"], port["reasons"]
    assert port["gids"][0]["address"] is None
    assert port["numa_node"] is None and "numa_node" in port["errors"], "numa_node -1 is unknown, not a node"


@pytest.mark.parametrize("lid", ["0x0", "0xffff", None])
def test_infiniband_without_subnet_manager_is_not_usable(tmp_path, lid):
    tree = hardware_trees.HardwareTree(tmp_path)
    tree.hca("mlx5_0", link_layer="InfiniBand", lid=lid, gids=[[0, LINK_LOCAL, "IB/RoCE v1", None]])
    port = read(tree)["mlx5_0"]
    assert not port["usable"]
    assert "subnet manager" in " ".join(port["reasons"])


# ---- recorded cases


@pytest.mark.parametrize("empty_slots", ["missing", "directory"])
@pytest.mark.parametrize("name", recorded_hosts.GID_TABLES)
def test_gid_tables(tmp_path, name, empty_slots):
    """The address that an index holds, and only routable RoCE v2 entries as fabrics: the right index is among them, link-local ones never."""
    case = recorded_hosts.load(name)
    wanted_network = case.get("fabric_cidr")
    for hca in (hca for host in case["hosts"] for hca in host["hcas"]):
        hca["empty_slots"] = empty_slots
    hosts = recorded_hosts.gid_tables(case, tmp_path)
    for host in case["hosts"]:
        ports = read(hosts[host["name"]].tree)
        for hca in host["hcas"]:
            port = ports[hca["dev"]]
            assert [gid["index"] for gid in port["gids"]] == sorted(entry[0] for entry in hca["gids"])
            assert port["usable"], port["reasons"]
            right = case["expect"]["right_gid_index"][host["name"]][hca["dev"]]
            routable = [gid["index"] for gid in port["gids"] if gid["network"] and gid["type"] == "RoCE v2"]
            fitting = [
                gid["index"]
                for gid in port["gids"]
                if gid["type"] == "RoCE v2"
                and gid["network"]
                and (wanted_network is None or ipaddress.ip_network(gid["network"]).subnet_of(ipaddress.ip_network(wanted_network)))
            ]
            assert fitting == [right]
            assert set(routable) <= {gid[0] for gid in hca["gids"] if not gid[1].startswith("fe80") and ":a9fe:" not in gid[1]}
        if "ipv4" in case["expect"]:
            got = {hca["dev"]: next(gid["address"] for gid in ports[hca["dev"]]["gids"] if gid["index"] == 3) for hca in host["hcas"]}
            assert got == case["expect"]["ipv4"][host["name"]]


def test_gid_two_vlans_have_fabrics_of_their_own(tmp_path):
    case = recorded_hosts.load("gid_two_vlans_one_port")
    one = recorded_hosts.write("gid_two_vlans_one_port", tmp_path)[case["hosts"][0]["name"]]
    assert read(one.tree)["mlx5_0"]["fabrics"] == ["roce:10.10.0.0/16", "roce:10.60.0.0/16@160"]


def test_gid_drift_is_seen_at_the_next_read(tmp_path):
    case = recorded_hosts.load("gid_drift_over_time")
    right, networks = [], []
    for one in recorded_hosts.write("gid_drift_over_time", tmp_path).values():
        port = read(one.tree)[case["dev"]]
        right += [gid["index"] for gid in port["gids"] if gid["network"] and gid["type"] == "RoCE v2"]
        networks.append(port["fabrics"])
    assert right == case["expect"]["right_gid_index"]
    assert networks == [["roce:10.70.0.0/24"]] * 2, "the fabric does not move with the index"


def test_bond_over_two_cards(tmp_path):
    case = recorded_hosts.load("fabric_bond_over_two_cards")
    ports = read(recorded_hosts.write("fabric_bond_over_two_cards", tmp_path)["a"].tree)
    assert sorted(hca["netdev"] for hca in case["hcas"]) == sorted(case["bond0_slaves"])
    assert {gid["address"] for port in ports.values() for gid in port["gids"]} == {"10.80.0.1"}
    assert case["expect"]["distinct_addresses"] == 1 and len(ports) == len(case["hcas"])
    for port in ports.values():
        assert not port["usable"]
        assert "bond0 is a bond over HCAs of two or more cards" in port["reasons"][0]


def test_bond_that_the_hardware_carries_is_one_usable_hca(tmp_path):
    tree = hardware_trees.HardwareTree(tmp_path)
    tree.pci("0000:03:00.0", driver="mlx5_core")
    tree.hca("mlx5_bond_0", pci="0000:03:00.0", netdevs=["enp3s0f0np0"], gids=[[3, V4_10_11_0_72, "RoCE v2", "bond0"]])
    tree.interface("enp3s0f0np0", pci="0000:03:00.0", master="bond0")
    tree.interface("bond0", ["10.11.0.72/16"], kind="bond")
    port = read(tree)["mlx5_bond_0"]
    assert port["usable"], port["reasons"]
    assert port["netdevs"] == ["enp3s0f0np0", "bond0"]


def test_bond_of_one_card_that_the_driver_has_not_joined(tmp_path):
    tree = hardware_trees.HardwareTree(tmp_path)
    for function in (0, 1):
        bdf = "0000:03:00.%d" % function
        tree.pci(bdf, driver="mlx5_core")
        tree.hca(
            "mlx5_%d" % function, pci=bdf, netdevs=["ens1f%d" % function], sys_image_guid="66a9:0200:03f3:40cc", gids=[[3, V4_10_11_0_72, "RoCE v2", "bond0"]]
        )
        tree.interface("ens1f%d" % function, pci=bdf, master="bond0")
    tree.interface("bond0", ["10.11.0.72/16"], kind="bond")
    reasons = read(tree)["mlx5_0"]["reasons"]
    assert len(reasons) == 1 and "of one card" in reasons[0]


def test_mixed_infiniband_and_ethernet(tmp_path):
    case = recorded_hosts.load("fabric_mixed_ib_and_ethernet")
    ports = read(recorded_hosts.write("fabric_mixed_ib_and_ethernet", tmp_path)["a"].tree)
    infiniband = [name for name, port in ports.items() if port["usable"] and port["link_layer"] == "infiniband"]
    assert infiniband == case["expect"]["right_hcas"]
    assert {port["fabrics"][0] for port in ports.values() if port["transport"] == "ib"} == {"ib:fe80000000000000"}
    assert ports["mlx5_4"]["transport"] == "roce" and not ports["mlx5_4"]["usable"], "no RoCE v2 address, so it is on no fabric"
    assert (ports["mlx5_0"]["rate_gbps"], ports["mlx5_4"]["rate_gbps"]) == (100, 25)


def test_openable_is_not_listed_in_sysfs(tmp_path):
    case = recorded_hosts.load("fabric_unequal_hca_count")
    hosts = recorded_hosts.write("fabric_unequal_hca_count", tmp_path)
    common = []
    for host in case["hosts"]:
        ports = read(hosts[host["name"]].tree)
        assert [name for name, port in ports.items() if port["usable"]] == host["openable"]
        assert [port["uverbs"] for port in ports.values() if port["uverbs"]] == host["uverbs"]
        common.append({name for name, port in ports.items() if port["usable"]})
        for port in ports.values():
            if not port["usable"]:
                assert "/infiniband/uverbs1 cannot be opened" in port["reasons"][0]
    assert sorted(set.intersection(*common)) == case["expect"]["common"]


def test_two_functions_of_one_card_stay_two(tmp_path):
    case = recorded_hosts.load("topo_gb300_two_pfs_same_guid")
    ports = read(recorded_hosts.write("topo_gb300_two_pfs_same_guid", tmp_path)["a"].tree)
    assert dict(enumerate(ports)) == case["expect"]["rails"]
    assert all(port["usable"] for port in ports.values())
    assert ports["mlx5_0"]["sys_image_guid"] == ports["mlx5_1"]["sys_image_guid"]
    assert ports["mlx5_0"]["node_guid"] != ports["mlx5_1"]["node_guid"]


def test_ring_of_three_has_no_common_fabric(tmp_path):
    case = recorded_hosts.load("spark_three_node_ring")
    hosts = recorded_hosts.write("spark_three_node_ring", tmp_path)
    found = {}
    for host in case["hosts"]:
        ports = read(hosts[host["name"]].tree)
        assert all(port["usable"] for port in ports.values())
        found[host["name"]] = {fabric for port in ports.values() for fabric in port["fabrics"]}
    assert set.intersection(*found.values()) == set(case["expect"]["subnet_common_to_all"])
    for one, other, networks in case["expect"]["links"]:
        assert found[one] & found[other] == {"roce:" + cidr for cidr in networks}


def test_efa(tmp_path):
    case = recorded_hosts.load("hca_efa")
    tree = recorded_hosts.write("hca_efa", tmp_path)["a"].tree
    for port in read(tree).values():
        assert port["transport"] == case["expect"]["transport"]
        assert not port["usable"] and "aws-ofi-nccl" in port["reasons"][0]
        assert port["fabrics"] == []


def test_twelve_devices_keep_their_order(tmp_path):
    tree = recorded_hosts.write("hca_prefix_collision", tmp_path)["a"].tree
    assert list(read(tree)) == recorded_hosts.load("hca_prefix_collision")["devices"]


STRINGS = recorded_hosts.load("hca_sysfs_strings")


@pytest.mark.parametrize(("text", "rate"), STRINGS["rate"])
def test_rates(tmp_path, text, rate):
    assert read(roce_tree(tmp_path, rate=text))["mlx5_0"]["rate_gbps"] == rate


@pytest.mark.parametrize("text", STRINGS["state"])
def test_only_active_is_usable(tmp_path, text):
    port = read(roce_tree(tmp_path, state=text))["mlx5_0"]
    assert port["state"] == text.partition(": ")[2].lower()
    assert port["usable"] is (text == "4: ACTIVE")


@pytest.mark.parametrize(("text", "word"), [("2: Polling", "polling"), ("3: Disabled", "disabled"), ("5: LinkUp", "link_up"), ("9: Odd Thing", "odd_thing")])
def test_phys_states(tmp_path, text, word):
    port = read(roce_tree(tmp_path, phys_state=text))["mlx5_0"]
    assert port["phys_state"] == word
    assert port["usable"] is (word == "link_up")


@pytest.mark.parametrize(
    ("node_type", "layer", "transport"),
    [
        ("1: CA", "InfiniBand", "ib"),
        ("1: CA", "Ethernet", "roce"),
        ("1: CA", "Unknown", "unknown"),
        ("4: RNIC", "Ethernet", "iwarp"),
        ("7: unspecified", "Unknown", "unknown"),
        ("5: usNIC", "Ethernet", "unknown"),
        (None, "Ethernet", "roce"),
        ("2: switch", "InfiniBand", "unknown"),
    ],
)
def test_transports(tmp_path, node_type, layer, transport):
    assert read(roce_tree(tmp_path, node_type=node_type, link_layer=layer))["mlx5_0"]["transport"] == transport
    assert set(STRINGS["link_layer"]) == {"InfiniBand", "Ethernet", "Unknown"}


# ---- odd devices


def test_soft_roce(tmp_path):
    tree = hardware_trees.HardwareTree(tmp_path)
    tree.hca("rxe0", parent="eth0", gids=[[1, V4_10_11_0_72, "RoCE v2", "eth0"]])
    tree.interface("eth0", ["10.11.0.72/16"])
    port = read(tree)["rxe0"]
    assert (port["transport"], port["pci_bdf"], port["netdevs"], port["usable"]) == ("soft_roce", None, ["eth0"], False)
    assert len(port["reasons"]) == 1 and "Soft-RoCE" in port["reasons"][0]


def test_virtual_function(tmp_path):
    tree = hardware_trees.HardwareTree(tmp_path)
    tree.pci("0000:3b:00.0", driver="mlx5_core")
    tree.pci("0000:3b:00.2", driver="mlx5_core", physfn="0000:3b:00.0")
    tree.hca("mlx5_0", pci="0000:3b:00.0")
    tree.hca("mlx5_1", pci="0000:3b:00.2", gids=PLAIN_GIDS, netdevs=["ens1np0"], gid_tbl_len=2048)
    tree.interface("ens1np0", ["10.11.0.72/16"], pci="0000:3b:00.2")
    ports = read(tree)
    assert (ports["mlx5_0"]["is_vf"], ports["mlx5_1"]["is_vf"]) == (False, True)
    assert ports["mlx5_1"]["usable"], ports["mlx5_1"]["reasons"]
    assert "phantom" in ports["mlx5_0"]["reasons"][0], "a function without an interface was chosen and hung (NeMo-platform#922)"


def test_planes_of_a_multi_plane_hca_are_no_devices(tmp_path):
    tree = roce_tree(tmp_path)
    tree.hca("smi1", pci="0000:1b:00.0", link_layer="InfiniBand", uverbs=False, ports={1: {}, 2: {}, 3: {}, 4: {}})
    assert list(read(tree)) == ["mlx5_0"]


def test_device_without_verbs_is_listed_when_nothing_stands_for_it(tmp_path):
    port = read(roce_tree(tmp_path, uverbs=False))["mlx5_0"]
    assert not port["usable"] and "ib_uverbs" in port["reasons"][0]


def test_two_ports_of_one_function(tmp_path):
    tree = hardware_trees.HardwareTree(tmp_path)
    tree.pci("0000:05:00.0", driver="mlx4_core")
    other = "0000:0000:0000:0000:0000:ffff:0a0c:0048"
    tree.hca("mlx4_0", pci="0000:05:00.0", ports={1: {"gids": [[3, V4_10_11_0_72, "RoCE v2", "ens1"]]}, 2: {"gids": [[3, other, "RoCE v2", "ens1d1"]]}})
    for number, (name, cidr) in enumerate((("ens1", "10.11.0.72/16"), ("ens1d1", "10.12.0.72/16"))):
        tree.interface(name, [cidr], pci="0000:05:00.0")
        hardware_trees.write(tree.sysfs / "class/net" / name / "dev_port", number)
    tree.write_network_state([])
    interfaces = network.read(str(tree.sysfs), str(tree.network_state))["interfaces"]
    ports = hcas.read(str(tree.sysfs), str(tree.dev), interfaces)
    assert [(port["name"], port["port"], port["netdevs"], port["fabrics"]) for port in ports] == [
        ("mlx4_0", 1, ["ens1"], ["roce:10.11.0.0/16"]),
        ("mlx4_0", 2, ["ens1d1"], ["roce:10.12.0.0/16"]),
    ]


def test_unknown_prefix_length_is_not_guessed(tmp_path):
    tree = hardware_trees.HardwareTree(tmp_path)
    tree.hca("mlx5_0", gids=PLAIN_GIDS, netdevs=["ens1np0"])
    tree.interface("ens1np0", [])
    port = read(tree)["mlx5_0"]
    assert [gid["network"] for gid in port["gids"]] == [None] * 4
    assert "10.11.0.72" in port["errors"]["gids/3/network"]
    assert port["fabrics"] == [] and not port["usable"]
    assert "not known" in port["reasons"][0]


def test_global_ipv6(tmp_path):
    tree = hardware_trees.HardwareTree(tmp_path)
    tree.hca("bnxt_re0", netdevs=["eth0"], gids=[[0, LINK_LOCAL, "RoCE v2", "eth0"], [2, "2001:0db8:0000:0005:0000:0000:0000:0007", "RoCE v2", "eth0"]])
    tree.interface("eth0", ["2001:db8:0:5::7/64", "fe80::a00:27ff:fe00:1/64"])
    port = read(tree)["bnxt_re0"]
    assert port["fabrics"] == ["roce:2001:db8:0:5::/64"]
    assert port["usable"], port["reasons"]


def test_the_interface_that_the_gid_names_tells_the_prefix_length(tmp_path):
    """One address on two interfaces: a /32 of a routing daemon elsewhere must not win."""
    tree = hardware_trees.HardwareTree(tmp_path)
    tree.hca("mlx5_0", gids=PLAIN_GIDS, netdevs=["ens1np0"])
    tree.interface("dummy0", ["10.11.0.72/32"], kind="dummy")
    tree.interface("ens1np0", ["10.11.0.72/16"])
    assert read(tree)["mlx5_0"]["fabrics"] == ["roce:10.11.0.0/16"]


def test_a_device_node_that_exists_and_cannot_be_opened(tmp_path):
    tree = roce_tree(tmp_path)
    node = tree.dev / "infiniband" / "uverbs0"
    node.unlink()
    try:
        os.mknod(node, 0o600 | stat.S_IFCHR, os.makedev(231, 250))  # a number that no driver has taken
    except PermissionError:
        node.touch(mode=0o000)
    port = read(tree)["mlx5_0"]
    assert port["uverbs"] is None and not port["usable"]
    assert "%s cannot be opened" % node in port["reasons"][0]


def test_only_link_local_or_only_v1_is_not_usable(tmp_path):
    gids = [
        [0, LINK_LOCAL, "RoCE v2", "ens1np0"],
        [1, "0000:0000:0000:0000:0000:ffff:a9fe:0a01", "RoCE v2", "ens1np0"],
        [2, V4_10_11_0_72, "IB/RoCE v1", "ens1np0"],
    ]
    port = read(roce_tree(tmp_path, gids=gids))["mlx5_0"]
    assert port["fabrics"] == [] and "no RoCE v2 GID" in port["reasons"][0]


def test_interface_that_is_down(tmp_path):
    tree = hardware_trees.HardwareTree(tmp_path)
    tree.hca("mlx5_0", gids=PLAIN_GIDS, netdevs=["ens1np0"])
    tree.interface("ens1np0", ["10.11.0.72/16"], up=False)
    assert "ens1np0 is down" in read(tree)["mlx5_0"]["reasons"][0]


def test_interface_of_another_namespace(tmp_path):
    tree = hardware_trees.HardwareTree(tmp_path)
    tree.hca("mlx5_0", gids=PLAIN_GIDS, netdevs=["ens1np0"])
    assert "not visible here" in read(tree)["mlx5_0"]["reasons"][0]


def test_no_rdma_at_all(tmp_path):
    assert hcas.read(str(tmp_path / "sys"), str(tmp_path / "dev"), []) == []


@pytest.mark.parametrize("missing", ["state", "phys_state", "rate", "lid", "sm_lid", "link_layer"])
def test_missing_file_is_a_reason_not_a_guess(tmp_path, missing):
    port = read(roce_tree(tmp_path, **{missing: None}))["mlx5_0"]
    key = {"rate": "rate_gbps"}.get(missing, missing)
    assert port[key] in (None, "unknown")
    assert "cannot be read" in port["errors"][key]


# ---- damage

CONTENT = st.one_of(
    st.binary(max_size=80), st.sampled_from([b"", b"\x00" * 40, b"4:", b": ACTIVE", b"\xff\xfe", b"9" * 70, b"0x", b"-1\n", b"4: \x1b[31mACTIVE\n"])
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_trees_give_reasons_not_tracebacks(tmp_path_factory, data):
    """Any files of a healthy host truncated, overwritten, removed, or turned into directories or dangling links."""
    root = tmp_path_factory.mktemp("damaged")
    try:
        tree = roce_tree(root)
        tree.write_network_state([])
        files = sorted(path for path in root.rglob("*") if path.is_symlink() or path.is_file())
        for path in data.draw(st.lists(st.sampled_from(files), min_size=1, max_size=6, unique=True)):
            damage(path, data.draw(st.sampled_from(["write", "truncate", "remove", "directory", "dangling"])), data.draw(CONTENT))
        state = network.read(str(tree.sysfs), str(tree.network_state))
        for port in hcas.read(str(tree.sysfs), str(tree.dev), state["interfaces"]):
            assert port["usable"] is (not port["reasons"])
            for value in (port["state"], port["driver"], *port["reasons"], *port["errors"].values()):
                assert value is None or value.isprintable()
    finally:
        shutil.rmtree(root)


def damage(path: pathlib.Path, how: str, content: bytes) -> None:
    if how in ("write", "truncate"):
        if path.is_file():
            path.write_bytes(content if how == "write" else path.read_bytes()[: len(content)])
        return
    path.unlink()
    if how == "directory":
        path.mkdir()
    elif how == "dangling":
        os.symlink("nowhere", path)
