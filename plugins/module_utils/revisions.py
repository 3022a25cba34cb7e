# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The files of a replica on one host: revisions side by side, switched by one symbolic link.

A revision is written under another name and renamed when it is whole, so a host is always in one of two states: old or new. Nothing counts
as written before it is on the disk: a power cut leaves old or new, too.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import typing as t

from ansible_collections.rankzero.inference.plugins.module_utils import secret_check, small_files
from ansible_collections.rankzero.inference.plugins.module_utils.replica_directories import PROVEN, SECRETS, ReplicaDirectories


class Revisions(ReplicaDirectories):
    """Everything below C(<root>/etc/rankzero/<replica>). Raises OSError, with the path in it, where the file system refuses."""

    def path(self, fingerprint: str) -> str:
        return "%s/revisions/%s" % (self.directory, fingerprint)

    def linked(self, name: str) -> t.Optional[str]:
        """The fingerprint that C(current) or C(previous) points at, or None."""
        try:
            return os.path.basename(os.readlink("%s/%s" % (self.directory, name)).rstrip("/")) or None
        except OSError:
            return None

    def known(self) -> t.List[str]:
        """Fingerprints of complete revisions, oldest first."""
        parent = self.directory + "/revisions"
        try:
            with os.scandir(parent) as entries:
                found = [
                    (entry.stat(follow_symlinks=False).st_mtime, entry.name)
                    for entry in entries
                    if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
                ]
        except OSError:
            return []
        return [name for _written, name in sorted(found)]

    def read(self, fingerprint: t.Optional[str], name: str) -> t.Optional[str]:
        """The text of one file of a revision, or None."""
        if fingerprint is None:
            return None
        try:
            with open("%s/%s" % (self.path(fingerprint), name), encoding="utf-8", newline="") as stream:
                return stream.read()
        except (OSError, UnicodeDecodeError):
            return None

    def same(self, fingerprint: str, files: t.Mapping[str, str], secrets: t.Mapping[str, str]) -> bool:
        """True where the revision holds exactly these files and secrets, with the modes that they were given."""
        directory = self.path(fingerprint)
        beside = [SECRETS] if secrets else []
        if self.is_proven(fingerprint):
            beside.append(PROVEN)
        if not _holds(directory, 0o750, [*files, *beside]) or secret_check.problems("%s/%s" % (directory, SECRETS)):
            return False
        wanted = [(name, text, _mode(name)) for name, text in files.items()] + [("%s/%s" % (SECRETS, name), text, 0o600) for name, text in secrets.items()]
        return all(_is_file("%s/%s" % (directory, name), mode) and self.read(fingerprint, name) == text for name, text, mode in wanted)

    def write(self, fingerprint: str, files: t.Mapping[str, str], secrets: t.Mapping[str, str], owner: "Owner") -> None:
        """Write a whole revision beside the others and put it into place by rename."""
        parent = self.directory + "/revisions"
        _parents(parent)
        unfinished = "%s/.new-%s" % (parent, fingerprint)
        _remove(unfinished)
        try:
            _directory(unfinished, 0o750, owner.of_config())
            for name, text in files.items():
                write_file("%s/%s" % (unfinished, name), text, _mode(name), owner.of_config())
            if secrets:
                _directory("%s/%s" % (unfinished, SECRETS), 0o700, owner.of_secrets())
                for name, text in {**secrets, secret_check.NAME: secret_check.content(secrets)}.items():
                    write_file("%s/%s/%s" % (unfinished, SECRETS, name), text, 0o600, owner.of_secrets())
            proof = self.read(fingerprint, PROVEN)  # a damaged revision that is written again was proven with just these files
            if proof is not None:
                write_file("%s/%s" % (unfinished, PROVEN), proof, 0o640, owner.of_config())
            sync_directory(unfinished)
            _exchange(unfinished, self.path(fingerprint), "%s/.old-%s" % (parent, fingerprint))
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        sync_directory(parent)

    def replace_secret(self, fingerprint: str, name: str, text: str) -> None:
        """Another value for one secret of a revision, which keeps its owner and mode."""
        directory = "%s/%s" % (self.path(fingerprint), SECRETS)
        status = os.stat("%s/%s" % (directory, name))
        held = {one: self.read(fingerprint, "%s/%s" % (SECRETS, one)) for one in os.listdir(directory) if one != secret_check.NAME}
        after = {**{one: content for one, content in held.items() if content is not None}, name: text}
        for one, content in ((name, text), (secret_check.NAME, secret_check.content(after))):
            replace_file("%s/%s" % (directory, one), content, 0o600, Owner(status.st_uid, status.st_gid, False))

    def is_proven(self, fingerprint: t.Optional[str]) -> bool:
        return fingerprint is not None and os.path.isfile("%s/%s" % (self.path(fingerprint), PROVEN))

    def mark_proven(self, fingerprint: str, at: float) -> None:
        """Remember, for as long as the revision is kept, that the gate has passed with it on this host."""
        if not self.is_proven(fingerprint):
            replace_file("%s/%s" % (self.path(fingerprint), PROVEN), json.dumps({"at": round(at, 3)}) + "\n", 0o640)

    def activate(self, fingerprint: str) -> None:
        """Point C(current) at a revision and C(previous) at the one before.

        One that was never proven is no way back: C(previous) then stays where it is, however many deploys in a row are interrupted.
        """
        before, way_back = self.linked("current"), self.linked("previous")
        if before == fingerprint:
            return
        if before is not None and (self.is_proven(before) or way_back in (None, fingerprint) or not self.is_proven(way_back)):
            _link("%s/previous" % self.directory, "revisions/" + before)
        _link("%s/current" % self.directory, "revisions/" + fingerprint)

    def forget(self, fingerprint: t.Optional[str]) -> None:
        """Remove one revision and any link to it. C(previous) then points at the newest other one, so that there still is a way back."""
        if fingerprint is None:
            return
        for name in ("current", "previous"):
            if self.linked(name) == fingerprint:
                os.unlink("%s/%s" % (self.directory, name))
        _remove(self.path(fingerprint))
        others = [name for name in self._worth() if name != self.linked("current")]
        if others and self.linked("current") and self.linked("previous") is None:
            _link("%s/previous" % self.directory, "revisions/" + others[-1])

    def _worth(self) -> t.List[str]:
        """Known revisions, those that were never proven first, and the oldest first among each kind."""
        known = self.known()
        return [name for name in known if not self.is_proven(name)] + [name for name in known if self.is_proven(name)]

    def prune(self, keep: int) -> None:
        """Keep C(keep) revisions, proven ones before others and new ones before old ones, and in any case those that a link points at.

        What an interrupted run left half written goes too.
        """
        linked = {self.linked("current"), self.linked("previous")}
        known, parent = self._worth(), self.directory + "/revisions"
        half_written = [name for name in os.listdir(parent) if name.startswith((".new-", ".old-"))] if os.path.isdir(parent) else []
        for name in known[: max(0, len(known) - keep)] + half_written:
            if name not in linked:
                _remove("%s/%s" % (parent, name))

    def prepare_config_root(self) -> None:
        _parents(self.config_root)

    def prepare_directories(self, owner: "Owner") -> None:
        """Working, state and log directories, owned by the service's user."""
        for path in (self.work_dir, self.state_dir, self.log_dir):
            _parents(os.path.dirname(path))
            _directory(path, 0o755 if path == self.state_dir else 0o750, owner)

    def remove_all(self) -> t.List[str]:
        """Remove every file of the replica on this host, and directories of ours that are empty then. Returns what was removed."""
        removed = []
        for path in self.present():
            _remove(path)
            removed.append(path)
        for path in (self.directory, self.state_dir, self.work_dir, self.log_dir):
            parent = os.path.dirname(path)
            if os.path.basename(parent) == "rankzero" and os.path.isdir(parent) and not os.listdir(parent):
                os.rmdir(parent)
        return removed

    def state(self) -> t.Dict[str, t.Any]:
        """state.json, or {} where it is not there or not readable."""
        return small_files.read_json(self.state_dir + "/state.json")[0] or {}

    def clear_ready(self) -> None:
        _try_to_remove(self.state_dir + "/ready.json")

    def forget_run(self) -> None:
        """Remove what the last run wrote about itself."""
        for name in ("state.json", "ready.json"):
            _try_to_remove("%s/%s" % (self.state_dir, name))


