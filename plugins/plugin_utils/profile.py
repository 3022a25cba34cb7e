# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A profile: how a model runs on a class of GPU. Plain YAML in, a frozen record or faults out."""

from __future__ import annotations

import dataclasses
import re
import typing as t

from ansible_collections.rankzero.inference.plugins.plugin_utils.environment_names import NAME as ENVIRONMENT_NAME
from ansible_collections.rankzero.inference.plugins.plugin_utils.environment_names import refusal
from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Findings, shown
from ansible_collections.rankzero.inference.plugins.plugin_utils.values import NAME, Reader, nearest, unprintable

ENGINE = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*){0,2}\Z")
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}\Z")
SHA256 = re.compile(r"[0-9a-f]{64}\Z")
REVISION = re.compile(r"[0-9a-f]{40}\Z")
HUGGING_FACE = re.compile(r"hf://[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}\Z")


@dataclasses.dataclass(frozen=True)
class Adapter:
    """A LoRA adapter: the name that requests use, the path on every rank, the expected sha256 or None, and where it comes from if it is not there.

    C(source) is what M(rankzero.inference.model_files) takes, with C(revision) for Hugging Face; None where somebody else brings the files.
    """

    name: str
    path: str
    sha256: str | None = None
    source: str | None = None
    revision: str | None = None


@dataclasses.dataclass(frozen=True)
class Profile:
    """Sizes are counts of GPUs or nodes, memory is in MiB, times are in seconds. C(gpus_per_node) 0 is a CPU profile."""

    name: str
    engine: str
    model_path: str
    served_model_name: str
    engine_version: str | None = None
    gpu_class: str | None = None
    tp: int = 1
    pp: int = 1
    dp: int = 1
    nodes: int = 1
    gpus_per_node: int = 1
    threads: int = 0
    distributed: str = "mp"
    dp_mode: str = "internal"
    attention_dp: int = 1
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    quantization: str | None = None
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    adapters: tuple[Adapter, ...] = ()
    gpu_memory_min_mib: int | None = None
    allow_memory_overcommit: bool = False
    ready_timeout: int = 900
    stop_timeout: int = 30

    def as_dict(self) -> dict[str, t.Any]:
        data = dataclasses.asdict(self)
        data["args"] = list(self.args)
        data["env"] = dict(self.env)
        data["adapters"] = [dataclasses.asdict(adapter) for adapter in self.adapters]
        return data

    @property
    def on_cpu(self) -> bool:
        return self.gpus_per_node == 0


def select(profile: t.Any, profiles: t.Any, findings: Findings) -> Profile | None:
    """Find the profile that C(replica_profile) means: a mapping itself, or a name in C(replica_profiles)."""
    if isinstance(profile, t.Mapping):
        return parse(profile, location(profile), "inline", findings)
    known = profiles if isinstance(profiles, t.Mapping) else {}
    if profiles and not isinstance(profiles, t.Mapping):
        findings.fault("replica_profiles", profiles, "a mapping of name to profile")
    if profile is None or profile == "":
        findings.fault("replica_profile", profile, "the name of a profile, or a mapping", _known_profiles(known))
        return None
    if isinstance(profile, str) and profile in known and not isinstance(known[profile], t.Mapping):
        findings.fault(location(profile), known[profile], "a mapping: the fields of a profile")
        return None
    if not isinstance(profile, str) or profile not in known:
        close = nearest(str(profile), (str(name) for name in known if not unprintable(str(name))))
        findings.fault("replica_profile", profile, "a name in replica_profiles", ("Did you mean %s? " % close if close else "") + _known_profiles(known))
        return None
    return parse(known[profile], location(profile), profile, findings)


def location(profile: t.Any) -> str:
    """Where the profile that C(replica_profile) means is written: what comes before a field's name in faults."""
    return "replica_profile" if isinstance(profile, t.Mapping) else "replica_profiles.%s" % shown(profile)


def _known_profiles(known: t.Mapping[str, t.Any]) -> str:
    return "Known profiles: %s." % ", ".join(sorted(shown(str(name)) for name in known)) if known else "No replica_profiles are defined."


