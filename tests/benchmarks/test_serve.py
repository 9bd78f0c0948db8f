"""What ``benchmarks.serve`` makes of logs, step times and repeats."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from benchmarks import composed, decode_log, serve, serve_arms, verdict

PREFILL = "[2026-01-01 00:00:00] Prefill batch, #new-seq: 2, #new-token: 64"


def decode(running: int, rate: float, accept: float | None = None, window: float | None = None) -> str:
    """A line as the host logs it."""
    line = f"[2026-01-01 00:00:00] Decode batch, #running-req: {running}, #token: 99, token usage: 0.00, "
    line += "" if accept is None else f"accept len: {accept:.2f}, accept rate: 0.30, "
    line += "" if window is None else f"cap len: {window:.2f}, "
    return line + f"cuda graph: True, gen throughput (token/s): {rate:.2f}, #queue-req: 0"


def test_only_intervals_with_the_whole_batch_on_both_sides_count() -> None:
    log = [PREFILL, decode(2, 10), decode(2, 100, 2.5, 4.0), decode(2, 110), PREFILL, decode(2, 50), decode(1, 60)]
    log += [decode(2, 70), decode(2, 80), "something else", decode(2, 0)]
    found = decode_log.intervals("\n".join(log), 2)
    assert [one.tok_s for one in found] == [100, 110, 80]
    assert (found[0].accept_length, found[0].window) == (2.5, 4.0)
    assert (found[1].accept_length, found[1].window) == (1.0, None)
    assert found[0].step_seconds == pytest.approx(2 * 2.5 / 100)
    assert decode_log.intervals("\n".join(log), 3) == []


def test_a_rate_is_all_tokens_over_all_seconds() -> None:
    one = decode_log.Interval(4, 100.0, 2.0, None)
    two = decode_log.Interval(4, 300.0, 3.0, None)
    steps = 8
    tokens = steps * 4 * (2.0 + 3.0)
    seconds = steps * 4 * 2.0 / 100 + steps * 4 * 3.0 / 300
    assert decode_log.rate([one, two]) == pytest.approx(tokens / seconds)


def test_a_log_is_read_from_its_mark(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text("\n".join([decode(1, 5), decode(1, 6), ""]))
    log = decode_log.DecodeLog(path)
    with path.open("a") as file:
        file.write("\n".join([PREFILL, decode(1, 7), decode(1, 8), ""]))
    assert [one.tok_s for one in log.intervals(1)] == [8]
    log.mark()
    assert log.intervals(1) == []


def test_the_interval_of_a_ratio_covers_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    truth, covered = 1.1, 0
    for _ in range(2000):
        ours = np.exp(rng.normal(np.log(110), 0.02, 5))
        others = np.exp(rng.normal(np.log(100), 0.05, 5))
        found = verdict.ratio(ours, others)
        covered += found["low"] <= truth <= found["high"]
    assert 0.935 <= covered / 2000 <= 0.97
    assert verdict.ratio([3.0], [2.0]) == {"ratio": pytest.approx(1.5), "low": None, "high": None}


def test_a_hiccup_decides_no_ratio() -> None:
    usual = [100.0, 101.0, 99.0, 100.5, 99.5]
    found = verdict.ratio([*usual, 17.0], [50.0 * value / 100 for value in usual])
    assert found["ratio"] == pytest.approx(2.0, rel=0.01)
    assert found["high"] - found["low"] < 0.1


def row(arm: str, rate: float, acceptance: str = "middle", batch: int = 16, model: str = "m") -> dict[str, Any]:
    return {
        "model": model, "acceptance": acceptance, "batch": batch, "arm": arm, "tok_s": rate,
        "tok_s_repeats": [rate * factor for factor in (0.999, 1.0, 1.001, 1.0, 1.0)],
        "mean_window": 3.0, "draft_off_share": 0.0, "labels": [],
    }  # fmt: skip


def test_the_best_other_arm_of_the_same_cell_is_the_measure() -> None:
    rows = [row("dspark-compact", 120), row("builtin-compact", 110), row("builtin-static", 90)]
    rows += [row("none", 100, verdict.ANY), row("none", 999, "high"), row("none", 999, verdict.ANY, batch=8)]
    rows += [row("dspark-compact", 90, "low"), row("builtin-static", 999, model="other")]
    middle, low = verdict.verdicts(rows)
    assert (middle["best_other"], middle["never_slower"], middle["clearly_faster"]) == ("builtin-compact", True, True)
    assert middle["ratio"] == pytest.approx(120 / 110, rel=1e-3)
    assert middle["over_static_or_none"]["arm"] == "none"
    assert (low["best_other"], low["never_slower"], low["clearly_faster"]) == ("none", False, False)
    console = Console(width=200, record=True)
    console.print(verdict.table([middle, low]))
    assert "builtin-compact" in console.export_text()


def test_tokens_of_a_budget() -> None:
    confidence = np.array([[0.9, 0.8, 0.7], [0.5, 0.1, 0.1]])
    accepted = np.array([3, 0])
    assert composed.tokens_per_step(confidence, accepted, 8, 0) == 8
    full = composed.tokens_per_step(confidence, accepted, 8, 24)
    assert full == pytest.approx(8 * (1 + 1.5), rel=0.05)
    # Half of the requests are worth three drafts each: that budget goes to them, as far as they are drawn.
    assert composed.tokens_per_step(confidence, accepted, 8, 12) > 0.9 * full


def test_the_best_budget_is_composed() -> None:
    rng = np.random.default_rng(1)
    confidence = rng.beta(3.0, 2.0, (500, 3))
    accepted = (rng.random((500, 3)) < confidence).cumprod(axis=1).sum(axis=1)
    times = [
        {"model": "m", "arm": "a", "batch": 4, "budget": budget, "step_ms": [seconds, seconds * 1.1]}
        for budget, seconds in ((0, 1.0), (4, 1.1), (12, 4.0))
    ]
    (found,) = composed.rows(times, "m", [("middle", confidence, accepted)])
    tokens = composed.tokens_per_step(confidence, accepted, 4, 4)
    assert found["mean_window"] == 2
    assert found["labels"] == ["composed"]
    assert found["accept_length"] == pytest.approx(tokens / 4)
    assert found["tok_s_repeats"] == pytest.approx([tokens / 1.1 * 1e3, tokens / 1.21 * 1e3])
    assert composed.rows(times, "other", [("middle", confidence, accepted)]) == []


def arguments(**more: Any) -> argparse.Namespace:
    common = {"arms": list(serve_arms.ARMS), "batches": [1, 4], "levels": ["high", "low"], "budgets": [0, 7]}
    common |= {"real": False, "own_static": False, "gamma": 7, "model": "m", "eagle": Path("x")}
    return argparse.Namespace(**(common | more))


def test_what_is_in_the_file_is_not_measured_again(tmp_path: Path) -> None:
    results = serve.Results(tmp_path / "out.json", "command")
    args = arguments()
    cells = serve.cells_of(args, "dspark-compact", results)
    assert {(cell.kind, cell.arm) for cell in cells} == {
        ("rows", "dspark-compact"), ("step_times", "dspark-static"), ("checks", "dspark-static"),
    }  # fmt: skip
    assert [cell.key for cell in serve.cells_of(args, "none", results)] == [
        {"arm": "none", "batch": 1, "acceptance": "any"}, {"arm": "none", "batch": 4, "acceptance": "any"},
    ]  # fmt: skip
    assert [cell.budget for cell in serve.cells_of(args, "builtin-compact", results)] == [0, 7, 0, 28]
    for cell in cells:
        results.add(cell.kind, {"model": "m", **cell.key})
    again = serve.Results(tmp_path / "out.json", "command")
    assert serve.cells_of(args, "dspark-compact", again) == []
    assert len(serve.cells_of(arguments(model="other"), "dspark-compact", again)) == len(cells)


def test_files_of_several_runs_are_judged_together(tmp_path: Path) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, arm, rate in zip(paths, ("dspark-compact", "none"), (120, 100), strict=True):
        serve.Results(path, path.stem).add("rows", row(arm, rate))
    for _ in range(2):  # an old output is no input
        results = serve.Results.merged(paths, tmp_path / "out.json")
        serve.finish(results, Console(quiet=True))
    value = json.loads((tmp_path / "out.json").read_text())
    assert (len(value["rows"]), value["command"]) == (2, "a; b")
    assert [one["best_other"] for one in value["verdicts"]] == ["none"]


def test_with_weights_every_arm_is_measured_live(tmp_path: Path) -> None:
    results = serve.Results(None, "command")
    args = arguments(real=True, levels=["real"])
    for engine in serve_arms.engines(args):
        assert {cell.acceptance for cell in serve.cells_of(args, engine, results)} == {"real"}
    assert serve_arms.engines(args)[0] == "dspark-compact"


def test_ours_starts_alone_and_the_builtin_gets_its_table() -> None:
    simulated = serve_arms.groups(arguments())
    assert simulated == [["builtin-compact", "builtin-static", "eagle", "none"], ["dspark-compact"]]
    real = serve_arms.groups(arguments(real=True, own_static=True))
    assert real == [["builtin-static", "dspark-static", "eagle", "none"], ["dspark-compact"], ["builtin-compact"]]
    assert serve_arms.groups(arguments(arms=["none"])) == [["none"]]


def test_the_builtin_gets_what_ours_has_measured_in_its_own_schema(tmp_path: Path) -> None:
    args = arguments(out=tmp_path / "out.json", table=None, real=True, input_len=64, tokens=128)
    assert serve_arms.measured_table(args) is None
    assert serve_arms.builtin_table(args, None) == []  # full windows
    ours = {"bias_seconds": 0.01, "bs_probes": [1, 2], "alpha_seconds": [0.0, 0.001], "m_probes": [1, 64]}
    ours |= {"theta_seconds": [0.001, 0.01], "rho_seconds_per_token": 1e-6}
    (serve_arms.tables_folder(args) / "target--draft--0123.json").write_text(json.dumps(ours))
    found = serve_arms.measured_table(args)
    flag, path = serve_arms.builtin_table(args, found)
    assert flag == "--speculative-dspark-sps-table-path"
    theirs = json.loads(Path(path).read_text())
    assert set(theirs) == {"bias_seconds", "bs_probes", "alpha_seconds", "m_probes", "theta_seconds"}
    # The form has no context: that of the middle of a round is part of what a request costs.
    assert theirs["alpha_seconds"] == pytest.approx([128e-6, 0.001 + 2 * 128e-6])
    assert serve_arms.measured_table(args) == found  # not the one that was written for the built-in
    args.real = False
    assert json.loads(Path(serve_arms.builtin_table(args, None)[1]).read_text())["m_probes"][-1] == 4096


def test_full_windows_of_both_modes_are_compared() -> None:
    common = {"model": "m", "batch": 2, "gamma": 7}
    times = [
        {**common, "arm": "dspark-compact", "budget": 14, "step_ms": [2.02, 2.02]},
        {**common, "arm": "dspark-compact", "budget": 7, "step_ms": [1.0, 1.0]},
        {**common, "arm": "dspark-static", "budget": 14, "step_ms": [2.0, 2.0]},
        {**common, "arm": "dspark-compact", "batch": 4, "budget": 28, "step_ms": [3.0]},
    ]
    (found,) = composed.full_windows(times)
    assert (found["model"], found["batch"]) == ("m", 2)
    assert found["compact_over_static"]["ratio"] == pytest.approx(1.01)
    assert {row["arm"] for row in composed.rows(times, "m", [("x", np.full((4, 7), 0.5), np.zeros(4))])} == {
        "dspark-static"
    }
