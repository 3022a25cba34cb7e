# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The host's own facts: the choice of the service manager, and odd or damaged files."""

from __future__ import annotations

import os
import pathlib
import sys

import hardware_trees
import pytest

from ansible_collections.rankzero.inference.plugins.module_utils import host


@pytest.mark.parametrize(
    ("booted", "first", "root", "supervisord", "manager", "word"),
    [
        (True, "systemd", True, None, "systemd", None),
        (True, "systemd", True, "/usr/bin/supervisord", "systemd", None),
        (True, "systemd", False, "/usr/bin/supervisord", "supervisor", None),  # only root can install a unit
        (True, "systemd", False, None, None, "become root"),
        (True, "tini", True, None, None, "process 1 is tini"),  # the host's /run in a container
        (False, "systemd", True, None, None, "no supervisord"),
        (False, "bash", False, "/venv/bin/supervisord", "supervisor", None),
        (False, None, True, None, None, "not visible"),
    ],
)
def test_service_manager(booted, first, root, supervisord, manager, word):
    found, reason = host.service_manager(booted, first, root, supervisord)
    assert found == manager
    assert (reason is None) if word is None else word in reason


def test_supervisord_beside_the_python_comes_first(tmp_path, monkeypatch):
    beside, on_path = tmp_path / "venv", tmp_path / "path"
    for folder in (beside, on_path):
        folder.mkdir()
        (folder / "supervisord").write_text("#!/bin/sh\n", encoding="utf-8")
        (folder / "supervisord").chmod(0o755)
    monkeypatch.setenv("PATH", str(on_path))
    assert host.find_supervisord(str(beside / "python3")) == str(beside / "supervisord")
    (beside / "supervisord").chmod(0o644)
    assert host.find_supervisord(str(beside / "python3")) == str(on_path / "supervisord")
    (beside / "supervisord").unlink()
    assert host.find_supervisord(str(beside / "python3")) == str(on_path / "supervisord")
    (on_path / "supervisord").unlink()
    assert host.find_supervisord(str(beside / "python3")) is None


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b'NAME="Ubuntu"\nVERSION_ID="24.04"\nID=ubuntu\nID_LIKE=debian\n', {"id": "ubuntu", "version": "24.04"}),
        (b"ID='arch'\n", {"id": "arch", "version": None}),
        (b"", {"id": None, "version": None}),
        (b"\xff\xfeID=x\n\x00", {"id": None, "version": None}),
    ],
)
def test_operating_system(content, found):
    assert host.operating_system(content) == found


def test_container_by_the_environment_of_process_1(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "CONTAINER_MARKS", (str(tmp_path / "mark"),))
    assert host.in_container(str(tmp_path)) is False
    hardware_trees.write(tmp_path / "1/environ", "PATH=/bin\0container=podman\0")
    assert host.in_container(str(tmp_path)) is True
    (tmp_path / "1/environ").unlink()
    (tmp_path / "mark").touch()
    assert host.in_container(str(tmp_path)) is True


def test_this_machine():
    found = host.read("/proc")
    assert found["memory_mib"] > found["memory_available_mib"] > 0
    assert found["boot_id"] == pathlib.Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    assert found["python"]["executable"] == sys.executable
    assert found["privileged"] is (os.geteuid() == 0)
    assert bool(found["errors"].get("service_manager")) is (found["service_manager"] is None)
