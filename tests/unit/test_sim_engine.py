# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The simulated engine, run as the processes that it is, on loopback addresses."""

from __future__ import annotations

import contextlib
import errno
import http.client
import importlib.util
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SIM_ENGINE = ROOT / "roles" / "replica" / "files" / "sim_engine.py"
BUILD_FAKE_NVML = ROOT / "tests" / "fake_nvml" / "build.py"
PYTHON = os.environ.get("SIM_ENGINE_PYTHON", sys.executable)  # to run this file's engines with another Python
KEY = "a-key-for-tests"
BEARER = {"Authorization": f"Bearer {KEY}"}
JSON = {"Content-Type": "application/json"}
DEADLINE = 30.0  # seconds; generous, for loaded machines


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"waited {DEADLINE} s in vain: {what}")


def free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def alive(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Answer:
    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """The events of a stream; the last must be [DONE]."""
        pieces = [piece for piece in self.body.decode().split("\n\n") if piece]
        assert all(piece.startswith("data: ") for piece in pieces)
        assert pieces.pop() == "data: [DONE]"
        return [json.loads(piece[len("data: ") :]) for piece in pieces]


class Sim:
    """One running simulator."""

    def __init__(self, folder: pathlib.Path, arguments: list[str], environ: dict[str, str], host: str) -> None:
        self.host = host
        self.port = free_port(host)
        self.log_file = folder / f"{self.port}.log"
        self.process_directory = folder / "processes"
        command = [PYTHON, str(SIM_ENGINE), "serve", str(folder / "model"), "--host", host, "--port", str(self.port), *arguments]
        base = {"PATH": os.environ["PATH"], "SIM_PROCESS_DIRECTORY": str(self.process_directory), "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
        with open(self.log_file, "wb") as log:
            self.process = subprocess.Popen(command, env={**base, **environ}, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.pid = self.process.pid

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def ask(self, path: str, body: Any = None, headers: dict[str, str] | None = None, method: str | None = None) -> Answer:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=DEADLINE)
        with contextlib.closing(connection):
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method or ("GET" if data is None else "POST"), path, data, {**({} if data is None else JSON), **(headers or {})})
            reply = connection.getresponse()
            return Answer(reply.status, dict(reply.getheaders()), reply.read())

    def status(self, path: str, headers: dict[str, str] | None = None, method: str | None = None) -> int | None:
        """The status, or None where the connection is refused."""
        try:
            return self.ask(path, headers=headers, method=method).status
        except ConnectionRefusedError:
            return None

    def ready(self) -> Sim:
        wait_for(lambda: "ready after" in self.log or self.process.poll() is not None, "ready")
        assert self.process.poll() is None, self.log
        return self

    def loading(self) -> Sim:
        wait_for(lambda: "loading the model" in self.log, "loading")
        return self

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        assert self.process.poll() is None, self.log
        self.process.send_signal(number)
        return self.exit_code()

    def exit_code(self) -> int:
        # Popen.wait with a timeout polls at up to 50 ms; a pidfd tells at once.
        descriptor = os.pidfd_open(self.pid)
        try:
            assert select.select([descriptor], [], [], DEADLINE)[0], f"it did not end:\n{self.log}"
        finally:
            os.close(descriptor)
        return self.process.wait()

    def children(self) -> list[int]:
        return [int(pid) for pid in pathlib.Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    def held(self) -> dict[int, str]:
        """What stands in the process directory, by pid."""
        if not self.process_directory.exists():
            return {}
        return {int(file.name): file.read_text() for file in self.process_directory.iterdir() if file.name.isdigit()}

    def complete(self, **asked: Any) -> Answer:
        return self.ask("/v1/completions", {"prompt": "How are you?", **asked})


StartSim = Callable[..., Sim]


@pytest.fixture()
def start(tmp_path: pathlib.Path) -> Iterator[StartSim]:
    """Starts simulators; all have ended after the test."""
    yield from starter(tmp_path)


def starter(folder: pathlib.Path) -> Iterator[StartSim]:
    (folder / "model").write_bytes(b"weights")
    running: list[Sim] = []

    def start_one(*arguments: str, host: str = "127.0.0.1", **environ: str) -> Sim:
        running.append(Sim(folder, list(arguments), environ, host))
        return running[-1]

    yield start_one
    for sim in running:
        workers = list(sim.held())
        if sim.process.poll() is None:
            workers += sim.children()
            sim.process.kill()
            sim.process.wait()
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert "Traceback" not in sim.log
        assert KEY not in sim.log


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sim]:
    """One vLLM-like engine with a key, for requests that change nothing."""
    generator = starter(tmp_path_factory.mktemp("served"))
    start_one = next(generator, None)
    assert start_one is not None
    yield start_one("--served-model-name", "tiny", "alias", "--max-model-len", "1k", VLLM_API_KEY=KEY).ready()
    with contextlib.suppress(StopIteration):
        next(generator)


# ------------------------------------------------------------------------------------------------------------- devices


@pytest.fixture(scope="session")
def nvml() -> str:
    done = subprocess.run([sys.executable, str(BUILD_FAKE_NVML)], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def devices(environ: dict[str, str], *arguments: str) -> str:
    done = subprocess.run([PYTHON, str(SIM_ENGINE), "devices", *arguments], env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.fixture(scope="module")
def sim_engine() -> Any:
    """The program as a module, for what needs no process."""
    spec = importlib.util.spec_from_file_location("sim_engine", SIM_ENGINE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["GPU-a0", "GPU-b1"]),
        ("0,1", ["GPU-a0", "GPU-b1"]),
        ("GPU-b", ["GPU-b1"]),
        (" GPU-b1 , GPU-a0", ["GPU-b1", "GPU-a0"]),
        ("1,7,0", ["GPU-b1"]),  # what stands after an unknown one is not visible
        ("GPU-nobody,0", []),
        ("GPU-", []),  # names two
        ("", []),
    ],
)
def test_visible_gpus_are_those_that_cuda_would_show(sim_engine: Any, visible: str | None, expected: list[str]) -> None:
    gpus = [sim_engine.Gpu(number, uuid, "NVIDIA", None, None) for number, uuid in enumerate(("GPU-a0", "GPU-b1"))]
    items = sim_engine.visible_items({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert [gpu.uuid for gpu in sim_engine.visible_gpus(items, gpus)] == expected


def test_devices_are_listed_as_llama_cpp_does(nvml: str, tmp_path: pathlib.Path) -> None:
    state = tmp_path / "state"
    state.write_text(
        'driver 580.95.05\ngpu 0 name="NVIDIA A" uuid=GPU-a0 total=40960 memory=unsupported\n'
        'gpu 1 name="NVIDIA B" uuid=GPU-b1 total=81920 used=20\ngpu 2 uuid=GPU-c2 lost=1\n'
    )
    listed = devices({"LD_LIBRARY_PATH": nvml, "FAKE_NVML_STATE": str(state)})
    assert listed == "Available devices:\n  CUDA0: NVIDIA A\n  CUDA1: NVIDIA B (81920 MiB, 81900 MiB free)\n"
    assert devices({"LD_LIBRARY_PATH": nvml, "FAKE_NVML_STATE": str(state), "CUDA_VISIBLE_DEVICES": "GPU-c2"}) == "Available devices:\n  (none)\n"


def test_devices_without_a_driver_are_none(nvml: str, tmp_path: pathlib.Path) -> None:
    assert devices({}, "--nvml-library", str(tmp_path / "nowhere.so")) == "Available devices:\n  (none)\n"
    assert devices({"LD_LIBRARY_PATH": nvml, "FAKE_NVML_STATE": str(tmp_path / "nowhere")}) == "Available devices:\n  (none)\n"


# -------------------------------------------------------------------------------------------------------- command line


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["serve", "/nowhere/model"], "error: failed to load model, '/nowhere/model': No such file or directory"),
        (["serve", "/proc/self/mem"], "error: failed to load model, '/proc/self/mem': Input/output error"),
        (["serve", ".", "--lora-modules", "sql=/nowhere"], "error: failed to load LoRA adapter, '/nowhere': No such file or directory"),
        (["serve", ".", "--lora-modules", "sql"], "error: --lora-modules: 'sql' is not NAME=PATH"),
        (["serve", ".", "--nnodes", "3", "-tp", "4"], "ValueError: world size (4) is not divisible by nnodes (3)"),
        (["serve", ".", "-n", "2", "-r", "2", "-tp", "2"], "ValueError: node_rank 2 must be from 0 to 1"),
        (["serve", ".", "-tp", "0"], "ValueError: parallel sizes and --nnodes must be at least 1"),
        (["serve", ".", "-n", "2", "-tp", "2", "--dialect", "llama.cpp"], "error: invalid argument: --nnodes (llama.cpp has no node ranks)"),
        (["serve", ".", "--dialect", "sglang", "--config", "/nowhere.yaml"], "error: cannot read the configuration /nowhere.yaml: "),
        (
            ["serve", ".", "-tp", "4", "-n", "2"],
            "ValueError: World size (2) is larger than the number of available GPUs (1) in this node.",
        ),
    ],
)
def test_what_cannot_start_ends_at_once_with_one_line(sim_engine: Any, capfd: pytest.CaptureFixture[str], arguments: list[str], line: str) -> None:
    assert sim_engine.main(arguments, {"CUDA_VISIBLE_DEVICES": "GPU-a"}) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(line)
    assert len(err.splitlines()) == 1


