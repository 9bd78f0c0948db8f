"""Corrections that real steps teach: they converge, survive hiccups, fade, and stay bounded."""

from __future__ import annotations

import numpy as np
import pytest

from dspark.scheduler.refine import (
    MAX_CELLS,
    Refinement,
    StepSample,
    correction_of,
    floor_of,
    refine,
)

TIERS = np.array([8, 16, 32, 64])


def sample(tier: int, ratio: float, requests: int = 8, context: float = 8000.0, draft: bool = True) -> StepSample:
    """A step that took ``ratio`` times what the model says; the device never waits for the host."""
    return StepSample(draft, requests, tier, context, 0.01, 0.01 * ratio, 0.01 * ratio)


def learned(samples: list[StepSample], overlapped: bool = True) -> Refinement:
    state = Refinement.initial(overlapped)
    for at in range(0, len(samples), 16):
        state = refine(state, samples[at : at + 16])
    return state


def test_nothing_is_corrected_before_anything_was_seen() -> None:
    found = correction_of(Refinement.initial(True), 8, TIERS, 8000.0)
    assert found.factors.tolist() == [1.0] * 4
    assert (found.plain_factor, found.floor_seconds, found.evidence.sum()) == (1.0, 0.0, 0.0)


def test_each_tier_gets_its_own_correction() -> None:
    truth = {8: 1.5, 16: 1.2, 32: 0.9, 64: 0.7}
    rng = np.random.default_rng(0)
    samples = [sample(tier, ratio * (1 + 0.02 * rng.normal())) for _ in range(60) for tier, ratio in truth.items()]
    factors = correction_of(learned(samples), 8, TIERS, 8000.0).factors
    assert np.abs(factors / list(truth.values()) - 1).max() < 0.02


def test_what_is_shared_reaches_places_that_were_never_run() -> None:
    state = learned([sample(32, 1.4) for _ in range(64)])
    assert correction_of(state, 8, TIERS, 8000.0).factors == pytest.approx([1.4] * 4, rel=0.05)
    assert correction_of(state, 12, TIERS[1:], 12 * 4000.0).factors == pytest.approx([1.4] * 3, rel=0.05)


def test_contexts_and_kinds_are_told_apart() -> None:
    samples = [
        sample(8, 1.3, context=8 * 1000.0),
        sample(8, 0.8, context=8 * 32000.0),
        sample(8, 1.1, draft=False),
    ] * 40
    state = learned(samples)
    short, long = (correction_of(state, 8, TIERS, 8 * context) for context in (1000.0, 32000.0))
    assert short.factors[0] == pytest.approx(1.3, rel=0.02)
    assert long.factors[0] == pytest.approx(0.8, rel=0.02)
    assert short.plain_factor == pytest.approx(1.1, rel=0.02)


def test_slow_plain_steps_of_other_batches_do_not_keep_one_from_being_tried() -> None:
    state = learned([sample(64, 1.3, requests=64, context=0.0, draft=False)] * 40)
    assert correction_of(state, 64, TIERS, 0.0).plain_factor == pytest.approx(1.3, rel=0.05)
    assert correction_of(state, 16, TIERS, 0.0).plain_factor == 1.0
    fast = learned([sample(64, 0.8, requests=64, context=0.0, draft=False)] * 40)
    assert correction_of(fast, 16, TIERS, 0.0).plain_factor < 1.0


@pytest.mark.parametrize("hiccup", [5.0, 50.0])
def test_hiccups_hardly_count(hiccup: float) -> None:
    rng = np.random.default_rng(1)
    samples = [sample(8, hiccup if rng.random() < 0.05 else 1.1) for _ in range(320)]
    assert correction_of(learned(samples), 8, TIERS, 8000.0).factors[0] == pytest.approx(1.1, rel=0.03)


def test_a_shift_that_stays_is_followed() -> None:
    samples = [sample(8, 1.0)] * 320 + [sample(8, 1.4)] * 160
    assert correction_of(learned(samples), 8, TIERS, 8000.0).factors[0] == pytest.approx(1.4, rel=0.05)


