"""Rotary embedding of the draft: which of the two schemas the engine reads, and whether what it needs is there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from eagle_parity.diagnosis.files.check import Problem, check
from eagle_parity.diagnosis.files.deployment import Deployment
from eagle_parity.diagnosis.files.engine import support

OLD, NEW = "rope_scaling", "rope_parameters"
_PLAIN = {"default", None}


def _kind(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type"))


def _part(holder: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = holder.get(name)
    return dict(value) if isinstance(value, dict) else {}


def _key(deployment: Deployment, *key: str) -> tuple[str, ...]:
    return ("transformer_layer_config", *key) if deployment.draft.dialect == "speculators" else key


def _theta(layer: Mapping[str, Any]) -> Any:
    return layer.get("rope_theta", _part(layer, NEW).get("rope_theta"))


@check("rope-schemas", "rope-mismatch", "config", source="SpecForge@108eda37, speculators#574, Automodel#2920")
def schemas(deployment: Deployment) -> Iterator[Problem]:
    """transformers 5 writes rope_parameters; older engines read rope_theta and rope_scaling only."""
    layer = deployment.draft.layer_config
    old, new, version = _part(layer, OLD), _part(layer, NEW), deployment.sglang
    line = support(NEW, deployment.draft.style)
    too_old = version is not None and version < line.since
    scaled = _kind(new) not in _PLAIN
    if new and too_old:
        lost = [name for name, gone in (("rope_theta", "rope_theta" not in layer), (OLD, scaled and not old)) if gone]
        if lost:
            yield Problem(
                "error",
                f"{deployment.name} does not read rope_parameters, and {' and '.join(lost)} "
                f"{'is' if len(lost) == 1 else 'are'} not there: the draft would run with the default rotation",
                f"write {' and '.join(lost)} beside rope_parameters, or upgrade to 0.5.10 or later",
                _key(deployment, NEW),
                evidence={"read_in": line.source},
            )
    if "rope_theta" in layer and new.get("rope_theta") not in (None, layer["rope_theta"]):
        yield Problem(
            "error",
            f"rope_theta is {layer['rope_theta']} at the top and {new['rope_theta']} in rope_parameters: engines "
            "differ in which one they read",
            "keep the one that training used",
            _key(deployment, "rope_theta"),
        )
    if old and new and _kind(old) not in _PLAIN and _kind(old) != _kind(new):
        yield Problem(
            "error",
            f"rope_scaling is {_kind(old)!r}, rope_parameters {_kind(new)!r}",
            "keep the one that training used, in both schemas",
            _key(deployment, OLD),
        )


@check("rope-theta", "rope-mismatch", "config", source="Automodel#2920, sfllm#32: engines fall back to 10000")
def theta(deployment: Deployment) -> Iterator[Problem]:
    """A rope_theta that is nowhere becomes 10000."""
    if _theta(deployment.draft.layer_config) is None:
        yield Problem(
            "warning",
            "rope_theta is in neither schema: engines take 10000",
            "write the value that training used",
            _key(deployment, "rope_theta"),
        )


@check("rope-factor", "rope-mismatch", "config", source="vllm#51092")
def factor(deployment: Deployment) -> Iterator[Problem]:
    """A scaled rotation needs its factor."""
    layer = deployment.draft.layer_config
    for name in (OLD, NEW):
        rope = _part(layer, name)
        if _kind(rope) in ("yarn", "deepseek_yarn", "linear", "dynamic", "llama3") and "factor" not in rope:
            yield Problem(
                "error",
                f"{name} has type {_kind(rope)!r} but no factor",
                "write the factor that training used",
                _key(deployment, name),
            )


@check("rope-like-target", "rope-mismatch", "config", "target", source="speculators#613, sfllm#32, speculators#733")
def like_target(deployment: Deployment) -> Iterator[Problem]:
    """A draft may rotate otherwise than its target, but seldom means to: only a replay can tell."""
    assert deployment.target is not None
    ours, theirs = deployment.draft.layer_config, deployment.target.text
    for name in ("rope_theta", "partial_rotary_factor", "rope_interleave"):
        mine = ours.get(name, _part(ours, NEW).get(name))
        other = theirs.get(name, _part(theirs, NEW).get(name))
        if mine is not None and other is not None and mine != other:
            yield Problem(
                "warning" if name != "rope_theta" else "info",
                f"the draft's {name} is {mine}, the target's {other}",
                "right if training used the draft's value; which-layers replays the draft and shows which one fits",
                _key(deployment, name),
                evidence={"draft": mine, "target": other},
            )
    if any("mrope_section" in _part(theirs, name) for name in (OLD, NEW)) and not any(
        "mrope_section" in _part(ours, name) for name in (OLD, NEW)
    ):
        yield Problem(
            "info",
            "the target uses M-RoPE, the draft does not: on images and video their positions differ",
            "nothing to do for text; else train the draft with the same positions",
            _key(deployment, NEW),
        )
