#!/usr/bin/python
# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: api_key_check
short_description: Check on the host that a replica takes its new API key and refuses the old one
version_added: 0.1.0
description:
  - Asks the server of the shard on this host for one token with the key of the present revision, which must be answered with 200, and then with the key of
    the revision before, which must be answered with 401 or 403. Use it on the rank that serves HTTP.
  - The keys are read from the revisions on the host. None leaves it, and none is shown.
author:
  - The rankzero.inference authors (@rankzero)
options:
  replica:
    description: Name of the replica.
    type: str
    required: true
  replica_root:
    description: Directory below which the files of replicas lie on the host.
    type: path
    default: /
attributes:
  check_mode:
    support: full
    description: It changes nothing in any mode.
  diff_mode:
    support: none
    description: There is nothing to compare.
"""

EXAMPLES = r"""
- name: Check both keys
  rankzero.inference.api_key_check:
    replica: glm
"""

RETURN = r"""
current:
  description: The status with the key of the present revision.
  returned: always
  type: int
  sample: 200
previous:
  description: The status with the key of the revision before; null where that had none or the same one.
  returned: always
  type: int
  sample: 401
"""

# For its effect on every import behind it, so it has no other use: docs/decisions/0013-modules-are-compiled-once.md
from ansible_collections.rankzero.inference.plugins.module_utils import compile_once  # noqa: F401  # pylint: disable=unused-import

# isort: split
from ansible.module_utils.basic import AnsibleModule

from ansible_collections.rankzero.inference.plugins.module_utils import observation, requests_in_flight


def main() -> None:
    module = AnsibleModule(
        argument_spec={"replica": {"type": "str", "required": True}, "replica_root": {"type": "path", "default": "/"}}, supports_check_mode=True
    )
    observer = observation.Observer(module.params["replica"], module.params["replica_root"], "/proc", module.run_command)
    found = requests_in_flight.check_keys(observer)
    if not found["ok"]:
        module.fail_json(msg="replica %s: %s" % (module.params["replica"], found["reason"]), current=found["current"], previous=found["previous"])
    module.exit_json(changed=False, current=found["current"], previous=found["previous"])


if __name__ == "__main__":
    main()
