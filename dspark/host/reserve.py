"""KV slots for the coming decode steps, reserved for many of them at once.

A step writes up to W rows behind lengths that the host knows one step late, so each request holds slots for two windows
ahead. The host tops them up in every step, request by request, with scalar writes to tensors: 11 us each, 0.7 ms for 64
requests, for which a small model's step waits. Here a batch is looked at as a whole, and topped up for several steps
while slots are plenty, so that most steps reserve nothing, copy nothing and launch nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from sglang.srt.environ import envs
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache.allocation import alloc_for_spec_decode
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2

AHEAD = 64  # slots per request beyond what the next step needs
PLENTY = 4  # times that many must be free in all, or a step reserves no more than it needs
# Steps whose copies may be under way: the results of the step before the last one are on the host, so two are.
_PLACES = 4


class SlotReserve:
    """Reserves slots, and makes what the host keeps of a batch from one step to the next."""

    def __init__(self, window: int, rows: int, device: torch.device | str) -> None:
        """Args:
        window: W.
        rows: of the host's slot table; no batch is larger.
        device: of the table.
        """
        self._window, device = window, torch.device(device)
        self._host = torch.empty((_PLACES, 2 * rows), dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.empty(2 * rows, dtype=torch.int32, device=device)
        self._next = 0
        self._unused: dict[int, tuple[torch.Tensor, ...]] = {}
        # The host may plan on a stream that this does not know; it then prepares steps its own way.
        self._own: SlotReserve | None = None if envs.SGLANG_ENABLE_OVERLAP_PLAN_STREAM.get() else self

    def draft_input(self, anchors: torch.Tensor, lengths: torch.Tensor) -> SlotDraftInput:
        """What a step leaves for the next one.

        Args:
            anchors, lengths: [R] integers on the device.
        """
        anchors, lengths = anchors.to(torch.int64), lengths.to(torch.int64)  # nothing to do but after a prefill
        count = anchors.shape[0]
        unused = self._unused.get(count)
        if unused is None:  # of other algorithms; the host indexes and joins them
            types = torch.float32, torch.int64, torch.float16
            unused = tuple(torch.empty((count, 0), dtype=dtype, device=anchors.device) for dtype in types)
            self._unused[count] = unused
        return SlotDraftInput(unused[0], unused[1], anchors, lengths, unused[2], slots=self._own)

    def prepare(self, batch: ScheduleBatch, state: SlotDraftInput) -> None:
        """Give each request of a decode batch slots for two windows, and note the lengths that the host knows."""
        reqs, needed = batch.reqs, 2 * self._window
        committed = [req.kv_committed_len for req in reqs]
        held = [req.kv.kv_allocated_len for req in reqs]
        if any(length + needed > slots for length, slots in zip(committed, held, strict=True)):
            self._reserve(batch, committed, held)
        total = sum(committed)
        batch.seq_lens_cpu, batch.seq_lens_sum = torch.tensor(committed, dtype=torch.int64), total
        # Upper bounds of the lengths after this step.
        state.reserved_seq_lens_cpu = batch.seq_lens_cpu + needed
        state.reserved_seq_lens_sum = total + needed * len(reqs)

    def _reserve(self, batch: ScheduleBatch, committed: Sequence[int], held: Sequence[int]) -> None:
        least, width = 2 * self._window, batch.req_to_token_pool.req_to_token.shape[1]
        most = least + self._ahead(batch)
        wanted = [
            max(slots, length + least, min(length + most, width)) for length, slots in zip(committed, held, strict=True)
        ]
        count, place = len(held), self._host[self._next]
        self._next = (self._next + 1) % _PLACES
        # Contiguous, or the copy would go through memory that is not pinned.
        on_host, on_device = (each[: 2 * count].view(2, count) for each in (place, self._device))
        on_host.copy_(torch.tensor([held, wanted], dtype=torch.int32))
        on_device.copy_(on_host, non_blocking=True)
        alloc_for_spec_decode(
            batch.tree_cache,
            batch.req_to_token_pool,
            reqs=batch.reqs,
            req_pool_indices=batch.req_pool_indices,
            cur_kv_lens=on_device[0],
            cur_kv_lens_cpu=on_host[0],
            nxt_kv_lens=on_device[1],
            # Read one by one, which a list does ten times faster; with pages the host computes with it.
            nxt_kv_lens_cpu=wanted if batch.token_to_kv_pool_allocator.page_size == 1 else on_host[1],
            num_needed_tokens=sum(wanted) - sum(held),
            batch=batch,
        )

    def _ahead(self, batch: ScheduleBatch) -> int:
        """Slots per request beyond the least; none if they could be missing elsewhere."""
        free, cache = batch.token_to_kv_pool_allocator.available_size(), batch.tree_cache
        if not (cache.supports_swa() or cache.supports_mamba()):  # these have no single number
            free += cache.evictable_size()
        return AHEAD if free >= PLENTY * len(batch.reqs) * (2 * self._window + AHEAD) else 0


@dataclass
class SlotDraftInput(DFlashDraftInputV2):
    """What the host keeps of a batch between two steps, with slots reserved by a ``SlotReserve``."""

    slots: SlotReserve | None = None

    def prepare_for_decode(self, batch: ScheduleBatch) -> None:
        """Called by the host before a decode step is launched."""
        if self.slots is None:
            super().prepare_for_decode(batch)
        elif batch.reqs:
            self.slots.prepare(batch, self)
