"""Scoring of the copies."""

from __future__ import annotations

import re

from benchmarks.opaque_ids import Arm, judge, opaque_answers, scored, wrong_characters


def test_ids_are_opaque_and_the_same_in_every_arm() -> None:
    answers = opaque_answers(20, seed=0)
    assert answers == opaque_answers(20, seed=0)
    assert answers != opaque_answers(20, seed=1)
    assert all(re.fullmatch(r"([0-9a-f]{8}, ){7}[0-9a-f]{8}", answer) for answer in answers)
    assert len(set(answers)) == 20


def test_wrong_characters_are_edits() -> None:
    required = "deadbeef, 01234567"
    assert wrong_characters(required, required) == 0
    assert wrong_characters("deadbeee, 01234567", required) == 1
    assert wrong_characters("deadbee, 01234567", required) == 1  # what follows a missing character is right
    assert wrong_characters("xdeadbeef, 01234567", required) == 1
    assert wrong_characters("", required) == len(required)
    assert wrong_characters("deadbeef", required) == len(", 01234567")


def test_an_arm_may_be_as_wrong_as_plain_decoding_and_no_more() -> None:
    required = ["aaaa", "bbbb"]
    answers = {"none": ["aaaa", "bbbc"], Arm(3, 0).name: ["aaax", "bbbb"], Arm(5, 0).name: ["aaax", "bbbc"]}
    arms = [Arm(None, 0), Arm(3, 0), Arm(5, 0)]
    rows = [scored(arm, answers[arm.name], required) for arm in arms]
    assert not judge(rows, answers)
    assert [row["wrong_characters"] for row in rows] == [1, 1, 2]
    assert [row["differ_from_none"] for row in rows] == [0, 2, 1]
    assert [row["no_worse"] for row in rows] == [True, True, False]
    assert judge(rows[:2], answers)


def test_a_failed_arm_fails_the_run() -> None:
    answers = {"none": ["aaaa"]}
    rows = [scored(Arm(None, 0), answers["none"], ["aaaa"]), {"arm": Arm(3, 0).name, "error": "no answer"}]
    assert judge(rows[:1], answers)
    assert not judge(rows, answers)
    assert not judge(rows[1:], {})
