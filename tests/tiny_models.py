# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Make models so small that a real engine loads and serves them at once; for tests and the demo. Standard library only.

    python tests/tiny_models.py gguf DIR        # DIR/tiny.gguf (0.5 MB) and DIR/tiny-lora.gguf (11 KB), for llama.cpp
    python tests/tiny_models.py hf DIR          # DIR/tiny (0.7 MB) and DIR/tiny-lora (25 KB), as vLLM and SGLang load them

What is made is useful for exact assertions:

* The same call gives the same bytes with every Python: weights come from `random.Random.random()`, the one method whose sequence
  the standard library promises to keep.
* A completion always runs to `max_tokens` and is printable text, so `completion_tokens == max_tokens` can be asserted. One hidden
  dimension is constant; the output matrix reads it to make each printable character likely and end-of-text or a raw byte impossible.
* The vocabulary is our own: the 256 byte values, and for llama.cpp the 95 printable ASCII characters.
* Weights of GGUF files are F32: quantised kernels of prebuilt engines may use instructions that a test machine lacks. Others are BF16.
* Heads of the Hugging Face model are 32 wide, as vLLM's attention on CPUs wants at least, and divide by two, so that it can be split over two ranks.
"""

from __future__ import annotations

import argparse
import array
import hashlib
import json
import pathlib
import random
import struct
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

# The GGUF file format, version 3: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
GGUF_VERSION = 3
ALIGNMENT = 32
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
SCALAR_FORMATS = {UINT32: "I", INT32: "i", FLOAT32: "f", BOOL: "?"}
TENSOR_F32 = 0
TOKEN_NORMAL, TOKEN_UNKNOWN, TOKEN_CONTROL, TOKEN_BYTE = 1, 2, 3, 6

SPACE = "\u2581"  # how SentencePiece vocabularies write a space
CHAT_TEMPLATE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"


class Shape(NamedTuple):
    """Dimensions of a tiny model of the llama architecture. Larger ones make the load time visible."""

    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    feed_forward: int = 128
    context: int = 512

    @property
    def head_width(self) -> int:
        return self.hidden // self.heads


TINY = Shape()
TINY_HF = Shape(hidden=128, feed_forward=256)


class Pair(NamedTuple):
    """A model and a LoRA adapter that fits it."""

    model: pathlib.Path
    lora: pathlib.Path


def write_gguf_pair(directory: pathlib.Path, shape: Shape = TINY) -> Pair:
    """Write `tiny.gguf` and `tiny-lora.gguf` below `directory` (made when missing) and return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    pair = Pair(directory / "tiny.gguf", directory / "tiny-lora.gguf")
    write_gguf(pair.model, shape)
    write_gguf_lora(pair.lora, shape)
    return pair


def write_gguf(path: pathlib.Path, shape: Shape = TINY, *, name: str = "tiny-random-llama", seed: int = 1) -> None:
    """Write a llama-architecture model with random F32 weights."""
    vocabulary = Vocabulary()
    tensors = Tensors(seed)
    _add_embedding(tensors, shape, vocabulary)
    for layer in range(shape.layers):
        _add_layer(tensors, shape, layer)
    _add_output(tensors, shape, vocabulary)
    _write_file(path, _model_metadata(name, shape, vocabulary), tensors)


def write_gguf_lora(path: pathlib.Path, shape: Shape = TINY, *, name: str = "tiny-random-lora", rank: int = 4, seed: int = 2) -> None:
    """Write a LoRA adapter, strong enough to change the answers, for the model of the same shape."""
    tensors = Tensors(seed)
    for layer in range(shape.layers):
        for target, width in (("attn_q", shape.hidden), ("ffn_down", shape.feed_forward)):
            base = f"blk.{layer}.{target}.weight"
            tensors.add_random(f"{base}.lora_a", (width, rank), width**-0.5)
            tensors.add_random(f"{base}.lora_b", (rank, shape.hidden), 0.5, spare_constant=True)
    metadata = [
        ("general.architecture", STRING, "llama"),
        ("general.type", STRING, "adapter"),
        ("general.name", STRING, name),
        ("general.alignment", UINT32, ALIGNMENT),
        ("adapter.type", STRING, "lora"),
        ("adapter.lora.alpha", FLOAT32, 2.0 * rank),
    ]
    _write_file(path, metadata, tensors)


