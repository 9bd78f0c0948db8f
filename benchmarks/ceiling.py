"""The estimated ceiling against the measured one: a greedy run in cap-accept, seen by the estimator as compact sees it.

python -m benchmarks.ceiling --target TARGET --draft examples/smollm2-135m-dspark --out ceiling.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import requests

from dspark.demo.prompts import PROMPTS
from dspark.demo.server import ServerProcess, device_args
from dspark.observe.ceiling import TrimmedSteps, ceiling

WINDOW_STEPS = 256
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
    """What the estimator gets of the hidden steps of greedy requests."""
    count, gamma = len(steps), len(steps[0]["drafts"]) if steps else 1
    drafts, realised = np.zeros((count, gamma), np.int64), np.full((count, gamma), -1, np.int64)
    left = np.array([gamma - step["verify_len"] for step in steps], np.int64)
    for n, step in enumerate(steps):
        later, rows = tokens[step["rid"]], step["verify_len"]
        drafts[n, : left[n]] = step["drafts"][rows:]
        realised[n, : left[n]] = [later.get(step["position"] + 1 + place, -1) for place in range(rows, gamma)]
    unused = np.zeros((count, gamma))
    return TrimmedSteps(left, drafts, realised, np.ones(count, bool), unused, unused)


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


def record(target: str, draft: str, device: str, answers: int, new_tokens: int) -> list[dict[str, Any]]:
    """Request steps of greedy answers in cap-accept."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as table:
        json.dump(TABLE, table)
        table.flush()
        flags = ["--model-path", target, *device_args(device), "--speculative-algorithm", "DSPARK"]
        flags += ["--speculative-draft-model-path", draft, "--speculative-dspark-sps-table-path", table.name]
        flags += ["--max-running-requests", "8"]
        env = {"SGLANG_RAGGED_VERIFY_MODE": "cap-accept", "SGLANG_DSPARK_DEBUG_DUMP": "reqs"}
        with ServerProcess(flags, env=env, timeout_seconds=600) as server:

            def ask(number: int) -> None:
                sampling = {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True}
                body = {"text": PROMPTS[number % len(PROMPTS)].text, "sampling_params": sampling}
                requests.post(server.url + "/generate", json=body, timeout=1200).raise_for_status()

            with ThreadPoolExecutor(4) as clients:
                list(clients.map(ask, range(answers)))
            dumped = server.server_info()["internal_states"][0]["dspark_info_record"]["steps"]
    return [request for step in dumped for request in step["requests"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--answers", type=int, default=12)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    rows = compare(record(chosen.target, chosen.draft, chosen.device, chosen.answers, chosen.new_tokens))
    inside = sum(row["low"] <= row["truth"] <= row["high"] for row in rows)
    chosen.out.write_text(json.dumps({"windows": rows}, indent=1))
    errors = [abs(row["middle"] / row["truth"] - 1) for row in rows if row["truth"]]
    print(
        f"truth inside of the interval: {inside} of {len(rows)} windows; largest error of the middle {max(errors):.2%}"
    )


if __name__ == "__main__":
    main()
