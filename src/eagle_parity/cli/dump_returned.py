"""`eagle-parity dump serving --server URL` where the server has no plugin: what it gives over HTTP becomes a dump."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_parity.cli.output import progress, say
from eagle_parity.errors import EagleParityError
from eagle_parity.records import Model

if TYPE_CHECKING:
    from eagle_parity.captures.prompts import Prompt
    from eagle_parity.captures.server import Server


def record(
    server: Server,
    info: Mapping[str, Any],
    prompts: Sequence[Prompt],
    output: Path,
    *,
    tokens_from: Path | None,
    max_new_tokens: int,
    warm_cache: bool,
    cap: int,
    overwrite: bool,
) -> None:
    """Write a dump of one rank from the hidden states in the server's answers."""
    from eagle_parity.captures.returned import capture
    from eagle_parity.dump import DumpWriter, check_size, human, planned_bytes

    say(
        f"SGLang {info['version']} without the capture plugin: {len(prompts)} prompts with return_hidden_states; its "
        "scheduler writes the states as text and holds other requests up meanwhile"
    )
    with progress() as bar:
        task = bar.add_task("probing", total=len(prompts))
        returned = capture(
            server,
            info,
            prompts,
            model=_model(info.get("model_path"), tokens_from),
            declared_ids=_declared_ids(info.get("speculative_draft_model_path")),
            max_new_tokens=max_new_tokens,
            warm_cache=warm_cache,
            progress=lambda done, what: bar.update(task, completed=done, description=what[:40]),
        )
        plan = returned.stream.plan
        check_size(plan, output, cap)
        task = bar.add_task("writing", total=plan.tokens)
        with DumpWriter(output, plan, overwrite=overwrite, cap=cap) as writer:
            for sample in returned.stream.samples:
                writer.add(sample)
                bar.advance(task, len(sample.token_ids))
    for message in returned.messages:
        say(message)
    specs = next(iter(plan.tensors.values()))
    what = f"{plan.facts.slots} slots" if plan.facts.slots else specs[0].name
    rows = " + ".join(f"{count} {phase}" for phase, count in returned.phases.items())
    draft = plan.facts.draft
    accept = None if draft is None else draft.spec_accept_length
    print(
        f"{output}: 1 rank, {what} of {specs[0].width} {specs[0].dtype}, {rows} tokens, {human(planned_bytes(plan))}, "
        f"accept length {'unknown' if accept is None else f'{accept:.2f}'}\n{plan.facts.source.detail}"
    )


def _model(path: Any, tokens_from: Path | None) -> Model:
    """What is known of the target: its own config where the server's path is one here, else what the dump says."""
    from eagle_parity.dump import open_dump
    from eagle_parity.readers import read_model

    if isinstance(path, str) and Path(path).is_dir():
        try:
            return read_model(Path(path))
        except EagleParityError as error:
            say(f"warning: {error.message}")
    name = Path(path).name if isinstance(path, str) else None
    known = Model() if tokens_from is None else open_dump(tokens_from).facts.model
    return Model(
        name=name,
        architecture=known.architecture,
        hidden_size=known.hidden_size,
        num_layers=known.num_layers,
        vocab_size=known.vocab_size,
    )


def _declared_ids(path: Any) -> tuple[int, ...] | None:
    """The ids in the draft's config where SGLang reads them, if the config is on this machine."""
    from eagle_parity.draft.config import NAME, read_config

    if not isinstance(path, str) or not (Path(path) / NAME).is_file():
        return None
    try:
        ids, place = read_config(Path(path) / NAME).declared_ids()
    except EagleParityError as error:
        say(f"warning: {error.message}")
        return None
    return ids if place == "eagle_config" else None
