"""DSPARK without overlap, short of memory, at the context limit, and with a short block."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from dspark.demo.server import ServerProcess
from tests.e2e.conftest import (
    DSPARK,
    LIMIT_PROMPT,
    RETRACTION_PROMPTS,
    RETRACTION_TOKENS,
    record,
    run_all,
    serve,
    set_state,
)
from tests.e2e.jobs import mixed_traffic
from tests.e2e.test_overlap import wait_until_idle

CONTEXT = 256


@pytest.fixture(scope="module")
def small_server(target: Path, plain_answers: dict[str, Any]) -> Iterator[ServerProcess]:
    """Synchronous scheduling, blocks of 3, a context of 256, KV for three of the six long answers that it admits."""
    flags = ["--disable-overlap-schedule", "--speculative-dspark-block-size", "3", "--context-length", str(CONTEXT)]
    flags += ["--max-total-tokens", "420", "--max-running-requests", "6", "--schedule-conservativeness", "0.05"]
    # Static: how many rows a step verifies must not depend on how many requests run.
    env = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "16", "SGLANG_RAGGED_VERIFY_MODE": "static"}
    with serve(target, *DSPARK, *flags, **env) as server:
        yield server


def long_answers(server: ServerProcess, at_once: int) -> list[dict[str, Any]]:
    """The answers of ``/generate`` to the retraction prompts, in order."""

    def ask(prompt: str) -> dict[str, Any]:
        params = {"temperature": 0, "max_new_tokens": RETRACTION_TOKENS, "ignore_eos": True}
        response = requests.post(
            server.url + "/generate", json={"text": prompt, "sampling_params": params}, timeout=600
        )
        assert response.status_code == 200, response.text
        return response.json()

    with ThreadPoolExecutor(at_once) as clients:
        return list(clients.map(ask, RETRACTION_PROMPTS))


def accept_length(answers: list[dict[str, Any]]) -> float:
    infos = [answer["meta_info"] for answer in answers]
    return sum(info["completion_tokens"] - 1 for info in infos) / sum(info["spec_verify_ct"] for info in infos)


def test_retraction_is_lossless_and_accepts_as_much(small_server: ServerProcess, plain_answers: dict[str, Any]) -> None:
    """A retracted request is prefilled again with what it had said; its draft context must come back too."""
    cold = long_answers(small_server, at_once=1)
    small_server.flush_cache()
    disturbed = long_answers(small_server, at_once=6)
    assert sum(answer["meta_info"]["num_retractions"] for answer in cold) == 0
    assert sum(answer["meta_info"]["num_retractions"] for answer in disturbed) > 0, "memory enough: make it smaller"
    expected = [plain_answers[f"retract {number}"][0] for number in range(len(RETRACTION_PROMPTS))]
    assert [answer["output_ids"] for answer in cold] == expected
    assert [answer["output_ids"] for answer in disturbed] == expected
    # Block boundaries shift where a request resumes; without its draft context acceptance would fall towards 1.
    assert accept_length(disturbed) == pytest.approx(accept_length(cold), rel=0.05)
    wait_until_idle(small_server)
    assert not re.search("memory leak|Traceback", small_server.log_path.read_text())


def test_the_context_limit_inside_a_block(small_server: ServerProcess, plain_answers: dict[str, Any]) -> None:
    """The answer fills the context to its last token, as without speculation, and the pools stay intact."""
    prompt = small_server.post("/generate", {"text": LIMIT_PROMPT, "sampling_params": {"max_new_tokens": 1}})
    room = CONTEXT - prompt["meta_info"]["prompt_tokens"]
    assert room > 20
    params = {"temperature": 0, "max_new_tokens": room, "ignore_eos": True}
    answer = small_server.post("/generate", {"text": LIMIT_PROMPT, "sampling_params": params})
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
    assert room - 2 <= len(answer["output_ids"]) <= room
    assert answer["output_ids"] == plain_answers["context limit"][0][: len(answer["output_ids"])]
    wait_until_idle(small_server)
    assert small_server.healthy()


def test_greedy_jobs_that_fit_are_lossless(small_server: ServerProcess, plain_answers: dict[str, Any]) -> None:
    jobs = [job for job in mixed_traffic() if job.greedy and "long" not in job.name and "shared" not in job.name]
    answers = run_all(small_server, jobs, at_once=6)
    assert answers == {name: plain_answers[name] for name in answers}


def test_a_pin_is_honoured_in_static_mode(small_server: ServerProcess, plain_answers: dict[str, Any]) -> None:
    """Half of the drafts: 1 + floor(0.5 * 3) rows for a lone request, and the same text."""
    assert set_state(small_server, dspark_force_budget_frac=0.5, dspark_clear_info_records=True)
    params = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}
    answer = small_server.post("/generate", {"text": LIMIT_PROMPT, "sampling_params": params})
    schedule = record(small_server)["schedule"]
    assert set_state(small_server, dspark_force_budget_frac=-1)
    assert answer["output_ids"] == plain_answers["context limit"][0][:20]
    assert schedule["forwarded_rows"] == schedule["scheduled_rows"] == 2 * schedule["steps"] > 0
