# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which revision all ranks can go to, what stops with a host, what counts as a request in flight, and who is in the way of a plan."""

from __future__ import annotations

import http.server
import json
import os
import pathlib
import threading
from collections.abc import Iterator
from typing import Any

import facts
import pytest

from ansible_collections.rankzero.inference.plugins.module_utils import observation, requests_in_flight, shard_records
from ansible_collections.rankzero.inference.plugins.plugin_utils import convergence, failures, lifecycle
from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Findings

LOCK = {
    "owner": "b",
    "who": "bob@control",
    "since": "2026-01-01T00:00:00Z",
    "until": "2026-01-01T00:01:30Z",
    "live": True,
    "busy": False,
    "target": None,
    "controller": None,
}

GONE = tuple({"revision": name, "problem": "it cannot start without /models/glm, where nothing is"} for name in ("old", "new"))
LACKING = tuple({**entry, "problem": None, "lacks": entry["problem"]} for entry in GONE)


def host(
    rank: int, current: str | None = "new", previous: str | None = "old", kept: Any = ("older", "old", "new"), nodes: int = 2, **more: Any
) -> dict[str, Any]:
    entries = [
        {"revision": name, "rank": rank, "nodes": nodes, "tie_id": "t" + name, "serves_http": rank == 0, "budget_seconds": 60, "problem": None}
        if isinstance(name, str)
        else name
        for name in kept
    ]
    shard = {"rank": rank, "nodes": nodes, "revision": current, "previous": previous, "revisions": entries, "engine": "vllm", "unit": {"active": True}}
    return {"schema": 1, "shards": {"glm": shard}, **more}


def choose(seen: dict[str, Any], goal: str = "previous", wanted: str | None = None, ended: tuple[str, ...] = ()) -> tuple[str | None, list[str]]:
    findings = Findings()
    choice = lifecycle.choose_revision("glm", seen, goal, wanted, ended, findings)
    assert bool(choice) != bool(findings.faults)
    return choice.get("revision"), [fault.text() for fault in findings.faults]


def test_all_ranks_go_back_to_the_revision_before_and_forward_again() -> None:
    findings = Findings()
    seen = {"b": host(0), "a": host(1), "other": {"schema": 1}}
    assert lifecycle.choose_revision("glm", seen, "previous", None, (), findings) == {
        "replica": "glm",
        "revision": "old",
        "before": {"b": "new", "a": "new"},
        "shards": {"b": {"rank": 0}, "a": {"rank": 1}},
        "leader": {"host": "b"},
        "ready_timeout": 60,
        "way_back": {"revision": "new", "hosts": {"b": 0, "a": 1}, "leader": "b", "ready_timeout": 900, "rekey": False},
    }
    assert choose(seen, "current") == ("new", []) and choose(seen, wanted="older") == ("older", [])
    assert choose({"a": host(0, "old", "new"), "b": host(1, "old", "new")}) == ("new", [])


