# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Revisions on a real file system below a temporary root, and what the shard module does with them; of systemd only systemctl is replaced."""

from __future__ import annotations

import builtins
import errno
import json
import os
import pathlib
import pwd
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from ansible_collections.rankzero.inference.plugins.module_utils import revisions as revisions_module
from ansible_collections.rankzero.inference.plugins.module_utils import service_managers
from ansible_collections.rankzero.inference.plugins.module_utils.deployment import KEEP_REVISIONS, Deployment, DeploymentError
from ansible_collections.rankzero.inference.plugins.module_utils.revisions import Owner, Revisions
from ansible_collections.rankzero.inference.plugins.module_utils.service_managers import ServiceError, Supervisor, Systemd

ME = Owner(os.geteuid(), os.getegid(), True)
SECRET = "s3cret-key-that-nobody-may-see"
OLD = {"launch.json": '{"rank": 0}\n', "shard.env": "A='1'\n", "run_shard.py": "print(1)\n"}
NEW = {"launch.json": '{"rank": 0, "x": 1}\n', "shard.env": "A='2'\n", "run_shard.py": "print(2)\n"}


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "root with space & $x"


@pytest.fixture
def store(root: pathlib.Path) -> Revisions:
    return Revisions(str(root), "glm")


def modes(directory: str) -> dict[str, int]:
    found = {}
    for folder, folders, names in os.walk(directory):
        for name in folders + names:
            path = os.path.join(folder, name)
            if not os.path.islink(path):
                found[os.path.relpath(path, directory)] = stat.S_IMODE(os.lstat(path).st_mode)
    return found


# ---- revisions


def test_a_revision_is_written_whole_with_its_modes_whatever_the_umask_is(store: Revisions) -> None:
    before = os.umask(0o077)
    try:
        store.write("aaaa", OLD, {"api_key": SECRET}, ME)
        store.prepare_directories(ME)
    finally:
        os.umask(before)
    store.activate("aaaa")
    assert modes(store.directory) == {
        "revisions": 0o755,
        "revisions/aaaa": 0o750,
        "revisions/aaaa/launch.json": 0o640,
        "revisions/aaaa/shard.env": 0o640,
        "revisions/aaaa/run_shard.py": 0o750,
        "revisions/aaaa/secrets": 0o700,
        "revisions/aaaa/secrets/api_key": 0o600,
        "revisions/aaaa/secrets/.check": 0o600,
    }
    assert [stat.S_IMODE(os.stat(path).st_mode) for path in (store.config_root, store.directory, store.state_dir, store.work_dir, store.log_dir)] == [
        0o755,
        0o755,
        0o755,
        0o750,
        0o750,
    ]
    assert store.linked("current") == "aaaa" and store.linked("previous") is None
    assert os.readlink(store.directory + "/current") == "revisions/aaaa"
    assert store.same("aaaa", OLD, {"api_key": SECRET})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_service_user_can_read_its_configuration_and_change_none_of_it(store: Revisions) -> None:
    nobody = pwd.getpwnam("nobody")
    store.write("aaaa", OLD, {"api_key": SECRET}, Owner(nobody.pw_uid, nobody.pw_gid, False))
    store.prepare_directories(Owner(nobody.pw_uid, nobody.pw_gid, False))
    for path in (store.path("aaaa"), store.path("aaaa") + "/shard.env"):
        assert (os.stat(path).st_uid, os.stat(path).st_gid) == (0, nobody.pw_gid)
    for path in (store.path("aaaa") + "/secrets", store.path("aaaa") + "/secrets/api_key"):
        assert (os.stat(path).st_uid, os.stat(path).st_gid) == (0, 0)
    assert os.stat(store.work_dir).st_uid == os.stat(store.state_dir).st_uid == nobody.pw_uid


def tamper_text(store: Revisions) -> None:
    pathlib.Path(store.path("aaaa"), "shard.env").write_text("A='9'\n")


def tamper_newlines(store: Revisions) -> None:
    pathlib.Path(store.path("aaaa"), "shard.env").write_bytes(b"A='1'\r\n")


