# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An empty stand-in: SGLang takes one kernel from vLLM (_custom_ops.py) where it runs on CPUs without a kernel package of its own."""
