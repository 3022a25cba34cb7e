# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ask the programs of an engine build what they are: version, devices, Python packages, and a fingerprint of their files.

Programs are asked in a clean environment and in C(/): llama.cpp loads backends from the current directory (ggml-backend-reg.cpp).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ansible_collections.rankzero.inference.plugins.module_utils import small_files

RunCommand = Callable[..., tuple[int, str, str]]
_VERSION = re.compile(r"\bversion:?\s+v?([0-9][^\s,]*)", re.IGNORECASE)
_BARE_VERSION = re.compile(r"^v?([0-9]+\.[0-9][^\s,]*)\s*$", re.MULTILINE)  # all that vllm --version prints
_DEVICE = re.compile(r"^\s+([A-Za-z]+[0-9]*): (.*?)(?: \((\d+) MiB, (\d+) MiB free\))?\s*$")
_EXEC = "'''exec' "
_BESIDE = re.compile(r'"\$\(dirname -- "\$\(realpath -- "\$0"\)"\)"/\'?([A-Za-z0-9._-]+)\'? ')
_LIBRARY = re.compile(r"\.so(\.[0-9]+)*$")
ANSWER_SECONDS = 120  # a driver that wakes up many GPUs takes its time; a program that serves instead of answering takes for ever
CLEAN_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


TIMED_OUT = 124  # timeout(1)

# What is installed beside a build's Python. RECORD lists every file of a package with its hash, so its own hash stands for them all.
_PACKAGES = r"""
import hashlib, importlib.metadata, json, platform, re
found = {}
for package in importlib.metadata.distributions():
    name = re.sub(r"[-_.]+", "-", package.metadata["Name"] or "").lower()
    if name and name not in found:
        record = package.read_text("RECORD") or ""
        # Scripts name the directory, and pip's own notes say where a package came from: neither is the package.
        lines = sorted(line for line in record.splitlines()
                       if ",sha256=" in line and not re.match(r"\.\.|[^,]*\.dist-info/(direct_url\.json|INSTALLER|REQUESTED),", line))
        found[name] = [package.version, hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]]
print(json.dumps({"python": platform.python_version(), "packages": found}))
"""
# CUDA's devices as the build's own PyTorch sees them. Older releases have no uuid.
_TORCH_DEVICES = r"""
import json, torch
found = []
for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
    properties = torch.cuda.get_device_properties(index)
    uuid = getattr(properties, "uuid", None)
    found.append({"name": "CUDA%d" % index, "description": properties.name, "total_mib": properties.total_memory // 1048576,
                  "uuid": "GPU-%s" % uuid if uuid else None})
print(json.dumps(found))
"""
# Packages whose versions decide how ranks work together, shown by name where ranks differ.
TELLING_PACKAGES = (
    "vllm",
    "sglang",
    "torch",
    "ray",
    "transformers",
    "triton",
    "flashinfer-python",
    "sgl-kernel",
    "sglang-kernel",
    "xgrammar",
    "huggingface-hub",
)
_NCCL_PACKAGE = re.compile(r"nvidia-nccl(-cu[0-9]+)?\Z")


class ProbeError(Exception):
    """A build cannot be used. The text says which program, what it did, and what to do."""


def option(name: str) -> str:
    """An option of the module engine_build by both its names: whoever runs a playbook has set the variable of the role."""
    return "%s (engine_%s in the playbooks)" % (name, {"engine": "name", "name": "build_name"}.get(name, name))


def find_programs(path: str, names: Sequence[str], optional: Sequence[str]) -> dict[str, str]:
    """C({program name: absolute path}) in a directory, or beside a program whose path is given."""
    if not os.path.isabs(path):
        raise ProbeError("%s %s is no absolute path: give the directory of the build's programs on the host, such as /opt/vllm/bin" % (option("path"), path))
    if "=" in path:
        raise ProbeError("%s has a = in it, and env(1) would take it for a variable: install the build under another path" % path)
    directory = path if os.path.isdir(path) else os.path.dirname(path)
    found = {name: os.path.join(directory, name) for name in [*names, *optional] if os.access(os.path.join(directory, name), os.X_OK)}
    missing = [name for name in names if name not in found]
    if missing:
        raise ProbeError(
            "no executable %s in %s%s: give the directory of the build's programs on the host as %s, or install a build with the playbook install_engine"
            % (", ".join(missing), directory, "" if os.path.isdir(directory) else ", which is not there", option("path"))
        )
    return found


