# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""run_shard.py with real processes, signals, sockets and files."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
import uuid

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "roles" / "replica" / "files" / "run_shard.py"
PYTHON_39 = os.environ.get("PYTHON39") or shutil.which("python3.9")
if PYTHON_39 is not None and subprocess.run([PYTHON_39, "-c", ""], check=False, capture_output=True).returncode:
    PYTHON_39 = None  # a launcher without that version behind it
PATIENCE = 10.0  # seconds; only a failing test waits so long
KEY = "sk-Zx81-not-in-any-output"


def load():
    """The script as a module, for its pure functions."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        spec = importlib.util.spec_from_file_location("rankzero_run_shard", SCRIPT)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    finally:
        sys.dont_write_bytecode = before


run_shard = load()


def until(condition, what="the condition"):
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"{what() if callable(what) else what} did not come true within {PATIENCE} seconds")


def alive(pid):
    process = run_shard.read_process(pid)
    return process is not None and process.state != "Z"


def environ_of(data):
    return dict(entry.split(b"=", 1) for entry in data.split(b"\0") if entry)


def python(name, source, *args, **more):
    return {"name": name, "path": sys.executable, "args": ["-IS", "-c", source, *map(str, args)], **more}


def shell(name, source, *args, **more):
    return {"name": name, "path": "/bin/sh", "args": ["-c", source, name, *map(str, args)], **more}


FASTER = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("run_shard", sys.argv[1])
module = importlib.util.module_from_spec(spec); sys.modules["run_shard"] = module; spec.loader.exec_module(module)
if sys.argv[4] == "no prctl": module.prctl_function = lambda: None
module.WAIT_LOG_SECONDS, module.PROBE_PERIOD_SECONDS = float(sys.argv[3]), 0.05
sys.exit(module.main([sys.argv[2]]))
"""


class Revision:
    """One revision on disk, and the run_shard.py processes that a test starts for it."""

    def __init__(self, root, replica=None, rank=0):
        self.root = root
        self.replica = replica or f"t{uuid.uuid4().hex[:10]}"
        self.rank = rank
        self.directory = root / "revision"
        self.state_dir = root / "run"
        self.log_file = root / "log"
        self.supervisors = []
        (self.directory / "secrets").mkdir(parents=True)
        self.document = {
            "schema": 1,
            "replica": self.replica,
            "rank": rank,
            "nodes": rank + 2,
            "fingerprint": "f00d",
            "stop_seconds": 3,
            "paths": {"state_dir": str(self.state_dir), "work_dir": str(root / "work")},
            "launches": [],
            "gpus": [],
            "ready": {"any": "thing"},
        }
        self.write([shell("engine", "exec sleep 300")])

    def write(self, launches, environment=b"PATH='/usr/bin:/bin'\n", **more):
        self.document.update(
            launches=[{"env": {}, "secret_env": {}, "wait_for_leader_port": None, "wait_for_ranks": [], **launch} for launch in launches], **more
        )
        (self.directory / "launch.json").write_text(json.dumps(self.document), encoding="utf-8")
        (self.directory / "shard.env").write_bytes(environment)

    def secret(self, name, content, directory=None):
        path = (directory or self.directory / "secrets") / name
        path.write_bytes(content)
        path.chmod(0o600)
        return path

    def command(self, *arguments, interpreter=sys.executable):
        return [interpreter, "-B", str(SCRIPT), str(self.directory), *arguments]

    def faster(self, log_seconds=30, prctl="prctl"):
        """The command with twenty attempts to connect in a second instead of two, and on demand without prctl(2)."""
        return [sys.executable, "-B", "-c", FASTER, str(SCRIPT), str(self.directory), str(log_seconds), prctl]

    def start(self, environ=None, command=None):
        with self.log_file.open("ab") as log:
            process = subprocess.Popen(command or self.command(), stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environ or {})
        self.supervisors.append(process)
        return process

    def ask(self, *arguments, prefix=()):
        return subprocess.run([*prefix, *self.command(*arguments)], capture_output=True, env={}, timeout=PATIENCE, check=False)

    @property
    def log(self):
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    @property
    def state(self):
        return json.loads((self.state_dir / "state.json").read_text(encoding="utf-8"))

    def reach(self, stage, process=None):
        pid = (process or self.supervisors[-1]).pid

        def there():
            with contextlib.suppress(FileNotFoundError):
                state = self.state
                return state if state["stage"] == stage and state["supervisor_pid"] == pid else None

        return until(there, lambda: f"stage {stage}; the log says: {self.log}")

    def pid_in(self, name):
        path = self.root / name
        return int(until(lambda: path.exists() and path.read_text().strip(), f"a pid in {name}"))

    def run(self, **more):
        """Start, and wait for the end; returns the exit code."""
        return self.start(**more).wait(PATIENCE)

    def end(self):
        for process in self.supervisors:
            process.kill()
            process.wait()
        for pid in run_shard.read_processes():
            if (run_shard.read_marker(pid) or "").startswith(f"{self.replica}/"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def revisions(tmp_path):
    made = []

    def make(**more):
        root = tmp_path / f"root{len(made)}"
        root.mkdir()
        made.append(Revision(root, **more))
        return made[-1]

    yield make
    for revision in made:
        revision.end()


@pytest.fixture
def revision(revisions):
    return revisions()


@contextlib.contextmanager
def bystander(environ, source="exec sleep 300"):
    process = subprocess.Popen(["/bin/sh", "-c", source], env={"PATH": "/usr/bin:/bin", **environ}, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def listener(address="127.0.0.1", backlog=8):
    server = socket.socket()
    server.bind((address, 0))
    server.listen(backlog)
    return server


def free_port():
    """Below the ephemeral range: a port of that range may be given to the next client, such as the very probe of a waiting launch."""
    while True:
        port = random.randrange(12000, 30000)
        if all(run_shard.bind_error(address, port) is None for address in ("0.0.0.0", "127.0.0.1")):
            return port


# -- order and waiting


LISTEN_WHEN_TOLD = """
import os, socket, sys, time
port, go = int(sys.argv[1]), sys.argv[2]
while not os.path.exists(go): time.sleep(0.01)
server = socket.socket(); server.bind(("127.0.0.1", port)); server.listen()
while True: server.accept()
"""


def test_a_launch_waits_for_the_leader_port_and_starts_when_it_listens(revision):
    port, go = free_port(), revision.root / "go"
    revision.write([python("head", LISTEN_WHEN_TOLD, port, go), shell("engine", "exec sleep 300", wait_for_leader_port={"address": "127.0.0.1", "port": port})])
    process = revision.start(command=revision.faster())
    waiting = revision.reach("waiting")
    assert f"engine waits for the leader at 127.0.0.1:{port} since 20" in waiting["detail"]
    assert [entry["name"] for entry in waiting["launches"]] == ["head"]
    time.sleep(0.3)
    assert revision.state["stage"] == "waiting" and process.poll() is None
    assert revision.log.count("waits for") == 1
    go.touch()
    running = revision.reach("running")
    assert [entry["name"] for entry in running["launches"]] == ["head", "engine"]
    assert all(alive(entry["pid"]) and entry["exit"] is None and os.getsid(entry["pid"]) == entry["pid"] for entry in running["launches"])
    assert f"the leader at 127.0.0.1:{port} listens" in revision.log


def test_a_launch_waits_for_every_rank(revision):
    ports = [free_port(), free_port()]
    revision.write(
        [
            shell(
                "engine",
                "exec sleep 300",
                wait_for_ranks=[{"rank": rank, "address": f"127.0.0.{rank + 1}", "port": port} for rank, port in enumerate(ports, start=1)],
            )
        ]
    )
    revision.start(command=revision.faster())
    assert f"rank 1 at 127.0.0.2:{ports[0]}" in revision.reach("waiting")["detail"]
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.2", ports[0]))
        first.listen()
        until(lambda: f"rank 2 at 127.0.0.3:{ports[1]}" in revision.state["detail"], "waiting for rank 2")
        assert not revision.state["launches"]
        second.bind(("127.0.0.3", ports[1]))
        second.listen()
        revision.reach("running")


def test_sidecars_stage_names_what_runs_while_the_next_one_is_prepared(revision):
    revision.write([shell("head", "exec sleep 300"), shell("engine", "exec sleep 300", wait_for_leader_port={"address": "127.0.0.1", "port": free_port()})])
    revision.start(command=[sys.executable, "-B", "-c", RECORD_STAGES, str(SCRIPT), str(revision.directory), str(revision.root / "stages")])
    revision.reach("waiting")
    revision.supervisors[-1].terminate()
    assert revision.supervisors[-1].wait(PATIENCE) == 0
    stages = (revision.root / "stages").read_text().split()
    assert stages == ["starting", "sidecars", "waiting", "stopping", "stopped"]


RECORD_STAGES = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("run_shard", sys.argv[1])
module = importlib.util.module_from_spec(spec); sys.modules["run_shard"] = module; spec.loader.exec_module(module)
written, seen = module.State._publish, []
def publish(self):
    written(self)
    if seen[-1:] != [self._content["stage"]]:
        seen.append(self._content["stage"])
        with open(sys.argv[3], "a") as stream: stream.write(seen[-1] + chr(10))
module.State._publish = publish
sys.exit(module.main([sys.argv[2]]))
"""


def test_waiting_is_logged_again_after_a_while_and_not_at_every_attempt(revision):
    revision.write([shell("engine", "exec sleep 300", wait_for_leader_port={"address": "127.0.0.1", "port": free_port()})])
    revision.start(command=revision.faster(0.2))
    revision.reach("waiting")
    time.sleep(0.7)
    assert 2 <= revision.log.count("waits for") <= 5


def test_a_stop_during_a_connection_attempt_that_gets_no_answer_is_prompt(revision):
    with listener(backlog=0) as full, contextlib.ExitStack() as clients:
        for dummy in range(4):  # a full backlog drops what comes next, as a firewall would
            client = clients.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        revision.write([shell("engine", "exec sleep 300", wait_for_leader_port={"address": "127.0.0.1", "port": full.getsockname()[1]})])
        process = revision.start()
        revision.reach("starting")
        time.sleep(0.4)  # now in the attempt, which has 3 seconds
        process.terminate()
        began = time.monotonic()
        assert process.wait(PATIENCE) == 0
        assert time.monotonic() - began < 1.5
    assert revision.state["stage"] == "stopped"
    assert not revision.state["launches"]


def test_a_sidecar_that_ends_while_the_engine_waits_ends_the_shard(revision):
    revision.write([shell("head", "sleep 0.3; exit 5"), shell("engine", "exec sleep 300", wait_for_leader_port={"address": "127.0.0.1", "port": free_port()})])
    assert revision.run() == 5
    assert "sidecar head ended with exit code 5" in revision.state["detail"]
    assert [entry["name"] for entry in revision.state["launches"]] == ["head"]


def test_a_probe_that_connects_to_itself_is_no_listener(revision):
    prepare = "ip link set lo up && echo 40000 40000 > /proc/sys/net/ipv4/ip_local_port_range"
    namespace = ["unshare", "-rn", "/bin/sh", "-c"]
    if subprocess.run([*namespace, prepare], capture_output=True, check=False).returncode != 0:
        pytest.skip("no private network namespace here")
    self_connect = "import socket; s = socket.socket(); s.connect(('127.0.0.1', 40000)); assert s.getsockname() == s.getpeername()"
    assert subprocess.run([*namespace, f'{prepare} && exec "$0" -c "$1"', sys.executable, self_connect], check=False).returncode == 0
    revision.write([shell("engine", "exec sleep 300", wait_for_leader_port={"address": "127.0.0.1", "port": 40000})])
    revision.start(command=[*namespace, f'{prepare} && exec "$0" "$@"', *revision.command()])
    assert "Connection refused" in revision.reach("waiting")["detail"]
    time.sleep(0.7)
    assert not revision.state["launches"]


# -- environment


HOSTILE = {
    b"QUOTES": b"it's \"quoted\" '' '\\'' \\ `id` $(id)",
    b"DOLLAR": b"$HOME ${PATH} $$ %h %% %i {revision} {{ x }}",
    b"UNICODE": "Grüße 模型 🚀 \u2028 \x85".encode(),
    b"NOT_UTF8": b"\xff\xfe caf\xe9",
    b"CONTROL": b"tab\there cr\rend\r \x1b[31m",
    b"EMPTY": b"",
    b"SPACES": b"  a = b  # no comment ",
}


def environment_file(variables):
    lines = [name + b"='" + value.replace(b"'", b"'\\''") + b"'\n" for name, value in sorted(variables.items())]
    return b"# a comment, it's one\n\n" + b"".join(lines)


def test_the_environment_is_exactly_what_the_revision_says(revision):
    """/bin/cat prints its own environment; the caller's is full of things that must not get through."""
    revision.secret("api_key", KEY.encode() + b"\n")
    launch = {
        "name": "engine",
        "path": "/bin/cat",
        "args": ["/proc/self/environ"],
        "secret_env": {"VLLM_API_KEY": "api_key"},
        "env": {"RANK_ONLY": "ä'$x%", "SPACES": "from the launch", "PYTHONPATH": "/opt/engine"},
    }
    revision.write([launch], environment_file({**HOSTILE, b"LD_LIBRARY_PATH": b"/opt/lib", b"HOME": b"/var/empty"}))
    caller = {
        "PATH": "/usr/bin:/bin",
        "LANG": "de_DE.ISO-8859-1",
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "HOME": "/root",
        "LD_LIBRARY_PATH": "/caller",
        "FOREIGN": "1",
        "NOTIFY_SOCKET": "/nowhere",
        "WATCHDOG_USEC": "1000000",
        "RANKZERO_SHARD": "other/1/abc",
    }
    output = subprocess.run(revision.command(), capture_output=True, env=caller, timeout=PATIENCE, check=False)
    seen = environ_of(output.stdout)
    assert seen.pop(b"RANKZERO_SHARD").decode() == f"{revision.replica}/0/{revision.state['run_id']}"
    assert seen == {
        **HOSTILE,
        b"LD_LIBRARY_PATH": b"/opt/lib",
        b"HOME": b"/var/empty",
        b"VLLM_API_KEY": KEY.encode(),
        b"RANK_ONLY": "ä'$x%".encode(),
        b"SPACES": b"from the launch",
        b"PYTHONPATH": b"/opt/engine",
    }
    assert output.returncode == 70


def test_a_posix_shell_reads_the_file_alike(revision):
    revision.write([shell("engine", "true")], environment_file(HOSTILE))
    script = "set -a; . ./shard.env; exec /bin/cat /proc/self/environ"
    seen = subprocess.run(["/bin/sh", "-c", script], cwd=revision.directory, env={}, capture_output=True, check=True).stdout
    by_shell = {name: value for name, value in environ_of(seen).items() if name in HOSTILE}
    shard = run_shard.read_shard(str(revision.directory))
    assert {run_shard.encode(name): run_shard.encode(value) for name, value in shard.environment.items()} == by_shell == HOSTILE


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True), st.text(st.characters(blacklist_characters="\n\0", codec="utf-8"))))
def test_what_is_quoted_is_read_back(variables):
    text = "".join(f"{name}={run_shard.quoted(value)}\n" for name, value in variables.items())
    assert run_shard.parse_environment(text, "shard.env") == variables


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text_is_read_or_refused(text):
    with contextlib.suppress(run_shard.Refusal):
        run_shard.parse_environment(text, "shard.env")


