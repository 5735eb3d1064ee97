"""The draft's own norms before the fc, and what it feeds back to itself: flags, weights, and engines that know both."""

from __future__ import annotations

from collections.abc import Iterator

from eagle_parity.diagnosis.files.check import Problem, check
from eagle_parity.diagnosis.files.deployment import Deployment
from eagle_parity.diagnosis.files.engine import NEVER, support


def _key(deployment: Deployment, *names: str) -> tuple[str, ...]:
    """Where a flag stands: at the top level, in eagle_config, or where it should stand."""
    config = deployment.draft.config
    for name in names:
        if name in config.nested:
            return ("eagle_config", name)
        if name in config.document:
            return (name,)
    return names[:1]


def _unsupported(deployment: Deployment, feature: str, what: str, key: tuple[str, ...], code: str) -> Iterator[Problem]:
    line = support(feature, deployment.draft.style)
    version = deployment.sglang
    if version is None or version >= line.since:
        return
    known = (
        "convert or retrain the draft without it"
        if line.since == NEVER
        else "upgrade to " + ".".join(map(str, line.since)) + " or later"
    )
    yield Problem(
        "error",
        f"{what}, which {deployment.name} silently ignores for this draft class",
        known,
        key,
        code,
        evidence={"read_in": line.source},
    )


@check("norm-before-fc-known", "draft-norm", "sglang", source="sglang#32334, vllm#36545")
def norm_before_fc_known(deployment: Deployment) -> Iterator[Problem]:
    """One RMSNorm over the concatenation: since 0.5.17, for llama drafts."""
    if deployment.draft.norm_before_fc:
        what = "the draft has norm_before_fc (input_norm.weight)"
        key = _key(deployment, "norm_before_fc")
        yield from _unsupported(deployment, "norm_before_fc", what, key, "draft-norm")


@check("fc-norm-known", "draft-norm", "sglang", source="sglang#24663, tokenspeed#751")
def fc_norm_known(deployment: Deployment) -> Iterator[Problem]:
    """One RMSNorm a slot: since 0.5.12 for llama drafts, 0.5.13 for MLA."""
    if deployment.draft.fc_norm:
        what = "the draft has fc_norm (fc_norm.J.weight)"
        yield from _unsupported(deployment, "fc_norm", what, _key(deployment, "fc_norm", "use_aux_norm"), "draft-norm")


@check("norm-output-known", "recycled-hidden", "sglang", source="speculators#610; llama_eagle3.py, kimi_k25_eagle3.py")
def norm_output_known(deployment: Deployment) -> Iterator[Problem]:
    """Feeding the normed state to the next draft step: since 0.5.12 for llama drafts, 0.5.13 for MLA."""
    if deployment.draft.norm_output:
        key = _key(deployment, "norm_output")
        yield from _unsupported(
            deployment,
            "norm_output",
            "norm_output is true (the next step takes the normed state)",
            key,
            "recycled-hidden",
        )


@check("one-feature-norm", "draft-norm", source="speculators#670")
def one_feature_norm(deployment: Deployment) -> Iterator[Problem]:
    """norm_before_fc and fc_norm together: norm(concat) and concat(norm) at once."""
    draft = deployment.draft
    if draft.norm_before_fc and draft.fc_norm:
        yield Problem(
            "error",
            "norm_before_fc and fc_norm are both on: the slots would be normed twice",
            "keep the one that the draft was trained with",
            _key(deployment, "fc_norm", "use_aux_norm", "norm_before_fc"),
        )


@check(
    "norm-weights", "draft-norm", "config", source="sglang#32334, ROCmFPX#44: unknown weights are skipped in silence"
)
def norm_weights(deployment: Deployment) -> Iterator[Problem]:
    """Norm weights without the flag that makes an engine use them, and the flag without weights."""
    draft = deployment.draft
    kinds = (
        ("norm_before_fc", ("norm_before_fc",), "input_norm.weight", "input_norm"),
        ("fc_norm", ("fc_norm", "use_aux_norm"), "fc_norm.0.weight", "fc_norm"),
    )
    for name, flags, weight, short in kinds:
        asked = draft.config.flag(*flags)
        there = weight in draft.tensors
        if there and not asked:
            yield Problem(
                "error",
                f"the checkpoint has {weight}, but {name} is {'false' if asked is False else 'not set'}: engines skip "
                "the weight and leave the norm out",
                f'set "{name}": true if the draft was trained with it, else delete the weight',
                _key(deployment, *flags),
            )
        if short in draft.missing:
            yield Problem(
                "error",
                f"{name} is on, but the checkpoint lacks {short} weights: the norm stays at its initial values",
                f"export the draft with them, or set {name} to false if it was trained without",
                _key(deployment, *flags),
            )


