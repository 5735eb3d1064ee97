"""How fast and how small compare is: against SGLang's own comparator, a plain cosine loop, and reading the bytes.

    python benchmarks/compare.py [--repeat 5] [--rows 512] [--grow 10] [--device cuda]

Makes a serving dump of 8 ranks x 12 tensors x [512, 7168] bf16 (replicated, 3 slots and 9 boundaries) and its training
dump in a temporary directory, and the same tensors as files of SGLang's dumper. Then, in turns and each time in a fresh
process, with 2 threads and a warm page cache:

    comparator   sglang.srt.debug_utils.comparator on its own format, its default settings, ranks declared replicated
    plain loop   safetensors' memory-mapped tensors, .float(), torch's cosine_similarity of each rank to training
    compare      eagle-parity: open both dumps, study, diagnose
    core         eagle-parity's measuring alone: rank equality, distances to every boundary, all metrics of each tensor
    read         both dumps' bytes into one buffer a thread

Times leave imports out; `cpu` is the least user and system time of a run. The memory is ru_maxrss. `--grow N` repeats
compare on a dump with N times the rows, whose ranks are links to one file: the memory must not grow. `--device cuda` is
benchmarks/device.py.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# torch is imported by the child processes only: ru_maxrss of a child starts at what its parent used.

THREADS = 2
RANKS, TENSORS, WIDTH = 8, 12, 7168
SLOTS = (2, 5, 9)
MASSIVE = (17, 4099)  # channels with 100 times the others' size in every token, as trained models have


def names() -> list[tuple[str, int]]:
    """The serving tensors and the boundary that each of them holds."""
    rest = [k for k in range(TENSORS) if k not in SLOTS]
    return [(f"slot.{j}", k) for j, k in enumerate(SLOTS)] + [(f"boundary.{k}", k) for k in rest]


# ------------------------------------------------------------------------------------------------------- the data


def make(where: Path, rows: int, linked: bool) -> None:
    """Both dumps, and unless `linked` SGLang's format as well."""
    import torch

    from eagle_parity.dump import DumpWriter
    from eagle_parity.records import Engine, Facts, Model, Plan, Sample, Source, TensorSpec

    model = Model("random", "DeepseekV3ForCausalLM", WIDTH, TENSORS, 1000, "bfloat16")
    ranks = 1 if linked else RANKS
    engine = Engine("sglang", "0.5.23", RANKS, 1, 1, 1)
    training = Plan(
        Facts("training", Source("hf"), model, boundaries=tuple(range(TENSORS)), slot_boundaries=SLOTS),
        rows,
        {0: [TensorSpec(f"boundary.{k}", WIDTH, "BF16") for k in range(TENSORS)]},
    )
    kept = tuple(k for name, k in names() if name.startswith("boundary"))
    serving = Plan(
        Facts("serving", Source("sglang"), model, engine, boundaries=kept, slots=len(SLOTS)),
        rows,
        {r: [TensorSpec(name, WIDTH, "BF16") for name, _ in names()] for r in range(ranks)},
    )
    g = torch.Generator().manual_seed(0)
    constant = torch.zeros(WIDTH)
    constant[list(MASSIVE)] = 100.0
    whole: dict[str, list[torch.Tensor]] = {}
    with DumpWriter(where / "training", training) as ours, DumpWriter(where / "serving", serving) as theirs:
        for begin in range(0, rows, 512):
            count = min(512, rows - begin)
            stream = torch.randn(count, WIDTH, generator=g) + constant
            states = [stream]
            for _ in range(TENSORS - 1):
                stream = stream + 0.3 * torch.randn(count, WIDTH, generator=g)
                states.append(stream)
            noise = torch.randn(count, WIDTH, generator=g)
            held = {name: (states[k] * 1 if k == 0 else states[k] + 0.004 * noise).bfloat16() for name, k in names()}
            ids = torch.randint(0, 1000, (count,), generator=g).tolist()
            truth = {f"boundary.{k}": state.bfloat16() for k, state in enumerate(states)}
            row = (f"p{begin}", ids, range(count))
            ours.add(Sample(*row, {0: truth}))
            theirs.add(Sample(*row, dict.fromkeys(range(ranks), held)))
            if not linked:
                for name, k in names():
                    whole.setdefault(name, []).append(held[name])
                    whole.setdefault(f"truth {name}", []).append(truth[f"boundary.{k}"])
    for rank in range(1, RANKS if linked else 1):
        os.link(where / "serving" / "rank-0000.safetensors", where / "serving" / f"rank-{rank:04d}.safetensors")
    for name, parts in whole.items():
        tensor = torch.cat(parts)
        if name.startswith("truth "):
            save_sglang(where / "sglang-training", name.removeprefix("truth "), 0, tensor, "t h")
        else:
            for rank in range(RANKS):
                save_sglang(where / "sglang-serving", name, rank, tensor, "t h # tp:replicated")


