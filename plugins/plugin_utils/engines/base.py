# Copyright (c) 2026 The rankzero.inference authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What every engine adapter answers. The rest of the collection knows engines only through this interface."""

from __future__ import annotations

import dataclasses
import typing as t

from ansible_collections.rankzero.inference.plugins.plugin_utils import memory_fit, quantization
from ansible_collections.rankzero.inference.plugins.plugin_utils.arguments import Grammar, find, unknown, value
from ansible_collections.rankzero.inference.plugins.plugin_utils.faults import Findings
from ansible_collections.rankzero.inference.plugins.plugin_utils.profile import Profile
from ansible_collections.rankzero.inference.plugins.plugin_utils.values import nearest


@dataclasses.dataclass(frozen=True)
class Peer:
    """Another rank of the replica, as this rank reaches it."""

    rank: int
    host: str
    address: str


@dataclasses.dataclass(frozen=True)
class Shard:
    """Everything that a launch of one rank may depend on. Paths are absolute on the host; ports are TCP."""

    profile: Profile
    rank: int
    host: str
    address: str
    leader_address: str
    leader_port: int
    http_host: str
    http_port: int
    everyone: tuple[Peer, ...]  # all ranks, by rank; one tuple that all shards share
    gpus: tuple[t.Mapping[str, t.Any], ...]
    build: t.Mapping[str, t.Any]  # {} for an engine that needs no build
    python: str
    current_dir: str
    work_dir: str
    has_key: bool
    models: t.Mapping[str, t.Any] = dataclasses.field(default_factory=dict)  # path -> what node facts say of it, the same on every rank

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    @property
    def has_peers(self) -> bool:
        return len(self.everyone) > 1

    @property
    def peers(self) -> tuple[Peer, ...]:
        """All ranks but this one, by rank: made when an engine lists them, since n lists of n are most of a large plan."""
        return tuple(peer for peer in self.everyone if peer.rank != self.rank)


@dataclasses.dataclass(frozen=True)
class Launch:
    """One process of a shard. C(secret_env): variable -> name of the secret. Ports to wait for: the leader's, or those of ranks.

    C(secret_files): name -> text in which C({api_key}) stands for the key as a quoted JSON string; the file lies among the shard's secrets, and only
    there is the key put in.  C(secret_args): position in C(args) -> name; at start that argument becomes the path of the secret's file.
    """

    name: str
    path: str
    args: tuple[str, ...]
    env: t.Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)  # variable -> (value, why)
    secret_env: t.Mapping[str, str] = dataclasses.field(default_factory=dict)
    secret_files: t.Mapping[str, str] = dataclasses.field(default_factory=dict)
    secret_args: t.Mapping[int, str] = dataclasses.field(default_factory=dict)
    wait_for_leader_port: int | None = None
    wait_for_ranks: tuple[tuple[int, str, int], ...] = ()  # (rank, address, port)


