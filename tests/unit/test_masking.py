# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""No spelling of a secret passes, and nothing else is masked."""

from __future__ import annotations

import base64
import json
import pathlib
import shlex
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.rankzero.inference.plugins.module_utils import masking
from ansible_collections.rankzero.inference.plugins.module_utils.log_signatures import mask

KEYS = st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="*"), min_size=6, max_size=24)


@given(KEYS)
def test_every_spelling_of_a_key_is_masked(key: str) -> None:
    nested = json.dumps({"message": json.dumps({"k": key})})
    for written in (key, repr(["serve", key]), json.dumps({"k": key}), nested, shlex.join(["x", key]), "?k=" + quote(key, safe=""), key.encode().hex()):
        shown = mask(written, masking.all_spellings([key]))
        assert key not in shown and masking.MASK in shown


@given(st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=9, max_size=24), st.text(max_size=5), st.text(max_size=5))
def test_a_key_within_base64_is_masked(key: str, before: str, after: str) -> None:
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        written = encode((before + key + after).encode()).decode()
        shown = mask(written, masking.all_spellings([key]))
        assert masking.MASK in shown and len(shown.replace(masking.MASK, "")) <= len(written) - len(key)


def test_an_ordinary_key_hides_nothing_but_itself() -> None:
    assert masking.spellings("abcdef") == {"abcdef", "616263646566", "YWJjZGVm"}
    assert mask("bcde abcdef", masking.all_spellings(["abcdef"])) == "bcde ********"
    assert masking.spellings("abc") == set(), "masking so short a text would destroy the log"


@pytest.mark.parametrize(
    ("name", "telling"),
    [
        ("HF_TOKEN", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("DB_PASSWORD", True),
        ("VLLM_API_KEY", True),
        ("--api-key", True),
        ("--hf-token", True),
        ("TOKEN", True),
        ("--max-tokens", False),
        ("MAX_NUM_TOKENS", False),
        ("--ssl-key-file", False),
        ("TOKENIZERS_PARALLELISM", False),
        ("--tokenizer", False),
        ("KEYBOARD", False),
    ],
)
def test_names_that_tell_of_a_secret(name: str, telling: bool) -> None:
    assert masking.is_telling(name) is telling


def test_values_under_telling_names_are_masked_wherever_they_stand() -> None:
    launch = {
        "launches": [
            {
                "args": ["--hf-token", "hf_12345", "--api-key=sk-98765", "--token", "--verbose", "about hf_12345"],
                "env": {"HF_TOKEN": "hf_abcde", "PATH": "/hf_abcde/bin"},
            }
        ],
        "profile": {"env": {"SERVICE_PASSWORD": "pw0rdpw0rd"}},
    }
    shown = json.dumps(masking.masked(launch, ["/hf"]))
    for secret in ("hf_12345", "sk-98765", "hf_abcde", "pw0rdpw0rd"):
        assert secret not in shown
    assert "--verbose" in shown and launch["launches"][0]["env"]["HF_TOKEN"] == "hf_abcde", "the original stays"


def test_secrets_of_all_revisions_are_known(tmp_path: pathlib.Path) -> None:
    for revision, key in (("aaaa", "old-key-1"), ("bbbb", 'new"key-2\n')):
        folder = tmp_path / "revisions" / revision / "secrets"
        folder.mkdir(parents=True)
        (folder / "api_key").write_text(key)
    found = masking.of_replica(str(tmp_path))
    assert {"old-key-1", 'new"key-2', 'new\\"key-2'} <= set(found)
    assert masking.of_replica(str(tmp_path / "none")) == []
