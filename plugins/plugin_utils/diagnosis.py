# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From what every host tells about its shard to one table, the likely cause in a sentence, and the next step. Pure.

When one rank ends, all others say so at length, and usually later. So what a rank says about itself counts before what it says about its peers, and
the order between kinds of evidence counts before the order of ranks.
"""

from __future__ import annotations

import dataclasses
import typing as t

from ansible_collections.rankzero.inference.plugins.module_utils import log_signatures
from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Fault, report
from ansible_collections.rankzero.inference.plugins.plugin_utils.tables import table

Map = t.Mapping[str, t.Any]
LINE_LIMIT = 90

# What counts first. Lines of a log are the most particular. That a host is silent, or a process was killed, explains what its peers say of it;
# that a program ended, without more, explains nothing.
CAUSE, REFUSED, OWN_ERROR, UNREACHABLE, MISSING, KILLED, DOWN, EVIDENCE, CONSEQUENCE, LOST, STOPPED, OWN_END, GATE, WEAK = range(14)
_OF_LINES = {"cause": CAUSE, "error": OWN_ERROR, "consequence": CONSEQUENCE, "weak": WEAK}


@dataclasses.dataclass(frozen=True)
class Seen:
    """What is known of one host: its facts (or None), the answer of shard_diagnosis (or None), and why there is none."""

    facts: t.Any
    answer: Map | None
    problem: str | None = None
    unreachable: bool = False


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One possible cause. C(order) is one of the constants above; C(culprit): the ranks themselves agree that this one ended first."""

    order: int
    rank: int | None
    host: str
    text: str
    line: str | None = None
    next_step: str | None = None
    culprit: bool = False


def rows(replica: str, seen: t.Mapping[str, Seen], planned: Map | None = None) -> list[dict[str, t.Any]]:
    """One row for each host that has, had, or should have a rank, by rank; a host that cannot be asked has one as well.

    C(planned): the plan recomputed from facts, or None; it tells the ranks of hosts that tell nothing themselves.
    """
    found = []
    for host, one in seen.items():
        rank = _rank(replica, one, _mapping((planned or {}).get("shards")).get(host))
        if one.problem is None and not _present(replica, one) and (rank is None or not _any_present(replica, seen)):
            continue
        found.append(_row(replica, host, rank, one))
    return sorted(found, key=lambda row: (row["rank"] is None, row["rank"] or 0, row["host"]))


def _any_present(replica: str, seen: t.Mapping[str, Seen]) -> bool:
    return any(_present(replica, one) for one in seen.values())


def _present(replica: str, one: Seen) -> bool:
    if one.answer is not None:
        return bool(one.answer.get("present"))
    return replica in _mapping(_mapping(one.facts).get("shards"))


def _rank(replica: str, one: Seen, planned: t.Any) -> int | None:
    answer = one.answer or {}
    record = _mapping(_mapping(_mapping(one.facts).get("shards")).get(replica))
    for known in (_mapping(answer.get("launch")).get("rank"), _mapping(answer.get("state")).get("rank"), record.get("rank"), _mapping(planned).get("rank")):
        if isinstance(known, int):
            return known
    return None


def _row(replica: str, host: str, rank: int | None, one: Seen) -> dict[str, t.Any]:
    answer = one.answer or {}
    verdict, state, service = _mapping(answer.get("verdict")), _mapping(answer.get("state")), _mapping(answer.get("service"))
    evidence = _mapping(verdict.get("evidence"))
    telling = [entry for entry in answer.get("telling") or () if entry["kind"] != "weak"] or list(answer.get("telling") or ())
    record = _mapping(_mapping(_mapping(one.facts).get("shards")).get(replica))
    stage = "unreachable" if one.unreachable else "not asked" if one.problem else "gone" if not answer.get("present") else _stage(verdict, state)
    return {
        "rank": rank,
        "host": host,
        "nodes": _mapping(answer.get("launch")).get("nodes") or record.get("nodes"),
        "stage": stage,
        "ready": verdict.get("ready") is True,
        "service": _service(service) if answer.get("present") else None,
        "restarts": state.get("restarts"),
        "failures": state.get("failures"),
        "held_mib": [gpu.get("held_mib") for gpu in evidence.get("gpus") or ()],
        "expected_mib": [gpu.get("expected_mib") for gpu in evidence.get("gpus") or ()],
        "without_gpu_evidence": bool(evidence.get("judged_without_gpu")),
        "tie": _tie(state, _mapping(answer.get("launch"))),
        "line": telling[0]["line"] if telling else None,
        "reason": one.problem or verdict.get("reason") or state.get("detail"),
        "log_command": answer.get("log_command"),
    }


def _stage(verdict: Map, state: Map) -> str | None:
    """The gate's stage; while the ranks wait for each other or for their next run, the run's own says more."""
    return state.get("stage") if state.get("stage") in ("tying", "restarting", "stopped", "failed") else verdict.get("stage") or state.get("stage")


