"""What bounds a scheduler, resolved from the configuration: plain numbers, no "auto"."""

from dataclasses import dataclass
from math import inf

ANY_TOKEN_ID = 1 << 31
MAX_BYPASSED = 64
"""Admissions that may pass one that waits for pages."""


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """Limits of one decode worker."""

    max_running_requests: int  # rows of one step that decode
    max_queued_requests: int  # waiting beyond this is answered BUSY
    context_len: int  # longest prompt + output of one request, tokens
    chunked_prefill_size: int  # tokens a step spends on prompts computed here for want of a prefill worker
    local_prefill_tokens: int  # tokens a step spends on short deltas; 0: never
    num_reserved_decode_tokens: int  # growth reserved for each admitted request, tokens, page-rounded
    kill_after_s: float = 5.0  # Cancel unanswered this long, and too many overdue pages: ask for the peer's end
    give_up_after_s: float = 60.0  # no proof of that end this long after asking: drain, and end this process instead
    gateway_silence_s: float = 5.0  # no word from a gateway this long, membership included: its requests are cancelled
    itl_slo_s: float | None = None  # a step with decode rows should take no longer; None: `max_step_stretch` alone
    max_step_stretch: float = inf  # prompt tokens beside decode rows make a step at most so many times longer
    vocab_size: int = ANY_TOKEN_ID  # token ids are below it
    num_draft_tokens: int = 0  # guesses of a decode row, at most; 0: none


@dataclass(frozen=True, slots=True)
class PrefillLimits:
    """Limits of one prefill worker."""

    max_running_requests: int  # prompts in progress
    chunked_prefill_size: int  # tokens of one step over all prompts
    credit_tokens: int  # prompt tokens one decode worker may have open here
    capacity_tokens: int  # longest prompt that fits the pool
    kill_after_s: float = 5.0  # a handle open this long past its deadline, and too many such: ask for the peer's end
    vocab_size: int = ANY_TOKEN_ID  # token ids are below it
