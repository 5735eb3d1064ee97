from __future__ import annotations

import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from eagle_parity.captures import decoder, hf
from eagle_parity.captures.prompts import TokenSequence
from eagle_parity.captures.target import Target, read_target, read_tokenizer
from eagle_parity.errors import EnvironmentFailure, InputError, UsageError
from eagle_parity.records import FINAL_NORM, Boundary, Model, Sample, boundary_name
from tests.tiny_models import HIDDEN, LAYERS, VOCABULARY, edit_config, make_model

SEQUENCES = (TokenSequence("a", tuple(range(5, 45))), TokenSequence("b", (9,)))
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "deepseek": "DeepseekV3ForCausalLM",
    "kimi": "Kimi_K25ForConditionalGeneration",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {arch: make_model(root / arch, arch) for arch in ARCHITECTURES}


def samples(target: Target, boundaries: Sequence[Boundary] | None = None) -> list[Sample]:
    chosen = hf.all_boundaries(target) if boundaries is None else boundaries
    return list(hf.capture(target, SEQUENCES, chosen, device="cpu").samples)


@pytest.mark.parametrize("dtype", [None, "float32"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_boundaries_are_those_of_transformers(models: dict[str, Path], arch: str, dtype: str | None) -> None:
    from transformers import AutoModel

    target = read_target(str(models[arch]), dtype=dtype)
    got = samples(target)
    used = torch.float32 if dtype else torch.bfloat16
    model = AutoModel.from_pretrained(models[arch], dtype=used).eval()
    inner = getattr(model, "language_model", model)
    for sample, sequence in zip(got, SEQUENCES, strict=True):
        with torch.no_grad():
            # Through the whole model, so that a wrapper's own treatment of text would show.
            want = model(input_ids=torch.tensor([sequence.token_ids]), output_hidden_states=True)
        held = sample.tensors[0]
        assert (sample.id, list(sample.positions)) == (sequence.id, list(range(len(sequence.token_ids))))
        assert set(held) == {*(boundary_name(k) for k in range(LAYERS + 1)), FINAL_NORM}
        for k in range(LAYERS):
            assert torch.equal(held[boundary_name(k)], want.hidden_states[k][0]), k
        assert torch.equal(held[FINAL_NORM], want.last_hidden_state[0])
        last = held[boundary_name(LAYERS)]
        assert torch.equal(inner.norm(last), held[FINAL_NORM])
        assert not torch.equal(last, held[FINAL_NORM])
        assert {tensor.dtype for tensor in held.values()} == {used}
    # A draft trained on these states would notice a swap: no two boundaries are alike.
    flat = [got[0].tensors[0][boundary_name(k)].float() for k in range(LAYERS + 1)]
    for low, high in pairwise(flat):
        assert (low - high).norm() > 0.05 * low.norm()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_facts_come_from_the_config(models: dict[str, Path], arch: str) -> None:
    facts = read_target(str(models[arch])).facts
    assert facts == Model(arch, ARCHITECTURES[arch], HIDDEN, LAYERS, VOCABULARY, "bfloat16", None)


def test_only_what_was_asked_for_is_kept(models: dict[str, Path]) -> None:
    target = read_target(str(models["llama"]))
    stream = hf.capture(target, SEQUENCES, [3, 0], slot_boundaries=[2, FINAL_NORM, 0], device="cpu")
    assert stream.plan.facts.boundaries == (0, 2, 3)
    assert stream.plan.facts.slot_boundaries == (2, FINAL_NORM, 0)
    assert stream.plan.tokens == 41
    assert [(s.name, s.width, s.dtype) for s in stream.plan.tensors[0]] == [
        ("boundary.0", HIDDEN, "BF16"),
        ("boundary.2", HIDDEN, "BF16"),
        ("boundary.3", HIDDEN, "BF16"),
        (FINAL_NORM, HIDDEN, "BF16"),
    ]
    everything = samples(target)
    for chosen, whole in zip(stream.samples, everything, strict=True):
        assert set(chosen.tensors[0]) == {"boundary.0", "boundary.2", "boundary.3", FINAL_NORM}
        for name, tensor in chosen.tensors[0].items():
            assert torch.equal(tensor, whole.tensors[0][name])


def test_samples_outlive_the_next_forward(models: dict[str, Path]) -> None:
    target = read_target(str(models["llama"]))
    stream = hf.capture(target, [*SEQUENCES, SEQUENCES[0]], [0, LAYERS], device="cpu")
    first = next(stream.samples)
    copies = {name: tensor.clone() for name, tensor in first.tensors[0].items()}
    rest = list(stream.samples)
    for name, tensor in copies.items():
        assert torch.equal(first.tensors[0][name], tensor)
        assert torch.equal(rest[-1].tensors[0][name], tensor)  # and the same tokens give the same bits


def test_layers_that_write_into_their_input(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    target = read_target(str(models["llama"]))
    want = samples(target)[0].tensors[0]["boundary.1"]
    load = decoder.load_decoder

    def spoiling(*args: object) -> decoder.Decoder:
        loaded = load(*args)  # type: ignore[arg-type]
        loaded.layers[1].register_forward_hook(lambda _, inputs, __: inputs[0].zero_())
        return loaded

    monkeypatch.setattr(hf, "load_decoder", spoiling)
    assert torch.equal(samples(target)[0].tensors[0]["boundary.1"], want)


def test_the_plan_costs_no_weights(models: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(models["llama"], tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").write_bytes(b"broken")
    stream = hf.capture(read_target(str(tmp_path / "m")), SEQUENCES, [0])
    with pytest.raises(InputError, match="the weights cannot be loaded"):
        next(stream.samples)


def test_kimi_k2_is_read_as_deepseek(models: dict[str, Path], tmp_path: Path) -> None:
    path = shutil.copytree(models["deepseek"], tmp_path / "m")
    edit_config(path, model_type="kimi_k2", auto_map={"AutoConfig": "nowhere.Config", "AutoModel": "nowhere.Model"})
    got, want = samples(read_target(str(path))), samples(read_target(str(models["deepseek"])))
    assert all(torch.equal(got[0].tensors[0][name], tensor) for name, tensor in want[0].tensors[0].items())


def test_code_of_the_model_is_not_run_unasked(models: dict[str, Path], tmp_path: Path) -> None:
    path = shutil.copytree(models["llama"], tmp_path / "m")
    edit_config(path, model_type="mystery", auto_map={"AutoConfig": "code.Config"})
    (path / "code.py").write_text("raise SystemExit('ran')")
    with pytest.raises(UsageError, match="needs code that comes with the model") as caught:
        read_target(str(path))
    assert "--trust-remote-code" in caught.value.fix


def test_incomplete_weights_are_refused(models: dict[str, Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = shutil.copytree(models["llama"], tmp_path / "m")
    weights = load_file(path / "model.safetensors")
    extra = weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"1 weights of the decoder are not in the checkpoint .*layers.1.mlp.up_proj"):
        samples(read_target(str(path)))

    whole = load_file(models["llama"] / "model.safetensors")
    # More layers than the config says (as the multi-token prediction layer) are nobody's business; a strange one is.
    whole[f"model.layers.{LAYERS}.mlp.up_proj.weight"] = extra
    whole["model.layers.1.mlp.up_proj.weight_scale_inv"] = torch.ones(1)
    save_file(whole, path / "model.safetensors", {"format": "pt"})
    said: list[str] = []
    list(hf.capture(read_target(str(path)), SEQUENCES, [0], device="cpu", say=said.append).samples)
    assert said == [
        "warning: transformers ignored 1 tensors of the checkpoint's layers: "
        "model.layers.1.mlp.up_proj.weight_scale_inv"
    ]


@pytest.mark.parametrize("wrong", [-1, LAYERS + 1])
def test_boundaries_out_of_range(models: dict[str, Path], wrong: int) -> None:
    target = read_target(str(models["llama"]))
    with pytest.raises(UsageError, match=f"--slots: {wrong} is no boundary of .*llama, which has 4 layers"):
        hf.capture(target, SEQUENCES, [0], slot_boundaries=[2, wrong])
    with pytest.raises(UsageError, match="--boundaries"):
        hf.capture(target, SEQUENCES, [wrong])


def test_tokens_that_the_model_has_not(models: dict[str, Path]) -> None:
    target = read_target(str(models["llama"]))
    with pytest.raises(InputError, match=r"prompt x: token 1 has id 64, .* knows 0 to 63"):
        hf.capture(target, [TokenSequence("x", (1, 64))], [0])
    with pytest.raises(InputError, match=r"prompt x: 129 tokens, .* has 128 positions"):
        hf.capture(target, [TokenSequence("x", (1,) * 129)], [0])


def test_names_that_are_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "file").touch()
    for name in (str(tmp_path / "none"), "./none", "none", "models/none", "a/b/c", "file"):
        with pytest.raises(InputError, match=f"model {name} is not a directory"):
            read_target(name)
    with pytest.raises(InputError, match=r"has no config\.json"):
        read_target(str(tmp_path))


def test_configs_that_say_too_little(models: dict[str, Path], tmp_path: Path) -> None:
    path = shutil.copytree(models["llama"], tmp_path / "m")
    edit_config(path, dtype=None)
    with pytest.raises(UsageError, match="names no dtype"):
        read_target(str(path))
    assert read_target(str(path), dtype="float16").facts.dtype == "float16"
    edit_config(path, torch_dtype="float32")
    assert read_target(str(path)).facts.dtype == "float32"
    edit_config(path, quantization_config={"quant_method": "fp8"})
    assert read_target(str(path)).facts.quantization == "fp8"
    (path / "config.json").write_text("{")
    with pytest.raises(InputError, match="the config cannot be loaded"):
        read_target(str(path))


def test_a_tokenizer_that_is_missing_or_broken(models: dict[str, Path], tmp_path: Path) -> None:
    target = read_target(str(models["llama"]))
    assert read_tokenizer(target)("w2 w3")["input_ids"] == [1, 6, 7]
    path = shutil.copytree(models["llama"], tmp_path / "m")
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="the tokenizer cannot be loaded") as caught:
        read_tokenizer(read_target(str(path)))
    assert "give token ids" in caught.value.fix
    for file in path.glob("*token*"):
        file.unlink()
    assert read_tokenizer(read_target(str(path))) is None


def test_cuda_where_there_is_none(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EnvironmentFailure, match="no CUDA device"):
        hf.capture(read_target(str(models["llama"])), SEQUENCES, [0], device="cuda")
    assert decoder.pick_device("auto") == "cpu"


def test_transformers_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(EnvironmentFailure, match="needs Hugging Face transformers") as caught:
        read_target("anything")
    assert caught.value.fix == "pip install eagle-parity[hf]"


def test_a_decoder_that_cannot_be_found(models: dict[str, Path]) -> None:
    target = read_target(str(models["llama"]))
    with pytest.raises(InputError, match=r"expected one decoder with 4 layers, .* found nowhere"):
        decoder.find_decoder(torch.nn.Linear(2, 2), target)
