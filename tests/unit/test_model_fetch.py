# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Models and adapters that are fetched: from a server on loopback, with the real huggingface_hub, from archives; nothing half, nothing overwritten."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pathlib
import subprocess
import sys
import tarfile
import threading
from typing import Any

import loopback
import pytest

from ansible_collections.rankzero.inference.plugins.module_utils import archives, downloads, model_fetch, models
from ansible_collections.rankzero.inference.plugins.module_utils.model_fetch import FetchError, Wanted

CONTENT = os.urandom(300_000)
FILES = {"adapter_config.json": b'{"peft_type": "LORA", "r": 16}', "adapter_model.safetensors": CONTENT}
ERRORS = (FetchError, downloads.DownloadError, archives.ArchiveError)


def run(words: list[str], cwd: str | None = None, environ_update: dict[str, str] | None = None, **_more: Any) -> tuple[int, str, str]:
    """AnsibleModule.run_command, with what of it matters here."""
    assert not any("s3cret" in word for word in words)
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **(environ_update or {})})
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "LONGEST_PAUSE", 0.0)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def packed(files: dict[str, bytes], top: str = "") -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(top + name)
            member.size, member.mode = len(content), 0o600
            archive.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def fetch(wanted: Wanted, transferred: str | None = None) -> None:
    model_fetch.check(wanted)
    assert not model_fetch.is_there(wanted)
    model_fetch.fetch(wanted, run, transferred)
    assert model_fetch.is_there(wanted)
    assert [name for name in os.listdir(os.path.dirname(wanted.path)) if "unfinished" in name] == []


def test_a_file_by_its_checksum(tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "adapters/sql.gguf")
    with loopback.serving(lambda request: request.send_part(CONTENT, most=70_000)) as server:
        wanted = Wanted(path, server.url("/sql.gguf"), sha256(CONTENT), token="s3cret")
        fetch(wanted)
        assert len(server.seen) == 5 and all(headers["Authorization"] == "Bearer s3cret" for _path, headers in server.seen)
    assert pathlib.Path(path).read_bytes() == CONTENT and os.stat(path).st_mode & 0o777 == 0o644
    assert model_fetch.is_there(wanted)


@pytest.mark.parametrize("top", ["", "sql-3/"])
def test_an_archive_becomes_a_directory(tmp_path: pathlib.Path, top: str) -> None:
    content = packed(FILES, top)
    path = tmp_path / "sql"
    with loopback.serving(lambda request: request.send_part(content)) as server:
        wanted = Wanted(str(path), server.url("/sql.tar.gz?x=s3cret"), sha256(content))
        fetch(wanted)
    found = models.describe(str(path), checksum=True)
    assert found["config"]["highest_rank"] == 16 and found["files"] == 2, "the note counts for nothing"
    assert found["fetched"] == {"source": server.url("/sql.tar.gz"), "sha256": sha256(content), "content_sha256": found["content_sha256"]}
    assert (path / "adapter_model.safetensors").read_bytes() == CONTENT and os.stat(path / "adapter_config.json").st_mode & 0o777 == 0o644
    assert model_fetch.is_there(Wanted(str(path), "elsewhere", found["content_sha256"])), "known by its content too"


def test_what_is_there_is_never_overwritten(tmp_path: pathlib.Path) -> None:
    (tmp_path / "sql").mkdir()
    (tmp_path / "sql/adapter_config.json").write_text("{}")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    for path, text in (
        ("sql", "with sha256 [0-9a-f]{64}, and that is not what is wanted"),
        ("file", "with sha256 " + sha256(b"mine")),
        ("link", "leads nowhere"),
    ):
        with pytest.raises(FetchError, match=text):
            model_fetch.is_there(Wanted(str(tmp_path / path), "http://127.0.0.1/x", "0" * 64))
    with pytest.raises(FetchError, match="of an origin that nothing tells.*name another path"):
        model_fetch.is_there(Wanted(str(tmp_path / "sql"), "hf://org/x", revision=loopback.COMMIT))
    assert (tmp_path / "sql/adapter_config.json").read_text() == "{}" and (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    "content",
    [
        packed({"../x": b""}),
        packed({"/etc/x": b""}),
        b"no archive",
        packed({}),
    ],
    ids=["upwards", "absolute", "no archive", "empty"],  # not the bytes: an archive holds the time of day
)
def test_archives_that_are_hostile_or_empty_leave_nothing_at_the_path(tmp_path: pathlib.Path, content: bytes) -> None:
    with loopback.serving(lambda request: request.send_part(content)) as server, pytest.raises(ERRORS):
        fetch(Wanted(str(tmp_path / "a/sql"), server.url("/x.tar.gz"), sha256(content)))
    assert not (tmp_path / "a/sql").exists() and not (tmp_path / "x").exists() and not (tmp_path / "a/x").exists()


