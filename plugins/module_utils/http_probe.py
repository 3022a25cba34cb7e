# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ask one HTTP question and get data back, whatever answers.

`ansible.module_utils.urls` follows redirects, honours proxies of the environment (which break a probe of the own host) and
has a time limit per read, not per answer. A port of an engine that starts may be held by anything: a server that sends for
ever, one byte a second, or no HTTP at all. Here the whole exchange has one deadline and one limit of bytes. Nothing is raised.
"""

from __future__ import annotations

import http.client
import io
import json
import socket
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_SECONDS = 5.0
BODY_LIMIT = 256 * 1024
HEADER_LIMIT = 64 * 1024


class _TooMuch(Exception):
    """More bytes came than a probe takes."""


class _BoundedReader(io.RawIOBase):
    """Reads a socket until a deadline and a number of bytes, over all reads together."""

    def __init__(self, sock: socket.socket, deadline: float, limit: int) -> None:
        super().__init__()
        self._sock = sock
        self._deadline = deadline
        self._left = limit

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._left <= 0:
            raise _TooMuch()
        self._sock.settimeout(_remaining(self._deadline))
        count = self._sock.recv_into(buffer, min(len(buffer), self._left))
        self._left -= count
        return count


class _BoundedSocket:
    """The part of a socket that `http.client` uses, with the bounded reader as its file."""

    def __init__(self, sock: socket.socket, deadline: float, limit: int) -> None:
        self._sock = sock
        self._deadline = deadline
        self._limit = limit

    def makefile(self, mode: str, *unused: Any, **unused_too: Any) -> io.BufferedReader:
        return io.BufferedReader(_BoundedReader(self._sock, self._deadline, self._limit))

    def sendall(self, data: bytes) -> None:
        self._sock.settimeout(_remaining(self._deadline))
        self._sock.sendall(data)

    def close(self) -> None:
        """`http.client` closes a connection that will not be kept before the body is read; the socket's owner closes it for real."""


def _remaining(deadline: float) -> float:
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise socket.timeout("timed out")
    return seconds


def request(
    url: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT_SECONDS,
    limit: int = BODY_LIMIT,
) -> dict[str, Any]:
    """GET `path` of the server at `url` (`http://ADDRESS:PORT`), or POST `body` as JSON.

    Returns `{status: int|null, error: null|"refused"|"timeout"|"loading"|"other", message, json, text, server, seconds}`.
    `loading` is any 503; `refused` means that nothing listens, which for vLLM and SGLang is normal for minutes. A status
    other than 503 is an answer, not an error. `json` is null for a body that is not JSON. Redirects are not followed.
    """
    started = time.monotonic()
    answer: dict[str, Any] = {"status": None, "error": None, "message": None, "json": None, "text": "", "server": None, "seconds": 0.0}
    try:
        answer.update(_exchange(url, path, body, headers or {}, started + timeout, limit))
    except socket.timeout:
        answer.update(error="timeout", message=f"no complete answer within {timeout:g} s")
    except ConnectionRefusedError:
        answer.update(error="refused", message="nothing listens there")
    except _TooMuch:
        answer.update(error="other", message="the answer is larger than %d bytes" % limit)
    except http.client.HTTPException as error:
        answer.update(error="other", message=f"no HTTP answer ({type(error).__name__})")
    except (OSError, ValueError) as error:
        answer.update(error="other", message=(error.strerror or str(error)) if isinstance(error, OSError) else str(error))
    answer["seconds"] = round(time.monotonic() - started, 3)
    return answer


def _exchange(url: str, path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str], deadline: float, limit: int) -> dict[str, Any]:
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or parts.port is None:
        raise ValueError(f"not an address of the form http://ADDRESS:PORT: {url}")
    connection = http.client.HTTPConnection(parts.hostname, parts.port)
    with socket.create_connection((parts.hostname, parts.port), timeout=_remaining(deadline)) as sock:
        connection.sock = _BoundedSocket(sock, deadline, limit + HEADER_LIMIT)
        payload = None if body is None else json.dumps(body).encode()
        kind = {"Content-Type": "application/json"} if payload is not None else {}
        connection.request(
            "GET" if payload is None else "POST", path, body=payload, headers={"Connection": "close", "Accept": "application/json", **kind, **headers}
        )
        response = connection.getresponse()
        data = response.read(limit + 1)
        if len(data) > limit:
            raise _TooMuch()
        if response.length:
            raise http.client.IncompleteRead(data, response.length)
    return _answer(response, data)


def _answer(response: http.client.HTTPResponse, data: bytes) -> dict[str, Any]:
    text = data.decode("utf-8", "replace")
    try:
        parsed = json.loads(text) if text.strip() else None
    except (ValueError, RecursionError):
        parsed = None
    loading = response.status == 503
    return {
        "status": response.status,
        "error": "loading" if loading else None,
        "message": "it answers 503" if loading else None,
        "json": parsed,
        "text": text,
        "server": response.headers.get("Server"),
    }
