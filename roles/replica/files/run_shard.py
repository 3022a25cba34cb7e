# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run one shard of a replica: start its launches in order with those of the other ranks, and end every process of it when one of them ends.

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
- One replica, one fate: with several nodes every rank keeps an authenticated tie to rank 0 (docs/decisions/0009-the-tie.md). A run starts
  when all ranks are tied and have no process of an earlier one; the end of any rank's part is the end of the run on all; then all start
  again together under a new run id, with a back-off and a limit. A single node does the same alone.

Exit codes: 0 after a stop that was asked for; 79 given up, after as many failed runs as `restart.limit` in launch.json allows; of sysexits.h:
64 usage, 69 refused by its checks, 71 processes could not be ended, 73 the state directory cannot be used, 75 already running, 78 launch.json
or shard.env is damaged. Without `restart` in launch.json nothing is started again, and the code is the engine's or sidecar's own, 128+n when
signal n ended it, 70 when it ended by itself with 0.
"""

from __future__ import annotations

import argparse
import array
import dataclasses
import errno
import fcntl
import hashlib
import hmac
import ipaddress
import json
import math
import os
import pwd
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
EX_GIVEN_UP = 79  # after the last of sysexits.h; the service file says that nothing starts it again

SCHEMA = 1
MARKER = "RANKZERO_SHARD"
SECRET_MASK = "(secret)"

DEFAULT_STOP_SECONDS = 30.0
WAIT_LOG_SECONDS = 30.0  # how often a launch that still waits for a port says so again
PROBE_PERIOD_SECONDS = 0.5  # between two attempts to connect
PROBE_TIMEOUT_SECONDS = 3.0  # a host that drops packets answers nothing at all
ORPHAN_GRACE_SECONDS = 3.0  # for what an ended launch has left running, before SIGKILL
LEFTOVER_GRACE_SECONDS = 5.0  # for what an earlier run has left running, before SIGKILL
KILL_SECONDS = 10.0  # SIGKILL is only late for a process in uninterruptible sleep, in a driver for example
TICK_SECONDS = 0.05
DEFAULT_SILENT_SECONDS = 20.0  # a rank that is not heard of for so long is lost
HANDSHAKE_SECONDS = 5.0  # from connecting to the welcome
OWN_ADDRESS_SECONDS = 120.0  # for the network of a host that has just booted
REFUSED_LOG_SECONDS = 30.0  # how often the same refusal of the same address is logged
FAREWELL_SECONDS = 1.0  # for the last lines to the other ranks before this process ends
GPU_CHECK_SECONDS = 60.0  # the driver takes seconds to wake up without persistence mode, and may hang
GPU_SETTLE_SECONDS = 5.0  # the driver gives back the memory of ended processes a moment later
GPU_NOBODYS_MIB = 1024  # more than what the driver and a display take for themselves

MOST_LINE_BYTES = 4096
MOST_GUESTS = 16  # connections to the tie that have not said who they are
MOST_OUTGOING_BYTES = 65536

PROC = "/proc"
NVIDIA_GPUS = "/proc/driver/nvidia/gpus"
HCA_PATIENCE_SECONDS = 30.0  # below the unit's TimeoutStartSec
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
TCP_LISTEN = "0A"  # net/tcp_states.h
SIOCGIFCONF = 0x8912  # linux/sockios.h

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
ENVIRONMENT_LINE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)='((?:[^']|'\\'')*)'")
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")

# Variables that make a loader, an interpreter or a shell run other code, or that belong to the service manager's talk with us. Whatever
# wrote them, they are not passed on. LD_LIBRARY_PATH, PATH, HOME and PYTHONPATH come from engine builds and stay.
UNSAFE_PREFIXES = ("BASH_FUNC_", "DYLD_", "LD_", "LISTEN_", "WATCHDOG_")
UNSAFE_EXCEPT = frozenset({"LD_LIBRARY_PATH"})
UNSAFE_NAMES = frozenset(
    {
        "GCONV_PATH",
        "GETCONF_DIR",
        "GLIBC_TUNABLES",
        "HOSTALIASES",
        "LOCPATH",
        "MALLOC_TRACE",
        "NLSPATH",
        "RESOLV_HOST_CONF",
        "BASHOPTS",
        "BASH_ENV",
        "BASH_LOADABLES_PATH",
        "CDPATH",
        "ENV",
        "IFS",
        "PROMPT_COMMAND",
        "PS4",
        "SHELLOPTS",
        "ZDOTDIR",
        "PYTHONBREAKPOINT",
        "PYTHONCASEOK",
        "PYTHONEXECUTABLE",
        "PYTHONHOME",
        "PYTHONINSPECT",
        "PYTHONPLATLIBDIR",
        "PYTHONPYCACHEPREFIX",
        "PYTHONSTARTUP",
        "PYTHONUSERBASE",
        "PYTHONWARNINGS",
        "JAVA_TOOL_OPTIONS",
        "JDK_JAVA_OPTIONS",
        "_JAVA_OPTIONS",
        "NODE_OPTIONS",
        "PERL5DB",
        "PERL5LIB",
        "PERL5OPT",
        "RUBYLIB",
        "RUBYOPT",
        "CUDA_INJECTION32_PATH",
        "CUDA_INJECTION64_PATH",
        "NVTX_INJECTION32_PATH",
        "NVTX_INJECTION64_PATH",
        "OPENSSL_CONF",
        "OPENSSL_ENGINES",
        "OPENSSL_MODULES",
        "CREDENTIALS_DIRECTORY",
        "NOTIFY_SOCKET",
        MARKER,
    }
)


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
        os.write(2, f"run_shard: {line}\n".encode("utf-8", "replace"))  # unbuffered: nothing is left to fail when Python ends
    except OSError:
        pass  # who reads the log may go away; the shard must still be looked after and ended


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
    """A TCP address that must be listened on before a launch starts. `ports`: one for each of tie.run_ports where it moves with the run."""

    what: str
    address: str
    port: int
    ports: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.what} at {host_port(self.address, self.port)}"


class Port(NamedTuple):
    """A TCP port that the shard is going to listen on. `ports` as in Endpoint."""

    address: str
    port: int
    what: str
    ports: tuple[int, ...] = ()


class Gpu(NamedTuple):
    uuid: str
    pci_bdf: str | None


class Hca(NamedTuple):
    """A port of an HCA that the launches were told to use, and the GID entry that was the right one when they were planned.

    `gid_index` is null where NCCL finds the entry by its address.
    """

    name: str
    port: int
    gid_index: int | None
    gid_address: str | None

    def __str__(self) -> str:
        return f"HCA port {self.name}:{self.port}"


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
    run_args: Mapping[int, tuple[str, ...]] = field(
        default_factory=dict
    )  # position of an argument that moves with the run -> its text for each of tie.run_ports
    run_env: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # the same for variables


class TieTerms(NamedTuple):
    """How the ranks are tied: where rank 0 listens, which secret all hold, how long silence may last, where the runs meet."""

    address: str
    port: int
    secret: str
    silent_seconds: float
    run_ports: tuple[int, ...]

    def slot(self, number: int) -> int:
        """Which of run_ports the run of this number has."""
        return (number - 1) % len(self.run_ports)

    def port_of_run(self, number: int) -> int:
        return self.run_ports[self.slot(number)]


class Restart(NamedTuple):
    """So many failed runs within the window are too many; the n-th failure is followed by the n-th pause, or the last."""

    limit: int
    window_seconds: float
    backoff: tuple[float, ...]

    def pause(self, failures: int) -> float:
        return self.backoff[min(max(failures, 1), len(self.backoff)) - 1] if self.backoff else 0.0


ONCE = Restart(1, math.inf, ())


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
    interface: str | None = None  # the one that NCCL and Gloo are told to use; it has the first of `addresses`
    hcas: tuple[Hca, ...] = ()
    sysfs_root: str = "/sys"
    tie: TieTerms | None = None
    restart: Restart | None = None

    @property
    def identity(self) -> str:
        return f"{self.replica}/{self.rank}"

    def of_run(self, number: int) -> Shard:
        """The shard with its rendezvous where the ranks meet in this run, so that an engine of an old run cannot meet one of a new."""
        if self.tie is None:
            return self
        slot = self.tie.slot(number)
        return dataclasses.replace(
            self,
            launches=tuple(self._moved(launch, slot) for launch in self.launches),
            listen_ports=tuple(wanted._replace(port=wanted.ports[slot]) if wanted.ports else wanted for wanted in self.listen_ports),
        )

    @staticmethod
    def _moved(launch: Launch, slot: int) -> Launch:
        """Only what the plan marked moves; an argument of the operator's that looks like the port stays."""
        args = [launch.run_args[position][slot] if position in launch.run_args else argument for position, argument in enumerate(launch.args)]
        env = {**launch.env, **{name: values[slot] for name, values in launch.run_env.items()}}
        wait_for = tuple(endpoint._replace(port=endpoint.ports[slot]) if endpoint.ports else endpoint for endpoint in launch.wait_for)
        return dataclasses.replace(launch, args=tuple(args), env=env, wait_for=wait_for)


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

    @staticmethod
    def element(value: Any, where: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 65535:
            damaged(f"{where} must be an integer, 1 to 65535")
        return value

    @staticmethod
    def pause(value: Any, where: str) -> float:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf:
            damaged(f"{where} must be a number of seconds, at least 0")
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


def parse_endpoints(entry: Fields, runs: int) -> tuple[Endpoint, ...]:
    endpoints = []
    if entry.has("wait_for_leader_port"):
        leader = entry.object("wait_for_leader_port")
        endpoints.append(Endpoint("the leader", leader.address("address"), leader.integer("port", 1, 65535), parse_ports(leader, runs)))
    for rank in entry.objects("wait_for_ranks"):
        endpoints.append(Endpoint(f"rank {rank.integer('rank', 0)}", rank.address("address"), rank.integer("port", 1, 65535), parse_ports(rank, runs)))
    return tuple(endpoints)


def parse_ports(entry: Fields, runs: int) -> tuple[int, ...]:
    """One port for each of tie.run_ports, or none where the port stays."""
    ports = tuple(entry.element(item, where) for where, item in entry.items("ports"))
    if ports and len(ports) != runs:
        damaged(f"{entry.where}.ports must be one for each of tie.run_ports")
    return ports


def parse_launch(entry: Fields, runs: int) -> Launch:
    args = []
    for where, argument in entry.items("args", required=True):
        if not isinstance(argument, str):
            damaged(f"{where} must be a string")
        args.append(usable_text(argument, where))
    secret_env = entry.variables("secret_env")
    for variable, file_name in secret_env.items():
        if PLAIN_NAME.fullmatch(file_name) is None:
            damaged(f"{entry.where}.secret_env.{variable} must be the name of a file in secrets/")
    secret_args = {
        item.integer("position", 0, len(args) - 1): item.matching("secret", PLAIN_NAME, "the name of a file in secrets/")
        for item in entry.objects("secret_args")
    }
    return Launch(
        name=entry.matching("name", PLAIN_NAME, "a name of letters, digits, '_', '.' and '-'"),
        path=entry.absolute_path("path"),
        args=tuple(args),
        env=entry.variables("env"),
        secret_env=secret_env,
        wait_for=parse_endpoints(entry, runs),
        secret_args=secret_args,
        run_args=parse_run_args(entry, args, runs),
        run_env=parse_run_env(entry, runs),
    )


def parse_run_args(entry: Fields, args: Sequence[str], runs: int) -> dict[int, tuple[str, ...]]:
    """What an argument is for each of tie.run_ports; for the first it must be what stands there."""
    found = {}
    for marked in entry.objects("run_args"):
        position, values = marked.integer("position", 0, max(len(args) - 1, 0)), parse_values(marked, runs)
        if not args or values[0] != args[position]:
            damaged(f"{marked.where}.values must begin with args[{position}]")
        found[position] = values
    return found


def parse_run_env(entry: Fields, runs: int) -> dict[str, tuple[str, ...]]:
    return {marked.matching("name", VARIABLE, "the name of a variable"): parse_values(marked, runs) for marked in entry.objects("run_env")}


def one_line(item: object, where: str) -> str:
    if not isinstance(item, str) or "\n" in item:
        damaged(f"{where} must be a string of one line")
    return usable_text(item, where)


def parse_values(marked: Fields, runs: int) -> tuple[str, ...]:
    values = tuple(one_line(item, where) for where, item in marked.items("values", required=True))
    if len(values) != runs or not values:
        damaged(f"{marked.where}.values must be one for each of tie.run_ports")
    return values


def parse_tie(top: Fields) -> TieTerms | None:
    if not top.has("tie"):
        return None
    tie = top.object("tie")
    ports = tuple(tie.element(item, where) for where, item in tie.items("run_ports", required=True))
    if not ports:
        damaged(f"{tie.where}.run_ports must not be empty")
    silent = tie.seconds("silent_seconds", DEFAULT_SILENT_SECONDS)
    if silent < 0.2:
        damaged(f"{tie.where}.silent_seconds must be at least 0.2")
    return TieTerms(tie.address("address"), tie.integer("port", 1, 65535), tie.matching("secret", PLAIN_NAME, "the name of a file in secrets/"), silent, ports)


def parse_restart(top: Fields) -> Restart | None:
    if not top.has("restart"):
        return None
    restart = top.object("restart")
    return Restart(
        restart.integer("limit", 1), restart.seconds("window_seconds", 600.0), tuple(restart.pause(item, where) for where, item in restart.items("backoff"))
    )


def parse_shard(text: str, directory: str, environment: Mapping[str, str]) -> Shard:
    """Validate launch.json. Raises Refusal naming the field; unknown keys are left to those who read them."""
    try:
        top = Fields(json.loads(text), "launch.json")
    except (ValueError, RecursionError) as error:
        damaged(f"launch.json is damaged: not JSON ({error})")
    if top.integer("schema", 0) != SCHEMA:
        damaged(f"launch.json has schema {top.integer('schema', 0)}, this run_shard.py reads schema {SCHEMA}: deploy the replica again")
    tie = parse_tie(top)
    runs = len(tie.run_ports) if tie is not None else 0
    launches = tuple(parse_launch(entry, runs) for entry in top.objects("launches", required=True))
    if not launches:
        damaged("launch.json.launches must not be empty")
    if len({launch.name for launch in launches}) != len(launches):
        damaged("launch.json.launches has two launches of one name")
    nodes, paths = top.integer("nodes", 1), top.object("paths")
    return Shard(
        directory=directory,
        environment=environment,
        launches=launches,
        nodes=nodes,
        rank=top.integer("rank", 0, nodes - 1),
        replica=top.matching("replica", PLAIN_NAME, "a name of letters, digits, '_', '.' and '-'"),
        fingerprint=top.text("fingerprint"),
        state_dir=paths.absolute_path("state_dir"),
        work_dir=paths.absolute_path("work_dir"),
        stop_seconds=top.seconds("stop_seconds", DEFAULT_STOP_SECONDS),
        gpus=tuple(Gpu(gpu.text("uuid"), gpu.text("pci_bdf") if gpu.has("pci_bdf") else None) for gpu in top.objects("gpus")),
        listen_ports=tuple(
            Port(port.address("address"), port.integer("port", 1, 65535), port.text("what"), parse_ports(port, runs)) for port in top.objects("listen_ports")
        ),
        addresses=tuple(
            ip_address(address, where) if isinstance(address, str) else damaged(f"{where} must be an IP address") for where, address in top.items("addresses")
        ),
        interface=top.text("interface") if top.has("interface") else None,
        hcas=tuple(parse_hca(entry) for entry in top.objects("hcas")),
        sysfs_root=top.absolute_path("sysfs_root") if top.has("sysfs_root") else "/sys",
        tie=tie if nodes > 1 else None,
        restart=parse_restart(top),
    )


def parse_hca(entry: Fields) -> Hca:
    return Hca(
        entry.matching("name", PLAIN_NAME, "a name of letters, digits, '_', '.' and '-'"),
        entry.integer("port", 1, 255),
        entry.integer("gid_index", 0) if entry.has("gid_index") else None,
        entry.address("gid_address") if entry.has("gid_address") or entry.has("gid_index") else None,
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
    args = [
        secret_path(shard, launch.secret_args[position], credentials) if position in launch.secret_args else argument
        for position, argument in enumerate(launch.args)
    ]
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
        lines += [
            f"# {name} is the content of {os.path.join(shard.directory, 'secrets', file_name)}"
            for name, file_name in sorted(launch.secret_env.items())
            if not is_unsafe(name)
        ]
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
    head, dummy, tail = text.rpartition(")")
    pid, dummy, name = head.partition(" (")
    values = tail.split()
    return Process(int(pid), int(values[1]), values[0], int(values[19]), name)


def read_process(pid: int) -> Process | None:
    try:
        with open(f"{PROC}/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            return parse_stat(stream.read())
    except (OSError, ValueError, IndexError):
        return None  # it has ended


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
    return next((entry[len(prefix) :].decode("utf-8", "replace") for entry in entries if entry.startswith(prefix)), None)


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


def unit_of(pid: int, replica: str) -> bool:
    """Whether the process is in the control group of this replica's systemd unit. Elsewhere a group may hold anybody."""
    try:
        with open(f"{PROC}/{pid}/cgroup", encoding="utf-8", errors="replace") as stream:
            return any(f"inference-{replica}.service" in line.strip().split("/") for line in stream)
    except OSError:
        return False


def members_of_run(marker: str) -> dict[int, Process]:
    """Living processes of this run: what descends from us, what carries this run's marker, and what is in our unit's control group."""
    processes = read_processes()
    kept_out = {os.getpid(), *ancestors(processes, os.getpid())}
    found = descendants(processes, os.getpid())
    found.update({pid: process for pid, process in processes.items() if pid not in kept_out and read_marker(pid) == marker})
    replica = marker.partition("/")[0]
    if unit_of(os.getpid(), replica):
        found.update({pid: process for pid, process in processes.items() if pid not in kept_out and unit_of(pid, replica)})
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
        handle = -1  # before Linux 5.3, or forbidden by a container's seccomp filter
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
        return None  # a program may be executable and not readable
    words = first[2:].split() if first.startswith(b"#!") else []
    if words and not os.access(words[0], os.X_OK):
        return f"{path} needs the interpreter {words[0].decode('utf-8', 'replace')}, which is missing or not executable"
    return None


def check_secrets(shard: Shard, credentials: str | None) -> list[str]:
    found = []
    of_tie = {shard.tie.secret} if shard.tie is not None else set()
    for name in sorted(of_tie | {name for launch in shard.launches for name in (*launch.secret_env.values(), *launch.secret_args.values())}):
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


def check_interface(shard: Shard) -> list[str]:
    """Whether the planned address still is on the planned interface: a new kernel may name it anew, and NCCL and Gloo are told the name (nccl#1837)."""
    if shard.interface is None or not shard.addresses or ipaddress.ip_address(shard.addresses[0]).is_loopback:
        return []
    address = shard.addresses[0]
    holders = interfaces_with(address)
    if not holders or shard.interface in holders:
        return []  # an address that nobody has is told by check_addresses
    return [f"address {address} is on interface {', '.join(holders)} now, not on {shard.interface}. Deploy the replica again to plan it anew"]


def interfaces_with(address: str) -> list[str]:
    """The interfaces that have an address; none where the kernel does not tell."""
    try:
        return sorted({name for name, held in (ipv6_addresses() if ":" in address else ipv4_addresses()) if held == ipaddress.ip_address(address)})
    except (OSError, ValueError):
        return []


def ipv4_addresses() -> list[tuple[str, ipaddress.IPv4Address]]:
    """netdevice(7), SIOCGIFCONF: every address with its label, which is the interface's name with `:` and more behind it for some."""
    entry = 40 if struct.calcsize("P") == 8 else 32
    room = array.array("B", bytes(entry * 4096))
    pointer, length = room.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as kernel:
        filled = struct.unpack("iP", fcntl.ioctl(kernel, SIOCGIFCONF, struct.pack("iP", length, pointer)))[0]
    rows = [room[at : at + entry].tobytes() for at in range(0, filled, entry)]
    return [(row[:16].split(b"\0")[0].decode("utf-8", "replace").partition(":")[0], ipaddress.IPv4Address(row[20:24])) for row in rows]


def ipv6_addresses() -> list[tuple[str, ipaddress.IPv6Address]]:
    with open(f"{PROC}/net/if_inet6", encoding="ascii") as stream:
        rows = [line.split() for line in stream]
    return [(row[5], ipaddress.IPv6Address(int(row[0], 16))) for row in rows if len(row) == 6]


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
        host, dummy, port = words[1].rpartition(":")
        packed = b"".join(struct.pack("=I", int(host[at : at + 8], 16)) for at in range(0, len(host), 8))
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
        return None  # ended connections (TIME_WAIT): servers bind with SO_REUSEADDR, which passes these
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
    return [
        f"GPU {gpu.uuid}{f' ({gpu.pci_bdf})' if gpu.pci_bdf else ''} is not in this host: the driver lists {', '.join(sorted(known)) or 'none'}"
        for gpu in missing
    ]


def check_hcas(hcas: Iterable[Hca], sysfs_root: str) -> list[str]:
    """Ports that are not active, and GID entries that moved: an index is not an address, and a link that flaps renumbers them (nccl#1333)."""
    found = []
    for hca in hcas:
        directory = os.path.join(sysfs_root, "class/infiniband", hca.name, "ports", str(hca.port))
        state = first_line(os.path.join(directory, "state"))
        if state is None:
            found.append(f"{hca} is not in this host: {directory} cannot be read")
        elif not state.startswith("4:"):
            found.append(f"{hca} is {state.partition(':')[2].strip() or state}, not ACTIVE")
        elif hca.gid_address is not None:
            found += check_gid(hca, directory)
    return found


def check_gid(hca: Hca, directory: str) -> list[str]:
    """Whether the planned index still is the RoCE v2 entry of the planned address; without an index, whether any entry is."""
    entries = {index: read_gid(directory, index) for index in gid_indexes(directory)}
    now = [str(index) for index, entry in sorted(entries.items()) if entry == (hca.gid_address, True)]
    if (str(hca.gid_index) in now) if hca.gid_index is not None else now:
        return []
    if hca.gid_index is None:
        return [f"{hca} has no RoCE v2 GID {hca.gid_address} any more. Give its interface that address, or deploy the replica again to plan it anew"]
    where = f"it is at index {', '.join(now)} now" if now else "the port has no such entry any more"
    return [f"{hca}: GID index {hca.gid_index} is no longer RoCE v2 {hca.gid_address}; {where}. Deploy the replica again to plan it anew"]


def gid_indexes(directory: str) -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir(os.path.join(directory, "gids")) if name.isdigit())
    except OSError:
        return []


def read_gid(directory: str, index: int) -> tuple[str, bool] | None:
    """(address, is RoCE v2) of an entry; None for an empty one, whose files hold zeros or cannot be read (EINVAL)."""
    try:
        address = ipaddress.IPv6Address(first_line(os.path.join(directory, "gids", str(index))) or "::")
    except ValueError:
        return None
    kind = first_line(os.path.join(directory, "gid_attrs", "types", str(index)))
    return (str(address.ipv4_mapped or address), "v2" in kind) if kind and int(address) else None


def first_line(path: str) -> str | None:
    try:
        with open(path, encoding="ascii", errors="replace") as stream:
            return stream.readline().strip()
    except OSError:
        return None


def could_be(gpu: Gpu, unknown: Iterable[str]) -> bool:
    return gpu.pci_bdf.lower() in unknown if gpu.pci_bdf is not None else bool(list(unknown))


class NvmlProcess(NamedTuple):
    pid: int
    used_mib: int | None


class Nvml:
    """The few calls of NVIDIA's library that a look before a start needs, by ctypes. Raises OSError where it cannot be used."""

    NOT_AVAILABLE = 2**64 - 1

    def __init__(self) -> None:
        import ctypes  # pylint: disable=import-outside-toplevel

        self._ctypes = ctypes
        try:
            self._library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:  # the loader's own words would read like an engine's failure
            raise OSError(errno.ENOENT, "this host has no libnvidia-ml.so.1") from None
        self._call("nvmlInit_v2")

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            code = getattr(self._library, name)(*arguments)
        except AttributeError:
            raise OSError(errno.ENOSYS, f"{name} is missing in this driver's library") from None
        if code != 0:
            raise OSError(code, f"{name} answers {code}")

    def handle(self, uuid: str) -> Any:
        handle = self._ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByUUID", encode(uuid), self._ctypes.byref(handle))
        return handle

    def processes(self, handle: Any) -> list[NvmlProcess]:
        ctypes = self._ctypes

        class Info(ctypes.Structure):  # type: ignore[name-defined,misc]  # nvmlProcessInfo_t
            _fields_ = (("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong), ("gpu_instance", ctypes.c_uint), ("compute_instance", ctypes.c_uint))

        count = ctypes.c_uint(256)
        table = (Info * count.value)()
        self._call("nvmlDeviceGetComputeRunningProcesses_v3", handle, ctypes.byref(count), table)
        return [NvmlProcess(entry.pid, None if entry.used == self.NOT_AVAILABLE else entry.used >> 20) for entry in table[: count.value]]

    def used_mib(self, handle: Any) -> int:
        """Without what the driver keeps for itself."""
        ctypes = self._ctypes

        class Memory(ctypes.Structure):  # type: ignore[name-defined,misc]  # nvmlMemory_v2_t
            _fields_ = (("version", ctypes.c_uint), *((name, ctypes.c_ulonglong) for name in ("total", "reserved", "free", "used")))

        memory = Memory(version=ctypes.sizeof(Memory) | 2 << 24)
        self._call("nvmlDeviceGetMemoryInfo_v2", handle, ctypes.byref(memory))
        return int(memory.used) >> 20


def check_gpu_memory(gpus: Sequence[Gpu]) -> list[str]:
    """Every assigned GPU must be free of others' memory. Whoever holds some is named, and never ended."""
    if not gpus:
        return []
    try:
        nvml = Nvml()
    except (ImportError, OSError) as error:
        log(f"who holds memory on the GPUs cannot be asked: {reason_of(error) if isinstance(error, OSError) else error}")
        return []
    found: list[str] = []
    for gpu in gpus:
        try:
            found += gpu_holders(nvml, gpu)
        except OSError as error:
            log(f"who holds memory on GPU {gpu.uuid} cannot be asked: {reason_of(error)}")
    return found


def gpu_holders(nvml: Nvml, gpu: Gpu) -> list[str]:
    handle = nvml.handle(gpu.uuid)
    deadline = time.monotonic() + GPU_SETTLE_SECONDS
    while True:
        entries = nvml.processes(handle)
        living = [entry for entry in entries if read_process(entry.pid) is not None]
        nobodys = unexplained_mib(nvml, handle, entries)
        if living or (len(entries) == len(living) and nobodys < GPU_NOBODYS_MIB) or time.monotonic() >= deadline:
            break
        time.sleep(0.2)  # an ended process's memory is on its way back
    found = [f"GPU {gpu.uuid} is held by {holder_text(entry)}" for entry in living or entries]
    if not found and nobodys >= GPU_NOBODYS_MIB:
        found.append(
            f"GPU {gpu.uuid} has {nobodys} MiB in use by nobody that this host can see: another container's process, or one that is stuck in the driver"
        )
    return found


def unexplained_mib(nvml: Nvml, handle: Any, entries: Sequence[NvmlProcess]) -> int:
    try:
        return nvml.used_mib(handle) - sum(entry.used_mib or 0 for entry in entries)
    except OSError:
        return 0  # unified memory: the driver does not tell


def holder_text(entry: NvmlProcess) -> str:
    """Who a process is: pid, user, command, MiB, since when, and of which shard where it is one's."""
    used = "unknown memory" if entry.used_mib is None else f"{entry.used_mib} MiB"
    process = read_process(entry.pid)
    if process is None:
        return f"process {entry.pid}, which this host cannot see, with {used}"
    try:
        owner = os.stat(f"{PROC}/{entry.pid}").st_uid
        user = pwd.getpwuid(owner).pw_name
    except (OSError, KeyError):
        user = "unknown"
    marker = read_marker(entry.pid)
    return (
        f"process {entry.pid} ({command_of(entry.pid) or process.name}, user {user}{f', shard {marker}' if marker else ''}) with {used} "
        f"since {started_at(process)}"
    )


def command_of(pid: int) -> str:
    try:
        with open(f"{PROC}/{pid}/cmdline", "rb") as stream:
            return stream.read(4096).replace(b"\0", b" ").decode("utf-8", "replace").strip()[:120]
    except OSError:
        return ""


def started_at(process: Process) -> str:
    try:
        with open(f"{PROC}/stat", encoding="ascii") as stream:
            boot = next(int(line.split()[1]) for line in stream if line.startswith("btime "))
        return utc(boot + process.start / os.sysconf("SC_CLK_TCK"))
    except (OSError, StopIteration, ValueError):
        return "an unknown time"


def ask_in_child(ask: Callable[[], list[str]], pause: Callable[[float], None], limit: float) -> list[str]:
    """What `ask` answers, asked in a process of its own: a driver that hangs must not hang us, and our one thread has others to talk to."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            signal.set_wakeup_fd(-1)
            for number in (*Events.STOP_SIGNALS, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            with open(writer, "wb") as stream:
                stream.write(json.dumps(ask()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.set_blocking(reader, False)
    deadline, text = time.monotonic() + limit, b""
    with open(reader, "rb", buffering=0) as stream:
        while time.monotonic() < deadline:
            data = stream.read(65536)
            if data == b"":
                break
            text += data or b""
            if data is None:
                pause(TICK_SECONDS)
    process = read_process(child)
    if process is not None:
        send_signal(process, signal.SIGKILL)
    try:
        return [str(line) for line in json.loads(text)]
    except ValueError:
        return [f"the driver did not say within {limit:g} seconds who holds memory on the GPUs"]


def findings(shard: Shard, credentials: str | None, ports: bool = True) -> list[str]:
    """What would stop a start now, one line each. It changes nothing."""
    return [
        *check_executables(shard),
        *check_secrets(shard, credentials),
        *check_work_dir(shard.work_dir),
        *check_addresses(shard),
        *check_interface(shard),
        *(check_ports(shard) if ports else []),
        *check_gpus(shard.gpus, NVIDIA_GPUS),
        *check_hcas(shard.hcas, shard.sysfs_root),
    ]


def running_supervisor(state_dir: str) -> int | None:
    """The pid of the run_shard.py that runs in this state directory, by state.json: readable for everyone, and no lock is touched."""
    previous = State.read(state_dir)
    pid = previous.get("supervisor_pid")
    return pid if isinstance(pid, int) and previous.get("stage") not in ("stopped", "failed") and pid != os.getpid() and is_run_shard(pid) else None


def check(shard: Shard, credentials: str | None) -> int:
    supervisor = running_supervisor(shard.state_dir)
    found = [f"run_shard.py already runs this shard as process {supervisor}"] if supervisor is not None else []
    found += findings(shard, credentials, ports=supervisor is None)  # its ports are its own then
    if supervisor is None:
        tie = Port(shard.tie.address, shard.tie.port, "the tie") if shard.tie is not None and shard.rank == 0 else None
        found += [problem for problem in [tie and port_problem(tie)] if problem]
        found += check_gpu_memory(shard.gpus)
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
        self._is_ready = False

    @staticmethod
    def _watchdog_period(environ: Mapping[str, str]) -> float | None:
        if environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
            return None  # meant for another process (sd_watchdog_enabled(3))
        text = environ.get("WATCHDOG_USEC", "")
        return int(text) / 2e6 if text.isdecimal() and int(text) > 0 else None

    def send(self, *lines: str) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendto("\n".join(line.replace("\n", " ") for line in lines).encode("utf-8", "replace"), self._address)
        except BlockingIOError:
            pass  # a service manager that is behind will get the next one
        except OSError as error:
            log(f"the service manager cannot be notified: {reason_of(error)}")
            self._socket = self._period = None

    def ready(self) -> None:
        """From here on a long load, or a rank that comes late, is no start that hangs."""
        if not self._is_ready:
            self._is_ready = True
            self.send("READY=1")

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
    return {
        "launch": None,
        "code": None,
        "signal": None,
        "at": None,
        "rank": previous.get("rank"),
        "kind": "supervisor",
        "reason": f"run_shard.py of run {previous.get('run_id')} {how} in stage {previous.get('stage')}",
    }


class State:
    """state.json: what this shard does now. Written by rename, so that a reader never sees half of it."""

    def __init__(self, shard: Shard, notify: Notify) -> None:
        previous, boot, now = self.read(shard.state_dir), boot_id(), round(time.time(), 3)
        same = boot is not None and previous.get("boot_id") == boot and previous.get("fingerprint") == shard.fingerprint
        restarts, number = previous.get("restarts"), previous.get("run_number")
        self._shard = shard
        self._notify = notify
        self._directory = shard.state_dir
        self._write_failed = False
        self._begun = False
        self.number = number if isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 2**48 else 0
        self._content: dict[str, Any] = {
            "schema": SCHEMA,
            "replica": shard.replica,
            "rank": shard.rank,
            "fingerprint": shard.fingerprint,
            "run_id": None,
            "run_number": self.number,
            "run_port": None,
            "boot_id": boot,
            "stage": "starting",
            "detail": "",
            "stage_since": now,
            "started_at": now,
            "supervisor_pid": os.getpid(),
            "launches": [],
            "restarts": restarts + 1 if same and isinstance(restarts, int) else 0,
            "failures": 0,
            "tie": None,
            "last_end": earlier_end(previous, boot),
            "own_end": None,
        }
        self.forget_readiness()
        self._publish()

    def begin(self, run: RunName) -> None:
        """A new run. Nothing that was said of the one before holds for it."""
        now = round(time.time(), 3)
        restarts = self._content["restarts"] + (1 if self._begun else 0)
        self._begun = True
        self._content.update(
            run_id=run.id,
            run_number=run.number,
            started_at=now,
            stage="starting",
            stage_since=now,
            detail="",
            launches=[],
            restarts=restarts,
            own_end=None,
            run_port=self._shard.tie.port_of_run(run.number) if self._shard.tie is not None else None,
        )
        self.forget_readiness()
        self._publish()

    def tied(self, role: str | None, ranks: Sequence[int], failures: int) -> None:
        before = self._content["tie"]
        if role is not None and (before is None or before["tied_ranks"] != list(ranks)):
            self._content["tie"] = {"role": role, "tied_ranks": list(ranks), "since": round(time.time(), 3)}
        elif failures == self._content["failures"]:
            return
        self._content["failures"] = failures
        self._write()

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

    def ended(self, end: End) -> None:
        """Why this run is over, from the moment that it is known."""
        told = {
            "launch": end.launch,
            "code": end.code,
            "signal": end.signal,
            "at": round(time.time(), 3),
            "reason": end.reason,
            "rank": end.rank if end.rank is not None else self._shard.rank,
            "kind": end.kind,
        }
        self._content["last_end"] = told
        if end.rank is None and end.kind in (LAUNCH, CHECK):
            # Engines on several ranks may end within milliseconds, one for the other's sake. Rank 0 names one; this rank still knows of its own.
            self._content["own_end"] = told
        self._write()

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
            if not self._write_failed:  # a full disk is no reason to stop serving
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
        self.tie: Alone | None = None
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

    def register(self, connection: socket.socket, mask: int, ready: Callable[[int], None]) -> None:
        """Call `ready` with the mask whenever the socket is ready during a wait, whatever is waited for."""
        self._selector.register(connection, mask, ready)

    def modify(self, connection: socket.socket, mask: int) -> None:
        key = self._selector.get_key(connection)
        if key.events != mask:
            self._selector.modify(connection, mask, key.data)

    def unregister(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)

    def wait(self, seconds: float, connecting: socket.socket | None = None) -> None:
        """Return after `seconds`, or earlier when there is something to look at: a signal, an attempt to connect that is decided, the tie."""
        if connecting is not None:
            self._selector.register(connecting, selectors.EVENT_WRITE)
        try:
            limit = min(seconds, self._notify.seconds_to_beat(), self.tie.seconds_to_tick() if self.tie is not None else math.inf)
            ready = self._selector.select(None if math.isinf(limit) else max(0.0, limit))
        finally:
            if connecting is not None:
                self._selector.unregister(connecting)
        known = self._selector.get_map()
        for key, mask in ready:
            if key.data is not None and key.fd in known and known[key.fd] is key:  # one that was served before may have closed it
                key.data(mask)
        try:
            self._wake.recv(4096)
        except BlockingIOError:
            pass
        if self.tie is not None:
            self.tie.tick()
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
            [encode(word) for word in words],
            env=environment,
            cwd=encode(directory),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            close_fds=True,
            preexec_fn=self._tie_to_parent(),  # noqa: PLW1509 (one thread)
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
            if os.getppid() != parent:  # we died before the tie was made
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
                    entry.process.returncode = entry.exit.code if killed is None else -killed  # so that Popen does not wait for it
                    launch_ended = True

    def living(self) -> list[Started]:
        return [entry for entry in self.started if entry.exit is None]

    def members(self) -> dict[int, Process]:
        self.reap()
        return members_of_run(self.marker)


# ---------------------------------------------------------------------------------------------------------------------------------
# One replica, one fate: who decides when a run starts and when it is over. Pure: events and a clock (seconds, monotonic) in, messages out.

TYING, RUNNING, ENDING, GIVEN_UP = "tying", "running", "ending", "given up"
LAUNCH, CHECK, TIE, STOP, INTERNAL = "launch", "check", "tie", "stop", "internal"  # kinds of ends
COUNTED = frozenset({LAUNCH, CHECK, INTERNAL})  # a rank that is lost or was stopped is no fault of what runs there


class Cause(NamedTuple):
    """Why a run is over, as all ranks know it: which rank it began with, and what happened there."""

    rank: int
    kind: str
    reason: str
    launch: str | None = None
    code: int | None = None
    signal: str | None = None

    @classmethod
    def read(cls, value: Any) -> Cause:
        """From a message. Raises TieError."""
        texts = ("kind", "reason", "launch", "signal")
        if not isinstance(value, dict) or any(not isinstance(value.get(name), (str, type(None))) for name in texts):
            raise TieError("a cause that is none")
        if not isinstance(value.get("rank"), int) or not isinstance(value.get("code"), (int, type(None))):
            raise TieError("a cause that is none")
        return cls(value["rank"], str(value.get("kind")), str(value.get("reason")), value.get("launch"), value.get("code"), value.get("signal"))

    def as_message(self) -> dict[str, Any]:
        return {**self._asdict(), "reason": self.reason[:400], "launch": self.launch and self.launch[:100]}


class RunName(NamedTuple):
    id: str
    number: int


class TieError(Exception):
    """What came over a tie is not what this collection sends."""


RUN_ID = re.compile(r"[0-9a-f]{1,32}")


class Report(NamedTuple):
    """What a follower says of itself, whole and at every change: the run that it has, the last that it has begun, why that is over."""

    run: str | None
    seen: str | None
    cause: Cause | None

    @classmethod
    def read(cls, message: Mapping[str, Any]) -> Report:
        """Raises TieError."""
        run, seen, cause = message.get("run"), message.get("seen"), message.get("cause")
        return cls(run_id(run), run_id(seen), None if cause is None else Cause.read(cause))


def run_id(value: Any) -> str | None:
    if value is None or isinstance(value, str) and RUN_ID.fullmatch(value):
        return value
    raise TieError("a run that is none")


class Leader:
    """Rank 0's side: starts a run when all ranks are tied and idle, and ends it for all when one of them ends, leaves, is lost or is silent.

    Both sides send their whole state at every change and every beat (`message`), so that nothing depends on a message that a connection lost.
    A rank in `missing` is not tied: since when, and why.
    """

    def __init__(self, nodes: int, restart: Restart, silent_seconds: float, new_id: Callable[[], str], now: float, number: int = 0) -> None:
        self.phase = TYING
        self.run: RunName | None = None
        self.cause: Cause | None = None
        self.number = number  # the highest that any rank has seen
        self.failures: list[float] = []  # when counted ends happened
        self.heard: dict[int, float] = {}  # tied followers
        self.missing: dict[int, tuple[float, str]] = dict.fromkeys(range(1, nodes), (now, "not seen yet"))
        self.busy: set[int] = {0}  # ranks on which processes of a run may still be
        self.not_before = now
        self.restart = restart
        self._nodes = nodes
        self._silent = silent_seconds
        self._new_id = new_id
        self._closing = False

    def message(self) -> dict[str, Any]:
        return {
            "type": "state",
            "phase": self.phase,
            "run": self.run.id if self.run else None,
            "number": self.run.number if self.run else self.number,
            "cause": self.cause.as_message() if self.cause else None,
            "released": 0 not in self.busy,
            "failures": len(self.failures),
            "tied": [0, *sorted(self.heard)][:256],
        }

    def join(self, rank: int, report: Report, number: int, now: float) -> str | None:
        """A rank that has proven itself wants to be tied, perhaps to go on with its run. Returns why it is refused."""
        if report.run is not None and (self.run is None or report.run != self.run.id or rank not in self.busy):
            return f"its run {report.run} is over"
        if report.run is None and rank in self.busy and report.seen != (self.run and self.run.id):
            self._over(Cause(rank, TIE, "it came back without its run: its host or its run_shard.py was started again"), now)
            self.busy.discard(rank)
        self.number = max(self.number, number)
        self.missing.pop(rank, None)
        self.heard[rank] = now
        self.report(rank, report, now)
        return None

    def report(self, rank: int, report: Report, now: float) -> None:
        """What a tied rank says. A report from before the present run's start has nothing to say about it."""
        if rank not in self.heard:
            return
        self.heard[rank] = now
        if self.run is not None and report.seen == self.run.id and rank in self.busy:
            if report.cause is not None:
                self._over(report.cause._replace(rank=rank), now)
            if report.run is None:
                self._over(Cause(rank, TIE, "it has ended its part"), now)
                self.busy.discard(rank)
                if report.cause is not None and report.cause.kind == STOP and report.cause.rank == rank:
                    self.lost(rank, "it was asked to stop", now)  # it leaves: nothing may start with it now
        self._settle(now)

    def lost(self, rank: int, reason: str, now: float) -> None:
        """The rank's process has ended, or it is silent for too long. It comes again only when nothing runs there."""
        if self.heard.pop(rank, None) is None:
            return
        self.missing[rank] = (now, reason)
        self.busy.discard(rank)
        self._over(Cause(rank, TIE, reason), now)
        self._settle(now)

    def tick(self, now: float) -> None:
        for rank, heard in list(self.heard.items()):
            if now - heard > self._silent:
                self.lost(rank, f"it was silent for more than {self._silent:g} seconds", now)
        self._settle(now)

    def own_ended(self, cause: Cause, now: float) -> None:
        """Our part of the run has ended, or we were asked to stop."""
        self._closing = self._closing or cause.kind == STOP
        self._over(cause, now)

    def own_idle(self, now: float) -> None:
        """No process of a run lives here any more."""
        self.busy.discard(0)
        self._settle(now)

    def may_stop(self, now: float) -> bool:  # pylint: disable=unused-argument
        """Rank 0 stops first: a follower of SGLang ends only with its leader."""
        return True

    def _over(self, cause: Cause, now: float) -> None:
        if self.phase != RUNNING:
            return
        self.phase, self.cause = ENDING, cause
        pause = 0.0 if cause.kind == STOP else self.restart.pause(1)
        if cause.kind in COUNTED:
            self.failures = [at for at in self.failures if now - at < self.restart.window_seconds] + [now]
            pause = self.restart.pause(len(self.failures))
        self.not_before = now + pause

    def _settle(self, now: float) -> None:
        if self.phase == ENDING and not self.busy:
            self.run = None
            counted = self.cause is not None and self.cause.kind in COUNTED
            self.phase = GIVEN_UP if counted and len(self.failures) >= self.restart.limit else TYING
        if self.phase == TYING and not (self._closing or self.busy or self.missing) and now >= self.not_before:
            self.number += 1
            self.run, self.cause, self.phase = RunName(self._new_id(), self.number), None, RUNNING
            self.busy = set(range(self._nodes))


class Follower:
    """The side of every other rank: runs what rank 0 starts, says what has ended here, and ends with the tie."""

    def __init__(self, rank: int, silent_seconds: float, stop_seconds: float, now: float, number: int = 0) -> None:
        self.phase = TYING
        self.run: RunName | None = None
        self.cause: Cause | None = None
        self.number = number
        self.failures = 0  # counted ends, as rank 0 counts them
        self.tied = False
        self.heard = now
        self.missing: tuple[float, str] = (now, "no answer yet")  # since when rank 0 is, and why
        self.leader_tied: list[int] = []
        self._rank = rank
        self._seen: str | None = None
        self._silent = silent_seconds
        self._stop_seconds = stop_seconds
        self._release_by = math.inf

    def message(self) -> dict[str, Any]:
        return {
            "type": "state",
            "run": self.run.id if self.run else None,
            "seen": self._seen,
            "cause": self.cause.as_message() if self.cause and self.phase != RUNNING else None,
        }

    def welcome(self, now: float) -> None:
        self.tied, self.heard = True, now

    def receive(self, message: Mapping[str, Any], now: float) -> None:
        """Rank 0's state. Raises TieError for one that cannot be."""
        self.heard = now
        phase, run, number, cause = message.get("phase"), run_id(message.get("run")), message.get("number"), message.get("cause")
        if not isinstance(number, int) or not 0 <= number < 2**48 or phase not in (TYING, RUNNING, ENDING, GIVEN_UP):
            raise TieError("a state that is none")
        cause = None if cause is None else Cause.read(cause)
        self.failures = int(message.get("failures") or 0)
        self.leader_tied = [rank for rank in message.get("tied") or [] if isinstance(rank, int)]
        if self.run is not None and run == self.run.id:
            if phase == ENDING:
                self._end(cause, bool(message.get("released")), now)
        elif self.phase == RUNNING:
            self.lost("it does not run our run any more", now)
        elif self.phase == TYING and phase == RUNNING and run is not None and run != self._seen:
            self.run, self._seen, self.cause, self.phase = RunName(run, number), run, None, RUNNING
            self.number, self._release_by = max(self.number, number), math.inf
        elif self.phase == TYING and phase == ENDING:
            self._seen, self.cause = run, cause  # over before we could begin it
        elif self.phase == TYING and phase == GIVEN_UP:
            self.phase, self.cause = GIVEN_UP, cause

    def _end(self, cause: Cause | None, released: bool, now: float) -> None:
        if self.phase == RUNNING:
            self.phase, self._release_by = ENDING, now + self._stop_seconds
        self.cause = cause or self.cause  # rank 0 has seen all ranks: its word counts
        if released:
            self._release_by = min(self._release_by, now)

    def dropped(self) -> None:
        """The connection is gone without a word of the other side: the run goes on if another one is made in time."""
        self.tied = False

    def lost(self, reason: str, now: float) -> None:
        """Rank 0's process has ended, does not know our run, or is silent for too long."""
        if self.tied or self.phase == RUNNING:
            self.missing = (now, reason)
        self.tied = False
        if self.phase == RUNNING:
            self.phase, self.cause = ENDING, Cause(0, TIE, reason)
        self._release_by = min(self._release_by, now)  # nobody is left who would release us

    def tick(self, now: float) -> None:
        if (self.tied or self.phase == RUNNING) and now - self.heard > self._silent:
            self.lost(f"it was silent for more than {self._silent:g} seconds", now)

    def own_ended(self, cause: Cause, now: float) -> None:
        if self.phase == RUNNING:
            self.phase, self.cause, self._release_by = ENDING, cause, now

    def own_idle(self, now: float) -> None:  # pylint: disable=unused-argument
        if self.phase == ENDING:
            self.phase, self.run = TYING, None

    def may_stop(self, now: float) -> bool:
        """Rank 0 stops first, within a limit."""
        return now >= self._release_by

    def wants_connection(self, now: float) -> bool:
        """Not tied, or so long without a word that another connection may help. While a run is being ended nothing is begun."""
        return self.phase in (TYING, RUNNING) and (not self.tied or now - self.heard > self._silent / 4)


# ---------------------------------------------------------------------------------------------------------------------------------
# What goes over a tie: lines with a MAC before a JSON text

TIE_GREETING = b"rankzero-tie 1 "
ENDED_BY_PEER = "its run_shard.py has ended the connection"
NONCE = re.compile(rb"[0-9a-f]{32}")


def mac(key: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 over the parts, each with its length before it, so that no two lists of parts are alike."""
    return hmac.new(key, b"".join(struct.pack(">I", len(part)) + part for part in parts), hashlib.sha256).digest()


def canonical(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")


def sealed(key: bytes, context: Sequence[bytes], message: Mapping[str, Any]) -> bytes:
    text = canonical(message)
    return mac(key, *context, text).hex().encode("ascii") + b" " + text + b"\n"


def opened(key: bytes, context: Sequence[bytes], line: bytes) -> dict[str, Any]:
    """The message of a line whose MAC is right; only then its text is looked at. Raises TieError."""
    given, dummy, text = line.partition(b" ")
    if not hmac.compare_digest(given, mac(key, *context, text).hex().encode("ascii")):
        raise TieError("wrong secret")
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise TieError("a line that is no message")
    return message


class Session:
    """One side of an authenticated connection: a key for each direction made of both nonces, and a counter, so that nothing can be replayed."""

    def __init__(self, key: bytes, leader_nonce: bytes, follower_nonce: bytes, is_leader: bool) -> None:
        by_role = {role: mac(key, b"session", role, leader_nonce, follower_nonce) for role in (b"leader", b"follower")}
        self._out, self._in = (by_role[b"leader"], by_role[b"follower"]) if is_leader else (by_role[b"follower"], by_role[b"leader"])
        self._sent = self._received = 0

    def seal(self, message: Mapping[str, Any]) -> bytes:
        self._sent += 1
        return sealed(self._out, [struct.pack(">Q", self._sent)], message)

    def open(self, line: bytes) -> dict[str, Any]:
        self._received += 1
        return opened(self._in, [struct.pack(">Q", self._received)], line)


def nonce() -> bytes:
    return os.urandom(16).hex().encode("ascii")


class Channel:
    """A connection that carries lines. `on_line` gets each; `on_end(reason, by_peer)` is called once unless we close it ourselves.

    `by_peer` is true where the other process has ended the connection (FIN or RST), false where it only failed.
    """

    def __init__(self, connection: socket.socket, events: Events, on_line: Callable[[bytes], None], on_end: Callable[[str, bool], None]) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.on_line = on_line
        self.on_end = on_end
        self.closed = False
        self._socket = connection
        self._events = events
        self._in = b""
        self._out = b""
        events.register(connection, selectors.EVENT_READ, self._ready)

    def send(self, line: bytes) -> None:
        if self.closed:
            return
        if len(line) > MOST_LINE_BYTES or len(self._out) + len(line) > MOST_OUTGOING_BYTES:
            self._end("it does not read what is sent to it", by_peer=False)
            return
        self._out += line
        self._write()

    def _ready(self, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._write()
        if mask & selectors.EVENT_READ and not self.closed:
            self._read()

    def _write(self) -> None:
        try:
            while self._out:
                self._out = self._out[self._socket.send(self._out) :]
        except BlockingIOError:
            pass
        except OSError as error:
            self._failed(error)
        if not self.closed:
            self._events.modify(self._socket, selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0))

    def _read(self) -> None:
        try:
            data = self._socket.recv(MOST_LINE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._failed(error)
            return
        if not data:
            self._end(ENDED_BY_PEER, by_peer=True)
            return
        *lines, self._in = (self._in + data).split(b"\n")
        for line in lines:
            if not self.closed:
                self.on_line(line)
        if len(self._in) > MOST_LINE_BYTES and not self.closed:
            self._end(f"a line of more than {MOST_LINE_BYTES} bytes", by_peer=True)

    def _failed(self, error: OSError) -> None:
        by_peer = error.errno in (errno.ECONNRESET, errno.EPIPE)
        self._end(ENDED_BY_PEER if by_peer else f"its connection failed: {reason_of(error)}", by_peer)

    def _end(self, reason: str, by_peer: bool) -> None:
        if not self.closed:
            self.close()
            self.on_end(reason, by_peer)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._events.unregister(self._socket)
            self._socket.close()

    def farewell(self) -> None:
        """Send what is left, for a moment, and close."""
        if not self.closed:
            try:
                self._socket.settimeout(FAREWELL_SECONDS)
                self._socket.sendall(self._out)
                self._socket.shutdown(socket.SHUT_WR)
            except OSError:
                pass
            self.close()


# ---------------------------------------------------------------------------------------------------------------------------------
# The tie of this rank: sockets around the rules above


class Alone:
    """The tie of a replica without other ranks: the same rules with nobody to ask."""

    role: str | None = None

    def __init__(self, shard: Shard, number: int) -> None:
        self._shard = shard
        self.leader = Leader(1, shard.restart or ONCE, math.inf, lambda: os.urandom(6).hex(), time.monotonic(), number)
        self.rules: Leader | Follower = self.leader
        self._since: dict[tuple[int, float], str] = {}

    @property
    def phase(self) -> str:
        return self.rules.phase

    @property
    def run(self) -> RunName:
        return self.rules.run or RunName("", self.rules.number)

    @property
    def cause(self) -> Cause | None:
        return self.rules.cause

    @property
    def failures(self) -> int:
        return len(self.leader.failures)

    def tied_ranks(self) -> list[int]:
        return [0, *sorted(self.leader.heard)]

    def may_stop(self) -> bool:
        return self.rules.may_stop(time.monotonic())

    def own_ended(self, cause: Cause) -> None:
        self.rules.own_ended(cause, time.monotonic())
        self.deliver()

    def own_idle(self) -> None:
        self.rules.own_idle(time.monotonic())
        self.deliver()

    def tick(self) -> None:
        self.rules.tick(time.monotonic())
        self.deliver()

    def seconds_to_tick(self) -> float:
        """A run that may start after a pause is the only thing to wait for."""
        return max(0.01, self.leader.not_before - time.monotonic()) if self.phase == TYING and not self.leader.missing else math.inf

    def deliver(self) -> None:
        """Nobody to tell."""

    def close(self) -> None:
        """Nothing to close."""

    def given_up(self) -> str:
        """The reason with how often it happened."""
        return f"{said(self.cause, self._shard.rank)}; given up after {self.failures} failed runs within {self.leader.restart.window_seconds:g} seconds"

    def describe(self) -> tuple[str, str]:
        """Stage and detail while no run is on."""
        leader = self.leader
        if leader.missing:
            alike: dict[tuple[float, str], list[int]] = {}
            for rank, how in sorted(leader.missing.items()):
                alike.setdefault(how, []).append(rank)
            waits = [f"rank {', '.join(map(str, ranks))} since {self.since(ranks[0], at)} ({why})" for (at, why), ranks in alike.items()]
            return TYING, f"waits for {'; '.join(waits)}"
        others = sorted(leader.busy - {0})
        if others:
            return TYING, f"waits until rank {', '.join(map(str, others))} has ended its processes of run {self.run.id}"
        return "restarting", f"run {leader.number + 1} starts at {self.since(-1, leader.not_before)}, after {said(leader.cause, 0) or 'a stop'}"

    def since(self, rank: int, at: float) -> str:
        """The same text for the same moment, however often it is asked."""
        if len(self._since) > 1000:
            self._since.clear()
        return self._since.setdefault((rank, at), utc(time.time() + at - time.monotonic()))


def said(cause: Cause | None, own_rank: int) -> str:
    """A cause as a rank tells it: what happened elsewhere names the place."""
    if cause is None:
        return ""
    return cause.reason if cause.rank == own_rank else f"rank {cause.rank}: {cause.reason}"


class Guest:
    """A connection to rank 0 that has not proven yet who it is."""

    def __init__(self, channel: Channel, address: str) -> None:
        self.channel = channel
        self.address = address
        self.nonce = nonce()
        self.until = time.monotonic() + HANDSHAKE_SECONDS


class LeaderTie(Alone):
    """Rank 0 listens, and keeps one connection to each of the others."""

    role = "leader"

    def __init__(self, shard: Shard, terms: TieTerms, key: bytes, events: Events, number: int) -> None:
        super().__init__(shard, number)
        self.leader = self.rules = Leader(shard.nodes, shard.restart or ONCE, terms.silent_seconds, lambda: os.urandom(6).hex(), time.monotonic(), number)
        self._terms = terms
        self._key = key
        self._events = events
        self._guests: list[Guest] = []
        self._ranks: dict[int, tuple[Channel, Session]] = {}
        self._retired: list[tuple[float, Channel]] = []
        self._beat_due = 0.0
        self._delivered: dict[str, Any] = {}
        self._logged: dict[tuple[str, str], float] = {}
        self._listener = self._listen()
        events.register(self._listener, selectors.EVENT_READ, lambda mask: self._accept())

    def _listen(self) -> socket.socket:
        """Raises Refusal. Tested without SO_REUSEADDR first, as the other ports are."""
        address, port = self._terms.address, self._terms.port
        problem = port_problem(Port(address, port, "the tie"))
        if problem is not None:
            raise Refusal(problem, EX_UNAVAILABLE)
        listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the rests of the last run_shard.py's connections
            listener.bind((address, port))
            listener.listen(MOST_GUESTS)
        except OSError as error:
            listener.close()
            raise Refusal(f"port {host_port(address, port)} (the tie) cannot be listened on: {reason_of(error)}", EX_UNAVAILABLE) from None
        listener.setblocking(False)
        return listener

    # -- guests

    def _accept(self) -> None:
        try:
            connection, peer = self._listener.accept()
        except OSError:
            return  # it has gone again, or we are out of descriptors: the next one may be luckier
        while len(self._guests) >= MOST_GUESTS:
            self._dismiss(self._guests[0], "too many connections that do not say who they are")
        channel = Channel(connection, self._events, lambda line: self._introduced(guest, line), lambda reason, by_peer: self._dismiss(guest, reason))
        guest = Guest(channel, peer[0])
        self._guests.append(guest)
        channel.send(TIE_GREETING + guest.nonce + b"\n")

    def _dismiss(self, guest: Guest, why: str) -> None:
        if guest in self._guests:
            self._guests.remove(guest)
            self._refused(guest.address, why)
        guest.channel.close()

    def _refused(self, address: str, why: str) -> None:
        """Logged, but not as often as somebody likes to be refused."""
        now = time.monotonic()
        if len(self._logged) > 256:
            self._logged.clear()
        if now - self._logged.get((address, why), -math.inf) >= REFUSED_LOG_SECONDS:
            self._logged[(address, why)] = now
            log(f"tie: {address} is refused: {why}")

    def _introduced(self, guest: Guest, line: bytes) -> None:
        """The first line of a guest. A wrong MAC is all that somebody without the secret is told."""
        try:
            hello = opened(self._key, [b"hello", guest.nonce], line)
            follower_nonce = hello.get("nonce")
            if not isinstance(follower_nonce, str) or not NONCE.fullmatch(follower_nonce.encode("utf-8", "replace")):
                raise TieError("a hello without a nonce")
        except TieError as error:
            guest.channel.send(b"refused " + str(error).encode("ascii", "replace") + b"\n")
            self._dismiss(guest, str(error))
            return
        session = Session(self._key, guest.nonce, follower_nonce.encode(), is_leader=True)
        problem = self._hello_problem(hello) or self._join(hello, guest, session)
        if problem is not None:
            guest.channel.send(session.seal({"type": "refused", "why": problem}))
            self._dismiss(guest, problem)

    def _hello_problem(self, hello: Mapping[str, Any]) -> str | None:
        shard = self._shard
        for name, wanted in (("replica", shard.replica), ("fingerprint", shard.fingerprint), ("nodes", shard.nodes)):
            if hello.get(name) != wanted:
                return f"{name} {str(hello.get(name))[:60]} is not {wanted}"
        rank, number = hello.get("rank"), hello.get("number")
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 < rank < shard.nodes:
            return f"rank {str(rank)[:20]} is none of the followers'"
        if not isinstance(number, int) or not 0 <= number < 2**48:
            return "a hello with a damaged number"
        return None

    def _join(self, hello: Mapping[str, Any], guest: Guest, session: Session) -> str | None:
        rank: int = hello["rank"]
        try:
            report = Report.read(hello)
        except TieError as error:
            return str(error)
        problem = self.leader.join(rank, report, hello["number"], time.monotonic())
        if problem is not None:
            return problem
        self._guests.remove(guest)
        if rank in self._ranks:
            self._retire(self._ranks[rank][0])
        channel = guest.channel
        self._ranks[rank] = (channel, session)
        channel.on_line = lambda line: self._told(rank, channel, session, line)
        channel.on_end = lambda reason, by_peer: self._ended(rank, channel, reason, by_peer)
        channel.send(session.seal({"type": "welcome"}))
        log(f"tie: rank {rank} at {guest.address} is tied{f' again, in run {report.run}' if report.run else ''}")
        self._delivered = {}
        self.deliver()
        return None

    def _retire(self, channel: Channel) -> None:
        """A connection that another one has replaced is the follower's to close: our FIN could arrive before the welcome, and look like our end."""
        channel.on_line = lambda line: None
        channel.on_end = lambda reason, by_peer: None
        self._retired.append((time.monotonic() + HANDSHAKE_SECONDS, channel))

    # -- tied ranks

    def _told(self, rank: int, channel: Channel, session: Session, line: bytes) -> None:
        try:
            self.leader.report(rank, Report.read(session.open(line)), time.monotonic())
        except TieError as error:
            channel.close()
            self._ended(rank, channel, f"it sent {error}", by_peer=True)
        self.deliver()

    def _ended(self, rank: int, channel: Channel, reason: str, by_peer: bool) -> None:
        """A connection that only failed is no reason yet: the rank may make another one until it has been silent for too long."""
        if rank in self._ranks and self._ranks[rank][0] is channel:
            del self._ranks[rank]
            if by_peer:
                self.leader.lost(rank, reason, time.monotonic())
                log(f"tie: rank {rank} is lost: {reason}")
            self.deliver()

    def deliver(self) -> None:
        message, now = self.leader.message(), time.monotonic()
        if message != self._delivered or now >= self._beat_due:
            self._delivered, self._beat_due = message, now + self._terms.silent_seconds / 10
            for channel, session in list(self._ranks.values()):
                channel.send(session.seal(message))
        for rank in [rank for rank in self._ranks if rank not in self.leader.heard]:
            log(f"tie: rank {rank} is lost: {self.leader.missing.get(rank, (0, ''))[1]}")
            self._ranks.pop(rank)[0].close()

    def tick(self) -> None:
        now = time.monotonic()
        for guest in [guest for guest in self._guests if now >= guest.until]:
            self._dismiss(guest, f"it did not say who it is within {HANDSHAKE_SECONDS:g} seconds")
        for until, channel in self._retired:
            if now >= until:
                channel.close()
        self._retired = [(until, channel) for until, channel in self._retired if not channel.closed]
        super().tick()

    def seconds_to_tick(self) -> float:
        return min(max(0.01, self._beat_due - time.monotonic()), super().seconds_to_tick())

    def close(self) -> None:
        self._events.unregister(self._listener)
        self._listener.close()
        for channel in [*(guest.channel for guest in self._guests), *(channel for _until, channel in self._retired)]:
            channel.close()
        for channel, _session in self._ranks.values():
            channel.farewell()
        self._ranks.clear()


class FollowerTie(Alone):
    """Every other rank connects to rank 0, and connects again for as long as it has to."""

    role = "follower"

    def __init__(self, shard: Shard, terms: TieTerms, key: bytes, events: Events, number: int) -> None:
        super().__init__(shard, number)
        self.follower = self.rules = Follower(shard.rank, terms.silent_seconds, shard.stop_seconds, time.monotonic(), number)
        self._terms = terms
        self._key = key
        self._events = events
        self._delivered: dict[str, Any] = {}
        self._tie: tuple[Channel, Session] | None = None
        self._attempt: Attempt | None = None
        self._next_attempt = self._beat_due = 0.0
        self._said = ""

    @property
    def failures(self) -> int:
        return self.follower.failures

    def tied_ranks(self) -> list[int]:
        return self.follower.leader_tied if self.follower.tied else []

    def given_up(self) -> str:
        return f"{said(self.cause, self._shard.rank)}; given up by rank 0 after {self.failures} failed runs"

    def describe(self) -> tuple[str, str]:
        where = f"rank 0 at {host_port(self._terms.address, self._terms.port)}"
        if self.follower.tied:
            return (
                TYING,
                f"tied to {where}, which starts when all {self._shard.nodes} ranks are tied and idle (now {', '.join(map(str, self.follower.leader_tied))})",
            )
        at, why = self.follower.missing
        return TYING, f"waits for {where} since {self.since(0, at)} ({self._said or why})"

    # -- connecting

    def tick(self) -> None:
        now = time.monotonic()
        if self._attempt is not None and now >= self._attempt.until:
            self._attempt.end("no answer")
        if self._attempt is None and now >= self._next_attempt and self.follower.wants_connection(now):
            self._next_attempt = now + self._retry_seconds()
            try:
                self._attempt = Attempt(self._shard, self._terms, self._key, self._events, self.follower, self)
            except OSError as error:  # no IPv6 on this host, no descriptors left
                self._said = reason_of(error)
        super().tick()

    def _retry_seconds(self) -> float:
        return min(1.0, self._terms.silent_seconds / 10)

    def seconds_to_tick(self) -> float:
        return min(self._retry_seconds(), max(0.01, self._beat_due - time.monotonic())) if self._tie is not None else self._retry_seconds() / 2

    def attempt_failed(self, attempt: Attempt, why: str, refused: bool) -> None:
        if self._attempt is not attempt:
            return
        self._attempt = None
        if why != self._said:
            # The kernel's words for a rank that has not come yet would read like an engine's failure to those who look for one in this log.
            log(f"tie: rank 0 at {host_port(self._terms.address, self._terms.port)} {why if attempt.is_connected else 'is not there yet'}")
            self._said = why
        if refused and self.phase == RUNNING:
            self.follower.lost(why, time.monotonic())

    def tied(self, attempt: Attempt, channel: Channel, session: Session) -> None:
        """The new connection takes the place of the old one."""
        self._attempt = None
        if self._tie is not None:
            self._tie[0].close()
        self._tie = (channel, session)
        channel.on_line = lambda line: self._told(channel, session, line)
        channel.on_end = lambda reason, by_peer: self._ended(channel, reason, by_peer)
        self.follower.welcome(time.monotonic())
        self._said, self._delivered = "", {}
        log(f"tie: tied to rank 0 at {host_port(self._terms.address, self._terms.port)}{f' again, in run {self.run.id}' if self.run.id else ''}")
        self.deliver()

    # -- tied

    def _told(self, channel: Channel, session: Session, line: bytes) -> None:
        try:
            self.follower.receive(session.open(line), time.monotonic())
        except TieError as error:
            channel.close()
            self._ended(channel, f"it sent {error}", by_peer=True)
        self.deliver()

    def _ended(self, channel: Channel, reason: str, by_peer: bool) -> None:
        if self._tie is None or self._tie[0] is not channel:
            return
        self._tie = None
        if by_peer:
            log(f"tie: rank 0 is lost: {reason}")
            self.follower.lost(reason, time.monotonic())
        else:
            self.follower.dropped()

    def deliver(self) -> None:
        if self._tie is not None and not self.follower.tied:  # silent for too long
            log(f"tie: rank 0 is lost: {self.follower.missing[1]}")
            self._tie[0].close()
            self._tie = None
        message, now = self.follower.message(), time.monotonic()
        if self._tie is not None and (message != self._delivered or now >= self._beat_due):
            self._delivered, self._beat_due = message, now + self._terms.silent_seconds / 10
            channel, session = self._tie
            channel.send(session.seal(message))

    def close(self) -> None:
        if self._attempt is not None:
            self._attempt.end("we stop")
        if self._tie is not None:
            self._tie[0].farewell()
            self._tie = None


class Attempt:
    """One attempt of a follower to be tied, from connecting to the welcome."""

    def __init__(self, shard: Shard, terms: TieTerms, key: bytes, events: Events, follower: Follower, tie: FollowerTie) -> None:
        now = time.monotonic()
        self.until = now + min(HANDSHAKE_SECONDS, max(1.0, terms.silent_seconds / 5))
        self._shard = shard
        self._key = key
        self._events = events
        self._follower = follower
        self._tie = tie
        self._channel: Channel | None = None
        self._session: Session | None = None
        self._connecting = socket.socket(socket.AF_INET6 if ":" in terms.address else socket.AF_INET, socket.SOCK_STREAM)
        self._connecting.setblocking(False)
        self._code = self._connecting.connect_ex((terms.address, terms.port))
        if self._code not in (0, errno.EINPROGRESS):
            self.until = now  # no route, for example
        events.register(self._connecting, selectors.EVENT_WRITE, lambda mask: self._connected())

    @property
    def is_connected(self) -> bool:
        return self._channel is not None

    def _connected(self) -> None:
        code = self._connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code != 0 or self._code not in (0, errno.EINPROGRESS):
            self.end(os.strerror(code or self._code))
            return
        self._events.unregister(self._connecting)
        self._channel = Channel(self._connecting, self._events, self._greeted, lambda reason, by_peer: self.end(reason))

    def _greeted(self, line: bytes) -> None:
        leader_nonce = line[len(TIE_GREETING) :]
        if not line.startswith(TIE_GREETING) or not NONCE.fullmatch(leader_nonce):
            self.end("what listens there is no run_shard.py of this version")
            return
        assert self._channel is not None
        own, shard = nonce(), self._shard
        self._session = Session(self._key, leader_nonce, own, is_leader=False)
        self._channel.on_line = self._answered
        self._channel.send(
            sealed(
                self._key,
                [b"hello", leader_nonce],
                {
                    "replica": shard.replica,
                    "rank": shard.rank,
                    "nodes": shard.nodes,
                    "fingerprint": shard.fingerprint,
                    "nonce": own.decode(),
                    "number": self._follower.number,
                    **self._follower.message(),
                    "type": "hello",
                },
            )
        )

    def _answered(self, line: bytes) -> None:
        channel, session = self._channel, self._session
        assert channel is not None and session is not None
        if line.startswith(b"refused "):  # by somebody who has another secret: not to be believed, but to be told
            self.end(f"refuses us: {line[8:200].decode('ascii', 'replace')}")
            return
        try:
            answer = session.open(line)
        except TieError as error:
            self.end(str(error))
            return
        if answer.get("type") == "welcome":
            self._tie.tied(self, channel, session)
        else:
            self.end(f"refuses us: {str(answer.get('why'))[:200]}", refused=True)

    def end(self, why: str, refused: bool = False) -> None:
        if self._channel is not None:
            self._channel.close()
        else:
            self._events.unregister(self._connecting)
            self._connecting.close()
        self._tie.attempt_failed(self, why if self._code in (0, errno.EINPROGRESS) else os.strerror(self._code), refused)


def make_tie(shard: Shard, events: Events, number: int, credentials: str | None) -> Alone:
    """Raises Refusal where the secret cannot be read or the port cannot be had."""
    if shard.tie is None:
        return Alone(shard, number)
    key = read_secret(secret_path(shard, shard.tie.secret, credentials))
    if len(key) < 32:
        raise Refusal(f"secret {secret_path(shard, shard.tie.secret, credentials)} has less than 32 characters", EX_UNAVAILABLE)
    return (LeaderTie if shard.rank == 0 else FollowerTie)(shard, shard.tie, key, events, number)


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
    kind: str = LAUNCH
    rank: int | None = None  # the other rank that it began with

    @classmethod
    def by(cls, cause: Cause, own_rank: int) -> End:
        """The end of our part in a run that is over for another rank's sake, or by rank 0's word."""
        return cls(said(cause, own_rank), EX_SOFTWARE, cause.launch, cause.code, cause.signal, kind=cause.kind, rank=cause.rank)

    def as_cause(self, own_rank: int) -> Cause:
        return Cause(own_rank, self.kind, self.reason, self.launch, self.code, self.signal)


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

    def __init__(self, shard: Shard, tie: Alone, events: Events, notify: Notify, state: State, credentials: str | None) -> None:
        self._shard = shard
        self._tie = tie
        self._events = events
        self._notify = notify
        self._credentials = credentials
        self._children = Children(f"{shard.identity}/{tie.run.id}")
        self._state = state

    def execute(self) -> tuple[End, list[Process]]:
        """Run the shard until it is over and end all of it: why, and what could not be ended. Raises nothing: a fault of our own is an end like any other."""
        try:
            self._prepare()
            self._start_all()
            while True:
                self._pause(math.inf)
        except RunOver as over:
            end = over.end
        except Exception as error:  # noqa: BLE001 pylint: disable=broad-except
            end = End(f"internal error of run_shard.py: {type(error).__name__}: {error}", EX_SOFTWARE, kind=INTERNAL)
        log(f"stopping: {end.reason}")
        self._state.ended(end)
        if end.rank is None:
            self._tie.own_ended(end.as_cause(self._shard.rank))  # the other ranks learn of it before anything else is done
        left = self._stop(end)
        if self._tie.cause is not None and not end.requested and self._tie.cause.rank != self._shard.rank:
            end = end._replace(**{name: value for name, value in End.by(self._tie.cause, self._shard.rank)._asdict().items() if name != "exit_code"})
            self._state.ended(end)
        return end, left

    # -- start

    def _prepare(self) -> None:
        shard = self._shard
        left = sweep(shard, self._events, self._state)
        try:
            os.makedirs(shard.work_dir, mode=0o755, exist_ok=True)
        except OSError:
            pass  # the checks say what is wrong with it
        self._wait_for_hcas()
        found = [f"process {process} of an earlier run of this shard cannot be ended" for process in left]
        found += findings(shard, self._credentials)
        if shard.gpus and not found:
            found += ask_in_child(lambda: check_gpu_memory(shard.gpus), self._pause, GPU_CHECK_SECONDS)
        for finding in found:
            log(f"check: {finding}")
        if found:
            raise RunOver(End("; ".join(found), EX_UNAVAILABLE, kind=CHECK))
        self._look()
        self._notify.ready()

    def _wait_for_hcas(self) -> None:
        """After a boot links come up, and subnet managers answer, some time after services start."""
        deadline = time.monotonic() + HCA_PATIENCE_SECONDS
        while time.monotonic() < deadline:
            found = check_hcas(self._shard.hcas, self._shard.sysfs_root)
            if not found:
                return
            self._state.stage("waiting", found[0])
            self._sleep(PROBE_PERIOD_SECONDS)

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
            raise RunOver(End(f"launch {launch.name}: {refusal.text}", refusal.code, launch.name, kind=CHECK)) from None
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
            raise RunOver(stop_of(self._events.stop_signal))
        for entry in self._children.started:
            if entry.exit is not None:
                raise RunOver(judge(entry.launch.name, entry.launch is self._shard.launches[-1], entry.exit))
        self._state.tied(self._tie.role, self._tie.tied_ranks(), self._tie.failures)
        if self._tie.phase != RUNNING and self._tie.cause is not None:
            raise RunOver(End.by(self._tie.cause, self._shard.rank))

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
        except OSError as error:  # no IPv6 on this host, no such interface in a link-local address
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
                return None  # accepted, and reset by the peer at once
            # A port of the ephemeral range on this host can be given to the probe itself, which then connects to itself.
            return os.strerror(errno.ECONNREFUSED) if to_itself else None

    # -- stop

    def _stop(self, end: End) -> list[Process]:
        """End the engine, then the sidecars in reverse order, then all that is left of them. Returns what could not be ended."""
        self._state.forget_readiness()
        self._state.stage("stopping", end.reason)
        if end.requested:
            self._notify.send("STOPPING=1")
        while not self._tie.may_stop() and self._events.stop_signal is None and self._children.living():
            self._events.wait(TICK_SECONDS)  # rank 0 stops first
            self._children.reap()
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
            os.kill(entry.pid, signal.SIGTERM)  # not Popen's method: that may collect the exit status behind reap()'s back
        share = deadline if last else time.monotonic() + 0.75 * (deadline - time.monotonic())
        while entry.exit is None and time.monotonic() < share:
            self._events.wait(TICK_SECONDS)
            self._children.reap()


def sweep(shard: Shard, events: Events, state: State) -> list[Process]:
    """End what an earlier run of this shard has left: it would keep the GPUs, the ports and the peers busy. Returns what could not be ended."""
    found = leftovers_of(shard.identity)
    if not found:
        return []
    for process in found.values():
        log(f"process {process} is left of run {read_marker(process.pid) or shard.identity}: ending it")
    state.stage("starting", f"ending {len(found)} processes of an earlier run")
    return end_processes(lambda: leftovers_of(shard.identity), events.wait, LEFTOVER_GRACE_SECONDS)


def stop_of(signal_text: str) -> End:
    return End(f"{signal_text} received", 0, requested=True, kind=STOP)


class Life:
    """One process of run_shard.py: run after run, with the other ranks, until it is stopped, refused, or given up. The lock is held by the caller."""

    def __init__(self, shard: Shard, events: Events, notify: Notify, credentials: str | None) -> None:
        self._shard = shard
        self._events = events
        self._notify = notify
        self._credentials = credentials
        self._state = State(shard, notify)

    def execute(self) -> int:
        """Returns the exit code."""
        try:
            left = sweep(self._shard, self._events, self._state)  # only a rank without old processes may be tied
            if left:
                raise Refusal("; ".join(f"process {process} of an earlier run of this shard cannot be ended" for process in left), EX_UNAVAILABLE)
            self._wait_for_own_address()
            self._events.tie = tie = make_tie(self._shard, self._events, self._state.number, self._credentials)
        except Refusal as refusal:
            log(f"check: {refusal.text}")
            return self._finish(End(refusal.text, refusal.code, kind=CHECK), [])
        try:
            if tie.role is not None:
                self._notify.ready()  # other hosts may come much later
            tie.own_idle()
            while True:
                end, left = self._next(tie)
                if end is not None:
                    return self._finish(end, left)
        except Exception as error:  # noqa: BLE001 pylint: disable=broad-except
            return self._finish(End(f"internal error of run_shard.py: {type(error).__name__}: {error}", EX_SOFTWARE, kind=INTERNAL), [])
        finally:
            tie.close()

    def _wait_for_own_address(self) -> None:
        """Rank 0 cannot listen for the others before its network is there, which after a boot may take longer than a service manager's patience."""
        terms = self._shard.tie
        if terms is None or self._shard.rank != 0:
            return
        deadline = time.monotonic() + OWN_ADDRESS_SECONDS
        while time.monotonic() < deadline and self._events.stop_signal is None:
            error = bind_error(terms.address, 0)
            if error is None or error.errno != errno.EADDRNOTAVAIL:
                return
            self._notify.ready()
            self._state.stage(TYING, f"waits for this host's own address {terms.address}")
            self._events.wait(PROBE_PERIOD_SECONDS)

    def _next(self, tie: Alone) -> tuple[End | None, list[Process]]:
        """Wait for the next run and run it. Returns an end where no other run may follow."""
        while tie.phase != RUNNING:
            if self._events.stop_signal is not None:
                tie.own_ended(stop_of(self._events.stop_signal).as_cause(self._shard.rank))
                return stop_of(self._events.stop_signal), []
            if tie.phase == ENDING:
                tie.own_idle()  # over before we could begin it
            self._state.tied(tie.role, tie.tied_ranks(), tie.failures)
            if tie.phase == GIVEN_UP and tie.cause is not None:
                return End.by(tie.cause, self._shard.rank)._replace(reason=tie.given_up(), exit_code=EX_GIVEN_UP), []
            self._state.stage(*tie.describe())
            self._events.wait(math.inf)
        run, shard = tie.run, self._shard.of_run(tie.run.number)
        log(f"{shard.replica} rank {shard.rank} of {shard.nodes}, fingerprint {shard.fingerprint}, run {run.id}")
        self._state.begin(run)
        end, left = Run(shard, tie, self._events, self._notify, self._state, self._credentials).execute()
        if not left:
            tie.own_idle()
        once = self._shard.restart is None and self._shard.tie is None
        refused = end.kind == CHECK and tie.role is None  # among several ranks it counts, and rank 0 says when it was too often, to all of them
        if end.requested or left or once or refused:
            return end, left
        log(f"run {run.id} is over: {end.reason}")
        return None, []

    def _finish(self, end: End, left: list[Process]) -> int:
        if left:
            end = end._replace(reason=f"{end.reason}; could not be ended: {listing(left)}", exit_code=end.exit_code or EX_OSERR)
        self._state.ended(end)
        self._state.stage("stopped" if end.requested and not left else "failed", end.reason)
        log(f"{'stopped' if end.requested else 'failed'}: {end.reason}; exit code {end.exit_code}")
        return end.exit_code


def run(shard: Shard, environ: Mapping[str, str]) -> int:
    """Hold the lock, run the shard until nothing more is to be run, return the exit code."""
    os.umask(0o022)
    notify = Notify(environ)
    events = Events(notify)
    lock = Lock(shard.state_dir)
    try:
        return Life(shard, events, notify, environ.get("CREDENTIALS_DIRECTORY")).execute()
    finally:
        lock.release()


class Arguments(argparse.ArgumentParser):
    """An argument parser whose complaint is one line like any other."""

    def error(self, message: str) -> NoReturn:
        raise Refusal(f"{message} (run_shard.py --help shows the usage)", EX_USAGE)


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = Arguments(prog="run_shard.py", allow_abbrev=False, description="Run one shard of a replica.")
    parser.add_argument(
        "directory",
        nargs="?",
        default=os.path.dirname(os.path.realpath(__file__)),
        help="the revision's directory, with launch.json and shard.env (default: where run_shard.py lies)",
    )
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
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--show | head` ends quietly
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
