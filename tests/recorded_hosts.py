# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The machines of tests/fixtures/hardware as trees and driver states that node_facts can be run against.

    hosts = recorded_hosts.write("gid_head4_worker3", tmp_path)      # {"spark-head": Recorded(tree, nvml), "spark-worker": ...}

A fixture of kind `machine` describes its hosts whole, in the keywords of HardwareTree (`machine` below), with what must come of them
(tests/machine_expectations.py): a new one is a file and nothing more. The others keep the shape of the report that they are from; each has a function here,
under its name. What a report does not tell (an address of the management interface, a GPU beside the HCAs it is about) is made up here, the same on every
host, so that the plan can be asked as well.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import pathlib
import re
from typing import Any

import hardware_trees
import yaml

FIXTURES = pathlib.Path(__file__).resolve().parent / "fixtures" / "hardware"
HostTree = hardware_trees.HardwareTree
H100 = 'name="NVIDIA H100 80GB HBM3" cc=9.0 total=81559 reserved=551'
# Away from what the reports name.
GPU = "0000:e1:00.0"


@dataclasses.dataclass
class Recorded:
    """One host. C(nvml) is the driver's state (tests/fake_nvml/README.md); None: no driver is loaded. C(library): libnvidia-ml.so.1 can be found.

    C(library_version): what the file behind that link is called. C(resolves_to): what the host's own name stands for.
    """

    tree: HostTree
    nvml: str | None = None
    library: bool = True
    library_version: str | None = None
    resolves_to: tuple[str, ...] = ("127.0.0.1",)


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FIXTURES / (name + ".yaml")).read_text(encoding="utf-8"))
    return found


def names() -> list[str]:
    return sorted(path.stem for path in FIXTURES.glob("*.yaml"))


def write(name: str, root: pathlib.Path) -> dict[str, Recorded]:
    """Every host of a fixture below C(root)."""
    case = load(name)
    return (machines if case["kind"] == "machine" else WRITERS[name])(case, root)


# ---- hosts that are described whole


def machines(case: dict[str, Any], root: pathlib.Path) -> dict[str, Recorded]:
    return {name: machine(fields or {}, root / name) for name, fields in case["hosts"].items()}


def machine(fields: dict[str, Any], root: pathlib.Path) -> Recorded:
    """One host of a fixture of kind C(machine).

    C(planned: N) makes it one that a replica fits on (C(planned_host)), with a GPU of its own unless C(nvml) describes some. C(pci), C(hcas), C(interfaces)
    and C(routes) are keywords of HardwareTree; GIDs are written as addresses; a PCI function of NVIDIA's is a GPU. C(proc) and C(files) are files below
    /proc and /, C(processes) those of /proc. C(interfaces: NAME: [address]) is enough for a plain one.
    """
    known = {"planned", "nvml", "library", "library_version", "pci", "hcas", "interfaces", "routes", "proc", "files", "processes", "memlock", "meminfo"}
    assert set(fields) <= known | {"resolves_to"}, sorted(set(fields) - known)
    number, state = fields.get("planned"), fields.get("nvml")
    one = planned_host(root, number, gpu=state is None) if number else Recorded(HostTree(root))
    tree = one.tree
    if not number:
        common(tree)
    for entry in fields.get("pci", ()):
        more = {"driver": "nvidia"} if entry.get("vendor") == "0x10de" else {"driver": "mlx5_core"}
        path = tree.pci(**{**more, **entry})
        if entry.get("vendor") == "0x10de":
            hardware_trees.write(path / "class", "0x030200")
    for entry in fields.get("hcas", ()):
        gids = {"gids": [[index, gid_text(address), *rest] for index, address, *rest in entry["gids"]]} if "gids" in entry else {}
        ports = {"ports": {int(port): values for port, values in entry["ports"].items()}} if "ports" in entry else {}
        tree.hca(**{**entry, **gids, **ports})
    for name, entry in fields.get("interfaces", {}).items():
        tree.interface(name, **(entry if isinstance(entry, dict) else {"addresses": entry}))
    for entry in fields.get("routes", ()):
        tree.route(**entry)
    for name, text in fields.get("proc", {}).items():
        tree.proc_file(name, text)
    for name, text in fields.get("files", {}).items():
        hardware_trees.write(tree.root / name, text)
        (tree.root / name).chmod(0o755 if text.startswith("#!") else 0o644)
    for entry in fields.get("processes", ()):
        process(tree, **entry)
    if "memlock" in fields:
        for pid in ("self", "1"):
            tree.process_limits(fields["memlock"], pid=pid)
    if "meminfo" in fields:
        tree.meminfo(**fields["meminfo"])
    one.nvml = one.nvml if state is None else state
    one.library, one.library_version = fields.get("library", True), fields.get("library_version")
    one.resolves_to = tuple(fields.get("resolves_to", one.resolves_to))
    return one


