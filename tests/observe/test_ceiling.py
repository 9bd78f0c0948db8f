"""The estimated ceiling against a process whose ceiling is known."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dspark.observe.ceiling import Ceiling, TrimmedSteps, ceiling, tails
from tests.observe.chain import Run, distributions, run

KINDS = {"peaked": (3.0, 1.0), "flat": (1.0, 0.5), "poor draft": (2.0, 2.5)}


def estimates(kind: str, runs: int, greedy: bool = False) -> list[tuple[Run, Ceiling]]:
    random = np.random.default_rng(17)
    found = []
    for _ in range(runs):
        p, q = distributions(random, 40, *KINDS[kind])
        one = run(random, p, q, 260, greedy=greedy)
        found.append((one, ceiling(one.known, one.committed, one.steps)))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_is_exact(kind: str) -> None:
    for one, found in estimates(kind, 20, greedy=True):
        assert found.low == found.middle == found.high == one.truth


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_intervals_cover_the_truth(kind: str) -> None:
    found = estimates(kind, 200)
    covered = np.mean([estimate.low <= one.truth <= estimate.high for one, estimate in found])
    error = np.array([estimate.middle / one.truth - 1 for one, estimate in found])
    width = np.mean([(estimate.high - estimate.low) / one.truth for one, estimate in found])
    print(
        kind, f"covered {covered:.3f}, bias {error.mean():+.4f}, |error| {np.abs(error).mean():.4f}, width {width:.3f}"
    )
    assert covered >= 0.9
    assert abs(error.mean()) < 0.01
    assert np.abs(error).mean() < 0.03


def test_an_answer_that_ended_is_left_out_and_counted() -> None:
    one, _ = estimates("flat", 1)[0]
    realised = one.steps.realised.copy()
    realised[:5] = -1
    cut = dataclasses.replace(one.steps, realised=realised)
    found = ceiling(one.known, one.committed, cut)
    hidden = int((one.steps.left_out[:5] > 0).sum())
    assert found.unresolved == hidden > 0
    assert found.steps == one.known.shape[0] + one.committed.shape[0] - hidden


def test_a_draft_that_parts_needs_no_later_tokens() -> None:
    zeros = np.zeros((1, 3))
    steps = TrimmedSteps(np.array([3]), np.array([[4, 5, 6]]), np.array([[4, 9, -1]]), np.array([True]), zeros, zeros)
    found = tails(steps)
    assert found.resolved.all()
    assert found.mean.tolist() == [1.0]


def test_nothing_hidden_is_nothing_estimated() -> None:
    none = np.zeros((0, 3))
    empty = np.zeros(0, np.int64)
    steps = TrimmedSteps(empty, none.astype(np.int64), none.astype(np.int64), empty.astype(bool), none, none)
    assert ceiling(np.array([3, 4]), empty, steps) == Ceiling(2, 0, 7, 7.0, 7.0, 7.0)
