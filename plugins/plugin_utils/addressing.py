# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which interface and address a rank uses on the management network.

The rule is the same on every host, the answer is not: names and addresses are per-host facts. In order: an address that the operator gave
for the host; the operator's CIDR or interface name; the way to the leader (facts of the route table); for the leader itself its default
route, and on an air-gapped host the one interface that can be meant. Two that can be meant are refused and listed: a wrong interface is a
silent hang (aws-do-eks#50, #51; vllm#7074).
"""

from __future__ import annotations

import dataclasses
import ipaddress
import typing as t

from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Findings

# Interfaces that NCCL's and Gloo's own automatic choices fall for, and that never lead to another host of the replica.
_LOCAL_PREFIXES = ("docker", "br-", "virbr", "veth", "cni", "flannel", "cali", "cilium", "usb", "tailscale", "wg", "vnet", "dummy")

IPAddress = t.Union[ipaddress.IPv4Address, ipaddress.IPv6Address]


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """An address on an interface of one host, and why it was chosen."""

    interface: str
    address: str
    why: str

    @property
    def is_ipv6(self) -> bool:
        return ":" in self.address


def addresses_of(interface: t.Mapping[str, t.Any]) -> list[ipaddress.IPv4Interface | ipaddress.IPv6Interface]:
    """The interface's addresses that parse; others are not ours to judge."""
    result = []
    for text in interface.get("addresses") or ():
        try:
            result.append(ipaddress.ip_interface(text))
        except ValueError:
            continue
    return result


def usable(interface: t.Mapping[str, t.Any]) -> list[str]:
    """The routable addresses of an interface that is up and can lead to another host; IPv4 first."""
    name = str(interface.get("name") or "")
    if not interface.get("up") or interface.get("carrier") is False or interface.get("master"):
        return []
    if name == "lo" or interface.get("kind") == "loopback" or name.startswith(_LOCAL_PREFIXES):
        return []
    found = [item.ip for item in addresses_of(interface) if not (item.ip.is_link_local or item.ip.is_loopback)]
    return [str(address) for address in sorted(found, key=lambda address: address.version)]


def choose(
    facts: t.Mapping[str, t.Any],
    *,
    host: str,
    rank: int,
    explicit: str | None,
    management: str | None,
    leader_address: str | None,
    single_node: bool,
    findings: Findings,
) -> Endpoint | None:
    """The endpoint of one rank, or None with a fault. C(leader_address) is None for the leader itself."""
    interfaces = list(facts.get("interfaces") or ())
    if explicit:
        return _explicit(interfaces, explicit, host, rank, findings)
    if management:
        return _managed(interfaces, management, host, rank, findings)
    if leader_address:
        return _towards(facts, interfaces, leader_address, host, rank, findings)
    return _own(facts, interfaces, host, rank, single_node, findings)


def _explicit(interfaces: list[t.Any], wanted: str, host: str, rank: int, findings: Findings) -> Endpoint | None:
    address = parse_ip(wanted)
    if address is None:
        findings.fault("replica_address", wanted, "an IP address of this host", host=host, rank=rank)
        return None
    if address.version == 6 and address.is_link_local:
        findings.fault(
            "replica_address",
            wanted,
            "a routable address",
            "A link-local address means something else on every interface (it needs a scope).",
            host=host,
            rank=rank,
        )
        return None
    for interface in interfaces:
        if holds(interface, address) and interface.get("up") is not False:
            return Endpoint(interface["name"], str(address), "replica_address of this host")
    findings.fault(
        "replica_address",
        wanted,
        "an address that one of the host's interfaces has, and that is up",
        "The host has %s." % _listed(interfaces),
        host=host,
        rank=rank,
    )
    return None


def holds(interface: t.Mapping[str, t.Any], address: IPAddress) -> bool:
    """Whether a program can listen at C(address) through this interface; of a loopback network that is every address (127.0.0.2)."""
    return any(item.ip == address or (address.is_loopback and address in item.network) for item in addresses_of(interface))


def _managed(interfaces: list[t.Any], management: str, host: str, rank: int, findings: Findings) -> Endpoint | None:
    network = _parse_network(management)
    if network is None:
        return _by_name(interfaces, management, host, rank, findings)
    hits = [
        (interface["name"], str(item.ip))
        for interface in interfaces
        if interface.get("up")
        for item in addresses_of(interface)
        if item.version == network.version and item.ip in network
    ]
    if len(hits) == 1:
        return Endpoint(hits[0][0], hits[0][1], "the host's address in replica_management %s" % network)
    field, wanted = "replica_management", "exactly one address in %s on an interface that is up" % network
    if hits:
        findings.fault(
            field,
            ", ".join("%s %s" % hit for hit in hits),
            wanted,
            "Give a narrower CIDR, an interface name, or replica_address for the host.",
            host=host,
            rank=rank,
        )
    else:
        findings.fault(field, "none", wanted, "The host has %s." % _listed(interfaces), host=host, rank=rank)
    return None


def _by_name(interfaces: list[t.Any], name: str, host: str, rank: int, findings: Findings) -> Endpoint | None:
    match = [interface for interface in interfaces if interface.get("name") == name]
    if not match:
        findings.fault(
            "replica_management", name, "a CIDR, or the exact name of an interface of this host", "The host has %s." % _listed(interfaces), host=host, rank=rank
        )
        return None
    addresses = [item.ip for item in addresses_of(match[0]) if not item.ip.is_link_local]
    first = [address for address in addresses if address.version == 4] or addresses
    if match[0].get("up") and len(first) == 1:
        return Endpoint(name, str(first[0]), "the address of interface replica_management %s" % name)
    seen = "an interface that is down" if not match[0].get("up") else "the addresses %s" % (", ".join(map(str, first)) or "none")
    findings.fault(
        "replica_management",
        "%s, %s" % (name, seen),
        "an interface that is up with one address",
        "Give the CIDR instead, or replica_address for the host.",
        host=host,
        rank=rank,
    )
    return None


def _towards(facts: t.Mapping[str, t.Any], interfaces: list[t.Any], leader: str, host: str, rank: int, findings: Findings) -> Endpoint | None:
    """The device of C(ip route get <leader>), from the facts: longest prefix, then metric."""
    target = parse_ip(leader)
    route = best_route(facts, target) if target else None
    if target is None or route is None:
        findings.fault(
            "routes",
            "no route to the leader's address %s" % leader,
            "an interface that leads to the leader",
            "Set replica_management (a CIDR or interface name) or replica_address. The host has %s." % _listed(interfaces),
            host=host,
            rank=rank,
        )
        return None
    interface = next((item for item in interfaces if item.get("name") == route), {"name": route})
    found = [item for item in addresses_of(interface) if item.version == target.version and not item.ip.is_link_local]
    near = [item for item in found if target in item.network] or found
    if len(near) == 1:
        return Endpoint(route, str(near[0].ip), "the interface of the route to the leader %s" % leader)
    findings.fault(
        "interfaces",
        "%s with the addresses %s" % (route, ", ".join(str(item.ip) for item in near) or "none"),
        "one address on the way to the leader %s" % leader,
        "Set replica_management or replica_address for the host.",
        host=host,
        rank=rank,
    )
    return None


def best_route(facts: t.Mapping[str, t.Any], target: IPAddress) -> str | None:
    """The interface that the route table sends C(target) to."""
    best: tuple[int, int, str] | None = None
    for route in facts.get("routes") or ():
        network = _parse_network(_destination(route, target))
        if network is None or network.version != target.version or target not in network:
            continue
        key = (-network.prefixlen, int(route.get("metric") or 0), str(route.get("interface")))
        best = key if best is None or key < best else best
    return best[2] if best else None


def _destination(route: t.Mapping[str, t.Any], target: IPAddress) -> str:
    """A route's network as CIDR: people write C(default), and a host without a length."""
    text = str(route.get("destination"))
    if text == "default":
        return "::/0" if target.version == 6 else "0.0.0.0/0"
    return text if "/" in text else "%s/%d" % (text, target.max_prefixlen)


def _own(facts: t.Mapping[str, t.Any], interfaces: list[t.Any], host: str, rank: int, single_node: bool, findings: Findings) -> Endpoint | None:
    """The leader's own address: its default route's interface, else the one interface that can be meant."""
    candidates = [(interface["name"], address) for interface in interfaces for address in usable(interface)[:1]]
    default = (facts.get("default_route") or {}).get("interface")
    by_default = [candidate for candidate in candidates if candidate[0] == default]
    if by_default:
        return Endpoint(by_default[0][0], by_default[0][1], "the interface of the default route")
    if len(candidates) == 1:
        return Endpoint(candidates[0][0], candidates[0][1], "the only interface that can lead to another host")
    if not candidates and single_node:
        return Endpoint("lo", "127.0.0.1", "a single node without any other network")
    seen = ", ".join("%s %s" % candidate for candidate in candidates) or "no interface that is up and has a routable address"
    findings.fault(
        "replica_management",
        seen,
        "one management interface",
        "There is no default route to decide it: set replica_management to a CIDR or an interface name.",
        host=host,
        rank=rank,
    )
    return None


def shared_subnets(facts: t.Mapping[str, t.Any], only: str | None = None) -> list[str]:
    """Interfaces that are in one subnet, two by two, as C(eno1 10.0.0.5/24 and eno2 10.0.0.6/24); C(only): those of this interface, which comes first.

    A program listens at the address that it was given and answers by the interface that the routes name, which is one of the two (NVIDIA/nccl#1580).
    """
    able = [interface for interface in facts.get("interfaces") or () if usable(interface) or (only is not None and interface.get("name") == only)]
    named = [(str(interface.get("name")), item) for interface in able for item in addresses_of(interface) if not item.ip.is_link_local]
    named.sort(key=lambda entry: entry[0] != only)
    found = []
    for position, (name, item) in enumerate(named):
        for other, beside in named[position + 1 :] if only in (None, name) else ():
            if other != name and item.version == beside.version and (beside.ip in item.network or item.ip in beside.network):
                found.append("%s %s and %s %s" % (name, item, other, beside))
    return found


def loopback_name_warning(facts: t.Mapping[str, t.Any]) -> str | None:
    """Gloo's fall-back resolves the own host name; on Debian that is 127.0.1.1 and remote ranks cannot connect (vllm#7074)."""
    resolved = [address for address in map(parse_ip, facts.get("hostname_resolves_to") or ()) if address]
    return ", ".join(map(str, resolved)) if resolved and all(address.is_loopback for address in resolved) else None


def parse_ip(text: str) -> IPAddress | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _parse_network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(text, strict=False) if "/" in text else None
    except ValueError:
        return None


def _listed(interfaces: list[t.Any]) -> str:
    """All interfaces with addresses, for a hint."""
    items = ["%s %s" % (interface.get("name"), ", ".join(interface.get("addresses") or ())) for interface in interfaces if interface.get("addresses")]
    return "; ".join(items) or "no interface with an address"
