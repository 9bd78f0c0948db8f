"""Blocks shorter than the trained one on the real server, drafted as by the reference loop."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from transformers import AutoTokenizer

from dspark.demo.prompts import PROMPTS
from dspark.demo.server import ServerProcess
from tests.conftest import DRAFT
from tests.e2e.conftest import DSPARK, record, serve, set_state, steps_of
from tests.reference.decode import ReferenceDecoder

REQUESTS, TOKENS = 8, 32


@pytest.fixture(scope="module")
def server(target: Path) -> Iterator[ServerProcess]:
    """What a short block saves is measured, so it is drafted; pinned, since a CPU's own times may say otherwise."""
    flags = ["--max-running-requests", str(REQUESTS), "--context-length", "384"]
    env = {
        "SGLANG_DSPARK_DEBUG_DUMP": "reqs",
        "SGLANG_DSPARK_STATIC_STEP": "1",
        "SGLANG_DSPARK_COST_TABLES": "measure",
    }
    with serve(target, *DSPARK, *flags, **env) as running:
        yield running


def ask_all(server: ServerProcess, ids: list[list[int]], **sampling: Any) -> tuple[list[list[int]], list[str]]:
    """Tokens and request ids of a batch that is asked at once."""
    rids = [f"short-{number}-{time.time()}" for number in range(len(ids))]
    params = {"max_new_tokens": TOKENS, "ignore_eos": True, **sampling}
    # One HTTP request: all of them have arrived before the first step.
    body = {"input_ids": ids, "rid": rids, "sampling_params": params}
    answers = requests.post(server.url + "/generate", json=body, timeout=900).json()
    return [answer["output_ids"] for answer in answers], rids


@pytest.mark.parametrize("depth", [2, 3])
def test_greedy_text_and_drafts(server: ServerProcess, target: Path, depth: int) -> None:
    tokenizer, reference = AutoTokenizer.from_pretrained(target), ReferenceDecoder(target, DRAFT, gamma=depth)
    ids = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.text}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for prompt in PROMPTS[:REQUESTS]
    ]
    drafts = REQUESTS * (depth - 1)
    pin = {"dspark_force_budget_frac": (drafts + 0.5) / (REQUESTS * 7), "dspark_force_depth": depth}
    assert set_state(server, dspark_clear_info_records=True)
    assert set_state(server, **pin)
    answers, rids = ask_all(server, ids, temperature=0)
    compared = 0
    for number, (prompt, answer, rid) in enumerate(zip(ids, answers, rids, strict=True)):
        assert answer == reference.plain_greedy(prompt, TOKENS)
        if number >= 2:
            continue
        for step in steps_of(server, rid)[1:-1]:
            if len(step["drafts"]) > depth:  # with fewer requests blocks are whole
                continue
            assert step["verify_len"] <= depth
            with torch.inference_mode():
                reference._prefill((prompt + answer)[: step["position"]])
                assert step["drafts"] == reference._propose(step["anchor"], step["position"], 0.0, None)[0]
            compared += 1
    assert compared > 12
    drawn = record(server)["schedule"]["drawn"]
    assert drawn[str(depth)] > 8
    assert set_state(server, dspark_force_budget_frac=-1)


def test_sampled_requests_and_what_is_refused(server: ServerProcess) -> None:
    assert set_state(server, dspark_clear_info_records=True)
    assert set_state(server, dspark_force_budget_frac=8.5 / 56, dspark_force_depth=2)
    answers, _ = ask_all(server, [[504, 2732, number + 400] for number in range(REQUESTS)], temperature=0.8, top_p=0.9)
    assert [len(answer) for answer in answers] == [TOKENS] * REQUESTS
    assert record(server)["schedule"]["drawn"]["2"] > 8
    counters = record(server)["counters"]
    fates = ("accepted", "rejected", "unreached", "trimmed")
    assert counters["proposed"] == sum(counters[name] for name in fates)
    assert not set_state(server, dspark_force_budget_frac=0.5, dspark_force_depth=6)
    assert not set_state(server, dspark_force_depth=2)
    assert set_state(server, dspark_force_budget_frac=-1)
    answers, _ = ask_all(server, [[504, 2732, 400]], temperature=0)
    assert len(answers[0]) == TOKENS
