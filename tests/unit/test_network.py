# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Interfaces and routes: from this machine's kernel, compared with what `ip` prints, from recorded hosts, and from damaged input."""

from __future__ import annotations

import json
import pathlib
import shutil
import socket
import struct
import subprocess
import time

import hardware_trees
import pytest
import recorded_hosts
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.rankzero.inference.plugins.module_utils import network


def read(tree: hardware_trees.HardwareTree, resolved: list[str] | None = None) -> dict:
    tree.write_network_state([] if resolved is None else resolved)
    return network.read(str(tree.sysfs), str(tree.network_state))


# ---- the real kernel


def ip(*arguments: str) -> list:
    return json.loads(subprocess.run(["ip", "-j", *arguments], check=True, capture_output=True, text=True).stdout or "[]")


@pytest.mark.skipif(shutil.which("ip") is None, reason="needs iproute2 to compare with")
def test_netlink_agrees_with_iproute2():
    """Both ways into the neutral form give the same host."""
    state = {"links": ip("-d", "link"), "addresses": ip("addr"), "routes": ip("route") + ip("-6", "route")}
    links, addresses, routes = network.from_ip_json(state)
    kernel_links, kernel_addresses, kernel_routes = network.from_kernel()
    assert kernel_links == links
    assert kernel_addresses == {name: found for name, found in addresses.items() if found}

    def key(route: dict) -> tuple:
        return route["destination"], route["interface"], str(route["gateway"])

    assert sorted(kernel_routes, key=key) == sorted(routes, key=key)


@pytest.mark.skipif(shutil.which("ip") is None or shutil.which("unshare") is None, reason="needs iproute2 and unshare")
def test_netlink_of_bonds_vlans_and_multipath_routes(tmp_path):
    """A network namespace of our own with one interface of each kind that this kernel makes, read there by both ways."""
    script = """
set -e
ip link set lo up
ip link add veth0 type veth peer name veth1 || exit 77
ip link add br0 type bridge || true
ip link add link veth0 name veth0.160 type vlan id 160 || true
ip link add bond0 type bond || true
ip link set veth1 master br0 || true
ip addr add 127.60.0.5/24 dev veth0
ip addr add 2001:db8:60::5/64 dev veth0 nodad
ip link set veth0 up; ip link set veth1 up
ip link set veth0.160 mtu 1400 up || true
ip route add 127.61.0.0/24 via 127.60.0.1 metric 50 || true
ip route add 127.62.0.0/24 nexthop via 127.60.0.1 nexthop via 127.60.0.2 || true
ip route add default via 127.60.0.1 metric 7 || true
ip route add unreachable 127.63.0.0/24 || true
ip -6 route add unreachable 2001:db8:63::/48 || true
ip route add 127.64.0.0/24 via 127.60.0.1 table 100 || true
exec "$@"
"""
    program = """
import json, subprocess, sys
sys.path.insert(0, sys.argv[1])
from ansible_collections.rankzero.inference.plugins.module_utils import network
ip = lambda *a: json.loads(subprocess.run(["ip", "-j", *a], check=True, capture_output=True, text=True).stdout or "[]")
state = {"links": ip("-d", "link"), "addresses": ip("addr"), "routes": ip("route") + ip("-6", "route")}
print(json.dumps([network.from_kernel(), network.from_ip_json(state), network.read("/sys")]))
"""
    import sys

    collections = str(pathlib.Path(network.__file__).parents[5])
    done = subprocess.run(["unshare", "-n", "sh", "-c", script, "sh", sys.executable, "-c", program, collections], capture_output=True, text=True, check=False)
    if done.returncode == 77 or "Operation not permitted" in done.stderr and done.returncode:
        pytest.skip("no network namespaces here: " + done.stderr[-200:])
    assert done.returncode == 0, done.stderr
    (links, addresses, routes), (json_links, json_addresses, json_routes), facts = json.loads(done.stdout)
    assert links == json_links
    assert addresses == {name: found for name, found in json_addresses.items() if found}

    def key(route: dict) -> tuple:
        return route["destination"], route["interface"], str(route["gateway"]), route["metric"]

    assert sorted(routes, key=key) == sorted(json_routes, key=key)
    kinds = {interface["name"]: interface["kind"] for interface in facts["interfaces"]}
    vlans = {interface["name"]: interface["vlan"] for interface in facts["interfaces"] if interface["vlan"]}
    assert kinds["lo"] == "loopback" and kinds["veth0"] == "veth"
    if "veth0.160" in kinds:
        assert (kinds["veth0.160"], vlans) == ("vlan", {"veth0.160": 160})
    if "br0" in kinds:
        assert kinds["br0"] == "bridge"
        assert next(interface["master"] for interface in facts["interfaces"] if interface["name"] == "veth1") == "br0"
    assert "2001:db8:60::5/64" in addresses["veth0"]
    assert not {"127.63.0.0/24", "2001:db8:63::/48"} & {route["destination"] for route in routes}, "unreachable is no way to go"
    assert "127.64.0.0/24" not in [route["destination"] for route in routes], "another table is for other packets"
    if any(route["destination"] == "127.62.0.0/24" for route in routes):
        assert [route["gateway"] for route in routes if route["destination"] == "127.62.0.0/24"] == ["127.60.0.1", "127.60.0.2"]
        assert facts["default_route"] == {"interface": "veth0", "gateway": "127.60.0.1"}


