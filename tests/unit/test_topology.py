# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Distances between GPUs and HCAs, on paths and on generated trees of recorded machines."""

from __future__ import annotations

import pathlib

import hardware_trees
import pytest
import yaml

from ansible_collections.rankzero.inference.plugins.module_utils import hcas, topology

FIXTURES = pathlib.Path(__file__).parent.parent / "fixtures" / "hardware"


def fixture(name: str) -> dict:
    return yaml.safe_load((FIXTURES / (name + ".yaml")).read_text(encoding="utf-8"))


ROOT = "/sys/devices/pci0000:15/0000:15:01.0"
SWITCH = ROOT + "/0000:16:00.0"
GPU = SWITCH + "/0000:17:00.0/0000:18:00.0"


@pytest.mark.parametrize(
    ("other", "distance"),
    [
        (SWITCH + "/0000:17:00.0/0000:18:00.1", "PIX"),  # two functions at one port
        (SWITCH + "/0000:17:01.0/0000:19:00.0", "PIX"),  # two ports of one switch
        (SWITCH + "/0000:17:02.0/0000:1a:00.0/0000:1b:00.0/0000:1c:00.0", "PXB"),  # a switch behind the switch
        (SWITCH + "/0000:17:02.0/0000:1a:00.0/0000:1b:00.0", "PXB"),  # a bridge behind the switch
        (ROOT.replace("01.0", "02.0") + "/0000:20:00.0", "PHB"),  # another root port
        ("/sys/devices/pci0000:40/0000:40:01.0/0000:41:00.0", "NODE"),  # another host bridge, same node
        ("/sys/devices/pci0009:15/0009:15:01.0/0009:16:00.0", "NODE"),  # another PCI domain
        ("/sys/devices/virtual/infiniband/rxe0", None),
        ("", None),
        (None, None),
    ],
)
def test_distance(other, distance):
    assert topology.distance(GPU, other, 0, 0) == distance
    assert topology.distance(other, GPU, 0, 0) == distance


@pytest.mark.parametrize(("one", "other", "distance"), [(0, 0, "NODE"), (0, 1, "SYS"), (-1, -1, "SYS"), (None, None, "SYS"), (None, 0, "SYS")])
def test_unknown_numa_nodes_are_never_equal(one, other, distance):
    assert topology.distance(GPU, "/sys/devices/pci0000:40/0000:40:01.0/0000:41:00.0", one, other) == distance


def test_endpoints_at_root_ports_of_a_flat_virtual_machine():
    assert topology.distance("/sys/devices/pci0000:00/0000:00:05.0", "/sys/devices/pci0000:00/0000:00:06.0") == "PHB"


def read(tree: hardware_trees.HardwareTree, gpus: dict[str, str]) -> dict:
    ports = hcas.read(str(tree.sysfs), str(tree.dev), [])
    facts = [{"uuid": name, "pci_bdf": bdf, "numa_node": None} for name, bdf in gpus.items()]
    return topology.gpu_hca(facts, ports, str(tree.sysfs))


def place(tree: hardware_trees.HardwareTree, root: int, switches: list[int], slot: int, bus: int, numa: int) -> str:
    """A function behind a chain of switches below one root port; returns its address. Switch N has upstream port N0 and downstream ports N1."""
    chain = ["0000:%02x:01.0" % root]
    for depth, switch in enumerate(switches):
        last = depth == len(switches) - 1
        chain += ["0000:%02x:00.0" % switch, "0000:%02x:%02x.0" % (switch + 1, slot if last else depth + switches[depth + 1] % 16)]
    bdf = "0000:%02x:00.0" % bus
    tree.pci(bdf, bridges=chain, numa_node=numa)
    return bdf


