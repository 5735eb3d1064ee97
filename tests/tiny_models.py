"""Tiny random targets and a word tokenizer, written to a directory in a fraction of a second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LAYERS = 4
HIDDEN = 32
VOCABULARY = 64
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
}
LATENT: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
VISION = {
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "patch_size": 4,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}


def make_model(path: Path, arch: str = "llama", dtype: str = "bfloat16", *, tokenizer: bool = True) -> Path:
    """Write a random target: arch is llama, qwen3, deepseek (yarn) or kimi (deepseek inside a multimodal wrapper)."""
    import torch
    import transformers as t

    torch.manual_seed(0)
    model: Any
    if arch == "llama":
        model = t.LlamaForCausalLM(t.LlamaConfig(**COMMON, tie_word_embeddings=False))
    elif arch == "qwen3":
        model = t.Qwen3ForCausalLM(t.Qwen3Config(**COMMON, head_dim=8, tie_word_embeddings=True))
    else:
        config = t.DeepseekV3Config(**COMMON, **LATENT, rope_parameters=dict(YARN), tie_word_embeddings=False)
        if arch == "deepseek":
            model = t.DeepseekV3ForCausalLM(config)
        else:
            from transformers.models.kimi_k25 import Kimi_K25Config, Kimi_K25ForConditionalGeneration

            model = Kimi_K25ForConditionalGeneration(
                Kimi_K25Config(text_config=config.to_dict(), vision_config=VISION, tie_word_embeddings=False)
            )
    bars = t.utils.logging.is_progress_bar_enabled()
    t.utils.logging.disable_progress_bar()
    model.to(getattr(torch, dtype)).save_pretrained(path)
    if bars:
        t.utils.logging.enable_progress_bar()
    if tokenizer:
        make_tokenizer(path)
    return path


def make_tokenizer(path: Path, *, chat: bool = True) -> None:
    """Write a tokenizer that knows w0, w1, … and puts <s> before a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<s>", "</s>", "<pad>"] + [f"w{i}" for i in range(VOCABULARY - 4)]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    if chat:
        tokenizer.chat_template = (
            "{% for m in messages %}{{ m.role[0] == 'u' and 'w0 ' or 'w1 ' }}{{ m.content }} {% endfor %}"
            "{% if add_generation_prompt %}w1{% endif %}"
        )
    tokenizer.save_pretrained(path)


def edit_config(path: Path, **changes: Any) -> None:
    """Change keys of config.json; None takes a key away."""
    file = path / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
