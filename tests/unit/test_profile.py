# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What people and surveys write: profiles, values, names of variables, keys, and how faults are told."""

from __future__ import annotations

import itertools
from typing import Any

import facts
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.rankzero.inference.plugins.filter.profile import FilterModule
from ansible_collections.rankzero.inference.plugins.plugin_utils import environment, secrets
from ansible_collections.rankzero.inference.plugins.plugin_utils.environment_names import is_tunable, refusal
from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Fault, Findings, natural_key, report, shown
from ansible_collections.rankzero.inference.plugins.plugin_utils.profile import Profile, parse, select
from ansible_collections.rankzero.inference.plugins.plugin_utils.values import Reader, as_integer, is_unset, unprintable

MINIMAL = {"engine": "sim", "model_path": "/m"}


def read(data: Any) -> tuple[Profile | None, list[Fault]]:
    findings = Findings()
    return parse(data, "p", "glm", findings), findings.faults


def fields(data: Any) -> list[str]:
    return [fault.field for fault in read(data)[1]]


def test_a_minimal_profile_has_the_defaults() -> None:
    found, faults = read(MINIMAL)
    assert not faults and found is not None
    assert (found.name, found.served_model_name, found.tp, found.pp, found.nodes, found.gpus_per_node, found.threads, found.args, found.env) == (
        "glm",
        "glm",
        1,
        1,
        1,
        1,
        0,
        (),
        (),
    )


