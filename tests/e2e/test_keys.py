# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An API key of each engine's dialect is looked for where it must not be: every argument list of the machine while a deploy runs, units, files, logs, facts,
differences and the output of -vvv. Launches, files and processes are those of the real adapters; the programs are the simulator in their dialect."""

from __future__ import annotations

import json
import os
import pathlib
import sys
import threading
import urllib.parse
from collections.abc import Callable

import fleet
import pytest
from conftest import sim_profile
from test_simulated_replica import request, with_profile

MakeFleet = Callable[..., fleet.Fleet]
KEY = "k3y-of-%-$HOME-'quoted'-\"too\""
SPELLINGS = (KEY, json.dumps(KEY)[1:-1], repr(KEY)[1:-1], KEY.replace("'", "'\\''"), KEY.replace("'", "''"), urllib.parse.quote(KEY), "k3y-of-")

# Takes an engine's own command line, as its adapter writes it, and starts the simulator with what of it that has.
STAND_IN = """#!{python}
import os, sys
words, take = sys.argv[1:], dict({names!r})
if words in (["--version"], ["version"]):
    sys.exit(print("version: 1.2.3"))
if words == ["--list-devices"]:
    sys.exit(print("Available devices:\\n  (none)"))
value = lambda name: words[words.index(name) + 1]
model = next((value(name) for name in ("--model-path", "--model") if name in words), words[1])
line = [{python!r}, {simulator!r}, "serve", model, "--dialect", {dialect!r}]
for name, option in take.items():
    line += [option, value(name)] if name in words and option else []
line += [name for name in ("--metrics", "--enable-metrics") if name in words]
os.execv(line[0], line)
"""
PROGRAMS = {
    "vllm": ("vllm", "vllm", {"--served-model-name": "--served-model-name", "--host": "--host", "--port": "--port"}),
    "sglang": ("sglang", "sglang", {"--served-model-name": "--served-model-name", "--host": "--host", "--port": "--port", "--config": "--config"}),
    "llamacpp": ("llama-server", "llama.cpp", {"--alias": "--served-model-name", "--host": "--host", "--port": "--port"}),
}


def stand_in(folder: pathlib.Path, engine: str) -> str:
    program, dialect, names = PROGRAMS[engine]
    folder.mkdir()
    simulator = str(fleet.ROOT / "roles/replica/files/sim_engine.py")
    (folder / program).write_text(STAND_IN.format(python=sys.executable, simulator=simulator, dialect=dialect, names=tuple(names.items())))
    (folder / program).chmod(0o755)
    return str(folder)


def hugging_face(folder: pathlib.Path) -> pathlib.Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "num_attention_heads": 4}))
    (folder / "model.safetensors").write_bytes(bytes(1000))
    return folder


class Arguments(threading.Thread):
    """Looks at the arguments of every process on the machine, again and again, until it is told to stop."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.told: set[str] = set()
        self.looks = 0
        self._end = threading.Event()

    def run(self) -> None:
        while not self._end.wait(0.02):
            self.looks += 1
            for name in os.listdir("/proc"):
                if name.isdigit():
                    try:
                        line = pathlib.Path("/proc", name, "cmdline").read_bytes().decode("utf-8", "replace")
                    except OSError:
                        continue
                    if any(text in line for text in SPELLINGS):
                        self.told.add(line.replace("\0", " "))

    def stop(self) -> None:
        self._end.set()
        self.join()


