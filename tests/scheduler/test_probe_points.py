"""Which steps are timed at start, and what is fitted to them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.cuda_graph.ladder import slot_ladder, tier_ladder
from dspark.errors import CostTableError
from dspark.scheduler.cost_fit import PartSamples, fit_parts
from dspark.scheduler.probe_points import Part, Point, probe_points


def points_of(most: int, window: int, pool: int, width: int, full: bool = False) -> list[Point]:
    tiers = tier_ladder(most, window).tolist()
    return probe_points(tiers, slot_ladder(most), window, pool=pool, width=width, full_windows=full)


@given(st.integers(1, 256), st.integers(2, 9), st.integers(5_000, 2_000_000), st.integers(64, 140_000), st.booleans())
def test_every_point_can_be_run(most: int, window: int, pool: int, width: int, full: bool) -> None:
    tiers, slots = tier_ladder(most, window).tolist(), slot_ladder(most)
    points = points_of(most, window, pool, width, full)
    for point in points:
        assert 1 <= point.requests <= most
        assert point.requests <= point.rows <= point.requests * window
        assert 0 <= point.context <= width - 2 * window
        assert point.requests * (point.context + 2 * window) <= pool
        if point.part == "verify":
            assert point.size in tiers
            assert point.rows <= point.size
            assert not full or point.rows == point.requests * window or point.size < window
        else:
            assert point.size in slots
            assert point.requests == point.rows == point.size
    assert {point.size for point in points if point.part == "verify"} == set(tiers)
    for part in ("draft", "plain"):
        assert {point.size for point in points if point.part == part} == set(slots)


def test_contexts_reach_from_short_to_long() -> None:
    points = points_of(128, 8, 600_000, 40_960)
    assert {512, 8192, 32768} <= {point.context for point in points if point.requests == 1}
    assert {512, 2048} <= {point.context for point in points if point.requests == 128}
    assert len(points) < 130


def true_seconds(part: Part, size: float, context: float, context_rows: float) -> float:
    curves = {"draft": (1e-3, 2e-5, 1e-9), "verify": (4e-3, 3e-5, 3e-8), "plain": (4e-3, 2e-5, 2.8e-8)}
    base, slope, rho = curves[part]
    return base + slope * max(size - 16, 0.0) + rho * context + 2e-10 * context_rows


def samples(points: list[Point], part: Part, noise: float, rng: np.random.Generator) -> PartSamples:
    own = [point for point in points if point.part == part]
    rows = [(point.size, point.context_tokens, point.context_rows) for point in own]
    seconds = [true_seconds(part, *row) * (1 + noise * rng.normal()) for row in rows]
    return PartSamples(*np.array(rows, dtype=np.float64).T, np.array(seconds))


@pytest.mark.parametrize("noise, bound", [(0.0, 1e-6), (0.01, 0.03)])
def test_a_known_step_is_recovered_from_its_parts(noise: float, bound: float) -> None:
    points, rng = points_of(128, 8, 600_000, 40_960), np.random.default_rng(3)
    fitted = fit_parts(*(samples(points, part, noise, rng) for part in ("draft", "verify", "plain")))
    for requests in (1, 8, 32, 128):
        for context in (1e3, 8e3, 32e3):
            tokens = requests * context
            tiers = np.array([2 * requests, 8 * requests])
            want = [
                true_seconds("draft", requests, tokens, 0.0) + true_seconds("verify", tier, tokens, context * tier)
                for tier in tiers
            ]
            assert np.abs(fitted.seconds(requests, tiers, tokens) / want - 1).max() <= bound
            plain = fitted.plain_step(requests, tokens)
            assert plain is not None
            assert abs(plain / true_seconds("plain", requests, tokens, 0.0) - 1) <= bound
    assert fitted.relative_error <= 2 * noise + 1e-6


def test_a_stopped_clock_is_refused() -> None:
    ones = np.ones(3)
    good, bad = PartSamples(np.arange(1.0, 4.0), ones, 0 * ones, ones), PartSamples(ones, ones, ones, 0 * ones)
    with pytest.raises(CostTableError, match="verify of timed graphs"):
        fit_parts(good, bad, good)
