"""DSPARK without overlap, short of memory, at the context limit, with a short block, and in bfloat16."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dspark.demo.server import ServerProcess
from tests.e2e.conftest import DSPARK, LIMIT_PROMPT, retraction_jobs, run_all, serve
from tests.e2e.jobs import mixed_traffic, native
from tests.e2e.test_overlap import wait_until_idle

CONTEXT = 256


@pytest.fixture(scope="module")
def small_server(target: Path, plain_answers: dict[str, Any]) -> Iterator[ServerProcess]:
    """Synchronous scheduling, blocks of 3, a context of 256 and KV for about four of the six long answers."""
    flags = ["--disable-overlap-schedule", "--speculative-dspark-block-size", "3", "--context-length", str(CONTEXT)]
    with serve(target, *DSPARK, *flags, "--max-total-tokens", "420", "--max-running-requests", "6") as server:
        yield server


def test_retraction_is_lossless(small_server: ServerProcess, plain_answers: dict[str, Any]) -> None:
    alone = small_server.generate([504, 338], sampling_params={"temperature": 0, "max_new_tokens": 2})
    assert len(alone["output_ids"]) == 2
    answers = run_all(small_server, retraction_jobs(), at_once=6)
    assert re.search("[Rr]etract", small_server.log_path.read_text()), "the server had memory enough: make it smaller"
    assert answers == {name: plain_answers[name] for name in answers}
    wait_until_idle(small_server)
    assert not re.search("leak|Traceback", small_server.log_path.read_text())


def accept_length(server: ServerProcess, retract: bool) -> float:
    import requests

    def ask(topic: str) -> dict[str, Any]:
        params = {"temperature": 0, "max_new_tokens": 110, "ignore_eos": True}
        payload = {"text": f"Write down facts about {topic}.\n1.", "sampling_params": params}
        return requests.post(server.url + "/generate", json=payload, timeout=600).json()["meta_info"]

    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(6 if retract else 1) as clients:
        infos = list(clients.map(ask, ("bees", "rivers", "trains", "bread", "snow", "books")))
    return sum(info["completion_tokens"] - 1 for info in infos) / sum(info["spec_verify_ct"] for info in infos)


def test_retracted_requests_accept_as_much_as_undisturbed_ones(small_server: ServerProcess) -> None:
    """A retracted request is prefilled again, with what it had already said; its draft context must come back too."""
    small_server.flush_cache()
    cold = accept_length(small_server, retract=False)
    small_server.flush_cache()
    before = len(re.findall("[Rr]etract", small_server.log_path.read_text()))
    disturbed = accept_length(small_server, retract=True)
    assert len(re.findall("[Rr]etract", small_server.log_path.read_text())) > before
    assert disturbed == pytest.approx(cold, rel=0.05)  # block boundaries shift where a request was resumed


def test_the_context_limit_inside_a_block(small_server: ServerProcess, plain_answers: dict[str, Any]) -> None:
    """The answer ends where the context ends, with the tokens of the unlimited server, and the pools stay intact."""
    tokens, reason = native("limit", LIMIT_PROMPT, new_tokens=70).run(small_server)
    assert reason["type"] == "length"
    assert 0 < len(tokens) < 70
    assert tokens == plain_answers["context limit"][0][: len(tokens)]
    wait_until_idle(small_server)
    assert small_server.healthy()


def test_greedy_jobs_that_fit_are_lossless(small_server: ServerProcess, plain_answers: dict[str, Any]) -> None:
    jobs = [job for job in mixed_traffic() if job.greedy and "long" not in job.name and "shared" not in job.name]
    answers = run_all(small_server, jobs, at_once=6)
    assert answers == {name: plain_answers[name] for name in answers}


def test_bfloat16_serves(target: Path) -> None:
    arguments = ["--dtype", "bfloat16"]
    with serve(target, *DSPARK, *arguments) as server:
        params = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
        answer = server.generate([504, 338, 253, 2412], sampling_params=params)
        assert len(answer["output_ids"]) == 40
        assert answer["meta_info"]["spec_verify_ct"] < 38  # drafts are accepted
