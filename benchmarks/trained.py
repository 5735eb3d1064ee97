"""What the trained drafts of fixtures/trained prove: which wiring the replay reports for each, and how surely.

python benchmarks/trained.py confusion [--fixtures DIR]       every draft on the held-out prompts, three ways
python benchmarks/trained.py forecast [--fixtures DIR]        live servers, TP=2 on CPU cores: predicted and measured

Both print Markdown tables. `forecast` serves with demo/serve.sh; `served right` and `served wrong` are the same weights
under two id lists.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from eagle_parity.alignment.tokens import align
from eagle_parity.alignment.views import rank_view
from eagle_parity.cli.main import main as command
from eagle_parity.draft.acceptance import Fed, Forecast, Speculation, forecast
from eagle_parity.draft.forward import Draft, open_reference
from eagle_parity.draft.ordering import Ordering, rank_orderings
from eagle_parity.draft.passages import find_passages, limited, windows
from eagle_parity.draft.proof import ROWS, WINDOW
from eagle_parity.draft.states import aligned, ordered, prompt_lengths, reader, served, stored_states
from eagle_parity.draft.target import open_target
from eagle_parity.draft.teacher import teach
from eagle_parity.dump import Dump, open_dump
from eagle_parity.records import Boundary, slot_name

ROOT = Path(__file__).resolve().parent.parent
TRUTH: dict[str, tuple[Boundary, ...]] = {
    "usual": (2, 4, 6),
    "embedding-first": (0, 2, 4),
    "late": (3, 5, 7),
    "permuted": (6, 2, 4),
    "fc-norm": (2, 4, 6),
    "norm-before-fc": (2, 3, 6),
    "mla": (1, 4, 7),
    "llama-usual": (1, 3, 5),
    "llama-residual": (2, 3, 4),
    "llama-final-norm": (1, 3, "final.norm"),
}
# draft, what its slots were trained on, the id list that is served, and what that makes the server feed
SERVED: tuple[tuple[str, tuple[Boundary, ...], list[int], tuple[Boundary, ...]], ...] = (
    ("usual", (2, 4, 6), [1, 3, 5], (2, 4, 6)),
    ("usual", (2, 4, 6), [3, 5, 7], (3, 5, 7)),
    ("usual", (2, 4, 6), [0, 2, 4], (0, 2, 4)),
    ("embedding-first", (0, 2, 4), [0, 2, 4], (0, 2, 4)),
    ("embedding-first", (0, 2, 4), [1, 3, 5], (2, 4, 6)),
    ("permuted", (6, 2, 4), [6, 2, 4], (2, 4, 6)),
    ("fc-norm", (2, 4, 6), [1, 3, 5], (2, 4, 6)),
    ("norm-before-fc", (2, 3, 6), [2, 3, 6], (2, 3, 6)),
)

# Beginnings of licences, which the target knows by heart, and of docstrings, where it is unsure.
PROMPTS = (
    "Permission is hereby granted, free of charge, to any person obtaining a copy of this software",
    "Redistribution and use in source and binary forms, with or without modification, are permitted",
    'Licensed under the Apache License, Version 2.0 (the "License"); you may not use this file except',
    'THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED',
    "Unless required by applicable law or agreed to in writing, software distributed under the License",
    "IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES",
    '"License" shall mean the terms and conditions for use, reproduction, and distribution',
    "You must cause any modified files to carry prominent notices stating that You changed the files",
    "Return a string representation of the object. ",
    "Raises ValueError if the argument is not ",
    "Return True if all characters in the string are ",
    "The optional argument specifies the ",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", default="confusion", choices=("confusion", "forecast"))
    parser.add_argument("--fixtures", type=Path, default=ROOT / "fixtures" / "trained")
    parser.add_argument("--topk", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--only", type=int, nargs="*", help="lines of the forecast table")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work, torch.inference_mode():
        if args.what == "confusion":
            confusion(args.fixtures, Path(work))
        else:
            live(args, Path(work))


def target_of(fixtures: Path, name: str) -> Path:
    return fixtures / ("llama-target" if name.startswith("llama") else "deepseek-target")


def run(*words: str) -> None:
    code = command(list(words))
    if code:
        raise SystemExit(f"eagle-parity {' '.join(words)}: exit code {code}")


# ---------------------------------------------------------------------------------------------------- confusion


def confusion(fixtures: Path, work: Path) -> None:
    dumps: dict[Path, Dump] = {}
    print("| draft | trained on | reported | rows | agreement | runner-up | its KL above | z | its agreement |", end="")
    print(" control z | next-token only | staged | seconds |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    for name, truth in TRUTH.items():
        path = fixtures / name
        if not path.is_dir():
            continue
        target = target_of(fixtures, name)
        if target not in dumps:
            out = work / target.name
            prompts = str(fixtures / "prompts.jsonl")
            run("dump", "training", "-o", str(out), "--model", str(target), "--prompts", prompts, "--dtype", "float32")
            dumps[target] = open_dump(out)
        draft = open_reference(path, target, device="cpu")
        began = time.monotonic()
        found = rank(draft, dumps[target], target, staged=False)
        took = time.monotonic() - began
        plain, staged = rank(draft, dumps[target], None), rank(draft, dumps[target], target, staged=True)
        best, second = found.ranking[0], min(found.ranking[1:], key=lambda s: s.z)
        cells = [
            name,
            show(truth),
            show(found.best) + ("" if found.best == truth else " WRONG"),
            str(found.rows),
            f"{best.agreement:.1%}",
            show(second.order),
            f"{second.excess:.4f}",
            f"{second.z:.1f}",
            f"{second.agreement:.1%}",
            f"{found.control_z:.0f}",
            f"{show(plain.best)} z {plain.z:.1f}",
            f"{show(staged.best)}, {staged.tried} of {staged.total}",
            f"{took:.1f}",
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


def rank(draft: Draft, dump: Dump, target: Path | None, *, staged: bool = False) -> Ordering:
    passages = limited(windows(find_passages(dump.tokens), WINDOW), ROWS[False])
    states = stored_states(dump, draft.checkpoint.target_hidden_size)
    layers = dump.facts.model.num_layers
    head = None if target is None else open_target(target)
    teacher = teach(draft, passages, target=head, boundaries=states, num_layers=layers, read=reader(dump))
    return rank_orderings(draft, teacher, states, reader(dump), num_layers=layers, staged=staged)


def show(order: Sequence[Boundary] | None) -> str:
    return "ambiguous" if order is None else f"[{', '.join(map(str, order))}]"


# ----------------------------------------------------------------------------------------------------- forecast


def live(args: argparse.Namespace, work: Path) -> None:
    prompts = work / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": text}) + "\n" for text in PROMPTS))
    print("| draft trained on | ids | server feeds | top-k | measured | predicted from what it feeds |", end="")
    print(" from training states, right order | verify steps | step-0 agreement |")
    print("|---|---|---|---|---|---|---|---|---|")
    for number, (name, truth, ids, feeds) in enumerate(SERVED):
        if args.only and number not in args.only:
            continue
        for topk in args.topk:
            cells = serve(args, work, prompts, name, truth, ids, feeds, topk)
            print(f"| {' | '.join(cells)} |", flush=True)


def serve(
    args: argparse.Namespace,
    work: Path,
    prompts: Path,
    name: str,
    truth: Sequence[Boundary],
    ids: Sequence[int],
    feeds: Sequence[Boundary],
    topk: int,
) -> list[str]:
    folder = Path(tempfile.mkdtemp(dir=work))
    shutil.copytree(args.fixtures / name, folder / "draft")
    config = json.loads((folder / "draft" / "config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = list(ids)
    (folder / "draft" / "config.json").write_text(json.dumps(config))
    target = target_of(args.fixtures, name)
    speculation = Speculation(3, topk, 4 if topk == 1 else 6)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    run(
        *("dump", "serving", "-o", str(folder / "serving"), "--prompts", str(prompts)),
        *("--max-new-tokens", str(args.new_tokens), "--launch", "--"),
        *("bash", str(ROOT / "demo" / "serve.sh"), str(target), str(folder / "draft"), "--port", port),
        *("--speculative-eagle-topk", str(topk), "--speculative-num-draft-tokens", str(speculation.tokens)),
    )
    serving = str(folder / "serving")
    run(
        *("dump", "training", "-o", str(folder / "training"), "--model", str(target), "--dtype", "float32"),
        *("--tokens-from", serving, "--boundaries", "all"),
    )
    draft = open_reference(folder / "draft", target, device="cpu")
    theirs, ours = open_dump(folder / "serving"), open_dump(folder / "training")
    alignment = align(ours.tokens, theirs.tokens)
    passages = aligned(find_passages(ours.tokens), alignment)
    given = prompt_lengths(passages, alignment, theirs.tokens)
    states = stored_states(ours, draft.checkpoint.target_hidden_size)
    teacher = teach(draft, passages, target=open_target(target), boundaries=states, read=reader(ours))

    def predict(fed: Fed) -> Forecast:
        return forecast(draft, teacher, fed, speculation, prompts=given)

    slots = [rank_view(theirs, theirs.ranks[0], slot_name(j)) for j in range(draft.slots)]
    fed, right = predict(served(slots, alignment)), predict(ordered(ours, truth))
    assert theirs.facts.draft is not None
    measured = theirs.facts.draft.spec_accept_length
    assert measured is not None
    return [
        f"{name} {show(truth)}",
        str(list(ids)),
        show(feeds),
        str(topk),
        f"{measured:.3f}",
        f"{fed.accept_length:.3f} ({fed.kind})",
        f"{right.accept_length:.3f}",
        str(fed.verify_steps),
        f"{fed.agreement:.1%}",
    ]


if __name__ == "__main__":
    main()
