# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One replica, one fate, on real hosts: nothing but the hosts themselves brings a replica back (docs/decisions/0009-the-tie.md).

The controller deploys once. After that every test breaks something and only looks.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from lab.deployed import until
from lab.lab_hosts import Lab
from lab.profiles import SIMULATED
from lab.test_replica_on_hosts import play, succeeded

pytestmark = pytest.mark.lab

HOSTS = ["f1", "f2", "f3"]
SILENT = 8  # seconds
HEALTH = "import urllib.request; print(urllib.request.urlopen('{url}/v1/models', timeout=3).status)"


@pytest.fixture(scope="module")
def replica() -> Iterator[Lab]:
    """Three hosts, rank = number - 1; deployed once."""
    one = Lab(f"o{os.getpid()}", settings={"LAB_FABRIC": "10.78.0"}, owner=os.getpid())
    reason = one.why_not()
    if reason:
        pytest.skip(reason)
    try:
        one.up(*HOSTS, gpus="2:H100")
        profile = {**SIMULATED, "nodes": 3, "tp": 6}
        succeeded(play(one, "deploy_replica", ":".join(HOSTS), replica_profile=profile, replica_silent_seconds=SILENT))
        yield one
    finally:
        one.down()


def state(lab: Lab, host: str) -> dict[str, Any]:
    text = lab.console(host, "cat /run/rankzero/lab/state.json", check=False).stdout
    return json.loads(text) if text.startswith("{") else {}


def states(lab: Lab, hosts: list[str] | None = None) -> list[dict[str, Any]]:
    return [state(lab, host) for host in hosts or HOSTS]


def serving(lab: Lab, other_than: str | None = None, seconds: float = 60) -> str:
    """Until all hosts run one run, a later one than `other_than`, and rank 0 answers; its id."""

    def there() -> str | None:
        seen = states(lab)
        ids = {one.get("run_id") for one in seen}
        return seen[0]["run_id"] if len(ids) == 1 and ids != {other_than} and all(one.get("stage") == "running" for one in seen) and answers(lab) else None

    return str(until(there, seconds, lambda: [(one.get("stage"), one.get("detail"), one.get("last_end")) for one in states(lab)]))


def answers(lab: Lab) -> bool:
    url = json.loads(lab.console("f1", "cat /etc/rankzero/lab/current/launch.json").stdout)["ready"]["url"]
    return lab.console("f1", f'python3 -c "{HEALTH.format(url=url)}"', check=False).stdout.strip() == "200"


def engines(lab: Lab) -> list[str]:
    return [lab.console(host, "pgrep -f [s]im_engine.py", check=False).stdout.split()[0] for host in HOSTS]


def test_a_follower_that_reboots_rejoins_and_the_whole_replica_serves_again_by_itself(replica: Lab) -> None:
    before = serving(replica)
    replica.reboot("f2")
    after = serving(replica, other_than=before)
    assert after != before
    for host in ("f1", "f3"):
        end = state(replica, host)["last_end"]
        assert end["rank"] == 1 and end["kind"] in ("stop", "tie"), end
    looked = play(replica, "replica_status", ":".join(HOSTS)).stdout
    assert "Replica lab: ready" in looked and len(re.findall(r"^  \d +f\d +ready +yes +active", looked, re.MULTILINE)) == len(HOSTS), looked


def test_a_cut_shorter_than_the_limit_keeps_serving(replica: Lab) -> None:
    before, pids = serving(replica), engines(replica)
    for host in ("f3", "f1"):
        replica.cut(host)
        time.sleep(SILENT - 3)
        assert [one["stage"] for one in states(replica)] == ["running"] * 3
        replica.heal(host)
        time.sleep(SILENT - 3)
    assert serving(replica) == before and engines(replica) == pids


def test_a_cut_longer_than_the_limit_ends_the_run_everywhere_and_heals(replica: Lab) -> None:
    before = serving(replica)
    replica.cut("f3")
    began = time.monotonic()
    until(lambda: all(one["stage"] in ("tying", "restarting") for one in states(replica)), SILENT + 15, lambda: states(replica))
    assert time.monotonic() - began >= SILENT - 2
    assert f"silent for more than {SILENT} seconds" in state(replica, "f3")["last_end"]["reason"]
    assert [replica.console(host, "pgrep -f [s]im_engine.py", check=False).stdout for host in HOSTS] == ["", "", ""]
    assert "waits for rank 2 since 20" in state(replica, "f1")["detail"]
    replica.heal("f3")
    serving(replica, other_than=before)


