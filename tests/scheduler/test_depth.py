"""How many drafts of each block are drawn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.scheduler.depth import LEAST_GAIN, DepthTrust, DraftDepths, choose_depth, deepened, depth_ladder
from dspark.scheduler.planner import allocate

GAMMA = 7
SLOTS = np.array([8, 16, 64])
SAVED = np.array([[0.3, 0.2, 0.1], [0.6, 0.4, 0.2], [2.4, 1.6, 0.8]])
DEPTHS = DraftDepths((3, 4, 5), SLOTS, SAVED)


def survivals(requests: int, seed: int, mean: float = 0.6) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.cumprod(rng.beta(6 * mean, 6 * (1 - mean), (requests, GAMMA)), axis=1).astype(np.float32)


def test_the_ladder_leaves_the_whole_block_out() -> None:
    assert [depth_ladder(gamma) for gamma in (1, 2, 3, 4, 7)] == [[], [], [2], [2], [2, 3, 4, 5]]


def test_a_batch_saves_what_its_captured_size_saves() -> None:
    found = [DEPTHS.saved(requests) for requests in (7, 8, 9, 16, 17, 64, 65)]
    assert found[0] is None
    assert found[-1] is None
    assert [row.tolist() for row in found[1:-1] if row is not None] == SAVED[[0, 1, 1, 2, 2]].tolist()


def committed(survival: np.ndarray, drafts: int) -> float:
    """Tokens that the drafts which the step would verify commit on average."""
    admitted = np.arange(survival.shape[1]) < allocate(survival, drafts)[:, None] - 1
    return survival.shape[0] + float(survival[admitted].sum())


@settings(deadline=None, max_examples=150)
@given(st.integers(8, 64), st.integers(0, 10**6), st.floats(0.2, 0.95), st.floats(0.05, 1.0), st.floats(5.0, 40.0))
def test_no_depth_commits_more_per_second(requests: int, seed: int, mean: float, share: float, seconds: float) -> None:
    survival = survivals(requests, seed, mean)
    drafts = max(1, int(share * requests * GAMMA))
    found = choose_depth(survival, drafts, seconds, 0.0, DEPTHS)
    saved = DEPTHS.saved(requests)
    assert saved is not None
    rates = {GAMMA: committed(survival, drafts) / seconds}
    for depth, less in zip(DEPTHS.depths, saved, strict=True):
        if drafts <= requests * (depth - 1):
            rates[depth] = committed(survival[:, : depth - 1], drafts) / (seconds - less)
    if found is None:
        deepest = max((depth for depth in rates if depth < GAMMA), default=GAMMA)
        assert rates[GAMMA] * (1 + LEAST_GAIN) >= rates[deepest] * (1 - 1e-5)
        return
    assert drafts <= requests * (found.drafts - 1), "more drafts to verify than are drawn"
    assert found.admitted.size == drafts
    assert rates[found.drafts] >= rates[GAMMA] * (1 + LEAST_GAIN) * (1 - 1e-5)
    neighbours = [rates[depth] for depth in (found.drafts - 1, found.drafts + 1) if depth in rates]
    assert rates[found.drafts] >= max(neighbours, default=0.0) * (1 - 1e-5)


def test_the_last_drafts_are_left_out_only_where_that_pays() -> None:
    survival = survivals(64, 1)
    found = choose_depth(survival, 192, 11.0, 0.0, DEPTHS)
    assert found is not None
    assert found.drafts == 4
    assert found.seconds == pytest.approx(11.0 - SAVED[2, found.drafts - 3])
    nothing = DraftDepths(DEPTHS.depths, SLOTS, np.zeros_like(SAVED))
    assert choose_depth(survival, 300, 11.0, 0.0, nothing) is None, "saves nothing, loses tokens"
    assert choose_depth(survival, 128, 11.0, 11.0, DEPTHS) is None, "the host is no faster"
    assert choose_depth(survival, 64 * 5, 11.0, 0.0, DEPTHS) is None, "needs more drafts than a shallow block has"


def test_what_was_not_drawn_goes_on_as_the_row_began() -> None:
    survival = survivals(20, 2)
    cut = survival.copy()
    cut[:, 4:] = 0
    filled = deepened(cut, 5)
    np.testing.assert_array_equal(filled[:, :4], survival[:, :4])
    mean = survival[:, 3] ** 0.25
    np.testing.assert_allclose(filled[:, 4:], survival[:, 3:4] * mean[:, None] ** np.arange(1, 4), rtol=1e-5)
    assert (np.diff(filled, axis=1) <= 0).all()
    np.testing.assert_array_equal(cut[:, 4:], 0.0)
    assert not deepened(np.zeros((2, GAMMA), np.float32), 3).any()


def test_short_blocks_that_draft_worse_are_left_alone() -> None:
    survival = survivals(64, 1)
    found = [choose_depth(survival, 128, 11.0, 0.0, DEPTHS, factor) for factor in (1.0, 0.9, 0.3)]
    assert found[0] is not None
    assert found[1] is not None
    np.testing.assert_allclose(found[1].admitted, 0.9 * found[0].admitted, rtol=1e-6)
    assert found[2] is None
    slightly = DraftDepths((3,), SLOTS, np.full((3, 1), 0.01 * 11.0))
    assert choose_depth(survival, 128, 11.0, 0.0, slightly) is None, "one per cent is not worth it"


def test_what_short_blocks_keep_is_learned_against_whole_ones() -> None:
    random = np.random.default_rng(4)
    trust = DepthTrust()
    assert trust.factor == 1.0
    for step in range(4000):
        short = step % 32 > 0
        # Confidences promise a third too much of both; short blocks keep 90% of what whole ones do.
        trust = trust.seen(short, 90.0, random.poisson(60.0 * (0.9 if short else 1.0)))
    assert trust.factor == pytest.approx(0.9, abs=0.03)
    for step in range(20_000):
        trust = trust.seen(step % 32 > 0, 90.0, 80.0)
    assert trust.factor == pytest.approx(1.0, abs=0.01), "workloads change"
    better = DepthTrust(short=(1000.0, 1100.0), whole=(1000.0, 1000.0))
    assert better.factor == 1.0
