"""Random lives of choices, tickets and prefill workers, and a naive model of what must come out.

The prefill workers are adversaries: they answer in any order, partly, late, twice or never, write into every page they
were given until they have had their last word, die and come back.
"""

from dataclasses import dataclass, field
from random import Random

from headstart.core.arrays import int32_array
from headstart.core.errors import ErrorCode
from headstart.core.messages import (
    Accepted,
    CancelTicket,
    Failed,
    Finished,
    Hello,
    Prefill,
    PrefillDone,
    PrefillFailed,
    Rejected,
    TicketClosed,
    TicketRef,
    Welcome,
    WorkerExited,
    WorkerRef,
)
from headstart.core.request import ChoiceRef
from tests.support.decode_rig import P0, P1, CountingDrafter, Rig

LAST_WORDS = [ErrorCode.BUSY, ErrorCode.UNAVAILABLE, ErrorCode.INTERNAL, ErrorCode.INVALID]
MAY_FAIL_WITH = {
    ErrorCode.CANCELLED,
    ErrorCode.DEADLINE,
    ErrorCode.INVALID,
    ErrorCode.WORKER_LOST,
}


@dataclass
class Writer:
    """One call as the prefill worker sees it, until its last word."""

    call: Prefill
    worker: WorkerRef
    missing: set[int] = field(default_factory=set)


