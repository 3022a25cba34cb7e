# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Variables as NCCL reads them, and what is said about those of a profile and of a host's nccl.conf."""

from __future__ import annotations

import ipaddress
from typing import Any

import nccl_model
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.rankzero.inference.plugins.plugin_utils import environment_names, nccl
from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Findings

INTERFACES = (
    {"name": "lo", "up": True, "carrier": True, "addresses": ["127.0.0.1/8", "::1/128"]},
    {"name": "eth0", "up": True, "carrier": True, "addresses": ["10.0.0.1/24"]},
    {"name": "eth01", "up": True, "carrier": True, "addresses": ["10.0.1.1/24"]},
    {"name": "eth2", "up": True, "carrier": False, "addresses": ["10.0.2.1/24"]},
    {"name": "v6", "up": True, "carrier": True, "addresses": ["2001:db8::1/64"]},
)
PLANNED = {
    "NCCL_IB_DISABLE": "0",
    "NCCL_IB_HCA": "=mlx5_1:1",
    "NCCL_IB_GID_INDEX": "3",
    "NCCL_NET": "IB",
    "NCCL_SOCKET_IFNAME": "=eth0",
    "GLOO_SOCKET_IFNAME": "eth0",
    "TP_SOCKET_IFNAME": "eth0",
}


def port(name: str, layer: str = "ethernet", **more: Any) -> dict[str, Any]:
    entries = [(0, "fe80::1", 1), (1, "fe80::1", 2), (2, "10.11.0.1", 1), (3, "10.11.0.1", 2), (4, "10.99.0.1", 2)]
    return {
        "name": name,
        "port": 1,
        "link_layer": layer,
        "state": "active",
        "usable": True,
        "gids": [{"index": index, "address": address, "type": "RoCE v2" if version == 2 else "IB/RoCE v1"} for index, address, version in entries],
        **more,
    }


def rank(**more: Any) -> nccl.Rank:
    ports = (port("mlx5_1"), port("mlx5_10"), port("mlx5_11", state="down"), port("ibp0", "infiniband"))
    given_ = {
        "ports": ports[:1],
        "all_ports": ports,
        "right_gids": {"mlx5_1:1": frozenset({3})},
        "interfaces": INTERFACES,
        "interface": "eth0",
        "address": "10.0.0.1",
        "home": "/var/lib/rankzero/glm",
        "nodes": 2,
        **more,
    }
    return nccl.Rank("a", 0, **given_)


def judged(profile: dict[str, str] | None = None, generated: dict[str, str] | None = None, **more: Any) -> Findings:
    findings = Findings()
    nccl.check(PLANNED if generated is None else generated, profile or {}, rank(**more), findings)
    return findings


def faults(*arguments: Any, **more: Any) -> str:
    return "\n".join(fault.text() for fault in judged(*arguments, **more).faults)


def warnings(*arguments: Any, **more: Any) -> str:
    findings = judged(*arguments, **more)
    assert not findings.faults, findings.faults
    return "\n".join(warning.text() for warning in findings.warnings)


def test_what_the_plan_generates_is_in_order():
    findings = judged()
    assert not findings.faults and not findings.warnings


# ---- names


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("NCCL_IB_GID_INDX", "NCCL_IB_GID_INDEX"),
        ("NCCL_IB_TIMOUT", "NCCL_IB_TIMEOUT"),
        ("NCCL_SOCKET_IFNAMES", "NCCL_SOCKET_IFNAME"),
        ("NCCL_P2P_DISABEL", "NCCL_P2P_DISABLE"),
        ("NCCL_IB_HCAS", "NCCL_IB_HCA"),
        ("NCCL_NVLS_ENABEL", "NCCL_NVLS_ENABLE"),
    ],
)
def test_a_typo_is_told(name, meant):
    assert f"Did you mean {meant}?" in warnings({name: "1"})