# ---- parts


def gid_text(address: str) -> str:
    """An address as sysfs writes it in a GID table."""
    value = ipaddress.ip_address(address)
    number = int(value) if value.version == 6 else int(value) + (0xFFFF << 32)
    digits = f"{number:032x}"
    return ":".join(digits[at : at + 4] for at in range(0, 32, 4))


def v2(address: str, netdev: str, index: int = 3) -> list[Any]:
    return [index, gid_text(address), "RoCE v2", netdev]


def error_name(text: str) -> str:
    """`NVMLError_GpuIsLost` as the state file spells it: `GPU_IS_LOST`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", text.removeprefix("NVMLError_")).upper()


def gpu_function(tree: HostTree, bdf: str, driver: str | None = "nvidia", **more: Any) -> None:
    hardware_trees.write(tree.pci(bdf, vendor="0x10de", driver=driver, **more) / "class", "0x030200")


def planned_host(root: pathlib.Path, number: int, gpu: bool = True) -> Recorded:
    """A host that a replica of one GPU fits on: systemd, a management interface `eno9` at 10.0.9.<number>, an H100 of its own."""
    tree = HostTree(root)
    common(tree)
    tree.interface("eno9", [f"10.0.9.{number}/24"], mtu=1500)
    tree.route("default", "eno9", gateway="10.0.9.254")
    tree.route("10.0.9.0/24", "eno9")
    if gpu:
        gpu_function(tree, GPU)
    return Recorded(tree, f"driver 580.95.05\ngpu 0 uuid=GPU-{number:04d}-%d pci={GPU} {H100}\n" if gpu else None)


def common(tree: HostTree) -> None:
    tree.meminfo(MemTotal=1 << 30, MemAvailable=1 << 29, CmaTotal=0, CmaFree=0)
    for pid in ("self", "1"):
        tree.process_limits("unlimited", pid=pid)
    tree.proc_file("sys/net/ipv4/ip_local_port_range", "32768\t60999")
    tree.proc_file("1/comm", "systemd")


def interfaces_of_gids(tree: HostTree, gids: list[Any], cidr: str | None) -> None:
    """The interfaces that a GID table implies, once each; prefix lengths are those of the fabric, else /24."""
    prefix = (cidr or "/24").partition("/")[2]
    for netdev in dict.fromkeys(entry[3] for entry in gids):
        parsed = dict.fromkeys(ipaddress.IPv6Address(entry[1]) for entry in gids if entry[3] == netdev)
        vlan = netdev.partition(".")[2]
        addresses = [f"{address.ipv4_mapped}/{prefix}" for address in parsed if address.ipv4_mapped]
        tree.interface(netdev, addresses, kind="vlan" if vlan else None, vlan=int(vlan) if vlan else None)


def gpus_of(one: Recorded) -> list[dict[str, Any]]:
    """The GPUs of a driver's state with their addresses in sysfs (NVML writes a domain with eight digits), as far as distances need them."""
    found = re.findall(r"^gpu (\d+) uuid=(\S+) pci=(\S+)", one.nvml or "", re.MULTILINE)
    return [{"uuid": uuid.replace("%d", index), "pci_bdf": address[-12:].lower()} for index, uuid, address in found]


def processes(lines: str, host_view: dict[str, Any]) -> str:
    for gpu, rows in host_view.items():
        lines += "".join(f"proc gpu={gpu[-1]} pid={row['pid']} mib={row['used']}B\n" for row in rows)
    return lines


