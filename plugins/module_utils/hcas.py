# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every port of every RDMA device of a host, read from sysfs: what it is, which fabric it reaches, and why it may not be used.

The formats are those of the kernel's `drivers/infiniband/core/sysfs.c` and of its `ABI/stable/sysfs-class-infiniband`. A tree that is
incomplete (containers, old drivers, cloud devices) or damaged gives entries with reasons, never an exception.
"""

from __future__ import annotations

import ipaddress
import os
import re
import stat
from collections.abc import Iterable
from typing import Any, Union

from ansible_collections.rankzero.inference.plugins.module_utils import small_files, sysfs

Address = Union[ipaddress.IPv4Address, ipaddress.IPv6Address]
Facts = dict[str, Any]

STATES = {0: "nop", 1: "down", 2: "init", 3: "armed", 4: "active", 5: "active_defer"}
PHYS_STATES = {1: "sleep", 2: "polling", 3: "disabled", 4: "training", 5: "link_up", 6: "link_error_recovery", 7: "phy_test"}
NODE_TYPES = {1: "ca", 2: "switch", 3: "router", 4: "rnic", 5: "usnic", 6: "usnic_udp", 7: "unspecified"}
AMAZON = 0x1D0F
EMPTY_SLOT = ":".join(["0000"] * 8)

STATE_ADVICE = {
    "down": "check the cable, the switch port and the module",
    "init": "the link is up but no subnet manager has configured it",
    "armed": "a subnet manager has begun and not finished its work",
    "active_defer": "the link had errors and may fall at any moment",
}
TRANSPORT_ADVICE = {
    "efa": "EFA is not reached through verbs: NCCL needs the aws-ofi-nccl network plugin and no NCCL_IB_ variable",
    "iwarp": "iWARP cannot carry NCCL's verbs transport; switch the card to RoCE v2 where it can",
    "soft_roce": "Soft-RoCE runs on the CPU and is slower than plain sockets",
    "unknown": "neither InfiniBand nor RoCE: link layer and node type tell no transport that NCCL can use",
}


def read(sysfs_root: str, dev_root: str, interfaces: Iterable[Facts]) -> list[Facts]:
    """All ports of all RDMA devices, in natural order of device names.

    `interfaces` is the list that `network.read` gives: it tells the prefix length behind an address, which a GID does not carry.
    Shape of an entry: `hcas` in docs/architecture.md; `rate_gbps` in Gb/s, `mtu` in bytes. `port` is null where a device shows no port.
    `usable` says whether NCCL can use the port as part of a fabric, `reasons` holds a sentence for everything that speaks against it.
    """
    known = {str(interface.get("name")): interface for interface in interfaces}
    base = os.path.join(sysfs_root, "class", "infiniband")
    verbs = verbs_devices(sysfs_root)
    devices = without_smi([read_device(os.path.join(base, name), name, verbs.get(name), dev_root) for name in small_files.names(base)])
    ports = [port for device in devices for port in read_ports(device, sysfs_root, known)]
    refuse_bonds_of_separate_hcas(ports, known)
    for port in ports:
        port["usable"] = not port["reasons"]
    return ports


# ---- the device


def verbs_devices(sysfs_root: str) -> dict[str, str]:
    """Which uverbs device opens which RDMA device: {"mlx5_0": "uverbs0"}. The numbers are not those in the device names."""
    base = os.path.join(sysfs_root, "class", "infiniband_verbs")
    found = {}
    for name in small_files.names(base):
        device = small_files.read_text(os.path.join(base, name, "ibdev"))[0]
        if device:
            found[device] = name
    return found


def read_device(path: str, name: str, uverbs: str | None, dev_root: str) -> Facts:
    """What holds for all ports of one device. `path` and `pci_path` are for the readers of the ports and do not become facts."""
    errors: dict[str, str] = {}
    link = os.path.join(path, "device")
    pci_path = sysfs.pci_directory(link)
    driver = sysfs.link_name(os.path.join(link, "driver")) or (sysfs.link_name(os.path.join(pci_path, "driver")) if pci_path else None)
    node, problem = sysfs.numa_node(pci_path)
    note(errors, "numa_node", node, problem)
    node_type = numbered(os.path.join(path, "node_type"), NODE_TYPES, errors, "node_type")
    opened, cannot_open = open_verbs(uverbs, dev_root)
    return {
        "name": name,
        "path": path,
        "pci_path": pci_path,
        "cannot_open": cannot_open,
        "has_verbs": uverbs is not None,
        "pci_bdf": os.path.basename(pci_path).lower() if pci_path else None,
        "numa_node": node,
        "driver": driver,
        "node_type": node_type,
        "uverbs": opened,
        "errors": errors,
        "is_vf": bool(pci_path) and os.path.lexists(os.path.join(pci_path or "", "physfn")),
        "node_guid": text(os.path.join(path, "node_guid"), errors, "node_guid"),
        "sys_image_guid": text(os.path.join(path, "sys_image_guid"), errors, "sys_image_guid"),
        "vendor": small_files.read_int(os.path.join(link, "vendor"))[0],
        "software": is_soft_roce(path, name),
    }


def is_soft_roce(path: str, name: str) -> bool:
    """Soft-RoCE names its Ethernet interface in `parent`; older kernels make its `device` link lead to that interface's card."""
    return name.startswith("rxe") or os.path.lexists(os.path.join(path, "parent"))


