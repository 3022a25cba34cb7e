# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters for C(hosts:) of the playbooks: a name that matches no host is a failure there, also under --limit, where Ansible itself would end well."""

from __future__ import annotations

import typing as t

from ansible import context
from ansible.errors import AnsibleError, AnsibleFilterError
from ansible.inventory.manager import InventoryManager
from ansible.parsing.dataloader import DataLoader

Groups = t.Mapping[str, t.Iterable[str]]
NO_HOSTS = "all:!all"


def hosts_of_replica(name: t.Any, groups: Groups, hosts: t.Any = "", limit: t.Any = "") -> str:
    pattern = str(hosts or "replica_" + str(name or "").replace("-", "_"))
    if context.CLIARGS.get("syntax"):
        return pattern
    give = "Give -e replica_name=NAME and a group replica_NAME (with _ for -), or -e replica_hosts=PATTERN."
    if not name:
        raise AnsibleFilterError("replica_name is not set. " + give)
    if not _matching(pattern, groups):
        raise AnsibleFilterError("No hosts: replica_name is '%s' and there is no group or host '%s' in the inventory. %s" % (name, pattern, give))
    _check_limit(pattern, groups, limit)
    return pattern


def hosts_of_replicas(names: t.Any, groups: Groups, limit: t.Any = "", name: t.Any = "", hosts: t.Any = "") -> str:
    if names in (None, "", []) or context.CLIARGS.get("syntax"):
        return NO_HOSTS
    if isinstance(names, str) or not isinstance(names, t.Sequence) or len(set(map(str, names))) != len(names) or name or hosts:
        raise AnsibleFilterError(
            "replica_names must be a list of different names, each with a group replica_NAME (with _ for -) in the inventory, and without "
            "replica_name and replica_hosts beside it."
        )
    patterns = ["replica_" + str(one).replace("-", "_") for one in names]
    empty = [pattern for pattern in patterns if not groups.get(pattern)]
    if empty:
        raise AnsibleFilterError("replica_names: each name needs a group replica_NAME (with _ for -) in the inventory. Without hosts: %s" % ", ".join(empty))
    for pattern in patterns:
        _check_limit(pattern, groups, limit)
    return ":".join(patterns)


def known_host(name: t.Any, groups: Groups, limit: t.Any = "") -> str:
    if context.CLIARGS.get("syntax"):
        return str(name or NO_HOSTS)
    if not name:
        raise AnsibleFilterError("drain_host is not set: give -e drain_host=HOST, the name of one host of the inventory.")
    if str(name) not in {str(host) for hosts in groups.values() for host in hosts}:
        raise AnsibleFilterError("No host '%s' in the inventory: give -e drain_host=HOST." % name)
    _check_limit(str(name), groups, limit)
    return str(name)


def _check_limit(pattern: str, groups: Groups, limit: t.Any) -> None:
    if limit and not _matching(pattern, groups, str(limit)):
        raise AnsibleFilterError(
            "--limit '%s' leaves none of the hosts of '%s' (%s), so nothing would be done. Run it without --limit."
            % (limit, pattern, ", ".join(_matching(pattern, groups)))
        )


def _matching(pattern: str, groups: Groups, limit: str | None = None) -> list[str]:
    manager = InventoryManager(DataLoader(), parse=False)
    for group, members in groups.items():
        manager.add_group(str(group))
        for host in members:
            manager.add_host(str(host), group=str(group))
    try:
        manager.subset(limit)
        return [host.name for host in manager.get_hosts(pattern=pattern)]
    except AnsibleError:
        return []


class FilterModule:
    def filters(self) -> dict[str, t.Callable[..., t.Any]]:
        return {"hosts_of_replica": hosts_of_replica, "hosts_of_replicas": hosts_of_replicas, "known_host": known_host}
