# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""TCP ports of a replica: which are taken, on which the ranks meet, and on which they are tied."""

from __future__ import annotations

import dataclasses
import ipaddress
import typing as t

from ansible_collections.rankzero.inference.plugins.plugin_utils.engines.base import Engine, Shard
from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Findings

if t.TYPE_CHECKING:
    from ansible_collections.rankzero.inference.plugins.plugin_utils.plan import Rank

# Below the usual floor of ephemeral ports (32768), and beside the engines' own defaults.
LEADER_PORTS = range(29500, 30000)
TIE_PORTS = range(29400, 29500)
TIE = "the tie of the ranks"
RUN_PORTS = 10  # consecutive runs meet on different ports, so that what is left of one run does not meet the next


def run_ports(leader_port: int, nodes: int, needed: t.Sequence[int] = (0,)) -> list[int]:
    """The leader port of each run, around and around; the distance leaves room for what an engine binds beside it."""
    step = max(needed) + 1
    return [port for port in (leader_port + run * step for run in range(RUN_PORTS)) if port + step <= 65536] if nodes > 1 else []


def choose_tie_port(ranks: t.Sequence[Rank], stated: int | None, others: t.Collection[int], replica: str, findings: Findings) -> int | None:
    """The port on which rank 0 waits for the others' supervisors: as stated; else as it is now; else the first that is free there. None on a single node.

    C(others): the replica's other ports on that host.
    """
    if len(ranks) == 1:
        return None
    if stated is not None:
        if stated in others:
            findings.fault("replica_tie_port", stated, "another port than the replica's others: %s" % ", ".join(map(str, sorted(others))))
        return stated
    leader, address = ranks[0], ranks[0].endpoint.address if ranks[0].endpoint else "0.0.0.0"
    taken = {*others, *_of_other_replicas(leader, replica)}
    current: set[int] = {shard["tie_port"] for one in ranks for name, shard in one.facts["shards"].items() if name == replica and shard["tie_port"]}
    candidates: list[int] = [*sorted(current), *TIE_PORTS]
    for port in candidates:
        if port not in taken and _holder(leader, address, port, replica) is None:
            return port
    findings.fault(
        "replica_tie_port",
        "no free port from %d to %d" % (TIE_PORTS[0], TIE_PORTS[-1]),
        "a port that is free on the leader",
        "Set replica_tie_port.",
        host=leader.host.name,
        rank=0,
    )
    return TIE_PORTS[0]


def choose_leader_port(
    ranks: t.Sequence[Rank], stated: int | None, http_port: int, replica: str, nodes: int, findings: Findings, needed: t.Sequence[int] = (0,)
) -> int:
    """The port that the ranks meet on: as stated; else the one that the replica has now; else the first that is free on every rank's host.

    C(needed): distances from it of the ports that the leader binds for the ranks.
    """
    if stated is not None:
        if stated == http_port:
            findings.fault("replica_leader_port", stated, "another port than replica_http_port")
        return stated
    if nodes == 1:
        return LEADER_PORTS[0]
    current: set[int] = {shard["leader_port"] for one in ranks for name, shard in one.facts["shards"].items() if name == replica and shard["leader_port"]}
    taken = {http_port}
    for one in ranks:
        taken |= {entry["port"] for entry in one.facts["ports_in_use"] if not _ours(entry, one, replica)} | _of_other_replicas(one, replica)
    candidates: list[int] = [*sorted(current), *LEADER_PORTS[:: RUN_PORTS * (max(needed) + 1)]]
    for port in candidates:
        if not taken & {start + distance for start in run_ports(port, nodes, needed) for distance in needed}:
            return port
    findings.fault(
        "replica_leader_port",
        "no free port from %d to %d" % (LEADER_PORTS[0], LEADER_PORTS[-1]),
        "a port that is free on every rank's host",
        "Set replica_leader_port.",
    )
    return LEADER_PORTS[0]


