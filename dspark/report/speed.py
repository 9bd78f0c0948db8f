"""Sections about time: frontier, budget over load, step times."""

from __future__ import annotations

from typing import Any

import numpy as np

from dspark.report.model import Axis, Chart, Section, Series, Table
from dspark.report.model import Column as C
from dspark.report.source import Observed
from dspark.report.sums import by_batch, cells
from dspark.report.svg import COLOURS

LEAST_STEPS = 8  # of a batch size that is drawn: few steps are noise
_PER_REQUEST, _PER_SECOND = "tokens per second of one request", "tokens per second, all requests"


def frontier(observed: Observed) -> Section:
    """Speed of the server over that of one user, and commits over rows."""
    timed = {size: row for size, row in by_batch(observed).items() if row["timed_steps"] >= LEAST_STEPS}
    series = []
    if timed:
        speed = [row["timed_committed"] / row["measured_seconds"] for row in timed.values()]
        labels = [str(size) for size in timed]
        per_request = [one / size for one, size in zip(speed, timed, strict=True)]
        series.append(Series(name="by batch size", x=[*per_request], y=[*speed], labels=labels))
    series += _plain(observed)
    words = [
        f"Each point is a batch size of at least {LEAST_STEPS} timed steps, written beside it: up is more work per "
        "second, right is a faster answer."
    ]
    if observed.now is not None:
        now = observed.now
        label = f"{now.request_steps / now.steps:.1f} requests"
        series.append(Series(name=now.name, x=[now.tok_s_per_request], y=[now.tok_s], labels=[label]))
    else:
        words.append("No decode step was seen while the server was watched, or recorded: there is no point for now.")
    if not timed:
        words.append(f"No batch size has {LEAST_STEPS} steps that followed directly on another one: nothing is timed.")
    charts = (
        [_chart("frontier", "Frontier", "where this server is", _PER_REQUEST, _PER_SECOND, series)] if series else []
    )
    work = {size: row for size, row in by_batch(observed).items() if row["steps"] >= LEAST_STEPS}
    points = Series(
        name="by batch size",
        x=[row["rows"] / row["steps"] for row in work.values()],
        y=[row["committed"] / row["steps"] for row in work.values()],
        labels=[str(size) for size in work],
    )
    words_of_work = "what a step verifies, and what comes of it; labels: batch size"
    names = ("rows scheduled per step", "tokens committed per step")
    if work:
        charts.append(_chart("work", "Rows and tokens", words_of_work, *names, [points], "every row becomes a token"))
    return Section(id="frontier", title="Where the server is", words=words, charts=charts)


def _plain(observed: Observed) -> list[Series]:
    """What plain decoding would do at the same batch sizes, if the table says so."""
    sums: dict[int, list[float]] = {}
    for row in cells(observed):
        if row.get("plain_seconds"):
            one = sums.setdefault(row["requests"], [0.0, 0.0])
            one[0] += row["steps"]
            one[1] += row["plain_seconds"]
    if not sums:
        return []
    per_request = [steps / seconds for steps, seconds in sums.values()]
    speed = [size * one for size, one in zip(sums, per_request, strict=True)]
    labels = [str(size) for size in sums]
    return [Series(name="plain decoding, predicted", x=[*per_request], y=[*speed], labels=labels, dashed=True)]


def _chart(
    name: str, title: str, words: str, x: str, y: str, series: list[Series], diagonal: str | None = None
) -> Chart:
    kind: Any = "lines"
    return Chart(
        id=name, title=title, words=words, kind=kind, x=Axis(label=x), y=Axis(label=y), series=series, diagonal=diagonal
    )


def load(observed: Observed) -> Section:
    """Windows over the batch size, how often each size ran, and why budgets were what they were."""
    rows = {size: row for size, row in by_batch(observed).items() if row["steps"]}
    sizes = [str(size) for size in rows]
    per = {name: [row[name] / (size * row["steps"]) for size, row in rows.items()] for name in ("rows", "committed")}
    budget = Chart(
        id="budget",
        title="Window and commit by batch size",
        words="rows that a request gets, and tokens that it commits, per step: where rows are dear, windows shrink",
        kind="lines",
        x=Axis(label="batch size", unit="count"),
        y=Axis(label="per request step"),
        series=[
            Series(name="rows of the window", x=[*rows], y=[*per["rows"]]),
            Series(name="tokens committed", x=[*rows], y=[*per["committed"]]),
        ],
    )
    ran = Chart(
        id="batches",
        title="Steps by batch size",
        words="how the load was spread",
        kind="bars",
        x=Axis(label="batch size", unit="count"),
        y=Axis(label="steps", unit="count"),
        series=[Series(name="steps", x=sizes, y=[row["steps"] for row in rows.values()])],
    )
    reasons = observed.counters["reasons"]
    total = sum(reasons.values())
    table = Table(
        id="reasons",
        title="Why budgets were what they were",
        columns=[C(name="reason", unit="text"), C(name="steps", unit="count"), C(name="share", unit="percent")],
        rows=[[name, count, count / total] for name, count in sorted(reasons.items(), key=lambda one: -one[1])],
    )
    return Section(id="load", title="Budget over load", words=[], charts=[budget, ran], tables=[table])


