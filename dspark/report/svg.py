"""Charts as SVG: drawn for the width of a phone, coloured by the page's style sheet, every mark with its numbers.

Marks carry ``data-x`` and ``data-y``, so that what is drawn can be held against the data, and a title for the mouse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from dspark.report.model import Axis, Chart, Series
from dspark.report.text import written

WIDTH, HEIGHT = 360, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 18, 12, 38
_INNER = (WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM)
_TICKS = 5
COLOURS = 4  # and shapes; more series than this begin again
_EACH = 10  # counts that all get a tick
_MARGIN = 0.06  # of the range that points span, around it
_LABELLED = 14  # points of a series that get their label written beside them
_CORNERS = (  # a square, a triangle, a diamond
    ((-1.0, -1.0), (1.0, -1.0), (1.0, 1.0), (-1.0, 1.0)),
    ((0.0, -1.3), (1.2, 0.9), (-1.2, 0.9)),
    ((0.0, -1.4), (1.4, 0.0), (0.0, 1.4), (-1.4, 0.0)),
)
_CHARACTER = 5.4  # width of one, at most


@dataclass(frozen=True)
class Scale:
    """Values of an axis, and where they lie between 0 and 1."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def at(self, value: float) -> float:
        """Place of ``value``, 0 at ``low`` and 1 at ``high``."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def scale(values: Sequence[float], axis: Axis, from_zero: bool) -> Scale:
    """An axis that holds all ``values``; shares end at 1."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if axis.log:
        low, high = low / (1 + 2 * _MARGIN), high * (1 + 2 * _MARGIN)
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)):
            ticks = tuple(
                step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade <= high
            )
            if len(ticks) >= 3:
                break
        return Scale(low, high, ticks, True)
    room = (high - low or abs(high) or 1.0) * _MARGIN
    low = 0.0 if from_zero and low >= 0 else low - room
    high += room
    if axis.unit == "percent" and high >= 0.9:
        high = max(1.0, high - room)
    step = _nice((high - low) / (_TICKS if axis.unit != "count" or high - low > _EACH else _EACH), axis.unit == "count")
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return Scale(low, high, tuple(step * number for number in range(first, last + 1)))


