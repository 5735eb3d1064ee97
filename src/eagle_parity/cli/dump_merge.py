"""`eagle-parity dump merge`: join what the hosts of one server wrote into one dump."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eagle_parity.cli.options import MaxBytesOption, OutputOption, OverwriteOption
from eagle_parity.cli.output import say
from eagle_parity.errors import InputError

if TYPE_CHECKING:
    from eagle_parity.dump import Dump


def command(
    directories: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR...", help="Dumps of one run, and capture directories (or copies) that hold more of its ranks."
        ),
    ],
    output: OutputOption,
    allow_missing_ranks: Annotated[
        bool, typer.Option("--allow-missing-ranks", help="Write the dump although it lacks ranks of the run.")
    ] = False,
    max_bytes: MaxBytesOption = None,
    overwrite: OverwriteOption = False,
) -> None:
    """Join the ranks of one capture that lie in different places, as when the server spans hosts without a shared disk.

    On the host that is asked, `dump serving --allow-missing-ranks -o PART` records the ranks that it sees. Copy the
    capture directory of each other host beside it, and merge PART with the copies. Dumps of the same run are
    joined likewise.
    """
    from eagle_parity.captures.leftover import is_spool
    from eagle_parity.dump import DEFAULT_CAP, check_target, open_dump
    from eagle_parity.dump.merge import plan_merge, write_merge
    from eagle_parity.records import rank_names

    check_target(output, overwrite=overwrite)
    spools = [path for path in directories if is_spool(path)]
    dumps = [open_dump(path) for path in directories if path not in spools]
    if spools and not dumps:
        raise InputError(
            f"{spools[0]} is a capture directory, and no dump is named that says which run to take from it",
            fix="name also the dump that `dump serving --allow-missing-ranks` wrote",
        )
    output.absolute().parent.mkdir(parents=True, exist_ok=True)
    # Beside the output, so that it is the same disk that must hold both.
    with tempfile.TemporaryDirectory(prefix=f"{output.name}.", dir=output.absolute().parent) as scratch:
        parts = [*dumps]
        for number, spool in enumerate(spools):
            parts.append(_recorded(spool, dumps[0], Path(scratch) / str(number), max_bytes or DEFAULT_CAP))
        merged = plan_merge(parts)
        for warning in merged.warnings:
            say(f"warning: {warning}")
        missing = merged.facts.missing_ranks
        if missing:
            text = f"{rank_names(missing)} of the run {'is' if len(missing) == 1 else 'are'} in none of the directories"
            fix = "copy the capture directory of their host here and name it too, or write the dump without them: "
            if not allow_missing_ranks:
                raise InputError(text, fix=fix + "--allow-missing-ranks")
            say(f"warning: {text}")
        write_merge(merged, output, overwrite=overwrite, cap=max_bytes or DEFAULT_CAP)
    print(f"{output}: {len(merged.ranks)} ranks ({', '.join(map(str, merged.ranks))}) of {len(parts)} directories")


def _recorded(spool: Path, dump: Dump, path: Path, cap: int) -> Dump:
    """A capture directory's ranks of the dump's run, as a dump of their own."""
    from eagle_parity.captures.leftover import read_leftover
    from eagle_parity.dump import DumpWriter, open_dump

    recording = read_leftover(spool, dump)
    with DumpWriter(path, recording.stream.plan, cap=cap) as writer:
        for sample in recording.stream.samples:
            writer.add(sample)
        detail = recording.facts().source.detail
        # What the server said is in the dump already; of the slots, the records tell.
        writer.revise(replace(dump.facts, source=replace(dump.facts.source, detail=detail)))
    return replace(open_dump(path), path=str(spool))
