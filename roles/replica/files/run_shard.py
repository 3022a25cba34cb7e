#!/usr/bin/env python3
# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run one shard of a replica: start its launches in order, and end every process of it when one of them ends.

    run_shard.py [DIRECTORY]                       run the shard (what systemd or supervisord starts)
    run_shard.py [DIRECTORY] --show [--launch N]   print what would be run, as shell commands with the secrets masked
    run_shard.py [DIRECTORY] --check               print what would stop a start now, one line each

DIRECTORY is a revision: it holds `launch.json`, `shard.env` and, where there are any, `secrets/`. Default: where this file lies.

What holds while it runs:

- A launch sees exactly shard.env, its own `env`, its secrets and RANKZERO_SHARD=<replica>/<rank>/<run id>. Nothing of the caller's
  environment is passed on, not even PATH.
- The end of any launch is the end of the shard, whatever its exit code: engines leave with 0 after a fatal error (vllm#48966), and a
  worker whose peer has gone stays for ever with its GPU memory (vllm#32136).
- Ending the shard ends the whole process tree. An engine's own children outlive it otherwise, with their GPU memory (vllm#55510).
  What an earlier run left behind is found by its RANKZERO_SHARD at the next start. A program that calls setproctitle wipes its
  environment from /proc and cannot be found so, unless SPT_NOENV is set for it (setproctitle's documentation, "Environment variables").

Exit codes: the engine's or sidecar's own; 128+n when signal n ended it; 0 after a stop that was asked for; and of sysexits.h:
64 usage, 69 refused by its checks, 70 a launch ended by itself with 0, 71 processes could not be ended, 73 the state directory cannot be
used, 75 already running, 78 launch.json or shard.env is damaged.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import ipaddress
import json
import math
import os
import re
import selectors
import shlex
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

EX_USAGE, EX_UNAVAILABLE, EX_SOFTWARE, EX_OSERR, EX_CANTCREAT, EX_TEMPFAIL, EX_CONFIG = 64, 69, 70, 71, 73, 75, 78

SCHEMA = 1
MARKER = "RANKZERO_SHARD"
SECRET_MASK = "(secret)"

DEFAULT_STOP_SECONDS = 30.0
WAIT_LOG_SECONDS = 30.0         # how often a launch that still waits for a port says so again
PROBE_PERIOD_SECONDS = 0.5      # between two attempts to connect
PROBE_TIMEOUT_SECONDS = 3.0     # a host that drops packets answers nothing at all
ORPHAN_GRACE_SECONDS = 3.0      # for what an ended launch has left running, before SIGKILL
LEFTOVER_GRACE_SECONDS = 5.0    # for what an earlier run has left running, before SIGKILL
KILL_SECONDS = 10.0             # SIGKILL is only late for a process in uninterruptible sleep, in a driver for example
TICK_SECONDS = 0.05

PROC = "/proc"
NVIDIA_GPUS = "/proc/driver/nvidia/gpus"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36       # linux/prctl.h
TCP_LISTEN = "0A"                                      # net/tcp_states.h

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
ENVIRONMENT_LINE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)='((?:[^']|'\\'')*)'")
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")

# Variables that make a loader, an interpreter or a shell run other code, or that belong to the service manager's talk with us. Whatever
# wrote them, they are not passed on. LD_LIBRARY_PATH, PATH, HOME and PYTHONPATH come from engine builds and stay.
UNSAFE_PREFIXES = ("BASH_FUNC_", "DYLD_", "LD_", "LISTEN_", "WATCHDOG_")
UNSAFE_EXCEPT = frozenset({"LD_LIBRARY_PATH"})
UNSAFE_NAMES = frozenset({
    "GCONV_PATH", "GETCONF_DIR", "GLIBC_TUNABLES", "HOSTALIASES", "LOCPATH", "MALLOC_TRACE", "NLSPATH", "RESOLV_HOST_CONF",
    "BASHOPTS", "BASH_ENV", "BASH_LOADABLES_PATH", "CDPATH", "ENV", "IFS", "PROMPT_COMMAND", "PS4", "SHELLOPTS", "ZDOTDIR",
    "PYTHONBREAKPOINT", "PYTHONCASEOK", "PYTHONEXECUTABLE", "PYTHONHOME", "PYTHONINSPECT", "PYTHONPLATLIBDIR", "PYTHONPYCACHEPREFIX",
    "PYTHONSTARTUP", "PYTHONUSERBASE", "PYTHONWARNINGS",
    "JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS", "NODE_OPTIONS", "PERL5DB", "PERL5LIB", "PERL5OPT", "RUBYLIB", "RUBYOPT",
    "CUDA_INJECTION32_PATH", "CUDA_INJECTION64_PATH", "NVTX_INJECTION32_PATH", "NVTX_INJECTION64_PATH",
    "OPENSSL_CONF", "OPENSSL_ENGINES", "OPENSSL_MODULES",
    "CREDENTIALS_DIRECTORY", "NOTIFY_SOCKET", MARKER,
})


class Refusal(Exception):
    """A stated condition under which nothing is run: one line of text and the exit code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.text = text
        self.code = code


def damaged(text: str) -> NoReturn:
    raise Refusal(text, EX_CONFIG)


def log(text: str) -> None:
    """One plain line on stderr, where systemd's journal and supervisord's log find it."""
    line = "".join(character if character.isprintable() else "?" for character in text)
    try:
        os.write(2, f"run_shard: {line}\n".encode("utf-8", "replace"))      # unbuffered: nothing is left to fail when Python ends
    except OSError:
        pass        # who reads the log may go away; the shard must still be looked after and ended


def utc(epoch: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(epoch))


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def reason_of(error: OSError) -> str:
    return error.strerror or type(error).__name__


# ---------------------------------------------------------------------------------------------------------------------------------
# What is to be run: launch.json and shard.env


class Endpoint(NamedTuple):
    """A TCP address that must be listened on before a launch starts."""

    what: str
    address: str
    port: int

    def __str__(self) -> str:
        return f"{self.what} at {host_port(self.address, self.port)}"


class Port(NamedTuple):
    """A TCP port that the shard is going to listen on."""

    address: str
    port: int
    what: str


class Gpu(NamedTuple):
    uuid: str
    pci_bdf: str | None


@dataclass(frozen=True)
class Launch:
    """One process to start. `secret_env` maps a variable to the name of the file that holds its value; `secret_args` maps the position of an
    argument to the name of the secret whose file that argument names."""

    name: str
    path: str
    args: tuple[str, ...]
    env: Mapping[str, str]
    secret_env: Mapping[str, str]
    wait_for: tuple[Endpoint, ...]
    secret_args: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Shard:
    """A revision's launch.json and shard.env, validated. The last launch is the engine, those before it are sidecars."""

    directory: str
    replica: str
    rank: int
    nodes: int
    fingerprint: str
    state_dir: str
    work_dir: str
    launches: tuple[Launch, ...]
    stop_seconds: float
    gpus: tuple[Gpu, ...]
    listen_ports: tuple[Port, ...]
    addresses: tuple[str, ...]
    environment: Mapping[str, str]

    @property
    def identity(self) -> str:
        return f"{self.replica}/{self.rank}"


def host_port(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def parse_environment(text: str, where: str) -> dict[str, str]:
    """Read lines `NAME='value'` as a POSIX shell would; `'` in a value is written `'\\''`. Blank lines and `#` comments are skipped.

    Raises Refusal with the line's number for anything else. A value never appears in the message: it may be what is secret.
    """
    variables: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line or line.startswith("#"):
            continue
        match = ENVIRONMENT_LINE.fullmatch(line)
        if match is None:
            damaged(f"{where} is damaged: line {number} is not NAME='value' on one line")
        if "\0" in line:
            damaged(f"{where} is damaged: line {number} holds a NUL byte")
        variables[match.group(1)] = match.group(2).replace("'\\''", "'")
    return variables


class Fields:
    """Typed access to one JSON object; `where` is its path, for the message of a Refusal."""

    def __init__(self, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            damaged(f"{where} must be an object")
        self._value: dict[str, Any] = value
        self.where = where

    def has(self, name: str) -> bool:
        return self._value.get(name) is not None

    def text(self, name: str, empty: bool = False) -> str:
        value = self._value.get(name)
        if not isinstance(value, str) or not (value or empty):
            damaged(f"{self.where}.{name} must be a string{'' if empty else ' that is not empty'}")
        return usable_text(value, f"{self.where}.{name}")

    def matching(self, name: str, pattern: re.Pattern[str], what: str) -> str:
        value = self.text(name)
        if pattern.fullmatch(value) is None:
            damaged(f"{self.where}.{name} must be {what}")
        return value

    def absolute_path(self, name: str) -> str:
        value = self.text(name)
        if not os.path.isabs(value):
            damaged(f"{self.where}.{name} must be an absolute path")
        return value

    def integer(self, name: str, low: int, high: int | None = None) -> int:
        value = self._value.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
            damaged(f"{self.where}.{name} must be an integer, {f'{low} to {high}' if high is not None else f'at least {low}'}")
        return value

    def seconds(self, name: str, default: float) -> float:
        value = self._value.get(name, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
            damaged(f"{self.where}.{name} must be a number of seconds, at least 0")
        return float(value)

    def address(self, name: str) -> str:
        return ip_address(self.text(name), f"{self.where}.{name}")

    def object(self, name: str) -> Fields:
        return Fields(self._value.get(name), f"{self.where}.{name}")

    def items(self, name: str, required: bool = False) -> list[tuple[str, Any]]:
        """The elements of a list, each with its path; a list that is absent or null is empty unless it is required."""
        value = self._value.get(name)
        if value is None and not required:
            return []
        if not isinstance(value, list):
            damaged(f"{self.where}.{name} must be a list")
        return [(f"{self.where}.{name}[{index}]", item) for index, item in enumerate(value)]

    def objects(self, name: str, required: bool = False) -> list[Fields]:
        return [Fields(item, where) for where, item in self.items(name, required)]

    def variables(self, name: str) -> dict[str, str]:
        """A map from variable names to strings of one line."""
        value = self._value.get(name, {})
        if not isinstance(value, dict):
            damaged(f"{self.where}.{name} must be an object")
        for variable, content in value.items():
            if VARIABLE.fullmatch(variable) is None:
                damaged(f"{self.where}.{name} has a key that is not a variable name")
            if not isinstance(content, str) or "\n" in content:
                damaged(f"{self.where}.{name}.{variable} must be a string of one line")
            usable_text(content, f"{self.where}.{name}.{variable}")
        return dict(value)


def usable_text(value: str, where: str) -> str:
    """Refuse what the kernel cannot take as an argument or variable."""
    if "\0" in value:
        damaged(f"{where} holds a NUL character")
    try:
        encode(value)
    except UnicodeEncodeError:
        damaged(f"{where} holds a character that is not Unicode text")
    return value


def ip_address(value: str, where: str) -> str:
    try:
        ipaddress.ip_address(value)
    except ValueError:
        damaged(f"{where} must be an IP address")
    return value


def encode(value: str) -> bytes:
    """UTF-8 whatever the caller's locale is; bytes of shard.env that are not UTF-8 pass unchanged."""
    return value.encode("utf-8", "surrogateescape")


def parse_endpoints(entry: Fields) -> tuple[Endpoint, ...]:
    endpoints = []
    if entry.has("wait_for_leader_port"):
        leader = entry.object("wait_for_leader_port")
        endpoints.append(Endpoint("the leader", leader.address("address"), leader.integer("port", 1, 65535)))
    for rank in entry.objects("wait_for_ranks"):
        endpoints.append(Endpoint(f"rank {rank.integer('rank', 0)}", rank.address("address"), rank.integer("port", 1, 65535)))
    return tuple(endpoints)


def parse_launch(entry: Fields) -> Launch:
    args = []
    for where, argument in entry.items("args", required=True):
        if not isinstance(argument, str):
            damaged(f"{where} must be a string")
        args.append(usable_text(argument, where))
    secret_env = entry.variables("secret_env")
    for variable, file_name in secret_env.items():
        if PLAIN_NAME.fullmatch(file_name) is None:
            damaged(f"{entry.where}.secret_env.{variable} must be the name of a file in secrets/")
    secret_args = {item.integer("position", 0, len(args) - 1): item.matching("secret", PLAIN_NAME, "the name of a file in secrets/") for item in entry.objects("secret_args")}
    return Launch(
        name=entry.matching("name", PLAIN_NAME, "a name of letters, digits, '_', '.' and '-'"), path=entry.absolute_path("path"), args=tuple(args),
        env=entry.variables("env"), secret_env=secret_env, wait_for=parse_endpoints(entry), secret_args=secret_args,
    )


def parse_shard(text: str, directory: str, environment: Mapping[str, str]) -> Shard:
    """Validate launch.json. Raises Refusal naming the field; unknown keys are left to those who read them."""
    try:
        top = Fields(json.loads(text), "launch.json")
    except (ValueError, RecursionError) as error:
        damaged(f"launch.json is damaged: not JSON ({error})")
    if top.integer("schema", 0) != SCHEMA:
        damaged(f"launch.json has schema {top.integer('schema', 0)}, this run_shard.py reads schema {SCHEMA}: deploy the replica again")
    launches = tuple(parse_launch(entry) for entry in top.objects("launches", required=True))
    if not launches:
        damaged("launch.json.launches must not be empty")
    if len({launch.name for launch in launches}) != len(launches):
        damaged("launch.json.launches has two launches of one name")
    nodes, paths = top.integer("nodes", 1), top.object("paths")
    return Shard(
        directory=directory, environment=environment, launches=launches, nodes=nodes, rank=top.integer("rank", 0, nodes - 1),
        replica=top.matching("replica", PLAIN_NAME, "a name of letters, digits, '_', '.' and '-'"), fingerprint=top.text("fingerprint"),
        state_dir=paths.absolute_path("state_dir"), work_dir=paths.absolute_path("work_dir"),
        stop_seconds=top.seconds("stop_seconds", DEFAULT_STOP_SECONDS),
        gpus=tuple(Gpu(gpu.text("uuid"), gpu.text("pci_bdf") if gpu.has("pci_bdf") else None) for gpu in top.objects("gpus")),
        listen_ports=tuple(Port(port.address("address"), port.integer("port", 1, 65535), port.text("what")) for port in top.objects("listen_ports")),
        addresses=tuple(ip_address(address, where) if isinstance(address, str) else damaged(f"{where} must be an IP address")
                        for where, address in top.items("addresses")),
    )


def read_shard(directory: str) -> Shard:
    """Read the revision in `directory`. Raises Refusal (78) when a file of it is missing, unreadable or damaged."""
    directory = os.path.realpath(directory)
    texts = []
    for name, errors in (("shard.env", "surrogateescape"), ("launch.json", "strict")):
        path = os.path.join(directory, name)
        try:
            with open(path, "rb") as stream:
                texts.append(stream.read().decode("utf-8", errors))
        except OSError as error:
            damaged(f"{path} cannot be read: {reason_of(error)}")
        except UnicodeDecodeError as error:
            damaged(f"{path} is damaged: byte {error.start} is not UTF-8")
    return parse_shard(texts[1], directory, parse_environment(texts[0], os.path.join(directory, "shard.env")))


# ---------------------------------------------------------------------------------------------------------------------------------
# The environment of a launch


def is_unsafe(name: str) -> bool:
    return name in UNSAFE_NAMES or (name.startswith(UNSAFE_PREFIXES) and name not in UNSAFE_EXCEPT)


def plain_environment(shard: Shard, launch: Launch) -> tuple[dict[str, str], list[str]]:
    """The launch's variables without its secrets, and the names that were left out because they are unsafe to pass on."""
    merged = {**shard.environment, **launch.env}
    dropped = sorted(name for name in {**merged, **launch.secret_env} if is_unsafe(name))
    return {name: value for name, value in merged.items() if not is_unsafe(name)}, dropped


def secret_path(shard: Shard, name: str, credentials: str | None) -> str:
    """systemd's LoadCredential= copy comes first: with it, the file of the revision need not be readable for the service's user."""
    if credentials is not None:
        path = os.path.join(credentials, name)
        if os.path.lexists(path):
            return path
    return os.path.join(shard.directory, "secrets", name)


def command_words(shard: Shard, launch: Launch, credentials: str | None) -> list[str]:
    """The program and its arguments, with the paths of secret files in their places."""
    args = [secret_path(shard, launch.secret_args[position], credentials) if position in launch.secret_args else argument for position, argument in enumerate(launch.args)]
    return [launch.path, *args]


def read_secret(path: str) -> bytes:
    """The file's content less one newline at its end. Raises Refusal that names the file, never the value."""
    try:
        with open(path, "rb") as stream:
            value = stream.read()
    except OSError as error:
        raise Refusal(f"secret {path} cannot be read: {reason_of(error)}", EX_UNAVAILABLE) from None
    if value.endswith(b"\n"):
        value = value[:-1]
    if not value:
        raise Refusal(f"secret {path} is empty", EX_UNAVAILABLE)
    if b"\0" in value:
        raise Refusal(f"secret {path} holds a NUL byte", EX_UNAVAILABLE)
    return value


def complete_environment(shard: Shard, launch: Launch, marker: str, credentials: str | None) -> dict[bytes, bytes]:
    """All that the launch sees. Later sources win: shard.env, env, secrets, the marker. Raises Refusal for a secret that cannot be used."""
    plain, dropped = plain_environment(shard, launch)
    for name in dropped:
        log(f"launch {launch.name}: {name} is not passed on, it could make the process run other code or answer for the service")
    variables = {encode(name): encode(value) for name, value in plain.items()}
    for name, file_name in launch.secret_env.items():
        if not is_unsafe(name):
            variables[encode(name)] = read_secret(secret_path(shard, file_name, credentials))
    variables[encode(MARKER)] = encode(marker)
    return variables


class CommandLine:
    """A launch as a POSIX shell command that can be pasted, with its secrets masked."""

    def __init__(self, shard: Shard, launch: Launch) -> None:
        self._shard = shard
        self._launch = launch

    def comments(self) -> list[str]:
        shard, launch = self._shard, self._launch
        role = "engine" if launch is shard.launches[-1] else "sidecar"
        lines = [f"# launch {launch.name} ({role}) of {shard.replica}, rank {shard.rank} of {shard.nodes}, fingerprint {shard.fingerprint}"]
        lines += [f"# starts when {endpoint} listens" for endpoint in launch.wait_for]
        lines += [f"# {name} is the content of {os.path.join(shard.directory, 'secrets', file_name)}"
                  for name, file_name in sorted(launch.secret_env.items()) if not is_unsafe(name)]
        lines += [f"# {name} is not passed on" for name in plain_environment(shard, launch)[1]]
        # A pasted command that carried the marker would count as the service's and be ended at its next start.
        lines.append(f"# {MARKER}={shard.identity}/<run id> is added at every start of the service")
        return lines

    def __str__(self) -> str:
        shard, launch = self._shard, self._launch
        variables = plain_environment(shard, launch)[0]
        variables.update({name: SECRET_MASK for name in launch.secret_env if not is_unsafe(name)})
        assignments = [f"{name}={quoted(value)}" for name, value in sorted(variables.items())]
        command = " ".join(shlex.quote(word) for word in command_words(shard, launch, None))
        return f"cd {shlex.quote(shard.directory)} && " + " \\\n  ".join(["env -i", *assignments, command])


def quoted(value: str) -> str:
    return "'" + value.replace("'", "'\\''") + "'"


def show(shard: Shard, name: str | None) -> int:
    """Print the launches, or the one of this name. Needs no right to read the secrets."""
    chosen = [launch for launch in shard.launches if name in (None, launch.name)]
    if not chosen:
        raise Refusal(f"no launch is named {name!r}: there is {', '.join(launch.name for launch in shard.launches)}", EX_USAGE)
    lines = [CommandLine(shard, launch) for launch in chosen]
    text = "\n\n".join("\n".join([*line.comments(), str(line)]) for line in lines)
    sys.stdout.buffer.write(encode(text) + b"\n")
    return 0


# ---------------------------------------------------------------------------------------------------------------------------------
# Processes as /proc shows them


class Process(NamedTuple):
    """`start` (clock ticks since boot) tells a process from a later one that has its pid."""

    pid: int
    parent: int
    state: str
    start: int
    name: str

    def __str__(self) -> str:
        return f"{self.pid} ({self.name}, state {self.state})"


def parse_stat(text: str) -> Process:
    """/proc/PID/stat; the name stands in parentheses and may itself hold spaces and parentheses (proc(5))."""
    head, _, tail = text.rpartition(")")
    pid, _, name = head.partition(" (")
    values = tail.split()
    return Process(int(pid), int(values[1]), values[0], int(values[19]), name)


def read_process(pid: int) -> Process | None:
    try:
        with open(f"{PROC}/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            return parse_stat(stream.read())
    except (OSError, ValueError, IndexError):
        return None     # it has ended


def read_processes() -> dict[int, Process]:
    found = (read_process(int(name)) for name in os.listdir(PROC) if name.isdecimal())
    return {process.pid: process for process in found if process is not None}


def read_marker(pid: int) -> str | None:
    """The value of RANKZERO_SHARD in the environment that the process was started with; None without, or when it may not be read."""
    try:
        with open(f"{PROC}/{pid}/environ", "rb") as stream:
            entries = stream.read().split(b"\0")
    except OSError:
        return None
    prefix = encode(MARKER) + b"="
    return next((entry[len(prefix):].decode("utf-8", "replace") for entry in entries if entry.startswith(prefix)), None)


def is_run_shard(pid: int) -> bool:
    try:
        with open(f"{PROC}/{pid}/cmdline", "rb") as stream:
            return any(os.path.basename(word) == b"run_shard.py" for word in stream.read().split(b"\0"))
    except OSError:
        return False


def ancestors(processes: Mapping[int, Process], pid: int) -> list[int]:
    chain: list[int] = []
    while pid in processes and processes[pid].parent not in (0, *chain):
        pid = processes[pid].parent
        chain.append(pid)
    return chain


def descendants(processes: Mapping[int, Process], root: int) -> dict[int, Process]:
    children: dict[int, list[Process]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process)
    found: dict[int, Process] = {}
    queue = list(children.get(root, []))
    while queue:
        process = queue.pop()
        if process.pid not in found and process.pid != root:
            found[process.pid] = process
            queue += children.get(process.pid, [])
    return found


def members_of_run(marker: str) -> dict[int, Process]:
    """Living processes of this run: what descends from us, and what carries this run's marker."""
    processes = read_processes()
    kept_out = {os.getpid(), *ancestors(processes, os.getpid())}
    found = descendants(processes, os.getpid())
    found.update({pid: process for pid, process in processes.items() if pid not in kept_out and read_marker(pid) == marker})
    return {pid: process for pid, process in found.items() if process.state != "Z"}


def leftovers_of(identity: str) -> dict[int, Process]:
    """Living processes that carry this shard's marker and have no run_shard.py above them any more.

    The caller holds the lock of its state directory, so a run_shard.py that lives above such a process serves another state directory
    (another replica_root, or a container that shares our process table): its shard is running and is none of our business.
    """
    processes = read_processes()
    kept_out = {os.getpid(), *ancestors(processes, os.getpid())}
    found = {}
    for pid, process in processes.items():
        if pid in kept_out or not (read_marker(pid) or "").startswith(f"{identity}/"):
            continue
        if not any(is_run_shard(above) for above in ancestors(processes, pid)):
            found[pid] = process
    return found


def send_signal(process: Process, number: int) -> str | None:
    """Signal exactly this process and not a later one of its pid. Returns why it could not be done; an ended process is no failure."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    except (AttributeError, OSError):
        handle = -1     # before Linux 5.3, or forbidden by a container's seccomp filter
    try:
        now = read_process(process.pid)
        if now is None or now.start != process.start:
            return None
        if handle >= 0:
            signal.pidfd_send_signal(handle, number)
        else:
            os.kill(process.pid, number)
    except ProcessLookupError:
        return None
    except OSError as error:
        return reason_of(error)
    finally:
        if handle >= 0:
            os.close(handle)
    return None


def listing(processes: Iterable[Process]) -> str:
    return ", ".join(str(process) for process in sorted(processes))


def end_processes(find: Callable[[], dict[int, Process]], pause: Callable[[float], None], grace: float) -> list[Process]:
    """SIGTERM what `find` finds, after `grace` seconds SIGKILL until nothing is found. Returns what is left after KILL_SECONDS more."""
    found = find()
    if found and grace > 0:
        for process in found.values():
            send_signal(process, signal.SIGTERM)
        deadline = time.monotonic() + grace
        while found and time.monotonic() < deadline:
            pause(TICK_SECONDS)
            found = find()
    if found:
        log(f"SIGKILL to {listing(found.values())}")
    deadline = time.monotonic() + KILL_SECONDS
    while found and time.monotonic() < deadline:
        for process in found.values():
            send_signal(process, signal.SIGKILL)
        pause(TICK_SECONDS)
        found = find()
    return sorted(found.values())


# ---------------------------------------------------------------------------------------------------------------------------------
# What would stop a start


def check_executables(shard: Shard) -> list[str]:
    found = []
    for launch in shard.launches:
        problem = executable_problem(launch.path)
        if problem is not None:
            found.append(f"launch {launch.name}: {problem}")
    return found


def executable_problem(path: str) -> str | None:
    """Also looks at a script's interpreter: without it the kernel says "No such file" of a script that is there."""
    if not os.path.exists(path):
        return f"{path} does not exist"
    if not os.path.isfile(path) or not os.access(path, os.X_OK):
        return f"{path} is not executable for this user"
    try:
        with open(path, "rb") as stream:
            first = stream.readline(4096)
    except OSError:
        return None     # a program may be executable and not readable
    words = first[2:].split() if first.startswith(b"#!") else []
    if words and not os.access(words[0], os.X_OK):
        return f"{path} needs the interpreter {words[0].decode('utf-8', 'replace')}, which is missing or not executable"
    return None


def check_secrets(shard: Shard, credentials: str | None) -> list[str]:
    found = []
    for name in sorted({name for launch in shard.launches for name in (*launch.secret_env.values(), *launch.secret_args.values())}):
        try:
            read_secret(secret_path(shard, name, credentials))
        except Refusal as refusal:
            found.append(refusal.text)
    return found


def check_work_dir(path: str) -> list[str]:
    existing = path
    while not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    if not os.path.isdir(existing):
        return [f"working directory {path} cannot be used: {existing} is not a directory"]
    if not os.access(existing, os.X_OK if existing == path else os.X_OK | os.W_OK):
        return [f"working directory {path} cannot be {'entered' if existing == path else 'created'} by this user"]
    return []


def bind_error(address: str, port: int) -> OSError | None:
    """Try to bind without SO_REUSEADDR: with it, a port that a loading engine has bound and does not listen on yet looks free."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((address, port))
    except OSError as error:
        return error
    return None


def check_addresses(shard: Shard) -> list[str]:
    problems = ((address, bind_error(address, 0)) for address in shard.addresses)
    return [f"address {address} is not usable on this host: {reason_of(error)}" for address, error in problems if error is not None]


class TcpSocket(NamedTuple):
    address: str
    port: int
    state: str
    inode: str


def parse_tcp_table(text: str) -> list[TcpSocket]:
    """/proc/net/tcp and tcp6: addresses are 32-bit words in the host's byte order, in hex (proc(5))."""
    found = []
    for line in text.splitlines()[1:]:
        words = line.split()
        host, _, port = words[1].rpartition(":")
        packed = b"".join(struct.pack("=I", int(host[at:at + 8], 16)) for at in range(0, len(host), 8))
        address = ipaddress.ip_address(packed)
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        found.append(TcpSocket(str(mapped or address), int(port, 16), words[3], words[9]))
    return found


def sockets_at(address: str, port: int) -> list[TcpSocket]:
    """The sockets that can be in the way of binding this address; one that is bound but neither listens nor is connected is in no table."""
    table: list[TcpSocket] = []
    for name in ("tcp", "tcp6"):
        try:
            with open(f"{PROC}/net/{name}", encoding="ascii") as stream:
                table += parse_tcp_table(stream.read())
        except (OSError, ValueError, IndexError):
            continue
    anywhere = ("0.0.0.0", "::")
    return [entry for entry in table if entry.port == port and (entry.address == address or entry.address in anywhere or address in anywhere)]


def holder_of(inode: str) -> Process | None:
    for pid, process in read_processes().items():
        try:
            handles = os.listdir(f"{PROC}/{pid}/fd")
        except OSError:
            continue
        for handle in handles:
            try:
                if os.readlink(f"{PROC}/{pid}/fd/{handle}") == f"socket:[{inode}]":
                    return process
            except OSError:
                continue
    return None


def port_problem(wanted: Port) -> str | None:
    error = bind_error(wanted.address, wanted.port)
    if error is None:
        return None
    text = f"port {host_port(wanted.address, wanted.port)} ({wanted.what}) cannot be bound: {reason_of(error)}"
    if error.errno != errno.EADDRINUSE:
        return text
    sockets = sockets_at(wanted.address, wanted.port)
    if sockets and all(entry.inode == "0" for entry in sockets):
        return None     # ended connections (TIME_WAIT): servers bind with SO_REUSEADDR, which passes these
    listening = next((entry for entry in sockets if entry.state == TCP_LISTEN), None)
    if listening is None:
        return f"{text}, by a process that does not listen (a loading engine, or a connection that was given this port)"
    holder = holder_of(listening.inode)
    return f"{text}, by {f'process {holder.pid} ({holder.name})' if holder is not None else 'a process that this user may not see'}"


def check_ports(shard: Shard) -> list[str]:
    return [problem for problem in map(port_problem, shard.listen_ports) if problem is not None]


def check_gpus(gpus: Sequence[Gpu], root: str) -> list[str]:
    """Compare with the driver's list. A driver that was not initialised yet shows UUIDs as `GPU-????`: then the PCI address decides."""
    if not os.path.isdir(root):
        return []
    known, unknown = set(), set()
    for name in os.listdir(root):
        try:
            with open(os.path.join(root, name, "information"), encoding="utf-8", errors="replace") as stream:
                match = re.search(r"^GPU UUID:\s*(\S+)", stream.read(), re.MULTILINE)
        except OSError:
            match = None
        if match is None or "?" in match.group(1):
            unknown.add(name.lower())
        else:
            known.add(match.group(1))
    missing = [gpu for gpu in gpus if gpu.uuid.startswith("GPU-") and gpu.uuid not in known and not could_be(gpu, unknown)]
    return [f"GPU {gpu.uuid}{f' ({gpu.pci_bdf})' if gpu.pci_bdf else ''} is not in this host: the driver lists {', '.join(sorted(known)) or 'none'}"
            for gpu in missing]


def could_be(gpu: Gpu, unknown: Iterable[str]) -> bool:
    return gpu.pci_bdf.lower() in unknown if gpu.pci_bdf is not None else bool(list(unknown))


def findings(shard: Shard, credentials: str | None, ports: bool = True) -> list[str]:
    """What would stop a start now, one line each. It changes nothing."""
    return [*check_executables(shard), *check_secrets(shard, credentials), *check_work_dir(shard.work_dir), *check_addresses(shard),
            *(check_ports(shard) if ports else []), *check_gpus(shard.gpus, NVIDIA_GPUS)]


def running_supervisor(state_dir: str) -> int | None:
    """The pid of the run_shard.py that runs in this state directory, by state.json: readable for everyone, and no lock is touched."""
    previous = State.read(state_dir)
    pid = previous.get("supervisor_pid")
    return pid if isinstance(pid, int) and previous.get("stage") not in ("stopped", "failed") and pid != os.getpid() and is_run_shard(pid) else None


def check(shard: Shard, credentials: str | None) -> int:
    supervisor = running_supervisor(shard.state_dir)
    found = [f"run_shard.py already runs this shard as process {supervisor}"] if supervisor is not None else []
    found += findings(shard, credentials, ports=supervisor is None)     # its ports are its own then
    sys.stdout.write("".join(f"{line}\n" for line in found))
    if not found:
        log("nothing would stop this shard from starting")
    return 1 if found else 0


# ---------------------------------------------------------------------------------------------------------------------------------
# Talking to the service manager and to readers of state.json


class Notify:
    """sd_notify(3) without a library. Does nothing when there is no NOTIFY_SOCKET."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        self._socket: socket.socket | None = None
        self._address = "\0" + address[1:] if address.startswith("@") else address
        if address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)
        self._period = self._watchdog_period(environ) if address else None
        self._due = time.monotonic()

    @staticmethod
    def _watchdog_period(environ: Mapping[str, str]) -> float | None:
        if environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
            return None     # meant for another process (sd_watchdog_enabled(3))
        text = environ.get("WATCHDOG_USEC", "")
        return int(text) / 2e6 if text.isdecimal() and int(text) > 0 else None

    def send(self, *lines: str) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendto("\n".join(line.replace("\n", " ") for line in lines).encode("utf-8", "replace"), self._address)
        except BlockingIOError:
            pass        # a service manager that is behind will get the next one
        except OSError as error:
            log(f"the service manager cannot be notified: {reason_of(error)}")
            self._socket = self._period = None

    def seconds_to_beat(self) -> float:
        return math.inf if self._period is None else max(0.0, self._due - time.monotonic())

    def beat(self) -> None:
        if self._period is not None and time.monotonic() >= self._due:
            self._due = time.monotonic() + self._period
            self.send("WATCHDOG=1")


def boot_id() -> str | None:
    try:
        with open(f"{PROC}/sys/kernel/random/boot_id", encoding="ascii") as stream:
            return stream.read().strip()
    except OSError:
        return None


def earlier_end(previous: Mapping[str, Any], boot: str | None) -> dict[str, Any] | None:
    """Why the run before this one ended, by the state that it left. A run that left no end was killed, or the host went down."""
    if not previous:
        return None
    if previous.get("stage") in ("stopped", "failed"):
        end = previous.get("last_end")
        return end if isinstance(end, dict) else None
    how = "was killed (SIGKILL) or crashed" if boot is not None and previous.get("boot_id") == boot else "ended with the host"
    return {"launch": None, "code": None, "signal": None, "at": None,
            "reason": f"run_shard.py of run {previous.get('run_id')} {how} in stage {previous.get('stage')}"}


class State:
    """state.json: what this run does now. Written by rename, so that a reader never sees half of it."""

    def __init__(self, shard: Shard, run_id: str, notify: Notify) -> None:
        previous, boot, now = self.read(shard.state_dir), boot_id(), round(time.time(), 3)
        same = boot is not None and previous.get("boot_id") == boot and previous.get("fingerprint") == shard.fingerprint
        restarts = previous.get("restarts")
        self._notify = notify
        self._directory = shard.state_dir
        self._write_failed = False
        self._content: dict[str, Any] = {
            "schema": SCHEMA, "replica": shard.replica, "rank": shard.rank, "fingerprint": shard.fingerprint, "run_id": run_id, "boot_id": boot,
            "stage": "starting", "detail": "", "stage_since": now, "started_at": now, "supervisor_pid": os.getpid(), "launches": [],
            "restarts": restarts + 1 if same and isinstance(restarts, int) else 0, "last_end": earlier_end(previous, boot),
        }
        self.forget_readiness()
        self._publish()

    @staticmethod
    def read(state_dir: str) -> dict[str, Any]:
        try:
            with open(os.path.join(state_dir, "state.json"), encoding="utf-8") as stream:
                content = json.load(stream)
        except (OSError, ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}

    def forget_readiness(self) -> None:
        """ready.json speaks of one run that serves; it must not outlive that."""
        try:
            os.unlink(os.path.join(self._directory, "ready.json"))
        except FileNotFoundError:
            pass
        except OSError as error:
            log(f"{os.path.join(self._directory, 'ready.json')} cannot be removed: {reason_of(error)}")

    def stage(self, stage: str, detail: str) -> None:
        if (stage, detail) == (self._content["stage"], self._content["detail"]):
            return
        if stage != self._content["stage"]:
            self._content["stage_since"] = round(time.time(), 3)
        self._content.update(stage=stage, detail=detail)
        self._publish()

    def launches(self, started: Iterable[Started]) -> None:
        self._content["launches"] = [entry.as_state() for entry in started]
        self._write()

    def end(self, stage: str, detail: str, end: End) -> None:
        self._content["last_end"] = {"launch": end.launch, "code": end.code, "signal": end.signal, "at": round(time.time(), 3), "reason": detail}
        self.stage(stage, detail)

    def _publish(self) -> None:
        self._write()
        self._notify.send(f"STATUS={self._content['stage']}{': ' if self._content['detail'] else ''}{self._content['detail']}")

    def _write(self) -> None:
        path = os.path.join(self._directory, "state.json")
        draft = f"{path}.{os.getpid()}"
        try:
            # Readable for shard_ready and node_facts of another user; run() has set the umask.
            handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            with open(handle, "w", encoding="utf-8") as stream:
                json.dump(self._content, stream)
            os.rename(draft, path)
            self._write_failed = False
        except OSError as error:
            if not self._write_failed:      # a full disk is no reason to stop serving
                log(f"{path} cannot be written: {reason_of(error)}")
            self._write_failed = True


class Lock:
    """One run_shard.py for each state directory. The kernel drops the lock with the process, however that ends."""

    def __init__(self, state_dir: str) -> None:
        path = os.path.join(state_dir, "lock")
        try:
            os.makedirs(state_dir, mode=0o755, exist_ok=True)
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise Refusal(f"state directory {state_dir} cannot be used: {error.filename or path}: {reason_of(error)}", EX_CANTCREAT) from None
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = os.read(self._handle, 32).decode("ascii", "replace").strip() or "unknown"
            raise Refusal(f"already running: process {other} holds {path}", EX_TEMPFAIL) from None
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, f"{os.getpid()}\n".encode("ascii"), 0)

    def release(self) -> None:
        os.close(self._handle)


# ---------------------------------------------------------------------------------------------------------------------------------
# Children and events


class Events:
    """Signals, time and sockets, waited for together in the one thread of this program."""

    STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def __init__(self, notify: Notify) -> None:
        self.stop_signal: str | None = None
        self._notify = notify
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._wake, selectors.EVENT_READ)
        # The kernel's delivery writes to the socket, so a signal between a look and the wait that follows it is not lost.
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for number in self.STOP_SIGNALS:
            signal.signal(number, self._on_stop)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])

    def _on_stop(self, number: int, frame: object) -> None:
        if self.stop_signal is None:
            self.stop_signal = signal_name(number)

    def wait(self, seconds: float, connecting: socket.socket | None = None) -> None:
        """Return after `seconds`, or earlier when there is something to look at: a signal, an attempt to connect that is decided."""
        if connecting is not None:
            self._selector.register(connecting, selectors.EVENT_WRITE)
        try:
            limit = min(seconds, self._notify.seconds_to_beat())
            self._selector.select(None if math.isinf(limit) else max(0.0, limit))
        finally:
            if connecting is not None:
                self._selector.unregister(connecting)
        try:
            self._wake.recv(4096)
        except BlockingIOError:
            pass
        self._notify.beat()


class Exit(NamedTuple):
    code: int | None
    signal: int | None
    at: float

    @property
    def signal_text(self) -> str | None:
        return None if self.signal is None else signal_name(self.signal)

    def __str__(self) -> str:
        return f"exit code {self.code}" if self.signal is None else f"{self.signal_text}"


@dataclass
class Started:
    """A launch that was started. `exit` is None while it runs."""

    launch: Launch
    process: subprocess.Popen[bytes]
    started_at: float
    exit: Exit | None = None

    @property
    def pid(self) -> int:
        return self.process.pid

    def as_state(self) -> dict[str, Any]:
        ended = None if self.exit is None else {"code": self.exit.code, "signal": self.exit.signal_text, "at": self.exit.at}
        return {"name": self.launch.name, "pid": self.pid, "started_at": self.started_at, "exit": ended}


def prctl_function() -> Callable[[int, int], int] | None:
    """prctl(2) by way of ctypes; None where Python was built without it."""
    try:
        import ctypes  # pylint: disable=import-outside-toplevel
        function = ctypes.CDLL(None, use_errno=True).prctl
    except (ImportError, OSError, AttributeError):
        return None
    return lambda option, value: int(function(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)))


@dataclass
class Children:
    """The launches that were started and, by adoption, all that descends from them."""

    marker: str
    started: list[Started] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._prctl = prctl_function()
        if self._prctl is None or self._prctl(PR_SET_CHILD_SUBREAPER, 1) != 0:
            log("orphans of the launches cannot be adopted here (prctl): they are found by their environment only")

    def spawn(self, launch: Launch, words: Sequence[str], environment: Mapping[bytes, bytes], directory: str) -> Started:
        """Start a launch in a session of its own, so that no terminal's or group's signal reaches it past us. Raises OSError."""
        process = subprocess.Popen(
            [encode(word) for word in words], env=environment, cwd=encode(directory), stdin=subprocess.DEVNULL,
            start_new_session=True, close_fds=True, preexec_fn=self._tie_to_parent(),  # noqa: PLW1509 (one thread)
        )
        started = Started(launch, process, round(time.time(), 3))
        self.started.append(started)
        return started

    def _tie_to_parent(self) -> Callable[[], None]:
        """The child dies with us even when we are killed. The kernel ties it to the *thread* that forks: this program has only one."""
        parent, prctl = os.getpid(), self._prctl

        def tie() -> None:
            if prctl is not None:
                prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
            if os.getppid() != parent:      # we died before the tie was made
                os._exit(EX_OSERR)
        return tie

    def reap(self) -> bool:
        """Collect whatever has ended, adopted orphans too. True when a launch was among it."""
        launch_ended = False
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return launch_ended
            if pid == 0:
                return launch_ended
            for entry in self.started:
                if entry.pid == pid and entry.exit is None:
                    killed = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
                    entry.exit = Exit(os.WEXITSTATUS(status) if killed is None else None, killed, round(time.time(), 3))
                    entry.process.returncode = entry.exit.code if killed is None else -killed      # so that Popen does not wait for it
                    launch_ended = True

    def living(self) -> list[Started]:
        return [entry for entry in self.started if entry.exit is None]

    def members(self) -> dict[int, Process]:
        self.reap()
        return members_of_run(self.marker)


# ---------------------------------------------------------------------------------------------------------------------------------
# One run of the shard


class End(NamedTuple):
    """Why a run is over. `launch` is the one whose end it was, null when there was none; `exit_code` is run_shard.py's."""

    reason: str
    exit_code: int
    launch: str | None = None
    code: int | None = None
    signal: str | None = None
    requested: bool = False


class RunOver(Exception):
    def __init__(self, end: End) -> None:
        super().__init__(end.reason)
        self.end = end


def judge(name: str, is_engine: bool, ended: Exit) -> End:
    """What the end of a launch that nobody asked to stop means. No exit code is success: engines leave with 0 after fatal errors
    (vllm#48966; the followers of SGLang and vLLM do so when a worker of theirs dies)."""
    role = "engine" if is_engine else "sidecar"
    if ended.signal is not None:
        hint = ", which was not sent from here: see the kernel's log for the OOM killer" if ended.signal == signal.SIGKILL else ""
        return End(f"{role} {name} was ended by {ended.signal_text}{hint}", 128 + ended.signal, name, None, ended.signal_text)
    if ended.code == 0:
        return End(f"{role} {name} ended by itself with exit code 0, which is not success here", EX_SOFTWARE, name, 0)
    return End(f"{role} {name} ended with exit code {ended.code}", ended.code or EX_SOFTWARE, name, ended.code)


class Run:
    """From the first look for leftovers to the end of the last process, under one run id. The lock is held by the caller."""

    def __init__(self, shard: Shard, run_id: str, events: Events, notify: Notify, credentials: str | None) -> None:
        self._shard = shard
        self._events = events
        self._notify = notify
        self._credentials = credentials
        self._children = Children(f"{shard.identity}/{run_id}")
        self._state = State(shard, run_id, notify)

    def execute(self) -> End:
        """Run the shard until it is over, end all of it, and say why. Raises nothing: a fault of our own is an end like any other."""
        try:
            self._prepare()
            self._start_all()
            while True:
                self._pause(math.inf)
        except RunOver as over:
            end = over.end
        except Exception as error:  # noqa: BLE001 pylint: disable=broad-except
            end = End(f"internal error of run_shard.py: {type(error).__name__}: {error}", EX_SOFTWARE)
        log(f"stopping: {end.reason}")
        return self._finish(end, self._stop(end))

    # -- start

    def _prepare(self) -> None:
        shard = self._shard
        left = self._sweep()
        try:
            os.makedirs(shard.work_dir, mode=0o755, exist_ok=True)
        except OSError:
            pass        # the checks say what is wrong with it
        found = [f"process {process} of an earlier run of this shard cannot be ended" for process in left]
        found += findings(shard, self._credentials)
        for finding in found:
            log(f"check: {finding}")
        if found:
            raise RunOver(End("; ".join(found), EX_UNAVAILABLE))
        self._look()
        self._notify.send("READY=1")    # from here on a long load is no start that hangs

    def _sweep(self) -> list[Process]:
        """End what an earlier run of this shard has left: it would keep the GPUs, the ports and the peers busy."""
        identity = self._shard.identity
        found = leftovers_of(identity)
        if not found:
            return []
        for process in found.values():
            log(f"process {process} is left of run {read_marker(process.pid) or identity}: ending it")
        self._state.stage("starting", f"ending {len(found)} processes of an earlier run")
        return end_processes(lambda: leftovers_of(identity), self._events.wait, LEFTOVER_GRACE_SECONDS)

    def _start_all(self) -> None:
        for launch in self._shard.launches:
            is_engine = launch is self._shard.launches[-1]
            for endpoint in launch.wait_for:
                self._wait_for(launch, endpoint)
            started = self._start(launch)
            self._state.stage("running" if is_engine else "sidecars", f"{launch.name} runs as process {started.pid}")

    def _start(self, launch: Launch) -> Started:
        shard = self._shard
        self._look()
        try:
            environment = complete_environment(shard, launch, self._children.marker, self._credentials)
            started = self._children.spawn(launch, command_words(shard, launch, self._credentials), environment, shard.directory)
        except Refusal as refusal:
            raise RunOver(End(f"launch {launch.name}: {refusal.text}", refusal.code, launch.name)) from None
        except OSError as error:
            raise RunOver(End(f"launch {launch.name}: {launch.path} cannot be started: {reason_of(error)}", EX_UNAVAILABLE, launch.name)) from None
        log(f"launch {launch.name} started as process {started.pid}: {launch.path}")
        self._state.launches(self._children.started)
        return started

    # -- waiting

    def _look(self) -> None:
        """Raise RunOver when a launch has ended or a stop was asked for. The stop comes first: a service manager that signals a whole
        control group ends the engine by the same stop."""
        if self._children.reap():
            self._state.launches(self._children.started)
        if self._events.stop_signal is not None:
            raise RunOver(End(f"{self._events.stop_signal} received", 0, requested=True))
        for entry in self._children.started:
            if entry.exit is not None:
                raise RunOver(judge(entry.launch.name, entry.launch is self._shard.launches[-1], entry.exit))

    def _pause(self, seconds: float, connecting: socket.socket | None = None) -> None:
        self._look()
        self._events.wait(seconds, connecting)
        self._look()

    def _wait_for(self, launch: Launch, endpoint: Endpoint) -> None:
        """Until something listens there. No limit of its own: whoever asked for the deployment has the deadline."""
        since, logged = utc(time.time()), -math.inf
        while True:
            problem = self._connect(endpoint)
            if problem is None:
                if logged > -math.inf:
                    log(f"launch {launch.name}: {endpoint} listens")
                return
            detail = f"launch {launch.name} waits for {endpoint} since {since} ({problem})"
            self._state.stage("waiting", detail)
            if time.monotonic() - logged >= WAIT_LOG_SECONDS:
                logged = time.monotonic()
                log(detail)
            self._sleep(PROBE_PERIOD_SECONDS)

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._pause(deadline - time.monotonic())

    def _connect(self, endpoint: Endpoint) -> str | None:
        """None when a connection was made, else why not."""
        try:
            return self._probe(endpoint)
        except OSError as error:        # no IPv6 on this host, no such interface in a link-local address
            return reason_of(error)

    def _probe(self, endpoint: Endpoint) -> str | None:
        with socket.socket(socket.AF_INET6 if ":" in endpoint.address else socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            code = probe.connect_ex((endpoint.address, endpoint.port))
            deadline = time.monotonic() + PROBE_TIMEOUT_SECONDS
            while code in (errno.EINPROGRESS, errno.EALREADY):
                if time.monotonic() >= deadline:
                    return "no answer"
                self._pause(deadline - time.monotonic(), probe)
                code = probe.connect_ex((endpoint.address, endpoint.port))
            if code not in (0, errno.EISCONN):
                return os.strerror(code)
            try:
                to_itself = probe.getsockname() == probe.getpeername()
            except OSError:
                return None     # accepted, and reset by the peer at once
            # A port of the ephemeral range on this host can be given to the probe itself, which then connects to itself.
            return os.strerror(errno.ECONNREFUSED) if to_itself else None

    # -- stop

    def _stop(self, end: End) -> list[Process]:
        """End the engine, then the sidecars in reverse order, then all that is left of them. Returns what could not be ended."""
        self._state.forget_readiness()
        self._state.stage("stopping", end.reason)
        self._notify.send("STOPPING=1")
        deadline = time.monotonic() + self._shard.stop_seconds
        living = list(reversed(self._children.living()))
        for position, entry in enumerate(living):
            self._terminate(entry, deadline, last=position == len(living) - 1)
        while self._children.living() and time.monotonic() < deadline:
            self._events.wait(TICK_SECONDS)
            self._children.reap()
        for entry in self._children.living():
            log(f"launch {entry.launch.name} (process {entry.pid}) did not end within {self._shard.stop_seconds:g} seconds")
        grace = min(ORPHAN_GRACE_SECONDS, deadline - time.monotonic())
        left = end_processes(self._children.members, self._events.wait, grace)
        self._children.reap()
        self._state.launches(self._children.started)
        return left

    def _terminate(self, entry: Started, deadline: float, last: bool) -> None:
        """SIGTERM to one launch's own process, which knows best how to stop its children; the earlier ones leave time for the later."""
        if entry.exit is None:
            os.kill(entry.pid, signal.SIGTERM)      # not Popen's method: that may collect the exit status behind reap()'s back
        share = deadline if last else time.monotonic() + 0.75 * (deadline - time.monotonic())
        while entry.exit is None and time.monotonic() < share:
            self._events.wait(TICK_SECONDS)
            self._children.reap()

    def _finish(self, end: End, left: list[Process]) -> End:
        if left:
            end = end._replace(reason=f"{end.reason}; could not be ended: {listing(left)}", exit_code=end.exit_code or EX_OSERR)
        self._state.end("stopped" if end.requested and not left else "failed", end.reason, end)
        log(f"{'stopped' if end.requested else 'failed'}: {end.reason}; exit code {end.exit_code}")
        return end


def run(shard: Shard, environ: Mapping[str, str]) -> int:
    """Hold the lock, run the shard once, return the exit code. The service manager starts it again."""
    os.umask(0o022)
    notify = Notify(environ)
    events = Events(notify)
    lock = Lock(shard.state_dir)
    try:
        run_id = os.urandom(6).hex()
        log(f"{shard.replica} rank {shard.rank} of {shard.nodes}, fingerprint {shard.fingerprint}, run {run_id}")
        return Run(shard, run_id, events, notify, environ.get("CREDENTIALS_DIRECTORY")).execute().exit_code
    finally:
        lock.release()


class Arguments(argparse.ArgumentParser):
    """An argument parser whose complaint is one line like any other."""

    def error(self, message: str) -> NoReturn:
        raise Refusal(f"{message} (run_shard.py --help shows the usage)", EX_USAGE)


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = Arguments(prog="run_shard.py", allow_abbrev=False, description="Run one shard of a replica.")
    parser.add_argument("directory", nargs="?", default=os.path.dirname(os.path.realpath(__file__)),
                        help="the revision's directory, with launch.json and shard.env (default: where run_shard.py lies)")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--show", action="store_true", help="print each launch as a shell command, secrets masked, and run nothing")
    action.add_argument("--check", action="store_true", help="print what would stop a start now, one line each; exit code 1 when there is any")
    parser.add_argument("--launch", metavar="NAME", help="with --show: only this launch")
    chosen = parser.parse_args(words)
    if chosen.launch is not None and not chosen.show:
        parser.error("--launch goes with --show")
    return chosen


def main(words: Sequence[str] | None = None) -> int:
    try:
        chosen = arguments(words)
        shard = read_shard(chosen.directory)
        if chosen.show or chosen.check:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)       # `--show | head` ends quietly
        if chosen.show:
            return show(shard, chosen.launch)
        if chosen.check:
            return check(shard, os.environ.get("CREDENTIALS_DIRECTORY"))
        return run(shard, os.environ)
    except Refusal as refusal:
        log(refusal.text)
        return refusal.code


if __name__ == "__main__":
    sys.exit(main())
