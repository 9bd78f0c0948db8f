"""Requests that cannot be served get HTTP 400 with a reason; the server lives and nothing is ignored."""

from __future__ import annotations

from typing import Any

from dspark.host import adjust, simulate

# A refused request still passes through one prefill of the host, which ends it. Nothing of it must act there.
_NEUTRAL = {
    **adjust.NEUTRAL,
    "logit_bias": None,
    "sampling_seed": None,
    "top_k": 1,
}
_MAX_TOP_K = 2**31 - 1  # the host keeps top_k as int32

# (test on the request, name of what was found)
_UNSUPPORTED = (
    (lambda req: req.return_hidden_states, "return_hidden_states"),
    (lambda req: req.custom_logit_processor, "custom_logit_processor"),
    (lambda req: req.input_embeds is not None, "input_embeds"),
    (lambda req: req.lora_id, "a LoRA adapter"),
)


def _invalid(req: Any) -> str | None:
    """What the host lets through although it would stop the scheduler, in words."""
    seed, top_k = req.sampling_params.sampling_seed, req.sampling_params.top_k
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        return f"found sampling_seed={seed!r}; required is an integer"
    if top_k > _MAX_TOP_K:
        return f"found top_k={top_k}; required is at most {_MAX_TOP_K}, or -1 for all tokens"
    for token, value in (req.sampling_params.logit_bias or {}).items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"found logit_bias {value!r} for token {token}; required are numbers"
    ids = req.origin_input_ids
    if len(ids) and req.multimodal_inputs is None and (min(ids) < 0 or max(ids) >= req.vocab_size):
        wrong = next(token for token in ids if not 0 <= token < req.vocab_size)
        return f"found the input token {wrong}; required are tokens from 0 to {req.vocab_size - 1}"
    return None


def refusal(req: Any) -> str | None:
    """Why a request cannot be served with DSPARK, or None if it can.

    Args:
        req: the host's ``Req``, sampling parameters normalised; a refused one loses what it was refused for, a served
            one its penalties and biases, which steps apply themselves.
    """
    reason = _invalid(req) or simulate.refusal(req)
    found = [name for test, name in _UNSUPPORTED if test(req)]
    if reason is None and not found:
        adjust.take(req)
        return None
    for field, value in _NEUTRAL.items():
        setattr(req.sampling_params, field, value)
    req.custom_logit_processor = None
    return reason or (
        f"This server decodes speculatively (DSPARK) and does not support {', '.join(found)} yet; "
        "remove it from the request, or send the request to a server without --speculative-algorithm."
    )
