"""How far confidences can be believed, learned from sums of accepted drafts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from dspark.scheduler.trust import LIMIT, Trust, believed, observe, promise, rest

GAMMA = 7
CAPS = LIMIT ** np.arange(1, GAMMA + 1)


def learn(distort: Callable[[np.ndarray], np.ndarray], requests: int, steps: int, trust: Trust, seed: int = 0) -> Trust:
    """Full windows of requests whose drafts are accepted with about 0.75; the head claims ``distort`` of the truth."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        truth = rng.beta(6, 2, (requests, GAMMA))
        accepted = np.cumprod(rng.random(truth.shape) < truth, axis=1).sum()
        claimed = np.cumprod(distort(truth), axis=1).astype(np.float32)
        trust = observe(trust, promise(believed(claimed, trust.theta).ravel(), requests), float(accepted))
    return trust


@pytest.mark.parametrize("requests, steps", [(1, 3000), (16, 300), (128, 100)])
@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_a_head_that_is_off_by_a_power_is_seen_through(power: float, requests: int, steps: int) -> None:
    found = learn(lambda c: c**power, requests, steps, Trust())
    assert found.theta == pytest.approx(1 / power, rel=0.2)


def test_a_head_that_always_says_the_same_promises_what_comes() -> None:
    def constant(truth: np.ndarray) -> np.ndarray:
        return np.full_like(truth, 0.95)

    found = learn(constant, 16, 400, Trust())
    claimed = np.cumprod(np.full((16, GAMMA), 0.95), axis=1).astype(np.float32)
    truth = 16 * sum(0.75**k for k in range(1, GAMMA + 1))
    assert promise(believed(claimed, found.theta).ravel(), 16).expected == pytest.approx(truth, rel=0.1)


def test_a_new_workload_is_followed_within_a_few_dozen_steps() -> None:
    settled = learn(lambda c: c, 16, 1000, Trust())
    assert learn(lambda c: c**0.4, 16, 60, settled).theta == pytest.approx(2.5, rel=0.25)


def test_order_is_kept_and_one_changes_nothing() -> None:
    survival = np.cumprod(np.random.default_rng(0).random((8, GAMMA)) ** 0.2, axis=1).astype(np.float32)
    assert believed(survival, 1.0) is survival
    for theta in (0.2, 3.0, 100.0):
        changed = believed(survival, theta)
        assert (np.diff(changed, axis=1) <= 0).all()
        assert (np.diff(changed.ravel()[np.argsort(np.minimum(survival, CAPS), axis=None)]) >= 0).all()
        assert ((changed >= 0) & (changed <= 1)).all()


def test_nothing_is_learned_where_nothing_was_promised() -> None:
    trust = Trust(0.3, 0.01)
    assert observe(trust, promise(np.empty(0, dtype=np.float32), 1), 0.0) is trust


def test_without_a_draft_belief_returns_slowly() -> None:
    trust = Trust(2.0)
    for _ in range(16384):
        trust = rest(trust)
    assert trust.log_theta == pytest.approx(1.0, rel=0.01)
    assert rest(Trust()) == Trust()
    sure = Trust(0.0, 1e-4)
    for _ in range(10_000):
        sure = rest(sure)
    assert sure.variance == pytest.approx(0.06)
