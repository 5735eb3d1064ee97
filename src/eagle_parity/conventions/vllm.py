"""vLLM's rule from a draft's layer ids to the boundaries that its forward captures.

Read in vllm 0.33.0: ids count inputs of layers, n is the state after the last layer before the final norm (models/
llama.py `_maybe_add_hidden_state`, models/deepseek_v2.py), captures are appended in ascending order. The draft config
is asked at the top level first, then in `eagle_config` (v1/worker/gpu_model_runner.py); without ids the default is
2, n//2, n-3 (models/interfaces.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from eagle_parity.conventions.sglang import DEEPSEEK, Served, parse_version

READ_IN = "0.33.0"
RULE = "the id itself"
SOURCE = "vllm 0.33.0, models/llama.py _maybe_add_hidden_state, models/deepseek_v2.py, gpu_model_runner.py"
DEFAULT = "vllm 0.33.0, models/interfaces.py"


def served(
    ids: Sequence[int] | None, *, architecture: str | None, version: str | None, num_layers: int | None
) -> Served | None:
    """The boundaries that vLLM captures for an id list; None when the number of layers or the version is unknown.

    The rule was read in one version. For others it is given all the same, since no other one is known to exist.
    """
    if num_layers is None or version is None:
        return None
    try:
        parse_version(version)
    except ValueError:
        return None
    if ids is None:
        return Served((2, num_layers // 2, num_layers - 3), "default without ids", DEFAULT)
    problems = []
    if len(set(ids)) < len(ids):
        problems.append(f"ids {list(ids)} repeat a layer: it is captured once, so a slot is missing")
    lost = [i for i in ids if not 0 <= i <= num_layers]
    if lost:
        problems.append(f"ids {lost} name no layer that can be captured (0 to {num_layers})")
    if 0 in ids and architecture in DEEPSEEK:
        problems.append("id 0, the embedding, makes vLLM's deepseek_v2 fail: there is no residual yet")
    return Served(tuple(sorted({i for i in ids if 0 <= i <= num_layers})), RULE, SOURCE, tuple(problems))


def ids_for(
    boundaries: Sequence[int], *, architecture: str | None, version: str | None, num_layers: int | None
) -> tuple[int, ...] | None:
    """The id list that makes vLLM capture exactly these boundaries, in this order; None when none does."""
    answer = served(boundaries, architecture=architecture, version=version, num_layers=num_layers)
    if answer is None or answer.problems or answer.boundaries != tuple(boundaries):
        return None
    return tuple(boundaries)
