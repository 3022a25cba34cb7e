# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A plan as a picture: hosts with their GPUs and HCAs, which of them each rank is given, the fabric between them, and the faults where they are.

Pure: a plan and the facts it was made from in, the text of one SVG out, the same for the same input. Up to 16 hosts are drawn as cards that say
everything; more of them as tiles, whose details are in the tooltips and in the list of faults below. Whatever comes from hosts or people is text of an
element, escaped, and never an attribute.
"""

from __future__ import annotations

import dataclasses
import textwrap
import typing as t
from xml.sax.saxutils import escape

from ansible_collections.rankzero.inference.plugins.plugin_utils import host_facts
from ansible_collections.rankzero.inference.plugins.plugin_utils.fabric_names import keys_of, port_name
from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Fault, natural_key, texts
from ansible_collections.rankzero.inference.plugins.plugin_utils.tables import shape

MOST_CARDS = 16
MOST_LISTED = 60
"""So many faults and warnings are written out below tiles; more than that nobody reads in a picture."""

_FONT = "DejaVu Sans, Verdana, Helvetica, Arial, sans-serif"
_INK, _QUIET, _LINE, _PAPER, _CARD = "#1c2733", "#5d6b7a", "#c3ccd6", "#ffffff", "#f6f8fa"
_GIVEN, _FREE, _HELD, _BAD, _WARN = "#2f6fd0", "#ffffff", "#9aa5b1", "#c62828", "#b26a00"
_FABRIC_INKS = ("#1a8a5a", "#7b4fc9", "#b8651b", "#0e7f9e", "#a33a78", "#6c7a1d", "#44546a", "#8d5a3b")
_WIDTH_OF_CHARACTER = 0.61  # of the font's size; a little more than DejaVu Sans needs on average, so that text stays inside of its box
_NEAR = ("PIX", "PXB")

_BOX, _GAP = 44, 6  # a GPU or an HCA of a card
_PAD = 14
_MARGIN = 28

Plan = t.Mapping[str, t.Any]
Facts = t.Mapping[str, t.Any]


class Canvas:
    """Elements in the order in which they are painted. Coordinates are whole pixels."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def rect(self, x: int, y: int, width: int, height: int, fill: str, line: str = "none", thick: int = 1, dashed: bool = False, title: str = "") -> None:
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        shape_of = (
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="{min(4, width // 5)}" fill="{fill}" stroke="{line}" stroke-width="{thick}"{dash}'
        )
        self.parts.append(f"{shape_of}><title>{_safe(title)}</title></rect>" if title else shape_of + "/>")

    def line(self, x1: int, y1: int, x2: int, y2: int, ink: str, thick: int = 1) -> None:
        self.parts.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{ink}" stroke-width="{thick}"/>')

    def text(self, x: int, y: int, text: str, size: int = 12, ink: str = _INK, bold: bool = False, middle: bool = False) -> None:
        weight = ' font-weight="bold"' if bold else ""
        anchor = ' text-anchor="middle"' if middle else ""
        self.parts.append(f'<text x="{x}" y="{y}" font-size="{size}" fill="{ink}"{weight}{anchor}>{_safe(text)}</text>')

    def svg(self, width: int, height: int) -> str:
        head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" font-family="{_FONT}">'
        return "\n".join([head, f'<rect width="{width}" height="{height}" fill="{_PAPER}"/>', *self.parts, "</svg>\n"])


class Host:
    """One host as it is drawn: what the plan gives it, what its facts show, and what is wrong with it."""

    def __init__(self, name: str, plan: Plan, facts: Facts) -> None:
        self.name = name
        self.shard: Plan = plan["shards"].get(name) or {}
        self.faults = [fault for fault in map(_fault, plan["faults"]) if fault.host == name]
        self.warnings = [fault for fault in map(_fault, plan["warnings"]) if fault.host == name]
        self.reason = str((plan.get("not_chosen") or {}).get(name) or "")
        stated = [fault.rank for fault in self.faults if fault.rank is not None]
        self.rank: int | None = self.shard["rank"] if self.shard else stated[0] if stated else None
        self.known = not host_facts.problem(facts)
        seen: Facts = host_facts.normalise(facts if self.known else {})
        self.gpus: list[Facts] = seen["gpus"]
        self.hcas: list[Facts] = sorted(seen["hcas"], key=lambda port: natural_key(port_name(port)))
        self.distances: Facts = seen["topology"].get("gpu_hca") or {}
        self.others = {uuid: name for name, shard in seen["shards"].items() if name != plan.get("replica") for uuid in shard["gpus"]}

    @property
    def label(self) -> str:
        return "not chosen" if self.rank is None and self.reason else "rank ?" if self.rank is None else "rank %d" % self.rank

    def concerns(self, what: str) -> bool:
        """Whether a fault of the host is about its C(gpus) or C(hcas)."""
        words = {"gpus": ("gpus", "drivers"), "hcas": ("hcas", "replica_fabric")}[what]
        return any(fault.field.startswith(words) for fault in self.faults)

    def is_given(self, gpu: Facts) -> bool:
        return gpu["uuid"] is not None and gpu["uuid"] in (self.shard.get("gpus") or ())

    def uses(self, port: Facts) -> bool:
        return port_name(port) in (self.shard.get("hcas") or ())