def parse(data: t.Mapping[str, t.Any], where: str, name: str, findings: Findings) -> Profile | None:
    """Read one profile field by field. Returns None where a field that everything else depends on is wrong; faults are in C(findings)."""
    read = Reader(data, where, findings)
    nodes = read.integer("nodes", 1, 1, 4096) or 1
    tp = read.integer("tp", 1, 1, 4096) or 1
    pp = read.integer("pp", 1, 0, 4096) or 1  # 0 and absent both mean no pipeline parallelism
    dp = read.integer("dp", 1, 1, 4096) or 1
    gpus_per_node = read.integer("gpus_per_node", None, 0, 64)
    if gpus_per_node is None:
        if nodes > 1 and not read.is_wrong("gpus_per_node"):
            read.wrong(
                "gpus_per_node",
                data.get("gpus_per_node"),
                "the number of GPUs that each of the %d nodes gives" % nodes,
                "With more than one node it cannot be derived: set it (0 for a CPU profile).",
            )
        gpus_per_node = tp
    own_name = read.text("name", _own_name(name, read), wanted="a name") or ""
    profile = Profile(
        name=own_name,
        engine=read.required("engine", "the name of an engine", ENGINE) or "",
        engine_version=read.text("engine_version", wanted="the name or version of a registered build"),
        gpu_class=read.text("gpu_class", wanted="a GPU class such as H100"),
        model_path=_path(read, "model_path", "Set model_path; it may not be empty."),
        served_model_name=_served_name(read, own_name),
        tp=tp,
        pp=pp,
        dp=dp,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        threads=read.integer("threads", 0, 0, 4096) or 0,
        distributed=read.choice("distributed", ("mp", "ray"), "mp"),
        dp_mode=read.choice("dp_mode", ("internal", "hybrid"), "internal"),
        attention_dp=read.integer("attention_dp", 1, 1, 4096) or 1,
        dtype=read.text("dtype", wanted="the name of a data type"),
        kv_cache_dtype=read.text("kv_cache_dtype", wanted="the name of a data type"),
        quantization=read.text("quantization", wanted="the name of a quantization"),
        args=tuple(read.texts("args")),
        env=_environment(read, findings, where),
        adapters=_adapters(read, findings, where),
        gpu_memory_min_mib=read.integer("gpu_memory_min_mib", None, 1),
        allow_memory_overcommit=read.boolean("allow_memory_overcommit"),
        ready_timeout=read.integer("ready_timeout", 900, 5, 86400) or 900,
        stop_timeout=read.integer("stop_timeout", 30, 1, 3600) or 30,
    )
    read.refuse_unknown()
    if not read.is_wrong("nodes", "tp", "pp", "dp", "gpus_per_node"):
        _check_shape(profile, where, findings)
    _check_model_names(profile, where, findings)
    return profile if profile.engine else None


def _own_name(name: str, read: Reader) -> str:
    """The name that a profile has by its place in C(replica_profiles), unless no file or table could show it."""
    bad = unprintable(name)
    if bad:
        read.wrong("name", name, "the name of a profile without %s" % bad, "Rename it.")
    return "" if bad else name


def _path(read: Reader, field: str, hint: str) -> str:
    path = read.required(field, "an absolute path on the hosts", hint=hint)
    if path is not None and not path.startswith("/"):
        read.wrong(field, path, "an absolute path on the hosts")
    return path or ""


def _served_name(read: Reader, default: str) -> str:
    """The name that requests use. It becomes an argument and a part of addresses, so a profile's name serves only where it fits."""
    wanted = "letters, digits, and . _ / - after the first"
    name = read.text("served_model_name", None, MODEL_NAME, wanted)
    if name is None and not MODEL_NAME.match(default) and not read.is_wrong("served_model_name", "name"):
        read.wrong("served_model_name", None, wanted, "Set it: the profile's own name (%s) does not fit." % shown(default))
    return name or default


def _check_model_names(profile: Profile, where: str, findings: Findings) -> None:
    names = [profile.served_model_name] + [adapter.name for adapter in profile.adapters]
    for name in sorted({name for name in names if names.count(name) > 1}):
        findings.fault(
            "%s.adapters" % where, "the name %s more than once" % name, "a name of its own for each adapter and for the model", "Requests choose by it."
        )


