# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What an engine shows to whoever watches it. One suite for the simulator and for the real engines (engines_under_test.py lists them)."""

from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import pytest
from engines_under_test import ADAPTER, KEY, NAME, Engine, Running

pytestmark = pytest.mark.slow

Start = Callable[..., Running]
CHAT: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "How are you?"}]}
TEXT: dict[str, Any] = {"model": NAME, "prompt": "How are you?"}


def test_health_while_loading(engine: Engine, launch: Start) -> None:
    server = launch(engine, *engine.slow)
    seen = server.until_ready()
    assert seen[-1] == 200
    assert set(seen[:-1]) <= server.dialect.while_loading
    assert set(seen[:-1]) >= server.dialect.must_show
    server.kill()


def test_health_when_ready(running: Running) -> None:
    for key in (None, KEY, "wrong"):
        answer = running.ask("/health", key=key)
        assert (answer.status, answer.body) == (200, running.dialect.health_body)


def test_what_is_open_without_the_key(running: Running) -> None:
    assert {path: running.ask(path, key=None).status for path in running.dialect.open_paths} == dict.fromkeys(running.dialect.open_paths, 200)


def test_what_the_key_guards(running: Running) -> None:
    for path in running.dialect.guarded_paths:
        for key in (None, "wrong", KEY + "x", ""):
            answer = running.ask(path, key=key)
            assert answer.status == 401, path
            assert running.dialect.unauthorized(answer.json)
        assert running.ask(path).status == 200, path


@pytest.mark.parametrize("key", [None, "wrong"])
def test_nothing_is_generated_without_the_key(running: Running, key: str | None) -> None:
    for path, asked in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        answer = running.ask(path, {**asked, "max_tokens": 1}, key=key)
        assert answer.status == 401
        assert running.dialect.unauthorized(answer.json)


def test_paths_that_do_not_exist(running: Running) -> None:
    assert running.ask("/no-such-path", key=None).status == running.dialect.unknown_path_without_key
    assert running.ask("/no-such-path").status == 404
    assert running.ask("/v1/completions", method="GET").status == running.dialect.get_on_completions


def test_the_key_is_in_no_place_that_others_read(running: Running) -> None:
    assert KEY not in running.log or running.dialect.log_has_key
    assert KEY.encode() not in pathlib.Path(f"/proc/{running.process.pid}/cmdline").read_bytes()


def test_the_served_name_is_listed_first(running: Running) -> None:
    answer = running.ask("/v1/models").json
    assert answer["object"] == "list"
    assert answer["data"][0]["id"] == NAME
    assert answer["data"][0]["object"] == "model"


def test_the_adapter_is_listed(running: Running) -> None:
    if running.engine.without_adapters:
        pytest.skip(running.engine.without_adapters)
    assert running.dialect.adapters(running) in ([ADAPTER], [str(running.settings.files.adapter)])


def test_metrics_have_the_names_that_dashboards_use(running: Running) -> None:
    answer = running.ask("/metrics")
    assert answer.status == 200
    assert answer.content_type.startswith("text/plain")
    names = {line.split("{")[0].split(" ")[0] for line in answer.body.decode().splitlines() if not line.startswith("#")}
    assert names >= set(running.dialect.metrics)


@pytest.mark.parametrize("tokens", [1, 9])
def test_a_completion_has_the_tokens_asked_for(running: Running, tokens: int) -> None:
    for path, asked in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        answer = running.ask(path, {**asked, "max_tokens": tokens})
        assert answer.status == 200
        choice, usage = answer.json["choices"][0], answer.json["usage"]
        assert (choice["index"], choice["finish_reason"], answer.json["model"]) == (0, "length", NAME)
        assert usage["completion_tokens"] == tokens
        assert usage["total_tokens"] == usage["prompt_tokens"] + tokens
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        assert len(text) == tokens  # one printable character for each token, in the tiny model and in the simulator
        assert text.isprintable()


@pytest.mark.parametrize(("path", "asked"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
def test_a_stream_is_server_sent_events_that_end_with_done(running: Running, path: str, asked: dict[str, Any]) -> None:
    answer = running.ask(path, {**asked, "max_tokens": 6, "stream": True, "stream_options": {"include_usage": True}})
    assert answer.status == 200
    assert answer.content_type.startswith("text/event-stream")
    lines = [line for line in answer.body.decode().splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line[len("data: ") :]) for line in lines[:-1]]
    choices = [choice for event in events for choice in event["choices"]]
    text = "".join((choice["delta"].get("content") or "") if "delta" in choice else choice["text"] for choice in choices)
    assert len(text) == 6
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    assert events[-1]["usage"]["completion_tokens"] == 6
    assert all(not event.get("usage") for event in events[:-1])
    if asked is CHAT:  # for plain text llama-server puts the usage beside the last choice
        assert events[-1]["choices"] == []


def test_a_model_that_is_not_served(running: Running) -> None:
    assert running.ask("/v1/completions", {**TEXT, "model": "no-such-model", "max_tokens": 1}).status == running.dialect.unknown_model


@pytest.mark.parametrize("content_type", [None, "text/plain"])
def test_a_body_that_does_not_say_that_it_is_json(running: Running, content_type: str | None) -> None:
    answer = running.ask("/v1/completions", {**TEXT, "max_tokens": 1}, content_type=content_type)
    assert answer.status == running.dialect.untyped_body


@pytest.mark.parametrize("messages", [None, 5])
def test_a_chat_without_messages_is_refused(running: Running, messages: Any) -> None:
    answer = running.ask("/v1/chat/completions", {} if messages is None else {"messages": messages})
    assert answer.status == 400
    assert answer.json.get("error", answer.json)["message"]


def test_a_second_server_on_the_port_ends_and_does_not_harm_the_first(engine: Engine, launch: Start, running: Running) -> None:
    second = launch(engine, port=running.settings.port)
    assert second.end() == (3 if engine.dialect == "sglang" else 1)  # uvicorn's own code for a server that could not start
    assert "bind" in second.log
    assert running.health() == 200


def test_a_model_that_is_not_there_ends_the_server(engine: Engine, launch: Start, tmp_path: pathlib.Path) -> None:
    server = launch(engine, model=tmp_path / "no-such-model.gguf")
    assert server.end() == 1
    assert "no-such-model.gguf" in server.log


def test_sigterm_ends_it_at_once_with_0_and_frees_the_port(engine: Engine, launch: Start) -> None:
    server = launch(engine)
    server.until_ready()
    # llama-server says 200 a moment before it installs its handler: SIGTERM in between kills it.
    assert server.ask("/v1/completions", {**TEXT, "max_tokens": 1}).status == 200
    began = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - began < server.dialect.stop_seconds
    again = launch(engine, port=server.settings.port)
    assert again.until_ready()[-1] == 200