def open_verbs(uverbs: str | None, dev_root: str) -> tuple[str | None, str | None]:
    """The uverbs name if its device node can be opened, else None and the reason.

    Being listed in sysfs is no permission: a container or a device cgroup may hold back the node (NVIDIA/nccl#2428).
    """
    if uverbs is None:
        return None, "no uverbs device belongs to it: load the module ib_uverbs, or hand the device to this container"
    path = os.path.join(dev_root, "infiniband", uverbs)
    try:
        mode = os.stat(path).st_mode
        if not (stat.S_ISCHR(mode) or stat.S_ISREG(mode)):
            return None, "%s is no device node" % path
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except (OSError, ValueError) as error:
        return None, "%s cannot be opened: %s" % (path, getattr(error, "strerror", None) or error)
    return uverbs, None


def without_smi(devices: list[Facts]) -> list[Facts]:
    """Leave out the planes of a multi-plane HCA: extra devices of one PCI function that carry subnet management only.

    The kernel makes no uverbs device for them (`ib_uverbs_add_one`, type RDMA_DEVICE_TYPE_SMI), though their parent has one.
    """
    owners = {device["pci_bdf"] for device in devices if device["has_verbs"] and device["pci_bdf"]}
    return [device for device in devices if device["has_verbs"] or device["pci_bdf"] not in owners]


# ---- the port


def read_ports(device: Facts, sysfs_root: str, interfaces: dict[str, Facts]) -> list[Facts]:
    """The ports of a device; one entry without a port number where it shows none, so that the device is not passed over in silence."""
    base = os.path.join(device["path"], "ports")
    numbers = [int(name) for name in small_files.names(base) if re.match(r"^[0-9]{1,3}$", name)]
    if not numbers:
        return [empty_port(device, "no port is listed below %s" % base)]
    return [read_port(device, number, len(numbers), sysfs_root, interfaces) for number in sorted(set(numbers))]


