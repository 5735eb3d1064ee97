"""`dump training --from`: training files become a dump, and a dump becomes a smaller one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle_parity.dump import DumpWriter, open_dump
from eagle_parity.errors import InputError, UsageError
from eagle_parity.readers import (
    capture_training,
    is_own_dump,
    open_training,
    read_model,
    stream_capture,
    stream_training,
)
from eagle_parity.records import Stream
from tests.readers.samples import CASES, ROOT, TARGET, Case

MODEL = read_model(TARGET)


def write(path: Path, stream: Stream) -> Path:
    with DumpWriter(path, stream.plan) as writer:
        for sample in stream.samples:
            writer.add(sample)
    return path


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.path)
def test_a_dump_holds_what_the_files_hold(case: Case, tmp_path: Path) -> None:
    training = open_training(case.root, model=MODEL).finite()
    dump = open_dump(write(tmp_path / "dump", stream_training(training)))
    capture = capture_training(training)
    assert dump.facts.boundaries == capture.facts.boundaries
    assert dump.facts.slot_boundaries == capture.facts.slot_boundaries
    assert dump.facts.model == capture.facts.model
    assert dump.facts.source.pipeline == case.format
    assert dump.tokens.token_ids.tolist() == capture.tokens.token_ids.tolist()
    assert dump.tokens.positions.tolist() == capture.tokens.positions.tolist()
    assert dump.tokens.requests == capture.tokens.requests
    assert (dump.tokens.loss_mask is None) == (capture.tokens.loss_mask is None)
    assert dump.names(0) == capture.names(0)
    for name in dump.names(0):
        assert dump.spec(0, name) == capture.spec(0, name)
        assert torch.equal(dump.read(0, name, 0, training.tokens), capture.read(0, name, 0, training.tokens))


def test_assumptions_go_into_the_manifest(tmp_path: Path) -> None:
    training = open_training(ROOT / "specforge/hidden_states", model=MODEL)
    dump = open_dump(write(tmp_path / "dump", stream_training(training)))
    assert dump.facts.source.detail is not None
    assert dump.facts.source.detail.startswith("assumed: the slots are boundaries 2, 4, 5")
    assert capture_training(training).assumptions == training.assumptions


def test_some_boundaries_only(tmp_path: Path) -> None:
    training = open_training(ROOT / "specforge/hidden_states", model=MODEL)
    dump = open_dump(write(tmp_path / "dump", stream_training(training, (4, "final.norm"))))
    assert dump.names(0) == ("boundary.4", "final.norm")
    assert dump.facts.slot_boundaries == (2, 4, 5)
    with pytest.raises(UsageError, match=r"stores boundary.2, boundary.4, boundary.5, final.norm, not boundary.7"):
        stream_training(training, (7,))


def test_a_dump_from_a_dump(tmp_path: Path) -> None:
    first = open_dump(write(tmp_path / "a", stream_training(open_training(ROOT / "nemo"))))
    assert is_own_dump(tmp_path / "a")
    assert not is_own_dump(ROOT / "nemo")
    with pytest.raises(InputError, match="is an eagle-parity dump, no training files"):
        open_training(tmp_path / "a")
    second = open_dump(write(tmp_path / "b", stream_capture(first, (5,), limit=2, seed=1)))
    assert second.names(0) == ("boundary.5",)
    assert len(second.tokens.requests) == 2
    for request in second.tokens.requests:
        source = next(r for r in first.tokens.requests if r.id == request.id)
        assert torch.equal(
            second.read(0, "boundary.5", request.begin, request.end),
            first.read(0, "boundary.5", source.begin, source.end),
        )
