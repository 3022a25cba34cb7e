#!/usr/bin/python
# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: replica_revision
short_description: Choose the kept revision that every rank of a replica can go to
version_added: 0.1.0
description:
  - Reads the node facts of all hosts of the play and says which revision all ranks have whole - the one that runs, the one before, or a given one.
  - When there is none it fails with what every host has, before anything is changed. So it does when another run is changing the replica or a host is cordoned.
  - Pure computation on the controller; it opens no connection. Use it with C(run_once).
author:
  - The rankzero.inference authors (@rankzero)
options:
  replica:
    description: Name of the replica.
    type: str
    required: true
  goal:
    description:
      - V(current) is the revision that runs on all ranks.
      - V(previous) is the one before. After a run that was interrupted between two revisions it is the one that all ranks have whole.
    type: str
    choices: [current, previous]
    default: current
  revision:
    description: The fingerprint of a kept revision. It goes before O(goal).
    type: str
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
  - module: rankzero.inference.shard
"""

EXAMPLES = r"""
- name: Choose the revision to go back to
  rankzero.inference.replica_revision:
    replica: glm
    goal: previous
  run_once: true
  register: result
"""

RETURN = r"""
choice:
  description: The revision, what each host has now, the rank of each host in it, its leader, and how many seconds it may take to get ready.
  returned: success
  type: dict
  sample: {replica: glm, revision: a01b77de92c0f514, before: {gpu-a: 3f0c9a4be1d25577}, shards: {gpu-a: {rank: 0}}, leader: {host: gpu-a}, ready_timeout: 900}
faults:
  description: Why there is none, as C({host, rank, field, seen, wanted, hint}).
  returned: failure
  type: list
  elements: dict
"""
