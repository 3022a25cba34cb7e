# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Find the line of an engine's log that tells why it ended, and say in plain words what it means.

Engines fail from the inside out: the rank that hit the fault prints one line, then every process above it prints a traceback
of its own, so the last lines only say that something below has ended. Therefore the *earliest* telling line counts
(vLLM prints the reason "far above the last traceback", Ray adds pages of `ActorHandleNotFoundError` after it).

Log text comes from programs and from whoever talks to them: it is cleaned before it is matched or shown. Pure, no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

LINE_LIMIT = 400
"""Characters of one log line that are kept."""

SHORTEST_SECRET = 4
"""Shorter secrets are not masked: masking `1` would destroy every line and hide nothing that is worth hiding."""

MASK = "********"

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]+")
_OWN_ERROR = re.compile(r"(?<![\w.])(?:\w+\.)*[A-Z]\w*(?:Error|Exception)(?:\(\w+\))?: *\S")
_HEALTHY = re.compile(
    r"(?:^|\W)run_shard: (?:launch|tie|waiting|\S+ rank \d+ of)|"  # the supervisor's own normal lines
    r"server_args=\{|non-default args: \{|Initializing a V1 LLM engine|"  # the arguments as SGLang and vLLM dump them: every word of an error may be in them
    r"WARNING .*Found ulimit of \d+ and failed to automatically increase"  # vLLM at each start; it names the error that a low limit can lead to
)
_NOT_THE_CAUSE = re.compile(
    r"EngineDeadError|ActorHandleNotFoundError|ActorDiedError|RayTaskError|BrokenPipeError|ConnectionResetError|EOFError|"
    r"Engine core initialization failed|EngineCore failed to start|KeyboardInterrupt|CancelledError"
)


class Signature(NamedTuple):
    """One known line. `pattern` is searched in the cleaned line; `hint` says what the operator can do.

    A `weak` signature also appears in healthy logs (a retry, a warning): it counts only where no other line tells more.
    A `consequence` is what a rank says when another one has ended or cannot be reached: over all ranks, a line of its own counts before it.
    """

    pattern: re.Pattern[str]
    cause: str
    hint: str
    weak: bool = False
    consequence: bool = False


def _signature(pattern: str, cause: str, hint: str, weak: bool = False, consequence: bool = False) -> Signature:
    return Signature(re.compile(pattern, re.IGNORECASE), cause, hint, weak, consequence)


