"""Where states come from: random residual networks, tiny real transformers models, recordings of a live H200 server.

A source knows the training side as it is stored and the serving side as a correct server computes it, with that
server's own noise: the streams, what the ranks share of each and what they do not.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.synthetic import make_net

ROOT = Path(__file__).parents[2]
Streams = dict[Any, torch.Tensor]  # boundary number or "final.norm" -> [T, H]


@dataclass
class Source:
    """One model with some prompts. All tensors float32 [T, H] unless stored."""

    name: str
    hidden: int
    layers: int
    prompts: list[list[int]]
    training: Streams
    """As the training side stores them, in its dtype."""
    serving: Streams
    """What a correct server computes, before rounding to `dtype`; `final.norm` included."""
    residuals: dict[int, torch.Tensor] = field(default_factory=dict)
    """Of boundary k on the serving side: the part that every rank holds before the last all-reduce."""
    parts: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """parts[k][r]: rank r's share of what is added to it."""
    final_weight: torch.Tensor | None = None
    tp: int = 2
    dtype: torch.dtype = torch.bfloat16
    architecture: str = "DeepseekV3ForCausalLM"
    usual: tuple[int, ...] = ()
    """The boundaries that the three slots hold in a healthy server."""
    vocabulary: int = 200
    positions_from: int = 0

    @property
    def ids(self) -> list[int]:
        return [token for prompt in self.prompts for token in prompt]

    @property
    def spans(self) -> list[tuple[int, int]]:
        found, begin = [], 0
        for prompt in self.prompts:
            found.append((begin, begin + len(prompt)))
            begin += len(prompt)
        return found

    @property
    def rows(self) -> int:
        return len(self.ids)

    def generator(self, salt: int) -> torch.Generator:
        return torch.Generator().manual_seed(_seed(self.name, salt))


def _seed(name: str, salt: int) -> int:
    value = salt * 1_000_003
    for letter in name:
        value = (value * 131 + ord(letter)) % (2**31 - 1)
    return value


# ------------------------------------------------------------------------------------------------- random networks


