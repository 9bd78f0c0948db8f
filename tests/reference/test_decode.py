"""The reference against plain decoding and against planted faults, so that agreeing with it means something."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from dspark.demo.model import prepare_smollm2
from tests.compare import assert_distribution
from tests.reference.decode import ReferenceCache, ReferenceDecoder, ReferenceRun, accept

EXAMPLES = Path(__file__).parents[2] / "examples"
DRAFTER = EXAMPLES / "smollm2-135m-dspark"
NEW_TOKENS = 32  # a step takes 0.2 s on one core
HEALTHY = 1.6  # accept length; the planted faults below stay under it
QUESTIONS = (
    "A baker sells 24 rolls in the morning and half as many in the afternoon. Each roll costs $2. How much money does "
    "the baker make in one day?\nPlease reason step by step, and put your final answer within \\boxed{}.",
    "A train has 6 wagons with 30 seats each. 45 seats are empty. How many people are on the train?\n"
    "Please reason step by step, and put your final answer within \\boxed{}.",
)


@pytest.fixture(scope="module")
def target_dir() -> Path:
    return prepare_smollm2(EXAMPLES / "smollm2-135m-instruct")


@pytest.fixture(scope="module")
def decoder(target_dir: Path) -> Iterator[ReferenceDecoder]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield ReferenceDecoder(target_dir, DRAFTER)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def prompts(target_dir: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]


@pytest.fixture(scope="module")
def runs(decoder: ReferenceDecoder, prompts: list[list[int]]) -> list[ReferenceRun]:
    return [decoder.generate(prompt, NEW_TOKENS) for prompt in prompts]


def test_greedy_equals_plain_greedy(
    decoder: ReferenceDecoder, prompts: list[list[int]], runs: list[ReferenceRun]
) -> None:
    assert [run.tokens for run in runs] == [decoder.plain_greedy(prompt, NEW_TOKENS) for prompt in prompts]


def test_steps_account_for_every_token(prompts: list[list[int]], runs: list[ReferenceRun]) -> None:
    for prompt, run in zip(prompts, runs, strict=True):
        produced = run.tokens[:1]
        for step in run.steps:
            assert step.position == len(prompt) + len(produced) - 1
            assert step.anchor == produced[-1]
            assert len(step.committed) == step.accepted + 1
            assert step.committed[:-1] == step.drafts[: step.accepted]
            produced += step.committed
        assert produced[:NEW_TOKENS] == run.tokens and len(run.tokens) == NEW_TOKENS


def test_stops_at_eos(decoder: ReferenceDecoder, prompts: list[list[int]], runs: list[ReferenceRun]) -> None:
    eos = runs[0].tokens[5]
    end = runs[0].tokens.index(eos) + 1
    assert decoder.generate(prompts[0], NEW_TOKENS, eos_ids=[eos]).tokens == runs[0].tokens[:end]


def test_accept_length_is_that_of_a_trained_drafter(runs: list[ReferenceRun]) -> None:
    assert all(run.accept_length > HEALTHY for run in runs)


@pytest.mark.parametrize("fault", ["shifted block", "wrong layer"])
def test_planted_faults_cost_acceptance_but_no_token(
    fault: str,
    decoder: ReferenceDecoder,
    prompts: list[list[int]],
    runs: list[ReferenceRun],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if fault == "shifted block":
        right = decoder.draft.block_positions
        monkeypatch.setattr(decoder.draft, "block_positions", lambda anchor, count: right(anchor + 1, count))
    else:
        monkeypatch.setattr(decoder, "layer_ids", tuple(i - 1 for i in decoder.layer_ids))
    faulty = [decoder.generate(prompt, NEW_TOKENS) for prompt in prompts]
    print(fault, [run.accept_length for run in faulty], [run.accept_length for run in runs])
    assert [run.tokens for run in faulty] == [run.tokens for run in runs]


def test_trimmed_windows_commit_a_prefix(
    decoder: ReferenceDecoder, prompts: list[list[int]], runs: list[ReferenceRun]
) -> None:
    windows = [1, 3, 8, 2, 1]
    trimmed = decoder.generate(prompts[0], NEW_TOKENS // 2, verify_lens=windows)
    assert trimmed.tokens == runs[0].tokens[: NEW_TOKENS // 2]
    assert [len(step.committed) <= window for step, window in zip(trimmed.steps, windows, strict=False)] == [True] * 5
    # The first step has the anchor of the untrimmed run: same drafts, one token of them.
    assert trimmed.steps[0].drafts == runs[0].steps[0].drafts
    assert trimmed.steps[0].committed == runs[0].steps[0].committed[:1]


def test_fewer_drafts_than_trained(target_dir: Path, decoder: ReferenceDecoder, prompts: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="gamma is 8"):
        ReferenceDecoder(target_dir, DRAFTER, gamma=8)


def test_acceptance_rule_is_exact() -> None:
    """The first committed token follows p whatever q is: 4 tokens, one of them impossible for the target."""
    generator = torch.Generator().manual_seed(1)
    p = torch.tensor([[0.7, 0.2, 0.1, 0.0]]).repeat(2, 1)
    q = torch.tensor([[0.1, 0.4, 0.2, 0.3]])
    counts = torch.zeros(4)
    for draft in torch.multinomial(q[0], 20_000, replacement=True, generator=generator).tolist():
        accepted, following = accept([draft], q, p, 1.0, generator)
        counts[draft if accepted else following] += 1
    assert_distribution(counts, p[0], "committed token")


def test_cache_returns_what_was_computed(
    target_dir: Path, decoder: ReferenceDecoder, prompts: list[list[int]], tmp_path: Path
) -> None:
    path = tmp_path / "runs.json"
    filling = ReferenceCache(target_dir, DRAFTER, path=path)
    filling.__dict__["decoder"] = decoder  # already loaded
    computed = filling.run(prompts[1], 6, temperature=1.0, seed=3)
    reading = ReferenceCache(target_dir, DRAFTER, path=path)
    assert reading.run(prompts[1], 6, temperature=1.0, seed=3) == computed
    assert "decoder" not in reading.__dict__, "a stored run needs no model"
    with pytest.raises(ValueError, match="other weights"):
        ReferenceCache(EXAMPLES / "smollm2-135m-instruct", DRAFTER, path=path)
