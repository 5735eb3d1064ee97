"""Layer ids: there, where the engine looks, whole, unique, in range, in order, and what they mean."""

from __future__ import annotations

from collections.abc import Iterator

from eagle_parity.conventions import vllm
from eagle_parity.conventions.sglang import NEWEST, OLDEST, ids_for, parse_version, served
from eagle_parity.diagnosis.files.check import Problem, check
from eagle_parity.diagnosis.files.deployment import Deployment
from eagle_parity.diagnosis.files.engine import CAPTURES_SINCE
from eagle_parity.draft.config import IDS

NESTED = ("eagle_config", IDS)
TOP = (IDS,)
READ_IN = "sglang model_executor/model_runner_components/spec_aux_hidden_state.py: only eagle_config is read"


def _uses_aux(deployment: Deployment) -> bool:
    return deployment.draft.config.nested.get("use_aux_hidden_state") is not False


def _place(deployment: Deployment) -> tuple[str, ...]:
    return TOP if deployment.draft.declared_in == "top-level" else NESTED


def _write(ids: object) -> str:
    return f'write "eagle_config": {{"{IDS}": {ids}}}'


@check("ids-declared", "layer-set", "config", source="vllm#50170; sglang spec_aux_hidden_state.py")
def declared(deployment: Deployment) -> Iterator[Problem]:
    """No ids at all: every engine then takes a default of its own, without a word."""
    draft = deployment.draft
    if draft.declared_ids is not None or not _uses_aux(deployment):
        return
    holders = (draft.config.nested, draft.config.document)
    raw = next((holder[IDS] for holder in holders if holder.get(IDS) is not None), None)
    if raw is not None:
        yield Problem(
            "error",
            f"{IDS} is {raw!r}, which is no list of layer numbers: engines fall back to their default layers",
            _write("[…]") + " with the layers that the draft was trained on",
            NESTED if IDS in draft.config.nested else TOP,
        )
        return
    default = deployment.served(None)
    which = f"boundaries {list(default.boundaries)}" if default is not None else "[2, n//2, n-3] in SGLang and vLLM"
    yield Problem(
        "warning",
        f"no {IDS}: the engine captures its default layers ({which})",
        "if the draft was trained on these, nothing is wrong; else " + _write("[…]"),
        ("eagle_config",),
        evidence={"default": None if default is None else list(default.boundaries)},
    )


@check("ids-place", "engine-version-rule", "config", "engine", source=READ_IN)
def place(deployment: Deployment) -> Iterator[Problem]:
    """Ids at the top level, which SGLang does not read."""
    draft = deployment.draft
    if draft.declared_in != "top-level" or deployment.sglang is None or draft.dialect == "speculators":
        return
    ids = list(draft.declared_ids or ())
    got, meant = deployment.served(None), deployment.served(ids)
    same = got is not None and meant is not None and got.boundaries == meant.boundaries
    yield Problem(
        "warning" if same else "error",
        f"the ids {ids} are at the top level, which SGLang ignores: it captures its default layers"
        + (f" {list(got.boundaries)}" if got is not None else "")
        + (", here the same" if same else ""),
        _write(ids),
        TOP,
        evidence={"ids": ids, "served": None if got is None else list(got.boundaries)},
    )


@check("ids-agree", "engine-version-rule", "config", source=READ_IN + "; vllm gpu_model_runner.py asks the top level")
def agree(deployment: Deployment) -> Iterator[Problem]:
    """Two id lists that differ: SGLang takes one, vLLM the other."""
    other = deployment.draft.config.conflicting_ids()
    if other is not None:
        ids = list(deployment.draft.declared_ids or ())
        yield Problem(
            "warning",
            f"eagle_config has the ids {ids}, the top level {list(other)}: SGLang reads the former, vLLM the latter",
            "delete the list that is wrong",
            TOP,
            evidence={"eagle_config": ids, "top_level": list(other)},
        )


@check("ids-unique", "layer-set", "config", source="Model-Optimizer#2149; sglang captures a layer once")
def unique(deployment: Deployment) -> Iterator[Problem]:
    """An id given twice is captured once, so a slot is missing."""
    ids = deployment.draft.declared_ids or ()
    twice = sorted({i for i in ids if ids.count(i) > 1})
    if twice:
        yield Problem(
            "error",
            f"the ids {list(ids)} repeat {twice}: a layer is captured once, so the fc gets too few slots",
            "declare each layer once",
            _place(deployment),
            evidence={"ids": list(ids)},
        )


