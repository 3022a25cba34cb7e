# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Any printable value reaches the process exactly: through a POSIX shell, run_shard.py's own parser, systemd's quoting and supervisord's parser."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import re
import shlex
import subprocess
import sys
from types import ModuleType
from typing import Any

import facts
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from supervisor.options import ServerOptions, UnhosedConfigParser

from ansible_collections.rankzero.inference.plugins.plugin_utils import collection_files, convergence, render
from ansible_collections.rankzero.inference.plugins.plugin_utils.values import unprintable

VALUES = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(lambda text: unprintable(text) is None)
HARD = [
    "",
    "'",
    "''",
    '"',
    "\\",
    "\\'",
    "$HOME",
    "$$",
    "${X}",
    "%n",
    "%%",
    "%(here)s",
    "`id`",
    "$(id)",
    "a b",
    " a ",
    "\ta\t",
    "#x",
    " #x",
    ";x",
    " ; x",
    "!x",
    "~",
    "*",
    "é漢🎉",
    "a=b",
    "-x",
    "{{ x }}",
    "{% x %}",
    "{# x #}",
]
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,6}", fullmatch=True)
TEMPLATES = {name: collection_files.template(name) for name in collection_files.TEMPLATES}


def run_shard() -> ModuleType:
    path = pathlib.Path(collection_files.ROLE) / "files" / "run_shard.py"
    spec = importlib.util.spec_from_file_location("run_shard_for_render", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


RUN_SHARD = run_shard()


def env_file(values: dict[str, str]) -> str:
    shard = {"rank": 0, "labels": {"replica": "glm"}, "fingerprint": "x"}
    return render.render_template(
        TEMPLATES["shard.env.j2"], {"shard": shard, "environment": values, "why": dict.fromkeys(values, "because\nA='evil'\x85B='evil'")}
    )


# ---- shard.env


def systemd_environment_file(text: str) -> dict[str, str]:
    """EnvironmentFile= of systemd.exec(5), for what is written here: in single quotes everything is literal, outside a backslash takes the next character."""
    values = {}
    for line in text.split("\n"):
        if not line or line[0] in "#;":
            continue
        name, _equals, rest = line.partition("=")
        value, position, quoted = "", 0, False
        while position < len(rest):
            character = rest[position]
            if character == "'":
                quoted = not quoted
            elif character == "\\" and not quoted:
                position += 1
                value += rest[position]
            else:
                value += character
            position += 1
        assert not quoted
        values[name] = value
    return values


def shell_reads(path: pathlib.Path, names: list[str]) -> dict[str, str]:
    """What `. file` sets, in a shell that has nothing else."""
    script = ". %s\n%s" % (shlex.quote(str(path)), "\n".join("printf '%%s\\0' \"$%s\"" % name for name in names))
    done = subprocess.run(["/bin/sh", "-c", script], capture_output=True, env={"PATH": "/usr/bin:/bin"}, check=True)
    assert done.stderr == b""
    return dict(zip(names, done.stdout.decode().split("\0"), strict=False))


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.lists(VALUES, max_size=12))
@example(HARD)
def test_the_environment_file_carries_any_value(tmp_path_factory: pytest.TempPathFactory, values: list[str]) -> None:
    wanted = {"V%d" % number: value for number, value in enumerate(values)}
    text = env_file(wanted)
    path = tmp_path_factory.getbasetemp() / "shard.env"
    path.write_text(text, encoding="utf-8", newline="")
    assert shell_reads(path, list(wanted)) == wanted
    assert RUN_SHARD.parse_environment(text, "shard.env") == wanted
    assert systemd_environment_file(text) == wanted


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.dictionaries(NAMES, VALUES, max_size=5))
def test_names_are_sorted_and_read_back(values: dict[str, str]) -> None:
    text = env_file(values)
    found = RUN_SHARD.parse_environment(text, "shard.env")
    assert found == values and list(found) == sorted(values)
    assert env_file(dict(reversed(list(values.items())))) == text


# ---- ExecStart= of systemd


