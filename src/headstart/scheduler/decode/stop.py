"""When a choice is complete, and what it may not say before."""

from typing import NamedTuple

from headstart.core.request import FinishReason, Request


class Stop(NamedTuple):
    reason: str
    token_id: int | None = None


def find_stop(request: Request, num_outputs: int, token_ids: tuple[int, ...]) -> tuple[int, Stop | None]:
    """How many of `token_ids`, which are drawn after `num_outputs` outputs, belong to the choice, and why it is complete
    with the last of them. A stop id counts from output `min_new_tokens` on."""
    stop = request.stop
    for index, token_id in enumerate(token_ids, num_outputs + 1):
        if index > stop.min_new_tokens and token_id in stop.stop_token_ids:
            return index - num_outputs, Stop(FinishReason.STOP, token_id)
        if index >= stop.max_new_tokens:
            return index - num_outputs, Stop(FinishReason.LENGTH)
    return len(token_ids), None


def banned_ids(request: Request, output_index: int) -> tuple[int, ...]:
    """Ids that this output may not be."""
    return request.stop.stop_token_ids if output_index < request.stop.min_new_tokens else ()
