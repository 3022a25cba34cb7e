# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How NCCL reads its own variables, and which values do something else than they say.

NCCL takes a wrong value in silence: an unknown name is ignored, text where a number belongs counts as 0, C(mlx5_1) means C(mlx5_10) too, and
an address range without a prefix length is no range. What a profile sets and what C(nccl.conf) adds is therefore read here as NCCL 2.30
reads it (C(net_ib/init.cc), C(net_ib/connect.cc), C(misc/param.cc), C(os/linux.cc)) and compared with what was planned.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
import typing as t

from ansible_collections.rankzero.inference.plugins.plugin_utils.environment_names import refusal
from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Findings
from ansible_collections.rankzero.inference.plugins.plugin_utils.values import nearest

Port = t.Mapping[str, t.Any]
Network = t.Union[ipaddress.IPv4Network, ipaddress.IPv6Network]

MOST_PORTS = 32  # MAX_IB_DEVS: entries and devices beyond are dropped
MOST_INTERFACES = 16  # MAX_IFS

# Variables that NCCL reads with strtoll (NCCL_PARAM in 2.30.7), without the prefix.
_NUMBERS = frozenset(
    [
        "ALLGATHERV_ENABLE",
        "ALLOC_P2P_NET_LL_BUFFERS",
        "BUFFSIZE",
        "CGA_CLUSTER_SIZE",
        "CHECK_POINTERS",
        "CHUNK_SIZE",
        "COLLNET_ENABLE",
        "COLLNET_NODE_THRESHOLD",
        "COMM_BLOCKING",
        "COMM_SHRINK_SHARE_RESOURCES",
        "COMM_SPLIT_SHARE_RESOURCES",
        "CONNECT_ROUND_MAX_PEERS",
        "CROSS_NIC",
        "CUMEM_ENABLE",
        "CUMEM_HOST_ENABLE",
        "DEV_API_JIT",
        "DISABLE_MEM_MANAGER",
        "DMABUF_ENABLE",
        "ELASTIC_BUFFER_REGISTER",
        "ENABLE_VERSION_CHECK",
        "GDAKI_USE_RELIABLE_DB",
        "GDRCOPY_ENABLE",
        "GDRCOPY_FIFO_ENABLE",
        "GDRCOPY_FLUSH_ENABLE",
        "GDRCOPY_SYNC_ENABLE",
        "GDR_FLUSH_DISABLE",
        "GRAPH_DUMP_FILE_RANK",
        "GRAPH_HELPER_DISABLE",
        "GRAPH_MIXING_SUPPORT",
        "GRAPH_REGISTER",
        "GRAPH_STREAM_ORDERING",
        "GROUP_CUDA_STREAM",
        "IB_ADAPTIVE_ROUTING",
        "IB_AR_THRESHOLD",
        "IB_DATA_DIRECT",
        "IB_DEVICE_PCI_ORDER",
        "IB_DISABLE",
        "IB_ECE_ENABLE",
        "IB_FIFO_TC",
        "IB_GID_INDEX",
        "IB_MERGE_NICS",
        "IB_MERGE_VFS",
        "IB_MQP_RETRY_ALL",
        "IB_MQP_RETRY_CNT",
        "IB_MQP_RETRY_SLEEP_MSEC",
        "IB_OOO_RQ",
        "IB_PCI_RELAXED_ORDERING",
        "IB_PKEY",
        "IB_PREPOST_RECEIVE_WORK_REQUESTS",
        "IB_QPS_PER_CONNECTION",
        "IB_QUERY_PORT_SPEED",
        "IB_RECEIVER_SIDE_MATCHING_SCHEME",
        "IB_RETRY_CNT",
        "IB_RETURN_ASYNC_EVENTS",
        "IB_ROCE_VERSION_NUM",
        "IB_ROUTABLE_FLID_GID_INDEX",
        "IB_SL",
        "IB_SPLIT_DATA_ON_QPS",
        "IB_SUBNET_AWARE_ROUTING",
        "IB_SUBNET_PREFIX_LEN",
        "IB_TC",
        "IB_TIMEOUT",
        "IB_USE_INLINE",
        "IB_WARN_RAIL_LOCAL",
        "IGNORE_COLLNET_MISMATCH",
        "IGNORE_CPU_AFFINITY",
        "IGNORE_DISABLED_P2P",
        "IGNORE_NET_MISMATCH",
        "IPC_USE_ABSTRACT_SOCKET",
        "L1_SHARED_MEMORY_CARVEOUT",
        "LAUNCH_ORDER_IMPLICIT",
        "LAUNCH_RACE_FATAL",
        "LEGACY_CUDA_REGISTER",
        "LL128_BUFFSIZE",
        "LL128_C2C",
        "LL128_NTHREADS",
        "LL_BUFFSIZE",
        "LOCAL_REGISTER",
        "LSA_TEAM_SIZE",
        "MAX_CTAS",
        "MAX_NCHANNELS",
        "MAX_NRINGS",
        "MAX_P2P_NCHANNELS",
        "MEM_SYNC_DOMAIN",
        "MIN_CTAS",
        "MIN_NCHANNELS",
        "MIN_NRINGS",
        "MIN_P2P_NCHANNELS",
        "MLOPART_RDMA_ENABLE",
        "MNNVL_CLIQUE_ID",
        "MNNVL_CROSS_CLIQUE",
        "MNNVL_ENABLE",
        "MNNVL_RAIL_PER_HOST",
        "MNNVL_SCATTER_NETS_ENABLE",
        "MNNVL_UUID",
        "MULTI_RANK_GPU_ENABLE",
        "MULTI_SEGMENT_REGISTER",
        "NCHANNELS_PER_NET_PEER",
        "NET_DISABLE_INTRA",
        "NET_FORCE_FLUSH",
        "NET_GDR_C2C",
        "NET_GDR_MLOPART",
        "NET_GDR_READ",
        "NET_OPTIONAL_RECV_COMPLETION",
        "NET_OVERHEAD",
        "NET_SHARED_BUFFERS",
        "NET_SHARED_COMMS",
        "NSOCKS_PERTHREAD",
        "NTHREADS",
        "NUM_RMA_CTX",
        "NVB_DISABLE",
        "NVB_PRECONNECT",
        "NVLINK_UTIL_CENTRIC_SCHED_ENABLE",
        "NVLSTREE_MAX_CHUNKSIZE",
        "NVLS_CHUNKSIZE",
        "NVLS_ENABLE",
        "NVLS_NCHANNELS",
        "NVTX_DISABLE",
        "OOB_NET_ENABLE",
        "P2P_DIRECT_DISABLE",
        "P2P_DISABLE",
        "P2P_EPOCH_ENABLE",
        "P2P_LL_THRESHOLD",
        "P2P_MAX_PEERS",
        "P2P_NET_CHUNKSIZE",
        "P2P_NVL_CHUNKSIZE",
        "P2P_PCI_CHUNKSIZE",
        "P2P_PER_CHANNEL_NET_BW",
        "P2P_PXN_LEVEL",
        "P2P_READ_ENABLE",
        "P2P_SCHEDULE_GROUP_SIZE",
        "P2P_USE_CUDA_MEMCPY",
        "PAT_ENABLE",
        "PROGRESS_APPENDOP_FREQ",
        "PROXY_APPEND_BATCH_SIZE",
        "PROXY_DUMP_SIGNAL",
        "PXN_C2C",
        "PXN_DISABLE",
        "RAS_ENABLE",
        "RAS_TIMEOUT_FACTOR",
        "REPORT_CONNECT_PROGRESS",
        "RMA_DISABLE",
        "RMA_PROXY_DUMP_SIGNAL",
        "RMA_PROXY_QUEUE_SIZE",
        "RUNTIME_CONNECT",
        "SET_CPU_STACK_SIZE",
        "SET_STACK_SIZE",
        "SHADOW_MEMPOOL_MAX_SIZE",
        "SHM_DISABLE",
        "SHM_LOCALITY",
        "SINGLE_PROC_MEM_REG_ENABLE",
        "SOCKET_INLINE",
        "SOCKET_MIN_TASKSIZE",
        "SOCKET_NTHREADS",
        "SOCKET_POLL_TIMEOUT_MSEC",
        "SOCKET_RCVBUF",
        "SOCKET_RETRY_CNT",
        "SOCKET_RETRY_SLEEP_MSEC",
        "SOCKET_SNDBUF",
        "SYM_CE_THRESHOLD",
        "SYM_CTAS",
        "SYM_GIN_KERNELS_ENABLE",
        "SYM_NOWIN_ENABLE",
        "SYM_REUSE_SYSMEM_HANDLES",
        "SYM_RS_GIN_CHUNK_SIZE",
        "SYM_TMA_ENABLE",
        "TOPO_DUMP_FILE_RANK",
        "TOPO_SPLIT_MLOPART",
        "UID_STAGGER_RATE",
        "UID_STAGGER_THRESHOLD",
        "UNPACK_DOUBLE_NCHANNELS",
        "WIN_ENABLE",
        "WIN_STRIDE",
        "WORK_ARGS_BYTES",
        "WORK_FIFO_BYTES",
    ]
)

