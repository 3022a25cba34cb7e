# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whose process, whose port: real processes and real sockets, and /proc trees for what one machine cannot show."""

from __future__ import annotations

import contextlib
import os
import pathlib
import pwd
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator

import pytest
import recorded_hosts

from ansible_collections.rankzero.inference.plugins.module_utils import processes

REPLICA = f"replica{os.getpid()}"

# What setproctitle does to the memory behind /proc/PID/environ: the variables stay inherited and are no longer seen.
ERASE = """
    import ctypes
    def erase():
        words = open("/proc/self/stat").read().rpartition(")")[2].split()
        start, end = int(words[47]), int(words[48])
        ctypes.memset(start, 0, end - start)
"""


@contextlib.contextmanager
def child(code: str, *arguments: str, marker: str | None = None, session: bool = True) -> Iterator[subprocess.Popen[str]]:
    """A real process that prints a line when it is ready; its whole session ends with the block."""
    env = {name: value for name, value in os.environ.items() if name != "RANKZERO_SHARD"}
    if marker:
        env["RANKZERO_SHARD"] = marker
    command = [sys.executable, "-c", textwrap.dedent(ERASE) + textwrap.dedent(code), *arguments]
    started = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, start_new_session=session)
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL) if session else started.kill()
        started.wait()
        if started.stdout:
            started.stdout.close()


def ready(started: subprocess.Popen[str]) -> list[int]:
    assert started.stdout
    return [int(word) for word in started.stdout.readline().split()]


def sleeping(code: str) -> str:
    return f"import os, subprocess, sys, time\n{textwrap.dedent(code)}\nprint(*pids, flush=True)\ntime.sleep(60)\n"


def entry(
    root: pathlib.Path,
    pid: int,
    *,
    ppid: int = 1,
    session: int | None = None,
    environ: str | None = None,
    cgroup: str = "0::/",
    comm: str = "python",
    flags: int = 0,
) -> None:
    """One process in a made-up /proc."""
    folder = root / str(pid)
    folder.mkdir(parents=True)
    numbers = " ".join("0" for dummy in range(12))
    (folder / "stat").write_text(f"{pid} ({comm}) S {ppid} {pid} {pid if session is None else session} 0 -1 {flags} {numbers} 5000 0\n", encoding="utf-8")
    (folder / "comm").write_text(comm + "\n", encoding="utf-8")
    (folder / "cgroup").write_text(cgroup + "\n", encoding="ascii")
    if environ is not None:
        (folder / "environ").write_bytes(b"PATH=/bin\0RANKZERO_SHARD=" + environ.encode() + b"\0HOME=/\0")


