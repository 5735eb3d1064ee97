"""vLLM's ExampleHiddenStatesConnector: `<request>.safetensors` as the server leaves it.

The same tensors as speculators' (hidden_states [T, K, H] in ascending layer order, token_ids [T]), without the data
set beside them, so without a loss mask. Which layers is up to the draft config that the server was started with.
They are training files where a trainer reads them, and a capture of a server where one asks what vLLM computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle_parity.errors import InputError
from eagle_parity.readers import arrow
from eagle_parity.readers.contents import Contents, open_contents
from eagle_parity.readers.files import being_written
from eagle_parity.readers.format import SAFETENSORS, Format
from eagle_parity.readers.speculators import is_stack, read_stack
from eagle_parity.readers.stored import Stored
from eagle_parity.records import (
    Engine,
    Facts,
    Model,
    Plan,
    Sample,
    Source,
    Stream,
    TensorSpec,
    boundary_name,
    slot_name,
)
from eagle_parity.tensorfile import dtype_name


def _recognises(contents: Contents) -> bool:
    return is_stack(contents) and "hidden_states_scales" not in contents.keys and arrow.find(contents.path) is None


FORMAT = Format(
    name="vllm",
    title="vLLM connector .safetensors",
    suffixes=SAFETENSORS,
    recognises=_recognises,
    read=read_stack,
    default_source="speculators launch_vllm.py: ids 2, n//2, n-3, n, stored in ascending order",
    last="pre",
    last_source="vllm llama.py: id n is the residual stream after the last layer, before the final norm",
    one_tensor=True,
)


# ---------------------------------------------------------------------------------------------- the serving side

TITLE = "vLLM hidden-states connector"
RANK = 0
"""The rank that writes; each of vLLM's ranks holds the whole state."""


@dataclass(frozen=True)
class Connector:
    """The connector's files, their states not read. `slots` of the states are slots; one more is the last state."""

    path: Path
    files: tuple[Path, ...]
    lengths: tuple[int, ...]
    slots: int
    last: bool
    width: int
    dtype: str
    notes: tuple[str, ...]

    def stream(self, num_layers: int | None, limit: int | None) -> Stream:
        """The plan and samples: `slot.J`, and the last state as boundary n where the number of layers is known."""
        files, lengths = self.files[:limit], self.lengths[:limit]
        names = [slot_name(j) for j in range(self.slots)]
        boundaries = (num_layers,) if self.last and num_layers is not None else ()
        names += [boundary_name(k) for k in boundaries]
        detail = "; ".join([f"{TITLE}; not recorded: version, flags, layers, phases", *self.notes])
        facts = Facts(
            side="serving",
            source=Source("vllm", None, detail),
            model=Model(hidden_size=self.width, num_layers=num_layers, dtype=_NAMES.get(self.dtype)),
            engine=Engine("vllm"),
            boundaries=boundaries,
            slots=self.slots,
        )
        specs = [TensorSpec(name, self.width, self.dtype) for name in names]
        return Stream(Plan(facts, sum(lengths), {RANK: specs}), self._samples(files, names))

    def _samples(self, files: Sequence[Path], names: Sequence[str]) -> Iterator[Sample]:
        for file in files:
            stored = _stored(file)
            yield Sample(
                file.stem,
                stored.token_ids.tolist(),
                stored.positions.tolist(),
                {RANK: {name: block.read(0, stored.length) for name, block in zip(names, stored.blocks, strict=False)}},
            )


_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def recognises(files: Sequence[Path]) -> bool:
    """Whether the first of the .safetensors files is one of the connector's, by its tensors."""
    return is_stack(open_contents(files[0]))


def open_connector(path: Path, files: Sequence[Path], slots: int | None) -> Connector:
    """The connector's files of a directory. `slots`: how many the draft was trained on, where the user knows it.

    vLLM stores the layers that it was asked for, and no file says which. speculators' launch_vllm.py asks for the
    draft's and for n, the state after the last layer, so the last of K states is taken for that unless the draft
    has K slots. Raises InputError for a file that is damaged, being written, or unlike the first.
    """
    kinds: dict[tuple[int, int, str], Path] = {}
    lengths = []
    for file in files:
        stored = _stored(file)
        block = stored.blocks[0]
        kinds.setdefault((len(stored.blocks), block.width, dtype_name(block.dtype)), file)
        lengths.append(stored.length)
    if len(kinds) > 1:
        (a, first), (b, other) = list(kinds.items())[:2]
        raise InputError(
            f"{first} holds {a[0]} states of {a[1]} {a[2]}, {other} holds {b[0]} of {b[1]} {b[2]}",
            fix="keep files of different servers in different directories",
        )
    (count, width, dtype) = next(iter(kinds))
    last = count > 1 and slots != count
    notes = ["rank 0 only: how the ranks hold a tensor cannot be judged"]
    if last and slots != count - 1:
        notes.append(
            f"which layers the {count} states are was not recorded: the last is taken for the state after the last "
            "layer, as speculators' launch_vllm.py stores it; --tokens-from with a training dump that knows its slots "
            "settles it"
        )
    return Connector(path, tuple(files), tuple(lengths), count - last, last, width, dtype, tuple(notes))


def _stored(file: Path) -> Stored:
    if being_written(file):
        raise InputError(f"{file} is being written", fix="wait until vLLM has ended the request")
    contents = open_contents(file)
    if not is_stack(contents):
        raise InputError(
            f"{file} holds {contents.describe()}, expected hidden_states [T, K, H] and token_ids [T]",
            fix="take foreign files out of the directory",
        )
    return read_stack(contents, Model())
