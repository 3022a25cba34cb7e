# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Network interfaces, addresses and routes of a host.

On a real host they come from the kernel by rtnetlink (rtnetlink(7)), which needs no command and tells VLANs and bonds apart. A recorded
host comes from a JSON file of what `ip` prints: `{"links": ip -j -d link, "addresses": ip -j addr, "routes": ip -j route and ip -6 -j route
in one list}`; it may add `hostname_resolves_to`. Both become one neutral form first:

    links:     [{name, up, carrier: bool|null, mtu, mac, link_type: ether|loopback|infiniband|..., info_kind: str|null, vlan, master, parent}]
    addresses: {interface name: ["10.0.0.5/24"]}
    routes:    [{destination, gateway, interface, metric}]
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ansible_collections.rankzero.inference.plugins.module_utils import small_files, sysfs

Facts = dict[str, Any]

RESOLVE_SECONDS = 2.0
MOST_ROUTES = 1000
MOST_STATE_BYTES = 64 * 1024 * 1024

# linux/netlink.h, linux/rtnetlink.h, linux/if_link.h, linux/if_addr.h
NLMSG_ERROR, NLMSG_DONE, NLM_F_REQUEST, NLM_F_DUMP, NLM_F_DUMP_INTR = 2, 3, 0x1, 0x300, 0x10
RTM_NEWLINK, RTM_GETLINK, RTM_NEWADDR, RTM_GETADDR, RTM_NEWROUTE, RTM_GETROUTE = 16, 18, 20, 22, 24, 26
IFLA_ADDRESS, IFLA_IFNAME, IFLA_MTU, IFLA_MASTER, IFLA_LINKINFO, IFLA_PARENT_DEV_NAME, IFLA_PARENT_DEV_BUS_NAME = 1, 3, 4, 10, 18, 56, 57
IFLA_INFO_KIND, IFLA_INFO_DATA, IFLA_VLAN_ID = 1, 2, 1
IFA_ADDRESS, IFA_LOCAL, IFA_FLAGS, IFA_F_DADFAILED, IFA_F_TENTATIVE = 1, 2, 8, 0x08, 0x40
RTA_DST, RTA_OIF, RTA_GATEWAY, RTA_PRIORITY, RTA_MULTIPATH, RTA_TABLE, RTA_VIA = 1, 4, 5, 6, 9, 15, 18
RTN_UNICAST, RT_TABLE_MAIN, RTM_F_CLONED = 1, 254, 0x200
IFF_UP, IFF_LOWER_UP = 0x1, 0x10000
LINK_TYPES = {1: "ether", 32: "infiniband", 772: "loopback", 65534: "none"}


def read(sysfs_root: str, network_state: str | None = None) -> Facts:
    """`{interfaces, routes, default_route, hostname_resolves_to, errors: {}}` in the shapes of docs/architecture.md.

    `network_state` is the path of a recorded host. Whatever cannot be read leaves an empty list or null, and a reason in `errors`.
    """
    errors: dict[str, str] = {}
    recorded: Facts = {}
    try:
        if network_state:
            recorded = load_state(network_state)
            links, addresses, routes = from_ip_json(recorded)
        else:
            links, addresses, routes = from_kernel()
    except (OSError, ValueError) as error:
        errors["network"] = "interfaces and routes are not known: %s" % error
        links, addresses, routes = [], {}, []
    if len(routes) > MOST_ROUTES:
        errors["routes"] = "%d of %d routes are listed" % (MOST_ROUTES, len(routes))
    resolved = recorded.get("hostname_resolves_to") if recorded else None
    if not isinstance(resolved, list):
        resolved, problem = resolve(socket.gethostname())
        if problem:
            errors["hostname_resolves_to"] = problem
    return {
        "interfaces": [describe_interface(link, addresses.get(link["name"], []), sysfs_root) for link in links],
        "routes": routes[:MOST_ROUTES],
        "default_route": default_route(routes),
        "hostname_resolves_to": [str(address) for address in resolved],
        "errors": errors,
    }


# ---- the neutral form into facts


def describe_interface(link: Facts, addresses: list[str], sysfs_root: str) -> Facts:
    """One entry of `interfaces`; `speed_mbps` in Mbit/s, null where the driver does not tell."""
    path = os.path.join(sysfs_root, "class", "net", link["name"])
    pci_path = sysfs.pci_directory(os.path.join(path, "device"))
    speed = small_files.read_int(os.path.join(path, "speed"))[0]
    return {
        "name": link["name"],
        "kind": kind_of(link, path),
        "up": link["up"],
        "carrier": link["carrier"],
        "mtu": link["mtu"],
        "mac": link["mac"],
        "addresses": addresses,
        "vlan": link["vlan"],
        "master": link["master"],
        # Drivers print -1, or that as an unsigned number, for an unknown speed.
        "speed_mbps": speed if speed is not None and 0 < speed < 2**31 - 1 else None,
        "is_vf": pci_path is not None and os.path.lexists(os.path.join(pci_path, "physfn")),
        "pci_bdf": os.path.basename(pci_path).lower() if pci_path else link["parent"],
    }


