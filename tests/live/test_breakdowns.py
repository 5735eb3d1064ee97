"""What breaks a capture must not break the server, and must be told: servers that are filled up, killed, restarted."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle_parity.captures.prompts import Prompt
from eagle_parity.captures.server import connect
from eagle_parity.captures.sglang import capture
from eagle_parity.captures.site import check
from eagle_parity.captures.spool import read_hellos
from eagle_parity.cli.main import main
from eagle_parity.dump import open_dump
from eagle_parity.errors import EnvironmentFailure
from tests.live.conftest import LONG, SHORT, Host, States, check_prefill, needs_sglang, serve, write_prompts
from tests.live.test_robustness import generate

pytestmark = [pytest.mark.live, pytest.mark.slow, needs_sglang]

DISK = 8 * 2**20
LARGE = [list(range(n, n + 400)) for n in range(8)]  # 3200 rows of 1536 bytes, by two ranks, twice: over twice the disk


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system of DISK bytes."""
    path = tmp_path_factory.mktemp("disk")
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("only root may mount the small disk that this fills up")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


@pytest.fixture(scope="module")
def one_host(models: Path, disk: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    (disk / "spool").mkdir()
    own = Host(serve(models), disk / "spool", tmp_path_factory.mktemp("log") / "server.log")
    yield own
    own.stop()


@pytest.fixture
def host(one_host: Host) -> Host:
    """A server that runs, with an empty capture directory but for its hellos."""
    if not one_host.running:
        for path in one_host.capture_dir.iterdir():
            path.unlink()
        one_host.start()
    one_host.wait()
    for path in one_host.capture_dir.glob("*.safetensors"):
        path.unlink()
    return one_host


def dump(host: Host, output: Path, token_ids: list[list[int]], *options: str) -> int:
    lines = [{"id": str(n), "token_ids": ids} for n, ids in enumerate(token_ids)]
    prompts = write_prompts(output.with_suffix(".jsonl"), *lines)
    where = ["--server", host.server.url, "--capture-dir", str(host.capture_dir), "--prompts", str(prompts)]
    return main(["dump", "serving", "-o", str(output), *where, *options])


def test_a_full_disk_costs_the_dump_and_not_the_server(
    host: Host, disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], reference: States
) -> None:
    before = generate(host.server, SHORT, "user")
    # Filled by the capture itself …
    assert dump(host, tmp_path / "large", LARGE) == 4
    said = capsys.readouterr().err
    assert "error: the capture is incomplete: ranks 0, 1 lost " in said
    assert "the disk is full" in said
    assert not (tmp_path / "large").exists()
    assert generate(host.server, SHORT, "user") == before
    # … after which there is room again …
    assert dump(host, tmp_path / "small", [SHORT]) == 0
    check_prefill(open_dump(tmp_path / "small"), "0", SHORT, reference)
    # … and filled by somebody else to the last byte, so that not even the loss can be written down.
    subprocess.run(["dd", "if=/dev/zero", f"of={disk / 'ballast'}", "bs=4096"], check=False, capture_output=True)
    capsys.readouterr()
    assert dump(host, tmp_path / "none", [SHORT], "--timeout", "10") == 4
    said = capsys.readouterr().err
    assert "error: no rank wrote a record into " in said
    assert "its disk is full (0 bytes free)" in said
    assert generate(host.server, SHORT, "user") == before
    (disk / "ballast").unlink()
    assert dump(host, tmp_path / "again", [SHORT]) == 0
    assert host.running
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["again", "small"]


def test_a_server_that_is_restarted_between_two_probes(host: Host) -> None:
    """It comes back at the same address with the same capture directory, as under a supervisor."""
    before = {hello.rank: hello.pid for hello in read_hellos(host.capture_dir)}
    site = check(connect(host.server.url, timeout=60.0), host.capture_dir)

    def restart(number: int, _: str) -> None:
        if number == 1:
            host.stop()
            host.start()
            host.wait()

    prompts = [Prompt(str(n), token_ids=tuple(SHORT)) for n in range(3)]
    with pytest.raises(EnvironmentFailure) as caught:
        capture(site, prompts, progress=restart)
    said = caught.value.message
    assert (
        f"records of rank 0 came from another process than the one that was there before the first probe, {before[0]}"
        in said
    )
    assert "the server was restarted during the capture: rank 0 is process " in said
    assert "ended during the capture" in said
    assert caught.value.exit_code == 4
    assert list(host.capture_dir.glob("*.safetensors")) == []


def test_a_rank_killed_in_mid_capture_is_named(host: Host, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = {hello.rank: hello.pid for hello in read_hellos(host.capture_dir)}
    over = threading.Event()

    def kill() -> None:
        while not over.is_set():
            if len(list(host.capture_dir.glob("*.safetensors"))) >= 8:
                os.kill(newest[1], signal.SIGKILL)
                return
            time.sleep(0.01)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        code = dump(host, tmp_path / "out", [LONG] * 200, "--timeout", "60")
    finally:
        over.set()
        killer.join()
    said = capsys.readouterr().err
    assert code == 4, said
    assert f"rank 1 (process {newest[1]} on " in said
    assert "ended during the capture, before any other rank" in said
    assert "Traceback" not in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl"]
