"""What is observed of a running server: facts are noted at launch, and counted when the host has the results.

Nothing waits for the device: a step's results travel to the host in the background, those of a captured step in one
copy for the host's use and ours, and counting happens where the host processes them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler import GenerationBatchResult

from dspark.cuda_graph.outcome import FlatOutcome, OnHost
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
from dspark.worker.probes import CeilingProbes
from dspark.worker.relay import Transfer

logger = logging.getLogger("dspark")

# Steps, and requests in them, that are counted together: one right after the other they take half the time, and so few
# of them no more than what the host mostly has to spare in a step.
TOGETHER, _REQUESTS = 8, 512
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

    def found(self) -> Found:
        """Itself."""
        return self


class _Flat(NamedTuple):
    """The same as one array, not looked at yet."""

    values: np.ndarray  # of a ``FlatResult``
    requests: int  # of it
    window: int  # W
    real: int  # R
    wanted: tuple[bool, bool, bool]  # windows, ceiling, chances

    def found(self) -> Found:
        """Views of it."""
        parts = flat_parts(self.values, self.requests, self.window, self.real, np.float32)
        tokens, (accepted, committed, _, _, *others), chances = parts
        given = zip((*others, chances), self.wanted, strict=True)
        return Found(tokens, accepted, committed, *(each if wanted else None for each, wanted in given))


class _Step(NamedTuple):
    """A step that is not counted yet; nothing of it is the device's, or in pinned memory."""

    facts: StepFacts
    results: Found | _Flat
    temperatures: np.ndarray  # [R] float64
    survival: np.ndarray | None  # [R, G] float32
    depth: int | None
    stands_in: bool
    probe: Probe | None
    seconds: float  # when its results were there
    handed_on: int  # tokens
    after_end: int
    users: UserFacts | None  # where steps are recorded


