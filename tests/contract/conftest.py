# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Fixtures of the behaviour suite: start the engines of engines_under_test.py."""

from __future__ import annotations

import contextlib
import http.client
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

HERE = pathlib.Path(__file__).resolve().parent
for folder in (str(HERE), str(HERE.parent)):
    if folder not in sys.path:
        sys.path.insert(0, folder)

import tiny_models
from engines_under_test import ENGINES, REAL_ENGINES, Engine, Files, Layouts, Running, Settings, free_port


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Layouts:
    folder = tmp_path_factory.mktemp("model")
    # Some 35 MB: large enough that a real engine is seen loading it.
    shape = tiny_models.Shape(hidden=256, layers=8, heads=8, kv_heads=8, feed_forward=1024, context=512)
    return Layouts(Files(*tiny_models.write_gguf_pair(folder, shape)), Files(*tiny_models.write_hf_pair(folder)))


Start = Callable[..., Running]


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory, files: Layouts) -> Iterator[Start]:
    """Starts servers, which have ended after the session at the latest."""
    folder = tmp_path_factory.mktemp("engines")
    started: list[Running] = []

    def start(engine: Engine, *arguments: str, port: int | None = None, model: pathlib.Path | None = None) -> Running:
        given: Files = getattr(files, engine.layout)
        settings = Settings("127.0.0.1", port or free_port(), given if model is None else given._replace(model=model), folder)
        started.append(Running(engine, settings, arguments))
        return started[-1]

    yield start
    for running in started:
        running.kill()


EITHER = [*ENGINES, *(pytest.param(engine, marks=pytest.mark.real) for engine in REAL_ENGINES)]


@pytest.fixture(scope="session", params=EITHER, ids=lambda engine: engine.label)
def engine(request: pytest.FixtureRequest, launch: Start) -> Engine:
    """An engine that is there and can answer on this processor: prebuilt ones may use instructions that it lacks."""
    candidate: Engine = request.param
    reason = candidate.missing()
    if reason:
        pytest.skip(reason)
    if candidate in REAL_ENGINES:  # installed for this processor, and not started once more than needed
        return candidate
    running = launch(candidate)
    try:
        running.until_ready()
        running.ask("/v1/completions", {"prompt": "x", "max_tokens": 1})
    except (AssertionError, OSError, http.client.HTTPException):
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.process.wait(2)
        if running.process.poll() == -signal.SIGILL:
            pytest.skip(f"{candidate.label} ends by SIGILL: it was built for another processor")
        raise
    finally:
        running.kill()
    return candidate


@pytest.fixture(scope="session")
def running(engine: Engine, launch: Start) -> Running:
    """A ready server with a key, an adapter and metrics, for tests that leave it as it is."""
    server = launch(engine)
    server.until_ready()
    return server
