"""Sections about drafts: acceptance per place against survival, reliability, classes of requests."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from dspark.observe.calibration import BINS, class_names
from dspark.observe.records import RequestRow
from dspark.report.model import Axis, Chart, Section, Series, Table, Value
from dspark.report.model import Column as C
from dspark.report.source import ANY_CLASS, Observed
from dspark.report.sums import calibrations, ratio

CLASS_WORDS = {
    "greedy": "greedy",
    "to_0.5": "temperature to 0.5",
    "to_1": "temperature to 1",
    "above_1": "temperature above 1",
    ANY_CLASS: "all temperatures",
}
_SERVER_CLASS = "the server's class"


def acceptance(observed: Observed) -> Section:
    """What confidences promised and what came, per place and as a reliability diagram per class."""
    charts, words = [_places(observed)], []
    if observed.calibration["classes"]:
        charts.append(_reliability(observed))
    else:
        words.append(
            "No confidence reached the host, so there is no calibration: static mode without a table sends none, and "
            "neither does a draft without a confidence head."
        )
    if observed.calibration["invalid"]:
        words.append(f"{observed.calibration['invalid']:,} blocks had a survival outside of 0 to 1 and are left out.")
    tables = [_class_table(observed), *_place_tables(observed)] if observed.calibration["classes"] else []
    return Section(id="acceptance", title="Acceptance against confidence", words=words, charts=charts, tables=tables)


def _shares(parts: list[float], wholes: list[float]) -> list[float | None]:
    return [ratio(part, whole) for part, whole in zip(parts, wholes, strict=True)]


def _places(observed: Observed) -> Chart:
    positions, totals = observed.counters["positions"], observed.calibration["totals"]
    places = [*range(1, observed.gamma + 1)]
    series = [
        Series(name="accepted, of those reached", x=[*places], y=_shares(positions["accepted"], positions["reached"]))
    ]
    if any(totals["judged"]):
        promised = _shares(totals["predicted"], totals["judged"])
        series.append(Series(name="survival promised", x=[*places], y=promised, dashed=True))
        series.append(
            Series(name="survived, of those tested", x=[*places], y=_shares(totals["accepted"], totals["judged"]))
        )
    else:
        survived = _shares(positions["accepted"], positions["tested"])
        series.append(Series(name="survived, of those tested", x=[*places], y=survived))
    return Chart(
        id="places",
        title="Acceptance by place in the block",
        words="survival: the draft and all before it are accepted; reached: all before it are",
        kind="lines",
        x=Axis(label="place in the block", unit="count"),
        y=Axis(label="share of drafts", unit="percent"),
        series=series,
    )


def _reliability(observed: Observed) -> Chart:
    series = []
    for name, window in observed.calibration["classes"].items():
        judged, promised, came = (
            np.sum([place["bins"][key] for place in window["positions"]], axis=0)
            for key in ("judged", "predicted", "accepted")
        )
        there = judged > 0
        points = [(promised[there] / judged[there]).tolist(), (came[there] / judged[there]).tolist()]
        weights = judged[there].tolist()
        series.append(Series(name=CLASS_WORDS[name], x=points[0], y=points[1], weights=weights))
    return Chart(
        id="reliability",
        title="Reliability of survivals",
        words=f"accepted over promised in {BINS} equal bins, all places; the more drafts, the larger the mark",
        kind="points",
        x=Axis(label="survival promised", unit="percent"),
        y=Axis(label="share accepted", unit="percent"),
        series=series,
        diagonal="calibrated",
    )


def _class_table(observed: Observed) -> Table:
    names = ("class", "blocks", "drafts judged", "left out", "promised", "accepted", "error", "noise floor")
    units: list[Any] = ["text", "count", "count", "count", "percent", "percent", "percent", "percent"]
    return Table(
        id="calibration",
        title=f"Calibration by class of sampling temperature, last {observed.calibration['window']:,} blocks of each",
        columns=[C(name=name, unit=unit) for name, unit in zip(names, units, strict=True)],
        rows=[
            [
                CLASS_WORDS[one.name],
                one.blocks,
                one.judged,
                one.censored,
                ratio(one.predicted, one.judged),
                ratio(one.accepted, one.judged),
                one.error,
                one.noise_floor,
            ]
            for one in calibrations(observed)
        ],
    )


def _place_tables(observed: Observed) -> list[Table]:
    shares = ("promised", "accepted", "error", "noise floor")
    columns = [C(name=name, unit="count") for name in ("place", "judged", "left out")]
    columns += [C(name=name, unit="percent") for name in shares] + [C(name="Brier"), C(name="AUC")]
    found = []
    for name, window in observed.calibration["classes"].items():
        rows: list[list[Value]] = []
        for place, one in enumerate(window["positions"], 1):
            means = [ratio(one["predicted"], one["judged"]), ratio(one["accepted"], one["judged"])]
            errors = [one["ece"], one["noise_floor"], one["brier"], one["auc"]]
            rows.append([place, one["judged"], one["censored"], *means, *errors])
        title = f"Calibration by place: {CLASS_WORDS[name]}"
        found.append(Table(id=f"places-{name}", title=title, columns=columns, rows=rows))
    return found


@dataclass(frozen=True)
class ClassMeans:
    """Request steps of one class that drafted."""

    request_steps: int
    rows: float | None  # mean window; None: not known
    tested: float  # drafts per request step
    accepted: float
    committed: float | None


def class_means(observed: Observed) -> tuple[dict[str, ClassMeans], str]:
    """By class, and where the numbers are from: step records if there are any, else the calibration windows."""
    groups = _of_records(observed)
    if groups:
        total = sum(len(rows) for rows in groups.values())
        found = {
            name: ClassMeans(
                len(rows),
                rows=float(np.mean([row.rows for row in rows])),
                tested=float(np.mean([min(row.rows, observed.gamma) for row in rows])),
                accepted=float(np.mean([row.accepted for row in rows])),
                committed=float(np.mean([row.committed for row in rows])),
            )
            for name, rows in groups.items()
        }
        return found, f"From {total:,} recorded request steps that drafted."
    found = {
        CLASS_WORDS[one.name]: ClassMeans(one.blocks, None, one.judged / one.blocks, one.accepted / one.blocks, None)
        for one in calibrations(observed)
    }
    return found, (
        "From the calibration windows, which tell drafts tested, not rows. Step records (SGLANG_DSPARK_STEP_RECORDS) "
        "tell more, and the classes of simulated acceptance."
    )


def classes(observed: Observed) -> Section:
    """What drafting and windows do per class of requests."""
    means, words = class_means(observed)
    if not means:
        return Section(id="classes", title="By class of request", words=["No drafted block of any class is known."])
    bars: dict[str, list[float | None]] = {
        "rows of the window": [one.rows for one in means.values()],
        "drafts tested": [one.tested for one in means.values()],
        "drafts accepted": [one.accepted for one in means.values()],
        "tokens committed": [one.committed for one in means.values()],
    }
    chart = Chart(
        id="classes",
        title="Windows and commits by class",
        words="means per request step",
        kind="bars",
        x=Axis(label="class"),
        y=Axis(label="per request step"),
        series=[Series(name=name, x=[*means], y=values) for name, values in bars.items() if None not in values],
    )
    columns = [C(name="class", unit="text"), C(name="request steps", unit="count")]
    columns += [C(name="tested drafts that were accepted", unit="percent")]
    rows: list[list[Value]] = [
        [name, one.request_steps, ratio(one.accepted, one.tested)] for name, one in means.items()
    ]
    shares = Table(id="class-shares", title="Share of tested drafts accepted, by class", columns=columns, rows=rows)
    return Section(id="classes", title="By class of request", words=[words], charts=[chart], tables=[shares])


def _of_records(observed: Observed) -> dict[str, list[RequestRow]]:
    """Request steps with a draft by class: of sampling temperature, and of simulated acceptance if there is any."""
    rows = [one for step in observed.steps if step.drafted for one in step.requests if one.temperature is not None]
    groups: defaultdict[str, list[RequestRow]] = defaultdict(list)
    simulated = observed.simulated is not None or any(row.simulated for row in rows)
    for row, name in zip(rows, class_names([row.temperature or 0.0 for row in rows]), strict=True):
        groups[CLASS_WORDS[name]].append(row)
        if simulated:
            groups[f"simulated: {row.simulated or _SERVER_CLASS}"].append(row)
    return {name: groups[name] for name in sorted(groups, key=lambda name: (name.startswith("simulated"), name))}
