"""Run the whole lab: print the confusion matrix, write docs/fault-lab.md and docs/catalogue.md.

`python -m tests.lab [--fast]`; the fast set writes nothing.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.lab import catalogue, page
from tests.lab.matrix import run
from tests.lab.sets import everything, fast
from tests.lab.sources import ROOT


def main() -> int:
    torch.set_num_threads(1)
    quick = "--fast" in sys.argv[1:]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            sources = fast() if quick else everything(work)
        lab = run(sources, work / "pair")
    text = page.render(lab, sources)
    print(text)
    print(f"{time.monotonic() - begin:.0f} s", file=sys.stderr)
    if not quick:
        (ROOT / "docs" / "fault-lab.md").write_text(text)
        (ROOT / "docs" / "catalogue.md").write_text(catalogue.render())
    return 0


sys.exit(main())
