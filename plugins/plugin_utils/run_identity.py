# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who this run of Ansible is, for the locks on hosts. With collection_files the one place in plugin_utils that touches the machine: the controller's.

All forks of one run share C.DEFAULT_LOCAL_TMP, which goes with the run; the random id in it is the owner of the run's locks.
"""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import socket
import typing as t

from ansible import constants as C

from ansible_collections.rankzero.inference.plugins.plugin_utils import controller_files

Lock = t.Mapping[str, t.Any]


def this_run(variables: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """C({owner, who, controller}): whichever fork of the run asks first makes it.

    C(variables): those of the task; AWX tells there who started the job (awx_user_name, awx_job_id). C(controller) is None where there is no /proc.
    """
    path = os.path.join(C.DEFAULT_LOCAL_TMP, "rankzero-run")
    parent = os.getppid()  # forks are children of ansible-playbook itself

    def made() -> str:
        return json.dumps({"owner": os.urandom(8).hex(), "who": who(variables), "controller": _process(parent)})

    return dict(json.loads(controller_files.shared_text(path, made)))


def who(variables: t.Mapping[str, t.Any]) -> str:
    for prefix in ("awx", "tower"):
        if variables.get(prefix + "_job_id"):
            return "%s by job %s" % (variables.get(prefix + "_user_name") or "AWX", variables[prefix + "_job_id"])
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user need not have a name
        user = "uid %d" % os.getuid()
    return "%s@%s" % (user, socket.gethostname())


def sliced_job(variables: t.Mapping[str, t.Any]) -> str | None:
    """The job template of AWX of which this run is one slice. AWX runs slices as a workflow that has the template's own name, and says nothing else."""
    for prefix in ("awx", "tower"):
        name = variables.get(prefix + "_workflow_job_name")
        if name and name == variables.get(prefix + "_job_template_name"):
            return str(name)
    return None


def has_ended(lock: Lock) -> bool:
    """True where the run that holds a lock ran on this very controller and its process is gone. Of another controller's runs nothing is known."""
    seen = lock.get("controller")
    if not isinstance(seen, t.Mapping) or not isinstance(seen.get("pid"), int):
        return False
    here = _process(os.getpid())
    if here is None or any(seen.get(key) != here[key] for key in ("boot_id", "pid_namespace")):
        return False
    return _process(int(seen["pid"])) != dict(seen)


def ended_owners(locks: t.Iterable[t.Any]) -> list[str]:
    return sorted({str(lock["owner"]) for lock in locks if isinstance(lock, t.Mapping) and lock.get("owner") and has_ended(lock)})


def owners_that_do_not_count(facts: t.Mapping[str, t.Any], variables: t.Mapping[str, t.Any]) -> list[str]:
    """Owners of locks in the facts of hosts that hold nobody up: this run itself, and runs that are known to have ended."""
    locks = [lock for found in facts.values() if isinstance(found, t.Mapping) and isinstance(found.get("locks"), t.Mapping) for lock in found["locks"].values()]
    return [*ended_owners(locks), str(this_run(variables)["owner"])]


def _process(pid: int) -> dict[str, t.Any] | None:
    """A process that is told apart from every other one on any machine. None where it is gone, or where there is no /proc."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
            boot_id = stream.read().strip()
        with open("/proc/%d/stat" % pid, encoding="utf-8", errors="replace") as stream:
            words = stream.read().rpartition(")")[2].split()
        if words[0] in ("Z", "X"):
            return None
        return {"boot_id": boot_id, "pid_namespace": os.readlink("/proc/self/ns/pid"), "pid": pid, "started": int(words[19])}
    except (OSError, ValueError, IndexError):
        return None


def note_call(host: str, replica: str) -> None:
    """Remember that this run has changed, or tried to change, a replica on a host, and so may have a lock there."""
    with open(_note(host, replica), "w", encoding="ascii"):
        pass


def has_called(host: str, replica: str) -> bool:
    return os.path.exists(_note(host, replica))


def _note(host: str, replica: str) -> str:
    return os.path.join(
        C.DEFAULT_LOCAL_TMP, "rankzero-called-" + hashlib.sha256(("%s %s" % (host, replica)).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    )
