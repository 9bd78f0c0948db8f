"""Slots reserved for many steps at once: what the host promises of each step holds, and nothing is lost or shared."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache import allocation
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.speculative import dflash_info_v2
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2

from dspark.host import reserve
from dspark.host.cpu import write_reserved_slots
from dspark.host.reserve import SlotDraftInput, SlotReserve

WINDOW, WIDTH, REQUESTS = 5, 400, 6


class Pool:
    """The host's own pools with some prefilled requests."""

    def __init__(self, slots: int, lengths: list[int]) -> None:
        self.table = ReqToTokenPool(REQUESTS, WIDTH, "cpu", False)
        self.allocator = TokenToKVPoolAllocator(slots, torch.float32, "cpu", None, False)  # type: ignore[arg-type]
        self.cache = ChunkCache(CacheInitParams(False, self.table, self.allocator, 1))
        self.slots, self.launches = slots, 0
        self.reqs = [self._prefilled(row + 1, length) for row, length in enumerate(lengths)]

    def _prefilled(self, row: int, length: int) -> Any:
        self.table.req_to_token[row, :length] = self.allocator.alloc(length).int()
        kv = ReqKvInfo(kv_allocated_len=length, swa_evicted_seqlen=0)
        params = SimpleNamespace(top_k=1)
        return SimpleNamespace(kv_committed_len=length, kv=kv, row=row, sampling_params=params)

    def batch(self) -> Any:
        return SimpleNamespace(
            reqs=self.reqs,
            batch_size=lambda: len(self.reqs),
            device="cpu",
            tree_cache=self.cache,
            req_to_token_pool=self.table,
            token_to_kv_pool_allocator=self.allocator,
            req_pool_indices=torch.tensor([req.row for req in self.reqs], dtype=torch.int64),
            seq_lens_cpu=None,
            seq_lens_sum=None,
        )

    def held(self) -> list[list[int]]:
        """Slots of each request, as its row of the table says."""
        return [self.table.req_to_token[req.row, : req.kv.kv_allocated_len].tolist() for req in self.reqs]

    def advance(self, draw: random.Random) -> None:
        for req in self.reqs:
            req.kv_committed_len += draw.randint(1, WINDOW)


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    launches: list[int] = []

    def write(rows: Any, table: Any, start: Any, end: Any, slots: Any, count: int) -> None:
        launches.append(count)
        write_reserved_slots(rows, table, start, end, slots)

    monkeypatch.setattr(allocation, "assign_req_to_token_pool_func", write)
    monkeypatch.setattr(dflash_info_v2, "get_spec", lambda: SimpleNamespace(speculative_num_draft_tokens=WINDOW))
    monkeypatch.setattr(dflash_info_v2, "is_pin_memory_available", lambda device: False)
    return launches


def state(reserved: SlotReserve) -> SlotDraftInput:
    none = torch.empty(0, dtype=torch.int64)
    return reserved.draft_input(none, none)


def step(pool: Pool, made: DFlashDraftInputV2) -> tuple[Any, DFlashDraftInputV2]:
    batch = pool.batch()
    made.prepare_for_decode(batch)
    return batch, made


def test_without_slots_to_spare_it_is_what_the_host_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reserve, "AHEAD", 0)
    lengths, draw = [3, 40, 17, 1], random.Random(0)
    ours, theirs = Pool(2000, lengths), Pool(2000, lengths)
    reserved = SlotReserve(WINDOW, REQUESTS, "cpu")
    for _ in range(40):
        none = torch.empty((0, 0))
        mine, own = step(ours, state(reserved))
        host, other = step(theirs, DFlashDraftInputV2(none, none, none, none, none))
        assert mine.seq_lens_cpu.tolist() == host.seq_lens_cpu.tolist()
        assert mine.seq_lens_sum == host.seq_lens_sum
        assert own.reserved_seq_lens_cpu is not None
        assert other.reserved_seq_lens_cpu is not None
        assert own.reserved_seq_lens_cpu.tolist() == other.reserved_seq_lens_cpu.tolist()
        assert own.reserved_seq_lens_sum == other.reserved_seq_lens_sum
        assert ours.held() == theirs.held()
        for req, twin in zip(ours.reqs, theirs.reqs, strict=True):
            req.kv_committed_len += draw.randint(1, WINDOW)
            twin.kv_committed_len = req.kv_committed_len