# Sources: reports and source lines of vLLM 0.32/0.33, SGLang 0.5.23, llama.cpp b11434, NCCL 2.2x and PyTorch, as named in each group.
GPU_SIGNATURES: tuple[Signature, ...] = (
    # --- memory of the GPU (vllm#20305, pytorch#175666, sglang#1533, sglang#4330, sglang PR 23181)
    _signature(
        r"Free memory on device .*less than desired GPU memory utili[sz]ation",
        "Something else already holds memory on this GPU, so the engine cannot take the share that it was told to take.",
        "See who holds it with nvidia-smi, end that process, or lower --gpu-memory-utilization in the profile's args.",
    ),
    _signature(
        r"less than desired CPU memory utili[sz]ation",
        "The host has less free memory than the share that vLLM takes on a CPU (its fraction is of all RAM there).",
        "Lower --gpu-memory-utilization in the profile's args; on a CPU it is a fraction of the host's RAM.",
    ),
    _signature(
        r"memory capacity is unbalanced",
        "One of the GPUs has much less free memory than the others: another process holds it.",
        "See who holds it with nvidia-smi and end that process.",
    ),
    _signature(
        r"KV cache is needed, which is larger than the available KV cache memory|No available memory for the cache blocks|"
        r"Not enough memory to allocate KV cache|Not enough memory\. Please try to increase --mem-fraction-static",
        "The weights fit on the GPUs, but too little memory is left for the KV cache.",
        "Lower the context length, raise the memory fraction, or spread the model over more GPUs.",
    ),
    _signature(
        r"CUDA out of memory|CUDA error: out of memory|cudaMalloc failed: out of memory|HIP out of memory|torch\.(?:cuda\.)?OutOfMemoryError|"
        r"CUDA_ERROR_OUT_OF_MEMORY",
        "A GPU ran out of memory.",
        "Check with nvidia-smi that nothing else holds the GPU; then lower the context length or the memory fraction, or use more GPUs.",
    ),
    # --- driver and CUDA (llama.cpp#13059, #17542, #27923; ollama#5573)
    _signature(
        r"system not yet initiali[sz]ed|CUDA error 802",
        "The NVSwitch fabric of this host is not up: CUDA cannot be used until nvidia-fabricmanager has initialised it.",
        "systemctl status nvidia-fabricmanager; its version must equal the driver's.",
    ),
    _signature(
        r"unsupported display driver / cuda driver combination|Driver/library version mismatch|API mismatch: the client has",
        "The loaded kernel driver and the driver's user libraries are of different versions, as after an upgrade without a reboot.",
        "Reboot the host, or unload and load the nvidia modules; nvidia-smi must work before a new start.",
    ),
    _signature(
        r"CUDA driver version is insufficient for CUDA runtime version|The NVIDIA driver on your system is too old|"
        r"forward compatibility was attempted on non supported HW",
        "The driver of this host is older than the CUDA version that the engine was built for.",
        "Update the driver, or register an engine build for the CUDA version that nvidia-smi shows.",
    ),
    _signature(
        r"no kernel image is available for execution on the device|not compatible with the current PyTorch installation",
        "The engine build holds no code for this GPU's compute capability.",
        "Register a build made for this GPU; engine_info shows what a build was made for.",
    ),
    _signature(
        r"no CUDA-capable device is detected|No CUDA GPUs are available|Found no NVIDIA driver",
        "CUDA sees no GPU in the service's environment.",
        "Check nvidia-smi as the service's user, and that /dev/nvidia* and nvidia-uvm exist (at boot: order the unit after nvidia-persistenced).",
    ),
    _signature(
        r"invalid device ordinal",
        "The engine was told to use a GPU number that it does not see.",
        "Compare CUDA_VISIBLE_DEVICES in shard.env with nvidia-smi -L; args such as --base-gpu-id must not be in the profile.",
    ),
    _signature(
        r"CUDA-capable device\(s\) is/are busy or unavailable",
        "The GPU is in exclusive process mode and another process holds it.",
        "nvidia-smi -q -d COMPUTE shows the mode; end the other process or set the mode to DEFAULT.",
    ),
    _signature(
        r"uncorrectable (?:NVLink|ECC) error|fallen off the bus|GPU is lost|NVRM: Xid",
        "A GPU of this host has a hardware fault.",
        "Look at dmesg for the Xid number; drain the node and reset the GPU or reboot.",
    ),
    _signature(
        r"failed to initiali[sz]e CUDA|CUDA unknown error",
        "CUDA could not be initialised when the engine started, and it tries only once.",
        "Check nvidia-smi on the host, then restart the replica.",
    ),
    _signature(
        r"Failed to infer device type|No accelerator \(|current platform cpu does not support",
        "The engine sees no accelerator, so it does not start.",
        "Check nvidia-smi with the service's environment, and that the build is not a CPU build.",
    ),
    # --- falls back to the CPU without ending (llama.cpp#27923, #22748)
    _signature(
        r"no usable GPU found|no CUDA devices found|compiled without (?:GPU|CUDA) support|offloaded 0/\d+ layers to GPU",
        "The engine found no GPU and goes on with the CPU.",
        "Use a build with GPU support and check its device list with --list-devices as the service's user.",
    ),
    _signature(
        r"invalid device: \w+",
        "The build does not have the device that it was told to use.",
        "Run the binary with --list-devices as the service's user: a build without GPU support lists none.",
    ),
)
"""Lines about a GPU, its driver or its memory: they may tell why a GPU is empty although the engine goes on."""

