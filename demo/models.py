"""Make a tiny random target, its tokenizer and EAGLE-3 drafts for it, in seconds and without a download.

python demo/models.py --out DIR --draft wrong=0,2,4 --draft right=1,2,4

The target lies in DIR/target, each draft in DIR/NAME. Drafts with equally many ids have the same weights and
differ only in the ids that their config declares, so that whatever differs between two servers comes from
those. Ids are written as SGLang reads them. The same arguments give the same files.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<pad>")
VOCABULARY = 512
HEADS = 8  # so that tensor parallelism of 2, 4 and 8 divides them
DRAFT_VOCABULARY = VOCABULARY // 2
EXPERT_WIDTH = 64  # SGLang on CPUs gives each rank 32 at least: of more than two ranks the rest then adds zeros
CONTEXT = 512
# One turn per message, so that the chat template does something that plain text does not.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<s> ' + message['content'] + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>' }}{% endif %}"
)
TOKEN_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
# As in DeepSeek-V3 and Kimi-K2, but for a short context. SGLang's CPU path serves no such model without yarn.
YARN = {
    "type": "yarn",
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 4.0,
    "original_max_position_embeddings": CONTEXT // 4,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
# What SGLang's Kimi processor asks a processor for before the first image, which never comes.
KIMI_PROCESSOR = """
from types import SimpleNamespace

from transformers import AutoTokenizer, ProcessorMixin


class TextOnly(ProcessorMixin):
    def __init__(self, tokenizer):
        self.tokenizer, self.image_processor, self.chat_template = tokenizer, None, tokenizer.chat_template
        patches = {"patch_size": 14, "merge_kernel_size": 2, "in_patch_limit": 16, "patch_limit_on_one_side": 8}
        self.media_processor = SimpleNamespace(
            media_proc_cfg={**patches, "fixed_output_tokens": None, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        )

    @classmethod
    def from_pretrained(cls, path, **_):
        return cls(AutoTokenizer.from_pretrained(path))
"""


def main() -> None:
    """Parse, build, write."""
    logging.disable_progress_bar()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--arch", choices=("deepseek", "llama", "kimi"), default="deepseek")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size, a multiple of 64 (default 128)")
    parser.add_argument("--layers", type=int, default=6, help="layers of the target (default 6)")
    parser.add_argument("--expert-width", type=int, default=EXPERT_WIDTH, help="of each expert (default 64)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--draft", type=parse_draft, action="append", default=[], metavar="NAME=ID,ID,ID")
    args = parser.parse_args()
    if args.hidden <= 0 or args.hidden % 64:
        parser.error("--hidden must be a positive multiple of 64, so that 8 heads and 8 ranks divide it")
    for name, ids in args.draft:
        if max(ids) > args.layers - 2:
            parser.error(f"--draft {name}: SGLang captures no layer id above {args.layers - 2} of {args.layers} layers")

    dtype: torch.dtype = getattr(torch, args.dtype)
    write_target(args.out / "target", args.arch, args.hidden, args.layers, args.seed, dtype, args.expert_width)
    for name, ids in args.draft:
        write_draft(args.out / name, args.hidden, ids, args.seed, dtype)


def parse_draft(text: str) -> tuple[str, list[int]]:
    """`right=1,2,4` -> ("right", [1, 2, 4])."""
    match = re.fullmatch(r"([A-Za-z0-9_-]+)=(\d+(?:,\d+)*)", text)
    if match is None or match[1] == "target":
        raise argparse.ArgumentTypeError("expected NAME=ID,ID,… with a NAME other than 'target'")
    return match[1], [int(layer) for layer in match[2].split(",")]


def write_target(
    path: Path, arch: str, hidden: int, layers: int, seed: int, dtype: torch.dtype, expert_width: int = EXPERT_WIDTH
) -> None:
    """Write weights, config and tokenizer of the target."""
    torch.manual_seed(seed)
    model = llama(hidden, layers) if arch == "llama" else deepseek(hidden, layers, expert_width)
    spread_out(model)
    model.to(dtype).save_pretrained(path)
    if arch != "llama":
        restore_published_keys(path / "config.json")
    if arch == "kimi":
        wrap_as_kimi(path)
    tokenizer().save_pretrained(path)


def deepseek(hidden: int, layers: int, expert_width: int = EXPERT_WIDTH) -> PreTrainedModel:
    """The architecture of Kimi-K2.5's language model: latent attention; experts from the second layer on."""
    config = DeepseekV3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        moe_intermediate_size=expert_width,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        n_shared_experts=1,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.827,
        first_k_dense_replace=1,
        kv_lora_rank=64,
        q_lora_rank=96,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        max_position_embeddings=CONTEXT,
        rope_parameters=dict(YARN),
        tie_word_embeddings=False,
        **TOKEN_IDS,
    )
    return DeepseekV3ForCausalLM(config)


