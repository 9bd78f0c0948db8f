"""Accept length of a running SGLang server, per prompt set, and its comparison with the float32 reference.

    python -m benchmarks.acceptance --url http://127.0.0.1:30000 --prompts prompts/ --per-set 14 --temperature 0 \
        --reference TARGET_DIR DRAFTER_DIR --reference-cache runs.json

Accept length of a request = (delivered tokens - 1) / verify steps: the first token comes from the prefill, the bonus
token counts. Over several requests it is sum(tokens - 1) / sum(steps), never a mean of ratios. Standard errors come
from a bootstrap over prompts (all seeds of a prompt together); the difference from the reference is bootstrapped in
pairs, because both sides decode the same prompts and share what makes a prompt easy or hard.

Greedy with ``--reference`` compares token for token, and step for step if the server was started with
``SGLANG_DSPARK_DEBUG_DUMP=reqs`` (see ``reference_comparison.py``: accept length alone misses off-by-one faults). A
server in bf16 may leave the float32 text at a near tie, so every first mismatch is printed with the reference's gap
between its two largest logits there. Without ``--url`` only the reference runs (to fill ``--reference-cache``).
Progress and warnings go to stderr; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

if TYPE_CHECKING:  # the reference needs transformers on the CPU: a run against a GPU server alone does not
    from tests.reference.decode import ReferenceCache

BOOTSTRAP_SAMPLES = 4000
REQUEST_TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class Prompt:
    """First turn of a question as token ids, chat template applied."""

    set_name: str
    label: str  # "set/line", line counted from 0
    ids: list[int]


@dataclass(frozen=True)
class Served:
    """What the server reported for one request."""

    prompt: Prompt
    rid: str
    tokens: list[int]
    steps: int  # verify steps, 0 if the prefill's token was the last one
    histogram: list[int]  # [n]: steps that accepted n drafts; empty if the server does not report it


@dataclass(frozen=True)
class Counts:
    """Numerator and denominator of an accept length, one entry per prompt (its seeds summed)."""

    tokens: np.ndarray  # [prompts] float64, delivered tokens without the prefill's
    steps: np.ndarray  # [prompts] float64

    @classmethod
    def of(cls, prompts: Sequence[Prompt], rows: Iterable[tuple[Prompt, int, int]]) -> Counts:
        """Sum (prompt, delivered tokens, steps) rows over each of ``prompts``."""
        index = {prompt.label: i for i, prompt in enumerate(prompts)}
        tokens, steps = np.zeros(len(prompts)), np.zeros(len(prompts))
        for prompt, delivered, count in rows:
            if prompt.label in index:
                tokens[index[prompt.label]] += delivered - 1
                steps[index[prompt.label]] += count
        return cls(tokens, steps)

    def accept_length(self) -> float:
        return float(self.tokens.sum() / self.steps.sum()) if self.steps.sum() else float("nan")

    def resampled(self) -> np.ndarray:
        """[BOOTSTRAP_SAMPLES] accept lengths; the same prompts are drawn on every call, so two arms pair up."""
        size = len(self.tokens)
        draws = np.random.default_rng(0).integers(0, size, (BOOTSTRAP_SAMPLES, size))
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.tokens[draws].sum(axis=1) / self.steps[draws].sum(axis=1)

    def standard_error(self) -> float:
        return float(np.nanstd(self.resampled(), ddof=1)) if len(self.tokens) > 1 else float("nan")


def load_prompts(paths: Sequence[Path], per_set: int, tokenizer: Any, max_tokens: int) -> list[Prompt]:
    """The first ``per_set`` lines of each jsonl file (or of each in a folder); over-long ones are named and skipped."""
    files = [file for path in paths for file in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])]
    prompts = []
    for file in files:
        with file.open(encoding="utf-8") as lines:  # not splitlines(): a question may hold U+2028
            questions = [json.loads(line)["turns"][0] for _, line in zip(range(per_set), lines, strict=False)]
        for number, question in enumerate(questions):
            message = [{"role": "user", "content": question}]
            ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
            if len(ids) <= max_tokens:
                prompts.append(Prompt(file.stem, f"{file.stem}/{number}", list(ids)))
            else:
                print(f"skipped {file.stem}/{number}: {len(ids)} prompt tokens", file=sys.stderr)
    return prompts


def http_json(url: str, body: dict | None = None) -> Any:
    """GET, or POST of a JSON body, and the decoded answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_SECONDS) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:  # the body says what the server disliked, the status alone does not
        raise RuntimeError(f"{url}: {error}: {error.read().decode(errors='replace')}") from error


