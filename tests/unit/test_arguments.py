# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Operator arguments are read as the engine's own parser reads them: argparse itself is the oracle."""

from __future__ import annotations

import argparse
import importlib.util
import pathlib
import sys
from typing import Any, NoReturn

import facts
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.rankzero.inference.plugins.plugin_utils import collection_files, engines
from ansible_collections.rankzero.inference.plugins.plugin_utils.arguments import Grammar, canonical, find
from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Findings
from ansible_collections.rankzero.inference.plugins.plugin_utils.profile import parse

# Like vLLM's: options that matter, others that do not, some that share prefixes, and both kinds of short ones.
OWNED = {
    "--port": ["-P"],
    "--model": [],
    "--master-addr": [],
    "--master-port": [],
    "--tensor-parallel-size": ["-tp"],
    "--nnodes": ["-n"],
    "--node-rank": ["-r"],
    "--quantization": ["-q"],
    "--headless": [],
}
FREE = {
    "--max-model-len": [],
    "--max-loras": [],
    "--model-impl": [],
    "--port-range": [],
    "--seed": ["-s"],
    "--temperature": ["-t"],
    "--no-log": [],
    "--node-name": [],
    "--help-me": [],
}
FLAGS = {"--headless", "--no-log"}


class Refused(Exception):
    pass


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Refused(message)


def oracle(abbreviations: bool) -> Parser:
    parser = Parser(add_help=False, allow_abbrev=abbreviations)
    for option, shorts in {**OWNED, **FREE}.items():
        parser.add_argument(option, *shorts, dest=option, **({"action": "store_true"} if option in FLAGS else {"nargs": "?", "const": "none"}))
    return parser


GRAMMAR = Grammar(
    {spelling: option for option, shorts in OWNED.items() for spelling in (option, *shorts)},
    every_long=frozenset(OWNED) | frozenset(FREE),
    every_short=frozenset(short for shorts in (*OWNED.values(), *FREE.values()) for short in shorts),
    glued_shorts=True,
)


@st.composite
def words(draw: st.DrawFn) -> str:
    """Options whole, cut short, glued, with =, or nothing of the kind."""
    option = draw(st.sampled_from([*OWNED, *FREE, *(short for shorts in (*OWNED.values(), *FREE.values()) for short in shorts)]))
    cut = option[: draw(st.integers(1, len(option)))]
    tail = draw(st.sampled_from(["", "", "=", "=1", "=a=b", "1", "x", " 1", "-x", ".level", "_", "=--port"]))
    return draw(st.one_of(st.just(cut + tail), st.just(option), st.text("-=_. np", max_size=5)))


@settings(max_examples=2000, deadline=None, derandomize=True, database=None)
@given(words(), st.booleans())
def test_one_word_means_to_us_what_it_means_to_argparse(word: str, abbreviations: bool) -> None:
    ours = canonical(word, GRAMMAR)
    if word in ("--", "-"):
        assert ours is None
        return
    try:
        namespace, _rest = oracle(abbreviations).parse_known_args([word])
    except Refused:
        return  # ambiguous, or a value for a flag: the engine ends at once, whatever we say
    set_by_argparse = [option for option, value in vars(namespace).items() if value not in (None, False)]
    if any(option in OWNED for option in set_by_argparse):
        assert [ours] == set_by_argparse
    elif set_by_argparse:
        assert ours is None
    elif abbreviations:
        assert ours is None  # without abbreviations it may be what they would mean


@settings(max_examples=500, deadline=None, derandomize=True, database=None)
@given(st.lists(words().filter(lambda word: word != "--"), max_size=5))
def test_every_owned_option_of_a_list_is_found(args: list[str]) -> None:
    try:
        namespace, _rest = oracle(True).parse_known_args(args)
    except Refused:
        return
    taken = {option for option, value in vars(namespace).items() if value not in (None, False) and option in OWNED}
    assert taken <= {spelled.option for spelled in find(args, GRAMMAR)}


UNDERSCORES = Grammar({"--model": "--model", "-m": "--model", "--ctx-size": "--ctx-size"}, underscores=True, equals=False, dotted=False)
DOTTED = Grammar({"--compilation-config": "--compilation-config"}, every_long=frozenset({"--compilation-config", "--seed"}), underscores=True, dotted=True)


@pytest.mark.parametrize(
    ("word", "grammar", "option"),
    [
        ("--ctx_size", UNDERSCORES, "--ctx-size"),
        ("--ctx", UNDERSCORES, None),
        ("--model=x", UNDERSCORES, "--model"),
        ("-m", UNDERSCORES, "--model"),
        ("-mx", UNDERSCORES, None),
        ("model", UNDERSCORES, None),
        ("--compilation_config.level", DOTTED, "--compilation-config"),
        ("--compilation-config.a.b=3", DOTTED, "--compilation-config"),
        ("--comp.level", DOTTED, "--compilation-config"),
        ("--seed", DOTTED, None),
        ("", DOTTED, None),
        ("-", DOTTED, None),
        ("--", DOTTED, None),
        ("-5", DOTTED, None),
    ],
)
def test_what_parsers_other_than_argparse_accept(word: str, grammar: Grammar, option: str | None) -> None:
    assert canonical(word, grammar) == option


