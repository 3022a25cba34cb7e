# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lower bound that decides whether a model can fit: numbers worked out by hand, and what it leaves out."""

from __future__ import annotations

import pytest

from ansible_collections.rankzero.inference.plugins.plugin_utils import memory_fit

# Llama 3 70B: 80 layers, 64 heads of 128, 8 key-value heads: 2 * 8 * 128 * 80 elements for each token.
LLAMA_70B = {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192}
GIB = 1024**3


@pytest.mark.parametrize(("tp", "pp", "elements"), [(1, 1, 163840), (8, 1, 20480), (16, 1, 20480), (8, 2, 10240), (2, 4, 20480)])
def test_the_cache_of_one_token(tp: int, pp: int, elements: int) -> None:
    """Heads are split over TP until each GPU has one, layers over PP."""
    assert memory_fit.cache_elements_per_token(LLAMA_70B, tp, pp) == elements


def test_the_whole_bound() -> None:
    need = memory_fit.need(140 * GIB, LLAMA_70B, share=1 / 2, tp=2, pp=1, length=131072, cache_bytes=2.0)
    assert (need.weights, need.cache, need.total) == (71680, 20480, 92160)
    assert need.text() == "92160 MiB (weights 71680, KV cache 20480 for one sequence of 131072 tokens)"


@pytest.mark.parametrize(
    "config",
    [
        {},
        {**LLAMA_70B, "kv_lora_rank": 512},
        {**LLAMA_70B, "sliding_window": 4096},
        {**LLAMA_70B, "layer_types": ["full_attention", "linear_attention"]},
        {"num_hidden_layers": "80", "num_attention_heads": 64},
        {"num_hidden_layers": True, "num_attention_heads": 64},
        {"num_hidden_layers": 80, "num_attention_heads": 0},
        {"num_hidden_layers": 80, "num_attention_heads": 64, "hidden_size": None},
    ],
)
def test_what_is_not_known_is_left_out(config: dict) -> None:
    need = memory_fit.need(GIB, config, share=1.0, tp=1, pp=1, length=1000, cache_bytes=2.0)
    assert (need.weights, need.cache, need.length) == (1024, 0, None)


def test_a_window_that_is_switched_off_is_plain() -> None:
    assert memory_fit.is_plain_attention({**LLAMA_70B, "sliding_window": 4096, "use_sliding_window": False})


@pytest.mark.parametrize(
    ("text", "length"), [("32768", 32768), ("32k", 32000), ("32K", 32768), ("1.5k", 1500), ("auto", None), ("0", None), ("", None), ("-1", None), ("8kk", None)]
)
def test_lengths_as_the_engines_read_them(text: str, length: int | None) -> None:
    assert memory_fit.parse_length(text) == length
