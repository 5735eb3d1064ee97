"""What a draft should have said: the target's distribution at each row, or else the token that followed.

Row t of a draft reads the target's state of token t and the embedding of token t+1, and predicts token t+2: what the
target says at row t+1. Cross-entropy against a distribution p over the draft's vocabulary needs no more of p than
u = head^T p, since sum_i p_i logit_i = u . norm(y): H numbers a row in place of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from eagle_parity.draft.forward import Draft
from eagle_parity.draft.passages import Passage, uncounted
from eagle_parity.draft.table import Table
from eagle_parity.draft.target import Target
from eagle_parity.records import FINAL_NORM, Boundary, IntArray

CHUNK = 256  # rows whose logits over the target's vocabulary are in memory at once
FEW = 64  # a loss mask that leaves fewer rows than this is not used

Read = Callable[[Boundary, IntArray], torch.Tensor]
"""States of a boundary at capture rows, [rows, H]."""


@dataclass(frozen=True)
class Lesson:
    """One passage of T tokens with its answers, for the draft's rows 0..T-2.

    `mean_head` float32 [T-1, H]: u, or the head's row of the next token. `entropy` [T-1]: of the target over the
    draft's vocabulary, 0 where only the token is known. `wanted` int64 [T-1]: the target token id of the right answer,
    -1 where it is unknown. `counted` bool [T-1]: rows to judge by; their answers are in the draft's vocabulary.
    """

    passage: Passage
    mean_head: torch.Tensor
    entropy: torch.Tensor
    wanted: torch.Tensor
    counted: torch.Tensor

    @property
    def rows(self) -> int:
        """Rows to judge by."""
        return int(self.counted.sum())


@dataclass(frozen=True)
class Teacher:
    """`measure` says in words what the loss of these lessons is."""

    lessons: tuple[Lesson, ...]
    measure: str
    greedy: float | None
    """Share of the counted rows whose next token is the target's likeliest; None without its states."""

    @property
    def rows(self) -> int:
        """Rows to judge by, of all lessons."""
        return sum(lesson.rows for lesson in self.lessons)


def teach(
    draft: Draft,
    passages: Sequence[Passage],
    *,
    target: Target | None = None,
    boundaries: Sequence[Boundary] = (),
    num_layers: int | None = None,
    read: Read | None = None,
) -> Teacher:
    """Answers for passages.

    With the target's head and a state to put through it (`final.norm`, else boundary n and the target's norm) they are
    its distribution, renormalised over the draft's vocabulary as trainers do (SpecForge, core/eagle3.py); else the
    tokens that followed.
    """
    known = torch.full((_vocabulary(draft, target, passages),), -1, dtype=torch.int64, device=draft.device)
    known[draft.target_ids] = torch.arange(len(draft.target_ids), device=draft.device)
    source = _source(boundaries, num_layers) if target is not None and read is not None else None
    if sum(int(p.counted[1:].sum()) for p in passages) < FEW:
        passages = uncounted(passages)
    if source is None or target is None or read is None:
        return Teacher(
            tuple(_tokens(draft, passage, known) for passage in passages), "cross-entropy of the next token", None
        )
    lessons, greedy = [], []
    for passage in passages:
        states = read(source, passage.rows).to(draft.device)
        states = target.normed(states) if source != FINAL_NORM else states.float()
        parts = [_distribution(draft, target.head, states[i : i + CHUNK], known) for i in range(0, len(states), CHUNK)]
        means, entropy, best = (torch.cat(column)[1:] for column in zip(*parts, strict=True))
        counted = torch.from_numpy(passage.counted[:-1].copy()).to(draft.device) & (known[best] >= 0)
        lessons.append(Lesson(passage, means, entropy, best, counted))
        following = torch.from_numpy(passage.ids).to(draft.device)
        greedy.append((best[:-1] == following[2:])[counted[:-1]])
    share = float(torch.cat(greedy).float().mean()) if greedy else None
    return Teacher(tuple(lessons), "KL of the draft from the target", share)


def _vocabulary(draft: Draft, target: Target | None, passages: Sequence[Passage]) -> int:
    sizes = [int(draft.target_ids.max()) + 1, *(int(p.ids.max()) + 1 for p in passages)]
    return max(sizes if target is None else [*sizes, target.head.length])


def _source(boundaries: Sequence[Boundary], num_layers: int | None) -> Boundary | None:
    if FINAL_NORM in boundaries:
        return FINAL_NORM
    return num_layers if num_layers is not None and num_layers in boundaries else None


def _tokens(draft: Draft, passage: Passage, known: torch.Tensor) -> Lesson:
    ids = torch.from_numpy(passage.ids).to(draft.device)
    wanted = torch.full((len(ids) - 1,), -1, dtype=torch.int64, device=draft.device)
    wanted[:-1] = ids[2:]
    own = torch.where(wanted >= 0, known[wanted.clamp(min=0)], -1)
    means = draft.head.rows(own.clamp(min=0))
    counted = torch.from_numpy(passage.counted[:-1].copy()).to(draft.device) & (own >= 0)
    return Lesson(passage, means, torch.zeros(len(wanted), device=draft.device), wanted, counted)


def _distribution(
    draft: Draft, head: Table, states: torch.Tensor, known: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """u [rows, H], entropy and likeliest target token of final states [rows, H]."""
    rows = len(states)
    inside = states.new_full((rows, len(draft.target_ids)), -torch.inf)
    top = states.new_full((rows,), -torch.inf)
    best = torch.zeros(rows, dtype=torch.int64, device=states.device)
    for begin, block in head.blocks(draft.device):
        logits = draft.products.linear(states, block)
        value, index = logits.max(dim=-1)
        best = torch.where(value > top, index + begin, best)
        top = torch.maximum(top, value)
        own = known[begin : begin + len(block)]
        inside[:, own[own >= 0]] = logits[:, own >= 0]
    logs = inside.log_softmax(-1)
    shares = logs.exp()
    entropy = -(shares * logs).nan_to_num(0.0).sum(-1)
    means = states.new_zeros((rows, draft.head.width))
    for begin, block in draft.head.blocks(draft.device):
        means += shares[:, begin : begin + len(block)] @ block.float()
    return means, entropy, best
