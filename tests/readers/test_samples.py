"""Every sample file: right tokens, every block bit for bit what its file holds, and the HF forward's right boundary."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from eagle_parity.readers import Training, capture_training, establish, open_training, read_model
from eagle_parity.readers.stored import Stored
from eagle_parity.readers.training import Unit
from tests.readers.conftest import Truth, reference
from tests.readers.samples import CASES, LAYERS, ROOT, TARGET, Case

MODEL = read_model(TARGET)
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.path)


def samples(training: Training) -> list[Stored]:
    return [training.load(i) for i in range(len(training.units))]


def prompt(case: Case, sample: Stored) -> list[int]:
    """What the target was given. NeMo loses the first token; it is what the other samples have there."""
    ids: list[int] = [1] * case.first + sample.token_ids.tolist()
    return ids + [0] * (case.padded - len(ids))


def distance(found: torch.Tensor, true: torch.Tensor) -> float:
    return float((found.double() - true.double()).norm() / true.double().norm())


@cases
def test_format_and_lengths(case: Case) -> None:
    training = open_training(case.root, model=MODEL)
    assert training.format.name == case.format
    assert training.lengths == case.lengths
    assert training.available == training.samples == len(case.lengths)
    assert training.problems == ()
    assert (training.width, training.dtype) == (64, "BF16")


@cases
def test_every_block_is_its_boundary_and_no_other(case: Case, truth: Truth) -> None:
    training = open_training(case.root, model=MODEL)
    for unit, sample in zip(training.units, samples(training), strict=True):
        states = truth(prompt(case, sample))
        span = slice(case.first, case.first + sample.length)
        assert sample.positions.tolist() == list(range(span.start, span.stop))
        assert len(sample.blocks) == len(case.blocks)
        for block, boundary, held in zip(sample.blocks, case.blocks, by_hand(case, unit, sample.length), strict=True):
            found = block.read(0, sample.length)
            assert found.dtype == torch.bfloat16
            assert torch.equal(found, held)
            distances = {b: distance(found, state[span]) for b, state in states.items()}
            assert distances[boundary] < case.tolerance
            assert min(d for b, d in distances.items() if b != boundary) > 0.1


@cases
def test_boundaries_from_side_files_or_defaults(case: Case) -> None:
    training = open_training(case.root, model=MODEL)
    said = tuple(block.boundary for block in training.blocks)
    assert (said == case.blocks) is case.default_holds
    recorded = case.format in ("speculators-v1", "nemo")
    assert all(block.known is recorded for block in training.blocks)
    assert bool(training.assumptions) is not recorded


@cases
def test_boundaries_by_content(case: Case, truth: Truth) -> None:
    training = open_training(case.root)
    sequences = [prompt(case, sample) for sample in samples(training)]
    proven = establish(training, reference(truth, sequences))
    assert tuple(block.boundary for block in proven.blocks) == case.blocks
    assert proven.slot_boundaries == case.slots
    assert {(block.known, block.basis) for block in proven.blocks} == {(True, "content")}
    assert proven.assumptions == ()


def test_content_contradicts_a_wrong_assumption(truth: Truth) -> None:
    training = open_training(ROOT / "modelopt/hf_aux_2_4_5_allones", model=MODEL)
    proven = establish(training, reference(truth, [s.token_ids.tolist() for s in samples(training)]))
    assert "slot 0 was assumed as 2 (modelopt default), its content is boundary 3" in proven.notes


@cases
def test_the_capture_holds_the_same_rows(case: Case) -> None:
    training = open_training(case.root, model=MODEL, slots=case.slots)
    capture = capture_training(training)
    assert capture.ranks == (0,)
    assert capture.facts.slot_boundaries == case.slots
    for slot, boundary in enumerate(case.slots):
        name, begin = f"boundary.{boundary}", 0
        for unit, length in zip(training.units, case.lengths, strict=True):
            assert torch.equal(capture.read(0, name, begin, begin + length), by_hand(case, unit, length)[slot])
            begin += length
        assert capture.length(0, name) == begin
        # Any stretch, over the borders of samples.
        whole = capture.read(0, name, 0, begin)
        for a, b in ((0, 0), (3, 17), (begin - 5, begin), (begin // 4, begin - begin // 4)):
            assert torch.equal(capture.read(0, name, a, b), whole[a:b])


# ----------------------------------------------------------------------------------------------- files read by hand


def raw(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        return safetensors.torch.load_file(path)
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        loaded: dict[str, torch.Tensor] = torch.load(file, weights_only=True)
    return loaded


def by_hand(case: Case, unit: Unit, length: int) -> list[torch.Tensor]:
    """A sample's blocks, [T, 64] bf16 each, as its format lays them out in the file."""
    content = raw(unit.file)
    if case.format == "specforge":
        blocks = [*content["aux_hidden_state"][0].chunk(3, -1), content["hidden_state"][0]]
    elif case.format in ("speculators", "vllm"):
        states = content["hidden_states"]
        if "hidden_states_scales" in content:  # as speculators' own connector reads them
            states = states.bfloat16() * content["hidden_states_scales"].bfloat16()
        blocks = list(states.unbind(1))
    elif case.format in ("speculators-v1", "baldeagle"):
        blocks = list(content["hidden_states" if case.format == "speculators-v1" else "hidden_state"])
    elif case.format == "modelopt":
        blocks = [*content["aux_hidden_states"].chunk(3, -1), content["hidden_states"]]
    elif case.format == "nemo":
        blocks = list(content["aux_hidden_states"][unit.index].chunk(3, -1))
    else:
        last = {"angelslim": "target_hiddens", "torchspec": "last_hidden_states"}[case.format]
        blocks = [*content["hidden_states"][0].chunk(3, -1), content[last][0]]
    return [block[case.first : case.first + length] for block in blocks]


