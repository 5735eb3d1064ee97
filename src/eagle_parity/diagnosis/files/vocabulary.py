"""Embedding, head and the map between draft and target vocabulary."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from eagle_parity.diagnosis.files.check import Problem, check
from eagle_parity.diagnosis.files.deployment import Deployment
from eagle_parity.draft.weights import DraftTensor
from eagle_parity.tensorheader import read_header

_ARRAYS = {"I64": "q", "I32": "i", "I16": "h", "I8": "b", "BOOL": "B", "U8": "B"}


def _integers(tensor: DraftTensor) -> Sequence[int]:
    """A small integer or boolean tensor's values, without torch where the file is safetensors."""
    if tensor.file.suffix != ".safetensors" or tensor.dtype not in _ARRAYS:
        return [int(value) for value in tensor.load().flatten().tolist()]
    values = array(_ARRAYS[tensor.dtype])
    values.frombytes(read_header(tensor.file).raw(tensor.stored_name))
    return values


def _reduced(deployment: Deployment) -> bool:
    draft = deployment.draft
    return (
        draft.draft_vocab_size is not None
        and draft.vocab_size is not None
        and draft.draft_vocab_size < draft.vocab_size
    )


def _ties(deployment: Deployment) -> bool:
    return deployment.draft.config.flag("tie_word_embeddings") is True


@check("lm-head", "embed-head", "config", source="sglang#27829 (accept length 1.00), vllm#28549; llama_eagle3.py")
def lm_head(deployment: Deployment) -> Iterator[Problem]:
    """A head that nobody provides stays random: HTTP 200 and nothing accepted."""
    draft = deployment.draft
    declared = draft.config.integer("draft_vocab_size")
    if deployment.vllm:  # shares the target's head where the draft has none, and knows no tied head
        if "lm_head" in draft.missing and _reduced(deployment):
            yield Problem(
                "error",
                f"the checkpoint has no lm_head.weight, and the target's has {draft.vocab_size} rows instead of "
                f"{draft.draft_vocab_size}",
                "export the draft with its lm_head",
                ("draft_vocab_size",),
            )
        return
    if "lm_head" in draft.missing and not _ties(deployment):
        if declared is not None:
            yield Problem(
                "error",
                f"the checkpoint has no lm_head.weight, but draft_vocab_size is set ({declared}): SGLang then keeps "
                "the draft's own head, which stays random",
                "export the draft with its lm_head, or delete draft_vocab_size so that the target's head is shared",
                ("draft_vocab_size",),
            )
        elif _reduced(deployment) or "d2t" in draft.tensors:
            yield Problem(
                "error", "d2t without lm_head.weight: there is no head to map", "export the draft with its lm_head"
            )
    if _ties(deployment) and "lm_head.weight" in draft.tensors:
        yield Problem(
            "error",
            "tie_word_embeddings is true, so engines use the embedding as head and the checkpoint's lm_head.weight is "
            "left out",
            "set tie_word_embeddings to false",
            ("tie_word_embeddings",),
        )


@check("embedding", "embed-head", source="sglang eagle_worker_v2.py, init_lm_head; vllm#28549, vllm#19570")
def embedding(deployment: Deployment) -> Iterator[Problem]:
    """SGLang gives every EAGLE-3 draft the target's embedding, unless their widths differ."""
    draft = deployment.draft
    differs = draft.target_hidden_size != draft.hidden_size
    if "embed_tokens" in draft.missing and differs:
        yield Problem(
            "error",
            f"no embed_tokens.weight, and the target's cannot be shared: it is {draft.target_hidden_size} wide, the "
            f"draft {draft.hidden_size}",
            "export the draft with its embedding",
        )
    trained = draft.config.flag("embed_requires_grad") is True
    if deployment.sglang is not None and not differs and trained and "embed_tokens.weight" in draft.tensors:
        yield Problem(
            "error",
            "the draft's embed_tokens was trained (embed_requires_grad), and SGLang replaces it by the target's",
            "serve the draft with vLLM, or retrain it with the target's embedding frozen",
            ("embed_requires_grad",),
        )


@check("vocab-sizes", "vocab-map", "config", source="verl-SpeCo#66, Automodel#2447")
def vocab_sizes(deployment: Deployment) -> Iterator[Problem]:
    """draft_vocab_size and vocab_size against what the tensors say."""
    draft = deployment.draft
    declared = draft.config.integer("draft_vocab_size")
    head = draft.tensors.get("lm_head.weight")
    if declared is not None and head is not None and head.shape[0] != declared:
        yield Problem(
            "error",
            f"draft_vocab_size is {declared}, but lm_head.weight has {head.shape[0]} rows",
            f"set draft_vocab_size to {head.shape[0]}",
            ("draft_vocab_size",),
        )
    if declared is None and head is not None and _reduced(deployment):
        yield Problem(
            "error",
            f"lm_head.weight has {head.shape[0]} rows and draft_vocab_size is not set: engines then expect the "
            f"target's {draft.vocab_size}",
            f"set draft_vocab_size to {head.shape[0]}",
            ("vocab_size",),
        )
    for name, size in (("t2d", draft.vocab_size), ("embed_tokens.weight", draft.vocab_size)):
        tensor = draft.tensors.get(name)
        if tensor is not None and size is not None and tensor.shape[0] != size:
            yield Problem(
                "warning" if name == "embed_tokens.weight" else "error",
                f"vocab_size is {size}, but {name} has {tensor.shape[0]} entries",
                "export the draft again, with the target's vocab_size",
                ("vocab_size",),
            )


