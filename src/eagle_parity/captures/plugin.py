"""The SGLang plugin: in every rank of a server, copies what a probe request's forward hands to the draft.

SGLang calls `activate` in each of its processes (entry point group `sglang.srt.plugins`); 0.5.10 has no plugins and
calls `hook_factory`, which --forward-hooks names. Nothing happens unless EAGLE_PARITY_CAPTURE_DIR is set. Then, for
requests whose id is a probe's and for no others:

- after the target's `ModelRunner.forward`, which runs around CUDA-graph replays as well: the packed hidden states, the
  token ids, the positions, the draft tree;
- after the draft's prefill forward, and before the draft's extend after a verify: what the draft was given, so that
  the client can tell whether that is what the target gave;
- where EAGLE_PARITY_CAPTURE_BOUNDARIES asks for it, the residual stream at the target's layers (`boundaries`).

Rules here: never raise into a forward, wait for no device, issue no collective, change nothing, and copy on the
forward's own stream, because the tensors may lie in a graph's memory that the next replay overwrites.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_parity.captures.adapter import Adapter, Verdict, draft_facts, missing, model_facts
from eagle_parity.captures.boundaries import Boundaries, Seen, parse
from eagle_parity.captures.shard import common, own_rows
from eagle_parity.captures.spool import (
    BOUNDARIES,
    CAPTURE_DIR,
    MAX_BYTES,
    PREFIX,
    Header,
    Hello,
    is_end,
    is_probe,
    new_hello,
    write_hello,
)
from eagle_parity.captures.versions import choose
from eagle_parity.captures.writer import KEPT_BYTES, SpoolWriter

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

# ------------------------------------------------------------------------------------------------- activation


def activate() -> None:
    """Register the hooks, if EAGLE_PARITY_CAPTURE_DIR is set. SGLang calls this in each of its processes.

    Never raises. When this SGLang does not fit, a hello with the reason is left for the client and nothing is hooked.
    """
    directory = os.environ.get(CAPTURE_DIR)
    if not directory:
        return
    try:
        _activate(Path(directory))
    except Exception:
        log.exception("eagle-parity: the capture plugin could not be activated; the server is not affected")


def hook_factory(_: Mapping[str, Any]) -> None:
    """Activate the plugin in an SGLang without plugins, which calls this for the target and for the draft.

    There is no hook on a module, so none is returned: SGLang says so in its log and goes on.
    """
    if find_spec("sglang.srt.plugins") is None:
        _activate_once()


@cache
def _activate_once() -> None:
    activate()


def _activate(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    hello = new_hello(_versions())
    adapter, lacks = choose(hello.versions["sglang"])
    if lacks:
        write_hello(directory, replace(hello, error="it lacks " + "; ".join(lacks)))
        log.warning("eagle-parity: this SGLang lacks %s; nothing will be captured", "; ".join(lacks))
        return
    tree, draft = missing(adapter.needs_for_tree), missing(adapter.needs_for_draft)
    gaps = [*(f"no draft tree: {item}" for item in tree), *(f"no draft input: {item}" for item in draft)]
    boundaries = None
    if wanted := os.environ.get(BOUNDARIES):
        try:
            boundaries = Boundaries(parse(wanted))
        except ValueError as error:
            gaps.append(f"no boundaries: {BOUNDARIES}: {error}")
    plugin = Plugin(adapter, directory, replace(hello, gaps=tuple(gaps)), has_tree=not tree, boundaries=boundaries)
    adapter.hook(adapter.init, plugin.after_init, "AFTER")
    if boundaries is not None:
        adapter.hook(adapter.forward, plugin.before_forward, "BEFORE")
    adapter.hook(adapter.forward, plugin.after_forward, "AFTER")
    for target in () if draft else adapter.draft_extends:
        adapter.hook(target, plugin.before_draft_extend, "BEFORE")


def _versions() -> dict[str, str]:
    import sglang
    import torch

    from eagle_parity import __version__

    return {"sglang": str(sglang.__version__), "torch": str(torch.__version__), "eagle_parity": __version__}


# ------------------------------------------------------------------------------------------------------ hooks


class Plugin:
    """The hooks of one server process, and the writer behind them. Every hook returns None: it changes nothing."""

    def __init__(
        self,
        adapter: Adapter,
        directory: Path,
        hello: Hello,
        *,
        has_tree: bool = True,
        boundaries: Boundaries | None = None,
        writer: SpoolWriter | None = None,
    ) -> None:
        self._adapter = adapter
        self._directory = directory
        self._hello = hello
        self._has_tree = has_tree
        self._boundaries = boundaries
        self._writer = writer
        self._failed = False

    def after_init(self, _: Any, owner: Any, *__: Any, **___: Any) -> None:
        """A model was loaded: the rank is known now. Say hello, and say it again for the draft's model."""
        try:
            runner = self._adapter.runner(owner)
            place = self._adapter.place()
            if self._adapter.is_draft(runner):
                self._hello = replace(self._hello, draft=draft_facts(runner))
            else:
                self._hello = replace(self._hello, model=model_facts(runner), **vars(place))
                self._watch(runner)
            write_hello(self._directory, self._hello)
            if self._writer is None:
                kept = int(os.environ.get(MAX_BYTES) or KEPT_BYTES)
                self._writer = SpoolWriter(
                    self._directory, self._hello.process, place.rank, warn=log.warning, kept_bytes=kept
                )
        except Exception as error:
            self._give_up((), error)
            with contextlib.suppress(Exception):
                write_hello(self._directory, replace(self._hello, error=f"{type(error).__name__}: {error}"))

    def _watch(self, runner: Any) -> None:
        """Hook the target's layers, where that was asked for."""
        if self._boundaries is None:
            return
        facts = self._hello.model
        try:
            names = self._boundaries.attach(runner.model, facts["num_layers"], facts["hidden_size"])
            self._hello = replace(self._hello, boundaries=names)
        except Exception as error:
            self._boundaries = None
            gaps = (*self._hello.gaps, f"no boundaries: {type(error).__name__}: {error}")
            self._hello = replace(self._hello, gaps=gaps)

    def before_forward(self, runner: Any, *args: Any, **kwargs: Any) -> None:
        """A forward begins. Registered where boundaries are recorded: if it has probes, the layers' hooks must know."""
        try:
            batch = args[0] if args else kwargs["forward_batch"]
            if self._boundaries is None or self._adapter.is_draft(runner):
                return
            self._boundaries.end()  # of a forward that failed: nothing of the next one may be copied
            wanted, phase = _probes(self._adapter.rids(batch)), self._adapter.phase(batch)
            if wanted and phase is not None:
                lengths = self._adapter.lengths(batch, phase)
                spans = [_span(lengths, index) for index, _ in wanted]
                self._boundaries.begin(spans, sum(lengths), self._adapter.splits_rows())
        except Exception as error:
            self._give_up((), error)

    def after_forward(self, result: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
        """A forward of the target or the draft was launched. Copies the probes' rows, if there are any."""
        wanted: Sequence[tuple[int, str]] = ()
        try:
            batch = args[0] if args else kwargs["forward_batch"]
            wanted = _probes(self._adapter.rids(batch))
            if wanted:
                self._capture(wanted, result, runner, batch)
        except Exception as error:
            self._give_up(wanted, error)

    def before_draft_extend(self, worker: Any, *args: Any, **kwargs: Any) -> None:
        """The draft is about to be given the rows of a verify, accepted ones in front."""
        del worker
        wanted: Sequence[tuple[int, str]] = ()
        try:
            batch = args[0] if args else kwargs["batch"]
            wanted = _probes([request.rid for request in batch.reqs])
            if wanted:
                result = args[1] if len(args) > 1 else kwargs.get("batch_result")
                self._capture_verdict(self._adapter.verdict(batch, result))
        except Exception as error:
            self._give_up(wanted, error)

    def _capture(self, wanted: Sequence[tuple[int, str]], result: Any, runner: Any, batch: Any) -> None:
        adapter = self._adapter
        phase = adapter.phase(batch)
        drafts = adapter.is_draft(runner)
        if phase is None or (drafts and phase != "prefill"):
            return  # the draft's own steps recycle its own states; its extend is seen by the other hook
        lengths = adapter.lengths(batch, phase)
        total = sum(lengths)
        hidden = adapter.received(batch) if drafts else adapter.given(result)
        if drafts and hidden is None:
            return  # a draft of another kind, which reads no hidden states
        held = None if hidden is None else self._held(hidden, total)
        # A target without a draft gives no states, but its boundaries can be recorded all the same.
        sees = self._boundaries is not None and not drafts
        seen = self._boundaries.end(held) if self._boundaries is not None and sees else []
        token_ids, positions = adapter.tokens(batch)
        for place, (index, rid) in enumerate(wanted):
            if is_end(rid):
                if not drafts and phase == "prefill":
                    self._submit(Header(rid, "end"), {})
                continue
            beside = seen[place] if place < len(seen) else Seen()
            span = _span(lengths, index)
            own = span if beside.rows is None else beside.rows
            states = dict(beside.tensors)
            if hidden is not None and held is not None:
                own = common(span, held)
                states["hidden"] = hidden[own.start - held.start : own.stop - held.start].clone()
            header = Header(
                rid,
                "draft" if drafts else "target",
                phase,
                batch=len(lengths),
                forward_tokens=total,
                graph=adapter.graph(result),
                rows=None if own == span else (own.start - span.start, own.stop - span.start),
                unseen=beside.unseen,
            )
            if held is None and (hidden is not None or not sees):
                got = "none" if hidden is None else f"hidden states of shape {list(hidden.shape)}"
                self._lose(header, f"the {phase} forward of {total} tokens returned {got}")
                continue
            rows = slice(span.start, span.stop)
            tensors = {"token_ids": token_ids[rows].clone(), "positions": positions[rows].clone(), **states}
            if phase == "verify" and self._has_tree:
                child, sibling = adapter.tree(batch)
                tensors |= {"child": child[index].clone(), "sibling": sibling[index].clone()}
            self._submit(header, tensors)

    def _held(self, hidden: torch.Tensor, total: int) -> range | None:
        """Which tokens of a forward a tensor of states is about; None where that cannot be told."""
        if hidden.dim() != 2:
            return None
        whole = hidden.shape[0] >= total
        return range(total) if whole else own_rows(hidden.shape[0], total, *self._adapter.splits_rows())

    def _capture_verdict(self, verdict: Verdict | None) -> None:
        if verdict is None:
            return
        for index, rid in _probes(verdict.rids):
            if is_end(rid):
                continue
            begin = sum(verdict.lengths[:index])
            rows = slice(begin, begin + verdict.lengths[index])
            header = Header(rid, "draft", "verify", batch=len(verdict.rids), forward_tokens=sum(verdict.lengths))
            tensors = {
                "hidden": verdict.hidden[rows].clone(),
                "token_ids": verdict.token_ids[rows].clone(),
                "accepted": verdict.accepted[index : index + 1].clone(),
            }
            self._submit(header, tensors)

    def _submit(self, header: Header, tensors: Mapping[str, torch.Tensor]) -> None:
        if self._writer is not None:
            self._writer.submit(header, {name: _reachable(tensor) for name, tensor in tensors.items()})

    def _lose(self, header: Header, reason: str) -> None:
        if self._writer is not None:
            self._writer.submit(replace(header, kind="lost", reason=reason), {})

    def _give_up(self, wanted: Sequence[tuple[int, str]], error: Exception) -> None:
        """A hook failed: the probes are lost, the client is told, and the server goes on."""
        try:
            if not self._failed:
                self._failed = True
                log.warning("eagle-parity: a capture hook failed; the server is not affected", exc_info=error)
            for _, rid in wanted:
                self._lose(Header(rid, "lost"), f"the capture hook failed: {type(error).__name__}: {error}")
        except Exception:
            log.debug("eagle-parity: a failure could not be recorded", exc_info=True)


def _probes(rids: Sequence[str]) -> Sequence[tuple[int, str]]:
    """The probes of a batch by index. In a batch without one this is a prefix test a request, and nothing more."""
    return [(i, rid) for i, rid in enumerate(rids) if rid.startswith(PREFIX) and is_probe(rid)]


def _span(lengths: Sequence[int], index: int) -> range:
    """The rows of a forward that belong to a request."""
    begin = sum(lengths[:index])
    return range(begin, begin + lengths[index])


def _reachable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, where the writer's thread can wait for its device (CUDA) or need not (CPU)."""
    return tensor if tensor.is_cuda or tensor.device.type == "cpu" else tensor.cpu()
