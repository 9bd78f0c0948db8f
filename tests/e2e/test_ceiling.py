"""The ceiling that a trimming server estimates, against its own step records, token by token."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests

from dspark.demo.prompts import PROMPTS
from dspark.demo.server import ServerProcess
from dspark.observe.live_ceiling import MIN_PROBES
from tests.e2e.conftest import DSPARK, cost_table, record, serve, set_state

ANSWERS = 10


@pytest.fixture(scope="module", params=["eager", "static"])
def server(
    request: pytest.FixtureRequest, target: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """Steps as they are run without graphs, and as a GPU captures them."""
    flags = ["--max-running-requests", "8", *cost_table(tmp_path_factory.mktemp("ceiling"))]
    env = {"SGLANG_DSPARK_DEBUG_DUMP": "reqs", "SGLANG_RAGGED_VERIFY_MODE": "compact"}
    if request.param == "static":
        env["SGLANG_DSPARK_STATIC_STEP"] = "1"
    with serve(target, *DSPARK, *flags, **env) as running:
        yield running


def ask_all(server: ServerProcess, new_tokens: int, **sampling: Any) -> list[dict[str, Any]]:
    def ask(number: int) -> dict[str, Any]:
        own = {"max_new_tokens": new_tokens + number, "ignore_eos": number % 3 > 0 or new_tokens > 100, **sampling}
        if number % 2 and sampling["temperature"]:
            own["top_p"] = 0.95
        body = {"text": PROMPTS[number % len(PROMPTS)].text, "sampling_params": own, "rid": f"{number}"}
        return requests.post(server.url + "/generate", json=body, timeout=900).json()

    assert set_state(server, dspark_clear_info_records=True)
    with ThreadPoolExecutor(4) as clients:
        return list(clients.map(ask, range(ANSWERS)))


@dataclass(frozen=True)
class Known:
    """A recorded step with a draft: what becomes of its left-out drafts if each has to equal the realised token."""

    rid: str
    hidden: bool
    left_out: int
    complete: bool  # as many later tokens exist
    ceiling: int | None  # None: they end too early
    passed: int  # left-out drafts that equal the realised tokens, up to the first that does not
    probe: int  # requests that it is a probe for; 0: it is none


def known_of(steps: list[dict[str, Any]]) -> list[Known]:
    tokens: dict[str, dict[int, int]] = defaultdict(dict)
    for step in steps:
        for offset, token in enumerate(step["committed"], 1):
            tokens[step["rid"]][step["position"] + offset] = token
    found = []
    for step in steps:
        rows, drafts, later = step["verify_len"], step["drafts"], tokens[step["rid"]]
        hidden = rows <= len(drafts) and step["accepted"] == rows
        realised = [later.get(step["position"] + 1 + place) for place in range(rows, len(drafts))] if hidden else []
        equal = [token == draft for token, draft in zip(realised, drafts[rows:], strict=False)]
        passed = [*equal, False].index(False)
        parted = passed == len(equal) or realised[passed] is not None
        ceiling = len(step["committed"]) + hidden + passed if parted else None
        probe = step["probe"] or (-1, 0)
        stands_for = probe[1] if probe[0] == step["place"] else 0
        left_out = max(len(drafts) - rows, 0)
        found.append(Known(step["rid"], hidden, left_out, None not in realised, ceiling, passed, stands_for))
    return found


def recorded(server: ServerProcess) -> tuple[dict[str, Any], list[Known], list[Known]]:
    """The server's estimate, all its steps, and those that it has judged: all but the newest."""
    deadline = time.monotonic() + 20
    while True:  # a step that was launched behind the end of the last answer is recorded before its results are counted
        found = record(server)
        steps = [
            request | {"place": place, "probe": step["probe"]}
            for step in found["steps"]
            for place, request in enumerate(step["requests"])
            if request["drafts"]
        ]
        known = known_of(steps)
        estimate = found["ceiling"]
        counted = estimate["steps"] + estimate["unresolved"] + estimate["pending"]
        if counted == len(known) or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    assert counted == len(known)
    assert estimate["pending"] <= 6 * 4, "steps that may still be solved: of the last six, with four requests at once"
    return estimate, known, known[: len(known) - estimate["pending"]]


