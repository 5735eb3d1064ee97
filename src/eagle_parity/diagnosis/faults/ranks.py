"""Faults in how tensor-parallel ranks hold a state together, and in what gets lost on the way."""

from __future__ import annotations

from eagle_parity.diagnosis.faults.fault import Fault

FAULTS: tuple[Fault, ...] = (
    Fault(
        "partial-sum",
        "Each rank holds the residual plus its own share of the last layer's output",
        "The state was captured before a deferred all-reduce. SGLang up to 0.5.13 does so for DeepSeek and Kimi at "
        "TP > 1 with the fused FlashInfer all-reduce, on by default on Hopper and Blackwell, in forwards of up to "
        "2048 tokens, that is in every decode and verify step.",
        "The width is right and every rank differs. Summing the ranks counts the residual tp times; sum - (tp-1) x "
        "residual is the truth. A single rank has a cosine of 0.9 to 0.99 to the truth and often looks like the "
        "layer before.",
        "Capture all ranks: states must be bitwise equal over ranks. A forward of more than 2048 tokens of the same "
        "server is right.",
        "Upgrade to SGLang 0.5.14 or later, or start with --enforce-disable-flashinfer-allreduce-fusion (0.5.10 and "
        "later).",
        (
            "https://github.com/sgl-project/sglang/pull/28343",
            "https://github.com/sgl-project/sglang/pull/32012",
        ),
    ),
    Fault(
        "double-sum",
        "A layer's output was summed over the ranks twice",
        "Two reductions follow each other: a layer reduces its output and the communicator (reduce-scatter, fused "
        "add) does it again, so the output counts tp times.",
        "Ranks agree. The tensor is the residual plus tp times the layer's output; with the whole tensor reduced "
        "again it is tp times the truth.",
        "The excess over the truth, divided by tp-1, leaves a residual stream when taken from the truth.",
        "Remove one of the two reductions, or upgrade the engine.",
        (
            "https://github.com/sgl-project/sglang/pull/24785",
            "https://github.com/sgl-project/sglang/issues/36879",
        ),
    ),
    Fault(
        "token-shard",
        "Each rank holds only some of the tokens",
        "Rows are scattered over ranks (sequence parallelism, all-to-all MoE, prefill context parallelism, scattered"
        " attention inputs) and were captured before they were gathered. Under data-parallel attention it is how "
        "things should be.",
        "Fewer rows a rank than tokens, different rows on different ranks; together they are the whole state.",
        "Join the ranks' rows: the reconstruction is at the floor.",
        "Gather the rows before the capture, upgrade (SGLang 0.5.14 for all-to-all, 0.5.22 for context parallelism),"
        " or turn the scattered mode off.",
        (
            "https://github.com/sgl-project/sglang/pull/14280",
            "https://github.com/sgl-project/sglang/pull/20701",
            "https://github.com/sgl-project/sglang/pull/12002",
        ),
    ),
    Fault(
        "hidden-shard",
        "Each rank holds hidden_size / tp channels",
        "A column-parallel output was captured before its all-gather. In SGLang no residual stream is sharded this "
        "way; the one legitimate narrow tensor is the output of a Kimi draft's fc.",
        "The width times the number of ranks is the config's hidden size. A width alone proves nothing: 896 is 7168 "
        "/ 8 and also the full width of some models.",
        "Put the ranks' channels side by side: the reconstruction is at the floor.",
        "Gather over the ranks (gather_output=True, or an all-gather) before the draft's fc.",
        ("https://github.com/sgl-project/SpecForge/pull/613",),
    ),
    Fault(
        "capture-lost",
        "A slot, or a rank's part of it, is not there",
        "Layers that run outside the usual loop are not captured (two-batch overlap), only the last pipeline stage "
        "captures, a rank never ran the capture, or a transfer between prefill and decode servers dropped it.",
        "Fewer slots than the draft takes, a tensor present on some ranks only, or channels that hold one value on all "
        "rows while the others are right.",
        "check names the flags; a dump of every rank shows who lacks what.",
        "Turn off pipeline parallelism, two-batch overlap or the transfer for the target, and declare as many ids as"
        " slots.",
        (
            "https://github.com/vllm-project/vllm/pull/45985",
            "https://github.com/vllm-project/vllm/pull/53052",
            "https://github.com/sgl-project/sglang/issues/10059",
            "https://github.com/sgl-project/sglang/pull/25408",
        ),
    ),
    Fault(
        "width-mismatch",
        "A width fits neither the hidden size nor a shard of it",
        "Draft and target differ in hidden size and target_hidden_size is not set; the number of slots in config and"
        " fc differ; all states were concatenated; an embedding was joined to the state.",
        "fc.weight's input is not K times the target's hidden size, or a captured slot is not hidden_size wide.",
        "check --draft D --target T reads it from the headers.",
        "Set target_hidden_size and num_aux_hidden_states, or use the draft that belongs to this target.",
        (
            "https://github.com/sgl-project/sglang/pull/8163",
            "https://github.com/vllm-project/vllm/pull/17740",
            "https://github.com/sgl-project/sglang/pull/24663",
            "https://github.com/SafeAILab/EAGLE/issues/294",
        ),
    ),
)
