"""Stand-in for the CPU build of SGLang's kernels, which is not on the package index; for SGLang 0.5.23.

Two modules: `bookkeeping` moves integers about (cache slots, token trees), `attention` holds the only
numerics. Every other layer takes SGLang's own `forward_native` path, as on any CPU without AMX. SGLang asks
for AMX by looking for `torch.ops.sgl_kernel.convert_weight_packed`, so never define an operator of that name
here.
"""

import torch

from .attention import decode_attention_cpu, extend_attention_cpu
from .bookkeeping import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    build_tree_kernel_efficient_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
    verify_tree_greedy_cpu,
)

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]
__version__ = "0.0.0+stand-in"

# The attention backend looks these two up as operators. Attributes serve: nothing is traced or compiled.
torch.ops.sgl_kernel.decode_attention_cpu = decode_attention_cpu
torch.ops.sgl_kernel.extend_attention_cpu = extend_attention_cpu
