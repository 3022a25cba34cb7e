# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One host's facts as an operator reads them: GPUs, HCAs by fabric, network, and every condition that would stop a replica."""

from __future__ import annotations

import typing as t

from ansible_collections.rankzero.inference.plugins.plugin_utils import addressing, host_facts, limit_checks, placement
from ansible_collections.rankzero.inference.plugins.plugin_utils.tables import table

Facts = t.Mapping[str, t.Any]
GIB = 1024**3


def report(host: str, facts: t.Any) -> str:
    """The whole report of one host, beginning with its name."""
    problem = host_facts.problem(facts)
    if problem:
        return "%s: %s" % (host, problem)
    known = host_facts.normalise(facts)
    parts = [_heading(host, known), _gpus(known), _hcas(known), _interfaces(known), _builds_and_shards(known), _conditions(known)]
    return "\n".join(part for part in parts if part)


def _heading(host: str, facts: Facts) -> str:
    machine, driver = facts["host"], facts["drivers"].get("nvidia") or {}
    system = "%s %s" % ((machine.get("os") or {}).get("id") or "?", (machine.get("os") or {}).get("version") or "")
    versions = "driver %s, CUDA %s" % (driver.get("driver") or "none", driver.get("cuda") or "none")
    return "%s: %s, kernel %s, %s, %s" % (host, system.strip(), machine.get("kernel") or "?", versions, machine.get("service_manager") or "no service manager")


def _gpus(facts: Facts) -> str:
    rows = []
    for gpu in facts["gpus"]:
        memory, held = gpu["memory"], [_holder(process) for process in gpu["processes"]]
        rows.append(
            [
                gpu.get("index"),
                gpu.get("model"),
                gpu.get("compute_capability"),
                "%s/%s" % (_or(memory.get("used_mib")), _or(memory.get("total_mib"))),
                gpu.get("numa_node"),
                gpu["health"].get("state"),
                held,
                gpu.get("uuid") or gpu.get("pci_bdf"),
            ]
        )
    return table(["GPU", "model", "capability", "MiB used/total", "NUMA", "health", "held by", "UUID"], rows) if rows else ""


def _holder(process: t.Mapping[str, t.Any]) -> str:
    return "%s (%s MiB)" % (process.get("shard") or "pid %s %s" % (process.get("pid"), process.get("name") or "?"), _or(process.get("used_mib")))


def _or(value: t.Any) -> t.Any:
    return "?" if value is None else value


def _hcas(facts: Facts) -> str:
    rows = []
    for port in sorted(facts["hcas"], key=lambda port: (port["fabrics"], str(port.get("pci_bdf")))):
        state = "usable" if port.get("usable") else "; ".join(port.get("reasons") or ("unknown",))
        rows.append(
            [
                port["fabrics"] or None,
                "%s:%s" % (port.get("name"), port["port"]),
                port["link_layer"],
                port.get("rate_gbps"),
                port.get("netdevs"),
                port.get("numa_node"),
                state,
            ]
        )
    return table(["fabric", "HCA port", "link", "Gb/s", "interface", "NUMA", "state"], rows) if rows else ""


def _interfaces(facts: Facts) -> str:
    rows = [
        [item.get("name"), item.get("kind"), "up" if item.get("up") else "down", item.get("speed_mbps"), item.get("mtu"), item.get("addresses")]
        for item in facts["interfaces"]
        if item.get("addresses") and item.get("kind") != "loopback"
    ]
    return table(["interface", "kind", "state", "Mb/s", "MTU", "addresses"], rows) if rows else ""


def _builds_and_shards(facts: Facts) -> str:
    lines = []
    for engine, builds in sorted(facts["engines"].items()):
        lines += [
            "  build   %s %s: version %s, fingerprint %s" % (engine, build.get("name"), build.get("version"), build.get("fingerprint")) for build in builds
        ]
    for replica, shard in sorted(facts["shards"].items()):
        lines.append(
            "  shard   %s rank %s: %s, revision %s%s"
            % (replica, shard.get("rank"), shard.get("stage"), shard.get("revision"), ", ready" if shard.get("ready") else "")
        )
    return "\n".join(lines)


def conditions(facts: Facts) -> list[str]:
    """Sentences about everything that would stop a replica on this host, or that an operator should look at first."""
    found = []
    if facts.get("cordoned"):
        found.append("cordoned by %s since %s: %s" % (facts["cordoned"].get("by"), facts["cordoned"].get("at"), facts["cordoned"].get("reason")))
    driver = facts["drivers"].get("nvidia") or {}
    if driver.get("state") not in (None, "ok", "no_gpu"):
        found.append("NVIDIA driver: %s. %s" % (driver.get("message") or driver["state"], driver.get("hint") or ""))
    found += _gpu_conditions(facts) + _limit_conditions(facts)
    resolved = addressing.loopback_name_warning(facts)
    if resolved:
        found.append("the host's own name resolves to %s only: programs that fall back to it use loopback" % resolved)
    found += ["%s are in one subnet: traffic may leave by either, whatever address it has" % pair for pair in addressing.shared_subnets(facts)]
    for engine, builds in sorted(facts["engines"].items()):
        found += ["build %s of %s: %s" % (build.get("name"), engine, problem) for build in builds for problem in build.get("problems") or ()]
    found += ["%s: %s" % item for item in sorted((facts["host"].get("errors") or {}).items())]
    return [sentence.strip() for sentence in found]


def _gpu_conditions(facts: Facts) -> list[str]:
    found = []
    for gpu in facts["gpus"]:
        name = "GPU %s" % _or(gpu.get("index"))
        found += ["%s: %s" % (name, reason) for reason in gpu["health"].get("reasons") or ()]
        if gpu["partition"].get("kind") is None and gpu["partition"].get("mode_current"):
            found.append("%s is partitioned (MIG): it cannot be given to a shard as a whole" % name)
        foreign = [placement.holder(process) for process in gpu["processes"] if not process["shard"] and placement.is_foreign(process, "")]
        if foreign:
            found.append("%s is held by %s: no replica gets it" % (name, ", ".join(foreign)))
        if placement.hidden_mib(gpu):
            found.append("%s: %d MiB are in use and no process that is listed here holds them" % (name, gpu["memory"]["unattributed_mib"]))
        if gpu.get("compute_mode") not in (None, "default"):
            found.append("%s is in compute mode %s" % (name, gpu["compute_mode"]))
    return found


def _limit_conditions(facts: Facts) -> list[str]:
    limits = facts["limits"]
    found = [trouble.text() for trouble in limit_checks.of_verbs(facts)] if facts["hcas"] else []
    found += [trouble.text() for trouble in limit_checks.of_memory(facts)] if facts["gpus"] else []
    for path, variables in sorted((limits.get("nccl_conf") or {}).items()):
        if variables:
            found.append("%s sets %s" % (path, ", ".join("%s=%s" % item for item in sorted(variables.items()))))
    return found


def _conditions(facts: Facts) -> str:
    found = conditions(facts)
    return "\n".join(["  ! %s" % sentence for sentence in found]) if found else "  nothing stands in the way of a replica"
