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
        gpus:
          description: GPUs in NVML's order, each MIG instance after its parent, with memory in MiB, processes, health and errors by call.
          returned: always
          type: list
          elements: dict
        topology:
          description:
            - C(gpu_gpu) and C(gpu_hca) hold the distance between two devices, from V(PIX) (one PCIe switch) over V(PXB), V(PHB) and V(NODE) to
              V(SYS); GPUs that NVLink joins are V(NV).
          returned: always
          type: dict
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
        routes:
          description: Unicast routes of the main table, one entry per next hop, at most 1000.
          returned: always
          type: list
          elements: dict
        default_route:
          description: Interface and gateway of the default route, V(null) without one.
          returned: always
          type: dict
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
        drivers:
          description:
            - C(nvidia) with C(state), which is V(ok) or names what is wrong, C(message) and C(hint), and the versions of the driver, CUDA,
              NVML and the kernel module.
          returned: always
          type: dict
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
        shards:
          description:
            - The shards deployed here by replica, with rank, revision, hashes of the rendered files, service, stage, and whether this very run
              has been proven ready.
          returned: always
          type: dict
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
