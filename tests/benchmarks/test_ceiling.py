"""The ceiling benchmark on a run by hand: the estimator must not see what compact does not see."""

from __future__ import annotations

from typing import Any

from benchmarks.ceiling import compare


def step(
    position: int, rows: int, accepted: int, committed: list[int], ceiling: int, drafts: list[int]
) -> dict[str, Any]:
    return {
        "rid": "a",
        "position": position,
        "verify_len": rows,
        "accepted": accepted,
        "committed": committed,
        "ceiling": ceiling,
        "drafts": drafts,
        "greedy": True,
    }


def test_hidden_steps_are_solved_by_later_tokens() -> None:
    steps = [
        step(0, 1, 1, [5], 3, [5, 6, 9]),  # one more draft would have passed: 6, not 9
        step(1, 4, 1, [6, 7], 2, [6, 0, 0]),
        step(3, 2, 2, [8, 9], 4, [8, 9, 4]),  # nothing follows: not solved
    ]
    (row,) = compare(steps)
    assert (row["low"], row["middle"], row["high"], row["truth"]) == (5.0, 5.0, 5.0, 5)
    assert (row["hidden"], row["unresolved"], row["steps"]) == (2, 1, 3)


def test_a_wrong_truth_is_noticed() -> None:
    steps = [step(0, 1, 1, [5], 4, [5, 6, 9]), step(1, 4, 1, [6, 7], 2, [6, 0, 0])]
    (row,) = compare(steps)
    assert row["middle"] != row["truth"]
