"""What machine and which versions a result was measured on, and where results go."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

PACKAGES = ("sglang-dspark", "sglang", "torch", "triton", "transformers", "flashinfer-python", "sglang-kernel")


def describe() -> dict[str, Any]:
    """Processor, GPU, driver and package versions; unknown packages are left out."""
    import torch

    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found: dict[str, Any] = {"python": platform.python_version(), "cores": os.cpu_count(), "versions": versions}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": properties.name,
            "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
        }
    return found


def conclude(result: dict[str, Any], out: Path | None, said: dict[str, Any] | None = None) -> None:
    """Write a result, if it has a file, and print it as the last line of a benchmark.

    Args:
        result: JSON-ready.
        out: its file.
        said: what is printed instead of the whole.
    """
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result if said is None else said), flush=True)
