# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The rules of the plan, one by one: shape, hosts, ranks, GPUs, addresses, ports, model, builds, launches."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import facts
import pytest
from facts import changed, faults, good, gpu, hosts, minimal, node, plan, profile, shard

from ansible_collections.rankzero.inference.plugins.plugin_utils import collection_files, convergence, quantization
from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Fault, report
from ansible_collections.rankzero.inference.plugins.plugin_utils.placement import of_class
from ansible_collections.rankzero.inference.plugins.plugin_utils.plan import build_plan
from ansible_collections.rankzero.inference.plugins.plugin_utils.tables import plan_text, table

ONE = {"tp": 2, "pp": 1, "nodes": 1, "gpus_per_node": 2}


def ranks(found: dict[str, Any]) -> list[str]:
    """Hosts by rank."""
    return [host for host, _shard in sorted(found["shards"].items(), key=lambda item: item[1]["rank"])]


def env(found: dict[str, Any], host: str) -> dict[str, str]:
    return dict(found["shards"][host]["launches"][-1]["env"])


def with_fault(found: dict[str, Any], host: str | None, field: str) -> dict[str, Any]:
    return next(fault for fault in found["faults"] if fault["host"] == host and fault["field"] == field)


# ---- the request


@pytest.mark.parametrize("name", ["", None, "GLM", "a_b", "-a", "a-", "a" * 41, "a/b", "a\n", 5, ["glm"]])
def test_names_that_no_service_can_have(name: Any) -> None:
    assert faults(replica=name) == [(None, "replica_name")]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"replica_http_port": "x"}, "replica_http_port"),
        ({"replica_http_port": 0}, "replica_http_port"),
        ({"replica_http_port": 65536}, "replica_http_port"),
        ({"replica_leader_port": True}, "replica_leader_port"),
        ({"replica_leader_port": 8000}, "replica_leader_port"),
        ({"replica_http_host": "localhost"}, "replica_http_host"),
        ({"replica_http_host": "x.sock"}, "replica_http_host"),
        ({"replica_http_host": "0.0.0.0,::"}, "replica_http_host"),
        ({"replica_http_host": "192.0.2.77"}, "replica_http_host"),
        ({"replica_leader": "n9"}, "replica_leader"),
        ({"replica_leader": ["n1"]}, "replica_leader"),
        ({"replica_fabrics": []}, "replica_fabrics"),
        ({"replica_fabrik": "x"}, "replica_fabrik"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], field: str) -> None:
    found = faults(options=options)
    assert {name for _host, name in found} == {field}


@pytest.mark.parametrize("options", ["x", [], 5, None])
def test_options_of_another_type(options: Any) -> None:
    found = build_plan(dataclasses.replace(facts.request(), options=options))
    assert [fault["field"] for fault in found["faults"]] == ["options"]


def test_survey_strings_for_options() -> None:
    found = good(
        options={
            "replica_http_port": "8100",
            "replica_leader_port": "29700",
            "replica_leader": "",
            "replica_fabric": "",
            "replica_fabrics": "",
            "replica_http_host": "",
        },
        inputs={"n1": {"rank": "1"}, "n2": {"rank": ""}},
    )
    assert found["leader"] == {"host": "n2", "address": "10.0.0.2", "port": 29700, "url": "http://10.0.0.2:8100"}


def test_a_limit_that_cuts_the_replica_and_everything_else_that_is_wrong_come_together() -> None:
    found = faults(
        {"n1": node(1, gpus=4), "n2": node(2, ports_in_use=[29500], models={"/models/glm": {"exists": True, "readable": False, "error": "closed to others"}})},
        profile(tp=8, typo=1),
        {"replica_http_port": "x", "replica_leader_port": 29500, "replica_leader": "n2"},
        absent_hosts=("n3",),
    )
    assert found == [(None, "hosts"), (None, "replica_http_port"), (None, "replica_profile.typo"), ("n1", "gpus"), ("n2", "model_path"), ("n2", "ports_in_use")]


def test_a_slice_of_a_job_is_refused() -> None:
    """Its inventory lacks the other hosts, so a replica of one node would come up once in each slice."""
    assert faults(sliced_job="Inference - deploy") == [(None, "hosts")]


@pytest.mark.parametrize("bad", [None, {}, "", "x", [], 5, {"schema": 2}, {"schema": "1"}, {"schema": True}, {"gpus": []}])
def test_hosts_without_facts_are_named_and_the_others_still_judged(bad: Any) -> None:
    assert faults({"n1": bad, "n2": changed(node(2), "models./models/glm.exists", False)}) == [("n1", "inference_node"), ("n2", "model_path")]


def test_an_unknown_engine() -> None:
    found = plan(wanted=profile(engine="vlm"))
    assert [fault["field"] for fault in found["faults"]] == ["engine"] and "llamacpp" in found["faults"][0]["wanted"]
    for name in ("no.such.engine", "a.b", "ansible_collections.rankzero.inference"):
        assert faults(wanted=profile(engine=name)) == [(None, "engine")]


# ---- facts that a person wrote


def test_minimal_facts_are_enough() -> None:
    found = good({f"n{number}": minimal(number) for number in (1, 2)})
    assert found["fabric"] == "ib:fe80000000000000" and env(found, "n2")["NCCL_IB_HCA"] == "=mlx5_0:1" and found["shards"]["n2"]["interface"] == "eth0"
    assert found["shards"]["n1"]["gpu_details"][0]["index"] is None
    plan_text(found)


WRONG = [
    ("gpus", "x"),
    ("gpus", {"a": 1}),
    ("gpus.0", None),
    ("gpus.0", "GPU"),
    ("gpus.0.memory", []),
    ("gpus.0.memory.total_mib", "81559"),
    ("gpus.0.memory.total_mib", -1),
    ("gpus.0.uuid", ["x"]),
    ("gpus.0.uuid", "a,b"),
    ("gpus.0.uuid", "a\nb"),
    ("gpus.1.uuid", "GPU-0001-0000"),
    ("gpus.0.index", "0"),
    ("gpus.0.index", 1.5),
    ("gpus.0.health", "ok"),
    ("gpus.0.health.reasons", "x"),
    ("gpus.0.processes", {}),
    ("gpus.0.processes", [5]),
    ("gpus.0.processes", [{"used_mib": "9"}]),
    ("gpus.0.partition", True),
    ("gpus.0.interconnect_domain", "nvl"),
    ("gpus.0.model", {"name": "x"}),
    ("gpus.0.compute_capability", [9, 0]),
    ("hcas", "mlx5_0"),
    ("hcas.0", 5),
    ("hcas.0.name", None),
    ("hcas.0.name", 5.5j),
    ("hcas.0.port", "1"),
    ("hcas.0.usable", "yes"),
    ("hcas.0.fabrics", "ib:x"),
    ("hcas.0.gids", {}),
    ("hcas.0.gids.0", "x"),
    ("hcas.0.gids.0.index", None),
    ("hcas.0.gids.0.index", "3"),
    ("hcas.0.gids.0.address", "x"),
    ("hcas.0.gids.0.network", "10.0.0.0/99"),
    ("hcas.0.netdevs", "eth1"),
    ("interfaces", {"lo": {}}),
    ("interfaces.0", "eth0"),
    ("interfaces.1.name", ""),
    ("interfaces.1.addresses", "10.0.0.1/24"),
    ("interfaces.1.addresses", [5, None]),
    ("interfaces.1.up", "up"),
    ("routes", "default"),
    ("routes.0", 5),
    ("routes.0.metric", "x"),
    ("routes.0.destination", None),
    ("default_route", "mgmt0"),
    ("hostname_resolves_to", "10.0.0.1"),
    ("limits", []),
    ("limits.ephemeral_ports", 32768),
    ("limits.ephemeral_ports", ["a", "b"]),
    ("limits.imex", "up"),
    ("limits.imex.domain", "up"),
    ("drivers", "nvidia"),
    ("drivers.nvidia", "580"),
    ("drivers.nvidia.driver", []),
    ("engines", []),
    ("engines.llamacpp", {}),
    ("engines.llamacpp", ["x"]),
    ("models", ["/models/glm"]),
    ("models./models/glm", "yes"),
    ("models./models/glm.exists", "yes"),
    ("models./models/glm.bytes", "10"),
    ("models./models/glm.weight_bytes", []),
    ("models./models/glm.config", "x"),
    ("ports_in_use", 22),
    ("ports_in_use", ["ssh"]),
    ("ports_in_use", [70000]),
    ("ports_in_use", [None]),
    ("ports_in_use", [{"pid": 5}]),
    ("ports_in_use", [[22]]),
    ("shards", []),
    ("shards", {"glm": "rank 0"}),
    ("shards", {"glm": {"rank": "0"}}),
    ("shards", {"glm": {"rank": -1}}),
    ("shards", {"glm": {"gpus": "x"}}),
    ("cordoned", "yes"),
    ("cordoned", True),
    ("host", "n1"),
    ("host.python", "/usr/bin/python3"),
    ("host.service_manager", ["systemd"]),
    ("topology", []),
    ("topology.gpu_hca", []),
    ("topology.gpu_hca", {"x": 5}),
]


