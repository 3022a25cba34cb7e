# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which hosts, ranks and GPUs a replica gets. Deterministic, sticky, and able to say why a host was not taken."""

from __future__ import annotations

import dataclasses
import re
import typing as t

from ansible_collections.rankzero.inference.plugins.plugin_utils import fabric as fabrics
from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Fault, Findings, natural_key, shown
from ansible_collections.rankzero.inference.plugins.plugin_utils.profile import Profile

Facts = t.Mapping[str, t.Any]
Gpu = t.Mapping[str, t.Any]

# A bare context of a display server or of a monitoring agent; what holds more is in somebody's use.
FOREIGN_TOLERANCE_MIB = 64
# Memory that no listed process explains: the driver's own on an idle GPU is well below, a process in somebody's container well above.
UNATTRIBUTED_TOLERANCE_MIB = 1024
_DISTANCE = {"PIX": 0, "PXB": 1, "NV": 1, "PHB": 2, "NODE": 3, "SYS": 4}


@dataclasses.dataclass(eq=False)
class Candidate:
    """A host of the pool: its facts, the GPUs that are free for this replica, and what speaks against taking it."""

    host: str
    facts: Facts
    free: list[Gpu] = dataclasses.field(default_factory=list)
    problems: list[Fault] = dataclasses.field(default_factory=list)
    stated_rank: int | None = None
    current_rank: int | None = None

    def problem(self, field: str, seen: str, wanted: str, hint: str = "") -> None:
        self.problems.append(Fault(self.host, self.stated_rank, field, seen, wanted, hint))


@dataclasses.dataclass(frozen=True)
class Placement:
    """Hosts by rank, each with its GPUs, and a reason for every host of the pool that was not chosen."""

    hosts: tuple[str, ...]
    gpus: t.Mapping[str, tuple[Gpu, ...]]
    not_chosen: t.Mapping[str, str]


def of_class(gpu: Gpu, gpu_class: str) -> bool:
    """C(H100) fits C(NVIDIA H100 80GB HBM3), C(A10) does not fit C(NVIDIA A100): whole words, in order, whatever their case."""
    words = r"\W+".join(map(re.escape, gpu_class.split()))
    return re.search(r"(?<![A-Za-z0-9])%s(?![A-Za-z0-9])" % words, str(gpu.get("model") or ""), re.IGNORECASE) is not None


def gpu_type(gpu: Gpu) -> tuple[t.Any, ...]:
    """What must be equal over all GPUs of a replica: model, memory size (MiB), compute capability. None where it is unknown."""
    return (gpu.get("model"), gpu["memory"].get("total_mib"), gpu.get("compute_capability"))


def differ(one: tuple[t.Any, ...], other: tuple[t.Any, ...]) -> bool:
    """True where two types cannot be the same: what is unknown of either lets it through."""
    return any(part is not None and same is not None and part != same for part, same in zip(one, other))


def described(kind: tuple[t.Any, ...]) -> str:
    return "%s, %s MiB, capability %s" % tuple("unknown" if part is None else part for part in kind)


def examine(host: str, facts: Facts, profile: Profile, replica: str, stated_rank: int | None) -> Candidate:
    """Everything about one host that decides whether it can carry a shard of this profile."""
    shard = facts["shards"].get(replica) or {}
    rank = shard.get("rank")
    candidate = Candidate(host, facts, stated_rank=stated_rank, current_rank=rank if rank is not None and rank < profile.nodes else None)
    cordoned = facts.get("cordoned")
    if cordoned:
        candidate.problem(
            "cordoned", "cordoned by %s: %s" % (cordoned.get("by"), cordoned.get("reason")), "a host that is not cordoned", "Undrain the host, or take another."
        )
    if not profile.on_cpu:
        _examine_gpus(candidate, profile, replica)
    return candidate


