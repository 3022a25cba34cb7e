# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Limits of the service's context, shared memory, ports, nccl.conf and GPUDirect, from generated trees and from this machine."""

from __future__ import annotations

import resource

import hardware_trees
import pytest
import recorded_hosts
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.rankzero.inference.plugins.module_utils import limits

CASES = recorded_hosts.load("limits_kho_cma")["cases"]
RDMA_NEEDS = 1 << 30


def read(tree: hardware_trees.HardwareTree, manager: str | None = "supervisor", nccl_conf: str = "/nonexistent") -> dict:
    return limits.read(str(tree.proc), str(tree.sysfs), str(tree.dev), str(tree.root), manager, nccl_conf)


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_memlock_and_the_kernel_fault_are_told_apart(tmp_path, case):
    found = read(recorded_hosts.write("limits_kho_cma", tmp_path)[case["name"]].tree)
    assert found["memlock_bytes"] == case["memlock"]
    assert (found["memlock_bytes"] == "unlimited" or found["memlock_bytes"] >= RDMA_NEEDS) is case["expect"]["memlock_ok"]
    assert found["kho_cma_suspect"] is case["expect"]["kho_cma_suspect"]


def test_kernel_without_cma_has_not_the_fault(tmp_path):
    tree = hardware_trees.HardwareTree(tmp_path)
    tree.meminfo(MemTotal=1000, MemFree=500)
    assert read(tree)["kho_cma_suspect"] is False


def test_this_machine():
    found = limits.read("/proc", "/sys", "/dev", "/", "supervisor")
    soft_hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    assert found["memlock_bytes"] == ("unlimited" if soft_hard[1] == resource.RLIM_INFINITY else soft_hard[1])
    assert found["nofile"] == resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    low, high = found["ephemeral_ports"]
    assert 0 < low < high < 65536
    assert found["shm"]["size_mib"] >= found["shm"]["free_mib"] > 0


@pytest.mark.parametrize(("capabilities", "memlock", "nofile"), [("000001ffffffffff", "unlimited", 1073741816), ("000001fffeffffff", 8388608, 20000)])
def test_systemd_gives_what_process_1_may_give(tmp_path, capabilities, memlock, nofile):
    """Without CAP_SYS_RESOURCE systemd silently gives a service its own hard limit, whatever LimitMEMLOCK says."""
    tree = hardware_trees.HardwareTree(tmp_path)
    tree.process_limits("unlimited", pid="self")
    tree.process_limits(8388608, 20000, pid="1")
    tree.proc_file("1/status", "Name:\tsystemd\nCapEff:\t%s\n" % capabilities)
    tree.proc_file("sys/fs/nr_open", "1073741816")
    found = read(tree, "systemd")
    assert (found["memlock_bytes"], found["nofile"]) == (memlock, nofile)


def test_the_hard_limit_counts(tmp_path):
    """run_shard.py can raise its soft limit up to the hard one."""
    tree = hardware_trees.HardwareTree(tmp_path)
    tree.process_limits("unlimited", 524288, soft=1024)
    found = read(tree)
    assert (found["memlock_bytes"], found["nofile"]) == ("unlimited", 524288)


def test_rows_of_limits():
    table = limits.parse_limits(
        "Max open files            1024                 524288               files     \nMax cpu time   unlimited unlimited seconds\nnoise\n"
    )
    assert table == {"Max open files": (1024, 524288), "Max cpu time": ("unlimited", "unlimited")}


def test_an_empty_tree_is_all_unknown_with_reasons(tmp_path):
    found = limits.read(str(tmp_path / "proc"), str(tmp_path / "sys"), str(tmp_path / "dev"), str(tmp_path), None, str(tmp_path / "no"))
    for name in ("memlock_bytes", "nofile", "shm", "ephemeral_ports", "kho_cma_suspect"):
        assert found[name] is None and found["errors"][name], name
    assert found["gpudirect"] == {"peermem": False, "dmabuf": None}
    assert found["nccl_conf"] == {}