def test_survey_strings_mean_what_they_say() -> None:
    """AWX hands every answer over as text, and an empty one as C("")."""
    strings = {
        "engine": "sim",
        "model_path": "/m",
        "tp": "8",
        "pp": " 2 ",
        "nodes": "2",
        "gpus_per_node": "8",
        "threads": "",
        "quantization": "",
        "served_model_name": "",
        "args": "",
        "env": "",
        "adapters": "",
        "engine_version": "",
        "ready_timeout": "60",
    }
    numbers = {"engine": "sim", "model_path": "/m", "tp": 8, "pp": 2, "nodes": 2, "gpus_per_node": 8, "ready_timeout": 60}
    assert read(strings) == read(numbers) and not read(strings)[1]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model_path": ""}, "p.model_path"),
        ({"model_path": None}, "p.model_path"),
        ({"model_path": "models/m"}, "p.model_path"),
        ({"model_path": ["/m"]}, "p.model_path"),
        ({"model_path": "/m\n"}, "p.model_path"),
        ({"engine": ""}, "p.engine"),
        ({"engine": "No Engine"}, "p.engine"),
        ({"engine": ["sim"]}, "p.engine"),
        ({"engine": "../sim"}, "p.engine"),
        ({"tp": 0}, "p.tp"),
        ({"tp": "x"}, "p.tp"),
        ({"tp": -1}, "p.tp"),
        ({"tp": 1.5}, "p.tp"),
        ({"tp": True}, "p.tp"),
        ({"pp": -1}, "p.pp"),
        ({"nodes": 0}, "p.nodes"),
        ({"nodes": "two"}, "p.nodes"),
        ({"nodes": 2, "tp": 2}, "p.gpus_per_node"),
        ({"nodes": 2, "tp": 2, "gpus_per_node": "x"}, "p.gpus_per_node"),
        ({"gpus_per_node": 2}, "p.gpus_per_node"),
        ({"tp": 4, "gpus_per_node": 2}, "p.gpus_per_node"),
        ({"nodes": 2, "gpus_per_node": 8, "tp": 8, "pp": 1}, "p.gpus_per_node"),
        ({"threads": -1}, "p.threads"),
        ({"distributed": "mpi"}, "p.distributed"),
        ({"tpp": 2}, "p.tpp"),
        ({1: 2}, "p.1"),
        ({"args": "--a b"}, "p.args"),
        ({"args": {"a": 1}}, "p.args"),
        ({"args": ["a\nb"]}, "p.args[0]"),
        ({"args": ["a", "b\0"]}, "p.args[1]"),
        ({"args": [None]}, "p.args[0]"),
        ({"args": [True]}, "p.args[0]"),
        ({"args": [["a"]]}, "p.args[0]"),
        ({"env": ["A=1"]}, "p.env"),
        ({"env": {"A": None}}, "p.env.A"),
        ({"env": {"A": True}}, "p.env.A"),
        ({"env": {"A": "x\ny"}}, "p.env.A"),
        ({"env": {"A": "\0"}}, "p.env.A"),
        ({"env": {"A": "\ud800"}}, "p.env.A"),
        ({"env": {"1A": "x"}}, "p.env.1A"),
        ({"env": {"A B": "x"}}, "p.env.A B"),
        ({"env": {"A\n": "x"}}, "p.env.A\n"),
        ({"env": {"LD_PRELOAD": "x"}}, "p.env.LD_PRELOAD"),
        ({"env": {"": "x"}}, "p.env."),
        ({"adapters": {"name": "a"}}, "p.adapters"),
        ({"adapters": ["a"]}, "p.adapters"),
        ({"adapters": [{"path": "/a"}]}, "p.adapters[0].name"),
        ({"adapters": [{"name": "a"}]}, "p.adapters[0].path"),
        ({"adapters": [{"name": "a b", "path": "/a"}]}, "p.adapters[0].name"),
        ({"adapters": [{"name": "a", "path": "a"}]}, "p.adapters[0].path"),
        ({"adapters": [{"name": "a", "path": "/a", "sha256": "ff"}]}, "p.adapters[0].sha256"),
        ({"adapters": [{"name": "a", "path": "/a", "x": 1}]}, "p.adapters[0].x"),
        ({"adapters": [{"name": "a", "path": "/a", "source": "https://h/x.tar"}]}, "p.adapters[0].sha256"),
        ({"adapters": [{"name": "a", "path": "/a", "source": "ftp://h/x.tar", "sha256": "0" * 64}]}, "p.adapters[0].source"),
        ({"adapters": [{"name": "a", "path": "/a", "source": "https://user:pw@h/x.tar", "sha256": "0" * 64}]}, "p.adapters[0].source"),
        ({"adapters": [{"name": "a", "path": "/a", "source": "hf://org", "revision": "0" * 40}]}, "p.adapters[0].source"),
        ({"adapters": [{"name": "a", "path": "/a", "source": "hf://org/x"}]}, "p.adapters[0].revision"),
        ({"adapters": [{"name": "a", "path": "/a", "source": "hf://org/x", "revision": "main"}]}, "p.adapters[0].revision"),
        ({"adapters": [{"name": "a", "path": "/a", "revision": "0" * 40}]}, "p.adapters[0].revision"),
        ({"adapters": [{"name": "a", "path": "/a", "sha256": "0" * 64}, {"name": "b", "path": "/a", "sha256": "1" * 64}]}, "p.adapters"),
        ({"adapters": [{"name": "a", "path": "/a"}, {"name": "a", "path": "/b"}]}, "p.adapters"),
        ({"adapters": [{"name": "glm", "path": "/a"}]}, "p.adapters"),
        ({"served_model_name": "-x"}, "p.served_model_name"),
        ({"served_model_name": "a b"}, "p.served_model_name"),
        ({"name": "a b"}, "p.served_model_name"),
        ({"name": ["x"]}, "p.name"),
        ({"gpu_memory_min_mib": 0}, "p.gpu_memory_min_mib"),
        ({"ready_timeout": 1}, "p.ready_timeout"),
        ({"stop_timeout": 0}, "p.stop_timeout"),
    ],
)
def test_one_wrong_field_is_one_fault_that_names_it(change: dict[Any, Any], field: str) -> None:
    assert fields({**MINIMAL, **change}) == [field]


def test_all_faults_come_together_and_say_what_to_do() -> None:
    found, faults = read({"model_path": "", "tp": 0, "tpp": 1, "env": {"LD_PRELOAD": "x"}, "args": "x"})
    assert found is None and [fault.field for fault in faults] == ["p.args", "p.engine", "p.env.LD_PRELOAD", "p.model_path", "p.tp", "p.tpp"]
    assert next(fault for fault in faults if fault.field == "p.tpp").hint == "Did you mean tp?"
    assert "loader" in next(fault for fault in faults if fault.field == "p.env.LD_PRELOAD").hint