@pytest.mark.parametrize(
    "line",
    [
        "NAME=hidden",
        "NAME='hidden",
        "NAME='hidden'b'",
        "NAME='hidden' ",
        " NAME='hidden'",
        "export NAME='hidden'",
        "1NAME='hidden'",
        "NAME='hidden'\r",
        "hidden",
        'NAME="hidden"',
        "NAME='hidden\nb'",
        "NAME='hidden\0b'",
        "NAME='hidden'\\'b'",
        "NA-ME='hidden'",
        "NAME='hidden'; id",
    ],
)
def test_a_line_that_is_not_one_quoted_value_is_refused_without_being_shown(line):
    with pytest.raises(run_shard.Refusal) as refusal:
        run_shard.parse_environment(f"GOOD='x'\n{line}\n", "shard.env")
    assert refusal.value.code == 78
    assert "line 2" in refusal.value.text
    assert "hidden" not in refusal.value.text


def test_unsafe_names_are_dropped_whatever_wrote_them(revision):
    in_file = {b"LD_PRELOAD": b"/x.so", b"BASH_ENV": b"/x", b"GLIBC_TUNABLES": b"a=b", b"GCONV_PATH": b"/x", b"NOTIFY_SOCKET": b"/x", b"LISTEN_FDS": b"1"}
    in_launch = {
        "LD_AUDIT": "/x.so",
        "ENV": "/x",
        "PYTHONSTARTUP": "/x",
        "PYTHONINSPECT": "1",
        "BASH_FUNC_ls": "() { id; }",
        "RANKZERO_SHARD": "forged/0/1",
        "LD_LIBRARY_PATH": "/lib",
        "PYTHONUNBUFFERED": "1",
        "PATH": "/bin",
        "HOME": "/h",
        "PYTHONPATH": "/p",
    }
    revision.secret("preload", b"/y.so\n")
    revision.write(
        [{"name": "engine", "path": "/bin/cat", "args": ["/proc/self/environ"], "env": in_launch, "secret_env": {"DYLD_INSERT_LIBRARIES": "preload"}}],
        environment_file(in_file),
    )
    output = subprocess.run(revision.command(), capture_output=True, env={}, timeout=PATIENCE, check=False)
    seen = environ_of(output.stdout)
    assert seen.pop(b"RANKZERO_SHARD").startswith(revision.replica.encode())
    assert seen == {b"LD_LIBRARY_PATH": b"/lib", b"PYTHONUNBUFFERED": b"1", b"PATH": b"/bin", b"HOME": b"/h", b"PYTHONPATH": b"/p"}
    shown = revision.ask("--show").stdout.decode()
    for name in [*(name.decode() for name in in_file), "LD_AUDIT", "ENV", "PYTHONSTARTUP", "PYTHONINSPECT", "BASH_FUNC_ls", "DYLD_INSERT_LIBRARIES"]:
        assert f"launch engine: {name} is not passed on" in output.stderr.decode()
        assert f"# {name} is not passed on" in shown
        assert f"{name}=" not in shown


def test_arguments_arrive_unchanged_and_output_and_umask_are_plain(revision):
    arguments = ["a b", "", "it's", "$HOME", "%n", "模型", "two\nlines", "-x=*"]
    source = "import os, sys; sys.stdout.buffer.write(b'|'.join(map(os.fsencode, sys.argv[1:])) + b' %o %s' % (os.umask(0), os.fsencode(os.getcwd())))"
    revision.write([python("engine", source, *arguments)])
    caller = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    output = subprocess.run(revision.command(), capture_output=True, env=caller, umask=0o077, timeout=PATIENCE, check=False)
    assert output.stdout == b"|".join(argument.encode() for argument in arguments) + b" 22 " + os.fsencode(os.path.realpath(revision.directory))


# -- secrets


def test_secrets_are_in_no_output(revision):
    revision.secret("api_key", KEY.encode())
    revision.write([shell("engine", "exit 3", secret_env={"VLLM_API_KEY": "api_key"})])
    assert revision.run() == 3
    shown, checked = revision.ask("--show"), revision.ask("--check")
    assert b"VLLM_API_KEY='(secret)'" in shown.stdout
    assert str(revision.directory / "secrets" / "api_key").encode() in shown.stdout
    everything = [shown.stdout, shown.stderr, checked.stdout, checked.stderr, revision.log.encode(), json.dumps(revision.state).encode()]
    assert not [output for output in everything if KEY.encode() in output]


def test_systemd_credentials_come_first(revision):
    credentials = revision.root / "credentials"
    credentials.mkdir()
    revision.secret("api_key", b"from the revision\n")
    revision.secret("hf_token", b"only in the revision\n\n")
    revision.secret("api_key", b"from systemd\n", credentials)
    revision.write([{"name": "engine", "path": "/bin/cat", "args": ["/proc/self/environ"], "secret_env": {"A": "api_key", "B": "hf_token"}}])
    output = subprocess.run(revision.command(), capture_output=True, env={"CREDENTIALS_DIRECTORY": str(credentials)}, timeout=PATIENCE, check=False)
    seen = environ_of(output.stdout)
    assert seen[b"A"] == b"from systemd"
    assert seen[b"B"] == b"only in the revision\n"  # one newline only
    assert b"CREDENTIALS_DIRECTORY" not in seen


@pytest.mark.parametrize(("content", "says"), [(None, "cannot be read: No such file"), (b"\n", "is empty"), (b"a\0b", "holds a NUL byte")])
def test_a_secret_that_cannot_be_used_stops_the_start_and_names_its_file(revision, content, says):
    if content is not None:
        revision.secret("api_key", content)
    revision.write([shell("engine", "exec sleep 300", secret_env={"VLLM_API_KEY": "api_key"})])
    assert revision.run() == 69
    assert f"secret {revision.directory}/secrets/api_key {says}" in revision.state["detail"]
    assert revision.state["stage"] == "failed"
    assert not revision.state["launches"]


