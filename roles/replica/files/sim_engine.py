# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A simulated inference engine: the life of a real one (ranks, loading, health, key, answers, faults) without a GPU or a model's weights.

    sim_engine.py serve MODEL [options]     be one node rank of a replica
    sim_engine.py devices                   list the GPUs that an engine started now would see

It is for demonstrations and for tests of what surrounds an engine, at a scale and with failures for which real engines are too slow.
Its behaviour was copied from runs of real ones, and one suite, tests/contract/test_engine_behaviour.py, holds it and a real one to the
same expectations. A dialect is the engine that is imitated:

                       vllm                          llama.cpp                     sglang
    port while loading bound, refuses connections    listens, 503 on every path    nothing there, then 503 while warming up
    key from           VLLM_API_KEY                  LLAMA_API_KEY                 api-key in the YAML of --config
    key guards         /v1 /v2 /inference /cohere    all but /health, /v1/health   all but /health* /ready* /metrics*
    /metrics           always                        with --metrics                with --enable-metrics
    unknown model      404                           served                        served
    follower's port    none (--headless)             no followers                  answers /health 200 before the replica is ready
    lost peer          500 at the next request, 0    -                             ends by SIGKILL
    lost leader        never noticed                 -                             ends by SIGKILL

"GPU memory" is a file: DIRECTORY/<pid> with lines "GPU MIB" in the process directory that a fake NVML library reads. GPU is the item of
CUDA_VISIBLE_DEVICES, a UUID or an index, as it stands there. A dead process's file no longer counts.

Standard library only, Python 3.9 or later. The key is never printed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import enum
import fcntl
import functools
import hmac
import json
import os
import random
import signal
import socket
import string
import struct
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TextIO, Union

VERSION = "0.0.0+sim"
HEADER_LIMIT = 16 * 1024  # bytes
BODY_LIMIT = 1024 * 1024  # bytes
IDLE_SECONDS = 60.0  # a connection that sends no request is closed after this
DEFAULT_MAX_TOKENS = 16
GLOO_TIMEOUT_SECONDS = 1800.0  # what gloo and vLLM wait when --distributed-timeout-seconds is not given
RETRY_SECONDS = 0.1
STOP_SECONDS = 2.0  # workers that are still there this long after they were asked to end are killed


class EngineExit(Exception):
    """The engine ends with `code`; `message` goes to the log as it is."""

    def __init__(self, code: int, message: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Log:
    """Lines of the engine's log. Whoever reads them may go away; that must not end the engine."""

    def __init__(self, rank: int, stream: TextIO) -> None:
        self._rank = rank
        self._stream = stream

    def info(self, text: str) -> None:
        self.verbatim(f"INFO rank {self._rank}: {text}")

    def verbatim(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(text, file=self._stream, flush=True)


# ---------------------------------------------------------------------------------------------------------------- GPUs


class Gpu(NamedTuple):
    """What the driver says of one GPU. Sizes in MiB, None where the driver does not tell (unified memory)."""

    number: int  # as the driver counts
    uuid: str
    name: str
    total_mib: int | None
    free_mib: int | None


class Driver:
    """The NVIDIA driver as seen through its library, real or fake. No library, or no driver behind it: no GPUs."""

    def __init__(self, library: str = "libnvidia-ml.so.1") -> None:
        self._library = library

    def gpus(self) -> list[Gpu]:
        try:
            nvml = ctypes.CDLL(self._library)
        except OSError:
            return []
        if nvml.nvmlInit_v2() != 0:
            return []
        try:
            count = ctypes.c_uint(0)
            nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
            found = [self._gpu(nvml, index) for index in range(count.value)]
            return [gpu for gpu in found if gpu is not None]
        finally:
            nvml.nvmlShutdown()

    def _gpu(self, nvml: ctypes.CDLL, index: int) -> Gpu | None:
        handle = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) != 0:
            return None  # fallen off the bus, or not permitted: an engine would not see it either
        memory = (ctypes.c_ulonglong * 3)()  # nvmlMemory_t: total, free, used, in bytes
        known = nvml.nvmlDeviceGetMemoryInfo(handle, memory) == 0
        total, free = (memory[0] >> 20, memory[1] >> 20) if known else (None, None)
        return Gpu(index, self._text(nvml.nvmlDeviceGetUUID, handle), self._text(nvml.nvmlDeviceGetName, handle), total, free)

    @staticmethod
    def _text(function: Any, handle: ctypes.c_void_p) -> str:
        buffer = ctypes.create_string_buffer(96)
        return buffer.value.decode(errors="replace") if function(handle, buffer, ctypes.c_uint(len(buffer))) == 0 else ""


def visible_items(environ: Mapping[str, str]) -> list[str] | None:
    """The items of CUDA_VISIBLE_DEVICES, or None where it is not set and every GPU is visible."""
    value = environ.get("CUDA_VISIBLE_DEVICES")
    return None if value is None else [item.strip() for item in value.split(",") if item.strip()]


def visible_gpus(items: Sequence[str] | None, gpus: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs that CUDA would show, in its order: items up to the first that names no GPU (CUDA programming guide, environment)."""
    if items is None:
        return list(gpus)
    visible: list[Gpu] = []
    for item in items:
        named = [gpu for gpu in gpus if (str(gpu.number) == item if item.isdigit() else gpu.uuid.startswith(item))]
        if len(named) != 1:
            break
        visible.append(named[0])
    return visible


def device_listing(gpus: Sequence[Gpu]) -> str:
    """The text of llama.cpp's `--list-devices`."""
    lines = []
    for number, gpu in enumerate(gpus):
        memory = "" if gpu.total_mib is None else f" ({gpu.total_mib} MiB, {gpu.free_mib} MiB free)"
        lines.append(f"  CUDA{number}: {gpu.name}{memory}")
    return "\n".join(["Available devices:", *(lines or ["  (none)"])])


# ------------------------------------------------------------------------------------------------- memory and processes


class Holding(NamedTuple):
    """Memory on one GPU."""

    gpu: str
    mib: int


class ProcessDirectory:
    """Where a process says what GPU memory it holds. Without a directory nothing is said."""

    def __init__(self, path: str | None) -> None:
        self._path = path

    def write(self, holdings: Sequence[Holding]) -> None:
        """Say it for the calling process, by rename. Raises OSError."""
        lines = [f"{holding.gpu} {holding.mib}\n" for holding in holdings if holding.mib > 0]
        if not self._path or not lines:
            return
        os.makedirs(self._path, exist_ok=True)
        unfinished = os.path.join(self._path, f".{os.getpid()}")
        with open(unfinished, "w", encoding="utf-8") as file:
            file.writelines(lines)
        os.replace(unfinished, os.path.join(self._path, str(os.getpid())))

    def remove(self) -> None:
        if self._path:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self._path, str(os.getpid())))


class Worker:
    """One child process, which holds the memory of one GPU. A socket pair ties parent and child: the end of either shows at the other."""

    def __init__(self, name: str, holdings: Sequence[Holding], directory: ProcessDirectory, outlives_parent: bool, ignores_term: bool) -> None:
        self.name = name
        self._holdings = holdings
        self._directory = directory
        self._outlives_parent = outlives_parent
        self._ignores_term = ignores_term
        self.pid = 0

    def start(self, others: Iterable[Worker]) -> None:
        """Fork. `others` are the workers that run already: their channels must not stay open in this child."""
        self.channel, self._childs_channel = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                for other in others:
                    other.channel.close()
                self.channel.close()
                self._be_worker()
            finally:
                os._exit(1)  # never back into the parent's code
        self._childs_channel.close()

    def _be_worker(self) -> NoReturn:
        set_process_name(self.name)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN if self._ignores_term else self._leave)
        try:
            while self._childs_channel.recv(64):
                self._directory.write(self._holdings)
        except OSError as error:
            print(f"{self.name}: {error}", file=sys.stderr, flush=True)
            self._leave()
        while self._outlives_parent:
            signal.pause()
        self._leave()

    def _leave(self, *_signal: object) -> NoReturn:
        self._directory.remove()
        os._exit(0)

    def hold(self) -> None:
        with contextlib.suppress(OSError):
            self.channel.send(b"hold")

    def ended(self) -> bool:
        """Whether it is gone; also collects it."""
        try:
            return os.waitpid(self.pid, os.WNOHANG)[0] == self.pid
        except ChildProcessError:
            return True


