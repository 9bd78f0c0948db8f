"""Grammar masks on packed rows, and logprobs in the form in which the host takes them apart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarObject
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from dspark.host.extras import StepExtras, attach_prefill
from dspark.kernels.ragged_pack import ragged_pack
from tests.compare import FLOAT_32, assert_close, assert_equal

VOCAB, WINDOW = 40, 3
END = 35  # of thinking


class Ascending:
    """Allows the next number after the last token only; ends with the last one."""

    def __init__(self, last: int) -> None:
        self.tokens = [last]

    def accept_token(self, token: int) -> None:
        assert token == self.tokens[-1] + 1
        self.tokens.append(token)

    def rollback(self, count: int) -> None:
        del self.tokens[-count:]

    def is_terminated(self) -> bool:
        return self.tokens[-1] == VOCAB - 1

    def allocate_vocab_mask(self, vocab_size: int, batch_size: int, device: str) -> torch.Tensor:
        return torch.full((batch_size, -(-vocab_size // 32)), -1, dtype=torch.int32)

    def fill_vocab_mask(self, mask: torch.Tensor, row: int) -> None:
        token = self.tokens[-1] + 1
        mask[row] = 0
        bit = 1 << (token % 32)
        mask[row, token // 32] = bit - (1 << 32) if bit == 1 << 31 else bit


def batch_of(grammars: list[Any], **fields: Any) -> Any:
    reqs = [SimpleNamespace(grammar=grammar, return_logprob=False) for grammar in grammars]
    info = SimpleNamespace(vocab_size=VOCAB, grammar_mask=None)
    given = {"reqs": reqs, "has_grammar": any(grammars), "return_logprob": False, "sampling_info": info}
    return SimpleNamespace(**given | fields)


def test_each_row_is_masked_by_the_text_before_it() -> None:
    """A legal draft, one that breaks off, a request without a grammar, one whose grammar ends inside the window."""
    windows = torch.tensor([[7, 8, 9], [3, 20, 5], [1, 2, 3], [37, 38, 39]])
    grammars = [Ascending(7), Ascending(3), None, Ascending(37)]
    lens = torch.tensor([3, 2, 1, 3], dtype=torch.int32)
    packed, advanced = ragged_pack(lens, 11, WINDOW), []
    logits = torch.randn(11, VOCAB, generator=torch.Generator().manual_seed(1))
    found = logits.clone()
    extras = StepExtras(batch_of(grammars), lambda: advanced.append(True))
    extras.drafted(windows)
    extras.mask(found, packed, WINDOW)
    assert advanced == [True]
    only = {0: 8, 1: 9, 2: 10, 3: 4, 6: 38, 7: 39}  # packed row -> the only token; rows after an illegal draft: any
    for row in range(9):
        if row in only:
            required = logits[row].masked_fill(torch.arange(VOCAB) != only[row], -torch.inf)
            assert_equal(found[row], required, f"row {row}")
    assert_equal(found[5], logits[5], "no grammar")
    assert_equal(found[8], logits[8], "after the end of the grammar")
    assert [g.tokens for g in grammars if g] == [[7], [3], [37]]


def only(logits: torch.Tensor, token: int) -> torch.Tensor:
    """[V] logits that leave one token."""
    return logits.masked_fill(torch.arange(VOCAB) != token, -torch.inf)


@pytest.mark.parametrize("window", [1, WINDOW])
def test_a_budget_of_no_drafts_leaves_a_masked_row_each(window: int) -> None:
    """One row per request: of a whole block (drafts that nobody verifies), and of a step without a draft."""
    windows = torch.tensor([[7, 8, 9], [1, 2, 3], [3, 20, 5]])[:, :window]
    packed = ragged_pack(torch.ones(3, dtype=torch.int32), 4, window)
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(4))
    found, extras = logits.clone(), StepExtras(batch_of([Ascending(7), None, Ascending(3)]))
    extras.drafted(windows)
    extras.mask(found, packed, window)
    required = torch.stack([only(logits[0], 8), logits[1], only(logits[2], 4)])
    assert_equal(found[:3], required, "masked rows")


@pytest.mark.parametrize("draft", [END, 8])
def test_a_grammar_waits_for_the_end_of_thinking(draft: int) -> None:
    """Drafts may hold the marker: rows behind it are masked, those before it are not, and nothing stays advanced."""
    grammar = ReasonerGrammarObject(Ascending(4), [END])
    grammar.maybe_init_reasoning(True)
    logits = torch.randn(WINDOW, VOCAB, generator=torch.Generator().manual_seed(5))
    found, extras = logits.clone(), StepExtras(batch_of([grammar]))
    for _ in range(2):  # the second look at the same window finds the grammar where the first one did
        found.copy_(logits)
        extras.drafted(torch.tensor([[30, draft, 5]]))
        extras.mask(found, None, WINDOW)
        required = logits.clone()
        if draft == END:
            required[1], required[2] = only(logits[1], 5), only(logits[2], 6)
        assert_equal(found, required, "rows before and behind the marker")
    assert grammar.grammar.tokens == [4]
    assert (grammar.tokens_in_think, grammar.tokens_after_end) == (0, -1)


def test_logprobs_come_for_each_place_of_the_requests_that_want_them() -> None:
    batch = batch_of(
        [None] * 3, return_logprob=True, top_logprobs_nums=[0, 2, 0], token_ids_logprobs=[[4, 5], None, None]
    )
    batch.reqs[0].return_logprob = batch.reqs[1].return_logprob = True
    batch.sampling_info.is_all_greedy = False
    batch.sampling_info.temperatures = torch.tensor([[0.5], [2.0], [1.0]])
    logits = torch.randn(9, VOCAB, generator=torch.Generator().manual_seed(2))
    index = torch.arange(9).flip(0).view(3, WINDOW)
    tokens = torch.randint(VOCAB, (3, WINDOW), generator=torch.Generator().manual_seed(3))
    extras, output = StepExtras(batch), LogitsProcessorOutput(next_token_logits=None)
    extras.keep(logits, index)
    kept = logits.clone()
    logits.fill_(torch.nan)  # filters have written to them
    extras.attach(output, tokens)
    required = (kept[index] / batch.sampling_info.temperatures[:, :, None]).log_softmax(-1)
    values = required.gather(-1, tokens[..., None]).squeeze(-1)
    assert_close(output.next_token_logprobs[:2], values[:2], FLOAT_32, "logprobs of the tokens")
    top = [x.tolist() for x in output.next_token_top_logprobs_val]  # the host calls tolist on all of them
    assert [len(x) for x in top] == [0] * 3 + [2] * 3 + [0] * 3
    assert_close(torch.tensor(top[3:6]), required[1].topk(2).values, FLOAT_32, "top")
    assert_equal(torch.stack(output.next_token_top_logprobs_idx[3:6]), required[1].topk(2).indices, "top tokens")
    ids = [x.tolist() for x in output.next_token_token_ids_logprobs_val]
    assert [len(x) for x in ids] == [2] * 3 + [0] * 6
    assert_close(torch.tensor(ids[:3]), required[0][:, [4, 5]], FLOAT_32, "of given tokens")


def test_a_prefill_gives_one_number_per_request() -> None:
    batch = batch_of([None] * 2, return_logprob=True, top_logprobs_nums=[0, 0], token_ids_logprobs=[None, None])
    batch.reqs[1].return_logprob = True
    batch.sampling_info.is_all_greedy = True
    batch.sampling_info.temperatures = torch.ones(2, 1)
    logits, output = torch.randn(2, VOCAB), LogitsProcessorOutput(next_token_logits=None)
    attach_prefill(batch, output, logits, torch.tensor([3, 9]))
    assert output.next_token_logprobs.shape == (2,)
    assert_close(output.next_token_logprobs[1], logits.log_softmax(-1)[1, 9], FLOAT_32, "first token")
    assert output.next_token_top_logprobs_val is None
