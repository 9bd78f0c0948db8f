"""Drafts that the target hardly ever wants: texts are right, only slower, so nobody notices unless it is said."""

from __future__ import annotations

LEAST_DRAFTS = 300  # first drafts looked at together; rare once the draft is switched off
LEAST_SHARE = 0.05  # of them accepted; a draft that was trained for its target has about 0.5 and more


class WrongDraft:
    """Looks at the first draft of each block, which depends on no other one."""

    def __init__(self) -> None:
        self._told = False
        self.clear()

    def clear(self) -> None:
        """The sums start again at zero."""
        self._tested = self._accepted = 0

    def look(self, tested: int, accepted: int) -> str | None:
        """What to tell the operator, once until acceptance is better.

        Args:
            tested: first drafts verified since the start or the last ``clear``.
            accepted: of them.
        """
        new, passed = tested - self._tested, accepted - self._accepted
        if new < LEAST_DRAFTS:
            return None
        self._tested, self._accepted = tested, accepted
        told, self._told = self._told, passed < LEAST_SHARE * new
        if not self._told or told:
            return None
        return (
            f"found {passed} accepted of the last {new} first drafts; a draft that was trained for this target has "
            "about half or more; check that --speculative-draft-model-path was trained for this very target (base or "
            "instruct, version, index base of its target layers); if it was, most requests are sampled far from what "
            "it learned (temperatures above 1 with top-k, top-p or min-p), and serving without speculation is as fast"
        )
