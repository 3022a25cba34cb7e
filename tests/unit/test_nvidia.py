# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""GPU facts read through the real pynvml from the C library, and from made-up PCI buses.

Each `Machine` is one or more states of the world; they are read in a process of its own, because the dynamic linker and pynvml load
the library once.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import recorded_hosts

from ansible_collections.rankzero.inference.plugins.module_utils import nvidia

TESTS = pathlib.Path(__file__).resolve().parent.parent
COLLECTIONS = pathlib.Path(nvidia.__file__).parents[5]
EXAMPLES = TESTS / "fake_nvml" / "examples"
MIB = 1 << 20
UUID = "GPU-11111111-1111-4111-8111-00000000000{}"
KERNEL_MODULE = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder)\nGCC version: 12\n"

RUNNER = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from ansible_collections.rankzero.inference.plugins.module_utils import nvidia
results = []
for case in json.load(sys.stdin):
    state = os.environ["FAKE_NVML_STATE"]
    if case["state"] is None:
        if os.path.exists(state):
            os.unlink(state)
    else:
        with open(state + ".new", "wb") as stream:
            stream.write(case["state"].encode("latin-1"))
        os.replace(state + ".new", state)
    results.append({"read": nvidia.read(case["proc"], case["sys"]), "processes": nvidia.read_processes(case["proc"])})
