"""Engine, version, parallelism and flags: combinations that are known to feed a draft wrong states."""

from __future__ import annotations

from collections.abc import Iterator

from eagle_parity.diagnosis.files.check import Problem, check
from eagle_parity.diagnosis.files.deployment import Deployment
from eagle_parity.diagnosis.files.engine import (
    CONTEXT_PARALLEL_GATHERED,
    EARLY_CAPTURE,
    GRAPHS_USE_IDS,
    SCATTERED_GATHERED,
    support,
)
from eagle_parity.draft.config import IDS

NESTED = ("eagle_config", IDS)
LONG = 2048
_VLLM_OVER_STAGES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Target classes that hand captured states on to the next pipeline stage: vllm 0.33.0, models/llama.py, qwen2.py."""


@check(
    "dialect",
    "engine-version-rule",
    "config",
    "sglang",
    source="training-formats; sglang spec_aux_hidden_state.py, llama_eagle3.py",
)
def dialect(deployment: Deployment) -> Iterator[Problem]:
    """A speculators config: SGLang reads neither its ids nor its transformer_layer_config."""
    if deployment.draft.dialect == "speculators":
        yield Problem(
            "error",
            "the config is in the speculators format, of which SGLang reads neither ids nor transformer_layer_config",
            "convert it: architectures LlamaForCausalLMEagle3, the keys of transformer_layer_config at the top level, "
            f'"eagle_config": {{"{IDS}": […]}}; norm_before_residual must be false',
            ("speculators_model_type",),
        )


@check("draft-class", "engine-version-rule", "sglang", source="sglang PR #24826: models/kimi_k25_eagle3.py")
def draft_class(deployment: Deployment) -> Iterator[Problem]:
    """An MLA draft on a version that has no class for it."""
    line, version = support("this draft class", deployment.draft.style), deployment.sglang
    if version is not None and version < line.since:
        yield Problem(
            "error",
            f"{deployment.name} has no MLA draft class (Eagle3DeepseekV2ForCausalLM)",
            "upgrade to " + ".".join(map(str, line.since)) + " or later",
            ("architectures",),
            evidence={"read_in": line.source},
        )


@check(
    "algorithm", "engine-version-rule", "engine", source="sglang server arguments: the target captures for EAGLE3 only"
)
def algorithm(deployment: Deployment) -> Iterator[Problem]:
    """The draft is EAGLE-3; another algorithm makes the target hand over another state."""
    if deployment.vllm:
        config = deployment.flag("speculative_config")
        method = config.get("method") if isinstance(config, dict) else None
        if isinstance(method, str) and method != "eagle3":
            yield Problem(
                "error",
                f"the server's speculative method is {method}, the draft is EAGLE-3",
                'write "method": "eagle3" in --speculative-config',
            )
        return
    asked = deployment.flag("speculative_algorithm")
    if isinstance(asked, str) and asked.upper() != "EAGLE3":
        yield Problem(
            "error",
            f"the server runs --speculative-algorithm {asked}, the draft is EAGLE-3",
            "start it with --speculative-algorithm EAGLE3",
        )


@check("fused-all-reduce", "partial-sum", "sglang", "target", source="sglang#28343; server_args.py of 0.5.9 to 0.5.13")
def fused_all_reduce(deployment: Deployment) -> Iterator[Problem]:
    """States captured before a deferred all-reduce: each rank's own partial sum, in forwards of up to 2048 tokens."""
    version, engine = deployment.sglang, deployment.engine
    assert version is not None
    assert engine is not None
    row = next((row for row in EARLY_CAPTURE if deployment.architecture in row.architectures), None)
    if row is None or version >= row.until or engine.tp_size == 1 or _is_off(deployment):
        return
    by_default = row.fused_since is not None and version >= row.fused_since
    asked = deployment.flag("enable_flashinfer_allreduce_fusion") is True
    if not by_default and not asked:
        return
    size = f"at TP={engine.tp_size}" if engine.tp_size is not None else "at TP > 1"
    until = ".".join(map(str, row.until))
    switch = ", or start with --enforce-disable-flashinfer-allreduce-fusion" if version >= (0, 5, 10) else ""
    yield Problem(
        "error" if row.confirmed and engine.tp_size is not None else "warning",
        f"{deployment.name} {size} captures {deployment.architecture} before the fused all-reduce, which is on "
        + ("by request" if asked else "by default on SM90/SM100 GPUs")
        + f": each rank's draft gets its own partial sum in forwards of up to {LONG} tokens (all verify steps)"
        + ("" if row.confirmed else " (read in the source, not confirmed by running)"),
        f"upgrade to {until} or later{switch}",
        evidence={"fixed_in": until, "rule_source": row.source, "tp_size": engine.tp_size},
    )


def _is_off(deployment: Deployment) -> bool:
    """Whether the flags say that the fused all-reduce cannot run."""
    return (
        deployment.flag("enforce_disable_flashinfer_allreduce_fusion") is True
        or deployment.flag("enable_flashinfer_allreduce_fusion") is False
        or deployment.flag("enable_dp_attention") is True
        or deployment.flag("moe_a2a_backend") not in (None, "none")
        or (isinstance(deployment.flag("nnodes"), int) and deployment.flag("nnodes") > 1)
    )


