"""The two noise floors: blocks of a prompt that are independent of each other, and blocks that go wrong together."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from functools import cache

import numpy as np
import pytest

from dspark.calibrate import report
from dspark.calibrate.fit import ALLOWED_ERROR, Fitted, fit_blocks
from dspark.calibrate.run import _file
from dspark.calibrate.shards import Blocks
from dspark.scheduler.calibration import (
    calibration_error,
    noise_floor,
    noise_floor_of_prompts,
    survival_from,
    survival_labels,
)
from dspark.scheduler.sts_file import StsProvenance, parse_sts

PROMPTS, EACH, GAMMA = 200, 300, 3


def served(offset: float, seed: int, prompts: int = PROMPTS) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(confidences, labels, prompts) of greedy blocks, perfectly calibrated on average over prompts.

    Args:
        offset: how far the chances of a prompt are from the confidences, all of a draft up or all down, as a share of
            the room to 0 or 1.
        seed: of everything.
    """
    rng = np.random.default_rng(seed)
    prompt = np.repeat(np.arange(prompts), EACH)
    confidence = rng.beta(4, 1.5, (prompt.size, GAMMA))
    own = offset * rng.choice([-1.0, 1.0], (prompts, GAMMA))[prompt]
    chance = confidence + own * np.minimum(confidence, 1 - confidence)
    return confidence, survival_labels(rng.random(chance.shape) < chance), prompt


def means(offset: float, samples: int = 60) -> list[np.ndarray]:
    """[G] each, over fresh samples: the error that shows, the floor of blocks and of prompts."""
    found = []
    for seed in range(samples):
        confidence, labels, prompt = served(offset, seed)
        predicted = np.multiply.accumulate(confidence, axis=1)
        found.append(
            (
                calibration_error(predicted, labels),
                noise_floor(predicted, labels),
                noise_floor_of_prompts(predicted, labels, prompt),
            )
        )
    return list(np.mean(found, axis=0))


def test_the_floors_agree_where_blocks_are_independent() -> None:
    shows, of_blocks, of_prompts = means(0.0)
    print(f"shows {shows.round(4)}, of blocks {of_blocks.round(4)}, of prompts {of_prompts.round(4)}")
    assert np.abs(of_blocks / shows - 1).max() < 0.05
    assert np.abs(of_prompts / shows - 1).max() < 0.1


def test_only_the_floor_of_prompts_holds_where_a_prompt_goes_wrong_as_a_whole() -> None:
    shows, of_blocks, of_prompts = means(1.0)
    print(f"shows {shows.round(4)}, of blocks {of_blocks.round(4)}, of prompts {of_prompts.round(4)}")
    assert np.abs(of_prompts / shows - 1).max() < 0.15  # a few prompts make 60 samples uncertain by as much
    assert (of_blocks < 0.5 * shows).all()


def test_an_error_that_all_prompts_share_is_no_noise() -> None:
    """A head that is wrong must not be excused by its own error."""
    confidence, labels, prompt = served(0.0, 1)
    predicted = np.multiply.accumulate(confidence, axis=1)
    right, wrong = (noise_floor_of_prompts(one, labels, prompt) for one in (predicted, predicted**3))
    assert (calibration_error(predicted**3, labels) > 10 * wrong).all()
    assert (wrong < 1.5 * right).all()


def test_the_floor_of_prompts_is_that_of_draws_one_by_one() -> None:
    """The definition, slowly: prompts drawn, rows put together, mean errors of bins compared."""
    confidence, labels, prompt = served(0.5, 3, prompts=12)
    names = prompt * 7 - 20  # any numbers
    predicted = np.multiply.accumulate(confidence, axis=1)
    at = np.minimum((predicted * 15).astype(int), 14)
    errors, rng, noise = labels - predicted, np.random.default_rng(9), np.zeros((200, GAMMA))
    times = rng.multinomial(12, np.full(12, 1 / 12), 200)
    for draw, counts in enumerate(times):
        rows = np.concatenate([np.flatnonzero(prompt == one) for one in range(12) for _ in range(counts[one])])
        for k in range(GAMMA):
            for bin_ in np.unique(at[rows, k]):
                inside = rows[at[rows, k] == bin_]
                gap = errors[inside, k].mean() - errors[at[:, k] == bin_, k].mean()
                noise[draw, k] += abs(gap) * inside.size / rows.size
    found = noise_floor_of_prompts(predicted, labels, names, seed=9)
    assert found == pytest.approx(noise.mean(axis=0))
    mixed = np.random.default_rng(0).permutation(prompt.size)
    assert noise_floor_of_prompts(predicted[mixed], labels[mixed], names[mixed], seed=9) == pytest.approx(found)


@cache
def fitted() -> tuple[Blocks, np.ndarray, Fitted]:
    """Greedy blocks of prompts that go wrong as a whole, in no order, and of requests that are not their prompts."""
    confidence, labels, prompt = served(1.0, 2)
    mixed = np.random.default_rng(1).permutation(prompt.size)
    logits = np.log(confidence / (1 - confidence))[mixed]
    blocks = Blocks(np.float32(logits), np.float32(labels[mixed]), np.zeros(prompt.size, np.float32), mixed)
    return blocks, prompt[mixed], fit_blocks(blocks, prompt[mixed])


def test_the_report_judges_held_out_prompts() -> None:
    blocks, prompts, found = fitted()
    one = found.classes[0]
    held = one.fit.reported
    predicted = survival_from(blocks.logits[held], one.fit.calibration)
    assert one.floor.tolist() == noise_floor(predicted, blocks.labels[held]).tolist()
    floor = noise_floor_of_prompts(predicted, blocks.labels[held], prompts[held])
    assert one.floor_of_prompts.tolist() == floor.tolist()
    assert one.held_out_prompts == PROMPTS // 2
    assert (one.floor_of_prompts > 2 * one.floor).all()


def test_both_verdicts_stand_beside_each_other() -> None:
    """What is beyond the noise of blocks may be within that of prompts; each verdict says which."""
    _, _, found = fitted()
    one = found.classes[0]
    assert not one.within_bar
    assert one.within_noise_of_prompts
    shown = report.figures(found)["classes"][0]
    assert (shown["within_bar"], shown["within_noise_of_prompts"]) == (False, True)
    assert shown["noise_floor"] == one.floor.tolist()
    assert shown["noise_floor_of_prompts"] == one.floor_of_prompts.tolist()
    provenance = StsProvenance(model="m", draft="d", gamma=GAMMA, host_version="0", mode="static", labels="probability")
    text = _file(Namespace(prompts=None), found, provenance)
    parse_sts(text, GAMMA)  # a server reads it
    entry = json.loads(text)["provenance"]["classes"][0]
    assert entry["noise_floor"] == one.floor.tolist()
    assert entry["noise_floor_of_prompts"] == one.floor_of_prompts.tolist()
    old, new = report.sentences(found)[:2]
    assert f"{(one.own - one.floor).max():+.2%} over the noise floor, NOT within 1%" in old
    worst = (one.own - one.floor_of_prompts).max()
    assert worst <= ALLOWED_ERROR
    assert re.search(
        rf": within 1% of the noise of the 100 held-out prompts, at most {re.escape(f'{worst:+.2%}')}", new
    )
    columns = {str(column.header): list(column.cells) for column in report.table(one).columns}
    assert columns["noise floor"] == [f"{floor:.2%}" for floor in one.floor]
    assert columns["of prompts"] == [f"{floor:.2%}" for floor in one.floor_of_prompts]
