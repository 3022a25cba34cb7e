# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which TCP ports of a host are taken, and by whom; also those that a socket is bound to without listening."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterable
from typing import Any

from ansible_collections.rankzero.inference.plugins.module_utils import processes, small_files

Facts = dict[str, Any]
MOST_BYTES = 64 * 1024 * 1024  # of a table of connections


def read(
    proc_root: str, probe_ports: Iterable[int], ephemeral: list[int] | None, table: processes.ProcessTable | None = None
) -> tuple[list[Facts], dict[str, str]]:
    """`ports_in_use` of docs/architecture.md by port, and reasons for ports that could not be probed.

    The outgoing connections of a busy host are left out: those whose port is in the ephemeral range, unless that port is asked for.
    """
    probed = sorted(set(probe_ports))
    table = table or processes.ProcessTable(proc_root)
    rows = [describe(row, table) for row in processes.listening_sockets(proc_root, table, lambda port, heard: is_worth_telling(port, heard, probed, ephemeral))]
    errors: dict[str, str] = {}
    known = {row["port"] for row in rows}
    for port in probed:
        if port in known:
            continue
        taken, problem = is_taken(port, os.path.join(proc_root, "net"))
        if problem:
            errors["ports_in_use.%d" % port] = problem
        if taken:
            rows.append({"port": port, "address": None, "pid": None, "process": None, "shard": None, "listening": False})
    return sorted(rows, key=lambda row: row["port"]), errors


def is_worth_telling(port: int, listening: bool, probed: list[int], ephemeral: list[int] | None) -> bool:
    in_range = ephemeral is not None and ephemeral[0] <= port <= ephemeral[1]
    return listening or port in probed or not in_range


def describe(row: Facts, table: processes.ProcessTable) -> Facts:
    """A socket with the name and the shard of the process that holds it."""
    pid = row["pid"]
    return {
        "port": row["port"],
        "address": row["address"],
        "pid": pid,
        "process": getattr(table.stat(pid), "name", None) if pid else None,
        "shard": processes.shard_name(table.shard_of(pid)) if pid else None,
        "listening": row["listening"],
    }


def is_taken(port: int, net: str) -> tuple[bool, str | None]:
    """Whether nobody else can bind a port on the wildcard address, and a reason when that cannot be asked.

    A socket that is bound and does not listen yet is in no table of /proc; only trying shows it. Without SO_REUSEADDR the kernel also
    refuses a port whose last connections are in TIME_WAIT, which no process holds and which servers do not mind: that is not taken.
    """
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        code = try_bind(family, address, port, False)
        if code == errno.EADDRINUSE and not (in_time_wait(port, net) and try_bind(family, address, port, True) == 0):
            return True, None
        if code in (errno.EACCES, errno.EPERM):
            return False, "port %d cannot be probed: %s" % (port, os.strerror(code))
    return False, None


def try_bind(family: int, address: str, port: int, reuse: bool) -> int:
    """0, or the error number. Nothing is sent, and nothing listens."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            if family == socket.AF_INET6:
                # Both families at once would find the IPv4 socket's conflict twice.
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            if reuse:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port))
        return 0
    except OSError as error:
        return error.errno or errno.EIO


def in_time_wait(port: int, net: str) -> bool:
    """Whether a finished connection still has the local port (state 06 in /proc/net/tcp)."""
    wanted = "%04X" % port
    for name in ("tcp", "tcp6"):
        content = small_files.read_bytes(os.path.join(net, name), MOST_BYTES)[0] or b""
        for words in map(str.split, content.decode("ascii", "replace").splitlines()):
            if len(words) > 3 and words[3] == "06" and words[1].endswith(":" + wanted):
                return True
    return False
