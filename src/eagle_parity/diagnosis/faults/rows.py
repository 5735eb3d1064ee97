"""Faults of single rows and of the prompts behind them."""

from __future__ import annotations

from eagle_parity.diagnosis.faults.fault import Fault

FAULTS: tuple[Fault, ...] = (
    Fault(
        "rows-lost",
        "Rows that were never written, or that the server did not return",
        "A prefix-cache hit leaves the cached tokens without states; chunks but the last are dropped; rows beyond a "
        "border are padding.",
        "Rows of zeros or of nothing known, often a prefix in multiples of the cache's block; or fewer rows than "
        "tokens.",
        "Flush the cache and ask again, with a prompt shorter than chunked_prefill_size.",
        "Capture with a cold cache (--disable-radix-cache) and check the number of rows.",
        (
            "https://github.com/vllm-project/vllm/issues/44485",
            "https://github.com/sgl-project/sglang/issues/8066",
            "https://github.com/sgl-project/SpecForge/commit/c7fc438e",
        ),
    ),
    Fault(
        "rows-swapped",
        "Rows that hold another token's or another request's state",
        "Rows of a batch are compacted or indexed wrongly: a stride of draft tokens taken for one row a request, "
        "offsets that count cached tokens, slices that ignore the request.",
        "The wrong rows are, at the floor, the states of other rows of the same dump; one such row is enough.",
        "Ask for the same prompts one at a time.",
        "Correct the indexing between target and draft; upgrade.",
        (
            "https://github.com/vllm-project/speculators/issues/279",
            "https://github.com/sgl-project/sglang/issues/26163",
            "https://github.com/IBM/vLLM-Hook/pull/14",
        ),
    ),
    Fault(
        "token-shift",
        "Every token is paired with the state of a token a fixed number of rows away",
        "Ids, states, labels or the loss mask were shifted and the others not: a roll, a [1:], a first token handled"
        " apart, a row dropped.",
        "The states of token t+1 (or t-1) are at the floor for token t, on all prompts; or the same tokens have "
        "other positions.",
        "Compare with rows moved by one: the distance falls to the floor.",
        "Pair state t with token t on both sides and shift at one place only.",
        (
            "https://github.com/vllm-project/vllm/issues/14647",
            "https://github.com/sgl-project/SpecForge/issues/885",
            "https://github.com/sgl-project/SpecForge/pull/473",
            "https://github.com/verl-project/verl-SpeCo/issues/99",
        ),
    ),
    Fault(
        "graph-stale",
        "Right in one situation and wrong in another, or a rank with a stale buffer",
        "CUDA graphs keep what they were captured with: SGLang up to 0.5.10 captured them with the default layers "
        "and read the ids afterwards. Static buffers keep the rows of an earlier step or of padding.",
        "Eager rows are right, replayed ones hold other layers or other tokens; or one rank holds old rows.",
        "Repeat with --disable-cuda-graph.",
        "Upgrade (0.5.11 for the default layers), or disable the graphs.",
        (
            "https://github.com/sgl-project/sglang/pull/22836",
            "https://github.com/sgl-project/sglang/pull/35588",
            "https://github.com/sgl-project/sglang/pull/18984",
            "https://github.com/sgl-project/sglang/pull/29018",
        ),
    ),
    Fault(
        "template-mismatch",
        "The two sides did not see the same tokens",
        "Another chat template, a thinking switch, a generation prompt or a tokenizer on one side; prompts cached "
        "under a key that forgot the template.",
        "Token ids part somewhere, or one side puts tokens in front; the rows after that cannot be compared and are "
        "left out.",
        "dump serving --prompts sends text through the server's own template; --tokens-from sends ids. The two tell "
        "template and states apart.",
        "Use one template and one tokenizer in training and serving.",
        (
            "https://github.com/sgl-project/SpecForge/issues/296",
            "https://github.com/lightseekorg/tokenspeed/issues/1305",
            "https://github.com/sgl-project/SpecForge/commit/1de70d18",
        ),
    ),
    Fault(
        "multimodal-missing",
        "States at image or audio tokens were made without the image or audio",
        "pixel_values were not passed when the states were collected, or embeddings were recomputed from placeholder"
        " ids.",
        "Rows before the first placeholder token agree, rows of the placeholders and after them do not; boundary 0 "
        "differs at the placeholders, and the tokens there are one repeated id.",
        "Compare on text only: it passes.",
        "Pass the multimodal inputs in training, or capture the states from the server itself.",
        (
            "https://github.com/Tencent/AngelSlim/pull/176",
            "https://github.com/vllm-project/speculators/issues/606",
            "https://github.com/vllm-project/speculators/issues/686",
        ),
    ),
)