def process(tree: HostTree, pid: int, comm: str = "python", cgroup: str = "/user.slice", environ: str = "") -> None:
    tree.proc_file(f"{pid}/comm", comm + "\n")
    tree.proc_file(f"{pid}/stat", f"{pid} ({comm}) S 1 {pid} {pid} " + "0 " * 15 + "100 0\n")
    tree.proc_file(f"{pid}/cgroup", f"0::{cgroup}\n")
    (tree.proc / str(pid) / "environ").write_bytes(environ.encode())


# ---- GID tables


def gid_tables(case: dict[str, Any], root: pathlib.Path) -> dict[str, Recorded]:
    """The recorded hosts, and for each a `<host>-peer`: the same HCAs with plain tables, so that one fabric of both can be planned."""
    hosts = {}
    for number, host in enumerate(case["hosts"], 1):
        right = case["expect"]["right_gid_index"][host["name"]]
        tables = {host["name"]: host["hcas"], host["name"] + "-peer": [plain_partner(hca, right[hca["dev"]]) for hca in host["hcas"]]}
        for name, hcas in tables.items():
            hosts[name] = one = planned_host(root / name, number + (100 if name.endswith("-peer") else 0))
            for hca in hcas:
                one.tree.hca(hca["dev"], **{key: value for key, value in hca.items() if key not in ("dev", "port")})
            interfaces_of_gids(one.tree, [entry for hca in hcas for entry in hca["gids"]], case.get("fabric_cidr"))
    return hosts


def plain_partner(hca: dict[str, Any], index: int) -> dict[str, Any]:
    """An HCA whose table holds one address at the usual place: the neighbour, in its subnet, of the one at C(index)."""
    gid, netdev = next((entry[1], entry[3]) for entry in hca["gids"] if entry[0] == index)
    address = ipaddress.IPv6Address(gid).ipv4_mapped
    assert address
    neighbour = str(address + 100)
    gids = [[2, gid_text(neighbour), "IB/RoCE v1", netdev], v2(neighbour, netdev)]
    return {**{key: hca[key] for key in ("dev", "link_layer", "state")}, "gids": gids}


def gid_drift_over_time(case: dict[str, Any], root: pathlib.Path) -> dict[str, Recorded]:
    """One host, read twice: hosts `at-0` and `at-1800`."""
    hosts = {}
    for table in case["tables"]:
        one = planned_host(root / f"at-{table['at']}", 1)
        one.tree.hca(case["dev"], gids=table["gids"], netdevs=["ens1np0"])
        interfaces_of_gids(one.tree, table["gids"], None)
        hosts[f"at-{table['at']}"] = one
    return hosts


# ---- HCAs and fabrics


def fabric_bond_over_two_cards(case: dict[str, Any], root: pathlib.Path) -> dict[str, Recorded]:
    hosts = {}
    for number, name in enumerate(("a", "b"), 1):
        hosts[name] = one = planned_host(root / name, number)
        for hca in case["hcas"]:
            one.tree.pci(hca["pci"], driver="mlx5_core")
            one.tree.hca(hca["dev"], pci=hca["pci"], netdevs=[hca["netdev"]], gids=[v2(f"10.80.0.{number}", hca["gid_ndev"])])
            one.tree.interface(hca["netdev"], pci=hca["pci"], master="bond0")
        one.tree.interface("bond0", [f"10.80.0.{number}/24"], kind="bond")
    return hosts


def fabric_mixed_ib_and_ethernet(case: dict[str, Any], root: pathlib.Path) -> dict[str, Recorded]:
    """Hosts a and b: the Ethernet port has no address. c and d: it has one, in a subnet that both share."""
    hosts = {}
    for number, name in enumerate("abcd", 1):
        hosts[name] = one = planned_host(root / name, number)
        for hca in case["hcas"]:
            one.tree.pci(hca["pci"], driver="mlx5_core")
            values = {key: hca[key] for key in ("link_layer", "state", "rate", "sm_lid")}
            if "gid0" in hca:
                values.update(lid=hex(int(hca["lid"], 16) + 16 * number), gids=[[0, hca["gid0"], "IB/RoCE v1", None]])
            elif name in "cd":
                values.update(netdevs=[hca["netdev"]], gids=[v2(f"10.0.0.{number}", hca["netdev"])])
            one.tree.hca(hca["dev"], pci=hca["pci"], **values)
        one.tree.interface("ens4f0", [f"10.0.0.{number}/24"])
    return hosts


