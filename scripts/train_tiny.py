"""Train the tiny target models and EAGLE-3 drafts of fixtures/trained on a CPU, from text that every Python has.

python scripts/train_tiny.py --out DIR [--only deepseek|llama] [--drafts NAME,…] [--text FILE] [--scale 1.0]

Text: the docstrings of the standard library, and the licences and descriptions of the installed packages. A target is
trained on next tokens, rounded to bf16, and then the drafts learn from its states and its distribution, with three
test-time-training steps (a draft's own state is fed back, as a server does). All drafts of one target see the same
batches. DIR/agreement.md tells what came out; --scale shortens the training for a trial.

One process takes one core. A target that lies in DIR already is not trained again, so that the drafts can be shared out
among processes with --drafts; --text FILE writes the text there, or reads it where it is, so that all see the same.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "demo"))
from eagle_parity.draft.forward import Draft, open_reference, with_weights
from eagle_parity.draft.products import Products
from models import CONTEXT, YARN, restore_published_keys, write_json

VOCABULARY = 512
SPECIAL = ("<unk>", "<s>", "</s>", "<pad>", "<user>", "<assistant>")
TOKEN_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
CHAT_TEMPLATE = (
    "{{ '<s>' }}{% for message in messages %}"
    "{{ '<' + message['role'] + '>' + message['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
LENGTH, BATCH = 128, 16  # tokens of a row, rows of a batch
HELD_OUT = 48  # documents kept from training, for prompts and for the table
STEPS = 3  # of test-time training, EAGLE-3 and SpecForge take 7
Boundary = int | str


@dataclass(frozen=True)
class Wiring:
    """One draft to train: what its slots hold, in order, and what is special about it."""

    name: str
    slots: tuple[Boundary, ...]
    ids: tuple[int, ...]
    """What its config declares, the way its trainer counts."""
    mla: bool = False
    vocabulary: int = VOCABULARY
    flags: dict[str, bool] = field(default_factory=dict)
    speculators: bool = False


@dataclass(frozen=True)
class Family:
    """A target, and the drafts that learn from it."""

    name: str
    hidden: int
    layers: int
    target_steps: int
    draft_steps: int
    wirings: tuple[Wiring, ...]


NORM = "final.norm"
FAMILIES = (
    Family(
        "deepseek",
        128,
        8,
        1400,
        2000,
        (
            Wiring("usual", (2, 4, 6), (1, 3, 5)),
            Wiring("embedding-first", (0, 2, 4), (0, 2, 4)),
            Wiring("late", (3, 5, 7), (3, 5, 7)),
            Wiring("permuted", (6, 2, 4), (6, 2, 4)),
            Wiring("fc-norm", (2, 4, 6), (1, 3, 5), flags={"fc_norm": True, "norm_output": True}),
            Wiring("norm-before-fc", (2, 3, 6), (2, 3, 6), vocabulary=384, flags={"norm_before_fc": True}),
            Wiring("mla", (1, 4, 7), (0, 3, 6), mla=True),
        ),
    ),
    Family(
        "llama",
        64,
        6,
        900,
        1500,
        (
            Wiring("llama-usual", (1, 3, 5), (0, 2, 4), vocabulary=384),
            Wiring("llama-residual", (2, 3, 4), (2, 3, 4), flags={"norm_before_residual": True}, speculators=True),
            Wiring("llama-final-norm", (1, 3, NORM), (1, 3, 6)),
        ),
    ),
)


# ---------------------------------------------------------------------------------------------------------- text


def documents() -> list[str]:
    """Docstrings of the standard library, licences and descriptions of packages: sorted, no repeats."""
    found: set[str] = set()
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" not in file.parts and "test" not in file.parts:
            found.update(_docstrings(file))
    for package in metadata.distributions():
        for file in package.files or ():
            if file.name.upper().startswith(("LICENSE", "README")) and file.suffix in ("", ".txt", ".md"):
                try:
                    found.add(file.read_text())
                except (OSError, UnicodeDecodeError):
                    continue
        found.add(package.metadata.get("Description") or "")
    return sorted(text.strip() for text in found if len(text.strip()) > 200)


def _docstrings(file: Path) -> Iterator[str]:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text


def train_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def batches(stream: torch.Tensor, steps: int, seed: int) -> Iterator[torch.Tensor]:
    """Rows [BATCH, LENGTH] from random places of the token stream."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        at = torch.randint(0, len(stream) - LENGTH, (BATCH,), generator=generator)
        yield torch.stack([stream[i : i + LENGTH] for i in at.tolist()])