print(json.dumps(results))
"""


@pytest.fixture(scope="session")
def library() -> pathlib.Path:
    done = subprocess.run([sys.executable, str(TESTS / "fake_nvml" / "build.py")], check=True, capture_output=True, text=True)
    return pathlib.Path(done.stdout.strip())


class Machine:
    """A folder with /proc and /sys of a made-up host, and the means to read its GPUs in a process of its own."""

    def __init__(self, folder: pathlib.Path, library: pathlib.Path | None) -> None:
        self.folder, self.library = folder, library
        self.proc, self.sys = folder / "proc", folder / "sys"
        for path in (self.proc, self.sys):
            path.mkdir(exist_ok=True)
        self.environment: dict[str, str] = {}
        self.python = [sys.executable]

    def take(self, one: recorded_hosts.Recorded) -> str | None:
        """Be this recorded host; the state of its driver."""
        self.proc, self.sys = one.tree.proc, one.tree.sysfs
        self.library = self.library if one.library else None
        return one.nvml

    def file(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def pci(self, *addresses: str, driver: str | None = "nvidia", numa: int = 0, vendor: str = "0x10de", kind: str = "0x030200") -> None:
        for address in addresses:
            device = f"sys/bus/pci/devices/{address}"
            for name, value in (("vendor", vendor), ("class", kind), ("numa_node", str(numa))):
                self.file(f"{device}/{name}", value + "\n")
            if driver:
                (self.folder / device / "driver").symlink_to(f"../../drivers/{driver}")

    def meminfo(self, total_kb: int) -> None:
        self.file("proc/meminfo", f"MemTotal:       {total_kb} kB\nMemFree:  1 kB\n")

    def ask(self, *states: str | None) -> list[dict[str, Any]]:
        env = {**os.environ, "FAKE_NVML_STATE": str(self.folder / "state"), "FAKE_NVML_STRICT": "1", **self.environment}
        if self.library:
            env["LD_LIBRARY_PATH"] = str(self.library)
        cases = [{"state": state, "proc": str(self.proc), "sys": str(self.sys)} for state in states]
        done = subprocess.run(
            [*self.python, "-c", RUNNER, str(COLLECTIONS)], input=json.dumps(cases), env=env, capture_output=True, text=True, check=False, timeout=120
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        results: list[dict[str, Any]] = json.loads(done.stdout)
        return results

    def read(self, state: str | None) -> dict[str, Any]:
        result: dict[str, Any] = self.ask(state)[0]["read"]
        return result


@pytest.fixture
def machine(tmp_path: pathlib.Path, library: pathlib.Path) -> Machine:
    return Machine(tmp_path, library)


def example(name: str) -> str:
    return (EXAMPLES / f"{name}.state").read_text(encoding="ascii")


def gpu_lines(addresses: list[str]) -> str:
    """One `gpu` line for each PCI address, with a UUID by its place."""
    return "".join(f"gpu {index} pci={address} uuid={UUID.format(index)} total=81559 reserved=551\n" for index, address in enumerate(addresses))


def by_uuid(facts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {gpu["uuid"]: gpu for gpu in facts["gpus"]}


# What needs no bus and one line of state: all of it is read in one process.
HEALTH = [
    ("gpu 0", "ok", ""),
    ("gpu 0 ecc=1 rows_corrected=3 rows_uncorrected=1", "ok", ""),
    ("gpu 0 rows_pending=1", "warning", "waits for remapping"),
    ("gpu 0 rows_failure=1", "unhealthy", "replacement"),
    ("gpu 0 rows_failure=1 ecc=1 ecc_uncorrected=4", "unhealthy", "4 uncorrected"),
    ("gpu 0 ecc=1 ecc_uncorrected=4", "warning", "4 uncorrected"),
    ("gpu 0 ecc=0 ecc_pending=1", "warning", "ECC will be on"),
    ("gpu 0 ecc=unsupported rows=unsupported recovery=unsupported", "ok", ""),
    ("gpu 0 rows=unsupported retired_sbe=2 retired_dbe=1", "ok", ""),
    ("gpu 0 retired_sbe=2 retired_dbe=1 retired_pending=1", "warning", "retirement"),
    ("gpu 0 recovery=gpu_reset", "unhealthy", "gpu_reset"),
    ("gpu 0 recovery=node_reboot", "unhealthy", "node_reboot"),
    ("gpu 0 recovery=drain_and_reset", "warning", "drain_and_reset"),
    ("gpu 0 recovery=99", "unhealthy", "action_99"),
    ("gpu 0 fabric=in_progress", "warning", "in_progress"),
    ("gpu 0 fabric=completed fabric_status=UNKNOWN", "warning", "failed"),
    ("gpu 0\nerror nvmlDeviceGetComputeMode RESET_REQUIRED", "unhealthy", "reset"),
    ("gpu 0\nerror nvmlDeviceGetRemappedRows UNKNOWN", "warning", "nvmlDeviceGetRemappedRows failed: Unknown Error"),
    ("gpu 0\nerror nvmlDeviceGetName GPU_IS_LOST", "lost", "Xid 79"),
    ("gpu 0\nerror nvmlDeviceGetHandleBy* RESET_REQUIRED", "unhealthy", "requires restart"),
]
DOMAINS = [
    ("fabric=unsupported", None),
    ("fabric=not_supported", None),
    ("fabric=completed cluster=1 clique=4", {"id": None, "clique": None}),
    ("fabric=completed cluster=00000000-0000-0000-0000-000000000010 clique=0", {"id": "00000000-0000-0000-0000-000000000010", "clique": 0}),
    ("fabric=completed cluster=11111111-2222-4333-8444-555555555555 clique=32766 health_summary=2", {"clique": 32766, "health": "unhealthy"}),
    ("fabric=completed cluster=11111111-2222-4333-8444-555555555555 fabric_status=UNKNOWN", {"id": None, "state": "failed"}),
    ("fabric=not_started", {"id": None, "state": "not_started"}),
]
UNATTRIBUTED = [
    ("gpu 0 used=300\n", 300),
    ("gpu 0 used=300\nproc gpu=0 pid=5 mib=100\n", 300),
    ("gpu 0 used=300\nproc gpu=0 pid=5 mib=NA\n", None),
    ("gpu 0\nproc gpu=0 pid=5 mib=70\n", 0),
    ("gpu 0\nproc gpu=0 pid=5 mib=70\nerror nvmlDeviceGetMPS* UNKNOWN\n", None),
    ("gpu 0 used=9\nerror nvmlDeviceGetMPS* NOT_SUPPORTED\n", 9),
    ("gpu 0 used=9\nerror nvmlDeviceGetCompute*Processes* UNKNOWN\n", None),
]
UUIDS = [
    ("GPU-" + "a" * 80, "GPU-" + "a" * 80),
    ("gpu-UPPER", "gpu-UPPER"),
    ('"GPU-\x1b[31m x"', "GPU- [31m x"),
    ('" "', None),
    ('"GPU-\xff\xfe"', None),
]
MEMORIES = [
    ("cc=9.0 total=81559 reserved=551 used=100", "discrete", 81559, 100),
    ("cc=9.0 total=97871 gpu_numa=1 used=7", "coherent", 97871, 7),  # GH200
    ("cc=10.0 total=189471 gpu_numa=2", "coherent", 189471, 0),  # GB200
    ("cc=12.1 total=8128", "unified", 2048, None),  # N1X: the carve-out
    ("cc=12.1 total=0", "unified", 2048, None),
    ("cc=8.6 total=0", "unified", 2048, None),
    ("cc=9.9 memory=unsupported", "unified", 2048, None),
    ("cc=8.7 memory=unsupported", "unified", 2048, None),  # Jetson Orin,
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, library: pathlib.Path) -> dict[str, dict[str, Any]]:
    """`{state: result}` for the states of the tables above, on a host with 2 GiB and no PCI bus."""
    machine = Machine(tmp_path_factory.mktemp("alone"), library)
    machine.meminfo(2 << 20)
    states = [f"{row[0]}\n" for row in HEALTH] + [f"gpu 0 {row[0]}\n" for row in (*DOMAINS, *MEMORIES)]
    states += [row[0] for row in UNATTRIBUTED] + [f"gpu 0 uuid={row[0]}\n" for row in UUIDS]
    return dict(zip(states, machine.ask(*states)))


# ---------------------------------------------------------------- fixtures from the field


class TestFixtures:
    def test_gb10_unified(self, machine: Machine) -> None:
        facts = recorded_hosts.load("nvml_gb10_unified")
        gpu, serving = facts["gpus"][0], facts["serving"]
        held = serving["compute_list"][gpu["uuid"]][0]
        hosts = recorded_hosts.write("nvml_gb10_unified", machine.folder)
        idle, busy = (machine.ask(machine.take(hosts[name]))[0] for name in ("idle", "serving"))
        memory = idle["read"]["gpus"][0]["memory"]
        assert memory == {
            "model": "unified",
            "total_mib": facts["expect"]["memory_total_bytes"] // MIB,
            "used_mib": None,
            "reserved_mib": None,
            "unattributed_mib": None,
        }
        assert idle["read"]["gpus"][0]["errors"]["nvmlDeviceGetMemoryInfo"] == "Not Supported"
        assert idle["read"]["gpus"][0]["pci_bdf"] == "000f:01:00.0"
        assert idle["read"]["drivers_nvidia"]["state"] == "ok"
        assert busy["processes"]["gpus"][0]["processes"] == [{"pid": held["pid"], "used_mib": held["used"] // MIB, "kind": "compute"}]
        assert busy["processes"]["gpus"][0]["memory"] == memory

    def test_gb200_cliques(self, machine: Machine) -> None:
        facts = recorded_hosts.load("nvml_gb200_nvl_clique")
        hosts = recorded_hosts.write("nvml_gb200_nvl_clique", machine.folder)
        results = [machine.ask(machine.take(hosts[host["name"]]))[0] for host in facts["hosts"]]
        domains: dict[tuple[str, int], list[str]] = {}
        waiting = []
        for host, result in zip(facts["hosts"], results):
            seen = {json.dumps(gpu["interconnect_domain"], sort_keys=True) for gpu in result["read"]["gpus"]}
            assert len(seen) == 1 and len(result["read"]["gpus"]) == host["gpus"]
            domain = json.loads(seen.pop())
            assert result["read"]["gpus"][0]["vendor_data"]["platform"] == {"chassis": host["chassis"], "slot": host["slot"], "tray": host["tray"]}
            if domain["state"] == "completed":
                domains.setdefault((domain["id"], domain["clique"]), []).append(host["name"])
                assert domain["health"] == "healthy" and domain["id"] == host["cluster_uuid"]
            else:
                waiting.append(host["name"])
                assert (domain["id"], domain["clique"]) == (None, None)
                assert result["read"]["gpus"][0]["health"]["state"] == "warning"
        assert list(domains.values()) == facts["expect"]["domains"]
        assert waiting == facts["expect"]["not_ready"]

    def test_gb300_bus_ids(self, machine: Machine) -> None:
        facts = recorded_hosts.load("nvml_gb300_bus_ids")
        seen = machine.read(machine.take(recorded_hosts.write("nvml_gb300_bus_ids", machine.folder)["host"]))
        assert [gpu["pci_bdf"] for gpu in seen["gpus"]] == [gpu["sysfs"] for gpu in facts["gpus"]]
        assert [gpu["index"] for gpu in seen["gpus"]] == facts["expect"]["order"]
        assert [gpu["vendor_data"]["module_id"] for gpu in seen["gpus"]] == [gpu["module_id"] for gpu in facts["gpus"]]
        assert [gpu["numa_node"] for gpu in seen["gpus"]] == [1] * 4
        assert seen["drivers_nvidia"]["state"] == "ok"

    def test_hgx_zero_cluster_uuid(self, machine: Machine) -> None:
        facts = recorded_hosts.load("nvml_hgx_zero_cluster_uuid")
        hosts = recorded_hosts.write("nvml_hgx_zero_cluster_uuid", machine.folder)
        new, old = (machine.ask(machine.take(hosts[name]))[0] for name in ("new", "old"))
        for gpu in new["read"]["gpus"]:
            assert gpu["interconnect_domain"] == {"kind": "nvlink", "id": None, "clique": None, "state": "completed", "health": "unknown"}
            assert gpu["memory"] == {
                "model": "discrete",
                "total_mib": 81559,
                "used_mib": facts["expect"]["v2_used_mib_idle"],
                "reserved_mib": 480,
                "unattributed_mib": 0,
            }
        for gpu in old["read"]["gpus"]:
            assert (gpu["memory"]["used_mib"], gpu["memory"]["reserved_mib"]) == (facts["expect"]["v1_used_mib_idle"], None)
            assert gpu["errors"]["nvmlDeviceGetMemoryInfo_v2"] == "Function Not Found"

    @pytest.mark.parametrize("case", recorded_hosts.load("nvml_init_failures")["cases"], ids=lambda case: case["verdict"])
    def test_init_failures(self, machine: Machine, case: dict[str, Any]) -> None:
        both = machine.ask(machine.take(recorded_hosts.write("nvml_init_failures", machine.folder)[case["verdict"]]))[0]
        seen = both["read"]
        verdict = {"driver_missing": "library_missing", "gpus_bound_elsewhere_or_fallen": "gpus_missing"}.get(case["verdict"], case["verdict"])
        assert seen["drivers_nvidia"]["state"] == verdict, seen["drivers_nvidia"]
        assert [gpu["pci_bdf"] for gpu in seen["gpus"]] == case["pci_nvidia"]
        for gpu in seen["gpus"]:
            assert (gpu["uuid"], gpu["health"]["state"], gpu["processes"]) == (None, "unknown", None)
            assert gpu["health"]["reasons"] and gpu["errors"]
        if verdict == "no_gpu":
            assert seen["drivers_nvidia"]["hint"] is None
        else:
            assert seen["drivers_nvidia"]["message"] and seen["drivers_nvidia"]["hint"] and "\n" not in seen["drivers_nvidia"]["hint"]
            assert both["processes"]["state"] == verdict and both["processes"]["gpus"] == []

    @pytest.mark.parametrize("variant", recorded_hosts.load("nvml_lost_gpu")["variants"], ids=lambda variant: variant["name"])
    def test_lost_gpu(self, machine: Machine, variant: dict[str, Any]) -> None:
        facts = recorded_hosts.load("nvml_lost_gpu")
        seen = machine.read(machine.take(recorded_hosts.write("nvml_lost_gpu", machine.folder)[variant["name"]]))
        answering = [value for value in variant["handles"].values() if isinstance(value, str)]
        healthy = [gpu for gpu in seen["gpus"] if gpu["health"]["state"] == "ok"]
        missing = [gpu for gpu in seen["gpus"] if gpu["health"]["state"] != "ok"]
        assert [gpu["pci_bdf"] for gpu in healthy] == [nvidia.parse_address(address) for address in answering]
        assert [gpu["index"] for gpu in healthy] == [index for index, value in variant["handles"].items() if isinstance(value, str)]
        assert [gpu["pci_bdf"] for gpu in missing] == facts["expect"]["missing"] and len(healthy) == facts["expect"]["healthy"]
        assert seen["drivers_nvidia"]["state"] == "gpus_missing"
        assert all(address in seen["drivers_nvidia"]["message"] for address in facts["expect"]["missing"])
        assert missing[0]["health"]["state"] == ("lost" if variant["name"] == "handle_raises" else "unknown")
        assert missing[0]["index"] == (None if variant["name"] == "count_drops" else 1)

    def test_mig_pending(self, machine: Machine) -> None:
        facts = recorded_hosts.load("nvml_mig_pending")
        seen = machine.read(machine.take(recorded_hosts.write("nvml_mig_pending", machine.folder)["host"]))["gpus"]
        assert [gpu["index"] for gpu in seen if not gpu["partition"]["mode_current"]] == facts["expect"]["whole_now"]
        assert [gpu["index"] for gpu in seen if gpu["health"]["state"] == "warning"] == facts["expect"]["warn"]
        assert seen[2]["partition"]["mode_current"] is None and seen[2]["errors"]["nvmlDeviceGetMigMode"] == "Not Supported"

    @pytest.mark.parametrize("with_bus", [False, True])
    def test_no_permission_index(self, machine: Machine, with_bus: bool) -> None:
        facts = recorded_hosts.load("nvml_no_permission_index")
        state = machine.take(recorded_hosts.write("nvml_no_permission_index", machine.folder)["host"])
        if with_bus:
            machine.pci("0000:10:00.0", "0000:3b:00.0", "0000:92:00.0", "0000:d8:00.0")
        both = machine.ask(state)[0]
        seen = both["read"]
        assert [gpu["index"] for gpu in seen["gpus"] if gpu["health"]["state"] == "ok"] == facts["expect"]["usable_indices"]
        assert [gpu["index"] for gpu in seen["gpus"]] == [0, 1, 2, 3]
        assert [gpu["health"]["state"] for gpu in seen["gpus"]][::2] == ["not_permitted"] * 2
        assert [gpu["pci_bdf"] for gpu in seen["gpus"]][::2] == (["0000:10:00.0", "0000:92:00.0"] if with_bus else [None, None])
        assert [row["index"] for row in both["processes"]["gpus"] if row["uuid"]] == facts["expect"]["usable_indices"]
        assert both["processes"]["state"] == "ok"

    def test_orphans_after_kill(self, machine: Machine) -> None:
        facts = recorded_hosts.load("proc_orphans_after_kill")
        seen = machine.read(machine.take(recorded_hosts.write("proc_orphans_after_kill", machine.folder)["host"]))
        orphans = [row for gpu in seen["gpus"] for row in gpu["processes"] if row["shard"] is None]
        assert [row["pid"] for row in orphans] == facts["expect"]["orphans"]
        assert [row["name"] for row in orphans] == ["VLLM::EngineCor", "VLLM::Worker_TP"]
        assert [gpu["memory"]["unattributed_mib"] for gpu in seen["gpus"]] == [0, 0]

    def test_partial_shard(self, machine: Machine) -> None:
        facts = recorded_hosts.load("proc_partial_shard")
        both = machine.ask(machine.take(recorded_hosts.write("proc_partial_shard", machine.folder)["host"]))[0]
        holds = {gpu["uuid"] for gpu in both["read"]["gpus"] if any(row["shard"] == "glm/0" and row["used_mib"] > 2048 for row in gpu["processes"])}
        assert [gpu for gpu in facts["assigned"] if gpu not in holds] == facts["expect"]["missing"]
        assert [(row["pid"], row["used_mib"]) for row in both["processes"]["gpus"][2]["processes"]] == [(7001, 500), (7003, 57344)]

    def test_pid_namespaces(self, machine: Machine) -> None:
        facts = recorded_hosts.load("proc_pid_namespaces")
        seen = by_uuid(machine.read(machine.take(recorded_hosts.write("proc_pid_namespaces", machine.folder)["host"])))
        assert [uuid for uuid, gpu in seen.items() if any(row["shard"] == "replica-a/?" for row in gpu["processes"])] == facts["expect"]["replica_a_holds"]
        assert {uuid: pids for uuid, gpu in seen.items() if (pids := [row["pid"] for row in gpu["processes"] if row["shard"] is None])} == facts["expect"][
            "foreign"
        ]


# ---------------------------------------------------------------- every call can fail alone


def test_each_call_failing_alone_costs_only_its_own_fact(machine: Machine) -> None:
    """For every function that is called and every code: no traceback, the GPU is listed once, and what is unknown has its reason."""
    machine.pci("0000:1b:00.0", "0000:43:00.0")
    machine.meminfo(1 << 20)
    lines = example("h100-mig") + "proc gpu=1 pid=1 mib=5\n" + "gpu 0-1 fabric=completed nvlinks=2 chassis=9\n"
    trace = machine.folder / "trace"
    machine.environment["FAKE_NVML_TRACE"] = str(trace)
    healthy = machine.ask(lines)[0]["read"]
    functions = sorted(set(re.findall(r"(nvml\w+) gpu=", trace.read_text(encoding="ascii"))) - {"nvmlShutdown"})
    del machine.environment["FAKE_NVML_TRACE"]
    assert len(functions) >= 30
    codes = [2, 3, 4, 6, 7, 9, 13, 15, 16, 17, 25, 27, 999, 1234]
    cases = [(function, code) for function in functions for code in codes]
    results = machine.ask(*(f"{lines}error {function} {code}\n" for function, code in cases))
    states = {"ok", "warning", "unhealthy", "lost", "not_permitted", "unknown"}
    for (function, code), result in zip(cases, results):
        where = f"{function} {code}"
        whole = [gpu for gpu in result["read"]["gpus"] if gpu["partition"]["kind"] is None]
        assert [gpu["pci_bdf"] for gpu in whole] == ["0000:1b:00.0", "0000:43:00.0"], where
        assert set(whole[0]) == set(healthy["gpus"][0]), where
        for gpu, before in zip(whole, [gpu for gpu in healthy["gpus"] if gpu["partition"]["kind"] is None]):
            assert gpu["health"]["state"] in states and (gpu["health"]["state"] == "ok") == (not gpu["health"]["reasons"]), where
            lost = [key for key in before if gpu[key] is None and before[key] is not None]
            assert not lost or gpu["errors"], where
            for text in gpu["errors"].values():
                assert text and "\n" not in text, where
            assert gpu["memory"]["total_mib"] != 0, where
        if result["processes"]["state"] == "ok" and code != 15:
            assert {row["index"] for row in result["processes"]["gpus"]} == {0, 1}, where


def test_every_call_failing_at_once(machine: Machine) -> None:
    machine.pci("0000:1b:00.0", "0000:43:00.0")
    for code, result in zip((3, 15, 999), machine.ask(*(example("h100-mig") + f"error nvmlDevice* {code}\n" for code in (3, 15, 999)))):
        assert [gpu["pci_bdf"] for gpu in result["read"]["gpus"]] == ["0000:1b:00.0", "0000:43:00.0"], code
        assert result["read"]["drivers_nvidia"]["state"] == "gpus_missing"


# ---------------------------------------------------------------- identity


class TestIdentity:
    def test_index_refused_but_address_answers(self, machine: Machine) -> None:
        machine.pci("0000:1b:00.0", "0000:43:00.0")
        seen = machine.read(gpu_lines(["0000:1b:00.0", "0000:43:00.0"]) + "error nvmlDeviceGetHandleByIndex_v2 UNKNOWN gpu=1\n")
        assert [(gpu["index"], gpu["uuid"]) for gpu in seen["gpus"]] == [(0, UUID.format(0)), (1, UUID.format(1))]
        assert seen["drivers_nvidia"]["state"] == "ok"

    def test_refused_indices_take_no_address_by_guess(self, machine: Machine) -> None:
        """Two GPUs are gone and only one index is left for them: which one it is cannot be told."""
        machine.pci("0000:10:00.0", "0000:20:00.0", "0000:30:00.0")
        lines = "gpu 0 pci=0000:10:00.0\ngpu 1 pci=0000:99:00.0 lost=1\n"
        seen = machine.read(lines)["gpus"]
        assert [(gpu["index"], gpu["pci_bdf"]) for gpu in seen] == [(0, "0000:10:00.0"), (None, "0000:20:00.0"), (None, "0000:30:00.0")]
        assert all("index 1: GPU is lost" in gpu["errors"]["nvmlDeviceGetHandleByIndex"] for gpu in seen[1:])

    def test_order_that_does_not_fit_joins_nothing(self, machine: Machine) -> None:
        machine.pci("0000:10:00.0", "0000:20:00.0")
        seen = machine.read("gpu 0 pci=0000:10:00.0\ngpu 1 pci=0000:05:00.0 lost=1\ngpu 2 pci=0000:15:00.0\n")["gpus"]
        assert [(gpu["index"], gpu["pci_bdf"]) for gpu in seen] == [(0, "0000:10:00.0"), (2, "0000:15:00.0"), (None, "0000:20:00.0")]

    def test_without_a_bus_the_lost_gpu_keeps_its_index(self, machine: Machine) -> None:
        seen = machine.read("gpu 0-3 uuid=GPU-%d\ngpu 2 lost=1\n")
        assert [(gpu["index"], gpu["uuid"], gpu["health"]["state"]) for gpu in seen["gpus"]] == [
            (0, "GPU-0", "ok"),
            (1, "GPU-1", "ok"),
            (2, None, "lost"),
            (3, "GPU-3", "ok"),
        ]
        assert "index 2 (GPU is lost)" in seen["drivers_nvidia"]["message"]

    @pytest.mark.parametrize(("uuid", "shown"), UUIDS)
    def test_odd_uuids(self, alone: dict[str, Any], uuid: str, shown: str | None) -> None:
        gpu = alone[f"gpu 0 uuid={uuid}\n"]["read"]["gpus"][0]
        assert gpu["uuid"] == shown
        assert gpu["health"]["state"] == ("ok" if shown else "unknown") and bool(gpu["health"]["reasons"]) == (shown is None)

    def test_two_gpus_that_claim_one_uuid(self, machine: Machine) -> None:
        seen = machine.read("gpu 0-1 uuid=GPU-same\n")
        assert [gpu["pci_bdf"] for gpu in seen["gpus"]] == ["0000:10:00.0", "0000:11:00.0"]

    @pytest.mark.parametrize(
        ("text", "address"),
        [
            ("00000008:06:00.0", "0008:06:00.0"),
            ("0000000F:01:00.0", "000f:01:00.0"),
            ("06:00.0", "0000:06:00.0"),
            ("00010000:AB:1F.7", "10000:ab:1f.7"),
            ("0000:3B:00.0\n", "0000:3b:00.0"),
            ("", None),
            ("junk", None),
            ("0000:3b:00", None),
            ("0000:3b:00.8", None),
            ("123456789:3b:00.0", None),
        ],
    )
    def test_addresses(self, text: str, address: str | None) -> None:
        assert nvidia.parse_address(text) == address

    def test_large_domain_on_the_bus_and_in_nvml(self, machine: Machine) -> None:
        machine.pci("10000:ab:00.0")
        seen = machine.read("gpu 0 pci=00010000:AB:00.0\n")
        assert [gpu["pci_bdf"] for gpu in seen["gpus"]] == ["10000:ab:00.0"] and seen["drivers_nvidia"]["state"] == "ok"

    def test_what_on_the_bus_is_no_gpu(self, machine: Machine) -> None:
        machine.pci("0000:01:00.0", vendor="0x1002")  # another vendor's
        machine.pci("0000:02:00.0", kind="0x068000")  # NVSwitch
        machine.pci("0000:03:00.0", kind="0x040300")  # the audio function
        machine.pci("0000:04:00.0")
        machine.pci("0000:04:00.4")
        (machine.sys / "bus/pci/devices/0000:04:00.4/physfn").symlink_to("../0000:04:00.0")  # a vGPU's virtual function
        machine.pci("0000:05:00.0", kind="0x030000")
        assert [gpu.address for gpu in nvidia.pci_gpus(str(machine.sys))] == ["0000:04:00.0", "0000:05:00.0"]

    def test_numa_node(self, machine: Machine) -> None:
        machine.pci("0000:10:00.0", numa=-1)
        machine.pci("0000:11:00.0", numa=3)
        seen = machine.read("gpu 0-2\n")["gpus"]
        assert [gpu["numa_node"] for gpu in seen] == [None, 3, None]
        assert [seen[0]["errors"]["numa_node"], seen[2]["errors"]["numa_node"]] == ["sysfs says -1: unknown", "not in sysfs"]


# ---------------------------------------------------------------- memory and processes


class TestMemory:
    @pytest.mark.parametrize(("line", "model", "total", "used"), MEMORIES)
    def test_models(self, alone: dict[str, Any], line: str, model: str, total: int, used: int | None) -> None:
        both = alone[f"gpu 0 {line}\n"]
        memory = both["read"]["gpus"][0]["memory"]
        assert (memory["model"], memory["total_mib"], memory["used_mib"]) == (model, total, used)
        assert both["processes"]["gpus"][0]["memory"] == memory
        assert both["read"]["gpus"][0]["vendor_data"].get("carve_out_mib") == (8128 if "8128" in line else None)
        if used is None:
            assert "nvmlDeviceGetMemoryInfo" in both["read"]["gpus"][0]["errors"]

    def test_memory_that_cannot_be_read_has_no_model(self, machine: Machine) -> None:
        gpu = machine.read("gpu 0\nerror nvmlDeviceGetMemoryInfo* UNKNOWN\n")["gpus"][0]
        assert gpu["memory"] == {"model": None, "total_mib": None, "used_mib": None, "reserved_mib": None, "unattributed_mib": None}

    @pytest.mark.parametrize(("lines", "unattributed"), UNATTRIBUTED)
    def test_unattributed(self, alone: dict[str, Any], lines: str, unattributed: int | None) -> None:
        assert alone[lines]["read"]["gpus"][0]["memory"]["unattributed_mib"] == unattributed


class TestProcesses:
    def test_lists_are_joined_by_pid(self, machine: Machine) -> None:
        lines = (
            "gpu 0\nproc gpu=0 pid=9 mib=500\nproc gpu=0 pid=9 mib=500 type=G\nproc gpu=0 pid=7 mib=40 type=M\nproc gpu=0 pid=7 mib=NA\n"
            "proc gpu=0 pid=3 mib=4 type=G\n"
        )
        gpu = machine.ask(lines)[0]["processes"]["gpus"][0]
        assert gpu["processes"] == [
            {"pid": 3, "used_mib": 4, "kind": "graphics"},
            {"pid": 7, "used_mib": 40, "kind": "mps"},
            {"pid": 9, "used_mib": 500, "kind": "compute"},
        ]

    def test_a_list_that_grows_between_two_calls(self, machine: Machine) -> None:
        late = "".join(f"proc gpu=0 pid={pid} mib=1 after={after}\n" for after in (2, 3, 4) for pid in range(after * 100, after * 100 + 30))
        gpu = machine.read("gpu 0\nproc gpu=0 pid=1 mib=1\n" + late)["gpus"][0]
        assert len(gpu["processes"]) >= 31 and gpu["errors"].get("nvmlDeviceGetComputeRunningProcesses") is None

    def test_a_list_that_never_stops_growing_is_unknown(self, machine: Machine) -> None:
        both = machine.ask("gpu 0\nproc gpu=0 pid=1 mib=1\nerror nvmlDeviceGetComputeRunningProcesses_v3 INSUFFICIENT_SIZE\n")[0]
        for gpu in (both["read"]["gpus"][0], both["processes"]["gpus"][0]):
            assert gpu["processes"] is None and gpu["errors"]["nvmlDeviceGetComputeRunningProcesses"] == "Insufficient Size"

    def test_an_old_library_without_the_call(self, machine: Machine) -> None:
        """pynvml then raises NVMLLibraryMismatchError, which is no NVMLError."""
        gpu = machine.read("gpu 0\nerror nvmlDeviceGetComputeRunningProcesses_v3 FUNCTION_NOT_FOUND\n")["gpus"][0]
        assert gpu["processes"] is None and gpu["uuid"] and gpu["health"]["state"] == "ok"

    def test_more_than_the_gpu_has_is_unknown(self, machine: Machine) -> None:
        gpu = machine.read("gpu 0 total=1000\nproc gpu=0 pid=5 mib=5000\n")["gpus"][0]
        assert [row["used_mib"] for row in gpu["processes"]] == [None] and "5000" in gpu["errors"]["nvmlDeviceGetComputeRunningProcesses"]

    def test_the_light_variant_asks_no_more_than_it_needs(self, machine: Machine) -> None:
        trace = machine.folder / "trace"
        machine.environment["FAKE_NVML_TRACE"] = str(trace)
        machine.ask(example("h100x8"))
        sessions = trace.read_text(encoding="ascii").split("nvmlInitWithFlags")
        light = set(re.findall(r"(nvml\w+) gpu=", sessions[2]))
        assert light <= {
            "nvmlDeviceGetCount_v2",
            "nvmlDeviceGetHandleByIndex_v2",
            "nvmlDeviceGetPciInfo_v3",
            "nvmlDeviceGetUUID",
            "nvmlDeviceGetMigMode",
            "nvmlDeviceGetMemoryInfo_v2",
            "nvmlDeviceGetNumaNodeId",
            "nvmlDeviceGetCudaComputeCapability",
            "nvmlShutdown",
            "nvmlDeviceGetComputeRunningProcesses_v3",
            "nvmlDeviceGetGraphicsRunningProcesses_v3",
            "nvmlDeviceGetMPSComputeRunningProcesses_v3",
        }
        assert sessions[2].count("\n") <= 8 * 12 + 3


def test_mig_instances_are_entries_of_their_own(machine: Machine) -> None:
    machine.file("proc/4242/stat", "4242 (python) S 1 4242 4242 " + "0 " * 15 + "100 0\n")
    both = machine.ask(example("h100-mig"))[0]
    parent, first, second, third, whole = both["read"]["gpus"]
    assert [gpu["index"] for gpu in both["read"]["gpus"]] == [0, 0, 0, 0, 1]
    assert parent["partition"] == {"kind": None, "parent_uuid": None, "profile": None, "mode_current": True, "mode_pending": True}
    assert whole["partition"]["mode_current"] is False
    assert [gpu["partition"]["profile"] for gpu in (first, second, third)] == ["3g.40gb", "2g.20gb", "1g.10gb"]
    assert all(gpu["partition"]["kind"] == "mig" and gpu["partition"]["parent_uuid"] == parent["uuid"] for gpu in (first, second, third))
    assert second["uuid"] == "MIG-22222222-2222-5222-8222-222222222222" and second["pci_bdf"] == "0000:1b:00.0"
    assert second["memory"] == {"model": "discrete", "total_mib": 20096, "used_mib": 15000, "reserved_mib": 0, "unattributed_mib": 0}
    assert [[row["pid"] for row in gpu["processes"]] for gpu in (parent, first, second, third)] == [[4242], [], [4242], []]
    assert set(both["read"]["gpu_gpu"]) == {parent["uuid"], whole["uuid"]}
    assert [row["uuid"] for row in both["processes"]["gpus"]] == [gpu["uuid"] for gpu in both["read"]["gpus"]]


# ---------------------------------------------------------------- health, fabric, topology


@pytest.mark.parametrize(("line", "state", "words"), HEALTH)
def test_health(alone: dict[str, Any], line: str, state: str, words: str) -> None:
    health = alone[line + "\n"]["read"]["gpus"][0]["health"]
    assert health["state"] == state and words in " ".join(health["reasons"])
    assert (state == "ok") == (health["reasons"] == [])


@pytest.mark.parametrize(("line", "domain"), DOMAINS)
def test_interconnect_domain(alone: dict[str, Any], line: str, domain: dict[str, Any] | None) -> None:
    seen = alone[f"gpu 0 {line}\n"]["read"]["gpus"][0]["interconnect_domain"]
    assert seen is None if domain is None else {key: seen[key] for key in domain} == domain


def test_fabric_structs_of_older_drivers(machine: Machine) -> None:
    line = "gpu 0 fabric=completed cluster=11111111-2222-4333-8444-555555555555 clique=2 health=1 health_summary=1\n"
    v3, v2, v1 = machine.ask(
        line, line + "error nvmlDeviceGetGpuFabricInfoV ARGUMENT_VERSION_MISMATCH times=1\n", line + "error nvmlDeviceGetGpuFabricInfoV FUNCTION_NOT_FOUND\n"
    )
    domains = [result["read"]["gpus"][0]["interconnect_domain"] for result in (v3, v2, v1)]
    assert [domain["health"] for domain in domains] == ["healthy", "unhealthy", "unknown"]
    assert {(domain["id"], domain["clique"], domain["state"]) for domain in domains} == {("11111111-2222-4333-8444-555555555555", 2, "completed")}
    assert not any("Fabric" in call for result in (v3, v2, v1) for call in result["read"]["gpus"][0]["errors"])


@pytest.mark.parametrize(
    ("summary", "mask", "health"),
    [
        (0, 0, "unknown"),
        (1, 1, "healthy"),
        (2, 2, "unhealthy"),
        (3, 0, "limited"),
        (9, 0, "unknown"),
        (0, 0b10101010, "healthy"),
        (0, 0b01, "unhealthy"),
        (0, 0b0100, "unhealthy"),
        (0, 0b010000, "unhealthy"),
        (0, 0b01000000, "unhealthy"),
        (0, 1 << 8, "healthy"),
        (0, 5 << 8, "unhealthy"),
    ],
)
def test_fabric_health(summary: int, mask: int, health: str) -> None:
    assert nvidia.fabric_health(summary, mask) == health


def test_topology(machine: Machine) -> None:
    pcie = "gpu 0-3 uuid=GPU-%d numa=0\ngpu 3 numa=1\ntopo 0 1 single\ntopo 0 2 hostbridge\ntopo 1 2 multiple\n"
    plain, linked, blind = machine.ask(pcie, pcie + "gpu 0-1 nvlinks=4\n", pcie + "error nvmlDeviceGetTopologyCommonAncestor UNKNOWN gpu=1\n")
    assert plain["read"]["gpu_gpu"]["GPU-0"] == {"GPU-1": "PIX", "GPU-2": "PHB", "GPU-3": "SYS"}
    assert plain["read"]["gpu_gpu"]["GPU-2"] == {"GPU-0": "PHB", "GPU-1": "PXB", "GPU-3": "SYS"}
    assert linked["read"]["gpu_gpu"]["GPU-1"] == {"GPU-0": "NV", "GPU-2": "PXB", "GPU-3": "SYS"}
    assert blind["read"]["gpu_gpu"]["GPU-1"] == {"GPU-0": "PIX", "GPU-2": None, "GPU-3": None}
    assert by_uuid(blind["read"])["GPU-1"]["errors"]["nvmlDeviceGetTopologyCommonAncestor"] == "Unknown Error"


# ---------------------------------------------------------------- the driver


class TestDriver:
    def test_versions(self, machine: Machine) -> None:
        machine.file("proc/driver/nvidia/version", KERNEL_MODULE)
        driver = machine.read(example("h100x8"))["drivers_nvidia"]
        assert (driver["driver"], driver["cuda"], driver["nvml"], driver["kernel_module"]) == ("580.95.05", "13.0", "13.580.95.05", "580.95.05")
        assert driver["library_path"].endswith("/libnvidia-ml.so.1")
        assert driver["binding"]["path"].endswith("/pynvml.py") and re.match(r"\d+\.", driver["binding"]["version"])
        assert (driver["state"], driver["message"], driver["hint"], driver["errors"]) == ("ok", None, None, {})

    @pytest.mark.parametrize(
        ("text", "version"),
        [
            (KERNEL_MODULE, "580.95.05"),
            ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Sat Feb 17 22:55:48 UTC 2024\n", "535.161.08"),
            ("NVRM version: NVIDIA UNIX aarch64 Kernel Module  570.00  Sat\n", "570.00"),
            ("garbage", None),
        ],
    )
    def test_kernel_module(self, machine: Machine, text: str, version: str | None) -> None:
        machine.file("proc/driver/nvidia/version", text)
        assert machine.read(None)["drivers_nvidia"]["kernel_module"] == version

    def test_mismatch_names_both_versions(self, machine: Machine) -> None:
        assert machine.library
        own = machine.folder / "lib"
        own.mkdir()
        shutil.copy(machine.library / "libnvidia-ml.so.1", own / "libnvidia-ml.so.590.48.01")
        (own / "libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.590.48.01")
        machine.library = own
        machine.pci("0000:1b:00.0")
        machine.file("proc/driver/nvidia/version", KERNEL_MODULE)
        driver = machine.read("gpu 0\nerror nvmlInit* LIB_RM_VERSION_MISMATCH\n")["drivers_nvidia"]
        assert driver["state"] == "version_mismatch" and "580.95.05" in driver["message"] and "590.48.01" in driver["message"]
        assert "reboot" in driver["hint"]

    @pytest.mark.parametrize("code", ["UNKNOWN", "TIMEOUT", "NOT_READY", "MEMORY", "4711"])
    def test_other_failures_of_init_are_told_in_words(self, machine: Machine, code: str) -> None:
        machine.pci("0000:1b:00.0")
        machine.file("proc/1/cgroup", "0::/init.scope\n")
        driver = machine.read(f"gpu 0\nerror nvmlInit* {code}\n")["drivers_nvidia"]
        assert driver["state"] == "unknown" and driver["message"].startswith("NVML does not initialise: ") and driver["hint"]

    @pytest.mark.parametrize(
        ("write", "inside"),
        [
            (lambda m: m.file("proc/1/cgroup", "0::/init.scope\n"), False),
            (lambda m: m.file("proc/1/cgroup", "11:memory:/kubepods/burstable/x\n"), True),
            (lambda m: m.file("proc/1/environ", "PATH=/bin\0container=podman\0"), True),
            (lambda m: m.file("proc/1/environ", "my_container=x\0"), False),
            (lambda m: None, False),
        ],
    )
    def test_in_container(self, machine: Machine, write: Callable[[Machine], None], inside: bool) -> None:
        write(machine)
        assert nvidia.in_container(str(machine.proc)) is inside

    @pytest.mark.parametrize(("driver", "word"), [("vfio-pci", "vfio-pci"), ("nouveau", "blacklist nouveau"), (None, "dmesg")])
    def test_gpus_that_another_driver_has(self, machine: Machine, driver: str | None, word: str) -> None:
        machine.pci("0000:10:00.0")
        machine.pci("0000:20:00.0", driver=driver)
        seen = machine.read("gpu 0 pci=0000:10:00.0\n")
        assert seen["drivers_nvidia"]["state"] == "gpus_missing" and word in seen["drivers_nvidia"]["hint"]
        reasons = " ".join(seen["gpus"][1]["health"]["reasons"])
        assert (f"bound to {driver}" if driver else "no kernel driver") in reasons

    def test_all_gpus_denied(self, machine: Machine) -> None:
        seen = machine.read("gpu 0-1 denied=1\n")
        assert seen["drivers_nvidia"]["state"] == "not_permitted"
        assert [gpu["health"]["state"] for gpu in seen["gpus"]] == ["not_permitted"] * 2

    def test_without_pynvml(self, machine: Machine) -> None:
        machine.python = [sys.executable, "-S"]  # no site-packages
        assert machine.read("gpu 0\n")["drivers_nvidia"]["state"] == "no_gpu"
        machine.pci("0000:1b:00.0")
        seen = machine.read("gpu 0\n")
        assert seen["drivers_nvidia"]["state"] == "binding_missing" and seen["drivers_nvidia"]["binding"] is None
        assert seen["drivers_nvidia"]["hint"].endswith("-m pip install nvidia-ml-py")
        assert seen["gpus"][0]["pci_bdf"] == "0000:1b:00.0" and "pynvml is missing" in seen["gpus"][0]["health"]["reasons"][0]

    @pytest.mark.parametrize(
        ("name", "source"),
        [
            ("pynvml/__init__.py", "def nvmlInit(): pass\n"),
            ("pynvml.py", "raise RuntimeError('broken\\ninstall')\n"),
            ("pynvml.py", "x = 1\n"),
            ("pynvml/other.py", ""),
        ],
        ids=["old-package", "broken", "something-else", "bare-folder"],
    )
    def test_a_wrong_pynvml(self, machine: Machine, name: str, source: str) -> None:
        machine.file(f"site/{name}", source)
        machine.environment["PYTHONPATH"] = str(machine.folder / "site")
        machine.python = [sys.executable, "-S"]
        machine.pci("0000:1b:00.0")
        driver = machine.read("gpu 0\n")["drivers_nvidia"]
        assert driver["state"] == "binding_wrong" and "pip uninstall -y pynvml" in driver["hint"]
        assert "\n" not in driver["message"]


def test_the_source_needs_nothing_newer_than_python_3_9() -> None:
    """The hosts' Python: annotations stay text, and nothing of 3.10 runs."""
    python = os.environ.get("PYTHON39") or shutil.which("python3.9")
    if python is None or subprocess.run([python, "-c", ""], check=False, capture_output=True).returncode:
        pytest.skip("no Python 3.9 here; set PYTHON39")
    code = textwrap.dedent("""
        import sys
        sys.path.insert(0, sys.argv[1])
        from ansible_collections.rankzero.inference.plugins.module_utils import imex, nvidia, processes
        print(nvidia.read("/nonexistent", "/nonexistent")["drivers_nvidia"]["state"])
    """)
    done = subprocess.run([python, "-c", code, str(COLLECTIONS)], check=False, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("no_gpu", "")
