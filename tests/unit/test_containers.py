# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Builds that are container images: the command of podman, what the plan asks of them, and a real container where podman runs."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import pathlib
import subprocess
import types
from typing import Any

import engine_requests as made
import podman_image
import pytest
from test_engine_installs import run, wish

from ansible_collections.rankzero.inference.plugins.module_utils import engine_installs, engine_probe
from ansible_collections.rankzero.inference.plugins.module_utils.engine_installs import InstallError, Store

PROGRAM = pathlib.Path(__file__).resolve().parent.parent.parent / "roles/engine/files/run_in_container.py"


def program() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("run_in_container", PROGRAM)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


WRAPPER = program()
SETTINGS = {"podman": "/usr/bin/podman", "image": "sha256:1", "mounts": ["/models", "/adapters"], "options": ["--shm-size=16g"]}


def command(args: list[str], exists: set[str] = frozenset({"/models", "/adapters"}), **environ: str) -> list[str]:  # type: ignore[assignment]
    return list(WRAPPER.command(SETTINGS, "vllm", args, environ, exists.__contains__, (998, 997), [("nofile", 4096), ("nproc", 100), ("unlimited", -1)]))


def options(words: list[str], name: str) -> list[str]:
    return [word.partition("=")[2] for word in words if word.startswith(name + "=")]


def test_the_same_launch_inside() -> None:
    args = ["serve", "/models/glm", "--tensor-parallel-size", "8", "", "a b $c"]
    words = command(args, VLLM_HOST_IP="10.0.0.1", PATH="/usr/bin", LD_LIBRARY_PATH="/x", RANKZERO_SHARD="glm/0/r", VLLM_API_KEY="s3cret")
    assert words[:2] == ["/usr/bin/podman", "run"] and words[-len(args) - 1 :] == ["sha256:1", *args] and words[-len(args) - 2] == "--shm-size=16g"
    assert options(words, "--entrypoint") == ["vllm"] and "--network=host" in words and "--ipc=host" in words and options(words, "--user") == ["998:997"]
    assert options(words, "--env") == ["RANKZERO_SHARD", "VLLM_API_KEY", "VLLM_HOST_IP"] and not any("s3cret" in word for word in words)
    assert options(words, "--volume") == ["/models:/models:ro", "/adapters:/adapters:ro"]
    assert "--cap-drop=all" in words and "--privileged" not in words and "--cgroups=disabled" in words and "--pull=never" in words


@pytest.mark.parametrize(
    ("visible", "devices"),
    [(None, []), ("", []), ("GPU-1,GPU-2", ["GPU-1", "GPU-2"]), ("0,1", ["all"]), ("MIG-1", ["MIG-1"]), (" GPU-1 , ", ["GPU-1"])],
)
def test_gpus_by_cdi(visible: str | None, devices: list[str]) -> None:
    words = command([], **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}))
    assert options(words, "--device") == [f"nvidia.com/gpu={device}" for device in devices]


def test_all_devices_when_a_build_is_looked_at() -> None:
    assert options(command([], NVIDIA_VISIBLE_DEVICES="all"), "--device") == ["nvidia.com/gpu=all"]


def test_rdma_directories_and_secrets_that_are_there() -> None:
    there = {"/models", "/dev/infiniband", "/var/lib/rankzero/glm", "/run/credentials/inference-glm.service"}
    secret = "/run/credentials/inference-glm.service/sglang.yaml"
    words = command(["--config", secret, "--secrets-of-mine", "secrets/x"], there, HOME="/var/lib/rankzero/glm")
    assert (
        options(words, "--device") == ["/dev/infiniband"]
        and "memlock=-1:-1" in options(words, "--ulimit")
        and {"nofile=4096:4096", "nproc=100:100"} < set(options(words, "--ulimit"))
    )
    assert options(words, "--volume") == [
        "/models:/models:ro",
        "/run/credentials/inference-glm.service:/run/credentials/inference-glm.service:ro",
        "/var/lib/rankzero/glm:/var/lib/rankzero/glm",
    ]
    assert options(words, "--workdir") == ["/var/lib/rankzero/glm"] and options(command([], HOME="/nonexistent"), "--workdir") == []


# ---- what the plan asks


def imaged(engine: str = "vllm", mounts: tuple[str, ...] = ("/models", "/adapters"), nodes: int = 1) -> dict[str, Any]:
    found = made.hosts(nodes)
    for host in found.values():
        host["engines"][engine] = [made.build(engine, container={"image": "sha256:1", "mounts": list(mounts)})]
    return found


def root(nodes: int = 1) -> dict[str, Any]:
    return {"inputs": {f"n{number}": {"user": "root"} for number in range(1, nodes + 1)}}


