"""What a worker's scheduler is made of apart from its ports: whoever has this and its inputs can repeat its decisions.

Never imports torch.
"""

from dataclasses import dataclass

from msgspec import Struct

from headstart.core.clock import Clock
from headstart.core.identity import KVSpec
from headstart.core.messages import Send, WorkerRef
from headstart.kv.cache import PrefixCache
from headstart.scheduler.decode.scheduler import DecodePorts, DecodeScheduler
from headstart.scheduler.limits import DecodeLimits, PrefillLimits
from headstart.scheduler.prefill.scheduler import PrefillPorts, PrefillScheduler
from headstart.scheduler.protocol import Drafter, Scheduler
from headstart.transfer.contract import PageDigests, Transport
from headstart.worker.no_cache import UncachedScheduler


class DecodeSpec(Struct, frozen=True, tag="decode"):
    worker: WorkerRef
    kv_spec: KVSpec
    limits: DecodeLimits
    num_pages: int
    descriptor: bytes  # of the worker's transport
    page_bytes: int
    owner_pages: int | None = None  # of its `PrefixCache`
    is_uncached: bool = False
    verifies: bool = False  # pages that it is sent


class PrefillSpec(Struct, frozen=True, tag="prefill"):
    worker: WorkerRef
    kv_spec: KVSpec
    limits: PrefillLimits
    num_pages: int
    descriptor: bytes  # of the worker's transport
    owner_pages: int | None = None  # of its `PrefixCache`


SchedulerSpec = DecodeSpec | PrefillSpec


@dataclass(frozen=True, slots=True)
class SchedulerPorts:
    """How a scheduler of either role reaches the world."""

    transport: Transport
    digests: PageDigests
    clock: Clock
    send: Send
    drafter: Drafter | None = None  # of a decode worker whose limits allow drafts; None: its rows have none


def make_scheduler(spec: SchedulerSpec, ports: SchedulerPorts) -> Scheduler:
    """A scheduler over an empty pool."""
    scheduler = scheduler_over(spec, ports, PrefixCache(spec.num_pages, spec.kv_spec.page_size, spec.owner_pages))
    return UncachedScheduler(scheduler) if isinstance(spec, DecodeSpec) and spec.is_uncached else scheduler


def scheduler_over(
    spec: SchedulerSpec, ports: SchedulerPorts, cache: PrefixCache
) -> PrefillScheduler | DecodeScheduler:
    """The scheduler itself, over a cache of its pool."""
    if isinstance(spec, PrefillSpec):
        prefill_ports = PrefillPorts(ports.transport, ports.digests, ports.clock, ports.send)
        return PrefillScheduler(spec.worker, spec.kv_spec, spec.limits, cache, prefill_ports)
    digests = ports.digests if spec.verifies else None
    decode_ports = DecodePorts(spec.descriptor, spec.page_bytes, ports.clock, ports.send, digests, ports.drafter)
    return DecodeScheduler(spec.worker, spec.kv_spec, spec.limits, cache, decode_ports)
