"""From the host's ``ScheduleBatch`` to the values of the step."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch

from dspark.host.hooks import request_seed
from dspark.types import DecodeBatch, SamplingRows


class SeedTable:
    """One seed per request slot, written when a request is prefilled and read on the device ever after."""

    def __init__(self, slots: int, device: torch.device | str, server_seed: int) -> None:
        self._server_seed = server_seed
        self._seeds = torch.zeros(slots, dtype=torch.int64, device=device)

    def write(self, batch: ScheduleBatch) -> None:
        """Store the seeds of a prefill batch; a request's own ``sampling_seed`` wins."""
        seeds = [
            request_seed(req.rid, self._server_seed)
            if req.sampling_params.sampling_seed is None
            else int(req.sampling_params.sampling_seed)
            for req in batch.reqs
        ]
        staged = torch.tensor(seeds, dtype=torch.int64, pin_memory=self._seeds.is_cuda)
        self._seeds[batch.req_pool_indices] = staged.to(self._seeds.device, non_blocking=True)

    def read(self, req_pool_indices: torch.Tensor) -> torch.Tensor:
        """[R] int64."""
        return self._seeds[req_pool_indices]


def sampling_rows(info: Any, seeds: torch.Tensor) -> SamplingRows:
    """Sampling parameters of a batch; ``info`` is the host's ``SamplingBatchInfo``."""
    return SamplingRows(
        temperature=info.temperatures.view(-1),
        top_k=info.top_ks,
        top_p=info.top_ps,
        min_p=info.min_ps,
        greedy=info.top_ks <= 1,
        seeds=seeds,
        all_greedy=info.is_all_greedy,
        any_greedy=info.is_any_greedy,
        filters=info.need_top_p_sampling or info.need_min_p_sampling or info.need_top_k_sampling,
        logit_bias=info.logit_bias,
    )


def decode_batch(
    batch: ScheduleBatch, window: torch.Tensor, req_to_token: torch.Tensor, seeds: SeedTable
) -> DecodeBatch:
    """Gather what a step needs, all on the device.

    Args:
        batch: the host's decode batch; ``spec_info`` carries the anchors.
        window: [W] int64, 0..W-1.
        req_to_token: [rows, width] int32, the host's slot table; the window's slots are reserved already.
        seeds: the slots' seeds.
    """
    lengths = batch.seq_lens.to(torch.int64)
    positions = lengths[:, None] + window
    slots = req_to_token[batch.req_pool_indices[:, None], positions].to(torch.int64)
    return DecodeBatch(
        anchors=batch.spec_info.bonus_tokens.view(-1).to(torch.int64),
        lengths=lengths,
        positions=positions,
        slots=slots,
        sampling=sampling_rows(batch.sampling_info, seeds.read(batch.req_pool_indices)),
    )
