"""The live servers one after the other: each has its faults in turn, and its healthy controls between them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.lab import live
from tests.lab.live import USUAL, Bench
from tests.lab.live_faults import ELSEWHERE, ENGINE, HALF, TRAINED, Fault, named
from tests.lab.run import Outcome

NOT_READY = Outcome("exit 4", (), ())


@dataclass(frozen=True)
class Live:
    """One run: a fault (or a healthy control, expected "pass") on a server, what was asked, and what it said."""

    fault: str
    expected: tuple[str, ...]
    outcome: Outcome
    report: Path | None = None
    asked: str = "compare"
    note: str = ""

    @property
    def right(self) -> bool:
        return self.outcome.first in self.expected

    @property
    def healthy(self) -> bool:
        return self.expected == ("pass",)

    @property
    def found(self) -> bool:
        """Not silently passed: an error, a refusal, or the warning that it should be."""
        warned = set(self.expected) & set(self.outcome.warnings)
        return bool(self.outcome.verdict not in ("pass", "inconclusive") or warned)


def broken(bench: Bench, faults: Sequence[Fault]) -> Iterator[Live]:
    """Each fault switched on, probed, and switched off again by the next."""
    for fault in faults:
        said, serving = bench.probe(fault.name)
        if said.code:
            yield Live(fault.name, fault.expected, NOT_READY, asked="dump serving", note=last_line(said.text))
            continue
        outcome, report = bench.compare(bench.training(fault.trained or USUAL), serving)
        yield Live(fault.name, fault.expected, outcome, report)


def trained(bench: Bench, faults: Sequence[Fault]) -> Iterator[Live]:
    """The healthy server, and drafts that were trained on something else."""
    _, serving = bench.probe()
    for fault in faults:
        assert fault.trained is not None
        outcome, report = bench.compare(bench.training(fault.trained), serving)
        yield Live(fault.name, fault.expected, outcome, report)


def healthy(bench: Bench, name: str = "healthy", *options: object, trained: Any = USUAL) -> Live:
    said, serving = bench.probe(live.HEALTHY, *options)
    assert said.code == 0, said.text
    outcome, report = bench.compare(bench.training(trained), serving)
    return Live(name, ("pass",), outcome, report)


def floor(bench: Bench) -> Live:
    """The same server asked twice, once as the floor."""
    dumps = [bench.probe()[1] for _ in range(2)]
    outcome, report = bench.compare(bench.training(), dumps[0], "--floor", dumps[1])
    return Live("asked again, as the floor", ("pass",), outcome, report)


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith("error:")]
    return lines[-1].removeprefix("error: ") if lines else text.strip().splitlines()[-1]


# ---------------------------------------------------------------------------------------------------------- servers


def deepseek(work: Path) -> Iterator[Live]:
    with live.bench(work) as bench:
        yield healthy(bench)
        yield from trained(bench, TRAINED)
        yield from templates(bench)
        yield warm(bench)
        yield floor(bench)
        yield from broken(bench, ENGINE[:-1])
        yield healthy(bench, "healthy again, after all these faults")
        yield from broken(bench, ENGINE[-1:])


def warm(bench: Bench) -> Live:
    """The second time through the cache most rows are not computed: the dump must say so instead of being short."""
    bench.probe(live.HEALTHY, "--warm-cache")
    said, serving = bench.probe(live.HEALTHY, "--warm-cache")
    requests = json.loads((serving / "manifest.json").read_text())["requests"]
    cached = sum(request.get("cached_tokens") or 0 for request in requests)
    outcome, report = bench.compare(bench.training(), serving)
    told = "said so" if f"{cached} tokens of" in said.text and "prefix cache" in said.text else "did not say so"
    return Live("most of each prompt from the prefix cache", ("pass",), outcome, report, note=f"{cached} rows, {told}")


def templates(bench: Bench) -> Iterator[Live]:
    """Messages through the server's own chat template, and training data made with this one or another one."""
    chat = bench.work / "chat.jsonl"
    lines = [" ".join(f"w{(31 * n + 7 * i) % 500}" for i in range(20 + n)) for n in range(4)]
    chat.write_text("".join(json.dumps({"messages": [{"role": "user", "content": line}]}) + "\n" for line in lines))
    other = bench.work / "other"
    shutil.copytree(bench.models / "target", other)
    template = other / "chat_template.jinja"
    text = template.read_text()
    changed = text.replace("'<s> '", "'<s> w9 w8 w7 '")
    assert changed != text
    template.write_text(changed)
    said, serving = bench.probe(of=chat)
    assert said.code == 0, said.text
    outcome, report = bench.compare(bench.compute(of=chat), serving)
    yield Live("messages, one chat template", ("pass",), outcome, report)
    outcome, report = bench.compare(bench.compute(of=chat, model=other), serving)
    yield Live("messages, another chat template in training", ("template-mismatch",), outcome, report)


def deepseek_four(work: Path, expert_width: int = 128) -> Iterator[Live]:
    with live.bench(work, tp=4, expert_width=expert_width) as bench:
        yield healthy(bench)
        yield from broken(bench, [*named(*ELSEWHERE), HALF])
        yield from trained(bench, TRAINED[:1])
        yield healthy(bench, "healthy again, after these faults")


