# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Unpack archives that others made: nothing of them may lie, lead or be written outside of the directory they are unpacked into."""

from __future__ import annotations

import errno
import lzma
import os
import re
import shutil
import stat
import tarfile
import zipfile
import zlib
from typing import IO

MOST_MEMBERS = 100000
SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.bz2", ".zip")


class ArchiveError(Exception):
    """An archive that is damaged, or that would write elsewhere. The text is a sentence for the operator."""


def unpack(path: str, place: str) -> None:
    """A tar (gz, xz, bz2) or zip archive into an empty directory. Raises ArchiveError for members that would lie, or lead, outside of it."""
    try:
        if zipfile.is_zipfile(path):
            _unpack_zip(path, place)
        else:
            _unpack_tar(path, place)
    except (FileExistsError, FileNotFoundError, NotADirectoryError) as error:
        raise ArchiveError("the archive holds %r twice, or a link to what it does not hold" % os.path.relpath(str(error.filename), place)[:200]) from None
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, ValueError, RuntimeError, NotImplementedError, zlib.error, lzma.LZMAError) as error:
        raise ArchiveError("the archive cannot be unpacked: %s" % (error or type(error).__name__)) from None


def _unpack_tar(path: str, place: str) -> None:
    links: list[tuple[str, str | None, str | None]] = []
    with tarfile.open(path) as archive:
        for number, member in enumerate(archive):
            _check_count(number)
            target = _below(place, member.name)
            if member.isdir():
                os.makedirs(target, 0o755, exist_ok=True)
            elif member.isfile():
                content = archive.extractfile(member)
                if content is not None:
                    _write(target, content, member.mode)
            elif member.issym():
                _below(place, os.path.join(os.path.dirname(member.name), member.linkname), member.linkname)
                links.append((target, member.linkname, None))
            elif member.islnk():
                links.append((target, None, _below(place, member.linkname)))
            else:
                raise ArchiveError("the archive holds %r, which is neither a file nor a directory nor a link" % member.name[:200])
    _make_links(place, links)


def _make_links(place: str, links: list[tuple[str, str | None, str | None]]) -> None:
    """Last, so that no file is written through a link; and a link neither: one that leads nowhere yet may lead out once another is made."""
    inside = os.path.realpath(place)
    for target, symbolic, hard in links:
        for path in (target, *([hard] if hard is not None else [])):
            parent = os.path.join(inside, os.path.relpath(os.path.dirname(path), place))
            if os.path.realpath(parent) != os.path.normpath(parent):
                raise ArchiveError("the archive holds %r, whose directory is a link" % os.path.relpath(path, place)[:200])
        os.makedirs(os.path.dirname(target), 0o755, exist_ok=True)
        if symbolic is not None:
            os.symlink(symbolic, target)
        elif hard is not None:
            if os.path.lexists(target):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
            shutil.copy2(hard, target, follow_symlinks=False)
    for target, _symbolic, _hard in links:  # where they lead is known when all are there
        if not (os.path.realpath(target) + os.sep).startswith(inside + os.sep):
            raise ArchiveError("the archive holds %r, which leads out of it" % os.path.relpath(target, place)[:200])


def _unpack_zip(path: str, place: str) -> None:
    with zipfile.ZipFile(path) as archive:
        for number, member in enumerate(archive.infolist()):
            _check_count(number)
            target, mode = _below(place, member.filename), member.external_attr >> 16
            if member.is_dir():
                os.makedirs(target, 0o755, exist_ok=True)
            elif stat.S_IFMT(mode) not in (0, stat.S_IFREG):
                raise ArchiveError("the archive holds %r, which is no plain file" % member.filename[:200])
            else:
                with archive.open(member) as content:
                    _write(target, content, mode)


def _check_count(number: int) -> None:
    if number >= MOST_MEMBERS:
        raise ArchiveError("the archive holds more than %d files" % MOST_MEMBERS)


def _below(place: str, name: str, shown: str | None = None) -> str:
    """Where a member lies. Raises ArchiveError for a name that leads out of the directory, on any system's reading of it."""
    parts = name.replace("\\", "/").split("/")
    depth = 0
    for part in parts:
        depth += -1 if part == ".." else 0 if part in ("", ".") else 1
        if depth < 0:
            break
    if depth < 0 or (shown or name).startswith(("/", "\\")) or re.match(r"[A-Za-z]:", shown or name) or not name.isprintable():
        raise ArchiveError("the archive holds %r, which leads out of it" % (shown or name)[:200])
    if shown is None and ".." in parts:
        raise ArchiveError("the archive holds %r, which leads out of it" % name[:200])
    return os.path.join(place, *[part for part in parts if part not in ("", ".")])


def _write(target: str, content: IO[bytes], mode: int) -> None:
    os.makedirs(os.path.dirname(target), 0o755, exist_ok=True)
    with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644), "wb") as stream:
        shutil.copyfileobj(content, stream, 1 << 20)
        os.fchmod(stream.fileno(), 0o755 if mode & 0o111 else 0o644)


__all__ = ["SUFFIXES", "ArchiveError", "unpack"]
