#!/usr/bin/python
# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: replica_plan
short_description: Plan every rank of a replica from the facts of all hosts, or say every fault at once
version_added: 0.1.0
description:
  - Takes a profile and the node facts of all hosts of the play, places ranks and GPUs, chooses the fabric, and returns the complete launch of every rank
    (arguments, environment, ports) with a reason for each variable.
  - When anything speaks against the replica it returns B(all) faults over all hosts in one failure, each with host, rank, field,
    what was seen, what was wanted and what to do.
  - Pure computation on the controller; it opens no connection. Use it with C(run_once).
author:
  - The rankzero.inference authors (@rankzero)
options:
  replica:
    description: Name of the replica, 1 to 40 lower-case letters, digits and C(-). It names the service, files and facts.
    type: raw
    required: true
  profile:
    description: A profile, or the name of one in O(profiles).
    type: raw
    required: true
  profiles:
    description: Profiles by name.
    type: raw
  group:
    description: Inventory group that holds the replica's hosts. When members of it are not in the play (C(--limit), job slices) the plan is refused.
    type: str
  hosts:
    description: Hosts of the play that the replica may use. All of them, if it is not given.
    type: list
    elements: str
  api_key:
    description: The API key. Only a salted scrypt digest of it takes part in the plan; the key itself does not.
    type: raw
  api_key_file:
    description: A file on the controller that holds the API key, found and read as the file lookup does, vaulted or not. It goes before O(api_key).
    type: str
  options:
    description:
      - What else the operator decides, under the names of the role's variables - C(replica_fabric), C(replica_fabrics), C(replica_leader),
        C(replica_http_port), C(replica_http_host), C(replica_leader_port), C(replica_tie_port),
        C(replica_silent_seconds), C(replica_without_api_key).
      - Empty strings, as surveys give them, count as unset.
    type: dict
    default: {}
  recorded:
    description: Prefer the inventory variable C(inference_node) over gathered facts.
    type: bool
    default: false
  plan_file:
    description: File on the controller to which the plan is written as JSON, also when it is refused, also in check mode.
    type: str
  picture:
    description:
      - File on the controller to which a picture of the plan is written as SVG, also when it is refused, also in check mode.
      - It shows every host with its GPUs and HCAs, what each rank is given, who holds the rest, the fabric, and the faults where they are. Up to 16 hosts
        are cards that say everything; more are tiles with the details in tooltips.
    type: str
  show:
    description: Print the plan as a table. With V(false) nothing is printed, also when the plan is refused.
    type: bool
    default: true
notes:
  - Per-host decisions are read from each host's variables - C(replica_root), C(replica_address), C(replica_management), C(replica_rank), C(replica_user),
    C(replica_service_manager).
attributes:
  action:
    support: full
    description: An action plugin of the same name does the work on the controller.
  check_mode:
    support: full
    description: Can run in check mode; it changes nothing in any mode.
  diff_mode:
    support: none
    description: There is nothing to compare; P(rankzero.inference.replica_plan#module) returns what differs per rank as C(converge).
seealso:
  - module: rankzero.inference.node_facts
  - module: rankzero.inference.shard
"""

EXAMPLES = r"""
- name: Plan a replica
  rankzero.inference.replica_plan:
    replica: glm
    profile: glm-h100-2x8
    profiles: "{{ replica_profiles }}"
    group: replica_glm
    options:
      replica_http_port: 8000
  run_once: true
  register: result
"""

RETURN = r"""
faults:
  description: What keeps the replica from being deployed, over all hosts. O(plan_file) has the whole plan, too.
  returned: when the plan is refused
  type: list
  elements: dict
  sample: [{host: gpu-b, rank: 1, field: gpus, seen: "6 free of 8", wanted: 8 GPUs of class H100, hint: Free the GPUs}]
converged:
  description:
    - Whether every rank runs as planned and is proven, and no other host has anything of the replica. A deploy has nothing to do then.
  returned: success
  type: bool
  sample: false
plan:
  description: The plan.
  returned: success
  type: dict
  contains:
    fingerprint:
      description: 16 hexadecimal digits over everything that decides how any rank runs.
      type: str
      sample: 3f0c9a4be1d25577
    leader:
      description: Host, address, port of the ranks' rendezvous, and URL of rank 0.
      type: dict
      sample: {host: gpu-a, address: 10.0.0.11, port: 29500, url: "http://10.0.0.11:8000"}
    shards:
      description: By inventory host, rank, GPUs, HCAs and launches. C(why) gives the reason of every variable, C(converge) what differs on the host now.
      type: dict
      sample:
        gpu-b:
          rank: 0
          nodes: 2
          address: 192.0.2.2
          interface: eth0
          serves_http: true
          gpus: [GPU-00000001-0000-4000-8000-000000000000]
          hcas: []
          http_port: 8000
          leader_port: 29500
          tie: {address: 192.0.2.2, port: 29400, secret: tie_key, silent_seconds: 20, run_ports: [29500, 29501, 29502]}
          launches:
            - name: vllm
              path: /opt/vllm/bin/vllm
              args: [serve, /models/glm, --host, 192.0.2.2, --port, "8000", --served-model-name, glm, --tensor-parallel-size, "8"]
              env: {CUDA_VISIBLE_DEVICES: GPU-00000001-0000-4000-8000-000000000000, GLOO_SOCKET_IFNAME: eth0}
              why: {GLOO_SOCKET_IFNAME: "replica_address of this host: 192.0.2.2"}
          converge: {reasons: [the host has no shard of this replica], restart: true}
    not_chosen:
      description: By inventory host, why it was not taken.
      type: dict
      sample: {gpu-c: "gpus: 0 free of 8: GPU 0 (GPU-…) is held by shard chat/0 (pid 4711, 71000 MiB)"}
    to_fetch:
      description: By inventory host of a rank, the paths of adapters with a source that are not there. Fetch them and plan again.
      type: dict
      sample: {gpu-b: [/adapters/sql-3]}
    warnings:
      description: What an operator should know, in the shape of faults.
      type: list
      elements: dict
planned_at:
  description: Controller time of the plan in seconds since the epoch; deadlines count from it.
  returned: success
  type: float
  sample: 1795962766.1
"""