def _examine_gpus(candidate: Candidate, profile: Profile, replica: str) -> None:
    driver = candidate.facts["drivers"].get("nvidia") or {}
    gpus = candidate.facts["gpus"]
    fine = (None, "ok", "gpus_missing") if gpus else (None, "ok")  # of GPUs that are listed each says itself what it lacks
    if driver.get("state") not in fine and not any(gpu.get("uuid") for gpu in gpus):
        candidate.problem(
            "drivers.nvidia",
            "%s: %s" % (driver.get("state"), driver.get("message") or ""),
            "a working NVIDIA driver that pynvml can ask",
            str(driver.get("hint") or "Mend the driver, or take another host; for a profile without GPUs set gpus_per_node: 0."),
        )
        return  # no GPU is free for one reason, and nobody can free it
    refused: dict[str, list[Gpu]] = {}
    for gpu in gpus:
        reason = why_not(gpu, profile, replica) or _given_away(gpu, candidate.facts["shards"], replica)
        if reason is None:
            candidate.free.append(gpu)
        else:
            refused.setdefault(reason, []).append(gpu)
    if max((len(_alike(candidate.free, gpu_type(gpu))) for gpu in candidate.free), default=0) < profile.gpus_per_node:
        of_types = " of %s" % _counted([candidate]) if len(_types([candidate])) > 1 else ""
        seen = "%d free of %d%s%s" % (len(candidate.free), len(gpus), of_types, ": " + "; ".join(_refusals(refused, len(gpus) == 1)) if refused else "")
        candidate.problem(
            "gpus",
            seen,
            "%d GPUs%s%s" % (profile.gpus_per_node, " of class %s" % profile.gpu_class if profile.gpu_class else "", " of one type" if of_types else ""),
            _enough_gpus(gpus, profile),
        )


def _refusals(refused: t.Mapping[str, t.Sequence[Gpu]], only: bool) -> list[str]:
    """Each reason once, with the GPUs that it holds for by their numbers: then hosts that are alike say the same, and a report tells it once.

    One GPU among others is named with its UUID, and so are those without numbers of their own, such as MIG instances.  C(only): the host has one GPU.
    """
    told = []
    for reason, gpus in refused.items():
        numbers = [gpu.get("index") for gpu in gpus]
        if None in numbers or len(set(numbers)) < len(numbers) or (len(gpus) == 1 and not only):
            told += ["GPU %s %s" % (_named(gpu), reason) for gpu in gpus]
        else:
            told.append("GPU %s%s %s" % (", ".join(map(str, numbers)), ": each" if len(gpus) > 1 else "", reason))
    return told


def _named(gpu: Gpu) -> str:
    """C(3 (GPU-...)); a GPU that the driver does not list has no number, and goes by its PCI address."""
    index, name = gpu.get("index"), gpu.get("uuid") or gpu.get("pci_bdf") or "no UUID"
    return name if index is None else "%s (%s)" % (index, name)


def _enough_gpus(gpus: t.Sequence[Gpu], profile: Profile) -> str:
    """What to do; a class that none of the GPUs has is no matter of free ones. A GPU without a model, for it is broken, says nothing of its class."""
    if gpus and profile.gpu_class and not any(not gpu.get("model") or of_class(gpu, profile.gpu_class) for gpu in gpus):
        return "Correct gpu_class, or take another host."
    if len(gpus) < profile.gpus_per_node:
        return "Lower gpus_per_node, or take another host: this one does not have so many GPUs."
    return "Free the GPUs, lower gpus_per_node, or take another host."


def why_not(gpu: Gpu, profile: Profile, replica: str) -> str | None:
    """Why this GPU cannot be given to the replica, or None. What the replica itself holds is free for it."""
    if not gpu.get("uuid"):
        return "cannot be identified: %s" % ("; ".join(gpu["health"].get("reasons") or ()) or "no UUID")
    if gpu["health"].get("state") in ("unhealthy", "lost", "not_permitted"):
        return "is %s: %s" % (gpu["health"]["state"], "; ".join(gpu["health"].get("reasons") or ()))
    if gpu["partition"].get("kind") or gpu["partition"].get("mode_current") in (True, "enabled", 1):
        return "is partitioned (MIG)"
    if gpu.get("compute_mode") == "prohibited":
        return "is in compute mode prohibited"
    if profile.gpu_class and not of_class(gpu, profile.gpu_class):
        return "is no %s: %s" % (profile.gpu_class, gpu.get("model"))
    holders = [holder(process) for process in gpu["processes"] if is_foreign(process, replica)]
    if holders:
        return "is held by %s" % ", ".join(holders)
    return None


