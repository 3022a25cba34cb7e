# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a fixture of kind `machine` says must come of its hosts, held against their facts and against plans of them.

    expect:
      facts:                                  # host: {path into the facts: value}
        gpu-a: {hcas.mlx5_0.usable: false, hcas.mlx5_0.reasons: {has: no LID}, gpus.0.memory.total_mib: null}
      plans:                                  # each a replica of one rank on each of `hosts` (all, where they are not given)
        - about: what is shown
          hosts: [gpu-a, gpu-b]
          gpus: 1                             # per node
          options: {replica_fabric: efa}
          profile: {gpu_class: H100}
          inventory: {gpu-a: {management: 10.0.0.0/24}}     # what the inventory says of a host
          nccl: 2.30.7                        # a vLLM build with this NCCL; without it, the simulator
          env: {"*": {NCCL_IB_DISABLE: "1"}, gpu-a: {NCCL_IB_GID_INDEX: "3"}}    # null: not set
          uses: {gpu-a: [mlx5_0]}             # HCAs that NCCL selects under this environment, by NCCL's own rules
          gids: {gpu-a: {mlx5_0: 3}}          # and the GID that it ends at
          chosen: {gpu-a: [GPU-0001-0]}       # UUIDs
          warnings: [text in one warning]     # `silent: [text in no warning]`
          faults: [text in one fault]         # then there is no plan

In a path, an entry of a list is its number, its name, or, for a GPU, its UUID. A value is equal; `{has: TEXT}` is in its text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible_collections.rankzero.inference.plugins.plugin_utils import nccl
from ansible_collections.rankzero.inference.plugins.plugin_utils.plan import HostInput, Request, build_plan

Facts = dict[str, Any]
PLAN_KEYS = {"about", "hosts", "gpus", "options", "profile", "inventory", "nccl", "env", "uses", "gids", "chosen", "warnings", "silent", "faults"}


def plan(
    hosts: Mapping[str, Facts], gpus: int = 1, options: Facts | None = None, inventory: Mapping[str, Mapping[str, Any]] | None = None, **profile: Any
) -> Facts:
    """A replica of one rank on each host, with C(gpus) GPUs each."""
    wanted = {"engine": "sim", "tp": gpus * len(hosts), "nodes": len(hosts), "gpus_per_node": gpus, "model_path": model(hosts), **profile}
    inputs = tuple(HostInput(name, facts, service_manager="systemd", **(inventory or {}).get(name, {})) for name, facts in hosts.items())
    return build_plan(Request(replica="glm", profile=wanted, hosts=inputs, options=options or {}))


def model(hosts: Mapping[str, Facts]) -> str:
    return str(next(iter(next(iter(hosts.values()))["models"])))


def sentences(findings: list[Facts]) -> list[str]:
    return [f"{finding['host']} {finding['field']}: {finding['seen']}; {finding['wanted']}; {finding['hint']}" for finding in findings]


def check(expect: Mapping[str, Any], hosts: Mapping[str, Facts]) -> None:
    """Assert all of it."""
    assert expect and set(expect) <= {"facts", "plans"} and set(expect.get("facts", {})) <= set(hosts)
    for host, wanted in expect.get("facts", {}).items():
        for path, value in wanted.items():
            found = look(hosts[host], path)
            assert fits(found, value), f"{host} {path}: {found!r} instead of {value!r}"
    for one in expect.get("plans", ()):
        check_plan(one, hosts)


def look(facts: Any, path: str) -> Any:
    """The value at a path."""
    for part in path.split("."):
        if isinstance(facts, list):
            named = [item for item in facts if isinstance(item, dict) and part in (item.get("name"), item.get("uuid"))]
            facts = named[0] if named else facts[int(part)]
        else:
            facts = facts[part]
    return facts


def fits(found: Any, wanted: Any) -> bool:
    return wanted["has"] in str(found) if isinstance(wanted, dict) and set(wanted) == {"has"} else bool(found == wanted)


def check_plan(one: Mapping[str, Any], hosts: Mapping[str, Facts]) -> None:
    assert set(one) <= PLAN_KEYS, sorted(set(one) - PLAN_KEYS)
    about = one["about"]
    chosen = {name: hosts[name] for name in one.get("hosts", hosts)}
    profile = dict(one.get("profile", {}))
    if "nccl" in one:
        build = {"name": "default", "path": "/opt/vllm/bin/vllm", "version": "0.33.0", "fingerprint": "5d0c", "nccl": one["nccl"], "problems": []}
        chosen = {name: {**facts, "engines": {"vllm": [build]}} for name, facts in chosen.items()}
        profile = {"engine": "vllm", **profile}
    found = plan(chosen, one.get("gpus", 1), one.get("options"), one.get("inventory"), **profile)
    faults, warnings = sentences(found["faults"]), sentences(found["warnings"])
    for text in one.get("faults", ()):
        assert any(text in fault for fault in faults), f"{about}: no fault with {text!r} in {faults}"
    assert bool(faults) is bool(one.get("faults")), f"{about}: {faults}"
    for text in one.get("warnings", ()):
        assert any(text in warning for warning in warnings), f"{about}: no warning with {text!r} in {warnings}"
    for text in one.get("silent", ()):
        assert not any(text in warning for warning in warnings), f"{about}: a warning with {text!r} in {warnings}"
    for host, shard in found["shards"].items():
        check_shard(one, host, shard, hosts[host]["hcas"])
    for key in ("env", "uses", "gids", "chosen"):
        assert not faults or key not in one, f"{about}: a refused plan has no {key}"
        assert set(one.get(key, ())) <= {*found["shards"], "*"}, f"{about}: {key} of hosts without a shard"


def check_shard(one: Mapping[str, Any], host: str, shard: Mapping[str, Any], ports: list[Facts]) -> None:
    env, where = shard["launches"][-1]["env"], f"{one['about']}: {host}"
    for name, value in {**one.get("env", {}).get("*", {}), **one.get("env", {}).get(host, {})}.items():
        assert env.get(name) == value, f"{where} {name}: {env.get(name)!r} instead of {value!r}"
    if host in one.get("uses", {}):
        used = [port["name"] for port in nccl.selected_ports(env.get("NCCL_IB_HCA", ""), ports)] if nccl.uses_verbs(env) else []
        assert sorted(used) == sorted(one["uses"][host]), f"{where} uses {used}"
    for name, index in one.get("gids", {}).get(host, {}).items():
        port = next(port for port in ports if port["name"] == name)
        ended = nccl.gid_index(port, env)
        assert ended == index, f"{where} {name}: NCCL ends at index {ended} instead of {index}"
        told = next(hca["gid_address"] for hca in shard["hca_details"] if hca["name"] == name)
        assert told == next(gid["address"] for gid in port["gids"] if gid["index"] == index), f"{where} {name}: run_shard.py compares with {told}"
    if host in one.get("chosen", {}):
        assert shard["gpus"] == one["chosen"][host], f"{where}: GPUs {shard['gpus']}"
