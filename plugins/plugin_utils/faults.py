# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Faults and warnings as data. They become text only when somebody looks at them."""

from __future__ import annotations

import dataclasses
import re
import typing as t

_NUMBER = re.compile(r"([0-9]+)")


def natural_key(text: str) -> tuple[t.Any, ...]:
    """Sort key under which C(gpu2) comes before C(gpu10): runs of digits count as numbers. Any two texts can be compared."""
    parts = _NUMBER.split(text)  # text and numbers take turns, so equal positions have equal types
    return tuple(int(part) if position % 2 else part.lower() for position, part in enumerate(parts)), text


@dataclasses.dataclass(frozen=True)
class Fault:
    """One thing that keeps a replica from being deployed, or, as a warning, one that an operator should know.

    C(host) and C(rank) are None where it concerns no one host. C(field) names the option, fact or file; C(seen) and C(wanted) are short
    texts; C(hint) says what to do.
    """

    host: str | None
    rank: int | None
    field: str
    seen: str
    wanted: str
    hint: str = ""

    def as_dict(self) -> dict[str, t.Any]:
        return dataclasses.asdict(self)

    def text(self) -> str:
        """One readable paragraph, as an operator sees it."""
        where = " ".join(part for part in (self.host or "", "rank %d" % self.rank if self.rank is not None else "") if part)
        line = "%s%s: seen %s, wanted %s" % ("%s: " % where if where else "", self.field, self.seen, self.wanted)
        return "%s. %s" % (line, self.hint) if self.hint else line

    def sort_key(self) -> tuple[t.Any, ...]:
        return (self.host is not None, natural_key(self.host or ""), -1 if self.rank is None else self.rank, self.field, self.seen, self.wanted, self.hint)


class Findings:
    """Collects faults and warnings; nothing stops at the first one."""

    def __init__(self) -> None:
        self._faults: set[Fault] = set()
        self._warnings: set[Fault] = set()

    def fault(self, field: str, seen: t.Any, wanted: str, hint: str = "", *, host: str | None = None, rank: int | None = None) -> None:
        self._faults.add(Fault(host, rank, field, shown(seen), wanted, hint))

    def warn(self, field: str, seen: t.Any, wanted: str, hint: str = "", *, host: str | None = None, rank: int | None = None) -> None:
        self._warnings.add(Fault(host, rank, field, shown(seen), wanted, hint))

    @property
    def faults(self) -> list[Fault]:
        return sorted(self._faults, key=Fault.sort_key)

    @property
    def warnings(self) -> list[Fault]:
        return sorted(self._warnings, key=Fault.sort_key)


def shown(value: t.Any) -> str:
    """How a value that was seen is written: strings that carry surprises are quoted with escapes, and nothing is longer than 200 characters."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        plain = value and value.isprintable() and value == value.strip()
        text = value if plain else repr(str(value))
    else:
        text = str(value)
    return text if len(text) <= 200 else text[:197] + "..."


def names(hosts: t.Iterable[str]) -> str:
    """Hosts in natural order, C(a, b and 198 more) of more than eight: nobody reads a pool of hundreds name by name."""
    ordered = sorted(hosts, key=natural_key)
    told, left = ordered[:8], ordered[8:]
    return ", ".join(told) + (" and %d more" % len(left) if left else "")


def alike(texts: t.Mapping[str, str]) -> list[str]:
    """C({host: text}) as one C(hosts: text) for each text, in the natural order of the first hosts."""
    hosts: dict[str, list[str]] = {}
    for host in sorted(texts, key=natural_key):
        hosts.setdefault(texts[host], []).append(host)
    return ["%s: %s" % (names(those), text) for text, those in hosts.items()]


def report(faults: t.Sequence[Fault], heading: str) -> str:
    """The whole list as text: a heading line and one numbered line for each text of C(texts)."""
    return "\n".join(["%s (%d):" % (heading, len(faults))] + ["  %d. %s" % entry for entry in enumerate(texts(faults), 1)])


def texts(faults: t.Sequence[Fault]) -> list[str]:
    """One text for each fault, in their order; one for all of them where three hosts or more have the same."""
    hosts: dict[Fault, set[str]] = {}
    for fault in faults:
        if fault.host:
            hosts.setdefault(_anywhere(fault), set()).add(fault.host)
    found: dict[str, None] = {}  # in the order of the faults, each text once
    for fault in faults:
        those = hosts.get(_anywhere(fault), set()) if fault.host else set()
        found[fault.text() if len(those) < 3 else dataclasses.replace(fault, host="%d hosts (%s)" % (len(those), names(those)), rank=None).text()] = None
    return list(found)


def _anywhere(fault: Fault) -> Fault:
    return dataclasses.replace(fault, host=None, rank=None)