@pytest.mark.parametrize("text", ["", "32768", "a b", "1 2 3", "\x00"])
def test_damaged_port_range(tmp_path, text):
    tree = hardware_trees.HardwareTree(tmp_path)
    tree.proc_file("sys/net/ipv4/ip_local_port_range", text)
    found = read(tree)
    assert found["ephemeral_ports"] is None and found["errors"]["ephemeral_ports"]


# ---- nccl.conf


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("NCCL_DEBUG=WARN", {"NCCL_DEBUG": "WARN"}),
        ("NCCL_SOCKET_IFNAME==ens1f0", {"NCCL_SOCKET_IFNAME": "=ens1f0"}),  # cut at the first =
        ("NCCL_IB_HCA=mlx5_0 # fast", {"NCCL_IB_HCA": "mlx5_0 # fast"}),  # no inline comments
        (" NCCL_DEBUG = INFO", {" NCCL_DEBUG ": " INFO"}),  # nothing is trimmed, so this sets nothing that NCCL reads
        ('NCCL_DEBUG="INFO"', {"NCCL_DEBUG": '"INFO"'}),  # quotes are part of the value
        ("#NCCL_DEBUG=INFO", {}),
        ("NCCL_DEBUG", {}),
        ("=x", {}),
        ("", {}),
        ("NCCL_DEBUG=WARN\r", {"NCCL_DEBUG": "WARN"}),
        ("NCCL_DEBUG=WARN\nNCCL_DEBUG=INFO", {"NCCL_DEBUG": "WARN"}),  # set without overwriting: the first wins
        ("LD_PRELOAD=/tmp/x.so", {"LD_PRELOAD": "/tmp/x.so"}),  # any variable, not only NCCL's
        ("NCCL_NET=", {"NCCL_NET": ""}),
    ],
)
def test_nccl_conf_lines(line, found):
    assert limits.parse_nccl_conf(line) == found


@given(st.text())
def test_any_nccl_conf(text):
    for name, value in limits.parse_nccl_conf(text).items():
        assert value.isprintable() and name.isprintable()


def test_nccl_conf_files_that_count(tmp_path):
    """The system's file, and the one in a service's home, which is its working directory; secrets of other programs are not shown."""
    tree = hardware_trees.HardwareTree(tmp_path)
    home = tmp_path / "var/lib/rankzero/glm"
    home.mkdir(parents=True)
    (home / ".nccl.conf").write_text("NCCL_IB_PKEY=1\nHF_TOKEN=hf_abc\n", encoding="utf-8")
    system = tmp_path / "nccl.conf"
    system.write_text("NCCL_DEBUG=WARN\n", encoding="utf-8")
    assert read(tree, nccl_conf=str(system))["nccl_conf"] == {
        str(system): {"NCCL_DEBUG": "WARN"},
        str(home / ".nccl.conf"): {"NCCL_IB_PKEY": "1", "HF_TOKEN": "(hidden)"},
    }


# ---- GPUDirect

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.230.02"


@pytest.mark.parametrize(
    ("driver", "kernel", "dmabuf"),
    [(OPEN, "6.8.0-45-generic", True), (OPEN, "5.4.0", False), (CLOSED, "6.8.0", False), (None, "6.8.0", None), (OPEN, "", None)],
)
def test_dmabuf(tmp_path, driver, kernel, dmabuf):
    tree = hardware_trees.HardwareTree(tmp_path)
    if driver:
        tree.proc_file("driver/nvidia/version", driver + "\nGCC version:  gcc 13\n")
    tree.proc_file("sys/kernel/osrelease", kernel)
    assert read(tree)["gpudirect"]["dmabuf"] is dmabuf


@pytest.mark.parametrize("place", ["module/nvidia_peermem/version", "kernel/mm/memory_peers/nv_mem/version", "kernel/mm/memory_peers/nv_mem_nc/version"])
def test_peermem(tmp_path, place):
    tree = hardware_trees.HardwareTree(tmp_path)
    hardware_trees.write(tree.sysfs / place, "1.0")
    assert read(tree)["gpudirect"]["peermem"] is True
