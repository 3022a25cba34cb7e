# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the shard module does on a host: bring a revision to life, take one back, or remove everything that is ours."""

from __future__ import annotations

import functools
import json
import os
import pwd
import signal
import time
import typing as t

from ansible_collections.rankzero.inference.plugins.module_utils import mounts, service_managers, shard_log, shard_places, teardown, traces
from ansible_collections.rankzero.inference.plugins.module_utils.replica_directories import SECRETS
from ansible_collections.rankzero.inference.plugins.module_utils.revisions import Owner, Revisions, replace_file
from ansible_collections.rankzero.inference.plugins.module_utils.service_managers import Manager, RunCommand, ServiceError, Supervisor, Systemd

KEEP_REVISIONS = 3
TIE_KEY = "tie_key"
# Shown in a diff; the programs that belong to the collection are named there, not printed.
_SHOWN_SUFFIXES = (".service", ".conf", ".json", ".env")


class DeploymentError(Exception):
    """Something that an operator has to know about and the module could not do."""


class Deployment:
    """One replica's shard on this host.

    C(check): nothing is written. C(actions) lists what was done (or would be), as commands or sentences; C(diffs) what changed in text files.
    """

    def __init__(self, params: t.Mapping[str, t.Any], run_command: RunCommand, check: bool) -> None:
        self.params = params
        self.check = check
        self.replica = params["replica"]
        self.revisions = Revisions(params["replica_root"], self.replica)
        self.run_command = run_command
        self.actions: t.List[str] = []
        self.diffs: t.List[t.Dict[str, str]] = []
        self.verified: t.Dict[str, t.Optional[bool]] = {}  # after a removal: gpu_memory, ports, processes, files; None: cannot be asked
        self.notes: t.List[str] = []
        self.last_log: t.List[str] = []

    # ---- the service

    def _managers(self) -> t.List[Manager]:
        """Both, for finding out what is there."""
        return [
            Systemd(self.replica, self.run_command),
            Supervisor(self.revisions.directory, self.revisions.state_dir, self.params.get("supervisord"), self.run_command),
        ]

    def _manager(self, name: str) -> Manager:
        return next(manager for manager in self._managers() if manager.name == name)

    def _installed(self) -> t.Optional[Manager]:
        """The manager that has a unit of this replica. A systemd unit counts only where it belongs to this replica_root."""
        for manager in self._managers():
            text = manager.read()
            if text is not None and (manager.name != "systemd" or self.revisions.directory + "/" in text):
                return manager
        return None

    def _unmanaged(self, manager: Manager) -> t.List[int]:
        """Processes of the shard that no supervisord looks after any more, because it was killed. systemd has its control group for that."""
        return self._marked() if manager.name == "supervisor" and not manager.active() else []

    def _stop(self, manager: Manager) -> None:
        """Stop the service, and what it was that nobody manages."""
        manager.stop(120)
        left = self._unmanaged(manager)
        if left:
            self._act("end %d processes of the shard that run without its supervisord" % len(left), self._end_marked)

    def _restart(self, manager: Manager) -> None:
        if self._unmanaged(manager):
            self._stop(manager)
        manager.restart()

    def _act(self, what: str, do: t.Callable[[], t.Any]) -> None:
        self.actions.append(what)
        if not self.check:
            do()

    # ---- present

    def present(self) -> None:
        """Write the revision, switch to it, and start it unless exactly it already runs."""
        fingerprint, files = self.params["fingerprint"], self.params["files"]
        secrets = {name: text for name, text in (self.params.get("secrets") or {}).items() if text is not None}
        manager = self._manager(self.params["manager"])
        self._diff(fingerprint, files, secrets, manager)
        self._ensure_user()
        written = not self.revisions.same(fingerprint, files, secrets)
        if written:
            self._act("write revision %s" % fingerprint, lambda: self.revisions.write(fingerprint, files, secrets, self._owner()))
        if not self.check:
            self.revisions.prepare_directories(self._owner())
        self._switch(fingerprint, manager, written)
        if not self.check:
            self.revisions.prune(KEEP_REVISIONS)

    def _switch(self, fingerprint: str, manager: Manager, written: bool) -> None:
        """Make a revision that is on disk the one that runs."""
        unit = self.params["files"].get(self.params["unit_name"]) if self.params.get("files") else self.revisions.read(fingerprint, self._unit_name(manager))
        if unit is None:
            raise DeploymentError("revision %s has no file for %s" % (fingerprint, manager.name))
        other = self._installed()
        if other is not None and other.name != manager.name:
            self._act("stop and remove the service of %s" % other.name, lambda: self._retire(other))
        installed = manager.read() == unit
        switched = self.revisions.linked("current") != fingerprint
        running = (
            manager.active() and self.revisions.state().get("fingerprint") == fingerprint and self.revisions.state().get("stage") not in ("stopped", "failed")
        )
        if not (written or switched or not installed or not running or self.params.get("force_restart")):
            return
        if not self.check:
            self.revisions.clear_ready()
        if not running and not self.check and manager.read() is not None:
            # A run that ended badly must not count as a failure of the one that is started now.
            self._stop(manager)
            self.revisions.forget_run()
        if switched:
            self._act("switch current to revision %s" % fingerprint, lambda: self.revisions.activate(fingerprint))
        if not installed:
            self._act("install %s" % manager.path, lambda: manager.install(unit))
        elif not self.check:
            manager.install(unit)  # finishes what an interrupted run has begun
        self._act("restart the service (%s)" % manager.name, lambda: self._restart(manager))

    def _unit_name(self, manager: Manager) -> str:
        return "inference-%s.service" % self.replica if manager.name == "systemd" else "supervisord.conf"

    def _retire(self, manager: Manager) -> None:
        self._stop(manager)
        manager.remove()

    # ---- restored

    def restored(self) -> None:
        """Go back to a revision that is kept; with none, leave nothing. A key of the tie that is handed in replaces the revision's own."""
        fingerprint, failed = self.params.get("fingerprint"), self.params.get("failed_fingerprint")
        if not fingerprint:
            self.keep_log()
            self.absent()
            return
        if fingerprint not in self.revisions.known():
            raise DeploymentError("revision %s is no longer on this host; known: %s" % (fingerprint, ", ".join(self.revisions.known()) or "none"))
        name = "systemd" if self.revisions.read(fingerprint, "inference-%s.service" % self.replica) is not None else "supervisor"
        rekeyed = self._rekey(fingerprint)
        if rekeyed or self.revisions.linked("current") != fingerprint or self._has_ended() or not self._manager(name).active():
            self._switch(fingerprint, self._manager(name), rekeyed)
        if failed and failed != fingerprint and failed in self.revisions.known() and not self.revisions.is_proven(failed):
            self._act("remove revision %s" % failed, lambda: self.revisions.forget(failed))

    def _rekey(self, fingerprint: str) -> bool:
        key = (self.params.get("secrets") or {}).get(TIE_KEY)
        if key is None or self.revisions.read(fingerprint, "%s/%s" % (SECRETS, TIE_KEY)) in (None, key):
            return False
        self._act("give revision %s the ranks' new key" % fingerprint, lambda: self.revisions.replace_secret(fingerprint, TIE_KEY, key))
        return True

    # ---- absent

    def absent(self) -> None:
        """Stop the service, end what carries our marker, remove every file and user that we made, and see that all of it is gone.

        Model files are never touched. Each part is looked for by itself, so that half a replica (an interrupted removal, a directory that was
        deleted by hand) goes as a whole one does. Raises DeploymentError for what is not gone within the time for it, and names it.
        """
        if not traces.is_name(self.replica):
            raise DeploymentError("%r is no name of a replica, so nothing was removed" % self.replica)
        mounted = mounts.below(self.revisions.present())
        if mounted:
            raise DeploymentError(
                "%s is a mount point below the replica's directories, so nothing was stopped or removed: unmount it first" % ", ".join(mounted)
            )
        before = teardown.look(self.revisions)
        self._end_service()
        left = self._marked()
        if left:
            self._act("end %d processes that carry the replica's marker" % len(left), self._end_marked)
        made = self.revisions.present()
        if made:
            self._act("remove %s" % ", ".join(made), self.revisions.remove_all)
        self._remove_user()
        self._remove_empty_root()
        if not self.check:
            self._verify_gone(before)

    def _end_service(self) -> None:
        manager = self._installed()
        if manager is not None:
            self._act("stop the service (%s)" % manager.name, lambda: manager.stop(120))
            self._act("remove %s" % manager.path, manager.remove)
            return
        unit = "inference-%s.service" % self.replica
        if any(("/%s" % unit) in _read(pid, "cgroup").decode("utf-8", "replace") for pid in self._marked()):
            # Its file is gone, but systemd still has it and would start it again.
            self._act("stop the service (systemd)", lambda: self._run(["systemctl", "stop", unit]))
        link = traces.unit_of(self.revisions, service_managers.UNIT_DIR)
        if link is not None and os.path.islink(link):
            self._act("remove %s" % link, lambda: self._remove_link(str(link)))

    def _remove_link(self, path: str) -> None:
        os.unlink(path)
        self._run(["systemctl", "daemon-reload"])

    def _verify_gone(self, before: teardown.Before) -> None:
        findings = teardown.wait(
            self.revisions,
            before,
            lambda: traces.unit_of(self.revisions, service_managers.UNIT_DIR),
            float(self.params.get("verify_seconds") or teardown.GONE_SECONDS),
        )
        self.verified = {name: findings[name].gone for name in ("gpu_memory", "ports", "processes", "files")}
        self.notes += ["%s: %s" % (name, found.text) for name, found in sorted(findings.items()) if found.gone is not False and found.text]
        left = [found.text for _name, found in sorted(findings.items()) if found.gone is False]
        if left:
            raise DeploymentError("replica %s was removed, but is not gone from this host: %s" % (self.replica, "; ".join(left)))

    def _marked(self) -> t.List[int]:
        """The replica's own processes, of this replica_root. Only those may ever be ended."""
        return traces.pids(self.revisions)

    def _end_marked(self) -> None:
        for signal_number, seconds in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
            for pid in self._marked():
                try:
                    os.kill(pid, signal_number)
                except (ProcessLookupError, PermissionError):
                    pass  # gone, or another user's: what is left is told below
            deadline = time.monotonic() + seconds
            while self._marked() and time.monotonic() < deadline:
                time.sleep(0.1)
        left = self._marked()
        if left:
            raise DeploymentError(
                "processes %s are of replica %s and could not be ended by %s: end them as that user or as root, then run this again"
                % (", ".join("%d (of %s)" % (pid, _user_of(pid)) for pid in left), self.replica, _name_of(os.geteuid()))
            )

    def keep_log(self) -> None:
        """Read the last lines of the log, masked, before they are removed with everything else."""
        self.last_log = shard_log.read(shard_places.places(self.replica, self.params["replica_root"]), self.run_command, shard_log.KEPT_LINES)

    # ---- stopped, restarted

    def stopped(self) -> None:
        manager = self._installed()
        if manager is None:
            return
        if manager.active() or self._unmanaged(manager):
            self._act("stop the service (%s)" % manager.name, lambda: self._stop(manager))
        if self.params.get("enabled") is False and manager.starts_at_boot():
            self._act("keep the service from starting at boot (%s)" % manager.name, manager.disable)

    def restarted(self) -> None:
        manager = self._installed()
        if manager is None:
            raise DeploymentError("replica %s has no service on this host: deploy it first" % self.replica)
        if not self.check:
            self.revisions.forget_run() if self._has_ended() else self.revisions.clear_ready()
            manager.install(manager.read() or "")  # a service that was drained does not start at boot
        self._act("restart the service (%s)" % manager.name, lambda: self._restart(manager))

    def _has_ended(self) -> bool:
        """How the last run ended says nothing about the one that is started now."""
        return self.revisions.state().get("stage") in ("stopped", "failed")

    # ---- users

    def _users_file(self) -> str:
        return traces.users_file(self.revisions.config_root)

    def _made_users(self) -> t.List[str]:
        return traces.made_users(self.revisions.config_root)

    def _ensure_user(self) -> None:
        """The service's own system user, made when it is missing, and remembered so that removal takes only what we made."""
        name = self.params["user"]
        if _user(name) is not None or os.geteuid() != 0:
            return
        command = ["useradd", "--system", "--user-group", "--no-create-home", "--home-dir", self.revisions.work_dir, "--shell", "/usr/sbin/nologin", name]
        self._act(" ".join(command), lambda: self._make_user(name, command))

    def _make_user(self, name: str, command: t.List[str]) -> None:
        """Remembered after it is made: an interruption between leaves a user too many, never one to remove that somebody else made."""
        self._run(command)
        self.revisions.prepare_config_root()
        replace_file(self._users_file(), json.dumps(sorted(set(self._made_users()) | {name})), 0o644)

    def _run(self, command: t.List[str]) -> None:
        rc, out, err = self.run_command(command, expand_user_and_vars=False)
        if rc != 0:
            raise DeploymentError("%s ended with %d: %s" % (" ".join(command), rc, (err or out).strip()))

    def _remove_user(self) -> None:
        """Users that we made go with the last replica."""
        made = self._made_users()
        if not made or (not self.check and self._other_replicas()) or (self.check and len(self._other_replicas()) > 1):
            return
        for name in made:
            if _user(name) is not None:
                self._act("userdel %s" % name, functools.partial(self._run, ["userdel", name]))
        self._act("remove %s" % self._users_file(), lambda: os.unlink(self._users_file()))

    def _other_replicas(self) -> t.List[str]:
        try:
            names = os.listdir(self.revisions.config_root)
        except OSError:
            return []
        return [name for name in names if os.path.isdir("%s/%s/revisions" % (self.revisions.config_root, name))]

    def _remove_empty_root(self) -> None:
        if not self.check and os.path.isdir(self.revisions.config_root) and not os.path.ismount(self.revisions.config_root):
            if not os.listdir(self.revisions.config_root):
                os.rmdir(self.revisions.config_root)

    def _owner(self) -> Owner:
        entry = _user(self.params["user"])
        if entry is None or os.geteuid() != 0:
            return Owner(os.geteuid(), os.getegid(), True)
        return Owner(entry.pw_uid, entry.pw_gid, entry.pw_uid == os.geteuid())

    # ---- diff

    def _diff(self, fingerprint: str, files: t.Mapping[str, str], secrets: t.Mapping[str, str], manager: Manager) -> None:
        """Before and after of everything that an operator reads. Secrets show only that they changed."""
        current = self.revisions.linked("current")
        for name, text in sorted(files.items()):
            before = self.revisions.read(current, name) or ""
            if before == text:
                continue
            if name == "launch.json" and not before:
                self._diff_entry(name, "", _commands(text))
            elif name.endswith(_SHOWN_SUFFIXES):
                self._diff_entry(name, before, text)
            else:
                self._diff_entry(name, "(program)\n" if before else "", "(program, changed)\n" if before else "(program, new)\n")
        for name, text in sorted(secrets.items()):
            secret = self.revisions.read(current, "%s/%s" % (SECRETS, name))
            if secret != text:
                self._diff_entry("%s/%s" % (SECRETS, name), "(secret)\n" if secret else "", "(secret, changed)\n" if secret else "(secret, new)\n")

    def _diff_entry(self, name: str, before: str, after: str) -> None:
        path = "%s/current/%s" % (self.revisions.directory, name)
        self.diffs.append({"before_header": path, "after_header": path, "before": before, "after": after})


def _commands(launch: str) -> str:
    """Of a launch document that is new, what an operator reads: each command, a word a line. What run_shard.py needs besides would bury it."""
    lines: t.List[str] = []
    for one in json.loads(launch).get("launches") or ():
        lines += ["%s: %s" % (one["name"], one["path"]), *("    %s" % json.dumps(word) for word in one["args"])]
    return "\n".join(lines) + "\n" if lines else launch


def _read(pid: int, name: str) -> bytes:
    """A file of /proc/PID, empty where it is gone or not ours to read."""
    try:
        with open("/proc/%d/%s" % (pid, name), "rb") as stream:
            return stream.read()
    except OSError:
        return b""


def _user_of(pid: int) -> str:
    try:
        return _name_of(os.stat("/proc/%d" % pid).st_uid)
    except OSError:
        return "nobody any more"


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return "uid %d" % uid


def _user(name: str) -> t.Optional[pwd.struct_passwd]:
    try:
        return pwd.getpwnam(name)
    except KeyError:
        return None


__all__ = ["Deployment", "DeploymentError", "ServiceError"]
