#!/usr/bin/python
# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: engine_build
short_description: Register a build of an engine that is on a host
version_added: 0.1.0
description:
  - Asks the build's programs for their version and devices, in a clean environment and a safe directory, takes a fingerprint of their files, and records
    the answer in C(<root>/etc/rankzero/engines.d/<engine>-<name>.json). Plans use registered builds only, and require the same fingerprint on every rank.
  - Nothing is installed or removed but that record.
author:
  - The rankzero.inference authors (@rankzero)
options:
  engine:
    description: The engine, such as V(llamacpp).
    type: str
    required: true
  name:
    description: Name of the build, by which a profile's C(engine_version) can choose it. Several builds can be registered side by side.
    type: str
    default: default
  path:
    description: Directory of the build's programs, or its main program. Required with O(state=present).
    type: path
  env:
    description: Environment variables that the build needs (C(LD_LIBRARY_PATH), C(PATH)). Services start from an empty environment plus these.
    type: dict
    default: {}
  state:
    description: V(present) registers, V(absent) removes the record; the build's files are never touched.
    type: str
    choices: [present, absent]
    default: present
  replica_root:
    description: The record is written below this directory.
    type: path
    default: /
  adapter:
    description: Filled in by the action plugin with the programs that the engine's adapter names; not for playbooks.
    type: dict
    default: {}
attributes:
  action:
    support: full
    description: An action plugin of the same name tells the module which programs the engine has.
  check_mode:
    support: full
    description: Asks the programs and writes nothing.
  diff_mode:
    support: full
    description: Shows the record before and after.
seealso:
  - module: rankzero.inference.node_facts
"""

EXAMPLES = r"""
- name: Register the llama.cpp build below /opt
  rankzero.inference.engine_build:
    engine: llamacpp
    name: b11434-cuda13
    path: /opt/llama.cpp/b11434/bin
    env:
      LD_LIBRARY_PATH: /opt/llama.cpp/b11434/lib

- name: Forget a build
  rankzero.inference.engine_build:
    engine: llamacpp
    name: b11434-cuda13
    state: absent
"""

RETURN = r"""
build:
  description: The record.
  returned: success and O(state=present)
  type: dict
  sample:
    engine: llamacpp
    name: b11434-cuda13
    path: /opt/llama.cpp/b11434/bin/llama-server
    version: 0.6.0-dev
    fingerprint: 5d0c3c5a9f51be20
    devices: [{name: CUDA0, description: NVIDIA H100 80GB HBM3, total_mib: 81008}]
"""

import json
import os
import re
import time
import typing as t

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.rankzero.inference.plugins.module_utils import engine_probe

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
ARGUMENTS: t.Dict[str, t.Any] = {
    "engine": {"type": "str", "required": True},
    "name": {"type": "str", "default": "default"},
    "path": {"type": "path"},
    "env": {"type": "dict", "default": {}},
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "replica_root": {"type": "path", "default": "/"},
    # programs, optional_programs, version_args, devices_args
    "adapter": {"type": "dict", "default": {}},
}


def probe(module: AnsibleModule) -> t.Dict[str, t.Any]:
    params, adapter = module.params, module.params["adapter"]
    env = {str(name): str(value) for name, value in params["env"].items()}
    programs = engine_probe.find_programs(params["path"], adapter["programs"], adapter["optional_programs"])
    main_program = programs[adapter["programs"][0]]
    devices = None
    version = engine_probe.version(module.run_command, main_program, adapter["version_args"], env)
    if adapter["devices_args"]:
        devices = engine_probe.parse_devices(engine_probe.ask(module.run_command, main_program, adapter["devices_args"], env)[0])
    return {
        "engine": params["engine"],
        "name": params["name"],
        "path": main_program,
        "paths": programs,
        "version": version,
        "env": env,
        "devices": devices,
        "nccl": None,
        "fingerprint": engine_probe.fingerprint(programs),
    }


def read(path: str) -> t.Dict[str, t.Any]:
    try:
        with open(path, encoding="utf-8") as stream:
            record = json.load(stream)
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def write(path: str, record: t.Dict[str, t.Any]) -> None:
    os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
    unfinished = path + ".new"
    with open(unfinished, "w", encoding="utf-8") as stream:
        os.fchmod(stream.fileno(), 0o644)
        json.dump(record, stream, indent=2, sort_keys=True)
        stream.write("\n")
    os.rename(unfinished, path)


def present(module: AnsibleModule, path: str) -> None:
    before = read(path)
    record = probe(module)
    stable = {key: value for key, value in before.items() if key != "installed_at"}
    changed = stable != record
    record["installed_at"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()) if changed else before.get("installed_at")
    if changed and not module.check_mode:
        write(path, record)
    shown = [json.dumps(item, indent=2, sort_keys=True) + "\n" if item else "" for item in (before, record)]
    module.exit_json(changed=changed, build=record, diff={"before_header": path, "after_header": path, "before": shown[0], "after": shown[1]})


def absent(module: AnsibleModule, path: str) -> None:
    there = os.path.lexists(path)
    if there and not module.check_mode:
        os.unlink(path)
        if not os.listdir(os.path.dirname(path)):
            os.rmdir(os.path.dirname(path))
    module.exit_json(changed=there)


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, required_if=[("state", "present", ["path"])], supports_check_mode=True)
    for field in ("engine", "name"):
        if not _NAME.match(module.params[field]):
            module.fail_json(msg="%s %r: letters, digits, . _ and - are wanted, and a letter or digit first" % (field, module.params[field]))
    path = os.path.join(module.params["replica_root"], "etc/rankzero/engines.d/%s-%s.json" % (module.params["engine"], module.params["name"]))
    try:
        (present if module.params["state"] == "present" else absent)(module, path)
    except engine_probe.ProbeError as error:
        module.fail_json(msg="build %s of %s: %s" % (module.params["name"], module.params["engine"], error))
    except OSError as error:
        module.fail_json(msg="%s: %s" % (error.filename or path, error.strerror or error))


if __name__ == "__main__":
    main()
