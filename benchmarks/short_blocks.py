"""What blocks shorter than the trained one lose: drafts accepted up to the block's end, against whole blocks.

    python -m benchmarks.short_blocks --target TARGET --draft DRAFT --prompts examples/prompts --out out.json

In float32 on the CPU, with the loop of ``tests/reference``: the target writes an answer, greedily and at temperature 1,
and at each of its places the drafter drafts blocks of every length along the text that was written. Greedy: a draft
passes if it is the text's token. Temperature 1: a row passes with its exact chance, the mass that both models share.
Shares are of sums over all places, so they say what a step loses that verifies as many drafts; the last line is JSON.
"""

from __future__ import annotations

import argparse
import random
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoTokenizer, DynamicCache

from benchmarks import machine
from benchmarks.acceptance import load_prompts
from tests.reference.decode import ReferenceDecoder, draw, probabilities

TEMPERATURES = (0.0, 1.0)


class Sums:
    """By length of blocks, how often the first k + 1 drafts passed: sums over places."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.places, self.passed = 0, {length: [0.0] * length for length in lengths}

    def shares(self, whole: int) -> dict[str, float]:
        """By length, drafts that short blocks get accepted over those that whole ones get among their first as many."""
        found = {}
        for length, passed in self.passed.items():
            if length != whole:
                found[str(length)] = sum(passed) / sum(self.passed[whole][:length])
        return found


def write_text(decoder: ReferenceDecoder, ids: list[int], count: int, temperature: float, seed: int) -> list[int]:
    """Prompt and answer of the target alone."""
    generator = torch.Generator().manual_seed(seed)
    cache, logits = decoder._prefill(ids)
    text = [*ids, draw(probabilities(logits, temperature), temperature, generator)]
    for _ in range(count):
        following, _ = decoder._forward(text[-1:], cache, rows=1)
        text.append(draw(probabilities(following[0], temperature), temperature, generator))
    return text


@torch.inference_mode()
def measure_prompt(decoder: ReferenceDecoder, ids: list[int], count: int, temperature: float, sums: Sums) -> None:
    """Draft at every place of one answer."""
    drafter, whole = decoder.draft, decoder.gamma
    text = write_text(decoder, ids, count + whole, temperature, seed=len(ids))
    logits, features = decoder._forward(text, DynamicCache(config=decoder.model.config), rows=len(text))
    target = probabilities(logits, temperature)
    drafter.reset()
    drafter.extend_context(features[: len(ids)])
    for place in range(len(ids), len(text) - whole):
        for length, passed in sums.passed.items():
            chance = 1.0
            for k, base in enumerate(drafter.base_logits(text[place], place, length)):
                row = probabilities(base + drafter.markov_bias(text[place + k]), temperature)
                chance *= float(torch.minimum(target[place + k], row).sum())
                passed[k] += chance
                if not chance:
                    break
        sums.places += 1
        drafter.extend_context(features[place : place + 1])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--target", type=Path, required=True)
    add("--draft", type=Path, required=True)
    add("--prompts", type=Path, nargs="+", default=[Path("examples/prompts")], metavar="DIR_OR_JSONL")
    add("--count", type=int, default=30, help="prompts")
    add("--tokens", type=int, default=96, help="places per answer")
    add("--lengths", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 3, 4, 5, 6])
    add("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args(argv)
    decoder = ReferenceDecoder(args.target, args.draft)
    prompts = load_prompts(args.prompts, 10_000, AutoTokenizer.from_pretrained(args.target), 512)
    chosen = random.Random(1).sample(prompts, min(args.count, len(prompts)))
    rows: list[dict[str, Any]] = []
    for temperature in TEMPERATURES:
        sums = Sums([*(length for length in args.lengths if length < decoder.gamma), decoder.gamma])
        for prompt in tqdm(chosen, f"temperature {temperature:g}", file=sys.stderr):
            measure_prompt(decoder, prompt.ids, args.tokens, temperature, sums)
        passed = {str(length): [total / sums.places for total in totals] for length, totals in sums.passed.items()}
        shares = sums.shares(decoder.gamma)
        rows.append({"temperature": temperature, "places": sums.places, "passed": passed, "kept": shares})
        kept = ", ".join(f"{length}: {share:.3f}" for length, share in shares.items())
        print(f"temperature {temperature:g}, {sums.places} places: kept by blocks of length {kept}", flush=True)
    command = "python -m benchmarks.short_blocks " + shlex.join(sys.argv[1:] if argv is None else argv)
    machine.conclude({"command": command, "machine": machine.describe(), "rows": rows}, args.out)


if __name__ == "__main__":
    main()
