"""``python -m dspark profile``: step times of a running server over batch size, verified rows and context, as a table.

``run`` writes samples, ``fit`` makes the table of them, ``all`` does both. The server must record times
(``SGLANG_DSPARK_ENABLE_SPS_RECORD=1``) and serve nobody else meanwhile. Rows are pinned, so its verify mode, its
acceptance and its text do not matter.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from dspark.errors import ConfigError
from dspark.profile import report
from dspark.profile.fit import judged_fit
from dspark.profile.samples import Samples
from dspark.profile.server import ProfiledServer
from dspark.profile.sweep import Effort, Point, default_batches, default_fractions, grid, measure
from dspark.scheduler.cost_file import to_host_steps_json, to_json


def main(args: argparse.Namespace) -> int:
    """Measure, fit, or both.

    Returns:
        0.

    Raises:
        DSparkError: bad options, a server that does not answer or records nothing, samples that make no table.
    """
    console = Console(highlight=False, soft_wrap=True)
    if args.action in ("run", "all"):
        _run(args, console)
    if args.action in ("fit", "all"):
        _fit(args, console)
    return 0


def samples_path(out: Path) -> Path:
    """Where the samples of a table are."""
    return out.with_name(f"{out.stem}.samples.json")


def _run(args: argparse.Namespace, console: Console) -> None:
    if not args.url:
        raise ConfigError("found no --url; required is that of a running server; start one first")
    if args.steps < 16:
        raise ConfigError(f"found --steps {args.steps}; required are 16 or more, or a median says nothing")
    server = ProfiledServer(args.url)
    facts = server.facts()
    gamma = facts.provenance.gamma
    batches = _whole(args.batches, "--batches") if args.batches else default_batches(facts)
    fractions = _shares(args.fractions) if args.fractions else default_fractions(gamma)
    contexts = _whole(args.contexts, "--contexts")
    points, skipped = grid(facts, batches, fractions, contexts, args.steps)
    for one in skipped:
        console.print(f"not measured: {one}")
    if not points:
        raise ConfigError("found nothing that the server can hold; required is a smaller grid or a larger server")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    effort, cells = Effort(args.steps, args.timeout), []
    warm_up = Point(points[0].requests, 1.0, points[0].prompt_tokens)
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=console) as bar:
        measure(server, facts, warm_up, effort, args.temperature)  # nobody takes these
        for point in bar.track(points, description="cells"):
            cell = measure(server, facts, point, effort, args.temperature)
            where = f"{point.requests} requests, {cell.rows} rows, prompt {point.prompt_tokens}"
            bar.console.print(f"{where}: {cell.median * 1e3:.3f} ms")
            cells.append(cell)
            # After every cell: a long sweep may be ended before its last one.
            found = Samples(provenance=facts.provenance, mode=facts.mode, cells=cells)
            samples_path(args.out).write_text(found.model_dump_json() + "\n")
    console.print(f"wrote {samples_path(args.out)}: {len(cells)} cells")


def _fit(args: argparse.Namespace, console: Console) -> None:
    samples = Samples.load(samples_path(args.out))
    judged = judged_fit(samples)
    console.print(report.table(samples, judged))
    for sentence in report.terms(judged):
        console.print(sentence)
    steps = args.out.with_name(f"{args.out.stem}.steps.json")
    context = min(cell.prompt_tokens for cell in samples.cells)
    args.out.write_text(to_json(judged.model))
    steps.write_text(to_host_steps_json(judged.model, samples.provenance.gamma, context))
    picture = args.out.with_suffix(".png")
    report.draw(samples, judged, picture)
    console.print(
        f"wrote {args.out} (SGLang reads it too), {steps} (SGLang's steps per second) and {picture}; serve with "
        f"--speculative-dspark-sps-table-path {args.out}"
    )
    print(json.dumps(report.figures(samples, judged) | {"out": str(args.out)}), flush=True)


def _whole(text: str, flag: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"found {flag} {text!r}; required are whole numbers from 1, separated by commas")
    return sorted({int(part) for part in parts})


def _shares(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [-1.0]
    if not all(0 < value <= 1 for value in values):
        raise ConfigError(f"found --fractions {text!r}; required are numbers above 0 up to 1, separated by commas")
    return sorted(set(values))