def kind_of(link: Facts, path: str) -> str:
    """physical, loopback, bond, vlan, bridge, veth, ipoib or virtual. What the kernel calls the link counts; names never do."""
    if link["link_type"] == "loopback":
        return "loopback"
    if link["info_kind"] == "ipoib" or link["link_type"] == "infiniband":
        return "ipoib"
    if link["info_kind"] in ("bond", "vlan", "bridge", "veth"):
        return str(link["info_kind"])
    if link["info_kind"]:
        return "virtual"
    if os.path.exists(os.path.join(path, "device")) or link["parent"]:
        return "physical"
    return "virtual" if "/devices/virtual/" in os.path.realpath(path) else "physical"


def default_route(routes: list[Facts]) -> Facts | None:
    """`{interface, gateway}` of the default route with the lowest metric, IPv4 before IPv6; null on an air-gapped host."""
    for everywhere in ("0.0.0.0/0", "::/0"):
        candidates = sorted((route for route in routes if route["destination"] == everywhere), key=lambda route: route["metric"])
        if candidates:
            return {"interface": candidates[0]["interface"], "gateway": candidates[0]["gateway"]}
    return None


def resolve(hostname: str, seconds: float = RESOLVE_SECONDS, lookup: Callable[..., Any] = socket.getaddrinfo) -> tuple[list[str], str | None]:
    """The addresses that the host's own name stands for, as gloo would see them; 127.0.1.1 here makes remote ranks fail (vllm#7074).

    A dead name server would hold the reader for many seconds, so the lookup is given up after `seconds`.
    """
    answer: list[Any] = []

    def ask() -> None:
        try:
            answer.append(lookup(hostname, None, 0, socket.SOCK_STREAM))
        except (OSError, ValueError) as error:
            answer.append("the hostname %s does not resolve: %s" % (hostname, getattr(error, "strerror", None) or error))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    if not answer:
        return [], "looking up the hostname %s took more than %g seconds" % (hostname, seconds)
    if isinstance(answer[0], str):
        return [], answer[0]
    return list(dict.fromkeys(str(entry[4][0]) for entry in answer[0])), None


# ---- recorded hosts: the JSON of iproute2


def load_state(path: str) -> Facts:
    """The recorded state as a mapping. Raises ValueError with a sentence when the file is missing or is no such JSON."""
    state, problem = small_files.read_json(path, MOST_STATE_BYTES)
    if state is None:
        raise ValueError(problem)
    return state


def from_ip_json(state: Facts) -> tuple[list[Facts], dict[str, list[str]], list[Facts]]:
    """Recorded output of `ip -j` in the neutral form. Entries that are not understood are left out."""
    links = [link_from_json(entry) for entry in mappings(state.get("links")) if isinstance(entry.get("ifname"), str)]
    addresses: dict[str, list[str]] = {}
    for entry in mappings(state.get("addresses")):
        found = [address_from_json(info) for info in mappings(entry.get("addr_info"))]
        addresses.setdefault(str(entry.get("ifname")), []).extend(cidr for cidr in found if cidr)
    routes = [route for entry in mappings(state.get("routes")) for route in routes_from_json(entry)]
    return links, addresses, routes


def link_from_json(entry: Facts) -> Facts:
    flags = [flag for flag in listed(entry.get("flags")) if isinstance(flag, str)]
    info = mapping(entry.get("linkinfo"))
    up = "UP" in flags
    return {
        "name": small_files.clean(entry["ifname"]),
        "up": up,
        "carrier": ("LOWER_UP" in flags) if up else None,
        "mtu": whole(entry.get("mtu")),
        "mac": word(entry.get("address")),
        "link_type": word(entry.get("link_type")) or "ether",
        "info_kind": word(info.get("info_kind")),
        "vlan": whole(mapping(info.get("info_data")).get("id")) if info.get("info_kind") == "vlan" else None,
        "master": word(entry.get("master")),
        "parent": word(entry.get("parentdev")) if entry.get("parentbus") == "pci" else None,
    }


def address_from_json(info: Facts) -> str | None:
    if info.get("dadfailed") or info.get("tentative"):
        return None
    return cidr_of(word(info.get("local")) or "", whole(info.get("prefixlen")))


