# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""SGLang: one node, or several by its own rendezvous, with attention data parallel inside of the tensor parallel group.

Facts of release 0.5.23. Two things that it does not refuse are refused here: layouts of tp, pp and nodes for which ranks are missing (its own check is
weaker than its arithmetic), and more than one node without C(--dist-init-addr), which waits for ever. It has no variable for the API key, so the key
comes in a YAML file.
"""

from __future__ import annotations

from ansible_collections.rankzero.inference.plugins.plugin_utils.arguments import grammar_of
from ansible_collections.rankzero.inference.plugins.plugin_utils.engines import torch_stack
from ansible_collections.rankzero.inference.plugins.plugin_utils.engines.base import Engine, Launch, Shard
from ansible_collections.rankzero.inference.plugins.plugin_utils.engines.option_names import SGLANG as PARSER
from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Findings
from ansible_collections.rankzero.inference.plugins.plugin_utils.profile import Profile
from ansible_collections.rankzero.inference.plugins.plugin_utils.quantization import SGLANG, SGLANG_FLOOR, SGLANG_SCHEMES

_GATE = "the readiness gate, which asks plain HTTP at the root"
_SHAPE = "tp, pp, dp, attention_dp, nodes and gpus_per_node of the profile"
_LORA = "adapters of the profile"
_LOG = "the service's log"
_OWNED = {
    "--model-path": "model_path of the profile",
    "--model-type": "the engine",
    "--served-model-name": "served_model_name of the profile",
    "--host": "replica_http_host or the management address",
    "--port": "replica_http_port",
    "--config": "the profile and replica_api_key",
    "--dist-init-addr": "the leader's address",
    "--nnodes": "nodes of the profile",
    "--node-rank": "the rank that the plan gave the host",
    "--nccl-port": "replica_leader_port",
    "--dist-timeout": "ready_timeout of the profile",
    "--tp-size": _SHAPE,
    "--pp-size": _SHAPE,
    "--dp-size": _SHAPE,
    "--attn-dp-size": _SHAPE,
    "--enable-dp-attention": _SHAPE,
    "--ep-size": _SHAPE,
    "--max-ep-size": _SHAPE,
    "--dcp-size": _SHAPE,
    "--attn-cp-size": _SHAPE,
    "--base-gpu-id": "the shard's GPUs",
    "--gpu-id-step": "the shard's GPUs",
    "--device": "gpus_per_node of the profile",
    "--use-ray": "distributed of the profile",
    "--api-key": "replica_api_key",
    "--admin-api-key": "replica_api_key",
    "--enable-metrics": "always on",
    "--skip-server-warmup": "never: the gate would see it ready too early",
    "--enable-lora": _LORA,
    "--lora-paths": _LORA,
    "--max-lora-rank": _LORA,
    "--max-loras-per-batch": _LORA,
    "--max-loaded-loras": _LORA,
    "--quantization": "quantization of the profile",
    "--kv-cache-dtype": "kv_cache_dtype of the profile",
    "--dtype": "dtype of the profile",
    "--grpc-port": _GATE,
    "--grpc-mode": _GATE,
    "--smg-grpc-mode": _GATE,
    "--encoder-only": _GATE,
    "--tokenizer-worker-num": "replica_api_key, which works with one only",
    "--gated-launch-port": "the readiness gate",
    "--grpc-http-sidecar-port": _GATE,
    "--enable-http-worker-reuseport": "replica_http_port",
    "--moe-data-parallel-size": _SHAPE,
    "--dwdp-size": _SHAPE,
    "--quantize-and-serve": "quantization of the profile",
    "--modelopt-quant": "quantization of the profile",
    "--fastapi-root-path": _GATE,
    "--ssl-keyfile": _GATE,
    "--ssl-certfile": _GATE,
    "--ssl-ca-certs": _GATE,
    "--ssl-keyfile-password": _GATE,
    "--enable-ssl-refresh": _GATE,
    "--log-level": _LOG,
    "--log-level-http": _LOG,
    "--help": "nothing: it would print and exit",
}
_WRITES = "writes files by name"
_SENDS = "sends what users wrote to other hosts"
_WEIGHTS = "loads weights from elsewhere than model_path"
_PART = "makes the replica a part of a deployment that the plan does not know"
_REFUSED = {
    "--custom-weight-loader": "imports code by name",
    "--forward-hooks": "imports code by name",
    "--tool-server": "lets requests execute tools",
    "--sidecar": "starts programs",
    "--sidecar-args": "starts programs",
    "--model-loader-extra-config": "can name other files to load",
    "--json-model-override-args": "can name code to load with the model",
    "--trust-remote-code": "executes code that comes with the model",
    "--enable-custom-logit-processor": "unpickles what requests send",
    "--delete-ckpt-after-loading": "deletes the model's files",
    "--export-metrics-to-file-dir": _WRITES,
    "--crash-dump-folder": _WRITES,
    "--warmups": "imports code by name",
    "--msprobe-dump-config": _WRITES,
    "--debug-tensor-dump-output-folder": _WRITES,
    "--debug-tensor-dump-input-file": "replaces what users wrote",
    "--export-metrics-to-file": _WRITES,
    "--modelopt-checkpoint-save-path": _WRITES,
    "--modelopt-export-path": _WRITES,
    "--spec-trace-dir": _WRITES,
    "--log-requests-target": _WRITES,
    "--file-storage-path": _WRITES,
    "--decrypted-config-file": "reads a configuration that nothing was checked against",
    "--model-config-parser": "reads a configuration that nothing was checked against",
    "--trust-request-chat-template": "lets requests bring templates to execute",
    "--hicache-storage-backend": "can import code by name, and sends what users wrote to other hosts",
    "--hicache-storage-backend-extra-config": "can import code by name",
    "--otlp-traces-endpoint": _SENDS,
    "--kv-events-config": _SENDS,
    "--load-publish-endpoint": _SENDS,
    "--remote-instance-weight-loader-seed-instance-ip": _WEIGHTS,
    "--remote-instance-weight-loader-start-seed-via-transfer-engine": "gives the weights to other hosts",
    "--modelexpress-config": _WEIGHTS,
    "--checkpoint-engine-wait-weights-before-ready": _WEIGHTS,
    "--weight-cache-mode": _WEIGHTS,
    "--disaggregation-mode": _PART,
    "--encoder-urls": _PART,
    "--encoder-register-urls": _PART,
    "--language-only": _PART,
    "--decoupled-spec-role": _PART,
    "--elastic-ep-join-mode": _PART,
    "--elastic-ep-backend": _PART,
}
_OTHER = ("--load-format", "--context-length")
# srt/mem_cache/kv_cache_dtype.py and arg_groups/kv_cache_hook.py
_KV_CACHE_DTYPES = {"auto": 0, "fp8_e5m2": 0, "fp8_e4m3": 0, "mxfp8": 100, "bf16": 80, "bfloat16": 80, "nvfp4": 100, "fp4_mx_block16": 0}
_ATTENTION_DP_PORTS = (0, 1, 2, 3, 4, 5, 6, 13)  # distances from the rendezvous port (server_args.py PortArgs)
_ZMQ_TCP_PORT_DELTA = 233
KEY_FILE = "sglang.yaml"


class Adapter(Engine):
    context_option = "--context-length"
    name = "sglang"
    in_flight_metrics = ("sglang:num_running_reqs", "sglang:num_queue_reqs")
    programs = ("sglang",)
    is_python = True
    version_args = ("version",)
    gpu_token = "index"  # custom_all_reduce.py makes integers of CUDA_VISIBLE_DEVICES
    data_parallel = True
    attention_data_parallel = True
    cpu_parallel = True
    dtypes = torch_stack.DTYPES
    kv_cache_dtypes = _KV_CACHE_DTYPES
    quantizations = SGLANG
    schemes = SGLANG_SCHEMES
    elsewhere_quantizations = {"modelslim": "Ascend NPUs", "mxfp_w4a8": "Ascend NPUs", "mlx_q4": "Apple's processors", "mlx_q8": "Apple's processors"}
    capability_floor = SGLANG_FLOOR
    owned = _OWNED
    refused = _REFUSED
    parser = PARSER
    grammar = grammar_of(PARSER, (*_OWNED, *_REFUSED, *_OTHER), {"-h": "--help"})

    # ---- what a profile may ask for

    def validate(self, profile: Profile, where: str, findings: Findings) -> None:
        super().validate(profile, where, findings)
        torch_stack.check_load_format(self, profile, where, findings)
        self._validate_ranks(profile, where, findings)
        self._validate_data_parallel(profile, where, findings)
        if profile.quantization == "gptq" and not profile.on_cpu:
            findings.fault("%s.quantization" % where, "gptq", "gptq_marlin", "On GPUs SGLang has the plain name as a choice, and no implementation of it.")
        if profile.on_cpu and profile.kv_cache_dtype == "fp8_e5m2":
            findings.fault("%s.kv_cache_dtype" % where, "fp8_e5m2", "another type on CPUs", "SGLang refuses it there.")

    def _validate_ranks(self, profile: Profile, where: str, findings: Findings) -> None:
        """Which ranks a node runs (srt/entrypoints/engine.py). SGLang itself checks tp x pp % nodes only, and then waits for ranks that no node runs."""
        nodes, tp, pp = profile.nodes, profile.tp, profile.pp
        whole_stages = pp % nodes == 0
        split_stages = nodes % pp == 0 and tp % (nodes // pp) == 0
        if nodes > 1 and not (whole_stages or split_stages):
            findings.fault(
                "%s.nodes" % where,
                "%d nodes with tp %d and pp %d" % (nodes, tp, pp),
                "pp a multiple of nodes; or nodes a multiple of pp, and tp of nodes / pp",
                "SGLang would wait for ranks that no node runs.",
            )

    def _validate_data_parallel(self, profile: Profile, where: str, findings: Findings) -> None:
        if profile.dp > 1 and profile.nodes > 1:
            findings.fault(
                "%s.dp" % where,
                "dp %d on %d nodes" % (profile.dp, profile.nodes),
                "dp 1",
                "SGLang has no data parallel over nodes: use attention_dp, or several replicas.",
            )
        if profile.dp > 1 and profile.attention_dp > 1:
            findings.fault("%s.attention_dp" % where, "%d with dp %d" % (profile.attention_dp, profile.dp), "one of the two", "SGLang refuses both together.")
        if profile.tp % profile.attention_dp:
            findings.fault(
                "%s.attention_dp" % where,
                profile.attention_dp,
                "a divisor of tp (%d)" % profile.tp,
                "It lies inside of the tensor parallel group, and needs no GPUs of its own.",
            )

    def warnings(self, profile: Profile, findings: Findings) -> None:
        if profile.nodes > 1:
            findings.warn(
                "engine",
                "sglang over %d nodes" % profile.nodes,
                "a network that only the replica's hosts reach",
                "Its ranks exchange pickled objects without authentication: SGLANG_ZMQ_ALLOWED_PEERS covers some sockets only (sglang#24618).",
            )

    def quantization_minimum(self, name: str) -> int | None:
        """A checkpoint that says gptq is loaded as gptq_marlin."""
        return super().quantization_minimum("gptq_marlin" if name.lower() == "gptq" else name)

    def attention_tp(self, profile: Profile) -> int:
        return profile.tp // profile.attention_dp if profile.tp % profile.attention_dp == 0 else 0

    def check_shard(self, shard: Shard, findings: Findings) -> None:
        for gpu in shard.gpus:
            if gpu.get("index") is None or (gpu.get("partition") or {}).get("kind"):
                findings.fault(
                    "gpus",
                    "GPU %s without a number of its own" % gpu.get("uuid"),
                    "a whole GPU whose index node facts know",
                    "SGLang takes GPUs by number, and MIG devices have none.",
                    host=shard.host,
                    rank=shard.rank,
                )

    # ---- what each rank runs

    def launches(self, shard: Shard) -> list[Launch]:
        """The same on every rank, but for its number, its address and the key."""
        profile = shard.profile
        args = [
            "serve",
            "--model-type",
            "llm",
            "--model-path",
            profile.model_path,
            *profile.args,
            "--served-model-name",
            profile.served_model_name,
            "--host",
            shard.http_host,
            "--port",
            str(shard.http_port),
            "--device",
            "cpu" if profile.on_cpu else "cuda",
            "--enable-metrics",
            "--tp-size",
            str(profile.tp),
            "--pp-size",
            str(profile.pp),
        ]
        for option, value in (("--dtype", profile.dtype), ("--kv-cache-dtype", profile.kv_cache_dtype), ("--quantization", profile.quantization)):
            args += [option, value] if value else []
        args += ["--dp-size", str(profile.dp)] if profile.dp > 1 else []
        args += ["--attn-dp-size", str(profile.attention_dp)] if profile.attention_dp > 1 else []
        args += self._lora(shard) + self._nodes(shard)
        keyed = shard.has_key and shard.is_leader
        if keyed:
            args += ["--config", "secrets/" + KEY_FILE]
        return [
            Launch(
                name="sglang",
                path=self.program(shard, "sglang"),
                args=tuple(args),
                env=self._environment(shard),
                secret_files={KEY_FILE: "api-key: {api_key}\n"} if keyed else {},
                secret_args={len(args) - 1: KEY_FILE} if keyed else {},
            )
        ]

    def _lora(self, shard: Shard) -> list[str]:
        """The model without an adapter takes one place of a batch too."""
        adapters = shard.profile.adapters
        if not adapters:
            return []
        return [
            "--enable-lora",
            "--lora-paths",
            *("%s=%s" % (adapter.name, adapter.path) for adapter in adapters),
            "--max-loras-per-batch",
            str(min(len(adapters) + 1, torch_stack.MOST_ACTIVE_ADAPTERS)),
        ]

    def _nodes(self, shard: Shard) -> list[str]:
        """On one node the address must not be there: several paths take its presence for more than one node (sglang#22877)."""
        if not shard.has_peers:
            return []
        return [
            "--nnodes",
            str(shard.profile.nodes),
            "--node-rank",
            str(shard.rank),
            "--dist-init-addr",
            torch_stack.host_port(shard.leader_address, shard.leader_port),
            "--dist-timeout",
            str(torch_stack.rendezvous_timeout(shard.profile)),
        ]

    def _environment(self, shard: Shard) -> torch_stack.Variables:
        env = torch_stack.environment(shard, "SGLANG_CACHE_DIR", "sglang")
        env["SGLANG_HOST_IP"] = (shard.address, "the rank's own address: its queues bind to it, and other ranks connect to it")
        if shard.has_peers:
            env["SGLANG_ZMQ_ALLOWED_PEERS"] = (
                ",".join(torch_stack.addresses(shard)),
                "only the replica's hosts: these sockets unpickle what they receive (CVE-2026-93034)",
            )
        return env

    # ---- ports

    def leader_ports(self, profile: Profile) -> tuple[int, ...]:
        return _ATTENTION_DP_PORTS if profile.attention_dp > 1 else (0,)

    def listen_ports(self, shard: Shard) -> list[tuple[str, int, str]]:
        """A follower answers on the HTTP port too: a dummy that is always healthy, and that nothing may be read into."""
        ports = super().listen_ports(shard)
        if not shard.is_leader:
            return [*ports, (shard.http_host, shard.http_port, "HTTP, health of the rank only")]
        if shard.profile.attention_dp > 1:
            base = shard.leader_port if shard.has_peers else self._local_base(shard.http_port)
            address = shard.leader_address if shard.has_peers else "127.0.0.1"
            ports += [(address, base + distance, "attention data parallel") for distance in _ATTENTION_DP_PORTS if distance or not shard.has_peers]
        return ports

    @staticmethod
    def _local_base(http_port: int) -> int:
        return http_port + _ZMQ_TCP_PORT_DELTA if http_port + _ZMQ_TCP_PORT_DELTA <= 65535 else http_port - _ZMQ_TCP_PORT_DELTA
