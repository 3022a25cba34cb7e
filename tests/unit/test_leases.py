# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lock of a replica on a real file system, between real processes; and who a run of Ansible is."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import stat
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from ansible import constants as C

from ansible_collections.rankzero.inference.plugins.module_utils import leases
from ansible_collections.rankzero.inference.plugins.module_utils.leases import Held, Lease
from ansible_collections.rankzero.inference.plugins.plugin_utils import run_identity

COLLECTIONS = pathlib.Path(leases.__file__).parents[5]


def lease(root: pathlib.Path, owner: str, **more: Any) -> Lease:
    return Lease(str(root), "glm", {"owner": owner, "who": f"{owner}@control", **more})


def path(root: pathlib.Path) -> pathlib.Path:
    return root / "run/rankzero/glm.lock"


def done(one: Lease) -> None:
    """What the end of a process does."""
    os.close(one._descriptor)
    one._descriptor = None


def test_a_lock_is_taken_shown_given_up_and_leaves_nothing(tmp_path: pathlib.Path) -> None:
    before = os.umask(0o077)
    try:
        mine = lease(tmp_path, "a", target="f00d")
        assert mine.take()
    finally:
        os.umask(before)
    assert stat.S_IMODE(path(tmp_path).stat().st_mode) == 0o600 and stat.S_IMODE(path(tmp_path).parent.stat().st_mode) == 0o755
    shown = next(iter(leases.read(str(tmp_path)).values()))
    assert (shown["owner"], shown["who"], shown["target"], shown["live"], shown["busy"]) == ("a", "a@control", "f00d", True, True)
    mine.keep()
    mine.release()
    assert list((tmp_path / "run").iterdir()) == [] and leases.read(str(tmp_path)) == {}
    assert lease(tmp_path, "").take(), "without an owner nothing is locked"
    assert not path(tmp_path).exists()


