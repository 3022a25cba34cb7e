# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Checks of the model against the ranks it is to run on, from the model's own files as node facts describe them."""

from __future__ import annotations

import typing as t

from ansible_collections.rankzero.inference.plugins.plugin_utils import memory_fit, quantization
from ansible_collections.rankzero.inference.plugins.plugin_utils.engines.base import Engine
from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Findings
from ansible_collections.rankzero.inference.plugins.plugin_utils.profile import Adapter, Profile

if t.TYPE_CHECKING:
    from ansible_collections.rankzero.inference.plugins.plugin_utils.plan import Rank

MIB = 1024 * 1024
# What a shard must hold on each GPU at the least. A bare CUDA context holds some 300 to 650 MiB, and is no proof of a loaded shard.
EXPECTED_FLOOR_MIB = 1024
# Weights are not spread perfectly evenly, and some layers may stay on the host (token embeddings in llama.cpp).
WEIGHTS_SHARE = 0.8


def check(ranks: t.Sequence[Rank], profile: Profile, engine: Engine, findings: Findings) -> None:
    for one in ranks:
        if engine.needs_model(profile, one.rank):
            check_readable(one.host.name, one.rank, one.facts, profile, findings)
        _check_place(one, profile, findings)
    _check_same_files(ranks, profile, engine, findings)
    _check_heads(ranks, profile, engine, findings)
    _check_quantizations(ranks, profile, engine, findings)
    _check_capability(ranks, profile, engine, findings)
    _check_memory(ranks, profile, engine, findings)


def _adapter(profile: Profile, field: str) -> Adapter | None:
    return next((adapter for adapter in profile.adapters if field == "adapters.%s" % adapter.name), None)


def _paths(profile: Profile) -> list[tuple[str, str]]:
    return [("model_path", profile.model_path)] + [("adapters.%s" % adapter.name, adapter.path) for adapter in profile.adapters]


def check_readable(host: str, rank: int | None, facts: t.Mapping[str, t.Any], profile: Profile, findings: Findings) -> None:
    """The model and every adapter must be there and be readable by the service's user; facts that do not say are a warning."""
    for field, path in _paths(profile):
        if not path.startswith("/"):
            continue  # unset, or refused with the profile: no host is asked for it
        model = facts["models"].get(path)
        if model is None:
            findings.warn(
                field, "%s was not looked at" % path, "facts about the model's files", "Facts gathered by the deploy look at it.", host=host, rank=rank
            )
        elif not model.get("exists") and any(adapter.path == path and adapter.source for adapter in profile.adapters):
            findings.warn(field, "no %s" % path, "a file or directory on the host", "The deploy fetches it, and plans again with it.", host=host, rank=rank)
        elif not model.get("exists"):
            hint = (
                "Copy the adapter there, correct its path, or give its source: a deploy fetches it then."
                if _adapter(profile, field)
                else "Copy the model there, or correct the path."
            )
            findings.fault(field, "no %s" % path, "a file or directory on the host", hint, host=host, rank=rank)
        elif not model.get("readable"):
            findings.fault(
                field,
                "%s, which the service's user cannot read%s" % (path, ": %s" % model["error"] if model.get("error") else ""),
                "a readable path",
                "Give the service's user (replica_user) read access.",
                host=host,
                rank=rank,
            )


def to_fetch(ranks: t.Sequence[Rank], profile: Profile, engine: Engine) -> dict[str, list[str]]:
    """host -> paths of the adapters that a deploy has to fetch there: it has a source, and the host of a rank that needs it does not have it."""
    paths = [adapter.path for adapter in profile.adapters if adapter.source]
    found = {}
    for one in ranks:
        models = one.facts["models"]
        missing = [path for path in dict.fromkeys(paths) if engine.needs_model(profile, one.rank) and path in models and not models[path].get("exists")]
        found.update({one.host.name: missing} if missing else {})
    return found


