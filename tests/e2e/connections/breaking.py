# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The connection C(local), until a file of the host's name is in the directory BROKEN_HOSTS: then the host cannot be reached."""

from __future__ import annotations

import os
import typing as t

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.connection.local import Connection as Local

DOCUMENTATION = """
    name: breaking
    short_description: Hosts that stop answering
    description: For tests only.
    extends_documentation_fragment: [connection_pipelining]
    options:
      host:
        description: The host's name.
        vars: [{name: inventory_hostname}]
"""


class Connection(Local):
    transport = "breaking"

    def exec_command(self, *arguments: t.Any, **named: t.Any) -> t.Any:
        if os.path.exists(os.path.join(os.environ["BROKEN_HOSTS"], str(self.get_option("host")))):
            raise AnsibleConnectionFailure("the cable was pulled")
        return super().exec_command(*arguments, **named)