@pytest.mark.parametrize(("path", "value"), WRONG)
def test_a_fact_of_another_type_is_a_fault_that_names_host_and_key(path: str, value: Any) -> None:
    found = faults({"n1": changed(node(1, hcas=2), path, value), "n2": node(2, hcas=2)})
    wanted = "inference_node." + path.replace("./models/glm", "!").split(".")[0]
    keys = [field for host, field in found if host == "n1" and field.startswith("inference_node.")]
    assert keys and all(key.startswith(wanted.replace("!", "")) for key in keys), found


@pytest.mark.parametrize(
    "change",
    [
        {"name": "a", "path": None},
        {"path": "llama-server"},
        {"env": {"A B": "x"}},
        {"env": {"A": "x\ny"}},
        {"env": ["A=1"]},
        {"devices": "CUDA0"},
        {"devices": []},
        {"problems": ["it is gone"]},
        {"problems": "x"},
        {"paths": []},
    ],
)
def test_a_build_that_cannot_be_used(change: dict[str, Any]) -> None:
    wanted = profile(engine="llamacpp", **ONE)
    found = faults({"n1": node(1, engines={"llamacpp": [facts.build(**change)]})}, wanted)
    assert all(host == "n1" and "engines.llamacpp" in field for host, field in found)


# ---- hosts and ranks


def test_too_few_hosts_and_too_few_gpus() -> None:
    assert faults({"n1": node(1)}) == [(None, "replica_hosts")]
    assert faults({}) == [(None, "replica_hosts")]
    found = plan(hosts(gpus=7))
    assert [(fault["host"], fault["rank"], fault["field"]) for fault in found["faults"]] == [("n1", 0, "gpus"), ("n2", 1, "gpus")]
    assert found["faults"][0]["seen"].startswith("7 free of 7") and found["faults"][0]["wanted"] == "8 GPUs" and found["faults"][0]["hint"]


def test_hosts_in_natural_order_of_names() -> None:
    assert ranks(good({name: node(number) for number, name in enumerate(("n10", "n9", "n", "n2"), 1)}, profile(pp=4, nodes=4))) == ["n", "n2", "n9", "n10"]


@pytest.mark.parametrize(
    ("current", "inputs", "leader", "wanted"),
    [
        ({}, {}, None, ["n1", "n2", "n3"]),
        ({"n1": 2, "n2": 0, "n3": 1}, {}, None, ["n2", "n3", "n1"]),
        ({"n3": 0}, {}, None, ["n3", "n1", "n2"]),
        ({"n2": 0, "n3": 0}, {}, None, ["n2", "n1", "n3"]),
        ({"n1": 0, "n2": 1, "n3": 2}, {"n3": {"rank": 0}}, None, ["n3", "n2", "n1"]),
        ({"n1": 0}, {}, "n2", ["n2", "n1", "n3"]),
        ({"n1": 7}, {"n2": {"rank": "2"}}, "n3", ["n3", "n1", "n2"]),
    ],
)
def test_ranks_are_stated_then_sticky_then_natural(current: dict[str, int], inputs: dict[str, Any], leader: str | None, wanted: list[str]) -> None:
    found = {name: node(int(name[1]), shards={"glm": shard(current[name], 3)} if name in current else {}) for name in ("n1", "n2", "n3")}
    assert ranks(good(found, profile(pp=3, nodes=3), {"replica_leader": leader}, inputs)) == wanted


@pytest.mark.parametrize(
    ("inputs", "leader", "host", "field"),
    [
        ({"n1": {"rank": 0}, "n2": {"rank": 0}}, None, "n2", "replica_leader"),
        ({"n1": {"rank": 1}, "n2": {"rank": 1}}, None, "n2", "replica_rank"),
        ({"n1": {"rank": 0}}, "n2", "n2", "replica_leader"),
        ({"n1": {"rank": 1}}, "n1", "n1", "replica_rank"),
        ({"n1": {"rank": 2}}, None, "n1", "replica_rank"),
        ({"n1": {"rank": "x"}}, None, "n1", "replica_rank"),
        ({"n1": {"rank": -1}}, None, "n1", "replica_rank"),
        ({"n1": {"rank": [0]}}, None, "n1", "replica_rank"),
    ],
)
def test_ranks_that_contradict_each_other(inputs: dict[str, Any], leader: str | None, host: str, field: str) -> None:
    assert faults(inputs=inputs, options={"replica_leader": leader}) == [(host, field)]


def test_a_pool_gives_the_hosts_that_fit_and_says_why_not_the_others() -> None:
    pool = hosts(5)
    pool["n1"] = changed(pool["n1"], "cordoned", {"by": "ann", "reason": "fan", "at": None})
    pool["n2"] = changed(pool["n2"], "gpus.0.processes", [{"pid": 7, "used_mib": 900, "kind": "compute", "name": "python", "user": "bob", "shard": None}])
    found = good(pool)
    assert ranks(found) == ["n3", "n4"] and set(found["not_chosen"]) == {"n1", "n2", "n5"} and found["leaving"] == []
    assert (
        "cordoned by ann: fan" in found["not_chosen"]["n1"]
        and "pid 7 python of bob (900 MiB)" in found["not_chosen"]["n2"]
        and "not needed" in found["not_chosen"]["n5"]
    )
    assert [host for host, field in faults({name: pool[name] for name in ("n1", "n2", "n3")})] == [None, "n1", "n2"]


def test_a_key_that_is_not_given_does_not_open_a_replica_that_has_one() -> None:
    pool = {name: changed(found, "shards", {"glm": {**shard(number), "has_api_key": number == 0}}) for number, (name, found) in enumerate(hosts(2).items())}
    assert faults(pool) == [(None, "replica_api_key")]
    assert good(pool, options={"replica_without_api_key": "true"})["shards"]["n1"]["secrets"] == ["tie_key"]
    assert good({name: changed(found, "shards.glm.has_api_key", None) for name, found in pool.items()})["shards"], "a revision of before tells nothing"


def test_what_holds_for_many_hosts_of_a_pool_is_one_line_of_the_table() -> None:
    text = plan_text(good(hosts(40)))
    assert "  Hosts that were not chosen:\n    n3, n4, n5, n6, n7, n8, n9, n10 and 30 more: not needed: 2 other hosts fit" in text


def test_a_pool_with_kinds_that_may_be_meant_apart_is_not_guessed() -> None:
    pool = {**hosts(2), **{f"a{number}": node(number + 10) for number in (1, 2)}}
    for name in ("a1", "a2"):
        pool[name]["gpus"] = [gpu(int(name[1]) + 10, index, model="NVIDIA A100-SXM4-40GB", total_mib=40960, capability="8.0") for index in range(8)]
    assert faults(pool) == [(None, "replica_hosts")]
    assert ranks(good(pool, profile(gpu_class="a100"))) == ["a1", "a2"] and ranks(good(pool, profile(gpu_class="H100"))) == ["n1", "n2"]
    assert good(pool, profile(gpu_class="A100"))["pool"] == "A100" and good(hosts())["pool"] == "NVIDIA H100 80GB HBM3"
    assert ranks(good(pool, options={"replica_leader": "a2"})) == ["a2", "a1"]
    assert ranks(good(pool, inputs={"a1": {"rank": 1}})) == ["a2", "a1"]
    assert ranks(good({**pool, "a1": changed(pool["a1"], "shards", {"glm": shard(0)})})) == ["a1", "a2"]
    assert faults({"n1": pool["n1"], "a1": pool["a1"]})[0] == ("n1", "gpus")


def test_a_pool_over_two_fabrics_takes_the_named_one() -> None:
    pool = {f"n{number}": node(number, hcas=1) for number in (1, 2)} | {f"m{number}": node(number + 10) for number in (1, 2)}
    for name in ("m1", "m2"):
        pool[name]["hcas"] = [facts.hca(int(name[1]) + 10, 0, network=2)]
    assert faults(pool) == [(None, "replica_hosts")]
    assert ranks(good(pool, options={"replica_fabric": "roce:10.21.0.0/16"})) == ["n1", "n2"]
    named = {"blue": {"networks": ["10.22.0.0/16"]}, "red": {"networks": "10.21.0.0/16"}}
    assert ranks(good(pool, options={"replica_fabric": "blue", "replica_fabrics": named})) == ["m1", "m2"]
    assert ranks(good(pool, options={"replica_fabric": "red", "replica_fabrics": named})) == ["n1", "n2"]