def write_hf_pair(directory: pathlib.Path, shape: Shape = TINY_HF) -> Pair:
    """Write the directories `tiny` and `tiny-lora` below `directory` (made when missing) and return their paths."""
    pair = Pair(directory / "tiny", directory / "tiny-lora")
    write_hf(pair.model, shape)
    write_hf_lora(pair.lora, shape)
    return pair


def write_hf(directory: pathlib.Path, shape: Shape = TINY_HF, *, seed: int = 1) -> None:
    """Write a llama-architecture model with random BF16 weights and a tokenizer of bytes, in the layout of Hugging Face."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in _hf_files(shape).items():
        (directory / name).write_text(json.dumps(content, indent=1) + "\n")
    tensors = Tensors(seed)
    _add_hf_layers(tensors, shape)
    _write_safetensors(directory / "model.safetensors", tensors)


def write_hf_lora(directory: pathlib.Path, shape: Shape = TINY_HF, *, rank: int = 8, seed: int = 2) -> None:
    """Write a LoRA adapter (PEFT), strong enough to change the answers, for the model of the same shape."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
        "inference_mode": True,
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n")
    tensors = Tensors(seed)
    for layer in range(shape.layers):
        for target, width in (("q_proj", shape.heads * shape.head_width), ("v_proj", shape.kv_heads * shape.head_width)):
            base = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            tensors.add_random(f"{base}.lora_A.weight", (shape.hidden, rank), shape.hidden**-0.5)
            tensors.add_random(f"{base}.lora_B.weight", (rank, width), 1.0)
    _write_safetensors(directory / "adapter_model.safetensors", tensors)


class Vocabulary:
    """Three control tokens, the 256 bytes, the 95 printable characters."""

    def __init__(self) -> None:
        characters = [chr(code) for code in range(0x20, 0x7F)]
        self.tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
        self.first_printable = len(self.tokens)
        self.tokens += [SPACE if character == " " else character for character in characters]
        self.scores = [0.0] * self.first_printable + [-float(ord(character)) for character in characters]
        self.types = [TOKEN_UNKNOWN, TOKEN_CONTROL, TOKEN_CONTROL] + [TOKEN_BYTE] * 256 + [TOKEN_NORMAL] * len(characters)

    def __len__(self) -> int:
        return len(self.tokens)


