# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Write sysfs, /proc and /dev trees of hosts that are not here, from a few lines of data.

    tree = HardwareTree(tmp_path)
    tree.pci("0000:1b:00.0", bridges=["0000:15:01.0", "0000:16:00.0", "0000:17:00.0"], numa_node=0, driver="mlx5_core")
    tree.hca("mlx5_0", pci="0000:1b:00.0", netdevs=["ens1np0"], gids=[[3, "0000:...:0a0b:0048", "RoCE v2", "ens1np0"]])
    tree.interface("ens1np0", ["10.11.0.72/16"], pci="0000:1b:00.0")
    tree.write_network_state()          # tree.network_state is its path

or, from data (also as a program: hardware_trees.py ROOT < description.json):

    build(tmp_path, {"pci": [{"bdf": ...}], "hcas": [{"name": ...}], "interfaces": [{"name": ...}], "routes": [...], "proc": {"meminfo": "..."}})

As in the kernel, devices lie in their real nested place below sys/devices and everything in sys/class and sys/bus is a relative link. What
differs from a kernel:

- An empty GID slot's type and netdev fail with EINVAL there; here the file is missing (ENOENT) or, with `empty_slots="directory"`, a
  directory (EISDIR). A reader that treats every error alike sees no difference.
- Device nodes are plain files that everyone may open, and a node that may not be opened is missing.
- Only what the collection reads is there.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from typing import Any

ZERO_GID = ":".join(["0000"] * 8)
PORT = {
    "state": "4: ACTIVE",
    "phys_state": "5: LinkUp",
    "link_layer": "Ethernet",
    "rate": "400 Gb/sec (4X NDR)",
    "lid": "0x0",
    "sm_lid": "0x0",
}
LIMITS = "%-26s%-21s%-21s%-10s\n" * 3