def _of_other_replicas(one: Rank, replica: str) -> set[int]:
    """Ports of replicas that are deployed but may be stopped just now."""
    others = [shard for name, shard in one.facts["shards"].items() if name != replica]
    return {shard[key] for shard in others for key in ("leader_port", "http_port", "tie_port") if shard[key]} | {
        port for shard in others for port in shard["run_ports"]
    }


def check(ranks: t.Sequence[Rank], shards: t.Sequence[Shard], engine: Engine, replica: str, findings: Findings, tie_port: int | None = None) -> None:
    """Every port that a rank listens on, in any run, must be free on its host, or be held by this replica's own shard."""
    needed = engine.leader_ports(shards[0].profile) if shards else (0,)
    for one, shard in zip(ranks, shards):
        first = engine.listen_ports(shard) + ([(shard.address, tie_port, TIE)] if tie_port is not None and one.rank == 0 else [])
        later = [engine.listen_ports(dataclasses.replace(shard, leader_port=port)) for port in run_ports(shard.leader_port, len(ranks), needed)[1:]]
        for address, port, what in [*first, *(entry for ports in later for entry in ports if entry not in first)]:
            holder = _holder(one, address, port, replica) or _deployed(one, port, replica)
            if holder:
                findings.fault(
                    "ports_in_use",
                    "port %d (%s) held by %s" % (port, what, holder),
                    "a free port",
                    "Stop that process, or set %s." % _variable(what),
                    host=one.host.name,
                    rank=one.rank,
                )
            ephemeral = one.facts["limits"]["ephemeral_ports"] if (address, port, what) in first else []
            if len(ephemeral) == 2 and ephemeral[0] <= port <= ephemeral[1]:
                findings.warn(
                    "port",
                    "%d (%s)" % (port, what),
                    "a port outside of the ephemeral range %d-%d" % tuple(ephemeral),
                    "The kernel may give it to an outgoing connection before the engine listens.",
                    host=one.host.name,
                    rank=one.rank,
                )


def _variable(what: str) -> str:
    return "replica_http_port" if what.startswith("HTTP") else "replica_tie_port" if what == TIE else "replica_leader_port"


def _holder(one: Rank, address: str, port: int, replica: str) -> str | None:
    for entry in one.facts["ports_in_use"]:
        if entry["port"] != port or not _overlap(address, entry["address"]) or _ours(entry, one, replica):
            continue
        if entry["shard"]:
            return "shard %s" % entry["shard"]
        return ("pid %d %s" % (entry["pid"], entry["process"] or "")).strip() if entry["pid"] else "another process"
    return None


def _deployed(one: Rank, port: int, replica: str) -> str | None:
    """Another replica's leader on this host has the port as soon as it runs, also while it is stopped just now."""
    for name, shard in sorted(one.facts["shards"].items()):
        if (
            name != replica
            and shard["rank"] == 0
            and port in (shard["http_port"], shard["tie_port"], *shard["run_ports"], shard["leader_port"] if (shard["nodes"] or 0) > 1 else None)
        ):
            return "shard %s/0, which is deployed here" % name
    return None


def _ours(entry: t.Mapping[str, t.Any], one: Rank, replica: str) -> bool:
    """Held by this replica, its run_shard.py too; or bound but not yet listening by nobody known, which is its own engine while it loads."""
    if replica in one.facts["shards"] and entry["pid"] is not None and entry["pid"] in one.facts["shards"][replica]["pids"]:
        return True
    if entry["shard"] is not None:
        return str(entry["shard"]).rsplit("/", 1)[0] == replica
    return entry["pid"] is None and entry["listening"] is False and replica in one.facts["shards"]


def _overlap(wanted: str, held: t.Any) -> bool:
    """Two bindings of one port collide when they share an address; an unknown address counts as all."""
    if held in (None, "", "*"):
        return True
    try:
        one, other = ipaddress.ip_address(wanted), ipaddress.ip_address(str(held))
    except ValueError:
        return True
    return one.is_unspecified or other.is_unspecified or one == other or getattr(other, "ipv4_mapped", None) == one