def svg(plan: Plan, facts: t.Mapping[str, t.Any]) -> str:
    """The picture of a plan (docs/architecture.md), whole or refused. C(facts): inventory host -> its node facts."""
    names = set(facts) | set(plan["shards"])
    hosts = [Host(name, plan, facts.get(name) or {}) for name in names]
    hosts.sort(key=lambda host: (host.rank is None, host.rank or 0, natural_key(host.name)))
    canvas = Canvas()
    inks = _fabric_inks(hosts)
    cards = len(hosts) <= MOST_CARDS
    columns = _columns(len(hosts), _card_width(hosts), cards)
    width = max(_MARGIN * 2 + columns * (_card_width(hosts) if cards else _TILE_WIDTH) + (columns - 1) * (30 if cards else 8), 900)
    y = _heading(canvas, plan, hosts, inks, width)
    y = _cards(canvas, plan, hosts, inks, columns, y) if cards else _tiles(canvas, hosts, inks, columns, y)
    if not cards:
        y = _list_faults(canvas, hosts, width, y)
    return canvas.svg(width, y + _MARGIN)


def _columns(count: int, card_width: int, cards: bool) -> int:
    if not cards:
        return min(count, max(8, int((count * 1.1) ** 0.5) + 1))
    return max(1, min(count, 4 if count > 6 else 3 if count > 4 and card_width < 500 else 2))


# ---- heading and legend


def _heading(canvas: Canvas, plan: Plan, hosts: list[Host], inks: t.Mapping[str, str], width: int) -> int:
    faults = [fault for fault in map(_fault, plan["faults"]) if fault.host is None]
    warnings = [fault for fault in map(_fault, plan["warnings"]) if fault.host is None]
    y = _MARGIN + 18
    canvas.text(_MARGIN, y, "Replica %s" % (plan.get("replica") or "(unnamed)"), 22, bold=True)
    y += 24
    canvas.text(_MARGIN, y, _cut(shape(plan.get("profile") or {}), width - 2 * _MARGIN, 13), 13, _QUIET)
    y += 20
    if plan["faults"]:
        canvas.text(_MARGIN, y, "Refused: %d fault(s); nothing was changed" % len(plan["faults"]), 14, _BAD, bold=True)
    elif plan.get("leader"):
        told = "Endpoint %s on rank 0 (%s), revision %s, fabric %s"
        line = told % (plan["leader"]["url"], plan["leader"]["host"], plan["fingerprint"], plan.get("fabric") or "none (TCP)")
        canvas.text(_MARGIN, y, _cut(line, width - 2 * _MARGIN, 13), 13)
    y += 12
    for fault, ink in [(fault, _BAD) for fault in faults] + [(warning, _WARN) for warning in warnings]:
        y = _paragraph(canvas, _MARGIN, y, width - 2 * _MARGIN, "• " + fault.text(), ink)
    return _legend(canvas, hosts, inks, width, y + 12) + 18


def _legend(canvas: Canvas, hosts: list[Host], inks: t.Mapping[str, str], width: int, y: int) -> int:
    """What boxes and colours mean; a colour for each fabric of an HCA that is used or could be."""
    entries = [(_GIVEN, _GIVEN, "GPU of the replica"), (_FREE, _LINE, "free"), (_HELD, _HELD, "taken"), ("#fbe3e3", _BAD, "unusable")]
    entries += [(ink, ink, "HCA on %s" % key) for key, ink in inks.items()]
    if any(_ink_of(port, inks) == _HELD for host in hosts for port in host.hcas):
        entries.append((_PAPER, _HELD, "HCA on another fabric"))
    x = _MARGIN
    for fill, line, told in entries:
        told = told if len(told) <= 60 else told[:59] + "…"
        needed = 18 + 14 + int(len(told) * 11 * _WIDTH_OF_CHARACTER)
        if x + needed > width - _MARGIN and x > _MARGIN:
            x, y = _MARGIN, y + 20
        canvas.rect(x, y, 12, 12, fill, line)
        canvas.text(x + 18, y + 10, told, 11, _QUIET)
        x += needed
    return y + 12