def _try_to_remove(path: str) -> None:
    """The directory is the service's, which may have put anything there. What cannot be removed is left."""
    try:
        _remove(path)
    except OSError:
        pass


class Owner:
    """Who owns the files. C(private): the service runs as the user that writes the files, so secrets are that user's own."""

    def __init__(self, uid: int, gid: int, private: bool) -> None:
        self.uid = uid
        self.gid = gid
        self.private = private

    def of_config(self) -> "Owner":
        """Configuration belongs to root and is readable by the service's group: a service cannot change what it is started with."""
        return self if self.private else Owner(0, self.gid, False)

    def of_secrets(self) -> "Owner":
        """Secrets are root's alone; systemd hands them over (LoadCredential=)."""
        return self if self.private else Owner(0, 0, False)


def _mode(name: str) -> int:
    return 0o750 if name.endswith(".py") else 0o640


def _holds(path: str, mode: int, names: t.List[str]) -> bool:
    """True for a directory of this mode with exactly these entries."""
    try:
        status = os.lstat(path)
        return stat.S_ISDIR(status.st_mode) and stat.S_IMODE(status.st_mode) == mode and sorted(os.listdir(path)) == sorted(names)
    except OSError:
        return False


def _is_file(path: str, mode: int) -> bool:
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and stat.S_IMODE(status.st_mode) == mode


