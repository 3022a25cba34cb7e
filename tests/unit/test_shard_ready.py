# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The gate as a playbook runs it: real ansible-playbook, real run_shard.py with the simulated engine, real pynvml on the fake NVML library.

Each "host" is a replica root and an address of its own on loopback. Hosts of different replicas share a playbook run where that is
enough, because starting ansible costs more than what is tested.
"""

from __future__ import annotations

import contextlib
import http.server
import importlib.util
import itertools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from ansible_collections.rankzero.inference.plugins.module_utils import observation, shard_log

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
FILES = ROOT / "roles" / "replica" / "files"
BUILD = ROOT / "tests" / "fake_nvml" / "build.py"
KEY = "a-very-secret-key"
MIB = 30000


def gpu_uuid(number: int) -> str:
    return f"GPU-1{number}0500a0-0000-4000-8000-00000000000{number}"


@pytest.fixture(scope="session")
def fake_nvml() -> pathlib.Path:
    spec = importlib.util.spec_from_file_location("build_fake_nvml", BUILD)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return pathlib.Path(module.build(BUILD.parent / "build"))


# Ports are the same on every host; tests that run side by side, here or in another checkout, have hosts of their own.
ADDRESSES = (f"127.{1 + os.getpid() // 250 % 250}.{1 + os.getpid() % 250}.{number}" for number in itertools.count(1))


class Site:
    """All hosts of one test: their shards, the GPUs that they share, and the playbook runs."""

    def __init__(self, folder: pathlib.Path, library: pathlib.Path) -> None:
        self.folder = folder
        self.hosts: dict[str, dict[str, Any]] = {}
        self.running: list[subprocess.Popen[bytes]] = []
        processes = folder / "gpu-processes"
        processes.mkdir()
        (folder / "model").mkdir()
        state = folder / "nvml.state"
        lines = ["driver 580.95.05", "cuda 13000", f"procdir {processes}"]
        lines += [
            f'gpu {n} name="NVIDIA H100" uuid={gpu_uuid(n)} pci=00000000:{n + 16:02x}:00.0 total=81559MiB reserved=551MiB cc=9.0 arch=9' for n in range(8)
        ]
        state.write_text("\n".join(lines) + "\n")
        self.gpu_environment = {"LD_LIBRARY_PATH": str(library), "FAKE_NVML_STATE": str(state), "SIM_PROCESS_DIRECTORY": str(processes)}

    def hold(self, pid: int, gpu: int, mib: int) -> None:
        """Let a process of ours hold memory on a GPU, as seen by the driver."""
        pathlib.Path(self.gpu_environment["SIM_PROCESS_DIRECTORY"], str(pid)).write_text(f"{gpu} {mib}\n")

    def shard(
        self,
        host: str,
        replica: str,
        gpus: list[int],
        *arguments: str,
        rank: int = 0,
        nodes: int = 1,
        port: int = 8000,
        mib: int = MIB,
        start: bool = True,
        key: bool = False,
        **ready: Any,
    ) -> dict[str, Any]:
        """Write a revision on a host and start it."""
        root, address = self.folder / host, next(ADDRESSES)
        revision = root / "etc/rankzero" / replica / "revisions" / "f00d"
        (revision / "secrets").mkdir(parents=True)
        (revision.parent.parent / "current").symlink_to("revisions/f00d")
        (revision / "secrets" / "api_key").write_text(KEY + "\n")
        environment = {"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": ",".join(map(gpu_uuid, gpus)), "VLLM_HOST_IP": address, **self.gpu_environment}
        (revision / "shard.env").write_text("".join(f"{name}='{value}'\n" for name, value in sorted(environment.items())))
        engine = ["serve", str(self.folder / "model"), "--served-model-name", "glm", "--sim-gpu-mib", str(mib)]
        engine += ["--headless"] if rank else ["--host", address, "--port", str(port)]
        if nodes > 1:
            leader = next((known for known in self.hosts.values() if known["replica"] == replica), {"address": address})["address"]
            engine += ["--tensor-parallel-size", str(nodes * len(gpus)), "--nnodes", str(nodes), "--node-rank", str(rank)]
            engine += ["--master-addr", leader, "--master-port", "29501"]
        url = None if rank else f"http://{address}:{port}"
        launch = {
            "schema": 1,
            "replica": replica,
            "rank": rank,
            "nodes": nodes,
            "fingerprint": "f00d",
            "stop_seconds": 5,
            "paths": {"state_dir": str(root / "run/rankzero" / replica), "work_dir": str(root / "var/lib/rankzero" / replica)},
            "launches": [
                {
                    "name": "engine",
                    "path": sys.executable,
                    "args": [str(FILES / "sim_engine.py"), *engine, *arguments],
                    "env": {},
                    "secret_env": {"VLLM_API_KEY": "api_key"} if key else {},
                    "wait_for_leader_port": None,
                    "wait_for_ranks": [],
                }
            ],
            "gpus": [{"uuid": gpu_uuid(n), "index": n, "pci_bdf": f"0000:{n + 16:02x}:00.0", "expected_mib": 20000} for n in gpus],
            "ready": {
                "engine": "sim",
                "serves_http": rank == 0,
                "url": url,
                "health_path": "/health",
                "models_path": "/v1/models",
                "expect_models": ["glm"],
                "probe_path": "/v1/chat/completions",
                "probe_model": "glm",
                "key_secret": "api_key" if key else None,
                "key_protects": "/v1/models" if key else None,
                "gpu_evidence": bool(gpus),
                "falls_back_to_cpu": True,
                "accepts_on_port": None,
                "budget_seconds": 60,
                "devices_command": {"path": sys.executable, "args": [str(FILES / "sim_engine.py"), "devices"]},
                **ready,
            },
        }
        (revision / "launch.json").write_text(json.dumps(launch))
        self.hosts[host] = {"root": root, "address": address, "replica": replica, "rank": rank, "port": port, "revision": revision}
        if start:
            self.start(host)
        return self.hosts[host]

    def start(self, host: str) -> None:
        known = self.hosts[host]
        log = known["root"] / "var/log/rankzero" / known["replica"] / "shard.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as stream:
            known["process"] = subprocess.Popen(
                [sys.executable, str(FILES / "run_shard.py"), str(known["revision"])],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env={"PATH": os.environ["PATH"]},
            )
        self.running.append(known["process"])

    def file(self, host: str, name: str) -> Any:
        known = self.hosts[host]
        path = known["root"] / "run/rankzero" / known["replica"] / name
        return json.loads(path.read_text()) if path.exists() else None

    def gate(
        self, *arguments: str, hosts: list[str] | None = None, forks: int = 10, ignore_unreachable: bool = False, **options: Any
    ) -> tuple[str, dict[str, Any]]:
        """Run the gate on hosts in the given order: what the terminal shows, and each host's result."""
        chosen = hosts or list(self.hosts)
        inventory = {
            "all": {
                "vars": {"ansible_connection": "local", "ansible_python_interpreter": sys.executable},
                "hosts": {
                    name: {
                        key: str(value) if key == "root" else value
                        for key, value in self.hosts[name].items()
                        if key in ("root", "replica", "rank") or key.startswith("ansible_")
                    }
                    for name in chosen
                },
            }
        }
        (self.folder / "hosts.yml").write_text(yaml.safe_dump(inventory, sort_keys=False))
        task = {"replica": "{{ replica }}", "rank": "{{ rank }}", "replica_root": "{{ root }}", "hold_seconds": 3, **options}
        result = {"content": "{{ gate | to_json }}", "dest": f"{self.folder}/result-{{{{ inventory_hostname }}}}.json", "mode": "0600"}
        play = [
            {
                "hosts": "all",
                "gather_facts": False,
                "tasks": [
                    {
                        "name": "Gate",
                        "rankzero.inference.shard_ready": task,
                        "register": "gate",
                        "ignore_errors": True,
                        "ignore_unreachable": ignore_unreachable,
                    },
                    {
                        "name": "Keep",
                        "delegate_to": "localhost",
                        "vars": {"ansible_connection": "local", "ansible_python_interpreter": sys.executable},
                        "ansible.builtin.copy": result,
                        "check_mode": False,
                        "diff": False,
                    },
                ],
            }
        ]
        (self.folder / "play.yml").write_text(yaml.safe_dump(play))
        home = self.folder / "home"
        environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "ANSIBLE_COLLECTIONS_PATH": str(pathlib.Path(observation.__file__).parents[5]),
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_INVENTORY_ENABLED": "yaml",
            "ANSIBLE_PIPELINING": "1",
            "ANSIBLE_DEPRECATION_WARNINGS": "0",
            "LC_ALL": "C.UTF-8",
            **self.gpu_environment,
        }
        run = subprocess.run(
            [sys.executable, "-m", "ansible", "playbook", "-i", "hosts.yml", "play.yml", "-f", str(forks), *arguments],
            cwd=self.folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=150,
            check=False,
        )
        text = run.stdout.decode()
        paths = {name: self.folder / f"result-{name}.json" for name in chosen}
        assert all(path.exists() for path in paths.values()), text
        results = {name: json.loads(path.read_text()) for name, path in paths.items()}
        assert "Traceback" not in text
        assert KEY not in text + json.dumps(results)
        return text, results

    def close(self) -> None:
        for process in self.running:
            process.send_signal(signal.SIGTERM)
        for process in self.running:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture
