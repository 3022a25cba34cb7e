# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What each rank tries before a deploy, and what the answers of all ranks mean. Pure."""

from __future__ import annotations

import re
import typing as t

from ansible_collections.rankzero.inference.plugins.plugin_utils.tables import table

Map = t.Mapping[str, t.Any]
SOCKET_SECONDS = 30
COLLECTIVE_SECONDS = 90
MESH = "between all ranks"

_PROBLEMS = {
    "refused": "nothing listens there, or a firewall refuses: the connection was refused",
    "silent": "no answer: a firewall drops it, or there is no way to that host",
    "unreachable": "the host cannot be reached",
    "source": "this rank does not have the address that it is planned to use",
    "stranger": "something else answers there",
    "large": "small packets pass and large ones do not: the MTU differs along the way",
    "listen": "the rank cannot listen there",
}


def free_port(plan: Map, facts: t.Mapping[str, t.Any]) -> int | None:
    """One of the ports that runs of the replica meet on, free at every rank's address: the last such, as a running replica uses the first ones.

    None on a single node.
    """
    taken = {port for host, shard in plan["shards"].items() for port in _taken(facts.get(host), shard["address"])}
    return next((port for port in reversed(_run_ports(plan)) if port not in taken), None)


def meeting_port(plan: Map, facts: t.Mapping[str, t.Any], mesh: int | None) -> int | None:
    """Another such port, on which the processes of the all-reduce meet at rank 0. torch's store listens at all addresses there.

    It is none that rank 0 listens on for the sockets: a rank that is done with those may come before rank 0 has closed them.
    """
    leader, shard = next(item for item in plan["shards"].items() if item[1]["rank"] == 0)
    taken = _taken(facts.get(leader), None) | {mesh} | {entry["port"] for entry in shard["listen_ports"]}
    return next((port for port in reversed(_run_ports(plan)) if port not in taken), None)


def _run_ports(plan: Map) -> list[int]:
    tie = next((shard["tie"] for shard in plan["shards"].values() if shard["tie"]), None)
    return list(tie["run_ports"]) if tie else []


def _taken(facts: t.Any, address: str | None) -> set[int]:
    """Ports that cannot be bound at an address, or, without one, at all of them."""
    rows = facts.get("ports_in_use") if isinstance(facts, t.Mapping) else None
    known = [row for row in rows or () if isinstance(row, t.Mapping) and isinstance(row.get("port"), int)]
    return {row["port"] for row in known if address is None or row.get("address") in (None, "", "*", "0.0.0.0", "::", address)}


def endpoints(plan: Map, host: str, facts: t.Mapping[str, t.Any], mesh: int) -> list[dict[str, t.Any]]:
    """`{port, what}` of a rank that others must reach at its address: the mesh port, and its planned ones that are free now.

    HTTP is left out: it may be on another network, and is for clients.
    """
    shard = plan["shards"][host]
    taken = _taken(facts.get(host), shard["address"])
    found = [{"port": mesh, "what": MESH}]
    planned = [(entry["port"], entry["what"]) for entry in shard["listen_ports"] if entry["what"] != "HTTP" and not str(entry["address"]).startswith("127.")]
    if shard["tie"] and shard["rank"] == 0:
        planned.append((shard["tie"]["port"], "the tie of the ranks"))
    return found + [{"port": port, "what": what} for port, what in planned if port not in taken and port != mesh]


