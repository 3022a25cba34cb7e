# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where a replica goes when what a run brings does not prove itself: one decision for all of its hosts, from facts of before the run. Pure.

Hosts that each went back to what they had before would be left between two revisions after an earlier run that was interrupted there
(docs/decisions/0012-one-way-back-for-all-ranks.md).
"""

from __future__ import annotations

import typing as t

from ansible_collections.rankzero.inference.plugins.plugin_utils import host_facts

DEFAULT_READY_SECONDS = 900
NOTHING: dict[str, t.Any] = {"revision": None, "hosts": {}, "leader": None, "ready_timeout": DEFAULT_READY_SECONDS, "rekey": False}
Record = t.Mapping[str, t.Any]
Entries = t.Mapping[str, Record]  # host -> one kept revision as node facts saw it there


def choose(replica: str, facts: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """The revision that was proven on every one of its ranks and is still whole there, the one that runs before any other; else nothing.

    A revision that lacks its model or another thing outside of its files is gone back to all the same: what ran comes back with its model, whereas
    nothing, or an older revision that nobody asked for, would take its place. C(lacking) says what it lacks.

    C(facts): host -> node facts, of every host of the play.
    C({revision: fingerprint|null, hosts: {host: rank}, leader: host|null, ready_timeout: seconds, rekey: bool}).  C(rekey): its ranks hold different keys
    of the tie (a run that wrote them anew was interrupted), so they need a new one.
    """
    known = {host: host_facts.normalise(found) for host, found in facts.items() if not host_facts.problem(found)}
    records = {host: found["shards"][replica] for host, found in known.items() if replica in found["shards"]}
    found = {revision: _entries(revision, records) for record in records.values() for revision in _kept(record)}
    usable = {revision: entries for revision, entries in found.items() if _is_proven(entries) and _is_whole(entries, len(known))}
    if not usable:
        return dict(NOTHING)
    revision = max(sorted(usable), key=lambda one: _preference(one, usable[one], records))
    ranks = {host: int(entry["rank"]) for host, entry in usable[revision].items()}
    order = sorted(ranks, key=lambda host: ranks[host])
    budgets = [entry["budget_seconds"] for entry in usable[revision].values() if entry["budget_seconds"]]
    return {
        "revision": revision,
        "hosts": {host: ranks[host] for host in order},
        "leader": order[0],
        "ready_timeout": max(budgets, default=DEFAULT_READY_SECONDS),
        "rekey": len({entry["tie_id"] for entry in usable[revision].values()}) > 1,
    }


def lacking(replica: str, facts: t.Mapping[str, t.Any], back: t.Mapping[str, t.Any]) -> dict[str, str]:
    """host -> what the revision to go back to cannot start without there; {} where it can start. C(back): of C(choose)."""
    known = {host: host_facts.normalise(facts[host]) for host in back["hosts"]}
    entries = {host: entry for host, found in known.items() for entry in found["shards"][replica]["revisions"] if entry["revision"] == back["revision"]}
    return {host: entry["lacks"] for host, entry in entries.items() if entry["lacks"]}


def _kept(record: Record) -> list[str]:
    return [entry["revision"] for entry in record["revisions"]]


def _entries(revision: str, records: t.Mapping[str, Record]) -> dict[str, Record]:
    return {host: entry for host, record in records.items() for entry in record["revisions"] if entry["revision"] == revision}


def _is_proven(entries: Entries) -> bool:
    return all(entry["proven"] and not entry["problem"] for entry in entries.values())


def _is_whole(entries: Entries, hosts: int) -> bool:
    """Whether every rank is here. One that no host of the play has may be on a host outside of it: then it has to be on all hosts inside."""
    nodes = {entry["nodes"] for entry in entries.values()}
    ranks = [entry["rank"] for entry in entries.values()]
    count = next(iter(nodes)) if len(nodes) == 1 else None
    if count is None or None in ranks or len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(count)):
        return False
    return len(ranks) == count or len(entries) == hosts


def _preference(revision: str, entries: Entries, records: t.Mapping[str, Record]) -> tuple[t.Any, ...]:
    """What runs on most ranks, then what most have named as the one before, then the newest: greater is better."""
    current = sum(records[host]["revision"] == revision for host in entries)
    named = sum(revision in (records[host]["revision"], records[host]["previous"]) for host in entries)
    age = max(len(_kept(records[host])) - _kept(records[host]).index(revision) for host in entries)
    return named == len(entries), current / len(entries), named / len(entries), -age
