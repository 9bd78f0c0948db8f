"""Sampled losslessness of ``DecodeStep`` in every verify mode, with budgets that change at random from step to step.

100,000 requests per path in batches; the joint law of their first tokens is compared with the target's. Seeds are
fixed, so a p-value is a property of the code and no test is flaky.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from dspark.kernels.ragged_pack import ragged_pack
from dspark.kernels.triton_adjust import adjust_logits, count_tokens
from dspark.types import PackedRows, StepBudget
from dspark.worker import step
from tests.compare import assert_distribution, assert_equal, distribution_p_value
from tests.lossless.networks import World, cap_accept, compact, draft_off
from tests.lossless.toy import HORIZON, NOTHING, Adjust, Settings, count, exact_law, greedy_text, make_toy

TRIALS = 100_000
BATCHES = 20  # each with budgets of its own
FAULT_BATCHES = 4
Budgets = Callable[[World, Callable[[int], int]], StepBudget]  # the second argument draws from 0..n - 1


def random_budget(world: World, draw: Callable[[int], int]) -> int:
    return draw(world.text.shape[0] * world.toy.gamma + 1)


def random_compact(world: World, draw: Callable[[int], int]) -> StepBudget:
    return compact(world, random_budget(world, draw), padding=draw(4))


def random_cap_accept(world: World, draw: Callable[[int], int]) -> StepBudget:
    return cap_accept(world, random_budget(world, draw))


def off_and_compact(world: World, draw: Callable[[int], int]) -> StepBudget:
    return draft_off(world, padding=draw(4)) if draw(2) else random_compact(world, draw)


def every_mode(world: World, draw: Callable[[int], int]) -> StepBudget:
    return (off_and_compact, random_compact, random_cap_accept)[draw(3)](world, draw)


@dataclass(frozen=True)
class Path:
    """A mode with its budgets, and how requests sample."""

    name: str
    gamma: int
    budgets: Budgets
    settings: Settings = Settings()  # noqa: RUF009
    greedy_every: int = 0  # every n-th request is greedy
    adjust: Adjust = NOTHING


FILTERS = Settings(temperature=0.8, top_k=3, top_p=0.92, min_p=0.05)
PENALTIES = Adjust(frequency=0.4, presence=0.3, repetition=1.3, min_tokens=3, stop=1)
BIAS = (0.5, -0.3, 0.0, -0.8)
PATHS = [
    Path("compact", 3, random_compact),
    Path("compact, gamma 1", 1, random_compact),
    Path("compact, filters", 3, random_compact, FILTERS),
    Path("cap-accept", 3, random_cap_accept),
    Path("cap-accept, filters, greedy and sampled requests", 2, random_cap_accept, FILTERS, greedy_every=5),
    Path("draft off or compact", 3, off_and_compact),
    Path("every mode, temperature 1.4, greedy and sampled requests", 3, every_mode, Settings(1.4), greedy_every=5),
    Path("every mode, filters, greedy and sampled requests", 2, every_mode, FILTERS, greedy_every=5),
    Path("compact, frequency penalty", 3, random_compact, adjust=Adjust(frequency=0.7)),
    Path("every mode, penalties", 3, every_mode, greedy_every=5, adjust=PENALTIES),
    Path(
        "every mode, everything at once", 2, every_mode, FILTERS, greedy_every=5, adjust=replace(PENALTIES, bias=BIAS)
    ),
]


def worlds(path: Path, batches: int = BATCHES) -> list[World]:
    """One world per batch, ``TRIALS / BATCHES`` sampled requests each."""
    number, sampled = PATHS.index(path), TRIALS // BATCHES
    requests = sampled * path.greedy_every // (path.greedy_every - 1) if path.greedy_every else sampled
    greedy = torch.zeros(requests, dtype=torch.bool)
    if path.greedy_every:
        greedy[:: path.greedy_every] = True
    toy, capacity = make_toy(500 + number, path.gamma), 2 + (HORIZON + 1) * (path.gamma + 1)
    rows = [path.settings.rows(requests, (number << 33) + requests * i, greedy) for i in range(batches)]
    return [
        World(
            toy,
            replace(one, calibration=greedy.to(torch.int64)),
            capacity,
            adjust=None if path.adjust is NOTHING else path.adjust.table(requests),
        )
        for one in rows
    ]


def run(path: Path, batches: int = BATCHES) -> tuple[torch.Tensor, torch.Tensor, set[tuple[bool, bool]]]:
    """[V] * horizon counts of the sampled requests, tokens of the greedy ones, and the (draft, packed) modes used."""
    generator = torch.Generator().manual_seed(600 + PATHS.index(path))

    def draw(below: int) -> int:
        return int(torch.randint(below, (), generator=generator))

    counts, greedy, modes = torch.tensor(0), [], set()
    for world in worlds(path, batches):
        while int(world.length.min()) < 2 + HORIZON:
            budget = path.budgets(world, draw)
            world.run(budget)
            modes.add((budget.draft, budget.packed))
        tokens = world.text[:, 2 : 2 + HORIZON]
        counts = counts + count(tokens[~world.sampling.greedy])
        greedy.append(tokens[world.sampling.greedy])
    return counts, torch.cat(greedy), modes


USED: dict[Budgets, set[tuple[bool, bool]]] = {
    random_compact: {(True, True)},
    random_cap_accept: {(True, False)},
    off_and_compact: {(True, True), (False, True)},
    every_mode: {(True, True), (True, False), (False, True)},
}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_mode_is_lossless(path: Path) -> None:
    counts, greedy, modes = run(path)
    assert int(counts.sum()) == TRIALS
    assert modes == USED[path.budgets]
    toy = make_toy(500 + PATHS.index(path), path.gamma)
    assert_distribution(counts, exact_law(toy, path.settings, adjust=path.adjust), path.name)
    assert_equal(greedy, torch.tensor(greedy_text(toy, adjust=path.adjust)).expand_as(greedy), "greedy requests")


def next_row(verify_lens: torch.Tensor, rows: int, window: int) -> PackedRows:
    packed = ragged_pack(verify_lens, rows, window)
    return replace(packed, index=(packed.index + 1).clamp(max=rows - 1))


def test_wrong_row_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: places read one packed row too far. The same batches without it pass."""
    path = PATHS[0]
    law = exact_law(make_toy(500, path.gamma), path.settings)
    assert distribution_p_value(run(path, FAULT_BATCHES)[0], law) > 1e-3
    monkeypatch.setattr(step, "ragged_pack", next_row)
    assert distribution_p_value(run(path, FAULT_BATCHES)[0], law) < 1e-6


def forgetting_block(logits, packed, drafts, lengths, adjust) -> None:
    """Penalties from the committed text only, as a table per step would have them."""
    adjust_logits(logits, packed, drafts[:, :0], lengths, adjust)


def forgetting_commit(tokens, committed, adjust) -> None:
    """Only the last token of a block is counted, as plain decoding counts one a step."""
    last = (committed[:, None].to(torch.int64) - 1).clamp(min=0)
    count_tokens(tokens.gather(1, last), committed.clamp(max=1), adjust)


@pytest.mark.parametrize(("name", "fault"), [("adjust_logits", forgetting_block), ("count_tokens", forgetting_commit)])
def test_forgotten_history_is_caught(name: str, fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault against the same batches without it."""
    path = next(path for path in PATHS if path.name == "compact, frequency penalty")
    law = exact_law(make_toy(500 + PATHS.index(path), path.gamma), path.settings, adjust=path.adjust)
    assert distribution_p_value(run(path, FAULT_BATCHES)[0], law) > 1e-3
    monkeypatch.setattr(step, name, fault)
    assert distribution_p_value(run(path, FAULT_BATCHES)[0], law) < 1e-6
