# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Action plugin: hostvars in, what has to stop for a host to be drained out. The rules are in plugin_utils/lifecycle.py; no connection is opened."""

from __future__ import annotations

import typing as t

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.rankzero.inference.plugins.plugin_utils import engines, hostvars, lifecycle, run_identity
from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Findings, report
from ansible_collections.rankzero.inference.plugins.plugin_utils.values import Reader

display = Display()
DEFAULT_TIMEOUT_SECONDS = 300.0
ARGUMENTS: dict[str, t.Any] = {
    "host": {"type": "str", "required": True},
    "reason": {"type": "str"},
    "timeout": {"type": "raw"},
    "force": {"type": "bool", "default": False},
}


class ActionModule(ActionBase):
    TRANSFERS_FILES = False
    BYPASS_HOST_LOOP = True
    _supports_check_mode = True

    def run(self, tmp: t.Any = None, task_vars: t.Any = None) -> dict[str, t.Any]:
        super().run(tmp, task_vars)
        _result, arguments = self.validate_argument_spec(argument_spec=ARGUMENTS)
        facts = hostvars.facts_of_play(task_vars)
        findings = Findings()
        if not hostvars.text(arguments["reason"]):
            findings.fault(
                "drain_reason",
                None,
                "why the host is taken out of service",
                "Give -e drain_reason, with quotes inside of quotes where it has spaces: whoever finds it cordoned will ask.",
            )
        timeout = Reader({"drain_timeout": hostvars.plain(arguments["timeout"])}, "", findings).seconds("drain_timeout", DEFAULT_TIMEOUT_SECONDS)
        ended = run_identity.owners_that_do_not_count(facts, task_vars)
        inventory = [str(host) for host in (task_vars.get("groups") or {}).get("all") or ()]
        drain = lifecycle.drain(str(arguments["host"] or ""), facts, inventory, ended, bool(arguments["force"]), findings)
        if findings.faults:
            return {
                "failed": True,
                "faults": [fault.as_dict() for fault in findings.faults],
                "msg": report(findings.faults, "Refused, and nothing was changed. Faults"),
            }
        for one in drain["replicas"]:
            adapter = engines.load(str(one["engine"]), Findings()) if one["engine"] else None
            one.update(metrics=list(adapter.in_flight_metrics) if adapter else [], metrics_path=adapter.metrics_path if adapter else None)
        drain["timeout"] = timeout
        display.display(_text(drain))
        return {"changed": False, "drain": drain}


def _text(drain: t.Mapping[str, t.Any]) -> str:
    if not drain["replicas"]:
        return "No replica has a rank on %s." % drain["node"]
    lines = ["These replicas have a rank on %s, and stop on all of their hosts:" % drain["node"]]
    for one in drain["replicas"]:
        away = "; rank(s) %s are on hosts that could not be asked, and will wait for the others" % ", ".join(map(str, one["missing"])) if one["missing"] else ""
        lines.append(
            "  %s: %s%s"
            % (one["replica"], ", ".join("rank %s (%s)" % (rank, host) for host, rank in sorted(one["hosts"].items(), key=lambda item: str(item[1]))), away)
        )
    return "\n".join(lines)
