# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From a request and the facts of all hosts to a whole plan, or to every fault at once. Pure: no file, no socket, no clock, no randomness."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import json
import re
import typing as t

from ansible_collections.rankzero.inference.plugins.plugin_utils import (
    addressing,
    engines,
    environment,
    fabric,
    fabric_names,
    gids,
    host_facts,
    limit_checks,
    model_checks,
    nccl,
    placement,
    ports,
)
from ansible_collections.rankzero.inference.plugins.plugin_utils import profile as profiles
from ansible_collections.rankzero.inference.plugins.plugin_utils.addressing import Endpoint
from ansible_collections.rankzero.inference.plugins.plugin_utils.engines.base import Engine, Launch, Peer, Shard
from ansible_collections.rankzero.inference.plugins.plugin_utils.environment import Environment
from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Findings, names, natural_key, shown
from ansible_collections.rankzero.inference.plugins.plugin_utils.profile import Profile
from ansible_collections.rankzero.inference.plugins.plugin_utils.values import NAME, Reader, nearest, unprintable

SCHEMA = 1
DEFAULT_HTTP_PORT = 8000
DEFAULT_SILENT_SECONDS = 20
RESTART = {"limit": 3, "window_seconds": 600, "backoff": [2, 10, 30]}  # so many failed runs in so many seconds, and the pauses after them
TIE_KEY = "tie_key"
_COMMENT = re.compile(r"\s[;#]")  # supervisord's parser cuts every value there, and has no quoting that prevents it
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9._-]{0,31}\Z")
Facts = t.Mapping[str, t.Any]


@dataclasses.dataclass(frozen=True)
class HostInput:
    """One host of the play: its node facts and what the inventory says about it. C(root) is its replica_root."""

    name: str
    facts: t.Any
    root: str = "/"
    user: str | None = None
    service_manager: str | None = None
    address: str | None = None
    management: str | None = None
    rank: t.Any = None
    groups: tuple[str, ...] = ()
    sysfs_root: str = "/sys"
    variables: tuple[str, ...] = ()  # names of its inventory variables that begin with replica_


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked for, as written by people: values are read and judged here. C(key_digest) stands for the API key; the key itself never comes here."""

    replica: t.Any
    profile: t.Any
    profiles: t.Any = None
    hosts: tuple[HostInput, ...] = ()
    absent_hosts: tuple[str, ...] = ()  # members of the group that --limit or a failure took out of the play
    sliced_job: str | None = None  # the sliced AWX job that this run is a part of: its inventory lacks hosts, and nothing else tells
    options: t.Mapping[str, t.Any] = dataclasses.field(default_factory=dict)  # fabric, fabrics, leader, http_port, http_host, leader_port, ...
    key_digest: str | None = None
    program_hashes: t.Mapping[str, str] = dataclasses.field(default_factory=dict)
    sent: t.Mapping[str, str] = dataclasses.field(default_factory=dict)  # path of an adapter -> checksum of its source, where that is on the controller
    known_variables: frozenset[str] = frozenset()  # what the role and the playbooks read
    ended_owners: tuple[str, ...] = ()  # owners of locks that hold nobody up: this run, and runs that are known to have ended


@dataclasses.dataclass(frozen=True)
class Options:
    """The request's options after reading."""

    fabric: tuple[str, ...]
    fabrics: t.Mapping[str, t.Any]
    leader: str | None
    http_port: int
    http_host: str | None
    leader_port: int | None
    tie_port: int | None
    silent_seconds: int
    without_api_key: bool  # a key that the replica has may go


@dataclasses.dataclass
class Rank:
    """One rank while it is being planned."""

    rank: int
    host: HostInput
    facts: dict[str, t.Any]
    gpus: tuple[placement.Gpu, ...]
    endpoint: Endpoint | None = None
    build: dict[str, t.Any] = dataclasses.field(default_factory=dict)
    ports: tuple[fabric.Port, ...] = ()
    gid: str | None = None


def build_plan(request: Request) -> dict[str, t.Any]:
    """The plan as data (docs/architecture.md). With faults it has no shards; nothing about a host was changed to find them."""
    with _without_collector():
        return _build(request)


