"""Time of every Triton kernel and of its torch reference on a GPU, side by side.

    python -m benchmarks.kernels [--requests 1 8 32 64 128 256] [--only allocate accept-greedy] [--out result.json]
    python -m benchmarks.kernels --bars --out result.json

Both arms compute the same thing into the same buffers from the same inputs; each is captured as a CUDA graph of several
calls and replayed, so that neither pays for its launches, and timed with CUDA events around the replay. A buffer larger
than the L2 cache is written before every replay. Microseconds per call: median, and the 10th and 90th percentile. The
``reference`` arm of ``eager`` rows cannot be captured and is timed as it runs. ``floor`` is the time that the bytes of
the inputs and outputs take at ``--bandwidth``. On a CPU there is nothing to time: ``--dry-run`` checks the cases on
small shapes with the references.

The bars come after the table, or alone with ``--bars``: ``allocate`` at 256 requests, and the whole verify step without
its networks (``verify_tail.py``; reference: the same step of torch operators) at 64 requests. The last line is JSON.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine, verify_tail
from benchmarks.kernel_cases import CASES, Case, Shapes
from dspark.kernels import triton_markov
from dspark.kernels.triton_scan import TILE

CALLS = 5  # per graph; more would let the reference's buffers, fewer the replay, weigh in
FLUSH_BYTES = 256 << 20


def replayed(call: Callable[[], None]) -> tuple[Callable[[], None], int, bool]:
    """How to run a call many times: (run, calls in a run, whether it is a graph)."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(CALLS):
                call()
    except RuntimeError:  # something in it waits for the device
        torch.cuda.synchronize()
        return call, 1, False
    return graph.replay, CALLS, True


def timed(call: Callable[[], None], rounds: int, flush: torch.Tensor) -> dict[str, Any]:
    """Microseconds per call."""
    run, calls, is_graph = replayed(call)
    times = []
    for _ in range(rounds):
        flush.add_(1)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    times.sort()
    low, median, high = (times[int(share * (len(times) - 1))] for share in (0.1, 0.5, 0.9))
    spread = {"p10": low, "p90": high, "min": times[0], "max": times[-1]}
    return {"median": round(median, 2), **{name: round(us, 2) for name, us in spread.items()}, "graph": is_graph}


def measure(name: str, shapes: Shapes, args: argparse.Namespace, flush: torch.Tensor | None) -> dict[str, Any]:
    """One row of the table; without a GPU both arms only run."""
    if name in verify_tail.KINDS:
        case = Case(name, *verify_tail.tail(shapes.requests, shapes.gamma, shapes.vocab, name, shapes.device))
    else:
        case = CASES[name](shapes)
    row: dict[str, Any] = {"kernel": name, **{key: value for key, value in vars(shapes).items() if key != "device"}}
    row["floor_us"] = round(case.bytes_moved / args.bandwidth / 1e6, 2)
    if flush is None:
        case.kernel()
        case.reference()
        return row | {"kernel_us": None, "reference_us": None, "ratio": None}
    row["kernel_us"] = timed(case.kernel, args.rounds, flush)
    assert row["kernel_us"]["graph"], f"{name} cannot be captured: something in it waits for the device"
    row["reference_us"] = timed(case.reference, max(args.rounds // 4, 5), flush)
    row["ratio"] = round(row["reference_us"]["median"] / row["kernel_us"]["median"], 2)
    return row


def show(row: dict[str, Any]) -> None:
    """One line of the table."""
    cells = "not timed"
    if row["kernel_us"] is not None:
        kernel, reference = row["kernel_us"], row["reference_us"]
        eager = "" if reference["graph"] else " eager"
        cells = (
            f"{kernel['median']:9.1f} ({kernel['p10']:.1f} to {kernel['p90']:.1f}) "
            f"{reference['median']:10.1f}{eager} {row['ratio']:7.1f}x"
        )
    print(
        f"{row['kernel']:16} R {row['requests']:>4} V {row['vocab']:>7} floor {row['floor_us']:8.1f} {cells}",
        flush=True,
    )


def table(args: argparse.Namespace, jobs: Sequence[tuple[str, int, int]]) -> list[dict[str, Any]]:
    """Measure and print rows of (case, requests, vocabulary)."""
    on_gpu = torch.cuda.is_available()
    flush = torch.zeros(FLUSH_BYTES, dtype=torch.uint8, device="cuda") if on_gpu and not args.dry_run else None
    rows = []
    for name, requests, vocab in jobs:
        sizes = (requests, args.gamma, vocab, args.rank, args.tile, args.markov_tile)
        shapes = Shapes(*sizes, device="cuda" if on_gpu else "cpu")
        try:
            rows.append(measure(name, shapes, args, flush))
        except torch.cuda.OutOfMemoryError:
            print(f"{name} R {requests}: the reference needs more memory than there is; left out")
            continue
        show(rows[-1])
    return rows


def measure_bars(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows that a bar is set for, each with its verdict (None where nothing was timed)."""
    found = []
    for name, requests, vocabularies, bar in verify_tail.BARS:
        jobs = [(name, 3, 37)] if args.dry_run else [(name, requests, vocab) for vocab in vocabularies]
        for row in table(args, jobs):
            timing = row["kernel_us"]
            within = None if timing is None else timing["median"] <= bar
            found.append(row | {"bar_us": bar, "within_bar": within})
            beyond = "" if timing is None else f"{timing['median'] - row['floor_us']:.1f} us above the floor, "
            print(f"  bar {bar:.0f} us: {beyond}{'not timed' if within is None else 'met' if within else 'MISSED'}")
    return found


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print a table, and the result as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--gamma", type=int, default=7)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--rank", type=int, default=256)
    parser.add_argument("--tile", type=int, default=TILE, help="columns of a program of scan and accept")
    parser.add_argument("--markov-tile", type=int, default=triton_markov.TILE, help="columns of a program of markov")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--bandwidth", type=float, default=4.0, help="TB/s, for the floor")
    parser.add_argument("--bars", action="store_true", help="only the rows that a bar is set for")
    parser.add_argument("--dry-run", action="store_true", help="run every case once on small shapes, time nothing")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    if args.dry_run:
        args.requests, args.vocab, args.rank = [3], 37, 8
    elif not torch.cuda.is_available():
        parser.error("found no GPU, and only a GPU can be timed; --dry-run checks the cases")
    jobs = [] if args.bars else [(name, requests, args.vocab) for name in args.only for requests in args.requests]
    rows, bars = table(args, jobs), measure_bars(args)
    result = {
        "benchmark": "kernels",
        "dry_run": args.dry_run,
        "rows": rows,
        "bars": bars,
        "machine": machine.describe(),
    }
    machine.conclude(result, args.out)
    return result


if __name__ == "__main__":
    main()
