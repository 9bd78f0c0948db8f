"""Hooks on the host, registered through its own registry. Each one says which fact of the host makes it necessary."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_server_args

from dspark.host import meta_info

logger = logging.getLogger("dspark")

_PIN = "dspark_force_budget_frac"
_UNPIN = -1
_DRAFT_OFF = "dspark_force_draft_off"
_DEPTH = "dspark_force_depth"
_COUNTING = "dspark_counting"
_THRESHOLDS = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")


def _serves_dspark() -> bool:
    return get_server_args().speculative_algorithm == "DSPARK"


def _admit(original: Callable[..., Any], req: Any, enable_overlap: bool) -> str | None:
    """The host checks DFLASH and DSPARK requests with one function that knows only two limits."""
    if not _serves_dspark():
        return original(req, enable_overlap)
    from dspark.host.admission import refusal

    return refusal(req)


def _row_headroom(original: Callable[..., Any], server_args: Any) -> int:
    """A decode step reserves two windows ahead; the host's rows are wider than the context by one only.

    Near the context limit the reserve would spill into the next request's row and leak slots.
    """
    extra = original(server_args)
    if server_args.speculative_algorithm != "DSPARK":
        return extra
    return max(extra, 2 * server_args.speculative_num_draft_tokens + server_args.page_size + 4)


def _kv_cell_bytes(original: Callable[..., Any], **kwargs: Any) -> int:
    """The host guesses the draft's KV bytes per token from the target's geometry; ours come from the checkpoint."""
    if not _serves_dspark():
        return original(**kwargs)
    from dspark.host.memory import draft_kv_bytes_per_token

    return original(**kwargs | {"draft_cell_size_per_token": draft_kv_bytes_per_token()})


def _write_reserve(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """The host writes reserved slots with a Triton kernel; a CPU needs the same in torch."""
    req_to_token = kwargs["req_to_token"] if "req_to_token" in kwargs else args[1]
    if req_to_token.device.type != "cpu":
        original(*args, **kwargs)
        return
    from dspark.host.cpu import write_reserved_slots

    names = ("req_pool_indices", "req_to_token", "start_offset", "end_offset", "out_cache_loc")
    values = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
    write_reserved_slots(**values)


def _read_relay(original: Callable[..., Any], self: Any, batch: Any) -> None:
    """Reading the relay records a stream on a tensor, which torch does not offer for CPU tensors."""
    draft_input = batch.spec_info
    if not self.spec_algo.is_dspark() or torch.device(self.device).type != "cpu" or draft_input is None:
        original(self, batch)
        return
    indices = draft_input.future_indices
    if indices.shape[0]:
        draft_input.bonus_tokens = self.output_tokens_buf[indices]
        draft_input.dsa_topk_indices = None


def _prepare_kv_copy(original: Callable[..., Any], self: Any) -> None:
    """The host warms up a Triton kernel that moves KV between tree branches; a chain never moves KV."""
    if torch.device(self.device).type == "cpu":
        self._kv_copy_config = None
    else:
        original(self)


def _finish(original: Callable[..., Any], self: Any, new_accepted_len: int = 1) -> None:
    """The host tests a whole block at once: length before EOS before it, stop strings in the order they were listed.

    Plain decoding tests after every token, and the earliest reason wins. So the block is shown to the host token by
    token. All of it stays in ``output_ids``, since the KV accounting covers what was committed; ``finished_len`` cuts
    what is delivered. The host has walked the grammar over the block before; only the last token can have ended it.

    Hardly any block ends its request, and without stop strings (which are looked for in a window of text) the test of
    a whole block finds whether it does: only then are its tokens shown one by one. With hundreds of requests it is
    this that the device waits for.
    """
    if new_accepted_len <= 1 or self.finished() or self.to_finish or not _serves_dspark():
        original(self, new_accepted_len)
        return
    tokens, params = self.output_ids, self.sampling_params
    block = tokens[-new_accepted_len:]
    if not params.stop_strs and not params.stop_regex_strs:
        original(self, new_accepted_len)
        if not self.finished():
            return
        self.finished_reason = self.finished_len = None
        tokens[-new_accepted_len:] = block  # the host exchanges what is no token
    rest = list(block)
    del tokens[-new_accepted_len:]
    grammar = self.grammar
    while rest and not self.finished():
        tokens.append(rest.pop(0))
        self.grammar = None if rest else grammar
        original(self, 1)
    self.grammar = grammar
    if self.finished() and self.finished_len is None:
        self.finished_len = len(tokens)
    tokens.extend(rest)


def _allocate_mask(original: Callable[..., Any], vocab_size: int, batch_size: int) -> Any:
    """The host allocates grammar masks in pinned memory, which needs a GPU."""
    if torch.cuda.is_available():
        return original(vocab_size, batch_size)
    return torch.full((batch_size, -(-vocab_size // 32)), -1, dtype=torch.int32)


def _mask_vocabulary(original: Callable[..., Any], self: Any, logits: Any, vocab_mask: Any) -> None:
    """The host's grammars mask logits on accelerators only."""
    if logits.device.type != "cpu":
        original(self, logits, vocab_mask)
        return
    from dspark.kernels.triton_adjust import mask_rows

    mask_rows(logits, vocab_mask, torch.arange(logits.shape[0]))


