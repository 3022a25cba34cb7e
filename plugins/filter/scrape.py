# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A filter over the facts of hosts, for monitoring."""

from __future__ import annotations

import typing as t

from ansible_collections.rankzero.inference.plugins.plugin_utils import hostvars, scrape


def scrape_targets(hosts: t.Sequence[str], variables: t.Any) -> list[dict[str, t.Any]]:
    return scrape.targets({str(host): hostvars.plain(hostvars.facts_of(variables[host])) for host in hosts})


class FilterModule:
    def filters(self) -> dict[str, t.Callable[..., t.Any]]:
        return {"scrape_targets": scrape_targets}
