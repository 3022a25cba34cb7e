# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether a host already is what the plan wants: decided from facts, so that an interrupted run is finished by the next one."""

from __future__ import annotations

import typing as t

from ansible_collections.rankzero.inference.plugins.plugin_utils.render import Rendered, sha256

UNPROVEN = "readiness of the running revision is not proven"
RUNNING_STAGES = ("starting", "tying", "restarting", "waiting", "sidecars", "running")
TIE_DIFFERS = "the ranks hold different tie keys, so they would refuse each other"


def reasons(record: t.Mapping[str, t.Any] | None, shard: t.Mapping[str, t.Any], rendered: Rendered) -> list[str]:
    """Why the host is not converged, as sentences; empty when there is nothing to do.

    C(record): the shard as node facts saw it, or None.  Equal fingerprint, equal files, an active service and a valid proof of readiness
    is nothing to do.
    """
    if not isinstance(record, t.Mapping) or not record:
        return ["the host has no shard of this replica"]
    found = []
    fingerprint = shard["fingerprint"]
    if record.get("revision") != fingerprint:
        found.append("revision %s is not current (%s is)" % (fingerprint, record.get("revision") or "none"))
    else:
        found += _changed_files(_mapping(record.get("files_sha256")), rendered)
        problems = record.get("secret_problems")
        found += ["secret files: %s" % "; ".join(map(str, problems))] if isinstance(problems, list) and problems else []
    unit = _mapping(record.get("unit"))
    if unit.get("sha256") != sha256(rendered.unit) or unit.get("manager") != shard["service_manager"]:
        found.append("the service file differs")
    if not unit.get("active"):
        found.append("the service is not active")
    elif unit.get("state") == "unmanaged":
        found.append("the shard runs without its supervisord, which was killed, so that nothing would start it again")
    elif record.get("stage") not in RUNNING_STAGES:
        found.append("the shard is %s" % (record.get("stage") or "not running"))
    elif not record.get("ready"):
        found.append(UNPROVEN)
    return found


def is_left(replica: str, facts: t.Mapping[str, t.Any]) -> bool:
    """Whether the facts saw anything of a replica on a host: its records, or what is left where those are gone; or a user without a replica."""
    if _mapping(facts.get("locks")).get(replica) is not None:
        return True  # of a run that died before it wrote anything else
    if _mapping(facts.get("shards")).get(replica):
        return True
    left = _mapping(facts.get("traces"))
    replicas = _mapping(left.get("replicas"))
    return replica in replicas or (bool(left.get("made_users")) and not replicas)


def is_converged(plan: t.Mapping[str, t.Any], facts: t.Mapping[str, t.Any]) -> bool:
    """True where no host has anything to do: every rank is as planned, is proven and has its adapters' files, no other host has anything of the replica, and
    no dead run's lock is left.

    C(facts): host -> node facts of all hosts of the request.
    """
    if not plan["shards"] or plan["to_fetch"] or any(shard["converge"]["reasons"] for shard in plan["shards"].values()):
        return False
    locked = any(_mapping(_mapping(found).get("locks")).get(plan["replica"]) is not None for found in facts.values())
    return not locked and not any(is_left(plan["replica"], _mapping(found)) for host, found in facts.items() if host not in plan["shards"])


def _mapping(value: t.Any) -> t.Mapping[str, t.Any]:
    """Records may come from an inventory that a person wrote: another type counts as nothing known."""
    return value if isinstance(value, t.Mapping) else {}


def _changed_files(seen: t.Mapping[str, str], rendered: Rendered) -> list[str]:
    wanted = rendered.hashes()
    changed = sorted(name for name in set(seen) | set(wanted) if seen.get(name) != wanted.get(name))
    return ["files of the revision differ: %s" % ", ".join(changed)] if changed else []


def with_tie(converge: dict[str, dict[str, t.Any]], records: t.Mapping[str, t.Any]) -> dict[str, dict[str, t.Any]]:
    """Ranks whose tie keys differ (a deploy was interrupted) are all written anew, however converged each of them looks.

    C(converge): what over_replica says.  C(records): host -> the shard as node facts saw it; C(tie_id) tells keys apart without telling them.
    """
    ids = {_mapping(records.get(host)).get("tie_id") for host in converge}
    if len(converge) < 2 or (len(ids) == 1 and None not in ids):
        return converge
    return {host: {"reasons": one["reasons"] + ([TIE_DIFFERS] if records.get(host) else []), "restart": True} for host, one in converge.items()}


def over_replica(own: t.Mapping[str, list[str]], ranks: t.Mapping[str, int]) -> dict[str, dict[str, t.Any]]:
    """One replica, one fate: a rank that has to change takes all others with it, since ranks meet only when they start together.

    C(own): host -> reasons.  C(ranks): host -> rank.  Returns host -> C({reasons, restart}): C(restart) is true where the host itself is
    as planned but must start again with the others.
    """
    changed = [host for host, found in own.items() if found and found != [UNPROVEN]]
    unproven = [host for host, found in own.items() if found == [UNPROVEN]]
    result = {}
    for host, found in own.items():
        others = ["rank %d (%s) changes, and all ranks start together" % (ranks[other], other) for other in changed if other != host]
        if not found and not changed:
            others = ["readiness of rank %d (%s) is not proven" % (ranks[other], other) for other in unproven if other != host]
        settled = not found or found == [UNPROVEN]
        result[host] = {"reasons": found + others if settled else found, "restart": bool(changed) and settled}
    return result
