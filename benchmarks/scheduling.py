"""What the budget scheduler does on a running server: rows per request over the batch size, pins, and the greedy text.

    python -m benchmarks.scheduling --target TARGET --draft DRAFT --prompts DIR --out result.json

Arms: ``compact`` without CUDA graphs, ``compact-graphs`` with the host's graphs of the target, ``none`` without
speculation. Both compact arms get a table written by hand (10 ms a step and 1 ms a row), steep enough that windows must
shrink as requests come. Each batch size sends as many greedy prompts at once; then budgets are pinned, and every
recorded step is held against K = floor(f * R * gamma) and M = R + K. Last, each text that differs from that of ``none``
is scored at its first difference. Step records read tensors back, so no time is reported. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import machine, servers
from benchmarks.acceptance import load_prompts
from dspark.demo.compare import first_difference, score
from dspark.demo.prompts import Prompt
from dspark.demo.server import ServerProcess, default_device
from dspark.demo.table import Answer

ROWS = [1, 2, 64, 4096]
TABLE = {
    "bias_seconds": 0.01,
    "bs_probes": [1],
    "alpha_seconds": [0.0],
    "m_probes": ROWS,
    "theta_seconds": [0.001 * rows for rows in ROWS],
}
NEAR_TIE_NATS = 0.15  # bf16: two logits around 16 are 0.125 apart or equal


def start(args: argparse.Namespace, arm: str, table: Path) -> ServerProcess:
    """The server of an arm, not yet started."""
    flags = ["--max-running-requests", str(max(args.batches))]
    env = {"SGLANG_RAGGED_VERIFY_MODE": "compact", "SGLANG_DSPARK_DEBUG_DUMP": "reqs"}
    if arm == "compact":
        flags += ["--disable-cuda-graph"]
    if arm != "none":
        flags += ["--speculative-dspark-sps-table-path", str(table)]
    return servers.prepare(args, arm, flags, env={} if arm == "none" else env, dspark=arm != "none")


def record(server: ServerProcess) -> dict[str, Any]:
    return server.server_info()["internal_states"][0]["dspark_info_record"]


def ask(args: argparse.Namespace, server: ServerProcess, prompts: Sequence[Any]) -> list[Answer]:
    """All prompts at once, greedily."""
    params = {"temperature": 0, "max_new_tokens": args.max_new_tokens, "ignore_eos": True}

    def one(prompt: Any) -> Answer:
        answer = server.generate(prompt.ids, sampling_params=params)
        asked = Prompt(prompt.label, prompt.label)
        return Answer(asked, tuple(prompt.ids), tuple(answer["output_ids"]), "length", 0.0, ())

    with ThreadPoolExecutor(len(prompts)) as clients:
        return list(clients.map(one, prompts))


def batch_row(args: argparse.Namespace, server: ServerProcess, arm: str, batch: int, prompts: Sequence[Any]) -> Any:
    """Rows per request in the steps that held the whole batch, and the texts."""
    server.flush_cache()
    server.set_state(dspark_clear_info_records=1)
    answers = ask(args, server, prompts[:batch])
    found = record(server)["schedule"]
    whole = found["by_batch"].get(str(batch))
    row = {"arm": arm, "batch": batch, "steps": found["steps"], "reasons": found["reasons"]}
    row |= {"late_confidences": found["late_confidences"], "relay": found["relay"]}
    row["rows_per_request"] = whole["scheduled_rows"] / whole["steps"] / batch if whole else None
    row["forwarded_per_request"] = whole["forwarded_rows"] / whole["steps"] / batch if whole else None
    print(
        f"{arm}, batch {batch}: {row['rows_per_request'] or math.nan:.2f} rows per request in {row['steps']} steps, "
        f"{row['forwarded_per_request'] or math.nan:.2f} forwarded"
    )
    return row, answers


def pin_row(args: argparse.Namespace, server: ServerProcess, arm: str, batch: int, prompts: Sequence[Any]) -> Any:
    """Every step of pinned traffic against the definition of the pin."""
    rows = []
    gamma = record(server)["gamma"]
    for fraction in args.pins:
        server.set_state(dspark_force_budget_frac=fraction, dspark_clear_info_records=1)
        ask(args, server, prompts[:batch])
        steps = record(server)["steps"]
        exact = 0
        for step in steps:
            count = len(step["requests"])
            drafts = math.floor(fraction * count * gamma)
            lens = [one["verify_len"] for one in step["requests"]]
            exact += step["budget"] == drafts and sum(lens) == count + drafts <= step["forwarded_rows"]
        rows.append({"arm": arm, "batch": batch, "fraction": fraction, "steps": len(steps), "exact_steps": exact})
        rows[-1]["rows_per_step"] = sum(step["forwarded_rows"] for step in steps) / len(steps)
        print(f"{arm}, batch {batch}, pin {fraction:g}: {exact} of {len(steps)} steps verify exactly R + K rows")
    server.set_state(dspark_force_budget_frac=-1)
    return rows


def compare(plain: ServerProcess, none: Sequence[Answer], arm: Sequence[Answer]) -> dict[str, Any]:
    """Equal texts, and the gap at the first difference of the others."""
    gaps = []
    for left, right in zip(none, arm, strict=True):
        found = first_difference(left, right)
        if found is not None:
            gaps.append(score(plain, left, found).gap_nats)
    near = sum(gap is not None and gap <= NEAR_TIE_NATS for gap in gaps)
    largest = max((gap for gap in gaps if gap is not None), default=0.0)
    return {"texts": len(none), "identical": len(none) - len(gaps), "near_ties": near, "largest_gap_nats": largest}


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--target", type=Path, required=True)
    add("--draft", type=Path, required=True)
    add("--prompts", type=Path, nargs="+", required=True, metavar="DIR_OR_JSONL")
    add("--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 4, 8, 16, 32, 64])
    add("--pins", type=lambda text: [float(part) for part in text.split(",")], default=[0.1, 0.25, 0.5, 1.0])
    add("--pin-batch", type=int, default=16)
    add("--max-new-tokens", type=int, default=96)
    add("--arms", default="compact,compact-graphs")
    add("--device", default=default_device())
    add("--server-args", default="", help="further flags of all servers, one string")
    add("--out", type=Path, metavar="FILE.json")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    from transformers import AutoTokenizer

    per_set = -(-max(args.batches) // 4)
    prompts = load_prompts(args.prompts, per_set, AutoTokenizer.from_pretrained(args.target), 512)
    prompts = prompts[:: max(1, len(prompts) // max(args.batches))][: max(args.batches)]
    rows, pins, texts, answers = [], [], [], {}
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "steep.json"
        table.write_text(json.dumps(TABLE))
        for arm in args.arms.split(","):
            with start(args, arm, table) as server:
                ask(args, server, prompts[:2])
                for batch in args.batches:
                    row, answers[arm, batch] = batch_row(args, server, arm, batch, prompts)
                    rows.append(row)
                pins += pin_row(args, server, arm, min(args.pin_batch, max(args.batches)), prompts)
        with start(args, "none", table) as plain:
            for batch in args.batches:
                plain.flush_cache()
                none = ask(args, plain, prompts[:batch])
                for arm in args.arms.split(","):
                    texts.append({"arm": arm, "batch": batch, **compare(plain, none, answers[arm, batch])})
                    print(texts[-1])
    result = {
        "machine": machine.describe(),
        "command": "python -m benchmarks.scheduling " + shlex.join(sys.argv[1:] if argv is None else argv),
        "table": TABLE,
        "rows": rows,
        "pins": pins,
        "texts": texts,
    }
    machine.conclude(result, args.out, {key: result[key] for key in ("machine", "rows", "pins", "texts")})


if __name__ == "__main__":
    main()
