"""What some requests want of a step beside its tokens: a grammar's mask on the logits, and logprobs out of them.

The step knows nothing of either. Whoever runs it calls, in this order: ``drafted`` before the target's forward,
``mask`` after it (the host walks its grammars while the device computes), ``keep`` once the logits are adjusted, and
``attach`` when the tokens are known.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.logprob_processor import compute_spec_v2_logprobs
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask

from dspark.kernels.ragged_pack import ragged_pack
from dspark.kernels.triton_adjust import adjust_logits, count_tokens, mask_rows
from dspark.types import Adjustments, AdjustTable, PackedRows

Barrier = Callable[[], None]


class StepExtras:
    """Grammars and logprobs of one step."""

    def __init__(self, batch: ScheduleBatch, barrier: Barrier | None = None) -> None:
        """Args:
        batch: a batch of the host, with ``wanted(batch)``.
        barrier: advances the grammars over what the step before has committed; None: the host has done so.
        """
        self._batch, self._barrier = batch, barrier
        self._tree: GrammarTree | None = None
        self._chosen = [i for i, req in enumerate(batch.reqs) if req.return_logprob] if batch.return_logprob else []
        self._rows: torch.Tensor | None = None

    def drafted(self, tokens: torch.Tensor) -> None:
        """Start the copy of the windows [R, W] (anchor and drafts) to the host."""
        if self._batch.has_grammar:
            self._tree = GrammarTree.from_linear_chain(tokens)

    def mask(self, logits: torch.Tensor, packed: PackedRows | None, window: int) -> None:
        """Take away what the grammars do not allow, row by row.

        Args:
            logits: [N, V] of the forwarded rows, written to.
            packed: where they belong; None: full windows, request after request.
            window: rows of the windows that ``drafted`` was given.
        """
        if self._tree is None:
            return
        mask = build_grammar_vocab_mask(
            reqs=self._batch.reqs,
            tree=self._tree,
            sampling_info=self._batch.sampling_info,
            device=logits.device,
            barrier=self._barrier,
        )
        if mask is None:
            return
        if packed is None:
            place = torch.arange(logits.shape[0], device=logits.device)
        else:  # padding behind a batch belongs to requests that have no mask
            place = (packed.request * window + packed.column).clamp(max=mask.vocab_mask.shape[0] - 1)
        mask_rows(logits, mask.vocab_mask, place)

    def keep(self, logits: torch.Tensor, index: torch.Tensor) -> None:
        """Copy the rows that logprobs will be read from, before filters write to them.

        Args:
            logits: [N, V], adjusted.
            index: [R, W] int64, row of each place of the windows.
        """
        if self._chosen:
            self._rows = logits[index[self._selected(logits.device)].flatten()]

    def attach(self, output: LogitsProcessorOutput, tokens: torch.Tensor) -> None:
        """Give the host the logprobs of the tokens [R, W], for each place of each window as its decoding expects."""
        if self._rows is None:
            return
        batch, (requests, window) = self._batch, tokens.shape
        count, chosen = len(self._chosen), self._selected(tokens.device)
        info, of_rows = batch.sampling_info, torch.arange(len(self._chosen) * window, device=tokens.device)
        found = LogitsProcessorOutput(next_token_logits=self._rows)
        part = SimpleNamespace(
            seq_lens=range(count),
            sampling_info=SimpleNamespace(is_all_greedy=info.is_all_greedy, temperatures=info.temperatures[chosen]),
            top_logprobs_nums=[batch.top_logprobs_nums[i] for i in self._chosen],
            token_ids_logprobs=[batch.token_ids_logprobs[i] for i in self._chosen],
        )
        compute_spec_v2_logprobs(part, found, tokens[chosen].flatten(), of_rows.view(count, window), window - 1)
        values = torch.zeros((requests, window), dtype=torch.float32, device=tokens.device)
        values[chosen] = found.next_token_logprobs
        output.next_token_logprobs = values
        for name in ("next_token_top_logprobs", "next_token_token_ids_logprobs"):
            for part_name in (f"{name}_val", f"{name}_idx"):
                # The host reads all of them as tensors but the ids that requests have named themselves.
                nothing: object = [] if part_name == "next_token_token_ids_logprobs_idx" else torch.empty(0)
                setattr(output, part_name, self._spread(getattr(found, part_name), requests, window, nothing))

    def _spread(self, found: list | None, requests: int, window: int, nothing: object) -> list | None:
        """One entry per place of every request, ``nothing`` where nothing was asked for."""
        if not found:
            return None
        spread: list = [nothing] * (requests * window)
        for number, request in enumerate(self._chosen):
            for place in range(window):
                entry = found[number * window + place]
                if len(entry):
                    spread[request * window + place] = entry
        return spread

    def _selected(self, device: torch.device) -> torch.Tensor:
        chosen = torch.tensor(self._chosen, pin_memory=device.type == "cuda")
        return chosen.to(device, non_blocking=True)


def wanted(batch: ScheduleBatch) -> bool:
    """Whether some request of the batch has a grammar or wants logprobs."""
    return bool(batch.has_grammar or batch.return_logprob)


def mask_prefill(batch: ScheduleBatch, logits: torch.Tensor) -> None:
    """Take away what grammars do not allow as the first token: ``logits`` [R, V] are written to."""
    info = batch.sampling_info
    info.update_regex_vocab_mask()
    if info.grammar_mask is not None:
        mask_rows(logits, info.grammar_mask.vocab_mask, torch.arange(logits.shape[0], device=logits.device))
        info.grammar_mask = None


def attach_prefill(
    batch: ScheduleBatch, output: LogitsProcessorOutput, logits: torch.Tensor, tokens: torch.Tensor
) -> None:
    """Logprobs of the first tokens [R], from their adjusted ``logits`` [R, V]."""
    if not batch.return_logprob:
        return
    extras = StepExtras(batch)
    extras.keep(logits, torch.arange(logits.shape[0], device=logits.device)[:, None])
    extras.attach(output, tokens[:, None])
    if output.next_token_logprobs is not None:
        output.next_token_logprobs = output.next_token_logprobs.flatten()


def compile_kernels(vocab: int, table: AdjustTable) -> None:
    """Launch once what a first request would have to wait for: penalties of a prefill, and a grammar's mask."""
    device = table.active.device
    row, place = torch.zeros((1, vocab), dtype=torch.float32, device=device), torch.zeros_like(table.min_length[:1])
    drafts, one = place.new_zeros(1, 0), torch.zeros(1, dtype=torch.int32, device=device)
    adjust = Adjustments(table, place)  # a row that is not active, and nothing to count
    adjust_logits(row, ragged_pack(one + 1, 1, 1), drafts, place, adjust)
    count_tokens(place[:, None], one, adjust)
    mask_rows(row, torch.zeros((1, -(-vocab // 32)), dtype=torch.int32, device=device), place)
