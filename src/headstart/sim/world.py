"""World: gateway policy, prefill and decode workers and a launcher in one process and in virtual time.

One step moves time to the next event, delivers what is due, and runs a pass of whoever has something to do. Every
message, write, device step, exit and restart is such an event, and every random choice comes from the seed.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Iterable
from functools import partial

from headstart.core.arrays import int32_array
from headstart.core.errors import InvariantError
from headstart.core.messages import Message, WorkerRef
from headstart.core.request import ChoiceRef, Request, SamplingParams, StopCriteria
from headstart.gateway.choice_record import Sink
from headstart.gateway.dispatch import Dispatcher, DispatcherApi
from headstart.kv.cache import PrefixCache
from headstart.sim.blank import Tape
from headstart.sim.build import MakeCache, OpenLog, Surroundings, build_worker
from headstart.sim.client import Handle
from headstart.sim.clock import NEVER, Agenda, VirtualClock
from headstart.sim.launcher import Processes, SimLauncher
from headstart.sim.network import ControlNetwork, MessageJudge
from headstart.sim.spec import WorldSpec
from headstart.sim.watermarks import ContextBook
from headstart.sim.worker import GATEWAY, SimWorker
from headstart.transfer.loopback import Judge, LoopbackNetwork
from headstart.worker.decision_log import DispatcherSpec
from headstart.worker.recorder import policy_name, record_dispatcher

GREEDY = SamplingParams(temperature=0.0)


class World:
    """Starts with every worker joined to be, at time 0. Not thread-safe."""

    def __init__(
        self,
        spec: WorldSpec | None = None,
        seed: int = 0,
        make_cache: MakeCache = PrefixCache,
        open_log: OpenLog | None = None,
    ) -> None:
        self.spec = spec or WorldSpec()
        self.clock = VirtualClock()
        self.handles: list[Handle] = []
        self.workers: dict[str, SimWorker] = {}  # alive ones, by name
        self._agenda = Agenda()
        self._called: dict[int, SimWorker] = {}  # by number: due now, whatever their wakes say
        self._wakes: list[tuple[float, int, SimWorker]] = []  # when to see whether a worker is due: its `looks`
        self._ids = itertools.count()
        self._numbers = itertools.count()
        self._incarnations: dict[str, int] = {}
        delay_s = self.spec.timing.control_delay_s
        self.control = ControlNetwork(random.Random(f"control {seed}"), self.clock, self._agenda, delay_s)
        self.links = self._make_links(random.Random(f"links {seed}"))
        outputs = Tape(self.spec.vocab_size)
        self._surroundings = Surroundings(
            self.spec, self.clock, self.links, self.control, ContextBook(), outputs, make_cache, open_log
        )
        self.gateway, self._entrance = self._make_gateway(f"gateway {seed}", open_log)
        self._gateway_wake = 0.0
        self._gateway_has_heard = False  # and has not looked at the time since
        self._launcher = SimLauncher(
            self.clock, self._agenda, self.control, self.spec.timing, Processes(self._end_process, self.restart)
        )
        self._boot()

    # ---- requests ----------------------------------------------------------------------------------------------------

    def request(
        self, prompt: Iterable[int], max_new_tokens: int = 4, *, deadline_s: float = 60.0, namespace: bytes = b""
    ) -> Request:
        """A greedy request under a fresh id; for others, replace its fields."""
        return Request(
            ref=ChoiceRef(f"r{next(self._ids)}"),
            prompt=int32_array(prompt),
            sampling=GREEDY,
            stop=StopCriteria(max_new_tokens),
            namespace=namespace,
            remaining_s=deadline_s,
        )

    def submit(self, request: Request, on_end: Callable[[], None] = lambda: None) -> Handle:
        """Hand a request to the gateway. `on_end` is called when it has ended, possibly before this returns."""
        handle = Handle(request, self.clock, self.clock.now(), on_end)
        self.submit_to(handle, handle)
        return handle

    def submit_to(self, handle: Handle, sink: Sink) -> None:
        """The same for a client of its own kind: `sink` receives the answer and has to pass it on to `handle`."""
        self.handles.append(handle)
        self._entrance.submit(handle.request, sink)
        self._advance_gateway()

    def stop(self, ref: ChoiceRef) -> None:
        """A choice's client has all that it wants of it."""
        self._entrance.stop(ref.request_id, ref.choice)

    def cancel(self, handle: Handle) -> None:
        """The client is gone."""
        self._listen()
        self._entrance.cancel(handle.request.ref.request_id)
        self._advance_gateway()

    # ---- time --------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Move to the next event and let everything due happen."""
        next_time = self._next_time()
        assert next_time < NEVER, "nothing will ever happen again"
        self._move_to(next_time)

    def run_for(self, duration_s: float) -> None:
        self.run_until_time(self.clock.now() + duration_s)

    def run_until_time(self, time_s: float) -> None:
        while (next_time := self._next_time()) <= time_s:
            self._move_to(next_time)
        self.clock.advance_to(time_s)

    def run_until(self, claim: Callable[[], bool], limit_s: float = 120.0) -> None:
        """Step until `claim` holds; AssertionError if it does not within `limit_s` of virtual time."""
        end = self.clock.now() + limit_s
        while not claim():
            assert self.clock.now() < end, f"not within {limit_s} s"
            self.step()

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Have something done at a time, before anything else of that time."""
        self._agenda.add(time_s, action)

    def finish(self, limit_s: float = 120.0) -> None:
        """Run until every request has ended."""
        self.run_until(lambda: all(handle.is_done for handle in self.handles), limit_s)

    # ---- faults ------------------------------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """End a worker's process now; the launcher reports it (and restarts it where the spec says so)."""
        self._launcher.kill(self.workers[name].ref)

    def restart(self, name: str) -> WorkerRef:
        """Start the next incarnation of a worker that has ended."""
        assert name not in self.workers, "a launcher starts an incarnation only after the last has ended"
        incarnation = self._incarnations[name] = self._incarnations.get(name, 0) + 1
        worker = build_worker(WorkerRef(name, incarnation), next(self._numbers), self._surroundings)
        self.workers[name] = worker
        self.control.attach(str(worker.ref), partial(self._deliver, worker))
        self._wake(worker)
        self._beat(worker)
        return worker.ref

    def stall(self, name: str) -> None:
        """Stop a process without ending it: no pass, no heartbeat, no progress of its transfers."""
        self.workers[name].stall()
        self.links.stall(str(self.workers[name].ref))

    def resume(self, name: str) -> None:
        worker = self.workers[name]
        worker.is_stalled = False
        self.links.resume(str(worker.ref))
        self._wake(worker)

    def judge_messages(self, judge: MessageJudge) -> None:
        self.control.judge = judge

    def judge_writes(self, judge: Judge) -> None:
        self.links.judge = judge

    # ---- what must hold ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Every page's owners are right on every worker, and no page a peer may write belongs to anyone else."""
        for worker in self.workers.values():
            worker.check(self.links.pages_under_write(str(worker.ref)))

    def is_quiet(self) -> bool:
        """Every request has ended and nothing is under way between workers."""
        return all(handle.is_done for handle in self.handles) and self.is_free()

    def is_free(self) -> bool:
        """No worker has anything unfinished, and no write is open."""
        loads = [worker.load() for worker in self.workers.values()]
        busy = any(load.num_running or load.num_waiting or load.inflight_pages for load in loads)
        return not busy and not self.links.num_open_writes()

    def check_idle(self) -> None:
        """Every request has its one end, and every worker holds nothing but its cache."""
        self.check()
        for worker in self.workers.values():
            counts = worker.organs.cache.counts()
            if counts.inflight or counts.private or counts.pinned:
                raise InvariantError(f"{worker.ref} is idle and holds {counts}")
        assert self.is_quiet(), "a request or a write is still open"

    def load(self, name: str) -> dict[str, float]:
        """A worker's counters."""
        return self.workers[name].load().counters

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _make_gateway(self, seed: str, open_log: OpenLog | None) -> tuple[Dispatcher, DispatcherApi]:
        """The gateway, and the way in to it."""
        spec, send = self.spec, partial(self.control.send, GATEWAY)
        if open_log is None:
            gateway = Dispatcher(self.clock, send, random.Random(seed), spec.dispatch, spec.make_policy)
            return gateway, gateway
        head = DispatcherSpec(spec.dispatch, policy_name(spec.make_policy), "", seed)
        return record_dispatcher(head, self.clock, send, open_log(GATEWAY, head))

    def _make_links(self, rng: random.Random) -> LoopbackNetwork:
        link = self.spec.timing.link
        if link is None:
            low, high = self.spec.timing.transfer_delay_s
            return LoopbackNetwork(rng, self.clock, lambda num_bytes: rng.uniform(low, high))
        page_bytes, mark_bytes = self.spec.page_bytes, self.spec.mark_bytes

        def busy_time(num_mark_bytes: int) -> float:
            """Of the modelled KV that a write of watermarks stands for."""
            return link.busy_time(num_mark_bytes * page_bytes // mark_bytes)

        return LoopbackNetwork(rng, self.clock, lambda num_bytes: link.latency_s, busy_time=busy_time)

    def _boot(self) -> None:
        names = [f"prefill-{i}" for i in range(self.spec.num_prefill)]
        names += [f"decode-{i}" for i in range(self.spec.num_decode)]
        self.control.attach(GATEWAY, self._to_gateway)
        self._launcher.hello(tuple(names))
        for name in names:
            self.restart(name)

    def _beat(self, worker: SimWorker) -> None:
        if self.workers.get(worker.ref.name) is worker:
            worker.beat()
            self._agenda.add(self.clock.now() + self.spec.timing.beat_s, partial(self._beat, worker))

    def _end_process(self, ref: WorkerRef) -> bool:
        worker = self.workers.get(ref.name)
        if worker is None or worker.ref != ref:
            return False
        worker.end()
        del self.workers[ref.name]
        self.control.detach(str(ref))
        self.links.kill(str(ref))
        return True

    def _to_gateway(self, sender: str, message: Message) -> None:
        self._entrance.handle(sender, message)
        self._gateway_has_heard = True

    def _listen(self) -> None:
        """Let the gateway hear what workers have told it by now and it was not bothered with."""
        now = self.clock.now()
        for worker in self.workers.values():
            worker.say(arriving_by=now)
        self.control.hand_out_arrived()

    def _advance_gateway(self) -> None:
        now = self.clock.now()
        if self._gateway_wake <= now:
            self._listen()
        wake = self._entrance.advance()
        self._gateway_has_heard = False
        self._gateway_wake = NEVER if wake is None else max(wake, now)

    def _deliver(self, worker: SimWorker, sender: str, message: Message) -> None:
        worker.mailbox.put(sender, message)
        self._call(worker, self.clock.now())

    def _call(self, worker: SimWorker, now: float) -> None:
        """Have a pass of it run now, in place of any other time."""
        worker.wake_at = now
        self._called[worker.number] = worker

    def _wake(self, worker: SimWorker) -> None:
        """Have a pass of it run at its `wake_at`. Where that is looked at before, it is put off then."""
        if worker.wake_at < (worker.looks[-1] if worker.looks else NEVER):
            worker.looks.append(worker.wake_at)
            heapq.heappush(self._wakes, (worker.wake_at, worker.number, worker))

    def _take_wake(self) -> SimWorker:
        _, _, worker = heapq.heappop(self._wakes)
        worker.looks.pop()
        return worker

    def _next_wake(self) -> float:
        """When the next worker is due that nobody calls. One that is stalled or has ended is not looked at again."""
        while self._wakes:
            time_s, _, worker = self._wakes[0]
            if worker.wake_at <= time_s and not worker.is_stalled:
                return time_s
            self._take_wake()
            if not worker.is_stalled:
                self._wake(worker)
        return NEVER

    def _next_time(self) -> float:
        arrives = self.links.next_event_time()
        next_time = min(self._agenda.next_time(), self._gateway_wake, self._next_wake())
        return next_time if arrives is None or next_time < arrives else arrives

    def _move_to(self, time_s: float) -> None:
        """Let everything happen that is due at the next event's time."""
        now = self.clock.advance_to(time_s)
        self._agenda.run_due(now)
        if self._gateway_has_heard or self._gateway_wake <= now:
            self._advance_gateway()
        arrives = self.links.next_event_time()
        if arrives is not None and arrives <= now:
            self._hand_out_transfers(now)
        for worker in self._due(now):
            worker.run_pass()
            self._wake(worker)

    def _hand_out_transfers(self, now: float) -> None:
        self.links.progress()
        for endpoint in self.links.ready():
            self._call(self.workers[endpoint.split("#")[0]], now)

    def _due(self, now: float) -> list[SimWorker]:
        """Workers with something to do, oldest first."""
        due, self._called = self._called, {}
        while self._next_wake() <= now:
            worker = self._take_wake()
            due[worker.number] = worker
        ordered = due.values() if len(due) < 2 else [due[number] for number in sorted(due)]
        return [worker for worker in ordered if worker.wake_at <= now and not worker.is_stalled]
