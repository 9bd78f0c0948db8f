"""Sampling parameters of a batch from tables by request row: one launch instead of one per parameter."""

from __future__ import annotations

import torch

from dspark.kernels.triton_jit import dense, jit, power_of_two, tl


@jit
def _gather_kernel(rows, floats, integers, table_rows, to_floats, to_integers, to_greedy, slots, BLOCK: tl.constexpr):
    slot, table = tl.arange(0, BLOCK), tl.program_id(0)
    inside = slot < slots
    at = tl.load(rows + slot, mask=inside, other=0) + table.to(tl.int64) * table_rows
    to = table * slots + slot
    tl.store(to_floats + to, tl.load(floats + at, mask=inside, other=0.0), mask=inside)
    found = tl.load(integers + at, mask=inside, other=0)
    tl.store(to_integers + to, found, mask=inside)
    if table == 0:
        tl.store(to_greedy + slot, found <= 1, mask=inside)


def gather_rows(
    rows: torch.Tensor,
    floats: torch.Tensor,
    integers: torch.Tensor,
    to_floats: torch.Tensor,
    to_integers: torch.Tensor,
    greedy: torch.Tensor,
) -> None:
    """Take the columns ``rows`` of both tables, and say which requests are greedy.

    Nothing is allocated and nothing waits for the device, so a captured graph can run it.

    Args:
        rows: [S] int64, S >= 1.
        floats: [K, N] float32, contiguous.
        integers: [K, N] int64, contiguous; top-k comes first.
        to_floats, to_integers: [K, S] out, contiguous.
        greedy: [S] bool out, top-k is at most 1.
    """
    launch = gather_rows_triton if rows.is_cuda else gather_rows_reference
    launch(rows, floats, integers, to_floats, to_integers, greedy)


def gather_rows_reference(
    rows: torch.Tensor,
    floats: torch.Tensor,
    integers: torch.Tensor,
    to_floats: torch.Tensor,
    to_integers: torch.Tensor,
    greedy: torch.Tensor,
) -> None:
    """``gather_rows`` in torch."""
    to_floats.copy_(floats[:, rows])
    to_integers.copy_(integers[:, rows])
    greedy.copy_(to_integers[0] <= 1)


def gather_rows_triton(
    rows: torch.Tensor,
    floats: torch.Tensor,
    integers: torch.Tensor,
    to_floats: torch.Tensor,
    to_integers: torch.Tensor,
    greedy: torch.Tensor,
) -> None:
    """``gather_rows`` with a program for each row of the tables."""
    count, slots = to_floats.shape
    assert floats.shape == integers.shape
    assert to_floats.shape == to_integers.shape
    assert dense(rows, floats, integers, to_floats, to_integers, greedy)
    _gather_kernel[(count,)](
        rows, floats, integers, floats.shape[1], to_floats, to_integers, greedy, slots, BLOCK=power_of_two(slots)
    )
