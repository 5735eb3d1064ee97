"""The reference forward of an EAGLE-3 draft in plain torch, from its checkpoint alone.

One step, as in SpecForge modeling/draft/llama3_eagle.py, speculators models/eagle3 and SGLang models/llama_eagle3.py
and models/kimi_k25_eagle3.py, for token t of a prompt (x are token ids, f the K states of token t side by side):

    h = fc(f)                                  f normed before: one RMSNorm (norm_before_fc) or one a slot (fc_norm)
    a = [input_layernorm(E[x_t+1]) ; hidden_norm(h)]
    u = r + attention(a)                       r = h, or hidden_norm(h) with norm_before_residual
    y = u + mlp(post_attention_layernorm(u))
    logits = lm_head(norm(y))                  of x_t+2, over the draft's vocabulary: target id = i + d2t[i]

The next step reads y (norm(y) with norm_output) in place of h, and the embedding of the token just drafted.
Everything is computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from eagle_parity.draft.attention import Attention, Entries, Parts, read_attention
from eagle_parity.draft.checkpoint import DraftCheckpoint
from eagle_parity.draft.products import Products, rms_norm
from eagle_parity.draft.table import Table, in_memory, open_table
from eagle_parity.draft.target import Target
from eagle_parity.errors import InputError

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "relu": functional.relu,
}
LAYER = "layers.0."


@dataclass(frozen=True)
class Step:
    """One draft step over queries [B, Q]: `hidden` [B, Q, H] before `norm`, and the attention entries it leaves."""

    hidden: torch.Tensor
    entries: Entries


@dataclass(frozen=True)
class Draft:
    """A draft that can be run. B: prompts or candidates at once, T: tokens, H: its hidden size, K: slots.

    `target_ids` int64 [draft vocabulary]: the target's token id of each draft id.
    """

    checkpoint: DraftCheckpoint
    weights: Mapping[str, torch.Tensor]
    attention: Attention
    embedding: Table
    head: Table
    target_ids: torch.Tensor
    eps: float
    activation: str
    products: Products
    device: torch.device

    @property
    def slots(self) -> int:
        """K."""
        return self.checkpoint.num_slots

    def weight(self, name: str) -> torch.Tensor:
        """A weight by its name in the one spelling."""
        return self.weights[name]

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """The target's K states side by side [.., K * Ht] -> h [.., H]: the draft's own norms, then fc."""
        width, states = self.checkpoint.target_hidden_size, states.float()
        if self.checkpoint.norm_before_fc:
            states = rms_norm(states, self.weight("input_norm.weight"), self.eps)
        if self.checkpoint.fc_norm:
            chunks = torch.split(states, width, dim=-1)
            states = torch.cat(
                [rms_norm(c, self.weight(f"fc_norm.{j}.weight"), self.eps) for j, c in enumerate(chunks)], dim=-1
            )
        return self.products.linear(states, self.weight("fc.weight"), self.weights.get("fc.bias"))

    def embedded(self, ids: torch.Tensor) -> Parts:
        """What the attention makes of the embeddings of ids [B, Q]."""
        normed = rms_norm(self.embedding.rows(ids), self.weight(f"{LAYER}input_layernorm.weight"), self.eps)
        return self.attention.half(normed, 0)

    def begin(self, hidden: torch.Tensor, tokens: Parts, positions: torch.Tensor) -> Step:
        """Step 0 over whole prompts: h [B, T, H], `embedded` of the next tokens (B or 1), positions [B or 1, T].

        Rows after a prompt's end (padding on the right) change nothing before them.
        """
        normed, residual = self._entry(hidden)
        queries, entries = self.attention.project(tokens, self.attention.half(normed, hidden.shape[-1]), positions)
        return Step(self._rest(residual + self.attention.causal(queries, entries)), entries)

    def advance(
        self,
        hidden: torch.Tensor,
        tokens: Parts,
        positions: torch.Tensor,
        prompt: Entries,
        anchors: torch.Tensor,
        before: Entries | None,
    ) -> Step:
        """A later step: queries [B, Q] that stand after prompt row anchors[q] [Q] and after their own branch so far.

        `hidden` is `recurrent` of the step before, `before` the branch's entries [B, heads, Q, S, D] (None: none yet).
        The step's own entries come back as [B, heads, Q, S + 1, D].
        """
        normed, residual = self._entry(hidden)
        queries, new = self.attention.project(tokens, self.attention.half(normed, hidden.shape[-1]), positions)
        own = Entries(new.keys.unsqueeze(3), new.values.unsqueeze(3))
        if before is not None:
            own = Entries(torch.cat([before.keys, own.keys], 3), torch.cat([before.values, own.values], 3))
        return Step(self._rest(residual + self.attention.branched(queries, prompt, anchors, own)), own)

    def _entry(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed = rms_norm(hidden, self.weight(f"{LAYER}hidden_norm.weight"), self.eps)
        return normed, normed if self.checkpoint.norm_before_residual else hidden

    def _rest(self, stream: torch.Tensor) -> torch.Tensor:
        linear, mlp = self.products.linear, f"{LAYER}mlp."
        normed = rms_norm(stream, self.weight(f"{LAYER}post_attention_layernorm.weight"), self.eps)
        gate = linear(normed, self.weight(f"{mlp}gate_proj.weight"), self.weights.get(f"{mlp}gate_proj.bias"))
        up = linear(normed, self.weight(f"{mlp}up_proj.weight"), self.weights.get(f"{mlp}up_proj.bias"))
        gated = ACTIVATIONS[self.activation](gate) * up
        return stream + linear(gated, self.weight(f"{mlp}down_proj.weight"), self.weights.get(f"{mlp}down_proj.bias"))

    def recurrent(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the next step reads: the state as it is, or normed with norm_output."""
        return self.normed(hidden) if self.checkpoint.norm_output else hidden

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """norm(y), what the head reads."""
        return rms_norm(hidden, self.weight("norm.weight"), self.eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of states before `norm` [.., H]; [.., draft vocabulary]. Callers keep the rows few."""
        normed = self.normed(hidden)
        parts = [self.products.linear(normed, block) for _, block in self.head.blocks(self.device)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def load_draft(
    checkpoint: DraftCheckpoint, target: Target | None = None, *, device: torch.device | str = "cpu", fast: bool = False
) -> Draft:
    """Load a draft's weights in their stored dtype.

    The embedding is the draft's own, else the target's; so is the head where both have one vocabulary. `fast`: see
    Products. Raises InputError for what cannot be replayed and for what is missing, with the flag that brings it.
    """
    device = torch.device(device)
    _check(checkpoint)
    products = Products(fast)
    large = {"embed_tokens.weight", "lm_head.weight", "d2t", "t2d"}
    weights = {name: tensor.load().to(device) for name, tensor in checkpoint.tensors.items() if name not in large}
    config = checkpoint.layer_config
    eps = config.get("rms_norm_eps")
    eps = float(eps) if isinstance(eps, int | float) else 1e-6
    prefix = f"{LAYER}self_attn."
    own = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
    embedding = _embedding(checkpoint, target, device)
    head = _head(checkpoint, target, embedding, device)
    return Draft(
        checkpoint=checkpoint,
        weights=weights,
        attention=read_attention(config, own, checkpoint.hidden_size, eps, products).to(device),
        embedding=embedding,
        head=head,
        target_ids=_target_ids(checkpoint, head).to(device),
        eps=eps,
        activation=_activation(config),
        products=products,
        device=device,
    )


def with_weights(draft: Draft, weights: Mapping[str, torch.Tensor], head: torch.Tensor) -> Draft:
    """The same draft with other weights of the same names, the head apart; gradients flow through them."""
    prefix = f"{LAYER}self_attn."
    own = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
    attention = replace(draft.attention, weights=own)
    return replace(draft, weights=dict(weights), attention=attention, head=in_memory(head))


def _check(checkpoint: DraftCheckpoint) -> None:
    if checkpoint.num_layers != 1:
        raise InputError(
            f"{checkpoint.path} has {checkpoint.num_layers} layers; engines disagree on what follows the first "
            "(vLLM norms with input_layernorm, SGLang with hidden_norm), so it is not replayed",
            fix="replay a draft of one layer",
        )
    if checkpoint.quantization is not None:
        raise InputError(
            f"{checkpoint.path} is quantized ({checkpoint.quantization}), which is not replayed",
            fix="give the draft in bf16, as it was trained",
        )
    gone: list[str] = [name for name in ("norm", "fc_norm", "input_norm", "d2t") if name in checkpoint.missing]
    names = [f"{LAYER}{name}.weight" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")]
    names += [f"{LAYER}mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    names += [f"{LAYER}self_attn.o_proj.weight"]
    gone += [name for name in names if name not in checkpoint.tensors]
    if gone:
        raise InputError(
            f"{checkpoint.path} lacks {', '.join(gone)}, without which it cannot be replayed",
            fix="export the draft again, with all of its weights",
        )


def _activation(config: Mapping[str, Any]) -> str:
    name = config.get("hidden_act") or "silu"
    if name not in ACTIVATIONS:
        raise InputError(f"the draft's hidden_act {name!r} cannot be replayed", fix="report it, with the config.json")
    return str(name)


def _embedding(checkpoint: DraftCheckpoint, target: Target | None, device: torch.device) -> Table:
    own = checkpoint.tensors.get("embed_tokens.weight")
    if own is not None:
        return open_table(own, device)
    if target is None:
        raise InputError(
            f"{checkpoint.path} has no embed_tokens (servers give it the target's)",
            fix="give the target model's directory with --target DIR",
        )
    if target.embed.width != checkpoint.hidden_size:
        raise InputError(
            f"{target.path}: its embedding is {target.embed.width} wide, the draft {checkpoint.hidden_size}",
            fix="give the target that the draft was trained for, or a draft with its own embedding",
        )
    return target.embed


def _head(checkpoint: DraftCheckpoint, target: Target | None, embedding: Table, device: torch.device) -> Table:
    own = checkpoint.tensors.get("lm_head.weight")
    if own is not None:
        return open_table(own, device)
    if checkpoint.layer_config.get("tie_word_embeddings") is True:
        return embedding
    if target is None:
        raise InputError(
            f"{checkpoint.path} has no lm_head (servers give it the target's)",
            fix="give the target model's directory with --target DIR",
        )
    if checkpoint.draft_vocab_size not in (None, target.head.length) or target.head.width != checkpoint.hidden_size:
        raise InputError(
            f"{target.path}: its head is [{target.head.length}, {target.head.width}], the draft needs "
            f"[{checkpoint.draft_vocab_size}, {checkpoint.hidden_size}]",
            fix="give the target that the draft was trained for, or a draft with its own head",
        )
    return target.head


def _target_ids(checkpoint: DraftCheckpoint, head: Table) -> torch.Tensor:
    """d2t holds target id minus draft id (SpecForge, speculators, sglang hot_token_id); none: ids are the same."""
    ids = torch.arange(head.length)
    if "d2t" not in checkpoint.tensors:
        return ids
    ids = ids + checkpoint.load("d2t").to(torch.int64)
    if checkpoint.vocab_size is not None and (int(ids.min()) < 0 or int(ids.max()) >= checkpoint.vocab_size):
        raise InputError(
            f"{checkpoint.path}: d2t leads to token ids {int(ids.min())} to {int(ids.max())}, the target has "
            f"{checkpoint.vocab_size}: the table seems to hold absolute ids",
            fix="export the draft again with d2t = target id - draft id",
        )
    return ids


def pick_device(device: str = "auto") -> torch.device:
    """`auto`: a GPU where torch sees one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)


def open_reference(
    path: Path | str, target: Path | str | None = None, *, device: str = "auto", fast: bool = False
) -> Draft:
    """Open and load a draft, and its target's directory where one is given."""
    from eagle_parity.draft.checkpoint import open_draft
    from eagle_parity.draft.target import open_target

    where = pick_device(device)
    return load_draft(open_draft(path), None if target is None else open_target(target, where), device=where, fast=fast)
