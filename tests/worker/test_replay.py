"""The replay object: distribution of what is committed, switching, and what it says of itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dspark.scheduler.replay_blocks import BlockClass, constant_class, levels, load_classes
from dspark.types import AcceptResult, BlockProposal, DecodeBatch, VerifyPlan
from dspark.worker.replay import Replay
from tests.kernels.triton_cases import sampling_rows
from tests.scheduler.cases import TRACE

GAMMA, REQUESTS, STEPS = 7, 300, 40


def committed(replay: Replay, window: int = GAMMA + 1) -> torch.Tensor:
    """[STEPS, R] tokens committed by windows of ``window`` rows, each request at positions of its own."""
    rows, found = torch.arange(REQUESTS), []
    empty = rows[:, None].expand(-1, GAMMA + 1)
    batch = DecodeBatch(rows, rows, empty, empty, sampling_rows(REQUESTS, "greedy"), rows=rows)
    lens = torch.full((REQUESTS,), window, dtype=torch.int32)
    for step in range(STEPS):
        now = replace(batch, lengths=rows + 3 * step)
        confidence, out = (
            torch.empty(REQUESTS, GAMMA),
            AcceptResult(lens.clone(), lens.clone(), empty.clone(), rows * 1),
        )
        proposal = BlockProposal(empty[:, 1:], None, confidence)
        replay.settle()
        replay.draft(now, confidence)
        replay.accept(now, proposal, VerifyPlan(lens, empty), out, None)
        found.append(out.committed)
    return torch.stack(found)


def replay_of(classes: list[BlockClass], initial: int = 0) -> Replay:
    seeds = torch.randint(-(1 << 62), 1 << 62, (REQUESTS,), generator=torch.Generator().manual_seed(2))
    return Replay(classes, seeds, initial)


@pytest.mark.parametrize(
    "one",
    [*levels(GAMMA), *load_classes(TRACE, GAMMA)[:3], constant_class(3.3, "match-expected", GAMMA)],
    ids=lambda one: one.name,
)
@pytest.mark.parametrize("window", [GAMMA + 1, 3])
def test_lengths_are_distributed_as_in_the_class(one: BlockClass, window: int) -> None:
    found = np.bincount(committed(replay_of([one]), window).numpy().ravel(), minlength=GAMMA + 2)
    of_blocks = np.minimum(one.accepted + 1, window)
    expected = np.bincount(of_blocks, minlength=GAMMA + 2) / len(of_blocks)
    total = found.sum()
    error = np.abs(found / total - expected) / np.sqrt(np.maximum(expected * (1 - expected), 1 / total) / total)
    assert error.max() < 4.5, f"{found / total} against {expected}"


def test_classes_are_switched_between_steps() -> None:
    replay = replay_of(levels(GAMMA), 0)
    high = committed(replay).float().mean()
    replay.select(3)
    assert replay.selected == "hopeless"
    assert float(committed(replay).float().mean()) < 1.02
    replay.select(0)
    assert committed(replay).float().mean() == high, "the same seeds and positions replay the same blocks"
    replay.assign(torch.arange(REQUESTS // 2), torch.full((REQUESTS // 2,), 3))
    mixed = committed(replay).float().mean(0)
    assert float(mixed[: REQUESTS // 2].mean()) < 1.02
    assert float(mixed[REQUESTS // 2 :].mean()) > 5
    replay.assign(torch.arange(REQUESTS), torch.full((REQUESTS,), -1))
    assert committed(replay).float().mean() == high


def test_it_says_what_it_is() -> None:
    told = replay_of(levels(GAMMA), 1).describe()
    assert "meaningless" in told["note"]
    assert told["class"] == "middle"
    assert [entry["index"] for entry in told["classes"].values()] == [0, 1, 2, 3]
    assert told["classes"]["middle"]["accept_length"] == pytest.approx(3.3, abs=0.07)