def tamper_bytes(store: Revisions) -> None:
    pathlib.Path(store.path("aaaa"), "shard.env").write_bytes(b"\xff")


def tamper_extra(store: Revisions) -> None:
    pathlib.Path(store.path("aaaa"), "more.py").write_text("")


def tamper_missing(store: Revisions) -> None:
    os.unlink(store.path("aaaa") + "/launch.json")


def tamper_secret(store: Revisions) -> None:
    pathlib.Path(store.path("aaaa"), "secrets/api_key").write_text("other")


def tamper_extra_secret(store: Revisions) -> None:
    pathlib.Path(store.path("aaaa"), "secrets/other").write_text("other")


def tamper_secret_mode(store: Revisions) -> None:
    os.chmod(store.path("aaaa") + "/secrets/api_key", 0o644)


def tamper_directory_mode(store: Revisions) -> None:
    os.chmod(store.path("aaaa") + "/secrets", 0o755)


def tamper_file_mode(store: Revisions) -> None:
    os.chmod(store.path("aaaa") + "/run_shard.py", 0o777)


def tamper_link(store: Revisions) -> None:
    path = pathlib.Path(store.path("aaaa"), "shard.env")
    path.rename(pathlib.Path(store.directory, "elsewhere"))
    path.symlink_to("../../elsewhere")


@pytest.mark.parametrize(
    "tamper",
    [
        tamper_text,
        tamper_newlines,
        tamper_bytes,
        tamper_extra,
        tamper_missing,
        tamper_secret,
        tamper_extra_secret,
        tamper_secret_mode,
        tamper_directory_mode,
        tamper_file_mode,
        tamper_link,
    ],
)
def test_tampering_is_seen_and_written_over(store: Revisions, tamper: Callable[[Revisions], None]) -> None:
    store.write("aaaa", OLD, {"api_key": SECRET}, ME)
    assert store.same("aaaa", OLD, {"api_key": SECRET}) and not store.same("aaaa", OLD, {}) and not store.same("bbbb", OLD, {})
    tamper(store)
    assert not store.same("aaaa", OLD, {"api_key": SECRET})
    store.write("aaaa", OLD, {"api_key": SECRET}, ME)
    assert store.same("aaaa", OLD, {"api_key": SECRET}) and store.known() == ["aaaa"]


def complete(store: Revisions, fingerprint: str | None) -> bool:
    """Whether a link's target is one of the two whole revisions."""
    return fingerprint is not None and (store.same(fingerprint, OLD, {"api_key": SECRET}) or store.same(fingerprint, NEW, {"api_key": SECRET}))


STEPS = ("mkdir", "rename", "open", "symlink", "chmod", "fchmod", "fsync")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("step", STEPS)
def test_a_failure_at_any_step_leaves_old_or_new(store: Revisions, monkeypatch: pytest.MonkeyPatch, step: str, number: int) -> None:
    """The n-th call of one system call fails, for every n until none is left to fail."""
    real = getattr(os, step)
    store.write("old", OLD, {"api_key": SECRET}, ME)
    store.activate("old")
    for fail_at in range(100):
        calls = 0

        def failing(*args: Any, **more: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == fail_at + 1:
                raise OSError(number, os.strerror(number), args[0] if isinstance(args[0], str) else None)
            return real(*args, **more)

        with monkeypatch.context() as patch:
            patch.setattr(os, step, failing)
            try:
                store.write("new", NEW, {"api_key": SECRET}, ME)
                store.activate("new")
                failed = False
            except OSError as error:
                failed = True
                assert error.errno == number
        assert complete(store, store.linked("current")), (step, fail_at)
        assert set(store.known()) <= {"old", "new"} and all(complete(store, name) for name in store.known())
        if not failed:
            break
        store.write("new", NEW, {"api_key": SECRET}, ME)  # the next run finishes it
        store.activate("new")
        assert (store.linked("current"), store.linked("previous")) == ("new", "old")
        store.activate("old")
        store.forget("new")
    else:
        pytest.fail("never went through")
    assert fail_at > 0 and store.linked("current") == "new"


@pytest.mark.parametrize("fail_at", [1, 2])
def test_writing_over_a_damaged_current_revision_never_loses_it(store: Revisions, monkeypatch: pytest.MonkeyPatch, fail_at: int) -> None:
    store.write("aaaa", OLD, {}, ME)
    store.activate("aaaa")
    tamper_text(store)
    real, calls = os.rename, []

    def failing(*args: Any) -> None:
        calls.append(args)
        if len(calls) == fail_at:
            raise OSError(errno.EIO, "Input/output error", args[0])
        real(*args)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="Input/output"):
        patch.setattr(os, "rename", failing)
        store.write("aaaa", OLD, {}, ME)
    assert store.read(store.linked("current"), "launch.json") == OLD["launch.json"] and store.read("aaaa", "shard.env") == "A='9'\n"
    assert [name for name in os.listdir(store.directory + "/revisions") if name.startswith(".")] == []