def test_greedy_requests_are_exact(server: ServerProcess) -> None:
    answers = ask_all(server, 60, temperature=0.0)
    estimate, known, judged = recorded(server)
    assert estimate["solved"]["request_steps"] > 50
    assert estimate["unresolved"] == sum(step.ceiling is None for step in judged)
    assert estimate["middle"] == sum(step.ceiling for step in judged if step.ceiling is not None)
    assert estimate["low"] == estimate["middle"] == estimate["high"]
    decoded = [answer for answer in answers if "dspark" in answer["meta_info"]]  # not ended by its first token
    assert len(decoded) > ANSWERS / 2
    for answer in decoded:
        own = answer["meta_info"]["dspark"]["ceiling"]
        mine = [step for step in known if step.rid == answer["meta_info"]["id"]][: own["request_steps"]]
        assert own["hidden"] == sum(step.hidden for step in mine)
        sure = [step.ceiling for step in mine if step.ceiling is not None]
        # A step that ran behind the end of the answer may solve more than the answer's own sums know of.
        assert len(mine) - len(sure) <= own["unresolved"] <= 6
        assert own["low"] <= sum(sure) + 8 * own["unresolved"]
        if own["unresolved"] == 0:
            assert own["low"] == own["middle"] == own["high"] == sum(sure)


def test_probes_of_sampled_requests_agree_with_what_was_realised(server: ServerProcess) -> None:
    """So cold that a draft passes if it is the target's choice, in law as in fact; the server only knows the law."""
    answers = ask_all(server, 260, temperature=1e-5)
    estimate, _, judged = recorded(server)
    counted = [step for step in judged if not step.hidden or not step.left_out or step.complete]
    sure = [step for step in counted if not step.hidden or not step.left_out]
    assert estimate["steps"] == len(counted)
    # Which steps are probed, and what a few of them say of all, is chance; what each of them says is not.
    probed = [step for step in counted if step.probe and step.hidden and step.left_out]
    assert len(probed) >= MIN_PROBES
    parted = []
    for left_out in range(1, 7):
        mine = [step for step in probed if step.left_out == left_out]
        assert estimate["probes"][left_out] == len(mine)
        assert estimate["probed_requests"][left_out] == sum(step.probe for step in mine)
        tokens, found = sum(step.probe * step.passed for step in mine), estimate["probed_tokens"][left_out]
        if found != pytest.approx(tokens, abs=0.01):
            parted.append((left_out, found, tokens))
    # Logits within 1e-4 of each other have chances between 0 and 1 even so, rarely: one block may. Its answer is a
    # fraction then, as no wrong count is.
    assert len(parted) <= 1, parted
    for left_out, found, tokens in parted:
        assert abs(found - round(found)) > 0.01, parted
        assert abs(found - tokens) <= 4 * left_out, parted
    assert sum(estimate["probed_tokens"]) > len(probed) / 2, "drafts that never pass would prove nothing"
    assert estimate["known"]["tokens"] + estimate["solved"]["tokens"] == sum(step.ceiling or 0 for step in sure)
    # The rest is what the probes say of the steps with about as many drafts left out: never more than any of them says.
    means = [
        tokens / requests_
        for tokens, requests_ in zip(estimate["probed_tokens"], estimate["probed_requests"], strict=True)
        if requests_
    ]
    drawn = estimate["sampled"]
    certain = sum(step.ceiling or 0 for step in sure) + sum(count * (8 - left) for left, count in enumerate(drawn))
    assert certain + min(means) * sum(drawn) <= estimate["middle"] <= certain + max(means) * sum(drawn)
    assert estimate["low"] < estimate["middle"] < estimate["high"]
    assert sum(step.ceiling or 0 for step in counted) > 1.1 * estimate["committed"]
    for answer in answers:
        own = answer["meta_info"]["dspark"]["ceiling"]
        assert own["middle"] is None or own["low"] <= own["middle"] <= own["high"]
