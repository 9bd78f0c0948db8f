"""Everything that depends on the host's version: which names are used, with which parameters.

One table per supported release. A name that moved stops the server with the name; a new release becomes a new table
(and, where a call differs, a function here that hides the difference), never an ``if`` in the worker.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import pkgutil
from dataclasses import dataclass

from dspark.errors import HostError


@dataclass(frozen=True)
class HostName:
    """A name of the host that this package uses."""

    path: str  # dotted path
    parameters: tuple[str, ...] = ()  # parameters that must exist; empty: existence is enough


_SRT = "sglang.srt."

FUSED_ATTENTIONS = {
    _SRT + "models.llama.LlamaAttention": False,
    _SRT + "models.qwen2.Qwen2Attention": False,
    _SRT + "models.qwen3.Qwen3Attention": True,
}
"""Attention layers that are projection, rotation, attention, projection, and nothing else -> norms of heads or not."""

_TABLE_0_5_17 = (
    # take-over
    HostName(_SRT + "speculative.spec_info.SpeculativeAlgorithm.create_worker", ("self", "server_args")),
    HostName(_SRT + "speculative.spec_info.SpeculativeAlgorithm.is_dspark", ("self",)),
    HostName(_SRT + "arg_groups.speculative_hook._handle_dspark", ("server_args",)),
    HostName(_SRT + "plugins.hook_registry.HookRegistry.register", ("target", "hook", "hook_type")),
    # hooked
    HostName(_SRT + "managers.scheduler.validate_dflash_request", ("req", "enable_overlap")),
    HostName(_SRT + "mem_cache.kv_cache_configurator.get_req_to_token_extra_context_len", ("server_args",)),
    HostName(
        _SRT + "speculative.dflash_utils.scale_kv_cell_size_per_token_for_dflash",
        ("target_cell_size_per_token", "target_num_layers", "draft_num_layers", "draft_cell_size_per_token"),
    ),
    HostName(
        _SRT + "mem_cache.allocation.assign_req_to_token_pool_func",
        ("req_pool_indices", "req_to_token", "start_offset", "end_offset", "out_cache_loc", "batch_size"),
    ),
    HostName(_SRT + "mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup", ("self",)),
    HostName(_SRT + "managers.overlap_utils.FutureMap._resolve_spec_extras", ("self", "batch")),
    HostName(
        _SRT + "layers.logits_processor.LogitsProcessor._copy_logits_to_buffer",
        ("logits", "logits_metadata", "use_buffer"),
    ),
    HostName(_SRT + "layers.rotary_embedding.base._is_cpu"),
    HostName(_SRT + "layers.rotary_embedding.base.RotaryEmbedding.forward_cuda", ("positions", "query", "key")),
    HostName(_SRT + "layers.rotary_embedding.base.RotaryEmbedding.forward_native", ("positions", "query", "key")),
    HostName(_SRT + "layers.quantization.unquant.UnquantizedLinearMethod"),
    HostName(_SRT + "layers.radix_attention.AttentionType.ENCODER_ONLY"),
    HostName(_SRT + "mem_cache.memory_pool.MHATokenToKVPool.get_kv_buffer", ("layer_id",)),
    HostName(_SRT + "mem_cache.memory_pool.MHATokenToKVPool.set_kv_buffer"),
    HostName(_SRT + "sampling.sampling_batch_info.SamplingBatchInfo.update_regex_vocab_mask"),
    HostName(_SRT + "models.registry.ModelRegistry.models"),
    HostName(_SRT + "layers.attention.attention_registry.ATTENTION_BACKENDS"),
    HostName(_SRT + "managers.schedule_batch.Req.update_finish_state", ("self", "new_accepted_len")),
    HostName(_SRT + "managers.scheduler.Scheduler.set_internal_state", ("self", "recv_req")),
    HostName(_SRT + "managers.io_struct.SetInternalStateReqOutput", ("updated",)),
    HostName(_SRT + "model_executor.model_runner_components.cuda_graph_setup.capture_decode_graph", ("model_runner",)),
    HostName(_SRT + "model_executor.model_runner_components.cuda_graph_setup.GraphCapture"),
    HostName(_SRT + "model_executor.forward_context.forward_context", ("ctx",)),
    HostName(_SRT + "model_executor.forward_context.ForwardContext", ("attn_backend",)),
    HostName(_SRT + "distributed.parallel_state.graph_capture"),
    HostName(_SRT + "distributed.parallel_state.get_tp_group"),
    HostName(_SRT + "distributed.parallel_state.GroupCoordinator.all_gather_object", ("obj",)),
    HostName(_SRT + "distributed.parallel_state.GroupCoordinator.barrier", ("self",)),
    HostName(_SRT + "distributed.parallel_state.GroupCoordinator.is_first_rank"),
    HostName(_SRT + "arg_groups.speculative_hook.handle_speculative_decoding", ("server_args",)),
    HostName(_SRT + "arg_groups.overrides.attention_backends_of"),
    HostName(_SRT + "arg_groups.overrides.resolved_view"),
    HostName(_SRT + "configs.hybrid_arch.mambaish_config"),
    HostName(_SRT + "plugins.hook_registry.HookRegistry._patched"),
    HostName(_SRT + "runtime_context.get_server_args"),
    HostName(_SRT + "runtime_context.get_parallel"),
    # worker
    HostName(_SRT + "managers.tp_worker.TpModelWorker.update_weights_from_tensor", ("self", "recv_req")),
    HostName(
        _SRT + "sampling.sampling_batch_info.SamplingBatchInfo",
        ("temperatures", "top_ps", "top_ks", "min_ps", "is_all_greedy", "is_any_greedy", "grammar_mask"),
    ),
    HostName(
        _SRT + "managers.schedule_batch.ScheduleBatch",
        (
            "reqs",
            "forward_mode",
            "seq_lens",
            "seq_lens_cpu",
            "seq_lens_sum",
            "req_pool_indices",
            "req_pool_indices_cpu",
            "out_cache_loc",
            "prefix_lens",
            "extend_lens",
            "is_prefill_only",
            "is_extend_in_batch",
            "sampling_info",
            "spec_info",
            "has_grammar",
            "return_logprob",
            "top_logprobs_nums",
            "token_ids_logprobs",
        ),
    ),
    HostName(
        _SRT + "sampling.sampling_params.SamplingParams",
        (
            "sampling_seed",
            "top_k",
            "top_p",
            "min_p",
            "frequency_penalty",
            "presence_penalty",
            "repetition_penalty",
            "min_new_tokens",
            "logit_bias",
            "stop_token_ids",
        ),
    ),
    HostName(_SRT + "speculative.base_spec_worker.BaseSpecWorker"),
    HostName(
        _SRT + "speculative.draft_worker_common.build_draft_tp_worker",
        ("server_args", "gpu_id", "ps", "nccl_port", "target_model_config", "algo_label", "attention_backend_override"),
    ),
    HostName(
        _SRT + "managers.tp_worker.TpModelWorker.forward_batch_generation",
        ("self", "batch", "forward_batch", "is_verify", "skip_attn_backend_init", "capture_hidden_mode"),
    ),
    HostName(
        _SRT + "managers.scheduler.GenerationBatchResult",
        (
            "logits_output",
            "next_token_ids",
            "accept_lens",
            "new_seq_lens",
            "next_draft_input",
            "can_run_cuda_graph",
            "speculative_num_draft_tokens",
            "cap_lens",
            "block_accept_lens",
        ),
    ),
    HostName(
        _SRT + "speculative.ragged_verify.RaggedVerifyLayout",
        ("verify_lens", "graph_num_tokens", "extend_start_loc", "qo_indptr_device"),
    ),
    HostName(
        _SRT + "speculative.dflash_info.DFlashVerifyInput",
        ("draft_token", "positions", "draft_token_num", "custom_mask", "capture_hidden_mode", "ragged_verify_layout"),
    ),
    HostName(_SRT + "speculative.dflash_info.DFlashVerifyInput.prepare_for_verify", ("batch", "target_worker")),
    HostName(_SRT + "managers.schedule_batch.ReqKvInfo", ("kv_allocated_len",)),
    HostName(_SRT + "environ.envs.SGLANG_ENABLE_OVERLAP_PLAN_STREAM"),
    HostName(_SRT + "mem_cache.base_prefix_cache.BasePrefixCache.evictable_size", ("self",)),
    HostName(_SRT + "mem_cache.base_prefix_cache.BasePrefixCache.supports_swa", ("self",)),
    HostName(_SRT + "mem_cache.base_prefix_cache.BasePrefixCache.supports_mamba", ("self",)),
    HostName(_SRT + "mem_cache.allocator.BaseTokenToKVPoolAllocator.available_size", ("self",)),
    HostName(
        _SRT + "mem_cache.allocation.alloc_for_spec_decode",
        ("reqs", "req_pool_indices", "cur_kv_lens", "nxt_kv_lens", "nxt_kv_lens_cpu", "num_needed_tokens", "batch"),
    ),
    HostName(_SRT + "speculative.dflash_info_v2.DFlashDraftInputV2.prepare_for_decode", ("self", "batch")),
    HostName(
        _SRT + "speculative.dflash_info_v2.DFlashDraftInputV2",
        ("bonus_tokens", "new_seq_lens", "reserved_seq_lens_cpu", "reserved_seq_lens_sum"),
    ),
    HostName(
        _SRT + "model_executor.forward_batch_info.ForwardBatch",
        (
            "forward_mode",
            "batch_size",
            "input_ids",
            "req_pool_indices",
            "seq_lens",
            "out_cache_loc",
            "positions",
            "spec_info",
        ),
    ),
    HostName(_SRT + "model_executor.forward_batch_info.compute_position", ("attn_backend", "extend_prefix_lens")),
    HostName(_SRT + "model_executor.model_runner.ModelRunner.forward", ("self", "forward_batch")),
    # grammars and logprobs
    HostName(_SRT + "sampling.sampling_batch_info.SamplingBatchInfo.update_regex_vocab_mask", ("self",)),
    HostName(_SRT + "constrained.xgrammar_backend._allocate_token_bitmask", ("vocab_size", "batch_size")),
    HostName(_SRT + "constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask", ("self", "logits", "vocab_mask")),
    HostName(_SRT + "speculative.spec_utils.GrammarTree.from_linear_chain", ("verify_ids_2d",)),
    HostName(
        _SRT + "speculative.spec_utils.build_grammar_vocab_mask",
        ("reqs", "tree", "sampling_info", "device", "barrier"),
    ),
    HostName(
        _SRT + "layers.logprob_processor.compute_spec_v2_logprobs",
        ("batch", "logits_output", "predict", "accept_index", "speculative_num_steps"),
    ),
    # draft network
    HostName(
        _SRT + "layers.linear.QKVParallelLinear", ("hidden_size", "head_size", "total_num_heads", "total_num_kv_heads")
    ),
    HostName(_SRT + "layers.linear.MergedColumnParallelLinear", ("input_size", "output_sizes")),
    HostName(_SRT + "layers.linear.RowParallelLinear", ("input_size", "output_size")),
    HostName(
        _SRT + "layers.radix_attention.RadixAttention",
        ("num_heads", "head_dim", "scaling", "num_kv_heads", "layer_id", "attn_type"),
    ),
    HostName(
        _SRT + "layers.vocab_parallel_embedding.VocabParallelEmbeddingShardIndices",
        ("org_vocab_start_index", "org_vocab_end_index"),
    ),
    HostName(_SRT + "layers.rotary_embedding.get_rope", ("head_size", "rotary_dim", "max_position", "base")),
    HostName(_SRT + "mem_cache.memory_pool.KVWriteLoc", ("loc",)),
    HostName(_SRT + "layers.attention.torch_native_backend.TorchNativeAttnBackend", ("model_runner",)),
)

# The host's own DSPARK. Never imported here: the worker reports which of these the process has loaded.
BUILTIN_MODULES = (
    _SRT + "speculative.dspark_components.",
    "sglang.kernels.ops.speculative.dspark.",
    _SRT + "models.dspark",
    _SRT + "models.deepseek_v4_dspark",
)

TABLES: dict[str, tuple[HostName, ...]] = {"0.5.17": _TABLE_0_5_17}


def host_version() -> str:
    """Version of the installed SGLang.

    Raises:
        HostError: SGLang is not installed.
    """
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise HostError(
            f"found no sglang; required is one of {', '.join(TABLES)}; pip install sglang=={next(iter(TABLES))}"
        ) from None


def _parameters(target: object) -> set[str]:
    try:
        return set(inspect.signature(target).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return set()


def problems(table: tuple[HostName, ...]) -> list[str]:
    """Every name of a table that the installed host does not have as described."""
    found = []
    for name in table:
        try:
            target = pkgutil.resolve_name(name.path)
        except (ImportError, AttributeError) as error:
            found.append(f"{name.path} ({error})")
            continue
        missing = set(name.parameters) - _parameters(target) if name.parameters else set()
        if missing:
            found.append(f"{name.path} (no parameter {', '.join(sorted(missing))})")
    return found


def check(version: str | None = None) -> None:
    """Refuse a host that this package does not know.

    Args:
        version: the host's version; the installed one if None.

    Raises:
        HostError: unknown version, or a name of its table has moved.
    """
    version = host_version() if version is None else version
    known = ", ".join(TABLES)
    if version not in TABLES:
        raise HostError(
            f"found sglang {version}; this version of sglang-dspark knows {known}; install one of these, or set "
            "SGLANG_DSPARK_IMPL=builtin for the host's own worker"
        )
    moved = problems(TABLES[version])
    if moved:
        raise HostError(
            f"found sglang {version} without: {'; '.join(moved)}; known to work is {known} as released; reinstall it"
        )
