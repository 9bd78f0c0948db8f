"""Fixtures that several folders share."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import hypothesis
import pytest
import torch

# The same examples in every run, however long they take: what fails is no chance, and no fault of a busy machine.
hypothesis.settings.register_profile(
    "dspark",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("dspark")
# The tests' own tensors are small, and servers run beside them: a second thread would only spin.
torch.set_num_threads(1)
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).resolve().parent.parent
DRAFT = ROOT / "examples" / "smollm2-135m-dspark"
ASSETS = ROOT / "examples" / "smollm2-135m-instruct"

if not torch.cuda.is_available():
    # Kernels run in Triton's interpreter. That is decided where a kernel is defined, Triton's own included, so before
    # anything imports Triton; servers that tests start must not inherit it.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        importlib.import_module("triton.experimental.gluon")  # later, without the variable, its import fails
        for path in sorted((ROOT / "dspark" / "kernels").glob("triton_*.py")):
            importlib.import_module(f"dspark.kernels.{path.stem}")
        importlib.import_module("tests.kernels.triton_probes")


@pytest.fixture(scope="session")
def target() -> Path:
    """SmolLM2-135M-Instruct, converted once and cached."""
    from dspark.demo.model import prepare_smollm2

    return prepare_smollm2(ASSETS)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` run where there is one; elsewhere they are left out, visibly, as deselected."""
    if torch.cuda.is_available():
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    items[:] = [item for item in items if item not in gpu]
    if gpu:
        config.hook.pytest_deselected(items=gpu)