def _check_place(one: Rank, profile: Profile, findings: Findings) -> None:
    """What lies in a replica's own directories goes when the replica is removed; a model must not."""
    root = one.host.root.rstrip("/")
    for field, path in _paths(profile):
        own = next((folder for folder in ("etc", "run", "var/lib", "var/log") if ("%s/" % path).startswith("%s/%s/rankzero/" % (root, folder))), None)
        if own:
            findings.fault(
                field,
                path,
                "a path outside of %s/%s/rankzero" % (root, own),
                "A replica's directories are removed with it; keep models elsewhere.",
                host=one.host.name,
                rank=one.rank,
            )


def _check_same_files(ranks: t.Sequence[Rank], profile: Profile, engine: Engine, findings: Findings) -> None:
    """Every rank loads the same content, as far as facts tell it: size, samples of every file, and its checksum where that was asked for."""
    for field, path in _paths(profile):
        wanted = _adapter(profile, field)
        seen: tuple[Rank, tuple[t.Any, ...]] | None = None
        for one in ranks:
            model = one.facts["models"].get(path)
            if not engine.needs_model(profile, one.rank) or not model or model.get("bytes") is None:
                continue
            if wanted is not None:
                _check_content(one, field, path, wanted, model, findings)
            content = (model["bytes"], model.get("files"), model.get("digest"), model.get("content_sha256"))
            if seen is None:
                seen = (one, content)
            elif _differs(content, seen[1]):
                findings.fault(
                    field,
                    _described(content),
                    "%s, as on %s" % (_described(seen[1]), seen[0].host.name),
                    "All ranks load the same files. Copy them anew to the host that has the wrong ones.",
                    host=one.host.name,
                    rank=one.rank,
                )


def _differs(content: tuple[t.Any, ...], other: tuple[t.Any, ...]) -> bool:
    return any(mine is not None and theirs is not None and mine != theirs for mine, theirs in zip(content, other))


def _described(content: tuple[t.Any, ...]) -> str:
    size, files, digest, sha256 = content
    return "%d bytes in %s files%s" % (size, files, ", sha256 %s" % sha256 if sha256 else ", digest %s" % digest if digest else "")


def _check_content(one: Rank, field: str, path: str, wanted: Adapter, model: t.Mapping[str, t.Any], findings: Findings) -> None:
    """An adapter is what the profile says it is. The checksum of an archive is known from the note that the fetch has left."""
    content, note = model.get("content_sha256"), model.get("fetched") or {}
    problem = None
    if content and note.get("content_sha256") not in (None, content):
        problem = "files that were changed after they were fetched", "the content that came from %s" % note.get("source")
    elif wanted.sha256 and content and wanted.sha256 not in (content, note.get("sha256")):
        problem = "sha256 %s" % content, "sha256 %s" % wanted.sha256
    elif wanted.revision and not wanted.sha256 and note.get("revision") != wanted.revision:
        problem = "revision %s" % (note.get("revision") or "unknown"), "revision %s" % wanted.revision
    if problem:
        findings.fault(
            field,
            "%s with %s" % (path, problem[0]),
            problem[1],
            "Name another path, with the version in it, or remove what is there: nothing overwrites it.",
            host=one.host.name,
            rank=one.rank,
        )


def _config(ranks: t.Sequence[Rank], profile: Profile) -> t.Mapping[str, t.Any]:
    for one in ranks:
        config = (one.facts["models"].get(profile.model_path) or {}).get("config")
        if isinstance(config, t.Mapping) and config:
            return config
    return {}


def _language_config(config: t.Mapping[str, t.Any]) -> t.Mapping[str, t.Any]:
    """A multimodal model's language part has its attention heads."""
    part = config.get("text_config")
    return part if "num_attention_heads" not in config and isinstance(part, t.Mapping) else config


def _check_heads(ranks: t.Sequence[Rank], profile: Profile, engine: Engine, findings: Findings) -> None:
    heads = _language_config(_config(ranks, profile)).get("num_attention_heads")
    split = engine.attention_tp(profile)
    if engine.heads_divide and isinstance(heads, int) and split and heads % split:
        findings.fault(
            "tp",
            profile.tp if split == profile.tp else "tp %d / attention_dp %d = %d" % (profile.tp, profile.attention_dp, split),
            "a divisor of the model's %d attention heads" % heads,
            "vLLM and SGLang split heads evenly over the tensor parallel group.",
        )


