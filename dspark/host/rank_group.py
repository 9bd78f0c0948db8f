"""What the ranks of a server tell each other, over the host's CPU group: while it starts, and to be compared."""

from __future__ import annotations

from typing import TypeVar

from sglang.srt.distributed.parallel_state import get_tp_group

T = TypeVar("T")


class Ranks:
    """The ranks that share a model. All of them ask the same things in the same order; one alone asks nobody.

    What one rank sees and others do not (free memory, a clock, a disk) decides nothing before it went through here.
    """

    def __init__(self, size: int = 1) -> None:
        """Args: size: how many there are."""
        self.size = size

    def all(self, value: T) -> list[T]:
        """What every one brings, rank 0 first."""
        return [value] if self.size == 1 else get_tp_group().all_gather_object(value)

    def least(self, value: int) -> int:
        """The smallest of what the ranks bring."""
        return min(self.all(value))

    def of_first(self, value: T) -> T:
        """What the first one brings, bit by bit; what the others bring is only sent, so let it be small."""
        return self.all(value)[0]

    @property
    def leads(self) -> bool:
        """Whether this rank is the first one."""
        return self.size == 1 or bool(get_tp_group().is_first_rank)

    def wait(self) -> None:
        """For all of them."""
        if self.size > 1:
            get_tp_group().barrier()
