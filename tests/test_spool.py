from __future__ import annotations

import json
import shutil
import threading
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from eagle_parity.captures import spool
from eagle_parity.captures import writer as writer_module
from eagle_parity.captures.spool import (
    Header,
    Spool,
    is_probe,
    new_dump_key,
    new_hello,
    probe_id,
    probe_number,
    read_hellos,
    write_hello,
)
from eagle_parity.captures.writer import SpoolWriter
from eagle_parity.errors import EnvironmentFailure

KEY = "0123456789abcdef"


def header(number: int = 0, key: str = KEY) -> Header:
    return Header(probe_id(key, number), "target", "prefill", batch=3, forward_tokens=9, graph=True)


def hidden(rows: int = 4, width: int = 6) -> dict[str, torch.Tensor]:
    return {"hidden": torch.randn(rows, width, dtype=torch.bfloat16), "token_ids": torch.arange(rows)}


def writer(directory: Path, **limits: int) -> SpoolWriter:
    return SpoolWriter(directory, "aaaa", 1, **limits)


class TestProbeIds:
    def test_made_ids_are_recognised(self) -> None:
        key = new_dump_key()
        assert is_probe(probe_id(key, 17))
        assert probe_number(probe_id(key, 17), key) == 17
        assert probe_number(probe_id(key, 17), new_dump_key()) is None

    @pytest.mark.parametrize(
        "rid",
        [
            "eagle-parity-0123456789abcdef-",
            "eagle-parity-0123456789ABCDEF-1",
            "eagle-parity-0123456789abcde-1",
            "eagle-parity-0123456789abcdef0-1",
            "eagle-parity-0123456789abcdef-1\n",
            "eagle-parity-0123456789abcdef-1/../../x",
            "eagle-parity-0123456789abcdef-٣",
            "xeagle-parity-0123456789abcdef-1",
            "eagle-parity-0001",
            "",
            None,
            7,
        ],
    )
    def test_everything_else_is_not(self, rid: object) -> None:
        assert not is_probe(rid)


class TestRecords:
    def test_round_trip(self, tmp_path: Path) -> None:
        own, tensors = writer(tmp_path), hidden()
        own.submit(header(2), tensors)
        assert own.flush()
        (record,) = Spool(tmp_path, KEY).poll()
        assert record.header == Header(
            probe_id(KEY, 2), "target", "prefill", 3, 9, True, process="aaaa", order=1, rank=1
        )
        assert (len(record.rows), record.width(), record.dtype()) == (4, 6, "BF16")
        assert torch.equal(record.read(), tensors["hidden"])
        assert record.integers("token_ids") == [0, 1, 2, 3]
        assert not record.has("child")

    def test_no_request_id_in_a_path(self, tmp_path: Path) -> None:
        own = writer(tmp_path)
        own.submit(header(5), hidden())
        assert own.flush()
        assert [path.name for path in tmp_path.iterdir()] == ["aaaa-00000001.safetensors"]

    def test_poll_gives_each_record_once_and_no_other_dump_s(self, tmp_path: Path) -> None:
        own, mine = writer(tmp_path), Spool(tmp_path, KEY)
        own.submit(header(0), hidden())
        own.submit(header(0, "f" * 16), hidden())
        assert own.flush()
        assert [record.header.order for record in mine.poll()] == [1]
        own.submit(header(1), hidden())
        assert own.flush()
        assert [record.header.order for record in mine.poll()] == [3]

    def test_a_record_being_written_is_not_seen(self, tmp_path: Path) -> None:
        (tmp_path / "aaaa-00000001.tmp").write_bytes(b"half")
        assert list(Spool(tmp_path, KEY).poll()) == []

    def test_discard_deletes_this_dump_s_records_only(self, tmp_path: Path) -> None:
        own = writer(tmp_path)
        own.submit(header(0), hidden())
        own.submit(header(0, "f" * 16), hidden())
        assert own.flush()
        Spool(tmp_path, KEY).discard()
        assert [path.name for path in tmp_path.iterdir()] == ["aaaa-00000002.safetensors"]

    def test_a_truncated_record_is_named(self, tmp_path: Path) -> None:
        own = writer(tmp_path)
        own.submit(header(), hidden())
        assert own.flush()
        (path,) = tmp_path.iterdir()
        path.write_bytes(path.read_bytes()[:-5])
        with pytest.raises(EnvironmentFailure, match=r"the captured record .*aaaa-00000001.* is damaged: .*truncated"):
            list(Spool(tmp_path, KEY).poll())

    def test_a_directory_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(EnvironmentFailure, match=r"the capture directory .*gone cannot be read: No such file") as e:
            list(Spool(tmp_path / "gone", KEY).poll())
        assert spool.CAPTURE_DIR in e.value.fix


