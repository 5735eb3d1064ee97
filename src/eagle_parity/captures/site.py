"""A server that can be captured from: what it says of itself, and what the plugin's hellos say of its ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_parity.captures.server import Server
from eagle_parity.captures.spool import BOUNDARIES, CAPTURE_DIR, Hello, read_hellos
from eagle_parity.captures.versions import NEWEST, OLDEST, installation, supported, too_old
from eagle_parity.errors import EnvironmentFailure
from eagle_parity.records import Boundary, Draft, Engine, Model, boundary_name, rank_names

_HELLO_SECONDS = 10.0  # a shared file system may be late
_POLL_SECONDS = 0.05

# Server arguments that decide what a captured state is.
FLAGS = (
    "revision",
    "kv_cache_dtype",
    "device",
    # parallel
    "nnodes",
    "enable_dp_attention",
    "attn_dp_size",
    "enable_dp_lm_head",
    "attn_cp_size",
    "dcp_size",
    "moe_dp_size",
    "moe_a2a_backend",
    "moe_dense_tp_size",
    "enable_two_batch_overlap",
    "enable_single_batch_overlap",
    "enable_attn_tp_input_scattered",
    # kernels
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "moe_runner_backend",
    "enable_deterministic_inference",
    "page_size",
    # the draft
    "speculative_algorithm",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_accept_threshold_single",
    "speculative_accept_threshold_acc",
    "speculative_attention_mode",
    "speculative_draft_attention_backend",
    "speculative_draft_model_quantization",
    "speculative_draft_model_revision",
    "speculative_token_map",
    # collectives and what is fused with them
    "enable_flashinfer_allreduce_fusion",
    "enforce_disable_flashinfer_allreduce_fusion",
    "flashinfer_allreduce_fusion_backend",
    "enable_aiter_allreduce_fusion",
    "disable_shared_experts_fusion",
    "disable_custom_all_reduce",
    "enable_nccl_nvls",
    "enable_symm_mem",
    "enable_torch_symm_mem",
    # graphs
    "disable_cuda_graph",
    "disable_cuda_graph_padding",
    "disable_decode_cuda_graph",
    "disable_prefill_cuda_graph",
    "disable_piecewise_cuda_graph",
    "enable_piecewise_cuda_graph",
    "cuda_graph_config",
    "cuda_graph_backend_decode",
    "cuda_graph_backend_prefill",
    "enable_torch_compile",
    # batches and the cache
    "disable_overlap_schedule",
    "chunked_prefill_size",
    "enable_mixed_chunk",
    "disable_radix_cache",
    "enable_return_aux_hidden_states",
    "return_aux_hidden_state_layer_ids",
)


@dataclass(frozen=True)
class Site:
    """A server that can be captured from: its arguments, and the newest hello of every rank expected to capture."""

    server: Server
    info: Mapping[str, Any]
    capture_dir: Path
    hellos: Mapping[int, Hello]
    boundaries: tuple[str, ...] = ()
    """The boundaries to record beside the slots, as tensor names."""
    missing: tuple[int, ...] = ()
    """Ranks that take part in the forwards and leave nothing in this capture directory."""

    @property
    def model(self) -> Model:
        """The target, as the engine loaded it."""
        facts = next(iter(self.hellos.values())).model
        known = {key: facts.get(key) for key in ("architecture", "hidden_size", "num_layers", "vocab_size", "dtype")}
        quantization = facts.get("quantization") or self.info.get("quantization")
        return Model(name=_base(self.info.get("model_path")), quantization=quantization, **known)

    @property
    def draft(self) -> Draft | None:
        """The draft's name and the ids that its config declares where SGLang reads them."""
        path = self.info.get("speculative_draft_model_path")
        facts = next((hello.draft for hello in self.hellos.values() if hello.draft), None)
        if not path and facts is None:
            return None
        ids = (facts or {}).get("declared_ids")
        return Draft(name=_base(path), declared_ids=None if ids is None else tuple(int(i) for i in ids))

    @property
    def engine(self) -> Engine:
        """Version, parallel sizes and the flags that decide what a captured state is."""
        sizes = {key: _size(self.info.get(key)) for key in ("tp_size", "dp_size", "pp_size", "ep_size")}
        flags = {key: _flag(key, self.info[key]) for key in FLAGS if key in self.info}
        return Engine("sglang", str(self.info["version"]), flags=flags, **sizes)

    @property
    def chunk(self) -> int | None:
        """The most tokens of a prompt in one forward; None where prompts are not cut."""
        return _size(self.info.get("chunked_prefill_size"))

    @property
    def grouped(self) -> bool:
        """Whether the ranks are groups that have requests of their own."""
        return (_size(self.info.get("dp_size")) or 1) * _attention_groups(self.info) > 1


