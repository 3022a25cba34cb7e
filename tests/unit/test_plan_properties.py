# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whatever people and broken hosts write, the plan answers with faults: it never raises, never guesses an order, never touches its input."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

import facts
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ansible_collections.rankzero.inference.plugins.plugin_utils import node_report
from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Fault
from ansible_collections.rankzero.inference.plugins.plugin_utils.plan import Request, build_plan
from ansible_collections.rankzero.inference.plugins.plugin_utils.tables import plan_text

NASTY = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 70000),
    st.integers(),
    st.floats(),
    st.text(max_size=6),
    st.just({}),
    st.just([]),
    st.just([None]),
    st.just([[]]),
    st.just([{}]),
    st.just({"a": None}),
    st.sampled_from(
        [
            "",
            "8",
            "x y",
            "a\nb",
            "a\0b",
            "%s",
            "$HOME",
            "'",
            "²",
            "\ud800",
            "--port",
            "../..",
            "fe80::1%eth0",
            "0.0.0.0/0",
            "10.0.0.1",
            "nvl:x",
            "none",
            ",",
            "GPU-0001-0000",
        ]
    ),
    st.lists(st.one_of(st.none(), st.integers(), st.text(max_size=3)), max_size=2),
    st.dictionaries(st.one_of(st.text(max_size=3), st.integers()), st.integers(), max_size=2),
)


def llama_profile(**more: Any) -> dict[str, Any]:
    return facts.profile(
        engine="llamacpp", adapters=[{"name": "sql", "path": "/adapters/sql.gguf"}], args=["--ctx-size", "4096"], env={"NCCL_DEBUG": "WARN"}, **more
    )


def rack(number: int) -> dict[str, Any]:
    """A tray of an NVLink rack, with all that an IMEX daemon, a topology and an nccl.conf add to facts."""
    nodes = [{"host": f"10.0.0.{other}", "name": None, "status": "ready", "version": "580.95.05", "unconnected": []} for other in (1, 2)]
    domain = {"kind": "nvlink", "id": "11111111-2222-4333-8444-555555555555", "clique": 2, "state": "completed", "health": "healthy"}
    found = facts.node(number, gpus=2, hcas=2, hostname_resolves_to=["127.0.1.1"])
    found["gpus"] = [
        facts.gpu(number, index, interconnect_domain=domain, health={"state": "warning", "reasons": ["ECC will be off"]}, compute_mode="exclusive_process")
        for index in (0, 1)
    ]
    found["gpus"][0]["memory"] = {"model": "coherent", "total_mib": 81559, "used_mib": 3000, "reserved_mib": 551, "unattributed_mib": 3000}
    found["topology"]["gpu_hca"] = {gpu["uuid"]: {"mlx5_0": "PIX", "mlx5_1": "SYS"} for gpu in found["gpus"]}
    found["limits"]["imex"] = {
        "service": "running",
        "channels": [0],
        "nodes": ["10.0.0.1", "10.0.0.2"],
        "domain": {"status": "up", "ready": True, "nodes": nodes},
    }
    found["host"].update(os={"id": "ubuntu", "version": "24.04"}, errors={"boot_id": "not there"}, memory_available_mib=1000)
    found["limits"]["shm"] = {"size_mib": 64, "free_mib": 1}
    found["limits"]["nccl_conf"] = {"/etc/nccl.conf": {"NCCL_IB_TIMEOUT": "22"}}
    found["interfaces"].append({"name": "eno9", "kind": "physical", "up": True, "carrier": True, "addresses": [f"10.0.0.{number + 50}/24"], "master": None})
    return found


STARTS = [
    facts.request(
        {f"n{number}": rack(number) for number in (1, 2)},
        facts.profile(tp=2, gpus_per_node=2),
        {"replica_fabric": "nvl:11111111-2222-4333-8444-555555555555/2,roce:10.21.0.0/16"},
    ),
    facts.request(
        {f"n{number}": facts.node(number, gpus=2, hcas=2) for number in (1, 2)},
        facts.profile(tp=2, gpus_per_node=2, args=["--max-model-len", "1k"], env={"A": "b"}, quantization="fp8"),
        {"replica_fabric": "", "replica_http_port": "8000", "replica_leader": ""},
    ),
    facts.request(
        {f"n{number}": facts.minimal(number, gpus=2) for number in (1, 2, 3)},
        facts.profile(tp=2, gpus_per_node=2),
        {"replica_fabric": "ib:fe80000000000000", "replica_leader_port": 29600},
    ),
    facts.request(
        {
            f"n{number}": facts.node(number, gpus=2, shards={"glm": facts.shard(number % 2, gpus=[f"GPU-{number:04d}-0000"]), "other": facts.shard(0)})
            for number in (1, 2)
        },
        llama_profile(tp=2, gpus_per_node=2),
        {"replica_http_host": "0.0.0.0", "replica_http_port": 8001, "replica_leader": "n2"},
        replica="glm",
    ),
    facts.request(
        {
            f"n{number}": facts.node(number, gpus=2, hcas=1, engines={"vllm": [facts.build(path="/opt/vllm/bin/vllm", paths={}, nccl="2.29.7")]})
            for number in (1, 2)
        },
        facts.profile(engine="vllm", tp=2, gpus_per_node=2, adapters=[{"name": "sql", "path": "/adapters/sql"}]),
        {"replica_fabric": "blue", "replica_fabrics": {"blue": {"hcas": ["mlx5_0"]}}},
    ),
    facts.request(
        {f"n{number}": facts.node(number, gpus=2, hcas=1, engines={"sglang": [facts.build(path="/opt/sglang/bin/python", paths={})]}) for number in (1, 2)},
        facts.profile(engine="sglang", tp=2, gpus_per_node=2, args=["--mem-fraction-static", "0.8"]),
        {"replica_fabric": "a", "replica_fabrics": {"a": {"hosts": {"n*": {"networks": ["10.21.0.0/16"]}}}}},
        key_digest="k",
    ),
    facts.request(
        {"n1": facts.node(1, gpus=0)}, "small", profiles={"small": {"engine": "sim", "model_path": "/models/glm", "gpus_per_node": "0", "threads": 4}}
    ),
]