@pytest.mark.parametrize(
    "name",
    [
        "NCCL_IB_ADDR_RANGE",
        "NCCL_IB_SUBNET_AWARE_ROUTING",
        "NCCL_NETDEVS_POLICY",
        "NCCL_IB_PKEY_VALUE",
        "NCCL_OFI_RDMA_MIN_POSTED_BOUNCE_BUFFERS",
        "NCCL_IB_RESILIENCY_PORT_FAILOVER",
        "NCCL_MULTI_RANK_GPU_ENABLE",
        "NCCL_RAS_ADDR",
        "NCCL_NET_GDR_C2C",
        "NCCL_CTA_POLICY",
    ],
)
def test_names_of_nccl_are_known(name):
    assert nccl.is_known(name)


def test_every_name_with_a_rule_is_known():
    assert set(nccl._VALUE_RULES) <= nccl.NAMES
    assert not {name for name in nccl._OBSOLETE.values() if name.startswith("NCCL_")} - nccl.NAMES


def test_old_names_of_torch():
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" in warnings({"NCCL_ASYNC_ERROR_HANDLING": "1"})


def test_names_that_are_refused_are_not_judged():
    assert environment_names.refusal("NCCL_TOPO_FILE")
    assert warnings({"NCCL_TOPO_FILE": "/x", "LD_PRELOAD": "x"}) == ""


# ---- values


@pytest.mark.parametrize(("value", "read_as"), [("auto", 0), ("none", 0), ("3,4", 3), ("010", 8), ("0x3", 3), (" 3", 3), ("3 ", 3), ("+3", 3), ("-", 0)])
def test_an_index_that_is_no_plain_number(value, read_as):
    assert f"NCCL reads this as {read_as}" in faults({"NCCL_IB_GID_INDEX": value})
    assert nccl.number(value) == nccl_model.integer(value, -1) == read_as


@pytest.mark.parametrize(
    ("profile", "text"),
    [
        ({"NCCL_IB_GID_INDEX": "4"}, "NCCL would use index 4 (RoCE v2, 10.99.0.1)"),
        ({"NCCL_IB_GID_INDEX": "1"}, "index 1 (RoCE v2, fe80::1)"),
        ({"NCCL_IB_GID_INDEX": "9"}, "index 9 (empty, no address)"),
        ({"NCCL_IB_GID_INDEX": "-2"}, "-1 for NCCL's own choice"),
        ({"NCCL_IB_GID_INDEX": "-1", "NCCL_IB_ADDR_RANGE": "10.99.0.0/16"}, "NCCL would use index 4"),
        ({"NCCL_IB_GID_INDEX": "-1", "NCCL_IB_ADDR_FAMILY": "AF_INET6"}, "NCCL would use index 0"),
        ({"NCCL_IB_GID_INDEX": "-1", "NCCL_IB_ROCE_VERSION_NUM": "1"}, "NCCL would use index 2"),
        ({"NCCL_IB_ADDR_RANGE": "10.11.0.0"}, "ignores a range without /"),
        ({"NCCL_IB_ADDR_RANGE": "2001:db8::/64"}, "of the other family"),
        ({"NCCL_IB_ADDR_RANGE": "10.11.0.0/16,10.12.0.0/16"}, "reads this as 10.11.0.0/16"),
        ({"NCCL_IB_ADDR_RANGE": "10.11.0.0/33"}, "ignores a range"),
        ({"NCCL_IB_ADDR_FAMILY": "IPv6"}, "AF_INET or AF_INET6"),
        ({"NCCL_SOCKET_FAMILY": "4"}, "AF_INET or AF_INET6"),
        ({"NCCL_IB_TIMEOUT": "32"}, "infinite"),
        ({"NCCL_IB_TIMEOUT": "0"}, "infinite"),
        ({"NCCL_IB_TIMEOUT": "40"}, "infinite"),
        ({"NCCL_IB_RETRY_CNT": "8"}, "0 to 7"),
        ({"NCCL_IB_DISABLE": "true"}, "NCCL reads this as 0"),
        ({"NCCL_IB_DISABLE": "1"}, "NCCL_NET=IB is in force"),
        ({"NCCL_P2P_DISABLE": "yes"}, "reads this as 0"),
        ({"NCCL_MNNVL_ENABLE": "1"}, "a proven NVLink domain"),
        ({"NCCL_IB_HCA": "mlx5_1"}, "selects mlx5_1:1, mlx5_10:1"),
        ({"NCCL_IB_HCA": "mlx5_1:1"}, "selects mlx5_1:1, mlx5_10:1"),
        ({"NCCL_IB_HCA": "=mlx5_7"}, "It selects none"),
        ({"NCCL_IB_HCA": "=mlx5_11"}, "It selects none"),
        ({"NCCL_IB_HCA": "=mlx5_1,=mlx5_10", "NCCL_IB_DISABLE": "0"}, ""),
        ({"NCCL_IB_HCA": "^mlx5_10"}, "mixes them"),
        ({"NCCL_IB_HCA": ""}, "mixes them"),
        ({"NCCL_IB_HCA": "=mlx5_1_dma"}, "It selects none"),
        ({"NCCL_SOCKET_IFNAME": "eth0"}, "selects eth0, eth01"),
        ({"NCCL_SOCKET_IFNAME": "=eth2"}, "It selects none"),
        ({"NCCL_SOCKET_IFNAME": "=ens9"}, "nccl#1837"),
        ({"NCCL_SOCKET_IFNAME": "="}, "fewer than two"),
        ({"NCCL_SOCKET_IFNAME": "=eth0", "NCCL_SOCKET_FAMILY": "AF_INET6"}, "It selects none"),
        ({"GLOO_SOCKET_IFNAME": "=eth0"}, "exact name"),
        ({"GLOO_SOCKET_IFNAME": "^lo,docker"}, "exact name"),
        ({"GLOO_SOCKET_IFNAME": "eth"}, "exact name"),
        ({"TP_SOCKET_IFNAME": "eth9"}, "loopback"),
    ],
)
def test_values_that_are_refused(profile, text):
    found = faults(profile)
    assert (text in found) if text else not found
    assert not found or all(line.startswith("a rank 0: ") for line in found.splitlines())


