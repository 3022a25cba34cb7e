# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Action plugin: asks the engine's adapter which programs a build has, and lets the module look at them on the host."""

from __future__ import annotations

import typing as t

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.rankzero.inference.plugins.plugin_utils import engines, hostvars
from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Findings, report

display = Display()
ARGUMENTS: dict[str, t.Any] = {
    "engine": {"type": "str", "required": True},
    "name": {"type": "str", "default": "default"},
    "path": {"type": "str"},
    "env": {"type": "dict", "default": {}},
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "replica_root": {"type": "str", "default": "/"},
}


class ActionModule(ActionBase):
    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp: t.Any = None, task_vars: t.Any = None) -> dict[str, t.Any]:
        super().run(tmp, task_vars)
        _result, arguments = self.validate_argument_spec(argument_spec=ARGUMENTS)
        findings = Findings()
        adapter = engines.load(str(arguments["engine"]), findings)
        if adapter is None:
            raise AnsibleActionFail(report(findings.faults, "The build cannot be registered"))
        if not adapter.needs_build:
            raise AnsibleActionFail("engine %s needs no build: it is part of the collection" % adapter.name)
        more = {
            "programs": list(adapter.programs),
            "optional_programs": list(adapter.optional_programs),
            "version_args": list(adapter.version_args),
            "devices_args": list(adapter.devices_args) or None,
        }
        arguments = {key: hostvars.plain(value) for key, value in arguments.items() if hostvars.text(value) is not None}
        result = dict(
            self._execute_module(
                module_name="rankzero.inference.engine_build", module_args={**arguments, "engine": adapter.name, "adapter": more}, task_vars=task_vars
            )
        )
        if result.get("build"):
            display.display(self._seen(str((task_vars or {}).get("inventory_hostname")), result["build"]))
        return result

    @staticmethod
    def _seen(host: str, build: t.Mapping[str, t.Any]) -> str:
        """One line about what the build is, and what it sees on the host."""
        devices = build.get("devices")
        seen = (
            "is not asked for devices"
            if devices is None
            else "sees %s" % (", ".join("%s %s" % (device["name"], device["description"]) for device in devices) or "no devices: CPU only")
        )
        return "[%s] %s build %s: version %s, fingerprint %s, %s" % (host, build["engine"], build["name"], build["version"], build["fingerprint"], seen)
