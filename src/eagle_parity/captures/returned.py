"""What a server gives over HTTP without the plugin: `return_hidden_states` of /generate, the states of one rank.

Measured on sglang 0.5.23, CPU, TP=2, against transformers (tests/live/test_served.py): `meta_info.hidden_states` is one
block [rows of the prompt][W], then one row [W] for each token generated but the last, which never was an input. Row i
behind the prompt is the state computed when output token i-1 was the input, draft or no draft. With EAGLE-3, W is K*H:
what the target hands to the draft. Without a draft it is H, after the final norm. Of a prompt that was computed in
chunks only the last chunk's rows come back. The scheduler turns every number into text, which holds other requests up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_parity.captures.prompts import Prompt
from eagle_parity.captures.server import Server
from eagle_parity.captures.site import Site
from eagle_parity.captures.spool import new_dump_key, probe_id
from eagle_parity.errors import EnvironmentFailure, InputError
from eagle_parity.records import (
    FINAL_NORM,
    Draft,
    Facts,
    Model,
    Phase,
    Plan,
    Sample,
    Source,
    Stream,
    TensorSpec,
    slot_name,
)

if TYPE_CHECKING:
    import torch

RANK = 0
"""SGLang answers from one rank, the first; which others hold the same cannot be seen."""
FLAG = "--enable-return-hidden-states"
JSON_BYTES = 12
"""Of text a value, about: 125 MiB for [512, 21504]."""
_SAFE = (0, 5, 14)
"""Before it, rows were cut from the batch by the prompt's length, whatever was cached or else in the batch."""


@dataclass(frozen=True)
class Returned:
    """A capture over HTTP: its stream, the rows of each phase, a sentence for each thing to know."""

    stream: Stream
    phases: Mapping[str, int]
    messages: tuple[str, ...]


@dataclass(frozen=True)
class _Answer:
    """One prompt's rows: of the prompt's end, then of the tokens generated."""

    prompt: Prompt
    token_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    states: torch.Tensor
    """[rows, W], float32; every number that a server of 16 or 32 bits sends is one."""
    prompt_rows: int
    cached: int
    meta: Mapping[str, Any]

    @property
    def lost(self) -> int:
        """Rows at the prompt's beginning that were computed and did not come back."""
        return len(self.token_ids) - self.cached - self.prompt_rows


def allows(info: Mapping[str, Any]) -> bool:
    """Whether a server, by its /server_info, gives hidden states of all rows on request."""
    mode = info.get("return_hidden_states_mode")
    return mode == "full" or (mode is None and bool(info.get("enable_return_hidden_states")))


def captured_aux(info: Mapping[str, Any]) -> bool:
    """Whether what comes back is what the target hands to a draft. Raises EnvironmentFailure where that is unknown."""
    algorithm = info.get("speculative_algorithm")
    if algorithm not in (None, "EAGLE3"):
        raise EnvironmentFailure(
            f"the server speculates with {algorithm}; what it returns as hidden states is known for EAGLE3 or no draft",
            fix="record with the capture plugin",
        )
    return algorithm == "EAGLE3" or bool(info.get("enable_return_aux_hidden_states"))


def capture(
    server: Server,
    info: Mapping[str, Any],
    prompts: Sequence[Prompt],
    *,
    model: Model,
    declared_ids: tuple[int, ...] | None = None,
    max_new_tokens: int,
    warm_cache: bool = False,
    progress: Callable[[int, str], None] = lambda _, __: None,
) -> Returned:
    """Send the prompts one after the other and take the states out of the answers. Nothing of the server is changed.

    `model` is what is known of the target; its hidden_size tells the slots apart. All states are held in memory.
    Raises InputError where hidden_size is needed and unknown, EnvironmentFailure for a server that answers otherwise
    than it should.
    """
    aux = captured_aux(info)
    if aux and model.hidden_size is None:
        raise InputError(
            "the server returns its slots side by side, and the target's hidden_size, which tells them apart, is not "
            f"known: {info.get('model_path')} is no model directory on this machine",
            fix="give --tokens-from a training dump of this target, which names it",
        )
    key = new_dump_key()
    answers = []
    for number, prompt in enumerate(prompts):
        progress(number, prompt.id)
        answers.append(_ask(server, info, prompt, probe_id(key, number), max_new_tokens, warm_cache))
    progress(len(prompts), "collecting")
    return _put_together(server, info, answers, model, declared_ids, aux)