def check(
    server: Server,
    capture_dir: Path,
    *,
    boundaries: Sequence[Boundary] | None = (),
    started_here: bool = False,
    allow_missing: bool = False,
) -> Site:
    """Ask a server what it is, and its plugin whether it can capture on every rank.

    `boundaries` are recorded too, None for all that the server shows; then there need be no draft. `started_here` only
    words the advice: the capture directory is certainly the server's, so the plugin is what lacks.
    With `allow_missing`, ranks that write elsewhere are noted in the site instead of refused.
    Raises EnvironmentFailure for a server that is down, is no SGLang, has no draft, does not load the plugin, has an
    SGLang that the plugin does not fit, lacks ranks, or was not started to show the boundaries.
    """
    info = server.info()
    if boundaries == () and not info.get("speculative_algorithm"):
        raise EnvironmentFailure(
            f"{server.url} serves {_base(info.get('model_path'))} without a draft (speculative_algorithm is null), so "
            "there is nothing that it hands to one",
            fix="start it with --speculative-algorithm EAGLE3 and --speculative-draft-model-path; or record the states "
            "of the target itself with --boundaries all",
        )
    version = str(info["version"])
    if not supported(version):
        raise EnvironmentFailure(
            f"{server.url} runs SGLang {version}, which lacks {too_old(version)}",
            fix=f"serve with SGLang {OLDEST} or later ({NEWEST} is the newest that was tried)",
        )
    deadline = time.monotonic() + _HELLO_SECONDS
    while True:
        hellos = read_hellos(capture_dir)
        ranks = _ranks(hellos)
        expected = _expected(info, ranks)
        if hellos and (hellos[-1].error or not expected - set(ranks)):
            break
        if time.monotonic() > deadline or not capture_dir.is_dir():
            break
        time.sleep(_POLL_SECONDS)
    if not hellos:
        raise EnvironmentFailure(
            f"the server at {server.url} has left no sign of the capture plugin in {capture_dir}",
            fix=installation(version) if started_here else restart_advice(version),
        )
    broken = hellos[-1].error or next((hello.error for hello in ranks.values() if hello.error), None)
    if broken:
        raise EnvironmentFailure(
            f"the capture plugin does not fit the server's SGLang {version}: {broken}",
            fix=f"serve with an SGLang that it knows ({OLDEST} to {NEWEST}), or install a newer eagle-parity beside it",
        )
    absent = sorted(expected - set(ranks))
    present = sorted(expected & set(ranks))
    if not present or (absent and not allow_missing):
        raise EnvironmentFailure(
            f"the capture plugin runs on {rank_names(present)} and not on {rank_names(absent)} of {len(expected)}, as "
            f"{capture_dir} shows",
            fix=f"install eagle-parity and set {CAPTURE_DIR} on every host of the server, to one shared directory; "
            "where the hosts share none, capture with --allow-missing-ranks and add the other hosts' capture "
            "directories with `eagle-parity dump merge`",
        )
    newest = {rank: ranks[rank] for rank in present}
    return Site(server, info, capture_dir, newest, _shown(server, newest, boundaries), tuple(absent))


