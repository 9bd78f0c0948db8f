from __future__ import annotations

from types import SimpleNamespace

import torch
from sglang.srt.sampling.sampling_params import SamplingParams

from dspark.host.batch import RequestTable


def prefill(*rows: int, **params: float) -> SimpleNamespace:
    """A prefill batch as far as the table looks at it."""
    indices = torch.tensor(rows)
    reqs = []
    for row in rows:
        sampling = SamplingParams(**params)
        sampling.normalize(None)
        reqs.append(SimpleNamespace(rid=f"request {row}", sampling_params=sampling))
    return SimpleNamespace(reqs=reqs, req_pool_indices=indices, req_pool_indices_cpu=indices)


def test_every_prefill_raises_the_generation_of_its_rows() -> None:
    """Also after the host has flushed its cache and counts from zero again: a reused row must never look fresh."""
    table = RequestTable(6, "cpu", 0, 32)
    table.write(prefill(1, 2))
    table.write(prefill(2, 5))
    assert table.generations.tolist() == [0, 1, 2, 0, 0, 1]


def test_captured_steps_find_the_parameters_by_row() -> None:
    table = RequestTable(6, "cpu", 0, 32, class_of=lambda temperature: int(temperature > 0.5))
    table.write(prefill(1, temperature=0.0))
    table.write(prefill(4, temperature=0.75, top_p=0.5, top_k=7, min_p=0.25))
    found = table.static_sampling(torch.tensor([4, 1]), "general")
    assert found.temperature.tolist() == [0.75, 1.0]
    assert found.greedy.tolist() == [False, True]
    assert (found.top_k[0], found.top_p[0], found.min_p[0]) == (7, 0.5, 0.25)
    assert found.calibration is not None
    assert found.calibration.tolist() == [1, 0]
    assert found.seeds[0] != found.seeds[1]


def test_greedy_steps_need_no_parameters_but_their_class() -> None:
    table = RequestTable(6, "cpu", 0, 32, class_of=lambda temperature: int(temperature < 0.5))
    table.write(prefill(1, 3, temperature=0.0))
    found = table.static_sampling(torch.tensor([3, 1, 0]), "greedy")
    assert found.greedy.tolist() == [True] * 3
    assert found.calibration is not None
    assert found.calibration.tolist() == [1] * 3
    assert RequestTable(6, "cpu", 0, 32).static_sampling(torch.tensor([3]), "greedy").calibration is None