def test_a_replica_that_moves_leaves_its_old_host() -> None:
    pool = {name: changed(found, "shards", {"glm": shard(number)}) for number, (name, found) in enumerate(hosts(2).items())}
    pool["n1"]["cordoned"] = {"by": "ann", "reason": "fan"}
    pool["n3"] = node(3)
    found = good(pool)
    assert found["shards"]["n2"]["rank"] == 1 and found["leader"]["host"] == "n3" and found["leaving"] == ["n1"]
    assert "leaving    n1" in plan_text(found)


def test_staying_is_preferred_to_the_natural_order() -> None:
    pool = hosts(4)
    for rank, name in enumerate(("n4", "n3")):
        pool[name]["shards"] = {"glm": shard(rank)}
    found = good(pool)
    assert ranks(found) == ["n4", "n3"] and found["leaving"] == []


# ---- GPUs


@pytest.mark.parametrize(
    ("model", "gpu_class", "fits"),
    [
        ("NVIDIA H100 80GB HBM3", "H100", True),
        ("NVIDIA H100 80GB HBM3", "h100 80gb", True),
        ("NVIDIA H100 80GB HBM3", "nvidia h100", True),
        ("NVIDIA A100-SXM4-80GB", "A10", False),
        ("NVIDIA A10", "A100", False),
        ("NVIDIA A10G", "A10", False),
        ("NVIDIA A100-SXM4-80GB", "a100 sxm4", True),
        ("NVIDIA GH200 480GB", "H200", False),
        (None, "H100", False),
        ("NVIDIA L4", "L4.", False),
        ("NVIDIA RTX PRO 6000 (x)", "6000 (x", True),
    ],
)
def test_classes_of_gpus(model: str | None, gpu_class: str, fits: bool) -> None:
    assert of_class({"model": model}, gpu_class) is fits


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"uuid": None}, "cannot be identified"),
        ({"health": {"state": "lost", "reasons": ["fell off the bus"]}}, "is lost: fell off the bus"),
        ({"health": {"state": "not_permitted"}}, "is not_permitted"),
        ({"health": {"state": "unhealthy"}}, "is unhealthy"),
        ({"partition": {"kind": "mig"}}, "MIG"),
        ({"partition": {"kind": None, "mode_current": True}}, "MIG"),
        ({"compute_mode": "prohibited"}, "prohibited"),
        ({"model": "NVIDIA T400"}, "is no H100: NVIDIA T400"),
        ({"processes": [{"pid": 5, "used_mib": None, "kind": "compute"}]}, "pid 5  of unknown user (unknown memory)"),
        ({"processes": [{"pid": 5, "used_mib": 65, "kind": "graphics", "name": "Xorg", "user": "root"}]}, "pid 5 Xorg of root (65 MiB)"),
        ({"processes": [{"pid": 5, "used_mib": 900, "kind": "compute", "shard": "other/0"}]}, "shard other/0 (pid 5, 900 MiB)"),
        ({"processes": [{"pid": 5, "used_mib": 900, "kind": "compute", "shard": "glm-2/0"}]}, "shard glm-2/0"),
        ({"memory": {"total_mib": 81559, "unattributed_mib": 70000}}, "70000 MiB held by processes that the host does not list"),
    ],
)
def test_gpus_that_cannot_be_given(change: dict[str, Any], reason: str) -> None:
    found = plan({"n1": {**node(1), "gpus": [gpu(1, 0), {**gpu(1, 1), **change}]}}, profile(**ONE, gpu_class="H100"))
    assert [(fault["host"], fault["field"]) for fault in found["faults"]] == [("n1", "gpus")] and reason in found["faults"][0]["seen"]
    assert found["faults"][0]["hint"].startswith("Free the GPUs")


def test_gpus_that_share_a_reason_are_told_together_and_so_are_hosts() -> None:
    """With their UUIDs no two hosts would say the same, and a pool of the wrong class would fill the screen."""
    found = plan({f"n{number}": node(number) for number in (1, 2, 3)}, profile(nodes=3, tp=3, gpu_class="H200"))
    faults = [Fault(**fault) for fault in found["faults"] if fault["field"] == "gpus"]
    count = len(node(1)["gpus"])
    numbers = "GPU " + ", ".join(map(str, range(count))) + (": each" if count > 1 else "")
    assert {fault.seen for fault in faults} == {f"0 free of {count}: {numbers} is no H200: {gpu(1, 0)['model']}"}
    assert len(report(faults, "Faults").splitlines()) == 2 and "3 hosts (n1, n2, n3)" in report(faults, "Faults")
    one = {"n1": {**node(1), "gpus": [gpu(1, 0), {**gpu(1, 1), "model": "NVIDIA T400"}]}}
    (fault,) = plan(one, profile(**ONE, gpu_class="H100"))["faults"]
    assert f"GPU 1 ({gpu(1, 1)['uuid']}) is no H100" in fault["seen"], "one among others has its UUID"
    one["n1"]["gpus"][1].update(index=None, uuid=None, pci_bdf="0000:1d:00.0")
    (fault,) = plan(one, profile(**ONE, gpu_class="H100"))["faults"]
    assert "GPU 0000:1d:00.0 cannot be identified" in fault["seen"], "one that the driver does not list has no number"


def test_another_class_of_gpus_is_not_to_be_freed() -> None:
    found = plan({"n1": node(1)}, profile(**ONE, gpu_class="H200"))
    assert [fault["hint"] for fault in found["faults"]] == ["Correct gpu_class, or take another host."]


@pytest.mark.parametrize(
    "change",
    [
        {"processes": [{"pid": 5, "used_mib": 64, "kind": "compute"}]},
        {"processes": [{"pid": 5, "used_mib": None, "kind": "graphics"}]},
        {"processes": [{"pid": 5, "used_mib": 70000, "kind": "compute", "shard": "glm/0"}]},
        {"health": {"state": "warning", "reasons": ["x"]}},
        {"health": {}},
        {"memory": {"total_mib": 81559, "unattributed_mib": 600}},
        {"memory": {"total_mib": 81559, "unattributed_mib": None}},
        {"compute_capability": None},
    ],
)
def test_gpus_that_can(change: dict[str, Any]) -> None:
    good({"n1": {**node(1), "gpus": [gpu(1, 0), {**gpu(1, 1), **change}]}}, profile(**ONE))


def test_gpus_of_a_replica_that_is_stopped_are_still_its_own() -> None:
    deployed = {"other": shard(1, gpus=["GPU-0001-0001"], stage="stopped", leader_port=None, http_port=None)}
    found = plan({"n1": node(1, gpus=2, shards=deployed)}, profile(**ONE))
    assert "is given to shard other/1, which is deployed here" in found["faults"][0]["seen"]
    assert good({"n1": node(1, gpus=3, shards=deployed)}, profile(**ONE))["shards"]["n1"]["gpus"] == ["GPU-0001-0000", "GPU-0001-0002"]


def test_the_gpus_of_a_replica_are_of_one_type() -> None:
    mixed = node(2)
    mixed["gpus"][3] = gpu(2, 3, total_mib=96000)
    found = plan({"n1": node(1), "n2": mixed})
    assert [(fault["host"], fault["rank"], fault["field"]) for fault in found["faults"]] == [("n2", 1, "gpus")] and "96000 MiB" in found["faults"][0]["seen"]
    mixed["gpus"][3] = gpu(2, 3, capability=None)
    let_through = good({"n1": node(1), "n2": mixed})
    assert [(warning["host"], warning["field"]) for warning in let_through["warnings"]] == [("n2", "gpus")] and "capability unknown" in let_through["warnings"][
        0
    ]["seen"]
    assert not good(changed_all(hosts(), "compute_capability", None))["warnings"]


