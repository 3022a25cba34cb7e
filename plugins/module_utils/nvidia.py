# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What NVML, the PCI bus and /proc say about the NVIDIA GPUs of this host.

`read` gives everything that node facts hold about them, `read_processes` only what the readiness gate polls. Neither raises: a call
that fails leaves null and, in `errors`, its reason under the name of the call; a driver that does not answer at all is a stated
condition (`drivers.nvidia.state`) with the command that fixes it. GPUs that only the PCI bus shows are listed too.

Rules taken from the field, each with its report: every index is tried and none renumbered (koordinator-sh/koordinator#2706); GPUs on
the bus that NVML does not list are named (NVIDIA/NVSentinel#684); "not supported" for memory means unified memory
(XuehaiPan/nvitop#208), as does an integrated GPU that answers for its carve-out (unslothai/unsloth#10283); a completed fabric with a
zero cluster UUID is no domain (meta-pytorch/torchcomms#1385); memory that NVML does not know for a process is unknown, not 0.
Sizes are MiB.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from ansible_collections.rankzero.inference.plugins.module_utils import processes as process_facts
from ansible_collections.rankzero.inference.plugins.module_utils import small_files, sysfs

MIB = 1 << 20
_MOST_BYTES = 4 * 1024 * 1024  # /proc/self/maps
_ALL_INDICES = 64  # how far to look when NVML does not say how many GPUs there are
_LIST_RETRIES = 4  # a process list can outgrow its buffer between two calls (nvml.h)
_MEMORY_V2 = 0x02000028
_P2P_NVLINK = 2
_FIELD_NVLINK_COUNT = 91
_FIELD_RECOVERY_ACTION = 230

INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, INSUFFICIENT_SIZE = 2, 3, 4, 6, 7
DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, FUNCTION_NOT_FOUND, LOST, RESET_REQUIRED = 9, 12, 13, 15, 16
OPERATING_SYSTEM, VERSION_MISMATCH, GPU_NOT_FOUND, UNKNOWN = 17, 18, 28, 999
_FORBIDDEN = (NO_PERMISSION, OPERATING_SYSTEM)
_ABSENT = (NOT_SUPPORTED, FUNCTION_NOT_FOUND, INVALID_ARGUMENT, NO_PERMISSION)  # answers that say nothing about health

_ARCHITECTURES = {2: "kepler", 3: "maxwell", 4: "pascal", 5: "volta", 6: "turing", 7: "ampere", 8: "ada", 9: "hopper", 10: "blackwell", 13: "rubin"}
_INTEGRATED = ("5.3", "6.2", "7.2", "8.7", "10.1", "11.0", "12.1")  # Tegra and Jetson, Thor (two numbers), GB10 and N1X
_COMPUTE_MODES = {0: "default", 1: "exclusive_process", 2: "prohibited", 3: "exclusive_process"}
_ADDRESSING = {0: "none", 1: "hmm", 2: "ats"}
_DISTANCES = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_FABRIC_STATES = {0: "not_supported", 1: "not_started", 2: "in_progress", 3: "completed"}
_FABRIC_HEALTH = {1: "healthy", 2: "unhealthy", 3: "limited"}
_RECOVERY = {0: "none", 1: "gpu_reset", 2: "node_reboot", 3: "drain_p2p", 4: "drain_and_reset", 5: "recover_imex_domain", 6: "bus_reset", 7: "system_reboot"}
_PROCESS_LISTS = (
    ("mps", "nvmlDeviceGetMPSComputeRunningProcesses"),
    ("compute", "nvmlDeviceGetComputeRunningProcesses"),
    ("graphics", "nvmlDeviceGetGraphicsRunningProcesses"),
)


class PciGpu(NamedTuple):
    """A display or 3D controller of NVIDIA's on the PCI bus, and the kernel driver that it is bound to."""

    address: str
    driver: str | None


class Condition(NamedTuple):
    """The state of the driver as node facts name it, in words, and the command that helps."""

    state: str
    message: str | None = None
    hint: str | None = None


class Answers:
    """NVML asked call by call: a call that fails answers None and leaves its reason in `errors` and its code in `codes`."""

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml
        self.errors: dict[str, str] = {}
        self.codes: dict[str, int | None] = {}

    def ask(self, call: str, *arguments: Any, expected: tuple[int, ...] = (), tries: int = 1) -> Any:
        """The answer of one pynvml function; codes in `expected` are an answer too (None) and leave no error."""
        return self.attempt(call, lambda: getattr(self.nvml, call)(*arguments), expected, tries)

    def attempt(self, label: str, function: Callable[[], Any], expected: tuple[int, ...] = (), tries: int = 1) -> Any:
        """As `ask`, for calls that need more than arguments. Once the GPU is lost nothing more is asked."""
        if LOST in self.codes.values():
            self.errors[label] = "not asked: the GPU is lost"
            return None
        for left in reversed(range(tries)):
            try:
                return function()
            except Exception as error:  # noqa: BLE001  pylint: disable=broad-except
                # Not only NVMLError: NVMLLibraryMismatchError is none, a missing call is an AttributeError, a name that is not text a
                # UnicodeDecodeError. Whatever it is, the other facts must still be read.
                code = error_code(error)
                if code == INSUFFICIENT_SIZE and left:
                    continue
                if code not in expected:
                    self.errors[label], self.codes[label] = error_text(error), code
                return None
        return None


class Gpu:
    """One GPU on the way to becoming a fact: how it was found, and its handle where NVML gave one."""

    def __init__(self, answers: Answers, index: int | None, handle: Any, address: str | None, pci: PciGpu | None = None) -> None:
        self.answers, self.index, self.handle, self.address, self.pci = answers, index, handle, address, pci


def read(proc_root: str = "/proc", sysfs_root: str = "/sys", table: process_facts.ProcessTable | None = None) -> dict[str, Any]:
    """`{gpus, drivers_nvidia, gpu_gpu}` in the shapes of docs/architecture.md.

    `gpus` are in NVML's order, each MIG instance after its parent (with the parent's index), GPUs that NVML does not list at the end.
    `processes` of a GPU is null where its list cannot be read. `gpu_gpu` is `{uuid: {uuid: distance|null}}` over whole GPUs.
    """
    pci = pci_gpus(sysfs_root)
    binding = load_binding()
    driver = _driver_facts(proc_root, sysfs_root, binding)
    with _session(binding, driver, proc_root, pci) as nvml:
        if nvml is None:
            gpus = [_unanswered(Gpu(Answers(None), None, None, gpu.address, gpu), driver["message"]) for gpu in pci]
            return {"gpus": _with_numa(gpus, sysfs_root), "drivers_nvidia": driver, "gpu_gpu": {}}
        system = Answers(nvml)
        _read_versions(system, driver)
        found = _find_gpus(system, pci)
        table = table or process_facts.ProcessTable(proc_root)
        gpus = []
        for gpu in found:
            gpus.extend(_gpu_facts(gpu, proc_root, table) if gpu.handle is not None else [_unanswered(gpu, None)])
        driver.update(_missing_gpus(found)._asdict())
        topology = _topology([(fact, gpu) for fact, gpu in _pairs(gpus, found) if fact["uuid"]])
        return {"gpus": _with_numa(gpus, sysfs_root), "drivers_nvidia": driver, "gpu_gpu": topology}


def read_processes(proc_root: str = "/proc") -> dict[str, Any]:
    """`{state, message, gpus: [{index, uuid, pci_bdf, memory, processes, errors}]}`: what the readiness gate polls.

    `state` and `message` are those of `drivers.nvidia`. `processes` is `[{pid, used_mib|null, kind}]`, or null when unknown. MIG
    instances are entries of their own, after their parent.
    """
    binding = load_binding()
    driver: dict[str, Any] = {"state": "unknown", "message": None, "library_path": None, "kernel_module": _kernel_module(proc_root, None)}
    rows = []
    with _session(binding, driver, proc_root, None) as nvml:
        if nvml is not None:
            found = _find_gpus(Answers(nvml), [])
            total = _host_memory(proc_root)
            for gpu in found:
                rows.append(_process_row(gpu.answers, gpu.index, gpu.handle, gpu.address, total))
                rows.extend(_process_row(mig, gpu.index, handle, gpu.address, total) for mig, handle in _mig_handles(gpu, _mig_mode(gpu)))
            driver.update(_missing_gpus(found)._asdict())
    return {"state": driver["state"], "message": driver["message"], "gpus": rows}


# ---------------------------------------------------------------- the bus and the driver


def parse_address(text: str) -> str | None:
    """A PCI address in sysfs form, `0008:06:00.0`, from NVML's `00000008:06:00.0` or lspci's `06:00.0`; None for other text."""
    found = re.fullmatch(r"(?:([0-9a-fA-F]{1,8}):)?([0-9a-fA-F]{1,2}):([0-9a-fA-F]{1,2})\.([0-7])", text.strip())
    if not found:
        return None
    domain, bus, device = (int(part or "0", 16) for part in found.group(1, 2, 3))
    return f"{domain:04x}:{bus:02x}:{device:02x}.{found.group(4)}"


def pci_gpus(sysfs_root: str) -> list[PciGpu]:
    """NVIDIA's display and 3D controllers, by address. Virtual functions (vGPU) are slices of a GPU that is listed itself."""
    folder = os.path.join(sysfs_root, "bus", "pci", "devices")
    gpus = []
    for name in _names(folder):
        address, path = parse_address(name), os.path.join(folder, name)
        is_gpu = _line(path, "vendor") == "0x10de" and _line(path, "class")[:6] in ("0x0302", "0x0300")
        if address and is_gpu and not os.path.lexists(os.path.join(path, "physfn")):
            gpus.append(PciGpu(address, sysfs.link_name(os.path.join(path, "driver"))))
    return sorted(gpus, key=lambda gpu: _order(gpu.address))


def load_binding() -> tuple[Any, Condition, dict[str, Any] | None]:
    """The pynvml module or None, what is wrong with it, and `{version, path}`.

    The old package named pynvml (a folder) shadows nvidia-ml-py (one file) and returns bytes (vllm-project/vllm#7649).
    """
    python = sys.executable or "python3"
    install = f"{python} -m pip install nvidia-ml-py"
    replace = f"{python} -m pip uninstall -y pynvml && {python} -m pip install --force-reinstall nvidia-ml-py"
    try:
        with warnings.catch_warnings():  # the current package named pynvml warns when it is imported
            warnings.simplefilter("ignore")
            spec = importlib.util.find_spec("pynvml")
            if spec is None:
                return None, Condition("binding_missing", f"the Python module pynvml is missing for {python}", install), None
            facts = {"version": _distribution_version(spec.origin), "path": spec.origin}
            if not spec.origin or os.path.basename(spec.origin) != "pynvml.py":
                return None, Condition("binding_wrong", f"pynvml is not the one of nvidia-ml-py: {spec.origin or 'a bare folder'}", replace), facts
            module = importlib.import_module("pynvml")
    except Exception as error:  # noqa: BLE001  pylint: disable=broad-except
        return None, Condition("binding_wrong", f"pynvml cannot be imported: {_clean(error)}", replace), None
    if not all(hasattr(module, name) for name in ("nvmlInit", "nvmlDeviceGetCount", "NVMLError")):
        return None, Condition("binding_wrong", f"pynvml is not the one of nvidia-ml-py: {spec.origin}", replace), facts
    return module, Condition("ok"), facts


def error_code(error: Exception) -> int | None:
    """The NVML code of an exception of pynvml; None for any other. A missing symbol has two classes, only one of them an NVMLError."""
    if type(error).__name__ == "NVMLLibraryMismatchError" or isinstance(error, AttributeError):
        return FUNCTION_NOT_FOUND
    value = getattr(error, "value", None)
    return value if isinstance(value, int) else None


def error_text(error: Exception) -> str:
    """One line of words for an exception."""
    if isinstance(error, AttributeError):
        return f"not known to this pynvml: {_clean(error)}"
    return _clean(error) or type(error).__name__


@contextlib.contextmanager
def _session(binding: tuple[Any, Condition, Any], driver: dict[str, Any], proc_root: str, pci: list[PciGpu] | None) -> Iterator[Any]:
    """pynvml between nvmlInit and nvmlShutdown, or None; then `driver` says why. `pci` None: GPUs are known to be there."""
    nvml, condition, _facts = binding
    expected = pci is None or bool(pci) or driver["kernel_module"] is not None
    if nvml is None:
        driver.update((condition if expected else _no_gpu())._asdict())
        yield None
        return
    answers = Answers(nvml)
    answers.ask("nvmlInit")
    driver["library_path"] = _library_path()
    if answers.errors:
        condition = _init_failure(answers.codes["nvmlInit"], answers.errors["nvmlInit"], expected, driver, proc_root)
        driver.update(condition._asdict())
        yield None
        return
    try:
        yield nvml
    finally:
        answers.ask("nvmlShutdown")


def _no_gpu() -> Condition:
    return Condition("no_gpu", "no NVIDIA GPU on the PCI bus and no NVIDIA driver loaded")


def _init_failure(code: int | None, text: str, expected: bool, driver: dict[str, Any], proc_root: str) -> Condition:
    """Why nvmlInit failed. A host without a GPU is no fault, whatever is installed on it."""
    if not expected and code in (LIBRARY_NOT_FOUND, DRIVER_NOT_LOADED, NOT_FOUND, GPU_NOT_FOUND):
        return _no_gpu()
    if code == LIBRARY_NOT_FOUND:
        return Condition(
            "library_missing",
            "there are NVIDIA GPUs but no libnvidia-ml.so.1 is found",
            "install the NVIDIA driver's libraries, then: ldconfig -p | grep libnvidia-ml.so.1",
        )
    if code == DRIVER_NOT_LOADED:
        return Condition("driver_not_loaded", "the nvidia kernel module is not loaded", "modprobe nvidia; if that fails: dkms status; dmesg | grep -i nvidia")
    if code == VERSION_MISMATCH:
        library = _library_version(driver["library_path"]) or "unknown"
        return Condition(
            "version_mismatch",
            f"kernel module {driver['kernel_module'] or 'unknown'} is loaded, the driver library is {library}",
            "reboot, or stop all that uses the GPUs and run: rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia; modprobe nvidia",
        )
    if code in _FORBIDDEN:
        return Condition("not_permitted", f"NVML: {text}", "run with become: true; in a container pass the devices: ls -l /dev/nvidiactl /dev/nvidia0")
    if code == UNKNOWN and in_container(proc_root):
        return Condition(
            "device_cgroup_lost",
            "NVML: Unknown Error in a container: its access to /dev/nvidia* was taken away (systemctl daemon-reload)",
            "restart the container, and give it the GPUs through CDI: nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml",
        )
    if code in (NOT_FOUND, GPU_NOT_FOUND):
        return Condition("gpus_missing", f"the driver is loaded but has no GPU (NVML: {text})", "dmesg | grep -i -E 'NVRM|Xid'")
    return Condition("unknown", f"NVML does not initialise: {text}", "nvidia-smi; dmesg | grep -i -E 'NVRM|Xid'")


def in_container(proc_root: str) -> bool:
    """Whether this looks like a container. A cgroup namespace hides the path, so the environment and the mounts of PID 1 count too."""
    if proc_root == "/proc" and any(os.path.exists(path) for path in ("/.dockerenv", "/run/.containerenv")):
        return True
    if b"\0container=" in b"\0" + _bytes(proc_root, "1", "environ"):
        return True
    cgroup = _bytes(proc_root, "1", "cgroup").decode("utf-8", "replace")
    return bool(re.search(r"docker|kubepods|containerd|libpod|crio|lxc|machine\.slice", cgroup))


def _driver_facts(proc_root: str, sysfs_root: str, binding: tuple[Any, Condition, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = dict(Condition("unknown")._asdict())
    facts.update(
        {
            "driver": None,
            "cuda": None,
            "nvml": None,
            "kernel_module": _kernel_module(proc_root, sysfs_root),
            "library_path": None,
            "binding": binding[2],
            "errors": {},
        }
    )
    return facts


def _read_versions(system: Answers, driver: dict[str, Any]) -> None:
    driver["driver"] = _word(system.ask("nvmlSystemGetDriverVersion"))
    driver["nvml"] = _word(system.ask("nvmlSystemGetNVMLVersion"))
    cuda = system.ask("nvmlSystemGetCudaDriverVersion_v2")
    driver["cuda"] = f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None
    driver["errors"] = system.errors


def _kernel_module(proc_root: str, sysfs_root: str | None) -> str | None:
    """The version of the loaded kernel module; the open and the closed one word the line differently."""
    text = _bytes(proc_root, "driver", "nvidia", "version").decode("utf-8", "replace")
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)*)", text)
    if found:
        return found.group(1)
    return (_line(sysfs_root, "module", "nvidia", "version") or None) if sysfs_root else None


def _library_path() -> str | None:
    """Where the dynamic linker found the library: a stub or another version shows here."""
    found = re.search(rb"\s(/\S*libnvidia-ml\.so\S*)", _bytes("/proc/self/maps"))
    return found.group(1).decode("utf-8", "replace") if found else None


def _library_version(path: str | None) -> str | None:
    found = re.search(r"libnvidia-ml\.so\.(\d+\.\d+(?:\.\d+)*)$", os.path.realpath(path)) if path else None
    return found.group(1) if found else None


def _distribution_version(origin: str | None) -> str | None:
    """The version of nvidia-ml-py, by the folder of its metadata beside it: importlib.metadata alone takes as long to import as reading all GPUs."""
    try:
        names = os.listdir(os.path.dirname(origin or ""))
    except OSError:
        return None
    found = [re.match(r"nvidia_ml_py-([^-]+)\.(?:dist|egg)-info$", name) for name in names if name.startswith("nvidia_ml_py-")]
    return next((match.group(1) for match in found if match), None)


# ---------------------------------------------------------------- which GPUs there are


def _find_gpus(system: Answers, pci: list[PciGpu]) -> list[Gpu]:
    """Every GPU that NVML or the bus shows, once: by index, then what only the bus shows."""
    gpus: dict[int | str, Gpu] = {gpu.index: gpu for gpu in _by_index(system) if gpu.index is not None}
    seen = {gpu.address for gpu in gpus.values()}
    silent: list[Gpu] = []
    for device in pci:
        if device.address in seen:
            continue
        gpu = _by_address(system.nvml, device)
        known = gpus.get(gpu.index) if gpu.index is not None else None
        if gpu.handle is None:
            silent.append(gpu)
        elif known is not None and known.handle is not None:
            known.address = device.address  # its index led to it, only its address could not be read
        else:
            gpus[device.address if gpu.index is None else gpu.index] = gpu
    return _merge(sorted(gpus.values(), key=lambda gpu: (gpu.index is None, gpu.index or 0)), silent)


def _by_index(system: Answers) -> list[Gpu]:
    count = system.ask("nvmlDeviceGetCount")
    gpus = []
    for index in range(_ALL_INDICES if count is None else count):
        answers = Answers(system.nvml)
        handle = answers.ask("nvmlDeviceGetHandleByIndex", index)
        if count is None and handle is None and answers.codes["nvmlDeviceGetHandleByIndex"] not in (LOST, RESET_REQUIRED, *_FORBIDDEN):
            break
        gpus.append(Gpu(answers, index, handle, _address(answers, handle) if handle is not None else None))
    return gpus


def _by_address(nvml: Any, device: PciGpu) -> Gpu:
    """A GPU that no index led to, asked for by its address: mostly to learn why."""
    answers = Answers(nvml)
    handle = answers.ask("nvmlDeviceGetHandleByPciBusId", device.address)
    if handle is None:
        return Gpu(answers, None, None, device.address, device)
    return Gpu(answers, answers.ask("nvmlDeviceGetIndex", handle), handle, device.address, device)


def _address(answers: Answers, handle: Any) -> str | None:
    return parse_address(_clean(answers.attempt("nvmlDeviceGetPciInfo", lambda: answers.nvml.nvmlDeviceGetPciInfo(handle).busId) or ""))


def _merge(gpus: list[Gpu], silent: list[Gpu]) -> list[Gpu]:
    """Let indices without an address and addresses without an index that are the same GPUs become one entry each.

    NVML's order is that of the addresses in practice (nvml.h does not promise it), so they are joined only where that order holds.
    Otherwise the list that names more GPUs is kept: no GPU is listed twice, and none is given an address by guess.
    """
    blank = [gpu for gpu in gpus if gpu.address is None]
    if not blank or not silent:
        return gpus + silent
    if len(blank) == len(silent):
        joined = dict(zip([gpu.index for gpu in blank], silent))
        order = [_order(str(gpu.address or joined[gpu.index].address)) for gpu in gpus]
        if order == sorted(order):
            for gpu in blank:
                other = joined[gpu.index]
                gpu.address, gpu.pci = other.address, other.pci
                if gpu.handle is None:
                    gpu.answers.errors.update(other.answers.errors)
                    gpu.answers.codes.update(other.answers.codes)
            return gpus
    mute = [gpu for gpu in blank if gpu.handle is None]
    if len(silent) < len(mute):
        return gpus
    reasons = sorted({f"index {gpu.index}: {gpu.answers.errors['nvmlDeviceGetHandleByIndex']}" for gpu in mute})
    for gpu in silent:
        gpu.answers.errors.update({"nvmlDeviceGetHandleByIndex": "; ".join(reasons)} if reasons else {})
    return [gpu for gpu in gpus if gpu not in mute] + silent


def _missing_gpus(found: list[Gpu]) -> Condition:
    """The state of a driver that answers: are all GPUs there, and may they be used?"""
    denied = [gpu for gpu in found if gpu.handle is None and any(code in gpu.answers.codes.values() for code in _FORBIDDEN)]
    missing = [gpu for gpu in found if (gpu.handle is None and gpu not in denied) or LOST in gpu.answers.codes.values()]
    if not found:
        return Condition("gpus_missing", "the driver is loaded but lists no GPU", _missing_hint([]))
    if missing:
        names = ", ".join(_called(gpu) for gpu in missing)
        return Condition("gpus_missing", f"NVML answers for {len(found) - len(missing)} of {len(found)} NVIDIA GPUs; missing: {names}", _missing_hint(missing))
    if len(denied) == len(found):
        return Condition(
            "not_permitted",
            f"none of the {len(found)} GPUs may be opened: NVML: {next(iter(denied[0].answers.errors.values()))}",
            "pass the devices to the container or slice (DeviceAllow=): ls -l /dev/nvidia*",
        )
    return Condition("ok")


def _called(gpu: Gpu) -> str:
    name = gpu.address or f"index {gpu.index}"
    bound = f", bound to {gpu.pci.driver}" if gpu.pci and gpu.pci.driver not in (None, "nvidia") else ""
    reason = next(iter(gpu.answers.errors.values()), "not listed")
    return f"{name} ({reason}{bound})"


def _missing_hint(missing: list[Gpu]) -> str:
    drivers = {gpu.pci.driver for gpu in missing if gpu.pci}
    if "nouveau" in drivers:
        return "echo 'blacklist nouveau' > /etc/modprobe.d/no-nouveau.conf, rebuild the initramfs and reboot"
    if any(driver and driver.startswith("vfio") for driver in drivers):
        return "these GPUs are given to virtual machines (vfio-pci); to take one back: driverctl unset-override ADDRESS"
    return "dmesg | grep -i -E 'NVRM|Xid'; a GPU that fell off the bus needs a power cycle"


# ---------------------------------------------------------------- one GPU


def _empty_facts(index: int | None, address: str | None) -> dict[str, Any]:
    return {
        "index": index,
        "uuid": None,
        "pci_bdf": address,
        "vendor": "nvidia",
        "model": None,
        "arch": None,
        "compute_capability": None,
        "numa_node": None,
        "memory": _memory_facts(None),
        "partition": {"kind": None, "parent_uuid": None, "profile": None, "mode_current": None, "mode_pending": None},
        "interconnect_domain": None,
        "processes": None,
        "compute_mode": None,
        "health": {"state": "unknown", "reasons": []},
        "vendor_data": {},
        "errors": {},
    }


def _memory_facts(model: str | None, total: int | None = None, used: int | None = None, reserved: int | None = None) -> dict[str, Any]:
    return {"model": model, "total_mib": total, "used_mib": used, "reserved_mib": reserved, "unattributed_mib": None}


def _unanswered(gpu: Gpu, message: str | None) -> dict[str, Any]:
    """A GPU without a handle: all there is to say is that it exists, and why nothing more is known."""
    fact, codes = _empty_facts(gpu.index, gpu.address), gpu.answers.codes.values()
    fact["errors"] = dict(gpu.answers.errors)
    reasons = sorted({f"NVML: {text}" for text in gpu.answers.errors.values()}) or [message or "NVML does not list it"]
    if gpu.pci and gpu.pci.driver != "nvidia":
        reasons.append(f"bound to {gpu.pci.driver}" if gpu.pci.driver else "no kernel driver is bound to it")
    if LOST in codes:
        state = "lost"
    elif any(code in codes for code in _FORBIDDEN):
        state = "not_permitted"
    else:
        state = "unhealthy" if RESET_REQUIRED in codes else "unknown"
    if not fact["errors"]:
        fact["errors"] = {"nvml": reasons[0]}
    fact["health"] = {"state": state, "reasons": reasons}
    return fact


def _gpu_facts(gpu: Gpu, proc_root: str, table: process_facts.ProcessTable) -> list[dict[str, Any]]:
    """The facts of a GPU, and after them those of its MIG instances."""
    fact, ask, handle = _empty_facts(gpu.index, gpu.address), gpu.answers.ask, gpu.handle
    fact["uuid"] = _word(ask("nvmlDeviceGetUUID", handle))
    fact["model"] = _word(ask("nvmlDeviceGetName", handle))
    architecture = ask("nvmlDeviceGetArchitecture", handle)
    fact["arch"] = _ARCHITECTURES.get(architecture)
    if architecture is not None and fact["arch"] is None:
        gpu.answers.errors["nvmlDeviceGetArchitecture"] = f"architecture {architecture} has no name here"
    fact["compute_mode"] = _COMPUTE_MODES.get(ask("nvmlDeviceGetComputeMode", handle))
    mode = _mig_mode(gpu)
    fact["partition"].update(mode_current=mode[0], mode_pending=mode[1])
    fact["vendor_data"] = _vendor_data(gpu)
    fact["interconnect_domain"] = _interconnect_domain(gpu.answers, handle)
    _read_memory_and_processes(fact, gpu.answers, handle, _host_memory(proc_root), table)
    fact["health"] = _health(fact, gpu.answers)
    fact["errors"] = gpu.answers.errors
    return [fact] + [_mig_facts(fact, answers, mig, proc_root, table) for answers, mig in _mig_handles(gpu, mode)]


def _read_memory_and_processes(fact: dict[str, Any], answers: Answers, handle: Any, host_mib: int | None, table: process_facts.ProcessTable) -> None:
    capability = answers.ask("nvmlDeviceGetCudaComputeCapability", handle)
    fact["compute_capability"] = "{}.{}".format(*capability) if capability else None
    fact["memory"], carve_out = _memory(answers, handle, fact["compute_capability"], host_mib)
    if carve_out is not None:
        fact["vendor_data"]["carve_out_mib"] = carve_out
    rows = _processes(answers, handle, fact["memory"])
    fact["memory"]["unattributed_mib"] = _unattributed(fact["memory"]["used_mib"], rows, answers)
    if rows is not None:
        fact["processes"] = [dict(row, **_owner(row["pid"], table)) for row in rows]


def _owner(pid: int, table: process_facts.ProcessTable) -> dict[str, Any]:
    seen = process_facts.describe(pid, table.proc_root, table)
    return {"name": seen["name"], "user": seen["user"], "shard": process_facts.shard_name(table.shard_of(pid))}


def _process_row(answers: Answers, index: int | None, handle: Any, address: str | None, host_mib: int | None) -> dict[str, Any]:
    row: dict[str, Any] = {"index": index, "uuid": None, "pci_bdf": address, "memory": _memory_facts(None), "processes": None, "errors": answers.errors}
    if handle is None:
        return row
    row["uuid"] = _word(answers.ask("nvmlDeviceGetUUID", handle))
    capability = answers.ask("nvmlDeviceGetCudaComputeCapability", handle)
    memory, _carve_out = _memory(answers, handle, "{}.{}".format(*capability) if capability else None, host_mib)
    row["processes"] = _processes(answers, handle, memory)
    memory["unattributed_mib"] = _unattributed(memory["used_mib"], row["processes"], answers)
    row["memory"] = memory
    return row


def _memory(answers: Answers, handle: Any, capability: str | None, host_mib: int | None) -> tuple[dict[str, Any], int | None]:
    """The memory of a GPU, and the size of the carve-out where NVML answers only for that.

    v1 counts what the driver reserves as used, v2 does not; v2 is missing on old drivers. A GPU without memory of its own says
    NotSupported to both or gives 0 (GB10), or answers for a carve-out (N1X); its total is the host's and its use is unknown. Where the
    memory is a NUMA node of the OS (GH200, GB200) the OS may hold pages in it that no process on the GPU holds.
    """
    numa = answers.ask("nvmlDeviceGetNumaNodeId", handle, expected=_ABSENT)
    v2 = answers.attempt("nvmlDeviceGetMemoryInfo_v2", lambda: answers.nvml.nvmlDeviceGetMemoryInfo(handle, version=_MEMORY_V2))
    seen = v2 if v2 is not None else answers.ask("nvmlDeviceGetMemoryInfo", handle)
    refused = {answers.codes.get("nvmlDeviceGetMemoryInfo_v2"), answers.codes.get("nvmlDeviceGetMemoryInfo")}
    has_none = seen.total == 0 if seen is not None else NOT_SUPPORTED in refused and refused <= {NOT_SUPPORTED, FUNCTION_NOT_FOUND}
    if capability in _INTEGRATED or has_none:
        if host_mib is None:
            answers.errors["meminfo"] = "MemTotal cannot be read"
        if seen is not None:
            answers.errors["nvmlDeviceGetMemoryInfo"] = f"unified memory: NVML answers for {seen.total // MIB} MiB only"
        return _memory_facts("unified", host_mib), seen.total // MIB if seen is not None and seen.total else None
    if seen is None:
        return _memory_facts(None), None
    reserved = v2.reserved // MIB if v2 is not None else None
    return _memory_facts("discrete" if numa is None else "coherent", seen.total // MIB, seen.used // MIB, reserved), None


def _host_memory(proc_root: str) -> int | None:
    found = re.search(rb"^MemTotal:\s+([0-9]{1,18}) kB", _bytes(proc_root, "meminfo"), re.MULTILINE)
    return int(found.group(1)) // 1024 if found else None


def _processes(answers: Answers, handle: Any, memory: dict[str, Any]) -> list[dict[str, Any]] | None:
    """`[{pid, used_mib, kind}]` by pid, or None when the compute list is unknown.

    A process can stand in several lists with the same memory (compute and graphics, or an MPS client): it is given once. A number
    larger than the GPU's own memory is no number: R535 drivers and bindings of that time disagreed about the struct (nvitop, libnvml.py).
    """
    total = memory["total_mib"] if memory["model"] != "unified" else None
    rows: dict[int, dict[str, Any]] = {}
    for kind, call in _PROCESS_LISTS:
        for seen in answers.ask(call, handle, tries=_LIST_RETRIES) or []:
            used = None if seen.usedGpuMemory is None else int(seen.usedGpuMemory) // MIB
            if used is not None and total is not None and used > total:
                answers.errors[call], used = f"pid {seen.pid} is said to use {used} MiB of {total}", None
            row = rows.setdefault(int(seen.pid), {"pid": int(seen.pid), "used_mib": used, "kind": kind})
            row["used_mib"] = used if row["used_mib"] is None else max(row["used_mib"], used or 0)
    if "nvmlDeviceGetComputeRunningProcesses" in answers.codes or LOST in answers.codes.values():
        return None
    return [rows[pid] for pid in sorted(rows)]


def _unattributed(used: int | None, rows: list[dict[str, Any]] | None, answers: Answers) -> int | None:
    """What is held beyond what the listed processes hold; None where any part of the sum is unknown."""
    unread = any(call in answers.codes and answers.codes[call] not in (NOT_SUPPORTED, FUNCTION_NOT_FOUND) for _kind, call in _PROCESS_LISTS)
    if used is None or rows is None or unread or any(row["used_mib"] is None for row in rows):
        return None
    return int(max(0, used - sum(row["used_mib"] for row in rows)))


def _vendor_data(gpu: Gpu) -> dict[str, Any]:
    """What only NVIDIA's GPUs have, and what health is judged by. Null means the call of the same meaning in `errors` failed."""
    ask, handle = gpu.answers.ask, gpu.handle
    ecc = ask("nvmlDeviceGetEccMode", handle)
    rows = ask("nvmlDeviceGetRemappedRows", handle)
    retired = [ask("nvmlDeviceGetRetiredPages", handle, cause) for cause in (0, 1)]
    persistence = ask("nvmlDeviceGetPersistenceMode", handle)
    return {
        "minor": ask("nvmlDeviceGetMinorNumber", handle),
        "module_id": ask("nvmlDeviceGetModuleId", handle),
        "serial": _word(ask("nvmlDeviceGetSerial", handle)),
        "persistence_mode": None if persistence is None else bool(persistence),
        "addressing_mode": _ADDRESSING.get(ask("nvmlDeviceGetAddressingMode", handle)),
        "memory_numa_node": ask("nvmlDeviceGetNumaNodeId", handle),
        "ecc": None if ecc is None else {"current": bool(ecc[0]), "pending": bool(ecc[1]), "uncorrected": _ecc_errors(gpu, ecc[0])},
        "remapped_rows": None if rows is None else {"corrected": rows[0], "uncorrected": rows[1], "pending": bool(rows[2]), "failure": bool(rows[3])},
        "retired_pages": None
        if None in retired
        else {"single_bit": len(retired[0]), "double_bit": len(retired[1]), "pending": bool(ask("nvmlDeviceGetRetiredPagesPendingStatus", handle))},
        "recovery_action": _recovery_action(gpu),
        "nvlinks": _nvlinks(gpu),
        "platform": _platform(gpu),
    }


def _ecc_errors(gpu: Gpu, enabled: int) -> int | None:
    """Uncorrected errors since the driver was loaded."""
    count: int | None = gpu.answers.ask("nvmlDeviceGetTotalEccErrors", gpu.handle, 1, 0) if enabled else None
    return count


def _field(gpu: Gpu, number: int) -> int | None:
    """One value of nvmlDeviceGetFieldValues; each has a return code of its own."""
    values = gpu.answers.ask("nvmlDeviceGetFieldValues", gpu.handle, [number])
    if values is None:
        return None
    if values[0].nvmlReturn:
        gpu.answers.errors[f"field {number}"] = f"NVML code {values[0].nvmlReturn}"
        return None
    return int(values[0].value.uiVal)


def _recovery_action(gpu: Gpu) -> str | None:
    action = _field(gpu, _FIELD_RECOVERY_ACTION)
    return None if action is None else _RECOVERY.get(action, f"action_{action}")


def _nvlinks(gpu: Gpu) -> dict[str, int] | None:
    """`{links, active}`; None without NVLink."""
    count = _field(gpu, _FIELD_NVLINK_COUNT)
    if not count:
        return None
    states = [gpu.answers.ask("nvmlDeviceGetNvLinkState", gpu.handle, link, expected=_ABSENT) for link in range(count)]
    return {"links": count, "active": sum(1 for state in states if state)}


def _platform(gpu: Gpu) -> dict[str, Any] | None:
    """Where in a rack the GPU sits: `{chassis, slot, tray}`."""

    def look() -> dict[str, Any]:
        info = gpu.answers.nvml.c_nvmlPlatformInfo_v2_t()
        gpu.answers.nvml.nvmlDeviceGetPlatformInfo(gpu.handle, ctypes.byref(info))
        return {"chassis": _word(info.chassisSerialNumber), "slot": _byte(info.slotNumber), "tray": _byte(info.trayIndex)}

    seen: dict[str, Any] | None = gpu.answers.attempt("nvmlDeviceGetPlatformInfo", look)
    return seen


# ---------------------------------------------------------------- MIG


def _mig_mode(gpu: Gpu) -> tuple[bool | None, bool | None]:
    """(current, pending); they differ until the GPU is reset. None for a card without MIG, too: then `errors` says NotSupported."""
    mode = gpu.answers.ask("nvmlDeviceGetMigMode", gpu.handle) if gpu.handle is not None else None
    return (bool(mode[0]), bool(mode[1])) if mode else (None, None)


def _mig_handles(gpu: Gpu, mode: tuple[bool | None, bool | None]) -> list[tuple[Answers, Any]]:
    """The MIG instances of a GPU. Their slots have gaps."""
    if not mode[0]:
        return []
    slots = gpu.answers.ask("nvmlDeviceGetMaxMigDeviceCount", gpu.handle)
    found = [
        gpu.answers.ask("nvmlDeviceGetMigDeviceHandleByIndex", gpu.handle, slot, expected=(NOT_FOUND, INVALID_ARGUMENT))
        for slot in range(7 if slots is None else slots)
    ]
    return [(Answers(gpu.answers.nvml), handle) for handle in found if handle is not None]


def _mig_facts(parent: dict[str, Any], answers: Answers, handle: Any, proc_root: str, table: process_facts.ProcessTable) -> dict[str, Any]:
    """A MIG instance: memory and processes are its own; NVLink, P2P and CUDA IPC do not reach it."""
    fact = _empty_facts(parent["index"], parent["pci_bdf"])
    fact.update({key: parent[key] for key in ("arch", "compute_mode")}, health=dict(parent["health"]))
    fact["uuid"] = _word(answers.ask("nvmlDeviceGetUUID", handle))
    fact["model"] = _word(answers.ask("nvmlDeviceGetName", handle))
    profile = re.search(r"\bMIG (\S+)", fact["model"] or "")
    fact["partition"] = dict(parent["partition"], kind="mig", parent_uuid=parent["uuid"], profile=profile.group(1) if profile else None)
    fact["vendor_data"] = {
        "gpu_instance_id": answers.ask("nvmlDeviceGetGpuInstanceId", handle),
        "compute_instance_id": answers.ask("nvmlDeviceGetComputeInstanceId", handle),
    }
    _read_memory_and_processes(fact, answers, handle, _host_memory(proc_root), table)
    fact["compute_capability"] = fact["compute_capability"] or parent["compute_capability"]
    if fact["uuid"] is None and fact["health"]["state"] in ("ok", "warning"):
        fact["health"] = {"state": "unknown", "reasons": [f"its UUID cannot be read: {answers.errors.get('nvmlDeviceGetUUID', 'it is empty')}"]}
    fact["errors"] = answers.errors
    return fact


# ---------------------------------------------------------------- fabric, topology, NUMA


def _interconnect_domain(answers: Answers, handle: Any) -> dict[str, Any] | None:
    """`{kind, id, clique, state, health}`, or None where NVLink does not leave the host.

    id and clique are None unless the fabric registered successfully under a cluster UUID that is not zero: every HGX box in the world
    says COMPLETED with a zero UUID and clique 0 (meta-pytorch/torchcomms#1385).
    """
    info = _fabric_info(answers, handle)
    if info is None or info.state == 0:
        return None
    cluster, state = bytes(info.clusterUuid).hex(), _FABRIC_STATES.get(info.state, f"state_{info.state}")
    if state == "completed" and info.status:
        state, answers.errors["fabric"] = "failed", f"registration with the fabric ended with NVML code {info.status}"
    is_domain = state == "completed" and cluster.strip("0") != ""
    text = "-".join((cluster[:8], cluster[8:12], cluster[12:16], cluster[16:20], cluster[20:]))
    return {
        "kind": "nvlink",
        "id": text if is_domain else None,
        "clique": int(info.cliqueId) if is_domain else None,
        "state": state,
        "health": fabric_health(getattr(info, "healthSummary", 0), getattr(info, "healthMask", 0)),
    }


def _fabric_info(answers: Answers, handle: Any) -> Any:
    """The newest fabric struct that the driver and the binding share: v3, v2, v1."""
    info, tried = None, []
    for name, call in (("v3", "nvmlDeviceGetGpuFabricInfoV"), ("v2", "nvmlDeviceGetGpuFabricInfoV"), ("v1", "nvmlDeviceGetGpuFabricInfo")):

        def look(name: str = name, call: str = call) -> Any:
            info = getattr(answers.nvml, "c_nvmlGpuFabricInfo_t" if name == "v1" else f"c_nvmlGpuFabricInfo_{name}_t")()
            getattr(answers.nvml, call)(handle, ctypes.byref(info))
            return info

        label = call if name != "v2" else call + "_v2"
        info = answers.attempt(label, look)
        if info is not None or answers.codes.get(label) == NOT_SUPPORTED:
            break
        tried.append(label)
    for label in tried if info is not None else ():
        answers.errors.pop(label)  # a newer struct that the driver does not know is no gap in the facts
    return info


def fabric_health(summary: int, mask: int) -> str:
    """`healthy`, `limited`, `unhealthy` or `unknown` from v3's summary, else from the mask of v2 (bits: nvml.h, GPU_FABRIC_HEALTH)."""
    if summary:
        return _FABRIC_HEALTH.get(summary, "unknown")
    troubles = [(mask >> shift) & 3 for shift in (0, 2, 4, 6)]  # 0 not supported, 1 true, 2 false
    configuration = (mask >> 8) & 15  # 0 not supported, 1 none, 2 and more: what is wrong
    if 1 in troubles or configuration > 1:
        return "unhealthy"
    return "healthy" if 2 in troubles or configuration == 1 else "unknown"


def _topology(gpus: list[tuple[dict[str, Any], Gpu]]) -> dict[str, dict[str, str | None]]:
    """Distances between whole GPUs. NVLink counts first: the common ancestor on the PCI bus says nothing about it."""
    table: dict[str, dict[str, str | None]] = {fact["uuid"]: {} for fact, _gpu in gpus}
    for position, (fact, gpu) in enumerate(gpus):
        for other_fact, other in gpus[position + 1 :]:
            distance = _distance(gpu, other)
            table[fact["uuid"]][other_fact["uuid"]] = table[other_fact["uuid"]][fact["uuid"]] = distance
    return table


def _distance(gpu: Gpu, other: Gpu) -> str | None:
    if gpu.answers.ask("nvmlDeviceGetP2PStatus", gpu.handle, other.handle, _P2P_NVLINK) == 0:
        return "NV"
    return _DISTANCES.get(gpu.answers.ask("nvmlDeviceGetTopologyCommonAncestor", gpu.handle, other.handle))


def _with_numa(gpus: list[dict[str, Any]], sysfs_root: str) -> list[dict[str, Any]]:
    """Fill numa_node from sysfs. -1 is what virtual machines say: no information, and not "the same node" as another -1."""
    for fact in gpus:
        text = _line(sysfs_root, "bus", "pci", "devices", fact["pci_bdf"], "numa_node") if fact["pci_bdf"] else ""
        if re.fullmatch("[0-9]{1,9}", text):
            fact["numa_node"] = int(text)
        else:
            fact["errors"]["numa_node"] = "sysfs says -1: unknown" if text == "-1" else "not in sysfs"
    return gpus


# ---------------------------------------------------------------- health


def _health(fact: dict[str, Any], answers: Answers) -> dict[str, Any]:
    """`{state, reasons}` of a GPU with a handle; the worst finding gives the state, every finding its reason."""
    codes = answers.codes.values()
    if LOST in codes:
        return {"state": "lost", "reasons": ["GPU is lost: it fell off the bus (see dmesg for Xid 79); it needs a reset or a power cycle"]}
    findings = list(_findings(fact))
    if RESET_REQUIRED in codes:
        findings.append(("unhealthy", "NVML asks for a reset: nvidia-smi --gpu-reset"))
    if fact["uuid"] is None:
        findings.append(("unknown", f"its UUID cannot be read: {answers.errors.get('nvmlDeviceGetUUID', 'it is empty')}"))
    for call in ("nvmlDeviceGetEccMode", "nvmlDeviceGetRemappedRows", "nvmlDeviceGetFieldValues"):
        if call in answers.codes and answers.codes[call] not in _ABSENT:
            findings.append(("warning", f"{call} failed: {answers.errors[call]}"))
    states = [state for state, _reason in findings]
    worst = next((state for state in ("unhealthy", "unknown", "warning") if state in states), "ok")
    return {"state": worst, "reasons": [reason for _state, reason in findings]}


def _findings(fact: dict[str, Any]) -> Iterable[tuple[str, str]]:
    """(state, reason) for what the GPU says about itself (nvml.h; meaning: NVIDIA GPU memory error management)."""
    data, domain, partition = fact["vendor_data"], fact["interconnect_domain"], fact["partition"]
    rows, pages, ecc, action = data["remapped_rows"], data["retired_pages"], data["ecc"], data["recovery_action"]
    if rows and rows["failure"]:
        yield "unhealthy", "a memory row could not be remapped: the GPU needs replacement"
    if rows and rows["pending"]:
        yield "warning", "a memory row waits for remapping: reset the GPU when it is idle (nvidia-smi --gpu-reset)"
    if pages and pages["pending"]:
        yield "warning", "memory pages wait for retirement: reset the GPU when it is idle (nvidia-smi --gpu-reset)"
    if ecc and ecc["uncorrected"]:
        yield "warning", f"{ecc['uncorrected']} uncorrected memory errors since the driver was loaded"
    if ecc and ecc["current"] != ecc["pending"]:
        yield "warning", f"ECC will be {'on' if ecc['pending'] else 'off'} after the next reset"
    if action and action != "none":
        yield ("warning" if action == "drain_and_reset" else "unhealthy"), f"the driver asks for recovery: {action}"
    if partition["mode_current"] != partition["mode_pending"]:
        yield "warning", f"MIG will be {'on' if partition['mode_pending'] else 'off'} after the next reset: the GPU changes its shape"
    if domain and domain["state"] != "completed":
        yield (
            "warning",
            f"NVLink fabric state is {domain['state']}: CUDA fails until it is completed (on a host with NVSwitch: systemctl status nvidia-fabricmanager)",
        )


# ---------------------------------------------------------------- small readers


def _pairs(facts: list[dict[str, Any]], gpus: list[Gpu]) -> list[tuple[dict[str, Any], Gpu]]:
    """Facts of whole GPUs with the GPU each came from: both lists are in the same order once MIG instances are left out."""
    return list(zip([fact for fact in facts if fact["partition"]["kind"] is None], gpus))


def _order(address: str) -> tuple[int, ...]:
    return tuple(int(part, 16) for part in re.split(r"[:.]", address))


def _clean(value: Any) -> str:
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    return "".join(char if char.isprintable() else " " for char in text).strip()


def _word(value: Any) -> str | None:
    return (_clean(value) or None) if value is not None else None


def _byte(value: Any) -> int | None:
    """A number that the binding declares as a character: it may come as bytes, as text, or as an int."""
    if isinstance(value, int):
        return value
    return ord(value) if value is not None and len(value) == 1 else None


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _bytes(*parts: str) -> bytes:
    return small_files.read_bytes(os.path.join(*parts), _MOST_BYTES)[0] or b""


def _line(*parts: str) -> str:
    return _clean(_bytes(*parts))
