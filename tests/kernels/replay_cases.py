"""Inputs and checks of the replay kernels, for the interpreter and for a GPU."""

from __future__ import annotations

from dataclasses import fields

import torch

from dspark.kernels import triton_replay as replay
from dspark.kernels.triton_accept_greedy import FlatResult
from dspark.types import AcceptResult
from tests.compare import assert_equal
from tests.kernels.triton_cases import DEVICE, poisoned, spread

COUNTS = [1, 5, 300]  # blocks of three classes


def table_of(gamma: int, rows: int, selected: int = 2) -> replay.ReplayTable:
    """Random blocks; every third request row names a class."""
    generator = torch.Generator().manual_seed(gamma)
    blocks = sum(COUNTS)
    named = torch.arange(rows) % 3 - 1
    seeds = torch.randint(-(1 << 62), 1 << 62, (rows,), generator=generator)
    parts = (
        torch.rand(blocks, gamma, generator=generator),
        torch.randint(gamma + 1, (blocks,), generator=generator, dtype=torch.int32),
        torch.tensor([0, *COUNTS[:-1]]).cumsum(0),
        torch.tensor(COUNTS),
        torch.tensor([selected]),
        torch.where(torch.arange(rows) % 3 == 2, named, -1),
        seeds,
    )
    return replay.ReplayTable(*(part.to(DEVICE) for part in parts))


def check_replay_draft(requests: int, gamma: int, kept: float = 1.0) -> torch.Tensor:
    """Kernel against reference, to the bit; returns what was accepted."""
    rows = requests + 4
    table = table_of(gamma, rows)
    generator = torch.Generator().manual_seed(requests)
    chosen = torch.randperm(rows, generator=generator)[:requests].to(DEVICE)
    positions = torch.randint(1 << 40, (requests,), generator=generator).to(DEVICE)
    results = []
    for launch in (replay.replay_draft_triton, replay.replay_draft_reference):
        wide = poisoned(requests, gamma + 3, dtype=torch.float32)
        accepted, alone = (poisoned(requests, dtype=torch.int32) for _ in range(2))
        launch(table, chosen, positions, accepted, wide[:, 1 : gamma + 1], kept)
        launch(table, chosen, positions, alone, None, kept)
        assert_equal(alone, accepted, "accepted without confidences")
        results.append((accepted, wide))
    for name, found, required in zip(("accepted", "confidence and its neighbours"), *results, strict=True):
        assert_equal(found, required, name)
    return results[0][0]


def outcome(requests: int, gamma: int, flat: bool) -> AcceptResult:
    """Poison: nothing of what the real rule has left is read."""
    if flat:
        out: AcceptResult = FlatResult.empty(requests, gamma + 1, DEVICE)
        assert isinstance(out, FlatResult)
        out.flat.fill_(-77)
    else:
        tokens = poisoned(requests, gamma + 1, dtype=torch.int64)
        counts = (poisoned(requests, dtype=torch.int32) for _ in range(2))
        out = AcceptResult(*counts, tokens, poisoned(requests, dtype=torch.int64))
    return out


def check_replay_accept(replayed: list[int], lens: list[int], gamma: int, flat: bool, ceiling: bool) -> AcceptResult:
    """Kernel against reference, to the bit; returns the outcome."""
    requests = len(lens)
    drafts = spread(torch.arange(requests * gamma).view(requests, gamma).to(DEVICE))
    a = torch.tensor(replayed, dtype=torch.int32, device=DEVICE)
    windows = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    positions = 7 * torch.arange(requests, device=DEVICE)
    outs, ceilings = [], []
    for launch in (replay.replay_accept_triton, replay.replay_accept_reference):
        out = outcome(requests, gamma, flat)
        of_uncut = out.ceiling if isinstance(out, FlatResult) else poisoned(requests, dtype=torch.int32)
        launch(drafts, a, windows, out, of_uncut if ceiling else None, positions if flat else None)
        outs.append(out)
        ceilings.append(of_uncut)
    assert_equal(ceilings[0], ceilings[1], "ceiling")
    kept = torch.arange(gamma + 1, device=DEVICE) < outs[1].committed[:, None]
    assert_equal(outs[0].tokens[kept], outs[1].tokens[kept], "tokens")
    for field in fields(FlatResult if flat else AcceptResult):
        if field.name not in ("tokens", "flat", "ceiling"):
            assert_equal(getattr(outs[0], field.name), getattr(outs[1], field.name), field.name)
    return outs[0]
