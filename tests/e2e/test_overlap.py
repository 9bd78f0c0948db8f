"""DSPARK under overlap scheduling on the real server."""

from __future__ import annotations

import json
import math
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from transformers import AutoTokenizer

from dspark.__main__ import main
from dspark.demo.server import ServerProcess
from tests.conftest import DRAFT
from tests.e2e.conftest import record, run_all, set_state
from tests.e2e.jobs import LONG, finish_jobs, mixed_traffic, scored_jobs
from tests.e2e.reference_steps import assert_reference_steps
from tests.reference.decode import ReferenceDecoder


def wait_until_idle(server: ServerProcess) -> None:
    """Flushing succeeds only when no request runs or waits and every slot is free or cached."""
    for _ in range(60):
        if requests.post(server.url + "/flush_cache", timeout=60).status_code == 200:
            return
        time.sleep(1)
    pytest.fail("requests are still running")


def test_the_builtin_is_not_loaded(overlap_server: ServerProcess) -> None:
    found = record(overlap_server)
    assert found["implementation"] == "plugin"
    parts = [name.rsplit(".", 1)[-1] for name in found["builtin_modules_loaded"]]
    assert set(parts) <= {"dspark_config"}  # read by the host's own argument and capture code
    log = overlap_server.log_path.read_text()
    assert "serves DSPARK" in log
    assert "compact mode, since the draft has a confidence head" in log


def test_mixed_traffic_is_lossless_and_nothing_is_lost(
    overlap_server: ServerProcess, plain_answers: dict[str, Any]
) -> None:
    jobs = mixed_traffic()
    assert len(jobs) == 36
    answers = run_all(overlap_server, jobs, at_once=24)
    differing = [job.name for job in jobs if job.greedy and answers[job.name] != plain_answers[job.name]]
    assert differing == [], {name: (answers[name], plain_answers[name]) for name in differing}
    assert len(answers) == 36
    wait_until_idle(overlap_server)
    assert overlap_server.healthy()
    assert not re.search("memory leak|Traceback", overlap_server.log_path.read_text())
    schedule = record(overlap_server)["schedule"]
    assert schedule["scheduled_rows"] < 6 * schedule["requests"]
    assert schedule["scheduled_rows"] <= schedule["forwarded_rows"] < 1.2 * schedule["scheduled_rows"]
    assert record(overlap_server)["eager_steps"] == {}
    assert schedule["relay"]["fresh"] > 0
    assert schedule["late_confidences"] == 0


def numbers(value: Any) -> list[float]:
    """Every number of nested lists, in order."""
    if isinstance(value, dict):
        value = list(value.values())
    return [x for part in value for x in numbers(part)] if isinstance(value, list) else [value or 0.0]


def assert_scores(answers: dict[str, Any], plain_answers: dict[str, Any]) -> None:
    """The same tokens and token ids; logprobs as near as float32 sums in another order allow."""
    for name, (ids, lists) in answers.items():
        assert ids == plain_answers[name][0], name
        assert lists.keys() == plain_answers[name][1].keys()
        for key, found in lists.items():
            required = plain_answers[name][1][key]
            found, required = (numbers([[entry[:2] for entry in _flat(x)] for x in both]) for both in (found, required))
            np.testing.assert_allclose(found, required, rtol=1e-4, atol=2e-4, err_msg=f"{name}: {key}")


def _flat(entry: Any) -> list[Any]:
    """The [logprob, token, text] entries of one position."""
    return [] if entry is None else entry if entry and isinstance(entry[0], list) else [entry]


def test_logprobs_equal_those_of_plain_decoding(overlap_server: ServerProcess, plain_answers: dict[str, Any]) -> None:
    answers = run_all(overlap_server, scored_jobs(), at_once=8)
    assert len(answers["top logprobs"][1]["output_top_logprobs"][5]) == 3
    assert_scores(answers, plain_answers)
    assert overlap_server.healthy()


