"""A general plugin for SGLang 0.5.14 on a CPU, whose own CPU backend cannot draft or verify.

Its Triton attention backend can, and Triton's interpreter (TRITON_INTERPRET=1) runs that on a CPU. What is left are two
compiled kernels on the token tree, which the stand-in for 0.5.23 has in plain torch (../shim/sgl_kernel).
"""

from __future__ import annotations

import multiprocessing
import signal
from typing import Any

SCHEDULER_INIT = "sglang.srt.managers.scheduler.Scheduler.__init__"


def activate() -> None:
    """Register the hook; SGLang calls this in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang_cpu_plugin import end_with_children

    HookRegistry.register(SCHEDULER_INIT, take_stand_ins, HookType.BEFORE)
    if multiprocessing.parent_process() is None:
        signal.signal(signal.SIGTERM, end_with_children)


def take_stand_ins(*_: Any, **__: Any) -> None:
    """Give the EAGLE worker its tree kernels, and let it run the Triton kernels that it keeps for CUDA."""
    import sgl_kernel
    import torch
    from sglang.srt.speculative import eagle_utils
    from sglang.srt.speculative.triton_ops import cache_locs

    sgl_kernel.verify_tree_greedy = sgl_kernel.verify_tree_greedy_cpu
    eagle_utils.sgl_build_tree_kernel_efficient = sgl_kernel.build_tree_kernel_efficient_cpu
    eagle_utils._is_cuda = cache_locs._is_cuda = True
    torch.cuda.synchronize = lambda *_: None  # Llama models call it, whatever the device
