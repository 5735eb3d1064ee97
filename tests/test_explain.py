"""explain: one catalogue for every code of the design, the rules and the checks, and for docs/faults.md."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from eagle_parity.cli.main import main
from eagle_parity.diagnosis.faults import FAULTS
from eagle_parity.diagnosis.files import CHECKS

ROOT = Path(__file__).parent.parent
CODES = [  # the contract
    "layer-shift",
    "layer-set",
    "boundary-missing",
    "embedding-missing",
    "concat-order",
    "final-norm",
    "draft-norm",
    "recycled-hidden",
    "residual-missing",
    "partial-sum",
    "double-sum",
    "token-shard",
    "hidden-shard",
    "capture-lost",
    "aliased-buffer",
    "stream-contraction",
    "rows-lost",
    "rows-swapped",
    "token-shift",
    "stale-draft-kv",
    "graph-stale",
    "rope-mismatch",
    "width-mismatch",
    "embed-head",
    "vocab-map",
    "rotated-basis",
    "precision",
    "non-finite",
    "scale-mismatch",
    "embedding-scale",
    "training-mask",
    "template-mismatch",
    "multimodal-missing",
    "engine-version-rule",
    "features-match-check-draft",
    "undetermined",
]


def test_every_code_of_the_contract_is_explained_and_no_other() -> None:
    assert sorted(fault.code for fault in FAULTS) == sorted(CODES)


def test_every_code_that_can_be_emitted_is_explained() -> None:
    """Every string of a rule or check that is spelt like a code is one: nothing can be emitted that explain lacks."""
    emitted = {check.code for check in CHECKS}
    for path in (ROOT / "src" / "eagle_parity" / "diagnosis").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Finding" and node.args:
                emitted |= {c.value for c in ast.walk(node.args[0]) if isinstance(c, ast.Constant)} - {0, None}
    known = {fault.code for fault in FAULTS}
    words = {word for word in emitted if isinstance(word, str) and re.fullmatch(r"[a-z]+(-[a-z]+)+", word)}
    assert words <= known


@pytest.mark.parametrize("code", CODES)
def test_an_entry_is_complete(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", code]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{code}: ")
    for heading in ("Cause", "How it looks", "How to confirm", "How to fix", "Sources"):
        assert f"\n{heading}\n  " in out
    assert "  https://github.com/" in out
    assert max(map(len, out.splitlines())) <= 120
    assert main(["explain", code, "--format", "json"]) == 0
    fault = json.loads(capsys.readouterr().out)["fault"]
    assert fault["code"] == code
    assert all(fault[key] for key in ("title", "cause", "looks", "confirm", "fix", "sources"))


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line]
    assert listed[: len(CODES)] == [fault.code for fault in FAULTS]


def test_an_unknown_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "partial-sums"]) == 2
    assert "did you mean partial-sum?" in capsys.readouterr().err


def test_the_document_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--format", "markdown"]) == 0
    text = capsys.readouterr().out
    assert (ROOT / "docs" / "faults.md").read_text() == text, (
        "write it again: eagle-parity explain --format markdown > docs/faults.md"
    )


def test_no_torch_is_loaded() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "eagle_parity", "explain", "layer-shift"],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert not loaded & {"torch", "numpy", "sglang", "transformers"}