@pytest.mark.parametrize("number", range(len(STARTS)))
def test_the_starting_points_are_good_plans(number: int) -> None:
    assert build_plan(STARTS[number])["faults"] == []


def spots(value: Any) -> list[tuple[Any, ...]]:
    """Paths of every value inside, outermost first."""
    children = list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    return [()] + [(key, *rest) for key, item in children for rest in spots(item)]


def replaced(value: Any, path: tuple[Any, ...], by: Any) -> Any:
    if not path:
        return by
    result = copy.copy(value)
    result[path[0]] = replaced(value[path[0]], path[1:], by)
    return result


def removed(value: Any, path: tuple[Any, ...]) -> Any:
    if len(path) == 1:
        result = copy.copy(value)
        del result[path[0]]
        return result
    return replaced(value, path[:1], removed(value[path[0]], path[1:]))


@st.composite
def mangled(draw: st.DrawFn) -> Request:
    request = draw(st.sampled_from(STARTS))
    whole = {
        "facts": {host.name: host.facts for host in request.hosts},
        "profile": request.profile,
        "profiles": request.profiles,
        "options": dict(request.options),
        "replica": request.replica,
    }
    for _time in range(draw(st.integers(1, 3))):
        part = draw(st.sampled_from(["facts", "facts", "profile", "profiles", "options", "replica"]))
        path = draw(st.sampled_from([path for path in spots(whole) if path and path[0] == part and path != ("facts",)]))
        if draw(st.integers(0, 4)) == 0 and len(path) > 2:
            whole = removed(whole, path)
        elif draw(st.integers(0, 4)) == 0 and path[0] != "facts":
            whole = replaced(
                whole,
                path[:1],
                {**whole[path[0]], draw(st.sampled_from(["replica_fabrics", "dp", "x", "nodes"])): draw(NASTY)}
                if isinstance(whole[path[0]], dict)
                else draw(NASTY),
            )
        else:
            whole = replaced(whole, path, draw(NASTY))
    hosts = tuple(
        dataclasses.replace(host, facts=whole["facts"][host.name], rank=draw(st.one_of(st.none(), NASTY)) if draw(st.integers(0, 9)) == 0 else host.rank)
        for host in request.hosts
    )
    return dataclasses.replace(request, hosts=hosts, profile=whole["profile"], profiles=whole["profiles"], options=whole["options"], replica=whole["replica"])


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
@given(mangled(), st.randoms(use_true_random=False))
def test_a_mangled_request_gives_a_plan_or_faults(request_: Request, random: Any) -> None:
    before = copy.deepcopy(request_)
    plan = build_plan(request_)
    assert repr(request_) == repr(before)
    again = list(request_.hosts)
    random.shuffle(again)
    assert build_plan(dataclasses.replace(request_, hosts=tuple(again))) == plan
    assert all(node_report.report(host.name, host.facts).startswith(host.name) for host in request_.hosts), "and the report on such facts is one too"
    faults = [Fault(**fault) for fault in plan["faults"]]
    assert faults == sorted(faults, key=Fault.sort_key) and len(set(faults)) == len(faults)
    assert all(fault.seen and fault.wanted and fault.seen.isprintable() for fault in faults)
    assert all(fault.host for fault in faults if fault.field.startswith("inference_node")), "what is wrong with facts is said of a host"
    if faults:
        assert plan["shards"] == {} and plan["leader"] is None and plan["fingerprint"] is None
    else:
        assert (
            plan["shards"]
            and plan["leader"]["host"] in plan["shards"]
            and sorted(shard["rank"] for shard in plan["shards"].values()) == list(range(len(plan["shards"])))
        )
        for shard in plan["shards"].values():
            for launch in shard["launches"]:
                assert list(launch["env"]) == sorted(launch["env"]) and set(launch["why"]) >= set(launch["env"])
                texts = [*launch["args"], launch["path"], *launch["env"], *launch["env"].values()]
                assert all(isinstance(text, str) and not set(text) & set("\n\0\r") for text in texts)
                assert "CUDA_VISIBLE_DEVICES" in launch["env"] and launch["env"]["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    json.dumps(plan).encode()
    plan_text(plan).encode("utf-8", "strict")
