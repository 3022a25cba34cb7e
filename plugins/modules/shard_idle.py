#!/usr/bin/python
# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: shard_idle
short_description: Wait until a replica has no request in flight
version_added: 0.1.0
description:
  - Asks the server of the shard on this host, on the host, for its own metrics until nothing runs and nothing waits. Use it on the rank that serves HTTP.
  - A server that does not run has nothing in flight. A number that is not known is never taken for V(0).
  - It refuses no new requests. Take the replica out of what sends them first.
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
  metrics:
    description: Names of the gauges whose sum is the number of requests in flight, as M(rankzero.inference.drain_plan) returns them.
    type: list
    elements: str
    default: []
  metrics_path:
    description: Path of the metrics.
    type: str
  timeout:
    description: Seconds to wait.
    type: float
    default: 300
  force:
    description: Do not fail when the time is over or the number is not known.
    type: bool
    default: false
  hold_seconds:
    description: How long one call to the host looks before it reports back.
    type: float
    default: 15
attributes:
  action:
    support: full
    description: Waits and shows the number on the controller.
  check_mode:
    support: full
    description: Takes one look.
  diff_mode:
    support: none
    description: There is nothing to compare.
"""

EXAMPLES = r"""
- name: Wait for requests in flight
  rankzero.inference.shard_idle:
    replica: glm
    metrics: ["vllm:num_requests_running", "vllm:num_requests_waiting"]
    metrics_path: /metrics
"""

RETURN = r"""
in_flight:
  description: Requests that run or wait; null where that is not known.
  returned: always
  type: int
  sample: 0
serving:
  description: Whether the server runs.
  returned: always
  type: bool
reason:
  description: Why the number is not known, or the server does not run.
  returned: always
  type: str
"""

# For its effect on every import behind it, so it has no other use: docs/decisions/0013-modules-are-compiled-once.md
from ansible_collections.rankzero.inference.plugins.module_utils import compile_once  # noqa: F401  # pylint: disable=unused-import

# isort: split
from ansible.module_utils.basic import AnsibleModule

from ansible_collections.rankzero.inference.plugins.module_utils import observation, requests_in_flight


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "replica": {"type": "str", "required": True},
            "replica_root": {"type": "path", "default": "/"},
            "metrics": {"type": "list", "elements": "str", "default": []},
            "metrics_path": {"type": "str"},
            "timeout": {"type": "float", "default": 300},
            "force": {"type": "bool", "default": False},
            "hold_seconds": {"type": "float", "default": 15},
        },
        supports_check_mode=True,
    )
    options = module.params
    observer = observation.Observer(options["replica"], options["replica_root"], "/proc", module.run_command)
    module.exit_json(changed=False, **requests_in_flight.watch(observer, options["metrics_path"], options["metrics"], options["hold_seconds"]))


if __name__ == "__main__":
    main()
