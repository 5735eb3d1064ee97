from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle_parity.captures.prompts import Prompt, load_prompts, tokenize
from eagle_parity.errors import InputError


def written(tmp_path: Path, text: str, name: str = "prompts.jsonl") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_every_kind_of_line(tmp_path: Path) -> None:
    lines = [
        {"text": "hello"},
        {"id": "chat", "messages": [{"role": "user", "content": "hi"}]},
        {"id": 7, "token_ids": [0, 5]},
        {"input_ids": [3]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"conversations": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
    ]
    path = written(tmp_path, "\n\n".join(json.dumps(line) for line in lines) + "\r\n")
    assert load_prompts(path) == [
        Prompt("prompt-0", text="hello"),
        Prompt("chat", messages=({"role": "user", "content": "hi"},)),
        Prompt("7", token_ids=(0, 5)),
        Prompt("prompt-3", token_ids=(3,)),
        Prompt("prompt-4", messages=({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})),
        Prompt("prompt-5", messages=({"role": "user", "content": [{"type": "text", "text": "a"}]},)),
    ]


def test_plain_text_keeps_lines_as_they_are(tmp_path: Path) -> None:
    path = written(tmp_path, "\ufeff one \u2028 still one\r\n\n{two}\n", "prompts.txt")
    assert [prompt.text for prompt in load_prompts(path)] == [" one \u2028 still one", "{two}"]


@pytest.mark.parametrize(("first", "kind"), [('{"text": "a"}', "a"), ("{curly} prose", "{curly} prose"), ("17", "17")])
def test_the_first_line_decides_under_other_names(tmp_path: Path, first: str, kind: str) -> None:
    assert load_prompts(written(tmp_path, first, "prompts"))[0].text == kind


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[" * 100_000, "line 2: not JSON"),
        ("[1, 2]", "line 2: expected an object, got list"),
        ("{}", "line 2: expected exactly one of text, messages, conversations, token_ids, input_ids, got none"),
        ('{"text": "a", "token_ids": [1]}', "got text, token_ids"),
        ('{"prompt": "a"}', "unknown key 'prompt'; known are id, text"),
        ('{"text": 5}', "text should be text with something in it, is 5"),
        ('{"text": ""}', 'is ""'),
        ('{"token_ids": []}', "token_ids should be a list with something in it"),
        ('{"token_ids": "1 2"}', "token_ids should be a list"),
        ('{"token_ids": [1, -2]}', r"token_ids\[1\] should be a token id \(0, 1, …\), is -2"),
        ('{"input_ids": [1.5]}', r"input_ids\[0\]"),
        ('{"token_ids": [true]}', "is true"),
        ('{"id": [], "text": "a"}', "id should be text or a number"),
        ('{"messages": [{"content": "a"}]}', r"messages\[0\] should be"),
        ('{"messages": [{"role": "user"}]}', r"messages\[0\].content should be text, is null"),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "content should be text"),
        ('{"conversations": [{"from": "alien", "value": "a"}]}', "from should be one of human"),
        ('{"conversations": [{"from": "human"}]}', r"conversations\[0\].content should be text"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = written(tmp_path, '{"text": "fine"}\n' + line)
    with pytest.raises(InputError, match=message) as caught:
        load_prompts(path)
    assert str(path) in caught.value.message


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_no_prompts(tmp_path: Path, content: str) -> None:
    with pytest.raises(InputError, match="holds no prompts"):
        load_prompts(written(tmp_path, content))


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        load_prompts(tmp_path / "none")
    with pytest.raises(InputError, match="cannot be read"):
        load_prompts(tmp_path)
    (tmp_path / "latin").write_bytes(b"\xe9")
    with pytest.raises(InputError, match="not UTF-8"):
        load_prompts(tmp_path / "latin")


class Words:
    """A tokenizer of the Hugging Face kind, as far as it is used."""

    chat_template: str | None = "template"

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [1, *map(int, text.split())] if text.strip() else []}

    def apply_chat_template(self, messages: list[Any], **options: Any) -> list[int]:
        assert options["tokenize"] is True
        assert options["return_dict"] is False
        if messages[0]["role"] == "system":
            raise RuntimeError("roles must alternate")
        return [*map(int, messages[-1]["content"].split()), *([9] if options["add_generation_prompt"] else [])]


def test_tokenize() -> None:
    assert tokenize(Prompt("a", text="4 5"), Words()).token_ids == (1, 4, 5)
    assert tokenize(Prompt("a", token_ids=(7,)), None).token_ids == (7,)
    asked = Prompt("a", messages=({"role": "user", "content": "4"},))
    assert tokenize(asked, Words()).token_ids == (4, 9)
    answered = Prompt("a", messages=({"role": "assistant", "content": "4"},))
    assert tokenize(answered, Words()).token_ids == (4,)


def test_tokenize_says_what_is_missing() -> None:
    message = ({"role": "user", "content": "4"},)
    with pytest.raises(InputError, match=r"prompt a .* has no tokenizer") as caught:
        tokenize(Prompt("a", text="4"), None)
    assert "give token ids" in caught.value.fix
    bare = Words()
    bare.chat_template = None
    with pytest.raises(InputError, match="no chat template"):
        tokenize(Prompt("a", messages=message), bare)
    with pytest.raises(InputError, match="roles must alternate"):
        tokenize(Prompt("a", messages=({"role": "system", "content": "4"},)), Words())
    with pytest.raises(InputError, match="makes no token"):
        tokenize(Prompt("a", text=" "), Words())


def test_a_prompt_is_exactly_one_thing() -> None:
    with pytest.raises(ValueError, match="exactly one"):
        Prompt("a")
    with pytest.raises(ValueError, match="exactly one"):
        Prompt("a", text="b", token_ids=(1,))
