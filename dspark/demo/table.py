"""What the demo measured, and how it is shown.

Sums and counts are added up first and divided last, so a class or the total is never a mean of means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from dspark.demo.prompts import Prompt


@dataclass(frozen=True)
class Answer:
    """One prompt answered by one server."""

    prompt: Prompt
    input_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    finish: str  # "length" or "stop"
    seconds: float  # from sending the request to its last token, prefill included
    histogram: tuple[int, ...]  # [k] = steps that accepted exactly k drafts; empty without speculation


@dataclass(frozen=True)
class Row:
    """Figures of a group of answers, the same prompts in both arms."""

    name: str
    prompts: int
    tok_s_none: float  # output tokens per second of request time
    tok_s_dspark: float
    accept_length: float  # tokens a step commits: accepted drafts plus one
    accepted: tuple[float, ...]  # [k - 1] = share of steps that accepted draft k, which needs all before it


def tokens_per_second(answers: Sequence[Answer]) -> float:
    """Output tokens per second of request time."""
    seconds = sum(answer.seconds for answer in answers)
    return sum(len(answer.output_ids) for answer in answers) / seconds if seconds else 0.0


def histogram_sum(answers: Sequence[Answer]) -> list[int]:
    """Steps by number of accepted drafts, over all answers."""
    total = [0] * max((len(answer.histogram) for answer in answers), default=0)
    for answer in answers:
        for accepted, steps in enumerate(answer.histogram):
            total[accepted] += steps
    return total


def make_row(name: str, none: Sequence[Answer], dspark: Sequence[Answer], gamma: int) -> Row:
    """Sum up one group of prompts."""
    histogram = histogram_sum(dspark)
    steps = sum(histogram)
    drafts = sum(accepted * count for accepted, count in enumerate(histogram))
    return Row(
        name=name,
        prompts=len(dspark),
        tok_s_none=tokens_per_second(none),
        tok_s_dspark=tokens_per_second(dspark),
        accept_length=1 + drafts / steps if steps else 0.0,
        accepted=tuple(sum(histogram[k:]) / steps if steps else 0.0 for k in range(1, gamma + 1)),
    )


def make_rows(none: Sequence[Answer], dspark: Sequence[Answer], gamma: int) -> list[Row]:
    """One row per class in the order of the prompts, then one for all."""
    rows = []
    for kind in dict.fromkeys(answer.prompt.kind for answer in dspark):
        group = [[answer for answer in arm if answer.prompt.kind == kind] for arm in (none, dspark)]
        rows.append(make_row(kind, group[0], group[1], gamma))
    return [*rows, make_row("all", none, dspark, gamma)]


def render(rows: Sequence[Row], title: str) -> Table:
    """The rows as a table that fits a terminal of 80 columns; the last row is set apart."""
    caption = (
        "tok/s: output tokens per second of request time. accept length: tokens a step commits, the target's own one "
        "included. k=1..: % of steps in which draft k was accepted."
    )
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        caption=caption,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("class", no_wrap=True)
    for heading in ("tok/s\nnone", "tok/s\nDSPARK", "speed\nup", "accept\nlength"):
        table.add_column(heading, justify="right", no_wrap=True)
    for k in range(1, len(rows[0].accepted) + 1):
        table.add_column(f"\nk={k}", justify="right", no_wrap=True)
    for row in rows:
        if row is rows[-1]:
            table.add_section()
        table.add_row(
            row.name,
            f"{row.tok_s_none:.1f}",
            f"{row.tok_s_dspark:.1f}",
            f"{row.tok_s_dspark / row.tok_s_none:.2f}x" if row.tok_s_none else "-",
            f"{row.accept_length:.2f}",
            *(f"{100 * share:.0f}" for share in row.accepted),
        )
    return table
