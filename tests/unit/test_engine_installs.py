# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Installs of engine builds: real pip on wheels made here, real archives, real CMake; hostile archives; who uses a build."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import zipfile
from typing import Any

import pytest
import wheels

from ansible_collections.rankzero.inference.plugins.module_utils import engine_installs, engine_probe
from ansible_collections.rankzero.inference.plugins.module_utils.archives import ArchiveError
from ansible_collections.rankzero.inference.plugins.module_utils.engine_installs import InstallError, Store


def run(words: list[str], cwd: str | None = None, environ_update: dict[str, str] | None = None, **_more: Any) -> tuple[int, str, str]:
    """AnsibleModule.run_command, with what of it matters here."""
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, **(environ_update or {})})
    return done.returncode, done.stdout, done.stderr


def wish(method: str, **more: Any) -> dict[str, Any]:
    empty = {"requirements": [], "python": None, "wheels": None, "index_url": None, "extra_index_urls": [], "archive": None, "sha256": None}
    return {"method": method, **empty, "cmake_args": [], "cuda": False, "package": None, **more}


def archived(path: pathlib.Path, sha256: str | None = None, method: str = "archive", **more: Any) -> dict[str, Any]:
    return wish(method, archive=str(path), sha256=sha256 or hashlib.sha256(path.read_bytes()).hexdigest(), **more)


def tar(path: pathlib.Path, *members: tuple[str, Any], mode: int = 0o755) -> pathlib.Path:
    """Members: (name, bytes), or (name, a TarInfo's fields)."""
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.mode = mode
            if isinstance(content, bytes):
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
            else:
                for field, value in content.items():
                    setattr(member, field, value)
                archive.addfile(member)
    return path


PROGRAM = b"#!/bin/sh\necho 'version: 0.6.0-dev'\n"


@pytest.fixture
def store(tmp_path: pathlib.Path) -> Store:
    return Store(str(tmp_path / "root"), "llamacpp", "b1", run)


def installed(store: Store, install: dict[str, Any], programs: tuple[str, ...] = ("llama-server",)) -> str:
    engine_installs.check(install)
    local = install["archive"] if install["archive"] and "://" not in install["archive"] else None
    with store.locked():
        store.install(install, programs, local)
    place = store.place(install)
    assert store.is_complete(place)
    return place


# ---- virtual environments


def test_a_virtual_environment_from_a_folder_of_wheels(tmp_path: pathlib.Path) -> None:
    folder = wheels.make(tmp_path / "wheels", "vllm", "0.33.0", "vllm", needs=["ray"])
    wheels.make(folder, "ray", "2.60.0", "ray")
    wheels.make(folder, "nvidia-nccl-cu13", "2.27.7", None)
    store = Store(str(tmp_path / "root"), "vllm", "v0.33.0", run)
    place = installed(store, wish("venv", requirements=["vllm==0.33.0", "nvidia-nccl-cu13==2.27.7"], wheels=str(folder)), ("vllm",))
    program = place + "/bin/vllm"
    assert engine_probe.version(run, program, ["--version"], {}) == "0.33.0"
    python = engine_probe.python_of(program)
    assert python == place + "/bin/python" or python == place + "/bin/python3" or os.path.dirname(str(python)) == place + "/bin"
    told = engine_probe.python_packages(run, str(python), {})
    assert {name: entry[0] for name, entry in told["packages"].items()}.items() >= {"vllm": "0.33.0", "ray": "2.60.0"}.items()
    assert engine_probe.nccl_version(told["packages"]) == "2.27.7" and engine_probe.telling_versions(told["packages"]) == {"vllm": "0.33.0", "ray": "2.60.0"}
    for folder_name, _folders, names in os.walk(place):
        for name in names:
            mode = os.stat(os.path.join(folder_name, name), follow_symlinks=False).st_mode
            assert mode & 0o004, "the service's user reads %s" % name