@check("ids-count", "width-mismatch", "config", source="sglang#24663; speculative/eagle_utils.py, llama_eagle3.py")
def count(deployment: Deployment) -> Iterator[Problem]:
    """As many ids as the fc has slots, and num_aux_hidden_states says the same."""
    draft = deployment.draft
    ids, slots = draft.declared_ids, draft.num_slots
    if ids is not None and len(ids) != slots and _uses_aux(deployment):
        yield Problem(
            "error",
            f"{len(ids)} ids {list(ids)}, but fc.weight takes {slots} slots of {draft.target_hidden_size}",
            f"declare {slots} ids: the ones that the draft was trained on",
            _place(deployment),
            evidence={"ids": list(ids), "slots": slots},
        )
    elif ids is None and slots != 3 and draft.declared_num_slots != slots and draft.dialect == "native":
        yield Problem(
            "error",
            f"fc.weight takes {slots} slots, but without ids engines assume 3",
            _write("[…]") + f" with {slots} layers",
            ("eagle_config",),
        )
    if draft.declared_num_slots is not None and draft.declared_num_slots != slots:
        yield Problem(
            "error",
            f"num_aux_hidden_states is {draft.declared_num_slots}, but fc.weight takes {slots} slots",
            f"set num_aux_hidden_states to {slots}",
            ("num_aux_hidden_states",),
        )


@check(
    "ids-range", "boundary-missing", "config", "target", source="sglang#32226, sglang#32204, vllm#46788, verl-SpeCo#20"
)
def in_range(deployment: Deployment) -> Iterator[Problem]:
    """Ids that name no layer, whatever the engine; what a known version makes of them is `ids-captured`."""
    ids, layers = deployment.draft.declared_ids, deployment.layers
    if ids is None or layers is None or (deployment.engine is not None and deployment.rule_known):
        return
    outside = [i for i in ids if not 0 <= i <= layers]
    if outside:
        yield Problem(
            "error",
            f"the ids {outside} name no layer: the target has {layers}",
            "declare the ids in the engine's numbering; -1 means the embedding to some trainers and nothing to engines",
            _place(deployment),
            evidence={"ids": list(ids), "num_layers": layers},
        )
    elif layers in ids:
        yield Problem(
            "warning",
            f"the id {layers} is the last layer's output (of {layers} layers), which most model classes cannot capture",
            "check with --engine, or train on a layer before the last",
            _place(deployment),
            evidence={"ids": list(ids), "num_layers": layers},
        )


@check(
    "ids-captured",
    "boundary-missing",
    "config",
    "target",
    "engine",
    source="sglang models/*.py; sglang#32226; vllm models/interfaces.py, deepseek_v2.py",
)
def captured(deployment: Deployment) -> Iterator[Problem]:
    """Ids (or the default) that this version cannot capture."""
    answer = deployment.served(deployment.ids)
    if answer is None or (deployment.draft.dialect == "speculators" and deployment.sglang is not None):
        return
    for problem in answer.problems:
        if "repeat" in problem and deployment.ids is not None:
            continue  # `unique` says it
        embedding = "the embedding" in problem
        upgrade = embedding and deployment.sglang is not None
        yield Problem(
            "error",
            f"{deployment.name}: {problem}",
            "upgrade to 0.5.14 or later" if upgrade else "declare layers that can be captured, or retrain on such",
            _place(deployment),
            "embedding-missing" if embedding else "layer-set" if "repeat" in problem else None,
            evidence={"ids": deployment.ids, "served": list(answer.boundaries), "rule": answer.rule},
        )


@check("ids-order", "concat-order", "config", source="sglang and vllm: captures are appended in ascending layer order")
def order(deployment: Deployment) -> Iterator[Problem]:
    """Ids that do not ascend: the server's order does, whatever the list says."""
    ids = deployment.draft.declared_ids
    if ids is None or list(ids) == sorted(ids):
        return
    yield Problem(
        "error" if deployment.engine is not None else "warning",
        f"the ids {list(ids)} do not ascend; the slots are filled in ascending layer order whatever the list says",
        f"if training used the ascending order, write {sorted(ids)}; if it used this one, retrain on the ascending "
        "order or permute the columns of fc.weight (no id list can)",
        _place(deployment),
        evidence={"ids": list(ids)},
    )