def _given_away(gpu: Gpu, shards: t.Mapping[str, Facts], replica: str) -> str | None:
    """What holds no memory just now may still be somebody's: another deployed replica starts again at boot, and a container's processes are not listed."""
    for name, shard in sorted(shards.items()):
        if name != replica and gpu["uuid"] in shard["gpus"]:
            return "is given to shard %s/%s, which is deployed here" % (name, "?" if shard["rank"] is None else shard["rank"])
    hidden = hidden_mib(gpu)
    if hidden and gpu["memory"]["model"] != "coherent" and gpu["uuid"] not in (shards.get(replica) or {}).get("gpus", ()):
        return "has %d MiB held by processes that the host does not list (in a container, or of another user)" % hidden
    return None


def hidden_mib(gpu: Gpu) -> float | None:
    """What is in use and no listed process holds, where it is more than the driver's own. On GH200 and GB200 the kernel's page cache may lie there."""
    hidden: float | None = gpu["memory"]["unattributed_mib"]
    return hidden if hidden is not None and hidden > UNATTRIBUTED_TOLERANCE_MIB else None


def is_foreign(process: t.Mapping[str, t.Any], replica: str) -> bool:
    """True for a process of somebody else that holds more than a bare context of a display, or an unknown amount."""
    shard = process.get("shard")
    if shard is not None and str(shard).rsplit("/", 1)[0] == replica:
        return False
    used = process.get("used_mib")
    if process.get("kind") == "graphics" and (used is None or used <= FOREIGN_TOLERANCE_MIB):
        return False
    return used is None or used > FOREIGN_TOLERANCE_MIB


def holder(process: t.Mapping[str, t.Any]) -> str:
    """Who holds memory on a GPU, in words."""
    amount = "unknown memory" if process.get("used_mib") is None else "%s MiB" % process["used_mib"]
    if process.get("shard"):
        return "shard %s (pid %s, %s)" % (process["shard"], process.get("pid"), amount)
    return "pid %s %s of %s (%s)" % (process.get("pid"), process.get("name") or "", process.get("user") or "unknown user", amount)


def place(
    candidates: t.Sequence[Candidate],
    profile: Profile,
    replica: str,
    leader: str | None,
    wanted_fabric: t.Sequence[str],
    findings: Findings,
    named_fabrics: t.Mapping[str, t.Any] | None = None,
) -> Placement | None:
    """Choose the hosts, give them ranks and GPUs. Returns None with faults where that cannot be done without guessing.

    C(wanted_fabric): what C(replica_fabric) says, empty to derive.  C(named_fabrics): C(replica_fabrics).
    """
    pool = sorted(candidates, key=lambda candidate: natural_key(candidate.host))
    good = [candidate for candidate in pool if not candidate.problems]
    if len(pool) < profile.nodes:
        _fault_all(pool, findings)
        findings.fault(
            "replica_hosts",
            "%d hosts: %s" % (len(pool), ", ".join(candidate.host for candidate in pool) or "none"),
            "%d hosts (nodes of the profile)" % profile.nodes,
            "Add hosts to the group, or run without --limit.",
        )
        return None
    if len(good) < profile.nodes < len(pool):
        _fault_all(pool, findings)
        findings.fault(
            "replica_hosts", "%d of %d hosts can carry a shard" % (len(good), len(pool)), "%d hosts" % profile.nodes, "See the faults of the others."
        )
        return None
    # Where every host is needed, each gets its rank whatever speaks against it, so that all that is wrong with it is said at once.
    every = len(pool) == profile.nodes
    chosen = pool if every else _choose_hosts(_on_fabric(good, profile, wanted_fabric, named_fabrics or {}), profile, leader, wanted_fabric, findings)
    ranked = _rank(chosen, leader, findings) if chosen is not None else None
    if ranked is None:
        _fault_all(pool if every else [], findings)
        return None
    _fault_all(ranked, findings, ranked)
    _keep_one_type(ranked, profile, replica, findings)
    ports = _wanted_ports(ranked, wanted_fabric, named_fabrics or {})
    gpus = {candidate.host: _pick_gpus(candidate, profile, replica, ports[candidate.host]) for candidate in ranked}
    _check_one_type(ranked, gpus, findings)
    _warn_of_findings(ranked, gpus, findings)
    return Placement(tuple(candidate.host for candidate in ranked), gpus, _not_chosen(pool, ranked))


def _fault_all(pool: t.Sequence[Candidate], findings: Findings, ranked: t.Sequence[Candidate] = ()) -> None:
    for candidate in pool:
        for fault in candidate.problems:
            rank = ranked.index(candidate) if ranked else fault.rank
            findings.fault(fault.field, fault.seen, fault.wanted, fault.hint, host=fault.host, rank=rank)