def test_a_model_that_is_not_there_ends_the_process_with_1() -> None:
    command = [PYTHON, str(SIM_ENGINE), "serve", "/nowhere/model"]
    done = subprocess.run(command, env={}, capture_output=True, text=True, check=False, timeout=DEADLINE)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)


@pytest.mark.parametrize("option", ["--no-such-option", "--max-model=5"])
def test_unknown_and_abbreviated_options_are_usage_errors(sim_engine: Any, capfd: pytest.CaptureFixture[str], option: str) -> None:
    with pytest.raises(SystemExit) as ended:
        sim_engine.main(["serve", ".", option], {})
    assert ended.value.code == 2
    assert option in capfd.readouterr().err


def test_help_documents_every_simulation_option(sim_engine: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        sim_engine.main(["serve", "--help"], {})
    shown = capfd.readouterr().out
    for option in ("load-seconds", "gpu-mib", "gpu-skip", "gpu-extra", "fail", "fail-rank", "exit-after", "exit-code", "hang"):
        assert f"--sim-{option}" in shown
    for option in ("listen-late", "no-gpu", "ignore-term", "ttft", "itl", "spawn-worker", "orphans", "process-directory"):
        assert f"--sim-{option}" in shown


# ------------------------------------------------------------------------------------------------------------- loading


def test_vllm_binds_its_port_at_once_and_refuses_until_ready(start: StartSim) -> None:
    sim = start("--sim-load-seconds", "300").loading()
    assert sim.status("/health") is None
    with socket.socket() as other, pytest.raises(OSError, match="in use") as refused:
        other.bind((sim.host, sim.port))
    assert refused.value.errno == errno.EADDRINUSE
    assert f":{sim.port:04X} " not in pathlib.Path("/proc/net/tcp").read_text()
    assert sim.end() == 0
    sim = start().ready()
    answer = sim.ask("/health")
    assert (answer.status, answer.body) == (200, b"")


@pytest.mark.parametrize("headers", [{}, BEARER, {"Authorization": "Bearer wrong"}])
def test_llama_cpp_answers_503_on_every_path_while_loading(start: StartSim, headers: dict[str, str]) -> None:
    sim = start("--dialect", "llama.cpp", "--sim-load-seconds", "300", LLAMA_API_KEY=KEY).loading()
    for path in ("/health", "/v1/models", "/metrics", "/nowhere"):
        answer = sim.ask(path, headers=headers)
        assert (answer.status, answer.json) == (503, {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}})
    assert sim.end() == -signal.SIGTERM  # no handler before it is ready