_TEXTS = frozenset(
    [
        "ALGO",
        "CHECKPOINT_KVS_PATH",
        "CHECKS_DISABLE",
        "CHECK_MODE",
        "COMM_ID",
        "CONF_FILE",
        "CTA_POLICY",
        "DEBUG",
        "DEBUG_FILE",
        "DEBUG_SUBSYS",
        "DEBUG_TIMESTAMP_FORMAT",
        "DEBUG_TIMESTAMP_LEVELS",
        "ENV_PLUGIN",
        "GIN_PLUGIN",
        "GRAPH_DUMP_FILE",
        "GRAPH_FILE",
        "HOSTID",
        "IBVERBS_LIB",
        "IB_ADDR_FAMILY",
        "IB_ADDR_RANGE",
        "IB_CUDA_SUPPORT",
        "IB_HCA",
        "IB_PKEY_VALUE",
        "IB_RAIL_POLICY",
        "LAUNCH_MODE",
        "LL_THRESHOLD",
        "NET",
        "NETDEVS_POLICY",
        "NET_FORCE_MERGE",
        "NET_GDR_LEVEL",
        "NET_MERGE_LEVEL",
        "NET_MERGE_POLICY",
        "NET_PLUGIN",
        "OOB_NET_IFNAME",
        "P2P_LEVEL",
        "PROFILER_PLUGIN",
        "PROTO",
        "PROXY_CPUSET",
        "RAS_ADDR",
        "RMA_PLUGIN",
        "SET_THREAD_NAME",
        "SINGLE_RING_THRESHOLD",
        "SOCKET_FAMILY",
        "SOCKET_IFNAME",
        "SOCKET_MAGIC",
        "SYM_KERNEL",
        "THREAD_THRESHOLDS",
        "TOPO_DUMP_FILE",
        "TOPO_FILE",
        "TREE_THRESHOLD",
        "TUNER_CONFIG_FILE",
        "TUNER_PLUGIN",
    ]
)

