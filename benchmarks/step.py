"""Step time and tokens per second of three arms on the same prompts: this package, SGLang's own DSPARK, no speculation.

    python -m benchmarks.step --target TARGET --draft DRAFT --model smollm2 --batches 1,8,32 --out step_h200.json

Each arm has a server of its own. A cell sends ``batch`` greedy requests at once, ``--repeats`` times, all tokens
ignoring EOS, after a round that nobody times. Step time = (wall time - median wall time of the same requests with one
token) / verify steps of the slowest request. ``--profile N`` then traces N steps of every cell twice, on a GPU only:
GPU busy share, time between kernels, launches and waits per step. ``--rows "1:1,2,4,8;128:256x2,1024"`` pins the
verified rows of the compact arm at these batches (256x2: of blocks of two drafts). Medians and ranges are printed with
their ratios; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import machine, servers, shapes, traces
from dspark.demo.server import ServerProcess, default_device

ARMS = {
    "none": None,
    "builtin": {"SGLANG_DSPARK_IMPL": "builtin", "SGLANG_RAGGED_VERIFY_MODE": "static"},
    "dspark": {"SGLANG_RAGGED_VERIFY_MODE": "static"},
    "dspark-compact": {"SGLANG_RAGGED_VERIFY_MODE": "compact"},
    "builtin-compact": {"SGLANG_DSPARK_IMPL": "builtin", "SGLANG_RAGGED_VERIFY_MODE": "compact"},
    "dspark-no-overlap": {"SGLANG_RAGGED_VERIFY_MODE": "static"},
}
GAMMA = 7


def resolve_model(args: argparse.Namespace) -> None:
    """Target, draft and flags of a model that has no weights here (``benchmarks.shapes``)."""
    if args.model in shapes.SHAPES:
        folder = Path(tempfile.mkdtemp(prefix=f"{args.model}-"))
        shapes.write(args.model, folder)
        args.target, args.draft = folder / "target", folder / "draft"
        args.server_args = f"{shapes.DUMMY_FLAGS} {args.server_args}"
    elif args.target is None or args.draft is None:
        raise SystemExit(f"found model {args.model!r} without --target and --draft; both are required")


def start(args: argparse.Namespace, arm: str) -> ServerProcess:
    """The server of an arm, not yet started."""
    flags = ["--max-running-requests", str(max(args.batches))]
    if args.device != "cpu":
        flags += ["--cuda-graph-max-bs-decode", str(max(args.batches))]
    if arm.endswith("no-overlap"):
        flags += ["--disable-overlap-schedule"]
    return servers.prepare(args, arm, flags, env=ARMS[arm], dspark=ARMS[arm] is not None)


def round_of(server: ServerProcess, prompts: Sequence[list[int]], tokens: int, temperature: float) -> tuple[float, int]:
    """Wall seconds of one round, and the most verify steps that a request took (tokens - 1 without speculation)."""

    def one(ids: list[int]) -> int:
        params = {"temperature": temperature, "max_new_tokens": tokens, "ignore_eos": True}
        return server.generate(ids, sampling_params=params)["meta_info"].get("spec_verify_ct", tokens - 1)

    with ThreadPoolExecutor(len(prompts)) as clients:
        started = time.perf_counter()
        steps = list(clients.map(one, prompts))
        return time.perf_counter() - started, max(steps)


def prompts_of(batch: int, repeat: int) -> list[list[int]]:
    """Different prompts of 32 tokens."""
    return [[1, 100 + 7 * i + repeat, *range(200 + i, 230 + i)] for i in range(batch)]


def cell(args: argparse.Namespace, server: ServerProcess, arm: str, batch: int, temperature: float) -> dict[str, Any]:
    """One batch size: repeated rounds on different prompts."""
    rounds, firsts = [], []
    for repeat in range(args.repeats + 1):
        prompts = prompts_of(batch, repeat)
        server.flush_cache()
        first, _ = round_of(server, prompts, 1, temperature)
        server.flush_cache()
        seconds, steps = round_of(server, prompts, args.tokens, temperature)
        if repeat:  # the first round warms up
            rounds.append((seconds, steps))
            firsts.append(first)
    prefill = statistics.median(firsts)
    step_ms = [(seconds - prefill) / steps * 1e3 for seconds, steps in rounds]
    rates = [batch * (args.tokens - 1) / (seconds - prefill) for seconds, _ in rounds]
    lengths = [(args.tokens - 1) / steps for _, steps in rounds]
    row = {"model": args.model, "batch": batch, "arm": arm.split("-")[0], "mode": _mode(arm)}
    row |= {"accept_length": statistics.median(lengths), "temperature": temperature}
    row |= {"step_ms": statistics.median(step_ms), "step_ms_range": [min(step_ms), max(step_ms)]}
    row |= {"tok_s": statistics.median(rates), "tok_s_range": [min(rates), max(rates)]}
    if args.profile:
        row |= profile(args, server, batch, row)
    where, low, high = f"{arm}, batch {batch}, temperature {temperature:g}", min(step_ms), max(step_ms)
    print(
        f"{where}: step {row['step_ms']:.2f} ms ({low:.2f} to {high:.2f}), "
        f"{row['tok_s']:.0f} tok/s, slowest request {row['accept_length']:.2f} tokens a step",
        flush=True,
    )
    return row


def profile(args: argparse.Namespace, server: ServerProcess, batch: int, row: dict[str, Any]) -> dict[str, Any]:
    """What two traces say of the cell of ``row``: without CPU activities the times, with them the counts."""
    tokens, temperature = traces.tokens_for(args.profile, row), row["temperature"]
    shown: dict[str, Any] = {}
    for with_cpu in (False, True):
        server.flush_cache()
        trace = traces.record(
            server, lambda: round_of(server, prompts_of(batch, 99), tokens, temperature), args.profile, with_cpu
        )
        if not with_cpu:
            times = trace.times()
            shown |= {"gpu_busy": times["gpu_busy"], "trace": times, "top_kernels": trace.top_kernels()}
        else:
            counts = trace.counts()
            shown |= {"launches": counts["launches"], "syncs": counts["syncs"], "counts": counts}
    print(f"per step {shown['trace']}, in the worker {shown['counts']['worker_calls']}", flush=True)
    return shown


def pinned_cells(args: argparse.Namespace, server: ServerProcess, arm: str) -> list[dict[str, Any]]:
    """The compact arm with its verified rows pinned: what trimming could buy."""
    rows = []
    for batch, wanted in args.rows.items():
        for count, depth in wanted:
            # K = floor(f * R * gamma), computed in floats by the server: half a draft more is the same K.
            fraction = min(1.0, (count - batch + 0.5) / (batch * GAMMA))
            server.set_state(dspark_force_budget_frac=fraction, dspark_force_depth=depth)
            row = cell(args, server, arm, batch, 0.0) | {"pinned_rows": count, "depth": GAMMA if depth < 0 else depth}
            print(f"  of which {count} rows were verified, of blocks of {row['depth']} drafts", flush=True)
            rows.append(row)
    server.set_state(dspark_force_budget_frac=-1)
    return rows


def print_ratios(rows: Sequence[dict[str, Any]]) -> None:
    """Every cell of ours over those of the other arms."""
    rates = {(row["batch"], row["temperature"], row["arm"], row["mode"]): row["tok_s"] for row in rows}
    for (batch, temperature, arm, mode), ours in rates.items():
        for other, other_mode in (("builtin", "static"), ("builtin", "compact"), ("none", "-")):
            theirs = rates.get((batch, temperature, other, other_mode))
            if arm == "dspark" and theirs:
                where = f"batch {batch}, temperature {temperature:g}, dspark {mode}"
                print(f"{where}: {ours / theirs:.2f}x the tok/s of {other} {other_mode}")


def _mode(arm: str) -> str:
    return "-" if arm == "none" else arm.partition("-")[2] or "static"


def rows_argument(text: str) -> dict[int, list[tuple[int, int]]]:
    """``1:1,2;128:256x2`` -> {1: [(1, -1), (2, -1)], 128: [(256, 2)]}: rows, and drafts of each block (-1: all)."""
    pairs = (part.split(":") for part in text.split(";") if part)
    split = {int(batch): [count.split("x") for count in counts.split(",")] for batch, counts in pairs}
    return {batch: [(int(rows), int(*depth or [-1])) for rows, *depth in counts] for batch, counts in split.items()}


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--target", type=Path)
    add("--draft", type=Path)
    add("--model", default="smollm2", help=f"name of the rows; {', '.join(shapes.SHAPES)}: dummy weights, no paths")
    add("--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8, 32])
    add("--arms", type=lambda text: text.split(","), default=["none", "builtin", "dspark"], help=", ".join(ARMS))
    add("--tokens", type=int, default=384)
    add("--temperatures", type=lambda text: [float(part) for part in text.split(",")], default=[0.0])
    add("--repeats", type=int, default=5)
    add("--profile", type=int, default=0, metavar="STEPS")
    add("--rows", type=rows_argument, default={}, metavar="BATCH:ROWS[xDEPTH],...;...")
    add("--device", default=default_device())
    add("--server-args", default="", help="further flags of all servers, one string")
    add("--out", type=Path, metavar="FILE.json")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    resolve_model(args)
    rows: list[dict[str, Any]] = []
    result = {
        "machine": machine.describe(),
        "versions": machine.describe()["versions"],
        "command": "python -m benchmarks.step " + shlex.join(sys.argv[1:] if argv is None else argv),
        "visible_gpu": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "rows": rows,
    }
    if args.model in shapes.SHAPES:
        result["draft_bytes"] = shapes.draft_bytes(args.model)
    for arm in args.arms:
        with start(args, arm) as server:
            print(file=sys.stderr)
            for temperature in args.temperatures:
                rows += [cell(args, server, arm, batch, temperature) for batch in args.batches]
            if arm == "dspark-compact":
                rows += pinned_cells(args, server, arm)
        if args.out:  # after every arm: a lease may end before the last one
            args.out.write_text(json.dumps(result, indent=1))
    print_ratios([row for row in rows if "pinned_rows" not in row])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