def changed_all(pool: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    for found in pool.values():
        for one in found["gpus"]:
            one[key] = value
    return pool


def test_gpus_are_sticky_then_near_the_hcas_then_in_pci_order() -> None:
    found = node(1, gpus=4, hcas=1)
    found["gpus"].reverse()
    wanted = profile(**ONE)
    assert good({"n1": found}, wanted)["shards"]["n1"]["gpus"] == ["GPU-0001-0000", "GPU-0001-0001"]
    found["topology"] = {"gpu_hca": {"GPU-0001-0003": {"mlx5_0": "PIX"}, "GPU-0001-0002": {"mlx5_0": "SYS"}, "GPU-0001-0001": {"mlx5_0": "NODE"}}}
    assert good({"n1": found}, wanted)["shards"]["n1"]["gpus"] == ["GPU-0001-0001", "GPU-0001-0003"]
    found["shards"] = {"glm": shard(0, 1, ["GPU-0001-0002", "GPU-0001-0000"])}
    assert good({"n1": found}, wanted)["shards"]["n1"]["gpus"] == ["GPU-0001-0000", "GPU-0001-0002"]
    assert env(good({"n1": found}, wanted), "n1")["CUDA_VISIBLE_DEVICES"] == "GPU-0001-0000,GPU-0001-0002"


@pytest.mark.parametrize("state", ["driver_not_loaded", "version_mismatch", "library_missing", "no_gpu", "not_permitted", "gpus_missing"])
def test_a_driver_that_does_not_work_is_said(state: str) -> None:
    found = plan({"n1": node(1, gpus=0, drivers={"nvidia": {"state": state, "message": "a message", "hint": "Do this."}})}, profile(**ONE))
    fault = with_fault(found, "n1", "drivers.nvidia")
    assert fault["seen"] == "%s: a message" % state and fault["hint"] == "Do this."
    assert len(found["faults"]) == 1, "there is nothing to free"
    silent = {**gpu(1, 0), "uuid": None}
    found = plan({"n1": node(1, gpus=0, drivers={"nvidia": {"state": "no_gpu", "message": "a message", "hint": None}})}, profile(**ONE))
    assert "take another host" in with_fault(found, "n1", "drivers.nvidia")["hint"]
    if state != "gpus_missing":
        found = plan({"n1": {**node(1, drivers={"nvidia": {"state": state, "message": "a message"}}), "gpus": [silent, silent]}}, profile(**ONE))
        assert [fault["field"] for fault in found["faults"]] == ["drivers.nvidia"]


def test_gpus_that_a_host_does_not_have_are_not_to_be_freed() -> None:
    found = plan({"n1": node(1, gpus=1)}, profile(**ONE))
    assert with_fault(found, "n1", "gpus")["hint"].startswith("Lower gpus_per_node, or take another host")


# ---- addresses


@pytest.mark.parametrize(
    ("change", "inputs", "address", "interface"),
    [
        ({}, {}, "10.0.0.1", "mgmt0"),
        ({}, {"address": "127.0.0.7"}, "127.0.0.7", "lo"),
        ({"interfaces.1.addresses": ["10.0.0.1/24", "fd00::1/64"]}, {"management": "fd00::/64"}, "fd00::1", "mgmt0"),
        ({}, {"management": "10.0.0.0/16"}, "10.0.0.1", "mgmt0"),
        ({}, {"management": "mgmt0"}, "10.0.0.1", "mgmt0"),
        ({"default_route": None}, {}, "10.0.0.1", "mgmt0"),
        ({"default_route": {"interface": "nowhere"}}, {}, "10.0.0.1", "mgmt0"),
        ({"interfaces": [{"name": "lo", "up": True, "addresses": ["127.0.0.1/8"]}]}, {}, "127.0.0.1", "lo"),
    ],
)
def test_where_one_node_is_reached(change: dict[str, Any], inputs: dict[str, Any], address: str, interface: str) -> None:
    found = node(1, gpus=2)
    for path, value in change.items():
        found = changed(found, path, value)
    shard_plan = good({"n1": found}, profile(**ONE), inputs={"n1": inputs})["shards"]["n1"]
    assert (shard_plan["address"], shard_plan["interface"]) == (address, interface)
    variables = shard_plan["launches"][-1]["env"]
    assert (
        variables["NCCL_SOCKET_IFNAME"] == "=" + interface
        and variables["GLOO_SOCKET_IFNAME"] == variables["TP_SOCKET_IFNAME"] == interface
        and variables["VLLM_HOST_IP"] == address
    )


@pytest.mark.parametrize(
    ("change", "inputs", "field"),
    [
        ({}, {"address": "10.0.0.9"}, "replica_address"),
        ({}, {"address": "n1"}, "replica_address"),
        ({"interfaces.1.up": False}, {"address": "10.0.0.1"}, "replica_address"),
        ({"interfaces.1.addresses": ["fe80::1/64"]}, {"address": "fe80::1"}, "replica_address"),
        ({}, {"management": "10.9.0.0/16"}, "replica_management"),
        ({}, {"management": "eth"}, "replica_management"),
        ({"interfaces.1.up": False}, {"management": "mgmt0"}, "replica_management"),
        ({"interfaces.1.addresses": ["10.0.0.1/24", "10.0.0.2/24"]}, {"management": "mgmt0"}, "replica_management"),
        ({"interfaces.1.addresses": ["10.0.0.1/24", "10.0.0.2/24"]}, {"management": "10.0.0.0/24"}, "replica_management"),
        (
            {
                "default_route": None,
                "interfaces": [{"name": name, "up": True, "addresses": [address]} for name, address in (("a", "10.0.0.1/24"), ("b", "10.1.0.1/24"))],
            },
            {},
            "replica_management",
        ),
    ],
)
def test_addresses_that_cannot_be_meant(change: dict[str, Any], inputs: dict[str, Any], field: str) -> None:
    found = node(1, gpus=2)
    for path, value in change.items():
        found = changed(found, path, value)
    assert faults({"n1": found}, profile(**ONE), inputs={"n1": inputs}) == [("n1", field)]


@pytest.mark.parametrize(
    "interface",
    [
        {"name": "docker0"},
        {"name": "veth12"},
        {"name": "usb0"},
        {"name": "eth9", "up": False},
        {"name": "eth9", "carrier": False},
        {"name": "eth9", "master": "bond0"},
        {"name": "eth9", "addresses": ["169.254.3.4/16"]},
        {"name": "eth9", "addresses": []},
        {"name": "eth9", "addresses": ["x"]},
    ],
)
def test_interfaces_that_lead_to_no_other_host_are_no_choice(interface: dict[str, Any]) -> None:
    found = node(1, gpus=2, default_route=None)
    found["interfaces"].append({"up": True, "addresses": ["10.5.0.1/24"], **interface})
    assert good({"n1": found}, profile(**ONE))["shards"]["n1"]["interface"] == "mgmt0"


def two_nics(number: int) -> dict[str, Any]:
    found = node(number)
    found["interfaces"].append({"name": "data0", "up": True, "addresses": [f"10.8.{number}.1/24"]})
    found["routes"] = [
        {"destination": "default", "interface": "mgmt0", "metric": 100},
        {"destination": "10.8.0.0/16", "interface": "data0", "metric": 0},
        {"destination": "10.8.1.1", "interface": "data0"},
    ]
    return found


def test_the_others_interface_leads_to_the_leader() -> None:
    found = good({"n1": two_nics(1), "n2": two_nics(2)}, inputs={"n1": {"management": "data0"}})
    assert [found["shards"][host]["interface"] for host in ("n1", "n2")] == ["data0", "data0"] and found["leader"]["address"] == "10.8.1.1"
    assert [shard_plan["interface"] for shard_plan in good({"n1": two_nics(1), "n2": two_nics(2)})["shards"].values()] == ["mgmt0", "mgmt0"]
    assert faults({"n1": two_nics(1), "n2": {**two_nics(2), "routes": []}}) == [("n2", "routes")]
    assert faults({"n1": node(1), "n2": {**node(1), "gpus": node(2)["gpus"]}}) == [("n2", "replica_address")]


def test_a_name_that_resolves_to_loopback_is_said_and_ipv6_is_written_in_brackets() -> None:
    found = good({"n1": node(1), "n2": node(2, hostname_resolves_to=["127.0.1.1"])})
    assert [(warning["host"], warning["field"]) for warning in found["warnings"]] == [("n2", "hostname_resolves_to")]
    six = {
        name: changed(changed(node(number), "interfaces.1.addresses", [f"fd00::{number}/64"]), "routes", [{"destination": "fd00::/64", "interface": "mgmt0"}])
        for number, name in ((1, "n1"), (2, "n2"))
    }
    found = good(six)
    assert found["leader"]["url"] == "http://[fd00::1]:8000" and env(found, "n2")["NCCL_SOCKET_FAMILY"] == "AF_INET6"


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://10.0.0.1:8000"), ("::", "http://10.0.0.1:8000"), ("127.0.0.1", "http://127.0.0.1:8000"), ("10.0.0.1", "http://10.0.0.1:8000")],
)
def test_where_the_server_listens(host: str, url: str) -> None:
    found = good(options={"replica_http_host": host})
    assert found["leader"]["url"] == url and host in found["shards"]["n1"]["launches"][-1]["args"]


# ---- ports


def entry(port: int, **more: Any) -> dict[str, Any]:
    return {"port": port, "address": "0.0.0.0", "pid": 77, "process": "nginx", "shard": None, "listening": True, **more}


