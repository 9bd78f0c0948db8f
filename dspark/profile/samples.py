"""What a profile has measured: cells of batch size, verified rows and context, as a JSON file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from dspark.errors import ConfigError
from dspark.scheduler.cost_fit import StepSamples
from dspark.scheduler.json_file import Provenance

GROUPS = 4  # medians per cell: what a cell says of its own noise
_FEWEST = 8  # steps of a cell


class Cell(BaseModel):
    """Steps of one batch size at one pinned number of rows and about one context."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    requests: int
    fraction: float  # pin
    prompt_tokens: int
    rows: int  # forwarded by every step, padding included
    context_tokens: list[float]  # [S], summed over the batch
    seconds: list[float]  # [S]

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return float(np.median(self.seconds))


class Samples(BaseModel):
    """A whole sweep."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    provenance: Provenance
    mode: str
    cells: list[Cell]

    @classmethod
    def load(cls, path: Path) -> Samples:
        """Read what ``run`` has written.

        Raises:
            ConfigError: there is no such file, or it is none of ours.
        """
        try:
            return cls.model_validate_json(path.read_text())
        except OSError as error:
            raise ConfigError(f"found no {path} ({error}); required are samples; run 'profile run' first") from None
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise ConfigError(
                f"found {path} with a bad {'.'.join(map(str, first['loc']))}: {first['msg']}; required are samples as "
                "'profile run' writes them"
            ) from None


def step_samples(cells: list[Cell]) -> StepSamples:
    """Medians of ``GROUPS`` interleaved parts of each cell, so that a hiccup of the machine is in few of them.

    With one prompt length the context is proportional to the requests: its price would be a guess, so it is left to
    them.

    Raises:
        ConfigError: a cell with fewer steps than can be judged.
    """
    varied = len({cell.prompt_tokens for cell in cells}) > 1
    columns: list[tuple[float, ...]] = []
    for cell in cells:
        if len(cell.seconds) < _FEWEST:
            raise ConfigError(
                f"found {len(cell.seconds)} steps at {cell.requests} requests and {cell.rows} rows; required are "
                f"{_FEWEST}; run the profile again with more --steps"
            )
        for part in range(GROUPS):
            context = float(np.mean(cell.context_tokens[part::GROUPS])) if varied else 0.0
            seconds = float(np.median(cell.seconds[part::GROUPS]))
            columns.append((cell.requests, cell.rows, context, context * cell.rows / cell.requests, seconds))
    return StepSamples(*np.array(columns, dtype=np.float64).T)