SIGNATURES: tuple[Signature, ...] = GPU_SIGNATURES + (
    # --- capability, dtype, quantization
    _signature(
        r"quantization method .* not supported for the current GPU|Minimum capability: \d+",
        "The model's quantization needs a newer GPU than this host has.",
        "Choose a quantization for the weakest GPU of the replica, or other hosts.",
    ),
    _signature(
        r"Bfloat16 is only supported on GPUs with compute capability", "These GPUs cannot compute in bfloat16.", "Set --dtype float16 in the profile's args."
    ),
    _signature(
        r"attention heads .*must be divisible by",
        "The tensor parallel size does not divide the model's attention heads.",
        "Choose a tp that divides the number of heads in the model's config.json.",
    ),
    # --- meeting of the ranks (vllm#7074, aws-do-eks#50, NVIDIA/nccl#1837, sglang#3820)
    _signature(
        r"Unable to find address for: ?\S+|ifa != nullptr",
        "Gloo was given the name of an interface that this host does not have or that has no address.",
        "Set replica_management to a network or interface that every host has; the name may differ per host.",
    ),
    _signature(
        r"connectFullMesh failed.*remote=\[(?:\S*[:])?127\.|connectFullMesh failed.*\b127\.0\.[01]\.1\b",
        "A rank advertised a loopback address, so the others cannot reach it: its host name resolves to 127.0.x.x and no interface was named.",
        "GLOO_SOCKET_IFNAME and the rank's own address must be set on that host; see playbooks/show_environment.yml.",
    ),
    _signature(
        r"connectFullMesh failed|Unable to resolve hostname to a \(local\) address",
        "A rank could not connect to another one at the address that it advertised (Gloo).",
        "All ports must be open between the hosts of a replica, in both directions, on the management network.",
        consequence=True,
    ),
    _signature(
        r"with family \d+ is neither AF_INET|no socket interface found|No interface found",
        "NCCL found no interface of the name in NCCL_SOCKET_IFNAME on this host.",
        "Set replica_management to a network or interface that every host has.",
    ),
    _signature(
        r"Timed out after \d+ seconds waiting for clients",
        "The leader waited, but not every rank joined in time.",
        "Look at the ranks that did not join: they may have another leader address, a firewall in between, or have ended.",
        consequence=True,
    ),
    _signature(
        r"client socket has (?:failed to connect|timed out).*(?:any network address|trying to connect)",
        "This rank could not reach the leader's rendezvous port.",
        "Check from this host that the leader's address and port answer; a firewall or another subnet is the usual reason.",
        consequence=True,
    ),
    _signature(
        r"ZMQError: Cannot assign requested address|Cannot assign requested address \(addr=",
        "The rank was told to listen on an address that this host does not have.",
        "The rank's own address must be one of this host's; see playbooks/show_environment.yml.",
    ),
    _signature(
        r"(?:Connect to \S+ (?:returned \d+\(|failed : )|socket\w*Connect\w*: .*)(?:No route to host|Connection timed out|"
        r"Software caused connection abort|Network is unreachable|Connection refused)",
        "NCCL could not connect to another rank over TCP.",
        "All ports must be open between the hosts of a replica, in both directions; check the firewall and the named interface.",
        consequence=True,
    ),
    _signature(r"NCCL WARN Duplicate GPU detected", "Two ranks were given the same GPU.", "Compare CUDA_VISIBLE_DEVICES of the shards on this host."),
    # --- InfiniBand and RoCE (nccl-tests#185, #227; NVIDIA/nccl#2013, #1131; nccl-tests#206; NV-Kernels#591)
    _signature(
        r"ibv_modify_qp failed",
        "Two HCAs cannot reach each other: other fabric or rail, other VLAN, or a GID that is not routed.",
        "Name the fabric with replica_fabric; on RoCE check that UDP port 4791 passes and which GID index each host uses.",
    ),
    _signature(
        r"(?:ibv_)?reg_mr\w* failed|reg_mr.*Cannot allocate memory",
        "The HCA could not pin memory.",
        "LimitMEMLOCK must be infinity (see /proc/PID/limits); if it is, an arm64 kernel with kho=on may have taken the CMA.",
    ),
    _signature(
        r"Got completion .*(?:error|status=12)|IBV_WC_RETRY_EXC_ERR|transport retry counter exceeded",
        "A transfer between two HCAs timed out: the link, the switch or the peer's GID went away.",
        "Check the ports of both hosts (ibstat, rdma link) and restart the whole replica: a GID index may have moved.",
        consequence=True,
    ),
    _signature(
        r"while creating shared memory segment|/dev/shm/nccl-|No space left on device.*shm|unable to (?:open|mmap) shared memory",
        "The shared memory of the host (/dev/shm) is too small or full.",
        "Enlarge /dev/shm to several GiB and remove nccl-* files without an owner.",
    ),
    _signature(
        r"Watchdog caught collective operation timeout",
        "A collective operation did not finish: a rank hangs or a link between hosts is down.",
        "Look at the other ranks' logs for an earlier line, then at the fabric.",
        consequence=True,
    ),
    _signature(
        r"ncclRemoteError|socketProgress: Connection closed by remote peer",
        "Another rank ended first and this one lost its connection.",
        "The cause is in another rank's log.",
        consequence=True,
    ),
    _signature(
        r"ncclSystemError|ncclUnhandledCudaError|ncclInternalError|ncclInvalidUsage",
        "NCCL failed while it set up communication between the ranks.",
        "Set NCCL_DEBUG: INFO in the profile's env and look for the first line with NCCL WARN.",
        consequence=True,
    ),
    # --- Ray
    _signature(
        r"Version mismatch: The cluster was started with",
        "Ray or Python has another version on this host than on the leader.",
        "Register the same engine build on every host of the replica.",
    ),
    _signature(
        r"Failed to connect to GCS", "This rank cannot reach the Ray head on the leader.", "Check the leader's address and Ray port from this host.", weak=True
    ),
    _signature(
        r"Waiting for creating a placement group",
        "Ray waits for GPUs: a rank has not joined, or joined with another address than the engine expects.",
        "Compare the nodes that `ray list nodes` shows with the plan's addresses.",
        weak=True,
    ),
    # --- ports
    _signature(
        r"address already in use|couldn't bind HTTP server socket|Errno 98|EADDRINUSE",
        "Another program already uses a port that the engine needs.",
        "ss -ltnp names it; stop it or choose another port.",
    ),
    # --- start of the program
    _signature(
        r"Illegal instruction|SIGILL",
        "The binary was built for another CPU than this host has.",
        "Register a build made for this CPU (without native optimisation).",
    ),
    _signature(
        r"error while loading shared libraries|cannot open shared object file|GLIBC(?:XX)?_[\d.]+'? not found|undefined symbol",
        "A shared library that the engine needs is missing or has the wrong version.",
        "Check the build with ldd as the service's user; declare LD_LIBRARY_PATH with the engine build.",
    ),
    _signature(
        r"No working C\+\+ compiler found|Failed to find C compiler|Python\.h: No such file",  # torch/_inductor/cpp_builder.py, triton/runtime/build.py
        "The engine compiles code while it runs, and the host has no compiler, or not the headers of the build's Python.",
        "Install a C and a C++ compiler and the headers on every host of the replica; on Debian and Ubuntu build-essential and python3-dev.",
    ),
    _signature(
        r"ModuleNotFoundError: No module named|PackageNotFoundError",
        "The engine's Python environment lacks a package.",
        "Install it into that environment, or register a complete build.",
    ),
    _signature(
        r"unrecognized arguments?:|error: invalid argument|invalid choice:|error: argument -|unknown argument",
        "The engine does not accept one of its arguments, as when the build has another version than the profile was written for.",
        "Check the profile's args against this build's --help.",
    ),
    _signature(
        r"RPC not supported in this build",
        "This llama.cpp build has no RPC backend, which a replica over several hosts needs.",
        "Register a build with GGML_RPC=ON.",
    ),
    # --- the model
    _signature(
        r"does not appear to have a file named|not a local folder and is not a valid model identifier|Repo id must be|"
        r"LocalEntryNotFoundError|OfflineModeIsEnabled|failed to open GGUF file|gguf_init_from_file\S*: failed to open|failed to open .*\.gguf|"
        r"failed to load model\b.*No such file or directory",
        "The model is not at the path that the profile names on this host, or is incomplete.",
        "Check model_path on this host: every rank reads it, not only the leader.",
    ),
    _signature(
        r"not within the file bounds|corrupted or incomplete|invalid magic|HeaderTooLarge|MetadataIncompleteBuffer|Error while deserializing header",
        "A weight file is damaged or was copied only in part.",
        "Compare its size and checksum with the source and copy it again.",
    ),
    _signature(
        r"failed to load model\b|error loading model\b",
        "The engine could not load the model's files.",
        "Compare their size and checksum with the source, and check that this engine build knows the model.",
        weak=True,
    ),
    _signature(
        r"unknown model architecture|architectures? .* (?:are|is) not supported|does not recogni[sz]e this architecture",
        "This engine version does not know the model's architecture.",
        "Register a newer engine build.",
    ),
    _signature(
        # What asks for it, not the dumps of all arguments in which it is False.
        r"trust_remote_code ?= ?True|contains custom code which must be executed|execute the configuration file in that repo",
        "The model brings its own code and the engine refuses to run it.",
        "Use an engine version that supports the model itself.",
    ),
    _signature(
        r"LoRA rank \d+ is greater than max_lora_rank|failed to (?:load|apply) lora|No adapter found for|Loading lora .* failed",
        "An adapter could not be loaded.",
        "Check the adapter's path, rank and base model on every host of the replica.",
    ),
    # --- the host
    _signature(
        r"Out of memory: Killed process|Memory cgroup out of memory|oom-kill",
        "The kernel ended the engine because the host ran out of memory.",
        "Free host memory or lower what the engine pins (swap space, CPU offload).",
    ),
    _signature(r"No space left on device", "A file system of the host is full.", "df -h names it; caches of the service are in its working directory."),
    _signature(
        r"Too many open files",
        "The service may not open enough files.",
        "LimitNOFILE of the unit must be at least 65536.",
    ),
    _signature(
        r"Read-only file system",
        "The engine writes to a path that is read-only for the service.",
        "Point its cache directories below the service's working directory.",
    ),
    _signature(
        r"Permission denied|Errno 13\b|EACCES",
        "The service's user may not read or use a file.",
        "Check the owner and mode of the path in that line for the service's user.",
    ),
    _signature(r"Cannot allocate memory", "The host could not give the engine memory.", "Check free memory and the service's limits."),
    # --- lost peers (llama.cpp#22643, vllm#32136) and weak signs
    _signature(
        r"Remote RPC server crashed or returned malformed response|RPC.*version mismatch|failed to connect to RPC|Failed to connect to \S+:\d+",
        "The leader lost or could not use a rank's RPC server.",
        "The RPC server must be up first and of exactly the leader's version; look at that rank's log.",
        consequence=True,
    ),
    _signature(
        r"Watchdog timeout",
        "One step of the engine did not finish in time: a rank or a GPU hangs.",
        "Look at the other ranks' logs and at dmesg for an Xid.",
        consequence=True,
    ),
    _signature(
        r"TCP client failed to connect/validate to host",
        "This rank tries again and again to reach the leader.",
        "Check from this host that the leader's address and port answer.",
        weak=True,
    ),
    _signature(
        r"mq_connect_ip=0\.0\.0\.0",
        "The rank advertises 0.0.0.0: its own address was not set, so the others cannot reach it.",
        "VLLM_HOST_IP must be set to an address of this host.",
        weak=True,
    ),
    _signature(
        r"Network is unreachable|No route to host|Connection refused",
        "A connection to another host failed.",
        "Check addresses, routes and firewalls between the hosts.",
        weak=True,
    ),
)

