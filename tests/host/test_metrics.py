"""What an operator reads in the log of a running server."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dspark.host.metrics import ObservedResult, StepObserver
from dspark.observe.counters import StepCounts, StepFacts
from dspark.observe.wrong_draft import LEAST_DRAFTS
from dspark.worker.relay import HostBuffers

GAMMA, SLOTS = 5, 64


def serve(observer: StepObserver, accepted: int) -> str | None:
    """As many steps as a verdict needs, in which every request accepts ``accepted`` drafts."""
    slots, ones = np.arange(SLOTS), np.ones(SLOTS, np.int64)
    for step in range(LEAST_DRAFTS // SLOTS + 1):
        facts = StepFacts(step, slots, ones, True, SLOTS * GAMMA, SLOTS * 6, "trimmed", None, None)
        observer.counters.add(facts, StepCounts(6 * ones, accepted * ones), float(step))
    return observer.log_suffix()


def test_a_draft_of_another_target_is_said(caplog: pytest.LogCaptureFixture) -> None:
    observer = StepObserver(GAMMA, SLOTS)
    assert "accepted 0.40" in (serve(observer, 2) or "")
    assert "first drafts" not in caplog.text
    assert "accepted 0.00" in (serve(observer, 0) or "")
    assert f"found 0 accepted of the last {-(-LEAST_DRAFTS // SLOTS) * SLOTS} first drafts" in caplog.text


def test_simulated_acceptance_says_nothing_about_the_draft(caplog: pytest.LogCaptureFixture) -> None:
    serve(StepObserver(GAMMA, SLOTS, simulated=True), 0)
    assert "first drafts" not in caplog.text


def observed(depth: int | None, stands_in: bool = False) -> StepObserver:
    """Two greedy requests accept both drafts of their windows; survivals behind a short block's end are 0."""
    observer, survival = StepObserver(GAMMA, SLOTS, estimates=True), torch.full((2, GAMMA), 0.5)
    if depth is not None:
        survival[:, depth - 1 :] = 0
    both, buffers = torch.tensor([2, 2]), HostBuffers(SLOTS, GAMMA, "cpu")
    result = ObservedResult(
        next_token_ids=torch.arange(2 * (GAMMA + 1)),
        accept_lens=both,
        facts=StepFacts(0, np.arange(2), np.ones(2, np.int64), True, 2, 4, "trimmed", None, None),
        accepted=both,
        windows=both,
        temperatures=np.zeros(2),
        depth=depth,
        stands_in=stands_in,
        survival=buffers.start(0, survival),
    )
    request = SimpleNamespace(is_retracted=False, finished=lambda: False)
    observer.processed(result, SimpleNamespace(reqs=[request, request]), [[1, 2], [3, 4]])
    observer.settle()
    return observer


def test_what_a_short_block_cannot_verify_is_censored() -> None:
    """The last row of a window tests the last draft of a block of two, which has no survival."""
    totals = {depth: observed(depth).calibration.totals() for depth in (None, 2)}
    assert totals[None]["judged"] == [2, 2, 0, 0, 0]
    assert totals[2]["judged"] == [2, 0, 0, 0, 0]
    assert totals[2]["censored"] == [0, 2, 2, 2, 2]
    assert totals[2]["predicted"][0] == 1.0
    assert totals[2]["accepted"] == [2, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("depth", "stands_in", "flags"),
    [(None, False, (True, False)), (None, True, (True, True)), (2, False, (False, True))],
)
def test_the_ceiling_is_told_whose_block_it_was(depth: int | None, stands_in: bool, flags: tuple[bool, bool]) -> None:
    ceiling = observed(depth, stands_in).ceiling
    assert ceiling is not None
    (step,) = [*ceiling._steps, *ceiling._new.steps]
    assert (step.whole, step.short_planned) == flags
