# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A whole host, damaged anywhere: node facts come back in their shape, in time, and a plan over them names what is wrong."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import recorded_hosts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ansible_collections.rankzero.inference.plugins.module_utils import node
from ansible_collections.rankzero.inference.plugins.plugin_utils import host_facts, node_report
from ansible_collections.rankzero.inference.plugins.plugin_utils.plan import HostInput, Request, build_plan

SECONDS = 60
LAUNCH = {
    "schema": 1,
    "replica": "glm",
    "rank": 0,
    "nodes": 2,
    "fingerprint": "0123456789abcdef",
    "labels": {"profile": "glm", "engine": "vllm"},
    "gpus": [{"uuid": "GPU-0001-0", "index": 0}],
    "tie": {"run_ports": [29500, 29501]},
    "tie_port": 29520,
    "leader_port": 29500,
    "http_port": 8000,
    "ready": {"serves_http": True, "budget_seconds": 600},
    "secrets": ["tie_key"],
}
IMEX = json.dumps({"status": "UP", "nodes": {"0": {"status": "READY", "host": "10.0.9.1", "version": "580", "connections": {}}}})


def host(root: pathlib.Path) -> recorded_hosts.Recorded:
    """One host with something for every reader: GPUs on the bus, HCAs of each kind, a process, IMEX, a build, a deployed replica, a lock, a model."""
    revision = "etc/rankzero/glm/revisions/0123456789abcdef/"
    one = recorded_hosts.machine(
        {
            "planned": 1,
            "pci": [
                {"bdf": "0000:17:00.0", "vendor": "0x10de", "bridges": ["0000:15:01.0"], "numa_node": 0},
                {"bdf": "0000:18:00.0", "bridges": ["0000:15:01.0"], "numa_node": 0},
            ],
            "hcas": [
                {"name": "mlx5_0", "pci": "0000:18:00.0", "netdevs": ["ens1"], "gid_tbl_len": 4, "gids": [[3, "10.1.0.1", "RoCE v2", "ens1"]]},
                {"name": "mlx5_1", "link_layer": "InfiniBand", "lid": "0x4", "sm_lid": "0x1", "gid_tbl_len": 1, "gids": [[0, "fec0::1", "IB/RoCE v1", None]]},
                {"name": "rxe0", "parent": "eno9", "gid_tbl_len": 2, "gids": [[1, "10.0.9.1", "RoCE v2", "eno9"]]},
            ],
            "interfaces": {"ens1": {"addresses": ["10.1.0.1/24"], "pci": "0000:18:00.0", "speed": 400000}},
            "proc": {
                "driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05",
                "sys/kernel/osrelease": "6.8.0",
                "devices": "240 nvidia-caps-imex-channels",
                "stat": "btime 1767225600",
                "1/status": "Name:\tsystemd\nUid:\t0\t0\t0\t0\nCapEff:\t000001ffffffffff",
                "1/cgroup": "0::/init.scope",
                "700/status": "Uid:\t0\t0\t0\t0",
                "net/tcp": "  sl\n   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 4242 1",
            },
            "files": {
                "etc/rankzero/engines.d/vllm-default.json": json.dumps({"engine": "vllm", "name": "default", "path": "/bin/true", "version": "0.33.0"}),
                revision + "launch.json": json.dumps(LAUNCH),
                revision + "shard.env": "A='1'",
                revision + "run_shard.py": "pass",
                revision + "secrets/tie_key": "k" * 64,
                "run/rankzero/glm/state.json": json.dumps(
                    {"run_id": "r", "stage": "running", "supervisor_pid": 700, "started_at": 1767225700.5, "restarts": 1}
                ),
                "run/rankzero/glm/ready.json": json.dumps({"run_id": "r", "evidence": {"gpus": []}}),
                "run/rankzero/glm.lock": json.dumps({"owner": "o", "who": "somebody", "since": 1.0, "until": 2.0}),
                "etc/rankzero/made_users.json": '["rankzero"]',
                "etc/rankzero/cordoned.json": json.dumps({"by": "me", "reason": "memory", "at": "2026-01-31T12:00:00Z"}),
                "var/lib/rankzero/glm/.nccl.conf": "NCCL_DEBUG=INFO",
                "etc/nvidia-imex/nodes_config.cfg": "10.0.9.1",
                "dev/nvidia-caps-imex-channels/channel0": "",
                "usr/bin/nvidia-imex-ctl": f"#!/bin/sh\necho '{IMEX}'",
                "models/glm/config.json": json.dumps({"num_attention_heads": 32, "num_hidden_layers": 4, "hidden_size": 64}),
                "models/glm/model.safetensors.index.json": json.dumps({"weight_map": {"a": "model-1.safetensors"}, "metadata": {"total_size": 8}}),
            },
            "processes": [
                {"pid": 700, "comm": "python", "environ": "RANKZERO_SHARD=glm/0/r\0"},
                {"pid": 77, "comm": "nvidia-imex"},
            ],
        },
        root,
    )
    (root / "proc/700/cmdline").write_bytes(b"/usr/bin/python3\0/etc/rankzero/glm/current/run_shard.py\0")
    (root / "etc/rankzero/glm/current").symlink_to("revisions/0123456789abcdef")
    header = b'{"a":{"dtype":"BF16","shape":[2,2],"data_offsets":[0,8]}}'
    (root / "models/glm/model-1.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    one.tree.write_network_state(["127.0.1.1"])
    return one


def run_command(arguments: list[str], **options: Any) -> tuple[int, str, str]:
    done = subprocess.run(arguments, capture_output=True, check=False, timeout=SECONDS)
    return done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")


def read(root: pathlib.Path) -> dict[str, Any]:
    options = {
        "sysfs_root": str(root / "sys"),
        "proc_root": str(root / "proc"),
        "dev_root": str(root / "dev"),
        "replica_root": str(root),
        "network_state": str(root / "network.json"),
        "model_paths": [str(root / "models/glm")],
        "checksum_paths": [],
        "service_user": None,
        "probe_ports": [],
    }
    return node.read(options, run_command)


# ---- damage


def junk(path: pathlib.Path, data: bytes) -> None:
    path.write_bytes(data)


def cut(path: pathlib.Path, data: bytes) -> None:
    path.write_bytes(path.read_bytes()[: len(data)])


def directory(path: pathlib.Path, data: bytes) -> None:
    path.unlink()
    path.mkdir()


def fifo(path: pathlib.Path, data: bytes) -> None:
    path.unlink()
    os.mkfifo(path)


def loop(path: pathlib.Path, data: bytes) -> None:
    path.unlink()
    path.symlink_to(path.name)


def upwards(path: pathlib.Path, data: bytes) -> None:
    """A link to the directory that it is in: whoever follows it walks for ever."""
    path.unlink()
    path.symlink_to(".")


def endless(path: pathlib.Path, data: bytes) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def huge(path: pathlib.Path, data: bytes) -> None:
    os.truncate(path, 1 << 33)


def gone(path: pathlib.Path, data: bytes) -> None:
    path.unlink()


def unreadable(path: pathlib.Path, data: bytes) -> None:
    path.chmod(0)


def numbers(path: pathlib.Path, data: bytes) -> None:
    """Every number of the file far larger than anybody counts."""
    path.write_bytes(b"".join(b"9" * 5000 if 48 <= byte < 58 else bytes([byte]) for byte in path.read_bytes()[:400]))


def nested(path: pathlib.Path, data: bytes) -> None:
    path.write_bytes(b'{"a":' * 20000)


DAMAGE: list[Callable[[pathlib.Path, bytes], None]] = [junk, cut, directory, fifo, loop, upwards, endless, huge, gone, unreadable, numbers, nested]
KEYS = [
    "schema",
    "host",
    "gpus",
    "hcas",
    "topology",
    "interfaces",
    "routes",
    "limits",
    "drivers",
    "engines",
    "models",
    "ports_in_use",
    "shards",
    "cordoned",
    "locks",
    "traces",
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    root = tmp_path_factory.mktemp("whole")
    host(root)
    yield root


@pytest.fixture(autouse=True)
def deadline() -> Iterator[None]:
    """A reader that waits for ever fails the test with a trace of where."""

    def late(number: int, frame: Any) -> None:
        raise AssertionError(f"a reader waits in {frame.f_code.co_filename}:{frame.f_lineno}")

    before = signal.signal(signal.SIGALRM, late)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def files_of(root: pathlib.Path) -> list[str]:
    return sorted(str(pathlib.Path(folder, name).relative_to(root)) for folder, _folders, names in os.walk(root) for name in names)


def holds(root: pathlib.Path) -> None:
    """Facts in their shape, which survive JSON, normalise without a fault of the reader's, can be reported on, and can be planned with."""
    signal.alarm(SECONDS)
    facts = read(root)
    signal.alarm(0)
    assert set(KEYS) <= set(facts)
    known = json.loads(json.dumps(facts))
    told: list[str] = []
    host_facts.normalise(known, lambda key, seen, wanted: told.append(f"{key}: {seen!r} is not {wanted}"))
    assert not [text for text in told if not text.startswith(("engines.", "shards."))], "what node_facts reads itself has the types that the plan wants"
    assert node_report.report("n1", known)
    request = Request(
        replica="glm",
        profile={"engine": "sim", "tp": 1, "gpus_per_node": 0, "model_path": str(root / "models/glm")},
        hosts=(HostInput("n1", known, service_manager="systemd"),),
    )
    plan = build_plan(request)
    assert all(fault["host"] in ("n1", None) and fault["field"] and fault["wanted"] for fault in plan["faults"])


def test_the_whole_host_is_read(whole: pathlib.Path) -> None:
    """Undamaged, so that damage is done to something."""
    facts = read(whole)
    assert [port["name"] for port in facts["hcas"] if port["usable"]] == ["mlx5_0", "mlx5_1"]
    assert facts["limits"]["imex"]["domain"]["ready"] and facts["limits"]["nccl_conf"] and facts["shards"]["glm"]["rank"] == 0
    assert facts["shards"]["glm"]["pids"] == [700] and facts["engines"]["vllm"] and facts["locks"]["glm"] and facts["cordoned"]["by"] == "me"
    assert facts["ports_in_use"][0]["port"] == 8000 and facts["traces"]["made_users"] == ["rankzero"] and facts["gpus"][0]["pci_bdf"] == "0000:17:00.0"
    assert next(iter(facts["models"].values()))["weight_bytes"] == 73
    holds(whole)


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_some_files_are_damaged(whole: pathlib.Path, damage: Callable[[pathlib.Path, bytes], None], data: st.DataObject) -> None:
    """One kind of damage at a few places that hypothesis seeks out."""
    chosen = data.draw(st.lists(st.sampled_from(files_of(whole)), min_size=1, max_size=10, unique=True))
    content = data.draw(st.binary(max_size=200))
    damaged(whole, [(name, damage, content) for name in chosen])


@pytest.mark.parametrize("damage", [junk, fifo, directory, loop, numbers, nested], ids=lambda damage: damage.__name__)
def test_every_file_is_damaged(whole: pathlib.Path, damage: Callable[[pathlib.Path, bytes], None]) -> None:
    damaged(whole, [(name, damage, b"\xff\x00\xfe \n{") for name in files_of(whole)])


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_damage_of_every_kind(whole: pathlib.Path, data: st.DataObject) -> None:
    places = st.tuples(st.sampled_from(files_of(whole)), st.sampled_from(DAMAGE), st.binary(max_size=60))
    damaged(whole, data.draw(st.lists(places, min_size=3, max_size=40, unique_by=lambda place: place[0])))


def damaged(whole: pathlib.Path, places: list[tuple[str, Callable[[pathlib.Path, bytes], None], bytes]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder) / "host"
        shutil.copytree(whole, root, symlinks=True)
        for name, damage, content in places:
            path = root / name
            if os.path.lexists(path) and not (path.is_symlink() and damage in (junk, cut, huge, unreadable, numbers, nested)):
                damage(path, content)
        holds(root)
