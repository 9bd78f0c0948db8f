"""Three ranks on a CPU: every one drafts, schedules and accepts for itself, and none may part from the others.

Each step's record, with every draft, confidence, window and token, is compared across the ranks by the server itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark.demo.server import ServerProcess
from tests.e2e.conftest import DSPARK, cost_table, record, run_all, serve, set_state
from tests.e2e.jobs import mixed_traffic
from tests.e2e.reference_steps import assert_reference_steps

RANKS = 3  # divides the heads, KV heads and layers' widths of the small models
NAMES = (
    "chat stream", "chat stop stream", "chat sampled top_p", "completion stream", "completion sampled", "two tokens",
    "long prompt", "shared prefix", "twice the long prompt", "min_p", "stop token", "presence penalty",
    "both penalties", "regex", "json", "regex sampled", "penalty sampled", "aborted long",
)  # fmt: skip
"""Some of every kind; three processes share two cores."""


@pytest.fixture(scope="module")
def ranks_server(
    target: Path, plain_answers: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """Trimming by a table, overlapped, on the padded step."""
    flags = ["--tp-size", str(RANKS), "--chunked-prefill-size", "64", "--max-running-requests", "12"]
    flags += cost_table(tmp_path_factory.mktemp("ranks"))
    # The host wants a memory node per rank, or to be told the cores; without its CPU engine it binds none.
    cores = sorted(os.sched_getaffinity(0))
    env = {
        "SGLANG_DSPARK_DEBUG_DUMP": "reqs",
        "SGLANG_DSPARK_STATIC_STEP": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(cores[rank % len(cores)]) for rank in range(RANKS)),
    }
    with serve(target, *DSPARK, *flags, module="tests.e2e.cpu_ranks", **env) as server:
        yield server


def test_mixed_traffic_is_lossless_and_ranks_agree(ranks_server: ServerProcess, plain_answers: dict[str, Any]) -> None:
    """Greedy texts are those of one rank without speculation; sampled ones, grammars and aborts run beside them."""
    jobs = [job for job in mixed_traffic() if job.name in NAMES]
    assert len(jobs) == len(NAMES)
    answers = run_all(ranks_server, jobs, at_once=12)
    differing = [job.name for job in jobs if job.greedy and answers[job.name] != plain_answers[job.name]]
    assert differing == [], {name: (answers[name], plain_answers[name]) for name in differing}
    assert ranks_server.healthy()
    assert not re.search("memory leak|Traceback", ranks_server.log_path.read_text())
    found = record(ranks_server)
    steps = found["steps"]
    assert found["ranks"] == RANKS
    assert found["compared_steps"] == len(steps) > 20
    windows = np.concatenate([[one["verify_len"] for one in step["requests"]] for step in steps if step["draft"]])
    assert len(set(windows)) >= 4, "windows that are always the same prove little"
    assert record(ranks_server)["schedule"]["relay"]["fresh"] > 0


def test_steps_equal_the_reference_loop(ranks_server: ServerProcess, target: Path) -> None:
    """Of one process: a draft whose heads, channels or vocabulary are put together wrongly would accept less."""
    assert set_state(ranks_server, dspark_clear_info_records=True)
    questions = [("Write a Python function that reverses a string.", 1.0), ("What is 12 times 12?", 0.5)]
    assert_reference_steps(ranks_server, target, questions)