def wanted_quantizations(ranks: t.Sequence[Rank], profile: Profile, engine: Engine) -> list[tuple[str, str]]:
    """(where it is said, quantization): the profile, its arguments in the engine's own spellings, and the model's config.json."""
    found = []
    if profile.quantization:
        found.append(("quantization", profile.quantization))
    found += [("args", name) for name in engine.quantization_arguments(profile)]
    method = _checkpoint(ranks, profile).get("quant_method")
    if isinstance(method, str) and method:
        found.append(("config.json", method))
    return found


def _checkpoint(ranks: t.Sequence[Rank], profile: Profile) -> t.Mapping[str, t.Any]:
    """What the model's own files say of their quantization."""
    quantized = _config(ranks, profile).get("quantization_config")
    return quantized if isinstance(quantized, t.Mapping) else {}


def _check_quantizations(ranks: t.Sequence[Rank], profile: Profile, engine: Engine, findings: Findings) -> None:
    """The wanted methods go with the checkpoint's and with the build, and are for this hardware."""
    wanted = wanted_quantizations(ranks, profile, engine)
    checkpoint = str(_checkpoint(ranks, profile).get("quant_method") or "")
    for where, name in wanted:
        if engine.quantizations and where != "config.json" and checkpoint and not quantization.go_together(name, checkpoint):
            findings.fault(
                where, "quantization %s" % name, checkpoint, "The model's own config.json says %s, and %s takes no other." % (checkpoint, engine.name)
            )
        if not profile.on_cpu and name.lower() in engine.elsewhere_quantizations:
            findings.fault(where, "quantization %s" % name, "one for NVIDIA GPUs", "It is for %s." % engine.elsewhere_quantizations[name.lower()])
        package = engine.quantization_packages.get(name.lower())
        for one in ranks if package else ():
            versions = one.build.get("versions") or {}
            if package not in versions:
                say = findings.fault if versions else findings.warn
                say(
                    where,
                    "quantization %s, and a build without %s" % (name, package),
                    "a build with %s" % package,
                    "%s has it by that package only." % engine.name,
                    host=one.host.name,
                    rank=one.rank,
                )


def _wanted_capabilities(ranks: t.Sequence[Rank], profile: Profile, engine: Engine, findings: Findings) -> t.Iterator[tuple[str, str, int]]:
    """(where it is said, what, minimum compute capability) of everything that needs one."""
    if engine.capability_floor:
        yield "engine", "engine %s" % engine.name, engine.capability_floor
    for where, name in wanted_quantizations(ranks, profile, engine):
        minimum = engine.quantization_minimum(name)
        scheme = quantization.of_schemes(engine.schemes, name, _checkpoint(ranks, profile).get("schemes")) if where == "config.json" else None
        if scheme is not None:
            yield where, "quantization %s (%s)" % (name, scheme[1]), max(scheme[0], minimum or 0)
        elif minimum is not None:
            yield where, "quantization %s" % name, minimum
        elif engine.quantizations and name.lower() not in {**engine.quantization_packages, **engine.elsewhere_quantizations}:
            findings.warn(where, "quantization %s" % name, "one that %s is known to have" % engine.name, "Its minimum compute capability is not known here.")
    for where, value, table in (("dtype", profile.dtype, engine.dtypes), ("kv_cache_dtype", profile.kv_cache_dtype, engine.kv_cache_dtypes)):
        if value and table.get(value):
            yield where, "%s %s" % (where, value), table[value]


def _check_capability(ranks: t.Sequence[Rank], profile: Profile, engine: Engine, findings: Findings) -> None:
    """Each minimum against every GPU: engines look at their own first GPU only. An unknown capability lets it through, and is said."""
    for where, what, minimum in _wanted_capabilities(ranks, profile, engine, findings):
        wanted = "%s or newer for %s" % (quantization.written(minimum), what)
        for one in ranks:
            for gpu in one.gpus:
                have = quantization.capability(gpu.get("compute_capability"))
                label = "GPU %s (%s)" % (gpu.get("index"), gpu.get("model"))
                if have is None and where == "engine":
                    continue  # what the profile asks for is said; that the GPU is not ancient is taken for granted
                if have is None:
                    findings.warn(where, "%s with an unknown compute capability" % label, wanted, "It is let through.", host=one.host.name, rank=one.rank)
                elif have < minimum:
                    findings.fault(
                        where,
                        "%s with compute capability %s" % (label, quantization.written(have)),
                        wanted,
                        "Take newer GPUs or another %s." % what.split()[0],
                        host=one.host.name,
                        rank=one.rank,
                    )


