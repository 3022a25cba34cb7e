# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which HCA ports a shard uses, and how NCCL is told.

A fabric is a set of ports that can reach each other: ports of one key (C(ib:<subnet prefix>), C(roce:<network>[@<vlan>])), the keys of a rail
design, or a name that the operator gave in C(replica_fabrics). Where more than one fabric can be meant, the candidates are listed and the
plan is refused: an HCA of another fabric is a silent hang at the first all-reduce (NVIDIA/nccl#302, #2428).
"""

from __future__ import annotations

import dataclasses
import fnmatch
import ipaddress
import typing as t

from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Findings, natural_key

Port = t.Mapping[str, t.Any]
NEAR = ("PIX", "PXB")          # closest PCI distances: same switch, or several switches of one root port


@dataclasses.dataclass(frozen=True)
class Choice:
    """The fabric of a replica: its name, its link layer, and the ports of every host, sorted as NCCL sorts them (PCI order)."""

    name: str | None
    link: str | None                                    # infiniband, ethernet or None (no HCAs)
    keys: tuple[str, ...]
    ports: t.Mapping[str, tuple[Port, ...]]
    nvlink: bool = False
    why: str = ""


def none(why: str, name: str | None = None, nvlink: bool = False) -> Choice:
    return Choice(name, None, (), {}, nvlink, why)


def port_name(port: Port) -> str:
    return "%s:%s" % (port.get("name"), port.get("port"))


def usable_ports(facts: t.Mapping[str, t.Any]) -> list[Port]:
    """Usable ports in PCI order; NCCL pairs the n-th of one host with the n-th of another in that order (NCCL 2.29.7, NCCL_IB_DEVICE_PCI_ORDER)."""
    ports = [port for port in facts.get("hcas") or () if port.get("usable")]
    return sorted(ports, key=lambda port: (str(port.get("pci_bdf") or "~"), natural_key(str(port.get("name"))), port.get("port") or 0))


def choose(wanted: t.Sequence[str], named: t.Mapping[str, t.Any], hosts: t.Mapping[str, t.Mapping[str, t.Any]], gpus: t.Mapping[str, t.Sequence[str]],
           management: t.Mapping[str, str], findings: Findings) -> Choice:
    """Choose the fabric over all hosts of a replica.

    C(wanted): what C(replica_fabric) says, empty to derive.  C(hosts): host -> facts.  C(gpus): host -> UUIDs of the shard's GPUs.
    C(management): host -> management interface, whose port stays out unless it is asked for by name.
    """
    if list(wanted) == ["none"]:
        return none("replica_fabric is none")
    if any(key.startswith("nvl:") for key in wanted):
        rest = [key for key in wanted if not key.startswith("nvl:")]
        inner = choose(rest, named, hosts, gpus, management, findings) if rest else none("the fabric is the NVLink domain")
        return dataclasses.replace(inner, name=",".join(wanted), nvlink=True)
    if len(wanted) == 1 and wanted[0] in named:
        return _named(wanted[0], named[wanted[0]], hosts, findings)
    if wanted:
        return _by_keys(tuple(wanted), hosts, named, findings)
    return _derive(hosts, gpus, management, findings)


def _finish(name: str, keys: tuple[str, ...], ports: dict[str, tuple[Port, ...]], why: str, findings: Findings) -> Choice:
    """Checks that hold for every way of choosing: one link layer, and as many ports on every host."""
    links = sorted({str(port.get("link_layer")) for chosen in ports.values() for port in chosen})
    if len(links) > 1:
        findings.fault("replica_fabric", "%s with ports of the link layers %s" % (name, " and ".join(links)), "ports of one link layer",
                       "NCCL refuses or hangs on a list that mixes them (NVIDIA/nccl#302): name the fabric more narrowly.")
    counts = {host: len(chosen) for host, chosen in ports.items()}
    if len(set(counts.values())) > 1:
        detail = "; ".join("%s has %d (%s)" % (host, counts[host], ", ".join(map(port_name, ports[host])) or "none") for host in sorted(ports, key=natural_key))
        findings.fault("hcas", detail, "the same number of usable ports of fabric %s on every host" % name,
                       "Unequal counts hang or degrade NCCL (NVIDIA/nccl#2428). node_report.yml says why a port is not usable.")
    return Choice(name, links[0] if links else None, keys, ports, why=why)


def _by_keys(keys: tuple[str, ...], hosts: t.Mapping[str, t.Mapping[str, t.Any]], named: t.Mapping[str, t.Any], findings: Findings) -> Choice:
    ports: dict[str, tuple[Port, ...]] = {}
    for host, facts in hosts.items():
        ports[host] = tuple(port for port in usable_ports(facts) if set(keys) & set(port.get("fabrics") or ()))
        if not ports[host]:
            findings.fault("replica_fabric", ",".join(keys), "a fabric that the host has usable ports of", "The host has %s.%s" % (
                _listed(facts), " Named fabrics: %s." % ", ".join(sorted(named)) if named else ""), host=host)
    return _finish(",".join(keys), keys, ports, "named by replica_fabric", findings)


def _named(name: str, definition: t.Any, hosts: t.Mapping[str, t.Mapping[str, t.Any]], findings: Findings) -> Choice:
    """A fabric of C(replica_fabrics): a mapping (or one per host pattern under C(hosts)) of hcas, networks, vlan and link_layer."""
    if not isinstance(definition, t.Mapping):
        findings.fault("replica_fabrics.%s" % name, definition, "a mapping with hcas, networks, vlan, link_layer or hosts")
        return none("faulty", name)
    ports: dict[str, tuple[Port, ...]] = {}
    keys: set[str] = set()
    for host, facts in hosts.items():
        selector = _selector_for(host, definition)
        chosen = tuple(port for port in usable_ports(facts) if _selected(port, selector))
        if not chosen:
            findings.fault("replica_fabrics.%s" % name, "no usable port that fits on this host", "at least one", "The host has %s." % _listed(facts), host=host)
        ports[host] = chosen
        for port in chosen:
            keys.update(key for key in port.get("fabrics") or () if _key_selected(key, selector))
    return _finish(name, tuple(sorted(keys)), ports, "replica_fabrics.%s" % name, findings)


def _selector_for(host: str, definition: t.Mapping[str, t.Any]) -> t.Mapping[str, t.Any]:
    for pattern, selector in (definition.get("hosts") or {}).items():
        if fnmatch.fnmatchcase(host, str(pattern)) and isinstance(selector, t.Mapping):
            return selector
    return definition


def _selected(port: Port, selector: t.Mapping[str, t.Any]) -> bool:
    names = selector.get("hcas")
    if names is not None and not {str(port.get("name")), port_name(port)} & set(map(str, names)):
        return False
    if selector.get("link_layer") and str(selector["link_layer"]).lower() != port.get("link_layer"):
        return False
    if selector.get("networks") is not None or selector.get("vlan") is not None:
        return any(_key_selected(key, selector) for key in port.get("fabrics") or ())
    return names is not None or bool(selector.get("link_layer"))


def _key_selected(key: str, selector: t.Mapping[str, t.Any]) -> bool:
    network, _at, vlan = key.partition(":")[2].partition("@")
    if selector.get("vlan") is not None and vlan != str(selector["vlan"]):
        return False
    wanted = selector.get("networks")
    if wanted is None:
        return True
    if not key.startswith("roce:"):
        return False
    return any(_inside(network, str(item)) for item in ([wanted] if isinstance(wanted, str) else wanted))


def _inside(network: str, wanted: str) -> bool:
    try:
        inner, outer = ipaddress.ip_network(network, strict=False), ipaddress.ip_network(wanted, strict=False)
    except ValueError:
        return False
    return inner.version == outer.version and inner.subnet_of(outer)     # type: ignore[arg-type]


def _derive(hosts: t.Mapping[str, t.Mapping[str, t.Any]], gpus: t.Mapping[str, t.Sequence[str]], management: t.Mapping[str, str], findings: Findings) -> Choice:
    """Without a word from the operator: the one fabric that all hosts share, or the rails of a rail design; otherwise refuse and list."""
    candidates = {host: [port for port in usable_ports(facts) if management.get(host) not in (port.get("netdevs") or ())] for host, facts in hosts.items()}
    if not any(candidates.values()):
        return none("no host has a usable HCA port")
    near = {host: _near_gpus(hosts[host], gpus.get(host) or (), ports) for host, ports in candidates.items()}
    by_distance = all(near.values())
    if by_distance:
        candidates = near                              # ports that are near no GPU serve storage or management (nccl#1264)
    common = set.intersection(*({key for port in ports for key in port.get("fabrics") or ()} for ports in candidates.values()))
    if not common:
        detail = "; ".join("%s: %s" % (host, _listed(hosts[host])) for host in sorted(hosts, key=natural_key))
        findings.fault("replica_fabric", "no fabric that all hosts share (%s)" % detail, "one fabric, or replica_fabric: none for TCP",
                       "Ranks would hang at their first all-reduce. Check cabling and addresses, or set replica_fabric.")
        return none("faulty")
    keys = tuple(sorted(common, key=natural_key))
    if len(keys) > 1 and not _are_rails(keys, candidates, by_distance):
        findings.fault("replica_fabric", "several that can be meant: %s" % ", ".join(keys), "one fabric",
                       "Set replica_fabric to one of them (or several, separated by commas, for a rail design).")
        return none("faulty")
    ports = {host: tuple(port for port in chosen if set(keys) & set(port.get("fabrics") or ())) for host, chosen in candidates.items()}
    return _finish(",".join(keys), keys, ports, "the only fabric that all hosts share" if len(keys) == 1 else "the rails that all hosts share", findings)


def _near_gpus(facts: t.Mapping[str, t.Any], gpus: t.Sequence[str], ports: list[Port]) -> list[Port]:
    distances = (facts.get("topology") or {}).get("gpu_hca") or {}
    near = {name for uuid in gpus for name, distance in (distances.get(uuid) or {}).items() if distance in NEAR}
    return [port for port in ports if port.get("name") in near]


def _are_rails(keys: tuple[str, ...], candidates: t.Mapping[str, list[Port]], by_distance: bool) -> bool:
    """A rail design: every key on exactly one port of every host, every port in exactly one key, all of one rate and one link layer.

    Two keys can as well be a compute and a storage network; they count as rails only where every port is near a GPU.
    """
    shapes = set()
    for ports in candidates.values():
        chosen = [port for port in ports if set(keys) & set(port.get("fabrics") or ())]
        if len(chosen) != len(keys) or any(len(set(keys) & set(port.get("fabrics") or ())) != 1 for port in chosen):
            return False
        shapes.update((port.get("link_layer"), port.get("rate_gbps")) for port in chosen)
    return len(shapes) == 1 and (by_distance or len(keys) > 2)


def _listed(facts: t.Mapping[str, t.Any]) -> str:
    """Every port with what it is, for a hint."""
    items = []
    for port in facts.get("hcas") or ():
        what = ", ".join(port.get("fabrics") or ()) or "no fabric"
        items.append("%s %s" % (port_name(port), what if port.get("usable") else "not usable: %s" % "; ".join(port.get("reasons") or ("unknown",))))
    return ", ".join(items) or "no HCAs"


@dataclasses.dataclass(frozen=True)
class Gid:
    """How NCCL finds the right RoCE GID on one host: an index, or an address range, with the reason."""

    index: int | None = None
    address_range: str | None = None
    ipv6: bool = False
    why: str = ""


def routable_v2(port: Port, keys: t.Sequence[str]) -> list[t.Mapping[str, t.Any]]:
    """The GID entries of a port that are RoCE v2, on the fabric, and not link-local."""
    return [gid for gid in port.get("gids") or () if gid.get("type") == "RoCE v2" and _on_fabric(gid, port, keys)]


def _on_fabric(gid: t.Mapping[str, t.Any], port: Port, keys: t.Sequence[str]) -> bool:
    try:
        address = ipaddress.ip_address(str(gid.get("address")))
    except ValueError:
        return False
    if address.is_link_local:
        return False
    if gid.get("network"):
        return "roce:%s%s" % (gid["network"], "@%s" % gid["vlan"] if gid.get("vlan") is not None else "") in keys
    # The prefix length is not known: the address counts where the port's only fabric is the chosen one.
    return len(port.get("fabrics") or ()) == 1 and port["fabrics"][0] in keys


def gid_rule(ports: t.Sequence[Port], keys: t.Sequence[str], *, host: str, rank: int, findings: Findings) -> Gid | None:
    """One index that is right for all of the host's ports, else one address range that selects the right entries, else a fault.

    NCCL takes one number and one range for all HCAs of a process (NVIDIA/nccl#890). None on a fault, and for InfiniBand, where NCCL
    ignores the index.
    """
    right = {port_name(port): routable_v2(port, keys) for port in ports}
    missing = [name for name, entries in right.items() if not entries]
    if missing:
        findings.fault("hcas.gids", "no routable RoCE v2 entry on %s" % ", ".join(missing), "a RoCE v2 GID with an address of the fabric on every chosen port",
                       "Without one NCCL silently uses index 0, which is link-local. Give the port an address of the fabric.", host=host, rank=rank)
        return None
    # IPv4 entries are preferred, as NCCL and UCX prefer them; a port with IPv6 alone makes the host IPv6.
    ipv6 = not all(any("." in str(entry["address"]) for entry in entries) for entries in right.values())
    right = {name: [entry for entry in entries if ("." not in str(entry["address"])) == ipv6] for name, entries in right.items()}
    if not all(right.values()):
        findings.fault("hcas.gids", "IPv4 on some ports and IPv6 on others", "one address family on all chosen ports", host=host, rank=rank)
        return None
    shared = set.intersection(*({int(entry["index"]) for entry in entries} for entries in right.values()))
    if shared:
        index = min(shared)
        address = next(str(entry["address"]) for entry in next(iter(right.values())) if int(entry["index"]) == index)
        return Gid(index=index, ipv6=ipv6, why="the RoCE v2 entry of %s on every chosen port (first: %s)" % (",".join(keys), address))
    covering = _covering_range(ports, right, ipv6)
    if covering is not None:
        return Gid(address_range=covering, ipv6=ipv6, why="the index differs between the ports (%s)" % ", ".join(
            "%s %s" % (name, "/".join(str(entry["index"]) for entry in entries)) for name, entries in right.items()))
    findings.fault("hcas.gids", "; ".join("%s: index %s" % (name, ", ".join("%s %s" % (entry["index"], entry["address"]) for entry in entries)) for name, entries in right.items()),
                   "one GID index, or one address range, that is right for all chosen ports",
                   "NCCL takes one of each for all HCAs of a process (NVIDIA/nccl#890). Remove the unwanted addresses, or choose fewer ports with replica_fabrics.", host=host, rank=rank)
    return None


def _covering_range(ports: t.Sequence[Port], right: t.Mapping[str, list[t.Mapping[str, t.Any]]], ipv6: bool) -> str | None:
    """The smallest network that holds all right addresses and, on these ports, no other address of the family."""
    wanted = {str(entry["address"]) for entries in right.values() for entry in entries}
    networks = [ipaddress.ip_network(str(entry.get("network") or entry["address"]), strict=False) for entries in right.values() for entry in entries]
    cover = networks[0]
    while not all(network.subnet_of(cover) for network in networks):      # type: ignore[arg-type]
        if cover.prefixlen == 0:
            return None
        cover = cover.supernet()
    others = {str(gid["address"]) for port in ports for gid in port.get("gids") or () if gid.get("address") and (":" in str(gid["address"])) == ipv6} - wanted
    return None if any(ipaddress.ip_address(address) in cover for address in others) else str(cover)
