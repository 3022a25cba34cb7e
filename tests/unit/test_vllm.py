# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""vLLM: what each rank runs, and every trap of its command line and environment that a plan must not step into."""

from __future__ import annotations

import json
import pathlib
import subprocess
from typing import Any

import engine_requests as made
import facts
import pytest

from ansible_collections.rankzero.inference.plugins.module_utils import engine_probe
from ansible_collections.rankzero.inference.plugins.plugin_utils import engines
from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Findings
from ansible_collections.rankzero.inference.plugins.plugin_utils.profile import parse


def profile(nodes: int = 1, **more: Any) -> dict[str, Any]:
    return made.profile("vllm", nodes, **more)


def problems(*args: str, **more: Any) -> list[str]:
    """Fields of the faults that the adapter finds in a profile with these arguments."""
    findings = Findings()
    adapter = engines.load("vllm", findings)
    read = parse(profile(args=list(args), **more), "p", "p", findings)
    assert adapter is not None and read is not None
    adapter.validate(read, "p", findings)
    return [fault.field for fault in findings.faults]


# ---- one node, and several by multiprocessing


def test_one_node_serves_with_the_model_before_everything_else() -> None:
    (shard,) = made.good(profile(args=["--max-model-len", "32768"]))
    launch = made.engine(shard)
    assert launch["path"] == "/opt/vllm/bin/vllm" and launch["args"][:4] == ["serve", "/models/glm", "--max-model-len", "32768"]
    assert made.value(launch, "--tensor-parallel-size") == "8" and made.value(launch, "--port") == "8000" and made.value(launch, "--host") == "10.0.0.1"
    assert made.value(launch, "--served-model-name") == "glm" and not {"--nnodes", "--headless", "--master-addr", "--distributed-timeout-seconds"} & set(
        launch["args"]
    )


@pytest.mark.parametrize("nodes", [2, 4])
def test_ranks_meet_at_the_leader_and_only_followers_are_headless(nodes: int) -> None:
    shards = made.good(profile(nodes))
    for shard in shards:
        launch = made.engine(shard)
        assert [made.value(launch, option) for option in ("--nnodes", "--node-rank", "--master-addr", "--master-port")] == [
            str(nodes),
            str(shard["rank"]),
            "10.0.0.1",
            "29500",
        ]
        assert ("--headless" in launch["args"]) == (shard["rank"] > 0) == ("--port" not in launch["args"]) == (not shard["serves_http"])
        assert launch["args"][0] == "serve"  # the module form ignores --headless (vllm#33910)
        assert made.value(launch, "--distributed-executor-backend") == "mp"
    engine_args = [[word for word in made.engine(shard)["args"] if word not in ("--headless", str(shard["rank"]))] for shard in shards[1:]]
    assert all(args == engine_args[0] for args in engine_args)


def test_every_rank_has_its_own_address() -> None:
    assert [made.engine(shard)["env"]["VLLM_HOST_IP"] for shard in made.good(profile(4))] == ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"]


def test_only_ranks_that_serve_have_the_key_and_never_in_an_argument() -> None:
    shards = made.good(profile(2))
    assert [(made.engine(shard)["secret_env"], shard["secrets"]) for shard in shards] == [(["VLLM_API_KEY"], ["api_key", "tie_key"]), ([], ["tie_key"])]
    assert all("VLLM_API_KEY" not in launch["env"] and "--api-key" not in launch["args"] for shard in shards for launch in shard["launches"])
    assert made.good(profile(2), key=False)[0]["secrets"] == ["tie_key"]


def test_the_rendezvous_port_is_expected_to_be_free_on_all_addresses() -> None:
    leader, follower = made.good(profile(2))
    assert {(port["address"], port["port"]) for port in leader["listen_ports"]} == {("10.0.0.1", 8000), ("0.0.0.0", 29500)} and follower["listen_ports"] == []


