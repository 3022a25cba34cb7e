# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Real GPUs: node facts against the driver's own words, memory proven, a CPU-only engine refused, a wrong GPU named. Run by run.sh.

Everything is real but the model: Ansible, the playbooks, supervisord, pynvml, the driver, and the memory that cuda_engine.py takes.
"""

from __future__ import annotations

import csv
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import time
import xml.etree.ElementTree as xml
from collections.abc import Iterator
from typing import Any

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import fleet

QUERY = "index,uuid,name,memory.total,compute_cap,pci.bus_id"
ENGINE_MIB = 2048


def nvidia_smi(*arguments: str) -> str:
    return subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, check=True, timeout=60).stdout


def known(text: str | None) -> str | None:
    """What nvidia-smi says, or None for its several ways to say that it does not know."""
    text = (text or "").strip()
    return None if text.strip("[]").lower() in ("", "n/a", "not supported", "unknown error", "insufficient permissions") else text


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    """nvidia-smi's table of whole GPUs."""
    if shutil.which("nvidia-smi") is None:
        pytest.skip("no GPU here: there is no nvidia-smi on PATH")
    return [
        dict(zip(QUERY.split(","), (cell.strip() for cell in row)))
        for row in csv.reader(nvidia_smi(f"--query-gpu={QUERY}", "--format=csv,noheader,nounits").splitlines())
    ]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, str]]) -> Iterator[fleet.Fleet]:
    """This machine as an inventory host below a root of its own, with the adapter of cuda_engine.py in a collection beside ours."""
    directory = tmp_path_factory.mktemp("gpu")
    place = directory / "collections/ansible_collections/rankzero_test/gpu/plugins/plugin_utils/engines"
    place.mkdir(parents=True)
    (place / "cuda.py").write_text((HERE / "cuda_adapter.py").read_text(encoding="utf-8").replace("@PROGRAM@", str(HERE / "cuda_engine.py")), encoding="utf-8")
    one = fleet.Fleet(directory / "fleet", [fleet.Host("gpu-host", "127.0.0.1")], group="replica_gpu", replica_name="gpu", replica_http_port=free_port())
    yield one
    one.stop()
    assert one.marked() == [], "a test left processes running"


@pytest.fixture(scope="module")
def facts(host: fleet.Fleet) -> dict[str, Any]:
    target = host.directory / "facts.json"
    command = [str(pathlib.Path(sys.executable).parent / "ansible-playbook"), "-i", str(host.inventory), str(HERE / "facts.yml"), "-e", f"facts_file={target}"]
    done = subprocess.run(command, cwd=fleet.ROOT, env=fleet.ansible_environment(), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(target.read_text(encoding="utf-8")))


def free_port() -> int:
    """A port below the range from which the kernel gives ports to outgoing connections."""
    for port in range(18400, 18600):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port from 18400 to 18599 on 127.0.0.1")


def deploy(host: fleet.Fleet, *args: str, gpus: int = 1, **more: Any) -> str:
    """Deploy cuda_engine.py and return everything that was said; the exit status is the last line."""
    profile = {
        "name": "gpu",
        "engine": "rankzero_test.gpu.cuda",
        "gpus_per_node": gpus,
        "tp": gpus,
        "model_path": str(HERE / "README.md"),
        "served_model_name": "tiny",
        "ready_timeout": 60,
        "args": [f"--mib={ENGINE_MIB}", *args],
    }
    paths = os.pathsep.join([str(host.directory.parent / "collections"), str(fleet.ROOT / ".collections")])
    done = host.run("deploy_replica", extra={"replica_name": "gpu", "replica_profile": profile, **more}, env={"ANSIBLE_COLLECTIONS_PATH": paths})
    return f"{done.stdout}{done.stderr}\nexit status {done.returncode}"


