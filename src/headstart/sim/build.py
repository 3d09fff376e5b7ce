"""Composition root of a simulated worker."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from headstart.core.layout import PoolRegion
from headstart.core.messages import Join, Message, Prefill, WorkerRef
from headstart.kv.cache import PrefixCache
from headstart.scheduler.decode import DecodePorts, DecodeScheduler
from headstart.scheduler.prefill import PrefillPorts, PrefillScheduler
from headstart.sim.blank import BlankExecutor, Tape
from headstart.sim.clock import VirtualClock
from headstart.sim.executor import FakeExecutor, Model
from headstart.sim.leap import Way
from headstart.sim.network import ControlNetwork
from headstart.sim.spec import WorldSpec
from headstart.sim.watermarks import ContextBook
from headstart.sim.worker import Organs, SimWorker
from headstart.transfer.contract import PageDigests
from headstart.transfer.digest import HostDigests
from headstart.transfer.loopback import LoopbackNetwork

MakeCache = Callable[[int, int], PrefixCache]
"""(num_pages, page_size): a test may take something away from the real one."""
PREFILL, DECODE = "prefill", "decode"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the workers of a world share."""

    spec: WorldSpec
    clock: VirtualClock
    links: LoopbackNetwork
    control: ControlNetwork
    book: ContextBook
    tape: Tape
    make_cache: MakeCache = PrefixCache


def build_worker(ref: WorkerRef, number: int, around: Surroundings) -> SimWorker:
    """A worker of the role its name begins with, with an empty pool; the `number`-th that its world starts."""
    spec = around.spec
    is_prefill = ref.name.startswith(PREFILL)
    num_pages = spec.prefill_pages if is_prefill else spec.decode_pages
    device = _device(is_prefill, num_pages, around)
    transport = around.links.transport(str(ref), device.memory, device.region)
    cache = around.make_cache(num_pages, spec.page_size)

    def send(recipient: str, message: Message) -> None:
        if spec.modelling.cacheable_calls and isinstance(message, Prefill):
            message = structs.replace(message, cacheable=True)
        around.control.send(str(ref), recipient, message)

    scheduler: PrefillScheduler | DecodeScheduler
    if is_prefill:
        ports = PrefillPorts(transport, device.digests, around.clock, send)
        scheduler = PrefillScheduler(ref, spec.kv_spec, spec.prefill, cache, ports)
    else:
        verified = device.digests if spec.verify_transfers and device.memory is not None else None
        decode_ports = DecodePorts(transport.descriptor(), spec.page_bytes, around.clock, send, verified)
        scheduler = DecodeScheduler(ref, spec.kv_spec, spec.decode, cache, decode_ports)
    capacity = spec.prefill.capacity_tokens if is_prefill else spec.decode.context_len
    join = Join(ref, PREFILL if is_prefill else DECODE, spec.kv_spec, f"sim://{ref}", capacity, lock_domain="sim")
    worker = SimWorker(join, Organs(scheduler, cache, transport, device.executor), around.clock, send, number)
    if spec.modelling.jumps and not is_prefill:
        way = Way(partial(around.control.send_late, str(ref)), spec.timing.control_delay_s[0])
        worker.leap(way)
    return worker


@dataclass(frozen=True, slots=True)
class _Device:
    """`memory` [num_pages * mark_bytes] uint8 of the pool; None where there is none."""

    memory: NDArray[np.uint8] | None
    region: PoolRegion
    digests: PageDigests
    executor: FakeExecutor | BlankExecutor


def _device(is_prefill: bool, num_pages: int, around: Surroundings) -> _Device:
    spec, size = around.spec, around.spec.page_size
    cost = spec.timing.prefill_cost if is_prefill else spec.timing.decode_cost
    region = PoolRegion(0, num_pages, spec.mark_bytes)
    if spec.modelling.content == "none":
        nothing = np.zeros((num_pages, 0), dtype=np.uint8)
        return _Device(None, region, HostDigests(nothing), BlankExecutor(around.tape, cost, size, around.clock))
    pool = np.zeros((num_pages, size), dtype=np.uint64)
    memory = pool.reshape(-1).view(np.uint8)
    executor = FakeExecutor(Model(around.book, spec.vocab_size, size, cost), pool, around.clock)
    return _Device(memory, region, HostDigests(memory.reshape(num_pages, -1)), executor)
