# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Hosts that cannot be reached any more when a task begins: BREAK_AT is C(TASK on HOST); connections/breaking.py looks into BROKEN_HOSTS."""

from __future__ import annotations

import os
import pathlib
import typing as t

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
    name: break_at
    type: aggregate
    short_description: Break a connection at a given task
    description: For tests only.
"""


class CallbackModule(CallbackBase):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "break_at"

    def v2_playbook_on_task_start(self, task: t.Any, is_conditional: bool) -> None:
        name, host = os.environ["BREAK_AT"].rsplit(" on ", 1)
        if task.get_name().replace("rankzero.inference.replica : ", "") == name:
            (pathlib.Path(os.environ["BROKEN_HOSTS"]) / host).touch()