# ---- the engines


def sim_parser() -> argparse.ArgumentParser:
    spec = importlib.util.spec_from_file_location("sim_engine_for_arguments", pathlib.Path(collection_files.ROLE) / "files" / "sim_engine.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    commands: Any = next(action for action in module.build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    parser: argparse.ArgumentParser = commands.choices["serve"]
    return parser


def test_the_simulators_grammar_is_its_parsers() -> None:
    options = {option for action in sim_parser()._actions for option in action.option_strings}
    adapter = engines.load("sim", Findings())
    assert adapter is not None
    grammar = adapter.grammar
    known = grammar.every_long | grammar.every_short | set(grammar.options)
    assert known - options <= {"--api-key"}, "options that the simulator does not have"
    assert options - known == set(), "options of the simulator that its grammar does not know"
    assert all(grammar.options[name] in grammar.options for name in grammar.options)


def problems(engine: str, *args: str, **more: Any) -> list[str]:
    """Fields of the faults of a profile with these arguments, by the engine's own validation."""
    findings = Findings()
    wanted = parse(facts.profile(engine=engine, args=list(args), **more), "p", "p", findings)
    adapter = engines.load(engine, findings)
    assert wanted is not None and adapter is not None
    adapter.validate(wanted, "p", findings)
    return [fault.field for fault in findings.faults]


@pytest.mark.parametrize(
    "args",
    [
        ("--port", "1"),
        ("--port=1",),
        ("-tp", "2"),
        ("-tp=2",),
        ("-t", "2"),
        ("-n2",),
        ("-n=2",),
        ("-n", "2"),
        ("-r1",),
        ("--api-key", "x"),
        ("--api", "x"),
        ("--head",),
        ("-h",),
        ("--config", "x"),
        ("--master-a", "x"),
    ],
)
def test_the_simulator_refuses_what_the_plan_owns(args: tuple[str, ...]) -> None:
    assert problems("sim", *args) == ["p.args[0]"]


@pytest.mark.parametrize(
    "args",
    [
        ("-m", "x"),
        ("--model", "x"),
        ("--tools", "all"),
        ("--api_key", "x"),
        ("--api-key=x",),
        ("-ngl", "1"),
        ("--gpu-layers", "1"),
        ("-dev", "none"),
        ("--device", "CUDA0"),
        ("--rpc", "h:1"),
        ("--n_gpu_layers", "0"),
        ("--lora", "x"),
        ("--override-kv", "x"),
        ("--slot-save-path", "/"),
        ("-lv", "0"),
        ("-v",),
        ("--log-disable",),
        ("--host", "0.0.0.0"),
        ("-hf", "x/y"),
        ("--help",),
        ("--mcp-servers-json", "{}"),
        ("-ag",),
    ],
)
def test_llama_server_refuses_what_the_plan_owns_and_what_executes(args: tuple[str, ...]) -> None:
    assert problems("llamacpp", *args) == ["p.args[0]"]


@pytest.mark.parametrize(
    ("engine", "args"),
    [
        ("sim", ("--max-model-len", "1k")),
        ("sim", ("--sim-fail", "--x y")),
        ("sim", ("-q", "awq")),
        ("sim", ("--sim-exit-code", "-5")),
        ("llamacpp", ("--ctx-size", "4096", "-np", "2")),
        ("llamacpp", ("--temp", "0.5", "--flash-attn", "on")),
        ("llamacpp", ("--mlock",)),
    ],
)
def test_free_arguments_pass(engine: str, args: tuple[str, ...]) -> None:
    assert problems(engine, *args) == []


@pytest.mark.parametrize(
    ("args", "fields"),
    [
        (("--",), ["p.args[0]"]),
        (("other-model",), ["p.args[0]"]),
        (("--max-model-len=1k", "other"), ["p.args[1]"]),
        (("--max-model-len", "1k", "--"), ["p.args[2]"]),
        (("--sim-hang", ""), []),
    ],
)
def test_words_that_no_option_takes_are_refused(args: tuple[str, ...], fields: list[str]) -> None:
    assert problems("sim", *args) == fields


@pytest.mark.parametrize("engine", ["sim", "llamacpp"])
def test_fields_that_an_engine_would_ignore_are_refused(engine: str) -> None:
    assert problems(engine, dp=2, tp=4) == ["p.dp"] and problems(engine, distributed="ray") == ["p.distributed"]


@pytest.mark.parametrize(
    ("args", "found"),
    [
        (("--quantization", "awq"), ["awq"]),
        (("--quantization=awq",), ["awq"]),
        (("-q", "awq"), ["awq"]),
        (("-qawq",), ["awq"]),
        (("-q=awq",), ["awq"]),
        (("--quant", "fp8"), ["fp8"]),
        (("--quantization",), []),
        (("--max-model-len", "awq"), []),
        (("-q", "awq", "--quantization=fp8"), ["awq", "fp8"]),
    ],
)
def test_quantizations_in_arguments_are_found_in_any_spelling(args: tuple[str, ...], found: list[str]) -> None:
    adapter = engines.load("sim", Findings())
    wanted = parse(facts.profile(args=list(args)), "p", "p", Findings())
    assert adapter is not None and wanted is not None and adapter.quantization_arguments(wanted) == found
