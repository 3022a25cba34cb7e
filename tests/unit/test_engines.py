# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Loading adapters, also of other collections; the state of a replica over its hosts."""

from __future__ import annotations

import pathlib
import re
import sys
import types
from typing import Any

import engine_requests as made
import facts
import pytest

from ansible_collections.rankzero.inference.plugins.plugin_utils import engines, status
from ansible_collections.rankzero.inference.plugins.plugin_utils.engines.base import Engine
from ansible_collections.rankzero.inference.plugins.plugin_utils.engines.sim import Adapter as Simulator
from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Findings

HOME = "ansible_collections.their.collection.plugins.plugin_utils.engines."


def other_collection(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    """A module of somebody else's collection, as an installed one would be."""
    parts = (HOME + name).split(".")
    for length in range(2, len(parts)):
        package = types.ModuleType(".".join(parts[:length]))
        package.__path__ = []
        monkeypatch.setitem(sys.modules, package.__name__, package)
    module = types.ModuleType(HOME + name)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.parametrize("name", engines.BUILT_IN)
def test_built_in_adapters_answer_the_interface(name: str) -> None:
    findings = Findings()
    adapter = engines.load(name, findings)
    assert isinstance(adapter, Engine) and not findings.faults and adapter.name == name
    assert adapter.needs_build is bool(adapter.programs)
    assert set(adapter.grammar.options.values()) >= set(adapter.owned) - {"--api-key"}
    assert set(adapter.owned).isdisjoint(adapter.refused) and all(minimum >= 50 for minimum in adapter.quantizations.values())


def test_an_adapter_of_another_collection_plans_like_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    class Adapter(Simulator):
        name = "theirs"

    other_collection(monkeypatch, "theirs", Adapter=Adapter)
    found = facts.good(wanted=facts.profile(engine="their.collection.theirs"))
    assert found["engine"] == "their.collection.theirs" and found["shards"]["n1"]["labels"]["engine"] == "their.collection.theirs"


def test_the_engine_of_the_documentation_plans_as_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a registered build too, which is a fault with the name that check_engines takes, and no traceback."""
    page = pathlib.Path(__file__).resolve().parents[2] / "docs/adding-an-engine.md"
    printed: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)[0], printed)
    other_collection(monkeypatch, "mine", Adapter=printed["Adapter"])
    wanted = facts.profile(engine="their.collection.mine", nodes=1, tp=2, gpus_per_node=2)
    missing = [fault for fault in facts.plan({"n1": facts.node(1)}, wanted)["faults"] if fault["field"] == "engines.mine"]
    assert [fault["seen"] for fault in missing] == ["registered builds: none"] and "-e engine_name=their.collection.mine " in missing[0]["hint"]


@pytest.mark.parametrize(
    ("contents", "text"),
    [({}, "Adapter"), ({"Adapter": object}, "is not an Engine"), ({"Adapter": 5}, "TypeError"), ({"Adapter": lambda: 1 / 0}, "ZeroDivisionError")],
)
def test_an_adapter_that_is_none_is_a_fault(monkeypatch: pytest.MonkeyPatch, contents: dict[str, Any], text: str) -> None:
    other_collection(monkeypatch, "broken", **contents)
    findings = Findings()
    assert engines.load("their.collection.broken", findings) is None
    assert text in findings.faults[0].seen and "their.collection" in findings.faults[0].wanted


@pytest.mark.parametrize("name", ["", "x", "sims", "a.b", "a.b.c.d", "no.such.engine"])
def test_engines_that_are_not_there(name: str) -> None:
    findings = Findings()
    assert engines.load(name, findings) is None and [fault.field for fault in findings.faults] == ["engine"]


# ---- what readiness knows of each engine


ADAPTERS = [{"name": "sql", "path": "/adapters/sql"}]


@pytest.mark.parametrize(
    ("engine", "nodes", "wanted"),
    [
        # vLLM refuses connections until it serves: a 503 is a dead engine, and no stage of loading. Adapters are models.
        ("vllm", 2, {"warmup_503": False, "falls_back_to_cpu": False, "expect_models": ["glm", "sql"], "adapters_path": None}),
        # SGLang answers 503 while it warms up.
        ("sglang", 2, {"warmup_503": True, "falls_back_to_cpu": False, "expect_models": ["glm", "sql"], "adapters_path": None}),
        # llama-server listens at once and answers 503 while it loads; it runs on the CPU without a word; adapters have numbers and no names.
        ("llamacpp", 1, {"warmup_503": True, "falls_back_to_cpu": True, "expect_models": ["glm"], "adapters_path": "/lora-adapters"}),
    ],
)
def test_the_gate_is_told_how_the_engine_behaves(engine: str, nodes: int, wanted: dict[str, Any]) -> None:
    leader, *others = (shard["ready"] for shard in made.good(made.profile(engine, nodes, adapters=ADAPTERS)))
    assert {key: leader[key] for key in wanted} == wanted and leader["key_protects"] == "/v1/chat/completions" and leader["probe_path"]
    for follower in others:  # whatever answers on a follower's port, as SGLang's dummy does, is not asked; the leader's health is
        assert (follower["serves_http"], follower["url"], follower["expect_models"], follower["key_secret"]) == (False, None, [], None)
        assert follower["leader_health"] == {"url": leader["url"], "path": "/health"}


def test_an_rpc_rank_is_proven_by_the_leaders_connection_to_it() -> None:
    leader, follower = (shard["ready"] for shard in made.good(made.profile("llamacpp", 2)))
    assert leader["accepts_on_port"] is None and isinstance(follower["accepts_on_port"], int)


def test_metrics_are_asked_with_the_key_where_the_engine_has_them_behind_it() -> None:
    """llama-server guards /metrics (llama.cpp#28915), the others do not; asking with the key is right for all of them."""
    for name in ("vllm", "sglang", "llamacpp"):
        adapter = engines.load(name, Findings())
        assert adapter is not None and adapter.metrics_path == "/metrics" and adapter.in_flight_metrics


# ---- adapters of llama.cpp


@pytest.mark.parametrize(
    ("config", "good"),
    [
        ({"architectures": ["llama"], "peft_type": "LORA", "highest_rank": 4}, True),
        ({"architectures": ["qwen2"], "peft_type": "LORA", "highest_rank": 4}, False),
        ({"architectures": ["llama"], "peft_type": "IA3", "highest_rank": None}, False),
        ({"architectures": ["llama"]}, False),
        (None, True),
    ],
)
def test_an_adapter_of_llamacpp_is_a_lora_of_the_models_architecture(config: dict[str, Any] | None, good: bool) -> None:
    found = made.hosts(1, config={"architectures": ["llama"]})
    found["n1"]["models"]["/adapters/sql"]["config"] = config
    wanted = made.profile("llamacpp", adapters=[{"name": "sql", "path": "/adapters/sql"}])
    if good:
        made.good(wanted, found=found)
    else:
        assert made.faults(wanted, found=found) == ["adapters.sql"]


# ---- state over all hosts


def seen(**hosts: Any) -> dict[str, tuple[Any, Any]]:
    return {host: ({"shards": {"glm": record}}, None) for host, record in hosts.items()}


def test_a_whole_replica_is_every_rank_ready_in_one_revision() -> None:
    good = seen(n2=facts.shard(1), n1=facts.shard(0))
    found = status.ranks("glm", good)
    assert [entry["host"] for entry in found] == ["n1", "n2"] and status.whole(found) and "Replica glm: ready" in status.text("glm", found, ["n1", "n2"])
    for change in ({"ready": False}, {"revision": "x"}, {"rank": 0}, {"rank": None}, {"nodes": None}, {"nodes": 3}):
        records = {"n1": {**facts.shard(0), **(change if "nodes" in change else {})}, "n2": {**facts.shard(1), **change}}
        found = status.ranks("glm", seen(**records))
        assert not status.whole(found), change
        status.text("glm", found, ["n1", "n2"])
    assert not status.whole([]) and "no shard on any of 2 host(s)" in status.text("glm", [], ["n1", "n2"])


@pytest.mark.parametrize("known", [None, "x", [], {}, {"shards": []}, {"shards": {"glm": "x"}}, {"shards": {"glm": None}}])
def test_facts_of_any_shape_hide_no_other_host(known: Any) -> None:
    found = status.ranks("glm", {"n1": (known, None), "n2": ({"shards": {"glm": facts.shard(1)}}, None)})
    assert [entry["host"] for entry in found] == ["n2"]
