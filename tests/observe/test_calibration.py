"""Online calibration against planted truths and against measures by other means."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dspark.observe.calibration import BlockFacts, CalibrationWindows, position_statistics
from dspark.scheduler.calibration import calibration_error, noise_floor

GAMMA = 4


def blocks(
    random: np.random.Generator, count: int, *, boldness: float = 1.0, temperature: float = 0.0, trim: bool = False
) -> BlockFacts:
    """Blocks whose drafts pass with ``confidence ** boldness``; 1 is perfect calibration."""
    confidence = random.random((count, GAMMA)) * 0.8 + 0.2
    passed = random.random((count, GAMMA)) < confidence**boldness
    accepted = np.multiply.accumulate(passed, axis=1).sum(axis=1)
    survival = np.multiply.accumulate(confidence, axis=1).astype(np.float32)
    # As a scheduler does: what is left out depends on the survivals.
    tested = (survival > 0.3).sum(axis=1) if trim else np.full(count, GAMMA)
    return BlockFacts(survival, tested, np.minimum(accepted, tested), np.full(count, temperature))


@pytest.mark.parametrize("trim", [False, True])
def test_planted_calibration_is_recognised(trim: bool) -> None:
    random, windows = np.random.default_rng(1), CalibrationWindows(GAMMA, 20_000)
    honest = blocks(random, 20_000, trim=trim)
    windows.add(honest)
    windows.add(blocks(random, 20_000, boldness=2.0, temperature=0.8, trim=trim))
    found = windows.statistics()["classes"]
    assert set(found) == {"greedy", "to_1"}
    for place in range(GAMMA):
        good, bad = found["greedy"]["positions"][place], found["to_1"]["positions"][place]
        assert good["ece"] < 2 * good["noise_floor"]
        assert bad["ece"] > 5 * bad["noise_floor"]
        assert good["auc"] > 0.55
        assert good["censored"] == (int((honest.survival[:, place] <= 0.3).sum()) if trim else 0)
        assert good["judged"] + good["censored"] == 20_000


def test_what_has_no_survival_is_censored_though_it_was_tested() -> None:
    """The last row of a window tests a draft that could not be verified: it has no prediction, which is not 0."""
    facts, windows = blocks(np.random.default_rng(3), 300), CalibrationWindows(GAMMA)
    windows.add(facts)
    windows.add(replace(facts, survival=facts.survival[:, :2]))
    totals = windows.totals()
    assert totals["judged"] == [600, 600, 300, 300]
    assert totals["censored"] == [0, 0, 300, 300]
    assert totals["predicted"] == pytest.approx(facts.survival.sum(axis=0) * [2, 2, 1, 1], rel=1e-5)
    passed = (facts.accepted[:, None] >= np.arange(1, GAMMA + 1)).sum(axis=0)
    assert totals["accepted"] == (passed * [2, 2, 1, 1]).tolist()


def test_measures_equal_those_of_the_fit_and_of_pairs() -> None:
    facts = blocks(np.random.default_rng(2), 300)
    passed = facts.accepted[:, None] >= np.arange(1, GAMMA + 1)
    predicted = facts.survival.astype(np.float64)
    found = [position_statistics(predicted[:, place], passed[:, place]) for place in range(GAMMA)]
    assert [one["ece"] for one in found] == pytest.approx(calibration_error(predicted, passed.astype(float)))
    assert [one["noise_floor"] for one in found] == pytest.approx(noise_floor(predicted, passed.astype(float)))
    good, bad = np.round(predicted[passed[:, 0], 0], 1), np.round(predicted[~passed[:, 0], 0], 1)
    pairs = (good[:, None] > bad).mean() + (good[:, None] == bad).mean() / 2
    tied = position_statistics(np.round(predicted[:, 0], 1), passed[:, 0])
    assert tied["auc"] == pytest.approx(pairs)
    assert tied["brier"] == pytest.approx(((np.round(predicted[:, 0], 1) - passed[:, 0]) ** 2).mean())
    for name in ("judged", "predicted", "accepted"):
        assert sum(tied["bins"][name]) == pytest.approx(tied[name])


def test_windows_slide_and_totals_stay() -> None:
    windows = CalibrationWindows(GAMMA, 100)
    random = np.random.default_rng(3)
    steps = [blocks(random, 7) for _ in range(200)]
    for step in steps:
        windows.add(step)
    found = windows.statistics()
    last = np.concatenate([step.survival for step in steps])[-100:, 0]
    assert found["classes"]["greedy"]["blocks"] == 100
    assert found["classes"]["greedy"]["positions"][0]["predicted"] == pytest.approx(last.sum(dtype=np.float64))
    assert found["totals"]["judged"] == [1400] * GAMMA
    assert found["totals"]["accepted"][0] == sum(int((step.accepted > 0).sum()) for step in steps)
    windows.clear()
    assert windows.statistics() == CalibrationWindows(GAMMA, 100).statistics()


def test_classes_invalid_rows_and_single_outcomes() -> None:
    windows = CalibrationWindows(1)
    survival = np.array([[0.5], [0.5], [1.0], [0.0], [np.nan], [1.5]], dtype=np.float32)
    ones = np.ones(6, dtype=np.int64)
    windows.add(BlockFacts(survival, ones, ones, np.array([0.0, 0.5, 0.7, 1.3, 0.0, 0.0])))
    found = windows.statistics()
    assert found["invalid"] == 2
    assert {name: one["blocks"] for name, one in found["classes"].items()} == dict.fromkeys(
        ("greedy", "to_0.5", "to_1", "above_1"), 1
    )
    assert found["classes"]["greedy"]["positions"][0]["auc"] is None
    nothing = position_statistics(np.empty(0), np.empty(0, dtype=bool))
    assert (nothing["judged"], nothing["ece"], nothing["brier"]) == (0, None, None)