def fabric_unequal_hca_count(case: dict[str, Any], root: pathlib.Path) -> dict[str, Recorded]:
    hosts = {}
    for at, host in enumerate(case["hosts"]):
        hosts[host["name"]] = one = planned_host(root / host["name"], at + 1)
        for number, device in enumerate(host["sysfs"]):
            address = f"10.11.0.{at * 10 + number + 1}"
            one.tree.hca(device, netdevs=[f"eth{number}"], openable=device in host["openable"], gids=[v2(address, f"eth{number}")])
            one.tree.interface(f"eth{number}", [address + "/24"])
    return hosts


def hca_efa(case: dict[str, Any], root: pathlib.Path) -> dict[str, Recorded]:
    hosts = {}
    for number, name in enumerate(("a", "b"), 1):
        hosts[name] = one = planned_host(root / name, number)
        for hca in case["hcas"]:
            one.tree.pci(hca["pci"], driver=hca["driver"], vendor="0x1d0f")
            one.tree.hca(hca["dev"], pci=hca["pci"], node_type=hca["node_type"], ports=hca["ports"])
    return hosts


def hca_prefix_collision(case: dict[str, Any], root: pathlib.Path) -> dict[str, Recorded]:
    """Two hosts with the twelve devices, each on a rail of its own."""
    hosts = {}
    for number, name in enumerate(("a", "b"), 1):
        hosts[name] = one = planned_host(root / name, number)
        for at, device in enumerate(case["devices"]):
            one.tree.hca(device, netdevs=[f"eth{at}"], gids=[v2(f"10.12.{at}.{number}", f"eth{at}")])
            one.tree.interface(f"eth{at}", [f"10.12.{at}.{number}/24"])
    return hosts


def hca_sysfs_strings(case: dict[str, Any], root: pathlib.Path) -> dict[str, Recorded]:
    """Host `rates`: a device for each rate; `states`, `phys`: for each state; `kinds`: for each node type and link layer."""
    hosts = {name: Recorded(HostTree(root / name)) for name in ("rates", "states", "phys", "kinds")}
    for number, (text, _rate) in enumerate(case["rate"]):
        hosts["rates"].tree.hca(f"d{number}", rate=text)
    for what, key in (("states", "state"), ("phys", "phys_state")):
        for number, text in enumerate(case[key]):
            hosts[what].tree.hca(f"d{number}", **{key: text})
    layers = {"1: CA": case["link_layer"][:2], "4: RNIC": ["Ethernet"], "7: unspecified": ["Unknown"]}
    for number, (node_type, layer) in enumerate((kind, layer) for kind in case["node_type"] for layer in layers[kind]):
        hosts["kinds"].tree.pci(f"0000:{number + 16:02x}:00.0", driver="efa" if layer == "Unknown" else "mlx5_core")
        hosts["kinds"].tree.hca(f"d{number}", pci=f"0000:{number + 16:02x}:00.0", node_type=node_type, link_layer=layer)
    return hosts


def spark_three_node_ring(case: dict[str, Any], root: pathlib.Path) -> dict[str, Recorded]:
    hosts = {}
    for number, host in enumerate(case["hosts"], 1):
        tree = HostTree(root / host["name"])
        common(tree)
        tree.meminfo(MemTotal=127600748, MemAvailable=118566368, CmaTotal=0, CmaFree=0)
        for device, netdev in case["hcas"].items():
            bdf = f"{2 if 'P2' in device else 0:04d}:01:00.{device[-1]}"
            tree.pci(bdf, driver="mlx5_core")
            tree.hca(device, pci=bdf, netdevs=[netdev], gids=[v2(host["addr"][netdev].partition("/")[0], netdev)])
            tree.interface(netdev, [host["addr"][netdev]], pci=bdf)
        for name, cidr in host["mgmt"].items():
            tree.interface(name, [cidr])
            tree.route("default", name, gateway="192.0.2.254")
            tree.route("192.0.2.0/24", name)
        gpu_function(tree, "000f:01:00.0")
        state = f'driver 580.95.05\ngpu 0 uuid=GPU-{number:04d}-%d pci=0000000F:01:00.0 name="NVIDIA GB10" cc=12.1 memory=unsupported mig=unsupported\n'
        hosts[host["name"]] = Recorded(tree, state)
    return hosts


