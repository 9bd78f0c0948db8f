"""Mixed traffic: mean window by workload, how windows are spread, and how much of the ceiling trimming keeps.

    python -m benchmarks.mixed --target TARGET --draft DRAFT --out mixed.png
    python -m benchmarks.mixed --redraw mixed.json --out mixed.png

One server in ``cap-accept``: it verifies full windows, commits what compact mode would, and so knows the ceiling, what
a full window would have committed. All prompt files are asked at once, shuffled, ``--concurrency`` requests in flight;
steps in which less than three quarters of these run are left out, for with fewer requests rows are cheaper, and the
workloads that accept little run longest. Utilisation = committed tokens / ceiling, summed over steps. ``--costs`` names
what the scheduler believes, one server each: ``own`` is what it measures or estimates (a small model on a large GPU:
full windows, since rows cost nothing there), a number N a table by hand in which the fixed part of a step costs as
much as N rows per request. Step records read tensors back, so no time is reported. A table, a JSON file beside the
picture, one JSON object at the end.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import machine, servers
from benchmarks.acceptance import Prompt, load_prompts
from dspark.demo.server import ServerProcess, default_device

OWN = "own"
ROW_SECONDS = 1e-4  # of the tables by hand
BAR = 0.88  # utilisation of the ceiling
BUSY = 0.75  # of the concurrency
ALL = "all"


def cost_table(fixed_rows: float, concurrency: int) -> dict[str, Any]:
    """A table by hand: every row costs the same, and the rest of a step as much as ``fixed_rows`` rows per request."""
    rows = [1, 2, 64, 4096]
    return {
        "bias_seconds": fixed_rows * concurrency * ROW_SECONDS,
        "bs_probes": [1],
        "alpha_seconds": [0.0],
        "m_probes": rows,
        "theta_seconds": [count * ROW_SECONDS for count in rows],
    }


def start(args: argparse.Namespace, cost: str, folder: Path) -> ServerProcess:
    """The server, not yet started."""
    flags = ["--max-running-requests", str(args.concurrency)]
    if cost != OWN:
        path = folder / f"costs-{cost}.json"
        path.write_text(json.dumps(cost_table(float(cost), args.concurrency)))
        flags += ["--speculative-dspark-sps-table-path", str(path)]
    env = {"SGLANG_RAGGED_VERIFY_MODE": "cap-accept", "SGLANG_DSPARK_DEBUG_DUMP": "reqs"}
    return servers.prepare(args, f"costs {cost}", flags, env=env)


def serve(
    args: argparse.Namespace, server: ServerProcess, prompts: Sequence[Prompt], cost: str
) -> list[dict[str, Any]]:
    """Ask everything once; the step records of all requests, each with its workload."""
    server.set_state(dspark_clear_info_records=1)
    params = {"temperature": args.temperature, "max_new_tokens": args.tokens, "ignore_eos": False}
    kinds = {f"mixed-{i}": prompt for i, prompt in enumerate([*prompts] * args.passes)}
    with ThreadPoolExecutor(args.concurrency) as clients:
        futures = [
            clients.submit(server.generate, prompt.ids, rid=rid, sampling_params=params)
            for rid, prompt in kinds.items()
        ]
        for future in track(as_completed(futures), f"costs {cost}", len(futures), console=Console(stderr=True)):
            future.result()
    record = server.server_info()["internal_states"][0]["dspark_info_record"]
    if record["dropped_steps"]:
        print(f"{record['dropped_steps']} early steps were dropped; fewer --tokens keep them", file=sys.stderr)
    return [
        {"kind": kinds[one["rid"]].set_name, **{name: one[name] for name in ("verify_len", "committed", "ceiling")}}
        for step in record["steps"]
        if len(step["requests"]) >= BUSY * args.concurrency
        for one in step["requests"]
        if one["rid"] in kinds and one["ceiling"] is not None  # a step without a draft has no ceiling
    ]


def summarise(steps: Iterable[dict[str, Any]], cost: str, window: int) -> list[dict[str, Any]]:
    """Sums per workload, by falling mean window; the last row is all of them."""
    by_kind: dict[str, list[tuple[int, int, int]]] = {}
    for step in steps:
        numbers = (step["verify_len"], len(step["committed"]), step["ceiling"])
        by_kind.setdefault(step["kind"], []).append(numbers)
        by_kind.setdefault(ALL, []).append(numbers)
    if not by_kind:
        raise SystemExit(f"found no step that knows its ceiling (costs {cost}); required are steps that draft")
    rows = []
    for kind, numbers in by_kind.items():
        windows, committed, ceiling = np.array(numbers).T
        rows.append(
            {
                "kind": kind,
                "costs": cost,
                "steps": len(numbers),
                "mean_window": float(windows.mean()),
                "committed": int(committed.sum()),
                "ceiling": int(ceiling.sum()),
                "utilisation": float(committed.sum() / ceiling.sum()),
                "ceiling_length": float(ceiling.mean()),
                "windows": np.bincount(windows, minlength=window + 1)[1:].tolist(),
            }
        )
    return sorted(rows, key=lambda row: (row["kind"] == ALL, -row["mean_window"]))


def verdict(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Whether windows follow the ceilings of the workloads, and whether enough of the ceiling is kept."""
    kinds = [row for row in rows if row["kind"] != ALL]
    ordered = [row["kind"] for row in sorted(kinds, key=lambda row: -row["ceiling_length"])]
    lowest = min(row["utilisation"] for row in rows)
    return {
        "costs": rows[0]["costs"],
        "by_window": [row["kind"] for row in kinds],
        "by_ceiling": ordered,
        "windows_follow": ordered == [row["kind"] for row in kinds],
        "lowest_utilisation": lowest,
        "enough": lowest >= BAR,
    }


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows for people."""
    view = Table(title="cap-accept on mixed traffic", title_justify="left")
    for name in ("costs", "workload", "steps", "mean window", "committed", "ceiling", "utilisation"):
        view.add_column(name, justify="left" if name in ("costs", "workload") else "right")
    for row in rows:
        per_step = row["committed"] / row["steps"]
        numbers = (f"{row['mean_window']:.2f}", f"{per_step:.2f}", f"{row['ceiling_length']:.2f}")
        view.add_row(row["costs"], row["kind"], str(row["steps"]), *numbers, f"{row['utilisation']:.3f}")
    return view


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Per cost table: mean window and utilisation on the left, shares of windows on the right."""
    costs = list(dict.fromkeys(row["costs"] for row in rows))
    figure, panels = plt.subplots(len(costs), 2, figsize=(10, 3.2 * len(costs)), squeeze=False)
    for (left, right), cost in zip(panels, costs, strict=True):
        kinds = [row for row in rows if row["costs"] == cost and row["kind"] != ALL]
        colours = plt.cm.viridis(np.linspace(0.15, 0.8, len(kinds)))
        bars = left.bar([row["kind"] for row in kinds], [row["mean_window"] for row in kinds], color=colours)
        left.bar_label(
            bars, [f"{row['mean_window']:.2f}\n{row['utilisation']:.0%} of the ceiling" for row in kinds], fontsize=8
        )
        left.set_ylim(0, 1.25 * max(row["mean_window"] for row in kinds))
        left.set_ylabel("rows verified per step")
        left.set_title("own costs" if cost == OWN else f"a step costs {cost} rows per request", fontsize=9, loc="left")
        width = 0.8 / len(kinds)
        for i, (row, colour) in enumerate(zip(kinds, colours, strict=True)):
            shares = 100 * np.array(row["windows"]) / row["steps"]
            right.bar(np.arange(1, len(shares) + 1) + (i - (len(kinds) - 1) / 2) * width, shares, width, color=colour)
        right.set_xlabel("rows verified for a request")
        right.set_ylabel("% of its steps")
        right.legend([row["kind"] for row in kinds], fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--target", type=Path)
    add("--draft", type=Path)
    add("--prompts", type=Path, nargs="+", default=[Path("examples/prompts")], metavar="DIR_OR_JSONL")
    add("--per-set", type=int, default=10_000, help="first prompts of each file")
    add("--costs", type=lambda text: text.split(","), default=[OWN, "8"], help="own, or rows per request")
    add("--passes", type=int, default=1, help="how often each prompt is asked")
    add("--concurrency", type=int, default=64)
    add("--tokens", type=int, default=192, help="per request, at most")
    add("--temperature", type=float, default=0.0)
    add("--device", default=default_device())
    add("--server-args", default="", help="further flags of the server, one string (a cost table, a calibration)")
    add("--out", type=Path, default=Path("mixed.png"), metavar="FILE.png")
    add("--redraw", type=Path, metavar="FILE.json", help="draw only")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    if args.redraw:
        draw(json.loads(args.redraw.read_text())["rows"], args.out)
        return
    if args.target is None or args.draft is None:
        raise SystemExit("found no --target or no --draft; both are required")
    from transformers import AutoTokenizer

    prompts = load_prompts(args.prompts, args.per_set, AutoTokenizer.from_pretrained(args.target), 1024)
    random.Random(0).shuffle(prompts)
    rows: list[dict[str, Any]] = []
    window = int(json.loads((args.draft / "config.json").read_text())["block_size"]) + 1
    with tempfile.TemporaryDirectory() as folder:
        for cost in args.costs:
            with start(args, cost, Path(folder)) as server:
                print(file=sys.stderr)
                rows += summarise(serve(args, server, prompts, cost), cost, window)
    result = {
        "machine": machine.describe(),
        "command": "python -m benchmarks.mixed " + shlex.join(sys.argv[1:] if argv is None else argv),
        "rows": rows,
        "verdicts": [verdict([row for row in rows if row["costs"] == cost]) for cost in args.costs],
    }
    args.out.with_suffix(".json").write_text(json.dumps(result, indent=1))
    draw(rows, args.out)
    Console(width=120 if not sys.stdout.isatty() else None).print(table(rows))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
