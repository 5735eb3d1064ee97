"""A general plugin, which SGLang loads in each of its processes: three corrections for the demo.

It reaches for private names of SGLang 0.5.23, so the version is pinned exactly. SGLang finds it through the bare
dist-info folder beside this file.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
from types import FrameType
from typing import Any

BACKEND_FALLBACK = "sglang.srt.arg_groups.overrides._attention_backend_platform_fallbacks"
SCHEDULER_INIT = "sglang.srt.managers.scheduler.Scheduler.__init__"


def activate() -> None:
    """Register the hooks; SGLang calls this and applies them afterwards."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(BACKEND_FALLBACK, keep_requested_backend, HookType.REPLACE)
    HookRegistry.register(SCHEDULER_INIT, prefill_mla_in_latent_space, HookType.BEFORE)
    if multiprocessing.parent_process() is None:
        signal.signal(signal.SIGTERM, end_with_children)


def keep_requested_backend(view: Any) -> dict[str, Any]:
    """Keep `intel_amx` although there is no AMX: only this CPU backend has EAGLE's draft and verify steps.

    Its kernels come from the `sgl_kernel` stand-in. SGLang would fall back to `torch_native` here.
    """
    return {}


def prefill_mla_in_latent_space(*args: Any, **kwargs: Any) -> None:
    """Let `torch_native` serve MLA models, by prefilling them in the way in which it decodes them.

    By default SGLang expands keys and values per head here, but this backend reads them back from the cache,
    which holds the narrower latent.
    """
    from sglang.srt.models.deepseek_common import attention_backend_handler as handler

    handler.AttentionBackendRegistry.register("torch_native", handler._dispatch_mla_subtype)


def end_with_children(number: int, frame: FrameType | None) -> None:
    """Leave through SGLang's own cleanup, which ends its other processes.

    While a server starts up it has no handler yet, and a terminated launcher would leave its children behind.
    """
    sys.exit(128 + number)
