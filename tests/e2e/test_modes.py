"""cap-accept and draft-off steps on the real server, without overlap."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from dspark.demo.server import ServerProcess
from tests.conftest import DRAFT
from tests.e2e.conftest import DSPARK, cost_table, record, run_all, serve, set_state, steps_of
from tests.e2e.jobs import mixed_traffic
from tests.reference.decode import ReferenceDecoder


@pytest.fixture(scope="module")
def cap_server(
    target: Path, plain_answers: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """cap-accept, synchronous, on the padded step (pinned steps are eager); plain decoding looks cheap for one request
    and hopeless for two or more: by so much that no time of a real step changes it (a prediction is corrected 20-fold
    at most)."""
    plain = {"plain_probes": [1, 2], "plain_seconds": [1e-5, 1e3]}
    flags = ["--disable-overlap-schedule", "--max-running-requests", "8"]
    flags += cost_table(tmp_path_factory.mktemp("cap"), **plain)
    env = {
        "SGLANG_RAGGED_VERIFY_MODE": "cap-accept",
        "SGLANG_DSPARK_DEBUG_DUMP": "reqs",
        "SGLANG_DSPARK_STATIC_STEP": "1",
    }
    with serve(target, *DSPARK, *flags, **env) as server:
        yield server


def test_cap_accept_is_lossless_and_shows_the_ceiling(cap_server: ServerProcess, plain_answers: dict[str, Any]) -> None:
    jobs = [job for job in mixed_traffic() if job.greedy]
    answers = run_all(cap_server, jobs, at_once=8)
    assert answers == {job.name: plain_answers[job.name] for job in jobs}
    drafted = [step for step in record(cap_server)["steps"] if step["draft"] and len(step["requests"]) > 1]
    assert all(step["forwarded_rows"] >= 8 * len(step["requests"]) for step in drafted)  # padded to a tier
    rows = [one for step in drafted for one in step["requests"]]
    assert all(len(one["committed"]) == min(one["ceiling"], one["verify_len"]) for one in rows)
    assert sum(one["ceiling"] for one in rows) > sum(len(one["committed"]) for one in rows), "nothing was cut"
    assert record(cap_server)["schedule"]["relay"]["fresh"] > 0


def test_drafting_resumes_as_if_it_had_never_stopped(cap_server: ServerProcess, target: Path) -> None:
    """Alone, a request is decoded plainly; a pin makes the server draft again. From then on every block equals that of
    a loop which drafted all the time: the context of the draft has no hole."""
    ids = AutoTokenizer.from_pretrained(target)("The three primary colours are red,")["input_ids"]
    rid, tokens = f"resume-{time.time()}", 192  # enough for this process to be late with its pin
    assert set_state(cap_server, dspark_clear_info_records=True)
    with ThreadPoolExecutor(1) as pool:
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        running = pool.submit(cap_server.generate, ids, rid=rid, sampling_params=params)
        while sum(not step["draft"] for step in steps_of(cap_server, rid)) < 12 and not running.done():
            time.sleep(0.02)
        assert set_state(cap_server, dspark_force_budget_frac=1.0)
        answer = running.result()
    assert set_state(cap_server, dspark_force_budget_frac=-1)
    steps = steps_of(cap_server, rid)
    expected = ReferenceDecoder(target, DRAFT).generate(ids, tokens, verify_lens=[step["verify_len"] for step in steps])
    assert answer["output_ids"] == expected.tokens
    off = [step for step in steps if not step["draft"]]
    last_off = max(at for at, step in enumerate(steps) if not step["draft"])
    resumed = list(zip(steps, expected.steps, strict=True))[last_off + 1 :]
    assert len(off) >= 12
    assert len(resumed) >= 10
    assert all(step["forwarded_rows"] == 1 and step["drafts"] is None for step in off)
    for got, want in resumed:
        assert (got["position"], got["drafts"], got["committed"]) == (want.position, want.drafts, want.committed)
        assert got["verify_len"] == got["forwarded_rows"] == 8


def test_the_draft_can_be_left_out_by_hand(cap_server: ServerProcess, plain_answers: dict[str, Any]) -> None:
    """For batches that the planner would always draft for; afterwards it drafts again."""
    jobs = [job for job in mixed_traffic() if job.greedy][:4]
    for off in (1, 0):
        assert set_state(cap_server, dspark_clear_info_records=True, dspark_force_draft_off=off)
        answers = run_all(cap_server, jobs, at_once=4)
        assert answers == {job.name: plain_answers[job.name] for job in jobs}
        together = [step["draft"] for step in record(cap_server)["steps"] if len(step["requests"]) > 1]
        assert together
        assert not any(together) if off else all(together)


def test_logprobs_of_a_request_that_is_decoded_plainly(cap_server: ServerProcess, target: Path) -> None:
    """Its windows have one row, its outcome has a place for every token of a full one."""
    ids = AutoTokenizer.from_pretrained(target)("Water boils at a temperature of")["input_ids"]
    rid = f"plain-logprobs-{time.time()}"
    params = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    required = cap_server.generate(ids, sampling_params=params)["output_ids"]
    answer = cap_server.generate(ids, rid=rid, sampling_params=params, return_logprob=True, top_logprobs_num=2)
    assert any(not step["draft"] for step in steps_of(cap_server, rid))
    assert answer["output_ids"] == required
    found = answer["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in found] == required
    best = answer["meta_info"]["output_top_logprobs"]
    assert all(0 >= own[0] == top[0][0] >= top[1][0] for own, top in zip(found, best, strict=True))
