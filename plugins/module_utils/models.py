# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a host has at a model's path: whether the service can read it, how large the weights are, and the few fields of its
configuration that decide whether a plan fits. Weights are never opened; of a GGUF file only the header is read."""

from __future__ import annotations

import hashlib
import os
import pwd
import re
import stat
import struct
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO

from ansible_collections.rankzero.inference.plugins.module_utils import small_files

Facts = dict[str, Any]

MOST_FILES = 20000
MOST_CONFIG_BYTES = 16 * 1024 * 1024
SKIPPED_DIRECTORIES = (".git", ".cache")
NOTE = ".rankzero.json"
"""Beside what model_files has fetched: `{source, revision, sha256, content_sha256}`."""

SAMPLE = 64 * 1024

CONFIG_FIELDS = (
    "architectures",
    "model_type",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "hidden_size",
    "head_dim",
    "dtype",
    "torch_dtype",
    "max_position_embeddings",
    "kv_lora_rank",
    "sliding_window",
    "use_sliding_window",
    "layer_types",
)
QUANTIZATION_FIELDS = (
    "quant_method",
    "quant_algo",
    "bits",
    "group_size",
    "fmt",
    "format",
    "activation_scheme",
    "desc_act",
    "weight_bits",
    "kv_cache_quant_algo",
    "weight_block_size",
    "load_in_4bit",
    "load_in_8bit",
    "linear_quant_method",
)
ADAPTER_FIELDS = (
    "peft_type",
    "r",
    "lora_alpha",
    "use_rslora",
    "use_dora",
    "bias",
    "lora_bias",
    "base_model_name_or_path",
    "target_modules",
    "modules_to_save",
)
NO_WEIGHTS = re.compile(r"^(training_args|optimizer|scheduler|rng_state.*)\.bin$")
GGUF_SPLIT = re.compile(r"^(.*)-[0-9]{5}-of-([0-9]{5})\.gguf$")


class Unreadable(Exception):
    """A file or header that cannot be understood; the text is a sentence for the operator."""


def describe(path: str, service_user: str | None = None, checksum: bool = False) -> Facts:
    """`{exists, readable, kind: file|directory|null, bytes, weight_bytes, files, config, digest, fetched, error}` of docs/architecture.md.

    `readable` is asked in the place of `service_user`: with its ids where this process may take them, by the permissions for others while
    the user does not exist yet, else for the user who asks. `weight_bytes` counts what an engine would load once, null where that cannot be
    told. `digest` is over names, sizes and samples of the files, to compare ranks by; `fetched` is the note that model_files left. With `checksum` the
    shape has `sha256: {relative name: hex}` and `content_sha256` as well; that reads every byte.
    """
    facts: Facts = dict.fromkeys(("kind", "bytes", "weight_bytes", "files", "config", "digest", "fetched", "error"))
    facts.update(exists=False, readable=False)
    if checksum:
        facts.update(sha256={}, content_sha256=None)
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        facts["error"] = small_files.reason(path, error)
        return facts
    facts["exists"] = True
    facts["kind"] = "directory" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else None
    if facts["kind"] is None:
        facts["error"] = "%s is neither a file nor a directory" % path
        return facts
    problems: list[str] = []
    describe_content(path, facts, problems)
    unreadable = first_unreadable(path, service_user)
    facts["readable"] = unreadable is None
    if checksum:
        facts["sha256"] = checksums(path, problems)
        facts["content_sha256"] = content_sha256(facts["sha256"], facts["kind"])
    facts["error"] = "; ".join(([unreadable] if unreadable else []) + problems) or None
    return facts


def describe_content(path: str, facts: Facts, problems: list[str]) -> None:
    """Sizes and configuration, as far as this process can read them."""
    try:
        sizes = part_sizes(path) if facts["kind"] == "file" else file_sizes(path)
        facts["bytes"], facts["files"] = sum(sizes.values()), len(sizes)
        facts["config"] = configuration(path, facts["kind"], sizes)
        facts["digest"] = sampled_digest(os.path.dirname(path) if facts["kind"] == "file" else path, sizes)
        facts["fetched"] = read_note(path) if facts["kind"] == "directory" else None
        facts["weight_bytes"] = weight_bytes(path, facts["kind"], sizes)
    except (OSError, ValueError, Unreadable) as error:
        problems.append(str(error))


# ---- sizes


def file_sizes(path: str) -> dict[str, int]:
    """`{relative name: bytes}` of all files below a directory; links are followed to files (model caches link to blobs), not to directories.

    Raises Unreadable above 20000 files: that is no model.
    """
    sizes: dict[str, int] = {}
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if name not in SKIPPED_DIRECTORIES)
        for name in names:
            full = os.path.join(folder, name)
            if name == NOTE and folder == path:
                continue
            try:
                status = os.stat(full)
            except OSError:
                continue
            if stat.S_ISREG(status.st_mode):
                sizes[os.path.relpath(full, path)] = status.st_size
        if len(sizes) > MOST_FILES:
            raise Unreadable("%s holds more than %d files: it is no model directory" % (path, MOST_FILES))
    return sizes


def weight_bytes(path: str, kind: str, sizes: dict[str, int]) -> int | None:
    """Bytes of the weights that an engine loads. Raises Unreadable when a directory holds several models to choose from."""
    if kind == "file":
        return sum(sizes.values())
    top = {name: size for name, size in sizes.items() if os.sep not in name}
    indexed = indexed_weights(path, top)
    if indexed:
        return sum(indexed.values())
    safetensors = {name: size for name, size in top.items() if name.endswith(".safetensors")}
    # Mistral publishes the same weights twice, once as consolidated*.safetensors.
    single = {name: size for name, size in safetensors.items() if not name.startswith("consolidated")} or safetensors
    torch = {name: size for name, size in top.items() if name.endswith(".bin") and not NO_WEIGHTS.match(name)}
    if single or torch:
        return sum((single or torch).values())
    gguf = {name: size for name, size in top.items() if name.endswith(".gguf")}
    models = {GGUF_SPLIT.sub(r"\1", name) for name in gguf}
    if len(models) > 1:
        raise Unreadable("%s holds %d GGUF models: name one file" % (path, len(models)))
    if not gguf:
        raise Unreadable("%s holds no weights: no *.safetensors, *.bin or *.gguf" % path)
    return sum(gguf.values())


def indexed_weights(path: str, top: dict[str, int]) -> dict[str, int]:
    """The files that `model.safetensors.index.json` names; empty without an index. Raises Unreadable when one of them is missing."""
    if "model.safetensors.index.json" not in top:
        return {}
    index = load_json(os.path.join(path, "model.safetensors.index.json"))
    shards = index.get("weight_map")
    wanted = {name for name in shards.values() if isinstance(name, str)} if isinstance(shards, dict) else set()
    missing = sorted(name for name in wanted if name not in top)
    if missing:
        raise Unreadable(
            "%s is incomplete: %s, named by the index, is not there%s"
            % (path, small_files.clean(missing[0]), "" if len(missing) == 1 else ", nor are %d others" % (len(missing) - 1))
        )
    return {name: top[name] for name in wanted}


def part_sizes(path: str) -> dict[str, int]:
    """A weights file by name, with all its parts when it is one of `NAME-00001-of-00003.gguf`. Raises Unreadable when a part is missing."""
    match = GGUF_SPLIT.match(os.path.basename(path))
    if not match:
        return {os.path.basename(path): os.stat(path).st_size}
    sizes, count = {}, int(match.group(2))
    for number in range(1, min(count, MOST_FILES) + 1):
        name = "%s-%05d-of-%05d.gguf" % (match.group(1), number, count)
        try:
            sizes[name] = os.stat(os.path.join(os.path.dirname(path), name)).st_size
        except OSError as error:
            raise Unreadable("part %d of %d is missing: %s" % (number, count, small_files.reason(name, error))) from error
    return sizes


# ---- configuration


def configuration(path: str, kind: str, sizes: dict[str, int]) -> Facts | None:
    """The fields of config.json, adapter_config.json or a GGUF header that a plan is checked against; null where there is none of them."""
    if kind == "file":
        return gguf_config(path) if path.endswith(".gguf") else None
    if "adapter_config.json" in sizes:
        return adapter_fields(load_json(os.path.join(path, "adapter_config.json")))
    if "config.json" in sizes:
        found = config_fields(load_json(os.path.join(path, "config.json")))
        if "quantization_config" not in found and "hf_quant_config.json" in sizes:
            found.update(modelopt_fields(load_json(os.path.join(path, "hf_quant_config.json"))))
        return found
    return None


def adapter_fields(config: Facts) -> Facts:
    """Selected fields of PEFT's adapter_config.json, and `highest_rank`: `rank_pattern` can give single layers a higher rank than `r`."""
    found = small_fields(config, ADAPTER_FIELDS)
    pattern = config.get("rank_pattern")
    ranks = [config.get("r"), *(pattern.values() if isinstance(pattern, dict) else ())]
    known = [rank for rank in ranks if isinstance(rank, int) and not isinstance(rank, bool) and rank > 0]
    return {**found, "highest_rank": max(known)} if known else found


