# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Action plugin: asks the host again and again until no request is in flight, and shows how many still are. A module cannot print."""

from __future__ import annotations

import time
import typing as t

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.rankzero.inference.plugins.plugin_utils import hostvars
from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Findings, report
from ansible_collections.rankzero.inference.plugins.plugin_utils.values import Reader

display = Display()
SHOW_SECONDS = 29.0
ARGUMENTS: dict[str, t.Any] = {
    "replica": {"type": "str", "required": True},
    "replica_root": {"type": "path", "default": "/"},
    "metrics": {"type": "list", "elements": "str", "default": []},
    "metrics_path": {"type": "str"},
    "timeout": {"type": "raw"},
    "force": {"type": "bool", "default": False},
    "hold_seconds": {"type": "raw"},
}
DEFAULT_SECONDS = {"timeout": 300.0, "hold_seconds": 15.0}
TO_MODULE = ("replica", "replica_root", "metrics", "metrics_path")


class ActionModule(ActionBase):
    TRANSFERS_FILES = False
    _supports_check_mode = True
    _requires_connection = True

    def run(self, tmp: t.Any = None, task_vars: t.Any = None) -> dict[str, t.Any]:
        super().run(tmp, task_vars)
        self._task.args = {name: value for name, value in self._task.args.items() if value is not None and value != ""}
        _result, options = self.validate_argument_spec(argument_spec=ARGUMENTS)
        findings = Findings()
        read = Reader({name: hostvars.plain(options[name]) for name in DEFAULT_SECONDS}, "", findings)
        options.update({name: read.seconds(name, default) for name, default in DEFAULT_SECONDS.items()})
        if findings.faults:
            return {"failed": True, "msg": report(findings.faults, "Not asked, and nothing was changed. Faults")}
        started, shown, before = time.monotonic(), 0.0, object()
        while True:
            left = options["timeout"] - (time.monotonic() - started)
            hold = 0.0 if self._task.check_mode else max(0.0, min(options["hold_seconds"], left))
            arguments = {name: hostvars.plain(options[name]) for name in TO_MODULE}
            answer = dict(
                self._execute_module(module_name="rankzero.inference.shard_idle", module_args={**arguments, "hold_seconds": hold}, task_vars=task_vars)
            )
            if answer.get("failed") or answer.get("unreachable") or answer["in_flight"] == 0 or self._task.check_mode:
                return answer
            left = options["timeout"] - (time.monotonic() - started)
            if answer["in_flight"] is None or left <= 0:
                return self._over(answer, options)
            if answer["in_flight"] != before or time.monotonic() - shown > SHOW_SECONDS:
                display.display("[%s] %d request(s) in flight, %.0f s left" % (options["replica"], answer["in_flight"], left))
                shown, before = time.monotonic(), answer["in_flight"]

    @staticmethod
    def _over(answer: dict[str, t.Any], options: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
        """Not known to be idle: a failure, unless that was allowed."""
        if answer["in_flight"] is None:
            told = "how many requests replica %s has in flight is not known: %s" % (options["replica"], answer["reason"])
        else:
            told = "replica %s still has %d request(s) in flight after %.0f s" % (options["replica"], answer["in_flight"], options["timeout"])
        if options["force"]:
            return {**answer, "msg": told + "; they are lost, as drain_force says"}
        return {
            **answer,
            "failed": True,
            "msg": told + ". Nothing was stopped. Send no more requests to it and try again, give it longer (drain_timeout), or lose them (drain_force=true).",
        }