class Workers:
    """All processes of this rank that hold GPU memory: one child for each GPU, or none and the engine's own process holds it."""

    def __init__(self, children: Sequence[Worker], own: Sequence[Holding], directory: ProcessDirectory, outlive_engine: bool) -> None:
        self._children = list(children)
        self._own = own
        self._directory = directory
        self._outlive_engine = outlive_engine

    def start(self) -> None:
        """Fork the children. To be called before any other file or socket is open: children must not keep the engine's port."""
        for number, worker in enumerate(self._children):
            worker.start(self._children[:number])

    def watch(self, loop: asyncio.AbstractEventLoop, when_one_ends: Callable[[str], None]) -> None:
        for worker in self._children:
            loop.add_reader(worker.channel, self._one_ended, loop, worker, when_one_ends)

    @staticmethod
    def _one_ended(loop: asyncio.AbstractEventLoop, worker: Worker, when_one_ends: Callable[[str], None]) -> None:
        loop.remove_reader(worker.channel)
        when_one_ends(worker.name)

    def hold(self) -> None:
        """Raises EngineExit when the process directory cannot be written."""
        try:
            self._directory.write(self._own)
        except OSError as error:
            raise EngineExit(1, f"RuntimeError: cannot write the process directory: {error}") from error
        for worker in self._children:
            worker.hold()

    def stop(self) -> None:
        """End all children and come back when they are gone."""
        self._directory.remove()
        if self._outlive_engine:
            return
        for worker in self._children:
            worker.channel.close()
        deadline = time.monotonic() + STOP_SECONDS
        left = [worker for worker in self._children if not worker.ended()]
        while left and time.monotonic() < deadline:
            time.sleep(0.005)
            left = [worker for worker in left if not worker.ended()]
        for worker in left:
            os.kill(worker.pid, signal.SIGKILL)
            os.waitpid(worker.pid, 0)


def set_process_name(name: str) -> None:
    """Set what `ps -o comm` shows; the kernel keeps 15 bytes."""
    with contextlib.suppress(OSError, AttributeError):
        pr_set_name = 15
        ctypes.CDLL(None).prctl(pr_set_name, name.encode(), 0, 0, 0)


def workers_for(options: argparse.Namespace, dialect: Dialect, environ: Mapping[str, str], gpus: Callable[[], list[Gpu]]) -> Workers:
    """Who holds which memory. `gpus` is asked only where CUDA_VISIBLE_DEVICES is not set.

    Raises EngineExit where fewer GPUs are visible than this node's part of TP x PP, as real engines do.
    """
    directory = ProcessDirectory(options.sim_process_directory or environ.get("SIM_PROCESS_DIRECTORY"))
    items = visible_items(environ)
    visible = [] if options.sim_no_gpu else [gpu.uuid for gpu in gpus()] if items is None else items
    needed = options.tensor_parallel_size * options.pipeline_parallel_size // options.nnodes
    if dialect.has_ranks and items and visible and len(visible) < needed:
        raise EngineExit(1, f"ValueError: World size ({needed}) is larger than the number of available GPUs ({len(visible)}) in this node.")
    held = [[Holding(gpu, 0 if gpu in options.sim_gpu_skip else options.sim_gpu_mib)] for gpu in visible]
    extra = [Holding(gpu, options.sim_gpu_mib) for gpu in options.sim_gpu_extra]
    spawn = dialect.spawns_workers if options.sim_spawn_worker is None else options.sim_spawn_worker
    if not spawn or not held:
        return Workers([], [holding for one in held for holding in one] + extra, directory, False)
    held[0] += extra
    first_rank = options.node_rank * needed
    children = [
        Worker(dialect.worker_name(first_rank + number), holdings, directory, options.sim_orphans, options.sim_ignore_term)
        for number, holdings in enumerate(held)
    ]
    return Workers(children, [], directory, options.sim_orphans)


# --------------------------------------------------------------------------------------------------------- node ranks


class Addresses(NamedTuple):
    """What one rank tells the others of itself: two addresses, because engines have two rules for them."""

    collectives: str  # where gloo connects
    queue: str  # where the message queue connects


def own_addresses(environ: Mapping[str, str], variables: Sequence[str]) -> Addresses:
    """By the rules of gloo and vLLM: a wrong answer here is what makes real replicas hang, so it must be as wrong as theirs.

    Raises EngineExit when GLOO_SOCKET_IFNAME names no interface with an address.
    """
    queue = next((environ[name] for name in variables if environ.get(name)), None) or default_route_address() or "0.0.0.0"
    interface = environ.get("GLOO_SOCKET_IFNAME")
    if not interface:
        return Addresses(hostname_address(), queue)
    collectives = interface_address(interface)
    if collectives is None:
        raise EngineExit(1, f"RuntimeError: ifa != nullptr. Unable to find address for: {interface}")
    return Addresses(collectives, queue)


def hostname_address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def interface_address(name: str) -> str | None:
    siocgifaddr = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), siocgifaddr, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def default_route_address() -> str | None:
    """The address of the interface of the default route, which is what engines choose where nobody tells them."""
    try:
        with open("/proc/net/route", encoding="ascii") as file:
            routes = [line.split() for line in file.read().splitlines()[1:]]
    except OSError:
        return None
    interface = next((route[0] for route in routes if len(route) > 7 and route[1] == "00000000" and route[7] == "00000000"), None)
    return interface_address(interface) if interface else None


