# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The few lines that a failed deploy ends with: which rank, why, and what is on the hosts now."""

from __future__ import annotations

import typing as t

from ansible_collections.rankzero.inference.plugins.module_utils.evidence import DOES_NOT_STAY_UP

Result = t.Mapping[str, t.Any]
TELLING_LINES = 3


def summary(
    replica: str,
    failures: t.Mapping[str, Result | None],
    ranks: t.Mapping[str, int],
    restored: str | None,
    logs: t.Mapping[str, str] | None = None,
    done: str = "deployed",
    moved: bool = True,
    undoing: t.Mapping[str, Result] | None = None,
    unreachable: t.Collection[str] = (),
    proven: bool = True,
) -> str:
    """C(failures): host -> failed result or None.  C(ranks): host -> planned rank.  C(restored): the revision that is back, or None.  C(logs): host -> file
    on the controller with the last lines of its log, which is gone from the host.  C(done): what was to be done.
    C(moved): whether restoring changed anything: a revision that was deployed once more fails where it is.
    C(undoing): host -> failed result of restoring, or of the gate after it.  C(unreachable): hosts that left the play.  C(proven): whether that gate passed.

    Ranks that only gave up because of another are left out; a rank whose log tells a cause comes first, since the others often just lost it, and one that was
    met only after its run had ended, perhaps by another rank, comes last.
    """
    culprits = [(host, failure) for host, failure in failures.items() if failure and not failure.get("gave_up")]
    culprits.sort(key=lambda item: (not _cause(item[1]), DOES_NOT_STAY_UP in _why(item[1]), ranks.get(item[0], 1 << 30), item[0]))
    after = sorted((undoing or {}).items(), key=lambda item: (bool(item[1].get("gave_up")), ranks.get(item[0], 1 << 30), item[0]))
    state = _left(failures, restored, done, moved)
    if done != "restarted" and not was_locked(failures.values()) and (after or unreachable):
        state = _half_left(restored, [failure for _host, failure in after], proven)
    lines = ["Replica %s was not %s. %s" % (replica, done, state)]
    lines += ["  %s: %s" % (_who(host, ranks), _why(failure)) for host, failure in culprits]
    lines += _advice(culprits[0][1]) if culprits else []
    lines += ["  %s: it cannot be reached, and is as this run left it; the next run finishes it" % _who(host, ranks) for host in sorted(unreachable)]
    lines += ["  on the way back, %s: %s" % (_who(host, ranks), _why(failure)) for host, failure in after if not failure.get("gave_up")]
    kept = sorted((logs or {}).items(), key=lambda item: (ranks.get(item[0], 1 << 30), item[0]))
    lines += ["  log of %s: %s" % (_who(host, ranks), path) for host, path in kept]
    if culprits and not kept and _verdict(culprits[0][1]):
        lines.append("  next: " + _next(replica, *culprits[0], restored if moved else None))
    return "\n".join(lines)


def are_back(failures: t.Iterable[Result | None], back: t.Mapping[str, t.Any], restored: t.Mapping[str, Result]) -> bool:
    """Whether all ranks of the revision to go back to are there to be proven: none was another run's, is out of reach, or could not be restored.

    C(restored): host -> result of restoring, empty for a host that could not be reached.
    """
    hosts = back["hosts"]
    return bool(hosts) and not was_locked(failures) and all(restored.get(host) and not restored[host].get("failed") for host in hosts)


def was_locked(failures: t.Iterable[Result | None]) -> bool:
    """True where another run was changing the replica on one of the hosts: what is there then is that run's."""
    return any(failure and failure.get("locked") for failure in failures)


def _left(failures: t.Mapping[str, Result | None], restored: str | None, done: str, moved: bool) -> str:
    if was_locked(failures.values()):
        return "Another run is changing it; what this run had changed is undone."
    if restored and not moved:
        return "Revision %s was there before and stays; it is not proven to serve." % restored
    if restored:
        return "Revision %s, which was there before, is back." % restored
    return "Nothing of it was left behind." if done == "deployed" else "It does not serve."


def _half_left(restored: str | None, undoing: t.Sequence[Result], proven: bool) -> str:
    if any("verdict" in failure or failure.get("gave_up") for failure in undoing):
        return "Revision %s, which was there before, is back, but does not prove itself." % restored
    if not undoing and restored and proven:
        return "Revision %s, which was there before, is back." % restored
    what = "revision %s could not be brought back on all ranks, so it does not serve" % restored if restored else "not all of it could be removed"
    return what[0].upper() + what[1:] + ". Run this again, or remove the replica."


def _advice(failure: Result) -> list[str]:
    """What to do, and the lines of the log that tell most: those of the first rank that is named, which is the likely cause of all the others."""
    verdict = _verdict(failure)
    told = ["  do: %s" % verdict["hint"]] if verdict.get("hint") else []
    log = verdict.get("log_lines")
    return told + ["    | %s" % line for line in _telling(log if isinstance(log, list) else [], bool(verdict.get("cause")))]


def _next(replica: str, host: str, failure: Result, back: str | None) -> str:
    """A diagnosis looks at what runs: where that is the revision of before, only the log still tells of this one."""
    if back and failure.get("log_command"):
        return "on %s: %s" % (host, failure["log_command"])
    return "ansible-playbook rankzero.inference.diagnose -e replica_name=%s" % replica


def _telling(log: list[t.Any], cause: bool) -> list[t.Any]:
    """The first lines where one tells a cause, for that one is first; else the engine's last words, and the first line, which may be an error of its own."""
    if cause:
        return log[:TELLING_LINES]
    said = [line for line in log if not str(line).startswith("run_shard: ")] or log
    return said[:1] + said[1:][1 - TELLING_LINES :]


def _who(host: str, ranks: t.Mapping[str, int]) -> str:
    return "rank %d (%s)" % (ranks[host], host) if host in ranks else host


def _verdict(failure: Result) -> Result:
    return _mapping(failure.get("verdict"))


def _mapping(value: t.Any) -> Result:
    return value if isinstance(value, t.Mapping) else {}


def _cause(failure: Result) -> str:
    return str(_verdict(failure).get("cause") or "")


def _why(failure: Result) -> str:
    reason = str(_verdict(failure).get("reason") or (str(failure.get("msg") or "no reason given").splitlines() or [""])[0])
    cause = _cause(failure)
    return reason if not cause or cause in reason else "%s. %s" % (reason.rstrip("."), cause)
