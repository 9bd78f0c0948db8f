"""Server arguments: resolve what DSPARK needs, refuse what cannot be served, and say what was changed."""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path
from typing import Any

from dspark.config import HOST_FLAGS, MODE_VARIABLE, Settings, VerifyMode, answers
from dspark.drafter.checkpoint import load_draft_spec, read_config
from dspark.drafter.spec import DraftSpec
from dspark.errors import CheckpointError, ConfigError, HostError
from dspark.host.schedule import load_files
from dspark.host.simulate import load_simulation

logger = logging.getLogger("dspark")

CUDA_BACKENDS = ("fa3",)
CPU_BACKEND = "torch_native"

_defaulted_mode: VerifyMode | None = None
"""The mode that this process has put into the environment itself."""


@functools.lru_cache(maxsize=8)
def _load_spec(path: str, revision: str | None, weights: bool) -> DraftSpec:
    return load_draft_spec(draft_folder(path, revision), weights=weights)


def draft_folder(path: str, revision: str | None) -> Path:
    """Local folder of a draft given by path or by hub name.

    Raises:
        CheckpointError: neither a folder nor a repository that can be downloaded.
    """
    folder = Path(path).expanduser()
    if folder.exists() or path.count("/") != 1 or path.startswith((".", "/", "~")):
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:  # the hub raises many kinds; all mean that there is no checkpoint here
        raise CheckpointError(
            f"found neither a folder nor a downloadable repository {path!r} ({type(error).__name__}: {error}); "
            "check --speculative-draft-model-path"
        ) from None


def draft_spec_of(server_args: Any) -> DraftSpec:
    """The resolved draft of a server, blocks cut to the runtime gamma."""
    spec = _load_spec(
        server_args.speculative_draft_model_path,
        server_args.speculative_draft_model_revision,
        server_args.speculative_draft_load_format != "dummy",
    )
    return spec.with_gamma(server_args.speculative_num_draft_tokens - 1)


def resolve_server_args(server_args: Any) -> None:
    """Take the place of the host's DSPARK argument handling; edits ``server_args`` in place.

    Raises:
        DSparkError: something cannot be served; the text says what to change.
    """
    settings = Settings.from_environment()
    check_device(str(server_args.device))
    for found, remedy in refused_features(server_args):
        raise ConfigError(f"found {found}; DSPARK does not support it yet; {remedy}")
    spec = check_draft(server_args)
    spec.check_shards(int(server_args.tp_size))
    target = server_args.get_model_config()
    spec.check_target(
        hidden_size=int(target.hidden_size),
        num_layers=int(target.num_hidden_layers),
        vocab_size=int(target.vocab_size),
    )
    if spec.max_position < int(target.context_len):
        logger.warning(
            "dspark: the draft was trained for %d positions, the target serves %d; acceptance may fall beyond them",
            spec.max_position,
            target.context_len,
        )
    spec = _resolve_gamma(server_args, spec)
    mode = _resolve_mode(settings, spec)
    load_files(server_args, spec, mode)  # a bad file stops here, before any weight is loaded
    load_simulation(settings, spec.gamma)
    _resolve_backend(server_args)
    _resolve_draft_quantization(server_args)
    _resolve_batch(server_args, spec)
    _note_idle_flags(server_args)
    logger.info(
        "dspark: resolved gamma=%d window=%d layout=anchor-first mode=%s head=%s confidence=%s target_layers=%s "
        "mask_token=%d "
        "attention=%s max_running_requests=%s overlap=%s",
        spec.gamma,
        spec.window,
        mode,
        spec.markov_kind,
        "yes" if spec.has_confidence else "no",
        list(spec.target_layer_ids),
        spec.mask_token_id,
        server_args.attention_backend or "host default",
        server_args.max_running_requests,
        "off" if server_args.disable_overlap_schedule else "on",
    )


def check_device(device: str) -> None:
    """Refuse a device that DSPARK cannot serve on.

    Raises:
        HostError: not an NVIDIA GPU or a CPU, or a CPU next to a GPU.
    """
    import torch
    from sglang.srt.utils import is_hip

    kind = device.split(":")[0]
    if kind not in ("cuda", "cpu") or (kind == "cuda" and is_hip()):
        raise HostError(
            f"found device {device!r}; DSPARK serves on NVIDIA GPUs (cuda) and on CPUs; pass --device cuda or cpu"
        )
    if kind == "cpu" and torch.cuda.is_available():
        raise HostError(
            "found --device cpu on a machine with a GPU; SGLang picks its kernels by machine, not by flag; hide the "
            "GPU (CUDA_VISIBLE_DEVICES=) or pass --device cuda"
        )


