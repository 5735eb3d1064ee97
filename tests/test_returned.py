"""`dump serving --server` without the plugin: what SGLang returns over HTTP, from a server in memory."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_parity.captures import server as module
from eagle_parity.captures.prompts import Prompt
from eagle_parity.captures.returned import Returned, capture
from eagle_parity.captures.server import MemoryTransport, Reply, Server
from eagle_parity.captures.spool import CAPTURE_DIR
from eagle_parity.cli.main import main
from eagle_parity.dump import open_dump
from eagle_parity.errors import EnvironmentFailure, InputError
from eagle_parity.records import Model, Sample

HIDDEN = 4
INFO: dict[str, Any] = {
    "version": "0.5.23",
    "tp_size": 8,
    "model_path": "/nowhere/target",
    "dtype": "auto",
    "speculative_algorithm": "EAGLE3",
    "speculative_draft_model_path": "/nowhere/draft",
    "return_hidden_states_mode": "full",
    "enable_return_hidden_states": True,
    "chunked_prefill_size": 8192,
}
TARGET = Model(name="target", hidden_size=HIDDEN, num_layers=6)
PROMPT = Prompt("first", token_ids=(10, 11, 12, 13, 14))
OUTPUT = (50, 52, 60)


def state(token: int, position: int, width: int) -> list[float]:
    """Multiples of 1/8 below 32: exact in bfloat16."""
    return [token % 8 + position / 8 + column / 4 for column in range(width)]


@dataclass
class Returning:
    """SGLang in memory: states of the prompt's last `chunk` uncached rows, and of all tokens but the last."""

    info: dict[str, Any] = field(default_factory=lambda: dict(INFO))
    slots: int = 2
    chunk: int = 100
    cached: int = 0
    change: Mapping[str, Any] = field(default_factory=dict)
    seen: list[dict[str, Any]] = field(default_factory=list)
    nudge: float = 0.0

    @property
    def server(self) -> Server:
        return Server("http://server", 5.0, MemoryTransport(self.answer))

    def answer(self, method: str, path: str, body: Any) -> Reply:
        if path == "/server_info":
            return Reply(200, json.dumps(self.info).encode())
        self.seen.append({"path": path} | body)
        if path == "/v1/chat/completions":
            return Reply(200, json.dumps({"choices": [{"prompt_token_ids": [1, 2, 3]}]}).encode())
        ids = body.get("input_ids") or [7, 8, 9]
        width = self.slots * HIDDEN
        rows = [state(token, position, width) for position, token in enumerate(ids)][self.cached :][-self.chunk :]
        rows[0][0] += self.nudge
        tail = [state(token, len(ids) + i, width) for i, token in enumerate(OUTPUT[:-1])]
        meta = {"hidden_states": [rows, *tail], "cached_tokens": self.cached}
        meta |= {"spec_accept_length": 1.5, "spec_verify_ct": 2} | dict(self.change)
        return Reply(200, json.dumps({"output_ids": OUTPUT, "meta_info": meta, "prompt_token_ids": ids}).encode())


def ask(engine: Returning, *prompts: Prompt, **options: Any) -> tuple[Returned, list[Sample]]:
    options = {"model": TARGET, "max_new_tokens": 3} | options
    returned = capture(engine.server, engine.info, prompts or (PROMPT,), **options)
    return returned, list(returned.stream.samples)


def rows(ids: Sequence[int], first: int, slot: int) -> torch.Tensor:
    made = [state(token, first + i, 2 * HIDDEN) for i, token in enumerate(ids)]
    return torch.tensor(made, dtype=torch.bfloat16)[:, slot * HIDDEN : (slot + 1) * HIDDEN]


def test_rows_tokens_and_phases() -> None:
    engine = Returning()
    returned, (prefill, verify) = ask(engine)
    assert (prefill.phase, tuple(prefill.token_ids), list(prefill.positions)) == (
        "prefill",
        PROMPT.token_ids,
        [*range(5)],
    )
    assert (verify.phase, tuple(verify.token_ids), list(verify.positions)) == ("verify", OUTPUT[:-1], [5, 6])
    assert verify.parents is not None
    assert (list(verify.parents), verify.accepted) == ([-1, 0], (1, 1))
    for slot in range(2):
        assert torch.equal(prefill.tensors[0][f"slot.{slot}"], rows(PROMPT.token_ids or (), 0, slot))
        assert torch.equal(verify.tensors[0][f"slot.{slot}"], rows(OUTPUT[:-1], 5, slot))
    facts = returned.stream.plan.facts
    assert facts.draft is not None
    assert facts.engine is not None
    assert (facts.slots, facts.slot_boundaries, facts.engine.tp_size, facts.model.dtype) == (2, None, 8, "bfloat16")
    assert (facts.draft.name, facts.draft.num_slots, facts.draft.spec_accept_length) == ("draft", 2, 1.5)
    assert "on one rank" in str(facts.source.detail)
    assert "the layout cannot be judged" in str(facts.source.detail)
    assert "one rank of 8" in returned.messages[0]
    (sent,) = engine.seen
    assert sent["return_hidden_states"] is True
    assert sent["extra_key"] == sent["rid"]  # finds nothing in the prefix cache


