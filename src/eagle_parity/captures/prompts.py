"""Prompts: what is sent through the target. Read from JSONL or plain text, and turned into token ids."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from eagle_parity.errors import InputError

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
KINDS = ("text", "messages", "conversations", "token_ids", "input_ids")
SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
EXAMPLE = 'one object a line: {"text": "…"}, {"messages": […]} or {"token_ids": […]}, each with an optional "id"'

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Prompt:
    """One prompt: exactly one of text, chat messages and token ids is not None. `id` is a label."""

    id: str
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    token_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if sum(value is not None for value in (self.text, self.messages, self.token_ids)) != 1:
            raise ValueError(f"prompt {self.id}: exactly one of text, messages and token_ids")


@dataclass(frozen=True)
class TokenSequence:
    """A prompt as the target sees it: token ids [T] at positions 0..T-1."""

    id: str
    token_ids: tuple[int, ...]


def load_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file, in order; blank lines are passed over.

    `.jsonl`, `.ndjson` and `.json` hold one JSON object a line, `.txt` one prompt a line; under any other name the
    first line decides. A prompt without an id is called `prompt-N`, N counting from 0. Raises InputError, with the line
    number, for a file that is missing, empty or malformed.
    """
    try:
        # Not splitlines(): JSON and text may hold U+2028 and the like inside a line.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error}", fix=f"write it as {EXAMPLE}") from None
    except OSError as error:
        raise InputError(f"prompts cannot be read from {path}: {error.strerror}", fix="check --prompts") from None
    numbered = [(number, line.rstrip("\r")) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise InputError(f"{path} holds no prompts", fix=f"write {EXAMPLE}; or plain text, one prompt a line")
    if _is_json(path, numbered[0][1]):
        return [_Line(path, number).prompt(line, i) for i, (number, line) in enumerate(numbered)]
    return [Prompt(f"prompt-{i}", text=line) for i, (_, line) in enumerate(numbered)]


def _is_json(path: Path, first: str) -> bool:
    if path.suffix.lower() in JSON_SUFFIXES:
        return True
    if path.suffix.lower() == ".txt":
        return False
    try:
        return isinstance(json.loads(first), dict)
    except (json.JSONDecodeError, RecursionError):
        return False


@dataclass(frozen=True)
class _Line:
    """One JSON line and the place to name when something is wrong with it."""

    path: Path
    number: int

    def fail(self, why: str) -> NoReturn:
        raise InputError(f"{self.path}, line {self.number}: {why}", fix=f"write {EXAMPLE}")

    def prompt(self, line: str, index: int) -> Prompt:
        try:
            entry = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            self.fail(f"not JSON: {error}")
        if not isinstance(entry, dict):
            self.fail(f"expected an object, got {type(entry).__name__}")
        unknown = sorted(set(entry) - {"id", *KINDS})
        if unknown:
            self.fail(f"unknown key {unknown[0]!r}; known are id, {', '.join(KINDS)}")
        given = [kind for kind in KINDS if kind in entry]
        if len(given) != 1:
            self.fail(f"expected exactly one of {', '.join(KINDS)}, got {', '.join(given) or 'none'}")
        label = entry.get("id", f"prompt-{index}")
        if not isinstance(label, str | int) or isinstance(label, bool):
            self.fail(f"id should be text or a number, is {json.dumps(label)[:80]}")
        kind = given[0]
        value = entry[kind]
        if kind == "text":
            return Prompt(str(label), text=self.text(value))
        if not isinstance(value, list) or not value:
            self.fail(f"{kind} should be a list with something in it, is {json.dumps(value)[:80]}")
        if kind == "messages":
            return Prompt(str(label), messages=tuple(self.message(item, i) for i, item in enumerate(value)))
        if kind == "conversations":
            return Prompt(str(label), messages=tuple(self.turn(item, i) for i, item in enumerate(value)))
        return Prompt(str(label), token_ids=tuple(self.token(item, kind, i) for i, item in enumerate(value)))

    def text(self, value: Any) -> str:
        if not isinstance(value, str) or not value:
            self.fail(f"text should be text with something in it, is {json.dumps(value)[:80]}")
        return value

    def token(self, value: Any, kind: str, index: int) -> int:
        if type(value) is not int or value < 0:
            self.fail(f"{kind}[{index}] should be a token id (0, 1, …), is {json.dumps(value)[:80]}")
        return value

    def message(self, value: Any, index: int, where: str = "messages") -> Message:
        if not isinstance(value, dict) or not isinstance(value.get("role"), str):
            self.fail(f'{where}[{index}] should be {{"role": …, "content": …}}, is {json.dumps(value)[:80]}')
        content = value.get("content")
        parts = content if isinstance(content, list) else []
        if not isinstance(content, str | list) or not all(
            isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
            for part in parts
        ):
            self.fail(f"{where}[{index}].content should be text, is {json.dumps(content)[:80]}")
        return value

    def turn(self, value: Any, index: int) -> Message:
        """A ShareGPT turn, {"from": "human", "value": …}, as a message; messages pass as they are."""
        if not isinstance(value, dict) or "from" not in value:
            return self.message(value, index, "conversations")
        role = SHAREGPT_ROLES.get(str(value["from"]))
        if role is None:
            self.fail(
                f"conversations[{index}].from should be one of {', '.join(SHAREGPT_ROLES)}, "
                f"is {json.dumps(value['from'])[:80]}"
            )
        return self.message({"role": role, "content": value.get("value")}, index, "conversations")


def tokenize(prompt: Prompt, tokenizer: Any) -> TokenSequence:
    """The token ids of a prompt.

    Text goes through `tokenizer` (a Hugging Face one) with its defaults, special tokens included, as a server's
    /generate does. Messages go through its chat template, with the generation prompt unless the assistant has the
    last word. Raises InputError when the tokenizer or its chat template is missing (None), or nothing comes out.
    """
    if prompt.token_ids is not None:
        return TokenSequence(prompt.id, prompt.token_ids)
    if tokenizer is None:
        raise InputError(
            f"prompt {prompt.id} is no list of token ids, and the model has no tokenizer",
            fix='give token ids ({"token_ids": […]} lines), or a model directory with its tokenizer',
        )
    if prompt.text is not None:
        ids = tokenizer(prompt.text)["input_ids"]
    else:
        assert prompt.messages is not None
        ids = _render(prompt.id, prompt.messages, tokenizer)
    if not ids:
        raise InputError(f"prompt {prompt.id}: the tokenizer makes no token of it", fix="leave the prompt out")
    return TokenSequence(prompt.id, tuple(int(token) for token in ids))


def _render(label: str, messages: tuple[Message, ...], tokenizer: Any) -> list[int]:
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(
            f"prompt {label} holds messages, and the model's tokenizer has no chat template",
            fix='add the chat template to the model directory, or give text or token ids ({"token_ids": […]} lines)',
        )
    try:
        ids: list[int] = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            add_generation_prompt=messages[-1]["role"] != "assistant",
            tokenize=True,
            return_dict=False,
        )
    except Exception as error:  # templates are programs of the model's author, and raise what they like
        raise InputError(
            f"prompt {label}: the chat template refuses it: {type(error).__name__}: {error}",
            fix="check the roles and their order, or give token ids",
        ) from error
    return ids
