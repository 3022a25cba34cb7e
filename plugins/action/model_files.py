# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Action plugin: sends a model or an adapter from the controller when the host says that it needs it."""

from __future__ import annotations

import os
import tarfile
import tempfile
import typing as t

from ansible import constants as C
from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

from ansible_collections.rankzero.inference.plugins.module_utils import models
from ansible_collections.rankzero.inference.plugins.plugin_utils import controller_files, hostvars

MODULE = "rankzero.inference.model_files"


class ActionModule(ActionBase):
    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp: t.Any = None, task_vars: t.Any = None) -> dict[str, t.Any]:
        super().run(tmp, task_vars)
        arguments = {str(key): hostvars.plain(value) for key, value in self._task.args.items() if hostvars.text(value) is not None}
        source = str(arguments.get("source") or "")
        if arguments.get("state") == "absent" or not source or not controller_files.is_here(source):
            return dict(self._execute_module(module_name=MODULE, module_args=arguments, task_vars=task_vars))
        local, digest = self._local(source, str(arguments.get("sha256") or ""))
        arguments.update(source="controller:%s" % source, sha256=digest, transferred={"needed": True})
        result = dict(self._execute_module(module_name=MODULE, module_args=arguments, task_vars=task_vars))
        if not result.pop("needs_transfer", False):
            return result
        return self._send(local, arguments, task_vars)

    def _local(self, source: str, wanted: str) -> tuple[str, str]:
        """(path on the controller, checksum of its content)."""
        try:
            path = controller_files.find(source, lambda name: self._find_needle("files", name))
        except AnsibleActionFail as error:
            raise AnsibleActionFail("source: %s" % error) from None
        found = models.describe(path, checksum=True)
        seen = found["content_sha256"]
        if not seen:
            raise AnsibleActionFail("source: %s cannot be read%s" % (path, ": %s" % found["error"] if found["error"] else ""))
        if wanted and wanted != seen:
            raise AnsibleActionFail("sha256: %s has sha256 %s, and %s is wanted" % (path, seen, wanted))
        return path, str(seen)

    def _send(self, local: str, arguments: t.Mapping[str, t.Any], task_vars: t.Any) -> dict[str, t.Any]:
        """As one archive, in the task's own directory, which Ansible removes."""
        shell = self._connection._shell
        if shell.tmpdir is None:
            self._make_tmp_path()
        remote = shell.join_path(shell.tmpdir, "content")
        descriptor, packed = tempfile.mkstemp(dir=C.DEFAULT_LOCAL_TMP)
        os.close(descriptor)
        try:
            with tarfile.open(packed, "w", dereference=True) as archive:
                for path, name in _sent(local):
                    archive.add(path, name, recursive=False)
            self._transfer_file(packed, remote)
        finally:
            os.unlink(packed)
        self._fixup_perms2((shell.tmpdir, remote))
        return dict(self._execute_module(module_name=MODULE, module_args={**arguments, "transferred": {"archive": remote}}, task_vars=task_vars))


def _sent(local: str) -> list[tuple[str, str]]:
    """C((path, name in the archive)) of what counts as content, and nothing else: no FIFO, and no directory that links lead to, in a circle perhaps."""
    base = os.path.basename(os.path.normpath(local))
    if not os.path.isdir(local):
        return [(local, base)]
    return [(os.path.join(local, name), os.path.join(base, name)) for name in sorted(models.file_sizes(local))]
