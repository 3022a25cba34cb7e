# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reading values that people and surveys write.

AWX surveys hand over every answer as a string, and an empty answer as C(""). This is the one place where such values are made into what
they mean: C("") is unset, C("8") is 8, C("yes") is true.
"""

from __future__ import annotations

import difflib
import math
import re
import typing as t

from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Findings

_TRUE = {"true", "yes", "on", "1"}
_FALSE = {"false", "no", "off", "0"}
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}\Z")
NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?\Z")


def is_unset(value: t.Any) -> bool:
    """True for None and for the empty string of a survey."""
    return value is None or (isinstance(value, str) and value == "")


def unprintable(text: str) -> str | None:
    """Names the first character that no environment file, unit or argument may carry, or None."""
    if text.isprintable():
        return None
    for character in text:
        if character == "\n":
            return "a newline"
        if character == "\0":
            return "a NUL"
        if character == "\r" or not (character.isprintable() or character == "\t"):
            return "the unprintable character %r" % character
    return None


class Reader:
    """Reads typed fields out of a mapping, and turns what is wrong into faults.

    C(where) is put before the field name in faults (C(replica_profiles.glm)).
    """

    def __init__(self, data: t.Mapping[str, t.Any], where: str, findings: Findings) -> None:
        self.data = data
        self.where = where
        self.findings = findings
        self.known: set[str] = set()

    def _name(self, field: str) -> str:
        return "%s.%s" % (self.where, field) if self.where else field

    def _get(self, field: str) -> t.Any:
        self.known.add(field)
        value = self.data.get(field)
        return None if is_unset(value) else value

    def wrong(self, field: str, seen: t.Any, wanted: str, hint: str = "") -> None:
        self.findings.fault(self._name(field), seen, wanted, hint)

    def text(self, field: str, default: str | None = None, pattern: re.Pattern[str] | None = None, wanted: str = "text") -> str | None:
        """A string without control characters; numbers are accepted as their text (a version C(0.6) in YAML is a float)."""
        value = self._get(field)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            self.wrong(field, value, wanted, "Write it as text.")
            return default
        text = str(value)
        bad = unprintable(text)
        if bad:
            self.wrong(field, text, "%s without %s" % (wanted, bad), "Remove the character.")
            return default
        if pattern is not None and not pattern.match(text):
            self.wrong(field, text, wanted)
            return default
        return text

    def required(self, field: str, wanted: str, pattern: re.Pattern[str] | None = None, hint: str = "") -> str | None:
        """As C(text), but unset is a fault too."""
        value = self.text(field, None, pattern, wanted)
        if value is None and not self.is_wrong(field):
            self.wrong(field, self.data.get(field), wanted, hint)
        return value

    def integer(self, field: str, default: int | None = None, low: int = 0, high: int = 1_000_000_000) -> int | None:
        value = self._get(field)
        if value is None:
            return default
        number = as_integer(value)
        if number is None or not low <= number <= high:
            self.wrong(field, value, "a whole number from %d to %d" % (low, high))
            return default
        return number

    def seconds(self, field: str, default: float) -> float:
        """A length of time, which is above 0 and ends."""
        value = self._get(field)
        if value is None:
            return default
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not 0 < number < math.inf:
            self.wrong(field, value, "a number of seconds above 0", "Write it without a unit: 300.")
            return default
        return number

    def boolean(self, field: str, default: bool = False) -> bool:
        value = self._get(field)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        word = str(value).lower()
        if word in _TRUE | _FALSE:
            return word in _TRUE
        self.wrong(field, value, "true or false")
        return default

    def choice(self, field: str, choices: t.Sequence[str], default: str) -> str:
        value = self._get(field)
        if value is None:
            return default
        if value not in choices:
            self.wrong(field, value, "one of %s" % ", ".join(choices))
            return default
        return str(value)

    def texts(self, field: str) -> list[str]:
        """A list of strings without control characters. Numbers inside become text; a single string is refused, since it cannot be split without guessing."""
        value = self._get(field)
        if value is None:
            return []
        if not isinstance(value, (list, tuple)):
            self.wrong(field, value, "a list of strings", 'Write one list item for each argument: ["--max-model-len", "32768"].')
            return []
        items: list[str] = []
        for number, item in enumerate(value):
            if isinstance(item, bool) or not isinstance(item, (str, int, float)):
                self.wrong("%s[%d]" % (field, number), item, "a string")
                continue
            bad = unprintable(str(item))
            if bad:
                self.wrong("%s[%d]" % (field, number), str(item), "a string without %s" % bad, "Remove the character.")
                continue
            items.append(str(item))
        return items

    def mapping(self, field: str) -> dict[str, t.Any]:
        value = self._get(field)
        if value is None:
            return {}
        if not isinstance(value, t.Mapping):
            self.wrong(field, value, "a mapping")
            return {}
        return {str(key): item for key, item in value.items()}

    def mappings(self, field: str) -> list[t.Mapping[str, t.Any]]:
        value = self._get(field)
        if value is None:
            return []
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, t.Mapping) for item in value):
            self.wrong(field, value, "a list of mappings")
            return []
        return list(value)

    def is_wrong(self, *fields: str) -> bool:
        """True where one of these fields already has a fault, so that what follows from it need not be said again."""
        names = {self._name(field) for field in fields}
        return any(fault.field in names for fault in self.findings.faults)

    def refuse_unknown(self) -> None:
        """A typo must not be silently ignored: every field that nobody asked for is a fault."""
        for field in sorted(set(map(str, self.data)) - self.known):
            close = nearest(field, self.known)
            hint = "Did you mean %s?" % close if close else "Known fields: %s." % ", ".join(sorted(self.known))
            self.wrong(field, "an unknown field", "a known field", hint)


def as_integer(value: t.Any) -> int | None:
    """8, "8" and " 8 " are 8; 8.0, "8x", true and "" are no integers."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return int(value)
    if isinstance(value, str) and _INTEGER.match(value.strip()):
        return int(value.strip())
    return None


def nearest(word: str, candidates: t.Iterable[str], likeness: float = 0.6) -> str | None:
    """The candidate that is most like the word, where one is at least so much like it (0 to 1)."""
    found = difflib.get_close_matches(word, sorted(candidates), n=1, cutoff=likeness)
    return found[0] if found else None
