"""The hooks on a server's layers: what they copy, and what they refuse to call a boundary."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eagle_parity.captures.boundaries import Boundaries, Seen, parse
from eagle_parity.captures.shard import common, own_rows

HIDDEN, LAYERS, TOKENS = 4, 3, 6
WHOLE = (0, 1)


class Norm(torch.nn.Module):
    """Adds and normalises, as an engine's fused norm does: gives both, and may write into what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(HIDDEN), requires_grad=False)

    def forward(self, states: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return states / states.norm()
        residual.add_(states)
        return residual / residual.norm(), residual


class Paired(torch.nn.Module):
    """A layer that hands on its output and the residual apart, as SGLang's dense models before 0.5.22."""

    def __init__(self, owes: bool = False) -> None:
        super().__init__()
        self.norm, self.owes = Norm(), owes

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: object, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual = hidden_states.clone()
        else:
            hidden_states, residual = self.norm(hidden_states, residual)
        out = hidden_states * 2
        if self.owes:
            out._sglang_needs_allreduce_fusion = True  # type: ignore[attr-defined]
        return out, residual


class Stage:
    """A stage boundary: completes what the layer before owes, adds it, and keeps the stream with the batch."""

    def prepare(self, hidden_states: Any, forward_batch: Any, **_: object) -> torch.Tensor:
        owed = getattr(hidden_states, "owed", hidden_states)  # a handle, opaque to everyone else
        stream = forward_batch.residual_stream
        stream.residual = owed.clone() if stream.residual is None else stream.residual + owed
        return stream.residual / 2


class Staged(torch.nn.Module):
    """A layer of SGLang 0.5.22 on: a handle goes out, and what it stands for is no tensor of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn_boundary = Norm(), Stage()

    def forward(self, positions: torch.Tensor, hidden_states: Any, forward_batch: Any) -> Any:
        return SimpleNamespace(owed=self.attn_boundary.prepare(hidden_states, forward_batch) + 1)


class Communicating(torch.nn.Module):
    """A layer with a communicator, as SGLang's expert models before 0.5.22."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer_communicator = Norm(), SimpleNamespace(prepare_attn=self.prepare)
        self.last = False

    @staticmethod
    def prepare(
        states: torch.Tensor, residual: torch.Tensor | None, batch: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stream = states.clone() if residual is None else residual + states
        return stream / 2, stream

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: object, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        states, stream = self.layer_communicator.prepare_attn(hidden_states, residual, forward_batch)
        out = states + 1
        if not self.last:  # the engine completes the last layer's sum itself
            out._sglang_needs_allreduce_fusion = True  # type: ignore[attr-defined]
        return out, stream


class Model(torch.nn.Module):
    """Layers and a final norm inside a wrapper, beside a tower with as many layers and no norm of that width."""

    def __init__(self, make: Callable[[], torch.nn.Module]) -> None:
        super().__init__()
        self.tower = torch.nn.Module()
        self.tower.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(LAYERS))
        self.language_model = torch.nn.Module()
        self.language_model.layers = torch.nn.ModuleList(make() for _ in range(LAYERS))
        self.language_model.layers[-1].last = True
        self.language_model.norm = Norm()

    def run(self, states: torch.Tensor) -> dict[str, torch.Tensor]:
        """One forward; the boundaries by arithmetic of its own."""
        layers, norm = self.language_model.layers, self.language_model.norm
        kept = SimpleNamespace(residual=None) if isinstance(layers[0], Staged) else None
        batch = SimpleNamespace(residual_stream=kept)
        positions = torch.arange(len(states))
        want, stream = {"boundary.0": states.clone()}, states.clone()
        if kept is not None:
            out: Any = states.clone()
            for k, layer in enumerate(layers, 1):
                out = layer(positions, out, batch)
                stream = stream + stream / 2 + 1
                want[f"boundary.{k}"] = stream
            norm(out.owed, kept.residual)
        else:
            pair: tuple[torch.Tensor, torch.Tensor | None] = (states.clone(), None)
            for k, layer in enumerate(layers, 1):
                pair = layer(positions, pair[0], forward_batch=batch, residual=pair[1])
                normed = (
                    stream / 2 + 1
                    if isinstance(layer, Communicating)
                    else 2 * (stream / (stream.norm() if k > 1 else 1))
                )
                stream = stream + normed
                want[f"boundary.{k}"] = stream
            norm(*pair)
        return want | {"final.norm": stream / stream.norm()}


def states() -> torch.Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0))


