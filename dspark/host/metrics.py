"""What is observed of a running server: facts are noted at launch, and counted when the host has the results.

Nothing waits for the device: a step's results travel to the host in the background, those of a captured step in one
copy for the host's use and ours, and counting happens where the host processes them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler import GenerationBatchResult

from dspark.cuda_graph.outcome import FlatOutcome
from dspark.host import memory, meta_info
from dspark.host.simulate import named_class
from dspark.kernels.triton_accept_greedy import flat_parts
from dspark.observe.calibration import BlockFacts, CalibrationWindows
from dspark.observe.counters import StepCounters, StepCounts, StepFacts
from dspark.observe.hidden_steps import Probe, StepTokens
from dspark.observe.live_ceiling import LiveCeiling
from dspark.observe.prometheus import (
    Distribution,
    Exporter,
    Sample,
    calibration_samples,
    ceiling_samples,
    distributions,
    samples,
)
from dspark.observe.records import StepRecords, UserFacts
from dspark.observe.wrong_draft import WrongDraft
from dspark.types import StepOutcome
from dspark.worker.budget import BudgetScheduler
from dspark.worker.relay import Transfer

logger = logging.getLogger("dspark")

_LOGGED = ("request_steps", "rows", "tested", "accepted", "trimmed_all_accepted")


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host, under way on the current stream; the caller waits for an event before it reads."""
    if not tensor.is_cuda:
        return tensor.to("cpu", copy=True)
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return copy


class Found(NamedTuple):
    """Results of a step of R requests on the host; None where it has none of the kind."""

    tokens: np.ndarray  # [R, W] int64
    accepted: np.ndarray  # [R] int64, drafts
    committed: np.ndarray  # [R] int64
    windows: np.ndarray | None  # [R] int64, rows scheduled; None: as the facts say
    ceiling: np.ndarray | None  # [R] int64
    chances: np.ndarray | None  # [R, W] float32