def request(plan: Map, host: str, facts: t.Mapping[str, t.Any], uses_nccl: bool, token: str) -> dict[str, t.Any]:
    """What preflight.py of one rank is told. `backend` is null where no all-reduce is to be tried; `skipped` says why."""
    shard = plan["shards"][host]
    mesh = free_port(plan, facts)
    others = [name for name in plan["shards"] if name != host]
    peers = (
        [
            {"rank": plan["shards"][name]["rank"], "address": plan["shards"][name]["address"], **end}
            for name in others
            for end in endpoints(plan, name, facts, mesh or 0)
        ]
        if mesh
        else []
    )
    meet, skipped = meeting_port(plan, facts, mesh), why_not_collective(plan, facts, uses_nccl)
    if skipped is None and len(plan["shards"]) > 1 and meet is None:
        skipped = "no second port of the replica is free on all hosts"
    local = max(len(shard["gpus"]), 1)
    leader = plan["leader"]["address"]
    launch = shard["launches"][-1]
    return {
        "rank": shard["rank"],
        "address": shard["address"],
        "token": token,
        "listen": endpoints(plan, host, facts, mesh) if mesh else [],
        "peers": peers,
        "seconds": SOCKET_SECONDS,
        "collective_seconds": COLLECTIVE_SECONDS,
        "path": launch["path"],
        "env": dict(launch["env"]),
        "skipped": skipped,
        "backend": None if skipped else "nccl" if shard["gpus"] else "gloo",
        "local_size": local,
        "first": shard["rank"] * local,
        "world": local * len(plan["shards"]),
        "meeting": "tcp://%s:%d" % ("[%s]" % leader if ":" in leader else leader, meet) if meet else "tcp://127.0.0.1:%d" % shard["leader_port"],
    }


def why_not_collective(plan: Map, facts: t.Mapping[str, t.Any], uses_nccl: bool) -> str | None:
    """Why no all-reduce can be tried, or None. GPUs that the running replica holds are left alone."""
    if not uses_nccl:
        return "%s does not use NCCL" % plan["engine"]
    for host, shard in sorted(plan["shards"].items(), key=lambda item: item[1]["rank"]):
        known = facts.get(host)
        for gpu in (known.get("gpus") if isinstance(known, t.Mapping) else None) or ():
            held = next((process for process in gpu.get("processes") or () if str(process.get("shard") or "").rpartition("/")[0] == plan["replica"]), None)
            if gpu.get("uuid") in shard["gpus"] and held:
                return "GPU %s of %s is in use by the running replica" % (gpu.get("index"), host)
    return None


# ---- what NCCL said

_VIA = re.compile(r"NCCL INFO Channel \S+ ?: (\d+)\[\S+\] -> (\d+)\[\S+\](?: \[(?:send|receive)\])? via (NET/[A-Za-z0-9_]+|P2P\S*|SHM\S*)(\S*)")
_USING = re.compile(r"NCCL INFO NET/(IB|Socket) : Using (.+)")
_HCA = re.compile(r"\[\d+\]([A-Za-z0-9_.-]+:\d+)/(IB|RoCE)")
_INTERFACE = re.compile(r"\[\d+\]([A-Za-z0-9_.@-]+):")
_OUT_OF_BAND = re.compile(r"(?:Bootstrap ?: Using |OOB )([A-Za-z0-9_.@-]+):")
_WARN = re.compile(r"NCCL WARN (.*)")
_PEER = re.compile(r"peer ([0-9A-Fa-f.:]+|[A-Za-z0-9.-]+)<\d+>")
_VERSION = re.compile(r"NCCL version (\S+)")


def parse_nccl(lines: t.Sequence[str]) -> dict[str, t.Any]:
    """`{version, transports: {NET/IB: channels}, gdr, hcas, interfaces, bootstrap, warnings, peers}` from lines of NCCL_DEBUG=INFO.

    The formats are those of NCCL's src/transport (net.cc, net_ib.cc, net_socket.cc, p2p.cc, shm.cc) and src/bootstrap.cc.
    """
    told: dict[str, t.Any] = {"version": None, "transports": {}, "gdr": False, "hcas": [], "interfaces": [], "bootstrap": None, "warnings": [], "peers": []}
    for line in lines:
        via, using, warning = _VIA.search(line), _USING.search(line), _WARN.search(line)
        version, bootstrap = _VERSION.search(line), _OUT_OF_BAND.search(line)
        if via:
            kind = via.group(3).split("/")[0] if not via.group(3).startswith("NET/") else via.group(3)
            told["transports"][kind] = told["transports"].get(kind, 0) + 1
            told["gdr"] = told["gdr"] or "GDRDMA" in via.group(4)
        if using and using.group(1) == "IB":
            told["hcas"] = sorted({*told["hcas"], *(name for name, _kind in _HCA.findall(using.group(2)))})
        elif using:
            told["interfaces"] = sorted({*told["interfaces"], *_INTERFACE.findall(using.group(2))})
        if bootstrap:
            told["bootstrap"] = told["bootstrap"] or bootstrap.group(1)
        if version:
            told["version"] = told["version"] or version.group(1)
        if warning and warning.group(1) not in told["warnings"]:
            told["warnings"].append(warning.group(1))
            told["peers"] += [peer for peer in _PEER.findall(warning.group(1)) if peer not in told["peers"]]
    return told


