#!/usr/bin/python
# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Gather what a host has for inference: the module's documentation and options. The reading is done in module_utils/node.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: node_facts
short_description: Gather what a GPU host really has for inference
version_added: 0.1.0
author:
  - The rankzero.inference authors (@rankzero)
description:
  - Reads one host in one pass and returns the fact C(inference_node), which M(rankzero.inference.replica_plan) plans with.
  - GPUs with their memory, processes and health (NVML); RDMA devices with their GIDs, fabrics and the reasons that speak against a port;
    interfaces, addresses and routes; limits; the driver; registered engine builds; models; ports in use; and the shards that are already
    deployed with the state of their run.
  - It only reads. Unknown is V(null) with a reason in the C(errors) beside it, never V(0) and never left out; a host without GPUs, without a
    driver or with a broken one is a stated condition and not a failure.
options:
  replica_root:
    description:
      - The directory below which C(etc/rankzero), C(run/rankzero) and C(var/lib/rankzero) of the deployed replicas are.
    type: path
    default: /
  model_paths:
    description:
      - Files or directories of models and adapters to look at, such as the C(model_path) of a profile.
    type: list
    elements: path
    default: []
  checksum_paths:
    description:
      - Paths whose files are hashed as well. Meant for adapters, for it reads every byte.
      - They need not be in O(model_paths) too.
    type: list
    elements: path
    default: []
  service_user:
    description:
      - The user that the service will run as. RV(ansible_facts.inference_node.models) says whether this user can read the files.
      - While the user does not exist, the permissions for others decide. Without root, or without this option, it is the user who asks.
    type: str
  probe_ports:
    description:
      - TCP ports that must be free. They are tried by binding them for an instant, because a socket that is bound and does not listen yet is
        in no table of the kernel's.
      - Listening ports are found without being named.
    type: list
    elements: int
    default: []
  sysfs_root:
    description:
      - Where sysfs is mounted. Another directory stands for another host, in tests.
    type: path
    default: /sys
  proc_root:
    description:
      - Where proc is mounted.
    type: path
    default: /proc
  dev_root:
    description:
      - Where the device nodes are.
    type: path
    default: /dev
  network_state:
    description:
      - A JSON file that stands for the interfaces, addresses and routes of the kernel, in tests.
      - A mapping of C(links) (the output of C(ip -j -d link)), C(addresses) (C(ip -j addr)) and C(routes) (C(ip -j route) and
        C(ip -6 -j route) in one list), and optionally C(hostname_resolves_to), a list of addresses.
    type: path
attributes:
  check_mode:
    support: full
    description: It changes nothing, so check mode is no different.
  diff_mode:
    support: none
    description: There is nothing to compare.
  facts:
    support: full
    description: Returns C(ansible_facts) that contain C(inference_node).
  platform:
    support: full
    platforms: linux
    description: The hosts that it can read.
notes:
  - Run it as root (C(become)). Without root the owners of other users' processes and ports stay unknown, and systemd is not offered as a
    service manager.
  - NVML is asked through C(nvidia-ml-py) (the Python module C(pynvml)). On a host without GPUs it is not needed.
  - Facts hold no secrets, so they may be kept in a fact cache.
requirements:
  - Python 3.9 or newer on the host
  - nvidia-ml-py (hosts with NVIDIA GPUs)
seealso:
  - module: rankzero.inference.replica_plan
"""

EXAMPLES = r"""
- name: Gather what every host has
  rankzero.inference.node_facts:
    model_paths:
      - /models/glm
    probe_ports:
      - 8000
    service_user: inference
  become: true

- name: Say which HCA ports cannot be used, and why
  ansible.builtin.debug:
    msg: "{{ item.name }} port {{ item.port }}: {{ item.reasons | join('; ') }}"
  loop: "{{ ansible_facts.inference_node.hcas | rejectattr('usable') }}"
  loop_control:
    label: "{{ item.name }}"

- name: Make sure that an adapter is the same on all hosts
  rankzero.inference.node_facts:
    checksum_paths:
      - /adapters/sql
