"""Workers and launchers as their messages show them: who may send what, what is forwarded, which workers are lost.

Nothing here knows of requests. Every call returns the workers that were lost by it; the dispatcher moves their work.
"""

import logging
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from headstart.core.identity import PROTOCOL_VERSION
from headstart.core.messages import (
    Heartbeat,
    Join,
    KillRequest,
    LauncherHello,
    Leave,
    Membership,
    Message,
    Role,
    WorkerExited,
    WorkerRef,
    WorkerState,
)
from headstart.gateway.limits import DispatchLimits
from headstart.gateway.registry import Registry, WorkerRecord

log = logging.getLogger("headstart.gateway")

LAUNCHER = "launcher"

ClusterMessage = Join | Heartbeat | Leave | WorkerExited | LauncherHello | KillRequest


class Loss(NamedTuple):
    """Nothing more is expected of `worker`. `has_ended`: its process is known to have died; silence proves nothing."""

    worker: WorkerRef
    has_ended: bool


class Cluster:
    """`model_fingerprint` is that of the model whose tokenizer the gateway has. If it is empty, the first decode worker
    decides which model is served."""

    def __init__(
        self,
        send: Callable[[str, Message], None],
        limits: DispatchLimits,
        counters: Counter[str],
        model_fingerprint: str = "",
    ) -> None:
        self._send = send
        self._counters = counters
        self._model_fingerprint = model_fingerprint
        self._launchers: dict[str, tuple[str, ...]] = {}
        self._rejected_joins: set[WorkerRef] = set()
        self._membership: Membership | None = None
        self._notified: set[WorkerRef] = set()  # the decode workers that this one was sent to
        self.registry = Registry(limits)

    def handle(self, sender: str, message: ClusterMessage, now: float) -> list[Loss]:
        """A worker sends for itself alone, only launchers report exits, and only members request a peer's end; anything
        else is counted and ignored."""
        if not self._may_send(sender, message):
            self._counters["foreign_messages"] += 1
            return []
        match message:
            case Join():
                return self._on_join(message, now)
            case Heartbeat():
                self._counters["unknown_heartbeats"] += not self.registry.heartbeat(message, now)
            case Leave(worker):
                return self._end(Loss(worker, has_ended=False), "worker left: it has drained")
            case WorkerExited(worker):
                self._forward_exit(message)
                return self._end(Loss(worker, has_ended=True), f"worker ended with status {message.exit_status}")
            case LauncherHello(workers):
                self._launchers[sender] = workers
            case KillRequest():
                self._request_kill(message)
        return []

    def judge(self, now: float, *, repeats: bool) -> list[Loss]:
        """Find the workers that have been silent for too long, and send decode workers the membership: to those that have
        it already only if it `repeats`."""
        changed = self.registry.judge(now)
        for record in changed:
            log.info(_describe_state(record, now), extra={"worker": str(record.ref)})
        lost = [Loss(record.ref, has_ended=False) for record in changed if not record.may_return]
        membership = self.registry.membership()
        if membership is not self._membership:
            self._membership, self._notified = membership, set()
        for record in self.registry.of_role(Role.DECODE):
            if record.may_return and (repeats or record.ref not in self._notified):
                self._notified.add(record.ref)
                self._send(record.full_name, membership)
        return lost

    def _may_send(self, sender: str, message: ClusterMessage) -> bool:
        match message:
            case Join(worker) | Heartbeat(worker) | Leave(worker):
                name = str(worker)
                return sender in (name, f"hb:{name}")
            case WorkerExited():
                return sender == LAUNCHER or sender in self._launchers
            case KillRequest():
                return any(sender == record.full_name for record in self.registry.all())
        return True

    def _on_join(self, message: Join, now: float) -> list[Loss]:
        known = self.registry.get(message.worker)
        if known is not None and known.may_return and known.join.kv_spec == message.kv_spec:
            return []  # a repeat changes nothing
        if (theirs := message.kv_spec.protocol_version) != PROTOCOL_VERSION:
            reason = f"it speaks version {theirs} of the protocol, this gateway version {PROTOCOL_VERSION}; upgrade the older"
            return self._reject_join(message.worker, "protocol_mismatches", reason)
        if not self._serves_our_model(message):
            return self._reject_join(message.worker, "misfit_joins", "another model is served here")
        if self.registry.is_contested(message):
            reason = "its name is another process's, which may still run; give it another --name"
            return self._reject_join(message.worker, "contested_names", reason)
        replaced = self._accept_join(message, now)
        return [] if replaced is None else [Loss(replaced, has_ended=True)]

    def _accept_join(self, message: Join, now: float) -> WorkerRef | None:
        is_known = self.registry.get(message.worker) is not None
        replaced = self.registry.join(message, now)
        if not is_known and self.registry.get(message.worker) is not None:
            facts = {
                "worker": str(message.worker),
                "role": message.role,
                "peer_address": message.peer_address or "none",
            }
            log.info("worker joined", extra=facts if replaced is None else facts | {"replaces": str(replaced)})
        return replaced

    def _end(self, loss: Loss, event: str) -> list[Loss]:
        if not self.registry.end(loss.worker):
            return []
        log.info(event, extra={"worker": str(loss.worker)})
        return [loss]

    def _reject_join(self, worker: WorkerRef, counter: str, reason: str) -> list[Loss]:
        """It repeats its Join, and is taken in once the reason is gone."""
        self._counters[counter] += 1
        if worker not in self._rejected_joins:
            self._rejected_joins.add(worker)
            log.warning("worker not taken in", extra={"worker": str(worker), "reason": reason})
        return []

    def _serves_our_model(self, join: Join) -> bool:
        """Decode workers of a gateway serve its model: a choice may go to any of them, and go on at another. They
        compare the prefill workers' with their own."""
        if join.role != Role.DECODE:
            return True
        if self._model_fingerprint:
            return join.kv_spec.model_fingerprint == self._model_fingerprint
        others = (record for record in self.registry.of_role(Role.DECODE) if record.may_return)
        ours = {record.join.kv_spec.model_fingerprint for record in others if record.ref.name != join.worker.name}
        return not ours or join.kv_spec.model_fingerprint in ours

    def _forward_exit(self, message: WorkerExited) -> None:
        for record in self.registry.all():
            if record.ref != message.worker and record.state is not WorkerState.ENDED:
                self._send(record.full_name, message)

    def _request_kill(self, message: KillRequest) -> None:
        """Forward to the launcher that started the worker."""
        name = message.worker.name
        owner = next((launcher for launcher, names in self._launchers.items() if name in names), LAUNCHER)
        self._counters["kill_requests"] += 1
        self._send(owner, message)


def _describe_state(record: WorkerRecord, now: float) -> str:
    if record.state is WorkerState.ALIVE:
        return "worker is back: it takes new work"
    silence_s = now - record.last_seen_at
    stands_still = record.loop_age_s > silence_s
    why = f"its loop stands still for {record.loop_age_s:.1f} s" if stands_still else f"silent for {silence_s:.1f} s"
    fate = "its requests go elsewhere" if record.state is WorkerState.DEAD else "it gets no new work"
    return f"worker is {record.state.value}, {why}: {fate}"
