"""Calibration data of served text: confidence logits of each block, and how likely each of its drafts was accepted.

The labels are not what a coin decided but its probability min(1, p / q) under the request's own sampling (greedy: 1 or
0, whether the draft is the target's choice), of every draft given the drafts before it, accepted or not: far less noise
per block than facts. They need the logits of full windows, so such a server verifies nothing but those, and eagerly.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

import torch

from dspark.kernels.target_probs import target_probs
from dspark.types import BlockProposal, SamplingRows

SHARD_BLOCKS = 32_768  # written at once; 3 MB
_CERTAIN = 2.0**-24  # confidences nearer to 0 or 1 than this have no logit in float32


def accept_probability(logits: torch.Tensor, proposal: BlockProposal, sampling: SamplingRows) -> torch.Tensor:
    """[R, G] float32: probability that draft k passes its test if it is made.

    Args:
        logits: [R, W, V] of full windows, adjusted.
        proposal: the block.
        sampling: parameters of the R requests.
    """
    drafts = proposal.tokens[..., None]
    rows = logits[:, : proposal.tokens.shape[1]]
    matches = (rows.argmax(dim=-1) == proposal.tokens).to(torch.float32)
    if sampling.all_greedy:
        return matches
    assert proposal.probs is not None
    p = target_probs(rows, sampling).gather(-1, drafts).squeeze(-1)
    q = proposal.probs.gather(-1, drafts).squeeze(-1)
    return torch.where(sampling.greedy[:, None], matches, (p / q).clamp(max=1.0))  # q > 0: the draft was drawn from it


class BlockCollector:
    """Writes blocks to ``PATH.00000.pt`` and so on, which SGLang's own fitter reads as well.

    Keys: ``logits`` [N, G] float32, raw; ``prefix_mask`` [N, G] float32, probability that drafts 1..k are all accepted;
    ``temperature`` [N] float32, 0 for greedy requests; ``request`` [N] int64, CRC-32 of the request's id.
    """

    def __init__(self, path: str) -> None:
        """Args: path: of the shards, without number and suffix; its folder is made."""
        self._stem = Path(path).expanduser().resolve()
        self._stem.parent.mkdir(parents=True, exist_ok=True)
        self._parts: list[tuple[torch.Tensor, ...]] = []
        self._held = self._shards = 0
        self.blocks = 0  # collected so far

    @property
    def path(self) -> str:
        """Of the shards, absolute, without number and suffix."""
        return str(self._stem)

    def record(
        self, rids: Sequence[str], proposal: BlockProposal | None, logits: torch.Tensor, sampling: SamplingRows
    ) -> None:
        """Take the blocks of a step of full windows.

        Args:
            rids: of the R requests.
            proposal: their blocks; None: nothing was drafted.
            logits: [R * W, V].
            sampling: parameters of the R requests.
        """
        if proposal is None or proposal.confidence is None:
            return
        accepted = accept_probability(logits.view(len(rids), -1, logits.shape[-1]), proposal, sampling)
        names = torch.tensor([zlib.crc32(rid.encode()) for rid in rids])
        temperature = torch.where(sampling.greedy, 0.0, sampling.temperature)
        raw = torch.logit(proposal.confidence.to(torch.float32), eps=_CERTAIN)
        self._parts.append((raw, accepted.cumprod(dim=1), temperature, names))
        self._held += len(rids)
        self.blocks += len(rids)
        if self._held >= SHARD_BLOCKS:
            self.flush()

    def flush(self) -> None:
        """Write what is held; waits for the device."""
        if not self._parts:
            return
        columns = [torch.cat([part.cpu() for part in column]) for column in zip(*self._parts, strict=True)]
        path = self._stem.with_name(f"{self._stem.name}.{self._shards:05d}.pt")
        partial = path.with_suffix(".partial")
        torch.save(dict(zip(("logits", "prefix_mask", "temperature", "request"), columns, strict=True)), partial)
        partial.replace(path)
        self._parts.clear()
        self._held, self._shards = 0, self._shards + 1
