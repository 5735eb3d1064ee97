"""Settings: flag > environment > eagle-parity.toml > pyproject.toml > default."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle_parity.cli.main import main
from tests.synthetic import Net, serving_spec, training_spec


@pytest.fixture
def sides(net: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    training_spec(net).write(tmp_path / "training")
    serving_spec(net).write(tmp_path / "serving")
    monkeypatch.chdir(tmp_path)
    return ["compare", "training", "serving"]


def is_json(capsys: pytest.CaptureFixture[str]) -> bool:
    return capsys.readouterr().out.startswith("{")


def test_precedence(sides: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(sides) == 0
    assert not is_json(capsys)
    Path("pyproject.toml").write_text('[tool.eagle-parity.compare]\nformat = "json"\n')
    assert main(sides) == 0
    assert is_json(capsys)
    Path("eagle-parity.toml").write_text('[compare]\nformat = "table"\n')
    assert main(sides) == 0
    assert not is_json(capsys)
    monkeypatch.setenv("EAGLE_PARITY_FORMAT", "json")
    assert main(sides) == 0
    assert is_json(capsys)
    assert main([*sides, "--format", "table"]) == 0
    assert not is_json(capsys)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[compare\n", "is not TOML"),
        ("[compare]\nfromat = 1\n", "[compare] has no setting 'fromat'"),
        ("[dump.serving]\nx = 1\n", "[dump.serving] has no setting 'x'"),
        ("format = 'json'\n", "has no setting 'format'"),
    ],
)
def test_mistakes_are_named(text: str, says: str, sides: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("eagle-parity.toml").write_text(text)
    assert main(sides) == 2
    err = capsys.readouterr().err
    assert says in err
    assert "fix:" in err


def test_a_value_of_the_wrong_type_is_a_usage_error(sides: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("eagle-parity.toml").write_text("[dump.serving]\ntimeout = 'soon'\n")
    assert main(["dump", "serving", "-o", "x", "--tokens-from", "training", "--server", "http://127.0.0.1:9"]) == 2
    assert "timeout" in capsys.readouterr().err


def error_of(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    document = json.loads(capsys.readouterr().out)
    assert set(document) == {"schema_version", "error"}
    assert set(document["error"]) == {"code", "message", "fix"}
    return dict(document["error"])


@pytest.mark.parametrize(
    ("text", "args", "code", "says"),
    [
        ("[compare]\nformat = 'json'\nfromat = 1\n", ["compare", "training", "serving"], 2, "no setting 'fromat'"),
        ("[compare]\nformat = 'json'\n", ["compare", "training", "gone"], 2, "gone"),
        ("[compare]\nformat = 'json'\n", ["compare", "training"], 2, "serving"),
        ("[compare]\nformat = 'json'\nlimit = 'x'\n", ["compare", "training", "serving"], 2, "limit"),
        ("[gate]\nformat = 'json'\n", ["gate", "gone.json"], 2, "gone.json"),
        ("[check]\nformat = 'json'\n", ["check", "--draft", "d", "--server", "http://127.0.0.1:9"], 4, "127.0.0.1:9"),
    ],
)
def test_errors_are_json_where_the_settings_ask_for_it(
    text: str, args: list[str], code: int, says: str, sides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in (("eagle-parity.toml", text), ("pyproject.toml", text.replace("[", "[tool.eagle-parity.", 1))):
        Path(name).write_text(content)
        assert main(args) == code
        assert says in error_of(capsys)["message"]
        assert main([*args, "--format", "table"]) == code  # a flag beats the file
        assert capsys.readouterr().out == ""
        Path(name).unlink()


def test_errors_are_json_where_the_environment_asks_for_it(
    sides: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE_PARITY_FORMAT", "json")
    for text, says in (("[compare\n", "is not TOML"), ("[compare]\nfromat = 1\n", "fromat")):
        Path("eagle-parity.toml").write_text(text)
        assert main(sides) == 2
        assert says in error_of(capsys)["message"]
    Path("eagle-parity.toml").write_text("[compare]\nformat = 'json'\n")
    monkeypatch.setenv("EAGLE_PARITY_FORMAT", "table")  # a variable beats the file
    assert main(["compare", "training", "gone"]) == 2
    assert capsys.readouterr().out == ""


def test_a_bug_is_json_too(
    sides: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **more: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr("eagle_parity.cli.compare.measure", broken)
    Path("eagle-parity.toml").write_text("[compare]\nformat = 'json'\n")
    assert main(sides) == 70
    assert error_of(capsys)["code"] == "bug"
