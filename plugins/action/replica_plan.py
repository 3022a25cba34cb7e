# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Action plugin: hostvars in, plan out. The rules are in plugin_utils; no connection is opened."""

from __future__ import annotations

import json
import os
import pathlib
import time
import typing as t

from ansible.errors import AnsibleActionFail, AnsibleError
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible.vars.hostvars import HostVarsVars

from ansible_collections.rankzero.inference.plugins.filter import profile as profiles_filter
from ansible_collections.rankzero.inference.plugins.module_utils import models
from ansible_collections.rankzero.inference.plugins.plugin_utils import (
    collection_files,
    controller_files,
    convergence,
    engines,
    hostvars,
    picture,
    render,
    run_identity,
    secrets,
    way_back,
)
from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Fault, Findings, report
from ansible_collections.rankzero.inference.plugins.plugin_utils.plan import HostInput, Request, build_plan
from ansible_collections.rankzero.inference.plugins.plugin_utils.render import sha256
from ansible_collections.rankzero.inference.plugins.plugin_utils.tables import plan_text

display = Display()
KEY_FILE = "replica_api_key_file"
MOST_KEY_BYTES = 64 * 1024
"""Vaulted, a key takes four times its length and more."""
OPTIONS = (
    "replica_fabric",
    "replica_fabrics",
    "replica_leader",
    "replica_http_port",
    "replica_http_host",
    "replica_leader_port",
    "replica_tie_port",
    "replica_silent_seconds",
    "replica_without_api_key",
)
ARGUMENTS: dict[str, t.Any] = {
    "replica": {"type": "raw"},
    "profile": {"type": "raw"},
    "profiles": {"type": "raw"},
    "group": {"type": "str"},
    "hosts": {"type": "list", "elements": "str"},
    "api_key": {"type": "raw", "no_log": True},
    "api_key_file": {"type": "str"},
    "options": {"type": "dict", "default": {}},
    "recorded": {"type": "bool", "default": False},
    "plan_file": {"type": "str"},
    "picture": {"type": "str"},
    "show": {"type": "bool", "default": True},
}