def _service(service: Map) -> str:
    if not service:
        return "none"
    active = service.get("active")
    word = "unknown" if active is None else "active" if active else "inactive"
    word = "restarting" if service.get("restarting") else "failed" if service.get("failed") else word
    return "%s (%s)" % (word, service.get("result")) if service.get("result") not in (None, "success") else word


def _tie(state: Map, launch: Map) -> str | None:
    if not launch.get("tie"):
        return None
    tie = _mapping(state.get("tie"))
    if tie.get("role") == "leader":
        return "%d of %s" % (len(tie.get("tied_ranks") or ()), launch.get("nodes"))
    return "tied" if tie.get("tied_ranks") else "not tied"


# ---- the cause


def candidates(replica: str, seen: t.Mapping[str, Seen], found: t.Sequence[Map]) -> list[Candidate]:
    """Everything that may be the cause, the likeliest first."""
    first = _first_to_end(seen)
    cordons = {host: _mapping(one.facts)["cordoned"] for host, one in seen.items() if isinstance(_mapping(one.facts).get("cordoned"), t.Mapping)}
    result: list[Candidate] = []
    for row in found:
        one = seen[row["host"]]
        if one.problem is not None:
            result.append(
                Candidate(
                    UNREACHABLE,
                    row["rank"],
                    row["host"],
                    one.problem,
                    next_step="Look at the host itself: is it on, and does sshd answer? Then run this again.",
                )
            )
        elif one.answer is not None:
            others_run = any(str(other["service"]).startswith("active") for other in found if other is not row)
            again = _undrain(replica, cordons) if cordons else _start_again(row)
            result += _of_rank(row, one.answer, row["rank"] is not None and row["rank"] == first, others_run, again)
    result += _missing(found)
    return sorted(result, key=lambda item: (item.order, not item.culprit, item.rank is None, item.rank or 0, item.host))


def _first_to_end(seen: t.Mapping[str, Seen]) -> int | None:
    """The rank that the last run ended with, as rank 0 told all of them."""
    for one in seen.values():
        end = _mapping(_mapping((one.answer or {}).get("state")).get("last_end"))
        if isinstance(end.get("rank"), int):
            return int(end["rank"])
    return None


def _of_rank(row: Map, answer: Map, culprit: bool, others_run: bool, again: str) -> list[Candidate]:
    """C(again): how a shard that was stopped is started."""

    def make(order: int, text: str, line: str | None = None, hint: str | None = None) -> Candidate:
        return Candidate(order, row["rank"], row["host"], text, line, hint or "On %s: %s" % (row["host"], answer.get("log_command")), culprit)

    result = []
    for entry in [*(answer.get("telling") or ()), *log_signatures.telling(answer.get("kernel") or ())]:
        result.append(make(_OF_LINES[entry["kind"]], entry["cause"] or "it ended with an error of its own", entry["line"], entry["hint"]))
    verdict, state = _mapping(answer.get("verdict")), _mapping(answer.get("state"))
    result += _of_end(make, _mapping(state.get("own_end")), state)
    if not answer.get("present"):
        return result
    if row["stage"] == "stopped" or str(row["service"]).startswith(("inactive", "none", "failed")):
        alone_down = others_run and row["stage"] != "failed"
        result.append(make(DOWN if alone_down else STOPPED, verdict.get("reason") or "its service does not run", hint=again))
    elif verdict.get("failed"):
        result.append(
            make(EVIDENCE if str(row["service"]).startswith("active") else GATE, verdict.get("reason") or "the gate refuses it", hint=verdict.get("hint"))
        )
    if answer.get("problems", {}).get("look"):
        result.append(make(GATE, answer["problems"]["look"], hint="Deploy again: damaged records are written anew."))
    return result


def _of_end(make: t.Callable[..., Candidate], end: Map, state: Map) -> list[Candidate]:
    """What run_shard.py itself wrote about an end here; ends because of another rank are that rank's to explain."""
    kind, reason = end.get("kind"), str(end.get("reason") or "it ended")
    if kind == "check":
        return [make(REFUSED, "it refused to start: %s" % reason, hint="Remove what is in the way; the ranks start again by themselves, or deploy again.")]
    if kind == "launch" or kind == "internal":
        known = log_signatures.cause_of_end(end.get("code"), end.get("signal"))
        return [
            make(KILLED if end.get("signal") else OWN_END, "%s%s" % (reason, ". %s" % known["cause"] if known else ""), hint=known["hint"] if known else None)
        ]
    if kind == "stop":
        return [make(DOWN, "somebody stopped its service: %s" % reason)]
    lost = _mapping(state.get("last_end"))
    return [make(LOST, "the ranks lost each other: %s" % lost.get("reason"))] if lost.get("kind") == "tie" else []


