"""A block that ends its request ends it where plain decoding would, and is looked at once where it does not."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from dspark.host import hooks

VOCABULARY, EOS, STOP = 30, 3, 5
ORIGINAL = getattr(Req.update_finish_state, "__wrapped__", Req.update_finish_state)


class Letters:
    """A tokenizer whose tokens are letters."""

    eos_token_id, additional_stop_token_ids = EOS, None

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(one) - ord("a") for one in text]

    def decode(self, ids: Any) -> str:
        return "".join(chr(ord("a") + one) for one in ids)


def request(limit: int, stops: list[str]) -> Req:
    params = SamplingParams(max_new_tokens=limit, stop_token_ids=[STOP], stop=stops)
    params.normalize(Letters())
    made = Req("r", "", [1, 2], params, vocab_size=VOCABULARY, eos_token_ids={EOS})
    made.tokenizer = Letters()
    return made


def state(one: Req) -> tuple[Any, ...]:
    reason = None if one.finished_reason is None else one.finished_reason.to_json()
    return reason, one.finished_len, list(one.output_ids[: one.finished_len])


@pytest.fixture(autouse=True)
def serves_dspark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "get_server_args", lambda: SimpleNamespace(speculative_algorithm="DSPARK"))


@pytest.mark.parametrize("stops", [[], ["gh"]])
def test_blocks_end_where_single_tokens_do(stops: list[str]) -> None:
    draw, ends = random.Random(0), set[str]()
    for _ in range(400):
        ours, plain = (request(17, stops) for _ in range(2))
        while not ours.finished():
            # 40 and -1 are no tokens: the host exchanges them, and ends the request.
            block = draw.choices(
                [6, 7, 8, 9, EOS, STOP, 40, -1], weights=[20, 20, 20, 20, 2, 2, 1, 1], k=draw.randint(1, 6)
            )
            ours.output_ids.extend(block)
            hooks._finish(ORIGINAL, ours, len(block))
            for token in block:
                if not plain.finished():
                    plain.output_ids.append(token)
                    ORIGINAL(plain, 1)
            assert ours.finished() == plain.finished()
        assert len(ours.output_ids) >= len(plain.output_ids)
        assert state(ours) == state(plain)
        ends.add(type(ours.finished_reason).__name__)
    assert len(ends) == 3, "length, token and text"


def test_a_block_that_goes_on_is_tested_once() -> None:
    calls = []
    one = request(50, [])
    one.output_ids.extend([6, 7, 8])
    hooks._finish(lambda self, count: calls.append(count), one, 3)
    assert calls == [3]
    assert list(one.output_ids) == [6, 7, 8]
