"""Run every benchmark beside this file, `python benchmarks/run.py [NAME …]`; each prints a table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main() -> int:
    here = Path(__file__)
    found = {path.stem: path for path in sorted(here.parent.glob("*.py")) if path != here}
    wanted = sys.argv[1:] or list(found)
    unknown = sorted(set(wanted) - set(found))
    if unknown:
        print(f"no benchmark {', '.join(unknown)}; there are {', '.join(found)}", file=sys.stderr)
        return 2
    codes = []
    for name in wanted:
        print(f"\n== {name}", flush=True)
        codes.append(subprocess.run([sys.executable, found[name]]).returncode)
    return max(codes, default=0)


if __name__ == "__main__":
    sys.exit(main())