def _on_fabric(good: list[Candidate], profile: Profile, wanted: t.Sequence[str], named: t.Mapping[str, t.Any]) -> list[Candidate]:
    """Of a pool larger than needed, the hosts that have the fabric which the operator named; all of them where too few have it: the plan then says so."""
    if len(good) == profile.nodes or profile.nodes == 1 or not wanted or list(wanted) == ["none"]:
        return good
    ports = _wanted_ports(good, wanted, named)
    fitting = [candidate for candidate in good if _fabric_keys(candidate, wanted) or ports[candidate.host]]
    return fitting if len(fitting) >= profile.nodes else good


def _wanted_ports(candidates: t.Sequence[Candidate], wanted: t.Sequence[str], named: t.Mapping[str, t.Any]) -> dict[str, set[t.Any]]:
    """host -> names of the HCAs whose ports the operator's fabric takes there; all usable ones where it names none."""
    keys = [key for key in wanted if not key.startswith("nvl:")]
    if not keys:
        return {one.host: {port["name"] for port in fabrics.usable_ports(one.facts)} if not wanted else set() for one in candidates}
    chosen = fabrics.selected(keys, named, {one.host: one.facts for one in candidates})
    return {one.host: {port["name"] for port in chosen.get(one.host) or ()} for one in candidates}


def _choose_hosts(good: list[Candidate], profile: Profile, leader: str | None, wanted_fabric: t.Sequence[str], findings: Findings) -> list[Candidate] | None:
    """Prefer hosts that already carry this replica, then natural order; never mix kinds of hosts that an operator may have meant apart."""
    if leader is not None and not any(candidate.host == leader for candidate in good):
        findings.fault(
            "replica_leader", leader, "a host of the replica that can carry a shard", "Hosts that can: %s." % ", ".join(candidate.host for candidate in good)
        )
        return None
    if len(good) == profile.nodes:
        return good
    kinds: dict[tuple[t.Any, ...], list[Candidate]] = {}
    by_fabric = profile.nodes > 1 and list(wanted_fabric) != ["none"] and not _one_fabric(good, wanted_fabric)
    for candidate in good:
        kinds.setdefault(_kind(candidate, profile, wanted_fabric, by_fabric), []).append(candidate)
    enough = {kind: members for kind, members in kinds.items() if len(members) >= profile.nodes}
    sticky = [
        members
        for members in enough.values()
        if any(member.current_rank is not None or member.stated_rank is not None or member.host == leader for member in members)
    ]
    options = sticky if len(sticky) == 1 else list(enough.values())
    if len(options) != 1:
        listed = "; ".join("%s: %s" % (_kind_text(kind), ", ".join(member.host for member in members)) for kind, members in sorted(kinds.items(), key=str))
        findings.fault(
            "replica_hosts",
            listed,
            "%d hosts of one kind" % profile.nodes if not enough else "one kind of hosts that fits",
            "Set gpu_class in the profile, or replica_fabric, or name the hosts.",
        )
        return None

    def order(candidate: Candidate) -> tuple[t.Any, ...]:
        return (candidate.host != leader, candidate.stated_rank is None, candidate.current_rank is None, natural_key(candidate.host))

    return sorted(options[0], key=order)[: profile.nodes]


def _one_fabric(good: list[Candidate], wanted: t.Sequence[str]) -> bool:
    """True where fabrics cannot tell the hosts apart: all share one, or none has any."""
    keys = [_fabric_keys(candidate, wanted) for candidate in good]
    return bool(set.intersection(*map(set, keys))) or not any(keys)


def _fabric_keys(candidate: Candidate, wanted: t.Sequence[str]) -> frozenset[str]:
    keys = {key for port in fabrics.usable_ports(candidate.facts) for key in port["fabrics"]} | {nvlink_key(gpu) for gpu in candidate.free if nvlink_key(gpu)}
    narrowed = keys & set(wanted)
    return frozenset(narrowed if wanted else keys)


def nvlink_key(gpu: Gpu) -> str:
    """C(nvl:<cluster id>/<clique>) of a GPU in an NVLink domain, C() elsewhere."""
    domain = gpu.get("interconnect_domain") or {}
    return "nvl:%s/%s" % (domain["id"], domain.get("clique")) if domain.get("id") else ""


