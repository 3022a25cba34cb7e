# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What run_shard.py compares at every start: ports that are down, GID entries that moved (nccl#1333: an index moves when a link flaps)."""

from __future__ import annotations

import importlib.util
import ipaddress
import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from ansible_collections.rankzero.inference.plugins.module_utils import network

SCRIPT = pathlib.Path(__file__).resolve().parent.parent.parent / "roles/replica/files/run_shard.py"
V1, V2 = "IB/RoCE v1", "RoCE v2"
ADDRESS = "0000:0000:0000:0000:0000:ffff:0a46:0005"  # 10.70.0.5
LINK_LOCAL = "fe80:0000:0000:0000:0a00:27ff:fe00:0061"
Table = dict[int, tuple[str, str]]
BEFORE: Table = {0: (LINK_LOCAL, V1), 1: (LINK_LOCAL, V2), 2: (ADDRESS, V1), 3: (ADDRESS, V2)}
AFTER: Table = {0: (LINK_LOCAL, V1), 1: (LINK_LOCAL, V2), 3: (ADDRESS, V1), 4: (ADDRESS, V2)}


@pytest.fixture(scope="module")
def run_shard() -> Any:
    spec = importlib.util.spec_from_file_location("run_shard_under_test", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def plant(root: pathlib.Path, table: Table, state: str = "4: ACTIVE") -> str:
    """A sysfs tree with one port; empty slots read as zeros and their types cannot be read, as the kernel has it."""
    port = root / "class/infiniband/mlx5_0/ports/1"
    for folder in ("gids", "gid_attrs/types"):
        (port / folder).mkdir(parents=True, exist_ok=True)
    (port / "state").write_text(state + "\n")
    for index in range(6):
        (port / "gids" / str(index)).write_text(table.get(index, ("0000:" * 7 + "0000", ""))[0] + "\n")
        kind = port / "gid_attrs/types" / str(index)
        kind.unlink(missing_ok=True)
        if index in table:
            kind.write_text(table[index][1] + "\n")
    return str(root)


@pytest.mark.parametrize(
    ("table", "state", "told"),
    [
        (BEFORE, "4: ACTIVE", None),
        (BEFORE, "1: DOWN", "HCA port mlx5_0:1 is DOWN, not ACTIVE"),
        (AFTER, "4: ACTIVE", "GID index 3 is no longer RoCE v2 10.70.0.5; it is at index 4 now"),
        ({0: (LINK_LOCAL, V1), 1: (LINK_LOCAL, V2)}, "4: ACTIVE", "the port has no such entry any more"),
        ({**BEFORE, 3: (ADDRESS, V1)}, "4: ACTIVE", "no longer RoCE v2"),
        ({**BEFORE, 3: ("not an address", V2)}, "4: ACTIVE", "no longer RoCE v2"),
    ],
)
def test_a_port_is_what_was_planned(run_shard: Any, tmp_path: pathlib.Path, table: Table, state: str, told: str | None) -> None:
    found = run_shard.check_hcas([run_shard.Hca("mlx5_0", 1, 3, "10.70.0.5")], plant(tmp_path, table, state))
    assert found == [] if told is None else len(found) == 1 and told in found[0], found


def test_a_port_that_is_gone_or_has_no_index(run_shard: Any, tmp_path: pathlib.Path) -> None:
    root = plant(tmp_path, AFTER)
    assert run_shard.check_hcas([run_shard.Hca("mlx5_0", 1, None, None)], root) == [], "InfiniBand has neither index nor address"
    assert "is not in this host" in run_shard.check_hcas([run_shard.Hca("mlx5_7", 1, None, None)], root)[0]


@pytest.mark.parametrize(
    ("table", "told"),
    [
        (BEFORE, None),
        (AFTER, None),
        ({0: (LINK_LOCAL, V1), 1: (LINK_LOCAL, V2)}, "HCA port mlx5_0:1 has no RoCE v2 GID 10.70.0.5 any more"),
        ({2: (ADDRESS, V1)}, "has no RoCE v2 GID 10.70.0.5"),
    ],
)
def test_where_nccl_chooses_by_address_the_address_must_be_there(run_shard: Any, tmp_path: pathlib.Path, table: Table, told: str | None) -> None:
    found = run_shard.check_hcas([run_shard.Hca("mlx5_0", 1, None, "10.70.0.5")], plant(tmp_path, table))
    assert found == [] if told is None else len(found) == 1 and told in found[0], found


# ---- the interface


def shard_at(run_shard: Any, interface: str | None, *addresses: str) -> Any:
    text = json.dumps(
        {
            "schema": 1,
            "replica": "glm",
            "rank": 0,
            "nodes": 1,
            "fingerprint": "f",
            "paths": {"state_dir": "/run/x", "work_dir": "/x"},
            "launches": [{"name": "engine", "path": "/bin/true", "args": [], "env": {}, "secret_env": {}}],
            "addresses": list(addresses),
            "interface": interface,
        }
    )
    return run_shard.parse_shard(text, "/x", {})


def test_the_planned_interface_must_have_the_planned_address(run_shard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_shard, "ipv4_addresses", lambda: [("lo", ipaddress.ip_address("127.0.0.1")), ("enp1s0", ipaddress.ip_address("10.0.0.5"))])
    monkeypatch.setattr(run_shard, "ipv6_addresses", lambda: [("enp1s0", ipaddress.ip_address("2001:db8::5"))])
    assert run_shard.check_interface(shard_at(run_shard, "enp1s0", "10.0.0.5")) == []
    for address in ("10.0.0.5", "2001:db8::5"):
        (told,) = run_shard.check_interface(shard_at(run_shard, "eno1", address))
        assert told.startswith(f"address {address} is on interface enp1s0 now, not on eno1")
    assert run_shard.check_interface(shard_at(run_shard, "eno1", "10.0.0.99")) == [], "an address that is gone is told once, by what binds it"
    assert run_shard.check_interface(shard_at(run_shard, "lo", "127.0.0.2")) == [], "every address of the loopback network can be used"
    assert run_shard.check_interface(shard_at(run_shard, None, "10.0.0.5")) == [], "a revision of an older version does not say"


def test_this_machines_addresses_are_those_that_ip_shows(run_shard: Any) -> None:
    """Against rtnetlink, which the facts are read from."""
    shown = {(interface["name"], cidr.partition("/")[0]) for interface in network.read("/sys")["interfaces"] for cidr in interface["addresses"]}
    assert {(name, str(address)) for name, address in run_shard.ipv4_addresses()} == {entry for entry in shown if ":" not in entry[1]}
    if pathlib.Path("/proc/net/if_inet6").exists():
        assert {(name, str(address)) for name, address in run_shard.ipv6_addresses()} >= {entry for entry in shown if ":" in entry[1]}


def test_no_table_of_addresses_is_no_fault(run_shard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_shard, "PROC", "/nonexistent")
    assert run_shard.interfaces_with("2001:db8::5") == []


def test_check_says_what_moved_before_anything_starts(tmp_path: pathlib.Path) -> None:
    root = plant(tmp_path / "sys", AFTER)
    revision = tmp_path / "revision"
    revision.mkdir()
    (revision / "shard.env").write_text("")
    (revision / "launch.json").write_text(
        json.dumps(
            {
                "schema": 1,
                "replica": "glm",
                "rank": 0,
                "nodes": 1,
                "fingerprint": "f",
                "paths": {"state_dir": str(tmp_path / "state"), "work_dir": str(tmp_path / "work")},
                "launches": [{"name": "engine", "path": "/bin/true", "args": [], "env": {}, "secret_env": {}}],
                "sysfs_root": root,
                "hcas": [{"name": "mlx5_0", "port": 1, "gid_index": 3, "gid_address": "10.70.0.5"}],
            }
        )
    )
    done = subprocess.run([sys.executable, str(SCRIPT), str(revision), "--check"], capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 1 and "it is at index 4 now" in done.stdout + done.stderr, done