def systemd_unquote(line: str) -> list[str]:
    """Words of a command line by systemd.service(5) and systemd.syntax(7): quotes, C escapes, then % specifiers and $ variables (doubled)."""
    words, word, quote, position, started = [], "", "", 0, False
    while position < len(line):
        character = line[position]
        if character == "\\":
            position += 1
            assert line[position] in "\\\"'", "an escape that is not written here"
            word, started = word + line[position], True
        elif quote:
            if character == quote:
                quote = ""
            else:
                word += character
        elif character in "\"'":
            assert not started, "a quote inside of a word is literal"
            quote, started = character, True
        elif character.isspace():
            if started:
                words.append(word)
            word, started = "", False
        else:
            word, started = word + character, True
        position += 1
    assert not quote
    words += [word] if started else []
    specified = [re.sub(r"%(.)", lambda found: {"%": "%"}[found.group(1)], word) for word in words]
    assert all("%" not in re.sub("%%", "", word) for word in words)
    return [specified[0], *(re.sub(r"\$(.|$)", lambda found: {"$": "$"}[found.group(1)], word) for word in specified[1:])] if words else []


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.lists(VALUES, min_size=1, max_size=4))
@example(HARD)
def test_words_of_execstart_come_back(values: list[str]) -> None:
    line = " ".join(map(render.unit_word, ["/usr/bin/python3", *values]))
    assert "\n" not in line and systemd_unquote(line) == ["/usr/bin/python3", *values]


@given(VALUES)
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_settings_of_a_unit_come_back(value: str) -> None:
    text = render.unit_text(value)
    assert re.sub("%%", "%", text) == value and "%" not in re.sub("%%", "", text)


# ---- supervisord, by its own parser


def supervisor_program(directory: pathlib.Path, text: str) -> tuple[list[str], dict[str, str]]:
    """argv that supervisord would execute, and the texts of [supervisord] and the program."""
    (directory / "supervisord.conf").write_text(text, encoding="utf-8")
    options = ServerOptions()
    options.configfile = str(directory / "supervisord.conf")
    parser = UnhosedConfigParser()
    parser.expansions = options.environ_expansions
    parser.read(options.configfile)
    section = next(name for name in parser.sections() if name.startswith("program:"))
    program = next(iter(options.processes_from_section(parser, section, "group")))
    top = {key: parser.getdefault(key, expansions={"here": "x"}) for key in ("logfile", "pidfile", "childlogdir", "directory")}
    return shlex.split(program.command), {**top, "program_directory": program.directory, "stdout": program.stdout_logfile}


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(st.lists(VALUES, min_size=1, max_size=3))
@example(HARD)
def test_words_of_supervisords_command_come_back(tmp_path_factory: pytest.TempPathFactory, values: list[str]) -> None:
    directory = tmp_path_factory.getbasetemp()
    command = " ".join(map(render.supervisor_word, ["/usr/bin/python3", *values]))
    argv, _texts = supervisor_program(directory, "[supervisord]\nlogfile=/l\npidfile=/p\nchildlogdir=/tmp\ndirectory=/\n[program:x]\ncommand=%s\n" % command)
    assert argv == ["/usr/bin/python3", *values]


# ---- whole shards

ROOTS = ["/", "/srv/a b", "/srv/it's", "/srv/50%", "/srv/$HOME/x", '/srv/"q"', "/srv/#1", "/srv/a;b", "/srv/é"]


def rendered(manager: str, root: str = "/", **more: object) -> tuple[dict, render.Rendered]:
    plan = facts.good(
        facts.hosts(),
        facts.profile(env={"A": "it's $HOME 50%", "NCCL_DEBUG": "WARN"}, args=["--sim-fail", "a 'b' $c %d \"e\""]),
        key_digest="k",
        inputs={name: {"root": root, "service_manager": manager} for name in ("n1", "n2")},
        **more,
    )
    shard = plan["shards"]["n1"]
    return shard, render.render(shard, TEMPLATES, {"run_shard.py": collection_files.program("run_shard.py"), "sim_engine.py": "x\n"})


