"""The serving capture against an older SGLang, real and on the CPU: what test_dump_serving.py checks for the newest.

The older SGLang lies over the environment of the newest: its wheel and the few packages that it needs besides, in a
folder of the user's cache that comes first on PYTHONPATH.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eagle_parity.captures.launch import launched
from eagle_parity.captures.server import Server
from eagle_parity.dump import Dump
from tests.live import test_dump_serving as newest
from tests.live.conftest import CHUNK, ROOT, dumper, free_port, needs_sglang, quiet_dump, serve
from tests.wheels import cache_directory, wheel

pytestmark = [pytest.mark.live, pytest.mark.slow, needs_sglang]

SHIM = ROOT / "demo" / "sglang_cpu" / "shim_0_5_14"
VERSION = "0.5.14"


def overlay() -> Path:
    """A folder with the older SGLang and what the requirements of the newest lack for it."""
    folder = cache_directory().parent / f"sglang-{VERSION}"
    complete = folder / ".complete"
    requirements = (SHIM / "requirements.txt").read_text()
    if not complete.exists() or complete.read_text() != requirements:
        shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
        subprocess.run([*command, wheel(VERSION), "-r", SHIM / "requirements.txt"], check=True)
        complete.write_text(requirements)
    return folder


@pytest.fixture(scope="module")
def site(models: Path) -> Iterator[tuple[Server, Path]]:
    path = [str(overlay()), str(SHIM), *filter(None, [os.environ.get("PYTHONPATH")])]
    with pytest.MonkeyPatch.context() as patched:
        for name, value in {
            "PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join(path),
            "SGLANG_PLUGINS": "eagle_parity,sglang_cpu_0_5_14",
            "TRITON_INTERPRET": "1",
            "TORCHDYNAMO_DISABLE": "1",
        }.items():
            patched.setenv(name, value)
        options = ["--attention-backend", "triton", "--chunked-prefill-size", str(CHUNK), "--port", str(free_port())]
        with launched(serve(models, *options), timeout=300) as started:
            yield started


@pytest.fixture(scope="module")
def dump_serving(site: tuple[Server, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Dump]:
    return dumper(site, tmp_path_factory)


@pytest.fixture(scope="module")
def quiet(dump_serving: Callable[..., Dump]) -> Dump:
    return quiet_dump(dump_serving)


def test_it_is_the_older_version(site: tuple[Server, Path]) -> None:
    assert site[0].info()["version"] == VERSION


test_the_manifest = newest.test_the_manifest
test_the_plugin_says_hello_for_every_rank = newest.test_the_plugin_says_hello_for_every_rank
test_prefill_rows = newest.test_prefill_is_stitched_and_is_what_transformers_computes
test_rows_of_the_draft_trees = newest.test_every_row_of_the_draft_trees_is_what_transformers_computes_on_its_path
