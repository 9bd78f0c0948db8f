"""Tokens per second over the batch size: no speculation, EAGLE, SGLang's built-in DSPARK and this package.

    python -m benchmarks.serve --model qwen3-8b --out benchmarks/results/serve_h200.json
    python -m benchmarks.serve --target TARGET --draft DRAFT --prompts examples/prompts --out serve_h200.json
    python -m benchmarks.serve --verdict serve_h200.json

One server per arm and model, one after the other, or ``--resident N`` of them on the GPU at once: then they start side
by side, the cells of one batch follow each other, and the machine drifts for all arms alike. A round sends ``batch``
greedy requests in one HTTP request, as SGLang's ``one_batch_server`` does, and takes tokens per second from the lines
that the host's scheduler logs while all of them decode: prefill and the tail in which some have finished do not count,
and all arms see the same contexts.
``--cross-check BATCH`` runs ``sglang.benchmark.one_batch_server`` itself against each server too and stores its result.

Acceptance: ``real`` with weights; else the levels high, middle, low and hopeless, which our server replays live and
switches between without a restart. Arms that cannot replay (the built-in; ours pinned to full windows) are timed at
pinned budgets and combined with the level's tokens: ``composed`` (``benchmarks.composed``). No variable simulates the
built-in's acceptance: any makes it leave its faster accept path, and dummy weights accept nothing anyway.

The file is written after every cell and read at start: cells that it has are skipped. Verdicts come last.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from benchmarks import composed, machine, serve_arms, serve_cells, verdict
from dspark.demo.server import ServerProcess, default_device, ending_signals_raise
from dspark.errors import HostError
from dspark.scheduler.replay_blocks import levels as replayed_levels

FIXED_PROMPT = Path(__file__).resolve().parents[1] / "examples" / "prompts" / "frontier.txt"


class Results:
    """The output file: what is in it already, and one write after every cell."""

    def __init__(self, path: Path | None, command: str) -> None:
        self._path = path
        self.value: dict[str, Any] = {"rows": [], "step_times": [], "checks": []}
        if path is not None and path.exists():
            self.value |= json.loads(path.read_text())
        described = machine.describe()
        self.value |= {"machine": described, "versions": described["versions"]}
        commands = self.value.get("command", "").split("; ")
        self.value["command"] = "; ".join(dict.fromkeys([*filter(None, commands), *command.split("; ")]))

    @classmethod
    def merged(cls, paths: Sequence[Path], out: Path | None) -> Results:
        """Several files as one, written to ``out``, whatever is there."""
        parts = [json.loads(path.read_text()) for path in paths]
        results = cls(None, "; ".join(part["command"] for part in parts))
        results._path = out
        results.value |= {name: parts[0][name] for name in ("machine", "versions")}
        for kind in ("rows", "step_times", "checks"):
            results.value[kind] = [entry for part in parts for entry in part[kind]]
        return results

    def has(self, kind: str, **key: Any) -> bool:
        """Whether the list ``kind`` has an entry with these fields."""
        return any(all(one.get(name) == value for name, value in key.items()) for one in self.value[kind])

    def add(self, kind: str, entry: dict[str, Any]) -> None:
        """Append an entry and write the file."""
        self.value[kind].append(entry)
        self.write()

    def write(self) -> None:
        """Write the file, if there is one."""
        if self._path is not None:
            self._path.write_text(json.dumps(self.value, indent=1) + "\n")


def cells_of(args: argparse.Namespace, engine: str, results: Results) -> list[serve_cells.Cell]:
    """What an engine has to measure and the file does not have."""
    found = []
    for batch in args.batches:
        for arm in args.arms:
            if serve_arms.engine_of(arm, args.own_static) != engine:
                continue
            if args.real or arm == verdict.OURS:
                found += [serve_cells.live(arm, batch, level) for level in args.levels]
                if args.own_static and arm == verdict.OURS and "dspark-static" in args.arms:
                    found.append(serve_cells.timed(arm, batch, args.gamma * batch))
            elif arm in ("none", "eagle"):
                found.append(serve_cells.live(arm, batch, verdict.ANY))
            else:
                budgets = args.budgets if arm == "builtin-compact" else [args.gamma]
                found += [serve_cells.timed(arm, batch, part * batch) for part in budgets]
                if arm == "dspark-static" and batch == args.batches[len(args.batches) // 2]:
                    found.append(serve_cells.check(arm, batch, args.levels[0]))
    order = {level: place for place, level in enumerate(args.levels, 1)}  # as asked for: a lease may end in between
    found.sort(key=lambda cell: (cell.arm, order.get(cell.acceptance, 0), cell.batch))
    return [cell for cell in found if not results.has(cell.kind, model=args.model, **cell.key)]


class Running:
    """The server of an engine and the cells that it has left to measure; a context manager around the server."""

    def __init__(self, args: argparse.Namespace, engine: str, results: Results) -> None:
        table = serve_arms.measured_table(args)
        if engine == "builtin-compact" and args.real and table is None:
            raise HostError(
                "found no cost table for the built-in; required is --table, or a run of ours before (same --out)"
            )
        self.cells = cells_of(args, engine, results)
        self._args, self._engine, self._results = args, engine, results
        self.server = serve_arms.start(args, engine, table)

    def __enter__(self) -> Running:
        """Raises: HostError: the server does not start."""
        self.server.__enter__()
        self.bench = serve_cells.Bench(self._args, self.server)
        return self

    def __exit__(self, *error: Any) -> None:
        self.server.__exit__(*error)

    def measure(self, cell: serve_cells.Cell, console: Console) -> None:
        """Measure one cell and write it down; after the last one, what the server says of itself."""
        entry = self.bench.measure(cell)
        self._results.add(cell.kind, {"model": self._args.model, **entry})
        self.cells.remove(cell)
        console.print(f"{self._engine}, {len(self.cells)} cells left: {serve_cells.describe(entry)}")
        if not self.cells:
            self._finish()

    def _finish(self) -> None:
        args, name = self._args, f"{self._args.model} {self._engine}"
        if args.cross_check:
            found = cross_check(args, self.server)
            self._results.add("checks", {"model": args.model, "engine": self._engine, **found})
        self._results.value.setdefault("servers", {})[name] = serve_cells.server_facts(self.server)
        self._results.write()


def run_groups(
    args: argparse.Namespace, groups: Sequence[Sequence[str]], results: Results, console: Console
) -> list[str]:
    """Start the engines of a group side by side, the groups in order, and measure once none is left to start.

    Before a group that does not fit beside the others, engines are measured to their end and stopped, oldest first.

    Returns:
        What failed: one arm that does must not cost the others their time on the machine.
    """
    failures: list[str] = []
    running: dict[str, tuple[Running, ExitStack]] = {}
    with ExitStack() as stack:
        stack.enter_context(ending_signals_raise())  # servers that a thread has started must not outlive this process
        for group in groups:
            wanted = [engine for engine in group if cells_of(args, engine, results)]
            while running and len(running) + len(wanted) > args.resident:
                oldest = next(iter(running))
                measured, exits = running.pop(oldest)
                failures += measure_all(args, {oldest: measured}, console)
                exits.close()
            with ThreadPoolExecutor(max(1, len(wanted))) as starters:
                own = {engine: stack.enter_context(ExitStack()) for engine in wanted}
                futures = {engine: starters.submit(start, args, engine, results, own[engine]) for engine in wanted}
            print(file=sys.stderr)
            for engine, future in futures.items():
                try:
                    running[engine] = (future.result(), own[engine])
                except HostError as error:
                    failures.append(f"{engine}: {error}")
        failures += measure_all(args, {engine: one for engine, (one, _) in running.items()}, console)
    return failures


def start(args: argparse.Namespace, engine: str, results: Results, exits: ExitStack) -> Running:
    """Start an engine; ``exits`` stops it."""
    return exits.enter_context(Running(args, engine, results))


def measure_all(args: argparse.Namespace, running: dict[str, Running], console: Console) -> list[str]:
    """All cells of some servers: step times and plain decoding first, then level by level; by batch within these.

    Returns:
        What failed; a server that failed once is not asked again.
    """
    kinds = ["", verdict.ANY, *args.levels]
    todo = [
        (kinds.index(cell.acceptance), cell.batch, order, engine, cell)
        for order, (engine, one) in enumerate(running.items())
        for cell in one.cells
    ]
    failures: dict[str, str] = {}
    for *_, engine, cell in sorted(todo, key=lambda entry: entry[:3]):
        if engine not in failures:
            try:
                running[engine].measure(cell, console)
            except HostError as error:
                failures[engine] = f"{engine}: {error}"
    return list(failures.values())


def cross_check(args: argparse.Namespace, server: ServerProcess) -> dict[str, Any]:
    """What the host's own benchmark reports of one batch on the same server."""
    command = [sys.executable, "-m", "sglang.benchmark.one_batch_server", "--model", "None", "--base-url", server.url]
    command += ["--batch-size", str(args.cross_check), "--output-len", str(args.tokens), "--temperature", "0"]
    # Without --apply-chat-template: with transformers 5 the tool of 0.5.17 then sends no token ids, and gets HTTP 400.
    command += ["--fixed-prompt-file", str(FIXED_PROMPT), "--skip-warmup", "--no-append-to-github-summary"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.jsonl"
        done = subprocess.run([*command, "--result-filename", str(path)], capture_output=True, text=True, timeout=300)
        lines = path.read_text().splitlines() if path.exists() else []
    if done.returncode or not lines:
        return {"tool": "one_batch_server", "error": (done.stderr or done.stdout)[-400:]}
    return {"tool": "one_batch_server", **json.loads(lines[-1])}


def finish(results: Results, console: Console) -> None:
    """Compose rows, judge, print."""
    value = results.value
    value["rows"] = [row for row in value["rows"] if "composed" not in row["labels"]]
    for model in sorted({one["model"] for one in value["step_times"]}):
        gamma = next(one["gamma"] for one in value["step_times"] if one["model"] == model)
        wanted = {row["acceptance"] for row in value["rows"] if row["model"] == model}
        blocks = [(one.name, one.confidence, one.accepted) for one in replayed_levels(gamma) if one.name in wanted]
        value["rows"] += composed.rows(value["step_times"], model, blocks)
    value["verdicts"] = verdict.verdicts(value["rows"])
    results.write()
    if value["verdicts"]:
        console.print(verdict.table(value["verdicts"]))
        slower = [one for one in value["verdicts"] if not one["never_slower"]]
        faster = sum(bool(one.get("clearly_faster")) for one in value["verdicts"])
        console.print(
            f"{len(value['verdicts'])} cells: {len(slower)} slower than {verdict.NEVER_SLOWER} of the best other arm, "
            f"{faster} at {verdict.CLEARLY_FASTER} of the best static arm or plain decoding, or above (*)"
        )
    for one in composed.full_windows(value["step_times"]):
        console.print(one)
    for check in value["checks"]:
        for row in value["rows"]:
            names = ("model", "arm", "batch", "acceptance")
            if "composed" in row["labels"] and all(row[name] == check.get(name) for name in names):
                check["composed_over_live"] = row["tok_s"] / check["tok_s"]
        console.print({name: entry for name, entry in check.items() if name != "tok_s_repeats"})
    results.write()


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    add("--target", type=Path)
    add("--draft", type=Path)
    add("--model", default="smollm2", help="name of the rows; qwen3-8b, qwen3-14b: dummy weights, no paths")
    add("--eagle", type=Path, metavar="FOLDER", help="an EAGLE draft of the target: adds the arm eagle")
    add("--arms", type=lambda text: text.split(","), help=", ".join(serve_arms.ARMS))
    add("--batches", type=numbers, default=[1, 2, 4, 8, 16, 32, 64, 128, 256])
    add("--levels", type=lambda text: text.split(","), help="real, or some of high,middle,low,hopeless")
    add(
        "--budgets",
        type=numbers,
        default=[0, 1, 2, 3, 5, 7],
        help="drafts per request at which built-in steps are timed",
    )
    add("--repeats", type=int, default=5)
    add("--tokens", type=int, default=256, help="per request and round")
    add("--input-len", type=int, default=64, help="prompt tokens where prompts are invented")
    add("--prompts", type=Path, nargs="+", default=[Path("examples/prompts")], metavar="DIR_OR_JSONL")
    add("--log-interval", type=int, default=8, help="decode steps per line of the host's log")
    add(
        "--own-static",
        action="store_true",
        help="a server of its own for dspark-static, instead of pinned full windows",
    )
    add("--resident", type=int, default=1, metavar="N", help="servers on the GPU at once; all have to fit its memory")
    add("--table", type=Path, help="cost table for both compact arms; default: ours measures, the built-in gets that")
    add("--cross-check", type=int, default=0, metavar="BATCH")
    add("--device", default=default_device())
    add("--server-args", default="", help="further flags of all servers, one string")
    add("--out", type=Path, metavar="FILE.json")
    add("--verdict", type=Path, nargs="+", metavar="FILE.json", help="measure nothing: judge these results together")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    console = Console(width=180 if not sys.stdout.isatty() else None, highlight=False, soft_wrap=True)
    command = "python -m benchmarks.serve " + shlex.join(sys.argv[1:] if argv is None else argv)
    if args.verdict:
        finish(Results.merged(args.verdict, args.out), console)
        return 0
    with tempfile.TemporaryDirectory(prefix=f"{args.model}-") as folder:
        serve_arms.resolve_model(args, Path(folder))
        results = Results(args.out, command)
        one_by_one = [[engine] for engine in serve_arms.engines(args)]
        failures = run_groups(args, serve_arms.groups(args) if args.resident > 1 else one_by_one, results, console)
        for failure in failures:
            console.print(f"[red]failed:[/red] {escape(failure)}")
    finish(results, console)
    print(json.dumps({"rows": results.value["rows"], "verdicts": results.value["verdicts"], "failures": failures}))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