def site(tmp_path: pathlib.Path, fake_nvml: pathlib.Path) -> Iterator[Site]:
    whole = Site(tmp_path, fake_nvml)
    try:
        yield whole
    finally:
        whole.close()


def wait_for_stage(site: Site, host: str, stage: str) -> None:
    deadline = time.monotonic() + 20
    while (site.file(host, "state.json") or {}).get("stage") != stage:
        assert time.monotonic() < deadline, site.file(host, "state.json")
        time.sleep(0.05)


def test_replica_over_two_hosts_gets_ready_once(site: Site) -> None:
    site.shard("gpu-a", "glm", [0, 1], "--sim-load-seconds", "2", nodes=2, key=True)
    site.shard("gpu-b", "glm", [2, 3], "--sim-load-seconds", "2", rank=1, nodes=2)
    text, results = site.gate(leader="gpu-a", fingerprint="f00d", timeout=60)
    leader, follower = results["gpu-a"], results["gpu-b"]
    assert (leader["ready"], leader["changed"], follower["ready"], follower["changed"]) == (True, True, True, True), text
    assert [(row["held_mib"], row["by"]) for row in leader["verdict"]["evidence"]["gpus"]] == [(MIB, "processes"), (MIB, "processes")]
    assert leader["verdict"]["evidence"]["http"]["key"] == 401
    assert leader["verdict"]["evidence"]["http"]["generation"] == 200
    assert follower["verdict"]["evidence"]["http"] is None
    assert "the leader serves" in follower["verdict"]["reason"]
    lines = [line for line in text.splitlines() if line.startswith("[glm] rank")]
    assert any(" · " in line and "budget 60 s" in line for line in lines)
    assert [line for line in lines if line.startswith("[glm] rank 1 (gpu-b): ready")]
    assert len({line.index(" · ") for line in lines}) == 1, "progress lines are aligned"

    mark = site.file("gpu-b", "ready.json")
    state = site.file("gpu-b", "state.json")
    assert (mark["schema"], mark["replica"], mark["rank"], mark["fingerprint"], mark["run_id"]) == (1, "glm", 1, "f00d", state["run_id"])
    assert mark["evidence"] == follower["verdict"]["evidence"]
    path = site.hosts["gpu-b"]["root"] / "run/rankzero/glm/ready.json"
    assert path.stat().st_mode & 0o777 == 0o644

    _text, again = site.gate(leader="gpu-a", timeout=60)
    assert [(row["ready"], row["changed"]) for row in again.values()] == [(True, False), (True, False)]
    assert site.file("gpu-b", "ready.json") == mark

    # A forks limit below the number of hosts, the follower first: it must not wait for a leader that nobody asks meanwhile.
    started = time.monotonic()
    _text, alone = site.gate(leader="gpu-a", timeout=60, forks=1, hosts=["gpu-b", "gpu-a"])
    assert all(row["ready"] for row in alone.values())
    assert time.monotonic() - started < 40


