#!/usr/bin/python
# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Wait until the shards of a replica are proven ready: documentation, argument spec and the look at one host."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: shard_ready
short_description: Wait until every shard of a replica is proven to run on its GPUs
version_added: 1.0.0
author:
  - The rankzero.inference authors (@rankzero)
description:
  - Watches the shard that a host has of a replica until it is ready, has failed, or its deadline is over.
    A shard is ready when its service is up and has not been restarted, when processes of its own run hold at least the expected memory
    on every GPU that was assigned to it, and on the rank that serves HTTP also when its own server answers with all models, refuses
    a request without the API key, and generates one token.
  - Memory of other processes never counts. An engine that serves from the CPU, that took another GPU, or that holds only a bare CUDA
    context is refused, with the numbers and the device list that its build sees. What the driver does not tell is not guessed.
  - A shard whose engine ends, with any exit code, is not waited for any longer. The failure names the earliest line of the log that tells
    why, what it means and what to do.
  - Prints one line for each host and change of stage, and a heartbeat about every 30 seconds. The stages are V(starting), V(sidecars),
    V(waiting), V(joining), V(loading), V(holding), V(serving), V(ready) and V(failed).
  - Run it on all hosts of the replica in one task. The hosts tell each other through the controller - when one rank fails, the others
    stop waiting and name it, and the other ranks learn when the leader serves.
  - A profile for the CPU is judged without GPU evidence; the result says so.
notes:
  - Needs the rights to read the revision's files and to see the processes of the service's user, so in most cases C(become=true).
  - Does not ask over HTTP from the controller, which seldom has a route to the inference network. The host asks itself.
  - Proxies in the environment are not used.
requirements:
  - nvidia-ml-py on the host, for profiles with GPUs
attributes:
  check_mode:
    support: full
    description: Answers at once with what it sees, marks nothing and does not fail.
  diff_mode:
    support: none
    description: There is nothing to compare.
  action:
    support: full
    description: Waits, shows progress and shares failures between hosts on the controller.
options:
  replica:
    description: Name of the replica.
    type: str
    required: true
  rank:
    description:
      - Rank that the plan gives to this host. A host without one has no shard of the replica - it is not contacted and RV(ready) is null.
    type: int
  leader:
    description: Inventory name of the host with rank 0. Without it, whichever host serves HTTP is believed.
    type: str
  replica_root:
    description: Directory below which the files of replicas lie on the host.
    type: path
    default: /
  fingerprint:
    description: Refuse when the revision on the host is another one than this.
    type: str
  wait:
    description:
      - V(false) takes one look, marks nothing, and does not fail whatever it sees. For a status.
    type: bool
    default: true
  deadline:
    description:
      - Absolute time, in seconds since the epoch on the controller, at which waiting ends. It is the same for all hosts however late
        a fork of the controller gets to one of them.
    type: float
  timeout:
    description:
      - Seconds to wait when there is no O(deadline). Without both, the budget that the revision itself names.
    type: int
  mark:
    description: Write C(ready.json) into the state directory when the shard is ready, and remove it when the shard has failed.
    type: bool
    default: true
  log_file:
    description:
      - File on the controller in which the caller will keep the last lines of the log, where a failure undoes the shard and its log with it.
        A failure then names this file instead of the log on the host.
    type: str
  hold_seconds:
    description: How long one call to the host looks for a change before it reports back.
    type: float
    default: 15
  since_stage:
    description: The call to the host returns when the stage is another one than this. Set by the action plugin.
    type: str
  leader_serving:
    description: Whether the leader serves, as far as the controller knows. Set by the action plugin.
    type: bool
  run_id:
    description: The run that the wait began with; another one means that the shard was restarted. Set by the action plugin.
    type: str
  known_run:
    description:
      - The run that was there before this deploy, as node facts saw it. While it still is the shard's run, the deploy did not start it, and how the runs before
        it ended does not count as a failure.
    type: str
  serving_since:
    description: What the call before returned as RV(serving_since). Set by the action plugin.
    type: float
  lock_owner:
    description: The run whose lock on the replica every call prolongs, if it has one. Set by the action plugin.
    type: str
  proc_root:
    description: Where the host's process file system is. For tests.
    type: path
    default: /proc
seealso:
  - module: rankzero.inference.node_facts
"""

EXAMPLES = r"""
- name: Wait until all ranks hold their GPUs
  rankzero.inference.shard_ready:
    replica: glm
    rank: "{{ plan.shards[inventory_hostname].rank | default(omit) }}"
    leader: "{{ plan.leader.host }}"
    fingerprint: "{{ plan.fingerprint }}"
    timeout: 900
  become: true

- name: Take one look
  rankzero.inference.shard_ready:
    replica: glm
    rank: 0
    wait: false
  become: true
  register: glm_status

- name: Show what each GPU holds
  ansible.builtin.debug:
    msg: "{{ glm_status.verdict.evidence.gpus }}"
