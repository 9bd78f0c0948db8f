"""Copies of opaque ids: a wrong character in one is a wrong token, which no reader of ordinary text would notice.

    python -m benchmarks.opaque_ids --target TARGET --draft DRAFT --gammas 3,5,7 --starts 2 --parallel 4 --out ids.json

Every prompt asks for 8 random hexadecimal ids, through the chat template, after one answered turn with the same ids (a
model of 135M copies a list that it has seen copied once, and few others). The same ``--repeats`` prompts go to each
arm, greedily, ``--concurrency`` at once: ``none`` is the server without speculation, the others are this package with
blocks of each length, ``--starts`` servers each. Wrong characters = edit distance between answer and ids. An arm may
have no more of them than ``none``; answers that differ from ``none`` are counted beside them. ``--parallel`` servers
share the device: the flags keep their pools small. The last line is JSON; the exit code is 1 if an arm failed, or was
worse than ``none``.
"""

from __future__ import annotations

import argparse
import random
import shlex
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import machine
from dspark.demo.server import ServerProcess, default_device, device_args
from dspark.errors import DSparkError

IDS = 8
REQUEST = "Repeat these 8 opaque ids exactly.\n"
MAX_NEW_TOKENS = 96  # 8 ids with their separators are about 71 tokens; the rest catches an answer that goes on
POOL_FLAGS = {
    "cpu": "--max-total-tokens 12000",
    # The fraction only has to exceed what servers that start meanwhile take; the pool itself is small.
    "cuda": "--mem-fraction-static 0.4 --max-total-tokens 40000 --cuda-graph-max-bs-decode 16",
}
stopping = threading.Event()


@dataclass(frozen=True)
class Arm:
    """One server."""

    gamma: int | None  # None: no speculation
    start: int

    @property
    def name(self) -> str:
        return "none" if self.gamma is None else f"gamma {self.gamma}, start {self.start}"


def opaque_answers(repeats: int, seed: int) -> list[str]:
    """What a perfect copy of each prompt says: 8 ids of 8 hexadecimal digits, separated by commas."""
    draw = random.Random(seed)
    return [", ".join(f"{draw.getrandbits(32):08x}" for _ in range(IDS)) for _ in range(repeats)]


def messages(answer: str) -> list[dict[str, str]]:
    """The conversation that asks for ``answer``."""
    ask = {"role": "user", "content": REQUEST + answer}
    return [ask, {"role": "assistant", "content": answer}, ask]


def wrong_characters(answer: str, required: str) -> int:
    """Edit distance: characters to change, leave out or put in."""
    row = list(range(len(required) + 1))
    for i, found in enumerate(answer, start=1):
        diagonal, row[0] = row[0], i
        for j, wanted in enumerate(required, start=1):
            diagonal, row[j] = row[j], min(diagonal + (found != wanted), row[j] + 1, row[j - 1] + 1)
    return row[-1]


def scored(arm: Arm, answers: Sequence[str], required: Sequence[str]) -> dict[str, Any]:
    """The row of an arm."""
    wrong = [wrong_characters(answer, wanted) for answer, wanted in zip(answers, required, strict=True)]
    return {
        "arm": arm.name,
        "gamma": arm.gamma,
        "start": arm.start,
        "answers": len(answers),
        "wrong_characters": sum(wrong),
        "wrong_answers": sum(count > 0 for count in wrong),
    }


def judge(rows: Sequence[dict[str, Any]], answers: dict[str, list[str]]) -> bool:
    """Compare each row with ``none`` and add what was found to it; True if no arm failed or was worse."""
    fine = True
    plain = next((row for row in rows if row["arm"] == "none"), {})
    for row in rows:
        if "error" in row or "error" in plain or not plain:
            fine = False
            continue
        pairs = zip(answers[row["arm"]], answers["none"], strict=True)
        row["differ_from_none"] = sum(ours != theirs for ours, theirs in pairs)
        row["ratio"] = row["wrong_characters"] / plain["wrong_characters"] if plain["wrong_characters"] else None
        row["no_worse"] = row["wrong_characters"] <= plain["wrong_characters"]
        fine &= row["no_worse"]
    return fine