@pytest.mark.parametrize(
    ("profile", "profiles", "field"),
    [
        (None, None, "replica_profile"),
        ("", {}, "replica_profile"),
        ("x", {"y": MINIMAL}, "replica_profile"),
        (5, {"y": MINIMAL}, "replica_profile"),
        ("y", ["y"], "replica_profile"),
        ("y", "y", "replica_profile"),
        ("y", {"y": "z"}, "replica_profiles.y"),
        ("y", {"y": None}, "replica_profiles.y"),
        ("y", {"y": {**MINIMAL, "tp": 0}}, "replica_profiles.y.tp"),
        ({**MINIMAL, "tp": 0}, None, "replica_profile.tp"),
        ("a\nb", {"a\nb": MINIMAL}, "replica_profiles.'a\\nb'.name"),
        ([], {}, "replica_profile"),
        ("y", {1: 2, "\ud800": 3}, "replica_profile"),
    ],
)
def test_where_a_profile_is_looked_for(profile: Any, profiles: Any, field: str) -> None:
    findings = Findings()
    select(profile, profiles, findings)
    assert field in [fault.field for fault in findings.faults]
    report(findings.faults, "x").encode()


def test_a_name_close_to_a_known_profile_is_offered() -> None:
    findings = Findings()
    assert select("glm-h10", {"glm-h100": MINIMAL, "other": MINIMAL}, findings) is None
    assert findings.faults[0].hint == "Did you mean glm-h100? Known profiles: glm-h100, other."
    assert select("glm", {"glm": {**MINIMAL, "name": "other"}}, findings).name == "other"


def test_the_profile_is_plain_data_in_the_order_given() -> None:
    found, faults = read(
        {**MINIMAL, "adapters": [{"name": "z", "path": "/z"}, {"name": "a", "path": "/a"}], "env": {"B": 2, "A": 0.5}, "args": ["--x", 5, 0.6]}
    )
    assert not faults and found is not None
    data = found.as_dict()
    assert [adapter["name"] for adapter in data["adapters"]] == ["z", "a"] and data["env"] == {"A": "0.5", "B": "2"} and data["args"] == ["--x", "5", "0.6"]


# ---- values


@pytest.mark.parametrize(("value", "seconds"), [(None, 300), ("", 300), ("90", 90), (0.5, 0.5), ("1e2", 100)])
def test_a_number_of_seconds(value: Any, seconds: float) -> None:
    findings = Findings()
    assert Reader({"wait": value}, "", findings).seconds("wait", 300) == seconds and not findings.faults


@pytest.mark.parametrize("value", ["abc", "5m", 0, "0", -1, "inf", "nan", True, [5], {"a": 1}, 10**400])
def test_what_is_no_number_of_seconds_is_a_fault(value: Any) -> None:
    findings = Findings()
    assert Reader({"wait": value}, "", findings).seconds("wait", 300) == 300
    assert [(fault.field, fault.wanted) for fault in findings.faults] == [("wait", "a number of seconds above 0")]


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (8, 8),
        ("8", 8),
        (" 8 ", 8),
        ("+8", 8),
        ("-8", -8),
        ("08", 8),
        (8.0, None),
        ("8.0", None),
        ("8x", None),
        ("", None),
        (True, None),
        (None, None),
        ([8], None),
        ("٣", None),
        ("²", None),
        ("9" * 19, None),
    ],
)
def test_whole_numbers(value: Any, number: int | None) -> None:
    assert as_integer(value) == number


@pytest.mark.parametrize(
    ("value", "wanted"), [(True, True), ("yes", True), ("True", True), ("1", True), (1, True), ("off", False), (0, False), ("", False), (None, False)]
)
def test_booleans(value: Any, wanted: bool) -> None:
    findings = Findings()
    assert Reader({"x": value}, "", findings).boolean("x") is wanted and not findings.faults
    Reader({"x": "maybe"}, "", findings).boolean("x")
    assert [fault.field for fault in findings.faults] == ["x"]


@given(st.text(max_size=8))
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
def test_texts_without_a_complaint_can_be_written_anywhere(text: str) -> None:
    if unprintable(text) is None:
        assert (
            text.encode("utf-8") is not None
            and len((text + "x").splitlines()) == 1
            and not any(ord(character) < 32 and character != "\t" for character in text)
        )
    else:
        assert not text.replace("\t", "").isprintable()
    assert is_unset(text) == (text == "")


