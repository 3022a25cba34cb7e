# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Action plugin: render on the controller, compare with the facts, and make at most one remote call."""

from __future__ import annotations

import hashlib
import os
import typing as t

from ansible import constants as C
from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

from ansible_collections.rankzero.inference.plugins.module_utils import traces
from ansible_collections.rankzero.inference.plugins.plugin_utils import collection_files, controller_files, convergence, hostvars, render, run_identity, secrets

STATES = ["present", "restored", "absent", "stopped", "restarted", "unlocked"]
ARGUMENTS: dict[str, t.Any] = {
    "state": {"type": "str", "choices": STATES, "default": "present"},
    "replica": {"type": "str", "required": True},
    "shard": {"type": "dict", "default": {}},
    "api_key": {"type": "str", "no_log": True},
    "fingerprint": {"type": "str"},
    "way_back": {"type": "dict"},
    "enabled": {"type": "bool", "default": True},
    "replica_root": {"type": "str", "default": "/"},
    "log_file": {"type": "str"},
}


class ActionModule(ActionBase):
    TRANSFERS_FILES = False
    _supports_check_mode = True
    _supports_diff = True

    def run(self, tmp: t.Any = None, task_vars: t.Any = None) -> dict[str, t.Any]:
        super().run(tmp, task_vars)
        _result, arguments = self.validate_argument_spec(argument_spec=ARGUMENTS)
        if not traces.is_name(str(arguments["replica"])):
            raise AnsibleActionFail(
                "replica: %r is no name of a replica: 1 to 40 lower-case letters, digits and -, beginning and ending with a letter or digit"
                % str(arguments["replica"])
            )
        facts = hostvars.facts_of(task_vars or {})
        record = ((facts or {}).get("shards") or {}).get(arguments["replica"]) if isinstance(facts, t.Mapping) else None
        self._arguments, self._facts, self._record, self._task_vars = arguments, facts or {}, record, task_vars
        self._host = str((task_vars or {}).get("inventory_hostname"))
        return getattr(self, "_" + arguments["state"])()

    # ---- states

    def _present(self) -> dict[str, t.Any]:
        shard = hostvars.plain(self._arguments["shard"])
        if not shard:
            return self._without_part()
        planned = shard.get("converge")
        if planned and not planned["reasons"]:
            return self._converged(shard, [])  # the plan of this very run has rendered and compared it
        rendered = render.render(shard, {name: collection_files.template(name) for name in collection_files.TEMPLATES}, self._programs(shard))
        own = convergence.reasons(self._record, shard, rendered)
        converge = planned or {"reasons": own, "restart": False}
        reasons = converge["reasons"]
        if not reasons or (own in ([], [convergence.UNPROVEN]) and not converge["restart"]):
            return self._converged(shard, reasons)
        result = self._call(
            target=shard["fingerprint"],
            fingerprint=shard["fingerprint"],
            files=dict(rendered.files),
            unit_name=rendered.unit_name,
            manager=shard["service_manager"],
            user=shard["user"],
            supervisord=self._supervisord(),
            secrets=self._secrets(shard),
            force_restart=converge["restart"],
        )
        result["reasons"] = reasons
        if not result.get("failed"):
            result["changed"] = True
        return result

    def _converged(self, shard: t.Mapping[str, t.Any], reasons: list[str]) -> dict[str, t.Any]:
        """Nothing to do but to prove it, where C(reasons) says that it is not proven; a lock that a dead run has left goes all the same."""
        return {**self._unlocked(), "changed": bool(reasons), "reasons": reasons, "revision": shard["fingerprint"]}

    def _without_part(self) -> dict[str, t.Any]:
        """What a host has of the replica is stopped, and kept until the others have proven that they do without it: it may be the way back."""
        reasons = ["the plan has no shard on this host"]
        if not self._record:
            return self._absent(reasons)
        if not (self._record.get("unit") or {}).get("active"):
            return {**self._nothing(), "reasons": reasons}
        return {**self._call(state="stopped", supervisord=self._supervisord()), "reasons": reasons}

    def _restored(self) -> dict[str, t.Any]:
        """To a kept revision that was asked for, or to the one that was chosen for all ranks before this run changed anything."""
        wanted = hostvars.text(self._arguments["fingerprint"])
        if wanted:
            return self._call(state="restored", target=wanted, fingerprint=wanted, supervisord=self._supervisord())
        if self._arguments["way_back"] is None:
            raise AnsibleActionFail("state=restored needs a fingerprint, or the way_back of a plan (rankzero.inference.replica_plan)")
        back = hostvars.plain(self._arguments["way_back"])
        shard, before = hostvars.plain(self._arguments["shard"]), (self._record or {}).get("revision")
        target = back["revision"] if self._host in back["hosts"] else None
        if not (self._record or self._called()):
            return self._nothing()
        if target is not None and before == target and not back["rekey"] and (not self._called() or target == shard.get("fingerprint")):
            return {**self._nothing(), "revision": target, "reasons": ["revision %s was there before this run, and stays" % target]}
        # Where this run has called it may only undo under its own lock; where it had nothing to change, it takes the lock now.
        return self._with_log(
            self._call(
                state="restored",
                only_own=self._called(),
                target=target,
                fingerprint=target,
                failed_fingerprint=shard.get("fingerprint"),
                supervisord=self._supervisord(),
                secrets={"tie_key": self._tie_key(str(self._arguments["replica"]), target)} if target and back["rekey"] else None,
            )
        )

    def _with_log(self, result: dict[str, t.Any]) -> dict[str, t.Any]:
        """The log of what was undone went with it: its last lines are kept on the controller."""
        lines, path = result.pop("last_log", None), hostvars.text(self._arguments["log_file"])
        if lines and path and not self._task.check_mode:
            result["log_file"] = controller_files.write_private(path, "\n".join(map(str, lines)) + "\n")
        return result

    def _absent(self, reasons: list[str] | None = None) -> dict[str, t.Any]:
        if self._facts and not convergence.is_left(str(self._arguments["replica"]), self._facts):
            return self._nothing()
        return {**self._call(state="absent", supervisord=self._supervisord()), "reasons": reasons or []}

    def _stopped(self) -> dict[str, t.Any]:
        if not self._record:
            return self._nothing()
        return self._call(state="stopped", supervisord=self._supervisord(), enabled=self._arguments["enabled"])

    def _restarted(self) -> dict[str, t.Any]:
        return self._call(state="restarted", supervisord=self._supervisord())

    def _unlocked(self) -> dict[str, t.Any]:
        """Give up the lock of this run, or of one that died here.

        One that cannot be given up ends by itself: no reason to let a run fail that has done its work.
        """
        called, lock = self._called(), self._lock()
        left = lock is not None and (lock.get("live") is False or run_identity.has_ended(lock))
        if not (called or left) or self._task.check_mode:
            return self._nothing()
        result = self._call(state="unlocked", only_own=called)
        if result.get("failed"):
            return {**self._nothing(), "reasons": [str(result.get("msg"))], "remote_calls": 1}
        return result

    # ---- parts

    def _called(self) -> bool:
        return run_identity.has_called(self._host, str(self._arguments["replica"]))

    def _lease(self, target: str | None, only_own: bool) -> dict[str, t.Any]:
        """Who this run is, for the lock on the host (module_utils/leases.py)."""
        return {**run_identity.this_run(self._task_vars), "target": target, "only_own": only_own, "ended": run_identity.ended_owners([self._lock()])}

    def _lock(self) -> t.Mapping[str, t.Any] | None:
        """The lock of the replica that node facts saw on the host."""
        locks = self._facts.get("locks")
        lock = locks.get(self._arguments["replica"]) if isinstance(locks, t.Mapping) else None
        return hostvars.plain(lock) if isinstance(lock, t.Mapping) else None

    @staticmethod
    def _nothing() -> dict[str, t.Any]:
        return {"changed": False, "actions": [], "reasons": [], "revision": None, "remote_calls": 0}

    @staticmethod
    def _programs(shard: t.Mapping[str, t.Any]) -> dict[str, str]:
        return {name: collection_files.program(name) for name in [collection_files.SUPERVISOR_PROGRAM, *shard["program_files"]]}

    def _supervisord(self) -> str | None:
        return hostvars.text((self._facts.get("host") or {}).get("supervisord"))

    def _secrets(self, shard: t.Mapping[str, t.Any]) -> dict[str, str]:
        tie = shard["tie"]["secret"] if shard["tie"] else None
        found: dict[str, str] = {}
        if any(name != tie for name in shard["secrets"]):
            if not self._arguments["api_key"]:
                raise AnsibleActionFail("the plan gives this rank an API key, but api_key is not set: give shard the same key as replica_plan")
            found = secrets.files(str(self._arguments["api_key"]), shard["secret_files"])
        return {**found, tie: self._tie_key(shard["labels"]["replica"], shard["fingerprint"])} if tie else found

    @staticmethod
    def _tie_key(replica: str, fingerprint: str) -> str:
        """The random key of this deploy: whichever fork comes first makes it, in the directory that all forks of this run of Ansible share and that
        goes with it. The controller keeps nothing; ranks that are not written by one run are written anew by the next (decision 9)."""
        topic = hashlib.sha256(("%s %s" % (replica, fingerprint)).encode()).hexdigest()[:16]
        path = os.path.join(C.DEFAULT_LOCAL_TMP, "rankzero-tie-" + topic)
        return controller_files.shared_text(path, lambda: os.urandom(32).hex())

    def _call(
        self, state: str = "present", secrets: dict[str, str] | None = None, target: str | None = None, only_own: bool = False, **revision: t.Any
    ) -> dict[str, t.Any]:
        """The one remote call."""
        replica = str(self._arguments["replica"])
        module_arguments = {
            "state": state,
            "replica": replica,
            "replica_root": str(self._arguments["replica_root"]),
            "revision": revision,
            "secrets": secrets,
            "lease": self._lease(target, only_own),
        }
        run_identity.note_call(self._host, replica)
        result = dict(self._execute_module(module_name="rankzero.inference.shard", module_args=module_arguments, task_vars=self._task_vars))
        result["remote_calls"] = 1
        return result
