"""The steps of a decode worker between two things that happen to it, taken all at once when the next one does.

    (pass) ──look_ahead──► the ends of the steps to come are known, and how many of them are free
    anything at `now` ──catch_up──► the free ones that ended before are applied; the step in flight is where it would be
    what runs may change ──collect──► their tokens are to be sent, each as of its own time

A step is free if all that it does is to append one token to each row of the step in flight and to take the pages for the
next one. What is not free is left to a pass: a choice that ends or commits pages, one that comes or goes, a page that
nobody could give without being retracted, and whatever the loop would check between the steps. Free steps that were
applied leave behind exactly what as many passes of the loop would: the same tokens, the same pages taken and evicted in
the same order, the next step launched.

`catch_up` comes before whatever may see the worker: a pass, a heartbeat, a stall, its end. A step that ends at the very
time of a pass belongs to the pass, which takes messages first. `unsaid` decides when tokens are sent.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import islice
from sys import maxsize

import numpy as np

from headstart.core.arrays import Int32Array
from headstart.core.errors import InvariantError
from headstart.core.layout import pages_for
from headstart.core.request import ChoiceRef, Request
from headstart.scheduler.decode.gateway_port import OWN_STALL_S
from headstart.scheduler.decode.queues import DecodeQueues
from headstart.scheduler.decode.scheduler import DecodeScheduler
from headstart.scheduler.decode.states import Choice, Running
from headstart.sim.blank import BlankExecutor
from headstart.sim.clock import NEVER
from headstart.sim.unsaid import Unsaid
from headstart.worker.loop import PUBLISH_S, WorkerLoop

Draw = Callable[[Request, int, int], Int32Array]
"""(request, first, count): outputs [first, first + count), of which none is banned. A pure function."""


class FastForward:
    def __init__(self, scheduler: DecodeScheduler, executor: BlankExecutor, loop: WorkerLoop, unsaid: Unsaid) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._loop = loop
        self._unsaid = unsaid
        unsaid.read_from(scheduler.sequence)
        self._steps = FreeSteps(scheduler.queues, executor.tape.read)
        self._ends: list[float] = []  # of the step in flight and of those after it, as far as known
        self._num_free = 0  # that may be applied; one end more than these is known
        self._done: list[float] = []  # ends of the steps that were applied and whose tokens were not collected
        self._last_step = 0  # of the executor, when `_ends` was made

    def look_ahead(self) -> float | None:
        """When the worker has to make a pass for its steps' sake, if nothing happens to it before."""
        executor = self._executor
        if executor.finish_at is None:
            self._ends, self._num_free = [], 0
            return None
        if self._last_step != executor.num_steps:
            self._ends, self._last_step = [executor.finish_at], executor.num_steps
            self._steps.read_rows()
        self._know_ends(self._steps.count())
        return self._ends[self._num_free]

    def _know_ends(self, num_free: int) -> None:
        executor, ends = self._executor, self._ends
        if executor.step_s > OWN_STALL_S:  # the loop would think that it stood still
            num_free = 0
        end = ends[-1]
        for step_s in islice(executor.times, max(0, num_free + 1 - len(ends))):
            if step_s > OWN_STALL_S:
                executor.times = iter(())
                break
            end += step_s
            ends.append(end)
        self._num_free = min(num_free, len(ends) - 1)

    def catch_up(self, now: float) -> bool:
        """Apply the free steps that ended before `now`. Whether there were any."""
        num_steps = bisect_left(self._ends, now, 0, self._num_free)
        if not num_steps:
            return False
        last = self._last_publication(num_steps)
        if last is not None:
            self._apply(last + 1)
            num_steps -= last + 1
        if num_steps:
            self._apply(num_steps)
        return True

    def _last_publication(self, num_steps: int) -> int | None:
        """The last of these steps at whose end the loop publishes its load."""
        last, published_at = None, self._loop.published_at
        if self._ends[num_steps - 1] - published_at < PUBLISH_S:
            return None
        for index, end in enumerate(self._ends[:num_steps]):
            if end - published_at >= PUBLISH_S:
                last, published_at = index, end
        return last

    def _apply(self, num_steps: int) -> None:
        ends, executor = self._ends, self._executor
        done = ends[:num_steps]
        self._steps.apply(num_steps, done[0])
        self._pass_time(done)
        executor.skip(num_steps, done[-1], ends[num_steps])
        self._done += done
        del ends[:num_steps]
        self._num_free -= num_steps
        self._last_step = executor.num_steps

    def _pass_time(self, ends: list[float]) -> None:
        """What a pass at each of these times does besides: it sees that no gateway is silent, and publishes its load."""
        for end in ends:
            if self._scheduler.liveness.check(end):
                raise InvariantError("a gateway was lost in a free step")
        self._loop.step_since = ends[-1]
        self._loop.publish(ends[-1])

    def halt(self) -> None:
        """Nothing happens here from now on: the step in flight ends unseen, and none follows it."""
        self._num_free = 0

    def collect(self) -> None:
        """Outputs of applied steps are to be sent. Comes before a pass that may change what runs."""
        if self._done:
            self._unsaid.add(self._steps.refs(), self._done)
            self._done = []

    def say(self, arriving_by: float = NEVER) -> None:
        """Send all tokens that reach their gateways by this time."""
        self.collect()
        self._unsaid.say(arriving_by)


