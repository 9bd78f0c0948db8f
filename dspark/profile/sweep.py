"""The sweep of a profile: which cells, and how the steps of each are taken."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dspark.errors import HostError
from dspark.profile.samples import Cell
from dspark.profile.server import Facts, Load, ProfiledServer

_POLL_SECONDS = 0.5
_WARM_UP = 6  # steps at the full batch that are not taken
_RAMP = 48  # steps that the first requests may make while the last ones are prefilled
_TOKENS = (100, 1000)  # ids of the prompts, in every vocabulary
_SEED = 7


@dataclass(frozen=True)
class Point:
    """A cell that is to be measured."""

    requests: int
    fraction: float
    prompt_tokens: int

    def rows(self, gamma: int) -> int:
        """Rows that the pin asks for."""
        return self.requests + int(self.fraction * self.requests * gamma)


@dataclass(frozen=True)
class Effort:
    """How long a cell is measured."""

    steps: int
    timeout_seconds: float


def default_batches(facts: Facts) -> list[int]:
    """Powers of two up to what the server takes at once, and that."""
    powers = [2**k for k in range(facts.max_requests.bit_length()) if 2**k <= facts.max_requests]
    return sorted({*powers, facts.max_requests})


def default_fractions(gamma: int) -> list[float]:
    """Windows of 1, 2, 4, .. and gamma + 1 rows per request: the rows of different batch sizes then coincide.

    A server computes floor(f * R * gamma) in floats, so each fraction is a little more than its share.
    """
    windows = sorted({*(2**k for k in range(gamma.bit_length()) if 2**k <= gamma + 1), gamma + 1})
    return [min(1.0, (window - 1) / gamma + 1e-6) for window in windows]


def grid(
    facts: Facts, batches: Sequence[int], fractions: Sequence[float], contexts: Sequence[int], steps: int
) -> tuple[list[Point], list[str]]:
    """Points in the order in which they are measured, and why others are not.

    One prompt of a batch is shared by all its fractions, so that all but the first find it in the prefix cache.
    """
    points, skipped = [], []
    for context in contexts:
        for batch in batches:
            needed = context + answer_tokens(facts.provenance.gamma, steps)
            where = f"{batch} requests of {context} tokens"
            if batch > facts.max_requests:
                skipped.append(f"{where}: the server takes {facts.max_requests} requests at once")
            elif needed > facts.max_context:
                skipped.append(f"{where}: with their answers {needed} tokens, the server takes {facts.max_context}")
            elif batch * needed > facts.capacity:
                skipped.append(f"{where}: with their answers {batch * needed} tokens, the KV pool has {facts.capacity}")
            else:
                points += [Point(batch, fraction, context) for fraction in sorted(fractions, reverse=True)]
    return points, skipped


def answer_tokens(gamma: int, steps: int) -> int:
    """Tokens that outlast the steps of a cell even if every draft is accepted."""
    return (_WARM_UP + _RAMP + steps) * (gamma + 1)


def measure(server: ProfiledServer, facts: Facts, point: Point, effort: Effort, temperature: float) -> Cell:
    """Steps of one cell.

    Raises:
        HostError: the server refused the requests, or did not make enough steps with all of them in time.
    """
    randoms = random.Random(f"{_SEED}-{point.requests}-{point.prompt_tokens}")  # the same for every fraction
    prompts = [[randoms.randrange(*_TOKENS) for _ in range(point.prompt_tokens)] for _ in range(point.requests)]
    server.pin(point.fraction)
    server.clear()
    load = server.load(prompts, answer_tokens(facts.provenance.gamma, effort.steps), temperature)
    try:
        steady = _wait(server, load, point, effort)
    finally:
        server.abort()
        load.join()
        server.pin(None)
    rows = {int(one["num_verify_tokens"]) for one in steady}
    if len(rows) != 1 or min(rows) < point.rows(facts.provenance.gamma):
        raise HostError(
            f"found steps of {sorted(rows)} rows with {point.requests} requests pinned to "
            f"{point.rows(facts.provenance.gamma)}; required is one number that holds them; send the server no other "
            "requests or pins meanwhile"
        )
    return Cell(
        requests=point.requests,
        fraction=point.fraction,
        prompt_tokens=point.prompt_tokens,
        rows=rows.pop(),
        context_tokens=[float(one["context_tokens"]) for one in steady],
        seconds=[float(one["step_cpu_ms"]) / 1e3 for one in steady],
    )


def _wait(server: ProfiledServer, load: Load, point: Point, effort: Effort) -> list[dict[str, Any]]:
    """Records of at least ``effort.steps`` steps with all requests, after the warm-up."""
    end = time.monotonic() + effort.timeout_seconds
    while True:
        over = load.over
        time.sleep(_POLL_SECONDS)
        steady = steady_records(server.records(), point.requests)
        if len(steady) >= effort.steps:
            return steady[-effort.steps :] if not over else steady[: effort.steps]
        if load.error is not None:
            raise HostError(f"found a load that {server.url} refused: {load.error}")
        if over or time.monotonic() > end:
            raise HostError(
                f"found {len(steady)} steps with all of {point.requests} requests "
                f"{'before they ended' if over else f'within {effort.timeout_seconds:.0f} s'}; required are "
                f"{effort.steps}; is the server used by others? else ask for fewer --steps or a longer --timeout"
            )


def steady_records(records: Sequence[dict[str, Any]], requests: int) -> list[dict[str, Any]]:
    """Timed records of steps with all requests whose step before had them too, without the first ones."""
    counts = np.array([one["num_running_reqs"] for one in records], dtype=np.int64)
    followed = (counts == requests) & (np.concatenate([[0], counts[:-1]]) == requests)
    chosen = [one for one, kept in zip(records, followed, strict=True) if kept and one["step_cpu_ms"] is not None]
    return chosen[_WARM_UP:]
