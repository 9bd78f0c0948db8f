"""The decode step as two graph replays: which shapes are captured, and which steps can use them."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from tqdm import tqdm

from dspark.config import Settings, VerifyMode
from dspark.cuda_graph.capture import CudaGraphs, EagerGraphs, GraphSet
from dspark.cuda_graph.ladder import full_window_tiers, slot_ladder, smallest_at_least, thinned, tier_ladder
from dspark.cuda_graph.outcome import CapturedOutcome, FlatOutcome, HostCopies
from dspark.cuda_graph.static import StepBuffers
from dspark.cuda_graph.timing import StepTimer, seconds_per_call, worth_keeping
from dspark.drafter.heads import ConfidenceScale, VanillaMarkovHead
from dspark.drafter.spec import DraftSpec
from dspark.host.batch import RequestTable
from dspark.host.extras import StepExtras, compile_kernels
from dspark.host.memory import free_bytes, requests_with_distributions, rows_with_logits
from dspark.host.rank_group import Ranks
from dspark.host.static_networks import PageTable, StaticDraftNet, StaticTargetNet
from dspark.kernels.triton_allocate import MAX_GAMMA, MAX_REQUESTS
from dspark.scheduler.cost import CostModel
from dspark.scheduler.depth import LEAST_REQUESTS, depth_ladder
from dspark.scheduler.probe_points import Point
from dspark.types import StepBudget, StepOutcome
from dspark.worker.fused_step import FusedStep
from dspark.worker.replay import Replay
from dspark.worker.static_step import Sampling, Split, StaticStep

logger = logging.getLogger("dspark")

_KINDS: tuple[Sampling, ...] = ("greedy", "sampled")  # of the graphs that hold a whole step


class StepGraphs:
    """Captured draft, verify and plain steps."""

    def __init__(
        self,
        spec: DraftSpec,
        target: ModelRunner,
        draft: ModelRunner,
        requests: RequestTable,
        *,
        max_requests: int,
        tiers: Sequence[int],
        mode: VerifyMode,
        calibration: ConfidenceScale | None,
        ranks: Ranks | None = None,
        replay: Replay | None = None,
        keep_blocks: bool = False,
    ) -> None:
        """Args:
        spec: the draft, blocks cut to the runtime gamma.
        target, draft: the host's model runners.
        requests: what is known of the request rows.
        max_requests: largest batch that is captured.
        tiers: row counts that budgets may choose, of verify graphs.
        mode: cap-accept forwards full windows, for which the tiers below one window are too small: they are chosen,
            and not captured.
        calibration: of confidences.
        ranks: that serve together; None: one alone.
        replay: simulated acceptance; None: nothing of it is captured.
        keep_blocks: hold the hidden states of sampled blocks for those who ask the drafter later.
        """
        self._spec, self._target, self._ranks = spec, target, ranks or Ranks()
        self._tiers, self._slots = list(tiers), slot_ladder(max_requests)
        self._full_windows = full_windows = mode == "cap-accept"
        self._captured = full_window_tiers(tiers, spec.window) if full_windows else list(tiers)
        device = torch.device(target.device)
        self._device = device
        # Lengths of blocks below gamma: a step that trims needs no whole one. With more ranks each would time the
        # saving by its own clock, and they would part.
        trims = mode == "compact" and self._ranks.size == 1 and type(draft.model.markov_head) is VanillaMarkovHead
        self.depths = depth_ladder(spec.gamma) if trims else []
        self.buffers = StepBuffers(max_requests, spec.window, device, self.depths)
        if keep_blocks:
            self.buffers.hold_blocks(spec.hidden_size, draft.model.fc.weight.dtype)
        pages = PageTable(target, self.buffers, spec.mask_token_id)
        draft_net = StaticDraftNet(draft, self.buffers, pages, spec.mask_token_id)
        draft_net.calibration = calibration
        step = FusedStep(draft_net, StaticTargetNet(target, self.buffers, pages), self.buffers, replay)
        self._adjust = requests.adjustments
        self._static = StaticStep(
            step, self.buffers, pages.read, requests.static_sampling, full_windows, self._adjust.table
        )
        self._split_tiers = thinned(self._captured)  # tails take padding lightly, and every capture takes time
        self._split_slots = thinned(self._slots)
        self._graphs: GraphSet = _graph_set(device, self._ranks)
        self.timer, self._copies = StepTimer(device), HostCopies(max_requests, spec.window, device)
        self.pruned: list[int] = []  # tiers that buy nothing

    def capture(self) -> None:
        """Capture every shape, largest first, with progress; a failure is an error."""
        self.buffers.hold_distributions(self._spec.vocab_size)
        self._fit_split()
        one = self.buffers.rows[:1]
        self.buffers.stage(one, one, one, 0)
        compile_kernels(self._spec.vocab_size, self._adjust.table)  # launches outside of graphs: not in a first request
        started, before = time.monotonic(), free_bytes(self._device)
        jobs, tails = list(self._jobs()), list(self._tails())
        progress = partial(tqdm, desc="dspark: capturing graphs", disable=self._device.type == "cpu")
        with _capturing(self._device):
            for key, function in progress(jobs):
                self._graphs.capture(key, function)
        with _capturing(self._device):  # collectives of a graph have their addresses only once its context was left
            for (name, split), function in progress(tails):
                if self._device.type == "cuda":
                    self._graphs.replay(("forward", split))  # a tail is run before its capture, on a plan that exists
                self._graphs.capture((name, split), function)
        logger.info(
            "dspark: %d graphs (%d tiers of 1 to %d rows, batches to %d) in %.1f s and %.2f GiB",
            len(jobs) + len(tails), len(self._tiers), self._tiers[-1], self._slots[-1], time.monotonic() - started,
            (before - free_bytes(self._device)) / 2**30,
        )  # fmt: skip

    @torch.inference_mode()
    def seconds_of(self, point: Point) -> float:
        """Time one part of a step on requests 1..R of the host's slot table, which nobody uses yet."""
        self._stage_alone(point.requests, point.context, point.rows - point.requests)
        if point.part == "verify":  # what it verifies, and what it knows of the slot table
            self._graphs.replay(("draft", smallest_at_least(self._slots, point.requests), "greedy"))
        return self._seconds((point.part, point.size, "greedy"))

    @torch.inference_mode()
    def saved_by_depth(self, slots: int) -> list[float]:
        """Seconds that a draft of each of ``depths`` takes less than a whole one, requests 1..slots as above."""
        self._stage_alone(slots, 0, 0)
        keys = [("draft", slots, "greedy"), *(("draft", slots, "greedy", depth) for depth in self.depths)]
        whole, *parts = map(self._seconds, keys)
        return [max(whole - part, 0.0) for part in parts]

    def _seconds(self, key: Any) -> float:
        """Of a replay, as often on every rank: the graphs of one wait for those of the others."""
        return seconds_per_call(partial(self._graphs.replay, key), self._device, agree=self._ranks.of_first)

    def _stage_alone(self, requests: int, context: int, drafts: int) -> None:
        places = torch.arange(1, requests + 1, dtype=torch.int64, device=self._device)
        self.buffers.stage(places, torch.ones_like(places), torch.full_like(places, context), drafts)

    def prune(self, cost: CostModel) -> None:
        """Drop the tiers that make a step of one request no cheaper than the next one does."""
        step = dict(zip(self._tiers, cost.work_seconds(1, np.array(self._tiers)).tolist(), strict=True))
        self._tiers = worth_keeping(step)
        self.pruned = sorted(step.keys() - set(self._tiers))
        for tier in set(self.pruned).intersection(self._captured):
            self._captured.remove(tier)
            for kind in _KINDS:
                self._graphs.discard(("verify", tier, kind))
        logger.info(
            "dspark: step ms of one request by rows: %s; no cheaper than the next and dropped: %s",
            ", ".join(f"{tier}: {step[tier] * 1e3:.2f}" for tier in self._tiers),
            self.pruned or "none",
        )

    def _fit_split(self) -> None:
        """Leave out the largest split steps if memory is short for their logits."""
        if self._device.type != "cuda":
            return
        room = rows_with_logits(self._spec, self._ranks.least(free_bytes(self._device)))
        if self._tiers[-1] <= room:
            return
        self._split_tiers = [tier for tier in self._split_tiers if tier <= room]
        self._split_slots = [slots for slots in self._split_slots if slots <= room]
        logger.warning(
            "dspark: memory is short: steps with top-k, top-p, min-p, biases or penalties are captured up to %d rows",
            self._split_tiers[-1] if self._split_tiers else 0,
        )

    def _jobs(self) -> Iterator[tuple[Any, Any]]:
        static = self._static
        for kind in _KINDS:
            for slots in reversed(self._slots):  # first: they say in which form verification finds the distributions
                yield ("draft", slots, kind), lambda slots=slots, kind=kind: static.draft(slots, kind)
                for depth in self.depths if slots >= LEAST_REQUESTS else ():
                    yield ("draft", slots, kind, depth), partial(static.draft, slots, kind, depth)
                yield ("plain", slots, kind), lambda slots=slots, kind=kind: static.plain(slots, kind)
            for tier in reversed(self._captured):
                yield ("verify", tier, kind), lambda tier=tier, kind=kind: static.verify(tier, kind)
        for split in self._splits():
            yield ("forward", split), lambda split=split: static.forward(split)

    def _tails(self) -> Iterator[tuple[Any, Any]]:
        for split in self._splits():
            yield ("tail", split), lambda split=split: self._static.tail(split)

    def _splits(self) -> list[Split]:
        """The most rows first: the first one makes the buffers that all share."""
        drafted, plain = [(True, tier) for tier in self._split_tiers], [(False, slots) for slots in self._split_slots]
        return sorted(drafted + plain, key=lambda split: split[1], reverse=True)

    @property
    def tiers(self) -> list[int]:
        """Row counts that a budget may choose."""
        return self._tiers

    @property
    def captured(self) -> list[int]:
        """Those of them that have graphs."""
        return self._captured

    @property
    def slots(self) -> list[int]:
        """Batch sizes of the draft and the plain graphs."""
        return self._slots

    @property
    def full_windows(self) -> bool:
        """Whether verify graphs forward full windows only (cap-accept)."""
        return self._full_windows

    @property
    def ladder(self) -> list[int]:
        """Row counts that were captured, before those that buy nothing were dropped: the same at every start."""
        return sorted([*self._tiers, *self.pruned])

    def refusal(self, batch: ScheduleBatch, budget: StepBudget, kind: Sampling) -> str | None:
        """Why a step has to run eagerly; None if it can be replayed."""
        if len(batch.reqs) > self.buffers.slots:
            return "batch larger than any graph"
        if kind == "general" and self._split_rows(budget, len(batch.reqs)) > self._most_split(budget.draft):
            return "general step larger than any graph"
        if self._full_windows and budget.draft and budget.packed:
            return "pinned budget in cap-accept"
        return None

    @staticmethod
    def _split_rows(budget: StepBudget, count: int) -> int:
        """Rows that a step of the general kind needs: R + K, not those of a tier of another ladder."""
        if not budget.draft:
            return count
        assert isinstance(budget.drafts, int)
        return count + budget.drafts if budget.packed else budget.tier

    def _most_split(self, draft: bool) -> int:
        return max(self._split_tiers if draft else self._split_slots, default=0)

    def run(
        self,
        batch: ScheduleBatch,
        budget: StepBudget,
        kind: Sampling,
        extras: StepExtras | None = None,
        note: object = None,
    ) -> tuple[StepOutcome, int]:
        """Stage, replay, copy out: nothing here waits for the device but a grammar, for the drafts.

        ``note`` is what the timer shall tell with the step's time.

        Returns:
            The outcome, whose block and survival are static (they hold until the next step drafts), and the rows that
            the target forwarded, padding included.
        """
        count, buffers = len(batch.reqs), self.buffers
        assert isinstance(budget.drafts, int)
        self.timer.start()
        buffers.stage(batch.req_pool_indices, batch.spec_info.bonus_tokens.view(-1), batch.seq_lens, budget.drafts)
        slots = smallest_at_least(self._slots, count)
        general = kind == "general"
        if budget.draft:
            key = "draft", slots, "sampled" if general else kind
            self._graphs.replay(key if budget.depth is None else (*key, budget.depth))
            self._read_done()
            if general:
                rows = smallest_at_least(self._split_tiers, self._split_rows(budget, count))
                output = self._split((True, rows), count, extras)
            else:
                rows = smallest_at_least(self._tiers, budget.tier)
                output = self._graphs.replay(("verify", rows, kind))
            slots = self._static.slots_of(rows)
        else:
            if general:
                slots = smallest_at_least(self._split_slots, count)
                output = self._split((False, slots), count, extras)
            else:
                output = self._graphs.replay(("plain", slots, kind))
            rows = slots
            self._read_done()
        assert output is not None
        self.timer.stop((budget.draft, general, rows), note)
        flat = FlatOutcome(output.clone(), slots, self._copies)
        confident = self._spec.has_confidence
        return CapturedOutcome(flat, count, buffers, budget, sampled=kind != "greedy", confident=confident), rows

    def _split(self, split: Split, count: int, extras: StepExtras | None) -> torch.Tensor | None:
        """Forward and tail of a step of the general kind, and what the host has to do around the forward."""
        window = self._spec.window if split[0] else 1
        if extras is not None:
            extras.drafted(self.buffers.windows[:count, :window])
        self._graphs.replay(("forward", split))
        if extras is not None:
            plan, rows = self._static.left_by_forward(split)
            assert plan.packed is not None
            extras.mask(rows.logits, plan.packed, window)
            # Without a draft a window has one row, but the outcome still has a place for each token of a full one.
            extras.keep(rows.logits, plan.packed.index[:count].expand(count, self._spec.window))
        return self._graphs.replay(("tail", split))

    def statistics(self) -> dict[str, Any]:
        """What ``/server_info`` shows: tiers, and device time of the steps."""
        steps = [
            {"draft": draft, "general": general, "rows": rows, "steps": count, "mean_ms": total / count * 1e3}
            for (draft, general, rows), (count, total) in self.timer.seconds.items()
        ]
        found = {"tiers": self._tiers, "pruned": self.pruned}
        return found | {"steps": steps, "unread_steps": self.timer.unread}

    def _read_done(self) -> None:
        """From here on the step does not read the slot table: the scheduler may reserve for the next one."""
        if self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            self._target.war_fastpath_read_done_event = event