def config_fields(config: Facts) -> Facts:
    """Selected fields of a Hugging Face config.json; those of a multimodal model's language part where the top level has none."""
    found = small_fields(config, CONFIG_FIELDS)
    for nested in ("text_config", "llm_config", "language_config"):
        part = config.get(nested)
        if isinstance(part, dict):
            for name, value in small_fields(part, CONFIG_FIELDS).items():
                found.setdefault(name, value)
    for name in ("quantization_config", "compression_config"):
        part = config.get(name)
        if isinstance(part, dict):
            found["quantization_config"] = {**small_fields(part, QUANTIZATION_FIELDS), **quantization_schemes(part)}
            if not found["quantization_config"].get("quant_method") and part.get("quant_algo"):
                found["quantization_config"].update(modelopt_fields({"quantization": part}).get("quantization_config", {}))
            break
    return found


def quantization_schemes(part: Facts) -> Facts:
    """`{schemes: [[weights, activations|null]]}` such as `["fp8", "fp8"]` or `["int4", null]`, of the layers of a compressed-tensors or Quark checkpoint:
    what GPUs it needs depends on them, and not on the method's name alone. Empty for other methods."""
    groups = part.get("config_groups")
    kind: Callable[[Any], str | None] = compressed_kind
    if isinstance(groups, dict):  # compressed-tensors
        pairs = [(group.get("weights"), group.get("input_activations")) for group in groups.values() if isinstance(group, dict)]
    else:
        layers = part.get("layer_quant_config")
        configs = [part.get("global_quant_config"), *(layers.values() if isinstance(layers, dict) else ())]
        pairs = [(config.get("weight"), config.get("input_tensors")) for config in configs if isinstance(config, dict)]
        kind = quark_kind
    schemes = sorted({(kind(weights), kind(activations) or "") for weights, activations in pairs if kind(weights)} if pairs else ())
    return {"schemes": [[weights, activations or None] for weights, activations in schemes][:16]} if schemes else {}


