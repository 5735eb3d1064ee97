"""gate: reports written before, policies, and that 0 needs a measured slot."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle_parity.cli.main import main
from eagle_parity.errors import InputError
from eagle_parity.gate import Judged, Policy, decide, lines
from eagle_parity.report import (
    read_report,
    to_document,
    to_github,
    to_html,
    to_junit,
    to_markdown,
    to_sarif,
)
from tests.synthetic import Net, serving_spec, training_spec
from tests.test_check import Case

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """JSON reports of a healthy, a wrong and an undecided comparison, of check and of which-layers."""
    from tests.synthetic import make_net

    base, net = tmp_path_factory.mktemp("reports"), make_net()
    made = {}
    for name, slots, served in (
        ("good", (2, 3, 5), (2, 3, 5)),
        ("bad", (2, 3, 5), (0, 2, 4)),
        ("open", None, (2, 3, 5)),
    ):
        training = training_spec(net, slots).write(base / name / "t")
        serving = serving_spec(net, served).write(base / name / "s")
        made[name] = base / f"{name}.json"
        main(["compare", str(training), str(serving), "--report", f"json={made[name]}"])
    made["check"] = base / "check.json"
    words = Case().write(base / "check")
    assert main([words[0], "--report", f"json={made['check']}", *words[1:]]) == 0
    return made


def gate(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["gate", *map(str, args)])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("names", "code"),
    [
        (["good"], 0),
        (["good", "good"], 0),
        (["good", "check"], 0),
        (["bad"], 1),
        (["good", "bad"], 1),
        (["open"], 3),
        (["open", "good"], 3),
        (["open", "bad", "good"], 1),
        (["check"], 3),
        (["check", "check"], 3),
    ],
)
def test_the_worst_verdict_decides(
    names: list[str], code: int, reports: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    got, out, _ = gate(capsys, *(reports[name] for name in names))
    assert got == code
    assert out.startswith({0: "PASS ", 1: "FAIL ", 3: "INCONCLUSIVE "}[code])
    if len(names) > 1:
        assert f"{reports[names[0]]}" in out


def test_files_that_were_checked_are_no_measurement(
    reports: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = gate(capsys, reports["check"])
    assert out.startswith("INCONCLUSIVE required and not shown: a measured slot\n")


def test_a_report_read_again_is_the_same(reports: dict[str, Path]) -> None:
    for path in reports.values():
        assert to_document(read_report(path)) == json.loads(path.read_text())


@pytest.mark.parametrize("format", ["json", "junit", "github", "sarif", "markdown", "html"])
def test_every_format(format: str, reports: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = gate(capsys, reports["good"], reports["bad"], "--format", format)
    assert code == 1
    assert "layer-set" in out
    assert "nan" not in out.lower()


def test_the_json_of_gate_names_its_reports_and_can_be_judged_again(
    reports: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = gate(capsys, reports["good"], reports["check"], "--format", "json")
    document = json.loads(out)
    assert (code, document["command"], document["verdict"]) == (0, "gate", "pass")
    assert [entry["verdict"] for entry in document["inputs"]["reports"]] == ["pass", "pass"]
    (tmp_path / "g.json").write_text(out)
    assert gate(capsys, tmp_path / "g.json")[0] == 0


# ------------------------------------------------------------------------------------- what is no report, or edited


def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path, Path], None]:
    def write(good: Path, path: Path) -> None:
        document = json.loads(good.read_text())
        result = change(document)
        path.write_text(json.dumps(document if result is None else result))

    return write


def put(*keys: Any) -> Callable[[Path, Path], None]:
    """Change the value at a path of keys; the last item is the value."""

    def change(document: dict[str, Any]) -> None:
        at: Any = document
        for key in keys[:-2]:
            at = at[key]
        at[keys[-2]] = keys[-1]

    return edited(change)


BROKEN: list[tuple[str, Callable[[Path, Path], None], str]] = [
    ("empty", lambda good, path: path.write_text("") and None, "is empty"),
    ("cut", lambda good, path: path.write_text(good.read_text()[:500]) and None, "is not JSON"),
    ("binary", lambda good, path: path.write_bytes(b"\xff\xfe\x00") and None, "is not JSON"),
    ("list", edited(lambda document: [document]), "no report"),
    ("other", edited(lambda document: {"a": 1}), "no report"),
    (
        "an error",
        edited(lambda d: {"schema_version": 1, "error": {"code": "x", "message": "m", "fix": "f"}}),
        "error: m",
    ),
    ("future", put("schema_version", 2), "schema_version 2"),
    ("true", put("schema_version", True), "schema_version True"),
    ("rows away", put("rows", []), "no rows"),
    ("no rows", edited(lambda d: d.pop("rows") and None), "rows is missing"),
    ("row failed", put("rows", 0, "status", "fail"), "slot 0 is fail"),
    ("row skipped", put("rows", 2, "status", "skipped"), "slot 2 is skipped"),
    ("odd status", put("rows", 0, "status", "great"), "expected one of ok"),
    ("odd verdict", put("verdict", "PASS"), "verdict is 'PASS'"),
    ("control", put("controls", 0, "failed_as_expected", False), "did not fail"),
    ("text number", put("rows", 0, "cosine", "median", "1"), "median is"),
    ("few rows", put("inputs", "aligned_rows", 3), "3 rows were aligned, 8 are needed"),
    ("no count", put("inputs", "aligned_rows", None), "aligned_rows is null"),
    ("side", put("inputs", "serving", "tokens", "x"), "tokens is"),
    ("finding", put("findings", [{"code": "layer-set"}]), "findings[0]: severity is missing"),
]


@pytest.mark.parametrize(("name", "write", "says"), BROKEN, ids=[row[0] for row in BROKEN])
def test_a_broken_or_edited_report_exits_2(
    name: str,
    write: Callable[[Path, Path], None],
    says: str,
    reports: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "r.json"
    write(reports["good"], path)
    code, out, err = gate(capsys, path)
    assert (code, out) == (2, "")
    assert says in err
    assert "fix:" in err
    assert "Traceback" not in err
    assert gate(capsys, reports["good"], path)[0] == 2


def test_a_failure_renamed_to_a_pass_exits_2(
    reports: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, says in (("bad", "layer-set"), ("open", "slot 0 is inconclusive")):
        put("verdict", "pass")(reports[name], tmp_path / "r.json")
        code, _, err = gate(capsys, tmp_path / "r.json")
        assert code == 2
        assert says in err


def places(at: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a document; of lists, the first two items."""
    for key, value in at.items() if isinstance(at, dict) else enumerate(at[:2]) if isinstance(at, list) else ():
        yield (*path, key)
        yield from places(value, (*path, key))


