"""Large directories: only the chosen files are opened, and the choice is spread, repeatable and complete."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_parity.readers import open_training, registry, training
from eagle_parity.readers.files import spread, stratified
from tests.readers.samples import ROOT

ONE = ROOT / "specforge/hidden_states/rows_0-2/data_0.ckpt"


@given(total=st.integers(1, 5000), limit=st.integers(1, 200), seed=st.integers(0, 99))
def test_one_from_each_stretch(total: int, limit: int, seed: int) -> None:
    chosen = stratified(total, limit, seed)
    assert chosen == stratified(total, limit, seed)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == min(total, limit)
    if limit < total:
        for i, number in enumerate(chosen):
            assert i * total // limit <= number < (i + 1) * total // limit


def test_seeds_differ_and_none_takes_all() -> None:
    assert stratified(1000, 10, 0) != stratified(1000, 10, 1)
    assert stratified(5, None, 0) == [0, 1, 2, 3, 4]
    assert spread(10, 5) == [0, 2, 4, 6, 8]


def test_only_the_chosen_files_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(1000):
        folder = tmp_path / f"rows_{i // 100}"
        folder.mkdir(exist_ok=True)
        os.link(ONE, folder / f"data_{i}.ckpt") if i else folder.joinpath("data_0.ckpt").write_bytes(ONE.read_bytes())
    opened: list[Path] = []
    real = training.open_contents

    def counting(path: Path) -> object:
        opened.append(path)
        return real(path)

    monkeypatch.setattr(training, "open_contents", counting)
    monkeypatch.setattr(registry, "open_contents", counting)
    calls: list[tuple[int, int]] = []
    found = open_training(tmp_path, limit=16, seed=3, progress=lambda *step: calls.append(step))
    assert (found.files, found.available, found.samples) == (1000, 1000, 16)
    assert len(opened) <= 16 + 8
    assert calls == [(i + 1, 16) for i in range(16)]
    # All are one file, so one sample is left, and that is said.
    assert "15 samples repeat the token ids of another and are left out" in found.notes


def test_shards_are_sampled_by_sample() -> None:
    found = open_training(ROOT / "nemo", limit=2, seed=0)
    assert (found.files, found.available, found.samples) == (2, 3, 2)
    assert [unit.label for unit in found.units] in (
        ["shard-000000.safetensors#0", "shard-000000.safetensors#1"],
        ["shard-000000.safetensors#0", "shard-000001.safetensors#0"],
    )