class HardwareTree:
    """One host below `root`: `sysfs`, `proc`, `dev` are the roots to hand to readers."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = pathlib.Path(root)
        self.sysfs, self.proc, self.dev = self.root / "sys", self.root / "proc", self.root / "dev"
        self.network_state = self.root / "network.json"
        for folder in (self.sysfs / "bus/pci/devices", self.sysfs / "class/net", self.proc, self.dev / "shm"):
            folder.mkdir(parents=True, exist_ok=True)
        self._pci: dict[str, pathlib.Path] = {}
        self._links: list[dict[str, Any]] = []
        self._addresses: list[dict[str, Any]] = []
        self._routes: list[dict[str, Any]] = []
        self._uverbs = 0

    # ---- sysfs

    def pci(
        self,
        bdf: str,
        *,
        bridges: list[str] | None = None,
        host_bridge: str | None = None,
        numa_node: int = -1,
        driver: str | None = None,
        vendor: str = "0x15b3",
        device: str = "0x1021",
        physfn: str | None = None,
    ) -> pathlib.Path:
        """A PCI function below a chain of bridges (root port, switch ports ...); the host bridge is that of the first bridge's bus."""
        chain = list(bridges or [])
        first = (chain or [bdf])[0]
        path = self.sysfs / "devices" / (host_bridge or "pci" + first.rsplit(":", 1)[0])
        for part in [*chain, bdf]:
            path = path / part
        write(path / "numa_node", numa_node)
        write(path / "vendor", vendor)
        write(path / "device", device)
        link(self.sysfs / "bus/pci/devices" / bdf, path)
        if driver:
            folder = self.sysfs / "bus/pci/drivers" / driver
            folder.mkdir(parents=True, exist_ok=True)
            link(path / "driver", folder)
        if physfn:
            link(path / "physfn", self._pci[physfn])
        self._pci[bdf] = path
        return path

    def hca(
        self,
        name: str,
        *,
        pci: str | None = None,
        node_type: str | None = "1: CA",
        node_guid: str | None = None,
        sys_image_guid: str | None = None,
        netdevs: list[str] | None = None,
        ports: dict[int, dict[str, Any]] | None = None,
        openable: bool = True,
        uverbs: bool = True,
        parent: str | None = None,
        **port: Any,
    ) -> pathlib.Path:
        """An RDMA device. Keywords that are no argument describe port 1: those of PORT, `gids` [[index, gid, type, netdev]], `gid_tbl_len`.

        A value of None leaves the file out. `uverbs=False`: the device has no verbs device; `openable=False`: its node is not in dev.
        """
        base = self._pci[pci] if pci else self.sysfs / "devices/virtual"
        path = base / "infiniband" / name
        path.mkdir(parents=True)
        link(self.sysfs / "class/infiniband" / name, path)
        if pci:
            link(path / "device", base)
        guid = node_guid or "5254:00ff:fe%02x:%04x" % (len(name), sum(name.encode()))
        for file, value in (("node_type", node_type), ("node_guid", guid), ("sys_image_guid", sys_image_guid or guid), ("parent", parent)):
            if value is not None:
                write(path / file, value)
        for netdev in netdevs or []:
            (base / "net" / netdev).mkdir(parents=True, exist_ok=True)
        for number, values in (ports or {1: port}).items():
            self._port(path / "ports" / str(number), dict(PORT, **values))
        if uverbs:
            self._verbs(name, base, openable)
        return path

    def _port(self, path: pathlib.Path, values: dict[str, Any]) -> None:
        gids = {int(entry[0]): entry[1:] for entry in values.pop("gids", [])}
        length, style = int(values.pop("gid_tbl_len", 16)), values.pop("empty_slots", "missing")
        for name in PORT:
            if values.get(name) is not None:
                write(path / name, values[name])
        for index in range(max([length] + [index + 1 for index in gids])):
            gid, *attributes = gids.get(index, [ZERO_GID])
            write(path / "gids" / str(index), gid)
            for folder, value in zip(("types", "ndevs"), attributes or [None, None]):
                place = path / "gid_attrs" / folder / str(index)
                if value is not None:
                    write(place, value)
                elif style == "directory":
                    place.mkdir(parents=True)

    def _verbs(self, name: str, base: pathlib.Path, openable: bool) -> None:
        uverbs = "uverbs%d" % self._uverbs
        self._uverbs += 1
        place = base / "infiniband_verbs" / uverbs
        write(place / "ibdev", name)
        link(self.sysfs / "class/infiniband_verbs" / uverbs, place)
        if openable:
            write(self.dev / "infiniband" / uverbs, "")

    def interface(
        self,
        name: str,
        addresses: list[str] | None = None,
        *,
        pci: str | None = None,
        up: bool = True,
        carrier: bool = True,
        mtu: int = 9000,
        kind: str | None = None,
        vlan: int | None = None,
        master: str | None = None,
        link_type: str = "ether",
        speed: int | None = None,
    ) -> None:
        """A network interface: its place in sysfs and its entries in the recorded `ip` output. `kind` is iproute2's info_kind (bond, vlan ...)."""
        base = self._pci[pci] if pci else self.sysfs / "devices/virtual"
        path = base / "net" / name
        path.mkdir(parents=True, exist_ok=True)
        link(self.sysfs / "class/net" / name, path)
        if pci:
            link(path / "device", base)
        if speed is not None:
            write(path / "speed", speed)
        flags = ["BROADCAST", "MULTICAST"] + (["UP"] if up else []) + (["LOWER_UP"] if up and carrier else [])
        entry: dict[str, Any] = {"ifname": name, "flags": flags, "mtu": mtu, "link_type": link_type, "address": "52:54:00:00:00:%02x" % len(self._links)}
        if kind:
            entry["linkinfo"] = {"info_kind": kind, "info_data": {"protocol": "802.1Q", "id": vlan} if kind == "vlan" else {}}
        if master:
            entry["master"] = master
        self._links.append(entry)
        infos = []
        for cidr in addresses or []:
            local, _slash, prefix = cidr.partition("/")
            infos.append({"family": "inet6" if ":" in local else "inet", "local": local, "prefixlen": int(prefix), "scope": "global"})
        self._addresses.append({"ifname": name, "addr_info": infos})

    def route(self, dst: str, dev: str, gateway: str | None = None, metric: int | None = None) -> None:
        """A route as `ip -j route` prints it."""
        entry: dict[str, Any] = {"dst": dst, "dev": dev, "flags": []}
        entry.update({key: value for key, value in (("gateway", gateway), ("metric", metric)) if value is not None})
        self._routes.append(entry)

    def write_network_state(self, hostname_resolves_to: list[str] | None = None) -> pathlib.Path:
        """The recorded state for `network_state`."""
        state: dict[str, Any] = {"links": self._links, "addresses": self._addresses, "routes": self._routes}
        if hostname_resolves_to is not None:
            state["hostname_resolves_to"] = hostname_resolves_to
        self.network_state.write_text(json.dumps(state), encoding="utf-8")
        return self.network_state

    # ---- proc

    def process_limits(self, memlock: int | str, nofile: int | str = 1048576, pid: str = "self", soft: int | str | None = None) -> None:
        """/proc/PID/limits with these hard limits; soft ones are the same unless given."""
        rows = (
            "Limit",
            "Soft Limit",
            "Hard Limit",
            "Units",
            "Max open files",
            soft or nofile,
            nofile,
            "files",
            "Max locked memory",
            soft or memlock,
            memlock,
            "bytes",
        )
        write(self.proc / pid / "limits", LIMITS % rows)

    def meminfo(self, **kib: int) -> None:
        """/proc/meminfo with these rows in KiB."""
        write(self.proc / "meminfo", "".join("%-16s%8d kB\n" % (name + ":", value) for name, value in kib.items()))

    def proc_file(self, name: str, content: str) -> None:
        write(self.proc / name, content)


def write(path: pathlib.Path, value: object) -> None:
    """A file with one line, as sysfs writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = str(value)
    path.write_text(text if text.endswith("\n") or not text else text + "\n", encoding="utf-8")


def link(path: pathlib.Path, target: pathlib.Path) -> None:
    """A relative link, so that the tree can be moved."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_symlink():
        path.symlink_to(os.path.relpath(target, path.parent))


def build(root: str | os.PathLike[str], description: dict[str, Any]) -> HardwareTree:
    """A host from data: the keywords of `pci`, `hca`, `interface` and `route`, and files of /proc by name."""
    tree = HardwareTree(root)
    for entry in description.get("pci", []):
        tree.pci(**entry)
    for entry in description.get("hcas", []):
        ports = entry.get("ports")
        tree.hca(**dict(entry, ports={int(number): port for number, port in ports.items()} if ports else None))
    for entry in description.get("interfaces", []):
        tree.interface(**entry)
    for entry in description.get("routes", []):
        tree.route(**entry)
    for name, content in description.get("proc", {}).items():
        tree.proc_file(name, content)
    tree.write_network_state(description.get("hostname_resolves_to"))
    return tree


if __name__ == "__main__":
    build(sys.argv[1], json.load(sys.stdin))
