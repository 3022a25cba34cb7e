# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Files over HTTP from a server on loopback that breaks, lies and redirects: whole and checked, or not there at all."""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Iterator
from typing import Any

import loopback
import pytest
from loopback import Request, Server

from ansible_collections.rankzero.inference.plugins.module_utils import downloads
from ansible_collections.rankzero.inference.plugins.module_utils.downloads import DownloadError

CONTENT = bytes(range(256)) * 4096  # 1 MiB
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def server() -> Iterator[Server]:
    with loopback.serving(lambda request: request.send_part(CONTENT)) as one:
        yield one


def fetch(server: Server, path: pathlib.Path, sha256: str | None = SHA256, **more: Any) -> downloads.Fetched:
    return downloads.fetch(more.pop("url", None) or server.url(), str(path), sha256, sleep=lambda _seconds: None, **more)


def left(path: pathlib.Path) -> set[str]:
    return {item.name for item in path.parent.iterdir()}


def test_a_file_is_whole_and_nothing_is_left_beside_it(server: Server, tmp_path: pathlib.Path) -> None:
    assert fetch(server, tmp_path / "file") == (len(CONTENT), SHA256, False)
    assert (tmp_path / "file").read_bytes() == CONTENT and left(tmp_path / "file") == {"file"}


def test_a_broken_connection_is_gone_on_from(server: Server, tmp_path: pathlib.Path) -> None:
    server.answer = lambda request: request.send_part(CONTENT, most=300_000)
    assert fetch(server, tmp_path / "file").resumed
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert [headers.get("Range") for _path, headers in server.seen] == [None, "bytes=300000-", "bytes=600000-", "bytes=900000-"]


def test_a_later_run_goes_on_where_an_earlier_one_gave_up(server: Server, tmp_path: pathlib.Path) -> None:
    server.answer = lambda request: request.send_part(CONTENT, most=400_000)
    with pytest.raises(DownloadError, match="in 1 attempts: the connection ended after 400000 of 1048576 bytes. The next run goes on"):
        fetch(server, tmp_path / "file", attempts=1)
    assert left(tmp_path / "file") == {"file.part", "file.part.json"}
    server.answer = lambda request: request.send_part(CONTENT)
    assert fetch(server, tmp_path / "file").resumed and server.seen[-1][1]["Range"] == "bytes=400000-"
    assert (tmp_path / "file").read_bytes() == CONTENT and left(tmp_path / "file") == {"file"}


def test_a_part_of_another_file_is_thrown_away(server: Server, tmp_path: pathlib.Path) -> None:
    server.answer = lambda request: request.send_part(CONTENT, most=10)
    for sha256, path in ((SHA256, "/old"), ("0" * 64, "/file")):
        with pytest.raises(DownloadError):
            fetch(server, tmp_path / "file", sha256, url=server.url(path), attempts=1)
    server.answer = lambda request: request.send_part(CONTENT)
    fetch(server, tmp_path / "file")
    assert "Range" not in server.seen[-1][1] and (tmp_path / "file").read_bytes() == CONTENT


def test_a_file_that_changes_between_two_parts_is_fetched_anew(server: Server, tmp_path: pathlib.Path) -> None:
    """Without validators the sha256 finds it, and the beginning is fetched again once."""

    def answer(request: Request) -> None:
        if len(server.seen) == 1:
            request.send(b"x" * 500, announced=len(CONTENT))
        else:
            request.send_part(CONTENT)

    server.answer = answer
    assert fetch(server, tmp_path / "file") == (len(CONTENT), SHA256, False)
    assert [headers.get("Range") for _path, headers in server.seen] == [None, "bytes=500-", None]


def test_with_a_validator_a_changed_file_is_sent_whole(server: Server, tmp_path: pathlib.Path) -> None:
    tags = iter(('"old"', '"new"'))

    def answer(request: Request) -> None:
        tag = next(tags)
        request.send_part(CONTENT, most=1000 if tag == '"old"' else None, tag=tag)

    server.answer = answer
    assert fetch(server, tmp_path / "file", sha256=None).sha256 == SHA256
    assert server.seen[1][1]["If-Range"] == '"old"'


def test_servers_that_know_no_ranges(server: Server, tmp_path: pathlib.Path) -> None:
    server.answer = lambda request: request.send(CONTENT[:7] if len(server.seen) == 1 else CONTENT, announced=len(CONTENT))
    assert fetch(server, tmp_path / "file") == (len(CONTENT), SHA256, False)


