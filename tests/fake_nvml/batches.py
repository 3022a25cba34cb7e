# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The checks of test_fake_nvml.py: `python batches.py NAME DIR` runs one batch and prints how many checks it made."""

from __future__ import annotations

import contextlib
import ctypes
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

HERE = pathlib.Path(__file__).resolve().parent
MIB = 1 << 20
NONE = 0xFFFFFFFF


class Batch(NamedTuple):
    run: Callable[[Any, Any], None]
    least: int


BATCHES: dict[str, Batch] = {}


def batch(least: int) -> Callable[[Callable[[Any, Any], None]], Callable[[Any, Any], None]]:
    def register(function: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        BATCHES[function.__name__] = Batch(function, least)
        return function

    return register


class World:
    """The state file of one process, and the count of checks made against it."""

    def __init__(self, directory: pathlib.Path, nvml: Any) -> None:
        self.directory, self.nvml, self.checks = directory, nvml, 0
        self.state = directory / "state"
        self.processes = directory / "procs"
        self.processes.mkdir()

    def put(self, *lines: str) -> None:
        """Replace the state file by rename, as README.md asks for."""
        new = self.directory / "new"
        new.write_text("\n".join(lines) + "\n", encoding="ascii")
        new.replace(self.state)

    def example(self, name: str) -> str:
        return (HERE / "examples" / f"{name}.state").read_text(encoding="ascii").replace("/run/fake_nvml/procs", str(self.processes))

    @contextlib.contextmanager
    def session(self, *lines: str) -> Iterator[None]:
        self.put(*lines)
        self.nvml.nvmlInit()
        yield
        self.nvml.nvmlShutdown()

    def equal(self, got: Any, want: Any) -> None:
        self.checks += 1
        assert got == want, f"got {got!r}, want {want!r}"

    def fails(self, name: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        self.checks += 1
        try:
            value = function(*arguments, **options)
        except self.nvml.NVMLError as error:
            assert type(error).__name__ == f"NVMLError_{name}", f"got {type(error).__name__}, want {name}"
        else:
            raise AssertionError(f"got {value!r}, want {name}")


@batch(8)
def initialise(w: World, n: Any) -> None:
    w.fails("DriverNotLoaded", n.nvmlInit)  # no state file
    w.put("error nvmlInit LIB_RM_VERSION_MISMATCH", w.example("h100x8"))
    w.fails("LibRmVersionMismatch", n.nvmlInit)
    w.equal(n.nvmlErrorString(18), "RM has detected an NVML/RM version mismatch.")
    w.put("error nvmlInitWithFlags NO_PERMISSION times=1", w.example("h100x8"))
    w.fails("NoPermission", n.nvmlInit)
    n.nvmlInit()
    n.nvmlShutdown()
    w.fails("Uninitialized", n.nvmlDeviceGetCount)
    w.fails("Uninitialized", n.nvmlShutdown)
    w.put("driver 580.95.05")
    w.fails("NotFound", n.nvmlInit)  # a driver without a GPU
    n.nvmlInitWithFlags(1)
    w.equal(n.nvmlDeviceGetCount(), 0)
    n.nvmlShutdown()
    w.put("empty ok")
    n.nvmlInit()
    w.equal(n.nvmlDeviceGetCount(), 0)


@batch(42)
def eight_h100(w: World, n: Any) -> None:
    with w.session(w.example("h100x8")):
        w.equal(n.nvmlSystemGetDriverVersion(), "580.95.05")
        w.equal(n.nvmlSystemGetNVMLVersion(), "13.580.95.05")
        w.equal(n.nvmlSystemGetCudaDriverVersion_v2(), 13000)
        w.equal(n.nvmlSystemGetDriverBranch().branch, "r580_00")
        w.equal(n.nvmlDeviceGetCount(), 8)
        gpus = [n.nvmlDeviceGetHandleByIndex(i) for i in range(8)]
        w.fails("InvalidArgument", n.nvmlDeviceGetHandleByIndex, 8)
        w.equal(n.nvmlDeviceGetName(gpus[0]), "NVIDIA H100 80GB HBM3")
        w.equal(n.nvmlDeviceGetUUID(gpus[3]), "GPU-5f0c1a00-0000-4000-8000-000000000003")
        w.equal(n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByUUID(n.nvmlDeviceGetUUID(gpus[6]))), 6)
        w.fails("NotFound", n.nvmlDeviceGetHandleByUUID, "GPU-nope")
        for text in ("00000000:9D:00.0", "0000:9d:00.0", "9d:00.0"):
            w.equal(n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByPciBusId(text)), 4)
        w.fails("NotFound", n.nvmlDeviceGetHandleByPciBusId, "0000:77:00.0")
        w.fails("InvalidArgument", n.nvmlDeviceGetHandleByPciBusId, "junk")
        pci = n.nvmlDeviceGetPciInfo(gpus[1])
        w.equal(
            (pci.busId, pci.busIdLegacy, pci.domain, pci.bus, pci.device, hex(pci.pciDeviceId)), ("00000000:43:00.0", "0000:43:00.0", 0, 0x43, 0, "0x233010de")
        )
        w.equal(n.nvmlDeviceGetCudaComputeCapability(gpus[0]), (9, 0))
        w.equal(n.nvmlDeviceGetPersistenceMode(gpus[0]), 1)
        w.equal(n.nvmlDeviceGetMigMode(gpus[0]), [0, 0])
        w.equal(n.nvmlDeviceGetSerial(gpus[7]), "1650000000008")
        w.equal(n.nvmlDeviceGetMinorNumber(gpus[5]), 5)
        w.fails("NotSupported", n.nvmlDeviceGetNumaNodeId, gpus[0])
        cpus = n.nvmlDeviceGetCpuAffinity(gpus[4], 4)
        w.equal([c for c in range(256) if cpus[c // 64] >> (c % 64) & 1], [*range(56, 112), *range(168, 224)])
        w.equal(list(n.nvmlDeviceGetMemoryAffinity(gpus[4], 1, 0)), [2])
        w.equal(n.nvmlDeviceGetTopologyCommonAncestor(gpus[0], gpus[1]), n.NVML_TOPOLOGY_NODE)
        w.equal(n.nvmlDeviceGetTopologyCommonAncestor(gpus[0], gpus[7]), n.NVML_TOPOLOGY_SYSTEM)
        w.equal(len(n.nvmlDeviceGetTopologyNearestGpus(gpus[0], n.NVML_TOPOLOGY_NODE)), 3)
        w.equal(len(n.nvmlSystemGetTopologyGpuSet(60)), 4)
        w.equal(n.nvmlDeviceGetP2PStatus(gpus[0], gpus[7], n.NVML_P2P_CAPS_INDEX_NVLINK), n.NVML_P2P_STATUS_OK)
        w.equal(sum(n.nvmlDeviceGetNvLinkState(gpus[0], k) for k in range(18)), 18)
        w.fails("InvalidArgument", n.nvmlDeviceGetNvLinkState, gpus[0], 18)
        w.equal(n.nvmlDeviceGetNvLinkRemoteDeviceType(gpus[0], 0), n.NVML_NVLINK_DEVICE_TYPE_SWITCH)
        w.fails("NotSupported", n.nvmlDeviceGetPowerUsage, gpus[0])  # a stub
        for kind, version in ((n.c_nvmlGpuFabricInfo_v2_t, n.nvmlGpuFabricInfo_v2), (n.c_nvmlGpuFabricInfo_v3_t, n.nvmlGpuFabricInfo_v3)):
            fabric = kind()
            fabric.version = version
            w.equal((n.nvmlDeviceGetGpuFabricInfoV(gpus[0], ctypes.byref(fabric)), fabric.state, fabric.status), (0, 3, 0))
        fabric.version = 77
        w.fails("ArgumentVersionMismatch", n.nvmlDeviceGetGpuFabricInfoV, gpus[0], ctypes.byref(fabric))
        fabric = n.c_nvmlGpuFabricInfo_t()
        w.equal((n.nvmlDeviceGetGpuFabricInfo(gpus[0], ctypes.byref(fabric)), fabric.state), (0, 3))
        v1, v2 = n.nvmlDeviceGetMemoryInfo(gpus[0]), n.nvmlDeviceGetMemoryInfo(gpus[0], version=n.nvmlMemory_v2)
        w.equal((v1.total // MIB, v1.used // MIB, v1.free // MIB), (81559, 551, 81008))
        w.equal((v2.total // MIB, v2.reserved // MIB, v2.used // MIB, v2.free // MIB), (81559, 551, 0, 81008))
        w.fails("ArgumentVersionMismatch", n.nvmlDeviceGetMemoryInfo, gpus[0], 5)
        short = ctypes.create_string_buffer(4)
        w.equal(n.nvmlLib.nvmlDeviceGetName(gpus[0], short, 4), 7)
        w.equal(w.directory.joinpath("trace").read_text(encoding="ascii").count("nvmlDeviceGetCount_v2 "), 1)


@batch(35)
def process_lists(w: World, n: Any) -> None:
    host = w.example("h100x8")
    with w.session(host):
        gpus = [n.nvmlDeviceGetHandleByIndex(i) for i in range(8)]
        w.equal(n.nvmlDeviceGetComputeRunningProcesses(gpus[2]), [])
        w.put(
            host,
            "proc gpu=2 pid=4711 mib=72000",
            "proc gpu=2 pid=4712 mib=1GiB",
            "proc gpu=2 pid=99 mib=10 type=G",
            "proc gpu=3 pid=5 mib=NA",
            "proc gpu=3 pid=6 mib=7 type=M",
        )
        w.equal(
            [(p.pid, p.usedGpuMemory // MIB, p.gpuInstanceId) for p in n.nvmlDeviceGetComputeRunningProcesses(gpus[2])],
            [(4711, 72000, NONE), (4712, 1024, NONE)],
        )
        w.equal(len(n.nvmlDeviceGetComputeRunningProcesses_v2(gpus[2])), 2)
        w.equal([p.pid for p in n.nvmlDeviceGetGraphicsRunningProcesses(gpus[2])], [99])
        w.equal([p.pid for p in n.nvmlDeviceGetMPSComputeRunningProcesses(gpus[3])], [6])
        w.equal([(p.pid, p.usedGpuMemory) for p in n.nvmlDeviceGetComputeRunningProcesses(gpus[3])], [(5, None)])
        detail = n.nvmlDeviceGetRunningProcessDetailList(gpus[2], n.nvmlProcessDetailList_v1, 0)
        w.equal([(p.pid, p.usedGpuMemory // MIB) for p in detail], [(4711, 72000), (4712, 1024)])
        w.equal(n.nvmlDeviceGetMemoryInfo(gpus[2], version=n.nvmlMemory_v2).used // MIB, 72000 + 1024 + 10)
        for name, size in (("_v3", 24), ("_v2", 24), ("", 16)):
            sizes_of_the_arrays(w, getattr(n.nvmlLib, "nvmlDeviceGetComputeRunningProcesses" + name), gpus, size)


def sizes_of_the_arrays(w: World, call: Any, gpus: list[Any], size: int) -> None:
    """The contract of nvml.h: the needed count comes back, and an array that is too small stays as it was."""
    count = ctypes.c_uint(0)
    w.equal((call(gpus[2], ctypes.byref(count), None), count.value), (7, 2))
    count = ctypes.c_uint(1)
    array = (ctypes.c_ubyte * (size * 4))(*([0xAA] * size * 4))
    w.equal((call(gpus[2], ctypes.byref(count), array), count.value, set(array)), (7, 2, {0xAA}))
    count = ctypes.c_uint(2)
    w.equal((call(gpus[2], ctypes.byref(count), array), count.value, set(array[2 * size :])), (0, 2, {0xAA}))
    w.equal(int.from_bytes(bytes(array[size : size + 4]), sys.byteorder), 4712)
    count = ctypes.c_uint(9)
    w.equal((call(gpus[2], ctypes.byref(count), (ctypes.c_ubyte * (size * 9))()), count.value), (0, 2))
    count = ctypes.c_uint(3)
    w.equal(call(gpus[2], ctypes.byref(count), None), 2)
    w.equal(call(gpus[2], None, array), 2)
    count = ctypes.c_uint(0)
    w.equal((call(gpus[0], ctypes.byref(count), None), count.value), (0, 0))
    w.equal(call(ctypes.c_void_p(1234), ctypes.byref(count), None), 2)


@batch(8)
def injected_errors(w: World, n: Any) -> None:
    host = w.example("h100x8")
    with w.session(host):
        gpus = [n.nvmlDeviceGetHandleByIndex(i) for i in range(8)]
        w.put(host, "error nvmlDeviceGetMemoryInfo* GPU_IS_LOST gpu=5", "error nvmlDeviceGetComputeRunningProcesses_v3 NO_PERMISSION after=1 times=1")
        w.fails("GpuIsLost", n.nvmlDeviceGetMemoryInfo, gpus[5])
        w.equal(n.nvmlDeviceGetMemoryInfo(gpus[4]).total // MIB, 81559)
        w.equal(n.nvmlDeviceGetComputeRunningProcesses(gpus[0]), [])
        w.fails("NoPermission", n.nvmlDeviceGetComputeRunningProcesses, gpus[0])
        w.equal(n.nvmlDeviceGetComputeRunningProcesses(gpus[0]), [])
        w.put(host, "gpu 6 lost=1", "error nvmlDeviceGetComputeRunningProcesses_v3 FUNCTION_NOT_FOUND gpu=1")
        w.fails("GpuIsLost", n.nvmlDeviceGetName, gpus[6])
        w.fails("GpuIsLost", n.nvmlDeviceGetHandleByIndex, 6)
        w.equal(n.nvmlDeviceGetCount(), 8)
        w.put(host, "delay nvmlDeviceGetName 60 times=1")
        before = time.monotonic()
        n.nvmlDeviceGetName(gpus[0])
        w.equal(time.monotonic() - before >= 0.06, True)


@batch(9)
def registered_processes(w: World, n: Any) -> None:
    with w.session(w.example("h100-mig"), f"procdir {w.processes}"):
        gpus = [n.nvmlDeviceGetHandleByIndex(i) for i in range(2)]
        uuid, slice_uuid = n.nvmlDeviceGetUUID(gpus[1]), "MIG-33333333-3333-5333-8333-333333333333"
        child = subprocess.Popen(["sleep", "60"])
        while n.nvmlSystemGetProcessName(child.pid) != "sleep":
            time.sleep(0.005)
        (w.processes / str(child.pid)).write_text(f"{uuid} 40000\n{slice_uuid} 900\n0 50 G\n", encoding="ascii")
        (w.processes / f"{child.pid}.new").write_text("1 7\n", encoding="ascii")  # not yet renamed: not counted
        w.equal([(p.pid, p.usedGpuMemory // MIB) for p in n.nvmlDeviceGetComputeRunningProcesses(gpus[1])], [(child.pid, 40000)])
        w.equal([p.pid for p in n.nvmlDeviceGetGraphicsRunningProcesses(gpus[0])], [child.pid])
        mig = n.nvmlDeviceGetHandleByUUID(slice_uuid)
        w.equal([(p.pid, p.usedGpuMemory // MIB, p.gpuInstanceId) for p in n.nvmlDeviceGetComputeRunningProcesses(mig)], [(child.pid, 900, 9)])
        w.equal(n.nvmlDeviceGetMemoryInfo(gpus[1], version=n.nvmlMemory_v2).used // MIB, 40000)
        (w.processes / str(child.pid)).write_text("1 41000\n", encoding="ascii")
        w.equal([p.usedGpuMemory // MIB for p in n.nvmlDeviceGetComputeRunningProcesses(gpus[1])], [41000])
        w.equal(n.nvmlDeviceGetComputeRunningProcesses(mig), [])
        child.kill()
        while pathlib.Path(f"/proc/{child.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.005)
        w.equal(n.nvmlDeviceGetComputeRunningProcesses(gpus[1]), [])  # dead, though nobody has reaped it
        w.equal(n.nvmlDeviceGetMemoryInfo(gpus[1], version=n.nvmlMemory_v2).used, 0)
        child.wait()
        w.equal(n.nvmlDeviceGetComputeRunningProcesses(gpus[1]), [])


@batch(4)
def growing_list(w: World, n: Any) -> None:
    late = [f"proc gpu=0 pid={pid} mib=1 after=1" for pid in range(100, 120)]
    with w.session("gpu 0 total=1000", "proc gpu=0 pid=1 mib=1", *late):
        gpu = n.nvmlDeviceGetHandleByIndex(0)
        w.equal(n.nvmlDeviceGetMemoryInfo(gpu, version=n.nvmlMemory_v2).used // MIB, 1)
        w.fails("InsufficientSize", n.nvmlDeviceGetComputeRunningProcesses, gpu)  # room for 2 * 1 + 5, then 21 are there
        w.equal(len(n.nvmlDeviceGetComputeRunningProcesses(gpu)), 21)
        w.equal(n.nvmlDeviceGetMemoryInfo(gpu, version=n.nvmlMemory_v2).used // MIB, 21)


@batch(14)
def mig(w: World, n: Any) -> None:
    with w.session(w.example("h100-mig")):
        first, second = n.nvmlDeviceGetHandleByIndex(0), n.nvmlDeviceGetHandleByIndex(1)
        w.equal((n.nvmlDeviceGetMigMode(first), n.nvmlDeviceGetMigMode(second)), ([1, 1], [0, 0]))
        w.equal(n.nvmlDeviceGetMaxMigDeviceCount(first), 7)
        slices = [n.nvmlDeviceGetMigDeviceHandleByIndex(first, i) for i in range(3)]
        w.fails("NotFound", n.nvmlDeviceGetMigDeviceHandleByIndex, first, 3)
        w.equal(n.nvmlDeviceGetName(slices[1]), "NVIDIA H100 80GB HBM3 MIG 2g.20gb")
        w.equal((n.nvmlDeviceGetGpuInstanceId(slices[1]), n.nvmlDeviceGetComputeInstanceId(slices[1])), (5, 0))
        w.equal((n.nvmlDeviceIsMigDeviceHandle(slices[0]).value, n.nvmlDeviceIsMigDeviceHandle(first).value), (1, 0))
        w.equal(n.nvmlDeviceGetIndex(n.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(slices[2])), 0)
        w.equal(n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByUUID("MIG-33333333-3333-5333-8333-333333333333")), 2)
        w.equal([n.nvmlDeviceGetMemoryInfo(s).used // MIB for s in slices], [0, 15000, 0])
        w.equal(n.nvmlDeviceGetMemoryInfo(first, version=n.nvmlMemory_v2).used // MIB, 15000)
        w.equal([[(p.pid, p.gpuInstanceId) for p in n.nvmlDeviceGetComputeRunningProcesses(s)] for s in slices], [[], [(4242, 5)], []])
        w.equal(n.nvmlDeviceGetAttributes(slices[0]).memorySizeMB, 40448)
        w.fails("InvalidArgument", n.nvmlDeviceGetMigMode, slices[0])
        w.fails("NotSupported", n.nvmlDeviceGetRemappedRows, slices[0])


@batch(12)
def other_machines(w: World, n: Any) -> None:
    with w.session(w.example("gb10")):
        gpu = n.nvmlDeviceGetHandleByIndex(0)
        w.fails("NotSupported", n.nvmlDeviceGetMemoryInfo, gpu)
        w.fails("NotSupported", n.nvmlDeviceGetMemoryInfo, gpu, version=n.nvmlMemory_v2)
        w.equal([(p.pid, p.usedGpuMemory // MIB) for p in n.nvmlDeviceGetComputeRunningProcesses(gpu)], [(4242, 61000)])
        w.fails("NotSupported", n.nvmlDeviceGetMigMode, gpu)
        w.fails("NotSupported", n.nvmlDeviceGetGpuFabricInfo, gpu, ctypes.byref(n.c_nvmlGpuFabricInfo_t()))
        w.equal(n.nvmlDeviceGetPciInfo(gpu).busId, "0000000F:01:00.0")
    with w.session(w.example("gh200")):
        w.equal(n.nvmlDeviceGetNumaNodeId(n.nvmlDeviceGetHandleByIndex(0)), 1)
    with w.session(w.example("pcie-2xl40s")):
        one, two = (n.nvmlDeviceGetHandleByIndex(i) for i in range(2))
        w.equal(n.nvmlDeviceGetTopologyCommonAncestor(one, two), n.NVML_TOPOLOGY_SINGLE)
        w.fails("NotSupported", n.nvmlDeviceGetNvLinkState, one, 0)
        w.equal(n.nvmlDeviceGetP2PStatus(one, two, 0), n.NVML_P2P_STATUS_OK)
        w.equal(n.nvmlDeviceGetP2PStatus(one, two, 2), n.NVML_P2P_STATUS_NOT_SUPPORTED)
    with w.session("gpu 0-1 pci=00000000:10:00.0", "gpu 0 denied=1"):
        w.fails("NoPermission", n.nvmlDeviceGetHandleByIndex, 0)
        w.equal(n.nvmlDeviceGetCount(), 2)


@batch(20)
def health(w: World, n: Any) -> None:
    gpu_lines = (
        "gpu 0 ecc=1 rows_corrected=2",
        "gpu 1 ecc=unsupported rows=unsupported retired_sbe=3 retired_dbe=1 recovery=unsupported",
        "gpu 2 chassis=182 slot=14 tray=4 ecc=0 ecc_pending=1",
    )
    with w.session(*gpu_lines):
        new, old, rack = (n.nvmlDeviceGetHandleByIndex(i) for i in range(3))
        w.equal(n.nvmlDeviceGetEccMode(new), [1, 1])
        w.equal(n.nvmlDeviceGetEccMode(rack), [0, 1])
        w.fails("NotSupported", n.nvmlDeviceGetEccMode, old)
        w.equal(n.nvmlDeviceGetTotalEccErrors(new, n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, n.NVML_VOLATILE_ECC), 0)
        w.equal(n.nvmlDeviceGetRemappedRows(new), (2, 0, 0, 0))
        w.fails("NotSupported", n.nvmlDeviceGetRemappedRows, old)
        w.fails("NotSupported", n.nvmlDeviceGetRetiredPages, new, 0)
        w.equal((len(n.nvmlDeviceGetRetiredPages(old, 0)), len(n.nvmlDeviceGetRetiredPages(old, 1))), (3, 1))
        w.equal(n.nvmlDeviceGetRetiredPagesPendingStatus(old), 0)
        fields = [230, 142, 145, 91, 9999]
        values = n.nvmlDeviceGetFieldValues(new, fields)
        w.equal([(v.fieldId, v.nvmlReturn, v.value.uiVal) for v in values], [(230, 0, 0), (142, 0, 2), (145, 0, 0), (91, 3, 0), (9999, 3, 0)])
        w.equal([v.nvmlReturn for v in n.nvmlDeviceGetFieldValues(old, [230, 144])], [3, 3])
        w.fails("InvalidArgument", n.nvmlDeviceGetFieldValues, new, [])
        w.put(*gpu_lines, "gpu 0 rows_pending=1 rows_failure=1 ecc_uncorrected=4 ecc_corrected=9 recovery=drain_and_reset", "gpu 1 retired_pending=1")
        w.equal(n.nvmlDeviceGetRemappedRows(new), (2, 0, 1, 1))
        w.equal([n.nvmlDeviceGetTotalEccErrors(new, kind, n.NVML_VOLATILE_ECC) for kind in (0, 1)], [9, 4])
        w.fails("NotSupported", n.nvmlDeviceGetTotalEccErrors, rack, 1, 0)
        w.equal(n.nvmlDeviceGetFieldValues(new, [230])[0].value.uiVal, n.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET)
        w.equal(n.nvmlDeviceGetRetiredPagesPendingStatus(old), 1)
        platform = n.c_nvmlPlatformInfo_v2_t()
        n.nvmlDeviceGetPlatformInfo(rack, ctypes.byref(platform))
        w.equal((platform.chassisSerialNumber, ord(platform.slotNumber), ord(platform.trayIndex)), ("182", 14, 4))
        w.fails("NotSupported", n.nvmlDeviceGetPlatformInfo, new, ctypes.byref(platform))
        w.put(*gpu_lines, "error nvmlDeviceGetRemappedRows UNKNOWN")
        w.fails("Unknown", n.nvmlDeviceGetRemappedRows, new)


def main() -> None:
    import pynvml

    world = World(pathlib.Path(sys.argv[2]), pynvml)
    BATCHES[sys.argv[1]].run(world, pynvml)
    print(world.checks)


if __name__ == "__main__":
    main()
