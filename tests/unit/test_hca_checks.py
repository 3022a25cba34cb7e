# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What run_shard.py compares at every start: ports that are down, GID entries that moved (nccl#1333: an index moves when a link flaps)."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest

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
    assert run_shard.check_hcas([run_shard.Hca("mlx5_0", 1, None, None)], root) == [], "InfiniBand and address ranges have no index"
    assert "is not in this host" in run_shard.check_hcas([run_shard.Hca("mlx5_7", 1, None, None)], root)[0]


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
