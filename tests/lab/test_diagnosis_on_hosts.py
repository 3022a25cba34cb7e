# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Removal, diagnosis and preflight on real hosts: a unit alone, a host that is off, the journal of a failed deploy, a broken way between two hosts."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from typing import Any

import pytest
from lab.lab_hosts import Lab
from lab.profiles import SIMULATED

pytestmark = pytest.mark.lab

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
KEY = "lab-key-0123456789"
OURS = """find / -xdev \\( -path '*rankzero*' -o -path '*inference-*' \\) ! -path '/root/.ansible*'; find /run -path '*rankzero*' -o -path '*inference-*'
getent passwd rankzero; systemctl list-units --all --plain --no-legend 'inference-*'; grep -lsz ^RANKZERO_SHARD= /proc/[0-9]*/environ"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Lab]:
    one = Lab(f"d{os.getpid()}", settings={"LAB_FABRIC": "10.78.0"}, owner=os.getpid())
    reason = one.why_not()
    if reason:
        pytest.skip(reason)
    try:
        one.up("n1", "n2", gpus="2:H100")
        yield one
    finally:
        one.down()


def play(lab: Lab, playbook: str, *options: str, **variables: Any) -> subprocess.CompletedProcess[str]:
    extra = {
        "replica_name": "ill",
        "replica_hosts": "n1:n2",
        "replica_management": "10.77.0.0/24",
        "replica_profile": SIMULATED,
        "replica_api_key": KEY,
        "diagnosis_dir": str(lab.directory / "diagnosis"),
        **variables,
    }
    command = [
        str(pathlib.Path(sys.executable).parent / "ansible-playbook"),
        "-i",
        str(lab.inventory),
        str(ROOT / "playbooks" / f"{playbook}.yml"),
        "-e",
        json.dumps(extra),
    ]
    return lab.run(
        *command,
        *options,
        check=False,
        settings={
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections"),
            "ANSIBLE_LOCAL_TEMP": str(lab.directory / "ansible"),
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_TIMEOUT": "5",
        },
    )


def ours(lab: Lab, host: str) -> list[str]:
    return lab.console(host, OURS, check=False).stdout.split("\n")[:-1]


def archived(output: str) -> dict[str, str]:
    path = re.search(r"^Archive: (\S+)$", output, re.MULTILINE)
    assert path is not None, output
    with tarfile.open(path.group(1)) as archive:
        return {member.name.split("/", 1)[1]: archive.extractfile(member).read().decode() for member in archive.getmembers()}  # type: ignore[union-attr]


def test_half_a_replica_under_systemd(hosts: Lab) -> None:
    """On n1 somebody deleted the unit file while it runs, on n2 everything below /etc/rankzero: a removal finds the rest, and a second one nothing."""
    done = play(hosts, "deploy_replica")
    assert done.returncode == 0, done.stdout + done.stderr
    well = play(hosts, "diagnose")
    assert well.returncode == 0 and "Nothing is wrong now: all 2 ranks are ready." in well.stdout, well.stdout + well.stderr
    files = archived(well.stdout)
    assert "run_shard" in files["hosts/n1/shard.log"] and all(KEY not in text for text in [*files.values(), well.stdout])
    hosts.console("n1", "rm /etc/systemd/system/inference-ill.service; systemctl daemon-reload")
    hosts.console("n2", "rm -r /etc/rankzero")
    half = play(hosts, "diagnose")
    assert half.returncode == 0 and "hosts/n2/look.json" in archived(half.stdout), half.stdout + half.stderr
    removed = play(hosts, "remove_replica", "-v")
    assert removed.returncode == 0 and len(re.findall("processes: true", removed.stdout)) == 2, removed.stdout + removed.stderr
    # The user of n2 was written down in what was deleted.
    assert ours(hosts, "n1") == [] and [line for line in ours(hosts, "n2") if not line.startswith("rankzero:")] == []
    hosts.console("n2", "userdel rankzero; true")
    again = play(hosts, "remove_replica", "-v")
    assert again.returncode == 0 and not re.search(r"changed=[1-9]", again.stdout) and again.stdout.count("remote_calls: 0") == 2, again.stdout


def test_a_host_that_is_off_has_a_row(hosts: Lab) -> None:
    done = play(hosts, "deploy_replica")
    assert done.returncode == 0, done.stdout + done.stderr
    hosts.kill("n2")
    try:
        seen = play(hosts, "diagnose")
    finally:
        hosts.start("n2")
    assert seen.returncode == 0 and re.search(r"^\s+\S+\s+n2\s+unreachable", seen.stdout, re.MULTILINE), seen.stdout + seen.stderr
    assert re.search(r"Likely cause: .* \(n2\): the host cannot be reached", seen.stdout), seen.stdout
    assert play(hosts, "remove_replica").returncode == 0


def test_the_journal_of_a_first_deploy_that_failed_is_kept(hosts: Lab) -> None:
    out_of_memory = ["--sim-fail", "torch.OutOfMemoryError: CUDA out of memory.", "--sim-fail-rank", "1"]
    broken = {**SIMULATED, "args": [*SIMULATED["args"], *out_of_memory]}  # type: ignore[misc]
    done = play(hosts, "deploy_replica", replica_profile=broken)
    output = done.stdout + done.stderr
    assert done.returncode == 2 and ours(hosts, "n1") == ours(hosts, "n2") == [], output
    path = re.search(r"log of rank 1 \(n2\): (\S+)", output)
    assert path is not None and "CUDA out of memory" in pathlib.Path(path.group(1)).read_text(), output


def test_a_broken_way_is_found_before_anything_is_touched(hosts: Lab) -> None:
    """The controller reaches both hosts, and they do not reach each other: a deploy with the preflight names the pair and leaves no trace."""
    assert play(hosts, "preflight").returncode == 0
    hosts.part("n1", "n2")
    try:
        done = play(hosts, "deploy_replica", replica_preflight=True)
    finally:
        hosts.join("n1", "n2")
    output = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 2 and "The preflight of replica ill failed, and nothing was changed" in output, output
    assert re.search(
        r"rank 0 \(n1, eth0 10\.77\.0\.\d+\) never reaches rank 1 \(n2, eth0 10\.77\.0\.\d+\) port \d+ \(between all ranks\): no answer: a firewall drops it",
        output,
    ), output
    assert ours(hosts, "n1") == ours(hosts, "n2") == []