def empty_port(device: Facts, why: str) -> Facts:
    """A port entry in which everything about the port is unknown."""
    return {
        "name": device["name"],
        "port": None,
        "pci_bdf": device["pci_bdf"],
        "numa_node": device["numa_node"],
        "driver": device["driver"],
        "link_layer": "unknown",
        "node_type": device["node_type"],
        "transport": transport(device, "unknown"),
        "state": None,
        "phys_state": None,
        "rate_gbps": None,
        "netdevs": [],
        "mtu": None,
        "is_vf": device["is_vf"],
        "uverbs": device["uverbs"],
        "lid": None,
        "sm_lid": None,
        "node_guid": device["node_guid"],
        "sys_image_guid": device["sys_image_guid"],
        "gids": [],
        "fabrics": [],
        "usable": False,
        "reasons": [why],
        "errors": dict(device["errors"], ports=why),
    }


def read_port(device: Facts, number: int, port_count: int, sysfs_root: str, interfaces: dict[str, Facts]) -> Facts:
    """One port with its GIDs, fabrics and the reasons against it."""
    path = os.path.join(device["path"], "ports", str(number))
    port = empty_port(device, "")
    errors = port["errors"] = dict(device["errors"])
    port["port"] = number
    port["link_layer"] = link_layer(text(os.path.join(path, "link_layer"), errors, "link_layer"))
    port["transport"] = transport(device, port["link_layer"])
    port["state"] = numbered(os.path.join(path, "state"), STATES, errors, "state")
    port["phys_state"] = numbered(os.path.join(path, "phys_state"), PHYS_STATES, errors, "phys_state")
    port["rate_gbps"] = parse_rate(text(os.path.join(path, "rate"), errors, "rate_gbps"))
    if port["rate_gbps"] is None:
        errors.setdefault("rate_gbps", "%s holds no rate in Gb/sec" % os.path.join(path, "rate"))
    for name in ("lid", "sm_lid"):
        port[name], problem = small_files.read_int(os.path.join(path, name))
        note(errors, name, port[name], problem)
    port["gids"] = read_gids(path, port["link_layer"], errors)
    locate_gids(port, interfaces)
    port["netdevs"] = netdevs(device, number, port_count, sysfs_root, port["gids"])
    port["mtu"] = port_mtu(port, interfaces, errors)
    port["fabrics"] = fabrics(port["transport"], port["gids"])
    port["reasons"] = reasons_against(port, device["cannot_open"], interfaces)
    return port


def transport(device: Facts, layer: str) -> str:
    """ib, roce, iwarp, efa, soft_roce or unknown. iWARP is Ethernet too, so the node type decides before the link layer."""
    if device["software"]:
        return "soft_roce"
    if device["driver"] == "efa" or (device["vendor"] == AMAZON and device["node_type"] == "unspecified"):
        return "efa"
    if device["node_type"] == "rnic":
        return "iwarp"
    if layer == "infiniband" and device["node_type"] in ("ca", None):
        return "ib"
    if layer == "ethernet" and device["node_type"] in ("ca", None):
        return "roce"
    return "unknown"


def link_layer(word: str | None) -> str:
    """The contract's word for `InfiniBand`, `Ethernet`, `Unknown` and everything else."""
    word = (word or "").lower()
    return word if word in ("infiniband", "ethernet") else "unknown"


def parse_numbered(value: str | None, words: dict[int, str]) -> str | None:
    """`4: ACTIVE` by its number; a number that is not known yet by the kernel's own word; None for anything else."""
    match = re.match(r"^([0-9]{1,3})\s*:\s*(.*)$", value or "")
    if not match:
        return None
    unnamed = re.sub(r"[^a-z0-9]+", "_", match.group(2).lower()).strip("_")
    return words.get(int(match.group(1))) or unnamed[:40] or None


def parse_rate(value: str | None) -> Union[int, float, None]:
    """Gb/s out of `400 Gb/sec (4X NDR)`. The speed word is decoration: RoCE ports print InfiniBand words, old kernels print SDR for new speeds."""
    match = re.match(r"^([0-9]{1,6}(?:\.[0-9]{1,3})?)\s*Gb/sec", value or "")
    if not match:
        return None
    rate = float(match.group(1))
    return int(rate) if rate == int(rate) else rate