def test_between_the_calls_of_a_run_another_one_is_refused_until_the_lease_is_over(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = lease(tmp_path, "a")
    first.take()
    done(first)
    with pytest.raises(Held, match=r"replica glm is being changed by a@control since \S+Z; its lock lasts until \S+Z.*Nothing was changed"):
        lease(tmp_path, "b").take()
    again = lease(tmp_path, "a")
    assert again.take(), "the next call of the same run"
    done(again)

    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    monkeypatch.setattr(leases, "_clock", lambda: now + leases.LEASE_SECONDS - 1)
    Lease(str(tmp_path), "glm", {"owner": "b"}).renew()
    Lease(str(tmp_path), "glm", {"owner": "a"}).renew()
    monkeypatch.setattr(leases, "_clock", lambda: now + leases.LEASE_SECONDS + 1)
    with pytest.raises(Held):
        lease(tmp_path, "b").take()
    assert leases.read(str(tmp_path))["glm"]["who"] == "a@control", "renewing keeps what is told"
    monkeypatch.setattr(leases, "_clock", lambda: now + 2 * leases.LEASE_SECONDS)
    assert leases.read(str(tmp_path))["glm"]["live"] is False
    assert lease(tmp_path, "b").take()


def test_a_run_that_is_known_to_have_ended_holds_nobody_up(tmp_path: pathlib.Path) -> None:
    first = lease(tmp_path, "a")
    first.take()
    done(first)
    assert lease(tmp_path, "b", ended=["a"]).take()


def test_of_two_runs_that_began_together_one_waits_until_the_other_has_given_way(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has got one host first. The same one waits on either host; the other is refused at once, undoes, and lets go."""
    here, there = tmp_path / "here", tmp_path / "there"
    for root, owner in ((here, "a"), (there, "b")):
        one = lease(root, owner)
        assert one.take()
        done(one)
    began = time.monotonic()
    with pytest.raises(Held):
        lease(here, "b").take()
    assert time.monotonic() - began < 5, "it does not wait"
    waiting = lease(there, "a")

    def give_way() -> None:
        time.sleep(0.5)
        undo = lease(there, "b", only_own=True)
        assert undo.take()
        undo.release()

    thread = threading.Thread(target=give_way)
    thread.start()
    assert waiting.take() and leases.read(str(there))["glm"]["owner"] == "a"
    thread.join()
    done(waiting)

    later = lease(there, "0", only_own=True)
    assert not later.take(), "undoing never waits"
    monkeypatch.setattr(leases, "RACE_SECONDS", 0.2)
    with pytest.raises(Held):
        lease(there, "0").take()


def test_what_a_run_undoes_is_only_its_own(tmp_path: pathlib.Path) -> None:
    assert not lease(tmp_path, "a", only_own=True).take(), "it has changed nothing"
    assert not path(tmp_path).exists()
    first = lease(tmp_path, "a")
    first.take()
    assert not lease(tmp_path, "b", only_own=True).take(), "another run's, also while that is at work"
    done(first)
    assert lease(tmp_path, "a", only_own=True).take()


def test_a_run_that_has_proven_its_shard_holds_nobody_up_and_may_still_undo_it(tmp_path: pathlib.Path) -> None:
    """The gate ends the lease of a rank that is ready. Another rank may still fail, so the run can come back, unless another one took the lock meanwhile."""
    first = lease(tmp_path, "a")
    first.take()
    done(first)
    lease(tmp_path, "b").finish()
    assert leases.read(str(tmp_path))["glm"]["live"] is True, "a run ends its own lease only"
    lease(tmp_path, "a").finish()
    assert leases.read(str(tmp_path)) == {}
    undoing = lease(tmp_path, "a", only_own=True)
    assert undoing.take() and leases.read(str(tmp_path))["glm"]["live"] is True
    done(undoing)
    with pytest.raises(Held):
        lease(tmp_path, "b").take()
    lease(tmp_path, "a").finish()
    other = lease(tmp_path, "b")
    assert other.take() and leases.read(str(tmp_path))["glm"]["owner"] == "b"
    done(other)
    assert not lease(tmp_path, "a", only_own=True).take(), "another run's by now"


def test_a_lock_of_another_boot_and_a_damaged_one_are_over(tmp_path: pathlib.Path) -> None:
    first = lease(tmp_path, "a")
    first.take()
    done(first)
    content = json.loads(path(tmp_path).read_text())
    for damaged in (json.dumps({**content, "boot_id": "another"}), "", "{", "[]", json.dumps({**content, "expires": "soon"}), "\0" * 100):
        path(tmp_path).write_text(damaged)
        assert leases.read(str(tmp_path))["glm"]["live"] is False
        other = lease(tmp_path, "b")
        assert other.take()
        done(other)


HOLDER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from ansible_collections.rankzero.inference.plugins.module_utils.leases import Lease
Lease(sys.argv[2], "glm", {"owner": sys.argv[3], "who": "other@control"}).take()
print("taken", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("owner", ["other", "mine"])
def test_a_call_at_work_holds_the_lock_exactly_as_long_as_its_process_lives(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, owner: str) -> None:
    """Killed, however: the kernel gives the lock up. Another run is refused; a later call of the same run (its connection was lost) waits."""
    monkeypatch.setattr(leases, "GLANCE_SECONDS", 0.1)
    monkeypatch.setattr(leases, "BUSY_SECONDS", 0.3)
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(COLLECTIONS), str(tmp_path), owner], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "taken\n"
        path(tmp_path).write_bytes(b" " * 10 if owner == "other" else path(tmp_path).read_bytes())
        started = time.monotonic()
        with pytest.raises(Held, match="as long as its call on this host works" if owner == "other" else "other@control"):
            lease(tmp_path, "mine").take()
        assert time.monotonic() - started >= (0.1 if owner == "other" else 0.3)
        assert leases.read(str(tmp_path))["glm"]["busy"] is True
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert lease(tmp_path, "mine").take()


def test_of_many_that_come_at_once_one_gets_it(tmp_path: pathlib.Path) -> None:
    """Processes that take, hold and give up the same lock, file and directory included, never have it together."""
    script = (
        HOLDER.partition("Lease(sys.argv[2]")[0]
        + """
import os
mark = sys.argv[2] + "/inside"
taken = 0
from ansible_collections.rankzero.inference.plugins.module_utils.leases import Held
while taken < 20:
    one = Lease(sys.argv[2], "glm", {"owner": sys.argv[3]})
    try:
        one.take()
    except Held:
        continue
    os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    os.unlink(mark)
    one.release()
    taken += 1
"""
    )
    runs = [
        subprocess.Popen([sys.executable, "-c", script, str(COLLECTIONS), str(tmp_path), str(number)], stderr=subprocess.PIPE, text=True) for number in range(3)
    ]
    for run in runs:
        assert (run.communicate(timeout=60)[1], run.returncode) == ("", 0)
    assert leases.read(str(tmp_path)) == {}


def test_who_a_run_is(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(C, "DEFAULT_LOCAL_TMP", str(tmp_path))
    run = run_identity.this_run({})
    assert run == run_identity.this_run({"awx_job_id": 7}), "one for all forks of the run"
    assert "@" in run["who"] and run["controller"]["pid"] == os.getppid()
    assert run_identity.who({"awx_job_id": 7, "awx_user_name": "ann"}) == "ann by job 7" and run_identity.who({"tower_job_id": 8}) == "AWX by job 8"
    assert not run_identity.has_called("gpu-a", "glm")
    run_identity.note_call("gpu-a", "glm")
    assert run_identity.has_called("gpu-a", "glm") and not run_identity.has_called("gpu-b", "glm") and not run_identity.has_called("gpu-a", "qwen")


def test_a_run_has_ended_only_where_its_process_is_seen_to_be_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    lock = {"owner": "a", "controller": run_identity._process(process.pid)}
    try:
        assert not run_identity.has_ended(lock)
        later = {**lock["controller"], "started": lock["controller"]["started"] - 1}
        assert run_identity.has_ended({"controller": later}), "another process has its number now"
    finally:
        process.kill()
        process.wait()
    assert run_identity.has_ended(lock) and run_identity.ended_owners([lock, None, {}]) == ["a"]
    for elsewhere in ({"boot_id": "another"}, {"pid_namespace": "pid:[1]"}, {"pid": None}):
        assert not run_identity.has_ended({"controller": {**lock["controller"], **elsewhere}})
    assert not run_identity.has_ended({"controller": None}) and not run_identity.has_ended({})
