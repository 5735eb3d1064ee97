"""Is a tensor a boundary times one factor? Told from noise by what noise can do to the factor, and by its spread.

The factor of a row is the one that brings the training row nearest to the serving row. Three things move it in a
healthy capture. Rounding: at most one or two units of it, since errors of single channels cancel. Noise that is no part
of the state: nothing on average, the rows scatter about 1. Noise that replaces a part of the state (another expert, a
coarser weight): what goes is a part of the state and what comes is not, so the factor falls by half of the square of
the relative distance if all of it is of that kind and layers do not add to it (0.4 to 0.8 of the square in a recorded
MoE and in forwards of weights rounded to 8 bits, 1.5 in one of them). A factor that is further away from 1 than two
roundings and twice that square, and on nearly all rows (three standard deviations of the rows' factors), is somebody's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from eagle_parity.alignment.matching import LUCK
from eagle_parity.diagnosis.case import Case, TensorCase
from eagle_parity.diagnosis.floor import roundoff
from eagle_parity.diagnosis.judgement import MIN_ROWS
from eagle_parity.diagnosis.rules.norm import nearest_of, robust_spread
from eagle_parity.diagnosis.steps import row_factors
from eagle_parity.metrics.distances import FloatArray, numpy64, rel_l2, row_sums
from eagle_parity.metrics.distribution import median, sign_test
from eagle_parity.records import Boundary

ROUNDINGS = 2.0
SQUARES = 2.0
SPREADS = 3.0


@dataclass(frozen=True)
class Scale:
    """serving = factor x boundary. `rows`: relative L2 of each probe row then."""

    boundary: Boundary
    factor: float
    rows: FloatArray
    spread: float
    """Robust standard deviation of the rows' own factors, over the factor."""

    @property
    def distance(self) -> float:
        """Median of the rows."""
        return median(self.rows)

    def beyond_noise(self, rounding: float, floor: float = 0.0) -> bool:
        """Whether the factor is further from 1 than a healthy server's. `floor`: a measured one's relative L2."""
        off = max(self.factor, 1 / self.factor) - 1
        return off > max(ROUNDINGS * rounding + SQUARES * self.distance**2, SPREADS * self.spread, floor)


def fit(case: Case, tensor: TensorCase, boundary: Boundary) -> Scale | None:
    """The best single factor between a tensor and a boundary, on ordinary channels; None where it is not positive."""
    serving = case.keep_ordinary(case.serving_rows(tensor))
    truth = case.keep_ordinary(case.training_rows(boundary))
    if serving.shape != truth.shape:
        return None
    sums = row_sums(serving, truth)
    factors = sums.dot / sums.training_sq.clamp_min(1e-30)
    factor = median(numpy64(factors))
    if not factor > 0:
        return None
    return Scale(boundary, factor, rel_l2(serving / factor, truth), robust_spread(factors))


def find(case: Case, tensor: TensorCase) -> Scale | None:
    """A boundary that a failed tensor equals up to one factor; the expected one if it fits as well."""
    fits = [fit(case, tensor, boundary) for boundary in tensor.match.rel_l2]
    near = [scale for scale in fits if scale is not None and scale.distance <= tensor.limits[scale.boundary]]
    found = nearest_of(near, tensor.expected)
    return found if found is not None and found.beyond_noise(_rounding(case, tensor, found.boundary)) else None


def slight(case: Case, tensor: TensorCase) -> Scale | None:
    """A factor on the expected boundary that the floor is too coarse to see, or that makes another one the nearest."""
    expected, best = tensor.expected, tensor.match.best
    if expected is None or expected not in tensor.match.rel_l2 or tensor.view is None or len(case.probe) < MIN_ROWS:
        return None
    mistaken = tensor.best_is_sound and best != expected
    if tensor.judgement.status == "fail" and not mistaken:
        return None  # more than a slight one, or something else
    floor = 0.0 if tensor.limit.floor.source.startswith("estimated") else tensor.limit.floor.median
    factors = row_factors(case).get(tensor.name)
    if factors is not None and not _off(factors, _rounding(case, tensor, expected), floor):
        return None
    found = fit(case, tensor, expected)
    if found is None or found.distance > tensor.limits[expected]:
        return None
    if not found.beyond_noise(_rounding(case, tensor, expected), floor):
        return None
    if best is None or best == expected:
        return found
    return found if sign_test(found.rows, tensor.match.rel_l2[best][case.probe]) < LUCK else None


def _off(factors: FloatArray, rounding: float, floor: float) -> bool:
    """Whether the rows' factors alone could be beyond noise; how far the rows are apart then is not asked yet."""
    factor = median(factors)
    if not factor > 0:
        return False
    return Scale(0, factor, np.zeros(1), robust_spread(torch.from_numpy(factors))).beyond_noise(rounding, floor)


def _rounding(case: Case, tensor: TensorCase, boundary: Boundary) -> float:
    view = case.boundaries[boundary]
    return roundoff((case.serving, tensor.ranks.ranks[0], tensor.name), (view.capture, view.rank, view.name))
