# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Try the network between the ranks of a replica before anything of it is touched.

    preflight.py start DIRECTORY     begin in the background and return at once
    preflight.py run DIRECTORY       the same in the foreground, with the environment that the shard will have
    preflight.py worker DIRECTORY N  one process of the all-reduce

DIRECTORY holds request.json and gets result.json, written by rename. Two things are tried on every rank at once:

1. Sockets: each rank listens on planned ports of its planned address, and every other rank connects from its own planned address, sends a
   quarter of a MiB and wants it back. That shows which pair of hosts cannot talk, and a path that passes small packets only (another MTU).
2. If the engine's own Python has torch: one all-reduce over all GPUs with NCCL (Gloo on CPUs), whose NCCL_DEBUG lines tell interface, HCAs and
   whether RDMA or sockets carried it.

Everything is bounded by `seconds` of the request; SIGALRM ends what hangs. Standard library only, but for torch where there is one.
"""

from __future__ import annotations

import datetime
import errno
import json
import os
import resource
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

MAGIC = "rankzero-preflight"
PAYLOAD = 256 * 1024
CONNECT_SECONDS = 3.0
ECHO_SECONDS = 5.0
RETRY_SECONDS = 0.2
ALARM_SECONDS = 15
NCCL_SUBSYSTEMS = "INIT,NET,ENV"


def read(directory: str) -> dict[str, Any]:
    with open(os.path.join(directory, "request.json"), encoding="utf-8") as stream:
        request: dict[str, Any] = json.load(stream)
    return request


def write(path: str, content: Mapping[str, Any]) -> None:
    draft = "%s.%d" % (path, os.getpid())
    with open(draft, "w", encoding="utf-8") as stream:
        json.dump(content, stream)
    os.rename(draft, path)


# ---- the background


def start(directory: str) -> int:
    """Detach, and become the engine's own Python with exactly the shard's environment."""
    request = read(directory)
    if os.fork():
        return 0
    os.setsid()
    log = os.open(os.path.join(directory, "log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    try:
        os.execve(request["python"], [request["python"], os.path.abspath(__file__), "run", directory], request["env"])
    except OSError as error:
        write(
            os.path.join(directory, "result.json"),
            {"done": True, "sockets": [], "collective": None, "problem": "%s cannot be run: %s" % (request["python"], error.strerror)},
        )
    return 1


def run(directory: str) -> int:
    request = read(directory)
    signal.alarm(int(request["seconds"] + request["collective_seconds"]) + ALARM_SECONDS)
    result: dict[str, Any] = {"done": False, "sockets": [], "collective": None, "problem": None, "python": sys.executable}
    try:
        result["sockets"] = sockets(request)
        result["collective"] = collective(request, directory, all(row["ok"] for row in result["sockets"]))
    except OSError as error:
        result["problem"] = str(error)
    result["done"] = True
    write(os.path.join(directory, "result.json"), result)
    return 0


# ---- sockets


class Server(socketserver.ThreadingTCPServer):
    """Echoes what a rank with the right token sends."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: str, port: int, token: str, rank: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.token, self.rank = token, rank
        self.served: set[int] = set()
        super().__init__((address, port), Echo)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A peer that goes in the middle is its own affair: it says so itself."""


class Echo(socketserver.StreamRequestHandler):
    timeout = ECHO_SECONDS

    def handle(self) -> None:
        server: Any = self.server
        words = self.rfile.readline(200).decode("ascii", "replace").split()
        if len(words) != 3 or words[:2] != [MAGIC, server.token] or not words[2].isdigit():
            return
        self.wfile.write(("%s %s %d\n" % (MAGIC, server.token, server.rank)).encode())
        self.wfile.write(self.rfile.read(PAYLOAD))
        self.wfile.flush()
        server.served.add(int(words[2]))


def sockets(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row for every port of every peer, `{rank, address, port, what, ok, problem, error, seconds}`, and for own ports that could not be opened."""
    deadline = time.monotonic() + request["seconds"]
    rows: list[dict[str, Any]] = []
    servers = [server for server in (listen(request, entry, rows) for entry in request["listen"]) if server]
    threads = []
    for peer in request["peers"]:
        row = {**peer, "ok": False, "problem": "refused", "error": None, "seconds": None}
        rows.append(row)
        threads.append(threading.Thread(target=reach, args=(request, row, deadline), daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline + CONNECT_SECONDS + ECHO_SECONDS - time.monotonic()))
    peers = {peer["rank"] for peer in request["peers"]}
    while time.monotonic() < deadline and any(not peers <= server.served for server in servers):
        time.sleep(0.05)
    for server in servers:
        server.shutdown()
        server.server_close()
    return rows


def listen(request: Mapping[str, Any], entry: Mapping[str, Any], rows: list[dict[str, Any]]) -> Server | None:
    try:
        server = Server(request["address"], entry["port"], request["token"], request["rank"])
    except OSError as error:
        rows.append(
            {
                "rank": request["rank"],
                "address": request["address"],
                **entry,
                "ok": False,
                "problem": "listen",
                "error": error.strerror or str(error),
                "seconds": None,
            }
        )
        return None
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    return server


def reach(request: Mapping[str, Any], row: dict[str, Any], deadline: float) -> None:
    """Again and again until the peer answers: it may start later. The last problem is the one that is told."""
    while True:
        began = time.monotonic()
        problem, error = attempt(request, row)
        if problem is None:
            row.update(ok=True, problem=None, error=None, seconds=round(time.monotonic() - began, 4))
            return
        row.update(problem=problem, error=error)
        if time.monotonic() >= deadline:
            return
        time.sleep(RETRY_SECONDS)


