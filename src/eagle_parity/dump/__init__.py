"""The dump format on disk: `open_dump` and `DumpWriter`."""

from eagle_parity.dump.opened import Dump, open_dump
from eagle_parity.dump.writer import DEFAULT_CAP, DumpWriter, check_size, check_target, human, planned_bytes

__all__ = [
    "DEFAULT_CAP",
    "Dump",
    "DumpWriter",
    "check_size",
    "check_target",
    "human",
    "open_dump",
    "planned_bytes",
]
