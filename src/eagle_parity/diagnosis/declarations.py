"""What the draft's config declares, under the rule of each engine and of each trainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eagle_parity.conventions import sglang, vllm
from eagle_parity.conventions.trainers import TRAINERS, who_would
from eagle_parity.draft.checkpoint import DraftCheckpoint
from eagle_parity.records import Boundary


def declarations(
    draft: DraftCheckpoint, architecture: str | None, num_layers: int | None, trained: Sequence[Boundary] | None
) -> tuple[Mapping[str, Any], ...]:
    """One entry a rule: {by, versions, ids, boundaries, rule, source, problems, as_trained}.

    SGLang once for each of its rules for this model class; vLLM; and the trainers, together where they agree.
    """
    if num_layers is None:
        return ()
    entries = [*_sglang(draft, architecture, num_layers), *_vllm(draft, architecture, num_layers)]
    entries += _trainers(draft.declared_ids, num_layers)
    return tuple(
        {**entry, "as_trained": None if trained is None else tuple(entry["boundaries"]) == tuple(trained)}
        for entry in entries
    )


def _sglang(draft: DraftCheckpoint, architecture: str | None, num_layers: int) -> Iterator[dict[str, Any]]:
    ids = draft.declared_ids if draft.declared_in == "eagle_config" else None
    for rule in sglang.RULES:
        if architecture not in rule.architectures:
            continue
        newest = sglang.parse_version(sglang.NEWEST)
        version = ".".join(map(str, max(rule.since, sglang.parse_version(sglang.OLDEST))))
        if rule.until > newest:
            version = sglang.NEWEST
        answer = sglang.served(ids, architecture=architecture, version=version, num_layers=num_layers)
        if answer is not None:
            yield _entry("SGLang", _range(rule.since, rule.until), ids, answer)


def _range(since: sglang.Version, until: sglang.Version) -> str:
    begin, end = ".".join(map(str, since)), ".".join(map(str, until))
    if since == sglang.ANY:
        return f"before {end}" if until != sglang.UNRELEASED else f"to {sglang.NEWEST}"
    return f"{begin} to {sglang.NEWEST}" if until == sglang.UNRELEASED else f"{begin} to before {end}"


def _vllm(draft: DraftCheckpoint, architecture: str | None, num_layers: int) -> Iterator[dict[str, Any]]:
    ids = draft.config.conflicting_ids() or draft.declared_ids  # vLLM asks the top level first
    answer = vllm.served(ids, architecture=architecture, version=vllm.READ_IN, num_layers=num_layers)
    if answer is not None:
        yield _entry("vLLM", vllm.READ_IN, ids, answer)


def _entry(by: str, versions: str, ids: Sequence[int] | None, answer: sglang.Served) -> dict[str, Any]:
    return {
        "by": by,
        "versions": versions,
        "ids": None if ids is None else tuple(ids),
        "boundaries": answer.boundaries,
        "rule": answer.rule,
        "source": answer.source,
        "problems": answer.problems,
    }


def _trainers(ids: Sequence[int] | None, num_layers: int) -> Iterator[dict[str, Any]]:
    seen: dict[tuple[int, ...], None] = {}
    for trainer in TRAINERS:
        seen.setdefault(trainer.trained(ids, num_layers))
    for boundaries in seen:
        those = who_would(boundaries, ids, num_layers)
        yield {
            "by": ", ".join(dict.fromkeys(trainer.name for trainer in those)),
            "versions": "; ".join(f"{trainer.name}: {trainer.versions}" for trainer in those),
            "ids": None if ids is None else tuple(ids),
            "boundaries": boundaries,
            "rule": "its default ids" if ids is None else " or ".join(dict.fromkeys(t.rule for t in those)),
            "source": "; ".join(trainer.source for trainer in those),
            "problems": (),
        }
