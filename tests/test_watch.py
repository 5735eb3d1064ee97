"""Ranks that end, and servers that are restarted, while they are captured from."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from eagle_parity.captures import recording, site, watch
from eagle_parity.captures.prompts import Prompt
from eagle_parity.captures.spool import Hello, read_hellos, write_hello
from eagle_parity.captures.watch import Watch
from eagle_parity.captures.writer import SpoolWriter
from eagle_parity.errors import EnvironmentFailure, InputError
from tests.test_server import Engine, probe

HERE = socket.gethostname()
FAILURE = EnvironmentFailure("no answer", fix="look")


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    own = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(2)]
    yield own
    for process in own:
        process.kill()
        process.wait()


def hellos(processes: Sequence[subprocess.Popen[bytes]], host: str = HERE) -> dict[int, Hello]:
    return {rank: Hello(f"p{rank}", own.pid, host, 1.0, rank=rank) for rank, own in enumerate(processes)}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_GRACE_SECONDS", 0.3)
    monkeypatch.setattr(site, "_HELLO_SECONDS", 0.2)
    monkeypatch.setattr(recording, "_RECORD_SECONDS", 2.0)


def left(
    directory: Path, watched: dict[int, Hello], act: Callable[[], object], error: BaseException = FAILURE
) -> BaseException:
    """What leaves a watch when this happens within it and then the error."""
    try:
        with Watch(directory, watched):
            act()
            raise error
    except BaseException as found:
        return found


def test_the_rank_that_ended_first_is_named(tmp_path: Path, processes: list[subprocess.Popen[bytes]]) -> None:
    """It stays a zombie, as a server's ranks do until the server looks."""

    def act() -> None:
        processes[1].kill()
        time.sleep(0.5)
        processes[0].kill()

    error = left(tmp_path, hellos(processes), act)
    assert isinstance(error, EnvironmentFailure)
    assert error.message == (
        f"no answer\nrank 1 (process {processes[1].pid} on {HERE}) ended during the capture, before any other rank"
    )
    assert "see the server's log" in error.fix


def test_one_that_ends_just_after_the_failure(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_GRACE_SECONDS", 10.0)
    error = left(tmp_path, hellos(processes), threading.Timer(0.2, processes[0].kill).start)
    assert f"rank 0 (process {processes[0].pid} on {HERE}) ended" in str(error)


def test_nothing_is_added_when_all_are_well(tmp_path: Path, processes: list[subprocess.Popen[bytes]]) -> None:
    assert left(tmp_path, hellos(processes), lambda: None) is FAILURE


@pytest.mark.parametrize("error", [InputError("x", fix="y"), KeyboardInterrupt()])
def test_other_errors_pass(tmp_path: Path, processes: list[subprocess.Popen[bytes]], error: BaseException) -> None:
    assert left(tmp_path, hellos(processes), processes[0].kill, error) is error


def test_processes_that_cannot_be_seen_are_not_judged(tmp_path: Path, processes: list[subprocess.Popen[bytes]]) -> None:
    """Those of another host, and those that were not there at the start (a container's own numbers)."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for seen in (hellos(processes, "elsewhere"), hellos([gone])):
        assert left(tmp_path, seen, processes[0].kill) is FAILURE


def test_a_newer_server_in_the_same_directory_is_named(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    before = hellos(processes)
    for hello in before.values():
        write_hello(tmp_path, hello)
    error = left(tmp_path, before, lambda: write_hello(tmp_path, Hello("q1", 77, HERE, 2.0, rank=1)))
    assert str(error) == (f"no answer\nthe server was restarted during the capture: rank 1 is process 77 on {HERE} now")


class Restarting(Engine):
    """A server that is another one from the second request on."""

    def run(self, rid: str, ids: Sequence[int]) -> list[int]:
        if len(self.seen) == 2:
            for rank in self.ranks:
                (old,) = (hello for hello in read_hellos(self.directory) if hello.process == f"p{rank}")
                write_hello(self.directory, Hello(f"q{rank}", 2, "host", 9.0, rank=rank, model=old.model))
                self.writers[rank] = SpoolWriter(self.directory, f"q{rank}", rank)
        return super().run(rid, ids)


def test_a_server_restarted_between_two_probes(tmp_path: Path) -> None:
    """All records are there, and all ranks answer: only who wrote them tells."""
    prompts = [Prompt(str(number), token_ids=(10, 11, 12)) for number in range(3)]
    with pytest.raises(EnvironmentFailure) as caught:
        probe(Restarting(tmp_path), *prompts)
    assert caught.value.message == (
        "records of rank 0 came from another process than the one that was there before the first probe, 1 on host: "
        f"the server was restarted, or two servers share {tmp_path}\n"
        "the server was restarted during the capture: rank 0 is process 2 on host now, rank 1 is process 2 on host now"
    )
    assert list(tmp_path.glob("*.safetensors")) == []


def test_watching_leaves_no_thread(tmp_path: Path) -> None:
    with Watch(tmp_path, {0: Hello("p0", os.getpid(), HERE, 1.0, rank=0)}):
        assert any(thread.name == "eagle-parity-watch" for thread in threading.enumerate())
    time.sleep(0.2)
    assert not any(thread.name == "eagle-parity-watch" for thread in threading.enumerate())
