# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is mounted below a directory, and must never be removed with it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ansible_collections.rankzero.inference.plugins.module_utils import small_files


def below(paths: Sequence[str], proc_root: str = "/proc") -> list[str]:
    """Mount points at or below the given directories: what is mounted there (models, most likely) is not ours, however it came there."""
    content, _problem = small_files.read_bytes(os.path.join(proc_root, "self/mountinfo"), 16 * 1024 * 1024)
    found = []
    for line in (content or b"").decode("utf-8", "surrogateescape").splitlines():
        words = line.split(" ")
        place = _unescaped(words[4]) if len(words) > 4 else ""
        found += [place for path in paths if place == path or place.startswith(path + "/")]
    return sorted(set(found))


def _unescaped(text: str) -> str:
    r"""A path of mountinfo, where space, tab, newline and backslash are written \040, \011, \012 and \134 (proc_pid_mountinfo(5))."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text
