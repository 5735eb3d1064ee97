"""Settings: flag > environment > eagle-parity.toml > pyproject.toml > default."""

from __future__ import annotations

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
