# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A secret file that somebody changed, opened, added or took away is seen, and nothing of its content is told."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable

import pytest

from ansible_collections.rankzero.inference.plugins.module_utils import secret_check, shard_records
from ansible_collections.rankzero.inference.plugins.module_utils.revisions import Owner, Revisions

KEY, TIE = "sk-unguessable-0123456789", "ab" * 32


@pytest.fixture
def store(tmp_path: pathlib.Path) -> Revisions:
    one = Revisions(str(tmp_path), "glm")
    launch = {"fingerprint": "f", "rank": 0, "nodes": 2, "secrets": ["api_key", "tie_key"], "tie": {"secret": "tie_key"}}
    one.write("f", {"launch.json": json.dumps(launch)}, {"api_key": KEY, "tie_key": TIE}, Owner(os.geteuid(), os.getegid(), True))
    one.activate("f")
    return one


def seen(store: Revisions) -> list[str]:
    """What node facts say, less the secrets: none may be in there."""
    record = shard_records.read(store.config_root[: -len("/etc/rankzero")], "/proc", lambda *_a, **_k: (1, "", ""))["glm"]
    text, check = json.dumps(record), store.read("f", "secrets/.check")
    assert KEY not in text and TIE not in text and (not check or json.loads(check)["salt"] not in text)
    assert not any(name.startswith("secrets") for name in record["files_sha256"])
    return list(record["secret_problems"])


def key(store: Revisions) -> pathlib.Path:
    return pathlib.Path(store.path("f"), "secrets/api_key")


DAMAGE: list[tuple[Callable[[Revisions], object], str]] = [
    (lambda store: key(store).write_text(KEY + "x"), "secrets/api_key is not what the deploy wrote"),
    (lambda store: key(store).chmod(0o640), "secrets/api_key has mode 0640, not 0600"),
    (lambda store: key(store).parent.chmod(0o755), "secrets has mode 0755, not 0700"),
    (lambda store: key(store).unlink(), "secrets/api_key is gone"),
    (lambda store: key(store).with_name("more").write_text("x"), "secrets/more is none of the deploy's"),
    (lambda store: key(store).with_name("tie_key").write_text(""), "secrets/tie_key is not what the deploy wrote"),
    (lambda store: (key(store).rename(key(store).parent.parent / "moved"), key(store).symlink_to("../moved")), "secrets/api_key is of another kind"),
    (lambda store: key(store).with_name(".check").write_text(""), "cannot be told"),
]


@pytest.mark.parametrize(("damage", "told"), DAMAGE)
def test_what_is_not_as_it_was_written_is_told_and_written_again(store: Revisions, damage: Callable[[Revisions], object], told: str) -> None:
    files = {"launch.json": str(store.read("f", "launch.json"))}
    secrets = {"api_key": KEY, "tie_key": TIE}
    assert seen(store) == [] and store.same("f", files, secrets)
    damage(store)
    assert any(told in text for text in seen(store)), seen(store)
    assert not store.same("f", files, secrets)
    store.write("f", files, secrets, Owner(os.geteuid(), os.getegid(), True))
    assert seen(store) == [] and store.same("f", files, secrets)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_secret_of_another_owner_is_told(store: Revisions) -> None:
    os.chown(key(store), 12345, -1)
    assert seen(store) == ["secrets/api_key belongs to uid 12345, not 0"]


def test_another_key_of_the_tie_is_no_damage(store: Revisions) -> None:
    store.replace_secret("f", "tie_key", "cd" * 32)
    assert seen(store) == [] and store.read("f", "secrets/tie_key") == "cd" * 32
    assert {oct(path.stat().st_mode & 0o777) for path in key(store).parent.iterdir()} == {"0o600"}


def test_the_check_of_equal_secrets_differs_and_a_revision_without_secrets_has_none(tmp_path: pathlib.Path) -> None:
    assert secret_check.content({"a": "x"}) != secret_check.content({"a": "x"})
    assert secret_check.problems(str(tmp_path / "secrets")) == []
