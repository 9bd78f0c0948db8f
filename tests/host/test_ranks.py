"""Ranks decide for themselves and must decide alike: only from what is the same on all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark.config import Settings
from dspark.cuda_graph.timing import StepTime
from dspark.errors import HostError
from dspark.host import arguments, rank_group, schedule
from dspark.host.rank_group import Ranks
from dspark.host.rank_start import require_equal_ranks
from dspark.scheduler.cost import CostModel
from dspark.worker.budget import BudgetScheduler
from tests.host.served import served_args

STEPS, REQUESTS, SLOTS = 120, 4, 9
PLAIN_SECONDS = 6e-3


@pytest.fixture
def args(target: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "compact")
    return served_args(target)


def table_of_steps(plain_seconds: float) -> CostModel:
    """A measured table; how often drafts are worth their time depends on what a step without them takes."""
    rows, batches = np.array([4.0, 8.0, 16.0, 32.0]), np.array([1.0, 8.0])
    return CostModel(
        2e-3, batches, np.array([1e-3, 2e-3]), rows, 1e-3 * rows, plain_probes=batches,
        plain_seconds=np.full(2, plain_seconds), relative_error=0.01, source="measured at start",
    )  # fmt: skip


def decisions(args: Any, speed: float, measured: CostModel | None = None) -> list[tuple[bool, int, int]]:
    """Draft or not, drafts and rows of the steps of a rank on which each one takes ``speed`` times what was predicted,
    and more the more rows it has."""
    spec = arguments.draft_spec_of(args)
    budgets: BudgetScheduler = schedule.build_scheduler(
        args, spec, Settings.from_environment(), None, measured=measured, slots=SLOTS, graph_tiers=[4, 8, 16, 32]
    )
    slots, born, random = np.arange(REQUESTS), np.ones(REQUESTS, np.int64), torch.Generator().manual_seed(3)
    found = []
    for _ in range(STEPS):
        budget = budgets.decide(slots, born, 100.0)
        note = budgets.note()
        assert note is not None
        seconds = note.believed()[1] * speed ** (budget.tier / 8)
        budgets.learn([StepTime(note, seconds, seconds)])
        survival = torch.rand(REQUESTS, spec.gamma, generator=random).pow(0.3).cumprod(1)
        budgets.publish(survival if budget.draft else None, budget.tier)
        found.append((budget.draft, int(budget.drafts), budget.tier))
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


@pytest.mark.parametrize(("ranks", "alike"), [(1, False), (3, True)])
def test_a_measured_table_gives_all_ranks_the_same_steps(
    args: Any, monkeypatch: pytest.MonkeyPatch, ranks: int, alike: bool
) -> None:
    """As in service, where clocks differ again once the table is shared. It holds what the device does; where the host
    sets the pace, plain steps are no faster than drafted ones, and only one rank alone would learn that."""
    monkeypatch.setitem(vars(args), "tp_size", ranks)
    slow, fast = (decisions(args, speed, table_of_steps(PLAIN_SECONDS)) for speed in (3.0, 0.4))
    assert (slow == fast) == alike
    assert {draft for draft, _, _ in slow} == ({True} if ranks > 1 else {True, False})
    assert len({drafts for _, drafts, _ in slow}) > 1


@pytest.fixture
def ask(args: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Runs the check as another rank of two would, and returns what it says of itself."""
    monkeypatch.setitem(vars(args), "tp_size", 2)
    said: list[dict[str, Any]] = []

    class Group:
        def all_gather_object(self, facts: dict[str, Any]) -> list[dict[str, Any]]:
            said.append(facts)
            return said[-2:]

    monkeypatch.setattr(rank_group, "get_tp_group", Group)

    def check(**change: Any) -> dict[str, Any]:
        held = {"spec": arguments.draft_spec_of(args), "settings": Settings.from_environment(), "seed": 7, "slots": 9}
        require_equal_ranks(Ranks(2), args, **(held | change))
        return said[-1]

    return check


def test_equal_ranks_start(ask: Any) -> None:
    first, second = ask(), ask()
    assert first == second
    assert {"versions", "settings", "draft", "deployment", "files", "seed"} <= first.keys()


def test_a_rank_alone_is_not_compared(args: Any, ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(args), "tp_size", 1)
    monkeypatch.setattr(rank_group, "get_tp_group", None)
    require_equal_ranks(Ranks(1), args, arguments.draft_spec_of(args), Settings.from_environment(), 7, 9)


def test_another_variable_on_one_rank_is_named(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ask()
    monkeypatch.setenv("SGLANG_DSPARK_MIN_PREDICTED_GAIN", "0.2")
    with pytest.raises(HostError, match=r"settings.min_predicted_gain is 0.01 on rank 0 and 0.2 on rank 1"):
        ask()


def test_folders_may_differ(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ask()
    monkeypatch.setenv("SGLANG_DSPARK_COST_TABLES", "/another/folder")
    ask()


@pytest.mark.parametrize(
    ("name", "value", "text"), [("seed", 8, "seed is 7 on rank 0 and 8"), ("slots", 10, "slots is 9")]
)
def test_another_seed_or_number_of_rows_is_named(ask: Any, name: str, value: int, text: str) -> None:
    ask()
    with pytest.raises(HostError, match=text):
        ask(**{name: value})


def test_a_file_with_other_contents_on_one_rank_is_named(
    args: Any, ask: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    table = tmp_path / "table.json"
    table.write_text("{}")
    monkeypatch.setitem(vars(args), "speculative_dspark_sps_table_path", str(table))
    ask()
    ask()
    table.write_text("{ }")
    with pytest.raises(HostError, match=r"files.--speculative-dspark-sps-table-path is '44136f.*' on rank 0 and"):
        ask()