# -------------------------------------------------------------------------------------------------------- target


def make_target(family: Family) -> PreTrainedModel:
    """Random weights: DeepSeek-V3 with dense MLPs and yarn (SGLang's CPU path serves it), or Llama."""
    torch.manual_seed(0)
    shared = {
        "vocab_size": VOCABULARY,
        "hidden_size": family.hidden,
        "intermediate_size": 2 * family.hidden,
        "num_hidden_layers": family.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
        **TOKEN_IDS,
    }
    if family.name == "llama":
        return LlamaForCausalLM(LlamaConfig(**shared))
    config = DeepseekV3Config(
        **shared,
        moe_intermediate_size=64,
        n_shared_experts=1,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=family.layers,  # dense throughout: experts would take most of the room
        kv_lora_rank=48,
        q_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        rope_parameters=dict(YARN),
    )
    return DeepseekV3ForCausalLM(config)


def schedule(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """Warm up over 5 %, then a cosine to a tenth."""
    return torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        [group["lr"] for group in optimizer.param_groups],
        total_steps=steps + 1,
        pct_start=0.05,
        final_div_factor=4,
    )


def train_target(family: Family, stream: torch.Tensor, steps: int, device: str) -> PreTrainedModel:
    """Next-token training."""
    model = make_target(family).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.05, betas=(0.9, 0.95))
    rate, began = schedule(optimizer, steps), time.monotonic()
    for step, chosen in enumerate(batches(stream, steps, seed=1)):
        rows = chosen.to(device)
        with torch.autocast(device, torch.bfloat16):
            logits = model(rows).logits[:, :-1].float()
        loss = functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        if step % 100 == 0 or step == steps - 1:
            say(f"{family.name} target, step {step}: loss {loss.item():.3f}, {time.monotonic() - began:.0f} s")
    return model


def save_target(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, path: Path, device: str) -> PreTrainedModel:
    """Write the target in bf16 and hand it back as it was written, computing in float32."""
    model.to("cpu", torch.bfloat16).save_pretrained(path)
    if isinstance(model, DeepseekV3ForCausalLM):
        restore_published_keys(path / "config.json")
    tokenizer.save_pretrained(path)
    return model.float().to(device).eval()


# -------------------------------------------------------------------------------------------------------- drafts