def test_a_killed_run_shard_on_the_leader_ends_the_run_and_comes_back(replica: Lab) -> None:
    before = serving(replica)
    replica.console("f1", "kill -9 $(systemctl show -P MainPID inference-lab)")
    until(lambda: all(one.get("run_id") != before or one.get("stage") != "running" for one in states(replica, ["f2", "f3"])), 10, lambda: states(replica))
    serving(replica, other_than=before)
    assert state(replica, "f2")["last_end"]["rank"] == 0
    assert state(replica, "f2")["run_number"] == state(replica, "f1")["run_number"]


def test_an_engine_that_dies_restarts_all_within_seconds(replica: Lab) -> None:
    before, pids = serving(replica), engines(replica)
    began = time.monotonic()
    replica.console("f2", f"kill -9 {pids[1]}")
    serving(replica, other_than=before)
    took = time.monotonic() - began
    assert took < 30, took
    assert all(state(replica, host)["last_end"]["rank"] == 1 for host in HOSTS)
    assert replica.console("f2", "systemctl show -P NRestarts inference-lab").stdout.strip() == "0", "run_shard.py itself did not end"


@pytest.mark.parametrize("host", ["f3", "f1"])
def test_a_power_cut_is_noticed_in_time_and_the_replica_waits_for_the_host(replica: Lab, host: str) -> None:
    before = serving(replica)
    others = [name for name in HOSTS if name != host]
    replica.kill(host)
    began = time.monotonic()
    until(lambda: all(one["stage"] in ("tying", "restarting") for one in states(replica, others)), SILENT + 15, lambda: states(replica, others))
    assert time.monotonic() - began < SILENT + 10
    replica.start(host)
    serving(replica, other_than=before)


def test_a_rerun_of_the_deploy_marks_what_came_back_and_restarts_nothing(replica: Lab) -> None:
    before, pids = serving(replica), engines(replica)
    profile = {**SIMULATED, "nodes": 3, "tp": 6}
    succeeded(play(replica, "deploy_replica", ":".join(HOSTS), replica_profile=profile, replica_silent_seconds=SILENT))
    assert serving(replica) == before and engines(replica) == pids
    assert "Replica lab: ready" in play(replica, "replica_status", ":".join(HOSTS)).stdout


def test_ranks_with_different_keys_are_found_and_written_anew(replica: Lab) -> None:
    """As an interrupted deploy would leave them."""
    before = serving(replica)
    replica.console("f2", "printf %064d 7 > /etc/rankzero/lab/current/secrets/tie_key; systemctl restart inference-lab")
    until(lambda: "wrong secret" in state(replica, "f2").get("detail", ""), 30, lambda: states(replica))
    done = play(replica, "deploy_replica", ":".join(HOSTS), replica_profile={**SIMULATED, "nodes": 3, "tp": 6}, replica_silent_seconds=SILENT)
    succeeded(done)
    serving(replica, other_than=before)
    keys = {
        replica.console(host, "cat /etc/rankzero/lab/current/secrets/tie_key; stat -c %a /etc/rankzero/lab/current/secrets/tie_key").stdout for host in HOSTS
    }
    assert len(keys) == 1 and keys.pop().endswith("600\n")


def test_after_too_many_failed_runs_all_ranks_are_failed_and_systemd_leaves_them(replica: Lab) -> None:
    """The last test: it leaves the replica failed."""
    for dummy in range(3):
        before = serving(replica)
        replica.console("f3", "pkill -9 -f [s]im_engine.py")
        until(lambda before=before: any(one.get("run_id") != before or one.get("stage") != "running" for one in states(replica)), 10, lambda: states(replica))
        if all(one.get("stage") == "failed" for one in states(replica)):
            break
        if state(replica, "f1").get("failures") == 3:
            break
    until(lambda: all(one.get("stage") == "failed" for one in states(replica)), 30, lambda: states(replica))
    for rank, host in enumerate(HOSTS):
        told = state(replica, host)
        assert "given up" in told["detail"] and told["last_end"]["rank"] == 2 and told["detail"].startswith("rank 2: ") is (rank != 2)
        assert set(replica.console(host, "systemctl show -P ActiveState -P ExecMainStatus inference-lab").stdout.split()) == {"failed", "79"}
