#!/usr/bin/python
# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: node_report
short_description: Show the facts of all hosts of the play as readable reports
version_added: 0.1.0
description:
  - For each host GPUs, HCAs by fabric, interfaces, engine builds, shards, and every condition that would stop a replica, from what
    M(rankzero.inference.node_facts) gathered.
  - Reads variables on the controller only. Use it with C(run_once).
author:
  - The rankzero.inference authors (@rankzero)
options: {}
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
  - module: rankzero.inference.node_facts
"""

EXAMPLES = r"""
- name: Look at all hosts
  hosts: gpu_hosts
  gather_facts: false
  become: true
  tasks:
    - name: Gather node facts
      rankzero.inference.node_facts:
    - name: Show them
      rankzero.inference.node_report:
      run_once: true
"""

RETURN = r"""
conditions:
  description: By host, sentences about everything that would stop a replica there.
  returned: always
  type: dict
  sample: {gpu-b: ["GPU 3: fell off the bus"]}
"""