def _shown(server: Server, hellos: Mapping[int, Hello], asked: Sequence[Boundary] | None) -> tuple[str, ...]:
    """The boundaries asked for, as tensor names in their order. Raises EnvironmentFailure where a rank lacks one."""
    if asked == ():
        return ()
    wanted = None if asked is None else {boundary_name(boundary) for boundary in asked}
    value = "all" if asked is None else ",".join(map(str, asked))
    for rank, hello in hellos.items():
        lacking = sorted((wanted or set()) - set(hello.boundaries or ()))
        if hello.boundaries and not lacking:
            continue
        why = next((gap for gap in hello.gaps if gap.startswith("no boundaries")), None)
        if why is not None:
            what, fix = f"cannot show its boundaries: rank {rank}: {why}", "report it with the model's config.json"
        elif hello.boundaries is None:
            what = "was started without boundaries: its plugin records what the draft is given, and nothing else"
            fix = (
                f"a running server is not changed: restart it with {BOUNDARIES}={value} in its environment, beside "
                f"{CAPTURE_DIR}, or let --launch start it"
            )
        else:
            has = ", ".join(hello.boundaries) or "none"
            what = f"does not show {', '.join(lacking)}: rank {rank} was started for {has}"
            fix = f"ask for some of these, or restart the server with {BOUNDARIES}={value} in its environment"
        raise EnvironmentFailure(f"the server at {server.url} {what}", fix=fix)
    shown = next(iter(hellos.values())).boundaries or ()
    return tuple(name for name in shown if wanted is None or name in wanted)


def restart_advice(version: str | None = None) -> str:
    """How to get the plugin into a server of a version."""
    return (
        f"restart the server with the plugin: {installation(version)}, start it with {CAPTURE_DIR}=DIR in its "
        "environment (DIR on a disk that this machine sees too), and give --capture-dir DIR here; or let eagle-parity "
        "start it with --launch -- CMD…"
    )


def _ranks(hellos: Sequence[Hello]) -> dict[int, Hello]:
    """The newest hello of each rank that captures: data-parallel replica 0, last pipeline stage."""
    return {
        hello.rank: hello
        for hello in hellos
        if hello.rank is not None and hello.dp_rank == 0 and hello.pp_rank == hello.pp_size - 1
    }


def _expected(info: Mapping[str, Any], ranks: Mapping[int, Hello]) -> set[int]:
    """The ranks that take part in replica 0's forwards."""
    everyone = int(info["tp_size"])
    if not info.get("enable_dp_attention"):
        return set(range(everyone))
    # Data-parallel attention splits the ranks into groups with tokens of their own; which ranks are in group 0, the
    # hellos say.
    part = everyone // _attention_groups(info)
    return set(ranks) if len(ranks) >= part else set(ranks) | set(range(part))


def _attention_groups(info: Mapping[str, Any]) -> int:
    """Groups of ranks whose attention has tokens of its own. 0.5.23 counts them apart; before, replicas did."""
    groups = _size(info.get("attn_dp_size")) or 1
    return max(groups, _size(info.get("dp_size")) or 1) if info.get("enable_dp_attention") else groups


def _flag(key: str, value: Any) -> Any:
    """A flag as a manifest keeps it: of the graph config only what runs which phase, without the bucket sizes."""
    if key == "speculative_token_map":
        return _base(value)
    if key == "cuda_graph_config" and isinstance(value, dict):
        return {phase: part.get("backend") for phase, part in value.items() if isinstance(part, dict)}
    return value


def _base(path: Any) -> str | None:
    """A directory's own name, or a hub name as it is: a path tells about a machine and nothing about a model."""
    if not isinstance(path, str) or not path:
        return None
    return Path(path).name if path.startswith(("/", ".", "~")) else path


def _size(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
