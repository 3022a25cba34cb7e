# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""extensions/awx as AWX will judge it: playbooks that it lists, surveys and a credential type that it takes, parameters that awx.awx knows."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import awx_rules
import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import is_trusted_as_template

PROJECT = awx_rules.PROJECT
CONFIGURATION = awx_rules.configuration()
TEMPLATES = {template["name"].removeprefix("Inference - "): template for template in CONFIGURATION["controller_templates"]}
KEY_TYPE = CONFIGURATION["controller_credential_types"][0]
# The parameters of awx.awx 24 with their types, as its modules declare them.
PARAMETERS = {
    "credential_type": {"name": str, "description": str, "kind": str, "inputs": dict, "injectors": dict},
    "project": {"name": str, "description": str, "organization": str, "scm_type": str, "scm_url": str, "scm_branch": str, "wait": bool},
    "project_update": {"name": str, "organization": str, "wait": bool, "interval": float, "timeout": int},
    "job_template": {
        **dict.fromkeys(["name", "description", "organization", "project", "inventory", "playbook", "execution_environment", "job_type"], str),
        **dict.fromkeys(["forks", "timeout", "job_slice_count", "verbosity"], int),
        **dict.fromkeys(["allow_simultaneous", "use_fact_cache", "survey_enabled", "become_enabled", "diff_mode"], bool),
        **dict.fromkeys([f"ask_{what}_on_launch" for what in ("credential", "job_type", "diff_mode", "verbosity", "limit", "variables")], bool),
        "credentials": list,
        "survey_spec": dict,
    },
    "workflow_job_template": {
        **dict.fromkeys(["name", "description", "organization", "inventory"], str),
        **dict.fromkeys(["survey_enabled", "allow_simultaneous"], bool),
        "survey_spec": dict,
        "workflow_nodes": list,
    },
}


def documents(path: pathlib.Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def imported(playbook: str) -> set[str]:
    """The playbooks of the project that this one imports, and those that they do."""
    local = set(re.findall(r"import_playbook: (\w+\.yml)", (PROJECT / playbook).read_text(encoding="utf-8")))
    return local.union(*(imported(name) for name in local))


def documented_variables() -> set[str]:
    """Names that the roles' argument specifications know, and those of the playbooks alone."""
    names = {"drain_hosts", "report_hosts", "engine_hosts", "replica_become", "replica_module_environment", "replica_names"}
    for path in awx_rules.ROOT.glob("roles/*/meta/argument_specs.yml"):
        for entry in documents(path)["argument_specs"].values():
            names |= set(entry.get("options", {}))
    return names


def test_there_is_a_template_for_each_thing_that_operators_do() -> None:
    assert {"plan", "deploy", "status", "rollback", "remove", "rotate API key", "drain", "undrain", "diagnose", "restart"} <= set(TEMPLATES)
    assert TEMPLATES["plan"]["job_type"] == "check"


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_template(name: str) -> None:
    """AWX lists its playbook, takes its survey, and neither slices nor limits a replica."""
    template = TEMPLATES[name]
    text = (PROJECT / template["playbook"]).read_text(encoding="utf-8")
    assert re.search(r"^\s*-?\s*(?:hosts|import_playbook|ansible\.builtin\.import_playbook):\s*?\S", text, re.MULTILINE), "AWX would not list it"
    for target in re.findall(r"import_playbook: (\S+)", text):
        where = awx_rules.ROOT / "playbooks" / f"{target.rsplit('.', 1)[1]}.yml" if target.startswith("rankzero.") else PROJECT / target
        assert where.exists(), target
    assert awx_rules.survey_faults(template["survey_spec"]) == []
    assert template["job_slice_count"] == 1 and not any(template.get(f"ask_{what}_on_launch") for what in ("limit", "job_slice_count", "variables"))
    assert template["timeout"] == 0 or template["timeout"] >= 600


def test_every_question_is_about_a_variable_that_is_documented() -> None:
    taken = documents(PROJECT / "answers.yml")[0]["vars"]["answers"]
    known = documented_variables()
    assert set(taken) <= known
    for template in TEMPLATES.values():
        for question in template["survey_spec"]["spec"]:
            name = question["variable"]
            if name.startswith("answer_"):
                assert name.removeprefix("answer_") in taken and not question["required"]
                assert "answers.yml" in imported(template["playbook"]), f"{template['name']} ignores {name}"
            else:
                assert name in known, name


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_optional_questions_may_be_left_empty(name: str) -> None:
    """The page sends an empty string for them, which the server must take, and which is what the play gets."""
    survey = TEMPLATES[name]["survey_spec"]
    given = {question["variable"]: (question.get("choices") or ["xxx"])[0] for question in survey["spec"] if question["required"]}
    empty = {question["variable"]: "" for question in survey["spec"] if not question["required"] and question["default"] == ""}
    extra = awx_rules.extra_variables(survey, {**given, **empty})
    assert set(extra) == {question["variable"] for question in survey["spec"]}
    assert all(extra[variable] == "" for variable in empty)


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_a_question_is_required_when_it_has_no_default(name: str) -> None:
    """AWX wants required questions answered by who launches by the API, whatever their default: `'drain_timeout' value missing`."""
    for question in TEMPLATES[name]["survey_spec"]["spec"]:
        must = question["default"] == "" and (question.get("min", 0) > 0 or question["type"] != "text")
        assert question["required"] is must, question["variable"]


def test_answers_reach_ansible_as_awx_sends_them() -> None:
    """Why answers.yml looks at types: with ansible-core 2.19 a text is no longer one where it looks like something else."""
    text = awx_rules.extra_variables_file({"a": "", "b": "8000", "c": "1.10", "d": "false", "e": "glm-5", "f": 3, "g": "{{ 1 }}"})
    read = DataLoader().load(text)
    assert read == {"a": None, "b": 8000, "c": 1.1, "d": False, "e": "glm-5", "f": 3, "g": "{{ 1 }}"}
    assert not is_trusted_as_template(read["g"])


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"type": "word"}, "x: type word"),
        ({"type": "integer", "default": "8"}, "x: default '8'"),
        ({"type": "multiplechoice", "choices": ["a"], "default": "b"}, "x: default 'b' is no choice"),
        ({"required": "yes"}, "x: required is no bool"),
        ({"min": "1"}, "x: min is no number"),
        ({"default": "$encrypted$1"}, "x: $encrypted$ is reserved"),
    ],
)
def test_the_rules_for_surveys_find_what_they_are_for(change: dict[str, Any], fault: str) -> None:
    good = {"question_name": "X", "variable": "x", "type": "text", "required": True, "default": ""}
    survey = {"name": "", "description": "", "spec": [good]}
    assert awx_rules.survey_faults(survey) == []
    assert awx_rules.survey_faults({**survey, "spec": [{**good, **change}]}) == [fault]
    assert awx_rules.survey_faults({**survey, "spec": [good, good]}) == ["x: asked twice"]