# Families of names that belong to NCCL's own add-ons or to a network plugin; their members are not listed one by one.
_FAMILIES = (
    "NCCL_IB_RESILIENCY_",
    "NCCL_GIN_",
    "NCCL_RESHARD_",
    "NCCL_INSPECTOR_",
    "NCCL_PROFILE_",
    "NCCL_PROFILER_",
    "NCCL_EP_",
    "NCCL_NET_PLUGIN_",
    "NCCL_RMA_PLUGIN_",
    "NCCL_OFI_",
    "NCCL_FASTRAK_",
    "NCCL_GPUDIRECTTCPX_",
    "NCCL_UCX_",
    "NCCL_SHARP_",
)

_OBSOLETE = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
    "NCCL_ENABLE_TIMING": "TORCH_NCCL_ENABLE_TIMING",
    "NCCL_LL_THRESHOLD": "NCCL_PROTO",
    "NCCL_TREE_THRESHOLD": "NCCL_ALGO",
    "NCCL_MAX_NRINGS": "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NRINGS": "NCCL_MIN_NCHANNELS",
    "NCCL_IB_CUDA_SUPPORT": "NCCL_NET_GDR_LEVEL",
}

NAMES = frozenset("NCCL_" + name for name in _NUMBERS | _TEXTS)

# Not worth a word when a host's nccl.conf sets them: they change what is logged.
_QUIET = ("NCCL_DEBUG", "NCCL_REPORT_CONNECT_PROGRESS", "NCCL_SET_THREAD_NAME")

_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)\Z")
_LEADING_NUMBER = re.compile(r"\s*([+-]?)(?:0[xX]([0-9a-fA-F]+)|(0[0-7]*)|([1-9][0-9]*))")


# ---- NCCL's own reading


def number(text: str) -> int:
    """What C(strtoll(text, NULL, 0)) gives: C(auto) is 0, C(3,4) is 3, C(010) is 8 (misc/param.cc)."""
    match = _LEADING_NUMBER.match(text)
    if not match:
        return 0
    sign, base_16, base_8, base_10 = match.groups()
    value = int(base_16, 16) if base_16 else int(base_8, 8) if base_8 else int(base_10)
    return -value if sign == "-" else value


def entries(spec: str, most: int) -> tuple[bool, bool, list[tuple[str, int]]]:
    """C(^=a:1,b) as (exclude, exact, [(name, port or -1)]): C(^), then C(=), once before the whole list; nothing is trimmed."""
    exclude = spec.startswith("^")
    spec = spec[1:] if exclude else spec
    exact = spec.startswith("=")
    spec = spec[1:] if exact else spec
    found = []
    for entry in spec.split(","):
        name, _colon, rest = entry.partition(":")
        port = rest.partition(":")[0]
        if name:
            found.append((name, decimal(port) if port else -1))
    return exclude, exact, found[:most]


def decimal(text: str) -> int:
    """What C(atoi(text)) gives."""
    match = re.match(r"\s*[+-]?[0-9]+", text)
    return int(match.group()) if match else 0


def matches(name: str, port: int, spec: str, most: int) -> bool:
    """Whether C(NCCL_IB_HCA) or C(NCCL_SOCKET_IFNAME) of this value takes a device. An empty list takes all."""
    exclude, exact, wanted = entries(spec, most)

    def fits(entry: tuple[str, int]) -> bool:
        return (name == entry[0] if exact else name.startswith(entry[0])) and (-1 in (port, entry[1]) or port == entry[1])

    return (not wanted or any(map(fits, wanted))) != exclude


