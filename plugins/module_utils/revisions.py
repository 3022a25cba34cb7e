# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The files of a replica on one host: revisions side by side, switched by one symbolic link.

A revision is written under another name and renamed when it is whole, so a host is always in one of two states: old or new.
"""

from __future__ import annotations

import json
import os
import shutil
import typing as t

SECRETS = "secrets"


class Revisions:
    """Everything below C(<root>/etc/rankzero/<replica>). Raises OSError, with the path in it, where the file system refuses."""

    def __init__(self, root: str, replica: str) -> None:
        base = root.rstrip("/")
        self.replica = replica
        self.config_root = base + "/etc/rankzero"
        self.directory = "%s/%s" % (self.config_root, replica)
        self.state_dir = "%s/run/rankzero/%s" % (base, replica)
        self.work_dir = "%s/var/lib/rankzero/%s" % (base, replica)
        self.log_dir = "%s/var/log/rankzero/%s" % (base, replica)

    def path(self, fingerprint: str) -> str:
        return "%s/revisions/%s" % (self.directory, fingerprint)

    def linked(self, name: str) -> t.Optional[str]:
        """The fingerprint that C(current) or C(previous) points at, or None."""
        try:
            return os.path.basename(os.readlink("%s/%s" % (self.directory, name)))
        except OSError:
            return None

    def known(self) -> t.List[str]:
        """Fingerprints of complete revisions, oldest first."""
        parent = self.directory + "/revisions"
        try:
            names = [name for name in os.listdir(parent) if not name.startswith(".")]
        except OSError:
            return []
        return sorted(names, key=lambda name: os.stat("%s/%s" % (parent, name)).st_mtime)

    def read(self, fingerprint: t.Optional[str], name: str) -> t.Optional[str]:
        """The text of one file of a revision, or None."""
        if fingerprint is None:
            return None
        try:
            with open("%s/%s" % (self.path(fingerprint), name), encoding="utf-8") as stream:
                return stream.read()
        except (OSError, UnicodeDecodeError):
            return None

    def same(self, fingerprint: str, files: t.Mapping[str, str], secrets: t.Mapping[str, str]) -> bool:
        """True where the revision holds exactly these files and secrets."""
        try:
            names = sorted(os.listdir(self.path(fingerprint)))
        except OSError:
            return False
        wanted = sorted(list(files) + ([SECRETS] if secrets else []))
        if names != wanted:
            return False
        texts = [(name, text) for name, text in files.items()] + [("%s/%s" % (SECRETS, name), text) for name, text in secrets.items()]
        return all(self.read(fingerprint, name) == text for name, text in texts)

    def write(self, fingerprint: str, files: t.Mapping[str, str], secrets: t.Mapping[str, str], owner: "Owner") -> None:
        """Write a whole revision beside the others and put it into place by rename."""
        _directory(self.config_root, 0o755, None)
        _directory(self.directory, 0o755, None)
        _directory(self.directory + "/revisions", 0o755, None)
        target, unfinished = self.path(fingerprint), "%s/revisions/.new-%s" % (self.directory, fingerprint)
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            _directory(unfinished, 0o750, owner)
            for name, text in files.items():
                _file("%s/%s" % (unfinished, name), text, 0o750 if name.endswith(".py") else 0o640, owner)
            if secrets:
                _directory("%s/%s" % (unfinished, SECRETS), 0o700, owner if owner.private else None)
            for name, text in secrets.items():
                _file("%s/%s/%s" % (unfinished, SECRETS, name), text, 0o600, owner if owner.private else None)
            shutil.rmtree(target, ignore_errors=True)
            os.rename(unfinished, target)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise

    def activate(self, fingerprint: str) -> None:
        """Point C(current) at a revision and C(previous) at the one before."""
        before = self.linked("current")
        if before == fingerprint:
            return
        if before is not None:
            _link("%s/previous" % self.directory, "revisions/" + before)
        _link("%s/current" % self.directory, "revisions/" + fingerprint)

    def forget(self, fingerprint: t.Optional[str]) -> None:
        """Remove one revision and any link to it."""
        if fingerprint is None:
            return
        for name in ("current", "previous"):
            if self.linked(name) == fingerprint:
                os.unlink("%s/%s" % (self.directory, name))
        shutil.rmtree(self.path(fingerprint), ignore_errors=True)

    def prune(self, keep: int) -> None:
        """Keep the newest C(keep) revisions, and in any case those that a link points at."""
        linked = {self.linked("current"), self.linked("previous")}
        for fingerprint in self.known()[:-keep]:
            if fingerprint not in linked:
                shutil.rmtree(self.path(fingerprint), ignore_errors=True)

    def prepare_directories(self, owner: "Owner") -> None:
        """Working, state and log directories, owned by the service's user."""
        base = os.path.dirname(os.path.dirname(self.config_root))
        for path in (self.work_dir, self.state_dir, self.log_dir):
            parent = os.path.dirname(path)
            _directory(parent, 0o755, None)
            _directory(path, 0o755 if path == self.state_dir else 0o750, owner)
        _directory(base or "/", 0o755, None)

    def remove_all(self) -> t.List[str]:
        """Remove every file of the replica on this host, and directories of ours that are empty then. Returns what was removed."""
        removed = []
        for path in (self.directory, self.state_dir, self.work_dir, self.log_dir):
            if os.path.lexists(path):
                shutil.rmtree(path)
                removed.append(path)
            parent = os.path.dirname(path)
            if os.path.basename(parent) == "rankzero" and os.path.isdir(parent) and not os.listdir(parent):
                os.rmdir(parent)
        return removed

    def present(self) -> t.List[str]:
        return [path for path in (self.directory, self.state_dir, self.work_dir, self.log_dir) if os.path.lexists(path)]

    def state(self) -> t.Dict[str, t.Any]:
        """state.json, or {} where it is not there or not readable."""
        try:
            with open(self.state_dir + "/state.json", encoding="utf-8") as stream:
                data = json.load(stream)
        except (OSError, ValueError):
            return {}
        return data if isinstance(data, dict) else {}

    def clear_ready(self) -> None:
        try:
            os.unlink(self.state_dir + "/ready.json")
        except OSError:
            pass


class Owner:
    """Who owns the files. C(private): the service runs as the user that writes the files, so secrets are that user's own."""

    def __init__(self, uid: int, gid: int, private: bool) -> None:
        self.uid = uid
        self.gid = gid
        self.private = private


def _directory(path: str, mode: int, owner: t.Optional[Owner]) -> None:
    if not os.path.isdir(path):
        os.makedirs(path, mode)
    if owner is not None:
        os.chmod(path, mode)
        _chown(path, owner)


def _file(path: str, text: str, mode: int, owner: t.Optional[Owner]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        os.fchmod(stream.fileno(), mode)
        if owner is not None:
            _chown(path, owner)
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _chown(path: str, owner: Owner) -> None:
    """Files belong to root and are readable by the service's group; directories that the service writes into belong to it."""
    if os.geteuid() == 0:
        writes = os.path.isdir(path) and "/etc/rankzero/" not in path
        os.chown(path, owner.uid if writes or owner.private else 0, owner.gid)


def _link(path: str, target: str) -> None:
    """Replace a symbolic link by rename, so that it never points nowhere."""
    unfinished = path + ".new"
    if os.path.lexists(unfinished):
        os.unlink(unfinished)
    os.symlink(target, unfinished)
    os.rename(unfinished, path)
