"""Both arms of the timed tail do the same work: the same tokens leave the step."""

from __future__ import annotations

import pytest
import torch

from benchmarks.verify_tail import COPIES, KINDS, tail
from dspark.kernels.triton_accept_greedy import COLUMNS
from tests.compare import assert_equal

REQUESTS, GAMMA, VOCAB = 5, 3, 97


@pytest.mark.parametrize("name", KINDS)
def test_both_arms_commit_the_same(name: str) -> None:
    torch.manual_seed(0)
    fused, plain, moved = tail(REQUESTS, GAMMA, VOCAB, name, "cpu")
    assert moved == REQUESTS * (GAMMA + 1) * VOCAB * 2 + (REQUESTS * VOCAB * 6 if KINDS[name] == "sampled" else 0)
    committed = []
    for _ in range(COPIES):
        tokens, other = fused(), plain()
        window = REQUESTS * (GAMMA + 1)
        ends = window + REQUESTS * (COLUMNS - 1)
        columns, required = (flat[window:ends].view(-1, REQUESTS) for flat in (tokens, other))
        assert_equal(columns, required, "accepted, committed, anchor, lengths, verify lengths")
        kept = torch.arange(GAMMA + 1) < columns[1][:, None]
        texts = (flat[:window].view(REQUESTS, -1)[kept] for flat in (tokens, other))
        assert_equal(*texts, "committed tokens")
        committed.append(columns[1])
    counts = torch.stack(committed)
    assert counts.unique().numel() > 1, "chains that all end alike time one path only"
    assert not counts.eq(counts[0]).all(), "the copies of the logits are the same"
