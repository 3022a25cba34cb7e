# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What NCCL 2.30 does with its variables, as small as it can be said; to hold the plan's values against.

Written after NCCL's sources (net_ib/init.cc, net_ib/connect.cc, misc/utils.cc, misc/param.cc, os/linux.cc), not after the collection's code,
and in other terms: a GID is a 128-bit number, a GID table is a list with a slot for every index, nothing is read from node facts.
"""

from __future__ import annotations

import ctypes
import ipaddress
import socket
from typing import NamedTuple

LIBC = ctypes.CDLL(None)
LIBC.strtoll.restype = ctypes.c_longlong
LIBC.strtoll.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int]
MAPPED = 0xFFFF << 32
LINK_LOCAL_SUBNET = 0xFE80 << 48


class Slot(NamedTuple):
    """One slot of a GID table. `version` is None where the kernel refuses to tell the type (a slot of another network namespace)."""

    gid: int = 0
    version: int | None = None


class Device(NamedTuple):
    name: str
    port: int
    active: bool = True
    layer: str = "Ethernet"


class Interface(NamedTuple):
    name: str
    addresses: tuple[str, ...]
    running: bool = True


def integer(text: str | None, default: int) -> int:
    """NCCL_PARAM: the C library's strtoll with base 0; an empty value counts as unset."""
    return LIBC.strtoll(text.encode(), None, 0) if text else default


# ---- lists of names


def token_list(text: str, most: int) -> list[tuple[str, int]]:
    tokens = []
    for entry in text.split(","):
        fields = entry.split(":")
        if fields[0] and len(tokens) < most:
            tokens.append((fields[0], LIBC.atoi(fields[1].encode()) if len(fields) > 1 and fields[1] else -1))
    return tokens


def in_list(name: str, port: int, tokens: list[tuple[str, int]], exact: bool) -> bool:
    if not tokens:
        return True
    for token, token_port in tokens:
        same = name == token if exact else name[: len(token)] == token
        if same and (port == -1 or token_port == -1 or port == token_port):
            return True
    return False


def strip_marks(text: str) -> tuple[bool, bool, str]:
    negated = text[:1] == "^"
    text = text[1:] if negated else text
    exact = text[:1] == "="
    return negated, exact, text[1:] if exact else text


def hcas(spec: str | None, devices: list[Device]) -> list[Device]:
    """The devices that NCCL opens: active, of a known link layer, in the list (NCCL_IB_HCA), 32 at most."""
    negated, exact, rest = strip_marks(spec or "")
    tokens = token_list(rest, 32)
    usable = [device for device in devices if device.active and device.layer in ("Ethernet", "InfiniBand")]
    return [device for device in usable if in_list(device.name, device.port, tokens, exact) is not negated][:32]


def interfaces(spec: str, present: list[Interface], family: str | None = None) -> list[str]:
    """The interfaces that a set NCCL_SOCKET_IFNAME selects, in the kernel's order; the bootstrap takes the first."""
    negated, exact, rest = strip_marks(spec)
    tokens = token_list(rest, 16)
    found: list[str] = []
    for interface in present:
        for address in interface.addresses:
            v6 = ":" in address
            if not interface.running or (family == "AF_INET6" and not v6) or (family == "AF_INET" and v6) or address.split("/")[0] == "::1":
                continue
            if in_list(interface.name, -1, tokens, exact) is not negated and interface.name not in found:
                found.append(interface.name)
    return found


# ---- the GID


def is_ipv4(gid: int) -> bool:
    return gid >> 32 in (0xFFFF, 0xFF0E << 80 | 0xFFFF)


def is_valid(gid: int) -> bool:
    return gid != 0 and gid != 0xFE80 << 112 and gid >> 64 != LINK_LOCAL_SUBNET


def parse_range(text: str | None, family: int) -> tuple[int, int] | None:
    """(address as a number, prefix length), or None where NCCL ignores the text."""
    if not text or "/" not in text:
        return None
    address, _slash, length_text = text.partition("/")
    try:
        packed = socket.inet_pton(family, address)
    except OSError:
        return None
    length = LIBC.atoi(length_text.encode())
    return None if length > (32 if family == socket.AF_INET else 128) else (int.from_bytes(packed, "big"), length)


def in_range(gid: int, limits: tuple[int, int] | None, family: int) -> bool:
    if limits is None or limits[1] == 0:
        return True
    bits = 32 if family == socket.AF_INET else 128
    value = gid & (1 << bits) - 1
    return limits[1] > 0 and value >> bits - limits[1] == limits[0] >> bits - limits[1]


def gid_index(table: list[Slot], env: dict[str, str]) -> int:
    """ncclIbGetGidIndex for a RoCE port."""
    forced = integer(env.get("NCCL_IB_GID_INDEX"), -1)
    if forced >= 0:
        return forced
    family = socket.AF_INET6 if env.get("NCCL_IB_ADDR_FAMILY") == "AF_INET6" else socket.AF_INET
    limits, version = parse_range(env.get("NCCL_IB_ADDR_RANGE"), family), integer(env.get("NCCL_IB_ROCE_VERSION_NUM"), 2)
    current = 0
    for number in range(1, len(table)):
        now, candidate = table[current], table[number]
        of_family = is_ipv4(candidate.gid) == (family == socket.AF_INET)
        same_family = is_ipv4(candidate.gid) == is_ipv4(now.gid)
        fits = in_range(candidate.gid, limits, family)
        if (
            not same_family
            and of_family
            and fits
            or of_family
            and fits
            and is_valid(candidate.gid)
            and candidate.version == version
            and (now.version != candidate.version or not is_valid(now.gid))
        ):
            current = number
    return current


def gid_of(address: str) -> int:
    parsed = ipaddress.ip_address(address)
    return int(parsed) | MAPPED if parsed.version == 4 else int(parsed)


def address_of(gid: int) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.IPv4Address(gid & 0xFFFFFFFF) if gid >> 32 == 0xFFFF else ipaddress.IPv6Address(gid)
