# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Build libnvidia-ml.so.1 from fake_nvml.c and print the directory that holds it.

    python tests/fake_nvml/build.py [--out DIR]

The default DIR is `tests/fake_nvml/build/`. Nothing is compiled when the sources, the compiler and the calls that pynvml knows are
those of the library already there. The compiler is the first of $CC, cc, gcc, clang, and else `python -m ziglang cc`.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
SOURCE = HERE / "fake_nvml.c"
LIBRARY = "libnvidia-ml.so.1"
FLAGS = ["-O2", "-g", "-std=gnu11", "-Wall", "-Wextra", "-Wno-unused-label", "-fPIC", "-shared", "-fvisibility=hidden", f"-Wl,-soname,{LIBRARY}"]


def compiler() -> list[str]:
    """The command that compiles C; raises SystemExit where there is none."""
    if os.environ.get("CC"):
        return shlex.split(os.environ["CC"])
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc"]
    raise SystemExit("no C compiler: install gcc or clang, or `python -m pip install ziglang`")


def stubs(source: str) -> list[str]:
    """The C functions that the installed pynvml can look up and `source` does not define; none without pynvml."""
    spec = importlib.util.find_spec("pynvml")
    if spec is None or not spec.origin:
        return []
    wanted = set(re.findall(r'_nvmlGetFunctionPointer\("(nvml\w+)"\)', pathlib.Path(spec.origin).read_text(encoding="utf-8", errors="replace")))
    defined = set(re.findall(r"\b(nvml[A-Z]\w*)\s*\(", source)) | set(re.findall(r"(?:GETU32|PROCS)\((nvml\w+)", source))
    return sorted(wanted - defined)


def build(out: pathlib.Path) -> pathlib.Path:
    """Build into `out` when needed; returns `out`. Safe when several processes build at once: files appear by rename."""
    source = SOURCE.read_text(encoding="utf-8")
    lines = "".join(f"STUB({name})\n" for name in stubs(source))
    command = [*compiler(), *FLAGS]
    digest = hashlib.sha256("\0".join([source, lines, *command]).encode()).hexdigest()
    stamp = out / "built"
    if (out / LIBRARY).exists() and stamp.exists() and stamp.read_text(encoding="ascii") == digest:
        return out
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as scratch:
        (pathlib.Path(scratch) / "stubs.inc").write_text(lines, encoding="ascii")
        made = pathlib.Path(scratch) / LIBRARY
        subprocess.run([*command, "-I", scratch, "-o", str(made), str(SOURCE), "-lpthread"], check=True)
        new_stamp = pathlib.Path(scratch) / "built"
        new_stamp.write_text(digest, encoding="ascii")
        os.replace(made, out / LIBRARY)
        os.replace(new_stamp, stamp)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the stand-in for libnvidia-ml.so.1 and print its directory.")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "build")
    print(build(parser.parse_args().out.resolve()))


if __name__ == "__main__":
    main()
