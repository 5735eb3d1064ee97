"""Candidate orderings of states, replayed on lessons: the loss and the top-1 hit of every counted row.

fc is linear, so the part W_j h_k of slot j and boundary k is computed once, and an ordering is a sum of K parts. The
draft's norms before fc keep that: one RMSNorm a slot (fc_norm) belongs to its part; the one RMSNorm over all slots
(norm_before_fc) divides the sum by a root mean square, for which the parts' sums of squares add up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from eagle_parity.draft.forward import Draft
from eagle_parity.draft.products import rms_norm
from eagle_parity.draft.teacher import Lesson, Read
from eagle_parity.records import Boundary

Order: TypeAlias = tuple[Boundary, ...]

STATES = 2**25  # elements of the widest activation of a batch of candidates
LOGITS = 2**25
PARTS = 2**30  # bytes of parts that are kept for candidates to come


@dataclass(frozen=True)
class Outcome:
    """Of candidates on one lesson: `loss` float32 and `hit` bool, [candidates, counted rows]."""

    loss: torch.Tensor
    hit: torch.Tensor


@dataclass(frozen=True)
class Part:
    """W_j h_k for the rows of a lesson [T-1, H], and the sum of squares of h_k [T-1] where the norm needs it."""

    product: torch.Tensor
    squares: torch.Tensor | None


@dataclass
class Bench:
    """A draft with the lessons that it is tried on. Parts are kept between calls while they fit."""

    draft: Draft
    lessons: Sequence[Lesson]
    read: Read
    rolled: bool = False
    """Pair every row with the state of a row half a passage away: a control, which must lose."""
    _parts: OrderedDict[tuple[int, int, Boundary], Part] = field(default_factory=OrderedDict)
    _held: int = 0

    def try_out(self, orders: Sequence[Order], number: int) -> Outcome:
        """Replay orderings on lesson `number`."""
        lesson = self.lessons[number]
        rows = len(lesson.passage) - 1
        draft = self.draft
        tokens = draft.embedded(torch.from_numpy(lesson.passage.ids[1:]).to(draft.device).unsqueeze(0))
        positions = torch.arange(rows, device=draft.device).unsqueeze(0)
        widest = max(tensor.shape[0] for name, tensor in draft.weights.items() if name.startswith("layers."))
        batch = max(1, STATES // (rows * widest))
        losses, hits = [], []
        for at in range(0, len(orders), batch):
            hidden = torch.stack([self._hidden(order, number) for order in orders[at : at + batch]])
            made = draft.begin(hidden, tokens, positions).hidden[:, lesson.counted]
            loss, hit = self._score(made.flatten(0, 1), lesson, len(hidden))
            losses.append(loss.view(len(hidden), -1))
            hits.append(hit.view(len(hidden), -1))
        return Outcome(torch.cat(losses).cpu(), torch.cat(hits).cpu())

    def _score(self, hidden: torch.Tensor, lesson: Lesson, times: int) -> tuple[torch.Tensor, torch.Tensor]:
        draft = self.draft
        means = lesson.mean_head[lesson.counted].repeat(times, 1)
        entropy = lesson.entropy[lesson.counted].repeat(times)
        wanted = lesson.wanted[lesson.counted].repeat(times)
        step = max(1, LOGITS // draft.head.length)
        losses, hits = [], []
        for at in range(0, len(hidden), step):
            part = slice(at, at + step)
            logits = draft.logits(hidden[part])
            right = (means[part] * draft.normed(hidden[part])).sum(-1)
            losses.append(logits.logsumexp(-1) - right - entropy[part])
            hits.append(draft.target_ids[logits.argmax(-1)] == wanted[part])
        return torch.cat(losses), torch.cat(hits)

    def _hidden(self, order: Order, number: int) -> torch.Tensor:
        """h [T-1, H] of an ordering."""
        draft = self.draft
        parts = [self._part(number, slot, boundary) for slot, boundary in enumerate(order)]
        total = parts[0].product.float()
        for part in parts[1:]:
            total = total + part.product
        if draft.checkpoint.norm_before_fc:
            squares = torch.stack([part.squares for part in parts if part.squares is not None]).sum(0)
            width = draft.checkpoint.target_hidden_size * len(order)
            total = total * torch.rsqrt(squares / width + draft.eps).unsqueeze(-1)
        bias = draft.weights.get("fc.bias")
        return total if bias is None else total + bias

    def _part(self, number: int, slot: int, boundary: Boundary) -> Part:
        key = (number, slot, boundary)
        found = self._parts.get(key)
        if found is not None:
            self._parts.move_to_end(key)
            return found
        part = self._make(number, slot, boundary)
        self._parts[key] = part
        self._held += part.product.nbytes
        while self._held > PARTS and len(self._parts) > self.draft.slots:
            _, oldest = self._parts.popitem(last=False)
            self._held -= oldest.product.nbytes
        return part

    def _make(self, number: int, slot: int, boundary: Boundary) -> Part:
        draft, checkpoint = self.draft, self.draft.checkpoint
        rows = self.lessons[number].passage.rows
        states = self.read(boundary, rows).to(draft.device).float()
        states = states[:-1]
        if self.rolled:
            states = states.roll(max(1, len(states) // 2), 0)
        width = checkpoint.target_hidden_size
        columns = slice(slot * width, (slot + 1) * width)
        squares = None
        if checkpoint.fc_norm:
            states = rms_norm(states, draft.weight(f"fc_norm.{slot}.weight"), draft.eps)
        if checkpoint.norm_before_fc:
            squares = states.square().sum(-1)
            states = states * draft.weight("input_norm.weight")[columns].float()
        product = draft.products.linear(states, draft.weight("fc.weight")[:, columns])
        # Kept as wide as it was computed: bf16 products gain nothing from float32 storage.
        return Part(product.to(torch.bfloat16) if draft.products.fast else product, squares)
