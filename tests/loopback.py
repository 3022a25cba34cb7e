# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A server of files on loopback that can break, lie and redirect, and that answers as Hugging Face does for a repository at one commit."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Request(http.server.BaseHTTPRequestHandler):
    """Each test says how the server answers; what was asked is kept."""

    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        self.server.seen.append((self.path, dict(self.headers.items())))
        self.server.answer(self)

    do_HEAD = do_GET

    def log_message(self, *_words: Any) -> None:
        pass

    def send(self, content: bytes = b"", status: int = 200, announced: int | None = None, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content) if announced is None else announced))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
        self.close_connection = True

    def send_part(self, content: bytes, most: int | None = None, tag: str = '"a"', **more: str) -> None:
        """As a good server does: the rest from the byte asked for, of the same file only; at most so many bytes before the line breaks."""
        asked = self.headers.get("Range", "")
        start = int(asked[len("bytes=") :].split("-")[0]) if asked and self.headers.get("If-Range", tag) == tag else 0
        if start and start >= len(content):
            return self.send(b"", 416, Content_Range="bytes */%d" % len(content))
        rest = content[start:]
        if start:
            more["Content_Range"] = "bytes %d-%d/%d" % (start, len(content) - 1, len(content))
        return self.send(rest[:most], 206 if start else 200, announced=len(rest), ETag=tag, **more)


Answer = Callable[[Request], None]


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, answer: Answer) -> None:
        super().__init__(("127.0.0.1", 0), Request)
        self.seen: list[tuple[str, dict[str, str]]] = []
        self.answer = answer

    def handle_error(self, *_words: Any) -> None:
        """A client that hangs up is what several tests are about."""

    def url(self, path: str = "/file") -> str:
        return "http://127.0.0.1:%d%s" % (self.server_address[1], path)


@contextlib.contextmanager
def serving(answer: Answer) -> Iterator[Server]:
    one = Server(answer)
    thread = threading.Thread(target=one.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield one
    finally:
        one.shutdown()
        one.server_close()


def repository(name: str, files: Mapping[str, bytes], token: str | None = None, most: int | None = None) -> Answer:
    """Hugging Face's answers for one repository. C(token): without it, 401. C(most): every transfer breaks after so many bytes, and can be gone on from."""

    def answer(request: Request) -> None:
        if token is not None and request.headers.get("Authorization") != "Bearer " + token:
            return request.send(b"{}", 401, X_Error_Code="GatedRepo")
        path = request.path.split("?")[0]
        if path.startswith("/api/models/%s/revision/%s" % (name, COMMIT)):
            found = {
                "id": name,
                "modelId": name,
                "sha": COMMIT,
                "siblings": [{"rfilename": file} for file in files],
                "private": False,
                "tags": [],
                "downloads": 0,
            }
            return request.send(json.dumps(found).encode(), Content_Type="application/json")
        if path.startswith("/api/models/%s/tree/%s" % (name, COMMIT)):
            tree = [{"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()} for file, content in files.items()]
            return request.send(json.dumps(tree).encode(), Content_Type="application/json")
        content = files.get(path[len("/%s/resolve/%s/" % (name, COMMIT)) :]) if path.startswith("/%s/resolve/%s/" % (name, COMMIT)) else None
        if content is None:
            return request.send(b"{}", 404, X_Error_Code="EntryNotFound")
        tag = '"%s"' % hashlib.sha256(content).hexdigest()
        return request.send_part(content, most, tag, X_Repo_Commit=COMMIT)

    return answer


__all__ = ["COMMIT", "Answer", "Request", "Server", "repository", "serving"]