def test_what_the_controller_has_sent(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    digest = models.describe(str(folder), checksum=True)["content_sha256"]
    (tmp_path / "sent").write_bytes(packed(FILES, "source/"))
    fetch(Wanted(str(tmp_path / "sql"), "controller:source", digest), str(tmp_path / "sent"))
    with pytest.raises(FetchError, match="what came has sha256 %s, and 000" % digest):
        fetch(Wanted(str(tmp_path / "other"), "controller:source", "0" * 64), str(tmp_path / "sent"))
    assert sorted(os.listdir(tmp_path)) == ["sent", "source", "sql"]
    (tmp_path / "sent").write_bytes(packed({"one.gguf": CONTENT}))
    fetch(Wanted(str(tmp_path / "one.gguf"), "controller:one.gguf", sha256(CONTENT)), str(tmp_path / "sent"))
    assert (tmp_path / "one.gguf").read_bytes() == CONTENT


def test_hosts_that_share_their_storage_fetch_once(tmp_path: pathlib.Path) -> None:
    with loopback.serving(lambda request: request.send_part(CONTENT, most=100_000)) as server:
        wanted = Wanted(str(tmp_path / "sql.gguf"), server.url("/sql.gguf"), sha256(CONTENT))
        threads = [threading.Thread(target=model_fetch.fetch, args=(wanted, run)) for _host in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(server.seen) == 3 and os.listdir(tmp_path) == ["sql.gguf"] and model_fetch.is_there(wanted)
    with model_fetch._unfinished(str(tmp_path / "work")), pytest.raises(FetchError, match="another run has been fetching"):
        with model_fetch._unfinished(str(tmp_path / "work"), patience=0.01):
            pass


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"path": "relative"}, "absolute path"),
        ({"path": "/a/../b"}, "absolute path without .."),
        ({"path": "/"}, "absolute path"),
        ({"sha256": None}, "sha256 is not set"),
        ({"sha256": "0" * 63}, "64 lower-case"),
        ({"source": "ftp://h/x"}, "no http"),
        ({"source": "file:///etc/passwd"}, "no http"),
        ({"source": "hf://x", "revision": loopback.COMMIT}, "hf://ORGANISATION/NAME is wanted"),
        ({"source": "hf://../x", "revision": loopback.COMMIT}, "hf://ORGANISATION/NAME is wanted"),
        ({"source": "hf://a/b/c", "revision": loopback.COMMIT}, "hf://ORGANISATION/NAME is wanted"),
        ({"source": "hf://org/x"}, "revision is None"),
        ({"source": "hf://org/x", "revision": "main"}, "a branch is another content tomorrow"),
    ],
)
def test_what_is_not_one_certain_content_is_refused(more: dict[str, Any], text: str) -> None:
    with pytest.raises(ERRORS, match=text):
        model_fetch.check(Wanted(**{"path": "/a/b", "source": "http://h/x", "sha256": "0" * 64, **more}))


# ---- Hugging Face, with its own library


def hub(server: loopback.Server, path: pathlib.Path, **more: Any) -> Wanted:
    pytest.importorskip("huggingface_hub")
    return Wanted(str(path), "hf://org/x", revision=loopback.COMMIT, python=sys.executable, endpoint=server.url(""), **more)


def test_a_repository_at_a_commit(tmp_path: pathlib.Path) -> None:
    with loopback.serving(loopback.repository("org/x", FILES, token="s3cret")) as server:
        fetch(hub(server, tmp_path / "sql", token="s3cret"))
    assert sorted(os.listdir(tmp_path / "sql")) == [models.NOTE, *sorted(FILES)]
    note = json.loads((tmp_path / "sql" / models.NOTE).read_text())
    assert (note["source"], note["revision"]) == ("hf://org/x", loopback.COMMIT) and "s3cret" not in json.dumps(note)
    with pytest.raises(FetchError, match="from hf://org/x at %s, and that is not what is wanted" % loopback.COMMIT):
        model_fetch.is_there(hub(server, tmp_path / "sql")._replace(revision="f" * 40))