def _parents(path: str) -> None:
    """Make a directory that everybody may pass through, and those above it, whatever the umask is. What is there already stays as it is."""
    if not path or os.path.isdir(path):
        return
    _parents(os.path.dirname(path))
    os.mkdir(path, 0o755)
    os.chmod(path, 0o755)


def _directory(path: str, mode: int, owner: Owner) -> None:
    if not os.path.isdir(path):
        os.mkdir(path, 0o700)
    _chown(path, owner)
    os.chmod(path, mode)


def _chown(path: str, owner: Owner) -> None:
    if os.geteuid() == 0:
        os.chown(path, owner.uid, owner.gid)


def write_file(path: str, text: str, mode: int, owner: t.Optional[Owner] = None) -> None:
    """Write a file that is not there yet, and get it onto the disk. It never has a wider mode than it is to have. An OSError names the path."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as stream:
            stream.write(text)
            stream.flush()
            if owner is not None:
                _chown(path, owner)
            os.fchmod(stream.fileno(), mode)
            os.fsync(stream.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), path) from error


def replace_file(path: str, text: str, mode: int, owner: t.Optional[Owner] = None) -> None:
    """Write a file by rename: whoever reads it sees the old text or the new one."""
    unfinished = path + ".new"
    _remove(unfinished)
    try:
        write_file(unfinished, text, mode, owner)
        os.rename(unfinished, path)
    except BaseException:
        _remove(unfinished)
        raise
    sync_directory(os.path.dirname(path))


def sync_directory(path: str) -> None:
    """Get a rename onto the disk. Some file systems cannot; then it is as durable as they make it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _remove(path: str) -> None:
    """Remove whatever has this name; nothing there is fine."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def _exchange(unfinished: str, target: str, aside: str) -> None:
    """Put a directory into place. One that is there (damaged, since it is written again) steps aside, and comes back if the new one cannot go in."""
    _remove(aside)
    replaces = os.path.lexists(target)
    if replaces:
        os.rename(target, aside)
    try:
        os.rename(unfinished, target)
    except BaseException:
        if replaces:
            os.rename(aside, target)
        raise
    _remove(aside)


def _link(path: str, target: str) -> None:
    """Replace a symbolic link by rename, so that it never points nowhere."""
    unfinished = path + ".new"
    _remove(unfinished)
    os.symlink(target, unfinished)
    try:
        os.rename(unfinished, path)
    except BaseException:
        os.unlink(unfinished)
        raise
    sync_directory(os.path.dirname(path))
