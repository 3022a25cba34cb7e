# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The preflight program over real sockets on loopback and a stand-in for torch, and the verdict over what NCCL writes."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from ansible_collections.rankzero.inference.plugins.module_utils import preflight as on_host
from ansible_collections.rankzero.inference.plugins.plugin_utils import preflight

PROGRAM = pathlib.Path(__file__).resolve().parent.parent.parent / "roles/replica/files/preflight.py"
# torch as far as the program uses it: processes meet at rank 0's port, and the sum goes back to all. WRONG makes the sum wrong, HANG never ends.
TORCH = """import os, socket, time
class _Cuda:
    @staticmethod
    def set_device(device): pass
cuda = _Cuda()
def device(kind, index=0): return (kind, index)
class Tensor:
    def __init__(self, value): self.value = value
    def __getitem__(self, index): return self
    def item(self): return self.value
def full(shape, value, device=None): return Tensor(value)
"""
DISTRIBUTED = """import os, socket, time
NCCL = "h:1:1 [0] NCCL INFO NET/Socket : Using [0]lo:127.0.0.1<0>\\nh:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0\\n"
def init_process_group(backend, init_method, rank, world_size, timeout):
    global state
    if os.environ.get("FAKE_TORCH") == "hang": time.sleep(60)
    host, port = init_method[6:].rsplit(":", 1)
    state = (host, int(port), rank, world_size, timeout.total_seconds())
    if "NCCL_DEBUG_FILE" in os.environ:
        open(os.environ["NCCL_DEBUG_FILE"], "w").write(NCCL)
    if backend not in ("gloo", "nccl"): raise RuntimeError("no such backend")
def all_reduce(tensor):
    host, port, rank, world, seconds = state
    if rank == 0:
        server = socket.create_server((host, port)); server.settimeout(seconds)
        peers = [server.accept()[0] for _ in range(world - 1)]
        tensor.value += sum(float(peer.recv(50)) for peer in peers) + (1 if os.environ.get("FAKE_TORCH") == "wrong" else 0)
        for peer in peers: peer.sendall(str(tensor.value).encode()); peer.close()
        return
    for _ in range(200):
        try: peer = socket.create_connection((host, port)); break
        except OSError: time.sleep(0.05)
    peer.sendall(str(tensor.value).encode()); tensor.value = float(peer.recv(50))
def destroy_process_group(): pass
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def requests(folder: pathlib.Path, count: int, port: int, seconds: float = 6, **more: Any) -> list[pathlib.Path]:
    """A directory with request.json for each rank; rank r has the address 127.0.7.(r + 1)."""
    meeting = f"tcp://127.0.7.1:{free_port()}"
    made = []
    for rank in range(count):
        place = folder / f"rank{rank}"
        place.mkdir()
        (place / "preflight.py").write_text(PROGRAM.read_text())
        peers = [{"rank": other, "address": f"127.0.7.{other + 1}", "port": port, "what": "between all ranks"} for other in range(count) if other != rank]
        request = {
            "rank": rank,
            "address": f"127.0.7.{rank + 1}",
            "token": "t0ken",
            "listen": [{"port": port, "what": "between all ranks"}],
            "peers": peers,
            "seconds": seconds,
            "collective_seconds": 20,
            "backend": None,
            "local_size": 1,
            "first": rank,
            "world": count,
            "meeting": meeting,
            "python": sys.executable,
            "env": dict(os.environ),
            **more,
        }
        (place / "request.json").write_text(json.dumps(request))
        made.append(place)
    return made


def outcome(places: list[pathlib.Path], python: str = sys.executable, **environment: str) -> list[dict[str, Any]]:
    running = [subprocess.Popen([python, str(place / "preflight.py"), "run", str(place)], env={**os.environ, **environment}) for place in places]
    for process in running:
        assert process.wait(60) == 0
    return [json.loads((place / "result.json").read_text()) for place in places]


def test_three_ranks_reach_each_other(tmp_path: pathlib.Path) -> None:
    results = outcome(requests(tmp_path, 3, free_port()))
    assert all(result["done"] and result["problem"] is None and result["collective"] is None for result in results)
    assert [[(row["rank"], row["ok"]) for row in result["sockets"]] for result in results] == [
        [(1, True), (2, True)],
        [(0, True), (2, True)],
        [(0, True), (1, True)],
    ]


def test_what_fails_is_told_apart(tmp_path: pathlib.Path) -> None:
    """Rank 1 is not started, at rank 2's port another program answers, rank 3 greets and then swallows what is large."""
    port = free_port()
    place = requests(tmp_path, 4, port, seconds=1)[0]

    def answer(address: str, greeting: bytes) -> socket.socket:
        server = socket.create_server((address, port))

        def serve() -> None:
            while True:
                try:
                    connection = server.accept()[0]
                except OSError:
                    return
                connection.sendall(greeting)
                kept.append(connection)

        threading.Thread(target=serve, daemon=True).start()
        return server

    kept: list[socket.socket] = []
    servers = [answer("127.0.7.3", b"SSH-2.0-OpenSSH\n"), answer("127.0.7.4", b"rankzero-preflight t0ken 3\n")]
    try:
        result = outcome([place])[0]
    finally:
        for one in [*servers, *kept]:
            one.close()
    assert [(row["rank"], row["problem"]) for row in result["sockets"]] == [(1, "refused"), (2, "stranger"), (3, "large")]
    with socket.create_server(("127.0.7.1", port)):
        told = outcome([place])[0]["sockets"][0]
    assert (told["rank"], told["problem"], told["port"]) == (0, "listen", port)
    request = json.loads((place / "request.json").read_text())
    (place / "request.json").write_text(json.dumps({**request, "address": "192.0.2.7"}))
    assert {row["problem"] for row in outcome([place])[0]["sockets"]} == {"listen", "source"}


