"""Threads that send requests, and let go of them when somebody interrupts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor


@contextlib.contextmanager
def client_threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """``count`` threads that are waited for at the end.

    After an error or an interrupt nothing that has not started is sent any more, and nobody waits here for answers on
    their way: whoever started the server ends it, which ends them.
    """
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
        pool.shutdown()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