def test_without_a_draft_it_is_the_state_after_the_final_norm() -> None:
    returned, (prefill, decode) = ask(Returning(INFO | {"speculative_algorithm": None}, slots=1), model=Model())
    assert (set(prefill.tensors[0]), decode.phase, returned.stream.plan.facts.slots) == ({"final.norm"}, "decode", 0)
    assert returned.stream.plan.facts.draft is None
    assert any("no draft" in message for message in returned.messages)


def test_aux_states_without_a_draft_are_the_ids_of_the_flag() -> None:
    changes = {
        "speculative_algorithm": None,
        "speculative_draft_model_path": None,
        "enable_return_aux_hidden_states": True,
    }
    returned, _ = ask(Returning(INFO | changes | {"return_aux_hidden_state_layer_ids": [1, 2]}))
    facts = returned.stream.plan.facts
    assert facts.draft is not None
    assert (facts.slots, facts.draft.declared_ids, facts.draft.name) == (2, (1, 2), None)


@pytest.mark.parametrize(("nudge", "dtype"), [(0.0, "bfloat16"), (0.001953125, "float16"), (2.0**-20, "float32")])
def test_the_dtype_is_what_holds_every_number(nudge: float, dtype: str) -> None:
    returned, (prefill, _) = ask(Returning(nudge=nudge))
    assert returned.stream.plan.facts.model.dtype == dtype
    want = torch.tensor(2 + nudge, dtype=torch.float32)
    assert torch.equal(prefill.tensors[0]["slot.0"][0, 0].float(), want)


def test_the_server_s_own_dtype_comes_first() -> None:
    returned, _ = ask(Returning(INFO | {"dtype": "float32"}))
    assert returned.stream.plan.facts.model.dtype == "float32"
    returned, _ = ask(Returning(INFO | {"dtype": "half"}))
    assert returned.stream.plan.facts.model.dtype == "float16"


def test_of_a_chunked_prompt_the_last_rows_come_back() -> None:
    returned, (prefill, _) = ask(Returning(chunk=2))
    assert (tuple(prefill.token_ids), list(prefill.positions), prefill.cached_tokens) == ((13, 14), [3, 4], 0)
    assert any("3 rows at the beginning of 1 prompts did not come back" in m for m in returned.messages)


def test_cached_tokens_have_no_rows() -> None:
    engine = Returning(cached=3)
    returned, (prefill, _) = ask(engine, warm_cache=True)
    assert (list(prefill.positions), prefill.cached_tokens) == ([3, 4], 3)
    assert torch.equal(prefill.tensors[0]["slot.1"], rows((13, 14), 3, 1))
    assert any("3 tokens of 1 prompts came from the server's prefix cache" in m for m in returned.messages)
    assert "extra_key" not in engine.seen[0]


def test_null_is_a_number_that_json_has_not() -> None:
    block = [[None, *state(10, 0, 7)], *(state(token, 0, 8) for token in range(4))]
    _, (prefill, _) = ask(Returning(change={"hidden_states": [block, state(50, 5, 8), state(52, 6, 8)]}))
    assert math.isnan(float(prefill.tensors[0]["slot.0"][0, 0]))


def test_text_and_messages_are_tokens_of_the_server_s_own() -> None:
    engine = Returning()
    _, samples = ask(engine, Prompt("t", text="x"), Prompt("m", messages=({"role": "user", "content": "x"},)))
    assert [(s.id, list(s.token_ids)) for s in samples if s.phase == "prefill"] == [("t", [7, 8, 9]), ("m", [1, 2, 3])]
    assert [(body["path"], body.get("input_ids")) for body in engine.seen] == [
        ("/generate", None),
        ("/v1/chat/completions", None),
        ("/generate", [1, 2, 3]),
    ]


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (None, "no hidden states"),
        ([[state(1, 0, 8)] * 6, state(1, 0, 8), state(1, 0, 8)], "6 rows for 5 prompt tokens and 2 for 3 generated"),
        ([[state(1, 0, 8)] * 5], "5 rows for 5 prompt tokens and 0 for 3 generated"),
        ([[state(1, 0, 8)] * 5, state(1, 0, 7), state(1, 0, 8)], "no rows of one width"),
    ],
)
def test_an_answer_of_another_form(blocks: Any, message: str) -> None:
    with pytest.raises(EnvironmentFailure, match=message) as caught:
        ask(Returning(change={"hidden_states": blocks}))
    assert "record with the capture plugin" in caught.value.fix