def test_sglang_refuses_then_warms_up_then_serves(start: StartSim) -> None:
    options = ["--dialect", "sglang"]
    loading = start(*options, "--sim-load-seconds", "300").loading()
    assert loading.status("/health") is None
    with socket.socket() as other:
        other.bind((loading.host, loading.port))  # nothing is bound yet
    warming = start(*options, "--sim-warmup-seconds", "300")
    wait_for(lambda: warming.status("/health") is not None, "it listens")
    assert [warming.status(path) for path in ("/health", "/v1/models", "/nowhere")] == [503, 503, 503]
    assert start(*options, "--sim-warmup-seconds", "0").ready().status("/health") == 200


def test_listen_late_opens_the_port_after_the_memory_is_held(start: StartSim) -> None:
    sim = start("--sim-listen-late", "300", "--sim-gpu-mib", "5", CUDA_VISIBLE_DEVICES="0")
    wait_for(sim.held, "memory")
    assert sim.status("/health") is None
    assert start("--sim-listen-late", "0.1").ready().status("/health") == 200


def test_hang_holds_memory_and_is_never_ready(start: StartSim) -> None:
    sim = start("--sim-hang", "--sim-gpu-mib", "5", CUDA_VISIBLE_DEVICES="0")
    wait_for(sim.held, "memory")
    time.sleep(0.2)
    assert sim.status("/health") is None
    assert "ready after" not in sim.log
    assert sim.end() == 0


@pytest.mark.parametrize("dialect", ["vllm", "llama.cpp"])
def test_the_second_engine_on_a_port_ends(start: StartSim, dialect: str) -> None:
    first = start("--dialect", dialect).ready()
    second = start("--dialect", dialect, "--port", str(first.port), "--sim-load-seconds", "0")
    assert second.exit_code() == 1
    assert "couldn't bind HTTP server socket" in second.log
    assert first.status("/health") == 200


