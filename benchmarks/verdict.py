"""Ratios of throughputs with intervals, and what they say of the two bars: never slower, and clearly faster.

A ratio is the quotient of the geometric means of the repeats of two arms, its 95% interval Welch's on the logarithms.
Repeats far out of their arm (a hiccup of the machine in one log interval) are left out of both.
"never slower" asks that the interval includes or exceeds 0.98; "clearly faster" that the ratio reaches 1.15.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from rich.table import Table
from scipy import stats

NEVER_SLOWER, CLEARLY_FASTER = 0.98, 1.15
OURS = "dspark-compact"
ANY = "any"  # acceptance of arms without speculation: their speed does not depend on it


def ratio(ours: Sequence[float], others: Sequence[float]) -> dict[str, Any]:
    """Ratio of two throughputs, ``low`` and ``high`` of its 95% interval (None for fewer than two repeats)."""
    a, b = _usual(np.log(ours)), _usual(np.log(others))
    middle = float(np.exp(a.mean() - b.mean()))
    if min(a.size, b.size) < 2:
        return {"ratio": middle, "low": None, "high": None}
    parts = np.array([a.var(ddof=1) / a.size, b.var(ddof=1) / b.size])
    if parts.sum() == 0:
        return {"ratio": middle, "low": middle, "high": middle}
    freedom = parts.sum() ** 2 / (parts**2 / [a.size - 1, b.size - 1]).sum()
    half = float(stats.t.ppf(0.975, freedom) * np.sqrt(parts.sum()))
    return {"ratio": middle, "low": middle * float(np.exp(-half)), "high": middle * float(np.exp(half))}


def _usual(values: np.ndarray) -> np.ndarray:
    """Those within six robust standard deviations of the median, and all within 15% of it."""
    away = np.abs(values - np.median(values))
    return values[away <= max(6 * 1.4826 * float(np.median(away)), 0.15)]


def verdicts(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One verdict per model, acceptance and batch in which ours was measured.

    Args:
        rows: of ``benchmarks.serve``; those of acceptance ``any`` are compared with every level of their model.
    """
    rows = list(rows)
    found = []
    for ours in rows:
        if ours["arm"] != OURS:
            continue
        same = [row for row in rows if (row["model"], row["batch"]) == (ours["model"], ours["batch"])]
        others = [row for row in same if row["arm"] != OURS and row["acceptance"] in (ours["acceptance"], ANY)]
        if not others:
            continue
        best = max(others, key=lambda row: row["tok_s"])
        fixed = [row for row in others if row["arm"] == "none" or row["arm"].endswith("static")]
        verdict = {name: ours[name] for name in ("model", "acceptance", "batch")}
        verdict |= {"arm": OURS, "tok_s": ours["tok_s"], "best_other": best["arm"], "best_tok_s": best["tok_s"]}
        verdict |= ratio(ours["tok_s_repeats"], best["tok_s_repeats"])
        verdict["repeats"] = min(len(ours["tok_s_repeats"]), len(best["tok_s_repeats"]))
        verdict["never_slower"] = (verdict["high"] or verdict["ratio"]) >= NEVER_SLOWER
        if fixed:
            rival = max(fixed, key=lambda row: row["tok_s"])
            against = ratio(ours["tok_s_repeats"], rival["tok_s_repeats"])
            verdict["over_static_or_none"] = {"arm": rival["arm"], **against}
            verdict["clearly_faster"] = against["ratio"] >= CLEARLY_FASTER
        verdict["mean_window"], verdict["draft_off_share"] = ours["mean_window"], ours["draft_off_share"]
        verdict["labels"] = sorted({*ours["labels"], *best["labels"]})
        found.append(verdict)
    return found


def table(found: Sequence[dict[str, Any]]) -> Table:
    """The verdicts for people."""
    view = Table(title=f"{OURS} against the best of the other arms, 95% intervals", title_justify="left")
    for name in ("model", "acceptance", "batch", "tok/s", "best other", "its tok/s", "ratio", "interval"):
        view.add_column(name, justify="left" if name in ("model", "acceptance", "best other") else "right")
    for name in (f">= {NEVER_SLOWER}", "over static/none", "window", "draft off"):
        view.add_column(name, justify="right")
    for one in found:
        interval = "-" if one["low"] is None else f"{one['low']:.3f} to {one['high']:.3f}"
        against = one.get("over_static_or_none")
        view.add_row(
            one["model"],
            one["acceptance"],
            str(one["batch"]),
            f"{one['tok_s']:,.0f}",
            one["best_other"] + (" (composed)" if "composed" in one["labels"] else ""),
            f"{one['best_tok_s']:,.0f}",
            f"{one['ratio']:.3f}",
            interval,
            "[green]yes[/green]" if one["never_slower"] else "[red]no[/red]",
            "-" if against is None else f"{against['ratio']:.2f}x" + (" *" if one["clearly_faster"] else ""),
            "-" if one["mean_window"] is None else f"{one['mean_window']:.2f}",
            "-" if one["draft_off_share"] is None else f"{one['draft_off_share']:.0%}",
        )
    return view
