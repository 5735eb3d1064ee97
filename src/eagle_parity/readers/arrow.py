"""The arrow data set beside speculators' hidden states: a row of ids and loss mask a sample. pyarrow is optional."""

from __future__ import annotations

import functools
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from eagle_parity.readers.format import Mask
from eagle_parity.records import IntArray

STATE = "state.json"
NO_PYARROW = "pyarrow is not installed, so the loss mask is unknown (pip install pyarrow)"


def find(file: Path) -> Path | None:
    """The data set's directory of a hidden-state file: its own, or the one above (speculators keeps them so)."""
    return next((folder for folder in list(file.absolute().parents)[:2] if (folder / STATE).is_file()), None)


def loss_mask(directory: Path, row: int, token_ids: IntArray) -> Mask:
    """The loss mask of a row, if its token ids are those of the states. Never raises: a damaged set is a note."""
    try:
        table = _table(directory)
    except ImportError:
        return Mask(None, NO_PYARROW)
    # pyarrow raises its own errors beside OSError, ValueError and KeyError; the states are good without it.
    except Exception as error:
        return Mask(None, f"the arrow data set cannot be read ({type(error).__name__}), so the loss mask is unknown")
    count = len(token_ids)
    try:
        ids = np.asarray(table["input_ids"][row].as_py(), dtype=np.int64)
        mask = np.asarray(table["loss_mask"][row].as_py(), dtype=np.int64)
    except (KeyError, IndexError, TypeError, ValueError):
        return Mask(None, "the arrow data set has no such row, so the loss mask is unknown")
    if len(ids) < count or len(mask) < count or not np.array_equal(ids[:count], token_ids):
        return Mask(None, "the arrow data set has other token ids in that row, so the loss mask is unknown")
    return Mask((mask[:count] != 0).astype(np.int64))


@functools.lru_cache(maxsize=1)
def _table(directory: Path) -> Any:
    """The whole set as one table of mapped memory (datasets.save_to_disk: state.json lists streams in order)."""
    pyarrow = importlib.import_module("pyarrow")
    state = json.loads((directory / STATE).read_text(encoding="utf-8"))
    tables = []
    for part in state["_data_files"]:
        mapped = pyarrow.memory_map(str(directory / part["filename"]), "r")
        tables.append(pyarrow.ipc.open_stream(mapped).read_all())
    return pyarrow.concat_tables(tables)