_SIGNALS = {
    "SIGILL": (
        "It was ended by SIGILL: the binary was built for another CPU than this host has.",
        "Register a build made for this CPU (without native optimisation).",
    ),
    "SIGKILL": ("It was killed by SIGKILL: by the kernel for lack of memory, or by hand.", "dmesg -T | grep -i 'killed process' tells which."),
    "SIGABRT": ("It gave up by itself (SIGABRT).", "The line that it printed before says why."),
    "SIGSEGV": ("It crashed (SIGSEGV).", "Check that the build fits the driver and the CPU; coredumpctl may hold a trace."),
    "SIGBUS": ("It crashed on a memory mapping (SIGBUS), as when /dev/shm is full or a weight file was cut short.", "df -h /dev/shm; check the model's files."),
}

_CODES = {
    0: (
        "It ended with exit code 0. For a server that is an end like any other: vLLM leaves with 0 after its engine process died (vllm#48966).",
        "The cause is further up in the log.",
    ),
    126: ("The program could not be executed.", "Check the file's mode and that its file system is not mounted noexec."),
    127: ("The program or a shared library that it needs was not found.", "Check the engine build's path, and ldd on its binary."),
}


def clean(text: object, secrets: Iterable[str] = (), limit: int = LINE_LIMIT) -> str:
    """One line of untrusted text made safe to show: no escapes or control characters, secrets masked, at most `limit` characters.

    Invisible and direction-changing Unicode characters go, too: they can make a line read otherwise than it is.
    """
    line: str = mask(_CONTROLS.sub(" ", _ESCAPES.sub("", str(text))).strip(), secrets)
    return line if len(line) <= limit else line[: limit - 1] + "…"