def write_random_draft(wiring: Wiring, family: Family, kept: torch.Tensor, path: Path) -> None:
    """A draft checkpoint of random weights, as its trainer would write it."""
    hidden, generator = family.hidden, torch.Generator().manual_seed(sum(wiring.name.encode()))

    def linear(outputs: int, inputs: int) -> torch.Tensor:
        return torch.randn(outputs, inputs, generator=generator) * inputs**-0.5 * 0.5

    layer = "layers.0." if wiring.speculators or wiring.mla else "midlayer."
    attention = f"{layer}self_attn."
    tensors = {
        "fc.weight": linear(hidden, len(wiring.slots) * hidden),
        f"{attention}o_proj.weight": linear(hidden, hidden),
        f"{layer}mlp.gate_proj.weight": linear(2 * hidden, hidden),
        f"{layer}mlp.up_proj.weight": linear(2 * hidden, hidden),
        f"{layer}mlp.down_proj.weight": linear(hidden, 2 * hidden),
        "norm.weight": torch.ones(hidden),
        "lm_head.weight": linear(len(kept), hidden),
    }
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"{layer}{name}.weight"] = torch.ones(hidden)
    if wiring.mla:
        tensors |= {
            f"{attention}q_a_proj.weight": linear(64, 2 * hidden),
            f"{attention}q_a_layernorm.weight": torch.ones(64),
            f"{attention}q_b_proj.weight": linear(4 * 48, 64),
            f"{attention}kv_a_proj_with_mqa.weight": linear(48 + 16, 2 * hidden),
            f"{attention}kv_a_layernorm.weight": torch.ones(48),
            f"{attention}kv_b_proj.weight": linear(4 * 64, 48),
        }
    else:
        heads = hidden // 32
        tensors |= {f"{attention}{name}_proj.weight": linear(32 * heads, 2 * hidden) for name in "qkv"}
    if wiring.flags.get("fc_norm"):
        tensors |= {f"fc_norm.{j}.weight": torch.ones(hidden) for j in range(len(wiring.slots))}
    if wiring.flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = torch.ones(len(wiring.slots) * hidden)
    path.mkdir(parents=True)
    write_json(path / "config.json", draft_config(wiring, family, len(kept)))
    if len(kept) < VOCABULARY:
        inside = torch.zeros(VOCABULARY, dtype=torch.bool)
        inside[kept] = True
        tensors |= {"d2t": kept - torch.arange(len(kept)), "t2d": inside}
    save_file(tensors, path / "model.safetensors")


def draft_config(wiring: Wiring, family: Family, vocabulary: int) -> dict[str, Any]:
    """config.json in the dialect of SGLang or of speculators."""
    layer: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": family.hidden,
        "intermediate_size": 2 * family.hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": family.hidden // 32,
        "num_key_value_heads": family.hidden // 32,
        "head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": CONTEXT,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
    }
    if wiring.speculators:
        return {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.9.0",
            "draft_vocab_size": vocabulary,
            "eagle_aux_hidden_state_layer_ids": list(wiring.ids),
            "norm_before_residual": False,
            "norm_before_fc": False,
            "fc_norm": False,
            "norm_output": False,
            "torch_dtype": "bfloat16",
            **wiring.flags,
            "transformer_layer_config": layer,
        }
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer,
        "draft_vocab_size": vocabulary,
        "torch_dtype": "bfloat16",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(wiring.ids), "use_aux_hidden_state": True},
        **wiring.flags,
        **TOKEN_IDS,
    }
    if wiring.mla:
        del config["head_dim"]
        config |= {
            "architectures": ["Eagle3DeepseekV2ForCausalLM"],
            "model_type": "kimi_k2",
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": 64,
            "kv_lora_rank": 48,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "rope_theta": YARN["rope_theta"],
            "rope_scaling": YARN,
        }
    return config