def _ask(
    server: Server, info: Mapping[str, Any], prompt: Prompt, rid: str, max_new_tokens: int, warm_cache: bool
) -> _Answer:
    common: dict[str, Any] = {"rid": rid} if warm_cache else {"rid": rid, "extra_key": rid}
    if any((info.get(size) or 1) > 1 for size in ("dp_size", "attn_dp_size")):
        common["routed_dp_rank"] = 0
    if prompt.messages is not None:
        prompt = replace(prompt, messages=None, token_ids=_templated(server, info, prompt, common))
    given = {"text": prompt.text} if prompt.token_ids is None else {"input_ids": list(prompt.token_ids)}
    reply = server.generate(
        {
            **common,
            **given,
            "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens},
            "return_hidden_states": True,
            "return_prompt_token_ids": True,
        }
    )
    ids = prompt.token_ids if prompt.token_ids is not None else _integers(reply.get("prompt_token_ids"))
    out, meta = _integers(reply.get("output_ids")), reply.get("meta_info")
    if ids is None or out is None or not isinstance(meta, dict):
        missing = "prompt_token_ids" if ids is None else "output_ids" if out is None else "meta_info"
        raise EnvironmentFailure(
            f"prompt {prompt.id}: the answer of SGLang {info['version']} has no {missing}, so nobody knows whose rows "
            "these are",
            fix="send token ids (--tokens-from, or token_ids in the prompts file)",
        )
    return _answer(prompt, ids, out, meta)


def _templated(server: Server, info: Mapping[str, Any], prompt: Prompt, common: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids of chat messages under the server's own template, from a request of one token without states."""
    reply = server.chat(
        {
            **common,
            "model": info.get("served_model_name") or "default",
            "messages": [dict(message) for message in prompt.messages or ()],
            "max_tokens": 1,
            "return_token_ids": True,
        }
    )
    ids = _integers((reply.get("choices") or [{}])[0].get("prompt_token_ids"))
    if ids is None:
        raise EnvironmentFailure(
            f"prompt {prompt.id}: SGLang {info['version']} does not say which token ids its chat template made",
            fix="send token ids (--tokens-from, or token_ids in the prompts file)",
        )
    return ids


def _integers(value: Any) -> tuple[int, ...] | None:
    return tuple(value) if isinstance(value, list) and all(type(item) is int for item in value) else None


def _answer(prompt: Prompt, ids: tuple[int, ...], out: tuple[int, ...], meta: Mapping[str, Any]) -> _Answer:
    import torch

    blocks = meta.get("hidden_states")
    if not isinstance(blocks, list) or not blocks or not isinstance(blocks[0], list) or not blocks[0]:
        raise _shape(prompt, "no hidden states" if not blocks else "hidden states without a block of prompt rows")
    rows = [*(blocks[0] if isinstance(blocks[0][0], list) else [blocks[0]]), *blocks[1:]]
    try:
        states = torch.tensor(rows, dtype=torch.float32)
    except (TypeError, ValueError):  # None stands for NaN and infinity; rows of unequal length stay an error
        try:
            states = torch.tensor([[_number(value) for value in row] for row in rows], dtype=torch.float32)
        except (TypeError, ValueError) as error:
            raise _shape(prompt, f"no rows of one width ({error})") from None
    tail = len(blocks) - 1
    prompt_rows = len(rows) - tail
    cached = meta.get("cached_tokens")
    cached = cached if type(cached) is int and 0 <= cached < len(ids) else 0
    if states.dim() != 2 or prompt_rows > len(ids) - cached or tail != len(out) - 1:
        raise _shape(
            prompt, f"{prompt_rows} rows for {len(ids) - cached} prompt tokens and {tail} for {len(out)} generated ones"
        )
    kept = {key: meta.get(key) for key in ("spec_accept_length", "spec_verify_ct")}
    return _Answer(prompt, ids, out, states, prompt_rows, cached, kept)


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)


def _shape(prompt: Prompt, what: str) -> EnvironmentFailure:
    return EnvironmentFailure(
        f"prompt {prompt.id}: the server answered with {what}; expected a block of rows for the prompt and one row for "
        "each token generated but the last",
        fix="this SGLang returns hidden states in another form: record with the capture plugin",
    )


# ----------------------------------------------------------------------------------------------------- stream


