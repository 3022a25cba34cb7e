# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The one kernel of vLLM's that SGLang's path for CPUs imports, in plain torch."""

from __future__ import annotations

from typing import Any

import torch


def rotary_embedding(positions: Any, query: Any, key: Any, head_size: int, cos_sin_cache: Any, is_neox: bool, *_more: Any, **_options: Any) -> None:
    """Turn query and key in place by their positions; C(is_neox): the two halves of a head are the pairs, else neighbours are."""
    both = cos_sin_cache.index_select(0, positions.flatten())
    width = both.shape[-1]
    cosine, sine = both.chunk(2, dim=-1)
    for heads in (query, key):
        if heads is None:
            continue
        turned = heads.view(positions.numel(), -1, head_size)[..., :width]
        c, s = cosine.unsqueeze(1).to(turned.dtype), sine.unsqueeze(1).to(turned.dtype)
        if is_neox:
            first, second = turned.chunk(2, dim=-1)
            new = torch.cat((first * c - second * s, second * c + first * s), dim=-1)
        else:
            first, second = turned[..., ::2], turned[..., 1::2]
            new = torch.stack((first * c - second * s, second * c + first * s), dim=-1).flatten(-2)
        turned.copy_(new)
