"""What a draft was trained on, proven by replaying it on a training capture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from eagle_parity.draft import race
from eagle_parity.draft.bench import Bench, Order
from eagle_parity.draft.forward import Draft
from eagle_parity.draft.ordering import Ordering, rank_orderings
from eagle_parity.draft.passages import find_passages, limited, windows
from eagle_parity.draft.race import SURE, Standing
from eagle_parity.draft.states import reader, stored_states
from eagle_parity.draft.target import Target
from eagle_parity.draft.teacher import Read, Teacher, teach
from eagle_parity.errors import InputError
from eagle_parity.records import Boundary, Capture

WIDE = 1024  # hidden size from which on rows cost so much that no more than ROWS[True] are looked at
ROWS = {True: 2000, False: 8000}
WINDOW = 256  # rows replayed in one piece: a race drops candidates between pieces


@dataclass(frozen=True)
class Proof:
    """The ranking, and what it was found on: so that one more ordering can be held against it."""

    ordering: Ordering
    teacher: Teacher
    draft: Draft
    states: tuple[Boundary, ...]
    read: Read

    def standing(self, order: Order) -> Standing | None:
        """Where an ordering stands against the best one; replayed now if the search left it out.

        None where a state of it is not stored, or nothing could be ranked.
        """
        known = self.ordering.standing(order)
        if known is not None or not self.ordering.ranking or not set(order) <= set(self.states):
            return known
        lessons = [lesson for lesson in self.teacher.lessons if lesson.rows]
        pair = [self.ordering.ranking[0].order, order]
        found = race.run(Bench(self.draft, lessons, self.read), pair, range(len(lessons)))
        return next(standing for standing in found.standings if standing.order == order)

    def refutes(self, order: Order) -> Standing | None:
        """The standing of an ordering that the draft was surely not trained on, else None.

        It can be told what a draft was not trained on even where two others cannot be told apart.
        """
        found = self.standing(order) if self.ordering.control_z >= SURE else None
        return found if found is not None and found.z >= SURE else None


def prove_order(
    draft: Draft,
    capture: Capture,
    target: Target | None = None,
    *,
    rows: int | None = None,
    step: Callable[[int], None] | None = None,
) -> Proof:
    """Rank the orderings of the capture's states by how well the draft does on `rows` of its rows at most.

    Raises InputError where the capture holds no prompt from its beginning, or no state of the draft's width.
    """
    width = draft.checkpoint.target_hidden_size
    states = stored_states(capture, width)
    rows = ROWS[draft.checkpoint.hidden_size >= WIDE] if rows is None else rows
    passages = limited(windows(find_passages(capture.tokens), WINDOW), rows)
    if not passages:
        raise InputError(
            f"{capture.path} holds no prompt of 3 tokens or more from position 0 on",
            fix="make a training dump from whole prompts",
        )
    if not states:
        raise InputError(
            f"{capture.path} stores no boundary that is {width} wide, which the draft needs",
            fix="store boundaries: dump training --boundaries all; and check that the draft belongs to this target",
        )
    read, layers = reader(capture), capture.facts.model.num_layers
    teacher = teach(draft, passages, target=target, boundaries=states, num_layers=layers, read=read)
    ordering = rank_orderings(draft, teacher, states, read, num_layers=layers, step=step)
    return Proof(ordering, teacher, draft, states, read)