def _kind(candidate: Candidate, profile: Profile, wanted: t.Sequence[str], by_fabric: bool) -> tuple[t.Any, ...]:
    types = tuple(sorted({gpu_type(gpu) for gpu in candidate.free}, key=str)) if not profile.on_cpu else ()
    return (types, tuple(sorted(_fabric_keys(candidate, wanted))) if by_fabric else ())


def _kind_text(kind: tuple[t.Any, ...]) -> str:
    types, keys = kind
    return " and ".join(map(described, types)) + (" on %s" % ", ".join(keys) if keys else "") if types else "hosts on %s" % ", ".join(keys)


def _rank(chosen: list[Candidate], leader: str | None, findings: Findings) -> list[Candidate] | None:
    """Ranks that the operator states; then the ranks that hosts already have; then natural order of names."""
    nodes = len(chosen)
    by_rank: dict[int, Candidate] = {}
    for candidate in chosen:
        stated = 0 if candidate.host == leader else candidate.stated_rank
        if leader is not None and candidate.host == leader and candidate.stated_rank not in (None, 0):
            findings.fault("replica_rank", candidate.stated_rank, "rank 0 for the host that replica_leader names", host=candidate.host)
            return None
        if stated is None:
            continue
        if stated >= nodes:
            findings.fault("replica_rank", stated, "a rank from 0 to %d" % (nodes - 1), host=candidate.host)
            return None
        if stated in by_rank:
            findings.fault(
                "replica_rank" if stated else "replica_leader",
                "rank %d for %s and for %s" % (stated, by_rank[stated].host, candidate.host),
                "one host for each rank",
                "Two leaders cannot be: state each rank once.",
                host=candidate.host,
                rank=stated,
            )
            return None
        by_rank[stated] = candidate
    rest = [candidate for candidate in chosen if candidate not in by_rank.values()]
    for candidate in list(rest):
        if candidate.current_rank is not None and candidate.current_rank not in by_rank and candidate.current_rank < nodes:
            by_rank[candidate.current_rank] = candidate
            rest.remove(candidate)
    for rank in range(nodes):
        if rank not in by_rank:
            by_rank[rank] = rest.pop(0)
    return [by_rank[rank] for rank in range(nodes)]


def _alike(gpus: t.Iterable[Gpu], kind: tuple[t.Any, ...]) -> list[Gpu]:
    return [gpu for gpu in gpus if not differ(gpu_type(gpu), kind)]


def _types(candidates: t.Iterable[Candidate]) -> list[tuple[t.Any, ...]]:
    """The types of the free GPUs, each once; one of which only less is known is no type of its own."""
    found: list[tuple[t.Any, ...]] = []
    for gpu in (gpu for candidate in candidates for gpu in candidate.free):
        if all(differ(gpu_type(gpu), kind) for kind in found):
            found.append(gpu_type(gpu))
    return found


def _counted(candidates: t.Sequence[Candidate]) -> str:
    return ", ".join(
        "%s (%s)" % (described(kind), ", ".join("%s has %d" % (candidate.host, len(_alike(candidate.free, kind))) for candidate in candidates))
        for kind in _types(candidates)
    )


def _keep_one_type(ranked: list[Candidate], profile: Profile, replica: str, findings: Findings) -> None:
    """Where hosts have GPUs of several types, leave the one type that every host has enough of: never the first GPUs, whatever they are (dask-cuda#777).

    The type that the replica runs on already comes before others. Several that can be meant are a fault.
    """
    if profile.on_cpu or len(_types(ranked)) < 2:
        return
    fitting = [kind for kind in _types(ranked) if all(len(_alike(candidate.free, kind)) >= profile.gpus_per_node for candidate in ranked)]
    current = {uuid for candidate in ranked for uuid in (candidate.facts["shards"].get(replica) or {}).get("gpus") or ()}
    running = [kind for kind in fitting if any(gpu["uuid"] in current for candidate in ranked for gpu in _alike(candidate.free, kind))]
    fitting = running if len(running) == 1 else fitting
    if len(fitting) > 1:
        findings.fault("gpus", "several types that can be meant: %s" % _counted(ranked), "one type of GPUs", "Set gpu_class in the profile.")
    if len(fitting) == 1:
        for candidate in ranked:
            candidate.free = _alike(candidate.free, fitting[0])


