# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Builds of engines through the playbooks: installed side by side, unchanged by a second run, refused to go while in use."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import tarfile
from collections.abc import Callable
from typing import Any

import fleet
import podman_image
import pytest
import wheels
from test_llamacpp_replica import profile
from test_simulated_replica import recap, with_profile

MakeFleet = Callable[..., fleet.Fleet]
PROGRAM = "#!/bin/sh\ncase $1 in --version) echo 'version: %s';; --list-devices) printf '%%s\\n' 'Available devices:' %s;; *) exit 3;; esac\n"


def archive(path: pathlib.Path, version: str = "0.6.0", devices: str = "'  (none)'") -> dict[str, Any]:
    """A release of an engine whose programs answer, and the variables that install it."""
    folder = path.parent / ("release-" + version)
    folder.mkdir()
    for name in ("llama-server", "ggml-rpc-server"):
        (folder / name).write_text(PROGRAM % (version, devices))
        (folder / name).chmod(0o755)
    with tarfile.open(path, "w:xz") as file:
        file.add(folder, folder.name)
    return installs("archive", engine_archive=str(path), engine_sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def installs(method: str, engine: str = "llamacpp", name: str = "b1", **more: Any) -> dict[str, Any]:
    return {"engine_name": engine, "engine_install": method, "engine_build_name": name, **more}


def run(hosts: fleet.Fleet, playbook: str, *options: str, changed: int | None = None, fails: bool = False, **extra: Any) -> str:
    done = hosts.run(playbook, *options, extra=extra)
    output = done.stdout + done.stderr
    assert (done.returncode != 0) == fails, output
    if changed is not None:
        assert recap(done.stdout, "node-a")["changed"] == changed, output
    return " ".join(output.split())


def record(hosts: fleet.Fleet, name: str, host: str = "node-a") -> dict[str, Any]:
    return dict(json.loads((hosts.root(host) / f"etc/rankzero/engines.d/{name}.json").read_text()))


def tree(hosts: fleet.Fleet, host: str = "node-a") -> set[str]:
    return {str(path.relative_to(hosts.root(host))) for path in hosts.root(host).rglob("*")}


def test_life_of_a_build(make_fleet: MakeFleet, tmp_path: pathlib.Path) -> None:
    hosts = make_fleet(["node-a", "node-b"])
    first = archive(tmp_path / "one.tar.xz")
    before = tree(hosts)
    assert "install llamacpp b1 in" in run(hosts, "install_engine", "--check", "-v", changed=1, **first) and tree(hosts) == before
    assert "llamacpp build b1: version 0.6.0" in run(hosts, "install_engine", changed=1, **first)
    run(hosts, "install_engine", changed=0, **first)
    assert record(hosts, "llamacpp-b1")["fingerprint"] == record(hosts, "llamacpp-b1", "node-b")["fingerprint"]

    run(hosts, "install_engine", changed=1, **{**archive(tmp_path / "two.tar.xz", "0.7.0"), "engine_build_name": "b2"})
    assert record(hosts, "llamacpp-b2")["version"] == "0.7.0" and record(hosts, "llamacpp-b1")["version"] == "0.6.0"

    former = pathlib.Path(record(hosts, "llamacpp-b1")["path"])
    run(hosts, "install_engine", changed=1, **archive(tmp_path / "three.tar.xz", "0.8.0"))
    assert record(hosts, "llamacpp-b1")["version"] == "0.8.0" and not former.exists(), "nobody uses what was there"

    assert "forget llamacpp b1" in run(hosts, "uninstall_engine", "--check", "-v", changed=1, engine_name="llamacpp", engine_build_name="b1")
    for name in ("b1", "b2"):
        run(hosts, "uninstall_engine", changed=1, engine_name="llamacpp", engine_build_name=name)
    run(hosts, "uninstall_engine", changed=0, engine_name="llamacpp", engine_build_name="b2")
    assert tree(hosts) == before | {"etc", "etc/rankzero", "opt", "opt/rankzero"}


@pytest.mark.slow
def test_what_cannot_be_installed_is_refused_and_nothing_is_registered(make_fleet: MakeFleet, tmp_path: pathlib.Path) -> None:
    hosts = make_fleet(["node-a"])
    good = archive(tmp_path / "one.tar.xz")
    wrong = archive(tmp_path / "unable.tar.xz", "unable")
    (tmp_path / "release-unable/llama-server").write_text("#!/bin/sh\necho no backend >&2\nexit 1\n")
    with tarfile.open(tmp_path / "unable.tar.xz", "w:xz") as file:
        file.add(tmp_path / "release-unable", "x")
    wrong["engine_sha256"] = hashlib.sha256((tmp_path / "unable.tar.xz").read_bytes()).hexdigest()
    for extra, text in (
        ({**good, "engine_archive": "/nonexistent.tar.gz"}, "there is no file or directory /nonexistent.tar.gz on the controller"),
        ({**good, "engine_sha256": "0" * 64}, "has sha256 %s, and %s is wanted" % (good["engine_sha256"], "0" * 64)),
        ({**good, "engine_sha256": ""}, "sha256 (engine_sha256 in the playbooks) is None: the 64 lower-case hexadecimal digits"),
        (installs("venv", "vllm", engine_requirements=["vllm"]), "a pinned one is wanted"),
        (installs("venv", "vllm"), "requirements (engine_requirements in the playbooks) is empty"),
        (installs("package", engine_package="no-such-package"), ""),
        ({**good, "engine_path": "/usr/bin"}, "path (engine_path in the playbooks) and install (engine_install in the playbooks) are both set"),
        (installs("", engine_path=""), "neither path (engine_path in the playbooks) nor install (engine_install in the playbooks) is set"),
        (wrong, "ended with 1: no backend"),
    ):
        assert text in run(hosts, "install_engine", fails=True, **extra), extra
    for engine, text in (("", "engine (engine_name in the playbooks) is not set: give one of llamacpp, sglang, vllm"), ("vlm", "Did you mean vllm?")):
        told = run(hosts, "check_engines", fails=True, engine_name=engine, engine_path="/opt/vllm/bin")
        assert text in told and "engine_name in the playbooks" in told and "caused by" not in told.lower(), told
    assert not (hosts.root("node-a") / "etc/rankzero/engines.d").exists()


def test_on_a_gpu_host_the_build_must_see_every_gpu(make_fleet: MakeFleet, tmp_path: pathlib.Path) -> None:
    hosts = make_fleet(["node-a"], gpus=2)
    blind = archive(tmp_path / "one.tar.xz")
    told = run(hosts, "install_engine", fails=True, **blind)
    assert (
        "it sees no devices, and not GPU 0 (NVIDIA H100 80GB HBM3, GPU-" in told
        and "GPU 1 (" in told
        and "false for all_gpus (engine_all_gpus in the playbooks)" in told
    )
    assert not (hosts.root("node-a") / "etc/rankzero/engines.d").exists()
    run(hosts, "install_engine", changed=1, engine_all_gpus=False, **blind)
    device = "'  CUDA%d: NVIDIA H100 80GB HBM3 (81008 MiB, 80559 MiB free)'"
    half = run(hosts, "install_engine", fails=True, **{**archive(tmp_path / "two.tar.xz", "2", device % 0), "engine_build_name": "b2"})
    assert "and not GPU 1" in half and "GPU 0 (" not in half
    run(hosts, "install_engine", changed=1, **{**archive(tmp_path / "three.tar.xz", "3", " ".join((device % 0, device % 1))), "engine_build_name": "b3"})
    assert [one["name"] for one in record(hosts, "llamacpp-b3")["devices"]] == ["CUDA0", "CUDA1"]


@pytest.mark.slow
def test_a_virtual_environment_of_wheels(make_fleet: MakeFleet, tmp_path: pathlib.Path) -> None:
    hosts = make_fleet(["node-a"])
    folder = wheels.make(tmp_path / "wheels", "vllm", "0.33.0", "vllm")
    wheels.make(folder, "nvidia-nccl-cu13", "2.27.7", None)
    extra = installs("venv", "vllm", "v0.33.0", engine_wheels=str(folder), engine_requirements=["vllm==0.33.0", "nvidia-nccl-cu13==2.27.7"])
    run(hosts, "install_engine", changed=1, **extra)
    found = record(hosts, "vllm-v0.33.0")
    assert (found["version"], found["nccl"], found["versions"]) == ("0.33.0", "2.27.7", {"vllm": "0.33.0"}) and found["python"]["version"].startswith("3.")
    run(hosts, "install_engine", changed=0, **extra)


DEVICELESS = """
def main():
    print("INFO: no platform detected", "RuntimeError: Failed to infer device type, please set VLLM_LOGGING_LEVEL=DEBUG", sep="\\n", file=sys.stderr)
    return 1
"""


def test_vllm_is_installed_where_there_is_no_gpu_to_start_it_on(make_fleet: MakeFleet, tmp_path: pathlib.Path) -> None:
    """As vllm 0.33.0 does it on a host that an image is made on. Where there are GPUs and it finds none, that is a fault."""
    folder = wheels.make(tmp_path / "wheels", "vllm", "0.33.0", "vllm", more=DEVICELESS)
    extra = installs("venv", "vllm", "v0.33.0", engine_wheels=str(folder), engine_requirements=["vllm==0.33.0"])
    without, with_gpus = make_fleet(["node-a"]), make_fleet(["node-a"], gpus=1)
    assert "version 0.33.0" in run(without, "install_engine", changed=1, **extra)
    assert (record(without, "vllm-v0.33.0")["version"], record(without, "vllm-v0.33.0")["devices"]) == ("0.33.0", None)
    told = run(with_gpus, "install_engine", fails=True, **extra)
    assert "It finds no device, though the driver shows GPUs" in told and not (with_gpus.root("node-a") / "etc/rankzero/engines.d").exists(), told


def test_a_build_in_use_stays(make_fleet: MakeFleet, model: pathlib.Path, llama: pathlib.Path, tmp_path: pathlib.Path) -> None:  # noqa: F811
    """The real build, installed from an archive, serving; and what of it may go when."""
    hosts = make_fleet(["node-a"])
    extra = with_profile(hosts, profile(model, nodes=1, engine_version="b1"))
    with tarfile.open(tmp_path / "llama.tar", "w") as file:
        file.add(llama, "llama/bin")
    sha256 = hashlib.sha256((tmp_path / "llama.tar").read_bytes()).hexdigest()
    install = installs("archive", engine_archive=str(tmp_path / "llama.tar"), engine_sha256=sha256, engine_all_gpus=False)
    run(hosts, "install_engine", changed=1, **install)
    run(hosts, "deploy_replica", **extra)
    held = run(hosts, "uninstall_engine", fails=True, engine_name="llamacpp", engine_build_name="b1")
    assert "build b1 of llamacpp is in use by e2e: remove the replica" in held
    served_from = pathlib.Path(record(hosts, "llamacpp-b1")["path"])

    with tarfile.open(tmp_path / "llama2.tar", "w") as file:
        file.add(llama, "another/name/bin")
    again = {**install, "engine_archive": str(tmp_path / "llama2.tar"), "engine_sha256": hashlib.sha256((tmp_path / "llama2.tar").read_bytes()).hexdigest()}
    run(hosts, "install_engine", changed=1, **again)
    assert pathlib.Path(record(hosts, "llamacpp-b1")["path"]) != served_from and served_from.exists(), "the running replica's files stay"
    run(hosts, "deploy_replica", **extra)
    run(hosts, "remove_replica", **extra)
    run(hosts, "install_engine", changed=1, **again)
    assert not served_from.exists()
    run(hosts, "uninstall_engine", changed=1, engine_name="llamacpp", engine_build_name="b1")


@pytest.mark.slow
def test_an_image_is_a_build_as_any_other(make_fleet: MakeFleet, tmp_path: pathlib.Path) -> None:
    env, problem = podman_image.save(tmp_path)
    if problem:
        pytest.skip(problem)
    hosts = make_fleet(["node-a"])
    extra = installs(
        "image",
        engine_archive=str(tmp_path / "image.tar"),
        engine_sha256=hashlib.sha256((tmp_path / "image.tar").read_bytes()).hexdigest(),
        engine_mounts=["/models"],
        engine_podman_options=["--cgroups=enabled", "--ulimit=nproc=1024:1024"],
        engine_env=env,
        engine_all_gpus=False,
        replica_module_environment=env,
    )
    run(hosts, "install_engine", changed=1, **extra)
    found = record(hosts, "llamacpp-b1")
    assert found["version"] == "1.2.3" and found["container"]["mounts"] == ["/models"] and set(found["paths"]) == {"llama-server", "ggml-rpc-server"}
    run(hosts, "install_engine", changed=0, **extra)
    run(hosts, "uninstall_engine", changed=1, engine_name="llamacpp", engine_build_name="b1", replica_module_environment=env)
    assert not (hosts.root("node-a") / "opt/rankzero/engines").exists()


def test_no_address_tells_its_secrets(make_fleet: MakeFleet) -> None:
    hosts = make_fleet(["node-a"])
    url = "http://alice:pa55word@127.0.0.1:1/a.tar.gz?signature=5ignature"
    told = run(hosts, "install_engine", "-vvv", "--check", **installs("archive", engine_archive=url, engine_sha256="0" * 64))
    told += run(
        hosts,
        "install_engine",
        "-vvv",
        fails=True,
        **installs("venv", "vllm", engine_requirements=["x @ %s#sha256=%s" % (url.replace("http", "https"), "0" * 64)]),
    )
    assert "with a password or a query, which everybody on the host would see" in told
    assert not [secret for secret in ("pa55word", "5ignature") if secret in told]


@pytest.mark.parametrize(("kind", "said"), [("fifo", "is no plain file"), ("device", "is no plain file"), ("directory", "is a directory")])
def test_an_archive_that_is_no_file(make_fleet: MakeFleet, tmp_path: pathlib.Path, kind: str, said: str) -> None:
    path = pathlib.Path("/dev/zero") if kind == "device" else tmp_path / kind
    {"fifo": os.mkfifo, "directory": os.mkdir}.get(kind, str)(path)
    told = run(make_fleet(["node-a"]), "install_engine", fails=True, **installs("archive", engine_archive=str(path), engine_sha256="0" * 64))
    assert "engine_archive" in told and "%s %s" % (path, said) in told, told


@pytest.mark.parametrize("package", ["a*", "a=1 b", "-t", ""])
def test_a_pattern_is_no_package(make_fleet: MakeFleet, package: str) -> None:
    """apt and dnf would install everything that it matches, so it is refused before they are asked."""
    told = run(make_fleet(["node-a"]), "install_engine", "--check", fails=True, **installs("package", engine_package=package))
    assert "the name of a package of the distribution is wanted" in told and "TASK [rankzero.inference.engine : Install the distribution's" not in told
