"""What the worker does with its host's calls, without models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dspark.host import cpu

cpu.install_if_no_gpu()

from sglang.srt.layers.logits_processor import LogitsProcessorOutput  # noqa: E402
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager  # noqa: E402

from dspark.config import Settings  # noqa: E402
from dspark.errors import HostError  # noqa: E402
from dspark.host import rank_group, recording  # noqa: E402
from dspark.host import worker as host_worker  # noqa: E402
from dspark.host.rank_group import Ranks  # noqa: E402
from dspark.host.worker import DSparkWorker  # noqa: E402


class Updated:
    """In place of the target's worker: remembers which updates it was given."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda request: (self.calls.append(name), (True, "done"))[1]


@pytest.fixture
def worker() -> DSparkWorker:
    """A worker whose draft may not be touched: it has none."""
    found = object.__new__(DSparkWorker)
    found._target_worker = Updated()
    return found


@pytest.mark.parametrize("way", ["disk", "ipc", "tensor"])
@pytest.mark.parametrize("without_draft", [False, True])
def test_weight_updates_reach_the_target_once_and_never_the_draft(
    worker: DSparkWorker, way: str, without_draft: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "barrier", lambda group=None: None)
    target: Any = worker._target_worker
    manager = object.__new__(SchedulerWeightUpdaterManager)
    manager.tp_worker, manager.draft_worker = target, worker
    manager.metrics_collector = manager.tp_cpu_group = None
    request = SimpleNamespace(flush_cache=False, disable_draft_model=without_draft)
    answer = getattr(manager, f"update_weights_from_{way}")(request)
    assert answer.success if hasattr(answer, "success") else answer[0]
    assert target.calls == [f"update_weights_from_{way}"]


def test_the_worker_passes_nothing_on_that_it_does_not_define(worker: DSparkWorker) -> None:
    """A call that changes weights must not land on the target because the draft's worker lacks it."""
    for name in ("init_weights_update_group", "release_memory_occupation", "save_sharded_model", "no_such_call"):
        assert not hasattr(worker, name)


def test_features_are_dropped_once_they_are_used() -> None:
    """The scheduler keeps results for a step or two; hidden states of whole prompts must not be kept with them."""
    injected: list[tuple[torch.Tensor, ...]] = []
    prefiller: Any = SimpleNamespace(
        device="cpu",
        server_args=SimpleNamespace(attention_backend="torch_native"),
        _draft_net=SimpleNamespace(inject=lambda *given: injected.append(given)),
    )
    batch = SimpleNamespace(prefix_lens=[2, 0], extend_lens=[1, 3], out_cache_loc=torch.tensor([9, 5, 6, 7]))
    output = LogitsProcessorOutput(next_token_logits=None, hidden_states=torch.arange(8.0).view(4, 2))
    DSparkWorker._inject_prompt(prefiller, batch, SimpleNamespace(logits_output=output))
    assert output.hidden_states is None
    ((features, positions, slots),) = injected
    assert (positions.tolist(), slots.tolist()) == ([2, 0, 1, 2], [9, 5, 6, 7])
    assert features.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_ranks_are_compared_before_anything_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later, a rank that captures something else would leave the others waiting without a word."""
    called: list[str] = []

    def compare(*_: Any) -> None:
        called.append("compared")
        raise HostError("ranks differ")

    monkeypatch.setattr(host_worker, "require_equal_ranks", compare)
    monkeypatch.setattr(host_worker, "build_graphs", lambda *_: called.append("captured"))
    table = SimpleNamespace(req_to_token=torch.zeros(5, 8))
    found: Any = SimpleNamespace(
        model_runner=SimpleNamespace(req_to_token_pool=table),
        _draft_worker=SimpleNamespace(init_cuda_graphs=lambda **_: called.append("captured")),
        **dict.fromkeys(("_ranks", "server_args", "spec", "settings", "_requests", "_calibration")),
        _target_worker=SimpleNamespace(random_seed=3),
    )
    with pytest.raises(HostError, match="ranks differ"):
        DSparkWorker.init_cuda_graphs(found)
    assert called == ["compared"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_recorded_steps_of_several_ranks_are_compared(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """The other rank verifies one row more."""

    class Group:
        is_first_rank = True

        def all_gather_object(self, step: dict[str, Any]) -> list[dict[str, Any]]:
            other = dict(step["requests"][0], verify_len=step["requests"][0]["verify_len"] + 1)
            return [step, step | {"requests": [other]}]

    monkeypatch.setattr(rank_group, "get_tp_group", Group)
    spec: Any = SimpleNamespace(window=3, has_confidence=True)
    recorded = recording.Recording(Settings(record_steps=True), spec, None, calibrated=False, ranks=Ranks(ranks))
    batch: Any = SimpleNamespace(reqs=[SimpleNamespace(rid="a")], forward_iter=7)
    accept = SimpleNamespace(accepted=torch.tensor([1]), committed=torch.tensor([2]), tokens=torch.tensor([[5, 6, 0]]))
    plan = SimpleNamespace(tokens=torch.tensor([[4, 5, 9]]), verify_lens=torch.tensor([2]))
    outcome: Any = SimpleNamespace(
        accept=accept, plan=plan, lengths=torch.tensor([12]), proposal=None, survival=None, ceiling=None
    )
    budgets: Any = SimpleNamespace(plan=None, reason="pinned")
    budget: Any = SimpleNamespace(draft=True, drafts=1, depth=None)
    if ranks == 1:
        recorded.step(batch, budgets, budget, outcome, 2)
        assert recorded.dump()["compared_steps"] == 0
        return
    with pytest.raises(
        HostError, match=r"parted in decode step 7: requests.0.verify_len is 2 on rank 0 and 3 on rank 1"
    ):
        recorded.step(batch, budgets, budget, outcome, 2)
