"""A greedy server against the float32 reference: token for token, and step for step where the server kept records.

Accept length is a blunt instrument. On the demo drafter every ``target_layer_id`` off by one, or a block at positions
off by one, leaves it within noise (2.94 to 3.08 and 3.03, healthy 3.03), while four of five drafted blocks change.
What tells such a bug from bf16 rounding is *draft agreement*: among the steps where both sides stand at the same anchor
after the same text, the share that drafted the same block.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from tqdm import tqdm

from tests.reference.decode import ReferenceCache, ReferenceRun

if TYPE_CHECKING:
    from benchmarks.acceptance import Prompt, Served


@dataclass(frozen=True)
class GreedyComparison:
    """The reference and the arguments that both sides decode with."""

    cache: ReferenceCache
    max_new_tokens: int
    eos_ids: Collection[int]

    def compare(
        self, served: Sequence[Served], runs: Mapping[str, ReferenceRun], records: Mapping[str, list[dict]]
    ) -> dict:
        """JSON-ready result over all requests.

        Args:
            served: what the server delivered.
            runs: reference runs by prompt label.
            records: the server's step records by request id; requests without any are compared by text only.
        """
        texts = [self.compare_text(one, runs[one.prompt.label]) for one in tqdm(served, "texts", file=sys.stderr)]
        different = [text for text in texts if text]
        result: dict = {"requests": len(served), "equal_texts": texts.count(None), "text_mismatches": different}
        recorded = [one for one in served if one.rid in records]
        if recorded:
            bar = tqdm(recorded, "steps", file=sys.stderr)
            steps = [self.compare_steps(one, runs[one.prompt.label], records[one.rid]) for one in bar]
            counts = ("steps", "equal_before_mismatch", "same_anchor", "same_drafts")
            result["steps"] = {
                "requests": len(steps),
                "equal_requests": sum(step["mismatch"] is None for step in steps),
                **{name: sum(step[name] for step in steps) for name in counts},
                "mismatches": [step for step in steps if step["mismatch"]],
            }
        return result

    def compare_text(self, served: Served, run: ReferenceRun) -> dict | None:
        """The first delivered token that differs, with the reference's gap between its two largest logits there."""
        index = first_difference(served.tokens, run.tokens)
        if index is None:
            return None
        server, reference = ((side[index] if index < len(side) else None) for side in (served.tokens, run.tokens))
        prefix = served.prompt.ids + run.tokens[:index]
        gap = self.cache.decoder.gaps(prefix, [0] * self.cache.gamma).target[0]
        found = {"label": served.prompt.label, "index": index, "server": server, "reference": reference}
        return {**found, "target_gap": gap}

    def compare_steps(self, served: Served, run: ReferenceRun, records: list[dict]) -> dict:
        """Walk both lists of steps up to the first difference, and count equal blocks over all shared anchors."""
        drafts = len(records[0]["drafts"])
        if drafts != self.cache.gamma:
            raise SystemExit(
                f"the server drafts {drafts} tokens a step, the reference {self.cache.gamma}: pass --gamma"
            )
        windows = [record["verify_len"] for record in records]
        trimmed = any(window != drafts + 1 for window in windows)
        if trimmed:  # a trimmed window moves all later steps: decode again with the server's own windows
            arguments = (served.prompt.ids, self.max_new_tokens, 0.0, None, self.eos_ids, windows)
            run = self.cache.decoder.generate(*arguments)
        result = {"label": served.prompt.label, "trimmed": trimmed, "steps": len(run.steps), "mismatch": None}
        result |= self.draft_agreement(served, run, records) | {"equal_before_mismatch": len(run.steps)}
        for number, step in enumerate(run.steps):
            ours = asdict(step)
            theirs = {name: records[number][name] for name in ours} if number < len(records) else None
            fields = [name for name in ours if theirs is None or theirs[name] != ours[name]]
            if fields:
                mismatch = {"step": number, "fields": fields, "server": theirs, "reference": ours}
                mismatch |= self.mismatch_gaps(served.prompt, run, number, theirs)
                return result | {"equal_before_mismatch": number, "mismatch": mismatch}
        return result

    @staticmethod
    def draft_agreement(served: Served, run: ReferenceRun, records: list[dict]) -> dict[str, int]:
        """Steps at the same anchor after the same text, and how many of them drafted the same block."""
        common = first_difference(served.tokens, run.tokens)
        common = len(run.tokens) if common is None else common
        # The anchor at position len(prompt) + i is delivered token i.
        end = len(served.prompt.ids) + common
        ours = {step.position: step.drafts for step in run.steps if step.position < end}
        pairs = [(ours[one["position"]], one["drafts"]) for one in records if one["position"] in ours]
        return {"same_anchor": len(pairs), "same_drafts": sum(left == right for left, right in pairs)}

    def mismatch_gaps(self, prompt: Prompt, run: ReferenceRun, number: int, theirs: dict | None) -> dict[str, float]:
        """The reference's top-2 gaps at the first draft and the first committed token that differ in one step."""
        if theirs is None:
            return {}
        step = run.steps[number]
        # Up to the anchor's position, prompt and delivered tokens are the whole sequence.
        gaps = self.cache.decoder.gaps((prompt.ids + run.tokens)[: step.position + 1], step.drafts)
        found = {}
        for name, values, left, right in (
            ("draft_gap", gaps.draft, theirs["drafts"], step.drafts),
            ("target_gap", gaps.target, theirs["committed"], step.committed),
        ):
            row = first_difference(left, right)
            if row is not None and row < len(values):
                found[name] = values[row]
        return found


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first differing token, None if equal; a missing tail differs at its start."""
    shorter = min(len(left), len(right))
    differing = (index for index in range(shorter) if left[index] != right[index])
    return next(differing, None if len(left) == len(right) else shorter)


def print_comparison(result: dict) -> None:
    """Counts, then one entry per request that differs."""
    print("texts equal to the reference: {equal_texts} of {requests}".format(**result))
    for one in result["text_mismatches"]:
        print("  {label}: token {index} is {server}, reference {reference}, top-2 gap {target_gap:.4f}".format(**one))
    steps = result.get("steps")
    if steps is None:
        print("no step records for these requests (start the server with SGLANG_DSPARK_DEBUG_DUMP=reqs)")
        return
    print("requests equal step for step: {equal_requests} of {requests}".format(**steps))
    print("steps before a first mismatch: {equal_before_mismatch} of {steps}".format(**steps))
    print("draft agreement: {same_drafts} of {same_anchor} blocks at shared anchors".format(**steps))
    for one in steps["mismatches"]:
        found = one["mismatch"]
        gaps = ", ".join(f"{name} {found[name]:.4f}" for name in ("draft_gap", "target_gap") if name in found)
        print(f"  {one['label']}: step {found['step']} differs in {', '.join(found['fields'])}; {gaps or 'no gap'}")
        print(f"    server    {found['server']}\n    reference {found['reference']}")