def _fabric_inks(hosts: list[Host]) -> dict[str, str]:
    """A colour for each key of the replica's fabric, or, where none is used, for the first keys that there are; everything else stays grey."""
    used = {key for host in hosts for port in host.hcas if host.uses(port) for key in keys_of(port)[:1]}
    keys = used or {key for host in hosts for port in host.hcas for key in keys_of(port)[:1]}
    return dict(zip(sorted(keys, key=natural_key), _FABRIC_INKS))


def _ink_of(port: Facts, inks: t.Mapping[str, str]) -> str:
    return next((inks[key] for key in keys_of(port) if key in inks), _HELD)


# ---- up to sixteen hosts: cards


def _card_width(hosts: list[Host]) -> int:
    most = max([8, *(len(boxes) for host in hosts for boxes in (host.gpus, host.hcas))])
    return 2 * _PAD + min(most, 12) * (_BOX + _GAP) - _GAP


def _cards(canvas: Canvas, plan: Plan, hosts: list[Host], inks: t.Mapping[str, str], columns: int, y: int) -> int:
    """Rows of cards. Below each row runs the replica's fabric, which the HCAs that are used hang on; on the left the rows are joined."""
    width = _card_width(hosts)
    ends: list[int] = []
    bus_ink = _QUIET
    for first in range(0, len(hosts), columns):
        row = hosts[first : first + columns]
        height = max(_card_height(host, width) for host in row)
        bus = y + height + 14
        hanging = False
        for column, host in enumerate(row):
            x = _MARGIN + column * (width + 30)
            for stub, ink in _card(canvas, host, inks, x, y, width, height):
                canvas.line(stub[0], stub[1], stub[0], bus, ink, 2)
                hanging, bus_ink = True, ink if len(inks) == 1 else _QUIET
        if hanging:
            right = _MARGIN + (len(row) - 1) * (width + 30) + width
            canvas.line(_MARGIN - 12, bus, right, bus, bus_ink, 4)
            canvas.text(_MARGIN, bus + 15, _cut("fabric %s" % plan.get("fabric"), right - _MARGIN, 11), 11, _QUIET)
            ends.append(bus)
        y = bus + 34 if hanging else y + height + 26
    if len(ends) > 1:
        canvas.line(_MARGIN - 12, ends[0], _MARGIN - 12, ends[-1], bus_ink, 4)
    return y


def _notes(host: Host) -> list[tuple[str, str]]:
    notes = [(_words(fault), _BAD) for fault in host.faults] + [(_words(warning), _WARN) for warning in host.warnings]
    return notes + ([(host.reason, _QUIET)] if host.reason and not host.faults else [])


def _words(fault: Fault) -> str:
    """A fault without the name of the host, which stands above it."""
    return "• " + dataclasses.replace(fault, host=None, rank=None).text()


def _card_height(host: Host, width: int) -> int:
    lines = sum(len(_wrapped(text, width - 2 * _PAD, 11)) for text, _ink in _notes(host))
    return 52 + (lines * 15 + 10 if lines else 0) + _boxes_height(host) + 8


def _boxes_height(host: Host) -> int:
    return (_rows_of(host.gpus) + _rows_of(host.hcas)) * (_BOX + _GAP) + (16 if host.hcas else 0)


