"""Rows and facts -> findings. `study` measures, `diagnose` names, the layers functions answer "which layers?"."""

from eagle_parity.diagnosis.diagnose import diagnose
from eagle_parity.diagnosis.expectation import declared_boundaries
from eagle_parity.diagnosis.layers import compare_layers, declare_layers
from eagle_parity.diagnosis.study import study

__all__ = ["compare_layers", "declare_layers", "declared_boundaries", "diagnose", "study"]