def _put_together(
    server: Server,
    info: Mapping[str, Any],
    answers: Sequence[_Answer],
    model: Model,
    declared_ids: tuple[int, ...] | None,
    aux: bool,
) -> Returned:
    widths = {answer.states.shape[1] for answer in answers}
    hidden = model.hidden_size or min(widths)
    (width, *others) = sorted(widths)
    if others or width % hidden or (not aux and width != hidden):
        raise EnvironmentFailure(
            f"{server.url} returned states {', '.join(map(str, sorted(widths)))} wide; the target's hidden size is "
            f"{hidden}",
            fix="check that --tokens-from belongs to the target that the server runs",
        )
    names = [slot_name(j) for j in range(width // hidden)] if aux else [FINAL_NORM]
    dtype, spelled = _dtype(info, answers)
    site = Site(server, info, Path(), {})
    draft = _draft(site, declared_ids, len(names), answers) if aux else None
    facts = Facts(
        side="serving",
        source=Source("sglang", str(info["version"]), _detail(aux)),
        model=replace(model, hidden_size=hidden, dtype=str(dtype).removeprefix("torch.")),
        engine=site.engine,
        draft=draft,
        slots=len(names) if aux else 0,
    )
    speculates = info.get("speculative_algorithm") is not None
    samples = [(answer, False) for answer in answers]
    samples += [(answer, True) for answer in answers if len(answer.output_ids) > 1]
    phases: dict[str, int] = {}
    for answer, behind in samples:
        phase = _phase(behind, speculates)
        phases[phase] = phases.get(phase, 0) + (len(answer.output_ids) - 1 if behind else answer.prompt_rows)
    plan = Plan(
        facts,
        sum(phases.values()),
        {RANK: [TensorSpec(name, hidden, spelled) for name in names]},
        columns=("parents", "accepted") if "verify" in phases else (),
    )
    made = (_sample(answer, behind, _phase(behind, speculates), names, hidden, dtype) for answer, behind in samples)
    return Returned(Stream(plan, made), phases, _messages(info, answers, aux))


def _phase(behind: bool, speculates: bool) -> Phase:
    return ("verify" if speculates else "decode") if behind else "prefill"


def _sample(
    answer: _Answer, behind: bool, phase: Phase, names: Sequence[str], hidden: int, dtype: torch.dtype
) -> Sample:
    length = len(answer.token_ids)
    if behind:
        states, ids, first = answer.states[answer.prompt_rows :], answer.output_ids[:-1], length
    else:
        first = length - answer.prompt_rows
        states, ids = answer.states[: answer.prompt_rows], answer.token_ids[first:]
    kept = states.to(dtype)
    blocks = (kept[:, j * hidden : (j + 1) * hidden] for j in range(len(names)))
    return Sample(
        answer.prompt.id,
        ids,
        range(first, first + len(ids)),
        {RANK: dict(zip(names, blocks, strict=True))},
        phase=phase,
        cached_tokens=None if behind else answer.cached,
        parents=range(-1, len(ids) - 1),
        accepted=(1,) * len(ids),
    )


def _dtype(info: Mapping[str, Any], answers: Sequence[_Answer]) -> tuple[torch.dtype, str]:
    """The narrowest dtype that holds every number exactly, the server's own first: JSON tells floats from nothing."""
    import torch

    known = {"bfloat16": (torch.bfloat16, "BF16"), "float16": (torch.float16, "F16")}
    order: Iterator[str] = iter(dict.fromkeys((str(info.get("dtype")).replace("half", "float16"), *known)))
    for name in order:
        if name == "float32":
            break
        if name in known and all(_exact(answer.states, known[name][0]) for answer in answers):
            return known[name]
    return torch.float32, "F32"


def _exact(states: torch.Tensor, dtype: torch.dtype) -> bool:
    import torch

    return torch.equal(torch.nan_to_num(states), torch.nan_to_num(states.to(dtype).float()))


def _draft(site: Site, declared_ids: tuple[int, ...] | None, slots: int, answers: Sequence[_Answer]) -> Draft:
    own = site.draft
    if own is None:  # --enable-return-aux-hidden-states: the ids are an argument of the server's
        ids = _integers(site.info.get("return_aux_hidden_state_layer_ids"))
        return Draft(declared_ids=ids, num_slots=slots)
    counts = [(answer.meta["spec_accept_length"], answer.meta["spec_verify_ct"]) for answer in answers]
    known = [(length, count) for length, count in counts if isinstance(length, int | float) and type(count) is int]
    verifies = sum(count for _, count in known)
    accept = sum(length * count for length, count in known) / verifies if verifies else None
    return replace(own, declared_ids=declared_ids, num_slots=slots, spec_accept_length=accept)


def _detail(aux: bool) -> str:
    what = "slots are what the target gave" if aux else "final.norm is what the target gave; it has no draft"
    return (
        f"{what}, on one rank, through return_hidden_states; not recorded: the other ranks, so the layout cannot be "
        "judged; what the draft was given; batch, graph replay and forward length of a row; rejected draft tokens"
    )


def _messages(info: Mapping[str, Any], answers: Sequence[_Answer], aux: bool) -> tuple[str, ...]:
    ranks = info.get("tp_size")
    messages = [
        "warning: without the capture plugin: one rank"
        + (f" of {ranks}" if ranks else "")
        + ", so a partial sum cannot be told from a complete state, and what the draft was given was not seen"
    ]
    if not aux:
        messages.append("warning: the server has no draft: the dump holds the state after the final norm and no slots")
    cut = [answer for answer in answers if answer.lost]
    if cut:
        messages.append(
            f"warning: {sum(answer.lost for answer in cut)} rows at the beginning of {len(cut)} prompts did not come "
            f"back (the first: {cut[0].prompt.id}, {cut[0].lost}): of a prompt longer than chunked_prefill_size "
            f"({info.get('chunked_prefill_size')}) SGLang returns the last chunk"
        )
    warm = [answer for answer in answers if answer.cached]
    if warm:
        messages.append(
            f"warning: {sum(answer.cached for answer in warm)} tokens of {len(warm)} prompts came from the server's "
            "prefix cache and have no rows"
        )
    numbers = tuple(int(part) for part in str(info["version"]).split(".")[:3] if part.isdecimal())
    if numbers < _SAFE:
        messages.append(
            f"warning: SGLang {info['version']} cuts the rows by the prompt's length alone; where other requests "
            "shared a forward they may be theirs: ask an idle server"
        )
    return tuple(messages)