def test_a_repository_that_refuses_says_so_without_the_token(tmp_path: pathlib.Path) -> None:
    with loopback.serving(loopback.repository("org/x", FILES, token="another")) as server, pytest.raises(FetchError) as error:
        fetch(hub(server, tmp_path / "sql", token="s3cret"))
    assert "hf://org/x" in str(error.value) and "s3cret" not in str(error.value) and not (tmp_path / "sql").exists()


def test_files_of_a_repository_may_not_lie_outside(tmp_path: pathlib.Path) -> None:
    hostile = {**FILES, "../../outside": b"x"}
    with loopback.serving(loopback.repository("org/x", hostile)) as server, pytest.raises(FetchError):
        fetch(hub(server, tmp_path / "a/b/sql"))
    assert not list(tmp_path.rglob("outside")) and not (tmp_path / "a/b/sql").exists()


def test_links_that_lead_out_are_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "content").mkdir()
    (tmp_path / "content/inside").write_text("x")
    (tmp_path / "content/fine").symlink_to("inside")
    model_fetch._check_inside(str(tmp_path / "content"))
    (tmp_path / "content/passwd").symlink_to("/etc/passwd")
    with pytest.raises(FetchError, match="the link 'passwd', which leads out of it"):
        model_fetch._check_inside(str(tmp_path / "content"))


def test_without_a_build_that_has_it(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FetchError, match="install vLLM or SGLang first"):
        model_fetch.fetch(Wanted(str(tmp_path / "sql"), "hf://org/x", revision=loopback.COMMIT), run)
    build = {"python": {"path": "/v/bin/python"}, "versions": {"huggingface-hub": "2.4.0"}, "problems": []}
    other = {**build, "python": {"path": "/s/bin/python"}}
    builds = {"llamacpp": [{"problems": [], "python": None}], "sglang": [other], "vllm": [{**build, "problems": ["gone"]}, build]}
    assert model_fetch.interpreter(builds, "vllm") == "/v/bin/python" and model_fetch.interpreter(builds, None) == "/s/bin/python"
    assert model_fetch.interpreter({}, "vllm") is model_fetch.interpreter(None, None) is None


def revision(root: pathlib.Path, replica: str, *arguments: str) -> None:
    folder = root / "etc/rankzero" / replica / "revisions/0123456789abcdef"
    folder.mkdir(parents=True)
    (folder / "launch.json").write_text(json.dumps({"launches": [{"path": "/opt/vllm", "args": list(arguments)}]}))


def test_what_was_fetched_is_removed_once_no_revision_names_it(tmp_path: pathlib.Path) -> None:
    path, content = tmp_path / "adapters/sql", packed(FILES)
    with loopback.serving(lambda request: request.send_part(content)) as server:
        fetch(Wanted(str(path), server.url("/sql.tar.gz"), sha256(content)))
    revision(tmp_path, "other", "--lora-modules", "sql=%s-3" % path)
    assert model_fetch.check_removal(str(path), None, str(tmp_path)), "another path that begins with it is another path"
    revision(tmp_path, "glm", "--lora-modules", "sql=%s" % path)
    with pytest.raises(FetchError, match="in use by glm:"):
        model_fetch.check_removal(str(path), None, str(tmp_path))
    model_fetch.remove(str(path), None, str(tmp_path / "elsewhere"))
    assert os.listdir(tmp_path / "adapters") == [] and not model_fetch.check_removal(str(path), None, str(tmp_path))


