from __future__ import annotations

from pathlib import Path

import pytest

from dspark.drafter.checkpoint import load_draft_spec
from dspark.host.memory import derived_max_running_requests, kv_elements_per_rank

SPEC = load_draft_spec(Path(__file__).resolve().parents[2] / "examples" / "smollm2-135m-dspark")


@pytest.mark.parametrize(("tp_size", "heads"), [(1, 3), (3, 1), (6, 1)])
def test_draft_kv_follows_the_checkpoint(tp_size: int, heads: int) -> None:
    assert kv_elements_per_rank(SPEC, tp_size) == 2 * 3 * heads * 64


def test_request_limit_follows_vocabulary_and_memory() -> None:
    large = SPEC.model_copy(update={"vocab_size": 151_936})
    assert derived_max_running_requests(large, 0) == (4 << 30) // (151_936 * (8 * 34 + 7 * 8))
    assert derived_max_running_requests(large, 140 << 30) > 2 * derived_max_running_requests(large, 0)
    assert derived_max_running_requests(SPEC, 140 << 30) == 512
    assert derived_max_running_requests(SPEC.model_copy(update={"vocab_size": 1 << 30}), 0) == 1
