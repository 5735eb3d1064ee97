from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_parity.captures import recording, site
from eagle_parity.captures import server as module
from eagle_parity.captures.forwards import accepted_rows, tree_parents
from eagle_parity.captures.launch import check_port_free, launched, listen_address
from eagle_parity.captures.prompts import Prompt
from eagle_parity.captures.recording import Recording
from eagle_parity.captures.server import HttpTransport, MemoryTransport, Reply, Server, Unreachable, connect
from eagle_parity.captures.sglang import capture, estimate
from eagle_parity.captures.site import Site, check
from eagle_parity.captures.spool import CAPTURE_DIR, Header, Hello, is_end, write_hello
from eagle_parity.captures.writer import SpoolWriter
from eagle_parity.cli.main import main
from eagle_parity.dump import DumpWriter, open_dump
from eagle_parity.errors import EnvironmentFailure, InputError, UsageError
from eagle_parity.records import Phase, Sample

INFO = {"version": "0.5.23", "tp_size": 2, "speculative_algorithm": "EAGLE3", "model_path": "/models/tiny"}


def answering(answer: Callable[[str, str, Any], Reply]) -> Server:
    return Server("http://server:30000", 5.0, MemoryTransport(answer))


def always(status: int, body: object) -> Server:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return answering(lambda *_: Reply(status, raw))


def refusing(*_: object) -> Reply:
    raise Unreachable("Connection refused")


class TestServer:
    def test_info(self) -> None:
        assert always(200, INFO).info()["version"] == "0.5.23"

    def test_info_under_its_old_name(self) -> None:
        def answer(_: str, path: str, __: object) -> Reply:
            return Reply(404, b"") if path == "/server_info" else Reply(200, b'{"version": "0.5.9", "tp_size": 1}')

        old = answering(answer)
        assert old.info()["version"] == "0.5.9"

    def test_down(self) -> None:
        with pytest.raises(EnvironmentFailure, match=r"no server answers at http://server:30000: Connection refused"):
            answering(refusing).info()
        assert not answering(refusing).healthy()

    @pytest.mark.parametrize("body", [b"<html>hello</html>", b"[]", b'{"object": "list"}'])
    def test_not_an_sglang(self, body: bytes) -> None:
        with pytest.raises(EnvironmentFailure, match=r"answers, but not as an SGLang server does"):
            always(200, body).info()

    @pytest.mark.parametrize(
        ("body", "said"),
        [
            ({"error": {"message": "The input is too long"}}, "The input is too long"),
            ({"object": "error", "message": "no such model"}, "no such model"),
            ({"error": "rid should be a string"}, "rid should be a string"),
            (b"plain  text\n", "plain text"),
            (b"", "(empty answer)"),
        ],
    )
    def test_a_rejection_in_the_server_s_own_words(self, body: object, said: str) -> None:
        with pytest.raises(EnvironmentFailure) as caught:
            always(400, body).generate({"rid": "r1"})
        assert caught.value.message == f"http://server:30000 rejected request r1 (HTTP 400): {said}"

    def test_unauthorised(self) -> None:
        with pytest.raises(EnvironmentFailure) as caught:
            always(401, {"error": "Unauthorized"}).info()
        assert module.API_KEY in caught.value.fix

    def test_a_failure_of_the_server(self) -> None:
        with pytest.raises(EnvironmentFailure, match=r"failed on request r1 \(HTTP 500\): boom"):
            always(500, {"message": "boom"}).chat({"rid": "r1"})

    def test_no_answer_in_time(self) -> None:
        def slow(*_: object) -> Reply:
            raise Unreachable("no answer within 5 s")

        with pytest.raises(EnvironmentFailure, match=r"/generate: request r1 got no answer: no answer within 5 s") as e:
            answering(slow).generate({"rid": "r1"})
        assert "--timeout" in e.value.fix

    def test_an_answer_that_is_no_json(self) -> None:
        with pytest.raises(EnvironmentFailure, match=r"no JSON object: <html>"):
            always(200, b"<html>").generate({"rid": "r1"})

    @pytest.mark.parametrize(
        ("given", "url"),
        [("host:1", "http://host:1"), ("http://[::1]:5/", "http://[::1]:5"), ("https://h", "https://h")],
    )
    def test_addresses(self, given: str, url: str) -> None:
        assert connect(given).url == url

    @pytest.mark.parametrize("given", ["", "ftp://x", "http://", "host:port", "http://h:99999999"])
    def test_no_addresses(self, given: str) -> None:
        with pytest.raises(UsageError, match=r"is no address of a server"):
            connect(given)


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/slow":
            time.sleep(1.0)
        self.send_response(404 if self.path == "/gone" else 200)
        self.end_headers()
        self.wfile.write(str(self.headers.get("Authorization")).encode())

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def listening() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}"
        finally:
            http.shutdown()
            thread.join()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class TestHttpTransport:
    def test_statuses_and_headers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # the client goes past it
        with listening() as url:
            assert HttpTransport().send("GET", url + "/x", None, {"Authorization": "k"}, 5) == Reply(200, b"k")
            assert HttpTransport().send("GET", url + "/gone", None, {}, 5).status == 404
            assert connect(url, api_key="secret")._send("GET", "/x", None, 5).body == b"Bearer secret"

    def test_timeout(self) -> None:
        with listening() as url, pytest.raises(Unreachable, match=r"no answer within 0\.2 s"):
            HttpTransport().send("GET", url + "/slow", None, {}, 0.2)

    def test_refused(self) -> None:
        with pytest.raises(Unreachable, match=r"Connection refused"):
            HttpTransport().send("GET", f"http://127.0.0.1:{free_port()}", None, {}, 1)