@pytest.mark.slow
def test_the_fingerprint_of_a_virtual_environment_is_not_of_its_place(tmp_path: pathlib.Path) -> None:
    folder = wheels.make(tmp_path / "wheels", "vllm", "0.33.0", "vllm")

    def fingerprint(root: str, found: pathlib.Path) -> str:
        store = Store(str(tmp_path / root), "vllm", "a", run)
        program = installed(store, wish("venv", requirements=["vllm==0.33.0"], wheels=str(found)), ("vllm",)) + "/bin/vllm"
        return engine_probe.fingerprint({"vllm": program}, engine_probe.python_packages(run, str(engine_probe.python_of(program)), {}))

    first = fingerprint("one", folder)
    assert fingerprint("a rather longer way to it", folder) == first
    assert fingerprint("other", wheels.make(tmp_path / "changed", "vllm", "0.33.0", "vllm", more="# another build of the same version\n")) != first


@pytest.mark.parametrize(
    ("requirements", "text"),
    [
        ([], "in the playbooks\\) is empty"),
        (["vllm"], "a pinned one is wanted"),
        (["vllm>=0.33"], "a pinned one"),
        (["vllm==0.*"], "a pinned one"),
        (["vllm===0.33"], "a pinned one"),
        (["vllm==0.33.0; python_version<'3'"], "a pinned one"),
        (["-r /etc/passwd"], "a pinned one"),
        (["--index-url=http://x"], "a pinned one"),
        (["git+https://x/y"], "a pinned one"),
        (["vllm @ https://h/x.whl"], "a pinned one"),
        (["vllm==0.33.0", "./vllm"], "a pinned one"),
        (["vllm==0.33.0\n"], "a pinned one"),
    ],
)
def test_what_is_not_pinned_is_refused(requirements: list[str], text: str) -> None:
    with pytest.raises(InstallError, match=text):
        engine_installs.check(wish("venv", requirements=requirements))


def test_pinned_ones_pass() -> None:
    engine_installs.check(
        wish(
            "venv",
            requirements=["vllm==0.33.0", "ray[cgraph]==2.60.0", "torch==2.13.0+cpu", "x @ file:///srv/x.whl", "vllm @ https://h/x.whl#sha256=" + "a" * 64],
        )
    )


@pytest.mark.slow
def test_a_failed_install_leaves_nothing_and_says_what_pip_says(tmp_path: pathlib.Path) -> None:
    folder = wheels.make(tmp_path / "wheels", "vllm", "0.33.0", None)
    store = Store(str(tmp_path / "root"), "vllm", "a", run)
    for requirement, more, text in (
        ("vllm==0.32.0", {}, "pip.*No matching distribution found for vllm==0.32.0"),
        ("vllm==0.33.0", {}, "no program vllm"),
        ("vllm==0.33.0", {"python": "/bin/false"}, "install python3-venv"),
    ):
        with pytest.raises(InstallError, match=text):
            installed(store, wish("venv", requirements=[requirement], **{"wheels": str(folder), **more}), ("vllm",))
    assert store.stale(None) == []


def test_an_indexs_password_is_in_no_argument_and_no_message(tmp_path: pathlib.Path) -> None:
    seen: list[list[str]] = []

    def watched(words: list[str], **more: Any) -> tuple[int, str, str]:
        seen.append(words)
        if "pip" in words:
            assert more["environ_update"]["PIP_INDEX_URL"] == "https://user:pa55@index.example/simple"
            return 1, "", "ERROR: 401 for https://user:pa55@index.example/simple and https://user:****@index.example/simple/x"
        return 0, "", ""

    store = Store(str(tmp_path / "root"), "vllm", "a", watched)
    with pytest.raises(InstallError) as error:
        installed(store, wish("venv", requirements=["vllm==0.33.0"], index_url="https://user:pa55@index.example/simple"), ("vllm",))
    assert "pa55" not in str(error.value) and not any("pa55" in word for words in seen for word in words)
    plain = wish("venv", requirements=["vllm==0.33.0"], index_url="https://index.example/simple")
    assert engine_installs.digest(plain) == engine_installs.digest({**plain, "index_url": "https://user:pa55@index.example/simple"})


# ---- archives