def request_one(url: str, prompt: Prompt, seed: int, temperature: float, max_new_tokens: int) -> Served:
    """Send one prompt to ``/generate``."""
    rid = f"acceptance-{prompt.label.replace('/', '-')}-{seed}-{uuid.uuid4().hex[:8]}"
    sampling = {"temperature": temperature, "max_new_tokens": max_new_tokens, "ignore_eos": False}
    if temperature:
        # Neutral filters are spelled out: the model's generation_config must not change the distribution.
        sampling |= {"sampling_seed": seed, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
    answer = http_json(f"{url}/generate", {"rid": rid, "input_ids": prompt.ids, "sampling_params": sampling})
    meta, tokens = answer["meta_info"], answer["output_ids"]
    if meta["completion_tokens"] != len(tokens):
        raise RuntimeError(f"{prompt.label}: {meta['completion_tokens']} tokens reported, {len(tokens)} delivered")
    steps = meta.get("spec_verify_ct", 0)
    if len(tokens) > 1 and not steps:
        raise RuntimeError(f"{prompt.label}: no spec_verify_ct in meta_info; is this server speculative?")
    return Served(prompt, rid, tokens, steps, meta.get("spec_accept_histogram") or [])


def serve_all(args: argparse.Namespace, prompts: Sequence[Prompt]) -> list[Served]:
    """Every prompt with every seed, ``--concurrency`` at a time, in the order of the prompts."""
    seeds = range(args.seeds if args.temperature else 1)

    def send(job: tuple[Prompt, int]) -> Served:
        return request_one(args.url, *job, args.temperature, args.max_new_tokens)

    jobs = [(prompt, seed) for prompt in prompts for seed in seeds]
    with ThreadPoolExecutor(args.concurrency) as pool:
        return list(tqdm(pool.map(send, jobs), total=len(jobs), desc="server", file=sys.stderr))


def step_records(url: str) -> dict[str, list[dict]]:
    """Step records per request id, in order; empty unless the server runs with SGLANG_DSPARK_DEBUG_DUMP=reqs."""
    records: dict[str, list[dict]] = defaultdict(list)
    for state in http_json(f"{url}/server_info").get("internal_states", []):
        for step in (state.get("dspark_info_record") or {}).get("steps") or []:
            for request in step.get("requests") or []:
                records[request["rid"]].append(request)
    return dict(records)


def stop_ids(target_dir: str, tokenizer: Any) -> list[int]:
    """The tokens that end a request in SGLang: those of the model's configuration and the tokenizer's own."""
    configured = json.loads((Path(target_dir) / "config.json").read_text())["eos_token_id"]
    return sorted({tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])})


def reference_all(args: argparse.Namespace, cache: ReferenceCache, prompts: Sequence[Prompt]) -> list[tuple]:
    """(prompt, reference run) for every prompt and reference seed."""
    seeds = range(args.reference_seeds if args.temperature else 1)
    jobs = [(prompt, seed) for prompt in prompts for seed in seeds]
    runs = []
    for prompt, seed in tqdm(jobs, desc="reference", file=sys.stderr):
        run = cache.run(prompt.ids, args.max_new_tokens, args.temperature, seed, args.eos_ids, prompt.label)
        runs.append((prompt, run))
    return runs


def summarise(prompts: Sequence[Prompt], served: Sequence[Served], runs: Sequence[tuple]) -> list[dict]:
    """One row per prompt set and one for all: accept lengths with standard errors, and their difference."""
    table = []
    for name in [*dict.fromkeys(prompt.set_name for prompt in prompts), "all"]:
        chosen = [prompt for prompt in prompts if name in (prompt.set_name, "all")]
        row: dict = {"set": name, "prompts": len(chosen)}
        server = Counts.of(chosen, ((one.prompt, len(one.tokens), one.steps) for one in served))
        reference = Counts.of(chosen, ((prompt, len(run.tokens), len(run.steps)) for prompt, run in runs))
        for key, counts, present in (("server", server, served), ("reference", reference, runs)):
            if present:
                row[f"{key}_tokens"], row[f"{key}_steps"] = int(counts.tokens.sum()), int(counts.steps.sum())
                row[key], row[f"{key}_se"] = counts.accept_length(), counts.standard_error()
        if served and runs:
            row["difference"] = row["server"] - row["reference"]
            row["difference_se"] = float(np.nanstd(server.resampled() - reference.resampled(), ddof=1))
            row["difference_in_se"] = row["difference"] / row["difference_se"] if row["difference_se"] else 0.0
        table.append(row)
    return table


