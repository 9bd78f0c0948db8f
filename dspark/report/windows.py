"""Sections about windows: their sizes, what the ceiling loses to them, how they differ between requests."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import numpy as np
from scipy.stats import spearmanr

from dspark.report.model import Axis, Chart, Section, Series, Table
from dspark.report.model import Column as C
from dspark.report.source import Observed
from dspark.report.sums import ceiling as ceiling_of
from dspark.report.sums import drafted_tokens, full_window_tokens, ratio

LONGEST_REQUESTS = 200  # drawn
LEAST_STEPS = 4  # of a request that is drawn: the mean of fewer says little
_FOLDED = 24  # tiers drawn one by one


def windows(observed: Observed) -> Section:
    """Histograms of windows, commits and tiers."""
    counters = observed.counters
    steps = sum(counters["windows"])
    rows = [str(rows) for rows in range(1, observed.gamma + 2)]
    sizes = Chart(
        id="windows",
        title="Windows and commits",
        words="request steps with a draft, by rows verified and by tokens committed",
        kind="bars",
        x=Axis(label="rows, tokens", unit="count"),
        y=Axis(label="request steps", unit="percent"),
        series=[
            Series(name="rows of the window", x=[*rows], y=[ratio(count, steps) for count in counters["windows"][1:]]),
            Series(
                name="tokens committed",
                x=[*rows],
                y=[ratio(count, steps) for count in counters["committed_histogram"][1:]],
            ),
        ],
    )
    tiers = {int(rows): count for rows, count in counters["tiers"].items()}
    while len(tiers) > _FOLDED:  # neighbours together: a server without graphs forwards any number of rows
        places = sorted(tiers)
        pairs = [places[at : at + 2] for at in range(0, len(places), 2)]
        tiers = {pair[-1]: sum(tiers[rows] for rows in pair) for pair in pairs}
    forwarded = Chart(
        id="tiers",
        title="Rows forwarded",
        words="steps by the rows that the target forwarded, padding included, up to so many",
        kind="bars",
        x=Axis(label="rows, up to", unit="count"),
        y=Axis(label="steps", unit="count"),
        series=[
            Series(name="steps", x=[str(rows) for rows in sorted(tiers)], y=[tiers[rows] for rows in sorted(tiers)])
        ],
    )
    misses = counters["graph_misses"]
    words = [f"{count:,} steps ran without a CUDA graph: {reason}." for reason, count in misses.items()]
    return Section(id="windows", title="Windows and tiers", words=words, charts=[sizes, forwarded])


def ceiling(observed: Observed) -> Section:
    """Committed tokens against what full windows would have committed."""
    found, counters = ceiling_of(observed), observed.counters
    hidden, steps = counters["trimmed_all_accepted"], counters["request_steps"]
    words = [
        f"In {hidden:,} of {steps:,} request steps a trimmed window passed all its tests: there a full window might "
        "have committed more."
    ]
    charts = []
    if found is None:
        guess, committed = full_window_tokens(observed), drafted_tokens(observed)
        words.append(_why_not(observed))
        if guess is not None and committed is not None:
            words.append(
                "A rough guess: if drafts that were left out were accepted as often as those reached in their place, a "
                f"full window would commit {guess:.2f} tokens; steps with a draft have committed {committed:.2f}."
            )
            names = ["committed", "full window, guessed"]
            charts.append(_bars(names, [committed, guess], None, None))
    else:
        share = found.committed / found.middle
        interval = "" if found.kind == "measured" else f" (90% interval {found.low:,.0f} to {found.high:,.0f})"
        words.append(
            f"{found.kind.capitalize()} over {found.request_steps:,} request steps: {found.committed:,} tokens were "
            f"committed, {share:.1%} of the {found.middle:,.0f} that full windows would have committed{interval}."
        )
        if found.unresolved:
            words.append(f"{found.unresolved:,} request steps are left out: their later tokens are not known.")
        count = found.request_steps
        each = [found.committed / count, found.middle / count]
        low, high = [each[0], found.low / count], [each[0], found.high / count]
        exact = found.kind == "measured"
        charts.append(
            _bars(["committed", f"ceiling, {found.kind}"], each, None if exact else low, None if exact else high)
        )
    return Section(id="ceiling", title="Ceiling and commits", words=words, charts=charts)


def _why_not(observed: Observed) -> str:
    if not observed.counters["trimmed"]:
        return "Nothing was trimmed: what was committed is the ceiling."
    if observed.mode is None:
        return "A records file knows the ceiling only if it was written in cap-accept mode."
    if observed.mode == "cap-accept":
        return "No step has measured its ceiling: pinned steps forward trimmed windows in cap-accept too."
    return "This server shows no estimate of the ceiling; cap-accept mode measures it."


def _bars(names: list[str], values: list[float], low: list[float] | None, high: list[float] | None) -> Chart:
    return Chart(
        id="ceiling",
        title="Tokens per request step",
        words="committed, and what full windows would have committed",
        kind="bars",
        x=Axis(label="what"),
        y=Axis(label="tokens per request step"),
        series=[Series(name="tokens per request step", x=[*names], y=[*values], low=low, high=high)],
    )


@dataclass(frozen=True)
class RequestMeans:
    """A recorded request, over its steps with a draft."""

    steps: int
    rows: float
    committed: float


def requests_of(observed: Observed) -> list[RequestMeans]:
    """Recorded requests of at least ``LEAST_STEPS`` drafted steps, in no order."""
    rows = [one for step in observed.steps if step.drafted for one in step.requests]
    rows.sort(key=lambda one: (one.slot, one.generation))
    groups = [[*group] for _, group in groupby(rows, key=lambda one: (one.slot, one.generation))]
    return [
        RequestMeans(
            len(group), *(float(np.mean([getattr(one, name) for one in group])) for name in ("rows", "committed"))
        )
        for group in groups
        if len(group) >= LEAST_STEPS
    ]


def requests(observed: Observed) -> Section:
    """Whether requests get windows of their own."""
    title = "Requests among themselves"
    if not observed.steps:
        return Section(
            id="requests",
            title=title,
            words=["This needs step records: start the server with SGLANG_DSPARK_STEP_RECORDS=100000."],
        )
    found = sorted(requests_of(observed), key=lambda one: -one.steps)
    if len(found) < 2:
        said = f"Fewer than two requests have {LEAST_STEPS} recorded steps with a draft: nothing to compare."
        return Section(id="requests", title=title, words=[said])
    rows, committed = np.array([one.rows for one in found]), np.array([one.committed for one in found])
    words = [
        f"{len(found):,} requests with at least {LEAST_STEPS} recorded steps: half of them have a mean window between "
        f"{np.quantile(rows, 0.25):.2f} and {np.quantile(rows, 0.75):.2f} rows, the extremes are {rows.min():.2f} and "
        f"{rows.max():.2f}."
    ]
    if np.ptp(rows) > 0 and np.ptp(committed) > 0:
        rank = float(spearmanr(rows, committed).statistic)
        words.append(
            f"Rank correlation of mean window and mean commit: {rank:+.2f} (1: rows go where tokens come from)."
        )
    drawn = found[:LONGEST_REQUESTS]
    if len(found) > len(drawn):
        words.append(f"The {len(drawn)} longest are drawn.")
    scatter = Chart(
        id="requests",
        title="A point per request",
        words="mean rows it got, mean tokens it committed per step",
        kind="points",
        x=Axis(label="rows of the window"),
        y=Axis(label="tokens committed"),
        series=[
            Series(name="request", x=[one.rows for one in drawn], y=[one.committed for one in drawn]),
        ],
        diagonal="every row becomes a token",
    )
    bounds = np.linspace(1, observed.gamma + 1, 2 * observed.gamma + 1)
    counts = np.histogram(rows, bounds)[0]
    spread = Chart(
        id="request-windows",
        title="Spread of mean windows",
        words="requests by their mean window, in steps of half a row",
        kind="bars",
        x=Axis(label="mean rows, from"),
        y=Axis(label="requests", unit="count"),
        series=[Series(name="requests", x=[f"{bound:g}" for bound in bounds[:-1]], y=counts.tolist())],
    )
    return Section(id="requests", title=title, words=words, charts=[scatter, spread], tables=[_within(observed)])


def _within(observed: Observed) -> Table:
    """Spread of the windows inside of one step, by batch size."""
    spreads: dict[int, list[float]] = {}
    for step in observed.steps:
        if step.drafted and step.batch > 1:
            spreads.setdefault(step.batch, []).append(float(np.ptp([one.rows for one in step.requests])))
    return Table(
        id="within",
        title="Largest less smallest window within a step",
        columns=[C(name="batch size", unit="count"), C(name="steps", unit="count"), C(name="mean difference, rows")],
        rows=[[size, len(found), float(np.mean(found))] for size, found in sorted(spreads.items())],
    )