@pytest.mark.parametrize(
    ("first", "second", "goal", "told"),
    [
        (host(0), host(1, previous="older"), "previous", "one revision before the present one on all ranks"),
        (host(0, previous=None), host(1, previous=None), "previous", "current new, previous none, kept: older, old, new"),
        (host(0, previous=None), host(1, previous=None), "previous", "with -e revision=FINGERPRINT, or deploy: older, old."),
        (host(0, previous=None, kept=("new",)), host(1, previous=None, kept=("new",)), "previous", "all ranks. No other revision is whole on all ranks"),
        (host(0, kept=("old", "new")), host(1, kept=("new",)), "previous", "it is not there. No other revision is whole on all ranks"),
        (
            host(0),
            host(1, kept=("old", {"revision": "new", "rank": 1, "nodes": 2, "tie_id": "tnew", "lacks": "it cannot start without /m, where nothing is"})),
            "current",
            "revision new: it cannot start without /m, where nothing is",
        ),
        (
            host(0),
            host(1, kept=("new", {"revision": "old", "rank": 1, "nodes": 2, "tie_id": "told", "lacks": "it cannot start without /m, where nothing is"})),
            "previous",
            "kept: new, old (it cannot start without /m, where nothing is)",
        ),
        (host(0), host(1, kept=("old",)), "current", "revision new: it is not there, wanted revision new, whole, on every rank. Bring back what"),
        (
            host(0),
            host(1, kept=("new",)),
            "previous",
            "b: shards.glm.revisions: seen current new, previous old, kept: new, wanted revision old, whole, on every rank: it is not there",
        ),
        (host(0), host(1, kept=("new", {"revision": "old", "problem": "without secrets/tie_key"})), "previous", "without secrets/tie_key"),
        (
            host(0, kept=GONE),
            host(1, kept=GONE),
            "previous",
            "kept: old, new (each: it cannot start without /models/glm, where nothing is), wanted revision old, whole, on every rank: it cannot start "
            "without /models/glm, where nothing is. No other revision is whole on all ranks, one on each host of this run. Bring back what is missing",
        ),
        (host(0, kept=LACKING), host(1, kept=LACKING), "previous", "one on each host of this run. Bring back what is missing"),
        (host(0), host(0), "previous", "rank 0 (a), rank 0 (b) of 2 rank(s)"),
        (host(0, nodes=3), host(1, nodes=3), "previous", "without --limit"),
        (host(0), host(1, "old", "older"), "current", "one revision on all ranks"),
        (host(0), host(1, cordoned={"by": "ann", "reason": "fan"}), "current", "Undrain the host first"),
        (host(0), host(1, locks={"glm": LOCK}), "current", "held by bob@control since 2026-01-01T00:00:00Z, until 2026-01-01T00:01:30Z"),
        (host(0), host(1, kept=("new", {"revision": "old", "rank": 1, "nodes": 2, "tie_id": "other"})), "previous", "different tie keys"),
        (host(0), None, "current", "no node facts"),
    ],
)
def test_what_cannot_be_gone_to_is_said_with_what_every_host_has(first: Any, second: Any, goal: str, told: str) -> None:
    revision, texts = choose({"a": first, "b": second}, goal)
    assert revision is None and any(told in text for text in texts), texts


def test_a_lock_of_a_run_that_has_ended_or_of_another_replica_is_in_nobodys_way() -> None:
    for locks, ended in (({"glm": LOCK}, ("b",)), ({"glm": {**LOCK, "live": False}}, ()), ({"qwen": LOCK}, ())):
        assert choose({"a": host(0), "b": host(1, locks=locks)}, ended=ended) == ("old", [])
        pool = {name: {**known, "locks": locks} for name, known in facts.hosts().items()}
        assert not facts.plan(pool, ended_owners=ended)["faults"]
    pool = {name: {**known, "locks": {"glm": LOCK}} for name, known in facts.hosts().items()}
    assert {(fault["host"], fault["field"]) for fault in facts.plan(pool)["faults"]} == {("n1", "locks.glm"), ("n2", "locks.glm")}


def test_a_rollback_between_two_revisions_finishes_what_was_begun() -> None:
    """A deploy that was killed between two hosts goes back to what both have; a rollback that was, on to where its lock says it went."""
    assert choose({"a": host(0, "new", "old"), "b": host(1, "old", "older", ("older", "old"))}) == ("old", [])
    for target, rank_0 in (("old", host(0, "old", "new")), ("new", host(0, "new", "old"))):
        rank_0["locks"] = {"glm": {**LOCK, "live": False, "target": target}}
        other = {"old": host(1, "new", "old"), "new": host(1, "old", "new")}[target]
        assert choose({"a": rank_0, "b": other}) == (target, [])
        del rank_0["locks"]
        assert "one revision before" in choose({"a": rank_0, "b": other})[1][0], "nothing says which"


def test_a_host_is_drained_with_every_host_of_its_replicas() -> None:
    findings = Findings()
    seen = {"a": host(0), "b": host(1), "c": None}
    assert lifecycle.drain("b", seen, "abcd", (), False, findings) == {
        "node": "b",
        "cordoned": False,
        "replicas": [{"replica": "glm", "engine": "vllm", "hosts": {"a": 0, "b": 1}, "missing": [], "serving": "a"}],
    }
    findings = Findings()
    assert lifecycle.drain("b", {"b": host(1)}, "abcd", (), False, findings) == {} and "rank(s) 0 on no host that could be asked" in findings.faults[0].text()
    assert lifecycle.drain("b", {"b": host(1)}, "abcd", (), True, Findings())["replicas"][0]["missing"] == [0]
    assert lifecycle.drain("b", {"a": host(0, locks={"glm": LOCK}), "b": host(1)}, "abcd", (), False, findings) == {}
    assert lifecycle.drain("d", {"d": {"schema": 1}}, "abcd", (), False, Findings())["replicas"] == []
    stopped = host(0)
    stopped["shards"]["glm"]["unit"]["active"] = False
    assert lifecycle.stopped_replicas(stopped) == ["glm"] and lifecycle.stopped_replicas(host(0)) == [] and lifecycle.stopped_replicas(None) == []


