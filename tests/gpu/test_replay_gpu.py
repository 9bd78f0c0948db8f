"""Replay kernels on a GPU: large batches, and captured graphs that see a class being switched."""

from __future__ import annotations

import pytest
import torch

from dspark.kernels import triton_replay as replay
from tests.compare import assert_equal
from tests.gpu.test_triton_gpu import captured
from tests.kernels.replay_cases import check_replay_accept, check_replay_draft, outcome, table_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("requests", "gamma"), [(1, 7), (64, 7), (256, 7), (1000, 5), (1024, 16)])
def test_against_the_references(requests: int, gamma: int) -> None:
    replayed = check_replay_draft(requests, gamma).tolist()
    check_replay_draft(requests, gamma, kept=0.9)
    lens = torch.randint(gamma + 2, (requests,), generator=torch.Generator().manual_seed(1)).tolist()
    for flat in (False, True):
        for ceiling in (False, True):
            check_replay_accept(replayed, lens, gamma, flat, ceiling)


def test_both_can_be_captured() -> None:
    requests, gamma = 40, 7
    table = table_of(gamma, requests)
    rows, positions = torch.arange(requests, device="cuda"), torch.arange(requests, device="cuda")
    drafts = torch.randint(1000, (requests, gamma), device="cuda")
    lens = torch.randint(1, gamma + 2, (requests,), device="cuda", dtype=torch.int32)
    confidence = torch.empty(requests, gamma, device="cuda")
    accepted = torch.empty(requests, dtype=torch.int32, device="cuda")
    out = outcome(requests, gamma, flat=True)

    def step() -> None:
        replay.replay_draft(table, rows, positions, accepted, confidence)
        replay.replay_accept(drafts, accepted, lens, out, None, positions)

    graph = captured(step)
    for selected in (0, 2, 1):
        table.selected.fill_(selected)
        positions.add_(13)
        graph.replay()
        found = accepted.clone(), confidence.clone(), out.committed.clone()
        required = torch.empty_like(accepted), torch.empty_like(confidence)
        replay.replay_draft_reference(table, rows, positions, *required)
        assert_equal(found[0], required[0], "accepted")
        assert_equal(found[1], required[1], "confidence")
        assert_equal(found[2], torch.minimum(required[0] + 1, lens).long(), "committed")
