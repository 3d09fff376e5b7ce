"""When a choice is complete, and what it may not say before."""

from typing import NamedTuple

from headstart.core.request import FinishReason, Request
from headstart.core.sequence import Sequence


class Stop(NamedTuple):
    reason: str
    token_id: int | None = None


def find_stop(request: Request, sequence: Sequence) -> Stop | None:
    """Whether the outputs so far complete the choice. A stop id counts from output `min_new_tokens` on."""
    num_outputs, stop = sequence.num_outputs, request.stop
    if num_outputs == 0:
        return None
    if num_outputs > stop.min_new_tokens and sequence.last_token in stop.stop_token_ids:
        return Stop(FinishReason.STOP, sequence.last_token)
    return Stop(FinishReason.LENGTH) if num_outputs >= stop.max_new_tokens else None


def banned_ids(request: Request, output_index: int) -> tuple[int, ...]:
    """Ids that this output may not be."""
    return request.stop.stop_token_ids if output_index < request.stop.min_new_tokens else ()