class Peer:
    """The standing connection to another rank."""

    def __init__(self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.rank = rank
        self.reader = reader
        self.writer = writer
        self.loaded = asyncio.Event()
        self.lost = asyncio.Event()

    def tell(self, word: str) -> None:
        with contextlib.suppress(OSError):
            self.writer.write(f"{word}\n".encode())


class Ranks:
    """The node ranks of a replica: they meet at the leader's port, then connect each to each at the addresses they advertise.

    `when_told` is called with (rank, word) for each word that a peer sends, and with the word "lost" when its connection ends.
    """

    def __init__(self, options: argparse.Namespace, addresses: Addresses, log: Log, when_told: Callable[[int, str], None]) -> None:
        self._options = options
        self._addresses = addresses
        self._log = log
        self._when_told = when_told
        self._timeout = options.distributed_timeout_seconds or GLOO_TIMEOUT_SECONDS
        self._table: dict[int, dict[str, tuple[str, int]]] = {}
        self._joining: dict[int, asyncio.StreamWriter] = {}
        self._complete = asyncio.Event()
        self._arrived = asyncio.Event()
        self._peers: dict[int, Peer] = {}
        self._kept: list[Any] = []  # what must not be garbage collected: servers, tasks, queue connections

    @property
    def is_leader(self) -> bool:
        return bool(self._options.node_rank == 0)

    async def connect(self) -> None:
        """Come back when every pair of ranks is connected. Raises EngineExit with the line that a real engine would leave."""
        own = {
            "collectives": await self._listen(self._addresses.collectives, self._collectives_came, "RuntimeError: gloo"),
            "queue": await self._listen(self._addresses.queue, self._queue_came, "zmq.error.ZMQError"),
        }
        self._log.info(
            f"world_size={self._options.nnodes} rank={self._options.node_rank} master_addr={self._options.master_addr} "
            f"gloo={own['collectives'][0]} mq_connect_ip={own['queue'][0]}"
        )
        await (self._gather(own) if self.is_leader else self._join(own))
        await self._connect_collectives()
        await self._connect_queues()
        self._log.info(f"all {self._options.nnodes} ranks connected")

    async def wait_loaded(self) -> None:
        """A follower tells the leader that it has loaded; the leader waits for all. Raises EngineExit when one is lost meanwhile."""
        for peer in self._peers.values():
            if not self.is_leader:
                peer.tell("loaded")
                continue
            waits = [asyncio.ensure_future(event.wait()) for event in (peer.loaded, peer.lost)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
            if not peer.loaded.is_set():
                raise EngineExit(1, f"RuntimeError: Connection closed by peer (rank {peer.rank}) while loading.")

    def tell_all(self, word: str) -> None:
        for peer in self._peers.values():
            peer.tell(word)

    def lost(self) -> list[int]:
        return sorted(rank for rank, peer in self._peers.items() if peer.lost.is_set())

    async def _listen(self, address: str, came: Callable[..., Awaitable[None]], who: str) -> tuple[str, int]:
        try:
            server = await asyncio.start_server(came, address, 0)
        except OSError as error:
            raise EngineExit(1, f"{who}: cannot listen on {address}: {os.strerror(error.errno or 0)}") from error
        self._kept.append(server)
        port: int = server.sockets[0].getsockname()[1]
        return address, port

    # The leader's side of the meeting.

    async def _gather(self, own: dict[str, tuple[str, int]]) -> None:
        self._table[0] = own
        try:
            self._kept.append(await asyncio.start_server(self._one_joins, "0.0.0.0", self._options.master_port, limit=HEADER_LIMIT))
        except OSError as error:
            raise EngineExit(1, f"DistNetworkError: cannot listen on port {self._options.master_port}: {os.strerror(error.errno or 0)}") from error
        try:
            await asyncio.wait_for(self._complete.wait(), self._timeout)
        except asyncio.TimeoutError:
            raise EngineExit(
                1,
                f"DistStoreError: Timed out after {self._timeout:.0f} seconds waiting for clients. {len(self._table)}/{self._options.nnodes} clients joined.",
            ) from None

    async def _one_joins(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank = -1
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            told = json.loads(await reader.readline())
            if told["world"] == self._options.nnodes and 0 < told["rank"] < told["world"] and told["rank"] not in self._table:
                rank = told["rank"]
                self._table[rank] = {kind: (str(told[kind][0]), int(told[kind][1])) for kind in ("collectives", "queue")}
                self._joining[rank] = writer
                self._log.info(f"rank {rank} joined, {len(self._table)}/{self._options.nnodes}")
                self._start_when_complete()
                while await reader.read(1024):
                    pass
        if not self._complete.is_set():  # it went away before the start: another may take its place
            self._table.pop(rank, None)
            self._joining.pop(rank, None)
        writer.close()

    def _start_when_complete(self) -> None:
        if len(self._table) == self._options.nnodes:
            line = (json.dumps(self._table) + "\n").encode()
            for writer in self._joining.values():
                writer.write(line)
            self._complete.set()

    # A follower's side of the meeting.

    async def _join(self, own: dict[str, tuple[str, int]]) -> None:
        leader = (self._options.master_addr, self._options.master_port)
        deadline = time.monotonic() + self._timeout
        reader, writer = await self._reach_leader(leader, deadline)
        self._kept.append(writer)
        writer.write((json.dumps({"rank": self._options.node_rank, "world": self._options.nnodes, **own}) + "\n").encode())
        try:
            table = json.loads(await asyncio.wait_for(reader.readline(), max(deadline - time.monotonic(), 0.1)))
            self._table = {int(rank): {kind: (host, port) for kind, (host, port) in ends.items()} for rank, ends in table.items()}
        except (OSError, ValueError, AttributeError, TypeError, asyncio.TimeoutError):
            raise EngineExit(1, f"DistNetworkError: Failed to recv, the connection to the leader {leader} ended during rendezvous.") from None

    async def _reach_leader(self, leader: tuple[str, int], deadline: float) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        attempt = 0
        while True:
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                return await asyncio.wait_for(asyncio.open_connection(*leader, limit=HEADER_LIMIT), 10)
            if time.monotonic() >= deadline:
                raise EngineExit(1, f"DistNetworkError: The client socket has failed to connect to any network address of ({leader[0]}, {leader[1]}).")
            if attempt in (1, 10, 100) or attempt % 1000 == 0:
                milliseconds = round(self._timeout * 1000)
                self._log.info(f"TCP client failed to connect/validate to host {leader[0]}:{leader[1]} - retrying (try={attempt}, timeout={milliseconds}ms)")
            attempt += 1
            await asyncio.sleep(RETRY_SECONDS)

    # Each to each.

    async def _connect_collectives(self) -> None:
        """Connect to every lower rank, wait for every higher one; a refusal ends this rank, and leaves the other side waiting."""
        for rank in range(self._options.node_rank):
            host, port = self._table[rank]["collectives"]
            try:
                reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port, limit=HEADER_LIMIT), 30)
            except (OSError, asyncio.TimeoutError) as error:
                reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "timed out"
                raise EngineExit(1, f"RuntimeError: Gloo connectFullMesh failed: {reason}, remote=[{host}]:{port}") from error
            writer.write(f"{self._options.node_rank}\n".encode())
            self._keep_peer(rank, reader, writer)
        self._note_arrival()
        try:
            await asyncio.wait_for(self._arrived.wait(), self._timeout)
        except asyncio.TimeoutError:
            raise EngineExit(1, "RuntimeError: Gloo connectFullMesh failed: timed out waiting for the other ranks") from None

    async def _collectives_came(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            rank = int(await reader.readline())
        except (OSError, ValueError):
            writer.close()
            return
        if self._options.node_rank < rank < self._options.nnodes and rank not in self._peers:
            self._keep_peer(rank, reader, writer)
            self._note_arrival()
        else:
            writer.close()

    def _note_arrival(self) -> None:
        if len(self._peers) == self._options.nnodes - 1:
            self._arrived.set()

    def _keep_peer(self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(rank, reader, writer)
        self._peers[rank] = peer
        self._kept.append(asyncio.ensure_future(self._listen_to(peer)))

    async def _listen_to(self, peer: Peer) -> None:
        with contextlib.suppress(OSError, ValueError):
            while True:
                line = await peer.reader.readline()
                if not line:
                    break
                word = line.decode(errors="replace").strip()
                if word == "loaded":
                    peer.loaded.set()
                self._when_told(peer.rank, word)
        peer.lost.set()
        self._when_told(peer.rank, "lost")

    async def _connect_queues(self) -> None:
        """As ZeroMQ does: retry for ever, in silence. A queue address that is wrong is a hang, not an error."""
        others = [rank for rank in self._table if rank] if self.is_leader else [0]
        for rank in others:
            while True:
                with contextlib.suppress(OSError):
                    self._kept.append(await asyncio.open_connection(*self._table[rank]["queue"]))
                    break
                await asyncio.sleep(RETRY_SECONDS)

    async def _queue_came(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._kept.append((reader, writer))


# ---------------------------------------------------------------------------------------------------------------- HTTP


class HttpError(Exception):
    """A request that cannot be answered as asked."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind


class Request(NamedTuple):
    method: str
    path: str
    version: str
    headers: dict[str, str]  # names in lower case
    body: bytes

    @property
    def keeps_connection(self) -> bool:
        return self.version == "HTTP/1.1" and self.headers.get("connection", "").lower() != "close"


class Response(NamedTuple):
    status: int
    body: bytes = b""
    content_type: str = "application/json"


class EventStream(NamedTuple):
    """An answer in pieces: server-sent events."""

    events: AsyncGenerator[bytes, None]


Answer = Union[Response, EventStream]
REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    411: "Length Required",
    413: "Content Too Large",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    501: "Not Implemented",
    503: "Service Unavailable",
}


def json_response(status: int, content: Any) -> Response:
    return Response(status, json.dumps(content, separators=(",", ":")).encode())


class HttpServer:
    """HTTP/1.1 with bounded requests. `answer` gets each request; `refuse` makes the response for one that is not proper."""

    def __init__(self, answer: Callable[[Request], Awaitable[Answer]], refuse: Callable[[HttpError], Response], log: Log) -> None:
        self._answer = answer
        self._refuse = refuse
        self._log = log
        self._server: asyncio.AbstractServer | None = None

    async def listen(self, listener: socket.socket) -> None:
        """Raises OSError when another one listens on the same port."""
        self._server = await asyncio.start_server(self._serve, sock=listener, limit=HEADER_LIMIT)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.TimeoutError):  # the client went away, or slept
            while await self._serve_one(reader, writer):
                pass
        writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; False when the connection ends with it."""
        try:
            request = await asyncio.wait_for(read_request(reader), IDLE_SECONDS)
        except HttpError as error:
            await self._send(writer, self._refuse(error), None)
            await linger(reader, writer)
            return False
        if request is None:
            return False
        await self._send(writer, await self._safe_answer(request), request)
        return request.keeps_connection

    async def _safe_answer(self, request: Request) -> Answer:
        try:
            return await self._answer(request)
        except HttpError as error:
            return self._refuse(error)
        except Exception as error:  # noqa: BLE001 - a fault of the simulator: one line, and the engine goes on
            self._log.info(f"internal error at {request.path}: {error!r}")
            return self._refuse(HttpError(500, "internal error of the simulator", "InternalServerError"))

    async def _send(self, writer: asyncio.StreamWriter, answer: Answer, request: Request | None) -> None:
        keep = request is not None and request.keeps_connection
        if isinstance(answer, EventStream):
            await self._send_events(writer, answer, chunked=request is not None and request.version == "HTTP/1.1", keep=keep)
            return
        writer.write(response_head(answer.status, answer.content_type, keep, f"content-length: {len(answer.body)}"))
        if request is None or request.method != "HEAD":
            writer.write(answer.body)
        await writer.drain()

    async def _send_events(self, writer: asyncio.StreamWriter, answer: EventStream, *, chunked: bool, keep: bool) -> None:
        length = "transfer-encoding: chunked" if chunked else "cache-control: no-cache"
        writer.write(response_head(200, "text/event-stream; charset=utf-8", keep, length))
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(answer.events.aclose)
            async for event in answer.events:
                writer.write(b"%x\r\n%s\r\n" % (len(event), event) if chunked else event)
                await writer.drain()
        if chunked:
            writer.write(b"0\r\n\r\n")
        await writer.drain()


def response_head(status: int, content_type: str, keep: bool, length: str) -> bytes:
    connection = "keep-alive" if keep else "close"
    return f"HTTP/1.1 {status} {REASONS[status]}\r\ncontent-type: {content_type}\r\n{length}\r\nconnection: {connection}\r\n\r\n".encode()


async def read_request(reader: asyncio.StreamReader) -> Request | None:
    """The next request, or None when the client has closed the connection. Raises HttpError."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise HttpError(431, f"the request's header is longer than {HEADER_LIMIT} bytes") from None
    except asyncio.IncompleteReadError as error:
        if not error.partial:
            return None
        raise HttpError(400, "the request's header is not complete") from None
    first, *lines = head.decode("latin-1").strip("\r\n").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[1].startswith("/") or words[2] not in ("HTTP/1.0", "HTTP/1.1"):
        raise HttpError(400, "not an HTTP/1.1 request line")
    headers = {name.strip().lower(): value.strip() for name, _colon, value in (line.partition(":") for line in lines)}
    return Request(words[0], words[1].partition("?")[0], words[2], headers, await read_body(reader, headers))


async def read_body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
    if "transfer-encoding" in headers:
        raise HttpError(411, "a body needs a Content-Length")
    length = headers.get("content-length", "0")
    if not (length.isascii() and length.isdigit()):
        raise HttpError(400, "Content-Length is not a number")
    if len(length) > 12 or int(length) > BODY_LIMIT:
        raise HttpError(413, f"the body is longer than {BODY_LIMIT} bytes")
    try:
        return await reader.readexactly(int(length))
    except asyncio.IncompleteReadError:
        raise HttpError(400, "the body is shorter than its Content-Length") from None


async def linger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Take what the client still sends, for a moment: closing on unread bytes would reset the connection before it reads our answer."""
    if writer.can_write_eof():
        writer.write_eof()
    taken, deadline = 0, time.monotonic() + 1.0
    while taken < 4 * BODY_LIMIT and time.monotonic() < deadline:
        piece = await asyncio.wait_for(reader.read(65536), 1.0)
        if not piece:
            return
        taken += len(piece)


# ------------------------------------------------------------------------------------------------------- completions


class Adapter(NamedTuple):
    name: str
    path: str


class Catalog(NamedTuple):
    """What this engine serves."""

    path: str
    names: tuple[str, ...]
    adapters: tuple[Adapter, ...]
    context: int  # tokens
    created: int  # epoch seconds

    def knows(self, model: str) -> bool:
        return model in self.names or any(model == adapter.name for adapter in self.adapters)


class Counters:
    """What /metrics shows."""

    def __init__(self) -> None:
        self.running = 0
        self.requests = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0


class Completion(NamedTuple):
    """A completion that was asked for and found proper."""

    chat: bool
    model: str | None
    prompt: str
    max_tokens: int
    stream: bool
    include_usage: bool

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt.split()) + 1

    def usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.max_tokens,
            "total_tokens": self.prompt_tokens + self.max_tokens,
        }

    def text(self, model: str) -> str:
        """One letter for each token; the same for the same question to the same model."""
        letters = random.Random(ascii((model, self.prompt)))  # ascii: JSON may carry lone surrogates
        return "".join(letters.choices(string.ascii_letters, k=self.max_tokens))


def parse_completion(body: bytes, chat: bool, context: int) -> Completion:
    """Raises HttpError 400."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        raise HttpError(400, "the body is not JSON") from None
    if not isinstance(asked, dict):
        raise HttpError(400, "the body is not a JSON object")
    model = asked.get("model")
    if model is not None and not isinstance(model, str):
        raise HttpError(400, "'model' is not a string")
    limit = asked.get("max_completion_tokens") if chat and asked.get("max_completion_tokens") is not None else asked.get("max_tokens")
    limit = DEFAULT_MAX_TOKENS if limit is None else limit
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise HttpError(400, "'max_tokens' must be a whole number of at least 1")
    stream_options = asked.get("stream_options")
    include_usage = isinstance(stream_options, dict) and stream_options.get("include_usage") is True
    completion = Completion(chat, model, prompt_text(asked, chat), limit, asked.get("stream") is True, include_usage)
    if completion.prompt_tokens + limit > context:
        raise HttpError(400, f"this model's context is {context} tokens; {completion.prompt_tokens} in the prompt + {limit} do not fit")
    return completion


def prompt_text(asked: Mapping[str, Any], chat: bool) -> str:
    """Raises HttpError 400."""
    if not chat:
        prompt = asked.get("prompt")
        if isinstance(prompt, list) and prompt:
            prompt = " ".join(str(part) for part in prompt)
        if not isinstance(prompt, str):
            raise HttpError(400, "'prompt' is required: a string or a list")
        return prompt
    messages = asked.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) and "role" in message for message in messages):
        raise HttpError(400, "'messages' is required: a list of objects with 'role' and 'content'")
    return "\n".join(f"[{message['role']}] {message.get('content')}" for message in messages)


def completion_events(completion: Completion, base: Mapping[str, Any], text: str) -> list[dict[str, Any]]:
    """The events of a streamed completion: the role of a chat, one for each token, and the usage where it was asked for."""
    role = {"index": 0, "finish_reason": None, "delta": {"role": "assistant", "content": ""}}
    events: list[dict[str, Any]] = [{**base, "choices": [role]}] if completion.chat else []
    for number, letter in enumerate(text):
        piece: dict[str, Any] = {"delta": {"content": letter}} if completion.chat else {"text": letter}
        events.append({**base, "choices": [{"index": 0, "finish_reason": "length" if number == len(text) - 1 else None, **piece}]})
    if completion.include_usage:
        events.append({**base, "choices": [], "usage": completion.usage()})
    return events


# ----------------------------------------------------------------------------------------------------------- dialects


class Phase(enum.IntEnum):
    LOADING = 0
    WARMING = 1
    READY = 2


class Route(NamedTuple):
    method: str
    answer: Callable[[Request], Awaitable[Answer]]


class Dialect:
    """What differs from engine to engine. This class is the common part; the names and texts are the engines' own."""

    name: str
    default_host = "127.0.0.1"
    default_port: int
    has_ranks = True
    spawns_workers = True
    address_variables: tuple[str, ...] = ()  # where a rank's own address may be given
    binds_at = Phase.READY
    port_taken_code = 1
    listens_at = Phase.READY
    warms_up = False
    knows_unknown_models = False
    wants_json_type = True  # refuses a body that does not say that it is JSON
    log_stream = "stdout"

    def key(self, options: argparse.Namespace, environ: Mapping[str, str]) -> str | None:
        """The API key, or None where there is none. Raises EngineExit."""
        raise NotImplementedError

    def guards(self, path: str) -> bool:
        """Whether the key is asked for."""
        raise NotImplementedError

    def presented_keys(self, headers: Mapping[str, str]) -> list[str]:
        scheme, _space, token = headers.get("authorization", "").partition(" ")
        return [token.strip()] if scheme.lower() == "bearer" else []

    def unauthorized(self) -> Response:
        return json_response(401, {"error": "Unauthorized"})

    def unready(self, phase: Phase) -> Response | None:
        """What every path answers in this phase, if the port is open at all."""
        return None

    def error(self, error: HttpError) -> Response:
        return json_response(error.status, {"error": {"message": error.message, "type": error.kind, "param": None, "code": error.status}})

    def no_such_path(self) -> Response:
        return json_response(404, {"detail": "Not Found"})

    def wrong_method(self) -> Response:
        return json_response(405, {"detail": "Method Not Allowed"})

    def worker_name(self, rank: int) -> str:
        raise NotImplementedError

    def serves_http(self, options: argparse.Namespace) -> bool:
        return True

    def models(self, catalog: Catalog) -> dict[str, Any]:
        """The answer of /v1/models: base names, then adapters with the base as their parent."""
        common = {"object": "model", "created": catalog.created, "owned_by": self.name}
        bases = [{**common, "id": name, "root": catalog.path, "parent": None, "max_model_len": catalog.context} for name in catalog.names]
        adapters = [{**common, "id": adapter.name, "root": adapter.path, "parent": catalog.names[0], "max_model_len": None} for adapter in catalog.adapters]
        return {"object": "list", "data": bases + adapters}

    def metrics(self, catalog: Catalog, counters: Counters) -> str:
        raise NotImplementedError

    def routes(self, api: Api) -> dict[str, Route]:
        """Paths beyond those that all dialects have."""
        return {}


class VllmDialect(Dialect):
    """vLLM 0.32 and 0.33, multiprocessing backend over several nodes."""

    name = "vllm"
    default_host = "0.0.0.0"
    default_port = 8000
    address_variables = ("VLLM_HOST_IP",)
    binds_at = Phase.LOADING  # without listening: connections are refused, and no list of listening ports shows it

    def key(self, options: argparse.Namespace, environ: Mapping[str, str]) -> str | None:
        return environ.get("VLLM_API_KEY") or None

    def guards(self, path: str) -> bool:
        return path.startswith(("/v1", "/v2", "/inference", "/cohere"))

    def worker_name(self, rank: int) -> str:
        return f"VLLM::Worker_TP{rank}"

    def serves_http(self, options: argparse.Namespace) -> bool:
        return not options.headless

    def metrics(self, catalog: Catalog, counters: Counters) -> str:
        labels = {"engine": "0", "model_name": catalog.names[0]}
        return exposition(
            [
                ("vllm:num_requests_running", "gauge", labels, counters.running),
                ("vllm:num_requests_waiting", "gauge", labels, 0),
                ("vllm:kv_cache_usage_perc", "gauge", labels, 0.0),
                ("vllm:prompt_tokens_total", "counter", labels, counters.prompt_tokens),
                ("vllm:generation_tokens_total", "counter", labels, counters.generated_tokens),
                ("vllm:request_success_total", "counter", {**labels, "finished_reason": "length"}, counters.requests),
            ]
        )

    def routes(self, api: Api) -> dict[str, Route]:
        return {
            "/ping": Route("GET", api.health),
            "/load": Route("GET", fixed(json_response(200, {"server_load": 0}))),
            "/version": Route("GET", fixed(json_response(200, {"version": VERSION}))),
            "/metrics": Route("GET", api.metrics),
            "/invocations": Route("POST", api.invocations),  # inference without a key, as in vLLM: vllm#58144
        }


class LlamaCppDialect(Dialect):
    """llama.cpp's llama-server, 0.1 and 0.6, on one host."""

    name = "llama.cpp"
    default_port = 8080
    wants_json_type = False
    has_ranks = False
    spawns_workers = False
    binds_at = Phase.LOADING
    listens_at = Phase.LOADING
    knows_unknown_models = True
    log_stream = "stderr"

    def key(self, options: argparse.Namespace, environ: Mapping[str, str]) -> str | None:
        return environ.get("LLAMA_API_KEY") or None

    def guards(self, path: str) -> bool:
        return path not in ("/health", "/v1/health")

    def presented_keys(self, headers: Mapping[str, str]) -> list[str]:
        return super().presented_keys(headers) + ([headers["x-api-key"]] if "x-api-key" in headers else [])

    def unauthorized(self) -> Response:
        return self.error(HttpError(401, "Invalid API Key", "authentication_error"))

    def unready(self, phase: Phase) -> Response | None:
        return self.error(HttpError(503, "Loading model", "unavailable_error")) if phase < Phase.READY else None

    def error(self, error: HttpError) -> Response:
        kind = "invalid_request_error" if error.kind == "BadRequestError" else error.kind
        return json_response(error.status, {"error": {"message": error.message, "type": kind, "code": error.status}})

    def no_such_path(self) -> Response:
        return self.error(HttpError(404, "File Not Found", "not_found_error"))

    def wrong_method(self) -> Response:
        return self.no_such_path()

    def worker_name(self, rank: int) -> str:
        return f"llama-worker-{rank}"

    def models(self, catalog: Catalog) -> dict[str, Any]:
        card = {"id": catalog.names[0], "aliases": list(catalog.names), "object": "model", "created": catalog.created, "owned_by": "llamacpp"}
        return {"object": "list", "data": [{**card, "meta": {"n_ctx": catalog.context}}]}

    def metrics(self, catalog: Catalog, counters: Counters) -> str:
        return exposition(
            [
                ("llamacpp:prompt_tokens_total", "counter", {}, counters.prompt_tokens),
                ("llamacpp:tokens_predicted_total", "counter", {}, counters.generated_tokens),
                ("llamacpp:requests_processing", "gauge", {}, counters.running),
                ("llamacpp:requests_deferred", "gauge", {}, 0),
            ]
        )

    def routes(self, api: Api) -> dict[str, Route]:
        off = self.error(HttpError(501, "This server does not support metrics endpoint. Start it with `--metrics`", "not_supported_error"))
        return {
            "/v1/health": Route("GET", api.health),
            "/metrics": Route("GET", api.metrics if api.options.metrics else fixed(off)),
            "/lora-adapters": Route("GET", fixed(json_response(200, self._adapters(api.catalog)))),
        }

    @staticmethod
    def _adapters(catalog: Catalog) -> list[dict[str, Any]]:
        return [{"id": number, "path": adapter.path, "scale": 1.0, "task_name": "", "prompt_prefix": ""} for number, adapter in enumerate(catalog.adapters)]


class SglangDialect(Dialect):
    """SGLang 0.5, tensor parallel over several nodes."""

    name = "sglang"
    default_port = 30000
    address_variables = ("SGLANG_HOST_IP", "HOST_IP")
    binds_at = Phase.WARMING
    port_taken_code = 3  # uvicorn's for a server that could not start; seen with SGLang 0.5.23
    listens_at = Phase.WARMING
    warms_up = True
    knows_unknown_models = True

    def key(self, options: argparse.Namespace, environ: Mapping[str, str]) -> str | None:
        return read_flat_yaml(options.config).get("api-key") or None if options.config else None

    def guards(self, path: str) -> bool:
        return not path.startswith(("/health", "/ready", "/metrics"))

    def unready(self, phase: Phase) -> Response | None:
        return Response(503, b"", "text/plain") if phase < Phase.READY else None

    def error(self, error: HttpError) -> Response:
        return json_response(error.status, {"object": "error", "message": error.message, "type": error.kind, "param": None, "code": error.status})

    def worker_name(self, rank: int) -> str:
        return "sglang::scheduler"

    def metrics(self, catalog: Catalog, counters: Counters) -> str:
        labels = {"model_name": catalog.names[0]}
        return exposition(
            [
                ("sglang:num_running_reqs", "gauge", labels, counters.running),
                ("sglang:num_queue_reqs", "gauge", labels, 0),
                ("sglang:token_usage", "gauge", labels, 0.0),
                ("sglang:prompt_tokens_total", "counter", labels, counters.prompt_tokens),
                ("sglang:generation_tokens_total", "counter", labels, counters.generated_tokens),
                ("sglang:num_requests_total", "counter", labels, counters.requests),
            ]
        )

    def routes(self, api: Api) -> dict[str, Route]:
        common = {path: Route("GET", api.health) for path in ("/health_generate", "/ready", "/ping")}
        return {**common, "/metrics": Route("GET", api.metrics)} if api.options.enable_metrics else common


DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in (VllmDialect(), LlamaCppDialect(), SglangDialect())}


def fixed(response: Response) -> Callable[[Request], Awaitable[Answer]]:
    async def answer(_request: Request) -> Answer:
        return response

    return answer


def exposition(samples: Sequence[tuple[str, str, Mapping[str, str], float]]) -> str:
    """The Prometheus text format."""
    lines = []
    for name, kind, labels, value in samples:
        family = name[: -len("_total")] if kind == "counter" and name.endswith("_total") else name
        quoted = ",".join(f'{label}="{escape_label(text)}"' for label, text in labels.items())
        lines += [f"# TYPE {family} {kind}", f"{name}{{{quoted}}} {value}" if quoted else f"{name} {value}"]
    return "\n".join(lines) + "\n"


def escape_label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def read_flat_yaml(path: str) -> dict[str, str]:
    """The lines `key: value` of a file; comments and blank lines are skipped, quoted values read as YAML reads them. Raises EngineExit."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, ValueError) as error:
        raise EngineExit(1, f"error: cannot read the configuration {path}: {error}") from error
    values = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#") or line.strip() == "---":
            continue
        name, colon, value = line.partition(":")
        if not colon or line[0].isspace():
            raise EngineExit(1, f"error: {path}, line {number}: not of the form `key: value`")
        values[name.strip()] = _yaml_scalar(value.strip(), f"{path}, line {number}")
    return values


def _yaml_scalar(text: str, where: str) -> str:
    """Between double quotes YAML has the escapes of JSON, which is all that is written here; between single ones a doubled quote stands for one."""
    if len(text) < 2 or text[0] != text[-1] or text[0] not in "'\"":
        return text
    if text[0] == "'":
        return text[1:-1].replace("''", "'")
    try:
        return str(json.loads(text))
    except ValueError as error:
        raise EngineExit(1, f"error: {where}: the value is no quoted text") from error


# ---------------------------------------------------------------------------------------------------------------- API


class Api:
    """The HTTP interface of the rank that serves. `death` says why the engine is dead, or None; `when_dead_asked` is told of a request to it."""

    def __init__(
        self,
        options: argparse.Namespace,
        dialect: Dialect,
        catalog: Catalog,
        key: str | None,
        phase: Callable[[], Phase],
        death: Callable[[], str | None],
        when_dead_asked: Callable[[], None],
    ) -> None:
        self.options = options
        self.catalog = catalog
        self.counters = Counters()
        self._dialect = dialect
        self._key = key
        self._phase = phase
        self._death = death
        self._when_dead_asked = when_dead_asked
        self._routes = {
            "/health": Route("GET", self.health),
            "/v1/models": Route("GET", self.models),
            "/v1/completions": Route("POST", functools.partial(self._complete, chat=False)),
            "/v1/chat/completions": Route("POST", functools.partial(self._complete, chat=True)),
            **dialect.routes(self),
        }

    async def answer(self, request: Request) -> Answer:
        unready = self._dialect.unready(self._phase())
        if unready is not None:
            return unready
        if self._key and self._dialect.guards(request.path) and not self._has_key(request, self._key):
            return self._dialect.unauthorized()
        route = self._routes.get(request.path)
        if route is None:
            return self._dialect.no_such_path()
        if request.method != route.method:
            return self._dialect.wrong_method()
        return await route.answer(request)

    def _has_key(self, request: Request, key: str) -> bool:
        return any(hmac.compare_digest(shown.encode("latin-1"), key.encode()) for shown in self._dialect.presented_keys(request.headers))

    async def health(self, _request: Request) -> Answer:
        if self._dialect.name == "llama.cpp":
            return json_response(200, {"status": "ok"})
        return Response(200, b"", "text/plain")

    async def models(self, _request: Request) -> Answer:
        return json_response(200, self._dialect.models(self.catalog))

    async def metrics(self, _request: Request) -> Answer:
        return Response(200, self._dialect.metrics(self.catalog, self.counters).encode(), "text/plain; version=0.0.4; charset=utf-8")

    async def invocations(self, request: Request) -> Answer:
        return await self._complete(request, chat=b'"messages"' in request.body)

    async def _complete(self, request: Request, *, chat: bool) -> Answer:
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if self._dialect.wants_json_type and media_type != "application/json":
            raise HttpError(400, "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed", "Bad Request")
        completion = parse_completion(request.body, chat, self.catalog.context)
        model = completion.model or self.catalog.names[0]
        if not self.catalog.knows(model):
            if not self._dialect.knows_unknown_models:
                raise HttpError(404, f"The model `{model}` does not exist.", "NotFoundError")
            model = self.catalog.names[0]
        if self._death() is not None:
            self._when_dead_asked()
            raise HttpError(500, "EngineCore encountered an issue. See stack trace (above) for the root cause.", "InternalServerError")
        base = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-sim-{self.counters.requests}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        if completion.stream:
            return EventStream(self._stream(completion, base, completion.text(model)))
        return await self._whole(completion, base, completion.text(model))

    async def _whole(self, completion: Completion, base: dict[str, Any], text: str) -> Answer:
        with self._running(completion):
            await asyncio.sleep(self.options.sim_ttft + self.options.sim_itl * (completion.max_tokens - 1))
        content: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if completion.chat else {"text": text}
        return json_response(200, {**base, "choices": [{"index": 0, "finish_reason": "length", **content}], "usage": completion.usage()})

    async def _stream(self, completion: Completion, base: dict[str, Any], text: str) -> AsyncGenerator[bytes, None]:
        if completion.chat:
            base = {**base, "object": "chat.completion.chunk"}
        with self._running(completion):
            await asyncio.sleep(self.options.sim_ttft)
            for number, event in enumerate(completion_events(completion, base, text)):
                await asyncio.sleep(self.options.sim_itl if 0 < number < completion.max_tokens else 0.0)
                yield f"data: {json.dumps(event)}\n\n".encode()
        yield b"data: [DONE]\n\n"

    @contextlib.contextmanager
    def _running(self, completion: Completion) -> Iterator[None]:
        """Counts a request as running, and as done only when it came to its end."""
        self.counters.running += 1
        try:
            yield
            self.counters.requests += 1
            self.counters.prompt_tokens += completion.prompt_tokens
            self.counters.generated_tokens += completion.max_tokens
        finally:
            self.counters.running -= 1


async def answer_as_follower(request: Request) -> Answer:
    """SGLang's dummy server on a follower: it says 200 to a probe, whatever the state of the replica."""
    if request.path in ("/ping", "/health", "/health_generate"):
        return Response(200, b"", "text/plain")
    return json_response(404, {"detail": "Not Found"})


class Door:
    """The HTTP port: bound and opened to connections when the dialect does so."""

    def __init__(self, host: str, port: int, dialect: Dialect, server: HttpServer, late_seconds: float, log: Log) -> None:
        self._host, self._port = host, port
        self._dialect = dialect
        self._server = server
        self._late_seconds = late_seconds
        self._log = log
        self._socket: socket.socket | None = None
        self._open = False

    async def enter(self, phase: Phase) -> None:
        """Raises EngineExit when the port is not to be had."""
        if self._socket is None and phase >= self._dialect.binds_at:
            self._socket = self._attempt_bind()
        if self._socket is not None and not self._open and phase >= self._dialect.listens_at:
            await asyncio.sleep(self._late_seconds)
            try:
                await self._server.listen(self._socket)
            except OSError as error:
                raise EngineExit(self._dialect.port_taken_code, self._busy(error)) from error
            self._open = True
            self._log.info(f"listening on http://{self._host}:{self._socket.getsockname()[1]}")

    def _attempt_bind(self) -> socket.socket:
        door = socket.socket(socket.AF_INET6 if ":" in self._host else socket.AF_INET, socket.SOCK_STREAM)
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            door.bind((self._host, self._port))
        except (OSError, OverflowError) as error:
            door.close()
            raise EngineExit(self._dialect.port_taken_code, self._busy(error)) from error
        return door

    def _busy(self, error: Exception) -> str:
        return f"OSError: couldn't bind HTTP server socket, address {self._host}, port {self._port}: {error}"

    def close(self) -> None:
        self._server.close()
        if self._socket is not None:
            self._socket.close()


# -------------------------------------------------------------------------------------------------------------- engine


class Engine:
    """The life of one node rank, from start to exit code. To be made inside a running event loop."""

    def __init__(self, options: argparse.Namespace, dialect: Dialect, key: str | None, catalog: Catalog, workers: Workers, log: Log) -> None:
        self._options = options
        self._dialect = dialect
        self._workers = workers
        self._log = log
        self._phase = Phase.LOADING
        self._death: str | None = None
        self._leader_said_shutdown = False
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[EngineExit] = self._loop.create_future()
        self._ranks: Ranks | None = None
        self._door = self._make_door(key, catalog)

    def _make_door(self, key: str | None, catalog: Catalog) -> Door | None:
        options, dialect = self._options, self._dialect
        if not dialect.serves_http(options):
            return None
        api = Api(options, dialect, catalog, key, lambda: self._phase, lambda: self._death, self._dead_engine_asked)
        is_dummy = dialect.name == "sglang" and options.node_rank > 0
        server = HttpServer(answer_as_follower if is_dummy else api.answer, dialect.error, self._log)
        host = dialect.default_host if options.host is None else options.host
        port = dialect.default_port if options.port is None else options.port
        return Door(host, port, dialect, server, options.sim_listen_late, self._log)

    async def run(self, started: float) -> EngineExit:
        """Live until something ends this rank. `started` is the time.monotonic() of the process's start."""
        self._loop.set_exception_handler(lambda _loop, context: self._log.info(f"internal error: {context.get('exception') or context['message']}"))
        # llama-server has no handler before it is ready: SIGTERM just kills it.
        if self._dialect.name != "llama.cpp" or self._options.sim_ignore_term:
            self._handle_signals()
        if self._options.sim_exit_after is not None:
            delay = self._options.sim_exit_after - (time.monotonic() - started)
            self._loop.call_later(max(delay, 0), self._finish, self._options.sim_exit_code, "simulated: the engine ends by itself")
        self._workers.watch(self._loop, self._worker_ended)
        coming_up = asyncio.ensure_future(self._come_up(started))
        coming_up.add_done_callback(self._came_up)
        try:
            return await self._end
        finally:
            coming_up.cancel()
            await asyncio.sleep(0)  # lets a last answer or word to a peer leave
            if self._door is not None:
                self._door.close()
            self._workers.stop()

    async def _come_up(self, started: float) -> None:
        options = self._options
        await self._enter(Phase.LOADING)
        if options.nnodes > 1:
            self._ranks = Ranks(options, own_addresses(os.environ, self._dialect.address_variables), self._log, self._peer_told)
            await self._ranks.connect()
        self._log.info(f"loading the model {options.model}")
        await asyncio.sleep(options.sim_load_seconds)
        if options.sim_fail is not None:
            raise EngineExit(1, options.sim_fail)
        self._workers.hold()
        if self._ranks is not None:
            await self._ranks.wait_loaded()
        if options.sim_hang:
            await self._loop.create_future()
        await self._enter(Phase.WARMING)
        if self._dialect.warms_up:
            await asyncio.sleep(options.sim_warmup_seconds)
        await self._enter(Phase.READY)
        self._handle_signals()
        self._log.info(f"ready after {time.monotonic() - started:.2f} s")

    async def _enter(self, phase: Phase) -> None:
        self._phase = phase
        if self._door is not None:
            await self._door.enter(phase)

    def _came_up(self, task: asyncio.Future[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, EngineExit):
            self._finish(error.code, error.message)
        elif error is not None:
            self._finish(1, f"internal error of the simulator: {error!r}")

    def _finish(self, code: int, message: str = "") -> None:
        if not self._end.done():
            self._end.set_result(EngineExit(code, message))

    # What may end an engine.

    def _handle_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._signalled)

    def _signalled(self) -> None:
        is_follower = self._options.node_rank > 0 and self._ranks is not None
        if self._options.sim_ignore_term:
            self._log.info("simulated: SIGTERM ignored")
        elif self._dialect.name == "sglang" and is_follower and self._phase == Phase.READY:
            self._log.info("SIGTERM: waiting for the leader's shutdown")
        else:
            self._log.info("shutting down")
            if self._ranks is not None and not is_follower:
                self._ranks.tell_all("shutdown")
            self._finish(0)

    def _worker_ended(self, name: str) -> None:
        # A SIGTERM to the whole process group reaches the workers as well; then the engine's own handler decides.
        self._loop.call_later(0.1, self._worker_lost, name)

    def _worker_lost(self, name: str) -> None:
        if self._end.done():
            return
        if self._dialect.name == "sglang":
            self._die_by_kill(f"Subprocess {name} crashed")
        else:  # vLLM's watchdog stops the server, which then returns as if all were well: vllm#48966
            self._finish(0, f"EngineDeadError: {name} died unexpectedly, shutting down executor.")

    def _peer_told(self, rank: int, word: str) -> None:
        if word == "shutdown" and self._dialect.name == "sglang" and rank == 0:
            self._leader_said_shutdown = True
            self._finish(0, "INFO: the leader shuts the replica down")
        if word != "lost" or self._end.done():
            return
        if self._dialect.name == "sglang":
            self._loop.call_later(0.5, self._die_by_kill, f"rank {rank} is lost")
        elif self._options.node_rank == 0:
            self._death = f"Connection closed by peer (rank {rank})."
        # vLLM's followers wait on in a queue that reconnects in silence: vllm#32136

    def _die_by_kill(self, reason: str) -> None:
        if not self._end.done() and not self._leader_said_shutdown:
            self._log.verbatim(f"SIGQUIT received. {reason}. It usually means one child failed.")
            self._workers.stop()
            os.kill(os.getpid(), signal.SIGKILL)

    def _dead_engine_asked(self) -> None:
        self._log.verbatim(f"EngineDeadError: {self._death}")
        self._loop.call_later(0.2, self._finish, 0)  # the answer goes out first; the exit code is 0, as vLLM's


# -------------------------------------------------------------------------------------------------------- command line


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sim_engine.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", allow_abbrev=False, help="be one node rank of a replica")
    add_engine_options(serve)
    add_simulation_options(serve.add_argument_group("simulation"))
    add_fault_options(serve.add_argument_group("faults", "They hold for every node rank, or only for the one of --sim-fail-rank."))
    devices = commands.add_parser("devices", allow_abbrev=False, help="list the GPUs that an engine started now would see; exit 0 also for none")
    devices.add_argument("--nvml-library", default="libnvidia-ml.so.1", metavar="FILE", help="default: %(default)s")
    return parser


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="file or directory; must exist and be readable, is not looked into")
    parser.add_argument("--dialect", choices=sorted(DIALECTS), default="vllm", help="the engine that is imitated, default %(default)s")
    parser.add_argument("--host", help="address to serve on; default as the dialect's engine")
    parser.add_argument("--port", type=int, help="default as the dialect's engine: 8000, 8080, 30000")
    parser.add_argument("--served-model-name", nargs="+", metavar="NAME", help="default: MODEL")
    parser.add_argument("--lora-modules", nargs="+", default=[], metavar="NAME=PATH", help="adapters; each path must exist")
    parser.add_argument("--enable-lora", action="store_true", help="accepted and not needed")
    parser.add_argument("--quantization", "-q", metavar="METHOD", help="accepted; makes no difference")
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1, metavar="N")
    parser.add_argument("--pipeline-parallel-size", "-pp", type=int, default=1, metavar="N")
    parser.add_argument("--max-model-len", type=token_count, default=4096, metavar="TOKENS", help="context; 1k is 1000, 1K is 1024")
    parser.add_argument("--nnodes", "-n", type=int, default=1, metavar="N", help="nodes of the replica")
    parser.add_argument("--node-rank", "-r", type=int, default=0, metavar="R")
    parser.add_argument("--master-addr", default="127.0.0.1", metavar="HOST", help="where the ranks meet")
    parser.add_argument("--master-port", type=int, default=29501, metavar="PORT")
    parser.add_argument("--headless", action="store_true", help="vllm: open no HTTP port")
    parser.add_argument("--distributed-timeout-seconds", type=float, metavar="SECONDS", help="wait for the other ranks; default 1800")
    parser.add_argument("--metrics", action="store_true", help="llama.cpp: serve /metrics")
    parser.add_argument("--enable-metrics", action="store_true", help="sglang: serve /metrics")
    parser.add_argument("--config", metavar="FILE", help="sglang: YAML file with `api-key: ...`; other keys are ignored")


