# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Action plugin: what this rank has to try, from the plan and the facts of all hosts; then one call."""

from __future__ import annotations

import typing as t

from ansible import constants as C
from ansible.plugins.action import ActionBase

from ansible_collections.rankzero.inference.plugins.plugin_utils import collection_files, controller_files, engines, hostvars, preflight
from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Findings

ARGUMENTS: dict[str, t.Any] = {
    "state": {"type": "str", "choices": ["started", "collected", "absent"], "required": True},
    "replica": {"type": "str", "required": True},
    "plan": {"type": "dict", "required": True},
    "planned_at": {"type": "float", "default": 0.0},
    "replica_root": {"type": "str", "default": "/"},
}
PROGRAM = "preflight.py"


class ActionModule(ActionBase):
    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp: t.Any = None, task_vars: t.Any = None) -> dict[str, t.Any]:
        super().run(tmp, task_vars)
        _result, arguments = self.validate_argument_spec(argument_spec=ARGUMENTS)
        plan, host = hostvars.plain(arguments["plan"]), str(task_vars["inventory_hostname"])
        if host not in plan["shards"] or self._task.check_mode:
            return {"changed": False}
        if arguments["state"] == "started":
            request = self._request(plan, host, arguments, task_vars)
            result = self._call(arguments, task_vars, request=request, program=collection_files.program(PROGRAM))
            return {**result, "not_tried": request["skipped"]} if not result.get("failed") else result
        seconds = preflight.SOCKET_SECONDS + preflight.COLLECTIVE_SECONDS
        return self._call(arguments, task_vars, request={"seconds": seconds})

    @staticmethod
    def _request(plan: t.Any, host: str, arguments: dict[str, t.Any], task_vars: t.Any) -> dict[str, t.Any]:
        facts = {name: hostvars.plain(hostvars.facts_of(hostvars.raw_variables(task_vars, name))) for name in plan["shards"]}
        engine = engines.load(plan["engine"], Findings())
        token = controller_files.shared_token(C.DEFAULT_LOCAL_TMP, "preflight %s %s %s" % (arguments["replica"], plan["fingerprint"], arguments["planned_at"]))
        return preflight.request(plan, host, facts, engine.uses_nccl if engine else False, token)

    def _call(self, arguments: dict[str, t.Any], task_vars: t.Any, **more: t.Any) -> dict[str, t.Any]:
        module_arguments = {"state": arguments["state"], "replica": str(arguments["replica"]), "replica_root": str(arguments["replica_root"]), **more}
        return dict(self._execute_module(module_name="rankzero.inference.shard_preflight", module_args=module_arguments, task_vars=task_vars))
