# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Models on real files: sizes, configuration, GGUF headers (hostile ones too), and who can read them."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import struct
import subprocess
import time

import pytest
import tiny_models
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ansible_collections.rankzero.inference.plugins.module_utils import models

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 2,
    "hidden_size": 4096,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 8192,
    "vocab_size": 128256,
}


def model(folder: pathlib.Path, files: dict[str, int], config: dict | None = None, **others: dict) -> str:
    """A directory with files of these sizes and these JSON files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, size in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
    for name, content in dict({"config.json": config} if config is not None else {}, **others).items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return str(folder)


# ---- sizes and configuration


def test_hugging_face_directory(tmp_path):
    path = model(
        tmp_path / "glm",
        {"model-00001-of-00002.safetensors": 700, "model-00002-of-00002.safetensors": 300, "tokenizer.json": 50, ".git/x": 9, "original/w.pth": 99},
        CONFIG,
    )
    found = models.describe(path)
    size = os.path.getsize(tmp_path / "glm" / "config.json")
    assert found == {
        "exists": True,
        "readable": True,
        "kind": "directory",
        "bytes": 1149 + size,
        "weight_bytes": 1000,
        "files": 5,
        "error": None,
        "config": {key: value for key, value in CONFIG.items() if key != "vocab_size"},
        "digest": found["digest"],
        "fetched": None,
    }


@pytest.mark.parametrize(
    ("files", "weights"),
    [
        ({"model.safetensors": 10, "pytorch_model.bin": 40}, 10),  # engines take one format
        ({"pytorch_model-1.bin": 40, "training_args.bin": 5, "optimizer.bin": 80}, 40),
        ({"model.safetensors": 10, "consolidated.safetensors": 10}, 10),  # the same weights twice
        ({"consolidated-00001.safetensors": 10, "consolidated-00002.safetensors": 10}, 20),
        ({"m-00001-of-00002.gguf": 7, "m-00002-of-00002.gguf": 8}, 15),
    ],
)
def test_weights_that_an_engine_loads(tmp_path, files, weights):
    assert models.describe(model(tmp_path / "m", files, CONFIG))["weight_bytes"] == weights


def test_index_decides_and_missing_files_are_named(tmp_path):
    index = {"weight_map": {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}}
    path = model(tmp_path / "m", {"one.safetensors": 10, "two.safetensors": 20, "extra.safetensors": 90}, CONFIG, **{"model.safetensors.index.json": index})
    assert models.describe(path)["weight_bytes"] == 30
    os.unlink(os.path.join(path, "two.safetensors"))
    found = models.describe(path)
    assert found["weight_bytes"] is None and "two.safetensors" in found["error"] and "incomplete" in found["error"]
    assert found["config"]["num_attention_heads"] == 32, "one unknown does not hide the rest"


@pytest.mark.parametrize(("files", "word"), [({"a.Q4.gguf": 7, "b.Q8.gguf": 8}, "2 GGUF models"), ({"readme.md": 1}, "no weights")])
def test_directories_that_cannot_be_sized(tmp_path, files, word):
    found = models.describe(model(tmp_path / "m", files))
    assert found["weight_bytes"] is None and word in found["error"]


def test_model_cache_with_links_to_blobs(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    model(blobs, {"sha1": 500})
    model(snapshot, {}, CONFIG)
    os.symlink("../../blobs/sha1", snapshot / "model.safetensors")
    assert models.describe(str(snapshot))["weight_bytes"] == 500
    os.unlink(blobs / "sha1")
    found = models.describe(str(snapshot))
    assert not found["readable"] and "leads nowhere" in found["error"]


def test_multimodal_config_and_quantization(tmp_path):
    config = {
        "architectures": ["X"],
        "text_config": {"num_attention_heads": 16, "dtype": "float16"},
        "quantization_config": {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 128,
            "desc_act": False,
            "modules_to_not_convert": ["a"] * 500,
            "config_groups": {"a": {}},
        },
    }
    found = models.describe(model(tmp_path / "m", {"model.safetensors": 1}, config))["config"]
    assert found == {
        "architectures": ["X"],
        "num_attention_heads": 16,
        "dtype": "float16",
        "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False},
    }


def group(bits: int, kind: str = "int", size: int | None = None) -> dict:
    return {"num_bits": bits, "type": kind, "group_size": size, "strategy": "group" if size else "channel", "dynamic": True}


@pytest.mark.parametrize(
    ("config", "schemes"),
    [
        ({"config_groups": {"a": {"weights": group(8, "float"), "input_activations": group(8, "float")}}}, [["fp8", "fp8"]]),
        ({"config_groups": {"a": {"weights": group(4, size=128), "input_activations": None}}}, [["int4", None]]),
        ({"config_groups": {"a": {"weights": group(4, "float", 16), "input_activations": group(4, "float", 16)}}}, [["nvfp4", "nvfp4"]]),
        ({"config_groups": {"a": {"weights": group(4, "float", 32), "input_activations": None}}}, [["mxfp4", None]]),
        (
            {"config_groups": {"a": {"weights": group(8, "float", 32)}, "b": {"weights": group(4, size=32), "input_activations": group(8)}}},
            [["int4", "int8"], ["mxfp8", None]],
        ),
        ({"config_groups": {"a": {"weights": {"num_bits": "8"}}, "b": 5, "c": {}}}, None),
        ({"config_groups": []}, None),
        ({"global_quant_config": {"weight": {"dtype": "fp8_e4m3"}, "input_tensors": {"dtype": "fp8_e4m3"}}}, [["fp8", "fp8"]]),
        ({"global_quant_config": {"weight": [{"dtype": "fp8_e4m3"}, {"dtype": "int4"}], "input_tensors": None}}, [["int4", None]]),
        ({"global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32}, "input_tensors": {"dtype": "fp4", "group_size": 32}}}, [["mxfp4", "mxfp4"]]),
        (
            {"global_quant_config": {"weight": []}, "layer_quant_config": {"x": {"weight": {"dtype": "int8"}, "input_tensors": {"dtype": "int8"}}, "y": 1}},
            [["int8", "int8"]],
        ),
    ],
)
def test_schemes_of_checkpoints_that_have_several(config, schemes):
    assert models.quantization_schemes(config) == ({"schemes": schemes} if schemes else {})


def test_modelopt_inside_of_config_json(tmp_path):
    """Newer exports have it there, without the name of the method."""
    config = {**CONFIG, "quantization_config": {"quant_algo": "NVFP4", "producer": {"name": "modelopt"}}}
    assert models.describe(model(tmp_path / "m", {"model.safetensors": 1}, config))["config"]["quantization_config"]["quant_method"] == "modelopt_fp4"


@pytest.mark.parametrize(("algorithm", "method"), [("FP8", "modelopt"), ("NVFP4", "modelopt_fp4"), ("MIXED_PRECISION", "modelopt_mixed")])
def test_modelopt(tmp_path, algorithm, method):
    side = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    path = model(tmp_path / "m", {"model.safetensors": 1}, CONFIG, **{"hf_quant_config.json": side})
    assert models.describe(path)["config"]["quantization_config"] == {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "quant_method": method}


def test_adapter(tmp_path):
    adapter = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": "glm", "inference_mode": True}
    path = model(tmp_path / "a", {"adapter_model.safetensors": 64}, **{"adapter_config.json": adapter})
    found = models.describe(path, checksum=True)
    assert found["config"] == {**{key: value for key, value in adapter.items() if key != "inference_mode"}, "highest_rank": 16}
    assert found["weight_bytes"] == 64
    assert found["sha256"]["adapter_model.safetensors"] == hashlib.sha256(b"x" * 64).hexdigest()
    assert set(found["sha256"]) == {"adapter_model.safetensors", "adapter_config.json"}
    assert "sha256" not in models.describe(path)


@pytest.mark.parametrize(
    ("more", "highest"),
    [({}, 16), ({"rank_pattern": {"q_proj": 64, "v_proj": 8}}, 64), ({"rank_pattern": {"q_proj": "64", "x": True, "y": -1}}, 16), ({"r": None}, None)],
)
def test_single_layers_can_have_a_higher_rank(more, highest):
    assert models.adapter_fields({"r": 16, **more}).get("highest_rank") == highest


# ---- checksums


def test_the_checksum_of_a_directory_is_what_the_documented_command_prints(tmp_path):
    folder = tmp_path / "a"
    (folder / "sub dir").mkdir(parents=True)
    for name in ("b", "B", "a-1", "sub dir/\u00e9", "sub dir.txt"):
        (folder / name).write_text(name)
    (folder / models.NOTE).write_text("{}")
    command = "find . -type f ! -name .rankzero.json -printf '%P\\n' | LC_ALL=C sort | xargs -d '\\n' sha256sum | sha256sum"
    shown = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, check=True).stdout.split()[0]
    assert models.describe(str(folder), checksum=True)["content_sha256"] == shown
    alone = models.describe(str(folder / "b"), checksum=True)
    assert alone["content_sha256"] == alone["sha256"]["b"] == hashlib.sha256(b"b").hexdigest()


def test_the_digest_tells_half_a_copy_from_a_good_one(tmp_path):
    """A copy that was interrupted has its length already and zeros behind; nothing but a few samples is read."""
    good = os.urandom(1 << 20)
    seen = set()
    for content in (good, good[: 1 << 19] + bytes(1 << 19), bytes(1 << 10) + good[1 << 10 :], good[:-1]):
        folder = tmp_path / str(len(seen))
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(content)
        (folder / "small").write_bytes(b"x" * 1000)
        seen.add(models.describe(str(folder))["digest"])
    assert len(seen) == 4
    (folder / "small").write_bytes(b"x" * 500 + b"y" + b"x" * 499)
    assert models.describe(str(folder))["digest"] not in seen, "small files are read whole"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100000, b'{"architectures": "\x1b[31m"}'])
def test_damaged_config_is_said(tmp_path, content):
    path = model(tmp_path / "m", {"model.safetensors": 5})
    (tmp_path / "m" / "config.json").write_bytes(content)
    found = models.describe(path)
    assert found["error"] and found["config"] is None
    assert found["error"].isprintable()


def test_paths_that_are_no_model(tmp_path):
    assert models.describe(str(tmp_path / "none")) == {
        "exists": False,
        "readable": False,
        "kind": None,
        "bytes": None,
        "weight_bytes": None,
        "files": None,
        "config": None,
        "digest": None,
        "fetched": None,
        "error": "%s cannot be read: No such file or directory" % (tmp_path / "none"),
    }
    os.mkfifo(tmp_path / "fifo")
    assert "neither a file nor a directory" in models.describe(str(tmp_path / "fifo"))["error"]
    assert models.describe("\0")["error"]


# ---- who can read it

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can ask in another user's place")


@pytest.fixture
def public_path(tmp_path):
    """pytest's directories are closed to other users."""
    for folder in [tmp_path, *tmp_path.parents]:
        if str(folder).startswith("/tmp/"):
            folder.chmod(0o755)
    return tmp_path


