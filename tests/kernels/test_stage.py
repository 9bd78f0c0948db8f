from __future__ import annotations

import pytest
import torch

from dspark.cuda_graph.static import StepBuffers
from tests.compare import assert_equal


@pytest.mark.parametrize("count", [1, 3, 8])
def test_a_batch_is_staged_and_the_rest_is_padding(count: int) -> None:
    buffers = StepBuffers(8, 4, "cpu")
    for buffer in (buffers.rows, buffers.anchors, buffers.lengths):
        buffer.fill_(-7)
    buffers.live.fill_(True)
    values = [torch.arange(count) + 10 * k for k in (1, 2, 3)]
    buffers.stage(values[0], values[1], values[2].to(torch.int32), 5)
    padding = torch.zeros(8 - count, dtype=torch.int64)
    for buffer, want in zip((buffers.rows, buffers.anchors, buffers.lengths), values, strict=True):
        assert_equal(buffer, torch.cat([want, padding]), "staged")
    assert buffers.live.tolist() == [slot < count for slot in range(8)]
    assert buffers.budget.tolist() == [5]
