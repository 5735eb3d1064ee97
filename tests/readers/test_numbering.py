"""Boundaries: what is known, what is assumed, and that no number is invented."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle_parity.errors import InputError, UsageError
from eagle_parity.readers import capture_training, open_training, read_model
from eagle_parity.readers.numbering import number
from eagle_parity.readers.registry import FORMATS, named
from eagle_parity.records import Boundary, Model
from tests.readers.samples import ROOT, TARGET

PATH = ROOT / "specforge/hidden_states"
STACK = ROOT / "speculators/vllm_connector_raw"


def test_without_a_number_of_layers_there_is_no_capture() -> None:
    training = open_training(PATH)
    assert [block.boundary for block in training.blocks] == [None, None, None, "final.norm"]
    assert training.slot_boundaries is None
    with pytest.raises(InputError) as caught:
        capture_training(training)
    assert "the boundaries of the 3 slots are unknown: no file records them, and the default needs" in str(caught.value)
    assert all(flag in caught.value.fix for flag in ("--model", "--slots", "--reference"))


def test_the_number_of_layers_alone_is_enough() -> None:
    training = open_training(PATH, num_layers=61)
    assert training.slot_boundaries == (2, 30, 58)
    assert "the slots are boundaries 2, 30, 58, the default for 61 layers" in training.assumptions[0]
    assert "the last state is after the final norm" in training.assumptions[1]


def test_slots_by_hand_are_known() -> None:
    training = open_training(PATH, slots=(3, 31, 59))
    assert training.slot_boundaries == (3, 31, 59)
    assert [block.known for block in training.blocks] == [True, True, True, False]
    assert [s for s in training.assumptions if "slots" in s] == []


def test_a_last_state_without_a_number_is_left_out_and_told() -> None:
    training = open_training(STACK, slots=(2, 4, 5))
    assert capture_training(training).names(0) == ("boundary.2", "boundary.4", "boundary.5")
    assert "the last state is at the last boundary, whose number is not known" in training.assumptions[0]


def test_slots_may_number_all_of_one_tensor() -> None:
    training = open_training(STACK, slots=(2, 4, 5, 8))
    assert [block.boundary for block in training.blocks] == [2, 4, 5, 8]
    assert training.slot_boundaries == (2, 4, 5)
    assert training.assumptions == ()


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        ((2, 4), "--slots names 2 boundaries, the files hold 3 slots"),
        ((2, 4, 5, 8), "--slots names 4 boundaries, the files hold 3 slots"),
        ((2, 4, 4), "boundary 4 is given to slot 1 and slot 2"),
        ((2, 4, 9), "--slots puts slot 2 at boundary 9, the target has 8"),
        ((2, 4, "final.norm"), "boundary final.norm is given to slot 2 and last"),
    ],
)
def test_slots_that_do_not_fit(slots: tuple[Boundary, ...], expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_training(PATH, slots=slots, num_layers=8)
    assert expected in caught.value.message


@pytest.mark.parametrize("layers", [3, 4, 5])
def test_a_default_that_makes_no_sense_is_no_default(layers: int) -> None:
    blocks = number(named("specforge"), 3, True, num_layers=layers, recorded=None, given=None)
    numbers = [block.boundary for block in blocks[:3]]
    assert numbers == [None] * 3 or len(set(numbers)) == 3


def test_five_slots_have_no_default() -> None:
    blocks = number(named("specforge"), 5, True, num_layers=61, recorded=None, given=None)
    assert [block.boundary for block in blocks] == [None] * 5 + ["final.norm"]


def test_recorded_ids_beyond_the_target() -> None:
    with pytest.raises(InputError, match=r"data_config.json puts last at boundary 8, the target has 6"):
        open_training(ROOT / "speculators-v1", num_layers=6)


def test_another_target(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 128, "num_hidden_layers": 8}))
    with pytest.raises(InputError, match=r"holds states 64 wide, the target .* has hidden_size 128"):
        open_training(PATH, model=read_model(tmp_path))


def test_read_model(tmp_path: Path) -> None:
    model = read_model(TARGET)
    assert model == Model("target", "LlamaForCausalLM", 64, 8, 512)
    nested = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": {"num_hidden_layers": 61}}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    assert read_model(tmp_path).num_layers == 61
    for text, expected in (("{", "is not JSON"), ("[]", "not a JSON object"), ("{}", "names no num_hidden_layers")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(InputError, match=expected):
            read_model(tmp_path)
    with pytest.raises(InputError, match="No such file"):
        read_model(tmp_path / "nowhere")


def test_every_format_has_its_own_name_and_says_where_it_is_from() -> None:
    assert len({format_.name for format_ in FORMATS}) == len(FORMATS)
    for format_ in FORMATS:
        assert format_.default_source
        assert format_.last is None or format_.last_source