def add_simulation_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--sim-load-seconds", type=float, default=0.0, metavar="SECONDS", help="how long loading takes")
    group.add_argument("--sim-warmup-seconds", type=float, default=0.3, metavar="SECONDS", help="sglang: 503 for this long, default %(default)s")
    group.add_argument("--sim-ttft", type=float, default=0.0, metavar="SECONDS", help="time to the first token")
    group.add_argument("--sim-itl", type=float, default=0.0, metavar="SECONDS", help="time between tokens")
    group.add_argument("--sim-gpu-mib", type=int, default=0, metavar="MIB", help="memory to hold on each visible GPU")
    group.add_argument("--sim-process-directory", metavar="DIRECTORY", help="process directory of the fake NVML; default: the variable SIM_PROCESS_DIRECTORY")
    group.add_argument(
        "--sim-spawn-worker",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="one child process for each visible GPU holds its memory; default: as the dialect's engine (llama.cpp: no children)",
    )


def add_fault_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--sim-fail-rank", type=int, metavar="R", help="the node rank that has the faults; default: every rank")
    group.add_argument("--sim-fail", metavar="TEXT", help="print TEXT and exit 1 when loading")
    group.add_argument("--sim-hang", action="store_true", help="hold the memory, but never get ready")
    group.add_argument("--sim-listen-late", type=float, default=0.0, metavar="SECONDS", help="open the HTTP port this much later")
    group.add_argument("--sim-exit-after", type=float, metavar="SECONDS", help="end this long after the start")
    group.add_argument("--sim-exit-code", type=int, default=1, metavar="CODE", help="exit code of --sim-exit-after, default %(default)s")
    group.add_argument("--sim-ignore-term", action="store_true", help="SIGTERM does nothing")
    group.add_argument("--sim-orphans", action="store_true", help="workers outlive the engine and keep their memory; SIGTERM to themselves ends them")
    group.add_argument("--sim-no-gpu", action="store_true", help="run on the CPU: a warning, no memory held, healthy")
    group.add_argument("--sim-gpu-skip", action="append", default=[], metavar="GPU", help="hold nothing on this visible GPU; may be repeated")
    group.add_argument("--sim-gpu-extra", action="append", default=[], metavar="GPU", help="hold memory on this GPU, which was not given; may be repeated")


