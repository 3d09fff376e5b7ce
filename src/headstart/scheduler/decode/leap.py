"""Many decode steps at once, for a clock that can be moved: what they come to, without taking them one by one.

A step is free while all that it does is to append one token to each row of the launched step and to take the pages for
the next one. A leap applies free steps in a row. It leaves behind exactly what as many passes of the loop would: the same
tokens, the same pages taken and evicted in the same order, the next step launched. What is not free is left to a pass: a
choice that ends or commits pages, one that comes or goes, a page that nobody could give without being retracted, and
whatever the loop would look at between the steps.
"""

from collections import defaultdict
from sys import maxsize

import numpy as np

from headstart.core.errors import InvariantError
from headstart.core.layout import pages_for
from headstart.scheduler.decode.batching import Draw, InflightStep, Owed, ScheduledRow
from headstart.scheduler.decode.queues import DecodeQueues
from headstart.scheduler.decode.states import Choice, Running


def num_free_steps(board: DecodeQueues, row_steps: int) -> int:
    """How many steps are free, from the launched one on, if nothing happens meanwhile that a pass would see. `row_steps`
    is what `num_row_steps` said, less what was taken since."""
    launched = board.launched
    if launched is None or launched.held or board.stirred or len(launched.parts) != len(board.running):
        return 0
    if board.ready and len(board.running) < board.limits.max_running_requests:
        return 0
    if board.calls.are_watched:
        return 0
    return _with_pages(board, launched, row_steps)


def num_row_steps(board: DecodeQueues, draw: Draw) -> int:
    """The same as far as the launched rows tell, pages and all that is not a row apart; notes how far the pages they have
    reach. 0 where outputs are owed; stays right while the rows run, but for the steps that are taken."""
    launched, num_steps, room = board.launched, maxsize, maxsize
    if launched is None or launched.left or launched.owed is not None:
        return 0
    for part in launched.parts:
        request, sequence = part.entry.choice.request, part.entry.choice.sequence
        if not part.samples or part.num_new > 1 or request.num_top_logprobs is not None:
            return 0
        until_end = request.stop.max_new_tokens - sequence.num_outputs
        until_commit = part.entry.commit_at - sequence.num_computed
        num_steps = min(num_steps, until_end - 1, until_commit - 1)
        room = min(room, len(part.entry.lease.pages) * board.page_size - sequence.num_computed)
    launched.room = room
    for part in launched.parts:
        if num_steps > 0 and part.entry.choice.request.stop.stop_token_ids:
            num_steps = _before_stop(part.entry.choice, num_steps, draw)
    return max(0, num_steps)


def leap(board: DecodeQueues, num_steps: int, draw: Draw, first_end: float) -> None:
    """Apply the launched step, which ends at `first_end`, and those after it: `num_steps` free ones in all. The rows owe
    their outputs from now on."""
    launched = board.launched
    assert launched is not None
    if launched.num_owed + num_steps >= launched.room:
        _take_pages(board, launched, num_steps)
    if launched.owed is not None:
        first_end = launched.owed.first_end
    launched.owed = Owed(launched.num_owed + num_steps, draw, first_end)
    launched.step_id += num_steps
    board.counters["steps"] += num_steps
    board.counters["output_tokens"] += num_steps * len(launched.parts)


def _take_pages(board: DecodeQueues, launched: InflightStep, num_steps: int) -> None:
    """For the steps up to the one after the next `num_steps`, in the order in which passes would."""
    stop, size = launched.num_owed + num_steps + 1, board.page_size
    crossings: dict[int, list[Running]] = defaultdict(list)  # step -> entries that need a page for the one after it
    room = maxsize
    for part in launched.parts:
        entry = part.entry
        steps = range(len(entry.lease.pages) * size - entry.choice.sequence.num_computed, stop, size)
        for step in steps:
            crossings[step].append(entry)
        room = min(room, steps.start + len(steps) * size)
    launched.room = room
    for _, entries in sorted(crossings.items()):
        board.cache.make_room(len(entries), [(entry.lease, 1) for entry in entries])
        for entry in entries:
            if not board.cache.try_extend(entry.lease, 1):
                raise InvariantError("a free step lacks a page")


def _before_stop(choice: Choice, num_steps: int, draw: Draw) -> int:
    """Those of `num_steps` steps that come before the one which draws a stop id."""
    request, num_outputs = choice.request, choice.sequence.num_outputs
    if num_outputs < request.stop.min_new_tokens:
        return 0
    stops = np.isin(draw(request, num_outputs, num_steps), request.stop.stop_token_ids)
    return int(stops.argmax()) if stops.any() else num_steps


def _with_pages(board: DecodeQueues, launched: InflightStep, num_steps: int) -> int:
    """The most of `num_steps` steps for which there are pages without a retraction."""
    parts, available = launched.parts, board.cache.num_available()
    if len(parts) * (num_steps // board.page_size + 1) <= available:
        return num_steps
    launched.settle()
    if _pages_taken(board, parts, num_steps) <= available:
        return num_steps
    low, high = 0, num_steps  # enough for low, not for high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _pages_taken(board, parts, middle) <= available else (low, middle)
    return low


def _pages_taken(board: DecodeQueues, parts: list[ScheduledRow], num_steps: int) -> int:
    size, num_pages = board.page_size, 0
    for part in parts:
        lease = part.entry.lease
        num_pages += max(0, pages_for(len(part.entry.choice.sequence) + num_steps, size) - len(lease.pages))
    return num_pages
