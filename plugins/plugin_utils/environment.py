# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The environment of a shard's launches: every variable with its value and the reason for it.

It is complete and reproducible: it starts from nothing, never from the environment of whoever ran Ansible.
Sources: NCCL user guide (environment variables, 2.30); PyTorch's Gloo and TensorPipe device factories for the exact-name rule.
"""

from __future__ import annotations

import dataclasses
import re
import typing as t

from ansible_collections.rankzero.inference.plugins.plugin_utils import fabric as fabrics
from ansible_collections.rankzero.inference.plugins.plugin_utils import gids
from ansible_collections.rankzero.inference.plugins.plugin_utils import nccl as nccl_reading
from ansible_collections.rankzero.inference.plugins.plugin_utils.addressing import Endpoint
from ansible_collections.rankzero.inference.plugins.plugin_utils.environment_names import refusal
from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Findings

DIRECT_CABLES = (2, 30, 7)  # the first NCCL with NCCL_IB_SUBNET_AWARE_ROUTING
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclasses.dataclass
class Environment:
    """Values and reasons by variable name. C(set) is for generated values; C(override) for the profile's."""

    values: dict[str, str] = dataclasses.field(default_factory=dict)
    why: dict[str, str] = dataclasses.field(default_factory=dict)

    def set(self, name: str, value: str, why: str) -> None:
        self.values[name] = value
        self.why[name] = why

    def update(self, other: t.Mapping[str, tuple[str, str]]) -> None:
        for name, (value, why) in other.items():
            self.set(name, value, why)

    def copy(self) -> Environment:
        return Environment(dict(self.values), dict(self.why))


def base(work_dir: str, build_env: t.Mapping[str, str]) -> Environment:
    """What every process needs, and what the registered engine build declares (PATH, LD_LIBRARY_PATH, HF_HOME, ...)."""
    env = Environment()
    env.set("HOME", work_dir, "an empty home, so that no configuration file of a user changes the engine")
    env.set("LANG", "C.UTF-8", "the same language everywhere: log lines are searched for causes")
    env.set("PATH", SYSTEM_PATH, "the system's directories")
    env.set("XDG_CONFIG_HOME", work_dir + "/.config", "an empty configuration home")
    env.set("XDG_CACHE_HOME", work_dir + "/.cache", "caches below the service's own directory")
    for name, value in build_env.items():
        env.set(name, str(value), "declared by the registered engine build")
    return env


def gpu_selection(env: Environment, gpus: t.Sequence[t.Mapping[str, t.Any]], token: str, of_host: t.Sequence[t.Mapping[str, t.Any]]) -> None:
    """CUDA_VISIBLE_DEVICES by UUID, or by CUDA's own number for engines that parse integers (vllm#41848); empty hides every GPU."""
    numbers = cuda_numbers(of_host) if token == "index" else {}
    names = [str(numbers.get(gpu["uuid"], gpu["index"]) if token == "index" else gpu["uuid"]) for gpu in gpus]
    env.set("CUDA_DEVICE_ORDER", "PCI_BUS_ID", "CUDA's own order is by speed and differs from NVML's (gpustack#1633)")
    listed = ", ".join("%s (%s)" % (gpu["index"], gpu["uuid"]) for gpu in gpus)
    env.set("CUDA_VISIBLE_DEVICES", ",".join(names), "the shard's GPUs: %s" % listed if gpus else "a CPU shard sees no GPU")


def cuda_numbers(gpus: t.Sequence[t.Mapping[str, t.Any]]) -> dict[str, int]:
    """UUID -> CUDA's number in PCI order, which counts the GPUs that can be opened, as NVML's index does not.

    NVML counts GPUs that are lost or that a device cgroup holds back too, and does not promise an order (nvml.h). Empty where an address is missing.
    """
    whole = [gpu for gpu in gpus if not gpu["partition"]["kind"] and gpu["uuid"] and gpu["health"]["state"] not in ("lost", "not_permitted")]
    places = {gpu["uuid"]: _pci_order(gpu["pci_bdf"]) for gpu in whole}
    if None in places.values():
        return {}
    return {uuid: number for number, uuid in enumerate(sorted(places, key=lambda uuid: places[uuid] or ()))}


def _pci_order(address: t.Any) -> tuple[int, ...] | None:
    """C(0008:06:00.0) as numbers: domains are written with four digits or eight."""
    parts = re.split(r"[:.]", str(address))
    return tuple(int(part, 16) for part in parts) if len(parts) == 4 and all(re.fullmatch("[0-9a-fA-F]{1,8}", part) for part in parts) else None