def mask(value: Any, secrets: Iterable[str]) -> Any:
    """`value` with every secret masked in all strings of it, at any depth; the longest first, as one may be part of another."""
    if isinstance(value, str):
        for secret in sorted((secret for secret in secrets if len(secret) >= SHORTEST_SECRET), key=len, reverse=True):
            value = value.replace(secret, MASK)
    elif isinstance(value, dict):
        return {key: mask(item, secrets) for key, item in value.items()}
    elif isinstance(value, list):
        return [mask(item, secrets) for item in value]
    return value


def clean_lines(text: str, secrets: Sequence[str] = (), limit: int = LINE_LIMIT) -> list[str]:
    """The lines of `text`, cleaned, without empty ones. A carriage return ends a line, too: progress bars use it."""
    lines = (clean(line, secrets, limit) for line in re.split(r"[\r\n]+", text))
    return [line for line in lines if line]


def first_telling(lines: Sequence[str], signatures: Sequence[Signature] = SIGNATURES, own_errors: bool = True) -> dict[str, Any] | None:
    """The earliest line that tells the cause: `{line, cause, hint}`, or None.

    In this order: the first line with a strong signature; the first with a weak one; with `own_errors` the first line on which
    a program names an error of its own (`ValueError: …`) with cause and hint null, as nobody here knows what it means.
    """
    lines = [line for line in lines if not _HEALTHY.search(line)]
    for weak in (False, True):
        for line in lines:
            found = _match(line, signatures, weak)
            if found is not None:
                return {"line": clean(line), "cause": found.cause, "hint": found.hint}
    if own_errors:
        for line in lines:
            if _OWN_ERROR.search(line) and not _NOT_THE_CAUSE.search(line):
                return {"line": clean(line), "cause": None, "hint": None}
    return None


