# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The API key: what it may look like, and a digest that stands for it in fingerprints.

The digest goes into facts and file names (inside the fingerprint), so it must not help anybody who has them to find a weak key: it is made
with scrypt, salted with the replica's name.
"""

from __future__ import annotations

import hashlib
import json
import typing as t

from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Findings


def digest(key: str, replica: str) -> str:
    """64 hex digits that are equal exactly when key and replica are. About 50 ms."""
    return hashlib.scrypt(key.encode(), salt=("rankzero.inference/" + replica).encode(), n=2**14, r=8, p=1, dklen=32).hex()


def check(key: t.Any, findings: Findings) -> str | None:
    """The key, or None where there is none or it cannot be one. What is wrong is said without showing it."""
    if key is None or key == "":
        return None
    if not isinstance(key, str):
        findings.fault("replica_api_key", "a value that is no text", "text", "Quote it.")
        return None
    if not all("!" <= character <= "~" for character in key):
        findings.fault(
            "replica_api_key", "(secret) with spaces, control or non-ASCII characters", "printable ASCII without spaces", "It travels in an HTTP header."
        )
        return None
    if "," in key or key.startswith(("#", "-")):
        findings.fault(
            "replica_api_key",
            "(secret) with a comma, or beginning with # or -",
            "a key without them",
            "llama.cpp splits and comments there; SGLang would take it for an option.",
        )
        return None
    return str(key)


def files(key: str, templates: t.Mapping[str, str]) -> dict[str, str]:
    """All secrets of a shard by file name: the key itself, and the files that hold it between other text, as a JSON string (which YAML reads alike)."""
    return {"api_key": key, **{name: text.replace("{api_key}", json.dumps(key)) for name, text in templates.items()}}