class Trained(Products):
    """bf16 products of float32 weights, through which gradients flow: twice as fast on a CPU that has them."""

    def linear(self, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """states [..., I] times weight [O, I] transposed, float32 [..., O]."""
        product = functional.linear(states.bfloat16(), weight.bfloat16()).float()
        return product if bias is None else product + bias


@dataclass
class Pupil:
    """A draft in training."""

    wiring: Wiring
    draft: Draft
    weights: dict[str, torch.Tensor]
    head: torch.Tensor
    optimizer: torch.optim.Optimizer
    rate: torch.optim.lr_scheduler.LRScheduler


def enrol(wiring: Wiring, path: Path, target: Path, steps: int, device: str) -> Pupil:
    """Load a random draft and make its weights trainable."""
    draft = open_reference(path, target, device=device)
    assert draft.head.memory is not None
    weights = {name: tensor.float().requires_grad_() for name, tensor in draft.weights.items()}
    head = draft.head.memory.float().requires_grad_()
    trained = with_weights(draft, weights, head)
    products = Trained()
    trained = replace(trained, products=products, attention=replace(trained.attention, products=products))
    optimizer = torch.optim.AdamW([*weights.values(), head], lr=4e-3, weight_decay=0.01, betas=(0.9, 0.95))
    return Pupil(wiring, trained, weights, head, optimizer, schedule(optimizer, steps))


def states_of(model: PreTrainedModel, rows: torch.Tensor) -> tuple[dict[Boundary, torch.Tensor], torch.Tensor]:
    """Boundaries 0..n-1 and the final norm's output [B, T, H], and the target's logits [B, T, V]."""
    with torch.no_grad():
        out = model(rows, output_hidden_states=True)
    hidden = out.hidden_states
    states: dict[Boundary, torch.Tensor] = dict(enumerate(hidden[:-1]))
    states[NORM] = hidden[-1]
    return states, out.logits


def losses(
    pupil: Pupil, rows: torch.Tensor, states: dict[Boundary, torch.Tensor], logits: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Per test-time-training step: cross-entropy against the target, agreement, and which rows count, each [B, T]."""
    draft, length = pupil.draft, rows.shape[1]
    hidden = draft.fuse(torch.cat([states[b] for b in pupil.wiring.slots], dim=-1))
    anchors = torch.arange(length, device=rows.device)
    wanted = logits.argmax(-1)
    known = torch.zeros(VOCABULARY, dtype=torch.bool, device=rows.device)
    known[draft.target_ids] = True
    prompt, before = None, None
    for step in range(STEPS):
        ids = rows.roll(-1 - step, dims=1)
        tokens = draft.embedded(ids)
        positions = (anchors + step).unsqueeze(0)
        if prompt is None:
            made = draft.begin(hidden, tokens, positions)
            prompt = made.entries
        else:
            made = draft.advance(hidden, tokens, positions, prompt, anchors, before)
            before = made.entries
        ours = draft.logits(made.hidden).log_softmax(-1)
        theirs = logits.roll(-1 - step, dims=1)[..., draft.target_ids].softmax(-1)
        best = wanted.roll(-1 - step, dims=1)
        counts = (anchors < length - 1 - step) & known[best]
        yield -(theirs * ours).sum(-1), draft.target_ids[ours.argmax(-1)] == best, counts
        hidden = draft.recurrent(made.hidden)


def train_drafts(
    family: Family, model: PreTrainedModel, stream: torch.Tensor, steps: int, out: Path, target: Path, device: str
) -> list[Pupil]:
    """All drafts of a family, on the same batches."""
    counts = torch.bincount(stream, minlength=VOCABULARY)
    pupils = []
    for wiring in family.wirings:
        kept = counts.topk(wiring.vocabulary).indices.sort().values
        write_random_draft(wiring, family, kept, out / wiring.name)
        pupils.append(enrol(wiring, out / wiring.name, target, steps, device))
    began = time.monotonic()
    for step, chosen in enumerate(batches(stream, steps, seed=2)):
        rows = chosen.to(device)
        states, logits = states_of(model, rows)
        line = []
        for pupil in pupils:
            total = torch.zeros((), device=device)
            for number, (loss, agrees, known) in enumerate(losses(pupil, rows, states, logits)):
                total = total + 0.8**number * loss[known].mean()
                if number == 0:
                    line.append(f"{agrees[known].float().mean():.3f}")
            pupil.optimizer.zero_grad()
            total.backward()
            torch.nn.utils.clip_grad_norm_([*pupil.weights.values(), pupil.head], 1.0)
            pupil.optimizer.step()
            pupil.rate.step()
            if step % 100 == 99:
                save_draft(pupil, out / pupil.wiring.name)  # so that an interrupted run leaves something
        if step % 50 == 0 or step == steps - 1:
            say(f"{family.name} drafts, step {step}: agreement {' '.join(line)}, {time.monotonic() - began:.0f} s")
    return pupils


def save_draft(pupil: Pupil, path: Path) -> None:
    """Overwrite the random weights with the trained ones, bf16, under the names they had."""
    draft = pupil.draft.checkpoint
    trained = pupil.weights | {"lm_head.weight": pupil.head}
    tensors = {
        tensor.stored_name: trained[name].detach().to("cpu", torch.bfloat16) if name in trained else tensor.load()
        for name, tensor in draft.tensors.items()
    }
    save_file(tensors, path / "model.safetensors")


# ---------------------------------------------------------------------------------------------------------- main


def agreement(pupil: Pupil, path: Path, target: Path, model: PreTrainedModel, rows: torch.Tensor) -> list[float]:
    """Of the draft as it was written, per step, in percent of the rows that count."""
    written = Pupil(
        pupil.wiring, open_reference(path, target, device=str(rows.device)), {}, pupil.head, pupil.optimizer, pupil.rate
    )
    states, logits = states_of(model, rows)
    with torch.no_grad():
        return [100 * float(agrees[known].float().mean()) for _, agrees, known in losses(written, rows, states, logits)]


def write_prompts(texts: Sequence[str], path: Path) -> None:
    """Held-out prompts, plain and chat, as `dump training --prompts` reads them."""
    lines: list[dict[str, Any]] = []
    ours = [text for text in texts[:HELD_OUT] if not re.search("copyright|licen[cs]e", text, re.IGNORECASE)]
    for number, text in enumerate(ours):
        cut = text[:260]
        if number % 6 == 5:
            lines.append({"messages": [{"role": "user", "content": cut}]})
        else:
            lines.append({"text": cut})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Parse, train, write."""
    logging.disable_progress_bar()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--only", choices=[family.name for family in FAMILIES])
    parser.add_argument("--drafts", help="only these, separated by commas; `none` trains the target alone")
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="JSON list of documents: written, or read if it exists"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of steps (default 1)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the models are so small that a second thread costs more than it brings
    args.out.mkdir(parents=True, exist_ok=True)
    held, trained = corpus(args.text)
    write_prompts(held, args.out / "prompts.jsonl")
    for family in FAMILIES:
        if args.only in (None, family.name):
            chosen = [w for w in family.wirings if args.drafts is None or w.name in args.drafts.split(",")]
            train_family(replace(family, wirings=tuple(chosen)), held, trained, args)


def corpus(file: Path | None) -> tuple[list[str], list[str]]:
    """Documents kept for tests, and documents to train on."""
    if file is not None and file.is_file():
        texts = json.loads(file.read_text())
    else:
        texts = documents()
        random.Random(0).shuffle(texts)
        if file is not None:
            file.write_text(json.dumps(texts))
    return texts[:HELD_OUT], texts[HELD_OUT:]


def train_family(family: Family, held: Sequence[str], trained: Sequence[str], args: argparse.Namespace) -> None:
    """One target and its drafts, with their line of the table."""
    out, scale, device = args.out, args.scale, args.device
    target = out / f"{family.name}-target"
    ready = (target / "model.safetensors").is_file()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target) if ready else train_tokenizer(trained)
    stream = encode(tokenizer, trained)
    test = encode(tokenizer, held)
    test = test[: len(test) // LENGTH * LENGTH].view(-1, LENGTH)[:64]
    say(f"{family.name}: {len(stream)} tokens to train on, {test.numel()} to test on")
    if ready:
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).to(device).eval()
    else:
        model = train_target(family, stream, max(2, int(family.target_steps * scale)), device)
        model = save_target(model, tokenizer, target, device)
    if not family.wirings:
        return
    pupils = train_drafts(family, model, stream, max(2, int(family.draft_steps * scale)), out, target, device)
    with (out / "agreement.md").open("a") as table:
        for pupil in pupils:
            save_draft(pupil, out / pupil.wiring.name)
            found = agreement(pupil, out / pupil.wiring.name, target, model, test.to(device))
            cells = [pupil.wiring.name, family.name, f"[{', '.join(map(str, pupil.wiring.slots))}]"]
            cells += [f"{percent:.1f} %" for percent in found]
            table.write(f"| {' | '.join(cells)} |\n")


def encode(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> torch.Tensor:
    """All documents in a row, each between <s> and </s>."""
    return torch.tensor([token for ids in tokenizer(list(texts))["input_ids"] for token in (1, *ids, 2)])


if __name__ == "__main__":
    main()
