# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From one shard of a plan to the files on its host. Text in, text out; the templates are handed in."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
import typing as t

import jinja2

SHARD_ENV = "shard.env"
LAUNCH = "launch.json"
SUPERVISOR_CONF = "supervisord.conf"
Plan = t.Mapping[str, t.Any]
_SUPERVISOR_COMMENT = re.compile(r"(\s)([;#])")


@dataclasses.dataclass(frozen=True)
class Rendered:
    """Files of the revision by name, and the service manager's file. Everything is text; modes are the module's business."""

    files: t.Mapping[str, str]
    unit_name: str
    unit: str

    def hashes(self) -> dict[str, str]:
        return {name: sha256(text) for name, text in sorted(self.files.items())}


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def render(shard: Plan, templates: t.Mapping[str, str], programs: t.Mapping[str, str]) -> Rendered:
    """C(templates): C(shard.env.j2), C(inference.service.j2), C(supervisord.conf.j2).  C(programs): run_shard.py and the engine's program files."""
    shared = shared_environment(shard["launches"])
    manager = shard["service_manager"]
    unit_name = "inference-%s.service" % shard["labels"]["replica"] if manager == "systemd" else SUPERVISOR_CONF
    template = templates["inference.service.j2" if manager == "systemd" else "supervisord.conf.j2"]
    unit = render_template(template, unit_values(shard))
    files = {
        SHARD_ENV: render_template(templates["shard.env.j2"], {"shard": shard, "environment": shared, "why": _why(shard["launches"])}),
        LAUNCH: json.dumps(launch_document(shard, shared), indent=2, sort_keys=True, ensure_ascii=False) + "\n",
        unit_name: unit,  # kept beside the revision, so that a rollback restores the service as it was
        **shard["revision_files"],
        **programs,
    }
    return Rendered(files, unit_name, unit)


def render_template(text: str, values: t.Mapping[str, t.Any]) -> str:
    """Plain Jinja2 with strict undefined names: values are data, never templates."""
    return _compiled(text).render(values)


@functools.lru_cache(maxsize=16)
def _compiled(text: str) -> jinja2.Template:
    """Compiling costs a hundred times what rendering does, and all shards of a plan have the same three templates."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False)
    environment.filters.update(
        env_value=env_value, unit_word=unit_word, unit_text=unit_text, supervisor_word=supervisor_word, supervisor_text=supervisor_text, comment=comment
    )
    return environment.from_string(text)


def shared_environment(launches: t.Sequence[Plan]) -> dict[str, str]:
    """The variables that all launches have with the same value."""
    first = launches[0]["env"]
    return {name: value for name, value in sorted(first.items()) if all(launch["env"].get(name) == value for launch in launches)}


def _why(launches: t.Sequence[Plan]) -> dict[str, str]:
    return {name: reason for launch in reversed(launches) for name, reason in launch["why"].items()}


def paths(shard: Plan) -> dict[str, str]:
    """Directories of a shard on its host."""
    root, replica = shard["root"].rstrip("/"), shard["labels"]["replica"]
    return {
        "config_dir": "%s/etc/rankzero/%s" % (root, replica),
        "current_dir": "%s/etc/rankzero/%s/current" % (root, replica),
        "state_dir": "%s/run/rankzero/%s" % (root, replica),
        "work_dir": shard["work_dir"],
        "log_dir": "%s/var/log/rankzero/%s" % (root, replica),
    }


def unit_values(shard: Plan) -> dict[str, t.Any]:
    return {"shard": shard, "replica": shard["labels"]["replica"], "paths": paths(shard), "default_root": shard["root"].rstrip("/") == ""}


def launch_document(shard: Plan, shared: t.Mapping[str, str]) -> dict[str, t.Any]:
    """launch.json (docs/architecture.md)."""
    directories = paths(shard)
    return {
        "schema": 1,
        "replica": shard["labels"]["replica"],
        "rank": shard["rank"],
        "nodes": shard["nodes"],
        "fingerprint": shard["fingerprint"],
        "labels": dict(shard["labels"]),
        "paths": {"state_dir": directories["state_dir"], "work_dir": directories["work_dir"]},
        "stop_seconds": shard["stop_seconds"],
        "launches": [_launch(launch, shared) for launch in shard["launches"]],
        "gpus": list(shard["gpu_details"]),
        "interface": shard["interface"],
        "hcas": list(shard["hca_details"]),
        "sysfs_root": shard["sysfs_root"],
        "ready": dict(shard["ready"]),
        "listen_ports": list(shard["listen_ports"]),
        "addresses": [shard["address"]],
        "address": shard["address"],
        "leader_port": shard["leader_port"],
        "http_port": shard["http_port"],
        "build": shard["build"],
        "reads": list(shard["reads"]),
        "secrets": list(shard["secrets"]),
        "tie": shard["tie"],
        "tie_port": shard["tie"]["port"] if shard["tie"] else None,
        "restart": shard["restart"],
    }


def _launch(launch: Plan, shared: t.Mapping[str, str]) -> dict[str, t.Any]:
    return {
        "name": launch["name"],
        "path": launch["path"],
        "args": list(launch["args"]),
        "env": {name: value for name, value in launch["env"].items() if name not in shared},
        "secret_env": dict(launch["secrets"]),
        "secret_args": list(launch["secret_args"]),
        "wait_for_leader_port": launch["wait_for_leader"],
        "wait_for_ranks": list(launch["wait_for_ranks"]),
        "run_args": list(launch["run_args"]),
        "run_env": list(launch["run_env"]),
    }


def env_value(value: str) -> str:
    """C('value') as a POSIX shell and run_shard.py read it: only the single quote itself needs care."""
    return "'%s'" % value.replace("'", "'\\''")


def unit_text(value: str) -> str:
    """A value of a systemd setting: C(%) begins a specifier there (systemd.unit(5))."""
    return value.replace("%", "%%")


def unit_word(value: str) -> str:
    """One word of ExecStart=: quoted, with backslash, quote, C(%) and C($) escaped (systemd.service(5), COMMAND LINES)."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return '"%s"' % escaped


def supervisor_text(value: str) -> str:
    """A value in supervisord's configuration: C(%) begins an expansion there."""
    return value.replace("%", "%%")


def supervisor_word(value: str) -> str:
    """One word of supervisord's command=, which is split as a shell would, but after a C(;) or C(#) behind a space has cut it, in quotes too."""
    quoted = _SUPERVISOR_COMMENT.sub(r"\1''\2", value.replace("'", "'\"'\"'"))
    return supervisor_text("'%s'" % quoted)


def comment(value: str) -> str:
    """Text that is safe behind a C(#)."""
    return " ".join(value.split())
