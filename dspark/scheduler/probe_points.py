"""Which steps are timed before a server takes requests, so that a cost model can be fitted to them.

Every captured size at a short context tells what requests and rows cost; a few batch sizes at long contexts tell what
a context token costs. That is all the model has terms for.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Part = Literal["draft", "verify", "plain"]

SHORT_CONTEXT = 512  # tokens of each request
LONG_CONTEXT = 32768  # at most
LONG_BATCH_TOKENS = 262144  # of all requests of a timed step, at most: more only takes longer
LONG_BATCHES = 4  # batch sizes that are timed at long contexts


@dataclass(frozen=True)
class Point:
    """One part of a step to time."""

    part: Part
    size: int  # of the graph: requests of draft and plain, rows of verify
    requests: int  # R <= the requests that the graph holds
    rows: int  # M verified, R <= M <= R * W; R in parts that verify nothing
    context: int  # tokens of each request

    @property
    def context_tokens(self) -> int:
        return self.requests * self.context

    @property
    def context_rows(self) -> int:
        """Sum over requests of context tokens times verified rows."""
        return self.context * self.rows if self.part == "verify" else 0


def probe_points(
    tiers: Sequence[int], slots: Sequence[int], window: int, *, pool: int, width: int, full_windows: bool
) -> list[Point]:
    """The points for a set of captured graphs.

    Args:
        tiers: rows of the verify graphs, increasing.
        slots: batch sizes of the draft and the plain graphs, increasing.
        window: W.
        pool: KV slots that the points may use.
        width: positions of a request, window included.
        full_windows: verify graphs forward full windows only (cap-accept).
    """
    points = []
    for size in slots:
        context = _context(size, SHORT_CONTEXT, window, pool, width)
        points += [Point("draft", size, size, size, context), Point("plain", size, size, size, context)]
    for tier in tiers:
        requests = _requests(tier, slots[-1], window, full_windows)
        points.append(_verify(tier, requests, window, _context(requests, SHORT_CONTEXT, window, pool, width)))
    for size in _spread(slots, LONG_BATCHES):
        longest = _context(size, min(LONG_CONTEXT, LONG_BATCH_TOKENS // size), window, pool, width)
        for context in (longest // 4, longest):
            if context < 2 * SHORT_CONTEXT:
                continue
            points += [Point("draft", size, size, size, context), Point("plain", size, size, size, context)]
            for rows in (size * window,) if full_windows else (2 * size, size * window):
                at = bisect.bisect_left(tiers, rows)
                if at < len(tiers):
                    points.append(_verify(tiers[at], size, window, context))
    return points


def _verify(tier: int, requests: int, window: int, context: int) -> Point:
    return Point("verify", tier, requests, min(tier, requests * window), context)


def _requests(tier: int, most: int, window: int, full_windows: bool) -> int:
    """Requests for ``tier`` rows: windows that are half full on average, as a scheduler leaves them."""
    per_request = window if full_windows else (window + 1) / 2
    return min(max(1, int(tier / per_request)), most)


def _context(requests: int, wanted: int, window: int, pool: int, width: int) -> int:
    """``wanted``, or what fits: each request needs its own slots, and two windows behind its context."""
    return max(0, min(wanted, width - 2 * window, pool // requests - 2 * window))


def _spread(sizes: Sequence[int], count: int) -> list[int]:
    """At most ``count`` entries of an increasing list, from the first to the last, evenly by place."""
    if len(sizes) <= count:
        return list(sizes)
    return [sizes[round(i * (len(sizes) - 1) / (count - 1))] for i in range(count)]