def test_a_build_that_is_an_image_is_planned_as_any_other() -> None:
    wanted = made.profile("vllm", adapters=made.ADAPTERS)
    launch = made.engine(made.good(wanted, found=imaged(), **root())[0])
    assert launch["args"] == made.engine(made.good(wanted)[0])["args"] and launch["path"].endswith("/vllm")


def test_what_containers_would_not_see_and_who_may_not_start_them() -> None:
    wanted = made.profile("vllm", adapters=made.ADAPTERS)
    assert made.faults(wanted, found=imaged(mounts=("/models", "/adap")), **root()) == ["engines.vllm", "engines.vllm"]
    assert made.faults(wanted, found=imaged(mounts=("/models/g",)), **root()) == ["engines.vllm"] * 3
    assert made.faults(wanted, found=imaged()) == ["replica_user"]
    assert "distributed" in made.faults(made.profile("vllm", 2, distributed="ray"), found=imaged(nodes=2), **root(2))


def test_ranks_with_different_images_are_refused() -> None:
    found = imaged(nodes=2)
    found["n2"]["engines"]["vllm"][0]["container"]["image"] = "sha256:2"
    assert made.faults(made.profile("vllm", 2), found=found, **root(2)) == ["engines.vllm.container"]


# ---- how it is installed


def image(**more: Any) -> dict[str, Any]:
    return {**wish("image"), "image": None, "mounts": ["/models"], "podman_options": [], "wrapper": PROGRAM.read_text(), **more}


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({}, "image (engine_image in the playbooks) and archive (engine_archive in the playbooks) are not set"),
        ({"image": "vllm:latest"}, "a tag is another image tomorrow"),
        ({"image": "vllm@sha256:12"}, "one with its digest"),
        ({"image": "--help@sha256:" + "0" * 64}, "one with its digest"),
        ({"image": "v@sha256:" + "0" * 64, "archive": "x"}, "both set"),
        ({"archive": "x"}, "64 lower-case"),
        ({"image": "v@sha256:" + "0" * 64, "mounts": ["/"]}, "mounts (engine_mounts in the playbooks) has '/'"),
        ({"image": "v@sha256:" + "0" * 64, "mounts": ["/a:b"]}, "mounts (engine_mounts in the playbooks) has '/a:b'"),
        ({"image": "v@sha256:" + "0" * 64, "mounts": ["models"]}, "mounts (engine_mounts in the playbooks) has 'models'"),
    ],
)
def test_images_that_are_not_one_certain_image(more: dict[str, Any], text: str) -> None:
    with pytest.raises(InstallError) as raised:
        engine_installs.check(image(**more))
    assert text in str(raised.value)


@pytest.mark.slow
def test_a_real_container(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imported, saved, installed from the archive, asked for its version, started with a key and a model, and removed with its image."""
    env, problem = podman_image.save(tmp_path)
    if problem:
        pytest.skip(problem)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "models").mkdir()
    (tmp_path / "models/m.gguf").write_text("x")

    store = Store(str(tmp_path / "root"), "llamacpp", "i1", run)
    sha256 = hashlib.sha256((tmp_path / "image.tar").read_bytes()).hexdigest()
    chosen = image(archive="image.tar", sha256=sha256, mounts=[str(tmp_path / "models")], podman_options=["--cgroups=enabled", "--ulimit=nproc=1024:1024"])
    engine_installs.check(chosen)
    with store.locked():
        store.install(chosen, ["llama-server"], str(tmp_path / "image.tar"))
    path = store.place(chosen) + "/bin/llama-server"
    assert engine_probe.version(run, path, ["--version"], env) == "1.2.3"
    assert engine_installs.container_of(path) == {
        "image": json.loads((pathlib.Path(path).parent / "container.json").read_text())["image"],
        "mounts": [str(tmp_path / "models")],
    }
    done = subprocess.run(
        [path, "--model", "a b $c"], capture_output=True, text=True, check=False, env={**env, "VLLM_API_KEY": "s3cret", "READ": str(tmp_path / "models/m.gguf")}
    )
    assert done.stdout.splitlines() == ["--model", "a b $c", "s3cret", "read it"] and done.returncode == 7, done.stderr
    outside = subprocess.run([path, "x"], capture_output=True, text=True, check=False, env={**env, "READ": str(tmp_path / "program.c")})
    assert outside.stdout.splitlines() == ["x", "no key", "cannot read it"]
    with store.locked():
        store.remove(store.stale(None))
    assert not pathlib.Path(store.base).exists() and subprocess.run(["podman", "images", "--quiet"], capture_output=True, check=True).stdout == b""
