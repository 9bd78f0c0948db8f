"""Compare greedy output of two servers token for token.

Plain greedy decoding takes the token with the largest logit. Where the two largest logits of a reduced-precision model
are closer than its rounding, the shape of a batch decides which one wins, with or without speculation. Such a
difference is a near tie: both candidates lie within a few hundredths of a nat of the best token when the plain server
scores the common prefix in one prefill. Any other difference is an error of the speculative path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dspark.demo.server import ServerProcess
from dspark.demo.table import Answer


@dataclass(frozen=True)
class Difference:
    """The first place where two answers to one prompt part."""

    index: int  # position in the output, 0-based
    none_token: int | None  # None: the answer without speculation had ended
    dspark_token: int | None
    gap_nats: float | None  # best log-probability minus the worse candidate's; None: not scored


def first_difference(none: Answer, dspark: Answer) -> Difference | None:
    """Where the answers part, or None if all tokens are equal."""
    if none.input_ids != dspark.input_ids:
        raise ValueError("the answers belong to different prompts")
    left, right = none.output_ids, dspark.output_ids
    if left == right:
        return None
    shorter = min(len(left), len(right))
    index = next((i for i in range(shorter) if left[i] != right[i]), shorter)
    return Difference(
        index,
        left[index] if index < len(left) else None,
        right[index] if index < len(right) else None,
        None,
    )


def score(server: ServerProcess, none: Answer, difference: Difference) -> Difference:
    """Add the gap: one prefill of prompt and common output on a server without speculation.

    An answer that simply ended has no candidate to score and keeps its gap of None.
    """
    candidates = [difference.none_token, difference.dspark_token]
    if None in candidates:
        return difference
    server.flush_cache()  # KV written by decode steps would make it more than one prefill
    answer = server.generate(
        none.input_ids + none.output_ids[: difference.index],
        sampling_params={"temperature": 0, "max_new_tokens": 1},
        return_logprob=True,
        top_logprobs_num=1,
        token_ids_logprob=candidates,
    )
    info = answer["meta_info"]
    best = info["output_top_logprobs"][0][0][0]
    worse = min(entry[0] for entry in info["output_token_ids_logprobs"][0])
    return Difference(difference.index, difference.none_token, difference.dspark_token, best - worse)


def near_ties(differences: Sequence[Difference], threshold_nats: float) -> int:
    """How many differences are near ties."""
    return sum(found.gap_nats is not None and found.gap_nats <= threshold_nats for found in differences)
