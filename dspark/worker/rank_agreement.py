"""Ranks of one server each compute the whole step and send no decision to each other: a check that they stay alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dspark.errors import HostError


def require_agreement(steps: Sequence[dict[str, Any]]) -> None:
    """Compare the records of one step.

    Args:
        steps: of :class:`dspark.worker.records.StepRecorder`, one per rank.

    Raises:
        HostError: a rank drafted, scheduled or committed something else than the first one; names the first difference.
    """
    for rank, step in enumerate(steps[1:], 1):
        if step != steps[0]:
            where, first, other = _difference(steps[0], step)
            raise HostError(
                f"found ranks that parted in decode step {steps[0]['step']}: {where} is {first!r} on rank 0 and "
                f"{other!r} on rank {rank}; required is the same step on every rank, or texts are lost; report this "
                "line, and serve with --tp-size 1 until it is mended"
            )


def _difference(first: Any, other: Any, where: str = "") -> tuple[str, Any, Any]:
    """The first part that differs: its name and both values."""
    if isinstance(first, dict) and isinstance(other, dict) and first.keys() == other.keys():
        pairs = [(str(key), first[key], other[key]) for key in first]
    elif isinstance(first, list) and isinstance(other, list) and len(first) == len(other):
        pairs = [(str(place), one, two) for place, (one, two) in enumerate(zip(first, other, strict=True))]
    else:
        return where or "the step", first, other
    name, one, two = next(pair for pair in pairs if pair[1] != pair[2])
    return _difference(one, two, f"{where}.{name}" if where else name)
