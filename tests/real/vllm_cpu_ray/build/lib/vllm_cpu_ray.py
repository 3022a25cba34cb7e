# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A platform plugin of vLLM for tests: the CPU platform, whose ranks Ray places by GPUs that are declared and not real.

vLLM's CPU platform refuses Ray, since it names no resource by which Ray could place ranks. With this one the code path is that of GPUs. It takes effect where
VLLM_CPU_RAY is set, so that the same environment serves without Ray as vLLM itself has it.
"""

from __future__ import annotations

import os


def register() -> str | None:
    return "vllm_cpu_ray_platform.CpuRayPlatform" if os.environ.get("VLLM_CPU_RAY") else None
