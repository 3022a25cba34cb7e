# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether a model can fit on its GPUs at all: a lower bound from the model's own files against the smallest GPU.

The bound is deliberately low (weights spread evenly, one sequence at the asked length, no activations, no graphs), so a replica that it refuses could not
have been loaded. What it cannot know it leaves out.
"""

from __future__ import annotations

import dataclasses
import re
import typing as t

MIB = 1024 * 1024
_LENGTH = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG]?)\Z")
_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "K": 1024, "M": 1024**2, "G": 1024**3}


@dataclasses.dataclass(frozen=True)
class Need:
    """MiB that one GPU needs at the least, by part. C(length) is the number of tokens that the cache was computed for, None without a cache."""

    weights: int
    cache: int
    length: int | None

    @property
    def total(self) -> int:
        return self.weights + self.cache

    def text(self) -> str:
        parts = ["weights %d" % self.weights] + (["KV cache %d for one sequence of %d tokens" % (self.cache, self.length)] if self.length else [])
        return "%d MiB (%s)" % (self.total, ", ".join(parts))


def need(weight_bytes: t.Any, config: t.Mapping[str, t.Any], *, share: float, tp: int, pp: int, length: int | None, cache_bytes: float) -> Need:
    """C(share): the part of the weights on one GPU, 0..1.  C(cache_bytes): bytes of one element of the cache."""
    weights = int(weight_bytes * share / MIB) if isinstance(weight_bytes, int) else 0
    elements = cache_elements_per_token(config, tp, pp)
    if not length or elements is None:
        return Need(weights, 0, None)
    return Need(weights, int(elements * cache_bytes * length / MIB), length)


def cache_elements_per_token(config: t.Mapping[str, t.Any], tp: int, pp: int) -> float | None:
    """Keys and values of one token on one GPU, or None where the attention is not the plain kind or is not described.

    Key-value heads are split over TP, and replicated when there are fewer than TP; layers are split over PP.
    """
    layers, heads = _count(config, "num_hidden_layers"), _count(config, "num_attention_heads")
    if layers is None or heads is None or not is_plain_attention(config):
        return None
    hidden = _count(config, "hidden_size")
    head = _count(config, "head_dim") or (hidden // heads if hidden else None)
    if not head:
        return None
    kv_heads = _count(config, "num_key_value_heads") or heads
    return 2.0 * head * max(kv_heads / tp, 1) * layers / pp


def _count(config: t.Mapping[str, t.Any], name: str) -> int | None:
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def is_plain_attention(config: t.Mapping[str, t.Any]) -> bool:
    """False for latent attention (its cache is compressed), and for layers with a sliding window or without attention (they cache less)."""
    layer_types = config.get("layer_types")
    if isinstance(layer_types, list) and any(kind != "full_attention" for kind in layer_types):
        return False
    windowed = config.get("sliding_window") and config.get("use_sliding_window") is not False
    return not (config.get("kv_lora_rank") or windowed)


def parse_length(text: str) -> int | None:
    """C(32768), C(32k) (thousands) or C(32K) (1024s), as vLLM reads them; C(auto), 0 and anything else is None."""
    found = _LENGTH.match(text.strip())
    return (int(float(found.group(1)) * _UNITS[found.group(2)]) or None) if found else None
