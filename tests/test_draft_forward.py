"""The reference forward against the trainers' own outputs, transformers' formulas, and itself one token at a time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_parity.draft import table
from eagle_parity.draft.attention import Entries
from eagle_parity.draft.checkpoint import open_draft
from eagle_parity.draft.forward import Draft, load_draft, open_reference
from eagle_parity.draft.products import Products
from eagle_parity.draft.rope import read_rope, softmax_scale
from eagle_parity.draft.target import open_target
from eagle_parity.errors import InputError

FIXTURES = Path(__file__).parent.parent / "fixtures"
DRAFTS = FIXTURES / "drafts"
TARGET = FIXTURES / "training" / "target"
GOLDEN = sorted(path.parent.name for path in DRAFTS.glob("*/golden_step0.safetensors"))
YARN = {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 4.0, "original_max_position_embeddings": 128}


def cosine(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The worst row."""
    return float(torch.nn.functional.cosine_similarity(ours.double(), theirs.double(), dim=-1).min())


def golden(name: str) -> tuple[Draft, dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Draft, the trainer's tensors, h and positions."""
    tensors = load_file(DRAFTS / name / "golden_step0.safetensors")
    draft = open_reference(DRAFTS / name, TARGET, device="cpu")
    fused = draft.fuse(tensors.get("fc_input", tensors.get("fc_input_raw")))
    count = tensors["input_ids_shifted"].shape[1]
    return draft, tensors, fused, tensors.get("position_ids", torch.arange(count).unsqueeze(0))


def test_every_kind_of_draft_has_a_golden_output() -> None:
    assert len(GOLDEN) >= 5
    kinds = [open_draft(DRAFTS / name) for name in GOLDEN]
    assert {"llama", "mla"} == {kind.style for kind in kinds}
    for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        assert any(getattr(kind, flag) for kind in kinds), flag
    assert any("embed_tokens" in kind.missing for kind in kinds)
    assert any("d2t" in kind.tensors for kind in kinds)


@pytest.mark.parametrize("name", GOLDEN)
def test_logits_are_the_trainers(name: str) -> None:
    draft, tensors, fused, positions = golden(name)
    assert cosine(fused, tensors["fc_output"]) > 0.9999
    step = draft.begin(fused, draft.embedded(tensors["input_ids_shifted"]), positions)
    before = tensors.get("backbone_out_prenorm")
    if before is not None:
        assert cosine(step.hidden, before) > 0.9999
    ours, theirs = draft.logits(step.hidden), tensors["draft_logits"].float()
    assert cosine(ours, theirs) > 0.9999
    best = theirs.gather(-1, ours.argmax(-1, keepdim=True)).squeeze(-1)
    assert torch.equal(best, theirs.max(-1).values)  # the same token, or one that the trainer's bf16 scores alike


@pytest.mark.parametrize("name", GOLDEN)
def test_a_wrong_order_of_slots_is_another_result(name: str) -> None:
    """The negative control: what is compared above is not blind to what this tool is about."""
    draft, tensors, fused, _ = golden(name)
    raw = tensors.get("fc_input", tensors.get("fc_input_raw"))
    assert raw is not None
    turned = raw.roll(draft.checkpoint.target_hidden_size, dims=-1)
    assert cosine(draft.fuse(turned), fused) < 0.9


@pytest.mark.parametrize("name", GOLDEN)
def test_a_drafted_token_is_what_the_whole_sequence_gives(name: str) -> None:
    """Steps after the first, on their own entries, equal one causal pass over [h_0 … h_t, y, y', y'']."""
    draft, tensors, fused, _ = golden(name)
    ids = tensors["input_ids_shifted"][:, :12]
    fused, count, later = fused[:, :12], 12, 3
    drafted = (ids * 7 + 3) % 128  # any tokens will do
    start = draft.begin(fused, draft.embedded(ids), torch.arange(count).unsqueeze(0))
    anchors, before, hidden = torch.arange(count), None, draft.recurrent(start.hidden)
    made = []
    for step in range(1, later + 1):
        done = draft.advance(
            hidden,
            draft.embedded((drafted + step) % 128),
            (anchors + step).unsqueeze(0),
            start.entries,
            anchors,
            before,
        )
        before, hidden = done.entries, draft.recurrent(done.hidden)
        made.append((done.hidden, hidden))
    for anchor in (0, 5, 11):
        chain = [fused[:, : anchor + 1], draft.recurrent(start.hidden)[:, anchor : anchor + 1]]
        tokens = [ids[:, : anchor + 1]]
        for step in range(1, later + 1):
            tokens.append((drafted[:, anchor : anchor + 1] + step) % 128)
            whole = draft.begin(
                torch.cat(chain, 1), draft.embedded(torch.cat(tokens, 1)), torch.arange(anchor + 1 + step).unsqueeze(0)
            )
            plain, fed_back = made[step - 1]
            torch.testing.assert_close(whole.hidden[:, -1], plain[:, anchor], rtol=1e-4, atol=1e-5)
            chain.append(fed_back[:, anchor : anchor + 1])


def test_padding_on_the_right_changes_nothing() -> None:
    draft, tensors, fused, positions = golden("torchspec_mla")
    ids = tensors["input_ids_shifted"]
    alone = draft.begin(fused[:, :20], draft.embedded(ids[:, :20]), positions[:, :20]).hidden
    padded = draft.begin(fused, draft.embedded(ids), positions).hidden[:, :20]
    torch.testing.assert_close(alone, padded, rtol=1e-5, atol=1e-6)


def test_fast_products_agree_to_bf16() -> None:
    draft, tensors, fused, positions = golden("specforge_sglang")
    fast = load_draft(draft.checkpoint, open_target(TARGET), fast=True)
    ids = tensors["input_ids_shifted"]
    assert torch.equal(draft.embedding.rows(ids), fast.embedding.rows(ids))
    ours = fast.logits(fast.begin(fused, fast.embedded(ids), positions).hidden)
    assert cosine(ours, tensors["draft_logits"].float()) > 0.999


def test_blocks_of_a_wide_weight_are_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, states = torch.randn(37, 20).bfloat16(), torch.randn(2, 5, 20)
    monkeypatch.setattr("eagle_parity.draft.products.BLOCK", 60)
    torch.testing.assert_close(Products().linear(states, weight), states @ weight.float().T)


def test_a_large_embedding_stays_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "RESIDENT", 1)
    monkeypatch.setattr(table, "BLOCK_BYTES", 1000)
    name = "torchspec_mla"
    draft, tensors, fused, positions = golden(name)
    assert draft.embedding.memory is None
    assert draft.head.memory is None
    ids = tensors["input_ids_shifted"]
    own = load_file(DRAFTS / name / "model.safetensors")
    assert torch.equal(draft.embedding.rows(ids), own["embed_tokens.weight"][ids].float())
    assert torch.equal(draft.head.rows(ids), own["lm_head.weight"][ids].float())
    logits = draft.logits(draft.begin(fused, draft.embedded(ids), positions).hidden)
    assert cosine(logits, tensors["draft_logits"].float()) > 0.9999


