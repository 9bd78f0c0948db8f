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
    found = _first_difference(steps)
    if found is not None:
        raise HostError(
            f"found ranks that parted in decode step {steps[0]['step']}: {found}; required is the same step on every "
            "rank, or texts are lost; report this line, and serve with --tp-size 1 until it is mended"
        )


def require_equal_start(facts: Sequence[dict[str, Any]]) -> None:
    """Compare what ranks decide from.

    Args:
        facts: names and JSON-like values, one dictionary per rank.

    Raises:
        HostError: a rank started with something else than the first one; names the first difference.
    """
    found = _first_difference(facts)
    if found is not None:
        raise HostError(
            f"found ranks that started differently: {found}; required are the same variables, files, versions and GPUs "
            "on every rank, since each decides for itself; make them equal and start again"
        )


def _first_difference(records: Sequence[dict[str, Any]]) -> str | None:
    """The first part of the first rank that differs from rank 0, in words."""
    for rank, record in enumerate(records[1:], 1):
        if record != records[0]:
            where, first, other = _difference(records[0], record)
            return f"{where} is {first!r} on rank 0 and {other!r} on rank {rank}"
    return None


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
