"""Logits that keep their type, through the host's real logits processor on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dspark.host import cpu
from tests.compare import assert_equal

cpu.install_if_no_gpu()

from sglang.srt.layers.logits_processor import LogitsProcessor  # noqa: E402

from dspark.host.target_logits import NarrowLogits  # noqa: E402

METADATA: Any = SimpleNamespace(next_token_logits_buffer=None)


def model_of(**fields: Any) -> nn.Module:
    """A model with a processor for 10 of 16 columns."""
    processor = LogitsProcessor.__new__(LogitsProcessor)
    nn.Module.__init__(processor)
    processor.vocab_size, processor.logit_scale, processor.final_logit_softcapping = 10, None, None
    for name, value in fields.items():
        setattr(processor, name, value)
    model = nn.Module()
    model.logits_processor = processor
    return model


def test_values_are_those_of_the_host_without_the_copy() -> None:
    model, logits = model_of(), torch.randn(3, 16).bfloat16()
    processor: Any = model.logits_processor
    required = processor._copy_logits_to_buffer(logits, METADATA)
    with NarrowLogits(model).exchanged():
        found = processor._copy_logits_to_buffer(logits, METADATA)
    assert (required.dtype, found.dtype) == (torch.float32, torch.bfloat16)
    assert found.data_ptr() == logits.data_ptr()
    assert_equal(found.float(), required, "logits")
    assert processor._copy_logits_to_buffer(logits, METADATA).dtype == torch.float32, "only within"


@pytest.mark.parametrize("fields", [{"logit_scale": 0.5}, {"final_logit_softcapping": 30.0}])
def test_a_processor_that_changes_logits_does_it_in_float32(fields: dict[str, Any]) -> None:
    model = model_of(**fields)
    with NarrowLogits(model).exchanged():
        found = model.logits_processor._copy_logits_to_buffer(torch.randn(3, 16).bfloat16(), METADATA)
    assert found.dtype == torch.float32


def test_a_model_without_a_processor_is_left_alone() -> None:
    with NarrowLogits(nn.Module()).exchanged():
        pass