def disarm_faults(options: argparse.Namespace) -> None:
    """Take the faults off a rank that is not to have them."""
    if options.sim_fail_rank in (None, options.node_rank):
        return
    options.sim_fail = options.sim_exit_after = None
    options.sim_hang = options.sim_ignore_term = options.sim_orphans = options.sim_no_gpu = False
    options.sim_listen_late = 0.0
    options.sim_gpu_skip = options.sim_gpu_extra = []


def token_count(text: str) -> int:
    """`4096`, `4k` (thousand), `4K` (1024), or `auto`, as vLLM reads --max-model-len."""
    if text == "auto":
        return 4096
    factor = {"k": 1000, "K": 1024}.get(text[-1:], 1)
    return int(text[:-1] if factor > 1 else text) * factor


def check_options(options: argparse.Namespace, dialect: Dialect) -> None:
    """Raises EngineExit for what a real engine refuses at its start."""
    world = options.tensor_parallel_size * options.pipeline_parallel_size
    if options.tensor_parallel_size < 1 or options.pipeline_parallel_size < 1 or options.nnodes < 1:
        raise EngineExit(1, "ValueError: parallel sizes and --nnodes must be at least 1")
    if options.nnodes > 1 and not dialect.has_ranks:
        raise EngineExit(1, f"error: invalid argument: --nnodes ({dialect.name} has no node ranks)")
    if not 0 <= options.node_rank < options.nnodes:
        raise EngineExit(1, f"ValueError: node_rank {options.node_rank} must be from 0 to {options.nnodes - 1}")
    if world % options.nnodes:
        raise EngineExit(1, f"ValueError: world size ({world}) is not divisible by nnodes ({options.nnodes})")
    check_readable(options.model, "model")