@contextlib.contextmanager
def _without_collector() -> t.Iterator[None]:
    """A plan for many hosts is made of a million live objects and next to no cycles: looking for those again and again is a third of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _build(request: Request) -> dict[str, t.Any]:
    findings = Findings()
    replica = _replica_name(request.replica, findings)
    options = _read_options(request.options, findings)
    profile = profiles.select(request.profile, request.profiles, findings)
    engine = engines.load(profile.engine, findings) if profile else None
    if profile and engine:
        engine.validate(profile, profiles.location(request.profile), findings)
        engine.warnings(profile, findings)
    facts = _check_hosts(request, findings)
    _check_variables(request, findings)
    if replica:
        check_locks(replica, {host.name: facts[host.name] for host in request.hosts if host.name in facts}, request.ended_owners, findings)
    plan = _empty_plan(replica, profile)
    if profile and engine and replica:
        plan.update(_plan_hosts(request, options, replica, profile, engine, facts, findings))
    plan["warnings"] = [warning.as_dict() for warning in findings.warnings]
    plan["faults"] = [fault.as_dict() for fault in findings.faults]
    if plan["faults"]:
        plan.update({"shards": {}, "leader": None, "fingerprint": None})
    return plan


def _empty_plan(replica: str | None, profile: Profile | None) -> dict[str, t.Any]:
    return {
        "schema": SCHEMA,
        "replica": replica,
        "profile": profile.as_dict() if profile else None,
        "engine": profile.engine if profile else None,
        "fingerprint": None,
        "pool": None,
        "fabric": None,
        "leader": None,
        "shards": {},
        "not_chosen": {},
        "leaving": [],
        "to_fetch": {},
        "warnings": [],
        "faults": [],
    }


def _replica_name(name: t.Any, findings: Findings) -> str | None:
    if not isinstance(name, str) or not NAME.match(name):
        findings.fault(
            "replica_name", name, "1 to 40 lower-case letters, digits and -, beginning and ending with a letter or digit", "It names the service and the files."
        )
        return None
    return str(name)


def _read_options(data: t.Any, findings: Findings) -> Options:
    if not isinstance(data, t.Mapping):
        findings.fault("options", data, "a mapping of the replica's variables")
        data = {}
    read = Reader(data, "", findings)
    named = read.mapping("replica_fabrics")
    wanted = read.text("replica_fabric") or ""
    options = Options(
        fabric=tuple(part.strip() for part in wanted.split(",") if part.strip()),
        fabrics=named,
        leader=read.text("replica_leader"),
        http_port=read.integer("replica_http_port", DEFAULT_HTTP_PORT, 1, 65535) or DEFAULT_HTTP_PORT,
        http_host=_http_host(read),
        leader_port=read.integer("replica_leader_port", None, 1, 65535),
        tie_port=read.integer("replica_tie_port", None, 1, 65535),
        silent_seconds=read.integer("replica_silent_seconds", DEFAULT_SILENT_SECONDS, 2, 3600) or DEFAULT_SILENT_SECONDS,
        without_api_key=read.boolean("replica_without_api_key"),
    )
    read.refuse_unknown()
    return options


def _http_host(read: Reader) -> str | None:
    """Engines take lists, names and socket files here; the gate needs one address that it can ask."""
    text = read.text("replica_http_host")
    address = addressing.parse_ip(text) if text else None
    if text and address is None:
        read.wrong("replica_http_host", text, "an IP address of the leader, 0.0.0.0 or ::")
    return str(address) if address else None


def _check_hosts(request: Request, findings: Findings) -> dict[str, dict[str, t.Any]]:
    """Whether all hosts are there and can be looked at. Returns the facts, in the plan's shape, of those that have some."""
    if request.absent_hosts:
        findings.fault(
            "hosts",
            "without %s" % names(request.absent_hosts),
            "all hosts of the replica's group",
            "A replica is planned as a whole: run without --limit, and outside of sliced jobs.",
        )
    if request.sliced_job:
        findings.fault(
            "hosts",
            "this is one slice of the job %s, and sees a part of the inventory only" % request.sliced_job,
            "all hosts of the replica's group",
            "Set job_slice_count of the job template to 1.",
        )
    for host in request.hosts:
        problem = host_facts.problem(host.facts)
        if problem:
            findings.fault(
                "inference_node",
                problem,
                "facts of schema %d" % host_facts.SCHEMA,
                "Gather them with rankzero.inference.node_facts, or give them as the inventory variable inference_node.",
                host=host.name,
            )
        _check_place(host, findings)
    return {host.name: _facts_of(host, findings) for host in request.hosts if not host_facts.problem(host.facts)}


def _check_variables(request: Request, findings: Findings) -> None:
    """A name that nobody reads is everybody's own, unless it looks like one that is read: then the value was meant for something."""
    named = sorted({name for host in request.hosts for name in host.variables} - request.known_variables)
    for name in named if request.known_variables else ():
        meant = nearest(name, request.known_variables, likeness=0.9)
        if meant:
            findings.warn(name, "a variable of the inventory or the command line that nothing reads", meant, "Correct its name if that is what it means.")


def _check_place(host: HostInput, findings: Findings) -> None:
    """The directory and the user go into service files, so they must be what those can hold."""
    bad = unprintable(host.root)
    if bad or not host.root.startswith("/") or _COMMENT.search(host.root) or ".." in host.root.split("/"):
        findings.fault("replica_root", host.root, "an absolute path without .., control characters, and ; or # after a space", host=host.name)
    if host.user is not None and not _USER.match(host.user):
        findings.fault("replica_user", host.user, "the name of a user: letters, digits, and . _ - after the first", host=host.name)


def check_locks(replica: str, facts: t.Mapping[str, Facts], ended: t.Collection[str], findings: Findings) -> None:
    """Two runs that change one replica at the same time would leave a mixture: the second one is refused before it changes anything."""
    for host, known in facts.items():
        lock = known["locks"].get(replica)
        if lock and lock["live"] is not False and lock["owner"] not in ended:
            findings.fault(
                "locks.%s" % replica,
                "held by %s since %s%s"
                % (lock["who"] or "somebody unknown", lock["since"] or "an unknown time", ", until %s" % lock["until"] if lock["until"] else ""),
                "no other run that changes the replica",
                "Wait for that run. The lock of a run that has died ends by itself, 90 seconds after it was last heard of.",
                host=host,
            )


def _facts_of(host: HostInput, findings: Findings) -> dict[str, t.Any]:
    """The host's facts in the plan's shape. A value of another type is a fault that names its key, and then counts as unknown."""

    def report(key: str, seen: t.Any, wanted: str) -> None:
        findings.fault(
            "inference_node.%s" % shown(key), seen, wanted, "Gather the facts anew, or correct the inventory variable inference_node.", host=host.name
        )

    return host_facts.normalise(host.facts, report)


