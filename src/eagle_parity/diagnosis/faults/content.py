"""Faults in what a state holds: norms, residual, scale, basis, precision."""

from __future__ import annotations

from eagle_parity.diagnosis.faults.fault import Fault

FAULTS: tuple[Fault, ...] = (
    Fault(
        "final-norm",
        "One side holds the state after the target's final norm, the other before it",
        "The last hidden state of Hugging Face's output_hidden_states is after the final norm, that of most engines'"
        " captures before it; teacher, last slot or MTP input then differ by one RMSNorm.",
        "The slot matches final.norm, or boundary k times one factor a token times one weight a channel, which is "
        "the final norm's. Cosine 0.8 to 0.97, all rows alike.",
        "Store boundary n and final.norm on the training side; the ratio by channel is the norm's weight.",
        "Capture the same side of the norm in training and serving. Which one is right only the draft can say: "
        "replay it with both (which-layers).",
        (
            "https://github.com/vllm-project/speculators/pull/313",
            "https://github.com/verl-project/verl-SpeCo/issues/20",
            "https://github.com/sgl-project/sglang/pull/39776",
            "https://github.com/waybarrios/vllm-mlx/issues/657",
        ),
    ),
    Fault(
        "draft-norm",
        "A norm of the draft's own is left out, doubled, or done by one side only",
        "The config asks for a norm (norm_before_fc, fc_norm, norm_before_residual) that the engine version does not"
        " know and silently skips; the weights are there without the flag; or the capture was taken after that norm.",
        "On paper: the flag, the weights and the version do not fit. In a dump: a slot is boundary k with unit RMS a"
        " token. Or the features match everywhere and acceptance is bad all the same.",
        "check --draft D --engine sglang==V; replay the draft with and without the norm.",
        "Upgrade (norm_before_fc needs SGLang 0.5.17, fc_norm 0.5.12 for llama drafts and 0.5.13 for MLA), or set "
        "the flag that the weights need. norm_before_residual is not read by any SGLang version: serve with vLLM or "
        "retrain.",
        (
            "https://github.com/sgl-project/sglang/pull/32334",
            "https://github.com/vllm-project/vllm/pull/36545",
            "https://github.com/vllm-project/speculators/pull/670",
            "https://github.com/charlie12345/ROCmFPX/issues/44",
        ),
    ),
    Fault(
        "recycled-hidden",
        "The draft's second and later steps get another state than in training",
        "From the second step on the draft feeds back its own state: before or after its norm (norm_output), with or"
        " without the residual. Trainers and engines do not agree on what norm_output means.",
        "The target's states match, position 0 is accepted as in training, later positions fall off faster.",
        "check reports the flag; replay two steps with both conventions and compare the second step's agreement.",
        "Set norm_output as training fed the state back; on engines that lack the key, upgrade.",
        (
            "https://github.com/vllm-project/vllm/pull/14464",
            "https://github.com/ROCm/ATOM/pull/1764",
            "https://github.com/sgl-project/SpecForge/pull/879",
            "https://github.com/vllm-project/speculators/pull/610",
        ),
    ),
    Fault(
        "residual-missing",
        "The slot holds a layer's output without the residual stream",
        "The stream is kept in two tensors (hidden_states and residual) and only the first was captured.",
        "Norm ratio far below 1 and low cosine; what is missing (truth - slot) is close to the boundary before.",
        "Add the residual at the capture point and compare again.",
        "Capture hidden_states + residual.",
        ("https://github.com/sgl-project/sglang/pull/39286",),
    ),
    Fault(
        "stream-contraction",
        "A model with several residual streams was reduced to one in another way than in training",
        "Hyper-connection models keep several streams of hidden_size; the state for the draft is a mix of them with "
        "learned weights, and a plain mean was captured instead.",
        "The width is right, the cosine middling. Needs streams in the dump: the slot is a linear combination of "
        "them with other weights than training's.",
        "Store the streams on the training side and fit the slot by least squares.",
        "Contract with the layer's own mix before the capture.",
        ("https://github.com/sgl-project/sglang/pull/38642",),
    ),
    Fault(
        "rotated-basis",
        "The served target lives in a rotated basis",
        "QuaRot and similar quantisation multiply the residual stream by an orthogonal matrix. The target's own "
        "output does not change, the draft's input does.",
        "Cosine about 0, norm ratio exactly 1, and the Gram matrix of the tokens (all their dot products) is the "
        "same on both sides.",
        "Solve for the rotation (Procrustes): applied to the slot, it gives the training state.",
        "Train the draft on this target's own states, or fold the rotation into fc.weight and into the shared "
        "embedding.",
        (
            "https://github.com/vllm-project/vllm-ascend/issues/5974",
            "https://github.com/vllm-project/vllm-ascend/pull/12775",
            "https://github.com/vllm-project/vllm-ascend/pull/13407",
        ),
    ),
    Fault(
        "precision",
        "The right state, further away than its floor",
        "Another dtype or quantisation on one side, a lossy kernel, or a floor that is too tight. Ranks that differ "
        "in the last bits are a warning of the same code.",
        "The expected boundary is the best one and told apart from the others, but its median distance is over the "
        "limit.",
        "Record the floor of a healthy server with this quantisation and pass it with --floor.",
        "Compare dtypes and quantisation of both sides; train on states of the quantised target if that is what is "
        "served.",
        (
            "https://github.com/vllm-project/vllm/issues/43455",
            "https://github.com/vllm-project/vllm/issues/44087",
            "https://github.com/vllm-project/vllm/pull/24505",
        ),
    ),
    Fault(
        "non-finite",
        "NaN or infinite values",
        "float16 overflows at 65504, which residual streams with massive channels exceed; padded or uninitialised "
        "rows; an attention call that lost its parameters.",
        "The finding names rank, row and channel of the first such value.",
        "Run the same prompt in bfloat16.",
        "Serve in bfloat16, or find the buffer that is read before it is written.",
        (
            "https://github.com/SafeAILab/EAGLE/pull/69",
            "https://github.com/sgl-project/sglang/pull/27883",
            "https://github.com/NVIDIA/TensorRT-LLM/pull/5146",
            "https://github.com/sgl-project/sglang/pull/26911",
        ),
    ),
    Fault(
        "scale-mismatch",
        "The right direction with another length, by one factor for all tokens",
        "A residual multiplier, a quantisation scale or a mean over ranks on one side only.",
        "Cosine at the floor of a match, norm ratio the same for all rows and not 1: from 1 % on in bf16, since noise "
        "moves the median of the rows' factors by much less.",
        "Divide by the factor: the distance falls to the floor.",
        "Find the scale and apply it on both sides or on neither.",
        ("https://github.com/vllm-project/vllm/issues/43455",),
    ),
    Fault(
        "embedding-scale",
        "The embedding is scaled on one side only",
        "Gemma-like models multiply the embedding by sqrt(hidden_size); a shared or captured embedding may lack the "
        "factor.",
        "Slot of boundary 0 with cosine 1 and a norm ratio of sqrt(hidden_size) or its inverse.",
        "Divide by the factor: the rows are the embedding's, bit by bit up to rounding.",
        "Apply the same embedding scale on both sides.",
        (
            "https://github.com/vllm-project/vllm/pull/41703",
            "https://github.com/NVIDIA/Model-Optimizer/pull/1621",
        ),
    ),
)