def test_the_key_comes_by_a_file_only(tmp_path: pathlib.Path) -> None:
    """It is a secret of its type, and no variable or environment holds it."""
    assert awx_rules.credential_type_faults(KEY_TYPE) == []
    (field,) = KEY_TYPE["inputs"]["fields"]
    assert field["secret"] and KEY_TYPE["inputs"]["required"] == [field["id"]]
    key = "k3y-{{ no }}-%-$HOME"
    extra = awx_rules.inject(KEY_TYPE, {field["id"]: key}, tmp_path)
    assert set(extra) == {"replica_api_key_file"} and key not in str(extra)
    path = pathlib.Path(extra["replica_api_key_file"])
    assert path.read_text() == key and path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "change",
    [
        {"injectors": {"env": {"ANSIBLE_KEY": "x"}}},
        {"injectors": {"file": {"template": "{% raw %}{{ other }}{% endraw %}"}}},
        {"injectors": {"file": {"template": "x", "template.more": "y"}}},
        {"kind": "ssh"},
        {"inputs": {"fields": [{"id": "api_key", "label": "A", "hidden": True}]}},
        {"inputs": {"fields": [{"id": "api_key", "label": "A"}], "required": ["token"]}},
    ],
)
def test_the_rules_for_credential_types_find_what_they_are_for(change: dict[str, Any]) -> None:
    assert awx_rules.credential_type_faults({**KEY_TYPE, **change}) != []


def test_templates_that_plan_ask_for_a_credential() -> None:
    """Without the key a plan is that of another revision, and a deploy would open the endpoint to anybody."""
    asking = {name for name, template in TEMPLATES.items() if template.get("ask_credential_on_launch")}
    planning = {name for name, template in TEMPLATES.items() if "answer_replica_profile" in str(template["survey_spec"])}
    assert asking == planning


def test_configure_uses_parameters_that_awx_knows() -> None:
    """And gives each of them what configuration.yml has for it, and all of it."""
    (play,) = documents(PROJECT / "controller/configure.yml")
    given: dict[str, set[str]] = {}
    for task in play["tasks"]:
        module = next((name for name in task if name.startswith("awx.awx.")), None)
        if not module:
            continue
        parameters = PARAMETERS[module.removeprefix("awx.awx.")]
        assert set(task[module]) <= set(parameters)
        collection = re.search(r"\w+", task["loop"]).group()  # type: ignore[union-attr]
        used = set(re.findall(r"item\.(\w+)", str(task[module])))
        given.setdefault(collection, set()).update(used)
        optional = {name for name in used if f"item.{name} | default(" in str(task[module])}
        for item in CONFIGURATION[collection]:
            assert used - optional <= set(item), f"{item['name']}: {used - optional - set(item)}"
            for name, value in task[module].items():
                source = re.search(r"item\.(\w+)", str(value))
                if source and source.group(1) in item:
                    assert isinstance(item[source.group(1)], parameters[name]), f"{item['name']}: {name}"
    for collection, used in given.items():
        assert all(set(item) <= used for item in CONFIGURATION[collection])


def test_the_project_is_updated_before_its_templates_are_made() -> None:
    """Not only when it is new: AWX refuses a template whose playbook the last update did not have: `Playbook not found for project`."""
    (play,) = documents(PROJECT / "controller/configure.yml")
    modules = [name for task in play["tasks"] for name in task if name.startswith("awx.awx.")]
    assert modules == [f"awx.awx.{name}" for name in ("credential_type", "project", "project_update", "job_template", "workflow_job_template")]


def test_workflow_nodes_name_templates_that_are_there() -> None:
    for workflow in CONFIGURATION["controller_workflows"]:
        assert awx_rules.survey_faults(workflow["survey_spec"]) == []
        assert workflow["allow_simultaneous"] is True, "two replicas may be deployed at once"
        nodes = {node["identifier"]: node for node in workflow["workflow_nodes"]}
        for node in nodes.values():
            assert node["unified_job_template"]["name"].removeprefix("Inference - ") in TEMPLATES
            for following in node.get("related", {}).values():
                assert {one["identifier"] for one in following} <= set(nodes)