def test_an_archive_is_unpacked_and_its_programs_found(store: Store, tmp_path: pathlib.Path) -> None:
    path = tar(
        tmp_path / "a.tar.gz",
        ("llama-b1/bin/llama-server", PROGRAM),
        ("llama-b1/bin/libggml.so.1", b"x"),
        ("llama-b1/bin/libggml.so", {"type": tarfile.SYMTYPE, "linkname": "libggml.so.1"}),
    )
    place = installed(store, archived(path))
    assert engine_installs.find_directory(place, "llama-server") == place + "/llama-b1/bin"
    assert os.readlink(place + "/llama-b1/bin/libggml.so") == "libggml.so.1" and os.access(place + "/llama-b1/bin/llama-server", os.X_OK)
    assert os.listdir(store.directory) == [os.path.basename(place)]


def test_a_zip_keeps_what_can_be_executed(store: Store, tmp_path: pathlib.Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        member = zipfile.ZipInfo("build/llama-server")
        member.external_attr = 0o100755 << 16
        archive.writestr(member, PROGRAM)
    place = installed(store, archived(tmp_path / "a.zip"))
    assert os.access(engine_installs.find_directory(place, "llama-server") + "/llama-server", os.X_OK)


@pytest.mark.parametrize(
    "member",
    [
        ("../x", b""),
        ("/etc/x", b""),
        ("a/../../x", b""),
        ("a/../x", b""),
        ("..\\x", b""),
        ("C:\\x", b""),
        ("a\nb", b""),
        ("x", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}),
        ("x", {"type": tarfile.SYMTYPE, "linkname": "../x"}),
        ("x", {"type": tarfile.SYMTYPE, "linkname": "a/../../x"}),
        ("x", {"type": tarfile.LNKTYPE, "linkname": "/etc/passwd"}),
        ("x", {"type": tarfile.LNKTYPE, "linkname": "nothing"}),
        ("x", {"type": tarfile.FIFOTYPE}),
        ("x", {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3}),
        ("llama-server", b"twice"),
    ],
)
def test_members_that_lie_or_lead_outside_are_refused(store: Store, tmp_path: pathlib.Path, member: tuple[str, Any]) -> None:
    path = tar(tmp_path / "a.tar.gz", ("llama-server", PROGRAM), member)
    with pytest.raises(ArchiveError, match="the archive (holds|cannot)"):
        installed(store, archived(path))
    assert not (tmp_path / "x").exists() and not (tmp_path / "root/x").exists() and store.stale(None) == []


def test_nothing_is_written_through_a_link(store: Store, tmp_path: pathlib.Path) -> None:
    """A link into itself, then a deeper one that leads out only by way of the first."""
    out = tar(
        tmp_path / "a.tar.gz",
        ("llama-server", PROGRAM),
        ("d/a", {"type": tarfile.SYMTYPE, "linkname": ".."}),
        ("d/a/b", {"type": tarfile.SYMTYPE, "linkname": "../.."}),
    )
    with pytest.raises(ArchiveError, match="leads out of it|is a link"):
        installed(store, archived(out))
    through = tar(tmp_path / "b.tar.gz", ("a", {"type": tarfile.SYMTYPE, "linkname": "."}), ("a/llama-server", PROGRAM))
    with pytest.raises(ArchiveError, match="twice"):
        installed(store, archived(through))


