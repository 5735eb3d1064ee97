"""Where a key stands in a JSON file, so that an annotation can point at it."""

from __future__ import annotations

import json.decoder
import re
from collections.abc import Iterator
from typing import TypeAlias

Path: TypeAlias = tuple[str, ...]

_SPACE = re.compile(r"[ \t\r\n]*")
_SCALAR = re.compile(r"[^\s,\]}]+")


def line_of(text: str, key: Path) -> int:
    """The line (from 1) of a key in a JSON document: its own, else that of the innermost parent that is there.

    `text` must be valid JSON; for the empty key, and for a document without the key's first part, it is 1.
    """
    found: dict[Path, int] = {}
    for path, at in _keys(text):
        found.setdefault(path, text.count("\n", 0, at) + 1)
    for length in range(len(key), 0, -1):
        if key[:length] in found:
            return found[key[:length]]
    return 1


def _keys(text: str) -> Iterator[tuple[Path, int]]:
    """Every object key with its path and offset, in the order of the file. Items of a list add nothing to a path."""
    at, path = 0, []
    opened: list[str] = []
    expect_key = False
    while at < len(text):
        at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
        if at >= len(text):
            return
        letter = text[at]
        if letter in "{[":
            opened.append(letter)
            expect_key = letter == "{"
            if letter == "{":
                path.append("")
            at += 1
        elif letter in "}]":
            if opened.pop() == "{":
                path.pop()
            at += 1
        elif letter == ",":
            expect_key = opened[-1] == "{"
            at += 1
        elif letter == ":":
            expect_key = False
            at += 1
        elif letter == '"':
            word, end = json.decoder.scanstring(text, at + 1)  # type: ignore[attr-defined]
            if expect_key:
                path[-1] = word
                yield tuple(path), at
            at = end
        else:
            at = _SCALAR.match(text, at).end()  # type: ignore[union-attr]
