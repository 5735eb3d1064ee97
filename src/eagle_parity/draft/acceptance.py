"""How many tokens a server would accept a verify step: its drafting replayed after every row of known text.

As SGLang drafts (speculative/eagle_worker_v2.py draft_forward, spec_utils.py select_top_k_tokens, eagle_utils.py
organize_draft_results): the rows that the target has computed go through fc, then the draft goes on alone, reading its
own states; with top-k it keeps the k likeliest branches a step, and of all that it saw the tree's best tokens go to the
target. A branch keeps its own attention entries even where its token descends from another branch: SGLang does so too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from eagle_parity.draft.attention import Entries
from eagle_parity.draft.forward import Draft, Step
from eagle_parity.draft.passages import Passage
from eagle_parity.draft.teacher import Lesson, Teacher
from eagle_parity.records import IntArray

ELEMENTS = 2**24  # logits or tree attention of one chunk of anchors
GREEDY = 0.95  # share of likeliest tokens from which on text counts as the target's own greedy answer

Fed = Callable[[IntArray], torch.Tensor]
"""What the draft is fed at capture rows: K states side by side, [rows, K * H]."""


@dataclass(frozen=True)
class Speculation:
    """A server's speculative settings: num-steps, eagle-topk and num-draft-tokens (the root among them)."""

    steps: int = 3
    topk: int = 1
    tokens: int = 4


@dataclass(frozen=True)
class Forecast:
    """Tokens a verify step, the target's own one included.

    `walk`: the text is the target's greedy answer, and the server's path through it was followed; generated tokens over
    verify steps, as spec_accept_length counts. `survival`: other text; a depth's chance is taken where the target
    agrees with the text up to there, and every row counts alike. `by_depth`: chance of depth d, given d-1.
    """

    accept_length: float
    kind: Literal["walk", "survival"]
    by_depth: tuple[float, ...]
    agreement: float
    verify_steps: int
    speculation: Speculation


@dataclass(frozen=True)
class Trees:
    """Drafted trees of Q anchors: `tokens` target ids and `parents` [Q, N]; a parent is a column, -1 the root."""

    tokens: torch.Tensor
    parents: torch.Tensor


