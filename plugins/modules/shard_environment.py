#!/usr/bin/python
# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: shard_environment
short_description: Show the environment of every launch of a plan, with reasons
version_added: 0.1.0
description:
  - Prints, for each rank and launch, shell text that sets exactly the launch's environment, with the reason behind each variable. Secrets are named, not shown.
  - Computes on the controller only. Use it with C(run_once).
author:
  - The rankzero.inference authors (@rankzero)
options:
  plan:
    description: A plan of M(rankzero.inference.replica_plan).
    type: dict
    required: true
attributes:
  action:
    support: full
    description: An action plugin of the same name does the work on the controller.
  check_mode:
    support: full
    description: It changes nothing in any mode.
  diff_mode:
    support: none
    description: There is nothing to compare.
seealso:
  - module: rankzero.inference.replica_plan
"""

EXAMPLES = r"""
- name: Show what the shards would see
  rankzero.inference.shard_environment:
    plan: "{{ result.plan }}"
  run_once: true
"""

RETURN = r"""
text:
  description: What was printed.
  returned: always
  type: str
  sample: "export NCCL_IB_DISABLE='1'    # no HCA was planned"
"""