@pytest.fixture(scope="module")
def torch_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A virtual environment whose torch is the stand-in above."""
    folder = tmp_path_factory.mktemp("build")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    package = next(folder.glob("lib/python*/site-packages")) / "torch"
    (package / "distributed").mkdir(parents=True)
    (package / "__init__.py").write_text(TORCH)
    (package / "distributed/__init__.py").write_text(DISTRIBUTED)
    return str(folder / "bin/python3")


def test_an_all_reduce_over_all_processes(tmp_path: pathlib.Path, torch_python: str) -> None:
    places = requests(tmp_path, 2, free_port(), backend="nccl", local_size=2, world=4)
    for rank, place in enumerate(places):
        request = json.loads((place / "request.json").read_text())
        (place / "request.json").write_text(json.dumps({**request, "first": rank * 2}))
    for result in outcome(places, torch_python):
        assert result["collective"]["ok"] is True and [entry["ok"] for entry in result["collective"]["workers"]] == [True, True], result
    assert preflight.carried_by(preflight.parse_nccl(result["collective"]["nccl"])) == "sockets over lo"


@pytest.mark.parametrize(("fault", "error"), [("wrong", "the sum is 4.0, not 3.0"), ("hang", "it did not finish in time")])
def test_an_all_reduce_that_fails_is_bounded_and_told(tmp_path: pathlib.Path, torch_python: str, fault: str, error: str) -> None:
    began = time.monotonic()
    results = outcome(requests(tmp_path, 2, free_port(), backend="gloo", collective_seconds=3), torch_python, FAKE_TORCH=fault)
    assert [result["collective"]["ok"] for result in results] == [False, False] and time.monotonic() - began < 30
    assert results[0]["collective"]["workers"][0]["error"] == error


def test_without_torch_it_says_so(tmp_path: pathlib.Path) -> None:
    result = outcome(requests(tmp_path, 1, free_port(), backend="nccl"), "/usr/bin/python3")[0]
    assert result["collective"]["ok"] is None and "cannot import torch" in result["collective"]["skipped"]


# ---- on a host


def run(words: list[str], **more: Any) -> tuple[int, str, str]:
    done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False, cwd=more.get("cwd"))
    return done.returncode, done.stdout, done.stderr


def test_started_returns_at_once_and_collected_leaves_nothing(tmp_path: pathlib.Path) -> None:
    request = json.loads((requests(tmp_path, 2, free_port(), seconds=8)[0] / "request.json").read_text())
    told = on_host.start(str(tmp_path), "glm", {**request, "env": {"ONLY": "this"}}, PROGRAM.read_text(), run)
    assert told == {"python": sys.executable, "collective": None}
    place = pathlib.Path(on_host.directory(str(tmp_path), "glm"))
    until = time.monotonic() + 5
    while not (pids := on_host.marked("glm", str(place))) and time.monotonic() < until:
        time.sleep(0.05)  # it is on its way to the environment of the request
    assert len(pids) == 1 and place.stat().st_mode & 0o777 == 0o700
    assert (
        set(pathlib.Path(f"/proc/{pids[0]}/environ").read_bytes().split(b"\0")) >= {b"ONLY=this"}
        and b"HOME=" not in pathlib.Path(f"/proc/{pids[0]}/environ").read_bytes()
    )
    answer = on_host.collect(str(tmp_path), "glm", 20)
    assert answer["result"]["sockets"][0]["problem"] == "refused"
    assert on_host.marked("glm", str(place)) == [] and not place.parent.exists()
    assert on_host.collect(str(tmp_path), "glm", 20) == {"found": False, "result": None, "log": []}


def test_what_hangs_or_dies_is_swept_and_its_last_words_told(tmp_path: pathlib.Path) -> None:
    request = json.loads((requests(tmp_path, 2, free_port(), seconds=60)[0] / "request.json").read_text())
    on_host.start(str(tmp_path), "glm", request, PROGRAM.read_text(), run)
    assert on_host.sweep(str(tmp_path), "glm") and not on_host.sweep(str(tmp_path), "glm")
    broken = PROGRAM.read_text().replace("def run(directory: str) -> int:", "def run(directory: str) -> int:\n    raise SystemExit('its last words')")
    on_host.start(str(tmp_path), "glm", request, broken, run)
    assert on_host.collect(str(tmp_path), "glm", 20) == {"found": True, "result": None, "log": ["its last words"]}


def test_the_python_of_a_program(tmp_path: pathlib.Path) -> None:
    def made(name: str, content: bytes) -> str:
        (tmp_path / name).write_bytes(content)
        return str(tmp_path / name)

    assert on_host.interpreter(made("vllm", b"#!%s -s\nimport vllm\n" % sys.executable.encode())) == sys.executable
    assert on_host.interpreter(sys.executable) == sys.executable
    (tmp_path / "python").symlink_to(sys.executable)
    movable = """#!/bin/sh
