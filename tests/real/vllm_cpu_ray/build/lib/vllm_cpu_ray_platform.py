# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The platform; imported by vLLM only when the plugin is in effect."""

from __future__ import annotations

from vllm.platforms.cpu import CpuPlatform


class CpuRayPlatform(CpuPlatform):
    ray_device_key = "GPU"  # declared by `ray start --num-gpus`

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "vllm_cpu_ray_communicator.NetworkCommunicator"