@pytest.mark.parametrize(("ready_timeout", "seconds"), [(900, "600"), (3600, "2400"), (30, "60")])
def test_a_missing_rank_is_an_error_before_the_gate_gives_up(ready_timeout: int, seconds: str) -> None:
    for shard in made.good(profile(2, ready_timeout=ready_timeout)):
        launch = made.engine(shard)
        assert made.value(launch, "--distributed-timeout-seconds") == seconds and launch["env"]["VLLM_ENGINE_READY_TIMEOUT_S"] == str(ready_timeout)


def test_the_environment_keeps_the_marker_and_the_caches_and_stays_off_the_network() -> None:
    launch = made.engine(made.good(profile())[0])
    env = launch["env"]
    assert env["SPT_NOENV"] == "1" and "marker" in launch["why"]["SPT_NOENV"]
    assert env["HF_HUB_OFFLINE"] == env["TRANSFORMERS_OFFLINE"] == env["VLLM_NO_USAGE_STATS"] == env["DO_NOT_TRACK"] == "1"
    assert all(env[name].startswith("/var/lib/rankzero/glm/") for name in ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"))
    assert env["CUDA_VISIBLE_DEVICES"].startswith("GPU-0001-0000,") and "HOST_IP" not in env and "VLLM_PORT" not in env


def test_what_the_build_declares_stays() -> None:
    found = made.hosts(1)
    found["n1"]["engines"]["vllm"] = [made.build("vllm", env={"VLLM_CACHE_ROOT": "/fast/vllm"})]
    assert made.engine(made.good(profile(), found=found)[0])["env"]["VLLM_CACHE_ROOT"] == "/fast/vllm"


def test_a_503_is_no_sign_of_loading() -> None:
    assert made.good(profile())[0]["ready"]["warmup_503"] is False


# ---- Ray


def test_ray_runs_beside_the_engine_on_the_leader_and_is_the_engine_of_followers() -> None:
    leader, follower = made.good(profile(2, distributed="ray"))
    assert [launch["name"] for launch in leader["launches"]] == ["ray-head", "vllm"] and [launch["name"] for launch in follower["launches"]] == ["ray-worker"]
    head, server = leader["launches"]
    assert head["args"] == [
        "start",
        "--head",
        "--port",
        "29500",
        "--include-dashboard=false",
        "--node-ip-address",
        "10.0.0.1",
        "--num-gpus",
        "8",
        "--disable-usage-stats",
        "--block",
    ]
    worker = made.engine(follower)
    assert worker["args"] == ["start", "--address", "10.0.0.1:29500", "--node-ip-address", "10.0.0.2", "--num-gpus", "8", "--disable-usage-stats", "--block"]
    assert (
        head["path"] == worker["path"] == "/opt/vllm/bin/ray"
        and worker["wait_for_leader_port"] == server["wait_for_leader_port"] == 29500
        and head["wait_for_leader_port"] is None
    )
    assert made.value(server, "--distributed-executor-backend") == "ray" and not {"--nnodes", "--headless", "--master-addr"} & set(server["args"])


def test_what_is_particular_to_a_host_is_in_the_environment_of_its_ray_start() -> None:
    leader, follower = made.good(profile(2, distributed="ray", env={"NCCL_DEBUG": "WARN"}))
    for launch, address in ((leader["launches"][0], "10.0.0.1"), (made.engine(follower), "10.0.0.2")):
        assert launch["env"]["VLLM_HOST_IP"] == address and launch["env"]["GLOO_SOCKET_IFNAME"] == "mgmt0" and launch["env"]["NCCL_DEBUG"] == "WARN"
        assert launch["env"]["RAY_TMPDIR"] == "/var/lib/rankzero/glm" and launch["env"]["CUDA_VISIBLE_DEVICES"]


def test_nothing_of_the_drivers_environment_is_carried_to_other_hosts() -> None:
    leader, follower = made.good(profile(2, distributed="ray", env={"MY_OWN": "x"}))
    head, server = leader["launches"]
    assert server["env"]["RAY_ADDRESS"] == "10.0.0.1:29500" and server["env"]["VLLM_CONFIG_ROOT"] == "/etc/rankzero/glm/current"
    kept = json.loads(leader["revision_files"]["ray_non_carry_over_env_vars.json"])
    assert set(kept) == set(server["env"]) | set(head["env"]) | {"VLLM_API_KEY", "RANKZERO_SHARD"} and "MY_OWN" in kept
    assert head["secret_env"] == [] and follower["revision_files"] == {} and made.good(profile(2))[0]["revision_files"] == {}


@pytest.mark.parametrize(("more", "fields"), [({}, ["distributed"]), ({"nodes": 2, "pp": 1, "dp": 2}, ["dp"])])
def test_layouts_that_hang_or_make_no_sense_with_ray_are_refused(more: dict[str, Any], fields: list[str]) -> None:
    assert made.faults(profile(**{"distributed": "ray", **more})) == fields


def test_ray_without_gpus_is_told_of_devices_that_are_no_gpus() -> None:
    """ray start refuses more devices than CUDA_VISIBLE_DEVICES lists, and an empty list is none."""
    wanted = profile(2, distributed="ray", gpus_per_node=0, tp=4, pp=1)
    for shard in made.good(wanted, found=made.hosts(2, gpus=0)):
        ray = shard["launches"][0]
        assert made.value(ray, "--num-gpus") == "2"
        assert {launch["env"]["CUDA_VISIBLE_DEVICES"] for launch in shard["launches"]} == {"-1,-1"}
    assert made.engine(made.good(profile(2, gpus_per_node=0, tp=4, pp=1), found=made.hosts(2, gpus=0))[0])["env"]["CUDA_VISIBLE_DEVICES"] == ""


def test_ray_must_be_in_the_build_and_its_sockets_must_fit() -> None:
    found = made.hosts(2)
    found["n2"]["engines"]["vllm"] = [made.build("vllm") | {"paths": {"vllm": "/opt/vllm/bin/vllm"}}]
    assert facts.faults(found, profile(2, distributed="ray")) == [("n2", "engines.vllm")]
    name = "a-replica-with-a-name-of-some-length"
    assert {field for _host, field in facts.faults(made.hosts(2), profile(2, distributed="ray"), replica=name)} == {"replica_name"} and facts.good(
        made.hosts(2), profile(2), replica=name
    )
    longest = max(len(shard["work_dir"]) for shard in made.good(profile(2, distributed="ray"), replica="glm"))
    assert longest + len("/ray/session_2026-01-31_12-00-00_123456_4194304/sockets/plasma_store") <= 107


def test_ray_is_a_warning_about_its_open_ports() -> None:
    assert "distributed" in made.warnings(profile(2, distributed="ray")) and "distributed" not in made.warnings(profile(2))


# ---- data parallel


def test_internal_data_parallel_gives_every_node_its_ranks_and_one_server() -> None:
    shards = made.good(profile(2, tp=2, pp=1, dp=8))
    for shard in shards:
        launch = made.engine(shard)
        assert [made.value(launch, f"--data-parallel-{name}") for name in ("size", "size-local", "address", "rpc-port")] == ["8", "4", "10.0.0.1", "29500"]
        assert made.value(launch, "--data-parallel-start-rank") == (None if shard["rank"] == 0 else "4")  # on the leader it alone would mean hybrid
        assert (
            ("--headless" in launch["args"]) == (shard["rank"] > 0) and "--data-parallel-hybrid-lb" not in launch["args"] and "--nnodes" not in launch["args"]
        )
    assert [shard["serves_http"] for shard in shards] == [True, False]


def test_hybrid_data_parallel_serves_and_is_proven_on_every_node() -> None:
    shards = made.good(profile(2, tp=2, pp=1, dp=8, dp_mode="hybrid"), options={"replica_http_host": "10.0.0.1"})
    for shard, address in zip(shards, ("10.0.0.1", "10.0.0.2")):
        launch = made.engine(shard)
        assert (
            made.value(launch, "--data-parallel-start-rank") == str(shard["rank"] * 4)
            and "--data-parallel-hybrid-lb" in launch["args"]
            and "--headless" not in launch["args"]
        )
        assert made.value(launch, "--host") == address and launch["secret_env"] == ["VLLM_API_KEY"] and shard["ready"]["url"] == f"http://{address}:8000"
        assert shard["ready"]["key_secret"] == "api_key" and shard["ready"]["expect_models"] == ["glm"]
    assert shards[1]["ready"]["leader_health"]["url"] == "http://10.0.0.1:8000"


def test_data_parallel_on_one_node_needs_no_addresses() -> None:
    launch = made.engine(made.good(profile(tp=2, dp=4))[0])
    assert made.value(launch, "--data-parallel-size") == "4" and "--data-parallel-address" not in launch["args"]


@pytest.mark.parametrize(
    "more",
    [
        {"tp": 8, "pp": 1, "dp": 2, "dp_mode": "hybrid"},  # one rank a node: vLLM would switch to external balancing
        {"tp": 8, "pp": 2, "dp_mode": "hybrid"},
        {"nodes": 1, "pp": 1, "tp": 2, "dp": 4, "dp_mode": "hybrid"},
    ],
)
def test_hybrid_needs_several_ranks_on_several_nodes(more: dict[str, Any]) -> None:
    assert made.faults(profile(**{"nodes": 2, **more})) == ["dp_mode"]


def test_a_data_parallel_rank_does_not_span_nodes() -> None:
    assert made.faults(profile(4, tp=16, pp=1, dp=2)) == ["dp"]


# ---- CPU


def test_cpu_ranks_form_a_tensor_parallel_group() -> None:
    leader, _follower = made.good(profile(2, tp=2, pp=1, gpus_per_node=0, threads=2))
    launch = made.engine(leader)
    assert (
        made.value(launch, "--tensor-parallel-size") == "2"
        and launch["env"]["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
        and launch["env"]["OMP_NUM_THREADS"] == "2"
    )
    assert launch["env"]["CUDA_VISIBLE_DEVICES"] == "" and made.faults(profile(2, tp=3, pp=1, gpus_per_node=0)) == ["nodes"]
    assert facts.faults(facts.hosts(1), facts.profile(engine="sim", nodes=1, gpus_per_node=0, tp=2, pp=1)) == [(None, "replica_profile.gpus_per_node")]


# ---- LoRA, names, types


@pytest.mark.parametrize(("rank", "allowed"), [(1, "1"), (4, "8"), (16, "16"), (17, "32"), (300, "320"), (512, "512"), (None, "16")])
def test_adapters_in_order_and_their_rank_rounded_up(rank: int | None, allowed: str) -> None:
    launch = made.engine(made.good(profile(adapters=made.ADAPTERS), found=made.hosts(1, adapter_rank=rank))[0])
    place = launch["args"].index("--lora-modules")
    assert launch["args"][place - 1 : place + 3] == ["--enable-lora", "--lora-modules", "sql=/adapters/sql", "fix=/adapters/fix"]
    assert made.value(launch, "--max-loras") == "2" and made.value(launch, "--max-lora-rank") == allowed


def test_the_highest_rank_of_an_adapters_layers_counts() -> None:
    found = made.hosts(1)
    found["n1"]["models"]["/adapters/fix"]["config"] = {"r": 8, "highest_rank": 100}
    assert made.value(made.engine(made.good(profile(adapters=made.ADAPTERS), found=found)[0]), "--max-lora-rank") == "128"


def test_all_ranks_are_given_the_same_lora_rank_though_one_host_does_not_know_it() -> None:
    found = made.hosts(2, adapter_rank=64)
    found["n2"]["models"]["/adapters/sql"]["config"] = None
    assert {made.value(made.engine(shard), "--max-lora-rank") for shard in made.good(profile(2, adapters=made.ADAPTERS), found=found)} == {"64"}


def test_adapters_that_vllm_cannot_take_are_refused() -> None:
    assert made.faults(profile(adapters=made.ADAPTERS), found=made.hosts(1, adapter_rank=1024)) == ["adapters.fix", "adapters.sql"]
    found = made.hosts(1)
    found["n1"]["models"]["/a,b"] = found["n1"]["models"]["/adapters/sql"]
    assert made.faults(profile(adapters=[{"name": "x", "path": "/a,b"}]), found=found) == ["adapters[0].path"]
    assert "adapters.sql" in made.warnings(profile(adapters=made.ADAPTERS), found=made.hosts(1, adapter_rank=None))


def test_the_gate_expects_the_model_and_every_adapter_by_name() -> None:
    assert made.good(profile(adapters=made.ADAPTERS))[0]["ready"]["expect_models"] == ["glm", "sql", "fix"]


def test_types_and_quantization_of_the_profile() -> None:
    launch = made.engine(made.good(profile(dtype="bfloat16", kv_cache_dtype="fp8_e4m3", quantization="awq_marlin"))[0])
    assert [made.value(launch, option) for option in ("--dtype", "--kv-cache-dtype", "--quantization")] == ["bfloat16", "fp8_e4m3", "awq_marlin"]
    assert made.faults(profile(dtype="bf16")) == ["dtype"] and made.faults(profile(kv_cache_dtype="bf16")) == ["kv_cache_dtype"]
    assert facts.faults(facts.hosts(2), facts.profile(dtype="auto")) == [(None, "replica_profile.dtype")]


@pytest.mark.parametrize(
    ("wanted", "capability", "field"),
    [
        ({"dtype": "bfloat16"}, "7.5", "dtype"),
        ({"kv_cache_dtype": "fp8"}, "7.5", "kv_cache_dtype"),
        ({"quantization": "mxfp4"}, "7.5", "quantization"),
        ({"quantization": "nvfp4_per_token"}, "9.0", "quantization"),
        ({"quantization": "MXFP4"}, "7.5", "quantization"),
    ],
)
def test_the_weakest_gpu_decides(wanted: dict[str, Any], capability: str, field: str) -> None:
    found = made.hosts(1)
    for gpu in found["n1"]["gpus"]:
        gpu["compute_capability"] = capability
    assert set(made.faults(profile(**wanted), found=found)) == {field}
    for gpu in found["n1"]["gpus"]:
        gpu["compute_capability"] = "10.0"
    assert made.good(profile(**wanted), found=found)


@pytest.mark.parametrize(
    ("checkpoint", "capability", "good"),
    [
        ({"quant_method": "compressed-tensors", "schemes": [["int4", "fp8"]]}, "8.9", False),
        ({"quant_method": "compressed-tensors", "schemes": [["int4", "fp8"]]}, "9.0", True),
        ({"quant_method": "compressed-tensors", "schemes": [["fp8", "fp8"]]}, "7.5", True),
        ({"quant_method": "compressed-tensors", "schemes": [["fp8", "fp8"]]}, "7.0", False),
        ({"quant_method": "compressed-tensors", "schemes": [["mxfp4", None]]}, "7.5", False),
        ({"quant_method": "quark", "schemes": [["fp8", "fp8"], ["mxfp4", "mxfp4"]]}, "8.0", False),
        ({"quant_method": "quark", "schemes": [["mxfp4", "mxfp4"]]}, "7.0", True),
        ({"quant_method": "compressed-tensors", "schemes": "damaged"}, "7.0", True),
        ({"quant_method": "compressed-tensors", "schemes": [[], ["x"], [None, None], {}]}, "7.0", True),
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


def test_vllm_has_a_floor_of_its_own() -> None:
    found = made.hosts(1)
    for gpu in found["n1"]["gpus"]:
        gpu["compute_capability"] = "5.2"
    assert set(made.faults(profile(), found=found)) == {"engine"}


def test_methods_that_left_vllm_need_their_package_in_the_build() -> None:
    """gguf and bitsandbytes are plugins since 0.33."""
    config = {"quantization_config": {"quant_method": "bitsandbytes"}}
    found = made.hosts(1, config=config)
    assert "config.json" in made.warnings(profile(), found=found), "a build that nobody asked for its packages may have it"
    found["n1"]["engines"]["vllm"] = [made.build("vllm", versions={"vllm": "0.33.0"})]
    assert made.faults(profile(), found=found) == ["config.json"]
    found["n1"]["engines"]["vllm"] = [made.build("vllm", versions={"vllm": "0.33.0", "vllm-bnb-plugin": "0.1.0"})]
    assert made.warnings(profile(), found=found) == []


def test_deprecated_methods_and_types_that_do_not_go_together() -> None:
    assert made.faults(profile(quantization="fbgemm_fp8")) == ["quantization"]
    for spelled in ("--allow-deprecated-quantization", "--allow_deprecated_quant"):
        made.good(profile(quantization="fbgemm_fp8", args=[spelled]))
    assert made.faults(profile(quantization="mxfp4", dtype="float16")) == ["dtype"]
    made.good(profile(quantization="mxfp4", dtype="bfloat16"))
    found = made.hosts(1, config={"quantization_config": {"quant_method": "gptq"}})
    assert made.faults(profile(quantization="awq"), found=found) == ["quantization"]
    made.good(profile(quantization="gptq_marlin"), found=found)


@pytest.mark.parametrize(
    ("config", "good"),
    [
        ({"use_dora": True}, False),
        ({"modules_to_save": ["embed_tokens"]}, False),
        ({"modules_to_save": "all"}, False),
        ({"modules_to_save": ["classifier", "score"]}, True),
        ({"lora_bias": True}, False),
        ({"bias": "all"}, False),
        ({"bias": "none", "lora_bias": False, "use_dora": False, "modules_to_save": None}, True),
    ],
)
def test_adapters_with_what_vllm_does_not_serve_are_refused(config: dict[str, Any], good: bool) -> None:
    found = made.hosts(1)
    found["n1"]["models"]["/adapters/sql"]["config"] = {"r": 8, **config}
    if good:
        made.good(profile(adapters=made.ADAPTERS), found=found)
    else:
        assert made.faults(profile(adapters=made.ADAPTERS), found=found) == ["adapters.sql"]


def test_quantization_of_the_models_own_config_counts() -> None:
    found = made.hosts(1, config={"quantization_config": {"quant_method": "mxfp4"}})
    for gpu in found["n1"]["gpus"]:
        gpu["compute_capability"] = "7.5"
    assert set(made.faults(profile(), found=found)) == {"config.json"}


def test_heads_divide_by_the_tensor_parallel_size() -> None:
    assert made.faults(profile(), found=made.hosts(1, config={"num_attention_heads": 12})) == ["tp"] and made.good(
        profile(), found=made.hosts(1, config={"num_attention_heads": 16})
    )
    assert made.faults(profile(2, tp=2, pp=1, gpus_per_node=0), found=made.hosts(2, config={"num_attention_heads": 5})) == ["tp"]


# ---- arguments


@pytest.mark.parametrize(
    "args",
    [
        ("--tensor-parallel-size", "2"),
        ("--tensor_parallel_size=2",),
        ("--tensor-par", "2"),
        ("-tp", "2"),
        ("-tp=2",),
        ("--nn", "2"),
        ("-n2",),
        ("-r=1",),
        ("--head",),
        ("--no-enable-lora",),
        ("--ho", "x"),
        ("--po", "1"),
        ("--api-key", "k"),
        ("--api_k=k",),
        ("--mode", "x"),
        ("--model=x",),
        ("--config", "f"),
        ("--conf=f",),
        ("-q", "awq"),
        ("-qawq",),
        ("--quant", "fp8"),
        ("--quantization_config", "{}"),
        ("-dpr", "1"),
        ("--data-parallel-start-rank=1",),
        ("-dph",),
        ("--uds", "/s"),
        ("--root-path", "/v1"),
        ("--grpc",),
        ("--omni",),
        ("--api-server-count", "2"),
        ("-asc=2",),
        ("--served-model-name", "x"),
        ("--max-lora-rank", "8"),
        ("--dtype", "half"),
        ("--kv-cache-dtype=fp8",),
        ("--ssl-keyfile", "/k"),
        ("--disable-log-stats",),
        ("--log-level", "ERROR"),
        ("--device-ids", "0"),
        ("--help",),
        ("-h",),
        ("--hf-token=x",),
        ("--distributed-timeout-seconds", "9"),
        ("--prefill-context-parallel-size", "2"),
        ("-dcp", "2"),
    ],
)
def test_what_the_plan_sets_is_refused_in_every_spelling(args: tuple[str, ...]) -> None:
    assert problems(*args) == ["p.args[0]"]


@pytest.mark.parametrize(
    "args",
    [
        ("--trust-remote-code",),
        ("--trust_remote_code",),
        ("--trust",),
        ("--no-trust-remote-code",),
        ("--worker-cls", "a.b"),
        ("--worker-extension-cls=a.b",),
        ("--middleware", "a.b"),
        ("--logits-processors", "x"),
        ("--tool-parser-plugin", "x"),
        ("--reasoning-parser-plugin", "x"),
        ("--io-processor-plugin=x",),
        ("--tool-server", "x"),
        ("--hf-overrides", "{}"),
        ("--hf-overrides.auto_map", "x"),
        ("--additional-config.a=1",),
        ("--kv-transfer-config", "{}"),
        ("--allowed-local-media-path", "/"),
        ("--model-loader-extra-config", "{}"),
        ("--load-format", "dummy"),
        ("--load-format=pt",),
        ("--load_f", "runai_streamer"),
        ("--scheduler-cls", "x"),
    ],
)
def test_what_executes_code_or_exposes_files_is_refused(args: tuple[str, ...]) -> None:
    assert problems(*args) == ["p.args[0]"]


@pytest.mark.parametrize(
    "args",
    [
        ("--max-model-len", "32k"),
        ("--gpu-memory-utilization=0.9",),
        ("--enforce-eager",),
        ("--load-format", "safetensors"),
        ("-ep",),
        ("--enable-expert-parallel",),
        ("--compilation-config.mode", "3"),
        ("--max-num-seqs", "64"),
        ("--tokenizer", "/models/glm"),
        ("--no-enable-prefix-caching",),
        ("--reasoning-parser", "qwen3"),
        ("--data",),
        ("--served",),
    ],
)
def test_free_arguments_pass_unless_a_prefix_could_mean_ours(args: tuple[str, ...]) -> None:
    assert problems(*args) == (["p.args[0]"] if args[0] in ("--data", "--served") else [])


def test_an_option_that_the_parser_lacks_is_said_before_a_gpu_is_taken() -> None:
    assert made.warnings(profile(args=["--max-modle-len", "1k", "--max-model-len", "1k", "--x.y", "--max_num_seqs=3"])) == ["args[0]", "args[4]"]


def test_words_without_an_option_and_a_bare_double_dash_are_refused() -> None:
    assert problems("other-model") == ["p.args[0]"] and problems("--enforce-eager", "--") == ["p.args[1]"]


@pytest.mark.parametrize(
    "name",
    [
        "VLLM_HOST_IP",
        "VLLM_PORT",
        "HOST_IP",
        "VLLM_API_KEY",
        "VLLM_TARGET_DEVICE",
        "SPT_NOENV",
        "RAY_ADDRESS",
        "VLLM_CONFIG_ROOT",
        "VLLM_PLUGINS",
        "MASTER_ADDR",
        "HF_HUB_OFFLINE",
    ],
)
def test_variables_that_contradict_the_plan_are_refused(name: str) -> None:
    assert made.faults(profile(env={name: "x"})) == [f"env.{name}"]


# ---- the build


@pytest.mark.parametrize(
    ("told", "version"),
    [("0.32.0+cpu", "0.32.0+cpu"), ("INFO 11-29 12:00:00 loading\n0.33.0", "0.33.0"), ("sglang version: 0.5.23\ngit revision: 1.2abc", "0.5.23")],
)
def test_the_version_that_the_programs_print_is_found(told: str, version: str, tmp_path: pathlib.Path) -> None:
    program = tmp_path / "vllm"
    program.write_text("#!/bin/sh\ncat <<'END'\n%s\nEND\n" % told)
    program.chmod(0o755)

    def run_command(words: list[str], **options: Any) -> tuple[int, str, str]:
        done = subprocess.run(words, capture_output=True, text=True, timeout=10, cwd=options.get("cwd"), check=False)
        return done.returncode, done.stdout, done.stderr

    assert engine_probe.version(run_command, str(program), ["--version"], {}) == version
