# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Minimum compute capability of each quantization, per engine, as major * 10 + minor; and which ones go together.

Sources: vLLM 0.33.0, C(model_executor/layers/quantization/*); SGLang 0.5.23, C(srt/layers/quantization/*) and C(srt/arg_groups/choices.py).
Methods that quantize layer by layer (compressed-tensors, Quark) have a minimum for each scheme, C((weights, activations)) as node facts tell it.
SGLang refuses to start below 7.5 whatever its classes say (C(load_model_utils.py)), so its table is raised to that floor.
"""

from __future__ import annotations

import re
import typing as t

Schemes = t.Mapping[tuple[str, t.Union[str, None]], int]

VLLM_FLOOR = 60  # below it there is no type to compute in (platforms/cuda.py)
LLAMACPP_FLOOR = 50  # of CUDA 12; a build for CUDA 13 sees no device below 7.5
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


# Where a pair is not named the method's own minimum holds.
VLLM_SCHEMES: dict[str, Schemes] = {
    "compressed-tensors": {
        ("fp8", "fp8"): 75,  # 8.9 natively; below it the weights alone (W8A16Fp8)
        ("fp8", None): 75,
        ("int4", "fp8"): 90,
        ("nvfp4", "nvfp4"): 75,
        ("nvfp4", None): 75,
        ("mxfp4", "mxfp4"): 80,
        ("mxfp4", None): 80,
        ("mxfp8", "mxfp8"): 75,
        ("int8", "int8"): 75,
        ("int8", None): 75,
        ("int4", None): 75,
        ("int4", "int4"): 75,
        ("int4", "int8"): 75,
    },
    "quark": {("fp8", "fp8"): 89, ("int8", "int8"): 75, ("nvfp4", "nvfp4"): 75},
}
SGLANG_SCHEMES: dict[str, Schemes] = {
    "compressed-tensors": {
        ("nvfp4", "nvfp4"): 100,
        ("nvfp4", None): 80,
        ("fp8", "fp8"): 80,  # 8.9 natively; below it the weights alone (W8A16Fp8)
        ("fp8", None): 80,
        ("int8", "int8"): 80,
        ("int8", None): 80,
        ("int4", None): 80,
        ("int4", "fp8"): 90,
    },
    "quark": {("fp8", "fp8"): 89},
}

# What an engine makes of a checkpoint's method where the profile names another one; every other pair is an error at start.
# vLLM: override_quantization_method of each class. SGLang: compatible_quantization_methods (configs/model_config.py).
_GPTQ, _AWQ = {"gptq", "auto_gptq", "gptq_marlin", "marlin"}, {"awq", "auto_awq", "awq_marlin"}
_MODELOPT = {"modelopt", "modelopt_fp4", "modelopt_fp8", "modelopt_mxfp8", "modelopt_mixed"}
ALIKE: tuple[frozenset[str], ...] = (
    frozenset(_GPTQ | {"moe_wna16", "inc", "humming"}),
    frozenset(_AWQ | {"moe_wna16", "inc", "humming"}),
    frozenset(_MODELOPT | {"petit_nvfp4", "nvfp4_online", "humming"}),
    frozenset({"fp8", "deepseek_v4_fp8", "modelopt_fp4", "nvfp4_online", "w4afp8", "humming"}),
    frozenset({"mxfp4", "gpt_oss_mxfp4", "humming"}),
    frozenset({"mxfp8", "minimax_m3_nvfp4"}),
    frozenset({"compressed-tensors", "compressed_tensors", "w8a8_int8", "w8a8_fp8", "auto-round-int8", "humming"}),
    frozenset({"auto-round", "inc", "auto_round"}),
    frozenset({"quark", "quark_int4fp8_moe", "quark_mxfp4"}),
)


def go_together(asked: str, checkpoint: str) -> bool:
    """Whether an engine takes a checkpoint of one method when it is asked for another. A method that is not known here goes with all."""
    asked, checkpoint = asked.lower(), checkpoint.lower()
    known = frozenset().union(*ALIKE)
    return asked == checkpoint or not {asked, checkpoint} <= known or any({asked, checkpoint} <= group for group in ALIKE)


def of_schemes(table: t.Mapping[str, Schemes], method: str, schemes: t.Any) -> tuple[int, str] | None:
    """(minimum, scheme) of the most demanding scheme of a checkpoint, None where it names none that the table knows."""
    known = table.get(method.lower().replace("_", "-"), {})
    found = []
    for scheme in schemes if isinstance(schemes, (list, tuple)) else ():
        if isinstance(scheme, (list, tuple)) and len(scheme) == 2:
            minimum = known.get((str(scheme[0]), str(scheme[1]) if scheme[1] else None))
            if minimum is not None:
                found.append((minimum, "weights %s, activations %s" % (scheme[0], scheme[1] or "not quantized")))
    return max(found, default=None)


_CAPABILITY = re.compile(r"([0-9]{1,3})\.([0-9])\Z")


def capability(text: str | None) -> int | None:
    """C("9.0") is 90, C("12.1") is 121; anything that is not MAJOR.MINOR is None (unknown)."""
    found = _CAPABILITY.match(text or "")
    return int(found.group(1)) * 10 + int(found.group(2)) if found else None


def written(value: int) -> str:
    """90 is written 9.0."""
    return "%d.%d" % divmod(value, 10)
