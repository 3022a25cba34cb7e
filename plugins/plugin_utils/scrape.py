# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where the metrics of deployed replicas are, from the facts of their hosts, as Prometheus reads it (file_sd_config)."""

from __future__ import annotations

import typing as t
import urllib.parse

from ansible_collections.rankzero.inference.plugins.plugin_utils import engines, host_facts
from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Findings, natural_key


def targets(facts: t.Mapping[str, t.Any]) -> list[dict[str, t.Any]]:
    """One entry C({targets: [address:port], labels: {}}) for each rank that serves HTTP, by replica and host.

    Facts by inventory host; a host without whole facts has no entry. A replica that was stopped on purpose (drained) has none either, so that nothing
    is said to be down; one that failed has.
    """
    found = []
    for host in sorted(facts, key=natural_key):
        if host_facts.problem(facts[host]):
            continue
        for replica, shard in sorted(host_facts.normalise(facts[host])["shards"].items()):
            address = urllib.parse.urlsplit(shard["url"] or "").netloc
            engine = engines.load(str(shard["engine"]), Findings()) if shard["engine"] else None
            if not address or shard["stage"] == "stopped" or engine is None or not engine.metrics_path:
                continue
            labels = {"replica": replica, "engine": shard["engine"], "profile": shard["profile"] or "", "host": host, "__metrics_path__": engine.metrics_path}
            found.append({"targets": [address], "labels": labels})
    return sorted(found, key=lambda entry: (entry["labels"]["replica"], natural_key(entry["labels"]["host"])))
