#!/usr/bin/python
# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: drain_plan
short_description: Say which replicas have to stop so that a host can be drained
version_added: 0.1.0
description:
  - Reads the node facts of all hosts of the play. A replica with a rank on the host stops on all of its hosts, since its ranks run together or not at all.
  - Pure computation on the controller; it opens no connection. Use it with C(run_once).
author:
  - The rankzero.inference authors (@rankzero)
options:
  host:
    description: The inventory name of the host to drain.
    type: str
    required: true
  reason:
    description: Why. Refused without one.
    type: str
  timeout:
    description: Seconds above 0 to wait until no request is in flight. It is only checked here, with everything else, and returned.
    type: float
    default: 300
  force:
    description: Go on although the rank that serves is on no host of the play, so that nobody knows what is in flight.
    type: bool
    default: false
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
  - module: rankzero.inference.shard_idle
  - module: rankzero.inference.node_cordon
"""

EXAMPLES = r"""
- name: Find out what has to stop
  rankzero.inference.drain_plan:
    host: gpu-a
    reason: fan 3 is broken
  run_once: true
  register: result
"""

RETURN = r"""
drain:
  description:
    - The replicas with the hosts and ranks of each, the host that serves, ranks on hosts that could not be asked, and the metrics of requests in flight.
  returned: success
  type: dict
  sample:
    node: gpu-a
    cordoned: false
    replicas:
      - {replica: glm, engine: vllm, hosts: {gpu-a: 0, gpu-b: 1}, missing: [], serving: gpu-a,
         metrics_path: /metrics, metrics: ["vllm:num_requests_running", "vllm:num_requests_waiting"]}
    timeout: 300
faults:
  description: Why the host cannot be drained, as C({host, rank, field, seen, wanted, hint}).
  returned: failure
  type: list
  elements: dict
"""
