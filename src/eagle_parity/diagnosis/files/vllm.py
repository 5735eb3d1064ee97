"""What vLLM alone does with a draft. Read in the wheel 0.33.0; for other versions the same is assumed, and said.

What the ids mean is in `conventions.vllm`. Checks of other modules hold for vLLM too unless they need SGLang.
"""

from __future__ import annotations

from collections.abc import Iterator

from eagle_parity.diagnosis.files.check import Problem, check
from eagle_parity.diagnosis.files.deployment import Deployment
from eagle_parity.draft.config import IDS

_LAYERS = ("llama", "qwen3")
_NO_CAPTURE = (
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "KimiVLForConditionalGeneration",
    "Qwen2MoeForCausalLM",
)
"""Target classes that SGLang captures or that people try, without SupportsEagle3 (models/interfaces.py)."""


@check(
    "vllm-slots",
    "width-mismatch",
    "config",
    "vllm",
    source="vllm 0.33.0, models/llama_eagle3.py, qwen3_eagle3.py, deepseek_eagle3.py: num_aux_hidden_states",
)
def slots(deployment: Deployment) -> Iterator[Problem]:
    """How many slots vLLM builds the fc for: num_aux_hidden_states, else the ids nested in eagle_config, else 3."""
    draft = deployment.draft
    nested, said = draft.config.nested.get(IDS), draft.declared_num_slots
    reads_top = draft.layer_config.get("model_type") == "qwen3"  # qwen3_eagle3 also counts ids at the top level
    listed = nested or (draft.declared_ids if reads_top else None)
    built = said if said is not None else len(listed) if isinstance(listed, list | tuple) and listed else 3
    if built == draft.num_slots or draft.config.nested.get("use_aux_hidden_state") is False:
        return
    yield Problem(
        "error",
        f"{deployment.name} builds the fc for {built} slots, fc.weight takes {draft.num_slots}",
        f'write "num_aux_hidden_states": {draft.num_slots} at the top level'
        + ("" if draft.dialect == "native" else " of transformer_layer_config"),
        ("num_aux_hidden_states",),
        evidence={"built": built, "slots": draft.num_slots},
    )


@check(
    "vllm-speculators",
    "engine-version-rule",
    "config",
    "vllm",
    source="vllm 0.33.0, transformers_utils/configs/speculators/base.py, algos.py",
)
def speculators(deployment: Deployment) -> Iterator[Problem]:
    """vLLM accepts a speculators config that is whole: layer type, proposal method, verifier."""
    draft = deployment.draft
    if draft.dialect != "speculators":
        return
    kind = draft.layer_config.get("model_type", "llama")
    if kind not in _LAYERS:
        yield Problem(
            "error",
            f"transformer_layer_config.model_type is {kind!r}; {deployment.name} takes {' or '.join(_LAYERS)}",
            "serve a draft of one of these layer types",
            ("transformer_layer_config", "model_type"),
        )
    config = draft.config.document.get("speculators_config")
    config = config if isinstance(config, dict) else {}
    methods = config.get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else None
    verifier = config.get("verifier")
    lacking = [
        name
        for name, there in (
            ("proposal_methods[0].speculative_tokens", isinstance(first, dict) and "speculative_tokens" in first),
            ("verifier.name_or_path", isinstance(verifier, dict) and "name_or_path" in verifier),
        )
        if not there
    ]
    if lacking:
        yield Problem(
            "error",
            f"speculators_config lacks {' and '.join(lacking)}: {deployment.name} refuses the config",
            "export the draft again with speculators, or add the keys",
            ("speculators_config",),
        )


@check(
    "vllm-norms",
    "draft-norm",
    "config",
    "vllm",
    source="vllm 0.33.0, models/deepseek_eagle3.py, models/llama_eagle3.py",
)
def norms(deployment: Deployment) -> Iterator[Problem]:
    """Norms before the fc that vLLM's draft class does not have, or that it reads under another name."""
    draft, document = deployment.draft, deployment.draft.config.document
    if draft.norm_before_fc and draft.style == "mla":
        yield Problem(
            "error",
            f"the draft has norm_before_fc (input_norm.weight), which {deployment.name} has for llama and qwen3 drafts "
            "only",
            "convert or retrain the draft without it, or with fc_norm",
            ("norm_before_fc",),
        )
    if draft.config.flag("use_aux_norm") and document.get("fc_norm") is not True and draft.fc_norm:
        yield Problem(
            "error",
            f"fc_norm is on by the key use_aux_norm, which {deployment.name} does not read",
            'write "fc_norm": true at the top level',
            ("use_aux_norm",),
        )


@check("vllm-target", "engine-version-rule", "target", "vllm", source="vllm 0.33.0, models/*.py: SupportsEagle3")
def target(deployment: Deployment) -> Iterator[Problem]:
    """A target class that cannot capture for EAGLE-3."""
    if deployment.architecture in _NO_CAPTURE:
        yield Problem(
            "error",
            f"{deployment.architecture} has no EAGLE-3 interface in vLLM 0.33.0: the server does not start",
            "use a later version that has it, or SGLang",
            ("architectures",),
            in_target=True,
        )