# -- --show and --check


def without_privilege():
    """A prefix under which file modes count for root too."""
    return ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.getuid() == 0 else []


def test_show_can_be_pasted_and_needs_no_secret(revision):
    revision.secret("api_key", KEY.encode()).chmod(0)
    (revision.root / "work dir").mkdir()
    launches = [
        {"name": "head", "path": "/bin/true", "args": []},
        {
            "name": "engine",
            "path": "/bin/cat",
            "args": ["/proc/self/environ", "it's $HOME"],
            "env": {"LATE": "1"},
            "secret_env": {"VLLM_API_KEY": "api_key"},
            "wait_for_ranks": [{"rank": 1, "address": "127.0.0.2", "port": 50052}],
        },
    ]
    revision.write(launches, environment_file(HOSTILE), paths={"state_dir": str(revision.state_dir), "work_dir": str(revision.root / "work dir")})
    shown = revision.ask("--show", "--launch", "engine", prefix=without_privilege())
    assert shown.returncode == 0
    assert b"# starts when rank 1 at 127.0.0.2:50052 listens" in shown.stdout
    assert b"/bin/true" not in shown.stdout
    pasted = subprocess.run(["/bin/sh"], input=shown.stdout, capture_output=True, env={"PATH": "/usr/bin:/bin", "FOREIGN": "1"}, check=False)
    assert environ_of(pasted.stdout) == {**HOSTILE, b"LATE": b"1", b"VLLM_API_KEY": b"(secret)"}
    assert b"$HOME': No such file" in pasted.stderr  # one argument, nothing of it was expanded
    names = re.findall(rb"^  ([A-Z0-9_]+)='", shown.stdout, re.MULTILINE)
    assert names == sorted(names) and len(names) == len(HOSTILE) + 2
    both = revision.ask("--show").stdout
    assert both.index(b"launch head (sidecar)") < both.index(b"launch engine (engine)")
    assert not revision.state_dir.exists()
    denied = revision.ask("--check", prefix=without_privilege())
    assert b"secrets/api_key cannot be read: Permission denied" in denied.stdout and denied.returncode == 1


def test_show_of_an_unknown_launch_names_the_known_ones(revision):
    answer = revision.ask("--show", "--launch", "nobody")
    assert (answer.returncode, answer.stdout) == (64, b"")
    assert answer.stderr == b"run_shard: no launch is named 'nobody': there is engine\n"


def test_check_is_quiet_when_nothing_stands_in_the_way_and_changes_nothing(revision):
    answer = revision.ask("--check")
    assert (answer.returncode, answer.stdout) == (0, b"")
    assert sorted(path.name for path in revision.root.iterdir()) == ["revision"]


def test_check_says_everything_that_stands_in_the_way_and_a_start_refuses(revision):
    script = revision.root / "engine.py"
    script.write_text("#!/opt/gone/bin/python3\n")
    script.chmod(0o755)
    (revision.root / "plain").write_text("")
    (revision.root / "plain").chmod(0o644)
    with listener() as listening, socket.socket() as loading:
        loading.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        loading.bind(("127.0.0.1", 0))  # bound and not listening: a vLLM that loads its weights
        taken, held = listening.getsockname()[1], loading.getsockname()[1]
        revision.write(
            [
                {"name": "head", "path": str(script), "args": []},
                {"name": "join", "path": str(revision.root / "plain"), "args": []},
                {"name": "engine", "path": "/opt/gone/vllm", "args": [], "secret_env": {"K": "missing"}},
            ],
            listen_ports=[
                {"address": "0.0.0.0", "port": taken, "what": "http"},
                {"address": "127.0.0.1", "port": held, "what": "leader"},
                {"address": "127.0.0.1", "port": free_port(), "what": "free"},
            ],
            addresses=["127.0.0.9"],
            paths={"state_dir": str(revision.state_dir), "work_dir": str(script / "work")},
        )
        answer = revision.ask("--check")
        lines = answer.stdout.decode().splitlines()
        not_listening = "by a process that does not listen (a loading engine, or a connection that was given this port)"
        assert answer.returncode == 1
        assert lines == [
            f"launch head: {script} needs the interpreter /opt/gone/bin/python3, which is missing or not executable",
            f"launch join: {revision.root}/plain is not executable for this user",
            "launch engine: /opt/gone/vllm does not exist",
            f"secret {revision.directory}/secrets/missing cannot be read: No such file or directory",
            f"working directory {script}/work cannot be used: {script} is not a directory",
            f"port 0.0.0.0:{taken} (http) cannot be bound: Address already in use, by process {os.getpid()} ({run_shard.read_process(os.getpid()).name})",
            f"port 127.0.0.1:{held} (leader) cannot be bound: Address already in use, {not_listening}",
        ]
        assert revision.run() == 69
    state = revision.state
    assert (state["stage"], state["launches"]) == ("failed", [])
    assert "/opt/gone/vllm does not exist; secret" in state["detail"]
    assert state["last_end"]["code"] is None and "/opt/gone/vllm" in state["last_end"]["reason"]
    assert revision.log.count("run_shard: check: ") == 7


def test_an_address_that_is_not_this_hosts_is_a_finding(revision):
    """In a new network namespace loopback is down, so that even ::1 is no address of the host."""
    namespace = ["unshare", "-rn"]
    if subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no private network namespace here")
    revision.write([shell("engine", "exec sleep 300")], addresses=["::1"], listen_ports=[{"address": "::1", "port": 8000, "what": "http"}])
    answer = revision.ask("--check", prefix=namespace)
    assert answer.stdout.decode().splitlines() == [
        "address ::1 is not usable on this host: Cannot assign requested address",
        "port [::1]:8000 (http) cannot be bound: Cannot assign requested address",
    ]
    assert answer.returncode == 1


def test_the_rests_of_ended_connections_do_not_count_as_a_taken_port():
    with listener() as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, dummy = server.accept()
            accepted.close()  # the server's side closes first and keeps TIME_WAIT
            assert client.recv(1) == b""
    error = until(lambda: run_shard.bind_error("127.0.0.1", port), "a port in TIME_WAIT")
    assert error.strerror == "Address already in use"
    assert run_shard.port_problem(run_shard.Port("127.0.0.1", port, "http")) is None


@pytest.mark.parametrize(
    ("uuid_known", "gpu", "missing"),
    [
        ("GPU-11111111-2222", ("GPU-11111111-2222", "0000:1b:00.0"), False),
        ("GPU-11111111-2222", ("GPU-99999999-2222", "0000:1b:00.0"), True),
        ("GPU-????????-????", ("GPU-99999999-2222", "0000:1B:00.0"), False),
        ("GPU-????????-????", ("GPU-99999999-2222", "0000:5c:00.0"), True),
        ("GPU-????????-????", ("GPU-99999999-2222", None), False),
        ("GPU-11111111-2222", ("MIG-99999999-2222", None), False),
    ],
)
def test_gpus_are_compared_with_the_drivers_list(tmp_path, uuid_known, gpu, missing):
    (tmp_path / "0000:1b:00.0").mkdir()
    (tmp_path / "0000:1b:00.0" / "information").write_text(
        f"Model: \t\t NVIDIA H200\nIRQ:   \t\t 99\nGPU UUID: \t {uuid_known}\nVideo BIOS: \t ??.??.??.??.??\nBus Location: \t 0000:1b:00.0\n"
    )
    found = run_shard.check_gpus([run_shard.Gpu(*gpu)], str(tmp_path))
    assert bool(found) is missing
    assert run_shard.check_gpus([run_shard.Gpu(*gpu)], str(tmp_path / "no-driver")) == []


def test_check_of_a_running_shard_says_so_and_leaves_its_ports_alone(revision):
    port = free_port()
    source = "import socket, sys, time; s = socket.socket(); s.bind(('127.0.0.1', int(sys.argv[1]))); s.listen(); time.sleep(300)"
    revision.write([python("engine", source, port)], listen_ports=[{"address": "127.0.0.1", "port": port, "what": "http"}])
    process = revision.start()
    revision.reach("running")
    answer = revision.ask("--check")
    assert answer.stdout.decode() == f"run_shard.py already runs this shard as process {process.pid}\n"
    assert process.poll() is None


# -- exit codes


@pytest.mark.parametrize(
    ("engine", "code", "end"),
    [
        ("exit 3", 3, {"code": 3, "signal": None}),
        ("exit 0", 70, {"code": 0, "signal": None}),
        ("kill -9 $$", 137, {"code": None, "signal": "SIGKILL"}),
        ("kill -TERM $$", 143, {"code": None, "signal": "SIGTERM"}),
    ],
)
def test_the_engines_end_is_the_shards_end(revision, engine, code, end):
    revision.write([shell("head", "exec sleep 300"), shell("engine", f"sleep 0.1; {engine}")])
    (revision.root / "run").mkdir()
    assert revision.run() == code
    state = revision.state
    assert state["stage"] == "failed"
    assert {name: state["last_end"][name] for name in ("launch", "code", "signal")} == {"launch": "engine", **end}
    head, last = state["launches"]
    assert {name: last["exit"][name] for name in ("code", "signal")} == end
    assert head["exit"]["signal"] == "SIGTERM" and not alive(head["pid"])
    assert state["detail"] == state["last_end"]["reason"]
    if code == 70:
        assert "ended by itself with exit code 0, which is not success here" in revision.log


def test_a_sidecars_end_with_0_ends_the_shard_as_a_failure(revision):
    revision.write([shell("head", "sleep 0.3"), shell("engine", "exec sleep 300")])
    assert revision.run() == 70
    state = revision.state
    assert state["detail"] == "sidecar head ended by itself with exit code 0, which is not success here"
    assert state["last_end"]["launch"] == "head"
    assert not [entry for entry in state["launches"] if entry["exit"] is None]


def test_a_program_that_cannot_be_executed_is_a_stated_end(revision):
    path = revision.root / "engine"
    path.write_bytes(b"\x7fELF of another machine")
    path.chmod(0o755)
    revision.write([shell("head", "exec sleep 300"), {"name": "engine", "path": str(path), "args": []}])
    assert revision.run() == 69
    assert f"launch engine: {path} cannot be started: Exec format error" in revision.state["detail"]
    assert not alive(revision.state["launches"][0]["pid"])