class Engine:
    """Base of the adapters. Attributes say what is true of the engine; methods compute from a profile or a shard, and touch nothing."""

    name = ""
    needs_build = True
    programs: tuple[str, ...] = ()  # of a build; the first is the one that serves, and that is asked for version and devices
    optional_programs: tuple[str, ...] = ()
    version_args: tuple[str, ...] = ("--version",)
    without_device = ""  # what the program ends with, version_args or not, on a host where it finds no device
    devices_args: tuple[str, ...] = ()  # that make the main program list its devices, one a line
    is_python = False  # its programs are Python's: a build is then known by its packages, and its PyTorch is asked for devices
    falls_back_to_cpu = False  # serves from the CPU, healthily, when its GPU backend does not load
    gpu_token = "uuid"  # what CUDA_VISIBLE_DEVICES holds: uuid or index
    health_path = "/health"
    models_path = "/v1/models"
    adapters_path: str | None = None  # where adapters are listed by their files, for an engine that does not list them as models
    metrics_path: str | None = "/metrics"
    in_flight_metrics: tuple[str, ...] = ()  # gauges at metrics_path whose sum is the number of requests that run or wait
    probe_path = "/v1/chat/completions"
    key_protects: str | None = "/v1/chat/completions"  # asked without the key, it must answer 401
    program_files: tuple[str, ...] = ()  # files of roles/replica/files that go into the revision
    warmup_503 = True  # answers 503 while it loads or warms up; otherwise a 503 is a failure
    uses_nccl = True  # ranks exchange tensors through NCCL, so the choice of a fabric matters
    heads_divide = True  # attention heads must divide by TP
    data_parallel = False  # has replicas of its own inside of one replica (dp)
    distributed: tuple[str, ...] = ("mp",)  # ways to run over several nodes, of mp and ray
    dp_modes: tuple[str, ...] = ("internal",)  # ways to balance requests over data parallel ranks, of internal and hybrid
    attention_data_parallel = False  # can split attention by data inside of the tensor parallel group (attention_dp)
    cpu_parallel = False  # CPU ranks can form a tensor, pipeline or data parallel group
    dtypes: t.Mapping[str, int] = {}  # dtype -> minimum compute capability (0: any); empty where the engine has no such option
    kv_cache_dtypes: t.Mapping[str, int] = {}
    context_option: str | None = None  # the option that sets the length of a sequence
    weights_on_gpu = 1.0  # the part of the weights that is on GPUs for certain
    quantizations: t.Mapping[str, int] = {}
    schemes: t.Mapping[str, quantization.Schemes] = {}  # method -> minima by scheme, where a checkpoint has several
    quantization_packages: t.Mapping[str, str] = {}  # method -> the package that a build needs for it
    elsewhere_quantizations: t.Mapping[str, str] = {}  # method -> the hardware that it is for, which is none of NVIDIA's
    capability_floor = 0  # below it the engine does not run on a GPU at all
    grammar = Grammar({})
    parser: tuple[tuple[str, ...], ...] = ()  # every option of the engine with its spellings (option_names.py)
    owned: t.Mapping[str, str] = {}  # canonical option -> where its value comes from
    refused: t.Mapping[str, str] = {}  # canonical option -> what it would do

    def validate(self, profile: Profile, where: str, findings: Findings) -> None:
        """Everything about a profile that can be judged without a host. Adapters extend it."""
        self._validate_parallelism(profile, where, findings)
        self._validate_arguments(profile, where, findings)
        self._validate_positionals(profile, where, findings)

    def _validate_parallelism(self, profile: Profile, where: str, findings: Findings) -> None:
        """A field that the engine's launches would silently ignore is a fault."""
        if profile.dp > 1 and not self.data_parallel:
            findings.fault("%s.dp" % where, profile.dp, "1: %s has no data parallelism" % self.name, "Deploy several replicas instead.")
        if profile.attention_dp > 1 and not self.attention_data_parallel:
            findings.fault("%s.attention_dp" % where, profile.attention_dp, "1: %s has no attention data parallelism" % self.name)
        if profile.on_cpu and not self.cpu_parallel and max(profile.tp, profile.pp, profile.dp) > 1:
            findings.fault(
                "%s.gpus_per_node" % where,
                0,
                "GPUs for tp %d, pp %d, dp %d" % (profile.tp, profile.pp, profile.dp),
                "A CPU profile (gpus_per_node 0) of %s has tp, pp and dp 1." % self.name,
            )
        for field, chosen, known in (("distributed", profile.distributed, self.distributed), ("dp_mode", profile.dp_mode, self.dp_modes)):
            if chosen not in known:
                findings.fault("%s.%s" % (where, field), chosen, "one of %s for %s" % (", ".join(known), self.name))
        for field, dtype, table in (("dtype", profile.dtype, self.dtypes), ("kv_cache_dtype", profile.kv_cache_dtype, self.kv_cache_dtypes)):
            if dtype is not None and dtype not in table:
                findings.fault("%s.%s" % (where, field), dtype, "one of %s" % ", ".join(table) if table else "unset: %s has no such option" % self.name)

    def _validate_arguments(self, profile: Profile, where: str, findings: Findings) -> None:
        """Owned and code-executing options are found as the engine's own parser would find them."""
        for spelled in find(profile.args, self.grammar):
            field = "%s.args[%d]" % (where, spelled.position)
            if spelled.option in self.owned:
                findings.fault(field, spelled.text, "no %s" % spelled.option, "The plan sets it: %s." % self.owned[spelled.option])
            elif spelled.option in self.refused:
                findings.fault(field, spelled.text, "no %s" % spelled.option, "It %s." % self.refused[spelled.option])
        for position, text in unknown(profile.args, self.parser, self.grammar) if self.parser else ():
            close = nearest(text.split("=", 1)[0], (name for group in self.parser for name in group))
            findings.warn(
                "%s.args[%d]" % (where, position),
                text,
                "an option that %s is known to have" % self.name,
                "%sIf the build is of another release it may have it; otherwise the engine will not start." % ("Did you mean %s? " % close if close else ""),
            )

    def _validate_positionals(self, profile: Profile, where: str, findings: Findings) -> None:
        """A bare C(--) would turn the plan's own options, which come last, into positionals; a word that no option takes is one (a second model)."""
        before = "--option=value"
        for position, text in enumerate(profile.args):
            field = "%s.args[%d]" % (where, position)
            if text == "--":
                findings.fault(field, text, "options only", "Remove it: the plan's own options follow the profile's.")
            elif not text.startswith("-") and before.startswith("-") and "=" in before:
                findings.fault(
                    field, text, "an option such as --max-model-len before it", "No option takes this word, so the engine would take it for a model."
                )
            before = text

    def serves_http(self, profile: Profile, rank: int) -> bool:
        return rank == 0

    def check_shard(self, shard: Shard, findings: Findings) -> None:
        """What can be judged only of a rank on its host: paths, the build, what node facts say of the model and its adapters."""

    def revision_files(self, shard: Shard, variables: t.Collection[str]) -> t.Mapping[str, str]:
        """Name -> text of further files of the rank's revision, in C(shard.current_dir). C(variables): those of the rank's launches."""
        return {}

    def program(self, shard: Shard, name: str) -> str:
        """The path of one of the build's programs; they lie in one directory."""
        directory = str(shard.build.get("path") or "").rpartition("/")[0]
        return str((shard.build.get("paths") or {}).get(name) or "%s/%s" % (directory, name))

    def launches(self, shard: Shard) -> list[Launch]:
        """The processes of one rank in start order; the last is the engine, the others are sidecars."""
        raise NotImplementedError

    def listen_ports(self, shard: Shard) -> list[tuple[str, int, str]]:
        """(address, port, what for) that must be free on the rank's host."""
        ports = []
        if self.serves_http(shard.profile, shard.rank):
            ports.append((shard.http_host, shard.http_port, "HTTP"))
        if shard.is_leader and shard.has_peers:
            # torch's store listens on every address, whatever the ranks are told (vLLM: *:29501).
            ports.append(("::" if ":" in shard.leader_address else "0.0.0.0", shard.leader_port, "the ranks' rendezvous"))
        return ports

    def leader_ports(self, profile: Profile) -> tuple[int, ...]:
        """Ports that the leader binds for the ranks, as distances from the leader port. All of them must be free where the plan chooses that port."""
        return (0,)

    def attention_tp(self, profile: Profile) -> int:
        """Over how many GPUs each attention head's group is split."""
        return profile.tp

    def accepts_on_port(self, shard: Shard) -> int | None:
        """A port on which the leader must be connected to this rank once it serves, or None."""
        return None

    def expected_models(self, profile: Profile) -> list[str]:
        """The ids that C(/v1/models) must list before the replica is ready."""
        return [profile.served_model_name] + [adapter.name for adapter in profile.adapters]

    def expected_adapters(self, profile: Profile) -> list[str]:
        """The files that C(adapters_path) must list, in this order, before the replica is ready."""
        return [adapter.path for adapter in profile.adapters] if self.adapters_path else []

    def devices_command(self, shard: Shard) -> tuple[str, tuple[str, ...]] | None:
        """(path, args) that lists the devices which the shard's build sees, for the text of a failure."""
        return None

    def quantization_minimum(self, name: str) -> int | None:
        """Minimum compute capability as major * 10 + minor, None where the engine does not know the quantization."""
        return self.quantizations.get(name.lower())

    def quantization_arguments(self, profile: Profile) -> list[str]:
        """Quantizations that the profile's free arguments ask for, in any spelling of the engine's."""
        found = [value(profile.args, spelled, self.grammar) for spelled in find(profile.args, self.grammar) if spelled.option == "--quantization"]
        return [name for name in found if name]

    def context_length(self, profile: Profile) -> int | None:
        """Tokens of one sequence that the profile's arguments ask for, or None where they do not say."""
        found = [value(profile.args, spelled, self.grammar) for spelled in find(profile.args, self.grammar) if spelled.option == self.context_option]
        return memory_fit.parse_length(found[-1]) if found else None

    def cache_bytes(self, profile: Profile) -> float:
        """Bytes of one element of the KV cache, at the least."""
        name = profile.kv_cache_dtype or ""
        return 0.5 if "fp4" in name else 1.0 if "8" in name else 2.0

    def needs_model(self, profile: Profile, rank: int) -> bool:
        """Whether this rank reads the model's files itself."""
        return True

    def weights_on_rank(self, profile: Profile, rank: int) -> float:
        """The part of the model's weights that this rank's GPUs hold together, 0..1."""
        return 1.0 / profile.nodes

    def warnings(self, profile: Profile, findings: Findings) -> None:
        """What an operator should know about running this engine so. Adapters override it."""
