#!/usr/bin/python
# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: shard
short_description: Bring one shard of a replica to its planned revision on a host
version_added: 0.1.0
description:
  - Renders the environment file, the launch document and the service of one rank on the controller, compares them with what
    M(rankzero.inference.node_facts) saw on the host, and makes at most one remote call. A converged host gets none.
  - Starting never waits for the engine. Use M(rankzero.inference.shard_ready) to wait for, and prove, readiness.
  - Revisions stand side by side below C(<root>/etc/rankzero/<replica>/revisions) and are switched by one symbolic link, so a host is always in
    one of two states. The last three are kept.
author:
  - The rankzero.inference authors (@rankzero)
options:
  state:
    description:
      - V(present) writes and starts the shard that O(shard) describes. On a host that has no part in the plan any more, what it has of the replica is
        stopped; V(absent) removes it once the others have proven themselves without it.
      - V(restored) goes to the revision O(fingerprint), or where O(way_back) says, or leaves nothing if that is nothing.
      - V(absent) stops the service, ends every process that carries the replica's marker, and removes the files and users that this collection
        made. Model files are never touched.
        It returns when the shard's memory on GPUs is gone, its ports can be bound, and no process and no file of it is left, and fails naming what is not gone
        within 60 seconds. What is left of a replica whose records are gone is found and removed, too.
      - V(stopped) and V(restarted) act on the service that is there.
      - V(unlocked) gives up the lock that this run has on the replica, or one that a run which died has left; hosts without one are not contacted.
    type: str
    choices: [present, restored, absent, stopped, restarted, unlocked]
    default: present
  replica:
    description: Name of the replica.
    type: str
    required: true
  shard:
    description: This host's part of the plan, C(plan.shards[inventory_hostname]) of M(rankzero.inference.replica_plan). Empty on hosts that were not chosen.
    type: dict
    default: {}
  api_key:
    description: The replica's API key. It goes into a file with mode 0600 on the rank that serves HTTP, and nowhere else.
    type: str
  fingerprint:
    description:
      - With O(state=restored), the kept revision to go to. Every host of the replica must go to the same one.
      - Without it, O(state=restored) goes where O(way_back) says.
    type: str
  way_back:
    description:
      - With O(state=restored), the C(way_back) of the plan, or of the choice of M(rankzero.inference.replica_revision), which is one for all hosts.
      - A host where another run was in the way, or has taken over, is left alone.
    type: dict
  enabled:
    description: With O(state=stopped), V(false) also keeps the service from coming back at the next boot. Whatever starts it again undoes that.
    type: bool
    default: true
  replica_root:
    description: Everything is written below this directory. An unprivileged user, a demonstration or a test uses another than V(/).
    type: str
    default: /
  revision:
    description: Filled in by the action plugin with the rendered revision; not for playbooks.
    type: dict
    default: {}
  secrets:
    description: Filled in by the action plugin from O(api_key); not for playbooks.
    type: dict
  lease:
    description: Filled in by the action plugin with who this run is; not for playbooks.
    type: dict
    default: {}
  log_file:
    description:
      - With O(state=restored), a file on the controller into which the last lines of the shard's log are written, without secrets, when nothing is left
        on the host. Removal takes the log with it.
    type: str
notes:
  - Whatever changes a host takes the lock C(<root>/run/rankzero/<replica>.lock) first, and is refused, before anything is written, while another run has it.
    A lock is renewed by every call of its run and ends 90 seconds after the last one. V(absent) gives it up itself; after the others use V(unlocked).
attributes:
  action:
    support: full
    description: An action plugin of the same name renders and compares on the controller.
  check_mode:
    support: full
    description: Says what it would do and changes nothing, also on an empty host.
  diff_mode:
    support: full
    description: Shows the service, the environment and the launch; of secrets only that they changed.
"""

EXAMPLES = r"""
- name: Write and start every rank
  rankzero.inference.shard:
    replica: glm
    shard: "{{ result.plan.shards[inventory_hostname] | default({}) }}"
    api_key: "{{ vault_glm_api_key }}"
  notify: Confirm shards hold their GPUs

- name: Go back to a revision that was kept
  rankzero.inference.shard:
    replica: glm
    state: restored
    fingerprint: a01b77de92c0f514

- name: Let other runs change the replica again
  rankzero.inference.shard:
    replica: glm
    state: unlocked

- name: Remove a replica from its hosts
  rankzero.inference.shard:
    replica: glm
    state: absent