def check_readable(path: str, what: str) -> None:
    """Raises EngineExit unless `path` is a file or directory that can be read."""
    try:
        if os.path.isdir(path):
            os.listdir(path)
        else:
            with open(path, "rb") as file:
                file.read(1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise EngineExit(1, f"error: failed to load {what}, '{path}': {reason}") from error


def parse_adapters(items: Sequence[str]) -> tuple[Adapter, ...]:
    """Raises EngineExit for one that is not NAME=PATH or whose path cannot be read."""
    adapters = []
    for item in items:
        name, equals, path = item.partition("=")
        if not (name and equals and path) or "," in item:
            raise EngineExit(1, f"error: --lora-modules: '{item}' is not NAME=PATH")
        check_readable(path, "LoRA adapter")
        adapters.append(Adapter(name, path))
    return tuple(adapters)


def serve(options: argparse.Namespace, environ: Mapping[str, str], started: float) -> int:
    """Run one node rank; returns its exit code."""
    dialect = DIALECTS[options.dialect]
    log = Log(options.node_rank, sys.stderr if dialect.log_stream == "stderr" else sys.stdout)
    errors = Log(options.node_rank, sys.stderr)
    disarm_faults(options)
    try:
        check_options(options, dialect)
        names = tuple(options.served_model_name or [options.model])
        catalog = Catalog(options.model, names, parse_adapters(options.lora_modules), options.max_model_len, int(time.time()))
        key = dialect.key(options, environ)
        workers = workers_for(options, dialect, environ, Driver().gpus)
    except EngineExit as refusal:
        errors.verbatim(refusal.message)
        return refusal.code
    if options.sim_no_gpu:
        errors.verbatim("warning: no usable GPU found, --gpu-layers option will be ignored")
    workers.start()
    end = asyncio.run(live(options, dialect, key, catalog, workers, log, started))
    if end.message:
        errors.verbatim(end.message)
    return end.code


async def live(options: argparse.Namespace, dialect: Dialect, key: str | None, catalog: Catalog, workers: Workers, log: Log, started: float) -> EngineExit:
    return await Engine(options, dialect, key, catalog, workers, log).run(started)


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    started = time.monotonic()
    options = build_parser().parse_args(arguments)
    if options.command == "devices":
        print(device_listing(visible_gpus(visible_items(environ), Driver(options.nvml_library).gpus())))
        return 0
    return serve(options, environ, started)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
