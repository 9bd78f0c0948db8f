"""Recorded or invented blocks for simulated acceptance: confidences, and how many leading drafts were accepted.

Three sources, all turned into classes of blocks:

- *levels*: ``high``, ``middle``, ``low`` and ``hopeless``. Confidence k of a block is drawn from a beta distribution
  whose mean is the conditional acceptance rate of position k, and draft k is then accepted with exactly this
  probability: confidences are calibrated by construction, and blocks differ, so that there is something to schedule.
- *a trace* (CSV, gzipped or not): one row per draft with ``request_class``, ``block``, ``position`` from 1,
  ``survival`` (calibrated) and ``accepted`` (1 while all drafts up to here were accepted).
- *rates* (JSON): conditional acceptance rates per position and class, treated like a level.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dspark.errors import ConfigError

LEVELS: dict[str, tuple[float, ...]] = {
    "high": (0.90,),
    "middle": (0.72,),
    "low": (0.45,),
    "hopeless": (0.005,),
}
"""Conditional acceptance rate of each position; the last one holds for all later ones. In blocks of seven drafts they
commit 5.7, 3.3, 1.8 and 1.005 tokens per full window."""

SHORT_KEPT = {2: 0.964, 3: 0.974, 4: 0.984, 5: 0.992}
"""By the depth of short blocks, how many of the drafts that whole blocks get accepted up to there they keep. Measured
on the demo drafter, mean of greedy text and of temperature 1 (``python -m benchmarks.short_blocks``)."""

EVERY_BLOCK = "all"  # class of a trace that holds the blocks of all others
CONCENTRATION = 6.0  # of the beta distributions: conditional confidences of the real trace spread about as much
BLOCKS = 8192  # of an invented class
_SEED = 20260
_COLUMNS = ("request_class", "block", "position", "survival", "accepted")

Rate = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


@dataclass(frozen=True, eq=False)
class BlockClass:
    """Blocks of G drafts that are replayed in an order fixed by the requests' seeds."""

    name: str
    confidence: np.ndarray  # [N, G] float32 in [0, 1], probability that draft k is accepted given those before it
    accepted: np.ndarray  # [N] int32, leading drafts accepted, 0..G

    @property
    def accept_length(self) -> float:
        """Mean tokens that a full window commits."""
        return 1.0 + float(self.accepted.mean())


