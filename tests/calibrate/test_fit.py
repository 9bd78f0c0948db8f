"""From blocks to a file: errors of blocks that no fit has seen, and one vector that harms nobody."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from dspark.calibrate import report
from dspark.calibrate.fit import HELD_OUT, Fitted, fit_blocks
from dspark.calibrate.shards import Blocks, load
from dspark.errors import ConfigError, CostTableError
from dspark.scheduler.calibration import Calibration, calibration_error, survival_from, survival_labels

GAMMA, PROMPTS, BLOCKS = 4, 400, 40_000


def blocks_of(distortions: dict[float, float], seed: int = 0) -> tuple[Blocks, np.ndarray]:
    """Soft labels whose logits are reported multiplied by a factor per sampling temperature; and their prompts."""
    rng = np.random.default_rng(seed)
    parts, groups = [], []
    for temperature, factor in distortions.items():
        true = rng.normal(1.0, 1.3, (BLOCKS, GAMMA))
        labels = survival_labels(1 / (1 + np.exp(-true)))
        prompt = rng.integers(0, PROMPTS, BLOCKS)
        parts.append((true * factor, labels, np.full(BLOCKS, temperature), prompt + PROMPTS * len(parts)))
        groups.append(prompt)
    logits, labels, at, request = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Blocks(np.float32(logits), np.float32(labels), np.float32(at), request), np.concatenate(groups)


@cache
def fitted(*factors: float) -> tuple[Blocks, np.ndarray, Fitted]:
    blocks, groups = blocks_of(dict(zip((0.0, 0.7), factors, strict=True)))
    return blocks, groups, fit_blocks(blocks, groups)


@pytest.mark.parametrize("factors", [(2.0, 2.0), (2.5, 0.5), (2.0, 1.0), (1.0, 1.0)])
def test_every_class_is_repaired_and_one_vector_harms_none(factors: tuple[float, float]) -> None:
    _, _, found = fitted(*factors)
    assert [one.sampling_temperature for one in found.classes] == [0.0, 0.7]
    for one in found.classes:
        assert one.within_bar
        assert one.plain_never_worse
        assert one.held_out >= HELD_OUT * BLOCKS * 0.9


def test_classes_that_agree_share_their_fit() -> None:
    _, _, found = fitted(2.0, 2.0)
    assert (found.pull, found.first) == (1.0, 0)
    assert np.abs(found.plain.calibration.temperatures / 2.0 - 1).max() < 0.1


def test_classes_that_disagree_keep_raw_confidences() -> None:
    blocks, _, found = fitted(2.5, 0.5)
    for one in blocks.classes:
        own = blocks.at((blocks.temperature == np.float32(one)) & found.plain.reported)
        errors = [
            calibration_error(survival_from(own.logits, fit), own.labels)
            for fit in (found.plain.calibration, Calibration.identity(GAMMA))
        ]
        assert (errors[0] <= errors[1]).all()


def test_a_prompt_is_on_one_side_of_the_split() -> None:
    _, groups, found = fitted(2.0, 2.0)
    assert not set(groups[found.plain.fitted]) & set(groups[found.plain.reported])
    checked = ~found.plain.fitted & ~found.plain.reported
    assert not set(groups[checked]) & set(groups[~checked])


def test_what_is_reported_is_of_held_out_blocks() -> None:
    """Garbage in the blocks that are held out shows in the errors and not in the fit."""
    blocks, groups, found = fitted(2.0, 2.0)
    labels = blocks.labels.copy()
    labels[found.plain.reported] = 0.0
    again = fit_blocks(Blocks(blocks.logits, labels, blocks.temperature, blocks.request), groups)
    assert (again.plain.calibration.temperatures == found.plain.calibration.temperatures).all()
    assert not any(one.within_bar for one in again.classes)


def test_the_verdict_says_what_the_figures_say(tmp_path: Path) -> None:
    blocks, _, found = fitted(2.5, 0.5)
    shown = report.figures(found)
    assert [one["held_out"] for one in shown["classes"]] == [one.held_out for one in found.classes]
    assert all(", within 1%" in sentence for sentence in report.sentences(found)[:2])
    assert [report.table(one).row_count for one in found.classes] == [GAMMA, GAMMA]
    report.draw(found, blocks, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_few_prompts_are_refused() -> None:
    blocks, groups = blocks_of({0.0: 1.0})
    with pytest.raises(CostTableError, match="more prompts"):
        fit_blocks(blocks, groups * 0)
    blocks, groups = blocks_of({0.0: 1.0, 1.0: 1.0})
    groups = np.where(blocks.temperature == 1, 0, groups)
    with pytest.raises(CostTableError, match="one side of the split"):
        fit_blocks(blocks, groups)


def test_shards_are_joined_and_others_refused(tmp_path: Path) -> None:
    def write(name: str, gamma: int) -> Path:
        part = {name: torch.rand(3, gamma) for name in ("logits", "prefix_mask")}
        part |= {"temperature": torch.full((3,), 0.7), "request": torch.arange(3)}
        torch.save(part, tmp_path / name)
        return tmp_path / name

    first, second, other = write("a", 2), write("b", 2), write("c", 3)
    found = load([first, second])
    assert found.count == 6
    assert found.classes == [0.7]
    assert found.at(found.request == 1).count == 2
    (tmp_path / "text").write_text("no shard")
    for paths in ([], [first, other], [tmp_path / "text"], [tmp_path / "absent"]):
        with pytest.raises(ConfigError, match="required"):
            load(paths)
