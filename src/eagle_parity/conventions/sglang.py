"""SGLang's rule from `eagle_aux_hidden_state_layer_ids` to the boundaries that its forward captures.

One line a rule; each was read in the named file of the named wheels (method `set_eagle3_layers_to_capture`).
Three things hold for every model class: only ids nested in the draft config's `eagle_config` are read (an id list at
the top level is ignored and the default is used), captures are appended in ascending layer order whatever the order
of the ids, and an id given twice is captured once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Version: TypeAlias = tuple[int, ...]
Translate: TypeAlias = Callable[[tuple[int, ...], int], tuple[int, ...]]

ANY: Version = (0,)
UNRELEASED: Version = (10**6,)
OLDEST, NEWEST = "0.5.5", "0.5.23"  # the first and the last wheel in which the rules were read


def parse_version(text: str) -> Version:
    """`0.5.10.post1` -> (0, 5, 10). Raises ValueError for text without a number."""
    numbers = re.match(r"v?(\d+(?:\.\d+)*)", text)
    if not numbers:
        raise ValueError(f"not a version: {text!r}")
    return tuple(int(part) for part in numbers[1].split("."))[:3]


def _plus_one(ids: tuple[int, ...], layers: int) -> tuple[int, ...]:
    del layers
    return tuple(i + 1 for i in ids)


def _plus_one_if_first_is_one(ids: tuple[int, ...], layers: int) -> tuple[int, ...]:
    return _plus_one(ids, layers) if ids and ids[0] == 1 else ids


def _literal_if_last_is_n(ids: tuple[int, ...], layers: int) -> tuple[int, ...]:
    return ids if ids and max(ids) == layers else _plus_one(ids, layers)


def _usual_default(layers: int) -> tuple[int, ...]:
    return (2, layers // 2, layers - 3)


def _minimax_m3_default(layers: int) -> tuple[int, ...]:
    return (3, layers // 2 + 1, layers - 2)


@dataclass(frozen=True)
class Rule:
    """What explicit ids and no ids mean for some model classes in versions [since, until)."""

    architectures: tuple[str, ...]
    since: Version
    until: Version
    text: str
    translate: Translate
    source: str
    default: Callable[[int], tuple[int, ...]] = _usual_default
    last_reachable: bool = False
    """Whether boundary n, the last layer's output before the final norm, can be captured."""


DEEPSEEK = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "GlmMoeDsaForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "KimiK25ForConditionalGeneration",
)
DENSE_LIST = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Llama4ForCausalLM",
    "Llama4ForConditionalGeneration",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Glm4MoeForCausalLM",
    "MiniMaxM2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForConditionalGeneration",
)

RULES: tuple[Rule, ...] = (
    Rule(DEEPSEEK, ANY, (0, 5, 13), "id + 1", _plus_one, "sglang 0.5.5 to 0.5.12, models/deepseek_v2.py"),
    Rule(
        DEEPSEEK,
        (0, 5, 13),
        UNRELEASED,
        "id + 1 if the first id is 1, else the id itself",
        _plus_one_if_first_is_one,
        "sglang 0.5.13 to 0.5.23, models/deepseek_v2.py (PR #25454)",
    ),
    Rule(DENSE_LIST, ANY, UNRELEASED, "id + 1", _plus_one, "sglang 0.5.9 to 0.5.23, models/llama.py, qwen3.py, …"),
    Rule(("GptOssForCausalLM",), ANY, (0, 5, 17), "id + 1", _plus_one, "sglang 0.5.9 to 0.5.16, models/gpt_oss.py"),
    Rule(
        ("GptOssForCausalLM",),
        (0, 5, 17),
        UNRELEASED,
        "the id itself if the largest is n, else id + 1",
        _literal_if_last_is_n,
        "sglang 0.5.17 to 0.5.23, models/gpt_oss.py (PR #32334)",
        last_reachable=True,
    ),
    Rule(
        ("MiniMaxM3SparseForConditionalGeneration",),
        ANY,
        UNRELEASED,
        "id + 1",
        _plus_one,
        "sglang 0.5.23, models/minimax_m3_vl.py",
        default=_minimax_m3_default,
    ),
)


@dataclass(frozen=True)
class Served:
    """What an id list makes a version capture: boundaries ascending, the rule in words, its source."""

    boundaries: tuple[int, ...]
    rule: str
    source: str
    problems: tuple[str, ...] = ()
    """Ids that give nothing or make the version fail, in words."""


def find_rule(architecture: str | None, version: str | None) -> Rule | None:
    """The rule of a model class in a version; None when either is not in the table."""
    if architecture is None or version is None:
        return None
    try:
        number = parse_version(version)
    except ValueError:
        return None
    for rule in RULES:
        if architecture in rule.architectures and rule.since <= number < rule.until:
            return rule
    return None


def served(
    ids: Sequence[int] | None, *, architecture: str | None, version: str | None, num_layers: int | None
) -> Served | None:
    """The boundaries that SGLang captures for an id list (None: no nested list in the config).

    None when the model class, the version or the number of layers is unknown.
    """
    rule = find_rule(architecture, version)
    if rule is None or num_layers is None or version is None:
        return None
    wanted = rule.default(num_layers) if ids is None else rule.translate(tuple(ids), num_layers)
    text = rule.text if ids is not None else "no ids that SGLang reads: its default, taken as it is"
    named = wanted if ids is None else tuple(ids)
    last = num_layers if rule.last_reachable else num_layers - 1
    problems = []
    if len(set(wanted)) < len(wanted):
        problems.append(f"ids {list(named)} repeat a layer: it is captured once, so a slot is missing")
    lost = [i for i, b in zip(named, wanted, strict=True) if not 0 <= b <= last]
    if lost:
        problems.append(f"ids {lost} name no layer that can be captured (boundaries 0 to {last})")
    if 0 in wanted and parse_version(version) < (0, 5, 14):
        problems.append("the embedding (boundary 0) makes SGLang before 0.5.14 fail: there is no residual yet")
    boundaries = tuple(sorted({b for b in wanted if 0 <= b <= last}))
    return Served(boundaries, text, rule.source, tuple(problems))


def ids_for(
    boundaries: Sequence[int], *, architecture: str | None, version: str | None, num_layers: int | None
) -> tuple[int, ...] | None:
    """The id list that makes this version capture exactly these boundaries, in this order; None when none does.

    The order of the ids does not matter to the capture, only the first one does to DeepSeek's rule: boundary 1 comes
    first there only when its id does not.
    """
    wanted = tuple(boundaries)
    literal, shifted = wanted, tuple(b - 1 for b in wanted)
    for ids in (literal, shifted, (*literal[1:2], *literal[:1], *literal[2:])):
        if any(i < 0 for i in ids):
            continue
        answer = served(ids, architecture=architecture, version=version, num_layers=num_layers)
        if answer is not None and answer.boundaries == wanted and not answer.problems:
            return ids
    return None


LATER = ("0.5.13", "0.5.14", "0.5.17", NEWEST)  # the versions from which on another rule holds, or the embedding works


def upgrade_for(
    boundaries: Sequence[int], *, architecture: str | None, version: str | None, num_layers: int | None
) -> tuple[str, tuple[int, ...]] | None:
    """The first later version that can capture these boundaries, and the ids to write for it; None when none can."""
    if find_rule(architecture, version) is None or version is None:
        return None
    for later in LATER:
        if parse_version(later) > parse_version(version):
            ids = ids_for(boundaries, architecture=architecture, version=later, num_layers=num_layers)
            if ids is not None:
                return later, ids
    return None
