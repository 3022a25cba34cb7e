# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Real engines over two real hosts, deployed by deploy_replica.yml: vLLM with tensor parallel 2 by multiprocessing and by Ray, and SGLang.

The hosts are the lab's (tests/lab): a systemd, an address, a /dev/shm each. The engines' environments are laid into them read-only. One engine at a time:
two of them starting on few cores look as if they hung.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from typing import Any

import cpu_engines
import pytest
import tiny_models
from lab.lab_hosts import EXTRA_PACKAGES, Lab
from lab.test_replica_on_hosts import KEY, changes, eventually, ours, play, refused, succeeded

pytestmark = pytest.mark.real

HOSTS = ("v1", "v2")
PATTERN = "v1:v2"
VLLM = {
    "name": "lab",
    "engine": "vllm",
    "nodes": 2,
    "gpus_per_node": 0,
    "tp": 2,
    "threads": 1,
    "model_path": "/models/tiny",
    "served_model_name": "tiny",
    "adapters": [{"name": "tiny-lora", "path": "/models/tiny-lora"}],
    "ready_timeout": 900,
    "args": ["--max-model-len", "256", "--enforce-eager", "--gpu-memory-utilization", cpu_engines.vllm_memory()],
    "env": cpu_engines.ENVIRONMENT,
}
SGLANG = {
    "name": "lab",
    "engine": "sglang",
    "nodes": 2,
    "gpus_per_node": 0,
    "tp": 2,
    "threads": 1,
    "model_path": "/models/tiny",
    "served_model_name": "tiny",
    "ready_timeout": 900,
    "args": ["--mem-fraction-static", "0.05", "--max-total-tokens", "4096", "--disable-custom-all-reduce"],
    "env": {**cpu_engines.ENVIRONMENT, "SGLANG_CPU_OMP_THREADS_BIND": "0|1"},  # one core for each rank; there are more ranks than NUMA nodes
}
CASES = {
    "vllm-mp": VLLM,
    "vllm-ray": {**VLLM, "distributed": "ray", "env": {**cpu_engines.ENVIRONMENT, "VLLM_CPU_RAY": "1"}},
    "sglang": SGLANG,
}
ASK = """import json, sys, urllib.request
body = json.dumps({"model": sys.argv[2], "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]}).encode()
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + sys.stdin.read()}
answer = json.load(urllib.request.urlopen(urllib.request.Request(sys.argv[1] + "/v1/chat/completions", body, headers), timeout=240))
print(answer["usage"]["completion_tokens"], answer["choices"][0]["message"]["content"])"""
# MiB that the shard's processes hold, shared pages counted in parts.
MEMORY = """for p in $(grep -lsz ^RANKZERO_SHARD= /proc/[0-9]*/environ); do cat ${p%environ}smaps_rollup; done 2>/dev/null |
awk '/^Pss:/ {s += $2} END {print int(s / 1024)}'"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Two hosts with both engines registered."""
    one = Lab(f"e{os.getpid()}", settings={"LAB_FABRIC": "10.78.0", "LAB_EXTRA_PKGS": EXTRA_PACKAGES}, owner=os.getpid())
    reason = one.why_not()
    if reason:
        pytest.skip(reason)
    seed = tmp_path_factory.mktemp("seed")
    tiny_models.write_hf_pair(seed / "models")
    (seed / "models").chmod(0o755)
    binds = " ".join(f"{cpu_engines.install(name)}:/opt/{name}" for name in ("vllm", "sglang"))
    try:
        one.up(*HOSTS, settings={"LAB_BIND_RO": binds, "LAB_SEED": str(seed)})
        for name in ("vllm", "sglang"):
            succeeded(play(one, "check_engines", PATTERN, engine_hosts=PATTERN, engine_name=name, engine_path=f"/opt/{name}/bin"))
        yield one
    finally:
        one.down()


def asked(lab: Lab, model: str = "tiny") -> str:
    """`TOKENS TEXT` of one answer from rank 0, or what went wrong."""
    url = json.loads(lab.console("v1", "cat /etc/rankzero/lab/current/launch.json").stdout)["ready"]["url"]
    done = lab.ssh("v1", f"python3 -c '{ASK}' {url} {model}", stdin=KEY, check=False, timeout=300)
    return done.stdout.strip() or done.stderr[-300:]


def runs(lab: Lab) -> set[str]:
    """The run ids that the two ranks say they have, while both run."""
    states = [lab.console(host, "cat /run/rankzero/lab/state.json", check=False).stdout for host in HOSTS]
    found = [json.loads(text) for text in states if text.startswith("{")]
    return {one["run_id"] for one in found} if len(found) == 2 and all(one.get("stage") == "running" for one in found) else set()