@AS_ROOT
@pytest.mark.parametrize("user", ["nobody", "no-such-user-of-ours"])
def test_another_user_can_or_cannot_read(public_path, user):
    path = model(public_path / "m", {"model.safetensors": 5}, CONFIG)
    assert models.describe(path, user)["readable"] is True
    os.chmod(os.path.join(path, "model.safetensors"), 0o600)
    found = models.describe(path, user)
    assert (found["exists"], found["readable"], found["bytes"] > 0) == (True, False, True)
    assert "model.safetensors" in found["error"] and user in found["error"]
    os.chmod(os.path.join(path, "model.safetensors"), 0o644)
    os.chmod(public_path, 0o700)
    assert models.describe(path, user)["readable"] is False
    assert models.describe(path)["readable"] is True, "root itself can"


@AS_ROOT
def test_a_group_counts_for_a_user_who_exists(public_path):
    path = model(public_path / "m", {"model.safetensors": 5}, CONFIG)
    weights = os.path.join(path, "model.safetensors")
    os.chmod(weights, 0o640)
    import grp
    import pwd

    os.chown(weights, 0, pwd.getpwnam("nobody").pw_gid)
    assert models.describe(path, "nobody")["readable"] is True
    os.chown(weights, 0, grp.getgrnam("root").gr_gid)
    assert models.describe(path, "nobody")["readable"] is False


