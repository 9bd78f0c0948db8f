"""What the statistics say of steps that were not run: full windows and plain decoding, for the steps that were."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dspark.cuda_graph.timing import StepTime
from dspark.scheduler.depth import DepthTrust
from dspark.scheduler.refine import Refinement
from dspark.scheduler.tier_costs import TierCosts
from dspark.scheduler.trust import Promise
from dspark.worker.learning import CostLearner, TrustLearner
from tests.scheduler.cases import steep

GAMMA = 7


@pytest.mark.parametrize("plain", [True, False])
def test_the_same_steps_with_full_windows_and_without_a_draft(plain: bool) -> None:
    """Three requests, 12 of 24 rows: 2 ms and 0.1 ms per row; plain decoding 1 ms and as much."""
    learner = CostLearner(TierCosts(steep(64, plain=plain), np.arange(1, 65), GAMMA), None)
    note = learner.note(True, 3, 12, 3 * 100.0)
    learner.learn([StepTime(note, 0.004, 0.004)] * 5)
    (row,) = learner.statistics()["by_batch_and_context"]
    assert (row["requests"], row["context_from"], row["steps"]) == (3, 64, 5)
    assert row["predicted_seconds"] == pytest.approx(5 * 0.0032)
    assert row["full_window_seconds"] == pytest.approx(5 * 0.0044)
    assert row["plain_seconds"] == (pytest.approx(5 * 0.0013) if plain else None)


def test_a_shallow_step_teaches_the_same_of_its_tier_as_a_whole_one() -> None:
    """The model takes a step for 3.2 ms that takes 4.8; without the last drafts it takes 3.8."""
    learner = CostLearner(TierCosts(steep(64), np.arange(1, 65), GAMMA), Refinement.initial(overlapped=True))
    for _ in range(400):
        for saved in (0.0, 0.001):
            note = learner.note(True, 3, 12, 300.0, saved)
            learner.learn([StepTime(note, 0.0048 - saved, 0.0048 - saved)])
    assert learner.note(True, 3, 12, 300.0).believed()[1] == pytest.approx(0.0048, rel=0.01)
    assert learner.note(True, 3, 12, 300.0, 0.001).believed()[1] == pytest.approx(0.0038, rel=0.01)


@pytest.mark.parametrize("graph", [True, False])
def test_short_blocks_are_compared_with_whole_ones_in_their_place_alone(graph: bool) -> None:
    """They keep 90% of what these do; other steps of whole blocks do much worse. Without a graph none are short."""
    learner, slots, context, committed = TrustLearner(2), np.arange(10), 0.0, []
    promised = Promise(drafts=100, expected=80.0, slope=-18.0, noise=20.0)
    for step in range(3000):
        context += committed[-2] if len(committed) > 1 else 0.0
        learner.arrive(slots, slots, context)
        if step % 4 == 0:  # verifies too much for a short block
            learner.remember(slots, slots, context, promised, drafted=True)
            committed.append(10 + 20.0)
        elif step % 32 == 1:
            learner.remember(slots, slots, context, promised, drafted=True, stands_in=True)
            committed.append(10 + 80.0)
        else:
            factor = learner.depth.factor
            own = replace(promised, expected=80.0 * factor)
            learner.remember(slots, slots, context, own, drafted=True, short=factor)
            if not graph:
                learner.ran_whole()
            committed.append(10 + 72.0)
    assert learner.steps > 2900
    assert learner.depth.factor == pytest.approx(0.9 if graph else 1.0, abs=0.01)


@pytest.mark.parametrize("drafted", [True, False])
def test_short_blocks_that_are_left_alone_are_tried_again(drafted: bool) -> None:
    """Nothing is learned of them then, whatever else the server does."""
    learner, slots = TrustLearner(2), np.arange(10)
    learner.depth = DepthTrust(short=(20_000.0, 10_000.0), whole=(1000.0, 1000.0))
    assert learner.depth.factor == pytest.approx(0.5, abs=0.01)
    promised = Promise(drafts=100, expected=80.0, slope=-18.0, noise=20.0) if drafted else None
    for step in range(40_000):
        learner.arrive(slots, slots, (10 + 80.0 * drafted) * step)
        learner.remember(slots, slots, (10 + 80.0 * drafted) * step, promised, drafted)
    assert learner.depth.factor > 0.97
