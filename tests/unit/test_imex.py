# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""IMEX facts from real files and a real command: a script stands where nvidia-imex-ctl does."""

from __future__ import annotations

import json
import pathlib
import subprocess
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.rankzero.inference.plugins.module_utils import imex


def run_command(arguments: list[str]) -> tuple[int, str, str]:
    done = subprocess.run(arguments, check=False, capture_output=True, text=True, timeout=10)
    return done.returncode, done.stdout, done.stderr


def answer(status: str, *nodes: tuple[str, str, str], broken: tuple[tuple[int, int], ...] = ()) -> str:
    """What `nvidia-imex-ctl -N -j` prints; nodes are (host, status, version), `broken` the connections that are down."""
    members = {}
    for index, (host, node_status, version) in enumerate(nodes):
        connections = {
            str(other): {"host": nodes[other][0], "status": "DISCONNECTED" if (index, other) in broken else "CONNECTED", "changed": True}
            for other in range(len(nodes))
        }
        members[str(index)] = {"status": node_status, "host": host, "connections": connections, "changed": True, "version": version, "hostName": ""}
    return json.dumps({"nodes": members, "timestamp": "5/22/2025 19:46:40.891", "status": status})


READY = (("10.0.0.1", "READY", "580.95.05"), ("10.0.0.2", "READY", "580.95.05"))


class Host:
    """Files of a host below a folder."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root

    def file(self, name: str, text: str = "", mode: int = 0o644) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(mode)

    def process(self, pid: int, name: str) -> None:
        self.file(f"proc/{pid}/stat", f"{pid} ({name}) S 1 {pid} {pid} 0 -1 4194560 {'0 ' * 12}5000 0\n")

    def running(self, script: str) -> None:
        self.process(77, "nvidia-imex")
        self.file("usr/bin/nvidia-imex-ctl", "#!/bin/sh\n" + script, 0o755)

    def read(self) -> dict[str, Any]:
        return imex.read(run_command, str(self.root), str(self.root / "proc"))


@pytest.fixture
def host(tmp_path: pathlib.Path) -> Host:
    return Host(tmp_path)


def test_nothing_installed(host: Host) -> None:
    seen = host.read()
    assert (seen["service"], seen["channels"], seen["nodes"], seen["domain"]) == ("not_installed", [], None, None)
    assert seen["errors"] == {"channels": "the driver offers no IMEX channels", "nodes": "there is no /etc/nvidia-imex/nodes_config.cfg"}


@pytest.mark.parametrize("name", ["usr/bin/nvidia-imex", "usr/bin/nvidia-imex-ctl"])
def test_installed_but_stopped_is_not_asked(host: Host, name: str) -> None:
    host.file(name, "#!/bin/sh\nexit 3\n", 0o755)
    host.process(78, "nvidia-imex-ctl")
    assert (host.read()["service"], host.read()["domain"], "domain" in host.read()["errors"]) == ("stopped", None, False)


def test_domain_up(host: Host) -> None:
    host.running(f'[ "$*" = "-N -j" ] || exit 9\ncat <<\\E\n{answer("UP", *READY)}\nE\n')
    host.file("etc/nvidia-imex/config.cfg", "SERVER_PORT=50000\nIMEX_NODE_CONFIG_FILE=/etc/other.cfg\n")
    host.file("etc/other.cfg", "# rack 7\n10.0.0.1\n\n10.0.0.2  # second\n")
    for name in ("channel0", "channel12", "channel3", "channelx", "other"):
        host.file(f"dev/nvidia-caps-imex-channels/{name}")
    seen = host.read()
    assert (seen["service"], seen["channels"], seen["nodes"], seen["errors"]) == ("running", [0, 3, 12], ["10.0.0.1", "10.0.0.2"], {})
    assert seen["domain"] == {
        "status": "up",
        "ready": True,
        "versions": ["580.95.05"],
        "nodes": [{"host": host_name, "name": None, "status": "ready", "version": "580.95.05", "unconnected": []} for host_name in ("10.0.0.1", "10.0.0.2")],
    }


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'cannot reach\nthe daemon' >&2; exit 1", "ended with 1: cannot reach the daemon"),
        ("echo READY", "not JSON"),
        ("echo '{}'", "no status"),
        ("exit 0", "not JSON"),
        ("echo '[]'", "no status"),
    ],
)
def test_a_daemon_that_does_not_answer(host: Host, script: str, reason: str) -> None:
    host.running(script + "\n")
    seen = host.read()
    assert seen["domain"] is None and reason in seen["errors"]["domain"] and "\n" not in seen["errors"]["domain"]


def test_running_without_the_control_command(host: Host) -> None:
    host.process(77, "nvidia-imex")
    assert host.read()["errors"]["domain"] == "nvidia-imex-ctl is not installed"


def test_a_command_that_cannot_be_run(host: Host) -> None:
    host.running("")
    host.file("usr/bin/nvidia-imex-ctl", "#!/nonexistent\n", 0o755)
    seen = host.read()
    assert seen["domain"] is None and "nonexistent" in seen["errors"]["domain"] or "No such file" in seen["errors"]["domain"]


def test_channels_that_the_driver_offers_but_nobody_made(host: Host) -> None:
    host.file("proc/devices", "Character devices:\n  1 mem\n506 nvidia-caps-imex-channels\n")
    assert "nvidia-modprobe" in host.read()["errors"]["channels"]


@pytest.mark.parametrize(
    ("text", "status", "ready"),
    [
        (answer("UP", *READY), "up", True),
        (answer("UP", READY[0]), "up", True),
        (answer("UP"), "up", False),
        (answer("DEGRADED", *READY), "degraded", False),
        (answer("DOWN", READY[0], ("10.0.0.2", "UNAVAILABLE", "")), "down", False),
        (answer("UP", READY[0], ("10.0.0.2", "READY", "570.00")), "up", False),
        (answer("UP", *READY, broken=((0, 1),)), "up", False),
        (answer("UP", READY[0], ("10.0.0.2", "WAITING_FOR_PEERS", "580.95.05")), "up", False),
        ('{"status": "UP", "nodes": {"0": "odd", "x": {}}}', "up", False),
    ],
)
def test_when_a_domain_is_ready(text: str, status: str, ready: bool) -> None:
    seen = imex.parse_domain(text)
    assert (seen["status"], seen["ready"]) == (status, ready)


def test_the_missing_connection_is_named() -> None:
    assert [node["unconnected"] for node in imex.parse_domain(answer("UP", *READY, broken=((0, 1),)))["nodes"]] == [["10.0.0.2"], []]


def test_nodes_are_in_the_order_of_their_numbers() -> None:
    nodes = {str(number): {"host": f"h{number}", "status": "READY"} for number in (10, 2, 1)}
    assert [node["host"] for node in imex.parse_domain(json.dumps({"status": "UP", "nodes": nodes}))["nodes"]] == ["h1", "h2", "h10"]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["status", "nodes", "0", "host", "version", "connections", "hostName"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(_JSON)
def test_any_answer_is_read_or_refused_in_words(value: Any) -> None:
    try:
        seen = imex.parse_domain(json.dumps(value))
    except ValueError as error:
        assert str(error)
    else:
        assert isinstance(seen["ready"], bool) and isinstance(seen["nodes"], list)
