"""The two networks of the step (``dspark.worker.protocols``) on SGLang's model runners."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

from dspark.drafter.heads import ConfidenceScale
from dspark.host.draft_model import DSparkDraftNet
from dspark.host.extras import StepExtras
from dspark.types import DecodeBatch, TargetRows, VerifyPlan


def block_info(
    rows: int,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    mode: CaptureHiddenMode,
    layout: RaggedVerifyLayout | None = None,
) -> DFlashVerifyInput:
    """The host's description of a forward with ``rows`` consecutive rows per request (no tree, no mask).

    With a ``layout`` the rows are packed, and ``rows`` is the most that one request may have.
    """
    info = DFlashVerifyInput(
        draft_token=tokens,
        positions=positions,
        draft_token_num=rows,
        custom_mask=None,
        capture_hidden_mode=mode,
        ragged_verify_layout=layout,
    )
    if layout is not None:
        # Graphs of full windows compare this with their own width: packed rows must not be replayed by one of them.
        info.num_tokens_per_req = 1
    return info


def ragged_layout(lens: torch.Tensor, rows: int) -> RaggedVerifyLayout:
    """The host's description of ``rows`` packed rows, [R] int32 ``lens`` per request, made of device values only."""
    ends = lens.cumsum(0, dtype=torch.int32)
    return RaggedVerifyLayout(
        verify_lens=lens,
        graph_num_tokens=rows,
        extend_start_loc=ends - lens,
        qo_indptr_device=torch.nn.functional.pad(ends, (1, 0)),
    )


class HostDraftNet:
    """The drafter, bound to the batch of the current step."""

    def __init__(self, runner: ModelRunner, mask_token_id: int) -> None:
        self._runner = runner
        self._model: DSparkDraftNet = runner.model
        self._mask_token_id = mask_token_id
        self._host_batch: ScheduleBatch | None = None
        self.markov_head = self._model.markov_head
        self.confidence_head = self._model.confidence_head
        self.calibration: ConfidenceScale | None = None

    def bind(self, host_batch: ScheduleBatch) -> None:
        """Name the host's batch that the next forwards belong to."""
        self._host_batch = host_batch

    def block_hidden(self, batch: DecodeBatch, depth: int | None = None) -> torch.Tensor:
        """[R, D, H]; see :class:`dspark.worker.protocols.DraftNet`."""
        host = self._host_batch
        assert host is not None
        rows = depth or batch.positions.shape[1] - 1
        tokens = torch.full((batch.size, rows), self._mask_token_id, dtype=torch.int64, device=batch.anchors.device)
        tokens[:, 0] = batch.anchors
        positions = batch.positions[:, :rows].reshape(-1)
        lens_cpu, lens_sum = _host_lengths(host, rows)
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=batch.size,
            input_ids=tokens.view(-1),
            req_pool_indices=host.req_pool_indices,
            seq_lens=batch.lengths,
            out_cache_loc=batch.slots[:, :rows].reshape(-1),
            seq_lens_sum=lens_sum,
            seq_lens_cpu=lens_cpu,
            positions=positions,
            spec_algorithm=host.spec_algorithm,
            spec_info=block_info(rows, tokens.view(-1), positions, CaptureHiddenMode.NULL),
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        output = self._runner.forward(forward_batch).logits_output
        return output.hidden_states.view(batch.size, rows, -1)

    def base_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, G, H] -> [R, G, V]."""
        return self._model.base_logits(hidden)

    def inject(self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Write the context KV of N tokens."""
        self._model.write_context(self._runner.token_to_kv_pool, features, positions, slots)


class HostTargetNet:
    """The target, bound to the batch of the current step."""

    def __init__(self, worker: TpModelWorker) -> None:
        self._worker = worker
        self._host_batch: ScheduleBatch | None = None
        self._extras: StepExtras | None = None
        self.output: LogitsProcessorOutput | None = None

    def bind(self, host_batch: ScheduleBatch, extras: StepExtras | None = None) -> None:
        """Name the host's batch that the next forward belongs to, and what its requests want of it."""
        self._host_batch, self._extras = host_batch, extras

    @property
    def logits(self) -> torch.Tensor:
        """[N, V] of the last forward, as adjusted since."""
        assert self.output is not None
        logits: torch.Tensor = self.output.next_token_logits
        return logits

    def verify(self, batch: DecodeBatch, plan: VerifyPlan) -> TargetRows:
        """Forward the planned rows; see :class:`dspark.worker.protocols.TargetNet`."""
        host = self._host_batch
        assert host is not None
        window = plan.tokens.shape[1]
        tokens, positions, slots = plan.inputs(batch)
        layout = None if plan.packed is None else ragged_layout(plan.packed.lens, tokens.shape[0])
        verify = block_info(window, tokens, positions, CaptureHiddenMode.FULL, layout)
        host.out_cache_loc = slots
        if host.seq_lens_cpu is None:
            # Backends that need host lengths may take an upper bound: rows past a request's length are never read.
            host.seq_lens_cpu, host.seq_lens_sum = _host_lengths(host, window)
        if self._extras is not None:
            self._extras.drafted(plan.tokens)
        forward_batch, _ = verify.prepare_for_verify(host, self._worker)
        result = self._worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
        )
        self.output = result.logits_output
        logits = self.output.next_token_logits
        if self._extras is not None:
            self._extras.mask(logits, plan.packed, window)
        features, self.output.hidden_states = self.output.hidden_states, None  # never copied to the host
        return TargetRows(logits=logits, features=features)


def _host_lengths(host: ScheduleBatch, rows: int) -> tuple[torch.Tensor, int]:
    """[R] int64 on the CPU and their sum: lengths after the forward, or the reserve as their upper bound."""
    if host.seq_lens_cpu is not None:
        lens: torch.Tensor = host.seq_lens_cpu + rows
        return lens, int(lens.sum())
    draft_input: Any = host.spec_info
    return draft_input.reserved_seq_lens_cpu, int(draft_input.reserved_seq_lens_sum)
