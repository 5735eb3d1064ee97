"""Widths: what the fc takes, what the target gives, and whether config and tensors say the same."""

from __future__ import annotations

from collections.abc import Iterator

from eagle_parity.diagnosis.files.check import Problem, check
from eagle_parity.diagnosis.files.deployment import Deployment
from eagle_parity.diagnosis.files.engine import support


@check("target-width", "width-mismatch", "target", source="sglang#8163, vllm#17740, sglang#24663")
def target_width(deployment: Deployment) -> Iterator[Problem]:
    """The fc takes K blocks of the target's hidden size."""
    assert deployment.target is not None
    draft, hidden, layers = deployment.draft, deployment.target.integer("hidden_size"), deployment.layers
    width = draft.num_slots * draft.target_hidden_size
    if hidden is None:
        return
    if width % hidden:
        yield Problem(
            "error",
            f"fc.weight takes {width} values, which is no multiple of the target's hidden size {hidden}",
            "this draft was trained for another target, or target_hidden_size is wrong",
            ("target_hidden_size",),
            evidence={"fc_in": width, "target_hidden_size": hidden},
        )
    elif draft.target_hidden_size != hidden:
        yield Problem(
            "error",
            f"the target is {hidden} wide; the draft takes {draft.target_hidden_size} a slot "
            + ("(target_hidden_size is not set)" if draft.config.integer("target_hidden_size") is None else ""),
            f'set "target_hidden_size": {hidden}',
            ("target_hidden_size",),
            evidence={"fc_in": width, "target_hidden_size": hidden},
        )
    elif layers is not None and draft.num_slots >= layers:
        yield Problem(
            "error",
            f"the fc takes {draft.num_slots} slots, the target has {layers} layers: "
            "all states were concatenated in training",
            "train on the states of a few layers",
            evidence={"fc_in": width, "num_layers": layers},
        )


@check(
    "config-widths",
    "width-mismatch",
    "config",
    source="sglang and vLLM build the draft from its config, then load the tensors",
)
def config_widths(deployment: Deployment) -> Iterator[Problem]:
    """hidden_size, heads, intermediate_size and layers of the config are those of the tensors."""
    draft = deployment.draft
    config, tensors = draft.config, draft.tensors
    said: list[tuple[str, int | None, int | None]] = [("hidden_size", config.integer("hidden_size"), draft.hidden_size)]
    heads, size = config.integer("num_attention_heads"), config.integer("head_dim")
    kv = config.integer("num_key_value_heads")
    if size is None and heads:
        size = draft.hidden_size // heads
    first = "layers.0.self_attn."
    if draft.style == "llama" and heads and size:
        q, k = tensors.get(first + "q_proj.weight"), tensors.get(first + "k_proj.weight")
        said.append(("num_attention_heads", heads * size, q.shape[0] if q else None))
        said.append(("num_key_value_heads", (kv or heads) * size, k.shape[0] if k else None))
    gate = tensors.get("layers.0.mlp.gate_proj.weight")
    said.append(("intermediate_size", config.integer("intermediate_size"), gate.shape[0] if gate else None))
    said.append(("num_hidden_layers", config.integer("num_hidden_layers"), draft.num_layers))
    packed = draft.quantization is not None  # quantised weights may be packed: their shapes say nothing
    for name, ours, theirs in said:
        if ours is None or theirs is None or ours == theirs or (packed and name != "num_hidden_layers"):
            continue
        key = (name,) if name in config.document else ("transformer_layer_config", name)
        yield Problem(
            "error",
            f"{name} gives {ours}, the tensors {theirs}",
            "export the draft again: config.json and weights do not belong together",
            key,
            evidence={"config": ours, "tensors": theirs},
        )


@check(
    "slots-known", "width-mismatch", "sglang", source="sglang#24663; llama_eagle3.py: hidden_size_in * 3 up to 0.5.11"
)
def slots_known(deployment: Deployment) -> Iterator[Problem]:
    """Drafts of another number of slots than three, on versions that assume three."""
    draft, version = deployment.draft, deployment.sglang
    line = support("slots other than 3", draft.style)
    if draft.num_slots != 3 and version is not None and version < line.since:
        yield Problem(
            "error",
            f"the fc takes {draft.num_slots} slots; {deployment.name} builds it for 3",
            "upgrade to " + ".".join(map(str, line.since)) + " or later",
            ("num_aux_hidden_states",),
            evidence={"read_in": line.source},
        )


@check(
    "draft-tp",
    "width-mismatch",
    "config",
    "tp",
    source="sglang configs/draft_parallel.py: the draft is split over the same ranks",
)
def draft_tp(deployment: Deployment) -> Iterator[Problem]:
    """The draft's heads, and an MLA draft's fc, can be split over the ranks."""
    assert deployment.engine is not None
    size, draft = deployment.engine.tp_size or 1, deployment.draft
    heads = draft.config.integer("num_attention_heads")
    for name, value in (("num_attention_heads", heads), ("hidden_size", draft.hidden_size)):
        if name == "hidden_size" and deployment.vllm:
            continue  # its fc is whole on every rank
        if value is not None and value % size:
            yield Problem(
                "error",
                f"the draft's {name} {value} cannot be split over TP={size}",
                f"choose a tensor-parallel size that divides {value}",
                (name,),
            )
