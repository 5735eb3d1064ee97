"""The serving capture against the real SGLang: TP=2 on CPU cores, EAGLE-3, a DeepSeek-V3 target."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from eagle_parity.captures.server import Server
from eagle_parity.captures.spool import read_hellos
from eagle_parity.dump import Dump
from tests.live.conftest import CHUNK, NEW_TOKENS, TEXTS, States, check_prefill, check_trees, needs_sglang, rows

pytestmark = [pytest.mark.live, needs_sglang]


def test_the_manifest(quiet: Dump) -> None:
    facts = quiet.facts
    assert (facts.side, facts.slots, facts.slot_boundaries, quiet.ranks) == ("serving", 3, None, (0, 1))
    assert (facts.model.architecture, facts.model.hidden_size, facts.model.num_layers) == (
        "DeepseekV3ForCausalLM",
        128,
        6,
    )
    assert facts.engine is not None
    assert (facts.engine.name, facts.engine.tp_size) == ("sglang", 2)
    assert facts.engine.flags["speculative_algorithm"] == "EAGLE3"
    assert (len(str(facts.run)), facts.missing_ranks) == (16, ())
    assert facts.draft is not None
    assert (facts.draft.name, facts.draft.declared_ids, facts.draft.num_slots) == ("draft", (1, 2, 4), 3)
    assert facts.draft.spec_accept_length is not None
    assert facts.draft.spec_accept_length > 1.2
    assert str(facts.source.detail).startswith(
        "slots are what the draft was given, bitwise what the target gave in all "
    )


def test_the_server_s_facts(quiet: Dump) -> None:
    facts = quiet.facts
    engine = facts.engine
    assert engine is not None
    assert (engine.name, engine.version) == ("sglang", version("sglang"))
    assert (engine.tp_size, engine.dp_size, engine.pp_size, engine.ep_size) == (2, 1, 1, 1)
    # As demo/serve.sh and the fixture start it; the rest are SGLang's defaults.
    assert {
        "nnodes": 1,
        "device": "cpu",
        "speculative_algorithm": "EAGLE3",
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 2,
        "speculative_num_draft_tokens": 6,
        "enable_flashinfer_allreduce_fusion": False,
        "disable_custom_all_reduce": True,
        "cuda_graph_config": {"decode": "disabled", "prefill": "disabled"},
        "disable_overlap_schedule": True,
        "chunked_prefill_size": CHUNK,
        "disable_radix_cache": True,
    }.items() <= engine.flags.items()
    # SGLang's own number: the tokens of an answer, the prefill's included, a verify.
    trees = sum(request.phase == "verify" for request in quiet.tokens.requests)
    assert facts.draft is not None
    assert facts.draft.spec_accept_length == pytest.approx(len(TEXTS) * NEW_TOKENS / trees)


def test_prefill_is_stitched_and_is_what_transformers_computes(quiet: Dump, reference: States) -> None:
    for (label, token_ids), forwards in zip(TEXTS, (2, 1), strict=True):
        chunks = check_prefill(quiet, label, token_ids, reference)
        assert len(chunks) == forwards
        assert {(chunk.cached_tokens, chunk.batch, chunk.graph) for chunk in chunks} == {(0, 1, False)}


def test_every_row_of_the_draft_trees_is_what_transformers_computes_on_its_path(quiet: Dump, reference: States) -> None:
    for label, prompt in TEXTS:
        accepted, trees, said = check_trees(quiet, label, prompt, reference)
        assert accepted > trees  # more than the roots
        assert said >= 11


def test_text_and_messages_go_through_the_server_s_tokenizer_and_template(
    models: Path, dump_serving: Callable[..., Dump]
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models / "target")
    messages = [{"role": "user", "content": "w3 w4"}]
    dump = dump_serving({"id": "text", "text": "w1 w2"}, {"id": "chat", "messages": messages})
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    for label, want in (("text", tokenizer("w1 w2")["input_ids"]), ("chat", rendered)):
        (prefill,) = rows(dump, label, "prefill")
        assert dump.tokens.token_ids[prefill.begin : prefill.end].tolist() == want
        assert list(rows(dump, label, "verify"))


def test_the_plugin_says_hello_for_every_rank(site: tuple[Server, Path]) -> None:
    hellos = {hello.rank: hello for hello in read_hellos(site[1])}
    assert set(hellos) == {0, 1}
    for hello in hellos.values():
        assert (hello.error, hello.gaps, hello.tp_size) == (None, (), 2)
        assert hello.draft is not None
        assert hello.draft["declared_ids"] == [1, 2, 4]
        os.kill(hello.pid, 0)
