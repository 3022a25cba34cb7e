# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""SGLang: what each rank runs, the layouts that would hang, and where its key is."""

from __future__ import annotations

import itertools
import json
from typing import Any

import engine_requests as made
import facts
import pytest
import yaml

from ansible_collections.rankzero.inference.plugins.plugin_utils import engines, render, secrets
from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Findings
from ansible_collections.rankzero.inference.plugins.plugin_utils.profile import parse


def profile(nodes: int = 1, **more: Any) -> dict[str, Any]:
    return made.profile("sglang", nodes, **more)


def problems(*args: str, **more: Any) -> list[str]:
    findings = Findings()
    adapter = engines.load("sglang", findings)
    read = parse(profile(args=list(args), **more), "p", "p", findings)
    assert adapter is not None and read is not None
    adapter.validate(read, "p", findings)
    return [fault.field for fault in findings.faults]


# ---- ranks


def test_one_node_has_no_rendezvous_address() -> None:
    launch = made.engine(made.good(profile(args=["--context-length", "4096"]))[0])
    assert launch["path"] == "/opt/sglang/bin/sglang" and launch["args"][:7] == [
        "serve",
        "--model-type",
        "llm",
        "--model-path",
        "/models/glm",
        "--context-length",
        "4096",
    ]
    assert not {"--dist-init-addr", "--nnodes", "--node-rank"} & set(launch["args"]) and "SGLANG_ZMQ_ALLOWED_PEERS" not in launch["env"]
    assert made.value(launch, "--host") == "10.0.0.1" and made.value(launch, "--device") == "cuda" and "--enable-metrics" in launch["args"]


@pytest.mark.parametrize("nodes", [2, 4])
def test_several_nodes_always_have_the_address_and_a_timeout(nodes: int) -> None:
    for shard in made.good(profile(nodes)):
        launch = made.engine(shard)
        assert [made.value(launch, option) for option in ("--nnodes", "--node-rank", "--dist-init-addr", "--dist-timeout")] == [
            str(nodes),
            str(shard["rank"]),
            "10.0.0.1:29500",
            "600",
        ]
        address = f"10.0.0.{shard['rank'] + 1}"
        assert launch["env"]["SGLANG_HOST_IP"] == made.value(launch, "--host") == address
        assert launch["env"]["SGLANG_ZMQ_ALLOWED_PEERS"] == ",".join(f"10.0.0.{number}" for number in range(1, nodes + 1))
        assert launch["env"]["SPT_NOENV"] == "1" and launch["env"]["SGLANG_CACHE_DIR"].startswith("/var/lib/rankzero/glm/")


