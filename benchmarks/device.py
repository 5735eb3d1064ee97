"""The core metrics on tensors that lie on a GPU: how near the speed of its memory.

    python benchmarks/device.py [--device cuda] [--rows 512 4096] [--repeat 20]      needs numpy and torch alone

The same tensors as benchmarks/compare.py: 8 ranks x 12 tensors x [rows, 7168] bf16 that are equal bit by bit, and 12
training boundaries. Timed, with the work all done (synchronised), medians and the shortest:

    read         every byte once, by a sum of 64-bit integers: what the memory gives in practice
    equality     seven ranks against the first, bit by bit
    metrics      means and massive channels from a sample, distances of all to all, every metric of each pair
    core         equality and metrics
    from host    core on blocks copied from pinned memory (cuda only): what the bus gives

The share is of the memory's nominal bandwidth. The same functions on the CPU must give the same numbers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))  # a machine that has the files and no installation

from eagle_parity.metrics.channels import MASSIVE
from eagle_parity.metrics.distances import padded, root_ratio
from eagle_parity.metrics.paired import PLAIN, add_tile, paired_sums, pairing, run_sums

RANKS, TENSORS, WIDTH = 8, 12, 7168
NOMINAL = {"H200": 4.8e12, "H100": 3.35e12, "A100": 2.0e12}  # bytes a second, from the vendor's data sheets
BLOCK = 512  # rows measured at once
SAMPLE = 128


def make(rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Serving [ranks, tensors, rows, W] and training [tensors, rows, W], bf16."""
    g = torch.Generator(device).manual_seed(0)
    training = torch.empty(TENSORS, rows, WIDTH, dtype=torch.bfloat16, device=device)
    serving = torch.empty(RANKS, TENSORS, rows, WIDTH, dtype=torch.bfloat16, device=device)
    for begin in range(0, rows, BLOCK):
        block = slice(begin, min(begin + BLOCK, rows))
        stream = torch.randn(block.stop - begin, WIDTH, generator=g, device=device)
        stream[:, [17, 4099]] += 100  # massive channels
        for k in range(TENSORS):
            training[k, block] = stream
            serving[:, k, block] = stream + 0.004 * torch.randn(stream.shape, generator=g, device=device)
            stream = stream + 0.3 * torch.randn(stream.shape, generator=g, device=device)
    return serving, training


def equality(serving: torch.Tensor) -> bool:
    """Whether all ranks are equal bit by bit."""
    bits = serving.view(torch.int64)
    differ = torch.zeros((), dtype=torch.bool, device=serving.device)
    for rank in bits[1:]:
        differ |= (rank != bits[0]).any()
    return not bool(differ)


