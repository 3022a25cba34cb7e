# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A real engine over two ranks: llama-server and ggml-rpc-server from the PyPI wheel, on the CPU, through the playbooks."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import time
from collections.abc import Callable
from typing import Any

import fleet
import pytest
from test_simulated_replica import recap, request, with_profile

MakeFleet = Callable[..., fleet.Fleet]
KEY = "llama-key-0123456789"


def profile(model: pathlib.Path, **more: Any) -> dict[str, Any]:
    return {
        "engine": "llamacpp",
        "model_path": str(model),
        "served_model_name": "tiny",
        "nodes": 2,
        "gpus_per_node": 0,
        "threads": 1,
        "ready_timeout": 90,
        **more,
    }


def _state(hosts: fleet.Fleet, name: str) -> dict[str, Any]:
    return dict(json.loads((hosts.root(name) / "run/rankzero/e2e/state.json").read_text()))


def _wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if holds():
                return
        except OSError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"not within 60 s: {what}")


def test_two_ranks_on_the_cpu(make_fleet: MakeFleet, model: pathlib.Path, llama: pathlib.Path) -> None:
    """Deployed, proven without GPU evidence, answering; unchanged by a second run; healed by a third; gone after removal."""
    hosts = make_fleet(["node-a", "node-b"], replica_api_key=KEY)
    extra = with_profile(hosts, profile(model, adapters=[{"name": "lora", "path": str(model.parent / "tiny-lora.gguf")}]))
    registered = hosts.run("check_engines", extra={"engine_name": "llamacpp", "engine_path": str(llama)})
    assert registered.returncode == 0, registered.stdout + registered.stderr

    first = hosts.run("deploy_replica", extra=extra)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "judged without GPU evidence" in first.stdout
    launch = json.loads((hosts.root("node-a") / "etc/rankzero/e2e/current/launch.json").read_text())
    url = launch["ready"]["url"]
    answer = request(url, "/v1/chat/completions", KEY, {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]})
    assert answer[0] == 200 and answer[1]["usage"]["completion_tokens"] == 8
    assert request(url, "/v1/chat/completions", None, {"messages": []})[0] == 401
    assert "RPC0[" in (hosts.root("node-a") / "var/log/rankzero/e2e/shard.log").read_text(), "layers are on the other rank"
    assert len(request(url, "/lora-adapters", KEY)[1]) == 1 if isinstance(request(url, "/lora-adapters", KEY)[1], list) else True

    second = hosts.run("deploy_replica", extra=extra)
    assert second.returncode == 0 and recap(second.stdout, "node-a")["changed"] == recap(second.stdout, "node-b")["changed"] == 0, second.stdout

    before = _state(hosts, "node-b")
    os.kill(before["launches"][0]["pid"], signal.SIGKILL)
    _wait_until(lambda: _state(hosts, "node-b")["run_id"] != before["run_id"] and request(url, "/health")[0] == 200, "the replica heals itself")
    healed = hosts.run("deploy_replica", extra=extra)
    assert healed.returncode == 0, healed.stdout + healed.stderr
    assert _state(hosts, "node-b")["restarts"] == before["restarts"] + 1, "proven as it runs, not started again"

    state = json.loads((hosts.root("node-b") / "run/rankzero/e2e/state.json").read_text())
    os.kill(state["supervisor_pid"], signal.SIGKILL)
    os.kill(
        hosts.supervisors()[1] if "node-b" in pathlib.Path(f"/proc/{hosts.supervisors()[1]}/cmdline").read_text() else hosts.supervisors()[0], signal.SIGKILL
    )
    third = hosts.run("deploy_replica", extra=extra)
    assert third.returncode == 0, third.stdout + third.stderr
    assert request(url, "/health")[0] == 200

    removed = hosts.run("remove_replica", extra=extra)
    assert removed.returncode == 0, removed.stdout + removed.stderr
    assert hosts.marked() == [] and hosts.supervisors() == []


@pytest.mark.slow
def test_an_rpc_rank_that_is_not_there_is_no_silent_single_host(
    make_fleet: MakeFleet, model: pathlib.Path, llama: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """llama-server alone would start on its own CPU and say it is healthy; ours waits for the rank and says for what."""
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in llama.iterdir():
        (broken / path.name).symlink_to(path)
    (broken / "ggml-rpc-server").unlink()
    (broken / "ggml-rpc-server").write_text("#!/bin/sh\necho 'illegal option' >&2\nexit 0\n")
    (broken / "ggml-rpc-server").chmod(0o755)
    hosts = make_fleet(["node-a", "node-b"])
    assert hosts.run("check_engines", extra={"engine_name": "llamacpp", "engine_path": str(broken)}).returncode == 0
    done = hosts.run("deploy_replica", extra=with_profile(hosts, profile(model, ready_timeout=12)))
    output = done.stdout + done.stderr
    assert done.returncode == 2 and "rank 1 (node-b)" in output, output
    assert hosts.marked() == []
