# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Fetch one file over HTTP(S): resumed after a broken connection, whole and checked or not there at all.

What arrives is written to C(DESTINATION.part). It takes its own name only when its length and sha256 are those wanted, so nobody ever sees half a
file. A later call goes on where an earlier one ended (RFC 9110, range requests), for as long as the server says that it is still the same file.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import json
import os
import shutil
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import IO, Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit, urlunsplit

from ansible_collections.rankzero.inference.plugins.module_utils import log_signatures, models, small_files

ATTEMPTS = 6
READ_SECONDS = 60.0
BLOCK = 1 << 20
SPARE_BYTES = 256 * 1024 * 1024
"""What is left free on the file system, whatever is fetched."""

SHORTEST_QUERY_SECRET = 8
"""A shorter value of a query is a word, such as true, that answers have for other reasons."""

RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
LONGEST_PAUSE = 30.0


class DownloadError(Exception):
    """A file cannot be had. The text names the place, what was seen, and what to do; never a credential of the URL."""


class _Broken(Exception):
    """The connection ended before its time: worth another attempt."""


class Fetched(NamedTuple):
    bytes: int
    sha256: str
    resumed: bool


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows to http(s) only, never from https to http, and takes no credential to another host."""

    max_redirections = 10

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: http.client.HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        before, after = urlsplit(req.full_url), urlsplit(newurl)
        if after.scheme not in ("http", "https") or (before.scheme == "https" and after.scheme != "https"):
            raise DownloadError("%s redirects to %s: only a redirect to the same or a safer scheme is followed" % (shown(req.full_url), shown(newurl)))
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        if new is not None and (before.scheme, before.hostname, before.port) != (after.scheme, after.hostname, after.port):
            new.remove_header("Authorization")
        return new


class _NoFiles(urllib.request.BaseHandler):
    """Stands in the place of the handlers of file: and ftp:, which the default opener has."""

    def _refuse(self, req: urllib.request.Request) -> Any:
        raise DownloadError("%s is no http(s) address" % shown(req.full_url))

    file_open = ftp_open = data_open = _refuse


def shown(url: str) -> str:
    """A URL without what may be secret in it: user, password and query."""
    try:
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
    except ValueError:
        return "(an address that is none)"
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


def secret_parts(url: str) -> set[str]:
    """What of a URL may be secret, as it stands there: all of it, user, password, query. Empty where it has nothing of the kind."""
    try:
        parts = urlsplit(url)
        if not parts.scheme or ("@" not in parts.netloc and not parts.query and not parts.fragment):
            return set()
        user, _colon, password = parts.netloc.rpartition("@")[0].partition(":")
    except ValueError:
        return {url} if "@" in url or "?" in url else set()
    token = password or user  # a user alone is one; beside a password it is a name
    found = {
        token,
        unquote(token),
        *(value for value in [parts.query, *(value for _name, value in parse_qsl(parts.query))] if len(value) >= SHORTEST_QUERY_SECRET),
    }
    return {url} | {text for text in found if len(text) >= log_signatures.SHORTEST_SECRET}


def hide(no_log_values: set[str], *urls: str | None) -> None:
    """Let a module's answer show addresses, as its parameters with no_log would not, but nothing that is secret in one."""
    for url in filter(None, urls):
        no_log_values.discard(url)
        no_log_values.update(secret_parts(url))


