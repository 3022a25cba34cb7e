# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Bring a model or an adapter to its path on a host: from an http(s) address, a repository of Hugging Face, or the controller.

It is put together beside the path, in C(.NAME.unfinished), and takes its name when it is whole and checked. What is there under another content is
never touched: a revision of a replica that is kept for a rollback may mean it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ansible_collections.rankzero.inference.plugins.module_utils import archives, downloads, models, mounts, small_files

RunCommand = Callable[..., "tuple[int, str, str]"]
REPOSITORY = re.compile(r"hf://([A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95})\Z")
REVISION = re.compile(r"[0-9a-f]{40}\Z")
SHA256 = re.compile(r"[0-9a-f]{64}\Z")
PATIENCE_SECONDS = 1800.0

# Runs in the interpreter of an engine's build. What it is asked comes by the environment: a token may be among it.
_SNAPSHOT = r"""
import json, os, sys
from huggingface_hub import snapshot_download
asked = json.loads(os.environ["RANKZERO_FETCH"])
try:
    snapshot_download(asked["repository"], revision=asked["revision"], local_dir=asked["folder"], allow_patterns=asked["files"] or None,
                      token=os.environ.get("HF_TOKEN") or False, max_workers=4)
except Exception as error:
    sys.exit("%s: %s" % (type(error).__name__, " ".join(str(error).split())[:600]))
"""


class FetchError(Exception):
    """The files cannot be had, or something else is at their path. The text says what to do."""


class Wanted(NamedTuple):
    """C(source): http(s) address, C(hf://ORGANISATION/NAME), or what the controller has sent. C(sha256): of the file, the archive or the content."""

    path: str
    source: str
    sha256: str | None = None
    revision: str | None = None
    files: tuple[str, ...] = ()
    token: str | None = None
    python: str | None = None
    endpoint: str | None = None

    @property
    def repository(self) -> str | None:
        match = REPOSITORY.match(self.source)
        return match.group(1) if match else None

    @property
    def note(self) -> dict[str, str]:
        """What is written beside the files, and what tells a later run that they are these."""
        said = {"source": downloads.shown(self.source) if "://" in self.source else self.source, "revision": self.revision, "sha256": self.sha256}
        return {key: value for key, value in said.items() if value}


def check_path(path: str) -> None:
    """Raises FetchError for what is not the one name of a place."""
    if not os.path.isabs(path) or os.path.normpath(path) != path or path == "/" or not path.isprintable():
        raise FetchError("path is %r: an absolute path without .. is wanted" % path)


def check(wanted: Wanted) -> None:
    """Raises FetchError for what is not one certain content."""
    check_path(wanted.path)
    if wanted.sha256 is not None and not SHA256.match(wanted.sha256):
        raise FetchError("sha256 is %r: 64 lower-case hexadecimal digits are wanted" % wanted.sha256)
    if wanted.source.startswith("hf:"):
        if not wanted.repository:
            raise FetchError("source is %r: hf://ORGANISATION/NAME is wanted" % wanted.source)
        if not REVISION.match(wanted.revision or ""):
            raise FetchError("revision is %r: the 40 hexadecimal digits of a commit are wanted, for a branch is another content tomorrow" % wanted.revision)
    elif "://" in wanted.source:
        downloads.check_url(wanted.source)
        if wanted.sha256 is None:
            raise FetchError("sha256 is not set: what comes from %s must be known beforehand" % downloads.shown(wanted.source))


def is_there(wanted: Wanted) -> bool:
    """Whether the path holds the wanted content. Raises FetchError where it holds another one, or one that nobody knows."""
    if not os.path.lexists(wanted.path):
        return False
    if not os.path.exists(wanted.path):
        raise FetchError("%s is a link that leads nowhere: remove it, or name another path" % wanted.path)
    note = models.read_note(wanted.path) or {}
    said = {key: note.get(key) for key in ("source", "revision", "sha256") if note.get(key)}
    if said and said == wanted.note:
        return True
    content = models.describe(wanted.path, checksum=True)["content_sha256"] if wanted.sha256 else None
    if wanted.sha256 and wanted.sha256 in (content, said.get("sha256")):
        return True
    seen = "from %s%s" % (said["source"], " at %s" % said["revision"] if said.get("revision") else "") if said.get("source") else "with sha256 %s" % content
    if content is None and not said:
        seen = "of an origin that nothing tells"
    raise FetchError(
        "%s is there, %s, and that is not what is wanted. It is left as it is, since a running replica or a rollback may need it: "
        "name another path (with the version in it), or remove it" % (wanted.path, seen)
    )