def _plan_hosts(
    request: Request, options: Options, replica: str, profile: Profile, engine: Engine, facts: t.Mapping[str, dict[str, t.Any]], findings: Findings
) -> dict[str, t.Any]:
    """Place the ranks, then everything that depends on where they are."""
    known = [host for host in request.hosts if host.name in facts]
    _check_key(replica, request, options, facts, findings)
    options = dataclasses.replace(options, fabrics=fabric_names.for_hosts(options.fabrics, {host.name: host.groups for host in request.hosts}, findings))
    candidates = [placement.examine(host.name, facts[host.name], profile, replica, _stated_rank(host, findings)) for host in known]
    placed = None
    if len(known) >= profile.nodes or len(known) == len(request.hosts):  # else the hosts without facts are why there are too few
        placed = placement.place(candidates, profile, replica, _leader(options, request, facts, findings), options.fabric, findings, options.fabrics)
    if placed is None:
        _check_unplaced(known, facts, profile, engine, findings)
        fabric.check_names(options.fabric, options.fabrics, facts, findings)
        return {}
    inputs = {host.name: host for host in known}
    ranks = [Rank(rank, inputs[name], facts[name], placed.gpus[name]) for rank, name in enumerate(placed.hosts)]
    _choose_endpoints(ranks, findings)
    _check_http_host(ranks[0], options, findings)
    _choose_builds(ranks, profile, engine, findings)
    model_checks.check(ranks, _as_sent(profile, request.sent), engine, findings)
    _check_service(ranks, findings)
    choice = _choose_fabric(ranks, profile, engine, options, findings)
    _check_limits(ranks, findings)
    leader_port = ports.choose_leader_port(ranks, options.leader_port, options.http_port, replica, profile.nodes, findings, engine.leader_ports(profile))
    run_ports = ports.run_ports(leader_port, profile.nodes, engine.leader_ports(profile))
    tie_port = ports.choose_tie_port(ranks, options.tie_port, {options.http_port, *run_ports}, replica, findings)
    shards = _shards(ranks, options, replica, profile, engine, leader_port, request, findings)
    ports.check(ranks, shards, engine, replica, findings, tie_port)
    tie = (
        None
        if tie_port is None
        else {"address": shards[0].address, "port": tie_port, "secret": TIE_KEY, "silent_seconds": options.silent_seconds, "run_ports": run_ports}
    )
    leaving = sorted((name for name in placed.not_chosen if replica in facts[name]["shards"]), key=natural_key)
    return {
        "not_chosen": dict(placed.not_chosen),
        "leaving": leaving,
        "to_fetch": model_checks.to_fetch(ranks, profile, engine),
        **_whole(request, options, replica, profile, engine, ranks, shards, choice, tie, findings),
    }


def _check_key(replica: str, request: Request, options: Options, facts: t.Mapping[str, t.Any], findings: Findings) -> None:
    """A vault file or a credential that was forgotten must not open a replica to everybody who reaches it."""
    keyed = [host for host in sorted(facts, key=natural_key) if (facts[host]["shards"].get(replica) or {}).get("has_api_key")]
    if keyed and request.key_digest is None and not options.without_api_key:
        findings.fault(
            "replica_api_key",
            "nothing, and the replica that is deployed has a key (%s)" % ", ".join(keyed),
            "the key, in replica_api_key or replica_api_key_file",
            "Without it everybody who reaches the endpoint could use it. Where that is meant: replica_without_api_key: true.",
        )


def _leader(options: Options, request: Request, facts: t.Mapping[str, t.Any], findings: Findings) -> str | None:
    """The host that replica_leader names, where it can be looked at. One that is none of the replica's is a fault, and the rest is still checked."""
    if options.leader is None or options.leader in facts:
        return options.leader
    if options.leader not in [host.name for host in request.hosts]:
        findings.fault("replica_leader", options.leader, "one of the replica's hosts: %s" % ", ".join(sorted(facts, key=natural_key)))
    return None


def _check_http_host(leader: Rank, options: Options, findings: Findings) -> None:
    address = addressing.parse_ip(options.http_host) if options.http_host else None
    if (
        address is None
        or address.is_unspecified
        or address.is_loopback
        or any(addressing.holds(interface, address) for interface in leader.facts["interfaces"])
    ):
        return
    findings.fault(
        "replica_http_host",
        options.http_host,
        "an address that the leader has, 0.0.0.0 or ::",
        "The server could not listen there.",
        host=leader.host.name,
        rank=leader.rank,
    )


def _stated_rank(host: HostInput, findings: Findings) -> int | None:
    read = Reader({"replica_rank": host.rank}, "", Findings())
    rank = read.integer("replica_rank", None, 0, 4095)
    if read.findings.faults:
        findings.fault("replica_rank", host.rank, "a whole number from 0", host=host.name)
    return rank


def _as_sent(profile: Profile, sent: t.Mapping[str, str]) -> Profile:
    """For what is checked only: the checksum of a source on the controller is no part of a revision, which other controllers have to find unchanged."""
    adapters = [dataclasses.replace(one, sha256=sent[one.path]) if one.source and not one.sha256 and one.path in sent else one for one in profile.adapters]
    return dataclasses.replace(profile, adapters=tuple(adapters))


def _check_unplaced(hosts: t.Sequence[HostInput], facts: t.Mapping[str, dict[str, t.Any]], profile: Profile, engine: Engine, findings: Findings) -> None:
    """Where no ranks could be given, what is wrong with each host all the same belongs into the one failure."""
    everywhere = all(engine.needs_model(profile, rank) for rank in range(profile.nodes))
    for host in hosts:
        _build_of(host.name, None, facts[host.name], profile, engine, findings)
        if everywhere:
            model_checks.check_readable(host.name, None, facts[host.name], profile, findings)