def selected_ports(spec: str, ports: t.Iterable[Port]) -> list[Port]:
    """The ports that NCCL takes under C(NCCL_IB_HCA=spec): it asks for an active port with a link layer, and not whether it can reach anybody."""
    active = [
        port
        for port in ports
        if str(port.get("state") or "active").lower() == "active" and port.get("port") is not None and port.get("link_layer") in ("infiniband", "ethernet")
    ]
    return [port for port in active if matches(str(port.get("name")), int(port["port"]), spec, MOST_PORTS)]


def selected_interfaces(spec: str, interfaces: t.Iterable[t.Mapping[str, t.Any]], ipv6: bool | None = None) -> list[str]:
    """The interfaces that NCCL takes under C(NCCL_SOCKET_IFNAME=spec): those that run and carry an address (of the family, where one is forced)."""
    found = []
    for interface in interfaces:
        versions = {"6" if ":" in str(text) else "4" for text in interface.get("addresses") or () if str(text).partition("/")[0] != "::1"}
        running = interface.get("up") and interface.get("carrier") is not False
        if running and versions & ({"4", "6"} if ipv6 is None else {"6" if ipv6 else "4"}) and matches(str(interface.get("name")), -1, spec, MOST_INTERFACES):
            found.append(str(interface.get("name")))
    return found


def automatic_gid(gids: t.Iterable[t.Mapping[str, t.Any]], ipv6: bool = False, within: Network | None = None, version: int = 2) -> int:
    """The index that NCCL 2.21 and newer takes on a RoCE port when C(NCCL_IB_GID_INDEX) is -1 (net_ib/connect.cc, C(ncclIbGetGidIndex)).

    The walk begins with entry 0 as the current one, whatever it is. Only candidates are held against the range, so an entry 0 that is
    RoCE v2 of the wanted family stays even when it is outside of the range. The first candidate of the wanted family replaces a current
    entry of the other family without being looked at any further; an empty slot counts as IPv6 there.
    """
    table = {int(entry["index"]): entry for entry in gids}
    current, family = 0, 6 if ipv6 else 4
    for index in range(1, max(table, default=0) + 2):  # one empty slot is always left behind the last entry
        now, candidate = table.get(current), table.get(index)
        if _address(candidate).version != family or (within is not None and _address(candidate) not in within):
            continue
        better = _valid(candidate) and _version(candidate) == version and (_version(now) != version or not _valid(now))
        if better or _address(now).version != family:
            current = index
    return current


def _address(entry: t.Mapping[str, t.Any] | None) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """IPv4 for an IPv4-mapped entry, C(::) for an empty slot."""
    for text in ((entry or {}).get("address"), (entry or {}).get("gid")):
        try:
            address = ipaddress.ip_address(str(text))
        except ValueError:
            continue
        return (address.ipv4_mapped or address) if isinstance(address, ipaddress.IPv6Address) else address
    return ipaddress.IPv6Address(0)


def _valid(entry: t.Mapping[str, t.Any] | None) -> bool:
    """NCCL's validGid: neither empty nor fe80::/64. 169.254.x.x passes (uccl#1034)."""
    address = _address(entry)
    return isinstance(address, ipaddress.IPv4Address) or (int(address) != 0 and int(address) >> 64 != 0xFE80 << 48)


def _version(entry: t.Mapping[str, t.Any] | None) -> int | None:
    return {"RoCE v2": 2, "IB/RoCE v1": 1}.get(str((entry or {}).get("type")))


def address_range(values: t.Mapping[str, str]) -> Network | None:
    """The range of C(NCCL_IB_ADDR_RANGE), or None where NCCL ignores the value: no C(/), no address, or one of the other family."""
    text = values.get("NCCL_IB_ADDR_RANGE") or ""
    address, slash, length = text.partition("/")
    try:
        network = ipaddress.ip_network("%s/%d" % (address, decimal(length)), strict=False) if slash else None
    except ValueError:
        return None
    return network if network is not None and (network.version == 6) == wants_ipv6(values) else None


def wants_ipv6(values: t.Mapping[str, str]) -> bool:
    return values.get("NCCL_IB_ADDR_FAMILY") == "AF_INET6"


def gid_index(port: Port, values: t.Mapping[str, str]) -> int | None:
    """The GID index that NCCL 2.30 uses on a port under these variables; None on InfiniBand, where it asks none of them."""
    if port.get("link_layer") != "ethernet":
        return None
    text = values.get("NCCL_IB_GID_INDEX") or ""
    index = number(text) if text else -1
    if index >= 0:
        return index
    version = values.get("NCCL_IB_ROCE_VERSION_NUM")
    return automatic_gid(port.get("gids") or (), wants_ipv6(values), address_range(values), number(version) if version else 2)


# ---- what a profile and a host's files set


