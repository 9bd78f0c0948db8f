"""Which steps a server's graphs hold; all others run eagerly, and the counters say why."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from dspark.config import Settings
from dspark.cuda_graph.static import StepBuffers
from dspark.drafter.checkpoint import load_draft_spec
from dspark.host import cpu
from dspark.types import StepBudget
from tests.conftest import DRAFT

cpu.install_if_no_gpu()

from dspark.host import graphs as host_graphs  # noqa: E402
from dspark.host import rank_group  # noqa: E402
from dspark.host.graphs import StepGraphs, build_graphs  # noqa: E402
from dspark.host.rank_group import Ranks  # noqa: E402

BATCH, SPLIT, PIN = "batch larger than any graph", "general step larger than any graph", "pinned budget in cap-accept"


def graphs(full_windows: bool = False, split_tiers: tuple[int, ...] = (8, 16)) -> StepGraphs:
    """Of batches to 8; steps of the general kind to 16 rows, or 4 requests without a draft."""
    found = StepGraphs.__new__(StepGraphs)
    found.buffers = StepBuffers(8, 4, "cpu")
    found._split_tiers, found._split_slots, found._full_windows = list(split_tiers), [2, 4], full_windows
    return found


@pytest.mark.parametrize(
    ("requests", "budget", "kind", "reason"),
    [
        (8, StepBudget(True, 24, 32, packed=True), "sampled", None),
        (9, StepBudget(True, 0, 12, packed=True), "greedy", BATCH),
        (9, StepBudget(False, 0, 12, packed=True), "general", BATCH),
        (
            4,
            StepBudget(True, 12, 24, packed=True),
            "general",
            None,
        ),  # its 16 rows, not those of the other ladder's tier
        (5, StepBudget(True, 12, 24, packed=True), "general", SPLIT),
        (4, StepBudget(False, 0, 8, packed=True), "general", None),
        (5, StepBudget(False, 0, 8, packed=True), "general", SPLIT),
    ],
)
def test_what_no_graph_holds_is_named(requests: int, budget: StepBudget, kind: str, reason: str | None) -> None:
    batch = SimpleNamespace(reqs=[None] * requests)
    assert graphs().refusal(batch, budget, kind) == reason


def test_cap_accept_replays_full_windows_only() -> None:
    batch, full = SimpleNamespace(reqs=[None] * 4), StepBudget(True, 5, 16, packed=False)
    pinned, off = StepBudget(True, 5, 9, packed=True), StepBudget(False, 0, 4, packed=True)
    found = graphs(full_windows=True)
    assert [found.refusal(batch, budget, "greedy") for budget in (full, pinned, off)] == [None, PIN, None]


def test_without_room_for_their_logits_all_general_steps_are_eager() -> None:
    batch, budget = SimpleNamespace(reqs=[None]), StepBudget(True, 0, 1, packed=True)
    assert graphs(split_tiers=()).refusal(batch, budget, "general") == SPLIT


@pytest.mark.parametrize(("free", "most"), [([100], 100), ([1000], 256), ([0], 1), ([100, 60, 1000], 60)])
def test_distributions_fit_a_quarter_of_the_free_memory(
    monkeypatch: pytest.MonkeyPatch, free: list[int], most: int
) -> None:
    """Of the rank with the least: each sees memory of its own, and all capture the same batches."""
    spec = load_draft_spec(DRAFT)
    captured: list[int] = []

    def record(*_: object, max_requests: int, tiers: list[int], **__: object) -> SimpleNamespace:
        captured.append(max_requests)
        assert tiers[-1] == max_requests * spec.window
        return SimpleNamespace(capture=lambda: None)

    monkeypatch.setattr(host_graphs, "StepGraphs", record)
    decode = SimpleNamespace(backend="full", max_bs=256)
    config, shared = SimpleNamespace(decode=decode), SimpleNamespace()
    args = SimpleNamespace(cuda_graph_config=config, device="cuda", tp_size=len(free), max_running_requests=512)
    for rank in range(len(free)):
        free_on_ranks(monkeypatch, [4 * (requests * 4 * spec.gamma * spec.vocab_size) for requests in free], rank)
        assert build_graphs(args, spec, Settings(), shared, shared, shared, None) is not None
    assert captured == [most] * len(free)


@pytest.mark.parametrize(("free", "most"), [([20], 16), ([100], 32), ([3], 0), ([100, 20, 40], 16)])
def test_logits_fit_an_eighth_of_the_free_memory(monkeypatch: pytest.MonkeyPatch, free: list[int], most: int) -> None:
    """Of the rank with the least: general steps of more rows run eagerly, on all ranks alike."""
    spec = load_draft_spec(DRAFT)
    for rank in range(len(free)):
        free_on_ranks(monkeypatch, [8 * rows * 4 * spec.vocab_size for rows in free], rank)
        found = graphs(split_tiers=(4, 8, 16, 32))
        found._spec, found._device, found._ranks = spec, torch.device("cuda"), Ranks(len(free))
        found._tiers = [*found._split_tiers]
        found._fit_split()
        assert found._most_split(draft=True) == most


@pytest.mark.parametrize(("ranks", "waits"), [(1, []), (3, ["wait"])])
def test_ranks_warm_up_together(monkeypatch: pytest.MonkeyPatch, ranks: int, waits: list[str]) -> None:
    """Once per graph, while nothing is on the device, and not inside of a capture."""
    done: list[str] = []

    @contextlib.contextmanager
    def recording(*_: object, **__: object) -> Iterator[None]:
        done.append("recording")
        yield
        done.append("recorded")

    fakes = {"graph_pool_handle": object, "current_stream": object, "CUDAGraph": object, "graph": recording}
    for name, fake in (fakes | {"synchronize": lambda: done.append("synchronize")}).items():
        monkeypatch.setattr(torch.cuda, name, fake)
    group = SimpleNamespace(barrier=lambda: done.append("wait"))
    monkeypatch.setattr(rank_group, "get_tp_group", lambda: group)
    found = host_graphs._graph_set(torch.device("cuda"), Ranks(ranks))
    for _ in range(2):
        found.capture("a", lambda: done.append("call"))
    assert done == 2 * ["synchronize", *waits, "call", "synchronize", "recording", "call", "recorded"]


def free_on_ranks(monkeypatch: pytest.MonkeyPatch, free: list[int], rank: int) -> None:
    """``free`` bytes on each rank, seen by one of them: its own, and what it is told when it tells its own."""

    def gather(own: int) -> list[int]:
        assert own == free[rank]
        return free

    monkeypatch.setattr(host_graphs, "free_bytes", lambda device: free[rank])
    monkeypatch.setattr(rank_group, "get_tp_group", lambda: SimpleNamespace(all_gather_object=gather))
