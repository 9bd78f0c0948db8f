"""Minutes of bursty mixed load on one server: nothing may crash, get lost, or grow.

    python -m benchmarks.mixed_load --target TARGET --draft DRAFT --minutes 30 --out load.json

HTTP clients send bursts of random size: prompts of 1 to 1,500 tokens, many with a common prefix; greedy, temperature,
top-p, top-k, min-p, seeds, logit biases, stop strings and tokens; whole and streamed answers of 1 to 300 tokens, native
and OpenAI; clients that go away, ``/abort_request``, and requests that must get HTTP 400. Meanwhile the budget is
pinned and released. Now and then the load pauses: the server must be idle soon, with no token in use, and its cache is
flushed. The host audits its pools after every step (``--no-audit`` switches that off) and at every pause.

Memory is compared between pauses, the last with the largest of the first third: resident memory of the scheduler
process, and GPU memory that our worker's process holds (of the other arms: what everybody uses). Before the clock
starts, the whole KV pool is written once: a CPU commits its pages by then. The last line is JSON; the exit code is 1
after a crash, a loss, a leak, growth beyond ``--allowed-growth-mib``, or an error in the server's log.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from random import Random
from typing import Any

import requests

from benchmarks import machine, servers
from benchmarks.load_memory import MemoryWatch, reserved_mib
from benchmarks.load_requests import Book, Request, RequestSource, Seen, base_texts, grown
from dspark.demo.prompts import PROMPTS
from dspark.demo.server import ServerProcess, default_device
from dspark.errors import HostError

ARMS: dict[str, dict[str, str] | None] = {"dspark": {}, "builtin": {"SGLANG_DSPARK_IMPL": "builtin"}, "none": None}
AUDIT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
POOL_FLAGS = {
    "cpu": "--max-total-tokens 6000 --max-running-requests 6 --chunked-prefill-size 256",
    "cuda": "--mem-fraction-static 0.5 --max-total-tokens 60000 --max-running-requests 64",
}
SIZES = {"cpu": (8, 200, 40), "cuda": (96, 1500, 300)}  # clients, longest prompt, longest answer
PINS = (0.1, 0.25, 0.5, 1.0, -1.0, -1.0)
ERRORS = re.compile(
    r"Traceback|leak detected|CUDA error|illegal memory|Segmentation fault|out of memory|crashed with exit code|SIGQUIT"
    r"|\bERROR\b|Exception"
)


def send(server: ServerProcess, request: Request, book: Book, silence_seconds: float) -> None:
    """One client: send the request, read what comes, and write it into the book."""
    book.send(request)
    timer = None
    try:
        if request.ending == "abort":
            timer = threading.Timer(request.after, lambda: _abort(server, request.rid))
            timer.start()
        with requests.Session() as http:
            http.trust_env = False
            options: dict[str, Any] = {"timeout": silence_seconds, "stream": request.streamed}
            with http.post(server.url + request.path, json=request.payload, **options) as response:
                seen = _read(request, response)
    except (requests.RequestException, ValueError) as error:
        seen = Seen(status=0, text=f"no answer: {type(error).__name__}")
    if timer is not None:
        timer.join()
    book.close(request, seen)


def _abort(server: ServerProcess, rid: str) -> None:
    with requests.Session() as http:
        http.trust_env = False
        try:
            http.post(server.url + "/abort_request", json={"rid": rid}, timeout=60)
        except requests.RequestException as error:
            print(f"/abort_request got no answer: {error}", file=sys.stderr)


def _read(request: Request, response: requests.Response) -> Seen:
    if response.status_code != 200:
        return Seen(response.status_code, text=response.text)
    if not request.streamed:
        return _seen(response.json())
    last = Seen(200)
    for count, line in enumerate(line for line in response.iter_lines() if line.startswith(b"data:")):
        data = line.removeprefix(b"data:").strip()
        if data != b"[DONE]":
            chunk = _seen(json.loads(data))
            last = chunk if chunk.finish or not last.finish else last  # usage may follow the last text
        if request.ending == "disconnect" and count >= request.after and not last.finish:
            return Seen(200, left=True)
    return last


def _seen(answer: dict[str, Any]) -> Seen:
    """Of a whole answer or a chunk, native or OpenAI."""
    if "error" in answer:
        code = answer["error"].get("code", 0) if isinstance(answer["error"], dict) else 0
        return Seen(int(code or 0), text=json.dumps(answer["error"]))
    if "meta_info" in answer:
        info, reason = answer["meta_info"], answer["meta_info"].get("finish_reason")
        return Seen(200, None if reason is None else reason["type"], info.get("completion_tokens"))
    choices = answer.get("choices") or [{}]
    return Seen(200, choices[0].get("finish_reason"), (answer.get("usage") or {}).get("completion_tokens"))


def loads(server: ServerProcess) -> dict[str, Any]:
    """Requests and tokens in use, as the scheduler publishes them."""
    found: dict[str, Any] = server.get("/v1/loads?include=core")["loads"][0]
    return found


def idle_point(server: ServerProcess, watch: MemoryWatch, started: float) -> dict[str, Any]:
    """Wait until nothing runs, see whether everything is free, flush the cache, and weigh the processes."""
    limit = time.monotonic() + 90  # an aborted request runs on for a few seconds
    while True:
        found = loads(server)
        busy = found["num_running_reqs"] + found["num_waiting_reqs"] + found["num_used_tokens"]
        if not busy or time.monotonic() > limit:
            break
        time.sleep(0.5)
    names = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens", "max_total_num_tokens")
    point = {"seconds": round(time.monotonic() - started, 1), **{name: found[name] for name in names}}
    try:
        server.post("/flush_cache?timeout=30")
        point["free"] = not busy
    except HostError:  # refused: something still runs
        point["free"] = False
    time.sleep(1)
    point |= watch.sample()
    own = reserved_mib(server.server_info())
    if own is not None:
        point["gpu_mib"] = own
    print(f"idle after {point['seconds']:.0f} s: {point}", file=sys.stderr, flush=True)
    return point


class Load:
    """One server under load."""

    def __init__(self, args: argparse.Namespace, server: ServerProcess, source: RequestSource) -> None:
        self.args, self.server, self.source = args, server, source
        self.book, self.points, self.pins, self.bursts = Book(), [], 0, 0  # type: ignore[var-annotated]
        self.watch = MemoryWatch(server.pid or 0)
        self._draw = Random(args.seed + 1)
        self._started = time.monotonic()
        self._clients = ThreadPoolExecutor(args.concurrency)

    def fill_pool(self) -> None:
        """Write every KV slot once."""
        capacity, length = loads(self.server)["max_total_num_tokens"], self.args.max_prompt
        prompts = [[self._draw.randrange(100, 20_000) for _ in range(length)] for _ in range(capacity // length + 1)]
        params = {"temperature": 0, "max_new_tokens": 1}
        list(self._clients.map(lambda ids: self.server.generate(ids, sampling_params=params), prompts))

    def run(self, seconds: float) -> None:
        """Bursts, pins and pauses until the time is over or the server has gone."""
        self._started = time.monotonic()
        end, pause_at = self._started + seconds, self._started + self.args.pause_seconds
        pending: set[Future[None]] = set()
        while time.monotonic() < end and self.server.running:
            pending |= self._burst()
            while len(pending) > 2 * self.args.concurrency:
                pending = wait(pending, return_when=FIRST_COMPLETED).not_done
            time.sleep(self._draw.expovariate(1 / self.args.gap_seconds))
            if time.monotonic() > pause_at:
                self._pause(pending)
                pending, pause_at = set(), time.monotonic() + self.args.pause_seconds
        self._pause(pending)

    def _burst(self) -> set[Future[None]]:
        self.bursts += 1
        if self.args.arm == "dspark" and self._draw.random() < 0.2:
            self.server.set_state(dspark_force_budget_frac=self._draw.choice(PINS))
            self.pins += 1
        size = self._draw.randint(1, self.args.concurrency)
        asked = [self.source.next() for _ in range(size)]
        return {self._clients.submit(send, self.server, one, self.book, self.args.silence_seconds) for one in asked}

    def _pause(self, pending: set[Future[None]]) -> None:
        for future in wait(pending).done:
            future.result()
        if self.server.running:
            self.points.append(idle_point(self.server, self.watch, self._started))


def log_errors(text: str) -> list[str]:
    """Lines of a server's log that tell of something broken."""
    lines = (line for line in text.splitlines() if "server_args=" not in line)  # names of flags, not events
    return [line[:300] for line in lines if ERRORS.search(line)]


