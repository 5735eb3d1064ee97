"""SGLang's id rules against the values that were read in the wheels and measured on live servers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_parity.conventions import ids_for, served
from eagle_parity.conventions.sglang import parse_version

KIMI = "KimiK25ForConditionalGeneration"
DEEPSEEK = "DeepseekV3ForCausalLM"
LLAMA = "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("ids", "architecture", "version", "layers", "boundaries"),
    [
        # The version matrix for a 61-layer Kimi-K2.5.
        (None, KIMI, "0.5.10", 61, (2, 30, 58)),
        (None, KIMI, "0.5.23", 61, (2, 30, 58)),
        ([2, 30, 58], KIMI, "0.5.10", 61, (3, 31, 59)),
        ([2, 30, 58], KIMI, "0.5.12.post1", 61, (3, 31, 59)),
        ([2, 30, 58], KIMI, "0.5.13", 61, (2, 30, 58)),
        ([2, 30, 58], KIMI, "0.5.23", 61, (2, 30, 58)),
        ([1, 29, 57], KIMI, "0.5.10", 61, (2, 30, 58)),
        ([1, 29, 57], KIMI, "0.5.13", 61, (2, 30, 58)),
        ([0, 3, 31], KIMI, "0.5.10", 61, (1, 4, 32)),
        ([0, 3, 31], KIMI, "0.5.23", 61, (0, 3, 31)),
        # Measured on live servers, 6 and 8 layers.
        ([1, 2, 4], DEEPSEEK, "0.5.23", 6, (2, 3, 5)),
        ([0, 2, 4], DEEPSEEK, "0.5.23", 6, (0, 2, 4)),
        ([2, 3, 4], DEEPSEEK, "0.5.23", 6, (2, 3, 4)),
        ([1, 3, 5], DEEPSEEK, "0.5.17", 8, (2, 4, 6)),
        ([2, 4, 6], DEEPSEEK, "0.5.13", 8, (2, 4, 6)),
        ([0, 2, 3], LLAMA, "0.5.23", 6, (1, 3, 4)),
        ([1, 2, 4], LLAMA, "0.5.14", 6, (2, 3, 5)),
        # Order does not matter: captures are ascending.
        ([58, 2, 30], KIMI, "0.5.23", 61, (2, 30, 58)),
        # gpt-oss takes ids literally when the largest is the number of layers.
        ([2, 12, 24], "GptOssForCausalLM", "0.5.17", 24, (2, 12, 24)),
        ([1, 11, 20], "GptOssForCausalLM", "0.5.18", 24, (2, 12, 21)),
    ],
)
def test_boundaries(
    ids: list[int] | None, architecture: str, version: str, layers: int, boundaries: tuple[int, ...]
) -> None:
    answer = served(ids, architecture=architecture, version=version, num_layers=layers)
    assert answer is not None
    assert answer.boundaries == boundaries


@pytest.mark.parametrize(
    ("ids", "version", "says"),
    [
        ([-1, 2, 30], "0.5.23", "[-1] name no layer"),
        ([-1, 2, 30], "0.5.12", "makes SGLang before 0.5.14 fail"),
        ([2, 30, 61], "0.5.23", "[61] name no layer"),
        ([2, 2, 30], "0.5.23", "repeat a layer"),
        ([0, 3, 31], "0.5.13", "makes SGLang before 0.5.14 fail"),
    ],
)
def test_problems(ids: list[int], version: str, says: str) -> None:
    answer = served(ids, architecture=KIMI, version=version, num_layers=61)
    assert answer is not None
    assert any(says in problem for problem in answer.problems)


@pytest.mark.parametrize(
    ("wanted", "architecture", "version", "ids"),
    [
        ((3, 31, 59), KIMI, "0.5.12", (2, 30, 58)),
        ((3, 31, 59), KIMI, "0.5.23", (3, 31, 59)),
        ((0, 3, 31), KIMI, "0.5.23", (0, 3, 31)),
        ((0, 3, 31), KIMI, "0.5.12", None),
        ((1, 3, 5), KIMI, "0.5.23", (3, 1, 5)),
        ((2, 3, 5), LLAMA, "0.5.23", (1, 2, 4)),
        ((31, 3, 59), KIMI, "0.5.23", None),
    ],
)
def test_ids_to_write(wanted: tuple[int, ...], architecture: str, version: str, ids: tuple[int, ...] | None) -> None:
    assert ids_for(wanted, architecture=architecture, version=version, num_layers=61) == ids


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=4, unique=True).map(sorted),
    st.sampled_from([KIMI, LLAMA, "GptOssForCausalLM"]),
    st.sampled_from(["0.5.10", "0.5.13", "0.5.18", "0.5.23"]),
)
def test_ids_to_write_give_what_was_wanted(wanted: list[int], architecture: str, version: str) -> None:
    ids = ids_for(wanted, architecture=architecture, version=version, num_layers=61)
    if ids is not None:
        answer = served(ids, architecture=architecture, version=version, num_layers=61)
        assert answer is not None
        assert list(answer.boundaries) == wanted
        assert answer.problems == ()


def test_unknown_is_unknown() -> None:
    assert served([1, 2, 3], architecture="SomethingElse", version="0.5.23", num_layers=8) is None
    assert served([1, 2, 3], architecture=KIMI, version=None, num_layers=8) is None
    assert served([1, 2, 3], architecture=KIMI, version="main", num_layers=8) is None
    assert served([1, 2, 3], architecture=KIMI, version="0.5.23", num_layers=None) is None


def test_versions() -> None:
    assert parse_version("0.5.10.post1") == (0, 5, 10)
    assert parse_version("v0.5.9") == (0, 5, 9)
    assert parse_version("0.5.23rc1") == (0, 5, 23)
