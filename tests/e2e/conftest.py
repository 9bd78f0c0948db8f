"""Real servers on a CPU. Each is started once; answers of the server without speculation are the yardstick."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dspark.demo.server import ServerProcess, device_args
from tests.conftest import DRAFT
from tests.e2e.jobs import Job, finish_jobs, mixed_traffic, native

DSPARK = ["--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", str(DRAFT)]
CHECKED = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}  # the host then audits its pools after every step

LIMIT_PROMPT = "one two three four five six seven eight nine ten " * 20
# Six answers that together need more KV than the small server has.
RETRACTION_TOKENS = 100
RETRACTION_PROMPTS = [
    f"Write down facts about {topic}.\n1." for topic in ("bees", "rivers", "trains", "bread", "snow", "books")
]


@contextlib.contextmanager
def serve(target: Path, *flags: str, **env: str) -> Iterator[ServerProcess]:
    # An idle server keeps a core busy, so a test module starts its own and ends it; a small pool leaves memory.
    arguments = ["--model-path", str(target), *device_args("cpu"), "--max-total-tokens", "12000", *flags]
    with ServerProcess(arguments, env=CHECKED | env, timeout_seconds=420) as server:
        yield server


def run_all(server: ServerProcess, jobs: list[Job], at_once: int) -> dict[str, Any]:
    """Every job's answer by name; an exception of any client fails the test."""
    with ThreadPoolExecutor(at_once) as clients:
        futures = {job.name: clients.submit(job.run, server) for job in jobs}
        return {name: future.result(timeout=900) for name, future in futures.items()}


@pytest.fixture(scope="session")
def plain_answers(target: Path) -> dict[str, Any]:
    """Answers of the same server without speculation; greedy jobs only."""
    topics = enumerate(RETRACTION_PROMPTS)
    more = [native(f"retract {n}", text, new_tokens=RETRACTION_TOKENS, ignore_eos=True) for n, text in topics]
    more += finish_jobs()
    more += [native("context limit", LIMIT_PROMPT, new_tokens=70, ignore_eos=True)]
    with serve(target, "--max-running-requests", "8") as server:
        return run_all(server, [job for job in mixed_traffic() if job.greedy] + more, at_once=8)


@pytest.fixture(scope="module")
def overlap_server(target: Path, plain_answers: dict[str, Any]) -> Iterator[ServerProcess]:
    """DSPARK under overlap scheduling, with small prefill chunks and step records."""
    with serve(
        target, *DSPARK, "--chunked-prefill-size", "64", "--max-running-requests", "24", SGLANG_DSPARK_DEBUG_DUMP="reqs"
    ) as server:
        yield server