def _choose_endpoints(ranks: list[Rank], findings: Findings) -> None:
    """The leader's address first: the others' interface is the one that leads to it."""
    leader_address: str | None = None
    for one in ranks:
        if one.rank > 0 and leader_address is None and not (one.host.address or one.host.management):
            continue  # the leader's own fault says what is missing
        one.endpoint = addressing.choose(
            one.facts,
            host=one.host.name,
            rank=one.rank,
            explicit=one.host.address or None,
            management=one.host.management or None,
            leader_address=leader_address if one.rank else None,
            single_node=len(ranks) == 1,
            findings=findings,
        )
        if one.rank == 0 and one.endpoint:
            leader_address = one.endpoint.address
        resolved = addressing.loopback_name_warning(one.facts)
        if resolved and len(ranks) > 1 and not (one.endpoint and one.endpoint.address.startswith("127.")):
            findings.warn(
                "hostname_resolves_to",
                resolved,
                "an address of the management network",
                "Libraries that fall back to the host's own name would use loopback; the plan sets interfaces so that none has to.",
                host=one.host.name,
                rank=one.rank,
            )
        if one.endpoint and len(ranks) > 1:
            for pair in addressing.shared_subnets(one.facts, one.endpoint.interface):
                findings.warn(
                    "interfaces",
                    pair,
                    "one interface of the host in the management subnet",
                    "What this rank sends may leave by the other one (NVIDIA/nccl#1580). Give it a subnet of its own, or route by source address.",
                    host=one.host.name,
                    rank=one.rank,
                )
    _check_addresses_differ(ranks, findings)


def _check_addresses_differ(ranks: list[Rank], findings: Findings) -> None:
    seen: dict[str, Rank] = {}
    for one in ranks:
        if one.endpoint is None:
            continue
        other = seen.setdefault(one.endpoint.address, one)
        if other is not one:
            findings.fault(
                "replica_address",
                "%s, as %s has" % (one.endpoint.address, other.host.name),
                "an address of its own for every rank",
                "Set replica_address or replica_management so that the hosts differ.",
                host=one.host.name,
                rank=one.rank,
            )
    families = {one.endpoint.is_ipv6 for one in ranks if one.endpoint}
    if len(families) > 1:
        findings.fault("replica_management", "IPv4 on some ranks and IPv6 on others", "one address family over all ranks", "Set replica_management to a CIDR.")


def _choose_builds(ranks: list[Rank], profile: Profile, engine: Engine, findings: Findings) -> None:
    """Every rank's build, and that all are the same one: versions that differ hang or crash at the first exchange."""
    for one in ranks:
        one.build = _build_of(one.host.name, one.rank, one.facts, profile, engine, findings) or {}
        if one.build and not profile.on_cpu and one.build.get("devices") is not None and not one.build["devices"]:
            findings.fault(
                "engines.%s" % engine.name,
                "build %s sees no devices" % one.build.get("name"),
                "a build that sees the host's GPUs",
                "It would serve from the CPU. Register a build with a GPU backend, or use gpus_per_node: 0.",
                host=one.host.name,
                rank=one.rank,
            )
    for one in ranks:
        _check_container(one, profile, engine, findings)
    for field, what, value in _build_parts(ranks):
        _check_equal(ranks, "engines.%s.%s" % (engine.name, field), what, value, findings)
    _check_equal(
        ranks, "drivers.nvidia.driver", "driver version", lambda one: (one.facts["drivers"].get("nvidia") or {}).get("driver") if one.gpus else None, findings
    )


def _reads(one: Rank, profile: Profile, engine: Engine) -> list[str]:
    """What the rank's engine reads at every start, besides what is installed and what a revision holds."""
    return [profile.model_path, *(adapter.path for adapter in profile.adapters)] if engine.needs_model(profile, one.rank) else []


def _check_container(one: Rank, profile: Profile, engine: Engine, findings: Findings) -> None:
    """A build that is an image sees the directories that it was given, and podman needs root for the host's network and devices."""
    container = one.build.get("container")
    if not container:
        return
    where, host, rank = "engines.%s" % engine.name, one.host.name, one.rank
    for path in _reads(one, profile, engine):
        if not any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in container["mounts"]):
            findings.fault(
                where,
                "%s, which the build's containers do not see" % path,
                "a path below %s" % (", ".join(container["mounts"]) or "one of its mounts, of which it has none"),
                "Install the build with that directory in its mounts.",
                host=host,
                rank=rank,
            )
    manager = one.host.service_manager or one.facts["host"].get("service_manager")
    if _user(one, manager) != "root":
        findings.fault(
            "replica_user",
            _user(one, manager),
            "root for a build that is an image",
            "podman needs it for devices and the image; inside, the engine has no capability but to lock memory.",
            host=host,
            rank=rank,
        )
    if profile.distributed == "ray":
        findings.fault("distributed", "ray in containers", "mp", "Ray's processes look for each other by numbers, which differ between containers.")


def _build_parts(ranks: list[Rank]) -> list[tuple[str, str, t.Callable[[Rank], t.Any]]]:
    """(field, what it is, how to read it) of all that must be the same in every rank's build, from the whole to the parts that tell what differs."""

    def part(key: str, name: str) -> t.Callable[[Rank], t.Any]:
        return lambda one: (one.build.get(key) or {}).get(name)

    parts: list[tuple[str, str, t.Callable[[Rank], t.Any]]] = [
        ("fingerprint", "build", lambda one: one.build.get("fingerprint")),
        ("version", "version", lambda one: one.build.get("version")),
        ("nccl", "NCCL version", lambda one: one.build.get("nccl")),
        ("python", "Python version", part("python", "version")),
        ("container", "image", part("container", "image")),
    ]
    for key, what in (("versions", "version of %s"), ("programs_sha256", "sha256 of %s")):
        listed = {name for one in ranks for name in one.build.get(key) or {}}
        parts += [("%s.%s" % (key, name), what % name, part(key, name)) for name in sorted(listed)]
    return parts


