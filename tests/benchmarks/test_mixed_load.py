"""The requests of the mixed load, and the book that says whether one got lost."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from random import Random

import pytest

from benchmarks.load_memory import MemoryWatch, processes
from benchmarks.load_requests import SHAPED, Book, Request, RequestSource, Seen, base_texts, grown, outcome
from benchmarks.mixed_load import log_errors, verdicts

PARAMS = {"sampling_params": {"max_new_tokens": 5}}
SENTENCES = [[1, 2, 3], [4, 5], [6]]


def source(seed: int) -> RequestSource:
    return RequestSource(base_texts(SENTENCES, 1500, Random(0)), seed, max_prompt=1500, max_new=300)


def test_the_same_seed_sends_the_same_requests() -> None:
    one, same, other = ([requests.next() for _ in range(300)] for requests in (source(1), source(1), source(2)))
    assert one == same
    assert [request.payload for request in one] != [request.payload for request in other]


def test_the_load_holds_every_kind() -> None:
    drawn = source(0)
    asked = [drawn.next() for _ in range(3000)]
    assert len({request.rid for request in asked}) == 3000
    kinds = {kind for request in asked for kind in request.kinds}
    assert kinds >= {"answer", "disconnect", "abort", "refused", "stream", "whole", "greedy", "sampled", "chat"}
    assert kinds >= {"top_p", "top_k", "min_p", "sampling_seed", "logit_bias", "stop", "stop_token_ids", "ignore_eos"}
    assert kinds >= {name for shape in SHAPED for name in shape}
    assert any(request.payload.get("return_logprob") for request in asked)
    native = [request.payload for request in asked if request.ending in ("answer", "abort") and request.path[1] == "g"]
    lengths = [len(payload["input_ids"]) for payload in native]
    assert min(lengths) == 1
    assert 1400 < max(lengths) <= 1500
    limits = [payload["sampling_params"]["max_new_tokens"] for payload in native]
    assert min(limits) == 1
    assert max(limits) == 300
    heads = [tuple(payload["input_ids"][:50]) for payload in native if len(payload["input_ids"]) > 60]
    assert len(set(heads)) < len(heads) / 2, "too few prompts share a prefix"
    assert all(request.streamed for request in asked if request.ending == "disconnect")


@pytest.mark.parametrize(
    ("ending", "seen", "required"),
    [
        ("answer", Seen(200, "length", 5), "answered"),
        ("answer", Seen(200, "stop", 2), "answered"),
        ("answer", Seen(200, "length", 4), "lost: 4 of 5 tokens"),
        ("answer", Seen(200, "abort", 4), "lost: finish reason abort"),
        ("answer", Seen(200), "lost: finish reason None"),
        ("answer", Seen(500), "lost: HTTP 500"),
        ("answer", Seen(0, text="no answer"), "lost: HTTP 0"),
        ("disconnect", Seen(200, left=True), "disconnected"),
        ("disconnect", Seen(200), "lost: finish reason None"),
        ("abort", Seen(200, "abort"), "aborted"),
        ("abort", Seen(200, "length", 5), "answered"),
        ("abort", Seen(0), "lost: HTTP 0"),
        ("refused", Seen(400), "refused"),
        ("refused", Seen(200, "length", 5), "lost: served with HTTP 200 what must be refused"),
    ],
)
def test_what_became_of_a_request(ending: str, seen: Seen, required: str) -> None:
    assert outcome(Request("a", "/generate", PARAMS, ending), seen) == required  # type: ignore[arg-type]


def test_an_openai_request_has_its_own_name_for_the_limit() -> None:
    request = Request("a", "/v1/chat/completions", {"max_tokens": 5}, "answer")
    assert outcome(request, Seen(200, "length", 5)) == "answered"
    assert outcome(request, Seen(200, "length", 3)) == "lost: 3 of 5 tokens"


def test_a_request_that_never_came_back_is_lost() -> None:
    book, request = Book(), Request("a", "/generate", PARAMS, "answer")
    for _ in range(3):
        book.send(request)
    book.close(request, Seen(200, "length", 5))
    assert book.lost() == 2
    book.close(request, Seen(500))
    assert book.lost() == 2
    assert book.report()["losses"][0]["outcome"] == "lost: HTTP 500"


def test_growth_is_the_last_point_over_the_first_third() -> None:
    points = [{"gpu_mib": value} for value in (100.0, 130.0, 120.0, 125.0, 140.0, 150.0)]
    assert grown(points, "gpu_mib") == 20.0
    assert grown(points, "scheduler_mib") is None
    assert grown(points[:1], "gpu_mib") is None


def test_every_verdict_can_fail() -> None:
    good = {"alive": True, "requests": {"lost": 0, "sent": 9}, "idle": [{"free": True}], "log_errors": []}
    good |= {"growth_mib": {"scheduler_mib": 3.0, "gpu_mib": None}}
    assert all(verdicts(good, 10.0).values())
    lines = ["fine", "server_args=ServerArgs(crash_on='Exception')", "req_to_token_pool memory leak detected!"]
    leak = log_errors("\n".join([*lines, "Traceback (most recent call last):"]))
    assert len(leak) == 2
    faults = [{"alive": False}, {"requests": {"lost": 1, "sent": 9}}, {"idle": [{"free": True}, {"free": False}]}]
    faults += [{"idle": []}, {"growth_mib": {"scheduler_mib": 11.0, "gpu_mib": None}}, {"log_errors": leak}]
    for fault in faults:
        assert list(verdicts(good | fault, 10.0).values()).count(False) == 1, fault


def test_the_watch_weighs_the_processes_of_a_session() -> None:
    script = "x = bytearray(b'1' * (64 << 20)); print('ready', flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen([sys.executable, "-c", script], **pipes) as child:  # type: ignore[call-overload]
        assert child.stdout.readline() == "ready\n"
        assert processes(child.pid) == {child.pid: "launcher"}
        with MemoryWatch(child.pid) as watch:
            deadline = time.monotonic() + 60
            while len(watch.samples) < 2 and time.monotonic() < deadline:  # one a second
                time.sleep(0.1)
        child.communicate("\n")
    found = watch.first_and_last()
    assert found["first"]["launcher_mib"] > 64
    assert found["last"]["launcher_mib"] > 64
    assert os.getpid() not in processes(child.pid)
