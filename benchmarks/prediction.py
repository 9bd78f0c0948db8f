"""Predicted against measured step time of a running server, over batch sizes and contexts, in one run.

    python -m benchmarks.prediction --target TARGET --draft DRAFT --out prediction.json
    python -m benchmarks.prediction --model qwen3-8b --contexts 1024,8192,32768 --batches 1,8

The server measures its steps at start and corrects the prediction by real ones. Each cell sends ``batch`` greedy
requests at once, whose prompts make the context; a first pass over all cells warms up, the next ones count. What is
compared is what ``/server_info`` sums up per batch size and context: the step as it was predicted before it ran, and
the time from its start to that of the next step. The error of a cell is |predicted / measured - 1|, beside it the mean
error of a single step; the last line is JSON, with the mean over the cells.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import machine, servers, shapes
from benchmarks.step import resolve_model
from dspark.demo.server import ServerProcess, default_device

BAR = 0.03  # mean absolute error


def start(args: argparse.Namespace) -> ServerProcess:
    """The server, not yet started; it measures anew, so that nothing is left of an earlier run."""
    flags = ["--max-running-requests", str(max(args.batches))]
    if args.device != "cpu":
        flags += ["--cuda-graph-max-bs-decode", str(max(args.batches))]
    env = {"SGLANG_RAGGED_VERIFY_MODE": "compact", "SGLANG_DSPARK_COST_TABLES": "measure"}
    if args.device == "cpu":
        env["SGLANG_DSPARK_STATIC_STEP"] = "1"  # only captured steps, and this stand-in for them, are timed
    if args.simulate:
        env["SGLANG_DSPARK_SIMULATE"] = args.simulate
    return servers.prepare(args, "dspark", flags, env=env)


def ask(args: argparse.Namespace, server: ServerProcess, batch: int, context: int) -> None:
    """``batch`` different prompts of ``context`` tokens at once."""
    params = {"temperature": 0, "max_new_tokens": args.tokens, "ignore_eos": True}
    vocab = 40_000  # within that of every model here
    prompts = [[(7 * index + 31 * place) % vocab + 100 for place in range(context)] for index in range(batch)]
    with ThreadPoolExecutor(batch) as clients:
        list(clients.map(lambda ids: server.generate(ids, sampling_params=params), prompts))


def schedule_of(server: ServerProcess) -> dict[str, Any]:
    """What the scheduler reports of itself."""
    found: dict[str, Any] = server.server_info()["internal_states"][0]["dspark_info_record"]["schedule"]
    return found


def cell(args: argparse.Namespace, server: ServerProcess, batch: int, context: int) -> dict[str, Any] | None:
    """Sums of the steps that held the whole batch; None if there was none."""
    server.flush_cache()
    server.set_state(dspark_clear_info_records=1)
    ask(args, server, batch, context)
    found = schedule_of(server)
    rows = [row for row in found["step_times"]["by_batch_and_context"] if row["requests"] == batch]
    steps, predicted, measured, error = (
        sum(row[name] for row in rows) for name in ("steps", "predicted_seconds", "measured_seconds", "error_seconds")
    )
    if not steps or not measured:
        return None
    return {
        "batch": batch,
        "context": context,
        "steps": steps,
        "predicted_ms": predicted / steps * 1e3,
        "measured_ms": measured / steps * 1e3,
        "ratio": predicted / measured,
        "step_error": error / measured,
        "reasons": found["reasons"],
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All cells: one pass that warms up, then ``--repeats`` that count."""
    rows: list[dict[str, Any]] = []
    with start(args) as server:
        print(file=sys.stderr)
        for repeat in range(args.repeats + 1):
            for context in args.contexts:
                for batch in args.batches:
                    row = cell(args, server, batch, context)
                    where = f"batch {batch}, context {context}"
                    if row is None:
                        print(f"{where}: no step held the whole batch twice in a row", flush=True)
                        continue
                    if repeat:
                        rows.append(row | {"repeat": repeat})
                    print(
                        f"{where}{'' if repeat else ', warm-up'}: predicted {row['predicted_ms']:.3f} ms, measured "
                        f"{row['measured_ms']:.3f} ms, ratio {row['ratio']:.4f}, single step off by "
                        f"{row['step_error']:.2%}, {row['steps']} steps",
                        flush=True,
                    )
        found = schedule_of(server)
    by_context = {
        str(context): [abs(row["ratio"] - 1) for row in rows if row["context"] == context] for context in args.contexts
    }
    means = {context: sum(errors) / len(errors) for context, errors in by_context.items() if errors}
    return {
        "machine": machine.describe(),
        "rows": rows,
        "mean_error_by_context": means,
        "mean_error": sum(abs(row["ratio"] - 1) for row in rows) / len(rows) if rows else None,
        "bar": BAR,
        "step_times": {key: value for key, value in found["step_times"].items() if key != "by_batch_and_context"},
        "trust": found["trust"],
    }


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    numbers = {"type": lambda text: [int(part) for part in text.split(",")]}
    add("--target", type=Path)
    add("--draft", type=Path)
    add("--model", default="smollm2", help=f"name of the rows; {', '.join(shapes.SHAPES)}: dummy weights, no paths")
    add("--contexts", **numbers, default=[1024, 8192, 32768], help="prompt tokens")
    add("--batches", **numbers, default=[1, 4, 16])
    add("--tokens", type=int, default=384, help="generated by each request")
    add("--repeats", type=int, default=2, help="passes that count")
    add("--simulate", default="", metavar="LEVEL", help="simulated acceptance, for models without weights")
    add("--device", default=default_device())
    add("--server-args", default="", help="further flags of the server, one string")
    add("--out", type=Path, metavar="FILE.json")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    resolve_model(args)
    command = "python -m benchmarks.prediction " + shlex.join(sys.argv[1:] if argv is None else argv)
    result = {"command": command, "model": args.model, **measure(args)}
    if result["mean_error"] is not None:
        print(f"mean error {result['mean_error']:.2%}, bar {BAR:.0%}: by context {result['mean_error_by_context']}")
    machine.conclude(result, args.out)


if __name__ == "__main__":
    main()
