"""Requests of every kind for ``mixed_load.py``, drawn from a seed, and the book of what became of each."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

Ending = Literal["answer", "disconnect", "abort", "refused"]
"""What a request waits for: its answer; a few chunks, then the client goes away; ``/abort_request``; HTTP 400."""

STOPS = [" the", "\n", ".", ", and", " you"]
TEXTS = 8
REFUSED: list[dict[str, Any]] = [
    {"return_hidden_states": True},
    {"input_ids": [1, -3]},
    {"input_ids": [1, 1 << 30, 5]},
    *(
        {"sampling_params": {"max_new_tokens": 4} | wrong}
        for wrong in (
            {"sampling_seed": "x"},
            {"top_k": 10**10},
            {"temperature": -1.0},
        )
    ),
]

SHAPED: list[dict[str, Any]] = [
    {"frequency_penalty": 0.5},
    {"presence_penalty": 0.5},
    {"repetition_penalty": 1.2},
    {"min_new_tokens": 1},
    {"json_schema": '{"type": "object"}'},
    {"regex": "[a-z]+"},
    {"ebnf": 'root ::= "a" | "b" root'},
]
"""What the host of a step has to do more for than for a temperature."""


@dataclass(frozen=True)
class Request:
    """One HTTP request."""

    rid: str
    path: str
    payload: dict[str, Any]
    ending: Ending
    after: float = 0.0  # chunks until a client goes away, seconds until an abort

    @property
    def streamed(self) -> bool:
        return bool(self.payload.get("stream"))

    @property
    def limit(self) -> int:
        """Longest answer in tokens."""
        native = self.payload.get("sampling_params", {}).get("max_new_tokens")
        return int(self.payload["max_tokens"] if native is None else native)

    @property
    def kinds(self) -> list[str]:
        """Everything that is special about it, for the report."""
        params = self.payload.get("sampling_params", self.payload)
        named = ["top_p", "top_k", "min_p", "sampling_seed", "logit_bias", "stop", "stop_token_ids", "ignore_eos"]
        named += [name for shape in SHAPED for name in shape]
        found = [self.ending, "stream" if self.streamed else "whole", *(name for name in named if name in params)]
        greedy = params.get("temperature") == 0
        return [*found, "greedy" if greedy else "sampled", "chat" if "messages" in self.payload else "native"]


def base_texts(sentences: Sequence[Sequence[int]], tokens: int, draw: Random) -> list[list[int]]:
    """Token sequences of at least ``tokens`` tokens; prompts that start with the same one share a prefix."""
    texts: list[list[int]] = []
    for _ in range(TEXTS):
        text: list[int] = []
        while len(text) < tokens:
            text += draw.choice(sentences)
        texts.append(text)
    return texts


class RequestSource:
    """An endless sequence of requests: the same seed, the same sequence."""

    def __init__(
        self, texts: Sequence[Sequence[int]], seed: int, max_prompt: int, max_new: int, refusals: bool = True
    ) -> None:
        """Args:
        texts: of :func:`base_texts`.
        seed: of everything that is drawn.
        max_prompt, max_new: tokens.
        refusals: whether requests that a DSPARK server must refuse are among them.
        """
        self._texts, self._draw, self._seed = texts, Random(seed), seed
        self._max_prompt, self._max_new, self._refusals = max_prompt, max_new, refusals
        self._count = 0

    def next(self) -> Request:
        """The next request."""
        draw, self._count = self._draw, self._count + 1
        rid = f"load-{self._seed}-{self._count}"
        chance = draw.random()
        if self._refusals and chance < 0.07:
            usual = {"input_ids": self._prompt(), "sampling_params": {"max_new_tokens": 4}}
            return Request(rid, "/generate", {"rid": rid} | usual | draw.choice(REFUSED), "refused")
        if chance < 0.15:
            return self._chat(rid)
        params = self._params()
        payload = {"rid": rid, "input_ids": self._prompt(), "sampling_params": params, "stream": draw.random() < 0.5}
        if draw.random() < 0.1:
            payload |= {"return_logprob": True, "top_logprobs_num": draw.randint(0, 3)}
        if chance < 0.23:
            params |= {"ignore_eos": True, "max_new_tokens": self._max_new}
            return Request(rid, "/generate", payload | {"stream": True}, "disconnect", draw.randint(1, 8))
        if chance < 0.30:
            params |= {"ignore_eos": True, "max_new_tokens": self._max_new}
            return Request(rid, "/generate", payload, "abort", draw.random())
        return Request(rid, "/generate", payload, "answer")

    def _length(self, most: int) -> int:
        """1 to ``most``, every order of magnitude as often."""
        return min(most, int(math.exp(self._draw.uniform(0, math.log(most + 1)))))

    def _prompt(self) -> list[int]:
        draw, length = self._draw, self._length(self._max_prompt)
        text = draw.choice(self._texts)
        start = 0 if draw.random() < 0.6 else draw.randrange(len(text))
        tail = [draw.choice(text) for _ in range(min(length, draw.randint(0, 8)))]
        return [*text, *text][start : start + length - len(tail)] + tail

    def _params(self) -> dict[str, Any]:
        draw = self._draw
        params: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": self._length(self._max_new)}
        if draw.random() < 0.6:
            params["temperature"] = round(draw.uniform(0.2, 1.5), 2)
            filters: list[dict[str, Any]] = [{}, {}, {}, {"top_p": 0.8}, {"top_k": 20}, {"min_p": 0.05}]
            params |= draw.choice(filters)
            if draw.random() < 0.3:
                params["sampling_seed"] = draw.getrandbits(40)
        if draw.random() < 0.1:
            params["logit_bias"] = {str(draw.choice(self._texts[0])): round(draw.uniform(-5, 5), 1)}
        if draw.random() < 0.15:
            params |= draw.choice(SHAPED)
        if draw.random() < 0.15:
            params["stop"] = draw.sample(STOPS, 2)
        if draw.random() < 0.05:
            params["stop_token_ids"] = [draw.choice(self._texts[0])]
        if draw.random() < 0.5:
            params["ignore_eos"] = True
        return params

    def _chat(self, rid: str) -> Request:
        draw = self._draw
        question = draw.choice(["Name three rivers.", "What is 17 plus 25?", "Tell me a story.", "Write a SQL query."])
        payload: dict[str, Any] = {"rid": rid, "model": "default", "messages": [{"role": "user", "content": question}]}
        payload |= {"max_tokens": self._length(self._max_new), "stream": draw.random() < 0.5}
        payload |= {"temperature": draw.choice([0.0, 0.9]), "seed": draw.getrandbits(30)}
        return Request(rid, "/v1/chat/completions", payload, "answer")


@dataclass(frozen=True)
class Seen:
    """What a client saw of its request."""

    status: int  # HTTP
    finish: str | None = None  # reason in the last chunk: stop, length, abort; None: there was none
    tokens: int | None = None  # completion tokens, where the answer says them
    left: bool = False  # the client went away
    text: str = ""  # of an error


def outcome(request: Request, seen: Seen) -> str:
    """One word or a few for what became of a request; those that start with ``lost`` may not happen."""
    if request.ending == "refused":
        return "refused" if seen.status == 400 else f"lost: served with HTTP {seen.status} what must be refused"
    if request.ending == "disconnect" and seen.left:
        return "disconnected"
    if request.ending == "abort" and (seen.finish == "abort" or "abort" in seen.text.lower()):
        return "aborted"
    if seen.status != 200:
        return f"lost: HTTP {seen.status}"
    if seen.finish not in ("stop", "length"):
        return f"lost: finish reason {seen.finish}"
    if seen.finish == "length" and seen.tokens not in (None, request.limit):
        return f"lost: {seen.tokens} of {request.limit} tokens"
    return "answered"


class Book:
    """Counts of what was sent and what came of it; many threads write it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.sent = 0
        self.kinds: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.tokens = 0
        self.losses: list[dict[str, Any]] = []

    def send(self, request: Request) -> None:
        """Before the request goes out."""
        with self._lock:
            self.sent += 1
            self.kinds.update(request.kinds)

    def close(self, request: Request, seen: Seen) -> None:
        """After its last byte, or whatever was its end."""
        word = outcome(request, seen)
        with self._lock:
            self.outcomes[word] += 1
            self.tokens += seen.tokens or 0
            if word.startswith("lost"):
                self.losses.append({"rid": request.rid, "outcome": word, "text": seen.text[:400]})

    def lost(self) -> int:
        """Requests that were not answered as they should, or of which nothing is known."""
        return self.sent - sum(count for word, count in self.outcomes.items() if not word.startswith("lost"))

    def report(self) -> dict[str, Any]:
        return {
            "sent": self.sent,
            "lost": self.lost(),
            "outcomes": dict(self.outcomes),
            "kinds": dict(self.kinds),
            "tokens": self.tokens,
            "losses": self.losses[:20],
        }


def grown(points: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """How much a figure has grown over the idle points of a run: the last over the largest of the first third.

    Returns:
        None with fewer than two points, or where the figure is unknown.
    """
    values = [point[name] for point in points if point.get(name) is not None]
    if len(values) < 2:
        return None
    return round(float(values[-1] - max(values[: max(1, len(values) // 3)])), 1)
