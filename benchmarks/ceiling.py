"""The estimated ceiling against the measured one: a run in cap-accept, seen by the estimator as compact would see it.

Prompts of all kinds, half of the answers greedy and half at temperature 1, in windows of consecutive request steps. The
estimator gets the probabilities of every hidden sampled step; a server in compact has those of its probes.

python -m benchmarks.ceiling --target TARGET --draft examples/smollm2-135m-dspark --out ceiling.json
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from benchmarks.acceptance import Prompt, load_prompts
from dspark.demo.server import ServerProcess, device_args
from dspark.observe.ceiling import TrimmedSteps, ceiling

WINDOW_STEPS = 256
KINDS = {"mixed": (True, False), "sampled": (False,), "greedy": (True,)}  # which request steps a window has
# Ten milliseconds and one per row: a scheduler with this table trims hard at every load.
TABLE = {
    "bias_seconds": 0.01,
    "bs_probes": [1],
    "alpha_seconds": [0.0],
    "m_probes": [1, 2, 64, 512],
    "theta_seconds": [0.001, 0.002, 0.064, 0.512],
}


def realised_tokens(steps: list[dict[str, Any]]) -> dict[str, dict[int, int]]:
    """Committed token of each position, by request."""
    found: dict[str, dict[int, int]] = defaultdict(dict)
    for step in steps:
        for offset, token in enumerate(step["committed"], 1):
            found[step["rid"]][step["position"] + offset] = token
    return found


def hidden(step: dict[str, Any]) -> bool:
    """Whether compact does not know the ceiling of a step."""
    return bool(step["verify_len"] <= len(step["drafts"]) and step["accepted"] == step["verify_len"])


def trimmed_steps(steps: list[dict[str, Any]], tokens: dict[str, dict[int, int]]) -> TrimmedSteps:
    """What the estimator gets of the hidden steps."""
    count, gamma = len(steps), len(steps[0]["drafts"]) if steps else 1
    drafts, realised = np.zeros((count, gamma), np.int64), np.full((count, gamma), -1, np.int64)
    log_p, log_q = np.zeros((2, count, gamma))
    left = np.array([gamma - step["verify_len"] for step in steps], np.int64)
    greedy = np.array([step["greedy"] for step in steps], bool)
    for n, step in enumerate(steps):
        later, rows = tokens[step["rid"]], step["verify_len"]
        drafts[n, : left[n]] = step["drafts"][rows:]
        if greedy[n] or "log_q" in step:  # else there are not enough later tokens
            realised[n, : left[n]] = [later.get(step["position"] + 1 + place, -1) for place in range(rows, gamma)]
        if not greedy[n] and "log_q" in step:
            log_p[n, : left[n]], log_q[n, : left[n]] = step["log_p"], step["log_q"]
    return TrimmedSteps(left, drafts, realised, greedy, log_p, log_q)


def compare(steps: list[dict[str, Any]]) -> list[dict[str, float]]:
    """One row per window of ``WINDOW_STEPS`` request steps: estimate and truth over the same, resolved steps."""
    tokens, rows = realised_tokens(steps), []
    for start in range(0, len(steps), WINDOW_STEPS):
        part = [step for step in steps[start : start + WINDOW_STEPS] if step["drafts"] is not None]
        known = [step for step in part if not hidden(step)]
        unknown = [step for step in part if hidden(step)]
        solved = [step for step in unknown if ceiling_of([], [step], tokens).unresolved == 0]
        found = ceiling_of(known, unknown, tokens)
        truth = sum(step["ceiling"] for step in known + solved)
        rows.append({"steps": len(part), "hidden": len(unknown), "truth": truth, **vars(found)} | {"steps": len(part)})
    return rows


def ceiling_of(known: list[dict[str, Any]], unknown: list[dict[str, Any]], tokens: dict[str, dict[int, int]]) -> Any:
    commits = [np.array([len(step["committed"]) for step in steps], np.int64) for steps in (known, unknown)]
    return ceiling(commits[0], commits[1], trimmed_steps(unknown, tokens))


def record(target: str, draft: str, device: str, prompts: list[Prompt], new_tokens: int) -> list[dict[str, Any]]:
    """Request steps in cap-accept; every other answer is greedy, the rest at temperature 1."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as table:
        json.dump(TABLE, table)
        table.flush()
        flags = ["--model-path", target, *device_args(device), "--speculative-algorithm", "DSPARK"]
        flags += ["--speculative-draft-model-path", draft, "--speculative-dspark-sps-table-path", table.name]
        flags += ["--max-running-requests", "8"]
        env = {"SGLANG_RAGGED_VERIFY_MODE": "cap-accept", "SGLANG_DSPARK_DEBUG_DUMP": "reqs"}
        with ServerProcess(flags, env=env, timeout_seconds=600) as server, ThreadPoolExecutor(8) as clients:

            def ask(number: int) -> None:
                sampling = {"temperature": float(number % 2), "max_new_tokens": new_tokens, "sampling_seed": number}
                server.generate(prompts[number].ids, rid=str(number), sampling_params=sampling, timeout_seconds=1200)

            list(clients.map(ask, range(len(prompts))))
            dumped = server.server_info()["internal_states"][0]["dspark_info_record"]["steps"]
    steps = [request for step in dumped for request in step["requests"]]
    return [step | {"greedy": int(step["rid"]) % 2 == 0} for step in steps if step["rid"].isdigit()]


def summary(rows: list[dict[str, float]]) -> dict[str, float]:
    """Over whole windows; the last one of a run may be shorter."""
    whole = [row for row in rows if row["steps"] == WINDOW_STEPS]
    errors = [row["middle"] / row["truth"] - 1 for row in whole]
    return {
        "windows": len(whole),
        "inside": sum(row["low"] <= row["truth"] <= row["high"] for row in whole),
        "largest_error": max(map(abs, errors)),
        "mean_error": sum(errors) / len(errors),
        "mean_width": sum((row["high"] - row["low"]) / row["truth"] for row in whole) / len(whole),
        "hidden": sum(row["hidden"] for row in rows),
        "unresolved": sum(row["unresolved"] for row in rows),
        "committed": sum(row["committed"] for row in rows),
        "truth": sum(row["truth"] for row in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--prompts", type=Path, nargs="+", default=[Path("examples/prompts")], metavar="DIR_OR_JSONL")
    parser.add_argument("--answers", type=int, default=72)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    prompts = load_prompts(chosen.prompts, chosen.answers, AutoTokenizer.from_pretrained(chosen.target), 512)
    random.Random(0).shuffle(prompts)
    steps = record(chosen.target, chosen.draft, chosen.device, prompts[: chosen.answers], chosen.new_tokens)
    found = {name: compare([step for step in steps if step["greedy"] in kinds]) for name, kinds in KINDS.items()}
    sums = {name: summary(rows) for name, rows in found.items() if any(row["steps"] == WINDOW_STEPS for row in rows)}
    chosen.out.write_text(
        json.dumps({"window_steps": WINDOW_STEPS, "summary": sums, "windows": found}, indent=1) + "\n"
    )
    for name, numbers in sums.items():
        print(name, ", ".join(f"{key} {value:.4g}" for key, value in numbers.items()))
    print(json.dumps(sums))


if __name__ == "__main__":
    main()