class Walk:
    """`max_steps` of the decode worker in flight, with up to `num_drafts` guesses in a row."""

    def __init__(self, seed: int, max_steps: int = 1, num_drafts: int = 0) -> None:
        self.rng = rng = Random(seed)
        self.rig = Rig(
            num_pages=rng.randint(6, 24),
            local_prefill_tokens=rng.choice([0, 3, 8]),
            num_reserved_decode_tokens=rng.choice([0, 5]),
            max_running_requests=rng.randint(1, 5),
            chunked_prefill_size=7,
            max_steps=max_steps,
            drafter=CountingDrafter(1 + seed % 3, seed % 8),
            num_draft_tokens=num_drafts,
        )
        self.credit = rng.choice([10, 40, 1000])
        self.writers: list[Writer] = []
        self.unanswered: list[tuple[WorkerRef, CancelTicket]] = []
        self.workers: dict[str, WorkerRef] = {"prefill-0": P0, "prefill-1": P1}
        self.alive = {P0, P1}
        self.submitted: dict[ChoiceRef, tuple[list[int], int]] = {}
        self.moves = [
            *[self.submit] * 5, *[self.step] * 8, *[self.notice] * 5, *[self.complete] * 2,
            self.cancel, self.advance, self.launch, self.last_word, self.answer_cancel, self.scribble, self.fate,
        ]  # fmt: skip
        self._num_read = 0
        self._called_before: set[tuple[WorkerRef, TicketRef]] = set()
        self._members()

    def take(self, num_moves: int) -> None:
        for _ in range(num_moves):
            self.rng.choice(self.moves)()
            self._read()

    # ---- the gateway -------------------------------------------------------------------------------------------------

    def submit(self) -> None:
        """Prompts of three families that share prefixes, and tails of four kinds."""
        rng, number = self.rng, len(self.submitted)
        family, shared = rng.randrange(3), rng.randint(0, 14)
        tail = [500 + (number % 4) * 20 + k for k in range(rng.randint(1, 12))]
        prompt = [100 * family + k for k in range(shared)] + tail
        max_new = rng.randint(1, 12)
        known = min(rng.choice([0, 0, 0, 2]), max_new)
        ref = self.rig.submit(
            f"r{number}",
            prompt,
            max_new,
            cacheable=rng.random() < 0.8,
            remaining_s=rng.choice([5.0, 500.0, 500.0]),
            output_ids=int32_array(self._outputs(prompt, known)),
        )
        self.submitted[ref] = prompt, max_new

    def cancel(self) -> None:
        if self.submitted:
            self.rig.cancel(self.rng.choice(list(self.submitted)))

    @staticmethod
    def _outputs(prompt: list[int], count: int) -> list[int]:
        return [(prompt[-1] + 1 + k) % 1000 for k in range(count)]

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        self.rig.advance(self.rng.choice([0.0, 0.01, 0.3, 2.0]))

    def launch(self) -> None:
        if len(self.rig.in_flight) < self.rig.max_steps:
            self.rig.launch()

    def land(self) -> None:
        if self.rig.in_flight:
            self.rig.land()

    def step(self) -> None:
        self.land()
        self.rig.step()

    # ---- prefill workers ---------------------------------------------------------------------------------------------

    def notice(self) -> None:
        open_writers = [writer for writer in self.writers if writer.missing]
        if not open_writers:
            return
        writer = self.rng.choice(open_writers)
        first = self.rng.choice(sorted(writer.missing))
        count = 1
        while first + count in writer.missing and self.rng.random() < 0.5:
            count += 1
        writer.missing -= set(range(first, first + count))
        self.rig.notice(writer.call, first, count, writer.worker)
        if self.rng.random() < 0.1:
            self.rig.notice(writer.call, first, count, writer.worker, rewrite=False)

    def complete(self) -> None:
        if self.writers:
            self._complete(self.rng.choice(self.writers))

    def _complete(self, writer: Writer) -> None:
        for page in sorted(writer.missing, key=lambda _: self.rng.random()):
            self.rig.notice(writer.call, page, 1, writer.worker)
        self.writers.remove(writer)
        self.rig.done(writer.call, worker=writer.worker)

    def last_word(self) -> None:
        """Done without the notices, or Failed."""
        if not self.writers:
            return
        writer = self.rng.choice(self.writers)
        self.writers.remove(writer)
        code = self.rng.choice(LAST_WORDS)
        done, failed = PrefillDone(writer.call.ref, 0, 1), PrefillFailed(writer.call.ref, code, "scripted")
        self.rig.tell(self.rng.choice([done, failed]), str(writer.worker))

    def answer_cancel(self) -> None:
        if self.unanswered:
            self._answer(*self.rng.choice(self.unanswered))

    def _answer(self, worker: WorkerRef, cancel: CancelTicket) -> None:
        self.unanswered = [(w, c) for w, c in self.unanswered if (w, c.ref) != (worker, cancel.ref)]
        self.writers = [w for w in self.writers if (w.worker, w.call.ref) != (worker, cancel.ref)]
        self.rig.tell(TicketClosed(cancel.ref), str(worker))

    def scribble(self) -> None:
        for writer in self.writers:
            for page in writer.missing:
                self.rig.scribble(writer.call, page)

    def fate(self) -> None:
        name = self.rng.choice(list(self.workers))
        ref, what = self.workers[name], self.rng.choice(["suspect", "silent", "exit", "back", "back"])
        if what == "suspect":
            self.rig.members(*(self.alive - {ref}), suspect=(ref,))
        elif what == "silent":
            self.alive.discard(ref)
            self.rig.members(*self.alive, dead=(ref,))
        elif what == "exit":
            self.alive.discard(ref)
            self._forget(ref)
            self.rig.tell(WorkerExited(ref, 9))
        elif ref not in self.alive:
            self._forget(ref)
            self.workers[name] = WorkerRef(name, ref.incarnation + 1)
            self.alive.add(self.workers[name])
            self._members()

    def _forget(self, ref: WorkerRef) -> None:
        self.writers = [writer for writer in self.writers if writer.worker != ref]
        self.unanswered = [(worker, cancel) for worker, cancel in self.unanswered if worker != ref]

    def _members(self) -> None:
        self.rig.members(*self.alive)
        self.rig.advance()
        for ref in self.alive:
            self.rig.tell(Welcome(ref, 10_000, self.credit, b""), str(ref))

    def _read(self) -> None:
        workers = {str(ref): ref for ref in self.workers.values()}
        mail = self.rig.mail[self._num_read :]
        self._num_read = len(self.rig.mail)
        for to, message in mail:
            if to in workers and isinstance(message, Prefill):
                self._called(workers[to], message)
            elif to in workers and isinstance(message, CancelTicket):
                self.unanswered.append((workers[to], message))
            elif to in workers and isinstance(message, Hello) and workers[to] in self.alive:
                self.rig.tell(Welcome(workers[to], 10_000, self.credit, b""), to)

    def _called(self, worker: WorkerRef, call: Prefill) -> None:
        """A repeated call is nothing new while it is open, and refused once it has ended."""
        if (worker, call.ref) not in self._called_before:
            self._called_before.add((worker, call.ref))
            self.writers.append(Writer(call, worker, set(range(len(call.dst_pages)))))
        elif all((writer.worker, writer.call.ref) != (worker, call.ref) for writer in self.writers):
            self.rig.tell(PrefillFailed(call.ref, ErrorCode.UNAVAILABLE, "it has ended"), str(worker))

    # ---- the end -----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Everybody behaves from now on, until nothing is open."""
        self.land()
        for _ in range(3000):
            if all(self.rig.terminal(ref) for ref in self.submitted) and self.rig.is_clean():
                return
            self._read()
            for worker, cancel in list(self.unanswered):
                self._answer(worker, cancel)
            for writer in list(self.writers):
                self._complete(writer)
            if self.rig.step() is None:
                self.rig.advance(0.05)
        left = [ref for ref in self.submitted if not self.rig.terminal(ref)]
        raise AssertionError(f"not settled: {left}, {self.rig.cache.counts()}")

    def judge(self) -> None:
        """Each choice ended once, and said what the model says."""
        accepted = {message.ref for message in self.rig.said(Accepted)}
        for ref, (prompt, max_new) in self.submitted.items():
            terminal = self.rig.terminal(ref)
            assert terminal is not None
            assert isinstance(terminal, Rejected) != (ref in accepted)
            expected = self._outputs(prompt, max_new)
            told = self.rig.answer(ref)
            if isinstance(terminal, Finished):
                assert terminal.num_tokens == max_new
                assert told == expected[max_new - len(told) :]
                assert 0 <= terminal.stats.cached_tokens < len(prompt)
            elif isinstance(terminal, Failed):
                assert terminal.code in MAY_FAIL_WITH, terminal
        counts = self.rig.cache.counts()
        assert counts.cached + counts.free == self.rig.cache.num_pages