@pytest.mark.parametrize(
    ("node", "told"),
    [
        ("c", "seen c, which could not be asked: no node facts, wanted a host that answers. The task that gathers its facts says why"),
        ("d", "seen d, wanted one of the hosts of this run. Give drain_hosts"),
        ("e", "seen e, wanted the name of one host of the inventory. Give -e drain_host=HOST"),
        ("", "seen nothing, wanted the name of one host of the inventory"),
    ],
)
def test_a_host_that_cannot_be_drained_is_unknown_or_left_out_or_silent(node: str, told: str) -> None:
    findings = Findings()
    assert lifecycle.drain(node, {"a": host(0), "b": host(1), "c": None}, "abcd", (), False, findings) == {}
    assert [told in fault.text() for fault in findings.faults] == [True], findings.faults


def test_a_failure_says_what_was_to_be_done_and_what_is_there_now() -> None:
    locked = {"a": {"msg": "replica glm is being changed by bob", "locked": LOCK}, "b": None}
    assert failures.summary("glm", locked, {"a": 0}, "r1").splitlines() == [
        "Replica glm was not deployed. Another run is changing it; what this run had changed is undone.",
        "  rank 0 (a): replica glm is being changed by bob",
    ]
    assert failures.summary("glm", {}, {}, None, done="restarted") == "Replica glm was not restarted. It does not serve."


# ---- kept revisions


def test_a_kept_revision_says_what_it_lacks(tmp_path: pathlib.Path) -> None:
    base = tmp_path / "glm"
    for number, name in enumerate(("whole", "bare", "other", "torn")):
        folder = base / "revisions" / name
        (folder / "secrets").mkdir(parents=True)
        launch = {
            "fingerprint": "x" if name == "other" else name,
            "rank": 1,
            "nodes": 2,
            "secrets": ["tie_key"],
            "ready": {"serves_http": False, "budget_seconds": 9},
        }
        (folder / "launch.json").write_text("{" if name == "torn" else json.dumps(launch))
        for path in ("shard.env", "run_shard.py", "secrets/tie_key") if name != "bare" else ():
            (folder / path).write_text("x")
        os.utime(folder, (number, number))
    (base / "revisions/.new-half").mkdir()
    found = shard_records.kept_revisions(str(base))
    assert [one["revision"] for one in found] == ["whole", "bare", "other", "torn"]
    assert [one["problem"] for one in found[:3]] == [
        None,
        "without shard.env, run_shard.py, secrets/tie_key",
        "its launch.json is of another revision",
    ] and "no JSON" in found[3]["problem"]
    assert (found[0]["rank"], found[0]["nodes"], found[0]["serves_http"], found[0]["budget_seconds"], len(found[0]["tie_id"])) == (1, 2, False, 9, 16)
    assert shard_records.kept_revisions(str(tmp_path / "none")) == []


