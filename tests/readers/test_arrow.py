"""The arrow data set beside speculators' states: the loss mask where pyarrow is there, a note where it is not."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any

import pytest

from eagle_parity.readers import arrow, open_training
from tests.readers.samples import ROOT

PREPARED = ROOT / "speculators/prepared"


@pytest.fixture(autouse=True)
def _fresh() -> None:
    arrow._table.cache_clear()


def test_without_pyarrow_the_states_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    training = open_training(PREPARED)
    assert training.lengths == (40, 58, 39)
    assert training.has_mask is False
    assert f"{arrow.NO_PYARROW} (3 of 3 samples)" in training.notes


def test_loss_masks_by_row() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    training = open_training(PREPARED)
    assert training.has_mask is True
    with pyarrow.memory_map(str(PREPARED / "data-00000-of-00001.arrow")) as mapped:
        table = pyarrow.ipc.open_stream(mapped).read_all()
    for i in range(3):
        sample = training.load(i)
        assert sample.token_ids.tolist() == table["input_ids"][i].as_py()
        assert sample.loss_mask is not None
        assert sample.loss_mask.tolist() == table["loss_mask"][i].as_py()
        assert 0 < sample.loss_mask.sum() < sample.length


def test_rows_that_do_not_match(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    shutil.copytree(PREPARED, tmp_path / "p")
    states = tmp_path / "p/hidden_states"
    (states / "hs_0.safetensors").rename(states / "hs_7.safetensors")
    (states / "hs_1.safetensors").rename(states / "hs_0.safetensors")
    notes = open_training(tmp_path / "p").notes
    assert "the arrow data set has no such row, so the loss mask is unknown (1 of 3 samples)" in notes
    assert "the arrow data set has other token ids in that row, so the loss mask is unknown (1 of 3 samples)" in notes


@pytest.mark.parametrize("name", ["data-00000-of-00001.arrow", "state.json"])
def test_a_damaged_data_set_hides_no_states(tmp_path: Path, name: str) -> None:
    pytest.importorskip("pyarrow")
    shutil.copytree(PREPARED, tmp_path / "p")
    file = tmp_path / "p" / name
    file.write_bytes(file.read_bytes()[:100])
    training = open_training(tmp_path / "p")
    assert training.lengths == (40, 58, 39)
    assert any("the arrow data set cannot be read" in note for note in training.notes)
