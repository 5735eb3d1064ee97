"""How far a correct capture may be from training: measured from floor dumps, or estimated from dtype and depth."""

from __future__ import annotations

import math
from dataclasses import dataclass

from eagle_parity.alignment.ranks import ROUNDOFF
from eagle_parity.records import FINAL_NORM, Boundary, Capture, Floor

FACTOR = 8.0  # a median over this many times an estimated floor is a fault
MEASURED_FACTOR = 3.0  # the same for a measured floor, which leaves less to guess
CEILING = 0.3  # no two states this far apart are the same, whatever the estimate says

_SPELLING = {
    "bfloat16": "BF16",
    "float16": "F16",
    "half": "F16",
    "float32": "F32",
    "float": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
QUANTISED = 2.0**-7  # of a layer whose weights are quantised: about 1 % in 8 bits
# fp32 kernels of two engines differ by their order of summation, far more than by storage.
_LEAST = 2.0**-18


@dataclass(frozen=True)
class Limit:
    """The floor of one tensor, and the median relative L2 above which it is not the expected state."""

    floor: Floor
    limit: float


def roundoff(*captures_and_names: tuple[Capture, int, str]) -> float:
    """The coarsest relative rounding among the tensors and the dtypes that their models ran in."""
    kinds: list[str] = []
    for capture, rank, name in captures_and_names:
        kinds.append(capture.spec(rank, name).dtype)
        ran_in = (capture.facts.model.dtype or "").removeprefix("torch.")
        kinds.append(_SPELLING.get(ran_in, ran_in.upper()))
    known = [ROUNDOFF[kind] for kind in kinds if kind in ROUNDOFF] or [ROUNDOFF["BF16"]]
    if any(capture.facts.model.quantization is not None for capture, _, _ in captures_and_names):
        known.append(QUANTISED)
    return max(known)


def estimated(boundary: Boundary | None, layers: int, rounding: float) -> Limit:
    """An estimate for boundary k: rounding errors of k layers add up like a random walk.

    Calibrated on two facts: dense bf16 engines differ by 0.6 % after 2 layers and 2 % after 8, a healthy MoE by 4 %
    (median) after 6. The embedding (k = 0) only rounds.
    """
    unit = max(rounding, _LEAST)
    if boundary == 0:
        return Limit(Floor("estimated: one rounding", rounding), 2 * rounding)
    depth = layers if boundary is None or boundary == FINAL_NORM else boundary
    floor = 2 * unit * math.sqrt(depth)
    return Limit(Floor("estimated from dtype and depth (no --floor)", floor), min(FACTOR * floor, CEILING))


def measured(guess: Limit, to_training: Floor | None, to_serving: Floor | None, rounding: float) -> Limit:
    """The limit from floor dumps: the larger distance is the floor.

    The distance to SERVING alone cannot raise the limit above the estimate: when SERVING is broken it is large too.
    """
    floors = [floor for floor in (to_training, to_serving) if floor is not None]
    floor = max(floors, key=lambda f: f.median)
    top = guess.limit if to_training is None else max(guess.limit, MEASURED_FACTOR * to_training.median)
    limit = max(min(MEASURED_FACTOR * floor.median, top), 2 * rounding)
    return Limit(floor, min(limit, CEILING))