def test_hgx_h100_with_ten_nics(tmp_path):
    """One PCIe switch per GPU with its NIC; two further NICs at root ports of their own. Root complexes of their own make the rest SYS or NODE."""
    case = fixture("topo_h100_ten_nics")
    tree = hardware_trees.HardwareTree(tmp_path)
    gpus, free = {}, [nic for nic in ("NIC%d" % number for number in range(case["nics"])) if nic not in case["pix"].values()]
    for number, (gpu, nic) in enumerate(case["pix"].items()):
        numa = 0 if gpu in case["cpu_affinity"]["numa0"] else 1
        root = 0x10 * number + 4
        gpus[gpu] = place(tree, root, [root + 1], 0, root + 3, numa)
        tree.hca(nic, pci=place(tree, root, [root + 1], 1, root + 4, numa))
    for number, nic in enumerate(free):
        tree.hca(nic, pci=place(tree, 0xF0 + 4 * number, [], 0, 0xF1 + 4 * number, 2 + number))
    table = read(tree, gpus)
    near = {gpu: [nic for nic, distance in row.items() if distance == "PIX"] for gpu, row in table.items()}
    assert near == {gpu: [nic] for gpu, nic in case["pix"].items()}
    assert sorted(sum(near.values(), [])) == case["expect"]["right_nics"]
    assert all(table[gpu][nic] == "SYS" for gpu in gpus for nic in case["expect"]["excluded"])
    assert {distance for row in table.values() for distance in row.values()} == {"PIX", "NODE", "SYS"}


def test_dgx2_two_gpus_share_an_hca(tmp_path):
    """The recorded matrix of a machine with switches behind switches, cell by cell."""
    case = fixture("topo_dgx2_shared_switch")
    tree = hardware_trees.HardwareTree(tmp_path)
    # (root port, outer switch, inner switch, numa): mlx5_0 and mlx5_1 share a root port, as do mlx5_2 and mlx5_3.
    islands = {"mlx5_0": (0x10, 0x11, 0x20, 0), "mlx5_1": (0x10, 0x11, 0x28, 0), "mlx5_2": (0x30, 0x31, 0x40, 0), "mlx5_3": (0x30, 0x31, 0x48, 0)}
    islands.update({"mlx5_%d" % number: (0x50 + 0x10 * number, 0x51 + 0x10 * number, 0x58 + 0x10 * number, 1) for number in range(4, 10)})
    gpus: dict[str, str] = {}
    owners = {"GPU0": "mlx5_0", "GPU1": "mlx5_0", "GPU2": "mlx5_1", "GPU3": "mlx5_1", "GPU4": "mlx5_2"}
    for device, (root, outer, inner, numa) in islands.items():
        tree.hca(device, pci=place(tree, root, [outer, inner], 0, inner + 2, numa))
        for slot, gpu in enumerate((name for name, owner in owners.items() if owner == device), 1):
            gpus[gpu] = place(tree, root, [outer, inner], slot, inner + 2 + slot, numa)
    table = read(tree, gpus)
    assert {gpu: table[gpu] for gpu in sorted(table)} == case["rows"]
    order = ["PIX", "PXB", "PHB", "NODE", "SYS"]
    assert {gpu: min(row, key=lambda name: order.index(row[name])) for gpu, row in table.items()} == case["expect"]["nearest"]


def test_devices_without_a_place_are_unknown(tmp_path):
    tree = hardware_trees.HardwareTree(tmp_path)
    tree.pci("0000:18:00.0", numa_node=0)
    tree.hca("rxe0", parent="eth0")
    tree.hca("mlx5_0", pci="0000:18:00.0")
    gpus = [
        {"uuid": "GPU-a", "pci_bdf": "0000:99:00.0", "numa_node": 0},
        {"uuid": "GPU-b", "pci_bdf": None, "numa_node": None},
        {"uuid": None, "pci_bdf": None},
    ]
    table = topology.gpu_hca(gpus, hcas.read(str(tree.sysfs), str(tree.dev), []), str(tree.sysfs))
    assert table == {"GPU-a": {"mlx5_0": None, "rxe0": None}, "GPU-b": {"mlx5_0": None, "rxe0": None}}
