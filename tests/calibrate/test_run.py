"""``python -m dspark calibrate``: what it refuses before a server starts, and servers that collect nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

import pytest

from dspark.__main__ import _parser
from dspark.calibrate.run import main
from dspark.calibrate.traffic import Traffic
from dspark.errors import ConfigError, HostError


class FakeServer(ThreadingHTTPServer):
    """Every answer is worth ten blocks."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.record: dict[str, Any] = {"mode": "static", "collected_blocks": 5}
        self.lock, self.status, self.bodies = Lock(), 200, []
        self.aborted: list[str] = []
        self.answers = Event()  # unset: no answer before every request was aborted
        self.answers.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, *args: Any) -> None:
        pass

    def answer(self, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.answer(200, {"internal_states": [{"dspark_info_record": self.server.record}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/abort_request":
            self.server.aborted.append(body["rid"])
            if len(self.server.aborted) == len(self.server.bodies):
                self.server.answers.set()
            self.answer(200, {})
            return
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.record["collected_blocks"] += 10
        self.server.answers.wait()
        self.answer(self.server.status, {})


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as running:
        Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


def calibrate(*flags: str) -> int:
    return main(_parser().parse_args(["calibrate", *flags]))


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ([], "no --url"),
        (["--target", "t"], "not both --target and --draft"),
        (["--url", "http://x", "--draft", "d"], "--url and --draft"),
        (["--url", "http://x", "--keep", "folder"], "--url and --keep"),
        (["--url", "http://x", "--server-args", "--tp 2"], "--url and --server-args"),
        (["--url", "http://x", "--blocks", "0"], "below 1"),
        (["--url", "http://x", "--temperatures", "0,warm"], "'warm'"),
        (["--url", "http://x", "--temperatures", "-1"], "'-1'"),
        (["--url", "http://x", "--out", "sts.png"], "ends in .json"),
    ],
)
def test_bad_options_are_refused(flags: list[str], text: str, tmp_path: Path) -> None:
    out = [] if "--out" in flags else ["--out", str(tmp_path / "sts.json")]
    with pytest.raises(ConfigError, match=text):
        calibrate(*flags, *out)


@pytest.mark.parametrize(("record", "text"), [({"mode": "compact"}, "mode compact"), ({}, "without this package")])
def test_a_server_that_collects_nothing_is_refused(
    server: FakeServer, record: dict[str, Any], text: str, tmp_path: Path
) -> None:
    server.record = record
    with pytest.raises(ConfigError, match=f"{text}.*SGLANG_DSPARK_STS_COLLECT_PATH"):
        calibrate("--url", server.url, "--out", str(tmp_path / "sts.json"))
    assert not server.bodies


def test_greedy_text_is_asked_for_once(server: FakeServer) -> None:
    traffic = Traffic(server.url, ["a?", "b?"], concurrency=3, tokens=7)
    assert traffic.run(0.0, 1000, lambda count: None) == len(server.bodies) * 10 == 100
    texts = [body["messages"][0]["content"] for body in server.bodies]
    assert len(set(texts)) == 10
    assert len({body["rid"] for body in server.bodies}) == len(traffic.prompt_of) == 10
    assert all((body["max_tokens"], body["temperature"]) == (7, 0.0) for body in server.bodies)


def test_sampled_text_is_asked_for_until_there_is_enough(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark.calibrate.traffic._LOOK_SECONDS", 0.01)
    seen: list[int] = []
    assert Traffic(server.url, ["a?"], concurrency=2, tokens=7).run(1.0, 200, seen.append) >= 200
    assert seen == sorted(seen)


def test_a_server_that_fails_ends_the_run(server: FakeServer) -> None:
    server.status = 500
    with pytest.raises(HostError, match="HTTP 500"):
        Traffic(server.url, ["a?"], concurrency=2, tokens=7).run(1.0, 10_000, lambda count: None)


@pytest.mark.parametrize("wanted", [10_000, 30])
def test_an_interrupt_aborts_what_is_on_its_way(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, wanted: int
) -> None:
    """Else Ctrl-C would wait for all answers, minutes of them; also where there are enough and the last ones end."""
    monkeypatch.setattr("dspark.calibrate.traffic._LOOK_SECONDS", 0.01)
    server.answers.clear()
    looks = 0

    def interrupt(count: int) -> None:
        nonlocal looks
        looks += len(server.bodies) == 3
        if looks == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Traffic(server.url, ["a?"], concurrency=3, tokens=7).run(1.0, wanted, interrupt)
    assert server.answers.wait(60)
    assert sorted(server.aborted) == sorted(body["rid"] for body in server.bodies)
