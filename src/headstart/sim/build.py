"""Composition root of a simulated worker."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from msgspec import structs

from headstart.core.clock import Clock
from headstart.core.layout import PoolRegion
from headstart.core.messages import Join, Message, Prefill, WorkerRef
from headstart.kv.cache import PrefixCache
from headstart.scheduler.decode import DecodePorts, DecodeScheduler
from headstart.scheduler.prefill import PrefillPorts, PrefillScheduler
from headstart.sim.executor import FakeExecutor, Model
from headstart.sim.network import ControlNetwork
from headstart.sim.spec import WorldSpec
from headstart.sim.watermarks import ContextBook
from headstart.sim.worker import Organs, SimWorker
from headstart.transfer.digest import HostDigests
from headstart.transfer.loopback import LoopbackNetwork

MakeCache = Callable[[int, int], PrefixCache]
"""(num_pages, page_size): a test may take something away from the real one."""
PREFILL, DECODE = "prefill", "decode"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the workers of a world share."""

    spec: WorldSpec
    clock: Clock
    links: LoopbackNetwork
    control: ControlNetwork
    book: ContextBook
    make_cache: MakeCache = PrefixCache


def build_worker(ref: WorkerRef, around: Surroundings) -> SimWorker:
    """A worker of the role its name begins with, with an empty pool."""
    spec = around.spec
    role = PREFILL if ref.name.startswith(PREFILL) else DECODE
    num_pages = spec.prefill_pages if role == PREFILL else spec.decode_pages
    pool = np.zeros((num_pages, spec.page_size), dtype=np.uint64)
    region = PoolRegion(0, num_pages, spec.mark_bytes)
    raw = pool.reshape(-1).view(np.uint8)
    transport = around.links.transport(str(ref), raw, region)
    digests = HostDigests(raw.reshape(num_pages, spec.mark_bytes))
    cache = around.make_cache(num_pages, spec.page_size)

    def send(recipient: str, message: Message) -> None:
        if spec.modelling.cacheable_calls and isinstance(message, Prefill):
            message = structs.replace(message, cacheable=True)
        around.control.send(str(ref), recipient, message)

    capacity = spec.prefill.capacity_tokens if role == PREFILL else spec.decode.context_len
    join = Join(ref, role, spec.kv_spec, f"sim://{ref}", capacity, lock_domain="sim")
    cost = spec.timing.prefill_cost if role == PREFILL else spec.timing.decode_cost
    executor = FakeExecutor(Model(around.book, spec.vocab_size, spec.page_size, cost), pool, around.clock)
    scheduler: PrefillScheduler | DecodeScheduler
    if role == PREFILL:
        ports = PrefillPorts(transport, digests, around.clock, send)
        scheduler = PrefillScheduler(ref, spec.kv_spec, spec.prefill, cache, ports)
    else:
        verified = digests if spec.verify_transfers else None
        decode_ports = DecodePorts(transport.descriptor(), spec.page_bytes, around.clock, send, verified)
        scheduler = DecodeScheduler(ref, spec.kv_spec, spec.decode, cache, decode_ports)
    return SimWorker(join, Organs(scheduler, cache, transport, executor), around.clock, send)
