"""Files mutilated at random: whatever happens to a file, the answer is a result or a clean error, never a crash.

2,520 mutations: 12 kinds of file x 210. Seeds are fixed, so a failure can be repeated.
"""

from __future__ import annotations

import gzip
import random
import shutil
import warnings
from collections import Counter
from pathlib import Path

import pytest

from eagle_parity.errors import EagleParityError
from eagle_parity.readers import capture_training, open_training, read_model, stream_training
from tests.readers.samples import ROOT, TARGET

MODEL = read_model(TARGET)
ROUNDS = 210
# Directory, the file to mutilate, and whether it is the sample itself (a side file must not hide the states).
FILES = (
    ("specforge/hidden_states/rows_2-4", "data_2.ckpt"),
    ("specforge/hidden_states_gz/rows_0-2", "data_0.ckpt.gz"),
    ("speculators/hidden_states_fp8", "hs_2.safetensors"),
    ("speculators/vllm_connector_raw", "cmpl-0123456789abcdef-0.safetensors"),
    ("speculators-v1", "data_2.pt"),
    ("speculators-v1", "data_config.json"),
    ("modelopt/hf_eagle_default", "c2.pt"),
    ("angelslim/rows_2-4", "data_2.ckpt"),
    ("baldeagle/0", "data_2.ckpt"),
    ("torchspec/train_dump", "step1_rank0_b0.pt"),
    ("nemo", "shard-000001.safetensors"),
    ("nemo", "manifest.json"),
)


def mutilated(data: bytes, draw: random.Random) -> bytes:
    """One to four wounds; most of them in the first and last bytes, where the structure is."""
    out = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        if not out:
            break
        zone = draw.choice((min(1200, len(out)), len(out)))
        at = draw.randrange(zone) if draw.random() < 0.7 else len(out) - 1 - draw.randrange(zone)
        kind = draw.randrange(8)
        span = draw.choice((1, 2, 8, 64, 700))
        if kind == 0:
            out[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            out[at] = draw.randrange(256)
        elif kind == 2:
            del out[at:]
        elif kind == 3:
            del out[at : at + span]
        elif kind == 4:
            out[at:at] = draw.randbytes(span)
        elif kind == 5:
            out[at : at + span] = bytes(len(out[at : at + span]))
        elif kind == 6:
            out[at : at + span] = b"\xff" * len(out[at : at + span])
        else:
            # A digit becomes another one: shapes, offsets and sizes that are well formed and wrong.
            digits = [i for i in range(max(0, at - 200), min(len(out), at + 200)) if 48 <= out[i] < 58]
            if digits:
                out[draw.choice(digits)] = 48 + draw.randrange(10)
    return bytes(out)


def read_everything(path: Path) -> None:
    training = open_training(path, model=MODEL).finite()
    capture = capture_training(training)
    for name in capture.names(0):
        capture.read(0, name, 0, capture.length(0, name))
    for sample in stream_training(training).samples:
        assert len(sample.token_ids) == len(sample.positions)


@pytest.mark.parametrize(("folder", "name"), FILES, ids=lambda value: value)
def test_only_clean_errors(tmp_path: Path, folder: str, name: str) -> None:
    work = tmp_path / "work"
    shutil.copytree(ROOT / folder, work)
    side_file = name.endswith(".json")
    if not side_file:
        # Alone, so that there is no good file to fall back on.
        for other in work.iterdir():
            if other.name != name and other.suffix != ".json":
                other.unlink()
    original = (work / name).read_bytes()
    draw = random.Random(f"{folder}/{name}")
    outcomes: Counter[str] = Counter()
    unclear: list[str] = []
    for number in range(ROUNDS):
        data = mutilated(original, draw)
        if name.endswith(".gz") and number % 2:
            # Wounds inside the stream, which the checksum of gzip would otherwise catch first.
            data = gzip.compress(mutilated(gzip.decompress(original), draw), compresslevel=1)
        (work / name).write_bytes(data)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                read_everything(work)
            outcomes["read"] += 1
        except EagleParityError as error:
            outcomes["refused"] += 1
            unclear += [] if str(work) in error.message and error.fix else [error.message]
    assert unclear == []
    # The wounds must hurt, and not all of them: or nothing was tested.
    assert outcomes["refused"] >= ROUNDS // 20 or side_file, outcomes
    assert outcomes["read"] >= ROUNDS // 20, outcomes