def test_specforge_padding_is_left_out() -> None:
    training = open_training(ROOT / "specforge/hidden_states_padded")
    plain = open_training(ROOT / "specforge/hidden_states")
    for padded, other in zip(samples(training), samples(plain), strict=True):
        assert np.array_equal(padded.token_ids, other.token_ids)
        assert padded.loss_mask is not None
        assert np.array_equal(padded.loss_mask, other.loss_mask)
    assert "right padding (id 0) is left out (2 of 3 samples)" in training.notes


def test_nemo_is_moved_back() -> None:
    shard = raw(ROOT / "nemo/shard-000000.safetensors")
    plain = {len(d["input_ids"][0]): d for d in map(raw, sorted((ROOT / "angelslim").rglob("*.ckpt")))}
    for i, sample in enumerate(samples(open_training(ROOT / "nemo"))[:2]):
        count = int(shard["attention_mask"][i].sum())
        other = plain[count]
        assert sample.token_ids.tolist() == other["input_ids"][0, 1:].tolist()
        assert sample.token_ids.tolist() == shard["input_ids"][i, : count - 1].tolist()
        assert sample.loss_mask is not None
        assert sample.loss_mask.tolist() == other["loss_mask"][0, 1:].tolist()


def test_loss_masks_are_those_of_the_files() -> None:
    for path, key in (("specforge/hidden_states", "*.ckpt"), ("modelopt/hf_eagle_default", "*.pt")):
        files = sorted((ROOT / path).rglob(key))
        training = open_training(ROOT / path)
        assert [unit.file for unit in training.units] == [f for f in files if "vocab" not in f.name]
        for unit, sample in zip(training.units, samples(training), strict=True):
            assert sample.loss_mask is not None
            assert sample.loss_mask.tolist() == raw(unit.file)["loss_mask"].tolist()


def test_without_a_loss_mask_it_is_unknown() -> None:
    training = open_training(ROOT / "modelopt/constructed_trtllm_format")
    assert training.has_mask is False
    assert training.load(0).loss_mask is None
    assert "no loss mask is stored (1 of 1 samples)" in training.notes


def test_speculators_v1_says_that_a_sample_was_cut() -> None:
    notes = open_training(ROOT / "speculators-v1").notes
    assert notes == ("1 samples have 56 rows, the most that their pipeline kept: probably cut there",)


def test_lock_file_left_behind_hinders_nothing() -> None:
    assert (ROOT / "speculators/vllm_connector_raw/cmpl-0123456789abcdef-0.safetensors.lock").exists()
    assert open_training(ROOT / "speculators/vllm_connector_raw").problems == ()


def test_last_state_before_the_norm_is_in_no_hf_tuple(truth: Truth) -> None:
    ids = open_training(ROOT / "speculators-v1").load(0).token_ids.tolist()
    states = truth(ids)
    assert distance(states[LAYERS], states["final.norm"]) > 0.1
