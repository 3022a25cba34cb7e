# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Action plugin: what every shard of a plan would see, as shell text."""

from __future__ import annotations

import typing as t

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.rankzero.inference.plugins.plugin_utils import environment_text, hostvars

display = Display()


class ActionModule(ActionBase):
    TRANSFERS_FILES = False
    BYPASS_HOST_LOOP = True
    _supports_check_mode = True

    def run(self, tmp: t.Any = None, task_vars: t.Any = None) -> dict[str, t.Any]:
        super().run(tmp, task_vars)
        _result, arguments = self.validate_argument_spec(argument_spec={"plan": {"type": "dict", "required": True}})
        text = environment_text.text(hostvars.plain(arguments["plan"]))
        display.display(text)
        return {"changed": False, "text": text}
