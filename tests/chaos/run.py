"""One seed of chaos: a plan carried out on a world, with everything that must hold checked after every step.

    stormy ──calm_at──► calm ──every request has ended──► settling ──nothing under way──► probed ──► judged

stormy    what the plan says befalls the world
calm      no fault any more; stalled workers go on
settling  what is still under way between workers ends
probed    fresh requests are served in full: whatever happened left nothing that stands in the way
"""

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from random import Random

from msgspec import structs

from chaos.plan import (
    CONTEXT_LEN,
    DRAWN,
    Burst,
    Conversation,
    Devices,
    Incident,
    Kill,
    Plan,
    Silence,
    Stall,
    Trap,
    Turn,
    draw_plan,
)
from chaos.text_client import Reader, read, submit_text
from chaos.timeline import Timeline
from headstart.core.errors import ErrorCode
from headstart.core.messages import Join, KillRequest, LauncherHello, Message, TicketRef, WorkerExited, WorkerRef
from headstart.core.request import ChoiceRef, Request, StopCriteria
from headstart.kv.cache import PrefixCache
from headstart.scheduler.decode.scheduler import DecodeScheduler
from headstart.scheduler.tickets import Phase
from headstart.sim.build import MakeCache, OpenLog
from headstart.sim.client import Handle
from headstart.sim.network import FINE, MessageFate
from headstart.sim.watermarks import Draw, oracle
from headstart.sim.worker import GATEWAY
from headstart.sim.world import GREEDY, World
from headstart.transfer.loopback import Fate, Posted

RELIABLE = (Join, WorkerExited, LauncherHello, KillRequest)
"""What the launcher and a process's start say is repeated until it arrives."""
EXCUSES = frozenset({ErrorCode.DEADLINE, ErrorCode.BUSY, ErrorCode.UNAVAILABLE, ErrorCode.WORKER_LOST})
"""How a request may fail that its client did not cancel."""
SLACK_S = 1e-6
LAST_S = 200.0
"""Virtual time within which every history ends."""
BACK_S = 2.0
"""A worker that was killed last is back by then."""
NUM_PROBES = 4
HARVESTED = (
    *("prefill_calls", "prefill_retries", "retractions", "lost_notices", "stray_notices", "digest_mismatches"),
    *("draft_tokens", "accepted_draft_tokens", "dropped_rows"),
)


@dataclass(slots=True)
class Tally:
    """What a history came to. `wrong` stays 0: the first wrong output ends a run."""

    seeds: int = 0
    requests: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    tokens: int = 0
    quarantined_pages: int = 0
    longest_stall_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Tally") -> None:
        self.seeds += other.seeds
        self.requests += other.requests
        self.ends += other.ends
        self.wrong += other.wrong
        self.tokens += other.tokens
        self.quarantined_pages += other.quarantined_pages
        self.longest_stall_s = max(self.longest_stall_s, other.longest_stall_s)
        self.counts += other.counts


class SeedFailed(Exception):
    """Something that must hold did not. Its text ends with the last events."""

    def __init__(self, seed: int, cause: BaseException, timeline: Timeline, last: int = 60) -> None:
        told = "\n".join(timeline.lines(last))
        super().__init__(f"seed {seed}: {type(cause).__name__}: {cause}\n{told}")
        self.seed = seed


def run_seed(
    seed: int,
    devices: Devices = DRAWN,
    *,
    with_states: bool = False,
    make_cache: MakeCache = PrefixCache,
    open_log: OpenLog | None = None,
) -> tuple[Tally, Timeline]:
    """Carry out a seed's plan. Raises SeedFailed. `with_states` also follows where every request stands."""
    run = ChaosRun(draw_plan(seed, devices), seed, with_states, make_cache, open_log)
    try:
        return run.run(), run.timeline
    except Exception as error:
        raise SeedFailed(seed, error, run.timeline) from error


@dataclass(slots=True)
class _Asked:
    """A choice whose end is awaited."""

    reader: Reader
    stops: tuple[str, ...]
    deadline: float
    cancelled: bool = False
    heard_at: float = 0.0
    num_heard: int = 0

    @property
    def handle(self) -> Handle:
        return self.reader.handle


