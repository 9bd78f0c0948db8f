"""Calibration data of a server: what ``dspark.worker.collect`` has written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError

import numpy as np
import torch

from dspark.errors import ConfigError


@dataclass(frozen=True, eq=False)
class Blocks:
    """N collected blocks."""

    logits: np.ndarray  # [N, G] float32, raw
    labels: np.ndarray  # [N, G] float32, probability that drafts 1..k are all accepted
    temperature: np.ndarray  # [N] float32, 0 for greedy requests
    request: np.ndarray  # [N] int64, CRC-32 of the request's id

    @property
    def count(self) -> int:
        return len(self.logits)

    @property
    def classes(self) -> list[float]:
        """Their sampling temperatures, each once, as a user would write them: 0.7 and not its nearest float32."""
        return [float(str(one)) for one in np.unique(self.temperature)]

    def at(self, rows: np.ndarray) -> Blocks:
        """Some of the blocks. Args: rows: [N] bool."""
        return Blocks(self.logits[rows], self.labels[rows], self.temperature[rows], self.request[rows])


def load(paths: Sequence[Path]) -> Blocks:
    """All blocks of some shards.

    Raises:
        ConfigError: none, or one that cannot be read or is no shard of ours.
    """
    keys, columns = ("logits", "prefix_mask", "temperature", "request"), []
    for path in paths:
        try:
            shard = torch.load(path, map_location="cpu", weights_only=True)
            columns.append([shard[key].numpy() for key in keys])
        except (OSError, RuntimeError, UnpicklingError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"found {path}, which is no shard of this package ({error!r}); required are files of "
                "SGLANG_DSPARK_STS_COLLECT_PATH; collect again"
            ) from None
    if not columns or len({column[0].shape[1] for column in columns}) != 1:
        raise ConfigError(f"found {len(columns)} shards; required is at least one, all of the same gamma")
    return Blocks(*(np.concatenate(column) for column in zip(*columns, strict=True)))