def compressed_kind(arguments: Any) -> str | None:
    """fp8, int4, nvfp4, mxfp4, mxfp8 ... of a QuantizationArgs; groups of 16 are NVIDIA's FP4, of 32 the OCP's formats."""
    if not isinstance(arguments, dict) or not isinstance(arguments.get("num_bits"), int):
        return None
    bits, group = arguments["num_bits"], arguments.get("group_size")
    if arguments.get("type") != "float":
        return "int%d" % bits
    return "%s%d" % ({16: "nvfp", 32: "mxfp"}.get(group if isinstance(group, int) else 0, "fp"), bits) if bits in (4, 8) else "fp%d" % bits


def quark_kind(tensor: Any) -> str | None:
    """The same of Quark's description of a tensor; of several steps of quantization the last one counts."""
    tensor = tensor[-1] if isinstance(tensor, list) and tensor else tensor
    dtype = str(tensor.get("dtype") or "") if isinstance(tensor, dict) else ""
    match = re.match(r"(fp|int|uint|mxfp)([0-9]+)", dtype)
    if not match:
        return None
    group = tensor.get("group_size")
    if dtype.startswith("fp4"):
        return "nvfp4" if group == 16 else "mxfp4"
    return "%s%s" % (match.group(1).replace("uint", "int"), match.group(2))


