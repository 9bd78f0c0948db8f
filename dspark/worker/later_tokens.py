"""Step records of cap-accept: what compact would have to know of sampled steps that hide their ceiling there.

These are the log-probabilities of the tokens that came to stand in the places of the left-out drafts, under the target
(``log_p``) and under the drafter of the old block (``log_q``). ``benchmarks.ceiling`` estimates from them what the
records know. One block at a time, and not without waiting: this exists for step records only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dspark.drafter.proposer import block_log_probs
from dspark.types import StepOutcome
from dspark.worker.protocols import DraftNet


@dataclass(frozen=True)
class _Open:
    """A block whose later tokens are not all there."""

    record: dict[str, Any]
    hidden: torch.Tensor  # [1, G, H]
    temperature: float
    path: list[int]  # tokens from the first draft's place on
    log_p: list[float]  # of those behind the window


class LaterTokens:
    """Follows the requests of consecutive steps."""

    def __init__(self, net: DraftNet) -> None:
        self._net = net
        self._open: dict[str, list[_Open]] = {}

    def follow(self, records: Sequence[dict[str, Any]], outcome: StepOutcome, temperatures: Sequence[float]) -> None:
        """Take a step; ``log_p`` and ``log_q`` are added to earlier records whose tokens are complete.

        Args:
            records: of the R requests (``StepRecorder``).
            outcome: of the step.
            temperatures: [R], 0 for greedy requests.
        """
        before, self._open = self._open, {}
        if outcome.accept.chances is None:
            return
        chances = outcome.accept.chances.clamp(min=torch.finfo(torch.float32).tiny).log().tolist()
        for i, (record, temperature) in enumerate(zip(records, temperatures, strict=True)):
            tokens = record["committed"]
            # A request that was left out of a step has lost its place: its next token need not follow its last one.
            open_ = before.get(record["rid"], [])
            for block in open_:
                block.path.extend(tokens)
                block.log_p.extend(chances[i][: len(tokens)])
            still = [block for block in open_ if not self._closed(block)]
            if temperature > 0 and self._hides(record, outcome):
                assert outcome.proposal is not None
                assert outcome.proposal.hidden is not None
                still.append(_Open(record, outcome.proposal.hidden[i : i + 1].clone(), temperature, list(tokens), []))
            self._open[record["rid"]] = still

    @staticmethod
    def _hides(record: dict[str, Any], outcome: StepOutcome) -> bool:
        if outcome.proposal is None or outcome.proposal.hidden is None:
            return False
        return record["accepted"] == record["verify_len"] < len(record["drafts"])

    def _closed(self, block: _Open) -> bool:
        """Whether all tokens are there; then the record has its numbers."""
        record, hidden = block.record, block.hidden
        gamma = hidden.shape[1]
        if len(block.path) < gamma:
            return False
        left_out = gamma - record["verify_len"]
        numbers = torch.tensor([record["anchor"], *block.path[:gamma]], device=hidden.device)
        temperature = torch.tensor([block.temperature], device=hidden.device)
        base = self._net.base_logits(hidden)
        found = block_log_probs(self._net.markov_head, hidden, base, numbers[:1], numbers[None, 1:], temperature)
        record["log_p"] = block.log_p[:left_out]
        record["log_q"] = found[0, -left_out:].tolist()
        return True