def metrics(serving: torch.Tensor, training: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Relative L2 of all to all [n, m, rows] and the sums of the pairs [3, 4, n, rows]."""
    n, rows, width = serving.shape
    begins = torch.linspace(0, max(rows - 8, 0), min(SAMPLE, rows) // 8).long().unsqueeze(1) + torch.arange(8)
    probe = begins.flatten().clamp(max=rows - 1).to(serving.device)
    sample = torch.cat([serving[:, probe], training[:, probe]]).float()
    rms = sample[n:].square().mean(1).sqrt()
    massive = (rms > MASSIVE * rms.median(1, keepdim=True).values).any(0).nonzero().flatten()
    pairs = pairing(sample.mean(1).view(2, n, width), [massive] * n, massive, torch.float32)
    distances, sums = [], []
    states = torch.zeros(2 * n, min(BLOCK, rows), padded(width), device=serving.device)
    for begin in range(0, rows, BLOCK):
        ours, theirs = serving[:, begin : begin + BLOCK], training[:, begin : begin + BLOCK]
        part = states[:, : ours.shape[1]].contiguous()
        part[:n, :, :width], part[n:, :, :width] = ours, theirs
        runs = run_sums(n, n, part.shape[1], pairs)
        add_tile(part, n, pairs, runs, slice(None))
        found, of_pairs = paired_sums(runs, pairs, again)
        distances.append(root_ratio(found.difference_sq, found.theirs_sq.unsqueeze(0).expand_as(found.difference_sq)))
        sums.append(of_pairs)
    return torch.cat(distances, -1), torch.cat(sums, -1)


def again(tensor: int) -> torch.Tensor:
    """Rows that float32 could not hold, or that are near a state that is not theirs: there are none here."""
    raise AssertionError(f"tensor {tensor} had to be measured again")


def core(serving: torch.Tensor, training: torch.Tensor) -> None:
    """Both, with what compare would make of them."""
    assert equality(serving)
    distances, _ = metrics(serving[0], training)
    assert distances.median(-1).values.argmin(1).tolist() == list(range(TENSORS))


def agree(serving: torch.Tensor, training: torch.Tensor) -> float:
    """Largest relative difference of distances and plain sums to the same functions on the CPU, on some rows."""
    some = slice(0, SAMPLE)  # the sample of so many rows is all of them, wherever they are measured
    here = metrics(serving[0, :, some], training[:, some])
    there = metrics(serving[0, :, some].cpu(), training[:, some].cpu())
    plain = [(a[PLAIN] if a.dim() == 4 else a).cpu() for a in here], [a[PLAIN] if a.dim() == 4 else a for a in there]
    return max(float(((a - b).abs() / b.abs()).max()) for a, b in zip(*plain, strict=True))


def seconds(work: Callable[[], object], device: torch.device, repeat: int) -> list[float]:
    """Durations, after two rounds that do not count."""
    found = []
    for _ in range(repeat + 2):
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return found[2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, nargs="*", help="512 and 4096; 64 on a CPU")
    parser.add_argument("--repeat", type=int, default=20)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device here: --device cpu runs the same functions")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    nominal = next((speed for kind, speed in NOMINAL.items() if kind in name), None)
    print(f"{name}, torch {torch.__version__}, {RANKS} ranks x {TENSORS} tensors x [rows, {WIDTH}] bf16 and training")
    for rows in arguments.rows or ([512, 4096] if device.type == "cuda" else [64]):
        serving, training = make(rows, device)
        contenders: dict[str, tuple[Callable[[], object], int]] = {
            "read": (
                lambda s=serving, t=training: (s.view(torch.int64).sum() + t.view(torch.int64).sum()).item(),
                serving.nbytes + training.nbytes,
            ),
            "equality": (lambda s=serving: equality(s), serving.nbytes),
            "metrics": (lambda s=serving, t=training: metrics(s[0], t), 2 * training.nbytes),
            "core": (lambda s=serving, t=training: core(s, t), serving.nbytes + training.nbytes),
        }
        if device.type == "cuda" and rows <= 1024:
            pinned = serving.cpu().pin_memory(), training.cpu().pin_memory()
            contenders["from host"] = (
                lambda p=pinned: core(*(t.to(device, non_blocking=True) for t in p)),
                serving.nbytes + training.nbytes,
            )
        print(f"\n{rows} rows, {(serving.nbytes + training.nbytes) / 2**20:.0f} MiB; ", end="")
        print(f"the CPU's numbers within {agree(serving, training):.1e}")
        print(f"{'':12} {'median ms':>10} {'min ms':>8} {'GB/s':>7} {'share of nominal':>17} {'of read':>8}")
        first = None
        for kind, (work, nbytes) in contenders.items():
            found = seconds(work, device, arguments.repeat)
            speed = nbytes / statistics.median(found)
            first = first or speed
            share = f"{speed / nominal:.0%}" if nominal else ""
            print(f"{kind:12} {1e3 * statistics.median(found):10.3f} {1e3 * min(found):8.3f}", end=" ")
            print(f"{speed / 1e9:7.0f} {share:>17} {speed / first:8.0%}")
        del serving, training, contenders


if __name__ == "__main__":
    main()