@pytest.mark.parametrize("root", ROOTS)
def test_a_root_of_any_name_reaches_both_service_managers(tmp_path: pathlib.Path, root: str) -> None:
    base = root.rstrip("/")
    shard, found = rendered("systemd", root)
    start = next(line for line in found.unit.split("\n") if line.startswith("ExecStart="))
    assert systemd_unquote(start.partition("=")[2]) == ["/usr/bin/python3", "-I", base + "/etc/rankzero/glm/current/run_shard.py"]
    assert "WorkingDirectory=%s/etc/rankzero/glm\n" % base.replace("%", "%%") in found.unit and found.unit_name == "inference-glm.service"
    assert "LoadCredential=api_key:%s/etc/rankzero/glm/current/secrets/api_key\n" % base.replace("%", "%%") in found.unit
    assert found.files[found.unit_name] == found.unit and ("RuntimeDirectory=rankzero/glm" in found.unit) == (root == "/")
    _shard, other = rendered("supervisor", root)
    logs = tmp_path / "logs"
    logs.mkdir()
    argv, texts = supervisor_program(
        tmp_path,
        re.sub(r"^(childlogdir|directory|stdout_logfile|logfile)=.*", lambda line: line.group(0), other.unit, flags=re.M)
        .replace(render.supervisor_text(base + "/var/log/rankzero/glm"), str(logs))
        .replace("directory=%s" % render.supervisor_text(base + "/etc/rankzero/glm"), "directory=%s" % tmp_path),
    )
    assert argv == ["/usr/bin/python3", "-I", base + "/etc/rankzero/glm/current/run_shard.py"]
    assert texts["pidfile"] == base + "/run/rankzero/glm/supervisord.pid" and texts["stdout"] == str(logs / "shard.log")


@pytest.mark.parametrize("root", ["srv", "", "/srv/a ;b", "/srv/a\t#b", "/a\nb", "/a/../b", "/a\0"])
def test_a_root_that_no_service_file_can_hold_is_refused(root: str) -> None:
    assert facts.faults(inputs={"n1": {"root": root}}) == [("n1", "replica_root")]


