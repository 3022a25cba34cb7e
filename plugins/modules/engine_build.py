#!/usr/bin/python
# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: engine_build
short_description: Install or register a build of an inference engine
version_added: 0.1.0
description:
  - Installs a pinned build of an engine, or takes one that is there, asks its programs for version, packages and devices, in a clean environment
    and a safe directory, takes a fingerprint of their files, and records the answer in C(<root>/etc/rankzero/engines.d/<engine>-<name>.json).
    Plans use registered builds only, and require the same fingerprint on every rank.
  - What is installed lies in a directory of its own, C(<root>/opt/rankzero/engines/<engine>-<name>/<digest>), beside other builds. It is registered when
    it is whole and has answered, so half an install is never used; the next run removes it and begins anew. When a build of the same name is to be
    another one, the files of the former stay for as long as a replica's revision on the host starts programs from them.
  - On a host with GPUs the devices that the build sees must contain every GPU.
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
    description: Directory of the programs of a build that is there, or its main program. With O(state=present) this or O(install) is required.
    type: path
  install:
    description: How to get a build that is not there.
    type: dict
    suboptions:
      method:
        description:
          - V(venv) makes a virtual environment with O(install.requirements).
          - V(archive) unpacks a release archive; V(source) unpacks one of sources and builds it with CMake.
          - V(image) takes a container image. A program that starts podman lies in the place of each of the engine's; GPUs are given by CDI, the network is
            the host's, and command and environment are the same inside.
          - V(package) takes what a package of the distribution has put in place; the module does not install the package itself.
        type: str
        choices: [venv, archive, source, package, image]
        required: true
      requirements:
        description:
          - What pip installs. Each one is pinned, C(NAME==VERSION), C(NAME @ https://...whl#sha256=...), or C(NAME @ file:///path/on/the/host.whl).
          - What these require in their turn is chosen by pip unless it is listed too; the fingerprint tells when ranks differ in it.
        type: list
        elements: str
        default: []
      python:
        description: The interpreter that makes the virtual environment. Without it, the one that Ansible uses on the host.
        type: str
      wheels:
        description: A directory of wheels on the host. Nothing is asked of an index then.
        type: path
      index_url:
        description: Address of a package index in the place of pip's own. It may hold a user and a password, which are not shown and not kept.
        type: str
      extra_index_urls:
        description: Addresses of further indexes, such as PyTorch's.
        type: list
        elements: str
        default: []
      archive:
        description:
          - Address (http or https) or path on the controller of an archive, tar (gz, xz, bz2) or zip.
          - For V(image), what C(podman save) writes.
          - It is fetched by the host, resumed after a broken connection, or sent by the controller when it is needed.
        type: str
      sha256:
        description: Checksum of O(install.archive), 64 hexadecimal digits.
        type: str
      cmake_args:
        description: Further arguments of CMake, such as C(-DCMAKE_CUDA_ARCHITECTURES=90).
        type: list
        elements: str
        default: []
      cuda:
        description: Build with CUDA, which needs its toolkit on the host.
        type: bool
        default: true
      package:
        description: Name of the distribution's package. Its programs are looked for in O(path), C(/usr/bin) by default.
        type: str
      image:
        description: Name of a container image with its digest, C(NAME@sha256:...). Or give O(install.archive).
        type: str
      mounts:
        description: Directories of models on the host that containers may read. The plan refuses a model that lies elsewhere.
        type: list
        elements: path
        default: [/models]
      podman_options:
        description: Further options of C(podman run), such as C(--shm-size=16g); they come last.
        type: list
        elements: str
        default: []
  env:
    description: Environment variables that the build needs (C(LD_LIBRARY_PATH), C(PATH)). Services start from an empty environment plus these.
    type: dict
    default: {}
  all_gpus:
    description: V(false) takes a build too that does not see every GPU of the host, such as one for profiles without GPUs.
    type: bool
    default: true
  state:
    description:
      - V(absent) removes the record, and the files of what this module has installed under this name. Files of other builds are never touched.
      - It is refused, with their names, while replicas on the host use the build.
    type: str
    choices: [present, absent]
    default: present
  rollbacks:
    description: V(false) removes a build too that only revisions use which are kept for a rollback.
    type: bool
    default: true
  replica_root:
    description: Everything is below this directory.
    type: path
    default: /
  adapter:
    description: Filled in by the action plugin with what the engine's adapter says of its programs; not for playbooks.
    type: dict
    default: {}
attributes:
  action:
    support: full
    description: An action plugin of the same name tells the module which programs the engine has, and sends an archive when the host needs it.
  check_mode:
    support: full
    description: Says what would be installed; asks the programs of a build that is there, and writes nothing.
  diff_mode:
    support: full
    description: Shows the record before and after.
seealso:
  - module: rankzero.inference.node_facts
"""

EXAMPLES = r"""
- name: Install vLLM and Ray, pinned
  rankzero.inference.engine_build:
    engine: vllm
    name: v0.33.0
    install:
      method: venv
      python: /usr/bin/python3.12
      requirements:
        - vllm==0.33.0
        - ray[cgraph]==2.60.0

- name: Install SGLang where there is no way to an index
  rankzero.inference.engine_build:
    engine: sglang
    name: v0.5.23
    install:
      method: venv
      requirements:
        - sglang==0.5.23
      wheels: /srv/wheels/sglang-0.5.23

- name: Install a release of llama.cpp from an archive on the controller
  rankzero.inference.engine_build:
    engine: llamacpp
    name: b11434
    install:
      method: archive
      archive: files/llama-b11434-bin-ubuntu-cuda-x64.tar.gz
      sha256: 0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef

- name: Build llama.cpp with CUDA for this kind of GPU
  rankzero.inference.engine_build:
    engine: llamacpp
    name: b11434-sm90
    install:
      method: source
      archive: https://files.example.com/llama.cpp-b11434.tar.gz
      sha256: 0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef
      cmake_args:
        - -DCMAKE_CUDA_ARCHITECTURES=90

- name: Take an image as a build
  rankzero.inference.engine_build:
    engine: vllm
    name: image-0.33.0
    install:
      method: image
      image: registry.example.com/vllm@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef
      mounts:
        - /models
        - /adapters

- name: Register a build that is there
  rankzero.inference.engine_build:
    engine: llamacpp
    name: b11434-cuda13
    path: /opt/llama.cpp/b11434/bin
    env:
      LD_LIBRARY_PATH: /opt/llama.cpp/b11434/lib

- name: Remove a build
  rankzero.inference.engine_build:
    engine: vllm
    name: v0.32.0
    state: absent
"""

RETURN = r"""
build:
  description: The record. V(null) in check mode where it would have to be installed first.
  returned: success and O(state=present)
  type: dict
  sample:
    engine: llamacpp
    name: b11434-cuda13
    path: /opt/llama.cpp/b11434/bin/llama-server
    version: 0.6.0-dev
    fingerprint: 5d0c3c5a9f51be20
    devices: [{name: CUDA0, description: NVIDIA H100 80GB HBM3, total_mib: 81008}]
actions:
  description: What was done, or would be in check mode.
  returned: success
  type: list
  elements: str
  sample: ["install vllm v0.33.0 in /opt/rankzero/engines/vllm-v0.33.0/5d0c3c5a9f51"]
"""

import json
import os
import re
import time
import typing as t

# For its effect on every import behind it, so it has no other use: docs/decisions/0013-modules-are-compiled-once.md
from ansible_collections.rankzero.inference.plugins.module_utils import compile_once  # noqa: F401  # pylint: disable=unused-import

# isort: split
from ansible.module_utils.basic import AnsibleModule

from ansible_collections.rankzero.inference.plugins.module_utils import archives, downloads, engine_installs, engine_probe, nvidia

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
INSTALL: t.Dict[str, t.Any] = {
    "method": {"type": "str", "choices": ["venv", "archive", "source", "package", "image"], "required": True},
    "requirements": {"type": "list", "elements": "str", "default": []},
    "python": {"type": "str"},
    "wheels": {"type": "path"},
    "index_url": {"type": "str", "no_log": True},
    "extra_index_urls": {"type": "list", "elements": "str", "default": [], "no_log": True},
    "archive": {"type": "str", "no_log": True},
    "sha256": {"type": "str"},
    "cmake_args": {"type": "list", "elements": "str", "default": []},
    "cuda": {"type": "bool", "default": True},
    "package": {"type": "str"},
    "image": {"type": "str"},
    "mounts": {"type": "list", "elements": "path", "default": ["/models"]},
    "podman_options": {"type": "list", "elements": "str", "default": []},
}
ARGUMENTS: t.Dict[str, t.Any] = {
    "engine": {"type": "str", "required": True},
    "name": {"type": "str", "default": "default"},
    "path": {"type": "path"},
    "install": {"type": "dict", "options": INSTALL},
    "env": {"type": "dict", "default": {}},
    "all_gpus": {"type": "bool", "default": True},
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "rollbacks": {"type": "bool", "default": True},
    "replica_root": {"type": "path", "default": "/"},
    # programs, optional_programs, version_args, devices_args, python, without_device; archive: where the controller has put it, needs_transfer: it can
    "adapter": {"type": "dict", "default": {}},
}


class Build:
    """One build on the host, as the module's parameters want it."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.params, self.adapter, self.install = module.params, module.params["adapter"], module.params["install"]
        self.engine, self.name, self.root = module.params["engine"], module.params["name"], module.params["replica_root"]
        self.record_path = os.path.join(self.root, "etc/rankzero/engines.d/%s-%s.json" % (self.engine, self.name))
        self.store = engine_installs.Store(self.root, self.engine, self.name, module.run_command)
        self.actions: t.List[str] = []

    def present(self) -> None:
        path = self.params["path"] if self.install is None else self._installed()
        before = read(self.record_path)
        record = self._probe(path)
        changed = {key: value for key, value in before.items() if key != "installed_at"} != record
        record["installed_at"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()) if changed else before.get("installed_at")
        if changed:
            self.actions.append("register %s %s" % (self.engine, self.name))
        if changed and not self.module.check_mode:
            write(self.record_path, record)
        stale = self._remove_stale() if self.install is not None and self.install["method"] != "package" else []
        shown = [json.dumps(item, indent=2, sort_keys=True) + "\n" if item else "" for item in (before, record)]
        self.module.exit_json(
            changed=bool(changed or self.actions or stale),
            build=record,
            actions=self.actions,
            diff={"before_header": self.record_path, "after_header": self.record_path, "before": shown[0], "after": shown[1]},
        )

    def absent(self) -> None:
        places = self.store.stale(None)
        holders = engine_installs.users(self.root, self.engine, self.name)
        for place in places:
            holders += engine_installs.users(self.root, self.engine, self.name, place)
        there = os.path.lexists(self.record_path)
        if not there and not places:
            self._warn_of_another_name()
        held = sorted({one for one in holders if self.params["rollbacks"] or not one.endswith(")")})
        if held and (there or places):
            self.module.fail_json(
                msg="build %s of %s is in use by %s: remove the replica, or deploy it with another build, first%s"
                % (
                    self.name,
                    self.engine,
                    ", ".join(held),
                    " (false for %s removes a build that is only kept)" % engine_probe.option("rollbacks") if all(one.endswith(")") for one in held) else "",
                )
            )
        if there:
            self.actions.append("forget %s %s" % (self.engine, self.name))
        self.actions += ["remove %s" % place for place in places]
        if not self.module.check_mode:
            if there:
                os.unlink(self.record_path)
                if not os.listdir(os.path.dirname(self.record_path)):
                    os.rmdir(os.path.dirname(self.record_path))
            if places:
                with self.store.locked():
                    self.store.remove(places)
        self.module.exit_json(changed=bool(self.actions), actions=self.actions)

    def _warn_of_another_name(self) -> None:
        """Nothing is to be removed: as it should be the second time, or the name is not what was meant."""
        prefix, folder = self.engine + "-", os.path.dirname(self.record_path)
        there = sorted(name[len(prefix) : -len(".json")] for name in (os.listdir(folder) if os.path.isdir(folder) else ()) if name.startswith(prefix))
        if there:
            self.module.warn("there is no build %s of %s on the host; it has %s" % (self.name, self.engine, ", ".join(there)))

    # ---- parts

    def _installed(self) -> str:
        """The directory of the programs, after the build was installed where it was not there. In check mode the module may end here."""
        engine_installs.check(self.install)
        if self.install["method"] == "package":
            return self._packaged()
        place, programs = self.store.place(self.install), self.adapter["programs"]
        if not self.store.is_complete(place):
            self.actions.append("install %s %s in %s" % (self.engine, self.name, place))
            if self.module.check_mode:
                self.module.exit_json(changed=True, build=None, actions=self.actions)
            if self.adapter.get("needs_transfer") and not self.adapter.get("archive"):
                self.module.exit_json(changed=False, needs_archive=True)
            with self.store.locked():
                if not self.store.is_complete(place):
                    optional = self.adapter["optional_programs"] if self.install["method"] == "image" else []
                    self.store.install({**self.install, "wrapper": self.adapter.get("wrapper")}, [*programs, *optional], self.adapter.get("archive"))
        return os.path.join(place, "bin") if self.install["method"] != "archive" else engine_installs.find_directory(place, programs[0])

    def _packaged(self) -> str:
        if engine_installs.package_version(self.module.run_command, self.install["package"]) is None:
            if self.module.check_mode:
                self.module.exit_json(changed=True, build=None, actions=["install the package %s" % self.install["package"]])
            raise engine_installs.InstallError("the package %s is not installed on the host" % self.install["package"])
        return str(self.params["path"] or "/usr/bin")

    def _probe(self, path: str) -> t.Dict[str, t.Any]:
        run, adapter = self.module.run_command, self.adapter
        env = {str(name): str(value) for name, value in self.params["env"].items()}
        programs = engine_probe.find_programs(path, adapter["programs"], adapter["optional_programs"])
        main_program = programs[adapter["programs"][0]]
        container = engine_installs.container_of(main_program)
        python = None
        if adapter.get("python"):
            python = os.path.join(os.path.dirname(main_program), "python") if container else engine_probe.python_of(main_program)
        packages = engine_probe.python_packages(run, python, env) if python else None
        gpus = nvidia.read()
        version = self._version(main_program, env, packages, gpus)
        asked = {**env, "NVIDIA_VISIBLE_DEVICES": "all"} if container and gpus["gpus"] else env  # a container is given the devices that it is to see
        devices = None
        if adapter["devices_args"]:
            devices = engine_probe.parse_devices(engine_probe.ask(run, main_program, adapter["devices_args"], asked)[0])
        elif python and packages and "torch" in packages["packages"]:
            devices = engine_probe.torch_devices(run, python, asked)
        self._check_devices(devices, gpus)
        found = packages["packages"] if packages else {}
        package = (self.install or {}).get("package")
        distribution = {package: engine_installs.package_version(run, package) or ""} if package else {}
        if container:
            distribution = {"image": container["image"]}
        return {
            "engine": self.engine,
            "name": self.name,
            "path": main_program,
            "paths": programs,
            "version": version,
            "env": env,
            "devices": devices,
            "nccl": engine_probe.nccl_version(found),
            "python": {"path": python, "version": packages["python"]} if python and packages else None,
            "versions": {**engine_probe.telling_versions(found), **distribution},
            "packages": {package: entry[0] for package, entry in found.items()},
            "programs_sha256": {program: engine_probe.file_digest(place) for program, place in programs.items()},
            "fingerprint": engine_probe.fingerprint(programs, packages, distribution),
            "install": {"method": self.install["method"]} if self.install else None,
            "container": container,
        }

    def _version(self, program: str, env: t.Mapping[str, str], packages: t.Optional[t.Mapping[str, t.Any]], seen: t.Mapping[str, t.Any]) -> str:
        """As the program says it; as its package does, where the program does not start because the host has no GPU: images of hosts are made on such."""
        try:
            return engine_probe.version(self.module.run_command, program, self.adapter["version_args"], env)
        except engine_probe.ProbeError as error:
            if not self.adapter.get("without_device") or self.adapter["without_device"] not in str(error):
                raise
            package = ((packages or {}).get("packages") or {}).get(self.engine)
            told = seen["drivers_nvidia"].get("message")
            if package and not seen["gpus"] and seen["drivers_nvidia"].get("state") == "no_gpu":
                return str(package[0])
            raise engine_probe.ProbeError(
                "%s. It finds no device%s" % (error, "; the driver: %s" % told if told else ", though the driver shows GPUs: is it a build for this driver?")
            ) from None

    def _check_devices(self, devices: t.Optional[t.List[t.Dict[str, t.Any]]], seen: t.Mapping[str, t.Any]) -> None:
        if devices is None or not self.params["all_gpus"]:
            return
        missing = engine_probe.missing_gpus(devices, seen["gpus"])
        if missing:
            raise engine_probe.ProbeError(
                "it sees %s, and not %s. %sA build without GPU support serves from the CPU; false for %s takes it for profiles without GPUs"
                % (
                    ", ".join("%s (%s)" % (device["name"], device["description"]) for device in devices) or "no devices",
                    ", ".join(missing),
                    "The driver: %s. " % seen["drivers_nvidia"]["message"] if seen["drivers_nvidia"].get("message") else "",
                    engine_probe.option("all_gpus"),
                )
            )

    def _remove_stale(self) -> t.List[str]:
        """Former installs of this name that no revision of a replica starts programs from."""
        keep = self.store.place(self.install)
        unused = [place for place in self.store.stale(keep) if not engine_installs.users(self.root, self.engine, self.name, place)]
        self.actions += ["remove %s" % place for place in unused]
        if unused and not self.module.check_mode:
            with self.store.locked():
                self.store.remove(unused)
        return unused


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


def _address(requirement: str) -> str:
    return requirement.partition("@")[2].strip()


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    for field in ("engine", "name"):
        if not _NAME.match(module.params[field]):
            module.fail_json(
                msg="%s %r: letters, digits, . _ and - are wanted, and a letter or digit first" % (engine_probe.option(field), module.params[field])
            )
    install, path = module.params["install"], module.params["path"]
    downloads.hide(module.no_log_values, *([install["archive"], *map(_address, install["requirements"])] if install else []))
    if module.params["state"] == "present" and not install and not path:
        module.fail_json(
            msg="neither %s nor %s is set: name the directory of a build that is there, or say how to install one"
            % (engine_probe.option("path"), engine_probe.option("install"))
        )
    if install and path and install["method"] != "package":
        module.fail_json(
            msg="%s and %s are both set: a build is either there, or to be installed" % (engine_probe.option("path"), engine_probe.option("install"))
        )
    build = Build(module)
    try:
        (build.present if module.params["state"] == "present" else build.absent)()
    except (engine_probe.ProbeError, engine_installs.InstallError, archives.ArchiveError, downloads.DownloadError) as error:
        module.fail_json(msg="build %s of %s: %s" % (module.params["name"], module.params["engine"], error))
    except OSError as error:
        module.fail_json(msg="%s: %s" % (error.filename or build.record_path, error.strerror or error))


if __name__ == "__main__":
    main()