# ---- GGUF


def test_the_rank_of_a_gguf_adapter_is_in_its_tensors(tmp_path):
    tiny_models.write_gguf_lora(tmp_path / "lora.gguf", rank=6)
    found = models.describe(str(tmp_path / "lora.gguf"))
    assert found["error"] is None and found["config"]["highest_rank"] == 6 and found["config"]["peft_type"] == "LORA"
    content = (tmp_path / "lora.gguf").read_bytes()
    for cut in range(24, len(content) - 5000, 17):
        (tmp_path / "lora.gguf").write_bytes(content[:cut])
        models.describe(str(tmp_path / "lora.gguf"))  # says what it can, and never fails


def test_gguf_of_a_real_writer(tmp_path):
    path = tmp_path / "tiny.gguf"
    tiny_models.write_gguf(path)
    found = models.describe(str(path))
    assert found["error"] is None
    assert found["weight_bytes"] == found["bytes"] == path.stat().st_size
    config = found["config"]
    assert config["architectures"] == ["llama"] and config["quantization_config"] == {"quant_method": "gguf"}
    for name in ("num_attention_heads", "num_key_value_heads", "num_hidden_layers", "hidden_size", "max_position_embeddings"):
        assert isinstance(config[name], int) and config[name] > 0, name


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def number(key: str, value: int) -> bytes:
    return entry(key, 4, struct.pack("<I", value))


