# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The last lines of a shard's log, from journald or from its file, without secrets and control characters."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from ansible_collections.rankzero.inference.plugins.module_utils import log_signatures, masking
from ansible_collections.rankzero.inference.plugins.module_utils.shard_places import Places

RunCommand = Callable[..., "tuple[int, str, str]"]
KEPT_LINES = 200
READ_BYTES = 4 * 1024 * 1024


def read(where: Places, run_command: RunCommand, lines: int, secrets: Sequence[str] | None = None) -> list[str]:
    """At most `lines` cleaned lines, oldest first; [] where there is no log. `secrets` default to all that any revision on the host has."""
    hidden = masking.of_replica(where.config) if secrets is None else secrets
    text = _journal(where, run_command, lines) if _has_unit(where) else _file(where.log)
    return log_signatures.clean_lines(text, hidden)[-lines:]


def command(where: Places) -> str:
    """What a person types on the host to see it."""
    return "journalctl -u %s -n %d" % (where.unit, KEPT_LINES) if _has_unit(where) else "tail -n %d %s" % (KEPT_LINES, where.log)


def _has_unit(where: Places) -> bool:
    """The log of a systemd unit is the journal's, but another root's shard may have the unit of that name."""
    return os.path.lexists(where.unit_file) and not os.path.exists(where.log)


def _journal(where: Places, run_command: RunCommand, lines: int) -> str:
    try:
        _code, text, _errors = run_command(
            ["journalctl", "-u", where.unit, "-n", str(lines), "-o", "cat", "--no-pager"], environ_update={"LC_ALL": "C"}, handle_exceptions=False
        )
    except (OSError, ValueError):
        return ""
    return text


def _file(path: str) -> str:
    """The end of a file; a line that begins before what is read is left out, as a secret in it might be cut and so not be found."""
    try:
        with open(path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size <= READ_BYTES:
                return stream.read().decode("utf-8", "replace")
            stream.seek(size - READ_BYTES)
            return stream.read().partition(b"\n")[2].decode("utf-8", "replace")
    except OSError:
        return ""
