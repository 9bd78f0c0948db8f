"""What one GPU can say of whole servers in a quarter of an hour, most important first; every part is written when done.

    python -m benchmarks.half_hour --target TARGET --draft DRAFT --out-dir OUT

A large model with dummy weights and replayed acceptance (``--big``): no speculation, the built-in and ours on the GPU
together (``benchmarks.serve``), at the levels and batches where ours could lose; predicted step times over contexts
(``benchmarks.prediction``), step times of short blocks and the kernels of a step on our server. The model of
``--target`` with its drafter and real prompts: the cost of counting (``benchmarks.overhead``), then live throughput.
``--only big`` or ``small`` leaves the other model out.

A part that fails is named at the end and does not cost the others their time. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import machine, overhead, prediction, serve, serve_arms, serve_cells, traces
from dspark.demo.server import ServerProcess, default_device, ending_signals_raise

OURS = "dspark-compact"
ARMS = f"none,builtin-static,dspark-static,{OURS}"
COMPACT_BATCHES, COMPACT_BUDGETS = (32, 64, 128), "1,2,3,5"  # of the built-in's compact arm, where it comes close
QUIET = 64  # requests; with more, the host sets the pace now and then
HEAD_START = 15.0  # seconds of the other servers, so that the GPU is quiet when ours times its graphs
# Levels and the batches at which they are asked: full sweeps where trimming decides, else where an earlier run lost.
CELLS = {
    "middle": (1, 8, 16, 32, 64, 128, 256),
    "hopeless": (1, 16, 64, 256),
    "low": (1, 16, 32, 64, 128, 256),
    "high": (1, 16, 64, 128),
}
# Batch -> verified rows and the drafts of each block: what short blocks save.
PINNED = {32: ((96, 7), (96, 4), (64, 2)), 64: ((192, 7), (192, 4), (128, 2)), 128: ((1024, 7), (256, 7), (256, 2))}
PROFILED = {64: ((128, 2),), 128: ((1024, 7), (256, 2))}  # as PINNED, for the kernels of a step
PROFILED_STEPS = 20
ROUNDS = 31  # of the cost of counting: it is smaller than what rounds differ by
CONTEXTS = ((1, 1024), (4, 1024), (1, 8192), (4, 8192), (1, 32768))  # batch, prompt tokens


class Report:
    """Output files, times and failures of the parts."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.failures, self._begun = folder, list[str](), time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part that may fail."""
        print(f"== {time.monotonic() - self._begun:.0f} s: {name}", flush=True)
        try:
            yield
        except Exception as error:  # whatever it is, the machine is lent for the other parts as well
            traceback.print_exc()
            self.failures.append(f"{name}: {type(error).__name__}: {error}")

    def write(self, name: str, args: argparse.Namespace, **found: Any) -> None:
        """One result file, with the command that made it."""
        value = {"machine": machine.describe(), "command": args.command, "model": args.model, **found}
        (self.folder / f"{name}.json").write_text(json.dumps(value, indent=1) + "\n")


def serve_arguments(args: argparse.Namespace, model: str, flags: Sequence[str], folder: Path) -> argparse.Namespace:
    """Arguments of ``benchmarks.serve``."""
    common = ["--model", model, "--resident", "5", "--arms", args.arms, "--budgets", COMPACT_BUDGETS]
    common += ["--device", args.device, "--out", str(Path(args.out_dir) / f"serve_{model}.json"), *flags]
    found = serve.parse_arguments(common)
    found.command = args.command
    serve_arms.resolve_model(found, folder)
    return found


def start_all(
    args: argparse.Namespace, engines: Sequence[str], results: serve.Results, stack: ExitStack
) -> dict[str, serve.Running]:
    """Servers side by side."""

    def start(engine: str, exits: ExitStack) -> serve.Running:
        time.sleep(HEAD_START * (engine == OURS))
        return serve.start(args, engine, results, exits)

    with ThreadPoolExecutor(len(engines)) as pool:
        futures = {engine: pool.submit(start, engine, stack.enter_context(ExitStack())) for engine in engines}
        return {engine: future.result() for engine, future in futures.items()}


def wanted(cells: Sequence[serve_cells.Cell], asked: dict[str, Sequence[int]]) -> list[serve_cells.Cell]:
    """Those that are asked for, and all that belong to no level."""
    compact = {"builtin-compact": COMPACT_BATCHES}
    return [
        cell
        for cell in cells
        if cell.batch in asked.get(cell.acceptance, (cell.batch,))
        and cell.batch in compact.get(cell.arm, (cell.batch,))
    ]


