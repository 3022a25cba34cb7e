# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What vLLM and SGLang have in common, being Python on PyTorch: their libraries' environment, data types and safe weight formats."""

from __future__ import annotations

import typing as t

from ansible_collections.rankzero.inference.plugins.plugin_utils.arguments import find, value
from ansible_collections.rankzero.inference.plugins.plugin_utils.engines.base import Engine, Shard
from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Findings
from ansible_collections.rankzero.inference.plugins.plugin_utils.profile import Profile

# Below 8.0 both engines refuse bfloat16 or silently compute in float16 (vLLM platforms/cuda.py, SGLang load_model_utils.py).
DTYPES = {"auto": 0, "half": 0, "float16": 0, "bfloat16": 80, "float": 0, "float32": 0}
# Formats that read the model's own weights and unpickle nothing. "dummy" would hold GPU memory, and answer nonsense.
LOAD_FORMATS = ("auto", "safetensors", "fastsafetensors", "sharded_state", "mistral")
MOST_ACTIVE_ADAPTERS = 8  # GPU memory is set aside for each; more adapters than these take turns

Variables = dict[str, tuple[str, str]]


def environment(shard: Shard, cache_variable: str, cache_name: str) -> Variables:
    """Variables of every process of a rank: nothing is downloaded, nothing is reported, caches are the service's own. What the build declares stays."""
    cache = shard.work_dir + "/.cache"
    offline, telemetry, caches = (
        "models are local files: nothing is downloaded",
        "nothing is reported to anybody",
        "compiled kernels are code: below the service's own directory",
    )
    wanted = {
        "SPT_NOENV": ("1", "setproctitle would overwrite the environment block, and with it the marker by which GPU memory is known to be this shard's"),
        "HF_HUB_OFFLINE": ("1", offline),
        "TRANSFORMERS_OFFLINE": ("1", offline),
        "HF_HUB_DISABLE_TELEMETRY": ("1", telemetry),
        "DO_NOT_TRACK": ("1", telemetry),
        cache_variable: ("%s/%s" % (cache, cache_name), caches),
        "TRITON_CACHE_DIR": (cache + "/triton", caches),
        "TORCHINDUCTOR_CACHE_DIR": (cache + "/torchinductor", caches),
    }
    declared = shard.build.get("env") or {}
    return {name: item for name, item in wanted.items() if name not in declared}


def check_load_format(engine: Engine, profile: Profile, where: str, findings: Findings) -> None:
    """C(--load-format) is free, but for formats that unpickle files or load no weights at all."""
    for spelled in find(profile.args, engine.grammar):
        if spelled.option == "--load-format" and value(profile.args, spelled, engine.grammar) not in LOAD_FORMATS:
            findings.fault(
                "%s.args[%d]" % (where, spelled.position),
                " ".join((spelled.text, *profile.args[spelled.position + 1 : spelled.position + 2])),
                "--load-format %s" % ", ".join(LOAD_FORMATS),
                "Other formats unpickle files, fetch weights from elsewhere, or load none.",
            )


def adapter_ranks(shard: Shard) -> list[int | None]:
    """The highest LoRA rank of each adapter as its adapter_config.json says, None where node facts do not know it."""
    ranks: list[int | None] = []
    for adapter in shard.profile.adapters:
        config = (shard.models.get(adapter.path) or {}).get("config") or {}
        rank = config.get("highest_rank", config.get("r"))
        ranks.append(rank if isinstance(rank, int) and not isinstance(rank, bool) and rank > 0 else None)
    return ranks


def rendezvous_timeout(profile: Profile) -> int:
    """Seconds after which a rank that does not come is an error of the engine's, before the gate gives up: the log then names what was missing.

    It is the collectives' timeout too, so it is never short. Unset it is 600 s for collectives, and 1800 s for a rank that finds no leader.
    """
    return max(60, profile.ready_timeout * 2 // 3)


def addresses(shard: Shard) -> list[str]:
    """The addresses of all ranks, by rank."""
    return [peer.address for peer in shard.everyone]


def host_port(address: str, port: int) -> str:
    return "[%s]:%d" % (address, port) if ":" in address else "%s:%d" % (address, port)


__all__: t.Sequence[str] = (
    "DTYPES",
    "LOAD_FORMATS",
    "MOST_ACTIVE_ADAPTERS",
    "Variables",
    "adapter_ranks",
    "addresses",
    "check_load_format",
    "environment",
    "host_port",
    "rendezvous_timeout",
)
