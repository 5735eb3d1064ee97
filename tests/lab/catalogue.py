"""The public cases C001..C131: which rule or check names them, which lab case stands for them, and what cannot be seen.

Written to docs/catalogue.md by `python -m tests.lab`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Entry:
    """One public case. `by`: finding codes that compare gives and names of file checks; `lab`: injections or tests."""

    case: str
    thread: str
    by: tuple[str, ...]
    lab: tuple[str, ...]
    note: str = ""


def entries() -> list[Entry]:
    """The lines of cases.txt."""
    found = []
    for line in (Path(__file__).parent / "cases.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        case, thread, by, lab, note = [cell.strip() for cell in [*line.split("|"), "", "", ""][:5]]
        codes = tuple(name.strip() for name in by.split(",") if name.strip())
        runs = tuple(name.strip() for name in lab.split(";") if name.strip())
        found.append(Entry(case, thread, codes, runs, note))
    return found


def render() -> str:
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    listed = entries()
    covered = [entry for entry in listed if entry.by]
    yield "# Public cases and what names them"
    yield ""
    yield f"{len(covered)} of the {len(listed)} cases have a finding of `compare` or a check of `check`; for the"
    yield "others the table says why they cannot be seen in files and captures. Written by `python -m tests.lab`; the"
    yield "numbers are in [fault-lab.md](fault-lab.md), what the codes mean is in [faults.md](faults.md)."
    yield ""
    yield "| case | thread | named by | lab case | |"
    yield "| --- | --- | --- | --- | --- |"
    for entry in listed:
        by = ", ".join(f"`{name}`" for name in entry.by) or "not coverable"
        lab = "; ".join("tests/test_check.py" if name == "check" else name for name in entry.lab)
        yield f"| {entry.case} | [{entry.thread}]({_link(entry.thread)}) | {by} | {lab} | {entry.note} |"


_OWNERS = {
    "sglang": "sgl-project/sglang",
    "SpecForge": "sgl-project/SpecForge",
    "vllm": "vllm-project/vllm",
    "speculators": "vllm-project/speculators",
    "vllm-ascend": "vllm-project/vllm-ascend",
    "verl-SpeCo": "verl-project/verl-SpeCo",
    "BaldEagle": "NickL77/BaldEagle",
    "EAGLE": "SafeAILab/EAGLE",
    "tokenspeed": "lightseekorg/tokenspeed",
    "TorchSpec": "lightseekorg/TorchSpec",
    "Model-Optimizer": "NVIDIA/Model-Optimizer",
    "Automodel": "NVIDIA-NeMo/Automodel",
    "TensorRT-LLM": "NVIDIA/TensorRT-LLM",
    "vllm-mlx": "waybarrios/vllm-mlx",
    "LightLLM": "ModelTC/LightLLM",
    "Rapid-MLX": "raullenchai/Rapid-MLX",
    "imp": "kekzl/imp",
    "ROCmFPX": "charlie12345/ROCmFPX",
    "ATOM": "ROCm/ATOM",
    "mlc-llm": "mlc-ai/mlc-llm",
    "vllm-rbln": "RBLN-SW/vllm-rbln",
    "vLLM-Hook": "IBM/vLLM-Hook",
    "openvino.genai": "openvinotoolkit/openvino.genai",
    "sfllm": "wejoncy/sfllm",
    "llama.cpp": "elizaOS/llama.cpp",
    "AngelSlim": "Tencent/AngelSlim",
}


def _link(thread: str) -> str:
    found = re.match(r"([\w.-]+?)([#@])(\w+)", thread)
    assert found is not None, thread
    kind = "issues" if found[2] == "#" else "commit"  # GitHub leads from an issue's number to a pull request's
    return f"https://github.com/{_OWNERS[found[1]]}/{kind}/{found[3]}"