def bootstrap_interface(env: Environment, endpoint: Endpoint) -> None:
    """NCCL matches by prefix unless the list begins with C(=); Gloo and TensorPipe take the plain name (nccl-tests#9, aws-do-eks#51)."""
    why = "%s: %s" % (endpoint.why, endpoint.address)
    env.set("NCCL_SOCKET_IFNAME", "=" + endpoint.interface, why + " (= is the exact form)")
    env.set("GLOO_SOCKET_IFNAME", endpoint.interface, why)
    env.set("TP_SOCKET_IFNAME", endpoint.interface, why)
    if endpoint.is_ipv6:
        env.set("NCCL_SOCKET_FAMILY", "AF_INET6", "the management address is IPv6")


def fabric_variables(
    env: Environment, choice: fabrics.Choice, ports: t.Sequence[fabrics.Port], *, nccl: str | None, host: str, rank: int, findings: Findings
) -> None:
    """What tells NCCL to use the chosen HCA ports and nothing else. C(nccl) is the version of the build's NCCL, None where it is not known."""
    if any(port.get("transport") == "efa" for port in ports):
        env.set("FI_PROVIDER", "efa", "the shard's ports are AWS EFA; no NCCL_IB_ variable applies to them (aws-ofi-nccl#803)")
        env.set("NCCL_NET", "AWS Libfabric", "every aws-ofi-nccl has this name (aws-ofi-nccl#530): without the plugin NCCL fails instead of going to TCP")
        return
    if not ports:
        env.set("NCCL_IB_DISABLE", "1", choice.why or "no HCA was planned")
        return
    env.set("NCCL_IB_DISABLE", "0", "fabric %s" % choice.name)
    env.set("NCCL_IB_HCA", "=" + ",".join(map(fabrics.port_name, ports)), "fabric %s (%s), exactly these %d ports" % (choice.name, choice.why, len(ports)))
    if choice.link == "ethernet":
        gid = gids.rule(ports, choice.keys, host=host, rank=rank, findings=findings)
        if gid is not None:
            _gid_variables(env, gid, ports, nccl, host, rank, findings)
    if choice.prefix_length is not None:
        _direct_cable_variables(env, choice, nccl, host, rank, findings)
    if choice.cross_rail is False:
        env.set("NCCL_CROSS_NIC", "0", "a port of one rail cannot reach ports of another, so rings and trees stay on their rail")
    if version(nccl) >= (2, 21):
        env.set("NCCL_NET", "IB", "HCAs were planned: a silent fall to TCP becomes an error")
    if version(nccl) >= (2, 30):
        env.set("NCCL_IGNORE_NET_MISMATCH", "0", "unequal HCAs fail instead of degrading (NCCL 2.30, NVIDIA/nccl#2428)")


def _gid_variables(env: Environment, gid: gids.Gid, ports: t.Sequence[fabrics.Port], nccl: str | None, host: str, rank: int, findings: Findings) -> None:
    if gid.index is not None:
        env.set("NCCL_IB_GID_INDEX", str(gid.index), gid.why)
    if gid.address_range is not None:
        env.set("NCCL_IB_ADDR_RANGE", gid.address_range, gid.why)
        _check_range_is_known(gid, ports, nccl, host, rank, findings)
    if gid.ipv6:
        env.set("NCCL_IB_ADDR_FAMILY", "AF_INET6", "the fabric has IPv6 addresses only (uccl#803)")


def _check_range_is_known(gid: gids.Gid, ports: t.Sequence[fabrics.Port], nccl: str | None, host: str, rank: int, findings: Findings) -> None:
    """NCCL chooses by address since 2.21; up to 2.25 it fails or hangs on GID slots of another network namespace (NVIDIA/nccl#1573, #1587)."""
    hidden = any(entry.get("type") is None for port in ports for entry in port.get("gids") or ())
    needed = (2, 26) if hidden else (2, 21)
    if nccl and version(nccl) < needed:
        findings.fault(
            "engines.nccl",
            nccl,
            "NCCL %d.%d or newer" % needed,
            "No GID index is right for all of this host's ports: %s. An older NCCL cannot choose by address%s."
            % (gid.why, " in a container" if hidden else ""),
            host=host,
            rank=rank,
        )