# -- stopping


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_ends_the_engine_first_and_then_the_sidecars_in_reverse(revision, number):
    obedient = 'trap "echo $0 >> $1; sleep 0.15; exit 0" TERM; echo up >> $2; while :; do sleep 0.05; done'
    order, ready = revision.root / "order", revision.root / "up"
    revision.write([shell(name, obedient, order, ready) for name in ("head", "join", "engine")])
    process = revision.start()
    revision.reach("running")
    until(lambda: ready.exists() and ready.read_text().count("up") == 3)
    process.send_signal(number)
    assert process.wait(PATIENCE) == 0
    assert order.read_text().split() == ["engine", "join", "head"]
    state = revision.state
    assert state["stage"] == "stopped"
    assert state["last_end"]["reason"] == f"{number.name} received"
    assert [entry["exit"]["code"] for entry in state["launches"]] == [0, 0, 0]


TREE = """
import os, signal, subprocess, sys, time
root = sys.argv[1]
def note(name, pid):
    with open(os.path.join(root, name), "w") as stream: stream.write(str(pid))
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGHUP, signal.SIG_IGN); time.sleep(300)"
note("stubborn", subprocess.Popen([sys.executable, "-IS", "-c", stubborn]).pid)
if os.fork() == 0:
    os.setsid()
    pid = os.fork()
    if pid: note("daemon", pid); os._exit(0)
    os.execve(sys.executable, [sys.executable, "-IS", "-c", stubborn], {})     # no marker: found by descent only
note("engine", os.getpid())
time.sleep(float(sys.argv[2])); sys.exit(4)
"""


def test_a_stop_ends_daemons_and_children_that_ignore_sigterm(revision):
    revision.write([python("engine", TREE, revision.root, 300)], stop_seconds=1)
    process = revision.start()
    pids = [revision.pid_in(name) for name in ("engine", "stubborn", "daemon")]
    until(lambda: b"SIG_IGN" in pathlib.Path(f"/proc/{pids[2]}/cmdline").read_bytes())
    time.sleep(0.2)
    with bystander({"RANKZERO_SHARD": f"{revision.replica}x/0/{revision.state['run_id']}"}) as other:
        process.terminate()
        time.sleep(0.1)
        process.terminate()
        process.send_signal(signal.SIGHUP)  # a second stop skips nothing
        assert process.wait(PATIENCE) == 0
        assert not [pid for pid in pids if alive(pid)]
        assert other.poll() is None
    assert "SIGKILL to " in revision.log and f"{pids[1]} (" in revision.log
    assert revision.state["stage"] == "stopped"


def test_an_engine_that_crashes_leaves_no_process(revision):
    revision.write([python("engine", TREE, revision.root, 0.4)], stop_seconds=0.5)
    assert revision.run() == 4
    assert not [name for name in ("stubborn", "daemon") if alive(revision.pid_in(name))]


def test_without_prctl_daemons_are_found_by_their_environment(revision):
    revision.write([shell("engine", "(setsid sleep 300 & echo $! > $1); exec sleep 300", revision.root / "daemon")])
    process = revision.start(command=revision.faster(prctl="no prctl"))
    daemon = revision.pid_in("daemon")
    until(lambda: process.pid not in run_shard.ancestors(run_shard.read_processes(), daemon), "a daemon outside the tree")
    process.terminate()
    assert process.wait(PATIENCE) == 0
    assert not alive(daemon)
    assert "cannot be adopted here" in revision.log


def test_a_signal_does_not_reach_a_later_process_of_the_same_pid():
    with bystander({}) as process:
        seen = run_shard.read_process(process.pid)
        assert run_shard.send_signal(seen._replace(start=seen.start - 1), signal.SIGKILL) is None
        time.sleep(0.05)
        assert process.poll() is None
        assert run_shard.send_signal(seen, signal.SIGKILL) is None
        assert process.wait(PATIENCE) == -signal.SIGKILL
        assert run_shard.send_signal(seen, signal.SIGKILL) is None


def test_an_engine_that_ignores_sigterm_leaves_its_sidecars_time_to_end(revision):
    obedient = 'trap "sleep 0.12; echo told > $1; exit 0" TERM; while :; do sleep 0.05; done'
    revision.write(
        [shell("head", obedient, revision.root / "told"), shell("engine", 'trap "" TERM; echo $$ > $1; while :; do sleep 0.05; done', revision.root / "pid")],
        stop_seconds=1,
    )
    process = revision.start()
    revision.pid_in("pid")
    process.terminate()
    assert process.wait(PATIENCE) == 0
    assert (revision.root / "told").exists()
    assert revision.state["launches"][0]["exit"]["code"] == 0


def test_an_engine_that_ignores_sigterm_is_killed_in_bounded_time(revision):
    revision.write(
        [shell("head", "exec sleep 300"), shell("engine", 'trap "" TERM; echo $$ > $1; while :; do sleep 0.05; done', revision.root / "pid")], stop_seconds=0.6
    )
    process = revision.start()
    pid = revision.pid_in("pid")
    began = time.monotonic()
    process.terminate()
    assert process.wait(PATIENCE) == 0
    assert 0.5 < time.monotonic() - began < 3
    assert not alive(pid)
    assert f"launch engine (process {pid}) did not end within 0.6 seconds" in revision.log
    assert [entry["exit"]["signal"] for entry in revision.state["launches"]] == ["SIGTERM", "SIGKILL"]


def test_a_stop_while_nobody_reads_the_log_still_ends_everything(revision):
    revision.write([shell("engine", "echo $$ > $1; exec sleep 300", revision.root / "pid")])
    process = subprocess.Popen(revision.command(), stderr=subprocess.PIPE, env={})
    revision.supervisors.append(process)
    pid = revision.pid_in("pid")
    process.stderr.close()
    process.terminate()
    assert process.wait(PATIENCE) == 0
    assert not alive(pid)


# -- killed supervisors, leftovers, the lock


def test_killing_run_shard_ends_its_launches_and_the_next_start_ends_the_rest(revision):
    worker = "setsid sleep 300 & echo $! > $1; exec sleep 300"
    revision.write([shell("head", "exec sleep 300"), shell("engine", worker, revision.root / "worker")])
    first = revision.start()
    pids = [entry["pid"] for entry in revision.reach("running")["launches"]]
    worker_pid, old = revision.pid_in("worker"), revision.state["run_id"]
    strangers = [
        {"RANKZERO_SHARD": f"{revision.replica}/1/{old}"},
        {"RANKZERO_SHARD": f"{revision.replica}/0"},
        {"RANKZERO_SHARD": f"x{revision.replica}/0/{old}"},
        {"NOT_RANKZERO_SHARD": f"{revision.replica}/0/{old}"},
    ]
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(bystander(environ)) for environ in strangers]
        first.kill()
        first.wait()
        until(lambda: not any(alive(pid) for pid in pids), "the launches' death")
        assert alive(worker_pid)
        revision.start()
        state = revision.reach("running")
        assert not alive(worker_pid)
        assert [other.poll() for other in others] == [None] * 4
    assert f"process {worker_pid} (" in revision.log and f"is left of run {revision.replica}/0/{old}: ending it" in revision.log
    assert state["last_end"] == {
        "launch": None,
        "code": None,
        "signal": None,
        "at": None,
        "rank": 0,
        "kind": "supervisor",
        "reason": f"run_shard.py of run {old} was killed (SIGKILL) or crashed in stage running",
    }
    assert state["restarts"] == 1 and state["run_id"] != old


def test_a_running_shard_of_the_same_name_in_another_root_is_left_alone(revisions):
    first, second = revisions(), None
    first.start()
    pid = first.reach("running")["launches"][0]["pid"]
    second = revisions(replica=first.replica)
    second.start()
    second.reach("running")
    assert alive(pid) and first.state["stage"] == "running"
    assert "is left of run" not in second.log


def test_only_one_runs_per_state_directory(revision):
    first = revision.start()
    state = revision.reach("running")
    second = revision.ask()
    assert second.returncode == 75
    assert second.stderr.decode() == f"run_shard: already running: process {first.pid} holds {revision.state_dir}/lock\n"
    assert revision.state == state and alive(state["launches"][0]["pid"])
    first.kill()
    first.wait()
    revision.start()
    revision.reach("running")


# -- state.json


def test_state_is_complete_readable_and_counts_restarts(revision):
    revision.write([shell("engine", "exit 3")])
    before = os.umask(0o077)
    try:
        process = revision.start()
    finally:
        os.umask(before)
    assert process.wait(PATIENCE) == 3
    first = revision.state
    assert set(first) == {
        "schema",
        "replica",
        "rank",
        "fingerprint",
        "run_id",
        "boot_id",
        "stage",
        "detail",
        "stage_since",
        "started_at",
        "supervisor_pid",
        "launches",
        "restarts",
        "last_end",
        "run_number",
        "run_port",
        "failures",
        "tie",
        "own_end",
    }
    assert re.fullmatch("[0-9a-f]{12}", first["run_id"])
    assert first["restarts"] == 0 and first["started_at"] <= first["stage_since"] <= time.time()
    assert stat.S_IMODE((revision.state_dir / "state.json").stat().st_mode) == 0o644
    assert sorted(path.name for path in revision.state_dir.iterdir()) == ["lock", "state.json"]
    (revision.state_dir / "ready.json").write_text("{}")
    revision.write([shell("engine", "exec sleep 300")])
    revision.start()
    second = revision.reach("running")
    assert not (revision.state_dir / "ready.json").exists()
    assert second["restarts"] == 1 and second["last_end"] == first["last_end"] and second["run_id"] != first["run_id"]
    revision.supervisors[-1].terminate()
    revision.supervisors[-1].wait(PATIENCE)
    (revision.state_dir / "state.json").write_text(json.dumps({**revision.state, "boot_id": "another boot", "stage": "running"}))
    revision.start()
    third = revision.reach("running")
    assert third["restarts"] == 0 and "ended with the host in stage running" in third["last_end"]["reason"]
    revision.supervisors[-1].terminate()
    revision.supervisors[-1].wait(PATIENCE)
    revision.write([shell("engine", "exit 3")], fingerprint="beef")
    revision.run()
    assert revision.state["restarts"] == 0


def test_readiness_ends_with_the_run(revision):
    process = revision.start()
    revision.reach("running")
    (revision.state_dir / "ready.json").write_text("{}")
    process.terminate()
    process.wait(PATIENCE)
    assert not (revision.state_dir / "ready.json").exists()


@pytest.mark.parametrize("content", ["", "[]", "{", '{"restarts": "x", "last_end": 3, "stage": "failed"}', "[" * 100000])
def test_a_damaged_state_file_is_replaced(revision, content):
    revision.write([shell("engine", "exit 3")])
    revision.state_dir.mkdir()
    (revision.state_dir / "state.json").write_text(content)
    assert revision.run() == 3
    assert revision.state["restarts"] == 0 and revision.state["stage"] == "failed"


