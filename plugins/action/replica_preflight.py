# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Action plugin: the verdict over what all ranks tried."""

from __future__ import annotations

import typing as t

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.rankzero.inference.plugins.plugin_utils import hostvars, preflight

display = Display()
ARGUMENTS: dict[str, t.Any] = {
    "plan": {"type": "dict", "required": True},
    "started": {"type": "str", "required": True},
    "collected": {"type": "str", "required": True},
}


class ActionModule(ActionBase):
    TRANSFERS_FILES = False
    BYPASS_HOST_LOOP = True
    _supports_check_mode = True

    def run(self, tmp: t.Any = None, task_vars: t.Any = None) -> dict[str, t.Any]:
        super().run(tmp, task_vars)
        _result, arguments = self.validate_argument_spec(argument_spec=ARGUMENTS)
        if self._task.check_mode:
            return {"changed": False, "skipped": True, "msg": "nothing is tried in check mode"}
        plan = hostvars.plain(arguments["plan"])
        raw = {host: hostvars.raw_variables(task_vars, host) for host in plan["shards"]}
        requests = {host: self._request(variables.get(arguments["started"])) for host, variables in raw.items()}
        answers = {host: hostvars.plain(variables.get(arguments["collected"])) for host, variables in raw.items()}
        found = preflight.verdict(plan, answers, requests)
        display.display(preflight.text(plan, found))
        if found["ok"]:
            return {"changed": False, **found}
        return {
            "failed": True,
            **found,
            "msg": "The preflight of replica %s failed, and nothing was changed:\n%s"
            % (plan["replica"], "\n".join("  %s" % text for text in found["failures"])),
        }

    @staticmethod
    def _request(started: t.Any) -> dict[str, t.Any]:
        told = hostvars.plain(started) or {}
        return {"skipped": told.get("not_tried"), "backend": None if told.get("not_tried") or told.get("collective") else "none"}
