"""Accept length of one drafter under two implementations, on the same prompts, each on a server of its own.

    python -m benchmarks.ab_acceptance --target TARGET --draft DRAFT --prompts DIR --per-set 34 --out result.json

Arms: ``dspark`` (this package) and ``builtin`` (``SGLANG_DSPARK_IMPL=builtin``), greedy and at temperature 1. Both get
the same flags; `--server-args` adds more. The ratio is printed with both numbers; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import acceptance, machine, servers
from dspark.demo.server import ServerProcess, default_device

ARMS = ("dspark", "builtin")


def measure(args: argparse.Namespace, arm: str, server: ServerProcess, temperature: float) -> dict[str, Any]:
    """One pass over the prompts; returns the report of ``benchmarks.acceptance``."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        options = {
            "--url": server.url,
            "--per-set": args.per_set,
            "--max-new-tokens": args.max_new_tokens,
            "--temperature": temperature,
            "--seeds": args.seeds,
            "--concurrency": args.concurrency,
            "--tokenizer": args.target,
            "--arm": arm,
            "--out": out,
        }
        flags = [str(part) for pair in options.items() for part in pair]
        acceptance.main([*flags, "--prompts", *map(str, args.prompts)])
        return json.loads(out.read_text())


def run_arm(args: argparse.Namespace, arm: str) -> dict[str, Any]:
    """Start the arm's server, warm it up greedily and sampled, and measure both temperatures."""
    env = {"SGLANG_DSPARK_IMPL": "builtin" if arm == "builtin" else "plugin", "SGLANG_RAGGED_VERIFY_MODE": "static"}
    with servers.prepare(args, arm, env=env) as server:
        print(file=sys.stderr)
        for temperature in (0.0, 1.0):
            server.generate([1, 2, 3], sampling_params={"temperature": temperature, "max_new_tokens": 16})
        return {f"t{temperature:g}": measure(args, arm, server, temperature) for temperature in (0.0, 1.0)}


def overall(report: dict[str, Any]) -> tuple[float, float]:
    """Accept length and its standard error over all sets."""
    row = report["table"][-1]
    return row["server"], row["server_se"]


def compare(reports: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per temperature: both arms, their ratio, and the throughput of both passes."""
    rows = []
    for temperature in ("t0", "t1"):
        row: dict[str, Any] = {"temperature": float(temperature[1:])}
        for arm in ARMS:
            report = reports[arm][temperature]
            row[arm], row[f"{arm}_se"] = overall(report)
            row[f"{arm}_tok_s"] = report["table"][-1]["server_tokens"] / report["server_seconds"]
        row["ratio"] = row["dspark"] / row["builtin"]
        rows.append(row)
        print(
            f"temperature {row['temperature']:g}: dspark {row['dspark']:.3f} +- {row['dspark_se']:.3f}, "
            f"builtin {row['builtin']:.3f} +- {row['builtin_se']:.3f}, ratio {row['ratio']:.3f}"
        )
    return rows


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--target", type=Path, required=True)
    add("--draft", type=Path, required=True)
    add("--prompts", type=Path, nargs="+", required=True, metavar="DIR_OR_JSONL")
    add("--per-set", type=int, default=34)
    add("--max-new-tokens", type=int, default=256)
    add("--seeds", type=int, default=3, help="runs per prompt at temperature 1")
    add("--concurrency", type=int, default=32)
    add("--device", default=default_device())
    add("--server-args", default="--disable-cuda-graph", help="further flags of both servers, one string")
    add("--out", type=Path, metavar="FILE.json")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    reports = {arm: run_arm(args, arm) for arm in ARMS}
    result = {
        "machine": machine.describe(),
        "command": "python -m benchmarks.ab_acceptance " + shlex.join(sys.argv[1:] if argv is None else argv),
        "rows": compare(reports),
        "sets": {arm: {key: report["table"] for key, report in by_t.items()} for arm, by_t in reports.items()},
    }
    machine.conclude(result, args.out, {"machine": result["machine"], "rows": result["rows"]})


if __name__ == "__main__":
    main()
