# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Node facts as the plan reads them: one shape, whatever gathered or recorded them.

Facts come from C(node_facts) on a host, or from inventory variables that somebody recorded or wrote (C(replica_gather=false)). This makes
both the same: absent parts get their empty shape, words are lower-cased, and nothing is invented: unknown stays None.
"""

from __future__ import annotations

import ipaddress
import typing as t

SCHEMA = 1


def problem(facts: t.Any) -> str | None:
    """Why these are no node facts that the plan can read, or None."""
    if not isinstance(facts, t.Mapping) or not facts:
        return "no node facts"
    if facts.get("schema") != SCHEMA:
        return "node facts of schema %r" % facts.get("schema")
    return None


def normalise(facts: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """Facts with every key that the plan reads. The argument is left alone."""
    result = dict(facts)
    for key in ("gpus", "hcas", "interfaces", "ports_in_use"):
        result[key] = [item for item in facts.get(key) or ()]
    for key in ("host", "topology", "limits", "drivers", "engines", "models", "shards"):
        value = facts.get(key)
        result[key] = dict(value) if isinstance(value, t.Mapping) else {}
    result["gpus"] = [_gpu(gpu) for gpu in result["gpus"]]
    result["interfaces"] = [dict(interface) for interface in result["interfaces"]]
    result["hcas"] = [_hca(hca) for hca in result["hcas"]]
    result["ports_in_use"] = [port if isinstance(port, t.Mapping) else {"port": port, "address": None, "pid": None, "process": None, "shard": None}
                              for port in result["ports_in_use"]]
    result["routes"] = list(facts["routes"]) if facts.get("routes") is not None else _routes_of(result)
    return result


def _gpu(gpu: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    result = dict(gpu)
    for key in ("memory", "partition", "health"):
        value = gpu.get(key)
        result[key] = dict(value) if isinstance(value, t.Mapping) else {}
    result["processes"] = list(gpu.get("processes") or ())
    return result


def _hca(hca: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    result = dict(hca)
    result["link_layer"] = str(hca.get("link_layer") or "unknown").lower()
    result["port"] = hca.get("port") or 1
    fabrics = hca.get("fabrics")
    result["fabrics"] = list(fabrics) if fabrics is not None else [hca["fabric"]] if hca.get("fabric") else []
    result["gids"] = [_gid(gid) for gid in hca.get("gids") or () if isinstance(gid, t.Mapping)]
    return result


def _gid(gid: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    result = dict(gid)
    kind = str(gid.get("type") or "").lower()
    result["type"] = "RoCE v2" if "v2" in kind else "IB/RoCE v1" if kind else None
    if not gid.get("address"):
        result["address"] = _address_of(str(gid.get("gid") or ""))
    return result


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
        for text in interface.get("addresses") or ():
            try:
                network = ipaddress.ip_interface(text).network
            except ValueError:
                continue
            routes.append({"destination": str(network), "gateway": None, "interface": interface.get("name"), "metric": 0})
    default = facts.get("default_route")
    if isinstance(default, t.Mapping) and default.get("interface"):
        routes.append({"destination": "0.0.0.0/0", "gateway": default.get("gateway"), "interface": default["interface"], "metric": 0})
    return routes