def test_a_wrong_sha256_leaves_nothing(server: Server, tmp_path: pathlib.Path) -> None:
    with pytest.raises(DownloadError, match="has sha256 %s, and 000" % SHA256):
        fetch(server, tmp_path / "file", sha256="0" * 64)
    assert left(tmp_path / "file") == set() and len(server.seen) == 1


def test_a_file_that_was_there_stays_when_another_cannot_be_had(server: Server, tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_bytes(b"before")
    with pytest.raises(DownloadError):
        fetch(server, tmp_path / "file", sha256="0" * 64)
    assert (tmp_path / "file").read_bytes() == b"before"


@pytest.mark.parametrize("announced", [len(CONTENT) + 1, len(CONTENT) * 2])
def test_a_length_that_is_too_great_is_a_broken_connection(server: Server, tmp_path: pathlib.Path, announced: int) -> None:
    server.answer = lambda request: request.send(CONTENT, announced=announced)
    with pytest.raises(DownloadError, match="the connection ended after"):
        fetch(server, tmp_path / "file", attempts=2)
    assert not (tmp_path / "file").exists()


def test_a_length_that_is_too_small_is_not_all_of_it(server: Server, tmp_path: pathlib.Path) -> None:
    server.answer = lambda request: request.send(CONTENT, announced=100)
    with pytest.raises(DownloadError, match="has sha256"):
        fetch(server, tmp_path / "file")


@pytest.mark.parametrize("announced", [10**15, 10**30])
def test_what_does_not_fit_is_refused_before_a_byte_is_written(server: Server, tmp_path: pathlib.Path, announced: int) -> None:
    server.answer = lambda request: request.send(b"x" * 10, announced=announced)
    with pytest.raises(DownloadError, match="needs %d bytes more, and [0-9]+ are free at %s" % (announced, tmp_path)):
        fetch(server, tmp_path / "file")
    assert left(tmp_path / "file") == set()


def test_an_endless_answer_ends_when_the_disk_would_be_full(server: Server, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: Request) -> None:
        request.send_response(200)
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        try:
            while True:
                request.wfile.write(b"100000\r\n" + b"x" * 0x100000 + b"\r\n")
        except OSError:
            request.close_connection = True

    monkeypatch.setattr(downloads.shutil, "disk_usage", lambda _path: FakeUsage(downloads.SPARE_BYTES - 1 if (tmp_path / "file.part").exists() else 1 << 40))
    server.answer = answer
    with pytest.raises(DownloadError, match="needs some bytes more"):
        fetch(server, tmp_path / "file")
    assert (tmp_path / "file.part").stat().st_size <= 65 << 20


class FakeUsage:
    def __init__(self, free: int) -> None:
        self.free = free


def test_an_answer_without_a_length_needs_a_sha256(server: Server, tmp_path: pathlib.Path) -> None:
    def answer(request: Request) -> None:
        request.send_response(200)
        request.end_headers()
        request.wfile.write(CONTENT)
        request.close_connection = True

    server.answer = answer
    with pytest.raises(DownloadError, match="does not say how long it is"):
        fetch(server, tmp_path / "file", sha256=None)
    assert fetch(server, tmp_path / "file").sha256 == SHA256


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://127.0.0.1/x", "gopher://127.0.0.1/", "//", "data:,x"])
def test_redirects_to_another_scheme_are_refused(server: Server, tmp_path: pathlib.Path, target: str) -> None:
    server.answer = lambda request: request.send(b"", 302, Location=target)
    with pytest.raises(DownloadError, match="redirects (to|in a circle)"):
        fetch(server, tmp_path / "file", attempts=2)
    assert not (tmp_path / "file").exists()


def test_https_is_never_left_for_http() -> None:
    handler = downloads._Redirects()
    request = downloads.urllib.request.Request("https://h/x", headers={"Authorization": "Bearer t"})
    with pytest.raises(DownloadError, match="same or a safer scheme"):
        handler.redirect_request(request, None, 302, "", {}, "http://h/x")  # type: ignore[arg-type]
    other = handler.redirect_request(request, None, 302, "", {}, "https://other/x")  # type: ignore[arg-type]
    same = handler.redirect_request(request, None, 302, "", {}, "https://h/y")  # type: ignore[arg-type]
    assert other is not None and not other.has_header("Authorization")
    assert same is not None and same.get_header("Authorization") == "Bearer t"


def test_redirects_are_followed_within_bounds(server: Server, tmp_path: pathlib.Path) -> None:
    server.answer = lambda request: request.send_part(CONTENT) if request.path == "/there" else request.send(b"", 302, Location="/there")
    assert fetch(server, tmp_path / "file").sha256 == SHA256
    server.answer = lambda request: request.send(b"", 302, Location="/again")
    with pytest.raises(DownloadError):
        fetch(server, tmp_path / "other", attempts=1)
    assert len(server.seen) < 20


@pytest.mark.parametrize(
    ("status", "attempts", "text"), [(404, 1, "answers 404.*correct the address"), (401, 1, "give a token"), (503, 3, "in 3 attempts.*503")]
)
def test_statuses(server: Server, tmp_path: pathlib.Path, status: int, attempts: int, text: str) -> None:
    server.answer = lambda request: request.send(b"no", status)
    with pytest.raises(DownloadError, match=text):
        fetch(server, tmp_path / "file", attempts=3)
    assert len(server.seen) == attempts


@pytest.mark.parametrize("content_range", ["bytes 0-1048575/1048576", "bytes 5-9/10", "", "bytes x-y/z", "items 10-1048575/1048576"])
def test_another_part_than_the_one_asked_for_is_refused(server: Server, tmp_path: pathlib.Path, content_range: str) -> None:
    server.answer = lambda request: (
        request.send_part(CONTENT, most=10) if len(server.seen) == 1 else request.send(CONTENT[10:], 206, Content_Range=content_range)
    )
    with pytest.raises(DownloadError, match="another part than the one asked for"):
        fetch(server, tmp_path / "file")


def test_a_credential_goes_to_its_host_only_and_into_no_message(server: Server, tmp_path: pathlib.Path) -> None:
    url = server.url("/file?token=s3cret").replace("127.0.0.1", "user:pa%2Fss@127.0.0.1")
    fetch(server, tmp_path / "file", url=url)
    assert server.seen[0][1]["Authorization"] == "Basic dXNlcjpwYS9zcw=="
    server.answer = lambda request: request.send(b"", 404)
    with pytest.raises(DownloadError) as error:
        fetch(server, tmp_path / "other", url=url)
    assert not {"user", "pa%2Fss", "pa/ss", "s3cret"} & set(str(error.value).replace("/", " ").split()) and "s3cret" not in str(error.value)


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://h/x", "/etc/passwd", "http://", "http://h:0/x", "http://h:99999/x", "http://h/a b", "http://h/\n"]
)
def test_addresses_that_are_none(tmp_path: pathlib.Path, url: str) -> None:
    with pytest.raises(DownloadError, match="no http"):
        downloads.fetch(url, str(tmp_path / "file"), None)


