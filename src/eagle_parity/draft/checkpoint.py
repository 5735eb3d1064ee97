"""A draft checkpoint as it lies on disk: what it declares, what its shapes prove, what it lacks. Headers only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from eagle_parity.draft.config import NAME as CONFIG
from eagle_parity.draft.config import NO_CONFIG, DeclaredIn, Dialect, DraftConfig, read_config
from eagle_parity.draft.weights import TRAINING_STATE, DraftTensor, find_tensors
from eagle_parity.errors import InputError

if TYPE_CHECKING:
    import torch

Style: TypeAlias = Literal["llama", "mla"]


@dataclass(frozen=True)
class DraftCheckpoint:
    """A draft, opened without loading weights. Tensor names are in one spelling (`layers.0.…`, see draft/weights.py).

    Shapes: fc.weight is [hidden_size, num_slots * target_hidden_size]; layer 0's attention reads 2 * hidden_size
    (embedding first); lm_head.weight is [draft_vocab_size, hidden_size]; d2t int64 [draft_vocab_size] holds
    target id - draft id; t2d bool [vocab_size].
    """

    path: Path
    dialect: Dialect
    """native (SGLang/vLLM config), speculators, or none (a SpecForge training_state.pt that lies alone)."""
    architecture: str | None
    style: Style
    """What the attention weights are; the config is not asked."""
    declared_ids: tuple[int, ...] | None
    """As in the config, untranslated: what they mean depends on trainer and engine."""
    declared_in: DeclaredIn
    """SGLang reads `eagle_config` only, vLLM both."""
    declared_num_slots: int | None
    """num_aux_hidden_states, where the config has it."""
    num_slots: int
    """K, from fc.weight's width / target_hidden_size."""
    hidden_size: int
    target_hidden_size: int
    num_layers: int
    vocab_size: int | None
    """Of the target."""
    draft_vocab_size: int | None
    norm_before_residual: bool
    norm_before_fc: bool
    """One RMSNorm over num_slots * target_hidden_size, input_norm.weight."""
    fc_norm: bool
    """One RMSNorm a slot, fc_norm.J.weight."""
    norm_output: bool
    """The next draft step gets the state after `norm` (SpecForge gives the key another meaning, see `notes`)."""
    undeclared: tuple[str, ...]
    """Which of norm_before_residual and norm_output the config does not say; False is then every native trainer's."""
    bias: bool
    """fc.bias is there."""
    missing: tuple[str, ...]
    """What a stand-alone forward needs and the files lack: embed_tokens, lm_head, norm, d2t, fc_norm, input_norm."""
    quantization: str | None
    verifier: str | None
    """The target's name, where a speculators config records it."""
    notes: tuple[str, ...]
    """What is odd about the checkpoint but does not hinder reading it, a sentence each."""
    config: DraftConfig
    tensors: Mapping[str, DraftTensor]

    @property
    def layer_config(self) -> Mapping[str, Any]:
        """Heads, head_dim, RoPE, eps: config.json's own keys, wherever the dialect keeps them."""
        return self.config.layer

    def load(self, name: str) -> torch.Tensor:
        """One tensor in its own dtype, by its name in the one spelling or in the file.

        Raises InputError when the checkpoint lacks it.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            tensor = next((t for t in self.tensors.values() if t.stored_name == name), None)
        if tensor is None:
            raise InputError(
                f"{self.path} holds no tensor {name!r}",
                fix="take it from the target model where the draft shares it, or export the draft again",
            )
        return tensor.load()


def open_draft(path: Path | str, *, config: Path | str | None = None) -> DraftCheckpoint:
    """Open a draft checkpoint: an exported directory, a SpecForge run step, or a training_state.pt.

    `config` names a config.json that lies elsewhere (SpecForge keeps it outside the run directory). Reads
    headers only. Raises InputError: no config.json, no weights, not an EAGLE-3 draft, or widths that do not fit.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path} does not exist", fix="check the path of the draft")
    answers = _config(path, None if config is None else Path(config))
    return _checkpoint(path, answers, find_tensors(path))


def is_draft(path: Path) -> bool:
    """Whether a path looks like a draft checkpoint; opens nothing but headers and never raises."""
    try:
        tensors = find_tensors(path)
    except InputError:
        return False
    return "fc.weight" in tensors and any(name.startswith("layers.0.") for name in tensors)


