# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the documentation tells people to type and to write is run: its commands, inventories and profiles; and each variable is documented where it is used."""

from __future__ import annotations

import json
import pathlib
import re
import shlex
import subprocess
import sys
from typing import Any

import fleet
import pytest
import yaml

sys.path.insert(0, str(fleet.ROOT / "tests/unit"))

import engine_requests
import facts as made

ROOT = fleet.ROOT
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *ROOT.glob("roles/*/README.md")])
PROFILES = sorted((ROOT / "docs/examples/profiles").glob("*.yml"))
# Variables of the playbooks, which no role has.
OF_PLAYBOOKS = {"replica_become", "replica_module_environment", "drain_hosts", "report_hosts", "engine_hosts", "scrape_hosts", "scrape_on", "scrape_file"}
OF_AWX = {"inference_project_url", "inference_inventory", "inference_machine_credential"}
# Names of the role's variables on the command line.
SHORT = {"plan_file", "plan_picture", "diagnosis_dir"}


def specifications() -> dict[str, dict[str, Any]]:
    """role/entry point -> its options."""
    found = {}
    for path in ROOT.glob("roles/*/meta/argument_specs.yml"):
        for entry, spec in yaml.safe_load(path.read_text(encoding="utf-8"))["argument_specs"].items():
            found[f"{path.parent.parent.name}/{entry}"] = spec["options"]
    return found


OPTIONS = {name for options in specifications().values() for name in options}


def commands(page: pathlib.Path) -> list[list[str]]:
    """Lines that begin with ansible-playbook in the blocks of a page or the comments of a playbook, joined where they are continued, brackets left out."""
    text = re.sub(r"\[(-[^]]*)\]", r"\1", page.read_text(encoding="utf-8").replace("\\\n", " "))
    return [shlex.split(line, comments=True) for line in re.findall(r"^#? *(ansible-playbook .*)$", text, re.MULTILINE)]


