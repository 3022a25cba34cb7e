# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read small files, and say in one sentence why when that is not possible.

A file may be missing, may refuse the read (EINVAL of an empty GID slot), or may hold bytes that are no text. None of that is an exception
here: every reader returns a value or None, and a reason.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

MAX_BYTES = 64 * 1024


def clean(text: str) -> str:
    """`text` in one line, without control characters, so that hardware cannot write to somebody's terminal."""
    text = text.strip()
    return text if text.isprintable() else "".join(character if character.isprintable() else " " for character in text).strip()


def read_bytes(path: str, limit: int = MAX_BYTES) -> tuple[bytes | None, str | None]:
    """The first `limit` bytes of a file, or None and the reason. A FIFO never blocks the reader."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        return None, reason(path, error)
    try:
        chunks = []
        while limit > 0:
            chunk = os.read(descriptor, min(limit, MAX_BYTES))
            if not chunk:
                break
            chunks.append(chunk)
            limit -= len(chunk)
        return b"".join(chunks), None
    except OSError as error:
        return None, reason(path, error)
    finally:
        os.close(descriptor)


def read_text(path: str) -> tuple[str | None, str | None]:
    """The text of a one-value attribute, cleaned, or None and the reason. An empty file is the empty text."""
    content, problem = read_bytes(path)
    if content is None:
        return None, problem
    return clean(content.decode("utf-8", "replace")), None


def read_int(path: str) -> tuple[int | None, str | None]:
    """A decimal or 0x number, or None and the reason."""
    text, problem = read_text(path)
    if text is None:
        return None, problem
    if not re.match(r"^[+-]?(0[xX][0-9a-fA-F]{1,16}|[0-9]{1,20})$", text):
        return None, "%s holds %r, which is no number" % (path, text[:40])
    return int(text, 16 if "x" in text.lower() else 10), None


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sort key that puts mlx5_2 before mlx5_10."""
    # isdecimal is true for other scripts' digits too: those stay text.
    parts = re.split(r"([0-9]+)", name)
    return [(0, int(part), "") if index % 2 else (1, 0, part) for index, part in enumerate(parts)]


def names(path: str) -> list[str]:
    """The entries of a directory in natural order; none when it cannot be listed."""
    try:
        return sorted((name for name in os.listdir(path) if name.isprintable()), key=natural_key)
    except OSError:
        return []


def read_json(path: str, limit: int = 1024 * 1024) -> tuple[dict[str, Any] | None, str | None]:
    """A JSON mapping of at most `limit` bytes, or None and the reason."""
    content, problem = read_bytes(path, limit + 1)
    if content is None:
        return None, problem
    if len(content) > limit:
        return None, "%s is larger than %d bytes" % (path, limit)
    try:
        value = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        return None, "%s is no JSON: %s" % (path, clean(str(error)))
    return (value, None) if isinstance(value, dict) else (None, "%s holds no JSON mapping" % path)


def reason(path: str, error: Exception) -> str:
    """One sentence for an operating system error."""
    text = getattr(error, "strerror", None) or str(error)
    return "%s cannot be read: %s" % (path, text)
