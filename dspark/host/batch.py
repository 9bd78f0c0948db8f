"""From the host's ``ScheduleBatch`` to the values of the step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.sampling.sampling_params import TOP_K_ALL

from dspark.host.adjust import AdjustRows
from dspark.host.extras import wanted
from dspark.kernels.triton_gather import gather_rows
from dspark.types import DecodeBatch, SamplingRows
from dspark.worker.static_step import Sampling

_SEED_MASK = (1 << 63) - 1


def request_seed(rid: str, server_seed: int) -> int:
    """A request's noise seed when it brings none: the same on every rank, different for every request.

    Returns:
        A non-negative 63-bit integer.
    """
    digest = hashlib.blake2b(f"{server_seed}/{rid}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & _SEED_MASK


class RequestTable:
    """What is known of each request slot, written when a request is prefilled: seed, filters, calibration class."""

    def __init__(
        self,
        slots: int,
        device: torch.device | str,
        server_seed: int,
        vocab: int,
        class_of: Callable[[float], int] | None = None,
    ) -> None:
        """Args:
        slots: request rows of the host's pool.
        device: of the decode step.
        server_seed: source of the seeds of requests that bring none.
        vocab: V.
        class_of: calibration class of a sampling temperature (0 for greedy); None if there is only one.
        """
        self._server_seed = server_seed
        self._class_of = class_of
        # Raised by every prefill. The host's own count starts again when its cache is flushed.
        self.generations = np.zeros(slots, dtype=np.int64)
        self.temperatures = np.zeros(slots)  # on the host; 0 for greedy requests
        self._filtered = torch.zeros(slots, dtype=torch.bool)  # on the host
        self.adjustments = AdjustRows(slots, vocab, device)
        # Captured steps read sampling parameters by request row: temperature, top-p, min-p; top-k, seed, class.
        self._numbers = torch.ones((3, slots), dtype=torch.float32, device=device)
        self._integers = torch.zeros((3, slots), dtype=torch.int64, device=device)
        self._top_k, self._seeds, self._classes = self._integers
        self._top_k.fill_(1)
        self._greedy_row = torch.ones(slots, dtype=torch.bool, device=device)
        self._greedy_class = torch.full_like(self._classes, 0 if class_of is None else class_of(0.0))

    def write(self, batch: ScheduleBatch) -> None:
        """Store the requests of a prefill batch; a request's own ``sampling_seed`` wins, cut to 63 bits."""
        self.adjustments.write(batch.reqs, batch.req_pool_indices, batch.req_pool_indices_cpu)
        params = [req.sampling_params for req in batch.reqs]
        seeds = [
            request_seed(req.rid, self._server_seed)
            if one.sampling_seed is None
            else int(one.sampling_seed) & _SEED_MASK
            for req, one in zip(batch.reqs, params, strict=True)
        ]
        self._seeds[batch.req_pool_indices] = self.staged(seeds)
        self.generations[batch.req_pool_indices_cpu.numpy()] += 1
        temperatures = [0.0 if one.top_k == 1 else one.temperature for one in params]
        self.temperatures[batch.req_pool_indices_cpu.numpy()] = temperatures
        if self._class_of is not None:
            classes = [self._class_of(temperature) for temperature in temperatures]
            self._classes[batch.req_pool_indices] = self.staged(classes)
        self._top_k[batch.req_pool_indices] = self.staged([one.top_k for one in params])
        numbers = [[getattr(one, name) for one in params] for name in ("temperature", "top_p", "min_p")]
        self._numbers[:, batch.req_pool_indices] = self.staged(numbers, torch.float32)
        # Greedy requests carry top_k = 1; they take the other rule and must not make the batch sort its vocabulary.
        self._filtered[batch.req_pool_indices_cpu] = torch.tensor(
            [one.top_k > 1 and (one.top_k < TOP_K_ALL or one.top_p < 1 or one.min_p > 0) for one in params]
        )

    def static_sampling(self, rows: torch.Tensor, sampling: Sampling) -> SamplingRows:
        """Sampling parameters of [S] request rows, for a captured step: nothing is read on the host.

        Greedy and sampled requests share the ``sampled`` and ``general`` kinds.
        """
        count = rows.shape[0]
        numbers, integers, greedy = self._numbers[:, :count], self._integers[:, :count], self._greedy_row[:count]
        classes = self._greedy_class[:count]
        if sampling != "greedy":  # else nobody looks at the parameters
            numbers, integers = numbers.new_empty(3, count), integers.new_empty(3, count)
            greedy = torch.empty_like(greedy)
            gather_rows(rows, self._numbers, self._integers, numbers, integers, greedy)
            classes = integers[2]
        return SamplingRows(
            temperature=numbers[0],
            top_k=integers[0],
            top_p=numbers[1],
            min_p=numbers[2],
            greedy=greedy,
            seeds=integers[1],
            all_greedy=sampling == "greedy",
            any_greedy=True,
            filters=sampling == "general",
            calibration=None if self._class_of is None else classes,
        )

    @property
    def seeds(self) -> torch.Tensor:
        """[slots] int64 noise seeds by request row, on the device; rewritten in place."""
        return self._seeds

    def kind(self, batch: ScheduleBatch) -> Sampling:
        """What the batch needs of a captured step."""
        rows = batch.req_pool_indices_cpu
        if wanted(batch) or bool(self._filtered[rows].any()) or self.adjustments.any_of(rows):
            return "general"
        return "greedy" if batch.sampling_info.is_all_greedy else "sampled"

    def staged(self, values: Sequence[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Host values on the device of the step, without a wait."""
        staged = torch.tensor(values, dtype=dtype, pin_memory=self._seeds.is_cuda)
        return staged.to(self._seeds.device, non_blocking=True)

    def sampling(self, batch: ScheduleBatch) -> SamplingRows:
        """Sampling parameters of a batch."""
        info = batch.sampling_info
        return SamplingRows(
            temperature=info.temperatures.view(-1),
            top_k=info.top_ks,
            top_p=info.top_ps,
            min_p=info.min_ps,
            greedy=info.top_ks <= 1,
            seeds=self._seeds[batch.req_pool_indices],
            all_greedy=info.is_all_greedy,
            any_greedy=info.is_any_greedy,
            filters=bool(self._filtered[batch.req_pool_indices_cpu].any()),
            calibration=None if self._class_of is None else self._classes[batch.req_pool_indices],
        )


def decode_batch(
    batch: ScheduleBatch, window: torch.Tensor, req_to_token: torch.Tensor, requests: RequestTable
) -> DecodeBatch:
    """Gather what a step needs, all on the device.

    Args:
        batch: the host's decode batch; ``spec_info`` carries the anchors.
        window: [W] int64, 0..W-1.
        req_to_token: [rows, width] int32, the host's slot table; the window's slots are reserved already.
        requests: what is known of the slots.
    """
    lengths = batch.seq_lens.to(torch.int64)
    positions = lengths[:, None] + window
    slots = req_to_token[batch.req_pool_indices[:, None], positions].to(torch.int64)
    return DecodeBatch(
        anchors=batch.spec_info.bonus_tokens.view(-1).to(torch.int64),
        lengths=lengths,
        positions=positions,
        slots=slots,
        sampling=requests.sampling(batch),
        adjust=requests.adjustments.of(batch.req_pool_indices, batch.req_pool_indices_cpu),
        rows=batch.req_pool_indices,
    )


def context_tokens(batch: ScheduleBatch, window: int) -> int:
    """Context tokens of a decode batch as the host knows them, at most two steps late.

    The host reserves two windows beyond what it knows to be committed. Its own lengths may be on the device only.
    """
    return max(0, int(batch.spec_info.reserved_seq_lens_sum) - 2 * window * len(batch.reqs))
