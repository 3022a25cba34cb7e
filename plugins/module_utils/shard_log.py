# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The last lines of a shard's log, from journald or from its file, without secrets and control characters."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence

from ansible_collections.rankzero.inference.plugins.module_utils import log_signatures, masking
from ansible_collections.rankzero.inference.plugins.module_utils.shard_places import Places

RunCommand = Callable[..., "tuple[int, str, str]"]
KEPT_LINES = 200
READ_BYTES = 4 * 1024 * 1024
_RUN_START = re.compile(r"run_shard: \S+ rank \d+ of \d+, fingerprint \S+, run (\S+)")
_RUN_END = re.compile(r"^run_shard: (stopping|failed|stopped): ")


def read(where: Places, run_command: RunCommand, lines: int, secrets: Sequence[str] | None = None) -> list[str]:
    """At most `lines` cleaned lines, oldest first; [] where there is no log. `secrets` default to all that any revision on the host has."""
    hidden = masking.of_replica(where.config) if secrets is None else secrets
    text = _journal(where, run_command, lines) if _has_unit(where) else _file(where.log)
    return log_signatures.clean_lines(text, hidden)[-lines:]


def command(where: Places) -> str:
    """What a person types on the host to see it."""
    return "journalctl -u %s -n %d" % (where.unit, KEPT_LINES) if _has_unit(where) else "tail -n %d %s" % (KEPT_LINES, where.log)


def last_runs(lines: list[str], runs: int) -> list[str]:
    """The lines of the last `runs` runs that begin in them; all where none does."""
    starts = [number for number, line in enumerate(lines) if _RUN_START.search(line)]
    return lines[starts[-min(runs, len(starts))] :] if starts else lines


def is_complete(lines: Sequence[str], run_id: str | None, ended: bool) -> bool:
    """Whether lines have come this far: the beginning of the run, and its end where it has one.

    journald and supervisord read what is written from a pipe, and on a busy host that takes them a while. run_shard.py writes both lines before it says the
    same in state.json, to where its launches write: behind the second there is no word of theirs to come.
    """
    starts = [number for number, line in enumerate(lines) for found in [_RUN_START.search(line)] if found and found.group(1) == run_id]
    return bool(starts) and (not ended or any(_RUN_END.match(line) for line in lines[starts[-1] :]))


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