def test_a_grammar_holds_for_sampled_texts(overlap_server: ServerProcess) -> None:
    """Other requests of the batch sample freely meanwhile."""
    params = {"temperature": 1.0, "max_new_tokens": 40, "regex": "[a-c]{3,6}(-[0-9]{2}){3}!"}
    free = {"temperature": 1.0, "max_new_tokens": 40, "ignore_eos": True}
    with ThreadPoolExecutor(8) as clients:
        futures = [
            clients.submit(overlap_server.post, "/generate", {"text": f"Code {n}:", "sampling_params": given})
            for n, given in enumerate([params, free] * 4)
        ]
        texts = [future.result()["text"] for future in futures]
    assert all(re.fullmatch(params["regex"], text) for text in texts[::2]), texts
    assert not any(re.fullmatch(params["regex"], text) for text in texts[1::2])


def test_a_row_reused_after_a_flush_is_not_fresh(overlap_server: ServerProcess) -> None:
    """The host then counts generations from zero again; the first two plans of the next request know nothing of it."""
    params = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    for prompt in ([504, 338, 253, 2412], [28, 29, 30, 31]):
        overlap_server.flush_cache()
        assert set_state(overlap_server, dspark_clear_info_records=True)
        overlap_server.generate(prompt, sampling_params=params)
    schedule = record(overlap_server)["schedule"]
    assert schedule["own_confidences"] == schedule["steps"] - 2 > 0


def test_the_earliest_reason_ends_an_answer(overlap_server: ServerProcess, plain_answers: dict[str, Any]) -> None:
    """Several ends can lie in one block: EOS before the length limit, the second stop string before the first."""
    answers = run_all(overlap_server, finish_jobs(), at_once=8)
    assert answers == {name: plain_answers[name] for name in answers}
    reasons = {answer[1]["type"] for answer in answers.values()}
    assert reasons == {"stop", "length"}


def test_a_huge_seed_is_a_seed(overlap_server: ServerProcess) -> None:
    for seed in (2**63, 2**64 - 1):
        params = {"temperature": 1.0, "max_new_tokens": 4, "sampling_seed": seed}
        overlap_server.post("/generate", {"text": "Hi", "sampling_params": params})
    assert overlap_server.healthy()


def test_steps_equal_the_reference_loop(overlap_server: ServerProcess, target: Path) -> None:
    """Windows are as the planner wants them, which depends on measured times, and at last half of the full ones."""
    code = "Write a Python function that reverses a string."
    questions = [(code, -1), ("What is 12 times 12?", -1), (LONG + "Why?", -1), (code, 0.5)]
    overlap_server.flush_cache()
    assert_reference_steps(overlap_server, target, questions)
    assert record(overlap_server)["eager_steps"] == {}


def test_a_prefix_hit_and_chunks_accept_as_much_as_a_cold_run(overlap_server: ServerProcess, target: Path) -> None:
    """The prompt takes several chunks; the second run finds it cached; the reference loop saw it in one piece."""
    assert set_state(overlap_server, dspark_force_budget_frac=1.0)
    tokenizer = AutoTokenizer.from_pretrained(target)
    ids = tokenizer(LONG + LONG + "The baker")["input_ids"]
    overlap_server.flush_cache()
    runs = [overlap_server.generate(ids, sampling_params={"temperature": 0, "max_new_tokens": 48}) for _ in range(2)]
    assert len(ids) > 3 * 64
    assert runs[0]["meta_info"]["cached_tokens"] == 0
    assert runs[1]["meta_info"]["cached_tokens"] > len(ids) - 2
    assert runs[0]["output_ids"] == runs[1]["output_ids"]
    expected = ReferenceDecoder(target, DRAFT).generate(ids, 48)
    assert [run["meta_info"]["spec_verify_ct"] for run in runs] == [len(expected.steps)] * 2
    assert set_state(overlap_server, dspark_force_budget_frac=-1)


