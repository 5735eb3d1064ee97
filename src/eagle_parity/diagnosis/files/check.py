"""What a check is: a function from a deployment to problems, with its finding code, its needs and its source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from eagle_parity.diagnosis.files.deployment import Deployment
from eagle_parity.records import Severity

Need: TypeAlias = Literal["config", "target", "engine", "sglang", "vllm", "tp"]
"""What must be known before a check can say anything."""

GIVE: Mapping[Need, str] = {
    "config": "the draft's config.json",
    "target": "the target (--target)",
    "engine": "the engine (--engine or --server)",
    "sglang": "SGLang as the engine (--engine sglang==VERSION or --server)",
    "vllm": "vLLM as the engine (--engine vllm==VERSION)",
    "tp": "the tensor-parallel size (--tp or --server)",
}


SGLANG_ALONE = "SGLang as the engine: it is about that one alone"
"""Why a check is not run on another engine."""


@dataclass(frozen=True)
class Problem:
    """What a check found. `key` is the path of a config key, and the finding points at its line."""

    severity: Severity
    message: str
    fix: str
    key: tuple[str, ...] = ()
    code: str | None = None
    """Another finding code than the check's own."""
    in_target: bool = False
    """The key is in the target's config instead of the draft's."""
    evidence: Mapping[str, Any] = field(default_factory=dict)


Body: TypeAlias = Callable[[Deployment], Iterable[Problem]]


@dataclass(frozen=True)
class Check:
    """One check. `source` says who reports or documents the fault."""

    name: str
    code: str
    needs: tuple[Need, ...]
    source: str
    body: Body

    def missing(self, deployment: Deployment) -> tuple[Need, ...]:
        """Which needs are not met."""
        return tuple(need for need in self.needs if not _met(need, deployment))

    def of_other_engine(self, deployment: Deployment) -> bool:
        """Whether the check is about an engine that another one stands in for."""
        return deployment.engine is not None and bool({"sglang", "vllm"} & set(self.missing(deployment)))

    def run(self, deployment: Deployment) -> Iterator[Problem]:
        """The problems; the needs must be met."""
        yield from self.body(deployment)

    def file(self, problem: Problem, deployment: Deployment) -> Path | None:
        """The file that a problem's key stands in."""
        if problem.in_target:
            return None if deployment.target is None else deployment.target.path
        return deployment.config_path


def _met(need: Need, deployment: Deployment) -> bool:
    if need == "config":
        return deployment.draft.dialect != "none"
    if need == "target":
        return deployment.target is not None
    if need == "engine":
        return deployment.engine is not None
    if need == "sglang":
        return deployment.sglang is not None
    if need == "vllm":
        return deployment.vllm
    return deployment.engine is not None and deployment.engine.tp_size is not None


def check(name: str, code: str, *needs: Need, source: str) -> Callable[[Body], Check]:
    """Make a function a check. `source`: the public thread, or the file and version where it was read."""

    def wrap(body: Body) -> Check:
        return Check(name, code, needs, source, body)

    return wrap
