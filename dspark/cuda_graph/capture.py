"""Capture functions as CUDA graphs, replay them by key."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

import torch

Function = Callable[[], torch.Tensor | None]


class GraphSet(Protocol):
    """Functions that were captured; replaying one returns its (static) output."""

    def capture(self, key: Hashable, function: Function) -> None:
        """Capture ``function`` under ``key``."""

    def replay(self, key: Hashable) -> torch.Tensor | None:
        """Run it again on what the static buffers hold now."""

    def discard(self, key: Hashable) -> None:
        """Forget a function that was captured."""


class CudaGraphs:
    """One ``torch.cuda.CUDAGraph`` per key, all in one memory pool: capture the largest first."""

    def __init__(self, wait: Callable[[], None] | None = None) -> None:
        """Args: wait: for the other ranks that capture the same functions; None: there are none."""
        self._wait = wait
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, torch.Tensor | None]] = {}

    def capture(self, key: Hashable, function: Function) -> None:
        """Run ``function`` once, so that kernels are compiled and handles exist, then record it."""
        torch.cuda.synchronize()
        if self._wait is not None:
            self._wait()  # none runs ahead by more than one graph: the others would spin in its collectives
        function()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # On the caller's stream, which the host may have prepared for collectives.
        with torch.cuda.graph(graph, pool=self._pool, stream=torch.cuda.current_stream()):
            output = function()
        self._graphs[key] = graph, output

    def replay(self, key: Hashable) -> torch.Tensor | None:
        graph, output = self._graphs[key]
        graph.replay()
        return output

    def discard(self, key: Hashable) -> None:
        del self._graphs[key]


class EagerGraphs:
    """The same on a machine without graphs: a replay calls the function. For tests of everything but the capture."""

    def __init__(self) -> None:
        self._functions: dict[Hashable, Function] = {}

    def capture(self, key: Hashable, function: Function) -> None:
        self._functions[key] = function

    def replay(self, key: Hashable) -> torch.Tensor | None:
        return self._functions[key]()

    def discard(self, key: Hashable) -> None:
        del self._functions[key]