@pytest.mark.parametrize(
    "used",
    [
        [8000],
        [entry(8000)],
        [entry(8000, address=None, pid=None)],
        [entry(8000, address="10.0.0.1")],
        [entry(8000, address="::")],
        [entry(8000, address="::ffff:10.0.0.1")],
        [entry(8000, shard="other/0")],
        [entry(8000, address="*")],
    ],
)
def test_a_port_that_is_taken(used: list[Any]) -> None:
    assert faults({"n1": node(1, ports_in_use=used), "n2": node(2)}) == [("n1", "ports_in_use")]
    good({"n1": node(1), "n2": node(2, ports_in_use=used)})  # only rank 0 serves HTTP


@pytest.mark.parametrize("used", [[entry(8000, address="10.9.9.9")], [entry(8000, shard="glm/0")], [entry(8001)], [entry(8000, pid=None, listening=False)]])
def test_a_port_that_is_free_or_our_own(used: list[Any]) -> None:
    good({"n1": node(1, ports_in_use=used, shards={"glm": shard(0)}), "n2": node(2, shards={"glm": shard(1)})})


def test_the_leader_port_is_free_everywhere_and_stays() -> None:
    assert (
        good({"n1": node(1, ports_in_use=[29500, 29501]), "n2": node(2, ports_in_use=[29502], shards={"other": shard(1, leader_port=29503, http_port=29504)})})[
            "leader"
        ]["port"]
        == 29510
    )
    pool = {
        f"n{number}": node(number, shards={"glm": shard(number - 1, leader_port=29777)}, ports_in_use=[entry(29777, shard="glm/%d" % (number - 1))])
        for number in (1, 2)
    }
    assert good(pool)["leader"]["port"] == 29777
    pool["n2"]["ports_in_use"] = [entry(29777)]
    assert good(pool)["leader"]["port"] == 29500
    pool["n1"]["ports_in_use"] = [entry(29777, pid=None, listening=False)]
    pool["n2"]["ports_in_use"] = []
    assert good(pool)["leader"]["port"] == 29777  # bound by our own engine while it loads
    assert faults({"n1": node(1, ports_in_use=list(range(29500, 30000))), "n2": node(2)})[0] == (None, "replica_leader_port")
    assert faults({"n1": node(1, ports_in_use=[29600]), "n2": node(2)}, options={"replica_leader_port": 29600}) == [("n1", "ports_in_use")]


def test_several_replicas_on_one_host_do_not_collide() -> None:
    deployed = {"first": shard(0, gpus=[f"GPU-0001-{index:04d}" for index in range(4)], stage="stopped")}
    pool = {"n1": node(1, shards=deployed), "n2": node(2, shards={"first": shard(1, gpus=[f"GPU-0002-{index:04d}" for index in range(4)])})}
    wanted = profile(tp=4, gpus_per_node=4)
    assert faults(pool, wanted) == [("n1", "ports_in_use")]
    second = good(pool, wanted, {"replica_http_port": 8001})
    assert second["leader"]["port"] == 29510 and second["shards"]["n1"]["gpus"] == [f"GPU-0001-{index:04d}" for index in range(4, 8)]
    assert faults(pool, wanted, {"replica_http_port": 8001, "replica_leader_port": 29500}) == [("n1", "ports_in_use")]
    assert good(pool, wanted, {"replica_leader": "n2"})["leader"]["url"] == "http://10.0.0.2:8000"  # the first replica's rank 1 does not listen there


def test_a_port_of_the_ephemeral_range_is_said() -> None:
    assert [(warning["host"], warning["field"]) for warning in good(options={"replica_http_port": 40000})["warnings"]] == [("n1", "port")]
    for odd in ([], [5], [1, 2, 3], None):
        good({"n1": changed(node(1), "limits.ephemeral_ports", odd), "n2": node(2)})


# ---- the model


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"exists": False}, "model_path"),
        ({"readable": False, "error": "closed to others"}, "model_path"),
        ({"bytes": 5}, "model_path"),
        ({"files": 9}, "model_path"),
    ],
)
def test_models_that_cannot_be_loaded(change: dict[str, Any], field: str) -> None:
    found = changed(node(2), "models", {"/models/glm": {**node(2)["models"]["/models/glm"], **change}})
    assert faults({"n1": node(1), "n2": found}) == [("n2", field)]


@pytest.mark.parametrize("folder", ["/etc/rankzero/x", "/var/lib/rankzero", "/run/rankzero/glm/a/b"])
def test_a_model_in_a_directory_that_goes_with_the_replica_is_refused(folder: str) -> None:
    there = {folder: node(1)["models"]["/models/glm"]}
    assert faults({"n1": node(1, models=there), "n2": node(2, models=there)}, profile(model_path=folder)) == [("n1", "model_path"), ("n2", "model_path")]
    beside = {"/var/lib/rankzero-models": node(1)["models"]["/models/glm"]}
    good({"n1": node(1, models=beside), "n2": node(2, models=beside)}, profile(model_path="/var/lib/rankzero-models"))


def test_adapters_are_looked_for_on_every_rank_in_order() -> None:
    adapters = [{"name": "z", "path": "/a/z"}, {"name": "a", "path": "/a/a"}]
    there = {path: {"exists": True, "readable": True} for path in ("/models/glm", "/a/z", "/a/a")}
    found = good({f"n{number}": node(number, models=there) for number in (1, 2)}, profile(adapters=adapters))
    args = found["shards"]["n1"]["launches"][-1]["args"]
    assert args[args.index("--lora-modules") + 1 :][:2] == ["z=/a/z", "a=/a/a"] and found["shards"]["n1"]["ready"]["expect_models"] == ["inline", "z", "a"]
    del there["/a/a"]
    assert [warning["field"] for warning in good({f"n{number}": node(number, models=there) for number in (1, 2)}, profile(adapters=adapters))["warnings"]] == [
        "adapters.a",
        "adapters.a",
    ]
    missing = {**there, "/a/a": {"exists": False}}
    gone = {"n1": node(1, models=missing), "n2": node(2, models=there)}
    assert faults(gone, profile(adapters=adapters)) == [("n1", "adapters.a")]
    hint = with_fault(plan(gone, profile(adapters=adapters)), "n1", "adapters.a")["hint"]
    assert "the adapter" in hint and "source" in hint and "model" not in hint


def test_of_a_path_that_is_refused_nothing_is_to_be_looked_at() -> None:
    found = plan({f"n{number}": node(number) for number in (1, 2)}, profile(model_path="models/glm", adapters=[{"name": "a", "path": "a"}]))
    assert [fault["field"] for fault in found["faults"]] == ["replica_profile.adapters[0].path", "replica_profile.model_path"], found["faults"]
    assert not [warning for warning in found["warnings"] if "was not looked at" in warning["seen"]], found["warnings"]


def configured(config: Any, capability: str | None = "9.0", count: int = 2) -> dict[str, Any]:
    pool = hosts(count)
    for found in pool.values():
        found["models"]["/models/glm"]["config"] = config
    return changed_all(pool, "compute_capability", capability)


def test_attention_heads_divide_by_tp() -> None:
    good(configured({"num_attention_heads": 64}))
    assert faults(configured({"num_attention_heads": 60})) == [(None, "tp")]
    assert faults(configured({"text_config": {"num_attention_heads": 60}})) == [(None, "tp")]
    for odd in (
        {"num_attention_heads": "60"},
        {"num_attention_heads": None},
        {"text_config": "x"},
        {"quantization_config": "fp8"},
        {"quantization_config": {"quant_method": 5}},
        {},
    ):
        good(configured(odd))


@pytest.mark.parametrize(
    ("capability", "wanted", "config", "ok"),
    [
        ("8.0", {"quantization": "mxfp4"}, {}, True),
        ("7.5", {"quantization": "mxfp4"}, {}, False),
        ("7.5", {"args": ["-q", "mxfp4"]}, {}, False),
        ("7.5", {"args": ["--quantization=mxfp4"]}, {}, False),
        ("7.5", {"args": ["-qmxfp4"]}, {}, False),
        ("7.5", {}, {"quantization_config": {"quant_method": "mxfp4"}}, False),
        (None, {"quantization": "mxfp4"}, {}, True),
        ("9", {"quantization": "mxfp4"}, {}, True),
        ("12.1", {"quantization": "nvfp4_per_token"}, {}, True),
        ("9.0", {"quantization": "NVFP4_per_token"}, {}, False),
    ],
)
def test_a_quantizations_minimum_against_every_gpu(capability: str | None, wanted: dict[str, Any], config: Any, ok: bool) -> None:
    found = plan(configured(config, capability), profile(**wanted))
    assert bool(found["shards"]) is ok and len(found["faults"]) == (0 if ok else 16)
    unknown = [warning for warning in found["warnings"] if "unknown compute capability" in warning["seen"]]
    assert len(unknown) == (16 if capability in (None, "9") else 0)