@pytest.mark.parametrize("name", ["bad", "check"])
def test_whatever_stands_at_any_key_is_no_bug(name: str, reports: dict[str, Path], tmp_path: Path) -> None:
    text, path = reports[name].read_text(), tmp_path / "r.json"
    refused = 0
    for keys in places(json.loads(text)):
        for value in (None, "x", 7, -1.5, [], {}, [None], [{}], True):
            document = json.loads(text)
            at = document
            for key in keys[:-1]:
                at = at[key]
            at[keys[-1]] = value
            path.write_text(json.dumps(document))
            try:
                whole = decide([Judged("r", read_report(path))], Policy(require=("ranks",), min_rows=9))
                for render in (to_document, to_html, to_junit, to_sarif, to_github, to_markdown):
                    render(whole)
                list(lines(whole))
            except InputError:
                refused += 1
    assert refused > 300


# --------------------------------------------------------------------------------------------------- usage, policy


def test_usage(reports: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = reports["good"]
    for args, says in (
        ([tmp_path / "none.json"], "No such file"),
        ([good, tmp_path / "none.json"], "No such file"),
        ([good, good, tmp_path], "Is a directory"),
        ([tmp_path], "alone"),
        ([good, "--draft", "x"], "--draft means nothing for reports"),
        ([good, "--limit", "3"], "--limit means nothing for reports"),
    ):
        code, _, err = gate(capsys, *args)
        assert code == 2, args
        assert says in err, args


def test_a_draft_of_the_environment_is_no_mistake(
    reports: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE_PARITY_DRAFT", "/does/not/exist")
    assert gate(capsys, reports["good"])[0] == 0


def changed(path: Path, to: Path, **coverage: Any) -> Path:
    document = json.loads(path.read_text())
    document["coverage"] |= coverage
    to.write_text(json.dumps(document))
    return to


@pytest.mark.parametrize(
    ("policy", "coverage", "missing"),
    [
        ('require = ["verify"]', {"phases": ["prefill", "verify"]}, "verify rows"),
        ('require = ["graph"]', {"graph": [False, True]}, "graph replay"),
        ('require = ["long"]', {"max_forward_tokens": 2049}, "forwards of more than 2048 tokens"),
        ('require = ["batch"]', {"batch": 2}, "a batch above 1"),
        ('require = ["warm-cache"]', {"warm_cache": True}, "a warm prefix cache"),
    ],
)
def test_a_policy_requires_what_was_seen(
    policy: str,
    coverage: dict[str, Any],
    missing: str,
    reports: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "policy.toml"
    file.write_text(policy + "\n")
    code, out, _ = gate(capsys, reports["good"], "--policy", file)
    assert code == 3
    assert out.startswith(f"INCONCLUSIVE required and not shown: {missing}\n")
    assert f"UNMET {missing}: required" in out
    covering = changed(reports["good"], tmp_path / "r.json", **coverage)
    assert gate(capsys, covering, "--policy", file)[0] == 0
    assert gate(capsys, reports["good"], covering, "--policy", file)[0] == 0  # one report that saw it is enough
    assert gate(capsys, reports["bad"], "--policy", file)[0] == 1  # a failure stays one


def test_ranks_are_required_of_every_report(
    reports: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "policy.toml"
    file.write_text('require = ["ranks"]\n')
    assert gate(capsys, reports["good"], "--policy", file)[0] == 0
    one = changed(reports["good"], tmp_path / "r.json", ranks=[0])
    code, out, _ = gate(capsys, reports["good"], one, "--policy", file)
    assert code == 3
    assert "a report holds 1 of 2" in out


def test_rows_and_warnings(reports: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "policy.toml"
    rows = json.loads(reports["good"].read_text())["inputs"]["aligned_rows"]
    for least, code in ((rows, 0), (rows + 1, 3)):
        file.write_text(f"min_rows = {least}\n")
        assert gate(capsys, reports["good"], "--policy", file)[0] == code
    document = json.loads(reports["good"].read_text())
    warning = {"code": "precision", "severity": "warning", "slot": None, "boundary": None, "ranks": None}
    document["findings"].append(warning | {"message": "m", "fix": "f", "evidence": {}})
    (tmp_path / "r.json").write_text(json.dumps(document))
    assert gate(capsys, tmp_path / "r.json")[0] == 0
    file.write_text('fail_on = ["precision"]\n')
    code, out, _ = gate(capsys, tmp_path / "r.json", "--policy", file)
    assert code == 1
    assert out.startswith("FAIL precision\nERROR precision: m -> f\n")


def test_a_policy_holds_for_dumps_too(net: Net, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sides = [str(training_spec(net).write(tmp_path / "t")), str(serving_spec(net).write(tmp_path / "s"))]
    assert main(["gate", *sides]) == 0
    (tmp_path / "policy.toml").write_text('require = ["verify", "graph"]\n')
    capsys.readouterr()
    assert main(["gate", *sides, "--policy", str(tmp_path / "policy.toml")]) == 3
    assert "required and not shown: verify rows, graph replay" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("requires = []", "'requires'"),
        ('require = ["everything"]', "'everything'"),
        ('require = "verify"', "is 'verify'"),
        ('fail_on = ["oops"]', "'oops'"),
        ("min_rows = -1", "min_rows is -1"),
        ("min_rows = true", "min_rows is True"),
        ("[", "is not TOML"),
    ],
)
def test_a_bad_policy_exits_2(
    text: str, says: str, reports: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "policy.toml"
    file.write_text(text)
    code, _, err = gate(capsys, reports["good"], "--policy", file)
    assert code == 2
    assert says in err
    assert gate(capsys, reports["good"], "--policy", tmp_path / "none.toml")[0] == 2


def test_the_policy_of_the_readme_is_one(
    reports: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [text] = re.findall(r"```toml\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    (tmp_path / "policy.toml").write_text(text)
    code, out, _ = gate(capsys, reports["good"], "--policy", tmp_path / "policy.toml")
    assert code == 3
    assert "UNMET" in out