'''exec' "$(dirname -- "$(realpath -- "$0")")"/python "$0" "$@"
' '''
import vllm
"""
    assert on_host.interpreter(made("movable", movable.encode())) == str(tmp_path / "python")
    for odd in (made("llama-server", b"\x7fELF"), made("script", b"#!/bin/sh\n"), made("gone", b"#!/no/such/python3\n"), "/no/such/file", ""):
        assert on_host.interpreter(odd) is None


# ---- what is asked, and what the answers mean

# Lines as NCCL 2.27 and 2.21 write them.
INFINIBAND = """gpu-a:4711:4711 [0] NCCL INFO Bootstrap: Using mgmt0:10.20.0.1<0>
gpu-a:4711:4711 [0] NCCL INFO NCCL version 2.27.5+cuda12.9
gpu-a:4711:4801 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB mgmt0:10.20.0.1<0>
gpu-a:4711:4801 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0/GDRDMA
gpu-a:4711:4801 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[0] [send] via NET/IB/1/GDRDMA
gpu-a:4711:4801 [0] NCCL INFO Channel 02/0 : 0[0] -> 2[1] via P2P/CUMEM/read""".splitlines()
ROCE = """gpu-a:1:2 [0] NCCL INFO NET/IB : Using [0]mlx5_2:1/RoCE ; OOB eth0:10.0.0.1<0>
gpu-a:1:2 [0] NCCL INFO Channel 00 : 0[1b000] -> 1[1b000] [send] via NET/IB/0""".splitlines()
SOCKETS = """gpu-a:1:2 [0] NCCL INFO NET/Socket : Using [0]mgmt0:10.20.0.1<0>
gpu-a:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0""".splitlines()
BROKEN = """gpu-a:1:2 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB mgmt0:10.20.0.1<0>
gpu-a:1:2 [0] transport/net_ib.cc:2310 NCCL WARN NET/IB: Got completion from peer 10.0.0.2<41234> with status=IBV_WC_RETRY_EXC_ERR(12)""".splitlines()


@pytest.mark.parametrize(
    ("lines", "carried"),
    [
        (INFINIBAND, "RDMA over mlx5_0:1, mlx5_1:1 with GPUDirect"),
        (ROCE, "RDMA over mlx5_2:1, without GPUDirect"),
        (SOCKETS, "sockets over mgmt0"),
        (SOCKETS + ROCE, "RDMA and sockets, both (NET/IB, NET/Socket)"),
        (INFINIBAND[-1:], "NVLink, PCIe or shared memory (P2P)"),
        ([], None),
    ],
)
def test_what_carried_it(lines: list[str], carried: str | None) -> None:
    assert preflight.carried_by(preflight.parse_nccl(lines)) == carried


def test_nccl_says_version_and_bootstrap() -> None:
    told = preflight.parse_nccl(INFINIBAND)
    assert (told["version"], told["bootstrap"], told["transports"]) == ("2.27.5+cuda12.9", "mgmt0", {"NET/IB": 2, "P2P": 1})


def plan(nodes: int = 3, **more: Any) -> dict[str, Any]:
    tie = {"address": "10.0.0.1", "port": 29400, "run_ports": [29500, 29501, 29502]} if nodes > 1 else None
    shards = {
        f"n{rank + 1}": {
            "rank": rank,
            "address": f"10.0.0.{rank + 1}",
            "interface": "mgmt0",
            "gpus": [f"GPU-{rank}0", f"GPU-{rank}1"],
            "tie": tie,
            "leader_port": 29500,
            "listen_ports": [{"address": "10.0.0.1", "port": 8000, "what": "HTTP"}, {"address": "0.0.0.0", "port": 29500, "what": "the ranks' rendezvous"}]
            if rank == 0
            else [],
            "launches": [{"path": "/opt/vllm/bin/vllm", "env": {"NCCL_IB_DISABLE": "0"}}],
        }
        for rank in range(nodes)
    }
    return {"replica": "glm", "engine": "vllm", "fabric": None, "leader": {"address": "10.0.0.1"}, "shards": shards, **more}


def test_what_a_rank_is_told() -> None:
    told = preflight.request(plan(), "n2", {}, True, "t")
    assert told["listen"] == [{"port": 29502, "what": "between all ranks"}]
    assert [(peer["rank"], peer["port"]) for peer in told["peers"]] == [(0, 29502), (0, 29500), (0, 29400), (2, 29502)]
    assert (told["backend"], told["first"], told["world"], told["local_size"], told["meeting"], told["env"]) == (
        "nccl",
        2,
        6,
        2,
        "tcp://10.0.0.1:29501",
        {"NCCL_IB_DISABLE": "0"},
    )


def test_ports_and_gpus_that_are_in_use_are_left_alone() -> None:
    busy = {"n1": {"ports_in_use": [{"port": 29502}, {"port": 29400}], "gpus": [{"uuid": "GPU-01", "index": 1, "processes": [{"shard": "glm/0"}]}]}}
    told = preflight.request(plan(), "n1", busy, True, "t")
    assert told["backend"] is None and told["skipped"] == "GPU 1 of n1 is in use by the running replica"
    assert [end["port"] for end in told["listen"]] == [29501, 29500]
    assert preflight.request(plan(), "n1", {}, False, "t")["skipped"] == "vllm does not use NCCL"
    elsewhere = {"n1": {"ports_in_use": [{"port": 29502, "address": "10.9.9.9"}, {"port": 29501, "address": "127.0.0.1"}]}}
    told = preflight.request(plan(), "n1", elsewhere, True, "t")
    assert told["listen"][0]["port"] == 29502 and told["skipped"] == "no second port of the replica is free on all hosts", "torch listens at all addresses"
    single = preflight.request(plan(1), "n1", {}, True, "t")
    assert (single["listen"], single["peers"], single["meeting"]) == ([], [], "tcp://127.0.0.1:29500")


def found(rank: int, problem: str | None, port: int = 29502, what: str = "between all ranks") -> dict[str, Any]:
    return {"rank": rank, "address": "x", "port": port, "what": what, "ok": problem is None, "problem": problem, "error": None, "seconds": 0.001}


def answered(*rows: dict[str, Any], collective: Any = None) -> dict[str, Any]:
    return {"found": True, "log": [], "result": {"done": True, "problem": None, "sockets": list(rows), "collective": collective}}


def judged(answers: dict[str, Any], one: dict[str, Any] | None = None) -> dict[str, Any]:
    one = one or plan()
    return preflight.verdict(one, answers, {host: {"skipped": None, "backend": None} for host in one["shards"]})


def test_a_pair_is_named_with_interface_and_port() -> None:
    told = judged(
        {"n1": answered(found(1, None), found(2, "silent")), "n2": answered(found(0, None), found(2, None)), "n3": answered(found(0, None), found(1, None))}
    )
    assert told["failures"] == [
        "rank 0 (n1, mgmt0 10.0.0.1) never reaches rank 2 (n3, mgmt0 10.0.0.3) port 29502 (between all ranks): "
        "no answer: a firewall drops it, or there is no way to that host"
    ]
    assert "FAILED" in preflight.text(plan(), told) and "1 of 2" in preflight.text(plan(), told)


def test_a_rank_that_nobody_reaches_is_one_sentence() -> None:
    rows = [found(0, "refused"), found(0, "refused", 29500, "rendezvous")]
    told = judged({"n1": answered(found(1, None), found(2, None)), "n2": answered(*rows, found(2, None)), "n3": answered(*rows, found(1, None))})
    assert len(told["failures"]) == 1 and told["failures"][0].startswith(
        "no other rank reaches rank 0 (n1, mgmt0 10.0.0.1) port 29500 (rendezvous), 29502 (between all ranks): nothing listens"
    )


def test_a_rank_without_an_answer_is_not_blamed_on_its_peers() -> None:
    told = judged(
        {"n1": answered(found(1, "refused"), found(2, None)), "n2": {"result": None, "log": ["Killed"]}, "n3": answered(found(0, None), found(1, "refused"))}
    )
    assert told["failures"] == ["rank 1 (n2, mgmt0 10.0.0.2) gave no answer: Killed"]


def test_an_all_reduce_that_failed_names_peer_hca_and_warning() -> None:
    collective = {
        "backend": "nccl",
        "ok": False,
        "skipped": None,
        "nccl": BROKEN,
        "workers": [{"local": 0, "ok": False, "error": "DistBackendError: NCCL error"}],
    }
    told = judged({"n1": answered(found(1, None), collective=collective), "n2": answered(found(0, None))}, plan(2))
    of_hca = plan(2)
    of_hca["shards"]["n2"].update(address="10.9.9.9", hca_details=[{"gid_address": "10.0.0.2"}])
    assert "peer rank 1 (n2, mgmt0 10.9.9.9)" in judged({"n1": answered(collective=collective), "n2": answered()}, of_hca)["failures"][0]
    assert len(told["failures"]) == 1
    for part in (
        "rank 0 (n1, mgmt0 10.0.0.1): the all-reduce (nccl) failed: DistBackendError",
        "peer rank 1 (n2, mgmt0 10.0.0.2)",
        "HCAs mlx5_0:1",
        "IBV_WC_RETRY_EXC_ERR",
    ):
        assert part in told["failures"][0]


def test_sockets_where_a_fabric_was_chosen_are_a_failure() -> None:
    good = {"backend": "nccl", "ok": True, "skipped": None, "nccl": SOCKETS, "workers": []}
    answers = {host: answered(collective=good) for host in ("n1", "n2")}
    assert judged(answers, plan(2))["ok"] and judged(answers, plan(2))["transport"] == "sockets over mgmt0"
    assert "sockets carried the all-reduce" in judged(answers, plan(2, fabric="roce:10.1.0.0/16"))["failures"][0]
    rdma = {"n1": answered(collective={**good, "nccl": INFINIBAND}), "n2": answered(collective={**good, "nccl": INFINIBAND})}
    assert judged(rdma, plan(2, fabric="ib:x"))["ok"]
