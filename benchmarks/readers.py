"""100,000 training files, 64 of them sampled: seconds and peak memory of opening, checking values, compare's reads.

    python benchmarks/readers.py [--files 100000] [--tokens 256] [--hidden 7168] [--limit 64]

The files are hard links to 64 different ones of three slots and a last state (SpecForge's layout, which is mapped; and
the same inside gzip, which is not), so that they need little room. Each step runs in a process of its own; its peak is
what the kernel reports (VmHWM, mapped pages included; ru_maxrss would count the parent's).
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

SOURCES = 64
STEPS = ("import", "open", "finite", "read")


def make(root: Path, files: int, tokens: int, hidden: int, suffix: str) -> int:
    """Write the sources and their links; the size of one file."""
    links = root / "links"
    size = 0
    for i in range(SOURCES):
        draw = torch.Generator().manual_seed(i)
        sample = {
            "input_ids": torch.randint(1, 163_840, (tokens,), generator=draw),
            "loss_mask": torch.ones(tokens, dtype=torch.int64),
            "aux_hidden_state": torch.randn(1, tokens, 3 * hidden, generator=draw).bfloat16(),
            "hidden_state": torch.randn(1, tokens, hidden, generator=draw).bfloat16(),
        }
        source = root / f"source_{i}.ckpt"
        torch.save(sample, source)
        if suffix.endswith(".gz"):
            packed = source.with_suffix(".gz")
            with source.open("rb") as plain, gzip.open(packed, "wb", compresslevel=1) as out:
                shutil.copyfileobj(plain, out)
            source.unlink()
            source = packed
        size = source.stat().st_size
        for number in range(i, files, SOURCES):
            folder = links / f"rows_{number // 2000 * 2000}-{number // 2000 * 2000 + 2000}"
            folder.mkdir(parents=True, exist_ok=True)
            os.link(source, folder / f"data_{number}{suffix}")
    return size


def step(name: str, path: str, limit: int) -> None:
    """One measurement, in this process; prints JSON."""
    from eagle_parity.readers import capture_training, open_training

    begin = time.perf_counter()
    result: dict[str, object] = {}
    if name != "import":
        training = open_training(path, limit=limit, num_layers=61)
        result = {"files": training.files, "units": len(training.units), "tokens": training.tokens}
        if name == "finite":
            training.finite(strict=True)
        if name == "read":
            capture = capture_training(training)
            for row in range(0, training.tokens, 512):
                for tensor in capture.names(0):
                    capture.read(0, tensor, row, min(row + 512, training.tokens))
    result |= {
        "seconds": time.perf_counter() - begin,
        "mib": int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) / 1024,
    }
    print(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--limit", type=int, default=64)
    parser.add_argument("--step", choices=STEPS)
    parser.add_argument("--path")
    options = parser.parse_args()
    if options.step:
        step(options.step, options.path, options.limit)
        return
    for suffix in (".ckpt", ".ckpt.gz"):
        with tempfile.TemporaryDirectory() as root:
            size = make(Path(root), options.files, options.tokens, options.hidden, suffix)
            print(f"{options.files:,} files {suffix}, {size / 2**20:.1f} MiB each, {options.limit} sampled")
            base = 0.0
            for name in STEPS:
                command = [sys.executable, __file__, "--step", name, "--path", f"{root}/links"]
                command += ["--limit", str(options.limit)]
                done = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                base = base or done["mib"]
                held = f"{done.get('units', '-')} samples, {done.get('tokens', '-')} tokens"
                print(
                    f"  {name:7} {done['seconds']:6.2f} s   peak {done['mib']:5.0f} MiB "
                    f"(+{done['mib'] - base:.0f} over imports)   {held}"
                )


if __name__ == "__main__":
    main()