class Tensors:
    """The named F32 tensors of a file, in order. A shape is given fastest dimension first, as GGUF has it."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.items: list[tuple[str, tuple[int, ...], array.array[float]]] = []

    def add_random(self, name: str, shape: tuple[int, int], deviation: float, *, spare_constant: bool = False) -> array.array[float]:
        """Add uniform random weights; `spare_constant` keeps the tensor from writing into the constant dimension (row 0)."""
        count = shape[0] * shape[1]
        # A repeated block is as good as fresh numbers here, and keeps large shapes quick in pure Python.
        half_width = deviation * 3**0.5
        block = array.array("f", ((2 * self._random.random() - 1) * half_width for _unused in range(min(count, 4096))))
        data = array.array("f")
        while len(data) < count:
            cut = int(self._random.random() * len(block))
            data.extend(block[cut:] + block[:cut])
        del data[count:]
        if spare_constant:
            data[: shape[0]] = array.array("f", [0.0]) * shape[0]
        self.items.append((name, shape, data))
        return data

    def add_ones(self, name: str, length: int) -> None:
        self.items.append((name, (length,), array.array("f", [1.0]) * length))


def _add_embedding(tensors: Tensors, shape: Shape, vocabulary: Vocabulary) -> None:
    weights = tensors.add_random("token_embd.weight", (shape.hidden, len(vocabulary)), 1.0)
    for token in range(len(vocabulary)):
        weights[token * shape.hidden] = 8.0


def _add_layer(tensors: Tensors, shape: Shape, layer: int) -> None:
    prefix, deviation = f"blk.{layer}.", shape.hidden**-0.5
    attention_width, kv_width = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    tensors.add_ones(prefix + "attn_norm.weight", shape.hidden)
    tensors.add_random(prefix + "attn_q.weight", (shape.hidden, attention_width), deviation)
    tensors.add_random(prefix + "attn_k.weight", (shape.hidden, kv_width), deviation)
    tensors.add_random(prefix + "attn_v.weight", (shape.hidden, kv_width), deviation)
    tensors.add_random(prefix + "attn_output.weight", (attention_width, shape.hidden), deviation, spare_constant=True)
    tensors.add_ones(prefix + "ffn_norm.weight", shape.hidden)
    tensors.add_random(prefix + "ffn_gate.weight", (shape.hidden, shape.feed_forward), deviation)
    tensors.add_random(prefix + "ffn_up.weight", (shape.hidden, shape.feed_forward), deviation)
    tensors.add_random(prefix + "ffn_down.weight", (shape.feed_forward, shape.hidden), shape.feed_forward**-0.5, spare_constant=True)


def _add_output(tensors: Tensors, shape: Shape, vocabulary: Vocabulary) -> None:
    tensors.add_ones("output_norm.weight", shape.hidden)
    weights = tensors.add_random("output.weight", (shape.hidden, len(vocabulary)), 0.3)
    for token in range(len(vocabulary)):
        weights[token * shape.hidden] = 6.0 if token >= vocabulary.first_printable else -6.0


def _model_metadata(name: str, shape: Shape, vocabulary: Vocabulary) -> list[tuple[str, int, Any]]:
    return [
        ("general.architecture", STRING, "llama"),
        ("general.type", STRING, "model"),
        ("general.name", STRING, name),
        ("general.alignment", UINT32, ALIGNMENT),
        ("general.file_type", UINT32, 0),
        ("llama.context_length", UINT32, shape.context),
        ("llama.embedding_length", UINT32, shape.hidden),
        ("llama.block_count", UINT32, shape.layers),
        ("llama.feed_forward_length", UINT32, shape.feed_forward),
        ("llama.attention.head_count", UINT32, shape.heads),
        ("llama.attention.head_count_kv", UINT32, shape.kv_heads),
        ("llama.attention.layer_norm_rms_epsilon", FLOAT32, 1e-5),
        ("llama.rope.dimension_count", UINT32, shape.head_width),
        ("llama.rope.freq_base", FLOAT32, 10000.0),
        ("llama.vocab_size", UINT32, len(vocabulary)),
        ("tokenizer.ggml.model", STRING, "llama"),
        ("tokenizer.ggml.pre", STRING, "default"),
        ("tokenizer.ggml.tokens", ARRAY, (STRING, vocabulary.tokens)),
        ("tokenizer.ggml.scores", ARRAY, (FLOAT32, vocabulary.scores)),
        ("tokenizer.ggml.token_type", ARRAY, (INT32, vocabulary.types)),
        ("tokenizer.ggml.bos_token_id", UINT32, 1),
        ("tokenizer.ggml.eos_token_id", UINT32, 2),
        ("tokenizer.ggml.unknown_token_id", UINT32, 0),
        ("tokenizer.ggml.add_bos_token", BOOL, True),
        ("tokenizer.ggml.add_eos_token", BOOL, False),
        ("tokenizer.ggml.add_space_prefix", BOOL, False),
        ("tokenizer.chat_template", STRING, CHAT_TEMPLATE),
    ]


BYTES, BEGIN, END = 256, 256, 257  # token ids of the Hugging Face model: a byte is its own id


def _byte_characters() -> list[str]:
    """The printable character by which byte-level tokenizers write each byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(BYTES, 2 * BYTES))
    return [chr(byte if byte in printable else next(others)) for byte in range(BYTES)]


def _hf_files(shape: Shape) -> dict[str, Any]:
    """File name -> content of everything but the weights."""
    added = [
        {"id": number, "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for number, content in ((BEGIN, "<s>"), (END, "</s>"))
    ]
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {**{character: byte for byte, character in enumerate(_byte_characters())}, "<s>": BEGIN, "</s>": END},
        "merges": [],
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None, "post_processor": None}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.feed_forward,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_width,
        "vocab_size": END + 1,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "bos_token_id": BEGIN,
        "eos_token_id": END,
        "use_cache": True,
    }
    return {
        "tokenizer.json": {**tokenizer, "pre_tokenizer": byte_level, "decoder": byte_level, "model": model},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "model_max_length": shape.context,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
        "generation_config.json": {"bos_token_id": BEGIN, "eos_token_id": END, "do_sample": False},
        "config.json": config,
    }


