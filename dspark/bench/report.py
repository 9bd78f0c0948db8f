"""What the traffic of ``python -m dspark bench`` gave: figures, a table, and a verdict in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from dspark.bench.traffic import Load

OURS = "dspark"
_CLOSE = 0.02  # repeats of the same arm differ by about this much


def figures(arm: str, load: Load) -> dict[str, Any]:
    """Throughput in tokens per second, latency and time to the first text in milliseconds at p50 and p99."""
    latency = np.array([sample.seconds for sample in load.samples]) * 1e3
    first = np.array([sample.first_seconds for sample in load.samples]) * 1e3
    return {
        "arm": arm,
        "concurrency": load.concurrency,
        "requests": len(load.samples),
        "tokens": sum(sample.tokens for sample in load.samples),
        "tok_s": load.tok_s,
        "latency_ms_p50": float(np.percentile(latency, 50)),
        "latency_ms_p99": float(np.percentile(latency, 99)),
        "ttft_ms_p50": float(np.percentile(first, 50)),
        "ttft_ms_p99": float(np.percentile(first, 99)),
    }


def verdict(rows: Sequence[dict[str, Any]]) -> list[str]:
    """One sentence per concurrency, and one for all."""
    sentences, wins = [], 0
    by_load: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        by_load.setdefault(row["concurrency"], []).append(row)
    judged = 0
    for concurrency, arms in by_load.items():
        ours = next((row for row in arms if row["arm"] == OURS), None)
        others = [row for row in arms if row["arm"] != OURS]
        users = f"{concurrency} user{'s' if concurrency > 1 else ''} at once"
        if ours is None or not others:
            sentences.append(f"{users}: only {', '.join(row['arm'] for row in arms)}, nothing to compare with.")
            continue
        judged += 1
        best = max(others, key=lambda row: row["tok_s"])
        ratio, wait = ours["tok_s"] / best["tok_s"], ours["latency_ms_p50"] / best["latency_ms_p50"]
        wins += ratio > 1 + _CLOSE
        if ratio > 1 + _CLOSE:
            said = f"DSPARK is {ratio:.2f} times as fast as {best['arm']}"
        elif ratio < 1 - _CLOSE:
            said = f"DSPARK is slower than {best['arm']}, at {ratio:.2f} of its speed"
        else:
            said = f"DSPARK and {best['arm']} are equally fast within {_CLOSE:.0%} ({ratio:.2f})"
        sentences.append(f"{users}: {said}; the median answer takes {wait:.2f} times as long.")
    if judged:
        where = "everywhere" if wins == judged else f"at {wins} of {judged} concurrencies" if wins else "nowhere"
        sentences.append(f"On this traffic DSPARK is the fastest {where}.")
    return sentences


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """The figures for people."""
    view = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    view.add_column("users", justify="right")
    view.add_column("arm", no_wrap=True)
    for name in ("tok/s", "answer ms\np50", "\np99", "first text ms\np50", "\np99"):
        view.add_column(name, justify="right", no_wrap=True)
    before = None
    for row in sorted(rows, key=lambda row: row["concurrency"]):
        if before is not None and row["concurrency"] != before:
            view.add_section()
        users = "" if row["concurrency"] == before else str(row["concurrency"])
        before = row["concurrency"]
        names = ("tok_s", "latency_ms_p50", "latency_ms_p99", "ttft_ms_p50", "ttft_ms_p99")
        view.add_row(users, row["arm"], *(f"{row[name]:,.1f}" for name in names))
    return view