def watched(model: Model, wanted: tuple[str, ...] | None = None, **options: int) -> Boundaries:
    boundaries = Boundaries(wanted, **options)
    boundaries.attach(model, LAYERS, HIDDEN)
    return boundaries


@pytest.mark.parametrize("make", [Staged, Communicating, Paired])
class TestMakes:
    def test_every_boundary_of_the_probes_rows(self, make: type[torch.nn.Module]) -> None:
        model = Model(make)
        boundaries = Boundaries()
        names = boundaries.attach(model, LAYERS, HIDDEN)
        assert names == ("boundary.0", "boundary.1", "boundary.2", "boundary.3", "final.norm")
        boundaries.begin([range(1, 3), range(4, 6)], TOKENS, WHOLE)
        want = model.run(states())
        first, second = boundaries.end()
        assert set(first.tensors) == set(names)
        for name, truth in want.items():
            torch.testing.assert_close(first.tensors[name], truth[1:3])
            torch.testing.assert_close(second.tensors[name], truth[4:6])
        assert (first.rows, second.rows, first.unseen) == (range(1, 3), range(4, 6), {})

    def test_copies_are_copies(self, make: type[torch.nn.Module]) -> None:
        """Later layers write into the stream in place; what was copied must not follow."""
        model = Model(make)
        boundaries = watched(model)
        boundaries.begin([range(TOKENS)], TOKENS, WHOLE)
        model.run(states())
        (seen,) = boundaries.end()
        torch.testing.assert_close(seen.tensors["boundary.0"], states())
        assert len({tensor.data_ptr() for tensor in seen.tensors.values()}) == len(seen.tensors)

    def test_nothing_is_kept_of_a_forward_without_probes(self, make: type[torch.nn.Module]) -> None:
        model = Model(make)
        boundaries = watched(model)
        model.run(states())
        assert boundaries.end() == []

    def test_the_same_layers_of_another_model_are_not_hooked(self, make: type[torch.nn.Module]) -> None:
        target, draft = Model(make), Model(make)
        boundaries = watched(target)
        boundaries.begin([range(TOKENS)], TOKENS, WHOLE)
        draft.run(states())
        assert boundaries.end() == [Seen({}, range(TOKENS), {})]

    def test_only_what_was_asked_for(self, make: type[torch.nn.Module]) -> None:
        model = Model(make)
        boundaries = watched(model, ("boundary.2", "final.norm"))
        boundaries.begin([range(TOKENS)], TOKENS, WHOLE)
        want = model.run(states())
        (seen,) = boundaries.end()
        assert set(seen.tensors) == {"boundary.2", "final.norm"}
        torch.testing.assert_close(seen.tensors["boundary.2"], want["boundary.2"])


class TestRefusals:
    def seen(
        self, model: Model, boundaries: Boundaries, *, total: int = TOKENS, place: tuple[int, int] = WHOLE
    ) -> Seen:
        boundaries.begin([range(total)], total, place)
        model.run(states())
        (seen,) = boundaries.end()
        return seen

    def test_a_state_whose_sum_is_owed_is_no_boundary(self) -> None:
        model = Model(lambda: Paired(owes=True))
        seen = self.seen(model, watched(model))
        assert set(seen.tensors) == {"boundary.0", "final.norm"}
        assert seen.unseen["boundary.1"] == "its sum over the ranks was still owed where the layer is given it"
        assert set(seen.unseen) == {"boundary.1", "boundary.2", "boundary.3"}

    def test_an_output_whose_residual_is_kept_with_the_batch_is_no_boundary(self) -> None:
        """A stage boundary under a name that is not known: what the layer is given is a contribution alone."""
        model = Model(Staged)
        for layer in model.language_model.layers:
            layer.entry_boundary, layer.attn_boundary = layer.attn_boundary, None
            layer.forward = _renamed(layer)
        seen = self.seen(model, watched(model))
        assert set(seen.tensors) == {"final.norm", "boundary.3"}
        assert "NotImplementedError: the batch keeps the stream" in seen.unseen["boundary.1"]

    def test_above_the_cap_nothing_more_is_copied(self) -> None:
        model = Model(Staged)
        seen = self.seen(model, watched(model, cap=2 * TOKENS * HIDDEN * 4))
        assert set(seen.tensors) == {"boundary.0", "boundary.1"}
        assert "take more than the 192 bytes that may wait for the disk" in seen.unseen["boundary.2"]

    def test_seen_twice(self) -> None:
        model = Model(Staged)
        boundaries = watched(model)
        boundaries.begin([range(TOKENS)], TOKENS, WHOLE)
        model.run(states())
        model.run(states())
        (seen,) = boundaries.end()
        assert seen.tensors == {}
        assert "seen twice in one forward" in seen.unseen["boundary.0"]

    def test_another_shape(self) -> None:
        model = Model(Staged)
        boundaries = watched(model, ("boundary.1",))
        boundaries._hidden = HIDDEN + 1
        assert self.seen(model, boundaries).unseen == {"boundary.1": "the stream has shape [6, 4], not [tokens, 5]"}

    def test_a_hook_that_fails_costs_its_boundary_and_not_the_forward(self) -> None:
        model = Model(Staged)
        boundaries = watched(model)
        boundaries.begin([range(TOKENS)], TOKENS, ("x", 2))  # type: ignore[arg-type]
        model.run(states()[:4])
        (seen,) = boundaries.end()
        assert "the hook failed: TypeError" in seen.unseen["boundary.1"]

    def test_a_model_without_the_usual_structure(self) -> None:
        with pytest.raises(ValueError, match=r"Model has 0 modules with 7 layers and a norm of 4"):
            Boundaries().attach(Model(Staged), 7, HIDDEN)

    def test_layers_of_another_pipeline_stage_have_no_boundary(self) -> None:
        model = Model(Staged)
        model.language_model.layers[0] = torch.nn.Identity()
        assert Boundaries().attach(model, LAYERS, HIDDEN)[0] == "boundary.1"