def check_draft(server_args: Any) -> DraftSpec:
    """Read the draft's configuration and tensor headers.

    Raises:
        ConfigError: no path was given. CheckpointError: the checkpoint cannot be used.
    """
    if server_args.speculative_draft_model_path is None:
        raise ConfigError(
            "found no --speculative-draft-model-path; DSPARK needs the checkpoint of a drafter trained for this "
            "target; pass its folder or hub name"
        )
    weights = server_args.speculative_draft_load_format != "dummy"
    return _load_spec(server_args.speculative_draft_model_path, server_args.speculative_draft_model_revision, weights)


def refused_features(server_args: Any) -> list[tuple[str, str]]:
    """(what was found, what to do) for every server feature that cannot be combined with DSPARK."""
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.configs.hybrid_arch import mambaish_config

    view = resolved_view(server_args)
    target = server_args.get_model_config()
    lossy = (view.speculative_accept_threshold_single, view.speculative_accept_threshold_acc) != (1.0, 1.0)
    checks = (
        (view.pp_size != 1, f"--pp-size {view.pp_size}", "use --pp-size 1"),
        (view.enable_dp_attention, "--enable-dp-attention", "remove it"),
        (view.dp_size != 1, f"--dp-size {view.dp_size}", "start one server per replica behind a router"),
        (view.attn_cp_size != 1, f"attention context parallelism {view.attn_cp_size}", "use size 1"),
        (view.dcp_size != 1, f"decode context parallelism {view.dcp_size}", "use size 1"),
        (view.disaggregation_mode != "null", f"--disaggregation-mode {view.disaggregation_mode}", "remove it"),
        (bool(view.enable_lora), "--enable-lora", "merge the adapter into the target"),
        (view.enable_two_batch_overlap, "--enable-two-batch-overlap", "remove it"),
        (view.enable_pdmux, "--enable-pdmux", "remove it"),
        (view.enable_hierarchical_cache, "--enable-hierarchical-cache", "remove it"),
        (view.enable_memory_saver, "--enable-memory-saver", "remove it: a resumed draft would have lost its weights"),
        # Its allocations must go to the pool of the host's own graphs, which are not captured.
        (view.enable_symm_mem, "--enable-symm-mem", "remove it"),
        (view.enable_torch_compile, "--enable-torch-compile", "remove it"),
        (view.enable_deterministic_inference, "--enable-deterministic-inference", "remove it"),
        (
            view.speculative_use_rejection_sampling,
            "--speculative-use-rejection-sampling",
            "remove it: it is always exact",
        ),
        (lossy, "--speculative-accept-threshold-single or -acc below 1", "remove it: acceptance is exact"),
        (view.speculative_dflash_block_size is not None, "--speculative-dflash-block-size", "remove it"),
        (view.speculative_draft_window_size is not None, "--speculative-draft-window-size", "remove it"),
        (view.grammar_backend == "outlines", "--grammar-backend outlines", "use xgrammar or llguidance"),
        (view.page_size not in (None, 1), f"--page-size {view.page_size}", "use --page-size 1"),
        (
            view.kv_cache_dtype not in ("auto", "bf16", "bfloat16"),
            f"--kv-cache-dtype {view.kv_cache_dtype}",
            "use auto",
        ),
        (mambaish_config(target) is not None, "a target with recurrent layers", "serve a pure attention target"),
        (bool(target.is_hybrid_swa), "a target with sliding-window layers", "serve a full-attention target"),
        # The host cuts the positions of a verify into rows of equal length per request, which packed windows are not.
        (bool(target.model_is_mrope), "a target with multimodal rotary positions (mrope)", "serve a text target"),
    )
    return [(found, remedy) for present, found, remedy in checks if present]


def _resolve_gamma(server_args: Any, spec: DraftSpec) -> DraftSpec:
    """gamma from --speculative-dspark-block-size, or --speculative-num-draft-tokens - 1, or the trained block."""
    block, rows = server_args.speculative_dspark_block_size, server_args.speculative_num_draft_tokens
    if block is not None and rows is not None and rows != block + 1:
        raise ConfigError(
            f"found --speculative-dspark-block-size {block} and --speculative-num-draft-tokens {rows}; the second "
            "must be the first "
            "plus 1 (the anchor); pass only one of them"
        )
    gamma = block if block is not None else spec.gamma if rows is None else rows - 1
    spec = spec.with_gamma(int(gamma))
    for field, value in (("speculative_num_steps", 1), ("speculative_eagle_topk", 1)):
        found = getattr(server_args, field)
        if found not in (None, value):
            raise ConfigError(
                f"found --{field.replace('_', '-')} {found}; DSPARK drafts one chain per step, so {value} is "
                "required; remove the flag"
            )
        setattr(server_args, field, value)
    server_args.speculative_num_draft_tokens = spec.window
    return spec


