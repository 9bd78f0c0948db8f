"""The draft network on what the target shares with it."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from sglang.srt.runtime_context import get_parallel

from dspark.host import cpu
from tests.compare import assert_equal

cpu.install_if_no_gpu()

from dspark.host.draft_model import DSparkDraftNet  # noqa: E402


def test_padding_of_the_lm_head_is_never_drafted() -> None:
    """The host pads a vocabulary to its own multiple, with rows that may hold anything."""
    spec, width = SimpleNamespace(vocab_size=5), 3
    head = SimpleNamespace(weight=torch.randn(8, width, generator=torch.Generator().manual_seed(1)))
    head.weight[5], head.weight[6], head.weight[7] = torch.inf, torch.nan, 1e9
    hidden = torch.rand(2, 4, width, generator=torch.Generator().manual_seed(2))
    net = SimpleNamespace(spec=spec, _shared={"lm_head": head})
    with get_parallel().override(tp_size=1):
        logits = DSparkDraftNet.base_logits(net, hidden)
    assert_equal(logits, (hidden @ head.weight.T)[..., :5], "logits of tokens")
    assert logits.shape == (2, 4, 5)
    assert bool(logits.isfinite().all())
