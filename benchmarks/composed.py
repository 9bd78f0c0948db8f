"""Throughput of an arm whose acceptance cannot be simulated live: its step times, times a level's tokens per step.

SGLang's built-in DSPARK simulates accept lengths above 1 only with windows that are never trimmed. So for weights that
accept nothing its step time is measured at several pinned budgets, and each is combined with the tokens that the blocks
of the level commit in that budget when it is spent on the largest survivals. The best budget counts: what a perfect
table would let it choose. Rows made this way are labelled ``composed``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import verdict

_DRAWS = 80_000  # blocks averaged per number of tokens
_STATIC = "dspark-static"


def tokens_per_step(confidence: np.ndarray, accepted: np.ndarray, batch: int, budget: int) -> float:
    """Mean tokens that a batch commits in one step.

    Args:
        confidence: [N, G] of a level's blocks, conditional.
        accepted: [N] drafts that a full window accepts.
        batch: requests R, each with a block drawn at random.
        budget: drafts verified over the batch, spent on the largest survivals (ties to the earlier position).
    """
    gamma, draws = confidence.shape[1], -(-_DRAWS // batch)
    rng = np.random.default_rng(0)
    chosen = rng.integers(0, confidence.shape[0], (draws, batch))
    survival = confidence.cumprod(axis=1)[chosen]  # [draws, R, G], never rising along G
    windows = np.zeros((draws, batch), dtype=np.int64)
    if budget:
        by_position = survival.transpose(0, 2, 1).reshape(draws, -1)
        order = np.argsort(-by_position, axis=1, kind="stable")[:, :budget]
        np.add.at(windows, (np.arange(draws)[:, None], order % batch), 1)
    assert windows.max() <= gamma
    return float((np.minimum(accepted[chosen], windows) + 1).sum(axis=1).mean())


def rows(
    step_times: Sequence[dict[str, Any]], model: str, levels: Sequence[tuple[str, np.ndarray, np.ndarray]]
) -> list[dict[str, Any]]:
    """Rows of every level for the arms whose step times were measured.

    Args:
        step_times: of ``benchmarks.serve``, one per arm, batch and budget.
        model: whose times to take.
        levels: name, confidences [N, G] and accepted drafts [N] of each level.
    """
    found = []
    # Ours is measured live: its step times are there for ``full_windows``.
    mine = [one for one in step_times if one["model"] == model and one["arm"] != verdict.OURS]
    for arm, batch in sorted({(one["arm"], one["batch"]) for one in mine}):
        cells = [one for one in mine if (one["arm"], one["batch"]) == (arm, batch)]
        for level, confidence, accepted in levels:
            found.append(_best(cells, level, confidence, accepted) | {"model": model, "batch": batch, "arm": arm})
    return found


def full_windows(step_times: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per model and batch, the step of our compact server at full windows over that of our static server."""
    full = {
        (one["model"], one["batch"], one["arm"]): one["step_ms"]
        for one in step_times
        if one["budget"] == one["gamma"] * one["batch"]
    }
    return [
        {"model": model, "batch": batch, "compact_over_static": verdict.ratio(step, full[model, batch, _STATIC])}
        for (model, batch, arm), step in full.items()
        if arm == verdict.OURS and (model, batch, _STATIC) in full
    ]


def _best(cells: Sequence[dict[str, Any]], level: str, confidence: np.ndarray, accepted: np.ndarray) -> dict[str, Any]:
    batch = cells[0]["batch"]
    tokens = [tokens_per_step(confidence, accepted, batch, one["budget"]) for one in cells]
    rates = [count / np.median(one["step_ms"]) * 1e3 for count, one in zip(tokens, cells, strict=True)]
    at = int(np.argmax(rates))
    repeats = [tokens[at] / step * 1e3 for step in cells[at]["step_ms"]]
    return {
        "acceptance": level,
        "tok_s": float(rates[at]),
        "tok_s_per_user": float(rates[at]) / batch,
        "mean_window": 1 + cells[at]["budget"] / batch,
        "accept_length": tokens[at] / batch,
        "tok_s_repeats": repeats,
        "draft_off_share": None,
        "labels": ["composed"],
    }
