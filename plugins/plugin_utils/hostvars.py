# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the action plugins read from the variables of a play. No rules; only where things are found."""

from __future__ import annotations

import typing as t
from collections.abc import Mapping

FACT = "inference_node"
_PLAIN = frozenset({str, int, float, bool, type(None)})


def facts_of(variables: t.Any, recorded_first: bool = False) -> t.Any:
    """Node facts of a host: gathered ones, or the inventory variable C(inference_node) (first, where nothing was to be gathered)."""
    gathered = (variables.get("ansible_facts") or {}).get(FACT)
    recorded = variables.get(FACT)
    return (recorded or gathered) if recorded_first else (gathered or recorded)


def facts_of_play(task_vars: t.Any) -> dict[str, t.Any]:
    """host -> node facts or None, for every host of the play."""
    return {str(host): plain(facts_of(raw_variables(task_vars, host))) for host in task_vars.get("ansible_play_hosts_all") or ()}


def raw_variables(task_vars: t.Any, host: str) -> t.Any:
    """A host's variables without templating them; facts are data."""
    hostvars = task_vars["hostvars"]
    raw = getattr(hostvars, "raw_get", None)
    return raw(host) if raw is not None else hostvars[host]


def text(value: t.Any) -> str | None:
    """A plain, untagged string of a variable; unset is None."""
    return None if value is None or value == "" else str(value)


def plain(value: t.Any) -> t.Any:
    """A deep copy as plain Python containers and untagged scalars. Facts of a thousand hosts come through here, hence the order of the questions."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, (dict, Mapping)):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    for kind in (int, float):
        if isinstance(value, kind):
            return kind(value)
    return str(value)
