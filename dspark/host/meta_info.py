"""What a client reads of its own request: ``meta_info["dspark"]`` of a finished answer.

The host carries values of its own from the scheduler to the tokenizer process in ``customized_info``, as one list entry
per token. It fills the lists of requests that have none with None and shows them in every chunk of a stream, so ours is
taken out before the host sees it and added where the host adds its own numbers to a finished answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

META_KEY = "dspark"


class Whole(list[Any]):
    """One value for a whole answer; the host takes a slice of it, as of a list with one entry per token."""

    def __init__(self, value: Any) -> None:
        super().__init__([value])

    def __getitem__(self, index: Any) -> Any:
        return list(self) if isinstance(index, slice) else super().__getitem__(index)


def attach(req: Any, value: Any) -> None:
    """Let a request that has just ended carry ``value`` to its client."""
    req.customized_info = (req.customized_info or {}) | {META_KEY: Whole(value)}


def take_out(original: Callable[..., Any], self: Any, recv_obj: Any) -> Any:
    """Keep our values of a batch of outputs aside, by request id."""
    packed = getattr(recv_obj, "customized_info", None)
    if packed is not None:
        from sglang.srt.managers.io_struct import unwrap_from_pickle, wrap_as_pickle

        info = unwrap_from_pickle(packed)
        ours = info.pop(META_KEY, None)
        if ours is not None:
            recv_obj.customized_info = wrap_as_pickle(info or None)
            # A batch that brings ours is handled before the next one comes: nobody else's value is dropped.
            self.dspark_values = {
                rid: next(value for value in values if value is not None)
                for rid, values in zip(recv_obj.rids, ours, strict=True)
                if any(value is not None for value in values)
            }
    return original(self, recv_obj)


def add(original: Callable[..., Any], self: Any, meta_info: dict[str, Any], recv_obj: Any, i: int) -> None:
    """Add our value to a finished answer."""
    original(self, meta_info, recv_obj, i)
    value = getattr(self, "dspark_values", {}).pop(recv_obj.rids[i], None)
    if value is not None:
        meta_info[META_KEY] = value