def test_a_token_that_the_embedding_lacks() -> None:
    draft, *_ = golden("torchspec_mla")
    with pytest.raises(InputError, match="token id 512 has no row in the embedding of 512"):
        draft.embedded(torch.tensor([[3, 512]]))


# ------------------------------------------------------------------------------------------------ what is missing


def copied(tmp_path: Path, name: str, **config: Any) -> Path:
    path = tmp_path / name
    shutil.copytree(DRAFTS / name, path)
    document = json.loads((path / "config.json").read_text()) | config
    (path / "config.json").write_text(json.dumps(document))
    return path


def without(path: Path, *names: str) -> Path:
    tensors = load_file(path / "model.safetensors")
    for name in names:
        del tensors[name]
    save_file(tensors, path / "model.safetensors")
    return path


def test_embedding_and_head_come_from_the_target(tmp_path: Path) -> None:
    path = without(copied(tmp_path, "torchspec_mla"), "embed_tokens.weight", "lm_head.weight")
    with pytest.raises(InputError, match="has no embed_tokens") as error:
        open_reference(path, device="cpu")
    assert "--target" in error.value.fix
    draft, target = open_reference(path, TARGET, device="cpu"), open_target(TARGET)
    assert draft.embedding is not None
    assert draft.head.length == target.head.length == 512


def test_a_head_of_another_size_is_not_the_targets(tmp_path: Path) -> None:
    path = without(copied(tmp_path, "specforge_sglang"), "lm_head.weight")
    with pytest.raises(InputError, match=r"its head is \[512, 64\], the draft needs \[128, 64\]"):
        open_reference(path, TARGET, device="cpu")


