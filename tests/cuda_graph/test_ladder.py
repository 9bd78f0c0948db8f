from __future__ import annotations

import numpy as np
import pytest

from dspark.cuda_graph.ladder import tier_ladder


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
