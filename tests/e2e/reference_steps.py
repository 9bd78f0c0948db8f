"""Steps of a server against the reference loop, one by one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer

from dspark.demo.server import ServerProcess
from tests.conftest import DRAFT
from tests.e2e.conftest import set_state, steps_of
from tests.reference.decode import ReferenceDecoder


def assert_reference_steps(server: ServerProcess, target: Path, questions: Sequence[tuple[str, float]]) -> None:
    """Drafts, accepts and commits, step by step: a position or layout mistake cannot hide.

    Args:
        server: overlapped, with step records.
        target: of the server.
        questions: and the pinned fraction of the drafts while each is answered, -1 for none.
    """
    tokenizer, reference = AutoTokenizer.from_pretrained(target), ReferenceDecoder(target, DRAFT)
    for number, (question, pin) in enumerate(questions):
        assert set_state(server, dspark_force_budget_frac=pin)
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        rid = f"reference-{number}-{time.time()}"
        answer = server.generate(ids, rid=rid, sampling_params={"temperature": 0, "max_new_tokens": 40})
        steps = steps_of(server, rid)
        windows = [step["verify_len"] for step in steps]
        assert pin != 0.5 or set(windows) == {4}
        expected = reference.generate(ids, 40, eos_ids=(1, 2), verify_lens=windows)
        assert answer["output_ids"] == expected.tokens
        # Under overlap one more step may have run before the host saw the end.
        for got, want in zip(steps, expected.steps, strict=False):
            assert (got["position"], got["anchor"], got["drafts"], got["accepted"], got["committed"]) == (
                want.position, want.anchor, want.drafts, want.accepted, want.committed,
            )  # fmt: skip
            assert got["verify_len"] == 1 + got["budget"] <= got["forwarded_rows"]
        assert len(expected.steps) <= len(steps) <= len(expected.steps) + 1
    assert set_state(server, dspark_force_budget_frac=-1)
