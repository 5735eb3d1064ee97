"""Which states, in which order, the draft's fc was trained on: the ordering under which the draft does best.

All ordered K-tuples where they are few; else a staged search, which changes one slot at a time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from eagle_parity.draft import race
from eagle_parity.draft.bench import Bench, Order
from eagle_parity.draft.forward import Draft
from eagle_parity.draft.race import DROP, SURE, Race, Standing
from eagle_parity.draft.teacher import Lesson, Read, Teacher
from eagle_parity.records import FINAL_NORM, Boundary

FULL_BUDGET = {"cpu": 2e13, "cuda": 2e15}  # floating-point operations for which every ordering is tried
LIMIT = {False: 2e13, True: 2e14}  # after which a race ends, undecided; with fast products (bf16) ten times as many
STAGE_ROWS = 128  # rows on which slots are ranked one at a time
STAGE_LENGTH = 64  # of which this many at most from one passage
SWEEPS = 4  # times that all slots are gone through on few rows, at most
FINALS = 5  # races on all rows, at most
BEST = 3  # states of each slot that are combined for the last race
KEPT = 5  # orderings that see every row whatever happens
LEAST = 8  # rows without which nothing is said


@dataclass(frozen=True)
class Ordering:
    """The ranking of all orderings that were tried, best first, and what it is worth.

    `measure`: what `loss` is. `z`: the best against the hardest rival, in standard errors. `control_z`: the best
    against itself with states of other rows. `rows_needed`: rows that would make it sure, where more rows can. `tried`
    of `total` orderings were replayed; `how` says which were not, and why that is safe.
    """

    ranking: tuple[Standing, ...]
    measure: str
    rows: int
    z: float
    control_z: float
    ambiguous: bool
    why: str | None
    rows_needed: int | None
    tried: int
    total: int
    how: str

    @property
    def best(self) -> Order | None:
        """The ordering that the draft was trained on; None when the data cannot tell."""
        return None if self.ambiguous or not self.ranking else self.ranking[0].order

    def standing(self, order: Order) -> Standing | None:
        """Where an ordering ended; None when it was not tried."""
        return next((standing for standing in self.ranking if standing.order == order), None)


def rank_orderings(
    draft: Draft,
    teacher: Teacher,
    states: Sequence[Boundary],
    read: Read,
    *,
    num_layers: int | None = None,
    staged: bool | None = None,
    step: Callable[[int], None] | None = None,
) -> Ordering:
    """Replay the draft on orderings of `states`, of which `read` gives rows.

    `staged` None: decided by the work that all orderings would be. `num_layers` gives the staged search the usual
    layers to begin with.
    """
    lessons = [lesson for lesson in teacher.lessons if lesson.rows]
    rows = sum(lesson.rows for lesson in lessons)
    total = math.perm(len(states), draft.slots)
    if rows < LEAST or not total:
        why = (
            f"{rows} rows can be judged, {LEAST} are needed"
            if total
            else f"{len(states)} states are stored, the draft has {draft.slots} slots"
        )
        return Ordering((), teacher.measure, rows, 0.0, 0.0, True, why, None, 0, total, "nothing was tried")
    search = _Search(draft, lessons, read, step)
    if staged is None:
        device = "cuda" if draft.device.type == "cuda" else "cpu"
        staged = total * min(rows, 4 * race.FIRST) * row_cost(draft) > FULL_BUDGET[device]
    if staged:
        found, how = search.staged(states, seeds(draft.slots, states, num_layers), total)
    else:
        found = search.race(itertools.permutations(states, draft.slots), lessons)
        dropped = sum(standing.dropped for standing in found.standings)
        how = f"all {total} orderings were tried"
        if dropped:
            how += f"; {dropped} were dropped before the last row, each more than {DROP:g} standard errors behind"
    return search.judge(found, teacher.measure, total, how)


def row_cost(draft: Draft) -> float:
    """Floating-point operations to replay one candidate on one row, its parts given."""
    layer = sum(tensor.numel() for name, tensor in draft.weights.items() if name.startswith("layers."))
    doubled = sum(draft.attention.weights[f"{name}.weight"].numel() // 2 for name in draft.attention.names)
    return 2.0 * (layer - doubled + draft.head.length * draft.head.width)


def seeds(slots: int, states: Sequence[Boundary], num_layers: int | None) -> list[Order]:
    """Orderings to begin a staged search with, as far as their states are there.

    The default layers of all engines and trainers (2, n/2, n-3), one layer earlier and later, the embedding in front of
    or in place of one of them, and states spread evenly; each in every order.
    """
    numbers = [state for state in states if isinstance(state, int)]
    n = num_layers if num_layers is not None else max(numbers, default=0)
    usual: list[Order] = [tuple(sorted({2, n // 2, n - 3}))]
    usual += [tuple(b + shift for b in usual[0] if isinstance(b, int)) for shift in (-1, 1)]
    usual += [(0, *usual[k][:-1]) for k in range(3)]
    usual += [(*base[:-1], FINAL_NORM) for base in usual[:3]]
    spread = tuple(numbers[round(i * (len(numbers) - 1) / max(1, slots - 1))] for i in range(slots)) if numbers else ()
    sets = [tuple(base) for base in usual if len(base) == slots] + [spread]
    found = [
        order
        for base in sets
        if len(set(base)) == slots and all(state in states for state in base)
        for order in itertools.permutations(base)
    ]
    return list(dict.fromkeys(found)) or [tuple(itertools.islice(states, slots))]


class _Search:
    def __init__(self, draft: Draft, lessons: Sequence[Lesson], read: Read, step: Callable[[int], None] | None) -> None:
        self.draft, self.lessons, self.read, self.step = draft, lessons, read, step
        self.bench = Bench(draft, lessons, read)
        self.limit = LIMIT[draft.products.fast or draft.device.type == "cuda"] / row_cost(draft)
        self.tried: set[Order] = set()

    def race(self, orders: Iterable[Order], lessons: Sequence[Lesson], bench: Bench | None = None) -> Race:
        wanted = list(orders)
        self.tried.update(wanted)
        numbers = range(len(lessons))
        return race.run(bench or self.bench, wanted, numbers, keep=KEPT, limit=self.limit, step=self.step)

    def staged(self, states: Sequence[Boundary], begin: Sequence[Order], total: int) -> tuple[Race, str]:
        """Vary one slot at a time on few rows until nothing improves; then on all rows, until the best stands."""
        few = _shorter(self.lessons)
        bench = Bench(self.draft, few, self.read)
        best = self.race(begin, few, bench).leader.order
        best, near, sweeps = self._climb(best, states, few, bench)
        finals, found, alive = 0, None, list[Order]()
        while finals < FINALS:
            found = self.race(dict.fromkeys([*_finalists(best, near, states), *alive]), self.lessons)
            finals += 1
            if found.leader.order == best:
                break
            best = found.leader.order
            alive = [standing.order for standing in found.standings if not standing.dropped]
        assert found is not None
        stands = "" if found.leader.order == best else "; the last race still moved, so there may be a better one"
        how = (
            f"{len(self.tried)} of {total} orderings were tried: from the best of {len(begin)} usual ones, each slot "
            f"was varied over all {len(states)} states on {sum(lesson.rows for lesson in few)} rows until none "
            f"improved ({sweeps} sweeps); then every permutation, every change of one slot to any state, and the best "
            f"{BEST} states of each slot together, raced on all rows until none was better ({finals} races). What left "
            f"a race early was more than {DROP:g} standard errors behind its best{stands}"
        )
        return found, how

    def _climb(
        self, best: Order, states: Sequence[Boundary], few: Sequence[Lesson], bench: Bench
    ) -> tuple[Order, list[list[Boundary]], int]:
        near: list[list[Boundary]] = [[state] for state in best]
        for sweep in range(1, SWEEPS + 1):
            before = best
            for slot in range(len(best)):
                others = best[:slot] + best[slot + 1 :]
                orders = [(*best[:slot], state, *best[slot + 1 :]) for state in states if state not in others]
                standings = self.race(orders, few, bench).standings
                best = standings[0].order
                near[slot] = [standing.order[slot] for standing in standings[:BEST]]
            if best == before:
                return best, near, sweep
        return best, near, SWEEPS

    def judge(self, found: Race, measure: str, total: int, how: str) -> Ordering:
        rival = found.runner_up
        z = math.inf if rival is None else rival.z
        control = self._control(found.leader.order)
        why, needed = None, None
        if control < SURE:
            why = (
                "the draft does no better on its own states than on those of other rows: it is untrained, of another "
                "target, or the tokens are not what it was trained on"
            )
        elif z < SURE and rival is not None:
            why = f"{list(found.leader.order)} and {list(rival.order)} cannot be told apart ({z:.1f} standard errors)"
            needed = math.ceil(found.leader.rows * (SURE / z) ** 2) if z > 0.2 else None
        return Ordering(
            found.standings,
            measure,
            found.leader.rows,
            z,
            control,
            why is not None,
            why,
            needed,
            len(self.tried),
            total,
            how,
        )

    def _control(self, order: Order) -> float:
        rolled = Bench(self.draft, self.lessons, self.read, rolled=True)
        ours, theirs = [], []
        for number in range(len(self.lessons)):
            ours.append(self.bench.try_out([order], number).loss[0])
            theirs.append(rolled.try_out([order], number).loss[0])
            if sum(map(len, ours)) >= 4 * race.FIRST:
                break
        return race.paired(ours, theirs)


def _shorter(lessons: Sequence[Lesson]) -> list[Lesson]:
    """The first rows of the first lessons, STAGE_ROWS in all."""
    kept: list[Lesson] = []
    for lesson in lessons:
        size = min(STAGE_LENGTH, len(lesson.passage) - 1)
        cut = Lesson(
            lesson.passage.cut(size + 1),
            lesson.mean_head[:size],
            lesson.entropy[:size],
            lesson.wanted[:size],
            lesson.counted[:size],
        )
        if cut.rows:
            kept.append(cut)
        if sum(one.rows for one in kept) >= STAGE_ROWS:
            break
    return kept or list(lessons)


def _finalists(best: Order, near: Sequence[Sequence[Boundary]], states: Sequence[Boundary]) -> list[Order]:
    """Permutations, every change of one slot, and the combinations of what came close."""
    found = [best, *itertools.permutations(best)]
    for slot in range(len(best)):
        others = best[:slot] + best[slot + 1 :]
        found += [(*best[:slot], state, *best[slot + 1 :]) for state in states if state not in others]
    found += [order for order in itertools.product(*near) if len(set(order)) == len(order)]
    return list(dict.fromkeys(found))
