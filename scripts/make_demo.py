"""Cut the recording that `eagle-parity demo` shows: `python scripts/make_demo.py [OUT]` (default: into the package).

Takes fixtures/recordings/h200 (dumps of a live server, see its PROVENANCE.md) and keeps every 112th of the 7168
channels of every tensor, with json and the safetensors library alone. All rows, ranks and requests stay as recorded.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parent.parent
RECORDING = ROOT / "fixtures" / "recordings" / "h200"
STEP = 112


def cut(source: Path, out: Path) -> None:
    """One dump with fewer channels."""
    out.mkdir(parents=True, exist_ok=True)
    manifest = json.loads((source / "manifest.json").read_text())
    manifest["model"]["hidden_size"] //= STEP
    manifest["model"]["name"] = f"random DeepSeek-V3, 8 layers, every {STEP}th channel"
    for path in sorted(source.glob("rank-*.safetensors")):
        save_file({name: t[:, ::STEP].contiguous() for name, t in load_file(path).items()}, out / path.name)
    (out / "tokens.safetensors").write_bytes((source / "tokens.safetensors").read_bytes())
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "src" / "eagle_parity" / "demo"
    for name in ("training", "serving", "serving-wrong"):
        cut(RECORDING / name, target / name)
