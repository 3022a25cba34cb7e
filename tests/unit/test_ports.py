# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Taken ports, on real sockets: listening, bound only, finished connections, outgoing connections."""

from __future__ import annotations

import os
import socket

import pytest

from ansible_collections.rankzero.inference.plugins.module_utils import ports, processes

ADDRESS = "127.0.0.23"


def rows(probed: list[int], ephemeral: list[int] | None = None) -> dict[int, dict]:
    found, errors = ports.read("/proc", probed, ephemeral or [32768, 60999])
    assert errors == {}
    return {row["port"]: row for row in found}


def opened(listen: bool = False, reuse: bool = False, family: int = socket.AF_INET, address: str = ADDRESS) -> socket.socket:
    held = socket.socket(family)
    if reuse:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((address, 0))
    if listen:
        held.listen()
    return held


def test_listening_is_found_without_being_asked():
    with opened(listen=True) as held:
        row = rows([])[held.getsockname()[1]]
    assert (row["address"], row["pid"], row["listening"], row["shard"]) == (ADDRESS, os.getpid(), True, None)
    assert row["process"]


def test_a_process_without_a_name_has_none(tmp_path):
    """Any process may call itself "", with prctl(PR_SET_NAME)."""
    (tmp_path / "7").mkdir()
    (tmp_path / "7/stat").write_text("7 () S 1 7 7 0 -1 0 " + "0 " * 12 + "5000 0\n")
    row = {"port": 8000, "address": ADDRESS, "pid": 7, "listening": True}
    assert ports.describe(row, processes.ProcessTable(str(tmp_path)))["process"] is None


@pytest.mark.parametrize("reuse", [False, True])
def test_bound_and_not_listening_is_found_by_asking(reuse):
    with opened(reuse=reuse) as held:
        port = held.getsockname()[1]
        assert port not in rows([])
        assert rows([port])[port] == {"port": port, "address": None, "pid": None, "process": None, "shard": None, "listening": False}
    assert port not in rows([port]), "free once it is closed"


def test_bound_on_ipv6_only():
    try:
        held = opened(family=socket.AF_INET6, address="::1")
    except OSError:
        pytest.skip("no IPv6 loopback here")
    with held:
        assert held.getsockname()[1] in rows([held.getsockname()[1]])


def test_a_finished_connection_takes_no_port():
    """The side that closes first keeps the port in TIME_WAIT; a replica that restarts at once must not be told that its port is taken."""
    with opened(listen=True, reuse=True) as server:
        port = server.getsockname()[1]
        client = socket.create_connection((ADDRESS, port))
        accepted = server.accept()[0]
        accepted.close()
        client.recv(1)
        client.close()
    assert ports.in_time_wait(port, "/proc/net"), "the kernel does hold it"
    assert ports.try_bind(socket.AF_INET, "0.0.0.0", port, False) != 0, "and refuses it without SO_REUSEADDR"
    assert port not in rows([port])


def test_outgoing_connections_are_told_only_where_they_matter():
    with opened(listen=True) as server, opened() as client:
        client.connect(server.getsockname())
        port = client.getsockname()[1]
        everything = [1, 65535]
        assert port not in rows([], everything)
        row = rows([port], everything)[port]
        assert (row["pid"], row["listening"]) == (os.getpid(), False)
        assert port in rows([], [1, 2]), "outside of the ephemeral range it may be the very port of a plan"


def test_ports_that_may_not_be_probed_are_said(monkeypatch):
    monkeypatch.setattr(ports, "try_bind", lambda *_arguments: 13)
    found, errors = ports.read("/proc", [1], [32768, 60999])
    assert errors == {"ports_in_use.1": "port 1 cannot be probed: Permission denied"}
    assert 1 not in [row["port"] for row in found]
