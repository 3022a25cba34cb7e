# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""systemd and supervisor behind one interface. Starting never waits for the engine: readiness is the gate's business."""

from __future__ import annotations

import os
import signal
import time
import typing as t

from ansible_collections.rankzero.inference.plugins.module_utils.revisions import replace_file

RunCommand = t.Callable[..., t.Tuple[int, str, str]]
UNIT_DIR = "/etc/systemd/system"


class ServiceError(Exception):
    """A service manager refused. The text says what was run and what it answered."""


class Systemd:
    """One unit C(inference-<replica>.service)."""

    name = "systemd"

    def __init__(self, replica: str, run_command: RunCommand) -> None:
        self.unit = "inference-%s.service" % replica
        self.path = "%s/%s" % (UNIT_DIR, self.unit)
        self._run = run_command

    def _systemctl(self, *args: str) -> str:
        rc, out, err = self._run(["systemctl", *args], expand_user_and_vars=False)
        if rc != 0:
            raise ServiceError("systemctl %s ended with %d: %s" % (" ".join(args), rc, (err or out).strip()))
        return out

    def read(self) -> t.Optional[str]:
        return _read(self.path)

    def install(self, text: str) -> None:
        """Write the unit, make systemd read it, and enable it for the next boot: each step that is not done yet, so an interrupted one is finished."""
        if self.read() != text:
            replace_file(self.path, text, 0o644)
        found = self._systemctl("show", self.unit, "-p", "NeedDaemonReload", "-p", "LoadState", "-p", "UnitFileState").split()
        if "NeedDaemonReload=no" not in found or "LoadState=loaded" not in found:
            self._systemctl("daemon-reload")
        if "UnitFileState=enabled" not in found:
            self._systemctl("enable", self.unit)

    def starts_at_boot(self) -> bool:
        return self._systemctl("show", self.unit, "-p", "UnitFileState", "--value").strip() in ("enabled", "enabled-runtime")

    def disable(self) -> None:
        self._systemctl("disable", self.unit)

    def active(self) -> bool:
        _rc, out, _err = self._run(["systemctl", "show", self.unit, "-p", "ActiveState", "--value"])
        return out.strip() in ("active", "activating", "reloading")

    def restart(self) -> None:
        self._run(["systemctl", "reset-failed", self.unit])
        self._systemctl("restart", "--no-block", self.unit)

    def stop(self, seconds: float) -> None:
        """Stop and wait: systemd itself ends the whole control group within the unit's TimeoutStopSec."""
        if self.read() is not None:
            self._systemctl("stop", self.unit)

    def remove(self) -> None:
        if self.read() is None:
            return
        self._run(["systemctl", "disable", self.unit])
        os.unlink(self.path)
        self._systemctl("daemon-reload")
        self._run(["systemctl", "reset-failed", self.unit])


class Supervisor:
    """One supervisord for the shard, from the PyPI package C(supervisor). It is controlled by its own pid file, never by name."""

    name = "supervisor"

    def __init__(self, directory: str, state_dir: str, program: t.Optional[str], run_command: RunCommand) -> None:
        self.path = directory + "/supervisord.conf"
        self._pid_file = state_dir + "/supervisord.pid"
        self._program = program
        self._run = run_command

    def read(self) -> t.Optional[str]:
        return _read(self.path)

    def install(self, text: str) -> None:
        if self.read() != text:
            replace_file(self.path, text, 0o640)

    def _pid(self) -> t.Optional[int]:
        """The pid of our supervisord: by its pid file or, where that is lost, by its command line. It must be alive and run with our configuration file."""
        try:
            with open(self._pid_file, encoding="ascii") as stream:
                named = int(stream.read().strip())
            if self._is_ours(named):
                return named
        except (OSError, ValueError):
            pass
        return next((int(name) for name in os.listdir("/proc") if name.isdecimal() and self._is_ours(int(name))), None)

    def _is_ours(self, pid: int) -> bool:
        try:
            with open("/proc/%d/cmdline" % pid, "rb") as stream:
                words = stream.read().split(b"\0")
            owner = os.stat("/proc/%d" % pid).st_uid
        except OSError:
            return False
        return owner == os.geteuid() and _runs_supervisord(words, self.path.encode())

    def starts_at_boot(self) -> bool:
        return False

    def disable(self) -> None:
        """Nothing starts it at boot."""

    def active(self) -> bool:
        return self._pid() is not None

    def restart(self) -> None:
        self.stop(120)
        if not self._program:
            raise ServiceError("supervisord was not found: install the Python package supervisor on the host (pip install supervisor)")
        rc, out, err = self._run([self._program, "-c", self.path], expand_user_and_vars=False)
        if rc != 0:
            raise ServiceError("%s -c %s ended with %d: %s" % (self._program, self.path, rc, (err or out).strip()))

    def stop(self, seconds: float) -> None:
        """SIGTERM makes supervisord stop its program within stopwaitsecs and end."""
        pid = self._pid()
        if pid is None:
            return
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + seconds
        while self._pid() is not None:
            if time.monotonic() > deadline:
                raise ServiceError("supervisord (pid %d) did not end within %d s" % (pid, seconds))
            time.sleep(0.05)

    def remove(self) -> None:
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            pass


def _runs_supervisord(words: t.Sequence[bytes], configuration: bytes) -> bool:
    """Whether this command line is C(supervisord -c configuration): a pid file may name an editor of that file instead."""
    named = [place for place, word in enumerate(words) if os.path.basename(word) == b"supervisord"]
    return any(list(words[place + 1 : place + 3]) == [b"-c", configuration] for place in named)


def _read(path: str) -> t.Optional[str]:
    """The text of a service file, or None where there is none. Damaged bytes make a text that differs from every rendered one."""
    try:
        with open(path, encoding="utf-8", errors="replace", newline="") as stream:
            return stream.read()
    except OSError:
        return None


Manager = t.Union[Systemd, Supervisor]
