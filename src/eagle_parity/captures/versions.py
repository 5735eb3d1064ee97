"""The versions of SGLang that the plugin fits: an Adapter for each family, and how the plugin gets into a server.

Each is `adapter.SGLANG` (0.5.14 to 0.5.23) with what is different in it. The running version proposes one, its contract
decides. All of it was read in the wheels 0.5.9 to 0.5.23, and tests/test_contracts.py reads them again.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from eagle_parity.captures.adapter import SGLANG, Adapter, Place, Verdict, When, missing
from eagle_parity.conventions.sglang import UNRELEASED, Version, parse_version

OLDEST, NEWEST = "0.5.10", "0.5.23"  # the first and the last version that the plugin was made for
PLUGINS_SINCE = (0, 5, 11)

_EAGLE = "sglang.srt.speculative.eagle_info"
_TREE = f"{_EAGLE}:EagleVerifyInput"
_PARALLEL = "sglang.srt.runtime_context"
_PLUGINS = "sglang.srt.plugins"
_GROUPS = "sglang.srt.distributed.parallel_state"
_ATTENTION = "sglang.srt.layers.dp_attention"
_WORKER = "sglang.srt.managers.tp_worker"
_FIRST = "sglang.srt.speculative.eagle_worker"


def _place() -> Place:
    """Before 0.5.14 the topology is in the process groups."""
    from sglang.srt.distributed import parallel_state as groups
    from sglang.srt.layers import dp_attention

    return Place(
        rank=groups.get_tensor_model_parallel_rank(),
        tp_size=groups.get_tensor_model_parallel_world_size(),
        dp_rank=dp_attention.get_attention_dp_rank() if dp_attention.is_dp_attention_enabled() else 0,
        pp_rank=groups.get_pipeline_model_parallel_rank(),
        pp_size=groups.get_pipeline_model_parallel_world_size(),
    )


def _splits_rows() -> tuple[int, int]:
    from sglang.srt.layers import dp_attention

    return dp_attention.get_attention_tp_rank(), dp_attention.get_attention_tp_size()


def _verdicts(tokens: str, counts: str, bonus: int) -> Callable[[Any, Any], Verdict | None]:
    """The getter for versions with both designs of the EAGLE worker.

    The first one (without the overlapped scheduler; all trees wider than a chain) gives the draft the accepted rows and
    no others, of the requests that go on, in the batch's `spec_info`: `tokens` next to its rows, and in `counts` how
    many rows a request has, `bonus` left out.
    """

    def verdict(batch: Any, result: Any) -> Verdict | None:
        if result is not None:
            return SGLANG.verdict(batch, result)
        import torch

        given = batch.spec_info
        if given.hidden_states is None:
            return None
        rids = [request.rid for request in batch.reqs if not request.finished()]
        lengths = [count + bonus for count in getattr(given, counts)]
        if len(rids) != len(lengths) or sum(lengths) != given.hidden_states.shape[0]:
            raise ValueError(
                f"the draft is given {given.hidden_states.shape[0]} rows, {lengths} of {len(rids)} requests"
            )
        return Verdict(rids, lengths, given.hidden_states, getattr(given, tokens), torch.tensor(lengths))

    return verdict


def patch(target: str, hook: Callable[..., Any], when: When) -> None:
    """Wrap a function where SGLang has no registry for hooks; what the hook returns does not count."""
    path, _, name = target.rpartition(".")
    owner = pkgutil.resolve_name(path)
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if when == "BEFORE":
            hook(*args, **kwargs)
        result = original(*args, **kwargs)
        if when == "AFTER":
            hook(result, *args, **kwargs)
        return result

    setattr(owner, name, wrapper)


def _without(needs: Mapping[str, tuple[str, ...]], module: str) -> dict[str, tuple[str, ...]]:
    return {path: names for path, names in needs.items() if not path.startswith(module)}


SGLANG_0_5_13 = replace(
    SGLANG,
    needs=_without(SGLANG.needs, _PARALLEL)
    | {
        f"{_GROUPS}:get_tensor_model_parallel_rank": (),
        f"{_GROUPS}:get_tensor_model_parallel_world_size": (),
        f"{_GROUPS}:get_pipeline_model_parallel_rank": (),
        f"{_GROUPS}:get_pipeline_model_parallel_world_size": (),
        f"{_ATTENTION}:get_attention_dp_rank": (),
        f"{_ATTENTION}:is_dp_attention_enabled": (),
        f"{_ATTENTION}:get_attention_tp_rank": (),
        f"{_ATTENTION}:get_attention_tp_size": (),
    },
    place=_place,
    splits_rows=_splits_rows,
)


def _two_designs(given: str, tokens: str, counts: str, bonus: int = 0) -> Adapter:
    """The first design gives the draft an object of the class `given`; the rest is as in `_verdicts`."""
    return replace(
        SGLANG_0_5_13,
        draft_extends=(*SGLANG.draft_extends, f"{_FIRST}.EAGLEWorker.forward_draft_extend_after_decode"),
        needs_for_draft={
            **SGLANG.needs_for_draft,
            f"{_FIRST}:EAGLEWorker.forward_draft_extend_after_decode": ("self", "batch"),
            f"{_EAGLE}:{given}": ("hidden_states", tokens, counts),
            "sglang.srt.managers.schedule_batch:Req.finished": (),
        },
        verdict=_verdicts(tokens, counts, bonus),
    )


SGLANG_0_5_12 = _two_designs("EagleDraftExtendInput", "input_ids", "num_accept_tokens_cpu")
SGLANG_0_5_11 = _two_designs("EagleDraftInput", "verified_id", "num_accepted_tokens_cpu")

_DESIGNS_0_5_10 = _two_designs("EagleDraftInput", "verified_id", "accept_length_cpu", bonus=1)
SGLANG_0_5_10 = replace(
    _DESIGNS_0_5_10,
    # The plugin gets in while the target's ModelRunner.__init__ runs; this runs after it, for the target and the draft.
    init=f"{_WORKER}.TpModelWorker._init_dllm_algorithm",
    runner=lambda worker: worker.model_runner,
    hook=patch,
    needs=_without(_DESIGNS_0_5_10.needs, _PLUGINS)
    | {
        f"{_WORKER}:TpModelWorker": ("model_runner",),
        f"{_WORKER}:TpModelWorker._init_dllm_algorithm": ("self",),
    },
    needs_for_tree={_TREE: ("draft_token_num", "retrive_next_token", "retrive_next_sibling")},
    tree=lambda batch: (batch.spec_info.retrive_next_token, batch.spec_info.retrive_next_sibling),
)

FAMILIES: tuple[tuple[Version, Adapter], ...] = (
    ((0, 5, 14), SGLANG),
    ((0, 5, 13), SGLANG_0_5_13),
    ((0, 5, 12), SGLANG_0_5_12),
    ((0, 5, 11), SGLANG_0_5_11),
    ((0, 5, 10), SGLANG_0_5_10),
)
"""The first version of each family, the newest first."""


def choose(version: str) -> tuple[Adapter, list[str]]:
    """The adapter for a running version, and what it lacks in this SGLang, one phrase each; nothing: it fits.

    A version newer than all that were read gets the newest adapter. A build from source may carry the number of the
    release to come, so the next older adapter is tried where a version's own does not fit.
    """
    number = _number(version)
    proposed = [adapter for since, adapter in FAMILIES if number >= since][:2]
    if not proposed:
        return SGLANG_0_5_10, [too_old(version)]
    lacks = [missing(adapter.needs) for adapter in proposed]
    fitting = next((i for i, phrases in enumerate(lacks) if not phrases), 0)
    return proposed[fitting], lacks[fitting]


def supported(version: str) -> bool:
    """Whether a version is not too old to be captured from."""
    return _number(version) >= parse_version(OLDEST)


def too_old(version: str) -> str:
    """What versions before OLDEST lack."""
    return f"request ids in the forward batch, which tell a probe from a user's request (this is {version})"


def _number(version: str) -> Version:
    """A build that does not know its number (`0.0.0.dev1`) counts as the newest."""
    try:
        number = parse_version(version)
    except ValueError:
        return UNRELEASED
    return number if any(number) else UNRELEASED


INSTALL = (
    "run `pip install eagle-parity` in the server's own Python environment (SGLANG_PLUGINS, where it is set, must name "
    "eagle_parity)"
)
HOOK_ARGUMENT = (
    "--forward-hooks '"
    '[{"name": "eagle-parity", "target_modules": ["*"], "hook_factory": "eagle_parity.captures.plugin:hook_factory"}]\''
)


def installation(version: str | None = None) -> str:
    """How the plugin gets into a server of a version; None: any that loads plugins by itself."""
    if version is None or _number(version) >= PLUGINS_SINCE:
        return INSTALL
    return (
        "run `pip install eagle-parity` in the server's own Python environment and append, since SGLang has no plugins "
        f"before 0.5.11, {HOOK_ARGUMENT}"
    )