def modelopt_fields(config: Facts) -> Facts:
    """ModelOpt's hf_quant_config.json as a quantization_config; engines know its FP4 kinds by a name of their own."""
    part = config.get("quantization")
    if not isinstance(part, dict):
        return {}
    found = small_fields(part, QUANTIZATION_FIELDS)
    algorithm = str(found.get("quant_algo") or "").upper()
    found.setdefault("quant_method", "modelopt_fp4" if "FP4" in algorithm else "modelopt_mixed" if "MIXED" in algorithm else "modelopt")
    return {"quantization_config": found}


def small_fields(config: Facts, names: Iterable[str]) -> Facts:
    """Those of the named fields that hold a scalar or a short list of scalars."""
    return {name: config[name] for name in names if name in config and is_small(config[name])}


def is_small(value: Any) -> bool:
    if isinstance(value, list):
        return len(value) <= 64 and all(is_small(item) and not isinstance(item, list) for item in value)
    return value is None or isinstance(value, (bool, int, float)) or isinstance(value, str) and len(value) <= 256 and value.isprintable()


def load_json(path: str) -> Facts:
    """A JSON mapping of at most 16 MiB. Raises Unreadable with a sentence."""
    value, problem = small_files.read_json(path, MOST_CONFIG_BYTES)
    if value is None:
        raise Unreadable(problem or path)
    return value


# ---- GGUF header (ggml docs/gguf.md, versions 2 and 3)

GGUF_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
GGUF_STRING, GGUF_ARRAY = 8, 9
MOST_GGUF_ENTRIES = 100000
MOST_GGUF_HEADER = 256 * 1024 * 1024
MOST_GGUF_STRING = 16 * 1024 * 1024
MOST_GGUF_ITEMS = 4 * 1024 * 1024
GGUF_FIELDS = {
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "attention.key_length": "head_dim",
    "context_length": "max_position_embeddings",
}


def gguf_config(path: str) -> Facts:
    """The header's fields under the names of config.json, and `file_type`, llama.cpp's number of the quantization.

    Raises Unreadable for a file that is no GGUF or whose header claims absurd lengths.
    """
    with open(path, "rb") as stream:
        header = read_gguf_header(stream)
    architecture = header.get("general.architecture")
    if not architecture:
        raise Unreadable("the GGUF header names no architecture")
    found: Facts = {"architectures": [architecture], "quantization_config": {"quant_method": "gguf"}}
    for suffix, name in GGUF_FIELDS.items():
        value = header.get("%s.%s" % (architecture, suffix))
        # Some architectures give the head counts layer by layer; equal ones are one number.
        values = set(value) if isinstance(value, list) else {value}
        if len(values) == 1 and value not in (None, []):
            found[name] = values.pop()
    found["file_type"] = header.get("general.file_type")
    if header.get("general.type") == "adapter":
        found.update(peft_type=str(header.get("adapter.type") or "").upper() or None, highest_rank=header["highest_rank"])
    return found


def read_gguf_header(stream: BinaryIO) -> Facts:
    """Key-value pairs of a GGUF header up to the last one that is wanted; arrays of the tokenizer are passed over, tensors reached for adapters only.

    Of an adapter `highest_rank` is added, which is nowhere but in the shapes of its tensors.
    """
    head = exactly(stream, 24)
    magic, version, tensors, entries = struct.unpack("<4sIQQ", head)
    if magic != b"GGUF":
        raise Unreadable("the file does not begin with GGUF")
    if version not in (2, 3):
        raise Unreadable("GGUF version %d is not supported (2 and 3 are)" % version)
    if entries > MOST_GGUF_ENTRIES:
        raise Unreadable("the GGUF header claims %d entries" % entries)
    found: Facts = {}
    for _entry in range(entries):
        key = gguf_string(stream, 65535)
        kind = struct.unpack("<I", exactly(stream, 4))[0]
        found[key] = gguf_value(stream, kind, not key.startswith("tokenizer."))
        if stream.tell() > MOST_GGUF_HEADER:
            raise Unreadable("the GGUF header is larger than %d bytes" % MOST_GGUF_HEADER)
        if key.startswith("tokenizer.") and "general.file_type" in found and found.get("general.type") != "adapter":
            # Writers put the tokenizer last; nothing wanted follows.
            break
    if found.get("general.type") == "adapter":
        found["highest_rank"] = gguf_adapter_rank(stream, tensors)
    return {key: value for key, value in found.items() if value is not None or key == "highest_rank"}


