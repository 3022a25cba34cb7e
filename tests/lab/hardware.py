# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Write the GPUs and HCAs of one lab host into its disk: a state file for fake_nvml and a sysfs tree below /opt/fakesys.

    hardware.py --host lab.n1 --number 11 --gpus 8:H100 --hcas 8:ib --out DISK

GPU k and HCA k hang below one PCIe switch; the first half of the switches belongs to NUMA node 0, the rest to node 1, as on HGX boards.
UUIDs and GUIDs follow from `--host` and `--number`: no two hosts share one, and a host keeps its own. Anything else that a test
wants goes into a seed tree (LAB_SEED), which is copied over what this writes.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import uuid

# name, PCI device id, memory, reserved (MiB), compute capability, NVML architecture, NVLinks; memory None: the GPU has none of its own (GB10)
MODELS = {
    "A100": ("NVIDIA A100-SXM4-80GB", "0x20b2", 81920, 617, "8.0", 7, 12),
    "L40S": ("NVIDIA L40S", "0x26b9", 46068, 598, "8.9", 8, 0),
    "H100": ("NVIDIA H100 80GB HBM3", "0x2330", 81559, 551, "9.0", 9, 18),
    "H200": ("NVIDIA H200", "0x2335", 143771, 608, "9.0", 9, 18),
    "B200": ("NVIDIA B200", "0x2901", 183359, 651, "10.0", 10, 18),
    "GB10": ("NVIDIA GB10", "0x2e12", None, 0, "12.1", 10, 0),
}
MOST_SLOTS = 24  # PCI buses 0x10 to 0xff, ten for each switch


def count_and_kind(text: str, default: str) -> tuple[int, str]:
    """`8:H100` or `8` as a number and a kind; raises SystemExit on anything else."""
    number, _colon, kind = text.partition(":")
    if not number.isdigit() or int(number) > MOST_SLOTS:
        raise SystemExit(f"hardware.py: wanted N or N:KIND with N from 0 to {MOST_SLOTS}, got {text!r}")
    return int(number), kind or default


def slot_path(slot: int) -> str:
    """The sysfs path of the switch of `slot`, below /sys/devices."""
    bus = 0x10 + 10 * slot
    return f"pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.0"


def gpu_path(slot: int) -> str:
    bus = 0x10 + 10 * slot
    return f"{slot_path(slot)}/0000:{bus + 2:02x}:00.0/0000:{bus + 3:02x}:00.0"


def hca_path(slot: int) -> str:
    bus = 0x10 + 10 * slot
    return f"{slot_path(slot)}/0000:{bus + 2:02x}:01.0/0000:{bus + 4:02x}:00.0"


class Disk:
    """Writes below the root directory of a host."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root

    def text(self, path: str, content: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n", encoding="ascii")

    def link(self, path: str, target: str) -> None:
        """A relative link, as sysfs has them; `target` is a path below the root."""
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(os.path.relpath(self.root / target, place.parent))

    def pci(self, path: str, ids: dict[str, object]) -> None:
        """A PCI function at `path` below /sys/devices, found from /sys/bus/pci/devices too."""
        for name, value in ids.items():
            self.text(f"opt/fakesys/devices/{path}/{name}", value)
        self.link(f"opt/fakesys/bus/pci/devices/{path.rsplit('/', 1)[1]}", f"opt/fakesys/devices/{path}")


def write_gpus(disk: Disk, host: str, count: int, model: str, slots: int) -> None:
    """The state file (format: fake_nvml/README.md) and the GPUs' PCI functions."""
    if model not in MODELS:
        raise SystemExit(f"hardware.py: unknown GPU model {model!r}, there are {', '.join(MODELS)}")
    name, device, total, reserved, capability, architecture, links = MODELS[model]
    memory = "memory=unsupported" if total is None else f"total={total}MiB reserved={reserved}MiB"
    lines = ["driver 580.95.05", "cuda   13000", "procdir /run/fake_nvml/processes prune=1"]
    for index in range(count):
        path, numa = gpu_path(index), int(2 * index >= slots > 1)
        identity = uuid.uuid5(uuid.NAMESPACE_DNS, f"gpu{index}.{host}")
        lines.append(f'gpu {index} name="{name}" uuid=GPU-{identity} pci=0000{path[-12:].upper()} devid={device}10de numa={numa}')
        lines.append(
            f"gpu {index} {memory} cc={capability} arch={architecture} mig={'off' if total and links else 'unsupported'} persistence=1 nvlinks={links}"
        )
        disk.pci(path, {"vendor": "0x10de", "device": device, "class": "0x030200", "numa_node": numa})
    disk.text("etc/fake_nvml/state", "\n".join(lines))


def gid(prefix: int, rest: int) -> str:
    digits = f"{prefix:016x}{rest:016x}"
    return ":".join(digits[i : i + 4] for i in range(0, 32, 4))