def _check_equal(ranks: list[Rank], field: str, what: str, value: t.Callable[[Rank], t.Any], findings: Findings) -> None:
    known = [(one, value(one)) for one in ranks if value(one) is not None]
    for one, seen in known[1:]:
        if seen != known[0][1]:
            findings.fault(
                field,
                seen,
                "%s, the %s of rank %d (%s)" % (known[0][1], what, known[0][0].rank, known[0][0].host.name),
                "All ranks run the same.",
                host=one.host.name,
                rank=one.rank,
            )


def _build_of(host: str, rank: int | None, facts: Facts, profile: Profile, engine: Engine, findings: Findings) -> dict[str, t.Any] | None:
    """The registered build that the profile means on this host. One is taken; several are refused unless the profile names one."""
    if not engine.needs_build:
        return None
    short = engine.name or profile.engine.rsplit(".", 1)[-1]
    builds = facts["engines"].get(short) or []
    wanted = profile.engine_version
    fitting = [build for build in builds if wanted is None or wanted in (build.get("name"), build.get("version"))]
    sound = [build for build in fitting if not _problems(build)]
    listed = ", ".join("%s (%s)" % (build.get("name"), build.get("version")) for build in builds) or "none"
    if len(sound) == 1:
        return dict(sound[0])
    field = "engines.%s" % short
    if len(sound) > 1:
        findings.fault(field, "several builds: %s" % listed, "one build", "Set engine_version in the profile to the name of one.", host=host, rank=rank)
    elif fitting:
        findings.fault(
            field,
            "; ".join("%s: %s" % (build["name"], ", ".join(_problems(build))) for build in fitting),
            "a build that works",
            "Register it again.",
            host=host,
            rank=rank,
        )
    else:
        findings.fault(
            field,
            "registered builds: %s" % listed,
            "a registered build%s" % (" %s" % wanted if wanted else ""),
            "Register one: ansible-playbook rankzero.inference.check_engines -e engine_name=%s -e engine_path=PATH." % profile.engine,
            host=host,
            rank=rank,
        )
    return None


def _problems(build: Facts) -> list[str]:
    return list(build["problems"]) or ([] if str(build["path"]).startswith("/") else ["no absolute path of its program"])


def _check_service(ranks: list[Rank], findings: Findings) -> None:
    for one in ranks:
        manager, python = one.host.service_manager or one.facts["host"]["service_manager"], _python(one)
        if not python.startswith("/") or _COMMENT.search(python) or (manager == "systemd" and "$" in python):
            findings.fault(
                "host.python.executable",
                python,
                "an absolute path that a service can start",
                "systemd takes no $ there, supervisord no ; or # after a space.",
                host=one.host.name,
                rank=one.rank,
            )
        if manager not in ("systemd", "supervisor"):
            findings.fault(
                "host.service_manager",
                manager,
                "systemd (as root), or the Python package supervisor",
                "Become root on a host with systemd, or install supervisor beside the host's Python: pip install supervisor.",
                host=one.host.name,
                rank=one.rank,
            )


def _choose_fabric(ranks: list[Rank], profile: Profile, engine: Engine, options: Options, findings: Findings) -> fabric.Choice:
    if len(ranks) == 1:
        choice = fabric.none(
            "a single node needs no network between GPUs", ",".join(options.fabric) or None, any(key.startswith("nvl:") for key in options.fabric)
        )
    elif profile.on_cpu and not options.fabric:
        choice = fabric.none("CPU ranks use TCP")
    elif not engine.uses_nccl and not options.fabric:
        choice = fabric.none("%s ranks talk over TCP" % engine.name)
    else:
        choice = fabric.choose(
            options.fabric,
            options.fabrics,
            {one.host.name: one.facts for one in ranks},
            {one.host.name: [gpu["uuid"] for gpu in _meant_gpus(one, profile)] for one in ranks},
            {one.host.name: one.endpoint.interface for one in ranks if one.endpoint},
            findings,
        )
    for one in ranks:
        one.ports = tuple(choice.ports.get(one.host.name) or ())
    if choice.nvlink and len(ranks) > 1:
        _check_nvlink(ranks, options, findings)
    return choice


def _check_limits(ranks: t.Sequence[Rank], findings: Findings) -> None:
    for one in ranks:
        troubles = list(limit_checks.of_verbs(one.facts)) if any(port.get("transport") != "efa" for port in one.ports) else []
        troubles += list(limit_checks.of_memory(one.facts)) if len(one.gpus) > 1 else []
        for trouble in troubles:
            findings.warn(trouble.field, trouble.seen, trouble.wanted, trouble.hint + ".", host=one.host.name, rank=one.rank)


def _meant_gpus(one: Rank, profile: Profile) -> list[placement.Gpu]:
    """The rank's GPUs, or, where it is short of some, those that it would have if others left theirs: one GPU that is held is one fault, and must not
    make its HCA a fault of the fabric on every other host, too."""
    given = {gpu["uuid"] for gpu in one.gpus}
    others = [gpu for gpu in one.facts["gpus"] if gpu["uuid"] not in given]
    return [*one.gpus, *others[: max(0, profile.gpus_per_node - len(one.gpus))]]


def nvlink_problem(ranks: t.Sequence[Rank], wanted: str | None) -> str | None:
    """Why the GPUs of these ranks are not one proven NVLink domain, or None.

    Proven means: one cluster UUID and one clique on all GPUs, fabric state completed, health not bad, and an IMEX domain that is up with a
    channel on every host. What is not known is not proven: NCCL ends with an error on a domain that only looks like one (NCCL mnnvl.cc).
    """
    for one in ranks:
        for gpu in one.gpus:
            problem = _gpu_outside_domain(gpu)
            if problem:
                return "GPU %s of %s %s" % (gpu.get("index"), one.host.name, problem)
    keys = sorted({placement.nvlink_key(gpu) for one in ranks for gpu in one.gpus})
    if not keys:
        return "no GPUs"
    if len(keys) > 1:
        return "GPUs of several NVLink domains: %s" % ", ".join(keys)
    if wanted and wanted not in (keys[0], keys[0].rsplit("/", 1)[0]):
        return "GPUs of %s" % keys[0]
    return next((problem for problem in map(_imex_problem, ranks) if problem), None) or _imex_domains_differ(ranks)