def test_a_state_directory_that_cannot_be_used_is_one_line(revision):
    (revision.root / "run").write_text("a file")
    assert revision.run() == 73
    assert revision.log.startswith(f"run_shard: state directory {revision.state_dir} cannot be used: ") and revision.log.count("\n") == 1


# -- the service manager


@pytest.mark.parametrize("abstract", [False, True])
def test_the_service_manager_is_told(revision, abstract):
    name = f"rankzero-{uuid.uuid4().hex}" if abstract else str(revision.root / "notify")
    port = free_port()
    revision.write([shell("head", "exec sleep 300"), shell("engine", "exec sleep 300", wait_for_leader_port={"address": "127.0.0.1", "port": port})])
    messages = []

    def told(text):
        with contextlib.suppress(BlockingIOError):
            while True:
                messages.append(service_manager.recv(4096).decode())
        return [message for message in messages if message.startswith(text)]

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as service_manager:
        service_manager.bind(f"\0{name}" if abstract else name)
        service_manager.setblocking(False)
        process = revision.start(environ={"NOTIFY_SOCKET": f"@{name}" if abstract else name, "WATCHDOG_USEC": "100000"})
        until(lambda: told(f"STATUS=waiting: launch engine waits for the leader at 127.0.0.1:{port}"))
        assert told("READY=1") and messages.index("READY=1") < messages.index(told("STATUS=waiting")[0])
        beats = len(told("WATCHDOG=1"))
        time.sleep(0.3)
        assert 4 <= len(told("WATCHDOG=1")) - beats <= 7
        with socket.socket() as server:
            server.bind(("127.0.0.1", port))
            server.listen()
            until(lambda: told("STATUS=running"))
        process.terminate()
        process.wait(PATIENCE)
        assert told("STOPPING=1") and told("STATUS=stopping: SIGTERM received") and told("STATUS=stopped")


def test_a_refused_start_is_not_ready_for_the_service_manager(revision):
    revision.write([{"name": "engine", "path": "/opt/gone", "args": []}])
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as service_manager:
        service_manager.bind(str(revision.root / "notify"))
        service_manager.setblocking(False)
        assert revision.run(environ={"NOTIFY_SOCKET": str(revision.root / "notify"), "WATCHDOG_USEC": "1000000"}) == 69
        messages = []
        with contextlib.suppress(BlockingIOError):
            while True:
                messages.append(service_manager.recv(4096).decode())
    assert [message for message in messages if message.startswith("STATUS=failed: launch engine: /opt/gone does not exist")]
    assert "READY=1" not in messages


def test_a_watchdog_of_another_process_is_not_fed(revision):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as service_manager:
        service_manager.bind(str(revision.root / "notify"))
        service_manager.settimeout(PATIENCE)
        process = revision.start(environ={"NOTIFY_SOCKET": str(revision.root / "notify"), "WATCHDOG_USEC": "20000", "WATCHDOG_PID": "1"})
        revision.reach("running")
        time.sleep(0.1)
        process.terminate()
        messages = list(iter(lambda: service_manager.recv(4096).decode(), "STATUS=stopped: SIGTERM received"))
    assert "READY=1" in messages and "WATCHDOG=1" not in messages


def test_a_service_manager_that_is_gone_does_not_matter(revision):
    revision.write([shell("engine", "exit 3")])
    assert revision.run(environ={"NOTIFY_SOCKET": str(revision.root / "nobody")}) == 3
    assert revision.log.count("cannot be notified") == 1


# -- damaged revisions


def edit(path, value):
    """A change of the valid document: the value at this path, or its absence for `...`."""

    def change(document):
        *above, last = path
        for step in above:
            document = document[step]
        if value is ...:
            del document[last]
        else:
            document[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (edit(["schema"], 2), "launch.json has schema 2, this run_shard.py reads schema 1"),
        (edit(["schema"], True), "launch.json.schema must be an integer"),
        (edit(["replica"], "../x"), "launch.json.replica must be a name"),
        (edit(["rank"], 2), "launch.json.rank must be an integer, 0 to 1"),
        (edit(["rank"], "0"), "launch.json.rank must be an integer, 0 to 1"),
        (edit(["fingerprint"], ...), "launch.json.fingerprint must be a string"),
        (edit(["paths"], None), "launch.json.paths must be an object"),
        (edit(["paths", "state_dir"], "run"), "launch.json.paths.state_dir must be an absolute path"),
        (edit(["launches"], []), "launch.json.launches must not be empty"),
        (edit(["launches"], {}), "launch.json.launches must be a list"),
        (edit(["launches", 0], "x"), "launch.json.launches[0] must be an object"),
        (edit(["launches", 0, "name"], "a b"), "launch.json.launches[0].name must be a name"),
        (edit(["launches", 0, "path"], "vllm"), "launch.json.launches[0].path must be an absolute path"),
        (edit(["launches", 0, "args"], "serve"), "launch.json.launches[0].args must be a list"),
        (edit(["launches", 0, "args"], ["a", 1]), "launch.json.launches[0].args[1] must be a string"),
        (edit(["launches", 0, "args"], ["a\0b"]), "launch.json.launches[0].args[0] holds a NUL character"),
        (edit(["launches", 0, "args"], ["\ud800"]), "launch.json.launches[0].args[0] holds a character that is not Unicode text"),
        (edit(["launches", 0, "env"], {"A B": "c"}), "launch.json.launches[0].env has a key that is not a variable name"),
        (edit(["launches", 0, "env"], {"A": 1}), "launch.json.launches[0].env.A must be a string of one line"),
        (edit(["launches", 0, "env"], {"A": "x\ny"}), "launch.json.launches[0].env.A must be a string of one line"),
        (edit(["launches", 0, "secret_env"], {"A": "../../etc/shadow"}), "launch.json.launches[0].secret_env.A must be the name of a file in secrets/"),
        (edit(["launches", 0, "wait_for_leader_port"], {"address": "leader.example", "port": 1}), "wait_for_leader_port.address must be an IP address"),
        (edit(["launches", 0, "wait_for_leader_port"], {"address": "127.0.0.1", "port": 65536}), "wait_for_leader_port.port must be an integer, 1 to 65535"),
        (edit(["launches", 0, "wait_for_ranks"], [{"rank": -1}]), "launch.json.launches[0].wait_for_ranks[0].rank must be an integer, at least 0"),
        (edit(["stop_seconds"], float("nan")), "launch.json.stop_seconds must be a number of seconds"),
        (edit(["gpus"], [{"uuid": None}]), "launch.json.gpus[0].uuid must be a string"),
        (edit(["listen_ports"], [{"address": "127.0.0.1", "port": 1}]), "launch.json.listen_ports[0].what must be a string"),
        (edit(["addresses"], [7]), "launch.json.addresses[0] must be an IP address"),
    ],
)
def test_a_damaged_launch_file_is_one_clear_line(revision, capfd, change, says):
    revision.write([shell("engine", "exec sleep 300")])
    change(revision.document)
    (revision.directory / "launch.json").write_text(json.dumps(revision.document))
    assert run_shard.main([str(revision.directory)]) == 78
    error = capfd.readouterr().err
    assert error.startswith("run_shard: launch.json") and says in error and error.count("\n") == 1
    assert not revision.state_dir.exists()


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("launch.json", b"{", "launch.json is damaged: not JSON"),
        ("launch.json", b"[" * 100000, "launch.json is damaged: not JSON"),
        ("launch.json", b"[]", "launch.json must be an object"),
        ("launch.json", b'{"replica": "\xff"}', "launch.json is damaged: byte 13 is not UTF-8"),
        ("launch.json", None, "launch.json cannot be read: No such file or directory"),
        ("shard.env", None, "shard.env cannot be read: No such file or directory"),
        ("shard.env", b"A='x\ny'\n", "shard.env is damaged: line 1 is not NAME='value' on one line"),
    ],
)
def test_a_damaged_file_ends_the_program_with_78(revision, name, content, says):
    revision.write([shell("engine", "exec sleep 300")])
    if content is None:
        (revision.directory / name).unlink()
    else:
        (revision.directory / name).write_bytes(content)
    assert revision.run() == 78
    assert says in revision.log and revision.log.count("\n") == 1 and "Traceback" not in revision.log


def test_a_wrong_command_line_is_one_line(revision):
    for arguments in (["--shw"], ["--launch", "engine"], ["--show", "--check"]):
        answer = revision.ask(*arguments)
        assert answer.returncode == 64
        assert answer.stderr.count(b"\n") == 1 and answer.stderr.startswith(b"run_shard: ")


# -- where and with what it runs


def test_the_default_directory_is_the_scripts_own_through_links(revision):
    shutil.copy(SCRIPT, revision.directory)
    (revision.root / "current").symlink_to(revision.directory)
    script = revision.root / "current" / "run_shard.py"
    shown = subprocess.run([sys.executable, "-B", str(script), "--show"], capture_output=True, env={}, cwd="/", check=True)
    assert b"launch engine" in shown.stdout and shown.stderr == b""


@pytest.mark.skipif(PYTHON_39 is None, reason="no Python 3.9 on this machine")
def test_python_3_9_runs_it(revision):
    revision.secret("api_key", KEY.encode())
    revision.write(
        [shell("head", "exec sleep 300"), python("engine", TREE, revision.root, 300, secret_env={"K": "api_key"})],
        stop_seconds=0.5,
        listen_ports=[{"address": "127.0.0.1", "port": free_port(), "what": "http"}],
        addresses=["127.0.0.1"],
    )
    for action in ("--show", "--check"):
        assert subprocess.run(revision.command(action, interpreter=PYTHON_39), capture_output=True, env={}, check=False).returncode == 0
    process = revision.start(command=revision.command(interpreter=PYTHON_39))
    pids = [revision.pid_in(name) for name in ("engine", "stubborn", "daemon")]
    process.terminate()
    assert process.wait(PATIENCE) == 0
    assert not [pid for pid in pids if alive(pid)]
    assert revision.state["stage"] == "stopped" and "internal error" not in revision.log


def test_processes_are_read_with_any_name(tmp_path):
    process = run_shard.parse_stat("42 (a) b (c) S 7 42 42 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 123456 1 1")
    assert process == run_shard.Process(42, 7, "S", 123456, "a) b (c")


# -- one replica, one fate: several ranks on loopback addresses


TIE_KEY = b"0123456789abcdef" * 4
SILENT = 1.5  # seconds


