# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Action plugin: asks the engine's adapter which programs a build has, lets the module look at them on the host, and sends an archive that it needs."""

from __future__ import annotations

import dataclasses
import typing as t

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.rankzero.inference.plugins.module_utils import models
from ansible_collections.rankzero.inference.plugins.module_utils.engine_probe import option
from ansible_collections.rankzero.inference.plugins.plugin_utils import collection_files, controller_files, engines, hostvars
from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Findings, report

display = Display()
ARGUMENTS: dict[str, t.Any] = {
    "engine": {"type": "str"},
    "name": {"type": "str", "default": "default"},
    "path": {"type": "str"},
    "install": {"type": "dict"},
    "env": {"type": "dict", "default": {}},
    "all_gpus": {"type": "bool", "default": True},
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "rollbacks": {"type": "bool", "default": True},
    "replica_root": {"type": "str", "default": "/"},
}


def _set(arguments: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """Those that are set, as plain values: a survey's empty answer is none."""
    return {key: hostvars.plain(value) for key, value in arguments.items() if hostvars.text(value) is not None}


class ActionModule(ActionBase):
    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp: t.Any = None, task_vars: t.Any = None) -> dict[str, t.Any]:
        super().run(tmp, task_vars)
        self._task.args = {key: value for key, value in self._task.args.items() if hostvars.text(value) is not None}
        _result, arguments = self.validate_argument_spec(argument_spec=ARGUMENTS)
        findings = Findings()
        name = hostvars.text(arguments["engine"])
        if name is None:
            known = {built_in: engines.load(built_in, findings) for built_in in engines.BUILT_IN}
            built = [built_in for built_in, one in known.items() if one and one.needs_build]
            raise AnsibleActionFail("%s is not set: give one of %s" % (option("engine"), ", ".join(built)))
        adapter = engines.load(name, findings)
        if adapter is None:
            faults = [dataclasses.replace(fault, field=option(fault.field)) for fault in findings.faults]
            raise AnsibleActionFail(report(faults, "The build cannot be registered. Faults"))
        if not adapter.needs_build:
            raise AnsibleActionFail("engine %s needs no build: it is part of the collection" % adapter.name)
        more: dict[str, t.Any] = {
            "programs": list(adapter.programs),
            "optional_programs": list(adapter.optional_programs),
            "version_args": list(adapter.version_args),
            "without_device": adapter.without_device,
            "devices_args": list(adapter.devices_args) or None,
            "python": adapter.is_python,
        }
        arguments = _set(arguments)
        if isinstance(arguments.get("install"), dict):
            arguments["install"] = _set(arguments["install"])
        if (arguments.get("install") or {}).get("method") == "image":
            more["wrapper"] = collection_files.container_program()
        local = self._local_archive(arguments)
        call = {**arguments, "engine": adapter.name, "adapter": {**more, "needs_transfer": local is not None}}
        result = self._ask(call, task_vars)
        if result.pop("needs_archive", False) and local:
            result = self._with_archive(local, call, task_vars)
        if result.get("build") and self._task.check_mode == bool((task_vars or {}).get("ansible_check_mode")):  # else only a question beforehand
            display.display(self._seen(str((task_vars or {}).get("inventory_hostname")), result["build"]))
        return result

    def _ask(self, arguments: t.Mapping[str, t.Any], task_vars: t.Any) -> dict[str, t.Any]:
        return dict(self._execute_module(module_name="rankzero.inference.engine_build", module_args=dict(arguments), task_vars=task_vars))

    def _local_archive(self, arguments: t.Mapping[str, t.Any]) -> str | None:
        """The archive on the controller, which is there before anything is done on a host; None for one that the hosts fetch themselves."""
        install = arguments.get("install") or {}
        archive = str(install.get("archive") or "")
        if install.get("method") not in ("archive", "source", "image") or not archive or "://" in archive or arguments.get("state") == "absent":
            return None
        try:
            path = controller_files.find(archive, lambda name: self._find_needle("files", name))
        except AnsibleActionFail as error:
            raise AnsibleActionFail("%s: %s" % (option("archive"), error)) from None
        try:
            seen, wanted = models.sha256(controller_files.regular(path, option("archive"))), str(install.get("sha256") or "")
        except OSError as error:
            raise AnsibleActionFail("%s: %s cannot be read: %s" % (option("archive"), path, error.strerror or error)) from None
        if wanted and seen != wanted:
            raise AnsibleActionFail("%s: %s has sha256 %s, and %s is wanted" % (option("sha256"), path, seen, wanted))
        return path

    def _with_archive(self, local: str, arguments: t.Mapping[str, t.Any], task_vars: t.Any) -> dict[str, t.Any]:
        """Once more, with the archive in the task's own directory, which Ansible removes."""
        shell = self._connection._shell
        if shell.tmpdir is None:
            self._make_tmp_path()
        remote = shell.join_path(shell.tmpdir, "archive")
        self._transfer_file(local, remote)
        self._fixup_perms2((shell.tmpdir, remote))
        return self._ask({**arguments, "adapter": {**arguments["adapter"], "archive": remote}}, task_vars)

    @staticmethod
    def _seen(host: str, build: t.Mapping[str, t.Any]) -> str:
        """One line about what the build is, and what it sees on the host."""
        devices = build.get("devices")
        seen = (
            "is not asked for devices"
            if devices is None
            else "sees %s" % (", ".join("%s %s" % (device["name"], device["description"]) for device in devices) or "no devices on this host")
        )
        return "[%s] %s build %s: version %s, fingerprint %s, %s" % (host, build["engine"], build["name"], build["version"], build["fingerprint"], seen)
