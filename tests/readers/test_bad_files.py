"""Bad input: the file and the reason are named, the good files are used, nothing is executed."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from eagle_parity.errors import EnvironmentFailure, InputError, UsageError
from eagle_parity.readers import Training, capture_training, open_training, pickled
from eagle_parity.readers.registry import FORMATS, sniff
from eagle_parity.records import Model
from tests.readers.samples import ROOT

SPECFORGE = ROOT / "specforge/hidden_states"
ONE = SPECFORGE / "rows_0-2/data_0.ckpt"


def good(**changes: Any) -> dict[str, Any]:
    """A SpecForge sample of 12 tokens, H = 8."""
    torch.manual_seed(0)
    sample: dict[str, Any] = {
        "input_ids": torch.arange(1, 13),
        "loss_mask": torch.ones(12, dtype=torch.int64),
        "aux_hidden_state": torch.randn(1, 12, 24).bfloat16(),
        "hidden_state": torch.randn(1, 12, 8).bfloat16(),
    }
    return {key: value for key, value in (sample | changes).items() if value is not ...}


def save(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)
    return path


def reason(run: Callable[[], object]) -> str:
    with pytest.raises(InputError) as caught:
        run()
    assert caught.value.fix
    return caught.value.message


def refused(path: Path, **options: Any) -> str:
    return reason(lambda: open_training(path, **options).finite())


def beside_good_ones(tmp_path: Path, content: dict[str, Any], **options: Any) -> Training:
    """One bad file among two good ones."""
    save(tmp_path / "data_0.ckpt", good())
    save(tmp_path / "data_1.ckpt", content)
    save(tmp_path / "data_2.ckpt", good(input_ids=torch.arange(2, 14)))
    return open_training(tmp_path, **options).finite()


# ----------------------------------------------------------------------------------------------- one bad, the rest good


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (good(aux_hidden_state=None), "aux_hidden_state is None: written without --enable-aux-hidden-states"),
        (good(hidden_state=torch.zeros(1, 12, 100).bfloat16()), "look like logits in place of a state"),
        (good(hidden_state=...), "hidden_state is missing"),
        (good(input_ids=...), "input_ids is missing, expected a tensor"),
        (good(input_ids=torch.zeros(12)), "input_ids is torch.float32 [12], expected integers [T]"),
        (good(input_ids=torch.arange(1, 20)), "19 token ids, 12 rows of hidden states; a prefix cache leaves out"),
        (good(input_ids=torch.arange(1, 8)), "7 token ids, 12 rows of hidden states"),
        (good(input_ids=torch.zeros(12, dtype=torch.int64), loss_mask=torch.zeros(12)), "padding only"),
        (good(aux_hidden_state=torch.zeros(2, 12, 24).bfloat16()), "expected floats [T, W] or [1, T, W]"),
        (good(aux_hidden_state=torch.zeros(1, 11, 24).bfloat16()), "the blocks have [11, 12] rows"),
        (good(aux_hidden_state=torch.zeros(1, 0, 24).bfloat16()), "expected floats [T, W] or [1, T, W]"),
        (good(aux_hidden_state=torch.zeros(1, 12, 24, dtype=torch.float8_e4m3fn)), "no scales belong to it"),
        (good(aux_hidden_state=torch.zeros(1, 12, 24, dtype=torch.int64)), "expected floats"),
        (good(aux_hidden_state=torch.zeros(1, 12, 16).bfloat16()), "holds 2 slots and a last state of 8 BF16"),
        (good(aux_hidden_state=torch.zeros(1, 12, 24)), "float32"),
    ],
)
def test_the_bad_file_is_named_and_the_good_ones_used(tmp_path: Path, content: dict[str, Any], expected: str) -> None:
    training = beside_good_ones(tmp_path, content)
    assert [unit.label for unit in training.units] == ["data_0.ckpt", "data_2.ckpt"]
    (problem,) = training.problems
    assert problem.label == "data_1.ckpt"
    assert str(tmp_path / "data_1.ckpt") in problem.reason
    assert expected in problem.reason
    assert problem.fix


def test_strict_makes_one_bad_file_an_error(tmp_path: Path) -> None:
    said = reason(lambda: beside_good_ones(tmp_path, good(aux_hidden_state=None), strict=True))
    assert "1 of 3 samples cannot be used. The first: " in said


def test_logits_as_wide_as_the_vocabulary(tmp_path: Path) -> None:
    save(tmp_path / "data_0.ckpt", good())
    assert "look like logits" in refused(tmp_path, model=Model(vocab_size=8))


@pytest.mark.parametrize(
    ("key", "value", "where"),
    [
        ("aux_hidden_state", float("nan"), "slot 1 is nan in row 7, column 3"),
        ("aux_hidden_state", float("-inf"), "slot 1 is -inf in row 7, column 3"),
        ("hidden_state", float("inf"), "the last state is inf in row 7, column 3"),
    ],
)
def test_nan_and_infinity_with_row_and_column(tmp_path: Path, key: str, value: float, where: str) -> None:
    content = good(input_ids=torch.arange(3, 15))
    content[key][0, 7, 8 + 3 if key.startswith("aux") else 3] = value
    training = beside_good_ones(tmp_path, content)
    (problem,) = training.problems
    assert where in problem.reason
    assert len(training.units) == 2
    assert where in reason(lambda: open_training(tmp_path).finite(strict=True))


def test_missing_loss_mask_of_one_sample_makes_the_column_unknown(tmp_path: Path) -> None:
    training = beside_good_ones(tmp_path, good(input_ids=torch.arange(3, 15), loss_mask=...))
    assert training.problems == ()
    assert training.has_mask is False
    assert capture_training(open_training(tmp_path, slots=(1, 2, 3))).tokens.loss_mask is None
    assert "no loss mask is stored (1 of 3 samples)" in training.notes


def test_one_id_more_than_rows_was_sampled(tmp_path: Path) -> None:
    save(tmp_path / "data_0.ckpt", good(input_ids=torch.arange(1, 14)))
    training = open_training(tmp_path)
    assert training.load(0).token_ids.tolist() == list(range(1, 13))
    assert "the last one was sampled" in training.notes[0]


def test_duplicates_are_left_out_and_counted(tmp_path: Path) -> None:
    training = beside_good_ones(tmp_path, good())
    assert [unit.label for unit in training.units] == ["data_0.ckpt", "data_2.ckpt"]
    assert "1 samples repeat the token ids of another and are left out" in training.notes


def test_holes_and_repeated_numbers(tmp_path: Path) -> None:
    for i, name in enumerate(("rows_0-2/data_0", "rows_0-2/data_1", "rows_4-6/data_5", "rows_4-6/data_1")):
        save(tmp_path / f"{name}.ckpt", good(input_ids=torch.arange(i + 1, i + 13)))
    notes = open_training(tmp_path).notes
    assert notes[0].startswith("3 of the numbers 0 to 5 have no file, the first is 2")
    assert notes[1].startswith("1 file numbers occur more than once")


def test_natural_order(tmp_path: Path) -> None:
    for i in (10, 9, 2):
        save(tmp_path / f"data_{i}.ckpt", good(input_ids=torch.arange(i, i + 12)))
    assert [unit.label for unit in open_training(tmp_path).units] == ["data_2.ckpt", "data_9.ckpt", "data_10.ckpt"]


# -------------------------------------------------------------------------------------------------------- damaged files


@pytest.mark.parametrize("keep", [0, 1, 3, 500, 15_000, -1])
def test_truncated_torch_file(tmp_path: Path, keep: int) -> None:
    file = tmp_path / "data_0.ckpt"
    file.write_bytes(ONE.read_bytes()[:keep])
    assert f"{file}: not a usable torch.save file" in refused(tmp_path)


def test_truncated_gzip(tmp_path: Path) -> None:
    file = tmp_path / "data_0.ckpt.gz"
    whole = (ROOT / "specforge/hidden_states_gz/rows_0-2/data_0.ckpt.gz").read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert "the gzip stream is damaged" in refused(tmp_path)
    file.write_bytes(whole[:-8] + b"\0" * 8)
    assert "the gzip stream is damaged (CRC check failed" in refused(tmp_path)


HS = ROOT / "speculators/prepared/hidden_states/hs_0.safetensors"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda data: data[:-1], "(truncated?)"),
        (lambda data: data[:100], "the header claims"),
        (lambda data: data[:4], "too few for a header"),
        (lambda data: struct.pack("<Q", 2**40) + data[8:], "the header claims 1099511627776 bytes"),
        (lambda data: data[:8] + b"\xff" + data[9:], "the header is not JSON"),
        (
            lambda data: data.replace(b"[40,4,64]", b"[41,4,64]"),
            "shape [41, 4, 64] of BF16 needs 20992 bytes, has 20480",
        ),
        (lambda data: data.replace(b'"BF16"', b'"BF99"'), "unknown dtype 'BF99'"),
    ],
)
def test_damaged_safetensors(tmp_path: Path, change: Callable[[bytes], bytes], expected: str) -> None:
    file = tmp_path / "hs_0.safetensors"
    file.write_bytes(change(HS.read_bytes()))
    said = refused(tmp_path)
    assert str(file) in said
    assert expected in said


def test_header_shapes_that_disagree_with_each_other(tmp_path: Path) -> None:
    file = tmp_path / "hs_0.safetensors"
    tensors = safetensors.torch.load_file(HS)
    safetensors.torch.save_file(tensors | {"token_ids": tensors["token_ids"][:24].clone()}, file)
    assert "24 token ids, 40 rows" in refused(tmp_path)


def test_float8_without_scales(tmp_path: Path) -> None:
    file = tmp_path / "hs_0.safetensors"
    tensors = safetensors.torch.load_file(ROOT / "speculators/hidden_states_fp8/hs_0.safetensors")
    scales = tensors.pop("hidden_states_scales")
    safetensors.torch.save_file(tensors, file)
    assert "hidden_states_scales is missing" in refused(tmp_path)
    safetensors.torch.save_file(tensors | {"hidden_states_scales": scales[:7].clone()}, file)
    assert "expected one float a token: [40, 1, 1]" in refused(tmp_path)
    bf16 = safetensors.torch.load_file(HS)
    safetensors.torch.save_file(bf16 | {"hidden_states_scales": scales}, file)
    assert "hidden_states_scales stands beside hidden_states of torch.bfloat16" in refused(tmp_path)


def test_speculators_v1_with_something_else_in_the_list(tmp_path: Path) -> None:
    content = torch.load(ROOT / "speculators-v1/data_0.pt", weights_only=True)
    content["hidden_states"][1] = None
    save(tmp_path / "data_0.pt", content)
    assert "expected a list of 2 or more tensors" in refused(tmp_path)


def test_torchspec_left_padding(tmp_path: Path) -> None:
    content = torch.load(ROOT / "torchspec/train_dump/step1_rank0_b0.pt", weights_only=True)
    content["batch"]["attention_mask"][0, :3] = 0
    save(tmp_path / "step1.pt", content)
    assert "no run of ones followed by padding" in refused(tmp_path)


def test_torchspec_batches(tmp_path: Path) -> None:
    content = torch.load(ROOT / "torchspec/train_dump/step1_rank0_b0.pt", weights_only=True)
    ids = content["batch"]["input_ids"]
    content["batch"] = {k: v.repeat(2, 1) for k, v in content["batch"].items()}
    content["batch"]["input_ids"][1] += 1
    content["batch"]["attention_mask"][1, 30:] = 0
    for key in ("hidden_states", "last_hidden_states"):
        content[key] = content[key].repeat(2, 1, 1)
    save(tmp_path / "step1.pt", content)
    training = open_training(tmp_path)
    assert [unit.label for unit in training.units] == ["step1.pt#0", "step1.pt#1"]
    assert training.lengths == (40, 30)
    assert training.load(1).token_ids.tolist() == (ids[0, :30] + 1).tolist()


def test_nemo_without_its_manifest(tmp_path: Path) -> None:
    shutil.copy(ROOT / "nemo/shard-000000.safetensors", tmp_path)
    assert "manifest.json does not say how many layers that is" in refused(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    assert "manifest.json cannot be read" in refused(tmp_path)


def test_side_file_that_contradicts_is_not_believed(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "speculators-v1", tmp_path / "v1")
    config = json.loads((tmp_path / "v1/data_config.json").read_text())
    config["hidden_states"]["layer_ids"] = [2, 7]
    (tmp_path / "v1/data_config.json").write_text(json.dumps(config))
    training = open_training(tmp_path / "v1")
    assert [block.boundary for block in training.blocks] == [None] * 4
    assert any("data_config.json names 1 slots, the files hold 3: not believed" in note for note in training.notes)


# --------------------------------------------------------------------------------------------------- malicious pickles


class Evil:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("suffix", [".ckpt", ".ckpt.gz", ".pt"])
def test_malicious_pickles_are_never_executed(tmp_path: Path, suffix: str) -> None:
    witness = tmp_path / "executed"
    for kind, data in (("zip", _zipped(good(extra=Evil(witness)))), ("bare", pickle.dumps(Evil(witness)))):
        folder = tmp_path / kind
        folder.mkdir()
        file = folder / f"data_0{suffix}"
        file.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
        said = refused(folder)
        if kind == "zip":
            assert f"{file}: refused: the pickle asks for posix.system" in said
        assert "nothing was executed" in said or "not written by torch.save" in said
    assert not witness.exists()
    # The trap is real: the unrestricted loader falls into it.
    torch.load(io.BytesIO(_zipped(good(extra=Evil(witness)))), weights_only=False)
    assert witness.exists()


def _zipped(content: Any) -> bytes:
    data = io.BytesIO()
    torch.save(content, data)
    return data.getvalue()


def test_decompression_bomb(tmp_path: Path) -> None:
    file = tmp_path / "data_0.ckpt.gz"
    file.write_bytes(gzip.compress(b"\0" * 50_000_000))
    assert "decompresses to more than" in refused(tmp_path)
    whole = ROOT / "specforge/hidden_states_gz/rows_0-2/data_0.ckpt.gz"
    assert "more than 1000 bytes" in reason(lambda: pickled.load(whole, max_decompressed=1000))


def test_no_room_to_decompress(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.BytesIO):
        name = "full"

        def write(self, data: Any) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(pickled.tempfile, "NamedTemporaryFile", lambda **_: Full())
    with pytest.raises(EnvironmentFailure, match="No space left on device") as caught:
        pickled.load(ROOT / "specforge/hidden_states_gz/rows_0-2/data_0.ckpt.gz")
    assert "TMPDIR" in caught.value.fix


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickled.tempfile, "tempdir", str(tmp_path))
    sample = open_training(ROOT / "specforge/hidden_states_gz").load(1)
    assert list(tmp_path.iterdir()) == []
    assert sample.blocks[0].read(0, 3).shape == (3, 64)


def test_compressed_records_are_refused(tmp_path: Path) -> None:
    source = zipfile.ZipFile(io.BytesIO(_zipped(good())))
    file = tmp_path / "data_0.ckpt"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in source.namelist():
            archive.writestr(name, source.read(name))
    assert "its records are compressed" in refused(tmp_path)


@pytest.mark.parametrize("numel", [1000, 200, 0])
def test_a_tensor_that_claims_other_bytes_than_its_record(tmp_path: Path, numel: int) -> None:
    source = zipfile.ZipFile(io.BytesIO(_zipped(good())))
    file = tmp_path / "data_0.ckpt"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name in source.namelist():
            data = source.read(name)
            if name.endswith("data.pkl"):
                changed = data.replace(b"M" + struct.pack("<H", 288), b"M" + struct.pack("<H", numel), 1)
                assert changed != data
                data = changed
            archive.writestr(name, data)
    assert "not a usable torch.save file" in refused(tmp_path)


# ------------------------------------------------------------------------------------------------------- what to read


def test_nothing_there(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "nowhere")
    assert "holds no training files" in refused(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    assert "holds no training files" in refused(tmp_path)


def test_no_format_and_two_formats(tmp_path: Path) -> None:
    save(tmp_path / "a/thing.pt", {"input_ids": torch.arange(3), "vectors": torch.zeros(3, 4)})
    assert "in no format that is known" in refused(tmp_path)
    assert "vectors float32 [3, 4]" in refused(tmp_path)
    shutil.copytree(SPECFORGE, tmp_path / "b")
    shutil.copytree(ROOT / "angelslim", tmp_path / "c")
    said = refused(tmp_path)
    assert "could be read as more than one format" in said
    assert "specforge (" in said
    assert "angelslim (" in said
    # --reader chooses; the others are then bad files.
    training = open_training(tmp_path, reader="angelslim")
    assert len(training.units) == 3
    assert all("c/" in unit.label for unit in training.units)


def test_two_candidates_for_the_same_keys() -> None:
    with pytest.raises(InputError, match=r"more than one format: specforge \(.*, twin \("):
        sniff(ONE, [ONE], (*FORMATS, replace(FORMATS[0], name="twin")))


def test_unknown_reader() -> None:
    with pytest.raises(UsageError, match="--reader nonsense: no such reader") as caught:
        open_training(SPECFORGE, reader="nonsense")
    assert "specforge, speculators-v0" in caught.value.fix


@pytest.mark.parametrize("wrong", ["speculators-v1", "modelopt", "torchspec", "vllm", "nemo"])
def test_the_wrong_reader_names_what_is_missing(wrong: str) -> None:
    with pytest.raises(InputError):
        open_training(SPECFORGE, reader=wrong)


def test_readable_files_are_found_behind_many_damaged_ones(tmp_path: Path) -> None:
    for i in range(30):
        (tmp_path / f"data_{i}.ckpt").write_bytes(b"damaged")
    shutil.copy(ONE, tmp_path / "data_17.ckpt")
    training = open_training(tmp_path)
    assert [unit.label for unit in training.units] == ["data_17.ckpt"]
    assert len(training.problems) == 29


def test_a_running_writer(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    for i in (0, 1):
        shutil.copy(ROOT / f"speculators/prepared/hidden_states/hs_{i}.safetensors", tmp_path)
    lock = tmp_path / "hs_1.safetensors.lock"
    lock.touch()
    assert open_training(tmp_path).problems == ()
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        training = open_training(tmp_path)
        assert [unit.label for unit in training.units] == ["hs_0.safetensors"]
        assert "is being written: a running process holds hs_1.safetensors.lock" in training.problems[0].reason


def test_a_file_that_changes_while_it_is_open(tmp_path: Path) -> None:
    save(tmp_path / "data_0.ckpt", good())
    capture = capture_training(open_training(tmp_path, slots=(1, 2, 3)))
    save(
        tmp_path / "data_0.ckpt",
        {key: value[..., :9] if value.dim() == 1 else value[:, :9].clone() for key, value in good().items()},
    )
    assert "has 9 rows, it had 12" in reason(lambda: capture.read(0, "boundary.1", 0, 5))


def test_unreadable_file(tmp_path: Path) -> None:
    (tmp_path / "data_0.ckpt").mkdir()
    save(tmp_path / "data_1.ckpt", good())
    (tmp_path / "data_2.ckpt").symlink_to(tmp_path / "gone")
    training = open_training(tmp_path)
    assert [problem.label for problem in training.problems] == ["data_2.ckpt"]
