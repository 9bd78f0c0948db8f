"""What the ranks of a server must have in common before their first step: each one decides for itself from it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from dspark.config import Settings
from dspark.drafter.spec import DraftSpec
from dspark.host import takeover
from dspark.host.rank_group import Ranks
from dspark.host.schedule import deployment, nominal_ladder
from dspark.worker.rank_agreement import require_equal_start

_OF_A_NODE = {"cost_tables", "collect_path"}  # where files are kept: only rank 0 reads or writes there


def require_equal_ranks(
    ranks: Ranks, server_args: Any, spec: DraftSpec, settings: Settings, seed: int, slots: int
) -> None:
    """Compare the ground that the ranks stand on; every rank has to call this, and one alone is not compared.

    Args:
        ranks: that serve together.
        server_args: resolved.
        spec: of the draft.
        settings: of this process.
        seed: of the noise.
        slots: request rows.

    Raises:
        HostError: another rank stands on another one: on other nodes, with other variables, files, versions or GPUs.
    """
    if ranks.size == 1:
        return
    ladder = nominal_ladder(server_args, spec, None)
    facts: dict[str, Any] = {
        "versions": {"dspark": takeover.version(), "torch": torch.__version__},
        "settings": settings.model_dump(mode="json", exclude=_OF_A_NODE),
        "collecting": settings.collect_path is not None,
        "draft": spec.model_dump(mode="json"),
        "deployment": deployment(server_args, spec, ladder).model_dump(mode="json"),
        "files": {name: _digest(path) for name, path in _files(server_args, settings).items()},
        "seed": seed,
        "slots": slots,
    }
    require_equal_start(ranks.all(facts))


def _files(server_args: Any, settings: Settings) -> dict[str, str | None]:
    """Files that decisions are made from."""
    return {
        "--speculative-dspark-sps-table-path": server_args.speculative_dspark_sps_table_path,
        "--speculative-dspark-confidence-sts-path": server_args.speculative_dspark_confidence_sts_path,
        "simulated acceptance": settings.simulate,
    }


def _digest(path: str | None) -> str | None:
    """Of the contents of a file; what is no file (a level of simulated acceptance) stands for itself."""
    if path is None or not Path(path).is_file():
        return path
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
