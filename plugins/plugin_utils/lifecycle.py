# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is done with replicas that are there: which kept revision all ranks can go to, and what has to stop for a host to be drained. Pure."""

from __future__ import annotations

import typing as t

from ansible_collections.rankzero.inference.plugins.module_utils import small_files
from ansible_collections.rankzero.inference.plugins.plugin_utils import host_facts, way_back
from ansible_collections.rankzero.inference.plugins.plugin_utils.convergence import UNPROVEN
from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Findings, natural_key
from ansible_collections.rankzero.inference.plugins.plugin_utils.plan import check_locks

Facts = t.Mapping[str, t.Any]
Records = t.Mapping[str, Facts]  # host -> the shard as node facts saw it


def known_facts(facts: t.Mapping[str, t.Any], findings: Findings) -> dict[str, dict[str, t.Any]]:
    """Facts in one shape; a host without any is a fault."""
    for host, found in facts.items():
        problem = host_facts.problem(found)
        if problem:
            findings.fault("inference_node", problem, "facts of every host", "Gather them with rankzero.inference.node_facts.", host=host)
    return {host: host_facts.normalise(found) for host, found in facts.items() if not host_facts.problem(found)}


# ---- one revision for all ranks


def choose_revision(
    replica: str, facts: t.Mapping[str, t.Any], goal: str, wanted: str | None, ended: t.Collection[str], findings: Findings
) -> dict[str, t.Any]:
    """The revision that every rank has whole: the C(current) one, the C(previous) one, or the C(wanted) fingerprint. {} with faults.

    C({replica, revision, before: {host: fingerprint|null}, shards: {host: {rank}}, leader: {host}, ready_timeout, way_back}), C(way_back) as in way_back.py.
    """
    known = known_facts(facts, findings)
    records = {host: found["shards"][replica] for host, found in known.items() if replica in found["shards"]}
    if not records:
        findings.fault("shards.%s" % replica, "no shard on any of %d host(s)" % len(facts), "a replica that was deployed", "Deploy it first.")
        return {}
    check_locks(replica, {host: known[host] for host in records}, ended, findings)
    for host in records:
        cordoned = known[host]["cordoned"]
        if cordoned:
            findings.fault("cordoned", "by %s: %s" % (cordoned["by"], cordoned["reason"]), "hosts that are not cordoned", "Undrain the host first.", host=host)
    revision = wanted or (_current(records, findings) if goal == "current" else _previous(replica, records, known, findings))
    if revision is None:
        return {}
    for where, wrong in _problems(revision, records).items():
        whole = "revision %s, whole, on every rank" % revision
        if goal == "current" and not wanted:
            seen = wrong if where is None else "revision %s: %s" % (revision, wrong)
            hint = "Bring back what is missing, or deploy the replica, on all of its hosts."
        else:
            seen = wrong if where is None else _has(records[where])
            whole += "" if where is None else ": " + wrong
            hint = _other_revisions(records)
        findings.fault("shards.%s.revisions" % replica, seen, whole, hint, host=where)
    if findings.faults:
        return {}
    entries = {host: _entry(record, revision) or {} for host, record in records.items()}
    order = sorted(records, key=lambda host: int(entries[host]["rank"]))
    budgets = [entry["budget_seconds"] for entry in entries.values() if entry["budget_seconds"]]
    return {
        "replica": replica,
        "revision": revision,
        "before": {host: records[host]["revision"] for host in order},
        "shards": {host: {"rank": entries[host]["rank"]} for host in order},
        "leader": {"host": order[0]},
        "ready_timeout": max(budgets, default=way_back.DEFAULT_READY_SECONDS),
        "way_back": _way_back(replica, facts, records, order),
    }


def _way_back(replica: str, facts: t.Mapping[str, t.Any], records: Records, order: list[str]) -> dict[str, t.Any]:
    """Nothing is removed because a rollback fails: where nothing was proven, what all ranks had stays."""
    found = way_back.choose(replica, facts)
    before = {record["revision"] for record in records.values()}
    if found["revision"] or len(before) != 1:
        return found
    return {**found, "revision": next(iter(before)), "hosts": {host: number for number, host in enumerate(order)}, "leader": order[0]}


def _entry(record: Facts, revision: str) -> Facts | None:
    return next((entry for entry in record["revisions"] if entry["revision"] == revision), None)


def _wrong(entry: Facts) -> str:
    """Why a kept revision cannot be started where it is; empty where it can."""
    return entry["problem"] or entry["lacks"] or ""