"""

RETURN = r"""
actions:
  description: What was done on the host, or would be done in check mode, in order.
  returned: always
  type: list
  elements: str
  sample: ["write revision 3f0c9a4be1d25577", "switch current to revision 3f0c9a4be1d25577", "restart the service (systemd)"]
revision:
  description: Fingerprint of the revision that is current now.
  returned: always
  type: str
  sample: 3f0c9a4be1d25577
reasons:
  description: Why the host was not converged.
  returned: when O(state=present)
  type: list
  elements: str
  sample: ["revision 3f0c9a4be1d25577 is not current (a01b77de92c0f514 is)"]
locked:
  description: Who has the lock of the replica on this host, as in RV(rankzero.inference.node_facts#module:ansible_facts.inference_node.locks).
  returned: when another run was in the way
  type: dict
verified:
  description:
    - After a removal, whether it was seen that the shard's GPU memory, ports, processes and files are gone. V(null) is what could not be asked, with
      the reason in RV(notes).
  returned: when the shard was removed
  type: dict
  sample: {"gpu_memory": true, "ports": true, "processes": true, "files": true}
notes:
  description: What an operator may want to know about the removal, such as a port of the shard's that another program has.
  returned: when the shard was removed
  type: list
  elements: str
  sample: []
log_file:
  description: Where the last lines of the log were written on the controller.
  returned: with O(log_file), when there was a log
  type: str
  sample: /home/ops/diagnosis/glm-20260131T120000Z-gpu-a.log
remote_calls:
  description: How many calls were made to the host, V(0) on a converged one.
  returned: always
  type: int
  sample: 1
"""

import typing as t

# For its effect on every import behind it, so it has no other use: docs/decisions/0013-modules-are-compiled-once.md
from ansible_collections.rankzero.inference.plugins.module_utils import compile_once  # noqa: F401  # pylint: disable=unused-import

# isort: split
from ansible.module_utils.basic import AnsibleModule

from ansible_collections.rankzero.inference.plugins.module_utils.deployment import Deployment, DeploymentError, ServiceError
from ansible_collections.rankzero.inference.plugins.module_utils.leases import Held, Lease

ARGUMENTS: t.Dict[str, t.Any] = {
    "state": {"type": "str", "choices": ["present", "restored", "absent", "stopped", "restarted", "unlocked"], "default": "present"},
    "replica": {"type": "str", "required": True},
    "shard": {"type": "dict", "default": {}},
    "api_key": {"type": "str", "no_log": True},
    "fingerprint": {"type": "str"},
    "way_back": {"type": "dict"},
    "enabled": {"type": "bool", "default": True},
    "replica_root": {"type": "str", "default": "/"},
    # fingerprint, failed_fingerprint, files, unit_name, manager, supervisord, user, force_restart: what the action plugin rendered.
    "revision": {"type": "dict", "default": {}},
    "secrets": {"type": "dict", "no_log": True},
    "lease": {"type": "dict", "default": {}},
    "log_file": {"type": "str"},
}


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    params = module.params
    deployment = Deployment({**params, **params["revision"]}, module.run_command, module.check_mode)
    lease = Lease(params["replica_root"], params["replica"], {} if module.check_mode else params["lease"])
    try:
        if not lease.take():
            module.exit_json(changed=False, actions=[], revision=None, reasons=["this run has changed nothing here"])
        if params["state"] != "unlocked":
            getattr(deployment, params["state"])()
        if params["state"] == "unlocked" or not deployment.revisions.present():
            lease.release()
    except Held as held:
        module.fail_json(msg=str(held), actions=[], locked=held.lock)
    except (DeploymentError, ServiceError) as error:
        module.fail_json(msg=str(error), actions=deployment.actions, **_removal(deployment))
    except OSError as error:
        module.fail_json(msg="%s: %s" % (error.filename or "the file system", error.strerror or error), actions=deployment.actions)
    finally:
        lease.keep()
    module.exit_json(
        changed=bool(deployment.actions),
        actions=deployment.actions,
        diff=deployment.diffs,
        revision=deployment.revisions.linked("current"),
        **_removal(deployment),
    )


def _removal(deployment: Deployment) -> t.Dict[str, t.Any]:
    """What a removal has to tell, also when it failed."""
    told: t.Dict[str, t.Any] = {"verified": deployment.verified, "notes": deployment.notes} if deployment.verified else {}
    return {**told, "last_log": deployment.last_log} if deployment.last_log else told


if __name__ == "__main__":
    main()