def save_sglang(where: Path, name: str, rank: int, tensor: Any, dims: str) -> None:
    """One file as SGLang 0.5.23's dumper writes it (debug_utils/dumper.py, _dump_single)."""
    import torch

    where.mkdir(exist_ok=True)
    tags = {"step": 0, "rank": rank, "dump_index": [n for n, _ in names()].index(name) + 1, "name": name}
    meta = tags | {"dims": dims}
    if "tp:" in dims:
        meta["sglang_parallel_info"] = {"tp_rank": rank, "tp_size": RANKS}
    file = where / ("___".join(f"{k}={v}" for k, v in tags.items()) + ".pt")
    torch.save({"value": tensor.clone(), "meta": meta}, file)


# ------------------------------------------------------------------------------------------------- the contenders


def prepare(kind: str, where: Path) -> Callable[[], object]:
    """Do a contender's imports and return what is timed."""
    return {
        "comparator": comparator,
        "plain loop": plain_loop,
        "compare": whole_compare,
        "core": core,
        "read": read,
        "nothing": lambda _: lambda: None,
    }[kind](where)


def comparator(where: Path) -> Callable[[], object]:
    try:
        from sglang.srt.debug_utils.comparator import entrypoint
    except ImportError as error:  # polars is not among what SGLang is installed with here
        print(f"not available ({error}): pip install sglang==0.5.23 polars", file=sys.stderr)
        sys.exit(NOT_AVAILABLE)
    sides = ["--baseline-path", str(where / "sglang-training"), "--target-path", str(where / "sglang-serving")]
    arguments = entrypoint.parse_args([*sides, "--report-path", str(where / "report.jsonl")])

    def timed() -> None:
        code = entrypoint.run(arguments)
        summary = [json.loads(line) for line in (where / "report.jsonl").read_text().splitlines()][-1]
        assert code == 0, summary
        assert summary["passed"] == TENSORS, summary

    return timed


def plain_loop(where: Path) -> Callable[[], object]:
    import safetensors
    import torch

    def timed() -> None:
        training = safetensors.safe_open(where / "training" / "rank-0000.safetensors", "pt")
        ranks = [safetensors.safe_open(f, "pt") for f in sorted((where / "serving").glob("rank-*.safetensors"))]
        for name, k in names():
            truth = training.get_tensor(f"boundary.{k}").float()
            for rank in ranks:
                cosine = torch.nn.functional.cosine_similarity(rank.get_tensor(name).float(), truth, dim=-1)
                assert cosine.median() > 0.99, (name, cosine)

    return timed


def whole_compare(where: Path) -> Callable[[], object]:
    from eagle_parity.diagnosis.diagnose import diagnose
    from eagle_parity.diagnosis.study import study
    from eagle_parity.dump import open_dump

    def timed() -> None:
        report = diagnose(study(open_dump(where / "training"), open_dump(where / "serving")))
        assert report.verdict == "pass", report.findings
        assert len(report.rows) == TENSORS

    return timed


def core(where: Path) -> Callable[[], object]:
    import numpy as np

    from eagle_parity.alignment import matching
    from eagle_parity.alignment.channels import channels_of, massive_channels
    from eagle_parity.alignment.ranks import begin_ranks
    from eagle_parity.alignment.views import rank_view
    from eagle_parity.dump import open_dump
    from eagle_parity.metrics.threads import one_thread

    @one_thread()
    def timed() -> None:
        training, serving = open_dump(where / "training"), open_dump(where / "serving")
        rows = np.arange(len(serving.tokens.token_ids))
        ranks = begin_ranks(serving, [name for name, _ in names()], rows, WIDTH)
        views = matching.training_views(training)
        first = {name: rank_view(serving, 0, name) for name, _ in names()}
        probe = rows[matching.sample(len(rows), matching.SAMPLE_ROWS)]
        channels = {boundary: channels_of(view, probe) for boundary, view in views.items()}
        ours = {name: channels_of(view, probe) for name, view in first.items()}
        massive = massive_channels(channels.values(), WIDTH)
        assert massive.tolist() == list(MASSIVE)
        references = matching.References(dict(names()), ours, channels)
        matches = matching.match(first, views, rows, rows, references=references, left_out=massive, hidden=WIDTH)
        assert all(found.equal for found in ranks().values())
        assert [matches[name].best for name, _ in names()] == [k for _, k in names()]
        for name, _ in names():
            compared = matches[name].comparison
            assert compared is not None
            assert np.median(compared.cosine) > 0.99

    return timed


def read(where: Path) -> Callable[[], object]:
    import torch

    from eagle_parity.dump import open_dump  # the same imports as compare: only what they do is compared

    del torch, open_dump
    from concurrent.futures import ThreadPoolExecutor

    files = sorted(f for side in ("training", "serving") for f in (where / side).glob("rank-*.safetensors"))

    def fill(file: Path) -> int:
        buffer = bytearray(2**20)
        total = 0
        with file.open("rb", buffering=0) as handle:
            while count := handle.readinto(buffer):
                total += count
        return total

    def timed() -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            assert sum(pool.map(fill, files)) == size(where)

    return timed


# ---------------------------------------------------------------------------------------------------- the running

NOT_AVAILABLE = 69