def _problems(revision: str, records: Records) -> dict[str | None, str]:
    """host -> why the replica cannot run this revision; {} where it can. The key None is for what concerns no one host."""
    entries = {host: _entry(record, revision) for host, record in records.items()}
    found: dict[str | None, str] = {host: "it is not there" for host, entry in entries.items() if entry is None}
    there = {host: entry for host, entry in entries.items() if entry is not None}
    found.update({host: _wrong(entry) for host, entry in there.items() if _wrong(entry)})
    if found:
        return found
    ranks = {host: entry["rank"] for host, entry in there.items()}
    nodes = {entry["nodes"] for entry in there.values()}
    count = next(iter(nodes)) if len(nodes) == 1 else None
    if not isinstance(count, int) or any(rank is None for rank in ranks.values()) or sorted(ranks.values()) != list(range(count)):
        seen = ", ".join("rank %s (%s)" % (ranks[host], host) for host in sorted(ranks, key=natural_key))
        return {None: "%s of %s rank(s): run it on all hosts of the replica, without --limit" % (seen, "/".join(map(str, sorted(nodes, key=str))))}
    if len({entry["tie_id"] for entry in there.values()}) > 1:
        return dict.fromkeys(there, "its ranks hold different tie keys, so they would refuse each other")
    return {}


def _whole(revision: str | None, records: Records) -> bool:
    return revision is not None and not _problems(revision, records)


def _current(records: Records, findings: Findings) -> str | None:
    """What runs. Ranks of different revisions are an interrupted run's, and there is no one revision to start."""
    found = {record["revision"] for record in records.values()}
    if len(found) == 1 and None not in found:
        return str(next(iter(found)))
    for host, record in records.items():
        findings.fault(
            "shards.revision",
            record["revision"],
            "one revision on all ranks",
            "Deploy the replica, or roll it back: an interrupted run has left it between two revisions.",
            host=host,
        )
    return None


def _previous(replica: str, records: Records, known: t.Mapping[str, Facts], findings: Findings) -> str | None:
    """Where all ranks can go back to.

    With one revision on all ranks that is the one that all have as previous. With two (a run was interrupted) it is the one that every rank has as
    one of these; of two that, the one to which the interrupted run was on its way, as its lock still says.
    """
    current = {record["revision"] for record in records.values()}
    named = {record["previous"] for record in records.values()}
    if len(current) == 1:
        candidates = named - current if len(named) == 1 else set()
    else:
        candidates = {
            revision
            for revision in current | named
            if all(revision in (one["revision"], one["previous"]) for one in records.values()) and _whole(revision, records)
        }
        targets = {(known[host]["locks"].get(replica) or {}).get("target") for host in records}
        candidates = candidates & targets if len(candidates) > 1 else candidates
    candidates.discard(None)
    if len(candidates) == 1:
        return str(next(iter(candidates)))
    for host, record in records.items():
        findings.fault(
            "shards.%s.previous" % replica,
            _has(record),
            "one revision before the present one on all ranks",
            _other_revisions(records),
            host=host,
        )
    return None


def _other_revisions(records: Records) -> str:
    """What to do where the revision cannot be had: name one that can, if there is any."""
    kept = dict.fromkeys(entry["revision"] for record in records.values() for entry in record["revisions"])  # in the order of the hosts
    others = [revision for revision in kept if _whole(revision, records) and any(record["revision"] != revision for record in records.values())]
    if not others and any(_wrong(entry) for record in records.values() for entry in record["revisions"]):
        return "No other revision is whole on all ranks, one on each host of this run. Bring back what is missing, or deploy what is to run."
    if not others:
        return "No other revision is whole on all ranks, one on each host of this run: there is nothing to go back to. Deploy what is to run."
    return "Name one that all ranks have, with -e revision=FINGERPRINT, or deploy: %s." % ", ".join(others)


def _has(record: Facts) -> str:
    alike: dict[str, list[str]] = {}  # several revisions lack the same model: once, or the text grows too long to be shown whole
    for entry in record["revisions"]:
        alike.setdefault(_wrong(entry), []).append(entry["revision"])
    kept = ", ".join(", ".join(those) + (" (%s%s)" % ("each: " if len(those) > 1 else "", problem) if problem else "") for problem, those in alike.items())
    return "current %s, previous %s, kept: %s" % (record["revision"] or "none", record["previous"] or "none", kept or "none")


# ---- a host without replicas


def drain(node: str, facts: t.Mapping[str, t.Any], inventory: t.Collection[str], ended: t.Collection[str], force: bool, findings: Findings) -> dict[str, t.Any]:
    """What has to stop so that nothing runs on C(node): every replica with a rank there, on all of its hosts (one replica, one fate). {} with faults.

    C({node, cordoned: bool, replicas: [{replica, engine, hosts: {host: rank}, missing: [rank], serving: host|null}]}).  C(facts): host -> node facts of all
    hosts of the play, None for one that could not be asked; C(missing) ranks are on those, or on hosts outside of the play.  C(inventory): all its hosts.
    """
    known = {host: host_facts.normalise(found) for host, found in facts.items() if not host_facts.problem(found)}
    if node not in known:
        _not_looked_at(node, facts, inventory, findings)
        return {}
    replicas = [_stopping(replica, record, known) for replica, record in sorted(known[node]["shards"].items())]
    for one in replicas:
        check_locks(one["replica"], {host: known[host] for host in one["hosts"]}, ended, findings)
        if one["serving"] is None and one["missing"] and not force:
            findings.fault(
                "shards.%s" % one["replica"],
                "rank(s) %s on no host that could be asked" % ", ".join(map(str, one["missing"])),
                "the rank that serves, to ask it for requests in flight",
                "Take its host into drain_hosts, or stop the replica whatever is in flight, with -e drain_force=true.",
            )
    return {} if findings.faults else {"node": node, "cordoned": bool(known[node]["cordoned"]), "replicas": replicas}