@pytest.mark.parametrize(
    ("profile", "text"),
    [
        ({"NCCL_IB_TIMEOUT": "27"}, "73 minutes"),
        ({"NCCL_IB_ADDR_RANGE": "10.11.0.0/16"}, "NCCL_IB_GID_INDEX=-1 beside it"),
        ({"NCCL_P2P_DISABLE": "1"}, "made for debugging"),
        ({"NCCL_P2P_LEVEL": "LOC"}, "made for debugging"),
        ({"NCCL_CUMEM_ENABLE": "0"}, "NVLS"),
        ({"NCCL_SHM_DISABLE": "1"}, "debugging"),
        ({"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, "Two ranks on one GPU"),
        ({"NCCL_SOCKET_IFNAME": "eth"}, "selects eth0, eth01"),
        ({"NCCL_SOCKET_IFNAME": "^lo,v6"}, "selects eth0, eth01"),
        ({"NCCL_IB_HCA": "=mlx5_10"}, "The plan has proven nothing"),
        ({"NCCL_IB_HCA": "=mlx5_1,mlx5_10"}, "which selects mlx5_1:1, mlx5_10:1"),
    ],
)
def test_values_that_are_said(profile, text):
    assert text in warnings(profile)


@pytest.mark.parametrize(
    "profile",
    [
        {"NCCL_IB_TIMEOUT": "22"},
        {"NCCL_IB_TIMEOUT": "23"},
        {"NCCL_DEBUG": "INFO"},
        {"NCCL_IB_TC": "106"},
        {"NCCL_NVLS_ENABLE": "0"},
        {"NCCL_P2P_LEVEL": "SYS"},
        {"NCCL_P2P_DISABLE": "0"},
        {"NCCL_IB_GID_INDEX": "3"},
        {"NCCL_IB_GID_INDEX": "-1", "NCCL_IB_ADDR_RANGE": "10.11.0.0/16"},
        {"NCCL_IB_HCA": "=mlx5_1"},
        {"NCCL_ALGO": "Ring"},
        {"NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"},
        {"NCCL_SOCKET_IFNAME": "=eth01"},
        {"GLOO_SOCKET_IFNAME": "eth0"},
        {"NCCL_IB_GID_INDEX": ""},
    ],
)
def test_values_that_are_in_order(profile):
    assert warnings(profile) == ""


def test_infiniband_ignores_the_index():
    ports = (port("ibp0", "infiniband"),)
    assert "ignores it on InfiniBand" in warnings({"NCCL_IB_GID_INDEX": "3"}, ports=ports, all_ports=ports, right_gids={})


@pytest.mark.parametrize(
    "profile", [{"NCCL_CUMEM_ENABLE": "0"}, {"NCCL_P2P_DISABLE": "1"}, {"NCCL_P2P_LEVEL": "LOC"}, {"NCCL_P2P_LEVEL": "0"}, {"NCCL_MNNVL_ENABLE": "0"}]
)
def test_what_takes_an_nvlink_domain_away(profile):
    assert "NVLink domain" in faults(profile, nvlink=True, proven=True)
    assert not faults(profile)


def test_without_facts_nothing_is_claimed():
    assert warnings({"NCCL_IB_HCA": "mlx5", "NCCL_SOCKET_IFNAME": "eth", "GLOO_SOCKET_IFNAME": "x"}, interfaces=(), all_ports=(), ports=(), right_gids={}) == ""


def test_the_first_address_of_the_interface_is_the_one_that_is_used():
    interfaces = ({"name": "eth0", "up": True, "carrier": True, "addresses": ["169.254.3.1/16", "10.0.0.1/24"]},)
    assert "169.254.3.1 before 10.0.0.1" in warnings(interfaces=interfaces)
    assert warnings(interfaces=interfaces, nodes=1) == ""


def test_efa_without_a_pinned_network():
    efa = {"name": "rdmap85s0", "port": 1, "link_layer": "unknown", "transport": "efa"}
    assert "falls back to TCP in silence" in warnings({}, {}, ports=(efa,), right_gids={})
    assert "falls back" not in warnings({"NCCL_NET": "AWS Libfabric"}, {}, ports=(efa,), right_gids={})


# ---- nccl.conf

CONF, OWN = "/etc/nccl.conf", "/var/lib/rankzero/glm/.nccl.conf"


def test_what_contradicts_the_plan_is_said():
    text = warnings(conf={CONF: {"NCCL_IB_HCA": "mlx5", "NCCL_NET": "IB"}})
    assert "NCCL_IB_HCA=mlx5 in /etc/nccl.conf, wanted NCCL_IB_HCA==mlx5_1:1, as the plan sets it. The environment wins" in text and "NCCL_NET" not in text
    assert "as the profile sets it" in warnings({"NCCL_IB_TIMEOUT": "22"}, conf={CONF: {"NCCL_IB_TIMEOUT": "23"}})


@pytest.mark.parametrize("name", ["NCCL_IB_TC", "NCCL_P2P_LEVEL", "NCCL_CROSS_NIC", "NCCL_ALGO", "NCCL_NVLS_ENABLE", "NCCL_IB_TIMEOUT", "NCCL_CUMEM_ENABLE"])
def test_what_the_plan_does_not_set_takes_effect(name):
    text = warnings(conf={CONF: {name: "1"}})
    assert f"{name}=1 in /etc/nccl.conf" in text and "takes effect on this host alone" in text


def test_other_lines_of_nccl_conf():
    assert warnings(conf={CONF: {"NCCL_DEBUG": "WARN", "NCCL_DEBUG_SUBSYS": "NET"}}) == ""
    assert "every variable of this file" in warnings(conf={CONF: {"OMP_NUM_THREADS": "4"}})
    assert "makes the loader" in warnings(conf={CONF: {"LD_PRELOAD": "/x.so"}})
    assert "NCCL_IB_TIMEOUT was perhaps meant" in warnings(conf={CONF: {"NCCL_IB_TIMEOUTS": "20"}})
    assert "infinite" in warnings(conf={CONF: {"NCCL_IB_TIMEOUT": "32"}}), "dangerous, and still a warning: the profile can set it right"
    assert "reads this as 0" in warnings(conf={CONF: {"NCCL_IB_TC": "high"}})


def test_the_files_that_apply():
    text = warnings(conf={"/root/.nccl.conf": {"NCCL_ALGO": "Ring"}, OWN: {"NCCL_PROTO": "LL"}, CONF: {"NCCL_PROTO": "Simple"}})
    assert "NCCL_ALGO" not in text, "the file of another home"
    assert f"NCCL_PROTO=LL in {OWN}" in text and "NCCL_PROTO=Simple" not in text, "the home's file is stronger"


def test_a_file_that_leads_nccl_to_a_wrong_entry_is_a_fault():
    """The plan chose by range; an index in nccl.conf then has the last word."""
    generated = {**PLANNED, "NCCL_IB_ADDR_RANGE": "10.11.0.0/16"}
    del generated["NCCL_IB_GID_INDEX"]
    assert "index 4" in faults({}, generated, conf={CONF: {"NCCL_IB_GID_INDEX": "4"}})
    assert "index 2" in faults({}, generated, conf={CONF: {"NCCL_IB_ROCE_VERSION_NUM": "1"}})
    assert not faults({}, generated, conf={CONF: {"NCCL_IB_GID_INDEX": "3"}})
    assert not faults({"NCCL_IB_GID_INDEX": "-1"}, generated, conf={CONF: {"NCCL_IB_GID_INDEX": "4"}}), "the profile takes the word away from it"


# ---- against the model

SPECS = st.one_of(
    st.text(alphabet="^=,:mlx5_01 ", max_size=16),
    st.lists(
        st.sampled_from(["mlx5_1", "mlx5_10", "mlx5", "m", "mlx5_1:1", "mlx5_1:2", "mlx5_1:1:0:3", ":1", "", " mlx5_1", "mlx5_1:x", "=mlx5_1"]), max_size=36
    ).map(",".join),
)


@settings(max_examples=300, deadline=None)
@given(
    mark=st.sampled_from(["", "^", "=", "^=", "=^", "=="]),
    spec=SPECS,
    devices=st.lists(st.tuples(st.sampled_from(["mlx5_1", "mlx5_10", "m", "rocep1s0f0"]), st.integers(1, 2)), unique=True),
)
def test_lists_select_what_the_model_selects(mark, spec, devices):
    ports = [{"name": name, "port": number, "link_layer": "ethernet", "state": "active"} for name, number in devices]
    ours = [(item["name"], item["port"]) for item in nccl.selected_ports(mark + spec, ports)]
    assert ours == [(device.name, device.port) for device in nccl_model.hcas(mark + spec, [nccl_model.Device(*device) for device in devices])]
    present = [{"name": name, "up": True, "carrier": True, "addresses": ["10.0.0.1/24"]} for name in dict.fromkeys(name for name, _number in devices)]
    if len(mark + spec) > 1:
        assert nccl.selected_interfaces(mark + spec, present) == nccl_model.interfaces(
            mark + spec, [nccl_model.Interface(item["name"], ("10.0.0.1/24",)) for item in present]
        )


@settings(max_examples=400, deadline=None)
@given(
    text=st.one_of(
        st.text(alphabet="0123456789abcdefxX+- .,", max_size=8),
        st.integers(-(10**12), 10**12).map(str),
        st.text(max_size=6).filter(lambda text: "\0" not in text),
    )
)
def test_numbers_are_read_as_the_c_library_reads_them(text):
    assert nccl.number(text) == nccl_model.integer(text, 0)


ADDRESSES = ["10.1.0.1", "10.1.0.2", "10.2.0.1", "192.0.2.7", "169.254.3.3", "fe80::1", "fe80:0:0:1::1", "2001:db8::1", "2001:db8:1::1", "::"]
TABLES = st.lists(st.tuples(st.sampled_from(ADDRESSES), st.sampled_from([1, 2, 2, None])), max_size=9)
RANGES = st.sampled_from(
    [
        None,
        "10.1.0.0/16",
        "10.0.0.0/8",
        "10.2.0.1/32",
        "192.0.2.0/24",
        "0.0.0.0/0",
        "2001:db8::/64",
        "2001:db8::/32",
        "2001:db8::1/128",
        "10.1.0.0",
        "10.1.0.0/x",
        "10.1.0.0/40",
        "x/8",
        "fe80::/10",
        "2001:db8::/47",
    ]
)


def slots(table: list[tuple[str, int | None]]) -> list[nccl_model.Slot]:
    """The table with empty slots behind it, as real ones have."""
    filled = [nccl_model.Slot(nccl_model.gid_of(address), version) if address != "::" else nccl_model.Slot() for address, version in table]
    return filled + [nccl_model.Slot()] * 3


def gid_port(name: str, table: list[tuple[str, int | None]]) -> dict[str, Any]:
    gids = [
        {
            "index": index,
            "address": address,
            "gid": str(ipaddress.IPv6Address(nccl_model.gid_of(address))),
            "type": {1: "IB/RoCE v1", 2: "RoCE v2", None: None}[version],
        }
        for index, (address, version) in enumerate(table)
        if address != "::"
    ]
    return port(name, gids=gids)


@settings(max_examples=400, deadline=None)
@given(
    table=TABLES,
    family=st.sampled_from([None, "AF_INET", "AF_INET6", "IPv6"]),
    within=RANGES,
    index=st.sampled_from([None, None, None, "-1", "2", "auto"]),
    version=st.sampled_from([None, None, "2", "1"]),
)
def test_the_entry_is_the_one_that_the_model_takes(table, family, within, index, version):
    values = {"NCCL_IB_ADDR_FAMILY": family, "NCCL_IB_ADDR_RANGE": within, "NCCL_IB_GID_INDEX": index, "NCCL_IB_ROCE_VERSION_NUM": version}
    env = {name: value for name, value in values.items() if value is not None}
    assert nccl.gid_index(gid_port("mlx5_1", table), env) == nccl_model.gid_index(slots(table), env)


@settings(max_examples=300, deadline=None)
@given(tables=st.lists(TABLES.filter(bool), min_size=1, max_size=2), data=st.data())
def test_what_is_not_refused_leads_onto_the_fabric(tables, data):
    """Whatever a profile and nccl.conf say about GIDs: no fault, then NCCL takes a right entry on every planned port."""
    texts = st.sampled_from(["0", "1", "2", "3", "-1", "auto", "03", "10.1.0.0/16", "10.1.0.0", "2001:db8::/64", "AF_INET", "AF_INET6", "v6", ""])
    names = ["NCCL_IB_GID_INDEX", "NCCL_IB_ADDR_RANGE", "NCCL_IB_ADDR_FAMILY", "NCCL_IB_ROCE_VERSION_NUM"]
    profile = data.draw(st.dictionaries(st.sampled_from(names), texts, min_size=1))
    conf = data.draw(st.dictionaries(st.sampled_from(names), texts))
    ports = tuple(gid_port(f"mlx5_{number}", table) for number, table in enumerate(tables))
    right = {
        f"mlx5_{number}:1": frozenset(index for index, (address, version) in enumerate(table) if version == 2 and address.startswith("10.1."))
        for number, table in enumerate(tables)
    }
    findings = judged(profile, {"NCCL_IB_DISABLE": "0"}, ports=ports, all_ports=ports, right_gids=right, conf={CONF: conf})
    if findings.faults or not all(right.values()):
        return
    effective = {**conf, **profile}
    for item, table in zip(ports, tables):
        assert nccl_model.gid_index(slots(table), effective) in right[f"{item['name']}:1"], effective


@settings(max_examples=300, deadline=None)
@given(
    profile=st.dictionaries(
        st.sampled_from(sorted(nccl._VALUE_RULES) + ["NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_X"]), st.text(max_size=8)
    ),
    conf=st.dictionaries(st.text(max_size=8), st.text(max_size=8)),
)
def test_no_text_is_a_traceback(profile, conf):
    judged(profile, conf={CONF: conf})
    judged(profile, {}, ports=(), conf={CONF: {**conf, **profile}}, nvlink=True)