def _config(path: Path, explicit: Path | None) -> DraftConfig:
    if explicit is not None:
        return read_config(explicit / CONFIG if explicit.is_dir() else explicit)
    beside = (path if path.is_dir() else path.parent) / CONFIG
    if beside.is_file():
        return read_config(beside)
    alone = path.name == TRAINING_STATE if path.is_file() else (path / TRAINING_STATE).is_file()
    if alone:
        return NO_CONFIG
    raise InputError(
        f"{path} has no {CONFIG} beside it", fix="give the directory of an exported draft, config.json included"
    )


def _checkpoint(path: Path, config: DraftConfig, tensors: Mapping[str, DraftTensor]) -> DraftCheckpoint:
    hidden, width = _fc(path, tensors)
    style = _attention(path, hidden, tensors)
    target = _target_hidden(path, config, hidden, width, tensors)
    declared_ids, declared_in = config.declared_ids()
    vocab = _vocab(config, tensors)
    draft_vocab = _rows(tensors, "lm_head.weight") or config.integer("draft_vocab_size") or _rows(tensors, "d2t")
    fc_norms = [name for name in tensors if name.startswith("fc_norm.")]
    flags = {name: config.flag(name) for name in ("norm_before_residual", "norm_output")}
    checkpoint = DraftCheckpoint(
        path=path,
        dialect=config.dialect,
        architecture=config.architecture,
        style=style,
        declared_ids=declared_ids,
        declared_in=declared_in,
        declared_num_slots=config.integer("num_aux_hidden_states"),
        num_slots=width // target,
        hidden_size=hidden,
        target_hidden_size=target,
        num_layers=_layers(tensors),
        vocab_size=vocab,
        draft_vocab_size=draft_vocab,
        norm_before_residual=bool(flags["norm_before_residual"]),
        norm_before_fc="input_norm.weight" in tensors or bool(config.flag("norm_before_fc")),
        fc_norm=bool(fc_norms) or bool(config.flag("fc_norm", "use_aux_norm")),
        norm_output=bool(flags["norm_output"]),
        undeclared=tuple(name for name, value in flags.items() if value is None),
        bias="fc.bias" in tensors,
        missing=_missing(config, tensors, width // target, vocab, draft_vocab),
        quantization=_quantization(config),
        verifier=_verifier(config),
        notes=_notes(config, tensors, hidden, width // target),
        config=config,
        tensors=dict(tensors),
    )
    _check_shapes(checkpoint)
    return checkpoint


def _rows(tensors: Mapping[str, DraftTensor], name: str) -> int | None:
    tensor = tensors.get(name)
    return tensor.shape[0] if tensor is not None and tensor.shape else None


def _fc(path: Path, tensors: Mapping[str, DraftTensor]) -> tuple[int, int]:
    fc = tensors.get("fc.weight")
    if fc is None:
        layers = _layers(tensors)
        raise InputError(
            f"{path} is not an EAGLE-3 draft: it has no fc.weight, but {len(tensors)} tensors in {layers} layers "
            f"(the first is {next(iter(tensors), None)!r})",
            fix="give the draft model; a target model goes to --target or --model",
        )
    if len(fc.shape) != 2 or 0 in fc.shape:
        raise InputError(f"{path}: fc.weight is {list(fc.shape)}, expected [H, K*H]", fix="export the draft again")
    return fc.shape[0], fc.shape[1]


def _attention(path: Path, hidden: int, tensors: Mapping[str, DraftTensor]) -> Style:
    """The style of layer 0, which in EAGLE-3 reads [embedding ; hidden state], 2H wide (SafeAILab/EAGLE, cnets.py)."""
    names: tuple[tuple[str, Style], ...] = (
        ("kv_a_proj_with_mqa", "mla"),
        ("q_proj", "llama"),
        ("qkv_proj", "llama"),
    )
    for name, style in names:
        tensor = tensors.get(f"layers.0.self_attn.{name}.weight")
        if tensor is None:
            continue
        if len(tensor.shape) != 2 or tensor.shape[1] != 2 * hidden:
            raise InputError(
                f"{path} is not an EAGLE-3 draft: layer 0's {name} is {list(tensor.shape)}, expected [*, {2 * hidden}] "
                f"(embedding and hidden state side by side); EAGLE-1 and -2 read {hidden}",
                fix="give an EAGLE-3 draft, or export it without packing its weights",
            )
        return style
    raise InputError(
        f"{path} is not an EAGLE-3 draft that can be read: layer 0 has neither q_proj nor kv_a_proj_with_mqa",
        fix="give an EAGLE-3 draft of the llama or MLA kind",
    )


def _target_hidden(path: Path, config: DraftConfig, hidden: int, width: int, tensors: Mapping[str, DraftTensor]) -> int:
    """The target's width: declared, else a slot norm's, else the draft's own (what every server assumes)."""
    declared = config.integer("target_hidden_size")
    target = declared or _rows(tensors, "fc_norm.0.weight") or hidden
    if target <= 0 or width % target:
        source = "target_hidden_size" if declared else "the draft's hidden size"
        raise InputError(
            f"{path}: fc.weight is {width} wide, no multiple of {target} ({source})",
            fix="set target_hidden_size in config.json to the target model's hidden_size",
        )
    return target


def _layers(tensors: Mapping[str, DraftTensor]) -> int:
    return len({name.split(".")[1] for name in tensors if name.startswith("layers.")})


def _vocab(config: DraftConfig, tensors: Mapping[str, DraftTensor]) -> int | None:
    return config.integer("vocab_size") or _rows(tensors, "embed_tokens.weight") or _rows(tensors, "t2d")


def _missing(
    config: DraftConfig,
    tensors: Mapping[str, DraftTensor],
    slots: int,
    vocab: int | None,
    draft_vocab: int | None,
) -> tuple[str, ...]:
    missing = [name for name in ("embed_tokens", "lm_head", "norm") if f"{name}.weight" not in tensors]
    if "d2t" not in tensors and draft_vocab is not None and vocab is not None and draft_vocab < vocab:
        missing.append("d2t")
    norms = [f"fc_norm.{slot}.weight" in tensors for slot in range(slots)]
    if (config.flag("fc_norm", "use_aux_norm") or any(norms)) and not all(norms):
        missing.append("fc_norm")
    if config.flag("norm_before_fc") and "input_norm.weight" not in tensors:
        missing.append("input_norm")
    return tuple(missing)


def _quantization(config: DraftConfig) -> str | None:
    value = config.document.get("quantization_config") or config.layer.get("quantization_config")
    return str(value.get("quant_method", "unknown")) if isinstance(value, dict) else None


def _verifier(config: DraftConfig) -> str | None:
    speculators = config.document.get("speculators_config")
    verifier = speculators.get("verifier") if isinstance(speculators, dict) else None
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    return str(name) if name else None


def _notes(config: DraftConfig, tensors: Mapping[str, DraftTensor], hidden: int, slots: int) -> tuple[str, ...]:
    notes = []
    if config.dialect == "none":
        notes.append("no config.json: heads, RoPE, eps and layer ids are unknown; name it with config")
    declared, place = config.declared_ids()
    if declared is not None and len(declared) != slots:
        notes.append(f"{len(declared)} layer ids are declared in {place}, fc.weight has room for {slots} slots")
    top = config.conflicting_ids()
    if top is not None:
        notes.append(f"eagle_config declares {list(declared or ())}, the top level {list(top)}")
    said = config.integer("hidden_size")
    if said is not None and said != hidden:
        notes.append(f"config.json says hidden_size {said}, fc.weight gives {hidden}")
    if config.dialect == "native" and config.flag("norm_output"):
        notes.append(
            "norm_output is true: servers then feed the normed state to the next step; SpecForge means something else "
            "by the key and trains on the un-normed state"
        )
    vocab, table = config.integer("vocab_size"), _rows(tensors, "embed_tokens.weight")
    if vocab is not None and table is not None and vocab != table:
        notes.append(f"config.json says vocab_size {vocab}, embed_tokens has {table} rows")
    return tuple(notes)


def _check_shapes(draft: DraftCheckpoint) -> None:
    """Raise InputError for the first tensor whose shape contradicts the others."""
    hidden, target, slots = draft.hidden_size, draft.target_hidden_size, draft.num_slots
    want: dict[str, tuple[int, ...]] = {
        "norm.weight": (hidden,),
        "layers.0.hidden_norm.weight": (hidden,),
        "layers.0.input_layernorm.weight": (hidden,),
        "input_norm.weight": (slots * target,),
        "fc.bias": (hidden,),
        **{f"fc_norm.{slot}.weight": (target,) for slot in range(slots)},
    }
    if draft.draft_vocab_size is not None:
        want["d2t"] = (draft.draft_vocab_size,)
        want["lm_head.weight"] = (draft.draft_vocab_size, hidden)
    embed = draft.tensors.get("embed_tokens.weight")
    if embed is not None:
        want["embed_tokens.weight"] = (embed.shape[0] if embed.shape else 0, hidden)
    for name, shape in want.items():
        tensor = draft.tensors.get(name)
        if tensor is not None and tensor.shape != shape:
            raise InputError(
                f"{tensor.file}: {tensor.stored_name} is {list(tensor.shape)}, expected {list(shape)} "
                f"(hidden size {hidden}, {slots} slots of {target})",
                fix="export the draft again; its tensors do not belong together",
            )