def telling(lines: Sequence[str], most: int = 8) -> list[dict[str, Any]]:
    """All lines that tell something, in the order of the log, each cause once: `[{line, cause, hint, kind}]`.

    `kind` is `cause`, `consequence` (of what another rank did), `weak`, or `error`: a program's own error of which nobody here knows the meaning.
    """
    found: list[dict[str, Any]] = []
    for line in lines:
        if _HEALTHY.search(line):
            continue
        signature = _match(line, SIGNATURES, False) or _match(line, SIGNATURES, True)
        if signature is not None:
            kind = "weak" if signature.weak else "consequence" if signature.consequence else "cause"
            entry: dict[str, Any] = {"line": clean(line), "cause": signature.cause, "hint": signature.hint, "kind": kind}
        elif _OWN_ERROR.search(line) and not _NOT_THE_CAUSE.search(line):
            entry = {"line": clean(line), "cause": None, "hint": None, "kind": "error"}
        else:
            continue
        if not any((entry["cause"], entry["kind"]) == (other["cause"], other["kind"]) for other in found):
            found.append(entry)
    return found[:most]


def _match(line: str, signatures: Sequence[Signature], weak: bool) -> Signature | None:
    for signature in signatures:
        if signature.weak is weak and signature.pattern.search(line):
            return signature
    return None


def cause_of_end(code: int | None, signal: str | None) -> dict[str, Any] | None:
    """What an exit code or the name of a signal tells by itself: `{cause, hint}`, or None.

    A shell's 128 + n and Python's negative codes are read as signal n.
    """
    name = signal or _signal_of(code)
    if name is not None:
        known = _SIGNALS.get(name, (f"It was ended by {clean(name, limit=20)}.", None))
    elif code in _CODES:
        known = _CODES[code]
    else:
        return None
    return {"cause": known[0], "hint": known[1]}


def _signal_of(code: int | None) -> str | None:
    numbers = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}
    if code is None:
        return None
    return numbers.get(-code if code < 0 else code - 128)