def _direct_cable_variables(env: Environment, choice: fabrics.Choice, nccl: str | None, host: str, rank: int, findings: Findings) -> None:
    """Each cable is a subnet of its own, and NCCL must look for the port that leads to a peer (DGX Spark, three nodes in a ring)."""
    if version(nccl) < DIRECT_CABLES:
        findings.fault(
            "engines.nccl",
            nccl,
            "NCCL %s or newer" % ".".join(map(str, DIRECT_CABLES)),
            "Fabric %s is made of direct cables (subnet_aware), which older NCCL cannot use." % choice.name,
            host=host,
            rank=rank,
        )
    env.set("NCCL_IB_SUBNET_AWARE_ROUTING", "1", "direct cables: for each peer NCCL takes the port in that peer's subnet")
    if choice.prefix_length != fabrics.DEFAULT_PREFIX_LENGTH:
        env.set("NCCL_IB_SUBNET_PREFIX_LEN", str(choice.prefix_length), "the length that tells the cables' subnets apart")
    env.set("NCCL_IB_MERGE_NICS", "0", "two functions of one card lead to different hosts here and must not be merged into one device")
    env.set("NCCL_NET_PLUGIN", "none", "a network plugin in the build would not know about the cables")


def nvlink_variables(env: Environment, nodes: int, wanted: bool, proven: bool, domain: str | None) -> None:
    """Multi-node NVLink: on where it was asked for (the plan has refused an unproven domain), explicitly off where GPUs have a domain that does not hold.

    C(domain): any domain that a GPU of the replica is in. All ranks must be told the same, also those whose own GPUs are in none.
    """
    if nodes > 1 and wanted:
        env.set("NCCL_MNNVL_ENABLE", "1", "the replica's fabric is NVLink domain %s" % domain)
        env.set("NCCL_CUMEM_ENABLE", "1", "multi-node NVLink needs cuMem allocations")
    elif nodes > 1 and domain and not proven:
        env.set("NCCL_MNNVL_ENABLE", "0", "the GPUs are not in one proven NVLink domain; NCCL's automatic choice can fail there (NCCL mnnvl.cc)")


def check(
    env: Environment,
    overrides: t.Mapping[str, str],
    choice: fabrics.Choice,
    ports: t.Sequence[fabrics.Port],
    facts: t.Mapping[str, t.Any],
    endpoint: Endpoint | None,
    *,
    nodes: int,
    proven: bool,
    host: str,
    rank: int,
    findings: Findings,
) -> None:
    """What the profile's variables and the host's nccl.conf make of the plan's, judged as NCCL will read them."""
    conf = (facts.get("limits") or {}).get("nccl_conf")
    nccl_reading.check(
        env.values,
        overrides,
        nccl_reading.Rank(
            host=host,
            rank=rank,
            ports=tuple(ports),
            all_ports=tuple(facts.get("hcas") or ()),
            right_gids=gids.right(ports, choice.keys),
            interfaces=tuple(facts.get("interfaces") or ()),
            interface=endpoint.interface if endpoint else None,
            address=endpoint.address if endpoint else None,
            conf=conf if isinstance(conf, t.Mapping) else {},
            home=env.values.get("HOME", ""),
            nvlink=choice.nvlink,
            proven=proven,
            nodes=nodes,
        ),
        findings,
    )


def override(env: Environment, overrides: t.Mapping[str, str], *, rank: int, host: str, findings: Findings) -> None:
    """The profile's variables win; one that replaces a generated value is a warning with both values. Refused names are dropped, whatever let them through."""
    for name, value in sorted(overrides.items()):
        if refusal(name):
            continue
        if name in env.values and env.values[name] != value:
            findings.warn(
                "env.%s" % name, value, env.values[name], "The profile overrides the value that the plan generated (%s)." % env.why[name], host=host, rank=rank
            )
            env.set(name, value, "set by the profile, instead of %s" % env.values[name])
        else:
            env.set(name, value, "set by the profile")


def threads(env: Environment, count: int) -> None:
    if count:
        env.set("OMP_NUM_THREADS", str(count), "threads of the profile")


def version(text: str | None) -> tuple[int, ...]:
    """C("2.30.7+cuda13.0") is (2, 30, 7); unknown is (), older than everything."""
    match = re.match(r"v?([0-9]+(?:\.[0-9]+)*)", text or "")
    return tuple(map(int, match.group(1).split("."))) if match else ()