class TestLaunch:
    @pytest.mark.parametrize(
        ("command", "environ", "address"),
        [
            (["serve"], {}, ("127.0.0.1", 30000)),
            (["serve"], {"PORT": "31"}, ("127.0.0.1", 31)),
            (["serve", "--port", "32", "--host", "0.0.0.0"], {"PORT": "31"}, ("127.0.0.1", 32)),
            (["serve", "--port=33", "--host=::1"], {}, ("::1", 33)),
            (["serve", "--port", "1", "--port", "34"], {}, ("127.0.0.1", 34)),
        ],
    )
    def test_address(self, command: list[str], environ: dict[str, str], address: tuple[str, int]) -> None:
        assert listen_address(command, environ) == address

    @pytest.mark.parametrize("port", ["0", "x", "70000"])
    def test_no_port(self, port: str) -> None:
        with pytest.raises(UsageError, match=rf"should be 1 to 65535, is '{port}'"):
            listen_address(["serve", "--port", port], {})

    def test_a_taken_port(self) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            with pytest.raises(EnvironmentFailure, match=rf"port {port} on 127\.0\.0\.1 is taken"):
                check_port_free("127.0.0.1", port)

    def serve(self, port: int) -> list[str]:
        """A server that is healthy at once, writes its environment to its log, and has a stubborn child."""
        code = (
            "import http.server, os, subprocess, sys, signal\n"
            "child = subprocess.Popen([sys.executable, '-c', 'import signal, time; "
            "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)'])\n"
            f"print(child.pid, file=open(os.environ['{CAPTURE_DIR}'] + '/child', 'w'))\n"
            "class H(http.server.BaseHTTPRequestHandler):\n"
            "    def do_GET(self):\n"
            "        self.send_response(200); self.end_headers()\n"
            f"http.server.HTTPServer(('127.0.0.1', {port}), H).serve_forever()\n"
        )
        return [sys.executable, "-c", code, "--port", str(port)]

    def test_started_with_a_private_directory_and_stopped_with_its_children(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(CAPTURE_DIR, "/somewhere/else")
        said: list[str] = []
        with launched(self.serve(free_port()), timeout=20, say=said.append) as (server, directory):
            assert server.healthy()
            assert directory.stat().st_mode & 0o777 == 0o700
            child = int((directory / "child").read_text())
            os.kill(child, 0)
        assert "server starting on 127.0.0.1" in said[0]
        assert not directory.exists()
        assert not server.healthy()
        assert gone(child)

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
    def test_a_signal_to_us_stops_the_server(self, number: signal.Signals) -> None:
        def interrupted() -> None:
            with launched(self.serve(free_port()), timeout=20) as (_, directory):
                children.append(int((directory / "child").read_text()))
                os.kill(os.getpid(), number)
                time.sleep(5)

        children: list[int] = []
        before = signal.getsignal(number)
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert signal.getsignal(number) is before
        assert gone(children[0])

    def test_one_that_dies_shows_its_log(self) -> None:
        command = [sys.executable, "-c", "print('no GPU here'); raise SystemExit(3)", "--port", str(free_port())]
        with (
            pytest.raises(EnvironmentFailure, match=r"ended with status 3 before it was ready.*\n    no GPU here"),
            launched(command, timeout=20),
        ):
            pass

    def test_one_that_is_never_ready(self) -> None:
        command = [sys.executable, "-c", "import time; time.sleep(60)", "--port", str(free_port())]
        begin = time.monotonic()
        with (
            pytest.raises(EnvironmentFailure, match=r"was not ready at http://127\.0\.0\.1:\d+ after 0\.5 s"),
            launched(command, timeout=0.5),
        ):
            pass
        assert time.monotonic() - begin < 10

    def test_one_that_dies_while_it_is_asked(self) -> None:
        def ask() -> None:
            with launched(self.serve(free_port()), timeout=20) as (_, directory):
                parent = int(Path(f"/proc/{(directory / 'child').read_text().strip()}/stat").read_text().split()[3])
                os.kill(parent, signal.SIGKILL)
                time.sleep(0.5)
                raise EnvironmentFailure("no answer", fix="x")

        with pytest.raises(EnvironmentFailure, match=r"no answer\nThe server has ended\. The end of its log:"):
            ask()

    def test_a_command_that_does_not_exist(self) -> None:
        with (
            pytest.raises(UsageError, match=r"cannot be run: /no/such/program: No such file"),
            launched(["/no/such/program", "--port", str(free_port())], timeout=1),
        ):
            pass


def gone(pid: int) -> bool:
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


# --------------------------------------------------------------------------- a server in memory, with its plugin

HIDDEN = 4
TREE = {"child": [1, 3, -1, -1], "sibling": [-1, 2, -1, -1]}  # 0 -> (1 -> 3), 2


@dataclass
class Engine:
    """SGLang in memory: answers requests, and its ranks leave records as the plugin does."""

    directory: Path
    ranks: tuple[int, ...] = (0, 1)
    info: dict[str, Any] = field(default_factory=lambda: dict(INFO))
    chunk: int = 100
    cached: int = 0
    verifies: int = 2
    draft_seen: bool = True
    draft_differs: bool = False
    silent: tuple[int, ...] = ()
    lose: str | None = None
    drop: Callable[[int, Header], bool] = lambda rank, header: False
    seen: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.writers = {rank: SpoolWriter(self.directory, f"p{rank}", rank) for rank in self.ranks}
        self.hello()

    def hello(self, **changes: Any) -> None:
        facts = {"architecture": "LlamaForCausalLM", "hidden_size": HIDDEN, "num_layers": 6, "vocab_size": 100}
        for rank in self.ranks:
            hello = Hello(
                f"p{rank}",
                1,
                "host",
                float(rank),
                {"sglang": "0.5.23"},
                rank=rank,
                tp_size=2,
                model=facts | {"dtype": "float32"},
                draft={"declared_ids": [1, 2]},
            )
            write_hello(self.directory, replace(hello, **changes))

    @property
    def server(self) -> Server:
        return Server("http://server", 5.0, MemoryTransport(self.answer))

    def answer(self, method: str, path: str, body: Any) -> Reply:
        if path == "/server_info":
            return Reply(200, json.dumps(self.info).encode())
        self.seen.append({"path": path} | body)
        ids = body.get("input_ids") or [1, 2, 3]
        out = self.run(body["rid"], ids)
        meta = {"prompt_tokens": len(ids), "cached_tokens": self.cached, "spec_accept_length": 2.0, "spec_verify_ct": 3}
        if path == "/v1/chat/completions":
            return Reply(200, json.dumps({"choices": [{"response_token_ids": out, "meta_info": meta}]}).encode())
        return Reply(200, json.dumps({"output_ids": out, "meta_info": meta}).encode())

    def run(self, rid: str, ids: Sequence[int]) -> list[int]:
        if is_end(rid):
            for rank in set(self.ranks) - set(self.silent):
                self.writers[rank].submit(Header(rid, "end"), {})
            return [50]
        begin = min(self.cached, len(ids) - 1)
        while begin < len(ids):
            end = min(begin + self.chunk, len(ids))
            following = [*ids[begin + 1 : end], 50]
            self.forward(rid, "prefill", ids[begin:end], range(begin, end), following)
            begin = end
        out, position = [50], len(ids)
        for _ in range(self.verifies):  # each accepts row 0, then row 2, and adds token 60
            tokens = [out[-1], 51, 52, 53]
            self.forward(rid, "verify", tokens, [position, position + 1, position + 1, position + 2], [52, 60, 0, 0])
            out += [52, 60]
            position += 2
        return out

    def forward(
        self, rid: str, phase: Phase, ids: Sequence[int], positions: Sequence[int], following: Sequence[int]
    ) -> None:
        for rank, writer in self.writers.items():
            if rank in self.silent:
                continue
            header = Header(rid, "target", phase, batch=1, forward_tokens=len(ids), graph=phase == "verify")
            if self.lose and phase == "verify":
                writer.submit(replace(header, kind="lost", reason=self.lose), {})
                continue
            if self.drop(rank, header):
                continue
            rows = zip(ids, positions, strict=True)
            states = torch.tensor([[t + p / 10 + j / 100 for j in range(2 * HIDDEN)] for t, p in rows])
            tensors = {"hidden": states, "token_ids": torch.tensor(ids), "positions": torch.tensor(positions)}
            if phase == "verify":
                tensors |= {name: torch.tensor(links) for name, links in TREE.items()}
            writer.submit(header, tensors)
            if not self.draft_seen:
                continue
            given = states if phase == "prefill" else states[[0, 2, 2, 3]]
            given = given + 1 if self.draft_differs else given.clone()
            tensors = {"hidden": given, "token_ids": torch.tensor(list(following))}
            if phase == "verify":
                tensors["accepted"] = torch.tensor([2])
            writer.submit(replace(header, kind="draft", graph=None), tensors)


def probe(engine: Engine, *prompts: Prompt, **options: Any) -> tuple[Recording, list[Sample]]:
    recording = capture(check(engine.server, engine.directory), prompts or (PROMPT,), **options)
    samples = list(recording.stream.samples)
    recording.discard()
    return recording, samples


def nth(number: int) -> Callable[[int, Header], bool]:
    """Drops that forward of each rank, counted from 1."""
    count = {0: 0, 1: 0}

    def drop(rank: int, header: Header) -> bool:
        count[rank] += 1
        return count[rank] == number

    return drop


PROMPT = Prompt("first", token_ids=(10, 11, 12, 13, 14))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "_HELLO_SECONDS", 0.2)
    monkeypatch.setattr(recording, "_RECORD_SECONDS", 2.0)  # the writers wait for quiet, and a busy machine is slow