def _add_hf_layers(tensors: Tensors, shape: Shape) -> None:
    """The tensors of _add_embedding, _add_layer and _add_output under their names in Hugging Face's layout, for the vocabulary of bytes."""
    tokens, deviation = END + 1, shape.hidden**-0.5
    attention_width, kv_width = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    embedding = tensors.add_random("model.embed_tokens.weight", (shape.hidden, tokens), 1.0)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        tensors.add_ones(prefix + "input_layernorm.weight", shape.hidden)
        tensors.add_random(prefix + "self_attn.q_proj.weight", (shape.hidden, attention_width), deviation)
        tensors.add_random(prefix + "self_attn.k_proj.weight", (shape.hidden, kv_width), deviation)
        tensors.add_random(prefix + "self_attn.v_proj.weight", (shape.hidden, kv_width), deviation)
        tensors.add_random(prefix + "self_attn.o_proj.weight", (attention_width, shape.hidden), deviation, spare_constant=True)
        tensors.add_ones(prefix + "post_attention_layernorm.weight", shape.hidden)
        tensors.add_random(prefix + "mlp.gate_proj.weight", (shape.hidden, shape.feed_forward), deviation)
        tensors.add_random(prefix + "mlp.up_proj.weight", (shape.hidden, shape.feed_forward), deviation)
        tensors.add_random(prefix + "mlp.down_proj.weight", (shape.feed_forward, shape.hidden), shape.feed_forward**-0.5, spare_constant=True)
    tensors.add_ones("model.norm.weight", shape.hidden)
    output = tensors.add_random("lm_head.weight", (shape.hidden, tokens), 0.3)
    for token in range(tokens):
        embedding[token * shape.hidden] = 8.0
        output[token * shape.hidden] = 6.0 if 0x20 <= token < 0x7F else -6.0


def _write_safetensors(path: pathlib.Path, tensors: Tensors) -> None:
    """The format of https://github.com/huggingface/safetensors: a JSON header, then the tensors one behind the other, slowest dimension first."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape, data in tensors.items:
        header[name] = {"dtype": "BF16", "shape": list(reversed(shape)), "data_offsets": [offset, offset + 2 * len(data)]}
        offset += 2 * len(data)
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for _name, _shape, data in tensors.items:
            file.write(_bfloat16(data))


def _bfloat16(data: array.array[float]) -> bytes:
    """The upper halves of the float32 values."""
    raw = _little_endian(data)
    halves = bytearray(len(raw) // 2)
    halves[0::2], halves[1::2] = raw[2::4], raw[3::4]
    return bytes(halves)


def _write_file(path: pathlib.Path, metadata: Sequence[tuple[str, int, Any]], tensors: Tensors) -> None:
    entries, offset = b"", 0
    for name, shape, data in tensors.items:
        entries += _string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape) + struct.pack("<IQ", TENSOR_F32, offset)
        offset += len(data) * 4 + _padding(len(data) * 4)
    head = b"GGUF" + struct.pack("<IQQ", GGUF_VERSION, len(tensors.items), len(metadata))
    head += b"".join(_entry(*entry) for entry in metadata) + entries
    with open(path, "wb") as file:
        file.write(head + bytes(_padding(len(head))))
        for _name, _shape, data in tensors.items:
            raw = _little_endian(data)
            file.write(raw + bytes(_padding(len(raw))))


def _entry(key: str, kind: int, value: Any) -> bytes:
    return _string(key) + struct.pack("<I", kind) + _value(kind, value)


def _value(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return _string(value)
    if kind == ARRAY:
        item_kind, items = value
        return struct.pack("<IQ", item_kind, len(items)) + b"".join(_value(item_kind, item) for item in items)
    return struct.pack("<" + SCALAR_FORMATS[kind], value)


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _padding(length: int) -> int:
    return -length % ALIGNMENT


def _little_endian(data: array.array[float]) -> bytes:
    if sys.byteorder == "little":
        return data.tobytes()
    swapped = data[:]
    swapped.byteswap()
    return swapped.tobytes()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Make tiny models for tests.")
    kinds = parser.add_subparsers(dest="kind", required=True)
    gguf = kinds.add_parser("gguf", help="a model for llama.cpp and a LoRA adapter that fits it")
    hf = kinds.add_parser("hf", help="a model for vLLM and SGLang and a LoRA adapter that fits it")
    for kind in (gguf, hf):
        kind.add_argument("directory", type=pathlib.Path)
    options = parser.parse_args(arguments)
    pair = write_gguf_pair(options.directory) if options.kind == "gguf" else write_hf_pair(options.directory)
    files = [file for path in pair for file in (sorted(path.iterdir()) if path.is_dir() else [path])]
    print(json.dumps([{"path": str(path), "bytes": path.stat().st_size, "sha256": _sha256(path)} for path in files], indent=2))
    return 0


def _sha256(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