@check(
    "ids-meaning",
    "engine-version-rule",
    "config",
    "target",
    "engine",
    source="sglang PR #25454, PR #32334; vllm gpu_model_runner.py",
)
def meaning(deployment: Deployment) -> Iterator[Problem]:
    """What the ids mean here, and where another version would read them otherwise."""
    assert deployment.engine is not None
    assert deployment.engine.version is not None
    ids = deployment.ids
    answer = deployment.served(ids)
    if answer is None or ids is None or (deployment.draft.dialect == "speculators" and deployment.sglang is not None):
        return
    others = {}
    for version in ("0.5.12", "0.5.13", "0.5.17") if deployment.sglang is not None else (NEWEST,):
        other = served(ids, architecture=deployment.architecture, version=version, num_layers=deployment.layers)
        if other is not None and other.boundaries != answer.boundaries:
            others[version if deployment.sglang is not None else f"SGLang {version}"] = list(other.boundaries)
    elsewhere = "; ".join(f"{version} reads {boundaries}" for version, boundaries in others.items())
    yield Problem(
        "info",
        f"{deployment.name} captures boundaries {list(answer.boundaries)} for the ids {list(ids)} ({answer.rule})"
        + (f"; {elsewhere}" if elsewhere else ""),
        "hold this against what the draft was trained on: which-layers finds it from the draft itself",
        _place(deployment),
        evidence={
            "ids": list(ids),
            "boundaries": list(answer.boundaries),
            "rule": answer.rule,
            "rule_source": answer.source,
            "other_versions": others,
            "ids_for_these_boundaries_as_given": (vllm.ids_for if deployment.vllm else ids_for)(
                ids,
                architecture=deployment.architecture,
                version=deployment.engine.version,
                num_layers=deployment.layers,
            ),
        },
    )


@check("ids-rule-known", "undetermined", "config", "target", "engine", source="conventions/sglang.py, vllm.py")
def rule_known(deployment: Deployment) -> Iterator[Problem]:
    """A model class or version whose rule nobody has read: nothing can be said about the ids."""
    assert deployment.engine is not None
    if not deployment.rule_known:
        yield Problem(
            "warning",
            f"what layer ids mean for {deployment.architecture} on {deployment.name} is not known",
            "compare a dump of that server, which needs no rule: dump serving, then compare",
            ("architectures",),
            in_target=True,
        )
        return
    number = deployment.sglang
    if deployment.vllm and deployment.engine.version != vllm.READ_IN:
        yield Problem(
            "info",
            f"the rules of vLLM were read in {vllm.READ_IN}, and are assumed for {deployment.name}",
            'hold the server\'s log against it ("Using auxiliary layers from speculative config")',
        )
    if number is not None and not parse_version(OLDEST) <= number <= parse_version(NEWEST):
        yield Problem(
            "info",
            f"{deployment.name} is outside the versions in which the rules were read ({OLDEST} to {NEWEST})",
            "confirm with a dump of that server",
        )


@check(
    "target-captures",
    "engine-version-rule",
    "target",
    "sglang",
    source="sglang models/*.py: set_eagle3_layers_to_capture",
)
def target_captures(deployment: Deployment) -> Iterator[Problem]:
    """A target class that cannot capture for EAGLE-3 in this version."""
    since = CAPTURES_SINCE.get(deployment.architecture or "")
    version = deployment.sglang
    if since is None or version is None or version >= since:
        return
    known = "upgrade to " + ".".join(map(str, since)) + " or later" if since < (10**6,) else "use another target class"
    yield Problem(
        "error",
        f"{deployment.architecture} has no set_eagle3_layers_to_capture in {deployment.name}: EAGLE-3 cannot run",
        known,
        ("architectures",),
        in_target=True,
    )


@check("aux-states-used", "width-mismatch", "config", source="sglang#14920, vllm#27688")
def aux_states_used(deployment: Deployment) -> Iterator[Problem]:
    """use_aux_hidden_state false: the engine hands over one state, so the fc must take one."""
    draft = deployment.draft
    if not _uses_aux(deployment) and draft.num_slots > 1:
        yield Problem(
            "error",
            f"use_aux_hidden_state is false, so the engine hands over the last hidden state alone, but fc.weight takes "
            f"{draft.num_slots} slots",
            "set use_aux_hidden_state to true, or use the draft that was trained without",
            ("eagle_config", "use_aux_hidden_state"),
        )
