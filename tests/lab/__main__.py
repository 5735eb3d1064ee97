"""Run the whole lab: print the confusion matrix, write docs/fault-lab.md and docs/catalogue.md.

`python -m tests.lab [--fast]`; the fast set writes nothing. `python -m tests.lab --live [SERVER...]` breaks real
servers instead, all of them or those named, and writes the document's live part.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.lab import catalogue, live_page, page
from tests.lab.live_runs import SERVERS
from tests.lab.matrix import run
from tests.lab.sets import everything, fast
from tests.lab.sources import ROOT

DOCUMENT = ROOT / "docs" / "fault-lab.md"


def main(words: list[str]) -> int:
    torch.set_num_threads(1)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="eagle-parity-lab-") as place:
        code = live(words[1:], Path(place)) if words[:1] == ["--live"] else made(Path(place), "--fast" in words)
    print(f"{time.monotonic() - begin:.0f} s", file=sys.stderr)
    return code


def made(work: Path, quick: bool) -> int:
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        sources = fast() if quick else everything(work)
    lab = run(sources, work / "pair")
    text = page.render(lab, sources)
    print(text)
    if not quick:
        _, live_part = live_page.split(DOCUMENT.read_text())
        DOCUMENT.write_text(f"{text}\n{live_part}" if live_part else text)
        (ROOT / "docs" / "catalogue.md").write_text(catalogue.render())
    return 0


def live(names: list[str], work: Path) -> int:
    unknown = set(names) - set(SERVERS)
    if unknown:
        print(f"no server {', '.join(sorted(unknown))}; there are: {', '.join(SERVERS)}", file=sys.stderr)
        return 2
    for name in names or list(SERVERS):
        runs = []
        for found in SERVERS[name][1](work / name):
            print(f"{'ok  ' if found.right else 'MISS'} {found.fault}: {found.outcome}", flush=True)
            runs.append(found)
        rest, live_part = live_page.split(DOCUMENT.read_text())
        DOCUMENT.write_text(f"{rest}\n{live_page.render(live_part, {name: runs})}")
    return 0


sys.exit(main(sys.argv[1:]))
