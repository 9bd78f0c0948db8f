"""What ``benchmarks.mixed`` and ``benchmarks.frontier`` sum up, and that they draw it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import frontier, mixed
from dspark.scheduler.cost_file import parse_cost_model


def step(kind: str, window: int, committed: int, ceiling: int) -> dict[str, Any]:
    return {"kind": kind, "verify_len": window, "committed": [7] * committed, "ceiling": ceiling}


STEPS = [step("hard", 1, 1, 2), step("easy", 4, 3, 3), step("easy", 2, 2, 5), step("hard", 2, 1, 1)]


def test_sums_by_workload() -> None:
    easy, hard, every = mixed.summarise(STEPS, "8", 4)
    assert [row["kind"] for row in (easy, hard, every)] == ["easy", "hard", mixed.ALL]
    assert (easy["mean_window"], easy["committed"], easy["ceiling"]) == (3.0, 5, 8)
    assert easy["windows"] == [0, 1, 0, 1]
    assert every["utilisation"] == pytest.approx(7 / 11)
    assert hard["ceiling_length"] == 1.5
    found = mixed.verdict([easy, hard, every])
    assert (found["windows_follow"], found["lowest_utilisation"], found["enough"]) == (True, 0.625, False)
    swapped = mixed.summarise([*STEPS, *[step("hard", 4, 1, 1)] * 9], "8", 4)
    assert not mixed.verdict(swapped)["windows_follow"]
    with pytest.raises(SystemExit, match="knows its ceiling"):
        mixed.summarise([], "8", 4)


def test_the_table_by_hand_is_a_table() -> None:
    model = parse_cost_model(json.dumps(mixed.cost_table(8.0, 64)))
    assert model.bias_seconds == pytest.approx(8 * 64 * mixed.ROW_SECONDS)


def test_mixed_traffic_is_drawn(tmp_path: Path) -> None:
    rows = mixed.summarise(STEPS, mixed.OWN, 4) + mixed.summarise(STEPS, "8", 4)
    mixed.draw(rows, tmp_path / "mixed.png")
    assert (tmp_path / "mixed.png").stat().st_size > 10_000
    assert mixed.table(rows).row_count == 6


def serve_row(arm: str, acceptance: str, batch: int, rate: float) -> dict[str, Any]:
    row = {"model": "m", "arm": arm, "acceptance": acceptance, "batch": batch, "tok_s": rate, "accept_length": 2.0}
    return row | {"tok_s_per_user": rate / batch, "mean_window": None, "labels": []}


def test_every_acceptance_gets_the_arms_without_speculation(tmp_path: Path) -> None:
    rows = [serve_row("none", "any", batch, 90 * batch) for batch in (4, 1)]
    rows += [
        serve_row(arm, level, batch, 100 * batch)
        for level in ("high", "low")
        for arm in ("dspark-static", "dspark-compact")
        for batch in (1, 4)
    ]
    (tmp_path / "serve.json").write_text(json.dumps({"rows": rows}))
    for extra, curves in (([], 6), (["--trim", "low"], 2)):
        frontier.main([str(tmp_path / "serve.json"), *extra, "--out", str(tmp_path / "p" / "a.png")])
        drawn = json.loads((tmp_path / "p" / "a.json").read_text())["curves"]
        assert len(drawn) == curves
        assert all(one["batch"] == [1, 4] for one in drawn)
        assert (tmp_path / "p" / "a.png").stat().st_size > 10_000
    with pytest.raises(SystemExit, match="no rows of acceptance"):
        frontier.main([str(tmp_path / "serve.json"), "--trim", "none", "--out", str(tmp_path / "b.png")])
