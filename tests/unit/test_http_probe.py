# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The probe against real servers on loopback, most of which misbehave."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from ansible_collections.rankzero.inference.plugins.module_utils import http_probe

Handler = Callable[[socket.socket], None]
ADDRESS = "127.0.0.5"


@contextlib.contextmanager
def server(handler: Handler) -> Iterator[str]:
    """Accept connections until the end of the block; each is handled in a thread and closed."""
    with socket.create_server((ADDRESS, 0)) as listening:
        url = f"http://{ADDRESS}:{listening.getsockname()[1]}"

        def serve() -> None:
            while True:
                try:
                    connection, _peer = listening.accept()
                except OSError:
                    return
                threading.Thread(target=handle, args=(connection,), daemon=True).start()

        def handle(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                handler(connection)

        threading.Thread(target=serve, daemon=True).start()
        try:
            yield url
        finally:
            listening.shutdown(socket.SHUT_RDWR)


def read_request(connection: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    head, dummy, body = data.partition(b"\r\n\r\n")
    length = next((int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0)
    while len(body) < length:
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


def answering(raw: bytes, seen: list[bytes] | None = None) -> Handler:
    def handler(connection: socket.socket) -> None:
        request = read_request(connection)
        if seen is not None:
            seen.append(request)
        connection.sendall(raw)

    return handler


def reply(body: bytes, status: str = "200 OK", headers: bytes = b"") -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n%s\r\n%s" % (status.encode(), len(body), headers, body)


def test_json_answer() -> None:
    with server(answering(reply(b'{"data": [{"id": "glm"}]}', headers=b"Server: uvicorn\r\n"))) as url:
        answer = http_probe.request(url, "/v1/models")
    assert (answer["status"], answer["error"], answer["json"], answer["server"]) == (200, None, {"data": [{"id": "glm"}]}, "uvicorn")


@pytest.mark.parametrize("headers", [b"Content-Length: 2\r\n", b"Connection: close\r\n", b"Connection: close\r\nContent-Length: 2\r\n"])
def test_body_that_comes_after_the_headers(headers: bytes) -> None:
    def handler(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\n" + headers + b"\r\n")
        time.sleep(0.1)
        connection.sendall(b"{}")

    with server(handler) as url:
        answer = http_probe.request(url, "/v1/models")
    assert (answer["status"], answer["error"], answer["json"]) == (200, None, {})


def test_what_is_sent() -> None:
    seen: list[bytes] = []
    with server(answering(reply(b"{}"), seen)) as url:
        http_probe.request(url, "/v1/completions", {"prompt": "1"}, {"Authorization": "Bearer k"})
        http_probe.request(url, "/health")
    assert seen[0].startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert b"Authorization: Bearer k\r\n" in seen[0]
    assert seen[0].endswith(b'{"prompt": "1"}')
    assert seen[1].startswith(b"GET /health HTTP/1.1\r\n")
    assert b"Authorization" not in seen[1]


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.6:1")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.6:1")
    with server(answering(reply(b"{}"))) as url:
        assert http_probe.request(url, "/health")["status"] == 200


def test_redirects_are_not_followed() -> None:
    asked: list[bytes] = []
    with server(answering(reply(b"here"), asked)) as other:
        with server(answering(reply(b"", "307 Temporary Redirect", b"Location: %s/\r\n" % other.encode()))) as url:
            assert http_probe.request(url, "/health")["status"] == 307
    assert asked == []


def test_nothing_listens() -> None:
    with socket.create_server((ADDRESS, 0)) as taken:
        port = taken.getsockname()[1]
    assert http_probe.request(f"http://{ADDRESS}:{port}", "/health")["error"] == "refused"


def test_bound_but_not_listening_is_refused_too() -> None:
    """vLLM holds its port so while it loads."""
    with socket.socket() as bound:
        bound.bind((ADDRESS, 0))
        assert http_probe.request(f"http://{ADDRESS}:{bound.getsockname()[1]}", "/health")["error"] == "refused"


def test_loading() -> None:
    with server(answering(reply(b'{"error":{"message":"Loading model"}}', "503 Service Unavailable"))) as url:
        answer = http_probe.request(url, "/health")
    assert (answer["status"], answer["error"]) == (503, "loading")


def test_other_statuses_are_answers() -> None:
    with server(answering(reply(b"no", "401 Unauthorized"))) as url:
        answer = http_probe.request(url, "/v1/models")
    assert (answer["status"], answer["error"], answer["text"]) == (401, None, "no")


def silent(connection: socket.socket) -> None:
    time.sleep(3)


def endless_body(connection: socket.socket) -> None:
    read_request(connection)
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        connection.sendall(b"x" * 65536)


def endless_chunks(connection: socket.socket) -> None:
    read_request(connection)
    connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        connection.sendall(b"1000\r\n" + b"x" * 0x1000 + b"\r\n")


def endless_headers(connection: socket.socket) -> None:
    read_request(connection)
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    while True:
        connection.sendall(b"X-Filler: " + b"y" * 100 + b"\r\n")


def endless_continue(connection: socket.socket) -> None:
    read_request(connection)
    while True:
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000)


def dripping_headers(connection: socket.socket) -> None:
    read_request(connection)
    for byte in b"HTTP/1.1 200 OK\r\n" * 100:
        connection.sendall(bytes([byte]))
        time.sleep(0.05)


def dripping_body(connection: socket.socket) -> None:
    read_request(connection)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    for _byte in range(1000):
        connection.sendall(b"x")
        time.sleep(0.05)


def deaf(connection: socket.socket) -> None:
    """Never reads, so that a large request fills the buffers."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    time.sleep(3)


@pytest.mark.parametrize("handler", [silent, dripping_headers, dripping_body])
def test_the_whole_exchange_has_one_deadline(handler: Handler) -> None:
    with server(handler) as url:
        started = time.monotonic()
        answer = http_probe.request(url, "/health", timeout=0.6)
        assert time.monotonic() - started < 1.5
    assert (answer["status"], answer["error"]) == (None, "timeout")


def test_sending_has_the_deadline_too() -> None:
    with server(deaf) as url:
        answer = http_probe.request(url, "/v1/completions", {"prompt": "x" * 30_000_000}, timeout=0.6)
    assert answer["error"] == "timeout"


@pytest.mark.parametrize("handler", [endless_body, endless_chunks, endless_headers, endless_continue])
def test_an_answer_without_end_is_cut_off(handler: Handler) -> None:
    with server(handler) as url:
        started = time.monotonic()
        answer = http_probe.request(url, "/health", timeout=20, limit=100_000)
        assert time.monotonic() - started < 10
    assert (answer["status"], answer["error"]) == (None, "other")
    assert answer["message"]


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"\x00\xff" * 300,
        b"",
        b"HTTP/1.1 banana OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nshort",
        b"\r\n\r\n\r\n",
    ],
)
def test_what_is_no_http_is_no_answer(raw: bytes) -> None:
    with server(answering(raw)) as url:
        answer = http_probe.request(url, "/health", timeout=5)
    assert (answer["status"], answer["error"]) == (None, "other")


@pytest.mark.parametrize("body", [b"{", b"[" * 100_000, b"\xff\xfe", b"", b"1e999999", b"nullx"])
def test_bodies_that_are_no_json(body: bytes) -> None:
    with server(answering(reply(body))) as url:
        answer = http_probe.request(url, "/health")
    assert answer["status"] == 200
    assert not isinstance(answer["json"], (dict, list))


@pytest.mark.parametrize("url", ["https://127.0.0.5:1", "http://127.0.0.5", "ftp://127.0.0.5:1", "nonsense", "http://127.0.0.5:99999", "http://[::1"])
def test_addresses_that_are_none(url: str) -> None:
    answer = http_probe.request(url, "/health")
    assert (answer["status"], answer["error"]) == (None, "other")
    assert answer["message"]


def test_a_path_with_a_line_break_sends_nothing() -> None:
    seen: list[bytes] = []
    with server(answering(reply(b"{}"), seen)) as url:
        assert http_probe.request(url, "/a\r\nX-Evil: 1")["error"] == "other"
    assert seen == []
