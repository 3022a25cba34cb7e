# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The wrapper project under ansible-runner, the engine of AWX: the launch of a template with its survey, credential and meta variables, hosts by name."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import ansible_runner
import awx_rules
import fleet
import pytest
from conftest import sim_profile
from test_simulated_replica import request

MakeFleet = Callable[..., fleet.Fleet]
CONFIGURATION = awx_rules.configuration()
TEMPLATES = {template["name"].removeprefix("Inference - "): template for template in CONFIGURATION["controller_templates"]}
(WORKFLOW,) = CONFIGURATION["controller_workflows"]
KEY = "awx-k3y-0123456789"


@dataclasses.dataclass(frozen=True)
class Job:
    """What AWX would show of a job."""

    status: str
    events: list[dict[str, Any]]
    output: str

    @property
    def artifacts(self) -> dict[str, Any]:
        """What later nodes of a workflow get."""
        return dict(self.events[-1]["event_data"].get("artifact_data") or {})

    @property
    def said(self) -> str:
        return " ".join(self.output.split())

    def lines(self, *words: str) -> list[dict[str, Any]]:
        """Live lines with all these words: events between the start of a task and its results, which AWX shows as they come."""
        return [event for event in self.events if event["event"] == "verbose" and all(word in event["stdout"] for word in words)]


def awx_inventory(hosts: fleet.Fleet, names: list[str] | None = None) -> pathlib.Path:
    """The inventory as AWX hands it over: a program, groups of names in order of name, and what a slice leaves of it."""
    group = json.loads(hosts.inventory.read_text())["all"]["children"][hosts.group]
    chosen = sorted(names or group["hosts"])
    data = {hosts.group: {"hosts": chosen, "vars": group["vars"]}, "_meta": {"hostvars": {name: group["hosts"][name] for name in chosen}}}
    path = hosts.directory / "awx_inventory"
    path.write_text(f"#!{sys.executable}\nprint({json.dumps(data)!r})\n")
    path.chmod(0o700)
    return path


def launch(
    hosts: fleet.Fleet, template: str, folder: pathlib.Path, *, names: list[str] | None = None, key: str | None = None, limit: str | None = None,
    meta: dict[str, Any] | None = None, forks: int | None = None, **answers: Any,
) -> Job:  # fmt: skip
    """One job of a template: optional texts are left empty, questions with a default are left out, and a credential's key comes by its file."""
    chosen = TEMPLATES[template]
    survey = chosen["survey_spec"]
    empty = {question["variable"]: "" for question in survey["spec"] if not question["required"] and question["default"] == ""}
    extra = awx_rules.extra_variables(survey, {**empty, **answers})
    (folder / "runner/env").mkdir(parents=True)
    if key:
        extra.update(awx_rules.inject(CONFIGURATION["controller_credential_types"][0], {"api_key": key}, folder))
    extra.update({"awx_job_id": 7, "awx_user_name": "ann", "awx_job_template_name": chosen["name"], **(meta or {})})
    (folder / "runner/env/extravars").write_text(awx_rules.extra_variables_file(extra))
    done = ansible_runner.run(
        private_data_dir=str(folder / "runner"),
        project_dir=str(awx_rules.PROJECT),
        playbook=chosen["playbook"],
        inventory=str(awx_inventory(hosts, names)),
        forks=forks or chosen["forks"],
        limit=limit,
        cmdline="--check" if chosen["job_type"] == "check" else None,
        envvars={**fleet.ansible_environment(), "ANSIBLE_COLLECTIONS_PATH": str(fleet.ROOT / ".collections")},
        quiet=True,
    )
    return Job(done.status, list(done.events), done.stdout.read())


def roots(hosts: fleet.Fleet) -> list[pathlib.Path]:
    return [path for name in hosts.hosts for path in hosts.root(name).rglob("*")]


