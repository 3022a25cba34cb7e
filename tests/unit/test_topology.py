# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Distances between GPUs and HCAs, on paths and on generated trees of recorded machines."""

from __future__ import annotations

import hardware_trees
import pytest
import recorded_hosts

from ansible_collections.rankzero.inference.plugins.module_utils import hcas, topology

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


def read(one: recorded_hosts.Recorded) -> dict:
    """The table of a recorded host."""
    facts = [{**gpu, "numa_node": None} for gpu in recorded_hosts.gpus_of(one)]
    return topology.gpu_hca(facts, hcas.read(str(one.tree.sysfs), str(one.tree.dev), []), str(one.tree.sysfs))


def test_hgx_h100_with_ten_nics(tmp_path):
    """One PCIe switch per GPU with its NIC; two further NICs at root ports of their own. Root complexes of their own make the rest SYS or NODE."""
    case = recorded_hosts.load("topo_h100_ten_nics")
    for at, one in enumerate(recorded_hosts.write("topo_h100_ten_nics", tmp_path).values()):
        table = {f"GPU{uuid.rpartition('-')[2]}": {"NIC" + name[5:]: distance for name, distance in row.items()} for uuid, row in read(one).items()}
        near = {gpu: [nic for nic, distance in row.items() if distance == "PIX"] for gpu, row in table.items()}
        assert near == {gpu: [nic] for gpu, nic in case["pix"].items()}, at
        assert sorted(sum(near.values(), [])) == case["expect"]["right_nics"]
        assert all(table[gpu][nic] == "SYS" for gpu in table for nic in case["expect"]["excluded"])
        assert {distance for row in table.values() for distance in row.values()} == {"PIX", "NODE", "SYS"}


def test_dgx2_two_gpus_share_an_hca(tmp_path):
    """The recorded matrix of a machine with switches behind switches, cell by cell."""
    case = recorded_hosts.load("topo_dgx2_shared_switch")
    table = read(recorded_hosts.write("topo_dgx2_shared_switch", tmp_path)["dgx2"])
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
