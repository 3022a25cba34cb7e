# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Profiles that several lab tests deploy."""

from __future__ import annotations

SIMULATED = {
    "name": "lab",
    "engine": "sim",
    "nodes": 2,
    "gpus_per_node": 2,
    "tp": 4,
    "model_path": "/etc/os-release",
    "served_model_name": "tiny",
    "ready_timeout": 60,
    "args": ["--sim-load-seconds", "0.5", "--sim-gpu-mib", "48000"],
    "env": {"SIM_PROCESS_DIRECTORY": "/run/fake_nvml/processes"},
}