def test_two_vllm_engines_may_load_for_one_port_and_the_later_one_ends(start: StartSim) -> None:
    """vllm#8204: both bind while neither listens; the one that is ready later ends after all its loading. Here the test is the other."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        sim = start("--port", str(other.getsockname()[1]), "--sim-load-seconds", "1").loading()
        other.listen()
        assert sim.exit_code() == 1
    assert "couldn't bind HTTP server socket" in sim.log


# ----------------------------------------------------------------------------------------------------------- key, paths


def test_vllm_guards_only_some_prefixes(served: Sim) -> None:
    for path in ("/health", "/ping", "/load", "/version", "/metrics"):
        assert served.status(path) == 200, path
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}, {"X-Api-Key": KEY}, {"Authorization": "Bearer \xfc"}):
        answer = served.ask("/v1/models", headers=headers)
        assert (answer.status, answer.json) == (401, {"error": "Unauthorized"})
    assert served.status("/v1/nowhere") == 401
    assert served.status("/nowhere") == 404
    assert served.status("/v1/nowhere", BEARER) == 404
    assert served.status("/v1/models", BEARER) == 200
    assert served.ask("/invocations", {"prompt": "hi"}).status == 200  # vllm#58144


def test_vllm_wrong_method_and_version(served: Sim) -> None:
    assert served.status("/v1/completions", BEARER, "GET") == 405
    assert served.status("/health", {}, "POST") == 405
    assert served.status("/health", {}, "HEAD") == 405
    assert served.ask("/version").json == {"version": "0.0.0+sim"}


def test_llama_cpp_guards_all_but_health(start: StartSim) -> None:
    sim = start("--dialect", "llama.cpp", "--metrics", LLAMA_API_KEY=KEY).ready()
    assert sim.ask("/health").json == sim.ask("/v1/health").json == {"status": "ok"}
    for path in ("/v1/models", "/metrics", "/nowhere", "/lora-adapters"):
        answer = sim.ask(path)
        assert (answer.status, answer.json["error"]["type"]) == (401, "authentication_error"), path
    for headers in (BEARER, {"X-Api-Key": KEY}):
        assert sim.status("/v1/models", headers) == 200
        assert sim.status("/metrics", headers) == 200
        assert sim.status("/nowhere", headers) == 404
    assert sim.end() == 0


def test_llama_cpp_has_metrics_only_when_asked(start: StartSim) -> None:
    answer = start("--dialect", "llama.cpp").ready().ask("/metrics")
    assert (answer.status, answer.json["error"]["type"]) == (501, "not_supported_error")


def test_sglang_takes_its_key_from_a_yaml_file(start: StartSim, tmp_path: pathlib.Path) -> None:
    config = tmp_path / "sglang.yaml"
    config.write_text(f"# the key\n---\n\nlog-level: info\napi-key: '{KEY}'\n")
    sim = start("--dialect", "sglang", "--sim-warmup-seconds", "0", "--config", str(config), SGLANG_API_KEY="ignored").ready()
    for path in ("/health", "/health_generate", "/ready"):
        assert sim.status(path) == 200
    for path in ("/v1/models", "/nowhere", "/ping"):
        assert sim.status(path) == 401
    assert sim.status("/v1/models", BEARER) == 200
    assert sim.status("/metrics") == 404  # without --enable-metrics
    assert KEY not in pathlib.Path(f"/proc/{sim.pid}/cmdline").read_text()


@pytest.mark.parametrize("key", ["plain", "a'b\"c\\d $HOME %s: #x", "\u00e9\u4e2d", "'", '"'])
def test_a_key_is_read_as_yaml_reads_it(sim_engine: Any, tmp_path: pathlib.Path, key: str) -> None:
    (tmp_path / "c.yaml").write_text(f"api-key: {json.dumps(key)}\n")
    assert sim_engine.read_flat_yaml(str(tmp_path / "c.yaml")) == {"api-key": key}


def test_a_broken_yaml_file_names_the_line(start: StartSim, tmp_path: pathlib.Path) -> None:
    config = tmp_path / "sglang.yaml"
    config.write_text("log-level: info\n  api-key: nested\n")
    sim = start("--dialect", "sglang", "--config", str(config))
    assert sim.exit_code() == 1
    assert "line 2: not of the form `key: value`" in sim.log


def test_without_a_key_everything_is_open(start: StartSim) -> None:
    sim = start(VLLM_API_KEY="").ready()
    assert sim.status("/v1/models") == 200
    assert sim.status("/v1/models", {"Authorization": "Bearer anything"}) == 200


# --------------------------------------------------------------------------------------------------------- completions


def test_models_and_adapters_are_listed_and_answer_differently(start: StartSim, tmp_path: pathlib.Path) -> None:
    adapter = tmp_path / "sql-adapter"
    adapter.mkdir()
    sim = start("--served-model-name", "tiny", "--enable-lora", "--quantization", "fp8", "--lora-modules", f"sql={adapter}").ready()
    cards = {card["id"]: card for card in sim.ask("/v1/models").json["data"]}
    assert {name: card["parent"] for name, card in cards.items()} == {"tiny": None, "sql": "tiny"}
    assert cards["sql"]["root"] == str(adapter)
    base, adapted = (sim.complete(model=model, max_tokens=12).json["choices"][0]["text"] for model in ("tiny", "sql"))
    assert len(base) == len(adapted) == 12
    assert base != adapted
    assert sim.complete(model="tiny", max_tokens=12).json["choices"][0]["text"] == base


def test_the_model_path_is_its_name_where_none_is_given(start: StartSim, tmp_path: pathlib.Path) -> None:
    assert start().ready().ask("/v1/models").json["data"][0]["id"] == str(tmp_path / "model")


def test_an_unknown_model_is_404_in_vllm_and_served_by_the_others(served: Sim, start: StartSim) -> None:
    answer = served.ask("/v1/completions", {"model": "nobody", "prompt": "hi"}, BEARER)
    assert (answer.status, answer.json["error"]["type"]) == (404, "NotFoundError")
    for name in ("llama.cpp", "sglang"):
        assert start("--dialect", name, "--sim-warmup-seconds", "0").ready().complete(model="nobody").status == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_completion_has_exactly_the_tokens_asked_for(served: Sim, path: str) -> None:
    asked = {"model": "alias", "prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 7}
    answer = served.ask(path, asked, BEARER).json
    choice = answer["choices"][0]
    text = choice["message"]["content"] if "chat" in path else choice["text"]
    assert len(text) == answer["usage"]["completion_tokens"] == 7
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + 7
    assert (choice["finish_reason"], answer["model"]) == ("length", "alias")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("include_usage", [False, True])
def test_a_stream_gives_one_event_for_each_token(served: Sim, path: str, include_usage: bool) -> None:
    asked = {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "stream": True}
    answer = served.ask(path, {**asked, **({"stream_options": {"include_usage": True}} if include_usage else {})}, BEARER)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.events()
    if include_usage:
        last = events.pop()
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 5)
    if "chat" in path:
        assert events.pop(0)["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * 4 + ["length"]
    streamed = "".join(event["choices"][0]["delta"]["content"] if "chat" in path else event["choices"][0]["text"] for event in events)
    whole = served.ask(path, {**asked, "stream": False}, BEARER).json["choices"][0]
    assert streamed == (whole["message"]["content"] if "chat" in path else whole["text"])


def test_tokens_take_their_time(start: StartSim) -> None:
    sim = start("--sim-ttft", "0.1", "--sim-itl", "0.05").ready()
    for stream in (False, True):
        began = time.monotonic()
        assert sim.complete(max_tokens=5, stream=stream).status == 200
        assert 0.3 <= time.monotonic() - began < 5


def test_a_client_that_goes_away_in_a_stream_is_forgotten(start: StartSim) -> None:
    sim = start("--sim-itl", "0.02", "--served-model-name", 'quo"ted').ready()
    body = json.dumps({"prompt": "hi", "max_tokens": 1000, "stream": True}).encode()
    with socket.create_connection((sim.host, sim.port)) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        assert b"200 OK" in client.recv(4096)
        running = 'vllm:num_requests_running{engine="0",model_name="quo\\"ted"}'
        assert f"{running} 1" in sim.ask("/metrics").body.decode()
    wait_for(lambda: f"{running} 0" in sim.ask("/metrics").body.decode(), "the request is given up")
    assert sim.complete(max_tokens=1).status == 200


def test_metrics_count(start: StartSim) -> None:
    sim = start("--served-model-name", "tiny").ready()
    for _number in range(3):
        sim.complete(max_tokens=4)
    samples = dict(line.rsplit(" ", 1) for line in sim.ask("/metrics").body.decode().splitlines() if not line.startswith("#"))
    assert samples['vllm:generation_tokens_total{engine="0",model_name="tiny"}'] == "12"
    assert samples['vllm:prompt_tokens_total{engine="0",model_name="tiny"}'] == "12"
    assert samples['vllm:request_success_total{engine="0",model_name="tiny",finished_reason="length"}'] == "3"


# ------------------------------------------------------------------------------------------------------ HTTP robustness


def exchange(sim: Sim, *pieces: bytes) -> bytes:
    """Send bytes, close the sending side, return all that comes back."""
    with socket.create_connection((sim.host, sim.port), timeout=DEADLINE) as client:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for piece in pieces:
                client.sendall(piece)
            client.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: client.recv(65536), b""))


POST = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nAuthorization: Bearer " + KEY.encode() + b"\r\n"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ([b"nonsense\r\n\r\n"], 400),
        ([b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n"], 400),  # TLS on a plain port
        ([b"GET / HTTP/2.0\r\n\r\n"], 400),
        ([b"GET nowhere HTTP/1.1\r\n\r\n"], 400),
        ([b"GET /health HTTP/1.1\r\nHost: x\r\n"], 400),  # ends in the header
        ([b"GET /health HTTP/1.1\r\nX: " + b"x" * 20000 + b"\r\n\r\n"], 431),
        ([POST, b"Content-Length: -1\r\n\r\n"], 400),
        ([POST, "Content-Length: \u0664\r\n\r\n".encode()], 400),
        ([POST, b"Content-Length: 50\r\n\r\n{}"], 400),  # ends in the body
        ([POST, b"Content-Length: 1048577\r\n\r\n", b" " * 1048577], 413),
        ([POST, b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n"], 413),
        ([POST, b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"], 411),
    ],
)
def test_improper_requests_get_an_error_in_json_and_the_connection_ends(served: Sim, sent: list[bytes], status: int) -> None:
    head, _blank, body = exchange(served, *sent).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"connection: close" in head
    assert json.loads(body)["error"]["code"] == status
    assert served.status("/health") == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}",
        b"{}",
        b'{"prompt": 5}',
        b'{"prompt": []}',
        b'{"prompt": "x", "max_tokens": 0}',
        b'{"prompt": "x", "max_tokens": true}',
        b'{"prompt": "x", "max_tokens": "7"}',
        b'{"prompt": "x", "max_tokens": 1.5}',
        b'{"prompt": "x", "max_tokens": 1000}',  # with the prompt, more than the context of 1000
        b'{"prompt": "x", "model": 7}',
    ],
)
def test_improper_completions_are_400(served: Sim, body: bytes) -> None:
    answer = served.ask("/v1/completions", body, BEARER)
    assert (answer.status, answer.json["error"]["type"]) == (400, "BadRequestError")


@pytest.mark.parametrize("messages", [None, [], "hi", [5], [{"content": "no role"}]])
def test_improper_chats_are_400(served: Sim, messages: Any) -> None:
    assert served.ask("/v1/chat/completions", {"messages": messages}, BEARER).status == 400


def test_odd_but_proper_requests_are_answered(served: Sim) -> None:
    assert served.ask("/v1/completions", b'{"prompt": ["a", "\\ud800"], "stream_options": 5}', BEARER).status == 200
    assert served.ask("/v1/completions", b'{"prompt": "x", "model": "\\ud800"}', BEARER).status == 404
    assert served.ask("/health?verbose=1").status == 200


def test_a_connection_is_kept_until_one_side_says_close(served: Sim) -> None:
    request = b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n"
    last = b"GET /ping HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    assert exchange(served, request + request + last + request).count(b"HTTP/1.1 200 OK") == 3
    assert exchange(served, b"GET /ping HTTP/1.0\r\n\r\n" + request).count(b"HTTP/1.1 200 OK") == 1


def test_an_http_1_0_client_gets_a_stream_without_chunks(served: Sim) -> None:
    body = b'{"prompt": "x", "max_tokens": 2, "stream": true}'
    reply = exchange(served, POST.replace(b"HTTP/1.1", b"HTTP/1.0"), b"Content-Length: %d\r\n\r\n" % len(body), body)
    assert b"transfer-encoding" not in reply
    assert reply.endswith(b"\n\ndata: [DONE]\n\n")


# ------------------------------------------------------------------------------------------------- processes and memory


def test_one_worker_for_each_gpu_holds_its_memory(start: StartSim) -> None:
    sim = start("-tp", "2", "--sim-gpu-mib", "700", CUDA_VISIBLE_DEVICES="GPU-b,3", RANKZERO_SHARD="glm/0/run").ready()
    held = wait_for(lambda: len(sim.held()) == 2 and sim.held(), "both workers hold")
    assert sorted(held) == sorted(sim.children())
    assert sorted(held.values()) == ["3 700\n", "GPU-b 700\n"]
    for pid in held:
        assert pathlib.Path(f"/proc/{pid}/comm").read_text() == "VLLM::Worker_TP\n"  # 15 bytes of it
        assert b"RANKZERO_SHARD=glm/0/run" in pathlib.Path(f"/proc/{pid}/environ").read_bytes()
    assert sim.end() == 0
    assert sim.held() == {}
    assert not any(alive(pid) for pid in held)


def test_llama_cpp_holds_all_memory_itself(start: StartSim) -> None:
    sim = start("--dialect", "llama.cpp", "--sim-gpu-mib", "700", CUDA_VISIBLE_DEVICES="GPU-b,3").ready()
    assert sim.held() == {sim.pid: "GPU-b 700\n3 700\n"}
    assert sim.children() == []
    assert sim.end() == 0
    assert sim.held() == {}


def test_workers_can_be_switched_off_and_on(start: StartSim) -> None:
    sim = start("--no-sim-spawn-worker", "--sim-gpu-mib", "7", CUDA_VISIBLE_DEVICES="0").ready()
    assert sim.held() == {sim.pid: "0 7\n"}
    sim = start("--sim-spawn-worker", "--dialect", "llama.cpp", CUDA_VISIBLE_DEVICES="0").ready()
    assert len(sim.children()) == 1


def test_memory_may_be_missing_on_one_gpu_or_held_on_another(start: StartSim) -> None:
    sim = start("--sim-gpu-mib", "7", "--sim-gpu-skip", "1", "--sim-gpu-extra", "GPU-c", CUDA_VISIBLE_DEVICES="0,1").ready()
    wait_for(sim.held, "memory")
    assert sorted(sim.held().values()) == ["0 7\nGPU-c 7\n"]
    assert len(sim.children()) == 2


def test_on_the_cpu_it_warns_and_serves_without_memory(start: StartSim) -> None:
    sim = start("--sim-no-gpu", "--sim-gpu-mib", "7", CUDA_VISIBLE_DEVICES="0,1").ready()
    assert "warning: no usable GPU found" in sim.log
    assert sim.complete().status == 200
    assert (sim.held(), sim.children()) == ({}, [])


def test_without_a_list_every_gpu_of_the_driver_is_used(start: StartSim, nvml: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "state").write_text("driver 580.95.05\ngpu 0-1 uuid=GPU-%d total=1000\n")
    environ = {**os.environ, "LD_LIBRARY_PATH": nvml, "FAKE_NVML_STATE": str(tmp_path / "state"), "SIM_PROCESS_DIRECTORY": str(tmp_path / "processes")}
    environ.pop("CUDA_VISIBLE_DEVICES", None)
    command = [PYTHON, str(SIM_ENGINE), "serve", str(tmp_path / "model"), "--headless", "--sim-gpu-mib", "9", "--no-sim-spawn-worker"]
    with subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL) as process:
        file = tmp_path / "processes" / str(process.pid)
        wait_for(file.exists, "memory")
        assert file.read_text() == "GPU-0 9\nGPU-1 9\n"
        process.terminate()


def test_a_process_directory_that_cannot_be_written_ends_the_engine(start: StartSim, tmp_path: pathlib.Path) -> None:
    sim = start("--no-sim-spawn-worker", "--sim-gpu-mib", "7", "--sim-process-directory", str(tmp_path / "model"), CUDA_VISIBLE_DEVICES="0")
    assert sim.exit_code() == 1
    assert "cannot write the process directory" in sim.log


def test_workers_end_with_a_killed_engine(start: StartSim) -> None:
    sim = start("--sim-gpu-mib", "7", CUDA_VISIBLE_DEVICES="0,1").ready()
    workers = sim.children()
    assert sim.end(signal.SIGKILL) == -signal.SIGKILL
    wait_for(lambda: not any(alive(pid) for pid in workers), "the workers end")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_orphans_keep_the_memory_but_not_the_port(start: StartSim, number: int) -> None:
    """vllm#55510."""
    sim = start("--sim-orphans", "--sim-gpu-mib", "7", CUDA_VISIBLE_DEVICES="0,1").ready()
    workers = wait_for(lambda: len(sim.held()) == 2 and sim.children(), "memory")
    sim.end(number)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((sim.host, sim.port))
        other.listen()
    time.sleep(0.1)
    assert all(alive(pid) for pid in workers)
    assert sorted(sim.held()) == sorted(workers)
    for pid in workers:
        os.kill(pid, signal.SIGTERM)
    wait_for(lambda: not any(alive(pid) for pid in workers), "the workers end when asked themselves")