def gguf_adapter_rank(stream: BinaryIO, tensors: int) -> int | None:
    """The largest rank of the pairs of matrices: the second is as wide as the rank (gguf-py, convert_lora_to_gguf.py)."""
    if tensors > MOST_GGUF_ENTRIES:
        raise Unreadable("the GGUF header claims %d tensors" % tensors)
    highest = None
    for _tensor in range(tensors):
        name = gguf_string(stream, 65535)
        dimensions = struct.unpack("<I", exactly(stream, 4))[0]
        if dimensions > 8:
            raise Unreadable("the GGUF header has a tensor of %d dimensions" % dimensions)
        shape = struct.unpack("<%dQ" % dimensions, exactly(stream, 8 * dimensions))
        exactly(stream, 12)  # its type and place
        if name.endswith(".lora_b") and shape:
            highest = max(highest or 0, shape[0])
    return highest


def gguf_value(stream: BinaryIO, kind: int, wanted: bool) -> Any:
    """One value; None for arrays of anything but a few numbers and for values that are not wanted."""
    if kind in GGUF_NUMBERS:
        form = GGUF_NUMBERS[kind]
        return struct.unpack(form, exactly(stream, struct.calcsize(form)))[0]
    if kind == GGUF_STRING:
        text = gguf_string(stream, MOST_GGUF_STRING)
        return text[:256] if wanted else None
    if kind != GGUF_ARRAY:
        raise Unreadable("the GGUF header has a value of unknown type %d" % kind)
    item, count = struct.unpack("<IQ", exactly(stream, 12))
    if count > MOST_GGUF_ITEMS:
        raise Unreadable("the GGUF header claims an array of %d items" % count)
    if item == GGUF_STRING:
        for _index in range(count):
            skip(stream, struct.unpack("<Q", exactly(stream, 8))[0], MOST_GGUF_STRING)
        return None
    if item not in GGUF_NUMBERS:
        raise Unreadable("the GGUF header has an array of unknown type %d" % item)
    if count > 4096 or not wanted:
        skip(stream, count * struct.calcsize(GGUF_NUMBERS[item]), MOST_GGUF_HEADER)
        return None
    return [gguf_value(stream, item, True) for _index in range(count)]


def gguf_string(stream: BinaryIO, most: int) -> str:
    length = struct.unpack("<Q", exactly(stream, 8))[0]
    if length > most:
        raise Unreadable("the GGUF header claims a text of %d bytes" % length)
    return small_files.clean(exactly(stream, length).decode("utf-8", "replace"))


def exactly(stream: BinaryIO, length: int) -> bytes:
    content = stream.read(length)
    if len(content) != length:
        raise Unreadable("the GGUF header ends too early")
    return content


def skip(stream: BinaryIO, length: int, most: int) -> None:
    """Pass over bytes. A seek beyond the end shows at the next read."""
    if length > most:
        raise Unreadable("the GGUF header claims an item of %d bytes" % length)
    stream.seek(length, os.SEEK_CUR)


# ---- can the service read it


def first_unreadable(path: str, service_user: str | None) -> str | None:
    """None when the service can read all of it, else a sentence about the first thing that it cannot."""
    if os.geteuid() != 0 or not service_user:
        return cannot_open(path)
    try:
        user = pwd.getpwnam(service_user)
    except (KeyError, ValueError):
        blocked = closed_to_others(path)
        return blocked and "%s, and the user %s, who does not exist yet, will not own it" % (blocked, service_user)
    blocked = as_user(user, lambda: cannot_open(path))
    return blocked and "%s, as the user %s" % (blocked, service_user)