def propose(draft: Draft, ids: torch.Tensor, fed: torch.Tensor, speculation: Speculation) -> Trees:
    """The tree that a server drafts after each row of one passage.

    `ids` int64 [T]; `fed` [T-1, K * H]. Row t stands for the moment when token t+1 is the last one committed.
    """
    positions = torch.arange(len(ids) - 1, device=draft.device)
    start = draft.begin(draft.fuse(fed).unsqueeze(0), draft.embedded(ids[1:].unsqueeze(0)), positions.unsqueeze(0))
    widest = max(draft.head.length, draft.attention.heads * len(positions))
    size = max(1, ELEMENTS // (speculation.topk * widest))
    trees = [_chunk(draft, start, positions[at : at + size], speculation) for at in range(0, len(positions), size)]
    return Trees(torch.cat([t.tokens for t in trees]), torch.cat([t.parents for t in trees]))


def _chunk(draft: Draft, start: Step, anchors: torch.Tensor, speculation: Speculation) -> Trees:
    count, k = len(anchors), speculation.topk
    logits = draft.logits(start.hidden[0, anchors])
    scores, tokens = _top(draft, logits, k)  # [Q, k]
    hidden = draft.recurrent(start.hidden[0, anchors]).repeat_interleave(k, 0)
    all_scores, all_tokens = [scores], [tokens]
    all_parents = [torch.full_like(tokens, -1)]
    chosen = torch.arange(k, device=draft.device).expand(count, k)  # columns of the branches' tokens
    before: Entries | None = None
    for step in range(1, speculation.steps):
        where = anchors.repeat_interleave(k)
        made = draft.advance(
            hidden.unsqueeze(0),
            draft.embedded(tokens.reshape(1, -1)),
            (where + step).unsqueeze(0),
            start.entries,
            where,
            before,
        )
        before = made.entries
        chances, ids = _top(draft, draft.logits(made.hidden[0]), k)
        grown = scores.unsqueeze(2) * chances.view(count, k, k)
        width = sum(column.shape[1] for column in all_tokens)
        all_scores.append(grown.flatten(1))
        all_tokens.append(ids.view(count, k * k))
        all_parents.append(chosen.repeat_interleave(k, 1))
        scores, index = grown.flatten(1).topk(k, dim=-1)
        tokens = all_tokens[-1].gather(1, index)
        chosen = index + width
        parent = index // k + torch.arange(count, device=draft.device).unsqueeze(1) * k
        hidden = draft.recurrent(made.hidden[0])[parent.flatten()]
    flat = torch.cat(all_scores, 1)
    kept = flat.topk(min(speculation.tokens - 1, flat.shape[1]), dim=-1).indices.sort().values
    columns = torch.full_like(flat, -2, dtype=torch.int64)
    columns.scatter_(1, kept, torch.arange(kept.shape[1], device=draft.device).expand_as(kept))
    parents = torch.cat(all_parents, 1).gather(1, kept)
    parents = torch.where(parents < 0, -1, columns.gather(1, parents.clamp(min=0)))
    return Trees(torch.cat(all_tokens, 1).gather(1, kept), parents)


def _top(draft: Draft, logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Chances and target ids of the k likeliest tokens; with k = 1 the chance does not matter, and is 1."""
    if k == 1:
        best = logits.argmax(-1, keepdim=True)
        return torch.ones_like(best, dtype=logits.dtype), draft.target_ids[best]
    chances, ids = logits.softmax(-1).topk(k, dim=-1)
    return chances, draft.target_ids[ids]


def accepted(trees: Trees, ids: torch.Tensor, depth: int) -> torch.Tensor:
    """How many drafted tokens go on with the text after each row, int64 [Q]; `ids` [T], Q = T-1."""
    count = len(trees.tokens)
    at = torch.full((count,), -1, dtype=torch.int64, device=ids.device)
    done = torch.zeros(count, dtype=torch.int64, device=ids.device)
    alive = torch.ones(count, dtype=torch.bool, device=ids.device)
    rows = torch.arange(count, device=ids.device)
    for step in range(depth):
        place = rows + 2 + step
        wanted = torch.where(place < len(ids), ids[place.clamp(max=len(ids) - 1)], -1)
        fits = (trees.parents == at.unsqueeze(1)) & (trees.tokens == wanted.unsqueeze(1))
        alive &= fits.any(1)
        at = torch.where(alive, fits.int().argmax(1), at)
        done += alive.long()
    return done


def forecast(
    draft: Draft,
    teacher: Teacher,
    fed: Fed,
    speculation: Speculation | None = None,
    *,
    prompts: Sequence[int] | None = None,
) -> Forecast:
    """Replay drafting over the teacher's passages, with what `fed` gives to the draft.

    `prompts`: tokens of each passage that were given, not generated; without it the loss mask's first run of zeros, if
    there is one. A walk needs prompts and greedy text (see Forecast).
    """
    speculation = speculation or Speculation()
    if prompts is None:
        prompts = [_given(lesson.passage) for lesson in teacher.lessons]
    tally = _Tally(speculation.steps)
    for lesson, given in zip(teacher.lessons, prompts, strict=True):
        ids = torch.from_numpy(lesson.passage.ids).to(draft.device)
        states = fed(lesson.passage.rows[:-1]).to(draft.device)
        trees = propose(draft, ids, states, speculation)
        tally.survive(trees, ids, lesson)
        if given:
            tally.walk(accepted(trees, ids, speculation.steps).tolist(), lesson, given)
    walks = tally.verified > 0 and tally.greedy >= GREEDY * tally.written
    chances = tally.chances()
    length, product = 1.0, 1.0
    for chance in chances:
        product *= chance
        length += product
    return Forecast(
        tally.generated / tally.verified if walks else length,
        "walk" if walks else "survival",
        chances,
        tally.agreed / tally.judged if tally.judged else 0.0,
        tally.verified if walks else tally.judged,
        speculation,
    )


def _given(passage: Passage) -> int:
    """Tokens before the first counted one; 0 when the mask counts all."""
    return int(passage.counted.argmax()) if passage.counted.any() else 0


class _Tally:
    def __init__(self, depth: int) -> None:
        self.reached, self.passed = [0] * depth, [0] * depth
        self.generated = self.verified = self.agreed = self.judged = self.greedy = self.written = 0

    def survive(self, trees: Trees, ids: torch.Tensor, lesson: Lesson) -> None:
        """Count, for each depth, the rows that reached it and those that passed it."""
        rows = torch.arange(len(trees.tokens), device=ids.device)
        at = torch.full_like(rows, -1)
        alive = lesson.counted & (lesson.wanted >= 0)
        self.judged += int(alive.sum())
        for depth in range(len(self.reached)):
            place = rows + depth
            inside = place < len(lesson.wanted)
            wanted = torch.where(inside, lesson.wanted[place.clamp(max=len(lesson.wanted) - 1)], -1)
            alive = alive & (wanted >= 0)
            fits = (trees.parents == at.unsqueeze(1)) & (trees.tokens == wanted.unsqueeze(1)) & alive.unsqueeze(1)
            passed = fits.any(1)
            self.reached[depth] += int(alive.sum())
            self.passed[depth] += int(passed.sum())
            if depth == 0:
                self.agreed += int(((trees.tokens[:, 0] == wanted) & alive).sum())
            at = torch.where(passed, fits.int().argmax(1), at)
            # The next depth can be judged only where the text went the way of the target.
            following = ids[(place + 2).clamp(max=len(ids) - 1)]
            alive = passed & (following == wanted) & (place + 2 < len(ids))

    def walk(self, accepted: Sequence[int], lesson: Lesson, given: int) -> None:
        """Follow the server: after the prompt, and then after every verify step, until the text ends."""
        length = len(lesson.passage)
        row = given - 1  # its next token, the first generated one, comes with the prefill
        if length <= given + 1:
            return
        said = torch.from_numpy(lesson.passage.ids[given + 1 :]).to(lesson.wanted.device)
        self.greedy += int((lesson.wanted[given - 1 : length - 2] == said).sum())
        self.written += len(said)
        self.generated += 1
        while row + 2 < length:
            taken = min(accepted[row] + 1, length - row - 2)
            self.generated += taken
            self.verified += 1
            row += accepted[row] + 1

    def chances(self) -> tuple[float, ...]:
        """Of each depth, given the one before."""
        return tuple(p / r if r else 0.0 for p, r in zip(self.passed, self.reached, strict=True))
