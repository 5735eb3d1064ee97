"""The serving capture beside paying traffic and other clients: one real server, which every test leaves as it was."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open

from eagle_parity.captures.server import Server
from eagle_parity.cli.main import main
from eagle_parity.dump import Dump, open_dump
from tests.live.conftest import (
    ANSWER,
    LONG,
    NEW_TOKENS,
    SHORT,
    TEXTS,
    TOLERANCE,
    States,
    check_prefill,
    check_trees,
    needs_sglang,
    write_prompts,
)

pytestmark = [pytest.mark.live, needs_sglang]

FOREIGN = [[400 + number] * 12 for number in range(64)]
ALMOST_IDS = ["eagle-parity-0001", "eagle-parity-0123456789abcdef-1x", "Eagle-parity-0123456789abcdef-1", "user"]


def generate(server: Server, token_ids: list[int], rid: str) -> list[int]:
    sampling = {"temperature": 0, "max_new_tokens": 4}
    body = json.dumps({"input_ids": token_ids, "rid": rid, "sampling_params": sampling}).encode()
    request = urllib.request.Request(f"{server.url}/generate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=240) as reply:
        said: list[int] = json.load(reply)["output_ids"]
    return said


@contextmanager
def traffic(server: Server) -> Iterator[list[list[int]]]:
    """64 clients that never pause, with request ids that are nearly a probe's; the answers that they got."""
    over = threading.Event()
    answers: list[list[int]] = []

    def client(number: int) -> None:
        for turn in range(1000):
            if over.is_set():
                return
            answers.append(generate(server, FOREIGN[number], f"{ALMOST_IDS[number % 4]}-{number}-{turn}"))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(len(FOREIGN))]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        over.set()
        for thread in threads:
            thread.join()


@contextmanager
def spied(capture_dir: Path) -> Iterator[set[str]]:
    """The request ids of all records that appear in a capture directory while the block runs."""
    over = threading.Event()
    found: set[str] = set()

    def spy() -> None:
        seen: set[str] = set()
        while not over.is_set():
            for path in set(capture_dir.glob("*.safetensors")):
                if path.name not in seen:
                    try:
                        with safe_open(path, "pt") as file:
                            found.add(json.loads(file.metadata()["eagle_parity"])["probe"])
                        seen.add(path.name)
                    except (OSError, SafetensorError):
                        continue  # collected meanwhile
            time.sleep(0.02)

    thread = threading.Thread(target=spy)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def test_of_64_concurrent_clients_nothing_is_recorded(
    site: tuple[Server, Path], dump_serving: Callable[..., Dump], quiet: Dump, reference: States
) -> None:
    server, capture_dir = site
    lines = [{"id": label, "token_ids": token_ids} for label, token_ids in TEXTS]
    with spied(capture_dir) as recorded, traffic(server) as answers:
        while len(answers) < len(FOREIGN) // 2:  # the server is full
            time.sleep(0.1)
        busy = dump_serving(*lines, options=("--max-new-tokens", str(NEW_TOKENS)))
    assert len(answers) >= len(FOREIGN)  # each was served
    assert all(len(said) == 4 and set(said) <= ANSWER for said in answers)
    assert max(request.batch for request in busy.tokens.requests) > 8
    # Nothing of theirs was ever on the disk …
    assert recorded
    assert {rid.rpartition("-")[0] for rid in recorded} == {f"eagle-parity-{busy.facts.run}"}
    assert list(capture_dir.glob("*.safetensors")) == []
    # … and the dump is what it is without them: the same tokens, and states of those tokens alone.
    assert set(busy.tokens.token_ids.tolist()) <= {*LONG, *SHORT, *ANSWER}
    for label, token_ids in TEXTS:
        check_prefill(busy, label, token_ids, reference)
        _, trees, said = check_trees(busy, label, token_ids, reference)
        assert trees
        assert said >= NEW_TOKENS - 1
    theirs = [torch.cat(states) for states in zip(*(reference(token_ids) for token_ids in FOREIGN), strict=True)]
    count = len(busy.tokens.token_ids)
    for slot, states in enumerate(theirs):
        for rank in busy.ranks:
            own = busy.read(rank, f"slot.{slot}", 0, count)
            nearest = torch.cdist(own, states).min(dim=1).values / own.norm(dim=1)
            assert float(nearest.min()) > 100 * TOLERANCE


def test_two_dumps_at_once(
    site: tuple[Server, Path], tmp_path: Path, reference: States, capsys: pytest.CaptureFixture[str]
) -> None:
    server, capture_dir = site
    texts = {
        name: [(f"{name}{n}", list(range(begin + n, begin + n + 40))) for n in range(6)]
        for name, begin in (("a", 100), ("b", 300))
    }
    codes: dict[str, int] = {}
    ready = threading.Barrier(2)

    def run(name: str) -> None:
        lines = [{"id": label, "token_ids": token_ids} for label, token_ids in texts[name]]
        prompts = write_prompts(tmp_path / f"{name}.jsonl", *lines)
        where = ["--server", server.url, "--capture-dir", str(capture_dir), "--prompts", str(prompts)]
        ready.wait()
        codes[name] = main(["dump", "serving", "-o", str(tmp_path / name), *where])

    threads = [threading.Thread(target=run, args=(name,)) for name in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == {"a": 0, "b": 0}, capsys.readouterr().err
    dumps = {name: open_dump(tmp_path / name) for name in texts}
    assert max(request.batch for dump in dumps.values() for request in dump.tokens.requests) == 2
    for name, dump in dumps.items():
        assert {request.id for request in dump.tokens.requests} == {label for label, _ in texts[name]}
        for label, token_ids in texts[name]:
            check_prefill(dump, label, token_ids, reference)
            assert check_trees(dump, label, token_ids, reference)[1]
    assert list(capture_dir.glob("*.safetensors")) == []


def test_an_interrupted_client(
    site: tuple[Server, Path], tmp_path: Path, dump_serving: Callable[..., Dump], reference: States
) -> None:
    server, capture_dir = site
    prompts = write_prompts(tmp_path / "prompts.jsonl", *({"token_ids": LONG} for _ in range(300)))
    where = ["--server", server.url, "--capture-dir", str(capture_dir), "--prompts", str(prompts)]
    client = subprocess.Popen(
        [sys.executable, "-m", "eagle_parity", "dump", "serving", "-o", str(tmp_path / "out"), *where],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while len(list(capture_dir.glob("*.safetensors"))) < 8:
            assert client.poll() is None
            time.sleep(0.05)
        client.send_signal(signal.SIGINT)
        _, said = client.communicate(timeout=60)
    finally:
        client.kill()
        client.wait()
    assert client.returncode == 130
    assert said.endswith("interrupted; nothing was kept\n")
    assert "Traceback" not in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prompts.jsonl"]
    # The server finishes the request that it was in, and its ranks write behind: what they had not yet written of the
    # request before comes too. The next dump is not disturbed by what that left.
    after = dump_serving({"id": "short", "token_ids": SHORT})
    check_prefill(after, "short", SHORT, reference)
    left = list(capture_dir.glob("*.safetensors"))
    owners = {json.loads(safe_open(path, "pt").metadata()["eagle_parity"])["probe"] for path in left}
    numbers = sorted(int(owner.rsplit("-", 1)[1]) for owner in owners)
    assert len(numbers) <= 2
    assert numbers == list(range(min(numbers, default=0), max(numbers, default=-1) + 1))
    for path in left:
        path.unlink()