@pytest.mark.parametrize(("dialect", "code"), [("vllm", 0), ("sglang", -signal.SIGKILL)])
def test_a_lost_worker_ends_the_engine_as_the_dialect_does(start: StartSim, dialect: str, code: int) -> None:
    sim = start("--dialect", dialect, "--sim-warmup-seconds", "0", CUDA_VISIBLE_DEVICES="0,1").ready()
    first, second = sim.children()
    os.kill(first, signal.SIGKILL)
    assert sim.exit_code() == code
    wait_for(lambda: not alive(second), "the other worker ends")


# -------------------------------------------------------------------------------------------------------------- faults


def test_a_failure_prints_its_text_and_ends_with_1(start: StartSim) -> None:
    sim = start("--sim-fail", "torch.OutOfMemoryError: CUDA out of memory.")
    assert sim.exit_code() == 1
    assert "\ntorch.OutOfMemoryError: CUDA out of memory.\n" in sim.log


def test_faults_of_another_rank_do_not_matter(start: StartSim) -> None:
    arguments = ["--sim-fail", "no", "--sim-hang", "--sim-ignore-term", "--sim-exit-after", "0", "--sim-no-gpu", "--sim-gpu-skip", "0"]
    sim = start("--sim-fail-rank", "1", *arguments, "--sim-gpu-mib", "7", CUDA_VISIBLE_DEVICES="0").ready()
    wait_for(sim.held, "memory")
    assert sim.end() == 0


