"""Which workers there are and whether they may be given work.

    (join) ─► alive ◄─► suspect ─► dead ─► alive (a message came: it was only slow)
                │          │         │
                └──────────┴─────────┴─► ended (exit status, leave, or a later incarnation under the same lock)

alive    takes new work
suspect  silent for `suspect_after_s`, or its loop has not come round for that long: no new work
dead     silent for `dead_after_s`, or its loop wedged for `wedged_after_s`: its requests fail over
ended    its process is gone; nothing brings this incarnation back

Peers see dead and ended alike: whether pages may be reused is decided by WorkerExited, not here. One record a name.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from headstart.core.messages import Heartbeat, Join, Membership, PeerState, Role, WorkerLoad, WorkerRef, WorkerState
from headstart.gateway.limits import DispatchLimits


@dataclass(slots=True, eq=False)
class WorkerRecord:
    """One worker process as the gateway knows it."""

    join: Join
    last_seen_at: float
    loop_age_s: float = 0.0  # as of last_seen_at
    load: WorkerLoad = field(default_factory=WorkerLoad)
    state: WorkerState = WorkerState.ALIVE
    num_open: int = 0  # choices that this gateway has here
    num_choices: int = 0  # what it last said, or what we know to be there if that is more
    num_queued_tokens: int = 0  # what it last said, and the prompts ranked onto this prefill worker since
    ref: WorkerRef = field(init=False)
    full_name: str = field(init=False)  # who it is as a sender and a recipient

    def __post_init__(self) -> None:
        self.ref = self.join.worker
        self.full_name = str(self.ref)

    def accept_load(self, load: WorkerLoad) -> None:
        self.load = load
        self.num_queued_tokens = load.queued_tokens
        self.count_open(0)

    def count_open(self, change: int) -> None:
        """So many choices of this gateway more."""
        self.num_open += change
        num_reported = self.load.num_running + self.load.num_waiting
        self.num_choices = max(num_reported, self.num_open)

    @property
    def pool_tokens(self) -> int:
        """What its pool holds; 0 until its first heartbeat."""
        return self.load.pool_pages * self.join.kv_spec.page_size

    @property
    def is_alive(self) -> bool:
        return self.state is WorkerState.ALIVE

    @property
    def may_return(self) -> bool:
        return self.state is WorkerState.ALIVE or self.state is WorkerState.SUSPECT


class _Alive(NamedTuple):
    """Those of a role that take new work."""

    in_order: list[WorkerRecord]  # of their joining
    by_name: list[WorkerRecord]
    least_capacity: int  # tokens that each of them can hold


class Registry:
    """Records of workers by name. Judges silence against the time it is given."""

    def __init__(self, limits: DispatchLimits) -> None:
        self._limits = limits
        self._records: dict[str, WorkerRecord] = {}
        self._by_role: dict[Role, dict[str, WorkerRecord]] = {}
        self._alive: dict[Role, _Alive] = {}  # by role; forgotten whenever a record or a state changes
        self._ended: dict[str, int] = {}  # name -> latest incarnation known to have ended
        self._judged_at: float | None = None
        self._membership = Membership(())  # as last sent

    def is_contested(self, message: Join) -> bool:
        """Whether another incarnation of this name is not known to have ended: no lock sees both, and a silent one may
        be stopped or cut off and write again."""
        known = self._records.get(message.worker.name)
        if known is None or known.ref == message.worker or known.state is WorkerState.ENDED:
            return False
        return not message.lock_domain or message.lock_domain != known.join.lock_domain

    def join(self, message: Join, now: float) -> WorkerRef | None:
        """Take a worker in; returns the earlier incarnation it replaces, which has ended. Repeats change nothing."""
        ref = message.worker
        known = self._records.get(ref.name)
        if ref.incarnation <= self._ended.get(ref.name, -1):
            return None
        if known is not None and known.ref.incarnation >= ref.incarnation:
            return None
        self._records[ref.name] = record = WorkerRecord(message, last_seen_at=now)
        if known is not None and known.join.role != message.role:
            del self._by_role[known.join.role][ref.name]
        self._by_role.setdefault(message.role, {})[ref.name] = record
        self._alive.clear()
        if known is None:
            return None
        self._ended[ref.name] = known.ref.incarnation
        return known.ref

    def heartbeat(self, message: Heartbeat, now: float) -> bool:
        """Note a sign of life; False when this worker never joined or has ended."""
        record = self.get(message.worker)
        if record is None or record.state is WorkerState.ENDED:
            return False
        record.last_seen_at = now
        record.loop_age_s = message.loop_age_s
        record.accept_load(message.load)
        return True

    def end(self, ref: WorkerRef) -> bool:
        """This process is gone. True if the record changed."""
        self._ended[ref.name] = max(ref.incarnation, self._ended.get(ref.name, -1))
        record = self.get(ref)
        if record is None or record.state is WorkerState.ENDED:
            return False
        record.state = WorkerState.ENDED
        self._alive.clear()
        return True

    def judge(self, now: float) -> list[WorkerRecord]:
        """Recompute states; returns the records whose state changed.

        Time in which this process itself stood still is not held against the workers.
        """
        if self._judged_at is not None:
            stall = now - self._judged_at - self._limits.own_stall_s
            if stall > 0:
                for record in self._records.values():
                    record.last_seen_at = min(now, record.last_seen_at + stall)
        self._judged_at = now
        changed = []
        for record in self._records.values():
            state = self._state(record, now)
            if state is not record.state:
                record.state = state
                changed.append(record)
        if changed:
            self._alive.clear()
        return changed

    def get(self, ref: WorkerRef) -> WorkerRecord | None:
        record = self._records.get(ref.name)
        return record if record is not None and record.ref == ref else None

    def of_role(self, role: Role) -> Iterator[WorkerRecord]:
        return iter(self._by_role.get(role, {}).values())

    def alive(self, role: Role, num_tokens: int = 0) -> Sequence[WorkerRecord]:
        """Those that take new work and can hold `num_tokens`, in the order of their joining."""
        alive = self._look_alive(role)
        return alive.in_order if num_tokens <= alive.least_capacity else _able(alive.in_order, num_tokens)

    def alive_by_name(self, role: Role, num_tokens: int) -> Sequence[WorkerRecord]:
        """The same in the order of their names."""
        alive = self._look_alive(role)
        return alive.by_name if num_tokens <= alive.least_capacity else _able(alive.by_name, num_tokens)

    def capacity_tokens(self, role: Role) -> int | None:
        """What the largest of a role can hold, those included that are away for a while; None if none is known."""
        return max(
            [record.join.capacity_tokens for record in self.of_role(role) if self._is_known(record)], default=None
        )

    def may_return(self, role: Role) -> bool:
        """Whether any of a role is alive, or silent for a moment only."""
        return any(record.may_return for record in self.of_role(role))

    def _is_known(self, record: WorkerRecord) -> bool:
        """A worker that was killed or is restarting is expected back for some time."""
        if record.may_return or self._judged_at is None:
            return True
        return self._judged_at - record.last_seen_at <= self._limits.absent_after_s

    def pool_tokens(self, role: Role) -> int:
        """What the pools of a role hold together, as far as known."""
        return sum(record.pool_tokens for record in self.of_role(role) if record.may_return)

    def count_open(self, ref: WorkerRef | None, change: int) -> None:
        """This gateway has given a choice to a worker, or taken it away. One that was replaced is not counted."""
        if ref is not None and (record := self.get(ref)) is not None:
            record.count_open(change)

    def all(self) -> Iterator[WorkerRecord]:
        return iter(self._records.values())

    def membership(self) -> Membership:
        """The same object while nothing has changed."""
        peers = tuple(
            PeerState(record.ref, record.join.peer_address, _public_state(record.state), record.join.lock_domain)
            for record in self.of_role(Role.PREFILL)
        )
        if peers != self._membership.prefill:
            self._membership = Membership(peers)
        return self._membership

    def _look_alive(self, role: Role) -> _Alive:
        if (alive := self._alive.get(role)) is None:
            records = [record for record in self.of_role(role) if record.is_alive]
            least = min([record.join.capacity_tokens for record in records], default=0)
            alive = self._alive[role] = _Alive(records, sorted(records, key=lambda record: record.ref.name), least)
        return alive

    def _state(self, record: WorkerRecord, now: float) -> WorkerState:
        if record.state is WorkerState.ENDED:
            return WorkerState.ENDED
        silence = now - record.last_seen_at
        if silence > self._limits.dead_after_s or record.loop_age_s > self._limits.wedged_after_s:
            return WorkerState.DEAD
        if silence > self._limits.suspect_after_s or record.loop_age_s > self._limits.stale_loop_s:
            return WorkerState.SUSPECT
        return WorkerState.ALIVE


def _able(records: list[WorkerRecord], num_tokens: int) -> list[WorkerRecord]:
    return [record for record in records if record.join.capacity_tokens >= num_tokens]


def _public_state(state: WorkerState) -> WorkerState:
    return WorkerState.DEAD if state is WorkerState.ENDED else state