def test_run_shard_accepts_what_is_rendered_and_sees_every_value(tmp_path: pathlib.Path) -> None:
    """The whole way: run_shard.py's own loader of a revision."""
    shard, found = rendered("systemd", str(tmp_path / "a 'b' $c"))
    for name, text in found.files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    document = json.loads(found.files["launch.json"])
    shared = RUN_SHARD.parse_environment(found.files["shard.env"], "shard.env")
    for planned, launch in zip(shard["launches"], document["launches"], strict=True):
        assert {**shared, **launch["env"]} == planned["env"] and launch["args"] == planned["args"] and launch["path"] == planned["path"]
        assert launch["secret_env"] == {"VLLM_API_KEY": "api_key"}
    assert shared["A"] == "it's $HOME 50%" and document["launches"][-1]["args"][4] == "a 'b' $c %d \"e\""
    assert "VLLM_API_KEY" not in found.files["shard.env"]
    done = subprocess.run(
        [sys.executable, str(pathlib.Path(collection_files.ROLE) / "files/run_shard.py"), str(tmp_path), "--show"],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == 0 and shlex.quote("a 'b' $c %d \"e\"") in done.stdout and "(secret)" in done.stdout, done.stderr


def test_what_differs_between_launches_is_not_shared() -> None:
    launches = [{"env": {"A": "1", "B": "1", "C": "1"}}, {"env": {"A": "1", "B": "2"}}]
    assert render.shared_environment(launches) == {"A": "1"}


def test_converged_is_equal_files_service_and_proof() -> None:
    shard, found = rendered("systemd")
    record = {
        "revision": shard["fingerprint"],
        "files_sha256": found.hashes(),
        "unit": {"sha256": render.sha256(found.unit), "manager": "systemd", "active": True},
        "stage": "running",
        "ready": True,
    }
    assert convergence.reasons(record, shard, found) == []
    unit = record["unit"]
    cases = {
        "revision %s is not current (x is)" % shard["fingerprint"]: {"revision": "x"},
        "files of the revision differ: shard.env": {"files_sha256": {**found.hashes(), "shard.env": "0"}},
        "files of the revision differ: extra": {"files_sha256": {**found.hashes(), "extra": "0"}},
        "the service file differs": {"unit": {**unit, "sha256": "0"}},
        "the service is not active": {"unit": {**unit, "active": False}},
        "the shard is failed": {"stage": "failed"},
        convergence.UNPROVEN: {"ready": False},
    }
    for reason, change in cases.items():
        assert convergence.reasons({**record, **change}, shard, found) == [reason]
    for damaged in (None, {}, [], "x", {"unit": [], "files_sha256": 5}, {"unit": "x", "revision": shard["fingerprint"], "files_sha256": ["a"]}):
        assert convergence.reasons(damaged, shard, found)


def test_one_rank_that_changes_takes_the_others_with_it() -> None:
    ranks = {"a": 0, "b": 1}
    unproven = [convergence.UNPROVEN]
    assert convergence.over_replica({"a": [], "b": []}, ranks) == {"a": {"reasons": [], "restart": False}, "b": {"reasons": [], "restart": False}}
    changed = convergence.over_replica({"a": ["files"], "b": []}, ranks)
    assert changed["a"] == {"reasons": ["files"], "restart": False} and changed["b"]["restart"] and "rank 0 (a) changes" in changed["b"]["reasons"][0]
    waiting = convergence.over_replica({"a": unproven, "b": []}, ranks)
    assert waiting["a"] == {"reasons": unproven, "restart": False} and not waiting["b"]["restart"] and "rank 0 (a) is not proven" in waiting["b"]["reasons"][0]
    both = convergence.over_replica({"a": unproven, "b": ["files"]}, ranks)
    assert both["a"]["restart"] and not both["b"]["restart"]


def test_a_replica_is_converged_only_where_no_host_has_anything_to_do() -> None:
    """A deploy ends after its facts then, so whatever a later task would have found must already speak against it here."""

    def plan(**reasons: list[str]) -> dict[str, Any]:
        shards = {host: {"converge": {"reasons": found, "restart": False}} for host, found in reasons.items()}
        return {"replica": "glm", "to_fetch": {}, "shards": shards}

    as_planned = plan(a=[], b=[])
    ours = {"shards": {"glm": {"rank": 0}}, "locks": {}, "traces": {"replicas": {"glm": {}}, "made_users": ["rankzero"]}}
    elsewhere = {"shards": {"other": {"rank": 0}}, "locks": {"other": {"owner": "x"}}, "traces": {"replicas": {"other": {}}, "made_users": ["rankzero"]}}
    assert convergence.is_converged(as_planned, {"a": ours, "b": ours, "c": elsewhere, "d": {}})
    assert not convergence.is_converged(plan(a=[], b=[convergence.UNPROVEN]), {"a": ours, "b": ours}), "a rank is to be proven"
    assert not convergence.is_converged({**as_planned, "to_fetch": {"b": ["/adapters/sql-3"]}}, {"a": ours, "b": ours}), "an adapter's files are gone"
    assert not convergence.is_converged({"replica": "glm", "to_fetch": {}, "shards": {}}, {}), "a refused plan"
    for left in (
        {"shards": {"glm": {"rank": 1}}},
        {"traces": {"replicas": {"glm": {"pids": [7]}}}},
        {"traces": {"replicas": {}, "made_users": ["rankzero"]}},
        {"locks": {"glm": {"owner": "dead", "live": False}}},
    ):
        assert not convergence.is_converged(as_planned, {"a": ours, "b": ours, "c": left}), left
    dead = {**ours, "locks": {"glm": {"owner": "dead", "live": False}}}
    assert not convergence.is_converged(as_planned, {"a": ours, "b": dead}), "the lock of a dead run goes"
