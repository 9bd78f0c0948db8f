"""From a request's penalties to the table that steps read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.sampling.sampling_params import SamplingParams

from dspark.host.adjust import NEUTRAL, AdjustRows, take
from dspark.types import AdjustTable

VOCAB = 12


def request(prompt: int = 3, output: tuple[int, ...] = (), **params: Any) -> SimpleNamespace:
    """A request as far as this module looks at it."""
    tokenizer = SimpleNamespace(eos_token_id=2, additional_stop_token_ids={5})
    return SimpleNamespace(
        sampling_params=SamplingParams(**params),
        tokenizer=tokenizer,
        origin_input_ids=[1] * prompt,
        output_ids=list(output),
        vocab_size=VOCAB,
    )


def rows(table: AdjustRows, reqs: list[SimpleNamespace], *places: int) -> None:
    indices = torch.tensor(places)
    table.write(reqs, indices, indices)


def test_the_host_sees_a_request_without_its_adjustments() -> None:
    req = request(frequency_penalty=0.5, repetition_penalty=1.2, min_new_tokens=4, logit_bias={"7": 2.0})
    take(req)
    assert {name: getattr(req.sampling_params, name) for name in NEUTRAL} == NEUTRAL
    assert req.sampling_params.logit_bias is None
    take(req)  # admitted once more: nothing is left to take, nothing is lost
    table = AdjustRows(4, VOCAB, "cpu")
    rows(table, [req], 2)
    assert table.table.penalties[:, 2].tolist() == [0.5, 0.0, torch.tensor(1.2).item()]


def test_a_row_holds_what_its_request_asks_for_and_has_said() -> None:
    """Also when it was prefilled again after a retraction; the minimum is a length, prompt included."""
    table = AdjustRows(4, VOCAB, "cpu")
    req = request(prompt=6, output=(4, 4, 9), presence_penalty=1.0, min_new_tokens=8, stop_token_ids=[3, 99, -1])
    req.sampling_params.logit_bias = {"7": 2.0, "0": -1.0}
    take(req)
    plain = request()
    take(plain)
    table.table.counts.fill_(99)
    rows(table, [plain, req], 1, 3)
    stops = torch.tensor([2, 3, 5])
    counts = torch.zeros(VOCAB, dtype=torch.int32)
    counts[4], counts[9] = 2, 1
    counts[stops] += AdjustTable.STOP
    assert table.table.counts[3].tolist() == counts.tolist()
    assert table.table.min_length[3] == 14
    assert table.table.bias[3].nonzero().flatten().tolist() == [0, 7]
    assert table.table.active.tolist() == [False, False, False, True]
    assert table.any_of(torch.tensor([1, 3]))
    assert table.of(torch.tensor([1]), torch.tensor([1])) is None


def test_a_row_that_is_used_again_starts_anew() -> None:
    table = AdjustRows(3, VOCAB, "cpu")
    first = request(output=(1, 2), logit_bias={"7": 2.0})
    take(first)
    rows(table, [first], 1)
    second = request(frequency_penalty=0.1)
    take(second)
    rows(table, [second], 1)
    assert not table.table.bias[1].any()
    assert not table.table.counts[1].any()
    rows(table, [request()], 1)
    assert not table.table.active.any()
