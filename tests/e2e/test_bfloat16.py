"""DSPARK in bfloat16 on a CPU, with a calibration file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tests.e2e.conftest import DSPARK, serve, steps_of


def test_bfloat16_serves_and_the_calibration_is_applied(target: Path, tmp_path: Path) -> None:
    """Temperatures so high that every confidence becomes 1/2: the survivals of a block are 1/2, 1/4, ..."""
    sts = tmp_path / "sts.json"
    sts.write_text(json.dumps({"temperatures": [1e6] * 7, "dataset": "none", "num_samples": 0}))
    flags = ["--dtype", "bfloat16", "--speculative-dspark-confidence-sts-path", str(sts)]
    with serve(target, *DSPARK, *flags, SGLANG_DSPARK_DEBUG_DUMP="reqs") as server:
        params = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
        answer = server.generate([504, 338, 253, 2412], rid="one", sampling_params=params)
        assert len(answer["output_ids"]) == 40
        assert answer["meta_info"]["spec_verify_ct"] < 38  # drafts are accepted
        for step in steps_of(server, "one"):
            np.testing.assert_allclose(step["survival"], 0.5 ** np.arange(1, 8), rtol=1e-3)