def test_a_full_disk_names_the_file(store: Revisions, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream's own error has no file name (as on a real full disk: /dev/full)."""
    real = builtins.open
    with pytest.raises(OSError) as plain, real("/dev/full", "w") as stream:
        stream.write("x")
        stream.flush()
    assert plain.value.filename is None
    real_fdopen = os.fdopen

    def full(descriptor: int, *args: Any, **more: Any) -> Any:
        os.dup2(os.open("/dev/full", os.O_WRONLY), descriptor)
        return real_fdopen(descriptor, *args, **more)

    monkeypatch.setattr(os, "fdopen", full)
    with pytest.raises(OSError) as caught:
        store.write("aaaa", OLD, {}, ME)
    assert caught.value.errno == errno.ENOSPC and caught.value.filename.startswith(store.directory) and caught.value.strerror == "No space left on device"


def test_pruning_keeps_the_newest_and_what_is_linked(store: Revisions) -> None:
    for number, name in enumerate("abcdef"):
        store.write(name, OLD, {}, ME)
        os.utime(store.path(name), (number, number))
    store.activate("a")
    store.activate("b")
    os.mkdir(store.directory + "/revisions/.new-x")
    pathlib.Path(store.directory, "revisions", "a file").write_text("")
    assert store.known() == list("abcdef")
    store.prune(2)
    assert store.known() == ["a", "b", "e", "f"] and not os.path.exists(store.directory + "/revisions/.new-x")
    store.prune(0)
    assert store.known() == ["a", "b"]


def test_forgetting_the_previous_revision_leaves_a_way_back(store: Revisions) -> None:
    for number, name in enumerate(("a", "b", "c")):
        store.write(name, OLD, {}, ME)
        os.utime(store.path(name), (number, number))
        store.activate(name)
    store.activate("b")  # c failed, b was restored
    store.forget("c")
    assert (store.linked("current"), store.linked("previous")) == ("b", "a") and store.known() == ["a", "b"]
    store.forget("b")
    assert store.linked("current") is None
    store.forget(None)


def test_damaged_state_and_links_are_no_traceback(store: Revisions) -> None:
    assert store.state() == {} and store.known() == [] and store.linked("current") is None and store.read(None, "x") is None and store.present() == []
    store.prepare_directories(ME)
    for text in ("", "[]", "{", "\udcff"):
        pathlib.Path(store.state_dir, "state.json").write_text(text, errors="surrogateescape")
        assert store.state() == {}
    store.clear_ready()
    pathlib.Path(store.state_dir, "ready.json").write_text("{}")
    store.clear_ready()
    assert not os.path.exists(store.state_dir + "/ready.json")


# ---- the module's states


class Systemctl:
    """As much of systemd as the module asks: what it has read, what is enabled, what is active."""

    def __init__(self, unit_directory: pathlib.Path) -> None:
        self.directory = unit_directory
        self.read: dict[str, str] = {}
        self.enabled: set[str] = set()
        self.active: set[str] = set()
        self.calls: list[str] = []
        self.refuse = ""

    def __call__(self, words: list[str], **_more: Any) -> tuple[int, str, str]:
        assert words[0] == "systemctl", words
        self.calls.append(" ".join(words[1:]))
        if self.refuse and self.refuse in words:
            return 1, "", "Access denied"
        verb = words[1]
        unit = next((word for word in words if word.endswith(".service")), "")
        if verb == "daemon-reload":
            self.read = {path.name: path.read_text() for path in self.directory.iterdir()}
        elif verb == "show" and words[-2:] == ["ActiveState", "--value"]:
            return 0, "active\n" if unit in self.active else "inactive\n", ""
        elif verb == "show":
            path = self.directory / unit
            fresh = path.exists() and self.read.get(unit) == path.read_text()
            return (
                0,
                "NeedDaemonReload=%s\nLoadState=%s\nUnitFileState=%s\n"
                % (
                    "no" if fresh or unit not in self.read else "yes",
                    "loaded" if unit in self.read else "not-found",
                    "enabled" if unit in self.enabled else "disabled",
                ),
                "",
            )
        elif verb == "enable":
            self.enabled.add(unit)
        elif verb == "disable":
            self.enabled.discard(unit)
        elif verb == "restart":
            assert self.read.get(unit) == (self.directory / unit).read_text(), "restarted with a unit that systemd has not read"
            self.active.add(unit)
        elif verb == "stop":
            self.active.discard(unit)
        return 0, "", ""


@pytest.fixture
def systemctl(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Systemctl:
    directory = tmp_path / "units"
    directory.mkdir()
    monkeypatch.setattr(service_managers, "UNIT_DIR", str(directory))
    return Systemctl(directory)


USER = pwd.getpwuid(os.geteuid()).pw_name
UNIT = "inference-glm.service"


def files(root: pathlib.Path, texts: dict[str, str], number: int = 1) -> dict[str, str]:
    return {**texts, UNIT: "[Service]\n# %d\nExecStart=python3 %s/etc/rankzero/glm/current/run_shard.py\n" % (number, root)}


def deployment(root: pathlib.Path, run: Any, check: bool = False, **params: Any) -> Deployment:
    return Deployment(
        {
            "replica": "glm",
            "replica_root": str(root),
            "user": USER,
            "supervisord": None,
            "force_restart": False,
            "unit_name": UNIT,
            "manager": "systemd",
            **params,
        },
        run,
        check,
    )


def deploy(root: pathlib.Path, run: Any, fingerprint: str, texts: dict[str, str], number: int = 1, **params: Any) -> Deployment:
    found = deployment(root, run, fingerprint=fingerprint, files=files(root, texts, number), secrets={"api_key": SECRET}, **params)
    found.present()
    return found


def runs(root: pathlib.Path, fingerprint: str) -> None:
    """What run_shard.py writes."""
    state = root / "run/rankzero/glm"
    state.mkdir(parents=True, exist_ok=True)
    (state / "state.json").write_text(json.dumps({"fingerprint": fingerprint, "stage": "running"}))
    (state / "ready.json").write_text("{}")


def test_present_goes_from_nothing_to_a_running_service_and_then_does_nothing(root: pathlib.Path, systemctl: Systemctl) -> None:
    plan = deployment(root, systemctl, check=True, fingerprint="aaaa", files=files(root, OLD), secrets={"api_key": SECRET})
    plan.present()
    assert not root.exists() and systemctl.active == set()
    done = deploy(root, systemctl, "aaaa", OLD)
    assert (
        plan.actions
        == done.actions
        == ["write revision aaaa", "switch current to revision aaaa", "install %s/%s" % (systemctl.directory, UNIT), "restart the service (systemd)"]
    )
    assert plan.diffs == done.diffs and SECRET not in json.dumps(done.diffs)
    assert systemctl.active == systemctl.enabled == {UNIT} and stat.S_IMODE((systemctl.directory / UNIT).stat().st_mode) == 0o644
    runs(root, "aaaa")
    assert deploy(root, systemctl, "aaaa", OLD).actions == [] and (root / "run/rankzero/glm/ready.json").exists()


def test_a_change_is_shown_but_for_the_secret_and_the_programs(root: pathlib.Path, systemctl: Systemctl) -> None:
    deploy(root, systemctl, "aaaa", OLD)
    done = deployment(root, systemctl, fingerprint="bbbb", files=files(root, NEW), secrets={"api_key": "another-" + SECRET})
    done.present()
    shown = {pathlib.Path(entry["after_header"]).name: (entry["before"], entry["after"]) for entry in done.diffs}
    assert shown["shard.env"] == (OLD["shard.env"], NEW["shard.env"]) and shown["api_key"] == ("(secret)\n", "(secret, changed)\n")
    assert shown["run_shard.py"] == ("(program)\n", "(program, changed)\n") and UNIT not in shown
    assert SECRET not in json.dumps(done.diffs)


def test_a_forced_restart_and_a_stopped_service_only_restart(root: pathlib.Path, systemctl: Systemctl) -> None:
    deploy(root, systemctl, "aaaa", OLD)
    runs(root, "aaaa")
    assert deploy(root, systemctl, "aaaa", OLD, force_restart=True).actions == ["restart the service (systemd)"]
    assert not (root / "run/rankzero/glm/ready.json").exists()
    runs(root, "aaaa")
    systemctl.active.clear()
    assert deploy(root, systemctl, "aaaa", OLD).actions == ["restart the service (systemd)"]


@pytest.mark.parametrize("refuse", ["daemon-reload", "enable", "restart"])
def test_an_interruption_inside_of_systemd_is_finished_by_the_next_run(root: pathlib.Path, systemctl: Systemctl, refuse: str) -> None:
    deploy(root, systemctl, "aaaa", OLD)
    runs(root, "aaaa")
    systemctl.enabled.clear()
    systemctl.refuse = refuse
    with pytest.raises(ServiceError, match="systemctl %s.*ended with 1: Access denied" % refuse):
        deploy(root, systemctl, "bbbb", NEW, 2)
    systemctl.refuse = ""
    deploy(root, systemctl, "bbbb", NEW, 2)
    assert systemctl.read[UNIT] == files(root, NEW, 2)[UNIT] and systemctl.enabled == systemctl.active == {UNIT}


def test_only_three_revisions_stay(root: pathlib.Path, systemctl: Systemctl) -> None:
    for number in range(6):
        deploy(root, systemctl, "r%d" % number, {**OLD, "shard.env": "A='%d'\n" % number})
    store = Revisions(str(root), "glm")
    assert len(store.known()) == KEEP_REVISIONS and (store.linked("current"), store.linked("previous")) == ("r5", "r4")


def test_restored_brings_the_revision_back_with_its_unit(root: pathlib.Path, systemctl: Systemctl) -> None:
    deploy(root, systemctl, "aaaa", OLD, 1)
    deploy(root, systemctl, "bbbb", NEW, 2)
    back = deployment(root, systemctl, state="restored", fingerprint="aaaa", failed_fingerprint="bbbb")
    back.restored()
    store = Revisions(str(root), "glm")
    assert store.known() == ["aaaa"] and (store.linked("current"), store.linked("previous")) == ("aaaa", None)
    assert systemctl.read[UNIT] == files(root, OLD, 1)[UNIT] and UNIT in systemctl.active
    assert "restart the service (systemd)" in back.actions
    again = deployment(root, systemctl, fingerprint="aaaa", failed_fingerprint="bbbb")
    again.restored()
    assert again.actions == []
    with pytest.raises(DeploymentError, match="revision gone is no longer on this host; known: aaaa"):
        deployment(root, systemctl, fingerprint="gone").restored()


def test_what_was_proven_once_stays_and_is_the_way_back(root: pathlib.Path, systemctl: Systemctl) -> None:
    """However many deploys in a row are interrupted, `previous` is what served last, and no pruning takes it."""
    store = Revisions(str(root), "glm")
    deploy(root, systemctl, "good", OLD)
    store.mark_proven("good", 1.0)
    for number in range(5):
        deploy(root, systemctl, "r%d" % number, {**OLD, "shard.env": "A='%d'\n" % number})
        assert (store.linked("current"), store.linked("previous")) == ("r%d" % number, "good") and len(store.known()) <= KEEP_REVISIONS
    deployment(root, systemctl, fingerprint="good", failed_fingerprint="r4").restored()
    assert (store.linked("current"), store.is_proven("good")) == ("good", True) and "r4" not in store.known()

    deploy(root, systemctl, "better", NEW)
    store.mark_proven("better", 2.0)
    assert store.linked("previous") == "good"
    deployment(root, systemctl, fingerprint="good", failed_fingerprint="better").restored()
    assert store.linked("previous") == "better", "it served once: failing now is no reason to remove it"

    (root / "etc/rankzero/glm/revisions/good/shard.env").write_text("damaged")
    deploy(root, systemctl, "good", OLD)
    assert store.read("good", "shard.env") == OLD["shard.env"] and store.is_proven("good"), "what is written anew is what was proven"


def test_restored_with_another_key_of_the_tie_starts_with_it(root: pathlib.Path, systemctl: Systemctl) -> None:
    done = deployment(root, systemctl, fingerprint="aaaa", files=files(root, OLD), secrets={"tie_key": "0" * 64})
    done.present()
    runs(root, "aaaa")
    for expected in (["give revision aaaa the ranks' new key", "restart the service (systemd)"], []):
        back = deployment(root, systemctl, fingerprint="aaaa", secrets={"tie_key": "1" * 64})
        back.restored()
        assert back.actions == expected
        runs(root, "aaaa")
    assert Revisions(str(root), "glm").read("aaaa", "secrets/tie_key") == "1" * 64


def test_restored_to_nothing_and_absent_leave_nothing(root: pathlib.Path, systemctl: Systemctl) -> None:
    other = root / "etc/rankzero/other/revisions"
    for undo in ("restored", "absent"):
        deploy(root, systemctl, "aaaa", OLD)
        checked = deployment(root, systemctl, check=True, fingerprint=None, failed_fingerprint="aaaa")
        getattr(checked, undo)()
        assert systemctl.active == {UNIT} and (root / "etc/rankzero/glm/current").exists()
        done = deployment(root, systemctl, fingerprint=None, failed_fingerprint="aaaa")
        getattr(done, undo)()
        assert done.actions == checked.actions and done.actions[:2] == ["stop the service (systemd)", "remove %s/%s" % (systemctl.directory, UNIT)]
        assert not list(systemctl.directory.iterdir()) and systemctl.active == systemctl.enabled == set()
        assert [path for path in root.rglob("*") if "rankzero" in path.parts] == []
        again = deployment(root, systemctl, fingerprint=None)
        again.absent()
        assert again.actions == []
    other.mkdir(parents=True)
    deploy(root, systemctl, "aaaa", OLD)
    deployment(root, systemctl).absent()
    assert other.is_dir()


def test_a_unit_of_another_root_is_not_ours_to_touch(root: pathlib.Path, tmp_path: pathlib.Path, systemctl: Systemctl) -> None:
    deploy(tmp_path / "other", systemctl, "aaaa", OLD)
    deployment(root, systemctl).absent()
    assert UNIT in systemctl.active
    with pytest.raises(DeploymentError, match="deploy it first"):
        deployment(root, systemctl).restarted()
    deployment(tmp_path / "other", systemctl).restarted()
    deployment(tmp_path / "other", systemctl).stopped()
    assert systemctl.active == set()


def test_damaged_units_are_written_again(root: pathlib.Path, systemctl: Systemctl) -> None:
    deploy(root, systemctl, "aaaa", OLD)
    (systemctl.directory / UNIT).write_bytes(b"\xff" + files(root, OLD)[UNIT].encode())
    manager = Systemd("glm", systemctl)
    assert manager.read() not in (None, files(root, OLD)[UNIT])
    deploy(root, systemctl, "aaaa", OLD)
    assert manager.read() == files(root, OLD)[UNIT]


# ---- processes and supervisor, for real

MARKED = "import os, time; os.environ; time.sleep(60)"


def test_absent_ends_the_processes_with_our_marker_and_no_other(root: pathlib.Path, systemctl: Systemctl) -> None:
    deploy(root, systemctl, "aaaa", {**OLD, "launch.json": '{"rank": 3}\n'})
    home, elsewhere = "%s/var/lib/rankzero/glm" % root, "/other/root/var/lib/rankzero/glm"
    start = [
        subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(60)"], env={**os.environ, "RANKZERO_SHARD": marker, "HOME": where}, stdout=subprocess.DEVNULL
        )
        for marker, where in (("glm/3/0123456789abcdef", home), ("glm/3/0123456789abcdef", elsewhere), ("glm-2/3/0123456789abcdef", home))
    ]
    try:
        done = deployment(root, systemctl)
        done.absent()
        assert "end 1 processes that carry the replica's marker" in done.actions
        assert start[0].wait(5) == -signal.SIGTERM and start[1].poll() is None and start[2].poll() is None
    finally:
        for process in start:
            process.kill()
            process.wait()


def run_for_real(words: list[str], **_more: Any) -> tuple[int, str, str]:
    if words[0] == "systemctl":
        return 4, "", "no systemd here"
    done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
    return done.returncode, done.stdout, done.stderr


def test_supervisord_is_started_found_by_its_pid_file_and_ended(tmp_path: pathlib.Path) -> None:
    root = tmp_path / "r"
    program = str(pathlib.Path(sys.executable).parent / "supervisord")
    store = Revisions(str(root), "glm")
    configuration = "[supervisord]\nlogfile=%s/log\npidfile=%s/supervisord.pid\n" % (store.log_dir, store.state_dir)
    texts = {**OLD, "supervisord.conf": configuration}
    params = {"manager": "supervisor", "unit_name": "supervisord.conf", "supervisord": program, "fingerprint": "aaaa", "files": texts}
    found = deployment(root, run_for_real, **params)
    found.present()
    manager = Supervisor(store.directory, store.state_dir, program, run_for_real)
    deadline = time.monotonic() + 5
    while not manager.active() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert manager.active() and stat.S_IMODE(os.stat(manager.path).st_mode) == 0o640
    deployment(root, run_for_real, **params).stopped()
    assert not manager.active()
    gone = deployment(root, run_for_real, **params)
    gone.absent()
    assert not (root / "etc/rankzero").exists()


def test_without_supervisord_the_text_says_what_to_do(root: pathlib.Path) -> None:
    with pytest.raises(ServiceError, match="pip install supervisor"):
        deploy(root, run_for_real, "aaaa", {**OLD, "supervisord.conf": "x"}, manager="supervisor", unit_name="supervisord.conf")


def test_a_service_user_is_made_once_and_removed_with_the_last_replica(root: pathlib.Path, systemctl: Systemctl, monkeypatch: pytest.MonkeyPatch) -> None:
    """useradd and userdel are replaced: a test makes no users."""
    users: dict[str, Any] = {}
    me = pwd.getpwuid(os.geteuid())
    commands = []

    def run(words: list[str], **more: Any) -> tuple[int, str, str]:
        if words[0] == "useradd":
            commands.append(words)
            users[words[-1]] = me
            return 0, "", ""
        if words[0] == "userdel":
            commands.append(words)
            return (8, "", "user rz is currently used by process 77") if users[words[-1]] is None else (0, str(users.pop(words[-1])), "")
        return systemctl(words, **more)

    monkeypatch.setattr(
        "ansible_collections.rankzero.inference.plugins.module_utils.deployment._user", lambda name: (users[name] or me) if name in users else None
    )
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "chown", lambda *_args: None)
    for _time in range(2):
        deploy(root, run, "aaaa", OLD, user="rz")
    assert [words[0] for words in commands] == ["useradd"] and json.loads((root / "etc/rankzero/made_users.json").read_text()) == ["rz"]
    users["rz"] = None
    with pytest.raises(DeploymentError, match="userdel rz ended with 8: user rz is currently used by process 77"):
        deployment(root, run).absent()
    users["rz"] = me
    deployment(root, run).absent()
    assert commands[-1] == ["userdel", "rz"] and not (root / "etc/rankzero").exists()
    assert revisions_module.SECRETS == "secrets"