@check(
    "graph-layers",
    "graph-stale",
    "config",
    "target",
    "sglang",
    source="sglang#22836: cuda_graph_runner.py up to 0.5.10",
)
def graph_layers(deployment: Deployment) -> Iterator[Problem]:
    """Up to 0.5.10 decode graphs are captured with the default layers, whatever the config says."""
    version = deployment.sglang
    assert version is not None
    if version >= GRAPHS_USE_IDS or deployment.flag("disable_cuda_graph") is True or deployment.ids is None:
        return
    ours, default = deployment.served(deployment.ids), deployment.served(None)
    if ours is None or default is None or ours.boundaries == default.boundaries:
        return
    yield Problem(
        "error",
        f"{deployment.name}: prefill captures boundaries {list(ours.boundaries)}, but decode and verify graphs the "
        f"default {list(default.boundaries)}",
        "upgrade to 0.5.11 or later, or start with --disable-cuda-graph",
        NESTED,
        evidence={"prefill": list(ours.boundaries), "graph": list(default.boundaries)},
    )


@check(
    "two-batch-overlap",
    "capture-lost",
    "sglang",
    source="deepseek_v2.py 0.5.9 to 0.5.23: model_forward_maybe_tbo captures nothing",
)
def two_batch_overlap(deployment: Deployment) -> Iterator[Problem]:
    """Layers that run under two-batch overlap are not captured."""
    if deployment.flag("enable_two_batch_overlap") is True and deployment.family in ("deepseek", None):
        yield Problem(
            "error",
            "--enable-two-batch-overlap: layers from the first MoE layer on run without capture",
            "start without --enable-two-batch-overlap",
        )


@check(
    "pipeline-parallel", "capture-lost", "engine", source="vllm#45985; sglang setters return early unless is_last_rank"
)
def pipeline_parallel(deployment: Deployment) -> Iterator[Problem]:
    """Only the last pipeline stage captures."""
    assert deployment.engine is not None
    size = deployment.engine.pp_size
    if deployment.vllm and deployment.architecture in _VLLM_OVER_STAGES:
        return
    if size is not None and size > 1:
        yield Problem(
            "error",
            f"pipeline parallel size {size}: layers of all stages but the last are never captured",
            "use tensor parallelism alone (pp_size 1)",
        )


@check(
    "context-parallel",
    "token-shard",
    "sglang",
    source="deepseek_v2.py 0.5.14 L2553; gathered since eager_runner.py 0.5.22",
)
def context_parallel(deployment: Deployment) -> Iterator[Problem]:
    """Prefill context parallelism: each rank's tokens only, until 0.5.22."""
    version, size = deployment.sglang, deployment.flag("attn_cp_size")
    assert version is not None
    on = (isinstance(size, int) and size > 1) or any(
        deployment.flag(name) is True
        for name in ("enable_nsa_prefill_context_parallel", "enable_dsa_prefill_context_parallel", "enable_prefill_cp")
    )
    if on and version < CONTEXT_PARALLEL_GATHERED:
        yield Problem(
            "error",
            f"{deployment.name} with prefill context parallelism does not gather the captured states: each rank has "
            "the rows of its own tokens",
            "upgrade to 0.5.22 or later, or turn context parallelism off",
        )


@check("scattered-rows", "token-shard", "sglang", source="sglang#14280, sglang#20701; layers/communicator.py")
def scattered_rows(deployment: Deployment) -> Iterator[Problem]:
    """All-to-all MoE and fully data-parallel dense layers leave rows scattered over the ranks until 0.5.14."""
    version = deployment.sglang
    assert version is not None
    backend = deployment.flag("moe_a2a_backend")
    scattered = backend not in (None, "none") or deployment.flag("moe_dense_tp_size") == 1
    if scattered and version < SCATTERED_GATHERED and deployment.family in ("deepseek", None):
        yield Problem(
            "warning",
            f"{deployment.name} gathers only some of the captured rows with "
            + (f"--moe-a2a-backend {backend}" if backend not in (None, "none") else "--moe-dense-tp-size 1"),
            "upgrade to 0.5.14 or later, and compare a dump of all ranks",
        )
    if deployment.flag("enable_attn_tp_input_scattered") is True and deployment.flag("enable_return_aux_hidden_states"):
        yield Problem(
            "warning",
            "--enable-attn-tp-input-scattered with --enable-return-aux-hidden-states: the guard for EAGLE3 does not "
            "hold in capture-only mode, so rows may be one rank's",
            "start without --enable-attn-tp-input-scattered",
        )


@check("disaggregation", "capture-lost", "engine", source="sglang#10059, sglang#13590")
def disaggregation(deployment: Deployment) -> Iterator[Problem]:
    """Prefill and decode on different servers: the state crosses a wire whose width was wrong more than once."""
    mode = deployment.flag("disaggregation_mode")
    draft = deployment.draft
    if mode not in (None, "null", "none"):
        yield Problem(
            "warning",
            f"--disaggregation-mode {mode}: the first draft step after a transfer gets its state over the wire"
            + (
                f"; the target is {draft.target_hidden_size} wide, the draft {draft.hidden_size}, which broke it before"
                if draft.target_hidden_size != draft.hidden_size
                else ""
            ),
            "compare dumps of both servers, and watch acceptance at position 0",
        )


@check("same-draft", "undetermined", "engine", source="/server_info: speculative_draft_model_path")
def same_draft(deployment: Deployment) -> Iterator[Problem]:
    """The server runs another draft than the one checked, by its directory's name."""
    running = deployment.flag("speculative_draft_model_path")
    if isinstance(running, str):
        theirs, ours = running.rstrip("/").rsplit("/", 1)[-1], deployment.draft.path.resolve().name
        if theirs and theirs != ours:
            yield Problem(
                "info",
                f"the server's draft is called {theirs!r}, the one checked here {ours!r}",
                "check the draft that the server runs",
            )
