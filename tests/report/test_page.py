"""The page in a browser: what is drawn and written are the numbers of its JSON, on a desk and on a phone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver

from dspark.__main__ import main
from dspark.observe.records import RecordDump, write
from dspark.report.model import Report, table_of
from tests.report.browser import chromium, resize, scheme
from tests.report.cases import server_info

MARKS = """return [...document.querySelectorAll('svg.chart')].map(svg => ({
  id: svg.id, width: svg.getBoundingClientRect().width, height: svg.getBoundingClientRect().height,
  marks: [...svg.querySelectorAll('.mark')].map(mark => {
    const shape = mark.querySelector('circle, rect, polygon').getBBox();
    const {series, x, y} = mark.dataset;
    return [series, x, Number(y), shape.x + shape.width / 2, shape.y, shape.height];
  })}))"""
TABLES = """return Object.fromEntries([...document.querySelectorAll('table')].map(table => [table.id,
  [...table.tBodies[0].rows].map(row => [...row.cells].map(cell => JSON.parse(cell.dataset.v)))]))"""
MAX_BYTES = 1_500_000


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    with chromium(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module", params=["server", "records", "nothing"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of a server that has everything, of a records file, and of a server that has done nothing."""
    folder = tmp_path_factory.mktemp(request.param)
    estimate = {"steps": 10, "unresolved": 3, "committed": 20, "low": 24.0, "middle": 25.0, "high": 26.5}
    info = server_info(steps=0 if request.param == "nothing" else 600, ceiling_estimate=estimate)
    source = folder / "info.json"
    source.write_text(json.dumps(info))
    flag = "--server-info"
    if request.param == "records":
        flag, source = "--records", folder / "steps.parquet"
        record = info["internal_states"][0]["dspark_info_record"]
        write(RecordDump.model_validate(record["step_records"]), source)
    assert main(["report", flag, str(source), "--out", str(folder / "page.html")]) == 0
    return folder / "page.html"


def opened(browser: webdriver.Chrome, page: Path) -> Report:
    """Open the page and read its JSON."""
    browser.get(page.as_uri())
    text = browser.execute_script("return document.getElementById('dspark-report').textContent")
    return Report.model_validate_json(text)


def requested(browser: webdriver.Chrome) -> list[str]:
    """Addresses that the page has asked for."""
    events = [json.loads(line["message"])["message"] for line in browser.get_log("performance")]
    found = [one["params"]["request"]["url"] for one in events if one["method"] == "Network.requestWillBeSent"]
    return [url for url in found if not url.startswith(("data:", "chrome:", "chrome-untrusted:"))]


def test_nothing_is_fetched_and_nothing_is_complained_about(browser: webdriver.Chrome, made: Path) -> None:
    requested(browser)
    opened(browser, made)
    assert requested(browser) == [made.as_uri()]
    assert browser.get_log("browser") == []
    text = made.read_text()
    assert made.stat().st_size < MAX_BYTES
    assert re.findall(r"<script(?! type=\"application/json\")", text) == []
    assert re.findall(r"(?:src|href)=\"(?!#|data:)", text) == []


def test_every_chart_is_there_with_its_numbers(browser: webdriver.Chrome, made: Path) -> None:
    report = opened(browser, made)
    charts = [chart for section in report.sections for chart in section.charts]
    drawn: list[dict[str, Any]] = browser.execute_script(MARKS)
    assert [one["id"] for one in drawn] == [f"{chart.id}-chart" for chart in charts]
    for chart, one in zip(charts, drawn, strict=True):
        assert one["width"] > 250, chart.id
        assert one["height"] > 150, chart.id
        required = [
            (series.name, str(x), y)
            for series in chart.series
            for x, y in zip(series.x, series.y, strict=True)
            if y is not None
        ]
        assert [(name, x, y) for name, x, y, *_ in one["marks"]] == required, chart.id
        for _, x, y, left, top, height in one["marks"]:
            assert 40 <= left <= 360, (chart.id, x)
            assert top >= -1, (chart.id, y)
            assert top + height <= 250, (chart.id, y)


def test_heights_are_the_values(browser: webdriver.Chrome, made: Path) -> None:
    """Bars are as high as their values say, points of linear charts lie on one line over their values."""
    report = opened(browser, made)
    charts = {f"{chart.id}-chart": chart for section in report.sections for chart in section.charts}
    for one in browser.execute_script(MARKS):
        chart = charts[one["id"]]
        if chart.y.log or not one["marks"]:
            continue
        largest = max(one["marks"], key=lambda mark: mark[2])
        for _, _, y, _, top, height in one["marks"]:
            if chart.kind == "bars" and largest[2]:
                assert height == pytest.approx(largest[5] * y / largest[2], abs=0.1), chart.id
            elif y != largest[2]:
                assert top + height / 2 > largest[4] + largest[5] / 2 - 0.1, chart.id


def test_tables_hold_the_values_of_the_json(browser: webdriver.Chrome, made: Path) -> None:
    report = opened(browser, made)
    shown = browser.execute_script(TABLES)
    tables = [table_of(chart) for section in report.sections for chart in section.charts]
    tables += [table for section in report.sections for table in section.tables]
    assert {table.id: [list(row) for row in table.rows] for table in tables} == shown
    assert len(shown) == len(tables), "ids are used once"
    verdicts = browser.execute_script("return [...document.querySelectorAll('.verdict')].map(one => one.innerText)")
    assert all(one.words in text for one, text in zip(report.verdicts, verdicts, strict=True))


@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 320, 1200])
def test_it_fits_a_phone_and_a_desk(browser: webdriver.Chrome, made: Path, width: int, colours: str) -> None:
    opened(browser, made)
    resize(browser, width)
    scheme(browser, colours)
    browser.execute_script("for (const one of document.querySelectorAll('details')) one.open = true")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.execute_script("return innerWidth") == width
    small = "return [...document.querySelectorAll('svg.chart')].every(one => one.getBoundingClientRect().width >= %d)"
    assert browser.execute_script(small % min(width - 80, 300))
    ink, ground = browser.execute_script(
        "const style = getComputedStyle(document.body); return [style.color, style.backgroundColor]"
    )
    bright = [sum(map(int, re.findall(r"\d+", value)[:3])) for value in (ink, ground)]
    assert (bright[0] > bright[1]) == (colours == "dark")