def histogram_of(served: Sequence[Served]) -> list[int]:
    """[n]: steps of all requests that accepted n drafts."""
    total = np.zeros(max((len(one.histogram) for one in served), default=0), dtype=np.int64)
    for one in served:
        total[: len(one.histogram)] += one.histogram
    return total.tolist()


def print_table(table: Sequence[dict]) -> None:
    """The summary for people."""
    print(f"{'set':<16}{'prompts':>8}  {'server':>15}{'steps':>7}  {'reference':>15}{'steps':>7}  {'difference':>20}")
    for row in table:
        cells = [f"{row['set']:<16}{row['prompts']:>8}"]
        for key in ("server", "reference"):
            value = f"{row[key]:.3f} +- {row[f'{key}_se']:.3f}" if key in row else "-"
            cells.append(f"{value:>15}{row.get(f'{key}_steps', '-'):>7}")
        if "difference" in row:
            cells.append(f"{row['difference']:+.3f} ({row['difference_in_se']:+.2f} SE)".rjust(20))
        print("  ".join(cells))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--url", help="base URL of the running server; without it only the reference runs")
    add("--prompts", nargs="+", type=Path, required=True, metavar="DIR_OR_JSONL")
    add("--per-set", type=int, default=14, help="first prompts of each set")
    add("--max-new-tokens", type=int, default=128)
    add("--max-prompt-tokens", type=int, default=4096, help="longer prompts are skipped")
    add("--temperature", type=float, default=0.0)
    add("--seeds", type=int, default=1, help="server runs per prompt when sampling")
    add("--concurrency", type=int, default=1, help="requests in flight")
    add("--tokenizer", help="default: the reference's target, else the server's model path")
    add("--reference", nargs=2, metavar=("TARGET_DIR", "DRAFTER_DIR"), help="compare with float32 decoding on the CPU")
    add("--reference-cache", metavar="FILE", help="JSON file of reference runs; what is missing is computed and added")
    add("--reference-seeds", type=int, default=2, help="reference runs per prompt when sampling")
    add("--gamma", type=int, help="drafts a step of the reference, default the trained block")
    add("--threads", type=int, default=1, help="torch threads of the reference")
    add("--arm", default="server", help="name of this run in the JSON")
    add("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args(argv)
    if args.url is None and args.reference is None:
        parser.error("nothing to do: give --url, --reference or both")
    args.url = args.url and args.url.rstrip("/")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    from transformers import AutoTokenizer  # seconds to import: after the arguments are known to be good

    info = http_json(f"{args.url}/server_info") if args.url else {}
    tokenizer_path = args.tokenizer or (args.reference[0] if args.reference else info["tokenizer_path"])
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    prompts = load_prompts(args.prompts, args.per_set, tokenizer, args.max_prompt_tokens)
    start = time.monotonic()
    served = serve_all(args, prompts) if args.url else []
    seconds = time.monotonic() - start
    runs, comparison = [], None
    if args.reference:
        import torch

        from benchmarks.reference_comparison import GreedyComparison, print_comparison
        from tests.reference.decode import ReferenceCache

        torch.set_num_threads(args.threads)
        args.eos_ids = stop_ids(args.reference[0], tokenizer)
        cache = ReferenceCache(*args.reference, args.gamma, args.reference_cache)
        runs = reference_all(args, cache, prompts)
        if served and not args.temperature:
            greedy = GreedyComparison(cache, args.max_new_tokens, args.eos_ids)
            by_label = {prompt.label: run for prompt, run in runs}
            comparison = greedy.compare(served, by_label, step_records(args.url))
            print_comparison(comparison)
    table = summarise(prompts, served, runs)
    print_table(table)
    kept = ("version", "model_path", "dtype", "speculative_algorithm", "speculative_draft_model_path", "device")
    report = {
        "arm": args.arm,
        "settings": vars(args),
        "server": {name: info[name] for name in kept if name in info},
        "server_seconds": round(seconds, 3),
        "table": table,
        "accept_histogram": histogram_of(served),
        "greedy": comparison,
    }
    # One prompt has no standard error; strict JSON has no NaN.
    report = json.loads(json.dumps(report, default=str), parse_constant=lambda _: None)
    if args.out:
        args.out.write_text(json.dumps(report, indent=1))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
