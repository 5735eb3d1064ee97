"""Draft checkpoints of every trainer, from headers; and what is said about those that are none."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from eagle_parity.draft.checkpoint import DraftCheckpoint, is_draft, open_draft
from eagle_parity.draft.weights import spelled
from eagle_parity.errors import InputError
from tests.readers.test_mutations import mutilated

DRAFTS = Path(__file__).parents[1] / "fixtures" / "drafts"
H = 8


def tensors(**changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """A draft of H = 8, K = 3, 16 of 32 words."""
    made: dict[str, torch.Tensor | None] = {
        "fc.weight": torch.zeros(H, 3 * H),
        "midlayer.self_attn.q_proj.weight": torch.zeros(H, 2 * H),
        "midlayer.self_attn.k_proj.weight": torch.zeros(H, 2 * H),
        "midlayer.input_layernorm.weight": torch.zeros(H),
        "midlayer.hidden_norm.weight": torch.zeros(H),
        "norm.weight": torch.zeros(H),
        "lm_head.weight": torch.zeros(16, H),
        "d2t": torch.zeros(16, dtype=torch.int64),
    }
    return {name: value for name, value in (made | changes).items() if value is not None}


def write(path: Path, config: dict[str, Any] | None = None, **changes: torch.Tensor | None) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    document = {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": H, "vocab_size": 32} | (config or {})
    (path / "config.json").write_text(json.dumps(document))
    safetensors.torch.save_file(tensors(**changes), path / "model.safetensors")
    return path


def refused(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        open_draft(path)
    assert caught.value.fix
    return caught.value.message


# ---------------------------------------------------------------------------------------------------- every trainer


def test_specforge_export() -> None:
    draft = open_draft(DRAFTS / "specforge_sglang")
    assert (draft.dialect, draft.architecture, draft.style) == ("native", "LlamaForCausalLMEagle3", "llama")
    assert (draft.declared_ids, draft.declared_in) == ((1, 3, 4), "eagle_config")
    assert (draft.num_slots, draft.hidden_size, draft.target_hidden_size, draft.num_layers) == (3, 64, 64, 1)
    assert (draft.vocab_size, draft.draft_vocab_size) == (512, 128)
    assert draft.missing == ("embed_tokens",)
    assert draft.undeclared == ("norm_before_residual", "norm_output")
    assert not any((draft.norm_before_fc, draft.fc_norm, draft.norm_output, draft.bias))
    assert draft.layer_config["num_attention_heads"] == 4


@pytest.mark.parametrize("path", ["specforge_run/demo-step1", "specforge_run/demo-step1/training_state.pt"])
def test_specforge_training_state(path: str) -> None:
    draft = open_draft(DRAFTS / path)
    assert (draft.dialect, draft.declared_in, draft.num_slots) == ("none", "absent", 3)
    assert (draft.vocab_size, draft.draft_vocab_size) == (512, 128)
    assert draft.notes == ("no config.json: heads, RoPE, eps and layer ids are unknown; name it with config",)
    full = open_draft(DRAFTS / path, config=DRAFTS / "specforge_run")
    assert (full.dialect, full.declared_ids, full.notes) == ("native", (1, 3, 4), ())


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("speculators_fc_norm_out", {"fc_norm", "norm_output"}),
        ("speculators_nbr", {"norm_before_residual"}),
        ("speculators_norm_before_fc", {"norm_before_fc"}),
    ],
)
def test_speculators(name: str, flags: set[str]) -> None:
    draft = open_draft(DRAFTS / name)
    assert (draft.dialect, draft.architecture, draft.style) == ("speculators", "Eagle3DraftModel", "llama")
    assert (draft.declared_ids, draft.declared_in) == ((2, 4, 5), "top-level")
    named = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "bias")
    assert {flag for flag in named if getattr(draft, flag)} == flags
    assert draft.undeclared == ()
    assert draft.missing == ()
    assert draft.verifier == "samples/_common/tiny_target"
    assert draft.layer_config["num_key_value_heads"] == 2
    assert draft.vocab_size == 512


def test_torchspec_mla() -> None:
    draft = open_draft(DRAFTS / "torchspec_mla")
    assert (draft.architecture, draft.style) == ("Eagle3DeepseekV2ForCausalLM", "mla")
    assert draft.declared_ids == (1, 3, 4)
    assert (draft.vocab_size, draft.draft_vocab_size, draft.missing) == (512, 512, ())
    assert draft.layer_config["kv_lora_rank"] == 16


def test_one_spelling_and_lazy_loading() -> None:
    files = {
        "specforge_sglang": "midlayer.self_attn.q_proj.weight",
        "speculators_nbr": "layers.0.self_attn.q_proj.weight",
        "torchspec_mla": "midlayer.self_attn.q_b_proj.weight",
    }
    for name, stored in files.items():
        draft = open_draft(DRAFTS / name)
        expected = safetensors.torch.load_file(DRAFTS / name / "model.safetensors")
        assert {tensor.stored_name for tensor in draft.tensors.values()} == set(expected)
        assert torch.equal(draft.load(stored), expected[stored])
        assert torch.equal(draft.load(stored.replace("midlayer.", "layers.0.")), expected[stored])
    state = torch.load(DRAFTS / "specforge_run/demo-step1/training_state.pt", weights_only=True)["draft_state_dict"]
    assert torch.equal(open_draft(DRAFTS / "specforge_run/demo-step1").load("fc.weight"), state["fc.weight"])
    with pytest.raises(InputError, match=r"holds no tensor 'embed_tokens.weight'"):
        open_draft(DRAFTS / "specforge_sglang").load("embed_tokens.weight")


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"),
        ("model.layers.0.hidden_norm.weight", "layers.0.hidden_norm.weight"),
        ("model.fc.weight", "fc.weight"),
        ("aux_norm_low.weight", "fc_norm.0.weight"),
        ("aux_norm_high.weight", "fc_norm.2.weight"),
        ("draft_id_to_target_id", "d2t"),
    ],
)
def test_spelling(stored: str, name: str) -> None:
    assert spelled(stored) == name


def test_sharded(tmp_path: Path) -> None:
    source = DRAFTS / "speculators_nbr"
    shutil.copy(source / "config.json", tmp_path)
    held = safetensors.torch.load_file(source / "model.safetensors")
    names = sorted(held)
    shards = {"model-00001-of-00002.safetensors": names[:7], "model-00002-of-00002.safetensors": names[7:]}
    for shard, part in shards.items():
        safetensors.torch.save_file({name: held[name] for name in part}, tmp_path / shard)
    index = {"weight_map": {name: shard for shard, part in shards.items() for name in part}}
    file = tmp_path / "model.safetensors.index.json"
    file.write_text(json.dumps(index))
    draft, whole = open_draft(tmp_path), open_draft(source)
    shapes: Callable[[DraftCheckpoint], Any] = lambda d: {n: (t.dtype, t.shape) for n, t in d.tensors.items()}  # noqa: E731
    assert shapes(draft) == shapes(whole)
    assert torch.equal(draft.load("norm.weight"), held["norm.weight"])
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert "names 'model-00002-of-00002.safetensors', which is not there" in refused(tmp_path)
    file.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model-00001-of-00002.safetensors")}))
    assert "tensors that no shard holds" in refused(tmp_path)
    for text in ("{", "[]", '{"weight_map": 3}'):
        file.write_text(text)
        assert "is not a shard index" in refused(tmp_path)
    file.write_text(json.dumps({"weight_map": {"fc.weight": "../model.safetensors"}}))
    assert "which is not there" in refused(tmp_path)


def test_pytorch_bin(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors(), tmp_path / "pytorch_model.bin")
    draft = open_draft(tmp_path)
    assert draft.num_slots == 3
    assert torch.equal(draft.load("fc.weight"), torch.zeros(H, 3 * H))


# -------------------------------------------------------------------------------------------------- what shapes prove


def test_slots_come_from_fc_not_from_the_config(tmp_path: Path) -> None:
    ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, "num_aux_hidden_states": 4}
    draft = open_draft(write(tmp_path, ids, **{"fc.weight": torch.zeros(H, 5 * H)}))
    assert (draft.num_slots, draft.declared_num_slots) == (5, 4)
    assert "3 layer ids are declared in eagle_config, fc.weight has room for 5 slots" in draft.notes


def test_a_target_of_another_width(tmp_path: Path) -> None:
    wide = {"fc.weight": torch.zeros(H, 36)}
    draft = open_draft(write(tmp_path / "a", {"target_hidden_size": 12}, **wide))
    assert (draft.num_slots, draft.hidden_size, draft.target_hidden_size) == (3, H, 12)
    assert "fc.weight is 36 wide, no multiple of 8 (the draft's hidden size)" in refused(write(tmp_path / "b", **wide))
    assert "no multiple of 7 (target_hidden_size)" in refused(write(tmp_path / "c", {"target_hidden_size": 7}))
    # A slot norm tells the width, where the config does not.
    norms = {f"fc_norm.{i}.weight": torch.zeros(12) for i in range(3)}
    assert open_draft(write(tmp_path / "d", **wide, **norms)).target_hidden_size == 12


def test_ids_in_both_places(tmp_path: Path) -> None:
    ids = "eagle_aux_hidden_state_layer_ids"
    draft = open_draft(write(tmp_path, {ids: [2, 3, 4], "eagle_config": {ids: [1, 2, 3]}}))
    assert (draft.declared_ids, draft.declared_in) == ((1, 2, 3), "eagle_config")
    assert "eagle_config declares [1, 2, 3], the top level [2, 3, 4]" in draft.notes


def test_what_is_missing(tmp_path: Path) -> None:
    draft = open_draft(write(tmp_path / "a", d2t=None, **{"norm.weight": None}))
    assert draft.missing == ("embed_tokens", "norm", "d2t")
    draft = open_draft(write(tmp_path / "b", {"fc_norm": True, "norm_before_fc": True}))
    assert draft.missing == ("embed_tokens", "fc_norm", "input_norm")
    draft = open_draft(write(tmp_path / "c", {"draft_vocab_size": 16}, d2t=None, **{"lm_head.weight": None}))
    assert draft.missing == ("embed_tokens", "lm_head", "d2t")
    assert draft.draft_vocab_size == 16


def test_legacy_slot_norms_and_bias(tmp_path: Path) -> None:
    norms = {f"aux_norm_{name}.weight": torch.zeros(H) for name in ("low", "mid", "high")}
    draft = open_draft(write(tmp_path, {"norm_output": True}, **norms, **{"fc.bias": torch.zeros(H)}))
    assert draft.fc_norm
    assert draft.bias
    assert draft.norm_output
    assert "fc_norm" not in draft.missing
    assert any("norm_output is true" in note for note in draft.notes)


def test_quantized(tmp_path: Path) -> None:
    assert open_draft(write(tmp_path, {"quantization_config": {"quant_method": "quark"}})).quantization == "quark"


# ------------------------------------------------------------------------------------------------------- what is none


def test_no_config(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "config.json").unlink()
    assert f"{tmp_path} has no config.json beside it" in refused(tmp_path)


@pytest.mark.parametrize(("text", "expected"), [("{", "is not JSON"), ("[]", "is not a JSON object")])
def test_damaged_config(tmp_path: Path, text: str, expected: str) -> None:
    write(tmp_path)
    (tmp_path / "config.json").write_text(text)
    assert expected in refused(tmp_path)


def test_no_weights_and_nothing(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "holds no weights" in refused(tmp_path)
    assert "does not exist" in refused(tmp_path / "nowhere")


def test_not_a_draft(tmp_path: Path) -> None:
    assert "it has no fc.weight, but 7 tensors in 1 layers" in refused(write(tmp_path / "a", **{"fc.weight": None}))
    said = refused(write(tmp_path / "b", **{"midlayer.self_attn.q_proj.weight": torch.zeros(H, H)}))
    assert "layer 0's q_proj is [8, 8], expected [*, 16]" in said
    assert "EAGLE-1 and -2 read 8" in said
    said = refused(write(tmp_path / "c", **{"midlayer.self_attn.q_proj.weight": None}))
    assert "layer 0 has neither q_proj nor kv_a_proj_with_mqa" in said
    assert not is_draft(tmp_path / "a")
    assert is_draft(DRAFTS / "torchspec_mla")
    assert not is_draft(tmp_path)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("d2t", (15,)),
        ("norm.weight", (7,)),
        ("midlayer.hidden_norm.weight", (16,)),
        ("fc.bias", (9,)),
        ("input_norm.weight", (8,)),
        ("lm_head.weight", (16, 9)),
        ("embed_tokens.weight", (32, 9)),
        ("fc.weight", (24,)),
    ],
)
def test_shapes_that_contradict(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    said = refused(write(tmp_path, **{name: torch.zeros(shape)}))
    assert name in said
    assert str(list(shape)) in said


def test_truncated_weights(tmp_path: Path) -> None:
    write(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert "truncated?" in refused(tmp_path)


def test_two_names_for_one_tensor(tmp_path: Path) -> None:
    said = refused(write(tmp_path, **{"layers.0.hidden_norm.weight": torch.zeros(H)}))
    assert "are the same tensor 'layers.0.hidden_norm.weight'" in said


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("specforge_sglang", "model.safetensors"),
        ("speculators_nbr", "config.json"),
        ("torchspec_mla", "config.json"),
        ("specforge_run/demo-step1", "training_state.pt"),
    ],
)
def test_mutilated_files_give_clean_errors(tmp_path: Path, folder: str, name: str) -> None:
    shutil.copytree(DRAFTS / folder, tmp_path / "draft")
    file = tmp_path / "draft" / name
    original, draw = file.read_bytes(), random.Random(folder)
    outcomes: Counter[str] = Counter()
    for _ in range(150):
        file.write_bytes(mutilated(original, draw))
        try:
            open_draft(tmp_path / "draft").load("fc.weight")
            outcomes["read"] += 1
        except InputError:
            outcomes["refused"] += 1
    assert outcomes["refused"] > 5


def test_headers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("eagle_parity.tensorfile.TensorFile.read", never)
    for name in ("specforge_sglang", "speculators_nbr", "torchspec_mla"):
        open_draft(DRAFTS / name)
