# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Action plugin: what all hosts said, as one table."""

from __future__ import annotations

import typing as t

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.rankzero.inference.plugins.plugin_utils import hostvars, status

display = Display()
ARGUMENTS: dict[str, t.Any] = {"replica": {"type": "str", "required": True}, "looks": {"type": "str"}, "plan": {"type": "dict"}}


class ActionModule(ActionBase):
    TRANSFERS_FILES = False
    BYPASS_HOST_LOOP = True
    _supports_check_mode = True

    def run(self, tmp: t.Any = None, task_vars: t.Any = None) -> dict[str, t.Any]:
        super().run(tmp, task_vars)
        _result, arguments = self.validate_argument_spec(argument_spec=ARGUMENTS)
        hosts = [str(host) for host in task_vars.get("ansible_play_hosts_all") or ()]
        plan = hostvars.plain(arguments["plan"])
        seen = {}
        for host in plan["shards"] if plan else hosts:  # each host's variables are put together anew, and a pool may have many
            raw = hostvars.raw_variables(task_vars, host)
            seen[host] = (hostvars.plain(hostvars.facts_of(raw)), hostvars.plain(raw.get(arguments["looks"]) if arguments["looks"] else None))
        ranks = status.ranks(arguments["replica"], seen, plan)
        url = ((plan or {}).get("leader") or {}).get("url")
        silent = [] if plan else [host for host, (facts, _look) in seen.items() if facts is None]
        display.display(status.text(arguments["replica"], ranks, hosts, url, silent))
        return {"changed": False, "ranks": ranks, "ready": status.whole(ranks)}
