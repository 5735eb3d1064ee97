"""`eagle-parity dump serving --from PATH`: what a server's own debugging aids wrote becomes a dump."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from eagle_parity.cli.output import progress, say

if TYPE_CHECKING:
    from eagle_parity.readers import Known


def convert(
    path: Path, tokens_from: Path | None, output: Path, limit: int | None, cap: int, *, overwrite: bool
) -> None:
    """Write a serving dump from a directory of SGLang's dumper, of its tensor dump, or of vLLM's connector."""
    from eagle_parity.dump import DumpWriter, human, planned_bytes
    from eagle_parity.readers import open_served

    served = open_served(path, None if tokens_from is None else _known(tokens_from), limit=limit)
    plan = served.stream.plan
    with progress() as bar, DumpWriter(output, plan, overwrite=overwrite, cap=cap) as writer:
        task = bar.add_task("writing", total=plan.tokens)
        for sample in served.stream.samples:
            writer.add(sample)
            bar.advance(task, len(sample.token_ids))
    for note in served.notes:
        say(f"note: {note}")
    specs = next(iter(plan.tensors.values()))
    kinds = ", ".join(f"{sum(s.name.startswith(kind) for s in specs)} {what}" for kind, what in _KINDS)
    print(
        f"{output}: {len(plan.tensors)} ranks, {kinds} of {specs[0].width} {specs[0].dtype}, {plan.tokens} tokens, "
        f"{human(planned_bytes(plan))}\n{served.title}"
    )


_KINDS = (("slot", "slots"), ("boundary", "boundaries"))


def _known(tokens_from: Path) -> Known:
    from eagle_parity.captures.replay import replay
    from eagle_parity.dump import open_dump
    from eagle_parity.readers import Known

    dump = open_dump(tokens_from)
    found = replay(dump.tokens)
    for sentence in found.skipped:
        say(f"warning: {tokens_from}: {sentence}")
    trained = dump.facts.slot_boundaries
    return Known(
        str(tokens_from),
        tuple((sequence.id, tuple(sequence.token_ids)) for sequence in found.sequences),
        dump.facts.model.num_layers,
        None if trained is None else len(trained),
    )