def test_what_cannot_be_replayed_is_refused(tmp_path: Path) -> None:
    path = copied(tmp_path / "a", "specforge_sglang", hidden_act="swish7")
    with pytest.raises(InputError, match="hidden_act 'swish7'"):
        open_reference(path, TARGET, device="cpu")
    path = copied(tmp_path / "b", "specforge_sglang", rope_parameters={"rope_type": "longrope", "factor": 4.0})
    with pytest.raises(InputError, match="RoPE scaling 'longrope'"):
        open_reference(path, TARGET, device="cpu")
    path = copied(tmp_path / "c", "specforge_sglang", num_attention_heads=3)
    with pytest.raises(InputError, match=r"q_proj.weight has 64 rows, its config.json makes 48"):
        open_reference(path, TARGET, device="cpu")
    path = copied(tmp_path / "d", "specforge_sglang", quantization_config={"quant_method": "fp8"})
    with pytest.raises(InputError, match=r"quantized \(fp8\)"):
        open_reference(path, TARGET, device="cpu")
    path = without(copied(tmp_path / "e", "specforge_sglang"), "midlayer.mlp.up_proj.weight")
    with pytest.raises(InputError, match=r"lacks layers.0.mlp.up_proj.weight"):
        open_reference(path, TARGET, device="cpu")
    path = copied(tmp_path / "f", "specforge_sglang")
    tensors = load_file(path / "model.safetensors")
    tensors["d2t"] = tensors["d2t"] + 500
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(InputError, match="the table seems to hold absolute ids"):
        open_reference(path, TARGET, device="cpu")


