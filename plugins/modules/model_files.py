#!/usr/bin/python
# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: model_files
short_description: Fetch a model or an adapter to its path, whole or not at all
version_added: 0.1.0
description:
  - Brings the files of a model or a LoRA adapter to a path on the host, from an http(s) address with its checksum, a repository of Hugging Face at
    a pinned revision, or the controller. A broken transfer is gone on from, also by a later run.
  - The path takes its name when its content is whole and checked. What is there under another content is never touched.
  - With O(state=absent) it removes what a fetch has brought, unless a kept revision of a replica on the host names it, something in it, or the model
    that it is a part of. Hosts that share the storage are not asked.
  - Nothing needs to be installed on the host but for Hugging Face, where the C(huggingface_hub) of a registered engine build is used.
author:
  - The rankzero.inference authors (@rankzero)
options:
  path:
    description: Where the file or directory is to be.
    type: path
    required: true
  source:
    description:
      - An C(http://) or C(https://) address of a file, or of an archive (tar, tar.gz, tar.xz, tar.bz2, zip), which is unpacked.
      - C(hf://ORGANISATION/NAME), a repository of Hugging Face.
      - Anything else is a file or directory on the controller.
      - Required with O(state=present).
    type: str
  state:
    description:
      - V(absent) removes the content and what a broken fetch has left beside it. A directory must have the note of a fetch, and of a file O(sha256) must
        say which content is meant; what nobody fetched is never removed.
    type: str
    choices: [present, absent]
    default: present
  sha256:
    description:
      - Of what an address sends, where it is required; otherwise of the content. For a directory that is what
        C(find . -type f ! -name .rankzero.json -printf '%P\n' | LC_ALL=C sort | xargs -d '\n' sha256sum | sha256sum) prints in it.
    type: str
  revision:
    description: The commit of a repository of Hugging Face, 40 hexadecimal digits. Required with it.
    type: str
  files:
    description: Patterns of the files to fetch of a repository of Hugging Face, all of them by default.
    type: list
    elements: str
    default: []
  token:
    description: Token for the address, or for Hugging Face. It is in no argument and no file.
    type: str
  endpoint:
    description: Address of a mirror of Hugging Face.
    type: str
  python:
    description: Interpreter on the host that has C(huggingface_hub). By default that of a registered build, of O(engine) first.
    type: path
  engine:
    description: The engine whose builds are looked at first.
    type: str
  replica_root:
    description: The builds are registered below this directory.
    type: path
    default: /
  transferred:
    description: Filled in by the action plugin; not for playbooks.
    type: dict
    default: {}
attributes:
  action:
    support: full
    description: An action plugin of the same name sends what is on the controller, when it is needed.
  check_mode:
    support: full
    description: Says whether it would be fetched.
  diff_mode:
    support: none
    description: Models have no lines.
seealso:
  - module: rankzero.inference.node_facts
"""

EXAMPLES = r"""
- name: Fetch an adapter from a server of files
  rankzero.inference.model_files:
    path: /adapters/sql-3
    source: https://files.example.com/adapters/sql-3.tar.gz
    sha256: 0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef

- name: Fetch a model from Hugging Face at one commit
  rankzero.inference.model_files:
    path: /models/glm
    source: hf://example/glm
    revision: 0123456789abcdef0123456789abcdef01234567
    token: "{{ vault_hf_token }}"

- name: Send an adapter from the controller
  rankzero.inference.model_files:
    path: /adapters/fix-1
    source: adapters/fix-1

- name: Remove an adapter that no replica needs any more
  rankzero.inference.model_files:
    path: /adapters/sql-2
    state: absent
"""

RETURN = r"""
path:
  description: Where it is.
  returned: success
  type: str
  sample: /adapters/sql-3
content_sha256:
  description: Checksum of the content, by which ranks are compared.
  returned: when it was fetched
  type: str
  sample: 0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef
"""

import typing as t

# For its effect on every import behind it, so it has no other use: docs/decisions/0013-modules-are-compiled-once.md
from ansible_collections.rankzero.inference.plugins.module_utils import compile_once  # noqa: F401  # pylint: disable=unused-import

# isort: split
from ansible.module_utils.basic import AnsibleModule

from ansible_collections.rankzero.inference.plugins.module_utils import archives, downloads, engine_builds, model_fetch, models

ARGUMENTS: t.Dict[str, t.Any] = {
    "path": {"type": "path", "required": True},
    "source": {"type": "str", "no_log": True},
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "sha256": {"type": "str"},
    "revision": {"type": "str"},
    "files": {"type": "list", "elements": "str", "default": []},
    "token": {"type": "str", "no_log": True},
    "endpoint": {"type": "str"},
    "python": {"type": "path"},
    "engine": {"type": "str"},
    "replica_root": {"type": "path", "default": "/"},
    "transferred": {"type": "dict", "default": {}},  # {needed: true} where the controller has it, {archive: path} when it was sent
}


def remove(module: AnsibleModule) -> None:
    path = module.params["path"]
    model_fetch.check_path(path)
    known = module.params["sha256"] or None, module.params["replica_root"]
    found = model_fetch.check_removal(path, *known)
    if found and not module.check_mode:
        model_fetch.remove(path, *known)
    module.exit_json(changed=found, path=path)


def run(module: AnsibleModule) -> None:
    params = module.params
    if params["state"] == "absent":
        remove(module)
    wanted = model_fetch.Wanted(
        path=params["path"],
        source=params["source"],
        sha256=params["sha256"] or None,
        revision=params["revision"] or None,
        files=tuple(params["files"]),
        token=params["token"] or None,
        python=params["python"] or model_fetch.interpreter(engine_builds.read(params["replica_root"]), params["engine"]),
        endpoint=params["endpoint"] or None,
    )
    model_fetch.check(wanted)
    if model_fetch.is_there(wanted):
        if not module.check_mode:
            model_fetch.sweep(wanted.path)
        module.exit_json(changed=False, path=wanted.path)
    if module.check_mode:
        module.exit_json(changed=True, path=wanted.path)
    if params["transferred"].get("needed") and not params["transferred"].get("archive"):
        module.exit_json(changed=False, path=wanted.path, needs_transfer=True)
    model_fetch.fetch(wanted, module.run_command, params["transferred"].get("archive"))
    module.exit_json(changed=True, path=wanted.path, content_sha256=models.describe(wanted.path, checksum=True)["content_sha256"])


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, required_if=[("state", "present", ["source"])], supports_check_mode=True)
    downloads.hide(module.no_log_values, module.params["source"] or "")
    try:
        run(module)
    except (model_fetch.FetchError, downloads.DownloadError, archives.ArchiveError) as error:
        module.fail_json(msg="%s: %s" % (module.params["path"], error))
    except OSError as error:
        module.fail_json(msg="%s: %s" % (error.filename or module.params["path"], error.strerror or error))


if __name__ == "__main__":
    main()