def test_a_width_that_is_no_multiple() -> None:
    with pytest.raises(EnvironmentFailure, match="returned states 8 wide; the target's hidden size is 3"):
        ask(Returning(), model=Model(hidden_size=3))


def test_slots_need_the_hidden_size() -> None:
    engine = Returning()
    with pytest.raises(InputError, match="hidden_size, which tells them apart, is not known") as caught:
        ask(engine, model=Model())
    assert "--tokens-from" in caught.value.fix
    assert engine.seen == []


def test_another_algorithm() -> None:
    with pytest.raises(EnvironmentFailure, match="speculates with NGRAM"):
        ask(Returning(INFO | {"speculative_algorithm": "NGRAM"}))


def test_versions_that_cut_wrongly_are_warned_of() -> None:
    for version, warned in (("0.5.13", True), ("0.5.14", False), ("0.5.23", False)):
        returned, _ = ask(Returning(INFO | {"version": version}))
        assert any("ask an idle server" in message for message in returned.messages) is warned


class TestCommand:
    def run(self, engine: Returning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
        monkeypatch.delenv(CAPTURE_DIR, raising=False)
        monkeypatch.setattr(
            module.HttpTransport,
            "send",
            lambda _, method, url, body, *__: engine.answer(
                method, url.removeprefix("http://h:1"), body and json.loads(body)
            ),
        )
        (tmp_path / "p.jsonl").write_text(json.dumps({"id": "first", "token_ids": [10, 11, 12]}) + "\n")
        args = ["-o", str(tmp_path / "out"), "--server", "h:1", *options]
        return main(["dump", "serving", *args, *([] if options else ["--prompts", str(tmp_path / "p.jsonl")])])

    def local(self, tmp_path: Path, **changes: Any) -> Returning:
        """A server on this machine: its model and its draft can be looked at."""
        (tmp_path / "target").mkdir()
        config = {"num_hidden_layers": 6, "hidden_size": HIDDEN, "architectures": ["LlamaForCausalLM"]}
        (tmp_path / "target" / "config.json").write_text(json.dumps(config))
        (tmp_path / "draft").mkdir()
        ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4]}}
        (tmp_path / "draft" / "config.json").write_text(json.dumps(ids))
        paths = {"model_path": str(tmp_path / "target"), "speculative_draft_model_path": str(tmp_path / "draft")}
        return Returning(INFO | paths | changes)

    def test_a_dump_of_one_rank(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.run(self.local(tmp_path), tmp_path, monkeypatch) == 0
        out, err = capsys.readouterr()
        assert "1 rank, 2 slots of 4 BF16, 3 prefill + 2 verify tokens" in out
        assert "on one rank" in out
        assert "a partial sum cannot be told from a complete state" in err
        dump = open_dump(tmp_path / "out")
        assert dump.facts.draft is not None
        assert (dump.ranks, dump.facts.model.num_layers, dump.facts.draft.declared_ids) == ((0,), 6, (1, 4))

    def test_the_dump_whose_tokens_are_sent_knows_the_width(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert self.run(self.local(tmp_path), tmp_path, monkeypatch) == 0
        (tmp_path / "out").rename(tmp_path / "tokens")
        assert self.run(Returning(), tmp_path, monkeypatch) == 2
        assert self.run(Returning(), tmp_path, monkeypatch, "--tokens-from", str(tmp_path / "tokens")) == 0
        assert open_dump(tmp_path / "out").facts.slots == 2

    @pytest.mark.parametrize("mode", ["null", "last"])
    def test_a_server_that_gives_no_states(
        self, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        engine = self.local(tmp_path, return_hidden_states_mode=mode, enable_return_hidden_states=False)
        assert self.run(engine, tmp_path, monkeypatch) == 4
        err = capsys.readouterr().err
        assert "restart the server with the plugin" in err
        assert "--enable-return-hidden-states" in err
        assert engine.seen == []