def netdevs(device: Facts, number: int, port_count: int, sysfs_root: str, gids: list[Facts]) -> list[str]:
    """The network interfaces of a port: those of its PCI function first, then those that its GIDs name (a bond, VLANs)."""
    link = os.path.join(device["path"], "device", "net")
    found = small_files.names(link)
    if not found and device["pci_path"]:
        found = small_files.names(os.path.join(device["pci_path"], "net"))
    if device["software"]:
        parent = small_files.read_text(os.path.join(device["path"], "parent"))[0]
        found = [parent] if parent else []
    if port_count > 1:
        found = [name for name in found if on_port(os.path.join(sysfs_root, "class", "net", name), number)]
    return list(dict.fromkeys(found + [gid["netdev"] for gid in gids if gid["netdev"]]))


def on_port(path: str, number: int) -> bool:
    """Whether an interface belongs to this port of a two-port function; one that does not tell counts for both."""
    port = small_files.read_int(os.path.join(path, "dev_port"))[0]
    return port is None or port + 1 == number


def port_mtu(port: Facts, interfaces: dict[str, Facts], errors: dict[str, str]) -> int | None:
    """MTU of the interface behind an Ethernet port, in bytes."""
    if port["link_layer"] != "ethernet":
        errors["mtu"] = "sysfs does not tell the MTU of a port that is not Ethernet"
        return None
    for name in port["netdevs"]:
        if name in interfaces and interfaces[name].get("mtu"):
            return int(interfaces[name]["mtu"])
    errors["mtu"] = "no network interface of this port is visible here"
    return None


# ---- GIDs and fabrics


def read_gids(path: str, layer: str, errors: dict[str, str]) -> list[Facts]:
    """The filled slots of the GID table, by index.

    An empty slot reads as zeros while its type and netdev fail with EINVAL, and so does a slot of another network namespace: neither ends
    the walk, for the first filled slot may be 12 (NVIDIA/nccl#551, #1573, #1587).
    """
    found = []
    for index in slots(os.path.join(path, "gids")):
        gid, problem = small_files.read_text(os.path.join(path, "gids", str(index)))
        if gid == EMPTY_SLOT:
            continue  # mlx5 shows 256 slots for each port
        address = parse_gid(gid)
        if address is None:
            note(errors, "gids/%d" % index, None, problem or "gids/%d holds %r, which is no GID" % (index, (gid or "")[:40]))
        elif int(address) != 0:
            attributes = os.path.join(path, "gid_attrs")
            found.append(
                {
                    "index": index,
                    "gid": gid,
                    "type": small_files.read_text(os.path.join(attributes, "types", str(index)))[0] or None,
                    "netdev": small_files.read_text(os.path.join(attributes, "ndevs", str(index)))[0] or None,
                    "address": str(address.ipv4_mapped or address) if layer == "ethernet" else None,
                    "network": None,
                    "vlan": None,
                }
            )
    return found


def slots(path: str) -> list[int]:
    """The numbers of a GID table's slots; none where it cannot be listed."""
    try:
        return sorted(int(name) for name in os.listdir(path) if name.isascii() and name.isdigit() and len(name) <= 6)
    except OSError:
        return []


def parse_gid(value: str | None) -> ipaddress.IPv6Address | None:
    """A GID in the kernel's form, eight groups of four hex digits, as the IPv6 address that it is."""
    if not re.match(r"^[0-9a-fA-F]{4}(:[0-9a-fA-F]{4}){7}$", value or ""):
        return None
    return ipaddress.IPv6Address(value or "")


def routable(address: str) -> bool:
    """Whether another host can reach the address. 169.254/16 is link-local here, though NCCL takes it for a good address (uccl#1034)."""
    value = ipaddress.ip_address(address)
    return not (value.is_link_local or value.is_loopback or value.is_multicast or value.is_unspecified)