@dataclasses.dataclass(frozen=True)
class Rank:
    """One rank as NCCL will find it. C(right_gids): port name -> the GID indexes that are on the fabric; C(conf): C(limits.nccl_conf) of the host."""

    host: str
    rank: int
    ports: tuple[Port, ...] = ()  # planned
    all_ports: tuple[Port, ...] = ()  # of the host
    right_gids: t.Mapping[str, frozenset[int]] = dataclasses.field(default_factory=dict)
    interfaces: tuple[t.Mapping[str, t.Any], ...] = ()
    interface: str | None = None  # planned for the bootstrap
    address: str | None = None
    conf: t.Mapping[str, t.Mapping[str, str]] = dataclasses.field(default_factory=dict)
    home: str = ""  # HOME of the service, where NCCL looks for .nccl.conf
    nvlink: bool = False  # the replica's fabric is an NVLink domain
    proven: bool = False  # and/or all its GPUs are in one proven domain
    nodes: int = 1


def check(generated: t.Mapping[str, str], profile: t.Mapping[str, str], rank: Rank, findings: Findings) -> None:
    """Judge what the profile's variables and the host's nccl.conf do to one rank. C(generated): what the plan sets; the profile's values win."""
    report = _Report(rank, findings)
    asked = {name: value for name, value in profile.items() if not refusal(name)}
    for name in sorted(asked):
        if name.startswith("NCCL_"):
            _check_name(name, report)
    values = {**generated, **asked}
    added = _from_files(values, asked, rank, report)
    values.update({name: value for name, (value, _path) in added.items()})
    for name, value in sorted(asked.items()):
        _check_value(name, value, values, "env.%s" % name, report.fault, rank, report)
    for name, (value, path) in sorted(added.items()):
        _check_value(name, value, values, path, report.warn, rank, report)
    _check_ports(asked, values, rank, report)
    if _GID_VARIABLES & (set(asked) | set(added)):
        _check_gids(values, rank, report)
    _check_plugin(values, rank, report)
    _check_interfaces(asked, values, rank, report)


class _Report:
    """Findings about one rank."""

    def __init__(self, rank: Rank, findings: Findings) -> None:
        self.rank = rank
        self.findings = findings

    def fault(self, field: str, seen: t.Any, wanted: str, hint: str = "") -> None:
        self.findings.fault(field, seen, wanted, hint, host=self.rank.host, rank=self.rank.rank)

    def warn(self, field: str, seen: t.Any, wanted: str, hint: str = "") -> None:
        self.findings.warn(field, seen, wanted, hint, host=self.rank.host, rank=self.rank.rank)


Say = t.Callable[[str, t.Any, str, str], None]


def is_known(name: str) -> bool:
    return name in NAMES or name in _OBSOLETE or name.startswith(_FAMILIES)


def _check_name(name: str, report: _Report) -> None:
    if name in _OBSOLETE:
        report.warn("env.%s" % name, "an obsolete name", _OBSOLETE[name], "NCCL 2.30 does not read it.")
    elif not is_known(name):
        close = nearest(name, NAMES)
        report.findings.warn(
            "env.%s" % name,
            "a name that NCCL 2.30 does not know",
            close or "a variable of NCCL's",
            "NCCL ignores unknown names without a word. %s" % ("Did you mean %s?" % close if close else "Check the spelling."),
        )


def _files(rank: Rank) -> list[tuple[str, t.Mapping[str, str]]]:
    """The files that NCCL reads in this service, the stronger first: .nccl.conf of its HOME, then /etc/nccl.conf. Homes of others do not count."""
    own = rank.home.rstrip("/") + "/.nccl.conf"
    applying = [(path, content) for path, content in rank.conf.items() if isinstance(content, t.Mapping) and (path == own or not path.endswith("/.nccl.conf"))]
    return sorted(applying, key=lambda item: (item[0] != own, item[0]))


def _from_files(values: t.Mapping[str, str], asked: t.Mapping[str, str], rank: Rank, report: _Report) -> dict[str, tuple[str, str]]:
    """What the host's files add to the environment: name -> (value, path). Values that the environment overrides are said, and then forgotten."""
    added: dict[str, tuple[str, str]] = {}
    for path, content in _files(rank):
        for name, value in sorted((str(name), str(value)) for name, value in content.items()):
            if name.startswith(_QUIET) or values.get(name) == value:
                continue
            seen = "%s=%s in %s" % (name, value, path)
            if name in values:
                source = "the profile" if name in asked else "the plan"
                report.warn(
                    "limits.nccl_conf",
                    seen,
                    "%s=%s, as %s sets it" % (name, values[name], source),
                    "The environment wins over the file; remove the line so that other programs agree.",
                )
            elif name not in added:
                added[name] = (value, path)
                report.warn("limits.nccl_conf", seen, "no such line, or the same variable in the profile's env", _added_hint(name))
    return added


def _added_hint(name: str) -> str:
    if not name.startswith("NCCL_"):
        return "NCCL sets every variable of this file in the engine's process, not only its own%s." % ("; this one %s" % refusal(name) if refusal(name) else "")
    if not is_known(name):
        close = nearest(name, NAMES)
        return "NCCL ignores this name%s." % ("; %s was perhaps meant" % close if close else "")
    return "The plan does not set it, so it takes effect on this host alone. What ranks must agree on belongs into the profile's env."


# ---- single values