@dataclass
class ObservedResult(GenerationBatchResult):
    """A step's results, with what is counted of them. Tensors are the device's until ``copy_to_cpu``."""

    observer: StepObserver | None = None
    facts: StepFacts | None = None
    flat: FlatOutcome | None = None  # given: the tensors of the results are placeholders until they are on the host
    on_host: OnHost | None = None  # its copy, under way since ``copy_to_cpu``
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
        assert self.facts is not None
        flat, requests, copies = self.flat
        self.on_host = copies.start(flat, requests, self.facts.slots.shape[0])
        self.next_token_ids, self.accept_lens = self.on_host.tokens, self.on_host.committed
        for name, values in (("cap_lens", self.on_host.windows), ("block_accept_lens", self.on_host.ceiling)):
            if getattr(self, name) is not None:
                setattr(self, name, values)

    def kept(self) -> Found | _Flat:
        """The results, once they are on the host, in memory of their own."""
        if self.flat is not None:
            assert self.facts is not None
            assert self.on_host is not None
            assert self.speculative_num_draft_tokens is not None
            wanted = self.windows is not None, self.block_accept_lens is not None, self.chances is not None
            shape = self.flat.requests, self.speculative_num_draft_tokens, self.facts.slots.shape[0]
            return _Flat(self.on_host.values.copy(), *shape, wanted)
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
        self._waiting: deque[_Step] = deque()
        self._requests = 0  # of the steps that wait
        self._lock = threading.RLock()  # whoever counts: the server's thread, or one that exports
        self._generation, self._simulated = np.full(slots, -1, dtype=np.int64), np.full(slots, None, dtype=object)

    @property
    def counting(self) -> bool:
        """Whether steps are observed; switched off only to find out what it costs."""
        return self._counting

    @counting.setter
    def counting(self, on: bool) -> None:
        self.settle()
        if self.ceiling is not None:
            self.ceiling.interrupt()
        self._counting = on

    def processed(self, result: ObservedResult, batch: ScheduleBatch, tokens: list[list[int]]) -> None:
        """Count a step whose results are on the host, now or with later ones.

        Args:
            result: of the step.
            batch: its requests, as they are now: some may have ended while the step ran.
            tokens: what the host takes from the step for each request.
        """
        facts, temperatures = result.facts, result.temperatures
        assert facts is not None
        assert temperatures is not None
        taken = sum(map(len, tokens))
        # The host walks over its requests right here as well.
        ended = sum(len(run) for run, req in zip(tokens, batch.reqs, strict=True) if req.is_retracted or req.finished())
        self._waiting.append(
            _Step(
                facts,
                result.kept(),
                temperatures,
                # There, since it was sent before the results; kept, since its buffer is used again a few steps later.
                None if result.survival is None else result.survival.values().copy(),
                result.depth,
                result.stands_in,
                result.probe,
                time.monotonic(),
                taken - ended,
                ended,
                None if self.records is None else self._users(facts, batch, temperatures),
            )
        )
        self._requests += facts.slots.shape[0]
        if len(self._waiting) >= TOGETHER or self._requests >= _REQUESTS or self.records is not None:
            self.settle()

    def settle(self) -> None:
        """Count the steps that wait; whoever reads what was counted does this first."""
        with self._lock:
            self._requests = 0
            for _ in range(len(self._waiting)):
                self._count(self._waiting.popleft())

    def _count(self, step: _Step) -> None:
        facts, found = step.facts, step.results.found()
        windows = found.windows
        if windows is None:
            windows = np.full(facts.slots.shape[0], self._window if facts.drafted else 1, dtype=np.int64)
        counts = StepCounts(windows, found.accepted, found.ceiling)
        self.counters.add(facts, counts, step.seconds)
        if self.ceiling is not None:
            self.ceiling.add(_step_tokens(step, found, windows))
        survival = self._judge(step, counts)
        if self.records is not None and step.users is not None:
            self.records.add(facts, counts, survival, step.seconds, step.users)
        by_grammar = int(found.committed.sum()) - step.handed_on - step.after_end
        self.counters.deliver(step.handed_on, step.after_end, by_grammar)

    def _users(self, facts: StepFacts, batch: ScheduleBatch, temperatures: np.ndarray) -> UserFacts:
        """What the requests of a step asked for; read once per request."""
        for place in np.flatnonzero(self._generation[facts.slots] != facts.generations):  # requests not seen before
            slot = facts.slots[place]
            self._simulated[slot] = named_class(batch.reqs[place])
            self._generation[slot] = facts.generations[place]
        return UserFacts(temperatures, self._simulated[facts.slots])

    def _judge(self, step: _Step, counts: StepCounts) -> np.ndarray | None:
        """Hold survivals against what was accepted; returns those of drafts that could be verified, float32."""
        if step.survival is None:
            return None
        survival = step.survival[:, : None if step.depth is None else step.depth - 1]
        tested = np.minimum(counts.windows, self._window - 1)
        self.calibration.add(BlockFacts(survival, tested, counts.accepted, step.temperatures))
        return survival

    def clear(self) -> None:
        """Set the server's counters to zero, and forget blocks and records."""
        self.settle()
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
        self.settle()
        counters = self.counters.statistics()
        yield from samples(counters, *budgets.confidences())
        yield from distributions(counters)
        yield from calibration_samples(self.calibration.totals())
        if self.ceiling is not None:
            yield from ceiling_samples(self.ceiling.statistics())

    def dump(self, probes: CeilingProbes | None = None) -> dict[str, Any]:
        """For ``/server_info``; ``probes`` that may be answered are."""
        self.settle()
        if probes is not None:
            probes.settle()
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
        self.settle()
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
        self.settle()
        if req.finished_len is not None:
            self.counters.cut(len(req.output_ids) - req.finished_len)
        own = self.counters.request(req.req_pool_idx)
        if self.ceiling is not None:
            own["ceiling"] = self.ceiling.request(req.req_pool_idx)
        meta_info.attach(req, own)


def _step_tokens(step: _Step, found: Found, windows: np.ndarray) -> StepTokens:
    return StepTokens(
        slots=step.facts.slots,
        generations=step.facts.generations,
        drafted=step.facts.drafted,
        rows=windows,
        accepted=found.accepted,
        tokens=found.tokens,
        greedy=step.temperatures == 0,
        chances=found.chances,
        probe=step.probe,
        whole=step.depth is None,
        short_planned=step.depth is not None or step.stands_in,
    )


def export(worker_reads: Callable[[], Iterator[Sample | Distribution]], server_args: Any, rank: int) -> Exporter | None:
    """Start to export if the server has metrics; ranks other than the first would count the same again."""
    if not server_args.enable_metrics or rank != 0:
        return None
    exporter = Exporter(worker_reads, {"model_name": str(server_args.served_model_name)})
    exporter.start()
    return exporter
