# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reading an operator's free-form engine arguments the way the engine's own parser would.

Matching strings is not enough: argparse accepts C(--flag=value) and unique prefixes, vLLM also accepts underscores and dotted options, and
one-letter options may be glued to their value. A L(Grammar) says what an engine's parser accepts; L(find) lists which known options the
arguments spell, so that those which the plan owns or which execute code can be refused with the reason.
"""

from __future__ import annotations

import dataclasses
import typing as t


@dataclasses.dataclass(frozen=True)
class Grammar:
    """What a parser accepts.

    C(options): every spelling of every option that matters (C(--port), C(-tp)) -> its canonical name.
    C(every_long): all long options of the parser, needed to expand unique prefixes; empty where prefixes are not accepted.
    C(underscores): C(--a_b) means C(--a-b).  C(equals): C(--a=b) is accepted.  C(dotted): C(--a.b.c) belongs to C(--a).
    """

    options: t.Mapping[str, str]
    every_long: frozenset[str] = frozenset()
    underscores: bool = False
    equals: bool = True
    dotted: bool = False
    glued_shorts: bool = False


@dataclasses.dataclass(frozen=True)
class Spelled:
    """One option found in the arguments: position, the text as written, and the canonical option that the parser would understand."""

    position: int
    text: str
    option: str


def find(args: t.Sequence[str], grammar: Grammar) -> list[Spelled]:
    """All arguments that the engine would read as one of C(grammar.options)."""
    found = []
    for position, text in enumerate(args):
        option = canonical(text, grammar)
        if option is not None:
            found.append(Spelled(position, text, option))
    return found


def canonical(text: str, grammar: Grammar) -> str | None:
    """The canonical option that one argument spells, or None where it spells none of those in C(grammar.options)."""
    if not text.startswith("-") or text in ("-", "--"):
        return None
    if not text.startswith("--"):
        return _short(text, grammar)
    word = text.split("=", 1)[0] if grammar.equals else text
    if grammar.dotted:
        word = word.split(".", 1)[0]
    if grammar.underscores:
        word = word.replace("_", "-")
    if word in grammar.options:
        return grammar.options[word]
    if word in grammar.every_long:
        return None
    meant = sorted({grammar.options.get(long, long) for long in grammar.every_long | set(grammar.options) if long.startswith(word)}) if grammar.every_long else []
    # An ambiguous prefix is refused by the parser itself; here it counts as soon as one of its meanings is an option that matters.
    return next((option for option in meant if option in grammar.options.values()), None)


def _short(text: str, grammar: Grammar) -> str | None:
    word = text.split("=", 1)[0] if grammar.equals else text
    if word in grammar.options:
        return grammar.options[word]
    if grammar.glued_shorts and len(word) > 2 and word[:2] in grammar.options:
        return grammar.options[word[:2]]
    return None
