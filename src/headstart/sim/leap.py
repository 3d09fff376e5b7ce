"""The steps of a decode worker between two things that happen to it: taken all at once, when the next one does.

    (pass) ──look_ahead──► the ends of the steps to come are known, and how many of them are free
    anything at `now` ──catch_up──► the free ones that ended before are applied; the step in flight is where it would be
    what runs may change ──collect──► their tokens are what the worker has to say, each as of its own time

`catch_up` comes before whatever may see the worker: a pass, a heartbeat, a stall, its end. A step that ends at the very
time of a pass belongs to the pass, which takes messages first. `unsaid` says what becomes of tokens.
"""

from bisect import bisect_left
from itertools import islice

from headstart.scheduler.decode.gateway_liveness import OWN_STALL_S
from headstart.scheduler.decode.scheduler import DecodeScheduler
from headstart.sim.blank import BlankExecutor
from headstart.sim.clock import NEVER
from headstart.sim.unsaid import Unsaid
from headstart.worker.loop import PUBLISH_S, WorkerLoop


class Leaps:
    def __init__(self, scheduler: DecodeScheduler, executor: BlankExecutor, loop: WorkerLoop, unsaid: Unsaid) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._loop = loop
        self._unsaid = unsaid
        unsaid.read_from(scheduler.sequence)
        self._ends: list[float] = []  # of the step in flight and of those after it, as far as known
        self._row_steps = 0  # that are free as far as the rows tell
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
            self._row_steps = self._scheduler.num_row_steps(executor.tape.read)
        self._know_ends(self._scheduler.num_free_steps(self._row_steps))
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
        self._scheduler.leap(num_steps, executor.tape.read, done[0], done[-1])
        executor.skip(num_steps, done[-1], ends[num_steps])
        self._loop.skip_pass(done[-1])
        self._done += done
        del ends[:num_steps]
        self._num_free -= num_steps
        self._row_steps -= num_steps
        self._last_step = executor.num_steps

    def halt(self) -> None:
        """Nothing happens here from now on: the step in flight ends unseen, and none follows it."""
        self._num_free = 0

    def collect(self) -> None:
        """Outputs of applied steps are to be said. Comes before a pass that may change what runs."""
        if self._done:
            self._unsaid.add(self._scheduler.launched_refs(), self._done)
            self._done = []

    def say(self, arriving_by: float = NEVER) -> None:
        """Send all tokens that reach their gateways by this time."""
        self.collect()
        self._scheduler.settle()
        self._unsaid.say(arriving_by)