class ChaosRun:
    def __init__(
        self,
        plan: Plan,
        seed: int,
        with_states: bool = False,
        make_cache: MakeCache = PrefixCache,
        open_log: OpenLog | None = None,
    ) -> None:
        self.world = World(plan.spec, seed, make_cache, open_log)
        self.timeline = Timeline(self.world.clock)
        self.tally = Tally(seeds=1)
        self._plan = plan
        self._rng = Random(f"weather {seed}")
        self._with_states = with_states
        self._asked: list[_Asked] = []
        self._traps = {trap: trap.countdown for trap in plan.traps}
        self._silent_until: dict[str, float] = {}
        self._loose: set[tuple[WorkerRef, TicketRef]] = set()
        self._next_turns: dict[str, tuple[Conversation, int, list[int]]] = {}
        self._num_due = 0

    def run(self) -> Tally:
        world, plan = self.world, self._plan
        world.judge_messages(self._judge_message)
        world.judge_writes(self._judge_write)
        for conversation in plan.conversations:
            self._later(conversation.turns[0].think_s + 0.05, partial(self._ask, conversation, 0, []))
        for incident in plan.incidents:
            self._later(incident.at, partial(self._befall, incident))
        self._step_until(plan.calm_at)
        self._calm()
        while self._asked or self._num_due:
            self._step()
        self._step_until(world.clock.now() + BACK_S)
        while not (world.is_quiet() and world.gateway.is_ready):
            self._step()
        self._probe()
        self._harvest(list(world.workers))
        world.check_idle()
        self.tally.counts += Counter(resubmitted=world.gateway.counters["resubmitted"])
        self.tally.counts["steps"] += sum(worker.organs.executor.num_steps for worker in world.workers.values())
        return self.tally

    # ---- time --------------------------------------------------------------------------------------------------------

    def _later(self, time_s: float, action: "partial[None]") -> None:
        self._num_due += 1
        self.world.at(time_s, partial(self._due, action))

    def _due(self, action: "partial[None]") -> None:
        self._num_due -= 1
        action()

    def _step_until(self, time_s: float) -> None:
        while self.world.clock.now() < time_s:
            self._step()

    def _step(self) -> None:
        self.world.step()
        assert self.world.clock.now() < LAST_S, "a request or a write never ends"
        self.world.check()
        self._note_quarantine()
        if self._with_states:
            self.timeline.stand(self._states())
        for asked in tuple(self._asked):
            self._look_at(asked)

    def _calm(self) -> None:
        self.timeline.did("calm: no fault from here on")
        self.world.judge_messages(self._watch_message)
        self.world.judge_writes(self._watch_write)
        self._silent_until.clear()
        self._traps.clear()
        for name in sorted(self.world.workers):
            self._resume(self.world.workers[name].ref)

    # ---- requests ----------------------------------------------------------------------------------------------------

    def _ask(self, conversation: Conversation, index: int, before: list[int]) -> None:
        """Every choice of one turn; the first one's answer is what the next turn goes on from."""
        turn = conversation.turns[index]
        room = CONTEXT_LEN - turn.stop.max_new_tokens
        prompt = [*before, *turn.said][:room]
        base = self.world.request(prompt, deadline_s=turn.deadline_s, namespace=conversation.namespace)
        base = structs.replace(base, stop=turn.stop, sampling=turn.sampling)
        request_id = base.ref.request_id
        if index + 1 < len(conversation.turns):
            self._next_turns[request_id] = (conversation, index + 1, prompt)
        self.timeline.did(f"asked: {request_id}, prompt {len(prompt)}, {turn.num_choices} choices, {turn.deadline_s} s")
        for choice in range(turn.num_choices):
            self._submit_choice(structs.replace(base, ref=ChoiceRef(request_id, choice)), turn.stops)
        if turn.cancel_after_s is not None:
            self._later(self.world.clock.now() + turn.cancel_after_s, partial(self._cancel, request_id))

    def _submit_choice(self, request: Request, stops: tuple[str, ...]) -> None:
        self.tally.requests += 1
        self._asked.append(self._submit(request, stops))

    def _submit(self, request: Request, stops: tuple[str, ...] = ()) -> _Asked:
        now = self.world.clock.now()
        return _Asked(submit_text(self.world, request, stops), stops, now + request.remaining_s, heard_at=now)

    def _cancel(self, request_id: str) -> None:
        open_now = [asked for asked in self._asked if asked.handle.request.ref.request_id == request_id]
        if open_now:
            self.timeline.did(f"{request_id}: its client leaves")
            for asked in open_now:
                asked.cancelled = True
            self.world.cancel(open_now[0].handle)

    def _look_at(self, asked: _Asked) -> None:
        """Judge what has come of a choice since the last step."""
        handle, now = asked.handle, self.world.clock.now()
        if len(handle.tokens) > asked.num_heard or handle.is_done:
            self.tally.longest_stall_s = max(self.tally.longest_stall_s, now - asked.heard_at)
            asked.num_heard, asked.heard_at = len(handle.tokens), now
        assert now <= asked.deadline + SLACK_S or handle.is_done, f"{handle.request.ref} is past its deadline"
        if handle.is_done:
            self._asked.remove(asked)
            self._judge_end(asked)

    def _judge_end(self, asked: _Asked) -> None:
        handle, request, answer = asked.handle, asked.handle.request, asked.reader.answer
        ended_at = handle.ended_at or 0.0
        assert ended_at <= asked.deadline + SLACK_S, f"{request.ref} ended {ended_at - asked.deadline:.3f} s late"
        draw = Draw(request.sampling, request.ref.choice, request.stop.stop_token_ids, request.stop.min_new_tokens)
        unstopped = oracle(request.prompt, request.stop.max_new_tokens, 97, request.namespace, draw)
        text, num_read = read(unstopped, asked.stops, request.stop.stop_token_ids)
        expected = unstopped[:num_read]
        assert handle.tokens == unstopped[: len(handle.tokens)], f"{request.ref}: {handle.tokens}, not {unstopped}"
        num_late = len(handle.tokens) - len(expected)  # came in one message with those that complete a stop string
        assert num_late <= self._plan.spec.decode.num_draft_tokens, f"{request.ref}: {num_late} tokens after its end"
        self.tally.tokens += len(answer.token_ids)
        if handle.finished is not None:
            assert num_late >= 0, f"{request.ref} finished with {handle.tokens}, not {expected}"
            assert handle.finished.num_tokens == len(handle.tokens)
            assert answer.end is not None
            assert (asked.reader.text, answer.token_ids, answer.end.num_tokens) == (text, expected, len(expected))
            self.tally.counts["ended by stop strings"] += num_read < len(unstopped)
            self.tally.counts["with penalties"] += request.sampling.frequency_penalty != 0.0
            self.tally.ends["finished"] += 1
        else:
            error = handle.error
            assert error in EXCUSES or (asked.cancelled and error is ErrorCode.CANCELLED), handle.failed
            self.tally.ends[f"failed: {error}"] += 1
        self._go_on(asked)

    def _go_on(self, asked: _Asked) -> None:
        """The conversation's next turn, whatever became of this one."""
        ref = asked.handle.request.ref
        if ref.choice == 0 and (following := self._next_turns.pop(ref.request_id, None)) is not None:
            conversation, index, prompt = following
            at = self.world.clock.now() + conversation.turns[index].think_s
            self._later(at, partial(self._ask, conversation, index, [*prompt, *asked.reader.answer.token_ids]))

    def _probe(self) -> None:
        for index in range(NUM_PROBES):
            asked = self._submit(self.world.request([index, *range(CONTEXT_LEN // 2)], 4))
            handle = asked.handle
            self.tally.requests += 1
            while not handle.is_done:
                self._step()
            assert handle.finished is not None, f"a request after all faults: {handle.failed}"
            self._judge_end(asked)
        while not self.world.is_quiet():
            self._step()

    # ---- what befalls the world --------------------------------------------------------------------------------------

    def _befall(self, incident: Incident) -> None:
        match incident:
            case Kill():
                self._kill(self._ref(incident.name))
            case Stall():
                self._stall(self._ref(incident.name), incident.for_s)
            case Silence():
                self.timeline.did(f"silence between the gateway and {incident.name} for {incident.for_s} s")
                self._silent_until[incident.name] = self.world.clock.now() + incident.for_s
                self.tally.counts["silences"] += 1
            case Burst():
                self._burst(incident.count)

    def _burst(self, count: int) -> None:
        self.timeline.did(f"a burst of {count} long requests")
        for _ in range(count):
            said = tuple(self._rng.randrange(97) for _ in range(CONTEXT_LEN - 20))
            turn = Turn(said, StopCriteria(16), GREEDY, (), 1, 30.0, 0.0, None)
            self._ask(Conversation(b"", (turn,)), 0, [])

    def _ref(self, name: str) -> WorkerRef | None:
        worker = self.world.workers.get(name)
        return worker.ref if worker is not None else None

    def _is_alive(self, ref: WorkerRef | None) -> bool:
        return ref is not None and self._ref(ref.name) == ref

    def _kill(self, ref: WorkerRef | None) -> None:
        if ref is None or not self._is_alive(ref):
            return
        self.timeline.did(f"kill {ref}")
        self.tally.counts[f"kills of {ref.name.split('-')[0]} workers"] += 1
        self._harvest([ref.name])
        self.world.kill(ref.name)

    def _stall(self, ref: WorkerRef | None, for_s: float) -> None:
        if ref is None or not self._is_alive(ref) or self.world.workers[ref.name].is_stalled:
            return
        self.timeline.did(f"stall {ref} for {for_s} s")
        self.tally.counts["stalls"] += 1
        self.world.stall(ref.name)
        self._later(self.world.clock.now() + for_s, partial(self._resume, ref))

    def _resume(self, ref: WorkerRef) -> None:
        if self._is_alive(ref) and self.world.workers[ref.name].is_stalled:
            self.timeline.did(f"{ref} goes on")
            self.world.resume(ref.name)

    def _spring(self, step: str, sender: str, recipient: str) -> bool:
        """Let traps that wait for this step strike. True if one swallows it."""
        swallowed = False
        for trap in [trap for trap in self._traps if trap.step == step]:
            self._traps[trap] -= 1
            if self._traps[trap] > 0:
                continue
            victim = self._named(sender if trap.strikes_sender else recipient)
            if victim is None:
                self._traps[trap] = 1  # the gateway: wait for a worker
                continue
            del self._traps[trap]
            swallowed |= trap.swallows
            self._later(self.world.clock.now() + trap.after_s, partial(self._strike, trap, victim))
        return swallowed

    def _strike(self, trap: Trap, victim: WorkerRef) -> None:
        self.timeline.did(f"a trap at {trap.step} strikes {victim}")
        if trap.stall_s is None:
            self._kill(victim)
        else:
            self._stall(victim, trap.stall_s)

    def _named(self, name: str) -> WorkerRef | None:
        worker = self.world.workers.get(name.split("#")[0])
        return worker.ref if worker is not None and str(worker.ref) == name else None

    # ---- judges ------------------------------------------------------------------------------------------------------

    def _judge_message(self, sender: str, recipient: str, message: Message) -> MessageFate:
        fate = self._message_fate(sender, recipient, message)
        self.timeline.said(sender, recipient, message, fate)
        return fate

    def _message_fate(self, sender: str, recipient: str, message: Message) -> MessageFate:
        now = self.world.clock.now()
        swallowed = self._spring(type(message).__name__, sender, recipient)
        silent_s = self._silence_left(sender, recipient) - now
        if isinstance(message, RELIABLE):
            return MessageFate(1, silent_s) if silent_s > 0 else FINE
        if swallowed or silent_s > 0:
            return MessageFate(0)
        fate = self._plan.weather.message_fate(self._rng, FINE)
        self.tally.counts["messages harmed"] += fate is not FINE
        return fate

    def _silence_left(self, sender: str, recipient: str) -> float:
        if GATEWAY not in (sender, recipient):
            return 0.0
        other = sender if recipient == GATEWAY else recipient
        return self._silent_until.get(other.split("#")[0], 0.0)

    def _judge_write(self, posted: Posted) -> Fate:
        refused = self._spring("write", posted.source, posted.peer)
        fate = Fate(refused=True) if refused else self._plan.weather.write_fate(self._rng)
        self.tally.counts["writes harmed"] += fate != Fate()
        self.timeline.posted(posted, fate)
        return fate

    def _watch_message(self, sender: str, recipient: str, message: Message) -> MessageFate:
        self.timeline.said(sender, recipient, message, FINE)
        return FINE

    def _watch_write(self, posted: Posted) -> Fate:
        self.timeline.posted(posted, Fate())
        return Fate()

    # ---- what is noted -----------------------------------------------------------------------------------------------

    def _decode_schedulers(self) -> list[tuple[WorkerRef, DecodeScheduler]]:
        found = [(worker.ref, worker.organs.scheduler) for worker in self.world.workers.values()]
        return [(ref, scheduler) for ref, scheduler in found if isinstance(scheduler, DecodeScheduler)]

    def _note_quarantine(self) -> None:
        """Pages that a request gave up while a peer might still write them."""
        for ref, scheduler in self._decode_schedulers():
            for call in scheduler.open_tickets():
                if call.phase is Phase.CANCELLING and (ref, call.ref) not in self._loose:
                    self._loose.add((ref, call.ref))
                    self.tally.quarantined_pages += int(call.missing.sum())

    def _states(self) -> dict[tuple[str, ChoiceRef], str]:
        return {
            (str(worker), ref): state
            for worker, scheduler in self._decode_schedulers()
            for ref, state in scheduler.states()
        }

    def _harvest(self, names: list[str]) -> None:
        """A worker's counters go with it."""
        for name in names:
            counters = self.world.load(name)
            for counter in HARVESTED:
                self.tally.counts[counter] += int(counters.get(counter, 0))