@pytest.mark.parametrize(
    ("text", "value"),
    [("9.0", 90), ("12.1", 121), ("10.3", 103), ("9", None), ("", None), (None, None), ("9.0.1", None), ("²." + "0", None), ("9.10", None), ("x.y", None)],
)
def test_capabilities(text: str | None, value: int | None) -> None:
    assert quantization.capability(text) == value
    assert value is None or quantization.written(value) == text


def test_the_expected_memory() -> None:
    def expected(weight_bytes: int | None, **more: Any) -> int:
        pool = hosts()
        for found in pool.values():
            found["models"]["/models/glm"]["weight_bytes"] = weight_bytes
        return int(good(pool, profile(**more))["shards"]["n1"]["gpu_details"][0]["expected_mib"])

    assert expected(None) == expected(0) == expected(1000) == 1024
    assert expected(160 * 1024**3) == 8192 and expected(160 * 1024**3, gpu_memory_min_mib=500) == 500
    assert {name for _host, name in faults(wanted=profile(gpu_memory_min_mib=90000))} == {"gpu_memory_min_mib"}
    pool = hosts()
    for found in pool.values():
        found["models"]["/models/glm"]["weight_bytes"] = 2 * 1024**4
    refused = [fault for fault in plan(pool)["faults"] if fault["field"] == "gpu_memory"]
    assert len(refused) == 16 and "131072 MiB (weights 131072)" in refused[0]["wanted"] and refused[0]["rank"] == 0
    assert len(good(pool, profile(allow_memory_overcommit=True))["warnings"]) == 16, "let through by the operator, and said"


def test_a_unified_gpu_shares_what_its_host_has_available() -> None:
    def warned(available: int | None, **more: Any) -> list[str]:
        memory = {"model": "unified", "total_mib": 124610, "used_mib": None, "reserved_mib": None, "unattributed_mib": None}
        found = node(1, gpus=1)
        found["gpus"] = [gpu(1, 0, memory=memory, **more)]
        found["host"]["memory_available_mib"] = available
        found["models"]["/models/glm"]["weight_bytes"] = 60 * 1024**3
        one = good({"n1": found}, profile(nodes=1, tp=1, pp=1, gpus_per_node=1))
        return [warning["seen"] for warning in one["warnings"] if warning["field"] == "host.memory_available_mib"]

    assert warned(115000) == warned(None) == []
    assert warned(40000) == ["GPU 0 shares the host's memory, of which 40000 MiB are available"]
    own = {"pid": 9, "used_mib": 70000, "kind": "compute", "name": "python", "user": "rankzero", "shard": "glm/0"}
    assert warned(40000, processes=[own]) == [], "the running replica gives back what it holds"


@pytest.mark.parametrize(
    ("engine", "args", "fits"),
    [
        ("vllm", ["--max-model-len", "8k"], True),
        ("vllm", ["--max_model_len=1M"], False),
        ("vllm", ["--max-model-len", "auto"], True),
        ("sglang", ["--context-length", "1048576"], False),
        ("llamacpp", ["-c", "65536"], True),
        ("llamacpp", ["-c", "524288"], False),
        ("llamacpp", ["-c", "524288", "-ctk", "q4_0"], True),
    ],
)
def test_the_cache_at_the_asked_length_must_fit_too(engine: str, args: list[str], fits: bool) -> None:
    """One sequence of the asked length is counted, as the engine's own option spells it."""
    pool = {"n1": node(1, engines={engine: [facts.build()]})}
    pool["n1"]["models"]["/models/glm"].update(
        weight_bytes=40 * 1024**3, config={"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192}
    )
    found = plan(pool, profile(engine=engine, **ONE, args=args))
    assert ([fault["field"] for fault in found["faults"]] == []) is fits, found["faults"]
    if not fits:
        assert "KV cache" in found["faults"][0]["wanted"]


# ---- builds and services


def test_one_build_is_taken_and_several_need_a_name() -> None:
    wanted = {"engine": "llamacpp", **ONE}
    two = {"llamacpp": [facts.build(name="a"), facts.build(name="b", version="0.7.0")]}
    assert faults({"n1": node(1, engines=two)}, profile(**wanted)) == [("n1", "engines.llamacpp")]
    for name in ("b", "0.7.0"):
        assert good({"n1": node(1, engines=two)}, profile(**wanted, engine_version=name))["shards"]["n1"]["build"]["name"] == "b"
    assert faults({"n1": node(1, engines=two)}, profile(**wanted, engine_version="c")) == [("n1", "engines.llamacpp")]
    found = plan({"n1": node(1, engines={})}, profile(**wanted))
    assert "check_engines" in with_fault(found, "n1", "engines.llamacpp")["hint"]


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("engines.llamacpp.0.fingerprint", "other", "engines.llamacpp.fingerprint"),
        ("engines.llamacpp.0.version", "0.5", "engines.llamacpp.version"),
        ("engines.llamacpp.0.nccl", "2.26.2", "engines.llamacpp.nccl"),
        ("engines.llamacpp.0.python", {"path": "/opt/v/bin/python", "version": "3.11.2"}, "engines.llamacpp.python"),
        ("engines.llamacpp.0.versions", {"ray": "2.59.0", "torch": "2.13.0"}, "engines.llamacpp.versions.ray"),
        ("engines.llamacpp.0.programs_sha256", {"llama-server": "a", "ggml-rpc-server": "c"}, "engines.llamacpp.programs_sha256.ggml-rpc-server"),
        ("drivers.nvidia.driver", "570.1", "drivers.nvidia.driver"),
    ],
)
def test_what_must_be_equal_on_all_ranks(path: str, value: Any, field: str) -> None:
    """A build's parts tell what differs: Ray and Python that do refuse to join (gpustack#2691), an RPC server of another build aborts (llama.cpp#26392)."""
    parts = {
        "nccl": "2.27.7",
        "python": {"path": "/opt/x/bin/python", "version": "3.12.4"},
        "versions": {"ray": "2.60.0", "torch": "2.13.0"},
        "programs_sha256": {"llama-server": "a", "ggml-rpc-server": "b"},
    }
    found = {f"n{number}": node(number, engines={"llamacpp": [facts.build(**parts)]}) for number in (1, 2)}
    good(found, profile(engine="llamacpp"))
    assert faults({"n1": found["n1"], "n2": changed(found["n2"], path, value)}, profile(engine="llamacpp")) == [("n2", field)]


DIGEST = "a" * 64
SQL = {"name": "sql", "path": "/adapters/sql"}


def with_adapter(host: int, **more: Any) -> dict[str, Any]:
    found = node(host)
    found["models"]["/adapters/sql"] = {"exists": True, "readable": True, "kind": "directory", "bytes": 5, "files": 2, "content_sha256": DIGEST, **more}
    return found


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/models/glm", "bytes", 1001),
        ("/models/glm", "files", 4),
        ("/models/glm", "digest", "other"),
        ("/adapters/sql", "digest", "other"),
        ("/adapters/sql", "content_sha256", "b" * 64),
    ],
)
def test_every_rank_has_the_same_files(path: str, field: str, value: Any) -> None:
    found = {f"n{number}": with_adapter(number, digest="one") for number in (1, 2)}
    for host in found.values():
        host["models"]["/models/glm"]["digest"] = "one"
    wanted = profile(engine="sim", adapters=[SQL])
    good(found, wanted)
    found["n2"]["models"][path][field] = value
    fault = with_fault(plan(found, wanted), "n2", "model_path" if path == "/models/glm" else "adapters.sql")
    assert "as on n1" in fault["wanted"] and fault["rank"] == 1
    found["n2"]["models"][path][field] = None
    good({**found, "n2": found["n2"]} if field not in ("bytes", "files") else {"n1": with_adapter(1), "n2": with_adapter(2)}, wanted)


@pytest.mark.parametrize(
    ("adapter", "seen", "fault"),
    [
        ({"sha256": DIGEST}, {}, None),
        ({"sha256": "b" * 64}, {}, "sha256 " + "b" * 64),
        ({"sha256": "b" * 64}, {"fetched": {"sha256": "b" * 64, "content_sha256": DIGEST}}, None),
        (
            {"sha256": "b" * 64},
            {"fetched": {"sha256": "b" * 64, "content_sha256": "c" * 64, "source": "https://h/x"}},
            "the content that came from https://h/x",
        ),
        ({"source": "hf://o/x", "revision": "1" * 40}, {"fetched": {"revision": "1" * 40, "content_sha256": DIGEST}}, None),
        ({"source": "hf://o/x", "revision": "1" * 40}, {"fetched": {"revision": "2" * 40, "content_sha256": DIGEST}}, "revision " + "1" * 40),
        ({"source": "hf://o/x", "revision": "1" * 40}, {}, "revision " + "1" * 40),
    ],
)
def test_an_adapter_is_what_the_profile_says(adapter: dict[str, Any], seen: dict[str, Any], fault: str | None) -> None:
    found, wanted = {"n1": with_adapter(1), "n2": with_adapter(2, **seen)}, profile(engine="sim", adapters=[{**SQL, **adapter}])
    if fault is None:
        good({"n1": with_adapter(1, **seen), "n2": found["n2"]}, wanted)
    else:
        assert with_fault(plan(found, wanted), "n2", "adapters.sql")["wanted"] == fault