@pytest.mark.parametrize(
    ("nodes", "tp", "pp", "hangs"),
    [
        (2, 16, 1, False),
        (2, 8, 2, False),
        (4, 16, 2, False),
        (4, 8, 4, False),
        (2, 4, 4, False),
        (3, 8, 3, False),
        (4, 32, 1, False),
        (3, 12, 2, True),  # 24 GPUs: tp x pp divides by nodes, which is all that SGLang checks
        (4, 4, 6, True),
        (6, 12, 4, True),
        (2, 4, 3, True),
    ],
)
def test_layouts_for_which_ranks_would_be_missing_are_refused(nodes: int, tp: int, pp: int, hangs: bool) -> None:
    wanted = profile(nodes, tp=tp, pp=pp, gpus_per_node=tp * pp // nodes)
    assert (tp * pp) % nodes == 0
    assert made.faults(wanted) == ["nodes"] if hangs else made.good(wanted)


def ranks_of(node: int, nodes: int, tp: int, pp: int) -> set[tuple[int, int]]:
    """(pipeline rank, tensor rank) of every process that SGLang starts on a node: srt/entrypoints/engine.py, _calculate_rank_ranges."""
    stages, nodes_per_stage = max(pp // nodes, 1), max(nodes // pp, 1)
    width = tp // nodes_per_stage
    first_stage, first_rank = stages * (node // nodes_per_stage), width * (node % nodes_per_stage)
    return {(stage, rank) for stage in range(first_stage, first_stage + stages) for rank in range(first_rank, first_rank + width)}


def test_the_rule_is_exactly_that_every_rank_runs_once() -> None:
    """All layouts that SGLang's own check lets through, up to six nodes."""
    adapter, accepted = engines.load("sglang", Findings()), 0
    assert adapter is not None
    for nodes, tp, pp in itertools.product(range(1, 7), range(1, 9), range(1, 9)):
        if (tp * pp) % nodes:
            continue
        started = [place for node in range(nodes) for place in ranks_of(node, nodes, tp, pp)]
        complete = sorted(started) == sorted(itertools.product(range(pp), range(tp)))
        findings = Findings()
        read = parse(profile(nodes, tp=tp, pp=pp, gpus_per_node=tp * pp // nodes), "p", "p", findings)
        assert read is not None
        adapter.validate(read, "p", findings)
        assert (not findings.faults) == complete, (nodes, tp, pp, findings.faults)
        accepted += complete
    assert accepted > 100


@pytest.mark.parametrize(
    ("more", "fields"),
    [
        ({"nodes": 2, "tp": 8, "pp": 1, "dp": 2}, ["dp"]),
        ({"tp": 4, "dp": 2, "attention_dp": 2}, ["attention_dp"]),
        ({"attention_dp": 3}, ["attention_dp"]),
        ({"nodes": 2, "distributed": "ray"}, ["distributed"]),
        ({"nodes": 2, "tp": 8, "pp": 1, "dp": 2, "dp_mode": "hybrid"}, ["dp", "dp_mode"]),
    ],
)
def test_what_sglang_cannot_do_is_refused(more: dict[str, Any], fields: list[str]) -> None:
    assert made.faults(profile(**more)) == fields


def test_data_parallel_on_one_node() -> None:
    launch = made.engine(made.good(profile(tp=4, dp=2))[0])
    assert made.value(launch, "--dp-size") == "2" and made.value(launch, "--tp-size") == "4"


def test_attention_data_parallel_needs_no_gpus_of_its_own_but_ports() -> None:
    leader, follower = made.good(profile(2, tp=16, pp=1, attention_dp=4))
    assert made.value(made.engine(leader), "--attn-dp-size") == made.value(made.engine(follower), "--attn-dp-size") == "4"
    assert {port["port"] for port in leader["listen_ports"]} == {8000, 29500, 29501, 29502, 29503, 29504, 29505, 29506, 29513}
    busy = made.hosts(2, ports_in_use=[{"port": 29506, "address": "0.0.0.0", "pid": 7, "process": "x", "shard": None, "listening": True}])
    assert (
        made.good(profile(2, tp=16, pp=1, attention_dp=4), found=busy)[0]["leader_port"] == 29640
        and made.good(profile(2), found=busy)[0]["leader_port"] == 29510
    )
    assert {port["port"] for port in made.good(profile(attention_dp=2))[0]["listen_ports"]} == {8000, *range(8233, 8240), 8246}


def test_heads_are_split_over_the_attention_group_only() -> None:
    found = made.hosts(1, config={"num_attention_heads": 4})
    assert made.faults(profile(), found=found) == ["tp"] and made.good(profile(attention_dp=2), found=found)


def test_a_follower_answers_on_the_http_port_and_nobody_believes_it() -> None:
    _leader, follower = made.good(profile(2))
    assert [(port["address"], port["port"]) for port in follower["listen_ports"]] == [("10.0.0.2", 8000)]
    assert (
        follower["ready"]["url"] is None
        and not follower["serves_http"]
        and follower["ready"]["leader_health"] == {"url": "http://10.0.0.1:8000", "path": "/health"}
    )
    assert follower["ready"]["warmup_503"] is True


def test_the_leaders_own_http_address_is_not_asked_of_followers() -> None:
    found = made.hosts(2)
    found["n1"]["interfaces"].append({"name": "pub0", "kind": "physical", "up": True, "carrier": True, "addresses": ["192.0.2.1/24"], "master": None})
    leader, follower = made.good(profile(2), found=found, options={"replica_http_host": "192.0.2.1"})
    assert made.value(made.engine(leader), "--host") == "192.0.2.1" and made.value(made.engine(follower), "--host") == "10.0.0.2"
    assert follower["ready"]["leader_health"]["url"] == "http://192.0.2.1:8000"
    assert made.value(made.engine(made.good(profile(2), options={"replica_http_host": "0.0.0.0"})[1]), "--host") == "0.0.0.0"


@pytest.mark.parametrize("state", ["lost", "not_permitted"])
def test_a_gpu_that_cannot_be_opened_has_no_number(state: str) -> None:
    """NVML counts it and CUDA does not: a number too high would hide itself and every one after it."""
    found = made.hosts(1)
    found["n1"]["gpus"][1]["health"] = {"state": state, "reasons": ["gone"]}
    found["n1"]["gpus"].insert(0, found["n1"]["gpus"].pop())  # NVML promises no order
    chosen = made.good(profile(tp=4, gpus_per_node=4), found=found)[0]
    assert chosen["gpus"] == ["GPU-0001-0000", "GPU-0001-0002", "GPU-0001-0003", "GPU-0001-0004"]
    assert made.engine(chosen)["env"]["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"


def test_gpus_are_named_by_number() -> None:
    found = made.hosts(1)
    assert made.engine(made.good(profile(), found=found)[0])["env"]["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"
    for gpu in found["n1"]["gpus"]:
        gpu["partition"]["kind"] = "mig"
    assert set(made.faults(profile(), found=found)) == {"gpus"}


def test_cpu_ranks() -> None:
    launch = made.engine(made.good(profile(2, tp=2, pp=1, gpus_per_node=0))[0])
    assert made.value(launch, "--device") == "cpu" and made.faults(profile(gpus_per_node=0, kv_cache_dtype="fp8_e5m2")) == ["kv_cache_dtype"]


# ---- the key


def test_the_key_is_in_a_secret_file_on_the_serving_rank_only() -> None:
    leader, follower = made.good(profile(2))
    launch = made.engine(leader)
    assert leader["secrets"] == ["api_key", "sglang.yaml", "tie_key"] and leader["secret_files"] == {"sglang.yaml": "api-key: {api_key}\n"}
    assert launch["args"][-2:] == ["--config", "secrets/sglang.yaml"] and launch["secret_args"] == [
        {"position": len(launch["args"]) - 1, "secret": "sglang.yaml"}
    ]
    assert follower["secrets"] == ["tie_key"] and made.engine(follower)["secret_args"] == [] and "--config" not in made.engine(follower)["args"]
    assert made.good(profile(), key=False)[0]["secrets"] == [] and "--api-key" not in launch["args"] and not launch["secret_env"]


@pytest.mark.parametrize("key", ["plain", '"quoted"', "back\\slash", "{api_key}", "yes", "12345678", "a:b", "{a}", "&x*", "!!python", "%s'"])
def test_every_key_is_read_back_from_the_file_as_it_is(key: str) -> None:
    files = secrets.files(key, {"sglang.yaml": "api-key: {api_key}\n"})
    assert files["api_key"] == key and yaml.safe_load(files["sglang.yaml"]) == {"api-key": key}


@pytest.mark.parametrize("key", ["-starts-like-an-option", "#comment", "a,b", "two words"])
def test_keys_that_an_engine_would_misread_are_refused(key: str) -> None:
    findings = Findings()
    assert secrets.check(key, findings) is None and [fault.field for fault in findings.faults] == ["replica_api_key"] and key not in str(findings.faults)


def test_the_launch_document_names_the_secrets_place_and_every_file_of_the_revision_is_there() -> None:
    templates = dict.fromkeys(("shard.env.j2", "inference.service.j2", "supervisord.conf.j2"), "{{ shard.rank }}")
    shard = made.good(profile(2))[0]
    document = json.loads(render.render(shard, templates, {}).files["launch.json"])
    assert document["launches"][-1]["secret_args"] == [{"position": len(document["launches"][-1]["args"]) - 1, "secret": "sglang.yaml"}]
    ray = made.good(made.profile("vllm", 2, distributed="ray"))[0]
    assert "ray_non_carry_over_env_vars.json" in render.render(ray, templates, {}).files


# ---- LoRA, types


def test_adapters_by_name_and_a_place_for_the_model_itself() -> None:
    launch = made.engine(made.good(profile(adapters=made.ADAPTERS))[0])
    place = launch["args"].index("--lora-paths")
    assert (
        launch["args"][place - 1 : place + 3] == ["--enable-lora", "--lora-paths", "sql=/adapters/sql", "fix=/adapters/fix"]
        and made.value(launch, "--max-loras-per-batch") == "3"
    )


@pytest.mark.parametrize(
    ("wanted", "capability", "field"),
    [
        ({"dtype": "bfloat16"}, "7.5", "dtype"),
        ({"kv_cache_dtype": "nvfp4"}, "9.0", "kv_cache_dtype"),
        ({"quantization": "w8a8_fp8"}, "8.0", "quantization"),
        ({"quantization": "awq_marlin"}, "7.5", "quantization"),
        ({}, "7.0", "engine"),
    ],
)
def test_the_weakest_gpu_decides(wanted: dict[str, Any], capability: str, field: str) -> None:
    found = made.hosts(1)
    for gpu in found["n1"]["gpus"]:
        gpu["compute_capability"] = capability
    assert set(made.faults(profile(**wanted), found=found)) == {field}


@pytest.mark.parametrize(
    ("checkpoint", "capability", "good"),
    [
        ({"quant_method": "compressed-tensors", "schemes": [["nvfp4", "nvfp4"]]}, "9.0", False),
        ({"quant_method": "compressed-tensors", "schemes": [["nvfp4", "nvfp4"]]}, "10.0", True),
        ({"quant_method": "compressed-tensors", "schemes": [["int4", None], ["int4", "fp8"]]}, "8.9", False),
        ({"quant_method": "compressed-tensors", "schemes": [["fp8", "fp8"]]}, "8.0", True),
        ({"quant_method": "compressed-tensors", "schemes": [["fp8", "fp8"]]}, "7.5", False),
        ({"quant_method": "compressed-tensors"}, "7.5", True),
        ({"quant_method": "quark", "schemes": [["fp8", "fp8"]]}, "8.0", False),
        ({"quant_method": "modelslim"}, "9.0", False),
    ],
)
def test_a_checkpoints_schemes_decide(checkpoint: dict[str, Any], capability: str, good: bool) -> None:
    found = made.hosts(1, config={"quantization_config": checkpoint})
    for gpu in found["n1"]["gpus"]:
        gpu["compute_capability"] = capability
    if good:
        made.good(profile(), found=found)
    else:
        assert set(made.faults(profile(), found=found)) == {"config.json"}


@pytest.mark.parametrize(
    ("asked", "checkpoint", "good"),
    [
        ("w8a8_fp8", "compressed-tensors", True),
        ("modelopt_fp4", "modelopt", True),
        ("modelopt_fp4", "fp8", True),
        ("awq_marlin", "awq", True),
        ("awq", "gptq", False),
        ("fp8", "awq", False),
        ("fp8", "compressed-tensors", False),
        ("fp8", "something-new", True),
    ],
)
def test_another_method_than_the_checkpoints_is_refused(asked: str, checkpoint: str, good: bool) -> None:
    found = made.hosts(1, config={"quantization_config": {"quant_method": checkpoint}})
    for gpu in found["n1"]["gpus"]:
        gpu["compute_capability"] = "10.0"
    if good:
        made.good(profile(quantization=asked), found=found)
    else:
        assert made.faults(profile(quantization=asked), found=found) == ["quantization"]


def test_gptq_is_run_as_gptq_marlin() -> None:
    found = made.hosts(1, config={"quantization_config": {"quant_method": "gptq"}})
    for gpu in found["n1"]["gpus"]:
        gpu["compute_capability"] = "7.5"
    assert set(made.faults(profile(), found=found)) == {"config.json"} and made.faults(profile(quantization="gptq")) == ["quantization"]
    assert made.faults(profile(dtype="bf16")) == ["dtype"] and made.faults(profile(kv_cache_dtype="fp8")) == ["kv_cache_dtype"]


# ---- arguments


@pytest.mark.parametrize(
    "args",
    [
        ("--model-path", "x"),
        ("--model", "x"),
        ("--model-t", "llm"),
        ("--served-model-name=x",),
        ("--host", "x"),
        ("--port=1",),
        ("--config", "f"),
        ("--config=f",),
        ("--conf", "f"),
        ("--dist-init-addr", "x:1"),
        ("--nccl-init-addr=x:1",),
        ("--nnodes", "2"),
        ("--node-r", "1"),
        ("--nccl-port", "1"),
        ("--tp", "2"),
        ("--tp-size=2",),
        ("--tensor-parallel-size", "2"),
        ("--pp", "2"),
        ("--pipeline-parallel-size", "2"),
        ("--dp-size", "2"),
        ("--data-parallel-size=2",),
        ("--attn-dp-size", "2"),
        ("--enable-dp-attention",),
        ("--ep", "2"),
        ("--ep-size", "2"),
        ("--expert-parallel-size", "2"),
        ("--base-gpu-id", "1"),
        ("--gpu-id-step", "2"),
        ("--device", "cpu"),
        ("--use-ray",),
        ("--api-key", "k"),
        ("--api-k=k",),
        ("--admin-api-key", "k"),
        ("--enable-metrics",),
        ("--skip-server-warmup",),
        ("--skip-server",),
        ("--enable-lora",),
        ("--lora-paths", "x"),
        ("--max-lora-rank", "8"),
        ("--max-loras-per-batch=1",),
        ("--max-loaded-loras", "1"),
        ("--quantization", "awq"),
        ("--quant=awq",),
        ("--kv-cache-dtype", "auto"),
        ("--dtype", "half"),
        ("--grpc-mode",),
        ("--tokenizer-worker-num", "2"),
        ("--gated-launch-port", "1"),
        ("--ssl-keyfile", "x"),
        ("--log-level", "error"),
        ("--log-level-http=error",),
        ("--help",),
        ("-h",),
    ],
)
def test_what_the_plan_sets_is_refused_in_every_spelling(args: tuple[str, ...]) -> None:
    assert problems(*args) == ["p.args[0]"]


@pytest.mark.parametrize(
    "args",
    [
        ("--trust-remote-code",),
        ("--trust",),
        ("--custom-weight-loader", "x"),
        ("--forward-hooks", "x"),
        ("--tool-server", "x"),
        ("--model-loader-extra-config", "{}"),
        ("--json-model-override-args", "{}"),
        ("--enable-custom-logit-processor",),
        ("--delete-ckpt-after-loading",),
        ("--delete-ckpt",),
        ("--export-metrics-to-file-dir", "/"),
        ("--crash-dump-folder=/",),
        ("--warmups", "x"),
        ("--load-format", "dummy"),
        ("--sidecar", "x"),
    ],
)
def test_what_executes_code_or_destroys_files_is_refused(args: tuple[str, ...]) -> None:
    assert problems(*args) == ["p.args[0]"]


@pytest.mark.parametrize(
    "args",
    [
        ("--context-length", "4096"),
        ("--mem-fraction-static=0.8",),
        ("--load-format", "safetensors"),
        ("--disable-cuda-graph",),
        ("--chunked-prefill-size", "-1"),
        ("--max-running-requests", "8"),
    ],
)
def test_free_arguments_pass(args: tuple[str, ...]) -> None:
    assert problems(*args) == []


def test_underscores_are_not_dashes_here_and_unknown_options_are_said() -> None:
    assert made.warnings(profile(args=["--context_length", "1", "--contxt-length", "1", "--context-l", "1"])) == ["args[0]", "args[2]"]


def test_several_nodes_are_a_warning_about_open_sockets() -> None:
    assert "engine" in made.warnings(profile(2)) and "engine" not in made.warnings(profile())


def test_both_are_built_in() -> None:
    assert set(engines.BUILT_IN) == {"llamacpp", "sglang", "sim", "vllm"}
    assert facts.faults(facts.hosts(1), facts.profile(engine="vlm", nodes=1, pp=1)) == [(None, "engine")]
