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
      - V(present) writes and starts the shard that O(shard) describes; on a host that has no part in the plan any more, what it has of the replica is removed.
      - V(restored) goes back to the revision that node facts saw, or leaves nothing if there was none.
      - V(absent) stops the service, ends every process that carries the replica's marker, and removes the files and users that this collection
        made. Model files are never touched.
        It returns when the shard's memory on GPUs is gone, its ports can be bound, and no process and no file of it is left, and fails naming what is not gone
        within 60 seconds. What is left of a replica whose records are gone is found and removed, too.
      - V(stopped) and V(restarted) act on the service that is there.
    type: str
    choices: [present, restored, absent, stopped, restarted]
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
  log_file:
    description:
      - With O(state=restored), a file on the controller into which the last lines of the shard's log are written, without secrets, when nothing is left
        on the host. Removal takes the log with it.
    type: str
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

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.rankzero.inference.plugins.module_utils.deployment import Deployment, DeploymentError, ServiceError

ARGUMENTS: t.Dict[str, t.Any] = {
    "state": {"type": "str", "choices": ["present", "restored", "absent", "stopped", "restarted"], "default": "present"},
    "replica": {"type": "str", "required": True},
    "shard": {"type": "dict", "default": {}},
    "api_key": {"type": "str", "no_log": True},
    "replica_root": {"type": "str", "default": "/"},
    # fingerprint, failed_fingerprint, files, unit_name, manager, supervisord, user, force_restart: what the action plugin rendered.
    "revision": {"type": "dict", "default": {}},
    "secrets": {"type": "dict", "no_log": True},
    "log_file": {"type": "str"},
}


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    deployment = Deployment({**module.params, **module.params["revision"]}, module.run_command, module.check_mode)
    try:
        getattr(deployment, module.params["state"])()
    except (DeploymentError, ServiceError) as error:
        module.fail_json(msg=str(error), actions=deployment.actions, **_removal(deployment))
    except OSError as error:
        module.fail_json(msg="%s: %s" % (error.filename or "the file system", error.strerror or error), actions=deployment.actions)
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
