# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Names of fabrics: the keys that node facts give ports, and what an operator writes in C(replica_fabrics).

A key is C(ib:<subnet prefix>) or C(roce:<network>[@<vlan>]). Facts that somebody wrote may use any other text as a key; it then means
nothing but equality.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import ipaddress
import typing as t

from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Findings
from ansible_collections.rankzero.inference.plugins.plugin_utils.values import Reader

Port = t.Mapping[str, t.Any]
Network = t.Union[ipaddress.IPv4Network, ipaddress.IPv6Network]

PARSED = 1 << 16
"""How many keys and addresses are kept parsed: ports of one fabric have the same few, and each is asked for many times."""


def port_name(port: Port) -> str:
    return "%s:%s" % (port.get("name"), port.get("port"))


def keys_of(port: Port) -> list[str]:
    """The port's fabrics without link-local networks, which never reach another host (uccl#1034)."""
    return [key for key in port.get("fabrics") or () if not _is_link_local(key)]


@functools.lru_cache(maxsize=PARSED)
def _is_link_local(key: str) -> bool:
    network = network_of(key)
    return network is not None and (network.network_address.is_link_local or network.network_address.is_loopback)


@functools.lru_cache(maxsize=PARSED)
def network_of(key: str) -> Network | None:
    """The network of a C(roce:) key, None for every other key."""
    kind, _colon, rest = key.partition(":")
    try:
        return ipaddress.ip_network(rest.partition("@")[0], strict=False) if kind == "roce" else None
    except ValueError:
        return None


def vlan_of(key: str) -> str:
    return key.partition("@")[2]


# ---- replica_fabrics


@dataclasses.dataclass(frozen=True)
class Selector:
    """Which ports of a host are meant: those that fit every field that is given."""

    hcas: tuple[str, ...] = ()  # names, name:port, or patterns of them
    keys: tuple[str, ...] = ()  # as node facts give them
    networks: tuple[Network, ...] = ()
    vlan: int | None = None
    link_layer: str | None = None

    def takes_key(self, key: str) -> bool:
        if self.keys and key not in self.keys:
            return False
        if self.vlan is not None and vlan_of(key) != str(self.vlan):
            return False
        network = network_of(key)
        return not self.networks or (network is not None and any(inside(network, outer) for outer in self.networks))

    def takes(self, port: Port) -> bool:
        if self.hcas and not any(is_named(port, name) for name in self.hcas):
            return False
        if self.link_layer and port.get("link_layer") != self.link_layer:
            return False
        return not (self.keys or self.networks or self.vlan is not None) or any(map(self.takes_key, keys_of(port)))


def is_named(port: Port, name: str) -> bool:
    return fnmatch.fnmatchcase(str(port.get("name")), name) or fnmatch.fnmatchcase(port_name(port), name)


def inside(inner: Network, outer: Network) -> bool:
    return inner.version == outer.version and inner.subnet_of(outer)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Definition:
    """One fabric as an operator means it. C(by_host): pattern of inventory names -> the fields that differ there."""

    name: str
    selector: Selector
    by_host: tuple[tuple[str, Selector], ...] = ()
    subnet_aware: bool = False
    routed: bool | None = None

    def selector_for(self, host: str) -> Selector | None:
        """The selector of one host: the exact name before patterns; fields of the host's entry replace the fabric's own. None: it is not decided."""
        exact = [selector for pattern, selector in self.by_host if pattern == host]
        fitting = exact or [selector for pattern, selector in self.by_host if fnmatch.fnmatchcase(host, pattern)]
        if len(fitting) > 1:
            return None
        given = {field.name: getattr(fitting[0], field.name) for field in dataclasses.fields(Selector)} if fitting else {}
        merged = dataclasses.replace(self.selector, **{name: value for name, value in given.items() if value not in ((), None)})
        return merged if merged != Selector() else None

    def names_ports(self) -> bool:
        """True where ports are named one by one: then nobody second-guesses them."""
        return bool(self.selector.hcas) or any(selector.hcas for _pattern, selector in self.by_host)


