# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters that the role uses before there is a plan. They never fail: what is wrong is the plan's to say, with everything else."""

from __future__ import annotations

import typing as t

from ansible_collections.rankzero.inference.plugins.plugin_utils.values import as_integer


def profile_paths(profile: t.Any, profiles: t.Any = None) -> list[str]:
    """Absolute paths of the model and the adapters of a profile (a mapping, or a name in C(profiles))."""
    if not isinstance(profile, t.Mapping):
        profile = profiles.get(profile) if isinstance(profiles, t.Mapping) and isinstance(profile, str) else None
    if not isinstance(profile, t.Mapping):
        return []
    adapters = profile.get("adapters")
    items = [profile] + [item for item in (adapters if isinstance(adapters, (list, tuple)) else ()) if isinstance(item, t.Mapping)]
    paths = [item.get("model_path") or item.get("path") for item in items]
    return [str(path) for path in paths if isinstance(path, str) and path.startswith("/") and "\0" not in path]


def whole_numbers(values: t.Any) -> list[int]:
    return [number for number in map(as_integer, values if isinstance(values, (list, tuple)) else ()) if number is not None and 0 < number < 65536]


class FilterModule:
    def filters(self) -> dict[str, t.Callable[..., t.Any]]:
        return {"profile_paths": profile_paths, "whole_numbers": whole_numbers}
