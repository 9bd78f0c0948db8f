"""Probes of the ceiling: blocks kept on the device until later tokens are known, then asked for their probabilities.

What it costs: two small copies in each ``CADENCE`` drafted steps, and in each ``ROUND`` of them one product of the LM
head with the blocks that are due, at most ``MOST``: with Qwen3-8B 1.3 GB to read, 0.4 ms in 64 steps of 6 ms or more.
Which steps are probed, and which of their requests, depends on a count and on noise of its own: on no outcome. Whoever
reads the server's record has all of them evaluated that can be, at most ``PLACES``, and waits for it.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dspark.drafter.proposer import block_log_probs
from dspark.observe.hidden_steps import Probe
from dspark.observe.live_ceiling import Due, LiveCeiling
from dspark.types import StepOutcome
from dspark.worker.protocols import DraftNet

CADENCE = 4  # drafted steps per probe; of those that stand for steps of short blocks each one has a probe
ROUND = 64  # drafted steps per evaluation
MOST = 16  # probes in one evaluation: what its intermediate values may take, V * 12 bytes per draft
PLACES = 64  # a probe is due at most some 200 drafted steps after it was taken


@dataclass(frozen=True)
class _Asked:
    """An evaluation under way."""

    due: list[Due]
    log_q: torch.Tensor  # [N, G] float32 on the host, once ``event`` has happened
    event: torch.cuda.Event | None


class CeilingProbes:
    """Takes probes, and has the drafter say what it thinks of their later tokens."""

    def __init__(self, net: DraftNet, ceiling: LiveCeiling, gamma: int, device: torch.device | str) -> None:
        """Args:
        net: the drafter.
        ceiling: where the probes go.
        gamma: G.
        device: of the step.
        """
        self._net, self._ceiling, self._gamma = net, ceiling, gamma
        self._device = torch.device(device)
        self._anchors = torch.zeros(PLACES, dtype=torch.int64, device=self._device)
        self._blocks: torch.Tensor | None = None  # [PLACES, G, H], made when the first block shows its width
        self._noise = np.random.default_rng(0)
        self._steps = self._taken = self._own = 0  # drafted steps, probes, steps that stand for themselves
        self._due: list[Due] = []
        self._asked: _Asked | None = None
        self._stream: torch.cuda.Stream | None = None  # of the steps, whose memory an evaluation reuses

    def step(
        self, temperatures: np.ndarray, outcome: StepOutcome, whole: bool = True, stands_in: bool = False
    ) -> Probe | None:
        """Look at a step that was launched; never waits for the device.

        Args:
            temperatures: [R] float64, 0 for greedy requests.
            outcome: of the step.
            whole: whether its blocks are; the rest of short ones was never computed.
            stands_in: whether they are in the place of short ones, which happens at a fixed pace.

        Returns:
            The probe that was taken of it, if one was.
        """
        if not outcome.drafted:
            return None
        self._steps += 1
        if self._steps % ROUND == 0:
            self._evaluate()
        self._own += whole and not stands_in
        chosen = stands_in or (whole and self._own % CADENCE == 0)
        if not chosen:
            return None
        candidates = np.flatnonzero(temperatures > 0)
        if not candidates.size or outcome.proposal is None or outcome.proposal.hidden is None:
            return None
        if self._device.type == "cuda":
            self._stream = torch.cuda.current_stream(self._device)
        request, hidden = int(self._noise.choice(candidates)), outcome.proposal.hidden
        if self._blocks is None:
            self._blocks = hidden.new_zeros((PLACES, *hidden.shape[1:]))
        place = self._taken % PLACES
        self._blocks[place].copy_(hidden[request])
        self._anchors[place].copy_(outcome.plan.tokens[request, 0])
        self._taken += 1
        return Probe(self._taken - 1, request, candidates.size, float(temperatures[request]))

    @torch.inference_mode()
    def settle(self) -> None:
        """Have all probes answered whose later tokens are known; waits for the device, so only for who asks."""
        self._ceiling.fold()
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            while True:
                if self._asked is not None and self._asked.event is not None:
                    self._asked.event.synchronize()
                self._evaluate()
                if self._asked is None:
                    break

    def _evaluate(self) -> None:
        """Take the answers of the last evaluation, and start the next one."""
        if self._asked is not None:
            if self._asked.event is not None and not self._asked.event.query():
                return
            for due, log_q in zip(self._asked.due, self._asked.log_q.numpy(), strict=True):
                self._ceiling.answer(due, log_q)
            self._asked = None
        waiting = self._due + self._ceiling.take_due()
        held = [due for due in waiting if due[0].probe.number >= self._taken - PLACES]  # the place has no newer probe
        now, self._due = held[:MOST], held[MOST:]
        if now:
            self._asked = self._ask(now)

    def _ask(self, due: list[Due]) -> _Asked:
        assert self._blocks is not None
        probes = [one.probe for one, _ in due]
        numbers = np.array([[probe.number % PLACES for probe in probes]]).T
        tokens = self._to_device(np.concatenate([numbers, [one.path for one, _ in due]], axis=1))
        temperatures = self._to_device(np.array([probe.temperature for probe in probes], np.float32))
        places, path = tokens[:, 0], tokens[:, 1:]
        hidden = self._blocks[places]
        base = self._net.base_logits(hidden)
        found = block_log_probs(self._net.markov_head, hidden, base, self._anchors[places], path, temperatures)
        if self._device.type != "cuda":
            return _Asked(due, found, None)
        on_host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        on_host.copy_(found, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return _Asked(due, on_host, event)

    def _to_device(self, values: np.ndarray) -> torch.Tensor:
        tensor: Any = torch.from_numpy(values)
        return tensor.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else tensor
