# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Stands in the place of an engine's program where the build is a container image: the same command, environment and signals, inside of it.

It lies in the build's directory under each program's name, beside `container.json`: `{podman, image, mounts: [directory], options: [word]}`. Standard
library only, Python 3.9+. It becomes podman, so whoever started the program has podman as its child, and podman hands on every signal.

- GPUs are given by CDI (`nvidia-ctk cdi generate`): those of CUDA_VISIBLE_DEVICES by their UUIDs, or all of them where it holds numbers, which count over
  all. NVIDIA_VISIBLE_DEVICES=all asks for all of them when a build is looked at.
- The network and shared memory are the host's, since ranks find each other by the host's addresses and NCCL needs the memory.
- Values of variables are in no argument: podman is told their names, and takes the values from its own environment.
- No cgroup of its own (`--cgroups=disabled`): its processes stay in the service's, and end with it.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Of the host: the image has its own, or podman itself needs them.
NOT_PASSED = frozenset(
    {"PATH", "LD_LIBRARY_PATH", "HOSTNAME", "PWD", "OLDPWD", "SHLVL", "_", "CREDENTIALS_DIRECTORY", "NOTIFY_SOCKET", "INVOCATION_ID", "JOURNAL_STREAM"}
)
NOT_PASSED_PREFIXES = ("CONTAINER", "DOCKER_", "REGISTRY_", "STORAGE_", "BUILDAH_", "PODMAN_")
RDMA = "/dev/infiniband"


def command(
    settings: Mapping[str, Any],
    program: str,
    args: Sequence[str],
    environ: Mapping[str, str],
    exists: Callable[[str], bool],
    ids: tuple[int, int] = (0, 0),
    limits: Sequence[tuple[str, int]] = (),
) -> list[str]:
    """The whole command of podman. Pure but for `exists`, which says what is there on the host. `limits` are those of the service: podman's own defaults
    may be above them, and then no container starts."""
    words = [
        str(settings["podman"]),
        "run",
        "--rm",
        "--pull=never",
        "--network=host",
        "--ipc=host",
        "--cgroups=disabled",
        "--log-driver=none",
        "--security-opt=label=disable",
        "--security-opt=no-new-privileges",
        "--cap-drop=all",
        "--cap-add=IPC_LOCK",
        "--user=%d:%d" % ids,
        *("--ulimit=%s=%d:%d" % (name, limit, limit) for name, limit in limits if limit > 0),
        "--entrypoint=%s" % program,
    ]
    words += ["--device=nvidia.com/gpu=%s" % gpu for gpu in gpus(environ.get("CUDA_VISIBLE_DEVICES") or environ.get("NVIDIA_VISIBLE_DEVICES"))]
    if exists(RDMA):
        words += ["--device=%s" % RDMA, "--ulimit=memlock=-1:-1"]
    words += ["--volume=%s:%s:ro" % (path, path) for path in read_only(settings, args, environ) if exists(path)]
    home = environ.get("HOME", "")
    if os.path.isabs(home) and home != "/" and exists(home):
        words += ["--volume=%s:%s" % (home, home), "--workdir=%s" % home]
    words += ["--env=%s" % name for name in sorted(environ) if is_passed(name)]
    return [*words, *map(str, settings.get("options") or ()), str(settings["image"]), *args]


def gpus(visible: str | None) -> list[str]:
    """CDI names of the devices: UUIDs as they are, all for numbers, none where the variable is not set or empty."""
    wanted = [word.strip() for word in (visible or "").split(",") if word.strip()]
    return ["all"] if any(word.isdecimal() for word in wanted) else wanted


def read_only(settings: Mapping[str, Any], args: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The build's directories, and those of secret files that arguments name: none of another replica's."""
    places = [str(path) for path in settings.get("mounts") or ()]
    secrets = [os.path.dirname(word) for word in args if word.startswith("/") and ("/secrets/" in word or word.startswith("/run/credentials/"))]
    return list(dict.fromkeys([*places, *secrets]))


def is_passed(name: str) -> bool:
    return name not in NOT_PASSED and not name.startswith(NOT_PASSED_PREFIXES)


def main() -> int:
    here = os.path.dirname(os.path.abspath(__file__))
    try:
        with open(os.path.join(here, "container.json"), encoding="utf-8") as stream:
            settings = json.load(stream)
        program = os.path.basename(__file__)
        words = command(
            settings,
            str((settings.get("programs") or {}).get(program, program)),
            sys.argv[1:],
            os.environ,
            os.path.exists,
            (os.getuid(), os.getgid()),
            [(name, resource.getrlimit(kind)[1]) for name, kind in (("nofile", resource.RLIMIT_NOFILE), ("nproc", resource.RLIMIT_NPROC))],
        )
        os.execv(words[0], words)
    except (OSError, ValueError, KeyError) as error:
        print("%s: the container cannot be started: %s" % (sys.argv[0], error), file=sys.stderr)
    return 127


if __name__ == "__main__":
    sys.exit(main())
