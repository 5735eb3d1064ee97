"""The SGLang plugin: in every rank of a server, copies what a probe request's forward hands to the draft.

SGLang calls `activate` in each of its processes (entry point group `sglang.srt.plugins`). Nothing happens there unless
EAGLE_PARITY_CAPTURE_DIR is set. Then, for requests whose id is a probe's and for no others:

- after the target's `ModelRunner.forward`, which runs around CUDA-graph replays as well: the packed hidden states, the
  token ids, the positions, the draft tree;
- after the draft's prefill forward, and before the draft's extend after a verify: what the draft was given, so that
  the client can tell whether that is what the target gave.

Rules here: never raise into a forward, wait for no device, issue no collective, change nothing, and copy on the
forward's own stream, because the tensors may lie in a graph's memory that the next replay overwrites.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_parity.captures.adapter import SGLANG, Adapter, Verdict, draft_facts, missing, model_facts
from eagle_parity.captures.spool import (
    CAPTURE_DIR,
    KEPT_BYTES,
    MAX_BYTES,
    PREFIX,
    Header,
    Hello,
    SpoolWriter,
    is_end,
    is_probe,
    new_hello,
    write_hello,
)

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
        _activate(Path(directory), SGLANG)
    except Exception:
        log.exception("eagle-parity: the capture plugin could not be activated; the server is not affected")


def _activate(directory: Path, adapter: Adapter) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    hello = new_hello(_versions())
    lacks = missing(adapter.needs)
    if lacks:
        write_hello(directory, replace(hello, error="it lacks " + "; ".join(lacks)))
        log.warning("eagle-parity: this SGLang lacks %s; nothing will be captured", "; ".join(lacks))
        return
    tree, draft = missing(adapter.needs_for_tree), missing(adapter.needs_for_draft)
    gaps = [*(f"no draft tree: {item}" for item in tree), *(f"no draft input: {item}" for item in draft)]
    plugin = Plugin(adapter, directory, replace(hello, gaps=tuple(gaps)), has_tree=not tree)
    HookRegistry.register(adapter.init, plugin.after_init, HookType.AFTER)
    HookRegistry.register(adapter.forward, plugin.after_forward, HookType.AFTER)
    if not draft:
        HookRegistry.register(adapter.draft_extend, plugin.before_draft_extend, HookType.BEFORE)


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
        writer: SpoolWriter | None = None,
    ) -> None:
        self._adapter = adapter
        self._directory = directory
        self._hello = hello
        self._has_tree = has_tree
        self._writer = writer
        self._failed = False

    def after_init(self, _: Any, runner: Any, *__: Any, **___: Any) -> None:
        """A model was loaded: the rank is known now. Say hello, and say it again for the draft's model."""
        try:
            place = self._adapter.place()
            if self._adapter.is_draft(runner):
                self._hello = replace(self._hello, draft=draft_facts(runner))
            else:
                self._hello = replace(self._hello, model=model_facts(runner), **vars(place))
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
                result = args[1] if len(args) > 1 else kwargs["batch_result"]
                self._capture_verdict(wanted, self._adapter.verdict(batch, result))
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
        token_ids, positions = adapter.tokens(batch)
        for index, rid in wanted:
            if is_end(rid):
                if not drafts and phase == "prefill":
                    self._submit(Header(rid, "end"), {})
                continue
            header = Header(
                rid,
                "draft" if drafts else "target",
                phase,
                batch=len(lengths),
                forward_tokens=total,
                graph=adapter.graph(result),
            )
            if hidden is None or hidden.dim() != 2 or hidden.shape[0] < total:
                got = "none" if hidden is None else f"hidden states of shape {list(hidden.shape)}"
                self._lose(header, f"the {phase} forward of {total} tokens returned {got}")
                continue
            begin = sum(lengths[:index])
            rows = slice(begin, begin + lengths[index])
            tensors = {
                "hidden": hidden[rows].clone(),
                "token_ids": token_ids[rows].clone(),
                "positions": positions[rows].clone(),
            }
            if phase == "verify" and self._has_tree:
                child, sibling = adapter.tree(batch)
                tensors |= {"child": child[index].clone(), "sibling": sibling[index].clone()}
            self._submit(header, tensors)

    def _capture_verdict(self, wanted: Sequence[tuple[int, str]], verdict: Verdict | None) -> None:
        if verdict is None:
            return
        each = verdict.hidden.shape[0] // len(verdict.rids)
        for index, rid in wanted:
            if is_end(rid):
                continue
            rows = slice(index * each, (index + 1) * each)
            header = Header(rid, "draft", "verify", batch=len(verdict.rids), forward_tokens=len(verdict.rids) * each)
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


def _reachable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, where the writer's thread can wait for its device (CUDA) or need not (CPU)."""
    return tensor if tensor.is_cuda or tensor.device.type == "cpu" else tensor.cpu()
