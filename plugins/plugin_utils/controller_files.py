# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Files that are left on the controller for a person: readable by whoever ran Ansible, and by nobody else."""

from __future__ import annotations

import hashlib
import os
import stat
import typing as t
from collections.abc import Callable

from ansible.errors import AnsibleActionFail, AnsibleError


def place(path: str) -> str:
    """The absolute path, relative to where Ansible was started, with its directory made. Raises AnsibleActionFail where that is not possible."""
    target = os.path.abspath(os.path.expanduser(path))
    try:
        os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
    except OSError as error:
        raise AnsibleActionFail("%s cannot be made: %s" % (os.path.dirname(target), error.strerror or error)) from error
    return target


def is_here(source: str) -> bool:
    """Whether the source of a model is a path on the controller, and neither an address nor a repository of Hugging Face."""
    return "://" not in source and not source.startswith("hf:")


def find(path: str, search: Callable[[str], t.Any]) -> str:
    """What a person means by a path: from where Ansible was started, as for every output; else as C(search) finds it, which knows roles and playbooks.

    Raises AnsibleActionFail where it is nowhere.
    """
    here = os.path.abspath(os.path.expanduser(path))
    if os.path.exists(here):
        return here
    try:
        return str(search(path))
    except AnsibleError:
        raise AnsibleActionFail("there is no file or directory %s on the controller, neither in %s nor beside the playbook" % (path, os.getcwd())) from None


def regular(path: str, field: str, most: int | None = None) -> str:
    """The path of a plain file of at most C(most) bytes. Raises AnsibleActionFail for others: a FIFO would never end, nor would a device."""
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        raise AnsibleActionFail("%s: %s cannot be read: %s" % (field, path, getattr(error, "strerror", None) or error)) from error
    if not stat.S_ISREG(status.st_mode):
        raise AnsibleActionFail("%s: %s is %s, and a file is wanted" % (field, path, "a directory" if stat.S_ISDIR(status.st_mode) else "no plain file"))
    if most is not None and status.st_size > most:
        raise AnsibleActionFail("%s: %s has %d bytes, and at most %d are wanted" % (field, path, status.st_size, most))
    return path


def open_private(target: str) -> int:
    """A descriptor of a new file with mode 0600; what was there under this name goes. A link is not followed."""
    try:
        if os.path.lexists(target):
            os.unlink(target)
        return os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise AnsibleActionFail("%s cannot be written: %s" % (target, error.strerror or error)) from error


def write_private(path: str, text: str) -> str:
    """Write a text file of mode 0600 and return its absolute path."""
    target = place(path)
    with os.fdopen(open_private(target), "w", encoding="utf-8") as stream:
        stream.write(text)
    return target


def shared_text(path: str, make: Callable[[], str]) -> str:
    """A text that all forks of one run of Ansible share: whichever comes first makes it. C(path) is in the directory of that run, with which it goes."""
    draft = "%s.%d" % (path, os.getpid())
    with os.fdopen(open_private(draft), "w", encoding="utf-8") as stream:
        stream.write(make())
    try:
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        os.unlink(draft)
    with open(path, encoding="utf-8") as stream:
        return stream.read()


def shared_token(folder: str, topic: str) -> str:
    """A random text for one purpose of one run."""
    return shared_text(os.path.join(folder, "rankzero-token-" + hashlib.sha256(topic.encode()).hexdigest()[:16]), lambda: os.urandom(16).hex())
