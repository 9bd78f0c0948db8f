"""Simulated acceptance on real servers: exact per step, as distributed as its class, switched while serving."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import torch

from dspark.demo.server import ServerProcess
from dspark.kernels.philox import Purpose, philox_words
from dspark.scheduler.replay_blocks import BlockClass, constant_class, levels, load_classes
from tests.e2e.conftest import DSPARK, cost_table, record, serve, set_state, steps_of
from tests.scheduler.cases import TRACE

GAMMA, TOKENS = 7, 64
KINDS: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.0}, {"temperature": 0.9, "top_p": 0.8}]


def ask(server: ServerProcess, name: str, **params: Any) -> list[dict[str, Any]]:
    """Six answers at once, of three kinds of sampling, each with a seed of its own."""

    def one(number: int) -> dict[str, Any]:
        sampling = {"max_new_tokens": TOKENS, "ignore_eos": True, "sampling_seed": 100 + number}
        sampling |= KINDS[number % len(KINDS)] | params
        payload = {"text": f"Number {number}:", "rid": f"{name} {number}", "sampling_params": sampling}
        response = requests.post(server.url + "/generate", json=payload, timeout=600)
        assert response.status_code == 200, response.text
        return response.json()

    with ThreadPoolExecutor(6) as clients:
        return list(clients.map(one, range(6)))


def accept_length(answers: list[dict[str, Any]]) -> float:
    infos = [answer["meta_info"] for answer in answers]
    return sum(info["completion_tokens"] - 1 for info in infos) / sum(info["spec_verify_ct"] for info in infos)


def check_steps(server: ServerProcess, name: str, one: BlockClass) -> np.ndarray:
    """Every recorded step against the block that its request must have replayed; returns the verify lengths."""
    windows = []
    for number in range(6):
        steps = [step for step in steps_of(server, f"{name} {number}") if step["draft"]]
        positions = torch.tensor([step["position"] for step in steps])
        words = philox_words(torch.full_like(positions, 100 + number), positions, Purpose.REPLAY)
        for step, block in zip(steps, (words % len(one.accepted)).tolist(), strict=True):
            accepted = int(one.accepted[block])
            assert step["survival"] == pytest.approx(one.confidence[block].astype(np.float64).cumprod(), abs=1e-6)
            assert len(step["committed"]) == min(accepted + 1, step["verify_len"])
            assert step["committed"][:accepted] == step["drafts"][: min(accepted, step["verify_len"])]
            if step["ceiling"] is not None:
                assert step["ceiling"] == accepted + 1
            windows.append(step["verify_len"])
    assert len(windows) > 30
    return np.array(windows)


@pytest.fixture(scope="module")
def compact_server(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """compact, overlap, the padded step that a GPU captures, a table under which windows shrink; replays the trace."""
    flags = ["--max-running-requests", "8", *cost_table(tmp_path_factory.mktemp("simulated"))]
    env = {"SGLANG_DSPARK_DEBUG_DUMP": "reqs", "SGLANG_DSPARK_STATIC_STEP": "1", "SGLANG_DSPARK_SIMULATE": str(TRACE)}
    with serve(target, *DSPARK, *flags, **env) as server:
        yield server


def test_a_trace_is_replayed_step_by_step(compact_server: ServerProcess) -> None:
    ask(compact_server, "trace")
    told = record(compact_server)["simulated"]
    assert told["class"] == "all"
    assert "meaningless" in told["note"]
    windows = check_steps(compact_server, "trace", load_classes(TRACE, GAMMA)[0])
    assert windows.min() < windows.max(), "the scheduler has trimmed, and not everybody alike"


def test_classes_are_switched_while_serving(compact_server: ServerProcess) -> None:
    """Full windows by a pin, so that accept lengths are those of the class."""
    indices = {name: entry["index"] for name, entry in record(compact_server)["simulated"]["classes"].items()}
    assert set_state(compact_server, dspark_force_budget_frac=1.0)
    for one in levels(GAMMA):
        assert set_state(compact_server, dspark_simulate_class=indices[one.name])
        name = f"{one.name} {time.time()}"
        answers = ask(compact_server, name)
        spread = float(one.accepted.std()) / (6 * TOKENS / one.accept_length) ** 0.5
        assert accept_length(answers) == pytest.approx(one.accept_length, abs=5 * spread + 0.02), one.name
        assert set(check_steps(compact_server, name, one).tolist()) == {GAMMA + 1}
    assert record(compact_server)["simulated"]["class"] == "hopeless"
    high = ask(compact_server, "named", custom_params={"dspark_simulate": "high"})
    assert accept_length(high) > 4, "a request's own class wins"
    assert not set_state(compact_server, dspark_simulate_class=99)
    assert record(compact_server)["simulated"]["class"] == "hopeless"
    log = compact_server.log_path.read_text(errors="replace")
    assert "ACCEPTANCE IS SIMULATED" in log, "at start"
    assert "replaying 'hopeless' from now on" in log, "at the switch"
    assert "SIMULATED acceptance: hopeless" in log, "beside the throughput"
    assert set_state(compact_server, dspark_force_budget_frac=-1, dspark_simulate_class=indices["middle"])


def test_what_makes_no_sense_is_refused(compact_server: ServerProcess) -> None:
    for params, text in (
        ({"regex": "[a-z]+"}, "grammar"),
        ({"custom_params": {"dspark_simulate": "x"}}, "one of high"),
    ):
        payload = {"text": "a", "sampling_params": params}
        response = requests.post(compact_server.url + "/generate", json=payload, timeout=60)
        assert response.status_code == 400
        assert text in response.text


@pytest.mark.parametrize("mode", ["static", "cap-accept"])
def test_a_mean_length_on_the_eager_step(target: Path, mode: str, tmp_path: Path) -> None:
    """The host's own variable, in a mode that trims as well: windows bind, and the ceiling shows the block."""
    env = {"SGLANG_RAGGED_VERIFY_MODE": mode, "SGLANG_DSPARK_DEBUG_DUMP": "reqs", "SGLANG_SIMULATE_ACC_LEN": "3.3"}
    flags = ["--disable-overlap-schedule", "--max-running-requests", "8"]
    flags += cost_table(tmp_path) if mode != "static" else []
    one = constant_class(3.3, "match-expected", GAMMA)
    with serve(target, *DSPARK, *flags, **env) as server:
        answers = ask(server, "constant")
        windows = check_steps(server, "constant", one)
        if mode == "static":
            assert accept_length(answers) == pytest.approx(3.3, abs=0.2)
        else:
            assert windows.min() < 4, "nothing was cut"
