"""The counters as Prometheus metrics, written by a thread of their own: a decode step pays nothing for them.

Distributions are counted already when they come here: each export adds differences to the buckets of a histogram. What
has no order worth a quantile (tiers, places in the block, reasons) is one counter with a label per value.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

PREFIX = "sglang:dspark_"
INTERVAL_SECONDS = 1.0

# name -> help, label; the host's counters end in _total as the client library demands
COUNTERS: dict[str, tuple[str, str | None]] = {
    "steps": ("Decode steps, with a draft and without one.", "kind"),
    "request_steps": ("Decode steps times their requests.", None),
    "drafts": ("Drafts by what became of them; their sum was proposed.", "outcome"),
    "committed_tokens": ("Tokens committed by decode steps, accepted drafts and bonus tokens.", "kind"),
    "tokens": ("Committed tokens by where they went; their sum is that of committed_tokens.", "kind"),
    "rows": ("Rows that were scheduled for verification.", None),
    "trimmed_request_steps": (
        "Request steps with less than a full window, by whether all tested drafts passed.",
        "passed",
    ),
    "position_tested": ("Drafts tested, by place in the block.", "position"),
    "position_reached": ("Drafts tested with all drafts before them accepted, by place in the block.", "position"),
    "position_accepted": ("Drafts accepted, by place in the block.", "position"),
    "calibration_judged": ("Drafts tested whose survival the host has, by place in the block.", "position"),
    "calibration_censored": ("Drafts left out whose survival the host has, by place in the block.", "position"),
    "calibration_predicted": ("Sum of the survivals of the judged drafts.", "position"),
    "calibration_accepted": ("Judged drafts that were accepted, by place in the block.", "position"),
    "tier_steps": ("Steps by the rows that the target forwarded, padding included.", "rows"),
    "graph_misses": ("Steps that ran without a CUDA graph, by reason.", "reason"),
    "budget_reasons": ("Steps by why their budget was what it was.", "reason"),
    "confidences": ("Planned steps by what the confidences of two steps before were.", "found"),
    "late_confidences": ("Confidences that had to be waited for.", None),
    "ceiling_request_steps": ("Request steps whose ceiling was measured (cap-accept).", None),
    "ceiling_tokens": ("What full windows would have committed in these.", None),
    "ceiling_committed_tokens": ("What was committed in these.", None),
    "ceiling_found_request_steps": (
        "Request steps with a draft by what is known of their ceiling (compact): known, solved (by later tokens), "
        "sampled (estimated from probes), short_sampled, short_greedy (short blocks, estimated from whole ones), "
        "ended (no later tokens).",
        "found",
    ),
    "ceiling_found_tokens": ("Ceiling of the known and the solved request steps.", "found"),
    "ceiling_probes": ("Sampled request steps whose draft was asked for what became of its places.", None),
    "timed_steps": ("Steps with a predicted and a measured time.", None),
    "predicted_step_seconds": ("Predicted time of the timed steps.", None),
    "measured_step_seconds": ("Time between the results of the timed steps and of the decode step before.", None),
    "step_error_seconds": ("Absolute difference of both times.", None),
}

# name -> help
HISTOGRAMS: dict[str, str] = {
    "window_rows": "Rows of the window of a request step with a draft.",
    "committed_per_request_step": "Tokens that a request step with a draft committed.",
    "step_seconds": "Time between the results of a decode step and of the decode step right before it.",
}

# name -> help, label; sums that may fall, since the server's start or the last clear
GAUGES: dict[str, tuple[str, str]] = {
    "ceiling_estimate": (
        "What full windows would have committed (low, middle, high) in so many request_steps, which committed so much.",
        "of",
    ),
}

Sample = tuple[str, str | None, float]  # name, label value, sum since the start or the last clear


class Distribution(NamedTuple):
    """What a histogram has observed since the start or the last clear."""

    name: str
    bounds: tuple[float, ...]  # upper ones, increasing
    counts: tuple[int, ...]  # per bucket, one more than bounds: what is above the last
    total: float  # sum of what was observed


def samples(counters: Mapping[str, Any], found: Mapping[str, int], late: int) -> Iterator[Sample]:
    """All samples.

    Args:
        counters: ``StepCounters.statistics``.
        found: planned steps by what was found of the confidences of two steps before.
        late: confidences that had to be waited for.
    """
    outcomes = ("accepted", "rejected", "unreached", "trimmed")
    ends = ("delivered", "behind_stop", "after_end", "by_grammar")
    time, positions, ceiling = counters["step_time"], counters["positions"], counters["ceiling"]
    passed = counters["trimmed_all_accepted"]
    labelled: dict[str, Mapping[str, float]] = {
        "steps": counters["steps"],
        "drafts": {name: counters[name] for name in outcomes},
        "committed_tokens": {name: counters[name] for name in ("accepted", "bonus")},
        "tokens": {name: counters[name] for name in ends},
        "trimmed_request_steps": {"all": passed, "not_all": counters["trimmed_steps"] - passed},
        **{f"position_{name}": _places(counts, 1) for name, counts in positions.items()},
        "tier_steps": counters["tiers"],
        "graph_misses": counters["graph_misses"],
        "budget_reasons": counters["reasons"],
        "confidences": found,
    }
    plain: dict[str, float] = {
        "request_steps": counters["request_steps"],
        "rows": counters["rows"],
        "late_confidences": late,
        "ceiling_request_steps": ceiling["request_steps"],
        "ceiling_tokens": ceiling["tokens"],
        "ceiling_committed_tokens": ceiling["committed"],
        "timed_steps": time["steps"],
        "predicted_step_seconds": time["predicted_seconds"],
        "measured_step_seconds": time["measured_seconds"],
        "step_error_seconds": time["absolute_error_seconds"],
    }
    yield from ((name, value, count) for name, counts in labelled.items() for value, count in counts.items())
    yield from ((name, None, count) for name, count in plain.items())


def calibration_samples(totals: Mapping[str, list[float]]) -> Iterator[Sample]:
    """Samples of ``CalibrationWindows.totals``."""
    for name, sums in totals.items():
        yield from ((f"calibration_{name}", str(place), total) for place, total in enumerate(sums, 1))


def distributions(counters: Mapping[str, Any]) -> Iterator[Distribution]:
    """The histograms of ``StepCounters.statistics``."""
    for name, counts in (
        ("window_rows", counters["windows"]),
        ("committed_per_request_step", counters["committed_histogram"]),
    ):
        total = sum(place * count for place, count in enumerate(counts))
        yield Distribution(name, tuple(range(1, len(counts))), (*counts[1:], 0), total)
    seconds = counters["step_seconds"]
    yield Distribution("step_seconds", tuple(seconds["bounds"]), tuple(seconds["steps"]), seconds["seconds"])


def ceiling_samples(found: Mapping[str, Any]) -> Iterator[Sample]:
    """Samples of ``LiveCeiling.statistics``."""
    steps = {name: found[name]["request_steps"] for name in ("known", "solved")}
    steps |= {name: sum(found[name]) for name in ("sampled", "short_sampled", "short_greedy", "ended")}
    yield from (("ceiling_found_request_steps", name, count) for name, count in steps.items())
    yield from (("ceiling_found_tokens", name, found[name]["tokens"]) for name in ("known", "solved"))
    yield "ceiling_probes", None, sum(found["probes"]) + sum(found["short_probes"])
    names = {"request_steps": "steps", "committed": "committed", "low": "low", "middle": "middle", "high": "high"}
    yield from (("ceiling_estimate", name, found[key]) for name, key in names.items())


def _places(counts: list[int], first: int) -> dict[str, int]:
    """By place, from ``first`` on; the place 0 of a histogram that starts there is always empty."""
    return {str(place): count for place, count in enumerate(counts, first) if place}


class Exporter:
    """Adds what has been counted since the last time to Prometheus counters of this process, and sets its gauges."""

    def __init__(self, read: Callable[[], Iterator[Sample | Distribution]], labels: Mapping[str, str]) -> None:
        """Args:
        read: the sums so far, see ``clearing``.
        labels: of every metric.
        """
        # Not at the top: the library decides at import whether it serves several processes, and the host says so late.
        from prometheus_client import Counter, Gauge

        self._read, self._labels = read, dict(labels)
        self._seen: dict[tuple[str, str | None], float] = {}
        self._observed: dict[str, Distribution] = {}
        self._metrics = {
            name: Counter(PREFIX + name, text, [*labels, *([label] if label else [])])
            for name, (text, label) in COUNTERS.items()
        }
        self._histograms: dict[str, Any] = {}
        self._gauges = {
            name: Gauge(PREFIX + name, text, [*labels, label], multiprocess_mode="mostrecent")
            for name, (text, label) in GAUGES.items()
        }
        self._lock, self._end = threading.Lock(), threading.Event()

    def export(self) -> None:
        """Add the differences, set the gauges."""
        with self._lock:
            for found in self._read():
                if isinstance(found, Distribution):
                    self._observe(found)
                else:
                    self._count(*found)

    def _count(self, name: str, value: str | None, total: float) -> None:
        if name in self._gauges:
            self._gauges[name].labels(**self._labels, **{GAUGES[name][1]: str(value)}).set(total)
            return
        before = self._seen.get((name, value), 0.0)
        self._seen[name, value] = total
        if total > before:
            label = COUNTERS[name][1]
            self._metrics[name].labels(**self._labels, **({label: str(value)} if label else {})).inc(total - before)

    def _observe(self, found: Distribution) -> None:
        if found.name not in self._histograms:
            from prometheus_client import Histogram

            text = HISTOGRAMS[found.name]
            made = Histogram(PREFIX + found.name, text, [*self._labels], buckets=found.bounds)
            self._histograms[found.name] = made.labels(**self._labels)
        histogram, before = self._histograms[found.name], self._observed.get(found.name)
        self._observed[found.name] = found
        # The library observes one value at a time, a second of a busy server holds thousands: straight to its buckets.
        for bucket, count, old in zip(
            histogram._buckets, found.counts, before.counts if before else [0] * len(found.counts), strict=True
        ):
            if count > old:
                bucket.inc(count - old)
        histogram._sum.inc(max(found.total - (before.total if before else 0.0), 0.0))

    @contextlib.contextmanager
    def clearing(self) -> Iterator[None]:
        """Around a clear of what is read: nothing counted before is lost, nothing is counted twice."""
        self.export()
        with self._lock:
            yield
            self._seen.clear()
            self._observed.clear()

    def start(self) -> None:
        """Export every second, until the process or ``stop`` ends it."""
        threading.Thread(target=self._run, name="dspark metrics", daemon=True).start()

    def stop(self) -> None:
        """End the thread after a last export."""
        self._end.set()

    def _run(self) -> None:
        while not self._end.wait(INTERVAL_SECONDS):
            self.export()
        self.export()
