# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Action plugin: says who cordons, and lets the module write it down."""

from __future__ import annotations

import typing as t

from ansible.plugins.action import ActionBase

from ansible_collections.rankzero.inference.plugins.plugin_utils import hostvars, run_identity

ARGUMENTS: dict[str, t.Any] = {
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "reason": {"type": "str"},
    "by": {"type": "str"},
    "replica_root": {"type": "path", "default": "/"},
}


class ActionModule(ActionBase):
    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp: t.Any = None, task_vars: t.Any = None) -> dict[str, t.Any]:
        super().run(tmp, task_vars)
        _result, arguments = self.validate_argument_spec(argument_spec=ARGUMENTS)
        arguments = {name: hostvars.plain(value) for name, value in arguments.items() if hostvars.text(value) is not None}
        arguments.setdefault("by", run_identity.who(task_vars or {}))
        return dict(self._execute_module(module_name="rankzero.inference.node_cordon", module_args=arguments, task_vars=task_vars))
