# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The whole way with simulated GPUs: real Ansible, real pynvml on the C library, real supervisord, real processes and sockets."""

from __future__ import annotations

import http.client
import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import fleet
import pytest
from conftest import sim_profile

KEY = "k3y-with-%-$HOME-'quotes'-and-\"more\""
MakeFleet = Callable[..., fleet.Fleet]


def recap(output: str, host: str) -> dict[str, int]:
    """The recap's numbers of one host."""
    line = next(line for line in output.splitlines() if re.match(rf"{re.escape(host)}\s+: ok=", line))
    return {name: int(number) for name, number in re.findall(r"(\w+)=(\d+)", line)}


def request(url: str, path: str, key: str | None = None, body: Any = None) -> tuple[int, Any]:
    host, port = re.fullmatch(r"http://(.+):(\d+)", url).groups()  # type: ignore[union-attr]
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    connection.request("POST" if body is not None else "GET", path, json.dumps(body) if body is not None else None, headers)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, json.loads(text) if text.startswith(b"{") else text.decode()


def tree(hosts: fleet.Fleet) -> list[str]:
    """Every path below the hosts' roots."""
    return sorted(str(path.relative_to(hosts.directory)) for path in (hosts.directory / "hosts").rglob("*"))


def with_profile(hosts: fleet.Fleet, profile: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"replica_name": "e2e", "replica_profile": {"name": "tiny-sim", **profile}, **more}