class TestCheck:
    def test_facts(self, tmp_path: Path) -> None:
        engine = Engine(tmp_path)
        engine.info |= {
            "speculative_draft_model_path": "owner/draft",
            "dp_size": 1,
            "disable_radix_cache": True,
            "cuda_graph_config": {"decode": {"backend": "full", "bs": [1, 2]}},
            "speculative_token_map": "/models/hot.pt",
            "enforce_disable_flashinfer_allreduce_fusion": True,
            "random_seed": 1,
        }
        site = check(engine.server, tmp_path)
        assert (site.model.name, site.model.hidden_size, site.model.dtype) == ("tiny", HIDDEN, "float32")
        assert site.draft is not None
        assert (site.draft.name, site.draft.declared_ids) == ("owner/draft", (1, 2))
        assert (site.engine.version, site.engine.tp_size, site.engine.dp_size) == ("0.5.23", 2, 1)
        assert site.engine.flags == {
            "speculative_algorithm": "EAGLE3",
            "disable_radix_cache": True,
            "cuda_graph_config": {"decode": "full"},
            "speculative_token_map": "hot.pt",  # no path of the machine
            "enforce_disable_flashinfer_allreduce_fusion": True,
        }

    def test_no_draft(self, tmp_path: Path) -> None:
        engine = Engine(tmp_path, info=INFO | {"speculative_algorithm": None})
        with pytest.raises(EnvironmentFailure, match=r"http://server serves tiny without a draft"):
            check(engine.server, tmp_path)

    def test_no_plugin(self, tmp_path: Path) -> None:
        engine = Engine(tmp_path, ranks=())
        with pytest.raises(EnvironmentFailure, match=r"has left no sign of the capture plugin in ") as caught:
            check(engine.server, tmp_path)
        assert caught.value.fix.startswith("restart the server with the plugin: run `pip install eagle-parity`")
        assert f"start it with {CAPTURE_DIR}=DIR" in caught.value.fix
        with pytest.raises(EnvironmentFailure) as caught:
            check(engine.server, tmp_path, started_here=True)
        assert "restart" not in caught.value.fix

    def test_a_broken_contract(self, tmp_path: Path) -> None:
        engine = Engine(tmp_path)
        engine.hello(error="it lacks 'rids' in x:ForwardBatch")
        with pytest.raises(
            EnvironmentFailure,
            match=r"the capture plugin does not fit the server's SGLang 0\.5\.23: it lacks 'rids' in x:ForwardBatch",
        ):
            check(engine.server, tmp_path)

    def test_a_version_without_plugins_is_told_its_own_way(self, tmp_path: Path) -> None:
        engine = Engine(tmp_path, ranks=(), info=INFO | {"version": "0.5.10.post1"})
        with pytest.raises(EnvironmentFailure) as caught:
            check(engine.server, tmp_path, started_here=True)
        assert '"hook_factory": "eagle_parity.captures.plugin:hook_factory"' in caught.value.fix

    def test_a_version_that_is_too_old(self, tmp_path: Path) -> None:
        engine = Engine(tmp_path, info=INFO | {"version": "0.5.9"})
        with pytest.raises(EnvironmentFailure, match=r"runs SGLang 0\.5\.9, which lacks request ids") as caught:
            check(engine.server, tmp_path)
        assert caught.value.fix.startswith("serve with SGLang 0.5.10 or later")

    def test_a_rank_without_the_plugin(self, tmp_path: Path) -> None:
        engine = Engine(tmp_path, ranks=(0,))
        with pytest.raises(EnvironmentFailure, match=r"the capture plugin runs on rank 0 and not on rank 1 of 2"):
            check(engine.server, tmp_path)

    def test_a_hello_of_an_earlier_server_is_outdated_by_a_newer(self, tmp_path: Path) -> None:
        engine = Engine(tmp_path)
        write_hello(tmp_path, Hello("old", 1, "host", -5.0, rank=0, tp_size=2, error="it lacks x"))
        assert check(engine.server, tmp_path).hellos[0].process == "p0"

    @pytest.mark.parametrize(
        "sizes",
        [{"dp_size": 2}, {"dp_size": 1, "attn_dp_size": 2}],  # as before 0.5.23, as since
    )
    def test_only_replica_0_of_a_data_parallel_server(self, tmp_path: Path, sizes: dict[str, int]) -> None:
        engine = Engine(tmp_path, info=INFO | {"enable_dp_attention": True, "tp_size": 4} | sizes)
        write_hello(tmp_path, Hello("x", 1, "host", 9.0, rank=2, tp_size=4, dp_rank=1))
        assert list(check(engine.server, tmp_path).hellos) == [0, 1]


