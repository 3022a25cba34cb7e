# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Several inventory hosts on this one machine, without root: each with its own replica_root, loopback address and (simulated) driver.

What is real: Ansible, the modules, pynvml, supervisord, the engines and their sockets. What is simulated is the driver's edge alone: the C
library of tests/fake_nvml, with one state file for each host. Used by the end-to-end tests and by `make demo`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
PLAYBOOKS = ROOT / "playbooks"


@dataclasses.dataclass(frozen=True)
class Host:
    """One inventory host: its name, loopback address and GPUs. Memory in MiB; no GPUs means a host without an NVIDIA driver."""

    name: str
    address: str
    gpus: int = 0
    model: str = "NVIDIA H100 80GB HBM3"
    memory_mib: int = 81559
    capability: str = "9.0"
    variables: tuple[tuple[str, Any], ...] = ()

    def uuid(self, index: int) -> str:
        number = int(self.address.rsplit(".", 1)[1])
        return f"GPU-{number:08x}-0000-4000-8000-{index:012d}"


class Fleet:
    """Hosts below one directory. `library` is the folder of the fake libnvidia-ml.so.1, needed as soon as a host has GPUs."""

    def __init__(self, directory: pathlib.Path, hosts: list[Host], library: pathlib.Path | None = None, group: str = "replica_demo", **variables: Any) -> None:
        self.directory = directory
        self.hosts = {host.name: host for host in hosts}
        self.library = library
        self.group = group
        self.variables = variables
        self.processes = directory / "gpu-processes"
        self.processes.mkdir(parents=True, exist_ok=True)
        for host in hosts:
            self.root(host.name).mkdir(parents=True, exist_ok=True)
            self.write_state(host.name)
        self.inventory = directory / "inventory.json"
        self.write_inventory()

    def root(self, name: str) -> pathlib.Path:
        return self.directory / "hosts" / name

    def state_file(self, name: str) -> pathlib.Path:
        return self.directory / f"{name}.nvml"

    def write_state(self, name: str, *more: str) -> None:
        """The driver as this host sees it: its GPUs, what the processes in the process directory hold, and extra statements."""
        host = self.hosts[name]
        path = self.state_file(name)
        if not host.gpus:
            path.unlink(missing_ok=True)
            return
        lines = ["driver 580.95.05", "cuda 13000", f'procdir path="{self.processes}" prune=1']
        for index in range(host.gpus):
            lines.append(
                f'gpu {index} name="{host.model}" uuid={host.uuid(index)} pci=0000:{0x10 + index:02X}:00.0 '
                f"total={host.memory_mib}MiB reserved=551MiB cc={host.capability} mig=off"
            )
        unfinished = path.with_suffix(".new")
        unfinished.write_text("\n".join([*lines, *more]) + "\n", encoding="utf-8")
        unfinished.replace(path)

    def environment(self, name: str) -> dict[str, str]:
        if not self.hosts[name].gpus or self.library is None:
            return {}
        return {"LD_LIBRARY_PATH": str(self.library), "FAKE_NVML_STATE": str(self.state_file(name))}

    def write_inventory(self) -> None:
        entries = {}
        for host in self.hosts.values():
            entries[host.name] = {
                "ansible_connection": "local",
                "ansible_python_interpreter": os.environ.get("RANKZERO_HOST_PYTHON", sys.executable),
                "replica_root": str(self.root(host.name)),
                "replica_address": host.address,
                "replica_become": False,
                "replica_service_manager": "supervisor",
                "replica_module_environment": self.environment(host.name),
                **dict(host.variables),
            }
        group = {"hosts": entries, "vars": {"replica_become": False, "diagnosis_dir": str(self.directory / "diagnosis"), **self.variables}}
        self.inventory.write_text(json.dumps({"all": {"children": {self.group: group}}}, indent=2), encoding="utf-8")

    def run(
        self, playbook: str, *arguments: str, extra: dict[str, Any] | None = None, timeout: float = 180, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run one of the collection's playbooks on the fleet."""
        command = [
            str(pathlib.Path(sys.executable).parent / "ansible-playbook"),
            "-i",
            str(self.inventory),
            str(PLAYBOOKS / f"{playbook}.yml"),
            "-e",
            json.dumps({"replica_become": False, **(extra or {})}),
            *arguments,
        ]
        return subprocess.run(command, cwd=ROOT, env={**ansible_environment(), **(env or {})}, capture_output=True, text=True, timeout=timeout, check=False)

    def supervisors(self) -> list[int]:
        """Pids of the supervisord processes of this fleet, found by their configuration files."""
        found = []
        for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
            except OSError:
                continue
            if any(word.startswith(str(self.directory).encode() + b"/") and word.endswith(b"supervisord.conf") for word in words):
                found.append(int(path.parent.name))
        return found

    def marked(self) -> list[int]:
        """Pids that carry a shard's marker and work below this fleet's directory."""
        found = []
        for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
            try:
                environment = path.read_bytes()
            except OSError:
                continue
            if b"RANKZERO_SHARD=" in environment and str(self.directory).encode() in environment:
                found.append(int(path.parent.name))
        return found

    def orphans(self) -> list[int]:
        """Pids of run_shard.py below this fleet's directory: where its supervisord is gone nothing else ends one that waits for the other ranks."""
        start = str(self.directory).encode() + b"/"
        return [
            int(path.parent.name)
            for path in pathlib.Path("/proc").glob("[0-9]*/cmdline")
            if any(word.startswith(start) and word.endswith(b"/run_shard.py") for word in _read(path).split(b"\0"))
        ]

    def stop(self) -> None:
        """End everything that this fleet runs, whatever state it is in. Files stay."""
        for pid in self.supervisors():
            _signal(pid, signal.SIGTERM)
        deadline = time.monotonic() + 15
        while (self.supervisors() or self.marked()) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in self.supervisors() + self.marked() + self.orphans():
            _signal(pid, signal.SIGKILL)

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)


def _read(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended meanwhile
        return b""


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def ansible_environment() -> dict[str, str]:
    """Ansible as a person would run it from the checkout: its ansible.cfg, no colours, nothing of ours in the way."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")}
    environment.update(
        {"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1", "ANSIBLE_LOCALHOST_WARNING": "False", "PYTHONDONTWRITEBYTECODE": "1"}
    )
    environment["PATH"] = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', '')}"
    return environment
