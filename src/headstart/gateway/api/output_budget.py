"""How many tokens a request may generate, and the words for one that does not fit.

Clients know an overflow by its code, context_length_exceeded, or by the phrases "this model's maximum context length is"
and "prompt is too long": every message here has both.
"""

from typing import NamedTuple

from headstart.gateway.api.errors import ApiError, invalid
from headstart.gateway.state import ContextLimit


class WantedOutput(NamedTuple):
    """The field that bounds the output and its value; no value: what the context leaves, or `default` of it."""

    field: str
    value: int | None
    default: int | None = None


def output_budget(prompt_field: str, prompt_len: int, wanted: WantedOutput, limit: ContextLimit) -> int:
    """Tokens to generate at most. Raises ApiError 400 if prompt and output cannot fit."""
    room = limit.num_tokens - prompt_len
    if room < 1:
        message = f"'{prompt_field}' has {prompt_len} tokens, and at least one must be left for the answer"
        raise _overflow(limit, message, prompt_field)
    if wanted.value is None:
        return room if wanted.default is None else min(wanted.default, room)
    if wanted.value > room:
        message = f"'{prompt_field}' has {prompt_len} tokens and '{wanted.field}' is {wanted.value}"
        raise _overflow(limit, message, wanted.field)
    return wanted.value


def _overflow(limit: ContextLimit, fact: str, param: str) -> ApiError:
    message = f"{limit.sentence}: the prompt is too long for it, {fact}"
    return invalid(message, param, "context_length_exceeded")
