"""DSPARK in bfloat16 on a CPU."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.conftest import DSPARK, serve


def test_bfloat16_serves(target: Path) -> None:
    with serve(target, *DSPARK, "--dtype", "bfloat16") as server:
        params = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
        answer = server.generate([504, 338, 253, 2412], sampling_params=params)
        assert len(answer["output_ids"]) == 40
        assert answer["meta_info"]["spec_verify_ct"] < 38  # drafts are accepted
