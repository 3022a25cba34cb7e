# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One run of Ansible at a time changes a replica on a host: the lock C(<root>/run/rankzero/<replica>.lock), which dies with its owner.

While a call works on the host, the kernel holds the lock for it (flock), and gives it up when the call's process ends, however it does. Between the
calls of one run the file's content holds it: it names the run, and lasts LEASE_SECONDS after the run was last heard of, by a clock that nobody sets.

The content is one JSON mapping, padded to CONTENT_BYTES and written by one call, so that whoever reads it sees the old or the new text:

    {schema: 1, owner, who, controller, target: fingerprint|null, since: epoch seconds, boot_id, expires: seconds since boot, done: bool}

C(owner) is a random id of the run, C(who) is for people, C(controller) lets the same controller see that a run of its own has ended
(plugin_utils/run_identity.py), C(target) is the revision that the run wants. With C(done) the run has proven its shard here and holds nobody up any
more; until another run takes the lock, it may still come back, to undo what it did when another rank fails.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
import typing as t

from ansible_collections.rankzero.inference.plugins.module_utils import small_files

LEASE_SECONDS = 90.0
BUSY_SECONDS = 150.0
"""How long a call waits for an earlier one of the same run, or of one that has ended, that is still at work on the host: a service may take 120 s to stop."""
GLANCE_SECONDS = 1.0
"""Readers of facts hold the file for an instant; that is no other run."""
RACE_SECONDS = 60.0
"""Two runs of which neither saw the other when it planned begin within so many seconds; a run that was there before is never waited for."""
CONTENT_BYTES = 2048
SUFFIX = ".lock"
Content = t.Dict[str, t.Any]


class Held(Exception):
    """Another run has the lock. C(lock) is what it says of itself, as node facts show it."""

    def __init__(self, replica: str, lock: Content) -> None:
        self.lock = lock
        until = "until %s, unless it is heard of again" % lock["until"] if lock["until"] else "as long as its call on this host works"
        super().__init__(
            "replica %s is being changed by %s since %s; its lock lasts %s. Nothing was changed on this host. "
            "Wait for that run; the lock of a run that has died ends by itself."
            % (replica, lock["who"] or "somebody unknown", lock["since"] or "an unknown time", until)
        )


class Lease:
    """The lock of one replica for one run.

    C(terms): C({owner, who, controller, target, ended: [owners whose runs have ended], only_own: bool}). Without an owner nothing is locked.
    """

    def __init__(self, root: str, replica: str, terms: t.Optional[t.Mapping[str, t.Any]]) -> None:
        self._replica = replica
        self._terms = terms or {}
        self._path = "%s/run/rankzero/%s%s" % (root.rstrip("/"), replica, SUFFIX)
        self._descriptor: t.Optional[int] = None

    def take(self) -> bool:
        """Hold the lock until this process ends; the lease outlives it. False where C(only_own) is asked and this run has no lease. Raises Held."""
        if not self._terms.get("owner"):
            return True
        started = time.monotonic()
        while self._descriptor is None:
            descriptor = self._open()
            if descriptor is None:
                return False
            try:
                if self._terms.get("only_own") and _read(descriptor).get("owner") != self._terms["owner"]:
                    return False
                if self._try(descriptor, time.monotonic() - started):
                    self._write(descriptor)
                    self._descriptor, descriptor = descriptor, None
            finally:
                if descriptor is not None:
                    os.close(descriptor)
            if self._descriptor is None:
                time.sleep(0.05)
        return True

    def _open(self) -> t.Optional[int]:
        """The file, made where it is missing; None where it is missing and only a lease that is there would do."""
        if self._terms.get("only_own"):
            try:
                return os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
        deadline = time.monotonic() + 10 * GLANCE_SECONDS
        while True:
            try:
                _directories(os.path.dirname(self._path))
                return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                # Another run has just removed a directory, as the last one to leave: at any of these steps, and more than once.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.001)

    def _try(self, descriptor: int, waited: float) -> bool:
        """Whether the lock is ours now. False: try again. Raises Held."""
        busy = not _flock(descriptor, fcntl.LOCK_EX)
        found = _read(descriptor)
        foreign = found.get("owner") not in (self._terms["owner"], *(self._terms.get("ended") or ()))
        first = bool(foreign and found) and self._goes_first(found)
        if busy:
            if waited > (BUSY_SECONDS if not (foreign and found) else RACE_SECONDS if first else GLANCE_SECONDS):
                raise Held(self._replica, _shown(found, busy=True))
            return False
        if not _same_file(descriptor, self._path):
            return False  # given up and removed meanwhile
        if found and foreign and _left(found) > 0:
            if not first or waited > RACE_SECONDS:
                raise Held(self._replica, _shown(found, busy=False))
            return False
        return True

    def _goes_first(self, found: Content) -> bool:
        """Of two runs that began together and each got a host first, one waits until the other, refused elsewhere, has undone what it did.

        Both compare the same two owners, whatever host they meet on, so exactly one of them waits (wait-die).
        """
        since = found.get("since")
        young = isinstance(since, (int, float)) and 0 <= time.time() - since < RACE_SECONDS
        return young and not self._terms.get("only_own") and str(self._terms["owner"]) < str(found.get("owner"))

    def _write(self, descriptor: int, done: bool = False) -> None:
        terms = self._terms
        found = _read(descriptor)
        mine: Content = found if found.get("owner") == terms["owner"] else {}
        told = {name: terms.get(name) or mine.get(name) for name in ("who", "controller", "target")}
        _store(
            descriptor,
            {
                "schema": 1,
                "owner": terms["owner"],
                **told,
                "since": mine.get("since") or time.time(),
                "boot_id": _boot_id(),
                "expires": _clock() + (0 if done else LEASE_SECONDS),
                "done": done,
            },
        )

    def keep(self) -> None:
        """The lease lasts from now on: a call may have taken longer than a lease does."""
        if self._descriptor is not None:
            self._write(self._descriptor)

    def renew(self) -> None:
        """Prolong the lease of this run, if it has one, without waiting for anything."""
        self._rewrite()

    def _rewrite(self, done: bool = False) -> None:
        if not self._terms.get("owner"):
            return
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return  # no lease: this run has changed nothing here
        try:
            if _flock(descriptor, fcntl.LOCK_EX) and _read(descriptor).get("owner") == self._terms["owner"]:
                self._write(descriptor, done)
        finally:
            os.close(descriptor)

    def finish(self) -> None:
        """Hold nobody up any more, if this run has a lease: what it wanted here is done and proven. The next call of the run takes it up again."""
        self._rewrite(done=True)

    def release(self) -> None:
        """Give the lock up, and remove what it was made of. Call C(take) first."""
        if self._descriptor is None:
            return
        os.unlink(self._path)
        try:
            os.rmdir(os.path.dirname(self._path))
        except OSError as error:
            # Another run may use the directory already, or may have removed it just before.
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY, errno.EPERM, errno.EACCES):
                raise
        os.close(self._descriptor)
        self._descriptor = None