@dataclass
class ObservedResult(GenerationBatchResult):
    """A step's results, with what is counted of them. Tensors are the device's until ``copy_to_cpu``."""

    observer: StepObserver | None = None
    facts: StepFacts | None = None
    flat: FlatOutcome | None = None  # given: the tensors of the results are placeholders until they are on the host
    accepted: torch.Tensor | None = None  # [R] integers, drafts accepted
    temperatures: np.ndarray | None = None  # [R] float64, 0 for greedy requests
    windows: torch.Tensor | None = None  # [R] integers, rows scheduled; None: as ``facts`` say
    chances: torch.Tensor | None = None  # [R, W] float32, see ``AcceptResult``; None: all are greedy, or nobody asks
    probe: Probe | None = None
    depth: int | None = None  # drafts of each block that were drawn; None: all
    stands_in: bool = False  # whole blocks, drafted in the place of short ones
    survival: Transfer | None = None  # [R, G] float32 on its way to the host; None: not drafted, or not scheduled

    def copy_to_cpu(self, *args: Any, **kwargs: Any) -> None:
        """Ours first: the host's copies end with the event that it waits for."""
        if self.observer is not None and not self.observer.counting:
            self.observer = None
        if self.flat is not None:
            self._copy_flat()
        elif self.observer is not None:
            self.accepted, self.windows, self.chances = (
                None if each is None else to_host(each) for each in (self.accepted, self.windows, self.chances)
            )
        super().copy_to_cpu(*args, **kwargs)

    def _copy_flat(self) -> None:
        """One copy instead of one of each: of what is on the host already, the host makes none."""
        assert self.flat is not None
        self.flat = self.flat._replace(flat=self.flat.copies.start(self.flat.flat))
        tokens, (_, committed, _, _, windows, ceiling), _ = self._parts(self.flat.flat.numpy())
        self.next_token_ids, self.accept_lens = torch.from_numpy(tokens.reshape(-1)), torch.from_numpy(committed)
        for name, values in (("cap_lens", windows), ("block_accept_lens", ceiling)):
            if getattr(self, name) is not None:
                setattr(self, name, torch.from_numpy(values))

    def _parts(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        assert self.flat is not None
        assert self.facts is not None
        assert self.speculative_num_draft_tokens is not None
        count = self.facts.slots.shape[0]
        return flat_parts(values, self.flat.requests, self.speculative_num_draft_tokens, count, np.float32)

    def found(self) -> Found:
        """The results, once they are on the host; of their own, since pinned memory is dear."""
        if self.flat is not None:
            tokens, (accepted, committed, _, _, windows, ceiling), chances = self._parts(self.flat.flat.numpy().copy())
            return Found(
                tokens,
                accepted,
                committed,
                None if self.windows is None else windows,
                None if self.block_accept_lens is None else ceiling,
                None if self.chances is None else chances,
            )
        given: Any = self.next_token_ids, self.accepted, self.accept_lens, self.windows, self.block_accept_lens
        counts: Any = (None if one is None else one.numpy().astype(np.int64) for one in given)
        tokens, accepted, committed, windows, ceiling = counts
        own = None if self.chances is None else self.chances.numpy().copy()
        return Found(tokens.reshape(accepted.shape[0], -1), accepted, committed, windows, ceiling, own)


def tensors_of(outcome: StepOutcome, *, chances: bool, ceiling: bool, windows: bool, trimmed: bool) -> dict[str, Any]:
    """The tensors of an ``ObservedResult``; of a captured step none is asked for before all are on the host.

    Args:
        outcome: of the step.
        chances, ceiling: whether they are wanted.
        windows: whether the host wants the windows.
        trimmed: whether some window is not the full one.
    """
    names = {"next_token_ids": True, "accept_lens": True, "accepted": True, "chances": chances}
    names |= {"block_accept_lens": ceiling, "cap_lens": windows, "windows": trimmed}
    if outcome.flat is not None:
        return {name: outcome.flat.flat if wanted else None for name, wanted in names.items()} | {"flat": outcome.flat}
    accept, lens = outcome.accept, outcome.plan.verify_lens
    found = (accept.tokens.reshape(-1), accept.committed, accept.accepted, accept.chances, outcome.ceiling, lens, lens)
    return {name: value if wanted else None for (name, wanted), value in zip(names.items(), found, strict=True)}


class StepObserver:
    """Counts the steps of a server, in the order in which the host processes their results."""

    def __init__(
        self, gamma: int, slots: int, records: int | None = None, *, estimates: bool = False, simulated: bool = False
    ) -> None:
        """Args:
        gamma: drafts per block.
        slots: request slots of the host.
        records: request steps to keep; None: none.
        estimates: whether the ceiling is estimated; only where windows are trimmed and nothing is simulated.
        simulated: acceptance says nothing about the draft.
        """
        self._counting = True
        self._window = gamma + 1
        self.counters = StepCounters(gamma, slots)
        self.calibration = CalibrationWindows(gamma)
        self.records = None if records is None else StepRecords(records)
        self.ceiling = LiveCeiling(gamma, slots) if estimates else None
        self._wrong_draft = None if simulated else WrongDraft()
        self._logged: dict[str, int] = {}
        self._generation, self._simulated = np.full(slots, -1, dtype=np.int64), np.full(slots, None, dtype=object)

    @property
    def counting(self) -> bool:
        """Whether steps are observed; switched off only to find out what it costs."""
        return self._counting

    @counting.setter
    def counting(self, on: bool) -> None:
        if self.ceiling is not None:
            self.ceiling.interrupt()
        self._counting = on

    def processed(self, result: ObservedResult, batch: ScheduleBatch, tokens: list[list[int]]) -> None:
        """Count a step whose results are on the host.

        Args:
            result: of the step.
            batch: its requests, as they are now: some may have ended while the step ran.
            tokens: what the host takes from the step for each request.
        """
        facts, temperatures, found = result.facts, result.temperatures, result.found()
        assert facts is not None
        assert temperatures is not None
        windows = found.windows
        if windows is None:
            windows = np.full(facts.slots.shape[0], self._window if facts.drafted else 1, dtype=np.int64)
        counts, now = StepCounts(windows, found.accepted, found.ceiling), time.monotonic()
        self.counters.add(facts, counts, now)
        if self.ceiling is not None:
            self.ceiling.add(_step_tokens(result, facts, found, windows, temperatures))
        survival = self._judge(result, counts, temperatures)
        if self.records is not None:
            self.records.add(facts, counts, survival, now, self._users(facts, batch, temperatures))
        taken = sum(map(len, tokens))
        # The host walks over its requests right here as well.
        ended = sum(len(run) for run, req in zip(tokens, batch.reqs, strict=True) if req.is_retracted or req.finished())
        self.counters.deliver(taken - ended, ended, int(found.committed.sum()) - taken)

    def _users(self, facts: StepFacts, batch: ScheduleBatch, temperatures: np.ndarray) -> UserFacts:
        """What the requests of a step asked for; read once per request."""
        for place in np.flatnonzero(self._generation[facts.slots] != facts.generations):  # requests not seen before
            slot = facts.slots[place]
            self._simulated[slot] = named_class(batch.reqs[place])
            self._generation[slot] = facts.generations[place]
        return UserFacts(temperatures, self._simulated[facts.slots])

    def _judge(self, result: ObservedResult, counts: StepCounts, temperatures: np.ndarray) -> np.ndarray | None:
        """Hold survivals against what was accepted; returns those of drafts that could be verified, float32."""
        if result.survival is None:
            return None
        known = None if result.depth is None else result.depth - 1
        # There, since they were sent before the results; kept, since their buffer is used again a few steps later.
        survival = result.survival.values()[:, :known].copy()
        tested = np.minimum(counts.windows, self._window - 1)
        self.calibration.add(BlockFacts(survival, tested, counts.accepted, temperatures))
        return survival

    def clear(self) -> None:
        """Set the server's counters to zero, and forget blocks and records."""
        self._logged = {}
        if self._wrong_draft is not None:
            self._wrong_draft.clear()
        self.counters.clear()
        self.calibration.clear()
        if self.ceiling is not None:
            self.ceiling.clear()
        if self.records is not None:
            self.records.clear()

    def samples(self, budgets: BudgetScheduler) -> Iterator[Sample | Distribution]:
        """What is exported."""
        counters = self.counters.statistics()
        yield from samples(counters, *budgets.confidences())
        yield from distributions(counters)
        yield from calibration_samples(self.calibration.totals())
        if self.ceiling is not None:
            yield from ceiling_samples(self.ceiling.statistics())

    def dump(self) -> dict[str, Any]:
        """For ``/server_info``."""
        found: dict[str, Any] = {
            "counters": self.counters.statistics(),
            "calibration": self.calibration.statistics(),
            "ceiling": None if self.ceiling is None else self.ceiling.statistics(),
            "device_memory": memory.held(),
        }
        return found if self.records is None else found | {"step_records": self.records.dump().model_dump()}

    def log_suffix(self) -> str | None:
        """What the host appends to its decode log line: the rows and drafts since the last one.

        Drafts that are hardly ever accepted get a line of their own.
        """
        sums, tested, accepted = self.counters.brief()
        if self._wrong_draft is not None:
            warning = self._wrong_draft.look(tested, accepted)
            if warning is not None:
                logger.warning("dspark: %s", warning)
        new = {name: sums[name] - self._logged.get(name, 0) for name in _LOGGED}
        self._logged = {name: sums[name] for name in _LOGGED}
        if new["request_steps"] <= 0:
            return None
        steps, share = new["request_steps"], new["accepted"] / max(new["tested"], 1)
        return (
            f"dspark: rows {new['rows'] / steps:.2f}, tested drafts accepted {share:.2f}, "
            f"trimmed and all accepted {new['trimmed_all_accepted'] / steps:.2f}"
        )

    def finished(self, req: Req) -> None:
        """Count what lies behind a stop, and give the request its own sums for its ``meta_info``."""
        if req.finished_len is not None:
            self.counters.cut(len(req.output_ids) - req.finished_len)
        own = self.counters.request(req.req_pool_idx)
        if self.ceiling is not None:
            own["ceiling"] = self.ceiling.request(req.req_pool_idx)
        meta_info.attach(req, own)


def _step_tokens(
    result: ObservedResult, facts: StepFacts, found: Found, windows: np.ndarray, temperatures: np.ndarray
) -> StepTokens:
    return StepTokens(
        slots=facts.slots,
        generations=facts.generations,
        drafted=facts.drafted,
        rows=windows,
        accepted=found.accepted,
        tokens=found.tokens,
        greedy=temperatures == 0,
        chances=found.chances,
        probe=result.probe,
        whole=result.depth is None,
        short_planned=result.depth is not None or result.stands_in,
    )


def export(worker_reads: Callable[[], Iterator[Sample | Distribution]], server_args: Any, rank: int) -> Exporter | None:
    """Start to export if the server has metrics; ranks other than the first would count the same again."""
    if not server_args.enable_metrics or rank != 0:
        return None
    exporter = Exporter(worker_reads, {"model_name": str(server_args.served_model_name)})
    exporter.start()
    return exporter