class TestRealProcesses:
    def test_marker_in_the_environment(self) -> None:
        with child(sleeping("pids = [os.getpid()]"), marker=f"{REPLICA}/1/run-7/x") as started:
            (pid,) = ready(started)
            assert processes.shard_of(pid) == {"replica": REPLICA, "rank": 1, "run_id": "run-7/x"}
            assert processes.shard_pids(REPLICA, 1) == [pid]
            assert processes.shard_pids(REPLICA, 0) == []
            assert processes.shard_pids(REPLICA[:-1], 1) == []
        assert processes.shard_pids(REPLICA, 1) == []

    def test_a_worker_that_erased_its_environment_belongs_to_the_shard_of_its_parents(self) -> None:
        worker = 'import time; erase(); print("x", flush=True); time.sleep(60)'
        code = f"""
            source = {textwrap.dedent(ERASE)!r} + {worker!r}
            start = lambda **more: subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, **more)
            workers = [start(), start(start_new_session=True)]
            for w in workers: w.stdout.readline()
            pids = [os.getpid()] + [w.pid for w in workers]
        """
        with child(sleeping(code), marker=f"{REPLICA}/0/r") as started:
            pids = ready(started)
            try:
                for pid in pids[1:]:
                    assert b"RANKZERO_SHARD" not in pathlib.Path(f"/proc/{pid}/environ").read_bytes()
                    assert processes.shard_of(pid) == {"replica": REPLICA, "rank": 0, "run_id": "r"}
                assert processes.shard_pids(REPLICA, 0) == sorted(pids)
            finally:
                os.kill(pids[2], signal.SIGKILL)

    def test_orphans_are_found_by_the_session_their_engine_led(self) -> None:
        """vllm#55510: the API server is killed, its workers keep the GPUs; these overwrote their environment."""
        worker = 'import time; erase(); print("x", flush=True); time.sleep(60)'
        code = f"""
            source = {textwrap.dedent(ERASE)!r} + {worker!r}
            worker = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE)
            worker.stdout.readline()
            pids = [os.getpid(), worker.pid]
        """
        with child(sleeping(code), marker=f"{REPLICA}/0/r") as started:
            engine, worker_pid = ready(started)
            started.kill()
            started.wait()
            try:
                assert processes.shard_pids(REPLICA, 0) == []
                assert processes.shard_pids(REPLICA, 0, sessions=[engine]) == [worker_pid]
            finally:
                os.kill(worker_pid, signal.SIGKILL)

    def test_describe_never_shows_a_secret(self) -> None:
        before = time.time()
        with child(sleeping("pids = [os.getpid()]"), "--api-key", "sk-secret") as started:
            (pid,) = ready(started)
            seen = processes.describe(pid)
            assert seen["command"] == f"{sys.executable} -c"[:120]
            assert (seen["pid"], seen["user"]) == (pid, pwd.getpwuid(os.getuid()).pw_name)
            assert seen["name"].startswith("python")
            assert before - 2 < seen["started_at"] < time.time() + 2

    def test_a_process_that_is_gone(self) -> None:
        gone = subprocess.Popen(["true"])
        gone.wait()
        assert processes.describe(gone.pid) == {"pid": gone.pid, "name": None, "user": None, "command": None, "started_at": None}
        assert processes.shard_of(gone.pid) is None

    def test_a_zombie_is_no_member(self) -> None:
        with child("import sys; sys.exit(0)", marker=f"{REPLICA}/3/r") as started:
            while " Z " not in pathlib.Path(f"/proc/{started.pid}/stat").read_text(encoding="ascii"):
                time.sleep(0.005)
            assert processes.shard_pids(REPLICA, 3) == []


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["/usr/bin/vllm", "serve", "/models/glm", "--api-key", "sk-1"], "/usr/bin/vllm serve"),
        (["prog", "--api-key=sk-1"], "prog --api-key=..."),
        (["env", "TOKEN=abc", "prog"], "env TOKEN=..."),
        (["mysql", "-psecret"], "mysql -p..."),
        (["python", "-m", "x"], "python -m"),
        (["curl", "https://me:pw@host/x"], "curl https://...@host/x"),
        (["VLLM::Worker_TP0"], "VLLM::Worker_TP0"),
        (["server --port 1 --api-key sk-1"], "server --port"),
        (["bad\nname", "a\x1b[31mb"], "bad name a [31mb"),
        (["x" * 300, "y"], "x" * 120),
        (["prog", ""], "prog"),
        ([], None),
    ],
)
def test_command(tmp_path: pathlib.Path, argv: list[str], shown: str | None) -> None:
    entry(tmp_path, 7)
    (tmp_path / "7" / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in argv))
    command = processes.describe(7, str(tmp_path))["command"]
    assert command == shown or command == (shown or "").strip() + " "