def test_this_machine():
    facts = network.read("/sys")
    assert facts["errors"].get("network") is None
    loopback = next(interface for interface in facts["interfaces"] if interface["name"] == "lo")
    assert loopback["kind"] == "loopback" and loopback["up"] and "127.0.0.1/8" in loopback["addresses"]
    for interface in facts["interfaces"]:
        assert set(interface) == {"name", "kind", "up", "carrier", "mtu", "mac", "addresses", "vlan", "master", "speed_mbps", "is_vf", "pci_bdf"}


# ---- recorded cases


def test_hostname_that_resolves_to_loopback(tmp_path):
    case = recorded_hosts.load("iface_hostname_loopback")
    tree = recorded_hosts.write("iface_hostname_loopback", tmp_path)[case["hostname"]].tree
    facts = read(tree, [case["etc_hosts"][case["hostname"]]])
    assert facts["hostname_resolves_to"] == ["127.0.0.1"]
    holders = [interface["name"] for interface in facts["interfaces"] if case["expect"]["host_ip"] + "/24" in interface["addresses"]]
    assert holders == [case["expect"]["gloo"]]
    assert [route["interface"] for route in facts["routes"] if route["destination"] == "10.20.0.0/24"] == list(case["route_get"].values())


def test_virtual_functions_without_address(tmp_path):
    case = recorded_hosts.load("iface_sriov_vfs_without_address")
    tree = recorded_hosts.write("iface_sriov_vfs_without_address", tmp_path)["host"].tree
    facts = read(tree)
    found = {interface["name"]: interface for interface in facts["interfaces"]}
    assert facts["default_route"] == {"interface": case["expect"]["management"], "gateway": "10.40.0.88"}
    assert [name for name, interface in found.items() if interface["is_vf"]] == ["enp90s0v0", "enp90s0v7"]
    assert [name for name, interface in found.items() if interface["addresses"]] == ["enp90s0np0", "cilium_host"]
    assert (found["enp90s0np0"]["kind"], found["ibs0"]["kind"], found["cilium_host"]["kind"]) == ("physical", "ipoib", "veth")
    assert found["enp90s0np0"]["pci_bdf"] == "0000:5a:00.0"


def test_link_local_and_ipoib(tmp_path):
    case = recorded_hosts.load("iface_linklocal_and_ipoib")
    tree = recorded_hosts.write("iface_linklocal_and_ipoib", tmp_path)["host"].tree
    facts = read(tree)
    assert facts["default_route"]["interface"] == case["expect"]["management"]
    found = {interface["name"]: interface for interface in facts["interfaces"]}
    assert found[case["expect"]["nccl_default_choice"]]["kind"] == "ipoib"
    assert (found["enp51s0f0"]["up"], found["enp51s0f0"]["carrier"]) == (False, None)
    assert found["docker0"]["kind"] == "bridge"


