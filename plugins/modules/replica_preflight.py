#!/usr/bin/python
# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: replica_preflight
short_description: Say whether the ranks of a replica can talk to each other
version_added: 0.1.0
description:
  - Puts what M(rankzero.inference.shard_preflight) found on all ranks together, shows it as a table, and fails naming the pair of hosts, the interface, the
    port or the HCA that does not work.
  - Says what carried the all-reduce, RDMA (with which HCAs, with or without GPUDirect) or sockets. Sockets where the plan chose a fabric are a failure.
  - Reads variables on the controller only. Use it with C(run_once).
author:
  - The rankzero.inference authors (@rankzero)
options:
  plan:
    description: The plan of M(rankzero.inference.replica_plan).
    type: dict
    required: true
  started:
    description: Name of the variable in which every host registered M(rankzero.inference.shard_preflight) with C(state=started).
    type: str
    required: true
  collected:
    description: Name of the variable in which every host registered M(rankzero.inference.shard_preflight) with C(state=collected).
    type: str
    required: true
attributes:
  action:
    support: full
    description: An action plugin of the same name does the work on the controller.
  check_mode:
    support: full
    description: Nothing is tried in check mode, so there is no verdict.
  diff_mode:
    support: none
    description: There is nothing to compare.
"""

EXAMPLES = r"""
- name: Judge the preflight
  rankzero.inference.replica_preflight:
    plan: "{{ result.plan }}"
    started: started
    collected: collected
  run_once: true
"""

RETURN = r"""
ok:
  description: Whether everything that was tried worked.
  returned: when something was tried
  type: bool
  sample: true
failures:
  description: One sentence for each thing that did not work.
  returned: when something was tried
  type: list
  elements: str
  sample: ["rank 0 (gpu-a, mgmt0 10.20.0.1) never reaches rank 1 (gpu-b, mgmt0 10.20.0.2) port 29509: no answer"]
notes:
  description: What was left out, and why.
  returned: when something was tried
  type: list
  elements: str
transport:
  description: What carried the all-reduce, by NCCL's own words; V(null) when there was none.
  returned: when something was tried
  type: str
  sample: RDMA over mlx5_0:1, mlx5_1:1 with GPUDirect
nccl:
  description: Version, transports, HCAs, interfaces and warnings that NCCL told.
  returned: when something was tried
  type: dict
ranks:
  description: One entry for each rank.
  returned: when something was tried
  type: list
  elements: dict
"""
