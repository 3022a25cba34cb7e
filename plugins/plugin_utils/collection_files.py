# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Files of this collection that action plugins need: templates and programs of the roles. The one place in plugin_utils that reads files."""

from __future__ import annotations

import pathlib
import re

ROLE = pathlib.Path(__file__).resolve().parent.parent.parent / "roles" / "replica"
SUPERVISOR_PROGRAM = "run_shard.py"
TEMPLATES = ("shard.env.j2", "inference.service.j2", "supervisord.conf.j2")


def program(name: str) -> str:
    """The text of a program in roles/replica/files. Raises OSError where the collection is damaged."""
    return (ROLE / "files" / name).read_text(encoding="utf-8")


def container_program() -> str:
    """What stands in the place of an engine's program where the build is an image."""
    return (ROLE.parent / "engine" / "files" / "run_in_container.py").read_text(encoding="utf-8")


def template(name: str) -> str:
    return (ROLE / "templates" / name).read_text(encoding="utf-8")


def role_variables() -> frozenset[str]:
    """The variables that an operator may set: those of the role's argument specs, and those of the playbooks alone."""
    specs = (ROLE / "meta" / "argument_specs.yml").read_text(encoding="utf-8")
    playbook = (ROLE.parent.parent / "playbooks" / "deploy_replica.yml").read_text(encoding="utf-8")
    return frozenset(re.findall(r"^ +(replica_[a-z_]+):", specs, re.MULTILINE)) | frozenset(re.findall(r"\breplica_[a-z_]+", playbook))