def for_hosts(named: t.Mapping[str, t.Any], groups: t.Mapping[str, t.Sequence[str]], findings: Findings) -> dict[str, t.Any]:
    """C(replica_fabrics) with the inventory groups in its C(hosts) written out as their hosts. C(groups): host -> the groups that it is in.

    A name counts as a group where no host has it. An entry of a host's own comes before its groups'; two groups with a host in common are a fault.
    """
    result = dict(named)
    known = {group for member in groups.values() for group in member} - set(groups)
    for name, data in named.items():
        entries = data.get("hosts") if isinstance(data, t.Mapping) else None
        if not isinstance(entries, t.Mapping) or not known & set(map(str, entries)):
            continue
        written = {str(pattern): fields for pattern, fields in entries.items() if str(pattern) not in known}
        for host, member in groups.items():
            own = sorted(set(member) & set(map(str, entries)) & known)
            if len(own) > 1:
                findings.fault(
                    "replica_fabrics.%s.hosts" % name, "the groups %s" % " and ".join(own), "one entry that fits this host", "Name the host itself.", host=host
                )
            elif own and host not in written:
                written[host] = entries[own[0]]
        result[name] = {**data, "hosts": written}
    return result


def parse(name: str, data: t.Any, findings: Findings) -> Definition | None:
    """Read one entry of C(replica_fabrics) field by field; every field that is wrong or unknown is a fault."""
    where = "replica_fabrics.%s" % name
    if not isinstance(data, t.Mapping):
        findings.fault(where, data, "a mapping with hcas, keys, networks, vlan, link_layer, hosts, subnet_aware or routed")
        return None
    before = len(findings.faults)
    read = Reader(_lists(data), where, findings)
    selector = _selector(read)
    by_host = tuple(_by_host(read.mapping("hosts"), where, findings))
    subnet_aware = read.boolean("subnet_aware")
    routed = read.boolean("routed") if data.get("routed") not in (None, "") else None
    read.refuse_unknown()
    if len(findings.faults) == before and selector == Selector() and not by_host:
        findings.fault(where, "no field that selects ports", "at least one of hcas, keys, networks, vlan, link_layer or hosts")
    return Definition(name, selector, by_host, subnet_aware, routed) if len(findings.faults) == before else None


def _by_host(data: t.Mapping[str, t.Any], where: str, findings: Findings) -> t.Iterator[tuple[str, Selector]]:
    for pattern, fields in data.items():
        here = "%s.hosts.%s" % (where, pattern)
        if not isinstance(fields, t.Mapping) or not fields:
            findings.fault(
                here, fields, "a mapping with hcas, keys, networks, vlan or link_layer", "The key is a host's inventory name or a pattern such as spark-*."
            )
            continue
        read = Reader(_lists(fields), here, findings)
        selector = _selector(read)
        read.refuse_unknown()
        yield pattern, selector


def _lists(data: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """One value where a list belongs is a list of one, unless it has a comma, where it would have to be split by guessing."""

    def is_one(key: t.Any, value: t.Any) -> bool:
        return key in ("hcas", "keys", "networks") and isinstance(value, str) and value != "" and "," not in value

    return {str(key): [value] if is_one(key, value) else value for key, value in data.items()}


def _selector(read: Reader) -> Selector:
    networks = []
    for number, text in enumerate(read.texts("networks")):
        try:
            networks.append(ipaddress.ip_network(text))
        except ValueError as error:
            read.wrong("networks[%d]" % number, text, "a network in CIDR form, such as 10.11.0.0/16", "%s." % str(error).capitalize())
    keys = tuple(read.texts("keys"))
    for number, key in enumerate(keys):
        if not key.startswith(("ib:", "roce:")):
            read.wrong("keys[%d]" % number, key, "a key as node facts give it: ib:<subnet prefix> or roce:<network>[@<vlan>]")
    layer = read.text("link_layer")
    if layer is not None and layer.lower() not in ("infiniband", "ethernet"):
        read.wrong("link_layer", layer, "infiniband or ethernet")
        layer = None
    return Selector(
        hcas=tuple(read.texts("hcas")),
        keys=keys,
        networks=tuple(networks),
        vlan=read.integer("vlan", None, 1, 4094),
        link_layer=layer.lower() if layer else None,
    )
