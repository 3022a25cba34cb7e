# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Wheels made here, which real pip installs without a network: packages of an engine's name whose program answers as the engine's would."""

from __future__ import annotations

import base64
import hashlib
import pathlib
import zipfile
from collections.abc import Sequence

PROGRAM = """import sys

def main():
    if sys.argv[1:] in (["--version"], ["version"]):
        print({version!r})
        return 0
    print("serving", sys.argv[1:], file=sys.stderr)
    return 3
"""


def make(folder: pathlib.Path, name: str, version: str, program: str | None, needs: Sequence[str] = (), more: str = "") -> pathlib.Path:
    """Write NAME-VERSION-py3-none-any.whl into a folder, and return the folder. C(program): what it installs as a command."""
    folder.mkdir(parents=True, exist_ok=True)
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    files = {
        f"{module}.py": PROGRAM.format(version=version) + more,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + "".join(f"Requires-Dist: {need}\n" for need in needs),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if program:
        files[f"{info}/entry_points.txt"] = f"[console_scripts]\n{program} = {module}:main\n"
    record = [f"{path},sha256={_hash(text)},{len(text.encode())}" for path, text in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,"]) + "\n"
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return folder


def _hash(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