def test_the_filters_never_fail() -> None:
    filters = FilterModule().filters()
    nasty = [
        None,
        "",
        5,
        [],
        {},
        [None],
        {"a": []},
        "x",
        ["/a", 5],
        {"model_path": 5, "adapters": 5},
        {"adapters": [5, {"path": "/a"}]},
        {"model_path": "/m\0"},
    ]
    for one, other in itertools.product(nasty, repeat=2):
        assert isinstance(filters["profile_paths"](one, other), list)
        assert isinstance(filters["profile_adapters"](one, other), list) and isinstance(filters["profile_sources"](one, other), list)
        assert isinstance(filters["whole_numbers"](one), list)
    assert filters["profile_paths"]("p", {"p": {"model_path": "/m", "adapters": [{"path": "/a"}, {"path": "b"}]}}) == ["/m", "/a"]
    commit = {"source": "hf://o/x", "revision": "f" * 40}
    adapters = [{"name": "x", "path": "/a", **commit}, {"name": "y", "path": "/b"}, {"name": "z", "path": "/a", **commit}]
    assert filters["profile_adapters"]({"model_path": "/m", "adapters": adapters}) == ["/a", "/b", "/a"]
    assert filters["profile_sources"]({"adapters": adapters}) == [{"path": "/a", "sha256": "", **commit}]
    for faulty in ({"source": "y"}, {"name": "w", "path": "/c", "source": "http://user:word@host/x", "sha256": "0" * 64}):
        assert filters["profile_sources"]({"adapters": [*adapters, faulty]}) == [], "hosts change before the plan refuses it"
    assert filters["whole_numbers"](["8000", "", None, 29500, 70000, "x"]) == [8000, 29500]


# ---- names of environment variables