"""

RETURN = r"""
ready:
  description: Whether the shard is ready; null on a host without a shard of the replica.
  returned: always
  type: bool
  sample: true
stage:
  description: The stage at the end.
  returned: when the host was asked
  type: str
  sample: loading
verdict:
  description: What was seen and what it means.
  returned: when the host was asked
  type: dict
  contains:
    stage: {description: The stage., type: str, returned: always}
    reason: {description: One sentence., type: str, returned: always}
    cause: {description: What the log or the exit code means in plain words; may be null., type: str, returned: always}
    hint: {description: What to do; may be null., type: str, returned: always}
    detail: {description: More about the stage; may be null., type: str, returned: always}
    evidence:
      description: For each assigned GPU the memory that this shard holds, how it was found (V(processes), V(difference), V(none)), and who else is there.
      type: dict
      returned: always
      sample:
        gpus:
          - {uuid: GPU-1c7c1d6e, index: 0, held_mib: 71234, expected_mib: 20000, pids: [4711], foreign: [], by: processes, enough: true}
        wrong_gpus: []
        http: {url: "http://10.0.0.5:8000", health: 200, models: [glm], key: 401, generation: 200, serving: true, ok: true}
        connected: null
        judged_without_gpu: false
        restarts: 0
    log_lines: {description: 'After a failure, the telling line of the log and the last ones.', type: list, elements: str, returned: always}
rank:
  description: Rank of the shard on this host.
  returned: when a revision is there
  type: int
  sample: 1
run_id:
  description: The run that was judged.
  returned: when the host was asked
  type: str
  sample: 9f2c11d0a4be
serving_since:
  description: Since when, by the host's clock, the server of the replica is seen serving; null while it is not.
  returned: when the host was asked
  type: float
  sample: 1790000000.5
budget_seconds:
  description: How long this revision may take to get ready.
  returned: when the host was asked
  type: int
  sample: 900
log_command:
  description: The command that shows the log on the host.
  returned: when the host was asked
  type: str
  sample: journalctl -u inference-glm.service -n 200
stages:
  description: Seconds spent in each stage, as seen by this wait.
  returned: when it was waited for
  type: dict
  sample: {starting: 1.2, loading: 140.6, serving: 0.8}
calls:
  description: How often the host was asked, each time in one session.
  returned: when it was waited for
  type: int
  sample: 3
seconds:
  description: Seconds that this wait took.
  returned: when it was waited for
  type: float
  sample: 142.6
"""

from typing import Any

# For its effect on every import behind it, so it has no other use: docs/decisions/0013-modules-are-compiled-once.md
from ansible_collections.rankzero.inference.plugins.module_utils import compile_once  # noqa: F401  # pylint: disable=unused-import

# isort: split
from ansible.module_utils.basic import AnsibleModule

from ansible_collections.rankzero.inference.plugins.module_utils import leases, observation

ARGUMENTS: dict[str, dict[str, Any]] = {
    "replica": {"type": "str", "required": True},
    "rank": {"type": "int"},
    "leader": {"type": "str"},
    "replica_root": {"type": "path", "default": "/"},
    "fingerprint": {"type": "str"},
    "wait": {"type": "bool", "default": True},
    "deadline": {"type": "float"},
    "timeout": {"type": "int"},
    "mark": {"type": "bool", "default": True},
    "hold_seconds": {"type": "float", "default": 15},
    "since_stage": {"type": "str"},
    "leader_serving": {"type": "bool"},
    "run_id": {"type": "str"},
    "known_run": {"type": "str"},
    "serving_since": {"type": "float"},
    "lock_owner": {"type": "str"},
    "log_file": {"type": "str"},
    "proc_root": {"type": "path", "default": "/proc"},
}


def main() -> None:
    """One call: look, hold while nothing changes, mark, report."""
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    options = module.params
    waits = options["wait"] and not module.check_mode
    observer = observation.Observer(options["replica"], options["replica_root"], options["proc_root"], module.run_command)
    wanted = observation.Watch(
        since_stage=options["since_stage"],
        hold_seconds=options["hold_seconds"] if waits else 0,
        leader_serving=options["leader_serving"],
        fingerprint=options["fingerprint"],
        rank=options["rank"],
        run_id=options["run_id"],
        known_run=options["known_run"],
        serving_since=options["serving_since"],
    )
    lease = leases.Lease(options["replica_root"], options["replica"], {"owner": options["lock_owner"]} if waits else None)
    lease.renew()
    seen, verdict = observation.watch(observer, wanted)
    lease.renew()
    changed = False
    if waits and options["mark"]:
        changed, verdict = observation.mark(observer.places, seen, verdict)
        if verdict["ready"]:
            lease.finish()
    module.exit_json(changed=changed, **observation.report(observer.places, seen, verdict))


if __name__ == "__main__":
    main()