def locate_gids(port: Facts, interfaces: dict[str, Facts]) -> None:
    """Fill in network and VLAN of each address from the interface that carries it; what is not known stays null with a reason."""
    for gid in port["gids"]:
        if not gid["address"] or not routable(gid["address"]):
            continue
        owner, network = locate(ipaddress.ip_address(gid["address"]), gid["netdev"], interfaces)
        vlan_of = interfaces.get(gid["netdev"] or "") or owner or {}
        gid["network"], gid["vlan"] = network, vlan_of.get("vlan")
        if network is None and is_v2(gid):
            port["errors"]["gids/%d/network" % gid["index"]] = "no interface seen here carries %s (GID %d names %s), so its prefix length is not known" % (
                gid["address"],
                gid["index"],
                gid["netdev"] or "no interface",
            )


def locate(address: Address, netdev: str | None, interfaces: dict[str, Facts]) -> tuple[Facts | None, str | None]:
    """The interface that carries an address, the GID's own first, and the network in CIDR form. The prefix length is never guessed."""
    order = sorted(interfaces, key=lambda name: (name != netdev, small_files.natural_key(name)))
    for name in order:
        for cidr in interfaces[name].get("addresses") or []:
            try:
                candidate = ipaddress.ip_interface(cidr)
            except ValueError:
                continue
            if candidate.ip == address and "/" in cidr:
                return interfaces[name], str(candidate.network)
    return None, None


def is_v2(gid: Facts) -> bool:
    """Whether a GID entry is RoCE v2, the only type that routers and other subnets can carry."""
    return bool(gid["type"] == "RoCE v2")


def fabrics(kind: str, gids: list[Facts]) -> list[str]:
    """The fabrics that a port is in, in the order of its GIDs.

    InfiniBand: the subnet prefix of GID 0. Ports with different prefixes are in different fabrics; equal ones, above all the factory
    default fe80::, prove nothing. RoCE: the network behind every RoCE v2 entry, with its VLAN.
    """
    if kind == "ib":
        return ["ib:%s" % gid["gid"].replace(":", "").lower()[:16] for gid in gids if gid["index"] == 0]
    if kind not in ("roce", "soft_roce"):
        return []
    keys = ["roce:%s" % gid["network"] + ("" if gid["vlan"] is None else "@%d" % gid["vlan"]) for gid in gids if is_v2(gid) and gid["network"]]
    return list(dict.fromkeys(keys))


# ---- the verdict


def reasons_against(port: Facts, cannot_open: str | None, interfaces: dict[str, Facts]) -> list[str]:
    """A sentence for each thing that keeps the port out of a replica; empty when it can be used.

    Stricter than NCCL, which asks for an open device, an ACTIVE port and a link layer only (net_ib/init.cc) and then hangs on ports
    without an address.
    """
    reasons = []
    if port["transport"] in TRANSPORT_ADVICE:
        reasons.append(TRANSPORT_ADVICE[port["transport"]])
    if port["state"] != "active":
        reasons.append("the port is %s" % (port["state"] or "in an unknown state") + advice(STATE_ADVICE.get(port["state"] or "")))
    if port["phys_state"] not in ("link_up", None):
        reasons.append("the physical link is %s" % port["phys_state"])
    if cannot_open:
        reasons.append(cannot_open)
    if port["transport"] == "ib":
        reasons.extend(reasons_against_ib(port))
    elif port["transport"] == "roce":
        reasons.extend(reasons_against_roce(port, interfaces))
    return reasons


def reasons_against_ib(port: Facts) -> list[str]:
    """InfiniBand needs a LID, which a subnet manager gives, and GID 0, which holds the subnet prefix."""
    reasons = []
    if port["lid"] in (None, 0, 0xFFFF):
        reasons.append("the port has no LID: no subnet manager serves this fabric")
    if not port["fabrics"]:
        reasons.append("GID 0 is empty, so the subnet cannot be told")
    return reasons