@pytest.mark.parametrize("engine", ["sglang", pytest.param("vllm", marks=pytest.mark.slow), pytest.param("llamacpp", marks=pytest.mark.slow)])
def test_the_key_of_an_engine_is_in_its_secret_files_only(make_fleet: MakeFleet, model: pathlib.Path, tmp_path: pathlib.Path, engine: str) -> None:
    (tmp_path / "key").write_text(KEY)
    hosts = make_fleet(["node-a"], replica_api_key_file=str(tmp_path / "key"))
    path = stand_in(tmp_path / "build", engine)
    model = hugging_face(tmp_path / "model") if engine != "llamacpp" else model
    profile = {"engine": engine, "model_path": str(model), "served_model_name": "tiny", "gpus_per_node": 0, "threads": 1, "ready_timeout": 90}
    caching = {
        "ANSIBLE_CACHE_PLUGIN": "jsonfile",
        "ANSIBLE_CACHE_PLUGIN_CONNECTION": str(tmp_path / "facts"),
        "ANSIBLE_LOG_PATH": str(tmp_path / "ansible.log"),
    }
    watching = Arguments()
    watching.start()
    try:
        assert hosts.run("check_engines", extra={"engine_name": engine, "engine_path": path}).returncode == 0
        outputs = [
            hosts.run(playbook, "--diff", "-vvv", *options, extra=with_profile(hosts, profile), env=caching)
            for playbook, *options in (("deploy_replica", "--check"), ("deploy_replica",), ("show_environment",), ("diagnose",))
        ]
    finally:
        watching.stop()
    for done in outputs:
        assert done.returncode == 0, done.stdout + done.stderr
    launch = json.loads((hosts.root("node-a") / "etc/rankzero/e2e/current/launch.json").read_text())
    url = launch["ready"]["url"]
    assert request(url, "/v1/models", KEY)[0] == 200 and request(url, "/v1/models")[0] == 401, "the engine has the key, and asks for it"

    assert watching.looks > 50 and watching.told == set()
    for done in outputs:
        assert [text for text in SPELLINGS if text in done.stdout + done.stderr] == []
    places = [path for root in (hosts.directory, tmp_path) for path in root.rglob("*") if path.is_file() and not path.is_symlink() and path != tmp_path / "key"]
    assert {path.name for path in places} >= {"launch.json", "shard.env", "supervisord.conf", "shard.log", "ansible.log"} and list(
        (tmp_path / "facts").iterdir()
    )
    holders = {path for path in places if any(text.encode() in path.read_bytes() for text in SPELLINGS)}
    logged = {path for path in holders if path.name == "shard.log"} if engine == "sglang" else set()  # SGLang writes it there itself (sglang#37457)
    assert all(line.startswith("run_shard:") is False for path in logged for line in path.read_text().splitlines() if KEY in line)
    secret = {path for path in holders - logged if path.parent.name == "secrets"}
    assert holders - logged == secret and {path.name for path in secret} == ({"api_key", "sglang.yaml"} if engine == "sglang" else {"api_key"})
    assert {path.stat().st_mode & 0o777 for path in secret} == {0o600} and {path.parent.stat().st_mode & 0o777 for path in secret} == {0o700}
    assert all("/current/" not in str(path) for path in secret), "the link is no second copy"


@pytest.mark.parametrize(
    ("kind", "said"), [("fifo", "is no plain file"), ("directory", "is a directory"), ("huge", "has 70000 bytes"), ("device", "is no plain file")]
)
def test_a_key_file_that_is_no_key(make_fleet: Callable[..., fleet.Fleet], model: pathlib.Path, tmp_path: pathlib.Path, kind: str, said: str) -> None:
    """Refused, where reading a FIFO or a device would never end."""
    path = pathlib.Path("/dev/zero") if kind == "device" else tmp_path / kind
    {"fifo": os.mkfifo, "directory": os.mkdir, "huge": lambda at: at.write_bytes(b"k" * 70_000)}.get(kind, str)(path)
    hosts = make_fleet(["node-a"], gpus=2)
    done = hosts.run("plan_replica", extra={**with_profile(hosts, sim_profile(hosts, model)), "replica_api_key_file": str(path)}, timeout=60)
    assert done.returncode != 0 and "%s: %s" % (path, said) in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("option", ["plan_file", "plan_picture"])
def test_output_never_takes_the_place_of_what_is_no_file(
    make_fleet: Callable[..., fleet.Fleet], model: pathlib.Path, tmp_path: pathlib.Path, option: str
) -> None:
    """As root, a rename onto /dev/stdout or /dev/null would leave a machine without it."""
    os.mkfifo(tmp_path / "fifo")
    hosts = make_fleet(["node-a"], gpus=2)
    for path, said in ((str(tmp_path / "fifo"), "is no plain file"), (str(tmp_path), "is a directory"), ("/", "is a directory"), ("x\0y", "cannot be written")):
        done = hosts.run("plan_replica", extra={**with_profile(hosts, sim_profile(hosts, model)), option: path}, timeout=60)
        assert done.returncode != 0 and said in done.stdout and "Traceback" not in done.stderr, done.stdout + done.stderr
    assert (tmp_path / "fifo").is_fifo()


def test_a_plan_that_cannot_be_written_is_shown_all_the_same(make_fleet: Callable[..., fleet.Fleet], model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    hosts = make_fleet(["node-a"], gpus=2)
    extra = {**with_profile(hosts, sim_profile(hosts, model)), "plan_file": str(tmp_path / "none/plan.json"), "plan_picture": str(tmp_path / "plan.svg")}
    done = hosts.run("plan_replica", extra=extra, timeout=60)
    told = " ".join(done.stdout.split())
    assert done.returncode == 2 and f"plan_file: there is no directory {tmp_path}/none on the controller. Make it" in told, told
    assert "Plan for replica e2e" in told and (tmp_path / "plan.svg").is_file(), told
    refused = " ".join(hosts.run("plan_replica", extra={**extra, "replica_leader": "node-x"}, timeout=60).stdout.split())
    assert "The plan is refused" in refused and "replica_leader" in refused and "there is no directory" in refused, refused
