"""When a choice is complete, and what it may not say before."""

from typing import NamedTuple

from headstart.core.request import FinishReason, Request
from headstart.core.sequence import Sequence


class Stop(NamedTuple):
    reason: str
    token_id: int | None = None


def find_stop(request: Request, sequence: Sequence) -> Stop | None:
    """Whether the outputs so far complete the choice. A stop id counts from output `min_new_tokens` on."""
    num_outputs = sequence.num_outputs
    if num_outputs == 0:
        return None
    last = int(sequence.span(len(sequence) - 1, len(sequence))[0])
    if num_outputs > request.stop.min_new_tokens and last in request.stop.stop_token_ids:
        return Stop(FinishReason.STOP, last)
    if num_outputs >= request.stop.max_new_tokens:
        return Stop(FinishReason.LENGTH)
    return None


def banned_ids(request: Request, sequence: Sequence) -> tuple[int, ...]:
    """Ids that the next output may not be."""
    return request.stop.stop_token_ids if sequence.num_outputs < request.stop.min_new_tokens else ()
