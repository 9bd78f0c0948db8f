"""Throughput as SGLang logs it: its "Decode batch" lines, read from the server's log.

Every ``--decode-log-interval`` decode steps the scheduler logs how many tokens a second it has generated since its last
line. The same code of the host counts for every arm. A line is used only if it and the line before it had the wanted
batch running, so prefill, ramp-up and the tail in which some requests have finished never count.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_LINE = re.compile(r"Decode batch(?: \[\d+\])?, #running-req: (\d+),.*?gen throughput \(token/s\): ([0-9.]+)")
_ACCEPT = re.compile(r"accept len: ([0-9.]+),")
_WINDOW = re.compile(r"cap len: ([0-9.]+),")
_PREFILL = "Prefill batch"


@dataclass(frozen=True)
class Interval:
    """Some decode steps in a row, all of them with the same number of requests."""

    running: int
    tok_s: float  # generated tokens per second, all requests together
    accept_length: float  # tokens that a request's step committed; 1 without speculation
    window: float | None  # verified rows per request and step, where the host says so

    @property
    def step_seconds(self) -> float:
        """Seconds of one step."""
        return self.running * self.accept_length / self.tok_s


def intervals(text: str, running: int) -> list[Interval]:
    """The usable intervals of a log in which ``running`` requests decoded, the first after each start left out."""
    found: list[Interval] = []
    ready = False
    for line in text.splitlines():
        if _PREFILL in line:
            ready = False
        match = _LINE.search(line)
        if match is None:
            continue
        full = int(match[1]) == running and float(match[2]) > 0
        if full and ready:
            accept, window = _ACCEPT.search(line), _WINDOW.search(line)
            found.append(
                Interval(
                    running,
                    float(match[2]),
                    float(accept[1]) if accept else 1.0,
                    float(window[1]) if window else None,
                )
            )
        ready = full
    return found


def rate(chosen: Sequence[Interval]) -> float:
    """Tokens per second of several intervals of equally many steps: all their tokens over all their seconds."""
    tokens = np.array([one.accept_length for one in chosen])
    return float(tokens.sum() / (tokens / [one.tok_s for one in chosen]).sum())


class DecodeLog:
    """The part of a growing log that was written since a mark."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self.mark()

    def mark(self) -> None:
        """Forget what was written so far."""
        self._offset = self._path.stat().st_size

    def intervals(self, running: int) -> list[Interval]:
        """Usable intervals since the mark."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            return intervals(file.read().decode(errors="replace"), running)
