# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters over what hosts said: results of a failed run, and facts."""

from __future__ import annotations

import typing as t

from ansible_collections.rankzero.inference.plugins.plugin_utils import failures, hostvars, lifecycle


def failure_summary(hosts: t.Sequence[str], variables: t.Any, plan: t.Mapping[str, t.Any], restored: t.Any = None, done: str = "deployed") -> str:
    found = _failures(hosts, variables)
    ranks = {str(host): int(shard["rank"]) for host, shard in plan["shards"].items()}
    undone = {str(host): hostvars.plain(variables[host].get("__replica_restored") or {}) for host in hosts}
    logs = {host: str(result["log_file"]) for host, result in undone.items() if result.get("log_file")}
    return failures.summary(
        str(plan["replica"]), found, ranks, hostvars.text(restored), logs, str(done), any(result.get("changed") for result in undone.values())
    )


def was_locked(hosts: t.Sequence[str], variables: t.Any) -> bool:
    return failures.was_locked(_failures(hosts, variables).values())


def stopped_replicas(facts: t.Any) -> list[str]:
    return lifecycle.stopped_replicas(hostvars.plain(facts))


def _failures(hosts: t.Sequence[str], variables: t.Any) -> dict[str, t.Any]:
    return {str(host): hostvars.plain(variables[host].get("ansible_failed_result")) for host in hosts}


class FilterModule:
    def filters(self) -> dict[str, t.Callable[..., t.Any]]:
        return {"failure_summary": failure_summary, "was_locked": was_locked, "stopped_replicas": stopped_replicas}