def cells_argument(text: str) -> dict[str, Sequence[int]]:
    """``middle:1,8;low:64`` -> {"middle": [1, 8], "low": [64]}."""
    pairs = (part.split(":") for part in text.split(";"))
    return {level: [int(batch) for batch in batches.split(",")] for level, batches in pairs}


def contexts_argument(text: str) -> list[tuple[int, int]]:
    """``4:1024,1:8192`` -> [(4, 1024), (1, 8192)]."""
    pairs = (part.split(":") for part in text.split(",") if part)
    return [(int(batch), int(tokens)) for batch, tokens in pairs]


def measured(args: argparse.Namespace, report: Report, console: Console) -> None:
    """Both models, the parts that a busy host disturbs least first; ``--wait-for`` a file before the others."""
    with ExitStack() as stack:
        stack.enter_context(ending_signals_raise())
        if args.only == "small":
            live_part(*small_model(args, stack, report), report, console)
            return
        big = serve_arguments(args, args.big, args.big_flags, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        results = serve.Results(big.out, args.command)
        running = start_all(big, serve_arms.engines(big), results, stack)
        ours = running[OURS]
        later = {engine: split_cells(one, args.cells) for engine, one in running.items()}
        with report.part("large model, batches that the device sets the pace of"):
            report.failures += serve.measure_all(big, running, console)
        if args.contexts:
            with report.part("prediction"):
                ours.bench.select("middle")
                report.write("prediction", big, **predicted(args.contexts, big, ours.server))
        if not args.brief:
            with report.part("short blocks"):
                report.write("short_blocks_steps", big, rows=short_blocks(big, ours.bench))
            if args.device != "cpu":
                with report.part("kernels of a step"):
                    report.write("kernels_of_a_step", big, rows=kernels_of_steps(big, ours))
        small = None if args.only == "big" else small_model(args, stack, report)
        for engine, cells in later.items():
            running[engine].cells += cells
        with report.part("large model, large batches"):
            report.failures += serve.measure_all(big, running, console)
            serve.finish(results, console)
            report.write("schedule_big", big, schedule=prediction.schedule_of(ours.server))
        if small is not None:
            live_part(*small, report, console)


def live_part(
    args: argparse.Namespace,
    results: serve.Results,
    servers: dict[str, serve.Running],
    report: Report,
    console: Console,
) -> None:
    """Throughput of the small model."""
    with report.part("small model, live"):
        report.failures += serve.measure_all(args, servers, console)
        serve.finish(results, console)


def split_cells(one: serve.Running, asked: dict[str, Sequence[int]]) -> list[serve_cells.Cell]:
    """Leave those of small batches to a server, and return those of large ones that wait for a quiet host."""
    cells = wanted(one.cells, asked)
    large = [cell for cell in cells if cell.batch > QUIET and cell.arm == OURS]
    one.cells = [cell for cell in cells if cell not in large]
    return large


def small_model(
    args: argparse.Namespace, stack: ExitStack, report: Report
) -> tuple[argparse.Namespace, serve.Results, dict[str, serve.Running]]:
    """The small model's servers, once the cost of counting was measured on ours."""
    flags = ["--target", str(args.target), "--draft", str(args.draft), *args.small_flags]
    small = serve_arguments(args, "smollm2", flags, Path(stack.enter_context(tempfile.TemporaryDirectory())))
    results = serve.Results(small.out, args.command)
    # The built-in's compact arm gets the table that ours has measured.
    first, *more = [group for group in serve_arms.groups(small) if group != [OURS]]
    running = start_all(small, [*first, OURS], results, stack)
    for group in more:
        with report.part(f"start of {', '.join(group)}"):
            running |= start_all(small, group, results, stack)
    while args.wait_for is not None and not args.wait_for.exists():
        time.sleep(1.0)
    with report.part("cost of counting"):
        ours = running[OURS]
        tokens, small.tokens, repeats, small.repeats = small.tokens, 2 * small.tokens, small.repeats, ROUNDS
        rows = [
            overhead.compare(small, ours.server, ours.bench, batch) for batch in (64, 1) if batch <= max(small.batches)
        ]
        report.write("overhead", small, bar=overhead.BAR, rows=rows)
        small.tokens, small.repeats = tokens, repeats
    return small, results, running


def short_blocks(args: argparse.Namespace, bench: serve_cells.Bench) -> list[dict[str, Any]]:
    """Step times of pinned rows, from blocks of several lengths."""
    bench.select("hopeless")  # a round holds the most steps where nothing is accepted
    rows = []
    for batch, pins in PINNED.items():
        for count, depth in pins if batch <= max(args.batches) else ():
            fraction = min(1.0, (count - batch + 0.5) / (batch * args.gamma))
            bench.pin(fraction, dspark_force_depth=-1 if depth == args.gamma else depth)
            bench.run(batch, 4 * args.log_interval)
            found = bench.run(batch, 2 * args.log_interval * (args.repeats + 1))
            steps = [one.step_seconds * 1e3 for one in found]
            rows.append({"batch": batch, "rows": count, "depth": depth, "step_ms": steps})
            middle = statistics.median(steps) if steps else float("nan")
            print(f"batch {batch}, {count} rows, blocks of {depth} drafts: step {middle:.2f} ms", flush=True)
    bench.pin(None)
    return rows


def kernels_of_steps(args: argparse.Namespace, one: serve.Running) -> list[dict[str, Any]]:
    """What the GPU does in pinned steps, kernel by kernel."""
    one.bench.select("hopeless")
    rows = []
    for batch, pins in PROFILED.items():
        for count, depth in pins if batch <= max(args.batches) else ():
            fraction = min(1.0, (count - batch + 0.5) / (batch * args.gamma))
            one.bench.pin(fraction, dspark_force_depth=-1 if depth == args.gamma else depth)
            tokens = 4 * PROFILED_STEPS + 60  # half a second passes before the trace begins
            work = partial(one.bench.run, batch, tokens)
            trace = traces.record(one.server, work, PROFILED_STEPS, with_cpu=False)
            rows.append({"batch": batch, "rows": count, "depth": depth, **trace.times(), "top": trace.top_kernels()})
            print(f"batch {batch}, {count} rows, blocks of {depth} drafts: {trace.times()}", flush=True)
    one.bench.pin(None)
    return rows


def predicted(contexts: Sequence[tuple[int, int]], args: argparse.Namespace, server: ServerProcess) -> dict[str, Any]:
    """One pass over the cells that warms up, then two that count."""
    rows = []
    for repeat in range(3):
        for batch, context in contexts:
            row = prediction.cell(args, server, batch, context)
            if row is not None and repeat:
                rows.append(row | {"repeat": repeat})
                print("batch {batch}, context {context}: predicted over measured {ratio:.4f}".format(**row), flush=True)
    errors = [abs(row["ratio"] - 1) for row in rows]
    return {"bar": prediction.BAR, "mean_error": statistics.fmean(errors), "rows": rows}


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--target", type=Path, required=True)
    add("--draft", type=Path, required=True)
    add("--out-dir", type=Path, required=True)
    add("--device", default=default_device())
    add("--wait-for", type=Path, metavar="FILE", help="before what needs a quiet host")
    add("--arms", default=ARMS)
    add("--cells", type=cells_argument, default=CELLS, metavar="LEVEL:BATCH,...;...", help="of the large model")
    add(
        "--contexts",
        type=contexts_argument,
        default=CONTEXTS,
        metavar="BATCH:TOKENS,...",
        help="of predicted step times; an empty text leaves them out",
    )
    add("--only", choices=("big", "small"), help="one model")
    add("--brief", action="store_true", help="of the large model throughput only")
    add("--big", default="qwen3-8b", help="name of shapes with dummy weights")
    add("--big-flags", type=str.split, help="of benchmarks.serve, one string")
    add("--small-flags", type=str.split, help="of benchmarks.serve, one string")
    args = parser.parse_args(argv)
    prefill = "--disable-prefill-cuda-graph --max-total-tokens"
    if args.big_flags is None:
        args.big_flags = ["--levels", ",".join(args.cells), "--batches", "1,8,16,32,64,128,256", "--tokens", "128"]
        args.big_flags += ["--input-len", "32", "--log-interval", "4", "--server-args", f"{prefill} 52000"]
    if args.small_flags is None:
        args.small_flags = ["--batches", "1,4,16,32,64,128,256", "--log-interval", "16", "--tokens", "256"]
        args.small_flags += ["--server-args", f"{prefill} 150000 --enable-metrics"]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    args.command = "python -m benchmarks.half_hour " + shlex.join(sys.argv[1:] if argv is None else argv)
    report, console = Report(args.out_dir), Console(width=180, highlight=False, soft_wrap=True)
    with report.part("all"):
        measured(args, report, console)
    with report.part("done"):
        print(json.dumps({"failures": report.failures}))
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