def _rows_of(boxes: t.Sequence[t.Any]) -> int:
    return -(-len(boxes) // 12)


def _card(canvas: Canvas, host: Host, inks: t.Mapping[str, str], x: int, y: int, width: int, height: int) -> list[tuple[tuple[int, int], str]]:
    """One host. Returns where the HCAs that are used hang on the fabric, with their colours: points at the card's lower edge."""
    faulty = bool(host.faults)
    canvas.rect(x, y, width, height, _CARD, _BAD if faulty else _GIVEN if host.shard else _LINE, 2 if faulty or host.shard else 1, dashed=not host.shard)
    head = "%s · %s" % (host.label, host.name)
    canvas.text(x + _PAD, y + 22, _cut(head, width - 2 * _PAD, 15), 15, _INK if host.rank is not None else _QUIET, bold=True)
    canvas.text(x + _PAD, y + 40, _cut(_about(host), width - 2 * _PAD, 11), 11, _QUIET)
    below = y + 50
    for text, ink in _notes(host):
        for line in _wrapped(text, width - 2 * _PAD, 11):
            below += 15
            canvas.text(x + _PAD, below - 2, line, 11, ink)
    top = y + height - 8 - _boxes_height(host)  # at the lower edge, where the fabric is
    places: dict[str, tuple[int, int]] = {}
    for number, gpu in enumerate(host.gpus):
        place = (x + _PAD + number % 12 * (_BOX + _GAP), top + number // 12 * (_BOX + _GAP))
        places[str(gpu["uuid"])] = place
        _gpu(canvas, host, gpu, *place)
    below = top + _rows_of(host.gpus) * (_BOX + _GAP) + (16 if host.hcas else 0)
    stubs = []
    for number, port in enumerate(host.hcas):
        left, upper = x + _PAD + number % 12 * (_BOX + _GAP), below + number // 12 * (_BOX + _GAP)
        for gpu in host.gpus:
            if host.is_given(gpu) and host.uses(port) and (host.distances.get(gpu["uuid"]) or {}).get(port["name"]) == _nearest(host, gpu):
                at = places[str(gpu["uuid"])]
                canvas.line(at[0] + _BOX // 2, at[1] + _BOX, left + _BOX // 2, upper, _QUIET)
        _hca(canvas, port, _ink_of(port, inks), host.uses(port), left, upper)
        if host.uses(port):
            stubs.append(((left + _BOX // 2, upper + _BOX), _ink_of(port, inks)))
    for what, boxes, edge in (("gpus", host.gpus, top), ("hcas", host.hcas, below)):
        if host.concerns(what) and boxes:
            canvas.rect(x + _PAD - 5, edge - 5, width - 2 * _PAD + 10, _rows_of(boxes) * (_BOX + _GAP) + 4, "none", _BAD, 2, dashed=True)
    return stubs


def _about(host: Host) -> str:
    """Address, HTTP, model of the GPUs, NVLink domain: whatever of it is known."""
    models = sorted({str(gpu["model"]) for gpu in host.gpus if gpu["model"]})
    domains = sorted({"NVLink %s/%s" % (gpu["interconnect_domain"]["id"], gpu["interconnect_domain"]["clique"]) for gpu in host.gpus if _domain(gpu)})
    told = [str(host.shard["address"]) if host.shard else "", "HTTP port %d" % host.shard["http_port"] if host.shard and host.shard["serves_http"] else ""]
    told += ["%d x %s" % (len(host.gpus), ", ".join(models)) if models else "no GPUs seen" if host.known else "no node facts", *domains]
    return " · ".join(filter(None, told))


def _domain(gpu: Facts) -> bool:
    return bool((gpu["interconnect_domain"] or {}).get("id"))


def _nearest(host: Host, gpu: Facts) -> str | None:
    """The shortest of the distances from a GPU to an HCA, where that is a PCIe switch: only those are worth a line."""
    found = set((host.distances.get(gpu["uuid"]) or {}).values())
    return next((distance for distance in _NEAR if distance in found), None)


def _gpu(canvas: Canvas, host: Host, gpu: Facts, x: int, y: int) -> None:
    fill, line, ink, told = _gpu_state(host, gpu)
    index = "?" if gpu["index"] is None else str(gpu["index"])
    canvas.rect(x, y, _BOX, _BOX, fill, line, title="GPU %s %s: %s" % (index, gpu["uuid"] or "", told))
    canvas.text(x + _BOX // 2, y + 20, "GPU", 10, ink, middle=True)
    canvas.text(x + _BOX // 2, y + 34, index, 13, ink, bold=True, middle=True)


def _gpu_state(host: Host, gpu: Facts) -> tuple[str, str, str, str]:
    """(fill, line, ink, words) of a GPU's box."""
    health = gpu["health"]
    if health["state"] not in (None, "ok"):
        return "#fbe3e3", _BAD, _BAD, "%s: %s" % (health["state"], "; ".join(health["reasons"]))
    if host.is_given(gpu):
        detail: Facts = next((one for one in host.shard["gpu_details"] if one["uuid"] == gpu["uuid"]), {})
        return _GIVEN, _GIVEN, _PAPER, "given to rank %s, at least %s MiB" % (host.rank, detail.get("expected_mib"))
    if gpu["uuid"] in host.others:
        return _HELD, _HELD, _PAPER, "given to replica %s" % host.others[gpu["uuid"]]
    holders = ["%s (pid %s)" % (process["shard"] or process["name"] or "a process", process["pid"]) for process in gpu["processes"]]
    if holders:
        return _HELD, _HELD, _PAPER, "held by %s" % ", ".join(holders)
    if gpu["partition"]["kind"] or gpu["partition"]["mode_current"] in (True, "enabled", 1):
        return _HELD, _HELD, _PAPER, "partitioned (MIG)"
    return _FREE, _LINE, _QUIET, "free"


def _hca(canvas: Canvas, port: Facts, ink: str, used: bool, x: int, y: int) -> None:
    usable = bool(port["usable"])
    told = "%s, %s, %s Gb/s: %s" % (port_name(port), port["link_layer"], port["rate_gbps"], ", ".join(keys_of(port)) or "no fabric")
    told += "" if usable else "; not usable: %s" % "; ".join(port["reasons"])
    fill, line = (ink, ink) if used else (_PAPER, ink) if usable else ("#fbe3e3", _BAD)
    inside = _PAPER if used else ink if usable else _BAD
    canvas.rect(x, y, _BOX, _BOX, fill, line, 1 if used else 2, title=told)
    name = str(port["name"])
    canvas.text(x + _BOX // 2, y + 19, _cut(name, _BOX - 2, 9), 9, inside, middle=True)
    canvas.text(x + _BOX // 2, y + 34, "-" if port["rate_gbps"] is None else "%gG" % port["rate_gbps"], 10, inside, middle=True)


# ---- more hosts: tiles

_TILE_WIDTH, _TILE_HEIGHT, _DOT = 148, 62, 10


def _tiles(canvas: Canvas, hosts: list[Host], inks: t.Mapping[str, str], columns: int, y: int) -> int:
    for number, host in enumerate(hosts):
        x, top = _MARGIN + number % columns * (_TILE_WIDTH + 8), y + number // columns * (_TILE_HEIGHT + 8)
        faulty = bool(host.faults)
        line = _BAD if faulty else _GIVEN if host.shard else _LINE
        tooltip = "%s, %s: %s" % (host.name, host.label, "; ".join(text for text, _ink in _notes(host)) or _about(host))
        canvas.rect(x, top, _TILE_WIDTH, _TILE_HEIGHT, "#fdf3f3" if faulty else _CARD, line, 2 if faulty else 1, not host.shard and not faulty, tooltip)
        canvas.text(x + 8, top + 15, _cut(host.name, _TILE_WIDTH - 72, 11), 11, bold=True)
        short = {"not chosen": "-", "rank ?": "?"}.get(host.label, host.label)
        mark = "%d fault(s)" % len(host.faults) if faulty else short
        canvas.text(x + _TILE_WIDTH - 34, top + 15, mark, 10, _BAD if faulty else _QUIET, middle=True)
        for index, gpu in enumerate(host.gpus[:11]):
            fill, edge, _inside, _words = _gpu_state(host, gpu)
            canvas.rect(x + 8 + index * (_DOT + 2), top + 23, _DOT, _DOT + 2, fill, edge)
        for index, port in enumerate(host.hcas[:11]):
            ink, usable = _ink_of(port, inks), bool(port["usable"])
            canvas.rect(x + 8 + index * (_DOT + 2), top + 42, _DOT, _DOT, ink if host.uses(port) else _PAPER if usable else "#fbe3e3", ink if usable else _BAD)
    return y + -(-len(hosts) // columns) * (_TILE_HEIGHT + 8) + 10


def _list_faults(canvas: Canvas, hosts: list[Host], width: int, y: int) -> int:
    faults, warnings = texts([fault for host in hosts for fault in host.faults]), texts([warning for host in hosts for warning in host.warnings])
    entries = [(text, _BAD) for text in faults] + [(text, _WARN) for text in warnings]
    for text, ink in entries[:MOST_LISTED]:
        y = _paragraph(canvas, _MARGIN, y, width - 2 * _MARGIN, "• " + text, ink)
    if len(entries) > MOST_LISTED:
        y = _paragraph(canvas, _MARGIN, y, width - 2 * _MARGIN, "and %d more: plan_file has them all" % (len(entries) - MOST_LISTED), _QUIET)
    return y


# ---- text


def _fault(data: t.Mapping[str, t.Any]) -> Fault:
    return Fault(**data)


def _paragraph(canvas: Canvas, x: int, y: int, width: int, text: str, ink: str) -> int:
    for line in _wrapped(text, width, 12):
        y += 17
        canvas.text(x, y, line, 12, ink)
    return y


def _wrapped(text: str, width: int, size: int) -> list[str]:
    return textwrap.wrap(text, max(8, int(width / (size * _WIDTH_OF_CHARACTER)))) or [""]


def _cut(text: str, width: int, size: int) -> str:
    fits = max(2, int(width / (size * _WIDTH_OF_CHARACTER)))
    return text if len(text) <= fits else text[: fits - 1] + "…"


def _safe(text: str) -> str:
    """Text of an element: escaped, and without what XML cannot hold or what would turn the direction of the rest."""
    return escape("".join(character if character.isprintable() else "\ufffd" for character in str(text)))
