# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""vLLM: one node, several nodes by multiprocessing (the default) or Ray, and data parallel over nodes.

Facts of releases 0.32.0 and 0.33.0. Always C(vllm serve): the module form ignores C(--headless) (vllm#33910), and a follower without it becomes a
server of its own. Every rank has its own C(VLLM_HOST_IP) (queues bind to it), and C(--distributed-timeout-seconds), without which a rank that does
not come is half an hour of silence.
"""

from __future__ import annotations

import json
import typing as t

from ansible_collections.rankzero.inference.plugins.plugin_utils.arguments import find, grammar_of
from ansible_collections.rankzero.inference.plugins.plugin_utils.engines import torch_stack
from ansible_collections.rankzero.inference.plugins.plugin_utils.engines.base import Engine, Launch, Shard
from ansible_collections.rankzero.inference.plugins.plugin_utils.engines.option_names import VLLM as PARSER
from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Findings
from ansible_collections.rankzero.inference.plugins.plugin_utils.profile import Profile
from ansible_collections.rankzero.inference.plugins.plugin_utils.quantization import VLLM, VLLM_FLOOR, VLLM_SCHEMES

_GATE = "the readiness gate, which asks plain HTTP at the root"
_SHAPE = "tp, pp, dp, nodes and gpus_per_node of the profile"
_LORA = "adapters of the profile"
_KEY = "replica_api_key"
_LOG = "the service's log"
_OWNED = {
    "--model": "model_path of the profile",
    "--served-model-name": "served_model_name of the profile",
    "--host": "replica_http_host or the management address",
    "--port": "replica_http_port",
    "--uds": _GATE,
    "--root-path": _GATE,
    "--grpc": _GATE,
    "--grpc-port": _GATE,
    "--omni": "the engine",
    "--config": "the profile",
    "--headless": "the rank",
    "--api-server-count": _SHAPE,
    "--nnodes": "nodes of the profile",
    "--node-rank": "the rank that the plan gave the host",
    "--master-addr": "the leader's address",
    "--master-port": "replica_leader_port",
    "--distributed-executor-backend": "distributed of the profile",
    "--distributed-timeout-seconds": "ready_timeout of the profile",
    "--tensor-parallel-size": _SHAPE,
    "--pipeline-parallel-size": _SHAPE,
    "--prefill-context-parallel-size": _SHAPE,
    "--decode-context-parallel-size": _SHAPE,
    "--data-parallel-size": _SHAPE,
    "--data-parallel-size-local": _SHAPE,
    "--data-parallel-start-rank": _SHAPE,
    "--data-parallel-rank": _SHAPE,
    "--data-parallel-address": "the leader's address",
    "--data-parallel-rpc-port": "replica_leader_port",
    "--data-parallel-backend": "distributed of the profile",
    "--data-parallel-hybrid-lb": "dp_mode of the profile",
    "--data-parallel-external-lb": "dp_mode of the profile",
    "--data-parallel-multi-port-external-lb": "dp_mode of the profile",
    "--data-parallel-supervisor-port": "dp_mode of the profile",
    "--device-ids": "the shard's GPUs",
    "--api-key": _KEY,
    "--hf-token": "nothing: models are local files",
    "--enable-lora": _LORA,
    "--lora-modules": _LORA,
    "--max-loras": _LORA,
    "--max-lora-rank": _LORA,
    "--max-cpu-loras": _LORA,
    "--disable-log-stats": "always on: metrics",
    "--quantization": "quantization of the profile",
    "--quantization-config": "quantization of the profile",
    "--kv-cache-dtype": "kv_cache_dtype of the profile",
    "--dtype": "dtype of the profile",
    "--ssl-keyfile": _GATE,
    "--ssl-certfile": _GATE,
    "--ssl-ca-certs": _GATE,
    "--ssl-cert-reqs": _GATE,
    "--ssl-ciphers": _GATE,
    "--enable-ssl-refresh": _GATE,
    "--log-level": _LOG,
    "--logging-config": _LOG,
    "--log-config-file": _LOG,
    "--help": "nothing: it would print and exit",
    "--version": "nothing: it would print and exit",
}
_IMPORTS = "imports code by name"
_SENDS = "sends what users wrote to other hosts"
_REFUSED = {
    "--trust-remote-code": "executes code that comes with the model",
    "--worker-cls": _IMPORTS,
    "--worker-extension-cls": _IMPORTS,
    "--scheduler-cls": _IMPORTS,
    "--middleware": _IMPORTS,
    "--logits-processors": _IMPORTS,
    "--tool-parser-plugin": _IMPORTS,
    "--reasoning-parser-plugin": _IMPORTS,
    "--io-processor-plugin": _IMPORTS,
    "--tool-server": "lets requests execute tools",
    "--additional-config": "is handed to plugins that nobody checked",
    "--hf-overrides": "can name code to load with the model",
    "--model-loader-extra-config": "can name other files to load",
    "--kv-transfer-config": _SENDS,
    "--allowed-local-media-path": "lets requests read files of the host",
    "--model-class-overrides": _IMPORTS,
    "--hf-config-path": "reads a configuration that nothing was checked against",
    "--trust-request-chat-template": "lets requests bring templates to execute",
    "--trust-request-mm-kwargs": "lets requests set options of the model's processor",
    "--profiler-config": "opens routes that write files",
    "--mm-encoder-fp8-scale-save-path": "writes files by name",
    "--ec-transfer-config": _SENDS,
    "--kv-events-config": _SENDS,
    "--otlp-traces-endpoint": _SENDS,
    "--weight-transfer-config": "lets others replace the weights",
    "--ray-workers-use-nsight": "starts another program in place of the workers",
}
_ALLOW_DEPRECATED = "--allow-deprecated-quantization"
_DEPRECATED = ("fbgemm_fp8", "fp_quant")
_BFLOAT16_ONLY = ("mxfp4", "gpt_oss_mxfp4")
_OTHER = ("--load-format", "--max-model-len", _ALLOW_DEPRECATED)
_SHORT = {"-h": "--help", "-v": "--version"}
_KV_CACHE_DTYPES = {
    # Without an entry of its own in vLLM's backends a value counts as runnable everywhere; fp8 needs FlashInfer (8.0) at the least.
    "auto": 0,
    "float16": 0,
    "bfloat16": 80,
    "fp8": 80,
    "fp8_e4m3": 80,
    "fp8_e5m2": 80,
    "fp8_inc": 0,
    "fp8_ds_mla": 80,
    "fp8_per_token_head": 80,
    "int8_per_token_head": 0,
    "int4_per_token_head": 0,
    "nvfp4": 80,
    "nvfp4_4over6": 80,
    "nvfp4_ds_mla": 80,
    "turboquant_3bit_nc": 0,
    "turboquant_4bit_nc": 0,
    "turboquant_k3v4_nc": 0,
    "turboquant_k8v4": 0,
    "ultraquant_4bit": 0,
}
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vLLM config/lora.py MaxLoRARanks
NON_CARRY_OVER = "ray_non_carry_over_env_vars.json"  # vLLM ray/ray_env.py, read from VLLM_CONFIG_ROOT
# What Ray puts behind its directory: /ray/session_2026-01-31_12-00-00_123456_4194304/sockets/plasma_store.1, in at most 107 bytes (ray/_private/utils.py).
_RAY_SOCKET = len("/ray/session_2026-01-31_12-00-00_123456_4194304/sockets/plasma_store.1")
_SOCKET_PATH = 107


class Adapter(Engine):
    context_option = "--max-model-len"
    name = "vllm"
    in_flight_metrics = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    programs = ("vllm",)
    is_python = True
    without_device = "Failed to infer device type"  # vLLM 0.33.0, vllm --version
    optional_programs = ("ray",)
    warmup_503 = False  # connections are refused until it serves; a 503 is a dead engine
    data_parallel = True
    cpu_parallel = True
    distributed = ("mp", "ray")
    dp_modes = ("internal", "hybrid")
    dtypes = torch_stack.DTYPES
    kv_cache_dtypes = _KV_CACHE_DTYPES
    quantizations = VLLM
    schemes = VLLM_SCHEMES
    quantization_packages = {"gguf": "vllm-gguf-plugin", "bitsandbytes": "vllm-bnb-plugin"}  # no part of vLLM any more
    capability_floor = VLLM_FLOOR
    owned = _OWNED
    refused = _REFUSED
    parser = PARSER
    grammar = grammar_of(PARSER, (*_OWNED, *_REFUSED, *_OTHER), _SHORT, underscores=True, dotted=True, glued_shorts=True)

    # ---- what a profile may ask for

    def validate(self, profile: Profile, where: str, findings: Findings) -> None:
        super().validate(profile, where, findings)
        torch_stack.check_load_format(self, profile, where, findings)
        self._validate_nodes(profile, where, findings)
        self._validate_data_parallel(profile, where, findings)
        self._validate_quantization(profile, where, findings)
        for number, adapter in enumerate(profile.adapters):
            if "," in adapter.path:
                findings.fault(
                    "%s.adapters[%d].path" % (where, number), adapter.path, "a path without ,", "vLLM takes what has a comma for JSON (--lora-modules)."
                )

    def _validate_nodes(self, profile: Profile, where: str, findings: Findings) -> None:
        if profile.distributed == "ray" and profile.nodes == 1:
            findings.fault("%s.distributed" % where, "ray", "mp on one node", "Ray joins nodes.")
        world = profile.tp * profile.pp * profile.dp
        if profile.on_cpu and world % profile.nodes:
            findings.fault(
                "%s.nodes" % where,
                profile.nodes,
                "a divisor of tp %d x pp %d x dp %d = %d" % (profile.tp, profile.pp, profile.dp, world),
                "Every node runs the same number of processes.",
            )

    def _validate_quantization(self, profile: Profile, where: str, findings: Findings) -> None:
        name = (profile.quantization or "").lower()
        if name in _DEPRECATED and not any(spelled.option == _ALLOW_DEPRECATED for spelled in find(profile.args, self.grammar)):
            findings.fault("%s.quantization" % where, name, "%s in args" % _ALLOW_DEPRECATED, "vLLM has deprecated it, and refuses it without that.")
        if name in _BFLOAT16_ONLY and profile.dtype not in (None, "auto", "bfloat16"):
            findings.fault("%s.dtype" % where, profile.dtype, "bfloat16 with quantization %s" % name, "Its kernels compute in bfloat16 only.")

    def _validate_data_parallel(self, profile: Profile, where: str, findings: Findings) -> None:
        if profile.dp_mode == "hybrid" and (profile.nodes == 1 or profile.dp < 2 * profile.nodes):
            findings.fault(
                "%s.dp_mode" % where,
                "hybrid with dp %d on %d nodes" % (profile.dp, profile.nodes),
                "two or more data parallel ranks on each of several nodes",
                "Hybrid balances over the ranks of one node, behind a balancer of your own over the nodes; with one rank a node vLLM takes external balancing, "
                "which only MoE models have.",
            )
        if profile.dp == 1:
            return
        if profile.distributed == "ray":
            findings.fault(
                "%s.dp" % where, "dp %d with distributed ray" % profile.dp, "distributed mp", "Data parallel over a Ray cluster can hang for ever (vllm#44878)."
            )
        if profile.dp % profile.nodes:
            findings.fault("%s.dp" % where, profile.dp, "a multiple of nodes (%d)" % profile.nodes, "Each node runs whole data parallel ranks.")

    def warnings(self, profile: Profile, findings: Findings) -> None:
        if profile.distributed != "ray":
            return
        findings.warn(
            "distributed",
            "ray over %d nodes" % profile.nodes,
            "a network that only the replica's hosts reach",
            "Whoever reaches Ray's ports can run code as the service's user: keep them inside a firewall.",
        )
        if profile.on_cpu:
            findings.warn("distributed", "ray without GPUs", "distributed mp", "vLLM's own CPU platform refuses Ray; a platform plugin can allow it.")

    def check_shard(self, shard: Shard, findings: Findings) -> None:
        profile = shard.profile
        if profile.distributed == "ray":
            self._check_ray(shard, findings)
        for gpu in shard.gpus:
            if (gpu.get("partition") or {}).get("kind"):
                findings.warn(
                    "gpus", "a MIG device", "a whole GPU", "vLLM may take another GPU's memory for the device's (vllm#41848).", host=shard.host, rank=shard.rank
                )
        for adapter in profile.adapters:
            for seen, wanted in _unsupported((shard.models.get(adapter.path) or {}).get("config") or {}):
                findings.fault("adapters.%s" % adapter.name, seen, wanted, "vLLM refuses the adapter (lora/peft_helper.py).", host=shard.host, rank=shard.rank)
        for adapter, rank in zip(profile.adapters, torch_stack.adapter_ranks(shard)):
            if rank is not None and rank > LORA_RANKS[-1]:
                findings.fault(
                    "adapters.%s" % adapter.name,
                    "LoRA rank %d" % rank,
                    "at most %d" % LORA_RANKS[-1],
                    "vLLM serves no larger ones.",
                    host=shard.host,
                    rank=shard.rank,
                )
            elif rank is None and shard.is_leader:
                findings.warn(
                    "adapters.%s" % adapter.name,
                    "an unknown LoRA rank",
                    "r in %s/adapter_config.json" % adapter.path,
                    "An adapter of a rank above 16 then fails at start.",
                )

    def _check_ray(self, shard: Shard, findings: Findings) -> None:
        if shard.build and "ray" not in (shard.build.get("paths") or {}):
            findings.fault(
                "engines.vllm",
                "build %s without ray" % shard.build.get("name"),
                "the program ray beside vllm",
                "Install Ray into the build's environment and register it again, or use distributed: mp.",
                host=shard.host,
                rank=shard.rank,
            )
        if len(shard.work_dir.encode()) + _RAY_SOCKET > _SOCKET_PATH:
            findings.fault(
                "replica_name",
                shard.work_dir,
                "a working directory of at most %d bytes" % (_SOCKET_PATH - _RAY_SOCKET),
                "Ray's sockets lie below it: take a shorter replica_name or replica_root, or distributed: mp.",
                host=shard.host,
                rank=shard.rank,
            )

    # ---- what each rank runs

    def serves_http(self, profile: Profile, rank: int) -> bool:
        return rank == 0 or profile.dp_mode == "hybrid"

    def launches(self, shard: Shard) -> list[Launch]:
        if shard.profile.distributed != "ray" or not shard.has_peers:
            return [self._server(shard)]
        return [self._ray(shard), self._server(shard)] if shard.is_leader else [self._ray(shard)]

    def _server(self, shard: Shard) -> Launch:
        profile = shard.profile
        args = [
            "serve",
            profile.model_path,
            *profile.args,
            "--served-model-name",
            profile.served_model_name,
            "--tensor-parallel-size",
            str(profile.tp),
            "--pipeline-parallel-size",
            str(profile.pp),
        ]
        if self.serves_http(profile, shard.rank):
            args += ["--host", shard.http_host, "--port", str(shard.http_port)]
        for option, value in (("--dtype", profile.dtype), ("--kv-cache-dtype", profile.kv_cache_dtype), ("--quantization", profile.quantization)):
            args += [option, value] if value else []
        args += self._lora(shard) + self._data_parallel(profile, shard) + self._nodes(profile, shard)
        env, ray = self._environment(shard), profile.distributed == "ray" and shard.has_peers
        if ray:
            env["RAY_ADDRESS"] = (torch_stack.host_port(shard.leader_address, shard.leader_port), "the Ray cluster that the ranks of this replica form")
            env["VLLM_CONFIG_ROOT"] = (shard.current_dir, "the revision names the variables that Ray may not carry to other ranks (%s)" % NON_CARRY_OVER)
        return Launch(
            name="vllm",
            path=self.program(shard, "vllm"),
            args=tuple(args),
            env=env,
            secret_env={"VLLM_API_KEY": "api_key"} if shard.has_key and self.serves_http(profile, shard.rank) else {},
            wait_for_leader_port=shard.leader_port if ray else None,
        )

    def _lora(self, shard: Shard) -> list[str]:
        adapters = shard.profile.adapters
        if not adapters:
            return []
        args = [
            "--enable-lora",
            "--lora-modules",
            *("%s=%s" % (adapter.name, adapter.path) for adapter in adapters),
            "--max-loras",
            str(min(len(adapters), torch_stack.MOST_ACTIVE_ADAPTERS)),
            "--max-cpu-loras",
            str(len(adapters)),
        ]
        highest = max(16 if rank is None else rank for rank in torch_stack.adapter_ranks(shard))
        allowed = next((rank for rank in LORA_RANKS if rank >= highest), LORA_RANKS[-1])
        return [*args, "--max-lora-rank", str(allowed)]

    def _data_parallel(self, profile: Profile, shard: Shard) -> list[str]:
        """Internal: rank 0 serves for all. Hybrid: every node serves for its own ranks. A start rank on an internal leader would switch to hybrid."""
        if profile.dp == 1:
            return []
        local = profile.dp // profile.nodes
        args = ["--data-parallel-size", str(profile.dp)]
        if profile.nodes == 1:
            return args
        args += ["--data-parallel-size-local", str(local), "--data-parallel-address", shard.leader_address, "--data-parallel-rpc-port", str(shard.leader_port)]
        if profile.dp_mode == "hybrid":
            return [*args, "--data-parallel-hybrid-lb", "--data-parallel-start-rank", str(shard.rank * local)]
        return args if shard.is_leader else [*args, "--data-parallel-start-rank", str(shard.rank * local), "--headless"]

    def _nodes(self, profile: Profile, shard: Shard) -> list[str]:
        if not shard.has_peers:
            return []
        timeout = ["--distributed-timeout-seconds", str(torch_stack.rendezvous_timeout(profile))]
        if profile.distributed == "ray":
            return ["--distributed-executor-backend", "ray", *timeout]
        if profile.dp > 1:
            return timeout
        args = [
            "--distributed-executor-backend",
            "mp",
            "--nnodes",
            str(profile.nodes),
            "--node-rank",
            str(shard.rank),
            "--master-addr",
            shard.leader_address,
            "--master-port",
            str(shard.leader_port),
            *timeout,
        ]
        return args if shard.is_leader else [*args, "--headless"]

    def _environment(self, shard: Shard) -> torch_stack.Variables:
        profile = shard.profile
        env = torch_stack.environment(shard, "VLLM_CACHE_ROOT", "vllm")
        env["VLLM_HOST_IP"] = (shard.address, "the rank's own address: its queues bind to it, and other ranks connect to it")
        env["VLLM_NO_USAGE_STATS"] = ("1", "nothing is reported to anybody")
        env["VLLM_ENGINE_READY_TIMEOUT_S"] = (str(profile.ready_timeout), "ready_timeout of the profile: API servers would give up on their engine after 600 s")
        if profile.on_cpu and profile.threads:
            env["VLLM_CPU_OMP_THREADS_BIND"] = ("nobind", "threads of the profile counts: vLLM's own binding would set another number")
        if profile.distributed == "ray" and shard.has_peers:
            env["RAY_TMPDIR"] = (shard.work_dir, "Ray's sockets and logs below the service's own directory: /tmp/ray belongs to whoever came first")
            env["RAY_USAGE_STATS_ENABLED"] = ("0", "nothing is reported to anybody")
            if profile.on_cpu:
                # Ray counts what is declared against this list (_private/resource_and_label_spec.py); to CUDA -1 is no GPU.
                env["CUDA_VISIBLE_DEVICES"] = (",".join(["-1"] * self._ray_devices(profile)), "the devices that Ray is told of; a CPU shard sees no GPU")
        return env

    # ---- Ray

    def _ray(self, shard: Shard) -> Launch:
        """One node of the Ray cluster. Workers inherit the environment of this process, so everything that is particular to the host is in it."""
        profile = shard.profile
        where = (
            ["--head", "--port", str(shard.leader_port), "--include-dashboard=false"]
            if shard.is_leader
            else ["--address", torch_stack.host_port(shard.leader_address, shard.leader_port)]
        )
        args = ["start", *where, "--node-ip-address", shard.address, "--num-gpus", str(self._ray_devices(profile)), "--disable-usage-stats", "--block"]
        return Launch(
            name="ray-head" if shard.is_leader else "ray-worker",
            path=self.program(shard, "ray"),
            args=tuple(args),
            env=self._environment(shard),
            wait_for_leader_port=None if shard.is_leader else shard.leader_port,
        )

    @staticmethod
    def _ray_devices(profile: Profile) -> int:
        """By which Ray places the ranks of a node. Without GPUs they are declared, one for each rank."""
        return profile.gpus_per_node or profile.tp * profile.pp // profile.nodes

    def revision_files(self, shard: Shard, variables: t.Collection[str]) -> dict[str, str]:
        """vLLM's driver gives its whole environment to Ray's workers on all hosts, the key included, unless the names are in this file (ray_env_utils.py)."""
        if shard.profile.distributed != "ray" or not shard.has_peers or not shard.is_leader:
            return {}
        return {NON_CARRY_OVER: json.dumps(sorted({*variables, "RANKZERO_SHARD"}), indent=1) + "\n"}


def _unsupported(config: t.Mapping[str, t.Any]) -> t.Iterator[tuple[str, str]]:
    """(seen, wanted) of what an adapter_config.json says that vLLM does not serve."""
    modules = config.get("modules_to_save") or []
    others = [str(name) for name in modules if name not in ("classifier", "score")] if isinstance(modules, list) else [str(modules)]
    if others:
        yield "modules_to_save %s" % ", ".join(others), "none but classifier and score"
    if config.get("use_dora"):
        yield "a DoRA adapter", "a LoRA adapter (use_dora false)"
    if config.get("lora_bias") or config.get("bias") not in (None, "none"):
        yield "an adapter with biases", "bias none, lora_bias false"