"""

RETURN = r"""
ansible_facts:
  description: Facts to keep for the host.
  returned: always
  type: dict
  contains:
    inference_node:
      description:
        - What the host has. docs/architecture.md in the collection's repository has every field.
      returned: always
      type: dict
      contains:
        schema:
          description: Version of this shape.
          returned: always
          type: int
          sample: 1
        gathered_at:
          description: When it was read, in UTC.
          returned: always
          type: str
          sample: "2026-01-31T12:00:00Z"
        host:
          description:
            - Host name, operating system, memory in MiB, the user who asked, the Python in use, and C(service_manager), which is V(systemd),
              V(supervisor) or V(null) with the reason in C(errors).
          returned: always
          type: dict
          sample:
            hostname: gpu-b
            boot_id: f7d7e2cc-f1d0-406e-af0e-1172dd767e9c
            kernel: 6.1.0-32-amd64
            arch: x86_64
            os: {id: debian, version: "12"}
            cpus: 96
            memory_mib: 1031836
            memory_available_mib: 998420
            user: root
            privileged: true
            python: {executable: /usr/bin/python3, version: 3.11.2}
            service_manager: systemd
            supervisord: null
            container: false
            errors: {}
        gpus:
          description: GPUs in NVML's order, each MIG instance after its parent, with memory in MiB, processes, health and errors by call.
          returned: always
          type: list
          elements: dict
          sample:
            - index: 0
              uuid: GPU-00000001-0000-4000-8000-000000000000
              pci_bdf: "0000:10:00.0"
              vendor: nvidia
              model: NVIDIA H100 80GB HBM3
              arch: hopper
              compute_capability: "9.0"
              numa_node: null
              memory: {model: discrete, total_mib: 81559, used_mib: 48000, reserved_mib: 551, unattributed_mib: 0}
              partition: {kind: null, parent_uuid: null, profile: null, mode_current: false, mode_pending: false}
              interconnect_domain: null
              processes: [{pid: 14850, used_mib: 48000, kind: compute, name: "VLLM::Worker_TP", user: rankzero, shard: glm/0}]
              compute_mode: default
              health: {state: ok, reasons: []}
              errors: {}
        topology:
          description:
            - C(gpu_gpu) and C(gpu_hca) hold the distance between two devices, from V(PIX) (one PCIe switch) over V(PXB), V(PHB) and V(NODE) to
              V(SYS); GPUs that NVLink joins are V(NV).
          returned: always
          type: dict
          sample:
            gpu_gpu: {GPU-00000001-0000-4000-8000-000000000000: {GPU-00000001-0000-4000-8000-000000000001: NV}}
            gpu_hca: {GPU-00000001-0000-4000-8000-000000000000: {mlx5_0: PIX, mlx5_1: SYS}}
        hcas:
          description:
            - Every port of every RDMA device. C(usable) says whether a replica may use it, C(reasons) has a sentence for all that speaks against
              it, and C(fabrics) names what it can reach, V(ib:SUBNET_PREFIX) or V(roce:NETWORK) with V(@VLAN) behind it on a VLAN.
          returned: always
          type: list
          elements: dict
          sample:
            - name: mlx5_0
              port: 1
              pci_bdf: "0000:1b:00.0"
              link_layer: ethernet
              transport: roce
              state: active
              rate_gbps: 400
              fabrics: ["roce:10.11.0.0/16"]
              usable: true
              reasons: []
        interfaces:
          description: Network interfaces with their kind, addresses in CIDR form, VLAN, master and MTU.
          returned: always
          type: list
          elements: dict
          sample:
            - name: eth0
              kind: physical
              up: true
              carrier: true
              mtu: 1500
              mac: "02:fc:00:00:00:01"
              addresses: [192.0.2.2/24, "2001:db8::2/64"]
              vlan: null
              master: null
              speed_mbps: 25000
              is_vf: false
              pci_bdf: "0000:03:00.0"
        routes:
          description: Unicast routes of the main table, one entry per next hop, at most 1000.
          returned: always
          type: list
          elements: dict
        default_route:
          description: Interface and gateway of the default route, V(null) without one.
          returned: always
          type: dict
          sample: {interface: eth0, gateway: 192.0.2.1}
        hostname_resolves_to:
          description: Addresses that the host's own name stands for, on the host.
          returned: always
          type: list
          elements: str
        limits:
          description:
            - Locked memory (bytes) and open files that a service can have, size of /dev/shm (MiB), the ephemeral port range, nccl.conf files,
              GPUDirect and IMEX.
          returned: always
          type: dict
          sample:
            memlock_bytes: 8388608
            nofile: 20000
            shm: {size_mib: 24105, free_mib: 24104}
            ephemeral_ports: [32768, 60999]
            nccl_conf: {}
            kho_cma_suspect: false
            gpudirect: {peermem: false, dmabuf: null}
            errors: {gpudirect.dmabuf: "the NVIDIA kernel module is not loaded, or the kernel version is not known"}
            imex: {service: not_installed, channels: [], nodes: null, domain: null, errors: {channels: the driver offers no IMEX channels}}
        drivers:
          description:
            - C(nvidia) with C(state), which is V(ok) or names what is wrong, C(message) and C(hint), and the versions of the driver, CUDA,
              NVML and the kernel module.
          returned: always
          type: dict
          sample:
            nvidia:
              state: ok
              message: null
              hint: null
              driver: 580.95.05
              cuda: "13.0"
              nvml: 13.580.95.05
              kernel_module: 580.95.05
              library_path: /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1
              binding: {version: 13.615.71, path: /usr/local/lib/python3.11/dist-packages/pynvml.py}
              errors: {}
        engines:
          description: Registered builds by engine. C(problems) says why a build cannot be used.
          returned: always
          type: dict
        models:
          description:
            - The paths of O(model_paths) and O(checksum_paths) with their existence, readability, sizes in bytes, and the fields of their
              configuration that a plan is checked against; C(sha256) by file for those of O(checksum_paths).
          returned: always
          type: dict
        ports_in_use:
          description:
            - Taken TCP ports with the process and the shard that holds them, as far as they can be seen. Ports of outgoing connections in the
              ephemeral range are left out unless they are in O(probe_ports).
          returned: always
          type: list
          elements: dict
          sample:
            - {port: 22, address: 0.0.0.0, pid: 512, process: sshd, shard: null, listening: true}
            - {port: 8000, address: 192.0.2.2, pid: 14844, process: python, shard: glm/0, listening: true}
        shards:
          description:
            - The shards deployed here by replica, with rank, revision, hashes of the rendered files, service, stage, and whether this very run
              has been proven ready.
          returned: always
          type: dict
          sample:
            glm:
              rank: 0
              nodes: 2
              revision: e4e7f767b4eece7f
              previous: null
              unit: {name: inference-glm.service, manager: systemd, active: true, state: running, enabled: true}
              run_id: 2a0fd7945591
              stage: running
              detail: sim-engine runs as process 14844
              restarts: 0
              pids: [14807, 14844, 14850]
              profile: glm-h100-2x8
              engine: vllm
              url: "http://192.0.2.2:8000"
              ready: true
        locks:
          description:
            - Runs of Ansible that change a replica on this host now, by replica, with who, since and until when.
            - One that is not C(live) was left by a run that ended before its time; C(target) is the revision that it wanted.
          returned: always
          type: dict
        traces:
          description:
            - Everything that a removal would take. C(replicas) holds, by name, the service file (C(unit)), C(pids) and C(paths) of a replica, also where
              its records are gone; C(made_users) are the users that this collection made.
          returned: always
          type: dict
        cordoned:
          description: Who took the host out of service, why and when; V(null) when nobody did.
          returned: always
          type: dict
