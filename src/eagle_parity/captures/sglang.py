"""The serving capture: probes sent through a live SGLang server.

`capture` sends probes to a `Site` and gives a Recording. Nothing of the server is changed; a probe has its own name
space in the prefix cache, so that no cached prefix hides its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from eagle_parity.captures.forwards import Answer, Probe
from eagle_parity.captures.prompts import Prompt
from eagle_parity.captures.recording import DEFAULT_SLOTS, Recording, collect, record
from eagle_parity.captures.site import Site
from eagle_parity.captures.spool import Spool, end_id, new_dump_key, probe_id
from eagle_parity.captures.watch import Watch
from eagle_parity.captures.writer import PENDING_BYTES
from eagle_parity.errors import EnvironmentFailure, InputError, UsageError
from eagle_parity.records import Facts, Plan, Source, TensorSpec, slot_name

DEFAULT_NEW_TOKENS = 8


def estimate(site: Site, prompts: Sequence[Prompt], max_new_tokens: int) -> Plan:
    """A plan about as large as the dump will be, to be checked before a probe is sent. Text counts 3 bytes a token.

    Raises UsageError where the boundaries of one forward are more than a rank of the server keeps in memory.
    """
    model, draft = site.model, site.draft
    hidden, dtype = model.hidden_size or 0, "F32" if model.dtype == "float32" else "BF16"
    slots = 0
    if draft is not None:
        slots = len(draft.declared_ids) if draft.declared_ids else DEFAULT_SLOTS
    tree = int(site.info.get("speculative_num_draft_tokens") or 1)
    tokens = sum(_length(prompt) + max_new_tokens * tree for prompt in prompts)
    names = [*(slot_name(j) for j in range(slots)), *site.boundaries]
    plan = Plan(
        Facts("serving", Source("sglang"), model),
        tokens,
        {rank: [TensorSpec(name, hidden, dtype) for name in names] for rank in site.hellos},
    )
    if site.boundaries:
        _check_memory(site, prompts, hidden * (4 if dtype == "F32" else 2) * len(names))
    return plan


def _check_memory(site: Site, prompts: Sequence[Prompt], row_bytes: int) -> None:
    """Refuse prompts whose rows of one forward are more than a rank lets wait for the disk."""
    for prompt in prompts:
        rows = min(_length(prompt), site.chunk or _length(prompt))
        if rows * row_bytes > PENDING_BYTES:
            raise UsageError(
                f"prompt {prompt.id}: {len(site.boundaries)} boundaries of a forward of {rows} tokens take "
                f"{rows * row_bytes} bytes on a rank, which keeps at most {PENDING_BYTES} in memory",
                fix=f"send prompts of at most {PENDING_BYTES // row_bytes} tokens, or name fewer boundaries",
            )


def _length(prompt: Prompt) -> int:
    if prompt.token_ids is not None:
        return len(prompt.token_ids)
    texts = [prompt.text or "", *(str(message.get("content", "")) for message in prompt.messages or ())]
    return sum(len(text.encode()) // 3 + 1 for text in texts)


def capture(
    site: Site,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = DEFAULT_NEW_TOKENS,
    warm_cache: bool = False,
    progress: Callable[[int, str], None] = lambda _, __: None,
) -> Recording:
    """Send the prompts one after the other, and collect what every rank captured of them.

    Token ids go to /generate as they are, text to /generate, messages to /v1/chat/completions: tokenizer and chat
    template are the server's own. Unless `warm_cache` is set, a probe finds nothing in the prefix cache. The stream has
    one sample a prompt and forward, prefill first, with `slot.J` [T, W] of each rank. Raises InputError for token ids
    outside the vocabulary, EnvironmentFailure for a request that fails, a rank that writes nothing, records lost to a
    full disk or a cap, ranks that disagree about the tokens, or prompt rows that are missing without being cached.
    """
    _check_ids(site, prompts)
    key = new_dump_key()
    spool = Spool(site.capture_dir, key)
    try:
        with Watch(site.capture_dir, site.hellos):
            answers = []
            for number, prompt in enumerate(prompts):
                progress(number, prompt.id)
                answers.append(_ask(site, prompt, probe_id(key, number), max_new_tokens, warm_cache))
            _ask(site, Prompt("(the last one)", token_ids=(_some_token(prompts),)), end_id(key), 1, warm_cache)
            progress(len(prompts), "collecting")
            records = collect(site, spool, key)
        probes = [
            Probe.make(
                prompt, answer, {rank: own.get(number, []) for rank, own in records.items()}, complete=not site.missing
            )
            for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        ]
        return record(site, probes, spool, key)
    except BaseException:
        spool.discard()
        raise


def _check_ids(site: Site, prompts: Sequence[Prompt]) -> None:
    if not prompts:
        raise UsageError("there is nothing to send: no prompts", fix="give at least one prompt")
    size = site.model.vocab_size
    for prompt in prompts:
        for place, token in enumerate(prompt.token_ids or ()):
            if token < 0 or (size is not None and token >= size):
                raise InputError(
                    f"prompt {prompt.id}: token {place} has id {token}, the server's model has {size} tokens",
                    fix="the tokens belong to another model: use a dump or prompts made for this one",
                )


def _some_token(prompts: Sequence[Prompt]) -> int:
    return next((prompt.token_ids[0] for prompt in prompts if prompt.token_ids), 1)


def _ask(site: Site, prompt: Prompt, rid: str, max_new_tokens: int, warm_cache: bool) -> Answer:
    common: dict[str, Any] = {"rid": rid}
    if not warm_cache:
        # A name space of its own in the prefix cache: a prefix that is already there would not be computed again, and
        # an uncomputed row cannot be captured.
        common["extra_key"] = rid
    if site.grouped:
        common["routed_dp_rank"] = 0
    try:
        if prompt.messages is None:
            given = {"text": prompt.text} if prompt.token_ids is None else {"input_ids": list(prompt.token_ids)}
            sampling = {"temperature": 0, "max_new_tokens": max_new_tokens}
            reply = site.server.generate({**common, **given, "sampling_params": sampling})
            return Answer(_ids(reply.get("output_ids")), reply.get("meta_info") or {})
        reply = site.server.chat(
            {
                **common,
                "model": site.info.get("served_model_name") or "default",
                "messages": [dict(message) for message in prompt.messages],
                "temperature": 0,
                "max_tokens": max_new_tokens,
                "return_meta_info": True,
                "return_token_ids": True,
            }
        )
        choice = (reply.get("choices") or [{}])[0]
        return Answer(_ids(choice.get("response_token_ids")), choice.get("meta_info") or {})
    except EnvironmentFailure as error:
        raise EnvironmentFailure(f"prompt {prompt.id}: {error.message}", fix=error.fix) from error


def _ids(value: Any) -> tuple[int, ...] | None:
    return tuple(value) if isinstance(value, list) and all(type(i) is int for i in value) else None