def test_an_adapter_that_the_deploy_will_fetch_is_no_fault_before() -> None:
    missing = {"exists": False, "readable": False, "bytes": None, "files": None, "content_sha256": None}
    found = {f"n{number}": with_adapter(number, **missing) for number in (1, 2)}
    adapter = {**SQL, "source": "hf://o/x", "revision": "1" * 40}
    warned = good(found, profile(engine="sim", adapters=[adapter]))["warnings"]
    assert [(one["host"], one["field"]) for one in warned if "fetches" in one["hint"]] == [("n1", "adapters.sql"), ("n2", "adapters.sql")]
    assert faults(found, profile(engine="sim", adapters=[SQL])) == [("n1", "adapters.sql"), ("n2", "adapters.sql")]


def test_where_an_adapter_comes_from_does_not_decide_how_it_runs() -> None:
    found = {f"n{number}": with_adapter(number) for number in (1, 2)}
    one = good(found, profile(engine="sim", adapters=[{**SQL, "sha256": DIGEST}]))
    other = good(found, profile(engine="sim", adapters=[{**SQL, "sha256": DIGEST, "source": "https://h/x.tar"}]))
    assert one["fingerprint"] == other["fingerprint"]


def test_service_managers_and_users() -> None:
    assert faults({"n1": changed(node(1), "host.service_manager", None), "n2": node(2)}) == [("n1", "host.service_manager")]
    assert faults(inputs={"n2": {"service_manager": "runit"}}) == [("n2", "host.service_manager")]
    assert faults({"n1": changed(node(1), "host.python.executable", "python3"), "n2": node(2)}) == [("n1", "host.python.executable")]
    assert faults({"n1": changed(node(1), "host.python.executable", "/opt/$x/python3"), "n2": node(2)}) == [("n1", "host.python.executable")]
    for user in ("", "a b", "-x", "a%", "a\nb"):
        assert faults(inputs={"n1": {"user": user}}) == [("n1", "replica_user")]
    found = good(inputs={"n1": {"service_manager": "supervisor"}, "n2": {"user": "svc"}})
    assert [found["shards"][host]["user"] for host in ("n1", "n2")] == ["root", "svc"] and found["shards"]["n1"]["service_manager"] == "supervisor"


# ---- launches


def test_the_leader_serves_and_only_it_has_the_key() -> None:
    found = good(key_digest="d" * 64)
    leader, other = (found["shards"][host] for host in ("n1", "n2"))
    assert leader["serves_http"] and not other["serves_http"] and leader["ready"]["url"] == "http://10.0.0.1:8000" and other["ready"]["url"] is None
    assert (
        leader["secrets"] == ["api_key", "tie_key"]
        and other["secrets"] == ["tie_key"]
        and leader["launches"][-1]["secret_env"] == ["VLLM_API_KEY"]
        and other["launches"][-1]["secret_env"] == []
    )
    assert "VLLM_API_KEY" not in leader["launches"][-1]["env"] and "d" * 64 not in json.dumps(found)
    assert (
        "--headless" in other["launches"][-1]["args"]
        and other["launches"][-1]["wait_for_leader_port"] == 29500
        and leader["launches"][-1]["wait_for_leader_port"] is None
    )
    launch = leader["launches"][-1]
    assert (launch["name"], launch["path"]) == ("sim-engine", "/usr/bin/python3") and other["ready"]["expect_models"] == []
    assert found["fingerprint"] != good()["fingerprint"] != good(key_digest="e")["fingerprint"]


def test_the_profiles_environment_wins_and_both_values_are_said() -> None:
    found = good(wanted=profile(env={"NCCL_IB_DISABLE": "0", "MINE": "a b"}, threads=3))
    variables = env(found, "n1")
    assert variables["NCCL_IB_DISABLE"] == "0" and variables["MINE"] == "a b" and variables["OMP_NUM_THREADS"] == "3"
    assert [(warning["host"], warning["field"], warning["seen"], warning["wanted"]) for warning in found["warnings"]] == [
        ("n1", "env.NCCL_IB_DISABLE", "0", "1"),
        ("n2", "env.NCCL_IB_DISABLE", "0", "1"),
    ]
    assert list(variables) == sorted(variables) and set(found["shards"]["n1"]["launches"][-1]["why"]) >= set(variables)


def test_a_cpu_profile_has_threads_and_sees_no_gpu() -> None:
    wanted = {"engine": "llamacpp", "model_path": "/m.gguf", "gpus_per_node": 0, "threads": 6}
    found = good({"n1": node(1, gpus=2, engines={"llamacpp": [facts.build(devices=[])]})}, wanted)
    launch = found["shards"]["n1"]["launches"][-1]
    assert launch["env"]["CUDA_VISIBLE_DEVICES"] == "" and launch["env"]["OMP_NUM_THREADS"] == "6" and launch["env"]["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert launch["args"][launch["args"].index("--threads") + 1] == "6" and found["pool"] == "cpu" and not found["shards"]["n1"]["ready"]["gpu_evidence"]
    assert "CPU only" in plan_text(found)


def test_llamacpp_over_nodes_waits_for_its_rpc_ranks_and_only_rank_0_needs_the_model() -> None:
    pool = {"n1": node(1, models={"/m.gguf": {"exists": True, "readable": True}}), "n2": node(2, models={"/m.gguf": {"exists": False}})}
    found = good(pool, profile(engine="llamacpp", model_path="/m.gguf"), key_digest="x")
    server, rpc = found["shards"]["n1"]["launches"][-1], found["shards"]["n2"]["launches"][-1]
    assert (
        server["wait_for_ranks"] == [{"rank": 1, "address": "10.0.0.2", "port": 29500, "ports": list(range(29500, 29510))}]
        and rpc["name"] == "ggml-rpc-server"
        and rpc["secret_env"] == []
    )
    args = server["args"]
    assert args.index("--rpc") < args.index("--device") and args[args.index("--device") + 1].split(",") == [f"RPC{number}" for number in range(8)] + [
        f"CUDA{number}" for number in range(8)
    ]
    assert found["shards"]["n2"]["ready"]["accepts_on_port"] == 29500 and found["shards"]["n2"]["listen_ports"][0]["port"] == 29500
    assert faults(
        {**pool, "n1": {**pool["n2"], "gpus": pool["n1"]["gpus"], "interfaces": pool["n1"]["interfaces"]}}, profile(engine="llamacpp", model_path="/m.gguf")
    ) == [("n1", "model_path")]
    assert ("n2", "model_path") not in faults({"n1": pool["n1"], "n2": pool["n2"], "n3": None}, profile(engine="llamacpp", model_path="/m.gguf", nodes=3, pp=3))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"adapters": [{"name": "a", "path": "/a,b"}]}, "adapters[0].path"),
        ({"adapters": [{"name": "a", "path": "/a:b"}]}, "adapters[0].path"),
        ({"quantization": "awq"}, "quantization"),
    ],
)
def test_what_llama_server_cannot_take(change: dict[str, Any], field: str) -> None:
    assert faults(wanted=profile(engine="llamacpp", **change)) == [(None, "replica_profile." + field)]


def test_pool_fabric_and_fingerprint_are_carried_to_every_shard() -> None:
    found = good(hosts(hcas=2), {**profile(), "name": "glm-2x8"})
    assert found["schema"] == 1 and found["fabric"] == "roce:10.21.0.0/16" and len(found["fingerprint"]) == 16
    for shard_plan in found["shards"].values():
        assert shard_plan["fingerprint"] == found["fingerprint"]
        assert shard_plan["labels"] == {"profile": "glm-2x8", "pool": "NVIDIA H100 80GB HBM3", "fabric": "roce:10.21.0.0/16", "engine": "sim", "replica": "glm"}