def carried_by(told: Map) -> str | None:
    """RDMA, sockets, or what stays within a host; None where NCCL said nothing about it."""
    kinds = told["transports"]
    network = sorted(kind for kind in kinds if kind.startswith("NET/"))
    if not network:
        return "NVLink, PCIe or shared memory (%s)" % ", ".join(sorted(kinds)) if kinds else None
    if network == ["NET/Socket"]:
        return "sockets over %s" % (", ".join(told["interfaces"]) or "an unknown interface")
    if "NET/Socket" in network:
        return "RDMA and sockets, both (%s)" % ", ".join(network)
    return "RDMA over %s%s" % (", ".join(told["hcas"]) or network[0][4:], " with GPUDirect" if told["gdr"] else ", without GPUDirect")


# ---- the verdict


def verdict(plan: Map, answers: t.Mapping[str, t.Any], requests: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """`{ok, failures: [text], notes: [text], transport, ranks: [...]}` over all ranks. C(answers): host -> what was collected, or None.

    C(requests): host -> what it was told. A rank that gave no answer is a failure of its own, and not also one of all its peers.
    """
    names = {shard["rank"]: host for host, shard in plan["shards"].items()}
    failures: list[str] = []
    notes: list[str] = []
    rows: list[dict[str, t.Any]] = []
    lines: list[str] = []
    silent = {shard["rank"] for host, shard in plan["shards"].items() if not _result(answers.get(host))}
    bad = []
    for rank in sorted(names):
        host, result = names[rank], _result(answers.get(names[rank]))
        if result is None:
            failures.append("%s gave no answer%s" % (_who(plan, host), _last_words(answers.get(host))))
            continue
        if result.get("problem"):
            failures.append("%s: %s" % (_who(plan, host), result["problem"]))
        bad += [(rank, row) for row in result.get("sockets") or () if not row["ok"] and row["rank"] not in silent - {rank}]
        rows.append(_row(plan, host, result))
        failures += _collective_failures(plan, host, result.get("collective"))
        lines += (result.get("collective") or {}).get("nccl") or []
    failures = _of_sockets(plan, names, bad) + failures
    told = parse_nccl(lines)
    skipped = sorted({text for text in [_skipped(requests.get(host), _result(answers.get(host))) for host in plan["shards"]] if text})
    notes += ["No all-reduce was tried: %s." % text for text in skipped]
    if len(plan["shards"]) == 1:
        notes.append("A single node has no network between ranks to try.")
    notes += ["NCCL warned: %s" % text for text in told["warnings"][:5]]
    transport = carried_by(told)
    if transport and transport.startswith("sockets") and plan.get("fabric"):
        failures.append("The plan chose fabric %s, and sockets carried the all-reduce: NCCL could not use the HCAs" % plan["fabric"])
    return {"ok": not failures, "failures": failures, "notes": notes, "transport": transport, "nccl": told, "ranks": rows}


def _result(answer: t.Any) -> Map | None:
    result = answer.get("result") if isinstance(answer, t.Mapping) else None
    return result if isinstance(result, t.Mapping) else None


def _last_words(answer: t.Any) -> str:
    log = answer.get("log") if isinstance(answer, t.Mapping) else None
    told = (log or [None])[-1] or (answer.get("msg") if isinstance(answer, t.Mapping) else None)
    return ": %s" % told if told else ""


def _who(plan: Map, host: str) -> str:
    shard = plan["shards"][host]
    return "rank %d (%s, %s %s)" % (shard["rank"], host, shard["interface"], shard["address"])


def _skipped(told: t.Any, result: Map | None) -> str | None:
    collective = (result or {}).get("collective")
    if isinstance(told, t.Mapping) and told.get("skipped"):
        return str(told["skipped"])
    if isinstance(collective, t.Mapping):
        return collective.get("skipped")
    return "the engine is no Python program" if result is not None and isinstance(told, t.Mapping) and told.get("backend") else None


def _of_sockets(plan: Map, names: t.Mapping[int, str], bad: t.Sequence[tuple[int, Map]]) -> list[str]:
    """One sentence for each pair and problem; where nobody reaches a rank, one for that rank."""
    others = len(names) - 1
    by_target: dict[tuple[int, str], set[int]] = {}
    for rank, row in bad:
        by_target.setdefault((row["rank"], row["problem"]), set()).add(rank)
    found, told = [], set()
    for rank, row in bad:
        key, target = (row["rank"], row["problem"]), names.get(row["rank"], "?")
        everyone = others > 1 and len(by_target[key]) == others and row["problem"] != "listen"
        mark = (key, None if everyone else rank)
        if mark in told:
            continue
        told.add(mark)
        ports = sorted(
            {"%d (%s)" % (other["port"], other["what"]) for one, other in bad if (other["rank"], other["problem"]) == key and (everyone or one == rank)}
        )
        source = "no other rank" if everyone else _who(plan, names[rank])
        if row["problem"] == "listen":
            text = "%s cannot listen on port %s" % (source, ", ".join(ports))
        else:
            text = "%s%s reaches %s port %s" % (source, "" if everyone else " never", _who(plan, target), ", ".join(ports))
        found.append("%s: %s%s" % (text, _PROBLEMS[row["problem"]], " (%s)" % row["error"] if row["error"] else ""))
    return found


def _collective_failures(plan: Map, host: str, collective: t.Any) -> list[str]:
    if not isinstance(collective, t.Mapping) or collective.get("ok") is not False:
        return []
    told = parse_nccl(collective.get("nccl") or ())
    addresses = {shard["address"]: _who(plan, name) for name, shard in plan["shards"].items()}
    addresses.update(
        {hca["gid_address"]: _who(plan, name) for name, shard in plan["shards"].items() for hca in shard.get("hca_details") or () if hca.get("gid_address")}
    )
    peers = ["peer %s" % addresses.get(peer, peer) for peer in told["peers"]]
    where = "; ".join(
        filter(None, [", ".join(peers), "HCAs %s" % ", ".join(told["hcas"]) if told["hcas"] else "", told["warnings"][0] if told["warnings"] else ""])
    )
    errors = sorted({str(entry.get("error")) for entry in collective.get("workers") or () if not entry.get("ok")})
    return ["%s: the all-reduce (%s) failed: %s%s" % (_who(plan, host), collective["backend"], "; ".join(errors), " [%s]" % where if where else "")]


def _row(plan: Map, host: str, result: Map) -> dict[str, t.Any]:
    collective, sockets = result.get("collective") or {}, result.get("sockets") or ()
    slow = [row["seconds"] for row in sockets if row["seconds"] is not None]
    told = {True: "ok", False: "failed", None: "not tried"}[collective.get("ok")]
    return {
        "rank": plan["shards"][host]["rank"],
        "host": host,
        "interface": plan["shards"][host]["interface"],
        "reached": "%d of %d" % (sum(row["ok"] for row in sockets), len(sockets)),
        "slowest_ms": round(max(slow) * 1000) if slow else None,
        "collective": "%s %s" % (collective.get("backend"), told) if collective.get("backend") else told,
    }


def text(plan: Map, found: Map) -> str:
    cells = [[row["rank"], row["host"], row["interface"], row["reached"], row["slowest_ms"], row["collective"]] for row in found["ranks"]]
    parts = ["Preflight of replica %s: %s" % (plan["replica"], "passed" if found["ok"] else "FAILED")]
    parts += [table(["rank", "host", "interface", "ports reached", "slowest, ms", "all-reduce"], cells)] if cells else []
    parts += ["  carried by %s" % found["transport"]] if found["transport"] else []
    return "\n".join(parts + ["  ! %s" % failure for failure in found["failures"]] + ["  %s" % note for note in found["notes"]])