def extra_variables(command: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for position, word in enumerate(command):
        if word == "-e" and not command[position + 1].startswith("@"):
            text = command[position + 1]
            found.update(json.loads(text) if text.startswith("{") else dict([text.split("=", 1)]))
    return found


@pytest.mark.parametrize("page", [*PAGES, *sorted((ROOT / "playbooks").glob("*.yml"))], ids=lambda page: str(page.relative_to(ROOT)))
def test_page(page: pathlib.Path) -> None:
    """Every playbook and variable that a command names is there, every yaml and json block can be read, and every link leads somewhere."""
    if page.suffix == ".yml":
        assert f"ansible-playbook rankzero.inference.{page.stem}" in page.read_text(encoding="utf-8"), "it does not say how it is run"
    for command in commands(page):
        name = next((word for word in command[1:] if word.startswith("rankzero.inference.")), None)
        assert name is None or (ROOT / "playbooks" / f"{name.rsplit('.', 1)[1]}.yml").exists(), command
        unknown = set(extra_variables(command)) - OPTIONS - OF_PLAYBOOKS - SHORT - OF_AWX
        assert not unknown, f"{command} gives {unknown}"
    text = page.read_text(encoding="utf-8")
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if language in ("yaml", "json"):
            assert yaml.safe_load(block)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _hash, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{target} leads nowhere"
        if anchor and linked.suffix == ".md":
            lines = [line.lstrip("# ").lower() for line in linked.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
            headings = [re.sub(r"[^\w\- ]", "", line).replace(" ", "-") for line in lines]
            assert anchor in headings, f"{target}: no such heading"


def test_everything_that_is_included_is_listed() -> None:
    readme, playbooks = (path.read_text(encoding="utf-8") for path in (ROOT / "README.md", ROOT / "docs/playbooks.md"))
    modules = {path.stem for path in ROOT.glob("plugins/modules/*.py")}
    assert {name for name in modules if f"`{name}`" not in readme} == set()
    on_hosts = {name for name in modules if "\n  replica_root:\n" in (ROOT / f"plugins/modules/{name}.py").read_text(encoding="utf-8")}
    group = set(yaml.safe_load((ROOT / "meta/runtime.yml").read_text())["action_groups"]["inference"])
    assert group == on_hosts, "module_defaults for the group fails on a module that has not the option"
    assert {path.stem for path in ROOT.glob("playbooks/*.yml") if f"`{path.stem}`" not in playbooks} == set()
    assert {path.name for path in ROOT.glob("docs/decisions/0*.md") if path.name not in (ROOT / "docs/decisions/README.md").read_text()} == set()
    assert {path.name for path in ROOT.glob("docs/*.md") if f"docs/{path.name}" not in readme} == set()


def test_variables_in_prose_are_documented() -> None:
    """A name in code type that looks like one of ours is an option, a fact, or a variable of a playbook."""
    known = OPTIONS | OF_PLAYBOOKS | SHORT | {path.stem for path in ROOT.glob("plugins/*/*.py")} | {path.stem for path in ROOT.glob("playbooks/*.yml")}
    known |= {"engine_version"}  # a field of profiles
    for page in PAGES:
        if "decisions" in page.parts or page.name == "architecture.md":
            continue
        for name in re.findall(r"`((?:replica|engine|drain|report|scrape)_[a-z_]+)`", page.read_text(encoding="utf-8")):
            known_group = name in ("replica_glm", "replica_glm_ready")
            assert name in known or known_group, f"{page.name}: {name}"


def test_every_variable_of_a_role_is_documented_where_it_is_used() -> None:
    """Defaults are options of main with the same value, and whatever the tasks of an entry point use is an option of that entry point."""
    specs = specifications()
    for role in ("replica", "engine"):
        folder = ROOT / "roles" / role
        defaults = yaml.safe_load((folder / "defaults/main.yml").read_text(encoding="utf-8"))
        documented = {name: option for entry, options in specs.items() if entry.startswith(f"{role}/") for name, option in options.items()}
        assert set(defaults) <= set(documented), f"{role}: not documented: {set(defaults) - set(documented)}"
        for name, value in defaults.items():
            told = documented[name]
            if not (isinstance(value, str) and "{{" in value) and not told.get("required"):
                assert told.get("default") == value, f"{role}: {name} is {value!r}, documented as {told.get('default')!r}"
        for entry, options in specs.items():
            if entry.startswith(f"{role}/"):
                used = used_by(folder, f"{entry.partition('/')[2]}.yml") & set(defaults)
                used -= {"replica_name"} if entry == "replica/roll" else set()  # it sets that itself, one after the other
                assert used <= set(options), f"{entry} does not document {used - set(options)}"


def used_by(folder: pathlib.Path, name: str) -> set[str]:
    """Words in a task file and in those that it includes, but for options that a task itself switches on or off."""
    text = (folder / "tasks" / name).read_text(encoding="utf-8")
    words = set(re.findall(r"\w+", re.sub(r"^\s*- name: .*$|^\s*\w+: (?:true|false)\b|#.*$|rankzero\.inference\.\w+|-e \w+=", "", text, flags=re.MULTILINE)))
    for included in re.findall(r"(?:import|include)_tasks: (\w+\.yml)", text):
        words |= used_by(folder, included)
    return words


# ---- run


def recorded(profile: dict[str, Any], hosts: list[str]) -> dict[str, Any]:
    """Facts of hosts on which the profile can be planned: GPUs, a fabric, the engine's build, model and adapters."""
    gpus = profile.get("gpus_per_node", profile.get("tp", 1))
    paths = [profile["model_path"], *(adapter["path"] for adapter in profile.get("adapters", []))]
    model = {"exists": True, "readable": True, "kind": "directory", "bytes": 16 << 30, "weight_bytes": 16 << 30, "files": 4}
    model["config"] = {"num_attention_heads": 64, "num_hidden_layers": 32, "hidden_size": 4096, "r": 8, "peft_type": "LORA"}
    builds = {profile["engine"]: [engine_requests.build(profile["engine"])]} if profile["engine"] != "sim" else {}
    return {
        host: {
            "ansible_connection": "local",
            "ansible_python_interpreter": sys.executable,
            "inference_node": made.node(number + 1, gpus=gpus, hcas=min(gpus, 1), models=dict.fromkeys(paths, model), engines=builds),
        }
        for number, host in enumerate(hosts)
    }


def play(*words: str, cwd: pathlib.Path) -> subprocess.CompletedProcess[str]:
    environment = {**fleet.ansible_environment(), "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections")}
    program = str(pathlib.Path(sys.executable).parent / "ansible-playbook")
    return subprocess.run([program, *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_example_profile(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Planned by plan_replica from recorded facts, with all ranks placed."""
    profiles = yaml.safe_load(path.read_text(encoding="utf-8"))["replica_profiles"]
    for name, profile in profiles.items():
        hosts = recorded(profile, [f"gpu-{number}" for number in range(profile.get("nodes", 1))])
        inventory = tmp_path / "inventory.json"
        inventory.write_text(
            json.dumps({"all": {"children": {"replica_glm": {"hosts": hosts, "vars": {"replica_profiles": profiles, "replica_profile": name}}}}})
        )
        done = play(
            "-i", str(inventory), "rankzero.inference.plan_replica",
            "-e", json.dumps({"replica_name": "glm", "replica_gather": False, "replica_become": False, "plan_file": "plan.json"}), cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert len(json.loads((tmp_path / "plan.json").read_text())["shards"]) == profile.get("nodes", 1)


def test_quick_start(tmp_path: pathlib.Path) -> None:
    """Its inventory and its commands, in its order: plans from recorded facts, everything else as a check on empty hosts."""
    page = ROOT / "docs/quick-start.md"
    inventory = yaml.safe_load(re.findall(r"^```yaml\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)[0])
    group = inventory["all"]["children"]["replica_glm"]
    (tmp_path / "inventory.yml").write_text(yaml.safe_dump(inventory))
    (tmp_path / "glm.key").write_text("a-key-0123456789")
    profile = next(iter(group["vars"]["replica_profiles"].values()))
    hosts = recorded(profile, list(group["hosts"]))
    for name, variables in hosts.items():
        (tmp_path / "roots" / name).mkdir(parents=True)
        variables.update(replica_root=str(tmp_path / "roots" / name), replica_become=False)
    (tmp_path / "these_hosts.json").write_text(json.dumps({"all": {"hosts": hosts}}))
    wanted = {"node_report": 0, "check_engines": 2, "plan_replica": 0, "preflight": 0, "deploy_replica": 0, "replica_status": 0, "diagnose": 0}
    wanted |= {"rollback_replica": 2, "remove_replica": 0}
    seen = set()
    for command in commands(page):
        name = command[3].removeprefix("rankzero.inference.")
        recorded_facts = ["-e", "replica_gather=false"] if name in ("plan_replica", "preflight", "deploy_replica") else []
        done = play(*command[1:], "-i", "these_hosts.json", "--check", *recorded_facts, cwd=tmp_path)
        said = " ".join((done.stdout + done.stderr).split())
        assert done.returncode == wanted[name], said
        if name == "plan_replica":
            assert "glm-h100-2x8 on vllm, TP 8 x PP 2 over 2 node(s), 8 GPU(s) each" in said
        if name == "check_engines":
            assert "no executable vllm in /opt/vllm" in said, said
        if name == "rollback_replica":
            assert "Deploy it first" in said
        seen.add(name)
    assert seen == set(wanted)
    assert [path for path in (tmp_path / "roots").rglob("*") if path.is_file()] == []
