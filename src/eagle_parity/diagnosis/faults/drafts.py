"""Faults of the draft itself, which the target's states cannot show; and the two findings that are no fault."""

from __future__ import annotations

from eagle_parity.diagnosis.faults.fault import Fault

FAULTS: tuple[Fault, ...] = (
    Fault(
        "embed-head",
        "The draft's embedding or head is missing, replaced or not the one that was trained",
        "SGLang gives every EAGLE-3 draft the target's embedding, and the target's head only when draft_vocab_size "
        "is not set; a checkpoint with draft_vocab_size and no lm_head keeps a random head. Tied embeddings hide the"
        " draft's own head.",
        "States match and nothing is accepted (accept length 1.00), with HTTP 200 throughout.",
        "check --draft D lists what the checkpoint lacks; a replay of the draft agrees with the target as in training.",
        "Export the draft with its head (and map), or delete draft_vocab_size so that the target's is shared.",
        (
            "https://github.com/sgl-project/sglang/issues/27829",
            "https://github.com/vllm-project/vllm/pull/28549",
            "https://github.com/vllm-project/vllm/pull/19570",
            "https://github.com/lightseekorg/tokenspeed/pull/913",
        ),
    ),
    Fault(
        "vocab-map",
        "d2t or t2d is missing, wrong, or of another draft",
        "d2t[i] is an offset, target id - i. It may be missing, hold ids, be a default (0, 1, 2, …), or have been "
        "made anew over an old head; the target's vocabulary may differ from the draft's.",
        "Ids out of range or repeated, d2t and t2d disagree, or the first N words instead of the frequent ones. A "
        "map made anew is consistent and still wrong: only a replay shows it.",
        "check reads both tensors; which-layers replays the draft.",
        "Export d2t and t2d together with the head that was trained with them.",
        (
            "https://github.com/NVIDIA-NeMo/Automodel/pull/2447",
            "https://github.com/verl-project/verl-SpeCo/pull/67",
            "https://github.com/verl-project/verl-SpeCo/pull/66",
            "https://github.com/sgl-project/SpecForge/pull/534",
        ),
    ),
    Fault(
        "rope-mismatch",
        "The draft rotates positions otherwise than in training",
        "rope_theta or rope_scaling is missing in the schema that the engine reads (transformers 5 writes "
        "rope_parameters, SGLang up to 0.5.9 reads rope_scaling), partial rotary or interleaving differ, or M-RoPE "
        "is stepped in one dimension.",
        "States match; the draft's agreement falls with position or everywhere.",
        "check compares the schemas; a replay with the variants shows which one fits.",
        "Write both schemas with the values of training.",
        (
            "https://github.com/vllm-project/speculators/issues/613",
            "https://github.com/sgl-project/SpecForge/commit/108eda37",
            "https://github.com/NVIDIA-NeMo/Automodel/pull/2920",
            "https://github.com/wejoncy/sfllm/pull/32",
        ),
    ),
    Fault(
        "stale-draft-kv",
        "The draft's key-value cache holds entries of drafted tokens or of another successor",
        "Accepted tokens keep keys made from the draft's own states, a cached prefix was made with another next "
        "token, or pages of another size are read.",
        "The target's states match on every row; acceptance falls with the length of the generation or only after a "
        "warm cache.",
        "Ask the same prompt with a cold and a warm cache, and compare accept lengths; a replay without a cache is "
        "right.",
        "Recompute the draft's entries for accepted tokens; drop the last cached block; upgrade.",
        (
            "https://github.com/vllm-project/vllm/issues/14649",
            "https://github.com/sgl-project/sglang/pull/11215",
            "https://github.com/vllm-project/vllm/issues/50438",
            "https://github.com/lightseekorg/tokenspeed/pull/913",
        ),
    ),
    Fault(
        "training-mask",
        "Training looked at something that is not there when the draft serves",
        "An attention mask that lets blocks see later states, labels shifted against the states, a loss mask on the "
        "wrong tokens, drafted tokens fed under the labels of the true prefix.",
        "Validation accuracy is high (70 to 98 %), the served draft is bad, and the states match. A strict replay of"
        " the draft gives the low number too.",
        "Replay the draft on the training dump with the server's rule and compare with the logged accuracy.",
        "Correct mask or shift in the trainer and train again.",
        (
            "https://github.com/sgl-project/SpecForge/issues/470",
            "https://github.com/sgl-project/SpecForge/pull/473",
            "https://github.com/sgl-project/SpecForge/issues/533",
            "https://github.com/vllm-project/speculators/pull/818",
        ),
    ),
    Fault(
        "features-match-check-draft",
        "Every slot holds what the draft was trained on",
        "The states are right where they were looked at; a bad acceptance then has its cause in the draft, in its "
        "config, in the data, or in a situation that the dump does not cover.",
        "All slots at the floor, best boundary the expected one, ranks equal.",
        "check the files; replay the draft (which-layers); look at `not seen`.",
        "Nine of the 27 classes of public faults do not show in the target's states: norms, recycled state, cache, "
        "rope, head, map, mask, template, data.",
        (
            "https://github.com/sgl-project/sglang/issues/27829",
            "https://github.com/vllm-project/speculators/issues/613",
        ),
    ),
    Fault(
        "undetermined",
        "Something is wrong, or unknown, and no rule can name it",
        "The data do not decide: one rank's tensors only, too few boundaries on the training side, an unknown model "
        "class, or a fault that nobody has described.",
        "The evidence lists the nearest hypotheses.",
        "The finding says what to measure next: all ranks, all boundaries, the residual, a floor.",
        "Measure that; if it stays, report it with both dumps.",
        (
            "https://github.com/sgl-project/sglang/issues/8228",
            "https://github.com/vllm-project/vllm/issues/26191",
        ),
    ),
)
