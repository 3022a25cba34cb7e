# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which HCA ports a shard uses.

A fabric is a set of ports that can reach each other: ports of one key (C(ib:<subnet prefix>), C(roce:<network>[@<vlan>])), the keys of a rail
design, or a name that the operator gave in C(replica_fabrics). Where more than one fabric can be meant, the candidates are listed and the
plan is refused: an HCA of another fabric is a silent hang at the first all-reduce (NVIDIA/nccl#302, #2428).

Names of HCAs are never compared between hosts: two hosts that look alike name them differently (NVIDIA/nccl#1277). docs/fabrics.md tells
operators what is decided here and why.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import itertools
import typing as t

from ansible_collections.rankzero.inference.plugins.plugin_utils import gids, nccl
from ansible_collections.rankzero.inference.plugins.plugin_utils.fabric_names import (
    Definition,
    Port,
    Selector,
    is_named,
    keys_of,
    network_of,
    parse,
    port_name,
    vlan_of,
)
from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Findings, alike, natural_key
from ansible_collections.rankzero.inference.plugins.plugin_utils.values import nearest

__all__ = ["Choice", "Port", "choose", "none", "port_name", "usable_ports"]

Facts = t.Mapping[str, t.Any]
Hosts = t.Mapping[str, Facts]
NEAR = ("PIX", "PXB")  # closest PCI distances: same switch, or several switches of one root port
DEFAULT_PREFIX_LENGTH = 24  # NCCL_IB_SUBNET_PREFIX_LEN


@dataclasses.dataclass(frozen=True)
class Choice:
    """The fabric of a replica: its name, its link layer, and the ports of every host, sorted as NCCL sorts them (PCI order).

    C(prefix_length) is set for a fabric of direct cables (C(subnet_aware)): the length by which NCCL tells the cables' subnets apart.
    C(cross_rail) is False where a port of one rail cannot reach ports of another, None where that is not known.
    """

    name: str | None
    link: str | None  # infiniband, ethernet, efa or None (no HCAs)
    keys: tuple[str, ...]
    ports: t.Mapping[str, tuple[Port, ...]]
    nvlink: bool = False
    why: str = ""
    prefix_length: int | None = None
    cross_rail: bool | None = None


def none(why: str, name: str | None = None, nvlink: bool = False) -> Choice:
    return Choice(name, None, (), {}, nvlink, why)


def in_pci_order(ports: t.Iterable[Port]) -> list[Port]:
    """NCCL pairs the n-th port of one host with the n-th of another in this order (NCCL 2.29.7, NCCL_IB_DEVICE_PCI_ORDER)."""
    return sorted(ports, key=lambda port: (str(port.get("pci_bdf") or "~"), natural_key(str(port.get("name"))), port.get("port") or 0))


def usable_ports(facts: Facts) -> list[Port]:
    """Usable ports in PCI order."""
    return in_pci_order(port for port in facts.get("hcas") or () if port.get("usable"))


def choose(
    wanted: t.Sequence[str],
    named: t.Mapping[str, t.Any],
    hosts: Hosts,
    gpus: t.Mapping[str, t.Sequence[str]],
    management: t.Mapping[str, str],
    findings: Findings,
) -> Choice:
    """Choose the fabric over all hosts of a replica.

    C(wanted): what C(replica_fabric) says, empty to derive.  C(hosts): host -> facts.  C(gpus): host -> UUIDs of the shard's GPUs.
    C(management): host -> management interface, whose port stays out unless it is asked for by name.
    """
    if list(wanted) == ["none"]:
        return none("replica_fabric is none")
    if list(wanted) == ["efa"]:
        return _efa(hosts, findings)
    if any(key.startswith("nvl:") for key in wanted):
        rest = [key for key in wanted if not key.startswith("nvl:")]
        inner = choose(rest, named, hosts, gpus, management, findings) if rest else none("the fabric is the NVLink domain")
        return dataclasses.replace(inner, name=",".join(wanted), nvlink=True)
    if not wanted:
        return _derive(hosts, gpus, management, findings)
    before = len(findings.faults)
    definitions = [_definition(part, named, hosts, findings) for part in wanted]
    if len(findings.faults) > before:
        return none("faulty", ",".join(wanted))
    return _named(",".join(wanted), [item for item in definitions if item], hosts, gpus, management, findings)


def check_names(wanted: t.Sequence[str], named: t.Mapping[str, t.Any], hosts: Hosts, findings: Findings) -> None:
    """What is wrong with C(replica_fabric) whatever ranks there will be."""
    for part in wanted:
        if part not in ("none", "efa") and not part.startswith("nvl:"):
            _definition(part, named, hosts, findings)


def selected(wanted: t.Sequence[str], named: t.Mapping[str, t.Any], hosts: Hosts) -> dict[str, t.Sequence[Port]]:
    """host -> the ports that C(replica_fabric) takes there, each host judged by itself: without what speaks against the choice over all of them."""
    if list(wanted) == ["none"]:
        return {}
    if list(wanted) == ["efa"]:
        return {host: _efa_ports(facts) for host, facts in hosts.items()}
    unheard = Findings()
    definitions = [item for item in (_definition(part, named, hosts, unheard) for part in wanted) if item]
    if unheard.faults:
        return {}
    found: dict[str, t.Sequence[Port]] = {}
    for host, facts in hosts.items():
        unheard = Findings()
        ports = _selected(host, facts, _selectors_for(host, definitions, unheard), ",".join(wanted), unheard)
        found[host] = () if unheard.faults else ports
    return found


def _definition(part: str, named: t.Mapping[str, t.Any], hosts: Hosts, findings: Findings) -> Definition | None:
    """A part of C(replica_fabric): a name in replica_fabrics, or a key."""
    if part in named:
        return parse(part, named[part], findings)
    if part.startswith(("ib:", "roce:")):
        return Definition(part, Selector(keys=(part,)))
    close = nearest(part, named)
    findings.fault(
        "replica_fabric",
        part,
        "a name in replica_fabrics, a key as node facts give it (ib:..., roce:..., nvl:...), efa or none",
        ("Did you mean %s? " % close if close else "") + "The hosts have: %s." % "; ".join(alike({host: _listed(hosts[host]) for host in hosts})),
    )
    return None


# ---- a fabric that is named


def _named(
    name: str, definitions: list[Definition], hosts: Hosts, gpus: t.Mapping[str, t.Sequence[str]], management: t.Mapping[str, str], findings: Findings
) -> Choice:
    """The ports of every host that the definitions select, and the keys by which they reach each other."""
    ports: dict[str, list[Port]] = {}
    selectors: dict[str, list[Selector]] = {}
    before = len(findings.faults)
    for host, facts in hosts.items():
        selectors[host] = _selectors_for(host, definitions, findings)
        ports[host] = _selected(host, facts, selectors[host], name, findings)
    if len(findings.faults) > before:
        return none("faulty", name)
    if not any(definition.names_ports() for definition in definitions):
        ports = _where_every_host_keeps_one(ports, _without_management(ports, hosts, management))
        ports = _where_every_host_keeps_one(ports, {host: _near(hosts[host], gpus.get(host) or (), chosen) for host, chosen in ports.items()})
    within = {
        host: {port_name(port): [key for key in keys_of(port) if any(selector.takes_key(key) for selector in selectors[host])] for port in chosen}
        for host, chosen in ports.items()
    }
    why = "named by replica_fabric"
    if any(definition.subnet_aware for definition in definitions):
        return _direct_cables(name, ports, within, why, findings)
    routed = next((definition.routed for definition in definitions if definition.routed is not None), None)
    return _switched(name, ports, within, why, routed, findings)


def _selectors_for(host: str, definitions: list[Definition], findings: Findings) -> list[Selector]:
    found = []
    for definition in definitions:
        selector = definition.selector_for(host)
        if selector is None:
            findings.fault(
                "replica_fabrics.%s.hosts" % definition.name,
                "%s" % (", ".join(pattern for pattern, _fields in definition.by_host) or "nothing"),
                "exactly one entry that fits this host",
                "Its exact inventory name is taken before patterns.",
                host=host,
            )
        else:
            found.append(selector)
    return found


def _selected(host: str, facts: Facts, selectors: list[Selector], name: str, findings: Findings) -> list[Port]:
    """The host's ports that a selector takes. A port that is named one by one must be there and usable; nothing is left out in silence."""
    everything = list(facts.get("hcas") or ())
    before = len(findings.faults)
    for wanted in (entry for selector in selectors for entry in selector.hcas):
        fitting = [port for port in everything if is_named(port, wanted)]
        if not fitting or (not any(character in wanted for character in "*?[") and not all(map(_admissible, fitting))):
            findings.fault("replica_fabric", "%s names %s" % (name, wanted), "a usable port of this host", "The host has %s." % _listed(facts), host=host)
    by_name = [selector for selector in selectors if selector.hcas]
    chosen = [
        port
        for port in everything
        if any(selector.takes(port) for selector in selectors)
        and (port.get("usable") or (_admissible(port) and any(selector.takes(port) for selector in by_name)))
    ]
    if selectors and not chosen and len(findings.faults) == before:
        findings.fault("replica_fabric", name, "a fabric that the host has usable ports of", "The host has %s." % _listed(facts), host=host)
    return in_pci_order(chosen)


def _admissible(port: Port) -> bool:
    """Usable, or Soft-RoCE with nothing else against it: slow, but right where somebody asks for it by name (as a test bed does)."""
    if port.get("usable"):
        return True
    return port.get("transport") == "soft_roce" and port.get("state") == "active" and bool(keys_of(port)) and len(port.get("reasons") or ()) <= 1


def _where_every_host_keeps_one(ports: dict[str, list[Port]], narrower: dict[str, list[Port]]) -> dict[str, list[Port]]:
    return narrower if all(narrower.values()) else ports


def _near(facts: Facts, gpus: t.Sequence[str], ports: list[Port]) -> list[Port]:
    """The ports that are near one of these GPUs. Ports that are near none serve storage or management (NVIDIA/nccl#1264)."""
    distances = (facts.get("topology") or {}).get("gpu_hca") or {}
    near = {name for uuid in gpus for name, distance in (distances.get(uuid) or {}).items() if distance in NEAR}
    return [port for port in ports if port.get("name") in near]


def _without_management(ports: t.Mapping[str, list[Port]], hosts: Hosts, management: t.Mapping[str, str]) -> dict[str, list[Port]]:
    """Without the port that carries the management interface, directly or as a bond or VLAN."""
    result = {}
    for host, chosen in ports.items():
        below = _interfaces_below(management.get(host), hosts[host])
        result[host] = [port for port in chosen if not below & set(port.get("netdevs") or ())]
    return result


def _interfaces_below(name: str | None, facts: Facts) -> set[str]:
    """An interface with everything that it stands on: members of a bond or bridge, and the base of a VLAN (C(bond0.100) on C(bond0)).

    Facts do not name the base of a VLAN; the kernel gives a VLAN its base's MAC address, and nearly everybody names it BASE.ID.
    """
    interfaces = list(facts.get("interfaces") or ())
    found: set[str] = set()
    todo = [name] if name else []
    while todo:
        current = todo.pop()
        if current in found:
            continue
        found.add(current)
        todo += [str(item.get("name")) for item in interfaces if item.get("master") == current]
        own: Facts = next((item for item in interfaces if item.get("name") == current), {})
        if own.get("kind") == "vlan" or own.get("vlan") is not None:
            base = current.rpartition(".")[0]
            same_mac = [str(item.get("name")) for item in interfaces if own.get("mac") and item.get("mac") == own.get("mac") and item.get("kind") != "vlan"]
            todo += [base] if base else same_mac
        elif own.get("kind") == "ipoib" and "." in current:
            todo.append(current.rpartition(".")[0])
    return found


# ---- a fabric that is derived


def _derive(hosts: Hosts, gpus: t.Mapping[str, t.Sequence[str]], management: t.Mapping[str, str], findings: Findings) -> Choice:
    """Without a word from the operator: the one fabric that all hosts share, or the rails of a rail design; otherwise refuse and list."""
    usable = {host: [port for port in usable_ports(facts) if not _is_erdma(port)] for host, facts in hosts.items()}
    if not any(usable.values()):
        if all(map(_efa_ports, hosts.values())):
            return _efa(hosts, findings)
        return _tcp("no host has an HCA port that is chosen by default", hosts, findings)
    candidates = _without_management(usable, hosts, management)
    if not any(candidates.values()):
        return _tcp("every usable HCA port carries its host's management interface", hosts, findings)
    by_distance = bool(hosts) and all(_near(facts, gpus.get(host) or (), list(facts.get("hcas") or ())) for host, facts in hosts.items())
    if by_distance:
        candidates = {host: _near(hosts[host], gpus.get(host) or (), ports) for host, ports in candidates.items()}
    within = {host: {port_name(port): keys_of(port) for port in ports} for host, ports in candidates.items()}
    keys = _common_keys(within)
    if not keys:
        _fault_nothing_shared(hosts, within, by_distance, findings)
        return none("faulty")
    if len(keys) > 1 and not _are_rails(keys, candidates, by_distance):
        findings.fault(
            "replica_fabric",
            "several that can be meant: %s" % _candidates(keys, candidates),
            "one fabric",
            "Set replica_fabric to one of them, or to several, separated by commas, for a rail design.",
        )
        return none("faulty")
    chosen = {host: [port for port in ports if set(keys) & set(keys_of(port))] for host, ports in candidates.items()}
    shared = {host: {name: [key for key in found if key in keys] for name, found in ports.items()} for host, ports in within.items()}
    why = "the only fabric that all hosts share" if len(keys) == 1 else "the rails that all hosts share"
    return _switched(",".join(keys), chosen, shared, why, None, findings)


def _is_erdma(port: Port) -> bool:
    """Alibaba's eRDMA may show itself as RoCE; nobody has shown that NCCL's verbs transport works over it (NVIDIA/nccl#2428)."""
    return port.get("driver") == "erdma" or str(port.get("name")).startswith("erdma")


def _tcp(why: str, hosts: Hosts, findings: Findings) -> Choice:
    """TCP, said aloud where a host has RDMA devices: it is right, and many times slower than what somebody paid for."""
    for host, facts in hosts.items():
        if facts.get("hcas"):
            findings.warn(
                "hcas",
                _listed(facts),
                "usable HCA ports on one fabric, or replica_fabric: none",
                "The ranks talk over TCP: %s. Name a fabric in replica_fabric to use these ports, or none to agree with TCP." % why,
                host=host,
            )
    return none(why)


def _efa_ports(facts: Facts) -> list[Port]:
    return in_pci_order(port for port in facts.get("hcas") or () if port.get("transport") == "efa" and port.get("state") == "active")


def _efa(hosts: Hosts, findings: Findings) -> Choice:
    """AWS EFA: all active devices of every host, through libfabric; verbs, GIDs and NCCL_IB_ variables play no part in it."""
    ports = {host: _efa_ports(facts) for host, facts in hosts.items()}
    for host, found in ports.items():
        if not found:
            findings.fault("replica_fabric", "efa", "active EFA devices", "The host has %s." % _listed(hosts[host]), host=host)
    _check_counts("efa", ports, findings)
    return Choice("efa", "efa", (), {host: tuple(found) for host, found in ports.items()}, why="the hosts' EFA devices")


def _common_keys(within: t.Mapping[str, t.Mapping[str, t.Sequence[str]]]) -> tuple[str, ...]:
    """The keys that every host has, without the IPv6 side of a fabric that has both families on the same ports."""
    if not within:
        return ()
    common = set.intersection(*({key for keys in ports.values() for key in keys} for ports in within.values()))

    def carriers(key: str) -> set[tuple[str, str]]:
        return {(host, name) for host, ports in within.items() for name, keys in ports.items() if key in keys}

    fours = [key for key in common if isinstance(network_of(key), ipaddress.IPv4Network)]
    sixes = {
        key
        for key in common
        if isinstance(network_of(key), ipaddress.IPv6Network) and any(vlan_of(key) == vlan_of(four) and carriers(key) == carriers(four) for four in fours)
    }
    return tuple(sorted(common - sixes, key=natural_key))


def _are_rails(keys: tuple[str, ...], candidates: t.Mapping[str, list[Port]], by_distance: bool) -> bool:
    """A rail design: every key on exactly one port of every host, every port in exactly one key, all of one rate and one link layer.

    Two keys can as well be a compute and a storage network; they count as rails only where every port is near a GPU.
    """
    shapes: set[tuple[t.Any, t.Any]] = set()
    for ports in candidates.values():
        chosen = [port for port in ports if set(keys) & set(keys_of(port))]
        if len(chosen) != len(keys) or any(len(set(keys) & set(keys_of(port))) != 1 for port in chosen):
            return False
        shapes.update((port.get("link_layer"), port.get("rate_gbps")) for port in chosen)
    return len(shapes) == 1 and (by_distance or len(keys) > 2)


def _candidates(keys: t.Iterable[str], ports: t.Mapping[str, list[Port]]) -> str:
    """Every key with the ports that have it on every host."""
    return "; ".join(
        "%s (%s)"
        % (
            key,
            "; ".join(alike({host: "+".join(port_name(port) for port in found if key in keys_of(port)) for host, found in ports.items()})),
        )
        for key in keys
    )


def _fault_nothing_shared(hosts: Hosts, within: t.Mapping[str, t.Mapping[str, t.Sequence[str]]], by_distance: bool, findings: Findings) -> None:
    detail = "; ".join(alike({host: _listed(hosts[host]) for host in hosts}))
    hint = "Ranks would hang at their first all-reduce. Check cabling and addresses, or set replica_fabric."
    if by_distance:
        hint += " Only ports near the shard's GPUs were looked at."
    if len(within) > 2 and not _pairs_without_link(within):
        hint = (
            "Every two hosts share a subnet of their own, as direct cables do: define the ports in replica_fabrics with subnet_aware: true, "
            "and name that fabric in replica_fabric (NCCL 2.30.7 or newer)."
        )
    findings.fault("replica_fabric", "no fabric that all hosts share (%s)" % detail, "one fabric, or replica_fabric: none for TCP", hint)


# ---- checks that hold for every way of choosing

Within = t.Mapping[str, t.Mapping[str, t.Sequence[str]]]  # host -> port -> keys


def _switched(name: str, ports: t.Mapping[str, list[Port]], within: Within, why: str, routed: bool | None, findings: Findings) -> Choice:
    """A fabric, or rails, on which the n-th port of one host reaches the n-th port of every other."""
    keys = _common_keys(within)
    before = len(findings.faults)
    _check_ports(name, ports, findings)
    for host, chosen in ports.items():
        for port in chosen:
            _check_one_key(name, host, port, [key for key in within[host][port_name(port)] if key in keys], within[host][port_name(port)], findings)
    if len(findings.faults) == before and not routed:
        _check_rail_order(name, ports, keys, findings)
    _check_addresses(ports, keys, findings)
    _check_lids(ports, keys, findings)
    _check_mtu(ports, findings)
    links = {str(port.get("link_layer")) for chosen in ports.values() for port in chosen}
    crossing = False if len(keys) > 1 and (routed is False or links == {"infiniband"} and not routed) else routed
    return Choice(name, min(links) if links else None, keys, {host: tuple(chosen) for host, chosen in ports.items()}, why=why, cross_rail=crossing)


def _check_ports(name: str, ports: t.Mapping[str, list[Port]], findings: Findings) -> None:
    """One link layer, as many ports on every host, and no more than NCCL takes."""
    links = {str(port.get("link_layer")): "%s %s" % (host, port_name(port)) for host, chosen in ports.items() for port in reversed(chosen)}
    if len(links) > 1:
        findings.fault(
            "replica_fabric",
            "%s with ports of the link layers %s" % (name, " and ".join("%s (%s)" % item for item in sorted(links.items()))),
            "ports of one link layer",
            "NCCL refuses or hangs on a list that mixes them (NVIDIA/nccl#302): name the fabric more narrowly.",
        )
    _check_counts(name, ports, findings)
    for host, chosen in ports.items():
        if len(chosen) > nccl.MOST_PORTS:
            findings.fault(
                "hcas",
                "%d ports of fabric %s" % (len(chosen), name),
                "at most %d" % nccl.MOST_PORTS,
                "NCCL drops the rest. Name fewer in replica_fabrics.",
                host=host,
            )


def _check_counts(name: str, ports: t.Mapping[str, t.Sequence[Port]], findings: Findings) -> None:
    if len({len(chosen) for chosen in ports.values()}) > 1:
        detail = "; ".join(alike({host: "%d usable (%s)" % (len(found), ", ".join(map(port_name, found)) or "none") for host, found in ports.items()}))
        findings.fault(
            "hcas",
            detail,
            "the same number of usable ports of fabric %s on every host" % name,
            "Unequal counts hang or degrade NCCL (NVIDIA/nccl#2428). Node facts say why a port is not usable.",
        )


def _check_one_key(name: str, host: str, port: Port, shared: t.Sequence[str], own: t.Sequence[str], findings: Findings) -> None:
    """Each port is in exactly one of the fabric's networks: with none it reaches nobody, with two NCCL's pick is a matter of luck."""
    if not shared:
        findings.fault(
            "hcas",
            "%s of fabric %s is on %s" % (port_name(port), name, ", ".join(own) or "no network"),
            "a network that every host of the replica has",
            "Leave the port out, or address it. Direct cables between hosts, each a subnet of its own, need subnet_aware: true in replica_fabrics.",
            host=host,
        )
    elif len([key for key in shared if not _is_second_family(key, shared)]) > 1:
        findings.fault(
            "hcas",
            "%s of fabric %s is on %s" % (port_name(port), name, " and ".join(shared)),
            "one network",
            "Say which one is meant: keys, networks or vlan in replica_fabrics.",
            host=host,
        )


def _is_second_family(key: str, keys: t.Iterable[str]) -> bool:
    return ":" in key.partition(":")[2] and any("." in other and vlan_of(other) == vlan_of(key) for other in keys)


def _check_rail_order(name: str, ports: t.Mapping[str, list[Port]], keys: tuple[str, ...], findings: Findings) -> None:
    """NCCL pairs ports by PCI order, whatever the order in NCCL_IB_HCA: rails must come in the same order on every host."""
    orders = {host: [next(key for key in keys if key in keys_of(port)) for port in chosen] for host, chosen in ports.items()}
    if len({tuple(order) for order in orders.values()}) > 1:
        detail = "; ".join(alike({host: ", ".join("%s %s" % pair for pair in zip(map(port_name, ports[host]), order)) for host, order in orders.items()}))
        findings.fault(
            "hcas",
            "%s in different order: %s" % (name, detail),
            "the rails in the same PCI order on every host",
            "NCCL pairs the n-th port of one host with the n-th of another. Swap cables or addresses; where routers connect the rails, "
            "set routed: true in replica_fabrics.",
        )


def _check_addresses(ports: t.Mapping[str, list[Port]], keys: t.Sequence[str], findings: Findings) -> None:
    """An address that two ports have is a bond that no hardware carries, or a mistake; either way they are no two rails (MrBr-github/lshca#77)."""
    owners: dict[str, list[tuple[str, str]]] = {}
    for host, chosen in ports.items():
        for port in chosen:
            for address in sorted({str(gids.address_of(gid)) for gid in gids.routable_v2(port, keys)}):
                owners.setdefault(address, []).append((host, port_name(port)))
    for address, places in sorted(owners.items()):
        if len(places) > 1:
            findings.fault(
                "hcas.gids",
                "%s on %s" % (address, " and ".join("%s %s" % place for place in places)),
                "an address of its own for every port",
                "A bond over several HCAs is no set of rails; give each interface its own address.",
            )


def _check_lids(ports: t.Mapping[str, list[Port]], keys: t.Sequence[str], findings: Findings) -> None:
    """Equal subnet prefixes prove nothing: every unmanaged InfiniBand fabric has fe80::. Different subnet managers or a LID twice tell them apart."""
    for key in (key for key in keys if key.startswith("ib:")):
        members = [(host, port) for host, chosen in ports.items() for port in chosen if key in keys_of(port)]
        masters = {port["sm_lid"]: "%s %s" % (host, port_name(port)) for host, port in reversed(members) if _is_lid(port.get("sm_lid"))}
        if len(masters) > 1:
            detail = "; ".join("%s sees the subnet manager at LID %s" % (who, lid) for lid, who in sorted(masters.items()))
            findings.fault(
                "hcas.sm_lid",
                detail,
                "one subnet manager on fabric %s" % key,
                "These are different fabrics with one subnet prefix. Give each a prefix of its own, or name ports in replica_fabrics.",
            )
        lids: dict[int, list[str]] = {}
        for host, port in members:
            if _is_lid(port.get("lid")) and not port.get("is_vf"):
                lids.setdefault(port["lid"], []).append("%s %s" % (host, port_name(port)))
        for lid, places in sorted(lids.items()):
            if len(places) > 1:
                findings.warn(
                    "hcas.lid",
                    "LID %s on %s" % (lid, " and ".join(places)),
                    "a LID of its own for every port of fabric %s" % key,
                    "Unless these are virtual functions that share a LID, they are on different fabrics with one subnet prefix.",
                )


def _is_lid(value: t.Any) -> bool:
    """0 and 0xffff stand for no LID."""
    return isinstance(value, int) and 0 < value < 0xFFFF


def _check_mtu(ports: t.Mapping[str, list[Port]], findings: Findings) -> None:
    sizes = {port["mtu"]: "%s %s" % (host, port_name(port)) for host, chosen in ports.items() for port in reversed(chosen) if isinstance(port.get("mtu"), int)}
    if len(sizes) > 1:
        findings.warn(
            "hcas.mtu",
            "; ".join("%s on %s" % item for item in sorted(sizes.items())),
            "one MTU on all ports of the fabric",
            "The smaller one is used, or large packets are lost.",
        )


# ---- direct cables


def _direct_cables(name: str, ports: dict[str, list[Port]], within: Within, why: str, findings: Findings) -> Choice:
    """Hosts that are wired to each other, each cable a subnet of its own; no subnet is common to all (DGX Spark, three nodes in a ring).

    NCCL finds the port that leads to a peer only with NCCL_IB_SUBNET_AWARE_ROUTING=1 (2.30.7), and only by the prefix of an address.
    """
    where = "replica_fabrics.%s.subnet_aware" % name
    _check_ports(name, ports, findings)
    for host, chosen in ports.items():
        for port in chosen:
            own = within[host][port_name(port)]
            _check_one_key(name, host, port, own, own, findings)
            if port.get("link_layer") != "ethernet":
                findings.fault(
                    where,
                    "%s is %s" % (port_name(port), port.get("link_layer")),
                    "RoCE ports",
                    "InfiniBand has no addresses to tell cables apart by.",
                    host=host,
                )
        twice = sorted({key for one, other in itertools.combinations(within[host].values(), 2) for key in set(one) & set(other)}, key=natural_key)
        if twice:
            findings.fault(
                where, "several ports in %s" % ", ".join(twice), "a subnet of its own for every port", "NCCL tells the cables apart by subnet.", host=host
            )
    for one, other in _pairs_without_link(within):
        findings.fault(
            where,
            "no subnet that %s and %s share" % (one, other),
            "a cable between every two hosts",
            "NCCL connects ranks in orders of its own: three hosts in a ring work, four do not.",
        )
    keys = tuple(sorted({key for found in within.values() for own in found.values() for key in own}, key=natural_key))
    _check_addresses(ports, keys, findings)
    _check_mtu(ports, findings)
    length = _prefix_length(ports, keys, where, findings)
    return Choice(name, "ethernet", keys, {host: tuple(chosen) for host, chosen in ports.items()}, why=why + ", direct cables", prefix_length=length)


def _pairs_without_link(within: Within) -> list[tuple[str, str]]:
    found = {host: {key for keys in ports.values() for key in keys} for host, ports in within.items()}
    return [pair for pair in itertools.combinations(sorted(found, key=natural_key), 2) if not found[pair[0]] & found[pair[1]]]


def _prefix_length(ports: t.Mapping[str, list[Port]], keys: t.Sequence[str], where: str, findings: Findings) -> int:
    """A length under which two addresses look alike to NCCL exactly where they are in one subnet."""
    addresses = [
        (int(address), key)
        for chosen in ports.values()
        for port in chosen
        for gid in gids.routable_v2(port, keys)
        for key in keys
        for address in [gids.address_of(gid)]
        if isinstance(address, ipaddress.IPv4Address) and gids.is_on(gid, port, (key,))
    ]
    networks = sorted({network.prefixlen for network in map(network_of, keys) if isinstance(network, ipaddress.IPv4Network)})
    for length in [DEFAULT_PREFIX_LENGTH, *networks]:
        if all((one >> 32 - length == other >> 32 - length) == (key == other_key) for (one, key), (other, other_key) in itertools.combinations(addresses, 2)):
            return length
    findings.fault(
        where,
        "subnets %s" % ", ".join(keys),
        "subnets that one prefix length tells apart",
        "NCCL has one NCCL_IB_SUBNET_PREFIX_LEN for all. Use networks of one size, such as /24.",
    )
    return DEFAULT_PREFIX_LENGTH


def _listed(facts: Facts) -> str:
    """Every port with what it is, for a hint."""
    items = []
    for port in facts.get("hcas") or ():
        what = ", ".join(port.get("fabrics") or ()) or "no fabric"
        items.append("%s %s" % (port_name(port), what if port.get("usable") else "not usable: %s" % "; ".join(port.get("reasons") or ("unknown",))))
    return ", ".join(items) or "no HCAs"
