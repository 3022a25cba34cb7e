# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters over what hosts said: results of a run, and facts."""

from __future__ import annotations

import typing as t

from ansible_collections.rankzero.inference.plugins.plugin_utils import failures, hostvars, lifecycle


def failure_summary(hosts: t.Sequence[str], variables: t.Any, plan: t.Mapping[str, t.Any], done: str = "deployed", host: str | None = None) -> str:
    """The report as `host` says it: in full on the first host with a part in the replica that is still in the play, in one line on the others with a part in
    it, and nothing on a host that has none and did not fail: a pool may have hundreds."""
    if host is None:
        return _whole_summary(hosts, variables, plan, done)
    failed = {name for name, failure in _failures(hosts, variables).items() if failure}
    parts = {str(name) for name in (*plan["shards"], *hostvars.plain(plan["way_back"])["hosts"])} | failed
    there = [name for name, result in _registered(hosts, variables, "__replica_unlocked").items() if result]
    teller = next((name for name in there if name in parts), there[0] if there else str(host))
    if str(host) != teller and str(host) not in parts:
        return ""
    text = _whole_summary(hosts, variables, plan, done)
    return text if str(host) == teller else "%s The report is at %s." % (text.split("\n", 1)[0], teller)


def _whole_summary(hosts: t.Sequence[str], variables: t.Any, plan: t.Mapping[str, t.Any], done: str) -> str:
    ranks = {str(host): int(shard["rank"]) for host, shard in plan["shards"].items()}
    back = hostvars.plain(plan["way_back"])
    restored, proved = _registered(hosts, variables, "__replica_restored"), _registered(hosts, variables, "__replica_proved")
    seen_last = _registered(hosts, variables, "__replica_unlocked") if done == "restarted" else restored  # a restart has no way back
    lost = {host for host, result in _as_registered(hosts, variables, "__replica_proved").items() if result.get("unreachable")}
    return failures.summary(
        str(plan["replica"]),
        _failures(hosts, variables),
        ranks,
        None if done == "restarted" else back["revision"],
        {host: str(result["log_file"]) for host, result in restored.items() if result.get("log_file")},
        str(done),
        any(result.get("changed") for result in restored.values()),
        {host: result for found in (proved, restored) for host, result in found.items() if result.get("failed")},
        sorted(host for host, result in seen_last.items() if (not result or host in lost) and host in {*ranks, *back["hosts"]}),
        any(result.get("ready") for result in proved.values()),
    )


def was_locked(hosts: t.Sequence[str], variables: t.Any) -> bool:
    return failures.was_locked(_failures(hosts, variables).values())


def are_back(hosts: t.Sequence[str], variables: t.Any, back: t.Mapping[str, t.Any]) -> bool:
    return failures.are_back(_failures(hosts, variables).values(), hostvars.plain(back), _registered(hosts, variables, "__replica_restored"))


def removal_summary(hosts: t.Sequence[str], variables: t.Any, replica: str, check: bool = False, members: t.Sequence[str] = ()) -> str:
    others = [str(host) for host in members if host not in hosts]
    return lifecycle.removal_summary(str(replica), _registered(hosts, variables, "__replica_removed"), bool(check), others)


def change_summary(plan: t.Mapping[str, t.Any]) -> str:
    return lifecycle.change_summary(hostvars.plain(plan))


def stopped_replicas(facts: t.Any) -> list[str]:
    return lifecycle.stopped_replicas(hostvars.plain(facts))


def _failures(hosts: t.Sequence[str], variables: t.Any) -> dict[str, t.Any]:
    return {str(host): hostvars.plain(variables[host].get("ansible_failed_result")) for host in hosts}


def _registered(hosts: t.Sequence[str], variables: t.Any, name: str) -> dict[str, t.Any]:
    """host -> what a task registered there; empty where it was not run: a host that cannot be reached does not come into a rescue, or is lost at the task,
    and then Ansible registers that. (ansible_play_hosts does not tell: any_errors_fatal takes all hosts out of that.)"""
    return {host: {} if result.get("unreachable") else result for host, result in _as_registered(hosts, variables, name).items()}


def _as_registered(hosts: t.Sequence[str], variables: t.Any, name: str) -> dict[str, t.Any]:
    return {str(host): hostvars.plain(variables[host].get(name) or {}) for host in hosts}


class FilterModule:
    def filters(self) -> dict[str, t.Callable[..., t.Any]]:
        return {
            "failure_summary": failure_summary,
            "was_locked": was_locked,
            "are_back": are_back,
            "stopped_replicas": stopped_replicas,
            "removal_summary": removal_summary,
            "change_summary": change_summary,
        }
