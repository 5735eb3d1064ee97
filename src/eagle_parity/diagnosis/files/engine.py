"""What is known about SGLang versions, as a table: read in the wheels 0.5.5 to 0.5.23, each line with its source.

What the ids mean is in `conventions`; here is what a version can do with a draft, and what it does wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

from eagle_parity.conventions.sglang import Version
from eagle_parity.draft.checkpoint import Style

NEVER: Version = (10**6,)


@dataclass(frozen=True)
class Support:
    """From which version a draft class reads a config key; before, the key is silently ignored."""

    feature: str
    style: Style
    since: Version
    source: str


SUPPORT: tuple[Support, ...] = (
    Support("norm_before_fc", "llama", (0, 5, 17), "models/llama_eagle3.py (PR #32334); absent in 0.5.16"),
    Support("norm_before_fc", "mla", NEVER, "models/kimi_k25_eagle3.py: no occurrence in any wheel up to 0.5.23"),
    Support("fc_norm", "llama", (0, 5, 12), "models/llama_eagle3.py (PR #24663); absent in 0.5.11"),
    Support("fc_norm", "mla", (0, 5, 13), "models/kimi_k25_eagle3.py; absent in 0.5.12"),
    Support("norm_output", "llama", (0, 5, 12), "models/llama_eagle3.py; absent in 0.5.11"),
    Support("norm_output", "mla", (0, 5, 13), "models/kimi_k25_eagle3.py; absent in 0.5.12"),
    Support("slots other than 3", "llama", (0, 5, 12), "models/llama_eagle3.py: hidden_size_in * 3 up to 0.5.11"),
    Support("slots other than 3", "mla", (0, 5, 12), "models/kimi_k25_eagle3.py, _get_eagle_aux_layer_count"),
    Support("rope_parameters", "llama", (0, 5, 10), "models/llama_eagle3.py: only rope_scaling in 0.5.9"),
    Support("rope_parameters", "mla", (0, 5, 12), "models/kimi_k25_eagle3.py"),
    Support("this draft class", "mla", (0, 5, 12), "models/kimi_k25_eagle3.py (PR #24826); no such file in 0.5.11"),
    Support("this draft class", "llama", (0,), "models/llama_eagle3.py"),
)


def support(feature: str, style: Style) -> Support:
    """The line of a feature for a draft class."""
    return next(line for line in SUPPORT if (line.feature, line.style) == (feature, style))


@dataclass(frozen=True)
class EarlyCapture:
    """Model classes that capture `hidden_states + residual` before a deferred all-reduce, in versions before `until`.

    `fused_since`: from which version the fused all-reduce is on by default on SM90/SM100 for the class (None: never).
    """

    architectures: tuple[str, ...]
    until: Version
    fused_since: Version | None
    confirmed: bool
    source: str


EARLY_CAPTURE: tuple[EarlyCapture, ...] = (
    EarlyCapture(
        ("DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration", "Glm4MoeLiteForCausalLM"),
        (0, 5, 14),
        (0, 5, 9),
        True,
        "sglang PR #28343; deepseek_v2.py and server_args.py of 0.5.9 to 0.5.13; reproduced on H200s",
    ),
    EarlyCapture(
        ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"),
        (0, 5, 14),
        (0, 5, 13),
        True,
        "sglang PR #28343; deepseek_v2.py; in the default list of server_args.py in 0.5.13, not in 0.5.9",
    ),
    EarlyCapture(
        ("DeepseekV2ForCausalLM",), (0, 5, 14), None, True, "sglang PR #28343; deepseek_v2.py of 0.5.5 to 0.5.13"
    ),
    EarlyCapture(
        ("GptOssForCausalLM", "Glm4MoeForCausalLM"),
        (0, 5, 21),
        (0, 5, 9),
        False,
        "gpt_oss.py and glm4_moe.py of 0.5.9 to 0.5.20: the same lines; nobody has reported or run it",
    ),
)

# Versions before which something was wrong or missing, whatever the model.
GRAPHS_USE_IDS: Version = (0, 5, 11)  # PR #22836: graphs were captured with the default layers before
CONTEXT_PARALLEL_GATHERED: Version = (0, 5, 22)  # eager_runner.py:417, layers/cp/bcg/bcg.py:309
SCATTERED_GATHERED: Version = (0, 5, 14)  # layers/communicator.py, prepare_attn_and_capture_last_layer_outputs

CAPTURES_SINCE: dict[str, Version] = {
    "KimiK25ForConditionalGeneration": (0, 5, 10),  # kimi_k25.py, PR #19689
    "MiniMaxM3SparseForConditionalGeneration": (0, 5, 18),  # minimax_m3_vl.py
    "Gemma3ForCausalLM": (0, 5, 12),
    "Gemma4ForConditionalGeneration": (0, 5, 12),
    "Qwen3VLForConditionalGeneration": (0, 5, 11),
    "KimiVLForConditionalGeneration": NEVER,  # kimi_vl.py has no set_eagle3_layers_to_capture up to 0.5.23
    "KimiK3ForConditionalGeneration": NEVER,  # only the DFlash and DSpark setters
}
"""Model classes whose set_eagle3_layers_to_capture came late, or never; the first wheel in which it was read."""