def topo_gb300_two_pfs_same_guid(case: dict[str, Any], root: pathlib.Path, subnets: tuple[int, int] = (0, 1)) -> dict[str, Recorded]:
    """C(subnets): that of each function, 10.11.<subnet>.0/24."""
    hosts = {}
    for number, name in enumerate(("a", "b"), 1):
        hosts[name] = one = planned_host(root / name, number, gpu=False)
        gpu_function(one.tree, "0009:01:00.0", bridges=["0009:00:00.0"])
        for at, hca in enumerate(case["hcas"]):
            one.tree.pci(hca["pci"], bridges=["0009:00:00.0"], driver="mlx5_core")
            guids = {key: hca[key] for key in ("node_guid", "sys_image_guid")}
            address = f"10.11.{subnets[at]}.{number * 10 + at}"
            one.tree.hca(hca["dev"], pci=hca["pci"], netdevs=[f"eth{at}"], gids=[v2(address, f"eth{at}")], **guids)
            one.tree.interface(f"eth{at}", [address + "/24"], pci=hca["pci"])
        one.nvml = f'driver 580.95.05\ngpu 0 uuid=GPU-{number:04d}-%d pci=00000009:01:00.0 name="NVIDIA GB300" cc=10.3 total=284208 reserved=700\n'
    return hosts


# ---- topology


def place(tree: HostTree, root: int, switches: list[int], slot: int, bus: int, numa: int) -> tuple[str, dict[str, Any]]:
    """The address of a function behind a chain of switches below one root port, and the keywords that put it there."""
    chain = [f"0000:{root:02x}:01.0"]
    for depth, switch in enumerate(switches):
        last = depth == len(switches) - 1
        chain += [f"0000:{switch:02x}:00.0", f"0000:{switch + 1:02x}:{slot if last else depth + switches[depth + 1] % 16:02x}.0"]
    return f"0000:{bus:02x}:00.0", {"bridges": chain, "numa_node": numa}


def topo_h100_ten_nics(case: dict[str, Any], root: pathlib.Path) -> dict[str, Recorded]:
    """Two such boxes. All ten NICs are in one InfiniBand fabric, those of storage too."""
    hosts = {}
    beside = {nic: gpu for gpu, nic in case["pix"].items()}
    for at, name in enumerate(("a", "b")):
        hosts[name] = one = planned_host(root / name, at + 1, gpu=False)
        lines = "driver 580.95.05\n"
        for number in range(case["nics"]):
            bus, gpu = 0x10 + number * 16, beside.get(f"NIC{number}")
            numa = 1 if gpu in case["cpu_affinity"]["numa1"] else 0 if gpu else 2 + number
            bdf, where = place(one.tree, bus, [bus + 1], 1, bus + 4, numa)
            one.tree.pci(bdf, driver="mlx5_core", **where)
            gid = f"fe80:0000:0000:0000:0c42:a103:{at:04x}:{number:04x}"
            one.tree.hca(f"mlx5_{number}", pci=bdf, link_layer="InfiniBand", lid=hex(1 + at * 16 + number), sm_lid="0x1", gids=[[0, gid, "IB/RoCE v1", None]])
            if gpu:
                bdf, where = place(one.tree, bus, [bus + 1], 0, bus + 3, numa)
                gpu_function(one.tree, bdf, **where)
                lines += f"gpu {gpu[3:]} uuid=GPU-{at}-%d pci={bdf} nvlinks=18 {H100}\n"
        one.nvml = lines
    return hosts