def _not_looked_at(node: str, facts: t.Mapping[str, t.Any], inventory: t.Collection[str], findings: Findings) -> None:
    """Why nothing is known of the host to drain: it has no such name, this run leaves it out, or it did not answer."""
    if not node or node not in {*inventory, *facts}:
        findings.fault(
            "drain_host", node or None, "the name of one host of the inventory", "Give -e drain_host=HOST; ansible-inventory --graph lists the hosts."
        )
    elif node not in facts:
        findings.fault(
            "drain_host", node, "one of the hosts of this run", "Give drain_hosts (all) and --limit that take in this host and the others of its replicas."
        )
    else:
        findings.fault(
            "drain_host",
            "%s, which could not be asked: %s" % (node, host_facts.problem(facts[node])),
            "a host that answers",
            "The task that gathers its facts says why: mend that, and drain it again. Nothing can be stopped or written down on a host that is down.",
        )


def _stopping(replica: str, record: Facts, known: t.Mapping[str, Facts]) -> dict[str, t.Any]:
    records = {host: found["shards"][replica] for host, found in known.items() if replica in found["shards"]}
    ranks = {host: one["rank"] for host, one in records.items()}
    serving = [host for host, one in records.items() if (_entry(one, str(one["revision"])) or {}).get("serves_http")]
    return {
        "replica": replica,
        "engine": record["engine"],
        "hosts": ranks,
        "missing": sorted(set(range(record["nodes"] or 0)) - {rank for rank in ranks.values() if rank is not None}),
        "serving": serving[0] if serving else None,
    }


def stopped_replicas(facts: t.Any) -> list[str]:
    """Replicas of a host that do not run: what an operator may want to bring back after an undrain."""
    if host_facts.problem(facts):
        return []
    shards = host_facts.normalise(facts)["shards"]
    return sorted(replica for replica, record in shards.items() if record["revision"] and not (record.get("unit") or {}).get("active"))


# ---- what a deploy would do


def change_summary(plan: t.Mapping[str, t.Any]) -> str:
    """A line for each rank, by rank: what of it is not as planned. C(plan): of replica_plan, with C(converge) in each shard."""
    shards = sorted(plan["shards"].items(), key=lambda item: int(item[1]["rank"]))
    changing = [(host, shard) for host, shard in shards if shard["converge"]["reasons"]]
    if not changing:
        lines = ["Replica %s is as planned on all %d rank(s): nothing would change." % (plan["replica"], len(shards))]
    else:
        restarted = any(shard["converge"]["restart"] or shard["converge"]["reasons"] != [UNPROVEN] for _host, shard in changing)
        what = "all its ranks would be written and started together" if restarted else "its ranks would be proven once more, and none restarted"
        lines = ["Replica %s: %s." % (plan["replica"], what)]
        lines += ["  rank %d (%s): %s" % (shard["rank"], host, "; ".join(shard["converge"]["reasons"])) for host, shard in changing]
    lines += ["  %s: what it has of the replica would be removed" % host for host in plan["leaving"]]
    return "\n".join(lines)


# ---- what is left of a replica

_GONE = (
    ("gpu_memory", "no GPU lists memory of it"),
    ("ports", "its ports can be bound"),
    ("processes", "no process of it runs"),
    ("files", "no file of it is left"),
)


def removal_summary(replica: str, results: t.Mapping[str, t.Any], check: bool = False, others: t.Sequence[str] = ()) -> str:
    """A few lines for an operator. C(results): host -> what the module shard answered to C(state=absent), all without failure. C(others): hosts of the
    replica that were not in the play."""
    changed = [host for host in sorted(results, key=natural_key) if results[host].get("changed")]
    left = ["Not looked at: %s. What they have of it is still there; a removal without --limit takes it." % _hosts(others)] if others else []
    if not changed:
        return "\n".join(["There is nothing of replica %s on %s." % (replica, _hosts(list(results))), *left])
    if check:
        return "\n".join(["Replica %s would be removed from %s." % (replica, _hosts(changed)), *left])
    verified = {host: results[host].get("verified") or {} for host in changed}
    seen = [text for name, text in _GONE if all(found.get(name) for found in verified.values())]
    lines = ["Replica %s is gone from %s." % (replica, _hosts(changed)), "Seen there: %s." % (", ".join(seen) or "nothing")]
    lines += ["%s: %s" % (host, small_files.clean(str(note))) for host in changed for note in results[host].get("notes") or ()]
    return "\n".join([*lines, *left])


def _hosts(names: t.Sequence[str]) -> str:
    named = sorted(names, key=natural_key)
    return ", ".join(named) if len(named) <= 8 else "%d hosts" % len(named)