def array(key: str, kind: int, items: list[bytes]) -> bytes:
    return entry(key, 9, struct.pack("<IQ", kind, len(items)) + b"".join(items))


def gguf(entries: list[bytes], version: int = 3, count: int | None = None) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", version, 1, len(entries) if count is None else count) + b"".join(entries)


ARCHITECTURE = entry("general.architecture", 8, text("qwen2"))


def header(tmp_path: pathlib.Path, content: bytes) -> dict:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    return models.describe(str(path))


def test_gguf_fields_after_the_tokenizer_and_heads_by_layer(tmp_path):
    tokens = array("tokenizer.ggml.tokens", 8, [text("token%d" % index) for index in range(1000)])
    scores = array("tokenizer.ggml.scores", 6, [struct.pack("<f", 0.5)] * 1000)
    heads = array("qwen2.attention.head_count", 4, [struct.pack("<I", 14)] * 24)
    uneven = array("qwen2.attention.head_count_kv", 4, [struct.pack("<I", 2 + index % 2) for index in range(24)])
    found = header(tmp_path, gguf([ARCHITECTURE, heads, uneven, number("qwen2.block_count", 24), tokens, scores, number("general.file_type", 7)]))
    assert found["config"] == {
        "architectures": ["qwen2"],
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "file_type": 7,
        "quantization_config": {"quant_method": "gguf"},
    }
    assert found["error"] is None


def test_gguf_in_parts(tmp_path):
    for number_ in (1, 2, 3):
        (tmp_path / ("m-%05d-of-00003.gguf" % number_)).write_bytes(gguf([ARCHITECTURE]) + b"x" * 100 * number_)
    path = str(tmp_path / "m-00001-of-00003.gguf")
    found = models.describe(path)
    assert (found["files"], found["weight_bytes"]) == (3, sum(os.path.getsize(tmp_path / ("m-%05d-of-00003.gguf" % number_)) for number_ in (1, 2, 3)))
    os.unlink(tmp_path / "m-00003-of-00003.gguf")
    assert "part 3 of 3 is missing" in models.describe(path)["error"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGUF",
        b"PK\x03\x04" + bytes(40),
        gguf([ARCHITECTURE], version=1),
        gguf([ARCHITECTURE], version=0x03000000),
        gguf([], count=2**63),
        gguf([ARCHITECTURE], count=50),
        gguf([struct.pack("<Q", 2**62) + b"x"]),
        gguf([entry("general.architecture", 8, struct.pack("<Q", 2**40))]),
        gguf([entry("a", 9, struct.pack("<IQ", 8, 2**50))]),
        gguf([entry("a", 9, struct.pack("<IQ", 8, 2**24))]),
        gguf([entry("a", 9, struct.pack("<IQ", 9, 1))]),
        gguf([number("qwen2.block_count", 2)]),
        gguf([entry("a", 99, b"")]),
        gguf([entry("a", 9, struct.pack("<IQ", 10, 2**61))]),
    ],
)
def test_hostile_gguf_headers_are_refused_quickly(tmp_path, content):
    began = time.monotonic()
    found = header(tmp_path, content)
    assert time.monotonic() - began < 1
    assert found["config"] is None and found["error"]


def test_a_huge_array_that_is_really_there_is_refused_quickly(tmp_path):
    """Eight million empty texts in a sparse file: walking over them would take the host many seconds."""
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf([ARCHITECTURE, entry("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 2**23))]))
    os.truncate(path, 100 * 1024 * 1024)
    found = models.describe(str(path))
    assert "claims an array of 8388608 items" in found["error"]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_gguf_headers(tmp_path, data):
    whole = gguf([ARCHITECTURE, number("qwen2.block_count", 24), array("qwen2.x", 4, [struct.pack("<I", 1)] * 3), number("general.file_type", 7)])
    damaged = bytearray(whole[: data.draw(st.integers(0, len(whole)))])
    for position in data.draw(st.lists(st.integers(0, max(len(damaged) - 1, 0)), max_size=4)):
        if damaged:
            damaged[position] = data.draw(st.integers(0, 255))
    found = header(tmp_path, bytes(damaged))
    assert found["exists"] and (found["config"] is None or found["config"]["architectures"] != [None])
    json.dumps(found)


def test_a_directory_of_a_real_writer(tmp_path):
    pair = tiny_models.write_hf_pair(tmp_path)
    model, adapter = models.describe(str(pair.model)), models.describe(str(pair.lora))
    assert model["error"] is None and adapter["error"] is None
    assert model["config"]["num_attention_heads"] == 4 and model["config"]["torch_dtype"] == "bfloat16"
    assert model["weight_bytes"] == (pair.model / "model.safetensors").stat().st_size
    assert adapter["config"]["r"] == 8