def topo_dgx2_shared_switch(case: dict[str, Any], root: pathlib.Path) -> dict[str, Recorded]:
    """The first five GPUs. mlx5_0 and mlx5_1 lie behind switches below one root port, as do mlx5_2 and mlx5_3."""
    islands = {"mlx5_0": (0x10, 0x11, 0x20, 0), "mlx5_1": (0x10, 0x11, 0x28, 0), "mlx5_2": (0x30, 0x31, 0x40, 0), "mlx5_3": (0x30, 0x31, 0x48, 0)}
    islands.update({f"mlx5_{number}": (0x50 + 0x10 * number, 0x51 + 0x10 * number, 0x58 + 0x10 * number, 1) for number in range(4, 10)})
    nearest = case["expect"]["nearest"]
    one = planned_host(root, 1, gpu=False)
    lines = "driver 580.95.05\n"
    for device, (port, outer, inner, numa) in islands.items():
        bdf, where = place(one.tree, port, [outer, inner], 0, inner + 2, numa)
        one.tree.pci(bdf, driver="mlx5_core", **where)
        one.tree.hca(device, pci=bdf)
        for slot, gpu in enumerate((name for name, owner in nearest.items() if owner == device), 1):
            bdf, where = place(one.tree, port, [outer, inner], slot, inner + 2 + slot, numa)
            gpu_function(one.tree, bdf, **where)
            lines += f'gpu {gpu[3:]} uuid=GPU%d pci={bdf} name="Tesla V100-SXM3-32GB" cc=7.0 total=32510 reserved=300\n'
    one.nvml = lines
    return {"dgx2": one}


# ---- interfaces


def iface_hostname_loopback(case: dict[str, Any], root: pathlib.Path) -> dict[str, Recorded]:
    tree = HostTree(root)
    common(tree)
    for interface in case["interfaces"]:
        if interface.get("kind") != "rdma only":
            tree.interface(interface["name"], interface["ipv4"], link_type="loopback" if interface["name"] == "lo" else "ether")
    tree.route("10.20.0.0/24", "ens5")
    return {case["hostname"]: Recorded(tree)}


def iface_linklocal_and_ipoib(case: dict[str, Any], root: pathlib.Path) -> dict[str, Recorded]:
    tree = HostTree(root)
    common(tree)
    for interface in case["interfaces"]:
        kind = "bridge" if interface["name"] == "docker0" else None
        tree.interface(interface["name"], interface["ipv4"], up=interface.get("up", True), link_type=interface.get("type", "ether"), kind=kind)
        if interface.get("default_route"):
            tree.route("default", interface["name"], gateway="10.50.1.1")
    return {"host": Recorded(tree)}


def iface_sriov_vfs_without_address(case: dict[str, Any], root: pathlib.Path) -> dict[str, Recorded]:
    tree = HostTree(root)
    common(tree)
    functions: dict[str, str] = {}
    for number, interface in enumerate(case["interfaces"]):
        bdf, name = "0000:5a:%02x.%d" % divmod(number, 8), interface["name"]
        if name != "cilium_host":
            tree.pci(bdf, driver="mlx5_core", physfn=functions.get(interface.get("physfn")))
            functions[name] = bdf
        kind = "veth" if name == "cilium_host" else None
        tree.interface(name, interface["ipv4"], pci=functions.get(name), up=interface.get("up", True), kind=kind, link_type=interface.get("type", "ether"))
        if interface.get("default_route"):
            tree.route("default", name, gateway="10.40.0.88")
    return {"host": Recorded(tree)}


def iface_vlan_prefix(case: dict[str, Any], root: pathlib.Path) -> dict[str, Recorded]:
    """Management is the VLAN 2093 of the bond."""
    tree = HostTree(root)
    common(tree)
    for name in case["devices"]:
        vlan = int(name.rpartition(".")[2]) if "." in name else None
        kind = "vlan" if vlan else "bond" if name == "bond0" else None
        tree.interface(name, ["10.30.0.7/24"] if vlan == 2093 else [], kind=kind, vlan=vlan, master="bond0" if name == "eth0" else None)
    tree.route("default", "bond0.2093", gateway="10.30.0.254")
    return {"host": Recorded(tree)}


# ---- limits and the driver


def limits_kho_cma(case: dict[str, Any], root: pathlib.Path) -> dict[str, Recorded]:
    hosts = {}
    for one in case["cases"]:
        tree = HostTree(root / one["name"])
        common(tree)
        for pid in ("self", "1"):
            tree.process_limits(one["memlock"], pid=pid)
        tree.meminfo(**one["meminfo_kb"])
        tree.proc_file("sys/kernel/osrelease", one["kernel"])
        hosts[one["name"]] = Recorded(tree)
    return hosts