def cannot_open(path: str) -> str | None:
    """Try to open everything below a path that an engine would read."""
    try:
        if not os.path.isdir(path):
            os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
            return None
        for name in sorted(os.listdir(path)):
            full = os.path.join(path, name)
            if name not in SKIPPED_DIRECTORIES and os.path.isfile(full):
                os.close(os.open(full, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
            elif os.path.islink(full) and not os.path.exists(full):
                return "%s leads nowhere" % full
    except OSError as error:
        return small_files.reason(str(error.filename or path), error)
    return None


def as_user(user: pwd.struct_passwd, question: Callable[[], str | None]) -> str | None:
    """Ask a question in a forked child that has the ids and groups of a user. Only root may do this."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        answer = "no answer"
        try:
            os.setgroups(os.getgrouplist(user.pw_name, user.pw_gid))
            os.setgid(user.pw_gid)
            os.setuid(user.pw_uid)
            answer = question() or ""
        except OSError as error:
            answer = "cannot act as %s: %s" % (user.pw_name, error.strerror)
        finally:
            os.write(writer, answer.encode("utf-8", "replace")[:4000])
            # The child must not run the parent's exit handlers.
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        answer = stream.read().decode("utf-8", "replace")
    os.waitpid(child, 0)
    return answer or None


def closed_to_others(path: str) -> str | None:
    """The first directory or file on the way that is closed to users who neither own it nor are in its group."""
    targets = [path]
    if os.path.isdir(path):
        targets += [os.path.join(path, name) for name in sorted(os.listdir(path)) if os.path.isfile(os.path.join(path, name))]
    checked = set()
    for target in targets:
        for step in way_to(os.path.realpath(target)):
            if step in checked:
                continue
            checked.add(step)
            mode = os.stat(step).st_mode
            needed = stat.S_IXOTH if stat.S_ISDIR(mode) else stat.S_IROTH
            if not mode & needed:
                return "%s is closed to other users (mode %04o)" % (step, stat.S_IMODE(mode))
    if os.path.isdir(path) and not os.stat(path).st_mode & stat.S_IROTH:
        return "%s cannot be listed by other users" % path
    return None


def way_to(path: str) -> list[str]:
    """/a/b/c as [/, /a, /a/b, /a/b/c]."""
    parts = [part for part in path.split(os.sep) if part]
    return [os.sep] + [os.sep + os.sep.join(parts[:count]) for count in range(1, len(parts) + 1)]


# ---- checksums


def checksums(path: str, problems: list[str]) -> dict[str, str]:
    """`{relative name: sha256}`; a file alone has its own name."""
    try:
        names = sorted(part_sizes(path) if os.path.isfile(path) else file_sizes(path))
        folder = os.path.dirname(path) if os.path.isfile(path) else path
        return {name: sha256(os.path.join(folder, name)) for name in names}
    except (OSError, Unreadable) as error:
        problems.append(str(error))
        return {}


def content_sha256(hashes: dict[str, str], kind: str | None) -> str | None:
    """One checksum for all of it: a file's own; of a directory, that of what C(sha256sum) prints for its files in the order of their names.

    For people: C(cd DIRECTORY && find . -type f -printf '%P\\n' | LC_ALL=C sort | xargs -d '\\n' sha256sum | sha256sum).
    """
    if not hashes:
        return None
    if kind == "file" and len(hashes) == 1:
        return next(iter(hashes.values()))
    lines = ["%s  %s\n" % (digest, name) for name, digest in hashes.items()]
    return hashlib.sha256("".join(sorted(lines, key=lambda line: line[66:].encode("utf-8", "surrogateescape"))).encode("utf-8", "surrogateescape")).hexdigest()


def sampled_digest(folder: str, sizes: dict[str, int]) -> str:
    """16 hex digits over the files' names and sizes, and of each its beginning, middle and end: what tells half a copy, or another model, from a good
    one without reading hundreds of gigabytes. Raises OSError."""
    digest = hashlib.sha256()
    for name, size in sorted(sizes.items()):
        digest.update(b"%d %s\0" % (size, name.encode("utf-8", "surrogateescape")))
        with open(os.path.join(folder, name), "rb") as stream:
            for place in (0, size // 2, size - SAMPLE) if size > 3 * SAMPLE else (0,):
                stream.seek(place)
                digest.update(stream.read(SAMPLE if size > 3 * SAMPLE else 3 * SAMPLE))
    return digest.hexdigest()[:16]


def read_note(path: str) -> Facts | None:
    """Where a directory was fetched from, as far as it says."""
    note = small_files.read_json(os.path.join(path, NOTE))[0]
    return None if note is None else {key: note[key] for key in ("source", "revision", "sha256", "content_sha256") if isinstance(note.get(key), str)}


def sha256(path: str) -> str:
    """Hash of a file of any size. Raises OSError."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()
