# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Small builders of node facts, profiles and requests for tests of the plan."""

from __future__ import annotations

import copy
from typing import Any

from ansible_collections.rankzero.inference.plugins.plugin_utils.plan import HostInput, Request, build_plan

H100 = {"model": "NVIDIA H100 80GB HBM3", "total_mib": 81559, "capability": "9.0"}
A100 = {"model": "NVIDIA A100-SXM4-40GB", "total_mib": 40960, "capability": "8.0"}


def gpu(host: int, index: int, model: str = H100["model"], total_mib: int | None = 81559, capability: str | None = "9.0", **more: Any) -> dict[str, Any]:
    return {
        "index": index,
        "uuid": f"GPU-{host:04d}-{index:04d}",
        "pci_bdf": f"0000:{16 + index:02x}:00.0",
        "vendor": "nvidia",
        "model": model,
        "arch": "hopper",
        "compute_capability": capability,
        "numa_node": 0,
        "memory": {"model": "discrete", "total_mib": total_mib, "used_mib": 0, "reserved_mib": 551, "unattributed_mib": 0},
        "partition": {"kind": None, "mode_current": False, "mode_pending": False},
        "interconnect_domain": None,
        "processes": [],
        "compute_mode": "default",
        "health": {"state": "ok", "reasons": []},
        "vendor_data": {},
        "errors": {},
        **more,
    }


def hca(host: int, index: int, network: int = 1, **more: Any) -> dict[str, Any]:
    address = f"10.{20 + network}.{index}.{host}"
    return {
        "name": f"mlx5_{index}",
        "port": 1,
        "pci_bdf": f"0000:{64 + index:02x}:00.0",
        "link_layer": "ethernet",
        "node_type": "ca",
        "transport": "roce",
        "state": "active",
        "rate_gbps": 400,
        "netdevs": [f"eth{index + 1}"],
        "usable": True,
        "reasons": [],
        "fabrics": [f"roce:10.{20 + network}.0.0/16"],
        "gids": [
            {
                "index": 3,
                "gid": "::ffff:" + address,
                "type": "RoCE v2",
                "netdev": f"eth{index + 1}",
                "address": address,
                "network": f"10.{20 + network}.0.0/16",
                "vlan": None,
            }
        ],
        "errors": {},
        **more,
    }


def node(host: int, gpus: int = 8, hcas: int = 0, **more: Any) -> dict[str, Any]:
    """Whole facts of host number `host`, as node_facts gives them: 10.0.0.<host> on mgmt0, H100 GPUs, RoCE ports, a model, systemd."""
    return {
        "schema": 1,
        "gathered_at": "2026-01-31T12:00:00Z",
        "host": {
            "hostname": f"n{host}",
            "user": "root",
            "privileged": True,
            "service_manager": "systemd",
            "supervisord": None,
            "python": {"executable": "/usr/bin/python3", "version": "3.11.2"},
        },
        "gpus": [gpu(host, index) for index in range(gpus)],
        "topology": {"gpu_gpu": {}, "gpu_hca": {}},
        "hcas": [hca(host, index) for index in range(hcas)],
        "interfaces": [
            {"name": "lo", "kind": "loopback", "up": True, "addresses": ["127.0.0.1/8"]},
            {"name": "mgmt0", "kind": "physical", "up": True, "carrier": True, "addresses": [f"10.0.0.{host}/24"], "master": None},
        ],
        "routes": [
            {"destination": "10.0.0.0/24", "gateway": None, "interface": "mgmt0", "metric": 0},
            {"destination": "0.0.0.0/0", "gateway": "10.0.0.254", "interface": "mgmt0", "metric": 100},
        ],
        "default_route": {"interface": "mgmt0", "gateway": "10.0.0.254"},
        "hostname_resolves_to": [f"10.0.0.{host}"],
        "limits": {"memlock_bytes": "unlimited", "ephemeral_ports": [32768, 60999], "imex": {"service": None, "channels": [], "domain": None}},
        "drivers": {"nvidia": {"state": "ok", "message": None, "hint": None, "driver": "580.95.05"}},
        "engines": {"llamacpp": [build()]},
        "models": {"/models/glm": {"exists": True, "readable": True, "kind": "directory", "bytes": 1000, "weight_bytes": 1000, "files": 3, "config": None}},
        "ports_in_use": [{"port": 22, "address": "0.0.0.0", "pid": 1, "process": "sshd", "shard": None, "listening": True}],
        "shards": {},
        "cordoned": None,
        **more,
    }