def nvml_gb10_unified(case: dict[str, Any], root: pathlib.Path) -> dict[str, Recorded]:
    gpu, serving = case["gpus"][0], case["serving"]
    line = f'gpu 0 name="{gpu["name"]}" pci={gpu["bus_id"]} uuid={gpu["uuid"]} cc=12.1 memory=unsupported mig=unsupported\n'
    held = serving["compute_list"][gpu["uuid"]][0]
    hosts = {"idle": Recorded(HostTree(root / "idle"), line)}
    hosts["serving"] = Recorded(HostTree(root / "serving"), line + f"proc gpu=0 pid={held['pid']} mib={held['used']}B\n")
    for name, meminfo in (("idle", case["meminfo_kb"]), ("serving", serving["meminfo_kb"])):
        hosts[name].tree.meminfo(**meminfo)
        gpu_function(hosts[name].tree, "000f:01:00.0")
    process(hosts["serving"].tree, held["pid"], "llama-server")
    return hosts


def nvml_gb200_nvl_clique(case: dict[str, Any], root: pathlib.Path) -> dict[str, Recorded]:
    states, hosts = {2: "in_progress", 3: "completed"}, {}
    for number, host in enumerate(case["hosts"], 1):
        hosts[host["name"]] = one = planned_host(root / host["name"], number, gpu=False)
        lines = "driver 580.95.05\n"
        for index in range(host["gpus"]):
            gpu_function(one.tree, f"000{index + 1}:01:00.0")
            lines += f"gpu {index} uuid=GPU-{host['name']}-%d pci=0000000{index + 1}:01:00.0\n"
        one.nvml = lines + (
            f'gpu 0-{host["gpus"] - 1} name="{host["name_gpu"]}" cc=10.0 total=189471 reserved=700 fabric={states[host["state"]]} '
            f"fabric_status={host['status']} cluster={host['cluster_uuid']} clique={host['clique_id']} health_summary={host['health_summary']} "
            f"chassis={host['chassis']} slot={host['slot']} tray={host['tray']}\n"
        )
    return hosts


def nvml_gb300_bus_ids(case: dict[str, Any], root: pathlib.Path) -> dict[str, Recorded]:
    tree = HostTree(root)
    for gpu in case["gpus"]:
        gpu_function(tree, gpu["sysfs"], numa_node=1)
    lines = "".join(f"gpu {gpu['index']} pci={gpu['bus_id']} minor={gpu['minor']} module={gpu['module_id']}\n" for gpu in case["gpus"])
    return {"host": Recorded(tree, lines)}


def nvml_hgx_zero_cluster_uuid(case: dict[str, Any], root: pathlib.Path) -> dict[str, Recorded]:
    """Host `old` has a driver without the second version of the memory call."""
    lines = "".join(
        f'gpu {gpu["minor"]} name="{gpu["name"]}" cc=9.0 pci={gpu["bus_id"]} module={gpu["module_id"]} total={gpu["memory_mib"]["total"]} '
        f"reserved={gpu['memory_mib']['reserved']} used={gpu['memory_mib']['used']} fabric=completed cluster={gpu['fabric']['cluster_uuid']}\n"
        for gpu in case["gpus"]
    )
    hosts = {}
    for number, (name, more) in enumerate((("new", ""), ("other", ""), ("old", "error nvmlDeviceGetMemoryInfo_v2 FUNCTION_NOT_FOUND\n")), 1):
        hosts[name] = one = planned_host(root / name, number, gpu=False)
        for gpu in case["gpus"]:
            gpu_function(one.tree, gpu["bus_id"][4:].lower())
        one.nvml = f"driver {case['driver']}\n" + lines.replace(" pci=", f" uuid=GPU-{name}-%d pci=") + more
    return hosts


def nvml_init_failures(case: dict[str, Any], root: pathlib.Path) -> dict[str, Recorded]:
    """A host for each verdict, under its name."""
    hosts = {}
    for one in case["cases"]:
        tree = HostTree(root / one["verdict"])
        for bdf in one["pci_nvidia"]:
            gpu_function(tree, bdf)
        if one.get("inside_container"):
            tree.proc_file("1/cgroup", "0::/docker/0123\n")
        error = None if one["init"] == "ok" else error_name(one["init"]["raises"])
        state = "empty ok\n" if error is None else None if error == "DRIVER_NOT_LOADED" else f"gpu 0\nerror nvmlInit* {error}\n"
        hosts[one["verdict"]] = Recorded(tree, state, library=error != "LIBRARY_NOT_FOUND")
    return hosts


