"""What counting costs: tokens per second of our server with its counters, calibration and metrics on and off, in turn.

    python -m benchmarks.overhead --target TARGET --draft DRAFT --batches 1,64 --out overhead_h200.json

One server; ``dspark_counting`` switches while it serves, so both arms are the same process with the same graphs.
Rounds alternate, each of them as in ``benchmarks.serve``: ``batch`` greedy requests in one HTTP request, tokens per
second from the host's log. Medians, ranges, and the ratio with its 95% interval are printed; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import decode_log, machine, serve, serve_arms, serve_cells, verdict
from dspark.demo.server import ServerProcess

BAR = 0.99  # of the tokens per second without counting
ARM = "dspark-compact"


def compare(args: argparse.Namespace, server: ServerProcess, bench: serve_cells.Bench, batch: int) -> dict[str, Any]:
    """Rates with and without counting at one batch size."""
    rates: dict[str, list[float]] = {"on": [], "off": []}
    bench.run(batch, args.tokens)  # warms up
    for repeat in range(args.repeats):
        for again, counting in enumerate(("on", "off") if repeat % 2 else ("off", "on")):
            server.set_state(dspark_counting=int(counting == "on"))
            # The same prompts, so the same steps: acceptance differs more from prompt to prompt than counting costs.
            rates[counting].append(decode_log.rate(bench.run(batch, args.tokens, again=bool(again))))
    server.set_state(dspark_counting=1)
    pairs = [on / off for on, off in zip(rates["on"], rates["off"], strict=True)]
    found = {"model": args.model, "batch": batch, "tok_s": rates} | verdict.ratio(pairs, [1.0] * len(pairs))
    ranges = (f"{statistics.median(each):,.0f} ({min(each):,.0f} to {max(each):,.0f})" for each in rates.values())
    print(
        "batch {}: {} tok/s with counting, {} without; ratio {:.4f} ({:.4f} to {:.4f})".format(
            batch, *ranges, *(found[name] for name in ("ratio", "low", "high"))
        ),
        flush=True,
    )
    return found


def main(argv: Sequence[str] | None = None) -> None:
    args = serve.parse_arguments(argv)
    args.arms, args.out, out = [ARM], None, args.out
    with tempfile.TemporaryDirectory() as folder:
        serve_arms.resolve_model(args, Path(folder))
        args.server_args += " --enable-metrics"
        with serve_arms.start(args, ARM, None) as server:
            print(file=sys.stderr)
            bench = serve_cells.Bench(args, server)
            rows = [compare(args, server, bench, batch) for batch in args.batches]
    result = {
        "machine": machine.describe(),
        "command": "python -m benchmarks.overhead " + shlex.join(sys.argv[1:] if argv is None else argv),
        "bar": BAR,
        "rows": rows,
    }
    if out:
        out.write_text(json.dumps(result, indent=1))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
