# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The engine builds that are registered on a host, one JSON file each, and whether they are still what they were registered as."""

from __future__ import annotations

import os
from typing import Any

from ansible_collections.rankzero.inference.plugins.module_utils import small_files

Facts = dict[str, Any]

FIELDS = ("version", "fingerprint", "nccl", "devices", "installed_at", "python", "versions", "programs_sha256", "container")


def read(replica_root: str) -> dict[str, list[Facts]]:
    """`{engine: [build]}` from `<root>/etc/rankzero/engines.d/<engine>-<name>.json`, in natural order of file names.

    A build is `{name, path, version, fingerprint, nccl, devices, env, installed_at, paths, problems}`, and `{python: {path, version}, versions:
    {package: version}, programs_sha256: {program: hex}, container: {image, mounts}}` where its record has them. A file that is damaged, or whose
    program is gone, is listed too: `problems` says in sentences why it cannot be used, and is empty otherwise.
    """
    folder = os.path.join(replica_root, "etc", "rankzero", "engines.d")
    found: dict[str, list[Facts]] = {}
    for name in small_files.names(folder):
        if name.endswith(".json") and not name.startswith("."):
            engine, build = read_build(os.path.join(folder, name))
            found.setdefault(engine, []).append(build)
    return found


def read_build(path: str) -> tuple[str, Facts]:
    """`(engine, build)` of one file. The file's own `engine` and `name` count; a damaged file is listed under what its name says."""
    content, problem = small_files.read_json(path)
    engine, _dash, name = os.path.basename(path)[: -len(".json")].partition("-")
    record = content or {}
    build: Facts = {"name": text(record.get("name")) or name or engine, "path": text(record.get("path"))}
    build.update({field: record.get(field) for field in FIELDS})
    build["env"] = strings(record.get("env"))
    build["paths"] = record["paths"] if isinstance(record.get("paths"), dict) else {}
    build["problems"] = [problem] if problem else problems_of(build["path"], path)
    return text(record.get("engine")) or engine, build


def problems_of(program: str | None, path: str) -> list[str]:
    """Sentences about a registered program that is not there or cannot be run."""
    if program is None:
        return ["%s names no path of a program" % path]
    if not os.path.isabs(program):
        return ["%s names %s, which is no absolute path" % (path, program)]
    if not os.path.exists(program):
        return ["%s is gone: register the build again or remove %s" % (program, path)]
    if os.path.isdir(program) or not os.access(program, os.X_OK):
        return ["%s cannot be executed" % program]
    return []


def text(value: Any) -> str | None:
    return small_files.clean(value) or None if isinstance(value, str) else None


def strings(value: Any) -> dict[str, str]:
    """An environment: entries that are no text are left out."""
    return {str(key): item for key, item in value.items() if isinstance(item, str)} if isinstance(value, dict) else {}
