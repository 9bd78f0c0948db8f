"""``python -m dspark bench`` against a small server that answers like the real one."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Barrier, Lock, Thread
from typing import Any

import pytest

from dspark.__main__ import main
from dspark.bench.report import figures, table, verdict
from dspark.bench.traffic import Load, Request, Sample, load_prompts, run_load
from dspark.errors import ConfigError, HostError

WAIT_SECONDS = 0.05


class FakeServer(ThreadingHTTPServer):
    """Streams ``tokens`` pieces after a pause, and knows how many requests it has served at once."""

    daemon_threads = True
    request_queue_size = 64
    status, tokens, usage = 200, 5, True
    meeting: Barrier | None = None  # answers wait until so many requests are here

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock, self.now, self.most, self.bodies = Lock(), 0, 0, []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.bodies.append((self.path, body))
            server.now += 1
            server.most = max(server.most, server.now)
        self.send_response(server.status)
        self.end_headers()
        if server.meeting is not None:
            server.meeting.wait(timeout=60)
        time.sleep(WAIT_SECONDS)
        pieces: list[dict[str, Any]] = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
        pieces += [{"choices": [{"delta": {"content": "word "}, "text": "word "}]}] * server.tokens
        pieces += [{"choices": [], "usage": {"completion_tokens": server.tokens}}] * server.usage
        for piece in pieces:
            self.wfile.write(b"data: " + json.dumps(piece).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")
        with server.lock:
            server.now -= 1


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_prompts_of_every_form(tmp_path: Path) -> None:
    lines = ['{"turns": ["one", "later"]}', '{"prompt": "two"}', '"three"', "", '{"text": "four\\u2028still"}']
    lines += ['{"turns": [{"role": "user", "content": "five"}]}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.jsonl").write_text('{"question": "other"}\n')
    (tmp_path / "c.txt").write_text("a plain line\n\n  another \n")
    assert load_prompts(tmp_path / "a.jsonl") == ["one", "two", "three", "four\u2028still", "five"]
    assert load_prompts(tmp_path)[:3] == ["one", "other", "two"]
    assert load_prompts(tmp_path / "c.txt") == ["a plain line", "another"]


@pytest.mark.parametrize("text", ['{"turns": []}', "{", '{"answer": "x"}', "7", '""'])
def test_a_line_without_a_prompt_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'"good"\n{text}\n')
    with pytest.raises(ConfigError, match=r"line 2 of .*a\.jsonl"):
        load_prompts(tmp_path / "a.jsonl")


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(ConfigError, match="no prompts"):
        load_prompts(tmp_path / "empty.txt")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_prompts(tmp_path / "missing.txt")


def test_clients_are_as_many_as_asked_and_never_pause(server: FakeServer) -> None:
    """Each answer waits for three others, so fewer clients, or one that waits for the end of a round, get none."""
    server.meeting, done = Barrier(4), []
    load = run_load(server.url, [Request(f"p{i}", 9, 0.5, True) for i in range(12)], 4, done.append)
    assert (server.most, len(load.samples), done) == (4, 12, list(range(1, 13)))
    assert all(sample.tokens == 5 for sample in load.samples)
    assert all(WAIT_SECONDS < sample.first_seconds <= sample.seconds for sample in load.samples)
    assert load.seconds > 3 * WAIT_SECONDS
    path, body = server.bodies[0]
    assert path == "/v1/chat/completions"
    assert (body["max_tokens"], body["temperature"], body["stream"]) == (9, 0.5, True)
    assert {body["messages"][0]["content"] for _, body in server.bodies} == {f"p{i}" for i in range(12)}


def test_an_interrupt_sends_nothing_more(server: FakeServer) -> None:
    def interrupt(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_load(server.url, [Request(f"p{i}", 9, 0.5, True) for i in range(500)], 4, interrupt)
    assert len(server.bodies) < 100


def test_raw_prompts_go_to_completions(server: FakeServer) -> None:
    run_load(server.url, [Request("as it is", 1, 0, False)], 1)
    path, body = server.bodies[0]
    assert (path, body["prompt"]) == ("/v1/completions", "as it is")


def test_a_server_that_refuses_or_does_not_count_is_an_error(server: FakeServer) -> None:
    server.status = 400
    with pytest.raises(HostError, match="HTTP 400"):
        run_load(server.url, [Request("x", 1, 0, True)], 1)
    server.status, server.usage = 200, False
    with pytest.raises(HostError, match="without a token count"):
        run_load(server.url, [Request("x", 1, 0, True)], 1)


def test_the_command_measures_urls_and_says_who_is_faster(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_text("one\ntwo\nthree\n")
    with FakeServer() as fast:
        fast.tokens = 500  # a hundred times as many: no pause of this process makes up for that
        Thread(target=fast.serve_forever, daemon=True).start()
        flags = ["--prompts", str(tmp_path / "prompts.txt"), "--concurrency", "1,2", "--requests", "4"]
        flags += ["--url", f"none={server.url}", "--url", f"dspark={fast.url}", "--out", str(tmp_path / "out.json")]
        assert main(["bench", *flags]) == 0
        fast.shutdown()
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert result == json.loads((tmp_path / "out.json").read_text())
    assert [(row["arm"], row["concurrency"]) for row in result["rows"]] == [
        ("none", 1), ("none", 2), ("dspark", 1), ("dspark", 2),
    ]  # fmt: skip
    assert "On this traffic DSPARK is the fastest everywhere." in out
    # Requests that warm up are sent and not counted.
    assert len(server.bodies) == 4 + 1 + 4 + 2


def load_of(rate: float, concurrency: int) -> Load:
    samples = tuple(Sample(0.1, seconds, 100) for seconds in (1.0, 2.0, 3.0))
    return Load(concurrency, 300 / rate, samples)


def test_figures_and_words() -> None:
    rows = [figures(arm, load_of(rate, 8)) for arm, rate in (("none", 100), ("builtin", 150), ("dspark", 151))]
    assert rows[0]["tok_s"] == pytest.approx(100)
    assert (rows[0]["latency_ms_p50"], rows[0]["ttft_ms_p99"]) == (pytest.approx(2000), pytest.approx(100))
    assert "equally fast" in verdict(rows)[0]
    assert "nowhere" in verdict(rows)[1]
    rows += [figures(arm, load_of(rate, 1)) for arm, rate in (("none", 100), ("dspark", 90))]
    assert "slower than none, at 0.90" in verdict(rows)[1]
    assert "nothing to compare with" in verdict([figures("dspark", load_of(5, 1))])[0]
    assert table(rows).row_count == 5


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "neither --url nor both"),
        (["--url", "localhost:3"], "ARM=http"),
        (["--concurrency", "1,x", "--url", "a=http://x"], "whole numbers"),
        (["--target", "t", "--draft", "d", "--arms", "none,other"], "required are some of"),
        (["--target", "t", "--draft", "d", "--arms", "builtin", "--device", "cpu"], "does not run"),
    ],
)
def test_bad_options_are_named(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *flags]) == 2
    assert message in capsys.readouterr().err