REFUSED = [
    "LD_PRELOAD",
    "LD_AUDIT",
    "LD_LIBRARY_PATH",
    "LD_BIND_NOW",
    "GLIBC_TUNABLES",
    "GCONV_PATH",
    "LOCPATH",
    "NLSPATH",
    "HOSTALIASES",
    "RES_OPTIONS",
    "MALLOC_CHECK_",
    "DYLD_INSERT_LIBRARIES",
    "PATH",
    "BASH_ENV",
    "BASH_FUNC_x",
    "ENV",
    "SHELLOPTS",
    "PS4",
    "PROMPT_COMMAND",
    "IFS",
    "CDPATH",
    "SHELL",
    "HOME",
    "USER",
    "LOGNAME",
    "TMPDIR",
    "TMP",
    "TEMP",
    "EDITOR",
    "PAGER",
    "NOTIFY_SOCKET",
    "LISTEN_FDS",
    "LISTEN_PID",
    "XDG_CONFIG_HOME",
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONSTARTUP",
    "PYTHONHASHSEED",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "PIP_INDEX_URL",
    "UV_INDEX",
    "CUDA_INJECTION64_PATH",
    "NVTX_INJECTION64_PATH",
    "CUDA_COREDUMP_PIPE",
    "CUDA_COREDUMP_FILE",
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_MPS_LOG_DIRECTORY",
    "CUDA_CACHE_PATH",
    "CUDA_HOME",
    "CUDA_PATH",
    "CUDACXX",
    "NVCC_PREPEND_FLAGS",
    "CC",
    "CXX",
    "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "NCCL_NET_PLUGIN",
    "NCCL_TUNER_PLUGIN",
    "NCCL_PROFILER_PLUGIN",
    "NCCL_ENV_PLUGIN",
    "NCCL_GIN_PLUGIN",
    "NCCL_CONF_FILE",
    "NCCL_TOPO_FILE",
    "NCCL_GRAPH_FILE",
    "NCCL_TOPO_DUMP_FILE",
    "NCCL_DEBUG_FILE",
    "NCCL_COMM_ID",
    "UCX_MODULE_DIR",
    "UCX_CONFIG_DIR",
    "NVSHMEM_BOOTSTRAP_PLUGIN",
    "FI_PROVIDER_PATH",
    "RDMAV_DRIVERS",
    "IBV_DRIVERS",
    "OMPI_MCA_btl",
    "PMIX_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "GROUP_RANK",
    "NODE_RANK",
    "TORCHELASTIC_RUN_ID",
    "TORCH_EXTENSIONS_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TRITON_CACHE_MANAGER",
    "TRITON_PTXAS_PATH",
    "TRITON_PLUGIN_PATHS",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "TORCH_LOGS_OUT",
    "DG_JIT_CACHE_DIR",
    "FLASHINFER_CUBIN_DIR",
    "FLASHINFER_WORKSPACE_BASE",
    "FLASHINFER_NVCC",
    "TVM_HOME",
    "TILELANG_CACHE_DIR",
    "CUTE_CUBIN_PATH",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",
    "RAY_ADDRESS",
    "RAY_RUNTIME_ENV_HOOK",
    "RAY_TMPDIR",
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "HF_ENDPOINT",
    "HF_HUB_OFFLINE",
    "HF_HOME",
    "HF_MODULES_CACHE",
    "TRANSFORMERS_CACHE",
    "VLLM_USE_MODELSCOPE",
    "MODELSCOPE_CACHE",
    "AWS_SECRET_ACCESS_KEY",
    "S3_ENDPOINT",
    "HTTP_PROXY",
    "https_proxy",
    "NO_PROXY",
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "OPENSSL_CONF",
    "OPENSSL_MODULES",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "WANDB_API_KEY",
    "EXA_API_KEY",
    "VLLM_RUST_FRONTEND_PATH",
    "VLLM_USE_RUST_FRONTEND",
    "VLLM_NCCL_SO_PATH",
    "VLLM_CUDART_SO_PATH",
    "VLLM_PLUGINS",
    "VLLM_LOGGING_CONFIG_PATH",
    "VLLM_ALLOW_INSECURE_SERIALIZATION",
    "VLLM_SERVER_DEV_MODE",
    "VLLM_TARGET_DEVICE",
    "VLLM_MODEL_REDIRECT_PATH",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
    "VLLM_LORA_RESOLVER_CACHE_DIR",
    "VLLM_DP_RANK",
    "VLLM_HOST_IP",
    "VLLM_PORT",
    "VLLM_CONFIG_ROOT",
    "VLLM_CACHE_ROOT",
    "VLLM_API_KEY",
    "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH",
    "VLLM_NIC_SELECTION_VARS",
    "VLLM_TEST_FORCE",
    "VLLM_RAY_PER_WORKER_GPUS",
    "VLLM_NIXL_SIDE_CHANNEL_HOST",
    "LMCACHE_CONFIG_FILE",
    "MOONCAKE_CONFIG_PATH",
    "PROMETHEUS_MULTIPROC_DIR",
    "SGLANG_EXTERNAL_MODEL_PACKAGE",
    "SGLANG_HTTP_SERVER_APP_PATH",
    "SGLANG_PLUGINS",
    "SGLANG_PLATFORM",
    "SGLANG_NCCL_SO_PATH",
    "SGLANG_LOGGING_CONFIG_PATH",
    "SGLANG_TEST_X",
    "SGLANG_BLOCK_NONZERO_RANK_CHILDREN",
    "SGLANG_USE_CPU_ENGINE",
    "SGLANG_PORT",
    "SGLANG_HOST_IP",
    "HOST_IP",
    "POD_IP",
    "SGLANG_LOCAL_IP_NIC",
    "SGLANG_ZMQ_ALLOWED_PEERS",
    "SGLANG_USE_PICKLE_IPC",
    "SGLANG_CACHE_DIR",
    "SGLANG_DUMP_X",
    "DUMPER_DIR",
    "SGLANG_EXPOSE_OWN_ENV_VARS",
    "AIP_MODE",
    "AIP_HTTP_PORT",
    "GGML_BACKEND_PATH",
    "GGML_ET_KERNELS_PATH",
    "GGML_BACKTRACE_LLDB",
    "GGML_CUDA_DEVICES",
    "GGML_CUDA_ENABLE_UNIFIED_MEMORY",
    "GGML_RPC_X",
    "GGML_RDMA_X",
    "LLAMA_ARG_PORT",
    "LLAMA_ARG_NO_MMAP",
    "LLAMA_API_KEY",
    "LLAMA_CACHE",
    "LLAMA_LOG_FILE",
    "RANKZERO_SHARD",
    "CREDENTIALS_DIRECTORY",
    "WATCHDOG_USEC",
]


