"""What a server records because its operator asked for it at start: step records, step times, calibration data."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch

from dspark.config import COLLECT_VARIABLE, Settings
from dspark.drafter.spec import DraftSpec
from dspark.errors import ConfigError
from dspark.host.batch import context_tokens
from dspark.host.rank_group import Ranks
from dspark.observe.hidden_steps import Probe
from dspark.scheduler.json_file import Provenance
from dspark.types import DecodeBatch, StepBudget, StepOutcome
from dspark.worker.budget import BudgetScheduler
from dspark.worker.collect import BlockCollector
from dspark.worker.later_tokens import LaterTokens
from dspark.worker.protocols import DraftNet
from dspark.worker.rank_agreement import require_agreement
from dspark.worker.records import StepRecorder
from dspark.worker.step_times import StepClock

logger = logging.getLogger("dspark")

_UNPROFILED = contextlib.nullcontext()


def profiled_step() -> Any:
    """A range in the trace while a profiler runs; next to nothing otherwise."""
    return torch.profiler.record_function("dspark: decode step") if torch.autograd._profiler_enabled() else _UNPROFILED


class Recording:
    """Nothing unless it was asked for."""

    def __init__(self, settings: Settings, spec: DraftSpec, net: DraftNet, *, calibrated: bool, ranks: Ranks) -> None:
        """Args:
        settings: of the process.
        spec: of the draft.
        net: the draft.
        calibrated: whether confidences are scaled.
        ranks: step records of several are compared; only the first one records blocks.

        Raises:
            ConfigError: data of scaled confidences, or of none, would calibrate nothing.
        """
        self._steps = StepRecorder() if settings.record_steps else None
        self._later = LaterTokens(net)
        self._clock = StepClock() if settings.record_times else None
        self._ranks, self._compared = ranks, 0
        self._window, self._simulated_length = spec.window, settings.simulate_accept_length
        self.deployment: Provenance | None = None  # set when the graphs are known; profilers write it into their tables
        self._blocks: BlockCollector | None = None
        if settings.collect_path is None:
            return
        if calibrated or not spec.has_confidence:
            found = "a calibration file" if calibrated else "a draft without a confidence head"
            raise ConfigError(
                f"found {COLLECT_VARIABLE}={settings.collect_path!r} and {found}; calibration data needs the raw "
                "confidences of a draft that has them; leave one of the two out"
            )
        if ranks.leads:
            self._blocks = BlockCollector(settings.collect_path)
            logger.warning(
                "dspark: calibration data is written to %s.*.pt: every step runs eagerly, slower than in service",
                settings.collect_path,
            )

    def step(
        self, batch: ScheduleBatch, budgets: BudgetScheduler, budget: StepBudget, outcome: StepOutcome, forwarded: int
    ) -> None:
        """Record a step; waits for the device, and for the other ranks, if there are step records.

        Raises:
            HostError: another rank recorded another step.
        """
        if self._clock is not None:
            context = context_tokens(batch, self._window)
            self._clock.step(int(batch.forward_iter), len(batch.reqs), forwarded, context, budget.draft)
        if self._steps is not None:
            rids = [req.rid for req in batch.reqs]
            step, plan, reason = int(batch.forward_iter), budgets.plan, budgets.reason
            records = self._steps.record(step, rids, budget, outcome, plan, reason, forwarded)
            if self._ranks.size > 1:
                require_agreement(self._ranks.all(self._steps.newest))
                self._compared += 1
            if outcome.ceiling is not None:
                params = [req.sampling_params for req in batch.reqs]
                temperatures = [0.0 if one.top_k == 1 else one.temperature for one in params]
                self._later.follow(records, outcome, temperatures)

    def probe(self, probe: Probe | None) -> None:
        """Record the probe that was taken of the step recorded last."""
        if self._steps is not None:
            self._steps.note_probe(probe)

    def blocks(self, batch: ScheduleBatch, inputs: DecodeBatch, outcome: StepOutcome, logits: torch.Tensor) -> None:
        """Record the blocks of an eager step of full windows."""
        if self._blocks is not None and outcome.plan.packed is None:
            self._blocks.record([req.rid for req in batch.reqs], outcome.proposal, logits, inputs.sampling)

    def interrupt(self) -> None:
        """Something that is no decode step runs."""
        if self._clock is not None:
            self._clock.interrupt()

    def clear(self) -> None:
        """Forget the step records and times; calibration data is on the disk and stays."""
        if self._steps is not None:
            self._steps.clear()
            self._compared = 0
        if self._clock is not None:
            self._clock.clear()

    def dump(self) -> dict[str, Any]:
        """For ``/server_info``. Calibration data that is held is written first."""
        found: dict[str, Any] = {} if self._steps is None else self._steps.dump()
        if self._steps is not None:
            found |= {"ranks": self._ranks.size, "compared_steps": self._compared}
        if self._clock is not None:
            found |= {
                "components": ["core", "step_cpu_time"],
                "verify_num_draft_tokens": self._window,
                "simulate_acc_len": self._simulated_length,
                "deployment": None if self.deployment is None else self.deployment.model_dump(mode="json"),
                "records": self._clock.dump(),
            }
        if self._blocks is not None:
            self._blocks.flush()
            found |= {"collected_blocks": self._blocks.blocks, "collect_path": self._blocks.path}
        return found