def nvml_lost_gpu(case: dict[str, Any], root: pathlib.Path) -> dict[str, Recorded]:
    hosts = {}
    for variant in case["variants"]:
        tree = HostTree(root / variant["name"])
        for bdf in case["lspci"]:
            gpu_function(tree, bdf)
        lines = ""
        for index, value in variant["handles"].items():
            if isinstance(value, str):
                lines += f"gpu {index} pci={value}\n"
            else:
                lines += f"gpu {index} pci=00000000:38:00.0\nerror nvmlDeviceGetHandleBy* {error_name(value['raises'])} gpu={index}\n"
        hosts[variant["name"]] = Recorded(tree, lines)
    return hosts


def nvml_mig_pending(case: dict[str, Any], root: pathlib.Path) -> dict[str, Recorded]:
    lines = ""
    for gpu in case["gpus"]:
        mode = gpu["mig_mode"]
        lines += f"gpu {gpu['index']} " + (f"mig={mode[0]} mig_pending={mode[1]}\n" if isinstance(mode, list) else "mig=unsupported\n")
    return {"host": Recorded(HostTree(root), lines)}


def nvml_no_permission_index(case: dict[str, Any], root: pathlib.Path) -> dict[str, Recorded]:
    lines = "".join(f"gpu {index} pci={value}\n" if isinstance(value, str) else f"gpu {index} denied=1\n" for index, value in case["handles"].items())
    return {"host": Recorded(HostTree(root), lines)}


# ---- processes


def proc_orphans_after_kill(case: dict[str, Any], root: pathlib.Path) -> dict[str, Recorded]:
    one = planned_host(root, 1, gpu=False)
    one.nvml = processes(f"driver 580.95.05\ngpu 0-1 uuid=GPU-%d {H100}\n", case["host_view"])
    for rows in case["host_view"].values():
        for row in rows:
            process(one.tree, row["pid"], row["comm"])
    return {"host": one}


def proc_partial_shard(case: dict[str, Any], root: pathlib.Path) -> dict[str, Recorded]:
    one = Recorded(HostTree(root), processes("gpu 0-3 uuid=GPU-%d\n", case["host_view"]))
    for pid in case["shard_pids"]:
        process(one.tree, pid, environ="RANKZERO_SHARD=glm/0/run\0")
    return {"host": one}


def proc_pid_namespaces(case: dict[str, Any], root: pathlib.Path) -> dict[str, Recorded]:
    one = Recorded(HostTree(root), processes("gpu 0-1 uuid=GPU-%d\n", case["host_view"]))
    for pid, group in case["cgroup"].items():
        process(one.tree, pid, cgroup=f"/system.slice/inference-{group}.service" if group == "replica-a" else f"/docker/{group}")
    return {"host": one}


GID_TABLES = ("gid_head4_worker3", "gid_ipv4_linklocal", "gid_plain_index3", "gid_sparse_table", "gid_starts_late", "gid_two_vlans_one_port")
WRITERS = {
    **dict.fromkeys(GID_TABLES, gid_tables),
    **{
        writer.__name__: writer
        for writer in (
            gid_drift_over_time,
            fabric_bond_over_two_cards,
            fabric_mixed_ib_and_ethernet,
            fabric_unequal_hca_count,
            hca_efa,
            hca_prefix_collision,
            hca_sysfs_strings,
            spark_three_node_ring,
            topo_gb300_two_pfs_same_guid,
            topo_h100_ten_nics,
            topo_dgx2_shared_switch,
            iface_hostname_loopback,
            iface_linklocal_and_ipoib,
            iface_sriov_vfs_without_address,
            iface_vlan_prefix,
            limits_kho_cma,
            nvml_gb10_unified,
            nvml_gb200_nvl_clique,
            nvml_gb300_bus_ids,
            nvml_hgx_zero_cluster_uuid,
            nvml_init_failures,
            nvml_lost_gpu,
            nvml_mig_pending,
            nvml_no_permission_index,
            proc_orphans_after_kill,
            proc_partial_shard,
            proc_pid_namespaces,
        )
    },
}