def test_first_failed_rank_ends_the_wait_of_the_others(site: Site) -> None:
    line = "ValueError: Free memory on device (0.49/79.32 GiB) on startup is less than desired GPU memory utilization (0.6, 47.59 GiB)."
    site.shard("gpu-a", "glm", [0], nodes=2)
    site.shard("gpu-b", "glm", [1], "--sim-load-seconds", "1", "--sim-fail", line, "--sim-fail-rank", "1", rank=1, nodes=2)
    started = time.monotonic()
    text, results = site.gate(leader="gpu-a", timeout=120)
    assert time.monotonic() - started < 60
    culprit, peer = results["gpu-b"], results["gpu-a"]
    assert culprit["failed"]
    assert "exit code 1" in culprit["verdict"]["reason"], text
    assert "already holds memory" in culprit["verdict"]["cause"]
    assert culprit["verdict"]["log_lines"][0].endswith(line)
    for part in ("[glm] rank 1 on gpu-b failed after", "reason:", "cause:", "do:", "log:", "next:   on gpu-b: tail -n 200", "rankzero.inference.diagnose"):
        assert part in culprit["msg"]
    assert peer["failed"]
    assert "exit code 1" in peer["msg"]
    assert ("gave up: rank 1 (gpu-b) failed" in peer["msg"]) or peer["verdict"]["failed"]
    assert site.file("gpu-b", "ready.json") is None


