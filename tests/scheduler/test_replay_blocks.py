"""Classes of blocks for simulated acceptance: distributions, calibration, and files that cannot be used."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from dspark.errors import ConfigError
from dspark.scheduler.replay_blocks import (
    BLOCKS,
    EVERY_BLOCK,
    LEVELS,
    BlockClass,
    constant_class,
    levels,
    load_classes,
    rate_class,
)
from tests.compare import Tolerance, assert_close
from tests.scheduler.cases import TRACE, trace

GAMMA = 7
ROUNDED = Tolerance(1e-6, 2e-6, "survivals with six digits, as products of float32 ratios")


def survival(one: BlockClass) -> np.ndarray:
    return one.confidence.astype(np.float64).cumprod(axis=1)


def test_levels_commit_what_they_promise() -> None:
    lengths = {one.name: one.accept_length for one in levels(GAMMA)}
    assert list(lengths) == list(LEVELS)
    assert lengths["high"] == pytest.approx(5.7, abs=0.1)
    assert lengths["middle"] == pytest.approx(3.3, abs=0.07)
    assert lengths["low"] == pytest.approx(1.8, abs=0.05)
    assert 1.0 <= lengths["hopeless"] < 1.01


@pytest.mark.parametrize("name", LEVELS)
def test_confidences_of_a_level_are_calibrated_and_spread(name: str) -> None:
    """Among drafts whose predecessors were accepted, a confidence of c is accepted with probability c."""
    one = next(found for found in levels(GAMMA) if found.name == name)
    reached = one.accepted[:, None] >= np.arange(GAMMA)
    passed = one.accepted[:, None] > np.arange(GAMMA)
    believed, happened = one.confidence[reached].astype(np.float64), passed[reached]
    edges = np.unique(np.quantile(believed, np.linspace(0, 1, 11)))
    bins = np.clip(np.searchsorted(edges, believed, side="right") - 1, 0, len(edges) - 2)
    for at in range(len(edges) - 1):
        inside = bins == at
        error = happened[inside].mean() - believed[inside].mean()
        assert abs(error) < 4.5 * (0.25 / inside.sum()) ** 0.5, f"bin {at}: off by {error:+.3f}"
    for k in range(GAMMA):
        rate, count = LEVELS[name][0], int(reached[:, k].sum())
        if count < 50:
            continue
        assert passed[reached[:, k], k].mean() == pytest.approx(rate, abs=4.5 * (0.25 / count) ** 0.5)
    if name in ("middle", "low"):
        assert one.confidence.std() > 0.1, "blocks must differ, or there is nothing to schedule"


def test_spread_is_about_that_of_the_real_trace() -> None:
    real = next(one for one in load_classes(TRACE, GAMMA) if one.name == EVERY_BLOCK).confidence[:, 0]
    ours = rate_class("x", (float(real.mean()),), 1).confidence
    assert 0.7 < ours.std() / real.std() < 1.4


def test_a_trace_is_replayed_as_it_is() -> None:
    real, classes = trace(), {one.name: one for one in load_classes(TRACE, GAMMA)}
    assert set(classes) == {EVERY_BLOCK, *real.classes.tolist()}
    for name, one in classes.items():
        chosen = np.ones(len(real.classes), bool) if name == EVERY_BLOCK else real.classes == name
        assert_close(survival(one), real.survival[chosen], ROUNDED, f"survival of {name}")
        assert one.accepted.tolist() == real.accepted[chosen].sum(axis=1).tolist()


def test_longer_blocks_of_a_trace_are_cut() -> None:
    whole, cut = (load_classes(TRACE, gamma)[0] for gamma in (7, 3))
    assert cut.accepted.tolist() == np.minimum(whole.accepted, 3).tolist()
    assert np.array_equal(cut.confidence, whole.confidence[:, :3])


@pytest.mark.parametrize(
    ("length", "method", "lengths"),
    [
        (1.0, "match-expected", {1}),
        (3.25, "match-expected", {3, 4}),
        (8.0, "match-expected", {8}),
        (99.0, "match-expected", {8}),
        (0.2, "match-expected", {1}),
        (4.0, "multinomial", {1, 2, 3, 4, 5, 6, 7, 8}),
    ],
)
def test_a_constant_length(length: float, method: str, lengths: set[int]) -> None:
    one = constant_class(length, method, GAMMA)  # type: ignore[arg-type]
    assert set((one.accepted + 1).tolist()) <= lengths
    wanted = min(max(length, 1), GAMMA + 1)
    assert one.accept_length == pytest.approx(wanted, abs=0.05 if method == "multinomial" else 1e-3)
    assert len({row.tobytes() for row in one.confidence}) == 1
    assert 1 + survival(one)[0].sum() == pytest.approx(one.accept_length, abs=1e-5)


def test_rates_per_class(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    path.write_text(json.dumps({"classes": {"code": [0.9, 0.8, 0.1], "never": [0.0], "always": [1.0]}}))
    code, never, always = load_classes(path, 4)
    assert code.confidence.mean(axis=0) == pytest.approx([0.9, 0.8, 0.1, 0.1], abs=0.02)
    assert (never.accept_length, always.accept_length) == (1.0, 5.0)
    assert code.confidence.shape == (BLOCKS, 4)


HEADER = "request_class,block,position,survival,accepted\n"
BAD = {
    "rates.json": ("{", "not valid JSON"),
    "more.json": ('{"classes": {"a": [0.5]}, "extra": 1}', "extra"),
    "high.json": ('{"classes": {"a": [1.5]}}', r"classes\.a\.0"),
    "none.json": ('{"classes": {}}', "classes"),
    "empty.csv": ("", "without request_class"),
    "column.csv": ("request_class,block,position,survival\nx,0,1,0.5\n", "without accepted"),
    "short.csv": (HEADER + "x,0,1,0.5,1\nx,0,2,0.4,0\n", "at least the 3 drafts"),
    "hole.csv": (HEADER + "".join(f"x,0,{k},0.5,0\n" for k in (1, 2, 4)), "whole blocks"),
    "position.csv": (HEADER + "x,0,first,0.5,1\n", "position 'first'"),
    "number.csv": (HEADER + "".join(f"x,0,{k},half,0\n" for k in (1, 2, 3)), "half"),
    "range.csv": (HEADER + "".join(f"x,0,{k},1.5,0\n" for k in (1, 2, 3)), r"outside of \[0, 1\]"),
    "all.csv": (HEADER + "".join(f"all,0,{k},0.5,0\n" for k in (1, 2, 3)), "class 'all'"),
    "plain.csv.gz": ("not gzipped", "cannot be read"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_named(name: str, tmp_path: Path) -> None:
    text, message = BAD[name]
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_classes(tmp_path / name, 3)


def test_an_unknown_level_is_no_file() -> None:
    with pytest.raises(ConfigError, match=r"'hihg'.*high, middle, low, hopeless"):
        load_classes("hihg", 3)


def test_a_plain_and_a_gzipped_trace_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(gzip.decompress(TRACE.read_bytes()))
    for left, right in zip(load_classes(path, 5), load_classes(TRACE, 5), strict=True):
        assert left.name == right.name
        assert np.array_equal(left.confidence, right.confidence)