def run_arm(args: argparse.Namespace, arm: Arm, prompts: Sequence[list[int]]) -> tuple[list[str], float]:
    """The answers of one server in the order of the prompts, and its accept length."""
    flags = ["--model-path", str(args.target), *device_args(args.device), *shlex.split(args.server_args)]
    flags += ["--max-running-requests", str(max(args.concurrency, 2))]
    if arm.gamma is not None:
        flags += ["--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", str(args.draft)]
        flags += ["--speculative-dspark-block-size", str(arm.gamma)]

    def progress(seconds: float, line: str) -> None:
        if stopping.is_set():
            raise KeyboardInterrupt
        if int(seconds) % 10 == 0:
            print(f"{arm.name}: starting, {seconds:.0f} s", file=sys.stderr, flush=True)

    def ask(ids: list[int]) -> dict[str, Any]:
        if stopping.is_set():
            raise KeyboardInterrupt
        params = {"temperature": 0, "max_new_tokens": MAX_NEW_TOKENS}
        return server.generate(ids, sampling_params=params)

    with ServerProcess(flags, timeout_seconds=600, progress=progress) as server:
        with ThreadPoolExecutor(args.concurrency) as clients:
            found = list(clients.map(ask, prompts))
        infos = [answer["meta_info"] for answer in found]
        steps = sum(info.get("spec_verify_ct", info["completion_tokens"] - 1) for info in infos)
        tokens = sum(info["completion_tokens"] - 1 for info in infos)
        print(f"{arm.name}: {len(found)} answers", file=sys.stderr, flush=True)
        return [answer["text"].strip() for answer in found], tokens / max(steps, 1)


def run_arms(args: argparse.Namespace, arms: Sequence[Arm], required: Sequence[str]) -> Any:
    """Rows and answers of all arms; an arm that fails is a row with its error."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.target)
    options = {"add_generation_prompt": True, "return_dict": False}
    prompts = [list(tokenizer.apply_chat_template(messages(answer), **options)) for answer in required]
    rows, answers = [], {}
    pool = ThreadPoolExecutor(args.parallel)
    try:
        futures = [pool.submit(run_arm, args, arm, prompts) for arm in arms]
        for arm, future in zip(arms, futures, strict=True):
            try:
                answers[arm.name], length = future.result()
                rows.append(scored(arm, answers[arm.name], required) | {"accept_length": length})
            except DSparkError as error:
                print(f"{arm.name}: {error}", file=sys.stderr)
                rows.append({"arm": arm.name, "error": str(error)})
    finally:
        stopping.set()
        pool.shutdown(cancel_futures=True)  # servers that still run end with their threads
    return rows, answers


def show(row: dict[str, Any]) -> None:
    """One line of the report."""
    if "error" in row:
        print(f"{row['arm']}: FAILED")
        return
    ratio = "-" if row.get("ratio") is None else f"{row['ratio']:.2f}"
    print(
        f"{row['arm']}: {row['wrong_characters']} wrong characters in {row['wrong_answers']} of {row['answers']} "
        f"answers, ratio to none {ratio}, {row.get('differ_from_none', '-')} answers differ from none, "
        f"accept length {row['accept_length']:.2f}"
    )


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--target", type=Path, required=True)
    add("--draft", type=Path, required=True)
    add("--gammas", type=lambda text: [int(part) for part in text.split(",")], default=[3, 5, 7])
    add("--starts", type=int, default=2, help="servers per block length")
    add("--repeats", type=int, default=200)
    add("--concurrency", type=int, default=12)
    add("--parallel", type=int, default=1, help="servers at the same time")
    add("--seed", type=int, default=0, help="of the ids")
    add("--device", default=default_device())
    add("--server-args", help=f"further flags of all servers, one string; default for a GPU: {POOL_FLAGS['cuda']}")
    add("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args(argv)
    if args.server_args is None:
        args.server_args = POOL_FLAGS[args.device]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    stopping.clear()
    required = opaque_answers(args.repeats, args.seed)
    arms = [Arm(None, 0), *(Arm(gamma, start) for gamma in args.gammas for start in range(args.starts))]
    rows, answers = run_arms(args, arms, required)
    fine = judge(rows, answers)
    for row in rows:
        show(row)
    result = {
        "benchmark": "opaque_ids",
        "machine": machine.describe(),
        "command": "python -m benchmarks.opaque_ids " + shlex.join(sys.argv[1:] if argv is None else argv),
        "rows": rows,
        "no_worse": fine,
    }
    machine.conclude(result | {"required": required, "texts": answers}, args.out, result)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
