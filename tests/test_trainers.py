"""The id conventions of trainers and of vLLM: every line of the tables against what was measured or read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_parity.conventions import vllm
from eagle_parity.conventions.trainers import TRAINERS, Trainer, who_would

KIMI = 61  # layers


def trainer(name: str, versions: str = "") -> Trainer:
    (found,) = [t for t in TRAINERS if t.name == name and versions in t.versions]
    return found


@pytest.mark.parametrize(
    ("name", "versions", "ids", "boundaries", "last"),
    [
        # Default ids for n = 61, the states that they are, and the last state.
        ("SafeAILab/EAGLE", "", (2, 30, 58), (2, 30, 58), None),
        ("SpecForge", "all", (1, 29, 57), (2, 30, 58), "final.norm"),
        ("SpecForge, HF backend", "", (1, 29, 57), (2, 30, 58), "final.norm"),
        ("speculators v1", "", (2, 30, 58), (3, 31, 59), 61),
        ("speculators", "0.5", (2, 30, 58), (2, 30, 58), 61),
        ("modelopt, HF dump", "since", (1, 29, 57), (2, 30, 58), "final.norm"),
        ("modelopt, HF dump", "before", (2, 30, 58), (2, 30, 58), "final.norm"),
        ("modelopt, vLLM dump", "", (1, 29, 57), (1, 29, 57), 61),
        ("modelopt, Megatron", "", (1, 29, 57), (2, 30, 58), None),
        ("TorchSpec, SGLang engine", "", (1, 29, 57), (2, 30, 58), "final.norm"),
        ("TorchSpec, vLLM engine", "", (1, 29, 57), (2, 30, 58), 61),
        ("TorchSpec, HF engine", "", (1, 29, 57), (2, 30, 58), "final.norm"),
        ("NeMo Automodel", "", (1, 29, 57), (2, 30, 58), None),
        ("AngelSlim", "", (1, 29, 57), (2, 30, 58), "final.norm"),
        ("BaldEagle", "", (2, 30, 58), (2, 30, 58), None),
    ],
)
def test_every_trainers_default(
    name: str, versions: str, ids: tuple[int, ...], boundaries: tuple[int, ...], last: object
) -> None:
    found = trainer(name, versions)
    assert found.default(KIMI) == ids
    assert found.trained(None, KIMI) == found.trained(ids, KIMI) == boundaries
    assert found.last_boundary(KIMI) == last
    assert found.source


def test_every_line_is_tested() -> None:
    marks = test_every_trainers_default.pytestmark  # type: ignore[attr-defined]
    assert len(marks[0].args[1]) == len(TRAINERS)


@pytest.mark.parametrize(
    ("name", "versions", "ids", "boundaries"),
    [
        # Measured on an 8-layer target with the pipelines' own writers.
        ("SpecForge", "all", (1, 3, 4), (2, 4, 5)),
        ("speculators v1", "", (2, 4, 5), (3, 5, 6)),
        ("speculators", "0.5", (2, 4, 5), (2, 4, 5)),
        ("modelopt, HF dump", "since", (2, 4, 5), (3, 5, 6)),
        ("AngelSlim", "", (1, 3, 4), (2, 4, 5)),
        ("BaldEagle", "", (2, 4, 5), (2, 4, 5)),
        # The order of the ids: some pipelines keep it, some sort.
        ("SpecForge", "all", (4, 1, 3), (2, 4, 5)),
        ("SpecForge, HF backend", "", (4, 1, 3), (5, 2, 4)),
        ("TorchSpec, HF engine", "", (4, 1, 3), (5, 2, 4)),
        ("TorchSpec, SGLang engine", "", (4, 1, 3), (2, 4, 5)),
        ("NeMo Automodel", "", (4, 1, 3), (5, 2, 4)),
        ("speculators", "0.5", (5, 2, 4), (2, 4, 5)),
    ],
)
def test_given_ids(name: str, versions: str, ids: tuple[int, ...], boundaries: tuple[int, ...]) -> None:
    assert trainer(name, versions).trained(ids, 8) == boundaries


def test_who_trains_on_an_order() -> None:
    late = who_would((3, 31, 59), (2, 30, 58), KIMI)
    assert trainer("speculators v1") in late
    assert late == tuple(t for t in TRAINERS if t.shift == 1)
    assert [t.name for t in who_would((1, 29, 57), (1, 29, 57), KIMI)] == [
        "SafeAILab/EAGLE",
        "speculators",
        "modelopt, HF dump",
        "modelopt, vLLM dump",
        "BaldEagle",
    ]
    assert who_would((7, 8, 9), (1, 2, 3), KIMI) == ()


@pytest.mark.parametrize(
    ("ids", "boundaries"),
    [(None, (2, 30, 58)), ([2, 30, 58], (2, 30, 58)), ([1, 29, 57], (1, 29, 57)), ([58, 2, 61], (2, 58, 61))],
)
def test_vllm_takes_an_id_as_it_is(ids: list[int] | None, boundaries: tuple[int, ...]) -> None:
    answer = vllm.served(ids, architecture="DeepseekV3ForCausalLM", version="0.33.0", num_layers=KIMI)
    assert answer is not None
    assert answer.boundaries == boundaries
    assert not answer.problems
    assert answer.source.startswith("vllm 0.33.0")


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([0, 3, 31], "makes vLLM's deepseek_v2 fail"),
        ([2, 2, 30], "repeat a layer"),
        ([2, 30, 62], r"ids [62] name no layer"),
    ],
)
def test_ids_that_vllm_cannot_serve(ids: list[int], says: str) -> None:
    answer = vllm.served(ids, architecture="DeepseekV3ForCausalLM", version="0.33.0", num_layers=KIMI)
    assert answer is not None
    assert says in answer.problems[0]


def test_vllm_without_facts() -> None:
    assert vllm.served([1], architecture=None, version=None, num_layers=KIMI) is None
    assert vllm.served([1], architecture=None, version="main", num_layers=KIMI) is None
    assert vllm.served([1], architecture=None, version="0.33.0", num_layers=None) is None


@given(st.lists(st.integers(1, 61), min_size=1, max_size=4))
def test_ids_for_vllm_are_served_as_wanted_or_not_given(wanted: list[int]) -> None:
    known = {"architecture": "LlamaForCausalLM", "version": "0.33.0", "num_layers": KIMI}
    ids = vllm.ids_for(wanted, **known)  # type: ignore[arg-type]
    if wanted != sorted(set(wanted)):
        assert ids is None
    else:
        answer = vllm.served(ids, **known)  # type: ignore[arg-type]
        assert answer is not None
        assert answer.boundaries == tuple(wanted)