def read(root: str) -> t.Dict[str, Content]:
    """C({replica: {owner, who, since, until, live, busy, target, controller}}) for every lock on a host, for node facts.

    C(live): a run holds it now. One that is not live was left by a run that ended before its time; those of runs that have done their work are left out.
    """
    folder = "%s/run/rankzero" % root.rstrip("/")
    found = {}
    for name in small_files.names(folder):
        if name.endswith(SUFFIX) and not name.startswith("."):
            lock = _look(os.path.join(folder, name))
            if lock is not None:
                found[name[: -len(SUFFIX)]] = lock
    return found


def _look(path: str) -> t.Optional[Content]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError:
        return {**_shown({}, busy=False), "live": None}  # not ours to read: unknown
    try:
        busy = not _flock(descriptor, fcntl.LOCK_SH)
        content = _read(descriptor)
        return None if content.get("done") is True and not busy else _shown(content, busy)
    finally:
        os.close(descriptor)


def _shown(content: Content, busy: bool) -> Content:
    left = _left(content)
    since, controller = content.get("since"), content.get("controller")
    return {
        "owner": _text(content.get("owner")),
        "who": _text(content.get("who")),
        "since": _time(since) if isinstance(since, (int, float)) else None,
        "until": _time(time.time() + left) if left > 0 else None,
        "live": busy or left > 0,
        "busy": busy,
        "target": _text(content.get("target")),
        "controller": controller if isinstance(controller, dict) else None,
    }


def _left(content: Content) -> float:
    """Seconds that a lease still lasts. One of another boot is over: whatever that run did to the host's memory is gone too."""
    expires = content.get("expires")
    if not isinstance(expires, (int, float)) or isinstance(expires, bool) or content.get("boot_id") != _boot_id():
        return 0.0
    return max(0.0, min(expires - _clock(), LEASE_SECONDS))


def _clock() -> float:
    """Seconds since boot, those in suspend too: no lease is made longer or shorter by somebody who sets the clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _boot_id() -> t.Optional[str]:
    return small_files.read_text("/proc/sys/kernel/random/boot_id")[0]


def _read(descriptor: int) -> Content:
    """The content; {} where there is none yet, or none that can be understood: then only the kernel's own lock counts."""
    try:
        value = json.loads(os.pread(descriptor, CONTENT_BYTES, 0).decode("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _store(descriptor: int, content: Content) -> None:
    text = json.dumps(content).encode("utf-8")
    os.pwrite(descriptor, text.ljust(CONTENT_BYTES), 0)


def _flock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _same_file(descriptor: int, path: str) -> bool:
    try:
        here, there = os.fstat(descriptor), os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _directories(path: str) -> None:
    """Make a directory that everybody may pass through, and those above it, whatever the umask is."""
    if not path or os.path.isdir(path):
        return
    _directories(os.path.dirname(path))
    try:
        os.mkdir(path, 0o755)
    except FileExistsError:
        return
    os.chmod(path, 0o755)


def _text(value: t.Any) -> t.Optional[str]:
    return small_files.clean(value)[:200] if isinstance(value, str) and value else None


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