def attempt(request: Mapping[str, Any], row: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """(None, None), or what went wrong: refused, silent, unreachable, source, stranger, large."""
    try:
        connection = socket.create_connection((row["address"], row["port"]), CONNECT_SECONDS, (request["address"], 0))
    except ConnectionRefusedError as error:
        return "refused", error.strerror
    except (socket.timeout, TimeoutError):  # noqa: UP041 - they are one from Python 3.10
        return "silent", "no answer in %d s" % CONNECT_SECONDS
    except OSError as error:
        return "source" if error.errno == errno.EADDRNOTAVAIL else "unreachable", error.strerror or str(error)
    with connection:
        return exchange(connection, request, row)


def exchange(connection: socket.socket, request: Mapping[str, Any], row: Mapping[str, Any]) -> tuple[str | None, str | None]:
    connection.settimeout(ECHO_SECONDS)
    payload, greeted, got = os.urandom(PAYLOAD), False, 0
    try:
        connection.sendall(("%s %s %d\n" % (MAGIC, request["token"], request["rank"])).encode())
        with connection.makefile("rb") as stream:
            if stream.readline(200).decode("ascii", "replace").split() != [MAGIC, request["token"], str(row["rank"])]:
                return "stranger", "another program answers there"
            greeted = True
            connection.sendall(payload)
            answer = stream.read(PAYLOAD)
            got = len(answer)
        return (None, None) if answer == payload else ("large", "%d of %d bytes came back" % (got, PAYLOAD))
    except OSError as error:
        return "large" if greeted else "stranger", "%s after %s" % (error.strerror or "no answer", "the greeting" if greeted else "connecting")


# ---- the all-reduce


def collective(request: Mapping[str, Any], directory: str, connected: bool) -> dict[str, Any] | None:
    """`{backend, ok, skipped, workers: [{local, ok, error}], nccl: [lines]}`; None where none was asked for."""
    if not request["backend"]:
        return None
    told: dict[str, Any] = {"backend": request["backend"], "ok": None, "skipped": None, "workers": [], "nccl": []}
    if not connected:
        return {**told, "skipped": "sockets between the ranks fail already"}
    problem = torch_problem(request["collective_seconds"])
    return {**told, "skipped": problem} if problem else workers(request, directory, told)


def torch_problem(seconds: float) -> str | None:
    """Why this Python cannot be used for an all-reduce, or None."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", "import torch.distributed"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return "%s does not import torch within %d s" % (sys.executable, seconds)
    last = (done.stderr.strip().splitlines() or ["no reason given"])[-1][:200]
    return "%s cannot import torch: %s" % (sys.executable, last) if done.returncode else None


def workers(request: Mapping[str, Any], directory: str, told: dict[str, Any]) -> dict[str, Any]:
    """One process for each GPU of the rank. They hold memory only as long as this runs."""
    allow_pinning()
    started = []
    for local in range(request["local_size"]):
        debug = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": NCCL_SUBSYSTEMS, "NCCL_DEBUG_FILE": os.path.join(directory, "nccl.%d" % local)}
        started.append(
            subprocess.Popen(
                [sys.executable, os.path.abspath(__file__), "worker", directory, str(local)], stdin=subprocess.DEVNULL, env={**os.environ, **debug}
            )
        )
    deadline = time.monotonic() + request["collective_seconds"]
    for process in started:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
    for local, process in enumerate(started):
        hung = process.poll() is None
        process.kill()
        process.wait()
        told["workers"].append(outcome(directory, local, hung, process.returncode))
        told["nccl"] += lines_of(os.path.join(directory, "nccl.%d" % local))
    told["ok"] = all(entry["ok"] for entry in told["workers"])
    return told


def outcome(directory: str, local: int, hung: bool, code: int) -> dict[str, Any]:
    try:
        with open(os.path.join(directory, "worker.%d" % local), encoding="utf-8") as stream:
            told: dict[str, Any] = json.load(stream)
        return told
    except (OSError, ValueError):
        return {"local": local, "ok": False, "error": "it did not finish in time" if hung else "it ended with code %d" % code}


def lines_of(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return [line.strip()[:400] for line in stream][:2000]
    except OSError:
        return []


def allow_pinning() -> None:
    """The unit will have LimitMEMLOCK=infinity; RDMA cannot register memory without it."""
    try:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    except (OSError, ValueError):
        pass


def worker(directory: str, local: int) -> int:
    """An all-reduce of one MiB in which every process adds its number: the sum is known."""
    request = read(directory)
    told: dict[str, Any] = {"local": local, "ok": False, "error": None}
    try:
        import torch
        from torch import distributed

        on_gpu = request["backend"] == "nccl"
        device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(device)
        number, world = request["first"] + local, request["world"]
        distributed.init_process_group(
            request["backend"], init_method=request["meeting"], rank=number, world_size=world, timeout=datetime.timedelta(seconds=request["collective_seconds"])
        )
        values = torch.full((262144,), float(number + 1), device=device)
        distributed.all_reduce(values)
        wanted, got = world * (world + 1) / 2, float(values[0].item())
        told.update(ok=got == wanted, error=None if got == wanted else "the sum is %s, not %s" % (got, wanted))
        distributed.destroy_process_group()
    except Exception as error:  # whatever torch raises is the finding
        told["error"] = ("%s: %s" % (type(error).__name__, error)).splitlines()[0][:400]
    write(os.path.join(directory, "worker.%d" % local), told)
    return 0 if told["ok"] else 1


def main(words: Sequence[str]) -> int:
    if len(words) == 2 and words[0] in ("start", "run"):
        return start(words[1]) if words[0] == "start" else run(words[1])
    if len(words) == 3 and words[0] == "worker":
        return worker(words[1], int(words[2]))
    sys.stderr.write("usage: preflight.py start|run DIRECTORY\n")
    return 64


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