def test_the_fingerprint_moves_with_what_decides_and_with_nothing_else() -> None:
    base = good()["fingerprint"]
    noise = hosts()
    noise["n1"] = changed(changed(noise["n1"], "gathered_at", "later"), "gpus.0.memory.used_mib", 70000)
    noise["n1"]["ports_in_use"].append({"port": 9100})
    assert good(noise)["fingerprint"] == good({"n2": noise["n2"], "n1": noise["n1"]})["fingerprint"] == base
    moved = [
        good(wanted=profile(args=["--max-model-len", "9"])),
        good(wanted=profile(env={"A": "b"})),
        good(options={"replica_http_port": 8001}),
        good(program_hashes={"run_shard.py": "x"}),
        good(replica="other"),
        good(inputs={"n2": {"root": "/srv"}}),
        good(wanted=profile(ready_timeout=60)),
        good(options={"replica_leader": "n2"}),
    ]
    assert len({base, *(found["fingerprint"] for found in moved)}) == len(moved) + 1


# ---- as an operator reads it


def test_the_plan_as_text() -> None:
    text = plan_text(good(options={"replica_http_port": 40000}))
    assert "endpoint   http://10.0.0.1:40000 (rank 0, n1)" in text and "fabric     none (TCP)" in text and "Warnings (1):" in text
    refused = plan_text(plan(hosts(gpus=1)))
    assert "Refused, nothing was changed. Faults (2):" in refused and "n1 rank 0: gpus: seen 1 free of 1" in refused
    assert plan_text(plan(wanted="x")).startswith("Plan for replica glm: no usable profile")
    assert table(["a", "b"], [[1, None], ["long", [1, 2]], ["", []]]) == "  a     b\n  1     -\n  long  1, 2\n  -     -"


# ---- the tie of the ranks


def test_several_ranks_are_tied_and_a_single_one_is_not() -> None:
    found = good()
    ties = [shard_plan["tie"] for shard_plan in found["shards"].values()]
    assert ties == [{"address": "10.0.0.1", "port": 29400, "secret": "tie_key", "silent_seconds": 20, "run_ports": list(range(29500, 29510))}] * 2
    assert all(
        shard_plan["secrets"] == ["tie_key"] and shard_plan["restart"] == {"limit": 3, "window_seconds": 600, "backoff": [2, 10, 30]}
        for shard_plan in found["shards"].values()
    )
    alone = good({"n1": node(1)}, profile(nodes=1, pp=1))["shards"]["n1"]
    assert alone["tie"] is None and alone["secrets"] == [] and not any(launch["run_args"] or launch["run_env"] for launch in alone["launches"])
    assert "ports" not in alone["listen_ports"][0] and alone["restart"]["limit"] == 3


def test_what_moves_with_the_run_is_what_the_adapter_gives_for_each_port() -> None:
    """An argument of the operator's that is the very port stays."""
    found = good(wanted=profile(args=["--max-model-len", "29500"]))
    for shard_plan in found["shards"].values():
        (launch,) = shard_plan["launches"]
        (moving,) = launch["run_args"]
        assert launch["args"][moving["position"] - 1] == "--master-port" and moving["values"] == [str(port) for port in range(29500, 29510)]
        assert launch["args"].count("29500") == 2 and launch["run_env"] == []
    assert found["shards"]["n2"]["launches"][0]["wait_for_leader"] == {"address": "10.0.0.1", "port": 29500, "ports": list(range(29500, 29510))}
    http, rendezvous = found["shards"]["n1"]["listen_ports"]
    assert "ports" not in http and rendezvous["ports"] == list(range(29500, 29510))


def test_ports_inside_of_texts_and_variables_move_too() -> None:
    server = good(wanted=profile(engine="llamacpp", model_path="/models/glm"))["shards"]["n1"]["launches"][-1]
    (moving,) = server["run_args"]
    assert server["args"][moving["position"] - 1] == "--rpc" and moving["values"][3] == "10.0.0.2:29503"
    found = good(wanted=profile(engine="llamacpp", model_path="/models/glm"), options={"replica_leader_port": 65530})
    assert found["shards"]["n1"]["tie"]["run_ports"] == list(range(65530, 65536))


@pytest.mark.parametrize(
    ("facts", "port"),
    [
        ({"ports_in_use": [29400]}, 29401),
        ({"ports_in_use": [entry(29400, pid=4711)]}, 29401),
        ({"ports_in_use": [entry(29400, shard="other/0")]}, 29401),
        ({"ports_in_use": [entry(29444, pid=4711)], "shards": {"glm": shard(0, tie_port=29444, pids=[4710, 4711])}}, 29444),  # our own run_shard.py
        ({"ports_in_use": [entry(29400, address="10.0.0.77", pid=4711)]}, 29400),  # on another address it is free for us
        ({"ports_in_use": [entry(29444, pid=99)], "shards": {"glm": shard(0, tie_port=29444, pids=[4711])}}, 29400),
        ({"shards": {"other": shard(0, tie_port=29400, run_ports=[29401], http_port=8001, leader_port=29600, gpus=[])}}, 29402),
    ],
)
def test_the_tie_port_is_free_on_the_leader_and_stays(facts: dict[str, Any], port: int) -> None:
    found = good({"n1": node(1, **facts), "n2": node(2, ports_in_use=[29400])}, options={"replica_leader": "n1"})
    assert found["shards"]["n1"]["tie"]["port"] == found["shards"]["n2"]["tie"]["port"] == port


def test_a_stated_tie_port_is_taken_as_it_is_or_a_fault() -> None:
    assert good(options={"replica_tie_port": "29777", "replica_silent_seconds": "7"})["shards"]["n2"]["tie"]["port"] == 29777
    assert faults(options={"replica_tie_port": 8000}) == [(None, "replica_tie_port")]
    assert faults(options={"replica_tie_port": 29505, "replica_leader_port": 29500}) == [(None, "replica_tie_port")]
    assert faults({"n1": node(1, ports_in_use=[29777]), "n2": node(2)}, options={"replica_tie_port": 29777}) == [("n1", "ports_in_use")]
    assert faults(options={"replica_tie_port": 0}) == [(None, "replica_tie_port")] and faults(options={"replica_silent_seconds": 1}) == [
        (None, "replica_silent_seconds")
    ]


def test_the_ports_of_every_run_must_be_free() -> None:
    assert faults({"n1": node(1, ports_in_use=[29606]), "n2": node(2)}, options={"replica_leader_port": 29600}) == [("n1", "ports_in_use")]
    assert good({"n1": node(1, ports_in_use=[29509]), "n2": node(2)})["leader"]["port"] == 29510


def test_ranks_with_different_tie_keys_are_all_written_anew() -> None:
    settled = {"n1": {"reasons": [], "restart": False}, "n2": {"reasons": [convergence.UNPROVEN], "restart": False}}
    same = {"n1": {"tie_id": "a"}, "n2": {"tie_id": "a"}}
    assert convergence.with_tie(settled, same) == settled
    for other in ("b", None):
        found = convergence.with_tie(settled, {**same, "n2": {"tie_id": other}})
        assert all(one["restart"] and convergence.TIE_DIFFERS in one["reasons"] for one in found.values())
    assert convergence.with_tie({"n1": settled["n1"]}, {"n1": {"tie_id": None}})["n1"] == settled["n1"]


def test_a_gpu_that_is_held_is_one_fault_and_not_one_of_the_fabric_on_every_host() -> None:
    """Ports are chosen by their distance to the rank's GPUs. A rank that is short of one must not seem to lack that GPU's rail."""
    found = {f"n{number}": node(number, hcas=8) for number in range(1, 5)}
    for host in found.values():
        for one, port in zip(host["gpus"], host["hcas"]):
            host["topology"]["gpu_hca"][one["uuid"]] = {port["name"]: "PIX"}
    assert plan(found, profile(nodes=4, pp=4))["faults"] == []
    found["n3"]["gpus"][2]["processes"] = [{"pid": 4711, "used_mib": 71000, "name": "python3", "user": "eve", "shard": None, "kind": "compute"}]
    assert faults(found, profile(nodes=4, pp=4)) == [("n3", "gpus")]


def test_a_variable_that_is_almost_one_of_the_roles_is_told() -> None:
    known = collection_files.role_variables()
    assert {"replica_fabric", "replica_become", "replica_names", "replica_model_token", "replica_plan_picture"} <= known
    inputs = {"n1": {"variables": ("replica_fabrik", "replica_http_port", "replica_owner")}, "n2": {"variables": ("replica_fabrik",)}}
    told = [(one["host"], one["field"], one["wanted"]) for one in good(inputs=inputs, known_variables=known)["warnings"] if one["field"].startswith("replica_")]
    assert told == [(None, "replica_fabrik", "replica_fabric")], "once; neither what is known nor what is somebody's own"


def test_a_fabric_that_nobody_has_is_told_although_no_ranks_could_be_placed() -> None:
    assert faults({"n1": node(1)}, options={"replica_fabric": "ib"}) == [(None, "replica_fabric"), (None, "replica_hosts")]
