# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ask an installed engine's own parser about command lines. Run by the Python of the environment that holds the engine; no GPU is needed.

    PYTHON real_parsers.py vllm|sglang|ray < LINES

LINES is a JSON list of command lines, each what follows C(vllm serve), C(sglang serve) or C(ray start).
The answer is a JSON list, one entry for each:
C({"said": {option: value}}) with what the line itself gives (no defaults), after the engine's own checks of parsed arguments; or C({"rejected": why}).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

Said = dict[str, Any]


def given(parser: argparse.ArgumentParser, argv: Sequence[str]) -> Said:
    """What the line says itself: None for every option that it does not give."""
    names = [action.dest for action in parser._actions]
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    said = vars(parser.parse_args(list(argv)))
    return {name: plain(said.get(name)) for name in names}


def plain(value: Any) -> Any:
    """Values as JSON has them; a LoRA module as it is written on the command line."""
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "name") and hasattr(value, "path"):
        return f"{value.name}={value.path}"
    if hasattr(value, "lora_name") and hasattr(value, "lora_path"):
        return f"{value.lora_name}={value.lora_path}"
    return value if value is None or isinstance(value, (bool, int, float, str, dict)) else str(value)


def ask_vllm(argv: Sequence[str]) -> Said:
    from vllm.entrypoints.launchers import cli_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    def parser() -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = cli_args.make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
        return made

    sys.argv = ["vllm", "serve", *argv]  # some of the parser's work is done for a real command line only
    parsed = parser().parse_args(list(argv))
    if parsed.model_tag is not None:
        parsed.model = parsed.model_tag
    cli_args.validate_parsed_serve_args(parsed)
    if parsed.headless and parsed.api_server_count:
        raise ValueError("--api-server-count cannot be used with --headless")
    return given(parser(), argv)


def ask_sglang(argv: Sequence[str]) -> Said:
    from sglang.cli import serve
    from sglang.srt.server_args import ServerArgs, prepare_server_args
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    backend, rest = serve._extract_model_type_override(list(argv))
    if backend != "llm":
        raise ValueError(f"--model-type {backend}")
    prepare_server_args(rest)
    parser = argparse.ArgumentParser(prog="sglang serve")
    ServerArgs.add_cli_args(parser)
    return given(parser, ConfigArgumentMerger(parser).merge_config_with_args(rest) if "--config" in rest else rest)


def ask_ray(argv: Sequence[str]) -> Said:
    from ray.scripts.scripts import start

    context = start.make_context("ray start", list(argv))
    sources = {name: context.get_parameter_source(name) for name in context.params}
    said = {name: plain(value) if getattr(sources[name], "name", None) == "COMMANDLINE" else None for name, value in context.params.items()}
    return {**said, "head": bool(said["head"])}


def answer(ask: Callable[[Sequence[str]], Said], argv: Sequence[str]) -> dict[str, Any]:
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()):
            return {"said": ask(argv)}
    except SystemExit as end:
        return {"rejected": told.getvalue().strip()[-500:] or f"exit {end.code}"}
    except Exception as error:
        return {"rejected": f"{type(error).__name__}: {str(error)[:500]}"}


def main() -> None:
    for name, value in (("HF_HUB_OFFLINE", "1"), ("VLLM_LOGGING_LEVEL", "ERROR"), ("VLLM_NO_USAGE_STATS", "1"), ("DO_NOT_TRACK", "1")):
        os.environ.setdefault(name, value)
    ask = {"vllm": ask_vllm, "sglang": ask_sglang, "ray": ask_ray}[sys.argv[1]]
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine's libraries print is no answer
    json.dump([answer(ask, line) for line in json.load(sys.stdin)], output)
    output.flush()
    os._exit(0)  # exit handlers of the engines are slow


if __name__ == "__main__":
    main()