class Ranks:
    """All ranks of one replica, each with its own revision, state directory and address."""

    def __init__(self, revisions, count, engine=None, silent=SILENT, restart=None, stop_seconds=2, secret=TIE_KEY):
        self.port, self.first = free_port(), free_port()
        first = revisions()
        self.ranks = [first, *(revisions(replica=first.replica, rank=rank) for rank in range(1, count))]
        for rank, revision in enumerate(self.ranks):
            revision.secret("tie_key", secret)
            revision.write(
                [engine(rank) if engine is not None else shell("engine", "exec sleep 300")],
                nodes=count,
                stop_seconds=stop_seconds,
                tie={
                    "address": "127.0.0.1",
                    "port": self.port,
                    "secret": "tie_key",
                    "silent_seconds": silent,
                    "run_ports": [self.first + slot for slot in range(10)],
                },
                restart=restart or {"limit": 3, "window_seconds": 600, "backoff": [0.1, 0.2]},
            )

    def __getitem__(self, rank):
        return self.ranks[rank]

    def __len__(self):
        return len(self.ranks)

    def start(self, *ranks):
        for rank in ranks or range(len(self.ranks)):
            self.ranks[rank].start()
        return self

    def change(self, rank, **more):
        self.ranks[rank].document.update(more)
        (self.ranks[rank].directory / "launch.json").write_text(json.dumps(self.ranks[rank].document), encoding="utf-8")

    def states(self):
        found = []
        for revision in self.ranks:
            with contextlib.suppress(FileNotFoundError, ValueError):
                found.append(revision.state)
        return found

    def running(self, other_than=None):
        """Until all ranks run in one run, a later one than `other_than`; its id."""

        def there():
            states = self.states()
            ids = {state["run_id"] for state in states}
            same = len(states) == len(self.ranks) and len(ids) == 1 and ids != {other_than} and {state["stage"] for state in states} == {"running"}
            return same and states[0]["run_id"]

        return until(
            there,
            lambda: f"one run on all ranks ({[(state['stage'], state['detail']) for state in self.states()]}; {[revision.log for revision in self.ranks]})",
        )

    def pids(self):
        return [state["launches"][-1]["pid"] for state in self.states()]

    def failed(self):
        """Until all ranks have ended as failed; their exit codes."""
        return [revision.supervisors[-1].wait(PATIENCE) for revision in self.ranks]


@pytest.fixture
def ranks(revisions):
    return lambda count=2, **more: Ranks(revisions, count, **more)


def test_ranks_that_are_missing_alike_are_told_together(ranks):
    replica = ranks(3)
    replica.start(0)
    assert re.fullmatch("waits for rank 1, 2 since 20[^ ]+ [(]not seen yet[)]", replica[0].reach("tying")["detail"])


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_ranks_start_together_in_whatever_order_their_hosts_come(ranks, order):
    replica = ranks(3)
    for rank in order[:2]:
        replica.start(rank)
    for rank in order[:2]:
        state = replica[rank].reach("tying")
        assert state["launches"] == [] and state["run_id"] is None
    if 0 in order[:2]:
        until(lambda: replica[0].state["detail"].startswith(f"waits for rank {order[2]} since 20"), "who is missing")
        assert replica[0].state["tie"]["tied_ranks"] == sorted(order[:2])
    else:
        assert f"waits for rank 0 at 127.0.0.1:{replica.port} since 20" in replica[1].state["detail"]
    replica.start(order[2])
    run = replica.running()
    assert [state["run_number"] for state in replica.states()] == [1] * 3
    assert [state["tie"]["role"] for state in replica.states()] == ["leader", "follower", "follower"]
    until(lambda: all(state["tie"]["tied_ranks"] == [0, 1, 2] for state in replica.states()), "the tied ranks in every state.json")
    for rank, pid in enumerate(replica.pids()):
        assert environ_of(pathlib.Path(f"/proc/{pid}/environ").read_bytes())[b"RANKZERO_SHARD"].decode() == f"{replica[0].replica}/{rank}/{run}"


@pytest.mark.parametrize("culprit", [0, 1, 2])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_engine_that_ends_on_any_rank_restarts_all(ranks, culprit, number):
    replica = ranks(3).start()
    old, pids = replica.running(), replica.pids()
    os.kill(pids[culprit], number)
    new = replica.running(other_than=old)
    assert new != old and not any(alive(pid) for pid in pids)
    for rank, state in enumerate(replica.states()):
        end = state["last_end"]
        assert (end["rank"], end["kind"], end["launch"], end["signal"]) == (culprit, "launch", "engine", number.name)
        assert end["reason"].startswith("engine engine was ended by" if rank == culprit else f"rank {culprit}: engine engine was ended by"), end
        assert state["run_number"] == 2 and state["restarts"] == 1 and state["failures"] == 1 and state["own_end"] is None


def test_ends_on_several_ranks_at_once_are_each_known_where_they_happened(ranks):
    replica = ranks(2, restart={"limit": 1, "window_seconds": 60, "backoff": []}).start()
    replica.running()
    for pid in replica.pids():
        os.kill(pid, signal.SIGKILL)
    assert replica.failed() == [79, 79]
    first, second = replica.states()
    assert first["last_end"]["rank"] == second["last_end"]["rank"], "all ranks name the same one"
    named = first["last_end"]["rank"]
    assert replica[named].state["own_end"]["signal"] == "SIGKILL"
    assert all(state["own_end"] is None or state["own_end"]["rank"] == rank for rank, state in enumerate((first, second)))


def test_an_engine_that_leaves_with_0_while_serving_restarts_all(ranks):
    replica = ranks(2, engine=lambda rank: shell("engine", "trap 'exit 0' USR1; while :; do sleep 0.05; done")).start()
    old, pids = replica.running(), replica.pids()
    os.kill(pids[1], signal.SIGUSR1)
    replica.running(other_than=old)
    assert replica[0].state["last_end"]["reason"] == "rank 1: engine engine ended by itself with exit code 0, which is not success here"


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_run_shard_is_noticed_at_once_and_the_rank_rejoins_by_itself(ranks, victim):
    replica = ranks(2, silent=60).start()
    old, pids = replica.running(), replica.pids()
    replica[victim].supervisors[-1].kill()
    replica[victim].supervisors[-1].wait()
    until(lambda: not any(alive(pid) for pid in pids), "the end of all engines")
    assert "ended the connection" in replica[1 - victim].reach("tying")["last_end"]["reason"]
    replica.start(victim)
    replica.running(other_than=old)
    assert replica[1 - victim].state["last_end"]["rank"] == victim and replica[1 - victim].state["failures"] == 0
    assert replica[0].state["run_number"] == 2, "the number goes on, whoever lost its memory"


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.slow
def test_a_silent_rank_is_lost_after_the_limit_and_not_before(ranks, victim):
    """SIGSTOP: the connection stays, the process says nothing."""
    replica = ranks(2).start()
    old, pids = replica.running(), replica.pids()
    other = replica[1 - victim]
    replica[victim].supervisors[-1].send_signal(signal.SIGSTOP)
    began = time.monotonic()
    until(lambda: other.state["stage"] != "running", "the loss")
    noticed = time.monotonic() - began
    assert SILENT * 0.85 < noticed < SILENT + 1.5, noticed
    until(lambda: other.state["stage"] == "tying", "the end of this rank's engine")
    assert not alive(pids[1 - victim]) and f"silent for more than {SILENT:g} seconds" in other.state["last_end"]["reason"]
    replica[victim].supervisors[-1].send_signal(signal.SIGCONT)
    replica.running(other_than=old)
    assert not any(alive(pid) for pid in pids)


@pytest.mark.slow
def test_a_short_silence_does_not_matter(ranks):
    replica = ranks(2, silent=2).start()
    run, pids = replica.running(), replica.pids()
    for victim in (0, 1):
        replica[victim].supervisors[-1].send_signal(signal.SIGSTOP)
        time.sleep(1.2)
        replica[victim].supervisors[-1].send_signal(signal.SIGCONT)
        time.sleep(0.5)
    assert replica.running() == run and all(alive(pid) for pid in pids)


@pytest.mark.slow
def test_a_stop_of_one_rank_ends_the_run_of_all_and_counts_as_no_failure(ranks):
    replica = ranks(2).start()
    old = replica.running()
    replica[1].supervisors[-1].terminate()
    assert replica[1].supervisors[-1].wait(PATIENCE) == 0
    until(lambda: replica[0].state["stage"] == "tying", "tying again")
    assert replica[0].state["last_end"]["reason"] == "rank 1: SIGTERM received" and replica[0].state["failures"] == 0
    replica.start(1)
    new = replica.running(other_than=old)
    replica[0].supervisors[-1].terminate()
    assert replica[0].supervisors[-1].wait(PATIENCE) == 0 and replica[0].state["stage"] == "stopped"
    until(lambda: replica[1].state["stage"] == "tying", "tying again")
    assert replica[1].state["last_end"]["reason"] == "rank 0: SIGTERM received"
    replica.start(0)
    assert replica.running(other_than=new) not in (old, new)


@pytest.mark.slow
def test_rank_0_stops_first_and_the_others_wait_a_limited_time(ranks):
    slow = "trap 'sleep 0.6; date +%s.%N > $1; exit 0' TERM; : > $2; while :; do sleep 0.02; done"
    replica = ranks(2, stop_seconds=5)
    marks = [replica[rank].root / "stopped" for rank in (0, 1)]
    up = [replica[rank].root / "up" for rank in (0, 1)]
    for rank in (0, 1):
        replica[rank].write([shell("engine", slow, marks[rank], up[rank]), shell("last", "exec sleep 300")])
    replica.start()
    replica.running()
    until(lambda: all(path.exists() for path in up), "both engines")
    os.kill(replica[1].state["launches"][-1]["pid"], signal.SIGKILL)
    until(lambda: all(path.exists() and path.read_text() for path in marks), "both ends")
    # The culprit does not wait; the healthy rank 0 stops when it hears of it.
    replica.running(other_than="-")
    for path in marks:
        path.unlink()
    old = replica.running()
    os.kill(replica[0].state["launches"][-1]["pid"], signal.SIGKILL)
    until(lambda: all(path.exists() and path.read_text() for path in marks), "both ends")
    first, second = (float(path.read_text()) for path in marks)
    assert second - first > 0.4, "rank 1 began to stop only when rank 0 had stopped"
    assert replica.running(other_than=old)