_INFINITE = "0 and values from 32 mean an infinite timeout: a dead peer never becomes an error, and the replica hangs (public recipes have 32)"
_NO_MNNVL = "takes multi-node NVLink away without a word (NCCL init.cc, mnnvl.cc)"


def _check_value(name: str, value: str, values: t.Mapping[str, str], field: str, wrong: Say, rank: Rank, report: _Report) -> None:
    """Values that mean something else than they seem to. C(wrong) is a fault for the profile's and a warning for a file's."""
    if field != "env.%s" % name:
        field = "limits.nccl_conf"
        value_seen = "%s=%s" % (name, value)
    else:
        value_seen = value
    if name.startswith("NCCL_") and name[5:] in _NUMBERS and value and not _INTEGER.match(value):
        wrong(field, value_seen, "a whole number in decimal digits", "NCCL reads this as %d: what is no number counts as 0." % number(value))
        return
    rule = _VALUE_RULES.get(name)
    if rule is not None and value:
        rule(
            value, values, rank, lambda wanted, hint: wrong(field, value_seen, wanted, hint), lambda wanted, hint: report.warn(field, value_seen, wanted, hint)
        )


Tell = t.Callable[[str, str], None]


def _gid_index_value(value: str, values: t.Mapping[str, str], rank: Rank, wrong: Tell, note: Tell) -> None:
    if int(value) < -1:
        wrong("an index from 0, or -1 for NCCL's own choice", "NCCL takes any negative number for its own choice.")
    elif rank.ports and all(port.get("link_layer") == "infiniband" for port in rank.ports):
        note("nothing", "NCCL ignores it on InfiniBand.")


def _address_range_value(value: str, values: t.Mapping[str, str], rank: Rank, wrong: Tell, note: Tell) -> None:
    network = address_range(values)
    if network is None:
        wrong(
            "one CIDR of the family %s, such as %s" % (("AF_INET6", "2001:db8::/64") if wants_ipv6(values) else ("AF_INET", "10.11.0.0/16")),
            "NCCL ignores a range without / or of the other family, and says so only at NCCL_DEBUG=INFO.",
        )
    elif not re.match(r"[0-9a-fA-F.:]+/[0-9]+\Z", value):
        wrong("one CIDR", "NCCL reads this as %s and nothing more: there is one range for all ports." % network)
    elif (values.get("NCCL_IB_GID_INDEX") or "-1") != "-1":
        note("NCCL_IB_GID_INDEX=-1 beside it", "NCCL_IB_GID_INDEX=%s is in force, and NCCL asks no range then." % values["NCCL_IB_GID_INDEX"])


def _family_value(value: str, values: t.Mapping[str, str], rank: Rank, wrong: Tell, note: Tell) -> None:
    if value not in ("AF_INET", "AF_INET6"):
        wrong("AF_INET or AF_INET6", "NCCL takes every other text as if nothing were set.")


def _timeout_value(value: str, values: t.Mapping[str, str], rank: Rank, wrong: Tell, note: Tell) -> None:
    seconds_exponent = int(value)
    if seconds_exponent <= 0 or seconds_exponent >= 32:
        wrong("18 to 23", _INFINITE + ".")
    elif seconds_exponent > 23:
        minutes = round(4.096e-6 * 2**seconds_exponent * 8 / 60)
        note("18 to 23", "4.096 us x 2^%d for each of 8 tries: a dead peer is noticed after about %d minutes." % (seconds_exponent, minutes))


def _retry_value(value: str, values: t.Mapping[str, str], rank: Rank, wrong: Tell, note: Tell) -> None:
    if not 0 <= int(value) <= 7:
        wrong("0 to 7", "The field of the queue pair has three bits.")


def _p2p_disable_value(value: str, values: t.Mapping[str, str], rank: Rank, wrong: Tell, note: Tell) -> None:
    if int(value) == 1:
        _needs_p2p(rank, wrong, note)


def _p2p_level_value(value: str, values: t.Mapping[str, str], rank: Rank, wrong: Tell, note: Tell) -> None:
    if value.upper() == "LOC" or value == "0":
        _needs_p2p(rank, wrong, note)


def _needs_p2p(rank: Rank, wrong: Tell, note: Tell) -> None:
    if rank.nvlink and rank.nodes > 1:
        wrong("peer access between GPUs", "The replica's fabric is an NVLink domain, and this %s." % _NO_MNNVL)
    else:
        note("no such variable", "It is made for debugging: GPUs of one host then exchange through host memory.")


def _cumem_value(value: str, values: t.Mapping[str, str], rank: Rank, wrong: Tell, note: Tell) -> None:
    if int(value) == 0 and rank.nvlink and rank.nodes > 1:
        wrong("1", "The replica's fabric is an NVLink domain, and this %s (vllm#16992)." % _NO_MNNVL)
    elif int(value) == 0:
        note("no such variable", "0 takes away NVLS buffers and multi-node NVLink; NCCL 2.19 and newer decide by themselves.")


