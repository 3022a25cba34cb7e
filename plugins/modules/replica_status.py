#!/usr/bin/python
# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: replica_status
short_description: Show every rank of a replica as one table
version_added: 0.1.0
description:
  - Puts what M(rankzero.inference.node_facts) and M(rankzero.inference.shard_ready) saw on all hosts of the play into one table, and returns it as data.
  - Reads variables on the controller only. Use it with C(run_once).
author:
  - The rankzero.inference authors (@rankzero)
options:
  replica:
    description: Name of the replica.
    type: str
    required: true
  looks:
    description: Name of the variable in which every host registered its M(rankzero.inference.shard_ready) result.
    type: str
  plan:
    description: The plan that was just deployed. Without it, the hosts' facts say what is there.
    type: dict
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
"""

EXAMPLES = r"""
- name: Show the replica
  rankzero.inference.replica_status:
    replica: glm
    looks: look
  run_once: true
"""

RETURN = r"""
ranks:
  description: One entry for each host that has a shard, by rank.
  returned: always
  type: list
  elements: dict
  sample:
    - rank: 0
      host: gpu-a
      stage: ready
      ready: true
      held_mib: [72010, 72010]
      restarts: 0
      revision: 3f0c9a4be1d25577
      reason: ready
      seconds: 142.6
      stages: {starting: 1.2, loading: 140.6, serving: 0.8}
ready:
  description: Whether every rank of the replica is there and ready.
  returned: always
  type: bool
  sample: true
"""