class TestCapture:
    @pytest.mark.parametrize("sizes", [{"dp_size": 2}, {"dp_size": 1, "attn_dp_size": 2}])
    def test_every_probe_goes_to_replica_0(self, tmp_path: Path, sizes: dict[str, int]) -> None:
        engine = Engine(tmp_path, info=INFO | {"enable_dp_attention": True, "tp_size": 4} | sizes)
        probe(engine)
        assert [request["routed_dp_rank"] for request in engine.seen] == [0, 0]

    def test_prefill_first_then_verify_on_both_ranks(self, tmp_path: Path) -> None:
        recording, samples = probe(Engine(tmp_path), PROMPT, Prompt("second", token_ids=(20, 21)))
        assert [(s.id, s.phase, len(s.token_ids)) for s in samples] == [
            ("first", "prefill", 5),
            ("second", "prefill", 2),
            *[("first", "verify", 4)] * 2,
            *[("second", "verify", 4)] * 2,
        ]
        assert recording.phases == {"prefill": 7, "verify": 16}
        assert recording.stream.plan.tokens == 23
        first = samples[0]
        assert (list(first.token_ids), list(first.positions)) == ([10, 11, 12, 13, 14], [0, 1, 2, 3, 4])
        assert (first.cached_tokens, first.graph, first.forward_tokens) == (0, False, 5)
        for rank in (0, 1):
            assert first.tensors[rank]["slot.0"][1].tolist() == pytest.approx([11.1, 11.11, 11.12, 11.13])
            assert first.tensors[rank]["slot.1"][1].tolist() == pytest.approx([11.14, 11.15, 11.16, 11.17])
        verify = samples[2]
        assert (verify.graph, verify.cached_tokens) == (True, None)
        assert (list(verify.parents or ()), list(verify.accepted or ())) == ([-1, 0, 0, 1], [1, 0, 1, 0])
        facts = recording.facts()
        assert (facts.slots, facts.slot_boundaries) == (2, None)
        assert facts.draft is not None
        assert (facts.draft.num_slots, facts.draft.spec_accept_length) == (2, 2.0)
        # (5 + 2 prefill rows and 2 accepted rows in each of 4 verify forwards) on 2 ranks
        assert facts.source.detail == (
            "slots are what the draft was given, bitwise what the target gave in all 30 rows compared, over all ranks"
        )
        assert recording.messages == ()

    def test_what_it_writes_is_a_dump(self, tmp_path: Path) -> None:
        engine = Engine(tmp_path / "spool") if (tmp_path / "spool").mkdir() is None else None
        assert engine is not None
        recording = capture(check(engine.server, engine.directory), [PROMPT])
        with DumpWriter(tmp_path / "dump", recording.stream.plan) as writer:
            for sample in recording.stream.samples:
                writer.add(sample)
            writer.revise(recording.facts())
        dump = open_dump(tmp_path / "dump")
        assert (dump.ranks, dump.facts.slots, len(dump.tokens.token_ids)) == ((0, 1), 2, 13)

    def test_requests_are_greedy_and_outside_the_shared_prefix_cache(self, tmp_path: Path) -> None:
        engine = Engine(tmp_path)
        probe(engine, PROMPT, Prompt("t", text="hi"), Prompt("m", messages=({"role": "user", "content": "hi"},)))
        ids, text, chat, end = engine.seen
        assert ids["input_ids"] == list(PROMPT.token_ids or ())
        assert (text["path"], text["text"]) == ("/generate", "hi")
        assert ids["sampling_params"] == {"temperature": 0, "max_new_tokens": 8}
        assert (chat["path"], chat["messages"]) == ("/v1/chat/completions", [{"role": "user", "content": "hi"}])
        assert (chat["temperature"], chat["max_tokens"]) == (0, 8)
        assert len({request["rid"] for request in engine.seen}) == 4
        assert all(request["extra_key"] == request["rid"] for request in engine.seen)
        assert (end["input_ids"], end["sampling_params"]["max_new_tokens"]) == ([10], 1)

    def test_chunked_prefill_is_one_sample_a_forward(self, tmp_path: Path) -> None:
        _, samples = probe(Engine(tmp_path, chunk=2, verifies=0))
        assert [list(s.positions) for s in samples] == [[0, 1], [2, 3], [4]]

    def test_a_cached_prefix_is_reported_and_never_silently_short(self, tmp_path: Path) -> None:
        engine = Engine(tmp_path, cached=3)
        recording, samples = probe(engine, warm_cache=True)
        assert "extra_key" not in engine.seen[0]
        assert (samples[0].cached_tokens, list(samples[0].positions)) == (3, [3, 4])
        assert recording.messages[0].startswith("warning: 3 tokens of 1 prompts came from the server's prefix cache")

    def test_rows_missing_without_being_cached_are_an_error(self, tmp_path: Path) -> None:
        engine = Engine(tmp_path, chunk=2, drop=nth(1))
        with pytest.raises(
            EnvironmentFailure,
            match=r"first: of 5 tokens, those at positions 2\.\.4 were recorded, and the server took 0 from its cache",
        ):
            probe(engine)

    def test_a_gap_in_the_prompt(self, tmp_path: Path) -> None:
        engine = Engine(tmp_path, chunk=2, drop=nth(2))
        with pytest.raises(EnvironmentFailure, match=r"the prefill rows at positions 2\.\.3 were not recorded"):
            probe(engine)

    def test_a_rank_that_writes_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(EnvironmentFailure, match=r"rank 1 did not finish .* \(rank 0 wrote something\)"):
            probe(Engine(tmp_path, silent=(1,)))

    def test_the_directory_of_another_server(self, tmp_path: Path) -> None:
        with pytest.raises(EnvironmentFailure, match=r"no rank wrote a record .* although the server answered"):
            probe(Engine(tmp_path, silent=(0, 1)))

    def test_lost_records(self, tmp_path: Path) -> None:
        with pytest.raises(
            EnvironmentFailure,
            match=r"the capture is incomplete: ranks 0, 1 lost 4 records; the first: disk full",
        ):
            probe(Engine(tmp_path, lose="disk full"))

    def test_a_failed_capture_leaves_no_records(self, tmp_path: Path) -> None:
        with pytest.raises(EnvironmentFailure):
            probe(Engine(tmp_path, lose="x"))
        assert list(tmp_path.glob("*.safetensors")) == []

    def test_ranks_with_different_forwards(self, tmp_path: Path) -> None:
        engine = Engine(tmp_path, drop=lambda rank, header: rank == 1 and header.phase == "verify")
        with pytest.raises(
            EnvironmentFailure, match=r"first: the ranks recorded different forwards: rank 0 3, rank 1 1"
        ):
            probe(engine)

    def test_a_draft_that_was_given_something_else(self, tmp_path: Path) -> None:
        recording, samples = probe(Engine(tmp_path, draft_differs=True))
        assert samples[0].tensors[0]["slot.0"][0].tolist() == pytest.approx([11.0, 11.01, 11.02, 11.03])
        verify = samples[1].tensors[0]["slot.0"]
        assert [int(value) for value in verify[:, 0]] == [51, 51, 53, 53]  # rows 0 and 2 are what the draft was given
        assert recording.notes.unequal == recording.notes.compared == 18
        assert "is not what the target gave in 18 of 18 rows" in str(recording.facts().source.detail)

    def test_without_the_draft_s_input_the_response_tells_what_was_accepted(self, tmp_path: Path) -> None:
        recording, samples = probe(Engine(tmp_path, draft_seen=False))
        assert list(samples[1].accepted or ()) == [1, 0, 1, 0]
        assert recording.facts().source.detail == (
            "slots are what the target gave; what the draft was given was not seen"
        )

    def test_tokens_of_another_model(self, tmp_path: Path) -> None:
        engine = Engine(tmp_path)
        with pytest.raises(InputError, match=r"prompt big: token 1 has id 100, the server's model has 100 tokens"):
            probe(engine, Prompt("big", token_ids=(5, 100)))
        assert engine.seen == []

    def test_nothing_to_send(self, tmp_path: Path) -> None:
        site = check(Engine(tmp_path).server, tmp_path)
        with pytest.raises(UsageError, match=r"there is nothing to send"):
            capture(site, [])

    def test_a_rejected_prompt_is_named(self, tmp_path: Path) -> None:
        engine = Engine(tmp_path)
        site = replace(check(engine.server, tmp_path), server=always(400, {"error": {"message": "too long"}}))
        with pytest.raises(EnvironmentFailure, match=r"prompt first: .* rejected request .*: too long"):
            capture(site, [PROMPT])

    def test_shards_are_as_wide_as_they_are(self, tmp_path: Path) -> None:
        engine = Engine(tmp_path)
        facts = {"hidden_size": 3 * HIDDEN, "vocab_size": 100}
        engine.hello(model=facts)
        recording, _ = probe(engine)
        assert [spec.width for spec in recording.stream.plan.tensors[0]] == [HIDDEN, HIDDEN]

    def test_estimate(self, tmp_path: Path) -> None:
        site: Site = check(Engine(tmp_path).server, tmp_path)
        plan = estimate(site, [PROMPT, Prompt("t", text="abcdef")], 8)
        assert plan.tokens == (5 + 8) + (3 + 8)
        assert [spec.width for spec in plan.tensors[1]] == [HIDDEN, HIDDEN]