def _check_memory(ranks: t.Sequence[Rank], profile: Profile, engine: Engine, findings: Findings) -> None:
    """A GPU that is smaller than what the gate waits for can never prove its shard; one that is smaller than the model's lower bound never loads it."""
    config = _language_config(_config(ranks, profile))
    for one in ranks:
        wanted = expected_mib(one, profile, engine)
        least = _least(one, config, profile, engine)
        for gpu in one.gpus:
            total = gpu["memory"].get("total_mib")
            if total is None:
                continue
            seen = "GPU %s with %d MiB" % (gpu.get("index"), total)
            if profile.gpu_memory_min_mib and wanted > total:
                findings.fault(
                    "gpu_memory_min_mib",
                    seen,
                    "at least %d MiB" % wanted,
                    "Readiness would never be proven: lower gpu_memory_min_mib.",
                    host=one.host.name,
                    rank=one.rank,
                )
            if least.total + (gpu["memory"].get("reserved_mib") or 0) > total:
                say = findings.warn if profile.allow_memory_overcommit else findings.fault
                say(
                    "gpu_memory",
                    seen,
                    "at least %s" % least.text(),
                    "Use more or larger GPUs, a shorter context or a smaller quantization; "
                    "allow_memory_overcommit: true lets it through (engines that offload).",
                    host=one.host.name,
                    rank=one.rank,
                )
            elif gpu["memory"]["model"] == "unified" and not any(process["shard"] for process in gpu["processes"]):
                _check_available(one, gpu, least, findings)


def _check_available(one: Rank, gpu: t.Mapping[str, t.Any], least: memory_fit.Need, findings: Findings) -> None:
    """A GPU without memory of its own shares the host's with everything that runs there, and a host that runs out of it stops answering."""
    available = one.facts["host"]["memory_available_mib"]
    if available is not None and least.total > available:
        findings.warn(
            "host.memory_available_mib",
            "GPU %s shares the host's memory, of which %d MiB are available" % (gpu.get("index"), available),
            "at least %s" % least.text(),
            "Stop what else uses the host's memory, or take another host.",
            host=one.host.name,
            rank=one.rank,
        )


def _least(one: Rank, config: t.Mapping[str, t.Any], profile: Profile, engine: Engine) -> memory_fit.Need:
    """The lower bound for each of a rank's GPUs."""
    share = engine.weights_on_rank(profile, one.rank) * engine.weights_on_gpu / max(len(one.gpus), 1)
    model = one.facts["models"].get(profile.model_path) or {}
    tp, pp = (profile.tp, profile.pp) if engine.heads_divide else (profile.nodes * max(profile.gpus_per_node, 1), 1)
    return memory_fit.need(
        model.get("weight_bytes"), config, share=share, tp=tp, pp=pp, length=engine.context_length(profile), cache_bytes=engine.cache_bytes(profile)
    )


def gpu_details(one: Rank, profile: Profile, engine: Engine) -> list[dict[str, t.Any]]:
    """The shard's GPUs with the MiB that prove it holds its share on each."""
    expected = expected_mib(one, profile, engine)
    return [{"uuid": gpu["uuid"], "index": gpu.get("index"), "pci_bdf": gpu.get("pci_bdf"), "expected_mib": expected} for gpu in one.gpus]


def expected_mib(one: Rank, profile: Profile, engine: Engine) -> int:
    """The profile's own number; else the rank's part of the weights, spread over its GPUs; in any case well above a bare CUDA context."""
    if profile.gpu_memory_min_mib:
        return profile.gpu_memory_min_mib
    weights = (one.facts["models"].get(profile.model_path) or {}).get("weight_bytes") or 0
    share = weights * engine.weights_on_rank(profile, one.rank) / MIB / max(len(one.gpus), 1)
    return max(EXPECTED_FLOOR_MIB, int(share * WEIGHTS_SHARE))
