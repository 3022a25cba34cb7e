# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Minimum compute capability of each quantization, per engine, as major * 10 + minor.

Sources: vLLM 0.33.0, C(model_executor/layers/quantization/*); SGLang 0.5.23, C(srt/layers/quantization/*) and C(srt/arg_groups/choices.py).
SGLang refuses to start below 7.5 whatever its classes say (C(load_model_utils.py)), so its table is raised to that floor.
"""

from __future__ import annotations

import re

VLLM = {
    "awq": 75,
    "auto_awq": 75,
    "awq_marlin": 75,
    "gptq": 60,
    "auto_gptq": 60,
    "gptq_marlin": 60,
    "fp8": 75,
    "deepseek_v4_fp8": 75,
    "fbgemm_fp8": 80,
    "fp_quant": 100,
    "modelopt": 80,
    "modelopt_fp4": 75,
    "modelopt_mxfp8": 80,
    "modelopt_mixed": 75,
    "compressed-tensors": 70,
    "experts_int8": 80,
    "quark": 70,
    "moe_wna16": 70,
    "torchao": 75,
    "inc": 60,
    "mxfp4": 80,
    "gpt_oss_mxfp4": 80,
    "humming": 75,
    "online": 75,
    "fp8_per_tensor": 75,
    "fp8_per_block": 75,
    "fp8_per_channel": 75,
    "int8_per_channel_weight_only": 75,
    "nvfp4_per_token": 100,
    "mxfp8": 75,
}

SGLANG_FLOOR = 75
SGLANG = {
    name: max(minimum, SGLANG_FLOOR)
    for name, minimum in {
        "awq": 75,
        "awq_marlin": 80,
        "gptq_marlin": 80,
        "fp8": 80,
        "mxfp8": 100,
        "blockwise_int8": 80,
        "modelopt": 89,
        "modelopt_fp8": 89,
        "modelopt_fp4": 80,
        "modelopt_mixed": 80,
        "nvfp4_online": 100,
        "petit_nvfp4": 90,
        "w8a8_int8": 75,
        "w8a8_fp8": 89,
        "moe_wna16": 70,
        "compressed-tensors": 70,
        "w4afp8": 90,
        "quark": 70,
        "quark_int4fp8_moe": 70,
        "auto-round": 60,
        "bitsandbytes": 70,
        "gguf": 60,
        "mxfp4": 80,
        "humming": 75,
        "minimax_m3_nvfp4": 90,
    }.items()
}


_CAPABILITY = re.compile(r"([0-9]{1,3})\.([0-9])\Z")


def capability(text: str | None) -> int | None:
    """C("9.0") is 90, C("12.1") is 121; anything that is not MAJOR.MINOR is None (unknown)."""
    found = _CAPABILITY.match(text or "")
    return int(found.group(1)) * 10 + int(found.group(2)) if found else None


def written(value: int) -> str:
    """90 is written 9.0."""
    return "%d.%d" % divmod(value, 10)
