# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""llama.cpp: C(llama-server), and C(ggml-rpc-server) on the ranks after the first.

Facts of builds 0.1.0 to 0.6.0 (b11434). Two silent failures are turned into exits: the GPU backend that does not load (an explicit
C(--device) that does not exist is an error, C(-ngl) alone is only a warning), and an RPC rank that is not there (C(--rpc) before
C(--device RPC0): llama-server otherwise starts alone and says it is healthy).
"""

from __future__ import annotations

from ansible_collections.rankzero.inference.plugins.plugin_utils.arguments import find, grammar_of
from ansible_collections.rankzero.inference.plugins.plugin_utils.engines.base import Engine, Launch, Shard
from ansible_collections.rankzero.inference.plugins.plugin_utils.engines.option_names import LLAMACPP as PARSER
from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Findings
from ansible_collections.rankzero.inference.plugins.plugin_utils.profile import Profile
from ansible_collections.rankzero.inference.plugins.plugin_utils.quantization import LLAMACPP_FLOOR

# Canonical option -> its other spellings (llama.cpp b11434, common/arg.cpp). Names are matched exactly, with _ for -.
_OWNED = {
    "--model": (("-m",), "model_path of the profile"),
    "--hf-repo": (("-hf", "-hfr"), "model_path of the profile"),
    "--hf-file": (("-hff",), "model_path of the profile"),
    "--model-url": (("-mu",), "model_path of the profile"),
    "--docker-repo": (("-dr",), "model_path of the profile"),
    "--alias": (("-a",), "served_model_name of the profile"),
    "--host": ((), "replica_http_host or the management address"),
    "--port": ((), "replica_http_port"),
    "--reuse-port": ((), "replica_http_port"),
    "--api-prefix": ((), "the readiness gate's paths"),
    "--api-key": ((), "replica_api_key"),
    "--api-key-file": ((), "replica_api_key"),
    "--metrics": ((), "always on"),
    "--rpc": ((), "nodes of the profile"),
    "--device": (("-dev",), "the shard's GPUs"),
    "--n-gpu-layers": (("-ngl", "--gpu-layers"), "gpus_per_node of the profile"),
    "--fit": (("-fit",), "always off: it may leave layers on the CPU"),
    "--split-mode": (("-sm",), "the shard's GPUs"),
    "--tensor-split": (("-ts",), "the shard's GPUs"),
    "--main-gpu": (("-mg",), "the shard's GPUs"),
    "--lora": ((), "adapters of the profile"),
    "--lora-scaled": ((), "adapters of the profile"),
    "--lora-init-without-apply": ((), "adapters of the profile"),
    "--threads": (("-t",), "threads of the profile"),
    "--threads-http": ((), "the plan"),
    "--log-file": ((), "the service's log"),
    "--log-disable": ((), "the evidence in the log"),
    "--log-verbosity": (("-lv", "--verbosity", "-v", "--verbose", "--log-verbose"), "the evidence in the log"),
    "--ssl-key-file": ((), "the readiness gate, which speaks plain HTTP"),
    "--ssl-cert-file": ((), "the readiness gate, which speaks plain HTTP"),
    "--list-devices": ((), "nothing: it would list and exit"),
    "--version": ((), "nothing: it would print and exit"),
    "--help": (("-h", "--usage"), "nothing: it would print and exit"),
    "--slots": (("--no-slots",), "always off"),
    "--hf-token": ((), "nothing: models are local files"),
    "--mmproj-url": ((), "model_path of the profile"),
    "--hf-repo-draft": ((), "model_path of the profile"),
    "--cache-list": ((), "nothing: it would list and exit"),
    "--completion-bash": ((), "nothing: it would print and exit"),
    "--device-draft": ((), "the shard's GPUs"),
    # Presets name a model to download, and its port.
    **dict.fromkeys(
        (
            "--embd-gemma-default",
            "--fim-qwen-1.5b-default",
            "--fim-qwen-3b-default",
            "--fim-qwen-7b-default",
            "--fim-qwen-7b-spec",
            "--fim-qwen-14b-spec",
            "--fim-qwen-30b-default",
            "--gpt-oss-20b-default",
            "--gpt-oss-120b-default",
            "--vision-gemma-4b-default",
            "--vision-gemma-12b-default",
        ),
        ((), "model_path of the profile"),
    ),
}
_REFUSED = {
    "--tools": ((), "lets requests execute shell commands and write files"),
    "--agent": (("-ag",), "lets requests execute tools"),
    "--tools-runtime": ((), "executes tools"),
    "--mcp-servers-config": ((), "starts programs"),
    "--mcp-servers-json": ((), "starts programs"),
    "--ui-mcp-proxy": ((), "proxies to other servers"),
    "--models-dir": ((), "turns the server into a router that is healthy without a model"),
    "--models-preset": ((), "turns the server into a router that is healthy without a model"),
    "--path": ((), "serves files of the host"),
    "--media-path": ((), "serves files of the host"),
    "--slot-save-path": ((), "writes files by request"),
    "--props": ((), "lets requests change the server"),
    "--video-ffmpeg-dir": ((), "names programs to execute"),
    "--override-kv": ((), "changes the model's own metadata"),
    "--log-prompts-dir": ((), "writes what users wrote to files"),
    "--lookup-cache-dynamic": ((), "writes files by name"),
    "--models-max": ((), "turns the server into a router that is healthy without a model"),
    "--models-autoload": ((), "turns the server into a router that is healthy without a model"),
}


def _spellings(table: dict[str, tuple[tuple[str, ...], str]]) -> dict[str, str]:
    return {spelling: option for option, (others, _why) in table.items() for spelling in (option, *others)}


_OTHER = ("--ctx-size", "--cache-type-k", "--cache-type-v")  # read for what they say, not refused


class Adapter(Engine):
    name = "llamacpp"
    in_flight_metrics = ("llamacpp:requests_processing", "llamacpp:requests_deferred")
    programs = ("llama-server",)
    optional_programs = ("ggml-rpc-server",)
    devices_args = ("--list-devices",)
    falls_back_to_cpu = True
    adapters_path = "/lora-adapters"
    uses_nccl = False  # RPC over TCP
    heads_divide = False
    capability_floor = LLAMACPP_FLOOR
    owned = {option: why for option, (_others, why) in _OWNED.items()}
    refused = {option: what for option, (_others, what) in _REFUSED.items()}
    parser = PARSER
    grammar = grammar_of(PARSER, (*_OWNED, *_REFUSED, *_OTHER), {**_spellings(_OWNED), **_spellings(_REFUSED)}, prefixes=False, underscores=True, equals=False)
    context_option = "--ctx-size"
    weights_on_gpu = 0.8  # token embeddings stay on the host

    def validate(self, profile: Profile, where: str, findings: Findings) -> None:
        super().validate(profile, where, findings)
        for number, adapter in enumerate(profile.adapters):
            if "," in adapter.path or ":" in adapter.path:
                findings.fault("%s.adapters[%d].path" % (where, number), adapter.path, "a path without , and :", "llama-server splits its LoRA option there.")
        if profile.quantization:
            findings.fault("%s.quantization" % where, profile.quantization, "no quantization", "A GGUF file carries its own quantization; choose another file.")

    def warnings(self, profile: Profile, findings: Findings) -> None:
        if profile.nodes > 1:
            findings.warn(
                "engine",
                "llamacpp over %d nodes" % profile.nodes,
                "a network that only the replica's hosts reach",
                "ggml-rpc-server has no authentication and known memory-safety bugs (llama.cpp#25289): keep its port inside a firewall.",
            )

    def expected_models(self, profile: Profile) -> list[str]:
        return [profile.served_model_name]  # adapters are listed by /lora-adapters, not as models

    def check_shard(self, shard: Shard, findings: Findings) -> None:
        """An adapter is of the model's architecture and a LoRA, or llama-server ends."""
        model = _architecture(shard, shard.profile.model_path)
        for adapter in shard.profile.adapters if shard.is_leader else ():
            config = (shard.models.get(adapter.path) or {}).get("config") or {}
            own = _architecture(shard, adapter.path)
            seen = None
            if model and own and own != model:
                seen = "an adapter for %s" % own
            elif "highest_rank" in config and config.get("peft_type") not in ("LORA", None):
                seen = "an adapter of type %s" % config["peft_type"]
            elif own and "highest_rank" not in config:
                seen = "a model"
            if seen:
                findings.fault("adapters.%s" % adapter.name, seen, "a LoRA adapter%s" % (" for %s" % model if model else ""), host=shard.host, rank=shard.rank)

    def cache_bytes(self, profile: Profile) -> float:
        """16 bits, unless the arguments choose another type; 4 bits are the smallest there are."""
        return 0.5 if any(spelled.option.startswith("--cache-type-") for spelled in find(profile.args, self.grammar)) else 2.0

    def needs_model(self, profile: Profile, rank: int) -> bool:
        return rank == 0  # RPC ranks get their tensors from the leader

    def launches(self, shard: Shard) -> list[Launch]:
        return [self._server(shard)] if shard.is_leader else [self._rpc_server(shard)]

    def _server(self, shard: Shard) -> Launch:
        profile = shard.profile
        args = [
            *profile.args,
            "--model",
            profile.model_path,
            "--alias",
            profile.served_model_name,
            "--host",
            shard.http_host,
            "--port",
            str(shard.http_port),
            "--metrics",
            "--no-slots",
            "-lv",
            "4",
            "-fit",
            "off",
        ]
        if shard.has_peers:
            args += ["--rpc", ",".join("%s:%d" % (peer.address, shard.leader_port) for peer in shard.peers)]
        devices = self._devices(shard)
        args += ["--device", ",".join(devices) or "none", "-ngl", "all" if devices else "0"]
        if profile.threads:
            args += ["--threads", str(profile.threads)]
        for adapter in profile.adapters:
            args += ["--lora", adapter.path]
        return Launch(
            name="llama-server",
            path=self.program(shard, "llama-server"),
            args=tuple(args),
            secret_env={"LLAMA_API_KEY": "api_key"} if shard.has_key else {},
            wait_for_ranks=tuple((peer.rank, peer.address, shard.leader_port) for peer in shard.peers),
        )

    def _rpc_server(self, shard: Shard) -> Launch:
        args = ["--host", shard.address, "--port", str(shard.leader_port)]
        args += ["--device", ",".join(self._local_devices(shard)) or "CPU"]
        if shard.profile.threads:
            args += ["--threads", str(shard.profile.threads)]
        return Launch(name="ggml-rpc-server", path=self.program(shard, "ggml-rpc-server"), args=tuple(args))

    def _devices(self, shard: Shard) -> list[str]:
        """RPC devices come first in llama.cpp's own list; a CPU rank offers one, a GPU rank one for each GPU."""
        remote = len(shard.peers) * max(shard.profile.gpus_per_node, 1)
        return ["RPC%d" % number for number in range(remote)] + self._local_devices(shard)

    def _local_devices(self, shard: Shard) -> list[str]:
        prefix = "CUDA"
        for device in shard.build.get("devices") or ():
            name = str(device.get("name") if isinstance(device, dict) else device)
            if name and not name.startswith("RPC"):
                prefix = name.rstrip("0123456789")
                break
        return ["%s%d" % (prefix, number) for number in range(len(shard.gpus))]

    def listen_ports(self, shard: Shard) -> list[tuple[str, int, str]]:
        if shard.is_leader:
            return [(shard.http_host, shard.http_port, "HTTP")]
        return [(shard.address, shard.leader_port, "the RPC server")]

    def accepts_on_port(self, shard: Shard) -> int | None:
        return None if shard.is_leader else shard.leader_port

    def devices_command(self, shard: Shard) -> tuple[str, tuple[str, ...]]:
        return self.program(shard, "llama-server"), ("--list-devices",)


def _architecture(shard: Shard, path: str) -> str | None:
    """What a GGUF header says that it is."""
    found = ((shard.models.get(path) or {}).get("config") or {}).get("architectures")
    return str(found[0]) if isinstance(found, list) and found else None
