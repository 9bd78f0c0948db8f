"""Packing against a slow loop, on hostile shapes; what the plan takes through it."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dspark.kernels.allocate import allocate, survival_of
from dspark.kernels.ragged_pack import ragged_pack
from dspark.types import PackedRows, VerifyPlan
from tests.compare import assert_equal


def _slow(lens: list[int], rows: int) -> list[tuple[int, int]]:
    """(request, column) of each real row."""
    places = [(request, column) for request, length in enumerate(lens) for column in range(length)]
    assert len(places) <= rows
    return places


def _check(packed: PackedRows, lens: list[int], rows: int, window: int, name: str) -> None:
    places = _slow(lens, rows)
    real = len(places)
    for field in ("request", "column", "valid"):
        assert getattr(packed, field).shape == (rows,), f"{name}: shape of {field}"
    assert packed.index.shape == (len(lens), window)
    assert packed.valid.tolist() == [row < real for row in range(rows)], name
    assert list(zip(packed.request.tolist(), packed.column.tolist(), strict=True))[:real] == places, name
    assert set(packed.request[real:].tolist()) <= {len(lens) - 1}, f"{name}: padding belongs to the last request"
    assert all(0 <= column < window for column in packed.column.tolist()), f"{name}: padding indexes a window safely"
    where = {place: row for row, place in enumerate(places)}
    for request, length in enumerate(lens):
        for column in range(window):
            found = int(packed.index[request, column])
            if length:
                assert found == where[request, min(column, length - 1)], f"{name}: index[{request}, {column}]"
            assert 0 <= found < max(rows, 1), f"{name}: padding indexes a row safely"
    assert_equal(packed.lens, torch.tensor(lens, dtype=packed.lens.dtype), f"{name}: lens")
    assert packed.request.dtype == packed.column.dtype == packed.index.dtype == torch.int64


HOSTILE = {
    "one request, its anchor": ([1], 4),
    "one request, full": ([4], 4),
    "window of two": ([1, 2, 2, 1], 2),
    "window of two, full": ([2, 2], 2),
    "all anchors": ([1] * 17, 8),
    "all full": ([8] * 17, 8),
    "full between anchors": ([1, 8, 1, 8, 1], 8),
    "anchor last": ([5, 3, 1], 5),
    "full last": ([1, 1, 5], 5),
    "window of one": ([1, 1, 1], 1),
    "padding requests around others": ([0, 0, 3, 1, 0, 2, 0], 3),
    "padding requests first": ([0, 2], 2),
    "padding requests last": ([2, 0, 0], 2),
    "nothing but padding requests": ([0, 0], 3),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("padding", [0, 1, 2, 7, 300])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_hostile_shapes(name: str, padding: int, dtype: torch.dtype) -> None:
    lens, window = HOSTILE[name]
    rows = sum(lens) + padding
    _check(ragged_pack(torch.tensor(lens, dtype=dtype), rows, window), lens, rows, window, name)


def test_random_shapes() -> None:
    generator = torch.Generator().manual_seed(0)
    for case in range(300):
        requests, window, padding = (int(torch.randint(1, n, (), generator=generator)) for n in (20, 9, 30))
        lens = torch.randint(1, window + 1, (requests,), generator=generator, dtype=torch.int32)
        rows = int(lens.sum()) + padding - 1
        _check(ragged_pack(lens, rows, window), lens.tolist(), rows, window, f"case {case}")


def test_views_are_read_through_their_strides() -> None:
    lens = torch.tensor([3, -7, 1, -7, 2, -7], dtype=torch.int32)
    _check(ragged_pack(lens[::2], 8, 4), [3, 1, 2], 8, 4, "strided")
    assert lens.tolist() == [3, -7, 1, -7, 2, -7], "lengths are only read"


@pytest.mark.parametrize("padding", [0, 1, 5])
def test_a_plan_takes_the_scheduled_places_and_zeros_for_padding(padding: int) -> None:
    lens = torch.tensor([2, 4, 1, 3], dtype=torch.int32)
    windows = 100 * torch.arange(1, 5)[:, None] + torch.arange(4)
    packed = VerifyPlan(lens, windows, ragged_pack(lens, 10 + padding, 4))
    required = [100, 101, 200, 201, 202, 203, 300, 400, 401, 402, *[0] * padding]
    assert_equal(packed.rows_of(windows), torch.tensor(required), "packed")
    assert_equal(packed.rows_of(windows.T.contiguous().T), torch.tensor(required), "packed, transposed windows")
    assert_equal(VerifyPlan(lens, windows).rows_of(windows), windows.flatten(), "full windows")
    assert packed.packed is not None
    back = packed.rows_of(windows)[packed.packed.index]
    inside = torch.arange(4) < lens[:, None]
    assert_equal(back[inside], windows[inside], "back through the index")
    last = windows.gather(1, lens[:, None].to(torch.int64) - 1).expand_as(back)
    assert_equal(back[~inside], last[~inside], "past a window: its last verified row")


def test_padding_takes_nothing_from_poisoned_places() -> None:
    """Places that are not scheduled may hold anything, the last request's included."""
    lens = torch.tensor([1, 2], dtype=torch.int32)
    windows = torch.full((2, 3), -(2**62))
    windows[torch.arange(3) < lens[:, None]] = 5
    assert ragged_pack(lens, 9, 3).take(windows).tolist() == [5, 5, 5, 0, 0, 0, 0, 0, 0]


def test_one_trace_serves_every_value() -> None:
    """What graph capture needs: from confidences to packed rows, no operation and no shape depends on a value."""

    def pack(confidence: torch.Tensor, budget: torch.Tensor) -> tuple[torch.Tensor, ...]:
        packed = ragged_pack(allocate(survival_of(confidence), budget), 14, 4)
        return packed.request, packed.column, packed.valid, packed.index

    traced = make_fx(pack)(torch.rand(3, 3), torch.tensor(5))
    generator = torch.Generator().manual_seed(3)
    for budget in range(10):
        confidence = torch.rand(3, 3, generator=generator)
        for found, required in zip(
            traced(confidence, torch.tensor(budget)), pack(confidence, torch.tensor(budget)), strict=True
        ):
            assert_equal(found, required, f"budget {budget}")