class ActionModule(ActionBase):
    TRANSFERS_FILES = False
    BYPASS_HOST_LOOP = True
    _supports_check_mode = True

    def run(self, tmp: t.Any = None, task_vars: t.Any = None) -> dict[str, t.Any]:
        super().run(tmp, task_vars)
        _result, arguments = self.validate_argument_spec(argument_spec=ARGUMENTS)
        plan, facts = self._plan(arguments, task_vars)
        if arguments["show"]:  # first: a path that cannot be written loses nobody the plan
            display.display(plan_text({**plan, "faults": []}) if plan["faults"] else plan_text(plan))
        unwritten = []
        if hostvars.text(arguments["plan_file"]):
            unwritten.append(self._write("plan_file", str(arguments["plan_file"]), json.dumps(plan, indent=2, sort_keys=True) + "\n"))
        if hostvars.text(arguments["picture"]):
            unwritten.append(self._write("picture", str(arguments["picture"]), picture.svg(plan, facts)))
        problems = [problem for problem in unwritten if problem]
        if plan["faults"]:
            faults = [Fault(**fault) for fault in plan["faults"]]
            text = report(faults, "The plan is refused, and nothing was changed. Faults")
            return {"failed": True, "faults": plan["faults"], "msg": "\n".join([text, *problems])}
        if problems:
            return {"failed": True, "msg": "\n".join([*problems, "Nothing was changed."])}
        return {"changed": False, "plan": plan, "converged": convergence.is_converged(plan, facts), "planned_at": time.time()}

    def _plan(self, arguments: dict[str, t.Any], task_vars: t.Any) -> tuple[dict[str, t.Any], dict[str, t.Any]]:
        """The plan, and host -> the facts that it was made from."""
        findings = Findings()
        replica = hostvars.plain(arguments["replica"])
        path = hostvars.text(arguments["api_key_file"])
        key = self._key_in(path, findings) if path else secrets.check(hostvars.plain(arguments["api_key"]), findings)
        played = [str(host) for host in task_vars.get("ansible_play_hosts_all") or ()]
        among = set(arguments["hosts"] or played)
        hosts = tuple(self._host(host, task_vars, arguments["recorded"]) for host in played if host in among)
        profile, profiles = hostvars.plain(arguments["profile"]), hostvars.plain(arguments["profiles"])
        sent, unsent = ({}, {}) if arguments["recorded"] else self._sent(profile, profiles)
        request = Request(
            replica=replica,
            profile=profile,
            profiles=profiles,
            hosts=hosts,
            ended_owners=tuple(self._ended(hosts, str(replica), task_vars, arguments["recorded"])),
            absent_hosts=self._absent(arguments, task_vars),
            sliced_job=run_identity.sliced_job(task_vars),
            options=hostvars.plain(arguments["options"]),
            known_variables=collection_files.role_variables(),
            key_digest=secrets.digest(key, str(replica)) if key else None,
            program_hashes=self._hashes(arguments),
            sent=sent,
        )
        plan = build_plan(request)
        for path in sorted({path for paths in plan["to_fetch"].values() for path in paths} & set(unsent)):
            seen, wanted = unsent[path]
            findings.fault("adapters", seen, wanted, "Correct source or sha256 of the adapter for %s." % path)
        if findings.faults:
            plan.update({"faults": plan["faults"] + [fault.as_dict() for fault in findings.faults], "shards": {}, "leader": None, "fingerprint": None})
        self._warn_about_forks(plan, task_vars)
        self._compare(plan, request)
        facts = {host.name: host.facts for host in hosts}
        plan["way_back"] = way_back.choose(str(replica), facts)
        self._warn_about_way_back(plan, facts)
        return plan, facts

    def _key_in(self, path: str, findings: Findings) -> str | None:
        """The key in a file on the controller, as the file lookup finds and reads it: plain or vaulted."""
        try:
            found = controller_files.regular(self._find_needle("files", path), KEY_FILE, MOST_KEY_BYTES)
            text = self._loader.get_text_file_contents(found).rstrip()
        except (AnsibleError, OSError, UnicodeError) as error:
            problem = " ".join(str(error).split("\n", 1)[0].split()) or type(error).__name__
            problem = problem.removeprefix("%s: %s " % (KEY_FILE, path))
            findings.fault(KEY_FILE, "%s: %s" % (path, problem), "a file on the controller that holds the key", "Give a path that this user can read.")
            return None
        if not text:
            findings.fault(KEY_FILE, "%s, which is empty" % path, "a file on the controller that holds the key", "Without a key anybody could use the replica.")
        return secrets.check(hostvars.plain(text), findings)

    def _sent(self, profile: t.Any, profiles: t.Any) -> tuple[dict[str, str], dict[str, tuple[str, str]]]:
        """(path of an adapter -> checksum of its source, path -> what was seen and wanted where that cannot be sent), for sources on the controller.

        One that was changed here is not what hosts have. One that is gone is no matter where hosts have it.
        """
        found: dict[str, str] = {}
        problems: dict[str, tuple[str, str]] = {}
        for adapter in profiles_filter.profile_sources(profile, profiles):
            source, wanted = adapter["source"], adapter["sha256"]
            if not controller_files.is_here(source):
                continue
            try:
                content = models.describe(controller_files.find(source, lambda name: self._find_needle("files", name)), checksum=True)["content_sha256"]
            except AnsibleActionFail as error:
                problems[adapter["path"]] = str(error), "a source that can be sent"
                continue
            if not content:
                problems[adapter["path"]] = "%s, which holds no file" % source, "a source that can be sent"
            elif wanted and wanted != content:
                problems[adapter["path"]] = "sha256 %s of %s" % (content, source), "sha256 %s" % wanted
            elif not wanted:
                found[adapter["path"]] = str(content)
        return found, problems

    @staticmethod
    def _compare(plan: dict[str, t.Any], request: Request) -> None:
        """Say for every rank what is not yet as planned, so that ranks which depend on each other change together."""
        templates = {name: collection_files.template(name) for name in collection_files.TEMPLATES}
        records = {
            host.name: host.facts["shards"].get(plan["replica"])
            for host in request.hosts
            if isinstance(host.facts, t.Mapping) and isinstance(host.facts.get("shards"), t.Mapping)
        }
        own = {}
        for host, shard in plan["shards"].items():
            programs = {name: collection_files.program(name) for name in [collection_files.SUPERVISOR_PROGRAM, *shard["program_files"]]}
            own[host] = convergence.reasons(records.get(host), shard, render.render(shard, templates, programs))
        ranks = {host: shard["rank"] for host, shard in plan["shards"].items()}
        for host, converge in convergence.with_tie(convergence.over_replica(own, ranks), records).items():
            plan["shards"][host]["converge"] = converge

    @staticmethod
    def _ended(hosts: t.Sequence[HostInput], replica: str, task_vars: t.Any, recorded: bool) -> list[str]:
        """Recorded facts tell nothing of who works on a host now."""
        facts = {host.name: host.facts for host in hosts}
        if not recorded:
            return run_identity.owners_that_do_not_count(facts, task_vars)
        found = [one["locks"].get(replica) for one in facts.values() if isinstance(one, t.Mapping) and isinstance(one.get("locks"), t.Mapping)]
        return [str(lock["owner"]) for lock in found if isinstance(lock, t.Mapping) and lock.get("owner")]

    @staticmethod
    def _absent(arguments: dict[str, t.Any], task_vars: t.Any) -> tuple[str, ...]:
        """Members of the replica's group that are not in the play: --limit, a job slice, or a host that failed before."""
        members = (task_vars.get("groups") or {}).get(hostvars.text(arguments["group"]) or "") or ()
        played = set(map(str, task_vars.get("ansible_play_hosts") or ()))
        return tuple(str(host) for host in members if str(host) not in played)

    def _host(self, host: str, task_vars: t.Any, recorded: bool) -> HostInput:
        raw = hostvars.raw_variables(task_vars, host)  # dear: the variables of a host are put together anew for each question
        variables = HostVarsVars(raw, loader=self._loader, host=host)
        facts = hostvars.facts_of(raw, recorded)
        return HostInput(
            name=host,
            facts=hostvars.plain(facts) if isinstance(facts, t.Mapping) else facts,
            root=hostvars.text(variables.get("replica_root")) or "/",
            user=hostvars.text(variables.get("replica_user")),
            service_manager=hostvars.text(variables.get("replica_service_manager")),
            address=hostvars.text(variables.get("replica_address")),
            management=hostvars.text(variables.get("replica_management")),
            rank=hostvars.plain(variables.get("replica_rank")),
            groups=tuple(str(name) for name in variables.get("group_names") or ()),
            sysfs_root=hostvars.text(variables.get("replica_sysfs_root")) or "/sys",
            variables=tuple(str(name) for name in raw if str(name).startswith("replica_")),
        )

    @staticmethod
    def _hashes(arguments: dict[str, t.Any]) -> dict[str, str]:
        """Programs and templates are part of what decides how a shard runs: an upgraded collection makes a new revision."""
        programs = {collection_files.SUPERVISOR_PROGRAM: collection_files.program(collection_files.SUPERVISOR_PROGRAM)}
        for name in sorted(_program_files(arguments)):
            programs[name] = collection_files.program(name)
        templates = {name: collection_files.template(name) for name in collection_files.TEMPLATES}
        return {name: sha256(text) for name, text in {**programs, **templates}.items()}

    @staticmethod
    def _warn_about_forks(plan: dict[str, t.Any], task_vars: t.Any) -> None:
        forks = task_vars.get("ansible_forks")
        if isinstance(forks, int) and forks < len(plan["shards"]):
            plan["warnings"].append(
                Fault(
                    None,
                    None,
                    "forks",
                    str(forks),
                    "at least %d, one for each rank" % len(plan["shards"]),
                    "The wait still works, but progress lines of some ranks come late.",
                ).as_dict()
            )

    @staticmethod
    def _warn_about_way_back(plan: dict[str, t.Any], facts: dict[str, t.Any]) -> None:
        back = plan["way_back"]
        if not plan["shards"] or back["revision"] == plan["fingerprint"]:
            return
        for host, lacks in way_back.lacking(plan["replica"], facts, back).items():
            plan["warnings"].append(
                Fault(
                    host,
                    back["hosts"][host],
                    "shards.%s.revisions" % plan["replica"],
                    "revision %s: %s" % (back["revision"], lacks),
                    "a revision that can start, to go back to",
                    "Where this deploy fails, no rank serves until it is brought back.",
                ).as_dict()
            )

    @staticmethod
    def _write(option: str, path: str, text: str) -> str | None:
        """The plan on the controller, also when it was refused, also in check mode: it is the output that was asked for. Why not, and what to do, or None."""
        named = option if option == "plan_file" else "%s (plan_%s in the playbooks)" % (option, option)
        target = pathlib.Path(os.path.abspath(os.path.expanduser(path)))  # relative to where ansible-playbook was started, as any command's output
        try:
            if target.exists() and not target.is_file():  # a file takes its name: root would lose /dev/null or /dev/stdout
                kind = "a directory" if target.is_dir() else "no plain file"
                return "%s: %s is %s, and the path of a file is wanted. Give one, such as plan.json or plan.svg." % (named, target, kind)
            if not target.parent.exists():
                return "%s: there is no directory %s on the controller. Make it, or give a path in one that is there." % (named, target.parent)
            unfinished = target.with_name("%s.%d.new" % (target.name, os.getpid()))
            with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "w", encoding="utf-8", errors="replace") as stream:
                stream.write(text)
            unfinished.replace(target)
            display.display("The %s was written to %s" % ("plan" if option == "plan_file" else "picture of the plan", target))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            return "%s: %s cannot be written: %s. Give a path that this user can write to." % (named, target, reason)
        return None


def _program_files(arguments: dict[str, t.Any]) -> t.Sequence[str]:
    """Program files of the engine that the profile names, if it names one that exists."""
    profile = arguments["profile"]
    if not isinstance(profile, t.Mapping):
        known = arguments["profiles"] if isinstance(arguments["profiles"], t.Mapping) else {}
        profile = known.get(profile) if isinstance(profile, str) else None
    name = profile.get("engine") if isinstance(profile, t.Mapping) else None
    engine = engines.load(str(name), Findings()) if name else None
    return engine.program_files if engine else ()