@pytest.mark.parametrize("name", REFUSED)
def test_names_that_execute_hijack_leak_or_contradict_are_refused_and_dropped_again(name: str) -> None:
    assert refusal(name)
    assert fields({**MINIMAL, "env": {name: "x"}}) == ["p.env." + name]
    env = environment.Environment({name: "ours"}, {name: "planned"})
    findings = Findings()
    environment.override(env, {name: "x", "FREE": "y"}, rank=0, host="n1", findings=findings)  # whatever let it through
    assert env.values == {name: "ours", "FREE": "y"}


@pytest.mark.parametrize(
    "name",
    [
        "NCCL_DEBUG",
        "NCCL_IB_TC",
        "NCCL_IB_HCA",
        "NCCL_SOCKET_IFNAME",
        "GLOO_SOCKET_IFNAME",
        "UCX_TLS",
        "OMP_NUM_THREADS",
        "FI_PROVIDER",
        "VLLM_LOGGING_LEVEL",
        "VLLM_ATTENTION_BACKEND",
        "CUDA_MODULE_LOADING",
        "MY_VARIABLE",
        "_x",
        "ld_preload",
        "TOKENIZERS_PARALLELISM",
        "PYTORCH_CUDA_ALLOC_CONF",
    ],
)
def test_names_for_tuning_are_free(name: str) -> None:
    assert refusal(name) is None and fields({**MINIMAL, "env": {name: "x"}}) == []


@pytest.mark.parametrize("name", ["", "1A", "A-B", "A B", "A=B", "A\n", "É", "BASH_FUNC_x%%"])
def test_what_is_no_name_is_refused(name: str) -> None:
    assert refusal(name)


def test_tunable_names() -> None:
    assert is_tunable("NCCL_DEBUG") and not is_tunable("VLLM_X")


# ---- the key


@pytest.mark.parametrize(
    ("key", "good"),
    [
        ("abc", True),
        ("a" * 200, True),
        ("a!~$%'\"", True),
        (None, True),
        ("", True),
        ("a b", False),
        ("a\n", False),
        ("é", False),
        ("a,b", False),
        ("#a", False),
        (5, False),
        (["a"], False),
        ("\0", False),
    ],
)
def test_keys(key: Any, good: bool) -> None:
    findings = Findings()
    found = secrets.check(key, findings)
    assert bool(findings.faults) is not good and found == (key or None if good else None)
    assert not isinstance(key, str) or len(key) < 2 or all(key not in fault.text() for fault in findings.faults)


def test_the_digest_stands_for_key_and_replica() -> None:
    found = secrets.digest("key", "glm")
    assert found == secrets.digest("key", "glm") and len(found) == 64 and len({found, secrets.digest("key", "x"), secrets.digest("kez", "glm")}) == 3


# ---- faults


@given(st.lists(st.one_of(st.text(max_size=5), st.from_regex(r"[a-z]{0,2}[0-9²٣]{0,3}[a-z]?", fullmatch=True)), max_size=6))
@settings(max_examples=500, deadline=None, derandomize=True, database=None)
def test_any_names_have_one_order(names: list[str]) -> None:
    backwards = names[::-1]
    assert sorted(names, key=natural_key) == sorted(backwards, key=natural_key)


def test_numbers_in_names_count() -> None:
    assert sorted(["node10", "node2", "node", "Node1", "2", "b", "node02"], key=natural_key) == ["2", "b", "node", "Node1", "node02", "node2", "node10"]


def test_faults_are_shown_with_host_rank_seen_wanted_and_hint() -> None:
    findings = Findings()
    findings.fault("b", None, "text", "Do it.", host="n10", rank=1)
    findings.fault("a", True, "text", host="n2")
    findings.fault("z", "x\x1b[31m", "text")
    findings.fault("z", "x\x1b[31m", "text")
    findings.fault("z", "x\x1b[31m", "text", "Another hint.")
    assert report(findings.faults, "Faults") == (
        "Faults (4):\n  1. z: seen 'x\\x1b[31m', wanted text\n"
        "  2. z: seen 'x\\x1b[31m', wanted text. Another hint.\n  3. n2: a: seen true, wanted text\n  4. n10 rank 1: b: seen nothing, wanted text. Do it."
    )
    assert shown("a" * 500).endswith("...") and len(shown(["a"] * 500)) == 200 and shown("") == "''" and shown(" x") == "' x'"
    assert facts.plan(wanted=facts.profile(tp=0))["faults"][0]["field"] == "replica_profile.tp"
