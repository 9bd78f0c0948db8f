"""Server arguments: resolve what DSPARK needs, refuse what cannot be served, and say what was changed."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

from dspark.config import Settings
from dspark.drafter.checkpoint import load_draft_spec, read_config
from dspark.drafter.spec import DraftSpec
from dspark.errors import CheckpointError, ConfigError, HostError

logger = logging.getLogger("dspark")

CUDA_BACKENDS = ("fa3",)
CPU_BACKEND = "torch_native"


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
    _refuse_unsupported(server_args)
    if server_args.speculative_draft_model_path is None:
        raise ConfigError(
            "found no --speculative-draft-model-path; DSPARK needs the checkpoint of a drafter trained for this "
            "target; pass its folder or hub name"
        )
    weights = server_args.speculative_draft_load_format != "dummy"
    spec = _load_spec(server_args.speculative_draft_model_path, server_args.speculative_draft_model_revision, weights)
    target = server_args.get_model_config()
    spec.check_target(
        hidden_size=int(target.hidden_size),
        num_layers=int(target.num_hidden_layers),
        vocab_size=int(target.vocab_size),
    )
    spec = _resolve_gamma(server_args, spec)
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
        settings.verify_mode,
        spec.markov_kind,
        "yes" if spec.has_confidence else "no",
        list(spec.target_layer_ids),
        spec.mask_token_id,
        server_args.attention_backend or "host default",
        server_args.max_running_requests,
        "off" if server_args.disable_overlap_schedule else "on",
    )


def _refuse_unsupported(server_args: Any) -> None:
    from sglang.srt.utils import is_hip

    device = str(server_args.device).split(":")[0]
    if device not in ("cuda", "cpu") or (device == "cuda" and is_hip()):
        raise HostError(
            f"found device {server_args.device!r}; DSPARK serves on NVIDIA GPUs (cuda) and on CPUs; pass --device "
            "cuda or cpu"
        )
    for found, remedy in refused_features(server_args):
        raise ConfigError(f"found {found}; DSPARK does not support it yet; {remedy}")


def refused_features(server_args: Any) -> list[tuple[str, str]]:
    """(what was found, what to do) for every server feature that cannot be combined with DSPARK."""
    checks = (
        (server_args.pp_size != 1, f"--pp-size {server_args.pp_size}", "use --pp-size 1"),
        (server_args.enable_dp_attention, "--enable-dp-attention", "remove it"),
        (server_args.dp_size != 1, f"--dp-size {server_args.dp_size}", "start one server per replica behind a router"),
        (server_args.attn_cp_size != 1, f"attention context parallelism {server_args.attn_cp_size}", "use size 1"),
        (server_args.dcp_size != 1, f"decode context parallelism {server_args.dcp_size}", "use size 1"),
        (
            server_args.disaggregation_mode != "null",
            f"--disaggregation-mode {server_args.disaggregation_mode}",
            "remove it",
        ),
        (bool(server_args.enable_lora), "--enable-lora", "merge the adapter into the target"),
        (server_args.enable_two_batch_overlap, "--enable-two-batch-overlap", "remove it"),
        (server_args.enable_pdmux, "--enable-pdmux", "remove it"),
        (
            server_args.enable_hierarchical_cache,
            "--enable-hierarchical-cache",
            "remove it: restored tokens would lack draft context",
        ),
        (
            server_args.speculative_draft_window_size is not None,
            "--speculative-draft-window-size",
            "remove it: the checkpoint says what its layers see",
        ),
        (
            server_args.page_size not in (None, 1) and server_args.device == "cpu",
            f"--page-size {server_args.page_size} on a CPU",
            "use --page-size 1",
        ),
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
        server_args.max_running_requests = derived_max_running_requests(spec)
        logger.info(
            "dspark: max_running_requests=%d, from the memory that a step's logits take; --max-running-requests "
            "overrides it",
            server_args.max_running_requests,
        )
    if server_args.enable_mixed_chunk:
        logger.warning("dspark: --enable-mixed-chunk is switched off; a step drafts for every request or prefills")
        server_args.enable_mixed_chunk = False


def _note_idle_flags(server_args: Any) -> None:
    """Flags of the confidence scheduler are accepted by the host's parser but do nothing in static mode."""
    for field in (
        "speculative_dspark_sps_table_path",
        "speculative_dspark_confidence_sts_path",
        "speculative_dspark_align_verify_tokens_to_graph_tier",
    ):
        if getattr(server_args, field):
            logger.warning("dspark: --%s has no effect: static mode verifies full windows", field.replace("_", "-"))
