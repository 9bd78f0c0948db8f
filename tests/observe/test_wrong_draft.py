"""A draft of another target is said once, and again after it was better in between."""

from __future__ import annotations

from dspark.observe.wrong_draft import LEAST_DRAFTS, WrongDraft


def test_is_said_once() -> None:
    watch = WrongDraft()
    assert watch.look(LEAST_DRAFTS - 1, 0) is None, "too few to judge"
    found = watch.look(LEAST_DRAFTS, 3)
    assert found is not None
    assert f"3 accepted of the last {LEAST_DRAFTS}" in found
    assert "--speculative-draft-model-path" in found
    assert watch.look(3 * LEAST_DRAFTS, 3) is None


def test_only_what_is_new_counts() -> None:
    """Hours of good drafts do not hide what a weight update has broken."""
    watch = WrongDraft()
    assert watch.look(100 * LEAST_DRAFTS, 70 * LEAST_DRAFTS) is None
    assert watch.look(101 * LEAST_DRAFTS, 70 * LEAST_DRAFTS) is not None
    assert watch.look(102 * LEAST_DRAFTS, 71 * LEAST_DRAFTS) is None
    assert watch.look(103 * LEAST_DRAFTS, 71 * LEAST_DRAFTS) is not None


def test_hard_text_is_no_wrong_draft() -> None:
    assert WrongDraft().look(LEAST_DRAFTS, LEAST_DRAFTS // 10) is None


def test_sums_that_start_again() -> None:
    watch = WrongDraft()
    watch.look(5 * LEAST_DRAFTS, 3 * LEAST_DRAFTS)
    watch.clear()
    assert watch.look(LEAST_DRAFTS // 2, 0) is None
    assert watch.look(LEAST_DRAFTS, 0) is not None
