"""The README's commands exist, with the options that it shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from eagle_parity.cli.main import app

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
BLOCKS = "\n".join(re.findall(r"```bash\n(.*?)```", TEXT, flags=re.S)).replace("\\\n", " ")
LINES = [line.split("#")[0].strip() for line in BLOCKS.splitlines()]


def find(words: list[str]) -> tuple[Any, list[str]]:
    command: Any = typer.main.get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words[0]]
        words = words[1:]
    return command, words


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("eagle-parity ")])
def test_commands_and_options_exist(line: str) -> None:
    words = shlex.split(line)[1:]
    command, rest = find(words)
    assert not getattr(command, "commands", {}), f"{words[0]} is no command"
    known = {option for parameter in command.params for option in parameter.opts}
    given = [word.split("=")[0] for word in rest[: rest.index("--") if "--" in rest else None] if word.startswith("-")]
    assert set(given) <= known


def test_make_targets_and_files_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\S+)", BLOCKS, flags=re.M):
        assert re.search(rf"^{target}:", makefile, flags=re.M)
    for name in re.findall(r"\]\(([\w./-]+)\)|(?:src|srcset)=\"([\w./-]+)\"", TEXT):
        assert (ROOT / "".join(name)).exists()
    assert (ROOT / "scripts" / "gate.sh").exists()
