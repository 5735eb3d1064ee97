"""The shape of the program: data flows one way, the command line starts light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "eagle_parity"
FLOW = ("readers", "captures", "dump", "metrics", "alignment", "draft", "diagnosis", "report", "gate", "cli")
LEAVES = ("records", "errors", "conventions", "tensorheader", "tensorfile")


def rooms_imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "eagle_parity" and len(parts) > 1:
                yield parts[1]


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_module_imports_only_from_its_left(path: Path) -> None:
    room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if room in ("__init__", "__main__"):
        return
    if room in LEAVES:
        allowed = set(LEAVES)
    else:
        assert room in FLOW, f"{room} is no room of the design"
        allowed = {*LEAVES, *FLOW[: FLOW.index(room) + 1]} - ({"readers"} if room == "captures" else set())
    assert set(rooms_imported(path)) <= allowed


def test_only_captures_import_the_engines() -> None:
    for path in SOURCE.rglob("*.py"):
        if path.relative_to(SOURCE).parts[0] == "captures":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not {m.split(".")[0] for m in modules} & {"sglang", "transformers"}, path


@pytest.mark.parametrize("arguments", [["-c", "import eagle_parity"], ["-m", "eagle_parity", "--help"]])
def test_start_loads_neither_torch_nor_an_engine(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "-X", "importtime", *arguments], capture_output=True, text=True, check=True)
    loaded = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert "eagle_parity" in loaded
    assert not loaded & {"torch", "numpy", "sglang", "transformers", "safetensors"}
