# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Action plugin: the facts of all hosts of the play as readable reports."""

from __future__ import annotations

import typing as t

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.rankzero.inference.plugins.plugin_utils import host_facts, hostvars, node_report
from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import natural_key

display = Display()


class ActionModule(ActionBase):
    TRANSFERS_FILES = False
    BYPASS_HOST_LOOP = True
    _supports_check_mode = True

    def run(self, tmp: t.Any = None, task_vars: t.Any = None) -> dict[str, t.Any]:
        super().run(tmp, task_vars)
        self.validate_argument_spec(argument_spec={})
        hosts = sorted(map(str, task_vars.get("ansible_play_hosts_all") or ()), key=natural_key)
        facts = {host: hostvars.plain(hostvars.facts_of(hostvars.raw_variables(task_vars, host))) for host in hosts}
        display.display("\n\n".join(node_report.report(host, facts[host]) for host in hosts))
        known = {host: found for host, found in facts.items() if not host_facts.problem(found)}
        return {"changed": False, "conditions": {host: node_report.conditions(host_facts.normalise(found)) for host, found in known.items()}}