def step_times(observed: Observed) -> Section:
    """Predicted against measured times, and how step times are spread."""
    rows, words = cells(observed), []
    time = observed.counters["step_time"]
    charts = []
    if rows:
        charts.append(_predicted(rows))
    else:
        words.append("No step has both a predicted and a measured time by batch size: nothing was scheduled, or timed.")
    if time["steps"]:
        off = time["predicted_seconds"] / time["measured_seconds"] - 1
        error = time["absolute_error_seconds"] / time["measured_seconds"]
        words.append(
            f"Over {time['steps']:,} steps the sum of the predictions was off by {off:+.1%}, a single step by "
            f"{error:.1%} of its time on average, by the host's clock from result to result."
        )
    charts += _spread(observed)
    return Section(
        id="times", title="Step times, predicted and measured", words=words, charts=charts, tables=_errors(rows)
    )


def _predicted(rows: list[dict[str, Any]]) -> Chart:
    series = []
    for first, last in _ranges(sorted({row["context_from"] or 0 for row in rows})):
        sums: dict[int, np.ndarray] = {}
        for row in rows:
            if first <= (row["context_from"] or 0) <= last:
                parts = (row["steps"], row["measured_seconds"], row["predicted_seconds"])
                sums.setdefault(row["requests"], np.zeros(3))[:] += parts
        measured, predicted = ([1e3 * float(one[at] / one[0]) for size, one in sorted(sums.items())] for at in (1, 2))
        name = f"context {first:,} to {2 * last - 1:,}" if last else "by batch size"
        series.append(Series(name=name, x=measured, y=predicted, labels=[str(size) for size in sorted(sums)]))
    return Chart(
        id="predicted",
        title="Predicted over measured",
        words="mean milliseconds of a step; a point per batch size (its label) and tokens of context per request",
        kind="points",
        x=Axis(label="measured, ms", log=True),
        y=Axis(label="predicted, ms", log=True),
        series=series,
        diagonal="perfect",
    )


def _ranges(contexts: list[int]) -> list[tuple[int, int]]:
    """First and last of neighbouring octaves of context, in as many groups as there are colours."""
    groups = [(one, one) for one in contexts]
    while len(groups) > COLOURS:
        groups = [(*groups[at][:1], *groups[min(at + 1, len(groups) - 1)][1:]) for at in range(0, len(groups), 2)]
    return groups


def _errors(rows: list[dict[str, Any]]) -> list[Table]:
    if not rows:
        return []
    milliseconds = ("predicted ms", "measured ms", "full window ms", "plain ms")
    columns = [C(name="requests", unit="count"), C(name="context from", unit="count"), C(name="steps", unit="count")]
    columns += [C(name=name) for name in milliseconds] + [C(name=name, unit="percent") for name in ("bias", "error")]
    names = ("predicted_seconds", "measured_seconds", "full_window_seconds", "plain_seconds")
    found: list[list[int | float | str | None]] = []
    for row in rows:
        times = [1e3 * row[name] / row["steps"] if row.get(name) else None for name in names]
        bias = row["predicted_seconds"] / row["measured_seconds"] - 1
        error = row["error_seconds"] / row["measured_seconds"]
        found.append([row["requests"], row["context_from"], row["steps"], *times, bias, error])
    title = "Step times by batch size and context; full window and plain are predicted"
    return [Table(id="errors", title=title, columns=columns, rows=found)]


def _spread(observed: Observed) -> list[Chart]:
    seconds = observed.counters["step_seconds"]
    steps, bounds = seconds["steps"], [f"{1e3 * bound:g}" for bound in seconds["bounds"]]
    there = [at for at, count in enumerate(steps) if count]
    if not there:
        return []
    names = [*bounds, f"> {bounds[-1]}"][there[0] : there[-1] + 1]
    return [
        Chart(
            id="step-times",
            title="Step times",
            words="steps by the time between two results, up to so many milliseconds",
            kind="bars",
            x=Axis(label="milliseconds, up to"),
            y=Axis(label="steps", unit="count"),
            series=[Series(name="steps", x=names, y=steps[there[0] : there[-1] + 1])],
        )
    ]
