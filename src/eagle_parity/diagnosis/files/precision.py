"""Dtypes and quantisation of draft and target."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator

from eagle_parity.diagnosis.files.check import Problem, check
from eagle_parity.diagnosis.files.deployment import Deployment

_STORED = {"bfloat16": "BF16", "float16": "F16", "half": "F16", "float32": "F32", "float": "F32"}
_ROTATED = re.compile(r"quarot|spinquant|hadamard|rotat(?:ed|ion)(?!ary)", re.IGNORECASE)


def _dtype(document: object) -> str | None:
    if not isinstance(document, dict):
        return None
    value = document.get("dtype") or document.get("torch_dtype")
    return value.removeprefix("torch.") if isinstance(value, str) else None


@check("draft-dtype", "precision", "config", source="EAGLE#69, sglang#27883 (fp16 overflow), vllm#9534")
def draft_dtype(deployment: Deployment) -> Iterator[Problem]:
    """float16 has a range of 65504, which residual streams exceed; and a dtype that the tensors do not have."""
    draft = deployment.draft
    said = _dtype(draft.config.document) or _dtype(draft.config.layer)
    key = next((name for name in ("dtype", "torch_dtype") if name in draft.config.document), "torch_dtype")
    kinds = Counter(t.dtype for t in draft.tensors.values() if t.dtype in ("BF16", "F16", "F32", "F64"))
    stored = kinds.most_common(1)[0][0] if kinds else None
    if "F16" in (stored, _STORED.get(said or "")):
        yield Problem(
            "warning",
            "the draft runs in float16: states above 65504 become infinite",
            "export it in bfloat16",
            (key,),
        )
    elif said is not None and stored is not None and _STORED.get(said) not in (stored, None):
        yield Problem(
            "info",
            f"config.json says {said}, the tensors are {stored}",
            "harmless where the engine's --dtype is what training used",
            (key,),
        )


@check("dtype-like-target", "precision", "config", "target", source="vllm#24505, sglang#27883")
def like_target(deployment: Deployment) -> Iterator[Problem]:
    """Engines run the draft in the target's dtype or refuse."""
    assert deployment.target is not None
    draft = deployment.draft.config
    ours = _dtype(draft.document) or _dtype(draft.layer)
    theirs = _dtype(deployment.target.document) or _dtype(deployment.target.text)
    if ours and theirs and ours != theirs:
        key = next((name for name in ("dtype", "torch_dtype") if name in draft.document), "torch_dtype")
        yield Problem(
            "warning",
            f"the draft is {ours}, the target {theirs}",
            "export the draft in the target's dtype",
            (key,),
            evidence={"draft": ours, "target": theirs},
        )


@check(
    "draft-quantization",
    "precision",
    "engine",
    source="vllm#44087; sglang arg_groups/serving_hook.py: the draft inherits --quantization",
)
def inherits(deployment: Deployment) -> Iterator[Problem]:
    """An unquantised draft inherits the server's --quantization unless told otherwise."""
    asked = deployment.flag("quantization")
    own = deployment.flag("speculative_draft_model_quantization")
    if isinstance(asked, str) and asked != "unquant" and deployment.draft.quantization is None and own in (None, asked):
        yield Problem(
            "warning",
            f"--quantization {asked} also holds for the draft, whose checkpoint is not quantised",
            "start the server with --speculative-draft-model-quantization unquant",
        )


@check(
    "target-basis", "rotated-basis", "target", source="vllm-ascend#5974 (accept length 1.07 -> 3.09), vllm-ascend#12775"
)
def target_basis(deployment: Deployment) -> Iterator[Problem]:
    """A target quantised with a rotation: its states are in another basis than those of the plain model."""
    assert deployment.target is not None
    document = deployment.target.document
    text = json.dumps(document.get("quantization_config") or deployment.target.text.get("quantization_config") or {})
    name = deployment.target.path.parent.name
    if _ROTATED.search(text) or _ROTATED.search(name):
        yield Problem(
            "warning",
            "the target's quantisation rotates its residual stream (QuaRot or the like)",
            "train the draft on this target's own states, or fold the rotation into fc.weight and the shared embedding",
            ("quantization_config",),
            in_target=True,
        )
