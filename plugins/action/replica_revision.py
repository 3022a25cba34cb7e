# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Action plugin: hostvars in, the revision that all ranks can go to out. The rules are in plugin_utils/lifecycle.py; no connection is opened."""

from __future__ import annotations

import typing as t

from ansible.plugins.action import ActionBase

from ansible_collections.rankzero.inference.plugins.plugin_utils import hostvars, lifecycle, run_identity
from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Findings, report

ARGUMENTS: dict[str, t.Any] = {
    "replica": {"type": "str", "required": True},
    "goal": {"type": "str", "choices": ["current", "previous"], "default": "current"},
    "revision": {"type": "str"},
}


class ActionModule(ActionBase):
    TRANSFERS_FILES = False
    BYPASS_HOST_LOOP = True
    _supports_check_mode = True

    def run(self, tmp: t.Any = None, task_vars: t.Any = None) -> dict[str, t.Any]:
        super().run(tmp, task_vars)
        _result, arguments = self.validate_argument_spec(argument_spec=ARGUMENTS)
        replica = str(arguments["replica"])
        facts = hostvars.facts_of_play(task_vars)
        findings = Findings()
        choice = lifecycle.choose_revision(
            replica, facts, str(arguments["goal"]), hostvars.text(arguments["revision"]), run_identity.owners_that_do_not_count(facts, task_vars), findings
        )
        if findings.faults:
            return {
                "failed": True,
                "faults": [fault.as_dict() for fault in findings.faults],
                "msg": report(findings.faults, "Refused, and nothing was changed. Faults"),
            }
        return {"changed": False, "choice": choice}