@pytest.mark.parametrize(("arguments", "code"), [([], 1), (["--sim-exit-code", "0"], 0), (["--sim-exit-code", "77"], 77)])
def test_it_ends_by_itself_when_told(start: StartSim, arguments: list[str], code: int) -> None:
    sim = start("--sim-exit-after", "0.2", *arguments, CUDA_VISIBLE_DEVICES="0")
    assert sim.exit_code() == code


@pytest.mark.parametrize("dialect", ["vllm", "llama.cpp"])
def test_sigterm_may_be_ignored(start: StartSim, dialect: str) -> None:
    sim = start("--sim-ignore-term", "--dialect", dialect, "--sim-load-seconds", "0.2", CUDA_VISIBLE_DEVICES="0").loading()
    for phase in (sim.loading, sim.ready):
        phase()
        for pid in [sim.pid, *sim.children()]:
            os.kill(pid, signal.SIGTERM)
    time.sleep(0.3)
    assert sim.status("/health") == 200
    assert sim.end(signal.SIGKILL) == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_is_quick_even_with_requests_running(start: StartSim, number: int) -> None:
    sim = start("--sim-ttft", "60", CUDA_VISIBLE_DEVICES="0").ready()
    with socket.create_connection((sim.host, sim.port)) as client:
        client.sendall(b'POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 15\r\n\r\n{"prompt": "x"}')
        wait_for(lambda: 'running{engine="0"' in (text := sim.ask("/metrics").body.decode()) and "} 1" in text, "the request runs")
        began = time.monotonic()
        assert sim.end(number) == 0
        assert time.monotonic() - began < 5