def test_engines_that_serve_without_their_gpus_are_refused(site: Site) -> None:
    """CPU instead of GPUs, one of two GPUs, the wrong GPU, a bare context: each a replica of one host, all asked together."""
    site.shard("cpu", "on-cpu", [0, 1], "--sim-no-gpu")
    site.shard("half", "half", [2, 3], "--sim-gpu-skip", gpu_uuid(3))
    site.hold(os.getpid(), 3, 70000)
    site.shard("wrong", "wrong", [4], "--sim-gpu-extra", gpu_uuid(5))
    site.shard("bare", "bare", [6], mib=480)
    site.shard("profile", "cpu-profile", [])
    text, results = site.gate(timeout=90)
    assert "no process of this shard holds memory on any of its 2 GPUs: it runs on the CPU" in results["cpu"]["verdict"]["reason"], text
    assert results["cpu"]["verdict"]["detail"].startswith("devices that the engine's build sees: ")
    assert gpu_uuid(0) in results["cpu"]["verdict"]["detail"] or "H100" in results["cpu"]["verdict"]["detail"]
    assert f"GPU 3 ({gpu_uuid(3)[:12]}) holds nothing of this shard; held: " in results["half"]["verdict"]["reason"]
    assert f"process {os.getpid()} (" in results["half"]["verdict"]["reason"]
    assert "70000 MiB" in results["half"]["verdict"]["reason"]
    assert f"wrong GPU: GPU 5 ({gpu_uuid(5)[:12]})" in results["wrong"]["verdict"]["reason"]
    assert "holds 480 MiB of this shard, expected at least 20000 MiB: a bare context" in results["bare"]["verdict"]["reason"]
    assert all(results[name]["failed"] and not results[name]["ready"] for name in ("cpu", "half", "wrong", "bare"))
    assert results["profile"]["ready"]
    assert results["profile"]["verdict"]["evidence"]["judged_without_gpu"]
    assert "judged without GPU evidence" in text