def routes_from_json(entry: Facts) -> list[Facts]:
    """One entry per next hop of a unicast route; `dst` is `default`, a network, or a single address."""
    hops = mappings(entry.get("nexthops")) or [entry]
    gateways = [gateway_from_json(hop) for hop in hops]
    destination = network_of(entry.get("dst"))
    if entry.get("dst") == "default":
        # iproute2 prints the router preference with IPv6 routes only.
        v6 = "pref" in entry or any(":" in gateway for gateway in gateways if gateway)
        destination = "::/0" if v6 else "0.0.0.0/0"
    if destination is None or entry.get("type", "unicast") != "unicast":
        return []
    return [
        {"destination": destination, "gateway": gateway, "interface": hop["dev"], "metric": whole(entry.get("metric")) or 0}
        for hop, gateway in zip(hops, gateways)
        if isinstance(hop.get("dev"), str)
    ]


def gateway_from_json(hop: Facts) -> str | None:
    """The gateway of a next hop; `via` holds one of another address family."""
    return word(hop.get("gateway")) or word(mapping(hop.get("via")).get("host"))


def mappings(value: Any) -> list[Facts]:
    return [entry for entry in listed(value) if isinstance(entry, dict)]


def mapping(value: Any) -> Facts:
    return value if isinstance(value, dict) else {}


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def word(value: Any) -> str | None:
    return small_files.clean(value) or None if isinstance(value, str) else None


def whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def cidr_of(address: str, prefix: int | None) -> str | None:
    """`10.0.0.5/24`, or None for what is no address with a prefix length."""
    try:
        return str(ipaddress.ip_interface("%s/%d" % (address, prefix))) if prefix is not None else None
    except ValueError:
        return None


def network_of(value: Any) -> str | None:
    """`10.0.0.0/24` for a network or a single address."""
    try:
        return str(ipaddress.ip_network(value, strict=False)) if isinstance(value, str) else None
    except ValueError:
        return None


# ---- real hosts: rtnetlink


def from_kernel() -> tuple[list[Facts], dict[str, list[str]], list[Facts]]:
    """Links, addresses and routes of this network namespace in the neutral form. Raises OSError or ValueError."""
    links = parse_links(dump(RTM_GETLINK))
    index_names = {index: link["name"] for index, link in links}
    for link in (link for _index, link in links):
        link["master"] = index_names.get(link["master"])
    addresses: dict[str, list[str]] = {}
    for index, cidr in parse_addresses(dump(RTM_GETADDR)):
        addresses.setdefault(index_names.get(index, ""), []).append(cidr)
    routes = [dict(route, interface=index_names[route["interface"]]) for route in parse_routes(dump(RTM_GETROUTE)) if route["interface"] in index_names]
    return [link for _index, link in links], addresses, routes


def dump(request: int, attempts: int = 3) -> list[tuple[int, bytes]]:
    """All answers of a dump, once more when the kernel says that the table changed meanwhile. Raises OSError."""
    for _attempt in range(attempts):
        messages, interrupted = dump_once(request)
        if not interrupted:
            break
    return messages


