# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reading an operator's free-form engine arguments the way the engine's own parser would.

Matching strings is not enough: argparse accepts C(--flag=value) and unique prefixes (of C(-tp) too, whatever allow_abbrev says), vLLM also
accepts underscores and dotted options, and one-letter options may be glued to their value. A C(Grammar) says what an
engine's parser accepts; C(find) lists which known options the
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
    C(every_short): all options of one dash, where they may be cut short (argparse); empty where they may not.
    C(underscores): C(--a_b) means C(--a-b).  C(dotted): C(--a.b.c) belongs to C(--a).  C(glued_shorts): C(-q5) means C(-q 5).
    C(equals): C(--a=b) is accepted. Where it is not the parser refuses the word; it still counts as the option that was meant.
    """

    options: t.Mapping[str, str]
    every_long: frozenset[str] = frozenset()
    every_short: frozenset[str] = frozenset()
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


def grammar_of(
    parser: t.Iterable[tuple[str, ...]], matters: t.Iterable[str], more: t.Mapping[str, str] | None = None, prefixes: bool = True, **rules: bool
) -> Grammar:
    """The grammar of a parser whose options are known with all their spellings (option_names.py).

    C(matters): canonical names of the options to find; one that the parser does not have (an older or newer release does) counts as itself.
    C(more): further spellings -> canonical name.  C(prefixes): options may be cut short.  C(rules): the other fields of L(Grammar).
    """
    groups = [frozenset(group) for group in parser]
    every = frozenset(name for group in groups for name in group) if prefixes else frozenset()
    options = dict(more or {})
    for option in matters:
        options[option] = option
        options.update({name: option for group in groups if option in group for name in group})
    return Grammar(
        options,
        every_long=frozenset(name for name in every if name.startswith("--")),
        every_short=frozenset(name for name in every if not name.startswith("--")),
        **rules,
    )


def find(args: t.Sequence[str], grammar: Grammar) -> list[Spelled]:
    """All arguments that the engine would read as one of C(grammar.options)."""
    found = []
    for position, text in enumerate(args):
        option = canonical(text, grammar)
        if option is not None:
            found.append(Spelled(position, text, option))
    return found


def value(args: t.Sequence[str], spelled: Spelled, grammar: Grammar) -> str:
    """The value that an option of C(args) is given: behind C(=), glued to a short name, or the next word. Empty where there is none."""
    _name, equals, behind = spelled.text.partition("=")
    if equals:
        return behind
    if grammar.glued_shorts and not spelled.text.startswith("--") and spelled.text not in grammar.options:
        return spelled.text[2:]
    return args[spelled.position + 1] if spelled.position + 1 < len(args) else ""


def unknown(args: t.Sequence[str], parser: t.Iterable[tuple[str, ...]], grammar: Grammar) -> list[tuple[int, str]]:
    """(position, text) of words that look like long options, and that a parser with these options would not take as any of them."""
    names = {name for group in parser for name in group} | set(grammar.options)
    found = []
    for position, text in enumerate(args):
        word = text.split("=", 1)[0]
        word = word.split(".", 1)[0] if grammar.dotted else word
        word = word.replace("_", "-") if grammar.underscores else word
        prefix = bool(grammar.every_long) and any(name.startswith(word) for name in names)
        if word.startswith("--") and word != "--" and word not in names and not prefix:
            found.append((position, text))
    return found


def canonical(text: str, grammar: Grammar) -> str | None:
    """The canonical option that one argument spells, or None where it spells none of those in C(grammar.options)."""
    word = text.split("=", 1)[0]
    if not text.startswith("-") or text == "--" or word == "-":
        return None
    if not text.startswith("--"):
        return _short(word, grammar)
    if grammar.dotted:
        word = word.split(".", 1)[0]
    if grammar.underscores:
        word = word.replace("_", "-")
    if word in grammar.options:
        return grammar.options[word]
    if word in grammar.every_long:
        return None
    return _cut_short(word, grammar.every_long, grammar)


def _cut_short(word: str, every: frozenset[str], grammar: Grammar) -> str | None:
    """The option that a prefix means. An ambiguous one is refused by the parser itself; here it counts as soon as one of its meanings matters."""
    if not every:
        return None
    meant = {grammar.options.get(name) for name in every | set(grammar.options) if name.startswith(word)}
    return min((option for option in meant if option is not None), default=None)


def _short(word: str, grammar: Grammar) -> str | None:
    if word in grammar.options:
        return grammar.options[word]
    if word in grammar.every_short:
        return None
    if grammar.glued_shorts and word[:2] in grammar.options:
        return grammar.options[word[:2]]
    return _cut_short(word, grammar.every_short, grammar)
