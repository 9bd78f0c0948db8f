"""Penalties, biases and a minimum of new tokens: from a request of the host to the table that steps read.

The host would keep [requests, vocabulary] tensors of its own for them, which it applies in its own sampler and updates
with one token per step, one step late under overlap. A request is therefore admitted without them, and carries them
in an attribute that only this module knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dspark.types import Adjustments, AdjustTable

_ATTRIBUTE = "dspark_adjust"
NEUTRAL = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}


@dataclass(frozen=True)
class Adjust:
    """What one request asks for."""

    frequency: float
    presence: float
    repetition: float
    min_new_tokens: int
    stop: frozenset[int]
    bias: Mapping[int, float]


def take(req: Any) -> None:
    """Move a request's adjustments out of its sampling parameters."""
    params = req.sampling_params
    bias = {int(token): float(value) for token, value in (params.logit_bias or {}).items()}
    if not bias and all(getattr(params, name) == value for name, value in NEUTRAL.items()):
        return
    stop: set[int] = set()
    if params.min_new_tokens > 0:  # the stop tokens that the host holds back
        stop |= set(params.stop_token_ids or ()) | set(req.tokenizer.additional_stop_token_ids or ())
        stop |= {req.tokenizer.eos_token_id} - {None}
        stop = {token for token in stop if 0 <= token < req.vocab_size}  # no other can be generated
    adjust = Adjust(
        float(params.frequency_penalty),
        float(params.presence_penalty),
        float(params.repetition_penalty),
        int(params.min_new_tokens),
        frozenset(stop),
        bias,
    )
    setattr(req, _ATTRIBUTE, adjust)
    for name, value in NEUTRAL.items():
        setattr(params, name, value)
    params.logit_bias = None


class AdjustRows:
    """The table of a server, one row per request row of the host's pool."""

    def __init__(self, slots: int, vocab: int, device: torch.device | str) -> None:
        """Args:
        slots: request rows.
        vocab: V.
        device: of the decode step.
        """

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.table = AdjustTable(
            active=zeros(slots, dtype=torch.bool),
            penalties=zeros(3, slots, dtype=torch.float32),
            min_length=zeros(slots, dtype=torch.int64),
            counts=zeros(slots, vocab, dtype=torch.int32),
            bias=zeros(slots, vocab, dtype=torch.float32),
        )
        self._vocab = vocab
        self._device = torch.device(device)
        self._active = torch.zeros(slots, dtype=torch.bool)  # on the host

    def write(self, reqs: Sequence[Any], rows: torch.Tensor, rows_cpu: torch.Tensor) -> None:
        """Store the requests of a prefill batch, with what they have said before they were retracted.

        Args:
            reqs: R requests of the host.
            rows, rows_cpu: [R] their rows, on the device and on the CPU.
        """
        adjusts: list[Adjust | None] = [getattr(req, _ATTRIBUTE, None) for req in reqs]
        before, flags = self._active[rows_cpu], torch.tensor([one is not None for one in adjusts])
        if not bool((before | flags).any()):
            return
        self._active[rows_cpu] = flags
        self.table.active[rows] = self._staged(flags)
        for req, row, adjust in zip(reqs, rows_cpu.tolist(), adjusts, strict=True):
            if adjust is not None:
                self._write_row(row, adjust, req)

    def _write_row(self, row: int, adjust: Adjust, req: Any) -> None:
        table = self.table
        numbers = [adjust.frequency, adjust.presence, adjust.repetition]
        table.penalties[:, row] = self._staged(torch.tensor(numbers, dtype=torch.float32))
        table.min_length[row] = len(req.origin_input_ids) + adjust.min_new_tokens
        table.bias[row].zero_()
        if adjust.bias:
            values = torch.tensor(list(adjust.bias.values()), dtype=torch.float32)
            table.bias[row, self._staged(torch.tensor(list(adjust.bias)))] = self._staged(values)
        counts = torch.bincount(torch.tensor(list(req.output_ids), dtype=torch.int64), minlength=self._vocab)
        counts[torch.tensor(sorted(adjust.stop), dtype=torch.int64)] += AdjustTable.STOP
        table.counts[row] = self._staged(counts.to(torch.int32))

    def _staged(self, values: torch.Tensor) -> torch.Tensor:
        if self._device.type == "cuda":
            values = values.pin_memory()
        return values.to(self._device, non_blocking=True)

    def any_of(self, rows_cpu: torch.Tensor) -> bool:
        """Whether some request of the rows has an adjustment."""
        return bool(self._active[rows_cpu].any())

    def of(self, rows: torch.Tensor, rows_cpu: torch.Tensor) -> Adjustments | None:
        """The adjustments of a batch, None if there are none."""
        return Adjustments(self.table, rows.to(torch.int64)) if self.any_of(rows_cpu) else None
