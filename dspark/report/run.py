"""``python -m dspark report``: read, work out, write the page."""

from __future__ import annotations

import argparse
from pathlib import Path

from dspark.errors import ConfigError
from dspark.report.acceptance import acceptance, classes
from dspark.report.model import Report, Section
from dspark.report.page import page
from dspark.report.source import Observed, from_info_file, from_records, from_url
from dspark.report.speed import frontier, load, step_times
from dspark.report.verdict import calibration, counters, speculation, trimming
from dspark.report.windows import ceiling, requests, windows

_VERDICTS = (speculation, trimming, calibration)
_SECTIONS = (frontier, acceptance, windows, ceiling, classes, load, step_times, requests, counters)


def report_of(observed: Observed) -> Report:
    """Everything that the page says."""
    return Report(
        title="DSPARK report",
        facts=dict(observed.facts),
        verdicts=[make(observed) for make in _VERDICTS],
        sections=[_drawable(make(observed)) for make in _SECTIONS],
    )


def _drawable(section: Section) -> Section:
    """Without charts in which there is no point."""
    charts = [one for one in section.charts if any(y is not None for series in one.series for y in series.y)]
    missing = ["Where a chart is missing, nothing was counted."] if len(charts) < len(section.charts) else []
    return section.model_copy(update={"charts": charts, "words": [*section.words, *missing]})


def main(args: argparse.Namespace) -> int:
    """Write the page and print its verdicts.

    Returns:
        0; a verdict is no failure.

    Raises:
        DSparkError: nothing to read, or no way to write.
    """
    report = report_of(_source(args))
    out: Path = args.out
    try:
        out.write_text(page(report), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"found no way to write {out}: {error}; choose another file") from error
    for one in report.verdicts:
        print(f"{one.question} {one.answer}: {one.words}")
    print(f"{out}: {out.stat().st_size / 1024:.0f} KiB")
    return 0


def _source(args: argparse.Namespace) -> Observed:
    if args.url is not None:
        return from_url(args.url, args.watch)
    return from_records(args.records) if args.records is not None else from_info_file(args.server_info)
