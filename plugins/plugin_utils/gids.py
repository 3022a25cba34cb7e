# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which entry of a RoCE port's GID table leads onto the fabric, and how NCCL is told.

NCCL takes one index, or one address range, for all ports of a process, and finds nothing wrong with an entry that leads nowhere: index 0
when nothing fits, 169.254.x.x where it comes first (NCCL net_ib/connect.cc; NVIDIA/nccl#890; uccl#803, #1034). The address is the identity
of an entry, never its index: indexes differ between ports and hosts, and move when a link flaps (NVIDIA/nccl#1333).
"""

from __future__ import annotations

import dataclasses
import functools
import ipaddress
import typing as t

from ansible_collections.rankzero.inference.plugins.plugin_utils import nccl
from ansible_collections.rankzero.inference.plugins.plugin_utils.fabric_names import PARSED, Network, Port, inside, network_of, port_name
from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Findings


@dataclasses.dataclass(frozen=True)
class Gid:
    """How NCCL finds the right RoCE GID on one host: an index, or an address range, with the reason."""

    index: int | None = None
    address_range: str | None = None
    ipv6: bool = False
    why: str = ""


Entry = t.Mapping[str, t.Any]
Address = t.Union[ipaddress.IPv4Address, ipaddress.IPv6Address]


def routable_v2(port: Port, keys: t.Sequence[str]) -> list[Entry]:
    """The GID entries of a port that are RoCE v2, on the fabric, and not link-local."""
    return [gid for gid in port.get("gids") or () if gid.get("type") == "RoCE v2" and gid.get("index") is not None and is_on(gid, port, keys)]


def right(ports: t.Iterable[Port], keys: t.Sequence[str]) -> dict[str, frozenset[int]]:
    """Port name -> the GID indexes that lead onto the fabric."""
    return {port_name(port): frozenset(int(gid["index"]) for gid in routable_v2(port, keys)) for port in ports}


def address_of(gid: Entry) -> Address | None:
    """The address of an entry; IPv4 where it is an IPv4-mapped one."""
    return _parsed(str(gid.get("address")))


@functools.lru_cache(maxsize=PARSED)
def _parsed(text: str) -> Address | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return (address.ipv4_mapped or address) if isinstance(address, ipaddress.IPv6Address) else address


def is_on(gid: Entry, port: Port, keys: t.Sequence[str]) -> bool:
    """Whether an entry's address is on one of the fabrics and can be reached from another host at all."""
    address = address_of(gid)
    if address is None or address.is_link_local or address.is_loopback or address.is_multicast or address.is_unspecified:
        return False
    if gid.get("network"):
        return "roce:%s%s" % (gid["network"], "@%s" % gid["vlan"] if gid.get("vlan") is not None else "") in keys
    # Facts that somebody wrote may leave out the network of an entry, and call a fabric what they like.
    own = [key for key in port.get("fabrics") or () if key in keys]
    networks = [network for network in map(network_of, own) if network is not None]
    if networks:
        return any(address.version == network.version and address in network for network in networks)
    return len(own) == 1 and len(port.get("fabrics") or ()) == 1


def is_ipv6(gid: Entry) -> bool:
    return isinstance(address_of(gid), ipaddress.IPv6Address)


def rule(ports: t.Sequence[Port], keys: t.Sequence[str], *, host: str, rank: int, findings: Findings) -> Gid | None:
    """One index that is right for all of the host's ports, else one address range that selects the right entries, else a fault.

    NCCL takes one number and one range for all HCAs of a process (NVIDIA/nccl#890). None on a fault, and for InfiniBand, where NCCL
    ignores the index.
    """
    right = {port_name(port): routable_v2(port, keys) for port in ports}
    missing = [name for name, entries in right.items() if not entries]
    if missing:
        findings.fault(
            "hcas.gids",
            "no routable RoCE v2 entry on %s" % ", ".join(missing),
            "a RoCE v2 GID with an address of the fabric on every chosen port",
            "Without one NCCL silently uses index 0, which is link-local. Give the port an address of the fabric.",
            host=host,
            rank=rank,
        )
        return None
    # IPv4 entries are preferred, as NCCL and UCX prefer them; a port with IPv6 alone makes the host IPv6.
    ipv6 = any(all(map(is_ipv6, entries)) for entries in right.values())
    right = {name: [entry for entry in entries if is_ipv6(entry) == ipv6] for name, entries in right.items()}
    if not all(right.values()):
        findings.fault(
            "hcas.gids",
            "IPv4 on some ports and IPv6 on others",
            "one address family on all chosen ports",
            "Give all ports addresses of one family.",
            host=host,
            rank=rank,
        )
        return None
    shared = set.intersection(*({int(entry["index"]) for entry in entries} for entries in right.values()))
    if shared:
        index = min(shared)
        address = next(str(entry["address"]) for entry in next(iter(right.values())) if int(entry["index"]) == index)
        return Gid(index=index, ipv6=ipv6, why="the RoCE v2 entry of %s on every chosen port (first: %s)" % (",".join(keys), address))
    differ = ", ".join("%s %s" % (name, "/".join(str(entry["index"]) for entry in entries)) for name, entries in right.items())
    covering = _covering_range(ports, right, ipv6)
    if covering is not None:
        return Gid(address_range=str(covering), ipv6=ipv6, why="the index differs between the ports (%s)" % differ)
    detail = "; ".join("%s: index %s" % (name, ", ".join("%s %s" % (entry["index"], entry["address"]) for entry in entries)) for name, entries in right.items())
    findings.fault(
        "hcas.gids",
        detail,
        "one GID index, or one address range, that is right for all chosen ports",
        "NCCL takes one of each for all HCAs of a process (NVIDIA/nccl#890). Remove the unwanted addresses, or choose fewer ports with replica_fabrics.",
        host=host,
        rank=rank,
    )
    return None


def _covering_range(ports: t.Sequence[Port], right: t.Mapping[str, list[Entry]], ipv6: bool) -> Network | None:
    """The smallest network that holds all right addresses, no other address of these ports, and under which NCCL's walk ends on a right entry."""
    addresses = [ipaddress.ip_network(str(address_of(entry))) for entries in right.values() for entry in entries]
    networks = [ipaddress.ip_network(str(entry.get("network") or address_of(entry)), strict=False) for entries in right.values() for entry in entries]
    wanted = {network.network_address for network in addresses}
    found = [address_of(gid) for port in ports for gid in port.get("gids") or () if is_ipv6(gid) == ipv6]
    others = [address for address in found if address is not None and address not in wanted]
    for cover in (_cover(networks), _cover(addresses)):
        if any(address in cover for address in others):
            continue
        if all(nccl.automatic_gid(port.get("gids") or (), ipv6, cover) in {int(entry["index"]) for entry in right[port_name(port)]} for port in ports):
            return cover
    return None


def _cover(networks: t.Sequence[Network]) -> Network:
    """The smallest network that holds all of these, which are of one family."""
    cover = networks[0]
    while not all(inside(network, cover) for network in networks):
        cover = cover.supernet()
    return cover
