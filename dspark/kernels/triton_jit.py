"""Triton, if it is installed: a machine without it still imports every operator and runs the torch references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
except ImportError:  # a CPU machine
    triton = tl = libdevice = None


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """``triton.jit`` with its options, or the function itself where it can never be launched."""
    if function is None:
        return lambda decorated: jit(decorated, **options)
    return function if triton is None else triton.jit(function, **options)


def constant(value: Any) -> Any:
    """A module-level number that kernels may read."""
    return value if triton is None else tl.constexpr(value)


# Triton's interpreter (TRITON_INTERPRET=1 when a kernel is defined) knows no libdevice.
INTERPRETED = constant(triton is not None and bool(triton.knobs.runtime.interpret))


def dense(*tensors: torch.Tensor | None) -> bool:
    """Whether kernels may index the tensors that there are as flat arrays."""
    return all(tensor is None or tensor.is_contiguous() for tensor in tensors)


def power_of_two(value: int) -> int:
    """The smallest power of two that is at least ``value``, and at least 1."""
    return 1 << max(value - 1, 0).bit_length()


def ceil_div(value: int, divisor: int) -> int:
    """``value / divisor``, rounded up."""
    return -(-value // divisor)