class TestTrees:
    def test_parents(self) -> None:
        assert tree_parents([1, 3, -1, -1], [-1, 2, -1, -1]) == (-1, 0, 0, 1)

    def test_links_in_a_circle_end(self) -> None:
        assert len(tree_parents([1, 0], [1, 0])) == 2

    @pytest.mark.parametrize(
        ("path", "accepted"),
        [([], (1, 0, 0, 0)), ([8], (1, 0, 1, 0)), ([7, 9], (1, 1, 0, 1)), ([7, 8], (1, 1, 0, 0)), ([5], (1, 0, 0, 0))],
    )
    def test_accepted(self, path: list[int], accepted: tuple[int, ...]) -> None:
        assert accepted_rows([6, 7, 8, 9], [-1, 0, 0, 1], path) == accepted


class TestCommandLine:
    """What is refused, in which order: everything that can be checked is, before a server is started or asked."""

    def run(self, capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str]:
        code = main(["dump", "serving", *map(str, args)])
        return code, capsys.readouterr().err

    @pytest.fixture
    def prompts(self, tmp_path: Path) -> Path:
        path = tmp_path / "prompts.jsonl"
        path.write_text('{"token_ids": [5, 6]}\n')
        return path

    @pytest.mark.parametrize(
        ("args", "said"),
        [
            ([], "give either --server URL or --launch -- CMD…"),
            (["--server", "x", "--launch", "--", "serve"], "not both"),
            (["--launch"], "--launch needs the server's command"),
            (["--server", "x", "--", "serve"], "unexpected argument 'serve'"),
            (["--server", "h:1"], "give either --tokens-from DUMP or --prompts FILE"),
        ],
    )
    def test_usage(self, tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], said: str) -> None:
        code, err = self.run(capsys, "-o", tmp_path / "out", *args)
        assert code == 2
        assert said in err

    def test_the_target_is_checked_first(
        self, tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        code, err = self.run(capsys, "-o", tmp_path, "--prompts", prompts, "--launch", "--", "/no/such/program")
        assert code == 2
        assert "exists and is not empty" in err

    def test_then_the_prompts(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        code, err = self.run(
            capsys, "-o", tmp_path / "out", "--prompts", tmp_path / "none", "--launch", "--", "/no/such/program"
        )
        assert code == 2
        assert "prompts cannot be read" in err

    def test_then_the_dump(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        code, err = self.run(
            capsys, "-o", tmp_path / "out", "--tokens-from", tmp_path / "none", "--launch", "--", "/no/such/program"
        )
        assert code == 2
        assert "does not exist" in err

    def test_a_taken_port(self, tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            code, err = self.run(
                capsys, "-o", tmp_path / "out", "--prompts", prompts, "--launch", "--", "serve", "--port", port
            )
        assert code == 4
        assert f"port {port} on 127.0.0.1 is taken" in err

    def test_a_server_that_is_down(self, tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
        code, err = self.run(
            capsys,
            *("-o", tmp_path / "out", "--prompts", prompts),
            *("--server", f"127.0.0.1:{free_port()}", "--capture-dir", tmp_path),
        )
        assert code == 4
        assert "no server answers at" in err
        assert not (tmp_path / "out").exists()

    def test_a_server_whose_capture_directory_is_not_known(
        self, tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv(CAPTURE_DIR, raising=False)
        monkeypatch.setattr(module.HttpTransport, "send", lambda *_: Reply(200, json.dumps(INFO).encode()))
        code, err = self.run(capsys, "-o", tmp_path / "out", "--prompts", prompts, "--server", "h:1")
        assert code == 4
        assert "http://h:1 runs SGLang 0.5.23, but neither --capture-dir nor EAGLE_PARITY_CAPTURE_DIR says" in err
        assert "fix: restart the server with the plugin" in err

    def test_too_large(
        self, tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "spool").mkdir()
        engine = Engine(tmp_path / "spool")
        monkeypatch.setattr(
            module.HttpTransport,
            "send",
            lambda _, method, url, body, *__: engine.answer(method, url.removeprefix("http://h:1"), body),
        )
        options = ("-o", tmp_path / "out", "--prompts", prompts, "--server", "h:1", "--capture-dir", tmp_path / "spool")
        code, err = self.run(capsys, *options, "--max-bytes", 100)
        assert code == 2
        assert "the dump would take" in err
        assert engine.seen == []

    def test_success(
        self, tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "spool").mkdir()
        engine = Engine(tmp_path / "spool")
        monkeypatch.setattr(
            module.HttpTransport,
            "send",
            lambda _, method, url, body, *__: engine.answer(
                method, url.removeprefix("http://h:1"), body and json.loads(body)
            ),
        )
        options = ("-o", tmp_path / "out", "--prompts", prompts, "--server", "h:1", "--capture-dir", tmp_path / "spool")
        assert main(["dump", "serving", *map(str, options)]) == 0
        assert capsys.readouterr().out == (
            f"{tmp_path}/out: 2 ranks, 2 slots of 4 F32, 2 prefill + 8 verify tokens, 890 B, accept length 2.00\n"
            "slots are what the draft was given, bitwise what the target gave in all 12 rows compared, over all ranks\n"
        )
        assert list((tmp_path / "spool").glob("*.safetensors")) == []


def test_the_client_imports_neither_torch_nor_sglang() -> None:
    code = (
        "import sys, eagle_parity.captures.sglang, eagle_parity.captures.server, eagle_parity.cli.dump_serving;"
        "assert not {'torch', 'sglang', 'safetensors', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
