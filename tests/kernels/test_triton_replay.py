"""Replay kernels: against their references on hostile shapes, and the rule of the window on any window and block."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.kernels import triton_replay as replay
from tests.compare import assert_equal
from tests.kernels.replay_cases import check_replay_accept, check_replay_draft, outcome, table_of
from tests.kernels.triton_cases import DEVICE

WINDOWS = st.integers(1, 16).flatmap(
    lambda gamma: st.lists(st.tuples(st.integers(0, gamma), st.integers(0, gamma + 1)), min_size=1, max_size=20).map(
        lambda pairs: (gamma, pairs)
    )
)


@pytest.mark.parametrize(("requests", "gamma"), [(0, 3), (1, 1), (1, 7), (5, 16), (33, 7), (70, 5)])
def test_blocks_are_those_of_the_reference(requests: int, gamma: int) -> None:
    check_replay_draft(requests, gamma)
    check_replay_draft(requests, gamma, kept=0.6)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("ceiling", [False, True])
@pytest.mark.parametrize(("requests", "gamma"), [(0, 3), (1, 1), (37, 7), (3, 16)])
def test_acceptance_is_that_of_the_reference(requests: int, gamma: int, flat: bool, ceiling: bool) -> None:
    generator = torch.Generator().manual_seed(requests)
    replayed = torch.randint(gamma + 1, (requests,), generator=generator).tolist()
    lens = torch.randint(gamma + 2, (requests,), generator=generator).tolist()
    check_replay_accept(replayed, lens, gamma, flat, ceiling)


@settings(max_examples=300, deadline=None)
@given(WINDOWS)
def test_trimmed_rows_are_never_accepted(case: tuple[int, list[tuple[int, int]]]) -> None:
    """A drafts in the block, l rows verified: min(A + 1, l) tokens, the drafts first; uncut it would be A + 1."""
    gamma, pairs = case
    a, lens = (torch.tensor(column, dtype=torch.int32) for column in zip(*pairs, strict=True))
    drafts = torch.arange(len(pairs) * gamma).view(-1, gamma)
    out, ceiling = outcome(len(pairs), gamma, flat=False), torch.empty(len(pairs), dtype=torch.int32)
    replay.replay_accept_reference(drafts, a, lens, out, ceiling)
    for r, (block, rows) in enumerate(pairs):
        committed = min(block + 1, rows)
        assert int(out.committed[r]) == committed
        assert int(out.accepted[r]) == min(block, rows)
        assert int(ceiling[r]) == (block + 1 if rows else 0)
        rejected = int(drafts[r, min(block, gamma - 1)])
        wanted = [*drafts[r, :block].tolist(), rejected - 1 if rejected else 1][:committed]
        assert out.tokens[r, :committed].tolist() == wanted
        assert int(out.next_anchor[r]) == (wanted[-1] if rows else 0)


def test_short_blocks_keep_their_share() -> None:
    table = table_of(7, 4000)
    rows, positions = torch.arange(4000, device=DEVICE), torch.arange(4000, device=DEVICE)
    found = []
    for kept in (1.0, 0.75, 0.0):
        out = torch.empty(4000, dtype=torch.int32, device=DEVICE)
        replay.replay_draft(table, rows, positions, out, None, kept)
        found.append(out)
    some = found[0] > 0
    assert torch.equal(found[1][found[1] > 0], found[0][found[1] > 0]), "as many as the block says, or none"
    assert float((found[1][some] > 0).float().mean()) == pytest.approx(0.75, abs=0.03)
    assert not found[2].any()


def test_a_block_depends_on_seed_and_position_only() -> None:
    """Neither on the place in the batch nor on the other requests; and other positions replay other blocks."""
    table = table_of(7, 12)
    rows = torch.tensor([3, 9, 1, 6], device=DEVICE)
    positions = torch.tensor([5, 500, 7, 5], device=DEVICE)

    def blocks(rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(rows), 7, device=DEVICE)
        replay.replay_draft(table, rows, positions, torch.empty(len(rows), dtype=torch.int32, device=DEVICE), out)
        return out

    together = blocks(rows, positions)
    for r in range(4):
        assert_equal(blocks(rows[r : r + 1], positions[r : r + 1])[0], together[r], f"request {r} alone")
    assert_equal(blocks(rows.flip(0), positions.flip(0)).flip(0), together, "in another order")
    moved = blocks(rows, positions + 1)
    assert int((moved != together).any(1).sum()) >= 3


def test_a_named_class_wins_over_the_selected_one() -> None:
    table = table_of(3, 9)
    assert int(table.classes[5]) == 1
    confidence, accepted = torch.empty(200, 3, device=DEVICE), torch.empty(200, dtype=torch.int32, device=DEVICE)
    positions = torch.arange(200, device=DEVICE)

    def seen(row: int) -> set[int]:
        rows = torch.full_like(positions, row)
        replay.replay_draft(table, rows, positions, accepted, confidence)
        matches = (confidence[:, None] == table.confidence).all(-1)
        assert bool((matches.sum(1) == 1).all())
        return set(matches.nonzero()[:, 1].tolist())

    assert seen(5) == set(range(1, 6))
    assert len(seen(0)) > 100
    assert min(seen(0)) >= 6
    table.selected.fill_(0)
    assert seen(0) == {0}
    assert seen(5) == set(range(1, 6))
