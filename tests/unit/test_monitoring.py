# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Targets for Prometheus from facts, and that rules, rulebook and job templates speak of the same things."""

from __future__ import annotations

import re
from typing import Any

import awx_rules
import yaml
from facts import node

from ansible_collections.rankzero.inference.plugins.plugin_utils import engines, scrape
from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Findings

EXTENSIONS = awx_rules.ROOT / "extensions"
GROUPS = yaml.safe_load((EXTENSIONS / "monitoring/alerts.yml").read_text(encoding="utf-8"))["groups"]
RULES = {rule["alert"]: rule for group in GROUPS for rule in group["rules"]}


def shard(rank: int, url: str | None, stage: str | None = "running", engine: str | None = "vllm", **more: Any) -> dict[str, Any]:
    return {"rank": rank, "nodes": 2, "revision": "f1", "engine": engine, "profile": "glm-h100", "url": url, "stage": stage, **more}


def labels(replica: str, host: str, engine: str = "vllm") -> dict[str, str]:
    return {"replica": replica, "engine": engine, "profile": "glm-h100", "host": host, "__metrics_path__": "/metrics"}


def test_one_target_for_each_rank_that_serves() -> None:
    """By replica and natural order of hosts; IPv6 too. Followers, and hosts without facts, have none."""
    facts = {
        "n10": node(10, shards={"glm": shard(0, "http://10.0.0.10:8000"), "chat": shard(0, "http://[fd00::10]:8001", engine="llamacpp")}),
        "n2": node(2, shards={"glm": shard(1, None), "hybrid": shard(0, "http://10.0.0.2:8002")}),
        "n9": node(9, shards={"hybrid": shard(1, "http://10.0.0.9:8002")}),
        "n1": None,
    }
    assert scrape.targets(facts) == [
        {"targets": ["[fd00::10]:8001"], "labels": labels("chat", "n10", "llamacpp")},
        {"targets": ["10.0.0.10:8000"], "labels": labels("glm", "n10")},
        {"targets": ["10.0.0.2:8002"], "labels": labels("hybrid", "n2")},
        {"targets": ["10.0.0.9:8002"], "labels": labels("hybrid", "n9")},
    ]


def test_a_replica_that_was_stopped_is_left_out_and_one_that_failed_or_whose_host_was_off_is_not() -> None:
    """An alarm is for what nobody wanted."""
    stages = {"drained": "stopped", "failed": "failed", "rebooted": None, "loading": "running"}
    facts = {"n1": node(1, shards={name: shard(0, "http://10.0.0.1:80", stage) for name, stage in stages.items()})}
    assert [entry["labels"]["replica"] for entry in scrape.targets(facts)] == ["failed", "loading", "rebooted"]


def test_an_engine_that_is_not_there_any_more_has_no_target() -> None:
    assert scrape.targets({"n1": node(1, shards={"a": shard(0, "http://10.0.0.1:80", engine="gone"), "b": shard(0, "http://10.0.0.1:81", engine=None)})}) == []


def test_rules_speak_of_metrics_that_engines_have_and_labels_that_targets_have() -> None:
    waiting = {adapter.in_flight_metrics[-1] for name in engines.BUILT_IN if name != "sim" and (adapter := engines.load(name, Findings()))}
    assert waiting == set(re.findall(r"\w+:\w+", RULES["InferenceRequestsQueue"]["expr"]))
    known = {name for name in labels("", "") if not name.startswith("__")}
    for rule in RULES.values():
        assert 'job="inference"' in rule["expr"]
        assert set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"]))) <= known


def test_the_rulebook_knows_the_alerts_and_the_job_templates() -> None:
    templates = {template["name"]: template for template in awx_rules.configuration()["controller_templates"]}
    (book,) = yaml.safe_load((EXTENSIONS / "eda/rulebooks/replica_failed.yml").read_text(encoding="utf-8"))
    for rule in book["rules"]:
        assert set(re.findall(r'"(Inference\w+)"', rule["condition"])) <= set(RULES)
        job = rule["action"]["run_job_template"]
        survey = templates[job["name"]]["survey_spec"]
        answers = dict.fromkeys(job["job_args"]["extra_vars"], "glm")
        assert awx_rules.answer_faults(survey, answers) == [], "AWX would refuse the launch"
        assert set(answers) <= {question["variable"] for question in survey["spec"]}