def _renamed(layer: Any) -> Callable[..., Any]:
    def forward(positions: torch.Tensor, hidden_states: Any, forward_batch: Any) -> Any:
        return SimpleNamespace(owed=layer.entry_boundary.prepare(hidden_states, forward_batch) + 1)

    return forward


class TestRows:
    def test_padding_is_left_out(self) -> None:
        model = Model(Staged)
        boundaries = watched(model)
        boundaries.begin([range(4)], 4, WHOLE)
        want = model.run(states())
        (seen,) = boundaries.end()
        torch.testing.assert_close(seen.tensors["boundary.2"], want["boundary.2"][:4])

    def test_a_rank_that_holds_a_part(self) -> None:
        model = Model(Staged)
        boundaries = watched(model)
        boundaries.begin([range(2, 9), range(9, 12)], 12, (1, 2))  # this rank has tokens 6..11
        want = model.run(states())
        first, second = boundaries.end()
        assert (first.rows, second.rows) == (range(6, 9), range(9, 12))
        torch.testing.assert_close(first.tensors["boundary.1"], want["boundary.1"][:3])
        torch.testing.assert_close(second.tensors["boundary.1"], want["boundary.1"][3:])

    def test_rows_that_are_not_those_of_the_slots(self) -> None:
        model = Model(Staged)
        boundaries = watched(model, ("boundary.1",))
        boundaries.begin([range(12)], 12, (1, 2))
        model.run(states())
        (seen,) = boundaries.end(range(12))
        assert seen.unseen == {"boundary.1": "the rank holds it for tokens 6..11, and others for tokens 0..11"}

    @pytest.mark.parametrize("total", [0, *range(2, 12)])
    @pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
    def test_rows_of_a_group_as_torch_splits_them(self, total: int, size: int) -> None:
        for padded in {total, total + -total % size}:
            for rank, part in enumerate(torch.arange(padded).tensor_split(size)):
                rows = own_rows(len(part), total, rank, size)
                assert rows is not None
                assert list(rows) == [row for row in part.tolist() if row < total]

    @pytest.mark.parametrize(("held", "place"), [(3, (0, 1)), (1, (1, 4)), (4, (0, 2))])
    def test_rows_that_cannot_be_told(self, held: int, place: tuple[int, int]) -> None:
        assert own_rows(held, 10, *place) is None

    def test_common_rows(self) -> None:
        assert common(range(2, 6), range(4, 9)) == range(4, 6)
        assert list(common(range(3), range(4, 9))) == []


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("all", None),
        (" all ", None),
        ("0,3", ("boundary.0", "boundary.3")),
        ("2, final.norm", ("boundary.2", "final.norm")),
    ],
)
def test_what_the_server_is_asked_for(text: str, names: tuple[str, ...] | None) -> None:
    assert parse(text) == names


@pytest.mark.parametrize("text", [",", "-1", "2;3", "l3", "all,2"])
def test_what_it_cannot_be_asked_for(text: str) -> None:
    with pytest.raises(ValueError, match="expected all, or numbers"):
        parse(text)
