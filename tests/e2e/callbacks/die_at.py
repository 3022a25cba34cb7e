# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ansible that dies at a given step: before a task begins on a host, or when a host's result is in, it kills its workers and itself (SIGKILL).

DIE_AT: the number of the step, from 1, or its words. DIE_AT_LOG: a file that gets a line for each step that was reached.
"""

from __future__ import annotations

import os
import pathlib
import signal
import typing as t

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
    name: die_at
    type: aggregate
    short_description: Die at a given step
    description: For tests only.
"""


class CallbackModule(CallbackBase):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "die_at"

    def __init__(self) -> None:
        super().__init__()
        self._reached = 0

    def _step(self, what: str) -> None:
        self._reached += 1
        what = what.replace("rankzero.inference.replica : ", "")
        with open(os.environ["DIE_AT_LOG"], "a", encoding="utf-8") as log:
            log.write("%d %s\n" % (self._reached, what))
        if os.environ["DIE_AT"] in (str(self._reached), what):
            own = pathlib.Path("/proc/self/cmdline").read_bytes()
            for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    if path.read_bytes() == own and int(path.parent.name) != os.getpid():
                        os.kill(int(path.parent.name), signal.SIGKILL)
                except OSError:
                    continue
            os.kill(os.getpid(), signal.SIGKILL)

    def v2_runner_on_start(self, host: t.Any, task: t.Any) -> None:
        self._step("start: %s on %s" % (task.get_name(), host.get_name()))

    def v2_runner_on_ok(self, result: t.Any) -> None:
        self._step("ok: %s on %s" % (result.task.get_name(), result.host.get_name()))

    def v2_runner_on_failed(self, result: t.Any, ignore_errors: bool = False) -> None:
        self._step("failed: %s on %s" % (result.task.get_name(), result.host.get_name()))
