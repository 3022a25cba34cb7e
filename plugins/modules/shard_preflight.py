#!/usr/bin/python
# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Documentation and options of the preflight of one rank; the work is done in module_utils/preflight.py and roles/replica/files/preflight.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: shard_preflight
short_description: Try the network of one rank before a deploy
version_added: 0.1.0
description:
  - V(started) starts a small program in the background, on all ranks at once, and returns. Each rank listens on planned ports of its planned address that
    are free, connects to those of every other rank, and exchanges data in both directions. Where the engine's own Python has torch, an
    all-reduce follows, over NCCL on GPUs and over Gloo on CPUs, with exactly the environment that the shards will get.
  - V(collected) waits for what it found, within the program's own time, and leaves nothing of it on the host.
  - Nothing of a running replica is touched. GPUs that it holds are left alone, which the result says.
author:
  - The rankzero.inference authors (@rankzero)
options:
  state:
    description: What to do. V(absent) ends a preflight and removes its files.
    type: str
    choices: [started, collected, absent]
    required: true
  replica:
    description: Name of the replica.
    type: str
    required: true
  plan:
    description: The plan of M(rankzero.inference.replica_plan), which must be given. A host without a rank does nothing.
    type: dict
  planned_at:
    description: When the plan was made, as M(rankzero.inference.replica_plan) returns it. It tells one preflight from another.
    type: float
    default: 0.0
  replica_root:
    description: Everything is below this directory.
    type: str
    default: /
  request:
    description: Filled in by the action plugin; not for playbooks.
    type: dict
    default: {}
  program:
    description: Filled in by the action plugin with the text of the program; not for playbooks.
    type: str
attributes:
  action:
    support: full
    description: An action plugin of the same name says what each rank has to try.
  check_mode:
    support: full
    description: Nothing is tried in check mode.
  diff_mode:
    support: none
    description: There is nothing to compare.
  platform:
    support: full
    platforms: linux
    description: The hosts that it can run on.
"""

EXAMPLES = r"""
- name: Start the preflight on every rank
  rankzero.inference.shard_preflight:
    state: started
    replica: glm
    plan: "{{ result.plan }}"
    planned_at: "{{ result.planned_at }}"
  register: started

- name: Collect what every rank found
  rankzero.inference.shard_preflight:
    state: collected
    replica: glm
    plan: "{{ result.plan }}"
  register: collected
"""

RETURN = r"""
python:
  description: The Python that runs the program, which is the engine's own where an all-reduce is tried.
  returned: with O(state=started)
  type: str
  sample: /opt/vllm/bin/python3
collective:
  description: V(nccl), V(gloo), or V(null) where no all-reduce is tried.
  returned: with O(state=started)
  type: str
  sample: nccl
not_tried:
  description: Why no all-reduce is tried; V(null) when one is.
  returned: with O(state=started)
  type: str
result:
  description: What the program found. V(null) when it gave no answer.
  returned: with O(state=collected)
  type: dict
log:
  description: The last lines that it wrote.
  returned: with O(state=collected)
  type: list
  elements: str
"""

from typing import Any

# For its effect on every import behind it, so it has no other use: docs/decisions/0013-modules-are-compiled-once.md
from ansible_collections.rankzero.inference.plugins.module_utils import compile_once  # noqa: F401  # pylint: disable=unused-import

# isort: split
from ansible.module_utils.basic import AnsibleModule

from ansible_collections.rankzero.inference.plugins.module_utils import preflight, traces

ARGUMENTS: dict[str, dict[str, Any]] = {
    "state": {"type": "str", "choices": ["started", "collected", "absent"], "required": True},
    "replica": {"type": "str", "required": True},
    "plan": {"type": "dict"},
    "planned_at": {"type": "float", "default": 0.0},
    "replica_root": {"type": "str", "default": "/"},
    "request": {"type": "dict", "default": {}},
    "program": {"type": "str"},
}


def main() -> None:
    """One step."""
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    options = module.params
    root, replica, request = options["replica_root"], options["replica"], options["request"]
    if not traces.is_name(replica):
        module.fail_json(msg="replica: %r is no name of a replica" % replica)
    if module.check_mode:
        module.exit_json(changed=False)
    try:
        if options["state"] == "started":
            module.exit_json(changed=False, **preflight.start(root, replica, request, options["program"], module.run_command))
        if options["state"] == "collected":
            module.exit_json(changed=False, **preflight.collect(root, replica, float(request["seconds"])))
        preflight.sweep(root, replica)
    except preflight.PreflightError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg="%s: %s" % (error.filename or "the file system", error.strerror or error))
    module.exit_json(changed=False)


if __name__ == "__main__":
    main()
