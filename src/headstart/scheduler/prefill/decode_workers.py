"""The decode workers that call a prefill worker, and which of them are connected.

unknown ──Hello──► connected ──transport lost──► disconnected ──Hello──► connected
                       └──────────┬─────────────────┘
                                  └──exit proved──► gone: its later messages are strays
"""

from dataclasses import dataclass

from headstart.core.identity import KVSpec, first_mismatch
from headstart.core.messages import Hello, Message, Refused, Welcome, WorkerRef
from headstart.scheduler.limits import PrefillLimits
from headstart.transfer.contract import TransferError, Transport


@dataclass(slots=True)
class DecodePeer:
    """A decode worker that sent Hello; `descriptor` is None while its transport is not connected."""

    worker: WorkerRef
    descriptor: bytes | None = None


class DecodeWorkers:
    def __init__(self, worker: WorkerRef, kv_spec: KVSpec, limits: PrefillLimits, transport: Transport) -> None:
        self._worker = worker
        self._kv_spec = kv_spec
        self._limits = limits
        self._transport = transport
        self._peers: dict[str, DecodePeer] = {}
        self._incarnations: dict[str, list[WorkerRef]] = {}  # of the peers, by worker name
        self._mismatches: dict[WorkerRef, str] = {}  # of those refused: what differs, latest incarnations only
        self._exited: dict[str, int] = {}  # worker name -> newest incarnation known to have exited

    def former_incarnations(self, worker: WorkerRef) -> list[WorkerRef]:
        """Peers whose end a Hello of `worker` proves: a launcher starts an incarnation only after the last exit."""
        peers = self._incarnations.get(worker.name, ())
        return [peer for peer in peers if peer.incarnation < worker.incarnation]

    def is_stale(self, worker: WorkerRef) -> bool:
        newest = max((peer.incarnation for peer in self._incarnations.get(worker.name, ())), default=0)
        return worker.incarnation < newest or worker.incarnation <= self._exited.get(worker.name, -1)

    def greet(self, hello: Hello) -> Message | None:
        """Connect a decode worker and answer it. The answer to a repeated Hello is the same. None if its pool cannot
        be reached now, as while writes of a lost connection have not ended: it will send Hello again, and a refusal would
        be final."""
        name = str(hello.worker)
        for former in [worker for worker in self._mismatches if worker.name == hello.worker.name]:
            del self._mismatches[former]
        if mismatch := first_mismatch(self._kv_spec, hello.kv_spec):
            text = f"{self._worker.name} (here) and {hello.worker.name} (there) exchange no KV: {mismatch}"
            self._mismatches[hello.worker] = text
            return Refused(self._worker, text)
        peer = self._peers.get(name)
        if peer is None:
            peer = self._peers[name] = DecodePeer(hello.worker)
            self._incarnations.setdefault(hello.worker.name, []).append(hello.worker)
        if peer.descriptor != hello.descriptor:
            try:
                self._transport.connect(name, hello.descriptor)
            except TransferError:
                return None
            peer.descriptor = hello.descriptor
        limits = self._limits
        return Welcome(self._worker, limits.capacity_tokens, limits.credit_tokens, self._transport.descriptor())

    def mismatches(self) -> tuple[str, ...]:
        """What each refused decode worker and this one disagree on."""
        return tuple(self._mismatches.values())

    def connected(self, name: str) -> WorkerRef | None:
        """The decode worker of that name, if its pool can be reached."""
        peer = self._peers.get(name)
        return peer.worker if peer is not None and peer.descriptor is not None else None

    def on_lost(self, name: str) -> None:
        """The transport to a peer is closed; the peer itself may live and send Hello again."""
        if (peer := self._peers.get(name)) is not None:
            peer.descriptor = None

    def forget(self, worker: WorkerRef) -> None:
        """The peer's process has ended."""
        name = str(worker)
        self._exited[worker.name] = max(worker.incarnation, self._exited.get(worker.name, -1))
        self._mismatches.pop(worker, None)
        if self._peers.pop(name, None) is not None:
            self._incarnations[worker.name].remove(worker)
            self._transport.disconnect(name)
