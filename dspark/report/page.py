"""One HTML page of a report: no script, no outside resource, light and dark, from a phone to a desk."""

from __future__ import annotations

import json
from html import escape

from dspark.report.model import Chart, Report, Section, Table, Value, Verdict, table_of
from dspark.report.style import STYLE
from dspark.report.svg import draw, swatch
from dspark.report.text import written

JSON_ID = "dspark-report"
_SIGNS = {"yes": "✓", "no": "✗", "not known": "?"}


def page(report: Report) -> str:
    """The whole document."""
    links = "".join(f'<a href="#{one.id}">{escape(one.title)}</a>' for one in report.sections)
    body = "".join(_section(one) for one in report.sections)
    # "<" never occurs inside of the script element, so no text of a server can end it.
    data = json.dumps(report.model_dump(), allow_nan=False).replace("<", "\\u003c")
    return (
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(report.title)}</title>'
        f'<link rel="icon" href="data:,"><style>{STYLE}</style></head>\n'
        f"<body><header><h1>{escape(report.title)}</h1>{_facts(report.facts)}</header>\n"
        f'<main><div class="verdicts">{"".join(_verdict(one) for one in report.verdicts)}</div>\n'
        f'<nav>{links}</nav>\n<div class="sections">{body}</div></main>\n'
        f'<script type="application/json" id="{JSON_ID}">{data}</script></body></html>\n'
    )


def _facts(facts: dict[str, Value]) -> str:
    pairs = [(name, value) for name, value in facts.items() if value is not None]
    inside = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(written(value, 'text'))}</dd></div>" for name, value in pairs
    )
    return f'<dl class="facts">{inside}</dl>'


def _verdict(one: Verdict) -> str:
    kind = one.answer.replace(" ", "-")
    return (
        f'<article class="verdict {kind}" id="verdict-{one.id}"><h2>{escape(one.question)}</h2>'
        f'<p class="answer"><span aria-hidden="true">{_SIGNS[one.answer]}</span> {escape(one.answer)}</p>'
        f"<p>{escape(one.words)}</p></article>"
    )


def _section(one: Section) -> str:
    words = "".join(f"<p>{escape(text)}</p>" for text in one.words)
    charts = "".join(_chart(chart) for chart in one.charts)
    tables = "".join(_table(table, open_=not one.charts) for table in one.tables)
    inside = f'<div class="figures">{charts}</div>{tables}' if charts else f'<div class="tables">{tables}</div>'
    half = ' class="half"' if len(one.charts) == 1 else ""
    return f'<section id="{one.id}"{half}><h2>{escape(one.title)}</h2>{words}{inside}</section>\n'


def _chart(chart: Chart) -> str:
    names = "".join(f"<li>{swatch(chart, number)}{escape(s.name)}</li>" for number, s in enumerate(chart.series))
    legend = f'<ul class="legend">{names}</ul>' if len(chart.series) > 1 else ""
    diagonal = f" Dotted: {escape(chart.diagonal)}." if chart.diagonal else ""
    return (
        f'<figure id="{chart.id}"><figcaption><h3>{escape(chart.title)}</h3>'
        f"<p>{escape(chart.words)}.{diagonal}</p></figcaption>{legend}{draw(chart)}{_table(table_of(chart))}</figure>"
    )


def _table(table: Table, open_: bool = False) -> str:
    """A table with the exact values beside the written ones; wide ones scroll inside of their box."""
    head = "".join(f'<th scope="col">{escape(column.name)}</th>' for column in table.columns)
    body = "".join(
        "<tr>"
        + "".join(_cell(v, c.unit, at) for at, (v, c) in enumerate(zip(row, table.columns, strict=True)))
        + "</tr>"
        for row in table.rows
    )
    of_chart = table.id.endswith("-table")
    summary, hidden = ("Numbers", "") if of_chart else (table.title, ' class="unseen"')
    return (
        f"<details{' open' * open_}><summary>{escape(summary)}</summary>"
        f'<div class="scroll" tabindex="0"><table id="{table.id}"><caption{hidden}>{escape(table.title)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></details>"
    )


def _cell(value: Value, unit: str, at: int) -> str:
    tag = 'th scope="row"' if at == 0 else "td"
    text = escape(written(value, unit))  # type: ignore[arg-type]
    return f'<{tag} data-v="{escape(json.dumps(value))}">{text}</{tag[:2]}>'
