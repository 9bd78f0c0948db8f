"""What a report consists of. Page, tables and embedded JSON are made of these values alone, so they cannot differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

Value = int | float | str | None
Unit = Literal["text", "count", "number", "percent"]  # how a value is written; percent: the value is a share


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Axis(_Frozen):
    """What an axis shows."""

    label: str
    unit: Unit = "number"
    log: bool = False


class Series(_Frozen):
    """Points of one colour, N of them."""

    name: str
    x: Sequence[float | str]  # [N]; strings: categories
    y: Sequence[float | None]  # [N]; None: nothing to draw
    labels: list[str] | None = None  # [N], written beside the points
    low: list[float] | None = None  # [N], ends of an interval around each y
    high: list[float] | None = None
    weights: list[float] | None = None  # [N], drafts behind each point: the more, the larger its mark
    dashed: bool = False


class Chart(_Frozen):
    """One picture; every number in it is also in the table beneath."""

    id: str
    title: str
    words: str  # how to read it
    kind: Literal["bars", "lines", "points"]
    x: Axis
    y: Axis
    series: list[Series]
    diagonal: str | None = None  # what lies on the line y = x


class Column(_Frozen):
    """A column of a table."""

    name: str
    unit: Unit = "number"


class Table(_Frozen):
    """Numbers without a picture."""

    id: str
    title: str
    columns: list[Column]
    rows: list[list[Value]]


class Section(_Frozen):
    """A question, its charts and tables."""

    id: str
    title: str
    words: list[str]  # sentences; what is missing, and why
    charts: list[Chart] = []
    tables: list[Table] = []


class Verdict(_Frozen):
    """A plain answer to a plain question."""

    id: str
    question: str
    answer: Literal["yes", "no", "not known"]
    words: str


class Report(_Frozen):
    """A page."""

    version: Literal[1] = 1
    title: str
    facts: dict[str, Value]  # where the numbers come from
    verdicts: list[Verdict]
    sections: list[Section]


def table_of(chart: Chart) -> Table:
    """The numbers of a chart."""
    names = [one.name for one in chart.series]
    if chart.kind == "bars" and all(one.x == chart.series[0].x for one in chart.series):
        columns = [Column(name=chart.x.label, unit="text"), *(Column(name=name, unit=chart.y.unit) for name in names)]
        rows = [[at, *values] for at, *values in zip(chart.series[0].x, *(s.y for s in chart.series), strict=True)]
        return Table(id=f"{chart.id}-table", title=chart.title, columns=columns, rows=rows)
    columns = [Column(name="series", unit="text"), Column(name=chart.x.label, unit=chart.x.unit)]
    columns.append(Column(name=chart.y.label, unit=chart.y.unit))
    labelled, spread = any(s.labels for s in chart.series), any(s.low for s in chart.series)
    weighed = any(s.weights for s in chart.series)
    columns += [Column(name="label", unit="text")] * labelled
    columns += [Column(name="drafts", unit="count")] * weighed
    columns += [Column(name=name, unit=chart.y.unit) for name in ("low", "high")] * spread
    found: list[list[Value]] = []
    for one in chart.series:
        empty: list[None] = [None] * len(one.x)
        parts: list[Sequence[Value]] = [one.labels or empty] * labelled + [one.weights or empty] * weighed
        parts += [one.low or empty, one.high or empty] * spread
        found += [[one.name, *row] for row in zip(one.x, one.y, *parts, strict=True)]
    return Table(id=f"{chart.id}-table", title=chart.title, columns=columns, rows=found)
