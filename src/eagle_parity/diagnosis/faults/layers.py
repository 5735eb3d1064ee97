"""Faults in which layers the slots hold, and in which order."""

from __future__ import annotations

from eagle_parity.diagnosis.faults.fault import Fault

FAULTS: tuple[Fault, ...] = (
    Fault(
        "layer-shift",
        "Every wrong slot holds a boundary a fixed number of layers away from the trained one",
        "Trainer, exporter and server number layers differently: one counts a layer's input, the other its output, "
        "or an offset is added twice. SGLang adds 1 to explicit ids (DeepSeek classes from 0.5.13 on only when the "
        "first id is 1), vLLM adds none, and trainers exist of both kinds.",
        "The best boundary of the wrong slots is the expected one plus the same number, at the noise floor, and the "
        "runner-up is clearly worse. The cosine to the expected boundary stays high (0.9 to 0.999), so a cosine "
        "threshold passes it. Or some rows of a slot only, which are named with their requests.",
        "Capture training with --boundaries all and compare: the best boundary must be matched at its floor. A "
        "partial sum looks like a neighbouring layer too; it is not at the floor and its ranks differ. which-layers "
        "with the draft says which side is right.",
        "Write the id list that makes this engine version capture the trained boundaries (the finding names it).",
        (
            "https://github.com/sgl-project/sglang/pull/25454",
            "https://github.com/vllm-project/vllm/pull/43671",
            "https://github.com/vllm-project/vllm/pull/40727",
            "https://github.com/verl-project/verl-SpeCo/pull/82",
        ),
    ),
    Fault(
        "layer-set",
        "The slots hold other layers than the trained ones, by no common offset",
        "The engine did not use the ids: they are missing, stand where it does not look, or were set after the "
        "graphs were captured, so its default layers [2, n//2, n-3] are captured; or dump, training and export chose"
        " layers independently; or an id is given twice and captured once.",
        "Each wrong slot matches some other boundary at the floor, the differences are not one number. Often the set"
        " is the engine's default.",
        "Compare with training captured with --boundaries all; run check on the draft's config.",
        'Declare the trained layers in config.json under "eagle_config", one id a slot; restart the server.',
        (
            "https://github.com/vllm-project/vllm/pull/50170",
            "https://github.com/lightseekorg/tokenspeed/pull/526",
            "https://github.com/sgl-project/sglang/pull/22836",
            "https://github.com/NVIDIA/Model-Optimizer/pull/2201",
        ),
    ),
    Fault(
        "boundary-missing",
        "A boundary that is needed is not captured, or cannot be",
        "The id names the last layer's output or a layer that does not exist, and the capture loop never reaches it;"
        " on the training side the dump simply does not store the expected boundary.",
        "A slot too few on the serving side; ids equal to the number of layers or negative in the config; or an "
        "expected boundary without a counterpart in the training dump.",
        "check with --target and --engine; dump training with --boundaries all.",
        "Declare layers that the engine can capture (the finding names the range), or store the boundary.",
        (
            "https://github.com/sgl-project/sglang/issues/32226",
            "https://github.com/sgl-project/sglang/issues/32204",
            "https://github.com/vllm-project/vllm/pull/46788",
            "https://github.com/vllm-project/speculators/issues/705",
        ),
    ),
    Fault(
        "embedding-missing",
        "The draft was trained with the embedding in a slot and the server feeds something else there",
        "The embedding is boundary 0. A trainer may call it -1 or 0; SGLang's +1 rule turns id 0 into boundary 1, -1"
        " is dropped by the literal rule, and versions before 0.5.14 fail on boundary 0 because there is no residual"
        " yet.",
        "The slot that should be boundary 0 is not bitwise the embedding of its token; it matches another boundary.",
        "Boundary 0 is exact on both sides: compare shows a distance of rounding or a fault, nothing between.",
        "On SGLang 0.5.14 or later declare an id list whose rule gives boundary 0 (DeepSeek from 0.5.13 on: id 0 in "
        "a list that does not begin with 1).",
        (
            "https://github.com/verl-project/verl-SpeCo/issues/20",
            "https://github.com/NickL77/BaldEagle/issues/18",
        ),
    ),
    Fault(
        "concat-order",
        "The slots hold the trained boundaries in another order",
        "Training concatenated the states in the order of its id list; servers append captures in ascending layer "
        "order, whatever the list says.",
        "The set of boundaries is right, the assignment to slots is a permutation; every slot is at the floor of its"
        " own.",
        "which-layers replays the draft on permutations: the trained order has the lowest KL.",
        "No id list changes the order. Retrain on the ascending order, or permute the columns of fc.weight "
        "accordingly.",
        ("https://github.com/vllm-project/speculators/issues/569",),
    ),
    Fault(
        "aliased-buffer",
        "The captured tensor is a buffer that later layers wrote into",
        "The capture kept a reference instead of a copy, and an in-place add (a fused residual-norm kernel, a reset "
        "of the residual) changed it afterwards.",
        "Two slots are bit by bit the same tensor, or a slot holds more than its boundary: boundary k plus part of "
        "layer k's own output (its attention), between k and k+1 and nearer to neither than the floor allows. Deep "
        "slots are worse than shallow ones.",
        "Clone the tensor at the capture and compare again: the difference is the fault.",
        "Clone the state when it is captured.",
        (
            "https://github.com/sgl-project/sglang/pull/28005",
            "https://github.com/lightseekorg/tokenspeed/pull/913",
        ),
    ),
    Fault(
        "engine-version-rule",
        "The config means something else to this engine version than was intended",
        "The same id list gives other layers by model class and version: DeepSeek and Kimi read [2, 30, 58] as "
        "boundaries 3, 31, 59 up to SGLang 0.5.12 and as 2, 30, 58 from 0.5.13 on. Ids at the top level, the "
        "speculators format, and keys that a version does not know are ignored without a word.",
        "A file check: config.json against the table of rules. With a dump: what the server feeds is not what its "
        "config should make it feed.",
        "check --draft D --target T --engine sglang==V; which-layers puts trained, served and declared side by side.",
        "Write what this version reads (the finding names the line), or change the version.",
        (
            "https://github.com/sgl-project/sglang/pull/25454",
            "https://github.com/sgl-project/sglang/pull/32334",
            "https://github.com/vllm-project/speculators/issues/569",
        ),
    ),
)
