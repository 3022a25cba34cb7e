# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Find the secrets in what is to be shown or sent away, in every spelling that programs give them.

Engines print their arguments and environment when they start: a key stands there as Python, JSON or a shell quotes it. Values that an
operator gave under a telling name (`HF_TOKEN`, `--hf-token`) are secrets as well, though no secret of ours.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

from ansible_collections.rankzero.inference.plugins.module_utils import secret_check, small_files
from ansible_collections.rankzero.inference.plugins.module_utils.log_signatures import MASK, SHORTEST_SECRET, mask

SHORTEST_BASE64 = 8
"""A shorter one could be a part of any word."""

_TELLING = re.compile(r"(?:^|[_-])(?:tokens?|secrets?|passw(?:or)?d|passphrase|credentials?|api[_-]?keys?|access[_-]?key|private[_-]?key)$", re.IGNORECASE)
_NOT_SECRET = re.compile(r"max|num|min|limit|len|size|file|path", re.IGNORECASE)


def of_replica(directory: str) -> list[str]:
    """Every secret of every revision below `<root>/etc/rankzero/<replica>`, in all spellings. One that cannot be read is left out."""
    found: set[str] = set()
    revisions = os.path.join(directory, "revisions")
    for name in small_files.names(revisions):
        folder = os.path.join(revisions, name, "secrets")
        for secret in set(small_files.names(folder)) - {secret_check.NAME}:
            content, _problem = small_files.read_bytes(os.path.join(folder, secret))
            found.update(spellings((content or b"").decode("utf-8", "replace").strip()))
    return sorted(found, key=len, reverse=True)


def spellings(secret: str) -> set[str]:
    """A secret as it is, and as Python, JSON (once and twice), a shell, a URL, base64 and hexadecimals write it; its lines, where it has several."""
    found = {secret, *(line.strip() for line in secret.splitlines() if len(line) >= 8)}
    for text in [text for text in found if len(text) >= SHORTEST_SECRET]:
        found |= {
            *_base64(text.encode("utf-8", "surrogateescape")),
            text.encode("utf-8", "surrogateescape").hex(),
            json.dumps(text)[1:-1],
            json.dumps(json.dumps(text)[1:-1])[1:-1],
            repr(text)[1:-1],
            shlex.quote(text),
            text.replace("'", "'\\''"),
            text.replace("'", "\\'"),
            quote(text, safe=""),
            quote(text),
        }
    return {text for text in found if len(text) >= SHORTEST_SECRET}


def _base64(secret: bytes) -> set[str]:
    """What stands for the secret wherever it begins within a longer text: three ways, without the characters that its neighbours decide too."""
    found = set()
    for before in range(3):
        whole = base64.b64encode(b"\0" * before + secret).decode("ascii")
        part = whole[(before * 8 + 5) // 6 : (before + len(secret)) * 8 // 6]
        if len(part) >= SHORTEST_BASE64:
            found |= {part, part.replace("+", "-").replace("/", "_")}
    return found


def is_telling(name: str) -> bool:
    """Whether a variable's or option's name says that its value is a secret: HF_TOKEN, --api-key; not --max-tokens or --ssl-key-file."""
    return bool(_TELLING.search(name)) and not _NOT_SECRET.search(name)


def given_by_name(value: Any) -> set[str]:
    """Values in a launch document or plan that stand under a telling name, in `env` mappings and in `args` lists, at any depth."""
    found: set[str] = set()
    if isinstance(value, Mapping):
        for key, item in value.items():
            if key == "env" and isinstance(item, Mapping):
                found.update(str(text) for name, text in item.items() if is_telling(str(name)))
            elif key == "args" and isinstance(item, list):
                found.update(_of_arguments([str(word) for word in item]))
            found |= given_by_name(item)
    elif isinstance(value, list):
        for item in value:
            found |= given_by_name(item)
    return {text for text in found if len(text) >= SHORTEST_SECRET}


def _of_arguments(words: list[str]) -> list[str]:
    found = []
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if not word.startswith("-") or not is_telling(name):
            continue
        following = words[index + 1] if index + 1 < len(words) else ""
        found.append(value if equals else "" if following.startswith("-") else following)
    return found


def all_spellings(secrets: Iterable[str]) -> list[str]:
    return sorted({text for secret in secrets for text in spellings(secret)}, key=len, reverse=True)


def masked(value: Any, secrets: Iterable[str] = ()) -> Any:
    """`value` as plain containers without the given secrets and those given by name."""
    return mask(value, [*secrets, *all_spellings(given_by_name(value))])


__all__ = ["MASK", "all_spellings", "given_by_name", "is_telling", "masked", "of_replica", "spellings"]