def write_gids(disk: Disk, port: str, entries: list[tuple[str, str, str | None]]) -> None:
    """A GID table of 16: the entries, then empty slots, whose attributes cannot be read."""
    for index in range(16):
        value, kind, netdev = entries[index] if index < len(entries) else (gid(0, 0), "", None)
        disk.text(f"{port}/gids/{index}", value)
        if kind:
            disk.text(f"{port}/gid_attrs/types/{index}", kind)
        if netdev:
            disk.text(f"{port}/gid_attrs/ndevs/{index}", netdev)


def write_hcas(disk: Disk, number: int, count: int, kind: str, slots: int, fabric: list[str]) -> None:
    """HCAs as the mlx5 driver shows them. With `roce` HCA k belongs to interface eth<k+1>, whose network is fabric[k]."""
    if kind not in ("ib", "roce"):
        raise SystemExit(f"hardware.py: HCAs are ib or roce, not {kind!r}")
    if kind == "roce" and count > len(fabric):
        raise SystemExit(f"hardware.py: {count} roce HCAs need {count} fabric networks (LAB_FABRIC), there are {len(fabric)}")
    nodes = []
    for index in range(count):
        name, path, guid = f"mlx5_{index}", hca_path(index), (0xB8CEF60300000000 | number << 8 | index)
        function = f"opt/fakesys/devices/{path}"
        hca, port = f"{function}/infiniband/{name}", f"{function}/infiniband/{name}/ports/1"
        disk.pci(path, {"vendor": "0x15b3", "device": "0x1021", "class": "0x020700" if kind == "ib" else "0x020000", "numa_node": int(2 * index >= slots > 1)})
        (disk.root / "opt/fakesys/bus/pci/drivers/mlx5_core").mkdir(parents=True, exist_ok=True)
        disk.link(f"{function}/driver", "opt/fakesys/bus/pci/drivers/mlx5_core")
        disk.link(f"{hca}/device", function)
        disk.link(f"opt/fakesys/class/infiniband/{name}", hca)
        words = gid(guid, 0)[:19]
        for file, value in {
            "node_type": "1: CA",
            "node_guid": words,
            "sys_image_guid": words,
            "node_desc": f"lab {name}",
            "fw_ver": "28.39.1002",
            "ports/1/state": "4: ACTIVE",
            "ports/1/phys_state": "5: LinkUp",
            "ports/1/rate": "400 Gb/sec (4X NDR)",
            "ports/1/link_layer": "InfiniBand" if kind == "ib" else "Ethernet",
            "ports/1/cap_mask": "0xa751e848",
            "ports/1/lid": hex(16 * number + index) if kind == "ib" else "0x0",
            "ports/1/sm_lid": "0x1" if kind == "ib" else "0x0",
            "ports/1/pkeys/0": "0xffff",
        }.items():
            disk.text(f"{hca}/{file}", value)
        if kind == "ib":
            write_gids(disk, port, [(gid(0xFE80 << 48, guid), "IB/RoCE v1", None)])
        else:
            netdev, address = f"eth{index + 1}", [*map(int, fabric[index].split(".")), number]
            (disk.root / function / "net" / netdev).mkdir(parents=True)
            local, mapped = gid(0xFE80 << 48, guid), gid(0, 0xFFFF << 32 | int.from_bytes(bytes(address), "big"))
            write_gids(disk, port, [(value, version, netdev) for value in (local, mapped) for version in ("IB/RoCE v1", "RoCE v2")])
        disk.text(f"{function}/infiniband_verbs/uverbs{index}/ibdev", name)
        disk.link(f"opt/fakesys/class/infiniband_verbs/uverbs{index}", f"{function}/infiniband_verbs/uverbs{index}")
        nodes.append(f"c /dev/infiniband/uverbs{index} 0666 root root - 1:3")  # opens as /dev/null does
    if nodes:
        disk.text("etc/tmpfiles.d/fake_hcas.conf", "\n".join(nodes))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the GPUs and HCAs of one lab host into its disk.")
    parser.add_argument("--host", required=True, help="what makes UUIDs this host's own")
    parser.add_argument("--number", type=int, required=True, help="last part of the host's addresses")
    parser.add_argument("--gpus", default="0", help="N[:MODEL]")
    parser.add_argument("--hcas", default="0", help="N[:ib|roce]")
    parser.add_argument("--fabric", default="", help="prefixes of the fabric networks, such as '10.78.0 10.79.0'")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args()
    gpus, model = count_and_kind(options.gpus, "H100")
    hcas, kind = count_and_kind(options.hcas, "ib")
    disk = Disk(options.out)
    if gpus:
        write_gpus(disk, options.host, gpus, model, max(gpus, hcas))
    if hcas:
        write_hcas(disk, options.number, hcas, kind, max(gpus, hcas), options.fabric.split())


if __name__ == "__main__":
    main()
