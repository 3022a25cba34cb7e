# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Node facts as the plan reads them: one shape, whatever gathered or recorded them.

Facts come from C(node_facts) on a host, or from inventory variables that somebody recorded or wrote (C(replica_gather=false)). This makes
both the same: absent parts get their empty shape, words are lower-cased, and nothing is invented: unknown stays None. What has another type
than docs/architecture.md gives it is reported with its key and counts as unknown, so that everything else is still judged.
"""

from __future__ import annotations

import functools
import ipaddress
import math
import typing as t

from ansible_collections.rankzero.inference.plugins.plugin_utils.environment_names import NAME as ENVIRONMENT_NAME
from ansible_collections.rankzero.inference.plugins.plugin_utils.fabric_names import PARSED
from ansible_collections.rankzero.inference.plugins.plugin_utils.values import unprintable

SCHEMA = 1

Key = t.Union[str, t.Tuple[t.Any, t.Any]]  # (key of what it is in, name or number): spelled only where something is reported (_spelled)
Report = t.Callable[[Key, t.Any, str], None]  # key, what was seen, what was wanted
Check = t.Callable[[t.Any, Key, Report], t.Any]  # value, key, report -> the value, None where it is unknown or wrong


def problem(facts: t.Any) -> str | None:
    """Why these are no node facts that the plan can read, or None."""
    if facts is None or facts == {} or facts == "":
        return "no node facts"
    if not isinstance(facts, t.Mapping):
        return "node facts that are no mapping"
    if isinstance(facts.get("schema"), bool) or facts.get("schema") != SCHEMA:
        return "node facts of schema %r" % (facts.get("schema"),)
    return None


def normalise(facts: t.Mapping[str, t.Any], tell: t.Callable[[str, t.Any, str], None] = lambda _key, _seen, _wanted: None) -> dict[str, t.Any]:
    """Facts with every key that the plan reads, each of its type. The argument is left alone; C(tell) hears of every value that was not."""

    def report(key: Key, seen: t.Any, wanted: str) -> None:
        tell(_spelled(key), seen, wanted)

    result: dict[str, t.Any] = _FACTS(facts, "", report)
    _refuse_equal_uuids(result["gpus"], report)
    result["hcas"] = [_complete_hca(hca) for hca in result["hcas"]]
    if result["routes"] is None:
        result["routes"] = _routes_of(result)
    return result


def _spelled(key: Key) -> str:
    """C(gpus[3].memory.total_mib)."""
    if isinstance(key, str):
        return key
    outer, own = _spelled(key[0]), key[1]
    return "%s[%d]" % (outer, own) if isinstance(own, int) else "%s.%s" % (outer, own) if outer else str(own)


# ---- types of values


def _text(value: t.Any, key: Key, report: Report) -> str | None:
    """Numbers are their text: YAML reads an unquoted version as one."""
    if value is None or (value.__class__ is str and value.isprintable()):
        return value
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        report(key, value, "text")
        return None
    bad = unprintable(str(value))
    if bad:
        report(key, str(value), "text without %s" % bad)
        return None
    return str(value)


def _word(value: t.Any, key: Key, report: Report) -> str | None:
    """A name that stands in lists which programs split at commas and spaces."""
    text = _text(value, key, report)
    if text is not None and (not text or "," in text or any(character.isspace() for character in text)):
        report(key, text, "a name without spaces and commas")
        return None
    return text


def _flag(value: t.Any, key: Key, report: Report) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    report(key, value, "true or false")
    return None


def _whole(low: int = 0, high: int = 2**63) -> Check:
    def check(value: t.Any, key: Key, report: Report) -> int | None:
        if value is None:
            return None
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole or not low <= value <= high:
            report(key, value, "a whole number from %d%s" % (low, " to %d" % high if high < 2**63 else ""))
            return None
        return int(value)

    return check


def _memlock(value: t.Any, key: Key, report: Report) -> int | None:
    """C(unlimited) is as much as there can be."""
    found: int | None = 2**70 if value == "unlimited" else _whole(0, 2**70)(value, key, report)
    return found


def _number(value: t.Any, key: Key, report: Report) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        report(key, value, "a number from 0")
        return None
    return value


def _address(value: t.Any, key: Key, report: Report) -> str | None:
    text = _text(value, key, report)
    address = _canonical_address(text) if text else None
    if text and address is None:
        report(key, text, "an IP address")
    return address


def _network(value: t.Any, key: Key, report: Report) -> str | None:
    text = _text(value, key, report)
    network = _canonical_network(text) if text else None
    if text and network is None:
        report(key, text, "a network as CIDR")
    return network


@functools.lru_cache(maxsize=PARSED)
def _canonical_address(text: str) -> str | None:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return None


@functools.lru_cache(maxsize=PARSED)
def _canonical_network(text: str) -> str | None:
    try:
        return str(ipaddress.ip_network(text, strict=False))
    except ValueError:
        return None


def _anything(value: t.Any, key: Key, report: Report) -> t.Any:
    return value


def _required(check: Check, what: str) -> Check:
    """For an entry of a list that means nothing without this value: a missing one is reported, and C(_list) drops the entry."""

    def required(value: t.Any, key: Key, report: Report) -> t.Any:
        if value is None:
            report(key, None, what)
        return check(value, key, report)

    required.needed = True  # type: ignore[attr-defined]
    return required


def _list(check: Check, absent: t.Any = ()) -> Check:
    """A list of values of one type, without those that are wrong. C(absent): what an absent list is."""

    def checked(value: t.Any, key: Key, report: Report) -> t.Any:
        if value is None:
            return None if absent is None else list(absent)
        if not isinstance(value, (list, tuple)):
            report(key, value, "a list")
            return None if absent is None else list(absent)
        items = []
        for number, item in enumerate(value):
            if item is None:
                report((key, number), None, "a value")
                continue
            found = check(item, (key, number), report)
            if found is not None:
                items.append(found)
        return items

    return checked


def _mapping(fields: t.Mapping[str, Check], absent: t.Any = None) -> Check:
    """A mapping with at least these keys; others are carried along. Wrong, or without a required value, it is C(absent): None, or a maker of an empty one."""

    def check(value: t.Any, key: Key, report: Report) -> t.Any:
        if value is None or not isinstance(value, t.Mapping):
            if value is not None:
                report(key, value, "a mapping")
            return None if absent is None else check({}, key, report)
        result = {str(name): item for name, item in value.items()}
        for name, field in fields.items():
            result[name] = found = field(result.get(name), (key, name), report)
            if found is None and hasattr(field, "needed"):
                return None
        return result

    return check


def _empty(fields: t.Mapping[str, Check]) -> Check:
    """A mapping that is empty, with all its keys unknown, where it is absent."""
    return _mapping(fields, absent=dict)


def _table(check: Check) -> Check:
    """A mapping of names to values of one type."""

    def checked(value: t.Any, key: Key, report: Report) -> dict[str, t.Any]:
        if value is None:
            return {}
        if not isinstance(value, t.Mapping):
            report(key, value, "a mapping")
            return {}
        found = {str(name): check(item, (key, str(name)), report) for name, item in value.items()}
        return {name: item for name, item in found.items() if item is not None}

    return checked


def _environment(value: t.Any, key: Key, report: Report) -> dict[str, str]:
    found: dict[str, str] = _table(_text)(value, key, report)
    for name in sorted(found):
        if not ENVIRONMENT_NAME.match(name):
            report((key, name), name, "the name of an environment variable")
            del found[name]
    return found


def _port_entry(value: t.Any, key: Key, report: Report) -> t.Any:
    """C(22), as a person writes it, or the whole entry."""
    fields = {"port": _required(_whole(0, 65535), "a port"), "address": _text, "pid": _whole(), "process": _text, "shard": _text, "listening": _flag}
    return _mapping(fields)(value if isinstance(value, t.Mapping) else {"port": value}, key, report)


def _device(value: t.Any, key: Key, report: Report) -> t.Any:
    return _mapping({"name": _text})(value, key, report) if isinstance(value, t.Mapping) else _text(value, key, report)


# ---- the facts

_PROCESS = {"pid": _whole(), "used_mib": _number, "kind": _text, "name": _text, "user": _text, "shard": _text}
_DOMAIN = {"id": _text, "clique": _text, "state": _text, "health": _text}
_GPU = {
    "index": _whole(),
    "uuid": _word,
    "pci_bdf": _text,
    "model": _text,
    "compute_capability": _text,
    "compute_mode": _text,
    "interconnect_domain": _mapping(_DOMAIN),
    "memory": _empty({"model": _text, "total_mib": _number, "used_mib": _number, "reserved_mib": _number, "unattributed_mib": _number}),
    "partition": _empty({"kind": _text, "mode_current": _anything}),
    "health": _empty({"state": _text, "reasons": _list(_text)}),
    "processes": _list(_mapping(_PROCESS)),
}
_GID = {
    "index": _required(_whole(), "the number of the entry"),
    "gid": _text,
    "type": _text,
    "netdev": _text,
    "address": _address,
    "network": _network,
    "vlan": _whole(),
}
_HCA = {
    "name": _required(_word, "the name of an HCA"),
    "port": _whole(1),
    "pci_bdf": _text,
    "link_layer": _text,
    "transport": _text,
    "rate_gbps": _number,
    "netdevs": _list(_text),
    "usable": _flag,
    "reasons": _list(_text),
    "fabric": _text,
    "fabrics": _list(_text, absent=None),
    "gids": _list(_mapping(_GID)),
}
_INTERFACE = {"name": _required(_word, "the name of an interface"), "kind": _text, "up": _flag, "carrier": _flag, "master": _text, "addresses": _list(_text)}
_ROUTE = {"destination": _required(_text, "a network"), "gateway": _text, "interface": _required(_word, "the name of an interface"), "metric": _whole()}
_BUILD = {
    "name": _text,
    "path": _text,
    "version": _text,
    "fingerprint": _text,
    "nccl": _text,
    "devices": _list(_device, absent=None),
    "env": _environment,
    "paths": _table(_text),
    "python": _mapping({"path": _text, "version": _text}),
    "versions": _table(_text),
    "programs_sha256": _table(_text),
    "container": _mapping({"image": _text, "mounts": _list(_text)}),
    "problems": _list(_text),
}
_MODEL = {
    "exists": _flag,
    "readable": _flag,
    "bytes": _whole(),
    "weight_bytes": _whole(),
    "files": _whole(),
    "config": _mapping({}),
    "digest": _text,
    "content_sha256": _text,
    "fetched": _mapping({"source": _text, "revision": _text, "sha256": _text, "content_sha256": _text}),
    "error": _text,
}
_SHARD = {
    "rank": _whole(),
    "nodes": _whole(),
    "gpus": _list(_text),
    "leader_port": _whole(1, 65535),
    "http_port": _whole(1, 65535),
    "tie_port": _whole(1, 65535),
    "run_ports": _list(_whole(1, 65535)),
    "pids": _list(_whole()),
    "revision": _text,
    "previous": _text,
    "engine": _text,
    "profile": _text,
    "url": _text,
    "stage": _text,
    "has_api_key": _flag,
    "revisions": _list(
        _mapping(
            {
                "revision": _required(_text, "a revision"),
                "rank": _whole(),
                "nodes": _whole(),
                "tie_id": _text,
                "serves_http": _flag,
                "budget_seconds": _whole(),
                "proven": _flag,
                "problem": _text,
                "lacks": _text,
            }
        )
    ),
}
_LOCK = {"owner": _text, "who": _text, "since": _text, "until": _text, "live": _flag, "target": _text, "controller": _mapping({})}
_IMEX_DOMAIN = {"status": _text, "nodes": _list(_mapping({"host": _text}))}
_FACTS = _empty(
    {
        "host": _empty(
            {
                "memory_available_mib": _number,
                "os": _empty({"id": _text, "version": _text}),
                "errors": _table(_text),
                "service_manager": _text,
                "supervisord": _text,
                "user": _text,
                "python": _empty({"executable": _text}),
            }
        ),
        "gpus": _list(_mapping(_GPU)),
        "topology": _empty({"gpu_hca": _table(_table(_text))}),
        "hcas": _list(_mapping(_HCA)),
        "interfaces": _list(_mapping(_INTERFACE)),
        "routes": _list(_mapping(_ROUTE), absent=None),
        "default_route": _mapping({"interface": _text, "gateway": _text}),
        "hostname_resolves_to": _list(_text),
        "limits": _empty(
            {
                "memlock_bytes": _memlock,
                "kho_cma_suspect": _flag,
                "nccl_conf": _table(_table(_text)),
                "shm": _mapping({"size_mib": _number}),
                "ephemeral_ports": _list(_whole(0, 65535)),
                "imex": _empty({"domain": _mapping(_IMEX_DOMAIN)}),
            }
        ),
        "drivers": _table(_mapping({"state": _text, "message": _text, "hint": _text, "driver": _text})),
        "engines": _table(_list(_mapping(_BUILD))),
        "models": _table(_mapping(_MODEL)),
        "ports_in_use": _list(_port_entry),
        "shards": _table(_mapping(_SHARD)),
        "cordoned": _mapping({"by": _text, "reason": _text}),
        "locks": _table(_mapping(_LOCK)),
    }
)


# ---- what follows from them


def _refuse_equal_uuids(gpus: list[dict[str, t.Any]], report: Report) -> None:
    seen: set[str] = set()
    for number, gpu in enumerate(gpus):
        if gpu["uuid"] in seen:
            report("gpus[%d].uuid" % number, gpu["uuid"], "a UUID of its own for each GPU")
        seen |= {gpu["uuid"]} - {None}


def _complete_hca(hca: dict[str, t.Any]) -> dict[str, t.Any]:
    result = dict(hca)
    result["link_layer"] = (hca["link_layer"] or "unknown").lower()
    result["port"] = hca["port"] or 1
    if hca["fabrics"] is None:
        result["fabrics"] = [hca["fabric"]] if hca["fabric"] else []
    result["gids"] = [_complete_gid(gid) for gid in hca["gids"]]
    return result


def _complete_gid(gid: dict[str, t.Any]) -> dict[str, t.Any]:
    kind = (gid["type"] or "").lower()
    return {**gid, "type": "RoCE v2" if "v2" in kind else "IB/RoCE v1" if kind else None, "address": gid["address"] or _address_of(gid["gid"] or "")}


@functools.lru_cache(maxsize=PARSED)
def _address_of(gid: str) -> str | None:
    try:
        address = ipaddress.IPv6Address(gid)
    except ValueError:
        return None
    return str(address.ipv4_mapped or address)


def _routes_of(facts: t.Mapping[str, t.Any]) -> list[dict[str, t.Any]]:
    """Routes that interfaces' networks and the default route imply, where the facts carry no route table."""
    routes = []
    for interface in facts["interfaces"]:
        for text in interface["addresses"] if interface["up"] is not False else ():
            try:
                network = ipaddress.ip_interface(text).network
            except ValueError:
                continue
            routes.append({"destination": str(network), "gateway": None, "interface": interface["name"], "metric": 0})
    default = facts["default_route"]
    if default and default["interface"]:
        destination = "::/0" if ":" in (default["gateway"] or "") else "0.0.0.0/0"
        routes.append({"destination": destination, "gateway": default["gateway"], "interface": default["interface"], "metric": 0})
    return routes