def test_life_of_a_replica(make_fleet: MakeFleet, model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Check, deploy, deploy again, change, fail and come back, remove, remove again; and the key is nowhere to be seen."""
    key_file = tmp_path / "key"
    key_file.write_text(KEY)
    hosts = make_fleet(["gpu-10", "gpu-9"], gpus=2, replica_api_key_file=str(key_file))
    outputs = []

    def run(playbook: str, *arguments: str, profile: dict[str, Any] | None = None, **more: Any) -> subprocess.CompletedProcess[str]:
        extra = with_profile(hosts, profile if profile is not None else sim_profile(hosts, model, nodes=2), **more)
        done = hosts.run(playbook, *arguments, extra=extra)
        outputs.append(done.stdout + done.stderr)
        return done

    empty = tree(hosts)
    checked = run("deploy_replica", "--check", "--diff", plan_file=str(tmp_path / "plan.json"))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert tree(hosts) == empty, "check mode wrote something"
    assert "all its ranks would be written and started together" in " ".join(checked.stdout.split())
    assert "+NCCL_IB_DISABLE='1'" in checked.stdout and "(secret, new)" in checked.stdout
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert {host: shard["rank"] for host, shard in plan["shards"].items()} == {"gpu-9": 0, "gpu-10": 1}, "ranks follow natural order of names"

    first = run("deploy_replica", "-vvv")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "rank 0 (gpu-9):  ready" in first.stdout and "rank 1 (gpu-10): ready" in first.stdout
    url = plan["leader"]["url"]
    assert request(url, "/v1/models")[0] == 401
    assert [item["id"] for item in request(url, "/v1/models", KEY)[1]["data"]] == ["tiny"]
    answer = request(url, "/v1/chat/completions", KEY, {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]})
    assert answer[0] == 200 and answer[1]["usage"]["completion_tokens"] == 5
    ready = json.loads((hosts.root("gpu-9") / "run/rankzero/e2e/ready.json").read_text())
    assert [gpu["held_mib"] for gpu in ready["evidence"]["gpus"]] == [48000, 48000]

    second = run("deploy_replica")
    assert second.returncode == 0 and recap(second.stdout, "gpu-9")["changed"] == recap(second.stdout, "gpu-10")["changed"] == 0, second.stdout
    pids = hosts.marked()

    status = run("replica_status")
    assert "Replica e2e: ready" in status.stdout and "2 x 48000/1024" in status.stdout

    changed = run("deploy_replica", "--diff", profile=sim_profile(hosts, model, "--max-model-len", "2048", nodes=2))
    assert changed.returncode == 0 and recap(changed.stdout, "gpu-10")["changed"] == 2, changed.stdout
    assert not set(pids) & set(hosts.marked()), "both ranks start again together"
    before = json.loads((hosts.root("gpu-9") / "etc/rankzero/e2e/current/launch.json").read_text())["fingerprint"]

    broken = run(
        "deploy_replica", profile=sim_profile(hosts, model, "--sim-fail", "torch.OutOfMemoryError: CUDA out of memory.", "--sim-fail-rank", "1", nodes=2)
    )
    assert broken.returncode == 2
    told = " ".join((broken.stdout + broken.stderr).split())  # the YAML of the screen breaks lines where they are long
    assert f"Revision {before}, which was there before, is back." in told and "A GPU ran out of memory" in told, broken.stdout
    assert request(url, "/v1/models", KEY)[0] == 200, "the previous revision serves again"
    after = json.loads((hosts.root("gpu-9") / "etc/rankzero/e2e/current/launch.json").read_text())["fingerprint"]
    assert after == before

    secret_seen_in = [path for path in _readable_places(hosts) if KEY.encode() in path.read_bytes() and "secrets" not in path.parts]
    assert secret_seen_in == []
    assert all(KEY not in output for output in outputs), "the key is in Ansible's output"
    tie_keys = {path.read_text() for path in hosts.directory.rglob("current/secrets/tie_key")}
    assert len(tie_keys) == 1 and all(len(key) == 64 and key not in output for key in tie_keys for output in outputs)
    assert [path for path in _readable_places(hosts) if "secrets" not in path.parts and any(key.encode() in path.read_bytes() for key in tie_keys)] == []
    assert all(KEY.encode() not in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes() for pid in hosts.marked())
    for path in hosts.directory.rglob("secrets/*"):
        assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700

    would = run("remove_replica", "--check")
    assert would.returncode == 0 and "would be removed from gpu-9, gpu-10." in would.stdout and hosts.marked() != [], would.stdout
    removed = run("remove_replica")
    assert removed.returncode == 0 and recap(removed.stdout, "gpu-9")["changed"] == 1
    assert "no GPU lists memory of it, its ports can be bound, no process of it runs, no file of it is left." in " ".join(removed.stdout.split()), (
        removed.stdout
    )
    assert hosts.marked() == [] and hosts.supervisors() == []
    assert [path for path in tree(hosts) if "rankzero" in path] == []
    again = run("remove_replica")
    assert again.returncode == 0 and recap(again.stdout, "gpu-9")["changed"] == 0


def _readable_places(hosts: fleet.Fleet) -> list[pathlib.Path]:
    return [path for path in hosts.directory.rglob("*") if path.is_file() and not path.is_symlink()]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        pytest.param(["--sim-gpu-skip", "{uuid1}"], r"GPU 1.*holds? no(thing| memory)", id="missing on one GPU of two"),
        pytest.param(["--sim-gpu-mib", "900"], r"450 MiB.*1024 MiB.*|gpu_memory_min_mib", id="only a bare context", marks=pytest.mark.slow),
        pytest.param(["--sim-gpu-extra", "{uuid2}"], r"not (assigned|given)", id="wrong GPU", marks=pytest.mark.slow),
        pytest.param(["--sim-no-gpu"], r"runs on the CPU", id="CPU"),
    ],
)
def test_the_gate_refuses(make_fleet: MakeFleet, model: pathlib.Path, args: list[str], told: str) -> None:
    """A healthy server is not enough: the shard's own processes must hold memory on each of its GPUs, and on no other."""
    hosts = make_fleet(["gpu-a"], gpus=3)
    words = [word.format(uuid1=hosts.hosts["gpu-a"].uuid(1), uuid2=hosts.hosts["gpu-a"].uuid(2)) for word in args]
    done = hosts.run("deploy_replica", extra=with_profile(hosts, sim_profile(hosts, model, *words)))
    output = done.stdout + done.stderr
    assert done.returncode == 2, output
    assert re.search(told, output), output
    assert "Nothing of it was left behind." in output
    assert hosts.marked() == [] and [path for path in tree(hosts) if "rankzero" in path] == []


def test_a_gpu_that_somebody_else_holds_is_never_taken(make_fleet: MakeFleet, model: pathlib.Path) -> None:
    """Foreign memory is named and refused before anything starts; the process is left alone."""
    hosts = make_fleet(["gpu-a"], gpus=2)
    foreign = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        hosts.write_state("gpu-a", f"proc gpu=1 pid={foreign.pid} mib=7000")
        done = hosts.run("deploy_replica", extra=with_profile(hosts, sim_profile(hosts, model)))
        output = done.stdout + done.stderr
        assert done.returncode == 2 and f"pid {foreign.pid}" in output and "7000 MiB" in output, output
        assert foreign.poll() is None
        assert [path for path in tree(hosts) if "rankzero" in path] == []
    finally:
        foreign.kill()
        foreign.wait()


def test_every_fault_at_once_and_nothing_changed(make_fleet: MakeFleet, model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Faults of the profile, of the request and of both hosts stand in one failure; the plan file is written with them."""
    hosts = make_fleet(["gpu-a", "gpu-b"], gpus=1)
    profile = {
        **sim_profile(hosts, model, "--por", "1", nodes=2, gpus=2),
        "model_path": "/no/such/model",
        "tensor_parallel": 4,
        "tp": "four",
        "env": {"LD_PRELOAD": "/tmp/x.so", "GOOD": "line\nbreak"},
    }
    empty = tree(hosts)
    done = hosts.run("deploy_replica", extra=with_profile(hosts, profile, plan_file=str(tmp_path / "plan.json"), replica_http_port="80x"))
    output = done.stdout + done.stderr
    assert done.returncode == 2
    for word in ("tensor_parallel", "four", "LD_PRELOAD", "a newline", "/no/such/model", "80x", "--port", "1 free of 1"):
        assert word in output, f"{word} is not in the failure:\n{output}"
    assert tree(hosts) == empty
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert {fault["host"] for fault in plan["faults"]} >= {None, "gpu-a", "gpu-b"} and plan["shards"] == {}
    assert all(set(fault) == {"host", "rank", "field", "seen", "wanted", "hint"} for fault in plan["faults"])


@pytest.mark.slow
def test_limit_that_cuts_a_replica_is_refused(make_fleet: MakeFleet, model: pathlib.Path) -> None:
    hosts = make_fleet(["gpu-a", "gpu-b"], gpus=2)
    done = hosts.run("deploy_replica", "--limit", "gpu-a", extra=with_profile(hosts, sim_profile(hosts, model, nodes=2)))
    output = done.stdout + done.stderr
    assert done.returncode == 2 and "without gpu-b" in output and "--limit" in output, output
    assert [path for path in tree(hosts) if "rankzero" in path] == []


@pytest.mark.slow
def test_hostile_values_reach_the_engine_unchanged(make_fleet: MakeFleet, tmp_path: pathlib.Path, model: pathlib.Path) -> None:
    """Quotes, $, %, spaces and unicode in arguments, environment and paths are carried exactly through every layer."""
    odd = tmp_path / "a model 100% $HOME 'quoted' \"twice\" ü"
    odd.write_bytes(model.read_bytes())
    value = "%h $PATH ${X} `id` 'a' \"b\" \\ back # hash ; semi = ü"
    hosts = make_fleet(["gpu-a"], gpus=2)
    profile = sim_profile(hosts, odd)
    profile["env"] = {**profile["env"], "ODD_VALUE": value}
    done = hosts.run("deploy_replica", extra=with_profile(hosts, profile))
    assert done.returncode == 0, done.stdout + done.stderr
    pid = next(pid for pid in hosts.marked() if b"serve" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes())
    environment = dict(item.split(b"=", 1) for item in pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if b"=" in item)
    assert environment[b"ODD_VALUE"].decode() == value
    assert str(odd).encode() in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    assert b"SSH_CONNECTION" not in environment and b"ANSIBLE_CONFIG" not in environment, "nothing of whoever ran Ansible"