@pytest.mark.parametrize(
    "last",
    [
        ("t/link", {"type": tarfile.SYMTYPE, "linkname": "x"}),
        ("t/hard", {"type": tarfile.LNKTYPE, "linkname": "llama-server"}),
        ("t/deep/er/hard", {"type": tarfile.LNKTYPE, "linkname": "llama-server"}),
        ("stolen", {"type": tarfile.LNKTYPE, "linkname": "t/secret"}),
        ("harmless", {"type": tarfile.SYMTYPE, "linkname": "llama-server"}),
    ],
)
def test_a_link_that_another_one_turns_outward_later(store: Store, tmp_path: pathlib.Path, last: tuple[str, Any]) -> None:
    """The first link leads nowhere until the second is there, and above the archive from then on: neither a link nor a copy is made through it."""
    out = tar(
        tmp_path / "a.tar.gz",
        ("llama-server", PROGRAM),
        ("a/a/a/a/file", b""),
        ("t", {"type": tarfile.SYMTYPE, "linkname": "a/a/a/a/l/../../../../.."}),
        ("a/a/a/a/l", {"type": tarfile.SYMTYPE, "linkname": "../../.."}),
        last,
    )
    pathlib.Path(store.base).mkdir(parents=True)
    for folder in (tmp_path, pathlib.Path(store.base), pathlib.Path(store.directory)):
        folder.mkdir(exist_ok=True)
        (folder / "secret").write_text("not of the archive")
    before = sorted(map(str, tmp_path.rglob("*")))
    with pytest.raises(ArchiveError, match="leads out of it|is a link"):
        installed(store, archived(out))
    assert sorted(map(str, tmp_path.rglob("*"))) == before


def test_a_hard_link_never_replaces_what_is_there(store: Store, tmp_path: pathlib.Path) -> None:
    out = tar(tmp_path / "a.tar.gz", ("llama-server", PROGRAM), ("d/llama-server", b""), ("d", {"type": tarfile.LNKTYPE, "linkname": "llama-server"}))
    with pytest.raises(ArchiveError, match="twice"):
        installed(store, archived(out))


@pytest.mark.parametrize("content", [b"", b"no archive at all", b"\x1f\x8b\x08damaged", b"PK\x05\x06" + b"\0" * 18])
def test_what_is_no_archive(store: Store, tmp_path: pathlib.Path, content: bytes) -> None:
    (tmp_path / "a.tar.gz").write_bytes(content)
    with pytest.raises((ArchiveError, InstallError)):
        installed(store, archived(tmp_path / "a.tar.gz"))
    assert store.stale(None) == []


def test_archives_without_one_certain_program(store: Store, tmp_path: pathlib.Path) -> None:
    for members, text in (
        ([("a/llama-server", PROGRAM), ("b/llama-server", PROGRAM)], "llama-server more than once: a/llama-server, b/llama-server"),
        ([("a/other", PROGRAM)], "no executable llama-server"),
    ):
        with pytest.raises(InstallError, match=text):
            installed(store, archived(tar(tmp_path / "a.tar.gz", *members)))
    with pytest.raises(InstallError, match="no executable"):
        installed(store, archived(tar(tmp_path / "a.tar.gz", ("llama-server", PROGRAM), mode=0o644)))
    with pytest.raises(InstallError, match="has sha256"):
        installed(store, archived(tmp_path / "a.tar.gz", "0" * 64))
    for sha256 in ("", "0" * 63, "A" * 64):
        with pytest.raises(InstallError, match="64 lower-case hexadecimal digits"):
            engine_installs.check(wish("archive", archive="x", sha256=sha256))


# ---- sources

CMAKE = """cmake_minimum_required(VERSION 3.16)
project(tiny CXX)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
add_library(tiny SHARED library.cpp)
add_executable(llama-server main.cpp)
target_link_libraries(llama-server tiny)
target_compile_definitions(llama-server PRIVATE CUDA="${GGML_CUDA}" RPC="${GGML_RPC}" MORE="${MORE}")
"""
SOURCES = (
    ("tiny-1/CMakeLists.txt", CMAKE.encode()),
    ("tiny-1/library.cpp", b"int answer() { return 42; }\n"),
    ("tiny-1/main.cpp", b'#include <cstdio>\nint answer();\nint main() { printf("version: 0.6.%d cuda %s rpc %s more %s\\n", answer(), CUDA, RPC, MORE); }\n'),
)


@pytest.mark.skipif(shutil.which("cmake") is None or shutil.which("c++") is None, reason="no cmake and compiler on this machine")
def test_sources_are_built_and_moved_out_of_the_build_tree(store: Store, tmp_path: pathlib.Path) -> None:
    """A real build, with a shared library that the program must find where it was moved to."""
    path = tar(tmp_path / "a.tar.gz", *SOURCES, mode=0o644)
    place = installed(store, archived(path, method="source", cmake_args=["-DMORE=a b"]))
    assert sorted(os.listdir(place)) == [engine_installs.COMPLETE, "bin"]
    rc, out, _err = run([place + "/bin/llama-server"])
    assert (rc, out.strip()) == (0, "version: 0.6.42 cuda OFF rpc ON more a b")