@pytest.mark.parametrize("forks", [5, 1])
def test_life_under_awx(make_fleet: MakeFleet, model: pathlib.Path, tmp_path: pathlib.Path, forks: int) -> None:
    """Empty answers leave what the inventory says; lines come live; the endpoint is an artifact; the key is in no event."""
    hosts = make_fleet(
        ["gpu-b", "gpu-a"], gpus=1, replica="e2e", replica_leader="gpu-b", replica_profile="tiny",
        replica_profiles={"tiny": {}, "other": {}},
    )  # fmt: skip
    hosts.variables["replica_profiles"]["tiny"] = sim_profile(hosts, model, nodes=2, gpus=1)
    hosts.write_inventory()

    planned = launch(hosts, "plan", tmp_path / "plan", replica_name="e2e")
    assert planned.status == "successful", planned.output
    assert "Plan for replica e2e: tiny on sim" in planned.output and roots(hosts) == []

    done = launch(hosts, "deploy", tmp_path / "deploy", key=KEY, forks=forks, replica_name="e2e")
    assert done.status == "successful", done.output
    artifact = done.artifacts["replica_e2e"]
    assert artifact["ready"] is True and artifact["endpoint"].startswith(f"http://{hosts.hosts['gpu-b'].address}:"), "rank 0 is where the inventory says"
    assert request(artifact["endpoint"], "/v1/models", KEY)[0] == 200 and request(artifact["endpoint"], "/v1/models")[0] == 401
    assert KEY not in json.dumps(done.events) + done.output
    for host, rank in (("gpu-a", 1), ("gpu-b", 0)):
        ready = done.lines(f"rank {rank} ({host}):", " ready ")[-1]
        ok = [
            event for event in done.events if event["event"] == "runner_on_ok" and event["event_data"]["host"] == host and event["counter"] > ready["counter"]
        ]
        assert ok and ready["parent_uuid"] == ok[0]["parent_uuid"], "it came while its task ran"

    forgotten = launch(hosts, "deploy", tmp_path / "forgotten", replica_name="e2e")
    assert forgotten.status == "failed" and "replica_api_key: seen nothing, and the replica that is deployed has a key" in forgotten.said, forgotten.output
    assert request(artifact["endpoint"], "/v1/models")[0] == 401

    again = launch(hosts, "deploy", tmp_path / "again", key=KEY, forks=forks, replica_name="e2e", answer_replica_profile="tiny")
    assert again.status == "successful" and again.events[-1]["event_data"]["changed"] == {}, again.output
    if forks == 1:
        return

    targets = tmp_path / "targets.json"
    written = hosts.run("scrape_targets", extra={"scrape_file": str(targets)})
    assert written.returncode == 0, written.stdout + written.stderr
    (target,) = json.loads(targets.read_text())
    assert f"http://{target['targets'][0]}" == artifact["endpoint"] and target["labels"]["host"] == "gpu-b"
    assert request(artifact["endpoint"], target["labels"]["__metrics_path__"])[0] == 200

    told = launch(hosts, "status", tmp_path / "status", replica_name="e2e")
    assert told.status == "successful" and "gpu-b" in told.said

    cordoned = launch(hosts, "drain", tmp_path / "drain", drain_host="gpu-a", drain_reason="fan 3")
    assert cordoned.status == "successful", cordoned.output
    assert json.loads((hosts.root("gpu-a") / "etc/rankzero/cordoned.json").read_text())["by"] == "ann by job 7"
    assert launch(hosts, "undrain", tmp_path / "undrain", drain_host="gpu-a").status == "successful"
    assert launch(hosts, "restart", tmp_path / "restart", replica_name="e2e").status == "successful"
    assert launch(hosts, "diagnose", tmp_path / "diagnose", replica_name="e2e").status == "successful"
    removed = launch(hosts, "remove", tmp_path / "remove", replica_name="e2e")
    assert removed.status == "successful" and hosts.marked() == [], removed.output


def test_what_is_no_text_any_more_is_refused(make_fleet: MakeFleet, tmp_path: pathlib.Path) -> None:
    """A profile "1.10" would be looked for as 1.1, and a build "0.10" be registered as 0.1."""
    hosts = make_fleet(["gpu-a"], gpus=1, replica="e2e", replica_profile="tiny", replica_profiles={"1.1": {}})
    planned = launch(hosts, "plan", tmp_path / "plan", replica_name="e2e", answer_replica_profile="1.10")
    assert planned.status == "failed" and "answer_replica_profile: seen 1.1 (float), wanted text" in planned.said, planned.output
    registered = launch(hosts, "register engine", tmp_path / "engine", engine_name="vllm", engine_path="/opt/vllm", engine_build_name="0.10")
    assert registered.status == "failed" and "engine_build_name: seen 0.1 (float), wanted text" in registered.said, registered.output
    assert roots(hosts) == []


def test_a_workflow_fails_with_its_deploy(make_fleet: MakeFleet, tmp_path: pathlib.Path) -> None:
    """AWX takes a handled failure for a success: so the node that handles it says why, and fails."""
    hosts = make_fleet(["gpu-a"], gpus=1, replica="e2e", replica_profile="tiny", replica_profiles={"tiny": {}})
    nodes = {node["identifier"]: node for node in WORKFLOW["workflow_nodes"]}
    failing = nodes[nodes["deploy"]["related"]["failure_nodes"][0]["identifier"]]
    told = launch(hosts, failing["unified_job_template"]["name"].removeprefix("Inference - "), tmp_path / "why", replica_name="e2e")
    assert told.status == "failed" and "Replica e2e is on none of these hosts" in told.said and "The deploy of replica e2e failed" in told.said, told.output


def test_parts_of_a_replica_are_refused(make_fleet: MakeFleet, model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A limit, and a slice, whose job sees an inventory without the other hosts; before anything is written."""
    hosts = make_fleet(["gpu-a", "gpu-b"], gpus=1, replica="e2e", replica_profile="tiny", replica_profiles={"tiny": {}})
    hosts.variables["replica_profiles"]["tiny"] = sim_profile(hosts, model, nodes=1, gpus=1)
    hosts.write_inventory()
    limited = launch(hosts, "deploy", tmp_path / "limited", limit="gpu-a", replica_name="e2e")
    assert limited.status == "failed" and "gpu-b" in limited.said and "--limit" in limited.said, limited.output

    slice_of = {"awx_workflow_job_id": 6, "awx_workflow_job_name": TEMPLATES["deploy"]["name"]}
    sliced = launch(hosts, "deploy", tmp_path / "sliced", names=["gpu-a"], meta=slice_of, replica_name="e2e")
    assert sliced.status == "failed" and "is one slice of" in sliced.said and "job_slice_count" in sliced.said, sliced.output
    assert roots(hosts) == [] and os.listdir(hosts.processes) == []

    whole = launch(hosts, "plan", tmp_path / "whole", meta={"awx_workflow_job_id": 6, "awx_workflow_job_name": "Nightly"}, replica_name="e2e")
    assert whole.status == "successful", whole.output
