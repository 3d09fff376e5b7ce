"""What is wrong with a Prefill message in itself: a caller may be another version, or hostile."""

import math

from headstart.core.layout import pages_for
from headstart.core.messages import Prefill


def fault_in(message: Prefill, page_size: int, vocab_size: int) -> str | None:
    """Why nobody could serve this call, or None."""
    end, dst = len(message.tokens), message.dst_pages.tolist()
    if not 0 <= message.start < end or message.start % page_size:
        return f"start {message.start} is not a page-aligned position before {end}"
    if len(dst) != pages_for(end - message.start, page_size):
        return f"{len(dst)} target pages for positions [{message.start}, {end})"
    if min(dst) < 0 or len(set(dst)) != len(dst):
        return "target pages are negative or repeated"
    if not 0 <= int(message.tokens.min()) <= int(message.tokens.max()) < vocab_size:
        return "a token id is not in the vocabulary"
    if not math.isfinite(message.remaining_s):
        return "remaining_s is not finite"
    return None