def size(where: Path) -> int:
    """Bytes of both dumps' rank files."""
    return sum(f.stat().st_size for side in ("training", "serving") for f in (where / side).glob("rank-*.safetensors"))


def child(kind: str, where: Path) -> None:
    """One measurement, printed as JSON."""
    import gc
    import resource

    import torch

    torch.set_num_threads(THREADS)
    timed = prepare(kind, where)
    gc.collect()
    gc.freeze()  # what the imports left is part of them: a collection that meets it takes as long as all the sums
    before = resource.getrusage(resource.RUSAGE_SELF)
    stdout = os.dup(1)
    os.dup2(2, 1)
    begin = time.perf_counter()
    timed()
    seconds = time.perf_counter() - begin
    os.dup2(stdout, 1)
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(json.dumps({"seconds": seconds, "cpu": cpu, "peak": after.ru_maxrss / 1024}))


def measure(kind: str, where: Path) -> dict[str, float] | None:
    """Run a contender once in a fresh process; None when it is not installed."""
    done = subprocess.run(
        [sys.executable, __file__, "--child", kind, str(where)],
        env=os.environ | {"OMP_NUM_THREADS": str(THREADS)},
        capture_output=True,
        text=True,
    )
    if done.returncode == NOT_AVAILABLE:
        print(f"{kind}: {done.stderr.strip().splitlines()[-1]}")
        return None
    if done.returncode:
        sys.exit(f"{kind} failed:\n{done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def build(where: Path, rows: int, *, linked: bool) -> Path:
    where.mkdir()
    arguments = ["--make", str(rows), str(int(linked)), str(where)]
    subprocess.run([sys.executable, __file__, *arguments], check=True)
    for file in where.rglob("*"):  # warm the page cache
        if file.is_file():
            with file.open("rb", buffering=0) as handle:
                buffer = bytearray(2**20)
                while handle.readinto(buffer):
                    pass
    return where


def table(found: dict[str, list[dict[str, float]]], nbytes: int) -> None:
    """One line a contender; the last columns are how many times the seconds of compare and core it takes.

    By the medians, and in brackets by the shortest processor times: these hardly depend on what else runs.
    """
    seconds = {kind: statistics.median(run["seconds"] for run in runs) for kind, runs in found.items()}
    cpu = {kind: min(run["cpu"] for run in runs) for kind, runs in found.items()}
    print(f"\n{'':12} {'median s':>9} {'min s':>7} {'cpu s':>7} {'GB/s':>6} {'peak MiB':>9}", end="")
    print(f" {'/ compare':>14} {'/ core':>14}")
    for kind, runs in found.items():
        ratios = [
            f"{seconds[kind] / seconds[base]:.1f} ({cpu[kind] / cpu[base]:.1f})" if base in seconds else ""
            for base in ("compare", "core")
        ]
        print(
            f"{kind:12} {seconds[kind]:9.3f} {min(run['seconds'] for run in runs):7.3f} {cpu[kind]:7.3f} "
            f"{nbytes / seconds[kind] / 1e9:6.1f} {max(run['peak'] for run in runs):9.0f} "
            f"{ratios[0]:>14} {ratios[1]:>14}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--grow", type=int, default=10, help="how many times the rows; 0: leave it out")
    parser.add_argument("--only", nargs="*", help="contenders to run")
    parser.add_argument("--device", help="cuda: the core metrics on tensors that lie there, and nothing else")
    arguments = parser.parse_args()
    if arguments.device:
        options = ["--device", arguments.device, "--repeat", str(arguments.repeat)]
        sys.exit(subprocess.run([sys.executable, Path(__file__).with_name("device.py"), *options]).returncode)
    kinds = arguments.only or ["comparator", "plain loop", "compare", "core", "read"]
    with tempfile.TemporaryDirectory(prefix="eagle-parity-benchmark-") as folder:
        base = Path(folder)
        where = build(base / "one", arguments.rows, linked=False)
        nbytes = size(where)
        print(f"{RANKS} ranks x {TENSORS} tensors x [{arguments.rows}, {WIDTH}] bf16 and training", end=": ")
        print(f"{nbytes / 2**20:.0f} MiB")
        found: dict[str, list[dict[str, float]]] = {}
        for _ in range(arguments.repeat):
            for kind in list(kinds):
                run = measure(kind, where)
                if run is None:
                    kinds.remove(kind)
                else:
                    found.setdefault(kind, []).append(run)
        table(found, nbytes)
        nothing = measure("nothing", where)
        if nothing is not None:
            print(f"(imports of torch alone: {nothing['peak']:.0f} MiB)")
        if arguments.grow:
            where = build(base / "grown", arguments.rows * arguments.grow, linked=True)
            run = measure("compare", where)
            assert run is not None
            print(
                f"compare on {arguments.grow} times the rows ({size(where) / 2**30:.1f} GiB, ranks are links to one "
                f"file): {run['seconds']:.2f} s, {run['peak']:.0f} MiB"
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], Path(sys.argv[3]))
    elif sys.argv[1:2] == ["--make"]:
        make(Path(sys.argv[4]), int(sys.argv[2]), bool(int(sys.argv[3])))
    else:
        main()
