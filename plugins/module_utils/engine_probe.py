# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ask the programs of an engine build what they are: version, devices, and a fingerprint of their files.

Programs are asked in a clean environment and in C(/): llama.cpp loads backends from the current directory (ggml-backend-reg.cpp).
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

RunCommand = Callable[..., tuple[int, str, str]]
_VERSION = re.compile(r"\bversion:?\s+v?([0-9][^\s,]*)", re.IGNORECASE)
_BARE_VERSION = re.compile(r"^v?([0-9]+\.[0-9][^\s,]*)\s*$", re.MULTILINE)  # all that vllm --version prints
_DEVICE = re.compile(r"^\s+([A-Za-z]+[0-9]*): (.*?)(?: \((\d+) MiB, (\d+) MiB free\))?\s*$")
_LIBRARY = re.compile(r"\.so(\.[0-9]+)*$")
ANSWER_SECONDS = 120  # a driver that wakes up many GPUs takes its time; a program that serves instead of answering takes for ever
CLEAN_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


TIMED_OUT = 124  # timeout(1)


class ProbeError(Exception):
    """A build cannot be used. The text says which program, what it did, and what to do."""


def find_programs(path: str, names: Sequence[str], optional: Sequence[str]) -> dict[str, str]:
    """C({program name: absolute path}) in a directory, or beside a program whose path is given."""
    if not os.path.isabs(path):
        raise ProbeError("%s is no absolute path" % path)
    if "=" in path:
        raise ProbeError("%s has a = in it, and env(1) would take it for a variable: install the build under another path" % path)
    directory = path if os.path.isdir(path) else os.path.dirname(path)
    found = {name: os.path.join(directory, name) for name in [*names, *optional] if os.access(os.path.join(directory, name), os.X_OK)}
    missing = [name for name in names if name not in found]
    if missing:
        raise ProbeError("no executable %s in %s" % (", ".join(missing), directory))
    return found


def ask(run_command: RunCommand, program: str, args: Sequence[str], env: Mapping[str, str]) -> tuple[str, str]:
    """(stdout, stderr) of a program that must end with 0."""
    words = [
        "timeout",
        "--kill-after=5",
        str(ANSWER_SECONDS),
        "env",
        "-i",
        "PATH=" + CLEAN_PATH,
        "LANG=C.UTF-8",
        "HOME=/nonexistent",
        *("%s=%s" % item for item in sorted(env.items())),
        program,
        *args,
    ]
    rc, out, err = run_command(words, cwd="/", expand_user_and_vars=False)
    if rc == 0:
        return out, err
    if rc == TIMED_OUT:
        raise ProbeError("%s %s did not answer within %d s" % (program, " ".join(args), ANSWER_SECONDS))
    number = -rc if rc < 0 else rc - 128
    if number == signal.SIGILL:
        raise ProbeError("%s dies with SIGILL: it was built for a processor with instructions that this one has not" % program)
    last = (err or out).strip().splitlines()[-1:] or ["no output"]
    raise ProbeError("%s %s ended with %d: %s" % (program, " ".join(args), rc, last[0][:300]))


def version(run_command: RunCommand, program: str, args: Sequence[str], env: Mapping[str, str]) -> str:
    out, err = ask(run_command, program, args, env)
    found = _VERSION.search(out + "\n" + err) or _BARE_VERSION.search(out)
    if not found:
        raise ProbeError("%s %s names no version: %s" % (program, " ".join(args), (out + err).strip()[:200]))
    return found.group(1)


def parse_devices(text: str) -> list[dict[str, Any]]:
    """The indented lines C(CUDA0: NVIDIA H100 (81008 MiB, 80559 MiB free)) of C(--list-devices); the line C((none)) is no device."""
    devices = []
    for line in text.splitlines():
        found = _DEVICE.match(line)
        if found:
            devices.append({"name": found.group(1), "description": found.group(2).strip(), "total_mib": int(found.group(3)) if found.group(3) else None})
    return devices


def fingerprint(programs: Mapping[str, str]) -> str:
    """16 hex digits over the programs and the shared libraries beside them, by name and content. Raises OSError where one cannot be read."""
    files = set(programs.values())
    for directory in {os.path.dirname(path) for path in programs.values()}:
        files |= {os.path.join(directory, name) for name in os.listdir(directory) if _LIBRARY.search(name)}
    lines = []
    seen: dict[tuple[int, int], str] = {}
    for path in files:
        status = os.stat(path)
        digest = seen.get((status.st_dev, status.st_ino)) or _file_digest(path)
        seen[(status.st_dev, status.st_ino)] = digest
        lines.append("%s %s\n" % (os.path.basename(path), digest))
    return hashlib.sha256("".join(sorted(lines)).encode("utf-8", "surrogateescape")).hexdigest()[:16]  # not by directory: hosts may differ in that


def _file_digest(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()
