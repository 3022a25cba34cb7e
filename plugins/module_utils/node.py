# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One host as `inference_node` facts: every reader's part put together. Nothing is written, and no reader's failure hides another's part."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from ansible_collections.rankzero.inference.plugins.module_utils import (
    engine_builds,
    hcas,
    host,
    imex,
    leases,
    limits,
    models,
    network,
    nvidia,
    ports,
    processes,
    shard_records,
    small_files,
    topology,
    traces,
)

Facts = dict[str, Any]
RunCommand = Callable[..., tuple[int, str, str]]
SCHEMA = 1


def read(options: Mapping[str, Any], run_command: RunCommand) -> Facts:
    """`ansible_facts.inference_node` (docs/architecture.md). `options` are those of the module node_facts."""
    proc, sysfs, dev = options["proc_root"], options["sysfs_root"], options["dev_root"]
    run = without_failing(run_command)
    table = processes.ProcessTable(proc)  # a GPU node has thousands of processes: one look serves all readers
    machine = host.read(proc)
    wires = network.read(sysfs, options["network_state"])
    gpus = nvidia.read(proc, sysfs, table)
    ports_of_hcas = hcas.read(sysfs, dev, wires["interfaces"])
    allowed = limits.read(proc, sysfs, dev, options["replica_root"], machine["service_manager"])
    # IMEX is asked for below the directory that holds dev: / on a real host.
    allowed["imex"] = imex.read(run, os.path.dirname(os.path.abspath(dev)), proc, table)
    taken, unprobed = ports.read(proc, options["probe_ports"], allowed["ephemeral_ports"], table)
    machine["errors"].update(wires["errors"])
    machine["errors"].update(unprobed)
    return {
        "schema": SCHEMA,
        "gathered_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "host": machine,
        "gpus": gpus["gpus"],
        "hcas": ports_of_hcas,
        "topology": {"gpu_gpu": gpus["gpu_gpu"], "gpu_hca": topology.gpu_hca(gpus["gpus"], ports_of_hcas, sysfs)},
        "interfaces": wires["interfaces"],
        "routes": wires["routes"],
        "default_route": wires["default_route"],
        "hostname_resolves_to": wires["hostname_resolves_to"],
        "limits": allowed,
        "drivers": {"nvidia": gpus["drivers_nvidia"]},
        "engines": engine_builds.read(options["replica_root"]),
        "models": describe_models(options, machine["service_manager"]),
        "ports_in_use": taken,
        "shards": shard_records.read(options["replica_root"], proc, run, table=table),
        "cordoned": shard_records.cordoned(options["replica_root"]),
        "locks": leases.read(options["replica_root"]),
        "traces": traces.read(options["replica_root"], proc, table=table),
    }


def describe_models(options: Mapping[str, Any], service_manager: str | None) -> dict[str, Facts]:
    """`{path: model}` of the paths that were asked for; those of `checksum_paths` with the hashes of their files.

    Under supervisor a shard runs as the user who gathers, so that user's own rights count.
    """
    user = options["service_user"] if service_manager != "supervisor" else None
    hashed = set(options["checksum_paths"])
    paths = sorted(hashed.union(options["model_paths"]), key=small_files.natural_key)
    return {path: models.describe(path, user, path in hashed) for path in paths}


def without_failing(run_command: RunCommand) -> RunCommand:
    """AnsibleModule.run_command in the C locale, answering 127 for a program that is not there instead of ending the module."""

    def run(arguments: list[str], **options: Any) -> tuple[int, str, str]:
        try:
            return run_command(arguments, **dict({"environ_update": {"LC_ALL": "C"}, "handle_exceptions": False}, **options))
        except (OSError, ValueError) as error:
            return 127, "", str(error)

    return run
