from __future__ import annotations

import numpy as np
import pytest

from dspark.cuda_graph.ladder import slot_ladder, tier_ladder


@pytest.mark.parametrize("window", range(2, 10))
@pytest.mark.parametrize("requests", [1, 2, 3, 7, 32, 64, 129, 512])
def test_a_ladder_holds_every_batch_and_wastes_little(requests: int, window: int) -> None:
    ladder = tier_ladder(requests, window)
    assert (np.diff(ladder) > 0).all()
    assert ladder[0] == 1
    assert ladder[-1] == requests * window
    above = ladder[ladder >= 64]
    assert (above[1:] / above[:-1] <= 1.125 + 1e-9).all()
    assert ladder.size < 64


def test_one_request_of_gamma_7_can_verify_few_rows() -> None:
    assert tier_ladder(1, 8).tolist() == [1, 2, 3, 4, 6, 8]


@pytest.mark.parametrize("most", [1, 5, 24, 100, 128, 160, 256, 1000])
def test_batches_of_a_power_of_two_are_captured_as_they_are(most: int) -> None:
    slots = slot_ladder(most)
    assert slots == sorted(set(slots))
    assert slots[-1] == most
    assert {2**power for power in range(11) if 2**power <= most} <= set(slots)
    above = np.array([size for size in slots if size >= 8])
    assert (above[1:] / above[:-1] <= 1.5).all()
