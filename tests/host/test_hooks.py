"""Hooks whose effect a running server does not show directly."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.plugins import load_plugins
from sglang.srt.sampling.sampling_params import SamplingParams

from dspark.host import hooks, memory
from dspark.host.admission import refusal

load_plugins()  # once per process, so before any test that leaves this package out


def test_the_host_budgets_the_drafts_own_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.speculative import dflash_utils

    cell = {"target_cell_size_per_token": 1000, "target_num_layers": 30, "draft_num_layers": 3}
    monkeypatch.setattr(memory, "draft_kv_bytes_per_token", lambda: 1234)
    monkeypatch.setattr(hooks, "_serves_dspark", lambda: True)
    assert dflash_utils.scale_kv_cell_size_per_token_for_dflash(**cell) == 2234
    monkeypatch.setattr(hooks, "_serves_dspark", lambda: False)
    assert dflash_utils.scale_kv_cell_size_per_token_for_dflash(**cell) == 1100  # the host's guess, for the others


def test_a_refused_request_loses_what_it_was_refused_for() -> None:
    """The host still prefills it once; a penalty left in place compiles kernels while everybody waits."""
    params = SamplingParams(repetition_penalty=1.2, frequency_penalty=0.5, min_new_tokens=3, sampling_seed="x")
    req = SimpleNamespace(
        sampling_params=params,
        origin_input_ids=[1, 2],
        vocab_size=10,
        multimodal_inputs=None,
        return_logprob=False,
        return_hidden_states=False,
        custom_logit_processor="processor",
        input_embeds=None,
        lora_id=None,
    )
    assert "sampling_seed" in (refusal(req) or "")
    assert (params.repetition_penalty, params.frequency_penalty, params.min_new_tokens) == (1.0, 0.0, 0)
    assert params.sampling_seed is None
    assert req.custom_logit_processor is None
    assert refusal(req) is None


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("return_hidden_states", True, "return_hidden_states"),
        ("custom_logit_processor", "processor", "custom_logit_processor"),
        ("input_embeds", [[0.5]], "input_embeds"),
        ("lora_id", "adapter", "a LoRA adapter"),
    ],
)
def test_what_a_request_cannot_ask_for_is_named(field: str, value: object, text: str) -> None:
    req = SimpleNamespace(sampling_params=SamplingParams(), origin_input_ids=[1], vocab_size=10, multimodal_inputs=None)
    req.lora_id = req.input_embeds = req.custom_logit_processor = None
    req.return_hidden_states = False
    assert refusal(req) is None
    setattr(req, field, value)
    assert f"does not support {text} yet" in str(refusal(req))


@pytest.mark.parametrize("value", ["much", None, True, [1.0]])
def test_a_bias_that_is_no_number_is_refused(value: object) -> None:
    """The host checks the tokens only, and a conversion inside the scheduler would end it."""
    req = SimpleNamespace(sampling_params=SamplingParams(logit_bias={"7": value}), origin_input_ids=[1], vocab_size=10)
    req.multimodal_inputs = req.lora_id = req.input_embeds = req.custom_logit_processor = None
    req.return_hidden_states = req.return_logprob = False
    assert "logit_bias" in str(refusal(req))


@pytest.mark.parametrize(
    "state, updated, pins",
    [
        ({"dspark_force_draft_off": 1}, True, [0.0]),
        ({"dspark_force_draft_off": 0}, True, [None]),
        ({"dspark_force_draft_off": 2}, False, []),
        ({"dspark_force_draft_off": 1, "dspark_force_budget_frac": 0.5}, False, []),
        ({"dspark_force_budget_frac": 0}, False, []),
        ({"dspark_force_budget_frac": 0.5}, True, []),  # by the host
        ({"dspark_force_budget_frac": 0.5, "dspark_force_depth": 3}, True, [(0.5, 3)]),  # by the host, and again
        ({"dspark_force_budget_frac": 0.5, "dspark_force_depth": -1}, True, []),
        ({"dspark_force_budget_frac": 0.5, "dspark_force_depth": 4}, False, []),
        ({"dspark_force_budget_frac": -1, "dspark_force_depth": 3}, False, []),
        ({"dspark_force_depth": 3}, False, []),
    ],
)
def test_the_draft_is_left_out_by_a_key_that_the_host_does_not_know(
    state: dict[str, Any], updated: bool, pins: list[Any]
) -> None:
    pinned: list[Any] = []

    def pin(*given: Any) -> None:
        pinned.append(given if given[1:] else given[0])

    worker = SimpleNamespace(simulated=None, set_dspark_forced_budget_frac=pin, depths=(2, 3))
    scheduler = SimpleNamespace(spec_algorithm=SimpleNamespace(is_dspark=lambda: True), draft_worker=worker)

    def original(scheduler: Any, request: Any) -> Any:
        assert "dspark_force_draft_off" not in request.server_args
        assert "dspark_force_depth" not in request.server_args
        return SimpleNamespace(updated=True)

    assert hooks._set_state(original, scheduler, SimpleNamespace(server_args=state)).updated is updated
    assert pinned == pins