def test_vlans_and_bond_by_what_the_kernel_says_not_by_name(tmp_path):
    tree = recorded_hosts.write("iface_vlan_prefix", tmp_path)["host"].tree
    found = {interface["name"]: interface for interface in read(tree)["interfaces"]}
    assert {name: (interface["kind"], interface["vlan"]) for name, interface in found.items()} == {
        "bond0": ("bond", None),
        "bond0.2093": ("vlan", 2093),
        "bond0.2093.1": ("vlan", 1),
        "eth0": ("virtual", None),
    }
    assert found["eth0"]["master"] == "bond0"


# ---- rules


@pytest.mark.parametrize(("text", "speed"), [("400000", 400000), ("-1", None), ("4294967295", None), ("0", None), ("", None)])
def test_speed(tmp_path, text, speed):
    tree = hardware_trees.HardwareTree(tmp_path)
    tree.interface("eth0", speed=text)  # type: ignore[arg-type]
    assert read(tree)["interfaces"][0]["speed_mbps"] == speed


def test_addresses_that_are_not_usable_are_left_out():
    infos = [
        {"local": "2001:db8::1", "prefixlen": 64, "dadfailed": True},
        {"local": "2001:db8::2", "prefixlen": 64, "tentative": True},
        {"local": "10.0.0.1", "prefixlen": 24},
        {"local": "10.0.0.1", "prefixlen": 240},
        {"local": "x", "prefixlen": 8},
        {"local": "10.0.0.3"},
        {},
    ]
    assert network.from_ip_json({"addresses": [{"ifname": "eth0", "addr_info": infos}]})[1] == {"eth0": ["10.0.0.1/24"]}


def test_default_route_has_the_lowest_metric_and_prefers_ipv4():
    routes = network.from_ip_json(
        {
            "routes": [
                {"dst": "default", "gateway": "fe80::1", "dev": "eth9", "metric": 1, "pref": "medium"},
                {"dst": "default", "gateway": "10.0.0.1", "dev": "eth0", "metric": 100},
                {"dst": "default", "gateway": "10.1.0.1", "dev": "eth1", "metric": 50},
            ]
        }
    )[2]
    assert network.default_route(routes) == {"interface": "eth1", "gateway": "10.1.0.1"}
    assert network.default_route(routes[:1]) == {"interface": "eth9", "gateway": "fe80::1"}
    assert network.default_route([]) is None


def test_routes_of_every_form():
    routes = network.from_ip_json(
        {
            "routes": [
                {"dst": "10.1.0.0/16", "dev": "eth0"},
                {"dst": "10.2.0.7", "dev": "eth0", "via": {"family": "inet6", "host": "fe80::1"}},
                {"type": "unreachable", "dst": "10.3.0.0/16", "dev": "lo"},
                {"dst": "default", "dev": "tun0", "pref": "medium"},
                {"dst": "10.4.0.0/16", "nexthops": [{"gateway": "10.0.0.1", "dev": "eth0"}, {"gateway": "10.0.0.2", "dev": "eth1"}]},
                {"dst": "nonsense", "dev": "eth0"},
            ]
        }
    )[2]
    assert [(route["destination"], route["gateway"], route["interface"]) for route in routes] == [
        ("10.1.0.0/16", None, "eth0"),
        ("10.2.0.7/32", "fe80::1", "eth0"),
        ("::/0", None, "tun0"),
        ("10.4.0.0/16", "10.0.0.1", "eth0"),
        ("10.4.0.0/16", "10.0.0.2", "eth1"),
    ]


def test_too_many_routes_are_counted(tmp_path):
    tree = hardware_trees.HardwareTree(tmp_path)
    for number in range(network.MOST_ROUTES + 5):
        tree.route("10.%d.%d.0/24" % divmod(number, 256), "eth0")
    facts = read(tree)
    assert len(facts["routes"]) == network.MOST_ROUTES
    assert facts["errors"]["routes"] == "1000 of 1005 routes are listed"


