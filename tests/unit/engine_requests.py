# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Requests for plans of vLLM, SGLang and llama.cpp over hosts that have a build of each."""

from __future__ import annotations

from typing import Any

import facts

KEY_DIGEST = "0" * 64
PROGRAMS = {"vllm": ("vllm", "ray"), "sglang": ("sglang",), "llamacpp": ("llama-server", "ggml-rpc-server")}


def build(engine: str, **more: Any) -> dict[str, Any]:
    paths = {program: f"/opt/{engine}/bin/{program}" for program in PROGRAMS[engine]}
    devices = [{"name": "CUDA0"}] if engine == "llamacpp" else None
    return facts.build(path=paths[PROGRAMS[engine][0]], paths=paths, devices=devices, version="1.2.3", **more)


def hosts(count: int, gpus: int = 8, adapter_rank: int | None = 16, config: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Hosts n1, n2 ... at 10.0.0.1, 10.0.0.2 ... with the model /models/glm and the adapters /adapters/sql and /adapters/fix."""
    found = facts.hosts(count, gpus=gpus, **more)
    for host in found.values():
        host["engines"] = {engine: [build(engine)] for engine in PROGRAMS}
        host["models"]["/models/glm"]["config"] = config
        for name in ("sql", "fix"):
            host["models"][f"/adapters/{name}"] = {
                "exists": True,
                "readable": True,
                "kind": "directory",
                "bytes": 5,
                "files": 2,
                "config": {"r": adapter_rank} if adapter_rank else None,
            }
    return found


ADAPTERS = [{"name": "sql", "path": "/adapters/sql"}, {"name": "fix", "path": "/adapters/fix"}]


def profile(engine: str, nodes: int = 1, **more: Any) -> dict[str, Any]:
    """Eight GPUs a node, split by tensors within a node and by layers over nodes."""
    return {
        "name": "p",
        "engine": engine,
        "model_path": "/models/glm",
        "served_model_name": "glm",
        "nodes": nodes,
        "tp": 8,
        "pp": nodes,
        "gpus_per_node": 8,
        **more,
    }


def good(wanted: dict[str, Any], key: bool = True, found: dict[str, Any] | None = None, **more: Any) -> list[dict[str, Any]]:
    """The shards of a plan without faults, by rank."""
    plan = facts.good(found or hosts(int(wanted["nodes"])), wanted, key_digest=KEY_DIGEST if key else None, **more)
    return sorted(plan["shards"].values(), key=lambda shard: int(shard["rank"]))


def faults(wanted: dict[str, Any], found: dict[str, Any] | None = None, **more: Any) -> list[str]:
    """The fields of a plan's faults, less where the profile is written."""
    seen = facts.faults(found or hosts(int(wanted["nodes"])), wanted, **more)
    return [field.removeprefix("replica_profile.") for _host, field in seen]


def warnings(wanted: dict[str, Any], found: dict[str, Any] | None = None, **more: Any) -> list[str]:
    plan = facts.good(found or hosts(int(wanted["nodes"])), wanted, **more)
    return [str(warning["field"]).removeprefix("replica_profile.") for warning in plan["warnings"]]


def engine(shard: dict[str, Any]) -> dict[str, Any]:
    """A shard's engine launch: the last."""
    found: dict[str, Any] = shard["launches"][-1]
    return found


def value(launch: dict[str, Any], option: str) -> str | None:
    """The one value of an option that the plan passes, or None where it does not pass it."""
    places = [position for position, word in enumerate(launch["args"]) if word == option]
    assert len(places) < 2, f"{option} stands {len(places)} times in {launch['args']}"
    return str(launch["args"][places[0] + 1]) if places else None