class FreeSteps:
    """Of the step in flight and those after it: how many are free, and what they do to the scheduler's queues."""

    def __init__(self, queues: DecodeQueues, draw: Draw) -> None:
        self._queues = queues
        self._draw = draw
        self._left = 0  # free steps as far as the rows tell; pages, and all that is not a row, apart
        self._with_pages = 0  # steps, the one in flight included, for which every row has its pages

    def refs(self) -> Iterable[ChoiceRef]:
        """The choices with a row in the step in flight."""
        return [row.entry.choice.request.ref for step in self._queues.steps for row in step.rows]

    def read_rows(self) -> None:
        """A step was launched. What its rows tell stays right while they run, less the steps that are applied."""
        num_steps, with_pages = maxsize, maxsize
        self._left = self._with_pages = 0
        if len(self._queues.steps) != 1:
            return
        rows = self._queues.steps[0].rows
        for part in rows:
            entry = part.entry
            request, sequence = entry.choice.request, entry.choice.sequence
            if entry.has_left or request.num_top_logprobs is not None:
                return
            if not part.samples or part.num_new > 1 or part.drafts is not None:
                return
            until_end = request.stop.max_new_tokens - sequence.num_outputs
            until_commit = entry.commit_at - sequence.num_computed
            num_steps = min(num_steps, until_end - 1, until_commit - 1)
            with_pages = min(with_pages, len(entry.lease.pages) * self._queues.page_size - sequence.num_computed)
        for part in rows:
            if num_steps > 0 and part.entry.choice.request.stop.stop_token_ids:
                num_steps = self._before_stop(part.entry.choice, num_steps)
        self._left, self._with_pages = max(0, num_steps), with_pages

    def _before_stop(self, choice: Choice, num_steps: int) -> int:
        """Those of `num_steps` steps that come before the one which draws a stop id."""
        request, num_outputs = choice.request, choice.sequence.num_outputs
        if num_outputs < request.stop.min_new_tokens:
            return 0
        stops = np.isin(self._draw(request, num_outputs, num_steps), request.stop.stop_token_ids)
        return int(stops.argmax()) if stops.any() else num_steps

    def count(self) -> int:
        """How many steps are free, from the one in flight on, if nothing happens meanwhile that a pass would see."""
        return self._count_with_pages() if self._queues.is_quiet else 0

    def _count_with_pages(self) -> int:
        """The most of the free steps for which there are pages without a retraction."""
        num_steps, available = self._left, self._queues.cache.num_available()
        if len(self._queues.running) * (num_steps // self._queues.page_size + 1) <= available:
            return num_steps
        if self._pages_taken(num_steps) <= available:
            return num_steps
        low, high = 0, num_steps  # enough for low, not for high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._pages_taken(middle) <= available else (low, middle)
        return low

    def _pages_taken(self, num_steps: int) -> int:
        num_pages = 0
        for entry in self._queues.running.values():
            num_tokens = len(entry.choice.sequence) + num_steps
            num_pages += max(0, pages_for(num_tokens, self._queues.page_size) - len(entry.lease.pages))
        return num_pages

    def apply(self, num_steps: int, first_end: float) -> None:
        """Take the step in flight, which ends at `first_end`, and those after it: `num_steps` free ones in all."""
        queues = self._queues
        if num_steps >= self._with_pages:
            self._take_pages(num_steps)
        for entry in queues.running.values():
            choice, sequence = entry.choice, entry.choice.sequence
            sequence.extend(self._draw(choice.request, sequence.num_outputs, num_steps))
            sequence.num_computed += num_steps
            choice.metrics.timestamp("first_token", first_end)
        self._left -= num_steps
        self._with_pages -= num_steps
        queues.counters["steps"] += num_steps
        queues.counters["output_tokens"] += num_steps * len(queues.running)

    def _take_pages(self, num_steps: int) -> None:
        """For the steps up to the one after the next `num_steps`, in the order in which passes would."""
        queues, with_pages = self._queues, maxsize
        crossings: dict[int, list[Running]] = defaultdict(list)  # step -> entries that need a page for the one after it
        for entry in queues.running.values():
            first = len(entry.lease.pages) * queues.page_size - entry.choice.sequence.num_computed
            steps = range(first, num_steps + 1, queues.page_size)
            for step in steps:
                crossings[step].append(entry)
            with_pages = min(with_pages, first + len(steps) * queues.page_size)
        self._with_pages = with_pages
        for _, entries in sorted(crossings.items()):
            queues.cache.make_room(len(entries), [(entry.lease, 1) for entry in entries])
            for entry in entries:
                if not queues.cache.try_extend(entry.lease, 1):
                    raise InvariantError("a free step lacks a page")