class TestTrees:
    def test_control_group_tells_the_replica_only(self, tmp_path: pathlib.Path) -> None:
        entry(tmp_path, 10, cgroup="0::/system.slice/inference-glm-2.service")
        entry(tmp_path, 11, cgroup="12:devices:/system.slice/inference-glm-2.service/sub\n0::/")
        entry(tmp_path, 12, cgroup="0::/system.slice/inference-glm-2.service.d/x")
        entry(tmp_path, 13, cgroup="0::/system.slice/other-inference-glm-2.service")
        assert processes.shard_of(10, str(tmp_path)) == {"replica": "glm-2", "rank": None, "run_id": None}
        assert processes.shard_pids("glm-2", 5, str(tmp_path)) == [10, 11]
        assert processes.shard_of(12, str(tmp_path)) is None and processes.shard_of(13, str(tmp_path)) is None

    def test_the_marker_wins_over_the_control_group(self, tmp_path: pathlib.Path) -> None:
        entry(tmp_path, 10, environ="glm/1/r", cgroup="0::/system.slice/inference-glm.service")
        assert processes.shard_pids("glm", 0, str(tmp_path)) == []
        assert processes.shard_pids("glm", 1, str(tmp_path)) == [10]

    def test_the_nearest_marked_ancestor_wins(self, tmp_path: pathlib.Path) -> None:
        entry(tmp_path, 10, environ="outer/0/r")
        entry(tmp_path, 11, ppid=10, session=10, environ="inner/2/r")
        entry(tmp_path, 12, ppid=11, session=10, environ=None, comm="a) S (b")
        assert processes.shard_of(12, str(tmp_path)) == {"replica": "inner", "rank": 2, "run_id": "r"}

    def test_a_live_unmarked_leader_does_not_lend_its_session(self, tmp_path: pathlib.Path) -> None:
        """A shard started from a login shell must not adopt what else the shell runs."""
        entry(tmp_path, 10)
        entry(tmp_path, 11, ppid=10, session=10, environ="glm/0/r")
        entry(tmp_path, 12, ppid=10, session=10)
        assert processes.shard_pids("glm", 0, str(tmp_path)) == [11]

    def test_a_marked_member_speaks_for_a_session_without_leader(self, tmp_path: pathlib.Path) -> None:
        entry(tmp_path, 11, session=10, environ="glm/0/r")
        entry(tmp_path, 12, session=10)
        assert processes.shard_pids("glm", 0, str(tmp_path)) == [11, 12]

    @pytest.mark.parametrize("marker", ["glm", "glm/0", "/0/r", "glm/x/r", "glm//r", "glm/\u00b2/r", ""])
    def test_a_malformed_marker_is_none(self, tmp_path: pathlib.Path, marker: str) -> None:
        entry(tmp_path, 10, environ=marker)
        assert processes.shard_of(10, str(tmp_path)) is None

    def test_a_loop_of_parents_ends(self, tmp_path: pathlib.Path) -> None:
        entry(tmp_path, 10, ppid=11)
        entry(tmp_path, 11, ppid=10)
        assert processes.shard_of(10, str(tmp_path)) is None

    def test_a_kernel_thread_belongs_to_nobody_and_is_not_looked_into(self, tmp_path: pathlib.Path) -> None:
        entry(tmp_path, 2, ppid=0, comm="kthreadd", flags=0x00208040, environ="glm/0/r")
        entry(tmp_path, 40, comm="a (b) c", environ="glm/0/r")
        table = processes.ProcessTable(str(tmp_path))
        assert (table.pids(), table.programs()) == ([2, 40], [40]), "as the kernel marks its threads: in a container another process may have number 2"
        assert table.shard_of(2) is None and processes.shard_pids("glm", 0, str(tmp_path)) == [40]
        stat = table.stat(40)
        assert stat and (stat.name, stat.parent, stat.started) == ("a (b) c", 1, 5000)

    def test_unreadable_entries_are_skipped(self, tmp_path: pathlib.Path) -> None:
        (tmp_path / "10").mkdir()
        (tmp_path / "11").mkdir()
        (tmp_path / "11" / "stat").write_text("garbage", encoding="ascii")
        (tmp_path / "12").write_text("not a folder", encoding="ascii")
        (tmp_path / "self").mkdir()
        assert processes.shard_pids("glm", 0, str(tmp_path)) == []
        assert processes.listening_sockets(str(tmp_path)) == []
        assert processes.shard_pids("glm", 0, str(tmp_path / "absent")) == []

    def test_namespaces_fixture(self, tmp_path: pathlib.Path) -> None:
        """proc_pid_namespaces: from the host, host pids map to their replica; another container's pid is nobody's."""
        facts = recorded_hosts.load("proc_pid_namespaces")
        one = recorded_hosts.write("proc_pid_namespaces", tmp_path)["host"]
        ours = set(processes.shard_pids("replica-a", 0, str(one.tree.proc)))
        holds = [gpu for gpu, rows in facts["host_view"].items() if any(row["pid"] in ours for row in rows)]
        foreign = {gpu: [row["pid"] for row in rows if row["pid"] not in ours] for gpu, rows in facts["host_view"].items()}
        assert holds == facts["expect"]["replica_a_holds"]
        assert {gpu: pids for gpu, pids in foreign.items() if pids} == facts["expect"]["foreign"]