def random_net(
    seed: int,
    *,
    hidden: int = 96,
    layers: int = 8,
    prompts: Sequence[int] = (40, 33, 52),
    tp: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    massive: float = 0.0,
    slow: float = 1.0,
    noise: float = 1.0,
    tail: float = 0.0,
    usual: tuple[int, ...] | None = None,
) -> Source:
    """A random residual network.

    `massive`: RMS of two outlier channels over the others'; `slow` < 1: layers that change the stream less; `noise`:
    of the serving engine, in units of the dtype's rounding a layer; `tail`: share of rows that take another expert.
    """
    net = make_net(hidden=hidden, layers=layers, prompts=prompts, vocab=200, tp=tp, seed=seed)
    g = torch.Generator().manual_seed(7_000 + seed)
    streams, residuals, parts = [net.streams[0]], [net.streams[0]], [list(net.parts[0])]
    for k in range(1, layers + 1):
        attention = slow * (net.residuals[k] - net.streams[k - 1])
        shares = [slow * part for part in net.parts[k]]
        residuals.append(streams[-1] + attention)
        parts.append(shares)
        streams.append(residuals[-1] + sum(shares, torch.zeros(())))
    plain = [stream.clone() for stream in streams]
    if massive:
        channels = torch.randperm(hidden, generator=g)[:2]
        height = massive * streams[-1].square().mean().sqrt() * (1 + 0.1 * torch.randn(2, generator=g))
        born = max(1, layers // 4)  # massive activations appear in an early layer and stay
        for k in range(born, layers + 1):
            streams[k] = streams[k].clone()
            streams[k][:, channels] += height
            residuals[k] = residuals[k].clone()
            residuals[k][:, channels] += height
    last = streams[-1]
    final = last / last.square().mean(-1, keepdim=True).sqrt() * net.final_weight
    unit = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float32: 2.0**-22}[dtype]
    serving: Streams = {0: streams[0]}
    shared: dict[int, torch.Tensor] = {0: streams[0]}
    drift = torch.zeros_like(last)
    for k in range(1, layers + 1):
        step = noise * unit * streams[k].norm(dim=-1, keepdim=True) / hidden**0.5
        drift = drift + step * torch.randn(last.shape, generator=g)
        if tail:
            flipped = torch.rand(len(last), 1, generator=g) < tail
            size = 0.3 * (plain[k] - plain[k - 1]).norm(dim=-1, keepdim=True) / hidden**0.5
            drift = drift + flipped * size * torch.randn(last.shape, generator=g)
        serving[k] = streams[k] + drift
        shared[k] = residuals[k] + drift
    n = serving[layers]
    serving["final.norm"] = n / n.square().mean(-1, keepdim=True).sqrt() * net.final_weight
    training: Streams = {k: stream.to(dtype) for k, stream in enumerate(streams)}
    training["final.norm"] = final.to(dtype)
    label = f"net h{hidden} l{layers} tp{tp} {str(dtype)[6:]}" + (f" massive{massive:g}" if massive else "")
    label += (f" slow{slow:g}" if slow != 1 else "") + (f" tail{tail:g}" if tail else "") + f" #{seed}"
    return Source(
        label,
        hidden,
        layers,
        net.prompts,
        training,
        serving,
        shared,
        dict(enumerate(parts)),
        net.final_weight,
        tp,
        dtype,
        usual=(2, layers // 2, layers - 2) if usual is None else usual,
    )


# -------------------------------------------------------------------------------------------- transformers, tiny


def tiny_model(
    work: Path,
    kind: str,
    *,
    seed: int = 0,
    tp: int = 2,
    dtype: str = "bfloat16",
    hidden: int = 64,
    layers: int = 6,
    prompts: Sequence[int] = (36, 29, 44),
) -> Source:
    """A random llama or DeepSeek-V3 (MLA, MoE from layer 1 on), its training side captured by `dump training`.

    The serving side is a forward in which every MLP is computed in `tp` parts that are rounded and added, as
    tensor-parallel ranks do: its rounding travels through the layers and flips experts.
    """
    from eagle_parity.cli.main import main
    from eagle_parity.dump import open_dump

    name = f"{kind} h{hidden} l{layers} tp{tp} {dtype} #{seed}"
    work.mkdir(parents=True, exist_ok=True)
    model, vocabulary = _tiny(kind, seed, hidden, layers, tp)
    model.to(getattr(torch, dtype)).save_pretrained(work / "model")
    g = torch.Generator().manual_seed(seed)
    ids = [torch.randint(5, vocabulary, (n,), generator=g).tolist() for n in prompts]
    (work / "prompts.jsonl").write_text("".join(json.dumps({"token_ids": prompt}) + "\n" for prompt in ids))
    words = ["dump", "training", "-o", str(work / "dump"), "--model", str(work / "model"), "--device", "cpu"]
    if main([*words, "--prompts", str(work / "prompts.jsonl"), "--boundaries", "all"]) != 0:
        raise RuntimeError(f"{name}: dump training failed")
    dump = open_dump(work / "dump")
    rows = len(dump.tokens.token_ids)
    training: Streams = {k: dump.read(0, f"boundary.{k}", 0, rows) for k in range(layers + 1)}
    training["final.norm"] = dump.read(0, "final.norm", 0, rows)
    serving, residuals, parts = _split_forward(model, ids, tp)
    return Source(
        name,
        hidden,
        layers,
        ids,
        training,
        serving,
        residuals,
        parts,
        model.model.norm.weight.detach().float(),
        tp,
        getattr(torch, dtype),
        "LlamaForCausalLM" if kind == "llama" else "DeepseekV3ForCausalLM",
        usual=(2, layers // 2 + 1, layers - 1),
        vocabulary=vocabulary,
    )


def _tiny(kind: str, seed: int, hidden: int, layers: int, tp: int) -> tuple[Any, int]:
    import transformers as t

    vocabulary = 320
    common = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": 256,
        "initializer_range": 0.12,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(1000 + seed)
    if kind == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(**common)).eval(), vocabulary
    config = t.DeepseekV3Config(
        **common,
        moe_intermediate_size=max(16, 8 * tp),
        n_shared_experts=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
    )
    return t.DeepseekV3ForCausalLM(config).eval(), vocabulary


def _split_forward(
    model: Any, prompts: list[list[int]], tp: int
) -> tuple[Streams, dict[int, torch.Tensor], dict[int, list[torch.Tensor]]]:
    """Forward with every MLP in `tp` parts; the streams, the residuals and the parts of each boundary."""
    layers = model.model.layers
    streams: dict[Any, list[torch.Tensor]] = {}
    residuals: dict[int, list[torch.Tensor]] = {}
    parts: dict[int, list[list[torch.Tensor]]] = {}
    saved = []
    for number, layer in enumerate(layers):
        original = layer.mlp.forward
        saved.append((layer.mlp, original))

        def split(x: torch.Tensor, _mlp: Any = layer.mlp, _forward: Any = original, _k: int = number + 1) -> Any:
            shares = [_share(_mlp, _forward, x, rank, tp) for rank in range(tp)]
            parts.setdefault(_k, []).append([share[0].float() for share in shares])
            total = shares[0]
            for share in shares[1:]:
                total = total + share
            return total

        layer.mlp.forward = split
    hooks = []
    for number, layer in enumerate(layers):

        def entering(_: Any, args: Any, kwargs: Any, _k: int = number) -> None:
            state = args[0] if args else kwargs["hidden_states"]
            streams.setdefault(_k, []).append(state[0].detach().float().clone())

        def between(_: Any, args: Any, _k: int = number + 1) -> None:
            residuals.setdefault(_k, []).append(args[0][0].detach().float().clone())

        hooks.append(layer.register_forward_pre_hook(entering, with_kwargs=True))
        hooks.append(layer.post_attention_layernorm.register_forward_pre_hook(between))

    def leaving(_: Any, args: Any, output: torch.Tensor) -> None:
        streams.setdefault(len(layers), []).append(args[0][0].detach().float().clone())
        streams.setdefault("final.norm", []).append(output[0].detach().float().clone())

    hooks.append(model.model.norm.register_forward_hook(leaving))
    with torch.no_grad():
        for prompt in prompts:
            model(input_ids=torch.tensor([prompt]), use_cache=False)
    for hook in hooks:
        hook.remove()
    for mlp, original in saved:
        mlp.forward = original
    whole = {k: torch.cat(rows) for k, rows in residuals.items()}
    whole[0] = torch.cat(streams[0])
    joined = {k: [torch.cat([rows[r] for rows in several]) for r in range(tp)] for k, several in parts.items()}
    return {k: torch.cat(rows) for k, rows in streams.items()}, whole, joined


def _share(mlp: Any, forward: Any, x: torch.Tensor, rank: int, tp: int) -> torch.Tensor:
    """What one rank computes of an MLP or MoE: only its columns of every down projection."""
    kept = []
    for name, parameter in mlp.named_parameters():
        if "down_proj" not in name:
            continue
        width = parameter.shape[-1] // tp
        before = parameter.data.clone()
        kept.append((parameter, before))
        mask = torch.zeros_like(before)
        mask[..., rank * width : (rank + 1) * width] = 1
        parameter.data = before * mask
    try:
        result: torch.Tensor = forward(x)
    finally:
        for parameter, before in kept:
            parameter.data = before
    return result


# ----------------------------------------------------------------------------------------------------- recordings


def recording(name: str, run: str = "fc_in") -> Source:
    """A healthy recording: the slots are boundaries 2, 4, 6 of a server on two H200s; 16 rows."""
    tensors = load_file(ROOT / "fixtures" / "recordings" / f"{name}.safetensors")
    training: Streams = {k: tensors[f"hf.e{k}"] for k in range(8)}
    training["final.norm"] = tensors["hf.e8"]
    serving = {k: tensors[f"{run}.slot{j}.rank0"].float() for j, k in enumerate((2, 4, 6))}
    return Source(
        f"H200 {name}" + ("" if run == "fc_in" else f" {run}"),
        7168,
        8,
        [tensors["ids"].tolist()],
        training,
        serving,
        usual=(2, 4, 6),
        vocabulary=129280,
    )
