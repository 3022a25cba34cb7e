# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where a replica goes when a deploy fails: one revision for all ranks, however the runs before were interrupted."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.rankzero.inference.plugins.module_utils.revisions import Owner, Revisions
from ansible_collections.rankzero.inference.plugins.plugin_utils import failures, way_back

OWN = Owner(0, 0, True)


def kept(name: str, rank: int, nodes: int = 2, proven: bool = True, **more: Any) -> dict[str, Any]:
    whole = {"proven": proven, "problem": None, "lacks": None}
    return {"revision": name, "rank": rank, "nodes": nodes, "tie_id": "t" + name, "budget_seconds": 60, **whole, **more}


def host(current: str | None, previous: str | None, *entries: dict[str, Any]) -> dict[str, Any]:
    return {"schema": 1, "shards": {"glm": {"revision": current, "previous": previous, "revisions": list(entries)}}}


NONE = {"schema": 1}
W0, W1, V0, V1 = kept("w", 0), kept("w", 1), kept("v", 0), kept("v", 1)
X0, X1 = kept("x", 0, proven=False), kept("x", 1, proven=False)


@pytest.mark.parametrize(
    ("a", "b", "revision"),
    [
        pytest.param(host("w", "v", V0, W0), host("w", "v", V1, W1), "w", id="what runs everywhere and was proven"),
        pytest.param(host("x", "w", W0, X0), host("w", None, W1), "w", id="a deploy was interrupted between two hosts"),
        pytest.param(host("x", "w", W0, X0), host("x", "w", W1, X1), "w", id="interrupted before the gate had passed"),
        pytest.param(host("x", "w", W0, kept("x", 0)), host("x", "w", W1, X1), "w", id="interrupted when the gate had passed on one host only"),
        pytest.param(host("x", "w", W0, kept("x", 0)), host("x", "w", W1, kept("x", 1)), "x", id="interrupted when the gate had passed everywhere"),
        pytest.param(host("x", None, X0), NONE, None, id="a first deploy was interrupted"),
        pytest.param(host("x", None, X0), host("x", None, X1), None, id="a first deploy was interrupted before the gate"),
        pytest.param(host("x", "v", W0, V0, X0), host("v", "w", W1, V1), "v", id="rolled back from the newer w to v, then interrupted"),
        pytest.param(host("v", "w", V0, W0), host("v", "w", V1, W1), "v", id="rolled back to the older one, which runs"),
        pytest.param(host("w", "v", V0, W0), NONE, None, id="the other host has lost everything"),
        pytest.param(host("w", "v", V0, W0), host("w", "v", V1, {**W1, "problem": "without shard.env"}), "v", id="one is damaged, the one before is whole"),
        pytest.param(host("w", "v", V0, W0), host("w", "v", V1, {**W1, "lacks": "its model"}), "w", id="what runs comes back with its model"),
        pytest.param(host("w", "v", kept("v", 0, 3), W0), host("w", "v", kept("v", 1, 3), X1), "v", id="a rank is on a host outside of the play"),
        pytest.param(host("w", None, W0), host("w", None, W0), None, id="two hosts with one rank"),
        pytest.param(host("w", None, kept("w", 0, 1)), NONE, "w", id="a single node, and a host that is new"),
        pytest.param(NONE, None, None, id="nothing anywhere"),
    ],
)
def test_one_decision_for_all_hosts(a: Any, b: Any, revision: str | None) -> None:
    chosen = way_back.choose("glm", {"a": a, "b": b})
    assert chosen["revision"] == revision and not chosen["rekey"]
    if revision:
        assert chosen["leader"] == "a" and chosen["hosts"]["a"] == 0 and chosen["ready_timeout"] == 60
    else:
        assert chosen == way_back.NOTHING


def test_ranks_whose_keys_were_written_anew_by_halves_get_another() -> None:
    chosen = way_back.choose("glm", {"a": host("w", None, W0), "b": host("w", None, {**W1, "tie_id": "new"})})
    assert chosen["revision"] == "w" and chosen["rekey"]


def test_what_the_way_back_lacks_is_told_by_host() -> None:
    seen = {"a": host("w", None, W0), "b": host("w", None, {**W1, "lacks": "it cannot start without /models/w, where nothing is"})}
    assert way_back.lacking("glm", seen, way_back.choose("glm", seen)) == {"b": "it cannot start without /models/w, where nothing is"}
    assert way_back.lacking("glm", seen, way_back.NOTHING) == {}


