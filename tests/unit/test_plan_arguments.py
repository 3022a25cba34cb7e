# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Arguments of the plan's action that no template would make: they reach the plan's own faults instead of a traceback."""

from __future__ import annotations

from typing import Any

import pytest

from ansible_collections.rankzero.inference.plugins.action import replica_plan


@pytest.mark.parametrize("profile", [["glm"], [{}], 7, None, "absent", {"engine": ["sim"]}, {"engine": "no-such"}, {}])
@pytest.mark.parametrize("profiles", [{"glm": {"engine": "sim"}}, None, ["glm"], {}])
def test_a_profile_of_any_type_names_no_program_files(profile: Any, profiles: Any) -> None:
    assert tuple(replica_plan._program_files({"profile": profile, "profiles": profiles})) == ()


def test_a_named_profile_names_its_engine_s_files() -> None:
    arguments = {"profile": "glm", "profiles": {"glm": {"engine": "sim"}}}
    assert "sim_engine.py" in replica_plan._program_files(arguments)
