#!/usr/bin/python
# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: replica_diagnosis
short_description: Say why a replica does not run
version_added: 0.1.0
description:
  - Puts what M(rankzero.inference.shard_diagnosis) saw on all hosts of the play into one table with a row for each rank, names the likely cause in a
    sentence with the next step, and writes an archive with facts, plan, launches, states and logs on the controller.
  - The cause is taken from what a rank says about itself before what it says about its peers, since all others tell at length that one has ended.
  - A host that could not be reached has a row that says so.
  - Reads variables on the controller only. Use it with C(run_once).
author:
  - The rankzero.inference authors (@rankzero)
options:
  replica:
    description: Name of the replica.
    type: str
    required: true
  looks:
    description: Name of the variable in which every host registered its M(rankzero.inference.shard_diagnosis) result.
    type: str
    required: true
  gathered:
    description: Name of the variable in which every host registered its M(rankzero.inference.node_facts) result. It tells which hosts cannot be reached.
    type: str
  plan:
    description: A registered result of M(rankzero.inference.replica_plan), also a failed one.
    type: raw
  directory:
    description: Directory on the controller for the archive, relative to where Ansible was started. Without it none is written.
    type: str
  api_key:
    description: The replica's API key, so that it is masked in what hosts told as well when they did not know it.
    type: raw
attributes:
  action:
    support: full
    description: An action plugin of the same name does the work on the controller.
  check_mode:
    support: full
    description: Shows the same and writes no archive.
  diff_mode:
    support: none
    description: There is nothing to compare.
"""

EXAMPLES = r"""
- name: Say why the replica does not run
  rankzero.inference.replica_diagnosis:
    replica: glm
    looks: seen
    directory: ./diagnosis
  run_once: true
"""

RETURN = r"""
ranks:
  description: One entry for each host that has, had or should have a rank.
  returned: always
  type: list
  elements: dict
  sample:
    - {rank: 1, host: gpu-b, stage: failed, service: inactive, restarts: 3, held_mib: [0, 0], tie: not tied,
       line: "torch.OutOfMemoryError: CUDA out of memory."}
cause:
  description: The likely cause.
  returned: always
  type: str
  sample: "Likely cause: rank 1 (gpu-b): A GPU ran out of memory. Its log: torch.OutOfMemoryError: CUDA out of memory."
next:
  description: The next step.
  returned: always
  type: str
  sample: Check with nvidia-smi that nothing else holds the GPU.
causes:
  description: Everything that may be the cause, the likeliest first.
  returned: always
  type: list
  elements: dict
faults:
  description: Why a plan made now is refused, as C({host, rank, field, seen, wanted, hint}); what runs may not start again. Empty where nothing is known.
  returned: always
  type: list
  elements: dict
  sample: [{host: gpu-b, rank: 1, field: model_path, seen: no /models/glm, wanted: a file or directory on the host, hint: Copy the model there}]
archive:
  description: The archive on the controller, mode 0600; V(null) when none was written.
  returned: always
  type: str
  sample: /home/ops/diagnosis/glm-20260131T120000Z.tar.gz
"""
