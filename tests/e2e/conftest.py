"""Real servers on a CPU. Each is started once; answers of the server without speculation are the yardstick.

With ``pytest -n``, each worker takes whole modules; their servers share the cores evenly.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from dspark.demo.server import ServerProcess, device_args
from tests.conftest import DRAFT
from tests.e2e.jobs import Job, finish_jobs, mixed_traffic, native, scored_jobs

DSPARK = ["--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", str(DRAFT)]
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
SERVER_ENV = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",  # the host then audits its pools after every step
    "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // WORKERS)),  # a server per worker runs at a time
}

LIMIT_PROMPT = "one two three four five six seven eight nine ten " * 20
# Six answers that together need more KV than the small server has.
RETRACTION_TOKENS = 100
RETRACTION_PROMPTS = [
    f"Write down facts about {topic}.\n1." for topic in ("bees", "rivers", "trains", "bread", "snow", "books")
]


@contextlib.contextmanager
def serve(target: Path, *flags: str, module: str = "sglang.launch_server", **env: str) -> Iterator[ServerProcess]:
    # An idle server keeps a core busy, so a test module starts its own and ends it; a small pool leaves memory.
    arguments = ["--model-path", str(target), *device_args("cpu"), "--max-total-tokens", "12000", *flags]
    with ServerProcess(arguments, env=SERVER_ENV | env, timeout_seconds=420, module=module) as server:
        yield server


def run_all(server: ServerProcess, jobs: list[Job], at_once: int) -> dict[str, Any]:
    """Every job's answer by name; an exception of any client fails the test."""
    with ThreadPoolExecutor(at_once) as clients:
        futures = {job.name: clients.submit(job.run, server) for job in jobs}
        return {name: future.result(timeout=900) for name, future in futures.items()}


@pytest.fixture(scope="session")
def plain_answers(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Answers of the same server without speculation; greedy jobs only. One worker asks for all of them."""
    root = tmp_path_factory.getbasetemp()
    path = (root.parent if WORKERS > 1 else root) / "plain_answers.pickle"
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_bytes(pickle.dumps(ask_without_speculation(target)))
        answers: dict[str, Any] = pickle.loads(path.read_bytes())
    return answers


def ask_without_speculation(target: Path) -> dict[str, Any]:
    topics = enumerate(RETRACTION_PROMPTS)
    more = [native(f"retract {n}", text, new_tokens=RETRACTION_TOKENS, ignore_eos=True) for n, text in topics]
    more += finish_jobs()
    more += [native("context limit", LIMIT_PROMPT, new_tokens=70, ignore_eos=True)]
    # Under overlap the host's penalties count every token one step late.
    with serve(target, "--max-running-requests", "8", "--disable-overlap-schedule") as server:
        answers = run_all(server, [job for job in mixed_traffic() if job.greedy] + more, at_once=8)
        # One at a time: the host without speculation stops when only some requests of a batch name tokens for logprobs.
        return answers | run_all(server, scored_jobs(), at_once=1)


def cost_table(folder: Path, **more: Any) -> list[str]:
    """Flags for a table by hand: 10 ms and 1 ms a row, so that one request gets a few rows, and many get few each."""
    rows = [1, 2, 64, 512]
    table = {"bias_seconds": 0.01, "bs_probes": [1], "alpha_seconds": [0.0], "m_probes": rows}
    table |= {"theta_seconds": [0.001 * count for count in rows]} | more
    path = folder / "steep.json"
    path.write_text(json.dumps(table))
    return ["--speculative-dspark-sps-table-path", str(path)]


@pytest.fixture(scope="module")
def overlap_server(
    target: Path, plain_answers: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """DSPARK under overlap scheduling in its default mode (compact), trimming, with small prefill chunks."""
    flags = ["--chunked-prefill-size", "64", "--max-running-requests", "24"]
    flags += cost_table(tmp_path_factory.mktemp("overlap"))
    # The step that a GPU captures: padded batches, tiers, static buffers. The other servers run the eager one.
    env = {"SGLANG_DSPARK_DEBUG_DUMP": "reqs", "SGLANG_DSPARK_STATIC_STEP": "1"}
    with serve(target, *DSPARK, *flags, **env) as server:
        yield server


def record(server: ServerProcess) -> dict[str, Any]:
    """What the worker reports of itself."""
    return server.server_info()["internal_states"][0]["dspark_info_record"]


def steps_of(server: ServerProcess, rid: str) -> list[dict[str, Any]]:
    """The recorded steps of one request, each with its step's own fields."""
    return [
        {name: value for name, value in step.items() if name != "requests"} | request
        for step in record(server)["steps"]
        for request in step["requests"]
        if request["rid"] == rid
    ]


def settle(server: ServerProcess) -> None:
    """Under overlap one more step runs behind the end of the last answer. Its results are taken after the next look at
    the queue, so they are counted when a second question is answered; this is the first."""
    record(server)


def set_state(server: ServerProcess, **state: Any) -> bool:
    """Whether the server accepted an internal state."""
    if "dspark_clear_info_records" in state:
        settle(server)  # or that step would be forgotten in the records and then counted
    done = requests.post(server.url + "/set_internal_state", json={"server_args": state}, timeout=60)
    return done.json() == [True]
