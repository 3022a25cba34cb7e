# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whose process is it, and whose port: what /proc says.

Entries that cannot be read (another user's, or gone in the meantime) are skipped; no function here raises for them. `proc_root` is
`/proc`, or a directory laid out like it.

A process belongs to a shard by the first of these that speaks:

1. `RANKZERO_SHARD=<replica>/<rank>/<run id>` in its own environment;
2. the same in its nearest ancestor that has it;
3. the same in the leader of its session, or, when the leader is gone, in another member of that session;
4. the unit `inference-<replica>.service` in its control group, which tells the replica but not the rank.

2 and 3 are needed because setproctitle, which vLLM uses for its engine core and workers, overwrites the memory that
/proc/PID/environ shows: the variable is still inherited but can no longer be seen from outside.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import pwd
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from ansible_collections.rankzero.inference.plugins.module_utils import small_files

MARKER = b"RANKZERO_SHARD="
_UNIT = re.compile(r"(?:^|/)inference-([^/]+)\.service(?=/|$)", re.MULTILINE)
_COMMAND_LENGTH = 120
_MOST_BYTES = 64 * 1024 * 1024  # net/tcp of a host with half a million connections
_DEPTH = 64  # no chain of parents is longer; a tree in a test may hold a loop
_KERNEL_THREAD = 0x00200000  # PF_KTHREAD of the flags (include/linux/sched.h)
_TCP_LISTEN = 0x0A
_TCP_HOLDS_NO_PORT = (0x06, 0x07)  # TIME_WAIT and CLOSE: no process has it any more


class Shard(NamedTuple):
    """The parts of a marker; rank and run_id are None when only the control group told."""

    replica: str
    rank: int | None
    run_id: str | None


class Stat(NamedTuple):
    """What /proc/PID/stat says of a live process (proc_pid_stat(5)): the kernel's name for it (at most 15 characters), and its start in clock ticks since
    boot. The name is None where it is empty. A `kernel` thread has neither memory nor files of its own; a host with 192 CPUs has thousands of them."""

    name: str | None
    parent: int
    session: int
    started: int
    kernel: bool


class ProcessTable:
    """One look at /proc: what has been read once is not read again."""

    def __init__(self, proc_root: str = "/proc") -> None:
        self.proc_root = proc_root
        self._stat: dict[int, Stat | None] = {}
        self._marker: dict[int, Shard | None] = {}
        self._shard: dict[int, Shard | None] = {}
        self._pids: list[int] | None = None

    def pids(self) -> list[int]:
        """All process ids, ascending."""
        if self._pids is None:
            self._pids = sorted(int(name) for name in _names(self.proc_root) if name.isascii() and name.isdigit())
        return self._pids

    def programs(self) -> list[int]:
        """All live processes but the kernel's own threads, ascending."""
        return [pid for pid in self.pids() if not getattr(self.stat(pid), "kernel", True)]

    def stat(self, pid: int) -> Stat | None:
        """None for a process that is gone or dead."""
        if pid not in self._stat:
            self._stat[pid] = _parse_stat(_text(self.proc_root, str(pid), "stat"))
        return self._stat[pid]

    def marker(self, pid: int) -> Shard | None:
        """What the environment of this very process says."""
        if pid not in self._marker:
            self._marker[pid] = _parse_marker(_bytes(self.proc_root, str(pid), "environ"))
        return self._marker[pid]

    def line_of(self, pid: int) -> list[int]:
        """The process itself and those above it, nearest first, without pid 1."""
        line: list[int] = []
        while pid > 1 and pid not in line and len(line) < _DEPTH:
            line.append(pid)
            pid = getattr(self.stat(pid), "parent", 0)
        return line

    def shard_of(self, pid: int) -> Shard | None:
        """The shard that a process belongs to, by the rules at the top of this file."""
        if pid not in self._shard:
            self._shard[pid] = None if self._is_kernel(pid) else self._find_shard(pid)
        return self._shard[pid]

    def _find_shard(self, pid: int) -> Shard | None:
        return self.marker(pid) or self._of_ancestors(pid) or self._of_session(pid) or self._of_unit(pid)

    def _is_kernel(self, pid: int) -> bool:
        return getattr(self.stat(pid), "kernel", False)

    def _of_ancestors(self, pid: int) -> Shard | None:
        for _step in range(_DEPTH):
            stat = self.stat(pid)
            if stat is None or stat.parent <= 1:
                return None
            pid = stat.parent
            marker = self.marker(pid)
            if marker:
                return marker
        return None

    def _of_session(self, pid: int) -> Shard | None:
        stat = self.stat(pid)
        if stat is None or stat.session <= 1:
            return None
        if self.stat(stat.session) is not None:
            return self.marker(stat.session)  # a live leader speaks for its session: a login shell's may hold anything
        members = (other for other in self.programs() if getattr(self.stat(other), "session", 0) == stat.session)
        return next((marker for marker in map(self.marker, members) if marker), None)

    def _of_unit(self, pid: int) -> Shard | None:
        groups = _text(self.proc_root, str(pid), "cgroup")
        found = _UNIT.search(groups) if "inference-" in groups else None
        return Shard(found.group(1), None, None) if found else None


def shard_of(pid: int, proc_root: str = "/proc") -> dict[str, Any] | None:
    """`{replica, rank, run_id}` of the shard that a process belongs to, or None. rank and run_id are None when only the unit is known."""
    shard = ProcessTable(proc_root).shard_of(pid)
    return dict(shard._asdict()) if shard else None


def shard_name(shard: Shard | None) -> str | None:
    """`<replica>/<rank>` as node facts write it; `<replica>/?` when the rank is not known."""
    if shard is None:
        return None
    return "{}/{}".format(shard.replica, "?" if shard.rank is None else shard.rank)


def shard_pids(replica: str, rank: int, proc_root: str = "/proc", sessions: Iterable[int] = (), table: ProcessTable | None = None) -> list[int]:
    """Every process of one shard, ascending.

    `sessions` are ids of sessions known to be the shard's: run_shard.py makes each launch the leader of a session, so the pids of the
    launches in state.json find orphans of a killed engine that overwrote their environment. A process whose marker names another
    replica or rank is never listed.
    """
    table, known = table or ProcessTable(proc_root), set(sessions)
    return [pid for pid in table.programs() if _is_member(table, pid, replica, rank, known)]


def _is_member(table: ProcessTable, pid: int, replica: str, rank: int, sessions: set[int]) -> bool:
    stat = table.stat(pid)
    if stat is None:
        return False
    shard = table.shard_of(pid)
    if shard is None or shard.rank is None:
        return stat.session in sessions or (shard is not None and shard.replica == replica)
    return shard.replica == replica and shard.rank == rank


def describe(pid: int, proc_root: str = "/proc", table: ProcessTable | None = None) -> dict[str, Any]:
    """`{pid, name, user, command, started_at}` of a process; what cannot be seen is None.

    `command` is the program and its first argument only, at most 120 characters, and without values that may be a secret: what follows
    `=`, what is glued to a short option, a password in a URL. `started_at` is in seconds since the epoch.
    """
    table = table or ProcessTable(proc_root)
    stat = table.stat(pid)
    return {
        "pid": pid,
        "name": stat.name if stat else None,
        "user": _user(_text(proc_root, str(pid), "status")),
        "command": _command(_bytes(proc_root, str(pid), "cmdline")),
        "started_at": _started_at(stat.started, _text(proc_root, "stat")) if stat else None,
    }


def listening_sockets(
    proc_root: str = "/proc", table: ProcessTable | None = None, worth: Callable[[int, bool], bool] = lambda _port, _listening: True
) -> list[dict[str, Any]]:
    """`[{port, address, pid, listening}]`: every local TCP port in use, by port and address.

    `listening` is False for a port that a connection uses (an outgoing one may hold the very port that a service wants). pid is None
    where the owner cannot be seen. Connections of a listener on the same port are not listed apart. `worth` says by port and `listening`
    which ones to list: owners are looked for among all open files of all processes, and only until all are found.
    """
    sockets = [one for one in _sockets(proc_root) if one.state not in _TCP_HOLDS_NO_PORT and worth(one.port, one.state == _TCP_LISTEN)]
    owners = _owners(proc_root, {socket.inode for socket in sockets}, table)
    listening = {(s.port, s.address, owners.get(s.inode)) for s in sockets if s.state == _TCP_LISTEN}
    served = {port for port, _address, _pid in listening}
    others = {(s.port, s.address, owners.get(s.inode)) for s in sockets if s.port not in served}
    rows = [(key, True) for key in listening] + [(key, False) for key in others]
    rows.sort(key=lambda row: (row[0][0], row[0][1], row[0][2] or 0))
    return [{"port": key[0], "address": key[1], "pid": key[2], "listening": heard} for key, heard in rows]


def established(proc_root: str, port: int, pids: Iterable[int]) -> list[dict[str, Any]]:
    """`[{address, port, remote_address, remote_port, pid}]`: open connections on a local port that belong to one of `pids`."""
    sockets = [socket for socket in _sockets(proc_root) if socket.port == port and socket.state == 0x01]
    owners = _owners(proc_root, {socket.inode for socket in sockets}, pids=sorted(set(pids)))
    rows = [
        {"address": s.address, "port": s.port, "remote_address": s.remote_address, "remote_port": s.remote_port, "pid": owners[s.inode]}
        for s in sockets
        if s.inode in owners
    ]
    return sorted(rows, key=lambda row: (row["remote_address"], row["remote_port"], row["pid"]))


class _Socket(NamedTuple):
    address: str
    port: int
    remote_address: str
    remote_port: int
    state: int
    inode: int


def _sockets(proc_root: str) -> Iterator[_Socket]:
    for name in ("tcp", "tcp6"):
        for line in _text(proc_root, "net", name).splitlines()[1:]:
            socket = _parse_socket(line.split())
            if socket:
                yield socket


def _parse_socket(words: list[str]) -> _Socket | None:
    """One line of /proc/net/tcp (kernel: Documentation/networking/proc_net_tcp.rst); None for a line that is none."""
    try:
        local, local_port = words[1].split(":")
        remote, remote_port = words[2].split(":")
        return _Socket(_address(local), int(local_port, 16), _address(remote), int(remote_port, 16), int(words[3], 16), int(words[9]))
    except (IndexError, ValueError):
        return None


@functools.lru_cache(maxsize=1024)
def _address(text: str) -> str:
    """An address that the kernel printed as 32-bit words in the byte order of the machine; IPv4 in IPv6 is shown as IPv4."""
    words = [int(text[start : start + 8], 16).to_bytes(4, sys.byteorder) for start in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(words))
    return str(getattr(address, "ipv4_mapped", None) or address)


def _owners(proc_root: str, inodes: set[int], table: ProcessTable | None = None, pids: list[int] | None = None) -> dict[int, int]:
    """The lowest pid that has each socket open. A forked child shares its parent's sockets; the parent is the one to name."""
    owners: dict[int, int] = {}
    wanted = inodes - {0}  # a socket that was closed and still has something to send has no inode, and nobody's file is it
    for pid in (table or ProcessTable(proc_root)).programs() if pids is None else pids:
        folder = os.path.join(proc_root, str(pid), "fd")
        for name in _names(folder):
            inode = _socket_inode(f"{folder}/{name}")
            if inode in wanted:
                owners.setdefault(inode, pid)
        if len(owners) == len(wanted):
            break
    return owners


def _socket_inode(path: str) -> int:
    try:
        target = os.readlink(path)
    except OSError:
        return -1
    return int(target[8:-1]) if target.startswith("socket:[") and target[8:-1].isdecimal() else -1


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _bytes(*parts: str) -> bytes:
    # None for ESRCH too: the process ended between open and read.
    return small_files.read_bytes("/".join(parts), _MOST_BYTES)[0] or b""


def _text(*parts: str) -> str:
    return _bytes(*parts).decode("utf-8", "replace")


def _clean(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text).strip()


def _parse_stat(text: str) -> Stat | None:
    """The name in parentheses may itself hold spaces and parentheses. None for a zombie: it holds nothing."""
    name, _parenthesis, rest = text.partition("(")[2].rpartition(")")
    words = rest.split()
    try:
        kernel = bool(int(words[6]) & _KERNEL_THREAD)
        return None if words[0] in ("Z", "X") else Stat(_clean(name) or None, int(words[1]), int(words[3]), int(words[19]), kernel)
    except (IndexError, ValueError):
        return None


def _parse_marker(environ: bytes) -> Shard | None:
    for entry in environ.split(b"\0") if MARKER in environ else ():
        if entry.startswith(MARKER):
            parts = entry[len(MARKER) :].decode("utf-8", "replace").split("/", 2)
            # Anybody can write what he likes here, and int() raises for 5000 digits.
            if len(parts) == 3 and parts[0] and re.fullmatch("[0-9]{1,6}", parts[1]):
                return Shard(parts[0], int(parts[1]), parts[2])
    return None


def _user(status: str) -> str | None:
    found = re.search(r"^Uid:\s+([0-9]{1,10})\b", status, re.MULTILINE)
    if not found:
        return None
    try:
        return pwd.getpwuid(int(found.group(1))).pw_name
    except (KeyError, OverflowError):  # a container's user has no name on the host
        return found.group(1)


def _started_at(ticks: int, system_stat: str) -> float | None:
    found = re.search(r"^btime ([0-9]{1,12})\b", system_stat, re.MULTILINE)
    return round(int(found.group(1)) + ticks / os.sysconf("SC_CLK_TCK"), 2) if found else None


def _command(cmdline: bytes) -> str | None:
    words = [_clean(word) for word in cmdline.decode("utf-8", "replace").rstrip("\0").split("\0")]
    if len(words) == 1:
        words = words[0].split()  # a process that has set its own title: all of it is one word
    shown = [_without_url_password(word) for word in words[:1]] + [_without_value(word) for word in words[1:2]]
    return " ".join(shown)[:_COMMAND_LENGTH] or None


def _without_value(word: str) -> str:
    if "=" in word:
        return word.partition("=")[0] + "=..."
    if re.match(r"-[A-Za-z].", word):
        return word[:2] + "..."
    return _without_url_password(word)


def _without_url_password(word: str) -> str:
    return re.sub(r"://[^/@\s]+@", "://...@", word)
