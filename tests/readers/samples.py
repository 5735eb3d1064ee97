"""The sample files and what is true about them, from fixtures/training/PROVENANCE.md."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2] / "fixtures" / "training"
TARGET = ROOT / "target"
LAYERS = 8
POST = "final.norm"


@dataclass(frozen=True)
class Case:
    path: str
    format: str
    slots: tuple[int, ...]
    last: int | str | None
    lengths: tuple[int, ...]
    default_holds: bool = True
    """What the reader says without a reference is the truth."""
    tolerance: float = 0.02
    """Relative difference to the HF forward. None on the CPU that the pipelines ran on; other CPUs' bf16 kernels round
    otherwise: 0.008 was measured."""
    first: int = 0
    """Position of a sample's first row."""
    padded: int = 0
    """Length to which the pipeline padded with id 0. Attention is causal, yet longer matrices round otherwise."""

    @property
    def root(self) -> Path:
        return ROOT / self.path

    @property
    def blocks(self) -> tuple[int | str, ...]:
        return self.slots if self.last is None else (*self.slots, self.last)


CASES = (
    Case("specforge/hidden_states", "specforge", (2, 4, 5), POST, (39, 58, 40)),
    Case("specforge/hidden_states_gz", "specforge", (2, 4, 5), POST, (39, 58, 40)),
    Case("specforge/hidden_states_padded", "specforge", (2, 4, 5), POST, (39, 58, 40), padded=58),
    Case("speculators/prepared", "speculators", (2, 4, 5), 8, (40, 58, 39)),
    Case("speculators/hidden_states_fp8", "speculators", (2, 4, 5), 8, (40, 58, 39), tolerance=0.05),
    Case("speculators/vllm_connector_raw", "vllm", (2, 4, 5), 8, (40,)),
    Case("speculators-v1", "speculators-v1", (3, 5, 6), 8, (40, 56, 39)),
    Case("modelopt/hf_eagle_default", "modelopt", (2, 4, 5), POST, (40, 58, 39)),
    Case("modelopt/hf_aux_2_4_5_allones", "modelopt", (3, 5, 6), POST, (40, 58, 39), default_holds=False),
    Case("modelopt/constructed_vllm_format", "modelopt", (1, 3, 4), 8, (40,), default_holds=False),
    Case("modelopt/constructed_trtllm_format", "modelopt", (2, 4, 5), POST, (40,)),
    Case("angelslim", "angelslim", (2, 4, 5), POST, (40, 58, 39)),
    Case("baldeagle", "baldeagle", (2, 4, 5), None, (40, 58, 39)),
    Case("torchspec/train_dump", "torchspec", (2, 4, 5), POST, (40,)),
    Case("nemo", "nemo", (2, 4, 5), None, (39, 57, 38), first=1, padded=64),
)