@pytest.mark.slow
def test_after_the_limit_all_ranks_are_failed_and_say_why(ranks):
    replica = ranks(3, engine=lambda rank: shell("engine", "sleep 0.1; exit 7" if rank == 2 else "exec sleep 300")).start()
    assert replica.failed() == [79, 79, 79]
    for rank, state in enumerate(replica.states()):
        assert state["stage"] == "failed" and state["run_number"] == 3 and state["failures"] == 3
        assert "engine engine ended with exit code 7; given up" in state["detail"] and "after 3 failed runs" in state["detail"]
        assert state["detail"].startswith("rank 2: ") is (rank != 2)
        assert (state["last_end"]["rank"], state["last_end"]["code"]) == (2, 7)
    starts = [line for line in replica[0].log.splitlines() if ", run " in line and "fingerprint" in line]
    assert len(starts) == 3 and len(set(starts)) == 3
    replica[2].write([shell("engine", "exec sleep 300")])
    replica.start()
    replica.running()


@pytest.mark.slow
def test_the_pauses_between_runs_grow(ranks):
    replica = ranks(
        2, engine=lambda rank: shell("engine", "exit 7" if rank else "exec sleep 300"), restart={"limit": 3, "window_seconds": 60, "backoff": [0.3, 1.0]}
    ).start()
    replica[0].reach("restarting")
    assert "run 2 starts at 20" in replica[0].state["detail"] and "rank 1: engine engine ended with exit code 7" in replica[0].state["detail"]
    began = time.monotonic()
    assert replica.failed() == [79, 79]
    assert time.monotonic() - began > 1.1


def test_a_single_node_restarts_alone_with_the_same_limit(revision):
    revision.write([shell("engine", "exit 7")], nodes=1, restart={"limit": 3, "window_seconds": 600, "backoff": [0.1, 0.3]})
    assert revision.run() == 79
    state = revision.state
    assert state["detail"] == "engine engine ended with exit code 7; given up after 3 failed runs within 600 seconds"
    assert (state["tie"], state["restarts"], state["failures"], state["last_end"]["code"]) == (None, 2, 3, 7)
    revision.write([shell("engine", "exec sleep 300")], nodes=1)
    revision.start()
    state = revision.reach("running")
    os.kill(state["launches"][0]["pid"], signal.SIGKILL)
    until(lambda: revision.state["run_id"] != state["run_id"] and revision.state["stage"] == "running", "another run")
    assert not (revision.state_dir / "ready.json").exists()


def test_a_rank_that_is_refused_counts_and_all_give_up_together(ranks):
    """It stays with the others, and is not left behind waiting for a leader that has given up."""
    replica = ranks(2)
    replica[1].write([{"name": "engine", "path": "/opt/gone/vllm", "args": []}])
    replica.start()
    assert replica.failed() == [79, 79]
    first, second = replica[0].state, replica[1].state
    assert second["detail"].startswith("launch engine: /opt/gone/vllm does not exist; given up by rank 0 after 3 failed runs"), second["detail"]
    assert first["detail"].startswith("rank 1: launch engine: /opt/gone/vllm does not exist; given up after 3 failed runs"), first["detail"]
    assert {(one["stage"], one["last_end"]["kind"], one["last_end"]["rank"]) for one in (first, second)} == {("failed", "check", 1)}


MEET = """
import socket, sys, time
port, role = int(sys.argv[1]), sys.argv[2]
if role == "0":
    server = socket.socket(); server.bind(("127.0.0.1", port)); server.listen()
time.sleep(300)
"""


def test_the_rendezvous_moves_with_the_run_and_nothing_else_does(ranks):
    replica = ranks(2)
    for rank in (0, 1):
        operators = f"--mine={replica.first}"
        args = ["-IS", "-c", MEET, str(replica.first), str(rank), operators, "{leader_port}"]
        ports = [replica.first + slot for slot in range(10)]
        more = {"wait_for_leader_port": {"address": "127.0.0.1", "port": replica.first, "ports": ports}} if rank else {}
        replica[rank].write(
            [
                {
                    "name": "engine",
                    "path": sys.executable,
                    "args": args,
                    "run_args": [{"position": 3, "values": list(map(str, ports))}],
                    "run_env": [{"name": "RAY_ADDRESS", "values": [f"127.0.0.1:{port}" for port in ports]}],
                    **more,
                }
            ],
            listen_ports=[] if rank else [{"address": "127.0.0.1", "port": replica.first, "what": "the ranks' rendezvous", "ports": ports}],
        )
    replica.start()
    old = None
    for number in (1, 2, 3):
        old = replica.running(other_than=old)
        for state in replica.states():
            words = pathlib.Path(f"/proc/{state['launches'][0]['pid']}/cmdline").read_bytes().decode().split("\0")
            assert words[4] == str(replica.first + number - 1) == str(state["run_port"])
            environment = environ_of(pathlib.Path(f"/proc/{state['launches'][0]['pid']}/environ").read_bytes())
            assert environment[b"RAY_ADDRESS"].decode() == f"127.0.0.1:{state['run_port']}"
            assert words[6:8] == [f"--mine={replica.first}", "{leader_port}"]
        os.kill(replica.pids()[number % 2], signal.SIGKILL)
        if number == 2:
            break
    assert str(replica.first).encode() in replica[0].ask("--show").stdout


# -- who is not tied


def test_a_rank_with_another_secret_is_refused_and_logged(ranks):
    replica = ranks(2)
    replica[1].secret("tie_key", b"f" * 64)
    replica.start()
    until(lambda: "is refused: wrong secret" in replica[0].log, "the refusal")
    until(lambda: "refuses us: wrong secret" in replica[1].state["detail"], "the reason on the rank")
    assert replica[0].state["stage"] == replica[1].state["stage"] == "tying" and not replica[0].state["launches"]
    time.sleep(0.5)
    assert replica[0].log.count("wrong secret") == 1, "one line, however often it tries"
    assert not [text for text in (replica[0].log, replica[1].log, json.dumps(replica.states())) if "f" * 64 in text or TIE_KEY.decode() in text]


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("fingerprint", "beef", "fingerprint beef is not f00d"),
        ("replica", "another", "replica another is not"),
        ("nodes", 3, "nodes 3 is not 2"),
    ],
)
@pytest.mark.slow
def test_a_rank_of_another_replica_or_revision_is_refused_and_logged(ranks, field, value, says):
    replica = ranks(2)
    replica.change(1, **{field: value})
    replica.start()
    until(lambda: says in replica[0].log, "the refusal")
    until(lambda: f"refuses us: {says}" in replica[1].state["detail"], "the reason on the rank")
    assert replica[0].state["tie"]["tied_ranks"] == [0] and not replica[1].state["launches"]


@pytest.mark.parametrize(("secret", "says"), [(None, "cannot be read: No such file"), (b"short", "has less than 32 characters")])
def test_a_tie_without_a_usable_secret_is_refused_at_once(ranks, secret, says):
    replica = ranks(2)
    if secret is None:
        (replica[0].directory / "secrets" / "tie_key").unlink()
    else:
        replica[0].secret("tie_key", secret)
    assert replica[0].run() == 69
    assert says in replica[0].state["detail"]


def test_a_tie_port_that_is_taken_is_refused_and_its_holder_named(ranks):
    replica = ranks(2)
    with socket.socket() as other:
        other.bind(("127.0.0.1", replica.port))
        other.listen()
        assert replica[0].run() == 69
        assert f"port 127.0.0.1:{replica.port} (the tie) cannot be bound: Address already in use, by process {os.getpid()}" in replica[0].state["detail"]
        assert f"127.0.0.1:{replica.port} (the tie)" in replica[0].ask("--check").stdout.decode()


class Dialer:
    """A peer of rank 0 that can say anything."""

    def __init__(self, replica, rank=1, key=TIE_KEY, **more):
        self.replica, self.key = replica, key
        self.socket = socket.create_connection(("127.0.0.1", replica.port), timeout=PATIENCE)
        self.stream = self.socket.makefile("rb")
        self.greeting = self.stream.readline()
        self.nonce = self.greeting[len(run_shard.TIE_GREETING) :].strip()
        self.own = run_shard.nonce()
        self.session = run_shard.Session(key, self.nonce, self.own, False)
        self.hello = {
            "type": "hello",
            "replica": replica[0].replica,
            "rank": rank,
            "nodes": len(replica),
            "fingerprint": "f00d",
            "nonce": self.own.decode(),
            "number": 0,
            "run": None,
            "seen": None,
            "cause": None,
            **more,
        }

    def greet(self):
        self.socket.sendall(run_shard.sealed(self.key, [b"hello", self.nonce], self.hello))
        return self.read()

    def read(self):
        return self.session.open(self.stream.readline().rstrip(b"\n"))

    def close(self):
        self.stream.close()
        self.socket.close()


@pytest.fixture
def dial(ranks):
    """Rank 0 alone, and peers that connect to it."""
    replica, made = ranks(2, silent=10), []
    replica.start(0)
    replica[0].reach("tying")

    def make(**more):
        made.append(Dialer(replica, **more))
        return made[-1]

    make.replica = replica
    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("run", "abcdef012345", "its run abcdef012345 is over"),
        ("run", "not hex", "a run that is none"),
        ("rank", 0, "rank 0 is none of the followers'"),
        ("rank", 2, "rank 2 is none"),
        ("rank", True, "rank True is none"),
        ("rank", "1", "rank 1 is none"),
        ("number", -1, "a damaged number"),
        ("number", 2**60, "a damaged number"),
        ("cause", 7, "a cause that is none"),
        ("cause", {"rank": "1", "kind": "launch", "reason": "x"}, "a cause that is none"),
    ],
)
def test_a_hello_that_cannot_be_is_refused_with_the_reason(dial, field, value, says):
    answer = dial(**{field: value}).greet()
    assert answer["type"] == "refused" and says in answer["why"]
    until(lambda: says in dial.replica[0].log, "the refusal in the log")
    assert dial.replica[0].state["tie"]["tied_ranks"] == [0]


