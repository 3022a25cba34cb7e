# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters that the role uses before there is a plan. They never fail: what is wrong is the plan's to say, with everything else."""

from __future__ import annotations

import typing as t

from ansible_collections.rankzero.inference.plugins.plugin_utils import profile as profiles_of
from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Findings
from ansible_collections.rankzero.inference.plugins.plugin_utils.values import as_integer


def profile_paths(profile: t.Any, profiles: t.Any = None) -> list[str]:
    """Absolute paths of the model and the adapters of a profile (a mapping, or a name in C(profiles))."""
    chosen = _chosen(profile, profiles)
    items = [chosen, *_adapters(chosen)]
    paths = [item.get("model_path") or item.get("path") for item in items]
    return [str(path) for path in paths if isinstance(path, str) and path.startswith("/") and "\0" not in path]


def profile_adapters(profile: t.Any, profiles: t.Any = None) -> list[str]:
    """Absolute paths of a profile's adapters: their files are small enough to be hashed at every deploy."""
    chosen = _chosen(profile, profiles)
    return [path for path in profile_paths(profile, profiles) if path in [item.get("path") for item in _adapters(chosen)]]


def profile_sources(profile: t.Any, profiles: t.Any = None) -> list[dict[str, str]]:
    """What a profile says of where its adapters come from: C({path, source, sha256, revision}), each path once; unset fields are C("").

    Nothing where the adapters have a fault: the plan refuses them, and hosts must not have changed by then.
    """
    findings = Findings()
    found = {}
    for item in profiles_of.adapters({"adapters": _adapters(_chosen(profile, profiles))}, findings):
        if item.source:
            found[item.path] = {"path": item.path, "source": item.source, "sha256": item.sha256 or "", "revision": item.revision or ""}
    return [] if findings.faults else list(found.values())


def _chosen(profile: t.Any, profiles: t.Any) -> t.Mapping[str, t.Any]:
    if not isinstance(profile, t.Mapping):
        profile = profiles.get(profile) if isinstance(profiles, t.Mapping) and isinstance(profile, str) else None
    return profile if isinstance(profile, t.Mapping) else {}


def _adapters(profile: t.Mapping[str, t.Any]) -> list[t.Mapping[str, t.Any]]:
    adapters = profile.get("adapters")
    return [item for item in (adapters if isinstance(adapters, (list, tuple)) else ()) if isinstance(item, t.Mapping)]


def whole_numbers(values: t.Any) -> list[int]:
    return [number for number in map(as_integer, values if isinstance(values, (list, tuple)) else ()) if number is not None and 0 < number < 65536]


class FilterModule:
    def filters(self) -> dict[str, t.Callable[..., t.Any]]:
        return {
            "profile_adapters": profile_adapters,
            "profile_paths": profile_paths,
            "profile_sources": profile_sources,
            "whole_numbers": whole_numbers,
        }
