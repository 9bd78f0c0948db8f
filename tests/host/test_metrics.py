"""What an operator reads in the log of a running server."""

from __future__ import annotations

import numpy as np
import pytest

from dspark.host.metrics import StepObserver
from dspark.observe.counters import StepCounts, StepFacts
from dspark.observe.wrong_draft import LEAST_DRAFTS

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
