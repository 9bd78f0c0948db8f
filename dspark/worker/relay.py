"""Survival of each step, carried to the host for the plan two steps later.

The device writes a pinned buffer without being waited for; an event says when it is there. Which entry a plan reads is
decided by step number (``dspark.scheduler.history``), never by what happens to have arrived: an entry that is late is
waited for and counted, so that every rank and every run plans from the same bytes.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from dspark.scheduler.depth import deepened
from dspark.scheduler.history import LAG_STEPS, Entry, Found, History, Lookup, lookup
from dspark.scheduler.survival import SurvivalPrior

RING = LAG_STEPS + 2  # steps t - 2 .. t may be read or written while t is planned; one more keeps them apart


class Transfer(Protocol):
    """A copy of survivals to the host, under way or finished."""

    def done(self) -> bool:
        """Whether the values are there."""

    def wait(self) -> None:
        """Return when they are."""

    def values(self) -> np.ndarray:
        """[R, G] float32, once done."""


class HostBuffers:
    """A ring of host buffers for transfers; pinned if the survivals come from a GPU."""

    def __init__(self, max_requests: int, gamma: int, device: torch.device | str) -> None:
        self._cuda = torch.device(device).type == "cuda"
        self._buffers = torch.zeros((RING, max_requests, gamma), dtype=torch.float32, pin_memory=self._cuda)
        self._events = [torch.cuda.Event() if self._cuda else None for _ in range(RING)]

    def start(self, step: int, survival: torch.Tensor) -> Transfer:
        """Begin to copy [R, G] float32 survivals of ``step``; its buffer is reused ``RING`` steps later."""
        buffer, event = self._buffers[step % RING][: survival.shape[0]], self._events[step % RING]
        buffer.copy_(survival, non_blocking=self._cuda)
        if event is not None:
            event.record()
        return _BufferTransfer(buffer, event)


class _BufferTransfer:
    def __init__(self, buffer: torch.Tensor, event: torch.cuda.Event | None) -> None:
        self._buffer, self._event = buffer, event

    def done(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def values(self) -> np.ndarray:
        return self._buffer.numpy()


class ConfidenceRelay:
    """What earlier steps said, for the plan of the current one."""

    def __init__(self, buffers: HostBuffers, gamma: int) -> None:
        self._buffers = buffers
        self._history = History()
        self._transfers: dict[int, tuple[Transfer, int | None]] = {}  # by step, with its depth
        self._prior = SurvivalPrior.initial(gamma)
        self.own_rows = 0  # requests that were planned with a confidence of their own
        self.waits = 0  # entries that were not there when they were needed
        self.found = dict.fromkeys((Found.FRESH, Found.NO_DRAFT, Found.MISSING), 0)

    def publish(
        self,
        step: int,
        slots: np.ndarray,
        generations: np.ndarray,
        survival: torch.Tensor | None,
        depth: int | None = None,
    ) -> Transfer | None:
        """Hand over what ``step`` knew; None if it did not draft.

        Args:
            step: number of the decode step, increasing.
            slots, generations: [R] int64, request slots of the step and their generations.
            survival: [R, G] float32 on the device of the step.
            depth: drafts of each block that were drawn; None: all.

        Returns:
            The copy under way, whose values hold until the step ``RING`` steps later is published; None without one.
        """
        entry = Entry(step, slots, generations, drafted=survival is not None)
        transfer = None if survival is None else self._buffers.start(step, survival)
        if transfer is not None:
            self._transfers[step] = transfer, depth
        self._history = self._history.publish(entry)
        self._transfers.pop(step - RING + 1, None)
        return transfer

    def survival(self, step: int, slots: np.ndarray, generations: np.ndarray) -> Lookup:
        """Survival from exactly two steps before ``step`` (``history.lookup``), of the prior where there is none.

        Args:
            step: number of the step being planned.
            slots, generations: [R] int64, of the requests being planned.
        """
        sent = self._transfers.pop(step - LAG_STEPS, None)
        if sent is not None:
            transfer, depth = sent
            if not transfer.done():
                self.waits += 1
                transfer.wait()
            values = transfer.values() if depth is None else deepened(transfer.values(), depth)
            self._history = self._history.arrive(step - LAG_STEPS, values)
        found = lookup(self._history, step, slots, generations, self._prior)
        assert found.survival is not None, "the only transfer that could be late was waited for"
        self._prior = self._prior.update(found.own)
        self.found[found.found] += 1
        self.own_rows += int(np.count_nonzero(found.known))
        return found