@pytest.mark.parametrize("slots", [3000, 700])
def test_each_step_has_two_windows_and_no_slot_two_owners(slots: int, on_a_cpu: list[int]) -> None:
    """With few slots nothing is reserved ahead; a request at the end of its row gets no more than the row holds."""
    draw, pool = random.Random(1), Pool(slots, [1, 30, 9, WIDTH - 9 * WINDOW, 2, 5])
    reserved, steps, ahead_of, longest = SlotReserve(WINDOW, REQUESTS, "cpu"), 0, False, 0
    while max(req.kv_committed_len for req in pool.reqs) + 2 * WINDOW <= WIDTH:
        batch, own = step(pool, state(reserved))
        steps += 1
        held = pool.held()
        for req, found in zip(pool.reqs, held, strict=True):
            assert req.kv_committed_len + 2 * WINDOW <= len(found) <= WIDTH
            ahead = reserve.AHEAD if slots == 3000 else 0
            ahead_of |= len(found) > req.kv_committed_len + 2 * WINDOW
            longest = max(longest, len(found))
            assert len(found) <= req.kv_committed_len + 2 * WINDOW + ahead
        every = [slot for found in held for slot in found]
        assert len(set(every)) == len(every)
        assert 0 not in every, "the slot that padding writes to"
        assert len(every) + pool.allocator.available_size() == slots
        assert own.reserved_seq_lens_sum == sum(req.kv_committed_len + 2 * WINDOW for req in pool.reqs)
        assert batch.seq_lens_sum == sum(batch.seq_lens_cpu.tolist())
        pool.advance(draw)
    assert steps > 3
    assert ahead_of == (slots == 3000)
    assert longest == WIDTH or slots == 700, "the end of a row was not reached: nothing was tested"


def test_most_steps_reserve_nothing(on_a_cpu: list[int]) -> None:
    draw, pool, reserved = random.Random(2), Pool(2000, [4, 4, 4]), SlotReserve(WINDOW, REQUESTS, "cpu")
    for _ in range(60):
        step(pool, state(reserved))
        pool.advance(draw)
    assert 1 <= len(on_a_cpu) <= 60 // (reserve.AHEAD // WINDOW) + 1


def test_a_batch_that_was_joined_and_thinned_out_goes_on() -> None:
    pool, reserved = Pool(2000, [4, 8, 15]), SlotReserve(WINDOW, REQUESTS, "cpu")
    anchors, lengths = torch.arange(2), torch.tensor([4, 8])
    made, other = reserved.draft_input(anchors, lengths), reserved.draft_input(anchors[:1], lengths[:1])
    made.merge_batch(other)
    made.filter_batch(torch.tensor([0, 2]))
    assert made.bonus_tokens.tolist() == [0, 0]
    assert made.new_seq_lens.tolist() == [4, 4]
    assert made.topk_p.shape == (2, 0)
    del pool.reqs[1]
    batch, _ = step(pool, made)
    assert batch.seq_lens_cpu.tolist() == [4, 15]


def test_the_stream_that_the_host_may_plan_on_keeps_the_hosts_way(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(DFlashDraftInputV2, "prepare_for_decode", lambda self, batch: asked.append(batch))
    monkeypatch.setenv("SGLANG_ENABLE_OVERLAP_PLAN_STREAM", "1")
    pool = Pool(2000, [4])
    batch, _ = step(pool, state(SlotReserve(WINDOW, REQUESTS, "cpu")))
    assert asked == [batch]