"""

# For its effect on every import behind it, so it has no other use: docs/decisions/0013-modules-are-compiled-once.md
from ansible_collections.rankzero.inference.plugins.module_utils import compile_once  # noqa: F401  # pylint: disable=unused-import

# isort: split
from ansible.module_utils.basic import AnsibleModule

from ansible_collections.rankzero.inference.plugins.module_utils import node


def main() -> None:
    """Read the host and return the facts."""
    module = AnsibleModule(
        argument_spec={
            "replica_root": {"type": "path", "default": "/"},
            "model_paths": {"type": "list", "elements": "path", "default": []},
            "checksum_paths": {"type": "list", "elements": "path", "default": []},
            "service_user": {"type": "str"},
            "probe_ports": {"type": "list", "elements": "int", "default": []},
            "sysfs_root": {"type": "path", "default": "/sys"},
            "proc_root": {"type": "path", "default": "/proc"},
            "dev_root": {"type": "path", "default": "/dev"},
            "network_state": {"type": "path"},
        },
        supports_check_mode=True,
    )
    wrong = [port for port in module.params["probe_ports"] if not 0 < port < 65536]
    if wrong:
        module.fail_json(msg="probe_ports: %d is no TCP port (1 to 65535)" % wrong[0])
    module.exit_json(changed=False, ansible_facts={"inference_node": node.read(module.params, module.run_command)})


if __name__ == "__main__":
    main()