class TestSockets:
    @pytest.mark.parametrize("address", ["127.0.0.1", "127.3.2.1"])
    def test_a_listener_and_its_connection(self, address: str) -> None:
        with socket.create_server((address, 0)) as server:
            port = server.getsockname()[1]
            mine = {"port": port, "address": address, "pid": os.getpid(), "listening": True}
            assert [row for row in processes.listening_sockets() if row["port"] == port] == [mine]
            with socket.create_connection((address, port)) as client, contextlib.closing(server.accept()[0]):
                remote, local = client.getsockname()
                rows = processes.established("/proc", port, [os.getpid(), 1])
                assert rows == [{"address": address, "port": port, "remote_address": remote, "remote_port": local, "pid": os.getpid()}]
                assert processes.established("/proc", port, [os.getppid()]) == []
                seen = {row["port"]: row for row in processes.listening_sockets()}
                assert seen[port] == mine
                assert seen[local] == {"port": local, "address": remote, "pid": os.getpid(), "listening": False}
        assert port not in {row["port"] for row in processes.listening_sockets() if row["listening"]}

    def test_ipv4_through_an_ipv6_socket(self) -> None:
        """tcp6 lists it; people know the address by its IPv4 form."""
        with socket.socket(socket.AF_INET6) as server:
            server.bind(("::ffff:127.0.0.1", 0))
            server.listen()
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port)), server.accept()[0]:
                assert [row["remote_address"] for row in processes.established("/proc", port, [os.getpid()])] == ["127.0.0.1"]
                assert [row["address"] for row in processes.listening_sockets() if row["port"] == port] == ["127.0.0.1"]

    @pytest.mark.skipif(sys.byteorder != "little", reason="the text below is a little-endian kernel's")
    def test_ipv6_address(self, tmp_path: pathlib.Path) -> None:
        (tmp_path / "net").mkdir()
        line = "   0: 000080FE00000000FF005450B6AD1DFE:1F40 00000000000000000000000000000000:0000 0A 0:0 0:0 0 0 0 77 1 0\n"
        (tmp_path / "net" / "tcp6").write_text("header\n" + line, encoding="ascii")
        assert [row["address"] for row in processes.listening_sockets(str(tmp_path))] == ["fe80::5054:ff:fe1d:adb6"]

    def test_owner_of_another_user_is_unknown_and_waiting_ports_are_free(self, tmp_path: pathlib.Path) -> None:
        (tmp_path / "net").mkdir()
        header = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
        line = "   0: 0100007F:{port:04X} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000     0        0 {inode} 1 0\n"
        rows = [(8000, "0A", 11), (8000, "01", 12), (8001, "06", 0), (8002, "08", 13), (8003, "0A", 14)]
        text = header + "".join(line.format(port=port, state=state, inode=inode) for port, state, inode in rows) + "garbage\n   1: x y z\n"
        (tmp_path / "net" / "tcp").write_text(text, encoding="ascii")
        entry(tmp_path, 20)
        entry(tmp_path, 30)
        for pid, inode in ((30, 14), (20, 14), (20, 999)):
            folder = tmp_path / str(pid) / "fd"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / str(inode)).symlink_to(f"socket:[{inode}]")
        assert processes.listening_sockets(str(tmp_path)) == [
            {"port": 8000, "address": "127.0.0.1", "pid": None, "listening": True},
            {"port": 8002, "address": "127.0.0.1", "pid": None, "listening": False},
            {"port": 8003, "address": "127.0.0.1", "pid": 20, "listening": True},
        ]