def _set_state(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    """The host would answer with success where DSPARK cannot follow: lossy acceptance, a pin that is no fraction.

    It ends a pin with null, which its own HTTP schema (numbers only) does not let through; -1 does the same here.
    """
    if not self.spec_algorithm.is_dspark():
        return original(self, recv_req)
    pins = recv_req.server_args
    impossible = [name for name in _THRESHOLDS if pins.get(name, 1.0) != 1.0]
    fraction = pins.get(_PIN)
    if fraction == _UNPIN:
        pins[_PIN] = fraction = None
    if fraction is not None and not (type(fraction) in (int, float) and 0 < fraction <= 1):
        impossible.append(_PIN)
    if _DRAFT_OFF in pins and (_PIN in pins or pins[_DRAFT_OFF] not in (0, 1)):
        impossible.append(_DRAFT_OFF)
    depths = (-1, *self.draft_worker.depths) if fraction is not None else (-1,)
    if pins.get(_DEPTH, -1) not in depths:
        impossible.append(_DEPTH)
    if pins.get(_COUNTING, 1) not in (0, 1):
        impossible.append(_COUNTING)
    if not impossible:
        # The host knows no such keys.
        draft_off, counting, depth = (pins.pop(key, None) for key in (_DRAFT_OFF, _COUNTING, _DEPTH))
        output = _set_class(original, self, recv_req)
        if depth not in (None, -1) and output.updated:
            self.draft_worker.set_dspark_forced_budget_frac(fraction, int(depth))
        if counting is not None and output.updated:
            self.draft_worker.observer.counting = bool(counting)
        if draft_off is not None and output.updated:
            self.draft_worker.set_dspark_forced_budget_frac(0.0 if draft_off else None)
        return output
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    logger.error(
        "dspark: found %s; required are thresholds of 1.0 (acceptance is exact), a pin in (0, 1], or -1 to end it, "
        "or without a pin 1 to leave the draft out, or 0 to end that; beside a pin the length of short blocks (%s), "
        "or -1 for whole ones; and 0 or 1 for counting",
        {name: pins[name] for name in impossible},
        list(self.draft_worker.depths),
    )
    return SetInternalStateReqOutput(updated=False)


def _set_class(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    """The host knows no simulated classes: the worker takes this key, the host all others."""
    from dspark.host.simulate import SWITCH, switch

    missing = object()
    wanted = recv_req.server_args.pop(SWITCH, missing)
    problem = None if wanted is missing else switch(self.draft_worker.simulated, wanted)
    if problem is None:
        return original(self, recv_req)
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    logger.error("dspark: %s", problem)
    return SetInternalStateReqOutput(updated=False)


def _capture_decode(original: Callable[..., Any], *, model_runner: Any) -> Any:
    """The worker captures the whole step itself; the host's graphs of the target alone would only take memory."""
    from sglang.srt.model_executor.model_runner_components.cuda_graph_setup import GraphCapture

    if not _serves_dspark() or model_runner.is_draft_worker:
        return original(model_runner=model_runner)
    return GraphCapture(runner=None, memory_phase="target_verify", memory_usage_gb=0, capture_time=0)


def _resolve_step(original: Callable[..., Any], self: Any, result: Any, batch: Any) -> Any:
    """Here the host looks at the results of a step: they are there, and counted before a request may end by them."""
    tokens = original(self, result, batch)
    if hasattr(result, "observer"):  # an ``ObservedResult``, of our worker
        self.model_worker.ending = result.observer  # where requests are counted that end by this step
        if result.observer is not None:
            result.observer.processed(result, batch, tokens)
    return tokens


_SRT = "sglang.srt."
_RESULTS = _SRT + "managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor."
_TOKENIZER = _SRT + "managers.tokenizer_manager.TokenizerManager."
HOOKS: dict[str, Callable[..., Any]] = {
    _SRT + "managers.scheduler.validate_dflash_request": _admit,
    _SRT + "mem_cache.kv_cache_configurator.get_req_to_token_extra_context_len": _row_headroom,
    _SRT + "speculative.dflash_utils.scale_kv_cell_size_per_token_for_dflash": _kv_cell_bytes,
    _SRT + "mem_cache.allocation.assign_req_to_token_pool_func": _write_reserve,
    _SRT + "managers.overlap_utils.FutureMap._resolve_spec_extras": _read_relay,
    _SRT + "mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup": _prepare_kv_copy,
    _SRT + "managers.schedule_batch.Req.update_finish_state": _finish,
    _SRT + "constrained.xgrammar_backend._allocate_token_bitmask": _allocate_mask,
    _SRT + "constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask": _mask_vocabulary,
    _SRT + "managers.scheduler.Scheduler.set_internal_state": _set_state,
    _SRT + "model_executor.model_runner_components.cuda_graph_setup.capture_decode_graph": _capture_decode,
    _RESULTS + "_resolve_spec_v2_tokens": _resolve_step,
    _TOKENIZER + "_handle_batch_output": meta_info.take_out,
    _TOKENIZER + "_calculate_spec_decoding_metrics": meta_info.add,
}
"""Name in the host -> hook around it."""


def register() -> None:
    """Register all hooks; the host applies them after the last plugin has run."""
    for target, hook in HOOKS.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    from dspark.host import cpu

    cpu.install_if_no_gpu()
