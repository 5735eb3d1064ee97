"""A server over two hosts: two real SGLang processes, one rank each, on loopback; with a shared disk and without."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from eagle_parity.captures.spool import read_hellos
from eagle_parity.cli.main import main
from eagle_parity.dump import Dump, open_dump
from tests.live.conftest import TEXTS, Host, States, check_prefill, check_trees, free_port, needs_sglang, serve
from tests.live.conftest import write_prompts as write

pytestmark = [pytest.mark.live, pytest.mark.slow, needs_sglang]


@pytest.fixture(scope="module")
def hosts(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    """Node 0, which answers, and node 1. Node 1's capture directory is a link to node 0's: the shared disk."""
    base = tmp_path_factory.mktemp("hosts")
    (base / "capture0").mkdir()
    (base / "capture1").symlink_to(base / "capture0")
    meeting = f"127.0.0.1:{free_port()}"
    own = [
        Host(
            serve(models, "--nnodes", "2", "--node-rank", str(node), "--dist-init-addr", meeting),
            base / f"capture{node}",
            base / f"node{node}.log",
        )
        for node in range(2)
    ]
    try:
        for host in own:
            host.start()
        own[0].wait()
        yield own
    finally:
        for host in own:
            host.stop()


def dump(hosts: list[Host], output: Path, *options: str) -> int:
    lines = [{"id": label, "token_ids": token_ids} for label, token_ids in TEXTS]
    prompts = write(output.with_suffix(".jsonl"), *lines)
    where = ["--server", hosts[0].server.url, "--capture-dir", str(hosts[0].capture_dir), "--prompts", str(prompts)]
    return main(["dump", "serving", "-o", str(output), *where, *options])


def check(found: Dump, reference: States) -> None:
    assert found.ranks == (0, 1)
    assert found.facts.missing_ranks == ()
    assert found.facts.engine is not None
    assert (found.facts.engine.tp_size, found.facts.engine.flags["nnodes"]) == (2, 2)
    for label, token_ids in TEXTS:
        check_prefill(found, label, token_ids, reference)
        accepted, trees, _ = check_trees(found, label, token_ids, reference)
        assert accepted > trees > 0


def test_with_a_shared_disk_all_ranks_are_found_and_without_one_they_are_merged(
    hosts: list[Host], tmp_path: Path, reference: States, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dump(hosts, tmp_path / "shared") == 0
    check(open_dump(tmp_path / "shared"), reference)

    # From here on node 1 has a disk of its own; its hello is where it would have been written.
    (hello,) = [hello for hello in read_hellos(hosts[0].capture_dir) if hello.rank == 1]
    hosts[1].capture_dir.unlink()
    hosts[1].capture_dir.mkdir()
    name = f"hello-{hello.process}.json"
    (hosts[0].capture_dir / name).rename(hosts[1].capture_dir / name)

    capsys.readouterr()
    assert dump(hosts, tmp_path / "refused") == 4
    said = capsys.readouterr().err
    assert "the capture plugin runs on rank 0 and not on rank 1 of 2" in said
    assert "--allow-missing-ranks" in said
    assert not (tmp_path / "refused").exists()

    assert dump(hosts, tmp_path / "part", "--allow-missing-ranks") == 0
    part = open_dump(tmp_path / "part")
    assert (part.ranks, part.facts.missing_ranks) == ((0,), (1,))
    shutil.copytree(hosts[1].capture_dir, tmp_path / "copy")
    assert main(["dump", "merge", "-o", str(tmp_path / "merged"), str(tmp_path / "part"), str(tmp_path / "copy")]) == 0
    merged = open_dump(tmp_path / "merged")
    check(merged, reference)
    count = len(merged.tokens.token_ids)
    for slot in range(3):
        assert torch.equal(merged.read(0, f"slot.{slot}", 0, count), part.read(0, f"slot.{slot}", 0, count))