def _mnnvl_value(value: str, values: t.Mapping[str, str], rank: Rank, wrong: Tell, note: Tell) -> None:
    if rank.nodes < 2:
        return
    if int(value) == 0 and rank.nvlink:
        wrong("1", "The replica's fabric is an NVLink domain. Name another fabric in replica_fabric instead.")
    elif int(value) == 1 and not rank.proven:
        wrong(
            "a proven NVLink domain",
            "1 forces multi-node NVLink, and NCCL ends with an error where the domain does not hold. Name the domain in replica_fabric (nvl:...).",
        )


def _debugging_switch(value: str, values: t.Mapping[str, str], rank: Rank, wrong: Tell, note: Tell) -> None:
    if int(value):
        note("no such variable", "It is made for debugging and costs throughput.")


def _multi_rank_value(value: str, values: t.Mapping[str, str], rank: Rank, wrong: Tell, note: Tell) -> None:
    if int(value):
        note("0", "Two ranks on one GPU are a mistake of placement, which NCCL would then no longer report.")


def _net_value(value: str, values: t.Mapping[str, str], rank: Rank, wrong: Tell, note: Tell) -> None:
    if value.lower() == "ib" and number(values.get("NCCL_IB_DISABLE") or "0"):
        wrong("NCCL_IB_DISABLE=0 beside it", "NCCL would be told to use verbs and to have none, and end with an error.")


def _disable_value(value: str, values: t.Mapping[str, str], rank: Rank, wrong: Tell, note: Tell) -> None:
    if int(value) and (values.get("NCCL_NET") or "").lower() == "ib":
        wrong("0, or NCCL_NET=Socket beside it", "NCCL_NET=IB is in force: NCCL would end with an error. To use TCP, set replica_fabric: none.")


Rule = t.Callable[[str, t.Mapping[str, str], Rank, Tell, Tell], None]
_VALUE_RULES: dict[str, Rule] = {
    "NCCL_IB_GID_INDEX": _gid_index_value,
    "NCCL_IB_ADDR_RANGE": _address_range_value,
    "NCCL_IB_ADDR_FAMILY": _family_value,
    "NCCL_SOCKET_FAMILY": _family_value,
    "NCCL_IB_TIMEOUT": _timeout_value,
    "NCCL_IB_RETRY_CNT": _retry_value,
    "NCCL_P2P_DISABLE": _p2p_disable_value,
    "NCCL_P2P_LEVEL": _p2p_level_value,
    "NCCL_CUMEM_ENABLE": _cumem_value,
    "NCCL_MNNVL_ENABLE": _mnnvl_value,
    "NCCL_SHM_DISABLE": _debugging_switch,
    "NCCL_P2P_DIRECT_DISABLE": _debugging_switch,
    "NCCL_MULTI_RANK_GPU_ENABLE": _multi_rank_value,
    "NCCL_NET": _net_value,
    "NCCL_IB_DISABLE": _disable_value,
}


# ---- what they select on this host


def _port_name(port: Port) -> str:
    return "%s:%s" % (port.get("name"), port.get("port"))


def _listed(ports: t.Iterable[Port]) -> str:
    return ", ".join(map(_port_name, ports)) or "none"


def uses_verbs(values: t.Mapping[str, str]) -> bool:
    return not number(values.get("NCCL_IB_DISABLE") or "0") and (values.get("NCCL_NET") or "ib").lower() == "ib"


def _check_ports(asked: t.Mapping[str, str], values: t.Mapping[str, str], rank: Rank, report: _Report) -> None:
    """C(NCCL_IB_HCA) of the profile against the ports that the host has."""
    spec = asked.get("NCCL_IB_HCA")
    if spec is None or not uses_verbs(values) or not rank.all_ports:
        return
    field, taken = "env.NCCL_IB_HCA", selected_ports(spec, rank.all_ports)
    plain = [port for port in taken if matches(str(port.get("name")), int(port["port"]), "=" + spec, MOST_PORTS)]
    if not taken:
        report.fault(
            field,
            spec,
            "a list that selects ports of this host: %s" % _listed(rank.all_ports),
            "It selects none. Names differ between hosts; leave the variable to the plan, or name ports for each host in replica_fabrics.",
        )
    elif not spec.startswith(("^", "=")) and plain and len(plain) < len(taken):
        report.fault(field, spec, "=%s" % spec, "Without = every entry is a prefix, and this one selects %s (NVIDIA/nccl#236)." % _listed(taken))
    elif len({port.get("link_layer") for port in taken}) > 1:
        report.fault(
            field,
            "%s, which selects %s" % (spec, ", ".join("%s %s" % (_port_name(port), port.get("link_layer")) for port in taken)),
            "ports of one link layer",
            "NCCL refuses or hangs on a list that mixes them (NVIDIA/nccl#302).",
        )
    elif [_port_name(port) for port in taken if port not in rank.ports] or len(taken) != len(rank.ports):
        report.warn(
            field,
            "%s, which selects %s" % (spec, _listed(taken)),
            "the planned ports: %s" % _listed(rank.ports),
            "The plan has proven nothing about these. Every rank must end with as many ports, on one fabric.",
        )


