#!/usr/bin/python
# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Documentation and options of the look at one shard; the reading is done in module_utils/shard_diagnosis.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: shard_diagnosis
short_description: Collect what a host can tell about one shard of a replica
version_added: 0.1.0
description:
  - Reads in one call what is needed to find out why a replica does not run - the launch, the state of the run, the service, the evidence that the gate
    weighs, the end of the log with its telling lines, who holds the GPUs and ports, and what the kernel says about GPUs and killed processes.
  - It only reads, and works while a shard is loading, has failed, is half gone, or was never there.
  - Secrets of the replica are masked in all that is returned, in every spelling, and so are values under names such as C(HF_TOKEN).
  - M(rankzero.inference.replica_diagnosis) puts the answers of all hosts together.
author:
  - The rankzero.inference authors (@rankzero)
options:
  replica:
    description: Name of the replica.
    type: str
    required: true
  replica_root:
    description: Everything is below this directory.
    type: path
    default: /
  api_key:
    description: The replica's API key, to be masked on ranks that do not have it, too.
    type: str
  lines:
    description: How many lines of the log are returned at most.
    type: int
    default: 1000
  proc_root:
    description: Where the host's process file system is. For tests.
    type: path
    default: /proc
attributes:
  check_mode:
    support: full
    description: It changes nothing, so check mode is no different.
  diff_mode:
    support: none
    description: There is nothing to compare.
  platform:
    support: full
    platforms: linux
    description: The hosts that it can read.
"""

EXAMPLES = r"""
- name: Look at the shard
  rankzero.inference.shard_diagnosis:
    replica: glm
  become: true
  register: glm_seen

- name: Show the lines that tell why
  ansible.builtin.debug:
    msg: "{{ glm_seen.telling }}"
"""

RETURN = r"""
present:
  description: Whether anything of the replica is on the host.
  returned: always
  type: bool
  sample: true
traces:
  description: Service file, processes and directories of the replica.
  returned: always
  type: dict
launch:
  description: C(launch.json) with secrets masked; V(null) when it is not there.
  returned: always
  type: dict
state:
  description: C(state.json), what C(run_shard.py) says about the run; V(null) when it is not there.
  returned: always
  type: dict
service:
  description: What the service manager says.
  returned: always
  type: dict
verdict:
  description: The verdict of the gate at this moment, as M(rankzero.inference.shard_ready) returns it.
  returned: always
  type: dict
telling:
  description: Lines of the log of the last runs that tell something, in order. C(kind) is V(cause), V(consequence), V(weak) or V(error).
  returned: always
  type: list
  elements: dict
  sample:
    - line: "torch.OutOfMemoryError: CUDA out of memory."
      cause: A GPU ran out of memory.
      hint: Check with nvidia-smi that nothing else holds the GPU.
      kind: cause
log:
  description: The last lines of the log, without control characters.
  returned: always
  type: list
  elements: str
log_command:
  description: The command that shows the log on the host.
  returned: always
  type: str
  sample: journalctl -u inference-glm.service -n 200
driver:
  description: State and message of the GPU driver; V(null) when it was not asked.
  returned: always
  type: dict
gpus:
  description: Every GPU with the processes on it.
  returned: always
  type: list
  elements: dict
ports:
  description: Every port that the shard listens on, with who has it.
  returned: always
  type: list
  elements: dict
kernel:
  description: Lines of the kernel's log about GPUs, HCAs and killed processes; V(null) when it cannot be read.
  returned: always
  type: list
  elements: str
problems:
  description: Why something of this could not be read.
  returned: always
  type: dict
"""

from typing import Any

# For its effect on every import behind it, so it has no other use: docs/decisions/0013-modules-are-compiled-once.md
from ansible_collections.rankzero.inference.plugins.module_utils import compile_once  # noqa: F401  # pylint: disable=unused-import

# isort: split
from ansible.module_utils.basic import AnsibleModule

from ansible_collections.rankzero.inference.plugins.module_utils import shard_diagnosis, traces

ARGUMENTS: dict[str, dict[str, Any]] = {
    "replica": {"type": "str", "required": True},
    "replica_root": {"type": "path", "default": "/"},
    "api_key": {"type": "str", "no_log": True},
    "lines": {"type": "int", "default": 1000},
    "proc_root": {"type": "path", "default": "/proc"},
}


def main() -> None:
    """One look."""
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    options = module.params
    if not traces.is_name(options["replica"]):
        module.fail_json(msg="replica: %r is no name of a replica" % options["replica"])
    module.exit_json(
        changed=False,
        **shard_diagnosis.read(options["replica"], options["replica_root"], options["proc_root"], module.run_command, options["lines"], options["api_key"]),
    )


if __name__ == "__main__":
    main()
