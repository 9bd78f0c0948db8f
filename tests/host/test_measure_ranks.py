"""Step times with several ranks: three processes over gloo whose clocks and disks differ, and one table."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dspark.config import Settings
from dspark.cuda_graph import timing
from dspark.cuda_graph.capture import EagerGraphs
from dspark.cuda_graph.ladder import slot_ladder, tier_ladder
from dspark.cuda_graph.static import StepBuffers
from dspark.host import cpu
from dspark.scheduler.cost_file import to_json
from tests.host.test_measure import HERE, MOST, WINDOW, model_runner, server_args

cpu.install_if_no_gpu()

from dspark.host import measure, rank_group  # noqa: E402
from dspark.host.graphs import StepGraphs  # noqa: E402
from dspark.host.rank_group import Ranks  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA does not survive a fork")

PATIENCE_SECONDS = 60  # with ranks that wait for one another for ever; they need three
TIERS = tier_ladder(MOST, WINDOW).tolist()

# Seconds of a verify by its rows, as each rank's clock has it. By the first one the tiers below 8 buy nothing; by the
# second one all do, and by the last one those from 16 on. They also call for 7, 3 to 7, and 3 repeats.
VERIFY: list[Callable[[int], float]] = [
    lambda rows: 1e-3 * max(rows, 8) / 8,
    lambda rows: 1e-3 * (1 + rows),
    lambda rows: 2e-2 * max(rows, 16) / 16,
]
STARTS = {
    "measured": ["a", "b", "c"],  # folders of the ranks, all empty
    "read": ["a", "b", "c"],  # now the first rank has a table
    "not of the first": ["b", "a", "a"],  # the others have one
    "off": ["off", "b", "measure"],
}


class Rank:
    """Graphs of one rank whose replays exchange something and set its clock forward."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.graphs = found = StepGraphs.__new__(StepGraphs)
        found._tiers, found._captured, found._slots = list(TIERS), list(TIERS), slot_ladder(MOST)
        found._full_windows, found.pruned, found.depths = False, [], []
        found._device, found.buffers = torch.device("cpu"), StepBuffers(MOST, WINDOW, "cpu")
        found._graphs, found._ranks = EagerGraphs(), Ranks(ranks)
        self.rank, self.now, self.replays = rank, 0.0, list[str]()
        for part, sizes in {"draft": found._slots, "plain": found._slots, "verify": TIERS}.items():
            for size in sizes:
                for kind in ("greedy", "sampled"):
                    found._graphs.capture((part, size, kind), partial(self._replay, part, size))

    def _replay(self, part: str, size: int) -> None:
        self.replays.append(f"{part} {size}")
        if self.graphs._ranks.size > 1:
            group = rank_group.get_tp_group().cpu_group
            torch.distributed.all_reduce(torch.tensor([float(len(self.replays))]), group=group)
        rows = VERIFY[self.rank](size) if part == "verify" else 1e-3 * (1 + self.rank) + 1e-5 * size
        self.now += rows + 1e-9 * int(self.graphs.buffers.lengths.sum())

    def start(self, setting: str) -> dict[str, Any]:
        """Measure and prune as a worker does."""
        table = torch.arange(2 * (MOST + 1) * 64, dtype=torch.int32).view(MOST + 1, -1)
        args, runner = server_args(tp_size=self.graphs._ranks.size), model_runner(table)
        cost = measure.measured_cost(args, None, Settings(cost_tables=setting), self.graphs, runner, runner)  # type: ignore[arg-type]
        if cost is not None:
            self.graphs.prune(cost)
        found = {"table": None if cost is None else to_json(cost), "source": None if cost is None else cost.source}
        return found | {"tiers": self.graphs.tiers, "pruned": self.graphs.pruned, "replays": self.replays}


def run_starts(rank: int, ranks: int, folder: Path, starts: Sequence[Sequence[str]], patch: Any) -> list[Any]:
    """Every start of one rank, on graphs of its own; the names of folders are below ``folder``."""
    patch.setattr(measure, "deployment", lambda *_: HERE)
    found = []
    for settings in starts:
        one = Rank(rank, ranks)
        patch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda one=one: one.now))
        setting = settings[rank]
        found.append(one.start(setting if len(setting) > 1 else str(folder / setting)))
    return found


def serve_rank(rank: int, folder: Path, starts: Sequence[Sequence[str]]) -> None:
    """In a process of its own, with the host's own groups; what it finds is left in a file."""
    from sglang.srt.distributed import parallel_state

    from tests.e2e import cpu_ranks

    cpu_ranks.install()
    parallel_state.init_distributed_environment(
        len(VERIFY), rank, f"file://{folder}/store", rank, "gloo", timeout=PATIENCE_SECONDS
    )
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=len(VERIFY), backend="gloo")
    found = run_starts(rank, len(VERIFY), folder, starts, pytest.MonkeyPatch())
    (folder / f"{rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Any]]]:
    """The folder, and what the ranks found at each start."""
    folder = tmp_path_factory.mktemp("ranks")
    context = multiprocessing.get_context("fork")  # the host's modules are loaded already
    arguments = folder, list(STARTS.values())
    processes = [
        context.Process(target=serve_rank, args=(rank, *arguments), daemon=True) for rank in range(len(VERIFY))
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE_SECONDS)
        process.kill()  # nothing, once it is over
    assert [process.exitcode for process in processes] == [0] * len(VERIFY), "ranks wait for one another, or failed"
    by_rank = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(len(VERIFY))]
    return folder, dict(zip(STARTS, zip(*by_rank, strict=True), strict=True))


@pytest.mark.parametrize("start", STARTS)
def test_ranks_replay_the_same_and_end_with_the_same_table(starts: Any, start: str) -> None:
    first, *others = starts[1][start]
    assert all(other == first for other in others)


@pytest.mark.parametrize("start", ["measured", "not of the first"])
def test_the_table_is_that_of_the_first_ranks_clock(
    starts: Any, start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = starts[1][start][0]
    (alone,) = run_starts(0, 1, tmp_path, [["measure"]], monkeypatch)
    assert found == alone
    assert found["pruned"] == [tier for tier in TIERS if tier < 8]
    others = [run_starts(rank, 1, tmp_path, [["measure"] * 3], monkeypatch)[0] for rank in (1, 2)]
    assert [other["pruned"] for other in others] == [[], [tier for tier in TIERS if tier < 16]]
    assert all(len(other["replays"]) < len(found["replays"]) for other in others), "clocks that want as many repeats"


def test_the_first_rank_reads_for_all(starts: Any) -> None:
    found, before = starts[1]["read"][0], starts[1]["measured"][0]
    assert found["replays"] == []
    assert found["source"] == "measured at an earlier start"
    assert found["pruned"] == before["pruned"]
    assert json.loads(found["table"])["theta_seconds"] == json.loads(before["table"])["theta_seconds"]


def test_the_first_rank_alone_writes(starts: Any) -> None:
    """Its folder of each start; the last rank never was the first one."""
    assert {path.parent.name for path in starts[0].glob("*/*")} == {"a", "b"}


def test_the_first_rank_says_whether_anything_is_measured(starts: Any) -> None:
    assert starts[1]["off"][0] == {"table": None, "source": None, "tiers": TIERS, "pruned": [], "replays": []}