def _warn_of_findings(ranked: list[Candidate], gpus: t.Mapping[str, tuple[Gpu, ...]], findings: Findings) -> None:
    """What is known against a GPU that is taken all the same: a reset that waits, a mode that changes at the next one, memory that nobody explains."""
    for rank, candidate in enumerate(ranked):
        for gpu in gpus[candidate.host]:
            told = list(gpu["health"]["reasons"])
            if gpu["compute_mode"] == "exclusive_process":
                told.append("it is in compute mode exclusive_process: a second process on it fails")
            hidden = hidden_mib(gpu)
            if hidden and gpu["memory"]["model"] == "coherent":
                told.append("%d MiB are in use and no process holds them (page cache, or a process that the host does not list)" % hidden)
            for text in told:
                findings.warn(
                    "gpus",
                    "GPU %s (%s) %s" % (gpu.get("index"), gpu["uuid"], text),
                    "GPUs with nothing against them",
                    "It is taken all the same.",
                    host=candidate.host,
                    rank=rank,
                )


def _pick_gpus(candidate: Candidate, profile: Profile, replica: str, ports: t.Collection[str]) -> tuple[Gpu, ...]:
    """The GPUs that the shard has now, if they still serve; else those nearest to the fabric's HCAs; else in PCI order. In PCI order at the end."""
    if profile.on_cpu:
        return ()
    current = set((candidate.facts["shards"].get(replica) or {}).get("gpus") or ())
    distances = candidate.facts["topology"].get("gpu_hca") or {}

    def pci(gpu: Gpu) -> str:
        return str(gpu.get("pci_bdf") or "~")

    def order(gpu: Gpu) -> tuple[t.Any, ...]:
        near = [_DISTANCE.get(distance, 5) for name, distance in (distances.get(gpu["uuid"]) or {}).items() if name in ports]
        return (gpu["uuid"] not in current, min(near, default=5), pci(gpu))

    return tuple(sorted(sorted(candidate.free, key=order)[: profile.gpus_per_node], key=lambda gpu: (pci(gpu), gpu.get("index") or 0)))


def _check_one_type(ranked: list[Candidate], gpus: t.Mapping[str, tuple[Gpu, ...]], findings: Findings) -> None:
    """One model, one memory size, one capability over all hosts: kernels, dtypes and memory plans are chosen per GPU."""

    def judged(candidate: Candidate) -> t.Sequence[Gpu]:
        """A host that has not enough of one type has its own fault for that; what is left to compare is its first type."""
        chosen = gpus[candidate.host]
        return _alike(chosen, gpu_type(chosen[0])) if chosen and any(problem.field == "gpus" for problem in candidate.problems) else chosen

    kinds = [(rank, candidate.host, gpu) for rank, candidate in enumerate(ranked) for gpu in judged(candidate)]
    if not kinds:
        return
    known: list[tuple[str, Gpu]] = []  # the GPUs that showed something first
    for rank, host, gpu in kinds:
        other = next((one for one in known if differ(gpu_type(one[1]), gpu_type(gpu))), None)
        if other is not None:
            findings.fault(
                "gpus",
                "GPU %s is %s" % (gpu.get("index"), described(gpu_type(gpu))),
                "%s, as GPU %s of %s" % (described(gpu_type(other[1])), other[1].get("index"), other[0]),
                "All GPUs of a replica are of one type. Set gpu_class, or take other hosts.",
                host=host,
                rank=rank,
            )
        elif gpu_type(gpu) not in [gpu_type(one[1]) for one in known]:
            known.append((host, gpu))
    told = [any(part is not None for part in parts) for parts in zip(*(gpu_type(gpu) for _rank, _host, gpu in kinds))]
    for rank, host, gpu in kinds:
        if any(part is None and elsewhere for part, elsewhere in zip(gpu_type(gpu), told)):
            findings.warn(
                "gpus",
                "GPU %s is %s" % (gpu.get("index"), described(gpu_type(gpu))),
                "its model, memory and compute capability",
                "What is unknown is let through.",
                host=host,
                rank=rank,
            )


def _not_chosen(pool: list[Candidate], ranked: list[Candidate]) -> dict[str, str]:
    chosen = {candidate.host for candidate in ranked}
    reasons = {}
    for candidate in pool:
        if candidate.host in chosen:
            continue
        text = "; ".join("%s: %s" % (fault.field, shown(fault.seen)) for fault in candidate.problems)
        others = "1 other host fits and comes" if len(ranked) == 1 else "%d other hosts fit and come" % len(ranked)
        reasons[candidate.host] = text or "not needed: %s first" % others
    return reasons
