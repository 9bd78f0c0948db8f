"""What is asked of a machine that is lent for half an hour, and the sums of what short blocks lose."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import half_hour, serve_cells
from benchmarks.short_blocks import Sums


def test_cells_are_those_that_are_asked_for_and_large_batches_of_ours_wait() -> None:
    asked = half_hour.cells_argument("middle:64,128;low:1")
    assert asked == {"middle": [64, 128], "low": [1]}
    cells = [serve_cells.live(half_hour.OURS, batch, level) for level in asked for batch in (1, 64, 128)]
    cells += [serve_cells.timed("builtin-compact", batch, 7) for batch in (1, 64)]
    cells += [serve_cells.live("none", 128, "any")]
    one: Any = SimpleNamespace(cells=cells)
    later = half_hour.split_cells(one, asked)
    assert [(cell.batch, cell.acceptance) for cell in later] == [(128, "middle")]
    left = [(cell.arm, cell.batch, cell.acceptance) for cell in one.cells]
    ours = half_hour.OURS
    assert left == [(ours, 64, "middle"), (ours, 1, "low"), ("builtin-compact", 64, ""), ("none", 128, "any")]


def test_a_level_or_a_pin_from_outside_is_known_to_the_next_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, Any]] = []
    server: Any = SimpleNamespace(set_state=lambda **state: sent.append(state), log_path=None)
    monkeypatch.setattr(serve_cells, "DecodeLog", lambda path: None)
    bench = serve_cells.Bench(SimpleNamespace(real=False, gamma=7, own_static=False), server)
    cell = serve_cells.live(half_hour.OURS, 8, "middle")
    bench._prepare(cell)
    bench._prepare(cell)
    assert sent == [{"dspark_simulate_class": 1}]
    bench.select("hopeless")
    bench.pin(0.5, dspark_force_depth=2)
    sent.clear()
    bench._prepare(cell)
    assert sent == [{"dspark_simulate_class": 1}, {"dspark_force_budget_frac": -1}]


def test_shares_are_of_the_drafts_up_to_the_end_of_the_short_block() -> None:
    sums = Sums([2, 4])
    sums.passed = {2: [6.0, 3.0], 4: [8.0, 4.0, 2.0, 1.0]}
    assert sums.shares(4) == {"2": 9.0 / 12.0}