def _check_shape(profile: Profile, where: str, findings: Findings) -> None:
    """nodes x gpus_per_node = TP x PP x DP. A CPU profile has no such shape: what its ranks can be is the engine's to say."""
    if profile.on_cpu:
        return
    have, need = profile.nodes * profile.gpus_per_node, profile.tp * profile.pp * profile.dp
    if have != need:
        findings.fault(
            "%s.gpus_per_node" % where,
            "nodes %d x gpus_per_node %d = %d GPUs" % (profile.nodes, profile.gpus_per_node, have),
            "tp %d x pp %d%s = %d GPUs" % (profile.tp, profile.pp, " x dp %d" % profile.dp if profile.dp > 1 else "", need),
            "Change nodes, gpus_per_node, tp or pp so that both sides agree.",
        )


def _environment(read: Reader, findings: Findings, where: str) -> tuple[tuple[str, str], ...]:
    """Overrides of the environment, sorted. Unsafe names are faults with their reason (and are dropped again when rendered)."""
    result: dict[str, str] = {}
    for name, value in read.mapping("env").items():
        field = "env.%s" % name
        if not ENVIRONMENT_NAME.match(name):
            read.wrong(field, name, "a name of letters, digits and _ that does not begin with a digit")
            continue
        reason = refusal(name)
        if reason:
            read.wrong(field, name, "no such variable in a profile", "It %s." % reason)
            continue
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            read.wrong(field, value, "a string or a number", "Quote it: what a program reads is text.")
            continue
        bad = unprintable(str(value))
        if bad:
            read.wrong(field, str(value), "a value without %s" % bad, "Remove the character.")
            continue
        result[name] = str(value)
    return tuple(sorted(result.items()))


def _adapters(read: Reader, findings: Findings, where: str) -> tuple[Adapter, ...]:
    """LoRA adapters in the order given: engines number them by it."""
    result: list[Adapter] = []
    for number, item in enumerate(read.mappings("adapters")):
        one = Reader(item, "%s.adapters[%d]" % (where, number), findings)
        name = one.required("name", "the name that requests use for the adapter: letters, digits, and . _ / - after the first", MODEL_NAME)
        path = _path(one, "path", "Set the adapter's path.")
        sha256 = one.text("sha256", None, SHA256, "64 lower-case hexadecimal digits")
        source, revision = _source(one, sha256)
        one.refuse_unknown()
        if name and path:
            result.append(Adapter(name, path, sha256, source, revision))
    paths = [adapter.path for adapter in result]
    for path in sorted({path for path in paths if paths.count(path) > 1}):
        if len({(adapter.source, adapter.revision, adapter.sha256) for adapter in result if adapter.path == path}) > 1:
            findings.fault("%s.adapters" % where, "%s with different sources or checksums" % path, "one content at one path")
    return tuple(result)


def adapters(profile: t.Mapping[str, t.Any], findings: Findings) -> tuple[Adapter, ...]:
    """The adapters of a profile whose other fields nobody has looked at."""
    return _adapters(Reader(profile, "profile", findings), findings, "profile")


def _source(one: Reader, sha256: str | None) -> tuple[str | None, str | None]:
    """Where an adapter comes from. What has no checksum and no pinned revision would be another adapter tomorrow."""
    source = one.text("source", wanted="an http(s) address, hf://ORGANISATION/NAME, or a path on the controller")
    revision = one.text("revision", None, REVISION, "the 40 hexadecimal digits of a commit")
    if source is None:
        if revision:
            one.wrong("revision", revision, "no revision without a source")
    elif source.startswith("hf:"):
        if not HUGGING_FACE.match(source):
            one.wrong("source", source, "hf://ORGANISATION/NAME")
        if revision is None and not one.is_wrong("revision"):
            one.wrong("revision", None, "the 40 hexadecimal digits of a commit", "A branch is another content tomorrow.")
    elif "://" in source:
        if not source.startswith(("http://", "https://")) or "@" in source.split("://", 1)[1].split("/", 1)[0]:
            one.wrong("source", source.split("://", 1)[0] + "://...", "an http(s) address without a password", "Give a token in replica_model_token.")
        if sha256 is None and not one.is_wrong("sha256"):
            one.wrong("sha256", None, "64 lower-case hexadecimal digits", "What comes from an address must be known beforehand.")
    return source, revision


__all__ = ["Adapter", "NAME", "Profile", "adapters", "parse", "select"]