def llama(hidden: int, layers: int) -> PreTrainedModel:
    """A plain dense target: full attention, no experts."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        **TOKEN_IDS,
    )
    return LlamaForCausalLM(config)


def spread_out(model: PreTrainedModel) -> None:
    """Draw weights under which every layer changes the residual stream by a fair share.

    With the usual initial weights the first layer drowns the embedding, or the stream hardly moves at all. Here
    the cosine of one layer's input and the next one's is 0.75 to 0.92.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_tokens" in name:
                parameter.normal_(std=1.0)
            elif parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)


def restore_published_keys(path: Path) -> None:
    """Write the config's rope settings as published DeepSeek-V3 checkpoints do, and as SGLang reads them.

    transformers 5 writes `rope_parameters`; it reads the older `rope_scaling` as well.
    """
    config = json.loads(path.read_text())
    config.pop("rope_parameters")
    config |= {"rope_theta": YARN["rope_theta"], "rope_scaling": YARN}
    config |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    write_json(path, config)


def wrap_as_kimi(path: Path) -> None:
    """Nest a DeepSeek-V3 target as Kimi-K2.5 does: under `language_model.`, beside a vision tower that has no weights.

    It serves text. SGLang wants a processor all the same, and Kimi's comes with its weights: --trust-remote-code.
    """
    weights = path / "model.safetensors"
    save_file(
        {f"language_model.{name}": tensor for name, tensor in load_file(weights).items()}, weights, {"format": "pt"}
    )
    text = json.loads((path / "config.json").read_text())
    tower = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": HEADS, "num_hidden_layers": 2}
    # The published config has these names, of which SGLang reads some.
    tower |= {f"vt_{name}": value for name, value in tower.items()} | {"text_hidden_size": text["hidden_size"]}
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": text | {"model_type": "deepseek_v3"},
        "vision_config": tower,
        "media_placeholder_token_id": VOCABULARY - 1,
        "auto_map": {"AutoProcessor": "text_only.TextOnly"},
        "dtype": text.get("dtype"),
        **TOKEN_IDS,
    }
    write_json(path / "config.json", config)
    (path / "text_only.py").write_text(KIMI_PROCESSOR)
    write_json(path / "processor_config.json", {"auto_map": {"AutoProcessor": "text_only.TextOnly"}})


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per word: w0 is token 4, w1 is token 5, and so on."""
    words = [*SPECIAL_TOKENS, *(f"w{i}" for i in range(VOCABULARY - len(SPECIAL_TOKENS)))]
    fast = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    unknown, first, last, padding = SPECIAL_TOKENS
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=fast, unk_token=unknown, bos_token=first, eos_token=last, pad_token=padding
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def write_draft(path: Path, hidden: int, layer_ids: list[int], seed: int, dtype: torch.dtype) -> None:
    """Write an EAGLE-3 draft of one layer, which reads `layer_ids` of the target."""
    generator = torch.Generator().manual_seed(seed + 1)

    def linear(outputs: int, inputs: int) -> torch.Tensor:
        return (torch.randn(outputs, inputs, generator=generator) * inputs**-0.5).to(dtype)

    def norm() -> torch.Tensor:
        return torch.ones(hidden, dtype=dtype)

    kept = torch.arange(DRAFT_VOCABULARY) * (VOCABULARY // DRAFT_VOCABULARY)  # the draft predicts every second token
    in_draft = torch.zeros(VOCABULARY, dtype=torch.bool)
    in_draft[kept] = True
    tensors = {
        "fc.weight": linear(hidden, len(layer_ids) * hidden),
        "midlayer.input_layernorm.weight": norm(),
        "midlayer.hidden_norm.weight": norm(),
        "midlayer.self_attn.q_proj.weight": linear(hidden, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": linear(hidden, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": linear(hidden, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": linear(hidden, hidden),
        "midlayer.post_attention_layernorm.weight": norm(),
        "midlayer.mlp.gate_proj.weight": linear(2 * hidden, hidden),
        "midlayer.mlp.up_proj.weight": linear(2 * hidden, hidden),
        "midlayer.mlp.down_proj.weight": linear(hidden, 2 * hidden),
        "norm.weight": norm(),
        "lm_head.weight": linear(DRAFT_VOCABULARY, hidden),
        "d2t": kept - torch.arange(DRAFT_VOCABULARY),
        "t2d": in_draft,
    }
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": CONTEXT,
        "vocab_size": VOCABULARY,
        "draft_vocab_size": DRAFT_VOCABULARY,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": layer_ids, "use_aux_hidden_state": True},
        **TOKEN_IDS,
    }
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    write_json(path / "config.json", config)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write an indented JSON file."""
    path.write_text(json.dumps(value, indent=2) + "\n")


if __name__ == "__main__":
    main()
