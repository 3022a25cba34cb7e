# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""lab.sh for tests: real Linux hosts as an object.

The test itself stays outside the hosts' networks. Whatever talks to a host goes through `ssh`, `console` or `run`: an address of a host
that is not there would otherwise leave this machine by its default route.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import subprocess
from collections.abc import Mapping, Sequence

LAB_SH = pathlib.Path(__file__).resolve().parent / "lab.sh"
# What real engines need beyond a small Debian: llama.cpp the first, vLLM both. One root for all of the tests.
EXTRA_PACKAGES = os.environ.get("LAB_EXTRA_PKGS") or "libgomp1,libnuma1"
SESSION = re.compile(r"^Starting session: (.+?) for \S+ from ")


@dataclasses.dataclass(frozen=True)
class SshActivity:
    """What sshd of a host wrote into its journal: connections accepted, and each session's kind ("command", "subsystem 'sftp'", "shell on pts/0")."""

    connections: int
    sessions: list[str]


class Lab:
    """One lab by name. Methods raise subprocess.CalledProcessError, with what lab.sh said in `stderr`, unless `check=False`."""

    def __init__(self, name: str, *, settings: Mapping[str, str] | None = None, owner: int | None = None) -> None:
        self.name = name
        self.directory = pathlib.Path(f"/var/tmp/lab-{name}")
        self.inventory = self.directory / "inventory.ini"
        self.ssh_config = self.directory / "ssh_config"
        self.owner = owner
        kept = {
            key: value
            for key, value in os.environ.items()
            if key in ("LAB_CACHE", "LAB_SUITE", "LAB_EXTRA_PKGS", "LAB_PYNVML", "LAB_PYTHON", "LAB_APT", "LAB_RUNNER")
        }
        plain = {key: value for key, value in os.environ.items() if not key.startswith("LAB_")}
        self.environment = {**plain, **kept, **(settings or {}), "LAB_NAME": name, "LAB_DIR": str(self.directory)}

    def call(
        self, *argv: str, check: bool = True, timeout: float = 300, settings: Mapping[str, str] | None = None, stdin: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """lab.sh with these arguments; `settings` are further environment variables, `timeout` is in seconds."""
        done = subprocess.run(
            [str(LAB_SH), *argv], env={**self.environment, **(settings or {})}, text=True, capture_output=True, check=False, timeout=timeout, input=stdin or ""
        )
        if check and done.returncode:
            raise LabFailed(done.returncode, [str(LAB_SH), *argv], done.stdout, done.stderr)
        return done

    def why_not(self) -> str | None:
        """Why the lab cannot run on this machine, in one line; None when it can."""
        done = self.call("check", check=False)
        return done.stdout.strip() or done.stderr.strip() if done.returncode else None

    def up(self, *hosts: str, gpus: str | None = None, hcas: str | None = None, settings: Mapping[str, str] | None = None) -> None:
        """Make hosts that are not there yet. `gpus` is N or N:MODEL, `hcas` N:ib or N:roce (see lab.sh); both hold for the new hosts only."""
        options = [
            word for option, value in (("--gpus", gpus), ("--hcas", hcas), ("--owner", self.owner and str(self.owner))) if value for word in (option, value)
        ]
        self.call("up", *options, *hosts, timeout=600, settings=settings)

    def down(self) -> None:
        self.call("down")

    def run(self, *argv: str, check: bool = True, timeout: float = 300, settings: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """A command on this machine, in the one namespace where the hosts can be reached, such as ansible-playbook."""
        return self.call("run", *argv, check=check, timeout=timeout, settings=settings)

    def ssh(self, host: str, command: str, *, check: bool = True, timeout: float = 60, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """A shell command on a host, over the network. `host` may be `user@host` (users: root, ansible)."""
        return self.call("ssh", host, command, check=check, timeout=timeout, stdin=stdin)

    def console(self, host: str, command: str, *, check: bool = True, timeout: float = 60, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """A shell command on a host as root, without its network and its sshd."""
        return self.call("console", host, "sh", "-c", command, check=check, timeout=timeout, stdin=stdin)

    def stop(self, *hosts: str) -> None:
        self.call("stop", *hosts)

    def kill(self, *hosts: str) -> None:
        """Power cut: nothing more leaves the host, not even a FIN."""
        self.call("kill", *hosts)

    def start(self, *hosts: str) -> None:
        self.call("start", *hosts)

    def reboot(self, *hosts: str) -> None:
        self.call("reboot", *hosts)

    def cut(self, *cables: str) -> None:
        """Take cables out: `n1` all of the host's, `n1:eth1` one."""
        self.call("cut", *cables)

    def heal(self, *cables: str) -> None:
        self.call("heal", *cables)

    def part(self, first: str, second: str, interface: str | None = None) -> None:
        """Break the way between two hosts, both directions, on all networks or on one."""
        self.call("part", first, second, *([interface] if interface else []))

    def join(self, first: str, second: str, interface: str | None = None) -> None:
        self.call("join", first, second, *([interface] if interface else []))

    def hosts(self) -> dict[str, bool]:
        """Each host's name, and whether it is powered on."""
        lines: Sequence[str] = self.call("list").stdout.splitlines()
        return {line.split()[0]: line.split()[2] == "on" for line in lines}

    def address(self, host: str) -> str:
        """The host's address on the first network."""
        return next(line.split()[1] for line in self.call("list").stdout.splitlines() if line.split()[0] == host)

    def reaches(self, source: str, target: str, seconds: float = 3) -> bool:
        """Whether a ping from host to host is answered within that time (asked by console: `source` may be cut off)."""
        return self.console(source, f"timeout {seconds} ping -q -c 1 -i 0.2 -w 60 {target}", check=False).returncode == 0

    def journal_cursor(self, host: str) -> str:
        """A place in the host's journal, for `ssh_activity`."""
        return self.console(host, "journalctl --sync; journalctl -q -n 1 --show-cursor").stdout.rpartition("cursor: ")[2].strip()

    def ssh_activity(self, host: str, since: str) -> SshActivity:
        """What sshd of the host did since that cursor; what `console` does is not in it."""
        journal = self.console(host, f"journalctl --sync; journalctl -q -o cat -t sshd -t sshd-session --after-cursor='{since}'").stdout.splitlines()
        sessions = [match[1] for match in map(SESSION.match, journal) if match]
        return SshActivity(sum(line.startswith("Accepted ") for line in journal), sessions)


class LabFailed(subprocess.CalledProcessError):
    """A lab.sh command failed; the text says what it wrote."""

    def __str__(self) -> str:
        return f"{super().__str__()}\n{self.stdout}{self.stderr}"
