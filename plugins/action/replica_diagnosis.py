# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Action plugin: what all hosts told about their shards, as a table, a sentence, and an archive on the controller."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import tarfile
import time
import typing as t

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.rankzero.inference.plugins.module_utils import masking
from ansible_collections.rankzero.inference.plugins.plugin_utils import controller_files, diagnosis, hostvars
from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Fault

display = Display()
ARGUMENTS: dict[str, t.Any] = {
    "replica": {"type": "str", "required": True},
    "looks": {"type": "str", "required": True},
    "gathered": {"type": "str"},
    "plan": {"type": "raw"},
    "directory": {"type": "str"},
    "api_key": {"type": "raw", "no_log": True},
}
# Parts of an answer that are files of their own in the archive.
FILES = {"launch.json": "launch", "state.json": "state"}


class ActionModule(ActionBase):
    TRANSFERS_FILES = False
    BYPASS_HOST_LOOP = True
    _supports_check_mode = True

    def run(self, tmp: t.Any = None, task_vars: t.Any = None) -> dict[str, t.Any]:
        super().run(tmp, task_vars)
        _result, arguments = self.validate_argument_spec(argument_spec=ARGUMENTS)
        replica, planned = str(arguments["replica"]), hostvars.plain(arguments["plan"])
        planned = planned if isinstance(planned, dict) else {}
        # A host masks what it knows to be secret; the controller may know more.
        secrets = masking.all_spellings([str(arguments["api_key"] or ""), *masking.given_by_name(planned)])
        seen = {str(host): self._seen(str(host), arguments, task_vars, secrets) for host in task_vars.get("ansible_play_hosts_all") or ()}
        found = diagnosis.rows(replica, seen, planned.get("plan"))
        causes = diagnosis.candidates(replica, seen, found)
        planned = masking.masked(planned, secrets)
        faults = [Fault(**fault) for fault in planned.get("faults") or ()]
        cause, step = diagnosis.conclusion(replica, found, causes, faults)
        text = diagnosis.text(replica, found, causes, faults)
        result: dict[str, t.Any] = {
            "changed": False,
            "ranks": found,
            "cause": cause,
            "next": step,
            "faults": planned.get("faults") or [],
            "causes": [dataclasses.asdict(item) for item in causes],
            "archive": None,
        }
        if hostvars.text(arguments["directory"]) and not self._task.check_mode:
            result["archive"] = self._archive(replica, str(arguments["directory"]), seen, planned, text, result)
        display.display(text + ("\nArchive: %s" % result["archive"] if result["archive"] else ""))
        return result

    @staticmethod
    def _seen(host: str, arguments: dict[str, t.Any], task_vars: t.Any, secrets: t.Sequence[str]) -> diagnosis.Seen:
        """One host's facts and answer. Either may be missing: the host could not be reached, or its Python is broken."""
        raw = hostvars.raw_variables(task_vars, host)
        facts = masking.masked(hostvars.plain(hostvars.facts_of(raw)), secrets)
        gathered = hostvars.plain(raw.get(arguments["gathered"]) or {}) if arguments["gathered"] else {}
        answer = masking.masked(hostvars.plain(raw.get(arguments["looks"]) or {}), secrets)
        for result in (gathered, answer):
            if result.get("unreachable"):
                return diagnosis.Seen(facts, None, "the host cannot be reached: %s" % _first_line(result.get("msg")), True)
        if "present" not in answer:
            return diagnosis.Seen(facts, None, "the host could not be asked: %s" % _first_line(answer.get("msg") or gathered.get("msg")))
        return diagnosis.Seen(facts, answer)

    @staticmethod
    def _archive(replica: str, directory: str, seen: t.Mapping[str, diagnosis.Seen], planned: t.Any, text: str, result: dict[str, t.Any]) -> str:
        """Everything in one file of mode 0600. All of it has been masked."""
        name = "%s-%s" % (replica, time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()))
        files: dict[str, t.Any] = {
            "diagnosis.txt": text + "\n",
            "diagnosis.json": result,
            "plan.json": planned.get("plan") or {"faults": planned.get("faults"), "msg": planned.get("msg")},
        }
        for host, one in seen.items():
            files.update({"hosts/%s/%s" % (_file_name(host), path): content for path, content in _of_host(one).items()})
        target = controller_files.place("%s/%s.tar.gz" % (directory, name))
        with os.fdopen(controller_files.open_private(target), "wb") as stream, tarfile.open(fileobj=stream, mode="w:gz") as archive:
            for path, content in sorted(files.items()):
                _add(archive, "%s/%s" % (name, path), content)
        return target


def _of_host(one: diagnosis.Seen) -> dict[str, t.Any]:
    if one.answer is None:
        return {"facts.json": one.facts, "problem.txt": "%s\n" % one.problem}
    parts = {path: one.answer.get(key) for path, key in FILES.items() if one.answer.get(key) is not None}
    rest = {key: value for key, value in one.answer.items() if key not in (*FILES.values(), "log", "invocation")}
    return {"facts.json": one.facts, "look.json": rest, "shard.log": "".join("%s\n" % line for line in one.answer.get("log") or ()), **parts}


def _add(archive: tarfile.TarFile, path: str, content: t.Any) -> None:
    data = (content if isinstance(content, str) else json.dumps(content, indent=2, sort_keys=True) + "\n").encode("utf-8", "replace")
    entry = tarfile.TarInfo(path)
    entry.size, entry.mode, entry.mtime = len(data), 0o600, int(time.time())
    archive.addfile(entry, io.BytesIO(data))


def _file_name(host: str) -> str:
    """An inventory name as a part of a path: it may hold anything."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", host).lstrip(".") or "_"


def _first_line(text: t.Any) -> str:
    return " ".join((str(text or "no reason given").strip().splitlines() or [""])[0].split())[:300]