def llama(work: Path) -> Iterator[Live]:
    """-1 means the embedding to this model's class, whose ids are always shifted by one."""
    with live.bench(work, arch="llama", edit=lambda models: declare(models, [-1, 3, 5])) as bench:
        served = (0, 4, 6)
        yield healthy(bench, "ids -1, 3, 5, trained on the embedding, 4 and 6", trained=served)
        yield from trained(
            bench,
            [
                Fault("the embedding served first, not trained", ("layer-set",), (4, 6, 7)),
                Fault("ids -1, 3, 5 taken as they are: trained on one layer less", ("layer-shift",), (0, 3, 5)),
            ],
        )
        yield from broken(bench, [Fault(f.name, f.expected, served) for f in named(*ELSEWHERE)])
        yield healthy(bench, "healthy again, after these faults", trained=served)


def bfloat16(work: Path) -> Iterator[Live]:
    with live.bench(work, flags=("--dtype", "bfloat16"), dtype="bfloat16") as bench:
        yield healthy(bench)
        yield from trained(bench, TRAINED[:5])
        yield from broken(bench, named(*ELSEWHERE))
        yield healthy(bench, "healthy again, after these faults")


def declare(models: Path, ids: list[int] | None, top: list[int] | None = None) -> None:
    """Write other ids into the draft's config, and at its top level."""

    def edit(config: dict[str, Any]) -> None:
        config["eagle_config"].pop("eagle_aux_hidden_state_layer_ids")
        if ids is not None:
            config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = ids
        if top is not None:
            config["eagle_aux_hidden_state_layer_ids"] = top

    live.edit_config(models / "draft", edit)


def ids(work: Path) -> Iterator[Live]:
    """Ids that mean something else than their writer thought."""
    with live.bench(work / "top", edit=lambda models: declare(models, None, [3, 5, 7])) as bench:
        name = "ids at the top level: not read"
        yield from trained(bench, [Fault(name, ("layer-set", "engine-version-rule"), (3, 5, 7))])
        yield checked(bench.models, name, "engine-version-rule")
        yield healthy(bench, "no ids: trained on the default layers", trained=(2, 4, 5))
    with live.bench(work / "zero", edit=lambda models: declare(models, [0, 4, 6])) as bench:
        name = "id 0 first: taken as they are, not plus one"
        yield from trained(bench, [Fault(name, ("layer-shift", "engine-version-rule"), (1, 5, 7))])
        yield healthy(bench, "ids 0, 4, 6, trained on the embedding, 4 and 6", trained=(0, 4, 6))
    yield from refused(work / "minus", [-1, 3, 5], "id -1: no such layer to this model's class")


def refused(work: Path, declared: list[int], name: str) -> Iterator[Live]:
    """A server that dies at its first forward: `dump serving` must say what the server said."""
    work.mkdir(parents=True)
    models = live.models(work, edit=lambda models: declare(models, declared))
    words = live.command(models, work / "fault", 2)
    (work / "fault").write_text(live.HEALTHY)
    which = ("--prompts", live.prompts(work / "prompts.jsonl"))
    said = live.run("dump", "serving", "-o", work / "out", *which, "--timeout", 300, "--launch", "--", *words)
    words_of_server = "captured 2 of 3 aux hidden states"
    told = words_of_server if said.code == 4 and words_of_server in said.text else f"exit {said.code}"
    yield Live(name, (words_of_server,), Outcome("exit 4", (told,), ()), asked="dump serving", note="the server dies")
    yield checked(models, name, "capture-lost", "boundary-missing")


def checked(models: Path, name: str, *expected: str) -> Live:
    """What `check` says of the files alone."""
    report = models.parent / f"check-{models.parent.name}.json"
    which = ("--draft", models / "draft", "--target", models / "target", "--engine", "sglang==0.5.23", "--tp", 2)
    said = live.run("check", *which, "--report", f"json={report}")
    return Live(name, expected, live.outcome(report, said), report, "check")


def drafts(work: Path) -> Iterator[Live]:
    """Faults of the draft's own files: the states are right, and only `check` can tell."""
    for place, name, code, edit in (
        ("head", "no lm_head in the draft", "embed-head", no_head),
        ("map", "d2t holds ids instead of offsets", "vocab-map", absolute_map),
        ("padded", "the draft has the padded vocabulary, the target 500 words", "vocab-map", short_vocabulary),
    ):
        with live.bench(work / place, edit=edit) as bench:
            yield healthy(bench, f"{name}: the states")
            yield checked(bench.models, name, code)
    fine = work / "fine"
    fine.mkdir(parents=True)
    yield checked(live.models(fine), "nothing wrong on paper", "pass")


def no_head(models: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["lm_head.weight"]

    live.edit_weights(models / "draft", edit)


def absolute_map(models: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["d2t"] += torch.arange(len(tensors["d2t"]))

    live.edit_weights(models / "draft", edit)


def short_vocabulary(models: Path) -> None:
    """A target of 500 words, which SGLang pads for its ranks; the draft keeps saying 512."""

    def cut(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = tensors[name][:500].clone()

    live.edit_weights(models / "target", cut)
    live.edit_config(models / "target", lambda config: config.update(vocab_size=500))


SERVERS: dict[str, tuple[str, Callable[[Path], Iterator[Live]]]] = {
    "deepseek": ("DeepSeek-V3 architecture, TP=2, float32", deepseek),
    "deepseek4": ("DeepSeek-V3 architecture, TP=4, float32", deepseek_four),
    "padded4": (
        "The same with experts of 64 channels, which SGLang pads: two of the four ranks add zeros to every sum",
        lambda work: deepseek_four(work, expert_width=64),
    ),
    "llama": ("Llama architecture, TP=2, float32", llama),
    "bfloat16": ("DeepSeek-V3 architecture, TP=2, bfloat16", bfloat16),
    "ids": ("Configs with other ids, DeepSeek-V3 architecture, TP=2, a server each", ids),
    "drafts": ("Drafts with other faults, DeepSeek-V3 architecture, TP=2, a server each", drafts),
}