def remove(host: fleet.Fleet) -> None:
    done = host.run("remove_replica", extra={"replica_name": "gpu"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert host.marked() == []


def test_facts_are_the_drivers_own_words(facts: dict[str, Any], rows: list[dict[str, str]]) -> None:
    """Index, UUID, name, memory, capability and PCI address as nvidia-smi --query-gpu has them."""
    whole = {gpu["index"]: gpu for gpu in facts["gpus"] if gpu["partition"]["kind"] is None or gpu["partition"].get("parent_uuid") is None}
    assert [gpu for gpu in whole if not isinstance(gpu, int)] == []
    for row in rows:
        gpu = whole[int(row["index"])]
        assert gpu["uuid"] == row["uuid"]
        assert gpu["model"] == row["name"]
        assert gpu["compute_capability"] == known(row["compute_cap"])
        assert gpu["pci_bdf"] == row["pci.bus_id"].lower()[-12:]
        total = known(row["memory.total"])
        assert gpu["memory"]["total_mib"] == (int(total) if total else None)
        assert gpu["health"]["state"] in ("ok", "warning"), gpu["health"]


def test_facts_agree_with_the_long_report(facts: dict[str, Any]) -> None:
    """Driver, CUDA, number of GPUs, reserved memory, MIG and compute mode as nvidia-smi -q -x has them."""
    report = xml.fromstring(nvidia_smi("-q", "-x"))
    driver = facts["drivers"]["nvidia"]
    assert driver["state"] == "ok", driver
    assert driver["driver"] == report.findtext("driver_version")
    assert driver["cuda"] == report.findtext("cuda_version")
    by_uuid = {gpu["uuid"]: gpu for gpu in facts["gpus"]}
    reported = report.findall("gpu")
    assert len(reported) == int(report.findtext("attached_gpus") or 0)
    for entry in reported:
        gpu = by_uuid[entry.findtext("uuid") or ""]
        reserved = known(entry.findtext("fb_memory_usage/reserved"))
        if reserved and gpu["memory"]["reserved_mib"] is not None:
            assert abs(gpu["memory"]["reserved_mib"] - int(reserved.split()[0])) <= 1
        mig = known(entry.findtext("mig_mode/current_mig"))
        assert gpu["partition"]["mode_current"] == (None if mig is None else mig == "Enabled")
        mode = known(entry.findtext("compute_mode"))
        if mode:
            assert gpu["compute_mode"] == {"Default": "default", "Exclusive_Process": "exclusive_process", "Prohibited": "prohibited"}[mode]


def test_memory_of_the_shards_own_process_is_proven(host: fleet.Fleet, rows: list[dict[str, str]]) -> None:
    output = deploy(host)
    assert output.endswith("exit status 0"), output
    try:
        proof = json.loads((host.root("gpu-host") / "run/rankzero/gpu/ready.json").read_text(encoding="utf-8"))
        (gpu,) = proof["evidence"]["gpus"]
        assert gpu["uuid"] in {row["uuid"] for row in rows}
        assert gpu["enough"] and gpu["held_mib"] >= ENGINE_MIB, gpu
        assert gpu["by"] != "processes" or set(gpu["pids"]) <= set(host.marked()), gpu
        again = deploy(host)
        assert again.endswith("exit status 0") and re.search(r"gpu-host\s+: ok=\d+\s+changed=0", again), again
    finally:
        remove(host)


def test_an_engine_on_the_cpu_is_refused(host: fleet.Fleet) -> None:
    """It is healthy, lists its model and answers: everything but what counts."""
    output = deploy(host, "--no-cuda")
    assert output.endswith("exit status 2"), output
    assert "runs on the CPU" in output, output
    assert "Nothing of it was left behind." in output
    assert host.marked() == []


def test_a_shard_on_the_wrong_gpu_is_named(host: fleet.Fleet, facts: dict[str, Any]) -> None:
    whole = [gpu for gpu in facts["gpus"] if gpu["partition"]["kind"] is None]
    if len(whole) < 2:
        pytest.skip("one GPU only: there is no wrong one")
    other = whole[-1]  # the plan takes the first free one
    output = deploy(host, "--visible", other["uuid"])
    assert output.endswith("exit status 2"), output
    assert re.search(rf"GPU {other['index']}\b", output), output
    assert re.search("not (assigned|given)", output), output
    assert host.marked() == []


def test_a_gpu_that_somebody_else_holds_is_not_taken(host: fleet.Fleet, rows: list[dict[str, str]]) -> None:
    """A process outside of any shard holds memory on every GPU: the plan names it, and leaves it alone."""
    command = [
        sys.executable,
        str(HERE / "cuda_engine.py"),
        "serve",
        "--host",
        "127.0.0.1",
        "--port",
        str(free_port()),
        "--model",
        "foreign",
        f"--mib={ENGINE_MIB}",
    ]
    foreign = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    )
    try:
        assert foreign.stdout is not None
        taken = [foreign.stdout.readline() for _row in rows]
        assert all(line.startswith("took") for line in taken), taken
        time.sleep(0.5)
        output = deploy(host)
        assert output.endswith("exit status 2") and "nothing was changed" in output, output
        assert str(foreign.pid) in output or re.search(r"\d+ MiB.*(held|nobody|other)", output), output
        assert foreign.poll() is None
    finally:
        foreign.kill()
        foreign.wait()