def reasons_against_roce(port: Facts, interfaces: dict[str, Facts]) -> list[str]:
    """RoCE needs an interface that is up, and a RoCE v2 entry with an address that other hosts can reach (NVIDIA/NeMo-platform#922)."""
    reasons = []
    seen = [interfaces[name] for name in port["netdevs"] if name in interfaces]
    if not port["netdevs"]:
        reasons.append("no network interface belongs to the port: a phantom function, or its interface is in another network namespace")
    elif not seen:
        reasons.append("its network interface %s is not visible here: it is in another network namespace" % ", ".join(port["netdevs"]))
    elif not any(interface.get("up") for interface in seen):
        reasons.append("its network interface %s is down" % ", ".join(str(interface["name"]) for interface in seen))
    addressed = [gid for gid in port["gids"] if is_v2(gid) and gid["address"] and routable(gid["address"])]
    if not addressed:
        reasons.append("no RoCE v2 GID has an address that other hosts can reach: give its interface an address on the fabric")
    elif not port["fabrics"]:
        reasons.append("the networks of its addresses (%s) are not known here" % ", ".join(gid["address"] for gid in addressed))
    return reasons


def refuse_bonds_of_separate_hcas(ports: list[Facts], interfaces: dict[str, Facts]) -> None:
    """A bond that the hardware carries shows one HCA (`mlx5_bond_0`). Where a bond has several, they share its one address and are no rails.

    Only ports of one card can form a hardware LAG; a bond over two cards never does (MrBr-github/lshca#77).
    """
    members: dict[str, list[Facts]] = {}
    for port in ports:
        for bond in bonds_of(port, interfaces):
            members.setdefault(bond, []).append(port)
    for bond, group in members.items():
        if len({port["name"] for port in group}) < 2:
            continue
        cards = {card(port) for port in group}
        where = "two or more cards, which hardware cannot join" if len(cards) > 1 else "one card, and the driver has not joined them"
        for port in group:
            port["reasons"].append(
                "%s is a bond over HCAs of %s: %s share its address and are not separate rails; give each interface an address "
                "of its own instead" % (bond, where, ", ".join(dict.fromkeys(other["name"] for other in group)))
            )


def bonds_of(port: Facts, interfaces: dict[str, Facts]) -> list[str]:
    """The bonds that a port is part of: named by its GIDs, or master of its interface."""
    if port["link_layer"] != "ethernet":
        return []
    candidates = port["netdevs"] + [interfaces[name].get("master") for name in port["netdevs"] if name in interfaces]
    return [name for name in dict.fromkeys(candidates) if name in interfaces and interfaces[name].get("kind") == "bond"]


def card(port: Facts) -> str:
    """What tells one card from another: all functions of a card share the system image GUID; without it, the PCI slot."""
    guid = port["sys_image_guid"]
    if guid and guid.strip("0:"):
        return str(guid)
    return str(port["pci_bdf"] or port["name"]).rsplit(".", 1)[0]


# ---- small readers


def advice(sentence: str | None) -> str:
    return ": %s" % sentence if sentence else ""


def note(errors: dict[str, str], key: str, value: Any, problem: str | None) -> None:
    """Keep the reason of a value that is unknown."""
    if value is None:
        errors[key] = problem or "unknown"


def text(path: str, errors: dict[str, str], key: str) -> str | None:
    """A text attribute; null with a reason when it cannot be read or is empty."""
    value, problem = small_files.read_text(path)
    note(errors, key, value or None, problem or "%s is empty" % path)
    return value or None


def numbered(path: str, words: dict[int, str], errors: dict[str, str], key: str) -> str | None:
    """An attribute of the form `4: ACTIVE`; null with a reason when it is anything else."""
    value, problem = small_files.read_text(path)
    word = parse_numbered(value, words)
    note(errors, key, word, problem or "%s holds %r, not a number and a word" % (path, (value or "")[:40]))
    return word