def test_what_nobody_fetched_is_not_removed(tmp_path: pathlib.Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own/model.safetensors").write_bytes(CONTENT)
    (tmp_path / "link").symlink_to("own")
    (tmp_path / "file.gguf").write_bytes(CONTENT)
    os.mkfifo(tmp_path / "fifo")
    for name, digest in (("own", sha256(CONTENT)), ("link", None), ("file.gguf", None), ("file.gguf", "0" * 64), ("fifo", "0" * 64)):
        with pytest.raises(FetchError, match="by hand"):
            model_fetch.check_removal(str(tmp_path / name), digest, str(tmp_path))
    assert model_fetch.check_removal(str(tmp_path / "file.gguf"), sha256(CONTENT), str(tmp_path))


def test_what_a_fetch_that_was_killed_left_beside_the_path_goes(tmp_path: pathlib.Path) -> None:
    path, work = tmp_path / "sql", tmp_path / ".sql.unfinished"
    for clean in (lambda: model_fetch.sweep(str(path)), lambda: model_fetch.remove(str(path), None, str(tmp_path))):
        (work / "content").mkdir(parents=True)
        assert model_fetch.check_removal(str(path), None, str(tmp_path))
        clean()
        assert not work.exists()
    work.mkdir()
    with model_fetch._unfinished(str(work)):
        model_fetch.sweep(str(path))
        assert work.exists(), "another run is at it"


def noted(path: pathlib.Path, *names: str) -> pathlib.Path:
    """A directory as a fetch leaves it."""
    path.mkdir(parents=True)
    for name in (models.NOTE, *names):
        (path / name).write_text("{}")
    return path


@pytest.mark.parametrize(
    ("fetched", "named"),
    [
        ("models/glm", "{root}/models//glm/"),
        ("models/glm", "{root}/models/x/../glm"),
        ("models/glm", "{root}/short"),
        ("models/glm", "name={root}/short"),
        ("models/glm", '{{"name": "a", "path": "{root}/short"}}'),
        ("models/\u00e9t\u00e9", '{{"name": "a", "path": "{root}/models/\\u00e9t\\u00e9"}}'),
        ("models/glm", "{root}/models/glm/part.gguf"),
        ("models/glm/adapter", "{root}/models/glm"),
        ("models/a-00002-of-00003.gguf", "{root}/models/a-00001-of-00003.gguf"),
    ],
)
def test_what_a_revision_names_in_other_words_is_in_use(tmp_path: pathlib.Path, fetched: str, named: str) -> None:
    noted(tmp_path / "models/glm", "config.json")
    (tmp_path / "models/x").mkdir()
    (tmp_path / "short").symlink_to("models/glm")
    path = tmp_path / fetched
    if path.suffix:
        path.write_bytes(CONTENT)
    elif not path.exists():
        noted(path)
    revision(tmp_path, "other", "--port", "8000", "--download-dir", str(tmp_path), "/", "--chat", "{not json", "a=/,b:/")
    assert model_fetch.users(str(tmp_path), str(path)) == []
    revision(tmp_path, "glm", named.format(root=tmp_path))
    assert model_fetch.users(str(tmp_path), str(path)) == ["glm"]


def test_where_it_cannot_be_told_what_uses_it_nothing_is_removed(tmp_path: pathlib.Path) -> None:
    path = noted(tmp_path / "sql")
    revision(tmp_path, "glm")
    (tmp_path / "etc/rankzero/cordoned.json").write_text("{}")
    assert model_fetch.check_removal(str(path), None, str(tmp_path))
    launch = next((tmp_path / "etc").rglob("launch.json"))
    for content in ("", "{", "[]"):
        launch.write_text(content)
        with pytest.raises(FetchError, match="cannot be told: .*launch.json"):
            model_fetch.check_removal(str(path), None, str(tmp_path))
    launch.unlink()
    launch.symlink_to("launch.json")
    with pytest.raises(FetchError, match="cannot be told"):
        model_fetch.check_removal(str(path), None, str(tmp_path))


def test_what_was_not_fetched_with_it_does_not_go_with_it(tmp_path: pathlib.Path) -> None:
    path = noted(tmp_path / "glm")
    noted(path / "data/sql")
    (path / "around").symlink_to(".")
    with pytest.raises(FetchError, match="data/sql in it was fetched for itself"):
        model_fetch.check_removal(str(path), None, str(tmp_path))
    with pytest.raises(FetchError, match="/proc is mounted there: unmount it first"):
        model_fetch._check_directory("/proc")


def test_what_came_while_a_removal_waited_is_looked_at_again(tmp_path: pathlib.Path) -> None:
    """A removal that found only what a fetch was still at must not take what that fetch has finished since, and that a replica uses."""
    path, work = tmp_path / "sql", tmp_path / ".sql.unfinished"
    work.mkdir()
    assert model_fetch.check_removal(str(path), None, str(tmp_path))
    noted(path)
    revision(tmp_path, "glm", str(path))
    with pytest.raises(FetchError, match="in use by glm"):
        model_fetch.remove(str(path), None, str(tmp_path))
    assert path.is_dir() and not work.exists()


def test_a_removal_that_is_refused_by_the_system_leaves_nothing_beside_the_path(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = noted(tmp_path / "sql")

    def busy(*_places: str) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(os, "rename", busy)
    with pytest.raises(OSError, match="busy"):
        model_fetch.remove(str(path), None, str(tmp_path))
    assert os.listdir(tmp_path) == ["sql"]
