"""One cell of ``benchmarks.serve``: an arm, a batch and an acceptance, measured in short rounds on a running server."""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import decode_log, serve_arms
from benchmarks.acceptance import load_prompts
from benchmarks.decode_log import DecodeLog, Interval
from dspark.demo.server import ServerProcess
from dspark.errors import HostError

_MIN_INTERVALS = 2  # per round; with fewer, rounds get longer
_MAX_TOKENS = 8  # times the wanted tokens, at most
_MOST_RUNS, _ENOUGH_REQUESTS = 12, 24  # below so many requests, a round of simulated acceptance is several runs
_ALWAYS_ONE = 1.2  # tokens a step; below it nothing varies
_FULL = 1.0
_UNPIN = -1  # ends a pin on our server; the built-in's HTTP schema lets none end, and nothing here needs it


@dataclass(frozen=True)
class Cell:
    """What to measure: a live row, or step times at a budget of ``budget`` drafts."""

    kind: str  # "rows", "step_times" or "checks", where the result goes
    arm: str
    batch: int
    acceptance: str
    budget: int | None

    @property
    def key(self) -> dict[str, Any]:
        """Fields that name the result in the file."""
        where = {"budget": self.budget} if self.kind == "step_times" else {"acceptance": self.acceptance}
        return {"arm": self.arm, "batch": self.batch, **where}


def live(arm: str, batch: int, acceptance: str) -> Cell:
    """Throughput as it is."""
    return Cell("rows", arm, batch, acceptance, None)


def check(arm: str, batch: int, acceptance: str) -> Cell:
    """Throughput of an arm that is composed, measured live at one point."""
    return Cell("checks", arm, batch, acceptance, None)


def timed(arm: str, batch: int, budget: int) -> Cell:
    """Seconds of a step that verifies ``budget`` drafts."""
    return Cell("step_times", arm, batch, "", budget)


def describe(entry: dict[str, Any]) -> str:
    """One line for people."""
    if "step_ms" in entry:
        low, high = min(entry["step_ms"]), max(entry["step_ms"])
        return f"batch {entry['batch']}, {entry['budget']} drafts: step {low:.2f} to {high:.2f} ms"
    low, high = min(entry["tok_s_repeats"]), max(entry["tok_s_repeats"])
    window = "" if entry["mean_window"] is None else f", window {entry['mean_window']:.2f}"
    off = "" if not entry["draft_off_share"] else f", draft off {entry['draft_off_share']:.0%}"
    return (
        f"{entry['arm']} {entry['acceptance']}, batch {entry['batch']}: {entry['tok_s']:,.0f} tok/s "
        f"({low:,.0f} to {high:,.0f}), {entry['accept_length']:.2f} tokens a step{window}{off}"
    )


def server_facts(server: ServerProcess) -> dict[str, Any]:
    """What the server says of itself that a reader of the numbers wants to know."""
    info = server.server_info()
    names = ("version", "attention_backend", "dtype", "kv_cache_dtype", "cuda_graph_max_bs_decode", "page_size")
    facts = {name: info[name] for name in names if name in info}
    record = (info.get("internal_states") or [{}])[0].get("dspark_info_record") or {}
    schedule = record.get("schedule") or {}
    return facts | {"cost_source": schedule.get("cost_source"), "simulated": record.get("simulated")}


