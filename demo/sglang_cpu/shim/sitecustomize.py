"""Let a CUDA build of torchvision be imported under a CPU build of torch.

The torchvision wheel on the package index declares its operators in a CUDA library that cannot be loaded
here; its Python half then stops at the first operator it does not find. Two schemas without a kernel behind
them are enough, because nothing in this project calls them. Python imports `sitecustomize` in every process
that has this folder on PYTHONPATH, which is how the shim reaches all of a server's processes; `make setup`
also installs a copy in the virtual environment, since transformers imports torchvision as soon as it is
there.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MISSING_OPERATORS = ("nms", "qnms")
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class TorchvisionWatcher(MetaPathFinder):
    """Finds nothing; waits for `import torchvision`, so that no other process pays for importing torch."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Answer "not here" in any case."""
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            declare_missing_operators()
        return None


def declare_missing_operators() -> None:
    """Declare the operator schemas, unless this torch can load the real ones."""
    import torch

    if torch.version.cuda is not None:
        return
    for name in MISSING_OPERATORS:
        with contextlib.suppress(RuntimeError):  # the other copy of this file was first
            torch.library.define(f"torchvision::{name}", SCHEMA)


sys.meta_path.insert(0, TorchvisionWatcher())
