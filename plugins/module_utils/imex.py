# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""IMEX, the service through which GPUs of several hosts import each other's memory over NVLink.

Without it, and without a channel device, a multi-node NVLink domain does not work however good its fabric looks (NVIDIA IMEX guide;
vllm-project/vllm#16992). On a host with NVSwitch and no rack around it, having no IMEX is normal (NVIDIA/NVSentinel#1471).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from typing import Any

from ansible_collections.rankzero.inference.plugins.module_utils import processes, small_files

CONTROL = "nvidia-imex-ctl"
_SECONDS = 20  # the daemon asks the others, and waits for those that are gone
RunCommand = Callable[..., "tuple[int, str, str]"]
_BINARIES = ("usr/bin", "usr/sbin", "usr/local/bin", "opt/nvidia/bin")
_CHANNELS = "dev/nvidia-caps-imex-channels"


def read(run_command: RunCommand, root: str = "/", proc_root: str = "/proc", table: processes.ProcessTable | None = None) -> dict[str, Any]:
    """`{service, channels, nodes, domain, errors}`.

    - `service`: `running`, `stopped` or `not_installed`, told by the daemon's process and its files (a container has no systemd to ask).
    - `channels`: numbers of the channel devices that exist, ascending. A process needs one of them.
    - `nodes`: the addresses in the node list, in its order, which must be the same on every member; null without a list.
    - `domain`: what `parse_domain` gives for `nvidia-imex-ctl -N -j`, asked only while the service runs; else null, with the reason in
      `errors` when the service does run. (`nvidia-imex-ctl -q` would speak for the local daemon only.)

    `run_command(arguments) -> (rc, stdout, stderr)` is AnsibleModule.run_command or alike.
    """
    errors: dict[str, str] = {}
    control = _find(root, CONTROL)
    service = _service(root, table or processes.ProcessTable(proc_root), control)
    facts: dict[str, Any] = {
        "service": service,
        "channels": channels(root, proc_root, errors),
        "nodes": node_list(root, errors),
        "domain": None,
        "errors": errors,
    }
    if service == "running":
        if control is None:
            errors["domain"] = f"{CONTROL} is not installed"
        else:
            facts["domain"] = _ask(run_command, control, errors)
    return facts


def parse_domain(text: str) -> dict[str, Any]:
    """`{status, ready, nodes: [{host, name, status, version, unconnected: [host]}], versions: []}` from `nvidia-imex-ctl -N -j`.

    `status` is `up`, `degraded`, `down`, or the word that was printed, in small letters. `ready` says that the domain is up, that every
    node is READY and connected to every node, and that all run one version: the only case in which memory can be exchanged between any
    two of them. Each node reports its own connections; that of a node that is not reachable is not counted against the others twice.

    Raises ValueError, with one line of what is wrong, when the text is not such an answer.
    """
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    status = answer.get("status") if isinstance(answer, dict) else None
    members = answer.get("nodes") if isinstance(answer, dict) else None
    if not isinstance(status, str) or not isinstance(members, dict):
        raise ValueError("no status or no nodes in the answer")  # noqa: TRY004
    nodes = [_node(members[key]) for key in sorted(members, key=_number)]
    versions = sorted({node["version"] for node in nodes if node["version"]})
    ready = status.upper() == "UP" and bool(nodes) and len(versions) <= 1
    ready = ready and all(node["status"] == "ready" and not node["unconnected"] for node in nodes)
    return {"status": _clean(status).lower(), "ready": ready, "nodes": nodes, "versions": versions}


def channels(root: str, proc_root: str, errors: dict[str, str]) -> list[int]:
    """The channel devices. They are not made again at boot unless the driver is told to (NVreg_CreateImexChannel0=1)."""
    numbers = sorted(int(name[7:]) for name in _names(os.path.join(root, _CHANNELS)) if re.fullmatch("channel[0-9]{1,9}", name))
    if not numbers:
        major = re.search(r"^\s*(\d+) nvidia-caps-imex-channels$", _text(proc_root, "devices"), re.MULTILINE)
        errors["channels"] = (
            f"no device in /{_CHANNELS}; make one: nvidia-modprobe -c 0, or load the driver with NVreg_CreateImexChannel0=1"
            if major
            else "the driver offers no IMEX channels"
        )
    return numbers


def node_list(root: str, errors: dict[str, str]) -> list[str] | None:
    """The node list that the daemon's configuration names; it is read at the daemon's start only."""
    config = _text(root, "etc/nvidia-imex/config.cfg")
    named = re.search(r"^\s*IMEX_NODE_CONFIG_FILE\s*=\s*(\S+)", config, re.MULTILINE)
    path = (named.group(1) if named else "/etc/nvidia-imex/nodes_config.cfg").lstrip("/")
    if not os.path.isfile(os.path.join(root, path)):
        errors["nodes"] = f"there is no /{path}"
        return None
    lines = (line.partition("#")[0].strip() for line in _text(root, path).splitlines())
    return [_clean(line) for line in lines if line]


def _service(root: str, table: processes.ProcessTable, control: str | None) -> str:
    if any(getattr(table.stat(pid), "name", None) == "nvidia-imex" for pid in table.programs()):
        return "running"
    installed = control or _find(root, "nvidia-imex") or os.path.isfile(os.path.join(root, "etc/nvidia-imex/config.cfg"))
    return "stopped" if installed else "not_installed"


def _ask(run_command: RunCommand, control: str, errors: dict[str, str]) -> dict[str, Any] | None:
    try:
        code, out, err = run_command(["timeout", str(_SECONDS), control, "-N", "-j"])
        if code == 0:
            return parse_domain(out)
        if code == 124:
            raise ValueError(f"no answer within {_SECONDS} seconds")
        errors["domain"] = f"{CONTROL} -N -j ended with {code}: {_clean(err or out)[:200]}"
    except (OSError, ValueError) as error:
        errors["domain"] = f"{CONTROL} -N -j: {_clean(error)[:200]}"
    return None


def _node(value: Any) -> dict[str, Any]:
    node: dict[str, Any] = value if isinstance(value, dict) else {}
    connections = node.get("connections")
    rows = [row for row in connections.values() if isinstance(row, dict)] if isinstance(connections, dict) else []
    unconnected = sorted({_clean(row.get("host") or "?") for row in rows if row.get("status") != "CONNECTED"})
    return {
        "host": _word(node.get("host")),
        "name": _word(node.get("hostName")),
        "status": _clean(node.get("status") or "unknown").lower(),
        "version": _word(node.get("version")),
        "unconnected": unconnected,
    }


def _number(key: str) -> tuple[int, str]:
    return (int(key), "") if re.fullmatch("[0-9]{1,9}", key) else (1 << 31, key)


def _find(root: str, name: str) -> str | None:
    paths = (os.path.join(root, folder, name) for folder in _BINARIES)
    return next((path for path in paths if os.access(path, os.X_OK)), None)


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _text(*parts: str) -> str:
    return (small_files.read_bytes(os.path.join(*parts))[0] or b"").decode("utf-8", "replace")


def _clean(value: Any) -> str:
    return "".join(char if char.isprintable() else " " for char in str(value)).strip()


def _word(value: Any) -> str | None:
    return (_clean(value) or None) if value is not None else None