@contextlib.contextmanager
def other_server(address: str, port: int) -> Iterator[list[dict[str, str]]]:
    """A stranger on the port that answers everything with the wanted model list, and keeps the headers that it gets."""
    seen: list[dict[str, str]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(dict(self.headers))
            body = b'{"data": [{"id": "glm"}]}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer((address, port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield seen
        finally:
            server.shutdown()


def test_stranger_on_the_port_is_named_and_not_told_the_key(site: Site) -> None:
    known = site.shard("gpu-a", "glm", [], "--sim-hang", key=True)
    wait_for_stage(site, "gpu-a", "running")
    # It takes the engine's place on the port: the engine holds its own on another one, as bound as it is.
    launch = known["revision"] / "launch.json"
    content = json.loads(launch.read_text())
    content["ready"]["url"] = f"http://{known['address']}:8001"
    launch.write_text(json.dumps(content))
    with other_server(known["address"], 8001) as seen:
        text, results = site.gate(timeout=60)
    assert results["gpu-a"]["failed"], text
    assert f"process {os.getpid()} (" in results["gpu-a"]["verdict"]["reason"]
    assert "has the port, not this shard" in results["gpu-a"]["verdict"]["reason"]
    assert seen
    assert not any("Authorization" in headers for headers in seen)


def test_one_look_and_check_mode_never_fail_and_mark_nothing(site: Site) -> None:
    site.shard("good", "good", [0])
    site.shard("hangs", "hangs", [1], "--sim-hang")
    site.shard("ended", "ended", [2], "--sim-fail", "boom")
    site.shard("empty", "empty", [], start=False)
    (site.hosts["empty"]["revision"].parent.parent / "current").unlink()
    site.hosts["other"] = {"root": site.folder / "other", "replica": "other", "rank": ""}
    wait_for_stage(site, "ended", "failed")
    time.sleep(1)
    for arguments, options in (((), {"wait": False}), (("--check",), {})):
        text, results = site.gate(*arguments, **options)
        assert not any(row.get("failed") for row in results.values()), text
        assert not any(row["changed"] for row in results.values())
        assert {name: row["ready"] for name, row in results.items()} == {"good": True, "hangs": False, "ended": False, "empty": False, "other": None}
        assert results["ended"]["verdict"]["failed"]
        assert "boom" in " ".join(results["ended"]["verdict"]["log_lines"])
        assert "no revision" in results["empty"]["verdict"]["reason"]
    assert site.file("good", "ready.json") is None


def test_deadline_tells_the_stage_and_a_failure_takes_the_mark_away(site: Site) -> None:
    site.shard("hangs", "hangs", [0], "--sim-hang")
    good = site.shard("good", "good", [1])
    site.shard("old", "old", [2])
    text, results = site.gate(timeout=12, hosts=["hangs", "good"])
    assert "is not ready after" in results["hangs"]["msg"], text
    assert "still holding" in results["hangs"]["msg"]
    assert "nothing listens at" in results["hangs"]["msg"]
    assert results["hangs"]["stages"]["holding"] > 0
    assert sum(results["hangs"]["stages"].values()) <= results["hangs"]["seconds"] + 0.5
    assert results["good"]["ready"]
    assert site.file("good", "ready.json")

    # ready.json outlives a run_shard.py that was killed; the gate must not.
    os.kill(good["process"].pid, signal.SIGKILL)
    good["process"].wait()
    _text, results = site.gate(timeout=20, hosts=["good"])
    assert results["good"]["failed"]
    assert site.file("good", "ready.json") is None

    _text, results = site.gate(timeout=20, hosts=["old"], fingerprint="beef")
    assert "the plan wants beef" in results["old"]["msg"]


def test_restart_during_the_wait_is_a_failure(site: Site) -> None:
    known = site.shard("gpu-a", "glm", [0], "--sim-hang")
    wait_for_stage(site, "gpu-a", "running")

    def restart() -> None:
        time.sleep(4)
        with contextlib.suppress(ProcessLookupError):
            os.kill(site.file("gpu-a", "state.json")["launches"][0]["pid"], signal.SIGKILL)
        known["process"].wait()
        site.start("gpu-a")

    thread = threading.Thread(target=restart)
    thread.start()
    text, results = site.gate(timeout=60)
    thread.join()
    assert results["gpu-a"]["failed"], text
    assert any(part in results["gpu-a"]["verdict"]["reason"] for part in ("does not stay up", "ended by SIGKILL"))


@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs an ssh client")
def test_unreachable_host_ends_the_wait_of_the_others(site: Site) -> None:
    site.shard("gpu-a", "glm", [0], nodes=2)
    # Nothing listens on port 1 there: the connection is refused at once, again and again.
    site.hosts["gpu-b"] = {"root": site.folder, "replica": "glm", "rank": 1, "ansible_connection": "ssh", "ansible_host": "127.0.99.1", "ansible_port": 1}
    started = time.monotonic()
    text, results = site.gate(leader="gpu-a", timeout=120, ignore_unreachable=True)
    assert time.monotonic() - started < 60
    assert results["gpu-b"]["unreachable"], text
    assert "gave up: rank 1 (gpu-b) failed" in results["gpu-a"]["msg"]


SHOW = "LoadState=loaded\nActiveState={}\nSubState={}\nNRestarts={}\nResult={}\nExecMainStatus=1\nMainPID={}\n"


@pytest.mark.parametrize(
    ("shown", "stage", "part"),
    [
        (("activating", "start", 0, "success", 9), "starting", "has not reported"),
        (("active", "running", 0, "success", 9), "starting", "has not reported"),
        (("deactivating", "stop-sigterm", 0, "success", 9), "starting", "has not reported"),
        (("activating", "auto-restart", 3, "exit-code", 0), "failed", "does not stay up"),
        (("failed", "failed", 5, "start-limit-hit", 0), "failed", "the service has failed (start-limit-hit)"),
        (("failed", "failed", 0, "oom-kill", 0), "failed", "the service has failed (oom-kill)"),
        (("inactive", "dead", 0, "success", 0), "failed", "the service is not running"),
    ],
)
def test_what_systemd_says(site: Site, shown: tuple[Any, ...], stage: str, part: str) -> None:
    """systemctl and journalctl as they print (systemd 252): the log of earlier deployments is no cause of this failure."""
    known = site.shard("gpu-a", "glm", [], start=False)
    journal = "\n".join(
        [
            "run_shard: glm rank 0 of 1, fingerprint f00c, run 1",
            "CUDA out of memory",
            "run_shard: glm rank 0 of 1, fingerprint f00d, run 2",
            "main: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 8000",
            "run_shard: glm rank 0 of 1, fingerprint f00d, run 3",
            "ready soon",
        ]
    )
    asked: list[list[str]] = []

    def run_command(words: list[str], **_more: Any) -> tuple[int, str, str]:
        asked.append(words)
        return 0, SHOW.format(*shown) if words[0] == "systemctl" else journal, ""

    observer = observation.Observer("glm", str(known["root"]), "/proc", run_command)
    observer.places = observer.places._replace(unit_file=str(known["revision"]))
    _seen, verdict = observation.watch(observer, observation.Watch(hold_seconds=0))
    assert verdict["stage"] == stage
    assert part in verdict["reason"]
    assert asked[0][:3] == ["systemctl", "show", "inference-glm.service"]
    assert "CUDA out of memory" not in verdict["log_lines"]
    if "stay up" in part:
        assert "uses a port" in verdict["cause"]


def test_last_words_that_come_late_are_waited_for(site: Site) -> None:
    """journald and supervisord read them from a pipe, after the state says that the engine has ended."""
    known = site.shard("gpu-a", "glm", [], start=False)
    log = known["root"] / "var/log/rankzero/glm/shard.log"
    log.parent.mkdir(parents=True)
    log.write_text("run_shard: glm rank 0 of 1, fingerprint f00d, run 1\nrun_shard: stopping: engine engine ended with exit code 1\n")
    state = {
        "schema": 1,
        "replica": "glm",
        "rank": 0,
        "fingerprint": "f00d",
        "run_id": "2",
        "stage": "failed",
        "detail": "engine engine ended with exit code 1",
    }
    ended = {"name": "engine", "pid": 7, "exit": {"code": 1, "signal": None}}
    (known["root"] / "run/rankzero/glm").mkdir(parents=True)
    (known["root"] / "run/rankzero/glm/state.json").write_text(json.dumps({**state, "launches": [ended]}))

    def write_late() -> None:
        time.sleep(0.4)
        with log.open("a") as stream:
            stream.write("run_shard: glm rank 0 of 1, fingerprint f00d, run 2\n")
            stream.flush()
            time.sleep(0.4)
            stream.write("torch.OutOfMemoryError: CUDA out of memory.\nrun_shard: stopping: engine engine ended with exit code 1\n")

    writer = threading.Thread(target=write_late)
    writer.start()
    observer = observation.Observer("glm", str(known["root"]), "/proc", lambda *_words, **_more: (1, "", ""))
    _seen, verdict = observation.watch(observer, observation.Watch(hold_seconds=0))
    writer.join()
    assert verdict["failed"] and "out of memory" in verdict["cause"], verdict
    assert shard_log.is_complete(log.read_text().splitlines(), "2", True) and not shard_log.is_complete(log.read_text().splitlines(), "3", False)


def test_arguments_agree_between_module_and_action() -> None:
    from ansible_collections.rankzero.inference.plugins.action import shard_ready as action
    from ansible_collections.rankzero.inference.plugins.modules import shard_ready as module

    assert {name: spec for name, spec in module.ARGUMENTS.items() if name in action.ARGUMENTS} == action.ARGUMENTS
    documented = yaml.safe_load(module.DOCUMENTATION)["options"]
    assert set(documented) == set(module.ARGUMENTS)
    for name, spec in module.ARGUMENTS.items():
        assert {key: documented[name].get(key) for key in ("type", "default", "required")} == {key: spec.get(key) for key in ("type", "default", "required")}
    yaml.safe_load(module.RETURN)
    yaml.safe_load(module.EXAMPLES)


def test_wrong_arguments_are_refused(site: Site) -> None:
    site.hosts["gpu-a"] = {"root": site.folder, "replica": "glm", "rank": 0}
    _text, results = site.gate(hold_second=1)
    assert results["gpu-a"]["failed"]
    assert "hold_second" in results["gpu-a"]["msg"]
