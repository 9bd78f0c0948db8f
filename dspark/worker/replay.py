"""Simulated acceptance inside the step: scheduling can be measured where nothing would ever be accepted.

Draft and target run in full and are timed in full. What is replaced are the confidences of the drafter (so that
allocation, relay and budget see the replayed ones) and the counts of the acceptance rule. The text means nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dspark.kernels.triton_replay import ReplayTable, replay_accept, replay_draft
from dspark.scheduler.replay_blocks import BlockClass
from dspark.types import AcceptResult, BlockProposal, DecodeBatch, VerifyPlan


class Replay:
    """Blocks of several classes on the device, the class that is replayed, and what the current step replays.

    One object serves eager and captured steps: all addresses stay as they are. The class may change between steps; a
    step remembers its blocks, so its confidences and its counts always belong together.
    """

    def __init__(
        self,
        classes: Sequence[BlockClass],
        seeds: torch.Tensor,
        initial: int,
        short_kept: Mapping[int, float] | None = None,
    ) -> None:
        """Args:
        classes: at least one, of equally long blocks.
        seeds: [N] int64 by request row, on the device of the step; read in every step.
        initial: index of the class of requests that name none.
        short_kept: by the depth of short blocks, the share of them that accept as many drafts as whole ones would.
        """
        device, counts = seeds.device, [one.accepted.shape[0] for one in classes]

        def on_device(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(values).to(device)

        self._classes = list(classes)
        self._selected, self._short_kept = initial, short_kept or {}
        self._settled = initial
        self._table = ReplayTable(
            confidence=on_device(np.concatenate([one.confidence for one in classes])),
            accepted=on_device(np.concatenate([one.accepted for one in classes])),
            first=on_device(np.cumsum([0, *counts[:-1]])),
            sizes=on_device(np.array(counts, dtype=np.int64)),
            selected=torch.full((1,), initial, dtype=torch.int64, device=device),
            classes=torch.full_like(seeds, -1),
            seeds=seeds,
        )
        self._accepted = torch.zeros(seeds.shape[0], dtype=torch.int32, device=device)  # of the current step

    @property
    def names(self) -> list[str]:
        """Classes, by index."""
        return [one.name for one in self._classes]

    @property
    def selected(self) -> str:
        """Class of requests that name none, from the next step on."""
        return self._classes[self._selected].name

    def select(self, index: int) -> None:
        """Change the class of requests that name none; takes effect with the next ``settle``."""
        self._selected = index

    def settle(self) -> None:
        """Bring a changed class to the device, in the order of the steps; called before each of them."""
        if self._settled != self._selected:
            self._table.selected.fill_(self._selected)
            self._settled = self._selected

    def assign(self, rows: torch.Tensor, classes: torch.Tensor) -> None:
        """The classes that requests have named: [R] int64 request rows and classes, -1 for none."""
        self._table.classes[rows] = classes

    def draft(self, batch: DecodeBatch, confidence: torch.Tensor | None, depth: int | None = None) -> None:
        """Pick this step's blocks, and let their confidences [R, G] take the place of the drafter's.

        ``depth`` is that of short blocks.
        """
        assert batch.rows is not None, "a replay needs to know the requests"
        kept = 1.0 if depth is None else self._short_kept.get(depth, 1.0)
        replay_draft(self._table, batch.rows, batch.lengths, self._accepted[: batch.size], confidence, kept)

    def accept(
        self,
        batch: DecodeBatch,
        proposal: BlockProposal,
        plan: VerifyPlan,
        out: AcceptResult,
        ceiling: torch.Tensor | None,
    ) -> None:
        """Let the blocks' counts, cut at the windows, take the place of those in ``out`` and ``ceiling``."""
        accepted = self._accepted[: batch.size]
        replay_accept(proposal.tokens, accepted, plan.verify_lens, out, ceiling, batch.lengths)

    def describe(self) -> dict[str, Any]:
        """What ``/server_info`` shows."""
        lengths = {one.name: round(one.accept_length, 3) for one in self._classes}
        return {
            "note": "acceptance is simulated: outputs are meaningless text",
            "class": self.selected,
            "classes": {
                name: {"index": index, "accept_length": lengths[name]} for index, name in enumerate(self.names)
            },
        }
