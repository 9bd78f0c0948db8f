"""The batch of a step into its static buffers: one launch instead of one per buffer."""

from __future__ import annotations

import torch

from dspark.kernels.triton_jit import jit, power_of_two, tl


# Launched outside of graphs with changing numbers: one variant for all of them, compiled before the first request.
@jit(do_not_specialize=["requests", "drafts"], do_not_specialize_on_alignment=["rows", "anchors", "lengths"])
def _stage_kernel(
    rows,
    anchors,
    lengths,
    to_rows,
    to_anchors,
    to_lengths,
    to_live,
    to_budget,
    requests,
    slots,
    drafts,
    BLOCK: tl.constexpr,
):
    slot = tl.arange(0, BLOCK)
    live, inside = slot < requests, slot < slots
    tl.store(to_rows + slot, tl.load(rows + slot, mask=live, other=0).to(tl.int64), mask=inside)
    tl.store(to_anchors + slot, tl.load(anchors + slot, mask=live, other=0).to(tl.int64), mask=inside)
    tl.store(to_lengths + slot, tl.load(lengths + slot, mask=live, other=0).to(tl.int64), mask=inside)
    tl.store(to_live + slot, live, mask=inside)
    tl.store(to_budget + tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int64) + drafts, mask=slot == 0)


def stage(
    source: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    target: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    live: torch.Tensor,
    budget: torch.Tensor,
    drafts: int,
) -> None:
    """Copy R values of each of three vectors, zero the rest, mark the first R as live, store the budget.

    Args:
        source: three of [R] integers, contiguous.
        target: three of [S] int64, S >= R.
        live: [S] bool.
        budget: [1] int64.
        drafts: K.
    """
    if not live.is_cuda:
        _stage_reference(source, target, live, budget, drafts)
        return
    slots = live.shape[0]
    _stage_kernel[(1,)](
        *source, *target, live, budget, source[0].shape[0], slots, drafts, BLOCK=power_of_two(slots), num_warps=4
    )


def _stage_reference(
    source: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    target: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    live: torch.Tensor,
    budget: torch.Tensor,
    drafts: int,
) -> None:
    count = source[0].shape[0]
    for values, buffer in zip(source, target, strict=True):
        buffer[:count].copy_(values)
        buffer[count:].zero_()
    live[:count].fill_(True)
    live[count:].fill_(False)
    budget.fill_(drafts)
