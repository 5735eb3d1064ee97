"""What the plugin takes from each version of SGLang, held against that version's real wheel, by source.

`make test` reads the oldest version, those where something changed, and the newest; `make test-all` reads all.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, Optional

import pytest
import torch

from eagle_parity.captures import versions
from eagle_parity.captures.adapter import SGLANG, Adapter, draft_facts, model_facts
from eagle_parity.captures.versions import FAMILIES, NEWEST, OLDEST
from eagle_parity.conventions.sglang import RULES, find_rule, parse_version, served
from eagle_parity.diagnosis.files import engine
from tests.wheels import Source, source_of

FAST = ("0.5.10", "0.5.13", "0.5.14", "0.5.23")
ALL = [f"0.5.{n}" for n in range(10, 24)]
VERSIONS = [pytest.param(v, marks=[] if v in FAST else [pytest.mark.slow]) for v in ALL]

every_version = pytest.mark.parametrize("version", VERSIONS)


def own(version: str) -> Adapter:
    return next(adapter for since, adapter in FAMILIES if parse_version(version) >= since)


def contract(adapter: Adapter) -> dict[str, tuple[str, ...]]:
    return {**adapter.needs, **adapter.needs_for_tree, **adapter.needs_for_draft}


def test_every_version_between_the_ends_is_read() -> None:
    assert (ALL[0], ALL[-1]) == (OLDEST, NEWEST)
    assert {OLDEST, NEWEST} <= set(FAST)


@every_version
def test_a_version_keeps_its_adapter_s_contract(version: str) -> None:
    adapter, source = own(version), source_of(version)
    assert source.lacks(contract(adapter)) == []
    for target in (adapter.init, adapter.forward, *adapter.draft_extends):
        assert any(path.replace(":", ".") == target for path in contract(adapter)), (
            f"{target} is hooked without a contract"
        )


@every_version
def test_a_version_altered_in_one_name_does_not(version: str) -> None:
    """Each name of the contract, renamed where the wheel defines it, is found missing: no check is empty."""
    source, needs = source_of(version), contract(own(version))
    for path, names in needs.items():
        module, _, inside = path.partition(":")
        for name in (*names, inside.split(".")[-1]):
            if name in ("self", "__init__"):
                continue
            place = source.find(module, inside)
            assert place is not None
            altered = source.altered(place[0], lambda text, name=name: re.sub(rf"\b{name}\b", f"{name}_moved", text))
            assert any(name in phrase for phrase in altered.lacks({path: names})), f"{name} of {path}"


@pytest.mark.parametrize(("until", "family"), [("0.5.13", 0), ("0.5.12", 1), ("0.5.11", 2), ("0.5.10", 3)])
@pytest.mark.slow
def test_a_family_does_not_fit_the_version_before_it(until: str, family: int) -> None:
    """Each family is needed. To 0.5.12 the adapter of 0.5.13 would fit, and not see the first design."""
    newer = FAMILIES[family][1]
    lacks = source_of(until).lacks(contract(newer))
    if until == "0.5.12":
        first = "sglang.srt.speculative.eagle_worker"
        assert source_of(until).module(first) is not None
        assert source_of("0.5.13").module(first) is None
    else:
        assert lacks


# ------------------------------------------------------------------------------------- what the getters really read


class Seen:
    """Stands for an object of a class of SGLang's, and writes down what is read of it."""

    def __init__(self, reads: set[tuple[str, str]], path: str, **values: Any) -> None:
        self.__dict__.update(_reads=reads, _path=path, _values=values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._reads.add((self._path, name))
        return self._values.get(name, 0)


SRT = "sglang.srt"
BATCH = f"{SRT}.model_executor.forward_batch_info:ForwardBatch"


def read_by(adapter: Adapter) -> set[tuple[str, str]]:
    """(class, attribute) of all that the adapter's getters read of SGLang's objects, each called as the plugin does."""
    reads: set[tuple[str, str]] = set()

    def seen(path: str, **values: Any) -> Any:
        return Seen(reads, f"{SRT}.{path}", **values)

    info = "speculative.eagle_info:"
    verify = seen(info + "EagleVerifyInput")
    mode = SimpleNamespace(name="TARGET_VERIFY")
    batch = seen("model_executor.forward_batch_info:ForwardBatch", rids=["a"], forward_mode=mode, spec_info=verify)
    hidden = torch.zeros(2, 4)
    output = seen("layers.logits_processor:LogitsProcessorOutput", hidden_states=hidden)
    adapter.rids(batch)
    assert adapter.phase(batch) == "verify"
    adapter.lengths(batch, "verify")
    adapter.lengths(batch, "prefill")
    adapter.tokens(batch)
    adapter.tree(batch)
    result = seen("model_executor.model_runner:ModelRunnerOutput", logits_output=output)
    adapter.given(result)
    adapter.graph(result)
    drafted = seen("model_executor.forward_batch_info:ForwardBatch", spec_info=seen(info + "EagleDraftInput"))
    adapter.received(drafted)

    config = seen("configs.model_config:ModelConfig", hf_config=SimpleNamespace(), hf_text_config=SimpleNamespace())
    runner = seen("model_executor.model_runner:ModelRunner", model_config=config)
    owner = runner if ".ModelRunner." in adapter.init else seen("managers.tp_worker:TpModelWorker", model_runner=runner)
    adapter.is_draft(adapter.runner(owner))
    model_facts(runner)
    draft_facts(runner)

    request = seen("managers.schedule_batch:Req", rid="a", finished=lambda: False)
    verified = seen(
        "managers.utils:GenerationBatchResult", logits_output=output, next_token_ids=hidden, accept_lens=hidden
    )
    for path, names in adapter.needs_for_draft.items():
        if path.startswith(f"{SRT}.{info}EagleDraft"):  # what the first design gives the draft
            lengths = [1] if "accept_length_cpu" in names else [2]
            values = {name: lengths if name.endswith("_cpu") else hidden for name in names}
            given = seen(path.removeprefix(f"{SRT}."), **values)
            verdict = adapter.verdict(
                seen("managers.schedule_batch:ScheduleBatch", reqs=[request], spec_info=given), None
            )
            assert verdict is not None
            assert (verdict.rids, verdict.lengths, verdict.accepted.tolist()) == (["a"], [2], [2])
    assert adapter.verdict(seen("managers.schedule_batch:ScheduleBatch", reqs=[request]), verified) is not None
    return reads


@every_version
def test_all_that_the_getters_read_is_there_and_in_the_contract(version: str) -> None:
    adapter, source = own(version), source_of(version)
    reads = read_by(adapter)
    assert (BATCH, "rids") in reads
    assert len(reads) > 20
    needs = contract(adapter)
    for path, name in reads:
        attributes = source.attributes(path)
        assert attributes is not None, path
        assert name in attributes, f"{name} of {path}"
        assert name in needs.get(path, (name,)), f"{name} of {path} is read and not in the contract"


@every_version
def test_the_place_is_read_from_what_is_there(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, source = own(version), source_of(version)
    reads: set[tuple[str, str]] = set()
    groups, attention, context = (
        f"{SRT}.{m}" for m in ("distributed.parallel_state", "layers.dp_attention", "runtime_context")
    )

    def stub(name: str, **members: Any) -> ModuleType:
        module = ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    def call(module: str, name: str) -> Callable[[], int]:
        def function() -> int:
            reads.add((module, name))
            return 1

        return function

    functions = [(path.partition(":")) for path in adapter.needs if path.startswith((groups, attention))]
    for package in ("sglang", SRT, f"{SRT}.distributed", f"{SRT}.layers"):
        stub(package)
    for module in (groups, attention):
        made = stub(module, **{f: call(module, f) for m, _, f in functions if m == module})
        setattr(sys.modules[module.rpartition(".")[0]], module.rpartition(".")[2], made)
    stub(context, get_parallel=lambda: Seen(reads, context, **dict.fromkeys(("pp_size", "tp_size", "attn_tp_size"), 2)))
    place = adapter.place()
    assert (place.rank, place.tp_size) == ((1, 1) if functions else (0, 2))
    assert adapter.splits_rows() == ((1, 1) if functions else (0, 2))
    for module, name in reads:
        if name == "dp_rank":  # newer than the rest, and zero where it is not there
            continue
        if module == context:
            assert name in words(source, module), f"{name} of {module}"
        else:
            assert source.find(module, name) is not None


def words(source: Source, module: str) -> set[str]:
    """Names that a module defines, reads or has as text: the parallel context makes its attributes from texts."""
    tree = source.module(module)
    assert tree is not None
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.keyword | ast.arg) and node.arg:
            found.add(node.arg)
    return found


@every_version
def test_how_the_plugin_gets_in(version: str) -> None:
    source = source_of(version)
    if parse_version(version) >= versions.PLUGINS_SINCE:
        assert "sglang.srt.plugins" in words(source, "sglang.srt.plugins")
        calls = [n for n in ast.walk(source.module("sglang.srt.managers.scheduler")) if isinstance(n, ast.Call)]
        assert any(isinstance(c.func, ast.Name) and c.func.id == "load_plugins" for c in calls)
    else:
        assert source.module("sglang.srt.plugins") is None
        namespace: dict[str, Any] = {"importlib": __import__("importlib"), "fnmatch": __import__("fnmatch")}
        namespace["logger"] = SimpleNamespace(warning=lambda *_: None, info=lambda *_: None)
        run(source, "sglang.srt.model_executor.hook_manager", "resolve_callable", namespace)
        run(source, "sglang.srt.model_executor.hook_manager", "register_forward_hooks", namespace)
        import json

        from eagle_parity.captures import plugin

        called: list[Any] = []
        text = re.search(r"'(\[.*\])'", versions.HOOK_ARGUMENT)
        assert text
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(plugin, "hook_factory", called.append)
            namespace["register_forward_hooks"](torch.nn.Linear(1, 1), json.loads(text[1]))
        assert called == [{}]


def run(source: Source, module: str, inside: str, namespace: dict[str, Any]) -> Any:
    """A function of the wheel's, executed alone, with nothing of SGLang around it."""
    place = source.find(module, inside)
    assert place is not None, f"{inside} of {module}"
    node = place[1]
    assert isinstance(node, ast.FunctionDef)
    node.decorator_list, node.returns = [], None
    for argument in node.args.args:
        argument.annotation = None
    exec(compile(ast.Module([node], []), f"{module}:{inside}", "exec"), namespace)
    return namespace[node.name]


@every_version
def test_probes_can_be_asked_for(version: str) -> None:
    """The fields of a request that the client sends; `return_meta_info` of a chat came later and is not needed."""
    source = source_of(version)
    for path, names in {
        f"{SRT}.managers.io_struct:GenerateReqInput": ("rid", "extra_key", "routed_dp_rank", "text", "input_ids"),
        f"{SRT}.entrypoints.openai.protocol:ChatCompletionRequest": ("rid", "extra_key", "messages", "max_tokens"),
    }.items():
        assert set(names) <= (source.attributes(path) or set()), path


# ------------------------------------------------------------------------------------------------- the running version


def test_the_version_proposes_and_the_contract_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking: set[int] = set()
    monkeypatch.setattr(versions, "missing", lambda needs: ["x"] if id(needs) in lacking else [])
    for version, adapter in (
        ("0.5.10", versions.SGLANG_0_5_10),
        ("0.5.10.post1", versions.SGLANG_0_5_10),
        ("0.5.11", versions.SGLANG_0_5_11),
        ("0.5.13", versions.SGLANG_0_5_13),
        ("0.5.14rc1", SGLANG),
        ("0.5.23", SGLANG),
        ("0.7.1", SGLANG),
        ("0.0.0.dev1+gabc", SGLANG),
        ("main", SGLANG),
    ):
        assert versions.choose(version) == (adapter, []), version
    lacking.add(id(SGLANG.needs))
    assert versions.choose("0.5.14.dev3") == (versions.SGLANG_0_5_13, [])
    lacking.add(id(versions.SGLANG_0_5_13.needs))
    assert versions.choose("0.7.1") == (SGLANG, ["x"])
    assert versions.choose("0.5.10") == (versions.SGLANG_0_5_10, [])


def test_versions_that_are_too_old_are_told_why() -> None:
    _, lacks = versions.choose("0.5.9")
    assert lacks == ["request ids in the forward batch, which tell a probe from a user's request (this is 0.5.9)"]
    assert not versions.supported("0.5.9")
    assert versions.supported("0.5.10")
    assert versions.supported("dev")


@pytest.mark.slow
def test_0_5_9_has_no_request_ids_in_the_forward_batch() -> None:
    source = source_of("0.5.9")
    assert source.lacks(versions.SGLANG_0_5_10.needs) == [f"'rids' in {BATCH}"]
    assert source.find(f"{SRT}.models.kimi_k25", "KimiK25ForConditionalGeneration.set_eagle3_layers_to_capture") is None


def test_the_installation_advice_is_for_the_version() -> None:
    assert "--forward-hooks" in versions.installation("0.5.10.post1")
    assert "--forward-hooks" not in versions.installation("0.5.11")
    assert versions.installation("main") == versions.installation(None) == versions.INSTALL


# ---------------------------------------------------------------------------------------------------- the model classes

MODELS = {
    "LlamaForCausalLM": "llama",
    "Qwen3ForCausalLM": "qwen3",
    "DeepseekV3ForCausalLM": "deepseek_v2",
    "KimiK25ForConditionalGeneration": "kimi_k25",
    "GptOssForCausalLM": "gpt_oss",
    "Glm4MoeForCausalLM": "glm4_moe",
}
LAYERS = 61


def captured(source: Source, architecture: str, ids: list[int] | None) -> tuple[int, ...]:
    """The layers at whose entry a model captures: its setter, run out of the wheel on a stub of the model."""
    stub: Any = SimpleNamespace()
    stub.pp_group = SimpleNamespace(is_last_rank=True)
    stub.config = SimpleNamespace(num_hidden_layers=LAYERS)
    stub.model = SimpleNamespace(layers_to_capture=[])
    module = f"{SRT}.models.{MODELS[architecture]}"
    namespace: dict[str, Any] = {"Optional": Optional, "List": list}
    if architecture == "KimiK25ForConditionalGeneration":
        inner = run(
            source, f"{SRT}.models.deepseek_v2", "DeepseekV3ForCausalLM.set_eagle3_layers_to_capture", dict(namespace)
        )
        stub.language_model = SimpleNamespace(**vars(stub))
        stub.language_model.set_eagle3_layers_to_capture = lambda layer_ids=None: inner(stub.language_model, layer_ids)
        held = stub.language_model
    else:
        held = stub
    run(source, module, f"{architecture}.set_eagle3_layers_to_capture", namespace)(stub, ids)
    return tuple(held.model.layers_to_capture)


@pytest.mark.parametrize("architecture", MODELS)
@every_version
def test_model_classes_capture_what_the_conventions_say(architecture: str, version: str) -> None:
    source = source_of(version)
    for ids in (None, [2, 30, 58], [1, 29, 57], [0, 3, 31], [3, 31, 59], [10, 20, LAYERS]):
        claim = served(ids, architecture=architecture, version=version, num_layers=LAYERS)
        assert claim is not None
        got = captured(source, architecture, ids)
        rule = find_rule(architecture, version)
        assert rule is not None
        reachable = range(LAYERS + rule.last_reachable)
        assert tuple(sorted({i for i in got if i in reachable})) == claim.boundaries, ids
    inside = "language_model" if architecture.startswith("Kimi") else "layers_to_capture"
    assert inside in words(source, f"{SRT}.models.{MODELS[architecture]}")


def test_another_rule_would_be_seen() -> None:
    """The test above can fail: a wheel whose setter adds 2 instead of 1."""
    source = source_of("0.5.23").altered(f"{SRT}.models.llama", lambda text: text.replace("val + 1", "val + 2"))
    claim = served([2, 30, 58], architecture="LlamaForCausalLM", version="0.5.23", num_layers=LAYERS)
    assert claim is not None
    assert captured(source_of("0.5.23"), "LlamaForCausalLM", [2, 30, 58]) == claim.boundaries
    assert captured(source, "LlamaForCausalLM", [2, 30, 58]) != claim.boundaries


# ------------------------------------------------------------------------------------------ what check says of versions

MODULES = (
    *(
        "deepseek_v2",
        "glm4_moe",
        "glm4_moe_lite",
        "gpt_oss",
        "kimi_k25",
        "llama",
        "llama4",
        "minimax_m2",
        "minimax_m3_vl",
    ),
    *("mistral", "mllama4", "qwen2", "qwen2_moe", "qwen3", "qwen3_5", "qwen3_moe", "qwen3_next"),
)
DRAFTS = {"llama": "llama_eagle3", "mla": "kimi_k25_eagle3"}
LATE = {
    "KimiK25ForConditionalGeneration": "kimi_k25",
    "MiniMaxM3SparseForConditionalGeneration": "minimax_m3_vl",
    "Gemma3ForCausalLM": "gemma3_causal",
    "Gemma4ForConditionalGeneration": "gemma4_mm",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "KimiVLForConditionalGeneration": "kimi_vl",
}


def test_the_conventions_name_classes_that_exist() -> None:
    source = source_of(NEWEST)
    registered = (source.module(f"{SRT}.models.{path}") for path in MODULES)
    defined = {node.name for tree in registered if tree for node in tree.body if isinstance(node, ast.ClassDef)}
    assert {name for rule in RULES for name in rule.architectures} - defined == set()


@every_version
def test_the_tables_of_check_agree_with_the_wheel(version: str) -> None:
    source, number = source_of(version), parse_version(version)
    for line in engine.SUPPORT:
        module = f"{SRT}.models.{DRAFTS[line.style]}"
        if line.feature == "this draft class":
            assert (source.module(module) is not None) == (number >= line.since), line
        elif line.feature in ("norm_before_fc", "fc_norm", "norm_output"):
            known = source.module(module) is not None and line.feature in words(source, module)
            assert known == (number >= line.since), line
    for architecture, module in LATE.items():
        setter = source.find(f"{SRT}.models.{module}", f"{architecture}.set_eagle3_layers_to_capture")
        assert (setter is not None) == (number >= engine.CAPTURES_SINCE[architecture]), architecture
    deferred = {"gpt_oss": "GptOssForCausalLM", "glm4_moe": "Glm4MoeForCausalLM"}
    for module, architecture in deferred.items():
        line = next(line for line in engine.EARLY_CAPTURE if architecture in line.architectures)
        early = "_sglang_needs_allreduce_fusion" in words(source, f"{SRT}.models.{module}")
        assert early == (number < line.until), architecture
    late = "captured_last_layer_outputs" in words(source, f"{SRT}.models.deepseek_v2")
    assert late == (number >= engine.EARLY_CAPTURE[0].until)


DECODERS = {
    "llama": "LlamaDecoderLayer",
    "qwen3": "Qwen3DecoderLayer",
    "deepseek_v2": "DeepseekV2DecoderLayer",
    "gpt_oss": "GptOssDecoderLayer",
    "glm4_moe": "Glm4MoeDecoderLayer",
}


def make_of(source: Source, module: str, layer: str) -> str | None:
    """How a layer reads the stream, as captures/boundaries.py tells the makes apart; None: not one of them."""
    place, batch = source.find(module, f"{layer}.forward"), "sglang.srt.model_executor.forward_batch_info:ForwardBatch"
    assert place is not None
    text = ast.unparse(place[1])
    if "self.attn_boundary.prepare(" in text:
        return "stage" if "residual_stream" in (source.names(batch) or set()) else None
    if "self.layer_communicator.prepare_attn" in text:
        owner = "sglang.srt.layers.communicator", "LayerCommunicator.prepare_attn"
        found = source.find(*owner)
        # Its second value is the stream, once the sum that the layer before may owe is completed.
        known = found is not None and "return (hidden_states, residual)" in ast.unparse(found[1])
        return "communicator" if known and "_sglang_needs_allreduce_fusion" in ast.unparse(found[1]) else None
    return "pair" if {"hidden_states", "residual"} <= (source.names(f"{module}:{layer}.forward") or set()) else None


@pytest.mark.parametrize("model", DECODERS)
@every_version
def test_layers_are_of_a_make_whose_boundaries_can_be_read(model: str, version: str) -> None:
    module, source = f"sglang.srt.models.{model}", source_of(version)
    made = make_of(source, module, DECODERS[model])
    since_0_5_21 = "pair" if (model, version) == ("llama", "0.5.21") else "stage"
    older = "pair" if model == "llama" else "communicator"
    assert made == (since_0_5_21 if parse_version(version) >= (0, 5, 21) else older)


def test_a_layer_of_another_make_would_be_seen() -> None:
    module, layer = "sglang.srt.models.deepseek_v2", DECODERS["deepseek_v2"]
    renamed = source_of(NEWEST).altered(module, lambda text: text.replace("attn_boundary", "entry_boundary"))
    assert make_of(renamed, module, layer) is None
    moved = source_of("0.5.13").altered(
        "sglang.srt.layers.communicator", lambda text: text.replace("_sglang_needs_allreduce_fusion", "_owed")
    )
    assert make_of(moved, module, layer) is None
