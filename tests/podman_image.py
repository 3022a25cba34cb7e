# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A container image made here of one small program, without a registry, for tests where podman runs containers."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess

SOURCE = """#include <stdio.h>
#include <stdlib.h>
#include <string.h>
int main(int count, char **words) {
    if (count > 1 && !strcmp(words[1], "--list-devices")) { puts("Available devices:"); puts("  (none)"); return 0; }
    if (count > 1 && !strcmp(words[1], "--version")) { puts("version: 1.2.3"); return 0; }
    for (int number = 1; number < count; number++) puts(words[number]);
    puts(getenv("VLLM_API_KEY") ? getenv("VLLM_API_KEY") : "no key");
    FILE *file = fopen(getenv("READ"), "r");
    puts(file ? "read it" : "cannot read it");
    return 7;
}
"""
RUN = ["podman", "run", "--rm", "--network=host", "--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024"]


def save(folder: pathlib.Path) -> tuple[dict[str, str], str | None]:
    """Write FOLDER/image.tar as C(podman save) does: (environment of podman, why no container runs on this machine or None).

    Storage and settings are the test's own; the runtime is the one that works here.
    """
    if shutil.which("podman") is None or shutil.which("cc") is None or os.geteuid() != 0:
        return {}, "no podman, no compiler, or not root"
    (folder / "program.c").write_text(SOURCE)
    built = subprocess.run(["cc", "-static", "-o", str(folder / "llama-server"), str(folder / "program.c")], capture_output=True, text=True, check=False)
    if built.returncode:
        return {}, built.stderr
    (folder / "containers.conf").write_text('[engine]\ncgroup_manager = "cgroupfs"\n' + ('runtime = "runc"\n' if shutil.which("runc") else ""))
    (folder / "storage.conf").write_text(f'[storage]\ndriver = "vfs"\ngraphroot = "{folder}/storage"\nrunroot = "{folder}/run"\n')
    env = {"CONTAINERS_CONF": str(folder / "containers.conf"), "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf")}
    own = {**os.environ, **env}
    tar = subprocess.run(["tar", "-C", str(folder), "-c", "--transform=s,^,usr/bin/,", "llama-server"], capture_output=True, check=True).stdout
    imported = subprocess.run(["podman", "import", "-", "localhost/engine:1"], input=tar, capture_output=True, check=False, env=own)
    tried = subprocess.run(
        [*RUN, "--entrypoint=/usr/bin/llama-server", "localhost/engine:1", "--version"], capture_output=True, text=True, check=False, env=own
    )
    if tried.returncode:
        return env, "podman runs no container here: " + (imported.stderr.decode() + tried.stderr)[-300:]
    subprocess.run(["podman", "save", "--quiet", "-o", str(folder / "image.tar"), "localhost/engine:1"], check=True, env=own)
    subprocess.run(["podman", "image", "rm", "localhost/engine:1"], check=True, capture_output=True, env=own)
    return env, None


__all__ = ["save"]