def deploy(lab: Lab, profile: dict[str, Any], **more: Any) -> Any:
    return play(lab, "deploy_replica", PATTERN, replica_profile=profile, replica_api_key=KEY, timeout=1200, **more)


@pytest.mark.parametrize("case", list(CASES))
def test_an_engine_over_two_hosts(lab: Lab, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Answers, unchanged by a second run, back as a whole after one rank's death, gone after removal."""
    profile, before = CASES[case], {host: ours(lab, host) for host in HOSTS}
    first = succeeded(deploy(lab, profile))
    assert "judged without GPU evidence" in first
    seconds = max(int(found) for found in re.findall(r"ready +· (\d+) s", first))
    base = asked(lab)
    assert base.startswith("8 "), base
    if profile.get("adapters"):
        adapted = asked(lab, "tiny-lora")
        assert adapted.startswith("8 ") and adapted != base, adapted
    memory = [lab.console(host, MEMORY).stdout.strip() for host in HOSTS]
    for host in HOSTS:
        assert KEY not in lab.console(host, "cat /proc/[0-9]*/cmdline").stdout, f"{host}: the key is in a command line"
    assert changes(succeeded(deploy(lab, profile))) == {"v1": 0, "v2": 0}

    run = runs(lab)
    assert len(run) == 1
    began = time.monotonic()
    killed = lab.console("v2", KILL[case]).stdout
    assert killed.strip(), "a process of rank 1 was there to kill"
    eventually(lambda: len(runs(lab)) == 1 and runs(lab) != run, 180)
    eventually(lambda: asked(lab).startswith("8 "), 900)
    back = time.monotonic() - began
    again = succeeded(deploy(lab, profile))  # it came back by itself; the next deploy proves it
    assert re.search(r"rank 1 \(v2\): ready", again), again

    succeeded(play(lab, "remove_replica", PATTERN))
    assert {host: ours(lab, host) for host in HOSTS} == before
    assert [lab.console(host, f"pgrep -f [/]opt/{profile['engine']}/", check=False).stdout for host in HOSTS] == ["", ""]
    with capsys.disabled():
        print(f"\n{case}: ready after {seconds} s, back after a death in {back:.0f} s, {memory[0]} MiB on the leader, {memory[1]} MiB on the follower")


# The process that holds rank 1's part of the model: what dies when a GPU fails under it.
KILL = {
    "vllm-mp": "pkill -e -9 -f [V]LLM::Worker",
    "vllm-ray": "pkill -e -9 -f [r]ay::RayWorker",
    "sglang": "pkill -e -9 -f [s]glang::scheduler",
}


@pytest.mark.parametrize("case", list(CASES))
def test_a_wrong_interface_is_refused_by_the_plan(lab: Lab, case: str) -> None:
    output = refused(deploy(lab, CASES[case], replica_management="eth7"))
    assert "nothing was changed" in output and re.search(r"replica_management.*eth7", output), output


@pytest.mark.parametrize("case", list(CASES))
def test_a_leader_that_cannot_be_reached_ends_in_minutes_with_its_cause(lab: Lab, case: str) -> None:
    before = {host: ours(lab, host) for host in HOSTS}
    lab.part(*HOSTS)
    try:
        output = refused(deploy(lab, {**CASES[case], "ready_timeout": 30}))
    finally:
        lab.join(*HOSTS)
    assert re.search(r"rank 1 \(v2\): .*waits for rank 0 at 10\.77\.0\.\d+:\d+ .*no answer", output), output
    assert {host: ours(lab, host) for host in HOSTS} == before


@pytest.mark.parametrize("profile", [VLLM, SGLANG], ids=lambda profile: profile["engine"])
def test_the_preflight_reduces_with_the_build_s_own_torch(lab: Lab, profile: dict[str, Any]) -> None:
    """Gloo over two hosts in the environment that the shards will get; and with the way between them broken it says between which."""
    told = succeeded(play(lab, "preflight", PATTERN, replica_profile=profile))
    assert "Preflight of replica lab: passed" in told and len(re.findall(r"^ +[01] +v[12] .*gloo", told, re.MULTILINE)) == 2, told
    lab.part("v1", "v2")
    try:
        broken = refused(play(lab, "preflight", PATTERN, replica_profile=profile))
    finally:
        lab.join("v1", "v2")
    assert "v1" in broken and "v2" in broken and "reach" in broken, broken
    assert all(lab.console(host, "ls /tmp /var/tmp | grep preflight", check=False).stdout == "" for host in HOSTS)