def fetch(wanted: Wanted, run_command: RunCommand, transferred: str | None = None) -> None:
    """Make C(wanted.path). `transferred`: an archive from the controller. Raises FetchError, DownloadError, ArchiveError and OSError."""
    previous = os.umask(0o022)
    try:
        os.makedirs(os.path.dirname(wanted.path), 0o755, exist_ok=True)
        with _unfinished(_work_directory(wanted.path)) as work:
            if is_there(wanted):  # another host has brought it meanwhile
                shutil.rmtree(work)
                return
            try:
                content = _content(wanted, work, run_command, transferred)
                _check_inside(content)
                _finish(wanted, content, downloaded=wanted.repository is None and transferred is None)
            except BaseException:
                if not wanted.repository and not os.path.exists(os.path.join(work, "download.part")):
                    shutil.rmtree(work)  # nothing that a later run could go on from
                raise
            os.rename(content, wanted.path)
            shutil.rmtree(work)
    finally:
        os.umask(previous)


def check_removal(path: str, sha256: str | None, root: str) -> bool:
    """Whether something of a fetch is at the path. Raises FetchError for what no fetch has brought, and for what a replica needs."""
    if not os.path.lexists(path):
        return os.path.isdir(_work_directory(path)) and not os.path.islink(_work_directory(path))
    if os.path.islink(path):
        raise FetchError("it is a link, and no fetch makes one: remove it by hand")
    if os.path.isdir(path):
        _check_directory(path)
    elif not os.path.isfile(path) or sha256 is None or models.sha256(path) != sha256:
        raise FetchError("a file has no note of where it came from: it is removed where sha256 names its content, and by hand otherwise")
    replicas = users(root, path)
    if replicas:
        raise FetchError("it is in use by %s: remove or redeploy what uses it first" % ", ".join(replicas))
    return True


def _check_directory(path: str) -> None:
    """It has the note of a fetch, and nothing in it is the content of another fetch or of another file system. Raises FetchError."""
    mounted = mounts.below([os.path.realpath(path)])
    if mounted:
        raise FetchError("%s is mounted there: unmount it first" % small_files.clean(mounted[0]))
    if models.read_note(path) is None:
        raise FetchError("it has no note of a fetch (%s), so it is somebody else's: remove it by hand" % models.NOTE)
    for folder, folders, names in os.walk(path):
        if folder != path and models.NOTE in names:
            raise FetchError("%s in it was fetched for itself: remove that first" % small_files.clean(os.path.relpath(folder, path)))
        folders[:] = [name for name in folders if not os.path.islink(os.path.join(folder, name))]


def remove(path: str, sha256: str | None, root: str) -> None:
    """Remove the content and what a broken fetch has left. The path loses its name first: nobody sees half a directory. Raises FetchError and OSError."""
    with _unfinished(_work_directory(path)) as work:
        removed = os.path.join(work, "removed")
        try:
            if os.path.lexists(path) and check_removal(path, sha256, root):  # another run may have fetched it while this one waited
                os.rename(path, removed)
        except (FetchError, OSError):
            if not os.listdir(work):
                os.rmdir(work)
            raise
        shutil.rmtree(work)


def sweep(path: str) -> None:
    """Remove what a fetch that was killed at its very end has left beside the path, unless another run is at it."""
    work = _work_directory(path)
    if os.path.isdir(work) and not os.path.islink(work):
        with contextlib.suppress(FetchError), _unfinished(work, patience=0):
            shutil.rmtree(work)


def users(root: str, path: str) -> list[str]:
    """Replicas on the host one of whose kept revisions names the path, something below it, or the model that it is a part of: C(NAME).

    The same place may be named in another way, through a link or with C(//). Raises FetchError where a revision cannot be read: it may name it too.
    """
    base = os.path.join(root, "etc/rankzero")
    return [replica for replica in _listed(base) if any(_names(text, path) for text in _texts(_launches(os.path.join(base, replica, "revisions"))))]