class RatesFile(BaseModel):
    """A file of conditional acceptance rates."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    classes: dict[str, Annotated[tuple[Rate, ...], Field(min_length=1)]] = Field(min_length=1)
    concentration: float = Field(default=CONCENTRATION, gt=0, allow_inf_nan=False)


def levels(gamma: int) -> list[BlockClass]:
    """The four levels of ``LEVELS``, in their order."""
    return [rate_class(name, rates, gamma) for name, rates in LEVELS.items()]


def rate_class(name: str, rates: Sequence[float], gamma: int, concentration: float = CONCENTRATION) -> BlockClass:
    """A class from conditional acceptance rates.

    Args:
        name: of the class.
        rates: per position, each in [0, 1]; the last one holds for all later positions.
        gamma: drafts per block.
        concentration: a + b of the beta distributions; the larger, the more alike are the blocks.
    """
    rng = np.random.default_rng(_SEED)
    mean = np.array([rates[min(k, len(rates) - 1)] for k in range(gamma)])
    inside = np.clip(mean, 1e-6, 1 - 1e-6)  # a beta distribution needs both parameters above zero
    confidence = rng.beta(concentration * inside, concentration * (1 - inside), (BLOCKS, gamma)).astype(np.float32)
    confidence[:, mean == 0], confidence[:, mean == 1] = 0, 1
    passed = rng.random((BLOCKS, gamma), dtype=np.float32) < confidence
    return BlockClass(name, confidence, _leading(passed))


def constant_class(length: float, method: Literal["match-expected", "multinomial"], gamma: int) -> BlockClass:
    """Blocks that commit ``length`` tokens per full window on average, whatever the request.

    Args:
        length: tokens, clipped to 1..G + 1.
        method: ``match-expected`` takes the two whole numbers around ``length``; ``multinomial`` rounds a normal
            variable of deviation 1. All blocks have the same confidences, those of the class as a whole.
        gamma: drafts per block.
    """
    rng = np.random.default_rng(_SEED)
    if method == "multinomial":
        tokens = np.clip(rng.normal(length, 1.0, BLOCKS), 1, gamma + 1).round().astype(np.int32)
    else:
        exact = min(max(length, 1.0), gamma + 1.0)
        longer = np.arange(BLOCKS) < round((exact - int(exact)) * BLOCKS)
        tokens = int(exact) + longer.astype(np.int32)
    accepted = tokens - 1
    survival = (accepted[:, None] > np.arange(gamma)).mean(axis=0)
    confidence = np.repeat(_conditional(survival[None]), BLOCKS, axis=0)
    return BlockClass(f"accept length {length:g}", confidence, accepted)


def load_classes(path: str | Path, gamma: int) -> list[BlockClass]:
    """The classes of a trace (``.csv``, ``.csv.gz``) or of a file of rates (``.json``).

    Args:
        path: of the file.
        gamma: drafts per block of the server; longer blocks of a trace are cut.

    Raises:
        ConfigError: the file cannot be read, or not used for blocks of ``gamma`` drafts.
    """
    source = f"simulation file {str(path)!r}"
    try:
        if str(path).endswith(".json"):
            return _of_rates(Path(path).read_text(encoding="utf-8"), gamma, source)
        packed = Path(path).read_bytes()
        text = (gzip.decompress(packed) if str(path).endswith(".gz") else packed).decode("utf-8")
        return _of_trace(list(csv.DictReader(text.splitlines())), gamma, source)
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(
            f"found {source}, which cannot be read ({error}); required is a level ({', '.join(LEVELS)}), a trace "
            "(.csv, .csv.gz) or a file of rates (.json); correct the path"
        ) from None


def _of_rates(text: str, gamma: int, source: str) -> list[BlockClass]:
    try:
        file = RatesFile.model_validate(json.loads(text))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the object"
        raise ConfigError(
            f"found {where} in {source}: {first['msg']}; required are rates in [0, 1] per class, as in "
            '{"classes": {"chat": [0.8, 0.7]}}; correct it'
        ) from None
    except ValueError as error:
        raise ConfigError(f"found {source}, which is not valid JSON ({error}); required is one object") from None
    return [rate_class(name, rates, gamma, file.concentration) for name, rates in file.classes.items()]


def _of_trace(rows: list[Mapping[str, str]], gamma: int, source: str) -> list[BlockClass]:
    missing = [name for name in _COLUMNS if not rows or name not in rows[0]]
    if missing:
        raise ConfigError(f"found {source} without {', '.join(missing)}; required are rows with {', '.join(_COLUMNS)}")
    length = max(_whole(row["position"], source) for row in rows)
    wanted = [*range(1, length + 1)] * (len(rows) // length)
    if [_whole(row["position"], source) for row in rows] != wanted or length < gamma:
        raise ConfigError(
            f"found {source} with {len(rows)} rows and positions up to {length}; required are whole blocks, position 1 "
            f"first, of at least the {gamma} drafts that this server drafts; pass --speculative-dspark-block-size "
            f"{length} or less, or record longer blocks"
        )
    try:
        survival, accepted = (
            np.array([float(row[name]) for row in rows]).reshape(-1, length)[:, :gamma]
            for name in ("survival", "accepted")
        )
    except ValueError as error:
        raise ConfigError(f"found {source}: {error}; required are numbers; correct it") from None
    if not (np.all((survival >= 0) & (survival <= 1)) and np.all(np.isin(accepted, (0, 1)))):
        raise ConfigError(
            f"found {source} with survivals outside of [0, 1], or accepted other than 0 or 1; correct the rows"
        )
    names = np.array([row["request_class"] for row in rows[::length]])
    if EVERY_BLOCK in names:
        raise ConfigError(f"found the class {EVERY_BLOCK!r} in {source}; this name holds all blocks; rename the class")
    confidence, leading = _conditional(survival), _leading(accepted == 1)
    kinds = {EVERY_BLOCK: np.ones(names.shape, dtype=bool)} | {name: names == name for name in sorted(set(names))}
    return [BlockClass(str(name), confidence[chosen], leading[chosen]) for name, chosen in kinds.items()]


def _whole(text: str | None, source: str) -> int:
    if text is None or not text.isdecimal() or int(text) == 0:
        raise ConfigError(f"found position {text!r} in {source}; required is a whole number from 1; correct it")
    return int(text)


def _leading(passed: np.ndarray) -> np.ndarray:
    """[N] int32: drafts before the first that did not pass, of [N, G] bool."""
    return passed.astype(np.int32).cumprod(axis=1).sum(axis=1).astype(np.int32)


def _conditional(survival: np.ndarray) -> np.ndarray:
    """[N, G] float32 confidences whose products from the left are ``survival``; 0 after a survival of 0."""
    before = np.concatenate([np.ones((survival.shape[0], 1)), survival[:, :-1]], axis=1)
    ratio = np.divide(survival, before, out=np.zeros_like(before), where=before > 0)
    return np.clip(ratio, 0, 1).astype(np.float32)
