# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Plain text tables and the plan as an operator reads it."""

from __future__ import annotations

import typing as t

from ansible_collections.rankzero.inference.plugins.module_utils import small_files
from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Fault, alike, report

Plan = t.Mapping[str, t.Any]


def table(heads: t.Sequence[str], rows: t.Sequence[t.Sequence[t.Any]], indent: str = "  ") -> str:
    """Columns as wide as their longest cell; numbers are not treated apart. Empty cells are C(-), and no cell writes to a terminal."""
    cells = [[_cell(cell) for cell in row] for row in rows]
    widths = [max([len(head)] + [len(row[column]) for row in cells]) for column, head in enumerate(heads)]
    lines = ["  ".join(head.ljust(width) for head, width in zip(heads, widths)).rstrip()]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cells]
    return "\n".join(indent + line for line in lines)


def _cell(value: t.Any) -> str:
    if value is None or value == "" or value == []:
        return "-"
    if isinstance(value, (list, tuple)):
        return small_files.clean(", ".join(map(str, value)))
    return small_files.clean(str(value))


def plan_text(plan: Plan) -> str:
    """The whole plan: a heading, one row for each rank, hosts that were not chosen, warnings, faults."""
    profile = plan.get("profile") or {}
    lines = ["Plan for replica %s: %s" % (plan.get("replica") or "(unnamed)", shape(profile))]
    if plan["shards"]:
        lines += ["", _ranks(plan), ""]
        lines.append("  endpoint   %s (rank 0, %s)" % (plan["leader"]["url"], plan["leader"]["host"]))
        ports = _ports(plan)
        if ports:
            lines.append("  ports      %s" % ports)
        lines.append("  fabric     %s" % (plan.get("fabric") or "none (TCP)"))
        lines.append("  revision   %s" % plan["fingerprint"])
    if plan.get("leaving"):
        lines.append("  leaving    %s (the shard there is removed)" % ", ".join(plan["leaving"]))
    if plan["not_chosen"]:
        lines += ["", "  Hosts that were not chosen:"] + ["    %s" % line for line in alike(plan["not_chosen"])]
    if plan["warnings"]:
        lines += ["", report([Fault(**warning) for warning in plan["warnings"]], "Warnings")]
    if plan["faults"]:
        lines += ["", report([Fault(**fault) for fault in plan["faults"]], "Refused, nothing was changed. Faults")]
    return "\n".join(lines)


def _ports(plan: Plan) -> str:
    """Where the ranks of a replica of several nodes meet."""
    leader = next(shard for shard in plan["shards"].values() if shard["rank"] == 0)
    if leader["nodes"] == 1:
        return ""
    tie = leader.get("tie")
    runs = tie["run_ports"] if tie else [leader["leader_port"]]
    return "the ranks meet on %d to %d, one for each run in turn%s" % (runs[0], runs[-1], "; tie on %d" % tie["port"] if tie else "")


def shape(profile: Plan) -> str:
    if not profile:
        return "no usable profile"
    size = "TP %s x PP %s over %s node(s), %s GPU(s) each" % (profile["tp"], profile["pp"], profile["nodes"], profile["gpus_per_node"])
    if not profile["gpus_per_node"]:
        size = "CPU only over %s node(s), judged without GPU evidence" % profile["nodes"]
    return "%s on %s, %s" % (profile["name"], profile["engine"], size)


def _ranks(plan: Plan) -> str:
    rows = []
    for host, shard in sorted(plan["shards"].items(), key=lambda item: item[1]["rank"]):
        gpus = [gpu["index"] if gpu["index"] is not None else gpu["uuid"] for gpu in shard["gpu_details"]]
        expected = sorted({gpu["expected_mib"] for gpu in shard["gpu_details"]})
        rows.append(
            [
                shard["rank"],
                host,
                "%s (%s)" % (shard["address"], shard["interface"]),
                gpus,
                expected,
                shard["hcas"],
                [launch["name"] for launch in shard["launches"]],
                shard["http_port"] if shard["serves_http"] else None,
            ]
        )
    return table(["rank", "host", "address", "GPUs", "MiB each at least", "HCAs", "launches", "HTTP port"], rows)