def ask(run_command: RunCommand, program: str, args: Sequence[str], env: Mapping[str, str]) -> tuple[str, str]:
    """(stdout, stderr) of a program that must end with 0. Its home is a directory that goes again: SGLang makes caches there when it is only imported."""
    with tempfile.TemporaryDirectory(prefix="rankzero-probe-") as home:
        words = [
            "timeout",
            "--kill-after=5",
            str(ANSWER_SECONDS),
            "env",
            "-i",
            "PATH=" + CLEAN_PATH,
            "LANG=C.UTF-8",
            # A container does not have the host's directories, and what is made in it goes with it.
            "HOME=" + ("/nonexistent" if os.path.exists(os.path.join(os.path.dirname(program), "container.json")) else home),
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
        wanted = "; wanted is 'version 1.2' somewhere, or a line of the number alone"
        raise ProbeError("%s %s names no version: %s%s" % (program, " ".join(args), (out + err).strip()[:200], wanted))
    return found.group(1)


def parse_devices(text: str) -> list[dict[str, Any]]:
    """The indented lines C(CUDA0: NVIDIA H100 (81008 MiB, 80559 MiB free)) of C(--list-devices); the line C((none)) is no device."""
    devices = []
    for line in text.splitlines():
        found = _DEVICE.match(line)
        if found:
            devices.append({"name": found.group(1), "description": found.group(2).strip(), "total_mib": int(found.group(3)) if found.group(3) else None})
    return devices


def python_of(program: str) -> str | None:
    """The interpreter that a Python program of a build runs with, as its first line says; None for a program that is none, or that cannot be read.

    Where that line would be too long for the kernel, pip writes a shell's: C(#!/bin/sh), then C('''exec' /long/path/python "$0" "$@"). In an environment that
    can be moved (uv's relocatable ones) that second line looks for the interpreter beside the program.
    """
    content, _problem = small_files.read_bytes(program, 4096)
    lines = (content or b"").decode("utf-8", "surrogateescape").split("\n")[:2]
    if not lines[0].startswith("#!"):
        return None
    words = lines[0][2:].split(None, 1)[:1]
    if words == ["/bin/sh"] and len(lines) > 1 and lines[1].startswith(_EXEC):
        beside = _BESIDE.match(lines[1][len(_EXEC) :])
        words = [os.path.join(os.path.dirname(os.path.realpath(program)), beside.group(1))] if beside else shlex.split(lines[1][len(_EXEC) :])[:1]
    return words[0] if words and os.path.basename(words[0]).startswith("python") and os.path.isabs(words[0]) else None


def python_packages(run_command: RunCommand, python: str, env: Mapping[str, str]) -> dict[str, Any]:
    """C({python: version, packages: {name: [version, hash of its list of files]}}) of an interpreter, asked in isolation (C(-I))."""
    answer = _json(ask(run_command, python, ["-I", "-c", _PACKAGES], env)[0], python)
    if not isinstance(answer, dict) or not isinstance(answer.get("packages"), dict):
        raise ProbeError("%s does not say which packages it has" % python)
    return answer


def torch_devices(run_command: RunCommand, python: str, env: Mapping[str, str]) -> list[dict[str, Any]]:
    """The GPUs that the build's PyTorch sees, in the order of the bus."""
    answer = _json(ask(run_command, python, ["-I", "-c", _TORCH_DEVICES], {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **env})[0], python)
    return [device for device in answer if isinstance(device, dict)] if isinstance(answer, list) else []


def _json(text: str, program: str) -> Any:
    """The last line of an answer: libraries print what they like before it."""
    try:
        return json.loads((text.strip().splitlines() or [""])[-1])
    except ValueError:
        raise ProbeError("%s answers with what is no JSON: %s" % (program, text.strip()[:200])) from None


def telling_versions(packages: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(packages[name][0]) for name in TELLING_PACKAGES if name in packages}


def nccl_version(packages: Mapping[str, Any]) -> str | None:
    """The NCCL that PyTorch brings along (nvidia-nccl-cu13)."""
    found = sorted(name for name in packages if _NCCL_PACKAGE.match(name))
    return str(packages[found[-1]][0]) if found else None


def missing_gpus(devices: Sequence[Mapping[str, Any]], gpus: Sequence[Mapping[str, Any]]) -> list[str]:
    """The host's GPUs, as sentences, that are not among the devices which a build sees.

    By UUID where the build tells it, else by model and count. Under MIG CUDA shows one instance and hides the rest, so nothing can be said.
    """
    whole = [gpu for gpu in gpus if gpu.get("uuid") and not (gpu.get("partition") or {}).get("kind")]
    if len(whole) != len([gpu for gpu in gpus if gpu.get("uuid")]):
        return []
    told = {str(device["uuid"]) for device in devices if device.get("uuid")}
    if told:
        return [_gpu(gpu) for gpu in whole if gpu["uuid"] not in told]
    left = [str(device.get("description") or "") for device in devices]
    missing = []
    for gpu in whole:
        place = next((number for number, text in enumerate(left) if str(gpu.get("model")) in text), None)
        if place is None:
            missing.append(_gpu(gpu))
        else:
            del left[place]
    return missing


def _gpu(gpu: Mapping[str, Any]) -> str:
    return "GPU %s (%s, %s)" % (gpu.get("index"), gpu.get("model"), gpu.get("uuid"))


def fingerprint(programs: Mapping[str, str], python: Mapping[str, Any] | None = None, packages: Mapping[str, str] | None = None) -> str:
    """16 hex digits over what decides how a build behaves, wherever it lies on a host. Raises OSError where a file cannot be read.

    The programs and the shared libraries beside them by name and content; for a Python build its version and every package instead of libraries, as
    C(python_packages) tells them; C(packages) of a distribution by name and version.
    """
    files = set(programs.values())
    for directory in {os.path.dirname(path) for path in programs.values()} if not python and not packages else ():
        files |= {os.path.join(directory, name) for name in os.listdir(directory) if _LIBRARY.search(name)}
    lines = []
    seen: dict[tuple[int, int], str] = {}
    for path in files:
        status = os.stat(path)
        digest = seen.get((status.st_dev, status.st_ino)) or file_digest(path)
        seen[(status.st_dev, status.st_ino)] = digest
        lines.append("%s %s\n" % (os.path.basename(path), digest))
    lines += ["%s=%s\n" % item for item in (packages or {}).items()]
    if python:
        lines.append("python %s\n" % python["python"])
        lines += ["%s==%s %s\n" % (name, *found) for name, found in python["packages"].items()]
    return hashlib.sha256("".join(sorted(lines)).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def file_digest(path: str) -> str:
    """sha256 of a program. The line that names a script's interpreter is left out: it holds the directory, and hosts may differ in that."""
    digest = hashlib.sha256()
    script = python_of(path) is not None
    with open(path, "rb") as stream:
        if script:
            if stream.readline().startswith(b"#!/bin/sh"):  # pip's way around long names has three lines
                stream.readline()
                stream.readline()
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()