def _graph_set(device: torch.device, ranks: Ranks) -> GraphSet:
    return EagerGraphs() if device.type == "cpu" else CudaGraphs(ranks.wait)


@contextlib.contextmanager
def _capturing(device: torch.device) -> Iterator[None]:
    """Inference mode, and the host's own preparation of collectives and kernels for a capture."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        if device.type == "cuda":
            from sglang.srt.distributed.parallel_state import graph_capture

            stack.enter_context(graph_capture())
        yield


def build_graphs(
    server_args: Any,
    spec: DraftSpec,
    settings: Settings,
    target: ModelRunner,
    draft: ModelRunner,
    requests: RequestTable,
    calibration: ConfidenceScale | None,
    replay: Replay | None = None,
) -> StepGraphs | None:
    """Capture the steps of a server; None if the operator has switched graphs off, or on a CPU."""
    decode, on_cpu = server_args.cuda_graph_config.decode, str(server_args.device) == "cpu"
    if (on_cpu and not settings.static_step) or (not on_cpu and decode.backend == "disabled"):
        return None
    if settings.collect_path is not None:
        return None  # calibration data needs the logits of each step
    if spec.gamma > MAX_GAMMA:
        logger.warning("dspark: no graphs for blocks of %d drafts: kernels hold %d", spec.gamma, MAX_GAMMA)
        return None
    mode = settings.resolved_mode(spec.has_confidence)
    most = min(int(server_args.max_running_requests), MAX_REQUESTS)
    ranks = Ranks(int(server_args.tp_size))
    if not on_cpu:
        most = min(most, int(decode.max_bs))
        room = requests_with_distributions(spec, ranks.least(free_bytes(torch.device("cuda"))))
        if room < most:
            most = max(1, room)
            logger.warning("dspark: memory is short: graphs for batches up to %d only; larger ones run eagerly", most)
    graphs = StepGraphs(
        spec,
        target,
        draft,
        requests,
        max_requests=most,
        tiers=tier_ladder(most, spec.window).tolist(),
        mode=mode,
        calibration=calibration,
        ranks=ranks,
        replay=replay,
        keep_blocks=(mode == "compact" or settings.record_steps) and replay is None and ranks.size == 1,
    )
    graphs.capture()
    return graphs