@pytest.mark.skipif(shutil.which("cmake") is None or shutil.which("c++") is None, reason="no cmake and compiler on this machine")
def test_a_build_that_fails_says_why_and_leaves_nothing(store: Store, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [(name, content.replace(b"return 42", b"return fortytwo")) for name, content in SOURCES]
    with pytest.raises(InstallError, match="fortytwo"):
        installed(store, archived(tar(tmp_path / "a.tar.gz", *broken), method="source"))
    monkeypatch.setattr(engine_installs, "CUDA_PATH", "/nonexistent")
    if shutil.which("nvcc", path=engine_probe.CLEAN_PATH) is None:
        with pytest.raises(InstallError, match="no nvcc on the host: install the build tools and the CUDA toolkit"):
            installed(store, archived(tmp_path / "a.tar.gz", method="source", cuda=True))
    assert store.stale(None) == []


# ---- whole or not at all


def test_half_an_install_is_never_whole_and_the_next_run_begins_anew(store: Store, tmp_path: pathlib.Path) -> None:
    install = archived(tar(tmp_path / "a.tar.gz", ("llama-server", PROGRAM)))
    place = pathlib.Path(store.place(install))
    (place / "left over").mkdir(parents=True)  # as after a power cut
    assert not store.is_complete(str(place))
    installed(store, install)
    assert sorted(os.listdir(place)) == [engine_installs.COMPLETE, "llama-server"]


def test_one_run_at_a_time(store: Store) -> None:
    with store.locked():
        with pytest.raises(InstallError, match="another run installs"), store.locked():
            pass
    with store.locked():
        pass


def test_another_wish_is_another_directory(store: Store, tmp_path: pathlib.Path) -> None:
    first = installed(store, archived(tar(tmp_path / "a.tar.gz", ("llama-server", PROGRAM))))
    second = installed(store, archived(tar(tmp_path / "b.tar.gz", ("llama-server", PROGRAM + b"# 2\n"))))
    assert first != second and store.stale(second) == [first] and engine_installs.find_directory(first, "llama-server")
    store.remove([first, second])
    assert not os.path.exists(store.base)


def revision(root: pathlib.Path, replica: str, name: str, path: str, build: str = "b1", engine: str = "llamacpp", current: bool = False) -> None:
    folder = root / "etc/rankzero" / replica / "revisions" / name
    folder.mkdir(parents=True)
    (folder / "launch.json").write_text(json.dumps({"labels": {"engine": engine}, "build": {"name": build}, "launches": [{"path": path}]}))
    if current:
        (root / "etc/rankzero" / replica / "current").symlink_to(f"revisions/{name}")


def test_who_uses_a_build(tmp_path: pathlib.Path) -> None:
    revision(tmp_path, "glm", "r1", "/b1/x/llama-server", current=True)
    revision(tmp_path, "glm", "r0", "/b1/y/llama-server")
    revision(tmp_path, "old", "r1", "/b1/x/llama-server")
    revision(tmp_path, "other", "r1", "/b1/xx/llama-server", build="b2", current=True)
    revision(tmp_path, "foreign", "r1", "/v/vllm", engine="vllm", current=True)
    (tmp_path / "etc/rankzero/damaged/revisions/r1").mkdir(parents=True)
    (tmp_path / "etc/rankzero/damaged/revisions/r1/launch.json").write_text("{")
    assert engine_installs.users(str(tmp_path), "llamacpp", "b1") == ["glm", "old (kept for a rollback)"]
    assert engine_installs.users(str(tmp_path), "llamacpp", "b1", "/b1/x") == ["glm", "old (kept for a rollback)"]
    assert engine_installs.users(str(tmp_path), "llamacpp", "b1", "/b1/y") == ["glm (kept for a rollback)"]
    assert engine_installs.users(str(tmp_path), "llamacpp", "b3") == []


def test_versions_of_packages(tmp_path: pathlib.Path) -> None:
    assert engine_installs.package_version(run, "no-such-package-at-all") is None
    if shutil.which("dpkg-query"):
        assert engine_installs.package_version(run, "dpkg")


# ---- what a build is asked


def test_the_python_of_a_program(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "vllm"
    for text, python in (
        ("#!/opt/v/bin/python3.12\n", "/opt/v/bin/python3.12"),
        ("#!/opt/v/bin/python\n", "/opt/v/bin/python"),
        ("#!/bin/sh\n'''exec' \"/opt/a long/way/bin/python3\" \"$0\" \"$@\"\n' '''\n", "/opt/a long/way/bin/python3"),
        ("#!/bin/sh\n'''exec' /opt/way/bin/python3 \"$0\" \"$@\"\n' '''\n", "/opt/way/bin/python3"),
        ("#!/bin/sh\nexec x\n", None),
        ("#!/usr/bin/env python3\n", None),
        ("\x7fELF", None),
        ("", None),
    ):
        path.write_text(text)
        assert engine_probe.python_of(str(path)) == python, text


H100 = "NVIDIA H100 80GB HBM3"
GPUS = [{"index": number, "uuid": f"GPU-{number}", "model": H100, "partition": None} for number in range(2)]


@pytest.mark.parametrize(
    ("devices", "gpus", "missing"),
    [
        ([], [], 0),
        ([], GPUS, 2),
        ([{"name": "CUDA0", "description": H100}], GPUS, 1),
        ([{"name": "CUDA0", "description": H100}, {"name": "CUDA1", "description": H100}], GPUS, 0),
        ([{"name": "Vulkan0", "description": "llvmpipe (LLVM 15)"}], GPUS, 2),
        ([{"name": "Vulkan0", "description": H100 + " (NVIDIA)"}, {"name": "Vulkan1", "description": H100}], GPUS, 0),
        ([{"name": "CUDA0", "description": H100, "uuid": "GPU-1"}, {"name": "CUDA1", "description": H100, "uuid": "GPU-9"}], GPUS, 1),
        ([{"name": "CUDA0", "description": H100, "uuid": "MIG-1"}], [*GPUS, {"index": 0, "uuid": "MIG-1", "model": H100, "partition": {"kind": "mig"}}], 0),
    ],
)
def test_the_answer_must_contain_every_gpu(devices: list[dict[str, Any]], gpus: list[dict[str, Any]], missing: int) -> None:
    assert len(engine_probe.missing_gpus(devices, gpus)) == missing


def test_torchs_devices_are_asked_of_the_builds_own_python(tmp_path: pathlib.Path) -> None:
    """A stand-in for torch: what is real is the question, and that noise before the answer does no harm."""
    folder = tmp_path / "lib"
    folder.mkdir()
    (folder / "torch.py").write_text(
        "import os\nprint('a warning'); order = os.environ['CUDA_DEVICE_ORDER']\n"
        "class P:\n    name = order; total_memory = 2 << 30; uuid = 'abc'\n"
        "class cuda:\n    is_available = device_count = staticmethod(lambda: 1)\n    get_device_properties = staticmethod(lambda _index: P)\n"
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} -c "import sys; sys.path.insert(0, \'{folder}\'); exec(sys.argv[1])" "$@"\n')
    python.chmod(0o755)
    assert engine_probe.torch_devices(run, str(python), {}) == [{"name": "CUDA0", "description": "PCI_BUS_ID", "total_mib": 2048, "uuid": "GPU-abc"}]


def test_what_is_not_ours_stays(store: Store, tmp_path: pathlib.Path) -> None:
    path = tar(tmp_path / "a.tar.gz", ("llama-server", PROGRAM))
    place = installed(store, archived(path))
    theirs = pathlib.Path(store.directory) / "built-by-hand"
    theirs.mkdir()
    assert store.stale(None) == [place]
    store.remove(store.stale(None))
    assert os.listdir(store.directory) == [theirs.name]