def _start_again(row: Map) -> str:
    return "Deploy again, or start the service on %s; the log there: %s" % (row["host"], row["log_command"])


def _undrain(replica: str, cordons: t.Mapping[str, Map]) -> str:
    """A replica is stopped on all of its hosts when one of them is drained."""
    told = ["%s is cordoned by %s: %s" % (host, one.get("by") or "somebody", one.get("reason") or "no reason given") for host, one in sorted(cordons.items())]
    steps = ["ansible-playbook rankzero.inference.undrain_node -e drain_host=%s" % host for host in sorted(cordons)]
    return "%s. When that is over: %s; then rankzero.inference.restart_replica -e replica_name=%s" % ("; ".join(told), "; ".join(steps), replica)


def _missing(found: t.Sequence[Map]) -> list[Candidate]:
    """Ranks that the replica has and no host of the play."""
    nodes = next((row["nodes"] for row in found if isinstance(row["nodes"], int)), None)
    there = {row["rank"] for row in found if row["stage"] != "gone"}
    if nodes is None or any(row["rank"] is None for row in found):
        return []
    gone = [rank for rank in range(nodes) if rank not in there]
    hosts = {row["rank"]: row["host"] for row in found if row["stage"] == "gone"}
    return [
        Candidate(MISSING, rank, hosts.get(rank, "no host of the play"), "its shard is not there", next_step="Deploy again: the missing shard is written anew.")
        for rank in gone
    ]


# ---- in words


def conclusion(replica: str, found: t.Sequence[Map], causes: t.Sequence[Candidate], faults: t.Sequence[Fault] = ()) -> tuple[str, str]:
    """(the likely cause, the next step), each one or two sentences.  C(faults): why a plan made now is refused."""
    if not found:
        return (
            "Replica %s is on none of these hosts: it was never deployed here, or it was removed." % replica,
            "ansible-playbook rankzero.inference.deploy_replica -e replica_name=%s" % replica,
        )
    if _whole(found):
        ended = max([row["restarts"] or 0 for row in found])
        return (
            "Nothing is wrong now: all %d ranks are ready%s." % (len(found), ", after %d restart(s) of this revision" % ended if ended else ""),
            "Mend what the plan is refused for: what runs goes on, but may not start again." if faults else "Nothing has to be done.",
        )
    strong = [cause for cause in causes if cause.order < WEAK]
    if strong or causes:
        cause = (strong or list(causes))[0]
        rank = "%s (%s)" % ("rank %d" % cause.rank if cause.rank is not None else "a rank", cause.host)
        text = "Likely cause: %s: %s" % (rank, cause.text.rstrip("."))
        return text + (". Its log: %s" % cause.line if cause.line else "."), cause.next_step or "See the archive."
    slow = next((row for row in found if not row["ready"]), found[0])
    return (
        "No rank has failed. Rank %s (%s) is in stage %s: %s."
        % (slow["rank"], slow["host"], slow["stage"], str(slow["reason"] or "no more is known").rstrip(".")),
        "Wait, or read the log on %s: %s" % (slow["host"], slow["log_command"]),
    )


def _whole(found: t.Sequence[Map]) -> bool:
    nodes = found[0]["nodes"]
    return (
        all(row["ready"] for row in found) and isinstance(nodes, int) and sorted(row["rank"] for row in found if row["rank"] is not None) == list(range(nodes))
    )


def text(replica: str, found: t.Sequence[Map], causes: t.Sequence[Candidate], faults: t.Sequence[Fault] = ()) -> str:
    cause, step = conclusion(replica, found, causes, faults)
    step += "\n\n" + report(faults, "A plan made now is refused. Faults") if faults else ""
    if not found:
        return "%s\nNext: %s" % (cause, step)
    cells = [
        [row["rank"], row["host"], row["stage"], row["service"], row["restarts"], _memory(row), row["tie"], _shorten(row["line"] or row["reason"])]
        for row in found
    ]
    head = table(["rank", "host", "stage", "service", "restarts", "GPU MiB held/expected", "tie", "first telling line, else what is known"], cells)
    return "Diagnosis of replica %s\n%s\n\n%s\nNext: %s" % (replica, head, cause, step)


def _memory(row: Map) -> str | None:
    if row["without_gpu_evidence"]:
        return "CPU profile"
    return ", ".join("%s/%s" % ("?" if held is None else held, expected) for held, expected in zip(row["held_mib"], row["expected_mib"])) or None


def _shorten(line: t.Any) -> str:
    flat = " ".join(str(line or "").split())
    return flat if len(flat) <= LINE_LIMIT else flat[: LINE_LIMIT - 1] + "…"


def _mapping(value: t.Any) -> Map:
    """Answers may come from damaged records: another type counts as nothing known."""
    return value if isinstance(value, t.Mapping) else {}