def _gpu_outside_domain(gpu: placement.Gpu) -> str | None:
    """An HGX box says completed with a zero cluster UUID, which node facts give as no id (torchcomms#1385)."""
    domain = gpu.get("interconnect_domain") or {}
    if domain.get("state") not in (None, "completed"):
        return "in state %s of its NVLink fabric" % domain["state"]
    if not domain.get("id"):
        return "in no NVLink domain"
    if domain.get("state") is None:
        return "in an unknown state of its NVLink fabric"
    return "unhealthy in its NVLink domain" if domain.get("health") == "unhealthy" else None


def _imex_problem(one: Rank) -> str | None:
    """Memory is exchanged over NVLink through IMEX: its domain must be up, and a process needs a channel device."""
    imex = one.facts["limits"].get("imex") or {}
    domain = imex.get("domain")
    if not isinstance(domain, t.Mapping):
        return "an IMEX domain that is not known on %s: %s" % (one.host.name, _imex_unknown(imex))
    if str(domain.get("status")).lower() != "up" or domain.get("ready") is False:
        nodes = [node for node in domain.get("nodes") or () if isinstance(node, t.Mapping)]
        waiting = ["%s %s" % (node.get("host"), node.get("status")) for node in nodes if node.get("status") != "ready" or node.get("unconnected")]
        return "an IMEX domain that is %s on %s%s" % (domain.get("status"), one.host.name, ": " + ", ".join(waiting) if waiting else "")
    return None if imex.get("channels") else "no IMEX channel device on %s" % one.host.name


def _imex_domains_differ(ranks: t.Sequence[Rank]) -> str | None:
    """Each daemon speaks for the node list that it was started with: two lists in one clique are two domains, and both are up."""
    domains = [(one.host.name, one.facts["limits"]["imex"]["domain"]) for one in ranks]
    lists = [(host, sorted({str(node.get("host")) for node in domain.get("nodes") or ()}, key=natural_key)) for host, domain in domains]
    known = [(host, nodes) for host, nodes in lists if nodes]
    other = next((entry for entry in known if entry[1] != known[0][1]), None)
    return other and "different IMEX domains: %s" % ", ".join("%s on %s" % (", ".join(nodes), host) for host, nodes in (known[0], other))


def _imex_unknown(imex: Facts) -> str:
    errors = imex.get("errors")
    reason = errors.get("domain") if isinstance(errors, t.Mapping) else None
    return str(reason or "the service is %s" % (imex.get("service") or "not known"))


def _some_domain(ranks: t.Sequence[Rank]) -> str | None:
    """A domain that a GPU of the replica is in or was meant to be in; ranks outside of it are told about it too, since all must agree."""
    keys = [placement.nvlink_key(gpu) for one in ranks for gpu in one.gpus]
    return next((key for key in keys if key), None)


def _check_nvlink(ranks: list[Rank], options: Options, findings: Findings) -> None:
    wanted = next(key for key in options.fabric if key.startswith("nvl:"))
    problem = nvlink_problem(ranks, wanted)
    if problem:
        findings.fault(
            "replica_fabric",
            "%s with %s" % (wanted, problem),
            "all GPUs of the replica in that NVLink domain, completed and healthy",
            "Use the key that node facts give (nvl:<cluster>/<clique>), or another fabric. A fabric in progress is worth a second try; "
            "nvidia-imex-ctl -N shows the IMEX domain.",
        )


def _shards(
    ranks: list[Rank], options: Options, replica: str, profile: Profile, engine: Engine, leader_port: int, request: Request, findings: Findings
) -> list[Shard]:
    leader = ranks[0].endpoint.address if ranks[0].endpoint else ""
    models = _known_models(ranks, profile)
    everyone = tuple(Peer(one.rank, one.host.name, one.endpoint.address if one.endpoint else "") for one in ranks)
    result = []
    for one in ranks:
        address = one.endpoint.address if one.endpoint else ""
        result.append(
            Shard(
                profile=profile,
                rank=one.rank,
                host=one.host.name,
                address=address,
                leader_address=leader,
                leader_port=leader_port,
                http_host=_listens_at(one, options) or address,
                http_port=options.http_port,
                everyone=everyone,
                gpus=one.gpus,
                build=one.build,
                python=_python(one),
                current_dir=below(one.host.root, "etc/rankzero/%s/current" % replica),
                work_dir=below(one.host.root, "var/lib/rankzero/%s" % replica),
                has_key=request.key_digest is not None,
                models=models,
            )
        )
        if address and (one.build or not engine.needs_build):
            engine.check_shard(result[-1], findings)
    return result


def _listens_at(one: Rank, options: Options) -> str | None:
    """replica_http_host is an address of the leader; the other ranks that answer HTTP have only its wildcard and loopback in common with it."""
    address = addressing.parse_ip(options.http_host) if options.http_host else None
    return options.http_host if address is None or one.rank == 0 or address.is_unspecified or address.is_loopback else None


def _known_models(ranks: t.Sequence[Rank], profile: Profile) -> dict[str, t.Any]:
    """What the first rank that knows says of the model and the adapters: every rank must be given the same arguments."""
    paths = [profile.model_path, *(adapter.path for adapter in profile.adapters)]
    found = {path: next((one.facts["models"][path] for one in ranks if (one.facts["models"].get(path) or {}).get("config")), None) for path in paths}
    return {path: model for path, model in found.items() if model}


