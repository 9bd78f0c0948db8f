"""Ranks that part are told apart, and where."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from dspark.errors import HostError
from dspark.worker.rank_agreement import require_agreement, require_equal_start


def step() -> dict[str, Any]:
    requests = [{"rid": rid, "drafts": [5, 6], "survival": [0.9, 0.5], "verify_len": 2} for rid in ("a", "b")]
    return {"step": 17, "draft": True, "budget": 2, "predicted_seconds": None, "requests": requests}


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_equal_steps_pass(ranks: int) -> None:
    require_agreement([step() for _ in range(ranks)])


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("budget",), 3, "budget is 2 on rank 0 and 3 on rank 2"),
        (("predicted_seconds",), 0.5, "predicted_seconds is None on rank 0 and 0.5"),
        (("requests", 1, "verify_len"), 1, "requests.1.verify_len is 2 on rank 0 and 1 on rank 2"),
        (("requests", 0, "survival", 1), 0.5 + 2**-53, "requests.0.survival.1 is 0.5 on rank 0"),
        (("requests", 0, "drafts"), [5], r"requests.0.drafts is \[5, 6\] on rank 0 and \[5\] on rank 2"),
        (("requests", 0, "drafts"), None, "requests.0.drafts is"),
    ],
)
def test_the_first_difference_is_named(path: tuple[Any, ...], value: Any, named: str) -> None:
    """To the last bit: confidences that differ a little order requests differently one day."""
    steps = [step(), step(), copy.deepcopy(step())]
    part: Any = steps[2]
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    with pytest.raises(HostError, match=f"parted in decode step 17: .*{named}"):
        require_agreement(steps)


def test_what_ranks_start_with_is_compared_too() -> None:
    first = {"settings": {"simulate": None}, "files": {"table": "a1"}, "seed": 4}
    require_equal_start([first, copy.deepcopy(first)])
    with pytest.raises(HostError, match=r"started differently: files.table is 'a1' on rank 0 and 'b2' on rank 1"):
        require_equal_start([first, first | {"files": {"table": "b2"}}])


def test_records_of_other_shapes_differ() -> None:
    other = step()
    del other["requests"][0]["survival"]
    with pytest.raises(HostError, match=r"requests\.0 is"):
        require_agreement([step(), other])