class Bench:
    """Measures cells on one server."""

    def __init__(self, args: argparse.Namespace, server: ServerProcess) -> None:
        self._args, self._server = args, server
        self._log = DecodeLog(server.log_path)
        self._level: str | None = None
        self._pin: float | None = None
        self._round = 0
        self._prompts = self._load() if args.real else []

    def measure(self, cell: Cell) -> dict[str, Any]:
        """A row, or step times."""
        self._prepare(cell)
        return self._timed(cell) if cell.kind == "step_times" else self._live(cell)

    def _prepare(self, cell: Cell) -> None:
        args = self._args
        # Step times do not depend on what is accepted; without accepted drafts a round holds the most steps.
        if cell.arm.startswith("dspark") and not args.real:
            self.select(cell.acceptance or "hopeless")
        pin = None
        if cell.budget is not None and cell.arm != "builtin-static" and not (args.own_static and "static" in cell.arm):
            # Both servers compute K = floor(f * R * gamma) in floats: half a draft more is the same K.
            pin = min(_FULL, (cell.budget + 0.5) / (cell.batch * args.gamma))
        elif cell.arm == "dspark-static" and not args.own_static:
            pin = _FULL
        if pin != self._pin:
            self.pin(pin)

    def select(self, level: str) -> None:
        """Replay a level from now on; our server only."""
        if level != self._level:
            serve_arms.select_level(self._server, level)
            self._level = level

    def pin(self, fraction: float | None, **more: float) -> None:
        """Pin the budget from now on, or end that; ``more``: keys that our server takes beside it."""
        self._server.set_state(dspark_force_budget_frac=_UNPIN if fraction is None else fraction, **more)
        self._pin = fraction

    def _live(self, cell: Cell) -> dict[str, Any]:
        tokens = self._args.tokens
        warm = self.run(cell.batch, tokens)
        while len(warm) < _MIN_INTERVALS and tokens < _MAX_TOKENS * self._args.tokens:
            tokens *= 2  # the rounds that find the length also warm up
            warm = self.run(cell.batch, tokens)
        runs = 1
        if self._level and any(one.accept_length > _ALWAYS_ONE for one in warm):
            # A few requests replay few blocks, so their mean is noisy. More runs, not longer ones: contexts stay alike.
            runs = max(1, min(_MOST_RUNS, _ENOUGH_REQUESTS // cell.batch))
        self._clear(cell.arm)
        rounds = [[one for _ in range(runs) for one in self.run(cell.batch, tokens)] for _ in range(self._args.repeats)]
        for found in rounds:
            self._require(found, 1, cell, tokens)
        rates = [decode_log.rate(found) for found in rounds]
        every = [one for found in rounds for one in found]
        tok_s, schedule = statistics.median(rates), self._schedule(cell)
        labels = ["simulated"] if self._level else []
        labels += ["pinned"] if self._pin is not None else []
        return {
            **cell.key,
            "tok_s": tok_s,
            "tok_s_per_user": tok_s / cell.batch,
            "mean_window": self._args.gamma + 1.0 if "static" in cell.arm else schedule.get("window", _window(every)),
            "accept_length": statistics.fmean(one.accept_length for one in every),
            "tok_s_repeats": rates,
            "draft_off_share": schedule.get("draft_off"),
            "tokens": tokens,
            "labels": labels,
        }

    def _timed(self, cell: Cell) -> dict[str, Any]:
        """All intervals of one round, each of them a repeat."""
        steps = self._args.log_interval * 2 * (self._args.repeats + 1)
        self.run(cell.batch, self._args.log_interval * 2)
        found = self.run(cell.batch, steps)
        if len(found) < self._args.repeats:  # weights that accept something after all
            found = self.run(cell.batch, 4 * steps)
        self._require(found, 2, cell, steps)
        return {
            **cell.key,
            "gamma": self._args.gamma,
            "step_ms": [one.step_seconds * 1e3 for one in found],
            "accept_length": statistics.fmean(one.accept_length for one in found),
            "labels": ["pinned"] if self._pin is not None else [],
        }

    def _require(self, found: Sequence[Interval], count: int, cell: Cell, tokens: int) -> None:
        if len(found) < count:
            raise HostError(
                f"found {len(found)} usable log lines of {cell.batch} requests of {tokens} tokens ({cell.arm}); "
                f"required are {count}; raise --tokens, or lower --log-interval; log: {self._server.log_path}"
            )

    def run(self, batch: int, tokens: int, again: bool = False) -> list[Interval]:
        """One round: ``batch`` requests of ``tokens`` tokens each; ``again``: with the prompts of the last round."""
        self._round += not again
        self._server.flush_cache()
        self._log.mark()
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        self._server.post("/generate", {"input_ids": self._ids(batch), "sampling_params": params})
        return self._log.intervals(batch)

    def _ids(self, batch: int) -> list[list[int]]:
        """Prompts that differ from request to request and from round to round."""
        if self._prompts:
            first = self._round * batch
            return [self._prompts[(first + i) % len(self._prompts)] for i in range(batch)]
        length = self._args.input_len
        return [[10 + (7919 * self._round + 104729 * i + 31 * k) % 30000 for k in range(length)] for i in range(batch)]

    def _load(self) -> list[list[int]]:
        from transformers import AutoTokenizer

        args = self._args
        found = load_prompts(args.prompts, 10_000, AutoTokenizer.from_pretrained(args.target), 1024)
        if not found:
            raise SystemExit(f"found no prompts in {', '.join(map(str, args.prompts))}; required are JSON lines")
        by_set: dict[str, list[list[int]]] = {}
        for prompt in found:
            by_set.setdefault(prompt.set_name, []).append(prompt.ids)
        longest = max(map(len, by_set.values()))
        return [ids[i] for i in range(longest) for ids in by_set.values() if i < len(ids)]  # sets mixed in every batch

    def _clear(self, arm: str) -> None:
        if arm.startswith("dspark"):
            self._server.set_state(dspark_clear_info_records=1)

    def _schedule(self, cell: Cell) -> dict[str, Any]:
        """Mean window and share of steps without a draft, where our worker counts them."""
        if not cell.arm.startswith("dspark"):
            return {}
        record = self._server.server_info()["internal_states"][0]["dspark_info_record"]
        with contextlib.suppress(KeyError):
            counts = record["schedule"]["by_batch"][str(cell.batch)]
            steps = counts["steps"]
            return {
                "window": counts["scheduled_rows"] / steps / cell.batch,
                "draft_off": counts["draft_off_steps"] / steps,
            }
        return {}


def _window(found: Sequence[Interval]) -> float | None:
    windows = [one.window for one in found if one.window is not None]
    return statistics.fmean(windows) if windows else None