def _launches(revisions: str) -> list[Any]:
    found = []
    for name in _listed(revisions):
        launch = os.path.join(revisions, name, "launch.json")
        if not name.startswith(".") and os.path.lexists(launch):
            content, problem = small_files.read_json(launch, 16 << 20)
            if content is None:
                raise FetchError("what uses it cannot be told: %s" % problem)
            found.append(content)
    return found


def _listed(folder: str) -> list[str]:
    """Names in a directory; none where it is not there. Raises FetchError where they cannot be told."""
    try:
        return sorted(os.listdir(folder), key=small_files.natural_key)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise FetchError("what uses it cannot be told: %s" % small_files.reason(folder, error)) from error


LONGEST_ARGUMENT = 4096


def _names(text: str, path: str) -> bool:
    """Whether an argument names the path: somewhere as it is written, or in other words alone, as C(NAME=PATH) or in a JSON text."""
    place = os.path.realpath(path)
    if any(re.search(re.escape(one) + r"(?![\w.-])", text) for one in (path, place)):
        return True
    with contextlib.suppress(ValueError, RecursionError):
        if text[:1] in ("{", "["):
            return any(_names(one, path) for one in _texts(json.loads(text)))
    if "/" not in text or "\0" in text or len(text) > LONGEST_ARGUMENT:
        return False
    starts = [match.start() for match in re.finditer(r"(?<![^=,:])/", text)]
    ends = [match.start() for match in re.finditer(r"[,:]", text)] + [len(text)]
    return any(_overlap(os.path.realpath(text[start:end]), place) for start in starts for end in ends if end > start)


def _overlap(named: str, place: str) -> bool:
    """One is the other, is below it, or is a part of the model: of one in several GGUF files the first is named, and means all."""
    if named == place or named.startswith(place + os.sep):
        return True
    parts = [models.GGUF_SPLIT.match(one) for one in (named, place)]
    if parts[0] and parts[1] and parts[0].groups() == parts[1].groups():
        return True
    return place.startswith(named + os.sep) and _is_model(named)


def _is_model(folder: str) -> bool:
    """A directory that an engine reads whole, and not one of many models."""
    return any(name.endswith(("config.json", ".safetensors", ".gguf", ".bin")) for name in _listed(folder))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)


def _work_directory(path: str) -> str:
    parent, name = os.path.split(path)
    return os.path.join(parent, ".%s.unfinished" % name)