@check("target-vocab", "vocab-map", "config", "target", source="vllm-ascend#15863; padded vocabularies")
def target_vocab(deployment: Deployment) -> Iterator[Problem]:
    """The target's vocabulary is the one that the draft was made for."""
    assert deployment.target is not None
    ours, theirs = deployment.draft.vocab_size, deployment.target.integer("vocab_size")
    rows = deployment.target.rows
    if ours is not None and theirs is not None and ours != theirs:
        padded = rows is not None and ours <= rows
        yield Problem(
            "warning" if padded else "error",
            f"the draft's vocab_size is {ours}, the target's {theirs}"
            + (f" (its embedding has {rows} rows)" if rows is not None and rows != theirs else ""),
            "check that this is the target that the draft was trained for; set vocab_size to the target's",
            ("vocab_size",),
            evidence={"draft": ours, "target": theirs, "embedding_rows": rows},
        )


@check("vocab-map", "vocab-map", source="verl-SpeCo#67, verl-SpeCo#66, Automodel#2447; d2t[i] = target id - i")
def vocab_map(deployment: Deployment) -> Iterator[Problem]:
    """d2t is there, in range, without repetition, and t2d says the same."""
    draft = deployment.draft
    if "d2t" in draft.missing:
        yield Problem(
            "error",
            f"the draft has {draft.draft_vocab_size} of {draft.vocab_size} words but no d2t: draft ids would be taken "
            "for target ids",
            "export the draft with d2t (and t2d)",
            ("draft_vocab_size",),
        )
    tensor = draft.tensors.get("d2t")
    if tensor is None:
        return
    offsets = _integers(tensor)
    ids = [i + offset for i, offset in enumerate(offsets)]
    limit = draft.vocab_size
    message = fix = None
    outside = [i for i in ids if i < 0 or (limit is not None and i >= limit)]
    marked = _marked(draft.tensors.get("t2d"))
    if len(ids) > 1 and list(offsets) == list(range(len(ids))) and marked != set(ids):  # t2d may say it is meant so
        message = "d2t is 0, 1, 2, …: it holds ids instead of offsets, or a default nobody replaced (id i becomes 2 i)"
        fix = "write target id - draft id"
    elif len(set(offsets)) == len(ids) > 1 and (marked == set(offsets) or (marked is None and outside)):
        message = "d2t holds target ids instead of offsets"
        fix = "subtract the draft id: d2t[i] = target id - i"
    elif outside:
        message = f"d2t maps {len(outside)} draft ids outside the target's {limit} words, the first to {outside[0]}"
        fix = "export the map again: d2t[i] = target id - i"
    elif len(set(ids)) < len(ids):
        message = f"d2t maps {len(ids) - len(set(ids))} draft ids to a target id that another one has already"
        fix = "export the map again: d2t[i] = target id - i"
    if message is not None and fix is not None:
        yield Problem("error", message, fix, evidence={"first": list(offsets[:8]), "file": str(tensor.file)})
        return
    if _reduced(deployment) and not any(offsets):
        yield Problem(
            "warning",
            f"d2t is all zeros: the draft's {len(ids)} words are the target's first {len(ids)}, not its most frequent",
            "if training did not choose them so, export the map that it used",
        )
    if marked is not None and marked != set(ids):
        yield Problem(
            "error",
            f"d2t and t2d disagree: t2d marks {len(marked - set(ids))} words that d2t does not map to, d2t maps to "
            f"{len(set(ids) - marked)} that t2d does not mark",
            "export both from the map that the draft was trained with; a map made anew does not fit an old lm_head",
        )


def _marked(t2d: DraftTensor | None) -> set[int] | None:
    return None if t2d is None else {i for i, value in enumerate(_integers(t2d)) if value}


@check("mask-token", "embed-head", "config", "target", source="Model-Optimizer#1621")
def mask_token(deployment: Deployment) -> Iterator[Problem]:
    """A mask token beyond the target's embedding has no row."""
    assert deployment.target is not None
    config, rows = deployment.draft.config, deployment.target.rows
    token = config.integer("mask_token_id")
    if token is not None and rows is not None and not 0 <= token < rows:
        yield Problem(
            "error",
            f"mask_token_id is {token}, the target's embedding has {rows} rows",
            "use a token that the target has; a row added in training is not exported",
            ("mask_token_id",),
        )
