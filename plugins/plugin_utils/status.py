# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The state of a replica over all hosts, from facts and from a look at the evidence."""

from __future__ import annotations

import typing as t

from ansible_collections.rankzero.inference.plugins.module_utils import small_files
from ansible_collections.rankzero.inference.plugins.plugin_utils.tables import table

Seen = t.Mapping[str, t.Tuple[t.Any, t.Any]]


def ranks(replica: str, seen: Seen, planned: t.Mapping[str, t.Any] | None = None) -> list[dict[str, t.Any]]:
    """One entry for each host that has a shard of the replica, by rank.

    C(seen): host -> (node facts, result of shard_ready or None).  C(planned): the plan that was just deployed; facts are from before it.
    """
    found = []
    for host, (facts, look) in seen.items():
        known = _mapping(_mapping(facts).get("shards")).get(replica)
        record: t.Mapping[str, t.Any] | None = known if isinstance(known, t.Mapping) else None
        if planned is not None:
            record = _deployed(record, planned["shards"].get(host), look)
        if record is None:
            continue
        verdict = _mapping(_mapping(look).get("verdict")) or {"evidence": record.get("evidence")}
        evidence = _mapping(verdict.get("evidence"))
        gpus = [gpu for gpu in evidence["gpus"] if isinstance(gpu, t.Mapping)] if isinstance(evidence.get("gpus"), (list, tuple)) else []
        found.append(
            {
                "rank": record.get("rank"),
                "nodes": record.get("nodes"),
                "host": host,
                "stage": _stage(verdict.get("stage"), record.get("stage")),
                "ready": bool(verdict["ready"]) if "ready" in verdict else bool(record.get("ready")),
                "held_mib": [gpu.get("held_mib") for gpu in gpus],
                "expected_mib": [gpu.get("expected_mib") for gpu in gpus],
                "restarts": record.get("restarts"),
                "revision": record.get("revision"),
                "service": "active" if _mapping(record.get("unit")).get("active") else "inactive",
                "profile": record.get("profile"),
                "fabric": record.get("fabric"),
                "without_gpu_evidence": bool(evidence.get("judged_without_gpu") or verdict.get("judged_without_gpu")),
                "reason": _reason(verdict.get("reason") or record.get("detail"), _mapping(facts).get("cordoned")),
                "seconds": _mapping(look).get("seconds"),
                "stages": dict(_mapping(_mapping(look).get("stages"))),
            }
        )
    return sorted(found, key=lambda entry: (not isinstance(entry["rank"], int), entry["rank"] if isinstance(entry["rank"], int) else 0, entry["host"]))


def _stage(judged: str | None, recorded: str | None) -> str | None:
    """To a gate a shard that was stopped has failed; to an operator who drained its host it is stopped."""
    return "stopped" if (judged, recorded) == ("failed", "stopped") else judged or recorded


def _reason(text: t.Any, cordoned: t.Any) -> t.Any:
    if not isinstance(cordoned, t.Mapping):
        return text
    told = "the host is cordoned by %s: %s" % (cordoned.get("by") or "somebody", cordoned.get("reason") or "no reason given")
    return "%s; %s" % (text, told) if text else told


def _mapping(value: t.Any) -> t.Mapping[str, t.Any]:
    """Facts may come from an inventory that a person wrote: another type counts as nothing known."""
    return value if isinstance(value, t.Mapping) else {}


def _deployed(record: t.Mapping[str, t.Any] | None, shard: t.Mapping[str, t.Any] | None, look: t.Any) -> dict[str, t.Any] | None:
    """What a host has after a deploy that succeeded: the planned shard, proven now or before."""
    if shard is None:
        return None
    labels = shard["labels"]
    return {
        **(record or {}),
        "rank": shard["rank"],
        "nodes": shard["nodes"],
        "revision": shard["fingerprint"],
        "stage": "ready",
        "ready": bool((look or {}).get("ready", True)),
        "unit": {"active": True},
        "profile": labels["profile"],
        "fabric": labels["fabric"],
        "restarts": (record or {}).get("restarts") if not look else 0,
    }


def whole(found: t.Sequence[t.Mapping[str, t.Any]]) -> bool:
    """True where every rank that the replica has is there, ready, and of one revision."""
    if not found or not all(entry["ready"] for entry in found) or len({entry["revision"] for entry in found}) != 1:
        return False
    nodes = found[0]["nodes"]
    return isinstance(nodes, int) and all(isinstance(entry["rank"], int) for entry in found) and sorted(entry["rank"] for entry in found) == list(range(nodes))


def text(replica: str, found: t.Sequence[t.Mapping[str, t.Any]], hosts: t.Sequence[str], endpoint: str | None = None, silent: t.Sequence[str] = ()) -> str:
    """C(silent): hosts that did not answer; C(hosts) has them, too."""
    unknown = ["  %s does not answer: whether it has a rank, and how that is, is not known" % host for host in silent]
    if not found:
        return "\n".join(["Replica %s: no shard on any of %d host(s)." % (replica, len(hosts) - len(silent)), *unknown])
    rows = [
        [
            entry["rank"],
            entry["host"],
            entry["stage"],
            "yes" if entry["ready"] else "no",
            entry["service"],
            entry["restarts"],
            _memory(entry),
            entry["revision"],
        ]
        for entry in found
    ]
    state = "ready" if whole(found) else "stopped" if all(entry["stage"] == "stopped" for entry in found) else "NOT ready"
    head = "Replica %s: %s%s" % (replica, state, " at %s" % endpoint if endpoint else "")
    heads = ["rank", "host", "stage", "ready", "service", "restarts", "GPU MiB held/expected", "revision"]
    if any(entry["seconds"] is not None for entry in found):
        heads, rows = [*heads, "seconds until ready, by stage"], [[*row, _stages(entry)] for row, entry in zip(rows, found)]
    lines = [head, table(heads, rows)]
    lines += [
        "  rank %s (%s): %s" % (entry["rank"], entry["host"], small_files.clean(str(entry["reason"])))
        for entry in found
        if entry["reason"] and not entry["ready"]
    ]
    missing = _missing(found)
    lines += ["  rank %s is on none of the hosts that answered" % ", ".join(map(str, missing))] if missing else []
    return "\n".join([*lines, *unknown])


def _missing(found: t.Sequence[t.Mapping[str, t.Any]]) -> list[int]:
    """Ranks that the replica has by its own word, and no host."""
    nodes = next((entry["nodes"] for entry in found if isinstance(entry["nodes"], int)), 0)
    return sorted(set(range(min(nodes, 4096))) - {entry["rank"] for entry in found if isinstance(entry["rank"], int)})


def _memory(entry: t.Mapping[str, t.Any]) -> str:
    if entry["without_gpu_evidence"]:
        return "CPU profile"
    each = ["%s/%s" % ("?" if held is None else held, expected) for held, expected in zip(entry["held_mib"], entry["expected_mib"])]
    return "%d x %s" % (len(each), each[0]) if len(each) > 1 and len(set(each)) == 1 else ", ".join(each)


def _stages(entry: t.Mapping[str, t.Any]) -> str | None:
    """C(142.6: starting 1.2, loading 140.6, serving 0.8): where the time went, as the controller saw it."""
    if entry["seconds"] is None:
        return None
    told = ", ".join("%s %g" % (stage, seconds) for stage, seconds in entry["stages"].items())
    return "%g%s" % (entry["seconds"], ": " + told if told else "")