_GID_VARIABLES = {"NCCL_IB_GID_INDEX", "NCCL_IB_ADDR_RANGE", "NCCL_IB_ADDR_FAMILY", "NCCL_IB_ROCE_VERSION_NUM"}


def _check_plugin(values: t.Mapping[str, str], rank: Rank, report: _Report) -> None:
    if any(port.get("transport") == "efa" for port in rank.ports) and not values.get("NCCL_NET"):
        report.warn(
            "env.NCCL_NET",
            None,
            "the name that the build's aws-ofi-nccl plugin gives itself",
            "Without it NCCL falls back to TCP in silence where the plugin does not load. NCCL_DEBUG=INFO prints it as 'Using network'.",
        )


def _check_gids(values: t.Mapping[str, str], rank: Rank, report: _Report) -> None:
    """On every planned RoCE port, the entry that NCCL will take must be one of the fabric's."""
    if not uses_verbs(values):
        return
    for port in rank.ports:
        right = rank.right_gids.get(_port_name(port))
        index = gid_index(port, values)
        if index is None or not right or index in right:
            continue
        entry: Port = next((gid for gid in port.get("gids") or () if int(gid["index"]) == index), {})
        told = ["%s=%s" % (name, values[name]) for name in ("NCCL_IB_GID_INDEX", "NCCL_IB_ADDR_RANGE", "NCCL_IB_ADDR_FAMILY") if values.get(name)]
        what = "%s, %s" % (entry.get("type") or "empty", entry.get("address") or "no address")
        report.fault(
            "hcas.gids",
            "%s: NCCL would use index %d (%s) under %s" % (_port_name(port), index, what, ", ".join(told) or "no variable"),
            "index %s, RoCE v2 with an address of the fabric" % " or ".join(map(str, sorted(right))),
            "Remove what the profile's env or the host's nccl.conf sets, or correct it.",
        )


def _check_interfaces(asked: t.Mapping[str, str], values: t.Mapping[str, str], rank: Rank, report: _Report) -> None:
    """The interface variables against the interfaces that the host has: NCCL's list by its rules, Gloo's and TensorPipe's by exact name."""
    names = [str(interface.get("name")) for interface in rank.interfaces]
    if not names:
        return
    for variable in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        for name in asked.get(variable, "").split(",") if variable in asked else ():
            if name not in names:
                report.fault(
                    "env.%s" % variable,
                    asked[variable],
                    "the exact name of an interface of this host: %s" % ", ".join(names),
                    "Neither ^ nor = nor a prefix means anything here; Gloo ends, TensorPipe falls back to loopback (aws-do-eks#51).",
                )
    _check_socket_interface(asked, values, rank, report)
    _check_first_address(values, rank, report)


def _check_socket_interface(asked: t.Mapping[str, str], values: t.Mapping[str, str], rank: Rank, report: _Report) -> None:
    spec, field = asked.get("NCCL_SOCKET_IFNAME"), "env.NCCL_SOCKET_IFNAME"
    if spec is None:
        return
    if len(spec) < 2:
        report.fault(field, spec, "the exact form, =NAME", "NCCL takes a value of fewer than two characters as if nothing were set.")
        return
    family = values.get("NCCL_SOCKET_FAMILY")
    taken = selected_interfaces(spec, rank.interfaces, None if family not in ("AF_INET", "AF_INET6") else family == "AF_INET6")
    if not taken:
        report.fault(
            field, spec, "an interface of this host that runs and has an address", "It selects none, and NCCL ends with an unclear error (NVIDIA/nccl#1837)."
        )
    elif len(taken) > 1 and spec in taken:
        report.fault(
            field, spec, "=%s" % spec, "Without = it is a prefix and selects %s; NCCL takes whichever the kernel lists first (nccl-tests#9)." % ", ".join(taken)
        )
    elif len(taken) > 1:
        report.warn(
            field, "%s, which selects %s" % (spec, ", ".join(taken)), "one interface: =%s" % rank.interface, "NCCL takes whichever the kernel lists first."
        )


def _check_first_address(values: t.Mapping[str, str], rank: Rank, report: _Report) -> None:
    """NCCL listens on the first address of the interface (of the family, where one is forced), not on the planned one."""
    interface = next((item for item in rank.interfaces if item.get("name") == rank.interface), None)
    if interface is None or rank.address is None or rank.nodes < 2 or values.get("NCCL_SOCKET_IFNAME") != "=%s" % rank.interface:
        return
    found = [str(text).partition("/")[0] for text in interface.get("addresses") or ()]
    if values.get("NCCL_SOCKET_FAMILY") == "AF_INET6":
        found = [text for text in found if ":" in text]
    if rank.address in found and found[0] != rank.address:
        report.warn(
            "interfaces.%s" % rank.interface,
            "%s before %s" % (found[0], rank.address),
            "the planned address first on its interface",
            "NCCL listens on the first address of an interface and has no way to name another. Other ranks must reach %s too." % found[0],
        )