@pytest.mark.parametrize("content", [None, b"", b"[]", b"{", b"\xff\xfe", b"[" * 100000])
def test_recorded_state_that_is_none(tmp_path, content):
    path = tmp_path / "state.json"
    if content is not None:
        path.write_bytes(content)
    facts = network.read(str(tmp_path), str(path))
    assert facts["interfaces"] == [] and str(path) in facts["errors"]["network"]


def test_resolving_is_given_up():
    began = time.monotonic()
    addresses, problem = network.resolve("node-a", 0.1, lambda *_arguments: time.sleep(1))
    assert time.monotonic() - began < 0.8
    assert addresses == [] and "more than 0.1 seconds" in problem


def test_resolving_a_name_that_is_unknown():
    def unknown(*_arguments: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    assert network.resolve("node-a", 5, unknown) == ([], "the hostname node-a does not resolve: Name or service not known")


# ---- damage

NAMES = [
    "links",
    "addresses",
    "routes",
    "ifname",
    "flags",
    "mtu",
    "link_type",
    "linkinfo",
    "info_kind",
    "info_data",
    "id",
    "addr_info",
    "local",
    "prefixlen",
    "dst",
    "dev",
    "gateway",
    "via",
    "nexthops",
    "metric",
    "type",
    "host",
    "master",
]
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.sampled_from(["default", "10.0.0.0/8", "eth0", "vlan"]))
JSON = st.recursive(SCALARS, lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(NAMES), inner, max_size=6)), max_leaves=30)


@settings(max_examples=200, deadline=None)
@given(links=JSON, addresses=JSON, routes=JSON)
def test_any_json_is_read(links, addresses, routes):
    found = network.from_ip_json({"links": links, "addresses": addresses, "routes": routes})
    json.dumps(found)


def attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def test_messages_of_a_vlan_on_a_bond_with_a_pci_parent():
    """Built by hand after linux/if_link.h: not every kernel that runs the tests has these kinds."""
    info = attribute(1, b"vlan\0") + attribute(0x8000 | 2, attribute(1, struct.pack("=H", 160)) + attribute(5, struct.pack(">H", 0x8100)))
    body = struct.pack("=BxHiII", 0, 1, 7, 0x1 | 0x10000, 0) + b"".join(
        [
            attribute(3, b"bond0.160\0"),
            attribute(1, bytes.fromhex("525400000005")),
            attribute(4, struct.pack("=I", 9000)),
            attribute(10, struct.pack("=I", 9)),
            attribute(0x8000 | 18, info),
            attribute(56, b"0000:1b:00.0\0"),
            attribute(57, b"pci\0"),
        ]
    )
    assert network.parse_links([(network.RTM_NEWLINK, body), (3, body)]) == [
        (
            7,
            {
                "name": "bond0.160",
                "up": True,
                "carrier": True,
                "mtu": 9000,
                "mac": "52:54:00:00:00:05",
                "link_type": "ether",
                "info_kind": "vlan",
                "vlan": 160,
                "master": 9,
                "parent": "0000:1b:00.0",
            },
        )
    ]


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=200))
def test_any_bytes_from_netlink_are_read(data):
    messages = list(network.split_messages(data))
    assert len(messages) <= len(data) // 16 + 1
    for kind in (network.RTM_NEWLINK, network.RTM_NEWADDR, network.RTM_NEWROUTE):
        network.parse_links([(kind, data)])
        network.parse_addresses([(kind, data)])
        network.parse_routes([(kind, data)])
    header = struct.pack("=BBBBI", socket.AF_INET, 24, 0, 0, 1)
    network.parse_addresses([(network.RTM_NEWADDR, header + data)])
    network.parse_routes([(network.RTM_NEWROUTE, struct.pack("=BBBBBBBBI", socket.AF_INET, 24, 0, 0, 254, 0, 0, 1, 0) + data)])
    network.parse_links([(network.RTM_NEWLINK, bytes(16) + data)])
