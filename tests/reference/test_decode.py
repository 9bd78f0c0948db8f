"""The reference against plain decoding and against planted faults, so that agreeing with it means something."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.acceptance import Prompt, Served
from benchmarks.reference_comparison import GreedyComparison
from dspark.demo.model import prepare_smollm2
from tests.compare import assert_distribution
from tests.reference.decode import ReferenceCache, ReferenceDecoder, ReferenceRun, accept

EXAMPLES = Path(__file__).parents[2] / "examples"
DRAFTER = EXAMPLES / "smollm2-135m-dspark"
NEW_TOKENS = 24  # a step takes 0.2 s on one core
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
        assert len(run.tokens) == NEW_TOKENS
        assert produced[:NEW_TOKENS] == run.tokens


def test_stops_at_eos(decoder: ReferenceDecoder, prompts: list[list[int]], runs: list[ReferenceRun]) -> None:
    eos = runs[0].tokens[5]
    end = runs[0].tokens.index(eos) + 1
    assert decoder.generate(prompts[0], NEW_TOKENS, eos_ids=[eos]).tokens == runs[0].tokens[:end]


def test_accept_length_is_that_of_a_trained_drafter(runs: list[ReferenceRun]) -> None:
    assert all(run.accept_length > HEALTHY for run in runs)


def draft_agreement(run: ReferenceRun, other: ReferenceRun) -> float:
    """Share of equal blocks among the steps with a common anchor position (the texts must be equal)."""
    drafts = {step.position: step.drafts for step in other.steps}
    pairs = [(step.drafts, drafts[step.position]) for step in run.steps if step.position in drafts]
    return sum(left == right for left, right in pairs) / len(pairs)


def test_layers_in_the_wrong_order_cost_acceptance_but_no_token(
    decoder: ReferenceDecoder, prompts: list[list[int]], runs: list[ReferenceRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder, "layer_ids", decoder.layer_ids[::-1])
    faulty = decoder.generate(prompts[0], NEW_TOKENS // 2)
    assert faulty.tokens == runs[0].tokens[: NEW_TOKENS // 2]
    assert faulty.accept_length < HEALTHY


@pytest.mark.parametrize("fault", ["block one position late", "layers one too low"])
def test_faults_by_one_show_in_the_drafts(
    fault: str,
    decoder: ReferenceDecoder,
    prompts: list[list[int]],
    runs: list[ReferenceRun],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their accept length is within noise of the healthy one (3.03 against 2.94 to 3.03): only drafts tell."""
    if fault == "layers one too low":
        monkeypatch.setattr(decoder, "layer_ids", tuple(i - 1 for i in decoder.layer_ids))
    else:
        right = decoder.draft.block_positions
        monkeypatch.setattr(decoder.draft, "block_positions", lambda anchor, count: right(anchor + 1, count))
    faulty = decoder.generate(prompts[0], NEW_TOKENS)
    assert faulty.tokens == runs[0].tokens
    assert draft_agreement(runs[0], runs[0]) == 1.0
    assert draft_agreement(faulty, runs[0]) < 0.75


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


def test_a_shorter_block_is_decoded_and_a_longer_one_refused(
    target_dir: Path,
    decoder: ReferenceDecoder,
    prompts: list[list[int]],
    runs: list[ReferenceRun],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decoder, "gamma", 3)
    run = decoder.generate(prompts[0], NEW_TOKENS // 2)
    assert run.tokens == runs[0].tokens[: NEW_TOKENS // 2]
    assert {len(step.drafts) for step in run.steps} == {3}
    with pytest.raises(ValueError, match="gamma is 8"):
        ReferenceDecoder(target_dir, DRAFTER, gamma=8)


def test_acceptance_rule_is_exact() -> None:
    """The first committed token follows p whatever q is: 4 tokens, one of them impossible for the target."""
    generator = torch.Generator().manual_seed(1)
    p = torch.tensor([[0.7, 0.2, 0.1, 0.0]]).repeat(2, 1)
    q = torch.tensor([[0.1, 0.4, 0.2, 0.3]])
    counts = torch.zeros(4)
    for draft in torch.multinomial(q[0], 10_000, replacement=True, generator=generator).tolist():
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


def served_like(run: ReferenceRun, prompt: list[int], windows: list[int]) -> tuple[Served, list[dict]]:
    """What a server that decodes as ``run`` does would report."""
    one = Served(Prompt("set", "set/0", prompt), "rid", run.tokens, len(run.steps), [])
    return one, [asdict(step) | {"verify_len": window} for step, window in zip(run.steps, windows, strict=True)]


def test_comparison_finds_a_planted_draft(
    target_dir: Path, decoder: ReferenceDecoder, prompts: list[list[int]], runs: list[ReferenceRun]
) -> None:
    cache = ReferenceCache(target_dir, DRAFTER)
    cache.__dict__["decoder"] = decoder
    comparison = GreedyComparison(cache, NEW_TOKENS, ())
    one, records = served_like(runs[0], prompts[0], [8] * len(runs[0].steps))
    clean = comparison.compare([one], {"set/0": runs[0]}, {"rid": records})
    assert clean["equal_texts"] == clean["steps"]["equal_requests"] == 1
    assert clean["steps"]["same_drafts"] == clean["steps"]["steps"] == len(runs[0].steps)
    records[3]["drafts"] = [*records[3]["drafts"][:-1], 0]
    found = comparison.compare([one], {"set/0": runs[0]}, {"rid": records})["steps"]
    assert (found["equal_requests"], found["equal_before_mismatch"]) == (0, 3)
    assert found["same_anchor"] - found["same_drafts"] == 1
    assert found["mismatches"][0]["mismatch"]["fields"] == ["drafts"]
    assert found["mismatches"][0]["mismatch"]["draft_gap"] > 0


def test_comparison_follows_the_windows_of_the_server(
    target_dir: Path, decoder: ReferenceDecoder, prompts: list[list[int]]
) -> None:
    cache = ReferenceCache(target_dir, DRAFTER)
    cache.__dict__["decoder"] = decoder
    whole = decoder.generate(prompts[1], 8)
    windows = [2, 1, 3]
    trimmed = decoder.generate(prompts[1], 8, verify_lens=windows)
    used = [*windows, *[8] * len(trimmed.steps)][: len(trimmed.steps)]
    one, records = served_like(trimmed, prompts[1], used)
    result = GreedyComparison(cache, 8, ()).compare([one], {"set/0": whole}, {"rid": records})
    assert result["equal_texts"] == result["steps"]["equal_requests"] == 1
