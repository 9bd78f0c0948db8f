"""The two networks of the step on static buffers: no host batch, no host lengths, nothing but device work.

They build a ``ForwardBatch`` of tensors and call the model directly, inside a CUDA graph capture or (on a CPU, for
tests) outside of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.model_runner import ModelRunner

from dspark.cuda_graph.static import StepBuffers
from dspark.host.flash_attention import RowAttention, Spans
from dspark.host.networks import HostDraftNet, block_info, ragged_layout
from dspark.host.target_attention import FusedAttention
from dspark.host.target_logits import NarrowLogits
from dspark.types import DecodeBatch, TargetRows, VerifyPlan


class PageTable:
    """KV slots of each staged request, read from the host's slot table once per step."""

    def __init__(self, runner: ModelRunner, buffers: StepBuffers, mask_token_id: int) -> None:
        self._table = runner.req_to_token_pool.req_to_token
        self._buffers, self._mask_token_id = buffers, mask_token_id
        self.pages: torch.Tensor | None = None  # the CPU backend reads the table itself
        if self._table.is_cuda:
            shape = (buffers.slots, self._table.shape[1])
            self.pages = torch.zeros(shape, dtype=torch.int32, device=self._table.device)

    def read(self, slots: int, depth: int | None = None) -> None:
        """Everything of a step of ``slots`` requests that depends on the slot table: the scheduler may write it then.

        ``depth`` is the length of the blocks that it drafts; None: whole ones.
        Rows of the table are reserved up to two windows beyond the length.
        """
        pages = None if self.pages is None else self.pages[:slots]
        self._buffers.begin(slots, self._table, self._mask_token_id, pages, depth)


class _StaticForward:
    """Runs one model on packed rows of staged requests."""

    def __init__(
        self,
        runner: ModelRunner,
        buffers: StepBuffers,
        pages: PageTable,
        layers: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Args:
        runner: of the model.
        layers: entered around the forward.
        """
        self._runner, self._buffers, self._pages, self._layers = runner, buffers, pages, layers

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        lens: torch.Tensor,
        window: int,
        hidden: CaptureHiddenMode,
        spans: Spans,
    ) -> Any:
        """Args: tokens, positions, slots [T] int64; lengths [S] int64; lens [S] int32; spans: see ``RowAttention``."""
        count = lengths.shape[0]
        layout = ragged_layout(lens, tokens.shape[0]) if self._pages.pages is None else None  # FA3 gets it as metadata
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=count,
            input_ids=tokens,
            req_pool_indices=self._buffers.rows[:count],
            seq_lens=lengths,
            out_cache_loc=slots,
            seq_lens_sum=0,
            positions=positions,
            spec_algorithm=self._runner.spec_algorithm,
            spec_info=block_info(window, tokens, positions, hidden, layout),
            capture_hidden_mode=hidden,
        )
        backend = self._runner.attn_backend
        if self._pages.pages is None:
            backend.init_forward_metadata(forward_batch)
        else:
            backend = RowAttention(backend, spans, self._pages.pages[:count], window)
        with forward_context(ForwardContext(attn_backend=backend)), self._layers():
            return self._runner.model.forward(tokens, positions, forward_batch)


class StaticDraftNet(HostDraftNet):
    """The drafter on static buffers; only the block's forward differs."""

    def __init__(self, runner: ModelRunner, buffers: StepBuffers, pages: PageTable, mask_token_id: int) -> None:
        super().__init__(runner, mask_token_id)
        self._model.bind(runner.token_to_kv_pool)
        self._forward, self._buffers = _StaticForward(runner, buffers, pages), buffers

    def block_hidden(self, batch: DecodeBatch, depth: int | None = None) -> torch.Tensor:
        """[S, D, H]; padding drafts too, into the spare KV slot."""
        block = self._buffers.block[depth].of(batch.size)
        rows = block.ids, block.positions, block.slots
        spans = block.offsets, block.keys, block.key_offsets
        output = self._forward(*rows, batch.lengths, block.lens, block.depth, CaptureHiddenMode.NULL, spans)
        return output.hidden_states.view(batch.size, block.depth, -1)


class StaticTargetNet:
    """:class:`dspark.worker.protocols.TargetNet` on static buffers."""

    def __init__(self, runner: ModelRunner, buffers: StepBuffers, pages: PageTable) -> None:
        self._exchanges = FusedAttention(runner.model, runner.token_to_kv_pool), NarrowLogits(runner.model)
        self._forward = _StaticForward(runner, buffers, pages, self._exchanged)

    @contextmanager
    def _exchanged(self) -> Iterator[None]:
        attention, logits = self._exchanges
        with attention.exchanged(), logits.exchanged():
            yield

    def verify(self, batch: DecodeBatch, plan: VerifyPlan) -> TargetRows:
        """Forward the rows of a tier."""
        assert plan.packed is not None
        assert plan.spans is not None
        output = self._forward(
            *plan.inputs(batch),
            batch.lengths,
            plan.packed.lens,
            plan.tokens.shape[1],
            CaptureHiddenMode.FULL,
            plan.spans,
        )
        return TargetRows(logits=output.next_token_logits, features=output.hidden_states)