# --------------------------------------------------------------------------------------------------------------- ranks

RankStarter = Callable[..., Sim]


@pytest.fixture()
def start_rank(start: StartSim) -> RankStarter:
    """Starts ranks of one replica, each at a loopback address of its own."""
    master_port = free_port("127.0.0.1")

    def start_one(rank: int, *arguments: str, nodes: int = 2, dialect: str = "vllm", **environ: str) -> Sim:
        host = f"127.0.0.{rank + 2}"
        line = ["--dialect", dialect, "-tp", str(nodes), "-n", str(nodes), "-r", str(rank), "--master-addr", "127.0.0.2"]
        line += ["--master-port", str(master_port), *(["--headless"] if rank and dialect == "vllm" else []), *arguments]
        return start(*line, host=host, **{"VLLM_HOST_IP": host, "SGLANG_HOST_IP": host, "CUDA_VISIBLE_DEVICES": "0", **environ})

    return start_one


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_ranks_meet_in_any_order(start_rank: RankStarter, order: tuple[int, ...]) -> None:
    sims = {rank: start_rank(rank, nodes=3) for rank in order}
    for sim in sims.values():
        sim.ready()
    assert [sims[rank].status("/health") for rank in range(3)] == [200, None, None]
    assert sims[0].complete(max_tokens=3).status == 200
    assert {rank: sim.end() for rank, sim in sims.items()} == dict.fromkeys(order, 0)


def test_the_leader_is_not_ready_before_every_rank_has_loaded(start_rank: RankStarter) -> None:
    leader, follower = start_rank(0), start_rank(1, "--sim-load-seconds", "300")
    leader.loading()
    follower.loading()
    time.sleep(0.2)
    assert "ready after" not in leader.log
    assert leader.status("/health") is None


def test_a_lost_follower_shows_only_at_the_next_completion(start_rank: RankStarter) -> None:
    leader, follower = start_rank(0), start_rank(1)
    leader.ready()
    follower.ready().end(signal.SIGKILL)
    time.sleep(0.1)
    assert leader.status("/health") == 200
    answer = leader.complete()
    assert (answer.status, answer.json["error"]["type"]) == (500, "InternalServerError")
    assert leader.exit_code() == 0
    assert "EngineDeadError" in leader.log


def test_a_follower_never_notices_that_its_leader_is_gone_and_is_of_no_use_to_a_new_one(start_rank: RankStarter) -> None:
    """vllm#32136."""
    leader, follower = start_rank(0), start_rank(1)
    follower.ready()
    leader.ready().end(signal.SIGKILL)
    second = start_rank(0)
    wait_for(lambda: "world_size" in second.log, "the new leader waits")
    time.sleep(0.2)
    assert follower.process.poll() is None
    assert "joined" not in second.log
    assert follower.end() == 0
    assert second.process.poll() is None
    start_rank(1).ready()
    assert second.ready().complete().status == 200


def test_a_follower_that_ends_while_waiting_may_come_back(start_rank: RankStarter) -> None:
    leader, follower = start_rank(0, nodes=3), start_rank(1, nodes=3)
    wait_for(lambda: "rank 1 joined" in leader.log, "joined")
    follower.end(signal.SIGKILL)
    again, third = start_rank(1, nodes=3), start_rank(2, nodes=3)
    for sim in (leader, again, third):
        sim.ready()