def _python(one: Rank) -> str:
    return str(one.facts["host"]["python"]["executable"] or "/usr/bin/python3")


def below(root: str, path: str) -> str:
    return "%s/%s" % (root.rstrip("/"), path)


def _environment(
    one: Rank, shard: Shard, profile: Profile, engine: Engine, choice: fabric.Choice, proven: bool, domain: str | None, findings: Findings
) -> Environment:
    env = environment.base(shard.work_dir, one.build.get("env") or {})
    environment.gpu_selection(env, one.gpus, engine.gpu_token, one.facts["gpus"])
    if one.endpoint:
        environment.bootstrap_interface(env, one.endpoint)
    environment.fabric_variables(env, choice, one.ports, nccl=one.build.get("nccl"), host=one.host.name, rank=one.rank, findings=findings)
    environment.nvlink_variables(env, profile.nodes, choice.nvlink, proven, domain)
    environment.threads(env, profile.threads)
    environment.check(
        env,
        dict(profile.env),
        choice,
        one.ports,
        one.facts,
        one.endpoint,
        nodes=profile.nodes,
        proven=proven,
        host=one.host.name,
        rank=one.rank,
        findings=findings,
    )
    return env


def _whole(
    request: Request,
    options: Options,
    replica: str,
    profile: Profile,
    engine: Engine,
    ranks: list[Rank],
    shards: list[Shard],
    choice: fabric.Choice,
    tie: Facts | None,
    findings: Findings,
) -> dict[str, t.Any]:
    """All parts together, and the fingerprint over everything that decides how a shard runs."""
    proven, domain = nvlink_problem(ranks, None) is None, _some_domain(ranks)
    planned = {}
    for one, shard in zip(ranks, shards):
        env = _environment(one, shard, profile, engine, choice, proven, domain, findings)
        planned[one.host.name] = _planned_shard(one, shard, shards[0], profile, engine, env, tie, findings)
    whole = {
        "pool": profile.gpu_class or _pool_of(ranks),
        "fabric": choice.name,
        "shards": planned,
        "leader": {"host": ranks[0].host.name, "address": shards[0].address, "port": shards[0].leader_port, "url": _url(shards[0])},
    }
    whole["fingerprint"] = _fingerprint(replica, profile, whole, request)
    for shard_plan in planned.values():
        shard_plan["fingerprint"] = whole["fingerprint"]
        shard_plan["labels"] = {"profile": profile.name, "pool": whole["pool"], "fabric": whole["fabric"], "engine": profile.engine, "replica": replica}
    return whole


def _pool_of(ranks: list[Rank]) -> str:
    models = sorted({str(gpu.get("model")) for one in ranks for gpu in one.gpus})
    return ", ".join(models) or "cpu"


def _url(shard: Shard) -> str:
    return _http(shard.address if shard.http_host in ("0.0.0.0", "::") else shard.http_host, shard.http_port)


def _http(host: str, port: int) -> str:
    return "http://%s:%d" % ("[%s]" % host if ":" in host else host, port)


def _planned_shard(
    one: Rank, shard: Shard, leader: Shard, profile: Profile, engine: Engine, env: Environment, tie: Facts | None, findings: Findings
) -> dict[str, t.Any]:
    serves = engine.serves_http(profile, one.rank)
    runs = [dataclasses.replace(shard, leader_port=port) for port in tie["run_ports"]] if tie else []
    by_run = [engine.launches(run) for run in runs]
    launches = [_planned_launch(launch, env, profile, shard, [run[number] for run in by_run], findings) for number, launch in enumerate(engine.launches(shard))]
    manager = one.host.service_manager or one.facts["host"].get("service_manager")
    return {
        "rank": one.rank,
        "nodes": profile.nodes,
        "address": shard.address,
        "interface": one.endpoint.interface if one.endpoint else None,
        "serves_http": serves,
        "gpus": [gpu["uuid"] for gpu in one.gpus],
        "gpu_details": model_checks.gpu_details(one, profile, engine),
        "hcas": [fabric.port_name(port) for port in one.ports],
        "hca_details": _hca_details(one, launches[-1]["env"]),
        "sysfs_root": one.host.sysfs_root,
        "launches": launches,
        "ready": _ready(one, shard, leader, profile, engine, serves),
        "root": one.host.root,
        "python": shard.python,
        "service_manager": manager,
        "user": _user(one, manager),
        "work_dir": shard.work_dir,
        "stop_seconds": profile.stop_timeout,
        "listen_ports": [
            {"address": address, "port": port, "what": what, **_moving(port, [engine.listen_ports(run)[number][1] for run in runs])}
            for number, (address, port, what) in enumerate(engine.listen_ports(shard))
        ],
        "leader_port": shard.leader_port,
        "http_port": shard.http_port,
        "tie": tie,
        "restart": RESTART,
        "reads": _reads(one, profile, engine),
        **_secrets(launches, tie),
        "program_files": list(engine.program_files),
        "revision_files": dict(engine.revision_files(shard, {name for launch in launches for name in (*launch["env"], *launch["secret_env"])})),
        "build": {key: one.build.get(key) for key in ("name", "version", "fingerprint")} if one.build else None,
    }