def _nice(step: float, whole: bool) -> float:
    """The next larger one of 1, 2 and 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    found = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * 0.999)
    return max(found, 1.0) if whole else found


def draw(chart: Chart) -> str:
    """The chart as one ``<svg>`` element."""
    name = f"{chart.id}-chart"
    inside = _bars(chart) if chart.kind == "bars" else _points(chart)
    return (
        f'<svg id="{name}" class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-labelledby="{name}-title {name}-desc">'
        f'<title id="{name}-title">{escape(chart.title)}</title><desc id="{name}-desc">{escape(chart.words)}</desc>'
        f"{inside}</svg>"
    )


def _x(place: float) -> float:
    return round(_LEFT + place * _INNER[0], 2)


def _y(place: float) -> float:
    return round(_TOP + (1 - place) * _INNER[1], 2)


def _text(x: float, y: float, text: str, kind: str, more: str = "") -> str:
    return f'<text class="{kind}" x="{x}" y="{y}"{more}>{escape(text)}</text>'


def _axes(chart: Chart, up: Scale) -> str:
    parts = []
    for tick in up.ticks:
        y = _y(up.at(tick))
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(_text(_LEFT - 5, y + 3, written(tick, chart.y.unit, short=True), "tick end"))
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{_y(0)}" y2="{_y(0)}"/>')
    parts.append(_text(_x(0.5), HEIGHT - 5, chart.x.label, "label middle"))
    middle = _y(0.5)
    parts.append(_text(11, middle, chart.y.label, "label middle", f' transform="rotate(-90 11 {middle})"'))
    return "".join(parts)


def _mark(number: int, x: float, y: float, size: float = 1.0) -> str:
    """A shape per series, so that nothing depends on colours alone."""
    if number % COLOURS == 0:
        return f'<circle cx="{x}" cy="{y}" r="{3.6 * size:.2f}"/>'
    points = " ".join(f"{x + 3.4 * size * a:.2f},{y + 3.4 * size * b:.2f}" for a, b in _CORNERS[number % COLOURS - 1])
    return f'<polygon points="{points}"/>'


def swatch(chart: Chart, number: int) -> str:
    """The mark of a series, for a legend."""
    inside = '<rect x="1" y="1" width="10" height="10" rx="2"/>' if chart.kind == "bars" else _mark(number, 6, 6)
    return f'<svg class="swatch s{number % COLOURS}" viewBox="0 0 12 12" aria-hidden="true">{inside}</svg>'


def _group(number: int, one: Series, x: float | str, y: float, inside: str, title: str) -> str:
    data = f'data-series="{escape(one.name)}" data-x="{escape(str(x))}" data-y="{y!r}"'
    return f'<g class="mark s{number % COLOURS}" {data}><title>{escape(title)}</title>{inside}</g>'


def _described(chart: Chart, one: Series, at: int) -> str:
    label = f" ({one.labels[at]})" if one.labels else ""
    x, y = written(one.x[at], chart.x.unit), written(one.y[at], chart.y.unit)
    return f"{one.name}{label}: {chart.x.label} {x}, {chart.y.label} {y}"


def _points(chart: Chart) -> str:
    there = [
        [(float(x), float(y), at) for at, (x, y) in enumerate(zip(one.x, one.y, strict=True)) if y is not None]
        for one in chart.series
    ]
    xs, ys = [x for line in there for x, _, _ in line], [y for line in there for _, y, _ in line]
    if chart.diagonal and chart.x.log:  # one range, so that the line y = x is the diagonal of the picture
        xs = ys = xs + ys
    share = chart.x.unit == "percent"
    across = (
        Scale(0.0, 1.0, (0.0, 0.2, 0.4, 0.6, 0.8, 1.0))
        if share
        else scale(xs, chart.x, chart.kind == "lines" and chart.x.unit != "count")
    )
    up = Scale(0.0, 1.0, across.ticks) if share else scale(ys, chart.y, not chart.y.log)
    parts = [_axes(chart, up)]
    for tick in across.ticks:
        x = _x(across.at(tick))
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{_TOP}" y2="{_y(0)}"/>')
        parts.append(_text(x, _y(0) + 13, written(tick, chart.x.unit, short=True), "tick middle"))
    if chart.diagonal:
        parts.append(_diagonal(across, up, chart.diagonal))
    boxes: list[tuple[float, float, float, float]] = []
    for number, (one, line) in enumerate(zip(chart.series, there, strict=True)):
        placed = [(_x(across.at(x)), _y(up.at(y))) for x, y, _ in line]
        if chart.kind == "lines" and len(placed) > 1:
            path = "L".join(f"{x} {y}" for x, y in placed)
            parts.append(f'<path class="line s{number % COLOURS}{" dashed" * one.dashed}" d="M{path}"/>')
        for (x, y), (_, value, at) in zip(placed, line, strict=True):
            size = math.sqrt(one.weights[at] / max(one.weights)) if one.weights else 1.0
            mark = _mark(number, x, y, max(1.4 * size, 0.4) if one.weights else 1.0)
            parts.append(_group(number, one, one.x[at], value, mark, _described(chart, one, at)))
        if one.labels and len(line) <= _LABELLED and not share:
            for (x, y), (_, _, at) in zip(placed, line, strict=True):
                parts.append(_beside(x, y, one.labels[at], boxes))
    return "".join(parts)


def _beside(x: float, y: float, label: str, boxes: list[tuple[float, float, float, float]]) -> str:
    """A label where it covers no other one; nothing if there is no such place."""
    width = _CHARACTER * len(label)
    for left, top in ((x + 6, y - 13), (x - 6 - width, y - 13), (x + 6, y + 4), (x - 6 - width, y + 4)):
        box = (left, top, left + width, top + 9)
        apart = all(box[2] < b[0] or box[0] > b[2] or box[3] < b[1] or box[1] > b[3] for b in boxes)
        if apart and left >= _LEFT and box[2] <= WIDTH and top >= 0 and box[3] <= _y(0):
            boxes.append(box)
            return _text(round(left, 2), round(top + 9, 2), label, "tick")
    return ""


def _diagonal(across: Scale, up: Scale, words: str) -> str:
    """The part of the line y = x that lies inside of both axes."""
    low, high = max(across.low, up.low), min(across.high, up.high)
    if low >= high:
        return ""
    x1, y1, x2, y2 = _x(across.at(low)), _y(up.at(low)), _x(across.at(high)), _y(up.at(high))
    return f'<line class="diagonal" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"><title>{escape(words)}</title></line>'


def _bars(chart: Chart) -> str:
    names = [str(x) for x in chart.series[0].x]
    tops = [float(value) for one in chart.series for value in (*one.y, *(one.high or ())) if value is not None]
    up = scale([0.0, *(tops if any(tops) else [1.0])], chart.y, True)
    slot = 1 / len(names)
    wide = slot * 0.8 / len(chart.series)
    parts = [_axes(chart, up)]
    every = math.ceil(max(len(name) for name in names) * _CHARACTER * 1.25 * len(names) / _INNER[0])
    for at, name in enumerate(names):
        if at % max(every, 1) == 0:
            parts.append(_text(_x(slot * (at + 0.5)), _y(0) + 13, name, "tick middle"))
    for number, one in enumerate(chart.series):
        for at, value in enumerate(one.y):
            if value is None:
                continue
            left, top = _x(slot * (at + 0.1) + wide * number), _y(up.at(value))
            width, height = round(wide * _INNER[0] - 0.6, 2), round(_y(0) - top, 2)
            inside = f'<rect x="{left}" y="{top}" width="{max(width, 0.6)}" height="{height}"/>'
            if one.low and one.high:
                middle, ends = round(left + width / 2, 2), [_y(up.at(end)) for end in (one.low[at], one.high[at])]
                inside += f'<path class="interval" d="M{middle} {ends[0]}V{ends[1]}"/>'
            parts.append(_group(number, one, one.x[at], value, inside, _described(chart, one, at)))
    return "".join(parts)
