# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The picture of a plan: what stands in it, that it is well-formed whatever hosts and people are called, and that nothing leaves its box."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import facts as build
import pytest

from ansible_collections.rankzero.inference.plugins.plugin_utils import picture

SVG = "{http://www.w3.org/2000/svg}"


def drawn(plan: dict[str, Any], facts: dict[str, Any]) -> ElementTree.Element:
    text = picture.svg(plan, facts)
    assert text == picture.svg(plan, dict(reversed(facts.items()))), "the same input gives the same picture"
    return ElementTree.fromstring(text)


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(SVG + "text")]


def titles(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(SVG + "title")]


def inside(root: ElementTree.Element) -> None:
    """No box and no line beyond the canvas, and no text that would run out of it by the width of its characters."""
    width, height = int(root.get("width", "0")), int(root.get("height", "0"))
    for element in root.iter(SVG + "rect"):
        assert (
            0 <= int(element.get("x", "0")) <= width - int(element.get("width", "0")) and int(element.get("y", "0")) + int(element.get("height", "0")) <= height
        )
    for element in root.iter(SVG + "line"):
        assert all(0 <= int(element.get(name, "0")) <= limit for name, limit in (("x1", width), ("x2", width), ("y1", height), ("y2", height)))
    for element in root.iter(SVG + "text"):
        length = 0 if element.get("text-anchor") else len(element.text or "") * int(element.get("font-size", "0")) * 0.6
        assert int(element.get("x", "0")) + length <= width + 1 and int(element.get("y", "0")) <= height, element.text


def planned(facts: dict[str, Any], nodes: int, replica: str = "glm") -> dict[str, Any]:
    return build.plan(facts, build.profile(nodes=nodes, pp=nodes), replica=replica)


def hosts_of(count: int) -> dict[str, dict[str, Any]]:
    return {f"gpu-{number}": build.node(number, hcas=4) for number in range(1, count + 1)}


def test_a_plan_shows_ranks_gpus_hcas_and_the_fabric_between_them() -> None:
    facts = hosts_of(3)
    plan = planned(facts, 2)
    assert plan["faults"] == []
    root = drawn(plan, facts)
    inside(root)
    shown = texts(root)
    assert {"Replica glm", "rank 0 · gpu-1", "rank 1 · gpu-2", "not chosen · gpu-3"} <= set(shown)
    assert any(plan["leader"]["url"] in line and plan["fingerprint"] in line for line in shown)
    assert any(line.startswith("fabric roce:") for line in shown)
    told = titles(root)
    for uuid in plan["shards"]["gpu-1"]["gpus"]:
        assert any(uuid in line and "given to rank 0" in line for line in told)
    assert sum("free" in line for line in told) == len(facts["gpu-3"]["gpus"])
    used = sum(len(shard["hcas"]) for shard in plan["shards"].values())
    stubs = [line for line in root.iter(SVG + "line") if line.get("stroke-width") == "2"]
    assert len(stubs) == used, "each HCA that is used hangs on the fabric"


def test_faults_stand_at_the_host_and_the_device_that_they_are_about() -> None:
    facts = hosts_of(2)
    facts["gpu-2"]["gpus"][1]["processes"] = [{"pid": 4711, "used_mib": 71000, "name": "python3", "user": "eve", "shard": None, "kind": "compute"}]
    facts["gpu-2"]["gpus"][0]["health"] = {"state": "lost", "reasons": ["it has fallen off the bus"]}
    plan = planned(facts, 2)
    assert plan["faults"] and plan["shards"] == {}
    root = drawn(plan, facts)
    inside(root)
    shown = " ".join(texts(root))
    assert f"Refused: {len(plan['faults'])} fault(s)" in shown and "4711" in shown and "rank 1 · gpu-2" in shown
    told = titles(root)
    assert any("held by python3 (pid 4711)" in line for line in told) and any("lost: it has fallen off the bus" in line for line in told)
    frames = [element for element in root.iter(SVG + "rect") if element.get("fill") == "none"]
    assert len(frames) == 1 and frames[0].get("stroke-dasharray"), "the GPUs of gpu-2 are framed, and nothing else is"


def test_a_hundred_hosts_are_tiles_with_every_fault_below() -> None:
    facts = hosts_of(110)
    facts["gpu-7"]["gpus"][0]["health"] = {"state": "lost", "reasons": ["it has fallen off the bus"]}
    whole = drawn(planned(facts, 100), facts)
    inside(whole)
    assert {f"gpu-{number}" for number in range(1, 111)} <= set(texts(whole)) and {"rank 0", "rank 99"} <= set(texts(whole))
    refused = drawn(planned(facts, 110), facts)
    inside(refused)
    assert any("fallen off the bus" in line for line in texts(refused)) and any(line.endswith("fault(s)") for line in texts(refused))
    for host in facts.values():
        host["cordoned"] = {"by": "ann", "reason": "fan"}
    alike = texts(drawn(planned(facts, 110), facts))
    assert sum("cordoned by ann" in line for line in alike) == 1 and not any("more: plan_file" in line for line in alike), "told once for all"


HOSTILE = ["</text><script>alert(1)</script>", "&amp;&lt;\"'", "\x1b[31mred\x00\u202eevil", "]]>", "x" * 400, "\ud800", "<!--", "ü€🚀"]


@pytest.mark.parametrize("count", [2, 20])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_stay_text(name: str, count: int) -> None:
    """A host's name, a process's name and a health reason may hold anything: it is text of an element, escaped, and never markup."""
    facts = {f"{name}{number}": build.node(number, hcas=4) for number in range(1, count + 1)}
    first = facts[f"{name}1"]
    first["gpus"][0]["processes"] = [{"pid": 1, "used_mib": 71000, "name": name, "user": name, "shard": None, "kind": "compute"}]
    first["gpus"][1]["health"] = {"state": name, "reasons": [name]}
    first["hcas"][0].update(usable=False, reasons=[name], name=name)
    plan = planned(facts, 2, name)
    plan["faults"] = [*plan["faults"], {"host": f"{name}2", "rank": None, "field": name, "seen": name, "wanted": name, "hint": name}]
    text = picture.svg(plan, facts)
    root = ElementTree.fromstring(text.encode("utf-8"))
    inside(root)
    allowed = {SVG + tag for tag in ("svg", "rect", "line", "text", "title")}
    assert {element.tag for element in root.iter()} <= allowed
    for element in root.iter():
        assert all(re.fullmatch(r"[\w#.,:/ -]*", value) for value in element.attrib.values()), element.attrib


@pytest.mark.parametrize("facts", [{}, {"gpu-1": None}, {"gpu-1": {"schema": 99}}, {"gpu-1": {"schema": 1, "gpus": "none", "hcas": [1, {}]}}])
def test_facts_that_are_missing_or_wrong_are_drawn_as_what_they_are(facts: dict[str, Any]) -> None:
    plan = planned(facts, 2)
    inside(drawn(plan, facts))
