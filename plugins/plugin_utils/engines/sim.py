# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The simulator: a real program of this collection that behaves as an engine does, for demonstrations, drills and tests.

It speaks vLLM's dialect of the command line, so its launches look like vLLM's. See C(roles/replica/files/sim_engine.py --help).
"""

from __future__ import annotations

from ansible_collections.rankzero.inference.plugins.plugin_utils.arguments import Grammar
from ansible_collections.rankzero.inference.plugins.plugin_utils.engines.base import Engine, Launch, Shard
from ansible_collections.rankzero.inference.plugins.plugin_utils.quantization import VLLM

_OWNED = {
    "--host": "replica_http_host or the management address",
    "--port": "replica_http_port",
    "--served-model-name": "served_model_name of the profile",
    "--lora-modules": "adapters of the profile",
    "--tensor-parallel-size": "tp of the profile",
    "--pipeline-parallel-size": "pp of the profile",
    "--nnodes": "nodes of the profile",
    "--node-rank": "the rank that the plan gave the host",
    "--master-addr": "the leader's address",
    "--master-port": "replica_leader_port",
    "--headless": "the rank",
    "--dialect": "the engine",
    "--config": "the profile and replica_api_key",
    "--api-key": "replica_api_key",
    "--help": "nothing: it would print and exit",
}
_SHORT = {"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-n": "--nnodes", "-r": "--node-rank", "-q": "--quantization", "-h": "--help"}
# Everything else that sim_engine.py serve takes. It takes no abbreviations, and refuses them; here they count as what they would mean to vLLM.
_OTHER = frozenset(
    {
        "--max-model-len",
        "--distributed-timeout-seconds",
        "--enable-lora",
        "--enable-metrics",
        "--no-sim-spawn-worker",
        "--sim-warmup-seconds",
        "--sim-load-seconds",
        "--sim-gpu-mib",
        "--sim-gpu-skip",
        "--sim-gpu-extra",
        "--sim-fail",
        "--sim-fail-rank",
        "--sim-exit-after",
        "--sim-exit-code",
        "--sim-hang",
        "--sim-listen-late",
        "--sim-no-gpu",
        "--sim-ignore-term",
        "--sim-ttft",
        "--sim-itl",
        "--sim-spawn-worker",
        "--sim-orphans",
        "--sim-process-directory",
        "--quantization",
        "--metrics",
    }
)


class Adapter(Engine):
    context_option = "--max-model-len"
    name = "sim"
    in_flight_metrics = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    needs_build = False
    falls_back_to_cpu = True
    program_files = ("sim_engine.py",)
    quantizations = VLLM
    owned = _OWNED
    grammar = Grammar(
        {**{option: option for option in (*_OWNED, "--quantization", "--max-model-len")}, **_SHORT},
        every_long=frozenset(_OWNED) | _OTHER,
        every_short=frozenset(_SHORT),
        glued_shorts=True,
    )

    def launches(self, shard: Shard) -> list[Launch]:
        profile = shard.profile
        args = [
            shard.current_dir + "/sim_engine.py",
            "serve",
            profile.model_path,
            *profile.args,
            "--host",
            shard.http_host,
            "--port",
            str(shard.http_port),
            "--served-model-name",
            profile.served_model_name,
            "--tensor-parallel-size",
            str(profile.tp),
            "--pipeline-parallel-size",
            str(profile.pp),
        ]
        if profile.quantization:
            args += ["--quantization", profile.quantization]
        if profile.adapters:
            args += ["--lora-modules", *("%s=%s" % (adapter.name, adapter.path) for adapter in profile.adapters)]
        if profile.nodes > 1:
            args += [
                "--nnodes",
                str(profile.nodes),
                "--node-rank",
                str(shard.rank),
                "--master-addr",
                shard.leader_address,
                "--master-port",
                str(shard.leader_port),
            ]
            args += [] if shard.is_leader else ["--headless"]
        return [
            Launch(
                name="sim-engine",
                path=shard.python,
                args=tuple(args),
                env={"VLLM_HOST_IP": (shard.address, "the rank's own address: other ranks connect to it")},
                secret_env={"VLLM_API_KEY": "api_key"} if shard.has_key and shard.is_leader else {},
                wait_for_leader_port=None if shard.is_leader else shard.leader_port,
            )
        ]

    def devices_command(self, shard: Shard) -> tuple[str, tuple[str, ...]]:
        return shard.python, (shard.current_dir + "/sim_engine.py", "devices")