def minimal(host: int, gpus: int = 8) -> dict[str, Any]:
    """As a person writes them down: only what the plan needs."""
    return {
        "schema": 1,
        "gpus": [
            {"uuid": f"GPU-{host:04d}-{index:04d}", "model": "NVIDIA H100 80GB HBM3", "compute_capability": 9.0, "memory": {"total_mib": 81559}}
            for index in range(gpus)
        ],
        "hcas": [{"name": "mlx5_0", "link_layer": "InfiniBand", "usable": True, "fabric": "ib:fe80000000000000"}],
        "interfaces": [{"name": "eth0", "up": True, "addresses": [f"10.0.0.{host}/24"]}],
        "default_route": {"interface": "eth0"},
        "ports_in_use": [22, 80],
        "host": {"service_manager": "systemd"},
        "models": {"/models/glm": {"exists": True, "readable": True}},
    }


def build(**more: Any) -> dict[str, Any]:
    return {
        "name": "default",
        "path": "/opt/llama/llama-server",
        "version": "0.6.0",
        "fingerprint": "5d0c3c5a9f51be20",
        "nccl": None,
        "devices": [{"name": "CUDA0"}],
        "env": {},
        "installed_at": None,
        "paths": {"llama-server": "/opt/llama/llama-server", "ggml-rpc-server": "/opt/llama/ggml-rpc-server"},
        "problems": [],
        **more,
    }


def shard(rank: int, nodes: int = 2, gpus: list[str] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "rank": rank,
        "nodes": nodes,
        "revision": "0123456789abcdef",
        "gpus": gpus or [],
        "leader_port": 29500,
        "http_port": 8000,
        "stage": "running",
        "ready": True,
        "files_sha256": {},
        "unit": {"manager": "systemd", "active": True},
        **more,
    }


def profile(**more: Any) -> dict[str, Any]:
    return {"engine": "sim", "model_path": "/models/glm", "tp": 8, "pp": 2, "nodes": 2, "gpus_per_node": 8, **more}


def hosts(count: int = 2, **more: Any) -> dict[str, Any]:
    return {f"n{number}": node(number, **more) for number in range(1, count + 1)}


def request(
    facts: dict[str, Any] | None = None,
    wanted: Any = None,
    options: Any = None,
    inputs: dict[str, dict[str, Any]] | None = None,
    replica: Any = "glm",
    **more: Any,
) -> Request:
    """A request over `facts` (host -> facts). `inputs`: host -> other fields of HostInput."""
    facts = hosts() if facts is None else facts
    return Request(
        replica=replica,
        profile=profile() if wanted is None else wanted,
        hosts=tuple(HostInput(name, found, **(inputs or {}).get(name, {})) for name, found in facts.items()),
        options=options or {},
        **more,
    )


def plan(*arguments: Any, **more: Any) -> dict[str, Any]:
    return build_plan(request(*arguments, **more))


def good(*arguments: Any, **more: Any) -> dict[str, Any]:
    """A plan that must have no faults."""
    found = plan(*arguments, **more)
    assert not found["faults"], found["faults"]
    return found


def faults(*arguments: Any, **more: Any) -> list[tuple[str | None, str]]:
    """(host, field) of every fault; a plan with faults has no shards, and each says what was seen and wanted."""
    found = plan(*arguments, **more)
    assert found["faults"] and not found["shards"] and found["leader"] is None and found["fingerprint"] is None, found
    assert all(fault["seen"] and fault["wanted"] for fault in found["faults"])
    return [(fault["host"], fault["field"]) for fault in found["faults"]]


def changed(data: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A deep copy with one value replaced: `gpus.0.memory.total_mib`. With KeyError semantics for what is not there, but for the last part."""
    result = copy.deepcopy(data)
    at: Any = result
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in parents:
        at = at[part]
    at[last] = value
    return result
