"""Arguments of a server that is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang.srt.plugins import load_plugins

from tests.conftest import DRAFT

load_plugins()


def served_args(target: Path, **change: Any) -> Any:
    """The host's arguments for the demo's models on a CPU, resolved by the plugin; ``change`` replaces some."""
    from sglang.srt.server_args import ServerArgs

    arguments = {
        "model_path": str(target),
        "device": "cpu",
        "dtype": "float32",
        "disable_cuda_graph": True,
        "speculative_algorithm": "DSPARK",
        "speculative_draft_model_path": str(DRAFT),
    }
    return ServerArgs(**(arguments | change))