def test_a_recorded_hello_is_worth_nothing_on_another_connection(dial):
    first = dial()
    line = run_shard.sealed(TIE_KEY, [b"hello", first.nonce], first.hello)
    second = dial()
    second.socket.sendall(line)
    assert second.stream.readline() == b"refused wrong secret\n" and second.stream.readline() == b""
    first.socket.sendall(line)
    assert first.read() == {"type": "welcome"}


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\n", b"\0" * 100 + b"\n", b"a" * 4096 + b"\n", b"[" * 4000 + b"\n"])
def test_garbage_is_refused_and_closed(dial, garbage):
    one = dial()
    one.socket.sendall(garbage)
    assert one.stream.readline() == b"refused wrong secret\n" and one.stream.readline() == b""
    assert dial().greet() == {"type": "welcome"}


def test_endless_input_is_cut_off(dial):
    one = dial()
    with pytest.raises(OSError):  # noqa: PT011 (a reset or a broken pipe)
        for dummy in range(10000):
            one.socket.sendall(b"x" * 65536)
    until(lambda: "a line of more than 4096 bytes" in dial.replica[0].log, "the log")
    assert dial().greet() == {"type": "welcome"}


def test_many_silent_connections_do_not_keep_a_rank_out(dial):
    idle = [dial() for dummy in range(40)]
    assert dial().greet() == {"type": "welcome"}
    assert len(os.listdir(f"/proc/{dial.replica[0].supervisors[-1].pid}/fd")) < 40
    assert idle[0].stream.readline() == b"", "the oldest went first"


@pytest.mark.slow
def test_who_says_nothing_is_sent_away(dial):
    one = dial()
    began = time.monotonic()
    assert one.stream.readline() == b""
    assert 4 < time.monotonic() - began < 7
    assert "did not say who it is within 5 seconds" in dial.replica[0].log


def test_a_tied_rank_that_forges_a_line_is_lost_and_ends_the_run(dial):
    one = dial()
    assert one.greet() == {"type": "welcome"}
    dial.replica[0].reach("running")
    run = dial.replica[0].state["run_id"]
    one.socket.sendall(run_shard.sealed(b"f" * 64, [b"x"], {"type": "state", "run": run, "seen": run, "cause": None}))
    until(lambda: dial.replica[0].state["stage"] == "tying", "the end of the run")
    assert dial.replica[0].state["last_end"]["reason"] == "rank 1: it sent wrong secret"


def test_a_second_connection_of_the_same_run_takes_over_without_ending_it(dial):
    one = dial()
    one.greet()
    run = dial.replica[0].reach("running")["run_id"]
    two = dial(run=run, seen=run, number=1)
    assert two.greet() == {"type": "welcome"}
    assert two.read()["run"] == run
    one.close()
    time.sleep(0.3)
    assert dial.replica[0].state["stage"] == "running" and dial.replica[0].state["run_id"] == run
    assert dial(run="a" * 12, seen="a" * 12, number=1).greet()["type"] == "refused"
    assert dial().greet() == {"type": "welcome"}  # without its run: the host was started again
    until(lambda: dial.replica[0].state["last_end"], "the end of the run")
    assert "came back without its run" in dial.replica[0].state["last_end"]["reason"]


# -- memory on the GPUs


@pytest.fixture(scope="module")
def nvml_library():
    built = subprocess.run([sys.executable, str(SCRIPT.parents[3] / "tests/fake_nvml/build.py")], capture_output=True, text=True, check=True)
    return built.stdout.strip().splitlines()[-1]


@pytest.fixture
def gpus(revision, nvml_library):
    """A driver with two GPUs; `gpus(statements)` writes its state anew."""
    uuids = [f"GPU-{uuid.uuid4()}" for dummy in range(2)]
    path = revision.root / "nvml"

    def write(*more):
        lines = [
            "driver 580.95.05",
            "cuda 13000",
            *(f'gpu {index} name="NVIDIA H100" uuid={name} total=81559MiB reserved=551MiB cc=9.0' for index, name in enumerate(uuids)),
        ]
        path.with_suffix(".new").write_text("\n".join([*lines, *more]) + "\n")
        path.with_suffix(".new").replace(path)

    write()
    revision.write(
        [shell("engine", "exec sleep 300")], gpus=[{"uuid": name, "index": index} for index, name in enumerate(uuids)], paths=revision.document["paths"]
    )
    write.environ = {"LD_LIBRARY_PATH": nvml_library, "FAKE_NVML_STATE": str(path)}
    write.uuids = uuids
    return write


def test_free_gpus_are_no_obstacle(revision, gpus):
    revision.start(environ=gpus.environ)
    revision.reach("running")
    assert "cannot be asked" not in revision.log


def test_memory_of_others_is_named_and_refused_and_never_ended(revision, gpus):
    with bystander({"SOME": "one"}) as other:
        gpus(f"proc gpu=1 pid={other.pid} mib=7000")
        assert revision.run(environ=gpus.environ) == 69
        detail = revision.state["detail"]
        assert re.search(
            rf"GPU {gpus.uuids[1]} is held by process {other.pid} \((/bin/sh -c exec )?sleep 300, user \w+\) with 7000 MiB since 20\d\d-", detail
        ), detail
        assert revision.state["stage"] == "failed" and revision.state["launches"] == [] and other.poll() is None
        checked = subprocess.run(revision.command("--check"), capture_output=True, env=gpus.environ, timeout=PATIENCE, check=False)
        assert f"is held by process {other.pid} (".encode() in checked.stdout and checked.returncode == 1


def test_our_own_leftovers_are_swept_before_they_are_counted(revision, gpus):
    with bystander({"RANKZERO_SHARD": f"{revision.replica}/0/abc"}) as left:
        gpus(f"proc gpu=0 pid={left.pid} mib=7000")
        revision.start(environ=gpus.environ)
        until(lambda: not alive(left.pid), "the sweep")
        gpus()
        revision.reach("running")


@pytest.mark.slow
def test_memory_that_nobody_here_holds_is_refused_after_a_moment(revision, gpus):
    gpus("gpu 0 used=9000MiB")
    began = time.monotonic()
    assert revision.run(environ=gpus.environ) == 69
    assert time.monotonic() - began > 4, "the driver may still be giving it back"
    assert f"GPU {gpus.uuids[0]} has 9000 MiB in use by nobody that this host can see" in revision.state["detail"]


def test_memory_on_other_gpus_is_none_of_our_business(revision, gpus):
    revision.write([shell("engine", "exec sleep 300")], gpus=[{"uuid": gpus.uuids[0], "index": 0}])
    with bystander({}) as other:
        gpus(f"proc gpu=1 pid={other.pid} mib=7000")
        revision.start(environ=gpus.environ)
        revision.reach("running")


def test_without_the_drivers_library_it_is_said_and_the_shard_starts(revision, gpus):
    revision.start(environ={})
    revision.reach("running")
    assert "who holds memory on the GPUs cannot be asked" in revision.log


def test_a_driver_that_hangs_does_not_hang_a_stop(revision, gpus):
    gpus("delay nvmlDeviceGetHandleByUUID 60000")
    process = revision.start(environ=gpus.environ)
    revision.reach("starting")
    time.sleep(0.7)
    process.terminate()
    began = time.monotonic()
    assert process.wait(PATIENCE) == 0
    assert time.monotonic() - began < 3


# -- damaged ties


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (edit(["tie"], "x"), "launch.json.tie must be an object"),
        (edit(["tie", "address"], "leader"), "launch.json.tie.address must be an IP address"),
        (edit(["tie", "port"], 0), "launch.json.tie.port must be an integer, 1 to 65535"),
        (edit(["tie", "secret"], "../x"), "launch.json.tie.secret must be the name of a file in secrets/"),
        (edit(["tie", "silent_seconds"], 0), "launch.json.tie.silent_seconds must be at least 0.2"),
        (edit(["tie", "run_ports"], []), "launch.json.tie.run_ports must not be empty"),
        (edit(["tie", "run_ports"], [1, "2"]), "launch.json.tie.run_ports[1] must be an integer, 1 to 65535"),
        (edit(["restart"], {"limit": 0}), "launch.json.restart.limit must be an integer, at least 1"),
        (edit(["restart"], {"limit": 1, "backoff": [-1]}), "launch.json.restart.backoff[0] must be a number of seconds"),
        (edit(["launches", 0, "run_args"], [{"position": 9, "values": ["x"] * 10}]), "run_args[0].position must be an integer, 0 to 2"),
        (edit(["launches", 0, "run_args"], [{"position": 1, "values": ["x"] * 10}]), "run_args[0].values must begin with args[1]"),
        (edit(["launches", 0, "run_args"], [{"position": 1, "values": ["x"]}]), "run_args[0].values must be one for each of tie.run_ports"),
        (edit(["launches", 0, "run_env"], [{"name": "A B", "values": ["x"] * 10}]), "run_env[0].name must be the name of a variable"),
        (edit(["launches", 0, "run_env"], [{"name": "A", "values": [1] * 10}]), "run_env[0].values[0] must be a string"),
        (edit(["launches", 0, "wait_for_leader_port"], {"address": "127.0.0.1", "port": 1, "ports": [1]}), "wait_for_leader_port.ports must be one for each"),
        (edit(["listen_ports"], [{"address": "127.0.0.1", "port": 1, "what": "x", "ports": [1]}]), "listen_ports[0].ports must be one for each"),
    ],
)
def test_a_damaged_tie_is_one_clear_line(ranks, capfd, change, says):
    replica = ranks(2)
    change(replica[0].document)
    replica.change(0)
    assert run_shard.main([str(replica[0].directory)]) == 78
    error = capfd.readouterr().err
    assert error.startswith("run_shard: launch.json") and says in error and error.count("\n") == 1, error


def test_rank_0_waits_for_its_own_address_after_a_boot(ranks):
    """In a new network namespace ::1 comes with the loopback interface."""
    if subprocess.run(["unshare", "-rn", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no private network namespace here")
    replica = ranks(2)
    replica.change(0, tie={**replica[0].document["tie"], "address": "::1"})
    script = 'until [ -e "$0" ]; do sleep 0.05; done; ip link set lo up'
    go = replica[0].root / "go"
    command = ["unshare", "-rn", "/bin/sh", "-c", f'(/bin/sh -c \'{script}\' "$0") & shift 0; exec "$@"', str(go), *replica[0].command()]
    process = replica[0].start(command=command, environ={"PATH": "/usr/bin:/bin:/usr/sbin:/sbin"})
    assert "waits for this host's own address ::1" in replica[0].reach("tying", process)["detail"]
    go.touch()
    until(lambda: replica[0].state["detail"].startswith("waits for rank 1 since"), "the tie's port")
    assert process.poll() is None


@pytest.mark.skipif(PYTHON_39 is None, reason="no Python 3.9 on this machine")
def test_python_3_9_is_tied_with_later_ones(ranks):
    replica = ranks(3)
    for rank in range(3):
        replica[rank].start(command=replica[rank].command(interpreter=PYTHON_39) if rank != 1 else None)
    old = replica.running()
    os.kill(replica.pids()[2], signal.SIGKILL)
    replica.running(other_than=old)
    assert not [revision.log for revision in replica.ranks if "internal error" in revision.log or "Traceback" in revision.log]