def test_a_rank_that_fails_while_loading_takes_the_leader_along(start_rank: RankStarter) -> None:
    faults = ["--sim-fail", "RuntimeError: bad weights", "--sim-fail-rank", "1"]
    leader, follower = start_rank(0, *faults), start_rank(1, *faults)
    assert (follower.exit_code(), leader.exit_code()) == (1, 1)
    assert "RuntimeError: bad weights" in follower.log
    assert "Connection closed by peer (rank 1)" in leader.log


def test_waiting_for_ranks_ends_with_the_timeout(start_rank: RankStarter) -> None:
    timeout = ["--distributed-timeout-seconds", "0.6"]
    nobodys_port = free_port("127.0.0.9")
    leader = start_rank(0, *timeout)
    lonely = start_rank(1, *timeout, "--master-addr", "127.0.0.9", "--master-port", str(nobodys_port))
    assert (leader.exit_code(), lonely.exit_code()) == (1, 1)
    assert "DistStoreError: Timed out after 1 seconds waiting for clients. 1/2 clients joined." in leader.log
    assert f"DistNetworkError: The client socket has failed to connect to any network address of (127.0.0.9, {nobodys_port})" in lonely.log
    assert "retrying (try=1, timeout=600ms)" in lonely.log


def test_an_interface_that_does_not_exist_ends_the_rank(start_rank: RankStarter) -> None:
    sim = start_rank(1, GLOO_SOCKET_IFNAME="no-such-nic")
    assert sim.exit_code() == 1
    assert "RuntimeError: ifa != nullptr. Unable to find address for: no-such-nic" in sim.log


def test_a_wrong_advertised_address_ends_who_connects_and_hangs_who_waits(start_rank: RankStarter, tmp_path: pathlib.Path) -> None:
    """The meeting succeeds, the mesh does not. Here the test is the leader, whose collectives address leads nowhere."""
    dead_port = free_port("127.0.0.8")
    with socket.create_server(("127.0.0.8", 0)) as door:
        follower = start_rank(1, "--master-addr", "127.0.0.8", "--master-port", str(door.getsockname()[1]))
        door.settimeout(DEADLINE)
        connection, _address = door.accept()
        with connection, connection.makefile("rwb") as stream:
            joined = json.loads(stream.readline())
            assert (joined["rank"], joined["world"], joined["queue"][0]) == (1, 2, "127.0.0.3")
            leader = {"collectives": ["127.0.0.8", dead_port], "queue": ["127.0.0.8", dead_port]}
            stream.write(json.dumps({"0": leader, "1": {kind: joined[kind] for kind in leader}}).encode() + b"\n")
            stream.flush()
            assert follower.exit_code() == 1
    assert f"RuntimeError: Gloo connectFullMesh failed: Connection refused, remote=[127.0.0.8]:{dead_port}" in follower.log


def test_nonsense_at_the_leaders_port_does_no_harm(start_rank: RankStarter) -> None:
    leader = start_rank(0)
    wait_for(lambda: "world_size" in leader.log, "the leader waits")
    port = int(leader.process.args[leader.process.args.index("--master-port") + 1])  # type: ignore[union-attr, index]
    wrong = {"rank": 1, "world": 3, "collectives": ["x", 1], "queue": ["x", 1]}
    for sent in (
        b"\xff\n",
        b"{}\n",
        b"[]\n",
        b"[" * 60000 + b"\n",
        json.dumps(wrong).encode() + b"\n",
        json.dumps({**wrong, "world": 2, "queue": 5}).encode() + b"\n",
    ):
        with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.2", port), timeout=DEADLINE) as client:
            client.sendall(sent)
            assert client.recv(10) == b""
    start_rank(1).ready()
    assert leader.ready().status("/health") == 200


def test_a_leader_whose_port_is_taken_says_so(start_rank: RankStarter) -> None:
    with socket.create_server(("127.0.0.2", 0)) as taken:
        leader = start_rank(0, "--master-port", str(taken.getsockname()[1]))
        assert leader.exit_code() == 1
    assert "DistNetworkError: cannot listen on port" in leader.log


def test_a_sglang_follower_says_200_before_the_replica_is_ready_and_stops_with_its_leader(start_rank: RankStarter) -> None:
    leader = start_rank(0, "--sim-warmup-seconds", "300", dialect="sglang")
    follower = start_rank(1, "--sim-warmup-seconds", "0", dialect="sglang").ready()
    assert [follower.status(path) for path in ("/health", "/ping", "/health_generate", "/v1/models", "/metrics")] == [200, 200, 200, 404, 404]
    assert leader.status("/health") in (None, 503)
    follower.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "waiting for the leader's shutdown" in follower.log, "the signal")
    assert follower.process.poll() is None
    assert leader.end() == 0
    assert follower.exit_code() == 0


@pytest.mark.parametrize("killed", [0, 1])
def test_a_sglang_rank_ends_itself_when_a_peer_is_lost(start_rank: RankStarter, killed: int) -> None:
    sims = [start_rank(rank, "--sim-warmup-seconds", "0", dialect="sglang") for rank in range(2)]
    for sim in sims:
        sim.ready()
    workers = sims[1 - killed].children()
    sims[killed].end(signal.SIGKILL)
    assert sims[1 - killed].exit_code() == -signal.SIGKILL
    wait_for(lambda: not any(alive(pid) for pid in workers), "its workers end too")