def verdicts(report: dict[str, Any], allowed_mib: float) -> dict[str, bool]:
    """What had to hold, by name."""
    growth = [value for value in report["growth_mib"].values() if value is not None]
    return {
        "alive": report["alive"],
        "nothing lost": report["requests"]["lost"] == 0 and report["requests"]["sent"] > 0,
        "all free when idle": bool(report["idle"]) and all(point["free"] for point in report["idle"]),
        "no growth": bool(growth) and max(growth) <= allowed_mib,
        "no error in the log": not report["log_errors"],
    }


def measure(args: argparse.Namespace, server: ServerProcess, source: RequestSource) -> dict[str, Any]:
    """Warm up, load, and look at what is left."""
    load, crash = Load(args, server, source), None
    try:
        load.fill_pool()
        load.run(args.warm_up_seconds)
        load.points.clear()
        with load.watch:
            load.run(args.minutes * 60)
    except (HostError, requests.RequestException) as error:
        crash = str(error)[-4000:]
    alive = crash is None and server.running and server.healthy()
    info = server.server_info()["internal_states"][0].get("dspark_info_record") or {} if alive else {}
    return {
        "alive": alive,
        "crash": crash,
        "requests": load.book.report(),
        "bursts": load.bursts,
        "pins": load.pins,
        "idle": load.points,
        "growth_mib": {name: grown(load.points, name) for name in ("scheduler_mib", "gpu_mib")},
        "minutes": load.watch.first_and_last(),
        "samples": load.watch.samples[::10],
        "schedule": info.get("schedule"),
        "eager_steps": info.get("eager_steps"),
        "log_errors": log_errors(server.log_path.read_text(errors="replace"))[:40],
    }