def check_url(url: str) -> None:
    """Raises DownloadError unless it is an http(s) address of a host."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        good = False
    if not good or not url.isprintable() or " " in url:
        raise DownloadError("%s is no http(s) address" % shown(url))


def fetch(
    url: str, path: str, sha256: str | None, headers: Mapping[str, str] | None = None, attempts: int = ATTEMPTS, sleep: Callable[[float], None] = time.sleep
) -> Fetched:
    """Fetch `url` to `path`. `sha256`: 64 hex digits; None is for a caller that checks what it got by other means.

    Raises DownloadError, and OSError of the local file system. C(path.part) stays after a failure that another call can go on from, and not otherwise.
    """
    check_url(url)
    part, resumed, problem = path + ".part", False, ""
    for attempt in range(attempts):
        if attempt:
            sleep(min(2.0**attempt, LONGEST_PAUSE))
        try:
            resumed = _transfer(url, part, sha256, dict(headers or {})) or resumed
        except _Broken as error:
            problem = str(error)
            continue
        digest = models.sha256(part)
        if sha256 is not None and digest != sha256:
            _discard(part)
            if resumed:  # the file on the server may have changed between two parts: once more from its beginning
                resumed, problem = False, "what was put together from several parts has sha256 %s" % digest
                continue
            raise DownloadError("%s has sha256 %s, and %s is wanted: correct sha256, or do not trust the place" % (shown(url), digest, sha256))
        size = _size(part)
        os.replace(part, path)
        _discard(part)
        return Fetched(size, digest, resumed)
    raise DownloadError("%s could not be fetched in %d attempts: %s. The next run goes on from what is there." % (shown(url), attempts, problem))


def _beginning(part: str, url: str, sha256: str | None) -> dict[str, Any]:
    """What is known of the file that C(part) is the beginning of, kept beside it: a beginning of another file is thrown away."""
    asked = {"url": hashlib.sha256(url.encode()).hexdigest(), "sha256": sha256}
    state = small_files.read_json(part + ".json")[0] or {}
    if {key: state.get(key) for key in asked} != asked:
        _discard(part)
        state = {**asked, "validator": None}
    return state


def _transfer(url: str, part: str, sha256: str | None, headers: dict[str, str]) -> bool:
    """One attempt: whether it went on from what was there. Raises _Broken and DownloadError."""
    state = _beginning(part, url, sha256)
    have = _size(part) if sha256 is not None or state["validator"] else 0
    if have:
        headers["Range"] = "bytes=%d-" % have
        if state["validator"]:
            headers["If-Range"] = state["validator"]
    try:
        with _open(url, headers) as answer:
            start, total = _place(answer, have, url)
            if total is None and sha256 is None and answer.headers.get("Transfer-Encoding", "").lower() != "chunked":
                raise DownloadError("%s does not say how long it is, so a part of it would look like all of it: give its sha256" % shown(url))
            _check_space(part, None if total is None else total - start, url)
            with open(part + ".json", "w", encoding="utf-8") as note:
                json.dump({**state, "validator": _validator(answer)}, note)
            with open(part, "r+b" if start else "wb") as stream:
                stream.seek(start)
                _copy(answer, stream, start, total, url)
                stream.flush()
                os.fsync(stream.fileno())
            return start > 0
    except urllib.error.HTTPError as error:
        return _refused(error, url, part, have)
    except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError, socket.timeout, ssl.SSLError) as error:
        reason = getattr(error, "reason", None) or error
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise DownloadError("%s: %s. Install its certificate authority on the host." % (shown(url), reason)) from None
        raise _Broken("%s: %s" % (shown(url), reason or type(error).__name__)) from None


def _open(url: str, headers: Mapping[str, str]) -> Any:
    parts = urlsplit(url)
    given = dict(headers)
    if parts.username is not None:
        pair = "%s:%s" % (unquote(parts.username), unquote(parts.password or ""))
        given["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
        url = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, parts.query, ""))
    request = urllib.request.Request(url, headers={"User-Agent": "rankzero.inference", "Accept-Encoding": "identity"})
    for name, value in given.items():
        # Unredirected headers would be lost on the first redirect within one host; the redirect handler drops what must not go along.
        request.add_header(name, value)
    return urllib.request.build_opener(_Redirects, _NoFiles).open(request, timeout=READ_SECONDS)


def _place(answer: Any, have: int, url: str) -> tuple[int, int | None]:
    """(where the body begins, the whole length or None). Raises DownloadError for an answer that says something else than what was asked."""
    if answer.headers.get("Content-Encoding", "identity").lower() not in ("", "identity"):
        raise DownloadError("%s is sent as %s, which was not asked for" % (shown(url), answer.headers["Content-Encoding"]))
    length = answer.headers.get("Content-Length")
    if length is not None and not length.strip().isdigit():
        raise DownloadError("%s has the Content-Length %r" % (shown(url), length))
    if answer.status == 206:
        unit, _space, place = answer.headers.get("Content-Range", "").partition(" ")
        span, _slash, whole = place.partition("/")
        first, _dash, last = span.partition("-")
        if unit != "bytes" or not first.isdigit() or not last.isdigit() or int(first) != have:
            raise DownloadError("%s answers with another part than the one asked for: %s" % (shown(url), answer.headers.get("Content-Range")))
        return have, int(whole) if whole.isdigit() else int(last) + 1
    if answer.status != 200:
        raise DownloadError("%s answers %d" % (shown(url), answer.status))
    return 0, None if length is None else int(length)


def _copy(answer: Any, stream: IO[bytes], start: int, total: int | None, url: str) -> None:
    """The body to the file. A connection that ends before the announced length is broken, whatever http.client says of it."""
    position, checked = start, start
    try:
        while True:
            block = answer.read(BLOCK)
            if not block:
                break
            stream.write(block)
            position += len(block)
            if total is not None and position > total:
                raise DownloadError("%s sends more than the %d bytes that it announced" % (shown(url), total))
            if total is None and position - checked >= 64 * BLOCK:
                checked = position
                _check_space(stream.name, None, url)
    finally:
        stream.truncate(position)
    if total is not None and position < total:
        raise _Broken("the connection ended after %d of %d bytes" % (position, total))


def _check_space(part: str, wanted: int | None, url: str) -> None:
    free = shutil.disk_usage(os.path.dirname(os.path.abspath(part))).free
    if free < (wanted or 0) + SPARE_BYTES:
        raise DownloadError(
            "%s needs %s bytes more, and %d are free at %s: make room, or choose another place"
            % (shown(url), "some" if wanted is None else wanted, free, os.path.dirname(os.path.abspath(part)))
        )


def _validator(answer: Any) -> str | None:
    """A strong validator of RFC 9110: a weak ETag may not be used to put parts together."""
    tag = answer.headers.get("ETag")
    return tag if tag and not tag.startswith("W/") else None


def _refused(error: urllib.error.HTTPError, url: str, part: str, have: int) -> bool:
    with error:
        if error.code == 416 and have:  # what is there is all of it, or of another file: the sha256 tells
            whole = error.headers.get("Content-Range", "").rpartition("/")[2]
            if whole == str(have):
                return True
            _discard(part)
            raise _Broken("%s is shorter than what was there" % shown(url)) from None
        if error.code in RETRIED:
            raise _Broken("%s answers %d" % (shown(url), error.code)) from None
        if 300 <= error.code < 400:
            raise DownloadError("%s redirects in a circle, or to what is no http(s) address: correct the address" % shown(url)) from None
        hint = {401: "give a token", 403: "give a token that may read it", 404: "correct the address"}.get(error.code, "look at the server")
        raise DownloadError("%s answers %d (%s): %s" % (shown(url), error.code, http.client.responses.get(error.code, "no known status"), hint)) from None


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _discard(part: str) -> None:
    for path in (part, part + ".json"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


__all__ = ["DownloadError", "Fetched", "check_url", "fetch", "hide", "secret_parts", "shown"]
