"""The speculative worker that the host's scheduler drives."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from sglang.srt.distributed.parallel_state_wrapper import ParallelState
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, compute_position
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.draft_worker_common import build_draft_tp_worker

from dspark.config import Settings
from dspark.errors import HostError
from dspark.host import compat, takeover
from dspark.host.arguments import draft_spec_of
from dspark.host.batch import RequestTable, context_tokens, decode_batch
from dspark.host.draft_model import ARCHITECTURES, share_target_modules
from dspark.host.extras import StepExtras, attach_prefill, mask_prefill, wanted
from dspark.host.graphs import StepGraphs, build_graphs
from dspark.host.measure import measured_cost, measured_depths
from dspark.host.metrics import ObservedResult, StepObserver, export, tensors_of
from dspark.host.networks import HostDraftNet, HostTargetNet
from dspark.host.rank_group import Ranks
from dspark.host.rank_start import require_equal_ranks
from dspark.host.recording import Recording, profiled_step
from dspark.host.reserve import SlotReserve
from dspark.host.schedule import CalibrationClasses, build_scheduler, deployment, load_files, nominal_ladder
from dspark.host.simulate import assign_classes, build_replay
from dspark.observe.counters import StepFacts
from dspark.observe.prometheus import Exporter
from dspark.types import StepOutcome
from dspark.worker.budget import BudgetScheduler
from dspark.worker.probes import CeilingProbes
from dspark.worker.relay import Transfer
from dspark.worker.replay import Replay
from dspark.worker.static_step import Sampling
from dspark.worker.step import DecodeStep, first_tokens

logger = logging.getLogger("dspark")

Publish = Callable[..., None]


class DSparkWorker(BaseSpecWorker):
    """Drafts with its own network on a draft model runner that shares the target's slots, and verifies with the target.

    The scheduler calls :meth:`forward_batch_generation` with prefill and decode batches, on its forward stream under
    overlap scheduling, synchronously (without ``on_publish``) otherwise.
    """

    def __init__(
        self, server_args: ServerArgs, gpu_id: int, ps: ParallelState, nccl_port: int, target_worker: TpModelWorker
    ) -> None:
        super().__init__()
        self.server_args = server_args
        self.spec = draft_spec_of(server_args)
        self.settings = Settings.from_environment()
        self.mode = self.settings.resolved_mode(self.spec.has_confidence)
        self._target_worker = target_worker
        self.model_runner = target_worker.model_runner
        self.device = target_worker.device
        ModelRegistry.models.update(ARCHITECTURES)
        bundle = build_draft_tp_worker(
            server_args=server_args,
            gpu_id=gpu_id,
            ps=ps,
            nccl_port=nccl_port,
            target_model_config=self.model_runner.model_config,
            algo_label="DSPARK",
            attention_backend_override=server_args.speculative_draft_attention_backend,
        )
        self._draft_worker = bundle.draft_worker
        self.draft_model_runner = bundle.draft_model_runner
        share_target_modules(self.model_runner, self.draft_model_runner.model)
        self._window = torch.arange(self.spec.window, dtype=torch.int64, device=self.device)
        self._draft_net = HostDraftNet(self.draft_model_runner, self.spec.mask_token_id)
        self._target_net = HostTargetNet(target_worker)
        self._cost_table, calibration = load_files(server_args, self.spec, self.mode)
        self._calibration = None if calibration is None else CalibrationClasses(calibration, self.device)
        if self._calibration is not None:
            self._draft_net.calibration = self._calibration.scale
        calibrated, self._ranks, self._rank = self._calibration is not None, Ranks(ps.tp_size), ps.tp_rank
        self._recording = Recording(self.settings, self.spec, self._draft_net, calibrated=calibrated, ranks=self._ranks)
        self._requests: RequestTable | None = None
        self.simulated: Replay | None = None
        self._budgets: BudgetScheduler | None = None
        self._graphs: StepGraphs | None = None
        self.observer: StepObserver | None = None
        self.ending: StepObserver | None = None  # of the step whose results are being processed; None: not observed
        self._probes: CeilingProbes | None = None
        self._exporter: Exporter | None = None
        self._kind: Sampling = "general"  # of the last decode step
        self._temperatures, self._samples = np.empty(0), False  # of its requests, and whether one is above 0
        if ps.tp_rank == 0:
            logger.info(
                "dspark %s serves DSPARK on sglang %s: gamma=%d mode=%s draft=%s attention=%s/%s device=%s",
                takeover.version(), compat.host_version(), self.spec.gamma, self.mode,
                type(self.draft_model_runner.model).__name__, server_args.attention_backend,
                bundle.resolved_attention_backend, self.device,
            )  # fmt: skip

    # -- start-up, called by the scheduler in this order -------------------------------------------------------------

    def alloc_memory_pool(
        self, memory_pool_config: Any = None, req_to_token_pool: Any = None, token_to_kv_pool_allocator: Any = None
    ) -> None:
        """Allocate the draft's KV pool; request rows and slots are the target's."""
        super().alloc_memory_pool(memory_pool_config, req_to_token_pool, token_to_kv_pool_allocator)
        rows = req_to_token_pool.req_to_token.shape[0]
        self._slots = SlotReserve(self.spec.window, rows, self.device)
        class_of = None if self._calibration is None else self._calibration.of
        seed, vocab = self._target_worker.random_seed, self.spec.vocab_size
        self._requests = RequestTable(rows, self.device, seed, vocab, class_of)
        self.simulated = build_replay(self.settings, self.spec.gamma, self._requests)
        options = {"estimates": self.mode == "compact" and not self.simulated, "simulated": bool(self.simulated)}
        self.observer = StepObserver(self.spec.gamma, rows, self.settings.step_records, **options)
        if self.observer.ceiling is not None and self._ranks.size == 1:  # the LM head of one rank is not all
            self._probes = CeilingProbes(self._draft_net, self.observer.ceiling, self.spec.gamma, self.device)
        self._step = DecodeStep(self._draft_net, self._target_net, self.simulated)
        logger.info("dspark: %.2f GiB for penalties and biases of %d requests", rows * vocab * 8 / 2**30, rows)

    def init_cuda_graphs(self) -> None:
        """Capture the step's own graphs; the host captures none for decoding (a hook keeps it from it)."""
        slots, seed = self.model_runner.req_to_token_pool.req_to_token.shape[0], self._target_worker.random_seed
        require_equal_ranks(self._ranks, self.server_args, self.spec, self.settings, seed, slots)
        self._draft_worker.init_cuda_graphs(capture_decode_cuda_graph=False)
        assert self._requests is not None
        scale = None if self._calibration is None else self._calibration.scale
        runners = self.model_runner, self.draft_model_runner
        self._graphs = build_graphs(
            self.server_args, self.spec, self.settings, *runners, self._requests, scale, self.simulated
        )
        measured, depths = None, None
        if self._graphs is not None:
            measured = measured_cost(self.server_args, self.spec, self.settings, self._graphs, *runners)
            if measured is not None:
                self._graphs.prune(measured)
                depths = measured_depths(self._graphs, *runners)
        self._budgets = build_scheduler(
            self.server_args,
            self.spec,
            self.settings,
            self._cost_table,
            measured=measured,
            slots=slots,
            graph_tiers=None if self._graphs is None else self._graphs.tiers,
            graph_ladder=None if self._graphs is None else self._graphs.ladder,
            depths=depths,
        )
        ladder = nominal_ladder(self.server_args, self.spec, None if self._graphs is None else self._graphs.ladder)
        self._recording.deployment = deployment(self.server_args, self.spec, ladder)
        assert self.observer is not None
        self._exporter = export(partial(self.observer.samples, self._budgets), self.server_args, self._rank)
        logger.info("dspark: step times from %s", self._budgets.cost_source or "no table: full windows")

    @property
    def spec_v2_attn_backends(self) -> tuple[Any, ...]:
        """Both backends; the scheduler keeps host lengths if either needs them."""
        return self.model_runner.attn_backend, self.draft_model_runner.attn_backend

    # -- forward -----------------------------------------------------------------------------------------------------

    def forward_batch_generation(
        self, batch: ScheduleBatch, on_publish: Publish | None = None, grammar_barrier: Any = None
    ) -> GenerationBatchResult:
        """Run one prefill or decode batch of the scheduler."""
        publish = on_publish or (lambda lengths: None)
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            self._recording.interrupt()
            self._interrupt_timer()
            return self._prefill(batch, publish)
        with profiled_step():
            return self._decode(batch, publish, grammar_barrier)

    @torch.inference_mode()
    def _prefill(self, batch: ScheduleBatch, publish: Publish) -> GenerationBatchResult:
        """Prefill the target, sample the first tokens, and give the draft the prompt's context KV."""
        assert self._requests is not None
        self._requests.write(batch)
        if self.simulated is not None:
            assign_classes(self.simulated, batch, self._requests)
        result = self._target_worker.forward_batch_generation(
            batch, is_verify=not batch.is_prefill_only, capture_hidden_mode=CaptureHiddenMode.FULL
        )
        if not batch.is_prefill_only:
            logits = result.logits_output.next_token_logits
            mask_prefill(batch, logits)
            rows = self._requests.sampling(batch)
            adjust = self._requests.adjustments.of(batch.req_pool_indices, batch.req_pool_indices_cpu)
            result.next_token_ids = first_tokens(logits, rows, batch.seq_lens.to(torch.int64) - 1, adjust)
            attach_prefill(batch, result.logits_output, logits, result.next_token_ids)
        result.new_seq_lens = batch.seq_lens
        publish(batch.seq_lens)
        # Before this returns: the scheduler may move the prompt into the prefix cache and change its slots.
        self._inject_prompt(batch, result)
        result.next_draft_input = self._slots.draft_input(result.next_token_ids, batch.seq_lens)
        return result

    def _inject_prompt(self, batch: ScheduleBatch, result: GenerationBatchResult) -> None:
        output = result.logits_output
        features, output.hidden_states = output.hidden_states, None
        prefix = torch.tensor(batch.prefix_lens, dtype=torch.int32, device=self.device)
        extend = torch.tensor(batch.extend_lens, dtype=torch.int32, device=self.device)
        positions, _ = compute_position(self.server_args.attention_backend, prefix, extend, sum(batch.extend_lens))
        count = batch.out_cache_loc.shape[0]
        self._draft_net.inject(features[:count], positions.to(torch.int64), batch.out_cache_loc.to(torch.int64))

    @torch.inference_mode()
    def _decode(
        self, batch: ScheduleBatch, publish: Publish, grammar_barrier: Callable[[], None] | None
    ) -> GenerationBatchResult:
        """Run the step of :class:`dspark.worker.step.DecodeStep` on the scheduler's batch."""
        if batch.forward_mode.is_idle():
            self._recording.interrupt()
            self._interrupt_timer()
            return self._idle(publish)
        assert self._requests is not None
        assert self._budgets is not None
        if not isinstance(batch.spec_info, DFlashDraftInputV2):
            found = type(batch.spec_info).__name__
            raise HostError(f"found spec_info {found} on a decode batch; required is DFlashDraftInputV2")
        if batch.seq_lens.is_cuda:  # made on the scheduler's stream, read on this one: not to be reused too early
            batch.seq_lens.record_stream(torch.cuda.current_stream())
        if self.simulated is not None:
            self.simulated.settle()
        slots = batch.req_pool_indices_cpu.numpy().copy()  # remembered for two steps, while the batch changes
        generations = self._requests.generations[slots]
        budget = self._budgets.decide(slots, generations, context_tokens(batch, self.spec.window))
        if not self._budgets.same_batch:  # what its requests ask for does not change
            self._kind = self._requests.kind(batch)
            self._temperatures = self._requests.temperatures[slots]
            self._samples = bool(self._temperatures.any())
        extras = StepExtras(batch, grammar_barrier) if wanted(batch) else None
        refusal = "no graphs" if self._graphs is None else self._graphs.refusal(batch, budget, self._kind)
        if self._graphs is not None and refusal is None:
            # A step that waits for a grammar says nothing of the others.
            note = self._budgets.note() if extras is None else None
            if not self._budgets.same_batch:
                self._interrupt_timer()
            outcome, forwarded = self._graphs.run(batch, budget, self._kind, extras, note)
            publish(outcome.lengths)
            self._budgets.learn(self._graphs.timer.taken())
        else:
            self._interrupt_timer()
            budget = budget.unpadded(len(batch.reqs), self.spec.gamma)
            forwarded = budget.tier
            inputs = decode_batch(batch, self._window, self.model_runner.req_to_token_pool.req_to_token, self._requests)
            self._draft_net.bind(batch)
            self._target_net.bind(batch, extras)
            outcome = self._step.run(inputs, budget, publish)
            self._recording.blocks(batch, inputs, outcome, self._target_net.logits)
            if extras is not None:
                extras.keep(self._target_net.logits, outcome.plan.index())
        survival = self._budgets.publish(outcome.survival, forwarded, budget.depth)
        self._recording.step(batch, self._budgets, budget, outcome, forwarded)
        output = LogitsProcessorOutput(next_token_logits=None) if refusal is None else self._target_net.output
        if extras is not None:
            extras.attach(output, outcome.accept.tokens)
        facts = self._budgets.facts(int(batch.forward_iter), forwarded, refusal)
        return self._result(outcome, output, facts, survival, budget.depth)

    def _result(
        self, outcome: StepOutcome, output: Any, facts: StepFacts, survival: Transfer | None, depth: int | None
    ) -> GenerationBatchResult:
        assert self._budgets is not None
        stands_in = self._budgets.stands_in
        probes = self._probes if self.observer is not None and self.observer.counting else None
        probe = None if probes is None else probes.step(self._temperatures, outcome, depth is None, stands_in)
        self._recording.probe(probe)
        tensors = tensors_of(
            outcome,
            chances=probes is not None and self._samples,
            ceiling=self.mode == "cap-accept" and facts.drafted,
            windows=self._budgets.schedules,
            trimmed=facts.drafted and facts.drafts < facts.slots.shape[0] * self.spec.gamma,
        )
        return ObservedResult(
            logits_output=output,
            next_draft_input=self._slots.draft_input(outcome.next_anchor, outcome.lengths),
            new_seq_lens=outcome.lengths,
            can_run_cuda_graph=facts.refusal is None,
            speculative_num_draft_tokens=self.spec.window,
            observer=self.observer,
            facts=facts,
            survival=survival,
            probe=probe,
            temperatures=self._temperatures,
            depth=depth,
            stands_in=stands_in,
            **tensors,
        )

    def _interrupt_timer(self) -> None:
        """The next step does not follow on the last one: the time between them is nobody's."""
        if self._graphs is not None:
            self._graphs.timer.interrupt()

    def _idle(self, publish: Publish) -> GenerationBatchResult:
        empty = torch.empty((0,), dtype=torch.int64, device=self.device)
        publish(empty)
        return GenerationBatchResult(
            next_token_ids=empty,
            accept_lens=empty.to(torch.int32),
            next_draft_input=self._slots.draft_input(empty, empty),
            new_seq_lens=empty,
            can_run_cuda_graph=False,
            speculative_num_draft_tokens=self.spec.window,
        )

    # -- weights: a draft belongs to one target; only the target is updated ------------------------------------------

    def update_weights_from_disk(self, recv_req: Any) -> tuple[bool, str]:
        """The scheduler has updated the target; the request's path holds no draft."""
        del recv_req
        logger.warning(
            "dspark: the target's weights changed, the draft's did not; acceptance may fall until it is retrained"
        )
        return True, "Succeeded to update model weights (draft unchanged)."

    update_weights_from_ipc = update_weights_from_disk

    def update_weights_from_tensor(self, recv_req: Any) -> tuple[bool, str]:
        """Tensors are the target's; a draft cannot be updated this way and keeps its own."""
        return self._target_worker.update_weights_from_tensor(recv_req)

    # -- what the scheduler asks a DSPARK worker without a guard ------------------------------------------------------

    @property
    def carries_confidence(self) -> bool:
        """Whether published steps carry confidences for the host's relay (never: ours is ``worker.relay``)."""
        return False

    def get_confidence_budget_prepare(self) -> None:
        """The host's budget preparation is not used."""
        return

    def set_dspark_forced_budget_frac(self, frac: float | None, depth: int | None = None) -> None:
        """Verify floor(frac * R * gamma) drafts per step from now on, in every mode; None ends the pin."""
        assert self._budgets is not None
        self._budgets.pin(frac, depth)

    @property
    def depths(self) -> tuple[int, ...]:
        """Lengths of short blocks that may be pinned."""
        return self._budgets.depths if self._budgets is not None else ()

    def block_accept_estimate_log_suffix(self) -> str | None:
        """Suffix for the decode log line: rows and drafts since the last one."""
        simulated = None if self.simulated is None else f"SIMULATED acceptance: {self.simulated.selected}"
        counted = None if self.observer is None else self.observer.log_suffix()
        return ", ".join(part for part in (counted, simulated) if part) or None

    def prepare_for_kv_cache_release(self, req: Any) -> None:
        """A decode step has ended the request, which still has its slot."""
        if self.ending is not None:
            self.ending.finished(req)

    def clear_info_records(self) -> None:
        """Forget the step records and set the counters to zero."""
        with contextlib.nullcontext() if self._exporter is None else self._exporter.clearing():
            self._clear()

    def _clear(self) -> None:
        if self.observer is not None:
            self.observer.clear()
        if self._graphs is not None:
            self._graphs.timer.clear()
        if self._budgets is not None:
            self._budgets.clear()
        self._recording.clear()

    def dump_info_records(self) -> dict[str, Any]:
        """What ``/server_info`` shows as ``dspark_info_record``."""
        observed = {"counters": {}} if self.observer is None else self.observer.dump(self._probes)
        record: dict[str, Any] = {
            "implementation": "plugin",
            "version": takeover.version(),
            "gamma": self.spec.gamma,
            "mode": self.mode,
            "simulated": None if self.simulated is None else self.simulated.describe(),
            "builtin_modules_loaded": sorted(name for name in sys.modules if name.startswith(compat.BUILTIN_MODULES)),
            "schedule": None if self._budgets is None else self._budgets.statistics(),
            "eager_steps": observed["counters"].get("graph_misses", {}),
            "graphs": None if self._graphs is None else self._graphs.statistics(),
        }
        return record | observed | self._recording.dump()