def test_random_pins_change_the_rows_and_nothing_else(
    overlap_server: ServerProcess, plain_answers: dict[str, Any]
) -> None:
    """Budgets jump at random while mixed traffic runs; each step forwards exactly R + floor(f * R * gamma) rows."""
    fractions = np.random.default_rng(0).choice([0.01, 0.15, 0.3, 0.5, 0.8, 1.0], 400)
    assert set_state(overlap_server, dspark_force_budget_frac=float(fractions[0]))  # before any step
    assert set_state(overlap_server, dspark_clear_info_records=True)
    jobs = [job for job in mixed_traffic() if job.greedy]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_all, overlap_server, jobs, 12)
        for fraction in fractions:
            assert set_state(overlap_server, dspark_force_budget_frac=float(fraction))
            if running.done():
                break
            time.sleep(0.05)
        answers = running.result()
    assert set_state(overlap_server, dspark_force_budget_frac=-1)
    assert answers == {job.name: plain_answers[job.name] for job in jobs}
    seen = set()
    for step in record(overlap_server)["steps"]:
        count = len(step["requests"])
        allowed = {math.floor(f * count * 7) for f in set(fractions)}
        assert step["budget"] in allowed
        assert step["forwarded_rows"] >= count + step["budget"]
        assert sum(one["verify_len"] for one in step["requests"]) == count + step["budget"]
        seen.add(step["budget"] / count)
    assert len(seen) > 3


def test_a_seed_repeats_a_sampled_text(overlap_server: ServerProcess) -> None:
    """With full windows: where a trimmed block ends, the next one draws anew, and that depends on measured times."""

    def sample(**sampling: Any) -> str:
        params = {"temperature": 1.0, "max_new_tokens": 16, "ignore_eos": True} | sampling
        answer = requests.post(
            overlap_server.url + "/generate", json={"text": "My dog", "sampling_params": params}, timeout=600
        )
        return answer.json()["text"]

    assert set_state(overlap_server, dspark_force_budget_frac=1.0)
    assert sample(sampling_seed=3) == sample(sampling_seed=3)
    assert sample(sampling_seed=3) != sample(sampling_seed=4)
    assert sample() != sample()
    assert sample(sampling_seed=3, top_k=1) == sample(sampling_seed=4, top_k=1)
    assert set_state(overlap_server, dspark_force_budget_frac=-1)


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"return_hidden_states": True}, "return hidden states"),
        ({"sampling_params": {"sampling_seed": "x"}}, "sampling_seed='x'"),
        ({"sampling_params": {"sampling_seed": [1]}}, "sampling_seed=[1]"),
        ({"sampling_params": {"top_k": 10**10}}, "top_k=10000000000"),
        ({"text": None, "input_ids": [1, 49152, 5]}, "input token 49152"),
        ({"text": None, "input_ids": [1, -3]}, "input token -3"),
    ],
)
def test_what_is_not_supported_is_answered_with_400(
    overlap_server: ServerProcess, fields: dict[str, Any], found: str
) -> None:
    payload = {"text": "Hello", "sampling_params": {"max_new_tokens": 4}} | fields
    response = requests.post(overlap_server.url + "/generate", json=payload, timeout=120)
    assert response.status_code == 400, response.text
    assert found in response.text
    assert overlap_server.healthy()


def test_a_pin_that_cannot_be_honoured_is_refused(overlap_server: ServerProcess) -> None:
    for pin in (0.0, 1.5, -0.5, "half", [0.5]):
        assert not set_state(overlap_server, dspark_force_budget_frac=pin), pin
    assert not set_state(overlap_server, speculative_accept_threshold_single=0.5)
    assert overlap_server.healthy()


def test_the_bench_command_counts_what_the_server_generates(
    overlap_server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_text("Name three colours.\nWhat is two plus two?\n")
    flags = [
        "--url",
        f"dspark={overlap_server.url}",
        "--prompts",
        str(tmp_path / "prompts.txt"),
        "--concurrency",
        "1,2",
    ]
    before = record(overlap_server)["schedule"]["steps"]
    assert main(["bench", *flags, "--requests", "3", "--max-new-tokens", "6"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["requests"] for row in rows] == [3, 3]
    assert all(3 <= row["tokens"] <= 18 for row in rows)
    assert all(0 < row["ttft_ms_p50"] <= row["latency_ms_p50"] for row in rows)
    assert record(overlap_server)["schedule"]["steps"] > before
