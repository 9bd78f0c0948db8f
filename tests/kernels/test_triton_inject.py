"""Context KV of all layers in one launch; hostile shapes and types."""

from __future__ import annotations

import pytest
import torch

from dspark.kernels.triton_inject import KvCaches, kv_inject
from tests.compare import Tolerance, assert_close, assert_equal
from tests.kernels.head_cases import angles, check_inject
from tests.kernels.triton_cases import DEVICE


@pytest.mark.parametrize(
    ("rows", "layers", "heads", "dim"),
    [(0, 2, 3, 64), (1, 1, 1, 2), (1, 2, 3, 64), (5, 3, 1, 80), (3, 5, 8, 128), (2, 1, 16, 6)],
)
def test_equals_the_reference(rows: int, layers: int, heads: int, dim: int) -> None:
    check_inject(rows, layers, heads, dim)


@pytest.mark.parametrize("table", [torch.float32, torch.bfloat16])
def test_bfloat16(table: torch.dtype) -> None:
    check_inject(6, 2, 3, 64, torch.bfloat16, table_dtype=table)


def test_a_cache_of_another_type_and_short_slots() -> None:
    check_inject(4, 2, 2, 32, torch.float32, cache_dtype=torch.bfloat16, slot_dtype=torch.int32)


def test_norm_and_rotation_are_those_of_the_paper() -> None:
    """A head of two numbers is a point of the plane: unit root mean square, turned by the position in radians."""
    keys, values = (torch.zeros(4, 1, 2, device=DEVICE) for _ in range(2))
    rows = torch.tensor([[30.0, 40.0, 5.0, 6.0]], device=DEVICE)
    norms = torch.ones(1, 2, device=DEVICE)
    position, slot = torch.tensor([3], device=DEVICE), torch.tensor([2], device=DEVICE)
    kv_inject(rows, norms, 0.0, angles(4, 2), position, slot, KvCaches.of([keys], [values]))
    point = torch.polar(torch.tensor(2.0).sqrt(), torch.tensor(4 / 3).atan() + 3)
    assert_close(keys[2, 0], torch.view_as_real(point), Tolerance(1e-5, 1e-6, "float32 angles"), "turned key")
    assert_equal(values[2, 0], rows[0, 2:], "value")


def test_rows_that_share_the_spare_slot_spoil_no_other() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, 2 * 2 * 4, generator=generator).to(DEVICE)
    found = []
    for slots in ([2, 0, 0], [2, 1, 3]):
        buffers = [[torch.zeros(5, 2, 4, device=DEVICE)] for _ in range(2)]
        at, positions = torch.tensor(slots, device=DEVICE), torch.arange(3, device=DEVICE)
        norms = torch.ones(1, 4, device=DEVICE)
        kv_inject(rows, norms, 1e-6, angles(8, 4), positions, at, KvCaches.of(*buffers))
        found.append(torch.stack([buffers[0][0], buffers[1][0]]))
    assert_equal(found[0][:, 2], found[1][:, 2], "the slot of the first row")
    assert not bool(found[0][:, [1, 3, 4]].any())


def test_caches_that_differ_are_refused() -> None:
    one, other = torch.zeros(4, 1, 2), torch.zeros(5, 1, 2)
    with pytest.raises(AssertionError, match="caches differ"):
        KvCaches.of([one, other], [one, one])
