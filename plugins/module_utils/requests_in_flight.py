# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How many requests an engine has in hand, by its own metrics; and whether it takes a key."""

from __future__ import annotations

import math
import os
import re
import time
import typing as t

from ansible_collections.rankzero.inference.plugins.module_utils import http_probe, small_files
from ansible_collections.rankzero.inference.plugins.module_utils.observation import Observer

PERIOD_SECONDS = 0.5
_SAMPLE = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)(?:\{.*\})?[ \t]+(\S+)(?:[ \t]+-?\d+)?\s*")
Answer = t.Dict[str, t.Any]


def total(text: str, names: t.Collection[str]) -> t.Optional[int]:
    """The sum of these gauges over all their labels (one for each engine of a data parallel server). None unless every one of them is there.

    The text is Prometheus' exposition format 0.0.4.
    """
    found: t.Dict[str, float] = {}
    for line in text.splitlines():
        match = _SAMPLE.fullmatch(line)
        if match is None or match.group(1) not in names:
            continue
        try:
            value = float(match.group(2))
        except ValueError:
            return None
        if not math.isfinite(value) or value < 0:
            return None
        found[match.group(1)] = found.get(match.group(1), 0.0) + value
    return math.ceil(sum(found.values())) if names and set(found) == set(names) else None


def count(observer: Observer, path: t.Optional[str], names: t.Collection[str]) -> Answer:
    """C({in_flight: int|null, serving: bool, reason: text|null}). A server that does not run has nothing in hand; what it does not tell is not taken for 0."""
    url, reason = observer.own_server()
    if url is None:
        return {"in_flight": 0, "serving": False, "reason": reason}
    if not path or not names:
        return {"in_flight": None, "serving": True, "reason": "the engine's adapter names no metrics of requests in flight"}
    answer = http_probe.request(url, path, headers=observer.headers())
    number = total(answer["text"], names) if answer["status"] == 200 else None
    if number is None:
        told = answer["message"] or ("it answers %s" % answer["status"] if answer["status"] != 200 else "%s are not all there" % ", ".join(names))
        return {"in_flight": None, "serving": True, "reason": "%s%s: %s" % (url, path, told)}
    return {"in_flight": number, "serving": True, "reason": None}


def watch(observer: Observer, path: t.Optional[str], names: t.Collection[str], hold_seconds: float) -> Answer:
    """Look until nothing is in flight, or the time is over."""
    deadline = time.monotonic() + hold_seconds
    while True:
        found = count(observer, path, names)
        if found["in_flight"] == 0 or time.monotonic() + PERIOD_SECONDS > deadline:
            return found
        time.sleep(PERIOD_SECONDS)


def check_keys(observer: Observer) -> Answer:
    """What the server of this shard answers to the key of its revision, and to that of the revision before. No key leaves the host.

    C({current: status|null, previous: status|null, ok: bool, reason: text|null}). C(previous) is null where there is no other key to try.
    """
    launch = small_files.read_json(os.path.join(observer.places.revision, "launch.json"))[0] or {}
    ready = launch.get("ready") or {}
    found: Answer = {"current": None, "previous": None, "ok": False, "reason": None}
    url, found["reason"] = observer.own_server()
    if url is None:
        return found
    if not ready.get("key_secret") or not ready.get("key_protects"):
        found["reason"] = "this revision has no API key"
        return found
    new = observer.headers()
    body = {"model": ready.get("probe_model"), "max_tokens": 1, "temperature": 0}
    body.update({"messages": [{"role": "user", "content": "1"}]} if "chat" in ready["probe_path"] else {"prompt": "1"})
    found["current"] = http_probe.request(url, ready["probe_path"], body, new, timeout=60.0)["status"]
    old = _previous_key(observer, ready["key_secret"])
    if old and old != new:
        found["previous"] = http_probe.request(url, ready["key_protects"], headers=old)["status"]
    refused = found["previous"] in (401, 403) or (found["previous"] is None and not (old and old != new))
    found["ok"] = found["current"] == 200 and refused
    if not found["ok"]:
        found["reason"] = "the key of this revision is answered with %s, that of the one before with %s" % (found["current"], found["previous"])
    return found


def _previous_key(observer: Observer, name: str) -> t.Dict[str, str]:
    path = os.path.join(os.path.dirname(observer.places.revision), "previous", "secrets", name)
    content = small_files.read_bytes(path)[0]
    value = content.decode("utf-8", "replace").strip() if content else ""
    return {"Authorization": "Bearer %s" % value} if value else {}