class TestLimits:
    def lost(self, directory: Path) -> list[str]:
        return [str(r.header.reason) for r in Spool(directory, KEY).poll() if r.header.kind == "lost"]

    def test_memory(self, tmp_path: Path) -> None:
        own = writer(tmp_path, pending_bytes=50)
        own.submit(header(), hidden())
        assert own.flush()
        assert self.lost(tmp_path) == ["more than 50 bytes were waiting for the disk"]

    def test_kept_on_disk_until_collected(self, tmp_path: Path) -> None:
        own = writer(tmp_path, kept_bytes=100)
        for number in range(2):
            own.submit(header(number), hidden())
            assert own.flush()
        assert len(self.lost(tmp_path)) == 1
        Spool(tmp_path, KEY).discard()
        own.submit(header(2), hidden())
        assert own.flush()
        assert self.lost(tmp_path) == []

    def test_what_nobody_collects_makes_room_after_a_while(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        own = writer(tmp_path, kept_bytes=100)
        own.submit(header(0), hidden())
        assert own.flush()
        monkeypatch.setattr(writer_module, "STALE_SECONDS", -1.0)
        own.submit(header(1), hidden())
        assert own.flush()
        assert [r.header.probe for r in Spool(tmp_path, KEY).poll()] == [probe_id(KEY, 1)]

    def test_a_full_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        usage = namedtuple("usage", "total used free")
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1000, 960, 40))
        said: list[str] = []
        own = SpoolWriter(tmp_path, "aaaa", 0, warn=said.append)
        for number in range(3):
            own.submit(header(number), hidden())
        assert own.flush()
        assert (
            self.lost(tmp_path)
            == ["the disk is full (40 bytes free, 50 are left to the server, the record has 80)"] * 3
        )
        assert len(said) == 1  # a server's log gets one line
        assert "the server is not affected" in said[0]

    def test_a_writer_that_fails_goes_on(self, tmp_path: Path) -> None:
        directory = tmp_path / "spool"
        directory.mkdir()
        own = writer(directory)
        directory.rmdir()
        own.submit(header(0), hidden())
        assert own.flush()
        directory.mkdir()
        own.submit(header(1), hidden())
        assert own.flush()
        assert [r.header.probe for r in Spool(directory, KEY).poll()] == [probe_id(KEY, 1)]

    def test_a_tensor_that_cannot_be_stored_is_a_lost_record(self, tmp_path: Path) -> None:
        own = writer(tmp_path)
        own.submit(header(), {"hidden": torch.zeros(2, 2, dtype=torch.complex64)})
        assert own.flush()
        assert "complex64" in self.lost(tmp_path)[0]

    def test_submit_never_raises(self, tmp_path: Path) -> None:
        writer(tmp_path).submit(header(), {"hidden": None})  # type: ignore[dict-item]

    def test_submit_does_not_wait_for_the_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        own = writer(tmp_path)
        disk = threading.Event()
        monkeypatch.setattr(own, "_store", lambda _: disk.wait(60))
        try:
            for number in range(5):
                own.submit(header(number), hidden())
            assert not own.flush(0.05)  # nothing is stored yet, and we are here
        finally:
            disk.set()
        assert own.flush()


class TestHellos:
    def test_round_trip_oldest_first(self, tmp_path: Path) -> None:
        first, second = new_hello({"sglang": "1"}), new_hello({"sglang": "2"})
        write_hello(tmp_path, second)
        write_hello(tmp_path, first)
        assert read_hellos(tmp_path) == [first, second]

    def test_what_is_no_hello_is_passed_over(self, tmp_path: Path) -> None:
        hello = new_hello({})
        write_hello(tmp_path, hello)
        (tmp_path / "hello-bad.json").write_text("{")
        (tmp_path / "hello-list.json").write_text("[]")
        newer = json.loads((tmp_path / f"hello-{hello.process}.json").read_text()) | {"added_later": 1}
        (tmp_path / f"hello-{hello.process}.json").write_text(json.dumps(newer))
        assert read_hellos(tmp_path) == [hello]
