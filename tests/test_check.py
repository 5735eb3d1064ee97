"""check: every file check on a draft that has the fault and on one that has not; where it points; how it is printed."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import save_file

from eagle_parity.cli.main import main
from eagle_parity.diagnosis.files import CHECKS
from eagle_parity.diagnosis.files.deployment import command_flags
from eagle_parity.diagnosis.files.lines import line_of

ROOT = Path(__file__).parent.parent
DRAFTS = ROOT / "fixtures" / "drafts"
IDS = "eagle_aux_hidden_state_layer_ids"
H, VOCAB, SMALL, LAYERS = 16, 64, 24, 61

DRAFT: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": H,
    "intermediate_size": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_hidden_layers": 1,
    "head_dim": 2,
    "vocab_size": VOCAB,
    "draft_vocab_size": SMALL,
    "rope_theta": 50000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eagle_config": {IDS: [2, 30, 58], "use_aux_hidden_state": True},
}
TARGET: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "text_config": {
        "hidden_size": H,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCAB,
        "rope_theta": 50000.0,
        "torch_dtype": "bfloat16",
    },
}
D2T = torch.arange(SMALL) + 3  # draft id i is target id 2 i + 3
EVERY_SECOND = torch.zeros(VOCAB, dtype=torch.bool)
EVERY_SECOND[: 2 * SMALL : 2] = True


def weights() -> dict[str, torch.Tensor]:
    made = {
        "fc.weight": torch.zeros(H, 3 * H),
        "midlayer.self_attn.q_proj.weight": torch.zeros(H, 2 * H),
        "midlayer.self_attn.k_proj.weight": torch.zeros(H, 2 * H),
        "midlayer.mlp.gate_proj.weight": torch.zeros(32, H),
        "norm.weight": torch.zeros(H),
        "lm_head.weight": torch.zeros(SMALL, H),
    }
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[torch.arange(SMALL) + D2T] = True
    return {name: tensor.bfloat16() for name, tensor in made.items()} | {"d2t": D2T.clone(), "t2d": t2d}


@dataclass
class Case:
    """A deployment to be checked; `config` and `target` change keys (None takes one away), `tensors` likewise."""

    config: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor | None] = field(default_factory=dict)
    target: dict[str, Any] = field(default_factory=dict)
    engine: str | None = "0.5.23"
    flags: tuple[str, ...] = ("--tp", "8")
    text: dict[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()

    def write(self, path: Path) -> list[str]:
        draft, target = path / "draft", path / "target"
        draft.mkdir(parents=True)
        target.mkdir()
        config = {k: v for k, v in (DRAFT | self.config).items() if v is not None}
        (draft / "config.json").write_text(json.dumps(config, indent=2))
        tensors = {k: v.contiguous() for k, v in (weights() | self.tensors).items() if v is not None}
        save_file(tensors, draft / "model.safetensors")
        document = TARGET | self.target
        document["text_config"] = {k: v for k, v in (TARGET["text_config"] | self.text).items() if v is not None}
        (target / "config.json").write_text(json.dumps(document, indent=2))
        words = ["check", "--draft", str(draft), "--target", str(target)]
        if self.engine is not None:
            words += ["--engine", self.engine if "==" in self.engine else f"sglang=={self.engine}"]
        words += self.options
        return words + (["--", "python", "-m", "sglang.launch_server", *self.flags] if self.engine else [])


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[Case], tuple[int, dict[str, Any]]]:
    count = 0

    def run(case: Case) -> tuple[int, dict[str, Any]]:
        nonlocal count
        count += 1
        words = case.write(tmp_path / str(count))
        capsys.readouterr()
        code = main([words[0], "--format", "json", *words[1:]])
        return code, json.loads(capsys.readouterr().out)

    return run


Check = Callable[[Case], tuple[int, dict[str, Any]]]


def ids(*numbers: int) -> dict[str, Any]:
    return {"eagle_config": {IDS: list(numbers), "use_aux_hidden_state": True}}


def test_a_sound_deployment_passes(check: Check) -> None:
    code, report = check(Case())
    assert (code, report["verdict"]) == (0, "pass")
    assert [f["code"] for f in report["findings"]] == ["engine-version-rule"]  # what the ids mean, as information
    assert report["findings"][0]["severity"] == "info"
    assert report["layers"]["declared"] == [2, 30, 58]
    assert {c["status"] for c in report["inputs"]["checks"]} == {"ok"}


@pytest.mark.parametrize("name", ["specforge_sglang", "torchspec_mla"])
def test_real_native_drafts_have_no_error(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--draft", str(DRAFTS / name), "--engine", "sglang==0.5.23", "--tp", "2"]) == 0
    assert capsys.readouterr().out.startswith("PASS  nothing wrong in ")


def test_a_speculators_draft_is_refused_on_sglang(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["check", "--draft", str(DRAFTS / "speculators_nbr"), "--engine", "sglang==0.5.23", "--format", "json"])
    report = json.loads(capsys.readouterr().out)
    assert code == 1
    errors = {f["evidence"]["check"] for f in report["findings"] if f["severity"] == "error"}
    assert errors == {"dialect", "norm-before-residual"}
    capsys.readouterr()
    assert main(["check", "--draft", str(DRAFTS / "speculators_nbr")]) == 0


BIAS = {"fc.bias": torch.zeros(H).bfloat16()}
INPUT_NORM = {"input_norm.weight": torch.zeros(3 * H).bfloat16()}
FC_NORM = {f"fc_norm.{i}.weight": torch.zeros(H).bfloat16() for i in range(3)}
MLA = {
    "midlayer.self_attn.q_proj.weight": None,
    "midlayer.self_attn.k_proj.weight": None,
    "midlayer.self_attn.kv_a_proj_with_mqa.weight": torch.zeros(24, 2 * H).bfloat16(),
}
WIDE = {"fc.weight": torch.zeros(H, 4 * H).bfloat16()}
ONE = {"fc.weight": torch.zeros(H, H).bfloat16()}
NARROW_TARGET = {"fc.weight": torch.zeros(H, 3 * 2 * H).bfloat16()}


VLLM = "vllm==0.33.0"
WHOLE = {
    "speculators_model_type": "eagle3",
    "eagle_config": None,
    IDS: [2, 30, 58],
    "norm_before_residual": True,
    "transformer_layer_config": DRAFT | {"model_type": "llama"},
    "speculators_config": {
        "proposal_methods": [{"speculative_tokens": 3}],
        "verifier": {"name_or_path": "target", "architectures": []},
    },
}
"""A speculators config that vLLM accepts, around the same tensors."""


def top_level(*numbers: int) -> dict[str, Any]:
    return {"eagle_config": None, IDS: list(numbers)}


def d2t(values: torch.Tensor, keep_t2d: bool = False) -> dict[str, Any]:
    return {"d2t": values} | ({} if keep_t2d else {"t2d": None})


FAULTY: list[tuple[str, str, str, Case]] = [
    # check, code, severity, deployment
    ("dialect", "engine-version-rule", "error", Case(config={"speculators_model_type": "eagle3"})),
    ("draft-class", "engine-version-rule", "error", Case(tensors=MLA, engine="0.5.11")),
    ("algorithm", "engine-version-rule", "error", Case(flags=("--tp", "8", "--speculative-algorithm", "EAGLE"))),
    ("ids-declared", "layer-set", "warning", Case(config={"eagle_config": None})),
    ("ids-declared", "layer-set", "error", Case(config={"eagle_config": {IDS: "2,30,58"}})),
    ("ids-place", "engine-version-rule", "error", Case(config={"eagle_config": None, IDS: [3, 31, 59]})),
    ("ids-place", "engine-version-rule", "warning", Case(config={"eagle_config": None, IDS: [2, 30, 58]})),
    ("ids-agree", "engine-version-rule", "warning", Case(config={IDS: [1, 2, 3]})),
    ("ids-unique", "layer-set", "error", Case(config=ids(2, 30, 30))),
    ("ids-count", "width-mismatch", "error", Case(config=ids(2, 30))),
    ("ids-count", "width-mismatch", "error", Case(config={"eagle_config": None}, tensors=WIDE)),
    ("ids-count", "width-mismatch", "error", Case(config={"num_aux_hidden_states": 4})),
    ("ids-range", "boundary-missing", "error", Case(config=ids(-1, 2, 30), engine=None)),
    ("ids-range", "boundary-missing", "error", Case(config=ids(2, 30, 62), engine=None)),
    ("ids-range", "boundary-missing", "warning", Case(config=ids(2, 30, 61), engine=None)),
    ("ids-captured", "boundary-missing", "error", Case(config=ids(-1, 2, 30))),
    ("ids-captured", "boundary-missing", "error", Case(config=ids(2, 30, 61))),
    ("ids-captured", "embedding-missing", "error", Case(config=ids(0, 3, 31), engine="0.5.13")),
    ("ids-captured", "layer-set", "error", Case(config={"eagle_config": None}, text={"num_hidden_layers": 5})),
    ("ids-order", "concat-order", "error", Case(config=ids(58, 2, 30))),
    ("ids-order", "concat-order", "warning", Case(config=ids(58, 2, 30), engine=None)),
    ("ids-meaning", "engine-version-rule", "info", Case(engine="0.5.12")),
    ("ids-rule-known", "undetermined", "warning", Case(target={"architectures": ["GemmaForCausalLM"]})),
    ("ids-rule-known", "undetermined", "info", Case(engine="0.9.0")),
    ("target-captures", "engine-version-rule", "error", Case(engine="0.5.9")),
    (
        "target-captures",
        "engine-version-rule",
        "error",
        Case(target={"architectures": ["KimiVLForConditionalGeneration"]}),
    ),
    ("aux-states-used", "width-mismatch", "error", Case(config={"eagle_config": {"use_aux_hidden_state": False}})),
    ("fused-all-reduce", "partial-sum", "error", Case(engine="0.5.13")),
    ("fused-all-reduce", "partial-sum", "error", Case(engine="0.5.10")),
    ("fused-all-reduce", "partial-sum", "warning", Case(engine="0.5.13", flags=())),
    (
        "fused-all-reduce",
        "partial-sum",
        "warning",
        Case(engine="0.5.20", target={"architectures": ["GptOssForCausalLM"]}),
    ),
    ("graph-layers", "graph-stale", "error", Case(engine="0.5.10")),
    ("two-batch-overlap", "capture-lost", "error", Case(flags=("--tp", "8", "--enable-two-batch-overlap"))),
    ("pipeline-parallel", "capture-lost", "error", Case(flags=("--tp", "8", "--pp-size", "2"))),
    ("context-parallel", "token-shard", "error", Case(engine="0.5.20", flags=("--tp", "8", "--attn-cp-size", "2"))),
    ("scattered-rows", "token-shard", "warning", Case(engine="0.5.13", flags=("--tp=8", "--moe-a2a-backend=deepep"))),
    (
        "scattered-rows",
        "token-shard",
        "warning",
        Case(flags=("--tp", "8", "--enable-attn-tp-input-scattered", "--enable-return-aux-hidden-states")),
    ),
    ("disaggregation", "capture-lost", "warning", Case(flags=("--tp", "8", "--disaggregation-mode", "prefill"))),
    ("same-draft", "undetermined", "info", Case(flags=("--tp", "8", "--speculative-draft-model-path", "/m/other"))),
    ("target-width", "width-mismatch", "error", Case(text={"hidden_size": 2 * H}, tensors=NARROW_TARGET)),
    ("target-width", "width-mismatch", "error", Case(text={"hidden_size": 11})),
    ("target-width", "width-mismatch", "error", Case(text={"num_hidden_layers": 3})),
    ("config-widths", "width-mismatch", "error", Case(config={"hidden_size": 32})),
    ("config-widths", "width-mismatch", "error", Case(config={"num_attention_heads": 16})),
    ("config-widths", "width-mismatch", "error", Case(config={"num_hidden_layers": 2})),
    ("slots-known", "width-mismatch", "error", Case(config=ids(2, 20, 30, 58), tensors=WIDE, engine="0.5.11")),
    ("draft-tp", "width-mismatch", "error", Case(flags=("--tp", "3"))),
    (
        "norm-before-fc-known",
        "draft-norm",
        "error",
        Case(config={"norm_before_fc": True}, tensors=INPUT_NORM, engine="0.5.16"),
    ),
    ("norm-before-fc-known", "draft-norm", "error", Case(config={"norm_before_fc": True}, tensors=INPUT_NORM | MLA)),
    ("fc-norm-known", "draft-norm", "error", Case(config={"fc_norm": True}, tensors=FC_NORM, engine="0.5.11")),
    ("fc-norm-known", "draft-norm", "error", Case(config={"fc_norm": True}, tensors=FC_NORM | MLA, engine="0.5.12")),
    ("norm-output-known", "recycled-hidden", "error", Case(config={"norm_output": True}, engine="0.5.11")),
    (
        "one-feature-norm",
        "draft-norm",
        "error",
        Case(config={"norm_before_fc": True, "fc_norm": True}, tensors=INPUT_NORM | FC_NORM),
    ),
    ("norm-weights", "draft-norm", "error", Case(tensors=INPUT_NORM)),
    ("norm-weights", "draft-norm", "error", Case(config={"fc_norm": False}, tensors=FC_NORM)),
    ("norm-weights", "draft-norm", "error", Case(config={"norm_before_fc": True})),
    (
        "flag-place",
        "engine-version-rule",
        "error",
        Case(config={"eagle_config": {IDS: [2, 30, 58], "fc_norm": True}}, tensors=FC_NORM),
    ),
    ("norm-before-residual", "draft-norm", "error", Case(config={"norm_before_residual": True})),
    ("norm-output-meaning", "recycled-hidden", "warning", Case(config={"norm_output": True})),
    ("fc-bias", "engine-version-rule", "error", Case(tensors=BIAS)),
    ("fc-used", "width-mismatch", "error", Case(config=ids(30), tensors=ONE)),
    ("lm-head", "embed-head", "error", Case(tensors={"lm_head.weight": None})),
    ("lm-head", "embed-head", "error", Case(config={"tie_word_embeddings": True})),
    ("embedding", "embed-head", "error", Case(config={"target_hidden_size": 2 * H}, tensors=NARROW_TARGET)),
    (
        "embedding",
        "embed-head",
        "error",
        Case(config={"embed_requires_grad": True}, tensors={"embed_tokens.weight": torch.zeros(VOCAB, H).bfloat16()}),
    ),
    ("vocab-sizes", "vocab-map", "error", Case(config={"draft_vocab_size": SMALL + 8})),
    ("vocab-sizes", "vocab-map", "error", Case(config={"draft_vocab_size": None})),
    ("vocab-sizes", "vocab-map", "error", Case(tensors={"t2d": torch.zeros(VOCAB + 1, dtype=torch.bool)})),
    ("target-vocab", "vocab-map", "error", Case(text={"vocab_size": VOCAB - 8})),
    ("target-vocab", "vocab-map", "warning", Case(text={"vocab_size": VOCAB + 8})),
    ("vocab-map", "vocab-map", "error", Case(tensors=d2t(torch.arange(SMALL)))),
    ("vocab-map", "vocab-map", "error", Case(tensors={"d2t": None})),
    ("vocab-map", "vocab-map", "error", Case(tensors=d2t(D2T * 3))),
    ("vocab-map", "vocab-map", "error", Case(tensors=d2t(-torch.arange(SMALL) + 5))),
    ("vocab-map", "vocab-map", "error", Case(tensors=d2t(D2T + 1, keep_t2d=True))),
    ("vocab-map", "vocab-map", "error", Case(tensors=d2t(D2T + torch.arange(SMALL), keep_t2d=True))),
    ("vocab-map", "vocab-map", "warning", Case(tensors=d2t(torch.zeros(SMALL, dtype=torch.int64)))),
    ("mask-token", "embed-head", "error", Case(config={"mask_token_id": VOCAB})),
    (
        "rope-schemas",
        "rope-mismatch",
        "error",
        Case(config={"rope_theta": None, "rope_parameters": {"rope_theta": 5e4}}, engine="0.5.9"),
    ),
    ("rope-schemas", "rope-mismatch", "error", Case(config={"rope_parameters": {"rope_theta": 1e4}})),
    (
        "rope-schemas",
        "rope-mismatch",
        "error",
        Case(
            config={
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
                "rope_parameters": {"rope_theta": 5e4, "rope_type": "default"},
            }
        ),
    ),
    ("rope-theta", "rope-mismatch", "warning", Case(config={"rope_theta": None})),
    ("rope-factor", "rope-mismatch", "error", Case(config={"rope_scaling": {"type": "yarn"}})),
    ("rope-like-target", "rope-mismatch", "info", Case(config={"rope_theta": 1e4})),
    (
        "rope-like-target",
        "rope-mismatch",
        "warning",
        Case(config={"partial_rotary_factor": 1.0}, text={"partial_rotary_factor": 0.25}),
    ),
    ("draft-dtype", "precision", "warning", Case(config={"torch_dtype": "float16"}, text={"torch_dtype": "float16"})),
    ("dtype-like-target", "precision", "warning", Case(config={"torch_dtype": "float32"})),
    ("draft-quantization", "precision", "warning", Case(flags=("--tp", "8", "--quantization", "modelopt_fp4"))),
    ("vllm-slots", "width-mismatch", "error", Case(config=top_level(2, 20, 30, 58), tensors=WIDE, engine=VLLM)),
    (
        "vllm-slots",
        "width-mismatch",
        "error",
        Case(config={"num_aux_hidden_states": 4}, engine=VLLM),
    ),
    (
        "vllm-speculators",
        "engine-version-rule",
        "error",
        Case(config={"speculators_model_type": "eagle3", "transformer_layer_config": DRAFT}, engine=VLLM),
    ),
    (
        "vllm-speculators",
        "engine-version-rule",
        "error",
        Case(
            config=WHOLE | {"transformer_layer_config": DRAFT | {"model_type": "mixtral"}},
            engine=VLLM,
        ),
    ),
    (
        "vllm-norms",
        "draft-norm",
        "error",
        Case(config={"norm_before_fc": True}, tensors=INPUT_NORM | MLA, engine=VLLM),
    ),
    ("vllm-norms", "draft-norm", "error", Case(config={"use_aux_norm": True}, tensors=FC_NORM, engine=VLLM)),
    (
        "vllm-target",
        "engine-version-rule",
        "error",
        Case(target={"architectures": ["Glm4MoeForCausalLM"]}, engine=VLLM),
    ),
    ("ids-captured", "boundary-missing", "error", Case(config=ids(-1, 2, 30), engine=VLLM)),
    ("ids-captured", "boundary-missing", "error", Case(config=ids(2, 30, 62), engine=VLLM)),
    ("ids-captured", "embedding-missing", "error", Case(config=ids(0, 3, 31), engine=VLLM)),
    ("ids-order", "concat-order", "error", Case(config=ids(58, 2, 30), engine=VLLM)),
    ("ids-meaning", "engine-version-rule", "info", Case(engine=VLLM)),
    ("ids-rule-known", "undetermined", "info", Case(engine="vllm==0.30.0")),
    ("fc-bias", "engine-version-rule", "error", Case(config={"bias": True}, tensors=BIAS, engine=VLLM)),
    (
        "flag-place",
        "engine-version-rule",
        "error",
        Case(config={"eagle_config": {IDS: [2, 30, 58], "fc_norm": True}}, tensors=FC_NORM, engine=VLLM),
    ),
    ("lm-head", "embed-head", "error", Case(tensors={"lm_head.weight": None}, engine=VLLM)),
    (
        "algorithm",
        "engine-version-rule",
        "error",
        Case(engine=VLLM, flags=("--speculative-config", '{"method": "eagle"}')),
    ),
    ("pipeline-parallel", "capture-lost", "error", Case(engine=VLLM, flags=("--pipeline-parallel-size", "2"))),
    (
        "target-basis",
        "rotated-basis",
        "warning",
        Case(target={"quantization_config": {"quant_method": "ascend", "scheme": "QuaRot"}}),
    ),
]


@pytest.mark.parametrize(
    ("name", "code", "severity", "case"), FAULTY, ids=[f"{i}-{row[0]}" for i, row in enumerate(FAULTY)]
)
def test_a_fault_is_found(name: str, code: str, severity: str, case: Case, check: Check) -> None:
    exit_code, report = check(case)
    found = {(f["evidence"]["check"], f["code"], f["severity"]) for f in report["findings"]}
    assert (name, code, severity) in found
    if severity == "error":
        assert exit_code == 1
    for finding in report["findings"]:
        assert finding["fix"]
        assert finding["message"]
        assert finding["evidence"]["source"]
        if "key" in finding["evidence"]:
            assert Path(finding["evidence"]["file"]).is_file()
            assert finding["evidence"]["line"] >= 1


def test_every_check_has_a_fault_that_it_finds() -> None:
    assert {row[0] for row in FAULTY} == {entry.name for entry in CHECKS}
    assert len({entry.name for entry in CHECKS}) == len(CHECKS)


SOUND: list[Case] = [
    Case(engine="0.5.14"),
    Case(engine="0.5.13", flags=("--tp", "8", "--enforce-disable-flashinfer-allreduce-fusion")),
    Case(engine="0.5.13", flags=("--tp", "8", "--enable-dp-attention")),
    Case(engine="0.5.13", flags=("--tp", "1")),
    Case(engine="0.5.13", flags=("--tp", "8", "--nnodes", "2")),
    Case(engine="0.5.10", flags=("--tp", "1", "--disable-cuda-graph")),
    Case(config=ids(1, 29, 57), engine="0.5.12", flags=("--tp", "1")),
    Case(config=ids(0, 3, 31)),
    Case(config={"norm_before_fc": True}, tensors=INPUT_NORM, engine="0.5.17"),
    Case(config={"fc_norm": True}, tensors=FC_NORM, engine="0.5.14"),
    Case(config={"draft_vocab_size": None}, tensors={"lm_head.weight": None, "d2t": None, "t2d": None}),
    Case(config={"bias": True}, tensors=BIAS),
    Case(config=ids(2, 20, 30, 58), tensors=WIDE),
    Case(config={"rope_theta": None, "rope_parameters": {"rope_theta": 5e4, "rope_type": "default"}}),
    Case(tensors=d2t(D2T)),
    Case(tensors={"d2t": torch.arange(SMALL), "t2d": EVERY_SECOND}),
    Case(target={"architectures": ["LlamaForCausalLM"]}),
    Case(target={"architectures": ["LlamaForCausalLM"]}, engine="0.5.13"),
    Case(engine=None),
    Case(engine=VLLM),
    Case(config=WHOLE, engine=VLLM),
    Case(config=top_level(2, 30, 58), engine=VLLM),
    Case(config=ids(2, 30, 61), engine=VLLM),
    Case(config=ids(2, 20, 30, 58), tensors=WIDE, engine=VLLM),
    Case(config={"norm_before_fc": True}, tensors=INPUT_NORM, engine=VLLM),
    Case(config={"fc_norm": True}, tensors=FC_NORM, engine=VLLM),
    Case(config=ids(2, 3, 5), target={"architectures": ["LlamaForCausalLM"]}, engine=VLLM, flags=("--pp-size", "2")),
    Case(config={"tie_word_embeddings": True}, engine=VLLM),
    Case(engine=VLLM, flags=("--tp", "8", "--speculative-config", '{"method": "eagle3", "model": "x"}')),
]


@pytest.mark.parametrize("case", SOUND, ids=range(len(SOUND)))
def test_no_false_alarm(case: Case, check: Check) -> None:
    code, report = check(case)
    assert code == 0
    assert [f for f in report["findings"] if f["severity"] != "info"] == []


def test_the_storys_config_in_two_versions(check: Check) -> None:
    code, report = check(Case(engine="0.5.12"))
    assert (code, report["layers"]["declared"]) == (1, [3, 31, 59])  # and fused: exit 1
    meaning = next(f for f in report["findings"] if f["evidence"]["check"] == "ids-meaning")
    assert "0.5.13 reads [2, 30, 58]" in meaning["message"]
    code, report = check(Case(engine="0.5.14"))
    assert (code, report["layers"]["declared"]) == (0, [2, 30, 58])


def test_vllm_takes_ids_as_they_are_and_the_top_level_first(check: Check) -> None:
    code, report = check(Case(config=ids(1, 29, 57) | {IDS: [2, 30, 58]}, engine=VLLM))
    assert (code, report["layers"]["declared"]) == (0, [2, 30, 58])
    code, report = check(Case(config=ids(1, 29, 57), engine=VLLM))
    assert (code, report["layers"]["declared"]) == (0, [1, 29, 57])
    meaning = next(f for f in report["findings"] if f["evidence"]["check"] == "ids-meaning")
    assert "SGLang 0.5.23 reads [2, 30, 58]" in meaning["message"]


def test_what_is_about_sglang_is_named_and_not_applied_to_vllm(
    check: Check, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Each of these is an error on SGLang 0.5.13.
    flags = ("--tp", "8", "--enable-two-batch-overlap")
    code, report = check(Case(config={"norm_before_residual": True}, engine=VLLM, flags=flags))
    assert code == 0
    skipped = {c["check"] for c in report["inputs"]["checks"] if c["status"] == "skipped"}
    assert {"fused-all-reduce", "graph-layers", "two-batch-overlap", "norm-before-residual", "dialect"} <= skipped
    words = Case(engine=VLLM).write(tmp_path / "x")
    assert main(words) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "not run checks of SGLang alone: dialect, draft-class, " in out
    assert "vllm" not in {c["check"].split("-")[0] for c in check(Case())[1]["inputs"]["checks"]}


def test_a_real_speculators_draft_is_accepted_by_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--draft", str(DRAFTS / "speculators_nbr"), "--engine", VLLM, "--tp", "2"]) == 0


def test_unknown_rule_is_inconclusive(check: Check) -> None:
    code, report = check(Case(target={"architectures": ["NewForCausalLM"]}))
    assert (code, report["verdict"]) == (3, "inconclusive")


def test_without_engine_and_target_the_rest_is_checked(check: Check, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--draft", str(DRAFTS / "specforge_sglang")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "not run checks that need SGLang as the engine" in out
    assert "the target (--target)" in out


# ------------------------------------------------------------------------------------------------- usage and input


@pytest.mark.parametrize(
    ("args", "word"),
    [
        ([], "--draft"),
        (["--draft", "/does/not/exist"], "does not exist"),
        (["--draft", str(DRAFTS / "specforge_sglang"), "--target", "/does/not/exist"], "/does/not/exist: "),
        (["--draft", str(DRAFTS / "specforge_sglang"), "--engine", "tgi==1"], "'tgi' is no engine that is known here"),
        (["--draft", str(DRAFTS / "specforge_sglang"), "--engine", "vllm"], "is not sglang==VERSION or vllm==VERSION"),
        (["--draft", str(DRAFTS / "specforge_sglang"), "--engine", "vllm==new"], "is not sglang==VERSION"),
        (["--draft", str(DRAFTS / "specforge_sglang"), "--tp", "8"], "--engine"),
        (
            ["--draft", str(DRAFTS / "specforge_sglang"), "--engine", "sglang==1.0", "--tp", "8", "--", "--tp", "4"],
            "tp_size 4",
        ),
        (["--draft", str(DRAFTS / "specforge_sglang"), "--server", "http://x", "--", "cmd"], "not both"),
    ],
)
def test_usage_errors(args: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *args]) == 2
    err = capsys.readouterr().err
    assert word in err
    assert "fix:" in err
    assert "Traceback" not in err


def test_a_damaged_draft_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{")
    assert main(["check", "--draft", str(tmp_path)]) == 2
    assert "not JSON" in capsys.readouterr().err


@pytest.fixture
def server() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = {
                "version": "0.5.13",
                "tp_size": 8,
                "pp_size": 1,
                "enable_flashinfer_allreduce_fusion": True,
                "disable_cuda_graph": False,
            }
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    running = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{running.server_port}"
    running.shutdown()
    thread.join()
    running.server_close()


def test_a_running_server_is_asked(server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = Case(engine=None).write(tmp_path / "x")
    code = main([*words, "--server", server, "--format", "json"])
    report = json.loads(capsys.readouterr().out)
    assert code == 1
    assert (report["inputs"]["engine_version"], report["inputs"]["tp_size"]) == ("0.5.13", 8)
    assert [f["code"] for f in report["findings"] if f["severity"] == "error"] == ["partial-sum"]
    assert main([*words, "--server", server, "--engine", "sglang==0.5.14"]) == 2
    assert main([*words, "--server", "http://127.0.0.1:9"]) == 4


def test_command_flags() -> None:
    words = ["--tp", "8", "--enable-x", "--moe-a2a-backend=deepep", "--ids", "1", "2", "3", "--temp", "0.5"]
    words = ["python", "-m", "sglang.launch_server", *words]
    assert command_flags(words) == {
        "tp_size": 8,
        "enable_x": True,
        "moe_a2a_backend": "deepep",
        "ids": [1, 2, 3],
        "temp": 0.5,
    }


# ---------------------------------------------------------------------------------------------------------- output


def test_lines_of_keys() -> None:
    text = '{\n "a": [1, {"b": 2}],\n "c": {\n  "d": "x\\"}{",\n  "e": null\n },\n "b": {}\n}'
    assert line_of(text, ("a",)) == 2
    assert line_of(text, ("c", "d")) == 4
    assert line_of(text, ("c", "e")) == 5
    assert line_of(text, ("b",)) == 7
    assert line_of(text, ("c", "missing")) == 3
    assert line_of(text, ("missing",)) == line_of(text, ()) == 1


def test_github_annotations_point_at_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = Case(config=ids(2, 30, 30)).write(tmp_path / "x")
    assert main([words[0], "--format", "github", *words[1:]]) == 1
    lines = capsys.readouterr().out.splitlines()
    path = tmp_path / "x" / "draft" / "config.json"
    number = next(i for i, line in enumerate(path.read_text().splitlines(), 1) if IDS in line)
    assert lines[0].startswith(f"::error file={path},line={number},title=eagle-parity layer-set::the ids [2, 30, 30]")
    assert "%0Afix: " in lines[0]
    assert lines[-1].startswith("FAIL")


def test_github_paths_are_relative_to_the_repository(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = Case(config=ids(2, 30, 30)).write(tmp_path / "x")
    monkeypatch.chdir(tmp_path)
    main([words[0], "--format", "github", *words[1:]])
    assert "::error file=x/draft/config.json,line=" in capsys.readouterr().out


def test_junit_has_a_test_for_every_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = Case(config=ids(2, 30, 30), engine=None).write(tmp_path / "x")
    assert main([words[0], "--format", "junit", *words[1:]]) == 1
    suite = ElementTree.fromstring(capsys.readouterr().out).find("testsuite")
    assert suite is not None
    assert suite.get("tests") == str(len(CHECKS))
    failed = {case.get("name"): case.find("failure") for case in suite if case.find("failure") is not None}
    assert set(failed) == {"ids-unique (layer-set)"}
    assert int(suite.get("skipped", "0")) > 10


def test_markdown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = Case(config=ids(2, 30, 30), engine=None).write(tmp_path / "x")
    report = tmp_path / "report.md"
    assert main([words[0], "--format", "markdown", "--report", f"markdown={report}", *words[1:]]) == 1
    out = capsys.readouterr().out
    assert out == report.read_text()
    assert out.startswith("**FAIL**: layer-set")
    assert "Not run: checks that need SGLang as the engine" in out


def test_other_commands_print_these_formats_too(net: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.synthetic import serving_spec, training_spec

    sides = [str(training_spec(net).write(tmp_path / "t")), str(serving_spec(net, (3, 4, 6)).write(tmp_path / "s"))]
    for command in ("compare", "gate"):
        assert main([command, *sides, "--format", "junit"]) == 1
        suite = ElementTree.fromstring(capsys.readouterr().out).find("testsuite")
        assert suite is not None
        assert (suite.get("tests"), suite.get("failures")) == ("5", "3")
        assert main([command, *sides, "--format", "github"]) == 1
        assert capsys.readouterr().out.count("::error title=eagle-parity layer-shift::") == 3
        assert main([command, *sides, "--format", "markdown"]) == 1
        assert "| slot 0 | 2 | 3 |" in capsys.readouterr().out


def test_no_torch_is_loaded(tmp_path: Path) -> None:
    words = Case().write(tmp_path / "x")
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "eagle_parity", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    loaded = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert "eagle_parity" in loaded
    assert not loaded & {"torch", "numpy", "sglang", "transformers", "safetensors"}
