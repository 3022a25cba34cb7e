#!/usr/bin/python
# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: node_cordon
short_description: Take a host out of service, or back into it
version_added: 0.1.0
description:
  - Writes who took the host out of service, why and when, into C(<root>/etc/rankzero/cordoned.json). No plan takes a cordoned host.
  - It stops nothing; P(rankzero.inference.shard#module) with O(rankzero.inference.shard#module:state=stopped) does.
author:
  - The rankzero.inference authors (@rankzero)
options:
  state:
    description: Whether the host is cordoned.
    type: str
    choices: [present, absent]
    default: present
  reason:
    description: Why. Needed with O(state=present).
    type: str
  by:
    description: Who. The user who runs Ansible, if it is not given.
    type: str
  replica_root:
    description: Directory below which the files of replicas lie on the host.
    type: path
    default: /
attributes:
  action:
    support: full
    description: Says who runs Ansible.
  check_mode:
    support: full
    description: Says what it would do.
  diff_mode:
    support: none
    description: There is nothing to compare.
"""

EXAMPLES = r"""
- name: Take the host out of service
  rankzero.inference.node_cordon:
    reason: fan 3 is broken

- name: Take it back
  rankzero.inference.node_cordon:
    state: absent
"""

RETURN = r"""
cordoned:
  description: What is written down now; null where the host is in service.
  returned: always
  type: dict
  sample: {by: ann@control, reason: fan 3 is broken, at: "2026-01-31T12:00:00Z"}
"""

import json
import os
import time

# For its effect on every import behind it, so it has no other use: docs/decisions/0013-modules-are-compiled-once.md
from ansible_collections.rankzero.inference.plugins.module_utils import compile_once  # noqa: F401  # pylint: disable=unused-import

# isort: split
from ansible.module_utils.basic import AnsibleModule

from ansible_collections.rankzero.inference.plugins.module_utils import shard_records
from ansible_collections.rankzero.inference.plugins.module_utils.revisions import Revisions, replace_file


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "reason": {"type": "str"},
            "by": {"type": "str"},
            "replica_root": {"type": "path", "default": "/"},
        },
        required_if=[("state", "present", ["reason"])],
        supports_check_mode=True,
    )
    options = module.params
    root = Revisions(options["replica_root"], "none").config_root
    path = root + "/cordoned.json"
    before = shard_records.cordoned(options["replica_root"])
    wanted = None
    if options["state"] == "present":
        reason = shard_records.one_line(options["reason"])
        same = before is not None and before["reason"] == reason and before["at"]
        wanted = before if same else {"by": shard_records.one_line(options["by"]), "reason": reason, "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    changed = wanted != before
    try:
        if changed and not module.check_mode:
            if wanted is None:
                os.unlink(path)
            else:
                Revisions(options["replica_root"], "none").prepare_config_root()
                replace_file(path, json.dumps(wanted) + "\n", 0o644)
    except OSError as error:
        module.fail_json(msg="%s: %s" % (error.filename or path, error.strerror or error))
    module.exit_json(changed=changed, cordoned=wanted)


if __name__ == "__main__":
    main()