def test_a_kept_revision_needs_its_model_its_adapters_and_its_programs(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "glm/revisions/f1"
    folder.mkdir(parents=True)
    for name in ("shard.env", "run_shard.py"):
        (folder / name).write_text("x")
    model, adapter, program = (tmp_path / name for name in ("model", "adapter", "vllm"))
    launch = {"fingerprint": "f1", "launches": [{"path": str(program)}], "reads": [str(model), str(adapter), 7, "relative", "/\0"]}
    (folder / "launch.json").write_text(json.dumps(launch))

    def problem() -> str | None:
        found = shard_records.kept_revisions(str(tmp_path / "glm"))[0]
        assert found["problem"] is None, "its own files are whole"
        text = found["lacks"]
        return str(text) if text else None

    assert problem() == "it cannot start without /  and %s and %s and %s, where nothing is" % (adapter, model, program)
    launch["reads"].remove("/\0")
    (folder / "launch.json").write_text(json.dumps(launch))
    program.write_text("#!/bin/sh\n")
    adapter.write_text("x")
    model.mkdir()
    assert problem() == f"it cannot start without {model}, where nothing is", "a mount point without its file system is an empty directory"
    (model / "config.json").write_text("{}")
    assert problem() is None
    adapter.unlink()
    adapter.symlink_to(adapter)
    assert problem() == f"it cannot start without {adapter}, where nothing is", "a link to itself leads nowhere"
    model.joinpath("config.json").unlink()
    launch["reads"] = ["/" + "1" * 5000, "/a\n\x1b[2J\udc80b"]
    (folder / "launch.json").write_text(json.dumps(launch))
    assert problem() == "it cannot start without /a  [2J b, where nothing is", "one line of text, which a host's facts may carry"


def test_a_path_that_does_not_answer_holds_nobody_up(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As below a mount of an NFS server that is gone: not even `stat` comes back."""
    answers, real = threading.Event(), os.stat

    def stat(path: str, *more: Any, **options: Any) -> os.stat_result:
        if path == "/dead/model":
            answers.wait(60)
        return real(path, *more, **options)

    monkeypatch.setattr(shard_records.os, "stat", stat)
    paths = [str(tmp_path / "gone"), "/dead/model", str(tmp_path / "not looked at")]
    silent: set[str] = set()
    try:
        said = shard_records.what_is_gone(["/", *paths], silent, 1)
        again = shard_records.what_is_gone(["/", "/dead/model"], silent, 60)
    finally:
        answers.set()
    assert said == f"it cannot start without {paths[0]}, where nothing is, nor before /dead/model answers; it has not within 1 seconds"
    assert again == "it cannot start before /dead/model answers; it has not within 60 seconds", "it is not asked once more"


# ---- requests in flight

NAMES = ("vllm:num_requests_running", "vllm:num_requests_waiting")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (
            '# TYPE x gauge\nvllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_running{engine="1",m="a } 9"} 1\n'
            "vllm:num_requests_waiting 0 1790000000\nother 7\n",
            3,
        ),
        ("vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0\n", 0),
        ("vllm:num_requests_running 0.5\nvllm:num_requests_waiting 0\n", 1),
        ("vllm:num_requests_running 0\n", None),
        ("vllm:num_requests_running NaN\nvllm:num_requests_waiting 0\n", None),
        ("vllm:num_requests_running x\nvllm:num_requests_waiting 0\n", None),
        ("vllm:num_requests_running -1\nvllm:num_requests_waiting 0\n", None),
        ("", None),
    ],
)
def test_what_the_metrics_say(text: str, number: int | None) -> None:
    assert requests_in_flight.total(text, NAMES) == number
    assert requests_in_flight.total(text, ()) is None


class Server(http.server.BaseHTTPRequestHandler):
    keys = ("good",)

    def do_GET(self) -> None:
        status = 200 if self.path == "/metrics" or self.headers.get("Authorization") in [f"Bearer {key}" for key in self.keys] else 401
        body = b"vllm:num_requests_running 1\nvllm:num_requests_waiting 1\n" if self.path == "/metrics" else b"{}"
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_args: Any) -> None:
        pass


class Served(observation.Observer):
    """An observer whose shard runs, and whose server is this test's."""

    url: str | None = None

    def own_server(self) -> tuple[str | None, str | None]:
        return self.url, None if self.url else "it does not run"


@pytest.fixture
def served(tmp_path: pathlib.Path) -> Iterator[Served]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name, key in (("new", "good"), ("old", "bad")):
        folder = tmp_path / "etc/rankzero/glm/revisions" / name
        (folder / "secrets").mkdir(parents=True)
        (folder / "secrets/api_key").write_text(key)
        ready = {"key_secret": "api_key", "key_protects": "/v1/chat/completions", "probe_path": "/v1/chat/completions", "probe_model": "glm"}
        (folder / "launch.json").write_text(json.dumps({"ready": ready}))
    for link, name in (("current", "new"), ("previous", "old")):
        (tmp_path / "etc/rankzero/glm" / link).symlink_to("revisions/" + name)
    observer = Served("glm", str(tmp_path), "/proc", lambda *_args, **_more: (1, "", ""))
    observer.url = "http://127.0.0.1:%d" % server.server_port
    yield observer
    server.shutdown()
    server.server_close()


def test_only_a_server_that_does_not_run_or_says_so_is_idle(served: Served) -> None:
    assert requests_in_flight.count(served, "/metrics", NAMES) == {"in_flight": 2, "serving": True, "reason": None}
    assert requests_in_flight.watch(served, "/metrics", NAMES, 0)["in_flight"] == 2
    unknown = requests_in_flight.count(served, "/v1/models", ("x",))
    assert unknown["in_flight"] is None and "x are not all there" in unknown["reason"]
    assert requests_in_flight.count(served, None, NAMES)["in_flight"] is None and requests_in_flight.count(served, "/metrics", ())["in_flight"] is None
    served.url = None
    assert requests_in_flight.count(served, "/metrics", NAMES) == {"in_flight": 0, "serving": False, "reason": "it does not run"}


def test_the_new_key_is_taken_and_the_old_one_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    assert requests_in_flight.check_keys(served) == {"current": 200, "previous": 401, "ok": True, "reason": None}
    monkeypatch.setattr(Server, "keys", ("good", "bad"))
    wrong = requests_in_flight.check_keys(served)
    assert not wrong["ok"] and "answered with 200, that of the one before with 200" in wrong["reason"]
    monkeypatch.setattr(Server, "keys", ("bad",))
    assert not requests_in_flight.check_keys(served)["ok"]
    monkeypatch.setattr(Server, "keys", ("good",))
    (pathlib.Path(served.places.revision).parent / "previous").unlink()
    assert requests_in_flight.check_keys(served) == {"current": 200, "previous": None, "ok": True, "reason": None}
    served.url = None
    assert requests_in_flight.check_keys(served)["reason"] == "it does not run"


def test_a_removal_says_what_it_has_seen() -> None:
    gone = {"changed": True, "verified": {"gpu_memory": True, "ports": True, "processes": True, "files": True}}
    unasked = {"changed": True, "verified": {**gone["verified"], "gpu_memory": None}, "notes": ["gpu_memory: the driver does not answer"]}
    nothing = {"changed": False}
    said = lifecycle.removal_summary("glm", {"n10": gone, "n2": gone, "n3": nothing})
    assert said == (
        "Replica glm is gone from n2, n10.\nSeen there: no GPU lists memory of it, its ports can be bound, no process of it runs, no file of it is left."
    )
    partly = lifecycle.removal_summary("glm", {"n1": gone, "n2": unasked})
    assert "no GPU lists" not in partly and partly.endswith("\nn2: gpu_memory: the driver does not answer")
    assert lifecycle.removal_summary("glm", {"n1": nothing, "n2": nothing}) == "There is nothing of replica glm on n1, n2."
    assert lifecycle.removal_summary("glm", {"n1": gone, "n2": nothing}, check=True) == "Replica glm would be removed from n1."


def test_a_removal_says_which_hosts_it_was_kept_from() -> None:
    said = lifecycle.removal_summary("glm", {"n1": {"changed": True, "verified": {}}}, False, ["n2"])
    assert said.splitlines()[-1] == "Not looked at: n2. What they have of it is still there; a removal without --limit takes it."


def test_a_check_says_what_a_deploy_would_do() -> None:
    def plan(leaving: list[str] | None = None, **reasons: list[str]) -> dict[str, Any]:
        shards = {host: {"rank": rank, "converge": {"reasons": found, "restart": False}} for rank, (host, found) in enumerate(reasons.items())}
        return {"replica": "glm", "shards": shards, "leaving": leaving or []}

    assert lifecycle.change_summary(plan(a=[], b=[])) == "Replica glm is as planned on all 2 rank(s): nothing would change."
    proven = lifecycle.change_summary(plan(a=["unproven of its own kind"], b=[]))
    assert proven == "Replica glm: all its ranks would be written and started together.\n  rank 0 (a): unproven of its own kind"
    assert "none restarted" in lifecycle.change_summary(plan(a=[convergence.UNPROVEN]))
    assert lifecycle.change_summary(plan(["c"], a=["x", "y"])).splitlines()[1:] == ["  rank 0 (a): x; y", "  c: what it has of the replica would be removed"]
