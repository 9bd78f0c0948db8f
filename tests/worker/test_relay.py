"""The relay on transfers that arrive when the test says so."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dspark.scheduler.history import Found
from dspark.worker.relay import RING, ConfidenceRelay, HostBuffers

GAMMA = 3


class SlowTransfer:
    """Arrives when waited for, or when told to."""

    def __init__(self, values: np.ndarray, log: list[str]) -> None:
        self._values, self._log, self.arrived = values, log, False

    def done(self) -> bool:
        return self.arrived

    def wait(self) -> None:
        self._log.append("wait")
        self.arrived = True

    def values(self) -> np.ndarray:
        assert self.arrived, "read before it arrived"
        return self._values


class SlowBuffers:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.transfers: dict[int, SlowTransfer] = {}

    def start(self, step: int, survival: torch.Tensor) -> SlowTransfer:
        self.transfers[step] = SlowTransfer(survival.numpy().copy(), self.log)
        return self.transfers[step]


def rows(step: int, count: int) -> torch.Tensor:
    """Survivals that name their step and row."""
    base = 0.1 * step + 0.01 * torch.arange(count, dtype=torch.float32)
    return base[:, None] * 0.5 ** torch.arange(GAMMA)


def slots(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_a_plan_reads_exactly_two_steps_back() -> None:
    relay = ConfidenceRelay(HostBuffers(4, GAMMA, "cpu"), GAMMA)
    who, born = slots(5, 2), slots(1, 1)
    for step in range(1, 12):
        found = relay.survival(step, who, born)
        if step > 2:
            assert found.found is Found.FRESH
            np.testing.assert_array_equal(found.survival, rows(step - 2, 2).numpy())
        else:
            assert found.found is Found.MISSING
        relay.publish(step, who, born, rows(step, 2))
    assert relay.waits == 0


def test_a_late_entry_is_waited_for_and_counted() -> None:
    buffers = SlowBuffers()
    relay = ConfidenceRelay(buffers, GAMMA)
    who, born = slots(5, 2), slots(1, 1)
    for step in (1, 2):
        relay.survival(step, who, born)
        relay.publish(step, who, born, rows(step, 2))
    found = relay.survival(3, who, born)
    assert (relay.waits, buffers.log) == (1, ["wait"])
    np.testing.assert_array_equal(found.survival, rows(1, 2).numpy())
    relay.publish(3, who, born, rows(3, 2))
    buffers.transfers[2].arrived = True  # in time
    np.testing.assert_array_equal(relay.survival(4, who, born).survival, rows(2, 2).numpy())
    assert relay.waits == 1


def test_new_and_reused_slots_are_not_fresh() -> None:
    relay = ConfidenceRelay(HostBuffers(4, GAMMA, "cpu"), GAMMA)
    for step in (1, 2):
        relay.survival(step, slots(5, 2), slots(1, 1))
        relay.publish(step, slots(5, 2), slots(1, 1), rows(step, 2))
    found = relay.survival(3, slots(2, 5, 7), slots(1, 2, 1))  # slot 5 has a new request, slot 7 is new
    assert found.known.tolist() == [True, False, False]
    np.testing.assert_array_equal(found.survival[0], rows(1, 2)[1].numpy())
    np.testing.assert_array_equal(found.survival[1], found.survival[2])
    assert found.survival[1, 0] < 1
    assert relay.own_rows == 1


def test_a_step_without_a_draft_says_nothing() -> None:
    relay = ConfidenceRelay(HostBuffers(4, GAMMA, "cpu"), GAMMA)
    relay.publish(1, slots(5), slots(1), rows(1, 1))
    relay.publish(2, slots(5), slots(1), None)
    assert relay.survival(3, slots(5), slots(1)).found is Found.FRESH
    relay.publish(3, slots(5), slots(1), rows(3, 1))
    assert relay.survival(4, slots(5), slots(1)).found is Found.NO_DRAFT
    assert relay.found == {Found.FRESH: 1, Found.NO_DRAFT: 1, Found.MISSING: 0}


def test_the_prior_follows_what_was_seen() -> None:
    relay = ConfidenceRelay(HostBuffers(64, GAMMA, "cpu"), GAMMA)
    who, born = np.arange(64), np.ones(64, dtype=np.int64)
    seen = torch.tensor([[0.2, 0.1, 0.05]]).expand(64, GAMMA)
    for step in range(1, 80):
        relay.survival(step, who, born)
        relay.publish(step, who, born, seen)
    newcomer = relay.survival(80, slots(3), slots(9))
    np.testing.assert_allclose(newcomer.survival[0], [0.2, 0.1, 0.05], atol=0.01)


@pytest.mark.parametrize("steps", [RING, 3 * RING + 1])
def test_a_buffer_is_not_reused_while_it_may_be_read(steps: int) -> None:
    buffers = HostBuffers(2, GAMMA, "cpu")
    kept = [buffers.start(step, rows(step, 2)) for step in range(steps)]
    for step in range(steps - RING, steps):
        np.testing.assert_array_equal(kept[step].values(), rows(step, 2).numpy())


def test_drafts_that_were_not_drawn_are_guessed_from_their_row() -> None:
    relay, who, born = ConfidenceRelay(HostBuffers(2, GAMMA, "cpu"), GAMMA), slots(5, 2), slots(1, 1)
    shallow = torch.tensor([[0.81, 0.0, 0.0], [0.5, 0.0, 0.0]])
    for step in (1, 2):
        relay.survival(step, who, born)
        relay.publish(step, who, born, shallow, depth=2 if step == 1 else None)
    found = relay.survival(3, who, born).survival
    assert found is not None
    np.testing.assert_allclose(found, [[0.81, 0.81**2, 0.81**3], [0.5, 0.25, 0.125]], rtol=1e-6)
    np.testing.assert_array_equal(relay.survival(4, who, born).survival, shallow.numpy())
