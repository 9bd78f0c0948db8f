"""Ranks decide for themselves and must decide alike: only from what is the same on all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark.config import Settings
from dspark.cuda_graph.timing import StepTime
from dspark.host import arguments, schedule
from dspark.worker.budget import BudgetScheduler
from tests.host.served import served_args

STEPS, REQUESTS, SLOTS = 120, 4, 9


@pytest.fixture
def args(target: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "compact")
    return served_args(target)


def decisions(args: Any, speed: float) -> list[tuple[int, int]]:
    """Drafts and rows of the steps of a rank on which each one takes ``speed`` times what was predicted, and more the
    more rows it has."""
    spec = arguments.draft_spec_of(args)
    budgets: BudgetScheduler = schedule.build_scheduler(
        args, spec, Settings.from_environment(), None, measured=None, slots=SLOTS, graph_tiers=[4, 8, 16, 32]
    )
    slots, born, random = np.arange(REQUESTS), np.ones(REQUESTS, np.int64), torch.Generator().manual_seed(3)
    found = []
    for _ in range(STEPS):
        budget = budgets.decide(slots, born, 100.0)
        note = budgets.note()
        assert note is not None
        seconds = note.predicted_seconds * speed ** (budget.tier / 8)
        budgets.learn([StepTime(note, seconds, seconds)])
        survival = torch.rand(REQUESTS, spec.gamma, generator=random).pow(0.3).cumprod(1)
        budgets.publish(survival if budget.draft else None, budget.tier)
        found.append((int(budget.drafts), budget.tier))
    return found


@pytest.mark.parametrize(("ranks", "alike"), [(1, False), (2, True), (8, True)])
def test_a_rank_among_others_learns_nothing_from_its_own_clock(
    args: Any, monkeypatch: pytest.MonkeyPatch, ranks: int, alike: bool
) -> None:
    """Steps that take long on one rank and short on another: one rank alone does follow its clock."""
    monkeypatch.setitem(vars(args), "tp_size", ranks)
    slow, fast = decisions(args, 3.0), decisions(args, 0.4)
    assert (slow == fast) == alike
    assert len(set(slow)) > 1, "the decisions never change: nothing was tested"