def dump_once(request: int) -> tuple[list[tuple[int, bytes]], bool]:
    """`[(message type, payload)]` and whether the dump was interrupted by a change."""
    messages: list[tuple[int, bytes]] = []
    interrupted = False
    payload = struct.pack("=BxHiII", socket.AF_UNSPEC, 0, 0, 0, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
        kernel.settimeout(5.0)
        kernel.bind((0, 0))
        kernel.send(struct.pack("=IHHII", 16 + len(payload), request, NLM_F_REQUEST | NLM_F_DUMP, 1, 0) + payload)
        while True:
            for kind, flags, body in split_messages(kernel.recv(1 << 17)):
                interrupted = interrupted or bool(flags & NLM_F_DUMP_INTR)
                if kind == NLMSG_ERROR:
                    code = -struct.unpack_from("=i", body)[0] if len(body) >= 4 else 5
                    raise OSError(code, os.strerror(code))
                if kind == NLMSG_DONE:
                    return messages, interrupted
                messages.append((kind, body))


def split_messages(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """`(type, flags, payload)` of each message in a datagram; a damaged length ends the walk."""
    offset = 0
    while offset + 16 <= len(data):
        length, kind, flags = struct.unpack_from("=IHH", data, offset)
        if length < 16 or offset + length > len(data):
            return
        yield kind, flags, data[offset + 16 : offset + length]
        offset += (length + 3) & ~3


def attributes(data: bytes) -> dict[int, bytes]:
    """The attributes of a message by number; a damaged length ends the walk."""
    found = {}
    offset = 0
    while offset + 4 <= len(data):
        length, kind = struct.unpack_from("=HH", data, offset)
        if length < 4 or offset + length > len(data):
            break
        found[kind & 0x3FFF] = data[offset + 4 : offset + length]
        offset += (length + 3) & ~3
    return found


def number(value: bytes | None) -> int | None:
    """An attribute that is a number of 1, 2 or 4 bytes in the byte order of the machine."""
    formats = {1: "=B", 2: "=H", 4: "=I"}
    return int(struct.unpack(formats[len(value)], value)[0]) if value and len(value) in formats else None


def string(value: bytes | None) -> str | None:
    return small_files.clean((value or b"").split(b"\0")[0].decode("utf-8", "replace")) or None


def address_text(value: bytes | None) -> str | None:
    return str(ipaddress.ip_address(value)) if value and len(value) in (4, 16) else None


def parse_links(messages: list[tuple[int, bytes]]) -> list[tuple[int, Facts]]:
    """`[(interface index, link)]`; `master` is still an index."""
    found = []
    for kind, body in messages:
        if kind != RTM_NEWLINK or len(body) < 16:
            continue
        _family, hardware, index, flags = struct.unpack_from("=BxHiI", body)
        values = attributes(body[16:])
        info = attributes(values.get(IFLA_LINKINFO, b""))
        info_kind = string(info.get(IFLA_INFO_KIND))
        up = bool(flags & IFF_UP)
        found.append(
            (
                index,
                {
                    "name": string(values.get(IFLA_IFNAME)) or "if%d" % index,
                    "up": up,
                    "carrier": bool(flags & IFF_LOWER_UP) if up else None,
                    "mtu": number(values.get(IFLA_MTU)),
                    "mac": values[IFLA_ADDRESS].hex(":") if values.get(IFLA_ADDRESS) else None,
                    "link_type": LINK_TYPES.get(hardware, "type%d" % hardware),
                    "info_kind": info_kind,
                    "vlan": number(attributes(info.get(IFLA_INFO_DATA, b"")).get(IFLA_VLAN_ID)) if info_kind == "vlan" else None,
                    "master": number(values.get(IFLA_MASTER)),
                    "parent": string(values.get(IFLA_PARENT_DEV_NAME)) if string(values.get(IFLA_PARENT_DEV_BUS_NAME)) == "pci" else None,
                },
            )
        )
    return found


def parse_addresses(messages: list[tuple[int, bytes]]) -> list[tuple[int, str]]:
    """`[(interface index, "10.0.0.5/24")]`, without addresses that duplicate detection has not passed."""
    found = []
    for kind, body in messages:
        if kind != RTM_NEWADDR or len(body) < 8:
            continue
        _family, prefix, short_flags, _scope, index = struct.unpack_from("=BBBBI", body)
        values = attributes(body[8:])
        flags = number(values.get(IFA_FLAGS))
        if (short_flags if flags is None else flags) & (IFA_F_TENTATIVE | IFA_F_DADFAILED):
            continue
        cidr = cidr_of(address_text(values.get(IFA_LOCAL) or values.get(IFA_ADDRESS)) or "", prefix)
        if cidr:
            found.append((index, cidr))
    return found


def parse_routes(messages: list[tuple[int, bytes]]) -> list[Facts]:
    """Unicast routes of the main table, one per next hop; `interface` is still an index."""
    found: list[Facts] = []
    for kind, body in messages:
        if kind != RTM_NEWROUTE or len(body) < 12:
            continue
        family, prefix, _source, _tos, table, _protocol, _scope, route_type, flags = struct.unpack_from("=BBBBBBBBI", body)
        values = attributes(body[12:])
        table = number(values.get(RTA_TABLE)) or table
        if route_type != RTN_UNICAST or table != RT_TABLE_MAIN or flags & RTM_F_CLONED or family not in (socket.AF_INET, socket.AF_INET6):
            continue
        anywhere = "0.0.0.0" if family == socket.AF_INET else "::"
        destination = network_of("%s/%d" % (address_text(values.get(RTA_DST)) or anywhere, prefix))
        for interface, gateway in next_hops(values):
            if destination and interface is not None:
                found.append({"destination": destination, "gateway": gateway, "interface": interface, "metric": number(values.get(RTA_PRIORITY)) or 0})
    return found


def next_hops(values: dict[int, bytes]) -> list[tuple[int | None, str | None]]:
    """`[(interface index, gateway)]` of a route: its own, or those of its multipath list."""
    hops = []
    data = values.get(RTA_MULTIPATH, b"")
    while len(data) >= 8:
        length, _flags, _weight, index = struct.unpack_from("=HBBi", data)
        if length < 8 or length > len(data):
            break
        hops.append((index, gateway_of(attributes(data[8:length]))))
        data = data[(length + 3) & ~3 :]
    return hops or [(number(values.get(RTA_OIF)), gateway_of(values))]


def gateway_of(values: dict[int, bytes]) -> str | None:
    """The gateway; RTA_VIA carries one of another address family than the route's, with two bytes of family before it."""
    return address_text(values.get(RTA_GATEWAY)) or address_text(values.get(RTA_VIA, b"")[2:])