# ---- the same over the files of two hosts, with deploys that end anywhere


@dataclasses.dataclass
class Model:
    """Two hosts with their real files, and the revision that was last seen to serve."""

    stores: list[Revisions]
    serving: str | None = None

    def facts(self) -> dict[str, Any]:
        return {str(rank): self._facts_of(rank, store) for rank, store in enumerate(self.stores)}

    @staticmethod
    def _facts_of(rank: int, store: Revisions) -> dict[str, Any]:
        if not store.present():
            return NONE
        return host(store.linked("current"), store.linked("previous"), *(kept(name, rank, proven=store.is_proven(name)) for name in store.known()))

    def deploy(self, name: str, until: int) -> None:
        """Steps of a deploy on both hosts: write, switch, pass the gate; it is killed after so many of them."""
        steps = [
            lambda store: store.write(name, {"launch.json": name}, {}, OWN),
            lambda store: (store.activate(name), store.prune(3)),
            lambda store: store.mark_proven(name, 1.0),
        ]
        todo = [(step, store) for phase in (steps[:2], steps[2:]) for store in self.stores for step in phase]
        for step, store in todo[:until]:
            step(store)
        if until >= len(todo):
            self.serving = name

    def undo(self) -> None:
        """A deploy whose gate fails, over what is there."""
        back = way_back.choose("glm", self.facts())
        for rank, store in enumerate(self.stores):
            if str(rank) in back["hosts"]:
                store.activate(back["revision"])
            else:
                store.remove_all()


@settings(max_examples=60, deadline=None)
@given(runs=st.lists(st.one_of(st.integers(0, 6), st.just("undo")), min_size=1, max_size=9))
def test_however_deploys_are_interrupted_what_was_proven_on_all_ranks_is_gone_back_to(tmp_path_factory: pytest.TempPathFactory, runs: list[Any]) -> None:
    base = tmp_path_factory.mktemp("hosts")
    model = Model([Revisions(str(base / name), "glm") for name in "ab"])
    for number, run in enumerate([*runs, "undo"]):
        if run == "undo":
            model.undo()
            assert {store.linked("current") for store in model.stores} == {model.serving}
        else:
            model.deploy(f"r{number}", run)
            assert all(store.linked("current") is None or (pathlib.Path(store.directory) / "current/launch.json").exists() for store in model.stores)


# ---- what is said of it


def test_what_could_not_be_undone_is_said_behind_the_reason() -> None:
    reason: dict[str, Any] = {"a": {"msg": "out of memory"}, "b": None}
    ranks = {"a": 0, "b": 1}

    def told(**more: Any) -> list[str]:
        return failures.summary("glm", reason, ranks, "w", **more).splitlines()

    assert told() == ["Replica glm was not deployed. Revision w, which was there before, is back.", "  rank 0 (a): out of memory"]
    assert told(undoing={"b": {"msg": "disk full", "failed": True}}, proven=False) == [
        "Replica glm was not deployed. Revision w could not be brought back on all ranks, so it does not serve. Run this again, or remove the replica.",
        "  rank 0 (a): out of memory",
        "  on the way back, rank 1 (b): disk full",
    ]
    gate = {"a": {"verdict": {"reason": "no answer"}}, "b": {"gave_up": {"rank": 0}}}
    assert told(undoing=gate, proven=False) == [
        "Replica glm was not deployed. Revision w, which was there before, is back, but does not prove itself.",
        "  rank 0 (a): out of memory",
        "  on the way back, rank 0 (a): no answer",
    ]
    unreachable = told(unreachable=["b"], proven=False)
    assert "could not be brought back on all ranks" in unreachable[0] and unreachable[2].startswith("  rank 1 (b): it cannot be reached")


def test_the_gate_after_the_way_back_needs_all_of_its_ranks() -> None:
    back, there = {"hosts": {"a": 0, "b": 1}}, {"a": {"changed": True}, "b": {"changed": False}}
    assert failures.are_back([None], back, there)
    assert not failures.are_back([None], back, {**there, "b": {"failed": True}})
    assert not failures.are_back([None], back, {**there, "b": {}}), "it cannot be reached"
    assert not failures.are_back([{"locked": {"who": "x"}}], back, there) and not failures.are_back([None], {"hosts": {}}, there)