def test_a_target_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"holds neither model.safetensors.index.json nor model.safetensors"):
        open_target(tmp_path)
    save_file({"model.layers.0.x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"holds no embed_tokens.weight"):
        open_target(tmp_path)


# ------------------------------------------------------------------------------------- biases, q/k norms, rope


def grown(tmp_path: Path, extra: dict[str, torch.Tensor], **config: Any) -> Draft:
    path = copied(tmp_path, "specforge_sglang", **config)
    save_file(load_file(path / "model.safetensors") | extra, path / "model.safetensors")
    return open_reference(path, TARGET, device="cpu")


def test_biases_and_head_norms_take_part(tmp_path: Path) -> None:
    """Against torch's own arithmetic on the same numbers, GQA repeated by hand."""
    g = torch.Generator().manual_seed(0)
    prefix = "midlayer.self_attn."
    extra = {
        "fc.bias": torch.randn(64, generator=g),
        f"{prefix}q_proj.bias": torch.randn(64, generator=g),
        f"{prefix}k_proj.bias": torch.randn(32, generator=g),
        f"{prefix}v_proj.bias": torch.randn(32, generator=g),
        f"{prefix}q_norm.weight": torch.rand(16, generator=g) + 0.5,
        f"{prefix}k_norm.weight": torch.rand(16, generator=g) + 0.5,
    }
    draft = grown(tmp_path, extra, bias=True)
    states = torch.randn(1, 6, 192, generator=g)
    fused = draft.fuse(states)
    weights = load_file(DRAFTS / "specforge_sglang" / "model.safetensors")
    expected = states @ weights["fc.weight"].float().T + extra["fc.bias"]
    torch.testing.assert_close(fused, expected, rtol=1e-4, atol=1e-4)

    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    normed = torch.nn.functional.rms_norm(fused, (64,), weights["midlayer.hidden_norm.weight"].float(), 1e-5)
    embeds = torch.nn.functional.rms_norm(
        draft.embedding.rows(ids), (64,), weights["midlayer.input_layernorm.weight"].float(), 1e-5
    )
    joined = torch.cat([embeds, normed], -1)

    def heads(name: str) -> torch.Tensor:
        projected = joined @ weights[f"{prefix}{name}_proj.weight"].float().T + extra[f"{prefix}{name}_proj.bias"]
        return projected.view(1, 6, -1, 16).transpose(1, 2)

    def normed_heads(name: str) -> torch.Tensor:
        value = torch.nn.functional.rms_norm(heads(name), (16,), extra[f"{prefix}{name}_norm.weight"], 1e-5)
        return draft.attention.rope.rotate(value, torch.arange(6).unsqueeze(0))

    keys, values = normed_heads("k").repeat_interleave(2, 1), heads("v").repeat_interleave(2, 1)
    scores = normed_heads("q") @ keys.transpose(-1, -2) / 4
    scores = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf).softmax(-1)
    wanted = (scores @ values).transpose(1, 2).flatten(2) @ weights[f"{prefix}o_proj.weight"].float().T
    queries, entries = draft.attention.project(
        draft.embedded(ids), draft.attention.half(normed, 64), torch.arange(6).unsqueeze(0)
    )
    torch.testing.assert_close(draft.attention.causal(queries, entries), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
        YARN,
        YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
        {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ],
)
def test_rope_is_transformers(scaling: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = transformers.LlamaConfig(
        hidden_size=128, num_attention_heads=4, head_dim=32, max_position_embeddings=512, rope_parameters=dict(scaling)
    )
    positions = torch.arange(200).unsqueeze(0)
    queries = torch.randn(1, 4, 200, 32)
    theirs = LlamaRotaryEmbedding(config)
    cos, sin = theirs(queries, positions)
    turned = cos.shape[-1]
    wanted, _ = apply_rotary_pos_emb(queries[..., :turned], queries[..., :turned], cos, sin)
    ours = read_rope({"rope_parameters": scaling, "max_position_embeddings": 512}, 32, interleaved=False)
    rotated = ours.rotate(queries, positions)
    if "partial_rotary_factor" in scaling:
        turned = int(32 * scaling["partial_rotary_factor"])
        plain = read_rope({"rope_theta": 10000.0}, turned, interleaved=False)
        wanted = plain.rotate(queries[..., :turned], positions)
        assert torch.equal(rotated[..., turned:], queries[..., turned:])
    torch.testing.assert_close(rotated[..., :turned], wanted, rtol=1e-5, atol=1e-5)


def test_mla_with_yarn_is_transformers(tmp_path: Path) -> None:
    """DeepSeek-V3's attention, its yarn magnitude and its softmax scale, on a draft's 2H-wide input."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

    scaling = YARN | {"mscale": 0.7, "mscale_all_dim": 1.2, "beta_fast": 32, "beta_slow": 1}
    path = copied(tmp_path, "torchspec_mla", rope_scaling=scaling, rms_norm_eps=1e-6)
    draft = open_reference(path, device="cpu")
    document = json.loads((path / "config.json").read_text())
    shared = {k: v for k, v in document.items() if k.startswith(("q_", "kv_", "qk_", "v_", "num_att", "num_key"))}
    config = transformers.DeepseekV3Config(
        hidden_size=128, max_position_embeddings=512, rope_parameters=dict(scaling), rms_norm_eps=1e-6, **shared
    )
    config._attn_implementation = "eager"
    module = DeepseekV3Attention(config, 0)
    weights = load_file(path / "model.safetensors")
    prefix = "midlayer.self_attn."
    state = {k.removeprefix(prefix): v.float() for k, v in weights.items() if k.startswith(prefix)}
    state["o_proj.weight"] = torch.eye(128)[:, :64]  # its output is as wide as its input, a draft's is half of that
    module.load_state_dict(state)
    states = torch.randn(1, 50, 128)
    positions = torch.arange(50).unsqueeze(0)
    cos_sin = DeepseekV3RotaryEmbedding(config)(states, positions)
    mask = torch.full((50, 50), -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        wanted = module(states, position_embeddings=cos_sin, attention_mask=mask)[0][..., :64]
    attention = draft.attention
    queries, entries = attention.project(
        attention.half(states[..., :64], 0), attention.half(states[..., 64:], 64), positions
    )
    mixed = torch.nn.functional.scaled_dot_product_attention(
        queries, entries.keys, entries.values, is_causal=True, scale=attention.scale
    )
    torch.testing.assert_close(mixed.transpose(1, 2).flatten(2), wanted, rtol=1e-4, atol=1e-5)
    assert attention.scale == pytest.approx(module.scaling)
    assert softmax_scale({}, 16) == 0.25


def test_kimis_yarn_keeps_cosine_and_sine_and_raises_the_scale() -> None:
    """factor 64, mscale = mscale_all_dim = 1: the magnitudes cancel in the rotation, the scale gets 1.4159 squared."""
    scaling = {"type": "yarn", "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    config = {"rope_theta": 50000.0, "rope_scaling": scaling, "max_position_embeddings": 4096}
    assert read_rope(config, 64, interleaved=True).magnitude == 1.0
    assert softmax_scale(config, 192) == pytest.approx(192**-0.5 * 1.41588831**2)


def test_branches_are_chunked_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    draft, *_ = golden("torchspec_mla")
    attention, g = draft.attention, torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    prompt = Entries(random(1, 4, 9, 24), random(1, 4, 9, 16))
    queries, own = random(1, 4, 7, 24), Entries(random(1, 4, 7, 2, 24), random(1, 4, 7, 2, 16))
    anchors = torch.tensor([0, 3, 8, 1, 5, 5, 2])
    whole = attention.branched(queries, prompt, anchors, own)
    monkeypatch.setattr("eagle_parity.draft.attention.SCORES", 80)
    torch.testing.assert_close(attention.branched(queries, prompt, anchors, own), whole)
