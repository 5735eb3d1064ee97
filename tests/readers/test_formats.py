"""Formats of which no sample file exists, made by hand from the facts: v0, EAGLE-1, prefix caches, one state."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from eagle_parity.readers import capture_training, open_training
from eagle_parity.readers.contents import open_contents


@pytest.fixture
def states() -> torch.Tensor:
    return torch.randn(5, 10, 8, generator=torch.Generator().manual_seed(1)).bfloat16()


def test_speculators_v0(tmp_path: Path, states: torch.Tensor) -> None:
    joined = torch.cat(list(states[:3]), dim=-1)
    ids = torch.arange(10)
    torch.save(
        {"input_ids": ids, "loss_mask": torch.ones(10), "hidden_state": joined, "target": states[3].clone()},
        tmp_path / "data_0.pt",
    )
    training = open_training(tmp_path, num_layers=61)
    assert training.format.name == "speculators-v0"
    assert [block.boundary for block in training.blocks] == [3, 31, 59, 61]
    sample = training.load(0)
    for block, expected in zip(sample.blocks, states, strict=False):
        assert torch.equal(block.read(0, 10), expected)


def test_baldeagle_for_eagle_1(tmp_path: Path, states: torch.Tensor) -> None:
    torch.save({"input_ids": torch.arange(10), "hidden_state": states[:1].clone()}, tmp_path / "data_0.ckpt")
    training = open_training(tmp_path)
    assert training.format.name == "baldeagle"
    assert [(block.role, block.boundary) for block in training.blocks] == [("last", "final.norm")]
    assert any("written for EAGLE-1, no slots" in note for note in training.notes)
    capture = capture_training(training)
    assert capture.facts.slot_boundaries is None
    assert torch.equal(capture.read(0, "final.norm", 0, 10), states[0])


def test_a_server_file_with_three_states(tmp_path: Path, states: torch.Tensor) -> None:
    """Old vLLM lost id n of DeepSeek and Kimi: what is last is then no last state, and nobody can tell from here."""
    stacked = states[:3].transpose(0, 1).contiguous()
    safetensors.torch.save_file({"hidden_states": stacked, "token_ids": torch.arange(10)}, tmp_path / "r.safetensors")
    training = open_training(tmp_path, num_layers=61)
    assert [(block.role, block.boundary) for block in training.blocks][:2] == [("slot 0", None), ("slot 1", None)]
    assert "the default for 61 layers does not fit 2 slots" in training.assumptions[0]


def test_one_state_a_token(tmp_path: Path, states: torch.Tensor) -> None:
    stacked = states[:1].transpose(0, 1).contiguous()
    safetensors.torch.save_file({"hidden_states": stacked, "token_ids": torch.arange(10)}, tmp_path / "r.safetensors")
    training = open_training(tmp_path, slots=(7,))
    assert [(block.role, block.boundary) for block in training.blocks] == [("slot 0", 7)]


def test_float32_and_float16_are_kept(tmp_path: Path, states: torch.Tensor) -> None:
    for dtype, name in ((torch.float32, "F32"), (torch.float16, "F16")):
        folder = tmp_path / name
        folder.mkdir()
        sample = {
            "input_ids": torch.arange(10),
            "hidden_states": states[3].to(dtype),
            "aux_hidden_states": torch.cat(list(states[:3]), dim=-1).to(dtype),
        }
        torch.save(sample, folder / "c0.pt")
        training = open_training(folder, num_layers=61)
        assert training.dtype == name
        assert capture_training(training).read(0, "boundary.2", 0, 10).dtype == dtype


def test_safetensors_whose_data_is_not_aligned(tmp_path: Path, states: torch.Tensor) -> None:
    """The format does not promise alignment, and old writers gave none."""
    file = tmp_path / "r.safetensors"
    stacked = states[:4].transpose(0, 1).contiguous()
    safetensors.torch.save_file({"hidden_states": stacked, "token_ids": torch.arange(10)}, file)
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    file.write_bytes((length + 1).to_bytes(8, "little") + data[8 : 8 + length] + b" " + data[8 + length :])
    assert torch.equal(open_contents(file).tensors["hidden_states"], stacked)
    assert torch.equal(open_contents(file).tensors["token_ids"], torch.arange(10))


def test_tensors_that_share_a_record(tmp_path: Path, states: torch.Tensor) -> None:
    """torch.save keeps views as views: speculators v1 stores input_ids as a slice of a longer tensor."""
    whole = torch.arange(20)
    torch.save(
        {"input_ids": whole[:10], "loss_mask": whole[10:], "hidden_states": list(states[:4])}, tmp_path / "data_0.pt"
    )
    sample = open_training(tmp_path, num_layers=61).load(0)
    assert sample.token_ids.tolist() == list(range(10))
    assert torch.equal(sample.blocks[2].read(0, 10), states[2])
