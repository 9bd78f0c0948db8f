"""What the documents name is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_every_test_that_rules_out_a_fault_exists() -> None:
    named = set(re.findall(r"(tests/[\w/]+\.py)::(\w+)", (ROOT / "docs" / "faults.md").read_text()))
    assert len(named) > 100
    missing = [f"{file}::{name}" for file, name in sorted(named) if f"def {name}(" not in (ROOT / file).read_text()]
    assert not missing
