# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a play's hosts are taken from: a name without hosts, or a limit that leaves none of them, must not end well."""

from __future__ import annotations

from typing import Any

import pytest
from ansible.errors import AnsibleFilterError

from ansible_collections.rankzero.inference.plugins.filter import hosts_of

GROUPS = {"all": ["gpu-a", "gpu-b", "gpu-c"], "ungrouped": [], "replica_glm": ["gpu-a", "gpu-b"], "replica_qwen_2": ["gpu-c"], "replica_none": []}


def refused(work: Any, *arguments: Any) -> str:
    with pytest.raises(AnsibleFilterError) as caught:
        work(*arguments)
    return str(caught.value)


def test_a_replica_has_hosts_within_the_limit() -> None:
    find = hosts_of.hosts_of_replica
    assert find("glm", GROUPS) == find("glm", GROUPS, "", "gpu-a,gpu-c") == "replica_glm" and find("qwen-2", GROUPS, None, None) == "replica_qwen_2"
    assert find("glm", GROUPS, "gpu-*:!gpu-c", "gpu-b") == "gpu-*:!gpu-c"
    assert "replica_name is not set" in refused(find, "", GROUPS)
    assert "there is no group or host 'replica_gml' in the inventory" in refused(find, "gml", GROUPS, "", "gpu-a")
    assert "no group or host 'replica_none'" in refused(find, "none", GROUPS) and "no group or host 'gpu-x'" in refused(find, "glm", GROUPS, "gpu-x")
    assert "--limit 'gpu-c' leaves none of the hosts of 'replica_glm' (gpu-a, gpu-b)" in refused(find, "glm", GROUPS, "", "gpu-c")


def test_each_of_several_replicas_has_hosts() -> None:
    find = hosts_of.hosts_of_replicas
    assert find("", GROUPS) == find([], GROUPS) == "all:!all" and find(["glm", "qwen-2"], GROUPS) == "replica_glm:replica_qwen_2"
    assert "Without hosts: replica_none, replica_x" in refused(find, ["glm", "none", "x"], GROUPS)
    for names, beside in ((["glm", "glm"], ""), ("glm", ""), ({"glm": 1}, ""), (["glm"], "glm")):
        assert "a list of different names" in refused(find, names, GROUPS, "", beside)
    assert "--limit 'gpu-a' leaves none of the hosts of 'replica_qwen_2'" in refused(find, ["glm", "qwen-2"], GROUPS, "gpu-a")


def test_a_host_is_in_the_inventory_by_its_own_name() -> None:
    assert hosts_of.known_host("gpu-c", GROUPS) == "gpu-c"
    assert "drain_host is not set" in refused(hosts_of.known_host, "", GROUPS)
    for name in ("gpu-x", "all", "gpu-*"):
        assert f"No host '{name}' in the inventory" in refused(hosts_of.known_host, name, GROUPS)
    assert "leaves none" in refused(hosts_of.known_host, "gpu-c", GROUPS, "gpu-a")