def test_nothing_listens(tmp_path: pathlib.Path, server: Server) -> None:
    url = server.url()
    server.shutdown()
    server.server_close()
    with pytest.raises(DownloadError, match="in 2 attempts.*refused"):
        downloads.fetch(url, str(tmp_path / "file"), SHA256, attempts=2, sleep=lambda _seconds: None)


@pytest.mark.parametrize(
    ("url", "secrets"),
    [
        ("https://h/a?true", set()),
        ("https://alice:pass%20word@h/a", {"pass%20word", "pass word"}),
        ("https://t0ken@h/a", {"t0ken"}),
        ("https://h/a?X-Signature=0123abcd%2B&download=true", {"0123abcd+", "X-Signature=0123abcd%2B&download=true"}),
        ("https://[h/a?signature", set()),
    ],
)
def test_what_is_secret_in_an_address(url: str, secrets: set[str]) -> None:
    assert downloads.secret_parts(url) == {url} | secrets
    hidden = {url, "other"}
    downloads.hide(hidden, url, None)
    assert hidden == {url, "other"} | secrets


@pytest.mark.parametrize("url", ["", "https://h/a.tar.gz", "files/a@b?.tar", "/a/b"])
def test_an_address_without_secrets_is_shown(url: str) -> None:
    hidden = {url} - {""}
    downloads.hide(hidden, url)
    assert downloads.secret_parts(url) == hidden == set()