def _resolve_backend(server_args: Any) -> None:
    """Pick attention backends that can run the ragged verify and the non-causal draft block."""
    if str(server_args.device).startswith("cpu"):
        if server_args.attention_backend not in (None, CPU_BACKEND):
            # "intel_amx" is the host's default on a CPU; it needs SGLang's CPU build and has no target verify.
            logger.warning(
                "dspark: attention backend %s has no verify on a CPU; using %s",
                server_args.attention_backend,
                CPU_BACKEND,
            )
        if server_args.speculative_draft_attention_backend not in (None, CPU_BACKEND):
            raise ConfigError(
                f"found --speculative-draft-attention-backend {server_args.speculative_draft_attention_backend}; on a "
                f"CPU the draft runs on {CPU_BACKEND}; remove the flag"
            )
        server_args.attention_backend = CPU_BACKEND
        server_args.speculative_draft_attention_backend = CPU_BACKEND
        return
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view

    for name in {
        *attention_backends_of(resolved_view(server_args)),
        server_args.speculative_draft_attention_backend,
    } - {None}:
        if name not in CUDA_BACKENDS:
            raise ConfigError(
                f"found attention backend {name!r}; DSPARK is tested with {', '.join(CUDA_BACKENDS)} on NVIDIA GPUs; "
                f"pass --attention-backend {CUDA_BACKENDS[0]}"
            )


def _resolve_draft_quantization(server_args: Any) -> None:
    """The host gives the draft the target's quantisation by default; a draft has its own, or none."""
    config = read_config(
        draft_folder(server_args.speculative_draft_model_path, server_args.speculative_draft_model_revision)
    )
    inherited = server_args.speculative_draft_model_quantization
    if inherited is not None and inherited == server_args.quantization and not config.get("quantization_config"):
        logger.info("dspark: the draft is not quantised, unlike its target (%s)", server_args.quantization)
        server_args.speculative_draft_model_quantization = None


def _resolve_batch(server_args: Any, spec: DraftSpec) -> None:
    from dspark.host.memory import derived_max_running_requests

    if server_args.max_running_requests is None:
        server_args.max_running_requests = derived_max_running_requests(spec, _device_bytes(server_args))
        logger.info(
            "dspark: max_running_requests=%d, from the memory that a step's logits take; --max-running-requests "
            "overrides it",
            server_args.max_running_requests,
        )
    if server_args.enable_mixed_chunk:
        logger.warning("dspark: --enable-mixed-chunk is switched off; a step drafts for every request or prefills")
        server_args.enable_mixed_chunk = False


def _device_bytes(server_args: Any) -> int:
    """Memory of the GPU in bytes; 0 on a CPU."""
    import torch

    if not str(server_args.device).startswith("cuda"):
        return 0
    return int(torch.cuda.get_device_properties(0).total_memory)


def _resolve_mode(settings: Settings, spec: DraftSpec) -> VerifyMode:
    """Settle the verify mode and leave it in the environment, where every process of the host looks for it."""
    global _defaulted_mode
    if settings.verify_mode == _defaulted_mode:  # set by an earlier server of this process, not by the user
        settings = settings.model_copy(update={"verify_mode": None})
    mode = settings.resolved_mode(spec.has_confidence)
    _defaulted_mode = mode if settings.verify_mode is None else None
    if settings.verify_mode is None:
        why = "the draft has a confidence head" if spec.has_confidence else "the draft has no confidence head"
        logger.info("dspark: %s is unset: %s mode, since %s", MODE_VARIABLE, mode, why)
        os.environ[MODE_VARIABLE] = mode
    return mode


def _note_idle_flags(server_args: Any) -> None:
    """Flags and variables of the host's own DSPARK that do nothing here are named."""
    for answer in answers():
        logger.warning("dspark: %s", answer)
    for name, setting in HOST_FLAGS.items():
        if not setting.honoured and getattr(server_args, name):
            logger.warning("dspark: --%s has no effect: %s", name.replace("_", "-"), setting.text)
