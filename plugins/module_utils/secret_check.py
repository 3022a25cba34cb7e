# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether the secret files of a revision are still what a deploy wrote, without telling anything of what is in them.

The controller must not see even a hash of a secret, since that tells whether a guess is right. So the host keeps one beside the secrets, as
private as they are and salted, compares by itself, and tells only which files differ.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import stat
from collections.abc import Callable, Mapping

from ansible_collections.rankzero.inference.plugins.module_utils import small_files

NAME = ".check"
"""Below C(secrets/), mode 0600: C({salt: hex, digests: {file name: hex}})."""
MOST_BYTES = 1024 * 1024


def content(secrets: Mapping[str, str]) -> str:
    salt = os.urandom(32)
    return json.dumps({"salt": salt.hex(), "digests": {name: _digest(salt, text.encode("utf-8")) for name, text in sorted(secrets.items())}})


def problems(directory: str) -> list[str]:
    """Sentences about `<revision>/secrets`; empty when all is as it was written, or when the revision has no secrets."""
    if not os.path.lexists(directory):
        return []
    found = _of_mode(directory, "secrets", stat.S_ISDIR, 0o700, os.path.dirname(directory))
    check, problem = small_files.read_json(os.path.join(directory, NAME))
    digests = check.get("digests") if check else None
    if check is None or not isinstance(digests, dict) or not isinstance(check.get("salt"), str):
        return [*found, "what secrets/ held cannot be told: %s" % (problem or "%s is damaged" % NAME)]
    there = set(small_files.names(directory)) - {NAME}
    found += ["secrets/%s is none of the deploy's" % name for name in sorted(there - set(digests))]
    for name in sorted(digests):
        found += _of_file(directory, name, str(check["salt"]), str(digests[name])) if name in there else ["secrets/%s is gone" % name]
    return found + _of_mode(os.path.join(directory, NAME), "secrets/%s" % NAME, stat.S_ISREG, 0o600, directory)


def _of_file(directory: str, name: str, salt: str, digest: str) -> list[str]:
    path, shown = os.path.join(directory, name), "secrets/%s" % name
    found = _of_mode(path, shown, stat.S_ISREG, 0o600, directory)
    text, problem = small_files.read_bytes(path, MOST_BYTES)
    if text is None:
        return [*found, str(problem)]
    try:
        same = hmac.compare_digest(_digest(bytes.fromhex(salt), text), digest)
    except (ValueError, TypeError):
        same = False
    return found if same else [*found, "%s is not what the deploy wrote" % shown]


def _of_mode(path: str, shown: str, is_kind: Callable[[int], bool], mode: int, beside: str) -> list[str]:
    """`beside`: a directory that has the same owner."""
    try:
        status, owner = os.lstat(path), os.stat(beside).st_uid
    except OSError as error:
        return [small_files.reason(path, error)]
    found = []
    if not is_kind(status.st_mode):
        found.append("%s is of another kind" % shown)
    elif stat.S_IMODE(status.st_mode) != mode:
        found.append("%s has mode %04o, not %04o" % (shown, stat.S_IMODE(status.st_mode), mode))
    if status.st_uid != owner:
        found.append("%s belongs to uid %d, not %d" % (shown, status.st_uid, owner))
    return found


def _digest(salt: bytes, text: bytes) -> str:
    return hmac.new(salt, text, hashlib.sha256).hexdigest()
