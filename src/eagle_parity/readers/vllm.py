"""vLLM's ExampleHiddenStatesConnector: `<request>.safetensors` as the server leaves it.

The same tensors as speculators' (hidden_states [T, K, H] in ascending layer order, token_ids [T]), without the data
set beside them, so without a loss mask. Which layers is up to the draft config that the server was started with.
"""

from __future__ import annotations

from eagle_parity.readers import arrow
from eagle_parity.readers.contents import Contents
from eagle_parity.readers.format import SAFETENSORS, Format
from eagle_parity.readers.speculators import is_stack, read_stack


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
