# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What AWX asks of surveys and credential types, and what it makes of them at a launch, for tests without a server.

Own words for the rules of AWX 24: `_validate_spec_data` of its survey view, `_survey_element_validation` and `_update_unified_job_kwargs` of its models,
`CredentialTypeInputField` and `CredentialTypeInjectorField`, how a job injects a credential, and `safe_dump`, by which extra variables reach Ansible.
They were compared with AWX 24.6 itself, by launches with right and wrong answers to every question (docs/awx.md).
"""

from __future__ import annotations

import pathlib
import re
from typing import Any

import jinja2
import jinja2.sandbox
import yaml

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROJECT = ROOT / "extensions/awx"
TYPES: dict[str, tuple[type, ...]] = {
    "text": (str,),
    "textarea": (str,),
    "password": (str,),
    "multiplechoice": (str,),
    "multiselect": (str,),
    "integer": (int,),
    "float": (float,),
}
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*\Z")


def configuration() -> dict[str, Any]:
    return dict(yaml.safe_load((PROJECT / "controller/configuration.yml").read_text(encoding="utf-8")))


def survey_faults(survey: dict[str, Any]) -> list[str]:
    """Why the server would refuse the survey."""
    found = [
        f"{field}: missing or of the wrong type"
        for field, kind in (("name", str), ("description", str), ("spec", list))
        if not isinstance(survey.get(field), kind)
    ]
    if found or not survey["spec"]:
        return found or ["spec: no question"]
    seen: set[str] = set()
    for question in survey["spec"]:
        name = question.get("variable")
        found += [f"{name}: {field} is no text" for field in ("type", "question_name", "variable") if not isinstance(question.get(field), str)]
        if not isinstance(question.get("required"), bool):
            found.append(f"{name}: required is no bool")
        if question.get("type") not in TYPES:
            found.append(f"{name}: type {question.get('type')}")
            continue
        if name in seen:
            found.append(f"{name}: asked twice")
        seen.add(name)
        found += [f"{name}: {limit} is no number" for limit in ("min", "max") if not isinstance(question.get(limit), (int, type(None)))]
        default = question.get("default", "")
        if default != "" and not isinstance(default, TYPES[question["type"]]):
            found.append(f"{name}: default {default!r}")
        if isinstance(default, str) and default.startswith("$encrypted$"):
            found.append(f"{name}: $encrypted$ is reserved")
        if question["type"] in ("multiplechoice", "multiselect"):
            if any(one not in choices_of(question) for one in str(default).splitlines()):
                found.append(f"{name}: default {default!r} is no choice")
    return found


def choices_of(question: dict[str, Any]) -> list[str]:
    choices = question.get("choices", [])
    return [line for line in choices.splitlines() if line.strip()] if isinstance(choices, str) else list(choices)


def answer_faults(survey: dict[str, Any], answers: dict[str, Any]) -> list[str]:
    """Why a launch with these answers would be refused."""
    found = []
    for question in survey["spec"]:
        name = question["variable"]
        if name not in answers:
            found += [f"{name}: value missing"] if question["required"] else []
            continue
        answer = answers[name]
        if question["type"] in ("text", "textarea", "password"):
            if not isinstance(answer, str):
                found.append(f"{name}: no text")
            elif len(answer) < (question.get("min") or 0) or len(answer) > (question.get("max") or 1 << 30):
                found.append(f"{name}: length {len(answer)}")
        elif question["type"] == "integer":
            if not isinstance(answer, int) or isinstance(answer, bool):
                found.append(f"{name}: no number")
            elif answer < (question.get("min") or 0) or answer > (question.get("max") or 1 << 30):
                found.append(f"{name}: {answer}")
        elif question["type"] == "multiplechoice" and answer not in choices_of(question):
            found.append(f"{name}: no choice")
    return found


def extra_variables(survey: dict[str, Any], answers: dict[str, Any]) -> dict[str, Any]:
    """The job's extra variables: defaults that are valid answers, then the answers. An optional text that was left empty is there, as an empty string.

    A required question has to be answered even where it has a default.
    """
    assert answer_faults(survey, answers) == []
    defaults = {}
    for question in survey["spec"]:
        default = question.get("default")
        if default is not None and not answer_faults({"spec": [question]}, {question["variable"]: default}):
            defaults[question["variable"]] = default
    return {**defaults, **answers}


class _UnsafeTexts(yaml.SafeDumper):
    """All texts marked, keys too."""

    def represent_data(self, data: Any) -> yaml.Node:
        return self.represent_scalar("!unsafe", data) if isinstance(data, str) else super().represent_data(data)


def extra_variables_file(extra: dict[str, Any]) -> str:
    """env/extravars of a job. ansible-core 2.19 reads the value of !unsafe as YAML does without quotes: "" is null, "8000" a number (ansible/awx#16205)."""
    return "---\n" + "".join(yaml.dump({name: value}, Dumper=_UnsafeTexts, default_flow_style=False) for name, value in extra.items())


def credential_type_faults(kind: dict[str, Any]) -> list[str]:
    """Why the server would refuse the credential type."""
    found = [] if kind["kind"] in ("cloud", "net") else [f"kind {kind['kind']}"]
    found += [f"inputs: {name}" for name in set(kind["inputs"]) - {"fields", "required"}]
    found += [f"injectors: {name}" for name in set(kind["injectors"]) - {"file", "env", "extra_vars"}]
    known = {"id", "label", "type", "format", "choices", "help_text", "multiline", "secret", "ask_at_runtime", "default"}
    ids = [field["id"] for field in kind["inputs"]["fields"]]
    for field in kind["inputs"]["fields"]:
        found += [f"{field['id']}: {name}" for name in set(field) - known]
        if not _NAME.match(field["id"]) or field["id"] == "tower" or ids.count(field["id"]) > 1 or field.get("type", "string") not in ("string", "boolean"):
            found.append(field["id"])
    found += [f"required: {name}" for name in kind["inputs"].get("required", []) if name not in ids]
    found += [f"env: {name}" for name in kind["injectors"].get("env", {}) if name.startswith("ANSIBLE_") or not _NAME.match(name)]
    files = list(kind["injectors"].get("file", {}))
    if any(name != "template" and not name.startswith("template.") for name in files) or ("template" in files and len(files) > 1):
        found.append(f"file: {files}")
    try:
        inject(kind, dict.fromkeys(ids, "x"), None)
    except jinja2.TemplateError as error:
        found.append(str(error))
    return found


def inject(kind: dict[str, Any], values: dict[str, str], folder: pathlib.Path | None) -> dict[str, str]:
    """The extra variables of a job with a credential of this type. Files are written into the folder with mode 0600, as a job does it."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined)

    def rendered(text: str, **more: Any) -> str:
        # What Ansible makes of the text in configuration.yml is what the server gets.
        return environment.from_string(jinja2.Environment().from_string(text).render()).render(**values, **more)

    names: dict[str, str] = {}
    for name, text in kind["injectors"].get("file", {}).items():
        path = (folder or pathlib.Path("/none")) / name
        content = rendered(text)
        if folder:
            path.touch(0o600)
            path.write_text(content, encoding="utf-8")
        names[name.partition(".")[2]] = str(path)
    tower = {"filename": names.get("", names)}
    return {name: rendered(text, tower=tower, awx=tower) for name, text in kind["injectors"].get("extra_vars", {}).items()}