@contextlib.contextmanager
def _unfinished(work: str, patience: float = PATIENCE_SECONDS) -> Iterator[str]:
    """The working directory, for one run at a time: hosts that share their storage fetch to the same path together, and one of them does it for all.

    Where a transfer was broken it stays, for the next run to go on from.
    """
    deadline = time.monotonic() + patience
    descriptor = _locked(work)
    while descriptor is None:
        if time.monotonic() > deadline:
            raise FetchError("another run has been fetching to %s for %d minutes: look at it, and run again" % (work, patience // 60))
        time.sleep(min(1.0, patience))
        descriptor = _locked(work)
    try:
        yield work
    finally:
        os.close(descriptor)


def _locked(work: str) -> int | None:
    """The open directory with its lock, or None while somebody else has that, or has just removed the directory."""
    os.makedirs(work, 0o755, exist_ok=True)
    descriptor = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(work)):
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def _content(wanted: Wanted, work: str, run_command: RunCommand, transferred: str | None) -> str:
    content = os.path.join(work, "content")
    if wanted.repository:
        _snapshot(wanted, content, run_command)
        return content
    if os.path.isdir(content):
        shutil.rmtree(content)
    if transferred is None:
        arrived = os.path.join(work, "download")
        headers = {"Authorization": "Bearer " + wanted.token} if wanted.token else {}
        downloads.fetch(wanted.source, arrived, wanted.sha256, headers)
        if not urlsplit(wanted.source).path.endswith(archives.SUFFIXES):
            return arrived
    else:
        arrived = transferred
    os.mkdir(content)
    archives.unpack(arrived, content)
    inside = os.listdir(content)
    return os.path.join(content, inside[0]) if len(inside) == 1 and (transferred or os.path.isdir(os.path.join(content, inside[0]))) else content


def _snapshot(wanted: Wanted, folder: str, run_command: RunCommand) -> None:
    """By the huggingface_hub of an engine's build, which goes on where an earlier run ended."""
    if not wanted.python:
        raise FetchError("no registered build of an engine on the host has huggingface_hub: install vLLM or SGLang first, or name an interpreter (python)")
    asked = {"repository": wanted.repository, "revision": wanted.revision, "folder": folder, "files": list(wanted.files)}
    kept = {name: os.environ[name] for name in os.environ if re.match(r"(?i)((http|https|all|no)_proxy|ssl_cert_(file|dir)|requests_ca_bundle)\Z", name)}
    environment = {
        **kept,
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LC_ALL": "C.UTF-8",
        "HOME": os.path.dirname(folder),
        "HF_HOME": os.path.join(os.path.dirname(folder), "cache"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "RANKZERO_FETCH": json.dumps(asked),
        **({"HF_TOKEN": wanted.token} if wanted.token else {}),
        **({"HF_ENDPOINT": wanted.endpoint} if wanted.endpoint else {}),
    }
    dropped = [word for name in os.environ if name not in environment and "=" not in name for word in ("-u", name)]
    command = ["env", *dropped, wanted.python, "-I", "-c", _SNAPSHOT]
    rc, out, err = run_command(command, environ_update=environment, cwd="/", expand_user_and_vars=False)
    if rc != 0:
        told = (err.strip() or out.strip() or "no output").splitlines()[-1]
        raise FetchError("%s at %s cannot be fetched: %s" % (wanted.source, wanted.revision, told.replace(wanted.token, "********") if wanted.token else told))
    shutil.rmtree(os.path.join(folder, ".cache"), ignore_errors=True)


def _check_inside(content: str) -> None:
    """Links of what others made may lead to nothing but what came with them; files for everybody to read, and none that gives rights away."""
    inside = os.path.realpath(content)
    for folder, folders, names in os.walk(content):
        for name in [*folders, *names]:
            path = os.path.join(folder, name)
            if os.path.islink(path) and not os.path.realpath(path).startswith(inside + os.sep):
                raise FetchError("it holds the link %r, which leads out of it" % os.path.relpath(path, content)[:200])
            if not os.path.islink(path):
                os.chmod(path, 0o755 if stat.S_ISDIR(os.stat(path).st_mode) else 0o644)
    os.chmod(content, 0o755 if os.path.isdir(content) else 0o644)


def _finish(wanted: Wanted, content: str, downloaded: bool) -> None:
    """Check the whole by its sha256, where that is of the content; and note where it came from."""
    found = models.describe(content, checksum=True)
    if not found["content_sha256"]:
        raise FetchError("%s holds nothing%s" % (downloads.shown(wanted.source), ": " + found["error"] if found["error"] else ""))
    if wanted.sha256 and not downloaded and found["content_sha256"] != wanted.sha256:
        raise FetchError("what came has sha256 %s, and %s is wanted" % (found["content_sha256"], wanted.sha256))
    if os.path.isdir(content):
        with open(os.path.join(content, models.NOTE), "w", encoding="utf-8") as stream:
            json.dump({**wanted.note, "content_sha256": found["content_sha256"]}, stream, indent=1, sort_keys=True)
            stream.flush()
            os.fsync(stream.fileno())


def interpreter(builds: Any, engine: str | None) -> str | None:
    """The Python of a registered build that has huggingface_hub; one of `engine` first. `builds` are C(engines) of node facts."""
    found = []
    for name in sorted(builds if isinstance(builds, Mapping) else (), key=lambda one: (one != engine, small_files.natural_key(str(one)))):
        found += [build for build in builds[name] if not build.get("problems") and "huggingface-hub" in (build.get("versions") or {})]
    return next((str(build["python"]["path"]) for build in found if (build.get("python") or {}).get("path")), None)


__all__ = ["FetchError", "Wanted", "check", "check_path", "check_removal", "fetch", "interpreter", "is_there", "remove", "sweep", "users"]