def _hca_details(one: Rank, env: t.Mapping[str, str]) -> list[dict[str, t.Any]]:
    """The chosen ports, with the GID entry that NCCL ends at now under the launch's environment: run_shard.py compares it at every start.

    C(gid_index) is null where NCCL is not told one and finds the entry by its address.
    """
    told = (env.get("NCCL_IB_GID_INDEX") or "-1").isdecimal()
    details = []
    for port in one.ports:
        index = nccl.gid_index(port, env) if port.get("transport") != "efa" else None
        entry = next((gid for gid in port["gids"] if gid.get("index") == index), None) if index is not None else None
        address = gids.address_of(entry) if entry else None
        details.append(
            {"name": port["name"], "port": port["port"], "gid_index": index if address and told else None, "gid_address": str(address) if address else None}
        )
    return details


def _moving(port: int, of_runs: t.Sequence[int]) -> dict[str, t.Any]:
    """C(ports) for each run's leader port, where a port moves with that."""
    return {"ports": list(of_runs)} if any(other != port for other in of_runs) else {}


def _secrets(launches: t.Sequence[Facts], tie: Facts | None) -> dict[str, t.Any]:
    """The names of the rank's secrets, and the text around those that are files of their own; never a secret itself."""
    files = {name: text for launch in launches for name, text in launch["secret_files"].items()}
    return {
        "secrets": (["api_key"] if files or any(launch["secret_env"] for launch in launches) else []) + sorted(files) + ([tie["secret"]] if tie else []),
        "secret_files": files,
    }


def _user(one: Rank, manager: t.Any) -> str:
    """A service user of its own under systemd; supervisor runs a shard as the user that Ansible works as."""
    own = str(one.facts["host"].get("user") or "root")
    return own if manager == "supervisor" else str(one.host.user or "rankzero")


def _planned_launch(launch: Launch, shared: Environment, profile: Profile, shard: Shard, runs: t.Sequence[Launch], findings: Findings) -> dict[str, t.Any]:
    """The launch with its complete, sorted environment. The profile's overrides come last, over the adapter's values too.

    C(runs): the same launch with the leader port of each run; what differs there moves with the run (decision 9).
    """
    env = shared.copy()
    env.update(launch.env)
    environment.override(env, dict(profile.env), rank=shard.rank, host=shard.host, findings=findings)
    for variable in launch.secret_env:
        env.values.pop(variable, None)
        env.why[variable] = "the secret %s, read from a file at start" % launch.secret_env[variable]
    return {
        "name": launch.name,
        "path": launch.path,
        "args": list(launch.args),
        "env": dict(sorted(env.values.items())),
        "why": dict(sorted(env.why.items())),
        "secret_env": sorted(launch.secret_env),
        "secrets": dict(launch.secret_env),
        "secret_files": dict(launch.secret_files),
        "secret_args": [{"position": position, "secret": name} for position, name in sorted(launch.secret_args.items())],
        "wait_for_leader_port": launch.wait_for_leader_port,
        "wait_for_leader": {
            "address": shard.leader_address,
            "port": launch.wait_for_leader_port,
            **_moving(launch.wait_for_leader_port, [run.wait_for_leader_port or 0 for run in runs]),
        }
        if launch.wait_for_leader_port
        else None,
        "wait_for_ranks": [
            {"rank": rank, "address": address, "port": port, **_moving(port, [run.wait_for_ranks[number][2] for run in runs])}
            for number, (rank, address, port) in enumerate(launch.wait_for_ranks)
        ],
        "run_args": [
            {"position": position, "values": [run.args[position] for run in runs]}
            for position, argument in enumerate(launch.args)
            if any(run.args[position] != argument for run in runs)
        ],
        "run_env": [
            {"name": name, "values": [run.env[name][0] for run in runs]}
            for name, (value, _why) in sorted(launch.env.items())
            if env.values.get(name) == value and any(run.env[name][0] != value for run in runs)
        ],
    }


def _ready(one: Rank, shard: Shard, leader: Shard, profile: Profile, engine: Engine, serves: bool) -> dict[str, t.Any]:
    """What the gate asks of this rank (docs/architecture.md, launch.json)."""
    devices = engine.devices_command(shard) if one.gpus else None
    return {
        "engine": profile.engine,
        "serves_http": serves,
        "url": _url(shard) if serves else None,
        "health_path": engine.health_path,
        "models_path": engine.models_path,
        "expect_models": engine.expected_models(profile) if serves else [],
        "adapters_path": engine.adapters_path if serves and profile.adapters else None,
        "expect_adapters": engine.expected_adapters(profile) if serves else [],
        "probe_path": engine.probe_path,
        "probe_model": profile.served_model_name,
        "key_secret": "api_key" if serves and shard.has_key else None,
        "key_protects": engine.key_protects if serves and shard.has_key else None,
        "gpu_evidence": not profile.on_cpu,
        "falls_back_to_cpu": engine.falls_back_to_cpu,
        "devices_command": {"path": devices[0], "args": list(devices[1])} if devices else None,
        "accepts_on_port": engine.accepts_on_port(shard),
        "budget_seconds": profile.ready_timeout,
        "warmup_503": engine.warmup_503,
        "leader_health": None if one.rank == 0 else {"url": _url(leader), "path": engine.health_path},
    }


def _deciding(profile: Profile) -> dict[str, t.Any]:
    """The profile without where adapters come from: with the same content at the same path a rank runs the same."""
    data = profile.as_dict()
    for adapter in data["adapters"]:
        del adapter["source"], adapter["revision"]
    return data


def _fingerprint(replica: str, profile: Profile, whole: t.Mapping[str, t.Any], request: Request) -> str:
    """16 hex digits over everything that decides how any rank runs, so that a change of one rank moves all of them together."""
    content = {
        "schema": SCHEMA,
        "replica": replica,
        "profile": _deciding(profile),
        "fabric": whole["fabric"],
        "leader": whole["leader"],
        "key": request.key_digest,
        "programs": dict(request.program_hashes),
        "shards": whole["shards"],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]