@check(
    "flag-place",
    "engine-version-rule",
    "config",
    "engine",
    source="sglang llama_eagle3.py and kimi_k25_eagle3.py of 0.5.12 to 0.5.23; vllm llama_eagle3.py 0.33.0",
)
def flag_place(deployment: Deployment) -> Iterator[Problem]:
    """fc_norm and norm_output inside eagle_config, where no engine looks."""
    assert deployment.engine is not None
    config = deployment.draft.config
    for name in ("fc_norm", "use_aux_norm", "norm_output", "num_aux_hidden_states", "target_hidden_size"):
        if config.nested.get(name) and name not in config.document:
            yield Problem(
                "error",
                f"{name} is inside eagle_config; {deployment.name} reads it at the top level only",
                f"move {name} to the top level of config.json",
                ("eagle_config", name),
            )


@check("norm-before-residual", "draft-norm", "sglang", source="vllm algos.py; no occurrence in sglang/srt up to 0.5.23")
def norm_before_residual(deployment: Deployment) -> Iterator[Problem]:
    """The residual taken after hidden_norm: vLLM knows the key, SGLang never did."""
    draft = deployment.draft
    undeclared = draft.dialect == "speculators" and "norm_before_residual" in draft.undeclared
    if draft.norm_before_residual or undeclared:
        yield Problem(
            "error",
            (
                "norm_before_residual is not set, and speculators trains with true"
                if undeclared
                else "norm_before_residual is true"
            )
            + ": no version of SGLang reads the key, so the draft's residual is another tensor than in training",
            "serve the draft with vLLM, or retrain it with norm_before_residual false",
            _key(deployment, "norm_before_residual"),
        )


@check(
    "norm-output-meaning",
    "recycled-hidden",
    "config",
    source="SpecForge#879, training-formats: SpecForge llama3_eagle.py",
)
def norm_output_meaning(deployment: Deployment) -> Iterator[Problem]:
    """norm_output true in a native config: SpecForge and the engines do not mean the same by it."""
    draft = deployment.draft
    if draft.norm_output and draft.dialect == "native":
        yield Problem(
            "warning",
            "norm_output is true: engines then feed the normed state to the next draft step; a draft trained with "
            "SpecForge was fed the un-normed state, so its steps from the second on would differ",
            "if SpecForge trained this draft, delete norm_output; if speculators or TorchSpec did, keep it",
            _key(deployment, "norm_output"),
        )


@check(
    "fc-bias",
    "engine-version-rule",
    "config",
    "engine",
    source="sglang llama_eagle3.py: bias=getattr(config, 'bias', False); vllm llama_eagle3.py: bias=False",
)
def fc_bias(deployment: Deployment) -> Iterator[Problem]:
    """A bias of the fc that the config does not announce is left out."""
    if deployment.draft.bias and deployment.vllm:
        yield Problem(
            "error",
            f"the checkpoint has fc.bias; {deployment.name} builds the fc without",
            "retrain the draft without a bias of the fc, or serve it with SGLang",
        )
    elif deployment.draft.bias and deployment.draft.config.document.get("bias") is not True:
        yield Problem(
            "error",
            'the checkpoint has fc.bias, but config.json does not say "bias": true: SGLang leaves it out',
            'write "bias": true',
            ("bias",),
        )


@check("fc-used", "width-mismatch", "config", source="llama_eagle3.py: fc is skipped where widths agree")
def fc_used(deployment: Deployment) -> Iterator[Problem]:
    """One slot of the draft's own width: engines decide by width and skip the fc."""
    draft = deployment.draft
    if deployment.vllm:  # its combine_hidden_states always runs the fc
        return
    if draft.num_slots == 1 and draft.target_hidden_size == draft.hidden_size:
        yield Problem(
            "error",
            f"the fc maps {draft.hidden_size} to {draft.hidden_size}; engines skip an fc whose input already has the "
            "draft's width",
            "train with two slots or more",
            ("eagle_config",),
        )