def start(args: argparse.Namespace) -> ServerProcess:
    """The server, not yet started."""
    env = ARMS[args.arm]
    more = AUDIT if args.audit else {}
    return servers.prepare(args, args.arm, env=(env or {}) | more, dspark=env is not None, log_path=args.log)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--target", type=Path, required=True)
    add("--draft", type=Path, required=True)
    add("--minutes", type=float, default=30.0)
    add("--arm", choices=ARMS, default="dspark")
    add("--seed", type=int, default=0, help="of the requests, the bursts and the pins")
    add("--concurrency", type=int, help="clients; also the largest burst")
    add("--max-prompt", type=int, help="tokens")
    add("--max-new-tokens", type=int)
    add("--gap-seconds", type=float, default=0.5, help="mean time between bursts")
    add("--pause-seconds", type=float, default=20.0, help="load between two pauses")
    add("--warm-up-seconds", type=float, default=30.0)
    add("--silence-seconds", type=float, default=300.0, help="longest wait for the next byte of an answer")
    add("--allowed-growth-mib", type=float, default=256.0)
    add("--no-audit", dest="audit", action="store_false", help="do not check the pools after every step")
    add("--device", default=default_device())
    add("--server-args", help=f"further flags of the server, one string; default for a GPU: {POOL_FLAGS['cuda']}")
    add("--log", type=Path, help="of the server")
    add("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args(argv)
    if args.server_args is None:
        args.server_args = POOL_FLAGS[args.device]
    clients, prompt, answer = SIZES[args.device]
    args.concurrency, args.max_prompt = args.concurrency or clients, args.max_prompt or prompt
    args.max_new_tokens = args.max_new_tokens or answer
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.target)
    sentences = [tokenizer.encode(f"{prompt.text}\n", add_special_tokens=False) for prompt in PROMPTS]
    texts = base_texts(sentences, args.max_prompt, Random(args.seed))
    source = RequestSource(texts, args.seed, args.max_prompt, args.max_new_tokens, refusals=args.arm == "dspark")
    with start(args) as server:
        print(f"\nlog: {server.log_path}", file=sys.stderr)
        report = measure(args, server, source)
    found = verdicts(report, args.allowed_growth_mib)
    result: dict[str, Any] = {
        "benchmark": "mixed_load",
        "machine": machine.describe(),
        "command": "python -m benchmarks.mixed_load " + shlex.join(sys.argv[1:] if argv is None else argv),
        **report,
        "verdicts": found,
        "ok": all(found.values()),
    }
    book = report["requests"]
    print(f"{book['sent']} requests, {book['lost']} lost: {book['outcomes']}")
    print(f"growth in MiB between pauses: {report['growth_mib']}; first and last minute: {report['minutes']}")
    for name, held in found.items():
        print(f"{name}: {'yes' if held else 'NO'}")
    machine.conclude(result, args.out, {key: value for key, value in result.items() if key != "samples"})
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