def test_a_tier_that_is_not_visited_is_forgotten() -> None:
    """One bad visit must not condemn a tier for good: others speak for it once it has faded."""
    state = refine(learned([sample(64, 1.0)] * 320), [sample(16, 3.0)] * 4)
    condemned = correction_of(state, 8, TIERS, 8000.0).factors[1]
    for _ in range(2500):
        state = refine(state, [sample(64, 1.0)] * 16)
    assert condemned > 1.8
    later = correction_of(state, 8, TIERS, 8000.0)
    assert later.factors[1] < 1.15
    assert later.evidence[1] < 2.0  # due for a visit again


def waiting(seconds: float, busy: float, requests: int = 8) -> StepSample:
    return StepSample(True, requests, 8, 8000.0, busy, busy, seconds)


def test_the_host_s_pace_is_learned_by_batch_size() -> None:
    """The host needs 3 ms at 8 requests and 6 at 64, where the device needs 20."""
    samples = [waiting(3e-3, 2e-3), waiting(20.02e-3, 20e-3, requests=64)] * 32
    state = learned(samples)
    assert floor_of(state, 8) == pytest.approx(3e-3, rel=0.01)
    assert floor_of(state, 64) < 1e-3
    assert correction_of(state, 8, TIERS, 8000.0).factors[0] == pytest.approx(1.0, rel=0.01)  # the device's own time


def test_a_floor_that_is_too_high_comes_down() -> None:
    state = learned([waiting(5e-3, 2e-3)] * 64)
    for _ in range(40):
        state = refine(state, [waiting(3e-3, 2e-3)] * 16)
    assert floor_of(state, 8) == pytest.approx(3e-3, rel=0.03)


def test_a_floor_that_steps_fall_short_of_is_dropped() -> None:
    """Not lowered to what the device takes; and steps that it needs longer for say nothing of a floor."""
    state = learned([waiting(5e-3, 2e-3)] * 64)
    assert floor_of(refine(state, [waiting(6e-3, 5.9e-3)] * 16), 8) == pytest.approx(5e-3, rel=0.01)
    assert floor_of(refine(state, [waiting(6e-3, 5.9e-3)] * 15 + [waiting(3e-3, 2.99e-3)]), 8) == 0.0


def test_a_late_step_neither_makes_nor_ends_a_floor() -> None:
    """The host needs 2.2 ms, the device between 1.1 and 1.9: it waits for a short time, or for a long one."""
    one_late = [waiting(2.2e-3, 1.9e-3)] * 15 + [waiting(6e-3, 1.9e-3)]
    assert floor_of(learned(one_late), 8) == 0.0
    state = refine(learned([waiting(2.2e-3, 1.1e-3)] * 64), one_late)
    assert floor_of(state, 8) == pytest.approx(2.2e-3, rel=0.01)


def test_without_overlap_the_host_adds_to_every_step() -> None:
    state = learned([waiting(3e-3, 2e-3)] * 64, overlapped=False)
    assert floor_of(state, 8) == 0.0
    assert correction_of(state, 8, TIERS, 8000.0).factors[0] == pytest.approx(1.5, rel=0.02)


def test_memory_is_bounded_and_the_state_before_is_kept() -> None:
    rng = np.random.default_rng(2)
    state = Refinement.initial(True)
    for _ in range(200):
        before, sizes = state, state.weights.size
        samples = [
            sample(int(rng.integers(8, 2000)), 1.0, requests=int(rng.integers(1, 256)), context=rng.uniform(0, 1e6))
            for _ in range(32)
        ]
        state = refine(state, samples)
        assert before.weights.size == sizes
    assert state.weights.size == MAX_CELLS


def test_useless_times_are_left_out() -> None:
    bad = StepSample(True, 8, 8, 100.0, 0.0, 0.01, 0.01), StepSample(True, 8, 8, 100.0, 0.01, 0.0, 0.0)
    assert refine(Refinement.initial(True), bad).weights.size == 0
