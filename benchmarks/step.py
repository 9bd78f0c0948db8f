"""Step time and tokens per second of three arms on the same prompts: this package, SGLang's own DSPARK, no speculation.

    python -m benchmarks.step --target TARGET --draft DRAFT --model smollm2 --batches 1,8,32 --out step_h200.json

Each arm has a server of its own. A cell sends ``batch`` greedy requests at once, ``--repeats`` times, all tokens
ignoring EOS, after a round that nobody times. Step time = (wall time - wall time of the same requests with one token) /
verify steps of the slowest request. Medians and ranges are printed with their ratios; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import machine
from dspark.demo.server import ServerProcess, default_device, device_args

ARMS = {
    "none": None,
    "builtin": {"SGLANG_DSPARK_IMPL": "builtin", "SGLANG_RAGGED_VERIFY_MODE": "static"},
    "dspark": {"SGLANG_RAGGED_VERIFY_MODE": "static"},
    "dspark-compact": {"SGLANG_RAGGED_VERIFY_MODE": "compact"},
}


def start(args: argparse.Namespace, arm: str) -> ServerProcess:
    """The server of an arm, not yet started."""
    flags = ["--model-path", str(args.target), *device_args(args.device), *shlex.split(args.server_args)]
    flags += ["--max-running-requests", str(max(args.batches))]
    if ARMS[arm] is not None:
        flags += ["--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", str(args.draft)]

    def progress(seconds: float, line: str) -> None:
        print(f"\r{arm}: starting, {seconds:.0f} s", end="", file=sys.stderr, flush=True)

    return ServerProcess(flags, env=ARMS[arm] or {}, timeout_seconds=420, progress=progress)


def round_of(server: ServerProcess, prompts: Sequence[list[int]], tokens: int, temperature: float) -> tuple[float, int]:
    """Wall seconds of one round, and the most verify steps that a request took (tokens - 1 without speculation)."""

    def one(ids: list[int]) -> int:
        params = {"temperature": temperature, "max_new_tokens": tokens, "ignore_eos": True}
        return server.generate(ids, sampling_params=params)["meta_info"].get("spec_verify_ct", tokens - 1)

    with ThreadPoolExecutor(len(prompts)) as clients:
        started = time.perf_counter()
        steps = list(clients.map(one, prompts))
        return time.perf_counter() - started, max(steps)


def cell(args: argparse.Namespace, server: ServerProcess, arm: str, batch: int, temperature: float) -> dict[str, Any]:
    """One batch size: repeated rounds on different prompts."""
    step_ms, rates, lengths = [], [], []
    for repeat in range(args.repeats + 1):
        prompts = [[1, 100 + 7 * i + repeat, *range(200 + i, 230 + i)] for i in range(batch)]
        server.flush_cache()
        first, _ = round_of(server, prompts, 1, temperature)
        server.flush_cache()
        seconds, steps = round_of(server, prompts, args.tokens, temperature)
        if repeat:  # the first round warms up
            step_ms.append((seconds - first) / steps * 1e3)
            rates.append(batch * (args.tokens - 1) / (seconds - first))
            lengths.append((args.tokens - 1) / steps)
    row = {"model": args.model, "batch": batch, "arm": arm.split("-")[0], "mode": _mode(arm)}
    row |= {"accept_length": statistics.median(lengths), "temperature": temperature}
    row |= {"step_ms": statistics.median(step_ms), "step_ms_range": [min(step_ms), max(step_ms)]}
    row |= {"tok_s": statistics.median(rates), "tok_s_range": [min(rates), max(rates)]}
    where, low, high = f"{arm}, batch {batch}, temperature {temperature:g}", min(step_ms), max(step_ms)
    print(
        f"{where}: step {row['step_ms']:.2f} ms ({low:.2f} to {high:.2f}), "
        f"{row['tok_s']:.0f} tok/s, slowest request {row['accept_length']:.2f} tokens a step",
        flush=True,
    )
    return row


def print_ratios(rows: Sequence[dict[str, Any]]) -> None:
    """Every cell of ours over those of the other arms."""
    rates = {(row["batch"], row["temperature"], row["arm"], row["mode"]): row["tok_s"] for row in rows}
    for (batch, temperature, arm, mode), ours in rates.items():
        for other, other_mode in (("builtin", "static"), ("none", "-")):
            theirs = rates.get((batch, temperature, other, other_mode))
            if arm == "dspark" and theirs:
                where = f"batch {batch}, temperature {temperature:g}, dspark {mode}"
                print(f"{where}: {ours / theirs:.2f}x the tok/s of {other}")


def _mode(arm: str) -> str:
    return "-" if arm == "none" else "compact" if arm.endswith("compact") else "static"


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--target", type=Path, required=True)
    add("--draft", type=Path, required=True)
    add("--model", default="smollm2", help="name of the rows in the result")
    add("--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8, 32])
    add("--arms", type=lambda text: text.split(","), default=["none", "builtin", "dspark"])
    add("--tokens", type=int, default=384)
    add("--temperatures", type=lambda text: [float(part) for part in text.split(",")], default=[0.0])
    add("--repeats", type=int, default=5)
    add("--device", default=default_device())
    add("--server-args", default="", help="further flags of all servers, one string")
    add("--out", type=Path, metavar="FILE.json")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    rows = []
    for arm in args.arms:
        with start(args, arm) as server:
            print(file=sys.stderr)
            cells = [(batch, temperature) for temperature in args.temperatures for batch in args.batches]
            rows += [cell(args, server, arm, batch, temperature) for batch, temperature in cells]
    print_ratios(rows)
    result = {
        "machine": machine.describe(),
        "versions": machine.describe()["versions"],
        "command": "python -m benchmarks.step " + shlex.join(sys.argv[1:] if argv is None else argv),
        "rows": rows,
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
